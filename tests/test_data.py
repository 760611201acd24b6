"""Rows of prompts and of pairs: what is read, left out and refused: python -m pytest tests/test_data.py"""

import datetime
import json
import re
import subprocess
import sys
from collections import Counter

import datasets
import pytest
from tiny import ROOT, TEMPLATE, assistant, read_jsonl, user, word_tokenizer, write_rows

import grpo
import ppo_rlhf
import reward_model

pytestmark = pytest.mark.usefixtures("alone")
DATA = ROOT / "data"
ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(1, 11)]


def load(dataset, tokenizer, **settings):
    """Training and held-out prompts."""
    args = {"max_prompt_length": 32, "eval_prompts": 0, "system_prompt": ""} | settings
    return grpo.load_prompts(grpo.Args(dataset=str(dataset), **args), tokenizer)


def load_rows(folder, rows, tokenizer, **settings):
    """Training and held-out prompts of these rows."""
    return load(write_rows(folder / "rows.jsonl", rows), tokenizer, **settings)


def prompts_of(rows):
    return [row["prompt"] for row in rows]


# ---- files and folders


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet"])
def test_a_file_gives_a_sample_of_its_rows_as_held_out(tmp_path, tokenizer, suffix):
    dataset = write_rows(tmp_path / f"rows{suffix}", ROWS)
    train, held_out = load(dataset, tokenizer, eval_prompts=3)
    assert prompts_of(held_out) == ["2+1=", "5+1=", "8+1="]
    assert prompts_of(train) == [prompt for prompt in prompts_of(ROWS) if prompt not in prompts_of(held_out)]


@pytest.mark.parametrize("split", ["train", "test"])
def test_held_out_rows_of_sorted_data_are_from_all_over(tmp_path, split):
    rows = [{"place": i} for i in range(1000)]
    write_rows(tmp_path / "data" / "train.jsonl", rows)
    write_rows(tmp_path / "data" / f"{split}.jsonl", rows)
    (_, _, held_out), _ = grpo.load_splits(str(tmp_path / "data"), 200)
    places = [row["place"] for row in held_out]
    assert places == sorted({*places})
    quarters = Counter(place // 250 for place in places)
    assert all(30 <= quarters[quarter] <= 70 for quarter in range(4))


@pytest.mark.parametrize(
    "splits, suffix, expected",
    [
        (["train", "validation", "test"], "", ["test", "train"]),
        (["train", "validation"], "", ["validation", "train"]),
        (["train_prefs", "test_prefs", "train_sft", "test_sft"], "", ["test_sft", "train_sft"]),  # the shortest name
        (["train_prefs", "test_prefs", "train_sft"], "::train_prefs", ["test_prefs", "train_prefs"]),
        (["train", "odd"], ":main:odd", ["odd", "odd"]),
        (["test"], ":main", ["test", "train"]),
    ],
)
def test_a_config_and_a_split_are_named_after_colons(tmp_path, splits, suffix, expected):
    """The folder is a clone of a Hub data set: its README.md names configs and files."""
    lines = ["---", "configs:", "- config_name: main", "  data_files:"]
    for split in splits:
        write_rows(tmp_path / f"{split}.jsonl", [{"prompt": f"{split} {i}"} for i in range(4)])
        lines += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (tmp_path / "README.md").write_text("\n".join([*lines, "---"]))
    (*held_out, rows), (*training, others) = grpo.load_splits(f"{tmp_path}{suffix}", 3)
    assert held_out == ["held-out", expected[0]]
    assert training == ["training", expected[1]]
    assert {row["prompt"].split()[0] for row in rows} == {expected[0]}
    assert {row["prompt"].split()[0] for row in others} <= {expected[1]}


def test_a_test_split_alone_is_evaluated_but_not_trained_on(tmp_path, tokenizer):
    write_rows(tmp_path / "test.jsonl", ROWS)
    train, held_out = load(tmp_path, tokenizer, eval_prompts=4, num_steps=0)
    assert train == []
    assert len(held_out) == 4
    with pytest.raises(SystemExit, match=r"no training row is left .--eval-prompts holds out 4.: 0 training rows of "):
        load(tmp_path, tokenizer, eval_prompts=4)


GOOD_LINE = '{"prompt": "1+1=", "answer": "2"}\n'


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.jsonl", ""),
        ("a.jsonl", GOOD_LINE * 6 + '{"prompt": "1+1=", "answer": \n' + GOOD_LINE),
        ("a.csv", "prompt,answer\n1,2\n1,2,3\n"),
        ("a.parquet", "PAR1"),
    ],
)
def test_a_data_set_that_is_damaged_or_empty_is_not_trained_on(tmp_path, tokenizer, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises((ValueError, StopIteration, datasets.exceptions.DatasetGenerationError)):
        load(tmp_path / name, tokenizer)


# ---- columns


@pytest.mark.parametrize("names", [("prompt", "answer"), ("question", "solution"), ("problem", "ground_truth")])
def test_a_prompt_has_its_answer_and_the_other_columns_of_its_row(tmp_path, tokenizer, names):
    rows = [dict(zip(names, (f"1+{i}=", i + 1)), level=i) for i in range(4)]
    train, _ = load_rows(tmp_path, rows, tokenizer)
    for i, prompt in enumerate(train):
        assert tokenizer.decode(prompt["prompt_ids"]) == f"<|user|>1+{i}=<|assistant|>"
        assert prompt["prompt"] == f"1+{i}="
        assert prompt["answer"] == str(i + 1)
        assert prompt["level"] == i


@pytest.mark.parametrize(
    "value, text",
    [(0.00001, "0.00001"), (1e22, "1" + "0" * 22), (3.0, "3.0"), (72, "72"), (None, ""), (float("nan"), "")]
    + [("007", "007"), ("[1, 2]", "[1, 2]"), ('[{"role": "user", "content": "1"}]', [user("1")])],
)
def test_a_column_is_a_text_or_messages_whatever_it_was_read_as(value, text):
    assert grpo.find_column({"other": "x", "answer": value, "solution": "y"}, ("prompt", "answer", "solution")) == text


@pytest.mark.parametrize("gap", ["", "nan"])
def test_numbers_of_a_csv_keep_their_digits_beside_a_gap(tmp_path, tokenizer, gap):
    """A missing value would make the column one of floats: 12345678901234567 would become ...568, and 2 be 2.0."""
    (tmp_path / "rows.csv").write_text(f"prompt,answer\n1+1=,2\n1+2=,{gap}\n1+3=,12345678901234567\n1+4=,0.50\n")
    train, _ = load(tmp_path / "rows.csv", tokenizer)
    answers = [prompt["answer"] for prompt in train if prompt["answer"] != gap]
    assert answers == ["2", "12345678901234567", "0.50"]


def test_the_answer_of_a_verl_data_set(tmp_path, tokenizer):
    rows = [{"prompt": [user(f"1+{i}=")], "reward_model": {"ground_truth": i}} for i in range(4)]
    train, _ = load(write_rows(tmp_path / "rows.parquet", rows), tokenizer)
    assert [prompt["answer"] for prompt in train] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": ["a"], "answer": "2"}, "AttributeError"),
        ({"prompt": "1+1=", "answer": "2", "prompt_ids": [1]}, "writes a column prompt_ids of its own"),
        ({"input": "1+1=", "target": "2"}, "one of the columns prompt, question, problem .*input, target"),
        ({"prompt": "1+1=", "answer": datetime.date(2024, 5, 1)}, "the column answer was read as a date: write it as"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path, tokenizer, row, message):
    dataset = write_rows(tmp_path / "rows.parquet", [row])
    with pytest.raises(SystemExit, match=f"^{dataset}, training row 0: .*{message}.*; the row is {{'"):
        load(dataset, tokenizer)


# ---- rows that are left out


def test_training_rows_with_a_held_out_prompt_are_dropped_and_counted(tmp_path, tokenizer, capsys):
    """Whatever their answers, and also those that are only equal as the model reads them."""
    rows = [{"prompt": f"{i % 5}+1=", "answer": str(i)} for i in range(20)]
    rows += [{"prompt": json.dumps([user(f"{i}+1=")]), "answer": "1"} for i in range(5)]
    train, held_out = load_rows(tmp_path, rows, tokenizer, eval_prompts=2)
    texts = [{tokenizer.decode(row["prompt_ids"]) for row in part} for part in (train, held_out)]
    assert len(held_out) == 2
    assert not texts[0] & texts[1]
    assert len(texts[0] | texts[1]) == 5
    assert f"dropped: {{'with a held-out prompt': {25 - len(train)}}}\n" in capsys.readouterr().out


def test_long_prompts_are_dropped_and_counted(tmp_path, tokenizer, capsys):
    rows = [{"prompt": f"{i}{'1' * (i % 2)}+1=", "answer": "2"} for i in range(6)]  # of 6 and 7 tokens
    train, _ = load_rows(tmp_path, rows, tokenizer, max_prompt_length=6)
    assert prompts_of(train) == ["0+1=", "2+1=", "4+1="]
    said = capsys.readouterr().out
    assert re.search("\n3 training rows of .*, dropped: {'too long': 3}\n", said)


PROSE = "It is the sum of both numbers, which anyone can find by counting."


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"prompt": " \n"}, "without a user's turn at its end"),
        ({"prompt": None}, "without a user's turn at its end"),
        ({"prompt": [user("1+1="), assistant("2")]}, "without a user's turn at its end"),
        ({"prompt": [user("")]}, "without a user's turn at its end"),
        ({"prompt": [], "system": "be brief"}, "without a user's turn at its end"),
        ({"answer": " "}, "without an answer that a completion can match"),
        ({"answer": None}, "without an answer that a completion can match"),
        ({"answer": PROSE}, "without an answer that a completion can match"),
    ],
)
def test_why_a_prompt_is_left_out(tokenizer, row, reason):
    assert grpo.read_prompt({"prompt": "1+1=", "answer": "2", **row}, tokenizer, grpo.Args()) == [reason]


# ---- chat templates

USER, SYSTEM = user("one two"), {"role": "system", "content": "be three"}


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"prompt": "one two"}, "<bos> system be brief user one two assistant"),
        ({"prompt": "one two", "system": None}, "<bos> system be brief user one two assistant"),
        ({"prompt": "one two", "system": "be three"}, "<bos> system be three user one two assistant"),
        ({"prompt": [SYSTEM, USER]}, "<bos> system be three user one two assistant"),
        (
            {"prompt": [USER, assistant("three"), user("four")]},
            "<bos> system be brief user one two assistant three user four assistant",
        ),
    ],
)
def test_prompts_with_a_chat_template_have_one_bos_and_one_system_message(tmp_path, row, expected):
    tokenizer = word_tokenizer(TEMPLATE)
    [prompt], _ = load_rows(tmp_path, [row | {"answer": "1"}], tokenizer, system_prompt="be brief")
    assert " ".join(tokenizer.convert_ids_to_tokens(prompt["prompt_ids"])) == expected


def test_of_a_message_its_role_and_text_are_kept():
    empty = {"tool_calls": None, "name": None, "images": []}  # as parquet fills them in
    assert grpo.as_messages([user("one") | empty]) == [user("one")]
    assert grpo.as_messages([user(None) | empty]) == [user("")]


@pytest.mark.parametrize("fields", [{"weight": 0}, {"tool_calls": [{"name": "add"}]}, {"content": [{"text": "one"}]}])
def test_what_a_message_would_lose_is_refused(fields):
    with pytest.raises(ValueError, match="may have only a role and a text as content, but this one is"):
        grpo.as_messages([USER, assistant("one") | fields])


@pytest.mark.parametrize(
    "written, messages",
    [
        ("{% if m.role != 'system' %}{{ m.content }}{% endif %}", [SYSTEM, USER]),
        ("{% if loop.last %}{{ m.content }}{% endif %}", [USER, assistant("four"), SYSTEM]),
        ("{{ m.content[:3] }}", [USER]),
    ],
)
def test_a_template_that_leaves_a_text_out_is_refused(written, messages):
    tokenizer = word_tokenizer("{% for m in messages %}" + written + " {% endfor %}")
    with pytest.raises(ValueError, match="the chat template does not write the content of the message"):
        grpo.encode_prompt(tokenizer, messages)


@pytest.mark.parametrize("written", ["{{ m.content | trim }}", "{{ m.content.split('</think>')[-1] }}"])
def test_a_template_may_trim_and_shorten_earlier_turns_of_the_assistant(written):
    tokenizer = word_tokenizer("{% for m in messages %}{{ m.role }} " + written + " {% endfor %}")
    assert grpo.encode_prompt(tokenizer, [user(" one \n"), assistant("two </think> three"), USER])


@pytest.mark.parametrize("text", ["<|user|>1+1=<|assistant|>", "1+1=<|end|>"])
def test_a_text_that_has_the_tokens_of_the_template_is_refused(tokenizer, text):
    with pytest.raises(ValueError, match="already has the chat template's tokens: pass plain texts or messages"):
        grpo.encode_prompt(tokenizer, grpo.as_messages(text))


# ---- the order of rows


def test_a_pass_covers_every_row_once():
    rows = list(range(37))
    passes = [grpo.pick_rows(rows, 37 * epoch, 37, 1) for epoch in range(3)]
    assert all(sorted(each) == rows for each in passes)
    assert passes[0] != passes[1] != passes[2] != rows
    assert grpo.pick_rows(rows, 0, 37, 2) != passes[0]


@pytest.mark.parametrize("start, count", [(0, 7), (3, 4), (5, 4), (9, 30), (34, 1)])
def test_any_window_is_a_slice_of_the_whole_sequence(start, count):
    rows = list("abcdefg")
    sequence = [row for epoch in range(8) for row in grpo.pick_rows(rows, 7 * epoch, 7, 5)]
    assert grpo.pick_rows(rows, start, count, 5) == sequence[start : start + count]


# ---- pairs

HISTORY = [user("1+1="), assistant("2"), user("2+2=")]
CHATS = {"chosen": [*HISTORY, assistant("4")], "rejected": [*HISTORY, assistant("5")]}
ANSWERS = {"chosen": [assistant("4")], "rejected": [assistant("5")]}
DIALOGUE = "\n\nHuman: 1+1=\n\nAssistant: 2\n\nHuman: 2+2=\n\nAssistant:"
DIALOGUES = {"chosen": DIALOGUE + " 4", "rejected": DIALOGUE + " 5"}
PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}


def load_pairs(folder, rows, tokenizer, **settings):
    """Pairs for training."""
    dataset = write_rows(folder / "pairs.jsonl", rows)
    args = {"max_prompt_length": 32, "max_completion_length": 48, "system_prompt": "", "eval_prompts": 0} | settings
    train, _ = reward_model.load_pairs(reward_model.Args(dataset=dataset, **args), tokenizer)
    return train


def texts_of(pair, tokenizer):
    """The prompt, chosen and rejected texts of a pair, with special tokens."""
    return [tokenizer.decode(pair[name]) for name in ("prompt_ids", "chosen_ids", "rejected_ids")]


@pytest.mark.parametrize(
    "row, expected",
    [
        (PAIR, HISTORY[2:]),
        ({"problem": "2+2=", "chosen": 4, "rejected": 5}, HISTORY[2:]),
        ({"prompt": "2+2=", **ANSWERS}, HISTORY[2:]),
        ({"prompt": HISTORY, "chosen": "4", "rejected": "5"}, HISTORY),
        ({"prompt": HISTORY, **ANSWERS}, HISTORY),
        ({"prompt": "2+2=", **CHATS}, HISTORY),
        (CHATS, HISTORY),
        ({name: json.dumps(chat) for name, chat in CHATS.items()}, HISTORY),
        (DIALOGUES, HISTORY),
    ],
)
def test_every_form_is_encoded_with_the_chat_template_and_a_stop_token(tmp_path, tokenizer, row, expected):
    [pair] = load_pairs(tmp_path, [row], tokenizer)
    prompt = "<|user|>2+2=<|assistant|>"
    if expected is HISTORY:
        prompt = "<|user|>1+1=<|assistant|>2<|end|>" + prompt
    assert texts_of(pair, tokenizer) == [prompt, "4<|end|>", "5<|end|>"]


def test_a_dialogue_is_encoded_as_text_without_a_chat_template(tmp_path, tokenizer):
    tokenizer.chat_template = None
    [pair] = load_pairs(tmp_path, [DIALOGUES], tokenizer, max_prompt_length=100)
    assert pair["prompt_ids"] == tokenizer(DIALOGUE)["input_ids"]
    assert texts_of(pair, tokenizer)[1:] == [" 4<|end|>", " 5<|end|>"]


def test_dialogues_of_hh_are_split_at_the_last_common_turn():
    for row in read_jsonl(ROOT / "tests" / "data" / "hh_60.jsonl"):
        chosen, rejected = (row[name].split("\n\nAssistant:") for name in ("chosen", "rejected"))
        same = 0
        while same + 1 < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
            same += 1
        parts = ["\n\nAssistant:".join(turns) for turns in (chosen[:same], chosen[same:], rejected[same:])]
        parts[0] += "\n\nAssistant:"
        assert [*reward_model.split_pair(row, False)] == parts
        prompt, *completions = reward_model.split_pair(row, True)
        assert completions == [part.strip() for part in parts[1:]]
        assert prompt[0]["role"] == prompt[-1]["role"] == "user"
        contents = re.split(r"\n\n(?:Human|Assistant):", parts[0])[1:-1]
        assert [message["content"] for message in prompt] == [content.strip() for content in contents]


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": "4", "rejected": "5"},
        {"chosen": "\n\nHuman: 2+2=\n\nAssistant: 4", "rejected": "\n\nHuman: 3+3=\n\nAssistant: 6"},
        {"chosen": [user("2+2="), assistant("4")], "rejected": [user("3+3="), assistant("6")]},
        ANSWERS,
        {"chosen": None, "rejected": [user("2+2="), assistant("5")]},
    ],
)
def test_no_prompt_is_shared(row):
    assert not reward_model.split_pair(row, True)[0]


def test_only_the_prompt_begins_with_a_bos_token(tmp_path):
    tokenizer = word_tokenizer(None)
    tokenizer.add_special_tokens({"eos_token": "be"})
    rows = [{"prompt": "one two", "chosen": "three", "rejected": "four two", "system": "brief"}]
    [pair] = load_pairs(tmp_path, rows, tokenizer)
    words = [" ".join(tokenizer.convert_ids_to_tokens(ids)) for ids in pair.values()]
    assert words == ["<bos> brief one two", "three be", "four two be"]


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"rejected": "4"}, "with two equal completions"),
        ({"chosen": None}, "without a common prompt and two completions"),
        ({"rejected": " \n"}, "without a common prompt and two completions"),
        ({"prompt": ""}, "without a common prompt and two completions"),
        ({"prompt": None, **CHATS, "rejected": ANSWERS["rejected"]}, "without a common prompt and two completions"),
        ({"prompt": "1+2="}, None),  # 6 tokens
        ({"prompt": "1+22="}, "too long"),
        ({"chosen": "1" * 7}, None),  # 8 tokens with the stop token
        ({"chosen": "1" * 8}, "too long"),
        ({"rejected": "1" * 8}, "too long"),
    ],
)
def test_why_a_pair_is_left_out(tokenizer, row, reason):
    args = reward_model.Args(max_prompt_length=6, max_completion_length=8, system_prompt="")
    [found] = reward_model.read_pair(PAIR | row, tokenizer, args)
    assert found == reason or (reason is None and "chosen_ids" in found)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": "2+2=", "chosen": "4"}, "columns rejected is needed, but the row has only prompt, chosen"),
        (PAIR | {"rejected": "9<|end|>"}, "'9<.end.>' already has the chat template's tokens"),
        (PAIR | {"chosen": {"a": 1}}, "the column chosen was read as a dict"),
        (PAIR | {"rejected": [1]}, "AttributeError"),
    ],
)
def test_a_row_that_is_no_pair_is_named(tmp_path, tokenizer, row, message):
    with pytest.raises(SystemExit, match=f"pairs.jsonl, training row 0: .*{message}.*; the row is {{"):
        load_pairs(tmp_path, [row], tokenizer)


@pytest.mark.parametrize("row", [CHATS, DIALOGUES])
def test_ppo_samples_after_what_precedes_the_last_turn_of_chosen(tokenizer, row):
    [prompt] = ppo_rlhf.read_any_prompt(row, tokenizer, ppo_rlhf.Args(system_prompt=""))
    assert tokenizer.decode(prompt["prompt_ids"]) == "<|user|>1+1=<|assistant|>2<|end|><|user|>2+2=<|assistant|>"


# ---- the embedded data sets


@pytest.mark.parametrize("name, counts", [("addition", [4096, 512, 20_000]), ("long", [8192, 512, 40_000])])
def test_make_rebuilds_embedded_data_of_different_prompts_and_right_answers(tmp_path, name, counts):
    subprocess.run([sys.executable, DATA / name / "make.py", tmp_path], check=True)
    rows = []
    for file in ("train.jsonl", "test.jsonl", "sft.jsonl"):
        rows += read_jsonl(tmp_path / file)
        if (DATA / name / file).exists():
            assert (tmp_path / file).read_bytes() == (DATA / name / file).read_bytes()
    assert len(rows) == sum(counts) == len({row["prompt"] for row in rows})
    for row in rows:
        answer = str(sum(map(int, row["prompt"].removesuffix("=").split("+"))))
        assert row.get("answer") == answer or grpo.reward_fn(row["completion"], answer) == 1.0


def kind_of(prompt, completion):
    """Add the sum up again and say what a completion shows, and whether it is right."""
    total, *others = map(int, prompt.removesuffix("=").split("+"))
    steps = []
    for number in others:
        steps.append(f"{total}+{number}={total + number}")
        total += number
    shown, answer = re.fullmatch(r"(?:<think>(.*)</think>)?\\boxed\{(.*)\}", completion).groups()
    if shown is None:
        return "right answer" if answer == str(total) else "wrong answer"
    return "right work" if (shown, answer) == (";".join(steps), str(total)) else "wrong work"


def test_embedded_pairs_are_of_the_kinds_that_they_name():
    train, test = (read_jsonl(DATA / "preferences" / f"{name}.jsonl") for name in ("train", "test"))
    for row in train + test:
        kinds = [kind_of(row["prompt"], row[name]) for name in ("chosen", "rejected")]
        assert row["kind"] == ", ".join(kinds)
    assert not {*prompts_of(train)} & {*prompts_of(test)}
