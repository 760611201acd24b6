"""SFT: which tokens are trained, and that nothing else is: python -m pytest tests/test_sft.py"""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from helpers import train
from tiny import (
    ROOT,
    TINY,
    add_pairs,
    assistant,
    load,
    make_main_args,
    make_tokenizer,
    parse,
    read_jsonl,
    user,
    write_jsonl,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import dpo
import ppo_rlhf
import reward_model
import sft

pytestmark = pytest.mark.usefixtures("alone")
ROW = {"prompt": "1+2=", "completion": "3"}
CHATML = "{% for m in messages %}{{ m.role }}|{{ m.content }}<|turn|>{% endfor %}"
CHATML += "{% if add_generation_prompt %}assistant|{% endif %}"
OF_ROW = [("<|user|>1+2=<|assistant|>", "3<|end|>")]
CHAT = [user("1+1="), assistant("2"), user("2+2="), assistant("4")]
FIRST, SECOND = "<|user|>1+1=<|assistant|>", "2<|end|><|user|>2+2=<|assistant|>"
OF_CHAT = [(FIRST, "2<|end|>"), (FIRST + SECOND, "4<|end|>")]


def encode(tokenizer, row):
    """The examples of a row."""
    found = sft.read_chat(row, tokenizer, sft.Args())
    assert [reason for _, reason in found] == [""] * len(found)
    return [example for example, _ in found]


def texts_of(tokenizer, row):
    """What precedes each trained part of a row, and the part itself."""
    texts = []
    for example in encode(tokenizer, row):
        texts.append((tokenizer.decode(example["prompt_ids"]), tokenizer.decode(example["completion_ids"])))
    return texts


# ---- which tokens


@pytest.mark.parametrize(
    "row, expected",
    [
        (ROW, OF_ROW),
        ({"question": "1+2=", "problem": "9", "solution": 3, "answer": "9"}, OF_ROW),  # LIMO's columns
        ({"prompt": "1+2=", "completion": [assistant("3")]}, OF_ROW),
        ({"prompt": CHAT[:3], "completion": "4"}, OF_CHAT),
        ({"messages": CHAT}, OF_CHAT),
        (ROW | {"system": "9"}, [("<|system|>9<|user|>1+2=<|assistant|>", "3<|end|>")]),
    ],
)
def test_each_turn_of_the_assistant_is_trained_with_its_stop_token(tokenizer, row, expected):
    assert texts_of(tokenizer, row) == expected


def test_what_a_template_writes_after_the_stop_token_is_not_trained(tokenizer):
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "<|end|>. ")
    assert texts_of(tokenizer, ROW) == OF_ROW


@pytest.mark.parametrize("template", [None, CHATML])
def test_a_text_that_has_the_end_of_text_is_trained_up_to_it(template):
    tokenizer = make_tokenizer(["<|end|>", "<|turn|>"], template)
    for text in ("2<|end|>", "2<|end|>3"):
        [(example, _)] = sft.read_chat({"prompt": "1+1=", "completion": text}, tokenizer, sft.Args())
        assert tokenizer.decode(example["completion_ids"]) == "2<|end|>"


def test_turns_are_trained_after_what_a_template_makes_of_the_turns_before(tokenizer):
    """Qwen3's leaves out the thoughts of earlier turns."""
    tokenizer.chat_template = "{% if messages|length > 2 %}+{% endif %}" + tokenizer.chat_template
    assert texts_of(tokenizer, {"messages": CHAT}) == [OF_CHAT[0], ("+" + FIRST + SECOND, "4<|end|>")]


def test_a_tokenizer_that_writes_a_blank_before_a_text_trains_the_tokens_of_the_whole_chat():
    """SentencePiece writes one; dpo.py trains the same tokens."""
    words = ["<unk>", "<end>", "\u2581", "1", "2", "3", "\u25813"]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [("\u2581", "3")], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<end>")
    turn = "{{ m.content }}{% if m.role == 'assistant' %}<end>{% endif %}"
    tokenizer.chat_template = f"{{% for m in messages %}}{turn}{{% endfor %}}"
    [row] = encode(tokenizer, {"prompt": "12", "completion": "3"})
    pair, _ = dpo.read_pair({"prompt": "12", "chosen": "3", "rejected": "2"}, tokenizer, dpo.Args(system_prompt=""))
    assert row == {"prompt_ids": pair["prompt_ids"], "completion_ids": pair["chosen_ids"]}
    assert tokenizer.convert_ids_to_tokens(row["completion_ids"]) == ["3", "<end>"]


NO_COMPLETION, NO_USER = "without a prompt and a completion", "that begin with the assistant"


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"messages": [user("1+1=")]}, NO_COMPLETION),
        (ROW | {"completion": ""}, NO_COMPLETION),
        ({"messages": [user("1+1="), assistant("")]}, "with an empty completion"),
        ({"prompt": "1", "ground_truth": "2"}, NO_COMPLETION),
        ({"messages": [assistant("2"), user("1+1="), assistant("2")]}, NO_USER),
        ({"messages": []}, NO_COMPLETION),
        (ROW | {"prompt": None}, NO_COMPLETION),
        (ROW | {"prompt": "1+" * 600}, "with a prompt longer than --max-prompt-length"),
        (ROW | {"completion": "1+" * 600}, "with a completion longer than --max-completion-length"),
    ],
)
def test_a_row_without_a_turn_to_train_says_why(tokenizer, row, reason):
    assert sft.read_chat(row, tokenizer, sft.Args()) == [(None, reason)]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"messages": ["a", "b"]}, "TypeError"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_before_any_run_folder(tmp_path, row, message):
    dataset = write_jsonl(tmp_path / "rows.jsonl", [row] * 5)
    with pytest.raises(SystemExit, match=f"^{dataset}, held-out row 0: .*{message}.*; the row is {{'"):
        train(sft, tmp_path / "run", dataset=dataset)
    assert not (tmp_path / "run").exists()


# ---- the loss

GIVEN = {
    "prompts and completions": [ROW, {"prompt": "10+20+3=", "completion": "<think>1</think>\\boxed{33}"}],
    "chats": [{"messages": CHAT}, {"messages": [*CHAT[2:], user("9"), assistant("8")]}],
}


@pytest.mark.parametrize("rows", GIVEN.values(), ids=GIVEN)
def test_loss_and_gradient_are_those_of_the_trained_tokens_alone(tokenizer, rows):
    model, _ = load(sft, TINY)
    examples = [example for row in rows for example in encode(tokenizer, row)]
    divisor = sum(len(example["completion_ids"]) for example in examples)
    policy, args = sft.LogprobModel(model), sft.Args(microbatch_tokens=16)
    totals = add_pairs(sft.accumulate_gradients(policy, examples, divisor, args))
    gradients = [parameter.grad for parameter in model.parameters()]
    losses = []
    for example in examples:
        start = len(example["prompt_ids"])
        ids = example["prompt_ids"] + example["completion_ids"]
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for place in range(start, len(ids)):
            losses.append(-logprobs[place - 1, ids[place]])
    loss = torch.stack(losses).sum()
    assert totals["loss/nll"] == pytest.approx((loss.item(), divisor), rel=1e-5)
    expected = torch.autograd.grad(loss / len(losses), [*model.parameters()])
    assert_close(gradients, [*expected], rtol=1e-4, atol=1e-6)
    # An evaluation is the mean over the same tokens.
    found = sft.evaluate(policy, examples, args)
    assert found["eval/loss"] == pytest.approx(loss.item() / divisor, rel=1e-5)
    assert found["eval/perplexity"] == pytest.approx(math.exp(found["eval/loss"]))


def test_a_run_from_random_weights_says_so_first_and_learns(tmp_path, capsys):
    run = tmp_path / "run"
    rows = read_jsonl(ROOT / "data" / "addition" / "sft.jsonl")[:1024]
    settings = {"num_steps": 20, "warmup_steps": 3, "eval_every": 20, "eval_prompts": 16, "minibatch_size": 32}
    lines = train(sft, run, dataset=write_jsonl(tmp_path / "rows.jsonl", rows), learning_rate=3e-3, **settings)
    assert re.match(".*/models/tiny/config.json: random weights; to fine-tune a model, ", capsys.readouterr().out)
    assert lines[0]["eval/loss"] > 3
    assert lines[-1]["eval/loss"] < 2.5
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoint")
    assert model.config.model_type == "qwen3"


# ---- chat templates that open a thought, and those that write one before an answer that has none

TURN = "<|im_start|>{{ m.role }}\n"
LATER = "{{ m.content.split('</think>')[-1].strip() }}<|im_end|>\n"  # the thoughts of a finished turn are left out
THOUGHT = "{% set parts = m.content.split('</think>') %}"
THOUGHT += "<think>\n{{ parts[0].split('<think>')[-1].strip() if parts|length > 1 }}\n</think>\n\n"
PROMPT = "<|im_start|>user\n17*3=<|im_end|>\n<|im_start|>assistant\n"


def tokenizer_of(before_answer, opening):
    """Of ChatML, with this before every answer of the assistant, and this at the end of a prompt."""
    turns = f"{TURN}{{% if m.role == 'assistant' %}}{before_answer}{{% endif %}}{LATER}"
    prompt = f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{opening}{{% endif %}}"
    template = f"{{% for m in messages %}}{turns}{{% endfor %}}{prompt}"
    return make_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], template)


FORMS = {
    "DeepSeek-R1-Distill, QwQ": ("", "<think>\n"),
    "Qwen3": (THOUGHT, ""),
    "Qwen3-Thinking": (THOUGHT, "<think>\n"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_thought_that_the_prompt_opens_is_the_completions(form, monkeypatch):
    tokenizer = tokenizer_of(*FORMS[form])
    opened = form != "Qwen3"
    prompt = {"prompt_ids": ppo_rlhf.encode_prompt(tokenizer, [user("17*3=")], None)}
    assert tokenizer.decode(prompt["prompt_ids"]) == PROMPT + "<think>\n" * opened
    completions = [r"17*3... maybe \boxed{51}?", r"maybe \boxed{50}? no</think>\boxed{51}"]
    rows = [tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"] for text in completions]
    ids, mask = dpo.pad(rows, "cpu")
    monkeypatch.setattr(ppo_rlhf, "generate", lambda *_: (ids, mask, mask.float()))
    config = SimpleNamespace(eos_token_id=[ppo_rlhf.find_turn_end(tokenizer)])
    policy = SimpleNamespace(model=SimpleNamespace(device="cpu", generation_config=config), modules=list)
    _, texts = ppo_rlhf.sample_completions(policy, tokenizer, [prompt] * 2, 1.0, ppo_rlhf.Args())
    assert texts == ["<think>" * opened + text for text in completions]
    assert [ppo_rlhf.is_correct(text, "51") for text in texts] == [not opened, True]


@pytest.mark.parametrize("form", ["Qwen3", "Qwen3-Thinking"])
@pytest.mark.parametrize("script", [dpo, reward_model])
def test_a_pair_is_trained_as_the_template_writes_a_finished_chat(script, form):
    tokenizer = tokenizer_of(*FORMS[form])
    row = {"prompt": "17*3=", "chosen": "<think>50+1</think>51", "rejected": "50"}
    pair, _ = script.read_pair(row, tokenizer, script.Args(system_prompt=""))
    chosen, rejected = (tokenizer.decode(pair["prompt_ids"] + pair[name]) for name in ("chosen_ids", "rejected_ids"))
    assert chosen == f"{PROMPT}<think>\n50+1\n</think>\n\n51<|im_end|>"
    assert rejected == f"{PROMPT}<think>\n\n</think>\n\n50<|im_end|>"
    [example] = encode(tokenizer, {"prompt": "17*3=", "completion": "50"})
    assert example == {"prompt_ids": pair["prompt_ids"], "completion_ids": pair["rejected_ids"]}


def test_a_template_that_takes_the_thought_away_drops_the_row():
    tokenizer = tokenizer_of(*FORMS["DeepSeek-R1-Distill, QwQ"])
    row = {"prompt": "17*3=", "completion": "<think>50+1</think>51"}
    reason = "whose prompt reads differently when a completion follows"
    assert sft.read_chat(row, tokenizer, sft.Args()) == [(None, reason)]


def test_tools_and_tool_calls_reach_the_template():
    """The template writes them, and the model is trained on what it writes."""
    call = "{% for c in m.tool_calls or [] %}<call>{{ c.name }}</call>{% endfor %}"
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}" + call + "<|im_end|>\n"
    tools = "{% if tools %}{{ tools[0].name }}\n{% endif %}"
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    template = f"{tools}{{% for m in messages %}}{turn}{{% endfor %}}{prompt}"
    tokenizer = make_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], template)
    chat = [user("17*3="), assistant("") | {"tool_calls": [{"name": "times"}]}]
    [example] = encode(tokenizer, {"messages": chat, "tools": [{"name": "times"}]})
    assert tokenizer.decode(example["prompt_ids"]) == f"times\n{PROMPT}"
    assert tokenizer.decode(example["completion_ids"]) == "<call>times</call><|im_end|>"


def test_the_weight_decay_of_a_resumed_run_is_that_of_its_flag(tmp_path, monkeypatch):
    used, step_optimizer = [], sft.step_optimizer

    def step(policy, optimizer, *rest):
        used.append({group["weight_decay"] for group in optimizer.param_groups})
        return step_optimizer(policy, optimizer, *rest)

    monkeypatch.setattr(sft, "step_optimizer", step)
    settings = {"num_steps": 1, "eval_prompts": 0, "minibatch_size": 4, "run_dir": tmp_path / "run"}
    sft.main(make_main_args(sft, tmp_path, **settings))
    sft.main(parse(sft, resume=tmp_path / "run", num_steps=2, weight_decay=0.5))
    assert used == [{0.1}, {0.5}]
