"""docs/kl.md: what it says of estimators of the KL divergence, and that grpo.py and ppo_rlhf.py have those it says."""

from pathlib import Path

import kl
import pytest
import torch
from tiny import relative_error

import grpo
import ppo_rlhf


@pytest.fixture(scope="module")
def policy():
    return kl.enumerate_policy()


@pytest.fixture(scope="module")
def found(policy):
    return kl.compare(policy, kl.SIZES[-1])


@pytest.fixture(scope="module")
def ref_logprobs(policy):
    return kl.token_logprobs(policy, kl.make_ref(kl.SIZES[-1]))[0]


def mean_of(found, *place):
    """The expected gradient in the first row of the table that has this place and estimator."""
    return next(mean for key, (mean, _) in found.rows.items() if key[:2] == place)


def mean_gradient(policy, coefficients):
    return kl.mean_and_std(policy, coefficients)[0]


def test_k1_and_k3_are_unbiased_and_k2_is_not(policy, found, ref_logprobs):
    assert len(policy.ids) == 85 and policy.sampled.sum().item() == pytest.approx(1, abs=1e-12)
    logprobs = policy.logprobs.detach()
    exact = (policy.sampled * (logprobs.sum(1) - ref_logprobs.sum(1))).sum().item()
    assert exact > 0.1
    assert found.values["k1"][0] == pytest.approx(exact, rel=1e-9)
    assert found.values["k3"][0] == pytest.approx(exact, rel=1e-9)
    assert abs(found.values["k2"][0] / exact - 1) > 0.1
    assert found.negative["k1"] > 0.1 and found.negative["k2"] == found.negative["k3"] == 0


# ---- gradients


def test_k1_in_the_loss_is_noise(found):
    mean, std = found.rows["loss", "k1", "1"]
    assert mean.norm() < 1e-12 and std > found.gradient.norm()


def test_k1_over_the_length_in_the_loss_makes_completions_longer(policy, ref_logprobs):
    """Its expected gradient is that of E[1 / |y|]."""
    gradient = mean_gradient(policy, kl.in_loss(kl.k1, policy.logprobs, ref_logprobs) / policy.lengths)
    mean_inverse = (policy.probabilities / policy.lengths.squeeze(1)).sum()
    assert relative_error(gradient, kl.gradient(policy, mean_inverse)) < 1e-9


def test_k2_and_ratio_k3_in_the_loss_agree_and_have_the_gradient_of_tokens_only(policy, found, ref_logprobs):
    for name in ("k2", "ratio · k3"):
        assert relative_error(mean_of(found, "loss", name), found.token_gradient) < 1e-9
        assert relative_error(mean_of(found, "loss", name), found.gradient) > 0.1
    k2, ratio_k3 = (kl.in_loss(estimator, policy.logprobs, ref_logprobs) for estimator in (kl.k2, kl.ratio_k3))
    torch.testing.assert_close(k2, ratio_k3, rtol=1e-9, atol=1e-12)  # sample by sample


def test_k2_of_a_whole_completion_in_the_loss_is_k1_in_the_reward(policy, ref_logprobs):
    coefficients = kl.in_loss(lambda *logprobs: kl.k1(*logprobs).sum(1) ** 2 / 2, policy.logprobs, ref_logprobs)
    in_reward = kl.k1(policy.logprobs.detach(), ref_logprobs).sum(1, keepdim=True)
    torch.testing.assert_close(coefficients, in_reward.expand_as(coefficients), rtol=1e-9, atol=1e-12)


def test_k3_in_the_loss_has_the_gradient_of_the_exchanged_divergence_after_prefixes_of_the_policy(
    policy, found, ref_logprobs
):
    gradient = mean_of(found, "loss", "k3")
    assert relative_error(gradient, found.token_reverse_gradient) < 1e-9
    whole_reverse = -(ref_logprobs.sum(1).exp() * policy.logprobs.sum(1)).sum()  # KL(ref || policy) less a constant
    for other in (found.gradient, found.token_gradient, kl.gradient(policy, whole_reverse)):
        assert relative_error(gradient, other) > 0.1


def test_of_one_token_k2_and_ratio_k3_in_the_loss_are_exact_and_k3_is_not():
    found = kl.compare(kl.enumerate_policy(max_length=1), kl.SIZES[-1])
    for name in ("k2", "ratio · k3"):
        assert relative_error(mean_of(found, "loss", name), found.gradient) < 1e-9
    assert relative_error(mean_of(found, "loss", "k3"), found.gradient) > 0.1


def test_in_the_reward_k1_is_exact_k2_is_not_the_gradient_and_the_two_parts_of_k3_make_the_whole(found):
    for name in ("k1", "k1, less its mean", "k1 to go, `ppo_rlhf.py`"):
        assert relative_error(mean_of(found, "reward", name), found.gradient) < 1e-9
    assert relative_error(mean_of(found, "reward", "k2"), found.gradient) > 1
    in_reward, in_loss = mean_of(found, "reward", "k3"), mean_of(found, "loss", "k3")
    assert relative_error(in_reward + in_loss, found.gradient) < 1e-9
    assert relative_error(in_reward, found.gradient) > 1 and relative_error(in_loss, found.gradient) > 0.1


def test_near_the_reference_losses_agree_and_rewards_of_k2_and_k3_vanish(policy):
    found = [kl.compare(policy, size) for size in kl.SIZES]
    for name in ("k2", "k3"):
        errors = [relative_error(mean_of(f, "loss", name), f.gradient) for f in found]
        left = [(mean_of(f, "reward", name).norm() / f.gradient.norm()).item() for f in found]
        assert 4 * errors[0] < errors[1] < 0.1 and 4 * left[0] < left[1] < 0.1


def test_the_ratio_corrects_tokens_of_an_older_policy(policy, ref_logprobs):
    """After prefixes that the older policy samples; k2 alone does not."""
    old_logprobs, _ = kl.token_logprobs(policy, kl.make_ref(0.1, seed=3))
    sampled = old_logprobs.sum(1).exp()
    p, q = policy.distributions, kl.token_logprobs(policy, kl.make_ref(kl.SIZES[-1]))[1]
    exact = kl.gradient(policy, (sampled.unsqueeze(1) * policy.mask * (p.exp() * (p - q)).sum(2)).sum())
    losses = {
        "ratio": (policy.logprobs - old_logprobs).exp() * kl.k3(policy.logprobs, ref_logprobs),
        "k2": kl.k2(policy.logprobs, ref_logprobs),
    }
    errors = {
        name: relative_error(kl.gradient(policy, (sampled * loss.sum(1)).sum()), exact) for name, loss in losses.items()
    }
    assert errors["ratio"] < 1e-9 and errors["k2"] > 0.05


# ---- the scripts


def kl_coefficients(policy, ref_logprobs, kl_coef=1.0):
    """Derivative of grpo.policy_loss, which has nothing but its KL term at advantage 0, to each log-probability."""
    logprobs = policy.logprobs.detach().requires_grad_()
    advantages = logprobs.new_zeros(len(logprobs))
    inputs = logprobs, logprobs.detach(), ref_logprobs, advantages, policy.mask, 0.2, kl_coef
    loss, metrics = grpo.policy_loss(*inputs)
    return torch.autograd.grad(loss, logprobs)[0], metrics


def test_grpo_has_k3_over_the_length_in_the_loss(policy, found, ref_logprobs):
    coefficients, metrics = kl_coefficients(policy, ref_logprobs)
    expected = mean_of(found, "loss", "k3 / \\|y\\|, `grpo.py`")
    assert relative_error(mean_gradient(policy, coefficients), expected) < 1e-9
    assert relative_error(mean_gradient(policy, coefficients * policy.lengths), found.token_reverse_gradient) < 1e-9
    k3 = kl.k3(policy.logprobs.detach(), ref_logprobs)
    torch.testing.assert_close(metrics["policy/ref_kl"], k3.sum(), rtol=1e-9, atol=0)


def test_ppo_has_k1_to_go_in_the_reward(policy, found, ref_logprobs):
    logprobs = policy.logprobs.detach().requires_grad_()
    zeros = torch.zeros_like(logprobs)
    rewards = ppo_rlhf.token_rewards(zeros[:, 0], logprobs.detach(), ref_logprobs, policy.mask, 1.0)
    advantages, _ = ppo_rlhf.compute_advantages(rewards, zeros, policy.mask, gamma=1.0, gae_lambda=1.0)
    loss, _ = ppo_rlhf.policy_loss(logprobs, logprobs.detach(), advantages, policy.mask, 0.2)
    coefficients = torch.autograd.grad(loss, logprobs)[0]
    torch.testing.assert_close(coefficients, kl.to_go(kl.k1(logprobs.detach(), ref_logprobs)) * policy.mask)
    assert relative_error(mean_gradient(policy, coefficients), found.gradient) < 1e-9


def test_edits_of_the_page_do_what_it_says(policy, ref_logprobs, monkeypatch):
    """k2 and ratio · k3 have the coefficient k1ₜ; the metric stays k3."""
    monkeypatch.setattr(grpo, "policy_loss", grpo.policy_loss)  # put back at the end
    before, metrics = kl_coefficients(policy, ref_logprobs)
    k1 = kl.k1(policy.logprobs.detach(), ref_logprobs) / policy.lengths
    expected = {"k3, as it is": before, "k2": k1, "ratio · k3": k1, "wrong sign": -before, "none": 0 * before}
    assert expected.keys() == kl.EDITS.keys()
    for name, coefficients in expected.items():
        kl.edit_policy_loss(*kl.EDITS[name])
        after, new_metrics = kl_coefficients(policy, ref_logprobs)
        torch.testing.assert_close(after, coefficients, msg=name)
        assert new_metrics["policy/ref_kl"] == metrics["policy/ref_kl"]


def test_an_edit_trains(tmp_path, monkeypatch, alone):  # noqa: ARG001
    monkeypatch.setattr(grpo, "policy_loss", grpo.policy_loss)
    sizes = {"num_steps": 1, "prompts_per_step": 2, "minibatch_size": 8, "eval_prompts": 4}
    kl.train([(0.04, "k2")], tmp_path / "kl.md", **sizes)
    head, row = (tmp_path / "kl.md").read_text(encoding="utf-8").split("|---|\n")
    assert row.startswith("| 0.04 | k2 | ") and row.count("|") == head.splitlines()[-2].count("|")


# ---- the page


def test_the_page_has_the_numbers_of_its_command():
    page = kl.PAGE.read_text(encoding="utf-8")
    assert kl.fill(page) == page, "python docs/kl.py"


def test_the_page_has_the_lines_and_defaults_of_the_scripts():
    page = kl.PAGE.read_text(encoding="utf-8")
    for name in ("k2", "ratio · k3"):
        assert "-            {}\n+            {}\n".format(*kl.EDITS[name]) in page
    for script in (grpo, ppo_rlhf):
        row = next(line for line in page.splitlines() if line.startswith(f"| `{Path(script.__file__).name}` |"))
        assert f"`--kl-coef` {script.Args().kl_coef}" in row
