"""A run that is killed and resumed equals one that never was: real processes, real kill -9."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import (
    KILLS,
    SECONDS,
    Ranks,
    assert_same_run,
    compare_killed_and_resumed,
    finish,
    logged,
    start,
)
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
GRPO = (
    "--num-steps 6 --prompts-per-step 4 --group-size 4 --minibatch-size 8 --max-completion-length 32 --eval-prompts 8 "
    "--eval-every 3 --save-every 2 --warmup-steps 2 --seed 5"
).split()
SFT = [*"--num-steps 6 --minibatch-size 8".split(), *GRPO[10:]]
REINFORCE = GRPO[:6] + GRPO[8:]

# Each kills its own process with SIGKILL at one exact moment.


def few_rows(folder, script):
    """Flags for a part of the embedded data, which is tokenized whole before the first step."""
    name = "sft" if script == "sft" else "train"
    rows = (ROOT / "data" / "addition" / f"{name}.jsonl").read_text().splitlines()[:64]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return ["--dataset", str(folder / "rows.jsonl")]


def test_killed_and_resumed_run_is_bit_identical(tmp_path):
    """Killed three times; what saves and resumes is the same in every script, as test_copies.py sees to."""
    flags, run = [*GRPO, *few_rows(tmp_path, "grpo")], tmp_path / "run"
    reference = start("grpo", [*flags, "--run-dir", f"{tmp_path}/reference"])
    kills = [kill.replace("KILL_AT_CALL", "6") for kill in KILLS.values()]
    finish(start("grpo", [*flags, "--run-dir", str(run)], kills[0]), -signal.SIGKILL)
    assert logged(run)[-1]["step"] == 2 and [path.name for path in (run / "state").iterdir()] == ["00000002"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/mean": 0.')  # a line the kill cut short
    before = load_file(run / "checkpoint" / "model.safetensors")
    finish(start("grpo", ["--resume", str(run)], kills[1]), -signal.SIGKILL)
    assert sorted(path.name for path in (run / "state").iterdir()) == ["00000002", "unfinished"]
    after = load_file(run / "checkpoint" / "model.safetensors")
    assert not all(after[name].equal(before[name]) for name in before)  # that of step 4, which is done again
    finish(start("grpo", ["--resume", str(run)], kills[2]), -signal.SIGKILL)
    assert not (run / "checkpoint").exists()
    assert "--resume" in finish(start("grpo", ["--resume", str(run)]))
    assert sorted(path.name for path in run.glob("*.*") if path.suffix not in (".json", ".jsonl")) == []
    assert [path.name for path in (run / "state").iterdir()] == ["00000006"]
    finish(reference)
    assert_same_run(run, tmp_path / "reference")


@pytest.mark.parametrize(
    ("script", "flags", "kill_at_call"),
    [
        ("reinforce", REINFORCE, "5"),
        ("dr_grpo", GRPO, "10"),
        ("dapo", GRPO, "10"),
        ("gspo", GRPO, "10"),
        ("grpo_tools", GRPO, "10"),
        ("sft", SFT, "5"),
    ],
)
def test_run_killed_once_and_resumed_is_bit_identical(script, flags, kill_at_call, tmp_path, monkeypatch):
    flags = [*flags, *few_rows(tmp_path, script)]
    run, _ = compare_killed_and_resumed(importlib.import_module(script), flags, kill_at_call, tmp_path, monkeypatch)
    if script == "dapo":
        rounds = [line["rollout/rounds"] for line in logged(run)[1:]]
        assert max(rounds[:4]) > 1 and max(rounds[4:]) > 1, rounds
        assert logged(run)[4]["rollout/prompts_consumed"] == 4 * sum(rounds[:4])


def wait_for_step(run, step, process):
    for _ in range(10 * SECONDS):
        if (run / "metrics.jsonl").exists() and any(line["step"] >= step for line in logged(run)):
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError("no step was logged")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_finishes_the_step_saves_and_prints_how_to_resume(signum, tmp_path):
    run = tmp_path / "run"
    process = start("grpo", [*GRPO, "--run-dir", str(run), "--num-steps", "500", "--save-every", "500"])
    wait_for_step(run, 1, process)
    process.send_signal(signum)
    output = finish(process, 128 + signum)  # so that a && b does not go on with b
    assert f"--resume {run}" in output and "stopping after this step" in output
    last_step = logged(run)[-1]["step"]
    assert last_step < 500
    assert [int(path.name) for path in (run / "state").iterdir()] == [last_step]
    assert (run / "checkpoint" / "model.safetensors").exists()


@pytest.mark.parametrize("script, function", [("grpo", "load_model"), ("dpo", "look_up_pairs")])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_before_the_first_step_just_ends_the_process(script, function, signum, tmp_path):
    kill = "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)  # also in a background job\n"
    kill += f"def killed(*_):\n    print('reached', flush=True)\n    os.kill(os.getpid(), {int(signum)})\n"
    kill += f"    time.sleep(60)\nscript.{function} = killed"
    expected = {signal.SIGINT: 1, signal.SIGTERM: -signal.SIGTERM}[signum]  # Ctrl-C is an exception there
    output = finish(start(script, ["--run-dir", str(tmp_path / "run")], kill), expected).rstrip()
    assert output.endswith("KeyboardInterrupt" if signum == signal.SIGINT else "reached")
    assert not (tmp_path / "run").exists()


def test_a_stop_in_the_first_evaluation_comes_after_the_first_step(tmp_path):
    run = tmp_path / "run"
    kill = "evaluate = script.evaluate\nscript.evaluate = lambda *args: (os.kill(os.getpid(), 2), evaluate(*args))[1]"
    output = finish(start("grpo", [*GRPO, *few_rows(tmp_path, "grpo"), "--run-dir", str(run)], kill), 130)
    assert f"--resume {run}" in output and [line["step"] for line in logged(run)] == [0, 1]
    assert [path.name for path in (run / "state").iterdir()] == ["00000001"]


ADAPTERS = [*GRPO, "--lora-rank", "2", "--precision", "bfloat16"]


def start_torchrun(script, flags):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [ROOT / f"{script}.py", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)


@pytest.mark.parametrize(("script", "flags"), [("grpo", GRPO), ("sft", SFT), ("dapo", ADAPTERS)])
def test_two_ranks_resume_after_a_kill(script, flags, tmp_path):
    """The process of grpo.py that is killed is torchrun, with its ranks; the other ranks meet without it."""
    reference, run = tmp_path / "reference", tmp_path / "run"
    flags = [*flags, *few_rows(tmp_path, script)]
    finish(start(script, [*flags, "--run-dir", str(reference), "--num-steps", "4"], kind=Ranks))
    flags = [*flags, "--run-dir", str(run), "--num-steps", "500"]
    process = start_torchrun(script, flags) if script == "grpo" else start(script, flags, kind=Ranks)
    wait_for_step(run, 3, process)
    if script == "grpo":
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        pids = [process.pid, *map(int, children)]
    else:
        pids = [rank.pid for rank in process.forked]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    last_state = max(int(path.name) for path in (run / "state").iterdir() if path.name.isdigit())
    output = finish(start(script, ["--resume", str(run), "--num-steps", str(max(4, last_state + 1))], kind=Ranks))
    assert output.count(f"to continue: --resume {run} --num-steps N") == 1
    compared = [line for line in logged(run) if line["step"] <= 4 and line["step"] > 0]
    assert [line["step"] for line in compared] == [1, 2, 3, 4]
    for line, expected in zip(compared, logged(reference)[1:]):
        assert line["optim/grad_norm"] == pytest.approx(expected["optim/grad_norm"], rel=1e-5)
        assert line.get("rollout/prompts_consumed") == expected.get("rollout/prompts_consumed")
