"""Measure greedy accuracy and pass@k of a model on held-out rows, with standard errors.

    python tools/evaluate.py --model runs/mine/checkpoint-000020 --samples 16
    python tools/evaluate.py --model path/to/model --dataset HuggingFaceH4/MATH-500::test --split all --samples 8
    python tools/evaluate.py --script my_reward.py --model path/to/model

The tool reads rows, samples and scores with the functions of a script: --script, by default grpo.py, or a file of yours
with is_correct, reward_fn, score_completions or Environment. It takes all flags of the script, with the same defaults;
for a checkpoint of a run, the settings of the run are the defaults, so that its greedy accuracy is the run's
eval/accuracy. The data set of a run of another script is not taken over, as it may have no answers.

pass@k is the probability that at least one of k samples is correct, by the unbiased estimator of Chen et al. (2021),
https://arxiv.org/abs/2107.03374v2, equation 1. Standard errors are over prompts. The completions are written to a file.
"""

import argparse
import importlib
import json
import os
import sys
from dataclasses import replace
from datetime import datetime
from math import comb, sqrt
from pathlib import Path
from statistics import fmean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")  # before torch, as in the scripts

import torch
import tyro
from tqdm import tqdm
from transformers import AutoTokenizer


def import_script(name):
    """Import a script by its name or path. A file without load_rows gives what it has to grpo.py or grpo_tools.py."""
    path = Path(name)
    if path.suffix == ".py":
        sys.path.insert(0, str(path.resolve().parent))
    script = importlib.import_module(path.stem)
    if hasattr(script, "load_rows"):
        return script
    base = importlib.import_module("grpo_tools" if hasattr(script, "Environment") else "grpo")
    edited = ("is_correct", "reward_fn", "score_completions", "Environment")
    own = [function for function in edited if hasattr(script, function)]
    if not own:
        raise SystemExit(f"{name} has no {', '.join(edited)}")
    for function in own:
        setattr(base, function, getattr(script, function))
    return base


def make_parser(description):
    """Return a parser of the flags that this tool and tools/sample.py share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--script", default="grpo", help="a script or a file of yours (default: grpo)")
    add("--split", choices=("test", "train", "all"), default="test", help="test: held-out rows; all: both")
    add("--out", help="file for the completions (default: a new file in runs/)")
    return parser


def read_flags(parser):
    """Return the tool's own flags, the script, and the script's settings, which all other flags set."""
    given, flags = parser.parse_known_args()
    script = import_script(given.script)
    sys.argv = [sys.argv[0], *flags]
    args = script.parse_args()
    run_dir = Path(args.model).resolve().parent
    if args.resume or not (run_dir / "args.json").exists():
        return given, script, args
    settings = json.loads((run_dir / "args.json").read_text())
    if not (run_dir / Path(script.__file__).name).exists():
        del settings["dataset"]
    defaults = script.TINY if args.tiny else script.Args()
    defaults = replace(defaults, **{name: settings[name] for name in settings if hasattr(defaults, name)})
    return given, script, tyro.cli(script.Args, default=defaults)


def load_model(script, args):
    """Return the model that samples, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    return script.load_sampler(args, tokenizer, device), tokenizer


def load_split(script, args, tokenizer, split):
    """Return the rows of --split."""
    train_rows, eval_rows = script.load_rows(args, tokenizer)
    rows = {"test": eval_rows, "train": train_rows, "all": eval_rows + train_rows}[split]
    if not rows:
        raise SystemExit("no rows are held out: use --split all, or set --eval-prompts")
    return rows


def new_path(path, kind):
    """Return the path of a file to write, by default of a new one in runs/, whose folder exists."""
    path = Path(path or f"runs/{kind}__{datetime.now():%Y%m%d-%H%M%S}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def complete(script, sampler, tokenizer, rows, count, temperature, args):
    """Yield rows, one for each completion (count per prompt), texts, whether each was cut off, and scores (or None)."""
    size = max(1, args.rollout_batch_size // count)  # prompts at once
    with tqdm(total=len(rows) * count, unit="completion") as progress:
        for start in range(0, len(rows), size):
            part = [row for row in rows[start : start + size] for _ in range(count)]
            batch, texts, *rest = script.sample_completions(sampler, tokenizer, part, temperature, args)
            progress.update(len(part))
            yield part, texts, batch["truncated"].tolist(), rest[0] if rest else None


def pass_at_k(num_samples, num_correct, k):
    """Return the share of the subsets of k samples that have a correct one (Chen et al., equation 1)."""
    return 1 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def evaluate(script, sampler, tokenizer, rows, count, temperature, args, file):
    """Return how many of the completions of each prompt are correct, and write them all to a file."""
    correct = []
    for part, texts, truncated, _ in complete(script, sampler, tokenizer, rows, count, temperature, args):
        for row, text, cut_off in zip(part, texts, truncated):
            correct.append(script.is_correct(text, row["answer"]))
            line = {"prompt": row["prompt"], "answer": row["answer"], "temperature": temperature}
            line |= {"completion": text, "truncated": cut_off, "correct": correct[-1]}
            file.write(json.dumps(line, default=str) + "\n")  # an answer may be a date
    return [sum(correct[start : start + count]) for start in range(0, len(correct), count)]


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=4, help="samples per prompt, 0 for greedy accuracy only")
    parser.add_argument("--k", type=int, nargs="+", help="values of k (default: powers of two up to --samples)")
    given, script, args = read_flags(parser)
    ks = given.k or [2**power for power in range(given.samples.bit_length())]
    if max(ks, default=0) > given.samples:
        parser.error("--k must be at most --samples")
    sampler, tokenizer = load_model(script, args)
    rows = load_split(script, args, tokenizer, given.split)
    path = new_path(given.out, "evaluation")
    with path.open("w") as file:
        results = {"greedy accuracy": evaluate(script, sampler, tokenizer, rows, 1, 0.0, args, file)}
        if given.samples:
            counts = evaluate(script, sampler, tokenizer, rows, given.samples, args.temperature, args, file)
        for k in ks:
            results[f"pass@{k}"] = [pass_at_k(given.samples, count, k) for count in counts]
    print(f"{len(rows)} prompts, {given.samples} samples of each at temperature {args.temperature:g}; written: {path}")
    print(f"{'':16}{'mean':>8}{'standard error':>16}")
    for name, values in results.items():
        print(f"{name:16}{fmean(values):8.3f}{stdev(values) / sqrt(len(values)):16.3f}")


if __name__ == "__main__":
    main()
