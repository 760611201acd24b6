"""Which architectures of transformers train: tiny random models against plain forward passes of each sequence alone."""

import re

import pytest
import torch
import transformers
from tiny import make_args
from transformers import AutoConfig, AutoModelForCausalLM

import grpo
import models

PAD, VOCABULARY, STOP_IDS = 0, 47, [5, 7, 9, 11, 13, 15, 17, 19, 21]
SHORT = make_args(max_prompt_length=48, max_completion_length=16)
# Each config is given those of these that it knows.
SIZES = {
    **{"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 5},
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "lru_width"), 16),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **{"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "n_positions": 64},
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **{"num_experts_per_tok": 2, "moe_k": 2, "first_k_dense_replace": 1, "num_expert_group": 1},
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **{"sliding_window": 4, "attention_window_size": 8, "block_size": 4, "window_size": 4, "keep_window_size": 4},
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"linear_num_heads": 2, "linear_head_dim": 8, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32},
    **{"mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_headdim": 8, "mamba_ngroups": 1, "n_groups": 1},
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_chunk_size", "chunk_size"), 4),
    **{"index_head_dim": 8, "index_n_heads": 2, "index_block_size": 2, "index_topk_blocks": 2},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "use_mamba_kernels": False},
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
LATENT = {"num_key_value_heads": 2}  # attention with compressed keys and values
CAP, UNSHARED = {"final_logit_softcapping": 5.0}, {"num_kv_shared_layers": 0}
PLAIN = """
    afmoe apertus arcee aria_text biogpt bitnet bloom ctrl cwm doge dots1 ernie4_5 ernie4_5_moe exaone4
    exaone_moe falcon flex_olmo gemma glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_oss helium
    hunyuan_v1_dense hunyuan_v1_moe jetmoe llama mimo_v2_flash minimax_m2 minimax_m3_vl_text ministral
    ministral3 mistral mixtral mpt nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2
    qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 xglm
"""
# {title: {name of the architecture: its own settings}}
TRAINED = {
    "Attention": {
        **dict.fromkeys(PLAIN.split(), {}),
        **dict.fromkeys("deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa".split(), LATENT),
        "codegen": {"num_attention_heads": 4, "n_head": 4, "n_embd": 32, "rotary_dim": 4},
        "diffllama": {"num_key_value_heads": 2},
        "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
        "gptj": {"rotary_dim": 4},
    },
    "Linear attention, state space or convolution, beside attention": {
        **dict.fromkeys("qwen3_5_text qwen3_5_moe_text qwen3_next olmo_hybrid".split(), LINEAR),
        **dict.fromkeys("lfm2 lfm2_moe lfm3".split(), CONVOLUTION),
        "falcon_h1": {"lm_head_multiplier": 0.3},
        "bamba": {"attn_layer_indices": [1]},
        "granitemoehybrid": {"layer_types": ["mamba", "attention"], "logits_scaling": 3.0},
        "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
        "kimi_linear": {**LINEAR, **LATENT, "mlp_layer_types": ["dense", "sparse"]},
        "bailing_hybrid": {**LINEAR, **LATENT},
        "nemotron_h": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "moe"]},
        "zaya": {"num_experts_per_tok": 1},
    },
    "Logits that are scaled or capped": {
        "cohere": {"logit_scale": 0.25},
        "cohere2": {"logit_scale": 0.25, **WINDOWS},
        **dict.fromkeys(("granite", "granitemoe"), {"logits_scaling": 3.0}),
        **dict.fromkeys("gemma2 gemma3_text vaultgemma".split(), {**CAP, **WINDOWS}),
        "gemma3n_text": {**CAP, **WINDOWS, **UNSHARED, "laurel_rank": 4, "activation_sparsity_pattern": [0.0, 0.0]},
        "gemma4_text": {**CAP, **WINDOWS, "global_head_dim": 8},
        "nanochat": CAP,
    },
}
SETTINGS = {name: settings for group in TRAINED.values() for name, settings in group.items()}
# {name: (its own settings, the reason in the error that refuses it)}
CACHE, HEAD = "has no attribute 'past_key_values'", "log-probabilities of sampling and training differ"
COMPRESSED = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
REFUSED = {
    **dict.fromkeys("falcon_mamba mamba openai-gpt rwkv".split(), ({}, CACHE)),
    "mamba2": ({"num_heads": 4, "head_dim": 8, "expand": 2}, CACHE),
    "recurrent_gemma": ({"num_hidden_layers": 3, "logits_soft_cap": 5.0}, CACHE),
    "minimax": ({}, "The size of tensor a"),
    "xlstm": ({"embedding_dim": 16, "num_blocks": 2}, "The expanded size of the tensor"),
    "deepseek_v4": ({"num_hidden_layers": 3, "layer_types": COMPRESSED}, HEAD),
    "hyperclovax": ({"logits_scaling": 3.0}, HEAD),
    "minicpm3": (LATENT, HEAD),
    "modernbert-decoder": ({}, HEAD),
    "llama4_text": ({"intermediate_size_mlp": 32}, "has no attribute 'last_hidden_state'"),
}


def build(name, settings):
    """A random model as load_model makes it, its weights so large that distributions are far from uniform."""
    try:
        config = AutoConfig.for_model(name)
    except ValueError:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    known = vars(config) | config.attribute_map
    config = AutoConfig.for_model(name, **{key: SIZES[key] for key in SIZES if key in known} | settings)
    for key, value in vars(config).items():
        if ("drop" in key or "jitter" in key) and isinstance(value, float):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.ndim > 1 else 1.0)
    return model


def make_prompts():
    """Six prompts of lengths 1 to 9, the last two equal, padded on the left."""
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(6, VOCABULARY, (length,), generator=generator).tolist() for length in (3, 9, 1, 5, 6)]
    return grpo.pad_left([{"prompt_ids": ids} for ids in [*prompts, prompts[-1]]], "cpu")


def plain_distributions(model, ids, mask, completion_ids, completion_mask):
    """Log-probabilities (T, V) of all tokens at each completion token, a sequence after the other, without padding."""
    for row in range(len(ids)):
        prompt, completion = ids[row][mask[row] == 1], completion_ids[row][completion_mask[row] == 1]
        logits = model(torch.cat([prompt, completion]).unsqueeze(0), use_cache=False).logits[0, len(prompt) - 1 : -1]
        yield logits.log_softmax(-1), completion


@pytest.mark.parametrize("name", SETTINGS)
def test_training_forward_and_gradient_are_those_of_each_sequence_alone(name):
    model, (ids, mask) = build(name, SETTINGS[name]), make_prompts()
    completion_mask = (torch.arange(8) < torch.tensor([1, 4, 8, 3, 7, 2]).unsqueeze(1)).long()
    completion_ids = torch.randint(VOCABULARY, completion_mask.shape, generator=torch.Generator().manual_seed(1))
    inputs = (ids, mask, completion_ids, completion_mask)
    logprobs, _ = grpo.token_logprobs(model, *inputs, 1.0)
    pairs = plain_distributions(model, *inputs)
    expected = torch.cat([distribution.gather(1, tokens.unsqueeze(1)) for distribution, tokens in pairs]).squeeze(1)
    torch.testing.assert_close(logprobs[completion_mask == 1], expected, atol=1e-3, rtol=0)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradient, expected = (
        torch.autograd.grad(result.sum(), parameters, allow_unused=True, materialize_grads=True)
        for result in (logprobs, expected)
    )
    assert sum(bool(part.any()) for part in gradient) > 0.7 * len(gradient)
    gradient, expected = (torch.cat([part.flatten() for part in parts]) for parts in (gradient, expected))
    assert expected.isfinite().all() and (gradient - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("name", SETTINGS)
def test_padded_groups_that_finish_at_different_times_decode_like_single_rows(name):
    model, (ids, mask) = build(name, SETTINGS[name]), make_prompts()
    grpo.check_model(model, ids[1].tolist(), SHORT)
    torch.manual_seed(0)
    for temperature in (1.0, 0.0):
        completion_ids, completion_mask, logprobs = grpo.generate(
            model, ids, mask, 12, temperature, STOP_IDS, PAD, with_logprobs=True
        )
        assert len(completion_mask.sum(1).unique()) > 1 or not temperature
        with torch.no_grad():
            rows = list(plain_distributions(model, ids, mask, completion_ids, completion_mask))
        for row, (distribution, tokens) in enumerate(rows):
            chosen = distribution.gather(1, tokens.unsqueeze(1)).squeeze(1)
            expected = chosen if temperature else chosen - distribution.max(1).values
            torch.testing.assert_close(logprobs[row, : len(tokens)], expected, atol=1e-3, rtol=0)
            assert len(tokens) == 12 or tokens[-1] in STOP_IDS


WITHOUT_BLOCKS = {"biogpt", "ctrl"}  # they name none
# With adapters those that have frozen weights, latent attention, dtypes or states of their own.
ADAPTED = "afmoe deepseek_v3 gemma3n_text nemotron_h qwen3_5_text".split()


WITH_BLOCKS = [(name, 0) for name in SETTINGS if name not in WITHOUT_BLOCKS]


@pytest.mark.parametrize("name, rank", [*WITH_BLOCKS, *((name, 2) for name in ADAPTED)])
@pytest.mark.usefixtures("alone")
def test_in_bfloat16_sampler_policy_and_reference_agree(name, rank):
    models = [build(name, SETTINGS[name]) for _ in range(3)]
    for model in models if rank else ():
        grpo.add_adapters(model, rank)
        for key, weight in model.named_parameters():
            weight.data += 0.02 * ("lora_b" in key)
    args, cpu = make_args(precision="bfloat16"), torch.device("cpu")
    policy = grpo.shard(grpo.LogprobModel(models[0]), args, cpu)
    ref = grpo.shard(grpo.LogprobModel(models[1].requires_grad_(False)), args, cpu)
    ids, mask = make_prompts()
    torch.manual_seed(0)
    with grpo.gathered(policy) as sampler:
        *completions, sampled = grpo.generate(sampler, ids, mask, 8, 1.0, STOP_IDS, PAD, with_logprobs=True)
    batch = dict(zip(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), (ids, mask, *completions)))
    with torch.no_grad():
        assert torch.equal(policy(batch, 1.0)[0], ref(batch, 1.0)[0])
    logprobs, _ = policy(batch, 1.0)
    log_weight = (logprobs - sampled).detach().double()
    assert (log_weight.expm1() - log_weight).sum() < 1e-4 * completions[1].sum()  # at six times the usual weights
    rounding = (logprobs - grpo.token_logprobs(models[2], ids, mask, *completions, 1.0)[0]).abs().max()
    assert rounding > 1e-3
    logprobs.sum().backward()
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused(name):
    settings, reason = REFUSED[name]
    with pytest.raises((SystemExit, AttributeError, RuntimeError), match=re.escape(reason)):
        grpo.check_model(build(name, settings), make_prompts()[0][1].tolist(), SHORT)


def test_the_page_is_current():
    page = models.PATH.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}." not in page:
        pytest.skip("written with another version of transformers")
    assert page == models.render(TRAINED, REFUSED)
