"""GSPO's objective: python -m pytest tests/test_gspo.py"""

import math

import pytest
import torch
from helpers import (
    CLIP_CASES,
    COUNTED_AS_CLIPPED,
    angle,
    cases_of,
    check_advantages,
    check_advantages_of_others,
    check_by_hand,
    check_clip,
    check_counted_as_clipped,
    check_gradient_of_groups_of_two,
    check_learning,
    check_loss_of_others,
    each_invariance,
    enumerate_rows,
    expected_gradient,
    gradient_over_lengths,
    loss_and_gradient,
    tensor,
    true_gradient,
)
from tiny import relative_error

import gspo

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
# The ratio of a completion is the geometric mean of its tokens' ratios.
S1 = (1.5 * 2 * 0.5) ** (1 / 3)  # 1.145, within 1.28
S2 = (1.5 * 0.5 * 1) ** (1 / 3)  # 0.909, within 0.8


def test_loss_gradient_and_metrics_by_hand():
    loss = -2 * S1 + 1 * S2  # minus advantage times ratio
    gradient = [[-2 * S1 / 3] * 3 + [0.0], [S2 / 3] * 3 + [0.0]]  # each token has a third of its completion's
    # approx_kl is the sum over tokens of r - log r - 1.
    kl = (0.5 - math.log(1.5)) + (1 - math.log(2)) + (math.log(2) - 0.5)
    kl += (0.5 - math.log(1.5)) + (math.log(2) - 0.5) + 0
    metrics = {"approx_kl": kl, "clip_fraction_low": 0, "clip_fraction_high": 0}
    check_by_hand(gspo, INPUTS, loss, gradient, metrics)


@pytest.mark.parametrize("low, high", [(0.05, 0.1), (0.3, 0.1), (0.05, 0.3)])
def test_whole_completions_are_clipped(low, high):
    """S1 = 1.145 is clipped above 1 + high at advantage 2, S2 = 0.909 below 1 - low at advantage -1."""
    loss, gradient, metrics = loss_and_gradient(gspo, INPUTS, clip_eps_low=low, clip_eps_high=high)
    clipped = [S1 > 1 + high, S2 < 1 - low]
    assert metrics["policy/clip_fraction_high"] == 3 * clipped[0]  # of tokens
    assert metrics["policy/clip_fraction_low"] == 3 * clipped[1]
    assert [(row == 0).all().item() for row in gradient] == clipped
    assert loss.item() == pytest.approx(-2 * min(S1, 1 + high) + max(S2, 1 - low))


@pytest.mark.parametrize("advantage, ratio, gradient", CLIP_CASES)
def test_where_the_clip_stops_the_gradient(advantage, ratio, gradient):
    check_clip(gspo, advantage, ratio, gradient)


@pytest.mark.parametrize("advantage, ratio, low, high", COUNTED_AS_CLIPPED)
def test_what_counts_as_clipped(advantage, ratio, low, high):
    check_counted_as_clipped(gspo, advantage, ratio, low, high)


# ---- other libraries' numbers

CASES = cases_of("gspo_trl", lambda config: config["beta"] == 0)
CASES += cases_of("gspo_verl", lambda config: config["kl_loss_coef"] == 0, rtol=1e-6)  # adds 1e-8 to denominators


@pytest.mark.parametrize("case, rtol", CASES)
def test_loss_and_gradient_are_those_of_others(case, rtol):
    check_loss_of_others(gspo, case, rtol)


def test_advantages_are_those_of_trl():
    check_advantages_of_others(gspo.compute_advantages, "trl_group", rtol=1e-6)


# ---- the exact gradient


def test_expected_gradient_divides_by_the_length():
    found = expected_gradient(gspo, enumerate_rows()["advantages"])
    assert relative_error(found, gradient_over_lengths()) < 1e-9
    assert angle(found, true_gradient()) > 0.01  # so it is not the gradient of the expected reward


def test_expected_gradient_of_groups_of_two():
    check_gradient_of_groups_of_two(gspo, over_lengths=True)  # at ratio 1 that of GRPO


# ---- invariances and a short run


@each_invariance
def test_what_does_not_matter(check):
    check(gspo)


def test_advantages_are_centred_and_0_without_a_difference():
    check_advantages(gspo, gspo.compute_advantages)


@pytest.mark.slow
def test_a_short_run_learns(tmp_path):
    check_learning(gspo, tmp_path / "run")
