"""What a run is, who may write into its folder, what may change when it is resumed, and damaged runs.
Run with: python -m pytest tests/test_runs.py
"""

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
import wandb
from processes import Forked, assert_same_run, finish
from tiny import ROOT, edit_json, exit_line, parse, read_jsonl, write_jsonl
from torch.distributed.checkpoint import CheckpointException

import dpo
import grpo_tools
import ppo_rlhf
import sft

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
    grpo_tools.main(parse(grpo_tools, dataset=sums, run_dir=folder / "run", **SMALL))
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
    grpo_tools.main(parse(grpo_tools, dataset=sums, seed=7, **SMALL | {"num_steps": 0}))
    [run] = (tmp_path / "runs").iterdir()
    name, seed, started = run.name.split("__")
    assert (name, seed) == ("grpo_tools", "7")
    assert abs(time.time() - int(started) / 1e6) < 600  # two may start in a second
    assert settings_of(run)["run_dir"] == f"runs/{run.name}"


def test_any_setting_may_change_and_the_folder_may_have_moved(run):
    given = {"num_steps": 4, "learning_rate": 1e-3, "eval_every": 3, "save_every": 3, "group_size": 4}
    given |= {"microbatch_tokens": 64, "rollout_batch_size": 1, "gradient_checkpointing": True, "precision": "bfloat16"}
    grpo_tools.main(parse(grpo_tools, resume=run, **given))
    lines = read_jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    # Eight completions in minibatches of two: the third step ends with optimizer step 12, after the warm-up of 8.
    assert lines[3]["optim/learning_rate"] == pytest.approx(1e-3)
    assert "eval/accuracy" in lines[3]
    assert [len(group["completions"]) for group in read_jsonl(run / "samples.jsonl")] == [2, 2, 4, 4]
    assert (given | {"run_dir": str(run)}).items() <= settings_of(run).items()  # where it was moved to


def test_a_run_that_has_done_its_steps_stays_as_it_is(run):
    before = files_of(run)
    grpo_tools.main(parse(grpo_tools, resume=run, num_steps=1))
    after = files_of(run)
    del before[run / "args.json"], after[run / "args.json"]
    assert after == before


def test_what_a_user_keeps_in_the_folder_stays(run):
    """As does what macOS puts into each folder that is looked at. Only the run's own logs are cut."""
    kept = [
        run / name for name in ("my_samples.jsonl", "checkpoint.best/config.json", "state/.DS_Store", "state/best/a")
    ]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine\n")
    grpo_tools.main(parse(grpo_tools, resume=run, num_steps=4))
    assert [path.read_text() for path in kept] == ["mine\n"] * len(kept)
    assert states_of(run) == ["00000004"]


TWO_AT_ONCE = """
import os, pathlib, time, grpo_tools
check_model, here = grpo_tools.check_model, pathlib.Path(os.environ["HERE"])
def wait_for_the_other(*args):
    check_model(*args)
    (here / f"ready{os.getpid()}").touch()
    while len(list(here.glob("ready*"))) < 2:
        time.sleep(0.01)
grpo_tools.check_model = wait_for_the_other
grpo_tools.main(grpo_tools.parse_args())
"""


def test_of_two_runs_started_in_one_folder_one_goes_on(tmp_path, sums):
    flags = flags_of(tmp_path / "run", sums)
    both = [Forked(TWO_AT_ONCE, ["grpo_tools.py", *flags], HERE=str(tmp_path)) for _ in range(2)]
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
        grpo_tools.main(parse(grpo_tools, resume=run, num_steps=3))
    assert files_of(run) == before


def test_a_run_that_was_killed_before_its_first_save_starts_again(run, finished):
    """With the evaluation before training, and without a line twice."""
    (run / "state" / "00000002").rename(run / "state" / "unfinished")
    shutil.rmtree(run / "checkpoint")
    grpo_tools.main(parse(grpo_tools, resume=run))
    assert_same_run(run, finished / "run")
    assert steps_of(run) == [0, 1, 2]


def test_a_finished_run_whose_state_was_deleted_stays_as_it_is(run):
    """It is what takes most space."""
    shutil.rmtree(run / "state")
    before = files_of(run)
    assert exit_line(grpo_tools, resume=run, num_steps=4).endswith(f"start a new run with --model {run}/checkpoint")
    logs = {path for path in before if path.suffix == ".jsonl" or path.parent.name == "checkpoint"}
    assert {path: files_of(run)[path] for path in logs} == {path: before[path] for path in logs}


HOLD = """
import pathlib, sys, time, grpo_tools
grpo_tools.lock_run(sys.argv[1])
pathlib.Path(sys.argv[2]).touch()
time.sleep(600)
"""


def test_a_run_that_another_process_runs_is_refused_until_that_process_ends(run, tmp_path):
    holder = Forked(HOLD, ["grpo_tools.py", run, tmp_path / "locked"])
    while not (tmp_path / "locked").exists():
        assert holder.poll() is None, holder.communicate()[0]
        time.sleep(0.02)
    before = files_of(run)
    assert exit_line(grpo_tools, resume=run, num_steps=3) == f"{run}: another process is still running this run"
    assert files_of(run) == before
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    grpo_tools.main(parse(grpo_tools, resume=run, num_steps=3))  # with its lock left by the kill
    grpo_tools.main(parse(grpo_tools, resume=run, num_steps=4))  # and in the process that has the lock
    assert steps_of(run) == [0, 1, 2, 3, 4]


def test_a_training_run_holds_its_lock_until_it_ends(sums, tmp_path, monkeypatch):
    """A requeued job, whose first copy still runs, must not write into its folder."""
    score_completions = grpo_tools.score_completions
    code = f"import grpo_tools; grpo_tools.lock_run({str(tmp_path / 'run')!r})"
    refused = []

    def score(*given):
        if not refused:
            output, _ = Forked(code, ["grpo_tools.py"]).communicate()
            refused.append(output.strip())
        return score_completions(*given)

    monkeypatch.setattr(grpo_tools, "score_completions", score)
    grpo_tools.main(parse(grpo_tools, dataset=sums, run_dir=tmp_path / "run", **SMALL))
    assert refused == [f"{tmp_path / 'run'}: another process is still running this run"]
    refused.clear()
    score([], [])  # after main, as in a notebook that stays open
    assert refused == [""]


def test_a_run_whose_first_evaluation_has_fewer_metrics_ends_well(run, capsys):
    """As that of a version that measured fewer."""
    lines = read_jsonl(run / "metrics.jsonl")
    del lines[0]["eval/accuracy"]
    write_jsonl(run / "metrics.jsonl", lines)
    grpo_tools.main(parse(grpo_tools, resume=run, num_steps=3))
    assert re.findall("^(reward|accuracy) .* -> ", capsys.readouterr().out, re.MULTILINE) == ["reward"]


def test_a_run_goes_on_with_the_file_that_started_it(run, monkeypatch):
    """A reward of one's own is in another file, and other scripts have other settings."""
    with pytest.raises(SystemExit, match="this is not the folder of a run, .*args.json does not exist"):
        parse(grpo_tools, resume=run / "checkpoint")
    monkeypatch.setattr(sys, "argv", ["/home/me/my_reward.py", f"--resume={run}"])
    with pytest.raises(SystemExit, match="script must stay grpo_tools.py, not my_reward.py"):
        grpo_tools.parse_args()
    edit_json(run / "args.json", script="my_reward.py")
    assert grpo_tools.parse_args().resume == str(run)
    with pytest.raises(SystemExit, match="script must stay my_reward.py, not dpo.py"):
        parse(dpo, resume=run)


def test_a_branch_leaves_the_run_alone_and_goes_on_as_it_would(run, tmp_path):
    """--resume A --run-dir B: B is a copy of A that goes on; no folder that is there is written into."""
    (run / "link").symlink_to("gone")  # such as one of Weights & Biases, whose cache was emptied
    before = files_of(run)
    grpo_tools.main(parse(grpo_tools, resume=run, run_dir=tmp_path / "branch", num_steps=3))
    assert files_of(run) == before and (tmp_path / "branch" / "link").is_symlink()
    assert steps_of(tmp_path / "branch") == [0, 1, 2, 3] and states_of(tmp_path / "branch") == ["00000003"]
    grpo_tools.main(parse(grpo_tools, resume=tmp_path / "branch", num_steps=4))
    with pytest.raises(SystemExit, match="branch exists: name a new folder"):
        parse(grpo_tools, resume=run, run_dir=tmp_path / "branch", num_steps=4)
    assert steps_of(tmp_path / "branch") == [0, 1, 2, 3, 4] and files_of(run) == before


FULL_DISK = """
import os, resource, signal, grpo_tools
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
save, limit = grpo_tools.save, int(os.environ["LIMIT"])
def limited(*args):
    if args[-1] == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    save(*args)
grpo_tools.save = limited
grpo_tools.main(grpo_tools.parse_args())
"""


@pytest.mark.parametrize("limit", ["200000", "2500000"])
def test_a_save_that_finds_no_room_leaves_the_last_state(tmp_path, sums, limit):
    """The smaller limit stops the checkpoint, the larger one the state."""
    run = tmp_path / "run"
    process = Forked(FULL_DISK, ["grpo_tools.py", *flags_of(run, sums)], LIMIT=limit)
    output, _ = process.communicate()
    assert process.returncode == 1 and "File too large" in output, output
    assert "Traceback" in output and "[rank0]" not in output
    assert states_of(run) == ["00000001"]
    grpo_tools.main(parse(grpo_tools, resume=run))
    assert steps_of(run) == [0, 1, 2]
    assert [path.name for path in run.glob("checkpoint*")] == ["checkpoint"]
    assert [path.name for path in (run / "state").iterdir()] == ["00000002"]


def test_evaluations_and_completions_beside_them_are_printed(run, capsys):
    grpo_tools.main(parse(grpo_tools, resume=run, num_steps=4, eval_every=2))
    out = capsys.readouterr().out
    assert re.search("step 4: .*accuracy [0-9.]+", out)
    found = [line["eval/accuracy"] for line in read_jsonl(run / "metrics.jsonl") if "eval/accuracy" in line]
    assert f"accuracy {found[0]:.3f} -> {found[-1]:.3f}\n" in out
    group = read_jsonl(run / "samples.jsonl")[-1]
    assert f"step 4: prompt {group['prompt']!r}, answer {group['answer']!r}" in out
    assert all(repr(text) in out for text in group["completions"])


def test_accuracy_is_logged_where_rows_have_answers_whatever_the_reward_is(sums, tmp_path, monkeypatch, capsys):
    """Such as one for a form that is there from the start, when no answer is correct yet."""
    run = tmp_path / "run"
    monkeypatch.setattr(grpo_tools, "is_correct", lambda *_: False)
    monkeypatch.setattr(
        grpo_tools, "reward_fn", lambda completion, answer: float(grpo_tools.is_correct(completion, answer)) + 0.1
    )
    grpo_tools.main(parse(grpo_tools, dataset=sums, run_dir=run, **SMALL | {"num_steps": 1}))
    first = read_jsonl(run / "metrics.jsonl")[0]
    assert first["eval/reward"] == pytest.approx(0.1)
    assert [first.get(f"eval/{name}") for name in ("accuracy", "pass@1", "pass@4")] == [0.0, 0.0, 0.0]
    assert "accuracy 0.000 -> 0.000\n" in capsys.readouterr().out
    write_jsonl(tmp_path / "open.jsonl", [{"prompt": f"{i}+1="} for i in range(1, 11)])
    monkeypatch.setattr(grpo_tools, "reward_fn", lambda completion, _: float(len(completion)))
    settings = SMALL | {"num_steps": 0, "run_dir": tmp_path / "open"}
    grpo_tools.main(parse(grpo_tools, dataset=tmp_path / "open.jsonl", **settings))
    [line] = read_jsonl(tmp_path / "open" / "metrics.jsonl")
    assert {name for name in line if name.startswith("eval/")} == {"eval/reward"}


def test_rows_without_answers_need_a_reward_of_ones_own_and_the_first_evaluation_says_so(tmp_path):
    write_jsonl(tmp_path / "open.jsonl", [{"prompt": f"{i}+1="} for i in range(1, 11)])
    with pytest.raises(ValueError, match="no column answer, solution or ground_truth: rename a column"):
        grpo_tools.main(parse(grpo_tools, dataset=tmp_path / "open.jsonl", run_dir=tmp_path / "run", **SMALL))


NO_MEMORY = "CUDA out of memory. Tried to allocate 2 GiB."
WITHOUT_MEMORY = f"""
import sys, torch, grpo_tools
sys.argv[0] = "grpo_tools.py"
def accumulate_gradients(*_):
    raise torch.OutOfMemoryError({NO_MEMORY!r})
grpo_tools.accumulate_gradients = accumulate_gradients
grpo_tools.main(grpo_tools.parse_args())
"""


def assert_advice(stderr, flag):
    """After the traceback, whose last line is torch's message, in one line."""
    *_, message, advice = stderr.splitlines()
    assert message.endswith(f"OutOfMemoryError: {NO_MEMORY}")
    assert flag in advice and "python tools/memory.py --script" in advice and "--gradient-checkpointing" in advice


def test_out_of_memory_says_what_to_do(tmp_path, sums):
    command = [sys.executable, "-c", WITHOUT_MEMORY, *flags_of(tmp_path / "run", sums)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert_advice(done.stderr, "--rollout-batch-size")


def test_out_of_memory_says_what_to_do_in_a_script_that_does_not_sample(capsys):
    error = torch.OutOfMemoryError(NO_MEMORY)
    sft.explain_error(type(error), error, None)
    assert_advice(capsys.readouterr().err, "lower --microbatch-tokens")


def test_the_start_says_how_many_threads_compute(sums, tmp_path, capsys):
    grpo_tools.main(parse(grpo_tools, dataset=sums, run_dir=tmp_path / "run", num_steps=0, eval_prompts=0))
    out = capsys.readouterr().out
    assert re.search("float32 on cpu, CPU threads: 1, number of ranks: 1, steps done: 0$", out, re.MULTILINE)


def test_nothing_to_do_ends_well(sums, tmp_path):
    grpo_tools.main(parse(grpo_tools, dataset=sums, run_dir=tmp_path / "run", num_steps=0, eval_prompts=0))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


def test_the_printed_command_goes_on_when_it_is_pasted(run, tmp_path, capsys, monkeypatch):
    odd = run.rename(tmp_path / "my run's (1)")
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    grpo_tools.main(parse(grpo_tools, resume=odd))
    [command] = re.findall("^to train for longer: (.*)", capsys.readouterr().out, re.MULTILINE)
    shown = subprocess.run(["bash", "-c", f"set -- {command}; printf '%s\n' \"$@\""], capture_output=True, text=True)
    assert shown.stdout.splitlines() == ["python", "grpo_tools.py", "--resume", str(odd), "--num-steps", "N"]


MY_REWARD = """
import grpo_tools

def reward(completion, answer):  # both are texts; parts are added up
    return {"right": grpo_tools.is_correct(completion, answer), "thought": 0.1 * ("</think>" in completion)}

if __name__ == "__main__":
    grpo_tools.reward_fn = reward
    grpo_tools.main(grpo_tools.parse_args())
"""


def test_a_reward_file_trains_and_can_be_imported(sums, tmp_path, monkeypatch):
    """Tools that import each file of a folder, such as pytest, must not train."""
    file, run = tmp_path / "my_reward.py", tmp_path / "run"
    file.write_text(MY_REWARD)
    monkeypatch.setattr(grpo_tools, "reward_fn", grpo_tools.reward_fn)
    monkeypatch.setattr(sys, "argv", [str(file), *flags_of(run, sums)])
    runpy.run_path(str(file), run_name="my_reward")
    assert not run.exists() and grpo_tools.reward_fn.__module__ == "grpo_tools"
    runpy.run_path(str(file), run_name="__main__")
    assert settings_of(run)["script"] == "my_reward.py"
    assert grpo_tools.reward_fn("<think>1+1=2</think>\\boxed{2}", "2") == {"right": True, "thought": 0.1}
    assert grpo_tools.reward_fn("\\boxed{3}", "2") == {"right": False, "thought": 0.0}
    line = read_jsonl(run / "metrics.jsonl")[-1]
    assert line["reward/mean"] == pytest.approx(line["reward/right"] + line["reward/thought"])


def test_weights_and_biases_is_told_each_step_and_only_where_it_is_asked_for(run):
    grpo_tools.main(parse(grpo_tools, resume=run, num_steps=3))
    assert not (run / "wandb").exists()
    grpo_tools.main(parse(grpo_tools, resume=run, num_steps=4, track=True))
    wandb.teardown()  # as at the end of a process; after wandb.finish() alone, the file may still be empty
    [log] = run.glob("wandb/offline-run-*/*.wandb")
    assert b"reward/mean" in log.read_bytes()


def test_a_resumed_run_goes_on_in_weights_and_biases_and_a_branch_is_another(run, tmp_path):
    for num_steps in (3, 4):
        grpo_tools.main(parse(grpo_tools, resume=run, num_steps=num_steps, track=True))
        wandb.finish()
    grpo_tools.main(parse(grpo_tools, resume=run, run_dir=tmp_path / "branch", num_steps=5))
    wandb.finish()
    ids = []
    for folder in (run, tmp_path / "branch"):
        ids.append({path.name.split("-")[3] for path in folder.glob("wandb/offline-run-*")})
    assert [len(found) for found in ids] == [1, 1] and ids[0] != ids[1]


def test_steps_without_signal_are_named(sums, tmp_path, monkeypatch, capsys):
    rewards = iter([1.0] * 8 + [0.0, 1.0] * 2 + [1.0] * 4)
    monkeypatch.setattr(grpo_tools, "reward_fn", lambda _text, _answer: next(rewards))
    grpo_tools.main(
        parse(grpo_tools, dataset=sums, run_dir=tmp_path / "run", **SMALL | {"num_steps": 4, "eval_prompts": 0})
    )
    said = capsys.readouterr().out
    assert re.findall("step ([0-9]+): all completions of each group have the same reward", said) == [
        "1",
        "2",
        "4",
    ]


def test_after_a_run_ctrl_c_does_what_it_does_elsewhere_and_the_process_group_is_gone(run):
    grpo_tools.main(parse(grpo_tools, resume=run, num_steps=3))
    assert not dist.is_initialized()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_second_signal_stops_at_once():
    asked = grpo_tools.catch_signals()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert asked == [signal.SIGINT]


def test_whoever_stops_does_not_wait_for_an_evaluation(sums, tmp_path, monkeypatch):
    run, evaluate, step_optimizer, evaluated = tmp_path / "run", grpo_tools.evaluate, grpo_tools.step_optimizer, []

    def stop_in_the_update(*given):
        os.kill(os.getpid(), signal.SIGINT)
        return step_optimizer(*given)

    monkeypatch.setattr(grpo_tools, "step_optimizer", stop_in_the_update)
    monkeypatch.setattr(grpo_tools, "evaluate", lambda *given: evaluated.append(given[4]) or evaluate(*given))
    settings = SMALL | {"eval_every": 1, "minibatch_size": 4}  # one update per step
    with pytest.raises(SystemExit, match="^130$"):
        grpo_tools.main(parse(grpo_tools, dataset=sums, run_dir=run, **settings))
    assert evaluated == [0]
    assert steps_of(run) == [0, 1] and states_of(run) == ["00000001"]


def test_an_evaluation_in_which_a_signal_comes_is_not_logged(sums, tmp_path, monkeypatch):
    """Its rewards may be wrong. And no further rollout is waited for."""
    run, score_completions, calls = tmp_path / "run", grpo_tools.score_completions, []

    def stopped(*given):
        calls.append(1)
        if len(calls) == 3:  # after that of step 0, and the first rollout
            os.kill(os.getpid(), signal.SIGINT)
        return score_completions(*given)

    monkeypatch.setattr(grpo_tools, "score_completions", stopped)
    with pytest.raises(SystemExit, match="^130$"):
        grpo_tools.main(parse(grpo_tools, dataset=sums, run_dir=run, **SMALL | {"eval_every": 1}))
    first, line = read_jsonl(run / "metrics.jsonl")
    assert "eval/reward" in first and "eval/reward" not in line
    assert states_of(run) == ["00000001"]


@pytest.mark.parametrize("script, first", [(grpo_tools, 1), (grpo_tools, 2), (ppo_rlhf, 2)])
def test_a_rollout_in_which_a_signal_comes_is_dropped_and_repeated(script, first, sums, tmp_path, monkeypatch):
    """Ctrl-C in a terminal has ended programs of the reward, too. SIGTERM comes twice, from Slurm and from torchrun."""
    settings = SMALL | {"dataset": sums, "eval_prompts": 0, "num_steps": 3, "save_every": 10}
    settings |= {"reward_model": "none", "update_epochs": 1, "max_rounds": 1}
    settings = {name: value for name, value in settings.items() if hasattr(script.Args, name)}
    script.main(parse(script, run_dir=tmp_path / "whole", **settings))
    score_completions, calls = script.score_completions, []

    def stopped(*given):
        calls.append(1)
        if len(calls) == first:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            return [None] * len(given[0])  # what was ended has no reward
        return score_completions(*given)

    monkeypatch.setattr(script, "score_completions", stopped)
    run = tmp_path / "run"
    with pytest.raises(SystemExit, match="^143$"):
        script.main(parse(script, run_dir=run, **settings))
    assert len(calls) == first
    if first == 1:  # no step was made
        assert not (run / "state").exists()
        return
    assert states_of(run) == [f"{first - 1:08d}"]
    script.main(parse(script, resume=run))
    assert_same_run(run, tmp_path / "whole")


POOL = """
import multiprocessing, signal, time, grpo_tools
def judge(text):
    return 1.0
def wait():
    time.sleep(60)
def score(completions, rows):
    slow = multiprocessing.Process(target=wait)  # as graders do that allow an answer some seconds
    slow.start()
    slow.join(0.3)
    slow.terminate()
    slow.join()
    print("ended by", -slow.exitcode, flush=True)
    with multiprocessing.Pool(2) as pool:
        return pool.map(judge, completions)
if __name__ == "__main__":
    grpo_tools.score_completions = score
    grpo_tools.main(grpo_tools.parse_args())
"""


def test_a_reward_may_use_processes(sums, tmp_path):
    """Their terminate sends SIGTERM, and waits until it has done its work."""
    file = tmp_path / "my_pool.py"
    file.write_text(POOL)
    flags = flags_of(tmp_path / "run", sums)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, file, *flags], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert set(re.findall("ended by ([0-9]+)", done.stdout)) == {"15"}
    assert steps_of(tmp_path / "run") == [0, 1, 2]


SLOW_FORK = """
import os, signal, time, grpo_tools
os.register_at_fork(after_in_child=lambda: time.sleep(0.5))  # on a busy machine, a new process waits for its turn
signals = grpo_tools.catch_signals()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os.kill(os.getpid(), signal.SIGTERM)
print(len(signals))
"""


def test_a_process_that_is_ended_as_soon_as_it_is_started_ends():
    """multiprocessing.Pool does that with a process that got no task, and waits for its end."""
    first, *_, last = finish(Forked(SLOW_FORK, ["grpo_tools.py"])).splitlines()
    assert (first, last) == ("-15", "1")


def test_after_a_run_processes_get_the_handlers_of_their_parent(run):
    """Only while main runs may Ctrl-C not end them."""
    grpo_tools.main(parse(grpo_tools, resume=run, num_steps=3))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, str(signal.getsignal(signal.SIGINT) is signal.default_int_handler).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 10) == b"True"


def test_saving_before_the_first_gradient_changes_nothing(sums, tmp_path, monkeypatch):
    """AdamW's state that is made for a save must not count as a step."""
    settings = SMALL | {"dataset": sums, "eval_prompts": 0, "num_steps": 4, "warmup_steps": 0}
    for save_every in (1, 10):
        rewards = iter([1.0] * 8 + [0.0, 1.0] * 4)  # two steps without gradient
        monkeypatch.setattr(grpo_tools, "reward_fn", lambda *_, rewards=rewards: next(rewards))
        grpo_tools.main(parse(grpo_tools, run_dir=tmp_path / str(save_every), **settings | {"save_every": save_every}))
    assert [line["optim/grad_norm"] > 0 for line in read_jsonl(tmp_path / "1" / "metrics.jsonl")] == [0, 0, 1, 1]
    assert_same_run(tmp_path / "1", tmp_path / "10")
