"""The policy, its precision, and families of models: python -m pytest tests/test_policy.py"""

from types import SimpleNamespace

import pytest
import torch
import transformers
from toy import COMPLETIONS, PROMPTS, TINY, build_model, gradient_of, pad, relative_error
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import grpo

CPU = torch.device("cpu")


def make_args(**settings):
    return grpo.Args(**{"model": str(TINY), "precision": "float32"} | settings)


def expected_logprobs(model, ids, mask, temperature):
    """Log-probabilities and entropies (B, L) by the model's own logits, each sequence alone and without padding."""
    logprobs, entropies = [], []
    for row, kept in zip(ids, mask.bool()):
        length = 1 + kept.nonzero().max().item() if kept.any() else 1
        logits = model(input_ids=row[:length].unsqueeze(0), use_cache=False).logits[0, :-1]
        distributions = torch.cat([torch.ones(1, logits.shape[1]), logits / temperature]).log_softmax(-1)  # (l, V)
        own = distributions.gather(1, row[:length, None]).squeeze(1)
        padding = (0, len(row) - length)
        logprobs.append(torch.nn.functional.pad(own, padding))
        entropies.append(torch.nn.functional.pad(-(distributions.exp() * distributions).sum(-1), padding))
    return torch.stack(logprobs) * mask, torch.stack(entropies) * mask


@pytest.fixture(params=["llama", "qwen3", "gpt2"])  # gpt2 has absolute positions
def model(request):
    return build_model(request.param, dtype=torch.float32)


@pytest.fixture
def batch():
    """Ids and a mask with padding, a gap as a tool leaves it, and a row without any token."""
    ids, mask = pad(PROMPTS, COMPLETIONS)
    mask[2, 4] = mask[4, 6:8] = 0
    mask[5] = 0
    return ids, mask


def test_logprobs_entropies_and_gradient_are_those_of_the_models_logits(model, batch):
    found = grpo.Policy(model, "float32")(*batch, 0.7)
    expected = expected_logprobs(model, *batch, 0.7)
    for ours, right in zip(found, expected):
        torch.testing.assert_close(ours, right, atol=2e-5, rtol=1e-5)
        assert (ours[batch[1] == 0] == 0).all()
    weights = torch.randn(found[0].shape, generator=torch.Generator().manual_seed(0))
    gradients = [gradient_of(model, (logprobs * weights).sum()) for logprobs in (found[0], expected[0])]
    assert relative_error(*gradients) < 1e-5
    assert not found[1].requires_grad


@pytest.mark.parametrize("logits", [11, 50, 10_000])  # at once: one token, four, all
def test_chunks_of_the_head_change_nothing(model, batch, logits, monkeypatch):
    whole = grpo.Policy(model, "float32")(*batch, 1.0)
    rows = []

    def count(_, inputs):
        rows.append(len(inputs[0]))

    monkeypatch.setattr(grpo, "LOGITS_AT_ONCE", logits)
    model.get_output_embeddings().register_forward_pre_hook(count)
    chunked = grpo.Policy(model, "float32")(*batch, 1.0)
    assert sum(rows) == batch[1].sum() and max(rows) <= max(1, logits // 11)
    for ours, right in zip(chunked, whole):
        torch.testing.assert_close(ours, right)
    once = len(rows)
    gradients = [gradient_of(model, logprobs.sum()) for logprobs in (chunked[0], whole[0])]
    assert relative_error(*gradients) < 1e-6
    assert len(rows) == 2 * once + 1  # computed again in the backward pass, not kept; and once for the whole


# ---- bfloat16


def load(**settings):
    args, tokenizer = make_args(**settings), AutoTokenizer.from_pretrained(TINY)
    return grpo.load_policy(args, tokenizer, CPU), grpo.load_sampler(args, tokenizer, CPU)


class TestBfloat16:
    def test_noise_is_what_rounding_takes_away(self):
        given = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
        given.model.norm.weight.data[:3] = torch.tensor([0.0, 1.0, -2.0])
        policy = grpo.Policy(given, "bfloat16")
        before = [weight.detach().clone() for weight in policy.parameters()]
        grpo.add_rounding_noise(policy, CPU)
        for old, new in zip(before, policy.parameters(), strict=True):
            assert torch.equal(old.bfloat16(), new.bfloat16())
            assert torch.equal(new == 0, old.bfloat16() == 0)
        noise = (policy.model.lm_head.weight - policy.model.lm_head.weight.bfloat16().float()) / before[0].std()
        assert 0.3 < (noise > 0).float().mean() < 0.7  # to both sides

    def test_policy_and_reference_are_equal_and_the_sampler_is_the_rounded_policy(self):
        policy, sampler = load(precision="bfloat16")
        ref, _ = load(precision="bfloat16")
        for ours, other, copy in zip(policy.parameters(), ref.parameters(), sampler.parameters(), strict=True):
            assert torch.equal(ours, other) and ours.dtype == torch.float32 and copy.dtype == torch.bfloat16
            with torch.no_grad():
                ours.add_(0.01)
        grpo.copy_weights(policy, sampler)
        for ours, copy in zip(policy.parameters(), sampler.parameters(), strict=True):
            assert torch.equal(ours.bfloat16(), copy)

    def test_blocks_multiply_in_bfloat16_and_the_head_in_float32(self):
        seen = {}
        policy, _ = load(precision="bfloat16")
        policy.model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *call: seen.update(block=call[2].dtype))
        policy.model.lm_head.register_forward_hook(lambda *call: seen.update(head=call[2].dtype))
        ids, mask = pad(PROMPTS, COMPLETIONS)
        policy(ids, mask, 1.0)[0].sum().backward()
        assert seen == {"block": torch.bfloat16, "head": torch.float32}
        assert {weight.grad.dtype for weight in policy.parameters()} == {torch.float32}

    def test_small_steps_move_rounded_weights_in_proportion(self, tmp_path):
        """A step of 1e-6 times a uniform gradient moves as much of a bfloat16 copy on average as of the weight."""
        AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16).save_pretrained(tmp_path)
        policy, sampler = load(precision="bfloat16", model=str(tmp_path))
        before = [weight.clone() for weight in sampler.parameters()]
        with torch.no_grad():
            for weight in policy.parameters():
                weight.sub_(1e-5)
        grpo.copy_weights(policy, sampler)
        moves = [(old.float() - new.float()).flatten() for old, new in zip(before, sampler.parameters(), strict=True)]
        assert torch.cat(moves).mean().item() == pytest.approx(1e-5, rel=0.1)
        plain = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)  # whose weights have no lower bits
        still = [(old - (old.float() - 1e-5).bfloat16()).float().flatten() for old in plain.parameters()]
        assert torch.cat(still).mean() < 0.5e-5


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_first_ratio_is_exactly_one(precision, checkpointing, monkeypatch):
    """Old log-probabilities are those of the update, to the last bit, with padding, fillers and chunks."""
    monkeypatch.setattr(grpo, "LOGITS_AT_ONCE", 97 * 7)
    policy, _ = load(precision=precision, gradient_checkpointing=checkpointing)
    args = make_args(microbatch_tokens=25, temperature=0.9)
    ids, mask = pad(PROMPTS, COMPLETIONS)
    lengths = mask.cumsum(1).argmax(1) + 1
    batch = {"ids": ids, "completion_mask": mask, "total_lengths": lengths, "sampler_logprobs": torch.zeros(ids.shape)}
    halves = [torch.tensor([5, 2, 7, 0]), torch.tensor([3, 6, 1, 4])]
    batch["row"] = torch.arange(len(ids))
    minibatches = [grpo.microbatches(batch, indices, args.microbatch_tokens) for indices in halves]
    grpo.add_logprobs("old_logprobs", policy, minibatches, args)
    for indices, parts in zip(halves, minibatches, strict=True):
        assert sorted(torch.cat([part["row"] for part in parts]).tolist()) == sorted(indices.tolist())
        for part in parts:
            assert ((part["old_logprobs"] != 0) == part["completion_mask"].bool()).all()
            assert torch.equal(part["completion_mask"].sum(1), mask[part["row"]].sum(1))  # no token is cut off
            assert len(part["ids"]) * part["ids"].shape[1] <= 25 or len(part["ids"]) == 1
            logprobs, _ = policy(part["ids"], part["completion_mask"], args.temperature)
            assert logprobs.requires_grad
            assert torch.equal(logprobs, part["old_logprobs"])


# ---- families of models: each kind of block, cache and head

STOP_IDS = [5, 7, 9, 11, 13, 15, 17, 19, 21]
SIZES = """
1 first_k_dense_replace n_group topk_group n_shared_experts num_key_value_heads mamba_ngroups bos_token_id
2 num_hidden_layers n_layer num_layers n_layers num_attention_heads n_head n_heads num_heads num_experts_per_tok
2 linear_num_key_heads linear_num_value_heads
4 num_local_experts num_experts n_routed_experts sliding_window mamba_n_heads mamba_d_state mamba_chunk_size
8 head_dim q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim
8 linear_value_head_dim mamba_d_head
16 hidden_size n_embd d_model word_embed_proj_dim moe_intermediate_size shared_expert_intermediate_size
32 intermediate_size n_inner ffn_dim ffn_hidden_size shared_intermediate_size mamba_d_ssm
47 vocab_size
64 max_position_embeddings n_positions
"""
VALUES = {"use_mamba_kernels": False, "pad_token_id": 0, "eos_token_id": 5}
for line in SIZES.strip().splitlines():
    size, *names = line.split()
    VALUES |= dict.fromkeys(names, int(size))
WINDOWS, LINEAR = ({"layer_types": [kind, "full_attention"]} for kind in ("sliding_attention", "linear_attention"))
CAP, LATENT = {"final_logit_softcapping": 5.0}, {"num_key_value_heads": 2}
FAMILIES = {
    **dict.fromkeys("llama qwen2 qwen3 mistral phi3 smollm3 olmo2 glm4".split(), {}),  # rotary positions
    **dict.fromkeys("gpt2 opt bloom gpt_neox falcon".split(), {}),  # learned positions or biases, layer norms
    **dict.fromkeys("mixtral qwen3_moe gpt_oss".split(), {}),  # experts, sinks
    "deepseek_v3": LATENT,  # compressed keys and values
    **dict.fromkeys(("qwen3_next", "qwen3_5_text"), LINEAR),
    "falcon_h1": {},  # a state space
    **dict.fromkeys(("gemma2", "gemma3_text"), {**CAP, **WINDOWS}),
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}


def build(name, dtype=torch.float32):
    """A random model of a family, its weights so large that distributions are far from uniform."""
    known = vars(AutoConfig.for_model(name)) | AutoConfig.for_model(name).attribute_map
    values = {key: value for key, value in VALUES.items() if key in known}
    config = AutoConfig.for_model(name, **values | FAMILIES[name])
    for key, value in vars(config).items():
        if ("drop" in key or "jitter" in key) and isinstance(value, float):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data *= 6.0 if parameter.ndim > 1 else 1.0
    return model.to(dtype)


def sample(model, count=12):
    """Prompts of several lengths, two of them equal, and completions that end at different times."""
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(6, 47, (length,), generator=generator).tolist() for length in (3, 9, 1, 5, 6, 6)]
    prompts[5] = prompts[4]
    torch.manual_seed(0)
    completions = grpo.generate(model, prompts, count, 1.0, STOP_IDS)
    assert len({len(tokens) for tokens, _ in completions}) > 1
    ids, mask = pad(prompts, [tokens for tokens, _ in completions])
    sampled = torch.zeros(ids.shape)
    sampled[mask.bool()] = torch.tensor([value for _, logprobs in completions for value in logprobs])
    return ids, mask, sampled


@pytest.mark.parametrize("name", FAMILIES)
def test_policy_logits_and_sampler_agree_in_each_family(name):
    model = build(name)
    ids, mask, sampled = sample(model)
    logprobs, _ = grpo.Policy(model, "float32")(ids, mask, 1.0)
    torch.testing.assert_close(sampled, logprobs.detach(), atol=1e-3, rtol=0)
    right, _ = expected_logprobs(model, ids, mask, 1.0)
    torch.testing.assert_close(logprobs, right, atol=1e-3, rtol=0)
    gradients = [gradient_of(model, values.sum()) for values in (logprobs, right)]
    assert gradients[1].isfinite().all() and gradients[1].norm() > 0
    assert relative_error(*gradients) < 1e-3


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", FAMILIES)
def test_in_bfloat16_sampler_policy_and_reference_agree_in_each_family(name):
    """And with gradient checkpointing, which changes nothing."""
    policies = []
    for checkpointing in (False, True):
        args = make_args(precision="bfloat16", gradient_checkpointing=checkpointing)
        policies.append(grpo.prepare(grpo.Policy(build(name), "bfloat16"), args, CPU))
    sampler = build(name, torch.bfloat16)
    grpo.copy_weights(policies[0], sampler)
    ids, mask, sampled = sample(sampler, 8)
    logprobs, other = (policy(ids, mask, 1.0)[0] for policy in policies)
    assert torch.equal(logprobs, other)
    log_weights = (logprobs.detach() - sampled).double()
    assert (log_weights.expm1() - log_weights).sum() < 0.1 * mask.sum()  # at six times the usual weights
    logprobs.sum().backward()
    gradients = [weight.grad for weight in policies[0].parameters() if weight.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["granite", "cohere2"])
def test_a_family_that_scales_its_logits_elsewhere_is_found_by_the_limit_on_sampler_kl(name):
    """With the factors of Granite 3 and Command R7B."""
    scale = {"granite": {"logits_scaling": 8.0}, "cohere2": {"logit_scale": 0.0625, **WINDOWS}}[name]
    FAMILIES[name] = scale
    model = build(name)
    del FAMILIES[name]
    ids, mask, sampled = sample(model)
    log_ratio = torch.where(mask.bool(), grpo.Policy(model, "float32")(ids, mask, 1.0)[0].detach() - sampled, 0.0)
    assert grpo.k3(log_ratio).sum() / mask.sum() > 0.1  # above which main ends in its first step


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_in_float32_keys_are_repeated(precision, monkeypatch):
    """On a GPU, attention in float32 with fewer keys than queries would keep L x L numbers per head."""
    policy = grpo.prepare(
        grpo.Policy(build_model("qwen3", dtype=torch.float32), precision), make_args(precision=precision), CPU
    )
    calls, attention = [], torch.nn.functional.scaled_dot_product_attention

    def record(query, key, *rest, **settings):
        calls.append((query.shape[1], key.shape[1]))
        return attention(query, key, *rest, **settings)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    policy(torch.tensor([[3, 4, 5, 6]]), torch.tensor([[0, 1, 1, 1]]), 1.0)
    assert calls == [(2, 2 if precision == "float32" else 1)] * 2


def test_a_pad_token_that_is_in_use_is_trained(tmp_path):
    """As SmolLM2's, which ends every turn: nn.Embedding gives the row of its padding_idx no gradient."""
    model = AutoModelForCausalLM.from_pretrained(TINY)
    model.config.pad_token_id = 4
    model.save_pretrained(tmp_path)
    policy = grpo.load_policy(make_args(model=str(tmp_path)), AutoTokenizer.from_pretrained(TINY), CPU)
    ids = torch.tensor([[3, 4, 5, 6]])
    policy.model.model(input_ids=ids).last_hidden_state.square().sum().backward()
    assert policy.model.get_input_embeddings().weight.grad[4].norm() > 0


def test_dropout_is_off_and_only_a_small_model_computes_with_one_thread(tmp_path, monkeypatch):
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=97, attn_pdrop=0.5, resid_pdrop=0.5)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    args, tokenizer = make_args(model=str(tmp_path)), AutoTokenizer.from_pretrained(TINY)
    policy = grpo.load_policy(args, tokenizer, CPU)
    ids, mask = pad(PROMPTS, COMPLETIONS)
    assert torch.equal(policy(ids, mask, 1.0)[0], policy(ids, mask, 1.0)[0])
    threads = SimpleNamespace(count=None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(threads, "count", count))
    monkeypatch.setattr(transformers.PreTrainedModel, "num_parameters", lambda _: 10_000_000)
    grpo.load_policy(args, tokenizer, CPU)
    assert threads.count is None
    monkeypatch.setattr(transformers.PreTrainedModel, "num_parameters", lambda _: 9_999_999)
    grpo.load_policy(args, tokenizer, CPU)
    assert threads.count == 1
