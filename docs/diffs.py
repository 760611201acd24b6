"""Write the diff at the beginning of each script's page, from its nearest relative: python docs/diffs.py"""

import difflib
import importlib
import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# {script: (its nearest relative, the functions in which they differ or that it adds)}
RELATIVES = {
    "grpo": ("reinforce", ["compute_advantages", "policy_loss"]),
    "reinforce": ("sft", ["compute_advantages", "policy_loss"]),
    "dr_grpo": ("grpo", ["compute_advantages", "policy_loss"]),
    "dapo": ("grpo", ["has_signal", "policy_loss"]),
    "gspo": ("grpo", ["policy_loss"]),
    "cispo": ("dapo", ["policy_loss"]),
    "grpo_process": ("grpo", ["compute_advantages"]),
    "grpo_tools": ("grpo", ["take_turns"]),
    "gkd": ("grpo", ["token_divergence", "distillation_loss"]),
    "ppo_rlhf": ("grpo", ["token_rewards", "compute_advantages", "value_loss"]),
    "dpo": ("reward_model", ["preference_loss", "pair_loss"]),
    "reward_model": ("sft", ["preference_loss", "pair_loss"]),
    "sft": ("dpo", ["completion_loss", "batch_loss"]),
}


def read_function(script, name):
    """Return the lines of a script's function without its docstring, and nothing if there is no such function."""
    sys.path.insert(0, str(ROOT))
    function = getattr(importlib.import_module(script), name, None)
    if function is None:
        return []
    lines = inspect.getsource(function).splitlines()
    ends = [i for i, line in enumerate(lines) if line.strip().endswith('"""')]
    begin = next(i for i, line in enumerate(lines) if line.strip().startswith('"""'))
    return lines[:begin] + lines[ends[0] + 1 :]


def diff(script):
    """Return the diff of a script's own functions from those of its relative."""
    relative, names = RELATIVES[script]
    lines = [f"--- {relative}.py", f"+++ {script}.py"]
    for name in names:
        sources = read_function(relative, name), read_function(script, name)
        found = list(difflib.unified_diff(*sources, n=0, lineterm=""))[2:]
        lines += [f"@@ {name} @@" if line.startswith("@@") else line for line in found]
    return "\n".join(lines)


def fill(page, script):
    """Return a page with the script's diff between its marks."""
    before, mark, rest = page.partition("<!-- diff -->\n")
    if not mark:
        raise ValueError(f"the page of {script} lacks the line <!-- diff -->")
    after = rest.partition("<!-- end -->")[2]
    return f"{before}{mark}\n```diff\n{diff(script)}\n```\n\n<!-- end -->{after}"


if __name__ == "__main__":
    for script in RELATIVES:
        path = ROOT / "docs" / f"{script}.md"
        path.write_text(fill(path.read_text(encoding="utf-8"), script), encoding="utf-8")
