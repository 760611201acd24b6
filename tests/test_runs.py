"""What a run is, who may write into its folder, what may change when it is resumed, and damaged runs.
Run with: python -m pytest tests/test_runs.py
"""

import json
import os
import re
import runpy
import shutil
import signal
import sys
import textwrap
import time

import pytest
import torch.distributed as dist
import wandb
from processes import Forked
from tiny import ROOT, edit_json, exit_line, parse, read_jsonl, record, write_jsonl
from torch.distributed.checkpoint import CheckpointException

import dpo
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
    """A folder with a run of two steps in it."""
    folder = tmp_path_factory.mktemp("finished")
    grpo.main(parse(grpo, dataset=sums, run_dir=folder / "run", **SMALL))
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of that run."""
    return shutil.copytree(finished / "run", tmp_path / "run")


def files_of(run):
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def settings_of(run):
    return json.loads((run / "args.json").read_text())


def steps_of(run):
    return [line["step"] for line in read_jsonl(run / "metrics.jsonl")]


def states_of(run):
    return [path.name for path in (run / "state").glob("[0-9]*")]


def flags_of(run, dataset):
    settings = {"dataset": dataset, "run_dir": run, **SMALL}
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def test_a_run_without_a_folder_is_named_by_script_seed_and_time(tmp_path, sums, monkeypatch):
    monkeypatch.chdir(tmp_path)
    grpo.main(parse(grpo, dataset=sums, seed=7, **SMALL | {"num_steps": 0}))
    [run] = (tmp_path / "runs").iterdir()
    name, seed, started = run.name.split("__")
    assert (name, seed) == ("grpo", "7") and abs(time.time() - int(started)) < 600
    assert settings_of(run)["run_dir"] == f"runs/{run.name}"


def test_any_setting_may_change_and_the_folder_may_have_moved(run):
    given = {"num_steps": 4, "learning_rate": 1e-3, "eval_every": 3, "save_every": 3, "group_size": 4, "kl_coef": 0.0}
    given |= {"microbatch_tokens": 64, "rollout_batch_size": 1, "gradient_checkpointing": True, "precision": "bfloat16"}
    grpo.main(parse(grpo, resume=run, **given))
    lines = read_jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    # Eight completions in minibatches of two: the third step ends with optimizer step 12, after the warm-up of 8.
    assert lines[3]["optim/learning_rate"] == pytest.approx(1e-3)
    assert "eval/accuracy" in lines[3]
    assert "policy/ref_kl" in {**lines[1], **lines[2]} and "policy/ref_kl" not in {**lines[3], **lines[4]}
    assert [len(group["completions"]) for group in read_jsonl(run / "samples.jsonl")] == [2, 2, 4, 4]
    assert (given | {"run_dir": str(run)}).items() <= settings_of(run).items()  # where it was moved to


def test_a_run_that_has_done_its_steps_stays_as_it_is(run):
    before = files_of(run)
    grpo.main(parse(grpo, resume=run, num_steps=1))
    after = files_of(run)
    del before[run / "args.json"], after[run / "args.json"]
    assert after == before


def test_what_a_user_keeps_in_the_folder_stays(run):
    """As does what macOS puts into each folder that is looked at."""
    kept = [run / name for name in ("notes.jsonl", "checkpoint.best/config.json", "state/.DS_Store", "state/best/a")]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine\n")
    grpo.main(parse(grpo, resume=run, num_steps=4))
    assert [path.read_text() for path in kept] == ["mine\n"] * len(kept)
    assert states_of(run) == ["00000004"]


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


def test_of_two_runs_started_in_one_folder_one_goes_on(tmp_path, sums):
    flags = flags_of(tmp_path / "run", sums)
    both = [Forked(TWO_AT_ONCE, ["grpo.py", *flags], HERE=str(tmp_path)) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], outputs
    refused = outputs[both[0].returncode == 0]
    assert re.search(f"FileExistsError: .*'{tmp_path}/run'", refused)
    assert steps_of(tmp_path / "run") == [0, 1, 2]


@pytest.mark.parametrize("name", ["args.json", "metrics.jsonl", "state/*/.metadata", "state/*/__0_0.distcp"])
def test_a_damaged_run_is_refused(run, name):
    [path] = run.glob(name)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + b"\n\0rubbish\n")
    before = files_of(run)
    with pytest.raises((Exception, CheckpointException)):
        grpo.main(parse(grpo, resume=run, num_steps=3))
    assert files_of(run) == before


def test_without_a_state_there_is_nothing_to_go_on_from(run):
    (run / "state" / "00000002").rename(run / "state" / "unfinished")
    before = files_of(run)
    assert "this run has no saved state" in exit_line(grpo, resume=run)
    assert files_of(run) == before


def test_a_run_goes_on_with_the_file_that_started_it(run, monkeypatch):
    """A reward of one's own is in another file, and other scripts have other settings."""
    with pytest.raises(SystemExit, match="this is not the folder of a run, .*args.json does not exist"):
        parse(grpo, resume=run / "checkpoint")
    monkeypatch.setattr(sys, "argv", ["/home/me/my_reward.py", f"--resume={run}"])
    with pytest.raises(SystemExit, match="this run was started with grpo.py, not with my_reward.py"):
        grpo.parse_args()
    edit_json(run / "args.json", script="my_reward.py")
    assert grpo.parse_args().resume == str(run)
    with pytest.raises(SystemExit, match="this run was started with my_reward.py, not with dpo.py"):
        parse(dpo, resume=run)


def test_adapters_stay_what_they_were(run):
    before = files_of(run)
    assert "--lora-rank must stay 0" in exit_line(grpo, resume=run, num_steps=3, lora_rank=2)
    assert files_of(run) == before


def test_a_branch_leaves_the_run_alone_and_goes_on_as_it_would(run, tmp_path):
    """--resume A --run-dir B: B is a copy of A that goes on; no folder that is there is written into."""
    before = files_of(run)
    grpo.main(parse(grpo, resume=run, run_dir=tmp_path / "branch", num_steps=3))
    assert files_of(run) == before
    assert steps_of(tmp_path / "branch") == [0, 1, 2, 3] and states_of(tmp_path / "branch") == ["00000003"]
    grpo.main(parse(grpo, resume=tmp_path / "branch", num_steps=4))
    with pytest.raises(SystemExit, match="branch exists: name a new folder"):
        parse(grpo, resume=run, run_dir=tmp_path / "branch", num_steps=4)
    assert steps_of(tmp_path / "branch") == [0, 1, 2, 3, 4] and files_of(run) == before


FULL_DISK = """
import os, resource, signal, grpo
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
    run = tmp_path / "run"
    process = Forked(FULL_DISK, ["grpo.py", *flags_of(run, sums)], LIMIT=limit)
    output, _ = process.communicate()
    assert process.returncode == 1 and "File too large" in output, output
    assert "Traceback" in output and "[rank0]" not in output
    assert states_of(run) == ["00000001"]
    grpo.main(parse(grpo, resume=run))
    assert steps_of(run) == [0, 1, 2]
    assert [path.name for path in run.glob("checkpoint*")] == ["checkpoint"]
    assert [path.name for path in (run / "state").iterdir()] == ["00000002"]


def test_evaluations_and_completions_beside_them_are_printed(run, capsys):
    grpo.main(parse(grpo, resume=run, num_steps=4, eval_every=2))
    out = capsys.readouterr().out
    assert re.search("step 4: .*accuracy [0-9.]+", out)
    found = [line["eval/accuracy"] for line in read_jsonl(run / "metrics.jsonl") if "eval/accuracy" in line]
    assert f"accuracy {found[0]:.3f} -> {found[-1]:.3f}\n" in out
    group = read_jsonl(run / "samples.jsonl")[-1]
    assert f"step 4: prompt {group['prompt']!r}, answer {group['answer']!r}" in out
    assert all(repr(text) in out for text in group["completions"])


def test_accuracy_is_not_computed_where_the_reward_is_another(sums, tmp_path, monkeypatch, capsys):
    """With the default reward it is, also if no completion is right."""
    run = tmp_path / "run"
    monkeypatch.setattr(grpo, "is_right", lambda *_: False)
    grpo.main(parse(grpo, dataset=sums, run_dir=run, **SMALL | {"num_steps": 1}))
    monkeypatch.setattr(grpo, "reward_fn", lambda completion, _: -float(len(completion)))
    samplings = record(monkeypatch, grpo, "generate")
    grpo.main(parse(grpo, resume=run, num_steps=2))
    first, _, last = read_jsonl(run / "metrics.jsonl")
    assert {"eval/reward": 0.0, "eval/accuracy": 0.0, "eval/pass@1": 0.0, "eval/pass@4": 0.0}.items() <= first.items()
    assert {name for name in last if name.startswith("eval/")} == {"eval/reward"} and last["eval/reward"] < 0
    assert len(samplings) == 2  # the rollout and the greedy completions
    assert "reward 0.000 -> -" in capsys.readouterr().out
    monkeypatch.setattr(grpo, "is_right", lambda *_: True)
    edit_lines = (run / "metrics.jsonl").read_text().replace('"eval/accuracy": 0.0, ', "")
    (run / "metrics.jsonl").write_text(edit_lines)
    grpo.main(parse(grpo, resume=run, num_steps=3))
    assert "accuracy nan -> 1.000\n" in capsys.readouterr().out


def test_the_reward_file_of_the_readme_trains_and_can_be_imported(sums, tmp_path, monkeypatch):
    """Tools that import each file of a folder, such as pytest, must not train."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"^    import grpo\n(?:    .*\n|\n)*?    .*parse_args\(\)\)\n", readme, re.MULTILINE)
    file, run = tmp_path / "my_reward.py", tmp_path / "run"
    file.write_text(textwrap.dedent(code))
    monkeypatch.setattr(grpo, "reward_fn", grpo.reward_fn)
    monkeypatch.setattr(sys, "argv", [str(file), *flags_of(run, sums)])
    runpy.run_path(str(file), run_name="my_reward")
    assert not run.exists() and grpo.reward_fn.__module__ == "grpo"
    runpy.run_path(str(file), run_name="__main__")
    assert settings_of(run)["script"] == "my_reward.py"
    assert grpo.reward_fn("\\boxed{2}", "2") == pytest.approx(0.5**0.009)


def test_weights_and_biases_is_told_each_step_and_only_where_it_is_asked_for(run):
    grpo.main(parse(grpo, resume=run, num_steps=3))
    assert not (run / "wandb").exists()
    grpo.main(parse(grpo, resume=run, num_steps=4, track=True))
    wandb.finish()  # as at the end of a process
    [log] = run.glob("wandb/offline-run-*/*.wandb")
    assert b"reward/mean" in log.read_bytes()


def test_steps_without_signal_are_named(sums, tmp_path, monkeypatch, capsys):
    rewards = iter([1.0] * 8 + [0.0, 1.0] * 2 + [1.0] * 4)
    monkeypatch.setattr(grpo, "reward_fn", lambda _text, _answer: next(rewards))
    grpo.main(parse(grpo, dataset=sums, run_dir=tmp_path / "run", **SMALL | {"num_steps": 4, "eval_prompts": 0}))
    assert re.findall("step ([0-9]+): no learning signal", capsys.readouterr().out) == ["1", "2", "4"]


def test_after_a_run_ctrl_c_does_what_it_does_elsewhere_and_the_process_group_is_gone(run):
    grpo.main(parse(grpo, resume=run, num_steps=3))
    assert not dist.is_initialized()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_second_signal_stops_at_once():
    asked = grpo.catch_signals()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert asked == [signal.SIGINT]


def test_whoever_stops_does_not_wait_for_an_evaluation(sums, tmp_path, monkeypatch):
    run, evaluate, evaluated = tmp_path / "run", grpo.evaluate, []

    def stop_in_the_first(*given):
        evaluated.append(given[4])
        os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*given)

    monkeypatch.setattr(grpo, "evaluate", stop_in_the_first)
    with pytest.raises(SystemExit, match="^130$"):
        grpo.main(parse(grpo, dataset=sums, run_dir=run, **SMALL | {"eval_every": 1}))
    assert evaluated == [0]
    assert steps_of(run) == [0, 1] and states_of(run) == ["00000001"]
