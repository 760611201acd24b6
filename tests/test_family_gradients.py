"""Expected gradients of reinforce, dr_grpo, dapo and gspo, over all completions of a tiny model."""

import itertools

import pytest
import torch
from test_family import SIBLINGS, policy_loss
from test_gradients import PROMPTS, TEMPERATURE, gradient_of, model, rows  # noqa: F401, the last two are fixtures
from tiny import relative_error

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
