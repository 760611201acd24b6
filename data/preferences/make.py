"""Make preference pairs of sums from samples of the bundled model, ranked by a rule.

    python data/preferences/make.py [FOLDER]

train.jsonl   4,096 rows {prompt, chosen, rejected, kind}
test.jsonl      512 rows of the same form

The rule prefers right completions to wrong ones, and shown work to none. models/tiny writes 16 completions for each of
8,192 new prompts. No prompt is in data/addition, and none is in both files. At the temperature of 1.5, 1 sample in 9
shows wrong work; at 1 it is 1 in 65. Each file has these kinds of pairs (chosen, rejected):

    right work, wrong work     20 %   both show work, which must be read to rank them
    right answer, wrong work   10 %   the chosen one answers at once: showing work is not enough
    right work, wrong answer   30 %   only the chosen one shows work, and the other one is wrong
    right work, right answer   25 %   only the chosen one shows work, and both are right
    right answer, wrong answer 15 %   neither shows work

Work is right if it is exactly what data/addition/make.py would write. Every run on the same machine writes the same
bytes. Another machine or version may sample other completions, so the committed files are the reference.
"""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data" / "addition")]

import make as addition  # noqa: E402, after its folder is on the path

import grpo  # noqa: E402

NUM_PROMPTS, NUM_SAMPLES, TEMPERATURE, BATCH = 8192, 16, 1.5, 128
FILES = {"test.jsonl": 512, "train.jsonl": 4096}
KINDS = {  # (chosen, rejected): share of a file
    ("right work", "wrong work"): 0.2,
    ("right answer", "wrong work"): 0.1,
    ("right work", "wrong answer"): 0.3,
    ("right work", "right answer"): 0.25,
    ("right answer", "wrong answer"): 0.15,
}


def fresh_sums(count):
    """Return this number of sums (prompt, completion that shows its work, answer) that are not in data/addition."""
    seen = set()
    for path in (ROOT / "data" / "addition").glob("*.jsonl"):
        seen |= {json.loads(line)["prompt"] for line in path.read_text().splitlines()}
    rng, sums = random.Random(1), []
    while len(sums) < count:
        row = addition.make_sum(rng)
        if row[0] not in seen:
            seen.add(row[0])
            sums.append(row)
    return sums


def classify(completion, worked, answer):
    """Return whether a completion shows work or answers at once, and whether it is right, or None if malformed."""
    if completion == worked:
        return "right work"
    if completion.startswith("<think>") and "</think>\\boxed{" in completion and completion.endswith("}"):
        return "wrong work"
    if completion.startswith("\\boxed{") and completion.endswith("}"):
        return "right answer" if completion == f"\\boxed{{{answer}}}" else "wrong answer"
    return None


def sample_completions(sums):
    """Return {class: distinct completions} for each sum."""
    args = replace(grpo.TINY, rollout_batch_size=BATCH * NUM_SAMPLES)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    sampler = grpo.load_sampler(args, tokenizer, grpo.init_ranks())
    torch.manual_seed(0)
    found, num_wrong_work = [], 0
    for start in range(0, len(sums), BATCH):
        part = sums[start : start + BATCH]
        rows = grpo.read_rows(Dataset.from_list([{"prompt": p, "answer": a} for p, _, a in part]), args, tokenizer)
        rows = [row for row in rows for _ in range(NUM_SAMPLES)]
        batch, texts = grpo.sample_completions(sampler, tokenizer, rows, TEMPERATURE, args)
        for i, (_, worked, answer) in enumerate(part):
            classes = {}
            for k in range(i * NUM_SAMPLES, (i + 1) * NUM_SAMPLES):
                if not batch["truncated"][k]:
                    name = classify(texts[k], worked, answer)
                    classes.setdefault(name, {})[texts[k]] = None
                    num_wrong_work += name == "wrong work"
            found.append({name: list(texts) for name, texts in classes.items()})
    print(f"{num_wrong_work} of {len(sums) * NUM_SAMPLES} samples show wrong work")
    return found


def main(folder):
    sums = fresh_sums(NUM_PROMPTS)
    found, rng = sample_completions(sums), random.Random(2)
    first = 0
    for name, num_rows in FILES.items():
        # The two files share no prompt, and a prompt has at most one pair of each kind.
        last = first + NUM_PROMPTS * num_rows // sum(FILES.values())
        rows, share_so_far = [], 0.0
        for (better, worse), share in KINDS.items():
            pairs = [
                {
                    "prompt": prompt,
                    "chosen": rng.choice(classes[better]),
                    "rejected": rng.choice(classes[worse]),
                    "kind": f"{better}, {worse}",
                }
                for (prompt, _, _), classes in zip(sums[first:last], found[first:last])
                if better in classes and worse in classes
            ]
            rng.shuffle(pairs)
            share_so_far += share
            count = round(share_so_far * num_rows) - len(rows)
            if len(pairs) < count:
                raise SystemExit(f"{name}: only {len(pairs)} pairs of {better}, {worse}, but {count} are needed")
            print(f"{name}: {count} of {len(pairs)} pairs of {better}, {worse}")
            rows += pairs[:count]
        rng.shuffle(rows)
        assert len(rows) == num_rows
        (folder / name).write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode())
        first = last


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
