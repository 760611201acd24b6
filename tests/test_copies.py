"""The scripts share no module: what they share is copied. This table says what, and the copies must be identical."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MARKER = "# ---- below: functions that are byte-identical in all scripts that have them, "
MARKER += "in the order in which main calls them\n"
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
OWN_OF = {
    "parse_args": {"sft"},
    "check_args": {"ppo_rlhf"},
    "evaluate": {"ppo_rlhf", "reward_model", "sft"},
    "load_prompts": {"ppo_rlhf"},
    "lookup_logprobs": {"ppo_rlhf"},
    "step_metrics": {"ppo_rlhf"},
}


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


@pytest.mark.parametrize("name, scripts", SHARED)
def test_copies_are_identical(name, scripts):
    assert len({definitions(script)[name] for script in scripts}) == 1


def test_table_lists_every_shared_function():
    owners = {}
    for script in ALL:
        for name in definitions(script):
            owners.setdefault(name, set()).add(script)
    shared = {name: scripts for name, scripts in owners.items() if len(scripts) > 1 and name not in OWN}
    table = {name: set(OWN_OF.get(name, ())) for name, _ in SHARED}
    for name, scripts in SHARED:
        table[name] |= {*scripts}
    assert shared == table


def test_the_tool_carries_a_change_into_all_copies(tmp_path):
    from sync_copies import carry  # it imports this module's table

    for script in ALL:
        (tmp_path / f"{script}.py").write_text((ROOT / f"{script}.py").read_text(encoding="utf-8"), encoding="utf-8")
    path = tmp_path / "grpo.py"
    text = path.read_text(encoding="utf-8")
    text = text.replace("def append_line(args, name, row):", "def append_line(args, name, row, _=None):")
    text = text.replace("def step_metrics(", "def second_metrics():\n    pass\n\n\ndef step_metrics(")
    path.write_text(text, encoding="utf-8")
    changed = {script: carry("grpo", script, tmp_path) for script in ALL if script != "grpo"}
    block = ["append_line", "the block below the line"]
    assert changed == {script: block if script in BLOCK else ["append_line"] for script in changed}
    copies = {definitions(script, tmp_path)["append_line"] for script in ALL}
    assert len(copies) == 1 and "_=None" in copies.pop()
    assert all(("second_metrics" in definitions(script, tmp_path)) == (script in BLOCK) for script in ALL)
    assert not any(carry("grpo", script, tmp_path) for script in changed)  # nothing is left to change


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
