"""Test benchmark/gpu.py on a CPU: all code that needs no GPU runs, and failures appear in the results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu as benchmark
import pytest
import torch.distributed as dist

import dpo
import grpo
import ppo_rlhf


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    benchmark.make_model(folder, "tiny")
    return str(folder)


@pytest.fixture
def job(model, tmp_path, monkeypatch):
    """Return the settings of a section; after the test, end the process group that FSDP needs."""
    monkeypatch.setattr(os, "environ", os.environ | {"WANDB_MODE": "disabled"})
    yield {"size": "tiny", "model": model, "folder": str(tmp_path), "peak_tflops": 0.1}
    if dist.is_initialized():
        dist.destroy_process_group()


def as_dict(rows):
    """Return the rows as {name: value}; all must be as expected, and fit into JSON."""
    rows = [tuple(json.loads(json.dumps(row))) for row in rows]
    assert all(holds is not False for *_, holds in rows), rows
    return {what: value for what, value, *_ in rows}


def test_numbers_notice_a_sampler_that_is_not_the_policy(job, monkeypatch):
    def generate(model, *given, **more):
        model.model.embed_tokens.weight.data.mul_(1.5)
        found = whole(model, *given, **more)
        model.model.embed_tokens.weight.data.div_(1.5)
        return found

    whole = grpo.generate
    monkeypatch.setattr(grpo, "generate", generate)
    rows = list(benchmark.check_numbers(job))
    assert [what for what, *_, holds in rows if holds is False][:1] == ["sampler and training, positions 0 to 24: KL"]


def test_small_steps_reach_blocks_in_bfloat16(job):
    rows = as_dict(benchmark.check_bfloat16(job))
    assert rows["bfloat16, on the grid: fall of the loss"] < 0.5 * rows["float32: fall of the loss"]
    assert 0.7 < rows["... with noise, of the fall in float32"] < 1.3


def test_rollout_and_its_peer(job):
    rows = as_dict(benchmark.time_rollout(job))
    assert rows["8 rows x 24: seconds"] > 0 and rows["... ours / transformers'"] > 0
    assert rows["... peak by tools/memory.py, GB"] > 0
    peaks = [row for peak in (9e9, 5e9, 11e9) for row in benchmark.compare_peak("peak", peak, 10e9)]  # as on a GPU
    assert peaks[0] == ("peak, GB", 9.0, "0.6 to 1.05 of 10.00 (tools/memory.py)", True)
    assert [holds for *_, holds in peaks] == [True, False, False]


def test_passes(job, monkeypatch):
    monkeypatch.setattr(grpo, "LOGITS_AT_ONCE", 2**26)  # restore what the section replaces
    rows = as_dict(benchmark.time_passes(job))
    assert [name for name in rows if "passes" in name] == [
        f"passes of {tokens} tokens, 2^{bits} logits at once: tokens a second"
        for tokens in (4096, 16384)
        for bits in (26, 28)
    ]


@pytest.mark.parametrize("name, flags", [("grpo", {}), *benchmark.TRAININGS])
def test_training(job, monkeypatch, name, flags):
    script = {"grpo": grpo, "dpo": dpo, "ppo_rlhf": ppo_rlhf}[name]
    replaced = {"save", "sample_completions", "compute_logprobs", "compute_scores", "step_optimizer"}
    for own in replaced & {*vars(script)}:  # restore what the section replaces
        monkeypatch.setattr(script, own, getattr(script, own))
    rows = as_dict(benchmark.time_training(job | {"script": name, "flags": flags}))
    assert rows["update: tokens a second"] > 0 and rows["update: model FLOP utilisation"] > 0
    assert rows["peak of the update by tools/memory.py, GB"] > 0 and rows["update: seconds"] > 0
    assert ("... policy/sampler_kl" in rows) == (script is not dpo)
    assert ("peak of the rollout by tools/memory.py, GB" in rows) == (script is not dpo)


def test_sections_that_run_scripts(job, monkeypatch):
    """Run these sections with a replacement for the scripts that only writes metrics."""
    commands = []

    def run_script(script, flags, launcher=None):
        commands.append([script, *flags, *(launcher or [])])
        if script == "dapo":
            raise RuntimeError("dapo: CUDA error")
        folder = Path(flags[flags.index("--run-dir" if "--run-dir" in flags else "--resume") + 1])
        folder.mkdir(exist_ok=True)
        line = {"rollout/length_mean": 9.0, "reward/mean": 0.5, "eval/accuracy": 0.99, "eval/pair_accuracy": 0.81}
        lines = [json.dumps(line | {"step": step, "eval/loss": 1.3}) for step in range(5)]
        (folder / "metrics.jsonl").write_text("\n".join(lines))

    monkeypatch.setattr(benchmark, "run_script", run_script)
    assert as_dict(benchmark.check_resume(job))["steps of a run that was resumed"] == "1 2 3 4"
    assert commands[2][:3] == ["grpo", "--resume", f"{job['folder']}/half"]
    assert as_dict(benchmark.check_ranks(job)) == {"grpo.py on two processes: eval/accuracy": 0.99}
    rows = list(benchmark.check_defaults(job | {"scripts": [*benchmark.DEFAULT_RUNS]}))
    assert [what for what, *_, holds in rows if not holds] == ["dapo: eval/accuracy"] and len(rows) == 12
    assert rows[2][1] == "dapo: CUDA error"
    with pytest.raises(RuntimeError, match="tests/sync_copies: usage: "):
        monkeypatch.undo()
        benchmark.run_script("tests/sync_copies", ["--no-such-flag"])


def test_failures_are_written_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    """One section raises an error, one takes too long, and for one no time is left; each is a separate process."""
    jobs = [("resume", benchmark.check_resume, {}, 60), ("ranks", benchmark.check_ranks, {}, 0.1)]
    jobs += [("default run", benchmark.check_defaults, {"scripts": ["grpo"]}, 60)]
    jobs += [("numbers", benchmark.check_numbers, {}, 60)]
    monkeypatch.setattr(benchmark, "sections", lambda _: jobs)
    monkeypatch.setattr(benchmark, "read_machine", lambda: ("", "a machine"))
    child, now = benchmark.start_child, [0.0]

    def start_child(job, limit):
        now[0] += 295.0
        return child(job | {"folder": "/dev/null"}, limit)

    monkeypatch.setattr(benchmark, "start_child", start_child)
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: now[0])
    with pytest.raises(SystemExit, match="1"):
        benchmark.main(benchmark.Args(tiny=True, skip=["numbers"], out=str(tmp_path / "gpu.md")))
    text = (tmp_path / "gpu.md").read_text()
    assert text.count("| failed |") == 2 and "not done in 0 s" in text and "RuntimeError: grpo" in text
    assert "| not run | no time left |" in text and "failed: resume, ranks" in capsys.readouterr().out


def test_command_line(tmp_path, monkeypatch):
    """Run one section from the command line, which also makes its model; without a GPU, --tiny is required."""
    skip = "--skip bfloat16 training resume ranks rollout passes default other".split()
    command = [sys.executable, benchmark.__file__, "--tiny", "--out", str(tmp_path / "gpu.md"), *skip]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "gpu.md").read_text()
    assert "## numbers tiny (" in text and "| under 0.01 | yes |" in text and "**no**" not in text
    assert "| over 0.9 | yes |" in text and "| higher | yes |" in text
    monkeypatch.setattr(benchmark, "read_machine", lambda: ("", "a machine"))
    with pytest.raises(SystemExit, match="no GPU: --tiny"):
        benchmark.main(benchmark.Args())
