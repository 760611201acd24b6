"""Tests that the picture of docs/draw.py shows the names and sizes of grpo.py, and is not out of date."""

import re

import draw
from PIL import Image

import grpo


def test_the_flow_has_names_and_sizes_of_grpo():
    rows, source = draw.flow(), (draw.ROOT / "grpo.py").read_text(encoding="utf-8")
    for variables, _, *step in rows:
        for name in re.findall(r"\w+", variables):
            assert re.search(rf'\b{name}\b(, \w+)* = |"{name}": |\["{name}"\] = |for {name} in', source), name
        assert not step or f"{step[0]}(" in source, step
    tiny = grpo.TINY
    assert f"B = {tiny.prompts_per_step * tiny.group_size} rows" in rows[0][1]


def test_the_picture_is_up_to_date():
    with Image.open(draw.PICTURES / "data_flow.png") as image:
        image.load()
        assert image.text["drawn"] == repr(draw.flow()), "python docs/draw.py"
