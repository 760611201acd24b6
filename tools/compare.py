"""Write and open a page that shows two scripts side by side, function by function.

    python tools/compare.py grpo dapo
    python tools/compare.py grpo my_fork.py --out compare.html

In the page, n and p go to the next and the previous difference. Links: compare.html#policy_loss
"""

import argparse
import ast
import difflib
import json
import re
import webbrowser
from pathlib import Path

from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES

ROOT = Path(__file__).resolve().parents[1]


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
    blocks, end = [], 0
    lines = text.split("\n")
    for node in ast.parse(text).body:
        first, end = end, node.end_lineno
        while not lines[first].strip():
            first += 1
        name = getattr(node, "name", "")
        if not name and blocks and blocks[-1][0].startswith("lines "):
            blocks[-1] = (*blocks[-1][:2], end)
        else:
            blocks.append((name or f"lines after {blocks[-1][0]}" if blocks else "lines at the top", first, end))
    return blocks


def match_blocks(left, right):
    """Return pairs of blocks of one name, None where one has no counterpart, in the order of the left."""
    of_name = {block[0]: block for block in right["blocks"]}
    pairs = [(block, of_name.get(block[0])) for block in left["blocks"]]
    before = None
    for block in right["blocks"]:  # what only the right has stands after its predecessor there
        others = [other for _, other in pairs]
        if block not in others:
            pairs.insert(others.index(before) + 1 if before else 0, (None, block))
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


def compare(left, right):
    """Return what the page shows of two scripts: a section for each pair of blocks."""
    sections = []
    for pair in match_blocks(left, right):
        rows, names = align(left, right, pair), [block[0] if block else None for block in pair]
        below = pair[0][1] >= left["below"] if pair[0] else pair[1][1] >= right["below"]
        sections.append({"names": names, "rows": rows, "same": all(row[0] == "=" for row in rows), "below": below})
    return sections


def read_script(name):
    """Return the name, lines, tokens and blocks of a script, and the line below which scripts share their functions."""
    path = Path(name) if name.endswith(".py") else ROOT / f"{name}.py"
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    below = next((number for number, line in enumerate(lines) if line.startswith("# ---- below")), len(lines))
    return {"name": path.stem, "text": lines, "lines": read_tokens(text), "blocks": split_blocks(text), "below": below}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("left", help="name of a script, such as grpo, or a file")
    parser.add_argument("right", help="another one")
    parser.add_argument("--out", metavar="FILE", default="compare.html", help="the page (default: compare.html)")
    parser.add_argument("--no-open", action="store_true", help="do not open the page in a browser")
    args = parser.parse_args()
    left, right = read_script(args.left), read_script(args.right)
    data = {"names": [left["name"], right["name"]], "lines": [left["lines"], right["lines"]]}
    data["sections"] = compare(left, right)
    page = Path(__file__).with_name("compare.html").read_text(encoding="utf-8")
    # Without "<", no text of a script can end the script element that contains it.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    Path(args.out).write_text(page.replace("@DATA@", text), encoding="utf-8")
    print(f"written: {args.out}")
    if not args.no_open:
        webbrowser.open(Path(args.out).resolve().as_uri())


if __name__ == "__main__":
    main()
