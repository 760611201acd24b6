"""What a run is, who may write into its folder, what may change when it is resumed, and damaged runs."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime
from functools import partial

import pytest
import torch
import torch.distributed as dist
import wandb
from processes import Forked
from tiny import ROOT, TINY, exit_line, parse, read_jsonl, write_jsonl
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import grpo
import grpo_tools

SMALL = {"num_steps": 2, "prompts_per_step": 2, "group_size": 2, "minibatch_size": 2, "max_completion_length": 4}
SMALL |= {"eval_prompts": 2, "save_every": 1}


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """A small data set, which loads fast."""
    rows = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(1, 11)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "sums.jsonl", rows)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, sums):
    """A folder with a data set and a run of two steps in it, both named by relative paths."""
    folder, before = tmp_path_factory.mktemp("finished"), os.getcwd()
    shutil.copy(sums, folder)
    os.chdir(folder)
    grpo.main(parse(grpo, dataset="sums.jsonl", run_dir="run", **SMALL))
    os.chdir(before)
    return folder


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    """A copy of that run, whose data set is beside it."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def files_of(run):
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def settings_of(run):
    return json.loads((run / "args.json").read_text())


def steps_of(run):
    return [line["step"] for line in read_jsonl(run / "metrics.jsonl")]


# ---- what a run is


def test_a_run_says_what_it_was(run):
    saved = settings_of(run)
    assert saved == vars(parse(grpo, dataset="sums.jsonl", run_dir="run", **SMALL))
    assert SMALL.items() <= saved.items() and saved["learning_rate"] == 1.5e-4


def test_a_precision_that_was_found_is_the_one_of_the_run(tmp_path, sums):
    for resume in ("", tmp_path / "run"):
        grpo.main(parse(grpo, run_dir=tmp_path / "run", dataset=sums, precision="auto", resume=resume, **SMALL))
        assert settings_of(tmp_path / "run")["precision"] == "float32"


def test_a_run_without_a_folder_is_named_by_script_seed_and_time(tmp_path, sums, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    grpo.main(parse(grpo, dataset=sums, seed=7, **SMALL | {"num_steps": 0}))
    [run] = (tmp_path / "runs").iterdir()
    started = datetime.strptime(run.name, "grpo__7__%Y%m%d-%H%M%S-%f")
    assert abs(datetime.now() - started).total_seconds() < 600 and settings_of(run)["run_dir"] == f"runs/{run.name}"
    assert f"runs/{run.name}: float32 on cpu, number of ranks: 1\n" in capsys.readouterr().out


# ---- what may change when a run goes on


def test_any_setting_may_change(run):
    given = {"num_steps": 4, "learning_rate": 1e-3, "eval_every": 3, "save_every": 3, "group_size": 4, "kl_coef": 0.0}
    given |= {"microbatch_tokens": 64, "rollout_batch_size": 1, "gradient_checkpointing": True, "precision": "bfloat16"}
    grpo.main(parse(grpo, resume=run, **given))
    lines = read_jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    # Eight completions in minibatches of two: the third step ends with optimizer step 12, after the warm-up of 8.
    assert lines[3]["optim/learning_rate"] == pytest.approx(1e-3) and "eval/accuracy" in lines[3]
    assert "loss/kl" in {**lines[1], **lines[2]} and "loss/kl" not in {**lines[3], **lines[4]}
    assert [len(group["completions"]) for group in read_jsonl(run / "samples.jsonl")] == [2, 2, 4, 4]
    assert given.items() <= settings_of(run).items() and settings_of(run)["resume"] == ""


def test_what_is_not_given_stays_as_it_was(run):
    before = settings_of(run)
    grpo.main(parse(grpo, resume=run, num_steps=3))
    assert settings_of(run) == before | {"num_steps": 3, "run_dir": str(run)} and steps_of(run) == [0, 1, 2, 3]


def test_a_run_that_has_done_its_steps_stays_as_it_is(run):
    before = files_of(run)
    for num_steps in (1, 2):
        grpo.main(parse(grpo, resume=run, num_steps=num_steps))
        after = files_of(run)
        assert after.pop(run / "args.json") and after.items() <= before.items() and len(after) == len(before) - 1


def test_a_run_that_was_moved_goes_on_where_it_is(run, capsys):
    moved = run.rename(run.parent / "moved")
    grpo.main(parse(grpo, resume=moved, num_steps=3))
    assert f"model: {moved}/checkpoint; to continue: --resume {moved} --num-steps N\n" in capsys.readouterr().out
    assert steps_of(moved) == [0, 1, 2, 3] and settings_of(moved)["run_dir"] == str(moved) and not run.exists()


@pytest.mark.parametrize(
    "name", ["notes.txt", "notes.jsonl", "checkpoint.best/config.json", "state/.DS_Store", "state/best/.metadata"]
)
def test_what_a_user_keeps_in_the_folder_stays(run, name):
    """As is what macOS puts into each folder that is looked at."""
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text("mine\n")
    grpo.main(parse(grpo, resume=run, num_steps=4))
    assert (run / name).read_text() == "mine\n" and steps_of(run) == [0, 1, 2, 3, 4]
    assert [path.name for path in (run / "state").glob("[0-9]*")] == ["00000004"]


# ---- one folder, one run

TWO_AT_ONCE = """
import os, pathlib, time, grpo
check_model, here = grpo.check_model, pathlib.Path(os.environ["HERE"])
def wait_for_the_other(*args):
    check_model(*args)
    (here / f"ready{os.getpid()}").touch()
    while len(list(here.glob("ready*"))) < 2:
        time.sleep(0.01)
grpo.check_model = wait_for_the_other
grpo.main(grpo.parse_args())
"""


def flags_of(**settings):
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def test_of_two_runs_started_in_one_folder_one_goes_on(tmp_path, sums):
    flags = flags_of(dataset=sums, run_dir=tmp_path / "run", **SMALL)
    both = [Forked(TWO_AT_ONCE, ["grpo.py", *flags], HERE=str(tmp_path)) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], outputs
    refused = outputs[both[0].returncode == 0]
    assert re.search(f"FileExistsError: .*'{tmp_path}/run'", refused)
    assert steps_of(tmp_path / "run") == [0, 1, 2] and (tmp_path / "run" / "checkpoint").is_dir()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, sums):
    (tmp_path / "file").write_text("")
    for run_dir in (f"{tmp_path}/file/run", f"{tmp_path}/{'b' * 256}/run"):
        with pytest.raises(OSError, match=run_dir):
            grpo.main(parse(grpo, run_dir=run_dir, dataset=sums, **SMALL))
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == ""


# ---- damaged runs


def assert_refused_and_unchanged(run, match=None):
    before = files_of(run)
    with pytest.raises((Exception, CheckpointException), match=match):
        grpo.main(parse(grpo, resume=run, num_steps=3))
    assert files_of(run) == before


@pytest.mark.parametrize("text", [None, "", '{"model": ', "[]", '{"no_such_flag": 1}'])
def test_what_is_no_run_is_refused(run, text):
    (run / "args.json").unlink() if text is None else (run / "args.json").write_text(text)
    assert_refused_and_unchanged(run)


def test_without_a_state_there_is_nothing_to_go_on_from(run):
    (run / "state" / "00000002").rename(run / "state" / "unfinished")
    before = files_of(run)
    assert exit_line(grpo, resume=run).startswith(f"--resume {run}: this run has not saved a state")
    assert files_of(run) == before


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("content", [None, b"", b"rubbish", "half"])
def test_a_damaged_state_is_refused(run, name, content):
    path = run / "state" / "00000002" / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content == "half" else content)
    assert_refused_and_unchanged(run)


@pytest.mark.parametrize("bad", ['{"step": 1, "rew\n', "[1]\n", '{"reward": 1}\n', "\0\xff\n"])
def test_a_damaged_log_is_refused(run, bad):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes("".join([lines[0], bad, *lines[1:]]).encode("latin-1"))
    assert_refused_and_unchanged(run)


def export(run, folder):
    """The state of a run, read without any of our code."""
    [state] = (run / "state").iterdir()
    dcp_to_torch_save(state, folder / f"{run.name}.pt")
    return torch.load(folder / f"{run.name}.pt", weights_only=False)


def test_a_state_that_lacks_a_tensor_is_refused(run):
    state = export(run, run.parent)
    name = next(name for name in state["model"] if "q_proj" in name)
    del state["model"][name]
    shutil.rmtree(run / "state" / "00000002")
    torch.distributed.checkpoint.save(state, checkpoint_id=run / "state" / "00000002", no_dist=True)
    assert_refused_and_unchanged(run, re.escape(name.removeprefix("model.")))


def test_a_parameter_without_gradient_does_not_prevent_resuming(tmp_path, monkeypatch, sums):
    load_model = grpo.load_model

    def load(*args):
        model = load_model(*args)
        model.unused = torch.nn.Parameter(torch.ones(3))
        return model

    monkeypatch.setattr(grpo, "load_model", load)
    for name, steps in (("reference", 3), ("run", 2)):
        sizes = SMALL | {"num_steps": steps, "eval_every": 9}
        grpo.main(parse(grpo, run_dir=tmp_path / name, dataset=sums, **sizes))
    grpo.main(parse(grpo, resume=tmp_path / "run", num_steps=3))
    expected, found = (export(tmp_path / name, tmp_path)["model"] for name in ("reference", "run"))
    assert expected and all(found[name].equal(value) for name, value in expected.items())


FULL_DISK = """
import os, resource, signal
import grpo
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
save, limit = grpo.save, int(os.environ["LIMIT"])
def limited(*args):
    if args[-1] == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    save(*args)
grpo.save = limited
grpo.main(grpo.parse_args())
"""


@pytest.mark.parametrize("limit", ["200000", "2500000"])
def test_a_save_that_finds_no_room_leaves_the_last_state(tmp_path, sums, limit):
    """The smaller limit stops the checkpoint, the larger one the state."""
    flags = flags_of(dataset=sums, run_dir=tmp_path / "run", **SMALL)
    process = Forked(FULL_DISK, ["grpo.py", *flags], LIMIT=limit)
    output, _ = process.communicate()
    assert process.returncode == 1 and "File too large" in output, output
    assert [path.name for path in (tmp_path / "run" / "state").glob("[0-9]*")] == ["00000001"]
    grpo.main(parse(grpo, resume=tmp_path / "run"))
    assert steps_of(tmp_path / "run") == [0, 1, 2]
    assert [path.name for path in (tmp_path / "run").glob("checkpoint*")] == ["checkpoint"]
    assert [path.name for path in (tmp_path / "run" / "state").iterdir()] == ["00000002"]


# ---- what is printed and logged


def test_evaluations_and_what_improved_are_printed(run, capsys):
    grpo.main(parse(grpo, resume=run, num_steps=4, eval_every=2))
    out = capsys.readouterr().out
    numbers = ", ".join(f"eval/{name} [0-9.]+" for name in ("reward", "accuracy", "pass@1", "pass@4"))
    assert re.search(f"^step 4: {numbers}$", out, re.MULTILINE)
    first, last = [line["eval/accuracy"] for line in read_jsonl(run / "metrics.jsonl") if "eval/accuracy" in line][::2]
    assert f"\naccuracy {first:.3f} -> {last:.3f}\n" in out
    assert f"model: {run}/checkpoint; to continue: --resume {run} --num-steps N\n" in out
    assert "model shards" not in out


def test_weights_and_biases_is_told_each_step_and_only_where_it_is_asked_for(run, monkeypatch):
    inits, logged = [], []
    with monkeypatch.context() as patch:
        patch.setattr(wandb, "init", lambda **given: inits.append(given))
        patch.setattr(wandb, "log", logged.append)
        grpo.main(parse(grpo, resume=run, num_steps=3, track=False))
        assert inits == logged == []
        grpo.main(parse(grpo, resume=run, num_steps=4, track=True))
    assert inits == [{"name": str(run), "dir": str(run), "config": settings_of(run)}]
    assert logged == read_jsonl(run / "metrics.jsonl")[4:]
    grpo.main(parse(grpo, resume=run, num_steps=5))  # it goes on as it was
    [log] = run.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + 60
    while b"reward/mean" not in log.read_bytes():  # another process writes it, and may be late
        assert time.monotonic() < end
        time.sleep(0.1)


def test_an_evaluation_alone_is_no_change(sums, tmp_path, capsys):
    """As when Ctrl-C comes before the second evaluation."""
    grpo.main(parse(grpo, dataset=sums, run_dir=tmp_path / "run", **SMALL | {"num_steps": 0}))
    out = capsys.readouterr().out
    assert re.search(r"^step 0: .*eval/accuracy [0-9.]+", out, re.MULTILINE)
    assert "->" not in out and "to continue" not in out


def test_control_characters_of_a_completion_do_not_reach_the_terminal(sums, tmp_path, monkeypatch, capsys):
    sample = grpo.sample_completions

    def sample_completions(*args):
        batch, texts = sample(*args)
        return batch, ["\x1b[2J\rgone\x07 é" for _ in texts]

    monkeypatch.setattr(grpo, "sample_completions", sample_completions)
    grpo.main(parse(grpo, dataset=sums, run_dir=tmp_path / "run", **SMALL))
    out = capsys.readouterr().out
    assert r"\x1b[2J\rgone\x07 é" in out and not {"\x1b", "\x07"} & {*out}


def test_without_a_trained_token_there_are_no_means_over_tokens(sums, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "reward_fn", lambda _text, _answer: 1.0)
    for kl_coef, expected in ((0.0, False), (0.04, True)):  # with a KL term all rows are trained
        run = tmp_path / f"run {kl_coef}"
        grpo.main(parse(grpo, dataset=sums, run_dir=run, **SMALL | {"kl_coef": kl_coef, "num_steps": 1}))
        line = read_jsonl(run / "metrics.jsonl")[-1]
        assert line["reward/zero_std"] == 1 and any(name.startswith("policy/") for name in line) == expected


def test_five_steps_without_signal_are_named(sums, tmp_path, monkeypatch, capsys):
    rewards = iter([1.0] * 26 + [0.0] * 2 + [1.0] * 100)
    monkeypatch.setattr(grpo, "reward_fn", lambda _text, _answer: next(rewards))
    grpo.main(parse(grpo, dataset=sums, run_dir=tmp_path / "run", **SMALL | {"num_steps": 15, "eval_prompts": 0}))
    found = re.findall("step ([0-9]+): no learning signal for five steps", capsys.readouterr().out)
    zero_std = [line["reward/zero_std"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert zero_std == [1.0] * 15 and found == ["5", "10", "15"]


# ==== what surprised users and a review: each was silent, or lost work, before it had a test here


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
