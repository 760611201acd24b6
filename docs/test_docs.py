"""Tests that what the pages name exists, from links to metrics, and that tables are what was measured."""

import dataclasses
import importlib
import re
from pathlib import Path
from statistics import fmean

import pytest
from records import read_records, spread
from test_policy import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("grpo", "reinforce", "dr_grpo", "dapo", "gspo", "ppo_rlhf", "dpo", "reward_model", "sft")
SCRIPTS += ("cispo", "grpo_process", "grpo_tools", "gkd")
FOLDERS = (".", "docs", "docs/forks", "benchmark", "models/*", "examples", "tests/*")
PAGES = [page for folder in FOLDERS for page in ROOT.glob(f"{folder}/*.md")]
PAGES = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in sorted(PAGES)}
# Flags of torchrun, pip, pytest and git on the pages.
FOREIGN = {
    "nproc-per-node",
    "nnodes",
    "rdzv-endpoint",
    "shutdown-timeout",
    "standalone",
    "help",
    "quiet",
    "durations",
    "dist",
}
FLAGS = {
    name: {field.name.replace("_", "-") for field in dataclasses.fields(importlib.import_module(name).Args)}
    for name in SCRIPTS
}
SOURCES = {name: (ROOT / f"{name}.py").read_text(encoding="utf-8") for name in SCRIPTS}
PROGRAMS = [*ROOT.glob("*/*.py")]
EVERYTHING = "\n".join([*SOURCES.values(), *(path.read_text(encoding="utf-8") for path in PROGRAMS)])
EVERYTHING += " ".join(path.name for path in (ROOT / "tests").iterdir()) + " nan_to_num model_type deepseek_v4"
GROUPS = "(eval|policy|rollout|reward|loss|optim|pair|value|score|perf)/"
METRICS = [found[0] for found in re.findall(rf'"({GROUPS}[^"]+)"', "".join(SOURCES.values()))]
METRICS = "|".join(re.sub(r"\\{.*?\\}", r"[\\w@]+", re.escape(metric)) for metric in {*METRICS})
METRICS += "|reward/(NAME|right|format|clear)"  # parts of the rewards of docs/data.md and docs/fork.md
# Files that the reader or a command creates.
MADE = re.compile(r"^runs/|(^|/)(test_)?my_|[*<]|SCRIPT|NAME|VARIANT|elsewhere")
OF_OTHERS = {"CHANGELOG.md", "docs/details.md"}  # they name removed flags, and options of other code bases

each_page = pytest.mark.parametrize("page", PAGES)


def prose(text):
    """Return the text without blocks of code, which are fenced or indented after an empty line."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    return re.sub(r"(?<=\n\n)(?:    .*\n|\n(?=    ))+", "", text)


def inline_code(page):
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(PAGES[page]))


def commands(page):
    """Return all commands on a page that call a script, in blocks of code or between backticks."""
    text = re.sub(r"\\\n\s*", " ", PAGES[page])
    lines = [line for line in text.splitlines() if line.startswith("    ")] + inline_code(page)
    lines += [line for block in re.findall(r"^```.*?\n(.*?)^```", text, re.S | re.M) for line in block.splitlines()]
    parts = [part for line in lines for part in re.split(r"&&|;|\|", line)]
    return [part.strip() for part in parts if re.search(r"(^|\s)(python|sh|torchrun)\s", part)]


def slug(heading):
    """Return GitHub's anchor for a heading."""
    plain = re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def flags_of(path):
    """Return the long flags of a Python file of the repository, without their leading dashes."""
    if Path(path).stem in FLAGS:
        return FLAGS[Path(path).stem]
    path = str((ROOT / path).relative_to(ROOT))
    source = (ROOT / path).read_text(encoding="utf-8")
    declared = {found.replace("_", "-") for found in re.findall(r"^    (\w+): ", source, re.M)}
    declared |= set(re.findall(r'"--([a-z][\w-]*)"', source))
    if path.startswith("examples/") or path in ("tools/memory.py", "tools/evaluate.py", "tools/sample.py"):
        declared = declared.union(*FLAGS.values())  # they take the flags of scripts
    if path == "tools/sample.py":
        declared |= flags_of("tools/evaluate.py")
    return declared


@each_page
def test_links_lead_somewhere(page):
    for text, target in re.findall(r"\[([^]]*)\]\(([^)\s]+)\)", prose(PAGES[page])):
        if re.match(r"https?:", target):
            assert "arxiv.org" not in target or re.search(r"abs/\d{4}\.\d{5}v\d+$", target), f"{target}: no version"
            continue
        path, _, anchor = target.partition("#")
        file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert file.exists(), f"[{text}]({target})"
        if anchor:
            anchors = [slug(heading) for heading in re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)]
            assert anchor in anchors, f"[{text}]({target}): has {anchors}"


@each_page
def test_commands_are_of_files_that_exist_with_flags_that_they_have(page):
    for command in commands(page):
        words = command.split()
        files = [word for word in words if re.fullmatch(r"[\w/.]+\.(py|sh)", word) and not MADE.search(word)]
        for file in files:
            assert (ROOT / file).is_file(), command
        given = {re.match(r"--([\w-]+)", word)[1] for word in words if re.match(r"--[a-z]", word)}
        if files and files[0].endswith(".py"):
            asked = files[0]
            following = words[words.index(asked) + 1 :]
            if asked == "examples/instructions.py" and not following[0].startswith("-"):  # it runs another script
                asked = "tools/sample.py" if following[0] == "sample" else f"{following[0]}.py"
            assert given - FOREIGN <= flags_of(asked), command


@pytest.mark.parametrize("page", sorted({*PAGES} - OF_OTHERS))
def test_names_between_backticks_exist(page):
    """Functions and arguments must be in the script of the page, or in any file if the page is not a script's."""
    flags = set().union(FOREIGN, *FLAGS.values(), *(flags_of(path) for path in PROGRAMS))
    source = SOURCES.get(Path(page).stem, EVERYTHING)
    for code in inline_code(page):
        if not re.search(r"\.(py|sh)\b", code):
            assert set(re.findall(r"(?<!\S)--([a-z][\w-]*)", code)) <= flags, code
        if re.fullmatch(r"(tests|docs|tools|benchmark|models|data)/[\w./-]+", code) and not MADE.search(code):
            assert (ROOT / code).exists(), code
        if re.fullmatch(r"[a-z]+(_[a-z0-9]+)+(\(\))?", code):
            assert re.search(rf"\b{code.removesuffix('()')}\b", source) or code in SCRIPTS, code
        if re.fullmatch(rf"{GROUPS}[\w@]+", code):
            assert re.fullmatch(METRICS, code), code


@pytest.mark.parametrize("name", SCRIPTS)
def test_pages_of_scripts_have_one_order(name):
    headings, text = (re.findall(r"^## (.*)$", PAGES[f"docs/{page}.md"], re.M) for page in ("grpo", name))
    assert headings == text and len(headings) > 3
    assert f"(pictures/{name}.png)" in PAGES[f"docs/{name}.md"] and f"python {name}.py" in PAGES[f"docs/{name}.md"]


def test_pages_count_lines_bugs_and_model_families_as_they_are():
    counts = {r"plants (\d+) bugs": len(re.findall("^# ", (ROOT / "tests/mutants.txt").read_text(), re.M))}
    counts |= {r"(\d+) families": len(FAMILIES), r"`grpo.py` has ([\d,]+) lines": SOURCES["grpo"].count("\n")}
    for page, text in PAGES.items():
        for pattern, count in counts.items():
            assert {int(found.replace(",", "")) for found in re.findall(pattern, text)} <= {count}, (page, pattern)
    assert {*FAMILIES} <= {*inline_code("docs/models.md")}


# ---- tables of measurements


def is_shown_as(number, text):
    """Return whether a text is this number, rounded to the digits of the text."""
    return abs(number - float(text)) <= 0.5001 * 10.0 ** -len(text.partition(".")[2])


def test_the_table_of_normal_runs_is_that_of_the_runs():
    """Means over the first and the last five steps of three seeds."""
    runs = {}
    for file, name in (("default_runs", "grpo"), ("real_model", "instructions")):
        records = read_records(ROOT / "benchmark" / "results" / f"{file}.jsonl")
        runs[name] = [record["metrics"] for (other, _), record in records.items() if other == name]
    table = re.search(r"<!-- normal runs -->(.*?)<!-- end -->", PAGES["docs/is_this_normal.md"], re.S)[1]
    rows = [[cell.strip("` ") for cell in line[1:-1].split("|")] for line in table.splitlines() if "→" in line]
    assert len(rows) > 5
    for metric, *cells in rows:
        for own, cell in zip(runs.values(), cells, strict=True):
            said = re.findall(r"[\d.]+", cell)
            values = [list(metrics[metric].values()) for metrics in own if said]
            means = [fmean(fmean(one[part]) for one in values) for part in (slice(5), slice(-5, None)) if said]
            assert all(map(is_shown_as, means, said)), (metric, said, means)


@pytest.mark.parametrize("name", ["lora", "async"])
def test_results_of_forks_are_those_of_their_runs(name):
    """The table has the rewards of the last five steps, and the last accuracies, of the fork and of grpo.py."""
    for script, file in ((f"my_{name}", "forks"), ("grpo", "default_runs")):
        records = read_records(ROOT / f"benchmark/results/{file}.jsonl")
        own = [records[script, seed]["metrics"] for seed in (1, 2, 3)]
        rewards = spread([fmean(list(metrics["reward/mean"].values())[-5:]) for metrics in own])
        accuracies = spread([metrics["eval/accuracy"]["20"] for metrics in own])
        assert f"| {rewards} | {accuracies} |" in PAGES[f"docs/forks/{name}.md"], script


def test_results_of_ptx_are_those_of_its_runs():
    """The page has means over seeds: the loss of the texts in step 1, and it and the scores in the last five steps."""
    records = read_records(ROOT / "benchmark" / "results" / "forks.jsonl")

    def average(coef, metric, steps=slice(-5, None)):
        runs = [records[f"my_ptx_{coef}", seed]["metrics"][metric] for seed in (1, 2, 3)]
        return fmean(fmean([*run.values()][steps]) for run in runs)

    page = " ".join(PAGES["docs/forks/ptx.md"].split())
    first, last = average(0.1, "loss/ptx", slice(1)), average(0.1, "loss/ptx")
    assert f"falls from {first:.2f} nats per token in step 1 to {last:.2f} in steps 26 to 30" in page
    assert f"it ends at {average(0, 'loss/ptx'):.2f}" in page
    assert f"{average(0.1, 'score/mean'):.3f} against {average(0, 'score/mean'):.3f}" in page
