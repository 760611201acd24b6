"""Evaluate a model on the bundled test prompts before any reinforcement learning.

    python benchmark/base_model.py [MODEL [DATASET [LENGTH]]]          (default: models/tiny data/addition 48)

LENGTH is the maximum length of a completion in tokens. The program samples every prompt once with greedy decoding and
eight times at temperature 1. For both it prints the accuracy, the share of completions that show their work, and the
accuracy with and without shown work. For the eight samples it also prints pass@4.
"""

import math
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as in the scripts

import torch
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ablations import parse  # noqa: E402

import grpo  # noqa: E402


def main(name=grpo.Args.model, dataset=grpo.Args.dataset, length=48):
    grpo.init_ranks()
    args = parse(grpo, "--model", name, "--dataset", dataset, "--tiny", "--max-completion-length", length)
    tokenizer = AutoTokenizer.from_pretrained(name)
    _, prompts = grpo.load_rows(args, tokenizer)
    policy = grpo.LogprobModel(grpo.load_model(name, tokenizer))
    torch.manual_seed(0)
    for label, num_samples, temperature in (("greedy", 1, 0.0), ("temperature 1", 8, 1.0)):
        repeated = [prompt for prompt in prompts for _ in range(num_samples)]
        _, texts = grpo.sample_completions(policy, tokenizer, repeated, temperature, args)
        right = torch.tensor(grpo.score_completions(texts, repeated)) == 1
        works = torch.tensor([text.startswith("<think>") for text in texts])
        print(f"{label}: {len(texts)} completions of {len(prompts)} prompts")
        print(f"  accuracy                     {right.float().mean():.3f}")
        if num_samples > 4:
            wrong = num_samples - right.view(-1, num_samples).sum(1)  # per prompt
            all_wrong = [math.comb(int(n), 4) / math.comb(num_samples, 4) for n in wrong]
            print(f"  pass@4                       {1 - sum(all_wrong) / len(all_wrong):.3f}")
        print(f"  share that shows its work    {works.float().mean():.3f}")
        print(f"  accuracy with shown work     {right[works].float().mean():.3f}")
        print(f"  accuracy without shown work  {right[~works].float().mean():.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
