"""DAPO's objective: python -m pytest tests/test_dapo.py"""

import math

import pytest
import torch
from helpers import (
    CLIP_CASES,
    COUNTED_AS_CLIPPED,
    WITHOUT_KL,
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
    every_pair,
    expected_gradient,
    loss_and_gradient,
    random_inputs,
    read_oracle,
    tensor,
    true_gradient,
    two_completions,
)
from tiny import relative_error

import dapo
import dr_grpo
import grpo
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
INPUTS |= {"clip_eps_low": 0.2, "clip_eps_high": 0.28}


def test_loss_gradient_and_metrics_by_hand():
    # Ratios are clipped to 0.8 .. 1.28: -min(r A, clip(r) A), summed over all tokens of all completions.
    loss = -2.56 - 2.56 - 1.0 + 1.5 + 0.8 + 1.0
    gradient = [[0.0, 0.0, -1.0, 0.0], [1.5, 0.0, 1.0, 0.0]]  # -r A where not clipped
    # approx_kl is the sum over tokens of r - log r - 1.
    kl = (0.5 - math.log(1.5)) + (1 - math.log(2)) + (math.log(2) - 0.5)
    kl += (0.5 - math.log(1.5)) + (math.log(2) - 0.5) + 0
    check_by_hand(dapo, INPUTS, loss, gradient, {"approx_kl": kl, "clip_fraction_low": 1, "clip_fraction_high": 2})


@pytest.mark.parametrize("ratio, is_clipped", [(1.25, False), (1.27, False), (1.29, True)])
def test_it_clips_higher_above_than_below(ratio, is_clipped):
    assert (loss_and_gradient(dapo, two_completions(1.0, ratio))[1][0] == 0).all() == is_clipped
    assert (loss_and_gradient(dr_grpo, two_completions(1.0, ratio))[1][0] == 0).all()  # one range of 0.2


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_overlong_penalty_by_hand(dtype):
    """With a limit of 48 and a buffer of 8 it falls from 0 at 40 to -1 at 48."""
    lengths = torch.tensor([0, 1, 39, 40, 41, 44, 47, 48, 49], dtype=dtype)
    penalties = dapo.overlong_penalty(lengths, 48, 8)
    assert penalties.tolist() == [0, 0, 0, 0, -1 / 8, -1 / 2, -7 / 8, -1, -1]
    assert penalties.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert dapo.overlong_penalty(lengths[:-1], 48, 0).tolist() == [0.0] * 8
    expected = [-n / 48 for n in lengths[:-1].tolist()]
    assert dapo.overlong_penalty(lengths[:-1], 48, 48).tolist() == pytest.approx(expected)


def test_has_signal():
    rewards = tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.3, 0.3, 0.3, 0.3, 0.3, 0.4])
    assert dapo.has_signal(rewards, 3).tolist() == [False, False, True, True, False, True]


@pytest.mark.parametrize("advantage, ratio, gradient", CLIP_CASES)
def test_where_the_clip_stops_the_gradient(advantage, ratio, gradient):
    check_clip(dapo, advantage, ratio, gradient)


@pytest.mark.parametrize("advantage, ratio, low, high", COUNTED_AS_CLIPPED)
def test_what_counts_as_clipped(advantage, ratio, low, high):
    check_counted_as_clipped(dapo, advantage, ratio, low, high)


def test_at_equal_lengths_it_is_length_times_grpo():
    inputs = random_inputs() | WITHOUT_KL | {"completion_mask": torch.ones(6, 5), "clip_eps_high": 0.2}
    found, expected = (loss_and_gradient(script, inputs)[:2] for script in (dapo, grpo))
    torch.testing.assert_close(found, tuple(5 * value for value in expected))


def test_all_with_a_clip_are_equal_for_completions_of_one_token():
    inputs = random_inputs() | WITHOUT_KL
    one_token = {key: value[:, :1] for key, value in inputs.items() if torch.is_tensor(value) and value.ndim == 2}
    changes = one_token | {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "max_completion_length": 1}
    results = [loss_and_gradient(script, inputs, **changes)[:2] for script in (dapo, grpo, dr_grpo, gspo)]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


# ---- other libraries' numbers


@pytest.mark.parametrize("case, rtol", cases_of("dapo_trl", lambda config: config["beta"] == 0))
def test_loss_and_gradient_are_those_of_trl(case, rtol):
    check_loss_of_others(dapo, case, rtol, divisor="tokens")


def test_advantages_are_those_of_trl():
    check_advantages_of_others(dapo.compute_advantages, "trl_group", rtol=1e-6)


def test_overlong_penalty_is_that_of_others():
    [case] = read_oracle("dapo_overlong")
    lengths, config = case["inputs"]["lengths"], case["config"]
    penalty = dapo.overlong_penalty(tensor(lengths), config["L_max"], config["L_cache"])
    torch.testing.assert_close(penalty, tensor(case["outputs"]["trl"]))
    # verl's goes on falling past the limit, which no completion passes
    within = [i for i, length in enumerate(lengths) if length <= config["L_max"]]
    torch.testing.assert_close(penalty[within], tensor(case["outputs"]["verl"])[within])


# ---- the exact gradient


@pytest.mark.parametrize("centred", [True, False])
def test_expected_gradient_is_that_of_the_expected_reward(centred):
    rows = enumerate_rows()
    found = expected_gradient(dapo, rows["advantages"] if centred else rows["rewards"])
    assert relative_error(found, true_gradient()) < 1e-9


def test_expected_gradient_of_groups_of_two():
    """Division by the standard deviation turns it away from the gradient of the expected reward."""
    check_gradient_of_groups_of_two(dapo, over_lengths=False)
    pick, weights = every_pair()
    advantages = dapo.compute_advantages(enumerate_rows()["rewards"][pick], 2)
    assert angle(expected_gradient(dapo, advantages, pick, weights), true_gradient()) > 0.01


# ---- invariances and a short run


@each_invariance
def test_what_does_not_matter(check):
    check(dapo)


def test_advantages_are_centred_and_0_without_a_difference():
    check_advantages(dapo, dapo.compute_advantages)


@pytest.mark.slow
def test_a_short_run_learns(tmp_path):
    check_learning(dapo, tmp_path / "run")
