"""Short real trainings that must be able to fail."""

import math

import pytest
import torch
from tiny import parse, read_jsonl, record, shares_changed
from transformers import AutoModelForCausalLM, AutoTokenizer

import cispo
import dapo
import dr_grpo
import grpo
import grpo_process
import gspo
import reinforce
import sft

SIZES = {"prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "eval_prompts": 0}


def train(script, run, **settings):
    """Run main with those of the settings that the script has; return its lines of metrics."""
    own = {name: value for name, value in settings.items() if hasattr(script.Args, name)}
    script.main(parse(script, run_dir=run, **own))
    return read_jsonl(run / "metrics.jsonl")


def test_default_grpo_run_cut_short_learns(tmp_path):
    run = tmp_path / "run"
    torch.manual_seed(0)
    lines = train(grpo, run, num_steps=16, eval_every=16, eval_prompts=64, save_every=16, seed=11)
    assert [line["step"] for line in lines] == list(range(17))
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert lines[-1]["eval/accuracy"] > lines[0]["eval/accuracy"] + 0.1
    assert lines[-1]["eval/pass@1"] > lines[0]["eval/pass@1"] + 0.05
    rewards = [line["reward/mean"] for line in lines[1:]]
    assert sum(rewards[-5:]) > sum(rewards[:5])
    assert lines[-1]["rollout/length_mean"] > lines[1]["rollout/length_mean"]
    assert all(line["policy/approx_kl"] > 0 for line in lines[1:])  # the second minibatch is off-policy
    assert 0 < lines[-1]["policy/ref_kl"] < 1
    assert min(shares_changed(run / "checkpoint")) > 0.5  # rows of unused tokens stay
    assert AutoTokenizer.from_pretrained(run / "checkpoint").chat_template


@pytest.mark.parametrize("script", [reinforce, dr_grpo, dapo, gspo, cispo])
def test_short_run_learns(script, tmp_path):
    sizes = {"num_steps": 10, "prompts_per_step": 8, "minibatch_size": 32, "max_completion_length": 40}
    evaluation = {"eval_every": 10, "eval_prompts": 64, "save_every": 10}
    lines = train(script, tmp_path / "run", learning_rate=4e-4, warmup_steps=2, seed=1, **sizes, **evaluation)
    assert [line["step"] for line in lines] == list(range(11))
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert lines[-1]["eval/accuracy"] > lines[0]["eval/accuracy"] + 0.25
    lengths = [line["rollout/length_mean"] for line in lines[1:]]
    assert sum(lengths[-3:]) > sum(lengths[:3]) + 6
    assert all(line["optim/grad_norm"] > 0 for line in lines[1:])
    if script is not reinforce:  # the second minibatch is off-policy
        assert all(line["policy/approx_kl"] > 0 for line in lines[1:])
    assert min(shares_changed(tmp_path / "run" / "checkpoint")) > 0.5  # rows of unused tokens stay


@pytest.mark.parametrize("script", [grpo, reinforce, dapo, grpo_process])
def test_training_does_not_depend_on_the_microbatch_budget(script, tmp_path):
    runs = {"small": 64, "large": 100_000}
    small, large = (
        train(script, tmp_path / run, num_steps=1, seed=2, microbatch_tokens=runs[run], **SIZES)[0] for run in runs
    )
    assert small["optim/grad_norm"] > 0 and small.keys() == large.keys()
    for key in small:
        if not key.startswith("perf/"):
            assert small[key] == pytest.approx(large[key], rel=1e-3, abs=1e-5), key


def test_dr_grpo_counts_truncated_completions_as_wrong(tmp_path, monkeypatch):
    """In the advantages only: reward/mean stays that of the rule, which here finds everything right."""
    monkeypatch.setattr(dr_grpo, "reward_fn", lambda _completion, _answer: 1.0)
    rollouts, calls = (record(monkeypatch, dr_grpo, name) for name in ("sample_completions", "compute_advantages"))
    [line] = train(dr_grpo, tmp_path / "run", num_steps=1, max_completion_length=8, **SIZES)
    batch, rewards = rollouts[0][1][0], calls[0][0][0]
    truncated = batch["truncated"]
    assert truncated.any() and not truncated.all()
    assert torch.equal(rewards, 1.0 - truncated.float())
    assert (batch["rewards"] == 1).all() and line["reward/mean"] == line["reward/zero_std"] == 1
    assert line["reward/trained_mean"] == pytest.approx(1 - line["rollout/truncated"])
    assert line["optim/grad_norm"] > 0


def test_sft_from_random_weights_learns(tmp_path):
    run = tmp_path / "run"
    sizes = {"num_steps": 30, "warmup_steps": 3, "eval_every": 30, "eval_prompts": 64, "save_every": 30}
    lines = train(sft, run, **sizes)
    assert lines[0]["eval/loss"] > 3
    assert lines[-1]["eval/loss"] < 2.5
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoint")
    assert model.config.model_type == "qwen3"
