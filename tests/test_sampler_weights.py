"""Completions come from a sampler μ that is not quite π_old: what the weights of policy_loss make of it, exactly."""

import inspect
import math

import pytest
import torch
from helpers import MAX_LENGTH, PROMPTS, enumerate_completions, exact_logprobs, gradient_of
from tiny import SCRIPTS, TINY, call_policy_loss, load, make_args, parse, relative_error

import grpo
import ppo_rlhf

WEIGHTED = SCRIPTS | {"ppo_rlhf": ppo_rlhf}


def expected_gradient(script, cases, longest, drawn_from, cap=math.inf, **replaced):
    """Gradient of the mean of policy_loss over every completion, drawn from "old" or from "mu"."""
    case = cases[longest] | replaced
    if script is SCRIPTS["reinforce"]:  # which is on policy: π_old is the policy itself
        case["old"] = (case["logprobs"].detach() * case["completion_mask"]).sum(1).exp()
    if script is ppo_rlhf:  # a token has its own advantage
        case["advantages"] = case["advantages"].unsqueeze(1) * torch.linspace(1, 0.5, case["logprobs"].shape[1])
    keys = ("logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs", "advantages", "completion_mask")
    args, total = make_args(script, sampler_weight_cap=cap), 0.0
    for row, probability in enumerate(case[drawn_from]):
        inputs = {key: case[key] if case[key] is None else case[key][row : row + 1] for key in keys}
        total = total + probability * call_policy_loss(script, args, **inputs)[0]
    return gradient_of(cases["model"], total)


def whole_sequence(script, cases, longest):
    """Log-probabilities of a sampler whose weight is, at every token, that of the whole completion."""
    case = cases[longest]
    old = case["logprobs"].detach() if script is SCRIPTS["reinforce"] else case["old_logprobs"]
    log_weight = ((old - case["sampler_logprobs"]) * case["completion_mask"]).sum(1, keepdim=True)
    return old - log_weight


@pytest.fixture(scope="module")
def cases():
    return enumerate_completions(2)


@pytest.fixture(params=WEIGHTED)
def script(request):
    return WEIGHTED[request.param]


def test_probabilities_sum_to_1_and_differ(cases):
    for longest in (1, MAX_LENGTH):
        for name in ("old", "mu"):
            torch.testing.assert_close(cases[longest][name].sum().item(), float(len(PROMPTS)))
    assert (cases[MAX_LENGTH]["old"] - cases[MAX_LENGTH]["mu"]).abs().sum() > 0.1
    assert exact_logprobs(cases["model"])[0].shape == cases[MAX_LENGTH]["logprobs"].shape


def test_weight_of_the_whole_completion_gives_the_gradient_of_the_objective(script, cases):
    exact = expected_gradient(script, cases, MAX_LENGTH, "old", sampler_logprobs=None)
    sequence = whole_sequence(script, cases, MAX_LENGTH)
    assert relative_error(expected_gradient(script, cases, MAX_LENGTH, "mu", sampler_logprobs=sequence), exact) < 1e-9


def errors_of_four_samplers(script):
    """Relative errors of the expected gradient, with weights and without, for each of four samplers."""
    weighted, unweighted = [], []
    for case in map(enumerate_completions, (2, 12, 22, 32)):
        exact = expected_gradient(script, case, MAX_LENGTH, "old", sampler_logprobs=None)
        weighted.append(relative_error(expected_gradient(script, case, MAX_LENGTH, "mu"), exact))
        none = expected_gradient(script, case, MAX_LENGTH, "mu", sampler_logprobs=None)
        unweighted.append(relative_error(none, exact))
    return weighted, unweighted


def test_token_weights_are_exact_for_one_token_and_reduce_the_error_of_longer_completions(script, cases):
    """Reduce: over four samplers on average, not for each, and never to 0."""
    exact = expected_gradient(script, cases, 1, "old", sampler_logprobs=None)
    assert relative_error(expected_gradient(script, cases, 1, "mu"), exact) < 1e-9
    assert relative_error(expected_gradient(script, cases, 1, "mu", sampler_logprobs=None), exact) > 1e-2
    weighted, unweighted = errors_of_four_samplers(script)
    assert min(weighted) > 1e-3
    assert sum(weighted) < 0.75 * sum(unweighted)


def test_weights_are_capped_and_old_calls_have_none(script, cases):
    case = cases[MAX_LENGTH] | {"logprobs": cases[MAX_LENGTH]["logprobs"].detach()}
    old = case["logprobs"] if script is SCRIPTS["reinforce"] else case["old_logprobs"]
    assert {"sampler_logprobs", "sampler_weight_cap"} < {*inspect.signature(script.policy_loss).parameters}

    def loss(sampler_logprobs, cap=2.0):
        args = make_args(script, sampler_weight_cap=cap, kl_coef=0.0)
        advantages = case["advantages"].unsqueeze(1).expand_as(old) if script is ppo_rlhf else case["advantages"]
        inputs = case | {"advantages": advantages, "sampler_logprobs": sampler_logprobs}
        del inputs["old"], inputs["mu"]
        return call_policy_loss(script, args, **inputs)

    plain, metrics = loss(None)
    assert "policy/sampler_kl" not in metrics
    assert loss(old)[0] == plain
    torch.testing.assert_close(loss(old - math.log(1.5))[0], 1.5 * plain)
    torch.testing.assert_close(loss(old - math.log(5))[0], 2 * plain)
    torch.testing.assert_close(loss(old - math.log(5), 3.0)[0], 3 * plain)
    torch.testing.assert_close(loss(old + math.log(5))[0], plain / 5)
    kl = (5 - 1 - math.log(5)) * float(case["completion_mask"].sum())  # k3 of π_old against μ
    assert loss(old - math.log(5))[1]["policy/sampler_kl"].item() == pytest.approx(kl, rel=1e-9)


def weights_on_one_process():
    """Weights of the tokens of 1,024 completions, where policy and sampler are one float32 model."""
    model, tokenizer = load(grpo, TINY)
    args, policy = parse(grpo, eval_prompts=1), grpo.LogprobModel(model)
    prompts, _ = grpo.load_prompts(args, tokenizer)
    torch.manual_seed(0)
    repeated = [prompt for prompt in prompts[:128] for _ in range(8)]
    batch, _ = grpo.sample_completions(policy, tokenizer, repeated, 1.0, args)
    logprobs = grpo.lookup_logprobs(policy, batch, [torch.arange(1024)], args)
    return (logprobs - batch["sampler_logprobs"])[batch["completion_mask"] == 1].exp()


@pytest.mark.usefixtures("alone")
def test_on_one_process_in_float32_the_weight_is_1():
    """The sampler is the policy itself, through its cache: what is left is float32's rounding, with alive weights."""
    error = (weights_on_one_process() - 1).abs()
    assert 0 < error.square().mean().sqrt() < 1e-6 and error.max() < 1e-4


if __name__ == "__main__":
    for name, algorithm in WEIGHTED.items():
        with_weights, without = map(sum, errors_of_four_samplers(algorithm))
        print(f"{name:10} {without / 4:.3f} without weights, {with_weights / 4:.3f} with: {with_weights / without:.2f}")
    grpo.init_ranks()
    deviation = (weights_on_one_process() - 1).abs()
    print(f"one process, float32: {len(deviation)} tokens, rms {deviation.square().mean().sqrt():.1e}, ", end="")
    print(f"at most {deviation.max():.1e} from 1")
