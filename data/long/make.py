"""Make the data of the harder bundled task: sums of three to eight numbers from 1 to 99.

    python data/long/make.py [FOLDER [SHOW_WORK [SAID_TWICE]]]        (default: this folder, 0.25 and 0)

sft.jsonl    40,000 rows {prompt, completion}, the training data of models/long; not in the repository
train.jsonl   8,192 rows {prompt, answer}
test.jsonl      512 rows {prompt, answer}

Every run writes the same bytes. No prompt occurs twice, within a file or across files. SHOW_WORK is the share of the
completions that show their work, and SAID_TWICE the share of the steps that these repeat. A completion gets a dot at
its end with probability 0.4, then another dot with probability 0.4, and so on. No reward looks at these dots, so only
the algorithm can change how many the model writes.
"""

import json
import random
import sys
from pathlib import Path

FILES = {"test.jsonl": 512, "train.jsonl": 8192, "sft.jsonl": 40000}
ONE_MORE_DOT = 0.4
NUM_TERMS = (3, 4, 5, 6, 7, 8)


def make_sum(rng):
    """Return (prompt, steps, answer) of one random sum, for example 17+58+36=, [17+58=75, 75+36=111] and 111."""
    # Only random.random() is guaranteed to give the same numbers in every version of Python.
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
