"""Rows: what is read from a dataset, what is held out or left out, and their order: python -m pytest tests/test_rows.py

All scripts have copies of these functions of grpo.py.
"""

import json
from collections import Counter
from types import SimpleNamespace

import datasets
import pytest
from processes import Ranks, finish, start
from tokenizers.processors import TemplateProcessing
from toy import ROOT, TINY, read_jsonl, write_jsonl
from transformers import AutoTokenizer

import grpo

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(1, 11)]
GSM8K = read_jsonl(ROOT / "tests/data/gsm8k_20.jsonl")
SYSTEM, USER, ASSISTANT = (
    {"role": role, "content": text} for role, text in zip(("system", "user", "assistant"), "123")
)


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def load(dataset, tokenizer, **settings):
    """Training and held-out rows of a dataset; none are held out unless settings say so."""
    settings = {"max_prompt_length": 32, "eval_prompts": 0, "system_prompt": ""} | settings
    return grpo.load_rows(grpo.Args(dataset=str(dataset), **settings), tokenizer)


def load_rows(folder, rows, tokenizer, **settings):
    return load(write_jsonl(folder / "rows.jsonl", rows), tokenizer, **settings)


def prompts_of(rows):
    return [row["prompt"] for row in rows]


def exit_line(dataset, tokenizer):
    with pytest.raises(SystemExit) as error:
        load(dataset, tokenizer)
    return str(error.value)


# ---- files, splits and columns


def test_a_file_of_each_kind_is_read(tmp_path, tokenizer):
    data = datasets.Dataset.from_list(ROWS)
    data.to_json(tmp_path / "rows.jsonl")
    data.to_csv(tmp_path / "rows.csv")
    data.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=2))
    for suffix in ("jsonl", "csv", "parquet", "json"):
        train, _ = load(tmp_path / f"rows.{suffix}", tokenizer)
        found = [{"prompt": row["prompt"], "answer": str(row["answer"])} for row in train]  # a csv gives numbers
        assert found == ROWS, suffix


def test_a_folder_has_a_file_for_each_split(tmp_path, tokenizer):
    write_jsonl(tmp_path / "train.jsonl", ROWS[:6])
    write_jsonl(tmp_path / "test.jsonl", ROWS[6:])
    for eval_prompts, count in ((0, 0), (3, 3), (256, 4)):  # all of a test split may be held out
        train, held_out = load(tmp_path, tokenizer, eval_prompts=eval_prompts)
        assert prompts_of(train) == prompts_of(ROWS[:6])
        assert len(held_out) == count and {*prompts_of(held_out)} <= {*prompts_of(ROWS[6:])}


def test_configs_and_splits_are_named_after_colons_and_gsm8k_is_read_as_it_is_on_the_hub(tmp_path, tokenizer):
    """A README.md names the files of each config and split."""
    rows = {"main/train": GSM8K[:16], "main/test": GSM8K[16:]}
    for number, name in enumerate(("chats/train_sft", "chats/test_sft", "chats/train_gen", "chats/odd")):
        rows[name] = [{"prompt": f"{number}+{i}="} for i in range(9)]
    lines = []
    for name in rows:
        config, split = name.split("/")
        if name in ("main/train", "chats/train_sft"):
            lines += [f"- config_name: {config}", "  data_files:"]
        lines += [f"  - split: {split}", f"    path: {name}-*"]
        datasets.Dataset.from_list(rows[name]).to_parquet(tmp_path / f"{name}-00000-of-00001.parquet")
    (tmp_path / "README.md").write_text("\n".join(["---", "configs:", *lines, "---\n"]))

    train, held_out = load(f"{tmp_path}:main", tokenizer, max_prompt_length=2000, eval_prompts=256)
    assert prompts_of(train) == [row["question"] for row in GSM8K[:16]] and len(held_out) == 4
    for row in train + held_out:
        number = row["answer"].split("#### ")[1]
        texts = [row["answer"], f"\\boxed{{{number}}}", f"\\boxed{{{number}0}}"]
        assert grpo.score_completions(texts, [row] * 3) == [1.0, 1.0, 0.0]
    # Without a split test_gen or the like, a fifth of the nine training rows is held out.
    for split, trained, tested, count in (("train_sft", 0, 1, 3), ("train_gen", 2, 2, 1), ("odd", 3, 3, 1)):
        train, held_out = load(f"{tmp_path}:chats:{split}", tokenizer, eval_prompts=3)
        assert {prompt[0] for prompt in prompts_of(train)} == {str(trained)}
        assert [prompt[0] for prompt in prompts_of(held_out)] == [str(tested)] * count


def test_a_missing_split_is_named_and_a_missing_column_explained_in_one_sentence(tmp_path, tokenizer):
    write_jsonl(tmp_path / "test.jsonl", ROWS)
    for name in (f"{tmp_path}", f"{tmp_path}::train"):
        with pytest.raises(KeyError, match="train"):
            load(name, tokenizer)
    train, held_out = load(f"{tmp_path}::test", tokenizer, eval_prompts=256)  # it may be trained on if it is named
    assert (len(train), len(held_out)) == (8, 2)
    name = write_jsonl(tmp_path / "rows.jsonl", [{"input": "1+1=", "answer": "2"}])
    columns = "none of the columns prompt, question and problem, but ['input', 'answer']"
    assert exit_line(name, tokenizer) == f"{name} has {columns}"


def test_the_first_column_of_prompts_and_of_answers_counts_and_all_columns_stay(tmp_path, tokenizer):
    row = {"ground_truth": "6", "solution": "5", "answer": "4", "problem": "1+5=", "question": "1+4=", "prompt": "1+3="}
    for prompt, answer in (("prompt", "answer"), ("question", "solution"), ("problem", "ground_truth")):
        ids = tokenizer.encode(f"<|user|>{row[prompt]}<|assistant|>")
        [read], _ = load_rows(tmp_path, [row], tokenizer)
        assert read == row | {"prompt": row[prompt], "answer": row[answer], "prompt_ids": ids}
        del row[prompt], row[answer]


def test_without_a_column_of_answers_the_rule_says_that_it_needs_one(tmp_path, tokenizer):
    train, _ = load_rows(tmp_path, [{"prompt": "1+1="}, {"prompt": "1+2="}], tokenizer)
    assert [row["answer"] for row in train] == [None, None]
    with pytest.raises(ValueError, match="no column answer, solution or ground_truth: write a reward that needs none"):
        grpo.score_completions(["\\boxed{2}"], train[:1])


# ---- what is left out, held out and printed

HOLES = [{"prompt": None}, {"answer": None}, {"prompt": "1" * 5}]  # the last has 7 tokens with the template
EMPTY = [{"prompt": [USER], "answer": "1"}, {"prompt": [], "answer": "1"}, {"prompt": [SYSTEM, USER], "answer": "1"}]


@pytest.mark.parametrize("rows", [*([ROWS[0], ROWS[1] | hole, ROWS[2]] for hole in HOLES), EMPTY])
@pytest.mark.parametrize("system_prompt", ["", "5"])
def test_rows_that_lack_something_or_are_long_are_left_out(tmp_path, tokenizer, rows, system_prompt, capsys):
    limit = 6 + 2 * len(system_prompt)
    train, _ = load_rows(tmp_path, rows, tokenizer, system_prompt=system_prompt, max_prompt_length=limit)
    assert prompts_of(train) == [rows[0]["prompt"], rows[2]["prompt"]]
    assert capsys.readouterr().out.startswith("2 of 3 training rows: 6400.0 passes; 0 held out\n")


COUNTS = [(10, 256, 2), (10, 1, 1), (10, 0, 0), (9, 256, 1), (5, 256, 1), (4, 256, 0), (1, 256, 0)]


@pytest.mark.parametrize("count, eval_prompts, expected", COUNTS)
def test_at_most_a_fifth_of_a_training_split_is_held_out(tmp_path, tokenizer, count, eval_prompts, expected):
    train, held_out = load_rows(tmp_path, ROWS[:count], tokenizer, eval_prompts=eval_prompts)
    assert (len(train), len(held_out)) == (count - expected, expected)
    assert sorted(prompts_of(train + held_out)) == sorted(prompts_of(ROWS[:count]))


@pytest.mark.parametrize("splits", [["train"], ["train", "test"]])
def test_held_out_rows_are_from_all_over_and_the_same_with_every_seed(tmp_path, tokenizer, splits):
    """Each quarter of the rows has 50 of the 200 on average, with a standard deviation of 5.5."""
    for split in splits:
        write_jsonl(tmp_path / f"{split}.jsonl", [{"prompt": f"{i}", "place": i} for i in range(1000)])
    held_out = [load(tmp_path, tokenizer, eval_prompts=200, seed=seed)[1] for seed in (1, 2)]
    quarters = Counter(row["place"] // 250 for row in held_out[0])
    assert len(held_out[0]) == 200 and all(30 <= quarters[i] <= 70 for i in range(4))
    assert held_out[0] == held_out[1]


def test_no_held_out_prompt_is_trained_on_whatever_its_answer_and_form(tmp_path, tokenizer):
    """Each of five prompts comes twice as a text and once as messages; one row is held out."""
    rows = [{"prompt": f"{i % 5}+1=", "answer": str(i)} for i in range(10)]
    rows += [{"prompt": [{"role": "user", "content": f"{i}+1="}], "answer": "1"} for i in range(5)]
    train, [held_out] = load_rows(tmp_path, rows, tokenizer, eval_prompts=1)
    assert len(train) == 12 and held_out["prompt_ids"] not in [row["prompt_ids"] for row in train]


def test_what_is_read_is_printed_by_the_first_rank_alone(tmp_path, tokenizer, capsys, monkeypatch):
    load_rows(tmp_path, ROWS, tokenizer, eval_prompts=1, system_prompt="12")
    lines = ["9 of 10 training rows: 1422.2 passes; 1 held out"]
    lines += ["the first prompt: '<|system|>12<|user|>1+1=<|assistant|>'", "its answer: '2'"]
    assert capsys.readouterr().out.splitlines() == lines
    monkeypatch.setattr(grpo, "RANK", 1)
    load_rows(tmp_path, ROWS, tokenizer)
    assert capsys.readouterr().out == ""


# ---- what a model reads

# Each prompt, and what is read with the system prompt "5", with a chat template and without
READ = [
    ("2", "<|system|>5<|user|>2<|assistant|>", "5\n\n2"),
    ([USER], "<|system|>5<|user|>2<|assistant|>", "5\n\n2"),
    ([SYSTEM, USER], "<|system|>1<|user|>2<|assistant|>", "1\n\n2"),
    ([USER, ASSISTANT, USER], "<|system|>5<|user|>2<|assistant|>3<|end|><|user|>2<|assistant|>", "5\n\n2\n\n3\n\n2"),
]


@pytest.mark.parametrize("prompt, with_template, without", READ)
def test_a_prompt_is_a_text_or_messages_with_one_system_message(tmp_path, tokenizer, prompt, with_template, without):
    tokenizer.add_tokens(["\n"])
    for expected in (with_template, without):
        [row], _ = load_rows(tmp_path, [{"prompt": prompt, "answer": "1"}], tokenizer, system_prompt="5")
        assert tokenizer.decode(row["prompt_ids"]) == expected
        assert row["prompt"] == prompt  # rewards see what the data have
        tokenizer.chat_template = None


def test_without_a_system_prompt_there_is_no_system_message_and_a_prompt_has_one_bos_token(tmp_path, tokenizer):
    """The template writes it, or else the tokenizer puts it before every text."""
    bos = tokenizer.bos_token = "<|system|>"
    special = [(bos, tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=special)
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    for expected in (f"{bos}<|user|>2<|assistant|>", f"{bos}2"):
        [row], _ = load_rows(tmp_path, [{"prompt": "2", "answer": "1"}], tokenizer)
        assert tokenizer.decode(row["prompt_ids"]) == expected
        tokenizer.chat_template = None


# ---- the order of rows


def test_each_epoch_has_every_row_once_in_an_order_of_its_own():
    rows = list(range(37))
    epochs = [grpo.pick_rows(rows, 37 * epoch, 37, seed) for seed in (1, 2) for epoch in range(3)]
    assert all(sorted(epoch) == rows for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, rows]}) == 7


@pytest.mark.parametrize("first, count", [(0, 7), (3, 4), (5, 4), (9, 30), (34, 1)])
def test_any_window_is_a_slice_of_one_series(first, count):
    rows = list("abcdefg")
    series = [row for epoch in range(8) for row in grpo.pick_rows(rows, 7 * epoch, 7, 5)]
    assert grpo.pick_rows(rows, first, count, 5) == series[first : first + count]


# Two ranks write down what rewards are given.
SIZES = {"num_steps": 2, "prompts_per_step": 4, "group_size": 2, "minibatch_size": 8, "max_completion_length": 4}
RECORD = """
import json

def score_completions(completions, rows):
    given = [len(completions)] + [[row["level"], row["prompt"]] for row in rows]
    with open(f"FOLDER/{script.RANK}.jsonl", "a") as file:
        file.write(json.dumps(given) + chr(10))
    with open(f"FOLDER/seeds{script.RANK}.jsonl", "a") as file:
        file.write(f"{script.torch.initial_seed()}" + chr(10))
    return [float(len(text) % 2) for text in completions]

script.score_completions = score_completions
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's training and held-out rows, and what each rank's score_completions got in each call."""
    folder = tmp_path_factory.mktemp("run")
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": i} for i in range(1, 12)]
    sizes = SIZES | {"eval_prompts": 2, "dataset": write_jsonl(folder / "rows.jsonl", rows), "run_dir": folder / "run"}
    flags = ["--tiny", f"--model={TINY}", *(f"--{name.replace('_', '-')}={value}" for name, value in sizes.items())]
    finish(start("grpo", flags, RECORD.replace("FOLDER", str(folder)), Ranks))
    train, held_out = load(sizes["dataset"], AutoTokenizer.from_pretrained(TINY), eval_prompts=2)
    calls = [read_jsonl(folder / f"{rank}.jsonl") for rank in range(2)]
    seeds = [read_jsonl(folder / f"seeds{rank}.jsonl")[1:3] for rank in range(2)]  # of the rollouts
    return SimpleNamespace(train=train, held_out=held_out, calls=calls, seeds=seeds)


def test_each_rank_scores_every_second_row_with_all_its_columns(run):
    """Both evaluations have the same rows, and the completions of a prompt are adjacent."""
    for rank, calls in enumerate(run.calls):
        evaluated = [1, *([row["level"], row["prompt"]] for row in run.held_out[rank::2])]
        rollouts = []
        for first in (0, 4):
            a, b = ([row["level"], row["prompt"]] for row in grpo.pick_rows(run.train, first, 4, 1)[rank::2])
            rollouts.append([4, a, a, b, b])
        assert calls == [evaluated, *rollouts, evaluated]


def test_each_rank_and_step_draws_its_own_random_numbers(run):
    assert len({*run.seeds[0], *run.seeds[1]}) == 4
