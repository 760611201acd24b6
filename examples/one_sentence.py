"""Train an instruct model to follow a format that a program can check, without a cold start.

    python models/smollm2/make.py ...                                        (once: see models/smollm2/README.md)
    python examples/one_sentence.py --model models/smollm2 --kl-coef 0

It takes the flags of grpo.py. The defaults SIZES are for this model on two cores with 8 GB of memory.

The system message asks for one sentence of at most 15 words with the word "because". A completion that meets all three
conditions earns 1. Any other completion earns 1/9 for each condition that it meets. The data need no answers. The
script prints the share of completions that meet all three conditions, for every rollout and every greedy evaluation.
SmolLM2-135M ends with answers such as "Because.", which earn 1 (docs/real_model.md).

Zhou et al., "Instruction-Following Evaluation for Large Language Models" (2023), has instructions of this kind
https://arxiv.org/abs/2311.07911v1
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

import grpo

WORD, MOST = "because", 15
ASK = f"Answer in one sentence of at most {MOST} words that has the word {WORD} in it."
DATASET = str(Path(__file__).resolve().parents[1] / "data" / "manners")  # only its instructions are used
SIZES = "--num-steps 20 --prompts-per-step 16 --minibatch-size 64 --microbatch-tokens 2048 --eval-prompts 64"
SIZES += " --max-prompt-length 160 --max-completion-length 64 --learning-rate 1e-5"


def checks(completion):
    """Return whether a completion is one sentence, whether it is short enough, and whether it has the word."""
    words = re.findall(r"[\w'’-]+", completion.lower())
    return bool(re.fullmatch(r"\s*[A-Z\"'][^.!?\n]*[.!?][\"']?\s*", completion)), 0 < len(words) <= MOST, WORD in words


def score_completions(completions, _rows):
    """Return the rewards, and print the share of this process's completions that meet all three conditions."""
    met = [sum(checks(completion)) for completion in completions]
    share = sum(count == 3 for count in met) / len(met)
    if grpo.RANK == 0:
        tqdm.write(f"{share:.3f} of {len(met)} completions meet all three conditions")
    return [1.0 if count == 3 else count / 9 for count in met]


grpo.score_completions = score_completions

if __name__ == "__main__":
    if not any(word.startswith("--resume") for word in sys.argv):  # a resumed run keeps its own
        # Flags given by hand come later and win.
        sys.argv[1:1] = ["--dataset", DATASET, "--system-prompt", ASK, *SIZES.split()]
    grpo.main(grpo.parse_args())
