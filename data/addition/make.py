"""Make the data of the bundled task: sums of two to four numbers from 1 to 99. Every run writes the same bytes.

    python data/addition/make.py [FOLDER]

sft.jsonl    20,000 rows {prompt, completion}; a third of the completions show their work before the boxed answer
train.jsonl   4,096 rows {prompt, answer}
test.jsonl      512 rows {prompt, answer}

No prompt occurs twice, within a file or across files.
"""

import json
import random
import sys
from pathlib import Path

FILES = {"test.jsonl": 512, "train.jsonl": 4096, "sft.jsonl": 20000}
SHOW_WORK = 0.33
NUM_TERMS = (2, 3, 4, 4, 4)  # there are only 9,801 ordered sums of two numbers


def make_sum(rng):
    """Return (prompt, completion that shows its work, answer) of one random sum, for example of 17+58+36=."""
    # Only random.random() is guaranteed to give the same numbers in every version of Python.
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
                shown = rng.random() < SHOW_WORK
                row = {"prompt": prompt, "completion": worked if shown else f"\\boxed{{{answer}}}"}
            lines.append(json.dumps(row) + "\n")
        (folder / name).write_bytes("".join(lines).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
