"""Tests of docs/data.md: rewards with parts, a folder of datasets, and the rule of examples/my_math.py.

One test needs math-verify and is skipped without it: pip install math-verify
"""

import re
import runpy
import sys
import textwrap
from types import SimpleNamespace

import pytest
from toy import ROOT, load_module, read_jsonl, train

import grpo

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
RULE = ROOT / "examples" / "my_math.py"


def box(text):
    return "\\boxed{" + text + "}"


@pytest.fixture
def asked(monkeypatch):
    """Replace math-verify by a stub that accepts everything; return what it is asked to compare."""
    asked = []

    def verify(gold, given, **_):
        asked.append((gold, given))
        return True

    monkeypatch.setitem(sys.modules, "math_verify", SimpleNamespace(parse=lambda text, **_: text, verify=verify))
    return asked


def test_math_verify_is_asked_about_formulas(asked):
    rule = load_module(RULE).is_correct
    assert rule(box("2\\sqrt 2"), "so \\boxed{\\sqrt{8}}") and rule(box("$2x$"), "x+x")
    assert asked == [("$\\sqrt{8}$", "$2\\sqrt 2$"), ("$x+x$", "$2x$")]
    assert rule(box("5"), "5.0") and not rule("no answer", "5") and len(asked) == 2


# Numbers, words, chains of guesses, several formulas, bases, and what math-verify would compute for hours.
@pytest.mark.parametrize(
    "answer, text",
    [
        ("51", "17 * 3"),
        ("51", "50 = 51"),
        ("on", "no"),
        (r"\sqrt{2}", r"\sqrt{3}=\sqrt{2}"),
        (r"\sqrt{2}", r"\sqrt{3}$ $\sqrt{2}"),
        (r"\sqrt{2}", r"\sqrt{3} or \sqrt{2}"),
        (r"\sqrt{2}", "1E1000000000"),
        ("101_3", "101_2"),
    ],
)
def test_math_verify_is_not_asked_about_anything_else(answer, text, asked):
    assert not load_module(RULE).is_correct(box(text), answer) and asked == []


@pytest.mark.usefixtures("asked")
def test_started_as_a_program_it_replaces_the_rule_of_reward_and_accuracy(monkeypatch):
    monkeypatch.setattr(grpo, "is_correct", grpo.is_correct)  # so that it is put back
    monkeypatch.setattr(sys, "path", [*sys.path])
    seen = []
    monkeypatch.setattr(grpo, "main", lambda _: seen.append((grpo.reward_fn(box("2x"), "x+x"), grpo.is_correct)))
    monkeypatch.setattr(grpo, "parse_args", lambda: None)
    names = runpy.run_path(str(RULE), run_name="__main__")
    assert seen == [(1.0, names["is_correct"])]


def test_with_math_verify_the_rule_accepts_more_and_nothing_wrong():
    pytest.importorskip("math_verify")
    rule = load_module(RULE).is_correct
    cases = read_jsonl(ROOT / "tests" / "data" / "verifier_cases.jsonl")
    refused = [row for row in cases if not grpo.is_correct(row["completion"], row["gold"])]
    accepted = [row["expect"] for row in refused if rule(row["completion"], row["gold"])]
    assert accepted and all(accepted)
    assert rule(box("2i+1"), "1+2i") and not rule(box("\\sqrt3"), "\\sqrt{2}")


def test_the_reward_with_parts_is_logged(tmp_path, monkeypatch):
    [example] = re.findall(r"^(    def reward_fn\(.*\n(?:        .*\n)+)", PAGE, re.MULTILINE)
    names = {"is_correct": grpo.is_correct}
    exec(textwrap.dedent(example), names)
    reward_fn = names["reward_fn"]
    assert reward_fn("<think>1+1=2</think>" + box("2"), "2") == {"right": 1.0, "format": 0.1}
    assert reward_fn("so it is <think>", "2") == {"right": 0.0, "format": 0.0}
    monkeypatch.setattr(grpo, "reward_fn", reward_fn)
    [before, line] = train(grpo, tmp_path, num_steps=1, prompts_per_step=2, eval_prompts=4)
    assert line["reward/mean"] == pytest.approx(line["reward/right"] + line["reward/format"])
    assert before["eval/reward/right"] == before["eval/accuracy"]
    [sample] = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert sample["rewards"] == [reward_fn(text, sample["answer"]) for text in sample["completions"]]


def test_a_folder_joins_the_datasets_of_its_subfolders(monkeypatch):
    monkeypatch.setattr(grpo, "read_rows", lambda rows, *_: [row | {"prompt_ids": row["prompt"]} for row in rows])
    folder = ROOT / "data" / "word_problems"
    found = grpo.load_rows(grpo.Args(dataset=str(folder), eval_prompts=10_000), SimpleNamespace(decode=str))
    for rows, split in zip(found, ("train", "test")):
        files = [*folder.glob(f"*/{split}.jsonl")]
        assert len(files) == 2 and len(rows) == sum(len(read_jsonl(path)) for path in files)
