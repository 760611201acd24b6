"""Gradients of the scripts' own functions against exact ones, over every completion of a tiny model."""

import itertools

import pytest
import torch
from processes import run_on_ranks
from tiny import (
    PAD_ID,
    SCRIPTS,
    build_model,
    call_accumulate_gradients,
    call_policy_loss,
    make_args,
    make_batch,
    pad_right,
    relative_error,
)
from two_ranks import ARGS, CASES, SHARES, run, take

import cispo
import dapo
import grpo
import reinforce

pytestmark = pytest.mark.usefixtures("alone")
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


@pytest.fixture(scope="module")
def model():
    return build_model("llama", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def rows(model):
    """Every completion of every prompt, padded as in a rollout, with its exact probability (with graph) and reward."""
    prompts = [prompt for prompt in PROMPTS for _ in COMPLETIONS]
    completions = COMPLETIONS * len(PROMPTS)
    padded = grpo.pad_left([{"prompt_ids": prompt} for prompt in prompts], "cpu")
    inputs = *padded, *pad_right(completions, MAX_LENGTH)
    logprobs, distributions = exact_logprobs(model)
    probabilities = (logprobs * inputs[3]).sum(1).exp()
    rewards = torch.tensor([(sum(c) + len(c) + p[0]) % 3 for p, c in zip(prompts, completions)]).double()
    mean_rewards = (probabilities.detach() * rewards).view(len(PROMPTS), -1).sum(1)
    return {
        "inputs": inputs,
        "mask": inputs[3],
        "lengths": inputs[3].sum(1),
        "logprobs": logprobs,
        "distributions": distributions,
        "probabilities": probabilities,
        "rewards": rewards,
        "advantages": rewards - mean_rewards.repeat_interleave(len(COMPLETIONS)),
    }


# ---- exact gradients


def test_what_is_enumerated_is_all_that_generate_samples(model, rows):
    sums = rows["probabilities"].view(len(PROMPTS), -1).sum(1)
    torch.testing.assert_close(sums, torch.ones(len(PROMPTS)).double(), rtol=1e-12, atol=0)
    torch.manual_seed(0)
    prompt_ids, prompt_mask, *completions = rows["inputs"]
    enumerated = {str(row) for row in torch.cat(completions, 1).tolist()}
    sampled = grpo.generate(model, prompt_ids, prompt_mask, MAX_LENGTH, TEMPERATURE, [STOP_ID], PAD_ID)
    sampled = {str(row) for row in torch.cat(sampled, 1).tolist()}
    assert sampled <= enumerated and len(sampled) > 10


@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo", "cispo"])
def test_expected_gradient_of_groups_of_two_is_exact(model, rows, name):
    """Over all pairs of completions: an advantage is d/2 / (|d| / √2 + 1e-4), with d the difference of rewards.

    GSPO has the same gradient as GRPO at ratio 1, DAPO and CISPO that of a sum over tokens.
    """
    script = SCRIPTS[name]
    probabilities = rows["probabilities"].view(len(PROMPTS), -1)
    rewards = rows["rewards"].view(len(PROMPTS), -1)
    difference = rewards[:, :, None] - rewards[:, None]  # (prompts, N, N)
    advantages = difference / 2 / (difference.abs() / 2**0.5 + 1e-4)
    mean_advantages = (probabilities.detach()[:, None] * advantages).sum(2)  # (prompts, N), over the other completion
    lengths = 1 if script in (dapo, cispo) else rows["lengths"].view(len(PROMPTS), -1)
    exact = gradient_of(model, 2 * (probabilities * mean_advantages / lengths).sum())

    places = torch.arange(rewards.numel()).view(len(PROMPTS), -1).tolist()
    pairs = torch.tensor([pair for share in places for pair in itertools.product(share, share)])  # (pairs, 2)
    weights = rows["probabilities"].detach()[pairs].prod(1).repeat_interleave(2)
    pairs = pairs.view(-1)
    logprobs = script.token_logprobs(model, *rows["inputs"], TEMPERATURE)[0][pairs]
    inputs = {"logprobs": logprobs, "old_logprobs": logprobs.detach(), "ref_logprobs": None}
    inputs |= {"advantages": weights * script.compute_advantages(rows["rewards"][pairs], 2)}
    loss, _ = call_policy_loss(script, make_args(script), **inputs, completion_mask=rows["mask"][pairs])
    assert relative_error(gradient_of(model, loss), -exact) < 1e-9


# ---- gradients that are accumulated, whatever the microbatches, padding and order


def accumulate(script, policy, batch, rows=range(8), on_policy=False, **settings):
    """Gradient and metrics of one optimizer step over these rows."""
    rows = torch.tensor([*rows], dtype=torch.long)
    policy.zero_grad()
    metrics = call_accumulate_gradients(script, policy, batch, rows, make_args(script, **settings), on_policy)
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]), metrics


@pytest.fixture(scope="module", params=SCRIPTS.values(), ids=SCRIPTS)
def script(request):
    return request.param


@pytest.fixture(scope="module")
def policy(script):
    return script.LogprobModel(build_model("llama"))


@pytest.fixture
def batch(policy):
    return make_batch(policy.model)


@pytest.fixture
def whole(alone, script, policy, batch):  # noqa: ARG001
    """Gradient and metrics of all rows in one microbatch."""
    return accumulate(script, policy, batch)


@pytest.mark.parametrize("on_policy", [False, True])
def test_accumulated_gradient_is_that_of_the_mean_loss(script, policy, batch, on_policy):
    inputs = [batch[key] for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")]
    logprobs, entropies = script.token_logprobs(policy.model, *inputs, 0.7)
    inputs = batch | {"logprobs": logprobs} | ({"old_logprobs": logprobs.detach()} if on_policy else {})
    inputs |= {"completion_mask": batch["action_mask"]} if script is SCRIPTS["grpo_tools"] else {}
    loss, expected = call_policy_loss(script, make_args(script), **inputs)
    gradient, metrics = accumulate(script, policy, batch, on_policy=on_policy)
    assert relative_error(gradient, gradient_of(policy, loss / 8)) < 1e-12
    mask = inputs["completion_mask"]
    expected |= {"policy/entropy": (entropies * mask).sum(), "num_tokens": mask.sum()}
    torch.testing.assert_close(dict(metrics), expected, check_dtype=False)
    assert not any(value.requires_grad for value in metrics.values())


def test_a_part_of_the_batch_is_clipped(script, whole):
    """Were all of it, the tests around this one would compare zeros."""
    num_clipped = sum(value for key, value in whole[1].items() if "_fraction" in key)
    assert num_clipped > 0 or script is reinforce
    assert whole[0].norm() > 0.01


@pytest.mark.parametrize("budget, count", [(1, 8), (20, 4), (60, 2)])
def test_microbatches_change_neither_gradient_nor_metrics(script, policy, batch, whole, budget, count):
    assert len(list(script.microbatches(batch, torch.arange(8), budget))) == count
    gradient, metrics = accumulate(script, policy, batch, microbatch_tokens=budget)
    assert relative_error(gradient, whole[0]) < 1e-9
    torch.testing.assert_close(metrics, whole[1], rtol=1e-9, atol=0)


def test_neither_parts_nor_the_order_of_rows_matter(script, policy, batch, whole):
    parts = [accumulate(script, policy, batch, rows)[0] for rows in ([0, 3, 5], [7, 1], [2, 4, 6])]
    assert relative_error(sum(parts), whole[0]) < 1e-9
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    assert relative_error(accumulate(script, policy, batch, order, microbatch_tokens=30)[0], whole[0]) < 1e-9
    permuted = {key: value[order] for key, value in batch.items()}
    assert relative_error(accumulate(script, policy, permuted)[0], whole[0]) < 1e-9


def test_padding_of_the_batch_does_not_matter(script, policy, batch, whole):
    padded = dict(batch)
    for key, filling in (("prompt_ids", 7), ("prompt_mask", 0)):
        padded[key] = torch.cat([torch.full((8, 3), filling), batch[key]], 1)
    logprobs = [(key, 9.0) for key in ("old_logprobs", "ref_logprobs", "sampler_logprobs")]
    for key, filling in (("completion_ids", 7), ("completion_mask", 0), ("action_mask", 0), *logprobs):
        padded[key] = torch.cat([batch[key], torch.full((8, 4), filling, dtype=batch[key].dtype)], 1)
    gradient, metrics = accumulate(script, policy, padded)
    assert relative_error(gradient, whole[0]) < 1e-9
    torch.testing.assert_close(metrics, whole[1], rtol=1e-9, atol=0)


def test_rows_of_advantage_0_may_be_dropped_without_kl_term(script, policy, batch):
    live = batch["advantages"].nonzero().squeeze(1)
    assert len(live) == 6
    kept, dropped = (accumulate(script, policy, batch, rows, kl_coef=0.0) for rows in (range(8), live))
    assert relative_error(dropped[0], kept[0]) < 1e-9
    torch.testing.assert_close(dropped[1]["loss/policy"], kept[1]["loss/policy"], rtol=1e-9, atol=0)


def test_no_live_rows_give_zero_gradient_and_metrics(script, policy, batch):
    assert accumulate(script, policy, batch, [0], on_policy=True)[0].any()  # the row that is passed for nothing
    gradient, metrics = accumulate(script, policy, batch, [], on_policy=True)
    assert (gradient == 0).all() and all(value == 0 for value in metrics.values())


def test_batch_stays_as_it_is(script, policy, batch):
    before = {key: value.clone() for key, value in batch.items()}
    accumulate(script, policy, batch, microbatch_tokens=20)
    if script is not reinforce:
        script.lookup_logprobs(policy, batch, [torch.arange(8)], make_args(script, microbatch_tokens=20))
    assert batch.keys() == before.keys() and all(torch.equal(batch[key], value) for key, value in before.items())


# ---- two processes


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What two_ranks.py finds on each of two ranks."""
    folder = tmp_path_factory.mktemp("two_ranks")
    run_on_ranks("two_ranks.py", folder)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


TOLERANCES = {"different lengths": 1e-9, "one rank idle": 1e-9, "float32": 1e-5, "adapters": 1e-5}
TOLERANCES |= {"bfloat16": 0.02, "adapters in bfloat16": 0.02}


def test_ranks_of_the_cases_differ():
    """In widths, in numbers of microbatches, and once one of them has no row at all."""
    batch = make_batch(build_model("llama"))
    widths = [{key: value.shape[-1] for key, value in take(batch, share).items()} for share in SHARES]
    assert widths[0]["prompt_ids"] != widths[1]["prompt_ids"]
    assert widths[0]["completion_ids"] != widths[1]["completion_ids"]
    parts = [grpo.microbatches(batch, torch.tensor(share), ARGS.microbatch_tokens) for share in SHARES]
    counts = [len(list(part)) for part in parts]
    assert counts[0] != counts[1]
    assert not set(CASES["one rank idle"][1]) & set(SHARES[1])


@pytest.mark.parametrize("case, tolerance", TOLERANCES.items())
@pytest.mark.parametrize("name", SCRIPTS)
def test_two_ranks_have_the_gradient_and_metrics_of_one(results, name, case, tolerance):
    alone = run(SCRIPTS[name], *CASES[case])
    for rank in results:
        found = rank[name, case]
        assert relative_error(found["gradient"], alone["gradient"]) < tolerance
        assert found["metrics"] == pytest.approx(alone["metrics"], rel=tolerance, abs=0 if tolerance < 1e-2 else 0.05)


@pytest.mark.parametrize("case, tolerance", TOLERANCES.items())
def test_two_ranks_look_up_the_log_probabilities_of_one(results, case, tolerance):
    alone = run(grpo, *CASES[case])["logprobs"]
    for rank, share in zip(results, SHARES):
        found = rank["grpo", case]["logprobs"]
        expected = alone[share][:, : found.shape[1]]
        torch.testing.assert_close(
            found, expected, rtol=max(1e-5, tolerance), atol=max(1e-6, tolerance), check_dtype=False
        )
