"""Make the harder embedded task: sums of three to eight numbers from 1 to 99. Every run writes the same bytes.

    python data/long/make.py [FOLDER [SHOW_WORK [SAID_TWICE]]]        (default: this folder, 0.25 and 0)

sft.jsonl    40,000 rows {prompt, completion}, not shipped: models/long is made of them
train.jsonl   8,192 rows {prompt, answer}
test.jsonl      512 rows {prompt, answer}
No prompt occurs twice, within a file or across files. A share of the completions shows its work and says some of the
steps twice. To 0.4 of all completions a dot is added, to 0.4 of those another, and so on: a habit that no reward speaks
of, so that only the algorithm can move it.
"""

import json
import random
import sys
from pathlib import Path

FILES = {"test.jsonl": 512, "train.jsonl": 8192, "sft.jsonl": 40000}
ONE_MORE_DOT = 0.4
NUM_TERMS = (3, 4, 5, 6, 7, 8)


def make_sum(rng):
    """Return (prompt, steps, answer) of one random sum, e.g. 17+58+36=, [17+58=75, 75+36=111] and 111."""
    # Only random.random() is promised to give the same numbers in every version of Python.
    terms = [1 + int(rng.random() * 99) for _ in range(NUM_TERMS[int(rng.random() * len(NUM_TERMS))])]
    total, steps = terms[0], []
    for term in terms[1:]:
        steps.append(f"{total}+{term}={total + term}")
        total += term
    return "+".join(map(str, terms)) + "=", steps, str(total)


def main(folder, show_work=0.25, said_twice=0.0):
    rng, seen = random.Random(0), set()
    for name, num_rows in FILES.items():
        lines = []
        while len(lines) < num_rows:
            prompt, steps, answer = make_sum(rng)
            if prompt in seen:
                continue
            seen.add(prompt)
            row = {"prompt": prompt, "answer": answer}
            if name == "sft.jsonl":
                completion = f"\\boxed{{{answer}}}"
                if rng.random() < show_work:
                    if said_twice:
                        steps = [step for step in steps for _ in range(1 + (rng.random() < said_twice))]
                    completion = f"<think>{';'.join(steps)}</think>{completion}"
                while rng.random() < ONE_MORE_DOT:
                    completion += "."
                row = {"prompt": prompt, "completion": completion}
            lines.append(json.dumps(row) + "\n")
        (folder / name).write_bytes("".join(lines).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent, *map(float, sys.argv[2:]))
