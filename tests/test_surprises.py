"""What surprised users and a review: each was silent, or lost work, before it had a test here."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from processes import Forked
from test_precision import make_main_args
from tiny import ROOT, TINY, build_model, edit_json, exit_line, read_jsonl, write_jsonl
from transformers import AutoModelForCausalLM

import dpo
import grpo
import grpo_tools
import ppo_rlhf
import sft

LONG = ROOT / "models" / "long"
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 18) for b in range(20, 24)]


def run_args(tmp_path, script=grpo, **settings):
    """A short run on few rows without evaluation, if nothing else is said."""
    given = {"run_dir": str(tmp_path / "run"), "eval_prompts": 0, "num_steps": 2}
    if script is grpo:
        given["dataset"] = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    return make_main_args(script, tmp_path, **given | settings)


def on_command_line(script, *flags, **environment):
    """The process of a script with its output."""
    command = [sys.executable, str(script), *map(str, flags)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": {**os.environ, **environment}}
    return subprocess.run(command, **options, encoding="utf-8", errors="replace")


# ---- resuming and saving


@pytest.mark.parametrize("script", [grpo, ppo_rlhf, dpo])
def test_a_run_goes_on_from_the_weights_it_began_with_alone(script, tmp_path, monkeypatch):
    """Else the reference would be another, without a word: a checkpoint changes when its own run goes on."""
    monkeypatch.setattr(ppo_rlhf, "NORM_SAMPLES", 16)
    model = shutil.copytree(TINY, tmp_path / "model")
    script.main(run_args(tmp_path, script, model=str(model)))
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    script.main(script.Args(resume=str(tmp_path / "same"), num_steps=3))
    changed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    changed.model.layers[1].mlp.up_proj.weight.data[3, 4] += 1e-6
    changed.save_pretrained(model)
    line = exit_line(script, resume=str(tmp_path / "run"), num_steps=3)
    assert "initial_weights was" in line and line.startswith("--resume")
    before = json.loads((tmp_path / "run" / "args.json").read_text())
    del before["run"]["initial_weights"]  # as of a run begun by an older version
    (tmp_path / "run" / "args.json").write_text(json.dumps(before))
    script.main(script.Args(resume=str(tmp_path / "run"), num_steps=3))


@pytest.mark.usefixtures("alone")
def test_the_checksum_of_weights_is_of_their_bits_whatever_their_dtype(tmp_path):
    found = []
    for run, dtype in (("a", torch.float32), ("b", torch.bfloat16)):
        policy = build_model("llama", dtype=torch.float32).to(torch.bfloat16).to(dtype)
        args = grpo.Args(run_dir=str(tmp_path / run), num_steps=1)
        grpo.open_run(args, policy, None, [])
        found.append(json.loads((tmp_path / run / "args.json").read_text())["run"]["initial_weights"])
    bits = sum(weight.detach().numpy().view("int32").sum(dtype="int64") for weight in policy.float().parameters())
    assert found == [int(bits) % 2**32] * 2


def test_a_folder_that_cannot_be_emptied_costs_no_save(tmp_path, monkeypatch):
    def remove(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(f"{path}: busy")

    monkeypatch.setattr(grpo.shutil, "rmtree", remove)
    grpo.main(run_args(tmp_path, num_steps=3, save_every=1))
    run = tmp_path / "run"
    assert sorted(path.name for path in (run / "state").iterdir()) == [f"{step:08d}" for step in (1, 2, 3)]
    assert len([*run.glob("checkpoint.[0-9]*")]) == 2
    monkeypatch.undo()
    grpo.main(grpo.Args(resume=str(run), num_steps=4))
    assert [path.name for path in run.glob("checkpoint*")] == ["checkpoint"]
    assert [path.name for path in (run / "state").iterdir()] == ["00000004"]


def test_a_full_disk_says_so(tmp_path, monkeypatch):
    """PyTorch's own words for it are these."""

    def write(*_, **__):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    monkeypatch.setattr(grpo.dcp, "save", write)
    with pytest.raises(SystemExit, match=r"^step 2 is not saved \(no space left\?\): mend it, then --resume"):
        grpo.main(run_args(tmp_path))


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
            grpo.main(grpo.Args(resume=str(folder / "run"), num_steps=4))
        norms = [line["optim/grad_norm"] for line in read_jsonl(folder / "run" / "metrics.jsonl")[-4:]]
        assert norms[0] == 0 and min(norms[1:]) > 0
        weights.append((folder / "run" / "checkpoint" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def score(texts, calls):
    calls.append(texts)
    return [float(len(calls) > 1 and len(text) % 2) for text in texts]


# ---- what main leaves in a process that goes on


@pytest.mark.usefixtures("alone")
def test_what_was_gathered_is_sharded_again_after_an_error():
    policy = grpo.shard(grpo.LogprobModel(build_model("llama", dtype=torch.float32)), torch.device("cpu"), "bfloat16")
    hooks = [dict(module._forward_pre_hooks) for module in policy.modules()]
    with pytest.raises(KeyError), grpo.gathered(policy):
        raise KeyError
    assert [dict(module._forward_pre_hooks) for module in policy.modules()] == hooks and any(hooks)
    assert all(hasattr(weight, "full_tensor") for weight in policy.parameters())


def test_after_a_run_signals_do_what_they_did_and_its_process_group_is_gone(tmp_path):
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    grpo.main(run_args(tmp_path))
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before
    assert not dist.is_initialized()


def test_a_second_signal_does_what_it_did_before_the_run(monkeypatch):
    received = []
    monkeypatch.setattr(grpo, "CLEANUP", grpo.contextlib.ExitStack())
    signal.signal(signal.SIGINT, lambda *_: received.append("the notebook's"))
    asked = grpo.catch_signals()
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)
    assert asked == [signal.SIGINT] and received == ["the notebook's"]


@pytest.mark.usefixtures("alone")
def test_a_process_group_of_the_program_stays(tmp_path):
    grpo.main(run_args(tmp_path, num_steps=0))
    assert dist.is_initialized()


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
    assert json.loads((tmp_path / "run" / "args.json").read_text())["run"]["ranks"] == 2


# ---- settings


def test_a_model_names_only_defaults_that_depend_on_the_model_and_flags_come_first(tmp_path, capsys):
    model = shutil.copytree(LONG, tmp_path / "model")
    wanted = {"max_completion_length": 99, "num_steps": 7, "group_size": 2, "kl_coef": 0.0, "seed": 5, "no_such": 1}
    edit_json(model / "config.json", task_defaults=wanted)
    args = grpo.resolve_args(grpo.Args(model=str(model), num_steps=3))
    assert (args.max_completion_length, args.num_steps) == (99, 3)
    assert (args.group_size, args.kl_coef, args.seed) == (8, 0.04, 1)
    grpo.main(run_args(tmp_path, model=str(model), num_steps=0, max_completion_length=None))
    assert f"{model}/config.json: task_defaults {{'max_completion_length': 99}}\n" in capsys.readouterr().out


WRONG = [{"temperature": 1e-320}, {"temperature": 1e-46}, {"minibatch_size": "8"}, {"seed": 1.5}, {"num_steps": True}]


@pytest.mark.parametrize("settings", WRONG)
def test_numbers_that_cannot_be_are_refused(settings, tmp_path):
    [name] = settings
    line = exit_line(grpo, run_dir=str(tmp_path / "run"), **settings)
    assert line.startswith(f"--{name.replace('_', '-')} {settings[name]}: must be >")


def test_a_reward_model_is_no_language_model(tmp_path):
    for script in (grpo, sft):
        line = exit_line(script, model=str(ROOT / "models" / "tiny-reward"), run_dir=str(tmp_path / "run"))
        assert "it lacks score.weight, or a place for it" in line


# ---- data


@pytest.mark.parametrize("name", ["run:1/", "run:1", "rows[v1].jsonl", "ROWS.JSONL", "run:1/train.jsonl"])
def test_a_path_that_exists_is_a_path(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run:1").mkdir()
    for path in ("run:1/train.jsonl", "rows[v1].jsonl", "ROWS.JSONL"):
        write_jsonl(tmp_path / path, ROWS)
    train, held_out, _ = grpo.load_rows(name, 4, dict)
    assert len(train) == len(ROWS) - 4 and len(held_out) == 4


def test_another_ending_is_told_which_are_read(tmp_path):
    path = write_jsonl(tmp_path / "rows.txt", ROWS)
    line = exit_line(grpo, dataset=path, run_dir=str(tmp_path / "run"))
    assert line.startswith(f"--dataset {path}: no json, jsonl, csv, parquet, folder or hub data")


def test_empty_messages_and_missing_answers_are_dropped_and_columns_are_named(tmp_path, tokenizer):
    chat = [{"role": "user", "content": " "}]
    rows = [*ROWS, {"prompt": chat, "answer": "1"}]
    rows = [{"problem": "unread", "question": row["prompt"], "solution": row["answer"]} for row in rows]
    path = write_jsonl(tmp_path / "rows.jsonl", [{**row, "question": str(row["question"])} for row in rows[:-1]])
    *_, report = grpo.load_prompts(path, tokenizer, "", 32, 2)
    assert report[0].startswith("30 training rows of question, solution (")
    path = write_jsonl(tmp_path / "chats.jsonl", [{"prompt": chat}, {"prompt": [{**chat[0], "content": "1+1="}]}])
    assert "dropped: {'without prompt or answer': 1}" in grpo.load_prompts(path, tokenizer, "", 32, 0)[2][0]
    (tmp_path / "rows.csv").write_text("prompt,answer\n1+1=,2\n2+2=,\n3+3=,nan\n")
    train, _, report = grpo.load_prompts(tmp_path / "rows.csv", tokenizer, "", 32, 0)
    assert [row["answer"] for row in train] == ["2.0"] and "{'without prompt or answer': 2}" in report[0]


# ---- what is printed


def test_the_first_step_shows_answers_and_what_was_cut_off(tmp_path, capsys, monkeypatch):
    """Of answers that no completion can match step 0 says where to look, whatever else is rewarded."""
    monkeypatch.setattr(grpo, "reward_fn", lambda text, _: float(len(text) % 2))
    dataset = write_jsonl(tmp_path / "apples.jsonl", [{**row, "answer": f"{row['answer']} apples"} for row in ROWS])
    settings = {"dataset": dataset, "eval_prompts": 4, "max_completion_length": 4, "num_steps": 1}
    grpo.main(run_args(tmp_path, **settings))
    output = capsys.readouterr().out
    group = read_jsonl(tmp_path / "run" / "samples.jsonl")[0]
    assert f"step 1: {group['prompt']!r} -> {group['answer']!r}\n" in output and group["answer"].endswith(" apples")
    assert output.count(" [cut off]\n") == sum(group["truncated"]) > 0
    assert f"nothing is right: see {tmp_path}/run/eval_samples.jsonl\n" in output
    assert read_jsonl(tmp_path / "run" / "eval_samples.jsonl")[0]["answer"].endswith(" apples")


def test_a_run_does_not_die_of_its_own_printing(tmp_path):
    """A letter that the terminal has not, and a reader that has gone."""
    rows = [{"prompt": f"π {row['prompt']}", "answer": row["answer"]} for row in ROWS]
    flags = ["--dataset", write_jsonl(tmp_path / "rows.jsonl", rows), "--num-steps", "1", "--eval-prompts", "4"]
    flags += ["--prompts-per-step", "4", "--minibatch-size", "32"]
    done = on_command_line(ROOT / "grpo.py", *flags, "--run-dir", tmp_path / "ascii", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "step 1: '? 1" in done.stdout, done.stderr
    command = [sys.executable, "-u", ROOT / "grpo.py", *flags, "--run-dir", tmp_path / "head"]
    read, write = os.pipe()
    process = subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    os.close(read)  # before the first line
    _, errors = process.communicate()
    assert (tmp_path / "head" / "state" / "00000001").exists(), errors


@pytest.mark.parametrize("of", ["reward_fn", "score_completions"])
def test_an_error_in_a_users_reward_names_its_line_on_a_line_of_its_own(of, tmp_path):
    text = (ROOT / "grpo.py").read_text(encoding="utf-8")
    call = {"reward_fn": "return float(is_right(", "score_completions": "return [reward_fn("}[of]
    script = tmp_path / "mine.py"
    script.write_text(text.replace(f"    {call}", f'    json.loads("{{")\n    {call}', 1))
    number = 1 + script.read_text().splitlines().index('    json.loads("{")')
    flags = ["--model", TINY, "--dataset", write_jsonl(tmp_path / "rows.jsonl", ROWS), "--eval-prompts", "0"]
    flags += ["--max-completion-length", "16", "--prompts-per-step", "4", "--minibatch-size", "16"]
    done = on_command_line(script, *flags, "--run-dir", tmp_path / "run")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("score_completions has to return 32 finite numbers; are there ans")
    assert f"{script}, line {number}: JSONDecodeError" in done.stderr.splitlines()[-1]


def test_an_error_in_a_tool_names_its_line(tokenizer, monkeypatch):
    def broken(text):
        return text[10**9]

    monkeypatch.setattr(grpo_tools, "tool_fn", broken)
    with pytest.warns(UserWarning, match=f"(?s)tool_fn failed with IndexError.*{__file__}.*in broken"):
        assert grpo_tools.ask_tool([3, 4], tokenizer, 9) == []


# ---- what a user sees of a step that takes long


def test_bars_within_a_step_and_a_rate_without_the_first_evaluation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grpo, "BAR", partial(grpo.BAR, delay=0, mininterval=0))
    evaluate = grpo.evaluate
    monkeypatch.setattr(grpo, "evaluate", lambda *given: (time.sleep(3 * (given[5] == 0)), evaluate(*given))[1])
    grpo.main(run_args(tmp_path, num_steps=1, eval_prompts=4))
    shown = capsys.readouterr().err
    assert re.search(r"tokens: +\d+%", shown) and re.search(r"passes: +\d+%", shown)
    minutes, seconds = map(int, re.findall(r" 1/1 \[(\d+):(\d+)<", shown)[-1])
    assert minutes * 60 + seconds < 3


def test_whoever_stops_does_not_wait_for_an_evaluation(tmp_path, monkeypatch):
    evaluated, evaluate, score = [], grpo.evaluate, grpo.score_completions
    stop = [lambda: None, lambda: os.kill(os.getpid(), signal.SIGINT)]
    monkeypatch.setattr(grpo, "evaluate", lambda *given: (evaluated.append(given[5]), evaluate(*given))[1])
    monkeypatch.setattr(grpo, "score_completions", lambda *given: (stop.pop(0)() if stop else None, score(*given))[1])
    with pytest.raises(SystemExit, match="^130$"):
        grpo.main(run_args(tmp_path, num_steps=4, eval_prompts=4, eval_every=1))
    assert evaluated == [0] and [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [0, 1]
    grpo.main(grpo.Args(resume=str(tmp_path / "run"), num_steps=2))
    assert evaluated == [0, 2]
