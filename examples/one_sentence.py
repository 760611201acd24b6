"""Format first: an instruction that a program can check, from an instruct model without a cold start.

Zhou et al., "Instruction-Following Evaluation for Large Language Models" (2023), whose instructions are of this kind
https://arxiv.org/abs/2311.07911v1

The system message asks for one sentence of at most 15 words with the word "because"; a completion that is that earns 1,
others a ninth for each of the three that they meet. No answers are needed. The share that meets all three is printed
for every rollout and every greedy evaluation.

    python models/smollm2/make.py ...                                        (once: see models/smollm2/README.md)
    python examples/one_sentence.py --model models/smollm2 --learning-rate 1e-5 --kl-coef 0
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

import grpo

WORD, MOST = "because", 15
ASK = f"Answer in one sentence of at most {MOST} words that has the word {WORD} in it."
DATASET = str(Path(__file__).resolve().parents[1] / "data" / "manners")  # instructions, whose answers are not read


def checks(completion):
    """Is it one sentence? Of so many words? With the word?"""
    words = re.findall(r"[\w'’-]+", completion.lower())
    return bool(re.fullmatch(r"\s*[A-Z\"'][^.!?\n]*[.!?][\"']?\s*", completion)), 0 < len(words) <= MOST, WORD in words


def score_completions(completions, _rows):
    """Rewards of completions; prints the share that meets everything (of this process's share)."""
    met = [sum(checks(completion)) for completion in completions]
    if grpo.dist.get_rank() == 0:
        tqdm.write(f"{sum(count == 3 for count in met) / len(met):.3f} of {len(met)} completions meet all three")
    return [1.0 if count == 3 else count / 9 for count in met]


grpo.score_completions = score_completions

if __name__ == "__main__":
    if not any(word.startswith("--resume") for word in sys.argv):  # a run keeps its own
        sys.argv[1:1] = ["--dataset", DATASET, "--system-prompt", ASK]  # of a flag that comes twice the last one counts
    grpo.main(grpo.parse_args())
