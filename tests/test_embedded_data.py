"""Bundled data sets are what they name, and their make.py writes them: python -m pytest tests/test_embedded_data.py"""

import re

import pytest
from processes import run_file
from toy import ROOT, read_jsonl

import grpo

DATA = ROOT / "data"


@pytest.mark.parametrize("name, counts", [("addition", [4096, 512, 20_000]), ("long", [8192, 512, 40_000])])
def test_make_rebuilds_embedded_data_of_different_prompts_and_right_answers(tmp_path, name, counts):
    run_file(DATA / name / "make.py", tmp_path)
    rows = []
    for file in ("train.jsonl", "test.jsonl", "sft.jsonl"):
        rows += read_jsonl(tmp_path / file)
        if (DATA / name / file).exists():
            assert (tmp_path / file).read_bytes() == (DATA / name / file).read_bytes()
    assert len(rows) == sum(counts) == len({row["prompt"] for row in rows})
    for row in rows:
        answer = str(sum(map(int, row["prompt"].removesuffix("=").split("+"))))
        assert row.get("answer") == answer or grpo.reward_fn(row["completion"], answer) == 1.0


def kind_of(prompt, completion):
    """Add the sum up again and say what a completion shows, and whether it is right."""
    total, *others = map(int, prompt.removesuffix("=").split("+"))
    steps = []
    for number in others:
        steps.append(f"{total}+{number}={total + number}")
        total += number
    shown, answer = re.fullmatch(r"(?:<think>(.*)</think>)?\\boxed\{(.*)\}", completion).groups()
    if shown is None:
        return "right answer" if answer == str(total) else "wrong answer"
    return "right work" if (shown, answer) == (";".join(steps), str(total)) else "wrong work"


def test_embedded_pairs_are_of_the_kinds_that_they_name():
    train, test = (read_jsonl(DATA / "preferences" / f"{name}.jsonl") for name in ("train", "test"))
    for row in train + test:
        kinds = [kind_of(row["prompt"], row[name]) for name in ("chosen", "rejected")]
        assert row["kind"] == ", ".join(kinds)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
