"""Models from elsewhere, adapters, and architectures that train: python -m pytest tests/test_models.py"""

import json
import re
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from tiny import (
    CPU,
    FORMS,
    ROOT,
    SCRIPTS,
    SIZES,
    TINY,
    adapters,
    build_model,
    edit_json,
    load,
    make_args,
    make_batch,
    make_folder,
    make_main_args,
    make_tokenizer,
    pad_right,
    read_jsonl,
    relative_error,
    weights,
    write_jsonl,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import dpo
import gkd
import grpo_tools
import models
import ppo_rlhf
import reward_model
import sft

pytestmark = pytest.mark.usefixtures("alone")
INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


@pytest.fixture
def folder(tmp_path):
    """A copy of the bundled model."""
    return shutil.copytree(TINY, tmp_path / "model")


def prepare(model, **settings):
    return ppo_rlhf.prepare_model(grpo_tools.LogprobModel(model), make_args(**{"precision": "float32"} | settings), CPU)


def save(model, tokenizer, folder):
    """The checkpoint of a run in this folder."""
    policy = grpo_tools.LogprobModel(model)
    ppo_rlhf.save(folder, policy, torch.optim.AdamW(policy.parameters()), tokenizer, 1)
    return folder / "checkpoint"


# ---- stop tokens


@pytest.mark.parametrize("form", FORMS)
def test_what_ends_a_turn_is_sampled_trained_compared_and_saved(form, tmp_path):
    special, template = FORMS[form]
    tokenizer = make_tokenizer(special, template)
    end_of_text, end_of_turn = tokenizer.convert_tokens_to_ids(special[:2])
    model, tokenizer = load(ppo_rlhf, make_folder(tmp_path / "model", tokenizer))
    stop_ids = sorted([end_of_text, end_of_turn])
    assert ppo_rlhf.find_turn_end(tokenizer) == end_of_turn
    assert model.generation_config.eos_token_id == stop_ids
    # sft.py trains it and nothing after it; dpo.py compares completions that end in it.
    expected = [*tokenizer.encode("2"), end_of_turn]
    [(example, _)] = sft.read_chat({"prompt": "1+1=", "completion": "2"}, tokenizer, sft.Args())
    assert example["completion_ids"] == expected
    pair, _ = dpo.read_pair({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, tokenizer, dpo.Args())
    assert pair["chosen_ids"] == expected
    # Whoever loads the checkpoint stops there, too.
    checkpoint = save(model, tokenizer, tmp_path)
    assert AutoModelForCausalLM.from_pretrained(checkpoint).generation_config.eos_token_id == stop_ids
    assert AutoTokenizer.from_pretrained(checkpoint).eos_token_id == end_of_text


def test_without_an_end_of_a_turn_it_is_the_end_of_text_and_texts_of_turns_are_refused(tmp_path):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    model, tokenizer = load(ppo_rlhf, make_folder(tmp_path / "model", make_tokenizer(["<eos>"], template)))
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id]
    with pytest.raises(ValueError, match="the chat template writes no stop token after"):
        sft.read_chat({"prompt": "1+1=", "completion": "2"}, tokenizer, sft.Args())
    with pytest.raises(ValueError, match="the chat template writes no stop token after"):
        dpo.read_pair({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, tokenizer, dpo.Args())


# ---- folders


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3ForSequenceClassification"])
def test_a_head_is_kept_or_new_or_missing_whatever_the_architecture_is_called(architecture, folder, tmp_path):
    trained = shutil.copytree(TINY.parent / "tiny-reward", tmp_path / "trained")
    expected = AutoModelForSequenceClassification.from_pretrained(trained).score.weight
    for path in (folder, trained):
        edit_json(path / "config.json", architectures=[architecture])
    for new_head in (True, False):
        assert torch.equal(reward_model.load_reward_model(trained, new_head).score.weight, expected)
    assert reward_model.load_reward_model(folder).score.weight.std().item() == pytest.approx(97**-0.5, rel=0.3)
    with pytest.raises(SystemExit, match="not a complete reward model: weights are missing, among them score.weight$"):
        ppo_rlhf.load_reward_model(folder, new_head=False)


def take_other_tokenizer(folder):
    make_tokenizer(["<eos>"], None).save_pretrained(folder)


def make_encoder(folder):
    edit_json(folder / "config.json", model_type="t5", architectures=["T5ForConditionalGeneration"])


NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
FAULTS = {
    "tensor missing": (weights(UP, lambda _: None), f"weights are missing, among them {UP}$"),
    "wrong size": (weights(NORM, lambda _: torch.ones(95)), "`ignore_mismatched_sizes`.*look at the above report"),
    "nan": (weights(NORM, lambda value: value.fill_(torch.nan)), "nan"),
    "other tokenizer": (take_other_tokenizer, "index out of range|no stop token"),
    "adapters": (adapters, "Unrecognized model in .*/model"),
    "encoder": (make_encoder, "Unrecognized configuration class .*T5Config|not a complete reward model"),
}


@pytest.mark.parametrize("script", [ppo_rlhf, reward_model])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_with_something_wrong_is_not_trained(script, fault, folder, tmp_path):
    break_it, message = FAULTS[fault]
    break_it(folder)
    with pytest.raises((Exception, SystemExit), match=message):
        settings = {"model": folder, "run_dir": tmp_path / "run"} | (
            {"reward_model": "none"} if script is ppo_rlhf else {}
        )
        script.main(make_main_args(script, tmp_path, **settings))
    seen_late = script is ppo_rlhf and fault in ("nan", "other tokenizer")  # while it samples
    assert not (tmp_path / "run" / ("state" if seen_late else "")).exists()


@pytest.mark.parametrize("script", [dpo, sft])
def test_a_model_whose_head_is_not_as_expected_is_refused(script):
    """Some models scale their logits, by a setting of another name."""
    model = build_model("llama", dtype=torch.float32)
    args = script.Args(max_prompt_length=1000, max_completion_length=1000)
    script.check_model(model, args)
    model.register_forward_hook(lambda _, __, output: output | {"logits": output.logits * 1.1})
    with pytest.raises(SystemExit, match="its LM head is not supported"):
        script.check_model(model, args)


def test_sampling_from_another_policy_ends_the_run_unsaved(tmp_path, monkeypatch):
    sample_tokens = ppo_rlhf.sample_tokens
    monkeypatch.setattr(ppo_rlhf, "sample_tokens", lambda logits, temperature: sample_tokens(logits / 4, temperature))
    with pytest.raises(SystemExit, match=r"sampling and training disagree about log-probabilities \(KL [0-9.]+ per"):
        settings = {"save_every": 1, "reward_model": "none", "run_dir": tmp_path / "run"}
        ppo_rlhf.main(make_main_args(ppo_rlhf, tmp_path, **settings))
    assert not (tmp_path / "run" / "state").exists()


def test_only_a_small_model_computes_with_one_thread(monkeypatch):
    for count, expected in ((10_000_000, 2), (9_999_999, 1)):
        monkeypatch.setattr(transformers.PreTrainedModel, "num_parameters", lambda _, count=count: count)
        torch.set_num_threads(2)
        load(ppo_rlhf, TINY)
        assert torch.get_num_threads() == expected


def test_dropout_is_off_while_it_trains(folder):
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, attn_pdrop=0.5, resid_pdrop=0.5, vocab_size=29, pad_token_id=0, eos_token_id=5
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    model, _ = load(ppo_rlhf, folder)
    batch, policy = make_batch(model), prepare(model, gradient_checkpointing=True)
    first, second = (policy(batch, 1.0)[0] for _ in range(2))
    assert first.requires_grad
    assert torch.equal(first, second)


# ---- prompts, completions, and what is saved


def test_special_tokens_of_a_completion_are_seen_but_for_those_that_end_it(monkeypatch):
    """Thoughts between special tokens, as QwQ's, are to be told from the answer."""
    tokenizer = make_tokenizer(["<eos>", "<stop>", "<bos>", "<think>", "</think>"], None)
    tokenizer.bos_token = "<bos>"
    said = [r"<think>\boxed{5}</think>\boxed{6}<eos>", "<bos><think>7<pad>8<stop>"]
    ids, mask = pad_right([tokenizer.encode(text, add_special_tokens=False) for text in said], 30)
    config = SimpleNamespace(eos_token_id=tokenizer.convert_tokens_to_ids(["<eos>", "<stop>"]))
    model = SimpleNamespace(device="cpu", generation_config=config)
    policy = SimpleNamespace(model=model, modules=list)
    monkeypatch.setattr(ppo_rlhf, "generate", lambda *_: (ids, mask, mask.float()))
    prompts = [{"prompt_ids": tokenizer.encode("1+1=")}] * 2
    _, texts = ppo_rlhf.sample_completions(policy, tokenizer, prompts, 1.0, ppo_rlhf.Args())
    assert texts == [r"<think>\boxed{5}</think>\boxed{6}", "<bos><think>7<pad>8"]


def test_a_bare_prompt_does_not_end_in_the_stop_token_that_the_tokenizer_appends():
    tokenizer = make_tokenizer(["<eos>", "<bos>"], None)
    bos, eos = tokenizer.convert_tokens_to_ids(["<bos>", "<eos>"])
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", bos), ("<eos>", eos)]
    )
    prompt, completion = (tokenizer.encode(text, add_special_tokens=False) for text in ("1+1=", "2"))
    assert tokenizer.encode("1+1=") == [bos, *prompt, eos]
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    assert ppo_rlhf.encode_prompt(tokenizer, chat[:1], None) == [bos, *prompt]
    assert sft.encode_completion(tokenizer, [bos, *prompt], chat, None) == [*completion, eos]


def test_a_generation_config_that_could_not_be_saved_anew_is_no_fault(folder, tmp_path):
    given = {"temperature": 0.6, "num_beams": 4, "length_penalty": 0.5, "early_stopping": True, "pad_token_id": -1}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7], **given}))
    model, tokenizer = load(ppo_rlhf, folder)
    checkpoint = save(model, tokenizer, tmp_path)
    saved = json.loads((checkpoint / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [5, 7]
    assert not {*given} & {*saved}


@pytest.mark.parametrize("load_part", [lambda folder: load(ppo_rlhf, folder)[0], reward_model.load_reward_model])
def test_a_pad_token_that_is_in_use_is_trained(load_part, folder):
    """As SmolLM2's, which ends every turn: nn.Embedding gives the row of its padding_idx no gradient."""
    gradients = []
    for pad_id in (None, 4):
        edit_json(folder / "config.json", pad_token_id=pad_id)
        model = load_part(folder)
        output = model.base_model(input_ids=torch.tensor([[3, 4, 5, 6]]), use_cache=False)
        output.last_hidden_state.square().sum().backward()
        gradients.append(model.get_input_embeddings().weight.grad)
    assert gradients[0][4].norm() > 0
    assert torch.equal(*gradients)


# ==== --lora-rank: adapters by hand, checkpoints without them, and a reference that is the model without them


CONFIGS = {
    "llama": "llama",
    "with biases": transformers.Qwen2Config(**SIZES, num_key_value_heads=1),
    "tied": transformers.Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True),
}


def with_adapters(kind="llama", rank=3, dtype=torch.float64, moved=True):
    """A model whose adapters have been trained a little, unless they are not moved; without any at rank 0."""
    model = build_model(CONFIGS[kind], dtype=dtype)
    if rank:
        ppo_rlhf.add_adapters(model, rank)
    model.to(dtype)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".lora_b." in name and moved:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return model


def logprobs_of(model, batch):
    return ppo_rlhf.token_logprobs(model, *(batch[key] for key in INPUTS), 0.7)[0]


def test_adapters_change_nothing_at_first_and_are_all_that_is_trained():
    model, plain = with_adapters(moved=False), build_model("llama")
    batch = make_batch(plain)
    logprobs = logprobs_of(model, batch)
    assert torch.equal(logprobs, logprobs_of(plain, batch))
    logprobs.sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad == (".lora_" in name)
    for name, layer in plain.base_model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            found = model.base_model.get_submodule(name)
            assert found.lora_a.weight.shape == (3, layer.in_features)
            assert found.lora_b.weight.shape == (layer.out_features, 3)


def test_a_model_without_linear_layers_gets_no_adapters():
    with pytest.raises(SystemExit, match="^--lora-rank: the blocks of GPT2LMHeadModel have none of the layers"):
        ppo_rlhf.add_adapters(build_model("gpt2"), 3)


def test_routers_that_are_linear_layers_get_no_adapters():
    model = build("phimoe", {})
    ppo_rlhf.add_adapters(model, 2)
    assert {type(layer).__name__ for layer in model.modules() if hasattr(layer, "lora_a")} == {"LoraLinear"}
    assert "PhimoeTopKRouter" in {type(layer).__name__ for layer in model.modules()}


def test_gradients_of_adapters_are_those_of_the_weight_they_add_to():
    """With W = W_0 + s B A, dL/dB = s dL/dW A^T and dL/dA = s B^T dL/dW; s = 32 / rank."""
    model, merged = with_adapters(), build_model("llama")
    batch = make_batch(merged)
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_a")}
    for name, layer in layers.items():
        merged.get_submodule(name).weight.data += 32 / 3 * layer.lora_b.weight.data @ layer.lora_a.weight.data
    found, expected = logprobs_of(model, batch), logprobs_of(merged, batch)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for logprobs in (found, expected):
        (logprobs * batch["advantages"].unsqueeze(1)).sum().backward()
    for name, layer in layers.items():
        a, b, gradient = layer.lora_a.weight, layer.lora_b.weight, merged.get_submodule(name).weight.grad
        assert relative_error(b.grad, 32 / 3 * gradient @ a.T) < 1e-9
        assert relative_error(a.grad, 32 / 3 * b.T @ gradient) < 1e-9


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "with biases"])
def test_the_reference_is_the_model_without_adapters_to_the_last_bit(kind, ranks, precision, monkeypatch):
    batch = make_batch(build_model("llama", dtype=torch.float32))
    args, found = make_args(), []
    for moved in (False, True):
        model = with_adapters(kind, dtype=torch.float32, moved=moved)
        with monkeypatch.context() as patch:
            patch.setattr(ppo_rlhf, "WORLD_SIZE", ranks)  # sharded as on so many, on one
            policy = prepare(model, precision=precision)
        passes = (policy, partial(ppo_rlhf.without_adapters, policy), policy)
        found += [ppo_rlhf.compute_logprobs(which, batch, [torch.arange(8)], args) for which in passes]
    before, ref, again, moved, moved_ref, moved_again = found
    assert torch.equal(before, again) and torch.equal(moved, moved_again)  # the adapters are on again
    assert torch.equal(before, ref) and torch.equal(ref, moved_ref)
    assert (moved - ref).abs().max() > 0.1


def test_frozen_weights_are_held_once_in_bfloat16_in_the_blocks_and_adapters_in_float32():
    policy = prepare(with_adapters(dtype=torch.float32), precision="bfloat16")
    for name, parameter in policy.named_parameters():
        is_adapter = ".lora_" in name
        is_rounded = ".layers." in name and not is_adapter
        assert parameter.dtype == (torch.bfloat16 if is_rounded else torch.float32), name
        assert hasattr(parameter, "full_tensor") == is_adapter, name  # what is frozen FSDP would hold twice


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("precision, tolerance", [("float32", 1e-5), ("bfloat16", 0.05)])
@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_checkpoints_are_ordinary_folders_of_one_dtype(kind, precision, tolerance, rank, tmp_path, tokenizer):
    model, plain = with_adapters(kind, rank, torch.float32), build_model(CONFIGS[kind], dtype=torch.float32)
    batch = make_batch(plain)
    policy = prepare(model, precision=precision)
    before, _ = policy(batch, 0.7)
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
    model.config_file = {}
    ppo_rlhf.save(tmp_path, policy, optimizer, tokenizer, 1)
    saved = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert saved.keys() == plain.state_dict().keys() - ({"lm_head.weight"} if kind == "tied" else set())
    assert {value.dtype for value in saved.values()} == {torch.float32}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").eval()
    with torch.no_grad():
        after, _ = policy(batch, 0.7)
        assert torch.equal(after, before)  # saving changed nothing
        assert relative_error(logprobs_of(loaded, batch), after) < tolerance


@pytest.mark.parametrize("script", [*SCRIPTS.values(), dpo, sft, ppo_rlhf, gkd, reward_model])
def test_training_moves_what_adapters_reach_and_nothing_else(script, tmp_path, monkeypatch):
    monkeypatch.setattr(ppo_rlhf, "NORM_SAMPLES", 16)
    settings = {"num_steps": 2, "save_every": 2, "eval_prompts": 0, "lora_rank": 2}
    if script in (sft, reward_model):
        settings |= {"model": TINY, "minibatch_size": 8}
    script.main(make_main_args(script, tmp_path, **settings, run_dir=tmp_path / "run"))
    before = load_file(TINY / "model.safetensors")
    after = load_file(tmp_path / "run" / "checkpoint" / "model.safetensors")
    for name, value in before.items():
        assert torch.equal(after[name], value) == ("_proj." not in name), name
    assert after.keys() - before.keys() == ({"score.weight"} if script is reward_model else set())


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_gradient_checkpointing_changes_no_gradient(rank, precision):
    batch, found = make_batch(build_model("llama", dtype=torch.float32)), []
    for recomputed in (False, True):
        model = with_adapters(rank=rank, dtype=torch.float32)
        policy = prepare(model, precision=precision, gradient_checkpointing=recomputed)
        logprobs, _ = policy(batch, 0.7)
        logprobs.sum().backward()
        gradients = [parameter.grad for parameter in policy.parameters() if parameter.requires_grad]
        found.append([getattr(grad, "full_tensor", grad.clone)() for grad in gradients])
    assert all(map(torch.equal, *found))
    assert sum(gradient.norm() for gradient in found[0]) > 0


@pytest.mark.parametrize("rank", [0, 3])
def test_gradients_are_freed_after_each_step(rank):
    policy = grpo_tools.LogprobModel(with_adapters(rank=rank, dtype=torch.float32))
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
    logprobs_of(policy.model, make_batch(policy.model)).sum().backward()
    assert ppo_rlhf.step_optimizer(policy, optimizer, 1e-3, 1.0) > 0
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_small_steps_of_adapters_reach_a_model_in_bfloat16(tmp_path):
    """On the same rows in each step. What is added to an output that is rounded already would be lost."""
    rows = read_jsonl(ROOT / "data" / "addition" / "sft.jsonl")[:16]
    settings = {"model": TINY, "lora_rank": 8, "num_steps": 20, "learning_rate": 1e-5, "eval_prompts": 0}
    settings |= {"dataset": write_jsonl(tmp_path / "sums.jsonl", rows), "minibatch_size": 16}
    settings |= {"max_completion_length": 128, "save_every": 20}
    falls = {}
    for precision in ("float32", "bfloat16"):
        run = tmp_path / precision
        sft.main(make_main_args(sft, tmp_path, precision=precision, run_dir=run, **settings))
        losses = [line["loss/nll"] for line in read_jsonl(run / "metrics.jsonl") if "loss/nll" in line]
        falls[precision] = losses[0] - losses[-1]
    assert falls["float32"] > 0
    assert falls["bfloat16"] > 0.4 * falls["float32"]


# ==== which architectures of transformers train


STOP_IDS = [5, 7, 9, 11, 13, 15, 17, 19, 21]
SHORT = dpo.Args(max_prompt_length=48, max_completion_length=16)
# Each config is given those of these that it knows.
SIZES_OF_FAMILIES = """
1 first_k_dense_replace n_group topk_group n_shared_experts num_expert_group n_groups
1 num_key_value_heads mamba_ngroups bos_token_id
2 num_hidden_layers n_layer num_layers n_layers num_attention_heads n_head n_heads num_heads num_experts_per_tok moe_k
2 linear_num_key_heads linear_num_value_heads linear_num_heads index_n_heads index_block_size index_topk_blocks
4 num_local_experts num_experts n_routed_experts moe_num_experts sliding_window block_size window_size keep_window_size
4 mamba_n_heads mamba_num_heads mamba_d_state ssm_state_size state_size mamba_chunk_size chunk_size
8 head_dim hidden_size_per_layer_input
8 attention_window_size q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim linear_head_dim
8 linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim mamba_headdim index_head_dim
16 hidden_size n_embd d_model word_embed_proj_dim lru_width
16 moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
32 intermediate_size n_inner ffn_dim ffn_hidden_size shared_intermediate_size mamba_d_ssm
47 vocab_size vocab_size_per_layer_input
64 max_position_embeddings n_positions
"""
FAMILY_SIZES = {"use_mamba_kernels": False, "pad_token_id": 0, "eos_token_id": 5}
for line in SIZES_OF_FAMILIES.strip().splitlines():
    size, *names = line.split()
    FAMILY_SIZES |= dict.fromkeys(names, int(size))
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
    "Linear attention, state space or convolution, in addition to attention": {
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
CACHE, HEAD = "has no attribute 'past_key_values'", "its LM head is not supported"
REFUSED = {
    **dict.fromkeys("falcon_mamba mamba openai-gpt rwkv".split(), ({}, CACHE)),
    "mamba2": ({"num_heads": 4, "head_dim": 8, "expand": 2}, CACHE),
    "recurrent_gemma": ({"num_hidden_layers": 3, "logits_soft_cap": 5.0}, HEAD),
    "minimax": ({}, "The size of tensor a"),
    "xlstm": ({"embedding_dim": 16, "num_blocks": 2}, "The expanded size of the tensor"),
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
    sizes = {key: size for key, size in FAMILY_SIZES.items() if key in known}
    config = AutoConfig.for_model(name, **sizes | settings)
    for key, value in vars(config).items():
        if ("drop" in key or "jitter" in key) and isinstance(value, float):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data *= 6.0 if parameter.ndim > 1 else 1.0
    return model


def make_prompts():
    """Six prompts of lengths 1 to 9, the last two equal, padded on the left."""
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(6, 47, (length,), generator=generator).tolist() for length in (3, 9, 1, 5, 6)]
    return ppo_rlhf.pad_left([{"prompt_ids": ids} for ids in [*prompts, prompts[-1]]], "cpu")


@pytest.mark.parametrize("name", SETTINGS)
def test_training_forward_and_gradient_are_those_of_each_sequence_alone(name):
    model = build(name, SETTINGS[name])
    completion_mask = (torch.arange(8) < torch.tensor([[1], [4], [8], [3], [7], [2]])).long()
    completion_ids = torch.randint(47, completion_mask.shape, generator=torch.Generator().manual_seed(1))
    inputs = (*make_prompts(), completion_ids, completion_mask)
    logprobs, _ = ppo_rlhf.token_logprobs(model, *inputs, 1.0)
    expected = torch.zeros_like(logprobs)
    for row, (ids, mask, completion, length) in enumerate(zip(*inputs[:3], completion_mask.sum(1))):
        whole = torch.cat([ids[mask == 1], completion[:length]])
        distributions = model(whole.unsqueeze(0), use_cache=False).logits[0].log_softmax(-1)
        expected[row, :length] = distributions[-length - 1 : -1].gather(1, completion[:length, None]).squeeze(1)
    torch.testing.assert_close(logprobs, expected, atol=1e-3, rtol=0)
    gradients = []
    for result in (logprobs, expected):
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        parts = torch.autograd.grad(result.sum(), parameters, allow_unused=True, materialize_grads=True)
        assert sum(bool(part.any()) for part in parts) > 0.7 * len(parts)
        gradients.append(torch.cat([part.flatten() for part in parts]))
    assert gradients[1].isfinite().all()
    assert relative_error(*gradients) < 1e-3


def sample_and_train(model):
    """Samples' mask, and their log-probabilities as they were sampled and as they are trained."""
    prompts = make_prompts()
    torch.manual_seed(0)
    ids, mask, sampled = ppo_rlhf.generate(model, *prompts, 12, 1.0, STOP_IDS)
    return mask, sampled, ppo_rlhf.token_logprobs(model, *prompts, ids, mask, 1.0)[0]


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_padded_groups_that_finish_at_different_times_decode_as_they_are_trained(name):
    model = build(name, SETTINGS[name])
    dpo.check_model(model, SHORT)
    mask, sampled, logprobs = sample_and_train(model)
    assert len(mask.sum(1).unique()) > 1
    torch.testing.assert_close(sampled, logprobs, atol=1e-3, rtol=0)


def assert_saved(model, folder):
    """Whoever loads the checkpoint of this model has it, transformers itself and the scripts alike."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    checkpoint = save(model, tokenizer, folder)
    ids = torch.arange(6, 12).unsqueeze(0)
    expected = model(input_ids=ids, use_cache=False).logits
    for loaded in (AutoModelForCausalLM.from_pretrained(checkpoint), ppo_rlhf.load_model(checkpoint, tokenizer)):
        assert type(loaded) is type(model)
        assert torch.equal(loaded(input_ids=ids, use_cache=False).logits, expected)


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_a_checkpoint_is_the_model(name, tmp_path):
    model = build(name, SETTINGS[name])
    model.save_pretrained(tmp_path / "model")
    assert_saved(ppo_rlhf.load_model(tmp_path / "model", AutoTokenizer.from_pretrained(TINY)), tmp_path)


TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
TEXT |= {"num_key_value_heads": 1, "vocab_size": 47, "max_position_embeddings": 64, "pad_token_id": 0}
LINEAR_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
QWEN_VISION = {"depth": 1, "num_heads": 2, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 16}
QWEN_VISION |= {"patch_size": 4, "deepstack_visual_indexes": []}
GEMMA_VISION = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
GEMMA_VISION |= {"image_size": 16, "patch_size": 4}
READ_IMAGES = {
    "qwen3_5": (TEXT | LINEAR | LINEAR_HEADS | {"linear_value_head_dim": 8}, QWEN_VISION),
    "gemma3": (TEXT, GEMMA_VISION),
}


@pytest.mark.parametrize("name", READ_IMAGES)
@torch.no_grad()
def test_a_checkpoint_of_a_model_that_reads_images_loads_again(name, tmp_path, capsys):
    """Of Qwen3.5, transformers loads and saves the language model alone; Gemma 3 keeps its vision tower."""
    text, vision = READ_IMAGES[name]
    config = AutoConfig.for_model(name, text_config=text, vision_config=vision)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = ppo_rlhf.load_model(tmp_path / "model", tokenizer)
    said = "its language model, Qwen3_5ForCausalLM, is trained and saved" in capsys.readouterr().out
    assert said == (name == "qwen3_5")
    save(model, tokenizer, tmp_path)
    saved = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert ("vision_config" in saved) == ("text_config" in saved) == (name == "gemma3")
    assert_saved(model, tmp_path)


def test_a_model_that_only_reads_images_is_named_in_one_line(tmp_path):
    config = AutoConfig.for_model("qwen2_5_vl", text_config=TEXT, vision_config=QWEN_VISION)
    config.save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match=f"^{tmp_path} is no causal language model .*AutoModelForCausalLM") as caught:
        ppo_rlhf.load_model(tmp_path, AutoTokenizer.from_pretrained(TINY))
    assert "\n" not in str(caught.value)


WITHOUT_BLOCKS = {"biogpt", "ctrl"}  # they name none
# With adapters those that have frozen weights, latent attention, dtypes or states of their own.
ADAPTED = "afmoe deepseek_v3 falcon gemma3n_text nemotron_h qwen3_5_text".split()
WITH_BLOCKS = [(name, 0) for name in SETTINGS if name not in WITHOUT_BLOCKS]


@pytest.mark.parametrize("name, rank", [*WITH_BLOCKS, *((name, 2) for name in ADAPTED)])
def test_in_bfloat16_sampler_policy_and_reference_agree(name, rank):
    plain, trained, frozen = (build(name, SETTINGS[name]) for _ in range(3))
    for model in (plain, trained, frozen) if rank else ():
        ppo_rlhf.add_adapters(model, rank)
        for key, weight in model.named_parameters():
            weight.data += 0.02 * ("lora_b" in key)
    policy = prepare(trained, precision="bfloat16")
    ref = prepare(frozen.requires_grad_(False), precision="bfloat16")
    prompts = make_prompts()
    torch.manual_seed(0)
    with ppo_rlhf.gathered(policy) as sampler:
        *completions, sampled = ppo_rlhf.generate(sampler, *prompts, 8, 1.0, STOP_IDS)
    batch = dict(zip(INPUTS, [*prompts, *completions]))
    with torch.no_grad():
        assert torch.equal(policy(batch, 1.0)[0], ref(batch, 1.0)[0])
    logprobs, _ = policy(batch, 1.0)
    log_weights = (logprobs - sampled).detach().double()
    assert (log_weights.expm1() - log_weights).sum() < 1e-4 * completions[1].sum()  # at six times the usual weights
    exact, _ = ppo_rlhf.token_logprobs(plain, *batch.values(), 1.0)
    assert (logprobs - exact).abs().max() > 1e-3  # which is rounding
    logprobs.sum().backward()
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_others_are_refused(name):
    settings, reason = REFUSED[name]
    with pytest.raises((SystemExit, AttributeError, RuntimeError), match=re.escape(reason)):
        model = build(name, settings)
        dpo.check_model(model, SHORT)
        sample_and_train(model)


def test_the_page_is_current():
    page = models.PATH.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}." not in page:
        pytest.skip("written with another version of transformers")
    assert page == models.render(TRAINED, REFUSED)


# ---- the real model that models/smollm2/make.py writes

SMOLLM2 = ROOT / "models" / "smollm2"


@pytest.mark.skipif(not (SMOLLM2 / "model.safetensors").exists(), reason="models/smollm2/make.py was not run")
def test_a_real_model_answers_and_its_log_probabilities_are_those_of_its_samples():
    model, tokenizer = load(ppo_rlhf, SMOLLM2)
    stop_ids = model.generation_config.eos_token_id
    ids = ppo_rlhf.encode_prompt(tokenizer, ppo_rlhf.as_messages("What is the capital of France?", "user"), None)
    ppo_rlhf.check_model(model, make_args())
    prompt = ppo_rlhf.pad_left([{"prompt_ids": ids}], "cpu")
    completion_ids, mask, _ = ppo_rlhf.generate(model, *prompt, 16, 0.0, stop_ids)
    completion = completion_ids[0][mask[0].bool()].tolist()
    assert tokenizer.decode(completion, skip_special_tokens=True) == "The capital of France is Paris."
    assert completion[-1] in stop_ids
