"""What evaluate counts: accuracy and pass@k by the rule, whatever the reward is; of PPO also score and penalty."""

import importlib
import inspect
import json
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import SCRIPTS as ONLINE

import dpo
import ppo_rlhf

ROOT = Path(dpo.__file__).parent
SCRIPTS = ONLINE | {"dpo": dpo, "ppo_rlhf": ppo_rlhf}
SAMPLES = [[0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 1], [1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 1, 0], [0.5, 0.5, 0, 0.5]]
GREEDY = [0, 1, 0.5, 1, 0.9, 0.1, 1]  # 1 is right
TRUNCATED = [True, False, False, True, False, True, False]
PROMPTS = [{"prompt": f"{i}", "answer": "1", "prompt_ids": [i]} for i in range(len(GREEDY))]


def reward(text):
    """A reward of one's own: a bonus for an answer with a point, and never 1."""
    return 0.5 * ("{1}" in text) + 0.25 * ("." in text)


@pytest.fixture
def evaluate(monkeypatch, tmp_path):
    """Calls a script's evaluate with the rewards above; returns its metrics and what it sampled."""

    def call(script, prompts=PROMPTS, rank=0, world_size=1, **settings):
        sampled = []

        def sample_completions(_model, _tokenizer, prompts, num_samples, temperature, _stop_ids, _args):
            sampled.append((prompts, num_samples, temperature))
            places = [int(prompt["prompt"]) for prompt in prompts]
            right = [GREEDY[i] for i in places] if temperature == 0 else sum((SAMPLES[i] for i in places), [])
            truncated = torch.tensor([TRUNCATED[i] for i in places]).repeat_interleave(num_samples)
            return {"truncated": truncated}, [f"\\boxed{{{value}}}" for value in right]

        monkeypatch.setattr(script, "sample_completions", sample_completions)
        monkeypatch.setattr(script, "score_completions", lambda texts, _rows: [reward(text) for text in texts])
        given = {"prompts": prompts, "rank": rank, "world_size": world_size, "step": 4}
        given["args"] = script.Args(run_dir=str(tmp_path), **settings)
        given["model"] = given["sampler"] = SimpleNamespace(device="cpu")
        names = inspect.signature(script.evaluate).parameters
        return script.evaluate(**{name: given.get(name) for name in names}), sampled

    return call


each_script = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)


@each_script
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(script, evaluate):
    """Which is unbiased; 1 - (1 - p)^k with p estimated from the samples is not."""
    metrics, _ = evaluate(script)
    for k in (1, 2, 4):
        per_prompt = [[max(some) == 1 for some in combinations(samples, k)] for samples in SAMPLES]
        expected = sum(sum(passed) / len(passed) for passed in per_prompt) / len(SAMPLES)
        assert metrics[f"eval/pass@{k}"] == pytest.approx(expected, rel=1e-9), k


@each_script
def test_accuracy_counts_right_greedy_completions_whatever_the_reward_is(script, evaluate):
    metrics, _ = evaluate(script)
    assert metrics["eval/accuracy"] == pytest.approx(3 / 7)
    assert metrics["eval/reward"] == pytest.approx((3 * 0.5 + 3 * 0.25) / 7)


@each_script
def test_without_answers_the_reward_is_all_there_is(script, evaluate):
    metrics, sampled = evaluate(script, [prompt | {"answer": None} for prompt in PROMPTS])
    assert (
        {"eval/reward"}
        <= {key for key in metrics if "eval/" in key}
        <= {"eval/reward", "eval/score"} | {"perf/eval_seconds"}
    )
    assert [count for _, count, _ in sampled] == [1]


@each_script
def test_greedy_completions_are_kept(script, evaluate, tmp_path):
    evaluate(script)
    rows = [json.loads(line) for line in (tmp_path / "eval_samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4] * 7
    assert [row["completion"] for row in rows] == [f"\\boxed{{{value}}}" for value in GREEDY]
    assert [row["prompt"] for row in rows] == [prompt["prompt"] for prompt in PROMPTS]


@each_script
def test_one_greedy_completion_and_samples_at_the_temperature_of_training(script, evaluate):
    _, sampled = evaluate(script, temperature=0.7)
    assert sampled == [(PROMPTS, 1, 0.0), (PROMPTS, 4, 0.7)]


@each_script
def test_ranks_share_the_held_out_prompts(script, evaluate):
    """Each has its part of the sums, divided by the number of all prompts."""
    whole, _ = evaluate(script)
    parts = [evaluate(script, rank=rank, world_size=2) for rank in (0, 1)]
    shares = [[prompt["prompt"] for prompt in sampled[0][0]] for _, sampled in parts]
    assert sorted(sum(shares, [])) == [prompt["prompt"] for prompt in PROMPTS] and min(map(len, shares)) == 3
    for key in whole:
        if key.startswith("eval/"):
            assert sum(metrics[key] for metrics, _ in parts) == pytest.approx(whole[key]), key


@each_script
def test_evaluation_draws_the_same_samples_every_time(script, evaluate):
    states = []
    for seed in (5, 5, 6):
        torch.rand(3)  # training in between
        evaluate(script, seed=seed)
        states.append(torch.rand(3).tolist())
    assert states[0] == states[1] != states[2]


# ---- scores of PPO


def test_score_of_a_cut_off_completion_is_less_by_the_penalty(evaluate):
    metrics, _ = evaluate(ppo_rlhf, missing_stop_penalty=2.0)
    assert metrics["eval/score"] == pytest.approx((3 * 0.5 + 3 * 0.25 - 2.0 * sum(TRUNCATED)) / 7)


@pytest.mark.parametrize("penalty", [0.0, 2.0])
@pytest.mark.parametrize("scored", [True, False])
def test_the_penalty_is_in_units_of_the_normalised_score(monkeypatch, penalty, scored):
    """A reward model's score is normalised first; without one the reward of the rule is the score."""
    raw = torch.tensor([7.0, 3.0, -1.0])
    monkeypatch.setattr(ppo_rlhf, "look_up", lambda _model, _batch, _max_tokens: [raw])
    batch = {"rewards": torch.tensor([1.0, 0.0, 0.5]), "truncated": torch.tensor([False, True, True])}
    policy = SimpleNamespace(score_mean=3.0, score_std=4.0)
    args = ppo_rlhf.Args(missing_stop_penalty=penalty, microbatch_tokens=9)
    scores = ppo_rlhf.score_batch(object() if scored else None, batch, policy, args)
    expected = [1.0, 0.0 - penalty, -1.0 - penalty] if scored else [1.0, 0.0 - penalty, 0.5 - penalty]
    assert scores.tolist() == expected


# The embedded data of scripts that look at all of it before they evaluate: a few rows will do.
FILES = {"sft": "addition/sft.jsonl"} | dict.fromkeys(("dpo", "reward_model"), "preferences/train.jsonl")


@pytest.mark.parametrize("name", ["grpo", "dpo", "ppo_rlhf", "reward_model", "sft"])
def test_no_steps_evaluate_a_checkpoint_and_the_summary_says_so(name, tmp_path, capsys):
    script, run = importlib.import_module(name), tmp_path / "run"
    given = {"model": str(ROOT / "models" / "tiny")} if name == "sft" else {}
    if name in FILES:
        rows = (ROOT / "data" / FILES[name]).read_text().splitlines()[:32]
        (tmp_path / "rows.jsonl").write_text("\n".join(rows))
        given["dataset"] = str(tmp_path / "rows.jsonl")
    script.main(script.Args(num_steps=0, eval_prompts=4, run_dir=str(run), **given))
    output = capsys.readouterr().out
    given = json.loads((run / "args.json").read_text())["model"]
    assert f"\n{given}: evaluated only, with --num-steps 0\n" in output
    assert "to go on" not in output and "nothing was trained" not in output and "0 steps" not in output
    [line] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert line["step"] == 0 and any(key.startswith("eval/") for key in line)
    assert not (run / "checkpoint").exists() and not [*(run / "state").glob("*")]
    if "eval/accuracy" in line and name != "dpo":
        rows = [json.loads(row) for row in (run / "eval_samples.jsonl").read_text().splitlines()]
        right = [script.is_right(row["completion"], str(eval(row["prompt"].rstrip("=")))) for row in rows]
        assert len(right) == 4 and line["eval/accuracy"] == sum(right) / 4


def test_no_steps_and_nothing_to_evaluate_on_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="--num-steps 0 only evaluates, and --eval-prompts 0"):
        dpo.main(dpo.Args(num_steps=0, eval_prompts=0, run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
