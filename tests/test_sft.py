"""sft.py: which tokens are trained, and that nothing else is."""

import json
import math
import re

import datasets
import pytest
import torch
from test_data import write_hub_folder
from test_models import FORMS, make_folder, make_tokenizer
from transformers import AutoModelForCausalLM

import grpo
import sft

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def embedded():
    model, tokenizer = sft.make_embedded_model(0)
    return model, tokenizer, sft.find_stop_ids(model, tokenizer)


def trained_text(tokenizer, ids, trained):
    return tokenizer.decode([token for token, is_trained in zip(ids, trained) if is_trained])


def test_prompt_and_completion_train_the_completion_and_its_stop_token(embedded):
    _, tokenizer, stop_ids = embedded
    row = {"prompt": "1+2=", "completion": "\\boxed{3}"}
    ids, trained = sft.encode_row(tokenizer, row, "", stop_ids)
    assert tokenizer.decode(ids) == "<|user|>1+2=<|assistant|>\\boxed{3}<|end|>"
    assert trained_text(tokenizer, ids, trained) == "\\boxed{3}<|end|>"


def test_training_prompt_is_the_prompt_that_grpo_samples_from(embedded):
    _, tokenizer, stop_ids = embedded
    ids, trained = sft.encode_row(tokenizer, {"prompt": "1+2=", "completion": "3"}, "", stop_ids)
    assert ids[: trained.index(True)] == grpo.encode_prompt(tokenizer, "1+2=", "")


def test_every_assistant_turn_is_trained_and_no_other(embedded):
    _, tokenizer, stop_ids = embedded
    messages = [
        {"role": "system", "content": "9"},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2="},
        {"role": "assistant", "content": "4"},
    ]
    ids, trained = sft.encode_row(tokenizer, {"messages": messages}, "", stop_ids)
    assert trained_text(tokenizer, ids, trained) == "2<|end|>4<|end|>"
    assert tokenizer.decode(ids) == "<|system|>9<|user|>1+1=<|assistant|>2<|end|><|user|>2+2=<|assistant|>4<|end|>"


def test_what_a_template_writes_after_the_stop_token_is_not_trained(embedded):
    _, tokenizer, stop_ids = embedded
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = template.replace("<|end|>", "<|end|>. ")
        ids, trained = sft.encode_row(tokenizer, {"prompt": "1+2=", "completion": "3"}, "", stop_ids)
    finally:
        tokenizer.chat_template = template
    assert trained_text(tokenizer, ids, trained) == "3<|end|>"
    assert tokenizer.decode(ids).endswith("3<|end|>. ")


def test_template_that_rewrites_history_is_an_error(embedded):
    _, tokenizer, stop_ids = embedded
    messages = [{"role": role, "content": "1"} for role in ("user", "assistant", "user", "assistant")]
    template = tokenizer.chat_template
    try:  # as Qwen3's does with the thoughts of earlier turns
        tokenizer.chat_template = "{% if messages|length > 2 %}+{% endif %}" + template
        with pytest.raises(ValueError, match="changes what comes before message 4"):
            sft.encode_row(tokenizer, {"messages": messages}, "", stop_ids)
    finally:
        tokenizer.chat_template = template


def test_without_a_chat_template_the_end_of_text_is_the_stop_token(embedded):
    _, tokenizer, stop_ids = embedded
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        ids, trained = sft.encode_row(tokenizer, {"prompt": "1+2=", "completion": "3"}, "", stop_ids)
        with pytest.raises(ValueError, match="no chat template"):
            sft.encode_row(tokenizer, {"messages": [{"role": "assistant", "content": "1"}]}, "", stop_ids)
    finally:
        tokenizer.chat_template = template
    assert tokenizer.decode(ids) == "1+2=3<|end|>"
    assert trained_text(tokenizer, ids, trained) == "3<|end|>"


CHAT = [("user", "1+1="), ("assistant", "2"), ("user", "2+2="), ("assistant", "4"), ("user", "9"), ("assistant", "8")]
GIVEN_ROWS = {
    "prompts and completions": [
        {"prompt": "1+2=", "completion": "3"},
        {"prompt": "10+20+3=", "completion": "<think>1</think>\\boxed{33}"},
    ],
    "chats, with turns of the user in between": [
        {"messages": [{"role": role, "content": content} for role, content in turns]} for turns in (CHAT, CHAT[2:])
    ],
}


@pytest.mark.parametrize("given", GIVEN_ROWS)
def test_loss_and_gradient_are_those_of_the_trained_tokens_alone(embedded, given):
    model, tokenizer, stop_ids = embedded
    rows = []
    for row in GIVEN_ROWS[given]:
        ids, trained = sft.encode_row(tokenizer, row, "", stop_ids)
        rows.append({"ids": ids, "trained": trained, "start": trained.index(True)})
    assert all(all(row["trained"][row["start"] :]) == ("chats" not in given) for row in rows)
    batch = sft.collate(rows, tokenizer.pad_token_id, CPU)
    policy = sft.LogprobModel(model)
    policy.zero_grad()
    args = sft.Args(microbatch_tokens=16)
    divisor = sum(sum(row["trained"]) for row in rows)
    totals = sft.accumulate_gradients(policy, batch, torch.arange(2), divisor, args)
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
def test_evaluation_is_the_mean_over_trained_tokens_and_no_training(embedded, budget):
    model, tokenizer, stop_ids = embedded
    rows = []
    for number in range(5):
        row = {"prompt": "1+2=", "completion": "3" * (number + 1)}
        ids, trained = sft.encode_row(tokenizer, row, "", stop_ids)
        rows.append({"ids": ids, "trained": trained, "start": trained.index(True)})
    policy, args = sft.LogprobModel(model), sft.Args(microbatch_tokens=budget)
    totals = sft.accumulate_gradients(policy, sft.collate(rows, 0, CPU), torch.arange(5), 1, args)
    policy.zero_grad()
    found = sft.evaluate(policy, rows, tokenizer.pad_token_id, args, 0, 1)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert found["eval/loss"] == pytest.approx((totals["loss/nll"] / totals["num_tokens"]).item(), rel=1e-6)
    assert found["eval/perplexity"] == pytest.approx(math.exp(found["eval/loss"]))


def test_a_part_without_rows_adds_nothing_and_reaches_every_parameter(embedded, monkeypatch):
    """As on a rank that waits for the passes of the others."""
    model, tokenizer, stop_ids = embedded
    ids, trained = sft.encode_row(tokenizer, {"prompt": "1+2=", "completion": "3"}, "", stop_ids)
    batch = sft.collate([{"ids": ids, "trained": trained, "start": trained.index(True)}], 0, CPU)
    monkeypatch.setattr(sft, "all_reduce", lambda value, *_: value + 1)
    _, part = sft.microbatches(batch, torch.arange(1), 1000)
    model.zero_grad()
    loss, metrics = sft.microbatch_loss(sft.LogprobModel(model), part)
    loss.backward()
    assert len(part["rows"]) == 0 and loss == 0 and all(value == 0 for value in metrics.values())
    assert all(not parameter.grad.any() for parameter in model.parameters())


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(tmp_path, **flags):
    sizes = {"num_steps": 2, "minibatch_size": 4, "eval_prompts": 2, "warmup_steps": 1}
    sft.main(sft.Args(run_dir=str(tmp_path / "run"), **{**sizes, **flags}))
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_messages_fine_tune_a_local_model(tmp_path):
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "\\boxed{2}"}]
    dataset = write_rows(tmp_path / "rows.jsonl", [{"messages": messages}] * 10)
    lines = run(tmp_path, model=str(grpo.HERE / "models" / "tiny"), dataset=dataset, num_steps=8, learning_rate=1e-3)
    assert lines[-1]["eval/loss"] < lines[0]["eval/loss"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint")


def test_rows_too_long_or_without_completion_are_dropped_and_counted(tmp_path, capsys):
    good = {"prompt": "1+1=", "completion": "\\boxed{2}"}
    rows = [*[good] * 10, {"prompt": "1+" * 40, "completion": "2"}, {"prompt": "1+1=", "completion": ""}, good, good]
    run(tmp_path, dataset=write_rows(tmp_path / "rows.jsonl", rows))
    said = "10 training rows .*; 1 dropped, longer than 32 . 48 tokens; 1 dropped, without a token to train\n"
    assert re.search(said, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "1"}] * 5, "needs a column prompt, question or problem and a .* or messages; found text"),
        ([{"prompt": "1+1=", "ground_truth": "2"}] * 5, "completion, answer or solution, .*found prompt, ground_truth"),
        ([{"completion": "2"}] * 5, "needs a column prompt, question or problem .*found completion"),
        (
            [{"messages": [{"role": "user", "content": "1"}]}] * 5,
            "0 training rows .*; 3 dropped, without a token to train",
        ),
        ([{"prompt": "1", "completion": ""}] * 5, "0 training rows .*; 3 dropped, without a token to train"),
        ([{"prompt": "1", "completion": "2"}], "too few"),
    ],
)
def test_bad_data_is_one_line_before_any_run_folder(rows, message, tmp_path):
    with pytest.raises(SystemExit, match=message) as error:
        run(tmp_path, dataset=write_rows(tmp_path / "rows.jsonl", rows))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


ASKED, SAID = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "two"}
BAD_ROWS = [
    ({"messages": "hi"}, "messages must be a list of messages with a role and a content of text"),
    ({"messages": 7}, "messages must be a list of messages"),
    ({"messages": ["a"]}, "messages must be a list of messages"),
    ({"messages": [ASKED, {"content": "2"}]}, "messages must be a list of messages"),
    ({"messages": [ASKED, {"role": "assistant"}]}, "messages must be a list of messages"),
    ({"messages": [ASKED, {**SAID, "content": 2}]}, "messages must be a list of messages"),
    ({"prompt": 7, "completion": "2"}, "(prompt|completion) must be a text or a list of mess"),
    ({"prompt": "1+1=", "completion": {"a": 1}}, "(prompt|completion) must be a text or a list of mess"),
    ({"prompt": "1+1=", "completion": ["2"]}, "completion must be a text or a list"),
]


@pytest.mark.parametrize("row, message", BAD_ROWS)
def test_what_is_no_text_is_an_error_of_its_row(row, message, tmp_path):
    good = {"messages": [ASKED, SAID]} if "messages" in row else {"prompt": "1+1=", "completion": "two"}
    with pytest.raises(SystemExit, match=f"training row 7: {message}") as error:
        run(tmp_path, dataset=write_rows(tmp_path / "rows.jsonl", [*[good] * 6, row, *[good] * 3]))
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_chats_that_the_template_refuses_or_that_are_empty_are_dropped_and_counted(embedded, tmp_path):
    _, tokenizer, _ = embedded
    rows = [
        {"messages": messages} for messages in ([ASKED, ASKED, SAID], [ASKED, {**SAID, "content": None}], [ASKED, SAID])
    ]
    args = sft.Args(dataset=write_rows(tmp_path / "rows.jsonl", [*rows, rows[-1]]), eval_prompts=1)
    args.max_prompt_length, args.max_completion_length, template = 32, 48, tokenizer.chat_template
    try:
        refuse = "{{ raise_exception('two in a row') }}"
        same = "loop.index0 > 0 and message['role'] == messages[loop.index0 - 1]['role']"
        tokenizer.chat_template = template.replace("%}<|{{", "%}{% if " + same + " %}" + refuse + "{% endif %}<|{{", 1)
        train, _, report = sft.load_conversations(args, tokenizer)
    finally:
        tokenizer.chat_template = template
    reasons = r"; 1 dropped, refused by the chat template \(two in a row\); 1 dropped, without a token to train\n"
    assert len(train) == 1 and re.search(f"^1 training rows .*{reasons}1 held-out rows", report)


# ---- columns and rewards


@pytest.mark.parametrize(
    "row",
    [
        {"question": "1+1=", "answer": "2"},
        {"problem": "1+1=", "solution": "2"},
        {"prompt": "1+1=", "question": "9", "problem": "9", "completion": "2", "answer": "9", "solution": "9"},
        {"question": "1+1=", "problem": "9", "answer": "2", "solution": "9"},
    ],
)
def test_names_of_columns(embedded, row):
    _, tokenizer, stop_ids = embedded
    ids, trained = sft.encode_row(tokenizer, row, "", stop_ids)
    assert tokenizer.decode(ids) == "<|user|>1+1=<|assistant|>2<|end|>"
    assert trained_text(tokenizer, ids, trained) == "2<|end|>"


def test_gsm8k_as_the_hub_has_it_is_trained_on_its_answers_as_they_stand(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in (sft.HERE / "tests" / "data" / "gsm8k_20.jsonl").read_text().splitlines()]
    write_hub_folder(tmp_path / "openai" / "gsm8k", {"main": {"train": rows[:15], "test": rows[15:]}})
    tokenizer = make_tokenizer(*FORMS["chatml"])
    folder = make_folder(tmp_path / "model", tokenizer)
    flags = {"max_completion_length": 1000, "minibatch_size": 2, "num_steps": 1, "eval_prompts": 5}
    seen, collate = [], sft.collate
    monkeypatch.setattr(sft, "collate", lambda rows, *rest: seen.extend(rows) or collate(rows, *rest))
    assert run(tmp_path, model=folder, dataset="openai/gsm8k:main", **flags)[-1]["loss/nll"] > 0
    remark = "trained on their answer: there is no column completion"
    data = json.loads((tmp_path / "run" / "args.json").read_text())["run"]["data"]
    assert re.match(rf"15 training rows \(\w+\); 15 {remark}$", data[0])
    assert re.match(rf"5 held-out rows \(\w+\); 5 {remark}$", data[1])
    texts = {trained_text(tokenizer, row["ids"], row["trained"]) for row in seen}
    assert texts < {row["answer"] + "<|im_end|>" for row in rows} and len(texts) == 7
    assert any("<<" in text and "\n#### " in text for text in texts)


def write_rewarded(path, rewards):
    row = {"prompt": "1+1=", "completion": "2"}
    return write_rows(path, [row if reward == "none" else {**row, "reward": reward} for reward in rewards])


@pytest.mark.parametrize(
    "min_reward, dropped",
    [
        (1, "; 2 dropped, without reward; 3 dropped, of a reward below 1"),
        (0.5, "; 2 dropped, without reward; 2 dropped, of a reward below 0.5"),
        (-0.5, "; 2 dropped, without reward; 1 dropped, of a reward below -0.5"),
        (None, ""),
    ],
)
def test_rows_of_too_low_a_reward_or_of_none_are_dropped_and_counted(tmp_path, min_reward, dropped):
    dataset = write_rewarded(tmp_path / "rows.jsonl", [1.0, None, 0.5, -0.5, -0.75, 2.5, float("nan"), 1.0, 1.0, 1.0])
    run(tmp_path, dataset=dataset, min_reward=min_reward)
    said = json.loads((tmp_path / "run" / "args.json").read_text())["run"]["data"][0]
    count = 8 - sum(map(int, re.findall(r"(\d+) dropped", dropped)))
    assert re.sub(r" \(\w+\)", "", said) == f"{count} training rows{dropped}"


@pytest.mark.parametrize(
    "rewards, message",
    [
        (["none"] * 4, "training row 1: --min-reward needs a column reward; found prompt, completion"),
        (["1", "1", "1", "1"], "training row 1: reward must be a number, not '1'"),
        ([True] * 4, "training row 1: reward must be a number, not True"),
        ([0] * 4, "0 training rows .*; 2 dropped, of a reward below 1"),
    ],
)
def test_what_min_reward_cannot_use_is_one_line(tmp_path, rewards, message):
    with pytest.raises(SystemExit, match=message) as error:
        run(tmp_path, dataset=write_rewarded(tmp_path / "rows.jsonl", rewards), min_reward=1.0)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_ordinary_tokens_survive_decoding(embedded):
    _, tokenizer, _ = embedded
    text = "<think>17+58=75</think>\\boxed{75}"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len("17+58=75") + 2 + len("75}") + 1  # <think>, </think> and \boxed{ are one token each
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
