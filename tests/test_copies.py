"""The scripts share no module: what they share is copied. This table says what, and the copies must be identical."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MARKER = "# ---- below: plumbing, byte-identical in every script that has it, in the order in which main calls it\n"
CLIPPED = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "grpo_process", "grpo_tools")
ONLINE = ("reinforce", *CLIPPED)
BLOCK = ONLINE  # all that stands below the line is one text
PAIRS = ("reward_model", "dpo")
SCORED = ("reward_model", "ppo_rlhf")
SAMPLED = (*ONLINE, "ppo_rlhf")
LOGPROBS = ("sft", "dpo", *SAMPLED)
ALL = (*LOGPROBS, "reward_model")
# [(name, the scripts in which it is identical)]; a name comes twice where two families have each their own.
SHARED = [
    ("by_model", ALL),
    ("init_ranks", ALL),
    ("resolve_args", ALL),
    ("one_line", ALL),
    ("all_reduce", ALL),
    ("check_args", ALL),
    ("load_tokenizer", ALL),
    ("find_turn_end", ALL),
    ("encode_prompt", ALL),
    ("load_rows", ALL),
    ("add_adapters", ALL),
    ("find_blocks", ALL),
    ("load_model", LOGPROBS),
    ("find_stop_ids", LOGPROBS),
    ("check_model", SAMPLED),
    ("check_model", ("sft", "dpo")),
    ("token_logprobs", LOGPROBS),
    ("head_logprobs", LOGPROBS),
    ("shard", ALL),
    ("in_bfloat16", ALL),
    ("cast", ALL),
    ("LogprobModel", LOGPROBS),
    ("open_run", ALL),
    ("load_state", ALL),
    ("catch_signals", ALL),
    ("pick_rows", ALL),
    ("collate", ("sft", "ppo_rlhf")),
    ("pad_left", ALL),
    ("microbatches", ALL),
    ("step_optimizer", ALL),
    ("evaluate", ONLINE),
    ("log_step", ("sft", "dpo", "ppo_rlhf", "reward_model")),
    ("log_step", ONLINE),
    ("append_line", ALL),
    ("save", ALL),
    ("end_run", ALL),
    ("is_right", SAMPLED),
    ("reward_fn", SAMPLED),
    ("score_completions", SAMPLED),
    ("load_prompts", ONLINE),
    ("read_prompt", SAMPLED),
    ("parse_answer", SAMPLED),
    ("generate", SAMPLED),
    ("sample_tokens", SAMPLED),
    ("gathered", SAMPLED),
    ("rollout", SAMPLED),
    ("sample_completions", SAMPLED),
    ("extract_answer", SAMPLED),
    ("lookup_logprobs", ONLINE),
    ("step_metrics", ONLINE),
    ("step_metrics", PAIRS),
    ("load_pairs", PAIRS),
    ("split_pair", PAIRS),
    ("encode_completion", PAIRS),
    ("collate_pairs", PAIRS),
    ("load_reward_model", SCORED),
    ("hidden_states", SCORED),
    ("ScoreModel", SCORED),
    ("sequence_scores", SCORED),
]
# Functions of one name that differ by design: everywhere, or in scripts that are not in the table.
OWN = {
    "Args",
    "compute_advantages",
    "policy_loss",
    "preference_loss",
    "microbatch_loss",
    "accumulate_gradients",
    "main",
}
OWN_OF = {
    "check_model": {"reward_model"},
    "evaluate": {"ppo_rlhf", "reward_model", "sft"},
    "load_prompts": {"ppo_rlhf"},
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
