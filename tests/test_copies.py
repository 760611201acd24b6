"""The scripts share no module: what they share is copied, and the copies must be identical (see sync_copies.py)."""

import ast

import pytest
from sync_copies import ALL, BLOCK, OWN, OWN_OF, ROOT, SHARED, carry, definitions


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
