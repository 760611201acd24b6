"""Measure how long reward_fn takes on 100 kB of hostile text, to check that its time stays linear.

    python benchmark/reward_time.py

The program prints the slowest of five calls for each kind of text, and the slowest of all calls, in milliseconds.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpo

PATTERNS = {
    "open braces": "{",
    "unclosed boxes": "\\boxed{",
    "empty boxes": "\\boxed{}",
    "backslashes": "\\",
    "spaces": " ",
    "hashes": "#",
    "opening tags of thoughts": "<think>",
    "closing tags of thoughts": "</think>",
    "empty thoughts": "<think></think>",
    "answer tags": "<answer>",
    "digits": "1",
    "thousands": ",111",
    "dollars": "$ ",
    "asterisks": "*",
    "fractions": "\\frac{1}{2}",
    "words": "\\text{a} ",
}


def main():
    slowest = 0.0
    for name, pattern in PATTERNS.items():
        body = (pattern * 100_000)[:100_000]
        for prefix in ("", "\\boxed{", "#### ", "<answer>"):
            for text in (prefix + body, prefix + body + "}</answer>"):
                seconds = []
                for _ in range(5):
                    started = time.perf_counter()
                    grpo.reward_fn(text, "5")
                    seconds.append(time.perf_counter() - started)
                slowest = max(slowest, max(seconds))
                print(f"{1000 * max(seconds):8.2f} ms  {prefix or '(no prefix)'} + {name}")
    print(f"{1000 * slowest:8.2f} ms  slowest of all")


if __name__ == "__main__":
    main()
