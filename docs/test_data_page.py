"""Tests of docs/data.md: its folder of two datasets is read, and examples/my_math.py accepts what the page says.

Tests that need math-verify are skipped without it: pip install math-verify
"""

import re
import runpy
import sys
import textwrap
from types import SimpleNamespace

import pytest
from test_answers import DATA, box, each_case
from toy import ROOT, load_module, read_jsonl, train

import grpo

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
RULE = (ROOT / "examples" / "my_math.py").read_text(encoding="utf-8")
CONDITIONS = """\
    if isinstance(gold, Fraction) or UNSAFE.search(f"{gold} {given}"):
        return False
"""
CASES = read_jsonl(DATA / "verifier_cases.jsonl")


def rule_of(text, folder):
    """Import the lines as a module, and return its rule."""
    (folder / "my_math.py").write_text(text, encoding="utf-8")
    return load_module(folder / "my_math.py").is_correct


@pytest.fixture
def verified(monkeypatch):
    """Replace math-verify by a stub that accepts everything; return what it is asked to compare."""
    asked = []

    def parse(text, parsing_timeout):
        assert parsing_timeout == 1
        return text

    def verify(gold, given, timeout_seconds):
        assert timeout_seconds == 1
        asked.append((gold, given))
        return True

    monkeypatch.setitem(sys.modules, "math_verify", SimpleNamespace(parse=parse, verify=verify))
    return asked


def count(rule):
    """Return how many cases that the strict rule refuses are accepted: those that are right, and those that are not."""
    found = [row for row in CASES if not grpo.is_correct(row["completion"], row["gold"])]
    accepted = [row["expect"] for row in found if rule(row["completion"], row["gold"])]
    return accepted.count(1), accepted.count(0)


def test_the_counts_of_the_strict_rule_are_those_of_the_page():
    refused = [row["expect"] for row in CASES if not grpo.is_correct(row["completion"], row["gold"])]
    wanted = [row["expect"] for row in CASES].count(1)
    assert refused.count(0) == len(CASES) - wanted == 76  # no wrong answer is accepted
    assert (
        f"On {len(CASES)} hard cases it accepts no wrong answer, but it refuses {refused.count(1)} of the {wanted}"
        in TEXT
    )


def test_math_verify_is_asked_about_formulas(verified, tmp_path):
    rule = rule_of(RULE, tmp_path)
    assert rule(box("2\\sqrt 2"), "so \\boxed{\\sqrt{8}}") and rule(box("$2x$"), "x+x")
    assert verified == [("$\\sqrt{8}$", "$2\\sqrt 2$"), ("$x+x$", "$2x$")]
    assert not rule("no answer", "5") and rule(box("5"), "5.0") and len(verified) == 2
    with pytest.raises(ValueError, match="no column answer"):
        rule(box("5"), None)


# Numbers, words, chains of guesses, several formulas, bases, and what math-verify would compute for hours.
@each_case(r"""
51 | 17 * 3 ¦ 50 = 51 ¦ \neq 51 ¦ \geq 51 ¦ 51 \text{ or } 52
on | no
\sqrt{2} | \sqrt{3}=\sqrt{2} ¦ \sqrt{3}$ $\sqrt{2} ¦ \text{not }\sqrt{2} ¦ \sqrt{3} or \sqrt{2} ¦ 1E1000000000 ¦ 1e+1000
101_3 | 101_2
""")
def test_math_verify_is_not_asked_about_anything_else(answer, text, verified, tmp_path):
    assert not rule_of(RULE, tmp_path)(box(text), answer) and verified == []
    assert rule_of(RULE.replace(CONDITIONS, ""), tmp_path)(box(text), answer) and verified


@pytest.mark.usefixtures("verified")
def test_started_as_a_program_it_replaces_the_rule_of_reward_and_accuracy(tmp_path, monkeypatch):
    (tmp_path / "my_math.py").write_text(RULE, encoding="utf-8")
    monkeypatch.setattr(grpo, "is_correct", grpo.is_correct)  # so that it is put back
    monkeypatch.setattr(sys, "path", [*sys.path])
    seen = []

    def main(_args):
        seen.append((grpo.reward_fn(box("2x"), "x+x"), grpo.is_correct(box("2x"), "x+x")))

    monkeypatch.setattr(grpo, "main", main)
    monkeypatch.setattr(grpo, "parse_args", lambda: None)
    runpy.run_path(str(tmp_path / "my_math.py"), run_name="my_math")
    assert not seen and grpo.reward_fn(box("2x"), "x+x") == 0.0
    runpy.run_path(str(tmp_path / "my_math.py"), run_name="__main__")
    assert seen == [(1.0, True)]


def test_what_the_rule_accepts_is_what_the_page_says(tmp_path):
    pytest.importorskip("math_verify")
    rule = rule_of(RULE, tmp_path)
    right, wrong = count(rule)
    assert right > 0 and wrong == 0
    assert f"It accepts {right} of the 29 refused answers and none of the 76 wrong ones" in TEXT
    assert rule(box("2i+1"), "1+2i") and rule(box("\\{1,2\\}"), "\\{2,1\\}") and not rule(box("\\sqrt3"), "\\sqrt{2}")
    assert rule(box("2x + 3x"), "5x") and "the rule accepts `2x + 3x`" in TEXT


def test_what_math_verify_accepts_alone_is_what_the_page_says(tmp_path):
    pytest.importorskip("math_verify")
    assert RULE.count(CONDITIONS) == 1
    rule = rule_of(RULE.replace(CONDITIONS, ""), tmp_path)
    right, wrong = count(rule)
    assert f"Asked about everything, math-verify accepts {right} of the 29, but also {wrong} of the wrong ones" in TEXT
    assert rule(box("17 * 3"), "51") and rule(box("5 = 6"), "6")


def test_the_reward_with_parts_is_logged_as_the_page_says(tmp_path, monkeypatch):
    [example] = re.findall(r"^(    def reward_fn\(.*\n(?:        .*\n)+)", PAGE, re.MULTILINE)
    assert example.count("\n") <= 5
    names = {"is_correct": grpo.is_correct}
    exec(textwrap.dedent(example), names)
    assert names["reward_fn"]("<think>1+1=2</think>" + box("2"), "2") == {"right": 1.0, "format": 0.1}
    assert names["reward_fn"]("so it is <think>", "2") == {"right": 0.0, "format": 0.0}
    monkeypatch.setattr(grpo, "reward_fn", names["reward_fn"])
    [before, line] = train(grpo, tmp_path, num_steps=1, prompts_per_step=2, eval_prompts=4)
    found = re.findall("`((?:eval/)?reward/(?:right|format))`", PAGE)
    assert {"reward/right", "reward/format"} < {*found} < {*line} and len(found) == 4
    assert line["reward/mean"] == pytest.approx(line["reward/right"] + line["reward/format"])
    assert before["eval/reward/right"] == before["eval/accuracy"]
    [sample] = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert sample["rewards"] == [names["reward_fn"](text, sample["answer"]) for text in sample["completions"]]


def test_a_folder_joins_the_datasets_of_its_subfolders(monkeypatch):
    monkeypatch.setattr(grpo, "read_rows", lambda rows, *_: [row | {"prompt_ids": row["prompt"]} for row in rows])
    args = grpo.Args(dataset=str(ROOT / "data" / "word_problems"), eval_prompts=10_000)
    train_rows, eval_rows = grpo.load_rows(args, SimpleNamespace(decode=str))
    found = [
        len(read_jsonl(path))
        for split in ("train", "test")
        for path in (ROOT / "data" / "word_problems").glob(f"*/{split}.jsonl")
    ]
    assert len(found) == 4 and [len(train_rows), len(eval_rows)] == [sum(found[:2]), sum(found[2:])]
