"""The story first: each script reads from its paper to its training loop above one line, and has its plumbing below."""

import ast
import io
import re
import tokenize

import pytest
from test_copies import ALL, BLOCK, MARKER, ROOT, definitions

# Lines at most: of the whole file, below the line, above it, and of main.
WHOLE = {"grpo": 1069, "dr_grpo": 1057, "gspo": 1050, "cispo": 1050, "reinforce": 1015, "dapo": 1112}
WHOLE |= {"grpo_process": 1117, "grpo_tools": 1110, "ppo_rlhf": 1375, "dpo": 859, "reward_model": 796, "sft": 799}
BELOW = dict.fromkeys(ALL, 745) | {"ppo_rlhf": 915, "dpo": 675, "reward_model": 580, "sft": 580}
SIBLINGS = {"cispo": 350, "grpo_process": 375, "grpo_tools": 370}
ABOVE = dict.fromkeys(ALL, 335) | SIBLINGS | {"dapo": 375, "dpo": 290, "ppo_rlhf": 470, "reward_model": 290, "sft": 290}
MAIN = dict.fromkeys(ALL, 98) | {"ppo_rlhf": 125}
FUNCTION = 40
# Characters of a line that is not blank: the mean, and the share of lines over 100.
MEAN, LONG = 65.0, 0.195


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

    visit("main")
    return order


def algorithm_flags(script):
    """The flags in the last group of Args, which are the paper's own."""
    group = definitions(script)["Args"].partition("    # the algorithm\n")[2]
    return re.findall(r"^    (\w+):", group, re.MULTILINE)


@pytest.mark.parametrize("script", ALL)
def test_each_script_and_its_halves_keep_to_their_budget(script):
    above, below = (half.splitlines() for half in halves(script))
    assert len(above) <= ABOVE[script] and len(below) <= BELOW[script]
    assert len(above) + 1 + len(below) <= WHOLE[script]


@pytest.mark.parametrize("script", ALL)
def test_lines_are_not_joined_to_meet_a_budget(script):
    text = (ROOT / f"{script}.py").read_text(encoding="utf-8")
    lengths = [len(line) for line in text.splitlines() if line.strip()]
    assert sum(lengths) / len(lengths) <= MEAN and sum(length > 100 for length in lengths) / len(lengths) <= LONG
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    assert not [token.start for token in tokens if token.type == tokenize.OP and token.string == ";"]


@pytest.mark.parametrize("script", ALL)
def test_functions_are_short_and_main_fits_on_a_page(script):
    lengths = {name: len(source.splitlines()) for name, source in definitions(script).items()}
    assert lengths.pop("main") <= MAIN[script] and lengths.pop("Args")
    lengths["policy_loss"] = lengths.get("policy_loss", 0) - 5  # it has a parameter a line, for the sake of diffs
    assert {name: length for name, length in lengths.items() if length > FUNCTION} == {}


@pytest.mark.parametrize("script", ALL)
def test_above_the_line_stands_the_algorithm_in_reading_order(script):
    names = top_level_names(halves(script)[0])
    assert names[:2] == ["by_model", "Args"] and names[-2:] == ["accumulate_gradients", "main"]
    assert "reward_fn" not in names or names[2:5] == ["is_right", "reward_fn", "score_completions"]
    assert halves(script)[0].startswith('"""') and halves(script)[1].endswith("\n        main(tyro.cli(Args))\n")


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
    assert set(definitions(script)) - {"by_model", "Args"} <= used


# What only reads would otherwise keep every activation.
WITHOUT_GRADIENT = {"generate", "lookup_logprobs", "look_up", "look_up_pairs", "evaluate_pairs"}


@pytest.mark.parametrize("script", ALL)
def test_what_only_reads_builds_no_graph(script):
    names = (WITHOUT_GRADIENT | ({"evaluate"} if script == "sft" else set())) & set(definitions(script))
    assert [name for name in sorted(names) if not definitions(script)[name].startswith("@torch.no_grad()\n")] == []
