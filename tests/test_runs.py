"""What a run is, who may write into its folder, and what resuming one refuses: each with one line."""

import json
import os
import re
import shlex
import shutil
import sys
import time
from dataclasses import fields

import pytest
import torch
import wandb
from processes import Forked
from tiny import ROOT, edit_json, exit_line, read_jsonl, write_jsonl
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import dapo
import dpo
import grpo
import grpo_process
import reward_model

SMALL = {"num_steps": 2, "prompts_per_step": 2, "group_size": 2, "minibatch_size": 2, "max_completion_length": 4}
SMALL |= {"eval_prompts": 2, "save_every": 1}
PAIRS = {"num_steps": 1, "minibatch_size": 2, "eval_prompts": 2}


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
    grpo.main(grpo.Args(dataset="sums.jsonl", run_dir="run", **SMALL))
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
    assert {*saved} == {"run", *(field.name for field in fields(grpo.Args))}
    assert SMALL.items() <= saved.items() and saved["learning_rate"] == 1.5e-4 and saved["dataset"] == "sums.jsonl"
    described = saved["run"]
    assert described["script"] == "grpo" and described["entry"] == os.path.basename(sys.argv[0])
    assert described["ranks"] == 1 and "8 training rows" in described["data"][0]


@pytest.mark.parametrize("described", [{"script": "gspo"}, {"ranks": 2}, {"entry": "own.py"}, {"data": ["9 rows"]}])
def test_what_was_another_run_is_refused(run, described):
    edit_json(run / "args.json", run=settings_of(run)["run"] | described)
    before = files_of(run)
    line = exit_line(grpo, resume=str(run), num_steps=3)
    assert line.startswith(f"--resume {run}: ") and all(str(value) in line for value in described.values())
    assert files_of(run) == before


@pytest.mark.parametrize("script", [dapo, grpo_process])
def test_a_run_of_another_script_is_refused(run, script):
    """grpo_process.py has the settings of grpo.py."""
    assert exit_line(script, resume=str(run), num_steps=3).startswith(f"--resume {run}: ")


def test_a_run_of_an_own_script_with_its_own_reward_is_not_gone_on_with_by_another(run, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["my runs/own_reward.py"])
    assert re.search("entry was .*, now own_reward.py$", exit_line(grpo, resume=str(run), num_steps=3))


def test_other_data_is_refused(run):
    path = run.parent / "sums.jsonl"
    path.write_text(path.read_text().replace("9+1=", "8+1="))
    assert len(re.findall("8 training rows", exit_line(grpo, resume=str(run), num_steps=3))) == 2


@pytest.mark.parametrize("script, name", [(dpo, "preferences/train"), (reward_model, "preferences/train")])
def test_an_edited_file_of_pairs_is_refused(tmp_path, script, name):
    lines = (ROOT / "data" / f"{name}.jsonl").read_text().splitlines(keepends=True)[:12]
    (tmp_path / "pairs.jsonl").write_text("".join(lines))
    script.main(script.Args(dataset=str(tmp_path / "pairs.jsonl"), run_dir=str(tmp_path / "run"), **PAIRS))
    (tmp_path / "pairs.jsonl").write_text("".join(reversed(lines)))
    assert re.search("data was .*, now ", exit_line(script, resume=str(tmp_path / "run"), num_steps=2))


# ---- what may change when a run goes on


def test_what_would_change_the_result_is_refused_by_name(run):
    before = files_of(run)
    line = exit_line(grpo, resume=str(run), group_size=4, clip_eps=0.3, num_steps=9, precision="bfloat16")
    assert "--group-size" in line and "--clip-eps" in line and "--precision" in line and "--num-steps" not in line
    assert files_of(run) == before


def test_speed_memory_and_schedule_may_change(run):
    given = {"num_steps": 4, "learning_rate": 1e-3, "eval_every": 3, "save_every": 3}
    given |= {"microbatch_tokens": 64, "rollout_batch_size": 1, "gradient_checkpointing": True}
    assert {*grpo.MAY_CHANGE} == {*given, "resume", "track", "value_learning_rate"}
    grpo.main(grpo.Args(resume=str(run), **given))
    lines = read_jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[3]["optim/learning_rate"] == pytest.approx(1e-3 * 6 / 8) and "eval/accuracy" in lines[3]
    assert given.items() <= settings_of(run).items() and settings_of(run)["resume"] is None


def test_fewer_steps_than_were_done_are_refused(run):
    before = settings_of(run)
    assert "--num-steps 1: the run has done 2 already" in exit_line(grpo, resume=str(run), num_steps=1)
    assert settings_of(run) == before and steps_of(run) == [0, 1, 2]


def test_the_command_to_go_on_is_that_of_the_script_that_was_started(run, capsys, monkeypatch):
    edit_json(run / "args.json", run=settings_of(run)["run"] | {"entry": "grpo.py"})
    monkeypatch.setattr(sys, "argv", ["elsewhere/grpo.py", "--seed", "3"])
    moved = run.rename(run.parent / "moved")
    grpo.main(grpo.Args(resume=str(moved)))
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("to go on")]
    expected = ["python", sys.argv[0], "--resume", str(moved), "--num-steps", "4"]
    assert shlex.split(line.removeprefix("to go on")) == expected


def test_what_a_user_keeps_in_the_folder_stays(run):
    (run / "notes.jsonl").write_text("mine\n")
    (run / "state" / ".DS_Store").write_text("")
    grpo.main(grpo.Args(resume=run, num_steps=4))  # a Path will do
    assert (run / "notes.jsonl").read_text() == "mine\n" and steps_of(run) == [0, 1, 2, 3, 4]
    assert [path.name for path in (run / "state").glob("[0-9]*")] == ["00000004"]


# ---- one folder, one run

TWO_AT_ONCE = """
import pathlib, sys, time, grpo
check_model, here = grpo.check_model, pathlib.Path(sys.argv[2])
def wait_for_the_other(*args):
    check_model(*args)
    (here / sys.argv[3]).touch()
    while len(list(here.glob("ready*"))) < 2:
        time.sleep(0.01)
grpo.check_model = wait_for_the_other
grpo.main(grpo.Args(run_dir=sys.argv[1], **SMALL))
"""


def test_of_two_runs_started_in_one_folder_one_goes_on(tmp_path, sums):
    code = TWO_AT_ONCE.replace("SMALL", repr({"dataset": sums, **SMALL}))
    both = [Forked(code, ["grpo.py", tmp_path / "run", tmp_path, f"ready{i}"]) for i in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], outputs
    refused = outputs[both[0].returncode == 0]
    assert "Traceback" not in refused and f"--run-dir {tmp_path}/run" in refused.strip().splitlines()[-1]
    assert steps_of(tmp_path / "run") == [0, 1, 2] and (tmp_path / "run" / "checkpoint").is_dir()


def test_runs_of_one_second_have_names_of_their_own():
    assert len({grpo.resolve_args(grpo.Args()).run_dir for _ in range(20)}) == 20


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, sums):
    (tmp_path / "file").write_text("")
    for run_dir in (f"{tmp_path}/file/run", f"{tmp_path}/{'b' * 256}/run"):
        assert exit_line(grpo, run_dir=run_dir, dataset=sums, **SMALL).startswith("--run-dir ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == ""


# ---- damaged runs


@pytest.mark.parametrize("text", [None, "", '{"model": ', "{}", "[]"])
def test_what_is_no_run_is_refused(run, text):
    (run / "args.json").unlink() if text is None else (run / "args.json").write_text(text)
    before = files_of(run)
    assert exit_line(grpo, resume=str(run)).startswith(f"--resume {run}: ")
    assert files_of(run) == before


def test_without_a_state_there_is_nothing_to_go_on_from(run):
    (run / "state" / "00000002").rename(run / "state" / "unfinished")
    before = files_of(run)
    assert exit_line(grpo, resume=str(run)).startswith(f"--resume {run}: there is no whole state")
    assert files_of(run) == before


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("content", [None, b"", b"rubbish", "half"])
def test_a_damaged_state_is_refused(run, name, content):
    path = run / "state" / "00000002" / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content == "half" else content)
    assert exit_line(grpo, resume=str(run), num_steps=3).startswith(f"--resume {run}: there is no whole state")


@pytest.mark.parametrize("bad", ['{"step": 1, "rew\n', "[1]\n", '{"reward": 1}\n', "\0\xff\n"])
def test_a_damaged_log_is_named(run, bad):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes("".join([lines[0], bad, *lines[1:]]).encode("latin-1"))
    assert f"{run}/metrics.jsonl is damaged" in exit_line(grpo, resume=str(run), num_steps=3)


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
    assert name.removeprefix("model.") in exit_line(grpo, resume=str(run), num_steps=3)


def test_a_parameter_without_gradient_does_not_prevent_resuming(tmp_path, monkeypatch, sums):
    load_model = grpo.load_model

    def load(*args):
        model, stop_ids = load_model(*args)
        model.unused = torch.nn.Parameter(torch.ones(3))
        return model, stop_ids

    monkeypatch.setattr(grpo, "load_model", load)
    for name, steps in (("reference", 3), ("run", 2)):
        sizes = SMALL | {"num_steps": steps, "eval_every": 9}
        grpo.main(grpo.Args(run_dir=str(tmp_path / name), dataset=sums, **sizes))
    grpo.main(grpo.Args(resume=str(tmp_path / "run"), num_steps=3))
    expected, found = (export(tmp_path / name, tmp_path)["model"] for name in ("reference", "run"))
    assert expected and all(found[name].equal(value) for name, value in expected.items())


FULL_DISK = """
import resource, signal, sys
import grpo
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
save = grpo.save
def limited(*args):
    if args[-1] == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES, BYTES))
    save(*args)
grpo.save = limited
grpo.main(grpo.Args(run_dir=sys.argv[1], **SMALL))
"""


@pytest.mark.parametrize("limit", [200_000, 2_500_000])
def test_a_save_that_finds_no_room_is_one_line_and_leaves_the_last_state(tmp_path, monkeypatch, sums, limit):
    """The smaller limit stops the checkpoint, the larger one the state."""
    code = FULL_DISK.replace("SMALL", repr({"dataset": sums, **SMALL})).replace("BYTES", str(limit))
    process = Forked(code, ["grpo.py", tmp_path / "run"])
    output, _ = process.communicate()
    assert process.returncode == 1 and re.search("step 2 .*--resume .*run.*File too large", output), output
    assert [path.name for path in (tmp_path / "run" / "state").glob("[0-9]*")] == ["00000001"]
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    grpo.main(grpo.Args(resume=str(tmp_path / "run")))
    assert steps_of(tmp_path / "run") == [0, 1, 2] and not [*(tmp_path / "run").rglob("*unfinished*")]


# ---- what is printed and logged


def test_evaluations_and_what_improved_are_printed(run, capsys):
    grpo.main(grpo.Args(resume=str(run), num_steps=4, eval_every=2))
    out = capsys.readouterr().out
    assert re.search(r"^step 4: reward [0-9.]+, accuracy [0-9.]+, pass@1 [0-9.]+, pass@4 [0-9.]+$", out, re.MULTILINE)
    assert re.search(r"^accuracy +[0-9.]+ -> [0-9.]+$", out, re.MULTILINE)
    assert f"{run}/checkpoint" in out and "model shards" not in out


def test_weights_and_biases_is_told_each_step_and_only_where_it_is_asked_for(run, monkeypatch):
    modes, logged = [], []
    with monkeypatch.context() as patch:  # as init itself would do it, too
        patch.setattr(wandb, "init", lambda **given: modes.append(given["mode"]))
        patch.setattr(wandb, "log", logged.append)
        for num_steps, track in ((3, False), (4, True)):
            grpo.main(grpo.Args(resume=str(run), num_steps=num_steps, track=track))
    assert modes == ["disabled", None]
    assert logged == read_jsonl(run / "metrics.jsonl")[3:]
    grpo.main(grpo.Args(resume=str(run), num_steps=5, track=True))
    [log] = run.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + 60
    while b"reward/mean" not in log.read_bytes():  # another process writes it, and may be late
        assert time.monotonic() < end
        time.sleep(0.1)


def test_an_evaluation_alone_is_no_change(sums, tmp_path, capsys):
    """As when Ctrl-C comes before the second evaluation."""
    grpo.main(grpo.Args(dataset=sums, run_dir=str(tmp_path / "run"), **SMALL | {"num_steps": 0}))
    out = capsys.readouterr().out.partition("steps in")[2]
    assert re.search(r"^accuracy +[0-9.]+$", out, re.MULTILINE) and "->" not in out


def test_control_characters_of_a_completion_do_not_reach_the_terminal(sums, tmp_path, monkeypatch, capsys):
    sample = grpo.sample_completions

    def sample_completions(*args):
        batch, texts = sample(*args)
        return batch, ["\x1b[2J\rgone\x07 é" for _ in texts]

    monkeypatch.setattr(grpo, "sample_completions", sample_completions)
    grpo.main(grpo.Args(dataset=sums, run_dir=str(tmp_path / "run"), **SMALL))
    out = capsys.readouterr().out
    assert r"\x1b[2J\rgone\x07 é" in out and not {"\x1b", "\x07"} & {*out}


def test_a_script_of_ones_own_is_told_how_it_goes_on(sums, tmp_path, monkeypatch, capsys):
    """It may read no flags, so that a command with flags would start it anew."""
    own = f"my_reward.py with Args(resume='{tmp_path}/my_reward.py', num_steps=4), or --resume {tmp_path}/my_reward.py"
    for name, expected in (("my_reward.py", own), ("grpo.py", "python grpo.py --resume")):
        monkeypatch.setattr(sys, "argv", [name])
        grpo.main(grpo.Args(dataset=sums, run_dir=str(tmp_path / name), **SMALL))
        assert expected in capsys.readouterr().out.partition("to go on")[2]


def test_without_a_trained_token_there_are_no_means_over_tokens(sums, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "reward_fn", lambda _text, _answer: 1.0)
    for kl_coef, expected in ((0.0, False), (0.04, True)):  # with a KL term all rows are trained
        run = tmp_path / f"run {kl_coef}"
        grpo.main(grpo.Args(dataset=sums, run_dir=str(run), **SMALL | {"kl_coef": kl_coef, "num_steps": 1}))
        line = read_jsonl(run / "metrics.jsonl")[-1]
        assert line["reward/zero_std"] == 1 and any(name.startswith("policy/") for name in line) == expected
        assert line["rollout/live"] == 0
