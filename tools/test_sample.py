"""Tests of tools/sample.py: it prints and keeps what grpo.py samples and rewards, and sft.py can read its files."""

import io
import random
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import sample
import torch
from datasets import Dataset
from processes import run_file
from toy import FORMS, ROOT, TINY, make_folder, make_tokenizer, parse, read_jsonl, write_jsonl
from transformers import AutoTokenizer

import dpo
import grpo
import sft

TRAIN, TEST = (read_jsonl(ROOT / f"data/addition/{split}.jsonl") for split in ("train", "test"))


DATA_PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))


def run(*flags):
    """Run the tool with these flags, on a few sums if the flags name no data."""
    if not {"--dataset", "--prompt", "--split"} & {*flags}:
        write_jsonl("sums.jsonl", TEST[:32])
        flags = ("--dataset", "sums.jsonl", "--eval-prompts", 16, *flags)
    if "train" in flags and "--dataset" not in flags:
        Path("sums").mkdir(exist_ok=True)
        write_jsonl("sums/train.jsonl", TRAIN[:32])
        write_jsonl("sums/test.jsonl", TEST[:16])
        flags = ("--dataset", "sums", *flags)
    sample.main(sample.parse_args([str(flag) for flag in flags]))


def test_kept_and_printed_rewards_are_those_of_the_rule(capsys):
    run("--split", "train", "--num-prompts", 12, "--num-samples", 4, "--rollout-batch-size", 20, "--out", "a.jsonl")
    rows, shown = read_jsonl("a.jsonl"), capsys.readouterr().out
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in TRAIN[:12] for _ in range(4)]
    answers = [row["answer"] for row in TRAIN[:12] for _ in range(4)]
    right = [grpo.is_correct(row["completion"], answer) for row, answer in zip(rows, answers)]
    assert [row["reward"] for row in rows] == right and 0 < sum(right) < 48
    assert {*rows[0]} == {"prompt", "completion", "reward"}
    for start in range(0, 48, 4):
        lines = [f"{row['reward']:6.2f}  {row['completion']}" for row in rows[start : start + 4]]
        printed = "\n".join([rows[start]["prompt"], *lines]) + "\n"
        assert (printed in shown) == (start < 8 * 4)  # --show 8
    some = sum(any(right[start : start + 4]) for start in range(0, 48, 4)) / 12
    means = f"12 prompts, 48 completions, truncated 0.000, mean reward {sum(right) / 48:.3f}, accuracy "
    assert re.search(re.escape(means) + rf"{sum(right) / 48:.3f}, pass@2 0\.\d+, pass@4 {some:.3f}\n$", shown)


def test_rows_without_answers_need_a_reward_of_ones_own(monkeypatch, capsys):
    write_jsonl("plain.jsonl", [{"prompt": f"{i}+1="} for i in range(1, 9)])
    flags = ("--dataset", "plain.jsonl", "--eval-prompts", 1, "--num-samples", 2, "--out", "a.jsonl")
    with pytest.raises(SystemExit, match=r"a reward that needs none \(docs/data.md shows how to sample with it\)"):
        run(*flags)
    [page] = re.findall(r"^    (import grpo, my_reward, sample)\n    (.*)\n    (.*)\n", DATA_PAGE, re.MULTILINE)
    monkeypatch.setitem(sys.modules, "my_reward", SimpleNamespace(reward=lambda completion, _: float(len(completion))))
    monkeypatch.setattr(grpo, "reward_fn", grpo.reward_fn)
    monkeypatch.setattr(sys, "argv", ["my_sample.py", *map(str, flags)])
    exec("\n".join(page), {})
    assert [row["reward"] == len(row["completion"]) > 0 for row in read_jsonl("a.jsonl")] == [True, True]
    assert "mean reward" in capsys.readouterr().out


def test_the_calculator_writes_into_completions_and_its_tokens_are_marked(capsys):
    run("--prompt", "62+99+71+69=", "--num-samples", 8, "--calculator", "--out", "a.jsonl")
    printed = capsys.readouterr().out
    assert "=«161»;" in printed
    kept = [row["completion"] for row in read_jsonl("a.jsonl")]
    assert any("62+99=161;" in text for text in kept) and not any("«" in text for text in kept)


def test_pass_at_k_is_the_share_of_draws_of_k_with_a_right_one():
    right, wrong = ("\\boxed{2}", 1.0, False), ("\\boxed{3}", 0.0, True)
    samples = [({"answer": "2"}, *one) for one in (right, wrong, wrong, wrong, right, right, wrong, wrong)]
    line = sample.summary(samples, 4)  # with one right of four, 3 of 6 pairs have it; with two right, 5 of 6 have one
    assert line.endswith(f"accuracy 0.375, pass@2 {(3 / 6 + 5 / 6) / 2:.3f}, pass@4 1.000")
    assert line.startswith("2 prompts, 8 completions, truncated 0.625, mean reward 0.375")
    assert sample.summary(samples[:2], 1).endswith("accuracy 0.500")


def test_a_reward_that_needs_no_answers_is_kept_as_the_number_it_is(monkeypatch, capsys):
    monkeypatch.setattr(grpo, "reward_fn", lambda completion, _: len(completion) + 0.7)
    write_jsonl("rows.jsonl", [{"prompt": f"{i}+1="} for i in range(1, 16)])
    run("--dataset", "rows.jsonl", "--eval-prompts", 3, "--num-samples", 2, "--out", "a.jsonl")
    rows, shown = read_jsonl("a.jsonl"), capsys.readouterr().out
    held_out = Dataset.from_list(read_jsonl("rows.jsonl")).shuffle(seed=0)["prompt"][:3]
    assert [row["prompt"] for row in rows[::2]] == held_out
    assert [row["reward"] for row in rows] == [len(row["completion"]) + 0.7 for row in rows]
    assert "mean reward" in shown and "accuracy" not in shown


def test_a_reward_in_parts_counts_as_their_sum(monkeypatch, capsys):
    def reward_fn(completion, answer):
        return {"right": grpo.is_correct(completion, answer), "short": len(completion) / 100}

    monkeypatch.setattr(grpo, "reward_fn", reward_fn)
    flags = ("--split", "train", "--num-prompts", 8, "--num-samples", 4)
    run(*flags, "--out", "a.jsonl")
    rows, shown = read_jsonl("a.jsonl"), capsys.readouterr().out
    answers = [row["answer"] for row in TRAIN[:8] for _ in range(4)]
    sums = [
        grpo.is_correct(row["completion"], answer) + len(row["completion"]) / 100 for row, answer in zip(rows, answers)
    ]
    assert [row["reward"] for row in rows] == sums and min(sums) < 1 < max(sums)
    assert f"{sums[0]:6.2f}  {rows[0]['completion']}\n" in shown and f"mean reward {sum(sums) / 32:.3f}" in shown
    run(*flags, "--keep", "right", "--out", "b.jsonl")
    kept = {(row["completion"], row["reward"]) for row in rows if row["reward"] >= 1}
    assert {(row["completion"], row["reward"]) for row in read_jsonl("b.jsonl")} == kept


def test_greedy_completions_are_those_of_an_evaluation_and_samples_are_of_the_seed():
    run("--num-prompts", 16, "--temperature", 0, "--out", "a.jsonl")
    run("--num-prompts", 16, "--temperature", 0, "--seed", 7, "--rollout-batch-size", 5, "--out", "b.jsonl")
    assert Path("a.jsonl").read_text() == Path("b.jsonl").read_text()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    args = parse(grpo, dataset="sums.jsonl", eval_prompts=16)
    _, prompts = grpo.load_rows(args, tokenizer)
    sampler = grpo.load_sampler(args, tokenizer, torch.device("cpu"))
    _, texts = grpo.sample_completions(sampler, tokenizer, prompts, 0.0, args)
    assert [row["completion"] for row in read_jsonl("a.jsonl")] == texts
    assert [row["prompt"] for row in read_jsonl("a.jsonl")] == [row["prompt"] for row in prompts]
    for name, seed in (("c", 1), ("d", 1), ("e", 2)):
        run("--num-prompts", 8, "--num-samples", 2, "--seed", seed, "--out", f"{name}.jsonl")
    assert Path("c.jsonl").read_text() == Path("d.jsonl").read_text() != Path("e.jsonl").read_text()


SMALL = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(1, 11)]
ROWS = [  # more rows of a test split than an evaluation has; all rows of a small file; its held-out rows
    (["--split", "test", "--eval-prompts", 4, "--num-prompts", 512], Dataset.from_list(TEST).shuffle(seed=0)),
    (["--split", "train", "--eval-prompts", 0, "--dataset", "rows.jsonl"], SMALL),
    (["--split", "test", "--eval-prompts", 2, "--dataset", "rows.jsonl"], Dataset.from_list(SMALL).shuffle(0).take(2)),
]


@pytest.mark.parametrize("flags, rows", ROWS)
def test_which_rows_are_sampled(flags, rows):
    write_jsonl("rows.jsonl", SMALL)
    run(*flags, "--temperature", 0, "--out", "a.jsonl")
    assert [row["prompt"] for row in read_jsonl("a.jsonl")] == [row["prompt"] for row in rows]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["text", "messages", "messages with a system message"])
def test_another_model_is_sampled_by_its_template_and_sft_reads_back_what_it_was_given(form, kind, monkeypatch):
    if form == "gemma" and "system" in kind:
        pytest.skip("its template refuses a system message")
    special, template = FORMS[form]
    tokenizer = make_tokenizer(special, template)
    folder = make_folder("model", tokenizer)
    system = [{"role": "system", "content": "Add."}] * kind.endswith("system message")
    asked = [[*system, {"role": "user", "content": f"{i}+1="}] for i in range(1, 16)]
    write_jsonl("rows.jsonl", [{"question": m[0]["content"] if kind == "text" else m, "answer": "2"} for m in asked])
    seen, generate = [], grpo.generate
    monkeypatch.setattr(grpo, "generate", lambda *given, **more: seen.append(given) or generate(*given, **more))
    sizes = ["--eval-prompts", 3, "--num-samples", 2, "--max-completion-length", 24]
    sizes += ["--system-prompt", ""] * (form == "gemma")
    run("--model", folder, "--dataset", "rows.jsonl", *sizes, "--out", "a.jsonl")
    (_, prompts, _, temperature, stop_ids) = seen[-1]
    assert temperature == 1.0 and stop_ids == sorted(tokenizer.convert_tokens_to_ids(special[:2]))
    said = tokenizer.decode(prompts[0])
    assert ("Add." if system else "put your final answer within \\boxed{}." * (form != "gemma")) in said
    kept = read_jsonl("a.jsonl")
    assert len(kept) == len(prompts) == 6 and any(row["completion"].strip() for row in kept) and "3+1=" in said
    args = sft.Args(dataset="a.jsonl", max_prompt_length=512, max_completion_length=512, eval_prompts=0)
    assert [row["prompt_ids"] for row in sft.load_rows(args, tokenizer)[0]] == prompts


def test_own_prompts_have_no_rewards_and_may_come_from_standard_input():
    lines = "     -  {}\n"
    for given, flags in (("", ["--prompt", "1+2=", "--prompt", "30+4="]), ("1+2=\n\n30+4=\n", [])):
        flags = ["--num-samples", "2", "--show", "0", "--out", f"{len(flags)}.jsonl", *flags]
        output = run_file(ROOT / "tools" / "sample.py", *flags, given=given)
        rows = read_jsonl(flags[5])
        assert [row["prompt"] for row in rows] == ["1+2="] * 2 + ["30+4="] * 2
        assert all(row["reward"] is None and "boxed" in row["completion"] for row in rows)
        printed = [lines.format(row["completion"]) for row in rows]
        said = f"1+2=\n{printed[0]}{printed[1]}30+4=\n{printed[2]}{printed[3]}written: {flags[5]}\n"
        said += "2 prompts, 4 completions, truncated 0.000, no answers, so no rewards\n"
        assert said in output and "defaults" not in output


# ---- what is kept

ONE = {"prompt": "1+1=", "answer": "2"}
GROUP = [("a", 1.0, False), ("b", 0.0, False), ("a", 1.0, False), ("c", 1.0, True), ("d", 0.0, True), (" ", 0.0, False)]
GROUP += [("e", 1.5, False), ("f", 0.5, False), ("f", 0.5, False), ("g", 0.0, False)]


def keep(*flags, seed=0):
    given = sample.parse_args(["--keep", *flags])
    return sample.keep_rows([(ONE, *one) for one in GROUP], given, random.Random(seed))


def test_right_keeps_distinct_completions_of_the_least_reward_that_are_not_cut_off():
    assert sorted((row["completion"], row["reward"]) for row in keep("right")) == [("a", 1.0), ("e", 1.5)]
    assert sorted(row["completion"] for row in keep("right", "--min-reward", "0.5")) == ["a", "e", "f"]
    assert len(keep("all")) == len(GROUP) and keep("right", "--min-reward", "2") == []
    drawn = [[row["completion"] for row in keep("right", "--per-prompt", "1", seed=s % 20)] for s in range(40)]
    assert drawn[:20] == drawn[20:] and ["a"] in drawn and ["e"] in drawn and {len(texts) for texts in drawn} == {1}


def test_pairs_are_of_a_right_and_a_wrong_completion_each_used_once():
    drawn = [[(row["chosen"], row["rejected"]) for row in keep("pairs", seed=seed)] for seed in range(40)]
    for pairs in drawn:
        assert sorted(chosen for chosen, _ in pairs) == ["a", "e"] and len({rejected for _, rejected in pairs}) == 2
    assert {rejected for pairs in drawn for _, rejected in pairs} == {"b", "f", "g"}
    assert {*keep("pairs")[0]} == {"prompt", "chosen", "rejected"}


@pytest.mark.parametrize("form", ["right", "pairs"])
def test_the_rows_that_are_kept_are_of_samples_and_train(form, capsys):
    flags = ["--split", "train", "--num-prompts", 16, "--num-samples", 8, "--show", 0]
    run(*flags, "--out", "all.jsonl")
    capsys.readouterr()
    run(*flags, "--keep", form, "--per-prompt", 2, "--out", "a.jsonl")
    everything, kept = read_jsonl("all.jsonl"), read_jsonl("a.jsonl")
    for row in kept:
        texts = {one["completion"]: one["reward"] for one in everything if one["prompt"] == row["prompt"]}
        assert texts[row.get("chosen", row.get("completion"))] == 1 and texts.get(row.get("rejected"), 0) == 0
    gave = {row["prompt"] for row in kept}
    said = f"written: a.jsonl\n{len(kept)} rows, {16 - len(gave)} of 16 prompts gave none\n16 prompts, 128 completions"
    assert said in capsys.readouterr().out and max(Counter(row["prompt"] for row in kept).values()) == 2
    script = sft if form == "right" else dpo
    sizes = {"num_steps": 1, "minibatch_size": 8, "eval_prompts": 0, "run_dir": "run"}
    script.main(parse(script, model=TINY, tiny=True, dataset="a.jsonl", **sizes))
    assert f"{len(kept)} training rows; read: {len(kept)} to train on, 0 held out" in capsys.readouterr().out


def test_the_file_is_there_when_it_is_whole_and_not_where_nothing_is_right(monkeypatch):
    def fail(*_):
        assert Path("a.jsonl.unfinished").exists() and not Path("a.jsonl").exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(grpo, "sample_completions", fail)
        run("--num-prompts", 2, "--out", "a.jsonl")
    assert not Path("a.jsonl").exists()
    run("--num-prompts", 2, "--out", "a.jsonl")
    assert len(read_jsonl("a.jsonl")) == 8 and not Path("a.jsonl.unfinished").exists()
    monkeypatch.setattr(grpo, "reward_fn", lambda *_: 0.0)
    with pytest.raises(SystemExit, match="--keep right: there are no rows to keep: 2 prompts, 4 completions"):
        run("--num-prompts", 2, "--num-samples", 2, "--keep", "right", "--out", "b.jsonl")
    assert not [*Path().glob("b.jsonl*")]


def test_without_out_rewarded_samples_are_kept_in_runs_and_own_prompts_are_only_printed(capsys, monkeypatch):
    run("--num-prompts", 2, "--num-samples", 2)
    [path] = Path("runs").iterdir()
    assert f"written: {path}\n" in capsys.readouterr().out and path.name.startswith("samples__1__")
    assert len(read_jsonl(path)) == 4
    monkeypatch.setattr(grpo, "sample_completions", lambda *_: ({"truncated": torch.tensor([True])}, ["one\ntwo"]))
    run("--prompt", "1+2=", "--num-samples", 1)
    assert "1+2=\n     -  one\n        two [cut off]\n1 prompts" in capsys.readouterr().out
    assert [*Path("runs").iterdir()] == [path]


BAD = [
    (["--temperature", "-1"], "--temperature -1.0: must be a finite number of at least 0"),
    (["--temperature", "nan"], "--temperature nan: must be"),
    (["--num-samples", "0"], "--num-samples 0: must be a finite number of at least 1"),
    (["--keep", "right", "--prompt", "1+1="], "--keep right: your own prompts have no answers"),
    (["--eval-prompts", "0", "--dataset", "sums.jsonl"], "--eval-prompts 0: no rows are held out"),
    (["--prompt", "1+1=", "--dataset", "rows.jsonl"], "--prompt and --dataset: give only one of them"),
    (["--prompt", "1+1=", "--prompt", ""], "prompt 2 is empty"),
    (["--prompt", "1+1=", "--prompt", "1+" * 40], "prompt 2, '1.1.*, is longer than --max-prompt-length"),
    (["--out", "rows.jsonl"], "--out rows.jsonl exists"),
]


@pytest.mark.parametrize("flags, message", BAD)
def test_bad_input_is_one_line_and_leaves_nothing_behind(flags, message):
    write_jsonl("rows.jsonl", [{"prompt": f"{i}+1="} for i in range(1, 9)])
    write_jsonl("sums.jsonl", TEST[:4])
    with pytest.raises(SystemExit, match=message) as caught:
        run(*(flags if "--out" in flags else [*flags, "--out", "a.jsonl"]))
    assert isinstance(caught.value.code, str) and "\n" not in caught.value.code
    assert not Path("a.jsonl").exists() and len(read_jsonl("rows.jsonl")) == 8


@pytest.mark.parametrize("flags", [["--dataset", "nope.jsonl"], ["--model", "./nope"], ["--out", "nope/a.jsonl"]])
def test_what_is_not_there_is_named(flags):
    with pytest.raises((OSError, SystemExit), match="nope"):
        run(*flags)
