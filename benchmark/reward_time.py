"""How long reward_fn takes on 100 kB of hostile text: it must be linear. Prints the slowest of 5 calls per kind, in ms.

python benchmark/reward_time.py
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpo

PATTERNS = {
    "open braces": "{",
    "boxes never closed": "\\boxed{",
    "empty boxes": "\\boxed{}",
    "backslashes": "\\",
    "blanks": " ",
    "hashes": "#",
    "thoughts opened": "<think>",
    "thoughts closed": "</think>",
    "thoughts": "<think></think>",
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
                print(f"{1000 * max(seconds):8.2f} ms  {prefix or '(nothing)'} + {name}")
    print(f"{1000 * slowest:8.2f} ms  slowest")


if __name__ == "__main__":
    main()
