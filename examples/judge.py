"""Let a model label preference pairs (AI feedback), as training data for dpo.py and reward_model.py.

    python examples/judge.py --dataset data/preferences/train.jsonl --out runs/judge/train.jsonl
    python examples/judge.py --by chat --model path/to/model --dataset path/to/pairs.jsonl --out runs/chat.jsonl

The script writes rows {prompt, chosen, rejected} to --out and prints how often the model agrees with the given labels.
With --by logprob, the completion with the higher mean log-probability per token wins. With --by chat, the script asks
the model whether A or B is better, in both orders, and averages the probabilities, as in Lee et al. 2023
(https://arxiv.org/abs/2309.00267v3).
"""

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as in the scripts

import torch
from transformers import AutoTokenizer

import dpo

QUESTION = "{}\n\nAnswer A:\n{}\n\nAnswer B:\n{}\n\nWhich of the two answers to the above is better? Say only A or B."


def load_pairs(given, tokenizer):
    """Return the pairs of the dataset; print how many were dropped, and why."""
    pairs, dropped = [], Counter()
    rows, _ = dpo.load_splits(given.dataset, 0)  # nothing is held out
    for row in rows:
        pair, reason = read_pair(row, tokenizer, given)
        if reason:
            dropped[reason] += 1
        else:
            pairs.append(pair)
    print(f"{len(pairs)} pairs of {given.dataset}, dropped: {dict(dropped)}")
    return pairs


def read_pair(row, tokenizer, given):
    """Return a pair with the comparisons to make, and ""; or None, and why the pair is dropped.

    A comparison is a pair in the form of dpo.py. There is one with --by logprob, and one in each order with --by chat.
    """
    if row.get("tools"):
        return None, "with tools, which the judge does not read"
    prompt, *completions = dpo.split_pair(row, tokenizer.chat_template is not None)
    texts = [completion.get("content", "") for completion in completions if prompt]
    if not prompt or not all(map(str.strip, texts)) or texts[0] == texts[1]:
        return None, "without a prompt and two different completions"
    asked = []
    if given.by == "logprob":
        prompt_ids = dpo.encode_prompt(tokenizer, prompt, None)
        a, b = [dpo.encode_completion(tokenizer, prompt_ids, [*prompt, message], None) for message in completions]
        if a is None or b is None:
            return None, "whose prompt reads differently when a completion follows"
        asked.append({"prompt_ids": prompt_ids, "chosen_ids": a, "rejected_ids": b})
    else:
        said = prompt[0]["content"]
        if len(prompt) > 1:
            said = "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
        a, b = (tokenizer(letter, add_special_tokens=False)["input_ids"] for letter in "AB")
        for order in (texts, texts[::-1]):
            chat = [{"role": "user", "content": QUESTION.format(said, *order)}]
            prompt_ids = dpo.encode_prompt(tokenizer, chat, None)
            asked.append({"prompt_ids": prompt_ids, "chosen_ids": a, "rejected_ids": b})
    if a == b or max(sum(map(len, pair.values())) for pair in asked) > given.max_length:
        return None, f"with more than {given.max_length} tokens, or with the same tokens twice"
    return {"prompt": prompt, "texts": texts, "kind": row.get("kind"), "asked": asked}, ""


@torch.no_grad()
def compare(policy, pairs):
    """Return the mean log-probability per token of each chosen completion minus that of the rejected one: (N,)."""
    margins = []
    for start in range(0, len(pairs), 8):
        part = pairs[start : start + 8]
        lengths = torch.tensor([[len(pair["chosen_ids"]), len(pair["rejected_ids"])] for pair in part])
        means = dpo.pair_logprobs(policy, part).cpu() / lengths  # (n, 2)
        margins.append(means[:, 0] - means[:, 1])
    return torch.cat(margins)


def main(given):
    Path(given.out).exists() and sys.exit(f"--out {given.out} exists already: choose another file")
    device = dpo.init_ranks()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    rows = load_pairs(given, tokenizer)
    if not rows:
        sys.exit("nothing to judge: all pairs were dropped (--by chat needs a tokenizer that has the letters A and B)")
    asked = [pair for row in rows for pair in row["asked"]]
    model = dpo.load_model(given.model, tokenizer)
    longest = max(dpo.count_tokens(pair) // 2 for pair in asked)  # a pair is two texts in the batch
    dpo.check_model(model, dpo.Args(max_prompt_length=longest, max_completion_length=0))
    margins = compare(dpo.LogprobModel(model.to(device)), asked).view(len(rows), -1)  # (N, 1), by chat (N, 2)
    if given.by == "chat":  # log odds of A: first with the chosen completion as A, then as B
        as_a = (margins > 0).float().mean(1)  # the share of A in the two answers
        biased = (as_a != 0.5).sum()
        print(f"position bias: {as_a.mean():.3f} of answers are A, {biased} pairs get the same letter in both orders")
        margins = margins[:, :1] - margins[:, 1:]  # positive if the mean probability of the chosen one is over 1/2
    decided = [(row, margin) for row, margin in zip(rows, margins[:, 0].tolist()) if margin != 0]
    pairs = [{"prompt": r["prompt"], "chosen": r["texts"][m < 0], "rejected": r["texts"][m > 0]} for r, m in decided]
    Path(given.out).parent.mkdir(parents=True, exist_ok=True)
    Path(given.out).write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    print(f"written: {given.out}, {len(decided)} pairs. Share of them in which the judge agrees with the label:")
    for kind in ("all", *sorted({row["kind"] for row in rows} - {None})):
        agrees = [margin > 0 for row, margin in decided if kind in ("all", row["kind"])]
        print(f"{sum(agrees) / max(1, len(agrees)):.3f} of {len(agrees)}  {kind}")


if __name__ == "__main__":
    add = (parser := argparse.ArgumentParser(description="Let a model label preference pairs.")).add_argument
    add("--by", choices=("logprob", "chat"), default="logprob", help="how the model judges (default: logprob)")
    add("--model", default=dpo.Args.model, help="folder or hub name of the judge (default: models/tiny)")
    add("--dataset", default=dpo.Args.dataset, help="pairs in a form that dpo.py reads (default: data/preferences)")
    add("--out", required=True, help="new file of rows {prompt, chosen, rejected}; ties are left out")
    add("--max-length", type=int, default=2048, help="maximum tokens of a comparison (default: 2048)")
    main(parser.parse_args())
