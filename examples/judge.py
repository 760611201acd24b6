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
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as in the scripts

import torch
from transformers import AutoTokenizer

import dpo

QUESTION = "{}\n\nAnswer A:\n{}\n\nAnswer B:\n{}\n\nWhich of the two answers to the above is better? Say only A or B."


def read_pairs(given, rows, _args, tokenizer):
    """Return pairs with the comparisons to make; drop those without prompt or difference, or with a long comparison.

    A comparison is a row of dpo.py. There is one with --by logprob, and one in each order with --by chat.
    """
    stop_id = dpo.find_turn_end(tokenizer) or tokenizer.eos_token_id
    prompt_column = next((name for name in ("prompt", "question", "problem") if name in rows.column_names), None)
    a, b = [tokenizer(letter, add_special_tokens=False)["input_ids"] for letter in "AB"]
    if given.by == "chat" and a == b:
        sys.exit("--by chat needs a tokenizer that has the letters A and B")
    pairs = []
    for row in rows:
        chats = [dpo.find_chat(row.get(prompt_column), row[side], tokenizer) for side in ("chosen", "rejected")]
        prompt, other_prompt = [chat[:-1] for chat in chats]
        if not prompt or prompt != other_prompt or chats[0] == chats[1]:
            continue
        texts = [chat[-1]["content"] for chat in chats]
        if given.by == "logprob":
            (prompt_ids, chosen_ids), (_, rejected_ids) = [dpo.encode_chat(tokenizer, chat, stop_id) for chat in chats]
            asked = [{"prompt_ids": prompt_ids, "chosen_ids": chosen_ids, "rejected_ids": rejected_ids}]
        else:
            said = prompt[0]["content"]
            if len(prompt) > 1:
                said = "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
            asked = []
            for order in (texts, texts[::-1]):
                chat = dpo.as_messages(QUESTION.format(said, *order), "user") + dpo.as_messages("A", "assistant")
                prompt_ids, _ = dpo.encode_chat(tokenizer, chat, stop_id)
                asked.append({"prompt_ids": prompt_ids, "chosen_ids": a, "rejected_ids": b})
        if max(sum(map(len, comparison.values())) for comparison in asked) <= given.max_length:
            pairs.append({"prompt": prompt, "texts": texts, "kind": row.get("kind"), "asked": asked})
    return pairs


@torch.no_grad()
def compare(policy, rows):
    """Return the mean log-probability per token of each chosen completion minus that of the rejected one: (N,)."""
    margins = []
    for start in range(0, len(rows), 8):
        batch = dpo.make_batch(rows[start : start + 8], policy.model.device)
        chosen, rejected = dpo.pair_logprobs(policy, batch)
        margins.append(chosen / batch["chosen_mask"].sum(1) - rejected / batch["rejected_mask"].sum(1))
    return torch.cat(margins).cpu()


def main(given):
    if Path(given.out).exists():
        sys.exit(f"--out {given.out} exists already: choose another file")
    args = dpo.Args(model=given.model, dataset=given.dataset, eval_prompts=0, precision="float32")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dpo.read_rows = partial(read_pairs, given)
    rows, _ = dpo.load_rows(args, tokenizer)
    policy = dpo.load_policy(args, tokenizer, device)
    margins = compare(policy, [comparison for row in rows for comparison in row["asked"]])
    margins = margins.view(len(rows), -1)  # (N, 1), by chat (N, 2)
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
    add("--model", default=dpo.TINY.model, help="folder or hub name of the judge (default: models/tiny)")
    add("--dataset", default=dpo.TINY.dataset, help="pairs in a form that dpo.py reads (default: data/preferences)")
    add("--out", required=True, help="new file of rows {prompt, chosen, rejected}; ties are left out")
    add("--max-length", type=int, default=2048, help="maximum tokens of a comparison (default: 2048)")
    main(parser.parse_args())
