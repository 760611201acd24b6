"""Tests of examples/sorting: its data, its rewards, and a short run.sh that is called again for more steps."""

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
from processes import run_file, run_shell
from toy import ROOT, load_module, read_jsonl

import sft

FLAGS = "--eval-prompts 6 --prompts-per-step 4 --group-size 4 --minibatch-size 8 --max-completion-length 14"


rewards, make = (load_module(ROOT / "examples" / "sorting" / f"{name}.py") for name in ("rewards", "make"))


def test_the_data_are_the_same_bytes_and_half_of_them_sorted(tmp_path):
    make.main(tmp_path / "one")
    make.main(tmp_path / "two")
    seen = []
    for name, count in make.FILES.items():
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
        rows = read_jsonl(tmp_path / "one" / name)
        digits = [row["prompt"].rstrip("=").split() for row in rows]
        right = [row.get("answer", row.get("completion")) == " ".join(sorted(d)) for row, d in zip(rows, digits)]
        assert len(rows) == count and {len(d) for d in digits} == {4, 5, 6}
        assert all(right) if name != "sft.jsonl" else 0.5 < sum(right) / count < 0.6  # equal numbers may be swapped
        seen += [row["prompt"] for row in rows]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("answer", ["0 1 2", "0 0 1", "1 1 1", "0 1 1 2"])
def test_only_the_repaired_reward_and_exact_match_have_the_sorted_list_alone_at_the_top(answer):
    words, longest = ["0", "1", "2", "x"], len(answer.split()) + 1
    texts = [" ".join(text) for n in range(longest + 1) for text in itertools.product(words, repeat=n)]
    assert len(texts) == len(set(texts)) and answer in texts
    for name, reward in rewards.REWARDS.items():
        assert reward(answer, answer) == 1
        hacked = [text for text in texts if text != answer and reward(text, answer) >= 1]
        assert bool(hacked) == (name in ("position", "inclusion")), (name, hacked[:5])
    # Partial credit: a list with a missing number earns more than one without any number.
    assert 0 == rewards.repaired("x x x", "0 1 2") < rewards.repaired("0 1", "0 1 2") < 1


def test_what_the_rewards_pay_by_hand():
    assert rewards.position("1 2 5 5 5 5", "1 2 5") == 1 and rewards.position("2 5", "1 2 5") == 0
    assert rewards.inclusion("1 2 5 5 5 5", "1 2 5") == (3 + 5) / 5
    assert rewards.repaired("1 2 5 5 5 5", "1 2 5") == (3 + 5) / 11
    assert rewards.repaired("1 5 2", "1 2 5") == (3 + 1) / 5
    assert rewards.repaired("1 2 x 5", "1 2 5") == (3 + 1) / 7  # neither neighbour of x is in order


def test_the_shell_script_trains_goes_on_and_shows(tmp_path, monkeypatch):
    line = re.search(r'"python sft.py" \\\n *"(.*)"', (ROOT / "examples" / "sorting" / "run.sh").read_text())[1]
    flags = re.findall(r"--([a-z-]+)", line)  # of the base model, which this test does not train
    assert len(flags) == 4 and {flag.replace("-", "_") for flag in flags} <= vars(sft.Args()).keys()
    base = tmp_path / "base"
    trained = base / "checkpoint-000300"  # the run looks finished, so run.sh does not train it
    shutil.copytree(ROOT / "models" / "tiny", trained)
    monkeypatch.chdir(tmp_path)
    settings = {"FOLDER": str(tmp_path), "SEEDS": "3", "REWARDS": "inclusion", "FLAGS": FLAGS}

    def run(**changes):
        told = []

        def do(words):
            told.append(run_file(ROOT / words[0], *words[1:]))
            return 0

        status, said, asked = run_shell(ROOT / "examples/sorting/run.sh", do=do, **settings, **changes)
        assert status == 0, said
        assert [Path(words[0]).name for words in asked] == ["make.py", "rewards.py", "show.py"]
        return told[-1]

    run(STEPS="1")
    folder = tmp_path / "inclusion__3"
    first = read_jsonl(folder / "metrics.jsonl")
    told = run(STEPS="2")  # the run of one step is resumed
    lines = read_jsonl(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2] and lines[:2] == first
    samples = read_jsonl(folder / "samples.jsonl")
    assert [row["step"] for row in samples] == [1, 2] and 0 <= lines[2]["eval/accuracy"] <= 1
    for row in samples:
        assert row["rewards"] == [rewards.inclusion(text, row["answer"]) for text in row["completions"]]
    args = json.loads((folder / "args.json").read_text())
    assert args["seed"] == 3 and args["model"] == str(trained)
    assert (tmp_path / "sorting.png").is_file() and not (base / "metrics.jsonl").exists()
    assert "inclusion__3: " in told and "| inclusion | eval/accuracy | 1 | 2 |" in told
