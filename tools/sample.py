"""Sample completions from a model, print and reward them, and make training data of them.

    python tools/sample.py --model path/to/model --prompt "What is 17 * 3?" --prompt "What is 3 * 17?"
    python tools/sample.py --model runs/mine/checkpoint-000020 --num-prompts 8

It takes --script and all flags of that script, as tools/evaluate.py does, which measures accuracy and pass@k. Prompts
given with --prompt have no answers, so they get no rewards.

--keep right keeps each prompt's distinct completions, with an environment's replies, of at least --min-reward.
--keep pairs makes pairs of such a completion (chosen) and a wrong one (rejected), each used at most once; none cut off:

    python tools/sample.py --split train --num-prompts 512 --keep right --out right.jsonl
    python sft.py --model models/tiny --tiny --dataset right.jsonl --num-steps 36 --warmup-steps 4 --learning-rate 3e-4
    python tools/sample.py --split train --num-prompts 512 --keep pairs --out pairs.jsonl
    python dpo.py --dataset pairs.jsonl
"""

import json
import os
import random
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent))

from datasets import Dataset
from evaluate import complete, load_model, load_split, make_parser, new_path, read_flags
from tqdm import tqdm


def parse_args():
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--prompt", action="append", help="a prompt of your own; you can give several")
    add("--num-prompts", type=int, help="how many rows of the split to use (default: all)")
    add("--num-samples", type=int, default=4, help="completions per prompt (default: 4)")
    add("--show", type=int, default=8, help="how many prompts are printed (default: 8)")
    add("--keep", choices=("all", "right", "pairs"), default="all", help="which completions to write (default: all)")
    add("--min-reward", type=float, default=1.0, help="a completion with at least this reward is right (default: 1)")
    add("--per-prompt", type=int, help="maximum rows to keep per prompt, drawn with --seed (default: all)")
    return read_flags(parser)


def with_system(prompt, system_prompt):
    """Return the prompt with the system message of the sampling, so that sft.py trains with it."""
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if not system_prompt or messages[0]["role"] == "system":
        return prompt
    return [{"role": "system", "content": system_prompt}, *messages]


def keep_rows(prompt, completions, given, lot):
    """Return the rows to keep of one prompt's completions: tuples of text, reward, and whether it was cut off."""
    if given.keep == "all":
        return [{"prompt": prompt, "completion": text, "reward": reward} for text, reward, _ in completions]
    # Leave out completions that were cut off, because training would add a stop token. Equal texts count once.
    rewards = {text: reward for text, reward, truncated in completions if text.strip() and not truncated}
    right = [text for text, reward in rewards.items() if reward >= given.min_reward]
    wrong = [text for text, reward in rewards.items() if reward < given.min_reward]
    lot.shuffle(right)
    lot.shuffle(wrong)
    rows = [{"prompt": prompt, "completion": text, "reward": rewards[text]} for text in right]
    if given.keep == "pairs":
        rows = [{"prompt": prompt, "chosen": text, "rejected": other} for text, other in zip(right, wrong)]
    return rows[: given.per_prompt]


def show(prompt, completions):
    """Print a prompt, and its completions with their rewards."""
    tqdm.write(prompt if isinstance(prompt, str) else prompt[-1]["content"])
    for text, reward, truncated in completions:
        label = "-" if reward is None else f"{reward:.2f}"
        tqdm.write(f"{label:>6}  " + text.replace("\n", "\n" + " " * 8) + " [cut off]" * truncated)


def main(parsed):
    given, script, args = parsed
    sampler, tokenizer = load_model(script, args)
    if given.prompt:
        answers = [""] * len(given.prompt)  # which are never right
        rows = script.read_rows(Dataset.from_dict({"prompt": given.prompt, "answer": answers}), args, tokenizer)
    else:
        rows = load_split(script, args, tokenizer, given.split)[: given.num_prompts]
    count = given.num_samples if args.temperature else 1  # greedy completions would all be the same
    lot, kept, rewards, cut_off = random.Random(args.seed), [], [], []
    path = new_path(given.out, "samples")
    with open(f"{path}.unfinished", "w") as file:
        for part, texts, truncated, scores in complete(script, sampler, tokenizer, rows, count, args.temperature, args):
            if given.prompt:
                scores = [None] * len(part)
            elif scores is None:
                scores = script.score_completions(texts, part)
            scores = [sum(score.values()) if isinstance(score, dict) else score for score in scores]
            rewards += scores
            cut_off += truncated
            for start in range(0, len(part), count):
                completions = list(zip(texts, scores, truncated))[start : start + count]
                prompt = with_system(part[start]["prompt"], args.system_prompt)
                if len(kept) < given.show:
                    show(part[start]["prompt"], completions)
                kept.append(keep_rows(prompt, completions, given, lot))
                file.writelines(json.dumps(row) + "\n" for row in kept[-1])
    os.replace(file.name, path)  # a file that is there is whole
    print(f"written: {path}, {sum(map(len, kept))} rows; {kept.count([])} of {len(kept)} prompts gave none")
    print(f"{len(rewards)} completions, {sum(cut_off)} of them cut off")
    if not given.prompt:
        print(f"mean reward {fmean(rewards):.3f}")


if __name__ == "__main__":
    main(parse_args())
