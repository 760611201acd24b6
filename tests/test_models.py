"""Models from elsewhere: chat templates and their stop tokens, scalar heads, and folders with something wrong."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from tiny import (
    FORMS,
    ROOT,
    SIZES,
    TINY,
    adapters,
    build_model,
    cut,
    edit_json,
    load,
    load_scorer,
    make_args,
    make_batch,
    make_folder,
    make_tokenizer,
    pad_right,
    parse,
    remove,
    weights,
    write_jsonl,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import dpo
import grpo
import models
import ppo_rlhf
import reward_model
import sft

CPU = torch.device("cpu")
TINY_REWARD = ROOT / "models" / "tiny-reward"
# (special tokens, the tokenizer's end of text first and the end of a turn second; chat template), as published.


@pytest.fixture(params=FORMS)
def form(request, tmp_path):
    """(folder of a model, id of the end of text, id of the end of a turn)"""
    tokenizer = make_tokenizer(*FORMS[request.param])
    ids = tokenizer.convert_tokens_to_ids(FORMS[request.param][0][:2])
    return make_folder(tmp_path / "model", tokenizer), *ids


def save(model, tokenizer, folder):
    """The checkpoint of a run in this folder."""
    policy = grpo.LogprobModel(model)
    grpo.save(folder, policy, torch.optim.AdamW(policy.parameters()), tokenizer, 1)
    return folder / "checkpoint"


# ---- stop tokens


@pytest.mark.usefixtures("alone")
def test_what_ends_a_turn_is_sampled_trained_compared_and_saved(form, tmp_path):
    folder, end_of_text, end_of_turn = form
    model, tokenizer = load(grpo, folder)
    stop_ids = model.generation_config.eos_token_id
    assert grpo.find_turn_end(tokenizer) == end_of_turn and tokenizer.eos_token_id == end_of_text
    assert stop_ids == sorted([end_of_text, end_of_turn])
    # sft.py trains it and nothing after it.
    [example] = sft.read_chat({"prompt": "1+1=", "completion": "2"}, tokenizer, sft.Args())
    assert example["completion_ids"] == [*tokenizer.encode("2"), end_of_turn]
    # dpo.py and reward_model.py compare completions that end in it.
    rows = [{"prompt": f"{i}+1=", "chosen": "2", "rejected": "3"} for i in "123"]
    pairs = write_jsonl(tmp_path / "pairs.jsonl", rows)
    for script in (dpo, reward_model):
        loaded = script.load_pairs(script.Args(dataset=pairs, eval_prompts=1), tokenizer)
        assert loaded[0][0]["chosen_ids"] == [*tokenizer.encode("2"), end_of_turn]
    # Whoever loads the checkpoint stops there, too.
    checkpoint = save(model, tokenizer, tmp_path)
    assert AutoModelForCausalLM.from_pretrained(checkpoint).generation_config.eos_token_id == stop_ids
    assert AutoTokenizer.from_pretrained(checkpoint).eos_token_id == end_of_text


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}{{ eos_token }}{% endfor %}",
    ],
)
def test_without_an_end_of_a_turn_it_is_the_end_of_text(template):
    tokenizer = make_tokenizer(["<eos>", "<bos>"], template)
    assert grpo.find_turn_end(tokenizer) == tokenizer.eos_token_id


def test_blanks_before_the_end_of_a_turn_do_not_count():
    template = "{% for m in messages %}{{ m.content }}\n\n<end>\n{% endfor %}"
    tokenizer = make_tokenizer(["<eos>", "<end>", "\n"], template)
    assert tokenizer.convert_ids_to_tokens(grpo.find_turn_end(tokenizer)) == "<end>"


def test_one_stop_token_is_enough_and_pairs_without_any_are_refused(tmp_path):
    tokenizer = make_tokenizer(["<eos>", "<stop>"], "{% for m in messages %}{{ m.content }}{% endfor %}")
    make_folder(tmp_path, tokenizer)
    edit_json(tmp_path / "tokenizer_config.json", eos_token=None)
    edit_json(tmp_path / "config.json", eos_token_id=None)
    stop = tokenizer.convert_tokens_to_ids("<stop>")
    edit_json(tmp_path / "generation_config.json", eos_token_id=stop)
    model, tokenizer = load(grpo, tmp_path)
    assert model.generation_config.eos_token_id == [stop] and tokenizer.eos_token_id is None
    for script in (dpo, reward_model):
        with pytest.raises(ValueError, match="no stop token"):
            script.read_pair({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, tokenizer, script.Args())


@pytest.mark.parametrize("eos", ["<|end|>", [5, "5"]])
def test_stop_tokens_that_are_no_numbers_are_an_error(tmp_path, eos):
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises((TypeError, ValueError)):
        load(grpo, tmp_path / "model")


@pytest.mark.usefixtures("alone")
def test_fine_tuning_on_turns_without_stop_token_is_an_error_that_names_the_row(tmp_path):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    folder = make_folder(tmp_path / "model", make_tokenizer(["<eos>"], template))
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{i}+1=", "completion": "2"} for i in range(4)])
    args = sft.Args(model=folder, dataset=rows, eval_prompts=1, num_steps=1, minibatch_size=2)
    with pytest.raises(SystemExit, match="rows.jsonl, held-out row 0: .*the chat template writes no stop token after"):
        sft.main(args)


# ---- scalar heads


def test_a_trained_head_is_kept_whatever_the_architecture_is_called(tmp_path):
    shutil.copytree(TINY_REWARD, tmp_path / "model")
    expected = AutoModelForSequenceClassification.from_pretrained(TINY_REWARD).score.weight
    for architectures in (["MyRewardModel"], ["Qwen3ForCausalLM"], None):
        edit_json(tmp_path / "model" / "config.json", architectures=architectures)
        for new_head in (True, False):
            model, _ = load_scorer(reward_model, tmp_path / "model", new_head)
            assert torch.equal(model.score.weight, expected)


def test_a_language_model_gets_a_new_head_or_is_refused_whatever_its_architecture_is_called(tmp_path):
    shutil.copytree(TINY, tmp_path / "model")
    for architectures in (["Qwen3ForCausalLM"], ["Qwen3ForSequenceClassification"]):
        edit_json(tmp_path / "model" / "config.json", architectures=architectures)
        torch.manual_seed(0)
        model, _ = load_scorer(reward_model, tmp_path / "model")
        assert model.score.weight.std().item() == pytest.approx(97**-0.5, rel=0.3)
        with pytest.raises(SystemExit, match="not a complete reward model: score.weight is missing"):
            load_scorer(ppo_rlhf, tmp_path / "model", new_head=False)


# ---- folders with something wrong


def write_config(text):
    return lambda folder: (folder / "config.json").write_text(text)


def take_other_tokenizer(folder):
    make_tokenizer(["<eos>"], None).save_pretrained(folder)


NORM, UP, EMBEDDING = "model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
UNFIT = "model: the weights do not fit its config.json, or some are missing: "
FAULTS = {
    "tensor missing": (weights(UP, lambda _: None), f"{UNFIT}{UP}$|complete reward model: {UP} is missing$"),
    "embedding missing": (
        weights(EMBEDDING, lambda _: None),
        f"{UNFIT}lm_head.weight$|embed_tokens.weight is missing$",
    ),
    "wrong size": (weights(NORM, lambda _: torch.ones(95)), f"{UNFIT}.*{NORM}.*95.*96|mismatch"),
    "nan": (weights(NORM, lambda value: value.fill_(torch.nan)), "nan"),
    "inf": (weights(UP, lambda value: value.index_fill(0, torch.tensor(3), torch.inf)), "nan"),
    "half a file": (cut("model.safetensors", 100_000), None),
    "no weights": (remove("model.safetensors"), "no file named model.safetensors"),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), None),
    "broken config": (write_config('{"model_type": "qwen3",'), "config.json"),
    "config of another kind": (write_config("[]"), None),
    "other tokenizer": (take_other_tokenizer, "index out of range|no stop token"),
}


@pytest.mark.parametrize("script", [grpo, reward_model])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("alone")
def test_a_folder_with_something_wrong_is_not_trained(script, fault, tmp_path):
    break_it, message = FAULTS[fault]
    shutil.copytree(TINY, tmp_path / "model")
    break_it(tmp_path / "model")
    row = {"answer": "2", "chosen": "2", "rejected": "3"}
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{i}+1=", **row} for i in range(6)])
    settings = {"model": str(tmp_path / "model"), "dataset": rows, "run_dir": str(tmp_path / "run")}
    settings |= {"num_steps": 1, "eval_prompts": 2, "max_completion_length": 16}
    with pytest.raises((Exception, SystemExit), match=message):
        script.main(parse(script, **settings))
    assert not (tmp_path / "run").exists()


def make_quantized(folder):
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})


OTHER_KINDS = {adapters: "model is a LoRA adapter: merge it into its model", make_quantized: "model is quantized: "}


@pytest.mark.parametrize("script", [grpo, sft, dpo, ppo_rlhf, reward_model])
@pytest.mark.parametrize("change", OTHER_KINDS)
def test_adapters_and_quantized_checkpoints_are_refused_with_what_to_do(script, change, tmp_path):
    change(shutil.copytree(TINY, tmp_path / "model"))
    with pytest.raises(SystemExit, match=OTHER_KINDS[change]):
        parse(script, model=tmp_path / "model")
    if script is not reward_model:
        with pytest.raises(SystemExit, match=OTHER_KINDS[change]):
            load(script, tmp_path / "model")


def test_what_is_no_language_model_of_texts_alone_is_refused(tmp_path):
    shutil.copytree(TINY, tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", model_type="t5", architectures=["T5ForConditionalGeneration"])
    with pytest.raises(SystemExit, match="model, a T5ForConditionalGeneration, is no causal language model: "):
        load(grpo, tmp_path / "model")


def test_a_model_that_is_saved_as_another_than_it_was_is_told(tmp_path, capsys):
    shutil.copytree(TINY, tmp_path / "model")
    load(grpo, tmp_path / "model")
    assert "is trained and saved" not in capsys.readouterr().out
    edit_json(tmp_path / "model" / "config.json", architectures=["Qwen3VLForConditionalGeneration"])
    load(grpo, tmp_path / "model")
    told = "model is a Qwen3VLForConditionalGeneration: only its Qwen3ForCausalLM is trained and saved, without vision"
    assert told in capsys.readouterr().out


def test_a_further_token_that_text_never_needs_is_no_fault(tmp_path):
    """Gemma 3's tokenizer has one for images, which its model of 1 B parameters has no embedding for."""
    shutil.copytree(TINY, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    tokenizer.save_pretrained(tmp_path / "model")
    assert len(load(grpo, tmp_path / "model")[1]) == 30


@pytest.mark.parametrize("script", [grpo, reward_model])
@pytest.mark.usefixtures("alone")
def test_the_folder_of_a_run_is_not_its_checkpoint(script, tmp_path):
    shutil.copytree(TINY, tmp_path / "run" / "checkpoint")
    with pytest.raises(ValueError, match="tokenizer"):
        script.main(parse(script, model=tmp_path / "run"))


# ---- models that these scripts cannot train


def break_cache(_, patch):
    patch(transformers.DynamicCache, "reorder_cache", lambda *_: None)


def mix_rows(model, _):
    model.model.layers[0].register_forward_hook(lambda _, __, output: output + 0.1 * output.mean(0))


def scale_logits(model, patch):
    """As some models do, by a setting of another name."""

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.1
        return output

    forward = model.forward
    patch(model, "forward", scaled)


@pytest.mark.parametrize("fault", [break_cache, mix_rows, scale_logits])
def test_a_model_whose_cache_or_head_is_not_as_expected_is_refused(fault, monkeypatch):
    model = build_model("llama", dtype=torch.float32)
    grpo.check_model(model, [3, 4, 5, 6], make_args())
    fault(model, monkeypatch.setattr)
    with pytest.raises((SystemExit, RuntimeError)):
        grpo.check_model(model, [3, 4, 5, 6], make_args())


@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
@pytest.mark.usefixtures("alone")
def test_dropout_and_the_jitter_of_a_router_are_off_while_it_trains(kind, tmp_path):
    dropped = {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5} if kind == "gpt2" else {}
    sizes = {**SIZES, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2} if kind == "gpt2" else sizes | {"router_jitter_noise": 0.5}
    ids = {"vocab_size": 29, "pad_token_id": 0, "eos_token_id": 5, "bos_token_id": None}
    config = transformers.AutoConfig.for_model(kind, **sizes, **dropped, **ids)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    model, _ = load(grpo, tmp_path)
    batch = make_batch(model)
    policy = grpo.shard(grpo.LogprobModel(model), make_args(precision="float32", gradient_checkpointing=True), CPU)
    first, second = (policy(batch, 1.0)[0] for _ in range(2))
    assert first.requires_grad and torch.equal(first, second)


# ---- prompts, completions, and what is saved


def test_special_tokens_of_a_completion_are_seen_but_for_those_that_end_or_fill_it(monkeypatch):
    """Thoughts between special tokens, as QwQ's, are to be told from the answer."""
    tokenizer = make_tokenizer(["<eos>", "<stop>", "<bos>", "<think>", "</think>"], None)
    tokenizer.bos_token = "<bos>"
    said = [r"<think>\boxed{5}</think>\boxed{6}<eos>", "<bos><think>7<pad>8<stop>"]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in said]
    ids, mask = pad_right(rows, 30)
    stop_ids = tokenizer.convert_tokens_to_ids(["<eos>", "<stop>"])
    monkeypatch.setattr(grpo, "generate", lambda *_: (ids, mask, mask.float()))
    config = SimpleNamespace(eos_token_id=stop_ids)
    policy = SimpleNamespace(model=SimpleNamespace(device="cpu", generation_config=config), modules=list)
    prompt = {"prompt_ids": tokenizer("1+1=")["input_ids"]}
    _, texts = grpo.sample_completions(policy, tokenizer, [prompt] * 2, 1.0, grpo.Args())
    assert texts == [r"<think>\boxed{5}</think>\boxed{6}", "<think>78"]
    assert [grpo.is_right(text, "6") for text in texts] == [True, False]


def test_a_bare_prompt_does_not_end_in_the_stop_token_that_the_tokenizer_appends():
    tokenizer = make_tokenizer(["<eos>", "<bos>"], None)
    bos, eos = (tokenizer.convert_tokens_to_ids(token) for token in ("<bos>", "<eos>"))
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", bos), ("<eos>", eos)]
    )
    bare = tokenizer.encode("1+1=", add_special_tokens=False)
    assert tokenizer.encode("1+1=") == [bos, *bare, eos]
    messages = grpo.as_messages("1+1=", "")
    assert grpo.encode_prompt(tokenizer, messages) == [bos, *bare]
    completion_ids = [*tokenizer.encode("2", add_special_tokens=False), eos]
    assert sft.encode_completion(tokenizer, messages, "2") == ([bos, *bare], completion_ids)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.usefixtures("alone")
def test_tied_weights_are_saved_once_also_where_they_are_gathered_from_ranks(tmp_path, monkeypatch, tied):
    folder = make_folder(tmp_path / "model", make_tokenizer(["<eos>"], None), tie_word_embeddings=tied)
    model, tokenizer = load(grpo, folder)
    get_state = grpo.dcp_state.get_model_state_dict
    gathered = lambda *args, **kwargs: {key: value.clone() for key, value in get_state(*args, **kwargs).items()}  # noqa: E731
    monkeypatch.setattr(grpo.dcp_state, "get_model_state_dict", gathered)
    checkpoint = save(model, tokenizer, tmp_path)
    saved, expected = load_file(checkpoint / "model.safetensors"), load_file(f"{folder}/model.safetensors")
    assert saved.keys() == expected.keys() and ("lm_head.weight" in saved) != tied
    again, _ = load(grpo, checkpoint)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.6, "top_p": 0.9},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
        {"early_stopping": True, "max_length": 20, "max_new_tokens": 40, "pad_token_id": -1, "use_cache": False},
    ],
)
@pytest.mark.usefixtures("alone")
def test_a_generation_config_that_could_not_be_saved_anew_is_no_fault(given, tmp_path):
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7], **given}))
    model, tokenizer = load(grpo, tmp_path / "model")
    checkpoint = save(model, tokenizer, tmp_path)
    saved = json.loads((checkpoint / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [5, 7] and not {*given} & {*saved}
    assert load(grpo, checkpoint)[0].generation_config.eos_token_id == [5, 7]


@pytest.mark.parametrize("kind", ["language model", "reward model"])
def test_a_pad_token_that_is_in_use_is_trained(kind, tmp_path):
    """As SmolLM2's, which ends every turn: nn.Embedding gives the row of its padding_idx no gradient."""
    source = shutil.copytree(TINY if kind == "language model" else TINY_REWARD, tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    ids = torch.tensor([[3, 4, 5, 6]])
    gradients = []
    for pad_id in (None, 4):
        edit_json(source / "config.json", pad_token_id=pad_id, tie_word_embeddings=config["tie_word_embeddings"])
        if kind == "language model":
            model, _ = load(grpo, source)
        else:
            model, _ = load_scorer(reward_model, source)
        model.base_model(input_ids=ids, use_cache=False).last_hidden_state.square().sum().backward()
        gradients.append(model.get_input_embeddings().weight.grad)
    assert gradients[0][4].norm() > 0 and torch.equal(*gradients)


# ==== which architectures of transformers train


PAD, VOCABULARY, STOP_IDS = 0, 47, [5, 7, 9, 11, 13, 15, 17, 19, 21]
SHORT = make_args(max_prompt_length=48, max_completion_length=16)
# Each config is given those of these that it knows.
FAMILY_SIZES = {
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
    config = AutoConfig.for_model(name, **{key: FAMILY_SIZES[key] for key in FAMILY_SIZES if key in known} | settings)
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
