"""What the files of tests share: inputs, other libraries' numbers, exact gradients, invariances and short runs."""

import functools
import inspect
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from tiny import PAD_ID, add_pairs, build_model, pad_right, parse, read_jsonl, relative_error
from torch.testing import assert_close

import dpo
import grpo_tools
import ppo_rlhf

ORACLE = Path(__file__).parent / "oracle"  # numbers of other people's code, float64; each file names its source
SETTINGS = {"clip_eps": 0.2, "clip_eps_low": 0.2, "clip_eps_high": 0.28, "max_completion_length": 9}
SETTINGS["sampler_weight_cap"] = 2.0
WITHOUT_KL = {"ref_logprobs": None, "kl_coef": 0.0}


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


# ---- the loss of a script


def policy_loss(script, inputs, **changes):
    """Call a script's policy_loss with those of the inputs and settings that it takes."""
    given = SETTINGS | inputs | changes
    given.setdefault("sampler_logprobs", given.get("old_logprobs"))  # w is 1
    if script is ppo_rlhf and given["advantages"].ndim == 1:  # there each token has an advantage
        given["advantages"] = given["advantages"].unsqueeze(1).expand_as(given["logprobs"])
    names = inspect.signature(script.policy_loss).parameters
    return script.policy_loss(**{name: given[name] for name in names if name in given})


def loss_and_gradient(script, inputs, **changes):
    """Return the loss, its gradient with respect to the log-probabilities, and the metrics as pairs of floats."""
    inputs = inputs | changes
    logprobs = inputs["logprobs"].detach().clone().requires_grad_()
    loss, metrics = policy_loss(script, inputs, logprobs=logprobs)
    assert not any(torch.as_tensor(value).requires_grad for pair in metrics.values() for value in pair)
    loss.backward()
    return loss.detach(), logprobs.grad, add_pairs([metrics])


def assert_pairs(found, expected, rel=1e-9):
    """Compare metrics, pairs of floats."""
    assert found.keys() == expected.keys()
    for name, pair in found.items():
        assert pair == pytest.approx(expected[name], rel=rel), (name, pair, expected[name])


# ---- by hand

# Two completions of three tokens; the last column is padding.
LOGPROBS = tensor([[-1.0, -2.0, -3.0, -4.0], [-0.5, -1.5, -2.5, -3.5]])
RATIOS = tensor([[1.5, 2.0, 0.5, 9.0], [1.5, 0.5, 1.0, 9.0]])
INPUTS = {
    "logprobs": LOGPROBS,
    "old_logprobs": LOGPROBS - RATIOS.log(),
    "advantages": tensor([2.0, -1.0]),
    "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]]),
} | WITHOUT_KL
# policy/approx_kl is the sum of r - log r - 1 over these ratios r.
APPROX_KL = 2 * (0.5 - math.log(1.5)) + (1 - math.log(2)) + 2 * (math.log(2) - 0.5)


def check_by_hand(script, loss, gradient, sums, **changes):
    """Compare what policy_loss makes of INPUTS with numbers computed by hand; a metric's count is that of tokens."""
    found_loss, found_gradient, found_metrics = loss_and_gradient(script, INPUTS, **changes)
    assert_close(found_loss, tensor(loss), rtol=1e-12, atol=1e-15)
    assert_close(found_gradient, tensor(gradient), rtol=1e-12, atol=1e-15)
    sums = {"policy/sampler_kl": 0.0} | sums
    assert found_metrics.keys() == sums.keys()
    for name, pair in found_metrics.items():
        assert pair == pytest.approx((sums[name], 6), rel=1e-12)


def two_completions(advantage, ratio):
    """Two completions of one token, the first of this ratio and the second of ratio 1; each has a masked position."""
    old_logprobs = tensor([[-1.0, -2.0], [-1.0, -2.0]])
    return {
        "logprobs": old_logprobs + tensor([[math.log(ratio)], [0.0]]),
        "old_logprobs": old_logprobs,
        "advantages": tensor([advantage, advantage]),
        "completion_mask": torch.tensor([[1, 0], [1, 0]]),
        "max_completion_length": 1,
    } | WITHOUT_KL


CLIP_CASES = [  # advantage, ratio, gradient with the bounds 1 - 0.2 and 1 + 0.28 or 1 + 0.2
    (1.0, 1.3, 0.0),  # clipped
    (-1.0, 0.75, 0.0),  # clipped
    (-2.0, 1.3, 2.6),  # too likely and bad: not clipped
    (-2.0, 9.0, 18.0),  # however far: no second clip
    (2.0, 0.7, -1.4),  # too unlikely and good: not clipped
    (0.5, 0.7, -0.35),
    (2.0, 1.1, -2.2),
    (0.0, 9.0, 0.0),
    (0.0, 0.7, 0.0),
]


def check_clip(script):
    """The clip stops the gradient of a token whose ratio is outside the range, on the side of its advantage only."""
    for advantage, ratio, gradient in CLIP_CASES:
        _, found, metrics = loss_and_gradient(script, two_completions(advantage, ratio))
        assert_close(found, tensor([[gradient, 0.0], [-advantage, 0.0]]))
        is_clipped = gradient == 0 and advantage != 0
        assert metrics["policy/clip_fraction_low"] == (is_clipped and ratio < 1, 2)
        assert metrics["policy/clip_fraction_high"] == (is_clipped and ratio > 1, 2)


# ---- other libraries' numbers


def read_oracle(name):
    return json.loads((ORACLE / f"{name}.json").read_text())["cases"]


def cases_of(name, rtol=1e-9, **config):
    """For parametrize, the cases of another library that have these settings, with the tolerance to compare with."""
    found = []
    for case in read_oracle(name):
        if config.items() <= case["config"].items():
            found.append(pytest.param(case | {"rtol": rtol}, id=f"{name}-{case['name']}"))
    return found


def first_of(config, *names):
    return next((config[name] for name in names if name in config), None)


def check_loss_of_others(script, case, per_token=False):
    """Compare loss and gradient with another library's, which divides by tokens or by completions."""
    config, rtol = case["config"], case["rtol"]
    inputs = {name: tensor(values) for name, values in case["inputs"].items() if isinstance(values, list)}
    mask, advantages = inputs["mask"], inputs["advantages"]
    given = {
        "logprobs": inputs["logp"],
        "old_logprobs": inputs["old_logp"],
        "ref_logprobs": inputs.get("ref_logp"),
        "advantages": advantages if advantages.ndim == 1 else advantages[:, 0],
        "completion_mask": mask,
        "kl_coef": first_of(config, "beta", "kl_loss_coef"),
        "clip_eps_low": first_of(config, "epsilon_low", "clip_ratio_low"),
        "clip_eps_high": first_of(config, "epsilon_high", "clip_ratio_high"),
        "max_completion_length": first_of(config, "max_completion_length", "generate_max_length"),
    }
    loss, gradient, _ = loss_and_gradient(script, given)
    count = mask.sum() if per_token else len(mask)
    assert (loss / count).item() == pytest.approx(case["outputs"]["loss"], rel=rtol, abs=rtol)
    assert_close(gradient / count, tensor(case["outputs"]["grad_logp"]), rtol=rtol, atol=rtol / 100)


def check_advantages_of_others(compute_advantages, name, rtol):
    """Compare advantages with those of another library, whose name is a column of the file."""
    for case in read_oracle("advantages"):
        rewards = tensor(case["inputs"]["rewards"])
        found = compute_advantages(rewards.view(-1), rewards.shape[1])
        expected = tensor(case["outputs"][name]).view(-1)
        assert_close(found, expected, rtol=rtol, atol=1e-12)


# ---- what must not matter


def random_inputs():
    """Six completions of 1 to 5 tokens, of two groups; a third of the ratios are outside the clip range."""
    generator = torch.Generator().manual_seed(0)
    logprobs, noise, ref_noise, sampler_noise = torch.randn(4, 6, 5, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([[5], [1], [3], [2], [4], [5]])
    return {
        "logprobs": logprobs - 2,
        "old_logprobs": logprobs - 2 + 0.3 * noise,
        "ref_logprobs": logprobs - 2 + ref_noise,
        "sampler_logprobs": logprobs - 2 + 0.3 * sampler_noise,
        "advantages": tensor([0.5, -1.5, 1.0, 1.1, -0.2, -0.9]),
        "completion_mask": torch.arange(5) < lengths,
        "clip_eps": 0.2,
        "kl_coef": 0.04,
    }


def tensors_of(inputs):
    return {name: value for name, value in inputs.items() if torch.is_tensor(value)}


def check_masked_positions(script):
    """What stands at masked positions does not matter, nor does the mask's type; and the inputs stay as they are."""
    inputs = random_inputs()
    mask = inputs["completion_mask"]
    changes = [{"completion_mask": mask.long()}, {"completion_mask": mask.float()}]
    for garbage in (1e30, -math.inf, math.nan):
        filled = {name: torch.where(mask, inputs[name], garbage) for name in inputs if name.endswith("logprobs")}
        changes += [{name: value} for name, value in filled.items()]
        changes.append(filled)
    loss, gradient, metrics = loss_and_gradient(script, inputs)
    for change in changes:
        changed_loss, changed_gradient, changed_metrics = loss_and_gradient(script, inputs, **change)
        assert torch.equal(changed_loss, loss)
        assert torch.equal(changed_gradient, gradient)
        assert changed_metrics == metrics
    assert (gradient[~mask] == 0).all()
    assert (gradient[mask] != 0).any()
    for name, value in tensors_of(random_inputs()).items():
        assert torch.equal(inputs[name], value)


def check_padding(script):
    """More padding on the right changes nothing."""
    inputs = random_inputs()
    padded = {}
    for name in ("logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs", "completion_mask"):
        padded[name] = torch.nn.functional.pad(inputs[name], (0, 3))
    loss, gradient, metrics = loss_and_gradient(script, inputs)
    padded_loss, padded_gradient, padded_metrics = loss_and_gradient(script, inputs, **padded)
    assert_close(padded_loss, loss)
    assert_pairs(padded_metrics, metrics)
    assert_close(padded_gradient, torch.nn.functional.pad(gradient, (0, 3)))


def check_empty_row(script):
    """A row without tokens counts nothing."""
    inputs = random_inputs()
    inputs["completion_mask"][2] = False
    loss, gradient, metrics = loss_and_gradient(script, inputs)
    others = [0, 1, 3, 4, 5]
    changes = {name: value[others] for name, value in tensors_of(inputs).items()}
    other_loss, _, other_metrics = loss_and_gradient(script, inputs, **changes)
    assert_close(loss, other_loss)
    assert_pairs(metrics, other_metrics)
    assert (gradient[2] == 0).all()


def check_order_of_rows(script):
    """Loss, gradient and metrics are the sums of those of each row alone."""
    inputs = random_inputs()
    loss, gradient, metrics = loss_and_gradient(script, inputs)
    results = []
    for i in range(6):
        row = {name: value[[i]] for name, value in tensors_of(inputs).items()}
        results.append(loss_and_gradient(script, inputs, **row))
    losses, gradients, metrics_of_rows = zip(*results)
    assert_close(sum(losses), loss)
    assert_close(torch.cat(gradients), gradient)
    for name, pair in metrics.items():
        assert [sum(values) for values in zip(*(row[name] for row in metrics_of_rows))] == pytest.approx(pair)


INVARIANCES = [check_masked_positions, check_padding, check_empty_row, check_order_of_rows]
each_invariance = pytest.mark.parametrize("check", INVARIANCES, ids=lambda check: check.__name__.removeprefix("check_"))


def check_advantages(compute_advantages):
    """Advantages are centred, ignore a shift of the rewards, and are exactly 0 where all rewards are equal."""
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    advantages = compute_advantages(rewards, 4)
    assert advantages.view(3, 4).sum(1).abs().max() < 1e-12
    shift = tensor([5.0, -3.0, 100.0]).repeat_interleave(4)
    assert_close(compute_advantages(rewards + shift, 4), advantages)
    for dtype in (torch.float32, torch.float64):
        for reward in (0.0, 0.1, 0.7, 1.0):
            rewards = tensor([reward] * 8 + [1.0, 0.0] * 4, dtype)
            advantages = compute_advantages(rewards, 8)
            assert advantages.dtype == dtype
            assert (advantages[:8] == 0).all()
            assert (advantages[8:] != 0).all()


# ---- losses of pairs


def pair_results(script, inputs, **settings):
    """Loss, gradients of its first two inputs, and the sums of the metrics, whose counts are those of the pairs."""
    inputs = [x.detach().clone() for x in inputs]
    for x in inputs[:2]:
        x.requires_grad_()
    settings = {"beta": 0.5, "label_smoothing": 0.0, **settings} if script is dpo else {}
    loss, metrics = script.preference_loss(*inputs, **settings)
    loss.backward()
    assert {count for _, count in metrics.values()} == {len(inputs[0])}
    return loss.detach(), inputs[0].grad, inputs[1].grad, {name: total.item() for name, (total, _) in metrics.items()}


def random_pairs(script, dtype=torch.float64):
    inputs = 3 * torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return list(inputs[: 4 if script is dpo else 2].to(dtype))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


# ---- exact gradients, over every completion of a tiny model

STOP_ID, VOCAB_SIZE, MAX_LENGTH, TEMPERATURE = 1, 5, 3, 0.7
PROMPTS = [[2, 3], [4, STOP_ID, PAD_ID, 2]]


def complete(prefix=()):
    """Every completion: any id may be sampled, the pad id too, up to the stop id or the greatest length."""
    for token in range(VOCAB_SIZE):
        completion = [*prefix, token]
        if token == STOP_ID or len(completion) == MAX_LENGTH:
            yield completion
        else:
            yield from complete(completion)


COMPLETIONS = list(complete())


def exact_logprobs(model):
    """Log-probabilities (R, T) of every completion of every prompt, from plain logits.

    There is no padding but what a causal model does not see.
    """
    completion_ids, _ = pad_right(COMPLETIONS, MAX_LENGTH)
    found = []
    for prompt in PROMPTS:
        prompt_ids = torch.tensor([prompt] * len(COMPLETIONS))
        ids = torch.cat([prompt_ids, completion_ids], 1)
        logprobs = (model(ids).logits / TEMPERATURE).log_softmax(-1)
        logprobs = logprobs[:, len(prompt) - 1 : -1]
        found.append(logprobs.gather(2, completion_ids.unsqueeze(2)).squeeze(2))
    return torch.cat(found)


def gradient_of(model, objective):
    gradients = torch.autograd.grad(objective, list(model.parameters()), retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


@functools.cache
def enumerate_rows():
    """Every completion of every prompt, padded as in a rollout, with its exact probability (with graph) and reward."""
    model = build_model("llama", vocab_size=VOCAB_SIZE)
    prompts = [prompt for prompt in PROMPTS for _ in COMPLETIONS]
    completions = COMPLETIONS * len(PROMPTS)
    prompt_ids, prompt_mask = grpo_tools.pad_left([{"prompt_ids": prompt} for prompt in prompts], "cpu")
    completion_ids, mask = pad_right(completions, MAX_LENGTH)
    probabilities = (exact_logprobs(model) * mask).sum(1).exp()
    rewards = tensor([(sum(c) + len(c) + p[0]) % 3 for p, c in zip(prompts, completions)])
    mean_rewards = (probabilities.detach() * rewards).view(len(PROMPTS), -1).sum(1)
    return {
        "model": model,
        "inputs": (prompt_ids, prompt_mask, completion_ids, mask),
        "mask": mask,
        "lengths": mask.sum(1),
        "probabilities": probabilities,
        "rewards": rewards,
        "advantages": rewards - mean_rewards.repeat_interleave(len(COMPLETIONS)),
    }


def perturbed(scale, seed):
    model = build_model("llama", vocab_size=VOCAB_SIZE)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


@functools.cache
def enumerate_completions(seed):
    """{longest: what policy_loss takes for every completion of every prompt, at a policy that has left π_old, with the
    exact probability of each under π_old and under μ, made by the seed}; longest 1 allows one token.
    """
    policy = perturbed(0.0, 0)
    models = [policy, perturbed(0.01, 1), perturbed(0.03, seed), perturbed(0.05, 3)]
    found = {"model": policy}
    for longest in (1, MAX_LENGTH):
        completions = COMPLETIONS
        if longest == 1:
            completions = [[token] for token in range(VOCAB_SIZE)]
        ids, mask = pad_right(completions * len(PROMPTS), longest)
        prompts = grpo_tools.pad_left([{"prompt_ids": prompt} for prompt in PROMPTS for _ in completions], "cpu")
        logprobs = [grpo_tools.token_logprobs(model, *prompts, ids, mask, TEMPERATURE)[0] for model in models]
        old_logprobs, sampler_logprobs, ref_logprobs = (other.detach() for other in logprobs[1:])
        found[longest] = {
            "logprobs": logprobs[0],
            "old_logprobs": old_logprobs,
            "sampler_logprobs": sampler_logprobs,
            "ref_logprobs": ref_logprobs,
            "completion_mask": mask,
            "advantages": ((ids.sum(1) * 7 + torch.arange(len(ids))) % 5).double() - 2.0,
            "old": (old_logprobs * mask).sum(1).exp(),
            "mu": (sampler_logprobs * mask).sum(1).exp(),
        }
    return found


def expected_gradient(script, advantages, pick=slice(None), weights=None):
    """Expectation over completions of the gradient of the objective at ratio 1."""
    rows = enumerate_rows()
    if weights is None:
        weights = rows["probabilities"].detach()
    logprobs = script.token_logprobs(rows["model"], *rows["inputs"], TEMPERATURE)[0][pick]
    inputs = WITHOUT_KL | {
        "logprobs": logprobs,
        "old_logprobs": logprobs.detach(),
        "advantages": advantages * weights,  # the loss is proportional to positive factors of the advantages
        "completion_mask": rows["mask"][pick],
    }
    return -gradient_of(rows["model"], policy_loss(script, inputs)[0])


def true_gradient():
    """The gradient of the expected reward."""
    rows = enumerate_rows()
    return gradient_of(rows["model"], (rows["probabilities"] * rows["rewards"]).sum())


def gradient_of_pairs(script, compute_advantages):
    """The expected gradient over all groups of two completions of a prompt."""
    rows = enumerate_rows()
    pairs = []
    for first in range(0, len(rows["rewards"]), len(COMPLETIONS)):
        places = range(first, first + len(COMPLETIONS))
        pairs += itertools.product(places, places)
    pairs = torch.tensor(pairs)  # (pairs, 2)
    pick = pairs.view(-1)
    advantages = compute_advantages(rows["rewards"][pick], 2)
    weights = rows["probabilities"].detach()[pairs].prod(1) / 2  # half of the probability of a pair for each of the two
    return expected_gradient(script, advantages, pick, weights.repeat_interleave(2))


def check_gradient_of_groups_of_two(script, over_lengths):
    """Over all pairs of completions: an advantage is d/2 / (|d| / √2 + 1e-4), with d the difference of rewards."""
    rows = enumerate_rows()
    probabilities = rows["probabilities"].view(len(PROMPTS), -1)
    rewards = rows["rewards"].view(len(PROMPTS), -1)
    difference = rewards[:, :, None] - rewards[:, None]  # (prompts, N, N)
    advantages = difference / 2 / (difference.abs() / 2**0.5 + 1e-4)
    mean_advantages = (probabilities.detach()[:, None] * advantages).sum(2)  # (prompts, N), over the other completion
    lengths = rows["lengths"].view(len(PROMPTS), -1) if over_lengths else 1
    exact = gradient_of(rows["model"], (probabilities * mean_advantages / lengths).sum())
    assert relative_error(gradient_of_pairs(script, script.compute_advantages), exact) < 1e-9


# ---- short runs


def train(script, run, **settings):
    """Run main with those of the settings that the script has; return its lines of metrics."""
    own = {name: value for name, value in settings.items() if hasattr(script.Args, name)}
    script.main(parse(script, run_dir=run, **own))
    return read_jsonl(run / "metrics.jsonl")
