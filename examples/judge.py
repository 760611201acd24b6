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
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoTokenizer

import dpo

QUESTION = "{}\n\nAnswer A:\n{}\n\nAnswer B:\n{}\n\nWhich of the two answers to the above is better? Say only A or B."


def read_pair(row, tokenizer, given):
    """Return a list of one pair with the comparisons to make, or of one reason to drop the pair.

    A comparison is a pair in the form of dpo.py. There is one with --by logprob, and one in each order with --by chat.
    A pair is dropped if it has no prompt, if a completion is empty, if both completions (with --by chat: A and B) have
    the same tokens, or if a comparison has more than --max-length tokens.
    """
    prompt, *texts = dpo.split_pair(row, tokenizer.chat_template is not None)
    if not prompt or not all(map(str.strip, texts)) or texts[0] == texts[1]:
        return ["without a prompt and two different completions"]
    messages, asked = dpo.as_messages(prompt, ""), []
    if given.by == "logprob":
        (prompt_ids, a), (_, b) = (dpo.encode_completion(tokenizer, messages, text) for text in texts)
        asked.append({"prompt_ids": prompt_ids, "chosen_ids": a, "rejected_ids": b})
    else:
        said = prompt
        if isinstance(prompt, list):
            said = "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
        a, b = (tokenizer(letter, add_special_tokens=False)["input_ids"] for letter in "AB")
        for order in (texts, texts[::-1]):
            prompt_ids = dpo.encode_prompt(tokenizer, dpo.as_messages(QUESTION.format(said, *order), ""))
            asked.append({"prompt_ids": prompt_ids, "chosen_ids": a, "rejected_ids": b})
    if a == b or max(sum(map(len, pair.values())) for pair in asked) > given.max_length:
        return [f"more than {given.max_length} tokens, or the same tokens twice"]
    return [{"prompt_ids": prompt_ids, "prompt": prompt, "texts": texts, "kind": row.get("kind"), "asked": asked}]


@torch.no_grad()
def compare(policy, pairs):
    """Return the mean log-probability per token of each chosen completion minus that of the rejected one: (N,)."""
    margins = []
    for start in range(0, len(pairs), 8):
        part = dpo.collate_pairs(pairs[start : start + 8], policy.model.device)
        logprobs = dpo.pair_logprobs(policy, part | {"rows": range(len(part["lengths"]))})
        chosen, rejected = logprobs / part["completion_mask"].sum(2).T  # (2, n)
        margins.append(chosen - rejected)
    return torch.cat(margins).cpu()


def main(given):
    Path(given.out).exists() and sys.exit(f"--out {given.out} exists already: choose another file")
    _, _, device = dpo.init_ranks()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    args = dpo.Args(dataset=given.dataset, eval_prompts=0, num_steps=0)  # nothing is held out
    rows, _ = dpo.load_rows(args, lambda row: read_pair(row, tokenizer, given))
    if not rows:
        sys.exit("nothing to judge: all pairs were dropped (--by chat needs a tokenizer that has the letters A and B)")
    asked = [pair for row in rows for pair in row["asked"]]
    model = dpo.load_model(given.model, tokenizer)
    dpo.check_context(model, max(sum(map(len, pair.values())) for pair in asked))
    dpo.check_logprobs(model, asked[0]["prompt_ids"] + asked[0]["chosen_ids"])
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
