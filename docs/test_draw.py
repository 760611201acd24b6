"""Tests that the pictures of docs/draw.py show the names, lines and sizes of the scripts, and are not out of date."""

import re

import draw
import pytest
from PIL import Image
from sync_copies import ALL

import grpo


def test_the_anatomy_has_all_functions_in_their_order_and_their_lines():
    rows = draw.anatomy()
    functions = re.findall(r"^(?:def|class) (\w+)", draw.SOURCE, re.M)
    assert [name for _, names, *_ in rows for name in names if name in functions] == functions
    for title, names, _, first, last in rows:
        if names[0] in functions:
            begun = draw.LINES[first] if draw.LINES[first - 1].startswith("@") else draw.LINES[first - 1]
            assert re.match(rf"(def|class) {names[0]}\b", begun), title
            assert draw.LINES[last] == "" != draw.LINES[last - 1], title


def test_the_flow_has_names_and_sizes_of_grpo():
    rows = draw.flow()
    for variables, _, *step in rows:
        for name in re.findall(r"\w+", variables):
            assert re.search(rf'\b{name}\b(, \w+)* = |"{name}": |\["{name}"\] = |for {name} in', draw.SOURCE), name
        assert not step or f"{step[0]}(" in draw.SOURCE, step
    tiny = grpo.TINY
    assert f"B = {tiny.prompts_per_step * tiny.group_size} rows" in rows[0][1]


def test_the_family_has_all_scripts_and_numbers_of_their_defaults():
    assert {row[0] for row in draw.FAMILY} == {*ALL}
    for script, _, _, *step in draw.FAMILY:
        source = (draw.ROOT / f"{script}.py").read_text(encoding="utf-8")
        for number in re.findall(r"\d+\.\d+|\de-\d", " ".join(step)):
            assert re.search(rf"^    \w+: float = {number}\b", source, re.M), (script, number)


@pytest.mark.parametrize(
    "name, shown", [("anatomy", draw.anatomy), ("data_flow", draw.flow), ("family_map", lambda: draw.FAMILY)]
)
def test_pictures_are_up_to_date(name, shown):
    with Image.open(draw.PICTURES / f"{name}.png") as image:
        image.load()
        assert image.text["drawn"] == repr(shown()), "python docs/draw.py"
