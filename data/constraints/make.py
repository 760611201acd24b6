"""Make instructions with one constraint each that a program can check. Every run writes the same bytes.

    python data/constraints/make.py [FOLDER]

train.jsonl, test.jsonl    994 and 200 rows {prompt, answer}; the answer is the constraint as JSON

README.md describes the kinds of constraints and says where the instructions come from.
"""

import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

TEXTS = {
    "at most": "Answer in at most {} words.",
    "include": 'Include the word "{}" in your answer.',
    "lowercase": "Write your whole answer in lowercase letters.",
    "end": 'End your answer with the exact phrase "{}"',
    "quotes": "Wrap your whole answer in double quotation marks.",
    "bullets": 'Answer with exactly {} bullet points, each on a line of its own that begins with "* ".',
    "no commas": "Do not use any commas in your answer.",
    "begin": 'Begin your answer with the word "{}".',
}
HELD_OUT_KIND = "begin"  # in test.jsonl only

# Training and held-out rows share no number, word or phrase.
VALUES = {
    "train": {
        "at most": [8, 10, 12, 15],
        "include": "river window music garden winter letter yellow market morning silver bridge candle forest".split(),
        "end": ["Any other questions?", "That is all.", "I hope this helps.", "Have a nice day!", "Let me know."],
        "bullets": [2, 4],
    },
    "test": {
        "at most": [9, 11, 14],
        "include": "ocean pencil island summer kitchen purple station mountain".split(),
        "end": ["Is there anything else?", "Thank you for asking.", "Good luck!"],
        "bullets": [3],
        "begin": ["Well", "Sure", "Indeed", "Certainly"],
    },
}


def add_constraint(rng, instruction, kind, split):
    """Return a row with the instruction and a constraint of this kind."""
    value = rng.choice(VALUES[split].get(kind, [None]))
    text = TEXTS[kind].format(value)
    answer = {"kind": kind, "value": value, "instruction": instruction.split("\n")[0], "constraint": text}
    return {"prompt": f"{instruction}\n\n{text}", "answer": json.dumps(answer)}


def main(folder=HERE):
    for split in ("train", "test"):
        lines = (HERE.parent / "manners" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        instructions = [json.loads(line)["prompt"] for line in lines]
        kinds = [kind for kind in TEXTS if split == "test" or kind != HELD_OUT_KIND]
        if split == "test":
            instructions += instructions  # each with two kinds of constraints
        rng = random.Random(split)
        rows = []
        for i, instruction in enumerate(instructions):
            rows.append(add_constraint(rng, instruction, kinds[i % len(kinds)], split))
        path = Path(folder, f"{split}.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main(*sys.argv[1:])
