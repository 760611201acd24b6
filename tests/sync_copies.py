"""Carry what scripts share from one of them into the others (commit before): python tests/sync_copies.py grpo.py"""

import ast
import functools
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARKER = "# ---- below: what the scripts share, in the order of use, "
MARKER += "as identical copies (tests/sync_copies.py lists exceptions)\n"
CLIPPED = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "grpo_process", "grpo_tools")
ONLINE = ("reinforce", *CLIPPED)
BLOCK = ONLINE  # all that stands below the line is one text
PAIRS = ("reward_model", "dpo")
SCORED = ("reward_model", "ppo_rlhf")
SAMPLED = (*ONLINE, "ppo_rlhf")
LOGPROBS = ("sft", "dpo", *SAMPLED)
ALL = (*LOGPROBS, "reward_model")
# {scripts: what is identical in them}; a name comes twice where two families have each their own.
SHARED = {
    ALL: """init_ranks all_reduce find_precision load_rows load_splits as_messages encode_prompt find_turn_end
        find_column check_chat read_config
        add_adapters find_blocks shard compute_in_bfloat16 in_bfloat16 cast open_run load_state catch_signals pick_rows
        pad_left microbatches step_optimizer append_line log_step read_metrics save merge_adapters end_run""",
    ("dpo", "reward_model", *SAMPLED): "parse_args",
    LOGPROBS: "load_model token_logprobs head_logprobs LogprobModel",
    SAMPLED: """is_right reward_fn score_completions read_prompt check_model generate sample_tokens gathered
        sample_completions compute_rewards extract_answer find_closing_brace parse_answer parse_gold""",
    ONLINE: "check_args evaluate load_prompts lookup_logprobs step_metrics log_group",
    ("sft", "dpo", "reward_model"): "check_args check_context",
    ("sft", "dpo"): "check_logprobs",
    ("sft", "ppo_rlhf"): "collate read_chat",
    ("sft", "dpo", "reward_model", "ppo_rlhf"): "encode_completion pad_right",
    ("dpo", "reward_model", "ppo_rlhf"): "parse_dialogue",
    PAIRS: "step_metrics load_pairs read_pair split_pair split_chats collate_pairs",
    SCORED: "load_reward_model hidden_states ScoreModel sequence_scores",
}
# [(name, the scripts in which it is identical)]
SHARED = [(name, scripts) for scripts, names in SHARED.items() for name in names.split()]
# Functions of one name that differ by design: everywhere, or in scripts that are not in the table.
OWN = {*"Args compute_advantages policy_loss preference_loss accumulate_gradients main".split()}
OWN_OF = {"parse_args": {"sft"}, "evaluate": {"ppo_rlhf", "reward_model", "sft"}}
OWN_OF |= dict.fromkeys(("check_args", "load_prompts", "lookup_logprobs", "step_metrics"), {"ppo_rlhf"})


@functools.cache
def split(source):
    """{name: source} of the functions and classes in a script's text."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    lines = source.splitlines()
    first = {node.name: min([node.lineno, *(d.lineno for d in node.decorator_list)]) for node in nodes}
    return {node.name: "\n".join(lines[first[node.name] - 1 : node.end_lineno]) for node in nodes}


def definitions(script, folder=ROOT):
    """{name: source} of the functions and classes of a script."""
    return split((folder / f"{script}.py").read_text(encoding="utf-8"))


def carry(source, target, folder=ROOT):
    """Write source's shared functions into target, both names without .py; return the names of those that changed."""
    path = folder / f"{target}.py"
    text, ours, theirs = path.read_text(encoding="utf-8"), definitions(source, folder), definitions(target, folder)
    names = [name for name, scripts in SHARED if source in scripts and target in scripts]
    whole = source in BLOCK and target in BLOCK
    missing = [name for name in names if name not in theirs and not whole]
    if missing:
        print(f"{target}.py lacks {', '.join(missing)}: add it where main first needs it", file=sys.stderr)
    changed = [name for name in names if name in theirs and ours[name] != theirs[name]]
    for name in changed:
        text = text.replace(theirs[name], ours[name])
    if whole:
        block = (folder / f"{source}.py").read_text(encoding="utf-8").partition(MARKER)[2]
        if text.partition(MARKER)[2] != block:
            text = text.partition(MARKER)[0] + MARKER + block
            changed = [*changed, "the block below the line"]
    if changed:
        path.write_text(text, encoding="utf-8")
    return changed


if __name__ == "__main__":
    if len(sys.argv) != 2 or Path(sys.argv[1]).stem not in ALL:
        raise SystemExit("usage: python tests/sync_copies.py SCRIPT.py, the script whose text the others shall have")
    source = Path(sys.argv[1]).stem
    for target in sorted({*ALL} - {source}):
        print(f"{target}.py: {', '.join(carry(source, target)) or 'nothing to change'}")
