"""Tests that diffs against grpo.py stay small, and that a row of docs/side_by_side.md is that of the scripts."""

import importlib
import re
import subprocess

import diffs
import pytest
from sync_copies import ROOT

# {(script, other script): (maximum lines added, maximum lines removed)}, of whole files. These are alarms, not goals.
BUDGETS = {"dr_grpo": (41, 51), "gspo": (50, 60), "dapo": (104, 64), "reinforce": (71, 127)}
BUDGETS |= {"cispo": (43, 52), "grpo_process": (91, 32)}
# DPO has a reference model, and the reward model returns scores.
ALL_BUDGETS = {("grpo", script): budget for script, budget in BUDGETS.items()} | {("reward_model", "dpo"): (223, 155)}


@pytest.mark.parametrize("before, after", ALL_BUDGETS)
def test_diff_stays_within_its_budget(before, after):
    command = ["git", "diff", "--no-index", "--numstat", f"{before}.py", f"{after}.py"]
    added, removed, _ = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split(maxsplit=2)
    assert (int(added), int(removed)) != (0, 0)
    assert int(added) <= ALL_BUDGETS[before, after][0] and int(removed) <= ALL_BUDGETS[before, after][1]


def updates_per_rollout(args):
    """Return the optimizer steps per rollout with these settings."""
    completions = args.prompts_per_step * getattr(args, "group_size", 1)
    return completions // getattr(args, "minibatch_size", completions) * getattr(args, "update_epochs", 1)


def test_the_page_has_the_updates_per_rollout_of_the_defaults():
    page, found = (ROOT / "docs" / "side_by_side.md").read_text(encoding="utf-8"), {}
    for table in page.split("\n\n"):
        rows = {line.split("|")[1]: re.split(r"(?<!\\)\|", line)[2:-1] for line in table.splitlines() if "|" in line}
        for name in rows:
            if name.startswith("updates per rollout"):
                found |= dict(zip(rows["script"], rows[name], strict=True))
    found = {script.strip("`").removesuffix(".py"): numbers for script, numbers in found.items() if numbers != "-"}
    assert len(found) == 8
    for script, numbers in found.items():
        module = importlib.import_module(script)
        assert numbers == f"{updates_per_rollout(module.TINY)}, {updates_per_rollout(module.Args())}", script


@pytest.mark.parametrize("script", diffs.RELATIVES)
def test_a_page_begins_with_the_diff_of_its_script(script):
    page = (ROOT / "docs" / f"{script}.md").read_text(encoding="utf-8")
    assert page == diffs.fill(page, script) and len(diffs.diff(script).splitlines()) <= 60
    assert f"[`{diffs.RELATIVES[script][0]}.py`]" in page.partition("<!-- diff -->")[0]


def test_the_loss_on_the_first_page_is_that_of_the_script():
    loss = re.search("```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[1]
    assert len(loss.splitlines()) == 8 and loss in (ROOT / "examples" / "short_grpo.py").read_text(encoding="utf-8")
