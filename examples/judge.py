"""AI feedback: a model says which completion of a pair is better; dpo.py and reward_model.py train on what it said.

    python examples/judge.py --dataset data/preferences/train.jsonl --out runs/judge/train.jsonl
    python examples/judge.py --by chat --model path/to/model --dataset path/to/pairs.jsonl --out runs/chat.jsonl

By logprob: the completion of the higher mean log-probability per token. By chat: the model is asked, A or B, in both
orders, and the probabilities are averaged, as in Lee et al. 2023 (https://arxiv.org/abs/2309.00267v3).
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import dpo

QUESTION = "{}\n\nAnswer A:\n{}\n\nAnswer B:\n{}\n\nWhich of the two answers to the above is better? Say only A or B."


def read_pair(row, tokenizer, given):
    """Return a pair and what is asked about it, once or in both orders, in the form that dpo.py has pairs in."""
    prompt, *texts = dpo.split_pair(row, tokenizer.chat_template is not None)
    said = prompt if isinstance(prompt, str) else "\n\n".join(f"{t['role']}: {t['content']}" for t in prompt or [])
    prompts, ends, stop = [prompt], texts, [dpo.find_turn_end(tokenizer)]
    if given.by == "chat":
        prompts, ends, stop = [QUESTION.format(said, *order) for order in (texts, texts[::-1])], "AB", []
    a, b = (tokenizer(text, add_special_tokens=False)["input_ids"] + stop for text in ends)
    if not said or not all(map(str.strip, texts)) or texts[0] == texts[1] or a == b:
        return "no prompt, an empty answer, or two that are the same to the tokenizer, as may be A and B"
    asked = [{"prompt_ids": dpo.encode_prompt(tokenizer, p, ""), "chosen_ids": a, "rejected_ids": b} for p in prompts]
    if max(sum(map(len, pair.values())) for pair in asked) > given.max_length:
        return f"more than {given.max_length} tokens in all"
    return {"prompt": prompt, "texts": texts, "kind": row.get("kind"), "asked": asked}


@torch.no_grad()
def compare(policy, pairs, pad_id):
    """Mean log-probability per token of the chosen completion of every pair, less that of the rejected one: (N,)."""
    margins = []
    for start in range(0, len(pairs), 8):
        part = dpo.collate_pairs(pairs[start : start + 8], pad_id, policy.model.device)
        chosen, rejected = dpo.pair_logprobs(policy, part | {"rows": range(len(part["lengths"]))})
        margins.append(chosen / part["chosen_mask"].sum(1) - rejected / part["rejected_mask"].sum(1))
    return torch.cat(margins).cpu()


def main(given):
    Path(given.out).exists() and sys.exit(f"--out {given.out} exists: choose another")
    tokenizer = dpo.load_tokenizer(given.model)
    rows, _, report = dpo.load_rows(given.dataset, 0, lambda row: read_pair(row, tokenizer, given))
    model, asked = dpo.load_model(given.model, tokenizer)[0], [pair for row in rows for pair in row["asked"]]
    dpo.check_model(model, asked[0]["prompt_ids"], max(sum(map(len, pair.values())) for pair in asked))
    policy = dpo.LogprobModel(model.to("cuda" if torch.cuda.is_available() else "cpu"))
    margins = compare(policy, asked, tokenizer.pad_token_id or 0).view(len(rows), -1)  # (N, 1), by chat (N, 2)
    if given.by == "chat":  # log odds of A, first where the chosen completion is A, then where it is B
        as_a = (margins > 0).float().mean(1)  # the share of A in the two answers
        print(f"position bias: {as_a.mean():.3f} of answers are A, {(as_a != 0.5).sum()} pairs get one letter twice")
        margins = margins[:, :1] - margins[:, 1:]  # positive just where the mean probability of the chosen is over 1/2
    decided = [(row, margin) for row, margin in zip(rows, margins[:, 0].tolist()) if margin != 0]
    pairs = [{"prompt": r["prompt"], "chosen": r["texts"][m < 0], "rejected": r["texts"][m > 0]} for r, m in decided]
    Path(given.out).parent.mkdir(parents=True, exist_ok=True)
    Path(given.out).write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    print(f"{report[0]}; written: {given.out}, {len(decided)} pairs; the judge agrees with the label in")
    for kind in ("all", *sorted({row["kind"] for row in rows} - {None})):
        agrees = [margin > 0 for row, margin in decided if kind in ("all", row["kind"])]
        print(f"{sum(agrees) / max(1, len(agrees)):.3f} of {len(agrees)}  {kind}")


if __name__ == "__main__":
    add = (parser := argparse.ArgumentParser(description="Label pairs by a model's verdict.")).add_argument
    add("--by", choices=("logprob", "chat"), default="logprob", help="(default: logprob)")
    add("--model", default=dpo.MODEL, help="folder or hub name of the judge (default: models/tiny)")
    add("--dataset", default=dpo.DATASET, help="pairs as dpo.py takes them (default: data/preferences)")
    add("--out", required=True, help="file of prompt, chosen and rejected; ties are left out")
    add("--max-length", type=int, default=2048, help="tokens of all that is asked at once (default: 2048)")
    main(parser.parse_args())
