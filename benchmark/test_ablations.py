"""Test benchmark/ablations.py: its edits fit the current scripts, and its tables have the numbers of the csv."""

import re
from dataclasses import fields
from importlib import import_module

import ablations
import claims
import pytest
from sync_copies import ROOT

CASES = [(script, detail) for script, found in ablations.DETAILS.items() for detail in found]
LONGER = ("grpo", "reinforce", "dr_grpo", "dapo", "gspo", "cispo")


@pytest.mark.parametrize("script, detail", CASES)
def test_every_edit_applies_once_and_compiles(script, detail):
    flags, edits = ablations.DETAILS[script][detail]
    source = (ROOT / f"{script}.py").read_text(encoding="utf-8")
    edited = ablations.edit(source, edits)
    compile(edited, f"{script}.py", "exec")
    assert (edited != source) == bool(edits)
    names = {setting.name for setting in fields(import_module(script).Args)}
    for flag in (flags + ablations.FLAGS[script]).split():
        assert not flag.startswith("--") or flag[2:].replace("-", "_") in names


@pytest.mark.parametrize("source", ["", "old old"])
def test_an_edit_that_does_not_fit_is_refused(source):
    with pytest.raises(ValueError, match="not once"):
        ablations.edit(source, [("old", "new")])


def test_means_over_seeds_and_numbers_that_are_missing():
    results = {
        ("grpo", ablations.UNCHANGED, seed): {"pass@1": value, "step of 0.9": step}
        for seed, value, step in ((1, 0.5, 8.0), (2, 0.6, None))
    }
    results["grpo", "no KL term", 2] = {"pass@1": 0.5, "step of 0.9": 4.0}
    page = ablations.render(results)
    assert "## grpo.py, seeds 1 2\n\n| | pass@1 | step of 0.9 |\n|---|---|---|\n| unchanged | 0.55 | - |\n" in page
    assert "| no KL term (seeds 2) | 0.5 | 4 |\n" in page and "dapo" not in page


def test_the_page_of_results_is_that_of_the_csv_without_what_only_the_csv_has():
    page = ablations.render(ablations.read_results(ablations.RESULTS / "details.csv"))
    written = (ablations.RESULTS / "details.md").read_text(encoding="utf-8")
    # The first lines name the machine.
    tables, expected = (text.partition("\n## ")[2] for text in (written, page))
    assert tables == expected and len(written.split()) <= 1200
    ppo = page.partition("## ppo_rlhf.py")[2].partition("\n## ")[0]
    assert "| | step of 0.9 | score |\n" in ppo and "## dpo.py" not in page


@pytest.mark.parametrize("script", ablations.DETAILS)
def test_pages_link_to_exact_effects_and_have_numbers_of_the_runs(script):
    """Pages have no tables of details by accuracy, and numbers in "On longer sums" are in the table of claims.py."""
    page = (ROOT / "docs" / f"{script}.md").read_text(encoding="utf-8")
    section = page.partition("## Details that matter\n")[2].partition("\n## ")[0]
    assert "done otherwise" not in page and "results/details.md" not in page
    assert "](details.md#" in section or "](grpo.md#" in section
    mark = "### On longer sums\n"
    assert (mark in section) == (script in LONGER)
    if script in LONGER:
        longer = section.partition(mark)[2]
        table = claims.otherwise(claims.read(claims.RESULTS), script, claims.MEASURED)
        said = re.findall(r"(?<![\w.])\d+\.\d+", re.sub(r"\(\S+\)", "", longer))
        assert said and {number for number in said if number != "0.2"} <= {*re.findall(r"\d+\.\d+", table)}, said
