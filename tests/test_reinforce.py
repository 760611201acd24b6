"""REINFORCE's objective: python -m pytest tests/test_reinforce.py"""

from functools import partial

import helpers
import pytest
from helpers import each_invariance, enumerate_rows, tensor, true_gradient
from tiny import relative_error
from torch.testing import assert_close

import reinforce

# ---- by hand


def test_loss_and_gradient_by_hand():
    loss = 2 * (1 + 2 + 3) - 1 * (0.5 + 1.5 + 2.5)  # -A times the log-probability of the completion
    gradient = [[-2.0, -2.0, -2.0, 0.0], [1.0, 1.0, 1.0, 0.0]]  # -A
    helpers.check_by_hand(reinforce, loss, gradient, {})


def test_advantages_by_hand():
    """The rewards are 1, 0, 0, 0 and 1, 1, 0, 0; leave-one-out compares each with the mean of the three others."""
    rewards = tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    group_mean = tensor([0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5])
    assert_close(reinforce.compute_advantages(rewards, 4, "group_mean"), group_mean)
    leave_one_out = tensor([1.0, -1 / 3, -1 / 3, -1 / 3, 2 / 3, 2 / 3, -2 / 3, -2 / 3])
    assert_close(reinforce.compute_advantages(rewards, 4, "leave_one_out"), leave_one_out)
    assert_close(reinforce.compute_advantages(rewards, 4, "none"), rewards)


# ---- other libraries' numbers

# verl adds 1e-8 to its denominators; its other modes weigh tokens otherwise than the paper.
CASES = helpers.cases_of("reinforce_rloo_verl", rtol=1e-6, loss_agg_mode="seq-mean-token-sum")


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_verl(case):
    helpers.check_loss_of_others(reinforce, case)


def test_advantages_are_those_of_verl():
    leave_one_out = partial(reinforce.compute_advantages, baseline="leave_one_out")
    helpers.check_advantages_of_others(leave_one_out, "verl_rloo", rtol=1e-9)


# ---- the exact gradient


@pytest.mark.parametrize("name", ["advantages", "rewards"])
def test_expected_gradient_is_that_of_the_expected_reward(name):
    """With a baseline and without."""
    found = helpers.expected_gradient(reinforce, enumerate_rows()[name])
    assert relative_error(found, true_gradient()) < 1e-9


@pytest.mark.parametrize("baseline, factor", [("none", 1), ("leave_one_out", 1), ("group_mean", 1 / 2)])
def test_what_a_baseline_does_to_the_expected_gradient(baseline, factor):
    """Over all groups of two: (r - mean) has (1 - 1/G) times the true gradient, leave-one-out has it."""
    found = helpers.gradient_of_pairs(reinforce, partial(reinforce.compute_advantages, baseline=baseline))
    assert relative_error(found, factor * true_gradient()) < 1e-9


# ---- invariances and a short run


@each_invariance
def test_what_does_not_matter(check):
    check(reinforce)


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_advantages_are_centred_and_0_without_a_difference(baseline):
    helpers.check_advantages(partial(reinforce.compute_advantages, baseline=baseline))
