"""CISPO's objective: python -m pytest tests/test_cispo.py"""

import math

import pytest
import torch
from helpers import (
    CLIP_CASES,
    WITHOUT_KL,
    cases_of,
    check_advantages,
    check_advantages_of_others,
    check_by_hand,
    check_gradient_of_groups_of_two,
    check_learning,
    check_loss_of_others,
    each_invariance,
    enumerate_completions,
    enumerate_rows,
    expected_gradient,
    gradient_of,
    loss_and_gradient,
    random_inputs,
    tensor,
    true_gradient,
    two_completions,
)
from tiny import relative_error

import cispo
import dapo

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


def test_loss_gradient_and_metrics_by_hand():
    # A token's weight is its ratio, at most 1.28, and a constant: loss = -weight A log π.
    loss = 2 * (1.28 * 1 + 1.28 * 2 + 0.5 * 3) - (1.28 * 0.5 + 0.5 * 1.5 + 1.0 * 2.5)
    gradient = [[-2.56, -2.56, -1.0, 0.0], [1.28, 0.5, 1.0, 0.0]]  # -weight A, also where the weight is capped
    # approx_kl is the sum over tokens of r - log r - 1.
    kl = (0.5 - math.log(1.5)) + (1 - math.log(2)) + (math.log(2) - 0.5)
    kl += (0.5 - math.log(1.5)) + (math.log(2) - 0.5) + 0
    check_by_hand(cispo, INPUTS, loss, gradient, {"approx_kl": kl, "cap_fraction": 3})


@pytest.mark.parametrize("advantage, ratio, gradient", CLIP_CASES)
def test_the_weight_is_capped_and_the_gradient_stays(advantage, ratio, gradient):
    """Every token of an advantage has a gradient, those that a clip leaves out, too; both signs have one cap."""
    _, found, metrics = loss_and_gradient(cispo, two_completions(advantage, ratio))
    expected = tensor([[-min(ratio, 1.28) * advantage, 0.0], [-advantage, 0.0]])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert (found[0, 0] == 0) == (advantage == 0) and metrics["policy/cap_fraction"] == (ratio > 1.28)
    if gradient and ratio < 1.28:
        assert found[0, 0].item() == pytest.approx(gradient)


def test_without_cap_and_clip_it_has_the_gradient_of_dapo():
    """r ∇ log π = ∇ r: where nothing is clipped, the two are one."""
    inputs, wide = random_inputs() | WITHOUT_KL, {"clip_eps_low": 1e9, "clip_eps_high": 1e9}
    found, expected = (loss_and_gradient(script, inputs, **wide)[1] for script in (cispo, dapo))
    torch.testing.assert_close(found, expected)
    clipped = loss_and_gradient(dapo, inputs)[1]
    assert ((clipped == 0) & (found != 0)).any() and (found[inputs["completion_mask"]] != 0).all()


# ---- other libraries' numbers


@pytest.mark.parametrize("case, rtol", cases_of("cispo_trl", lambda config: config["beta"] == 0))
def test_loss_and_gradient_are_those_of_trl(case, rtol):
    check_loss_of_others(cispo, case, rtol, divisor="tokens")


def test_advantages_are_those_of_trl():
    check_advantages_of_others(cispo.compute_advantages, "trl_group", rtol=1e-6)


# ---- the exact gradient


@pytest.mark.parametrize("centred", [True, False])
def test_expected_gradient_is_that_of_the_expected_reward(centred):
    rows = enumerate_rows()
    found = expected_gradient(cispo, rows["advantages"] if centred else rows["rewards"])
    assert relative_error(found, true_gradient()) < 1e-9


def test_expected_gradient_of_groups_of_two():
    check_gradient_of_groups_of_two(cispo, over_lengths=False)


@pytest.fixture(scope="module", params=[1, 3])
def off_policy(request):
    """Every completion of at most so many tokens, at a policy that has left the one that sampled."""
    cases = enumerate_completions(2)
    return cases["model"], cases[request.param], request.param


def cispo_gradient(policy, case, cap):
    """Of the mean of the objective over every completion, drawn from the policy before."""
    inputs = {key: case[key] for key in ("logprobs", "old_logprobs", "completion_mask")}
    inputs["advantages"] = case["advantages"] * case["old"]  # the loss is linear in them
    return -gradient_of(policy, cispo.policy_loss(**inputs, clip_eps_high=cap - 1)[0])


@pytest.mark.parametrize("cap", [1.02, 1e9])
def test_off_policy_it_has_the_gradient_of_its_weighted_log_probabilities(off_policy, cap):
    """Token by token, each a weight that is a plain number times ∇ log π; some of them are capped at 1.02."""
    policy, case, _ = off_policy
    exact, num_capped = 0.0, 0
    for row, length in enumerate(case["completion_mask"].sum(1).tolist()):
        for t in range(length):
            ratio = (case["logprobs"][row, t] - case["old_logprobs"][row, t]).exp().item()
            num_capped += ratio > cap
            weight = min(ratio, cap) * (case["advantages"][row] * case["old"][row]).item()
            exact = exact + weight * case["logprobs"][row, t]
    assert (num_capped > 0) == (cap < 2)
    assert relative_error(cispo_gradient(policy, case, cap), gradient_of(policy, exact)) < 1e-9


def test_without_a_cap_it_has_the_gradient_of_the_policy_as_it_is_now_for_one_token(off_policy):
    """E_old[r A ∇ log π] = ∇ E_π[A]: exact for one token; a cap is a bias, and so are longer completions."""
    policy, case, longest = off_policy
    now = (case["logprobs"] * case["completion_mask"]).sum(1).exp()
    exact = gradient_of(policy, (now * case["advantages"]).sum())
    error = relative_error(cispo_gradient(policy, case, 1e9), exact)
    assert error < 1e-9 if longest == 1 else 1e-4 < error < 0.5
    assert relative_error(cispo_gradient(policy, case, 1.02), exact) > max(error, 1e-4)


# ---- invariances and a short run


@each_invariance
def test_what_does_not_matter(check):
    check(cispo)


def test_advantages_are_centred_and_0_without_a_difference():
    check_advantages(cispo, cispo.compute_advantages)


@pytest.mark.slow
def test_a_short_run_learns(tmp_path):
    check_learning(cispo, tmp_path / "run")
