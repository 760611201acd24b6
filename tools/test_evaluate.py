"""Tests of tools/evaluate.py: it agrees with the evaluations of a run, and pass@k with the subsets of the samples."""

import itertools
import re
import statistics
import sys

import evaluate
import pytest
from toy import ROOT, read_jsonl, train, write_jsonl

import gkd
import grpo
import gspo
import sft

OWN = "def is_correct(completion, answer):\n    return completion.endswith('0}')\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(grpo, "is_correct", grpo.is_correct)  # --script may replace it


def run(capsys, *flags):
    """Return the printed table as {name: (mean, standard error)}, and the rows of the file."""
    sys.argv = ["evaluate.py", "--out", "a.jsonl", *map(str, flags)]
    evaluate.main()
    printed = capsys.readouterr().out
    table = re.findall(r"^(greedy accuracy|pass@\d+) +(\S+) +(\S+)$", printed, re.MULTILINE)
    return {name: (float(mean), float(error)) for name, mean, error in table}, read_jsonl("a.jsonl")


def share_with_a_correct_one(results, k):
    """Return the share of all subsets of k results that have a correct one."""
    subsets = list(itertools.combinations(results, k))
    return sum(map(any, subsets)) / len(subsets)


@pytest.mark.parametrize("num_correct", range(7))
def test_pass_at_k_is_the_share_of_the_subsets_with_a_correct_one(num_correct):
    results = [place < num_correct for place in range(6)]
    for k in range(1, 7):
        expected = share_with_a_correct_one(results, k)
        assert evaluate.pass_at_k(6, num_correct, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("script", [grpo, gkd])
def test_greedy_accuracy_is_that_of_the_run_and_the_table_that_of_the_file(script, tmp_path, capsys):
    lines = train(script, tmp_path, eval_prompts=12)
    flags = ["--script", script.__name__, "--model", "run/checkpoint-000004", "--samples", 4]
    table, rows = run(capsys, *flags)
    assert table["greedy accuracy"][0] == round(lines[-1]["eval/accuracy"], 3)
    assert [row["temperature"] for row in rows] == [0.0] * 12 + [1.0] * 48
    for row in rows:
        assert row["correct"] == grpo.is_correct(row["completion"], row["answer"])
    correct = [[row["correct"] for row in rows[start : start + 4]] for start in range(12, 60, 4)]
    expected = {"greedy accuracy": [row["correct"] for row in rows[:12]]}
    for k in (1, 2, 4):
        expected[f"pass@{k}"] = [share_with_a_correct_one(results, k) for results in correct]
    assert [*table] == [*expected]
    for name, values in expected.items():
        error = statistics.stdev(values) / len(values) ** 0.5
        assert table[name] == pytest.approx((statistics.fmean(values), error), abs=6e-4)


def test_a_checkpoint_brings_the_settings_of_its_run_but_no_data_set_of_another_script(tmp_path):
    """Flags go first, then the run of sft.py, then --tiny."""
    train(sft, tmp_path, num_steps=1, save_every=1, system_prompt="Add.", max_completion_length=31, seed=7)
    sys.argv = ["evaluate.py", "--model", "run/checkpoint-000001", "--tiny", "--seed", "9"]
    _, _, args = evaluate.read_flags(evaluate.make_parser(None))
    assert (args.system_prompt, args.max_completion_length, args.seed) == ("Add.", 31, 9)
    assert (args.model, args.dataset) == ("run/checkpoint-000001", grpo.TINY.dataset)
    assert args.rollout_batch_size == grpo.TINY.rollout_batch_size  # sft.py has none


def test_a_file_gives_its_rule_to_grpo_and_a_script_has_its_own(tmp_path, capsys):
    (tmp_path / "my_rule.py").write_text(OWN)
    flags = ["--eval-prompts", 32, "--samples", 0]
    table, rows = run(capsys, *flags, "--script", "my_rule.py")
    ends = [row["completion"].endswith("0}") for row in rows]
    assert [row["correct"] for row in rows] == ends and 0 < sum(ends) < 32 and [*table] == ["greedy accuracy"]
    (tmp_path / "my_fork.py").write_text((ROOT / "grpo.py").read_text() + OWN)
    assert evaluate.import_script("my_fork.py").is_correct("10}", None)
    assert evaluate.import_script("gspo") is gspo
    (tmp_path / "my_typo.py").write_text("def reward(completion, answer): return 1.0")
    with pytest.raises(SystemExit, match="has no is_correct"):
        evaluate.import_script("my_typo.py")


def test_all_rows_of_a_file_can_be_evaluated_and_k_chosen(capsys):
    data = [{"prompt": f"{number}+12=", "answer": number + 12} for number in range(20, 28)]
    flags = ["--dataset", write_jsonl("rows.jsonl", data), "--split", "all", "--samples", 3, "--temperature", 0.5]
    table, rows = run(capsys, *flags, "--k", 1, 3)
    assert [*table] == ["greedy accuracy", "pass@1", "pass@3"] and table["pass@1"][0] <= table["pass@3"][0]
    assert {row["prompt"] for row in rows} == {row["prompt"] for row in data} and len(rows) == 8 * 4
    with pytest.raises(SystemExit):
        run(capsys, *flags, "--k", 4)
