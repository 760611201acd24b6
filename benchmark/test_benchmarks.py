"""The programs of this folder: commands parse, pages have what the records say, and gpu.py finds faults."""

import importlib
import shlex
import subprocess
import sys

import default_runs
import gpu
import mistakes
import pytest
import real_model
import tyro
from records import ROOT, read_records

TABLES = {
    "default runs": ("results", lambda: default_runs.table_of_all(read_records(default_runs.RECORDS))),
    "instructions": ("real_model", lambda: real_model.instructions_table(read_records(real_model.RECORDS))),
    "evaluations": ("real_model", lambda: real_model.evaluations_table(read_records(real_model.RECORDS))),
    "mistakes": ("is_this_normal", lambda: mistakes.make_table(read_records(mistakes.RECORDS))),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_page_has_the_table_that_its_records_make(name):
    page, make = TABLES[name]
    assert f"<!-- {name} -->\n\n{make()}\n\n<!-- end -->" in (ROOT / "docs" / f"{page}.md").read_text()


@pytest.mark.parametrize("name", real_model.COMMANDS)
def test_commands_have_flags_that_there_are(name):
    script, *flags = shlex.split(real_model.COMMANDS[name])
    first = next(i for i, word in enumerate(flags) if word.startswith("--"))
    module = (flags[:first] or ["grpo"])[0] if script.startswith("examples/") else script.removesuffix(".py")
    tyro.cli(importlib.import_module(module).Args, args=flags[first:])


@pytest.mark.parametrize("name", mistakes.MISTAKES)
def test_each_mistake_fits_the_script_and_shows_with_all_seeds(name):
    compile(mistakes.edited(name), "grpo.py", "exec")
    records, metric = read_records(mistakes.RECORDS), mistakes.MISTAKES[name][0]
    right, wrong = (mistakes.values_of(records, key, metric) for key in (mistakes.RIGHT, name))
    assert mistakes.is_outside(wrong, right)


def test_gpu_py_runs_on_a_cpu_with_a_tiny_model(tmp_path):
    command = [sys.executable, gpu.__file__, "--tiny", "--out", str(tmp_path / "gpu.md"), "--sections", "numbers"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "|under 0.01|yes|" in (tmp_path / "gpu.md").read_text()


def test_gpu_py_trains_and_notices_a_fault(tmp_path):
    """A run of one step has not learned the default task."""
    model = str(tmp_path / "tiny")
    assert gpu.start_child("make_model", [model], 60) == []
    [job] = [job for job in gpu.jobs_of(gpu.Args(tiny=True), tmp_path) if job[1].startswith("ppo_rlhf")]
    rows = {quantity: holds for quantity, _, _, holds in gpu.start_child(*job[2:], 120)}
    assert rows["policy/sampler_kl"] is True and "peak memory by tools/memory.py, GB" in rows
    [(_, value, _, holds)] = gpu.check_defaults(str(tmp_path / "run"), ["dpo"], ["--num-steps", "1"])
    assert value < 0.78 and holds is False


def test_the_runs_on_a_gpu_have_settings_that_the_scripts_take(tmp_path):
    jobs = [arguments for _, _, function, arguments in gpu.jobs_of(gpu.Args(), tmp_path) if function == "train"]
    assert len(jobs) >= 4
    for _, name, _, flags in jobs:
        script = importlib.import_module(name)
        script.check_args(tyro.cli(script.Args, args=flags))


def test_gpu_py_reports_a_section_that_fails(tmp_path):
    [(what, error, _, holds)] = gpu.start_child("check_numbers", [str(tmp_path / "tiny")], 60)
    assert what == "failed" and error and holds is False
