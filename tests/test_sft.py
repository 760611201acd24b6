"""sft.py: which tokens are trained, and that nothing else is."""

import json
import math
import re

import pytest
import torch
from bad_inputs import assistant, user
from test_data import write_rows
from test_models import FORMS, make_folder, make_tokenizer
from tiny import ROOT, TINY, read_jsonl
from transformers import AutoModelForCausalLM

import grpo
import sft

CPU = torch.device("cpu")
STOP_IDS = {5}


@pytest.fixture(scope="module")
def model():
    return sft.make_embedded_model(0)


def trained_text(tokenizer, ids, trained):
    return tokenizer.decode([token for token, is_trained in zip(ids, trained) if is_trained])


def texts(tokenizer, row, system_prompt=""):
    """The whole text of a row as it is encoded, and what of it is trained."""
    ids, trained = sft.encode_row(tokenizer, row, system_prompt, STOP_IDS)
    return tokenizer.decode(ids), trained_text(tokenizer, ids, trained)


# ---- which tokens

ROW = {"prompt": "1+2=", "completion": "3"}
ENCODED = "<|user|>1+2=<|assistant|>3<|end|>"
CHAT = [user("1+1="), assistant("2"), user("2+2="), assistant("4")]
OF_CHAT = "<|user|>1+1=<|assistant|>2<|end|><|user|>2+2=<|assistant|>4<|end|>"


@pytest.mark.parametrize(
    "row, whole, trained",
    [
        (ROW, ENCODED, "3<|end|>"),
        ({"question": "1+2=", "answer": "3"}, ENCODED, "3<|end|>"),
        ({"problem": "1+2=", "solution": "3"}, ENCODED, "3<|end|>"),
        ({**ROW, "question": "9", "problem": "9", "answer": "9", "solution": "9"}, ENCODED, "3<|end|>"),
        ({"question": "1+2=", "problem": "9", "answer": "3", "solution": "9"}, ENCODED, "3<|end|>"),
        ({"prompt": CHAT[:3], "completion": "4"}, OF_CHAT, "2<|end|>4<|end|>"),
        ({"messages": CHAT}, OF_CHAT, "2<|end|>4<|end|>"),
        ({"messages": [{"role": "system", "content": "9"}, *CHAT]}, "<|system|>9" + OF_CHAT, "2<|end|>4<|end|>"),
    ],
)
def test_prompt_and_completion_train_the_completion_and_its_stop_token(tokenizer, row, whole, trained):
    """Of a chat every turn of the assistant; and the prompt is the one that grpo.py samples from."""
    assert texts(tokenizer, row) == (whole, trained)
    ids, is_trained = sft.encode_row(tokenizer, ROW, "7", STOP_IDS)
    assert ids[: is_trained.index(True)] == grpo.encode_prompt(tokenizer, ROW["prompt"], "7")


def test_what_a_template_writes_after_the_stop_token_is_not_trained(tokenizer):
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "<|end|>. ")
    assert texts(tokenizer, ROW) == (ENCODED + ". ", "3<|end|>")


def test_template_that_rewrites_history_is_an_error(tokenizer):
    """As Qwen3's does with the thoughts of earlier turns."""
    tokenizer.chat_template = "{% if messages|length > 2 %}+{% endif %}" + tokenizer.chat_template
    with pytest.raises(ValueError, match="changes what precedes message 4"):
        texts(tokenizer, {"messages": CHAT})


def test_without_a_chat_template_the_end_of_text_is_the_stop_token(tokenizer):
    tokenizer.chat_template = None
    assert texts(tokenizer, ROW) == ("1+2=3<|end|>", "3<|end|>")
    with pytest.raises(ValueError, match="no chat template"):
        texts(tokenizer, {"messages": CHAT})


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


def encode(tokenizer, rows):
    encoded = [sft.encode_row(tokenizer, row, "", STOP_IDS) for row in rows]
    return [{"ids": ids, "trained": trained, "start": trained.index(True)} for ids, trained in encoded]


@pytest.mark.parametrize("given", GIVEN_ROWS)
def test_loss_and_gradient_are_those_of_the_trained_tokens_alone(model, tokenizer, given):
    rows = encode(tokenizer, GIVEN_ROWS[given])
    assert all(all(row["trained"][row["start"] :]) == ("chats" not in given) for row in rows)
    policy, args = sft.LogprobModel(model), sft.Args(microbatch_tokens=16)
    policy.zero_grad()
    divisor = sum(sum(row["trained"]) for row in rows)
    totals = sft.accumulate_gradients(policy, sft.collate(rows, 0, CPU), torch.arange(2), divisor, args)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    losses, entropies = [], []
    for row in rows:
        logprobs = model(torch.tensor([row["ids"]])).logits[0].log_softmax(-1)
        places = [i for i, is_trained in enumerate(row["trained"]) if is_trained]
        losses += [-logprobs[i - 1, row["ids"][i]] for i in places]
        entropies += [-(logprobs[i - 1].exp() * logprobs[i - 1]).sum().item() for i in places]
    expected = torch.stack(losses)
    expected.mean().backward()
    assert len(losses) == totals["num_tokens"] == divisor
    assert totals["loss/nll"] == pytest.approx(expected.sum().item(), rel=1e-5)
    assert totals["policy/entropy"] == pytest.approx(sum(entropies), rel=1e-5)
    for gradient, parameter in zip(gradients, model.parameters()):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("budget", [16, 1000])
def test_evaluation_is_the_mean_over_trained_tokens_and_no_training(model, tokenizer, monkeypatch, budget):
    """Nor does a part without rows count, as on a rank that waits for the passes of the others."""
    rows = encode(tokenizer, [{"prompt": "1+2=", "completion": "3" * (number + 1)} for number in range(5)])
    policy, args = sft.LogprobModel(model), sft.Args(microbatch_tokens=budget)
    totals = sft.accumulate_gradients(policy, sft.collate(rows, 0, CPU), torch.arange(5), 1, args)
    policy.zero_grad()
    found = sft.evaluate(policy, rows, 0, args, 0, 1)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert found["eval/loss"] == pytest.approx((totals["loss/nll"] / totals["num_tokens"]).item(), rel=1e-6)
    assert found["eval/perplexity"] == pytest.approx(math.exp(found["eval/loss"]))
    monkeypatch.setattr(sft, "all_reduce", lambda value, *_: value + 1)
    *_, idle = sft.microbatches(sft.collate(rows, 0, CPU), torch.arange(5), budget)
    monkeypatch.setattr(sft, "microbatches", lambda *_: [idle])
    totals = sft.accumulate_gradients(policy, {}, torch.arange(5), 1, args)
    assert len(idle["rows"]) == 0 and all(value == 0 for value in totals.values())
    assert not any(parameter.grad.any() for parameter in model.parameters())


# ---- runs


def run(tmp_path, **flags):
    sizes = {"num_steps": 2, "minibatch_size": 4, "eval_prompts": 2, "warmup_steps": 1}
    sft.main(sft.Args(run_dir=str(tmp_path / "run"), **{**sizes, **flags}))
    return read_jsonl(tmp_path / "run" / "metrics.jsonl")


def test_messages_fine_tune_a_local_model(tmp_path):
    """Rows too long or with nothing to train are dropped and counted."""
    good = {"messages": [user("1+1="), assistant("\\boxed{2}")]}
    long, empty = ({"messages": [user(text), assistant(said)]} for text, said in (("1+" * 40, "2"), ("1+1=", " ")))
    dataset = write_rows(tmp_path / "rows.jsonl", [*[good] * 4, long, empty, *[good] * 6])
    lines = run(tmp_path, model=str(TINY), dataset=dataset, num_steps=8, learning_rate=1e-3)
    assert lines[-1]["eval/loss"] < lines[0]["eval/loss"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint")
    (said, _) = json.loads((tmp_path / "run" / "args.json").read_text())["run"]["data"]
    reasons = "'longer than 32 . 48 tokens': 1, 'without a token to train': 1"
    assert re.fullmatch(rf"8 training rows \(\w+\), dropped: {{{reasons}}}", said)


WORDS = {"prompt": "one and one", "completion": "two"}
ASKED, SAID = user("1+1="), assistant("two")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "1"}] * 5, "training row .* prompt, question or problem and .*; found text"),
        ([{"prompt": "1+1=", "ground_truth": "2"}] * 5, "completion, answer or solution, .*found prompt, ground_truth"),
        ([{"completion": "2"}] * 5, "training row .*found completion"),
        ([{"messages": [user("1")]}] * 5, "too few rows.*: 0 training rows .*'without a token to train': 3"),
        ([{"prompt": "1", "completion": ""}] * 5, "too few rows.*: 0 training rows .*'without a token to train': 3"),
        ([{"prompt": "1", "completion": "2"}], "too few rows"),
        *[
            ([*[good] * 6, {**good, column: value}, *[good] * 3], "training row 7")
            for good, column, values in (
                (WORDS, "prompt", (7, {"a": 1})),
                (WORDS, "completion", (7, {"a": 1}, ["2"])),
                ({"messages": [ASKED, SAID]}, "messages", ("hi", 7, ["a"], [ASKED, {"content": "2"}])),
                ({"messages": [ASKED, SAID]}, "messages", ([ASKED, {"role": "assistant"}], [ASKED, assistant(2)])),
            )
            for value in values
        ],
    ],
)
def test_bad_data_is_one_line_before_any_run_folder(rows, message, tmp_path):
    with pytest.raises(SystemExit, match=message) as error:
        run(tmp_path, dataset=write_rows(tmp_path / "rows.jsonl", rows))
    assert "\n" not in str(error.value)
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
    texts = {trained_text(tokenizer, row["ids"], row["trained"]) for row in seen}
    assert texts < {row["answer"] + "<|im_end|>" for row in rows} and len(texts) == 7
    assert any("<<" in text and "\n#### " in text for text in texts)
