"""Gradients that are accumulated do not depend on microbatches, padding, the order of rows or the number of ranks."""

import pytest
import torch
from helpers import MAX_LENGTH, PROMPTS, STOP_ID, TEMPERATURE, enumerate_rows, gradient_of, train
from processes import run_on_ranks
from tiny import (
    PAD_ID,
    SCRIPTS,
    build_model,
    call_accumulate_gradients,
    call_policy_loss,
    make_args,
    make_batch,
    relative_error,
)
from two_ranks import ARGS, CASES, SHARES, run, take

import dapo
import grpo
import grpo_process
import reinforce

pytestmark = pytest.mark.usefixtures("alone")
# ---- what the exact gradients of helpers.py rest on


def test_what_is_enumerated_is_all_that_generate_samples():
    rows = enumerate_rows()
    sums = rows["probabilities"].view(len(PROMPTS), -1).sum(1)
    torch.testing.assert_close(sums, torch.ones(len(PROMPTS)).double(), rtol=1e-12, atol=0)
    torch.manual_seed(0)
    prompt_ids, prompt_mask, *completions = rows["inputs"]
    enumerated = {str(row) for row in torch.cat(completions, 1).tolist()}
    sampled = grpo.generate(rows["model"], prompt_ids, prompt_mask, MAX_LENGTH, TEMPERATURE, [STOP_ID], PAD_ID)
    sampled = {str(row) for row in torch.cat(sampled, 1).tolist()}
    assert sampled <= enumerated and len(sampled) > 10


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


# ---- the same for whole steps of main

SIZES = {"prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "eval_prompts": 0}


@pytest.mark.slow
@pytest.mark.parametrize("script", [grpo, reinforce, dapo, grpo_process])
def test_training_does_not_depend_on_the_microbatch_budget(script, tmp_path):
    runs = {"small": 64, "large": 100_000}
    small, large = (
        train(script, tmp_path / run, num_steps=1, seed=2, microbatch_tokens=runs[run], **SIZES)[0] for run in runs
    )
    assert small["optim/grad_norm"] > 0 and small.keys() == large.keys()
    for key in small:
        if not key.startswith("perf/"):
            assert small[key] == pytest.approx(large[key], rel=1e-3, abs=1e-5), key
