"""Files, folders and columns a data set may come in; the order of prompts; the embedded data set."""

import datetime
import json
import math
import subprocess
import sys

import datasets
import pytest
from tiny import ALTERNATING, ROOT, TEMPLATE, read_jsonl, word_tokenizer, write_rows

import grpo

pytestmark = pytest.mark.usefixtures("alone")
ADDITION = ROOT / "data" / "addition"
ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(1, 11)]


def load(dataset, tokenizer, max_prompt_length, num_held_out, system_prompt=""):
    """Training and held-out prompts."""
    settings = {"max_prompt_length": max_prompt_length, "eval_prompts": num_held_out, "system_prompt": system_prompt}
    return grpo.load_prompts(grpo.Args(dataset=str(dataset), **settings), tokenizer)


def load_splits(dataset, num_held_out):
    """The rows of the training split and the held-out rows, as they are."""
    (_, _, held_out), (_, _, train) = grpo.load_splits(dataset, num_held_out)
    return train, held_out


def printed(capsys):
    """The lines that tell how many rows there are, of held-out and of training rows."""
    return [line for line in capsys.readouterr().out.splitlines() if " rows of " in line]


def prompts_of(rows, column="prompt"):
    return [row[column] for row in rows]


# ---- files and folders


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet"])
def test_a_file_gives_a_sample_of_its_rows_as_held_out(tmp_path, tokenizer, suffix):
    train, held_out = load(write_rows(tmp_path / f"rows{suffix}", ROWS), tokenizer, 32, 3)
    chosen = [1, 4, 7]
    assert prompts_of(held_out) == prompts_of([ROWS[i] for i in chosen])
    assert prompts_of(train) == prompts_of([row for i, row in enumerate(ROWS) if i not in chosen])


@pytest.mark.parametrize("split", ["train", "test"])
def test_held_out_rows_of_sorted_data_are_from_all_over(tmp_path, split):
    rows = [{"prompt": f"{i}+1="} for i in range(1000)]
    write_rows(tmp_path / "data" / "train.jsonl", rows)
    write_rows(tmp_path / "data" / f"{split}.jsonl", rows)
    places = [int(row["prompt"][:-3]) for row in load_splits(str(tmp_path / "data"), 200)[1]]
    assert places == sorted({*places}) and len(places) == 200
    assert all(30 <= len([i for i in places if i // 250 == quarter]) <= 70 for quarter in range(4))


@pytest.mark.parametrize("splits", [["test"], ["validation"], ["validation", "test"]])
def test_a_folder_with_a_held_out_split(tmp_path, splits):
    """Of two the test split is taken."""
    write_rows(tmp_path / "data" / "train.jsonl", ROWS[:6])
    for place, split in enumerate(splits):
        write_rows(tmp_path / "data" / f"{split}.jsonl", ROWS[6 - place :])
    train, held_out = load_splits(str(tmp_path / "data"), 9)
    assert prompts_of(train) == prompts_of(ROWS[:6])
    assert prompts_of(held_out) == prompts_of(ROWS[7 - len(splits) :])


def test_a_config_of_a_hub_data_set_is_named_after_a_colon(tmp_path):
    """A folder as a clone of one: its README.md names configs and files."""
    lines = ["---", "configs:"]
    for config in ("main", "socratic"):
        lines += [f"- config_name: {config}", "  data_files:"]
        for split in ("train", "test"):
            rows = [{"question": f"{config} {split} {i}", "answer": f"#### {i}"} for i in range(1, 5)]
            write_rows(tmp_path / "hub" / config / f"{split}-00000-of-00001.parquet", rows)
            lines += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    (tmp_path / "hub" / "README.md").write_text("\n".join([*lines, "---", "# A data set"]))
    train, held_out = load_splits(f"{tmp_path}/hub:socratic", 2)
    assert prompts_of(train, "question") == [f"socratic train {i}" for i in range(1, 5)]
    assert prompts_of(held_out, "question") == [f"socratic test {i}" for i in range(1, 3)]
    for wrong in ("", ":unknown"):
        with pytest.raises(ValueError, match="(?s)main.*socratic"):
            load_splits(f"{tmp_path}/hub{wrong}", 2)


@pytest.mark.parametrize(
    "splits, suffix, expected",
    [
        (["train_sft", "test_sft"], "", ["test_sft", "train_sft"]),
        (["train_prefs", "test_prefs", "train_sft", "test_sft"], "::train_prefs", ["test_prefs", "train_prefs"]),
        (["train_prefs", "test_prefs", "train_sft", "test_sft"], "", ["test_sft", "train_sft"]),  # the shortest name
        (["train_prefs", "validation_prefs"], ":default:train_prefs", ["validation_prefs", "train_prefs"]),
        (["train", "train_small", "test"], "", ["test", "train"]),
        (["train_small", "test"], ":default:", ["train_small", "train_small"]),
        (["train", "odd"], ":default:odd", ["odd", "odd"]),
        (["test"], "", ["test", "train"]),
    ],
)
def test_a_split_is_named_after_a_second_colon_and_else_the_one_that_begins_with_train(
    tmp_path, splits, suffix, expected
):
    files = [f"  - split: {split}\n    path: {split}.jsonl" for split in splits]
    for split in splits:
        write_rows(tmp_path / f"{split}.jsonl", [{"prompt": f"{split} {i}"} for i in range(4)])
    readme = ["---", "configs:", "- config_name: default", "  data_files:", *files, "---"]
    (tmp_path / "README.md").write_text("\n".join(readme))
    (*held_out, rows), (*training, others) = grpo.load_splits(f"{tmp_path}{suffix}", 3)
    assert (held_out, training) == (["held-out", expected[0]], ["training", expected[1]])
    assert len(rows) == 3 and all(row["prompt"].startswith(f"{expected[0]} ") for row in rows)
    assert all(row["prompt"].startswith(f"{expected[1]} ") for row in others)
    assert len(others) == 4 * (expected[1] in splits)


def test_a_test_split_alone_is_evaluated_but_not_trained_on(tmp_path, tokenizer):
    write_rows(tmp_path / "data" / "test.jsonl", ROWS)
    args = {"dataset": f"{tmp_path}/data", "eval_prompts": 4}
    train, held_out = grpo.load_prompts(grpo.Args(**args, num_steps=0), tokenizer)
    assert train == [] and len(held_out) == 4
    with pytest.raises(SystemExit, match="too few rows for --eval-prompts 4: 0 training rows of "):
        grpo.load_prompts(grpo.Args(**args, num_steps=1), tokenizer)


# ---- columns and rows


@pytest.mark.parametrize("names", [("prompt", "answer"), ("question", "solution"), ("problem", "ground_truth")])
def test_a_prompt_has_its_answer_and_the_other_columns_of_its_row(tmp_path, tokenizer, names):
    rows = [dict(zip(names, (f"1+{i}=", "2")), level=i, tests=["a", "b"]) for i in range(4)]
    train, held_out = load(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, 32, 1)
    assert len(train) == 3 and len(held_out) == 1
    for i, prompt in enumerate(sorted(train + held_out, key=lambda prompt: prompt["level"])):
        assert tokenizer.decode(prompt["prompt_ids"]) == f"<|user|>1+{i}=<|assistant|>"
        assert prompt == {**rows[i], "prompt": f"1+{i}=", "answer": "2", "prompt_ids": prompt["prompt_ids"]}


def test_without_a_column_of_answers_they_are_none(tmp_path, tokenizer):
    dataset = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "label": i} for i in range(4)])
    train, held_out = load(dataset, tokenizer, 32, 0)
    assert held_out == [] and [(prompt["answer"], prompt["label"]) for prompt in train] == [(None, i) for i in range(4)]


def test_gsm8k_rows(tmp_path, tokenizer):
    rows = read_jsonl(ROOT / "tests" / "data" / "gsm8k_20.jsonl")
    train, held_out = load(write_rows(tmp_path / "r.jsonl", rows), tokenizer, 2000, 5)
    assert (len(train), len(held_out)) == (15, 5)
    for prompt in train + held_out:
        [row] = [row for row in rows if row["question"] == prompt["prompt"]]
        assert prompt["answer"] == row["answer"]
        assert grpo.reward_fn("#### " + row["answer"].rpartition("#### ")[2], prompt["answer"]) == 1.0


@pytest.mark.parametrize("answer", [72, 72.5, -3, 0])
def test_numbers_as_answers(tmp_path, tokenizer, answer):
    rows = [{"prompt": f"1+{i}=", "answer": answer} for i in range(4)]
    train, _ = load(write_rows(tmp_path / "rows.json", rows), tokenizer, 32, 1)
    assert [grpo.reward_fn(f"\\boxed{{{answer}}}", prompt["answer"]) for prompt in train] == [1.0] * 3


@pytest.mark.parametrize(
    "value, text",
    [
        *[(0.00001, "0.00001"), (-2.5e-7, "-0.00000025"), (1e22, "1" + "0" * 22), (0.1, "0.1"), (3.0, "3.0")],
        *[(72, "72"), (10**20, "1" + "0" * 20), (None, ""), (math.nan, ""), ("", ""), ("007", "007")],
        *[([], []), ("[1, 2]", "[1, 2]"), ('["a"]', '["a"]'), ("[{}]", "[{}]")],
    ],
)
def test_a_column_is_a_text_whatever_it_was_read_as(value, text):
    assert grpo.find_column({"other": "x", "answer": value, "solution": "y"}, ("prompt", "answer", "solution")) == text


@pytest.mark.parametrize("value", [datetime.date(2024, 5, 1), {"a": 1}, b"2"])
def test_a_column_of_another_type_is_an_error_that_says_what_to_do(value):
    with pytest.raises(ValueError, match=f"the column answer was read as a {type(value).__name__}: write it as a text"):
        grpo.find_column({"answer": value}, ("answer",))


JSON_TEXTS = ['[{"role": "user", "content": "1+1="}]', ' [\n {"content":"1","role":"user"}]']


@pytest.mark.parametrize("value", JSON_TEXTS)
def test_messages_as_a_json_text_are_messages(value):
    assert grpo.find_column({"prompt": value}, ("prompt",)) == json.loads(value)


@pytest.mark.parametrize("gap", ["", "nan", "NA"])
def test_numbers_of_a_csv_keep_their_digits_beside_a_gap(tmp_path, tokenizer, gap):
    """A missing value would make the column one of floats: 12345678901234567 would become ...568, and 2 be 2.0."""
    (tmp_path / "rows.csv").write_text(f"prompt,answer\n1+1=,2\n1+2=,{gap}\n1+3=,12345678901234567\n1+4=,0.50\n")
    train, _ = load(tmp_path / "rows.csv", tokenizer, 32, 0)
    assert [prompt["answer"] for prompt in train if prompt["answer"] != gap] == ["2", "12345678901234567", "0.50"]


def test_a_column_of_dates_is_refused(tmp_path, tokenizer):
    rows = [{"prompt": "1+1=", "answer": datetime.date(2024, 5, i)} for i in range(1, 5)]
    with pytest.raises(SystemExit, match="held-out row 0: .*the column answer was read as a date: write it as a text"):
        load(write_rows(tmp_path / "rows.parquet", rows), tokenizer, 32, 1)


def test_the_answer_of_a_verl_data_set(tmp_path, tokenizer):
    rows = [{"prompt": [{"role": "user", "content": f"1+{i}="}], "reward_model": {"ground_truth": i}} for i in range(4)]
    train, _ = load(write_rows(tmp_path / "rows.parquet", rows), tokenizer, 32, 0)
    assert [prompt["answer"] for prompt in train] == ["0", "1", "2", "3"]
    train, _ = load(write_rows(tmp_path / "r.jsonl", [{**row, "answer": "9"} for row in rows]), tokenizer, 32, 0)
    assert [prompt["answer"] for prompt in train] == ["9"] * 4


MESSAGE = {"role": "user", "content": "1+1="}
EMPTY = [{"prompt": prompt, "answer": "1"} for prompt in ("", None)]
EMPTY += [{"prompt": "1+1=", "answer": answer} for answer in ("", None)]


def test_rows_without_prompt_or_answer_are_dropped_and_counted(tmp_path, tokenizer, capsys):
    rows = [*EMPTY, *[{"prompt": "1+1=", "answer": "2"}] * 3]
    dataset = write_rows(tmp_path / "rows.jsonl", rows)
    train, _ = load(dataset, tokenizer, 32, 0)
    assert prompts_of(train) == ["1+1="] * 3
    dropped = {"without a user's turn at its end": 2, "without an answer that a completion can match": 2}
    assert printed(capsys) == [
        f"0 held-out rows of {dataset}, split train, dropped: {{}}",
        f"3 training rows of {dataset}, split train, dropped: {dropped}",
    ]


PROSE = "It is the sum of both numbers, which anyone can find by counting."
UNFIT = [({"prompt": prompt}, "turn") for prompt in (" \n", [{"role": "assistant", "content": "2"}])]
UNFIT += [({"prompt": [MESSAGE, {"role": "assistant", "content": "2"}]}, "turn")]
UNFIT += [({"prompt": [{"role": "user", "content": content}]}, "turn") for content in ("", None)]
UNFIT += [({"prompt": [], "system": system}, "turn") for system in ("", "be brief")]
UNFIT += [({"answer": answer}, "answer") for answer in (" ", '[""]', PROSE, PROSE + "\n#### ")]


@pytest.mark.parametrize("row, word", UNFIT)
def test_why_a_prompt_is_left_out(tokenizer, row, word):
    [reason] = grpo.read_prompt({"prompt": "1+1=", "answer": "2", **row}, tokenizer, grpo.Args())
    named = {"turn": "without a user's turn at its end", "answer": "without an answer that a completion can match"}
    assert reason == named[word]


def test_a_column_of_the_scripts_own_is_refused(tmp_path, tokenizer):
    dataset = write_rows(tmp_path / "rows.jsonl", [{**row, "prompt_ids": [1]} for row in ROWS])
    with pytest.raises(SystemExit, match="the script writes a column prompt_ids of its own"):
        load(dataset, tokenizer, 32, 0)


def test_training_rows_with_a_held_out_prompt_are_dropped_and_counted(tmp_path, tokenizer, capsys):
    """Whatever their answers, and also those that are only equal as the model reads them."""
    rows = [{"prompt": f"{i % 5}+1=", "answer": str(i)} for i in range(20)]
    rows += [{"prompt": json.dumps([{"role": "user", "content": f"{i}+1="}]), "answer": "1"} for i in range(5)]
    train, held_out = load(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, 32, 2)
    texts = [{tokenizer.decode(row["prompt_ids"]) for row in part} for part in (train, held_out)]
    assert len(held_out) == 2 and not texts[0] & texts[1] and len(texts[0] | texts[1]) == 5
    dropped = {"with a held-out prompt": 25 - len(train)}
    assert printed(capsys)[1].endswith(
        f"{len(train)} training rows of {tmp_path}/rows.jsonl, split train, dropped: {dropped}"
    )


@pytest.mark.parametrize("rows, held_out", [(ROWS[:1], 1), (ROWS[:1] * 9, 2), ([{**ROWS[0], "answer": ""}] * 9, 2)])
def test_where_no_row_is_left_the_run_ends(tmp_path, tokenizer, rows, held_out):
    with pytest.raises(
        SystemExit, match=f"^too few rows for --eval-prompts {held_out}: 0 (training|held-out) rows of "
    ):
        load(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, 32, held_out)


def test_long_prompts_are_dropped_and_counted(tmp_path, tokenizer, capsys):
    rows = [{"prompt": f"{i}{'1' * (i % 2)}+1=", "answer": "2"} for i in range(6)]  # of 6 and 7 tokens
    dataset = write_rows(tmp_path / "rows.jsonl", rows)
    train, held_out = load(dataset, tokenizer, 6, 2)
    assert {*prompts_of(train)} | {*prompts_of(held_out)} == {"0+1=", "2+1=", "4+1="} and len(held_out) == 1
    assert printed(capsys) == [
        f"1 held-out rows of {dataset}, split train, dropped: {{'too long': 1}}",
        f"2 training rows of {dataset}, split train, dropped: {{'too long': 3, 'with a held-out prompt': 1}}",
    ]


def test_the_first_prompt_is_shown_as_the_model_reads_it_with_its_answer(tmp_path, tokenizer, capsys):
    load(write_rows(tmp_path / "rows.jsonl", ROWS), tokenizer, 32, 3)
    lines = ["the first prompt as the model reads it: '<|user|>1+1=<|assistant|>'", "its answer: '2'"]
    assert capsys.readouterr().out.splitlines()[-2:] == lines


# ---- what is refused


@pytest.mark.parametrize("prompt", [["a"], [1, 2]])
def test_an_error_in_a_row_names_it(tmp_path, tokenizer, prompt):
    good = [{"prompt": [MESSAGE], "answer": "2"}] * 6
    dataset = write_rows(tmp_path / "rows.jsonl", [*good, {"prompt": prompt, "answer": "2"}, *good])
    with pytest.raises(SystemExit) as error:
        load(dataset, tokenizer, 32, 0)
    head, tail = f"{dataset}, training row 6: AttributeError(", f"; the row is {{'prompt': {prompt}, 'answer': '2'}}"
    assert error.value.code.startswith(head) and error.value.code.endswith(tail)


def test_a_long_row_is_cut_short_in_the_error(tmp_path):
    args = grpo.Args(dataset=write_rows(tmp_path / "rows.jsonl", [{"n": 0, "text": "x" * 9999}] * 2), eval_prompts=1)
    with pytest.raises(SystemExit, match="rows.jsonl, held-out row 0: ZeroDivisionError.*the row is .*xxx$") as error:
        grpo.load_rows(args, lambda row: [1 / row["n"]])
    assert len(error.value.code) < 600


def test_other_columns_are_refused_with_their_names(tmp_path, tokenizer):
    dataset = write_rows(tmp_path / "rows.jsonl", [{"input": "1+1=", "target": "2"}] * 5)
    with pytest.raises(SystemExit, match="held-out row 0: .*prompt, question, problem .*input, target"):
        load(dataset, tokenizer, 32, 1)


GOOD_LINE = '{"prompt": "1+1=", "answer": "2"}\n'
DAMAGED = [
    ("a.jsonl", ""),
    ("a.json", "[]"),
    ("a.csv", ""),
    ("a.jsonl", GOOD_LINE * 6 + '{"prompt": "1+1=", "answer": \n' + GOOD_LINE),
    ("a.json", '[{"prompt": "1+1=", "answer": "2"},\n {"prompt": 1'),
    ("a.csv", "prompt,answer\n1,2\n1,2,3\n"),
    ("a.parquet", "PAR1"),
    ("a.jsonl", GOOD_LINE.replace("2", "")),  # none is left
]


@pytest.mark.parametrize("name, text", DAMAGED)
def test_a_data_set_that_is_damaged_or_empty_is_not_trained_on(tmp_path, tokenizer, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises((ValueError, StopIteration, SystemExit, datasets.exceptions.DatasetGenerationError)):
        load(tmp_path / name, tokenizer, 32, 0)


@pytest.mark.parametrize("name", ["nope.jsonl", "nope.csv", "./nope", "data/nope", "/nope/rows.parquet", "~/rows"])
def test_what_is_not_there_is_an_error_that_names_it(name):
    with pytest.raises((FileNotFoundError, ConnectionError), match=name.removeprefix("/")):
        grpo.load_splits(name, 1)


# ---- chat templates


def test_a_prompt_that_the_template_refuses_is_an_error_with_its_reason(tmp_path):
    rows = [{"prompt": [MESSAGE], "answer": "1"}, {"prompt": [MESSAGE, MESSAGE], "answer": "1"}] * 2
    with pytest.raises(SystemExit, match="rows.jsonl, training row 1: .*roles must alternate"):
        load(write_rows(tmp_path / "rows.jsonl", rows), word_tokenizer(ALTERNATING), 32, 0)


USER, SYSTEM = {"role": "user", "content": "one two"}, {"role": "system", "content": "be three"}


@pytest.mark.parametrize(
    "prompt, system_prompt, expected",
    [
        ("one two", "", "<bos> user one two assistant"),
        ("one two", "be brief", "<bos> system be brief user one two assistant"),
        ([USER], "", "<bos> user one two assistant"),
        ([USER], "be brief", "<bos> system be brief user one two assistant"),
        ([SYSTEM, USER], "be brief", "<bos> system be three user one two assistant"),
        (
            [USER, {"role": "assistant", "content": "three"}, {"role": "user", "content": "four"}],
            "",
            "<bos> user one two assistant three user four assistant",
        ),
    ],
)
def test_prompts_with_a_chat_template_have_one_bos_and_one_system_message(tmp_path, prompt, system_prompt, expected):
    tokenizer = word_tokenizer(TEMPLATE)
    dataset = write_rows(tmp_path / "rows.jsonl", [{"prompt": prompt, "answer": "1"}] * 3)
    train, _ = load(dataset, tokenizer, 32, 0, system_prompt)
    assert " ".join(tokenizer.convert_ids_to_tokens(train[0]["prompt_ids"])) == expected


@pytest.mark.parametrize("system, expected", [("be three", "be three"), ("", "be brief"), (None, "be brief")])
def test_a_column_system_goes_before_the_setting(tmp_path, system, expected):
    tokenizer = word_tokenizer(TEMPLATE)
    dataset = write_rows(tmp_path / "rows.jsonl", [{"prompt": "one", "answer": "1", "system": system}] * 3)
    train, _ = load(dataset, tokenizer, 32, 0, "be brief")
    tokens = " ".join(tokenizer.convert_ids_to_tokens(train[0]["prompt_ids"]))
    assert tokens == f"<bos> system {expected} user one assistant"


EMPTY_FIELDS = {"tool_calls": None, "name": None, "images": []}  # as parquet fills them in
OTHER_FIELDS = [{"weight": 0}, {"weight": 1.0}, {"tool_calls": [{"name": "add"}]}, {"content": ["one"]}, {"content": 1}]
OTHER_FIELDS += [{"content": [{"type": "text", "text": "one"}]}]


@pytest.mark.parametrize("content", ["one", "", None])
def test_of_a_message_its_role_and_text_are_kept(content):
    [message] = grpo.as_messages([{"role": "user", "content": content, **EMPTY_FIELDS}])
    assert message == {"role": "user", "content": content or ""}


@pytest.mark.parametrize("fields", OTHER_FIELDS)
def test_what_a_message_would_lose_is_refused(fields):
    with pytest.raises(ValueError, match="only a role and a text as content can be read, so the rest would be lost"):
        grpo.as_messages([USER, {"role": "assistant", "content": "one", **fields}])


# {what the template writes of a message: a message of which a part is lost}
LOSING = {
    "{% if m.role != 'system' %}{{ m.role }} {{ m.content }}{% endif %}": [SYSTEM, USER],
    "{% if loop.last %}{{ m.role }} {{ m.content }}{% endif %}": [
        USER,
        {"role": "assistant", "content": "four"},
        SYSTEM,
    ],
    "{{ m.role }} {{ m.content[:3] }}": [USER],
    "{{ m.role }}": [USER],
}


@pytest.mark.parametrize("written", LOSING)
def test_a_template_that_leaves_a_text_out_is_refused(written):
    tokenizer = word_tokenizer("{% for m in messages %}" + written + " {% endfor %}")
    with pytest.raises(ValueError, match="the chat template does not write the content of the message"):
        grpo.encode_prompt(tokenizer, LOSING[written])


@pytest.mark.parametrize("written", ["{{ m.content | trim }}", "{{ m.content.split('</think>')[-1] }}"])
def test_a_template_may_trim_and_shorten_earlier_turns_of_the_assistant(written):
    tokenizer = word_tokenizer("{% for m in messages %}{{ m.role }} " + written + " {% endfor %}")
    earlier = {"role": "assistant", "content": "two </think> three"}
    assert grpo.encode_prompt(tokenizer, [{"role": "user", "content": " one \n"}, earlier, USER])


@pytest.mark.parametrize("text", ["<|user|>1+1=<|assistant|>", "1+1=<|end|>"])
def test_a_text_that_has_the_tokens_of_the_template_is_refused(tokenizer, text):
    with pytest.raises(ValueError, match="already has the chat template's tokens: pass plain texts or messages"):
        grpo.encode_prompt(tokenizer, grpo.as_messages(text))


@pytest.mark.parametrize("system_prompt, expected", [("", "<bos> one two"), ("be brief", "<bos> be brief one two")])
def test_a_tokenizer_without_template_gets_the_bare_prompt(system_prompt, expected):
    tokenizer = word_tokenizer(None)
    ids = grpo.encode_prompt(tokenizer, grpo.as_messages("one two", system_prompt))
    assert " ".join(tokenizer.convert_ids_to_tokens(ids)) == expected


# ---- the order of prompts


def test_a_pass_covers_every_row_once():
    rows = list(range(37))
    passes = [grpo.pick_rows(rows, 37 * epoch, 37, 1) for epoch in range(3)]
    assert all(sorted(each) == rows for each in passes)
    assert passes[0] != passes[1] != passes[2] != rows
    assert grpo.pick_rows(rows, 0, 37, 2) != passes[0]
    assert grpo.pick_rows(rows, 0, 37, 1) == passes[0]


@pytest.mark.parametrize("start, count", [(0, 1), (0, 7), (3, 4), (5, 4), (6, 1), (6, 2), (7, 7), (9, 30), (34, 1)])
def test_any_window_is_a_slice_of_the_whole_sequence(start, count):
    rows = list("abcdefg")
    sequence = [row for epoch in range(8) for row in grpo.pick_rows(rows, 7 * epoch, 7, 5)]
    assert grpo.pick_rows(rows, start, count, 5) == sequence[start : start + count]


# ---- the embedded data set


@pytest.mark.parametrize("folder", [ADDITION, ADDITION.parent / "long"], ids=["addition", "long"])
def test_make_rebuilds_the_embedded_data_sets_whose_prompts_are_all_different_and_answers_right(folder, tmp_path):
    subprocess.run([sys.executable, folder / "make.py", tmp_path], check=True)
    names = {"train.jsonl": 4096, "test.jsonl": 512, "sft.jsonl": 20000}
    names = names if folder == ADDITION else {"train.jsonl": 8192, "test.jsonl": 512, "sft.jsonl": 40000}
    for name in names if folder == ADDITION else ("train.jsonl", "test.jsonl"):  # its sft.jsonl is not shipped
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    rows = [row for name in names for row in read_jsonl(tmp_path / name)]
    assert len(rows) == sum(names.values()) == len({row["prompt"] for row in rows})
    for row in rows:
        answer = str(sum(map(int, row["prompt"].removesuffix("=").split("+"))))
        assert row["answer"] == answer if "answer" in row else grpo.reward_fn(row["completion"], answer) == 1.0


def test_the_embedded_data_set_loads_whole(tokenizer):
    assert [len(prompts) for prompts in load(ADDITION, tokenizer, 32, 512)] == [4096, 512]
