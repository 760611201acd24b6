"""Models from elsewhere: chat templates and their stop tokens, scalar heads, and folders with something wrong."""

import json
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
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import dpo
import grpo
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
