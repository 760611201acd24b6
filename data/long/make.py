"""Make the harder embedded task: sums of three to eight numbers from 1 to 99. Every run writes the same bytes.

    python data/long/make.py [FOLDER]

sft.jsonl    40,000 rows {prompt, completion}, not shipped: models/long is made of them
train.jsonl   8,192 rows {prompt, answer}
test.jsonl      512 rows {prompt, answer}
No prompt occurs twice, within a file or across files. A quarter of the completions show their work. To 0.4 of them a dot
is added, to 0.4 of those another, and so on: a habit that no reward speaks of, so that only the algorithm can move it.
"""

import json
import random
import sys
from pathlib import Path

FILES = {"test.jsonl": 512, "train.jsonl": 8192, "sft.jsonl": 40000}
SHOW_WORK, ONE_MORE_DOT = 0.25, 0.4
NUM_TERMS = (3, 4, 5, 6, 7, 8)


def make_sum(rng):
    """Return (prompt, completion that shows its work, answer) of one random sum, e.g. 17+58+36= and 111."""
    # Only random.random() is promised to give the same numbers in every version of Python.
    terms = [1 + int(rng.random() * 99) for _ in range(NUM_TERMS[int(rng.random() * len(NUM_TERMS))])]
    total, steps = terms[0], []
    for term in terms[1:]:
        steps.append(f"{total}+{term}={total + term}")
        total += term
    return "+".join(map(str, terms)) + "=", f"<think>{';'.join(steps)}</think>\\boxed{{{total}}}", str(total)


def main(folder):
    rng, seen = random.Random(0), set()
    for name, num_rows in FILES.items():
        lines = []
        while len(lines) < num_rows:
            prompt, worked, answer = make_sum(rng)
            if prompt in seen:
                continue
            seen.add(prompt)
            row = {"prompt": prompt, "answer": answer}
            if name == "sft.jsonl":
                completion = worked if rng.random() < SHOW_WORK else f"\\boxed{{{answer}}}"
                while rng.random() < ONE_MORE_DOT:
                    completion += "."
                row = {"prompt": prompt, "completion": completion}
            lines.append(json.dumps(row) + "\n")
        (folder / name).write_bytes("".join(lines).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
