"""The scripts share no module: what they share is copied, and the copies must be identical (see sync_copies.py).
Run with: python -m pytest tests/test_copies.py
"""

import ast
import io
import itertools
import re
import subprocess
import tokenize

import pytest
from sync_copies import ALL, MARKER, OWN, ROOT, SHARED, definitions

each_script = pytest.mark.parametrize("script", ALL)


def read(script):
    return (ROOT / f"{script}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("name, scripts", SHARED)
def test_copies_are_identical(name, scripts):
    assert len({definitions(script)[name] for script in scripts}) == 1


def test_table_lists_every_shared_function():
    """What stands in several scripts is listed, or differs by design."""
    copies = {}  # {(name, source): scripts}
    for script in ALL:
        for name, source in definitions(script).items():
            if name not in OWN:
                copies.setdefault((name, source), set()).add(script)
    shared = {(name, frozenset(scripts)) for (name, _), scripts in copies.items() if len(scripts) > 1}
    assert shared == {(name, frozenset(scripts)) for name, scripts in SHARED}


@each_script
def test_what_torch_reads_from_the_environment_is_the_same_in_all_scripts_and_stands_before_torch(script):
    def lines_of(name):
        return read(name).partition("from typing import Literal\n")[2].partition("\nimport torch\n")[0]

    assert lines_of(script) == lines_of("grpo")
    for name in ("TQDM_DISABLE", "OMP_WAIT_POLICY", "PYTORCH_ALLOC_CONF", "TORCH_CUDNN_SDPA_DEPRIORITIZED"):
        assert lines_of(script).count(f'"{name}"') == 1


# ---- the story first

# At most: lines and Python tokens of a script (without comments, newlines and indentation, docstrings counting as one).
# Joining lines does not help against tokens. These are caps for good: what is added to a script takes something out.
CAPS = {
    "grpo": (880, 6400),
    "reinforce": (830, 6000),
    "dr_grpo": (870, 6300),
    "gspo": (870, 6300),
    "cispo": (870, 6300),
    "dapo": (920, 6700),
    "grpo_process": (940, 6900),
    "gkd": (890, 6500),
    "grpo_tools": (940, 6900),
    "ppo_rlhf": (1050, 7700),
    "dpo": (640, 4800),
    "reward_model": (640, 4700),
    "sft": (640, 4800),
}
FUNCTION, MAIN = 50, 100  # lines at most


def count(source):
    """The lines and tokens of a text."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in skipped]
    return len(source.splitlines()), len(tokens)


def halves(script):
    """The text above the line and the text below it."""
    above, marker, below = read(script).partition(MARKER)
    assert marker and MARKER not in below
    return above, below


def top_level_names(text):
    return [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def names_used(source, known):
    """Those of the known names that a definition uses, in the order of its text."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name) and node.id in known]
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    return [node.id for node in found]


def order_of_use(script):
    """Every function in the order in which main comes to it, callees under their first caller."""
    sources, order = definitions(script), []

    def visit(name):
        if name not in order:
            order.append(name)
            for callee in names_used(sources[name], sources):
                visit(callee)

    for name in ("score_completions", "Environment", "parse_args", "main"):
        if name in sources:
            visit(name)
    return order


@each_script
def test_each_script_keeps_to_its_caps(script):
    text = read(script)
    found = count(text)
    assert all(number <= most for number, most in zip(found, CAPS[script], strict=True)), (found, CAPS[script])
    assert ":=" not in text


@each_script
def test_functions_are_short_and_main_fits_on_a_page(script):
    lengths = {name: len(source.splitlines()) for name, source in definitions(script).items()}
    assert lengths.pop("main") <= MAIN and lengths.pop("Args")
    assert {name: length for name, length in lengths.items() if length > FUNCTION} == {}


@each_script
def test_above_the_line_stands_the_algorithm_in_reading_order(script):
    above, below = halves(script)
    names = top_level_names(above)
    assert names[0] == "Args" and names[-1] == "main"
    assert "reward_fn" not in names or names[1:4] == ["is_correct", "reward_fn", "score_completions"]
    assert above.startswith('"""') and below.endswith("\n    main(parse_args())\n")


@each_script
def test_below_the_line_functions_stand_in_the_order_in_which_main_calls_them(script):
    names = top_level_names(halves(script)[1])
    assert names == [name for name in order_of_use(script) if name in names]


@each_script
def test_the_line_names_what_only_this_script_has(script):
    below = halves(script)[1]
    shared = {name for name, scripts in SHARED if script in scripts and len(scripts) > 1}
    own = [name for name in top_level_names(below) if name not in shared]
    comment = " ".join(line.removeprefix("# ") for line in itertools.takewhile(str.strip, below.splitlines()))
    assert comment == (f"This script's own are only {', '.join(own)}." if own else "")


@each_script
def test_nothing_in_a_script_is_left_over(script):
    """Each function is reached from main, and what is imported is used."""
    text = read(script)
    functions = {*top_level_names(text)} - {"Args"}
    assert functions <= set(order_of_use(script))
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = (alias.asname or alias.name).partition(".")[0]
                assert len(re.findall(rf"\b{name}\b", text)) > 1, name


# What only reads would otherwise keep every activation.
WITHOUT_GRADIENT = {"generate", "add_logprobs", "compute_logprobs", "compute_scores"}


@each_script
def test_what_only_reads_builds_no_graph(script):
    names = WITHOUT_GRADIENT | ({"evaluate"} if script in ("sft", "reward_model", "dpo") else set())
    found = {name: source for name, source in definitions(script).items() if name in names}
    assert all(source.startswith("@torch.no_grad()\n") for source in found.values())


def test_the_caps_of_the_whole_hold():
    """The table of CONTRIBUTING.md is of files that git knows."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in listed if name.endswith((".py", ".md"))}
    page = texts["CONTRIBUTING.md"]
    caps = re.findall(r"^\|`(\w+/)`.*?\|([\d,]+)", page, re.M)
    caps += [("", number) for number in re.findall(r"^\|all Python files\|([\d,]+)", page, re.M)]
    assert len(caps) == 6
    for folder, most in caps:
        lines = sum(
            text.count("\n") for name, text in texts.items() if name.startswith(folder) and name.endswith(".py")
        )
        assert lines <= int(most.replace(",", "")), folder or "all"
    words, pictures = re.search(r"^\|all pages\|([\d,]+) words, (\d+) pictures", page, re.M).groups()
    assert sum(len(texts[name].split()) for name in texts if name.endswith(".md")) <= int(words.replace(",", ""))
    assert sum(name.endswith((".png", ".svg")) for name in listed) <= int(pictures)
