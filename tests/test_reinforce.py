"""REINFORCE's objective: python -m pytest tests/test_reinforce.py"""

from functools import partial

import pytest
import torch
from helpers import (
    WITHOUT_KL,
    cases_of,
    check_advantages,
    check_advantages_of_others,
    check_by_hand,
    check_learning,
    check_loss_of_others,
    each_invariance,
    enumerate_rows,
    every_pair,
    expected_gradient,
    loss_and_gradient,
    random_inputs,
    tensor,
    true_gradient,
)
from tiny import relative_error

import cispo
import dapo
import dr_grpo
import grpo
import reinforce

# ---- by hand

# Two completions of three tokens; the last column is padding.
INPUTS = {
    "logprobs": tensor([[-1.0, -2.0, -3.0, -4.0], [-0.5, -1.5, -2.5, -3.5]]),
    "advantages": tensor([2.0, -1.0]),
    "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]]),
}


def test_loss_and_gradient_by_hand():
    loss = 2 * (1 + 2 + 3) - 1 * (0.5 + 1.5 + 2.5)  # -A times the log-probability of the completion
    check_by_hand(reinforce, INPUTS, loss, [[-2.0, -2.0, -2.0, 0.0], [1.0, 1.0, 1.0, 0.0]], {})


def test_advantages_by_hand():
    """The rewards are 1, 0, 0, 0 and 1, 1, 0, 0; leave-one-out compares each with the mean of the three others."""
    rewards = tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    group_mean = tensor([0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5])
    torch.testing.assert_close(reinforce.compute_advantages(rewards, 4, "group_mean"), group_mean)
    leave_one_out = tensor([1.0, -1 / 3, -1 / 3, -1 / 3, 2 / 3, 2 / 3, -2 / 3, -2 / 3])
    torch.testing.assert_close(reinforce.compute_advantages(rewards, 4, "leave_one_out"), leave_one_out)
    torch.testing.assert_close(reinforce.compute_advantages(rewards, 4, "none"), rewards)


# ---- other libraries' numbers

# verl adds 1e-8 to its denominators; its other modes weigh tokens otherwise than the paper.
CASES = cases_of("reinforce_rloo_verl", lambda config: config["loss_agg_mode"] == "seq-mean-token-sum", rtol=1e-6)


@pytest.mark.parametrize("case, rtol", CASES)
def test_loss_and_gradient_are_those_of_verl(case, rtol):
    check_loss_of_others(reinforce, case, rtol)


def test_advantages_are_those_of_verl():
    check_advantages_of_others(partial(reinforce.compute_advantages, baseline="leave_one_out"), "verl_rloo", rtol=1e-9)


@pytest.mark.parametrize(
    "script, divide_by",
    [(grpo, lambda mask: mask.sum(1, keepdim=True)), (dr_grpo, lambda _: 9), (dapo, lambda _: 1), (cispo, lambda _: 1)],
)
def test_at_ratio_1_its_siblings_have_its_gradient_over_what_each_divides_by(script, divide_by):
    inputs = random_inputs() | WITHOUT_KL
    narrow = dict.fromkeys(("clip_eps", "clip_eps_low", "clip_eps_high"), 1e-6)
    found = loss_and_gradient(script, inputs, old_logprobs=inputs["logprobs"], **narrow)[1]
    torch.testing.assert_close(found, loss_and_gradient(reinforce, inputs)[1] / divide_by(inputs["completion_mask"]))


# ---- the exact gradient


@pytest.mark.parametrize("centred", [True, False])
def test_expected_gradient_is_that_of_the_expected_reward(centred):
    rows = enumerate_rows()
    found = expected_gradient(reinforce, rows["advantages"] if centred else rows["rewards"])
    assert relative_error(found, true_gradient()) < 1e-9


@pytest.mark.parametrize("baseline, factor", [("none", 1), ("leave_one_out", 1), ("group_mean", 1 / 2)])
def test_what_a_baseline_does_to_the_expected_gradient(baseline, factor):
    """Over all groups of two: (r - mean) has (1 - 1/G) times the true gradient, leave-one-out has it."""
    pick, weights = every_pair()
    advantages = reinforce.compute_advantages(enumerate_rows()["rewards"][pick], 2, baseline)
    assert relative_error(expected_gradient(reinforce, advantages, pick, weights), factor * true_gradient()) < 1e-9


# ---- invariances and a short run


@each_invariance
def test_what_does_not_matter(check):
    check(reinforce)


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_advantages_are_centred_and_0_without_a_difference(baseline):
    check_advantages(reinforce, partial(reinforce.compute_advantages, baseline=baseline))


@pytest.mark.slow
def test_a_short_run_learns(tmp_path):
    check_learning(reinforce, tmp_path / "run")
