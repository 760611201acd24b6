"""The numbers of three steps of every script are those that were recorded: what "Numerics: unchanged" means.

    python tests/test_reference.py    # records them anew, after a change that is meant to change them

On the processor and the torch that recorded them they are equal to the last digit, elsewhere to three digits.
"""

import importlib
import json
import tempfile
from pathlib import Path

import pytest
import torch
from tiny import ROOT, parse, read_jsonl, write_jsonl

RECORDED = Path(__file__).with_name("reference.json")
SCRIPTS = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce", "grpo_process", "grpo_tools"]
SCRIPTS += ["ppo_rlhf", "dpo", "reward_model", "sft"]
ONLINE = {"prompts_per_step": 8, "group_size": 4, "minibatch_size": 16, "max_completion_length": 24}
FILES = {"dpo": "preferences/train.jsonl", "reward_model": "preferences/train.jsonl", "sft": "addition/sft.jsonl"}


def machine():
    return [torch.__version__, torch.backends.cpu.get_cpu_capability()]


def run(name, folder):
    """The metrics of three steps, but for times."""
    script = importlib.import_module(name)
    settings = {"num_steps": 3, "eval_prompts": 0, "run_dir": str(folder / "run"), "seed": 5}
    if name in FILES:
        rows = read_jsonl(ROOT / "data" / FILES[name])[:64]
        settings |= {"minibatch_size": 16, "dataset": write_jsonl(folder / "rows.jsonl", rows)}
    elif name == "ppo_rlhf":
        settings |= {"prompts_per_step": 16, "minibatch_size": 8, "max_completion_length": 24}
    else:
        settings |= ONLINE
    fields = script.Args.__dataclass_fields__
    script.main(parse(script, **{key: value for key, value in settings.items() if key in fields}))
    lines = read_jsonl(folder / "run" / "metrics.jsonl")
    return [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in lines]


@pytest.mark.parametrize("name", SCRIPTS)
def test_three_steps_have_the_recorded_numbers(name, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.import_module("ppo_rlhf"), "NORM_SAMPLES", 32)
    recorded = json.loads(RECORDED.read_text())
    expected, found = recorded[name], run(name, tmp_path)
    assert len(found) == 3 and any(line["optim/grad_norm"] > 0 for line in found)
    if recorded["machine"] != machine():
        expected = [{key: pytest.approx(value, rel=1e-3, abs=1e-5) for key, value in line.items()} for line in expected]
    assert found == expected


if __name__ == "__main__":
    torch.set_num_threads(1)
    importlib.import_module("ppo_rlhf").NORM_SAMPLES = 32
    numbers = {"machine": machine()}
    for name in SCRIPTS:
        with tempfile.TemporaryDirectory() as folder:
            numbers[name] = run(name, Path(folder))
    RECORDED.write_text(json.dumps(numbers, indent=1) + "\n")
