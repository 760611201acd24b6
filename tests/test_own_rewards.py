"""Rewards of a user's own: what they are given, what is asked of them, and what is then reported."""

import math
import re

import numpy
import pytest
import torch
from tiny import SCRIPTS, parse, read_jsonl, write_jsonl

import dapo
import dr_grpo
import grpo

SMALL = {"num_steps": 1, "prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "max_completion_length": 16}
SMALL |= {"eval_prompts": 4, "max_rounds": 1}
ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": i % 3} for i in range(1, 13)]


def small_args(script, folder, rows=ROWS, **settings):
    names = vars(script.Args())
    given = SMALL | {"dataset": write_jsonl(folder / "rows.jsonl", rows), "run_dir": str(folder / "run")} | settings
    return parse(script, **{name: value for name, value in given.items() if name in names})


def logged(folder, name="metrics"):
    return read_jsonl(folder / "run" / f"{name}.jsonl")


def train_on(rewards, monkeypatch, folder, num_steps=1):
    """A run in which two groups of two completions get these rewards."""
    sizes = {"prompts_per_step": 2, "group_size": 2, "minibatch_size": 4, "eval_prompts": 0, "num_steps": num_steps}
    monkeypatch.setattr(grpo, "score_completions", lambda *_: rewards)
    grpo.main(small_args(grpo, folder, **sizes))


ARRAYS = [numpy.array([0.5, 1.0, 0.0, 2.0]), torch.tensor([0.5, 1.0, 0.0, 2.0]), (0.5, 1.0, 0, 2)]
ARRAYS += [[torch.tensor(0.5), True, False, torch.tensor(2.0)], [numpy.float32(0.5), 1, numpy.int64(0), 2.0]]


@pytest.mark.parametrize("rewards", ARRAYS)
def test_numbers_of_any_kind_are_rewards_and_so_are_arrays_of_them(rewards, monkeypatch, tmp_path):
    train_on(rewards, monkeypatch, tmp_path)
    assert logged(tmp_path)[0]["reward/mean"] == 0.875
    assert logged(tmp_path, "samples")[0]["rewards"] == [0.5, 1.0]


BAD = [None, [], [1.0], [0.0, 1.0], [1.0] * 3, [0.0, 1.0] * 3, 1.0, (i for i in "ab"), torch.tensor(1.0)]
BAD += [[0.0, 0.0, 0.0, reward] for reward in (10**400, "much", None, [1.0, 2.0], {})]


@pytest.mark.parametrize("rewards", BAD)
@pytest.mark.usefixtures("alone")
def test_a_number_for_each_completion_is_asked_for(rewards, monkeypatch, tmp_path):
    with pytest.raises((TypeError, SystemExit), match="score_completions returned|not iterable|0-d tensor"):
        train_on(rewards, monkeypatch, tmp_path)


WRONG = [([0.5, None], r"^score_completions returned None for the row \{'level': 1\}$")]
WRONG += [(["a", 1], r"^score_completions returned 'a' for the row \{'level': 0\}$")]
WRONG += [([0.5], "^score_completions returned 1 rewards for 2 completions$")]
WRONG += [((i for i in range(3)), "^score_completions returned 3 rewards for 2 completions$")]


@pytest.mark.parametrize("rewards, message", WRONG)
def test_what_is_wrong_with_rewards_is_said_in_one_line(rewards, message, monkeypatch):
    monkeypatch.setattr(grpo, "score_completions", lambda *_: rewards)
    with pytest.raises(SystemExit, match=message):
        grpo.compute_rewards(["x", "y"], [{"level": 0}, {"level": 1}])


def test_rewards_become_floats(monkeypatch):
    monkeypatch.setattr(grpo, "score_completions", lambda texts, rows: numpy.array([len(texts), rows[1]["level"]]))
    rewards = grpo.compute_rewards(["x", "y"], [{"level": 0}, {"level": 1}])
    assert rewards == [2.0, 1.0] and {type(reward) for reward in rewards} == {float}


def test_an_error_in_reward_fn_has_a_note_of_its_completion_and_row(monkeypatch):
    monkeypatch.setattr(grpo, "reward_fn", lambda text, answer: 1 / (len(text) - answer))
    rows = [{"answer": 3, "level": i} for i in range(2)]
    with pytest.raises(ZeroDivisionError) as error:
        grpo.compute_rewards(["x", "abc"], rows)
    assert error.value.__notes__ == [f"in the reward of the completion 'abc' of the row {rows[1]}"]


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e39])
@pytest.mark.usefixtures("alone")
def test_rewards_that_are_not_finite_train_nothing_and_end_the_run(reward, monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="gradient's norm was nan three times in a row"):
        train_on([0.0, 1.0, 0.0, reward], monkeypatch, tmp_path, num_steps=4)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_completions_are_scored_as_a_batch_with_all_columns_of_their_rows(script, tmp_path, monkeypatch):
    calls = []

    def score_completions(completions, rows):
        calls.append([(row["prompt"], row["answer"], row["level"]) for row in rows])
        assert len(completions) == len(rows) and all(isinstance(text, str) for text in completions)
        return [len(text) % 2 for text in completions]

    monkeypatch.setattr(script, "score_completions", score_completions)
    script.main(small_args(script, tmp_path))
    before, rollout, after = calls
    given = {(row["prompt"], row["answer"], row["level"]) for row in ROWS}
    assert len(before) == len(after) == 4 and len(rollout) == 16 and {*before, *rollout} <= given
    assert all(len({*rollout[first : first + 4]}) == 1 for first in range(0, 16, 4))  # those of one prompt adjacent


def test_accuracy_is_by_the_rule_where_a_bonus_changes_the_reward(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "reward_fn", lambda text, answer: grpo.is_right(text, answer) + 0.2 * ("<think>" in text))
    grpo.main(small_args(grpo, tmp_path, eval_prompts=8, num_steps=0))
    (line,) = logged(tmp_path)
    samples = logged(tmp_path, "eval_samples")
    right = [grpo.is_right(sample["completion"], sample["answer"]) for sample in samples]
    assert line["eval/accuracy"] == sum(right) / 8 > 0
    assert line["eval/reward"] == pytest.approx(sum(sample["reward"] for sample in samples) / 8)
    assert line["eval/pass@4"] >= line["eval/pass@1"] > 0


@pytest.mark.parametrize("script", [grpo, dapo])
def test_a_reward_that_needs_no_answers_needs_no_column_of_them(script, tmp_path, monkeypatch):
    rows = [{"prompt": row["prompt"]} for row in ROWS]
    with pytest.raises(TypeError, match="NoneType"):  # the rule does need them
        script.main(small_args(script, tmp_path, rows, run_dir=str(tmp_path / "by rule")))
    monkeypatch.setattr(script, "reward_fn", lambda text, _answer: len(text) % 3)
    script.main(small_args(script, tmp_path, rows))
    lines = logged(tmp_path)
    assert "eval/reward" in lines[0] and not [key for key in lines[0] if "accuracy" in key or "pass@" in key]


# ---- what is trained on where that is not the reward, and where nothing is


def test_a_truncated_completion_gets_the_lowest_reward_of_its_group_and_at_most_0():
    """Of rewards of +1 and -1 a 0 would be a prize for being cut off."""
    rewards = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 2.0, 3.0])
    truncated = torch.tensor([True, False, True, False, True, False, False, True])
    trained = dr_grpo.punish_truncation(rewards, truncated, 4)
    assert trained.tolist() == [-1.0, -1.0, -1.0, 1.0, 0.0, 1.0, 2.0, 0.0]
    zero_one = torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert dr_grpo.punish_truncation(zero_one, truncated[:4], 4).tolist() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("script", [dr_grpo, dapo])
def test_the_reward_that_is_trained_on_is_logged_beside_the_rule_s(script, tmp_path):
    script.main(small_args(script, tmp_path, max_completion_length=8))
    line = logged(tmp_path)[1]
    assert line["rollout/truncated"] > 0
    if script is dr_grpo:
        assert line["reward/trained_mean"] <= line["reward/mean"]
    else:
        assert line["reward/trained_mean"] < 2 * line["reward/mean"] - 1
    grpo.main(small_args(grpo, tmp_path, run_dir=str(tmp_path / "grpo")))
    assert "reward/trained_mean" not in read_jsonl(tmp_path / "grpo" / "metrics.jsonl")[1]


@pytest.mark.parametrize("script", [grpo, dr_grpo])
def test_it_is_told_where_there_is_nothing_to_learn_from(script, tmp_path, monkeypatch, capfd):
    """After five steps: here there is something in the first and in the twelfth."""
    steps, sample = [], script.sample_completions
    monkeypatch.setattr(script, "sample_completions", lambda *args: steps.append(0) or sample(*args))
    monkeypatch.setattr(
        script, "score_completions", lambda texts, _: [i % 2 * (len(steps) in (1, 12)) for i, _ in enumerate(texts)]
    )
    script.main(small_args(script, tmp_path, num_steps=15, eval_prompts=0))
    told = [line for line in "".join(capfd.readouterr()).splitlines() if "no learning signal" in line]
    assert [re.search("step ([0-9]+)", line)[1] for line in told] == ["10"]
    signals = [line["reward/zero_std"] < 1 for line in logged(tmp_path)]
    assert [step for step, found in enumerate(signals, 1) if found] == [1, 12]
