"""Train a model to sort with grpo.py and one of three rewards: exact, inclusion or repaired.

    python examples/sorting/rewards.py inclusion --num-steps 20

It takes the flags of grpo.py. By default, --model and --dataset are the base model and the data that run.sh makes.
eval/accuracy counts exact matches, whatever the reward is.
"""

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import grpo  # noqa: E402, after its folder is on the path


def numbers(text):
    """Return the numbers among the words of a text, without all other words."""
    return [int(word) for word in text.split() if word.isdecimal() and len(word) < 10]


def exact(completion, answer):
    """Return True, a reward of 1, for the sorted list and False for everything else."""
    return completion.split() == answer.split()


def inclusion(completion, answer):
    """Return how many of the answer's numbers are present plus how many neighbours are in order, scaled.

    The sum is divided by that of the sorted list, which earns 1. A longer list has more neighbours and can earn more.
    """
    given, gold = numbers(completion), numbers(answer)
    included = sum(number in given for number in gold)
    ordered = sum(a <= b for a, b in zip(given, given[1:]))
    return (included + ordered) / (2 * len(gold) - 1)


def repaired(completion, answer):
    """Return the same two counts as inclusion, without its loophole: only the sorted list earns 1, all others less.

    A number counts as often as it occurs in both lists, a word that is not a number is an error, and the sum is divided
    by that of a sorted list as long as the longer of the two.
    """
    given, gold = completion.split(), answer.split()
    included = sum((Counter(given) & Counter(gold)).values())
    ordered = sum(len(numbers(f"{a} {b}")) == 2 and int(a) <= int(b) for a, b in zip(given, given[1:]))
    return (included + ordered) / (2 * max(len(given), len(gold)) - 1)


REWARDS = {"exact": exact, "inclusion": inclusion, "repaired": repaired}


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in REWARDS:
        raise SystemExit(f"usage: python {sys.argv[0]} {'|'.join(REWARDS)} [flags of grpo.py]")
    grpo.reward_fn, grpo.is_correct = REWARDS[sys.argv.pop(1)], exact
    if not any(word.startswith("--resume") for word in sys.argv):  # a resumed run keeps its own
        # Flags given by hand come later and win.
        sys.argv[1:1] = ["--model", "runs/sorting/base/checkpoint-000300", "--tiny", "--dataset", "runs/sorting/data"]
    grpo.main(grpo.parse_args())
