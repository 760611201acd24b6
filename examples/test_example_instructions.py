"""The reward of examples/instructions.py, and its data: python -m pytest examples/test_example_instructions.py"""

import importlib
import json
import subprocess
import sys

import pytest
from processes import run_file
from toy import ROOT, SCRIPTS, load_module, read_jsonl

instructions = load_module(ROOT / "examples" / "instructions.py")
make = load_module(ROOT / "data" / "constraints" / "make.py")
DATA = ROOT / "data" / "constraints"
ROWS = {split: read_jsonl(DATA / f"{split}.jsonl") for split in ("train", "test")}
INSTRUCTION = "Name three fruits."

# (kind, value, a completion that meets the constraint, one that does not)
CASES = [
    ("at most", 5, "Apples, pears and plums.", "Three fruits are apples, pears and plums."),
    ("include", "river", "Apples by the River are sweet.", "Apples and rivers are nice."),
    ("lowercase", None, "apples, pears and plums.", "Apples, pears and plums."),
    ("end", "That is all.", "Apples, pears and plums. That is all.", "That is all. Apples, pears and plums."),
    ("quotes", None, '"Apples, pears and plums."', '"Apples", pears and plums.'),
    ("bullets", 2, "* an apple\n* a pear", "* an apple\n* a pear\n* a plum"),
    ("no commas", None, "Apples and pears and plums.", "Apples, pears and plums."),
    ("begin", "Sure", "Sure: apples, pears and plums.", "Surely apples, pears and plums."),
]


def is_correct(completion, kind, value):
    constraint = make.TEXTS[kind].format(value)
    answer = json.dumps({"kind": kind, "value": value, "instruction": INSTRUCTION, "constraint": constraint})
    return instructions.is_correct(completion, answer)


@pytest.mark.parametrize("kind, value, good, bad", CASES)
def test_a_completion_is_right_if_it_meets_its_constraint(kind, value, good, bad):
    assert is_correct(good, kind, value)
    assert is_correct(f"\n {good} \n", kind, value)
    assert not is_correct(bad, kind, value)


@pytest.mark.parametrize(
    "kind, value, completion",
    [
        ("end", "That is all.", "That is all."),  # the required phrase alone
        ("include", "river", "River river river, yes."),
        ("include", "river", 'Include the word "river" in your answer.'),  # the constraint
        ("include", "river", 'Including the word "river" in my answer.'),
        ("bullets", 2, "* an apple and a pear\n* An apple and a pear!"),  # one point, twice
        ("quotes", None, '"Yes."'),
        ("at most", 5, "Yes yes yes."),  # the same word again
        ("no commas", None, "Name three fruits. Do not use any commas in your answer."),  # the prompt
        ("lowercase", None, ""),
    ],
)
def test_what_is_no_answer_of_its_own_earns_nothing(kind, value, completion):
    assert not is_correct(completion, kind, value)


def test_the_files_are_what_make_writes(tmp_path):
    subprocess.run([sys.executable, DATA / "make.py", tmp_path], check=True, stdout=subprocess.DEVNULL)
    for split in ROWS:
        assert (tmp_path / f"{split}.jsonl").read_bytes() == (DATA / f"{split}.jsonl").read_bytes()


@pytest.mark.parametrize("name", [*SCRIPTS, "grpo_tools", "gkd"])
def test_every_script_takes_the_defaults_of_the_example_and_flags_come_later(name, monkeypatch):
    script, parsed = importlib.import_module(name), []
    monkeypatch.setattr(script, "main", parsed.append)
    monkeypatch.setattr(script, "is_correct", script.is_correct)  # it replaces this
    monkeypatch.setattr(sys, "argv", ["instructions.py", name, "--model", "mine", "--num-steps", "3"])
    instructions.main()
    [args] = parsed
    assert (args.model, args.num_steps, args.max_prompt_length) == ("mine", 3, 160)
    assert args.prompts_per_step == (64 if name == "gkd" else 16)
    assert getattr(args, "minibatch_size", 64) == 64 and getattr(args, "kl_coef", 0.0) == 0.0


def test_a_run_counts_constraints(tmp_path):
    """With a bundled model, which can only add: the reward is 0 or 1, and accuracy counts the same."""
    flags = "--prompts-per-step 2 --num-steps 1 --eval-prompts 4 --minibatch-size 16 --max-prompt-length 200"
    flags += " --max-completion-length 48"
    run_file(ROOT / "examples" / "instructions.py", "gspo", *flags.split(), "--run-dir", tmp_path / "run")
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["eval/accuracy"] == lines[-1]["eval/reward"]
    for row in read_jsonl(tmp_path / "run" / "samples.jsonl"):
        assert row["rewards"] == [instructions.is_correct(text, row["answer"]) for text in row["completions"]]
