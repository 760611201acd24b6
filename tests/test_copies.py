"""The scripts share no module: what they share is copied. This table says what, and the copies must be identical."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALL = ("grpo", "sft")
ONLINE = ("grpo",)
SHARED = {
    "load_splits": ALL,
    "load_model": ALL,
    "find_stop_ids": ALL,
    "pad_left": ALL,
    "head_logprobs": ALL,
    "token_logprobs": ALL,
    "LogprobModel": ALL,
    "check_model": ALL,
    "microbatches": ALL,
    "add_metrics": ALL,
    "init_ranks": ALL,
    "all_reduce": ALL,
    "shard": ALL,
    "on_rank_0": ALL,
    "save": ALL,
    "save_checkpoint": ALL,
    "load_state": ALL,
    "open_run": ALL,
    "write_whole": ALL,
    "append_line": ALL,
    "catch_signals": ALL,
    "is_embedded": ALL,
    "pick_rows": ALL,
    "reduce_metrics": ALL,
}
# Functions of the same name that differ by design.
OWN = {"main", "resolve_args", "check_args", "accumulate_gradients", "evaluate", "print_summary", "Args"}


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
            owners.setdefault(name, []).append(script)
    assert {name for name, scripts in owners.items() if len(scripts) > 1} - OWN == set(SHARED)
