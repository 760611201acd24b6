"""Make the data of the sorting task: lists of four to six digits. Every run writes the same bytes.

    python examples/sorting/make.py [FOLDER]                         (default: runs/sorting/data)

sft.jsonl    20,000 rows {prompt, completion}, such as 3 0 7 3= and 0 3 3 7
train.jsonl   4,096 rows {prompt, answer}
test.jsonl      512 rows {prompt, answer}

Half of the completions are spoiled: two numbers are swapped (they may be equal), one number is missing, or one number
occurs once too often. No prompt occurs twice, within a file or across files.
"""

import json
import random
import sys
from pathlib import Path

FILES = {"test.jsonl": 512, "train.jsonl": 4096, "sft.jsonl": 20000}


def spoil(numbers, rng):
    """Return the sorted numbers, in half of the calls with one mistake."""
    # Only random.random() is guaranteed to give the same numbers in every version of Python.
    kind, i, j = (int(rng.random() * count) for count in (6, len(numbers), len(numbers)))
    spoiled = list(numbers)
    if kind == 0:
        spoiled[i], spoiled[j] = numbers[j], numbers[i]
    elif kind == 1:
        del spoiled[i]
    elif kind == 2:
        spoiled.insert(i, numbers[i])
    return spoiled


def main(folder):
    rng, seen = random.Random(0), set()
    folder.mkdir(parents=True, exist_ok=True)
    for name, num_rows in FILES.items():
        lines = []
        while len(lines) < num_rows:
            numbers = [int(rng.random() * 10) for _ in range(4 + int(rng.random() * 3))]
            prompt = " ".join(map(str, numbers)) + "="
            if prompt in seen:
                continue
            seen.add(prompt)
            key, listed = "answer", sorted(numbers)
            if name == "sft.jsonl":
                key, listed = "completion", spoil(listed, rng)
            lines.append(json.dumps({"prompt": prompt, key: " ".join(map(str, listed))}) + "\n")
        (folder / name).write_bytes("".join(lines).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sorting/data"))
