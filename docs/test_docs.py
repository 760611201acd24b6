"""Tests that the links, commands, flags, functions and metrics on the pages exist, and that pages have one order."""

import csv
import dataclasses
import importlib
import json
import re
from pathlib import Path
from statistics import fmean, stdev

import default_runs
import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("grpo", "reinforce", "dr_grpo", "dapo", "gspo", "ppo_rlhf", "dpo", "reward_model", "sft")
SCRIPTS += ("cispo", "grpo_process", "grpo_tools", "gkd")
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/forks/*.md"), *ROOT.glob("benchmark/*.md")]
PAGES += [*ROOT.glob("models/*/README.md"), *ROOT.glob("examples/*.md")]
PAGES += [*ROOT.glob("studies/*.md"), *ROOT.glob("studies/*/*.md")]
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in sorted(PAGES)}
HEADINGS = ["Quick facts", "The idea", "The objective", "The loop", "The default run", "Details that matter"]
HEADINGS += ["Departures from the paper", "Flags", "References"]
LIMITS = {"README.md": 130, "CONTRIBUTING.md": 100}
# Flags of torchrun, pip, pytest and git on the pages.
FOREIGN = {"nproc-per-node", "nnodes", "rdzv-endpoint", "shutdown-timeout", "standalone", "help", "quiet", "durations"}
FLAGS = {
    name: {field.name.replace("_", "-") for field in dataclasses.fields(importlib.import_module(name).Args)}
    for name in SCRIPTS
}
SOURCES = {name: (ROOT / f"{name}.py").read_text() for name in SCRIPTS}
EVERYTHING = "\n".join(path.read_text() for folder in (".", "*") for path in ROOT.glob(f"{folder}/*.py"))
EVERYTHING += "\n".join(path.name for path in (ROOT / "tests").iterdir()) + "nan_to_num"  # which a page forbids
GROUPS = "(eval|policy|rollout|reward|loss|optim|pair|value|score|perf)/"
METRICS = [found[0] for found in re.findall(rf'"({GROUPS}[^"]+)"', "".join(SOURCES.values()))]
METRICS = "|".join(re.sub(r"\\{.*?\\}", r"[\\w@]+", re.escape(metric)) for metric in {*METRICS})
METRICS += "|reward/(NAME|right|format|clear)"  # parts of the rewards of docs/data.md and docs/fork.md

# Files that the reader or a command creates.
MADE = re.compile(r"^runs/|(^|/)(test_)?my_|[*<]|SCRIPT|NAME|VARIANT|grpo_vs_trl.json$|elsewhere")
GENERATED = ("docs/side_by_side.md",)

each_page = pytest.mark.parametrize("page", PAGES)
STUDIES = {page for page in PAGES if page.startswith("studies/")}  # they have commands and names of older commits
each_current_page = pytest.mark.parametrize("page", sorted({*PAGES} - STUDIES))


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
    name = Path(path).stem
    if name in FLAGS:
        return FLAGS[name]
    source = (ROOT / path).read_text()
    declared = {found.replace("_", "-") for found in re.findall(r"^    (\w+): ", source, re.M)}
    declared |= set(re.findall(r'"--([a-z][\w-]*)"', source))
    declared |= FLAGS["grpo"] if re.search(r"\b(grpo|script)\.parse_args\(\)", source) else set()
    if name in ("memory", "sample"):  # they take some of the scripts' flags
        declared |= {setting.replace("_", "-") for setting in importlib.import_module(f"tools.{name}").SETTINGS}
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
            anchors = [slug(heading) for heading in re.findall(r"^#+ (.*)$", file.read_text(), re.M)]
            assert anchor in anchors, f"[{text}]({target}): has {anchors}"


@each_current_page
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


OF_OTHERS = {"CHANGELOG.md", "docs/details.md"}  # they name removed flags, and options of other code bases


@pytest.mark.parametrize("page", sorted({*PAGES} - OF_OTHERS - STUDIES))
def test_flags_that_are_named_exist(page):
    known = set().union(FOREIGN, *FLAGS.values(), *(flags_of(path) for path in TOOLS))
    for code in inline_code(page):
        if not re.search(r"\.(py|sh)\b", code):
            assert {flag for flag in re.findall(r"(?<!\S)--([a-z][\w-]*)", code)} <= known, code


TOOLS = [path for folder in ("tools", "benchmark", "docs", "examples") for path in ROOT.glob(f"{folder}/*.py")]
TOOLS = [str(path.relative_to(ROOT)) for path in (*TOOLS, ROOT / "tests" / "mutants.py")]


@each_current_page
def test_files_that_are_named_exist(page):
    for code in inline_code(page):
        if re.fullmatch(r"(tests|docs|tools|benchmark|studies|models|data)/[\w./-]+", code) and not MADE.search(code):
            assert (ROOT / code).exists(), code


@pytest.mark.parametrize("page", sorted({*PAGES} - OF_OTHERS - STUDIES - {"docs/models.md"}))
def test_functions_arguments_and_metrics_that_are_named_exist(page):
    """Names between backticks must be in the script of the page, or in any file if the page is not a script's."""
    source = SOURCES.get(Path(page).stem, EVERYTHING)
    for code in inline_code(page):
        if re.fullmatch(r"[a-z]+(_[a-z0-9]+)+(\(\))?", code):
            word = code.removesuffix("()")
            assert re.search(rf"\b{word}\b", source) or word in SCRIPTS, f"{page}: {code}"
        if re.fullmatch(rf"{GROUPS}[\w@]+", code):
            assert re.fullmatch(METRICS, code), f"{page}: {code}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_pages_of_scripts_have_one_order(name):
    text = PAGES[f"docs/{name}.md"]
    assert re.findall(r"^## (.*)$", text, re.M) == HEADINGS
    assert f"(pictures/{name}.png)" in text and f"python {name}.py" in text
    assert re.search(r"\]\((details|grpo)\.md#", text)  # a detail has a link to its effect, or to grpo.md's


@each_page
def test_pages_have_no_marks_left_and_no_line_that_is_too_long(page):
    text = PAGES[page]
    assert not re.search(r"\{\{|TODO|FIXME", text)
    assert len(text.splitlines()) <= LIMITS.get(page, 1000) or page in GENERATED
    lines = [] if page in GENERATED else text.splitlines()
    written = [line for line in lines if not line.startswith(("|", "    ", "**", "+", "-"))]
    assert [line for line in written if len(line) > 130 and "](" not in line] == []


def shown_as(number, text):
    """Return whether a text is this number, rounded to the digits of the text."""
    return abs(number - float(text)) <= 0.5001 * 10.0 ** -len(text.partition(".")[2])


def test_the_table_against_trl_is_that_of_the_measurements():
    """A row with seconds has a results file. The others, of which no file was kept, have only a ratio."""
    names = {"bundled": "bundled model, float32", "large": "58 M parameters, float32"}
    names |= {"learning": names["bundled"]}
    names |= {f"real {precision}": f"SmolLM2-135M, {precision}" for precision in ("float32", "bfloat16")}
    expected = []
    for file in sorted((ROOT / "benchmark" / "results").glob("grpo_vs_trl_*.json")):
        found = json.loads(file.read_text())
        for case, result in found["results"].items():
            sides = [result["summary"][side] for side in ("ours", "trl", "ratio")]
            steps = {side["timed_steps"] for side in sides[:2]}
            numbers = [side[key] for key in ("step_seconds", "peak_gib") for side in sides]
            expected.append((names[case], [found["threads"], *steps, *numbers]))
    section = PAGES["docs/results.md"].partition("## Against TRL\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [line[1:-1].split("|") for line in lines[2:]]
    measured = [(name, numbers) for name, _, *numbers in rows if all(numbers)]
    assert len(expected) == len(measured) == 5 and len(rows) == 8
    for name, numbers in measured:
        assert any(name == other and all(map(shown_as, values, numbers)) for other, values in expected), (name, numbers)
    text = " ".join(section.split())
    bundled = next(values for name, values in expected if name == names["bundled"] and values[0] == 2)
    assert f"0.66 to {bundled[4]:.2f} times" in text and "0.66" in {numbers[4] for _, numbers in measured}


def test_the_reference_run_is_seed_1_of_the_csv():
    steps = [row for row in default_runs.read_rows() if (row["script"], row["seed"]) == ("grpo", 1)]
    evaluated = [row for row in steps if "eval/accuracy" in row]
    text = " ".join(PAGES["docs/results.md"].partition("**The reference run**")[2].split())
    for metric, words in (("eval/accuracy", "accuracy rises"), ("eval/pass@1", "pass@1")):
        first, last = (evaluated[end][metric] for end in (0, -1))
        assert f"{words} from {first:.3f} to {last:.3f}" in text
    for step in (0, 20):  # in the words of log_step; the reward is 1 for a right answer
        [accuracy] = [row["eval/accuracy"] for row in evaluated if row["step"] == step]
        assert f"step {step}: eval/reward {accuracy:.3f}, eval/accuracy {accuracy:.3f}\n" in PAGES["README.md"]


def test_tables_of_the_default_runs_are_those_of_the_csv():
    filled = default_runs.filled_pages(default_runs.read_rows())
    assert len(filled) == len(SCRIPTS) + 1
    assert [path.name for path, text in filled.items() if path.read_text(encoding="utf-8") != text] == []


def test_every_script_improves_its_own_measure_with_every_seed():
    own = dict.fromkeys(SCRIPTS, "eval/accuracy") | dict.fromkeys(("dpo", "reward_model"), "eval/pair_accuracy")
    own |= {"ppo_rlhf": "eval/score", "sft": "eval/loss"}
    rows = default_runs.read_rows()
    for script, metric in own.items():
        sign = -1 if metric == "eval/loss" else 1
        before, after = default_runs.before_and_after(rows, script, metric)
        assert len(after) == len(default_runs.seeds_of(script))
        assert all(sign * new > sign * old for old, new in zip(before, after))


def test_what_is_said_of_the_default_runs_is_what_was_measured():
    rows = default_runs.read_rows()
    accuracy = {
        script: fmean(default_runs.before_and_after(rows, script, "eval/accuracy")[1])
        for script in SCRIPTS
        if default_runs.has(rows, script, "eval/accuracy")
    }
    ppo = accuracy.pop("ppo_rlhf")
    said = f"to {ppo:.2f} with PPO, and to between {min(accuracy.values()):.3f} and {max(accuracy.values()):.3f}"
    assert len(accuracy) == 10 and said in " ".join(PAGES["docs/results.md"].split())


def test_what_is_said_of_learning_is_what_was_measured():
    path = ROOT / "benchmark" / "results" / "grpo_vs_trl_learning.json"
    found = json.loads(path.read_text())["results"]["learning"]
    said = []
    for side in ("ours", "trl"):
        for metric in ("eval/accuracy", "eval/pass@1"):
            values = [run[metric] for run in found["runs"] if run["side"] == side]
            said += [fmean(values), min(values), max(values)]
    pairs = [[run["eval/pass@1"] for run in found["runs"] if run["seed"] == seed] for seed in range(1, 6)]
    differences = [ours - trl for ours, trl in pairs]
    said += [fmean(differences), stdev(differences) / len(differences) ** 0.5]
    section = PAGES["docs/results.md"].partition("## What grpo.py and TRL learn\n")[2]
    numbers = re.findall(r"(?<![\w-])-?\d+\.\d+", section)
    assert len(numbers) == len(said) and all(map(shown_as, said, numbers)), (said, numbers)


def test_the_table_of_normal_runs_is_that_of_the_runs():
    names = ("grpo", "instructions", "grpo", "one_sentence")
    files = ("default_runs", "real_model", "real_model", "real_model")
    cells = re.findall(r"<!-- normal runs -->(.*?)<!-- end -->", PAGES["docs/is_this_normal.md"], re.S)[0]
    lines = [line[1:-1].split("|") for line in cells.strip().splitlines()[2:]]
    assert len(lines) == 8
    for metric, *values in lines:
        for name, file, cell in zip(names, files, values, strict=True):
            with open(ROOT / "benchmark" / "results" / f"{file}.csv", newline="") as rows:
                found = [row for row in csv.DictReader(rows) if name in (row.get("run"), row.get("script"))]
            found = [row for row in found if not row.get("look") and row.get(metric.strip(" `")) and row["step"] != "0"]
            runs = [[float(row[metric.strip(" `")]) for row in found if row["seed"] == seed] for seed in "12345"]
            runs = [run for run in runs if run]
            numbers = re.findall(r"[\d.]+", cell)
            said = [fmean(fmean(run[part]) for run in runs) for part in (slice(5), slice(-5, None)) if runs and numbers]
            assert len(said) == len(numbers) and all(map(shown_as, said, numbers)), (metric, name, said, cell)


@pytest.mark.parametrize("script", SCRIPTS)
def test_threads_sleep_and_memory_grows_unless_the_user_wants_otherwise(script):
    text = (ROOT / f"{script}.py").read_text()
    for setting in ('"OMP_WAIT_POLICY", "PASSIVE"', '"PYTORCH_ALLOC_CONF", "expandable_segments:True"'):
        line = f"\nos.environ.setdefault({setting})"
        assert line in text and text.index(line) < text.index("import torch\n")


def test_the_readme_has_the_lengths_of_the_scripts():
    above = {name: source.partition("# ---- below")[0].count("\n") for name, source in SOURCES.items()}
    least, most = re.search(r"algorithm is ([0-9]+) to ([0-9]+) lines", PAGES["README.md"]).groups()
    assert abs(min(above.values()) - int(least)) < 10 and abs(max(above.values()) - int(most)) < 10
    said = f"`grpo.py` has {SOURCES['grpo'].count(chr(10)):,} lines. {above['grpo']} are GRPO"
    assert said in " ".join(PAGES["README.md"].split())


def test_the_readme_counts_planted_bugs_and_families():
    rows = (ROOT / "tests" / "mutants.txt").read_text()
    assert f"plants {len(re.findall('^# ', rows, re.M))} bugs" in PAGES["README.md"]
    named = re.search(r"^`bloom`.*?\.$", PAGES["docs/models.md"], re.M | re.S)[0]
    families = importlib.import_module("test_policy").FAMILIES
    assert re.findall("`(.*?)`", named) == sorted(families)
    assert f"{len(families)} families" in PAGES["docs/models.md"] and f"{len(families)} families" in PAGES["README.md"]
