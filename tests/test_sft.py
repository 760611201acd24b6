"""sft.py: which tokens are trained, and that nothing else is."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from helpers import train
from tiny import (
    FORMS,
    ROOT,
    TINY,
    assistant,
    load,
    make_folder,
    make_tokenizer,
    parse,
    read_jsonl,
    user,
    write_jsonl,
    write_rows,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import dpo
import grpo
import grpo_process
import reward_model
import sft

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(scope="module")
def model():
    return load(sft, TINY)[0]


def encode(tokenizer, row, system_prompt=""):
    """The examples of a row."""
    return sft.read_chat(row, tokenizer, sft.Args(system_prompt=system_prompt))


def texts(tokenizer, row):
    """What precedes each trained part of a row, and the part itself."""
    return [
        tuple(tokenizer.decode(row[name]) for name in ("prompt_ids", "completion_ids"))
        for row in encode(tokenizer, row)
    ]


# ---- which tokens

ROW = {"prompt": "1+2=", "completion": "3"}
OF_ROW = [("<|user|>1+2=<|assistant|>", "3<|end|>")]
CHAT = [user("1+1="), assistant("2"), user("2+2="), assistant("4")]
FIRST, SECOND = "<|user|>1+1=<|assistant|>", "2<|end|><|user|>2+2=<|assistant|>"
OF_CHAT = [(FIRST, "2<|end|>"), (FIRST + SECOND, "4<|end|>")]


@pytest.mark.parametrize(
    "row, expected",
    [
        (ROW, OF_ROW),
        ({"question": "1+2=", "answer": "3"}, OF_ROW),
        ({"problem": "1+2=", "solution": "3"}, OF_ROW),
        ({"prompt": "1+2=", "response": "3"}, OF_ROW),
        ({"prompt": "1+2=", "completion": 3}, OF_ROW),
        ({**ROW, "question": "9", "problem": "9", "answer": "9", "solution": "9"}, OF_ROW),
        ({"question": "1+2=", "problem": "9", "solution": "3", "answer": "9"}, OF_ROW),  # LIMO's
        ({"prompt": "1+2=", "completion": [assistant("3")]}, OF_ROW),
        ({"prompt": CHAT[:3], "completion": "4"}, OF_CHAT),
        ({"messages": CHAT}, OF_CHAT),
        ({"messages": json.dumps(CHAT)}, OF_CHAT),
        ({"messages": [message | {"tool_calls": None, "name": []} for message in CHAT]}, OF_CHAT),
        ({"prompt": json.dumps(CHAT[:3]), "completion": json.dumps(CHAT[3:])}, OF_CHAT),
        ({**ROW, "system": "9"}, [("<|system|>9" + OF_ROW[0][0], OF_ROW[0][1])]),
        (
            {"messages": [{"role": "system", "content": "9"}, *CHAT]},
            [("<|system|>9" + prompt, completion) for prompt, completion in OF_CHAT],
        ),
    ],
)
def test_each_turn_of_the_assistant_is_trained_with_its_stop_token(tokenizer, row, expected):
    assert texts(tokenizer, row) == expected


@pytest.mark.parametrize("column, system", [({}, "7"), ({"system": None}, "7"), ({"system": "9"}, "9")])
def test_the_prompt_is_the_one_that_grpo_samples_from(tokenizer, column, system):
    [row] = encode(tokenizer, ROW | column, "7")
    assert row["prompt_ids"] == grpo.encode_prompt(tokenizer, grpo.as_messages(ROW["prompt"], system))


def test_what_a_template_writes_after_the_stop_token_is_not_trained(tokenizer):
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "<|end|>. ")
    assert texts(tokenizer, ROW) == OF_ROW


def test_turns_are_trained_after_what_a_template_makes_of_the_turns_before(tokenizer):
    """Qwen3's leaves out the thoughts of earlier turns."""
    tokenizer.chat_template = "{% if messages|length > 2 %}+{% endif %}" + tokenizer.chat_template
    assert texts(tokenizer, {"messages": CHAT}) == [OF_CHAT[0], ("+" + FIRST + SECOND, "4<|end|>")]


def test_a_template_that_rewrites_the_prompt_once_it_is_completed_is_an_error(tokenizer):
    tokenizer.chat_template = "{% if messages|length > 1 %}+{% endif %}" + tokenizer.chat_template
    with pytest.raises(ValueError, match="renders the prompt differently"):
        encode(tokenizer, ROW)


def test_without_a_chat_template_the_end_of_text_is_the_stop_token(tokenizer):
    tokenizer.chat_template = None
    assert texts(tokenizer, ROW) == [("1+2=", "3<|end|>")]


def test_a_tokenizer_that_writes_a_blank_before_a_text_trains_the_tokens_of_the_whole_chat():
    """As SentencePiece's: dpo.py's first token is the same."""
    words = ["<unk>", "<end>", "\u2581", "1", "2", "3", "\u25813"]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [("\u2581", "3")], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<end>")
    turn = "{{ m.content }}{% if m.role == 'assistant' %}<end>{% endif %}"
    for template in (None, f"{{% for m in messages %}}{turn}{{% endfor %}}"):
        wrapped.chat_template = template
        [row] = encode(wrapped, {"prompt": "12", "completion": "3"})
        [pair] = dpo.read_pair({"prompt": "12", "chosen": "3", "rejected": "2"}, wrapped, dpo.Args(system_prompt=""))
        assert row == {"prompt_ids": pair["prompt_ids"], "completion_ids": pair["chosen_ids"]}
    assert row["completion_ids"] == [words.index("3"), words.index("<end>")]


def test_ordinary_tokens_survive_decoding(tokenizer):
    text = "<think>17+58=75</think>\\boxed{75}"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len("17+58=75") + 2 + len("75}") + 1  # <think>, </think> and \boxed{ are one token each
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


# ---- the loss

GIVEN_ROWS = {
    "prompts and completions": [ROW, {"prompt": "10+20+3=", "completion": "<think>1</think>\\boxed{33}"}],
    "chats, with turns of the user in between": [
        {"messages": [*CHAT, user("9"), assistant("8")]},
        {"messages": [*CHAT[2:], user("9"), assistant("8")]},
    ],
}


@pytest.mark.parametrize("given", GIVEN_ROWS)
def test_loss_and_gradient_are_those_of_the_trained_tokens_alone(model, tokenizer, given):
    rows = [example for row in GIVEN_ROWS[given] for example in encode(tokenizer, row)]
    assert len(rows) == (5 if "chats" in given else 2)
    policy, args = sft.LogprobModel(model), sft.Args(microbatch_tokens=16)
    policy.zero_grad()
    divisor = sum(len(row["completion_ids"]) for row in rows)
    batch = sft.collate(rows, "cpu")
    totals = sft.accumulate_gradients(policy, batch, torch.arange(len(rows)), divisor, args)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    losses, entropies = [], []
    for row in rows:
        ids = row["prompt_ids"] + row["completion_ids"]
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        places = range(len(row["prompt_ids"]), len(ids))
        losses += [-logprobs[i - 1, ids[i]] for i in places]
        entropies += [-(logprobs[i - 1].exp() * logprobs[i - 1]).sum().item() for i in places]
    expected = torch.stack(losses)
    expected.mean().backward()
    assert len(losses) == divisor
    assert totals["loss/nll"] == pytest.approx(expected.sum().item(), rel=1e-5)
    assert totals["policy/entropy"] == pytest.approx(sum(entropies), rel=1e-5)
    for gradient, parameter in zip(gradients, model.parameters()):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("budget", [16, 1000])
def test_evaluation_is_the_mean_over_trained_tokens_and_no_training(model, tokenizer, monkeypatch, budget):
    """Nor does a part without rows count, as on a rank that waits for the passes of the others."""
    rows = [encode(tokenizer, {"prompt": "1+2=", "completion": "3" * (number + 1)})[0] for number in range(5)]
    num_tokens = sum(len(row["completion_ids"]) for row in rows)
    policy, args = sft.LogprobModel(model), sft.Args(microbatch_tokens=budget)
    totals = sft.accumulate_gradients(policy, sft.collate(rows, "cpu"), torch.arange(5), 1, args)
    policy.zero_grad()
    found = sft.evaluate(policy, rows, args)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert found["eval/loss"] == pytest.approx(totals["loss/nll"].item() / num_tokens, rel=1e-6)
    assert found["eval/perplexity"] == pytest.approx(math.exp(found["eval/loss"]))
    monkeypatch.setattr(sft, "all_reduce", lambda value, *_: value + 1)
    *_, idle = sft.microbatches(sft.collate(rows, "cpu"), torch.arange(5), budget)
    monkeypatch.setattr(sft, "microbatches", lambda *_: [idle])
    totals = sft.accumulate_gradients(policy, {}, torch.arange(5), 1, args)
    assert len(idle["rows"]) == 0 and all(value == 0 for value in totals.values())
    assert not any(parameter.grad.any() for parameter in model.parameters())


# ---- runs


def run(tmp_path, **flags):
    sizes = {"num_steps": 2, "minibatch_size": 4, "eval_prompts": 2, "warmup_steps": 1}
    sft.main(parse(sft, run_dir=tmp_path / "run", **{**sizes, **flags}))
    return read_jsonl(tmp_path / "run" / "metrics.jsonl")


def test_messages_fine_tune_a_local_model(tmp_path, capsys):
    """Rows too long or with nothing to train are dropped and counted, and so is a prompt that is held out."""
    good = [{"messages": [user(f"{i}+1="), assistant("\\boxed{2}")]} for i in range(1, 9)]
    bad = [{"messages": [user(text), assistant(said)]} for text, said in (("1+" * 40, "2"), ("1+1=", " "))]
    bad.append({"messages": [assistant("2"), user("1+1="), assistant("2")]})
    write_rows(tmp_path / "rows" / "train.jsonl", [*bad, *good])
    write_rows(tmp_path / "rows" / "test.jsonl", good[-2:])
    dataset = str(tmp_path / "rows")
    lines = run(tmp_path, model=str(TINY), dataset=dataset, num_steps=8, learning_rate=1e-3)
    assert lines[-1]["eval/loss"] < lines[0]["eval/loss"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint")
    said, dropped = capsys.readouterr().out, dict.fromkeys(["too long", *REASONS], 1) | {"with a held-out prompt": 2}
    assert f"2 held-out rows of {dataset}, split test, dropped: {{}}\n" in said
    assert f"6 training rows of {dataset}, split train, dropped: {dropped}\n" in said
    assert "'<|user|>1+1=<|assistant|>', and the part that is trained: '\\\\boxed{2}<|end|>'\n" in said


REASONS = "without a completion", "without a user's turn before the assistant's turn"
WORDS = {"prompt": "one and one", "completion": "two"}
ASKED, SAID = user("1+1="), assistant("two")
CALLS = {"tool_calls": [{"name": "f"}]}, {"weight": 0}, {"tools": ["f"]}


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"messages": [ASKED]}, 0),
        ({"messages": [ASKED, assistant(None)]}, 0),
        ({**WORDS, "completion": ""}, 0),
        ({**WORDS, "completion": None}, 0),
        ({"messages": [SAID]}, 1),
        ({"messages": [SAID, ASKED, SAID]}, 1),
        ({"messages": [{"role": "system", "content": "1"}, SAID]}, 1),
        ({"messages": []}, 1),
        ({"messages": None}, 1),
        ({**WORDS, "prompt": None}, 1),
        ({**WORDS, "prompt": " "}, 1),
    ],
)
@pytest.mark.parametrize("system_prompt", ["", "9"])
def test_a_row_without_a_turn_to_train_says_why(tokenizer, row, reason, system_prompt):
    assert encode(tokenizer, row, system_prompt) == [REASONS[reason]]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"text": "1"}, "prompt, question, problem is needed, but there are text"),
        ({"prompt": "1", "ground_truth": "2"}, "completion, response, solution, answer is needed, but .* ground_truth"),
        ({"completion": "2"}, "but there are completion"),
        ({"messages": ["a", "b"]}, "AttributeError"),
        ({"messages": [ASKED, {"content": "2"}]}, "role"),
        ({**WORDS, "completion": ["2"]}, "AttributeError"),
        ({**WORDS, "completion": {"a": 1}}, "the column completion was read as a dict"),
        ({**WORDS, "completion": "2<|end|>"}, "already has the chat template's tokens"),
        ({"messages": [ASKED, {"role": "assistant", "content": [{"text": "2"}]}]}, "the rest would be lost: "),
        *[({"messages": [ASKED, {**SAID, **field}]}, f"the rest would be lost: .*'{[*field][0]}'") for field in CALLS],
    ],
)
def test_a_row_that_cannot_be_read_is_named_before_any_run_folder(tmp_path, row, message):
    dataset = write_jsonl(tmp_path / "rows.jsonl", [row] * 5)
    with pytest.raises(SystemExit, match=f"^{dataset}, held-out row 0: .*{message}.*; the row is {{'"):
        run(tmp_path, dataset=dataset)
    assert not (tmp_path / "run").exists()


def test_gsm8k_is_trained_on_its_answers_as_they_stand(tmp_path, monkeypatch):
    rows = read_jsonl(ROOT / "tests" / "data" / "gsm8k_20.jsonl")
    dataset = write_rows(tmp_path / "gsm8k.jsonl", rows)
    tokenizer = make_tokenizer(*FORMS["chatml"])
    folder = make_folder(tmp_path / "model", tokenizer)
    flags = {"max_completion_length": 1000, "minibatch_size": 2, "num_steps": 1, "eval_prompts": 5}
    seen, collate = [], sft.collate
    monkeypatch.setattr(sft, "collate", lambda rows, *rest: seen.extend(rows) or collate(rows, *rest))
    assert run(tmp_path, model=folder, dataset=dataset, **flags)[-1]["loss/nll"] > 0
    texts = {tokenizer.decode(row["completion_ids"]) for row in seen}
    assert texts < {row["answer"] + "<|im_end|>" for row in rows} and len(texts) == 7
    assert any("<<" in text and "\n#### " in text for text in texts)


# ---- a short run


@pytest.mark.slow
def test_a_run_from_random_weights_learns(tmp_path):
    run = tmp_path / "run"
    sizes = {"num_steps": 30, "warmup_steps": 3, "eval_every": 30, "eval_prompts": 64, "save_every": 30}
    lines = train(sft, run, **sizes)
    assert lines[0]["eval/loss"] > 3
    assert lines[-1]["eval/loss"] < 2.5
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoint")
    assert model.config.model_type == "qwen3"


# ==== chat templates that open a thought, and those that write one before an answer that has none


TURN = "<|im_start|>{{ m.role }}\n"
LATER = "{{ m.content.split('</think>')[-1].strip() }}<|im_end|>\n"  # the thoughts of a finished turn are left out
THOUGHT = "{% set parts = m.content.split('</think>') %}"
THOUGHT += "<think>\n{{ parts[0].split('<think>')[-1].strip() if parts|length > 1 }}\n</think>\n\n"


def template(before_answer, opening):
    """Of ChatML, with this before every answer of the assistant, and this at the end of a prompt."""
    turns = f"{TURN}{{% if m.role == 'assistant' %}}{before_answer}{{% endif %}}{LATER}"
    prompt = f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{opening}{{% endif %}}"
    return f"{{% for m in messages %}}{turns}{{% endfor %}}{prompt}"


TEMPLATES = {  # of the form of
    "DeepSeek-R1-Distill, QwQ": template("", "<think>\n"),
    "Qwen3": template(THOUGHT, ""),
    "Qwen3-Thinking": template(THOUGHT, "<think>\n"),
}
PROMPT = "<|im_start|>user\n17*3=<|im_end|>\n<|im_start|>assistant\n"
ROWS = [{"prompt": "17*3=", "chosen": "<think>50+1</think>51", "rejected": "50"}] * 4


def tokenizer_of(form):
    return make_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], TEMPLATES[form])


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_thought_that_the_prompt_opens_is_the_completions(form, monkeypatch):
    tokenizer = tokenizer_of(form)
    opened = form != "Qwen3"
    completions = [r"17*3... maybe \boxed{51}?", r"maybe \boxed{50}? no</think>\boxed{51}<|im_end|>"]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in completions]
    ids, mask = grpo.pad_left([{"prompt_ids": row[::-1]} for row in rows], "cpu")
    monkeypatch.setattr(grpo, "generate", lambda *_: (ids.flip(1), mask.flip(1), mask.float()))
    prompt = {"prompt_ids": grpo.encode_prompt(tokenizer, grpo.as_messages("17*3=", ""))}
    assert tokenizer.decode(prompt["prompt_ids"]) == PROMPT + "<think>\n" * opened
    config = SimpleNamespace(eos_token_id=[grpo.find_turn_end(tokenizer)])
    policy = SimpleNamespace(model=SimpleNamespace(device="cpu", generation_config=config), modules=list)
    _, texts = grpo.sample_completions(policy, tokenizer, [prompt] * 2, 1.0, grpo.Args())
    assert texts == ["<think>" * opened + text.removesuffix("<|im_end|>") for text in completions]
    assert [grpo.is_right(text, "51") for text in texts] == [not opened, True]
    row, said = {"prompt": "17+34=", "answer": "51"}, "17+34=51;</think>51 "
    ids = tokenizer(said)["input_ids"]
    for padding in ([], ids):  # whatever its id says
        steps = grpo_process.find_steps(tokenizer, [*ids, *padding], "<think>" * opened + said, row, 1.0)
        assert steps[0] == (9, 1.0)


@pytest.mark.parametrize("script", [dpo, reward_model])
@pytest.mark.usefixtures("alone")
def test_a_pair_is_trained_as_the_template_writes_a_finished_chat(script, tmp_path):
    args = script.Args(dataset=write_jsonl(tmp_path / "pairs.jsonl", ROWS), eval_prompts=0)
    for form in ("Qwen3", "Qwen3-Thinking"):
        tokenizer = tokenizer_of(form)
        (pair, *_), _ = script.load_pairs(args, tokenizer)
        for name, text in (("chosen", "50+1\n</think>\n\n51"), ("rejected", "\n</think>\n\n50")):
            whole = tokenizer.decode(pair["prompt_ids"] + pair[f"{name}_ids"])
            assert whole == f"{PROMPT}<think>\n{text}<|im_end|>"
    said = {"50+1": "renders the prompt differently", "<think>50+1</think>51": "does not write the content of the mess"}
    for text, reason in said.items():  # it writes what follows the thought
        args.dataset = write_jsonl(tmp_path / "pairs.jsonl", [ROWS[0] | {"chosen": text}] * 4)
        with pytest.raises(SystemExit, match=f"pairs.jsonl, training row 0: .*the chat template {reason}"):
            script.load_pairs(args, tokenizer_of("DeepSeek-R1-Distill, QwQ"))


@pytest.mark.usefixtures("alone")
def test_an_example_is_trained_as_the_template_writes_a_finished_chat(tmp_path):
    rows = [{"prompt": "17*3=", "completion": "51"}] * 4
    args = sft.Args(dataset=write_jsonl(tmp_path / "rows.jsonl", rows), eval_prompts=0)
    for form in TEMPLATES:
        tokenizer = tokenizer_of(form)
        if form.startswith("DeepSeek"):
            with pytest.raises(
                SystemExit, match="rows.jsonl, training row 0: .*template renders the prompt differently"
            ):
                sft.load_chats(args, tokenizer)
            continue
        row = sft.load_chats(args, tokenizer)[0][0]
        assert tokenizer.decode(row["prompt_ids"]) == PROMPT + "<think>\n" * (form == "Qwen3-Thinking")
        completion = tokenizer.decode(row["completion_ids"])
        assert completion == "<think>\n" * (form == "Qwen3") + "\n</think>\n\n51<|im_end|>"
