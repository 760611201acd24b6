"""The scripts share no module: what they share is copied. This table says what, and the copies must be identical."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CLIPPED = ("grpo", "dr_grpo", "dapo", "gspo")
ONLINE = ("reinforce", *CLIPPED)
PAIRS = ("reward_model", "dpo")
SCORED = ("reward_model", "ppo_rlhf")
SAMPLED = (*ONLINE, "dpo", "ppo_rlhf")
LOGPROBS = ("sft", *SAMPLED)
ALL = (*LOGPROBS, "reward_model")
SHARED = {
    "load_splits": ALL,
    "encode_prompt": (*SAMPLED, "reward_model"),
    "load_prompts": (*ONLINE, "dpo"),
    "extract_answer": SAMPLED,
    "parse_answer": SAMPLED,
    "reward_fn": SAMPLED,
    "split_pair": (*PAIRS, "ppo_rlhf"),
    "load_pairs": PAIRS,
    "collate_pairs": PAIRS,
    "load_model": LOGPROBS,
    "load_reward_model": SCORED,
    "find_stop_ids": ALL,
    "pad_left": ALL,
    "sample_tokens": SAMPLED,
    "generate": SAMPLED,
    "head_logprobs": LOGPROBS,
    "token_logprobs": LOGPROBS,
    "LogprobModel": LOGPROBS,
    "hidden_states": SCORED,
    "sequence_scores": SCORED,
    "ScoreModel": SCORED,
    "check_model": LOGPROBS,
    "microbatches": ALL,
    "lookup_logprobs": CLIPPED,
    "step_optimizer": ("sft", *ONLINE, *PAIRS),
    "add_metrics": ALL,
    "init_ranks": ALL,
    "all_reduce": ALL,
    "shard": ALL,
    "sync_sampler": SAMPLED,
    "on_rank_0": ALL,
    "save": ALL,
    "save_checkpoint": ALL,
    "load_state": ALL,
    "open_run": ALL,
    "write_whole": ALL,
    "append_line": ALL,
    "catch_signals": ALL,
    "is_embedded": ALL,
    "resolve_args": ALL,
    "pick_rows": ALL,
    "rollout": SAMPLED,
    "rollout_metrics": ONLINE,
    "reduce_metrics": ALL,
    "evaluate": (*ONLINE, "dpo"),
    "print_group": (*ONLINE, "ppo_rlhf"),
    "print_summary": ONLINE,
}
# Functions of one name that differ by design: everywhere, or in scripts that are not in the table.
OWN = {"Args", "compute_advantages", "policy_loss", "preference_loss", "accumulate_gradients", "check_args", "main"}
OWN_OF = {
    "load_prompts": ("ppo_rlhf",),
    "check_model": ("reward_model",),
    "step_optimizer": ("ppo_rlhf",),
    "rollout_metrics": ("ppo_rlhf",),
    "evaluate": ("sft", "reward_model", "ppo_rlhf"),
    "print_summary": ("sft", "reward_model", "dpo", "ppo_rlhf"),
}


def definitions(script):
    source = (ROOT / f"{script}.py").read_text()
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    lines = source.splitlines()
    first = {node.name: min([node.lineno, *(d.lineno for d in node.decorator_list)]) for node in nodes}
    return {node.name: "\n".join(lines[first[node.name] - 1 : node.end_lineno]) for node in nodes}


@pytest.mark.parametrize("name", SHARED)
def test_copies_are_identical(name):
    assert len({definitions(script)[name] for script in SHARED[name]}) == 1


def test_table_lists_every_shared_function():
    owners = {}
    for script in ALL:
        for name in definitions(script):
            owners.setdefault(name, set()).add(script)
    shared = {name: scripts for name, scripts in owners.items() if len(scripts) > 1 and name not in OWN}
    assert shared == {name: {*scripts, *OWN_OF.get(name, ())} for name, scripts in SHARED.items()}


def test_scripts_import_nothing_of_each_other():
    for script in ALL:
        imported = set()
        for node in ast.walk(ast.parse((ROOT / f"{script}.py").read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                imported.add(node.module.split(".")[0])
        assert not [name for name in imported if (ROOT / f"{name}.py").exists()]
