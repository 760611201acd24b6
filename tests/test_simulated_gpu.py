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


def numbers_of(run):
    """The lines of a run's metrics without times, all of which are finite."""
    lines = logged(run)
    assert all(math.isfinite(value) for line in lines for value in line.values())
    return lines


@each_script
def test_a_run_in_bfloat16_trains_evaluates_saves_and_resumes(name, device, tmp_path):
    printed = device.run(f"{name}.py", *flags_of(name, tmp_path, precision="bfloat16", num_steps=1))
    assert "bfloat16, 1 x cuda:0" in printed
    device.run(f"{name}.py", "--resume", tmp_path / "run", "--num-steps", 2)
    lines = numbers_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert any(line["optim/grad_norm"] > 0 for line in lines[1:])
    assert (tmp_path / "run/checkpoint-000002/model.safetensors").exists()


TWO_RANKS = [("grpo", "float32"), *((name, "bfloat16") for name in ("dapo", "ppo_rlhf", "gkd", "dpo"))]


@pytest.mark.parametrize("name, precision", TWO_RANKS)
def test_two_ranks(name, precision, device, tmp_path):
    device.run(f"{name}.py", *flags_of(name, tmp_path, precision=precision, num_steps=1), ranks=2)
    device.run(f"{name}.py", "--resume", tmp_path / "run", "--num-steps", 2, ranks=2)
    assert [line["step"] for line in numbers_of(tmp_path / "run")] == [0, 1, 2]
    assert json.loads((tmp_path / "run/args.json").read_text())["num_steps"] == 2


# The scripts that differ from grpo.py in more than the loss.
KINDS = "grpo grpo_process grpo_tools gkd ppo_rlhf dpo reward_model sft".split()


@pytest.mark.parametrize("name", KINDS)
def test_in_float32_the_numbers_are_those_of_a_run_on_the_cpu(name, device, tmp_path):
    device.run(f"{name}.py", *flags_of(name, tmp_path, precision="float32"))
    flags_of(name, tmp_path, precision="float32", run_dir=tmp_path / "cpu")
    EVERY[name].main(EVERY[name].parse_args())
    for ours, expected in zip(numbers_of(tmp_path / "run"), numbers_of(tmp_path / "cpu"), strict=True):
        assert ours == pytest.approx(expected, rel=1e-4, abs=1e-4)


# In bfloat16, one rank with --cpu-offload differs from one without by rounding, as two do: FSDP rounds norms, too.
OFFLOADED = [("grpo", "float32", 2), ("grpo", "bfloat16", 2), ("ppo_rlhf", "bfloat16", 2), ("gkd", "bfloat16", 2)]
OFFLOADED += [(name, "float32", 1) for name in ("grpo", "dapo", "ppo_rlhf", "gkd", "dpo", "reward_model", "sft")]


@pytest.mark.parametrize("name, precision, ranks", OFFLOADED)
def test_numbers_with_cpu_offload_are_those_without_it(name, precision, ranks, device, tmp_path):
    """To the last digit, also of a resumed run; some with gradient checkpointing (flags_of)."""
    sizes = {"precision": precision, "eval_every": 1}
    device.run(f"{name}.py", *flags_of(name, tmp_path, run_dir=tmp_path / "plain", **sizes), ranks=ranks)
    sizes |= {"cpu_offload": True, "num_steps": 1}
    device.run(f"{name}.py", *flags_of(name, tmp_path, run_dir=tmp_path / "offload", **sizes), ranks=ranks)
    device.run(f"{name}.py", "--resume", tmp_path / "offload", "--num-steps", 2, ranks=ranks)
    lines = numbers_of(tmp_path / "offload")
    assert lines == numbers_of(tmp_path / "plain") and lines[2]["optim/grad_norm"] > 0


def test_in_bfloat16_one_rank_with_cpu_offload_differs_by_rounding(device, tmp_path):
    sizes = {"precision": "bfloat16", "num_steps": 1, "eval_prompts": 0, "learning_rate": 0.0}
    device.run("grpo.py", *flags_of("grpo", tmp_path, run_dir=tmp_path / "plain", **sizes))
    device.run("grpo.py", *flags_of("grpo", tmp_path, run_dir=tmp_path / "offload", cpu_offload=True, **sizes))
    plain, offload = numbers_of(tmp_path / "plain")[-1], numbers_of(tmp_path / "offload")[-1]
    for metric in ("policy/entropy", "optim/grad_norm", "loss/policy"):
        assert offload[metric] == pytest.approx(plain[metric], rel=0.1, abs=0.01)


SHOW_DEVICES = """import sys
sys.path.insert(0, {root!r})
import grpo
def step_optimizer(policy, optimizer, *rest, step=grpo.step_optimizer):
    grad_norm = step(policy, optimizer, *rest)
    moments = [moment for state in optimizer.state.values() for moment in state.values() if moment.dim()]
    print("trained on", *{{tensor.device.type for tensor in [*policy.parameters(), *moments]}})
    return grad_norm
def copy_weights(policy, sampler, copy=grpo.copy_weights):
    copy(policy, sampler)
    print("sampled on", *{{weight.device.type for weight in sampler.parameters()}})
grpo.step_optimizer, grpo.copy_weights = step_optimizer, copy_weights
grpo.main(grpo.parse_args())
"""


@pytest.mark.parametrize("offload", [False, True])
def test_with_cpu_offload_only_the_sampler_stays_on_the_gpu(offload, device, tmp_path):
    file = tmp_path / "show_devices.py"
    file.write_text(SHOW_DEVICES.format(root=str(ROOT)))
    printed = device.run(file, *flags_of("grpo", tmp_path, cpu_offload=offload, num_steps=1))
    assert f"trained on {'cpu' if offload else 'cuda'}\n" in printed and "sampled on cuda\n" in printed


@pytest.mark.parametrize("kl_coef", [0.0, 0.04])
def test_the_short_script(kl_coef, device):
    paths = ["--model", ROOT / "models/tiny", "--dataset", ROOT / "data/addition"]
    printed = device.run("examples/short_grpo.py", *paths, "--num-steps", 1, "--kl-coef", kl_coef)
    assert "step 0: accuracy 0.4" in printed and "step 1: reward" in printed
