"""The path of a GPU, executed: each script on a CUDA device that is not there; fake_cuda.py says what that can show."""

import json
import math
import os
import shutil
import subprocess
import sys

import fake_cuda
import pytest
from processes import Forked
from sync_copies import ALL
from tiny import ROOT, read_jsonl
from torch.distributed import TCPStore

if sys.platform != "linux" or shutil.which("g++") is None:
    pytest.skip("the simulated CUDA device is compiled by g++, on Linux", allow_module_level=True)

SIZES = "--eval-prompts 4 --eval-every 1 --save-every 2 --num-steps 2 --learning-rate 1e-4 --warmup-steps 0".split()
SIZES += ["--precision", "auto"]  # for the bundled models float32 is the default
SAMPLED = [*SIZES, "--prompts-per-step", "4", "--max-completion-length", "24"]
GROUPS = [*SAMPLED, "--group-size", "4", "--minibatch-size", "8"]
FLAGS = dict.fromkeys(ALL, GROUPS) | dict.fromkeys(("sft", "dpo", "reward_model"), [*SIZES, "--minibatch-size", "8"])
FLAGS |= {"reinforce": GROUPS[:-2], "dapo": [*GROUPS, "--max-rounds", "2"]}
FLAGS["ppo_rlhf"] = [*SAMPLED, "--minibatch-size", "2"]
FILES = dict.fromkeys(ALL, "addition/train.jsonl") | {"sft": "addition/sft.jsonl"}
FILES |= dict.fromkeys(("dpo", "reward_model"), "preferences/train.jsonl")


class Device:
    """A process with the device that has imported the scripts' libraries, and runs scripts in forks of itself."""

    def __init__(self, folder):
        self.folder, self.library = folder, fake_cuda.build(folder)
        self.environment = {**os.environ, fake_cuda.LIBRARY: self.library}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": folder}
        self.process = subprocess.Popen([sys.executable, fake_cuda.__file__], env=self.environment, **pipes)

    def run(self, file, *flags, ranks=1):
        """Run a file of the repository on this many ranks; return what it printed."""
        log, store = self.folder / "log", TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
        shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        given = [shared | {"RANK": str(rank)} for rank in range(ranks)] if ranks > 1 else [{}]
        log.unlink(missing_ok=True)
        print(json.dumps([[str(ROOT / file), *map(str, flags)], str(log), given]), file=self.process.stdin, flush=True)
        statuses = json.loads(self.process.stdout.readline())
        assert not any(statuses), log.read_text()[-4000:]
        return log.read_text()


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    device = Device(tmp_path_factory.mktemp("device"))
    yield device
    device.process.stdin.close()
    device.process.wait()


def flags_of(script, folder):
    """Flags of two short steps on a few rows of the script's data."""
    rows = (ROOT / "data" / FILES[script]).read_text().splitlines(keepends=True)
    (folder / f"{script}.jsonl").write_text("".join(rows[:32]))
    return [*FLAGS[script], "--dataset", folder / f"{script}.jsonl"]


def numbers_of(run):
    """The lines of a run's metrics without times, all of which are finite."""
    lines = read_jsonl(run / "metrics.jsonl")
    lines = [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in lines]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    return lines


@pytest.mark.parametrize("script", ALL)
def test_a_run_in_bfloat16_trains_evaluates_saves_and_resumes(device, script, tmp_path):
    """bfloat16 is what the device makes of auto."""
    run = tmp_path / "run"
    output = device.run(f"{script}.py", *flags_of(script, tmp_path), "--run-dir", run)
    assert json.loads((run / "args.json").read_text())["precision"] == "bfloat16"
    assert "-> " in output and (run / "checkpoint" / "model.safetensors").exists()
    device.run(f"{script}.py", "--resume", run, "--num-steps", 3)
    lines = numbers_of(run)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert any(line["optim/grad_norm"] > 0 for line in lines[1:])


OTHERS = {
    "adapters": ("grpo", ["--lora-rank", "2"]),
    "adapters of three models": ("ppo_rlhf", ["--lora-rank", "2"]),
    "adapters, pairs": ("dpo", ["--lora-rank", "2"]),
    "gradient checkpointing": ("grpo", ["--gradient-checkpointing"]),
    "gradient checkpointing, float32": ("sft", ["--gradient-checkpointing", "--precision", "float32"]),
    "texts beside prompts": ("ppo_rlhf", ["--ptx-coef", "1", "--ptx-dataset", ROOT / "data/addition/sft.jsonl"]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_settings(device, name, tmp_path):
    script, flags = OTHERS[name]
    device.run(f"{script}.py", *flags_of(script, tmp_path), *flags, "--run-dir", tmp_path / "run")
    assert [line["step"] for line in numbers_of(tmp_path / "run")] == [0, 1, 2]


@pytest.mark.parametrize("script, flags", [("grpo", ["--precision", "float32"]), ("dapo", []), ("ppo_rlhf", [])])
def test_two_ranks(device, script, flags, tmp_path):
    run = tmp_path / "run"
    flags = [*flags_of(script, tmp_path), *flags, "--run-dir", run]
    device.run(f"{script}.py", *flags, ranks=2)
    device.run(f"{script}.py", "--resume", run, "--num-steps", 3, ranks=2)
    assert [line["step"] for line in numbers_of(run)] == [0, 1, 2, 3]


@pytest.mark.parametrize("script", ALL)
def test_in_float32_the_numbers_are_those_of_a_run_on_the_cpu(device, script, tmp_path):
    flags = [*flags_of(script, tmp_path), "--precision", "float32", "--run-dir"]
    device.run(f"{script}.py", *flags, tmp_path / "cuda")
    code = f"import runpy; runpy.run_path({str(ROOT / script) + '.py'!r}, run_name='__main__')"
    process = Forked(code, [f"{script}.py", *flags, tmp_path / "cpu"], CUDA_VISIBLE_DEVICES="")
    output, _ = process.communicate()
    assert process.returncode == 0, output[-4000:]
    for ours, expected in zip(numbers_of(tmp_path / "cuda"), numbers_of(tmp_path / "cpu"), strict=True):
        if script == "dpo" and ours["step"] == 1:  # of a policy that is the reference, told apart by rounding
            del ours["pair/accuracy"], expected["pair/accuracy"]
        assert ours == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_samples_of_a_model(device, tmp_path):
    out = tmp_path / "samples.jsonl"
    device.run("tools/sample.py", "--num-prompts", 4, "--num-samples", 2, "--out", out)
    assert len(read_jsonl(out)) == 8


def test_the_benchmark_of_a_gpu(device, tmp_path):
    """One section in its own process, which finds the device as it starts, and others without their processes."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys; sys.path.append({str(ROOT / 'tests')!r}); import fake_cuda; kept = fake_cuda.load()"
    )
    environment = device.environment | {"PYTHONPATH": str(tmp_path)}
    skip = "--skip bfloat16 resume ranks training rollout defaults".split()
    command = [sys.executable, ROOT / "benchmark" / "gpu.py", "--tiny", "--out", tmp_path / "gpu.md", *skip]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "gpu.md").read_text()
    assert text.startswith("# benchmark/gpu.py\n\nfake, ") and "## numbers tiny" in text
    job = {"size": "tiny", "model": str(tmp_path / "tiny"), "folder": str(tmp_path), "peak_tflops": 0.1}
    training = {"section": "time_training", "script": "grpo", "flags": {}}
    for section, number in (({"section": "model"}, 0), ({"section": "time_rollout"}, 8), (training, 5)):
        output = device.run("benchmark/gpu.py", "child", json.dumps(job | section))
        rows = [json.loads(line) for line in output.splitlines() if line.startswith('["')]
        assert len(rows) >= number and all("peak" in what for what, *_, holds in rows if holds is False), rows


def test_a_torch_that_does_not_fit_is_one_line(tmp_path, monkeypatch):
    package = tmp_path / "torch" / "__init__.py"
    package.parent.mkdir()
    package.write_text("")
    monkeypatch.setattr(fake_cuda.importlib.util, "find_spec", lambda _: type("Spec", (), {"origin": str(package)}))
    with pytest.raises(SystemExit, match="^fake_cuda.cpp does not fit the torch of .*: .*error.*$"):
        fake_cuda.build(tmp_path)
