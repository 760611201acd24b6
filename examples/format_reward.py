"""Run grpo.py with the rewards of R1-Zero: accuracy and format, both checked by rules.

    python examples/format_reward.py
    python examples/format_reward.py --model Qwen/Qwen2.5-0.5B --dataset openai/gsm8k:main --system-prompt \
        "Think between <think> and </think>, and then put your final answer within \\boxed{}."

It takes the flags of grpo.py. A right answer earns 0.8, and the format 0.2. A completion has the format if it is one
thought between <think> and </think>, followed by something else. metrics.jsonl has the mean of each part, such as
reward/format and eval/reward/format. eval/accuracy only counts is_correct.

DeepSeek-AI, "DeepSeek-R1: Incentivizing Reasoning Capability in LLMs via Reinforcement Learning" (2025), section 2.2.2
https://arxiv.org/abs/2501.12948v1. The paper starts from a base model and does not say how it weights the two rewards.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpo

FORMAT = re.compile(r"\s*<think>(?:(?!</?think>).)+</think>(?:(?!</?think>).)*\S\s*", re.DOTALL)


def has_format(completion):
    """Return whether a completion is one thought between tags, followed by an answer."""
    return FORMAT.fullmatch(completion) is not None


def score_completions(completions, rows, accuracy_weight=0.8, format_weight=0.2):
    """Return the reward of each completion as two weighted parts; the reward is their sum."""
    scores = []
    for completion, row in zip(completions, rows):
        right = grpo.is_correct(completion, row["answer"])
        scores.append({"accuracy": accuracy_weight * right, "format": format_weight * has_format(completion)})
    return scores


grpo.score_completions = score_completions

if __name__ == "__main__":
    grpo.main(grpo.parse_args())
