"""The scripts share no module: what they share is copied, and the copies must be identical (see sync_copies.py)."""

import ast
import io
import re
import tokenize

import pytest
from sync_copies import ALL, BLOCK, MARKER, OWN, OWN_OF, ROOT, SHARED, carry, definitions


@pytest.mark.parametrize("name, scripts", SHARED)
def test_copies_are_identical(name, scripts):
    assert len({definitions(script)[name] for script in scripts}) == 1


def test_table_lists_every_shared_function():
    owners = {}
    for script in ALL:
        for name in definitions(script):
            owners.setdefault(name, set()).add(script)
    shared = {name: scripts for name, scripts in owners.items() if len(scripts) > 1 and name not in OWN}
    table = {name: set(OWN_OF.get(name, ())) for name, _ in SHARED}
    for name, scripts in SHARED:
        table[name] |= {*scripts}
    assert shared == table


def test_the_tool_carries_a_change_into_all_copies(tmp_path):
    for script in ALL:
        (tmp_path / f"{script}.py").write_text((ROOT / f"{script}.py").read_text(encoding="utf-8"), encoding="utf-8")
    path = tmp_path / "grpo.py"
    text = path.read_text(encoding="utf-8")
    text = text.replace("def append_line(args, name, row):", "def append_line(args, name, row, _=None):")
    text = text.replace("def step_metrics(", "def second_metrics():\n    pass\n\n\ndef step_metrics(")
    path.write_text(text, encoding="utf-8")
    changed = {script: carry("grpo", script, tmp_path) for script in ALL if script != "grpo"}
    block = ["append_line", "the block below the line"]
    assert changed == {script: block if script in BLOCK else ["append_line"] for script in changed}
    copies = {definitions(script, tmp_path)["append_line"] for script in ALL}
    assert len(copies) == 1 and "_=None" in copies.pop()
    assert all(("second_metrics" in definitions(script, tmp_path)) == (script in BLOCK) for script in ALL)
    assert not any(carry("grpo", script, tmp_path) for script in changed)  # nothing is left to change


def test_scripts_import_nothing_of_each_other():
    for script in ALL:
        imported = set()
        for node in ast.walk(ast.parse((ROOT / f"{script}.py").read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                imported.add(node.module.split(".")[0])
        assert not [name for name in imported if (ROOT / f"{name}.py").exists()]


# ==== the story first


# At most: Python tokens of a script (without comments, newlines and indentation, docstrings counting as one), tokens
# per line of code, ternaries, and lines. Joining lines does not help against tokens.
BUDGETS = {
    "grpo": (9470, 11.1, 4, 1200),
    "dr_grpo": (9330, 11.1, 4, 1190),
    "gspo": (9310, 11.1, 4, 1185),
    "cispo": (9240, 11.1, 4, 1185),
    "reinforce": (8970, 11.1, 4, 1150),
    "dapo": (9820, 11.1, 4, 1245),
    "grpo_process": (10130, 11.1, 4, 1285),
    "grpo_tools": (9940, 11.1, 4, 1265),
    "ppo_rlhf": (12630, 11.1, 4, 1585),
    "dpo": (7440, 11.1, 2, 965),
    "reward_model": (6890, 11.1, 2, 900),
    "sft": (6720, 11.1, 2, 855),
}
FUNCTION, MAIN = 48, {"ppo_rlhf": 122}  # lines at most


def count(source):
    """The tokens of a text, those per line of code, and its ternaries, walruses and comprehensions with two "for"."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in skipped]
    lines = {number for token in tokens for number in range(token.start[0], token.end[0] + 1)}
    nodes = list(ast.walk(ast.parse(source)))
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= {*range(node.lineno, node.end_lineno + 1)}  # a docstring
    ternaries, walruses = (sum(isinstance(node, kind) for node in nodes) for kind in (ast.IfExp, ast.NamedExpr))
    nested = sum(len(getattr(node, "generators", ())) > 1 for node in nodes)
    return len(tokens), len(tokens) / len(lines), ternaries, walruses, nested


def halves(script):
    """The text above the line and the text below it."""
    above, marker, below = (ROOT / f"{script}.py").read_text(encoding="utf-8").partition(MARKER)
    assert marker and MARKER not in below
    return above, below


def top_level_names(text):
    return [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def names_used(source, known):
    """Those of the known names that a definition uses, in the order of its text."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name) and node.id in known]
    return list(dict.fromkeys(node.id for node in sorted(found, key=lambda node: (node.lineno, node.col_offset))))


def order_of_use(script):
    """Every function in the order in which main comes to it, callees under their first caller."""
    sources, order = definitions(script), []

    def visit(name):
        if name not in order:
            order.append(name)
            for callee in names_used(sources[name], sources):
                visit(callee)

    visit("parse_args")
    visit("main")
    return order


def algorithm_flags(script):
    """The flags in the last group of Args, which are the paper's own."""
    group = definitions(script)["Args"].partition("    # the algorithm\n")[2]
    return re.findall(r"^    (\w+):", group, re.MULTILINE)


@pytest.mark.parametrize("script", ALL)
def test_each_script_keeps_to_its_budget(script):
    text = (ROOT / f"{script}.py").read_text(encoding="utf-8")
    tokens, density, ternaries, walruses, nested = count(text)
    found = (tokens, density, ternaries, len(text.splitlines()))
    assert all(number <= most for number, most in zip(found, BUDGETS[script], strict=True)), (found, BUDGETS[script])
    assert walruses == 0 and nested <= 2


def test_tokens_are_counted_whatever_the_lines():
    spread, joined = "a = 1\n\nb = [\n    2,\n]  # two\n", "a = 1; b = [2,]\n"
    assert count(spread)[0] == 9 and count(joined)[0] == 10  # a semicolon more
    assert count(spread)[1] == 9 / 4 and count('"""A docstring\nof two lines."""\na = 1\n')[:2] == (4, 4)
    assert count("a = 1 if b else 2\nif (c := 1):\n    d = [x for y in z for x in y]\n")[2:] == (1, 1, 1)


@pytest.mark.parametrize("script", ALL)
def test_functions_are_short_and_main_fits_on_a_page(script):
    lengths = {name: len(source.splitlines()) for name, source in definitions(script).items()}
    assert lengths.pop("main") <= MAIN.get(script, 90) and lengths.pop("Args")
    assert {name: length for name, length in lengths.items() if length > FUNCTION} == {}


@pytest.mark.parametrize("script", ALL)
def test_above_the_line_stands_the_algorithm_in_reading_order(script):
    names = top_level_names(halves(script)[0])
    assert names[0] == "Args" and names[-2:] == ["accumulate_gradients", "main"]
    assert "reward_fn" not in names or names[1:4] == ["is_right", "reward_fn", "score_completions"]
    assert halves(script)[0].startswith('"""') and halves(script)[1].endswith("\n    main(parse_args())\n")


@pytest.mark.parametrize("script", [script for script in ALL if script not in BLOCK] + ["grpo"])
def test_below_the_line_functions_stand_in_the_order_in_which_main_calls_them(script):
    names = top_level_names(halves(script)[1])
    assert names == [name for name in order_of_use(script) if name in names]


@pytest.mark.parametrize("script", ALL)
def test_functions_below_the_line_name_no_quantity_of_the_paper(script):
    tree, flags = ast.parse(halves(script)[1]), {*algorithm_flags(script), "ref"}
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    assert names & flags == set()


@pytest.mark.parametrize("script", BLOCK)
def test_the_block_below_the_line_is_one_and_the_same(script):
    assert halves(script)[1] == halves("grpo")[1]


@pytest.mark.parametrize("script", ALL)
def test_nothing_in_a_script_is_left_over(script):
    """Each function is reached from main: where the block is one, from one of their mains."""
    used = {name for other in (BLOCK if script in BLOCK else [script]) for name in order_of_use(other)}
    assert set(definitions(script)) - {"Args"} <= used


# What only reads would otherwise keep every activation.
WITHOUT_GRADIENT = {"generate", "lookup_logprobs", "look_up_scores", "look_up_pairs", "evaluate_pairs"}
WITHOUT_GRADIENT |= {"check_model", "check_logprobs", "check_scores"}


@pytest.mark.parametrize("script", ALL)
def test_what_only_reads_builds_no_graph(script):
    names = WITHOUT_GRADIENT & set(definitions(script))
    if script in ("sft", "reward_model"):
        names.add("evaluate")
    assert [name for name in sorted(names) if not definitions(script)[name].startswith("@torch.no_grad()\n")] == []
