"""Files, folders and columns a data set may come in; the order of prompts; the embedded data set."""

import json
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import grpo

ROOT = Path(grpo.__file__).parent
ADDITION = ROOT / "data" / "addition"
ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(1, 11)]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture(autouse=True)
def cache_in_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "models" / "tiny")


def word_tokenizer(chat_template):
    """A tokenizer of words that puts a BOS in front of every text."""
    words = "<bos> <unk> user assistant system be brief one two three four".split()
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", unk_token="<unk>")
    wrapped.chat_template = chat_template
    return wrapped


def load(dataset, tokenizer, max_prompt_length, num_held_out):
    """Training and held-out prompts, and the report without fingerprints."""
    *rows, report = grpo.load_prompts(dataset, tokenizer, "", max_prompt_length, num_held_out)
    return *rows, re.sub(r" \([0-9a-f]{12}\)", "", report)


def write_rows(path, rows):
    """Write rows in the format of the path's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        datasets.Dataset.from_list(rows).to_csv(path)
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts_of(rows, column="prompt"):
    return [row[column] for row in rows]


# ---- files and folders


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet"])
def test_a_file_gives_its_last_rows_as_held_out(tmp_path, suffix):
    dataset = write_rows(tmp_path / f"rows{suffix}", ROWS)
    train, held_out = grpo.load_splits(dataset, 3)
    assert prompts_of(train) == prompts_of(ROWS[:7])
    assert prompts_of(held_out) == prompts_of(ROWS[7:])


@pytest.mark.parametrize("split", ["test", "validation"])
def test_a_folder_with_a_held_out_split(tmp_path, split):
    write_rows(tmp_path / "data" / "train.jsonl", ROWS[:6])
    write_rows(tmp_path / "data" / f"{split}.jsonl", ROWS[6:])
    train, held_out = grpo.load_splits(str(tmp_path / "data"), 3)
    assert prompts_of(train) == prompts_of(ROWS[:6])
    assert prompts_of(held_out) == prompts_of(ROWS[6:9])


def test_the_test_split_goes_before_the_validation_split(tmp_path):
    for split, rows in (("train", ROWS[:4]), ("validation", ROWS[4:6]), ("test", ROWS[6:])):
        write_rows(tmp_path / "data" / f"{split}.jsonl", rows)
    assert prompts_of(grpo.load_splits(str(tmp_path / "data"), 9)[1]) == prompts_of(ROWS[6:])


def write_hub_folder(folder, configs):
    """A folder as a clone of a hub data set, of {config: {split: rows}}: its README.md names configs and files."""
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            write_rows(folder / config / f"{split}-00000-of-00001.parquet", rows)
            lines += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    (folder / "README.md").write_text("\n".join([*lines, "---", "# A data set"]))
    return str(folder)


def numbered(configs):
    """{config: {split: four rows of its name}}"""
    numbers, splits = range(1, 5), ("train", "test")
    return {
        config: {s: [{"question": f"{config} {s} {i}", "answer": f"#### {i}"} for i in numbers] for s in splits}
        for config in configs
    }


@pytest.mark.parametrize(
    "configs, suffix, expected",
    [
        (["main", "socratic"], "", "main"),
        (["socratic", "default"], "", "default"),
        (["socratic"], "", "socratic"),
        (["main", "socratic"], ":socratic", "socratic"),
    ],
)
def test_config_of_a_hub_folder(tmp_path, configs, suffix, expected):
    dataset = write_hub_folder(tmp_path / "hub", numbered(configs)) + suffix
    train, held_out = grpo.load_splits(dataset, 2)
    assert prompts_of(train, "question") == [f"{expected} train {i}" for i in range(1, 5)]
    assert prompts_of(held_out, "question") == [f"{expected} test {i}" for i in range(1, 3)]


@pytest.mark.parametrize("suffix", ["", ":unknown"])
def test_a_config_that_cannot_be_chosen_exits_with_the_list(tmp_path, suffix):
    dataset = write_hub_folder(tmp_path / "hub", numbered(["algebra", "geometry"])) + suffix
    with pytest.raises(SystemExit, match="algebra, geometry"):
        grpo.load_splits(dataset, 2)


def test_too_few_rows_to_hold_some_out(tmp_path):
    with pytest.raises(SystemExit, match="10 training rows.*--eval-prompts 10"):
        grpo.load_splits(write_rows(tmp_path / "rows.jsonl", ROWS), 10)


def test_nothing_held_out(tmp_path):
    train, held_out = grpo.load_splits(write_rows(tmp_path / "rows.jsonl", ROWS), 0)
    assert (len(train), len(held_out)) == (10, 0)


# ---- columns and rows


@pytest.mark.parametrize("prompt_column", ["prompt", "question", "problem"])
@pytest.mark.parametrize("answer_column", ["answer", "solution", "ground_truth"])
def test_names_of_columns(tmp_path, tokenizer, prompt_column, answer_column):
    rows = [{"id": 1, prompt_column: row["prompt"], answer_column: row["answer"]} for row in ROWS]
    train, held_out, _ = grpo.load_prompts(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, "", 32, 3)
    assert prompts_of(train + held_out) == prompts_of(ROWS)
    assert prompts_of(train + held_out, "answer") == prompts_of(ROWS, "answer")
    assert tokenizer.decode(train[0]["prompt_ids"]) == "<|user|>1+1=<|assistant|>"


def test_a_prompt_keeps_the_other_columns_of_its_row(tmp_path, tokenizer):
    rows = [{"question": "1+1=", "solution": "2", "level": i, "tests": ["a", "b"]} for i in range(4)]
    train, held_out, _ = grpo.load_prompts(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, "", 32, 1)
    for row, prompt in zip(rows, train + held_out):
        assert prompt == {**row, "prompt": "1+1=", "answer": "2", "prompt_ids": prompt["prompt_ids"]}


def test_without_a_column_of_answers_they_are_none(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(grpo, "reward_fn", lambda *_: 1.0)
    dataset = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "label": i} for i in range(4)])
    train, _, report = load(dataset, tokenizer, 32, 1)
    assert [(prompt["answer"], prompt["label"]) for prompt in train] == [(None, 0), (None, 1), (None, 2)]
    assert report == "3 training rows; 3 without answer\n1 held-out rows; 1 without answer"


def test_gsm8k_rows(tmp_path, tokenizer):
    rows = [json.loads(line) for line in (ROOT / "tests" / "data" / "gsm8k_20.jsonl").read_text().splitlines()]
    train, held_out, report = load(write_rows(tmp_path / "r.jsonl", rows), tokenizer, 2000, 5)
    assert report == "15 training rows\n5 held-out rows"
    for row, prompt in zip(rows, train + held_out):
        assert (prompt["prompt"], prompt["answer"]) == (row["question"], row["answer"])
        assert grpo.reward_fn("#### " + row["answer"].rpartition("#### ")[2], prompt["answer"]) == 1.0


@pytest.mark.parametrize("answer", [72, 72.5, -3, 0])
def test_numbers_as_answers(tmp_path, tokenizer, answer):
    rows = [{"prompt": "1+1=", "answer": answer}] * 4
    train, _, _ = grpo.load_prompts(write_rows(tmp_path / "rows.json", rows), tokenizer, "", 32, 1)
    assert [grpo.reward_fn(f"\\boxed{{{answer}}}", prompt["answer"]) for prompt in train] == [1.0] * 3


def test_empty_prompts_and_answers_are_dropped_and_counted(tmp_path, tokenizer):
    bad = [{"prompt": "", "answer": "1"}, {"prompt": None, "answer": "1"}]
    bad += [{"prompt": "1+1=", "answer": answer} for answer in ("", None, "  ")]
    train, held_out, report = load(write_rows(tmp_path / "rows.jsonl", bad + ROWS), tokenizer, 32, 3)
    assert prompts_of(train + held_out) == prompts_of(ROWS)
    assert report == "7 training rows; 2 dropped, without prompt; 3 dropped, without answer\n3 held-out rows"


def test_long_prompts_are_dropped_and_counted(tmp_path, tokenizer):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "11+1=", "answer": "12"}] * 3  # 6 and 7 tokens
    dataset = write_rows(tmp_path / "rows.jsonl", rows)
    train, held_out, report = load(dataset, tokenizer, 6, 2)
    assert prompts_of(train) == ["1+1="] * 2 and prompts_of(held_out) == ["1+1="]
    assert report.splitlines() == [
        "2 training rows; 2 dropped, longer than 6 tokens",
        "1 held-out rows; 1 dropped, longer than 6 tokens",
    ]


def test_answers_compared_as_text_are_counted(tmp_path, tokenizer):
    rows = [{"prompt": "1+1=", "answer": answer} for answer in ("blue", "2", "x+1", "3")]
    _, _, report = load(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, 32, 1)
    assert report == "3 training rows; 2 whose answer is no number and is compared as text\n1 held-out rows"


def test_unknown_columns_are_named(tmp_path, tokenizer):
    dataset = write_rows(tmp_path / "rows.jsonl", [{"input": "1", "target": "2"}] * 4)
    with pytest.raises(SystemExit, match="found input, target"):
        grpo.load_prompts(dataset, tokenizer, "", 32, 1)


def message_of(tmp_path, tokenizer, rows, num_held_out=1, name="bad.jsonl"):
    """The line with which load_prompts exits on these rows, or on a file of this text."""
    path = tmp_path / name
    path.write_text(rows) if isinstance(rows, str) else write_rows(path, rows)
    with pytest.raises(SystemExit) as caught:
        grpo.load_prompts(str(path), tokenizer, "", 32, num_held_out)
    message = caught.value.code
    assert "\n" not in message and message.startswith(f"--dataset {path}: ") and len(message) < 300 + len(str(path))
    return message.removeprefix(f"--dataset {path}: ")


MESSAGE = {"role": "user", "content": "1+1="}
BAD_PROMPTS = [
    7,
    1.5,
    True,
    {"a": 1},
    ["a"],
    [1, 2],
    [{"content": "1"}],
    [{"role": "user"}],
    [{**MESSAGE, "role": None}],
]
BAD_PROMPTS += [[{**MESSAGE, "content": content}] for content in (7, ["1"], [{"type": "text", "text": "1"}])]


@pytest.mark.parametrize("prompt", BAD_PROMPTS)
def test_a_prompt_that_is_no_text_is_an_error_of_its_row(tmp_path, tokenizer, prompt):
    bad = {"prompt": prompt, "answer": "2"}
    message = message_of(tmp_path, tokenizer, [*ROWS[:6], bad, *ROWS[:3]])
    assert message.startswith("training row 7: prompt must be a text or a list of messages with a role and a content")
    assert message_of(tmp_path, tokenizer, [*ROWS, bad]).startswith("held-out row 1: prompt must be a text")


@pytest.mark.parametrize("answer", [["2"], {"value": 2}, True, [], [1, 2]])
def test_an_answer_that_is_neither_text_nor_number_is_an_error_of_its_row(tmp_path, tokenizer, answer):
    rows = [*ROWS[:6], {"prompt": "1+1=", "answer": answer}, *ROWS[:3]]
    assert message_of(tmp_path, tokenizer, rows).startswith(
        "training row 7: an answer must be a text or a number, not "
    )


ENDING = [MESSAGE, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    "prompt, reason",
    [
        ([], "without prompt"),
        ("  ", "without prompt"),
        ([{**MESSAGE, "content": None}], "without prompt"),
        ([{"role": "system", "content": None}, MESSAGE], "without prompt"),
        (ENDING, "ending in the assistant's turn"),
    ],
)
def test_prompts_that_cannot_be_completed_are_dropped_and_counted(tmp_path, tokenizer, prompt, reason):
    rows = [{"prompt": prompt, "answer": "2"}] * 2 + [{"prompt": [MESSAGE], "answer": "2"}] * 3
    train, _, report = load(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, 32, 1)
    assert len(train) == 2 and report == f"2 training rows; 2 dropped, {reason}\n1 held-out rows"
    assert f"; 1 dropped, {reason}" in message_of(tmp_path, tokenizer, rows[:2])


# ---- files that cannot be read


@pytest.mark.parametrize("name", ["nope.jsonl", "nope.csv", "./nope", "data/nope/rows", "/nope/rows.parquet", "~/rows"])
def test_a_path_of_nothing_is_no_name_on_the_hub(name):
    with pytest.raises(SystemExit, match=f"^--dataset {name}: there is no such file or folder$"):
        grpo.load_splits(name, 1)


def test_what_may_be_a_folder_or_a_name_on_the_hub_is_called_neither():
    with pytest.raises(SystemExit, match="--dataset data/nope: no such file or folder, nor on the hub: "):
        grpo.load_splits("data/nope", 1)


GOOD_LINE = '{"prompt": "1+1=", "answer": "2"}\n'
DAMAGED = [
    ("a.jsonl", "", "it has no rows"),
    ("a.jsonl", "\n\n \n", "it has no rows"),
    ("a.json", "[]", "it has no rows"),
    ("a.csv", "", "it has no rows"),
    ("a.jsonl", GOOD_LINE * 6 + '{"prompt": "1+1=", "answer": \n' + GOOD_LINE, "line 7 is not JSON"),
    ("a.jsonl", GOOD_LINE * 6 + "\n" + GOOD_LINE[:-9], "line 8 is not JSON"),
    ("a.txt", "hello\n", "line 1 is not JSON"),
    ("a.json", '[{"prompt": "1+1=", "answer": "2"},\n {"prompt": 1', "Unexpected character"),
    ("a.csv", "prompt,answer\n1,2\n1,2,3\n", "Expected 2 fields in line 3, saw 3"),
    ("a.parquet", "PAR1", "Parquet"),
]


@pytest.mark.parametrize("name, text, expected", DAMAGED)
def test_a_damaged_file_is_one_line_with_the_cause(tmp_path, tokenizer, name, text, expected, capfd):
    message = message_of(tmp_path, tokenizer, text, name=name)
    assert message.startswith(("cannot be loaded: ", "line ")) and expected in message
    assert capfd.readouterr().err == ""


def test_splits_of_different_columns_are_named(tmp_path, tokenizer):
    write_rows(tmp_path / "data" / "train.jsonl", ROWS)
    write_rows(tmp_path / "data" / "test.jsonl", [{"x": 1}] * 3)
    with pytest.raises(SystemExit, match="cannot be loaded: .*prompt.*column names don't match"):
        grpo.load_prompts(str(tmp_path / "data"), tokenizer, "", 32, 1)


def test_the_flag_that_named_the_data_set_is_named(tmp_path, tokenizer):
    other = write_rows(tmp_path / "other.jsonl", [{"input": "1"}] * 3)
    for dataset, message in (("nope.jsonl", "no such file"), (other, "found input")):
        with pytest.raises(SystemExit, match=f"^--eval-dataset {dataset}: .*{message}"):
            grpo.load_prompts(dataset, tokenizer, "", 32, 1, "--eval-dataset")


# ---- chat templates

ALTERNATING = (  # as Gemma's and Mistral's
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def test_prompts_that_the_template_refuses_are_dropped_and_counted(tmp_path):
    tokenizer = word_tokenizer(ALTERNATING)
    refused = [{"prompt": [MESSAGE, MESSAGE], "answer": "1"}] * 2
    dataset = write_rows(tmp_path / "rows.jsonl", refused + [{"prompt": [MESSAGE], "answer": "1"}] * 3)
    train, _, report = load(dataset, tokenizer, 32, 1)
    reason = "refused by the chat template (roles must alternate)"
    assert len(train) == 2 and report.startswith(f"2 training rows; 2 dropped, {reason}\n")
    assert f"; 1 dropped, {reason}" in message_of(tmp_path, tokenizer, refused)


def test_chats_of_several_messages_without_a_template_are_reported(tmp_path):
    rows = [{"prompt": [MESSAGE, *ENDING[1:], MESSAGE], "answer": "1"}] * 2 + [{"prompt": [MESSAGE], "answer": "1"}] * 2
    _, _, report = load(write_rows(tmp_path / "rows.jsonl", rows), word_tokenizer(None), 32, 1)
    assert "3 training rows; 2 of several messages, joined by blank lines: there is no chat template\n" in report


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
    train, _, _ = grpo.load_prompts(dataset, tokenizer, system_prompt, 32, 1)
    assert " ".join(tokenizer.convert_ids_to_tokens(train[0]["prompt_ids"])) == expected


@pytest.mark.parametrize("system_prompt, expected", [("", "<bos> one two"), ("be brief", "<bos> be brief one two")])
def test_a_tokenizer_without_template_gets_the_bare_prompt(system_prompt, expected):
    tokenizer = word_tokenizer(None)
    ids = grpo.encode_prompt(tokenizer, "one two", system_prompt)
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


def test_more_rows_than_there_are():
    assert sorted(grpo.pick_rows([1, 2, 3], 0, 6, 1)) == [1, 1, 2, 2, 3, 3]


# ---- the embedded data set


def test_make_rebuilds_the_embedded_data_set_byte_for_byte(tmp_path):
    subprocess.run([sys.executable, ADDITION / "make.py", tmp_path], check=True)
    for name in ("sft.jsonl", "train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (ADDITION / name).read_bytes()


def test_embedded_prompts_are_all_different_and_their_answers_right():
    names = {"train.jsonl": 4096, "test.jsonl": 512, "sft.jsonl": 20000}
    rows = [json.loads(line) for name in names for line in (ADDITION / name).read_text().splitlines()]
    assert len(rows) == sum(names.values()) == len({row["prompt"] for row in rows})
    for row in rows:
        answer = str(sum(map(int, row["prompt"].removesuffix("=").split("+"))))
        assert row["answer"] == answer if "answer" in row else grpo.reward_fn(row["completion"], answer) == 1.0


def test_the_embedded_data_set_loads_whole(tokenizer):
    train, held_out, report = load(str(ADDITION), tokenizer, 32, 512)
    assert (len(train), len(held_out)) == (4096, 512)
    assert report == "4096 training rows\n512 held-out rows"


# ---- what looks like data


def test_a_path_is_no_pattern(tmp_path, tokenizer):
    write_rows(tmp_path / "t1.jsonl", ROWS)
    train, _, _ = load(write_rows(tmp_path / "t[1].jsonl", ROWS[:4]), tokenizer, 32, 1)
    assert prompts_of(train) == prompts_of(ROWS[:3])


def test_a_folder_of_several_kinds_of_files_is_refused(tmp_path):
    write_rows(tmp_path / "data" / "a.jsonl", ROWS)
    (tmp_path / "data" / "b.csv").write_text("prompt,answer\n1+1=,2\n")
    with pytest.raises(SystemExit, match="files of several kinds"):
        grpo.load_splits(str(tmp_path / "data"), 1)


@pytest.mark.parametrize("beside", ["dataset_infos.json", "README.md"])
def test_what_describes_the_data_is_no_data(tmp_path, beside):
    (tmp_path / "data").mkdir()
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "data" / "train.parquet")
    (tmp_path / "data" / beside).write_text("{}" if beside.endswith("json") else "what it is")
    train, held_out = grpo.load_splits(str(tmp_path / "data"), 2)
    assert len(train) + len(held_out) == len(ROWS)


def test_an_answer_of_nan_is_no_answer(tmp_path, tokenizer):
    rows = [{"prompt": "1+1=", "answer": answer} for answer in (float("nan"), 2.0, 3.0, 4.0)]
    _, _, report = load(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, 32, 1)
    assert report == "2 training rows; 1 dropped, without answer\n1 held-out rows"


@pytest.mark.parametrize("prompt", [MESSAGE, json.dumps([MESSAGE])])
def test_one_message_or_messages_as_a_text_are_refused(tmp_path, tokenizer, prompt):
    dataset = write_rows(tmp_path / "rows.jsonl", [{"prompt": prompt, "answer": "2"}] * 3)
    with pytest.raises(SystemExit, match="training row 1: prompt must be a text or a list of messages"):
        load(dataset, tokenizer, 32, 1)
