"""Tests of examples/sorting: its data, its rewards, and a short run.sh that is called again for more steps."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
from processes import run_file, run_shell
from toy import ROOT, load_module, read_jsonl

rewards, make = (load_module(ROOT / "examples" / "sorting" / f"{name}.py") for name in ("rewards", "make"))


@pytest.mark.parametrize("answer", ["0 1 2", "0 0 1", "1 1 1"])
def test_only_the_repaired_reward_and_exact_match_have_the_sorted_list_alone_at_the_top(answer):
    words, longest = ["0", "1", "2", "x"], len(answer.split()) + 1
    texts = [" ".join(text) for n in range(longest + 1) for text in itertools.product(words, repeat=n)]
    for name, reward in rewards.REWARDS.items():
        assert reward(answer, answer) == 1
        hacked = [text for text in texts if text != answer and reward(text, answer) >= 1]
        assert bool(hacked) == (name == "inclusion"), (name, hacked[:5])


def test_what_the_rewards_pay_by_hand():
    assert rewards.inclusion("1 2 5 5 5 5", "1 2 5") == (3 + 5) / 5
    assert rewards.repaired("1 2 5 5 5 5", "1 2 5") == (3 + 5) / 11
    assert rewards.repaired("1 5 2", "1 2 5") == (3 + 1) / 5
    assert rewards.repaired("1 2 x 5", "1 2 5") == (3 + 1) / 7  # neither neighbour of x is in order


def test_the_shell_script_trains_goes_on_and_draws(tmp_path, monkeypatch):
    trained = tmp_path / "base" / "checkpoint-000300"  # the run looks finished, so run.sh does not train it
    shutil.copytree(ROOT / "models" / "tiny", trained)
    monkeypatch.chdir(tmp_path)
    flags = "--eval-prompts 6 --prompts-per-step 4 --group-size 4 --minibatch-size 8 --max-completion-length 14"
    settings = {"FOLDER": str(tmp_path), "SEEDS": "3", "REWARDS": "inclusion", "FLAGS": flags}

    def do(words):
        run_file(ROOT / words[0], *words[1:])
        return 0

    for steps in ("1", "2"):  # the run of one step is resumed
        status, said, asked = run_shell(ROOT / "examples/sorting/run.sh", do=do, STEPS=steps, **settings)
        assert status == 0, said
        assert [Path(words[0]).name for words in asked] == ["make.py", "rewards.py", "plot.py"]
    folder = tmp_path / "inclusion__3"
    lines = read_jsonl(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2] and 0 <= lines[2]["eval/accuracy"] <= 1
    for row in read_jsonl(folder / "samples.jsonl"):
        assert row["rewards"] == [rewards.inclusion(text, row["answer"]) for text in row["completions"]]
    args = json.loads((folder / "args.json").read_text())
    assert args["seed"] == 3 and args["model"] == str(trained)
    assert (tmp_path / "sorting.png").is_file() and not (tmp_path / "base" / "metrics.jsonl").exists()
