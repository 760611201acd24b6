"""Short real trainings that must be able to fail."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
import sft


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_default_grpo_run_cut_short_learns(tmp_path):
    run = tmp_path / "run"
    torch.manual_seed(0)
    grpo.main(grpo.Args(num_steps=16, eval_every=16, eval_prompts=64, save_every=16, seed=11, run_dir=str(run)))
    lines = read(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(17))
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert lines[-1]["eval/accuracy"] > lines[0]["eval/accuracy"] + 0.1
    assert lines[-1]["eval/pass@1"] > lines[0]["eval/pass@1"] + 0.05
    rewards = [line["reward/mean"] for line in lines[1:]]
    assert sum(rewards[-5:]) > sum(rewards[:5])
    assert lines[-1]["rollout/length_mean"] > lines[1]["rollout/length_mean"]
    assert all(line["policy/approx_kl"] > 0 for line in lines[1:])  # the second minibatch is off-policy
    assert 0 < lines[-1]["policy/ref_kl"] < 1
    before, _ = grpo.load_model(str(grpo.HERE / "models" / "tiny"), torch.device("cpu"))
    after = AutoModelForCausalLM.from_pretrained(run / "checkpoint")
    changed = [(a != b).float().mean().item() for a, b in zip(before.parameters(), after.parameters())]
    assert min(changed) > 0.5  # rows of unused tokens stay
    assert AutoTokenizer.from_pretrained(run / "checkpoint").chat_template


@pytest.mark.parametrize("flags", [{"kl_coef": 0.0}, {"update_epochs": 2}, {"gradient_checkpointing": True}])
def test_other_settings_train(flags, tmp_path):
    run = tmp_path / "run"
    sizes = {"num_steps": 2, "prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "eval_prompts": 4}
    grpo.main(grpo.Args(run_dir=str(run), rollout_batch_size=5, **sizes, **flags))
    last = read(run / "metrics.jsonl")[-1]
    assert last["step"] == 2
    assert last["optim/grad_norm"] > 0
    assert ("policy/ref_kl" in last) == ("kl_coef" not in flags)


def test_training_does_not_depend_on_the_microbatch_budget(tmp_path):
    sizes = {"num_steps": 2, "prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "eval_prompts": 4, "seed": 2}
    lines = []
    for budget in (64, 100_000):
        run = tmp_path / str(budget)
        grpo.main(grpo.Args(run_dir=str(run), microbatch_tokens=budget, **sizes))
        lines.append(read(run / "metrics.jsonl")[1])
    for key in lines[0]:
        if not key.startswith("perf/"):
            assert lines[0][key] == pytest.approx(lines[1][key], rel=1e-3, abs=1e-5), key


def test_nonfinite_gradient_stops_before_the_optimizer_step(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "reward_fn", lambda completion, _: float("inf") if len(completion) % 2 else 0.0)
    run = tmp_path / "run"
    sizes = {"prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "eval_prompts": 0}
    with pytest.raises(SystemExit, match="step 1: gradient norm nan"):
        grpo.main(grpo.Args(run_dir=str(run), num_steps=3, **sizes))
    assert not any((run / "state").iterdir())


def test_wandb_offline_gets_the_metrics(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    sizes = {"num_steps": 1, "prompts_per_step": 2, "group_size": 4, "minibatch_size": 8, "eval_prompts": 4}
    grpo.main(grpo.Args(run_dir=str(run), track=True, **sizes))
    logs = list((run / "wandb").glob("offline-run-*/*.wandb"))
    assert len(logs) == 1
    assert b"reward/mean" in logs[0].read_bytes()


def test_sft_from_random_weights_learns(tmp_path):
    run = tmp_path / "run"
    sizes = {"num_steps": 30, "warmup_steps": 3, "eval_every": 30, "eval_prompts": 64, "save_every": 30}
    sft.main(sft.Args(run_dir=str(run), **sizes))
    lines = read(run / "metrics.jsonl")
    assert lines[0]["eval/loss"] > 3
    assert lines[-1]["eval/loss"] < 2.5
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoint")
    assert model.config.model_type == "qwen3"
