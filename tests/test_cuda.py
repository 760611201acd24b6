"""The path of a GPU, executed: each script on a CUDA device that is not there; fake_cuda.py says what that can show.

python -m pytest tests/test_cuda.py
"""

import importlib
import json
import math
import os
import shutil
import subprocess
import sys

import fake_cuda
import pytest
from processes import main_of
from tiny import ROOT, read_jsonl, write_jsonl
from torch.distributed import TCPStore

import ppo_rlhf

if sys.platform != "linux" or shutil.which("g++") is None:
    pytest.skip("the simulated CUDA device is compiled by g++, on Linux", allow_module_level=True)

SHORT = "--eval-prompts 2 --eval-every 2 --save-every 2 --num-steps 2 --learning-rate 1e-4 --warmup-steps 0"
SHORT += " --precision auto"  # for the bundled models float32 is the default
SAMPLED = f"{SHORT} --prompts-per-step 4 --max-completion-length 12"
GROUPS = f"{SAMPLED} --group-size 4 --minibatch-size 8"
FLAGS = {
    "ppo_rlhf": f"{SAMPLED} --minibatch-size 2",
    "gkd": SAMPLED,
    **dict.fromkeys(("sft", "dpo", "reward_model"), f"{SHORT} --minibatch-size 8"),
}
NORM_SAMPLES = 16
FEW_SAMPLES = f"""import sys
sys.path.insert(0, {str(ROOT)!r})
import ppo_rlhf
ppo_rlhf.NORM_SAMPLES = {NORM_SAMPLES}
ppo_rlhf.main(ppo_rlhf.parse_args())
"""
FILES = {"sft": "addition/sft.jsonl", "dpo": "preferences/train.jsonl", "reward_model": "preferences/train.jsonl"}


class Device:
    """A process with the device that has imported the scripts' libraries, and runs scripts in forks of itself."""

    def __init__(self, folder):
        self.log = folder / "log"
        environment = {**os.environ, fake_cuda.LIBRARY: fake_cuda.build(folder)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, fake_cuda.__file__]
        self.process = subprocess.Popen(command, env=environment, cwd=folder, **pipes)

    def run(self, file, *flags, ranks=1):
        """Run a file of the repository on this many ranks; return what it printed."""
        environments = [{}]
        if ranks > 1:
            store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
            shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
            environments = [shared | {"RANK": str(rank)} for rank in range(ranks)]
        self.log.unlink(missing_ok=True)
        argv = [str(ROOT / file), *map(str, flags)]
        print(json.dumps([argv, str(self.log), environments]), file=self.process.stdin, flush=True)
        statuses = json.loads(self.process.stdout.readline())
        output = self.log.read_text()
        assert not any(statuses), output[-4000:]
        return output


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    device = Device(tmp_path_factory.mktemp("device"))
    yield device
    device.process.stdin.close()
    device.process.wait()


def flags_of(script, folder):
    """Flags of two short steps on a few rows of the script's data."""
    path = ROOT / "data" / FILES.get(script, "addition/train.jsonl")
    rows = path.read_text().splitlines(keepends=True)
    (folder / "rows.jsonl").write_text("".join(rows[:32]))
    return [*FLAGS.get(script, GROUPS).split(), "--dataset", folder / "rows.jsonl"]


def file_of(script, folder):
    """The script; instead of ppo_rlhf.py a file that starts it with fewer samples to normalise scores on."""
    path = ROOT / f"{script}.py"
    if script == "ppo_rlhf":
        path = folder / "few_samples.py"
        path.write_text(FEW_SAMPLES)
    return path


def numbers_of(run):
    """The lines of a run's metrics without times, all of which are finite."""
    lines = []
    for line in read_jsonl(run / "metrics.jsonl"):
        lines.append({key: value for key, value in line.items() if not key.startswith("perf/")})
        assert all(math.isfinite(value) for value in lines[-1].values())
    return lines


@pytest.mark.parametrize("script, steps", [("grpo_tools", 3), ("ppo_rlhf", 3), ("gkd", 2), ("dpo", 2), ("sft", 2)])
def test_a_run_in_bfloat16_trains_evaluates_saves_and_resumes(device, script, steps, tmp_path):
    """bfloat16 is what the device makes of auto. All that differs elsewhere runs in float32, below."""
    run = tmp_path / "run"
    file = file_of(script, tmp_path)
    device.run(file, *flags_of(script, tmp_path), "--run-dir", run)
    assert json.loads((run / "args.json").read_text())["precision"] == "bfloat16"
    assert (run / "checkpoint" / "model.safetensors").exists()
    if steps > 2:
        device.run(file, "--resume", run, "--num-steps", steps)
    lines = numbers_of(run)
    assert [line["step"] for line in lines] == list(range(steps + 1))
    assert any(line["optim/grad_norm"] > 0 for line in lines[1:])


OTHERS = {
    "adapters, gradient checkpointing": ("grpo_tools", "--lora-rank 2 --gradient-checkpointing"),
    "adapters of three models, texts": ("ppo_rlhf", "--lora-rank 2 --ptx-coef 1 --ptx-dataset {}/texts.jsonl"),
    "adapters, pairs": ("dpo", "--lora-rank 2"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_settings(device, name, tmp_path):
    script, flags = OTHERS[name]
    write_jsonl(tmp_path / "texts.jsonl", [{"text": f"{i}+1={i + 1}"} for i in range(20)])
    flags = [*flags_of(script, tmp_path), *flags.format(tmp_path).split(), "--run-dir", tmp_path / "run"]
    device.run(file_of(script, tmp_path), *flags)
    assert [line["step"] for line in numbers_of(tmp_path / "run")] == [0, 1, 2]


@pytest.mark.parametrize("script, precision", [("grpo_tools", "float32"), ("ppo_rlhf", "auto"), ("gkd", "auto")])
def test_two_ranks(device, script, precision, tmp_path):
    """What saves and resumes is the same in every script."""
    run, file = tmp_path / "run", file_of(script, tmp_path)
    flags = [*flags_of(script, tmp_path), "--precision", precision, "--run-dir", run]
    device.run(file, *flags, "--num-steps", 1, ranks=2)
    if script == "grpo_tools":
        device.run(file, "--resume", run, "--num-steps", 2, ranks=2)
    assert [line["step"] for line in numbers_of(run)] == list(range(3 if script == "grpo_tools" else 2))


@pytest.mark.parametrize("script", ["sft", "dpo", "reward_model", "grpo_tools", "ppo_rlhf", "gkd"])
def test_in_float32_the_numbers_are_those_of_a_run_on_the_cpu(device, script, tmp_path, monkeypatch):
    flags = [*map(str, flags_of(script, tmp_path)), "--precision", "float32", "--run-dir"]
    device.run(file_of(script, tmp_path), *flags, tmp_path / "cuda")
    monkeypatch.setattr(ppo_rlhf, "NORM_SAMPLES", NORM_SAMPLES)
    main_of(importlib.import_module(script), [*flags, str(tmp_path / "cpu")], monkeypatch)
    for ours, expected in zip(numbers_of(tmp_path / "cuda"), numbers_of(tmp_path / "cpu"), strict=True):
        if script == "dpo" and ours["step"] == 1:  # of a policy that is the reference, told apart by rounding
            del ours["pair/accuracy"], expected["pair/accuracy"]
        assert ours == pytest.approx(expected, rel=1e-4, abs=1e-4)
