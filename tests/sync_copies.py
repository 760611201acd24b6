"""Carry what scripts share from one of them into the others (commit before): python tests/sync_copies.py grpo.py"""

import ast
import functools
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARKER = "# ---- below: identical copies of what several scripts share, in the order of use\n"
REFERENCED = ("grpo", "grpo_process")
ONLINE = ("reinforce", *REFERENCED, "dr_grpo", "dapo", "gspo", "cispo", "grpo_tools")
PAIRS = ("reward_model", "dpo")
REWARDED = (*ONLINE, "ppo_rlhf")
SAMPLED = (*REWARDED, "gkd")
LOGPROBS = ("sft", "dpo", *SAMPLED)
ALL = (*LOGPROBS, "reward_model")


def without(scripts, *names):
    return tuple(script for script in scripts if script not in names)


# {scripts: what is identical in them}; a name comes twice where two families have each their own.
SHARED = {
    ALL: """RANK WORLD_SIZE inner_bar SEPARATORS LORA_ALPHA LINEAR_LAYERS parse_args explain_error init_ranks
        multiplies_bfloat16 load_splits read_folder read_file find_column as_messages without_nulls find_turn_end
        add_adapters find_blocks prepare_model use_bfloat16 add_rounding_noise in_bfloat16 cast init_moments open_run
        lock_run track_run load_state all_reduce stop_requested append_line mean_metrics pick_rows mix_seed
        step_optimizer save merge_adapters end_run""",
    without(ALL, "ppo_rlhf", "gkd"): "PATHS",
    LOGPROBS: "load_model LOGITS_AT_ONCE",
    SAMPLED: """is_correct reward_fn score_completions k3 ANSWER_COLUMNS EVAL_SAMPLES NOTATIONS NUMBER load_rows
        read_rows encode_prompt parse_gold extract_answer read_braces parse_answer sum_parts check_model
        show_first_row pad_left gathered sample_tokens are_correct microbatches
        check_sampler catch_signals LESS_MEMORY CACHE_BLOCK prefill RoomyLayer append_token""",
    REWARDED: "token_logprobs head_logprobs",
    without(ALL, "sft"): "PROMPT_COLUMNS",
    without(SAMPLED, "grpo_tools"): "generate sample_completions",
    without(REWARDED, "reinforce"): "compute_logprobs",
    ONLINE: "READ_COLUMNS read_row rollout_metrics log_group LogprobModel",
    (*ONLINE, "gkd"): "evaluate log_step",
    without(ONLINE, "reinforce"): "check_args",
    (*REFERENCED, "ppo_rlhf"): "without_adapters LoraLinear",
    without(ALL, *REFERENCED, "ppo_rlhf"): "LoraLinear",
    ("sft", "dpo", "reward_model"): "check_args encode_prompt catch_signals LESS_MEMORY",
    ("sft", "dpo"): "check_model token_logprobs head_logprobs LogprobModel",
    ("sft", "dpo", "reward_model", "ppo_rlhf", "gkd"): "encode_completion pad",
    ("sft", "dpo", "reward_model", "ppo_rlhf"): "log_step",
    ("dpo", "reward_model", "ppo_rlhf"): "parse_dialogue",
    PAIRS: "READ_COLUMNS load_pairs read_pairs read_pair split_pair microbatches count_tokens",
    ("sft", "ppo_rlhf"): "COMPLETION_COLUMNS read_chat find_chat read_turn",
    ("reward_model", "ppo_rlhf"): "load_reward_model sequence_scores hidden_states",
}
# [(name, the scripts in which it is identical)]
SHARED = [(name, scripts) for scripts, names in SHARED.items() for name in names.split()]
# What has one name and differs by design: everywhere, or in scripts that are not in the table.
OWN = {*"HERE PLAIN_NUMBER FILLER Args TINY compute_advantages policy_loss preference_loss".split()}
OWN |= {"accumulate_gradients", "main"}
OWN_OF = {
    "evaluate": {"ppo_rlhf", "reward_model", "sft", "dpo"},
    "check_args": {"reinforce", "ppo_rlhf", "gkd"},
    "check_model": {"reward_model"},
    "generate": {"grpo_tools"},
    "sample_completions": {"grpo_tools"},
    "read_row": {"ppo_rlhf", "gkd"},
    "PATHS": {"ppo_rlhf", "gkd"},
    "rollout_metrics": {"ppo_rlhf", "gkd"},
    "microbatches": {"sft"},
    "count_tokens": {"sft"},
    "PROMPT_COLUMNS": {"sft"},
    "READ_COLUMNS": {"sft", "ppo_rlhf", "gkd"},
    "COMPLETION_COLUMNS": {"gkd"},
}


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
