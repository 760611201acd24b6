"""Write and open a page that shows scripts side by side, function by function.

    python tools/compare.py grpo dapo
    python tools/compare.py grpo my_fork.py --out compare.html
    python tools/compare.py                    # all scripts, to be chosen in the page

In the page, n and p go to the next and the previous difference. Links: compare.html#grpo/dapo/policy_loss
"""

import argparse
import ast
import difflib
import itertools
import json
import re
import webbrowser
from pathlib import Path

from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = "reinforce grpo dr_grpo dapo gspo cispo grpo_process grpo_tools gkd ppo_rlhf dpo reward_model sft".split()
# Which rows of the tables in docs/side_by_side.md say what a function computes.
TERMS = {
    "policy_loss": ("objective", "weight of a token", "ratio", "clipping", "KL"),
    "compute_advantages": ("advantage", "groups with equal rewards"),
    "token_divergence": ("objective",),
    "distillation_loss": ("weight of a token",),
    "preference_loss": ("objective", "weight of a token", "KL"),
    "main": ("reward R", "updates per rollout", "models in memory"),
}


def read_tokens(text):
    """Return the lines of a text as lists of [kind, text]; the kind is sd for docstrings, else a letter or none."""
    lines = [[]]
    for token_type, value in PythonLexer(stripnl=False, ensurenl=False).get_tokens(text):
        kind = STANDARD_TYPES.get(token_type, "")
        kind = kind if kind == "sd" else kind[:1].replace("n", "")
        for number, part in enumerate(value.split("\n")):
            if number > 0:
                lines.append([])
            if part:
                lines[-1].append([kind, part])
    return lines


def split_blocks(text):
    """Return [(name, first line, line after the last)]: functions, classes, and what stands between them."""
    lines = text.split("\n")
    try:
        nodes = ast.parse(text).body
    except SyntaxError:  # it is shown as a text
        return [("the file", 0, len(lines))]
    blocks, end, in_between = [], 0, False
    for node in nodes:
        first, end = end, node.end_lineno
        while not lines[first].strip():
            first += 1
        before = in_between
        in_between = not hasattr(node, "name") and (len(blocks) > 0 or not isinstance(node, ast.Expr))
        if in_between and before:
            blocks[-1] = (*blocks[-1][:2], end)
        elif in_between:
            blocks.append((f"after {blocks[-1][0]}" if len(blocks) > 1 else "imports", first, end))
        else:
            blocks.append((getattr(node, "name", "docstring"), first, end))
    return blocks


def match_blocks(left, right):
    """Return pairs of blocks, None where one has no counterpart: those of one name, then those with similar lines."""
    of_name = {block[0]: block for block in right["blocks"]}
    found = {block: of_name[block[0]] for block in left["blocks"] if block[0] in of_name}
    rest = [block for block in right["blocks"] if block not in found.values()]
    for block in left["blocks"]:
        if block not in found:
            texts = [left["text"][block[1] : block[2]], *(right["text"][other[1] : other[2]] for other in rest)]
            ratios = [difflib.SequenceMatcher(None, texts[0], text, autojunk=False).ratio() for text in texts[1:]]
            if max(ratios, default=0) > 0.5:
                found[block] = rest.pop(ratios.index(max(ratios)))
    pairs = [(block, found.get(block)) for block in left["blocks"]]
    before = None
    for block in right["blocks"]:  # what only the right has stands after its predecessor there
        if block in rest:
            pairs.insert(1 + [other for _, other in pairs].index(before) if before else 0, (None, block))
        before = block
    return pairs


def mark(tokens, ranges):
    """Return tokens as [kind, text, whether it lies in one of these ranges of characters]."""
    marked, place = [], 0
    for kind, text in tokens:
        for letter in text:
            inside = any(first <= place < end for first, end in ranges)
            if marked and marked[-1][0] == kind and marked[-1][2] == inside:
                marked[-1][1] += letter
            else:
                marked.append([kind, letter, inside])
            place += 1
    return marked


def changed_row(left, right, i, j):
    """Return a row with the differences of line i of the left and line j of the right marked."""
    words = [re.findall(r"\w+|\s+|.", text) for text in (left["text"][i], right["text"][j])]
    ranges = ([], [])
    for tag, *places in difflib.SequenceMatcher(None, *words, autojunk=False).get_opcodes():
        for side, (first, end) in enumerate((places[:2], places[2:])):
            if tag != "equal":
                ranges[side].append([len("".join(words[side][:at])) for at in (first, end)])
    return ["~", i, j, mark(left["lines"][i], ranges[0]), mark(right["lines"][j], ranges[1])]


def align(left, right, pair):
    """Return the rows of two blocks: ["=", i, j, number of equal lines] or ["~", i, j, tokens, tokens]."""
    (_, i1, i2), (_, j1, j2) = (block or ("", 0, 0) for block in pair)
    rows, matcher = [], difflib.SequenceMatcher(None, left["text"][i1:i2], right["text"][j1:j2], autojunk=False)
    for tag, a1, a2, b1, b2 in matcher.get_opcodes():
        a1, a2, b1, b2 = a1 + i1, a2 + i1, b1 + j1, b2 + j1
        if tag == "equal":
            rows.append(["=", a1, b1, a2 - a1])
            continue
        for i in range(a1, a2):  # beside a line stands the first line to come that is similar to it
            pairs = {j: difflib.SequenceMatcher(None, left["text"][i], right["text"][j]) for j in range(b1, b2)}
            j = next((j for j, matcher in pairs.items() if matcher.ratio() > 0.6), None)
            if j is None:
                rows.append(["~", i, None, left["lines"][i], []])
            else:
                rows += [["~", None, other, [], right["lines"][other]] for other in range(b1, j)]
                rows.append(changed_row(left, right, i, j))
                b1 = j + 1
        rows += [["~", None, other, [], right["lines"][other]] for other in range(b1, b2)]
    return rows


def read_terms():
    """Return {script: {row: cell}} of the tables in docs/side_by_side.md."""
    cells = {}
    for table in (ROOT / "docs/side_by_side.md").read_text(encoding="utf-8").split("\n\n"):
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines() if line.startswith("|")]
        rows = {row[0].strip(): [cell.strip().replace("\\|", "|") for cell in row[1:]] for row in rows}
        for column, file in enumerate(rows.get("script", ())):
            cells[file.strip("`").removesuffix(".py")] = {name: row[column] for name, row in rows.items()}
    return cells


def compare(left, right, terms):
    """Return what the page shows of two scripts: a section for each pair of blocks."""
    sections = []
    for pair in match_blocks(left, right):
        rows, names = align(left, right, pair), [block[0] if block else None for block in pair]
        same, notes = all(row[0] == "=" for row in rows), []
        ours, theirs = terms.get(left["name"], {}), terms.get(right["name"], {})
        for row in [] if same else ours:
            if row.startswith(TERMS.get(names[0] or names[1], ())) and theirs.get(row, ours[row]) != ours[row]:
                notes.append(f"{row}: {ours[row]} → {theirs[row]}")
        first = pair[0][1] >= left["below"] if pair[0] else pair[1][1] >= right["below"]
        sections.append({"names": names, "rows": rows, "same": same, "below": first, "notes": notes})
    return sections


def read_script(name):
    """Return the name, lines, tokens and blocks of a script, and the line below which scripts share their functions."""
    path = next((path for path in (Path(name), Path(f"{name}.py"), ROOT / f"{name}.py") if path.is_file()), None)
    if path is None:
        raise SystemExit(f"{name}: no such file, and no script of this name; the scripts are {', '.join(SCRIPTS)}")
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    below = next((number for number, line in enumerate(lines) if line.startswith("# ---- below")), len(lines))
    return {"name": path.stem, "text": lines, "lines": read_tokens(text), "blocks": split_blocks(text), "below": below}


def main(args):
    if len(args.scripts) == 1:
        raise SystemExit("give two scripts or more, or none for all")
    scripts = [read_script(name) for name in args.scripts or SCRIPTS]
    terms = read_terms()
    pairs = {f"{a['name']}/{b['name']}": compare(a, b, terms) for a, b in itertools.combinations(scripts, 2)}
    data = {"lines": {script["name"]: script["lines"] for script in scripts}, "pairs": pairs}
    page = Path(__file__).with_name("compare.html").read_text(encoding="utf-8")
    # Without "<", no text of a script can end the script element that contains it.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    Path(args.out).write_text(page.replace("@DATA@", text), encoding="utf-8")
    print(f"written: {args.out}")
    if not args.no_open:
        webbrowser.open(Path(args.out).resolve().as_uri())


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", metavar="SCRIPT", nargs="*", help="names or files, at least two (default: all)")
    parser.add_argument("--out", metavar="FILE", default="compare.html", help="the page (default: compare.html)")
    parser.add_argument("--no-open", action="store_true", help="do not open the page in a browser")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_args())
