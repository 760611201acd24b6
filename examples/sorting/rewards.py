"""Train grpo.py to sort, with one of four rewards: exact, position, inclusion or repaired.

    python examples/sorting/rewards.py inclusion --num-steps 20

Flags are those of grpo.py; without --model and --dataset they are the base and the data that run.sh beside it makes.
Whatever the reward is, eval/accuracy and pass@k count exact match.
"""

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import grpo  # noqa: E402, after its folder is on the path


def numbers(text):
    """The numbers among the words of a text; all else is overlooked."""
    return [int(word) for word in text.split() if word.isdecimal() and len(word) < 10]


def exact(completion, answer):
    """True, which is 1, for the sorted list and False for everything else."""
    return completion.split() == answer.split()


def position(completion, answer):
    """The share of the answer's numbers that stand at their place. What comes after them costs nothing."""
    given, gold = numbers(completion), numbers(answer)
    return sum(a == b for a, b in zip(given, gold)) / len(gold)


def inclusion(completion, answer):
    """How many of the answer's numbers are there, and how many neighbours are in order: 1 for the sorted list.

    Both are divided by what the sorted list would have: more neighbours than that make a reward over 1.
    """
    given, gold = numbers(completion), numbers(answer)
    included = sum(number in given for number in gold)
    ordered = sum(a <= b for a, b in zip(given, given[1:]))
    return (included + ordered) / (2 * len(gold) - 1)


def repaired(completion, answer):
    """The same two counts, of what cannot be had for nothing: only the sorted list has 1, and everything else less.

    A number counts as often as it is in both lists, every word of the completion is a number or a fault, and the longer
    of the two lists divides.
    """
    given, gold = completion.split(), answer.split()
    included = sum((Counter(given) & Counter(gold)).values())
    ordered = sum(len(numbers(f"{a} {b}")) == 2 and int(a) <= int(b) for a, b in zip(given, given[1:]))
    return (included + ordered) / (2 * max(len(given), len(gold)) - 1)


REWARDS = {"exact": exact, "position": position, "inclusion": inclusion, "repaired": repaired}


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in REWARDS:
        raise SystemExit(f"python {sys.argv[0]} {'|'.join(REWARDS)} [flags of grpo.py]")
    grpo.reward_fn, grpo.is_right = REWARDS[sys.argv.pop(1)], exact
    if not any(word.startswith("--resume") for word in sys.argv):  # a run keeps its own
        # Flags that are given come later, and of a flag that comes twice the last one counts.
        sys.argv[1:1] = ["--model", "runs/sorting/base/checkpoint", "--dataset", "runs/sorting/data"]
    grpo.main(grpo.parse_args())
