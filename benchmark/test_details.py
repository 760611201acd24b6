"""Test benchmark/details.py: its edits fit the current scripts, and its tables have the numbers of the csv."""

from dataclasses import fields
from importlib import import_module

import details
import pytest
from sync_copies import ROOT

CASES = [(script, detail) for script, found in details.DETAILS.items() for detail in found]


@pytest.mark.parametrize("script, detail", CASES)
def test_every_edit_applies_once_and_compiles(script, detail):
    flags, edits = details.DETAILS[script][detail]
    source = (ROOT / f"{script}.py").read_text(encoding="utf-8")
    edited = details.edit(source, edits)
    compile(edited, f"{script}.py", "exec")
    assert (edited != source) == bool(edits)
    names = {setting.name for setting in fields(import_module(script).Args)}
    for flag in (flags + details.FLAGS[script]).split():
        assert not flag.startswith("--") or flag[2:].replace("-", "_") in names


@pytest.mark.parametrize("source", ["", "old old"])
def test_an_edit_that_does_not_fit_is_refused(source):
    with pytest.raises(ValueError, match="not once"):
        details.edit(source, [("old", "new")])


def test_means_over_seeds_and_numbers_that_are_missing():
    results = {
        ("grpo", details.UNCHANGED, seed): {"pass@1": value, "step of 0.9": step}
        for seed, value, step in ((1, 0.5, 8.0), (2, 0.6, None))
    }
    page = details.render(results)
    assert "| unchanged | 1 2 | 0.55 | - |" in page and "dapo" not in page


def test_tables_of_the_pages_are_means_over_seeds_and_say_never():
    names = dict.fromkeys(details.ON_PAGES, 0.25)
    results = {("cispo", detail, seed): names for detail in details.DETAILS["cispo"] for seed in (1, 2)}
    results["cispo", "mean per completion", 2] = {
        "greedy accuracy": 0.5,
        "pass@1": 0.25,
        "length": 9.0,
        "step of 0.9": None,
    }
    table = details.table(results, "cispo")
    assert "| mean per completion | 0.375 | 0.250 | 4.6 | never |\n" in table
    assert table.count("\n") == 2 + len(details.DETAILS["cispo"])
    page = "before\n<!-- cispo done otherwise -->\nold\n<!-- end -->\nafter <!-- end -->"
    filled = details.fill(page, results)
    assert filled == f"before\n<!-- cispo done otherwise -->\n\n{table}\n<!-- end -->\nafter <!-- end -->"
    assert details.fill(filled, results) == filled and details.fill("no mark", results) == "no mark"


@pytest.mark.parametrize("script", details.DETAILS)
def test_pages_have_the_numbers_of_the_csv(script):
    page = (ROOT / "docs" / f"{script}.md").read_text(encoding="utf-8")
    assert f"<!-- {script} done otherwise -->" in page
    assert details.fill(page, details.read_results(details.RESULTS / "details.csv")) == page
