"""Expected gradients of the siblings of grpo, over all completions of a tiny model."""

import itertools

import pytest
import torch
from test_family import WITHOUT_KL, policy_loss
from test_gradients import PROMPTS, TEMPERATURE, gradient_of, model, rows  # noqa: F401, the last two are fixtures
from test_sampler_weights import enumerate_completions
from tiny import relative_error

import cispo
import dapo
import dr_grpo
import grpo
import grpo_process
import gspo
import reinforce

MAX_COMPLETION_LENGTH = 9


# ---- the exact gradient of the objective


def expected_gradient(script, model, rows, advantages, pick=slice(None), weights=None):  # noqa: F811
    """Expectation over completions of the gradient of the objective at ratio 1."""
    logprobs = script.token_logprobs(model, *rows["inputs"], TEMPERATURE)[0][pick]
    weights = rows["probabilities"].detach() if weights is None else weights
    # The loss is proportional to positive factors of the advantages: probabilities may stand there.
    inputs = {"logprobs": logprobs, "old_logprobs": logprobs.detach(), "advantages": advantages * weights}
    inputs |= {"completion_mask": rows["mask"][pick], "max_completion_length": MAX_COMPLETION_LENGTH}
    inputs |= WITHOUT_KL
    return -gradient_of(model, policy_loss(script, inputs)[0])


@pytest.fixture
def true_gradient(model, rows):  # noqa: F811
    """The gradient of the expected reward."""
    return gradient_of(model, (rows["probabilities"] * rows["rewards"]).sum())


def angle(a, b):
    """The angle between two gradients, in radians."""
    return torch.nn.functional.cosine_similarity(a, b, dim=0).clamp(-1, 1).acos()


@pytest.mark.parametrize(
    "script, factor", [(reinforce, 1), (dapo, 1), (cispo, 1), (dr_grpo, 1 / MAX_COMPLETION_LENGTH)]
)
@pytest.mark.parametrize("centred", [True, False])
def test_expected_gradient_is_that_of_the_expected_reward(script, factor, centred, model, rows, true_gradient):  # noqa: F811
    advantages = rows["advantages"] if centred else rows["rewards"]
    assert relative_error(expected_gradient(script, model, rows, advantages), factor * true_gradient) < 1e-9


@pytest.mark.parametrize("script", [grpo, gspo, grpo_process])
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


def test_step_rewards_to_come_give_the_gradient_of_their_expected_sum(model, rows):  # noqa: F811
    """Every token is a step of reward 1 or -1. What was rewarded before a token is no matter of that token, so that it
    drops out in expectation, and a token that had none of what comes would be missed.
    """
    signs = torch.where(rows["inputs"][2] % 2 == 0, 1.0, -1.0) * rows["mask"]  # (R, T)
    steps = []
    for own in ([int(sign) for sign in row if sign] for row in signs):
        # Another completion makes the mean of the group 0 and its standard deviation that of three of each.
        others = [1] * (3 - own.count(1)) + [-1] * (3 - own.count(-1))
        steps += [list(enumerate(own, start=1)), [(1, sign) for sign in others]]
    mask = rows["mask"].repeat_interleave(2, 0)
    advantages = grpo_process.compute_advantages(steps, 2, mask)[::2] * ((6 / 5) ** 0.5 + 1e-4)  # (R, T)
    weights = (rows["probabilities"].detach() * rows["lengths"]).unsqueeze(1)  # the loss divides by the length
    logprobs = grpo_process.token_logprobs(model, *rows["inputs"], TEMPERATURE)[0]
    loss, _ = grpo_process.policy_loss(
        logprobs, logprobs.detach(), None, advantages * weights, rows["mask"], clip_eps=0.2, kl_coef=0.0
    )
    exact = gradient_of(model, (rows["probabilities"] * signs.sum(1)).sum())
    assert relative_error(-gradient_of(model, loss), exact) < 1e-6


# ---- CISPO off the policy that sampled


@pytest.fixture(scope="module", params=[1, 3])
def off_policy(request):
    """Every completion of at most so many tokens, at a policy that has left the one that sampled."""
    cases = enumerate_completions(2)
    return cases["model"], cases[request.param], request.param


def cispo_gradient(policy, case, cap):
    """Of the mean of the objective over every completion, drawn from the policy before."""
    inputs = {key: case[key] for key in ("logprobs", "old_logprobs", "completion_mask")}
    inputs["advantages"] = case["advantages"] * case["old"]  # the loss is linear in them
    return -gradient_of(policy, cispo.policy_loss(**inputs, clip_eps_high=cap - 1)[0])


@pytest.mark.parametrize("cap", [1.02, 1e9])
def test_cispo_has_the_gradient_of_its_weighted_log_probabilities(off_policy, cap):
    """Token by token, each a weight that is a plain number times ∇ log π; some of them are capped at 1.02."""
    policy, case, _ = off_policy
    exact, num_capped = 0.0, 0
    for row, length in enumerate(case["completion_mask"].sum(1).tolist()):
        for t in range(length):
            ratio = (case["logprobs"][row, t] - case["old_logprobs"][row, t]).exp().item()
            num_capped += ratio > cap
            weight = min(ratio, cap) * (case["advantages"][row] * case["old"][row]).item()
            exact = exact + weight * case["logprobs"][row, t]
    assert (num_capped > 0) == (cap < 2)
    assert relative_error(cispo_gradient(policy, case, cap), gradient_of(policy, exact)) < 1e-9


def test_without_a_cap_cispo_has_the_gradient_of_the_policy_as_it_is_now_for_one_token(off_policy):
    """E_old[r A ∇ log π] = ∇ E_π[A]: exact for one token; a cap is a bias, and so are longer completions."""
    policy, case, longest = off_policy
    now = (case["logprobs"] * case["completion_mask"]).sum(1).exp()
    exact = gradient_of(policy, (now * case["advantages"]).sum())
    error = relative_error(cispo_gradient(policy, case, 1e9), exact)
    assert error < 1e-9 if longest == 1 else 1e-4 < error < 0.5
    assert relative_error(cispo_gradient(policy, case, 1.02), exact) > max(error, 1e-4)
