"""Files, folders and columns a data set may come in; the order of prompts; the embedded data set."""

import json
import re
import subprocess
import sys

import datasets
import jinja2
import pytest
from tiny import ROOT, read_jsonl, write_jsonl
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import grpo

pytestmark = pytest.mark.usefixtures("alone")
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


def load(dataset, tokenizer, max_prompt_length, num_held_out, system_prompt=""):
    """Training and held-out prompts."""
    settings = {"max_prompt_length": max_prompt_length, "eval_prompts": num_held_out, "system_prompt": system_prompt}
    return grpo.load_prompts(grpo.Args(dataset=str(dataset), **settings), tokenizer)


def load_splits(dataset, num_held_out):
    """Training and held-out rows as they are."""
    return grpo.load_rows(dataset, num_held_out, lambda row: [row])


def printed(capsys):
    """The lines that tell how many examples there are, of training and held-out rows."""
    return [line for line in capsys.readouterr().out.splitlines() if " examples from " in line]


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
        with pytest.raises(ValueError, match="(?s)main.*socratic"):
            load_splits(f"{tmp_path}/hub{wrong}", 2)


# ---- columns and rows


@pytest.mark.parametrize("names", [("prompt", "answer"), ("question", "solution"), ("problem", "ground_truth")])
def test_a_prompt_has_its_answer_and_the_other_columns_of_its_row(tmp_path, tokenizer, names):
    rows = [dict(zip(names, ("1+1=", "2")), level=i, tests=["a", "b"]) for i in range(4)]
    train, held_out = load(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, 32, 1)
    assert len(train) == 3 and tokenizer.decode(train[0]["prompt_ids"]) == "<|user|>1+1=<|assistant|>"
    for row, prompt in zip(rows, sorted(train + held_out, key=lambda prompt: prompt["level"])):
        assert prompt == {**row, "prompt": "1+1=", "answer": "2", "prompt_ids": prompt["prompt_ids"]}


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
    rows = [{"prompt": "1+1=", "answer": answer}] * 4
    train, _ = load(write_rows(tmp_path / "rows.json", rows), tokenizer, 32, 1)
    assert [grpo.reward_fn(f"\\boxed{{{answer}}}", prompt["answer"]) for prompt in train] == [1.0] * 3


MESSAGE = {"role": "user", "content": "1+1="}
EMPTY = [{"prompt": prompt, "answer": "1"} for prompt in ("", None)]
EMPTY += [{"prompt": "1+1=", "answer": answer} for answer in ("", None)]


def test_rows_without_prompt_or_answer_are_dropped_and_counted(tmp_path, tokenizer, capsys):
    rows = [*EMPTY, *[{"prompt": "1+1=", "answer": "2"}] * 3]
    train, _ = load(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, 32, 0)
    assert prompts_of(train) == ["1+1="] * 3
    assert re.fullmatch("3 examples from 7 rows; .*: 4 rows", printed(capsys)[0])


def test_long_prompts_are_dropped_and_counted(tmp_path, tokenizer, capsys):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "11+1=", "answer": "12"}] * 3  # 6 and 7 tokens
    train, held_out = load(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, 6, 2)
    assert prompts_of(train) == ["1+1="] * 2 and prompts_of(held_out) == ["1+1="]
    found = printed(capsys)
    assert re.match("2 examples from 4 rows; .*: 2", found[0]) and re.match("1 examples from 2 rows; .*: 1", found[1])


def test_the_first_prompt_is_shown_as_the_model_reads_it(tmp_path, tokenizer, capsys):
    load(write_rows(tmp_path / "rows.jsonl", ROWS), tokenizer, 32, 3)
    assert capsys.readouterr().out.splitlines()[-1].endswith("reads it: '<|user|>1+1=<|assistant|>'")


# ---- what is refused


@pytest.mark.parametrize("prompt", [["a"], [1, 2]])
def test_an_error_in_a_row_names_it(tmp_path, tokenizer, prompt):
    good = [{"prompt": [MESSAGE], "answer": "2"}] * 6
    dataset = write_rows(tmp_path / "rows.jsonl", [*good, {"prompt": prompt, "answer": "2"}, *good])
    with pytest.raises(AttributeError) as error:
        load(dataset, tokenizer, 32, 0)
    assert error.value.__notes__ == [f"{dataset}: row 6 of 13, {{'prompt': {prompt}, 'answer': '2'}}"]


def test_other_columns_are_refused_with_their_names(tmp_path, tokenizer):
    dataset = write_rows(tmp_path / "rows.jsonl", [{"input": "1+1=", "target": "2"}] * 5)
    with pytest.raises(ValueError, match="prompt, question, problem .*input, target"):
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
    with pytest.raises((ValueError, IndexError, StopIteration, datasets.exceptions.DatasetGenerationError)):
        load(tmp_path / name, tokenizer, 32, 0)


@pytest.mark.parametrize("name", ["nope.jsonl", "nope.csv", "./nope", "data/nope", "/nope/rows.parquet", "~/rows"])
def test_what_is_not_there_is_an_error_that_names_it(name):
    with pytest.raises((FileNotFoundError, ConnectionError), match=name.removeprefix("/")):
        grpo.load_rows(name, 1, lambda row: [row])


# ---- chat templates

ALTERNATING = (  # as Gemma's and Mistral's
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def test_a_prompt_that_the_template_refuses_is_an_error_with_its_reason(tmp_path):
    rows = [{"prompt": [MESSAGE], "answer": "1"}, {"prompt": [MESSAGE, MESSAGE], "answer": "1"}] * 2
    with pytest.raises(jinja2.TemplateError, match="roles must alternate") as error:
        load(write_rows(tmp_path / "rows.jsonl", rows), word_tokenizer(ALTERNATING), 32, 0)
    assert "row 1 of 4, " in error.value.__notes__[0]


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
    train, _ = load(dataset, tokenizer, 32, 1, system_prompt)
    assert " ".join(tokenizer.convert_ids_to_tokens(train[0]["prompt_ids"])) == expected


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
