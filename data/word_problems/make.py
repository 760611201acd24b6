"""Make prompts with answers from SVAMP, and with solutions from MAWPS. Every run writes the same bytes.

    python data/word_problems/make.py SVAMP.json MAWPS.csv [FOLDER]

svamp/train.jsonl, svamp/test.jsonl    SVAMP: 700 and 300 rows {prompt, answer}
mawps/train.jsonl, mawps/test.jsonl    MAWPS: 1,504 and 200 rows {prompt, answer}

An answer of SVAMP is a number. An answer of MAWPS is the equations of its solution, one per line, and the boxed result.
No two files have problems that differ only in their numbers. README.md says where the two sources come from.
"""

import csv
import json
import random
import re
import sys
from fractions import Fraction
from pathlib import Path

TEST_SVAMP, TEST_MAWPS = 300, 200
ROUNDED = 0.02  # MAWPS rounds its answers


def write_number(value):
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def solve(equation, numbers):
    """Return the lines that solve an equation in prefix form, such as "- number0 number1", and its value."""
    lines, tokens = [], iter(equation.split())

    def read():
        token = next(tokens)
        if token not in "+-*/":
            return numbers[int(token[len("number") :])] if token.startswith("number") else Fraction(token)
        a, b = read(), read()
        value = a / b if token == "/" else {"+": a + b, "-": a - b, "*": a * b}[token]
        lines.append(f"{write_number(a)} {token} {write_number(b)} = {write_number(value)}")
        return value

    value = read()
    return lines, value


def without_numbers(text):
    return re.sub(r"[\d.,]+", "0", text.lower())


def read_svamp(path):
    rows = []
    for row in json.loads(Path(path).read_text()):
        body, question = row["Body"].strip(), row["Question"].strip()
        # A body that ends without a full stop is the first half of the question's sentence.
        if body[-1] not in ".?!":
            body, question = f"{body.rstrip(',')},", question[0].lower() + question[1:]
        rows.append({"prompt": f"{body} {question}", "answer": write_number(Fraction(str(row["Answer"])))})
    return rows


def read_mawps(path):
    rows = []
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            numbers = [Fraction(number) for number in row["Numbers"].split()]
            lines, value = solve(row["Equation"], numbers)
            if abs(value - Fraction(row["Answer"])) > ROUNDED:
                continue
            prompt = re.sub(r"number(\d+)", lambda found, n=numbers: write_number(n[int(found[1])]), row["Question"])
            prompt = re.sub(r" ([.,?!;:'])", r"\1", " ".join(prompt.split()))
            rows.append({"prompt": prompt, "answer": "\n".join([*lines, rf"\boxed{{{write_number(value)}}}"])})
    return rows


def split(rows, num_test, taken=()):
    """Return train and test rows. Texts that differ only in numbers stay on one side, and copies are dropped."""
    groups = {}
    for row in rows:
        if row["prompt"] not in [other["prompt"] for other in groups.setdefault(without_numbers(row["prompt"]), [])]:
            groups[without_numbers(row["prompt"])].append(row)
    keys = [key for key in groups if key not in taken]
    random.Random(0).shuffle(keys)
    test = []
    while len(test) < num_test:  # one row of each text
        test.append(groups.pop(keys.pop())[0])
    train = [row for key in keys for row in groups[key]]
    return train, test


def main(svamp, mawps, folder=Path(__file__).parent):
    svamp, mawps = read_svamp(svamp), read_mawps(mawps)
    files = dict(zip(("svamp/train", "svamp/test"), split(svamp, TEST_SVAMP)))
    files |= zip(("mawps/train", "mawps/test"), split(mawps, TEST_MAWPS, {without_numbers(r["prompt"]) for r in svamp}))
    for name, rows in files.items():
        path = Path(folder, f"{name}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main(*sys.argv[1:])
