"""What surprised users and a review: each was silent, or lost work, before it had a test here."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import pytest
import torch.distributed as dist
from processes import Forked
from tiny import ROOT, TINY, parse, read_jsonl, write_jsonl

import grpo
import grpo_tools

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 18) for b in range(20, 24)]


def run_args(tmp_path, **settings):
    """A short run on few rows without evaluation, if nothing else is said."""
    given = {"run_dir": tmp_path / "run", "dataset": write_jsonl(tmp_path / "rows.jsonl", ROWS), "eval_prompts": 0}
    given |= {"num_steps": 2, "prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "max_completion_length": 24}
    given |= {"eval_every": 2, "save_every": 2, "warmup_steps": 0, "learning_rate": 1e-3}
    return parse(grpo, **given | settings)


def on_command_line(script, *flags, **environment):
    """The process of a script with its output."""
    command = [sys.executable, str(script), *map(str, flags)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": {**os.environ, **environment}}
    return subprocess.run(command, **options, encoding="utf-8", errors="replace")


# ---- resuming and saving


def test_saving_before_the_first_optimizer_step_changes_nothing(tmp_path, monkeypatch):
    """No group has a signal in the first step; what is saved then has to have moments, but no step."""
    weights = []
    for save_every in (1, 4):
        calls = []
        monkeypatch.setattr(grpo, "score_completions", lambda texts, _, calls=calls: score(texts, calls))
        folder = tmp_path / str(save_every)
        folder.mkdir()
        settings = {"num_steps": 2 if save_every == 1 else 4, "save_every": save_every, "kl_coef": 0.0}
        grpo.main(run_args(folder, **settings))
        if save_every == 1:  # and on it goes from there
            grpo.main(parse(grpo, resume=folder / "run", num_steps=4))
        norms = [line["optim/grad_norm"] for line in read_jsonl(folder / "run" / "metrics.jsonl")[-4:]]
        assert norms[0] == 0 and min(norms[1:]) > 0
        weights.append((folder / "run" / "checkpoint" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def score(texts, calls):
    calls.append(texts)
    return [float(len(calls) > 1 and len(text) % 2) for text in texts]


# ---- what main leaves in a process that goes on


def test_after_a_run_signals_do_what_they_did_and_its_process_group_is_gone(tmp_path):
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    grpo.main(run_args(tmp_path))
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before
    assert not dist.is_initialized()


def test_a_second_signal_does_what_it_did_before_the_run():
    received = []
    signal.signal(signal.SIGINT, lambda *_: received.append("the notebook's"))
    asked, _ = grpo.catch_signals()
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)
    assert asked == [signal.SIGINT] and received == ["the notebook's"]


def test_any_launchers_environment_makes_ranks(tmp_path):
    """RANK, WORLD_SIZE and where to meet, as Kubeflow sets them, and srun with two exports."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    flags = ["grpo.py", "--run-dir", tmp_path / "run", "--num-steps", "0", "--eval-prompts", "8"]
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    code = f"import runpy; runpy.run_path({str(ROOT / 'grpo.py')!r}, run_name='__main__')"
    ranks = [Forked(code, flags, **shared, RANK=str(rank)) for rank in range(2)]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "".join(outputs).count(f"{tmp_path}/run: float32 on cpu, number of ranks: 2\n") == 1


# ---- settings


@pytest.mark.parametrize("settings", [{"minibatch_size": "8x"}, {"seed": 1.5}, {"num_steps": "True"}])
def test_numbers_that_cannot_be_are_refused(settings, capsys):
    [name] = settings
    with pytest.raises(SystemExit, match="^2$"):
        parse(grpo, **settings)
    assert f"--{name.replace('_', '-')}" in capsys.readouterr().err


# ---- data


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["run:1/", "run:1", "rows[v1].jsonl", "ROWS.JSONL", "run:1/train.jsonl"])
def test_a_path_that_exists_is_a_path(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run:1").mkdir()
    for path in ("run:1/train.jsonl", "rows[v1].jsonl", "ROWS.JSONL"):
        write_jsonl(tmp_path / path, ROWS)
    (_, _, held_out), (_, _, train) = grpo.load_splits(name, 4)
    assert len(train) == len(ROWS) and len(held_out) == 4


def test_another_ending_is_named(tmp_path):
    path = write_jsonl(tmp_path / "rows.txt", ROWS)
    with pytest.raises(Exception, match=path):
        grpo.main(run_args(tmp_path, dataset=path))
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("alone")
def test_empty_messages_and_missing_answers_are_dropped(tmp_path, tokenizer, capsys):
    def load(name):
        train, _ = grpo.load_prompts(parse(grpo, dataset=tmp_path / name, eval_prompts=0), tokenizer)
        [dropped] = re.findall("training rows of .*, dropped: ({.*})\n", capsys.readouterr().out)
        return [row["answer"] for row in train], dropped

    answers = [row["answer"] for row in ROWS]
    rows = [{"problem": "unread", "question": row["prompt"], "solution": row["answer"]} for row in ROWS]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    assert load("rows.jsonl") == (answers, "{}")
    chats = [[{"role": "user", "content": row["prompt"]}] for row in ROWS]
    chats[0] = []
    write_jsonl(tmp_path / "chats.jsonl", [{**row, "prompt": chat} for row, chat in zip(ROWS, chats)])
    assert load("chats.jsonl") == (answers[1:], str({"without a user's turn at its end": 1}))
    lines = [f"{row['prompt']},{row['answer']}\n" for row in ROWS]
    lines[:2] = ["2+2=,\n", "3+3=,nan\n"]
    (tmp_path / "rows.csv").write_text("prompt,answer\n" + "".join(lines))
    dropped = str({"without an answer that a completion can match": 1})
    assert load("rows.csv") == (["nan", *answers[2:]], dropped)  # which a text may be


# ---- what is printed


def test_the_first_step_shows_its_prompt_its_answer_and_its_completions(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(grpo, "reward_fn", lambda text, _: float(len(text) % 2))
    dataset = write_jsonl(tmp_path / "apples.jsonl", [{**row, "answer": f"{row['answer']} apples"} for row in ROWS])
    settings = {"dataset": dataset, "eval_prompts": 4, "max_completion_length": 4, "num_steps": 1}
    grpo.main(run_args(tmp_path, **settings))
    output = capsys.readouterr().out
    group = read_jsonl(tmp_path / "run" / "samples.jsonl")[0]
    lines = [f"{reward:8.2f}  {text!r}" for text, reward in zip(group["completions"], group["rewards"])]
    head = f"step 1: prompt {group['prompt']!r}, answer {group['answer']!r}, rewards and completions:"
    assert "\n".join([head, *lines]) + "\n" in output and group["answer"].endswith(" apples")
    assert read_jsonl(tmp_path / "run" / "eval_samples.jsonl")[0]["answer"].endswith(" apples")


FEW = ["--num-steps", "1", "--eval-prompts", "4", "--prompts-per-step", "4", "--minibatch-size", "32"]


def test_a_letter_that_the_terminal_has_not_ends_no_run(tmp_path):
    rows = [{"prompt": f"π {row['prompt']}", "answer": row["answer"]} for row in ROWS]
    flags = [*FEW, "--dataset", write_jsonl(tmp_path / "rows.jsonl", rows), "--run-dir", tmp_path / "run"]
    done = on_command_line(ROOT / "grpo.py", *flags, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "step 1: prompt '" in done.stdout, done.stderr


@pytest.mark.parametrize("of", ["reward_fn", "score_completions"])
def test_an_error_in_a_users_reward_names_its_line(of, tmp_path):
    text = (ROOT / "grpo.py").read_text(encoding="utf-8")
    call = {"reward_fn": "return float(is_right(", "score_completions": "rewards = []"}[of]
    script = tmp_path / "mine.py"
    script.write_text(text.replace(f"    {call}", f'    json.loads("{{")\n    {call}', 1))
    number = 1 + script.read_text().splitlines().index('    json.loads("{")')
    flags = ["--model", TINY, "--dataset", write_jsonl(tmp_path / "rows.jsonl", ROWS), "--eval-prompts", "0"]
    flags += ["--max-completion-length", "16", "--prompts-per-step", "4", "--minibatch-size", "16"]
    done = on_command_line(script, *flags, "--run-dir", tmp_path / "run")
    assert done.returncode == 1
    assert f'File "{script}", line {number}, in {of}' in done.stderr
    assert "json.decoder.JSONDecodeError: Expecting property name" in done.stderr


def test_an_error_in_a_tool_names_its_line(tokenizer, monkeypatch):
    def broken(text):
        return text[10**9]

    monkeypatch.setattr(grpo_tools, "tool_fn", broken)
    tool_use = grpo_tools.ToolUse(tokenizer, parse(grpo_tools))
    with pytest.raises(IndexError) as caught:
        tool_use.ask([3, 4])
    assert (str(caught.traceback[-1].path), caught.traceback[-1].name) == (__file__, "broken")


# ---- what a user sees of a step that takes long


def test_bars_within_a_step_and_a_rate_without_the_first_evaluation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grpo, "inner_bar", partial(grpo.inner_bar, delay=0, mininterval=0))
    evaluate, ends = grpo.evaluate, []

    def slow_evaluate(*given):
        found = evaluate(*given)
        time.sleep(3)
        ends.append(time.monotonic())
        return found

    monkeypatch.setattr(grpo, "evaluate", slow_evaluate)
    grpo.main(run_args(tmp_path, num_steps=1, eval_prompts=4))
    later = time.monotonic() - ends[0]
    shown = capsys.readouterr().err
    assert re.search(r"tokens: +\d+%", shown) and re.search(r"microbatches: +\d+%", shown)
    minutes, seconds = map(int, re.findall(r" 1/1 \[(\d+):(\d+)<", shown)[-1])
    assert minutes * 60 + seconds < later + 1


def test_whoever_stops_does_not_wait_for_an_evaluation(tmp_path, monkeypatch):
    evaluated, evaluate, score = [], grpo.evaluate, grpo.score_completions
    stop = [lambda: None, lambda: os.kill(os.getpid(), signal.SIGINT)]
    monkeypatch.setattr(grpo, "evaluate", lambda *given: (evaluated.append(given[4]), evaluate(*given))[1])
    monkeypatch.setattr(grpo, "score_completions", lambda *given: (stop.pop(0)() if stop else None, score(*given))[1])
    with pytest.raises(SystemExit, match="^130$"):
        grpo.main(run_args(tmp_path, num_steps=4, eval_prompts=4, eval_every=1))
    assert evaluated == [0] and [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [0, 1]
    grpo.main(parse(grpo, resume=tmp_path / "run", num_steps=2))
    assert evaluated == [0, 2]
