"""benchmark/real_model.py, its page and its data: python -m pytest benchmark/test_real_model.py"""

import importlib
import json
import re
from statistics import fmean

import pytest
import real_model
import tyro
from toy import ROOT, load_module, read_jsonl

import grpo


@pytest.mark.parametrize("path", real_model.PAGES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_pages_are_what_the_csv_makes(path):
    page = path.read_text()
    assert page == real_model.write_page(page, real_model.read_csv())


@pytest.mark.parametrize("name", real_model.TABLES)
def test_every_table_is_on_a_page(name):
    assert any(f"<!-- {name} -->\n" in path.read_text() for path in real_model.PAGES)


@pytest.mark.parametrize("name", real_model.RUNS)
def test_commands_are_of_flags_that_there_are(name):
    command = real_model.command_of(name, 1)
    first = command.index("--model")
    script = "grpo" if command[1:first] == ["examples/one_sentence.py"] else command[first - 1].removesuffix(".py")
    args = tyro.cli(importlib.import_module(script).Args, args=command[first:])
    assert args.seed == 1 and args.precision == real_model.RUNS[name].precision


WORDS = ROOT / "data" / "word_problems"
SIZES = {"word_problems/svamp/train": 700, "word_problems/svamp/test": 300, "word_problems/mawps/train": 1504}
SIZES |= {"word_problems/mawps/test": 200, "manners/train": 994, "manners/test": 100}
make = load_module(WORDS / "make.py")


def test_no_text_is_in_two_files_not_even_with_other_numbers():
    prompts = []
    for name, size in SIZES.items():
        rows = read_jsonl(ROOT / "data" / f"{name}.jsonl")
        assert len(rows) == size
        normalise = make.without_numbers if name.startswith("word_problems") else str
        prompts.append({normalise(row["prompt"]) for row in rows})
    assert sum(map(len, prompts)) == len(set().union(*prompts))


@pytest.mark.parametrize("name", ["train", "test"])
def test_every_equation_is_right(name):
    for row in read_jsonl(WORDS / "mawps" / f"{name}.jsonl"):
        *equations, box = row["answer"].splitlines()
        for equation in equations:
            left, right = equation.split(" = ")
            assert eval(left) == pytest.approx(float(right), rel=1e-4, abs=1e-5)
        assert box == rf"\boxed{{{right}}}"
        assert grpo.is_correct(row["answer"], row["answer"]) and grpo.is_correct(box, row["answer"])


def test_svamp_is_read_with_one_sentence_of_question_and_numbers_without_needless_digits(tmp_path):
    rows = [{"Body": "He had 3 pens", "Question": "How many are left?", "Answer": 2.0}]
    rows.append({"Body": "He had 3 pens.", "Question": "How many are left?", "Answer": 2.5})
    (tmp_path / "svamp.json").write_text(json.dumps(rows))
    assert make.read_svamp(tmp_path / "svamp.json") == [
        {"prompt": "He had 3 pens, how many are left?", "answer": "2"},
        {"prompt": "He had 3 pens. How many are left?", "answer": "2.5"},
    ]


def test_mawps_is_read_with_its_equation_which_must_give_its_answer(tmp_path):
    lines = ["Question,Numbers,Equation,Answer", "number0 and number1 ?,3.0 4.0,- number1 number0,1"]
    lines += ["number0 and number1 ?,3.0 4.0,+ number1 number0,8", "A number0 .,0.5,* 100.0 number0,50.0"]
    (tmp_path / "mawps.csv").write_text("\n".join(lines))
    assert make.read_mawps(tmp_path / "mawps.csv") == [
        {"prompt": "3 and 4?", "answer": "4 - 3 = 1\n\\boxed{1}"},
        {"prompt": "A 0.5.", "answer": "100 * 0.5 = 50\n\\boxed{50}"},
    ]


def test_dapo_learns_least_of_the_instructions():
    trained = real_model.trained_on_instructions(real_model.read_csv())
    ends = {script: fmean(reward for done, reward in found if 1536 < done <= 2048) for script, found in trained.items()}
    assert len(ends) == 6 and min(ends, key=ends.get) == "dapo.py"
    assert all(found[-1][0] >= 2048 for found in trained.values())


@pytest.mark.parametrize("page", ("README.md", "docs/real_model.md", "examples/README.md"))
def test_prose_has_the_rise_of_the_table(page):
    rows = real_model.read_csv()
    accuracy = real_model.accuracy_by_kind(rows)
    before, after = accuracy["before"]["all"], accuracy["`grpo.py`, step 20"]["all"]
    text = " ".join((ROOT / page).read_text().split())
    assert re.search(f"rises? from {before} to {after} ", text)
    if page == "docs/real_model.md":
        baseline = accuracy["`sft.py` on right samples"]["all"]
        assert f"the greedy accuracy of `sft.py` rises from {before} to {baseline}." in text
        samples = fmean(row["samples"] for row in rows if row["run"] == "instructions_sft" and "samples" in row)
        assert f"about {samples:.0f} right samples" in text
        prompt, *completions = real_model.completions_of("at most")
        first, last = (completion["completion"] for completion in completions)
        assert f'"{" ".join(prompt.split())}" goes from "{first}" to "{last}"' in text


def test_findings_on_the_page_are_those_of_the_csv():
    rows = real_model.read_csv()
    text = " ".join((ROOT / "docs" / "real_model.md").read_text().split())

    def change(look, metric, before, after):
        runs = ((before, look), (after, look.removesuffix(", calculator") if "tools" in after else look))
        found = ([row[metric] for row in rows if (row["run"], row.get("look")) == run] for run in runs)
        return "from {:.3f} to {:.3f}".format(*map(fmean, found))

    svamp = change("SVAMP, calculator", "eval/accuracy", "sft", "grpo_tools")
    assert f"raises accuracy on SVAMP, on which it trains, {svamp}*" in text
    mawps = change("MAWPS, calculator", "eval/accuracy", "sft", "grpo_tools")
    assert f"Accuracy on MAWPS, on which the model was fine-tuned first, falls {mawps}." in text
    assert f"pass@16 falls {change('16 samples', 'eval/pass@16', 'sft', 'grpo')}," in text
    evaluated = [found for title, found in real_model.instructions_by_step(rows).items() if "grpo" in title]
    recall = "from {:.3f} to {:.3f}".format(*(fmean(row["recall"] for row in evaluated[end]) for end in (0, -1)))
    assert f"the share of the reference answer's words in the completions falls {recall}." in text
    errors = next(line for line in real_model.errors_table(rows).splitlines() if "step 20" in line)[1:-1].split("|")
    assert f"Its standard error is {errors[2]} over instructions and {errors[3]} over seeds." in text
    scores = [[row["eval/score"] for row in rows if row["seed"] == seed and "eval/score" in row] for seed in (1, 2, 3)]
    assert "raises the score of its reward model with each seed" in text
    assert all(after > before for before, after in scores)
    shares = real_model.values_of(rows, "grpo_tools", "SVAMP", "equations/differences")
    before = real_model.values_of(rows, "sft", "SVAMP, calculator", "equations/differences")
    assert "it subtracts more often" in text and min(shares) > max(before)


def test_times_are_those_of_the_csv():
    text = " ".join((ROOT / "docs" / "real_model.md").read_text().split())
    rows = [row for row in real_model.read_csv() if row["run"] == "instructions"]
    minutes = [sum(row.get("perf/step_seconds", 0) for row in rows if row["seed"] == seed) / 60 for seed in (1, 2, 3)]
    assert f"took {min(minutes):.0f} to {max(minutes):.0f} minutes" in text
    whole = [row["minutes"] for row in rows if row.get("look") == "whole"]
    assert f"runs took {min(whole):.0f} to {max(whole):.0f} minutes." in text
    whole = [row for row in real_model.read_csv() if row["seed"] == 1 and row.get("look") == "whole"]
    in_bfloat16, in_float32 = (
        next(row["minutes"] for row in whole if row["run"] == name) for name in ("grpo", "grpo_float32")
    )
    assert f"(`grpo.py` on MAWPS: {in_bfloat16:.0f} and {in_float32:.0f} minutes)" in text
