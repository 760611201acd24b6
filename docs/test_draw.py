"""Tests that the pictures of docs/draw.py show the names, lines and sizes of the scripts, and are not out of date."""

import re

import draw
import pytest
from PIL import Image
from sync_copies import ALL

import grpo


def test_the_flow_has_names_and_sizes_of_grpo():
    rows, source = draw.flow(), (draw.ROOT / "grpo.py").read_text(encoding="utf-8")
    for variables, _, *step in rows:
        for name in re.findall(r"\w+", variables):
            assert re.search(rf'\b{name}\b(, \w+)* = |"{name}": |\["{name}"\] = |for {name} in', source), name
        assert not step or f"{step[0]}(" in source, step
    tiny = grpo.TINY
    assert f"B = {tiny.prompts_per_step * tiny.group_size} rows" in rows[0][1]


def test_the_family_has_all_scripts_and_numbers_of_their_defaults():
    assert {row[0] for row in draw.FAMILY} == {*ALL}
    for script, _, _, *step in draw.FAMILY:
        source = (draw.ROOT / f"{script}.py").read_text(encoding="utf-8")
        for number in re.findall(r"\d+\.\d+|\de-\d", " ".join(step)):
            assert re.search(rf"^    \w+: float = {number}\b", source, re.M), (script, number)


@pytest.mark.parametrize("name, shown", [("data_flow", draw.flow), ("family_map", lambda: draw.FAMILY)])
def test_pictures_are_up_to_date(name, shown):
    with Image.open(draw.PICTURES / f"{name}.png") as image:
        image.load()
        assert image.text["drawn"] == repr(shown()), "python docs/draw.py"
