"""Real processes: runs that are killed (kill -9) or stopped and resumed, and two ranks that share the work.
Run with: python -m pytest tests/test_resume.py
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from main_ranks import NUM_STEPS, ROWS, ROWS_PER_STEP, SCRIPTS, SEED, make_args
from processes import Ranks, assert_same_run, compare_killed_and_resumed, finish, kill_at, logged, run_on_ranks, start
from safetensors.torch import load_file
from tiny import ROOT, write_jsonl

import sft

SHORT = "--num-steps 6 --eval-prompts 4 --eval-every 3 --save-every 2 --warmup-steps 2 --seed 5".split()
GROUPS = [*SHORT, *"--prompts-per-step 4 --group-size 4 --max-completion-length 16".split()]
GRPO = [*GROUPS, "--minibatch-size", "8"]
FLAGS = {"sft": [*SHORT, "--minibatch-size", "8"]}
FLAGS["gkd"] = [*SHORT, *"--prompts-per-step 8 --max-completion-length 16".split()]
ADAPTERS = ["--lora-rank", "2", "--precision", "bfloat16"]


def flags_of(script, folder):
    """Flags of a short run on a part of the embedded data, which is tokenized whole before the first step."""
    name = "sft" if script == "sft" else "train"
    rows = (ROOT / "data" / "addition" / f"{name}.jsonl").read_text().splitlines()[:64]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return [*FLAGS.get(script, GRPO), "--dataset", str(folder / "rows.jsonl")]


def states_of(run):
    return sorted(path.name for path in (run / "state").iterdir())


def test_killed_and_resumed_run_is_bit_identical(tmp_path):
    """Killed three times; what saves and resumes is the same in every script, as test_copies.py sees to."""
    flags, run = flags_of("grpo_tools", tmp_path), tmp_path / "run"
    reference = start("grpo_tools", [*flags, "--run-dir", f"{tmp_path}/reference"])
    kill = kill_at("accumulate_gradients", "len(calls) == 6")  # in the first step after a save
    finish(start("grpo_tools", [*flags, "--run-dir", str(run)], kill), -signal.SIGKILL)
    assert logged(run)[-1]["step"] == 2
    assert states_of(run) == ["00000002"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/mean": 0.')  # a line the kill cut short
    before = load_file(run / "checkpoint" / "model.safetensors")
    kill = kill_at("dcp.save")  # the checkpoint is written, the state not yet in its place
    finish(start("grpo_tools", ["--resume", str(run)], kill), -signal.SIGKILL)
    assert states_of(run) == ["00000002", "unfinished"]
    after = load_file(run / "checkpoint" / "model.safetensors")
    assert not all(after[name].equal(before[name]) for name in before)  # that of step 4, which is done again
    kill = kill_at("shutil.rmtree", 'str(args[0]).endswith("/checkpoint")')  # the old checkpoint is removed
    finish(start("grpo_tools", ["--resume", str(run)], kill), -signal.SIGKILL)
    assert not (run / "checkpoint").exists()
    finish(start("grpo_tools", ["--resume", str(run)]))
    assert [path.name for path in run.glob("checkpoint*")] == ["checkpoint"]
    assert states_of(run) == ["00000006"]
    finish(reference)
    assert_same_run(run, tmp_path / "reference")


@pytest.mark.parametrize("script", ["gkd", "sft"])
def test_run_killed_once_and_resumed_is_bit_identical(script, tmp_path, monkeypatch):
    kill_at_call = "5" if script in FLAGS else "10"  # one optimizer step, or two, for each step
    flags = flags_of(script, tmp_path)
    compare_killed_and_resumed(importlib.import_module(script), flags, kill_at_call, tmp_path, monkeypatch)


def wait_for_step(run, step, process):
    while not any(line["step"] >= step for line in logged(run)):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)


def test_two_ranks_resume_after_a_kill(tmp_path):
    """The processes that are killed are torchrun and its ranks."""
    script, reference, run = "grpo_tools", tmp_path / "reference", tmp_path / "run"
    flags = [*flags_of(script, tmp_path), *ADAPTERS, "--max-completion-length", "12", "--save-every", "1"]
    command = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split()]
    command += [ROOT / f"{script}.py", *flags, "--run-dir", run, "--num-steps", "500"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    wait_for_step(run, 2, process)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    for pid in [process.pid, *children.stdout.split()]:
        os.kill(int(pid), signal.SIGKILL)
    process.communicate()
    last_state = max(name for name in states_of(run) if name.isdigit())
    num_steps = str(int(last_state) + 1)
    output = finish(start(script, ["--resume", str(run), "--num-steps", num_steps], kind=Ranks))
    assert output.count(f"--resume {run}") == 1
    finish(start(script, [*flags, "--run-dir", str(reference), "--num-steps", num_steps], kind=Ranks))
    lines, expected = logged(run), logged(reference)
    assert [line["step"] for line in lines] == list(range(int(num_steps) + 1))
    for line, other in zip(lines[1:], expected[1:], strict=True):
        assert line["optim/grad_norm"] == pytest.approx(other["optim/grad_norm"], rel=1e-5)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_finishes_the_step_saves_and_prints_how_to_resume(signum, tmp_path):
    run = tmp_path / "run"
    flags = [*flags_of("grpo_tools", tmp_path), "--run-dir", str(run), "--num-steps", "500", "--save-every", "500"]
    process = start("grpo_tools", flags)
    wait_for_step(run, 1, process)
    process.send_signal(signum)
    output = finish(process, 128 + signum)  # so that a && b does not go on with b
    assert f"grpo_tools.py --resume {run}\n" in output
    last_step = logged(run)[-1]["step"]
    assert last_step < 500
    assert states_of(run) == [f"{last_step:08d}"]
    assert (run / "checkpoint" / "model.safetensors").exists()


@pytest.mark.parametrize("script, function, signum", [("grpo_tools", "load_model", 2), ("dpo", "add_ref_logprobs", 15)])
def test_signal_before_the_first_step_just_ends_the_process(script, function, signum, tmp_path):
    kill = f"""
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # also in a background job
def killed(*_):
    print("reached", flush=True)
    os.kill(os.getpid(), {signum})
    time.sleep(60)
script.{function} = killed
"""
    process = start(script, ["--run-dir", str(tmp_path / "run")], kill)
    if signum == signal.SIGINT:  # an exception
        assert finish(process, 1).endswith("KeyboardInterrupt\n")
    else:
        assert finish(process, -signal.SIGTERM).endswith("reached\n")
    assert not (tmp_path / "run").exists()


# ---- two ranks share the rows, draw different random numbers, sample all weights and divide by one number

SAMPLED = [name for name in SCRIPTS if name != "sft"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What main_ranks.py sees on each of two ranks, by script."""
    folder = tmp_path_factory.mktemp("main_ranks")
    write_jsonl(folder / "rows.jsonl", ROWS)
    run_on_ranks("main_ranks.py", folder)
    files = [folder / f"{rank}.json" for rank in (0, 1)]
    return [json.loads(path.read_text()) | {"folder": folder} for path in files]


@pytest.mark.parametrize("name", SCRIPTS)
def test_ranks_share_the_rows_of_every_step(ranks, name):
    """Together they have those of one process, and none twice."""
    rows = SCRIPTS[name].pick_rows([row["answer"] for row in ROWS], 0, NUM_STEPS * ROWS_PER_STEP, SEED)
    for step in range(NUM_STEPS):
        shares = [rank[name]["rollouts"][step]["answers"] for rank in ranks]
        assert [len(share) for share in shares] == [2, 2]
        expected = rows[step * ROWS_PER_STEP : (step + 1) * ROWS_PER_STEP]
        assert sorted(sum(shares, [])) == sorted(expected)


@pytest.mark.parametrize("name", SAMPLED)
def test_ranks_and_steps_draw_different_random_numbers(ranks, name):
    draws = [tuple(rollout["draws"]) for rank in ranks for rollout in rank[name]["rollouts"]]
    assert len(set(draws)) == len(draws) == 2 * NUM_STEPS


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_ranks_sample_and_score_as_a_plain_model_to_the_last_bit(ranks, precision):
    for rank in ranks:
        assert rank[precision] == dict.fromkeys(rank[precision], True)


@pytest.mark.parametrize("name", SCRIPTS)
def test_ranks_divide_by_one_number(ranks, name):
    """A mean over tokens is over those of both."""
    first, second = (torch.tensor(rank[name]["divisors"]) for rank in ranks)  # (updates, 2): divisor, own tokens
    assert torch.equal(first[:, 0], second[:, 0])
    if name in ("ppo_rlhf", "sft"):  # FSDP takes the mean over ranks, so the divisor is half of all tokens
        assert torch.equal(2 * first[:, 0], first[:, 1] + second[:, 1])
        assert not torch.equal(first[:, 1], second[:, 1])


def test_two_ranks_of_sft_train_as_one_process_does(ranks):
    folder = ranks[0]["folder"]
    sft.main(make_args("sft", folder, "alone"))
    found, expected = logged(folder / "sft"), logged(folder / "alone")
    assert len(found) == NUM_STEPS
    for line, other in zip(found, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-4)
    assert found[-1]["optim/grad_norm"] > 0.1
