"""Models from elsewhere: chat templates and their stop tokens, scalar heads, and folders with something wrong."""

import json
import re
import shutil
from pathlib import Path

import jinja2
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import CONFIGS, SIZES, load, load_scorer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import dpo
import grpo
import ppo_rlhf
import reward_model
import sft

CPU = torch.device("cpu")
TINY = Path(grpo.HERE) / "models" / "tiny"
TINY_REWARD = Path(grpo.HERE) / "models" / "tiny-reward"
# (special tokens, the tokenizer's end of text first and the end of a turn second; chat template), as published.
FORMS = {
    "chatml": (
        ["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ),
    "llama 3": (
        ["<|end_of_text|>", "<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ),
    "gemma": (
        ["<eos>", "<end_of_turn>", "<bos>", "<start_of_turn>", "\n"],
        "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    ),
    "phi 3": (
        ["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"],
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    ),
}


def make_tokenizer(special, template):
    """A tokenizer of single characters and of these special tokens, the first of which is its end of text."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"] * ("\n" not in special)
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<unk>", *special, *characters])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token=special[0],
        additional_special_tokens=special[1:],
    )
    tokenizer.chat_template = template
    return tokenizer


def make_folder(folder, tokenizer, **settings):
    """A folder with a random Llama whose only stop token is the tokenizer's end of text, and that tokenizer."""
    torch.manual_seed(0)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=len(tokenizer), **ids, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(params=FORMS)
def form(request, tmp_path):
    """(folder of a model, id of the end of text, id of the end of a turn)"""
    tokenizer = make_tokenizer(*FORMS[request.param])
    ids = tokenizer.convert_tokens_to_ids(FORMS[request.param][0][:2])
    return make_folder(tmp_path / "model", tokenizer), *ids


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ---- stop tokens


def test_what_ends_a_turn_is_sampled_trained_compared_and_saved(form, tmp_path):
    folder, end_of_text, end_of_turn = form
    model, tokenizer = load(grpo, folder)
    stop_ids = grpo.find_stop_ids(model, tokenizer)
    assert grpo.find_turn_end(tokenizer) == end_of_turn and tokenizer.eos_token_id == end_of_text
    assert stop_ids == sorted([end_of_text, end_of_turn])
    # sft.py trains it and nothing after it.
    ids, trained = sft.encode_row(tokenizer, {"prompt": "1+1=", "completion": "2"}, "", stop_ids)
    assert [token for token, is_trained in zip(ids, trained) if is_trained] == [*tokenizer.encode("2"), end_of_turn]
    # dpo.py and reward_model.py compare completions that end in it.
    pairs = write_rows(tmp_path / "pairs.jsonl", [{"prompt": f"{i}+1=", "chosen": "2", "rejected": "3"} for i in "123"])
    for script in (dpo, reward_model):
        loaded = script.load_pairs(pairs, tokenizer, "", 64, 8, 1, script.find_turn_end(tokenizer))
        assert loaded[0][0]["chosen_ids"] == [*tokenizer.encode("2"), end_of_turn]
    # Whoever loads the checkpoint stops there, too.
    grpo.save_checkpoint(tmp_path, grpo.LogprobModel(model), tokenizer)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    assert saved.generation_config.eos_token_id == stop_ids
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint").eos_token_id == end_of_text


def test_a_reward_model_stops_where_the_policy_does(form):
    folder, end_of_text, end_of_turn = form
    model, tokenizer = load_scorer(reward_model, folder)
    assert reward_model.find_stop_ids(model, tokenizer) == sorted([end_of_text, end_of_turn])
    assert tokenizer.pad_token == "<pad>"


@pytest.mark.parametrize("script", [dpo, reward_model])
def test_preference_scripts_train_the_end_of_a_turn(script, tmp_path, monkeypatch):
    special, template = FORMS["chatml"]
    tokenizer = make_tokenizer(special, template)
    folder = make_folder(tmp_path / "model", tokenizer)
    pairs = write_rows(tmp_path / "p.jsonl", [{"prompt": f"{i}+1=", "chosen": "2", "rejected": "3"} for i in range(6)])
    seen = []
    collate_pairs = script.collate_pairs
    monkeypatch.setattr(script, "collate_pairs", lambda pairs, *rest: seen.extend(pairs) or collate_pairs(pairs, *rest))
    sizes = {"num_steps": 1, "minibatch_size": 2, "eval_prompts": 2, "max_prompt_length": 64}
    script.main(script.Args(model=folder, dataset=pairs, run_dir=str(tmp_path / "run"), **sizes))
    ends = {pair[key][-1] for pair in seen for key in ("chosen_ids", "rejected_ids")}
    assert ends == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ raise_exception('not this') }}",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}{{ eos_token }}{% endfor %}",
    ],
)
def test_without_an_end_of_a_turn_it_is_the_end_of_text(template):
    tokenizer = make_tokenizer(["<eos>", "<bos>"], template)
    assert grpo.find_turn_end(tokenizer) == tokenizer.eos_token_id


def test_blanks_before_the_end_of_a_turn_do_not_count():
    tokenizer = make_tokenizer(
        ["<eos>", "<end>", "\n"], "{% for m in messages %}{{ m.content }}\n\n<end>\n{% endfor %}"
    )
    assert tokenizer.convert_ids_to_tokens(grpo.find_turn_end(tokenizer)) == "<end>"


def test_a_tokenizer_that_ends_nothing_is_refused(tmp_path):
    tokenizer = make_tokenizer(["<eos>", "<stop>"], None)
    make_folder(tmp_path, tokenizer)
    edit_json(tmp_path / "tokenizer_config.json", eos_token=None)
    edit_json(tmp_path / "generation_config.json", eos_token_id=tokenizer.convert_tokens_to_ids("<stop>"))
    edit_json(tmp_path / "config.json", eos_token_id=None)
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token is None
    with pytest.raises(SystemExit, match="nothing ends a completion: name an eos_token in tokenizer_config.json"):
        grpo.load_tokenizer(str(tmp_path))


def test_fine_tuning_on_turns_without_stop_token_is_an_error_that_names_the_row(tmp_path):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    folder = make_folder(tmp_path / "model", make_tokenizer(["<eos>"], template))
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "completion": "2"}] * 4)
    with pytest.raises(SystemExit, match="row 1: the chat template writes no stop token after message 2"):
        sft.main(
            sft.Args(
                model=folder, dataset=rows, eval_prompts=1, num_steps=1, minibatch_size=2, run_dir=str(tmp_path / "run")
            )
        )


# ---- scalar heads


def edit_json(path, **changes):
    """Change the entries of a json file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


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
        with pytest.raises(SystemExit, match="--reward-model .*model: a language model that gives no scores"):
            load_scorer(ppo_rlhf, tmp_path / "model", new_head=False)


def test_ppo_refuses_a_reward_model_whose_head_is_not_in_its_folder(tmp_path):
    shutil.copytree(TINY_REWARD, tmp_path / "model")
    change_weights(lambda state: state.pop("score.weight"))(tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i}+1=", "answer": "2"} for i in range(6)])
    sizes, run_dir = {"eval_prompts": 2}, str(tmp_path / "run")
    with pytest.raises(SystemExit, match="gives no scores; python reward_model.py --model"):
        ppo_rlhf.main(ppo_rlhf.Args(reward_model=str(tmp_path / "model"), dataset=data, **sizes, run_dir=run_dir))
    assert not (tmp_path / "run").exists()


# ---- folders with something wrong


def change_weights(change):
    """A function of a folder that applies change to the dict of its weights."""

    def edit(folder):
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def cut_off(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def write_config(text):
    return lambda folder: (folder / "config.json").write_text(text)


def take_other_tokenizer(folder):
    make_tokenizer(["<eos>"], None).save_pretrained(folder)


def add_token_to_template(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.chat_template = tokenizer.chat_template + "<|turn|>"
    tokenizer.save_pretrained(folder)


NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
FAULTS = {
    "tensor missing": (change_weights(lambda state: state.pop(UP)), f"it lacks {UP}"),
    "embedding missing": (
        change_weights(lambda state: state.pop("model.embed_tokens.weight")),
        "it lacks (lm_head|model.embed_tokens).weight",
    ),
    "wrong size": (
        change_weights(lambda state: state.update({NORM: torch.ones(95)})),
        rf"{NORM} has the size \[95\], where config.json asks for \[96\]",
    ),
    "nan": (change_weights(lambda state: state[NORM].fill_(torch.nan)), f"{NORM} is not finite"),
    "inf": (change_weights(lambda state: state[UP][3].fill_(torch.inf)), f"{UP} is not finite"),
    "half a file": (cut_off, "cannot be loaded"),
    "no weights": (remove("model.safetensors"), "cannot be loaded: .*no file named model.safetensors"),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), "the folder lacks tokenizer.json"),
    "no tokenizer.json": (remove("tokenizer.json"), "cannot be loaded"),
    "broken config": (write_config('{"model_type": "qwen3",'), "cannot be loaded: .*config.json"),
    "config of another kind": (write_config("[]"), "cannot be loaded"),
    "other tokenizer": (take_other_tokenizer, "it gives .* the id .*, and the model has 29 embeddings"),
    "token without embedding": (add_token_to_template, r"it gives '<\|turn\|>' the id 29"),
}


@pytest.mark.parametrize("script", [grpo, reward_model])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_with_something_wrong_is_one_line(script, fault, tmp_path):
    break_it, message = FAULTS[fault]
    shutil.copytree(TINY, tmp_path / "model")
    break_it(tmp_path / "model")
    row = {"answer": "2", "chosen": "2", "rejected": "3"}
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i}+1=", **row} for i in range(6)])
    settings = {"model": str(tmp_path / "model"), "dataset": rows, "run_dir": str(tmp_path / "run")}
    with pytest.raises(SystemExit, match=message) as error:
        script.main(script.Args(num_steps=1, eval_prompts=2, **settings))
    assert str(error.value).startswith(f"--model {tmp_path / 'model'}: ") and "\n" not in str(error.value)
    assert len(str(error.value)) < 500 and not (tmp_path / "run").exists()


def test_a_further_token_that_text_never_needs_is_no_fault(tmp_path):
    """Gemma 3's tokenizer has one for images, which its model of 1 B parameters has no embedding for."""
    shutil.copytree(TINY, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    tokenizer.save_pretrained(tmp_path / "model")
    assert len(load(grpo, tmp_path / "model")[1]) == 30


@pytest.mark.parametrize("script", [grpo, reward_model])
def test_the_folder_of_a_run_is_not_its_checkpoint(script, tmp_path):
    shutil.copytree(TINY, tmp_path / "run" / "checkpoint")
    with pytest.raises(SystemExit, match="--model .*run: the folder of a run; did you mean .*run/checkpoint"):
        script.main(
            script.Args(model=str(tmp_path / "run"), num_steps=1, eval_prompts=2, run_dir=str(tmp_path / "other"))
        )


# ---- prompts


def test_a_system_prompt_that_the_template_refuses_opens_the_first_turn():
    tokenizer = make_tokenizer(*FORMS["gemma"])
    user, told = {"role": "user", "content": "1+1="}, {"role": "user", "content": "Add.\n\n1+1="}
    system, assistant = {"role": "system", "content": "Add."}, {"role": "assistant", "content": "2"}
    expected = grpo.encode_prompt(tokenizer, [told], "")
    assert (
        expected == grpo.encode_prompt(tokenizer, "1+1=", "Add.") == grpo.encode_prompt(tokenizer, [system, user], "")
    )
    later = [system, user, assistant, user]
    assert grpo.encode_prompt(tokenizer, later, "") == grpo.encode_prompt(tokenizer, [told, assistant, user], "")
    stop_ids = tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"])
    rows = {"messages": [system, user, assistant]}, {"prompt": told["content"], "completion": "2"}
    assert len({repr(sft.encode_row(tokenizer, row, "", stop_ids)) for row in rows}) == 1
    assert (
        sft.encode_row(tokenizer, {"prompt": "1+1=", "completion": "2"}, "Add.", stop_ids)[0][: len(expected)]
        == expected
    )


def test_a_template_that_takes_a_system_message_gets_it():
    tokenizer = make_tokenizer(*FORMS["chatml"])
    text = tokenizer.decode(grpo.encode_prompt(tokenizer, "1+1=", "Add."))
    assert text.startswith("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>")


@pytest.mark.parametrize("messages", [["user", "user"], ["system", "user", "user"], ["system", "assistant"]])
def test_what_the_template_refuses_with_reason_stays_refused(messages):
    tokenizer = make_tokenizer(*FORMS["gemma"])
    with pytest.raises(jinja2.TemplateError, match="must alternate|not supported"):
        grpo.encode_prompt(tokenizer, [{"role": role, "content": "1"} for role in messages], "")


def test_a_bare_prompt_does_not_end_in_the_stop_token_that_the_tokenizer_appends():
    tokenizer = make_tokenizer(["<eos>", "<bos>"], None)
    bos, eos = (tokenizer.convert_tokens_to_ids(token) for token in ("<bos>", "<eos>"))
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A <eos> <eos>", special_tokens=[("<bos>", bos), ("<eos>", eos)]
    )
    bare = tokenizer.encode("1+1=", add_special_tokens=False)
    assert tokenizer.encode("1+1=") == [bos, *bare, eos, eos]
    assert grpo.encode_prompt(tokenizer, "1+1=", "") == [bos, *bare]
    ids, trained = sft.encode_row(tokenizer, {"prompt": "1+1=", "completion": "2"}, "", [eos])
    assert ids == [bos, *bare, *tokenizer.encode("2", add_special_tokens=False), eos] and sum(trained) == 2


# ---- the model that samples, and what is saved


def test_tied_weights_are_saved_once_where_they_are_gathered_from_ranks(tmp_path, monkeypatch):
    model, tokenizer = load(grpo, TINY)
    get_state = grpo.dcp_state.get_model_state_dict
    gathered = lambda *args, **kwargs: {key: value.clone() for key, value in get_state(*args, **kwargs).items()}  # noqa: E731
    monkeypatch.setattr(grpo.dcp_state, "get_model_state_dict", gathered)
    grpo.save_checkpoint(tmp_path, grpo.LogprobModel(model), tokenizer)
    saved = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert saved.keys() == load_file(TINY / "model.safetensors").keys() and "lm_head.weight" not in saved
    again, _ = load(grpo, tmp_path / "checkpoint")
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())


def test_weights_that_are_not_tied_are_all_saved(tmp_path):
    folder = make_folder(tmp_path / "model", make_tokenizer(["<eos>"], None), tie_word_embeddings=False)
    model, tokenizer = load(grpo, folder)
    grpo.save_checkpoint(tmp_path, grpo.LogprobModel(model), tokenizer)
    saved = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert torch.equal(saved["lm_head.weight"], model.lm_head.weight) and len(saved) == len(model.state_dict())


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.6, "top_p": 0.9},
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
        {"early_stopping": True, "length_penalty": 0.5, "use_cache": False},
        {"max_length": 20, "max_new_tokens": 40, "pad_token_id": -1},
    ],
)
def test_a_generation_config_is_kept_that_could_not_be_saved_anew(given, tmp_path):
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, **given}))
    model, tokenizer = load(grpo, tmp_path / "model")
    grpo.save_checkpoint(tmp_path, grpo.LogprobModel(model), tokenizer)
    saved = json.loads((tmp_path / "checkpoint" / "generation_config.json").read_text())
    assert {key: saved.get(key) for key in given} == given
    load(grpo, tmp_path / "checkpoint")


# ---- models that these scripts cannot train


class Jittery(transformers.LlamaForCausalLM):
    """Random in training, as some routers are, though no setting of its config says so."""

    def get_output_embeddings(self):
        head = super().get_output_embeddings()
        head.register_forward_hook(lambda _, __, output: output * (1 + self.training * torch.rand(1)))
        return head


def test_a_model_that_is_random_in_training_is_refused():
    model = Jittery(CONFIGS["llama"])
    with pytest.raises(SystemExit, match="random in training"):
        grpo.check_model(model, [3, 4, 5, 6], 16)
    assert not model.training


def make_mixture(kind, **settings):
    sizes = {**SIZES, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 29}
    return AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes, **settings))


def test_the_jitter_of_a_router_is_turned_off(tmp_path):
    torch.manual_seed(0)
    model = make_mixture("mixtral", router_jitter_noise=0.5, pad_token_id=0, eos_token_id=5, bos_token_id=None)
    with pytest.raises(SystemExit, match="random in training"):
        grpo.check_model(model, [3, 4, 5, 6], 16)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    grpo.check_model(load(grpo, tmp_path)[0], [3, 4, 5, 6], 16)


def test_a_cache_that_cannot_drop_rows_is_one_line_and_no_matter_where_nothing_is_generated(monkeypatch):
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    monkeypatch.setattr(transformers.DynamicCache, "reorder_cache", lambda *_: None)
    with pytest.raises(SystemExit, match="key-value cache") as error:
        grpo.check_model(model, [3, 4, 5, 6], 16)
    assert "\n" not in str(error.value)
    grpo.check_model(model, [3, 4, 5, 6], 16, generates=False)


def test_a_model_without_hidden_states_of_its_own_is_one_line():
    config = transformers.AutoConfig.for_model("llama4_text", **SIZES, num_key_value_heads=1, vocab_size=29, head_dim=8)
    config.update({"intermediate_size_mlp": 32, "num_local_experts": 2, "pad_token_id": 0})
    with pytest.raises(SystemExit, match="Llama4ForCausalLM is not built as these scripts expect") as error:
        grpo.check_model(AutoModelForCausalLM.from_config(config), [3, 4, 5, 6], 16)
    assert "\n" not in str(error.value)


def test_fine_tuning_and_dpo_without_prompts_need_no_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.DynamicCache, "reorder_cache", lambda *_: None)
    torch.manual_seed(0)
    config = transformers.MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=1, vocab_size=29, eos_token_id=5)
    config.pad_token_id = config.bos_token_id = 0
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i}+1=", "completion": "2"} for i in range(6)])
    pairs = write_rows(tmp_path / "p.jsonl", [{"prompt": f"{i}+1=", "chosen": "2", "rejected": "3"} for i in range(6)])
    sizes = {"model": str(tmp_path / "model"), "num_steps": 1, "minibatch_size": 2, "eval_prompts": 2}
    sft.main(sft.Args(dataset=rows, run_dir=str(tmp_path / "sft"), **sizes))
    dpo.main(dpo.Args(dataset=pairs, eval_dataset="", run_dir=str(tmp_path / "dpo"), **sizes))
    questions = write_rows(tmp_path / "q.jsonl", [{"prompt": f"{i}+1=", "answer": "2"} for i in range(6)])
    with pytest.raises(SystemExit, match="key-value cache"):
        dpo.main(dpo.Args(dataset=pairs, eval_dataset=questions, run_dir=str(tmp_path / "other"), **sizes))


def test_weights_that_the_config_does_not_ask_for_are_told(tmp_path, capsys):
    shutil.copytree(TINY, tmp_path / "model")
    layer_types = json.loads((TINY / "config.json").read_text())["layer_types"][:2]
    edit_json(tmp_path / "model" / "config.json", num_hidden_layers=2, layer_types=layer_types)
    load(grpo, tmp_path / "model")
    assert re.search("warning: --model .*: 22 tensors are not used, such as model.layers.2", capsys.readouterr().out)
    load(grpo, TINY)
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize("eos", ["5", "<|end|>", [5, None], [5, "5"]])
def test_stop_tokens_that_are_no_numbers_are_one_line(tmp_path, eos):
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(SystemExit, match="--model .*: (eos_token_id in generation_config.json|cannot be loaded)"):
        load(grpo, tmp_path / "model")
