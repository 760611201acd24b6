"""Tests that each script's diff against grpo.py stays small, and that the page with the tables is up to date."""

import subprocess

import pytest
import side_by_side
from sync_copies import ROOT

# {script: (maximum lines added, maximum lines removed)}, of whole files. These are alarms, not goals.
BUDGETS = {"dr_grpo": (41, 51), "gspo": (49, 60), "dapo": (104, 64), "reinforce": (71, 127)}
BUDGETS |= {"cispo": (40, 52), "grpo_process": (91, 32)}
# DPO has a reference model, and the reward model returns scores.
ALL_BUDGETS = {("grpo", script): budget for script, budget in BUDGETS.items()} | {("reward_model", "dpo"): (223, 155)}


@pytest.mark.parametrize("before, after", ALL_BUDGETS)
def test_diff_stays_within_its_budget(before, after):
    command = ["git", "diff", "--no-index", "--numstat", f"{before}.py", f"{after}.py"]
    added, removed, _ = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split(maxsplit=2)
    assert (int(added), int(removed)) != (0, 0)
    assert int(added) <= ALL_BUDGETS[before, after][0] and int(removed) <= ALL_BUDGETS[before, after][1]


def test_page_is_what_its_command_makes():
    assert side_by_side.PATH.read_text(encoding="utf-8") == side_by_side.render()
