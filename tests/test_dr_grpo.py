"""Dr. GRPO's objective: python -m pytest tests/test_dr_grpo.py"""

import math

import pytest
import torch
from helpers import (
    CLIP_CASES,
    COUNTED_AS_CLIPPED,
    WITHOUT_KL,
    cases_of,
    check_advantages,
    check_advantages_of_others,
    check_by_hand,
    check_clip,
    check_counted_as_clipped,
    check_learning,
    check_loss_of_others,
    each_invariance,
    enumerate_rows,
    every_pair,
    expected_gradient,
    loss_and_gradient,
    random_inputs,
    tensor,
    train,
    true_gradient,
)
from tiny import record, relative_error

import dr_grpo
import grpo

# ---- by hand

# Two completions of three tokens with ratios 1.5, 2, 0.5 and 1.5, 0.5, 1; the last column is padding.
RATIOS = tensor([[1.5, 2.0, 0.5, 9.0], [1.5, 0.5, 1.0, 9.0]])
LOGPROBS = tensor([[-1.0, -2.0, -3.0, -4.0], [-0.5, -1.5, -2.5, -3.5]])
INPUTS = {
    "logprobs": LOGPROBS,
    "old_logprobs": LOGPROBS - RATIOS.log(),
    "advantages": tensor([2.0, -1.0]),
    "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]]),
}
INPUTS |= {"max_completion_length": 9}


def test_loss_gradient_and_metrics_by_hand():
    # Ratios are clipped to 0.8 .. 1.2: -min(r A, clip(r) A) for each token, over the constant 9, whatever the length.
    loss = (-2.4 - 2.4 - 1.0 + 1.5 + 0.8 + 1.0) / 9
    gradient = [[0, 0, -1 / 9, 0], [1.5 / 9, 0, 1 / 9, 0]]  # -r A where not clipped
    # approx_kl is the sum over tokens of r - log r - 1.
    kl = (0.5 - math.log(1.5)) + (1 - math.log(2)) + (math.log(2) - 0.5)
    kl += (0.5 - math.log(1.5)) + (math.log(2) - 0.5) + 0
    check_by_hand(dr_grpo, INPUTS, loss, gradient, {"approx_kl": kl, "clip_fraction_low": 1, "clip_fraction_high": 2})


def test_advantages_by_hand():
    """Rewards less the mean of the group, not divided by its standard deviation."""
    advantages = dr_grpo.compute_advantages(tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]), 4)
    torch.testing.assert_close(advantages, tensor([0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5]))


@pytest.mark.parametrize("advantage, ratio, gradient", CLIP_CASES)
def test_where_the_clip_stops_the_gradient(advantage, ratio, gradient):
    check_clip(dr_grpo, advantage, ratio, gradient)


@pytest.mark.parametrize("advantage, ratio, low, high", COUNTED_AS_CLIPPED)
def test_what_counts_as_clipped(advantage, ratio, low, high):
    check_counted_as_clipped(dr_grpo, advantage, ratio, low, high)


def test_at_equal_lengths_and_with_that_constant_it_is_grpo():
    inputs = random_inputs() | WITHOUT_KL | {"completion_mask": torch.ones(6, 5), "max_completion_length": 5}
    torch.testing.assert_close(loss_and_gradient(dr_grpo, inputs)[:2], loss_and_gradient(grpo, inputs)[:2])


# ---- other libraries' numbers

CASES = cases_of("dr_grpo_oat", lambda config: config["beta"] == 0)
CASES += cases_of("dr_grpo_trl", lambda config: config["beta"] == 0)


@pytest.mark.parametrize("case, rtol", CASES)
def test_loss_and_gradient_are_those_of_others(case, rtol):
    check_loss_of_others(dr_grpo, case, rtol)


def test_advantages_are_those_of_oat():
    check_advantages_of_others(dr_grpo.compute_advantages, "oat_drgrpo", rtol=1e-9)


# ---- the exact gradient


@pytest.mark.parametrize("centred", [True, False])
def test_expected_gradient_is_that_of_the_expected_reward(centred):
    rows = enumerate_rows()
    found = expected_gradient(dr_grpo, rows["advantages"] if centred else rows["rewards"])
    assert relative_error(found, true_gradient() / 9) < 1e-9


def test_expected_gradient_of_groups_of_two():
    """The mean of the group contains the reward itself, which leaves (1 - 1/G) of the gradient, in its direction."""
    pick, weights = every_pair()
    advantages = dr_grpo.compute_advantages(enumerate_rows()["rewards"][pick], 2)
    assert relative_error(expected_gradient(dr_grpo, advantages, pick, weights), true_gradient() / 2 / 9) < 1e-9


# ---- invariances and a short run


@each_invariance
def test_what_does_not_matter(check):
    check(dr_grpo)


def test_advantages_are_centred_and_0_without_a_difference():
    check_advantages(dr_grpo, dr_grpo.compute_advantages)


@pytest.mark.slow
def test_a_short_run_learns(tmp_path):
    check_learning(dr_grpo, tmp_path / "run")


def test_truncated_completions_count_as_wrong(tmp_path, monkeypatch):
    """In the advantages only: reward/mean stays that of the rule, which here finds everything right."""
    monkeypatch.setattr(dr_grpo, "reward_fn", lambda _completion, _answer: 1.0)
    rollouts, calls = (record(monkeypatch, dr_grpo, name) for name in ("sample_completions", "compute_advantages"))
    sizes = {"prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "eval_prompts": 0}
    [line] = train(dr_grpo, tmp_path / "run", num_steps=1, max_completion_length=8, **sizes)
    batch, rewards = rollouts[0][1][0], calls[0][0][0]
    truncated = batch["truncated"]
    assert truncated.any() and not truncated.all()
    assert torch.equal(rewards, 1.0 - truncated.float())
    assert (batch["rewards"] == 1).all() and line["reward/mean"] == line["reward/zero_std"] == 1
    assert line["reward/trained_mean"] == pytest.approx(1 - line["rollout/truncated"])
    assert line["optim/grad_norm"] > 0
