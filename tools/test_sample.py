"""Tests of tools/sample.py: it prints and keeps what a script samples and rewards, and other scripts train on it."""

import random
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import sample
from toy import FORMS, ROOT, TINY, make_folder, make_tokenizer, parse, read_jsonl, write_jsonl

import dpo
import grpo
import grpo_tools
import sft

TRAIN = read_jsonl(ROOT / "data/addition/train.jsonl")
PARTS = """
import grpo

def reward_fn(completion, answer):
    return {"right": grpo.is_correct(completion, answer), "short": len(completion) / 100}
"""
ENVIRONMENT = """
import grpo_tools

class Environment(grpo_tools.Environment):
    def reward(self, completion):
        return {"right": super().reward(completion), "short": len(completion) / 100}
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(grpo, "reward_fn", grpo.reward_fn)  # --script may replace these
    monkeypatch.setattr(grpo_tools, "Environment", grpo_tools.Environment)


def run(*flags):
    sys.argv = ["sample.py", "--out", "a.jsonl", *map(str, flags)]
    sample.main(sample.parse_args())
    return read_jsonl("a.jsonl")


def test_kept_and_printed_rewards_are_those_of_the_rule(capsys):
    rows = run("--split", "train", "--num-prompts", 12, "--rollout-batch-size", 20)
    shown = capsys.readouterr().out
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in TRAIN[:12] for _ in range(4)]
    answers = [row["answer"] for row in TRAIN[:12] for _ in range(4)]
    right = [grpo.is_correct(row["completion"], answer) for row, answer in zip(rows, answers)]
    assert [row["reward"] for row in rows] == right and 0 < sum(right) < 48
    for start in range(0, 48, 4):
        lines = [f"{row['reward']:6.2f}  {row['completion']}" for row in rows[start : start + 4]]
        printed = "\n".join([rows[start]["prompt"], *lines]) + "\n"
        assert (printed in shown) == (start < 8 * 4)  # --show 8
    assert shown.endswith(f"48 completions, 0 of them cut off\nmean reward {sum(right) / 48:.3f}\n")


@pytest.mark.parametrize("name, text", [("my_parts", PARTS), ("my_environment", ENVIRONMENT)])
def test_a_reward_of_ones_own_in_parts_counts_as_their_sum(name, text):
    Path(f"{name}.py").write_text(text)
    rows = run("--script", f"{name}.py", "--split", "train", "--num-prompts", 8)
    for row, source in zip(rows, [row for row in TRAIN[:8] for _ in range(4)]):
        right = grpo.is_correct(row["completion"], source["answer"])
        assert row["reward"] == right + len(row["completion"]) / 100


def test_prompts_of_ones_own_have_no_rewards_and_samples_are_of_the_seed(capsys):
    flags = ["--prompt", "62+99+71+69=", "--prompt", "1+2=", "--script", "grpo_tools"]
    rows = run(*flags, "--num-samples", 8)
    assert [row["prompt"] for row in rows] == ["62+99+71+69="] * 8 + ["1+2="] * 8
    assert all(row["reward"] is None for row in rows) and any("62+99=161;" in row["completion"] for row in rows)
    printed = capsys.readouterr().out
    assert f"62+99+71+69=\n     -  {rows[0]['completion']}\n" in printed and "mean reward" not in printed
    assert run(*flags, "--num-samples", 8) == rows != run(*flags, "--num-samples", 8, "--seed", 2)
    assert len(run(*flags, "--temperature", 0)) == 2
    run("--prompt", "1+2=", "--max-completion-length", 1)
    assert " [cut off]\n" in capsys.readouterr().out


def test_sft_reads_back_the_prompts_that_were_sampled_from(monkeypatch):
    tokenizer = make_tokenizer(*FORMS["chatml"])
    write_jsonl("rows.jsonl", [{"question": f"{number}+1=", "answer": "2"} for number in range(1, 16)])
    seen, generate = [], grpo.generate
    monkeypatch.setattr(grpo, "generate", lambda *given: seen.append(given) or generate(*given))
    run("--model", make_folder("model", tokenizer), "--dataset", "rows.jsonl", "--max-completion-length", 24)
    prompts = seen[0][1]
    assert "put your final answer within \\boxed{}." in tokenizer.decode(prompts[0])
    args = sft.Args(dataset="a.jsonl", max_prompt_length=512, max_completion_length=512, eval_prompts=0)
    assert [row["prompt_ids"] for row in sft.load_rows(args, tokenizer)[0]] == prompts


GROUP = [("a", 1.0, False), ("b", 0.0, False), ("a", 1.0, False), ("c", 1.0, True), ("d", 0.0, True), (" ", 0.0, False)]
GROUP += [("e", 1.5, False), ("f", 0.5, False), ("f", 0.5, False), ("g", 0.0, False)]


def keep(form, seed=0, least=1.0, per_prompt=None):
    given = SimpleNamespace(keep=form, min_reward=least, per_prompt=per_prompt)
    return sample.keep_rows("1+1=", GROUP, given, random.Random(seed))


def test_right_keeps_distinct_completions_of_the_least_reward_that_are_not_cut_off():
    assert sorted((row["completion"], row["reward"]) for row in keep("right")) == [("a", 1.0), ("e", 1.5)]
    assert sorted(row["completion"] for row in keep("right", least=0.5)) == ["a", "e", "f"]
    drawn = [[row["completion"] for row in keep("right", seed, per_prompt=1)] for seed in range(20)]
    assert ["a"] in drawn and ["e"] in drawn and {len(texts) for texts in drawn} == {1}


def test_pairs_are_of_a_right_and_a_wrong_completion_each_used_once():
    drawn = [[(row["chosen"], row["rejected"]) for row in keep("pairs", seed)] for seed in range(40)]
    for pairs in drawn:
        assert sorted(chosen for chosen, _ in pairs) == ["a", "e"] and len({rejected for _, rejected in pairs}) == 2
    assert {rejected for pairs in drawn for _, rejected in pairs} == {"b", "f", "g"}


@pytest.mark.parametrize("form, script", [("right", sft), ("pairs", dpo)])
def test_a_script_trains_on_the_rows_that_are_kept(form, script, capsys):
    flags = ["--split", "train", "--num-prompts", 16, "--num-samples", 8]
    kept = run(*flags, "--keep", form, "--per-prompt", 2)
    gave = Counter(row["prompt"] for row in kept)
    said = f"written: a.jsonl, {len(kept)} rows; {16 - len(gave)} of 16 prompts gave none\n128 completions"
    assert said in capsys.readouterr().out and max(gave.values()) == 2
    sizes = {"num_steps": 1, "minibatch_size": 8, "eval_prompts": 0, "run_dir": "run"}
    script.main(parse(script, model=TINY, tiny=True, dataset="a.jsonl", **sizes))
    assert f"{len(kept)} to train on, 0 held out" in capsys.readouterr().out


def test_the_file_is_there_when_it_is_whole(monkeypatch):
    def fail(*_):
        assert Path("a.jsonl.unfinished").exists() and not Path("a.jsonl").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(grpo, "sample_completions", fail)
    with pytest.raises(KeyboardInterrupt):
        run("--num-prompts", 2)
    assert not Path("a.jsonl").exists()
