"""GRPO's objective: python -m pytest tests/test_grpo.py"""

import itertools
import math

import pytest
import torch
from helpers import (
    CLIP_CASES,
    COUNTED_AS_CLIPPED,
    angle,
    check_advantages,
    check_advantages_of_others,
    check_clip,
    check_counted_as_clipped,
    check_gradient_of_groups_of_two,
    check_loss_of_others,
    each_invariance,
    enumerate_rows,
    every_pair,
    expected_gradient,
    gradient_over_lengths,
    loss_and_gradient,
    random_inputs,
    read_oracle,
    tensor,
    train,
    true_gradient,
)
from tiny import relative_error, shares_changed
from transformers import AutoTokenizer

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
REF_RATIOS = tensor([[2.0, 0.5, 1.0, 9.0], [1.0, 1.0, math.e, 9.0]])  # of the reference over the policy
INPUTS |= {"ref_logprobs": LOGPROBS + REF_RATIOS.log(), "clip_eps": 0.2, "kl_coef": 0.1}


def test_loss_gradient_and_metrics_by_hand():
    loss, gradient, metrics = loss_and_gradient(grpo, INPUTS)
    # Ratios are clipped to 0.8 .. 1.2; -min(r A, clip(r) A) for each token, then the mean over the three tokens.
    policy_loss = (-2.4 - 2.4 - 1.0) / 3 + (1.5 + 0.8 + 1.0) / 3
    # k3 = ρ - log ρ - 1 with ρ = 2, 1/2, 1 and 1, 1, e
    k3 = (1 - math.log(2)) + (math.log(2) - 0.5) + 0, math.e - 2
    policy_gradient = tensor([[0.0, 0.0, -2 * 0.5, 0.0], [1.5, 0.0, 1.0, 0.0]]) / 3  # -r A where not clipped
    kl_gradient = tensor([[1 - 2.0, 1 - 0.5, 0.0, 0.0], [0.0, 0.0, 1 - math.e, 0.0]]) / 3  # 1 - ρ
    torch.testing.assert_close(gradient, policy_gradient + 0.1 * kl_gradient, rtol=1e-12, atol=1e-15)
    # approx_kl is the sum over tokens of r - log r - 1.
    kl = (0.5 - math.log(1.5)) + (1 - math.log(2)) + (math.log(2) - 0.5)
    kl += (0.5 - math.log(1.5)) + (math.log(2) - 0.5) + 0
    expected = {
        "loss/policy": policy_loss,
        "loss/kl": 0.1 * sum(k3) / 3,
        "policy/approx_kl": kl,
        "policy/ref_kl": sum(k3),
        "policy/clip_fraction_low": 1,
        "policy/clip_fraction_high": 2,
    }
    assert {key: value.item() for key, value in metrics.items()} == pytest.approx(expected, rel=1e-12)
    assert loss.item() == pytest.approx(expected["loss/policy"] + expected["loss/kl"], rel=1e-12)
    assert not any(value.requires_grad or value.ndim for value in metrics.values())


def test_advantages_by_hand():
    """A group of rewards 1, 0, 0, 1 has mean 1/2 and standard deviation √(1/3); 1, 0, 0, 0 has 1/4 and 1/2."""
    advantages = grpo.compute_advantages(tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]), 4)
    half, quarter = 0.5 / (math.sqrt(1 / 3) + 1e-4), 0.25 / (0.5 + 1e-4)
    expected = tensor([half, -half, -half, half, 3 * quarter, -quarter, -quarter, -quarter])
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("advantage, ratio, gradient", CLIP_CASES)
def test_where_the_clip_stops_the_gradient(advantage, ratio, gradient):
    check_clip(grpo, advantage, ratio, gradient)


@pytest.mark.parametrize("advantage, ratio, low, high", COUNTED_AS_CLIPPED)
def test_what_counts_as_clipped(advantage, ratio, low, high):
    check_counted_as_clipped(grpo, advantage, ratio, low, high)


def test_kl_coef_0_needs_no_reference():
    loss, gradient, metrics = loss_and_gradient(grpo, random_inputs(), kl_coef=0.0)
    without = loss_and_gradient(grpo, random_inputs(), kl_coef=0.0, ref_logprobs=None)
    assert torch.equal(without[0], loss) and torch.equal(without[1], gradient)
    assert metrics.keys() - without[2].keys() == {"policy/ref_kl"}
    assert "loss/kl" not in metrics


def test_k3_is_positive_and_has_the_right_direction():
    """Far from 1 the two directions differ: ρ - log ρ - 1 with ρ = reference over policy."""
    for log_ratio in (-20.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 5.0):  # of policy over reference
        logprobs, ones = tensor([[-1.0]]), torch.ones(1, 1)
        _, metrics = grpo.policy_loss(logprobs, logprobs, logprobs - log_ratio, tensor([0.0]), ones, 0.2, 1.0)
        k3 = metrics["policy/ref_kl"].item()
        assert k3 == pytest.approx(math.expm1(-log_ratio) + log_ratio, rel=1e-9) and (k3 > 0) == (log_ratio != 0)


# ---- other libraries' numbers


def loss_cases():
    for name, coef, rtol in [
        ("grpo_trl", "beta", 1e-9),
        ("grpo_oat", "beta", 1e-9),
        ("grpo_verl", "kl_loss_coef", 1e-6),  # adds 1e-8 to its denominators
    ]:
        for case in read_oracle(name):
            if case["config"].get("clip_ratio_c", 1e9) == 1e9:  # others of verl's have a second clip
                yield pytest.param(case, case["config"][coef], rtol, id=f"{name}-{case['name']}")


@pytest.mark.parametrize("case, kl_coef, rtol", loss_cases())
def test_loss_and_gradient_are_those_of_others(case, kl_coef, rtol):
    check_loss_of_others(grpo, case, rtol, kl_coef=kl_coef)


def test_advantages_are_those_of_trl():
    check_advantages_of_others(grpo.compute_advantages, "trl_group", rtol=1e-6)


@pytest.mark.parametrize("peer", ["verl", "open_instruct"])
def test_k3_is_that_of_others(peer):
    [case] = read_oracle("kl")
    logprobs, ref_logprobs = tensor(case["inputs"]["logp"]), tensor(case["inputs"]["ref_logp"])
    for row, column in itertools.product(range(logprobs.shape[0]), range(logprobs.shape[1])):
        place = slice(row, row + 1), slice(column, column + 1)
        inputs = {"logprobs": logprobs[place], "old_logprobs": logprobs[place], "ref_logprobs": ref_logprobs[place]}
        inputs |= {"advantages": tensor([0.0]), "completion_mask": torch.ones(1, 1), "kl_coef": 1.0}
        value, gradient, _ = loss_and_gradient(grpo, inputs)
        assert value.item() == pytest.approx(case["outputs"][f"{peer}_k3"][row][column], rel=1e-9)
        assert gradient.item() == pytest.approx(case["outputs"][f"{peer}_k3_grad"][row][column], rel=1e-9)


# ---- the exact gradient


def test_expected_gradient_divides_by_the_length():
    found = expected_gradient(grpo, enumerate_rows()["advantages"])
    assert relative_error(found, gradient_over_lengths()) < 1e-9
    assert angle(found, true_gradient()) > 0.01  # so it is not the gradient of the expected reward


def test_expected_gradient_of_groups_of_two():
    """Division by the standard deviation turns it away from the gradient of the expected reward."""
    check_gradient_of_groups_of_two(grpo, over_lengths=True)
    pick, weights = every_pair()
    advantages = grpo.compute_advantages(enumerate_rows()["rewards"][pick], 2)
    assert angle(expected_gradient(grpo, advantages, pick, weights), true_gradient()) > 0.01


# ---- invariances and a short run


@each_invariance
def test_what_does_not_matter(check):
    check(grpo)


def test_advantages_are_centred_and_0_without_a_difference():
    check_advantages(grpo, grpo.compute_advantages)


@pytest.mark.slow
def test_the_default_run_cut_short_learns(tmp_path):
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
