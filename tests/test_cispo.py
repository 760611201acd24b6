"""CISPO's objective: python -m pytest tests/test_cispo.py"""

import helpers
import pytest
from helpers import APPROX_KL, cases_of, each_invariance, gradient_of, loss_and_gradient, tensor
from tiny import relative_error
from torch.testing import assert_close

import cispo
import dapo

# ---- by hand


def test_loss_gradient_and_metrics_by_hand():
    # A token's weight is its ratio, at most 1.28, and a constant: loss = -weight A log π.
    loss = 2 * (1.28 * 1 + 1.28 * 2 + 0.5 * 3) - (1.28 * 0.5 + 0.5 * 1.5 + 1.0 * 2.5)
    gradient = [[-2.56, -2.56, -1.0, 0.0], [1.28, 0.5, 1.0, 0.0]]  # -weight A, also where the weight is capped
    helpers.check_by_hand(cispo, loss, gradient, {"policy/approx_kl": APPROX_KL, "policy/cap_fraction": 3})


def test_the_weight_is_capped_and_the_gradient_stays():
    """Every token of an advantage has a gradient, those that a clip leaves out, too; both signs have one cap."""
    for advantage, ratio, _ in helpers.CLIP_CASES:
        _, found, metrics = loss_and_gradient(cispo, helpers.two_completions(advantage, ratio))
        expected = tensor([[-min(ratio, 1.28) * advantage, 0.0], [-advantage, 0.0]])
        assert_close(found, expected)
        assert metrics["policy/cap_fraction"] == (ratio > 1.28, 2)


def test_without_cap_and_clip_it_has_the_gradient_of_dapo():
    """r ∇ log π = ∇ r: where nothing is clipped, the two are one."""
    inputs = helpers.random_inputs()
    wide = {"clip_eps_low": 1e9, "clip_eps_high": 1e9}
    _, found, _ = loss_and_gradient(cispo, inputs, **wide)
    _, expected, _ = loss_and_gradient(dapo, inputs, **wide)
    assert_close(found, expected)
    _, clipped, _ = loss_and_gradient(dapo, inputs)
    assert ((clipped == 0) & (found != 0)).any()


# ---- other libraries' numbers


@pytest.mark.parametrize("case", cases_of("cispo_trl", beta=0))
def test_loss_and_gradient_are_those_of_trl(case):
    helpers.check_loss_of_others(cispo, case, per_token=True)


# ---- the exact gradient


def test_expected_gradient_of_groups_of_two():
    helpers.check_gradient_of_groups_of_two(cispo, over_lengths=False)


@pytest.mark.parametrize("longest", [1, 3])
def test_without_a_cap_it_has_the_gradient_of_the_policy_as_it_is_now_for_one_token(longest):
    """E_old[r A ∇ log π] = ∇ E_π[A]: exact for one token; a cap is a bias, and so are longer completions."""
    cases = helpers.enumerate_completions(2)
    case = cases[longest]
    now = (case["logprobs"] * case["completion_mask"]).sum(1).exp()
    exact = gradient_of(cases["model"], (now * case["advantages"]).sum())
    inputs = case | {"advantages": case["advantages"] * case["old"], "sampler_logprobs": case["old_logprobs"]}
    errors = []
    for cap in (1e9, 1.02):
        loss, _ = helpers.policy_loss(cispo, inputs, clip_eps_high=cap - 1)
        errors.append(relative_error(-gradient_of(cases["model"], loss), exact))
    without_cap, with_cap = errors
    assert with_cap > max(without_cap, 1e-4)
    if longest == 1:
        assert without_cap < 1e-9
    else:
        assert 1e-4 < without_cap < 0.5


# ---- invariances and a short run


@each_invariance
def test_what_does_not_matter(check):
    check(cispo)


def test_advantages_are_centred_and_0_without_a_difference():
    helpers.check_advantages(cispo.compute_advantages)
