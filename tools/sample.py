"""Sample completions from a model as grpo.py does, and print and save them with their rewards.

    python tools/sample.py --model runs/sft/checkpoint-002200 --tiny --temperature 0
    python tools/sample.py --model path/to/model --prompt "What is 17 * 3?" --prompt "What is 3 * 17?"
    python tools/sample.py --model runs/tools/checkpoint-000030 --tiny --calculator --prompt "17+58+36="

The tool uses the defaults, chat templates, stop tokens and rewards of grpo.py. As there, a checkpoint of the bundled
model needs --tiny. Without --prompt and --dataset, it reads prompts from standard input, one per line. If standard
input is a terminal or empty, it uses the default dataset. Your own prompts have no answers and so no rewards, and their
completions are only saved if you give --out. With --calculator, the defaults are those of grpo_tools.py, its tool
replies while the model writes, and its replies are printed between « and ». A completion that reaches
--max-completion-length is marked with [cut off].

--keep right keeps, for each prompt, the distinct completions whose reward is at least --min-reward. --keep pairs makes
pairs of such a completion (chosen) and a wrong one (rejected), and uses each completion at most once. Completions that
were cut off are left out. Use --keep right for rejection sampling, and --keep pairs for preference data:

    python tools/sample.py --split train --keep right --out right.jsonl
    python sft.py --model models/tiny --tiny --dataset right.jsonl --num-steps 36 --warmup-steps 4 --learning-rate 3e-4
    python tools/sample.py --split train --keep pairs --out pairs.jsonl
    python dpo.py --dataset pairs.jsonl
"""

import argparse
import json
import math
import os
import random
import sys
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as in the scripts

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import AutoTokenizer

import grpo
import grpo_tools

# Flags of grpo.py, with its defaults.
SETTINGS = {"model": str, "dataset": str, "system_prompt": str, "max_prompt_length": int, "max_completion_length": int}
SETTINGS |= {"eval_prompts": int, "seed": int, "precision": str}


def parse_args(line=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--prompt", action="append", default=[], help="a prompt of your own; you can give several")
    add(
        "--split",
        choices=("test", "train"),
        default="test",
        help="which rows of the dataset to use (default: test, the held-out rows)",
    )
    add("--num-prompts", type=int, help="how many rows of the split to use (default: as --eval-prompts)")
    add("--num-samples", type=int, default=4, help="completions per prompt (default: 4)")
    add("--temperature", type=float, default=1.0, help="0 means one greedy completion (default: 1)")
    add("--rollout-batch-size", type=int, default=128, help="maximum completions sampled at once (default: 128)")
    add("--show", type=int, default=8, help="how many prompts of the dataset are printed (default: 8)")
    add(
        "--keep",
        choices=("all", "right", "pairs"),
        default="all",
        help="which completions to write to --out (default: all)",
    )
    add("--min-reward", type=float, default=1.0, help="a completion with at least this reward is right (default: 1)")
    add("--per-prompt", type=int, help="maximum rows to keep per prompt, drawn with --seed (default: all)")
    add("--out", help="new file for the kept rows (default: a new file in runs/)")
    add("--calculator", action="store_true", help="let the tool of grpo_tools.py reply while the model writes")
    add("--tiny", action="store_true", help="as in grpo.py: use the settings of the bundled model")
    for name, kind in SETTINGS.items():
        add(f"--{name.replace('_', '-')}", type=kind, help="as in grpo.py")
    given = parser.parse_args(line)
    for name, value in vars(given).items():
        least = int(name not in ("eval_prompts", "temperature", "show"))
        if (
            isinstance(value, int | float)
            and name not in ("seed", "min_reward", "calculator", "tiny")
            and not least <= value < math.inf
        ):
            raise SystemExit(f"--{name.replace('_', '-')} {value}: must be a finite number of at least {least}")
    if given.prompt and given.dataset:
        raise SystemExit("--prompt and --dataset: give only one of them")
    if given.out is not None and os.path.lexists(given.out):
        raise SystemExit(f"--out {given.out} exists already: choose another file")
    return given


def read_settings(script, given):
    """Return the settings of a script: those given, and its defaults for the others."""
    flags = {name: getattr(given, name) for name in (*SETTINGS, "rollout_batch_size")}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not None]
    before, sys.argv = sys.argv, ["sample.py", *["--tiny"] * given.tiny, *flags]
    try:
        return script.parse_args()
    finally:
        sys.argv = before


def load_rows(given, args, tokenizer):
    """Return rows in the form of load_rows: the given prompts, or rows of the split."""
    if given.prompt:
        for number, text in enumerate(given.prompt, 1):
            if not text.strip():
                raise SystemExit(f"prompt {number} is empty")
        rows = grpo.read_rows(Dataset.from_dict({"prompt": given.prompt}), args, tokenizer)
        read = {row["prompt"] for row in rows}
        for number, text in enumerate(given.prompt, 1):
            if text not in read:
                raise SystemExit(f"prompt {number}, {text[:60]!r}, is longer than --max-prompt-length")
        return rows
    if given.split == "test":
        args.eval_prompts = given.num_prompts or args.eval_prompts
    train, test = grpo.load_rows(args, tokenizer)
    if given.split == "test" and not test:
        raise SystemExit("--eval-prompts 0: no rows are held out; use --split train")
    return (test if given.split == "test" else train)[: given.num_prompts or args.eval_prompts or None]


def with_system(prompt, system_prompt):
    """Return the prompt with the system message of the sampling, so that sft.py trains with it."""
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if not system_prompt or messages[0]["role"] == "system":
        return prompt
    return [{"role": "system", "content": system_prompt}, *messages]


def mark_replies(tokenizer, batch):
    """Return the texts of a batch with the tool's tokens between « and », such as 36 - 12 =« 24»."""
    texts = []
    for ids, by_policy, by_tool in zip(batch["ids"], batch["completion_mask"], batch["tool_mask"]):
        written = by_policy + by_tool > 0
        by_tool, counts = by_tool[written].unique_consecutive(return_counts=True)
        pieces = [tokenizer.decode(piece, skip_special_tokens=True) for piece in ids[written].split(counts.tolist())]
        texts.append("".join(f"«{piece}»" if tool else piece for tool, piece in zip(by_tool, pieces)))
    return texts


def keep_rows(group, given, lot):
    """Return the rows to keep from the samples of one prompt."""
    prompt = with_system(group[0][0]["prompt"], given.system_prompt)
    if given.keep == "all":
        return [{"prompt": prompt, "completion": text, "reward": reward} for _, text, reward, _ in group]
    # Leave out completions that were cut off, because training would add a stop token. Equal texts count once.
    rewards = {text: reward for _, text, reward, truncated in group if text.strip() and not truncated}
    right = [text for text, reward in rewards.items() if reward >= given.min_reward]
    wrong = [text for text, reward in rewards.items() if reward < given.min_reward]
    lot.shuffle(right)
    lot.shuffle(wrong)
    rows = [{"prompt": prompt, "completion": text, "reward": rewards[text]} for text in right]
    if given.keep == "pairs":
        rows = [{"prompt": prompt, "chosen": text, "rejected": other} for text, other in zip(right, wrong)]
    return rows[: given.per_prompt]


def summary(samples, n):
    """Return a line with means over all completions (n per prompt), and with pass@k if there are answers."""
    rows, texts, rewards, truncated = zip(*samples)
    words = [f"{len(texts) // n} prompts, {len(texts)} completions, truncated {sum(truncated) / len(texts):.3f}"]
    words.append("no answers, so no rewards" if None in rewards else f"mean reward {sum(rewards) / len(texts):.3f}")
    if rows[0]["answer"] is not None:
        right = [grpo.is_correct(text, row["answer"]) for row, text in zip(rows, texts)]
        words.append(f"accuracy {sum(right) / len(texts):.3f}")
        for k in (2**power for power in range(1, n.bit_length())):
            wrong = [math.comb(n - sum(right[i : i + n]), k) / math.comb(n, k) for i in range(0, len(texts), n)]
            words.append(f"pass@{k} {1 - sum(wrong) / len(wrong):.3f}")
    return ", ".join(words)


def score(texts, rows):
    """Return the rewards; exit if the rule of grpo.py lacks answers."""
    try:
        scores = grpo.score_completions(texts, rows)
    except ValueError as error:
        if rows[0]["answer"] is not None:
            raise
        raise SystemExit(f"{error} (docs/data.md shows how to sample with it)") from error
    return [float(sum(score.values()) if isinstance(score, dict) else score) for score in scores]


def main(given):
    if not given.prompt and given.dataset is None and sys.stdin and not sys.stdin.isatty():
        given.prompt = [line for line in sys.stdin.read().splitlines() if line.strip()]
    if given.prompt and given.keep != "all":
        raise SystemExit(f"--keep {given.keep}: your own prompts have no answers, so no completion is right")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    script = grpo_tools if given.calculator else grpo
    args = read_settings(script, given)
    given.system_prompt = args.system_prompt  # its default if none was given
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = load_rows(given, args, tokenizer)
    sampler = grpo.load_sampler(args, tokenizer, device)
    torch.manual_seed(args.seed % 2**63)
    n, samples, kept = given.num_samples if given.temperature else 1, [], []
    lot = random.Random(args.seed)
    shown = len(rows) if given.prompt else given.show
    size = max(1, args.rollout_batch_size // n)  # prompts at once
    out = given.out
    if not out and not given.prompt:
        Path("runs").mkdir(exist_ok=True)
        out = f"runs/samples__{args.seed}__{datetime.now():%Y%m%d-%H%M%S}.jsonl"
    file = open(f"{out}.unfinished" if out else os.devnull, "w")
    for start in tqdm(range(0, len(rows), size), unit="batch", disable=None):
        part = [row for row in rows[start : start + size] for _ in range(n)]
        batch, texts = script.sample_completions(sampler, tokenizer, part, given.temperature, args)
        printed = mark_replies(tokenizer, batch) if given.calculator else texts
        rewards = [None] * len(texts)
        if not given.prompt:
            rewards = score(texts, part)
        for row, text, shown_text, reward, truncated in zip(part, texts, printed, rewards, batch["truncated"].tolist()):
            if len(samples) < shown * n:
                if len(samples) % n == 0:
                    tqdm.write(row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"])
                label = "-" if reward is None else f"{reward:.2f}"
                tqdm.write(f"{label:>6}  " + shown_text.replace("\n", "\n" + " " * 8) + " [cut off]" * truncated)
            samples.append((row, text, reward, truncated))
            if len(samples) % n == 0:
                kept.append(keep_rows(samples[-n:], given, lot))
                file.writelines(json.dumps(row) + "\n" for row in kept[-1])
    file.close()
    if not any(kept):
        if out:
            os.remove(file.name)
        raise SystemExit(f"--keep {given.keep}: there are no rows to keep: {summary(samples, n)}")
    if out:
        os.rename(file.name, out)
        print(f"written: {out}")
    if given.keep != "all":
        print(f"{sum(map(len, kept))} rows, {kept.count([])} of {len(kept)} prompts gave none")
    print(summary(samples, n))


if __name__ == "__main__":
    main(parse_args())
