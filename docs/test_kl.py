"""What docs/kl.md says of estimators of the KL divergence, and which of them the scripts have."""

import kl
import pytest
import torch
from toy import relative_error

import grpo
import ppo_rlhf


@pytest.fixture(scope="module")
def policy():
    """Every completion of a tiny policy, and what a reference makes of them."""
    policy = kl.enumerate_policy()
    ref = kl.make_ref(kl.SIZES[-1])
    policy.ref_logprobs, _ = kl.token_logprobs(policy, ref)
    policy.fixed_logprobs = policy.logprobs.detach()
    policy.found = kl.compare(policy, kl.SIZES[-1])
    return policy


@pytest.fixture
def found(policy):
    return policy.found


def mean_of(found, where, name):
    """The expected gradient in the first row of the table of this place and estimator."""
    for key, (mean, _) in found.rows.items():
        if key[:2] == (where, name):
            return mean


def mean_gradient(policy, coefficients):
    return kl.mean_and_std(policy, coefficients)[0]


def test_k1_and_k3_are_unbiased_and_k2_is_not(policy, found):
    assert policy.sampled.sum().item() == pytest.approx(1, abs=1e-12)
    log_ratios = (policy.fixed_logprobs - policy.ref_logprobs).sum(1)
    exact = (policy.sampled * log_ratios).sum().item()
    k1, k2, k3 = (found.values[name][0] for name in ("k1", "k2", "k3"))
    assert exact > 0.1
    assert k1 == pytest.approx(exact, rel=1e-9)
    assert k3 == pytest.approx(exact, rel=1e-9)
    assert abs(k2 / exact - 1) > 0.1
    assert found.negative["k1"] > 0.1
    assert found.negative["k2"] == found.negative["k3"] == 0


def test_k1_in_the_loss_is_noise(found):
    mean, std = found.rows["loss", "k1", "1"]
    assert mean.norm() < 1e-12
    assert std > found.gradient.norm()


@pytest.mark.parametrize("name", ["k2", "ratio · k3"])
def test_k2_and_ratio_k3_in_the_loss_have_the_gradient_of_tokens_only(found, name):
    mean = mean_of(found, "loss", name)
    assert relative_error(mean, found.token_gradient) < 1e-9
    assert relative_error(mean, found.gradient) > 0.1


def test_k3_in_the_loss_has_the_gradient_of_the_divergence_with_its_arguments_exchanged(policy, found):
    """At each token, after prefixes of the policy: it is not the gradient of KL(ref || policy) of completions."""
    mean = mean_of(found, "loss", "k3")
    ref_probabilities = policy.ref_logprobs.sum(1).exp()
    whole = -(ref_probabilities * policy.logprobs.sum(1)).sum()  # less a constant
    assert relative_error(mean, found.token_reverse_gradient) < 1e-9
    assert relative_error(mean, found.gradient) > 0.1
    assert relative_error(mean, found.token_gradient) > 0.1
    assert relative_error(mean, kl.gradient(policy, whole)) > 0.1


def test_in_the_reward_k1_is_exact_and_the_two_parts_of_k3_make_the_whole(found):
    for name in ("k1", "k1, less its mean", "k1 of this and later tokens, `ppo_rlhf.py`"):
        mean = mean_of(found, "reward", name)
        assert relative_error(mean, found.gradient) < 1e-9
    whole = mean_of(found, "reward", "k3") + mean_of(found, "loss", "k3")
    assert relative_error(whole, found.gradient) < 1e-9


def kl_coefficients(policy):
    """Derivative of grpo.policy_loss, which has nothing but its KL term at advantage 0, to each log-probability."""
    logprobs = policy.logprobs.detach().requires_grad_()
    old_logprobs, advantages = policy.fixed_logprobs, torch.zeros(len(logprobs))
    inputs = (logprobs, old_logprobs, old_logprobs, policy.ref_logprobs, advantages, policy.mask)
    loss, metrics = grpo.policy_loss(*inputs, clip_eps=0.2, kl_coef=1.0, sampler_weight_cap=2.0)
    loss.backward()
    return logprobs.grad, metrics["policy/ref_kl"]


def test_grpo_has_k3_over_the_length_in_the_loss(policy, found):
    coefficients, metric = kl_coefficients(policy)
    mean = mean_gradient(policy, coefficients)
    assert relative_error(mean, mean_of(found, "loss", "k3 / \\|y\\|, `grpo.py`")) < 1e-9
    per_token = mean_gradient(policy, coefficients * policy.lengths)
    assert relative_error(per_token, found.token_reverse_gradient) < 1e-9
    k3 = kl.k3(policy.fixed_logprobs, policy.ref_logprobs)
    torch.testing.assert_close(metric, (k3.sum(), policy.mask.sum()), rtol=1e-9, atol=0)


def test_ppo_has_k1_to_go_in_the_reward(policy, found):
    logprobs = policy.logprobs.detach().requires_grad_()
    old_logprobs, mask = policy.fixed_logprobs, policy.mask
    zeros = torch.zeros_like(old_logprobs)
    rewards = ppo_rlhf.token_rewards(zeros[:, 0], old_logprobs, policy.ref_logprobs, mask, 1.0)
    advantages, _ = ppo_rlhf.compute_advantages(rewards, zeros, mask, gamma=1.0, gae_lambda=1.0)
    loss, _ = ppo_rlhf.policy_loss(logprobs, old_logprobs, old_logprobs, advantages, mask, 0.2, 2.0)
    loss.backward()
    assert relative_error(mean_gradient(policy, logprobs.grad), found.gradient) < 1e-9


def test_edits_of_the_page_do_what_it_says(policy, monkeypatch):
    """k2 and ratio · k3 have the coefficient k1; the metric stays k3."""
    monkeypatch.setattr(grpo, "policy_loss", grpo.policy_loss)  # put back at the end
    k3, metric = kl_coefficients(policy)
    k1 = kl.k1(policy.fixed_logprobs, policy.ref_logprobs) / policy.lengths
    expected = {"k3, unchanged": k3, "k2": k1, "ratio · k3": k1, "wrong sign": -k3, "none": 0 * k3}
    assert expected.keys() == kl.EDITS.keys()
    for name, coefficients in expected.items():
        kl.edit_policy_loss(name)
        found, new_metric = kl_coefficients(policy)
        torch.testing.assert_close(found, coefficients, msg=name)
        assert new_metric == metric


def test_the_page_has_the_numbers_of_its_command_and_the_lines_of_the_script():
    page = kl.PAGE.read_text(encoding="utf-8")
    assert kl.fill(page) == page, "python docs/kl.py"
    for name in ("k2", "ratio · k3"):
        assert f"-        {kl.KL_LINE}\n+        {kl.EDITS[name]}\n" in page
