import json
import weakref
from pathlib import Path

import pytest
import torch
from tiny import SIZES, build_model, load, load_scorer, make_args, make_batch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoTokenizer,
    CohereConfig,
    DynamicCache,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    MambaConfig,
)

import grpo
import ppo_rlhf
import reward_model

ORACLE = Path(__file__).parent / "oracle"
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
    mask = torch.tensor(case["inputs"]["mask"])
    hidden = logits.flatten(0, 1)
    _, entropies = grpo.head_logprobs(identity_head(logits.shape[-1]), hidden, torch.zeros(len(hidden)).long(), 1.0)
    expected = torch.tensor(case["outputs"][f"{peer}_entropy"], dtype=torch.float64)
    torch.testing.assert_close(entropies.view(mask.shape), expected, rtol=1e-9, atol=0)
    (entropies.view(mask.shape) * mask).sum().backward()
    expected = torch.tensor(case["outputs"][f"{peer}_grad_logits_of_masked_sum"], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-9, atol=1e-12)


def test_chunks_of_the_head_equal_all_logits_at_once():
    """With 2^16 ids a chunk is 256 tokens: 257 tokens are a whole chunk and the rest."""
    model = build_model("llama", vocab_size=2**16, dtype=torch.float32)
    weight = model.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(257, 16, generator=generator).requires_grad_()
    targets = torch.randint(2**16, (257,), generator=generator)
    logprobs, entropies = grpo.head_logprobs(model, hidden, targets, 0.7)
    gradients = torch.autograd.grad((logprobs + entropies).sum(), (hidden, weight))

    distributions = (hidden @ weight.T / 0.7).log_softmax(-1)
    expected_logprobs = distributions[range(257), targets]
    expected_entropies = -(distributions.exp() * distributions).sum(-1)
    expected = torch.autograd.grad((expected_logprobs + expected_entropies).sum(), (hidden, weight))
    torch.testing.assert_close((logprobs, entropies), (expected_logprobs, expected_entropies), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-4)


def test_head_keeps_no_logits_for_the_backward_pass():
    model = build_model("llama", vocab_size=1000, scale=1.0)
    hidden = torch.randn(40, 16, dtype=torch.float64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        grpo.head_logprobs(model, hidden, torch.arange(40), 1.0)
    assert sum(saved) < 40 * 1000


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operators made inside and that are still there, and their peak."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.seen = 0, 0, set()

    def release(self, key, size):
        self.live -= size
        self.seen.discard(key)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.seen:
                key, size = tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()
                self.seen.add(key)
                self.live += size
                weakref.finalize(tensor.untyped_storage(), self.release, key, size)
        self.peak = max(self.peak, self.live)
        return result


@pytest.mark.parametrize("used", ["logprobs", "entropies", "both"])
def test_peak_memory_of_the_head_does_not_grow_with_the_number_of_tokens(used):
    """Chunks of 256 tokens by 2^16 ids: four chunks take the bytes of two, whichever output has a gradient."""
    model = build_model("llama", vocab_size=2**16, dtype=torch.float32)
    peaks = []
    for count in (512, 1024):
        hidden = torch.randn(count, 16, requires_grad=True)
        with PeakBytes() as bytes_:
            logprobs, entropies = grpo.head_logprobs(model, hidden, torch.zeros(count).long(), 1.0)
            {"logprobs": logprobs, "entropies": entropies, "both": logprobs + entropies}[used].sum().backward()
        peaks.append(bytes_.peak)
    logits = 256 * 2**16 * 4
    assert 2 * logits < peaks[0] < 8 * logits
    assert peaks[1] - peaks[0] < logits / 8


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
    weights = torch.randn(2, *logprobs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradient = gradients_of(model, (weights[0] * logprobs + weights[1] * entropies).sum())
    expected = gradients_of(model, (weights[0] * expected_logprobs + weights[1] * expected_entropies).sum())
    torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-9)


def test_masked_positions_are_0():
    model = build_model("llama")
    batch = make_batch(model)
    logprobs, entropies = grpo.token_logprobs(model, *(batch[key] for key in INPUTS), 0.7)
    masked = batch["completion_mask"] == 0
    assert (logprobs[masked] == 0).all() and (entropies[masked] == 0).all()
    assert (logprobs[~masked] < 0).all() and (entropies[~masked] > 0).all()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_ids_at_padding_do_not_matter(kind):
    model = build_model(kind)
    batch = make_batch(model)
    inputs = [batch[key] for key in INPUTS]
    expected = grpo.token_logprobs(model, *inputs, 0.7)
    for ids, mask in ((0, 1), (2, 3)):
        inputs[ids] = torch.where(inputs[mask] == 1, inputs[ids], 9)
    assert all(map(torch.equal, grpo.token_logprobs(model, *inputs, 0.7), expected))


def test_masks_of_bool_and_int_are_equal():
    model = build_model("llama")
    batch = make_batch(model)
    prompt_ids, prompt_mask, completion_ids, completion_mask = (batch[key] for key in INPUTS)
    expected = grpo.token_logprobs(model, prompt_ids, prompt_mask, completion_ids, completion_mask, 0.7)
    changed = grpo.token_logprobs(model, prompt_ids, prompt_mask.bool(), completion_ids, completion_mask.bool(), 0.7)
    assert all(map(torch.equal, changed, expected))


def test_logprob_inputs_stay_as_they_are():
    model = build_model("llama")
    batch = make_batch(model)
    before = {key: batch[key].clone() for key in INPUTS}
    grpo.token_logprobs(model, *(batch[key] for key in INPUTS), 0.7)
    assert all(torch.equal(batch[key], before[key]) for key in INPUTS)


# ---- the first step is on the sampling policy


@pytest.fixture
def policy():
    return grpo.LogprobModel(build_model("llama", dtype=torch.float32)).train()


def test_ratio_of_the_first_update_is_exactly_1(policy):
    batch = make_batch(policy.model)  # its old log-probabilities are of another policy
    totals = grpo.accumulate_gradients(policy, batch, torch.arange(8), 8, True, make_args(microbatch_tokens=20))
    assert totals["policy/ratio_max"] == 1 and totals["policy/approx_kl"] == 0
    assert totals["policy/clip_fraction_low"] == 0 and totals["policy/clip_fraction_high"] == 0


def test_looked_up_logprobs_are_those_of_the_training_forward_to_the_bit(policy):
    batch = make_batch(policy.model)
    rows = torch.tensor([6, 3, 0, 5, 2, 7, 1, 4])
    batch["old_logprobs"] = grpo.lookup_logprobs(policy, batch, rows, 20, 0.7)
    assert (batch["old_logprobs"] < 0).equal(batch["completion_mask"] == 1)
    totals = grpo.accumulate_gradients(policy, batch, rows, 8, False, make_args(microbatch_tokens=20))
    assert totals["policy/ratio_max"] == 1 and totals["policy/approx_kl"] == 0


def test_logprobs_are_looked_up_for_the_given_rows_only(policy):
    batch = make_batch(policy.model)
    rows = torch.tensor([6, 3, 0])
    logprobs = grpo.lookup_logprobs(policy, batch, rows, 20, 0.7)
    expected, _ = policy(*(batch[key] for key in INPUTS), 0.7)
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
    head, hidden = model.get_output_embeddings(), torch.randn(5, 16)
    assert not torch.allclose(grpo.head_logits(model, hidden), head(hidden), atol=0.1)


@pytest.mark.parametrize("kind", SCALED)
def test_models_that_change_their_logits_in_other_ways_are_refused(kind):
    model = build_model(SCALED[kind], scale=20.0, dtype=torch.float32)
    grpo.check_model(model, [3, 4, 5, 6], 16)
    model.register_forward_hook(lambda _, __, output: output | {"logits": output.logits * 1.5})
    with pytest.raises(SystemExit, match="changes the output of its LM head"):
        grpo.check_model(model, [3, 4, 5, 6], 16)


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_models_whose_cache_cannot_drop_rows_are_refused(kind, monkeypatch):
    config = MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=1) if kind == "mamba" else kind
    model = build_model(config, dtype=torch.float32)
    grpo.check_model(model, [3, 4, 5, 6], 16)
    monkeypatch.setattr(DynamicCache, "reorder_cache", lambda *_: None)
    with pytest.raises(SystemExit, match="cannot skip padding or drop rows"):
        grpo.check_model(model, [3, 4, 5, 6], 16)


def test_models_that_read_padding_are_refused(monkeypatch):
    model = build_model("llama", dtype=torch.float32)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *args, **inputs: forward(*args, **inputs | {"attention_mask": None}))
    with pytest.raises(SystemExit, match="cannot skip padding or drop rows.*another text"):
        grpo.check_model(model, [3, 4, 5, 6], 16)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_other_models_pass(kind):
    grpo.check_model(build_model(kind), [3, 4, 5, 6], 64)


def test_too_short_a_context_is_refused():
    with pytest.raises(SystemExit, match="65 tokens, over the context of 64"):
        grpo.check_model(build_model("gpt2"), [3, 4, 5, 6], 65)


@pytest.fixture(scope="module")
def saved_gpt2(tmp_path_factory):
    """A folder with dropout in its config and parameters in bfloat16, with the parameters."""
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = AutoTokenizer.from_pretrained(grpo.HERE / "models" / "tiny")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=64)
    model = GPT2LMHeadModel(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert AutoConfig.from_pretrained(folder).resid_pdrop == 0.1
    return str(folder), dict(model.named_parameters())


def test_dropout_is_off_in_train_mode(saved_gpt2):
    model, _ = load(grpo, saved_gpt2[0])
    policy = grpo.LogprobModel(model).train()
    batch = make_batch(model)
    first, second = (policy(*(batch[key] for key in INPUTS), 0.7)[0] for _ in range(2))
    assert policy.model.training and torch.equal(first, second)


@pytest.mark.parametrize("script", [reward_model, ppo_rlhf])
def test_dropout_of_a_reward_model_is_off_in_train_mode(script, saved_gpt2):
    model, tokenizer = load_scorer(script, saved_gpt2[0])
    policy = script.ScoreModel(model).train()
    ids = torch.tensor([tokenizer.encode("12+34=")])
    first, second = (policy(ids, ids >= 0, ids, ids >= 0) for _ in range(2))
    assert policy.model.training and torch.equal(first, second)


def test_parameters_are_float32_whatever_the_folder_holds(saved_gpt2):
    model, _ = load(grpo, saved_gpt2[0])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(torch.equal(value, saved_gpt2[1][name].float()) for name, value in model.named_parameters())
