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
SAMPLED = (*ONLINE, "dpo", "ppo_rlhf")
LOGPROBS = ("sft", *SAMPLED)
ALL = (*LOGPROBS, "reward_model")
# [(name, the scripts in which it is identical)]; a name comes twice where two families have each their own.
SHARED = [
    ("by_model", ALL),
    ("is_right", SAMPLED),
    ("reward_fn", SAMPLED),
    ("score_completions", SAMPLED),
    ("init_ranks", ALL),
    ("parse_args", ALL),
    ("read_clock", (*ONLINE, "ppo_rlhf")),
    ("resolve_args", ALL),
    ("resume_args", ALL),
    ("one_line", ALL),
    ("is_embedded", ALL),
    ("check_args", ALL),
    ("saved_steps", ALL),
    ("entry_command", ALL),
    ("fingerprint", ALL),
    ("is_rank_0", ALL),
    ("load_tokenizer", ALL),
    ("load_model", LOGPROBS),
    ("load_pretrained", ALL),
    ("load_reward_model", SCORED),
    ("load_prompts", (*ONLINE, "dpo")),
    ("read_prompt", SAMPLED),
    ("as_messages", ALL),
    ("load_rows", ALL),
    ("load_pairs", PAIRS),
    ("load_splits", ALL),
    ("read_splits", ALL),
    ("split_pair", (*PAIRS, "ppo_rlhf")),
    ("parse_answer", SAMPLED),
    ("extract_answer", SAMPLED),
    ("encode_prompt", ALL),
    ("render_chat", ALL),
    ("find_stop_ids", ALL),
    ("add_adapters", ALL),
    ("LoRALinear", ALL),
    ("find_blocks", ALL),
    ("find_turn_end", ALL),
    ("check_model", LOGPROBS),
    ("token_logprobs", LOGPROBS),
    ("head_logprobs", LOGPROBS),
    ("head_logits", LOGPROBS),
    ("Recomputed", LOGPROBS),
    ("pad_left", ALL),
    ("next_logits", LOGPROBS),
    ("select_rows", LOGPROBS),
    ("make_sampler", SAMPLED),
    ("needs_shards", ALL),
    ("is_trained", ALL),
    ("cast_blocks", ALL),
    ("shard", ALL),
    ("shard_blocks", ALL),
    ("load_initial", (*ONLINE, "ppo_rlhf")),
    ("LogprobModel", LOGPROBS),
    ("ScoreModel", SCORED),
    ("sequence_scores", SCORED),
    ("hidden_states", SCORED),
    ("open_run", ALL),
    ("take_folder", ALL),
    ("load_state", ALL),
    ("drop_later", ALL),
    ("write_whole", ALL),
    ("on_rank_0", ALL),
    ("save_checkpoint", ALL),
    ("catch_signals", ALL),
    ("sync_sampler", SAMPLED),
    ("pick_rows", ALL),
    ("collate_pairs", PAIRS),
    ("encode_row", ("sft", "ppo_rlhf")),
    ("encode_conversation", ("sft", "ppo_rlhf")),
    ("collate", ("sft", "ppo_rlhf")),
    ("rollout", SAMPLED),
    ("sample_completions", SAMPLED),
    ("generate", SAMPLED),
    ("read_prompts", SAMPLED),
    ("sample_tokens", SAMPLED),
    ("lookup_logprobs", ONLINE),
    ("microbatches", ALL),
    ("all_reduce", ALL),
    ("add_metrics", ALL),
    ("step_optimizer", ("sft", *ONLINE, *PAIRS)),
    ("check_finite", ALL),
    ("step_metrics", ONLINE),
    ("step_metrics", ("sft", *PAIRS)),
    ("reduce_metrics", ALL),
    ("rollout_metrics", ONLINE),
    ("first_group", ONLINE),
    ("evaluate", (*ONLINE, "dpo")),
    ("keep_samples", SAMPLED),
    ("count_right", SAMPLED),
    ("log_step", ONLINE),
    ("log_step", ("sft", *PAIRS)),
    ("tell_if_stuck", ONLINE),
    ("append_line", ALL),
    ("print_group", (*ONLINE, "ppo_rlhf")),
    ("show_step", ALL),
    ("save", ALL),
    ("end_run", ALL),
    ("print_work", ALL),
    ("print_ends", ALL),
    ("print_summary", ONLINE),
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
    "load_prompts": {"ppo_rlhf"},
    "check_model": {"reward_model"},
    "step_optimizer": {"ppo_rlhf"},
    "step_metrics": {"ppo_rlhf"},
    "rollout_metrics": {"ppo_rlhf"},
    "evaluate": {"sft", "reward_model", "ppo_rlhf"},
    "log_step": {"ppo_rlhf"},
    "print_summary": {"sft", "reward_model", "dpo", "ppo_rlhf"},
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
    text = text.replace("def add_metrics(totals, metrics):", "def add_metrics(totals, metrics, _=None):")
    text = text.replace("def first_group(", "def second_group():\n    pass\n\n\ndef first_group(")
    path.write_text(text, encoding="utf-8")
    changed = {script: carry("grpo", script, tmp_path) for script in ALL if script != "grpo"}
    block = ["add_metrics", "the block below the line"]
    assert changed == {script: block if script in BLOCK else ["add_metrics"] for script in changed}
    copies = {definitions(script, tmp_path)["add_metrics"] for script in ALL}
    assert len(copies) == 1 and "_=None" in copies.pop()
    assert all(("second_group" in definitions(script, tmp_path)) == (script in BLOCK) for script in ALL)
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
