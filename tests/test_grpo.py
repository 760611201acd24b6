"""GRPO's objective: python -m pytest tests/test_grpo.py"""

import math

import helpers
import pytest
import torch
from helpers import cases_of, each_invariance, loss_and_gradient, read_oracle, tensor
from tiny import relative_error, shares_changed
from torch.testing import assert_close

import cispo
import dapo
import grpo
import grpo_tools
import gspo

# ---- by hand


def test_loss_gradient_and_metrics_by_hand():
    # ρ, of the reference over the policy
    ref_ratios = tensor([[2.0, 0.5, 1.0, 9.0], [1.0, 1.0, math.e, 9.0]])
    ref_logprobs = helpers.LOGPROBS + ref_ratios.log()
    # Ratios are clipped to 0.8 .. 1.2; -min(r A, clip(r) A) for each token, then the mean over the three tokens.
    policy_loss = (-2.4 - 2.4 - 1.0) / 3 + (1.5 + 0.8 + 1.0) / 3
    # k3 = ρ - log ρ - 1
    k3 = (1 - math.log(2)) + (math.log(2) - 0.5) + 0 + (math.e - 2)
    policy_gradient = tensor([[0.0, 0.0, -2 * 0.5, 0.0], [1.5, 0.0, 1.0, 0.0]]) / 3  # -r A where not clipped
    kl_gradient = tensor([[1 - 2.0, 1 - 0.5, 0.0, 0.0], [0.0, 0.0, 1 - math.e, 0.0]]) / 3  # 1 - ρ
    loss, gradient, metrics = loss_and_gradient(grpo, helpers.INPUTS, ref_logprobs=ref_logprobs, kl_coef=0.1)
    assert loss.item() == pytest.approx(policy_loss + 0.1 * k3 / 3)
    assert_close(gradient, policy_gradient + 0.1 * kl_gradient)
    expected = {
        "policy/approx_kl": helpers.APPROX_KL,
        "policy/sampler_kl": 0.0,
        "policy/ref_kl": k3,
        "policy/clip_fraction_low": 1,
        "policy/clip_fraction_high": 2,
    }
    helpers.assert_pairs(metrics, {name: (total, 6) for name, total in expected.items()})


def test_advantages_by_hand():
    """A group of rewards 1, 0, 0, 1 has mean 1/2 and standard deviation √(1/3); 1, 0, 0, 0 has 1/4 and 1/2."""
    advantages = grpo.compute_advantages(tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]), 4)
    half = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    quarter = 0.25 / (0.5 + 1e-4)
    expected = tensor([half, -half, -half, half, 3 * quarter, -quarter, -quarter, -quarter])
    assert_close(advantages, expected)


def test_where_the_clip_stops_the_gradient():
    helpers.check_clip(grpo)


def test_k3_is_positive_and_has_the_right_direction():
    """Far from 1 the two directions differ: ρ - log ρ - 1 with ρ = reference over policy."""
    logprobs = tensor([[-1.0]])
    for log_ratio in (-20.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 5.0):  # of policy over reference
        inputs = {"logprobs": logprobs, "old_logprobs": logprobs, "ref_logprobs": logprobs - log_ratio, "kl_coef": 1.0}
        inputs |= {"advantages": tensor([0.0]), "completion_mask": torch.ones(1, 1)}
        _, _, metrics = loss_and_gradient(grpo, inputs)
        k3, _ = metrics["policy/ref_kl"]
        assert k3 == pytest.approx(math.expm1(-log_ratio) + log_ratio)
        assert (k3 > 0) == (log_ratio != 0)


# ---- other libraries' numbers

CASES = cases_of("grpo_trl") + cases_of("grpo_oat")
# verl adds 1e-8 to its denominators; with other values of clip_ratio_c it has a second clip.
CASES += cases_of("grpo_verl", rtol=1e-6, clip_ratio_c=1e9)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_others(case):
    helpers.check_loss_of_others(grpo, case)


@pytest.mark.parametrize("script", [grpo, dapo, gspo, cispo, grpo_tools])
def test_advantages_are_those_of_trl(script):
    helpers.check_advantages_of_others(script.compute_advantages, "trl_group", rtol=1e-6)


@pytest.mark.parametrize("peer", ["verl", "open_instruct"])
def test_k3_is_that_of_others(peer):
    [case] = read_oracle("kl")
    logprobs, ref_logprobs = tensor(case["inputs"]["logp"]), tensor(case["inputs"]["ref_logp"])
    num_rows, num_tokens = logprobs.shape
    inputs = {"logprobs": logprobs, "old_logprobs": logprobs, "ref_logprobs": ref_logprobs, "kl_coef": num_tokens}
    inputs |= {"advantages": torch.zeros(num_rows), "completion_mask": torch.ones_like(logprobs)}
    _, gradient, metrics = loss_and_gradient(grpo, inputs)
    expected = tensor(case["outputs"][f"{peer}_k3"]).sum().item()
    assert metrics["policy/ref_kl"] == pytest.approx((expected, logprobs.numel()))
    assert_close(gradient, tensor(case["outputs"][f"{peer}_k3_grad"]))


# ---- the exact gradient


def test_expected_gradient_divides_by_the_length():
    """So it is not that of the expected reward."""
    rows = helpers.enumerate_rows()
    found = helpers.expected_gradient(grpo, rows["advantages"])
    objective = (rows["probabilities"] * rows["advantages"] / rows["lengths"]).sum()
    assert relative_error(found, helpers.gradient_of(rows["model"], objective)) < 1e-9
    assert torch.cosine_similarity(found, helpers.true_gradient(), dim=0) < 0.9999


def test_expected_gradient_of_groups_of_two():
    """Division by the standard deviation turns it away from the gradient of the expected reward."""
    helpers.check_gradient_of_groups_of_two(grpo, over_lengths=True)
    found = helpers.gradient_of_pairs(grpo, grpo.compute_advantages)
    assert torch.cosine_similarity(found, helpers.true_gradient(), dim=0) < 0.9999


# ---- invariances and a short run


@each_invariance
def test_what_does_not_matter(check):
    check(grpo)


def test_advantages_are_centred_and_0_without_a_difference():
    helpers.check_advantages(grpo.compute_advantages)


def test_a_short_run_of_a_larger_learning_rate_learns(tmp_path):
    torch.manual_seed(0)
    settings = {"num_steps": 10, "eval_every": 10, "eval_prompts": 32, "save_every": 10, "seed": 11}
    settings |= {"learning_rate": 8e-4, "prompts_per_step": 8, "minibatch_size": 32}
    lines = helpers.train(grpo, tmp_path / "run", **settings)
    first, last = lines[0], lines[-1]
    assert last["eval/accuracy"] > first["eval/accuracy"] + 0.1
    assert last["eval/pass@1"] > first["eval/pass@1"] + 0.05
    rewards = [line["reward/mean"] for line in lines[1:]]
    assert sum(rewards[-5:]) > sum(rewards[:5])
    assert last["rollout/length_mean"] > lines[1]["rollout/length_mean"]
    assert all(line["policy/approx_kl"] > 0 for line in lines[1:])  # the second minibatch is off-policy
    assert 0 < last["policy/ref_kl"] < 1
    assert min(shares_changed(tmp_path / "run" / "checkpoint")) > 0.5  # rows of unused tokens stay
