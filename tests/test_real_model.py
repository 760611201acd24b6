"""docs/real_model.md: its tables are those of the csv, whose runs are whole; the commands are of flags that exist."""

import importlib
import math
import sys

import pytest
import tyro
from tiny import ROOT

sys.path.append(str(ROOT / "benchmark"))
real_model = importlib.import_module("real_model")


def test_the_page_is_what_the_csv_makes():
    page = real_model.PAGE.read_text()
    assert page == real_model.write_page(page, real_model.read_csv())
    assert all(f"<!-- {name} -->" in page for name in real_model.TABLES)


def test_every_run_of_the_csv_is_whole_and_has_its_looks():
    rows = real_model.read_csv()
    runs = {(row["run"], row["seed"]) for row in rows}
    for name, seed in runs:
        own = [row for row in rows if (row["run"], row["seed"]) == (name, seed)]
        steps = [row["step"] for row in own if "look" not in row]
        assert steps == [*range(len(steps))]
        assert sorted(row["look"] for row in own if "look" in row) == sorted([*real_model.RUNS[name].looks, "whole"])
        assert all(math.isfinite(row.get("optim/grad_norm", 0)) for row in own)
    seen = {(row["run"], row["seed"], row.get("look")) for row in real_model.read_jsonl(real_model.SAMPLES)}
    assert {key[:2] for key in seen} <= runs


@pytest.mark.parametrize("name", real_model.RUNS)
def test_commands_are_of_flags_that_there_are(name):
    command = real_model.command_of(name, 1)
    script = importlib.import_module("grpo" if "examples" in command[1] else command[1].removesuffix(".py"))
    args = tyro.cli(script.Args, args=command[2:])
    assert args.seed == 1 and args.precision == real_model.RUNS[name].precision
    for look in real_model.RUNS[name].looks:
        assert real_model.command_of(name, 1, look)[0] == "python"


def test_a_mean_with_half_its_range():
    assert real_model.over_seeds([0.25]) == "0.250"
    assert real_model.over_seeds([0.1, 0.3, 0.2], [0.0, 0.1]) == "0.050 -> 0.200 ± 0.100"
