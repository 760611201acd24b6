"""None"""

import inspect
import json
import math
from pathlib import Path

import pytest
import torch
from helpers import MAX_LENGTH, PROMPTS, enumerate_completions, exact_logprobs, gradient_of
from tiny import SCRIPTS, SIZES, TINY, build_model, call_policy_loss, load, make_args, make_batch, parse, relative_error
from transformers import CohereConfig, Gemma2Config, GPT2Config, GPT2LMHeadModel, LlamaConfig

import grpo
import ppo_rlhf

ORACLE = Path(__file__).parent / "oracle"
ARGS = make_args(microbatch_tokens=20)
INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def plain_logprobs(model, batch, temperature):
    """Log-probabilities and entropies (B, T) from the plain logits of each sequence alone, without padding."""
    logprobs = torch.zeros(batch["completion_ids"].shape, dtype=torch.float64)
    entropies = logprobs.clone()
    for row, (prompt_ids, prompt_mask, completion_ids, completion_mask) in enumerate(
        zip(*(batch[key] for key in INPUTS))
    ):
        prompt, completion = prompt_ids[prompt_mask == 1].tolist(), completion_ids[completion_mask == 1].tolist()
        distributions = (model(torch.tensor([prompt + completion])).logits[0] / temperature).log_softmax(-1)
        for t, token in enumerate(completion):
            distribution = distributions[len(prompt) + t - 1]
            logprobs[row, t] = distribution[token]
            entropies[row, t] = -(distribution.exp() * distribution).sum()
    return logprobs, entropies


def gradients_of(model, scalar):
    """Gradient of every parameter, zero where there is none."""
    gradients = torch.autograd.grad(scalar, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


# ---- the LM head


@pytest.fixture
def identity_head():
    """A model whose logits are the hidden states it is given."""

    def build(size):
        config = LlamaConfig(hidden_size=size, num_attention_heads=1, head_dim=8, num_hidden_layers=1)
        model = build_model(config, vocab_size=size)
        with torch.no_grad():
            model.lm_head.weight.copy_(torch.eye(size))
        return model

    return build


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_trl(identity_head, temperature):
    [case] = json.loads((ORACLE / "logprob.json").read_text())["cases"]
    logits = torch.tensor(case["inputs"]["logits"], dtype=torch.float64, requires_grad=True)
    index = torch.tensor(case["inputs"]["index"])
    logprobs, _ = grpo.head_logprobs(
        identity_head(logits.shape[-1]), logits.flatten(0, 1), index.flatten(), temperature
    )
    expected = torch.tensor(case["outputs"][f"trl_selective_log_softmax_T{temperature}"], dtype=torch.float64)
    torch.testing.assert_close(logprobs.view(index.shape), expected, rtol=1e-9, atol=0)
    logprobs.sum().backward()
    expected = torch.tensor(case["outputs"][f"trl_selective_log_softmax_T{temperature}_grad"], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("peer", ["trl", "verl", "oat"])
def test_entropies_are_those_of_others(identity_head, peer):
    [case] = json.loads((ORACLE / "entropy.json").read_text())["cases"]
    logits = torch.tensor(case["inputs"]["logits"], dtype=torch.float64, requires_grad=True)
    hidden = logits.flatten(0, 1)
    _, entropies = grpo.head_logprobs(identity_head(logits.shape[-1]), hidden, torch.zeros(len(hidden)).long(), 1.0)
    expected = torch.tensor(case["outputs"][f"{peer}_entropy"], dtype=torch.float64)
    torch.testing.assert_close(entropies.view(expected.shape), expected, rtol=1e-9, atol=0)
    assert not entropies.requires_grad


@pytest.mark.parametrize("num_tokens, calls", [(512, 1), (513, 4)])
def test_chunks_of_the_head_equal_all_logits_at_once(num_tokens, calls):
    """With 2^16 ids a chunk is 512 tokens: 513 make a whole one and a rest, each computed twice."""
    model = build_model("llama", vocab_size=2**16, dtype=torch.float32)
    called, weight = [], model.get_output_embeddings().weight
    model.get_output_embeddings().register_forward_hook(lambda *_: called.append(1))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 16, generator=generator).requires_grad_()
    targets = torch.randint(2**16, (num_tokens,), generator=generator)
    logprobs, entropies = grpo.head_logprobs(model, hidden, targets, 0.7)
    gradients = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    assert len(called) == calls

    distributions = (hidden @ weight.T / 0.7).log_softmax(-1)
    expected_logprobs = distributions[range(num_tokens), targets]
    expected_entropies = -(distributions.exp() * distributions).sum(-1)
    expected = torch.autograd.grad(expected_logprobs.sum(), (hidden, weight))
    torch.testing.assert_close((logprobs, entropies), (expected_logprobs, expected_entropies), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-4)


# ---- log-probabilities of completions


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_logprobs_of_a_padded_batch_are_those_of_each_sequence_alone(kind):
    """Prompts of different lengths, pad id and stop id in prompts and completions, temperature 0.7."""
    model = build_model(kind)
    batch = make_batch(model)
    logprobs, entropies = grpo.token_logprobs(model, *(batch[key] for key in INPUTS), 0.7)
    expected_logprobs, expected_entropies = plain_logprobs(model, batch, 0.7)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(entropies, expected_entropies, rtol=1e-9, atol=1e-9)
    masked = batch["completion_mask"] == 0
    assert (logprobs[masked] == 0).all() and (entropies[masked] == 0).all()
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradient, expected = (gradients_of(model, (weights * each).sum()) for each in (logprobs, expected_logprobs))
    torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_neither_ids_at_padding_nor_the_type_of_masks_matter_and_inputs_stay_as_they_are(kind):
    model = build_model(kind)
    batch = make_batch(model)
    inputs = [batch[key] for key in INPUTS]
    expected, before = grpo.token_logprobs(model, *inputs, 0.7), [value.clone() for value in inputs]
    for ids, mask in ((0, 1), (2, 3)):
        inputs[ids], inputs[mask] = torch.where(inputs[mask] == 1, inputs[ids], 9), inputs[mask].bool()
    assert all(map(torch.equal, grpo.token_logprobs(model, *inputs, 0.7), expected))
    assert all(torch.equal(batch[key], value) for key, value in zip(INPUTS, before))


# ---- the first step is on the sampling policy


@pytest.fixture
def policy(alone):  # noqa: ARG001
    return grpo.LogprobModel(build_model("llama", dtype=torch.float32))


@pytest.mark.parametrize("on_policy", [True, False])
def test_before_the_first_update_the_ratio_is_exactly_1(policy, on_policy, monkeypatch):
    """Looked-up log-probabilities are those of the training forward to the bit."""
    batch, rows, seen = make_batch(policy.model), torch.tensor([6, 3, 0, 5, 2, 7, 1, 4]), []
    if not on_policy:  # else those of the batch, which are of another policy, do not count
        batch["old_logprobs"] = grpo.lookup_logprobs(policy, batch, [rows], ARGS)
        assert (batch["old_logprobs"] < 0).equal(batch["completion_mask"] == 1)
    policy_loss = grpo.policy_loss
    monkeypatch.setattr(grpo, "policy_loss", lambda *inputs: seen.append(inputs) or policy_loss(*inputs))
    totals = grpo.accumulate_gradients(policy, batch, rows, 8, on_policy, ARGS)
    assert len(seen) > 2 and all(torch.equal(logprobs, old) for logprobs, old, *_ in seen)
    assert (batch["old_logprobs"] < 0).equal(batch["completion_mask"] == 1)  # kept for later epochs
    assert totals["policy/approx_kl"] == totals["policy/clip_fraction_low"] == 0


def test_logprobs_are_looked_up_for_the_given_rows_only(policy):
    batch = make_batch(policy.model)
    rows = torch.tensor([6, 3, 0])
    logprobs = grpo.lookup_logprobs(policy, batch, [rows], ARGS)
    expected, _ = policy(batch, 0.7)
    torch.testing.assert_close(logprobs[rows], expected[rows].detach(), rtol=1e-4, atol=1e-5)
    assert (logprobs[[1, 2, 4, 5, 7]] == 0).all() and not logprobs.requires_grad


# ---- models


SCALED = {
    "soft cap": Gemma2Config(**SIZES, num_key_value_heads=1, head_dim=8, final_logit_softcapping=5.0),
    "scale": CohereConfig(**SIZES, num_key_value_heads=1, logit_scale=0.25),
}


@pytest.mark.parametrize("kind", SCALED)
def test_logits_are_scaled_and_capped_before_the_temperature(kind):
    model = build_model(SCALED[kind], scale=20.0, dtype=torch.float32)
    batch = make_batch(model)
    results = grpo.token_logprobs(model, *(batch[key] for key in INPUTS), 0.7)
    expected = [part.float() for part in plain_logprobs(model, batch, 0.7)]
    torch.testing.assert_close(list(results), expected, rtol=1e-4, atol=1e-4)
    plain = model.base_model(input_ids=torch.tensor([[3, 4]]))[0] @ model.get_output_embeddings().weight.T
    assert not torch.allclose(model(torch.tensor([[3, 4]])).logits, plain, atol=0.1)


def test_too_short_a_context_is_refused():
    model, prompt_ids = build_model("gpt2"), [3, 4, 5, 6]
    grpo.check_model(model, prompt_ids, make_args(max_prompt_length=24, max_completion_length=40))
    with pytest.raises(SystemExit, match="65 tokens, but the model's context has 64"):
        grpo.check_model(model, prompt_ids, make_args(max_prompt_length=24, max_completion_length=41))


def test_parameters_are_float32_whatever_the_folder_holds(tokenizer, tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=64)
    saved = GPT2LMHeadModel(config).to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    saved, (model, _) = dict(saved.named_parameters()), load(grpo, tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(torch.equal(value, saved[name].float()) for name, value in model.named_parameters())


# ==== completions come from a sampler μ that is not quite π_old


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
