"""Test benchmark/details.py: its edits fit the current scripts, and its tables have the numbers of the csv."""

import re
from dataclasses import fields
from importlib import import_module

import claims
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
    results["grpo", "no KL term", 2] = {"pass@1": 0.5, "step of 0.9": 4.0}
    page = details.render(results)
    assert "## grpo.py, seeds 1 2\n\n| | pass@1 | step of 0.9 |\n|---|---|---|\n| unchanged | 0.55 | - |\n" in page
    assert "| no KL term (seeds 2) | 0.5 | 4 |\n" in page and "dapo" not in page


def test_the_page_of_results_is_that_of_the_csv_without_what_the_scripts_pages_have():
    page = details.render(details.read_results(details.RESULTS / "details.csv"))
    written = (details.RESULTS / "details.md").read_text(encoding="utf-8")
    # The first lines name the machine.
    tables, expected = (text.partition("\n## ")[2] for text in (written, page))
    assert tables == expected and len(written.split()) <= 1200
    ppo = page.partition("## ppo_rlhf.py")[2].partition("\n## ")[0]
    assert "| | step of 0.9 | score |\n" in ppo and "## dpo.py" not in page


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


@pytest.mark.parametrize("script", details.WITH_TABLE)
def test_pages_have_the_numbers_of_the_csv(script):
    page = (ROOT / "docs" / f"{script}.md").read_text(encoding="utf-8")
    assert f"<!-- {script} done otherwise -->" in page
    assert details.fill(page, details.read_results(details.RESULTS / "details.csv")) == page


@pytest.mark.parametrize("script", sorted({*details.DETAILS} - {*details.WITH_TABLE}))
def test_pages_without_the_table_have_numbers_of_the_runs(script):
    """Numbers in "On longer sums" are in the table of claims.py, and those above the list of details in details.csv."""
    page = (ROOT / "docs" / f"{script}.md").read_text(encoding="utf-8")
    assert f"{script} done otherwise" not in page
    longer = page.partition("### On longer sums\n")[2].partition("\n## ")[0]
    before = page.partition("## Details that matter\n")[2].partition("\n1. ")[0]
    results = details.read_results(details.RESULTS / "details.csv")
    known = claims.otherwise(claims.read(claims.RESULTS), script, claims.MEASURED), details.render(results)
    for text, table in zip((longer, before), known):
        numbers = re.findall(r"\d+\.\d+", table)
        said = re.findall(r"(?<![\w.])\d+\.\d+", re.sub(r"\(\S+\)", "", text))
        assert {number for number in said if number not in ("0.2", "0.8", "0.9")} <= {*numbers}, said
    assert re.search(r"\d+\.\d", longer)
