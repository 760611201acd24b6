"""Log-probabilities, sampler weights, estimators of the KL divergence: python -m pytest tests/test_logprobs.py"""

import math

import kl
import pytest
import torch
from helpers import MAX_LENGTH, enumerate_completions, gradient_of, read_oracle, tensor
from tiny import SCRIPTS, SIZES, build_model, call_policy_loss, load, make_args, make_batch, relative_error
from transformers import CohereConfig, Gemma2Config, GPT2Config, GPT2LMHeadModel, LlamaConfig

import grpo
import ppo_rlhf
import reinforce

INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def logprobs_and_entropies(model, batch):
    return grpo.token_logprobs(model, *(batch[name] for name in INPUTS), 0.7)


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
    """grpo.head_logprobs of a model whose logits are the hidden states that it is given."""
    size = logits.shape[-1]
    config = LlamaConfig(hidden_size=size, num_attention_heads=1, head_dim=8, num_hidden_layers=1)
    model = build_model(config, vocab_size=size)
    torch.nn.init.eye_(model.lm_head.weight)
    return grpo.head_logprobs(model, logits.flatten(0, 1), targets.flatten(), temperature)


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
        logprobs, _ = grpo.head_logprobs(build_model("llama"), hidden, torch.arange(3), temperature)
    assert len({value.data_ptr() for value in kept if value.shape == (3, 11)}) == 1
    node = logprobs.grad_fn
    while node.next_functions:
        found.append(node.name().partition("Backward")[0])
        node = node.next_functions[0][0]
    assert found == ["Squeeze", "Gather", *steps, "Mm"]


@pytest.mark.parametrize("logits, calls", [(2**25, 4), (2**27, 1)])
def test_chunks_of_the_head_equal_all_logits_at_once(logits, calls, monkeypatch):
    """With 2^16 ids a chunk is 512 tokens, or 2048 on a GPU: 513 make a whole one and a rest, each computed twice."""
    monkeypatch.setattr(grpo, "LOGITS_AT_ONCE", logits)
    model = build_model("llama", vocab_size=2**16, dtype=torch.float32)
    head = model.lm_head
    called = []
    head.register_forward_hook(lambda *_: called.append(1))
    torch.manual_seed(0)
    hidden = torch.randn(513, 16).requires_grad_()
    targets = torch.arange(513)
    logprobs, _ = grpo.head_logprobs(model, hidden, targets, 0.7)
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
    policy = grpo.LogprobModel(build_model("llama", dtype=torch.float32))
    batch = make_batch(policy.model)
    rows = torch.tensor([6, 3, 0])
    args = make_args(microbatch_tokens=20)
    logprobs = grpo.compute_logprobs(policy, batch, [rows], args)
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
    model, _ = load(grpo, tmp_path)
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


def old_logprobs_of(script, case):
    """reinforce.py is on policy: its π_old is the policy itself."""
    return case["logprobs"].detach() if script is reinforce else case["old_logprobs"]


def expected_gradient(script, cases, longest, drawn_from, **changes):
    """Gradient of the mean of policy_loss over every completion, drawn from "old" or from "mu"."""
    inputs = inputs_of(script, cases[longest], **changes)
    probabilities = inputs[drawn_from]
    if drawn_from == "old":
        probabilities = (old_logprobs_of(script, inputs) * inputs["completion_mask"]).sum(1).exp()
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
    old_logprobs = old_logprobs_of(script, case)
    log_weights = (old_logprobs - case["sampler_logprobs"]) * case["completion_mask"]
    whole = old_logprobs - log_weights.sum(1, keepdim=True)
    exact = expected_gradient(script, cases, MAX_LENGTH, "old", sampler_logprobs=old_logprobs)
    found = expected_gradient(script, cases, MAX_LENGTH, "mu", sampler_logprobs=whole)
    assert relative_error(found, exact) < 1e-9


def errors(script, cases, longest):
    """Relative errors of the expected gradient with weights and without."""
    old_logprobs = old_logprobs_of(script, cases[longest])
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
    old_logprobs = old_logprobs_of(script, case)

    args = make_args(script, sampler_weight_cap=2.0, kl_coef=0.0)
    plain, _ = call_policy_loss(script, args, **inputs | {"sampler_logprobs": old_logprobs})
    for weight, counted in ((1.0, 1.0), (1.5, 1.5), (5.0, 2.0), (0.2, 0.2)):
        sampler_logprobs = old_logprobs - math.log(weight)
        loss, metrics = call_policy_loss(script, args, **inputs | {"sampler_logprobs": sampler_logprobs})
        torch.testing.assert_close(loss, counted * plain)
        num_tokens = case["completion_mask"].sum()
        k3 = (weight - 1 - math.log(weight)) * num_tokens.double()  # of π_old against μ
        torch.testing.assert_close(metrics["policy/sampler_kl"], (k3, num_tokens))


# ==== docs/kl.md: what it says of estimators of the KL divergence, and which of them the scripts have


@pytest.fixture(scope="module")
def policy():
    """Every completion of a tiny policy, and what a reference makes of them."""
    policy = kl.enumerate_policy()
    ref = kl.make_ref(kl.SIZES[-1])
    policy.ref_logprobs, _ = kl.token_logprobs(policy, ref)
    policy.fixed_logprobs = policy.logprobs.detach()
    policy.found = kl.compare(policy, kl.SIZES[-1])
    return policy


@pytest.fixture
def found(policy):
    return policy.found


def mean_of(found, where, name):
    """The expected gradient in the first row of the table of this place and estimator."""
    for key, (mean, _) in found.rows.items():
        if key[:2] == (where, name):
            return mean


def mean_gradient(policy, coefficients):
    return kl.mean_and_std(policy, coefficients)[0]


def test_k1_and_k3_are_unbiased_and_k2_is_not(policy, found):
    assert policy.sampled.sum().item() == pytest.approx(1, abs=1e-12)
    log_ratios = (policy.fixed_logprobs - policy.ref_logprobs).sum(1)
    exact = (policy.sampled * log_ratios).sum().item()
    k1, k2, k3 = (found.values[name][0] for name in ("k1", "k2", "k3"))
    assert exact > 0.1
    assert k1 == pytest.approx(exact, rel=1e-9)
    assert k3 == pytest.approx(exact, rel=1e-9)
    assert abs(k2 / exact - 1) > 0.1
    assert found.negative["k1"] > 0.1
    assert found.negative["k2"] == found.negative["k3"] == 0


def test_k1_in_the_loss_is_noise(found):
    mean, std = found.rows["loss", "k1", "1"]
    assert mean.norm() < 1e-12
    assert std > found.gradient.norm()


@pytest.mark.parametrize("name", ["k2", "ratio · k3"])
def test_k2_and_ratio_k3_in_the_loss_have_the_gradient_of_tokens_only(found, name):
    mean = mean_of(found, "loss", name)
    assert relative_error(mean, found.token_gradient) < 1e-9
    assert relative_error(mean, found.gradient) > 0.1


def test_k3_in_the_loss_has_the_gradient_of_the_divergence_with_its_arguments_exchanged(policy, found):
    """At each token, after prefixes of the policy: it is not the gradient of KL(ref || policy) of completions."""
    mean = mean_of(found, "loss", "k3")
    ref_probabilities = policy.ref_logprobs.sum(1).exp()
    whole = -(ref_probabilities * policy.logprobs.sum(1)).sum()  # less a constant
    assert relative_error(mean, found.token_reverse_gradient) < 1e-9
    assert relative_error(mean, found.gradient) > 0.1
    assert relative_error(mean, found.token_gradient) > 0.1
    assert relative_error(mean, kl.gradient(policy, whole)) > 0.1


def test_in_the_reward_k1_is_exact_and_the_two_parts_of_k3_make_the_whole(found):
    for name in ("k1", "k1, less its mean", "k1 of this and later tokens, `ppo_rlhf.py`"):
        mean = mean_of(found, "reward", name)
        assert relative_error(mean, found.gradient) < 1e-9
    whole = mean_of(found, "reward", "k3") + mean_of(found, "loss", "k3")
    assert relative_error(whole, found.gradient) < 1e-9


def kl_coefficients(policy):
    """Derivative of grpo.policy_loss, which has nothing but its KL term at advantage 0, to each log-probability."""
    logprobs = policy.logprobs.detach().requires_grad_()
    old_logprobs, advantages = policy.fixed_logprobs, torch.zeros(len(logprobs))
    inputs = (logprobs, old_logprobs, old_logprobs, policy.ref_logprobs, advantages, policy.mask)
    loss, metrics = grpo.policy_loss(*inputs, clip_eps=0.2, kl_coef=1.0, sampler_weight_cap=2.0)
    loss.backward()
    return logprobs.grad, metrics["policy/ref_kl"]


def test_grpo_has_k3_over_the_length_in_the_loss(policy, found):
    coefficients, metric = kl_coefficients(policy)
    mean = mean_gradient(policy, coefficients)
    assert relative_error(mean, mean_of(found, "loss", "k3 / \\|y\\|, `grpo.py`")) < 1e-9
    per_token = mean_gradient(policy, coefficients * policy.lengths)
    assert relative_error(per_token, found.token_reverse_gradient) < 1e-9
    k3 = kl.k3(policy.fixed_logprobs, policy.ref_logprobs)
    torch.testing.assert_close(metric, (k3.sum(), policy.mask.sum()), rtol=1e-9, atol=0)


def test_ppo_has_k1_to_go_in_the_reward(policy, found):
    logprobs = policy.logprobs.detach().requires_grad_()
    old_logprobs, mask = policy.fixed_logprobs, policy.mask
    zeros = torch.zeros_like(old_logprobs)
    rewards = ppo_rlhf.token_rewards(zeros[:, 0], old_logprobs, policy.ref_logprobs, mask, 1.0)
    advantages, _ = ppo_rlhf.compute_advantages(rewards, zeros, mask, gamma=1.0, gae_lambda=1.0)
    loss, _ = ppo_rlhf.policy_loss(logprobs, old_logprobs, old_logprobs, advantages, mask, 0.2, 2.0)
    loss.backward()
    assert relative_error(mean_gradient(policy, logprobs.grad), found.gradient) < 1e-9


def test_edits_of_the_page_do_what_it_says(policy, monkeypatch):
    """k2 and ratio · k3 have the coefficient k1; the metric stays k3."""
    monkeypatch.setattr(grpo, "policy_loss", grpo.policy_loss)  # put back at the end
    k3, metric = kl_coefficients(policy)
    k1 = kl.k1(policy.fixed_logprobs, policy.ref_logprobs) / policy.lengths
    expected = {"k3, unchanged": k3, "k2": k1, "ratio · k3": k1, "wrong sign": -k3, "none": 0 * k3}
    assert expected.keys() == kl.EDITS.keys()
    for name, coefficients in expected.items():
        kl.edit_policy_loss(name)
        found, new_metric = kl_coefficients(policy)
        torch.testing.assert_close(found, coefficients, msg=name)
        assert new_metric == metric


@pytest.mark.slow
def test_the_page_has_the_numbers_of_its_command_and_the_lines_of_the_script():
    page = kl.PAGE.read_text(encoding="utf-8")
    assert kl.fill(page) == page, "python docs/kl.py"
    for name in ("k2", "ratio · k3"):
        assert f"-        {kl.KL_LINE}\n+        {kl.EDITS[name]}\n" in page
