"""Run grpo.py with math-verify as the rule for formulas, as reward and as accuracy.

    pip install math-verify
    python examples/my_math.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset my_prompts.jsonl

It takes the flags of grpo.py. Numbers stay with the strict rule of grpo.py, because math-verify computes: for 51 it
accepts 17 * 3, so it would pay for copying the question. docs/data.md says what this rule accepts.
"""

import re
import sys
from fractions import Fraction
from pathlib import Path

from math_verify import parse, verify

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpo

SECONDS = 1  # the limit of each parse, and of each comparison of two formulas; a result that takes longer is wrong
STRICT = grpo.is_correct
UNSAFE = re.compile(  # texts that math-verify is not asked about
    r"""
    [$=]                 # a chain or several formulas: 5 = 6 would be accepted for 6
    | \d_                # a number in another base, such as 101_2: the base would be ignored
    | e[+-]?\d{3}        # an exponent of three or more digits: such a number can take hours
    | (?<!\\)\b[a-z]{2}  # a word, not a command such as \sqrt: "no" would be n * o, which equals "on"
    """,
    re.IGNORECASE | re.VERBOSE,
)


def read(text):
    """Return a number as grpo.py reads it; other answers are left to math-verify, without dollar signs around them."""
    value, _ = grpo.parse_answer(text)
    return value if isinstance(value, Fraction) else text.strip().removesuffix(".").strip("$")


def is_correct(completion, answer):
    """Return whether the strict rule accepts the answer, or whether it is a formula that math-verify accepts."""
    if STRICT(completion, answer):
        return True
    gold = read(grpo.extract_answer(str(answer)) or str(answer))
    given = read(grpo.extract_answer(completion) or "")
    if isinstance(gold, Fraction) or UNSAFE.search(f"{gold} {given}"):
        return False
    formulas = [parse(f"${text}$", parsing_timeout=SECONDS) for text in (gold, given)]
    return verify(*formulas, timeout_seconds=SECONDS)


if __name__ == "__main__":
    grpo.is_correct = is_correct
    grpo.main(grpo.parse_args())
