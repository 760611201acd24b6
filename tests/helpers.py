"""What the files of tests share: inputs, other libraries' numbers, exact gradients, invariances and short runs."""

import functools
import inspect
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from tiny import PAD_ID, build_model, pad_right, parse, read_jsonl, relative_error, shares_changed

import dpo
import grpo
import grpo_process
import reinforce

ORACLE = Path(__file__).parent / "oracle"  # numbers of other people's code, float64; each file names its source
SETTINGS = {"clip_eps": 0.2, "clip_eps_low": 0.2, "clip_eps_high": 0.28, "max_completion_length": 9}
WITHOUT_KL = {"ref_logprobs": None, "kl_coef": 0.0}


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


# ---- the loss of a script


def policy_loss(script, inputs, **changes):
    """Call a script's policy_loss with those of the inputs and settings that it takes."""
    given = SETTINGS | inputs | changes
    if script is grpo_process:  # a token has its own advantage
        given["advantages"] = given["advantages"].unsqueeze(1).expand_as(given["logprobs"])
    names = inspect.signature(script.policy_loss).parameters
    return script.policy_loss(**{name: given[name] for name in names if name in given})


def loss_gradient(loss_fn, logprobs):
    """Return the loss, its gradient with respect to the log-probabilities, and the metrics."""
    logprobs = logprobs.detach().clone().requires_grad_()
    loss, metrics = loss_fn(logprobs)
    loss.backward()
    return loss.detach(), logprobs.grad, metrics


def loss_and_gradient(script, inputs, **changes):
    """The same for a script's policy_loss of these inputs."""
    inputs = inputs | changes
    return loss_gradient(lambda logprobs: policy_loss(script, inputs, logprobs=logprobs), inputs["logprobs"])


def check_by_hand(script, inputs, loss, gradient, metrics):
    """Compare the loss, its gradient and the metrics policy/* with numbers that were computed by hand."""
    found_loss, found_gradient, found_metrics = loss_and_gradient(script, inputs)
    assert found_loss.item() == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(found_gradient, tensor(gradient), rtol=1e-12, atol=1e-15)
    expected = {"loss/policy": loss} | {f"policy/{name}": value for name, value in metrics.items()}
    assert {name: value.item() for name, value in found_metrics.items()} == pytest.approx(expected, rel=1e-12)
    assert not any(value.requires_grad or value.ndim for value in found_metrics.values())


def random_inputs(seed=0, dtype=torch.float64):
    """Six completions of 1 to 5 tokens, of two groups; a third of the ratios are outside the clip range."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, noise, ref_noise = torch.randn(3, 6, 5, generator=generator, dtype=torch.float64)
    return {
        "logprobs": (logprobs - 2).to(dtype),
        "old_logprobs": (logprobs - 2 + 0.3 * noise).to(dtype),
        "ref_logprobs": (logprobs - 2 + ref_noise).to(dtype),
        "advantages": tensor([0.5, -1.5, 1.0, 1.1, -0.2, -0.9], dtype),
        "completion_mask": torch.arange(5) < torch.tensor([[5], [1], [3], [2], [4], [5]]),
        "clip_eps": 0.2,
        "kl_coef": 0.04,
    }


def two_completions(advantage, ratio):
    """Two completions of one token, the first of this ratio and the second of ratio 1; each has a masked position."""
    old_logprobs = tensor([[-1.0, -2.0], [-1.0, -2.0]])
    inputs = {"old_logprobs": old_logprobs, "logprobs": old_logprobs + tensor([[math.log(ratio)], [0.0]])}
    inputs |= {"advantages": tensor([advantage, advantage]), "completion_mask": torch.tensor([[1, 0], [1, 0]])}
    return inputs | WITHOUT_KL | {"max_completion_length": 1}


CLIP_CASES = [  # advantage, ratio, gradient with bounds 1 - 0.2 and 1 + 0.28 (grpo, dr_grpo: 1 + 0.2)
    (1.0, 1.3, 0.0),  # clipped
    (-1.0, 0.7, 0.0),  # clipped
    (-2.0, 1.3, 2.6),  # too likely and bad: not clipped
    (-2.0, 9.0, 18.0),  # however far: no second clip
    (2.0, 0.7, -1.4),  # too unlikely and good: not clipped
    (2.0, 1.1, -2.2),
    (-2.0, 0.9, 1.8),
    (0.0, 9.0, 0.0),
]
COUNTED_AS_CLIPPED = [  # advantage, ratio, whether it is in clip_fraction_low and in clip_fraction_high
    (1.0, 1.25, 0, 1),  # above both 1 + 0.1 and, for grpo and dr_grpo, 1 + 0.2
    (-1.0, 0.85, 0, 0),  # above both 1 - 0.3 and 1 - 0.2
    (-1.0, 0.65, 1, 0),
    (-1.0, 9.0, 0, 0),  # outside, but on the side where nothing is clipped
    (1.0, 0.1, 0, 0),
    (0.0, 9.0, 0, 0),
    (0.0, 0.1, 0, 0),
]


def check_clip(script, advantage, ratio, gradient):
    """The clip stops the gradient of a token whose ratio is outside the range, on the side of its advantage only."""
    _, found, _ = loss_and_gradient(script, two_completions(advantage, ratio))
    torch.testing.assert_close(found, tensor([[gradient, 0.0], [-advantage, 0.0]]), rtol=1e-12, atol=0)


def check_counted_as_clipped(script, advantage, ratio, low, high):
    inputs = two_completions(advantage, ratio) | {"clip_eps_low": 0.3, "clip_eps_high": 0.1}
    _, metrics = policy_loss(script, inputs)
    assert [metrics[f"policy/clip_fraction_{side}"].item() for side in ("low", "high")] == [low, high]


# ---- other libraries' numbers


def read_oracle(name):
    return json.loads((ORACLE / f"{name}.json").read_text())["cases"]


def cases_of(name, wanted=lambda config: True, rtol=1e-9):  # noqa: ARG005
    """The cases of another library's loss whose settings the paper has, for parametrize."""
    return [
        pytest.param(case, rtol, id=f"{name}-{case['name']}") for case in read_oracle(name) if wanted(case["config"])
    ]


def check_loss_of_others(script, case, rtol, divisor="rows", kl_coef=0.0):
    """Compare loss and gradient with another library's, which divides by completions ("rows") or by tokens."""
    config, inputs = case["config"], {k: tensor(v) for k, v in case["inputs"].items() if isinstance(v, list)}
    mask, advantages = inputs["mask"], inputs["advantages"]
    given = {
        "logprobs": inputs["logp"],
        "old_logprobs": inputs["old_logp"],
        "ref_logprobs": inputs.get("ref_logp"),
        "kl_coef": kl_coef,
        "advantages": advantages if advantages.ndim == 1 else advantages[:, 0],
        "completion_mask": mask,
        "clip_eps_low": config.get("epsilon_low", config.get("clip_ratio_low")),
        "clip_eps_high": config.get("epsilon_high", config.get("clip_ratio_high")),
        "max_completion_length": config.get("max_completion_length", config.get("generate_max_length")),
    }
    loss, gradient, _ = loss_and_gradient(script, given)
    count = mask.sum() if divisor == "tokens" else len(mask)
    assert (loss / count).item() == pytest.approx(case["outputs"]["loss"], rel=rtol, abs=rtol)
    torch.testing.assert_close(gradient / count, tensor(case["outputs"]["grad_logp"]), rtol=rtol, atol=rtol / 100)


def check_advantages_of_others(compute_advantages, name, rtol):
    """Compare advantages with those of another library, whose name is a column of the file."""
    for case in read_oracle("advantages"):
        rewards, expected = tensor(case["inputs"]["rewards"]), tensor(case["outputs"][name])
        found = compute_advantages(rewards.view(-1), rewards.shape[1])
        torch.testing.assert_close(found, expected.view(-1), rtol=rtol, atol=1e-12)


# ---- what must not matter


def check_masked_positions(script):
    """Whatever stands at masked positions, loss, gradient and metrics stay the same, whatever the mask's type."""
    inputs = random_inputs()
    loss, gradient, metrics = loss_and_gradient(script, inputs)
    mask, keys = inputs["completion_mask"], ("logprobs", "old_logprobs", "ref_logprobs")
    changes = [
        {"completion_mask": mask.to(dtype)} for dtype in (torch.int64, torch.uint8, torch.float32, torch.float64)
    ]
    for garbage in (1e30, -1e30, math.inf, -math.inf, math.nan):
        for names in ([keys[0]], [keys[1]], [keys[2]], keys[:2]):
            changes.append({name: torch.where(mask, inputs[name], garbage) for name in names})
    for change in changes:
        changed = loss_and_gradient(script, inputs, **change)
        assert torch.equal(changed[0], loss) and torch.equal(changed[1], gradient) and changed[2] == metrics
    assert (gradient[~mask] == 0).all() and (gradient[mask] != 0).any()


def check_padding(script):
    inputs, keys = random_inputs(), ("logprobs", "old_logprobs", "ref_logprobs")
    padded = {name: torch.cat([inputs[name], torch.full((6, 3), 7.0)], 1) for name in keys}
    padded["completion_mask"] = torch.cat([inputs["completion_mask"], torch.zeros(6, 3, dtype=torch.bool)], 1)
    loss, gradient, metrics = loss_and_gradient(script, inputs)
    padded_loss, padded_gradient, padded_metrics = loss_and_gradient(script, inputs, **padded)
    torch.testing.assert_close((padded_loss, padded_metrics), (loss, metrics))
    torch.testing.assert_close(padded_gradient, torch.cat([gradient, torch.zeros(6, 3)], 1))


def check_empty_row(script):
    """A row without tokens counts nothing."""
    inputs = random_inputs()
    mask = inputs["completion_mask"].clone()
    mask[2] = False
    loss, gradient, metrics = loss_and_gradient(script, inputs, completion_mask=mask)
    others = {key: value[[0, 1, 3, 4, 5]] for key, value in inputs.items() if torch.is_tensor(value)}
    torch.testing.assert_close((loss, metrics), policy_loss(script, inputs | others))
    assert (gradient[2] == 0).all()


def check_order_of_rows(script):
    """Rows are independent of each other, so their order does not matter."""
    inputs, order = random_inputs(), [3, 4, 5, 0, 2, 1]
    loss, gradient, metrics = loss_and_gradient(script, inputs)
    rows = [{key: value[[i]] for key, value in inputs.items() if torch.is_tensor(value)} for i in order]
    results = [loss_and_gradient(script, inputs | row) for row in rows]
    torch.testing.assert_close(sum(result[0] for result in results), loss)
    torch.testing.assert_close(torch.cat([result[1] for result in results]), gradient[order])
    for key in metrics:
        torch.testing.assert_close(sum(result[2][key] for result in results), metrics[key])


def check_float32(script):
    """float32 stays float32 and agrees with float64."""
    loss, gradient, _ = loss_and_gradient(script, random_inputs(dtype=torch.float32))
    expected = loss_and_gradient(script, random_inputs())
    assert loss.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected[1], rtol=1e-5, atol=1e-6)


def check_inputs(script):
    """The loss does not change what it is given."""
    inputs = random_inputs()
    before = {key: value.clone() for key, value in inputs.items() if torch.is_tensor(value)}
    loss_and_gradient(script, inputs)
    assert all(torch.equal(inputs[key], value) for key, value in before.items())


INVARIANCES = [check_masked_positions, check_padding, check_empty_row, check_order_of_rows, check_float32, check_inputs]
each_invariance = pytest.mark.parametrize("check", INVARIANCES, ids=lambda check: check.__name__.removeprefix("check_"))


def check_advantages(script, compute_advantages):
    """Advantages are centred, ignore a shift of the rewards, and are exactly 0 where all rewards are equal."""
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    advantages = compute_advantages(rewards, 4)
    assert advantages.view(3, 4).sum(1).abs().max() < 1e-12
    shift = tensor([5.0, -3.0, 100.0]).repeat_interleave(4)
    torch.testing.assert_close(compute_advantages(rewards + shift, 4), advantages, rtol=1e-9, atol=1e-12)
    assert compute_advantages(tensor([0.3, 1.0, -2.0]), 1).tolist() == [0.0, 0.0, 0.0]  # a group of one
    given = tensor([1.0, 0.0, 0.0, 0.5, 0.5, 0.5])
    compute_advantages(given, 3)
    assert given.tolist() == [1.0, 0.0, 0.0, 0.5, 0.5, 0.5]
    for dtype, reward in itertools.product((torch.float32, torch.float64), (0.0, 0.1, 0.7, 1.0)):
        advantages = compute_advantages(tensor([reward] * 8 + [1.0, 0.0] * 4, dtype), 8)
        assert advantages.dtype == dtype
        assert advantages[:8].tolist() == [0.0] * 8 and (advantages[8:] != 0).all()
        inputs = random_inputs(dtype=dtype) | WITHOUT_KL | {"advantages": advantages[:6]}
        assert (loss_and_gradient(script, inputs)[1] == 0).all()


# ---- losses of pairs


def pair_results(script, inputs, **settings):
    """Loss, gradients of its first two inputs and metrics."""
    inputs = [x.detach().clone() for x in inputs]
    for x in inputs[:2]:
        x.requires_grad_()
    settings = {"beta": 0.5, "label_smoothing": 0.0, **settings} if script is dpo else {}
    loss, metrics = script.preference_loss(*inputs, **settings)
    loss.backward()
    return loss.detach(), inputs[0].grad, inputs[1].grad, metrics


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
        yield from [completion] if token == STOP_ID or len(completion) == MAX_LENGTH else complete(completion)


COMPLETIONS = list(complete())


def exact_logprobs(model):
    """Log-probabilities of every token (R, T) and of every id in its place (R, T, V), from plain logits.

    R rows are every completion of every prompt; there is no padding but what a causal model does not see.
    """
    completion_ids, _ = pad_right(COMPLETIONS, MAX_LENGTH)
    distributions = []
    for prompt in PROMPTS:
        ids = torch.cat([torch.tensor([prompt] * len(COMPLETIONS)), completion_ids], 1)
        logprobs = (model(ids).logits / TEMPERATURE).log_softmax(-1)
        distributions.append(logprobs[:, len(prompt) - 1 : -1])
    distributions = torch.cat(distributions)
    completion_ids = completion_ids.repeat(len(PROMPTS), 1)
    return distributions.gather(2, completion_ids.unsqueeze(2)).squeeze(2), distributions


def gradient_of(model, objective):
    gradients = torch.autograd.grad(objective, list(model.parameters()), retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


@functools.cache
def enumerate_rows():
    """Every completion of every prompt, padded as in a rollout, with its exact probability (with graph) and reward."""
    model = build_model("llama", vocab_size=VOCAB_SIZE)
    prompts = [prompt for prompt in PROMPTS for _ in COMPLETIONS]
    completions = COMPLETIONS * len(PROMPTS)
    padded = grpo.pad_left([{"prompt_ids": prompt} for prompt in prompts], "cpu")
    inputs = *padded, *pad_right(completions, MAX_LENGTH)
    logprobs, distributions = exact_logprobs(model)
    probabilities = (logprobs * inputs[3]).sum(1).exp()
    rewards = torch.tensor([(sum(c) + len(c) + p[0]) % 3 for p, c in zip(prompts, completions)]).double()
    mean_rewards = (probabilities.detach() * rewards).view(len(PROMPTS), -1).sum(1)
    return {
        "model": model,
        "inputs": inputs,
        "mask": inputs[3],
        "lengths": inputs[3].sum(1),
        "logprobs": logprobs,
        "distributions": distributions,
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
    policy, old, mu, ref = (perturbed(*how) for how in ((0.0, 0), (0.01, 1), (0.03, seed), (0.05, 3)))
    found = {"model": policy}
    for longest in (1, MAX_LENGTH):
        completions = [[token] for token in range(VOCAB_SIZE)] if longest == 1 else COMPLETIONS
        ids, mask = pad_right(completions * len(PROMPTS), longest)
        prompts = grpo.pad_left([{"prompt_ids": prompt} for prompt in PROMPTS for _ in completions], "cpu")
        logprobs, *others = (
            grpo.token_logprobs(model, *prompts, ids, mask, TEMPERATURE)[0] for model in (policy, old, mu, ref)
        )
        old_logprobs, sampler_logprobs, ref_logprobs = (other.detach() for other in others)
        row = torch.arange(len(ids))
        found[longest] = {
            "logprobs": logprobs,
            "old_logprobs": old_logprobs,
            "sampler_logprobs": sampler_logprobs,
            "ref_logprobs": ref_logprobs,
            "completion_mask": mask,
            "advantages": ((ids.sum(1) * 7 + row) % 5).double() - 2.0,
            "old": (old_logprobs * mask).sum(1).exp(),
            "mu": (sampler_logprobs * mask).sum(1).exp(),
        }
    return found


def expected_gradient(script, advantages, pick=slice(None), weights=None):
    """Expectation over completions of the gradient of the objective at ratio 1."""
    rows = enumerate_rows()
    logprobs = script.token_logprobs(rows["model"], *rows["inputs"], TEMPERATURE)[0][pick]
    weights = rows["probabilities"].detach() if weights is None else weights
    # The loss is proportional to positive factors of the advantages: probabilities may stand there.
    inputs = {"logprobs": logprobs, "old_logprobs": logprobs.detach(), "advantages": advantages * weights}
    inputs |= {"completion_mask": rows["mask"][pick]} | WITHOUT_KL
    return -gradient_of(rows["model"], policy_loss(script, inputs)[0])


def true_gradient():
    """The gradient of the expected reward."""
    rows = enumerate_rows()
    return gradient_of(rows["model"], (rows["probabilities"] * rows["rewards"]).sum())


def gradient_over_lengths():
    """The exact gradient of the sum over completions of probability times advantage over length."""
    rows = enumerate_rows()
    return gradient_of(rows["model"], (rows["probabilities"] * rows["advantages"] / rows["lengths"]).sum())


def every_pair():
    """Places of the two completions of every pair, flat, and half of the probability of the pair for each."""
    rows = enumerate_rows()
    places = torch.arange(len(rows["rewards"])).view(len(PROMPTS), -1).tolist()
    pairs = torch.tensor([pair for share in places for pair in itertools.product(share, share)])  # (pairs, 2)
    weights = rows["probabilities"].detach()[pairs].prod(1).repeat_interleave(2)
    return pairs.view(-1), weights / 2  # a mean over the two


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
    pick, weights = every_pair()
    found = expected_gradient(script, script.compute_advantages(rows["rewards"][pick], 2), pick, weights)
    assert relative_error(found, exact) < 1e-9


def angle(a, b):
    """The angle between two gradients, in radians."""
    return torch.nn.functional.cosine_similarity(a, b, dim=0).clamp(-1, 1).acos()


# ---- short runs


def train(script, run, **settings):
    """Run main with those of the settings that the script has; return its lines of metrics."""
    own = {name: value for name, value in settings.items() if hasattr(script.Args, name)}
    script.main(parse(script, run_dir=run, **own))
    return read_jsonl(run / "metrics.jsonl")


def check_learning(script, run):
    """Ten steps of a large learning rate raise accuracy and length."""
    sizes = {"num_steps": 10, "prompts_per_step": 8, "minibatch_size": 32, "max_completion_length": 40}
    evaluation = {"eval_every": 10, "eval_prompts": 64, "save_every": 10}
    lines = train(script, run, learning_rate=4e-4, warmup_steps=2, seed=1, **sizes, **evaluation)
    assert [line["step"] for line in lines] == list(range(11))
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert lines[-1]["eval/accuracy"] > lines[0]["eval/accuracy"] + 0.25
    lengths = [line["rollout/length_mean"] for line in lines[1:]]
    assert sum(lengths[-3:]) > sum(lengths[:3]) + 6
    assert all(line["optim/grad_norm"] > 0 for line in lines[1:])
    if script is not reinforce:  # the second minibatch is off-policy
        assert all(line["policy/approx_kl"] > 0 for line in lines[1:])
    assert min(shares_changed(run / "checkpoint")) > 0.5  # rows of unused tokens stay
