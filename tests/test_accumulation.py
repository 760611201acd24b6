"""Gradients that are accumulated do not depend on microbatches, padding, the order of rows or the number of ranks.
Run with: python -m pytest tests/test_accumulation.py
"""

import pytest
import torch
from helpers import MAX_LENGTH, PROMPTS, STOP_ID, TEMPERATURE, enumerate_rows, gradient_of
from processes import run_on_ranks
from tiny import (
    SCRIPTS,
    build_model,
    call_accumulate_gradients,
    call_policy_loss,
    make_args,
    make_batch,
    relative_error,
)
from two_ranks import CASES, SHARES, run, take

import grpo
import reinforce

pytestmark = pytest.mark.usefixtures("alone")


def test_what_the_exact_gradients_of_other_tests_enumerate_is_all_that_generate_samples():
    rows = enumerate_rows()
    sums = rows["probabilities"].view(len(PROMPTS), -1).sum(1)
    assert sums.tolist() == pytest.approx([1.0] * len(PROMPTS), rel=1e-12)
    torch.manual_seed(0)
    prompt_ids, prompt_mask, *completions = rows["inputs"]
    sampled = grpo.generate(rows["model"], prompt_ids, prompt_mask, MAX_LENGTH, TEMPERATURE, [STOP_ID], 0)
    enumerated, found = ({str(row) for row in torch.cat(given, 1).tolist()} for given in (completions, sampled))
    assert found <= enumerated
    assert len(found) > 10


# ---- gradients that are accumulated, whatever the microbatches, padding and order


def accumulate(script, policy, batch, rows=range(8), on_policy=False, **settings):
    """Gradient and metrics of one optimizer step over these rows."""
    policy.zero_grad()
    rows, args = torch.tensor([*rows], dtype=torch.long), make_args(script, **settings)
    metrics = call_accumulate_gradients(script, policy, batch, rows, args, on_policy)
    gradients = [parameter.grad.flatten() for parameter in policy.parameters()]
    return torch.cat(gradients), metrics


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
def check(alone, script, policy, batch):  # noqa: ARG001
    """Compares gradient and metrics with those of all rows in one microbatch."""
    whole, metrics = accumulate(script, policy, batch)
    num_clipped = sum(value for key, value in metrics.items() if "_fraction" in key)
    assert num_clipped > 0 or script is reinforce  # were nothing clipped, or all of it, all would be compared with 0
    assert whole.norm() > 0.01

    def call(gradient, found):
        assert relative_error(gradient, whole) < 1e-9
        torch.testing.assert_close(found, metrics, rtol=1e-9, atol=0)

    return call


@pytest.mark.parametrize("on_policy", [False, True])
def test_accumulated_gradient_is_that_of_the_mean_loss(script, policy, batch, on_policy):
    inputs = [batch[key] for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")]
    logprobs, entropies = script.token_logprobs(policy.model, *inputs, 0.7)
    inputs = batch | {"logprobs": logprobs}
    if on_policy:
        inputs["old_logprobs"] = logprobs.detach()
    if script is SCRIPTS["grpo_tools"]:
        inputs["completion_mask"] = batch["action_mask"]
    loss, expected = call_policy_loss(script, make_args(script), **inputs)
    gradient, metrics = accumulate(script, policy, batch, on_policy=on_policy)
    assert relative_error(gradient, gradient_of(policy, loss / 8)) < 1e-12
    mask = inputs["completion_mask"]
    expected |= {"policy/entropy": (entropies * mask).sum(), "num_tokens": mask.sum()}
    torch.testing.assert_close(dict(metrics), expected, check_dtype=False)
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("budget, count", [(1, 8), (20, 4), (60, 2)])
def test_microbatches_change_neither_gradient_nor_metrics(script, policy, batch, check, budget, count):
    assert len(list(script.microbatches(batch, torch.arange(8), budget))) == count
    check(*accumulate(script, policy, batch, microbatch_tokens=budget))


def test_the_order_of_rows_does_not_matter(script, policy, batch, check):
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    check(*accumulate(script, policy, batch, order, microbatch_tokens=30))
    check(*accumulate(script, policy, {key: value[order] for key, value in batch.items()}))


def test_padding_of_the_batch_does_not_matter(script, policy, batch, check):
    padded = dict(batch)
    for key, value in batch.items():
        if value.ndim == 2:
            filling = torch.full((8, 3), 0 if key.endswith("mask") else 7, dtype=value.dtype)
            parts = [filling, value] if key.startswith("prompt") else [value, filling]
            padded[key] = torch.cat(parts, 1)
    check(*accumulate(script, policy, padded))


# ---- two processes


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What two_ranks.py finds on each of two ranks, which differ in widths."""
    batch = make_batch(build_model("llama"))
    widths = [take(batch, share)["completion_ids"].shape[1] for share in SHARES]
    assert widths[0] != widths[1]
    folder = tmp_path_factory.mktemp("two_ranks")
    run_on_ranks("two_ranks.py", folder)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


TOLERANCES = {"different lengths": 1e-9, "one rank idle": 1e-9, "float32": 1e-5, "adapters": 1e-5}
TOLERANCES |= {"bfloat16": 0.02, "adapters in bfloat16": 0.02}


@pytest.mark.parametrize("case, tolerance", TOLERANCES.items())
@pytest.mark.parametrize("name", SCRIPTS)
def test_two_ranks_have_the_gradient_and_metrics_of_one(results, name, case, tolerance):
    alone = run(SCRIPTS[name], *CASES[case])
    for rank in results:
        found = rank[name, case]
        assert relative_error(found["gradient"], alone["gradient"]) < tolerance
        assert found["metrics"] == pytest.approx(alone["metrics"], rel=tolerance, abs=0 if tolerance < 1e-2 else 0.05)
