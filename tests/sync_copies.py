"""Carry what scripts share from one of them into the others (commit before): python tests/sync_copies.py grpo.py"""

import ast
import functools
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARKER = "# ---- below: identical copies of what several scripts share, in the order of use\n"
SAMPLING = ("reinforce", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "grpo_process", "grpo_tools", "gkd", "ppo_rlhf")
ALL = (*SAMPLING, "dpo", "reward_model", "sft")


def without(scripts, *names):
    return tuple(script for script in scripts if script not in names)


# {scripts: what is identical in them}; a name comes twice where two families have each their own.
SHARED = {
    ALL: """RANK WORLD_SIZE HERE inner_bar parse_args init_ranks find_turn_end prepare open_run load_state
        max_over_ranks log_step mean_metrics pick_rows microbatches select step_optimizer save""",
    without(ALL, "gkd"): "add_rounding_noise",
    without(ALL, "reward_model"): "LOGITS_AT_ONCE load_policy",
    without(ALL, "reward_model", "sft"): "load_model",
    without(ALL, "reward_model", "gkd"): "Policy head_logprobs",
    SAMPLING: """is_correct k3 VALUE UNIT parse_answer extract_answer read_braces load_rows read_rows load_sampler
        generate prefill sample_tokens copy_weights""",
    without(SAMPLING, "ppo_rlhf", "gkd"): "sum_parts",
    without(SAMPLING, "ppo_rlhf", "gkd", "grpo_tools"): "reward_fn score_completions evaluate",
    without(SAMPLING, "grpo_tools"): "sample_completions",
    without(SAMPLING, "gkd"): "log_group",
    without(SAMPLING, "gkd", "reinforce", "ppo_rlhf"): "add_logprobs check_args",
    ("dpo", "reward_model", "sft"): "check_args as_messages encode_chat",
    ("dpo", "reward_model"): "load_rows read_rows find_chat parse_dialogue make_batch",
}
# [(name, the scripts in which it is identical)]
SHARED = [(name, scripts) for scripts, names in SHARED.items() for name in names.split()]
# What has one name and differs by design.
OWN = {*"Args TINY compute_advantages policy_loss preference_loss main".split()}


@functools.cache
def split(source):
    """{name: source} of the functions, classes and constants in a script's text."""
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return found


def definitions(script, folder=ROOT):
    """{name: source} of the functions, classes and constants of a script."""
    return split((folder / f"{script}.py").read_text(encoding="utf-8"))


def carry(source, target, folder=ROOT):
    """Write source's shared definitions into target, both names without .py; return the names of those that changed."""
    path = folder / f"{target}.py"
    text, ours, theirs = path.read_text(encoding="utf-8"), definitions(source, folder), definitions(target, folder)
    names = [name for name, scripts in SHARED if source in scripts and target in scripts]
    missing = [name for name in names if name not in theirs]
    if missing:
        print(f"{target}.py lacks {', '.join(missing)}: add it where main first needs it", file=sys.stderr)
    changed = [name for name in names if name in theirs and ours[name] != theirs[name]]
    for name in changed:
        text = text.replace(theirs[name], ours[name])
    if changed:
        path.write_text(text, encoding="utf-8")
    return changed


if __name__ == "__main__":
    if len(sys.argv) != 2 or Path(sys.argv[1]).stem not in ALL:
        raise SystemExit("usage: python tests/sync_copies.py SCRIPT.py, the script whose text the others shall have")
    source = Path(sys.argv[1]).stem
    for target in sorted({*ALL} - {source}):
        print(f"{target}.py: {', '.join(carry(source, target)) or 'nothing to change'}")
