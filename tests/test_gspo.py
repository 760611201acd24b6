"""GSPO's objective: python -m pytest tests/test_gspo.py"""

import helpers
import pytest
from helpers import APPROX_KL, INPUTS, cases_of, each_invariance, loss_and_gradient

import gspo

# ---- by hand

# The ratio of a completion is the geometric mean of its tokens' ratios.
S1 = (1.5 * 2 * 0.5) ** (1 / 3)  # 1.145, within 1.28
S2 = (1.5 * 0.5 * 1) ** (1 / 3)  # 0.909, within 0.8


def test_loss_gradient_and_metrics_by_hand():
    loss = -2 * S1 + 1 * S2  # minus advantage times ratio
    gradient = [[-2 * S1 / 3] * 3 + [0.0], [S2 / 3] * 3 + [0.0]]  # each token has a third of its completion's
    metrics = {"policy/approx_kl": APPROX_KL, "policy/clip_fraction_low": 0, "policy/clip_fraction_high": 0}
    helpers.check_by_hand(gspo, loss, gradient, metrics)


@pytest.mark.parametrize("low, high", [(0.05, 0.1), (0.3, 0.1), (0.05, 0.3)])
def test_whole_completions_are_clipped(low, high):
    """S1 = 1.145 is clipped above 1 + high at advantage 2, S2 = 0.909 below 1 - low at advantage -1."""
    loss, gradient, metrics = loss_and_gradient(gspo, INPUTS, clip_eps_low=low, clip_eps_high=high)
    clipped = [S1 > 1 + high, S2 < 1 - low]
    assert metrics["policy/clip_fraction_high"] == (3 * clipped[0], 6)  # of tokens
    assert metrics["policy/clip_fraction_low"] == (3 * clipped[1], 6)
    assert [(row == 0).all().item() for row in gradient] == clipped
    assert loss.item() == pytest.approx(-2 * min(S1, 1 + high) + max(S2, 1 - low))


def test_where_the_clip_stops_the_gradient():
    helpers.check_clip(gspo)


# ---- other libraries' numbers

CASES = cases_of("gspo_trl", beta=0)
CASES += cases_of("gspo_verl", rtol=1e-6, kl_loss_coef=0)  # adds 1e-8 to denominators


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_others(case):
    helpers.check_loss_of_others(gspo, case)


# ---- the exact gradient


def test_expected_gradient_of_groups_of_two():
    helpers.check_gradient_of_groups_of_two(gspo, over_lengths=True)  # at ratio 1 that of GRPO


# ---- invariances and a short run


@each_invariance
def test_what_does_not_matter(check):
    check(gspo)


def test_advantages_are_centred_and_0_without_a_difference():
    helpers.check_advantages(gspo.compute_advantages)
