"""Tests that each script's diff against grpo.py stays small, and that the page with the tables is up to date."""

import subprocess

import pytest
import side_by_side
from sync_copies import MARKER, ROOT

# {script: (maximum lines added, maximum lines removed)} above the line. These are alarms, not goals.
BUDGETS = {"dr_grpo": (45, 56), "gspo": (53, 68), "dapo": (114, 71), "reinforce": (57, 112)}
BUDGETS |= {"cispo": (42, 58), "grpo_process": (128, 31), "grpo_tools": (119, 53)}
# PPO also has a value model and a reward model. DPO has a reference model, and the reward model returns scores.
MORE_BUDGETS = {("grpo", "ppo_rlhf"): (372, 162), ("reward_model", "dpo"): (109, 75)}
ALL_BUDGETS = {("grpo", script): budget for script, budget in BUDGETS.items()} | MORE_BUDGETS


@pytest.mark.parametrize("before, after", ALL_BUDGETS)
def test_diff_above_the_line_stays_within_its_budget(before, after, tmp_path):
    for script in (before, after):
        above = (ROOT / f"{script}.py").read_text(encoding="utf-8").partition(MARKER)[0]
        (tmp_path / script).write_text(above, encoding="utf-8")
    command = ["git", "diff", "--no-index", "--numstat", before, after]
    added, removed, _ = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout.split(maxsplit=2)
    assert (int(added), int(removed)) != (0, 0)
    assert int(added) <= ALL_BUDGETS[before, after][0] and int(removed) <= ALL_BUDGETS[before, after][1]


def test_page_is_what_its_command_makes():
    assert side_by_side.PATH.read_text(encoding="utf-8") == side_by_side.render()
