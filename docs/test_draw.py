"""Tests that the pictures of docs/draw.py show the names, lines and sizes of the scripts, and are not out of date."""

import re

import draw
import pytest
import side_by_side
from PIL import Image
from sync_copies import ALL, MARKER, SHARED

SOURCE = (draw.ROOT / "grpo.py").read_text(encoding="utf-8")
LINES = SOURCE.splitlines()


def test_parts_are_all_functions_in_their_order():
    names = [name for row in draw.parts() for name in row[1]]
    functions = re.findall(r"^(?:def|class) (\w+)", SOURCE, re.MULTILINE)
    assert [name for name in names if name in functions] == functions
    assert set(names) - {*functions} == {"docstring", "imports", "HERE", "RANK", "WORLD_SIZE", "TINY", "below"}


def test_lines_are_those_of_the_parts():
    for title, names, _, first, last, *_ in draw.parts():
        begun = LINES[first - 1]
        if begun.startswith("@"):
            begun = LINES[first]
        starts = {"docstring": '"""GRPO', "imports": "import json", "below": MARKER[:-1]}
        assert begun.startswith(starts.get(names[0], (f"def {names[0]}(", f"class {names[0]}"))), title
        assert LINES[first - 2] == "" or first == 1 or LINES[first - 2].startswith("#"), title
        assert LINES[last] == "" and LINES[last - 1] != "", title


def test_parts_below_the_line_are_shared_names_and_the_bar_counts_their_lines():
    rows, above, below = draw.anatomy()
    shared = {name: scripts for name, scripts in SHARED if "grpo" in scripts}
    line = [row[0] for row in rows].index("the line")
    for title, names, *_ in rows[line + 1 :]:
        assert all(len(shared[name]) > 1 for name in names), title
    assert LINES[above].startswith(MARKER.strip()[:12]) and above + below == len(LINES)
    assert all(row[4] <= above for row in rows[:line]) and all(row[3] > above for row in rows[line:])


def test_the_two_losses_are_those_of_the_scripts_and_what_differs_is_marked():
    sources = [(draw.ROOT / f"{script}.py").read_text(encoding="utf-8") for script in ("grpo", "gspo")]
    losses = [source.partition("\ndef policy_loss(")[2].partition("\ndef ")[0] for source in sources]
    rows = draw.loss_rows()
    for side, loss in enumerate(losses):
        found = ["".join(text for text, _ in row[side]) for row in rows if row[side] is not None]
        signature, _, body = loss.split('"""')[:3]
        wanted, end, _ = f"def policy_loss({signature}{body}".partition(".sum()\n\n")
        wanted = [line for line in f"{wanted}{end}".splitlines() if "metrics" not in line and "num_tokens" not in line]
        assert [line for line in found if line.strip()] == [line for line in wanted if line.strip()]
    for pair in rows:
        if None not in pair:
            same = ["".join(text for text, differs in line if not differs) for line in pair]
            assert same[0] == same[1]


def test_a_name_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(draw, "PARTS", [["sampling", "generate no_such_function", ""]])
    with pytest.raises(KeyError, match="no_such_function"):
        draw.parts()


def test_flow_has_names_and_sizes_of_grpo():
    rows = draw.flow()
    defined = draw.definitions("grpo")
    for variables, _, *step in rows:
        for name in re.findall(r"\w+", variables):
            assert re.search(rf'\b{name}\b(, \w+)* = |"{name}": |\["{name}"\] = |for {name} in', SOURCE), name
        assert not step or step[0] in defined or f"{step[0]}(" in SOURCE, step
    assert "16 prompts, group_size 8 of each: B = 128 rows" in rows[0][1]
    assert rows[2][1] == "(B, L) = (128, 80)" and rows[6][1].startswith("2 × 64 ")


def test_family_has_all_scripts_and_the_numbers_of_the_tables():
    assert {row[0] for row in draw.FAMILY} == {*ALL}
    tables = [re.split(r"(?<!\\)\|", line.strip("|")) for line in side_by_side.render().splitlines()]
    for script, _, _, *step in draw.FAMILY:
        heads = [row for row in tables if any(f"`{script}.py`" in cell for cell in row) and row[0] == "script"]
        column = next(i for i, cell in enumerate(heads[0]) if f"`{script}.py`" in cell)
        table = tables[tables.index(heads[0]) :]
        text = " ".join(row[column] for row in table[: table.index([""])])
        for number in re.findall(r"\d+\.\d+|\de-\d", " ".join(step)):
            assert number in text, (script, number)


@pytest.mark.parametrize(
    "name, shown",
    [
        ("anatomy", draw.anatomy),
        ("data_flow", draw.flow),
        ("family_map", lambda: draw.FAMILY),
        ("compare", draw.loss_rows),
    ],
)
def test_pictures_are_small_and_up_to_date(name, shown):
    path = draw.PICTURES / f"{name}.png"
    with Image.open(path) as image:
        image.load()
        assert image.mode == "P" and image.text["drawn"] == repr(shown()), "python docs/draw.py"
    assert path.stat().st_size < 120_000
