"""Tests of examples/judge.py: its verdicts agree with the model's logits, and other scripts read the file it writes."""

import runpy
import sys

import pytest
import torch
from toy import FORMS, ROOT, TINY, make_folder, make_tokenizer, parse, read_jsonl, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpo
import reward_model

JUDGE = ROOT / "examples" / "judge.py"
WORDS = "red green blue one two three up down left right in out".split()
PAIRS = [{"prompt": f"Say {a}.", "chosen": a, "rejected": b} for a, b in zip(WORDS, WORDS[5:] + WORDS[:5])]


@pytest.fixture
def judge(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command on rows and returns the rows that it wrote and what it printed."""

    def call(rows, *flags):
        write_jsonl(tmp_path / "pairs.jsonl", rows)
        out = tmp_path / "new" / f"{len([*tmp_path.glob('new/*')])}.jsonl"
        line = ["judge.py", "--dataset", str(tmp_path / "pairs.jsonl"), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", [*line, *map(str, flags)])
        monkeypatch.setattr(dpo, "read_rows", dpo.read_rows)  # it replaces this
        runpy.run_path(str(JUDGE), run_name="__main__")
        return read_jsonl(out), capsys.readouterr().out

    return call


@pytest.fixture(params=["chatml", "gemma"])
def chat_model(request, tmp_path):
    """Return the folder of a random model with this chat template, whose large weights give clear preferences."""
    folder = make_folder(tmp_path / "model", make_tokenizer(*FORMS[request.param]))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8.0 if weight.ndim > 1 else 1.0)
    model.save_pretrained(folder)
    return folder, model, tokenizer


def next_logprobs(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_by_logprob_the_likelier_completion_per_token_is_chosen(judge):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TINY), AutoTokenizer.from_pretrained(TINY)
    rows = read_jsonl(ROOT / "data" / "preferences" / "test.jsonl")[:24]
    expected = []
    for row in rows:
        means = []
        for text in (row["chosen"], row["rejected"]):
            chat = [{"role": "user", "content": row["prompt"]}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            ids = [*tokenizer(text)["input_ids"], dpo.find_turn_end(tokenizer)]
            logprobs = next_logprobs(model, [*prompt, *ids])[len(prompt) - 1 : -1]
            means.append(logprobs.gather(1, torch.tensor(ids).unsqueeze(1)).mean().item())
        expected.append(means[0] > means[1])
    written, told = judge(rows)
    assert 0 < sum(expected) < len(rows)
    assert [row["chosen"] == before["chosen"] for row, before in zip(written, rows)] == expected
    kinds = [row["kind"] for row in rows]
    assert f"{sum(expected) / 24:.3f} of 24  all\n" in told
    own = [agrees for agrees, kind in zip(expected, kinds) if kind == kinds[0]]
    assert f"{sum(own) / len(own):.3f} of {len(own)}  {kinds[0]}\n" in told


def test_by_chat_both_orders_are_asked_and_their_probabilities_averaged(judge, chat_model):
    folder, model, tokenizer = chat_model
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "AB"]
    question = runpy.run_path(str(JUDGE))["QUESTION"]
    chosen, says_a = [], []
    for row in PAIRS:
        texts, probabilities = [row["chosen"], row["rejected"]], []
        for order in (texts, texts[::-1]):
            chat = [{"role": "user", "content": question.format(row["prompt"], *order)}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
            probabilities.append(next_logprobs(model, ids)[-1, letters].softmax(-1)[0].item())  # of A
        chosen.append(texts[(probabilities[0] + 1 - probabilities[1]) / 2 < 0.5])
        says_a.append([probability > 0.5 for probability in probabilities])
    written, told = judge(PAIRS, "--by", "chat", "--model", folder)
    swapped = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in PAIRS]
    for by in ("chat", "logprob"):  # the order of a pair changes no verdict
        flags = ("--by", by, "--model", folder)
        assert judge(PAIRS, *flags)[0] == judge(swapped, *flags)[0]
    assert [row["chosen"] for row in written] == chosen
    assert 0 < sum(text == row["chosen"] for text, row in zip(chosen, PAIRS)) < len(PAIRS)
    biased = sum(first == second for first, second in says_a)
    said = f"position bias: {sum(map(sum, says_a)) / 24:.3f} of answers are A, {biased} pairs get the same letter"
    assert 0 < biased and said in told


@pytest.mark.parametrize("by", ["logprob", "chat"])
def test_dialogues_are_judged_and_dpo_and_reward_model_take_what_was_written(judge, tmp_path, by):
    folder = make_folder(tmp_path / "model", make_tokenizer(*FORMS["llama 3"]))
    said = [f"\n\nHuman: {row['prompt']}\n\nAssistant: " for row in PAIRS]
    rows = [{key: start + row[key] for key in ("chosen", "rejected")} for start, row in zip(said, PAIRS)]
    rows.append(rows[0] | {"rejected": rows[0]["chosen"]})
    written, told = judge(rows, "--by", by, "--model", folder)
    assert len(written) == len(PAIRS)
    assert f"{len(rows)} training rows; read: {len(PAIRS)} to train on, 0 held out\n" in told
    for row, before in zip(written, PAIRS):
        assert row["prompt"] == [{"role": "user", "content": before["prompt"]}]
        assert {row["chosen"], row["rejected"]} == {before["chosen"], before["rejected"]}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = {"dataset": tmp_path / "new" / "0.jsonl", "max_prompt_length": 64, "eval_prompts": 0}
    for script in (dpo, reward_model):
        pairs, _ = script.load_rows(parse(script, **settings), tokenizer)
        assert len(pairs) == len(PAIRS)


def test_a_judge_that_cannot_say_a_or_b_and_a_file_that_exists_are_one_line(judge, tmp_path):
    with pytest.raises(SystemExit, match="--out .* exists"):
        judge(PAIRS, "--out", tmp_path)
    with pytest.raises(SystemExit, match="--by chat needs a tokenizer that has the letters A and B"):
        judge(PAIRS, "--by", "chat")
