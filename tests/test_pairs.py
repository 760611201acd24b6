"""Preference pairs: the forms rows may come in, what is dropped, and the embedded pairs."""

import ast
import json
import math
import re
from collections import Counter
from pathlib import Path

import datasets
import pytest
import torch
from test_data import ALTERNATING, TEMPLATE, word_tokenizer, write_rows
from tiny import load_scorer
from transformers import AutoTokenizer

import dpo
import ppo_rlhf
import reward_model

ROOT = Path(reward_model.__file__).parent
TINY = ROOT / "models" / "tiny"
PREFERENCES = ROOT / "data" / "preferences"
HH = ROOT / "tests" / "data" / "hh_60.jsonl"
ASSISTANT = "\n\nAssistant:"
STOP_ID = 5  # <|end|> of models/tiny
ROWS = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": f"{i + 2}"} for i in range(1, 9)]


@pytest.fixture(autouse=True)
def cache_in_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def load(tmp_path, rows, tokenizer, lengths=(32, 48), num_held_out=1, system_prompt="", stop_id=STOP_ID):
    dataset = rows if isinstance(rows, str) else write_rows(tmp_path / "pairs.jsonl", rows)
    return reward_model.load_pairs(dataset, tokenizer, system_prompt, *lengths, num_held_out, stop_id)


def texts_of(pair, tokenizer):
    """(prompt, chosen, rejected) of a pair, decoded with special tokens."""
    return tuple(tokenizer.decode(pair[key]) for key in ("prompt_ids", "chosen_ids", "rejected_ids"))


def counts(report, split):
    """The numbers in the report's line about a split: kept, without shared prompt, empty, identical, too long."""
    line = next(line for line in report.splitlines() if f" {split} rows" in line)
    kinds = ("without shared prompt", "empty", "identical", r"longer than \d+ \+ \d+ tokens")
    kinds = (f"{split} rows", *(f"dropped, {kind}" for kind in kinds))
    found = (re.search(rf"(\d+) {kind}", line) for kind in kinds)
    return tuple(int(match[1]) if match else 0 for match in found)


# ---- forms of a row

HISTORY = [user("1+1="), assistant("2"), user("2+2=")]
CONVERSATIONS = {"chosen": [*HISTORY, assistant("4")], "rejected": [*HISTORY, assistant("5")]}
DIALOGUE = "\n\nHuman: 1+1=\n\nAssistant: 2\n\nHuman: 2+2=\n\nAssistant:"
FORMS = [
    ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "2+2="),
    ({"prompt": HISTORY, "chosen": "4", "rejected": "5"}, HISTORY),
    (CONVERSATIONS, HISTORY),
    ({"prompt": "2+2=", **CONVERSATIONS}, HISTORY),
    ({"prompt": HISTORY, "chosen": [assistant("4")], "rejected": [assistant("5")]}, HISTORY),
    ({"prompt": "2+2=", "chosen": [assistant("4")], "rejected": [assistant("5")]}, "2+2="),
    ({"chosen": DIALOGUE + " 4", "rejected": DIALOGUE + " 5"}, HISTORY),
    (
        {"prompt": HISTORY[:1], "chosen": [*HISTORY[1:], assistant("4")], "rejected": [*HISTORY[1:], assistant("5")]},
        HISTORY,
    ),
    ({"prompt": HISTORY, **CONVERSATIONS}, HISTORY),
]


@pytest.mark.parametrize("row, expected", FORMS)
def test_forms_of_a_row(row, expected):
    assert reward_model.split_pair(row, True) == (expected, "4", "5")


def test_a_prompt_of_none_is_no_prompt():
    assert reward_model.split_pair({"prompt": None, **CONVERSATIONS}, True) == (HISTORY, "4", "5")
    row = {"prompt": None, "chosen": DIALOGUE + " 4", "rejected": DIALOGUE + " 5"}
    assert reward_model.split_pair(row, True) == (HISTORY, "4", "5")


def test_a_dialogue_stays_text_without_a_chat_template():
    row = {"chosen": DIALOGUE + " 4", "rejected": DIALOGUE + " 5"}
    assert reward_model.split_pair(row, False) == (DIALOGUE, " 4", " 5")


@pytest.mark.parametrize("has_template", [True, False])
def test_dialogues_part_where_the_last_common_turn_of_the_assistant_begins(has_template):
    """Not where the texts part, which is inside the answers; nor at their own last turns, which differ."""
    row = {"chosen": DIALOGUE + " 44\n\nHuman: 3+3=\n\nAssistant: 6", "rejected": DIALOGUE + " 45"}
    prompt, chosen, rejected = reward_model.split_pair(row, has_template)
    assert prompt == (HISTORY if has_template else DIALOGUE)
    assert (chosen.strip(), rejected.strip()) == ("44\n\nHuman: 3+3=\n\nAssistant: 6", "45")


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": "4", "rejected": "5"},
        {"chosen": "\n\nHuman: 2+2=\n\nAssistant: 4", "rejected": "\n\nHuman: 3+3=\n\nAssistant: 6"},
        {"chosen": [user("2+2="), assistant("4")], "rejected": [user("3+3="), assistant("6")]},
        {"chosen": [assistant("4")], "rejected": [assistant("5")]},
        {"chosen": None, "rejected": [user("2+2="), assistant("5")]},
        {"prompt": "2+2=", "chosen": [assistant("4")], "rejected": [assistant("2"), user("2+2="), assistant("5")]},
        {"prompt": " ", "chosen": "4", "rejected": "5"},
    ],
)
def test_no_prompt_is_shared(row):
    assert reward_model.split_pair(row, True)[0] is None


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_every_form_is_encoded_with_the_chat_template_and_a_stop_token(tmp_path, tokenizer, form):
    row, expected = FORMS[form]
    (pair, *_), _, _ = load(tmp_path, [row] * 3, tokenizer)
    prompt = "<|user|>2+2=<|assistant|>"
    prompt = prompt if isinstance(expected, str) else "<|user|>1+1=<|assistant|>2<|end|>" + prompt
    assert texts_of(pair, tokenizer) == (prompt, "4<|end|>", "5<|end|>")


def test_a_dialogue_is_encoded_as_text_without_a_chat_template(tmp_path, tokenizer):
    tokenizer.chat_template = None
    rows = [{"chosen": DIALOGUE + " 4", "rejected": DIALOGUE + " 5"}] * 3
    (pair, *_), _, _ = load(tmp_path, rows, tokenizer, lengths=(100, 9))
    assert pair["prompt_ids"] == tokenizer(DIALOGUE)["input_ids"]
    assert texts_of(pair, tokenizer)[1:] == (" 4<|end|>", " 5<|end|>")


def test_only_the_prompt_begins_with_a_bos_token(tmp_path):
    tokenizer = word_tokenizer(TEMPLATE)
    rows = [{"prompt": "one two", "chosen": "three", "rejected": "four two"}] * 3
    (pair, *_), _, _ = load(tmp_path, rows, tokenizer, system_prompt="be brief", stop_id=7)
    prompt, chosen, rejected = (" ".join(tokenizer.convert_ids_to_tokens(ids)) for ids in list(pair.values())[:3])
    assert prompt == "<bos> system be brief user one two assistant"
    last = tokenizer.convert_ids_to_tokens(7)
    assert (chosen, rejected) == (f"three {last}", f"four two {last}")


def test_every_completion_ends_in_one_stop_token(tmp_path, tokenizer):
    train, held_out, _ = load(tmp_path, ROWS, tokenizer)
    assert (len(train), len(held_out)) == (7, 1)
    for pair, row in zip(train + held_out, ROWS):
        for key in ("chosen", "rejected"):
            assert pair[f"{key}_ids"] == tokenizer(row[key], add_special_tokens=False)["input_ids"] + [STOP_ID]
            assert pair[f"{key}_ids"].count(STOP_ID) == 1


def test_kinds_are_kept_where_there_are_any(tmp_path, tokenizer):
    assert [pair["kind"] for pair in load(tmp_path, ROWS, tokenizer)[0]] == [None] * 7
    rows = [{**row, "kind": f"kind {i % 2}"} for i, row in enumerate(ROWS)]
    train, _, _ = reward_model.load_pairs(write_rows(tmp_path / "k.jsonl", rows), tokenizer, "", 32, 48, 1, STOP_ID)
    assert [pair["kind"] for pair in train] == ["kind 0", "kind 1"] * 3 + ["kind 0"]


# ---- dirt

DIRT = {
    "identical": [({"rejected": "2", "chosen": "2"}, (0, 0, 1, 0))],
    "empty": [({"rejected": text}, (0, 1, 0, 0)) for text in (None, "", "  ", "\n")],
    "empty winner": [({"chosen": text}, (0, 1, 0, 0)) for text in (None, "", "  ")],
    "no prompt": [({"prompt": prompt}, (1, 0, 0, 0)) for prompt in (None, "")],
    "long prompt": [({"prompt": "1+" * 20 + "1="}, (0, 0, 0, 1))],
    "long winner": [({"chosen": "1" * 48}, (0, 0, 0, 1))],
    "long loser": [({"rejected": "1" * 48}, (0, 0, 0, 1))],
}


@pytest.mark.parametrize("change, expected", [case for cases in DIRT.values() for case in cases])
def test_dirt_is_dropped_and_counted_by_kind(tmp_path, tokenizer, change, expected):
    rows = [{**ROWS[0], **change}, *ROWS]
    train, held_out, report = load(tmp_path, rows, tokenizer)
    expected_texts = [(f"<|user|>{r['prompt']}<|assistant|>", r["chosen"], r["rejected"]) for r in ROWS]
    found = [texts_of(pair, tokenizer) for pair in train + held_out]
    assert [(p, c.removesuffix("<|end|>"), r.removesuffix("<|end|>")) for p, c, r in found] == expected_texts
    assert counts(report, "training") == (7, *expected)
    assert counts(report, "held-out") == (1, 0, 0, 0, 0)


def test_dirt_among_conversations_is_counted_by_kind(tmp_path, tokenizer):
    good = CONVERSATIONS
    dirty = [
        {**good, "rejected": [user("3+3="), assistant("6")]},  # another prompt
        {**good, "rejected": [*HISTORY, assistant("")]},
        {**good, "rejected": [*HISTORY, assistant(None)]},
        {**good, "rejected": good["chosen"]},
        {**good, "rejected": [*HISTORY, assistant("1" * 48)]},
    ]
    train, _, report = load(tmp_path, [*dirty, *[good] * 4], tokenizer)
    assert len(train) == 3 and counts(report, "training") == (3, 1, 2, 1, 1)


def test_the_longest_that_fits_is_kept(tmp_path, tokenizer):
    rows = [{"prompt": "1+1=", "chosen": "1" * 7, "rejected": "2"}] * 3  # 6 tokens, and 7 with a stop token
    assert len(load(tmp_path, rows, tokenizer, lengths=(6, 8))[0]) == 2
    for lengths in ((5, 8), (6, 7)):
        with pytest.raises(SystemExit, match="0 training rows .*; 2 dropped, longer than"):
            load(tmp_path, rows, tokenizer, lengths=lengths)


def test_dirt_in_the_held_out_rows_is_counted_too(tmp_path, tokenizer):
    _, held_out, report = load(tmp_path, [*ROWS, {**ROWS[0], "chosen": ""}], tokenizer, num_held_out=2)
    assert len(held_out) == 1 and counts(report, "held-out") == (1, 0, 1, 0, 0)


@pytest.mark.parametrize(
    "rows, expected",
    [
        (ROWS[:1], "1 training rows.*--eval-prompts 1"),
        ([{"prompt": "1+1=", "answer": "2"}] * 4, "needs the columns chosen and rejected; found prompt, answer"),
        ([{"prompt": "1+1=", "chosen": "2"}] * 4, "needs the columns chosen and rejected; found prompt, chosen"),
        ([{**ROWS[0], "rejected": ROWS[0]["chosen"]}] * 4, "0 training rows .*; 3 dropped, identical"),
        ([*ROWS, {**ROWS[0], "chosen": ""}], "0 held-out rows .*; 1 dropped, empty"),
    ],
)
@pytest.mark.parametrize("script", [reward_model, dpo])
def test_too_few_rows_and_wrong_columns_exit_in_one_line(tmp_path, tokenizer, script, rows, expected):
    dataset = write_rows(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(SystemExit, match=expected) as caught:
        script.load_pairs(dataset, tokenizer, "", 32, 48, 1, STOP_ID)
    assert isinstance(caught.value.code, str) and "\n" not in caught.value.code and dataset in caught.value.code


WORDS = [{"prompt": "one and one", "chosen": "two", "rejected": "three"}]  # of a mixed column datasets decodes JSON
BAD_VALUES = [7, True, {"a": 1}, ["a", "b"], [1], [{"content": "2"}], [{"role": "assistant"}]]


@pytest.mark.parametrize("column", ["prompt", "chosen", "rejected"])
@pytest.mark.parametrize("value", BAD_VALUES)
def test_what_is_no_text_is_an_error_of_its_row(tmp_path, tokenizer, column, value):
    with pytest.raises(SystemExit, match=rf"pairs.jsonl: training row 7: {column} must be a text or a list of mess"):
        load(tmp_path, [*WORDS * 6, {**WORDS[0], column: value}, *WORDS * 2], tokenizer)


def test_a_list_and_a_string_make_no_pair(tmp_path, tokenizer):
    with pytest.raises(SystemExit, match="training row 2: chosen and rejected must both be"):
        load(tmp_path, [*WORDS, {**WORDS[0], "chosen": [assistant("two")]}, *WORDS * 3], tokenizer)


def test_pairs_that_no_template_takes_or_whose_prompt_is_answered_are_dropped_and_counted(tmp_path):
    tokenizer = word_tokenizer(ALTERNATING)
    prompts = [[user("one"), user("two")], [user("one"), assistant("two")], [user("one")], [user("two")]]
    rows = [{"prompt": prompt, "chosen": "three", "rejected": "four"} for prompt in prompts]
    train, held_out, report = load(tmp_path, rows, tokenizer, stop_id=7)
    assert (len(train), len(held_out)) == (1, 1)
    assert "; 1 dropped, refused by the chat template (roles must alternate)" in report
    assert "; 1 dropped, whose prompt ends in the assistant's turn\n" in report


# ---- batches


def test_prompts_are_padded_left_and_completions_right():
    pairs = [
        {"prompt_ids": [7], "chosen_ids": [1, 5], "rejected_ids": [2, 2, 2, 5]},
        {"prompt_ids": [8, 9, 9], "chosen_ids": [3, 3, 5], "rejected_ids": [4, 5]},
    ]
    batch = reward_model.collate_pairs(pairs, 0, "cpu")
    assert {key: value.tolist() for key, value in batch.items()} == {
        "prompt_ids": [[0, 0, 7], [8, 9, 9]],
        "prompt_mask": [[0, 0, 1], [1, 1, 1]],
        "chosen_ids": [[1, 5, 0, 0], [3, 3, 5, 0]],
        "chosen_mask": [[1, 1, 0, 0], [1, 1, 1, 0]],
        "rejected_ids": [[2, 2, 2, 5], [4, 5, 0, 0]],
        "rejected_mask": [[1, 1, 1, 1], [1, 1, 0, 0]],
        "lengths": [2 * (1 + 4), 2 * (3 + 3)],
    }


def test_scores_do_not_depend_on_the_padding_or_on_the_company(tmp_path, tokenizer):
    """And a padding token that is a stop token as well would not be taken for the end: length finds it."""
    torch.manual_seed(0)
    model, _ = load_scorer(reward_model, TINY)
    pairs, _, _ = load(tmp_path, str(PREFERENCES), tokenizer)

    def scores(pairs, pad_id):
        batch = reward_model.collate_pairs(pairs, pad_id, "cpu")
        keys = ("prompt_ids", "prompt_mask", "chosen_ids", "chosen_mask")
        with torch.no_grad():
            return reward_model.sequence_scores(model, *(batch[key] for key in keys))

    together = scores(pairs[:8], 0)
    assert together.std() > 0.01
    torch.testing.assert_close(together, torch.cat([scores([pair], 0) for pair in pairs[:8]]), atol=1e-4, rtol=0)
    torch.testing.assert_close(together, scores(pairs[:8], STOP_ID), atol=1e-4, rtol=0)


# ---- dialogues of Anthropic's HH


def hh_rows():
    return [json.loads(line) for line in HH.read_text().splitlines()]


def expected_split(row):
    """(prompt, chosen, rejected) by looking from turn to turn of the assistant."""
    chosen, rejected = (row[key].split(ASSISTANT) for key in ("chosen", "rejected"))
    same = 0
    while same + 1 < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    return ASSISTANT.join(chosen[:same]) + ASSISTANT, *(ASSISTANT.join(turns[same:]) for turns in (chosen, rejected))


def test_hh_dialogues_are_split_at_the_last_common_turn():
    rows = hh_rows()
    assert len(rows) == 60
    for row in rows:
        assert reward_model.split_pair(row, False) == expected_split(row)
        prompt, chosen, rejected = reward_model.split_pair(row, True)
        text, *completions = expected_split(row)
        assert (chosen, rejected) == tuple(completion.strip() for completion in completions)
        assert prompt[0]["role"] == prompt[-1]["role"] == "user"
        contents = re.split(r"\n\n(?:Human|Assistant):", text)[1:-1]
        assert [message["content"] for message in prompt] == [content.strip() for content in contents]


@pytest.mark.parametrize("template", [True, False])
def test_hh_pairs_are_kept_or_counted(tmp_path, tokenizer, template):
    tokenizer.chat_template = tokenizer.chat_template if template else None
    train, held_out, report = load(tmp_path, str(HH), tokenizer, lengths=(128, 128), num_held_out=10)
    expected = {"training": Counter(), "held-out": Counter()}
    for i, row in enumerate(hh_rows()):
        prompt, *texts = reward_model.split_pair(row, template)
        prompt_ids = reward_model.encode_prompt(tokenizer, prompt, "")
        longest = max(len(tokenizer(text)["input_ids"]) for text in texts)
        kind = "empty" if not all(map(str.strip, texts)) else "kept"
        kind = "too long" if kind == "kept" and (len(prompt_ids) > 128 or longest > 127) else kind
        expected["training" if i < 50 else "held-out"][kind] += 1
    for split, pairs in (("training", train), ("held-out", held_out)):
        kinds = expected[split]
        assert counts(report, split) == (kinds["kept"], 0, kinds["empty"], 0, kinds["too long"])
        assert len(pairs) == kinds["kept"] > 0
    assert expected["training"]["empty"] + expected["held-out"]["empty"] == 3
    assert expected["training"]["too long"] > 0


@pytest.mark.parametrize("script", [reward_model, dpo])
def test_two_steps_on_hh_dialogues(tmp_path, script, capsys):
    settings = {"eval_dataset": ""} if script is dpo else {}
    lengths = {"max_prompt_length": 128, "max_completion_length": 128}
    sizes = {"num_steps": 2, "minibatch_size": 4, "eval_prompts": 6, "eval_every": 2, "warmup_steps": 0}
    run = tmp_path / "run"
    script.main(script.Args(model=str(TINY), dataset=str(HH), run_dir=str(run), **lengths, **sizes, **settings))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert lines[1]["optim/grad_norm"] > 0 and lines[0]["eval/pair_loss"] != lines[2]["eval/pair_loss"]
    assert sum(counts(capsys.readouterr().out, "training")) == 54


def test_a_step_of_ppo_on_the_prompts_of_hh_dialogues(tmp_path, monkeypatch, capsys):
    """They have no answers, so no accuracy is logged."""
    monkeypatch.setattr(ppo_rlhf, "NORM_SAMPLES", 8)
    lengths = {"max_prompt_length": 128, "max_completion_length": 16}
    sizes = {"num_steps": 1, "prompts_per_step": 4, "minibatch_size": 4, "eval_prompts": 2, "warmup_steps": 0}
    run = tmp_path / "run"
    ppo_rlhf.main(ppo_rlhf.Args(model=str(TINY), dataset=str(HH), run_dir=str(run), **lengths, **sizes))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [sorted(key for key in line if key.startswith("eval/")) for line in lines]
    assert found == [["eval/reward", "eval/score"]] * 2
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert lines[1]["optim/grad_norm"] > 0
    output = capsys.readouterr().out
    assert re.search(r"53 training rows .*; 5 dropped, longer than 128 tokens; 53 without answer\n", output)
    assert "score " in output and "accuracy" not in output


# ---- the embedded pairs


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def classify(prompt, completion):
    """Add the sum up again and say what a completion shows, and whether it is right."""
    first, *others = map(int, prompt.removesuffix("=").split("+"))
    steps, total = [], first
    for number in others:
        steps.append(f"{total}+{number}={total + number}")
        total += number
    shown, box = re.fullmatch(r"(?:<think>(.*)</think>)?\\boxed\{(.*)\}", completion).groups()
    if shown is None:
        return "right answer" if box == str(total) else "wrong answer"
    return "right work" if (shown, box) == (";".join(steps), str(total)) else "wrong work"


@pytest.fixture(scope="module")
def files():
    return {name: read_rows(PREFERENCES / f"{name}.jsonl") for name in ("train", "test")}


@pytest.fixture(scope="module")
def kinds():
    """The table of shares in data/preferences/make.py."""
    tree = ast.parse((PREFERENCES / "make.py").read_text())
    named = (node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name))
    return next(ast.literal_eval(node.value) for node in named if node.targets[0].id == "KINDS")


def test_kinds_of_the_embedded_pairs_are_what_their_texts_say(files, kinds):
    for row in files["train"] + files["test"]:
        kind = tuple(classify(row["prompt"], row[key]) for key in ("chosen", "rejected"))
        assert kind in kinds and row["kind"] == ", ".join(kind), row
        assert list(row) == ["prompt", "chosen", "rejected", "kind"] and row["chosen"] != row["rejected"]


@pytest.mark.parametrize("name, num_rows", [("train", 4096), ("test", 512)])
def test_shares_of_the_kinds(files, kinds, name, num_rows):
    found = Counter(row["kind"] for row in files[name])
    assert found.total() == num_rows
    assert sum(kinds.values()) == pytest.approx(1)
    assert found.keys() == {", ".join(kind) for kind in kinds}
    for kind, share in kinds.items():
        assert found[", ".join(kind)] == pytest.approx(share * num_rows, abs=1), kind


def test_the_table_of_kinds_is_documented(kinds):
    documented = re.findall(r"^    (right \w+, \w+ \w+) +(\d+) %", (PREFERENCES / "make.py").read_text(), re.MULTILINE)
    assert {kind: int(percent) / 100 for kind, percent in documented} == {", ".join(k): v for k, v in kinds.items()}


def test_no_pair_is_there_twice(files):
    rows = [tuple(row.values()) for row in files["train"] + files["test"]]
    assert len(set(rows)) == len(rows)


def test_prompts_of_the_embedded_pairs_are_fresh(files):
    train, test = ({row["prompt"] for row in files[name]} for name in ("train", "test"))
    assert not train & test
    for path in (ROOT / "data" / "addition").glob("*.jsonl"):
        assert not {row["prompt"] for row in read_rows(path)} & (train | test), path


def test_the_embedded_pairs_load(tokenizer):
    """A completion that was sampled up to the maximum has no room for a stop token."""
    train, held_out, report = reward_model.load_pairs(str(PREFERENCES), tokenizer, "", 32, 48, 512, STOP_ID)
    for pairs, split, num_rows in ((train, "training", 4096), (held_out, "held-out", 512)):
        kept, *dropped, too_long = counts(report, split)
        assert (kept + too_long, dropped) == (num_rows, [0, 0, 0]) and kept == len(pairs) >= 0.99 * num_rows
    ids = {index for pair in train + held_out for key in ("chosen_ids", "rejected_ids") for index in pair[key]}
    assert tokenizer.unk_token_id not in ids
