"""Gradients that are accumulated do not depend on microbatches, padding, the order of rows or the number of ranks.
Run with: python -m pytest tests/test_accumulation.py
"""

import pytest
import torch
from helpers import MAX_LENGTH, PROMPTS, STOP_ID, TEMPERATURE, enumerate_rows, gradient_of
from processes import run_on_ranks
from tiny import (
    SCRIPTS,
    add_pairs,
    build_model,
    call_accumulate_gradients,
    call_policy_loss,
    make_args,
    make_batch,
    relative_error,
)
from two_ranks import CASES, SHARES, run, take

import gkd
import ppo_rlhf

pytestmark = pytest.mark.usefixtures("alone")


def test_what_the_exact_gradients_of_other_tests_enumerate_is_all_that_generate_samples():
    rows = enumerate_rows()
    sums = rows["probabilities"].view(len(PROMPTS), -1).sum(1)
    assert sums.tolist() == pytest.approx([1.0] * len(PROMPTS), rel=1e-12)
    torch.manual_seed(0)
    prompt_ids, prompt_mask, *completions = rows["inputs"]
    sampled = ppo_rlhf.generate(rows["model"], prompt_ids, prompt_mask, MAX_LENGTH, TEMPERATURE, [STOP_ID])
    enumerated, found = ({str(row) for row in torch.cat(given, 1).tolist()} for given in (completions, sampled[:2]))
    assert found <= enumerated
    assert len(found) > 10


# ---- gradients that are accumulated, whatever the microbatches, padding and order


def accumulate(script, policy, batch, indices=range(8), **settings):
    """Gradient and metrics of one optimizer step over these completions."""
    policy.zero_grad()
    indices, args = torch.tensor([*indices], dtype=torch.long), make_args(script, **settings)
    metrics = call_accumulate_gradients(script, policy, batch, indices, args)
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
    num_clipped = sum(total for key, (total, _) in metrics.items() if "_fraction" in key)
    assert num_clipped > 0  # were nothing clipped, or all of it, all would be compared with 0
    assert whole.norm() > 0.01

    def call(gradient, found):
        assert relative_error(gradient, whole) < 1e-9
        torch.testing.assert_close(found, metrics, rtol=1e-9, atol=0)

    return call


@pytest.mark.parametrize("is_only", [False, True])
def test_accumulated_gradient_is_that_of_the_mean_loss(script, policy, batch, is_only):
    """Without old_logprobs the policy is its own old policy: the update is the only one of its step."""
    inputs = [batch[key] for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")]
    logprobs, entropies = script.token_logprobs(policy.model, *inputs, 0.7)
    inputs = batch | {"logprobs": logprobs}
    if is_only:
        del batch["old_logprobs"]
        inputs["old_logprobs"] = logprobs.detach()
    if script is SCRIPTS["grpo_tools"]:
        inputs["completion_mask"] = batch["action_mask"]
    loss, expected = call_policy_loss(script, make_args(script), **inputs)
    gradient, metrics = accumulate(script, policy, batch)
    assert relative_error(gradient, gradient_of(policy, loss / 8)) < 1e-12
    mask = inputs["completion_mask"]
    expected |= {"policy/entropy": ((entropies * mask).sum(), mask.sum()), "loss/policy": (loss.detach(), 8)}
    assert not any(torch.as_tensor(value).requires_grad for pair in expected.values() for value in pair)
    torch.testing.assert_close(metrics, add_pairs([expected]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("budget, count", [(1, 8), (20, 4), (60, 2)])
def test_microbatches_change_neither_gradient_nor_metrics(script, policy, batch, check, budget, count):
    assert len(list(script.microbatches(batch, torch.arange(8), budget))) == count
    check(*accumulate(script, policy, batch, microbatch_tokens=budget))


def test_the_order_of_rows_does_not_matter(script, policy, batch, check):
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    check(*accumulate(script, policy, batch, order, microbatch_tokens=30))
    shuffled = {key: value[order] for key, value in batch.items()} | {"indices": torch.arange(8)}
    check(*accumulate(script, policy, shuffled))


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
@pytest.mark.parametrize("name", [*SCRIPTS, "gkd"])
def test_two_ranks_have_the_gradient_and_metrics_of_one(results, name, case, tolerance):
    alone = run((SCRIPTS | {"gkd": gkd})[name], *CASES[case])
    for rank in results:
        found = rank[name, case]
        assert relative_error(found["gradient"], alone["gradient"]) < tolerance
        assert found["metrics"].keys() == alone["metrics"].keys()
        for metric, pair in found["metrics"].items():
            expected = pytest.approx(alone["metrics"][metric], rel=tolerance, abs=0 if tolerance < 1e-2 else 0.05)
            assert pair == expected
