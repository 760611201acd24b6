"""What docs/kl.md says of estimators of the KL divergence, and which of them the scripts have."""

import inspect
import re

import details
import kl
import pytest
import torch
from toy import relative_error

import grpo
import ppo_rlhf

PAGE = kl.PAGE.read_text(encoding="utf-8")
EDITS = re.findall(r"^```diff\n- +(.*)\n\+ +(.*)\n```", PAGE, re.M)  # lines of grpo.policy_loss


@pytest.fixture(scope="module")
def policy():
    return details.freeze(details.new_model())


@pytest.fixture(scope="module")
def found(policy):
    return kl.compare(policy, kl.SIZES[-1])


def test_the_page_has_the_numbers_of_its_command():
    assert kl.fill(PAGE) == PAGE, "python docs/kl.py"


def test_the_true_gradients_are_those_of_autograd(policy, found):
    logprobs = details.next_logits(policy.model).log_softmax(-1)
    completions = details.at_tokens(logprobs - found.reference).sum(1)
    exact = details.flat_gradient((details.probabilities(logprobs) * completions).sum(), policy.model)
    assert relative_error(found.gradient, exact) < 1e-9
    visits = torch.zeros(len(details.PREFIXES), dtype=torch.float64)
    visits.index_add_(0, details.PREFIX_OF.flatten(), (found.chances[:, None] * details.MASK).flatten())
    token_kl = (logprobs.exp() * (logprobs - found.reference)).sum(1)
    assert relative_error(found.token_gradient, details.flat_gradient(visits @ token_kl, policy.model)) < 1e-9
    reverse_kl = (found.reference.exp() * (found.reference - logprobs)).sum(1)
    reverse = details.flat_gradient(visits @ reverse_kl, policy.model)
    assert relative_error(found.gradients["loss", "k3"], reverse) < 1e-9


def test_which_gradients_are_exact(found):
    exact = {name for name, value in found.gradients.items() if relative_error(value, found.gradient) < 1e-9}
    assert len(exact) == 3 and all(where == "reward" and name.startswith("k1") for where, name in exact)
    of_tokens = {name for name, value in found.gradients.items() if relative_error(value, found.token_gradient) < 1e-9}
    assert of_tokens == {("loss", "k2"), ("loss", "ratio · k3")}
    assert found.gradients["loss", "k1"].norm() < 1e-9
    assert relative_error(found.gradients["loss", "k3"] + found.gradients["reward", "k3"], found.gradient) < 1e-9


def kl_coefficients(found, policy_loss=grpo.policy_loss):
    """Return the derivative of a loss of nothing but its KL term, with advantages of 0, to each log-probability."""
    logprobs = details.at_tokens(found.logprobs).requires_grad_()
    old_logprobs, advantages = logprobs.detach(), torch.zeros(len(logprobs))
    ref_logprobs = details.at_tokens(found.reference)
    inputs = (logprobs, old_logprobs, old_logprobs, ref_logprobs, advantages, details.MASK.bool())
    loss, metrics = policy_loss(*inputs, clip_eps=0.2, kl_coef=1.0, sampler_weight_cap=2.0)
    loss.backward()
    torch.testing.assert_close(metrics["policy/ref_kl"][0], found.values["k3"].sum())
    return logprobs.grad * details.LENGTHS.unsqueeze(1)


def test_grpo_has_k3_over_the_length_in_the_loss_and_the_edits_of_the_page_have_k2(found):
    k3 = 1 - (-found.values["k1"]).exp()
    torch.testing.assert_close(kl_coefficients(found), k3, rtol=1e-9, atol=1e-12)
    assert len(EDITS) == 2
    for old, new in EDITS:
        source, names = inspect.getsource(grpo.policy_loss), dict(vars(grpo))
        assert source.count(old) == 1
        exec(source.replace(old, new), names)
        torch.testing.assert_close(kl_coefficients(found, names["policy_loss"]), found.values["k1"])


def test_ppo_has_k1_to_go_in_the_reward(found):
    logprobs = details.at_tokens(found.logprobs).requires_grad_()
    old_logprobs, mask = logprobs.detach(), details.MASK.bool()
    ref_logprobs, zeros = details.at_tokens(found.reference), torch.zeros_like(old_logprobs)
    rewards = ppo_rlhf.token_rewards(zeros[:, 0], old_logprobs, ref_logprobs, mask, 1.0)
    advantages, _ = ppo_rlhf.compute_advantages(rewards, zeros, mask, gamma=1.0, gae_lambda=1.0)
    loss, _ = ppo_rlhf.policy_loss(logprobs, old_logprobs, old_logprobs, advantages, mask, 0.2, 2.0)
    loss.backward()
    expected = kl.to_go(found.values["k1"]) * details.MASK
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-9, atol=1e-12)
