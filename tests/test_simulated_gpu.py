"""The path of a GPU, executed: each script on a CUDA device that is not there; fake_cuda.py says what that can show.

python -m pytest tests/test_simulated_gpu.py
"""

import json
import math
import os
import shutil
import subprocess
import sys

import fake_cuda
import pytest
from processes import logged
from torch.distributed import TCPStore
from toy import EVERY, ROOT, short

if sys.platform != "linux" or shutil.which("g++") is None:
    pytest.skip("the simulated CUDA device is compiled by g++, on Linux", allow_module_level=True)

FEW_SAMPLES = """import sys
sys.path.insert(0, {root!r})
import ppo_rlhf
ppo_rlhf.NORM_SAMPLES = 16
ppo_rlhf.main(ppo_rlhf.parse_args())
"""
each_script = pytest.mark.parametrize("name", EVERY)


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


def flags_of(name, folder, **settings):
    """Flags of two short steps."""
    sizes = {"num_steps": 2, "eval_prompts": 2, "max_completion_length": 24 if name in ("dpo", "reward_model") else 12}
    sizes |= {"max_rounds": 2, "learning_rate": 1e-4, "gradient_checkpointing": name in ("grpo", "dpo")}
    short(EVERY[name], folder, **sizes | settings)
    return sys.argv[1:]


def file_of(name, folder):
    """The script; instead of ppo_rlhf.py a file that starts it with fewer samples to normalise scores on."""
    path = ROOT / f"{name}.py"
    if name == "ppo_rlhf":
        path = folder / "few_samples.py"
        path.write_text(FEW_SAMPLES.format(root=str(ROOT)))
    return path


def numbers_of(run):
    """The lines of a run's metrics without times, all of which are finite."""
    lines = logged(run)
    assert all(math.isfinite(value) for line in lines for value in line.values())
    return lines


@each_script
def test_a_run_in_bfloat16_trains_evaluates_saves_and_resumes(name, device, tmp_path):
    file = file_of(name, tmp_path)
    printed = device.run(file, *flags_of(name, tmp_path, precision="bfloat16", num_steps=1))
    assert "bfloat16, 1 x cuda:0" in printed
    device.run(file, "--resume", tmp_path / "run", "--num-steps", 2)
    lines = numbers_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert any(line["optim/grad_norm"] > 0 for line in lines[1:])
    assert (tmp_path / "run/checkpoint-000002/model.safetensors").exists()


TWO_RANKS = [("grpo", "float32"), *((name, "bfloat16") for name in ("dapo", "ppo_rlhf", "gkd", "dpo"))]


@pytest.mark.parametrize("name, precision", TWO_RANKS)
def test_two_ranks(name, precision, device, tmp_path):
    file = file_of(name, tmp_path)
    device.run(file, *flags_of(name, tmp_path, precision=precision, num_steps=1), ranks=2)
    device.run(file, "--resume", tmp_path / "run", "--num-steps", 2, ranks=2)
    assert [line["step"] for line in numbers_of(tmp_path / "run")] == [0, 1, 2]
    assert json.loads((tmp_path / "run/args.json").read_text())["num_steps"] == 2


# The scripts that differ from grpo.py in more than the loss.
KINDS = "grpo grpo_process grpo_tools gkd ppo_rlhf dpo reward_model sft".split()


@pytest.mark.parametrize("name", KINDS)
def test_in_float32_the_numbers_are_those_of_a_run_on_the_cpu(name, device, tmp_path):
    device.run(file_of(name, tmp_path), *flags_of(name, tmp_path, precision="float32"))
    flags_of(name, tmp_path, precision="float32", run_dir=tmp_path / "cpu")
    EVERY[name].main(EVERY[name].parse_args())
    for ours, expected in zip(numbers_of(tmp_path / "run"), numbers_of(tmp_path / "cpu"), strict=True):
        assert ours == pytest.approx(expected, rel=1e-4, abs=1e-4)
