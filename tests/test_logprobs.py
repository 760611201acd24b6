"""Log-probabilities, sampler weights, an estimator of the KL divergence: python -m pytest tests/test_logprobs.py"""

import math

import pytest
import torch
from helpers import MAX_LENGTH, enumerate_completions, gradient_of, read_oracle, tensor
from tiny import SCRIPTS, SIZES, build_model, call_policy_loss, load, make_args, make_batch, relative_error
from transformers import CohereConfig, Gemma2Config, GPT2Config, GPT2LMHeadModel, LlamaConfig

import grpo_tools
import ppo_rlhf

INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def logprobs_and_entropies(model, batch):
    return grpo_tools.token_logprobs(model, *(batch[name] for name in INPUTS), 0.7)


def plain_logprobs_and_entropies(model, batch):
    """The same from the plain logits of each sequence alone, without padding."""
    logprobs = torch.zeros(batch["completion_ids"].shape, dtype=model.dtype)
    entropies = torch.zeros_like(logprobs)
    for row in range(len(logprobs)):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row] == 1]
        completion = batch["completion_ids"][row][batch["completion_mask"][row] == 1]
        length = len(completion)
        logits = model(torch.cat([prompt, completion]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
        distributions = (logits / 0.7).log_softmax(-1)
        logprobs[row, :length] = distributions[range(length), completion]
        entropies[row, :length] = -(distributions.exp() * distributions).sum(-1)
    return logprobs, entropies


# ---- the LM head


def head_logprobs(logits, targets, temperature):
    """grpo_tools.head_logprobs of a model whose logits are the hidden states that it is given."""
    size = logits.shape[-1]
    config = LlamaConfig(hidden_size=size, num_attention_heads=1, head_dim=8, num_hidden_layers=1)
    model = build_model(config, vocab_size=size)
    torch.nn.init.eye_(model.lm_head.weight)
    return grpo_tools.head_logprobs(model, logits.flatten(0, 1), targets.flatten(), temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_trl(temperature):
    [case] = read_oracle("logprob")
    logits = tensor(case["inputs"]["logits"]).requires_grad_()
    targets = torch.tensor(case["inputs"]["index"])
    logprobs, _ = head_logprobs(logits, targets, temperature)
    logprobs.sum().backward()
    name = f"trl_selective_log_softmax_T{temperature}"
    expected = tensor(case["outputs"][name])
    torch.testing.assert_close(logprobs.view(targets.shape), expected, rtol=1e-9, atol=0)
    expected = tensor(case["outputs"][f"{name}_grad"])
    torch.testing.assert_close(logits.grad, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("peer", ["trl", "verl", "oat"])
def test_entropies_are_those_of_others(peer):
    [case] = read_oracle("entropy")
    logits = tensor(case["inputs"]["logits"]).requires_grad_()
    targets = torch.zeros(logits.shape[:2], dtype=torch.long)
    _, entropies = head_logprobs(logits, targets, 1.0)
    expected = tensor(case["outputs"][f"{peer}_entropy"])
    torch.testing.assert_close(entropies.view(expected.shape), expected, rtol=1e-9, atol=0)
    assert not entropies.requires_grad


@pytest.mark.parametrize("temperature, steps", [(1.0, ["LogSoftmax"]), (0.7, ["LogSoftmax", "Div"])])
def test_backward_has_no_entropies_no_step_that_changes_nothing_and_one_tensor_of_all_logits(temperature, steps):
    kept, found = [], []
    hidden = torch.zeros(3, 16, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
        logprobs, _ = grpo_tools.head_logprobs(build_model("llama"), hidden, torch.arange(3), temperature)
    assert len({value.data_ptr() for value in kept if value.shape == (3, 11)}) == 1
    node = logprobs.grad_fn
    while node.next_functions:
        found.append(node.name().partition("Backward")[0])
        node = node.next_functions[0][0]
    assert found == ["Squeeze", "Gather", *steps, "Mm"]


@pytest.mark.parametrize("logits, calls", [(2**25, 4), (2**27, 1)])
def test_chunks_of_the_head_equal_all_logits_at_once(logits, calls, monkeypatch):
    """With 2^16 ids a chunk is 512 tokens, or 2048 on a GPU: 513 make a whole one and a rest, each computed twice."""
    monkeypatch.setattr(grpo_tools, "LOGITS_AT_ONCE", logits)
    model = build_model("llama", vocab_size=2**16, dtype=torch.float32)
    head = model.lm_head
    called = []
    head.register_forward_hook(lambda *_: called.append(1))
    torch.manual_seed(0)
    hidden = torch.randn(513, 16).requires_grad_()
    targets = torch.arange(513)
    logprobs, _ = grpo_tools.head_logprobs(model, hidden, targets, 0.7)
    gradients = torch.autograd.grad(logprobs.sum(), (hidden, head.weight))
    assert len(called) == calls

    distributions = (hidden @ head.weight.T / 0.7).log_softmax(-1)
    expected = distributions[targets, targets]
    expected_gradients = torch.autograd.grad(expected.sum(), (hidden, head.weight))
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-3, atol=1e-4)


# ---- log-probabilities of completions


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_logprobs_of_a_padded_batch_are_those_of_each_sequence_alone(kind):
    """Prompts of different lengths, pad id and stop id in prompts and completions, temperature 0.7."""
    model = build_model(kind)
    batch = make_batch(model)
    found = logprobs_and_entropies(model, batch)
    expected = plain_logprobs_and_entropies(model, batch)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.manual_seed(0)
    weights = torch.randn_like(found[0])
    gradient = gradient_of(model, (weights * found[0]).sum())
    expected = gradient_of(model, (weights * expected[0]).sum())
    torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_neither_ids_at_padding_nor_the_type_of_masks_matter_and_inputs_stay_as_they_are(kind):
    model = build_model(kind)
    batch = make_batch(model)
    before = {name: batch[name].clone() for name in INPUTS}
    changed = {}
    for name in ("prompt", "completion"):
        mask = batch[f"{name}_mask"].bool()
        changed |= {f"{name}_ids": torch.where(mask, batch[f"{name}_ids"], 9), f"{name}_mask": mask}
    expected = logprobs_and_entropies(model, batch)
    found = logprobs_and_entropies(model, changed)
    assert all(map(torch.equal, found, expected))
    assert all(torch.equal(batch[name], before[name]) for name in INPUTS)


def test_logprobs_are_looked_up_for_the_given_rows_only(alone):  # noqa: ARG001
    policy = grpo_tools.LogprobModel(build_model("llama", dtype=torch.float32))
    batch = make_batch(policy.model)
    rows = torch.tensor([6, 3, 0])
    args = make_args(microbatch_tokens=20)
    logprobs = grpo_tools.compute_logprobs(policy, batch, [rows], args)
    expected, _ = policy(batch, 0.7)
    torch.testing.assert_close(logprobs[rows], expected[rows].detach(), rtol=1e-4, atol=1e-5)
    assert not logprobs[[1, 2, 4, 5, 7]].any()


SCALED = {
    "soft cap": Gemma2Config(**SIZES, num_key_value_heads=1, head_dim=8, final_logit_softcapping=5.0),
    "scale": CohereConfig(**SIZES, num_key_value_heads=1, logit_scale=0.25),
}


@pytest.mark.parametrize("kind", SCALED)
def test_logits_are_scaled_and_capped_before_the_temperature(kind):
    model = build_model(SCALED[kind], scale=20.0, dtype=torch.float32)
    batch = make_batch(model)
    found = logprobs_and_entropies(model, batch)
    expected = plain_logprobs_and_entropies(model, batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_parameters_are_float32_whatever_the_folder_holds(tokenizer, tmp_path):
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=64)
    saved = GPT2LMHeadModel(config).to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _ = load(grpo_tools, tmp_path)
    for parameter, expected in zip(model.parameters(), saved.parameters(), strict=True):
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, expected.float())


# ==== completions come from a sampler μ that is not quite π_old


WEIGHTED = SCRIPTS | {"ppo_rlhf": ppo_rlhf}


def inputs_of(script, case, **changes):
    """What policy_loss takes for every completion; in ppo_rlhf.py a token has its own advantage."""
    inputs = case | changes
    if script is ppo_rlhf:
        by_token = torch.linspace(1, 0.5, inputs["logprobs"].shape[1])
        inputs["advantages"] = inputs["advantages"].unsqueeze(1) * by_token
    return inputs


def expected_gradient(script, cases, longest, drawn_from, **changes):
    """Gradient of the mean of policy_loss over every completion, drawn from "old" or from "mu"."""
    inputs = inputs_of(script, cases[longest], **changes)
    probabilities = inputs[drawn_from]
    if drawn_from == "old":
        probabilities = (inputs["old_logprobs"] * inputs["completion_mask"]).sum(1).exp()
    args, total = make_args(script, sampler_weight_cap=math.inf), 0.0
    for i, probability in enumerate(probabilities):
        row = {}
        for name, values in inputs.items():
            row[name] = None if values is None else values[i : i + 1]
        loss, _ = call_policy_loss(script, args, **row)
        total = total + probability * loss
    return gradient_of(cases["model"], total)


@pytest.fixture
def cases():
    return enumerate_completions(2)


@pytest.fixture(params=WEIGHTED)
def script(request):
    return WEIGHTED[request.param]


def test_weight_of_the_whole_completion_gives_the_gradient_of_the_objective(script, cases):
    """With log-probabilities of a sampler whose weight is, at every token, that of the whole completion."""
    case = cases[MAX_LENGTH]
    old_logprobs = case["old_logprobs"]
    log_weights = (old_logprobs - case["sampler_logprobs"]) * case["completion_mask"]
    whole = old_logprobs - log_weights.sum(1, keepdim=True)
    exact = expected_gradient(script, cases, MAX_LENGTH, "old", sampler_logprobs=old_logprobs)
    found = expected_gradient(script, cases, MAX_LENGTH, "mu", sampler_logprobs=whole)
    assert relative_error(found, exact) < 1e-9


def errors(script, cases, longest):
    """Relative errors of the expected gradient with weights and without."""
    old_logprobs = cases[longest]["old_logprobs"]
    exact = expected_gradient(script, cases, longest, "old", sampler_logprobs=old_logprobs)
    weighted = expected_gradient(script, cases, longest, "mu")
    unweighted = expected_gradient(script, cases, longest, "mu", sampler_logprobs=old_logprobs)
    return relative_error(weighted, exact), relative_error(unweighted, exact)


def test_token_weights_are_exact_for_one_token_and_reduce_the_error_of_longer_completions(script, cases):
    """Reduce: over four samplers on average, not for each, and never to 0."""
    weighted, unweighted = errors(script, cases, 1)
    assert weighted < 1e-9
    assert unweighted > 1e-2
    of_samplers = [errors(script, enumerate_completions(seed), MAX_LENGTH) for seed in (2, 12, 22, 32)]
    weighted, unweighted = map(sum, zip(*of_samplers))
    print(f"{unweighted / 4:.3f} without weights, {weighted / 4:.3f} with: {weighted / unweighted:.2f}")
    assert min(of_samplers)[0] > 1e-3
    assert weighted < 0.75 * unweighted


def test_weights_are_capped_and_old_calls_have_none(script, cases):
    case = cases[MAX_LENGTH]
    inputs = inputs_of(script, case, logprobs=case["logprobs"].detach())
    old_logprobs = case["old_logprobs"]

    args = make_args(script, sampler_weight_cap=2.0, kl_coef=0.0)
    plain, _ = call_policy_loss(script, args, **inputs | {"sampler_logprobs": old_logprobs})
    for weight, counted in ((1.0, 1.0), (1.5, 1.5), (5.0, 2.0), (0.2, 0.2)):
        sampler_logprobs = old_logprobs - math.log(weight)
        loss, metrics = call_policy_loss(script, args, **inputs | {"sampler_logprobs": sampler_logprobs})
        torch.testing.assert_close(loss, counted * plain)
        num_tokens = case["completion_mask"].sum()
        k3 = (weight - 1 - math.log(weight)) * num_tokens.double()  # of π_old against μ
        torch.testing.assert_close(metrics["policy/sampler_kl"], (k3, num_tokens))


# ==== the estimator of the KL divergence


@pytest.mark.parametrize("peer", ["verl", "open_instruct"])
def test_k3_is_that_of_others(peer):
    [case] = read_oracle("kl")
    logprobs, ref_logprobs = tensor(case["inputs"]["logp"]).requires_grad_(), tensor(case["inputs"]["ref_logp"])
    found = grpo_tools.k3(ref_logprobs - logprobs)
    found.sum().backward()
    expected = tensor(case["outputs"][f"{peer}_k3"]).sum().item()
    assert found.sum().item() == pytest.approx(expected)
    torch.testing.assert_close(logprobs.grad, tensor(case["outputs"][f"{peer}_k3_grad"]))


def test_k3_is_positive_and_has_the_right_direction():
    """Far from 1 the two directions differ: ρ - log ρ - 1 with ρ = reference over policy."""
    for log_ratio in (-20.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 5.0):  # of policy over reference
        found = grpo_tools.k3(tensor(-log_ratio)).item()
        assert found == pytest.approx(math.expm1(-log_ratio) + log_ratio)
        assert (found > 0) == (log_ratio != 0)
