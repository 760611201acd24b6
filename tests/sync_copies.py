"""Carry what scripts share from one of them into the others (commit before): python tests/sync_copies.py grpo.py"""

import ast
import functools
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARKER = "# ---- below: identical copies of what several scripts share, in the order of use\n"
GROUPED = ("reinforce", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "grpo_process")  # the short scripts
OLDER = ("sft", "dpo", "reward_model", "grpo_tools", "ppo_rlhf", "gkd")  # those that are still to be shortened
ALL = (*GROUPED, *OLDER)


def without(scripts, *names):
    return tuple(script for script in scripts if script not in names)


# {scripts: what is identical in them}; a name comes twice where two families have each their own.
SHARED = {
    GROUPED: """RANK WORLD_SIZE HERE is_correct reward_fn score_completions k3 LOGITS_AT_ONCE inner_bar extract_answer
        parse_answer parse_args init_ranks load_rows read_rows load_policy load_model find_turn_end prepare
        add_rounding_noise Policy head_logprobs load_sampler open_run max_over_ranks evaluate sample_completions
        generate prefill sample_tokens draw sum_parts mean_metrics log_step copy_weights pick_rows microbatches select
        step_optimizer log_group save""",
    without(GROUPED, "reinforce"): "check_args compute_logprobs",
    OLDER: """RANK WORLD_SIZE HERE inner_bar PROMPT_COLUMNS SEPARATORS LORA_ALPHA LINEAR_LAYERS parse_args
        explain_error init_ranks
        multiplies_bfloat16 load_splits read_folder read_file find_column as_messages without_nulls find_turn_end
        add_adapters find_blocks prepare_model use_bfloat16 add_rounding_noise in_bfloat16 cast init_moments open_run
        lock_run track_run load_state all_reduce stop_requested append_line mean_metrics pick_rows mix_seed
        step_optimizer save merge_adapters end_run""",
    without(OLDER, "ppo_rlhf", "gkd"): "PATHS",
    without(OLDER, "reward_model"): "load_model LOGITS_AT_ONCE",
    ("grpo_tools", "ppo_rlhf", "gkd"): """is_correct reward_fn score_completions k3 ANSWER_COLUMNS EVAL_SAMPLES
        NOTATIONS NUMBER load_rows read_rows encode_prompt parse_gold extract_answer read_braces parse_answer sum_parts
        check_model show_first_row pad_left gathered sample_tokens are_correct microbatches check_sampler catch_signals
        LESS_MEMORY CACHE_BLOCK prefill RoomyLayer append_token""",
    ("grpo_tools", "ppo_rlhf"): "token_logprobs head_logprobs compute_logprobs",
    ("ppo_rlhf", "gkd"): "generate sample_completions",
    ("grpo_tools", "gkd"): "evaluate log_step",
    without(OLDER, "ppo_rlhf"): "LoraLinear",
    ("sft", "dpo", "reward_model"): "check_args encode_prompt catch_signals LESS_MEMORY",
    ("sft", "dpo"): "check_model token_logprobs head_logprobs LogprobModel",
    ("sft", "dpo", "reward_model", "ppo_rlhf", "gkd"): "encode_completion pad",
    ("sft", "dpo", "reward_model", "ppo_rlhf"): "log_step",
    ("dpo", "reward_model", "ppo_rlhf"): "parse_dialogue",
    ("reward_model", "dpo"): "READ_COLUMNS load_pairs read_pairs read_pair split_pair microbatches count_tokens",
    ("sft", "ppo_rlhf"): "COMPLETION_COLUMNS read_chat find_chat read_turn",
    ("reward_model", "ppo_rlhf"): "load_reward_model sequence_scores hidden_states",
}
# [(name, the scripts in which it is identical)]
SHARED = [(name, scripts) for scripts, names in SHARED.items() for name in names.split()]
# What has one name and differs by design, everywhere.
OWN = {*"Args TINY compute_advantages policy_loss preference_loss accumulate_gradients main".split()}


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
