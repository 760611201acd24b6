"""What a model does on the embedded test prompts before any reinforcement learning.

    python benchmark/base_model.py [MODEL]

Greedy accuracy; and over 8 samples per prompt at temperature 1: accuracy, how many show their work, and how often the
answer is right where they do and where they do not.
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import grpo  # noqa: E402


def main(name):
    tokenizer = grpo.load_tokenizer(name)
    model, stop_ids = grpo.load_model(name, tokenizer)
    args = grpo.resolve_args(grpo.Args(model=name))
    _, prompts, _ = grpo.load_prompts(args.dataset, tokenizer, "", args.max_prompt_length, args.eval_prompts)
    torch.manual_seed(0)
    for label, num_samples, temperature in (("greedy", 1, 0.0), ("temperature 1", 8, 1.0)):
        batch, texts = grpo.rollout(model, tokenizer, prompts, num_samples, temperature, stop_ids, args)
        right = batch["rewards"] == 1
        works = torch.tensor([text.startswith("<think>") for text in texts])
        print(f"{label}: {len(texts)} completions of {len(prompts)} prompts")
        print(f"  right                    {right.float().mean():.3f}")
        print(f"  shows its work           {works.float().mean():.3f}")
        print(f"  right where it does      {right[works].float().mean():.3f}")
        print(f"  right where it does not  {right[~works].float().mean():.3f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(ROOT / "models" / "tiny"))
