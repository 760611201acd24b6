"""What a run is, who may write into its folder, what may change when it is resumed, and damaged runs."""

import json
import os
import re
import shutil
import time
from datetime import datetime

import pytest
import torch
import wandb
from processes import Forked
from tiny import exit_line, parse, read_jsonl, write_jsonl
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import grpo

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
