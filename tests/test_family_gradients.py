"""Gradients of reinforce, dr_grpo, dapo and gspo: exact over all completions, whatever the microbatches and ranks."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from family_ranks import run
from test_family import SIBLINGS, policy_loss
from test_gradients import PROMPTS, TEMPERATURE, gradient_of, model, rows  # noqa: F401, the last two are fixtures
from tiny import build_model, make_batch, relative_error
from two_ranks import CASES

import dapo
import dr_grpo
import grpo
import gspo
import reinforce

MAX_COMPLETION_LENGTH = 9
each_sibling = pytest.mark.parametrize("script", SIBLINGS.values(), ids=SIBLINGS)


# ---- the exact gradient of the objective


def expected_gradient(script, model, rows, advantages, pick=slice(None), weights=None):  # noqa: F811
    """Expectation over completions of the gradient of the objective at ratio 1."""
    logprobs = script.token_logprobs(model, *rows["inputs"], TEMPERATURE)[0][pick]
    weights = rows["probabilities"].detach() if weights is None else weights
    # The loss is proportional to positive factors of the advantages: probabilities may stand there.
    inputs = {"logprobs": logprobs, "old_logprobs": logprobs.detach(), "advantages": advantages * weights}
    inputs |= {"completion_mask": rows["mask"][pick], "max_completion_length": MAX_COMPLETION_LENGTH}
    return -gradient_of(model, policy_loss(script, inputs)[0])


@pytest.fixture
def true_gradient(model, rows):  # noqa: F811
    """The gradient of the expected reward."""
    return gradient_of(model, (rows["probabilities"] * rows["rewards"]).sum())


def angle(a, b):
    """The angle between two gradients, in radians."""
    return torch.nn.functional.cosine_similarity(a, b, dim=0).clamp(-1, 1).acos()


@pytest.mark.parametrize("script, factor", [(reinforce, 1), (dr_grpo, 1 / MAX_COMPLETION_LENGTH), (dapo, 1)])
@pytest.mark.parametrize("centred", [True, False])
def test_expected_gradient_is_that_of_the_expected_reward(script, factor, centred, model, rows, true_gradient):  # noqa: F811
    advantages = rows["advantages"] if centred else rows["rewards"]
    assert relative_error(expected_gradient(script, model, rows, advantages), factor * true_gradient) < 1e-9


@pytest.mark.parametrize("script", [grpo, gspo])
def test_division_by_length_has_another_gradient(script, model, rows, true_gradient):  # noqa: F811
    """The exact gradient of the sum over completions of probability times advantage over length."""
    weighted = rows["probabilities"] * rows["advantages"] / rows["lengths"]
    actual = expected_gradient(script, model, rows, rows["advantages"])
    assert relative_error(actual, gradient_of(model, weighted.sum())) < 1e-9
    assert angle(actual, true_gradient) > 0.01


@pytest.fixture
def pairs(rows):  # noqa: F811
    """Places of the completions of every pair of completions of a prompt, and the probability of the pair, twice."""
    places = torch.arange(len(rows["rewards"])).view(len(PROMPTS), -1).tolist()
    pairs = torch.tensor([pair for share in places for pair in itertools.product(share, share)])  # (pairs, 2)
    weights = rows["probabilities"].detach()[pairs].prod(1).repeat_interleave(2)
    return pairs.view(-1), weights / 2  # a mean over the two


@pytest.mark.parametrize("baseline, factor", [("none", 1), ("leave_one_out", 1), ("group_mean", 1 / 2)])
def test_what_a_baseline_does_to_the_expected_gradient(baseline, factor, model, rows, pairs, true_gradient):  # noqa: F811
    """Over all groups of two: (r - mean) has (1 - 1/G) times the true gradient, leave-one-out has it."""
    pick, weights = pairs
    advantages = reinforce.compute_advantages(rows["rewards"][pick], 2, baseline)
    actual = expected_gradient(reinforce, model, rows, advantages, pick, weights)
    assert relative_error(actual, factor * true_gradient) < 1e-9


@pytest.mark.parametrize("script, factor", [(dr_grpo, 1 / 2 / MAX_COMPLETION_LENGTH), (grpo, None), (dapo, None)])
def test_direction_of_the_gradient_of_groups(script, factor, model, rows, pairs, true_gradient):  # noqa: F811
    """Dr. GRPO's is that of the expected reward; division by the standard deviation turns it away."""
    pick, weights = pairs
    advantages = script.compute_advantages(rows["rewards"][pick], 2)
    actual = expected_gradient(script, model, rows, advantages, pick, weights)
    if factor is None:
        assert angle(actual, true_gradient) > 0.01
    else:
        assert relative_error(actual, factor * true_gradient) < 1e-9


@each_sibling
def test_wrong_gradients_are_told_apart(script, model, rows):  # noqa: F811
    right = expected_gradient(script, model, rows, rows["advantages"])
    without_stop = rows | {"mask": rows["mask"] * (rows["inputs"][2] != 1)}
    assert relative_error(expected_gradient(script, model, without_stop, rows["advantages"]), right) > 1e-3


# ---- accumulation


@pytest.fixture(scope="module")
def policy():
    return grpo.LogprobModel(build_model("llama")).train()


@pytest.fixture(scope="module")
def batch(policy):
    return make_batch(policy.model)


def accumulate(script, policy, batch, rows=range(8), **settings):  # noqa: F811
    """Gradient and metrics of one optimizer step over these rows."""
    args = script.Args(**{"temperature": 0.7, "microbatch_tokens": 10_000, "max_completion_length": 9, **settings})
    flags = () if script is reinforce else (False,)
    policy.zero_grad()
    metrics = script.accumulate_gradients(policy, batch, torch.tensor([*rows], dtype=torch.long), 8, *flags, args)
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]), metrics


@each_sibling
def test_accumulated_gradient_is_that_of_the_loss(script, policy, batch):
    inputs = [batch[key] for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")]
    logprobs, entropies = script.token_logprobs(policy.model, *inputs, 0.7)
    args = {name: value for name, value in vars(script.Args()).items() if value is not None}
    loss, metrics = policy_loss(script, args | batch | {"logprobs": logprobs, "max_completion_length": 9})
    gradient, found = accumulate(script, policy, batch)
    assert relative_error(gradient, gradient_of(policy, loss / 8)) < 1e-12
    metrics |= {"policy/entropy": entropies.sum(), "num_tokens": batch["completion_mask"].sum()}
    metrics |= {"num_sequences": torch.tensor(8)} if script is gspo else {}
    torch.testing.assert_close(found, metrics, check_dtype=False)


@each_sibling
def test_microbatches_rows_and_padding_change_nothing(script, policy, batch):
    gradient, metrics = accumulate(script, policy, batch)
    for budget in (1, 20, 60):
        changed, changed_metrics = accumulate(script, policy, batch, microbatch_tokens=budget)
        assert relative_error(changed, gradient) < 1e-9
        torch.testing.assert_close(changed_metrics, metrics, rtol=1e-9, atol=0)
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    permuted = {key: value[order] for key, value in batch.items()}
    assert relative_error(accumulate(script, policy, permuted, microbatch_tokens=30)[0], gradient) < 1e-9
    padded = dict(batch)
    for key in ("prompt_ids", "prompt_mask"):
        padded[key] = torch.cat([torch.zeros(8, 3).long(), batch[key]], 1)
    for key in ("completion_ids", "completion_mask", "old_logprobs"):
        padded[key] = torch.cat([batch[key], torch.zeros(8, 4).to(batch[key].dtype)], 1)
    assert relative_error(accumulate(script, policy, padded)[0], gradient) < 1e-9


@each_sibling
def test_rows_of_advantage_0_may_be_dropped(script, policy, batch):
    live = batch["advantages"].nonzero().squeeze(1)
    assert len(live) == 6
    assert relative_error(accumulate(script, policy, batch, live)[0], accumulate(script, policy, batch)[0]) < 1e-9
    gradient, metrics = accumulate(script, policy, batch, [])
    assert (gradient == 0).all() and all(value == 0 for value in metrics.values())


# ---- two processes


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What family_ranks.py finds on each of two ranks."""
    folder, tests = tmp_path_factory.mktemp("family_ranks"), Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(tests / "family_ranks.py"), str(folder)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = process.communicate(timeout=240)
    finally:
        process.terminate()  # where the ranks wait for each other: torchrun then ends them
    assert process.returncode == 0, errors[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("name", SIBLINGS)
@pytest.mark.parametrize("case", ["different lengths", "one rank idle"])
def test_two_ranks_have_the_gradient_and_metrics_of_one(results, name, case):
    alone = run(SIBLINGS[name], CASES[case][1])
    for rank in results:
        found = rank[name, case]
        assert relative_error(found["gradient"], alone["gradient"]) < 1e-9
        assert found["metrics"] == pytest.approx(alone["metrics"], rel=1e-9)
