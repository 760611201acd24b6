"""Files, folders and columns a data set may come in; the order of prompts; the embedded data set."""

import json
import re
import subprocess
import sys

import datasets
import pytest
from tiny import ROOT, read_jsonl, write_jsonl
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import grpo

ADDITION = ROOT / "data" / "addition"
ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(1, 11)]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


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
    """Training and held-out prompts, and the report without checksums."""
    *rows, report = grpo.load_prompts(dataset, tokenizer, "", max_prompt_length, num_held_out)
    return *rows, [re.sub(r" \([0-9a-f]{8}\)", "", line) for line in report]


def load_splits(dataset, num_held_out):
    """Training and held-out rows as they are."""
    return grpo.load_rows(dataset, num_held_out, dict)[:2]


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
        write_jsonl(path, rows)
    return str(path)


def prompts_of(rows, column="prompt"):
    return [row[column] for row in rows]


# ---- files and folders


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet"])
def test_a_file_gives_a_sample_of_its_rows_as_held_out(tmp_path, suffix):
    train, held_out = load_splits(write_rows(tmp_path / f"rows{suffix}", ROWS), 3)
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
        with pytest.raises(SystemExit, match="^--dataset .*/hub.*main.*socratic"):
            load_splits(f"{tmp_path}/hub{wrong}", 2)


# ---- columns and rows


@pytest.mark.parametrize("names", [("prompt", "answer"), ("question", "solution"), ("problem", "ground_truth")])
def test_a_prompt_has_its_answer_and_the_other_columns_of_its_row(tmp_path, tokenizer, names):
    rows = [dict(zip(names, ("1+1=", "2")), level=i, tests=["a", "b"]) for i in range(4)]
    train, held_out, _ = load(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, 32, 1)
    assert len(train) == 3 and tokenizer.decode(train[0]["prompt_ids"]) == "<|user|>1+1=<|assistant|>"
    for row, prompt in zip(rows, sorted(train + held_out, key=lambda prompt: prompt["level"])):
        read = {"prompt": "1+1=", "answer": "2", "prompt_ids": prompt["prompt_ids"]}
        assert prompt == {**row, **read, "columns": f"of {', '.join(names)} "}


def test_without_a_column_of_answers_they_are_none(tmp_path, tokenizer):
    dataset = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "label": i} for i in range(4)])
    train, held_out, _ = load(dataset, tokenizer, 32, 0)
    assert held_out == [] and [(prompt["answer"], prompt["label"]) for prompt in train] == [(None, i) for i in range(4)]


def test_gsm8k_rows(tmp_path, tokenizer):
    rows = read_jsonl(ROOT / "tests" / "data" / "gsm8k_20.jsonl")
    train, held_out, _ = load(write_rows(tmp_path / "r.jsonl", rows), tokenizer, 2000, 5)
    assert (len(train), len(held_out)) == (15, 5)
    for prompt in train + held_out:
        [row] = [row for row in rows if row["question"] == prompt["prompt"]]
        assert prompt["answer"] == row["answer"]
        assert grpo.reward_fn("#### " + row["answer"].rpartition("#### ")[2], prompt["answer"]) == 1.0


@pytest.mark.parametrize("answer", [72, 72.5, -3, 0])
def test_numbers_as_answers(tmp_path, tokenizer, answer):
    rows = [{"prompt": "1+1=", "answer": answer}] * 4
    train, *_ = load(write_rows(tmp_path / "rows.json", rows), tokenizer, 32, 1)
    assert [grpo.reward_fn(f"\\boxed{{{answer}}}", prompt["answer"]) for prompt in train] == [1.0] * 3


MESSAGE = {"role": "user", "content": "1+1="}
EMPTY = [{"prompt": prompt, "answer": "1"} for prompt in ("", None, " \n")]
EMPTY += [{"prompt": "1+1=", "answer": answer} for answer in ("", None, "  ")]
ENDED = [{"prompt": [MESSAGE, {"role": "assistant", "content": "2"}], "answer": "2"}] * 2


@pytest.mark.parametrize("rows, reason", [(EMPTY, "without prompt or answer"), (ENDED, "ends in the assistant's turn")])
def test_rows_that_cannot_be_completed_are_dropped_and_counted(tmp_path, tokenizer, rows, reason):
    good = [{"prompt": [MESSAGE] if rows is ENDED else "1+1=", "answer": "2"}] * 3
    train, _, report = load(write_rows(tmp_path / "rows.jsonl", rows + good), tokenizer, 32, 0)
    assert len(train) == 3 and report[0].startswith("3 training rows") and f"{reason!r}: {len(rows)}" in report[0]


def test_long_prompts_are_dropped_and_counted(tmp_path, tokenizer):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "11+1=", "answer": "12"}] * 3  # 6 and 7 tokens
    train, held_out, report = load(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, 6, 2)
    assert prompts_of(train) == ["1+1="] * 2 and prompts_of(held_out) == ["1+1="]
    assert re.match("2 training rows.* 6 tokens.*: 2", report[0]) and re.match("1 held-out rows.*: 1", report[1])


def test_the_report_tells_data_sets_apart(tmp_path, tokenizer):
    changed = [*ROWS[:3], {"prompt": "4+1=", "answer": "6"}, *ROWS[4:]]
    variants = [ROWS, changed, [*ROWS[1:], ROWS[0]], [{**row, "level": 1} for row in ROWS], ROWS]
    paths = [write_rows(tmp_path / f"{i}.jsonl", rows) for i, rows in enumerate(variants)]
    reports = [str(grpo.load_prompts(path, tokenizer, "", 32, 3)[2]) for path in paths]
    assert reports[0] == reports[-1] and len({*reports}) == 4


# ---- what is refused, in one line


def message_of(tmp_path, tokenizer, rows, num_held_out=1, name="bad.jsonl"):
    """The line with which load_prompts exits on these rows, or on a file of this text."""
    path = tmp_path / name
    path.write_text(rows) if isinstance(rows, str) else write_rows(path, rows)
    with pytest.raises(SystemExit) as caught:
        grpo.load_prompts(str(path), tokenizer, "", 32, num_held_out)
    message = caught.value.code
    assert "\n" not in message and message.startswith(f"--dataset {path}: ") and len(message) < 500 + len(str(path))
    return message.removeprefix(f"--dataset {path}: ")


BAD_PROMPTS = [MESSAGE, {"a": 1}, ["a"], [1, 2], [{"content": "1"}], [{"role": "user"}], [{**MESSAGE, "role": None}]]
BAD_PROMPTS += [[{**MESSAGE, "content": content}] for content in (None, ["1"], [{"type": "text", "text": "1"}])]
BAD_ROWS = [{"prompt": prompt, "answer": "2"} for prompt in BAD_PROMPTS]
BAD_ROWS += [{"prompt": "1+1=", "answer": answer} for answer in (["2"], {"value": 2}, True, [], [1, 2])]


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_what_is_no_prompt_or_no_answer_is_an_error_that_names_its_row(tmp_path, tokenizer, bad):
    good = [{"prompt": [MESSAGE], "answer": "2"} if bad["answer"] == "2" else ROWS[0]] * 6
    assert message_of(tmp_path, tokenizer, [*good, bad, *good], 0).startswith("training row 7, {")
    assert message_of(tmp_path, tokenizer, [*good[:4], bad, *good], 1).startswith("training row 5, {")
    assert message_of(tmp_path, tokenizer, [*good[:4], bad, *good[:2]], 1).startswith("held-out row 5, {")


GOOD_LINE = '{"prompt": "1+1=", "answer": "2"}\n'
REFUSED = [
    ("a.jsonl", [{"input": "1+1=", "target": "2"}] * 5, "prompt, question or problem.* input, target"),
    ("a.jsonl", [{"prompt": "1+1=", "answer": ""}] * 5, "0 training rows"),
    ("a.jsonl", ROWS[:1], "0 training rows"),
    ("a.jsonl", "", ""),
    ("a.json", "[]", ""),
    ("a.csv", "", ""),
    ("a.jsonl", GOOD_LINE * 6 + '{"prompt": "1+1=", "answer": \n' + GOOD_LINE, ""),
    ("a.json", '[{"prompt": "1+1=", "answer": "2"},\n {"prompt": 1', ""),
    ("a.csv", "prompt,answer\n1,2\n1,2,3\n", "line 3"),
    ("a.parquet", "PAR1", ""),
]


@pytest.mark.parametrize("name, rows, expected", REFUSED)
def test_a_data_set_that_is_damaged_or_not_of_prompts_is_one_line(tmp_path, tokenizer, name, rows, expected):
    assert re.search(expected, message_of(tmp_path, tokenizer, rows, name=name))


@pytest.mark.parametrize("name", ["nope.jsonl", "nope.csv", "./nope", "data/nope", "/nope/rows.parquet", "~/rows"])
@pytest.mark.parametrize("flag", ["--dataset", "--ptx-dataset"])
def test_what_is_not_there_is_one_line_that_names_its_flag(name, flag):
    with pytest.raises(SystemExit, match=f"^{flag} {name}: "):
        grpo.load_rows(name, 1, dict, flag)


# ---- chat templates

ALTERNATING = (  # as Gemma's and Mistral's
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def test_a_prompt_that_the_template_refuses_is_an_error_with_its_reason(tmp_path):
    rows = [{"prompt": [MESSAGE], "answer": "1"}, {"prompt": [MESSAGE, MESSAGE], "answer": "1"}] * 2
    message = message_of(tmp_path, word_tokenizer(ALTERNATING), rows, 0)
    assert re.search("training row 2, .*roles must alternate", message)


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
    report = load(str(ADDITION), tokenizer, 32, 512)[2]
    assert report == [f"{count} rows of prompt, answer, dropped: {{}}" for count in ("4096 training", "512 held-out")]
