"""Rows of prompts and of pairs: what is read, left out and refused: python -m pytest tests/test_data.py"""

import gzip
import json
import os
import re
import subprocess
import sys
from collections import Counter
from datetime import date
from decimal import Decimal
from pathlib import Path

import pandas
import pyarrow
import pytest
from processes import run_file
from pyarrow import parquet
from tiny import ROOT, TEMPLATE, TINY, assistant, make_tokenizer, read_jsonl, user, word_tokenizer, write_rows
from transformers import AutoTokenizer

import dpo
import grpo_tools
import ppo_rlhf
import sft

pytestmark = pytest.mark.usefixtures("alone")
DATA = ROOT / "data"
TEXT_MAP = pyarrow.map_(pyarrow.string(), pyarrow.string())
ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(1, 11)]


def load(dataset, tokenizer, **settings):
    """Training and held-out prompts."""
    args = {"max_prompt_length": 32, "eval_prompts": 0, "system_prompt": ""} | settings
    return grpo_tools.load_rows(grpo_tools.Args(dataset=str(dataset), **args), tokenizer)


def load_rows(folder, rows, tokenizer, file="rows.jsonl", **settings):
    """Training and held-out prompts of these rows."""
    return load(write_rows(folder / file, rows), tokenizer, **settings)


def prompts_of(rows):
    return [row["prompt"] for row in rows]


# ---- files and folders


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".jsonl.gz", ".csv.gz"])
def test_a_file_gives_a_fifth_of_its_rows_as_held_out_at_most(tmp_path, tokenizer, suffix, capsys):
    dataset = write_rows(tmp_path / f"rows{suffix}", ROWS)
    for eval_prompts, expected in ((0, []), (1, ["5+1="]), (9, ["2+1=", "5+1="]), (-1, ["2+1=", "5+1="])):
        train, held_out = load(dataset, tokenizer, eval_prompts=eval_prompts)
        assert prompts_of(held_out) == expected
        assert prompts_of(train) == [prompt for prompt in prompts_of(ROWS) if prompt not in expected]
        line = f"{dataset}: {len(expected)} of {len(ROWS)} rows of split train are held out; unread columns: []\n"
        assert line in capsys.readouterr().out


@pytest.mark.parametrize("split", ["train", "test"])
def test_held_out_rows_of_sorted_data_are_from_all_over(tmp_path, split):
    rows = [{"place": i} for i in range(1000)]
    write_rows(tmp_path / "data" / "train.jsonl", rows)
    write_rows(tmp_path / "data" / f"{split}.jsonl", rows)
    _, held_out = grpo_tools.load_splits(str(tmp_path / "data"), 200)
    places = [row["place"] for row in held_out]
    assert places == sorted({*places})
    quarters = Counter(place // 250 for place in places)
    assert all(30 <= quarters[quarter] <= 70 for quarter in range(4))


def write_splits(folder, splits):
    """A clone of a Hub data set: its README.md names configs and files."""
    lines = ["---", "configs:", "- config_name: main", "  data_files:"]
    for split in splits:
        write_rows(folder / f"{split}.jsonl", [{"prompt": f"{split} {i}"} for i in range(9)])
        lines += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---"]))


@pytest.mark.parametrize(
    "splits, suffix, expected",
    [
        (["train", "validation", "test"], "", ["test", "train"]),
        (["train", "validation"], "", ["validation", "train"]),
        (["train_prefs", "test_prefs", "train_sft"], "::train_prefs", ["test_prefs", "train_prefs"]),
        (["train", "odd"], ":main:odd", ["odd", "odd"]),
        (["test"], ":main", ["test", "train"]),
    ],
)
def test_a_config_and_a_split_are_named_after_colons(tmp_path, splits, suffix, expected):
    write_splits(tmp_path, splits)
    training, held_out = grpo_tools.load_splits(f"{tmp_path}{suffix}", 3)
    assert {row["prompt"].split()[0] for row in held_out} == {expected[0]}
    assert {row["prompt"].split()[0] for row in training} <= {expected[1]}
    assert len(held_out) == (1 if expected[0] == expected[1] else 3)  # a fifth of the nine, or as many as asked for


def test_where_a_split_is_missing_those_there_are_are_named(tmp_path):
    write_splits(tmp_path, ["train_sft", "test_sft"])
    for suffix in ("", "::train", "::train_SFT"):
        with pytest.raises(SystemExit, match=r"has only the splits \['train_sft', 'test_sft'\]: name one of them"):
            grpo_tools.load_splits(f"{tmp_path}{suffix}", 3)


def test_a_test_split_alone_is_evaluated_but_not_trained_on(tmp_path, tokenizer):
    write_rows(tmp_path / "test.jsonl", ROWS)
    train, held_out = load(tmp_path, tokenizer, eval_prompts=4, num_steps=0)
    assert train == []
    assert len(held_out) == 4
    with pytest.raises(SystemExit, match=f"^{tmp_path}: no row is left for training$"):
        load(tmp_path, tokenizer, eval_prompts=4)


GOOD_LINE = '{"prompt": "1+1=", "answer": "2"}\n'


@pytest.mark.parametrize(
    "name, text, cause",
    [
        ("a.jsonl", "", "Expecting value: line 1"),
        ("a.jsonl", GOOD_LINE * 6 + '{"prompt": "1+1=", "answer": \n' + GOOD_LINE, "Expecting value: line 8 column 1"),
        ("a.csv", "prompt,answer\n1,2\n1,2,3\n", "Expected 2 fields in line 3, saw 3"),
        ("a.parquet", "PAR1", "Parquet"),
        ("a.json", '[{"prompt": "1+1="}', "Expecting ',' delimiter"),
        ("a.jsonl", None, "Couldn't find any data file|doesn't exist"),
    ],
)
def test_a_data_set_that_is_damaged_or_missing_is_not_trained_on(tmp_path, tokenizer, name, text, cause):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit, match=f"^{tmp_path / name} cannot be read: .*{cause}"):
        load(tmp_path / name, tokenizer)


def test_a_comma_at_the_end_of_each_line_shifts_no_column(tmp_path, tokenizer):
    (tmp_path / "rows.csv").write_text("prompt,answer,source\n" + "".join(f"{i}+1=,{i + 1},book,\n" for i in range(6)))
    with pytest.warns(pandas.errors.ParserWarning, match="Length of header"):
        train, _ = load(tmp_path / "rows.csv", tokenizer)
    assert [row["prompt"] for row in train] == [f"{i}+1=" for i in range(6)]
    assert {row["source"] for row in train} == {"book"}


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
    [(0.00001, "1e-05"), (3.0, "3.0"), (72, "72"), (10**30, "1" + "0" * 30), (None, ""), (float("nan"), "")]
    + [("007", "007"), ("[1, 2]", "[1, 2]"), ([user("1")], [user("1")]), (True, "true"), ({"a": None}, '{"a": null}')],
)
def test_a_column_is_a_text_or_messages_whatever_it_was_read_as(value, text):
    assert (
        grpo_tools.find_column({"other": "x", "answer": value, "solution": "y"}, ("prompt", "answer", "solution"))
        == text
    )


AS_WRITTEN = ["2", "007", "3.10", "+5", "1e5", "123456789012345678901", "true", "NA", "1_000", "2020-01-02"]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz"])
@pytest.mark.parametrize("gap", ["", "nan"])
def test_columns_of_a_csv_are_texts_as_they_are_written(tmp_path, tokenizer, gap, suffix):
    """Prompts and answers alike; a gap in a column makes no 2.0 of a 2."""
    for value in AS_WRITTEN:  # each in columns of its own
        text = f"prompt,answer\n{value},{value}\n{value},{gap}\n"
        path = tmp_path / f"rows{suffix}"
        if suffix == ".tsv":
            text = text.replace(",", "\t")
        with gzip.open(path, "wt") if suffix.endswith("gz") else path.open("w") as file:
            file.write(text)
        train, _ = load(path, tokenizer)
        assert (train[0]["prompt"], train[0]["answer"]) == (value, value)


def test_a_file_is_read_whatever_is_in_its_name(tmp_path, tokenizer):
    """Brackets and question marks are no patterns, which would read rows1.jsonl, and a colon names no config."""
    for name in ("rows[1].jsonl", "rows?.jsonl", "ROWS.JSONL", "a:b.jsonl", "at 10:30.csv", "a:b"):
        write_rows(tmp_path / "rows1.jsonl", ROWS[:5])
        path = tmp_path / name
        write_rows(path / "train.jsonl" if name == "a:b" else path, ROWS)
        train, _ = load(path, tokenizer, eval_prompts=0)
        assert len(train) == len(ROWS), name


@pytest.mark.parametrize("name", ["a::b.jsonl", "a b.csv", "#%25.parquet", "ROWS.JSONL", "ROWS.JSONL.gz"])
def test_other_names_are_names_too(tmp_path, tokenizer, name):
    path = Path(write_rows(tmp_path / name, ROWS))
    train, _ = load(path.rename(path.with_suffix(path.suffix.replace("gz", "GZ"))), tokenizer)
    assert len(train) == len(ROWS)


@pytest.mark.parametrize("name", ["run[1]", "run?", "run*", "a::b", "12:30", "my data", ".hidden", "a#b"])
def test_a_folder_is_read_whatever_is_in_its_name(tmp_path, tokenizer, name, monkeypatch):
    """Not as a pattern, which would read run1, and from the working folder, too."""
    write_rows(tmp_path / "run1" / "train.jsonl", ROWS[:3])
    write_rows(tmp_path / name / "train.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / name, name):
        train, _ = load(path, tokenizer)
        assert len(train) == len(ROWS)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv", "folder/train.jsonl"])
def test_data_that_were_replaced_are_read_anew_whatever_their_time_stamp(tmp_path, tokenizer, name):
    """rsync -t and cp -p keep the time of a file."""
    path = tmp_path / name
    for answer in ("1", "2"):
        write_rows(path, [{"prompt": "1+1=", "answer": answer}])
        os.utime(path, (1_700_000_000, 1_700_000_000))
        [row], _ = load(tmp_path / name.split("/")[0], tokenizer)
        assert row["answer"] == answer


WITHOUT_A_HOME = """
import sys, grpo_tools
from transformers import AutoTokenizer
args = grpo_tools.Args(dataset=sys.argv[1], eval_prompts=0)
print(len(grpo_tools.load_rows(args, AutoTokenizer.from_pretrained(args.model))[0]))
"""


def test_data_of_this_machine_need_no_cache_and_no_home(tmp_path):
    """As in a container whose user has none."""
    write_rows(tmp_path / "data" / "train.jsonl", ROWS)
    nowhere = dict.fromkeys(("HOME", "HF_HOME", "HF_DATASETS_CACHE"), "/proc/nowhere")
    command = [sys.executable, "-c", WITHOUT_A_HOME, tmp_path / "data"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | nowhere, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == [str(len(ROWS))], done.stderr


@pytest.mark.parametrize("late", [{"answer": "two"}, {"answer": 2.5}, {"answer": 3, "extra": [1]}, {"answer": None}])
def test_a_type_may_change_late_in_a_file(tmp_path, tokenizer, late):
    """Arrow settles the types by the first ten megabytes."""
    rows = [{"prompt": f"{i}+1=", "answer": i, "note": "x" * 100_000} for i in range(120)]
    train, _ = load_rows(tmp_path, [*rows, {"prompt": "1+1=", **late}], tokenizer)
    assert [row["answer"] for row in train][:120] == [str(i) for i in range(120)]
    assert [row["answer"] for row in train][120:] == [str(late["answer"])] * (late["answer"] is not None)


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.jsonl.gz", "folder/train.jsonl"])
def test_values_of_json_stay_what_they_are(tmp_path, tokenizer, name):
    """Dates, texts that look like numbers, rows without a column, letters that end a line elsewhere, and a mark of
    the byte order."""
    texts = [*AS_WRITTEN, "a\u2028b", "2024-01-02T03:04"]
    rows = [{"prompt": f"{i}+1=", "answer": text} for i, text in enumerate(texts)]
    path = Path(write_rows(tmp_path / name, [*rows, {"prompt": "1+1="}]))
    if path.suffix == ".jsonl":
        text = "".join(json.dumps(row, ensure_ascii=False) + "\r\n\r\n" for row in rows)
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    train, _ = load(tmp_path / name.split("/")[0], tokenizer)
    assert [row["answer"] for row in train] == [row["answer"] for row in rows]


def test_values_of_parquet_are_read_as_a_person_reads_them(tmp_path, tokenizer):
    messages = pyarrow.array([[[("role", "user"), ("content", "1+1=")]]], pyarrow.list_(TEXT_MAP))
    columns = {
        "2.50": {"prompt": ["1+1="], "answer": [Decimal("2.50")]},
        "2": {"prompt": [b"1+1="], "answer": [b"2"]},
        "2024-01-02": {"prompt": messages, "answer": [date(2024, 1, 2)]},
        "3": {"prompt": ["1+1="], "answer": [3], "unread": pyarrow.array([[("a", "b")]], TEXT_MAP)},
    }
    for answer, table in columns.items():
        parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
        [row], _ = load(tmp_path / "rows.parquet", tokenizer)
        assert row["answer"] == answer
        assert tokenizer.decode(row["prompt_ids"]) == "<|user|>1+1=<|assistant|>"


def test_messages_may_be_lists_of_parts(tokenizer):
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    args = grpo_tools.Args(system_prompt="", max_prompt_length=200)
    row, _ = grpo_tools.read_row({"prompt": [user(parts)], "answer": "2"}, args, tokenizer)
    assert tokenizer.decode(row["prompt_ids"]) == "<|user|>1+1=<|assistant|>"
    with pytest.raises(KeyError, match="text"):
        grpo_tools.read_row({"prompt": [user([{"type": "image"}])], "answer": "2"}, args, tokenizer)


@pytest.mark.parametrize("script", [grpo_tools, sft, dpo])
def test_rows_whose_text_has_a_special_token_are_counted(script, tmp_path, tokenizer, capsys):
    texts = ["1<|end|>", "2", "<|user|>3", "4"]
    rows = [{"prompt": text, "answer": "1", "chosen": "1", "rejected": "2"} for text in texts]
    args = script.Args(dataset=write_rows(tmp_path / "rows.jsonl", rows), eval_prompts=0, system_prompt="")
    {grpo_tools: grpo_tools.load_rows, sft: sft.load_chats, dpo: dpo.load_pairs}[script](args, tokenizer)
    said = re.findall("training rows with special tokens in their text: ([0-9]+)", capsys.readouterr().out)
    assert said == ["2"]


def test_without_a_template_a_prompt_has_no_special_tokens_of_its_text():
    plain = AutoTokenizer.from_pretrained(TINY)
    plain.chat_template = None
    for script in (grpo_tools, sft):
        ids = script.encode_prompt(plain, [user("1<|end|>2")], None)
        assert plain.eos_token_id not in ids and ids[-1] == plain.convert_tokens_to_ids("2")


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": ["a"], "answer": "2"}, "TypeError"),
        ({"prompt": [{"from": "human", "value": "1+1="}], "answer": "2"}, "KeyError.'role'"),
        ({"prompt": "1+1=", "answer": ["2"]}, "column answer: an answer must be a text, not a list"),
        ({"prompt": "1+1=", "solution": ["2"]}, "column solution: an answer must be a text, not a list"),
        ({"prompt": "1+1=", "answer": b"\xff"}, "invalid start byte"),
        ({"prompt": "1+1=", "answer": "2", "tools": "add"}, "Tools should either be a JSON schema"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path, tokenizer, row, message):
    dataset = write_rows(tmp_path / "rows.parquet", [row])
    with pytest.raises(SystemExit, match=f"^{dataset}, training row 0: .*{message}.*; the row is {{'"):
        load(dataset, tokenizer, system_prompt="be brief")


def test_what_the_model_reads_is_printed(tmp_path, tokenizer, capsys):
    """The first prompt with its special tokens, its answer and how it is read, and the tokens that end a completion."""
    [prompt, *_], _ = load_rows(tmp_path, ROWS, tokenizer)
    capsys.readouterr()
    grpo_tools.show_first_row(prompt | {"answer": "1+1=2 #### 2"}, grpo_tools.load_model(TINY, tokenizer), tokenizer)
    lines = ["the first prompt: '<|user|>1+1=<|assistant|>'", "its answer: '1+1=2 #### 2'"]
    lines += ["a correct completion must give: 2", "tokens that end a completion: ['<|end|>']"]
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize("script", [grpo_tools, sft, dpo])
def test_prompts_with_letters_that_the_model_does_not_know_are_counted(script, tmp_path, tokenizer, capsys):
    rows = [{"prompt": f"{name}{i}=", "answer": "1", "chosen": "1", "rejected": "2"} for i in range(3) for name in "1x"]
    args = script.Args(dataset=write_rows(tmp_path / "rows.jsonl", rows), eval_prompts=0, system_prompt="")
    {grpo_tools: grpo_tools.load_rows, sft: sft.load_chats, dpo: dpo.load_pairs}[script](args, tokenizer)
    assert "dropped: {}, prompts with unknown tokens: 3\n" in capsys.readouterr().out


def test_answers_that_are_prose_are_counted(tmp_path, tokenizer, capsys):
    """The default reward compares them letter by letter. Solutions that end in an answer are none."""
    answers = ["To add 1 and 1, count one on from 1.", "2", "To add 1 and 1, count on: \\boxed{2}", "x + y + z", None]
    load_rows(tmp_path, [{"prompt": f"{i}=", "answer": answer} for i, answer in enumerate(answers)], tokenizer)
    assert "with prose as the answer: 1\n" in capsys.readouterr().out
    load_rows(tmp_path, [{"prompt": "1+1="}], tokenizer)
    assert "with prose as the answer: 0\n" in capsys.readouterr().out


def test_rows_without_answers_need_a_reward_of_ones_own():
    with pytest.raises(ValueError, match="no column answer, solution or ground_truth: rename"):
        grpo_tools.reward_fn("2", None)


@pytest.mark.parametrize("script", [grpo_tools, ppo_rlhf])
def test_a_prompt_that_ends_with_the_beginning_of_the_answer_is_continued(script, tmp_path, tokenizer):
    """As Countdown's "Let me solve this step by step."; without a template, the texts are joined."""
    rows = [{"prompt": [user("1+1="), assistant("1+")], "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
    args = script.Args(dataset=write_rows(tmp_path / "rows.jsonl", rows), eval_prompts=0, system_prompt="")
    train, _ = script.load_rows(args, tokenizer)
    texts = [tokenizer.decode(row["prompt_ids"]) for row in train]
    assert texts == ["<|user|>1+1=<|assistant|>1+", "<|user|>1+2=<|assistant|>"]


def test_columns_that_are_missing_are_named(tmp_path, tokenizer, capsys):
    dataset = write_rows(tmp_path / "rows.jsonl", [{"input": "1+1=", "target": "2"}] * 4)
    with pytest.raises(SystemExit, match="no row is left for training"):
        load(dataset, tokenizer)
    said = capsys.readouterr().out
    assert "unread columns: ['input', 'target']" in said
    assert "dropped: {'without a prompt in one of the columns prompt, question, problem': 4}" in said


# ---- rows that are left out


def test_training_rows_with_a_held_out_prompt_are_dropped_and_counted(tmp_path, tokenizer, capsys):
    """Whatever their answers, and also those that are only equal as the model reads them."""
    system = {"role": "system", "content": "1"}
    rows = [{"prompt": [user(f"{i % 5}+1=")], "answer": str(i), "system": "1"} for i in range(20)]
    rows += [{"prompt": [system, user(f"{i}+1=")], "answer": "1", "system": None} for i in range(5)]
    train, held_out = load_rows(tmp_path, rows, tokenizer, eval_prompts=2)
    texts = [{tokenizer.decode(row["prompt_ids"]) for row in part} for part in (train, held_out)]
    assert len(held_out) == 2
    assert not texts[0] & texts[1]
    assert len(texts[0] | texts[1]) == 5
    line = f"\n{len(train)} training rows, dropped: {{'held out, or with a held-out prompt': {25 - len(train)}}}, "
    assert line + "prompts with unknown tokens: 0\n" in capsys.readouterr().out


def test_long_prompts_are_dropped_and_counted(tmp_path, tokenizer, capsys):
    rows = [{"prompt": f"{i}{'1' * (i % 2)}+1=", "answer": "2"} for i in range(6)]  # of 6 and 7 tokens
    train, _ = load_rows(tmp_path, rows, tokenizer, max_prompt_length=6)
    assert prompts_of(train) == ["0+1=", "2+1=", "4+1="]
    said = capsys.readouterr().out
    assert "\n3 training rows, dropped: {'with a prompt longer than --max-prompt-length': 3}, " in said


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"prompt": ""}, "without a prompt in one of the columns prompt, question, problem"),
        ({"prompt": None}, "without a prompt in one of the columns prompt, question, problem"),
        ({"prompt": [], "system": "be brief"}, "without a prompt in one of the columns prompt, question, problem"),
        ({"answer": " "}, "without an answer"),
        ({"answer": None}, "without an answer"),
        ({"answer": "."}, "without an answer"),
    ],
)
def test_why_a_prompt_is_left_out(tokenizer, row, reason):
    args = grpo_tools.Args(system_prompt="")
    assert grpo_tools.read_row({"prompt": "1+1=", "answer": "2", **row}, args, tokenizer) == (None, reason)


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


def test_prompts_of_supervised_data_have_one_bos_token():
    tokenizer = word_tokenizer(TEMPLATE)
    ids = sft.encode_prompt(tokenizer, [user("one two")], None)
    assert tokenizer.convert_ids_to_tokens(ids).count("<bos>") == 1


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
USES = [user("1+2="), CALL, {"role": "tool", "name": "add", "content": "3"}, assistant("It is 3")]
WITH_TOOLS = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }} {{ t.function.parameters | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.name }}{% if m.content is defined %}[{{ m.content }}]{% endif %}"
    "{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
READ = [
    f"<tool>add {json.dumps(SCHEMA)}<user>[1+2=]<end><assistant>",
    json.dumps(CALL["tool_calls"]) + "<end>",
    "<tool>add[3]<end><assistant>",
    "[It is 3]<end>",
]


@pytest.mark.parametrize("file", ["rows.jsonl", "rows.parquet"])
def test_messages_are_written_as_they_are_with_tools_and_calls(tmp_path, file):
    """datasets fills in nulls for what other messages have; a template may ask whether a name is defined."""
    tokenizer = make_tokenizer(["<end>"], WITH_TOOLS)
    lengths = {"max_prompt_length": 400, "max_completion_length": 100, "system_prompt": "", "eval_prompts": 0}
    rows = [{"prompt": USES[:3], "tools": [TOOL], "answer": "3"}]
    [prompt], _ = load_rows(tmp_path, rows, tokenizer, file, **lengths)
    assert tokenizer.decode(prompt["prompt_ids"]) == "".join(READ[:3])
    rows = [{"messages": USES, "chosen": USES, "rejected": [*USES[:3], assistant("It is 4")], "tools": [TOOL]}]
    dataset = write_rows(tmp_path / "chats" / file, rows)
    turns, _ = sft.load_chats(sft.Args(dataset=dataset, **lengths), tokenizer)
    [pair], _ = dpo.load_pairs(dpo.Args(dataset=dataset, **lengths), tokenizer)
    found = [(turn["prompt_ids"], turn["completion_ids"]) for turn in turns]
    found.append((pair["prompt_ids"], pair["chosen_ids"]))
    last = ("".join(READ[:3]), READ[3])
    assert [tuple(map(tokenizer.decode, ids)) for ids in found] == [(READ[0], READ[1]), last, last]


# ---- the order of rows


def test_a_pass_covers_every_row_once():
    rows = list(range(37))
    passes = [grpo_tools.pick_rows(rows, 37 * epoch, 37, 1) for epoch in range(3)]
    assert all(sorted(each) == rows for each in passes)
    assert passes[0] != passes[1] != passes[2] != rows
    assert grpo_tools.pick_rows(rows, 0, 37, 2) != passes[0]


@pytest.mark.parametrize("start, count", [(0, 7), (3, 4), (5, 4), (9, 30), (34, 1)])
def test_any_window_is_a_slice_of_the_whole_sequence(start, count):
    rows = list("abcdefg")
    sequence = [row for epoch in range(8) for row in grpo_tools.pick_rows(rows, 7 * epoch, 7, 5)]
    assert grpo_tools.pick_rows(rows, start, count, 5) == sequence[start : start + count]


# ---- pairs

HISTORY = [user("1+1="), assistant("2"), user("2+2=")]
CHATS = {"chosen": [*HISTORY, assistant("4")], "rejected": [*HISTORY, assistant("5")]}
ANSWERS = {"chosen": [assistant("4")], "rejected": [assistant("5")]}
DIALOGUE = "\n\nHuman: 1+1=\n\nAssistant: 2\n\nHuman: 2+2=\n\nAssistant:"
DIALOGUES = {"chosen": DIALOGUE + " 4", "rejected": DIALOGUE + " 5"}
PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}


WITHOUT_COLUMNS = "without the columns chosen and rejected, and a prompt that both share"


def load_pairs(folder, rows, tokenizer, **settings):
    """Pairs for training."""
    dataset = write_rows(folder / "pairs.jsonl", rows)
    args = {"max_prompt_length": 32, "max_completion_length": 48, "system_prompt": "", "eval_prompts": 0} | settings
    train, _ = dpo.load_pairs(dpo.Args(dataset=dataset, **args), tokenizer)
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


def test_dialogues_of_hh_are_split_at_the_last_turn_where_what_precedes_it_is_the_same():
    for row in read_jsonl(ROOT / "tests" / "data" / "hh_60.jsonl"):
        heads, answers = zip(*(row[name].rsplit("\n\nAssistant:", 1) for name in ("chosen", "rejected")))
        if heads[0] != heads[1]:
            assert dpo.split_pair(row, False) == dpo.split_pair(row, True) == ([], None, None)
            continue
        assert dpo.split_pair(row, False) == ([user(heads[0] + "\n\nAssistant:")], *map(assistant, answers))
        prompt, *completions = dpo.split_pair(row, True)
        assert completions == [assistant(answer.strip()) for answer in answers]
        assert prompt[0]["role"] == prompt[-1]["role"] == "user"
        contents = re.split(r"\n\n(?:Human|Assistant):", heads[0])[1:]
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
    assert not dpo.split_pair(row, True)[0]


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
        ({"chosen": None}, WITHOUT_COLUMNS),
        ({"rejected": ""}, WITHOUT_COLUMNS),
        ({"rejected": [assistant("")]}, "with an empty completion"),
        ({"prompt": ""}, WITHOUT_COLUMNS),
        ({"prompt": None, **CHATS, "rejected": ANSWERS["rejected"]}, WITHOUT_COLUMNS),
        ({"prompt": "1+2="}, ""),  # 6 tokens
        ({"prompt": "1+22="}, "with a prompt longer than --max-prompt-length"),
        ({"chosen": "1" * 7}, ""),  # 8 tokens with the stop token
        ({"chosen": "1" * 8}, "with a completion longer than --max-completion-length"),
        ({"rejected": "1" * 8}, "with a completion longer than --max-completion-length"),
    ],
)
def test_why_a_pair_is_left_out(tokenizer, row, reason):
    args = dpo.Args(max_prompt_length=6, max_completion_length=8, system_prompt="")
    pair, found = dpo.read_pair(PAIR | row, tokenizer, args)
    assert found == reason and (pair is None) == (reason != "")


def test_a_row_whose_prompt_does_not_begin_its_chat_is_left_out(tmp_path, tokenizer, capsys):
    """This template opens an answer to a seven with a 1, which the chats do not have."""
    tokenizer.chat_template += "{% if add_generation_prompt and '7' in messages[0].content %}1{% endif %}"
    load_pairs(tmp_path, [PAIR | {"prompt": "7+1="}, PAIR], tokenizer)
    said = capsys.readouterr().out
    assert "dropped: {'whose prompt reads differently when a completion follows': 1}" in said
    prompt = "the first prompt: '<|user|>2+2=<|assistant|>'"
    assert f"{prompt}; trained after it: chosen '4<|end|>', rejected '5<|end|>'\n" in said


def test_a_row_that_is_no_pair_is_named(tmp_path, tokenizer):
    with pytest.raises(SystemExit, match="pairs.jsonl, training row 0: KeyError.'role'.; the row is {"):
        load_pairs(tmp_path, [PAIR | {"chosen": [{"text": "4"}]}], tokenizer)


@pytest.mark.parametrize("row", [CHATS, DIALOGUES])
def test_ppo_samples_after_what_precedes_the_last_turn_of_chosen(tokenizer, row):
    prompt, _ = ppo_rlhf.read_row(row, ppo_rlhf.Args(system_prompt=""), tokenizer)
    assert tokenizer.decode(prompt["prompt_ids"]) == "<|user|>1+1=<|assistant|>2<|end|><|user|>2+2=<|assistant|>"


# ---- the embedded data sets


@pytest.mark.parametrize("name, counts", [("addition", [4096, 512, 20_000]), ("long", [8192, 512, 40_000])])
def test_make_rebuilds_embedded_data_of_different_prompts_and_right_answers(tmp_path, name, counts):
    run_file(DATA / name / "make.py", tmp_path)
    rows = []
    for file in ("train.jsonl", "test.jsonl", "sft.jsonl"):
        rows += read_jsonl(tmp_path / file)
        if (DATA / name / file).exists():
            assert (tmp_path / file).read_bytes() == (DATA / name / file).read_bytes()
    assert len(rows) == sum(counts) == len({row["prompt"] for row in rows})
    for row in rows:
        answer = str(sum(map(int, row["prompt"].removesuffix("=").split("+"))))
        assert row.get("answer") == answer or grpo_tools.reward_fn(row["completion"], answer) == 1.0


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
