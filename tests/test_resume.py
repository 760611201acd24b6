"""A run that is killed and resumed equals one that never was: real processes, real kill -9."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tyro
from processes import SECONDS, Forked, Ranks
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
GRPO = (
    "--num-steps 6 --prompts-per-step 4 --group-size 4 --minibatch-size 8 --max-completion-length 32 --eval-prompts 8 "
    "--eval-every 3 --save-every 2 --warmup-steps 2 --seed 3"
).split()
SFT = (
    "--num-steps 6 --minibatch-size 8 --eval-prompts 8 --eval-every 3 --save-every 2 --warmup-steps 2 --seed 3".split()
)
REINFORCE = (
    "--num-steps 6 --prompts-per-step 4 --group-size 4 --max-completion-length 32 --eval-prompts 8 "
    "--eval-every 3 --save-every 2 --warmup-steps 2 --seed 3"
).split()

# Each kills its own process with SIGKILL at one exact moment.
KILLS = {
    "state complete, checkpoint not yet written": """
def killed(*args):
    os.kill(os.getpid(), 9)
script.save_checkpoint = killed
""",
    "state written, but not yet published": """
save = script.dcp.save
def killed(*args, **kwargs):
    save(*args, **kwargs)
    os.kill(os.getpid(), 9)
script.dcp.save = killed
""",
    "in the first step after a save": """
accumulate, calls = script.accumulate_gradients, []
def killed(*args):
    calls.append(args)
    if len(calls) == KILL_AT_CALL:
        os.kill(os.getpid(), 9)
    return accumulate(*args)
script.accumulate_gradients = killed
""",
}


def few_rows(folder):
    """Flags for a part of the embedded data of sft.py, which it tokenizes whole before the first step."""
    rows = (ROOT / "data" / "addition" / "sft.jsonl").read_text().splitlines()[:64]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return ["--dataset", str(folder / "rows.jsonl")]


def start(script, flags, kill="", kind=Forked):
    code = f"import os, sys, tyro\nimport {script} as script\n{kill}\nscript.main(tyro.cli(script.Args))"
    return kind(code, [f"{script}.py", *flags])


def finish(process, expected=0):
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == expected, output
    return output


def logged(run, name="metrics.jsonl"):
    lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in lines]


def assert_same_run(run, reference):
    assert logged(run) == logged(reference)
    for name in ("samples.jsonl", "eval_samples.jsonl"):
        assert (run / name).exists() == (reference / name).exists()
        assert not (run / name).exists() or logged(run, name) == logged(reference, name)
    weights, expected = (load_file(r / "checkpoint" / "model.safetensors") for r in (run, reference))
    assert weights.keys() == expected.keys()
    assert all(weights[name].equal(expected[name]) for name in expected)


def test_killed_and_resumed_run_is_bit_identical(tmp_path):
    """Three times; saving and resuming are the same functions in every script, as test_copies.py sees to."""
    reference = start("grpo", [*GRPO, "--run-dir", f"{tmp_path}/reference"])
    run = tmp_path / "run"
    kills = list(KILLS.values())
    finish(start("grpo", [*GRPO, "--run-dir", str(run)], kills[0]), -signal.SIGKILL)
    assert [path.name for path in (run / "state").iterdir()] == ["00000002"]
    assert not (run / "checkpoint").exists()
    finish(start("grpo", ["--resume", str(run)], kills[1]), -signal.SIGKILL)
    assert sorted(path.name for path in (run / "state").iterdir()) == ["00000002", "unfinished"]
    assert (run / "checkpoint").exists()  # resuming wrote the one that was missing
    finish(start("grpo", ["--resume", str(run)], kills[2].replace("KILL_AT_CALL", "6")), -signal.SIGKILL)
    assert logged(run)[-1]["step"] == 4
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/mean": 0.')  # a line the kill cut short
    assert "--resume" in finish(start("grpo", ["--resume", str(run)]))
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
def test_run_killed_once_and_resumed_is_bit_identical(script, flags, kill_at_call, tmp_path):
    """The killed run is a process of its own; the others are in this one, which has not seen what that one did."""
    reference, run = tmp_path / "reference", tmp_path / "run"
    flags = [*flags, *few_rows(tmp_path)] if script == "sft" else flags
    kill = KILLS["in the first step after a save"].replace("KILL_AT_CALL", kill_at_call)
    process = start(script, [*flags, "--run-dir", str(run)], kill)
    module = importlib.import_module(script)
    module.main(tyro.cli(module.Args, args=[*flags, "--run-dir", str(reference)]))
    finish(process, -signal.SIGKILL)
    assert logged(run)[-1]["step"] == 4 and len(logged(run)) == 5
    module.main(module.Args(resume=str(run)))
    assert_same_run(run, reference)
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


@pytest.mark.parametrize("script, function", [("grpo", "load_model"), ("dpo", "add_reference")])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_before_the_first_step_just_ends_the_process(script, function, signum, tmp_path):
    kill = f"script.{function} = lambda *_: (print('reached', flush=True), os.kill(os.getpid(), {int(signum)}))"
    output = finish(start(script, ["--run-dir", str(tmp_path / "run")], kill), -signum)
    assert output.endswith("reached\n")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc to see how far a process is")
def test_ctrl_c_while_libraries_load_leaves_no_traceback():
    process = subprocess.Popen([sys.executable, ROOT / "grpo.py"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert finish(process, -signal.SIGINT) == b""


def test_a_stop_before_anything_was_trained_promises_nothing(tmp_path):
    kill = "evaluate = script.evaluate\nscript.evaluate = lambda *args: (os.kill(os.getpid(), 2), evaluate(*args))[1]"
    output = finish(start("grpo", [*GRPO, "--run-dir", str(tmp_path / "run")], kill), 130)
    assert "nothing was trained or saved" in output and "->" not in output and "--resume" not in output


def test_resume_extends_a_finished_run(tmp_path):
    reference = start("grpo", [*GRPO, "--run-dir", f"{tmp_path}/reference", "--num-steps", "4"])
    run = tmp_path / "run"
    finish(start("grpo", [*GRPO, "--run-dir", str(run), "--num-steps", "2"]))
    finish(start("grpo", ["--resume", str(run), "--num-steps", "4"]))
    finish(reference)
    assert logged(run, "samples.jsonl") == logged(tmp_path / "reference", "samples.jsonl")
    assert json.loads((run / "args.json").read_text())["num_steps"] == 4


ADAPTERS = [*GRPO, "--lora-rank", "2", "--precision", "bfloat16"]


def start_torchrun(script, flags):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [ROOT / f"{script}.py", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)


@pytest.mark.parametrize(("script", "flags"), [("grpo", GRPO), ("sft", SFT), ("dapo", ADAPTERS)])
def test_two_ranks_resume_after_a_kill(script, flags, tmp_path):
    """The process of grpo.py that is killed is torchrun, with its ranks; the other ranks meet without it."""
    reference, run = tmp_path / "reference", tmp_path / "run"
    flags = [*flags, *few_rows(tmp_path)] if script == "sft" else flags
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
    finish(start(script, ["--resume", str(run), "--num-steps", str(max(4, last_state + 1))], kind=Ranks))
    compared = [line for line in logged(run) if line["step"] <= 4 and line["step"] > 0]
    assert [line["step"] for line in compared] == [1, 2, 3, 4]
    for line, expected in zip(compared, logged(reference)[1:]):
        assert line["optim/grad_norm"] == pytest.approx(expected["optim/grad_norm"], rel=1e-5)
        assert line.get("rollout/prompts_consumed") == expected.get("rollout/prompts_consumed")
