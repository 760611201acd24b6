"""Make preference pairs in which the polite answer is the better one. Every run writes the same bytes.

    python data/manners/make.py instruction-data-with-preference.json [FOLDER]

train.jsonl, test.jsonl    994 and 100 rows {prompt, chosen, rejected}: the same answer in two tones

README.md says where the source file comes from.
"""

import json
import random
import sys
from pathlib import Path

TEST = 100


def main(source, folder=Path(__file__).parent):
    rows = []
    for row in json.loads(Path(source).read_text()):
        prompt = "\n\n".join(part for part in (row["instruction"].strip(), row["input"].strip()) if part)
        rows.append({"prompt": prompt, "chosen": row["chosen"].strip(), "rejected": row["rejected"].strip()})
    rows = [row for row in rows if row["chosen"] != row["rejected"]]
    random.Random(0).shuffle(rows)
    counts = {}
    for row in rows:
        counts[row["prompt"]] = counts.get(row["prompt"], 0) + 1
    test = [row for row in rows if counts[row["prompt"]] == 1][:TEST]  # so no prompt is in both files
    files = {"train": [row for row in rows if row not in test], "test": test}
    for name, part in files.items():
        path = Path(folder, f"{name}.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
        print(f"{path}: {len(part)} rows")


if __name__ == "__main__":
    main(*sys.argv[1:])
