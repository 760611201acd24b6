"""Precise instruction following: each prompt has one constraint that a program checks, and GRPO learns to meet it.

Zhou et al., "Instruction-Following Evaluation for Large Language Models" (2023), has constraints of this kind
https://arxiv.org/abs/2311.07911v1
Lambert et al., "Tulu 3: Pushing Frontiers in Open Language Model Post-Training" (2024), trains on them
https://arxiv.org/abs/2411.15124v1

The data, data/constraints, has eight kinds of constraints; one of them is only in the held-out rows. The reward is 1 if
the completion meets the constraint and does not just repeat the prompt, otherwise 0. Accuracy counts the same.

    python models/smollm2/make.py ...                              (once: see models/smollm2/README.md)
    python examples/instructions.py --model models/smollm2
    python examples/instructions.py gspo --model models/smollm2    (another script: any that samples, except PPO)

The defaults SIZES and ADDED are for this model on two cores with 12 GB of memory.
"""

import importlib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Settings for SmolLM2-135M-Instruct. A flag given by hand comes later and wins.
SIZES = [f"--dataset={ROOT / 'data' / 'constraints'}", "--system-prompt=", "--eval-prompts=64"]
SIZES += ["--max-prompt-length=160", "--max-completion-length=64", "--rollout-batch-size=128"]
SIZES += ["--num-steps=20", "--learning-rate=5e-5", "--warmup-steps=0"]
SIZES += ["--prompts-per-step=16", "--minibatch-size=64", "--microbatch-tokens=2048"]
ADDED = {"grpo": ["--kl-coef=0"], "grpo_process": ["--kl-coef=0"], "gkd": ["--prompts-per-step=64"]}


def words_of(text):
    return re.findall(r"[\w'’-]+", text.lower())


def meets(text, kind, value):
    """Return whether a text meets a constraint; data/constraints/make.py has their wording."""
    if kind == "at most":
        return len(words_of(text)) <= value
    if kind == "include":
        return re.search(rf"\b{value}\b", text.lower()) is not None
    if kind == "lowercase":
        return text == text.lower()
    if kind == "end":
        return text.endswith(value)
    if kind == "quotes":
        return text.startswith('"') and text.endswith('"')
    if kind == "bullets":
        points = [tuple(words_of(point)) for point in re.findall(r"(?m)^\* +(\S.*)", text)]
        return len(points) == len(set(points)) == value
    if kind == "no commas":
        return "," not in text
    if kind == "begin":
        return re.match(rf"{value}\b", text) is not None
    raise ValueError(f"unknown kind of constraint: {kind}")


def is_own_answer(text, instruction, constraint):
    """Return whether a text has three words that the constraint lacks, and repeats neither part of the prompt."""
    copied = any(part.lower().rstrip(".") in text.lower() for part in (instruction, constraint))
    return not copied and len({*words_of(text)} - {*words_of(constraint)}) >= 3


def is_correct(completion, answer):
    """Return whether a completion meets the constraint of its row with an answer of its own."""
    row = json.loads(answer)
    text = completion.strip()
    return is_own_answer(text, row["instruction"], row["constraint"]) and meets(text, row["kind"], row["value"])


def main():
    name = "grpo"
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        name = sys.argv.pop(1)
    script = importlib.import_module(name)
    script.is_correct = is_correct
    flags = SIZES + ADDED.get(name, [])
    if name in ("reinforce", "gkd"):  # they make one update per rollout
        flags.remove("--minibatch-size=64")
    if not any(word.startswith("--resume") for word in sys.argv):  # a run keeps its own
        sys.argv[1:1] = flags
    script.main(script.parse_args())


if __name__ == "__main__":
    main()
