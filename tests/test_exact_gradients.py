"""The expected update of each script is the gradient of its objective: every completion of a small model is enumerated.

The objective is computed from plain logits, without padding, in float64; the update by the script's own Policy and
policy_loss, in float32.
"""

import functools
import itertools

import pytest
import torch
from toy import NAMES, SCRIPTS, build_model, gradient_of, pad, policy_loss, relative_error

STOP_ID, VOCAB_SIZE, TEMPERATURE = 1, 5, 0.7
PROMPTS = [[2, 3], [4, STOP_ID, 0, 2]]
LIMIT = 3  # tokens of a completion


def complete(limit, prefix=()):
    """Every completion: up to the stop id or the limit; id 0, which stands in the padding, too, may be sampled."""
    for token in range(VOCAB_SIZE):
        completion = [*prefix, token]
        if token == STOP_ID or len(completion) == limit:
            yield completion
        else:
            yield from complete(limit, completion)


@functools.cache
def enumerate_rows(limit):
    """The model, and every completion of every prompt with its reward and, with a graph, its exact probability."""
    model = build_model("llama", VOCAB_SIZE, dtype=torch.float32)
    exact = build_model("llama", VOCAB_SIZE)
    exact.load_state_dict(model.state_dict())
    pairs = list(itertools.product(PROMPTS, complete(limit)))
    ids, mask = pad(*zip(*pairs))
    logprobs = []
    for prompt, completion in pairs:
        logits = exact(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        logprobs.append(logits.log_softmax(-1)[range(len(completion)), completion].sum())
    probabilities = torch.stack(logprobs).exp()
    assert probabilities.sum().item() == pytest.approx(len(PROMPTS))
    rewards = torch.tensor([(sum(completion) + len(completion) + prompt[0]) % 3 for prompt, completion in pairs])
    return model, ids, mask, rewards.double(), exact, probabilities


def logprobs_of(name, model, limit):
    _, ids, mask, *_ = enumerate_rows(limit)
    logprobs, _ = SCRIPTS[name].Policy(model, "float32")(ids, mask, TEMPERATURE)
    return logprobs


def logprobs_of_other(name, scale, limit):
    """Those of a model whose weights differ at random."""
    model = build_model("llama", VOCAB_SIZE, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight += scale * torch.randn(weight.shape)
        return logprobs_of(name, model, limit)


def update(name, advantages, limit=LIMIT, pick=slice(None), **given):
    """Minus the gradient of the loss of picked rows. It is proportional to advantages, so these can hold weights."""
    model, _, mask, *_ = enumerate_rows(limit)
    logprobs = logprobs_of(name, model, limit)[pick]
    given = {"old_logprobs": logprobs.detach(), "advantages": advantages} | given
    loss, _ = policy_loss(name, given | {"logprobs": logprobs, "completion_mask": mask[pick]})
    return -gradient_of(model, loss).double()


GROUPS = [("reinforce", baseline) for baseline in ("none", "group_mean", "leave_one_out")]
GROUPS += [(name, None) for name in ("dr_grpo", "grpo", "gspo", "dapo", "cispo")]


@pytest.mark.parametrize("name, baseline", GROUPS)
def test_expected_update_of_groups_of_two(name, baseline):
    """Over all pairs of completions, at ratio 1. With d the difference of its reward from the other's, a completion has

    the advantage d (leave-one-out), d/2 (mean of the group), or d/2 / (|d| / √2 + 1e-4), since √2 |d| / 2 is the
    standard deviation of the two. In expectation over the other, d is the reward less its mean, so that the first two
    have the gradient of the expected reward, and half of it.
    """
    _, _, mask, rewards, exact, probabilities = enumerate_rows(LIMIT)
    probabilities, rewards_of = probabilities.view(2, -1), rewards.view(2, -1)
    expected_reward = (probabilities * rewards_of).sum()
    difference = rewards_of[:, :, None] - rewards_of[:, None]  # (prompts, N, N)
    normalised = difference / 2 / (difference.abs() / 2**0.5 + 1e-4)
    normalised = (probabilities * (probabilities.detach()[:, None] * normalised).sum(2)).flatten()  # (R,)
    lengths = mask.sum(1)
    objective = {
        "reinforce": expected_reward / 2 if baseline == "group_mean" else expected_reward,
        "dr_grpo": expected_reward / 2 / 9,  # over the constant
        "grpo": (normalised / lengths).sum(),
        "gspo": (normalised / lengths).sum(),  # ∇ of a geometric mean is the mean of the tokens' ∇
        "dapo": normalised.sum(),
        "cispo": normalised.sum(),
    }[name]

    places = torch.arange(len(rewards)).view(2, -1)
    pairs = torch.cat([torch.cartesian_prod(row, row) for row in places])  # (pairs, 2)
    pick = pairs.flatten()
    settings = (2, baseline) if baseline else (2,)
    advantages = SCRIPTS[name].compute_advantages(rewards[pick], *settings)
    weights = probabilities.detach().flatten()[pairs].prod(1) / 2  # of a pair, half for each of the two
    found = update(name, advantages * weights.repeat_interleave(2), pick=pick)
    assert relative_error(found, gradient_of(exact, objective)) < 1e-5
    # Division by standard deviations or lengths turns the gradient away from that of the expected reward.
    similarity = torch.cosine_similarity(found, gradient_of(exact, expected_reward), dim=0)
    assert (similarity > 0.9999) == (name in ("reinforce", "dr_grpo"))


def test_step_rewards_to_come_give_the_gradient_of_their_expected_sum():
    """Every token is a step of reward 1 or -1. What was rewarded before a token drops out in expectation."""
    _, ids, mask, _, exact, probabilities = enumerate_rows(LIMIT)
    signs = torch.where(ids % 2 == 0, 1.0, -1.0) * mask
    steps = []
    for row in signs.tolist():
        own = [sign for sign in row if sign]
        # Another completion makes the mean of the group 0 and its standard deviation that of three of each.
        others = [(1, 1.0)] * (3 - own.count(1)) + [(1, -1.0)] * (3 - own.count(-1))
        steps += [list(enumerate(own, start=1)), others]
    advantages = SCRIPTS["grpo_process"].compute_advantages(steps, 2, mask.repeat_interleave(2, 0))
    to_come = advantages[::2] * ((6 / 5) ** 0.5 + 1e-4)  # (R, L)
    weights = probabilities.detach() * mask.sum(1)  # the loss divides by the length
    found = update("grpo_process", to_come * weights.unsqueeze(1))
    expected_sum = (probabilities * signs.sum(1)).sum()
    assert relative_error(found, gradient_of(exact, expected_sum)) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_without_clip_and_cap_an_off_policy_token_has_the_gradient_of_the_policy_as_it_is_now(name):
    """Of completions of one token that a third policy samples: E_sampler[w r A ∇ log π] = ∇ E_π[A]. Caps are a bias."""
    _, _, _, rewards, exact, probabilities = enumerate_rows(1)
    old, sampler = (logprobs_of_other(name, scale, 1) for scale in (0.03, 0.06))
    advantages = (rewards - 0.5) * sampler.sum(1).exp()
    given = {"old_logprobs": old, "sampler_logprobs": sampler, "max_completion_length": 1}
    expected = gradient_of(exact, (probabilities * (rewards - 0.5)).sum())
    errors = []
    for eps in (1e9, 0.01):
        given |= {"clip_eps": eps, "clip_eps_low": eps, "clip_eps_high": eps, "sampler_weight_cap": 1 + eps}
        errors.append(relative_error(update(name, advantages, 1, **given), expected))
    assert errors[0] < 1e-5 and errors[1] > 1e-2
