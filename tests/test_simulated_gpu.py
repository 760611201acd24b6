"""The scripts that sample on a CUDA device that is not there: python -m pytest tests/test_simulated_gpu.py

fake_cuda.py says what that can show.
"""

import json
import sys

import pytest
from test_cuda import ROOT, device, numbers_of  # noqa: F401
from toy import NAMES, SCRIPTS, parse, read_jsonl, write_jsonl


def flags_of(name, folder, **settings):
    """Flags of two short steps, some of which have no effect in a script that lacks them."""
    rows = read_jsonl(ROOT / "data/addition/train.jsonl")[:32]
    settings = {
        "dataset": write_jsonl(folder / "rows.jsonl", rows),
        "run_dir": folder / "run",
        "num_steps": 2,
    } | settings
    settings |= {"eval_prompts": 2, "eval_every": 2, "save_every": 2, "prompts_per_step": 4, "group_size": 4}
    settings |= {"minibatch_size": 8, "max_completion_length": 12, "learning_rate": 1e-4, "warmup_steps": 0}
    settings |= {"max_rounds": 2, "gradient_checkpointing": name == "grpo"}
    script = SCRIPTS[name]
    parse(script, **{key: value for key, value in settings.items() if hasattr(script.Args, key)})
    return sys.argv[1:]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_in_bfloat16_trains_evaluates_saves_and_resumes(name, device, tmp_path):  # noqa: F811
    printed = device.run(f"{name}.py", *flags_of(name, tmp_path, precision="bfloat16"))
    assert "bfloat16, 1 x cuda:0" in printed
    device.run(f"{name}.py", "--resume", tmp_path / "run", "--num-steps", 3)
    lines = numbers_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert any(line["optim/grad_norm"] > 0 for line in lines[1:])
    assert (tmp_path / "run/checkpoint-000003/model.safetensors").exists()


@pytest.mark.parametrize("name, precision", [("grpo", "float32"), ("dapo", "bfloat16")])
def test_two_ranks(name, precision, device, tmp_path):  # noqa: F811
    device.run(f"{name}.py", *flags_of(name, tmp_path, precision=precision, num_steps=1), ranks=2)
    device.run(f"{name}.py", "--resume", tmp_path / "run", "--num-steps", 2, ranks=2)
    assert [line["step"] for line in numbers_of(tmp_path / "run")] == [0, 1, 2]
    assert json.loads((tmp_path / "run/args.json").read_text())["num_steps"] == 2


@pytest.mark.parametrize("name", NAMES)
def test_in_float32_the_numbers_are_those_of_a_run_on_the_cpu(name, device, tmp_path):  # noqa: F811
    device.run(f"{name}.py", *flags_of(name, tmp_path, precision="float32"))
    flags_of(name, tmp_path, precision="float32", run_dir=tmp_path / "cpu")
    SCRIPTS[name].main(SCRIPTS[name].parse_args())
    for ours, expected in zip(numbers_of(tmp_path / "run"), numbers_of(tmp_path / "cpu"), strict=True):
        assert ours == pytest.approx(expected, rel=1e-4, abs=1e-4)
