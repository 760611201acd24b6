"""Measure which tokens lose their gradient to a clip, and how training changes if they keep it.

    python benchmark/clipping.py [SEED ...]        (default: 1 2 3; five minutes on one core)

The program trains cispo.py on the bundled task, once with its own objective and once with DAPO's clipped objective.
Each rollout gets sixteen optimizer steps, as in MiniMax-M1 and DAPO. Every run is a separate process with one thread.

It writes the counts to benchmark/results/clipping.json and the tables to benchmark/results/clipping.md. It skips runs
that are already in clipping.json.

A token is counted once per optimizer step, if its advantage is not zero. For each of two clip ranges, the program
counts the tokens that the clip leaves without a gradient, or would leave without one in the case of CISPO. It groups
the tokens by the probability with which they were sampled, and by the token itself.
"""

import collections
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
FLAGS = "--minibatch-size 8 --num-steps 12 --eval-every 4 --eval-prompts 128"
RANGES = {"GRPO's clip, 0.2": (0.2, 0.2), "DAPO's clip, 0.2 and 0.28": (0.2, 0.28)}
OBJECTIVES = ["DAPO's clip, 0.2 and 0.28", "CISPO"]
BINS = (0.0, 0.01, 0.1, 0.5, 0.9, 1.01)  # limits of the probability with which a token was sampled


def run(objective, seed, folder):
    """Train with an objective and a seed; return the results.

    The counts are {group: [tokens, lost below and above the first range, lost below and above the second range]}.
    """
    import torch
    from transformers import AutoTokenizer

    sys.path.insert(0, str(ROOT))
    import ablations

    import cispo

    microbatches, policy_loss, part = cispo.microbatches, cispo.policy_loss, {}
    counts, tokenizer = collections.defaultdict(lambda: [0] * 5), AutoTokenizer.from_pretrained(cispo.Args.model)
    largest = [1.0]  # largest ratio of each microbatch

    def remembered(*args):
        for microbatch in microbatches(*args):
            part.update(microbatch)
            yield microbatch

    def loss(logprobs, old_logprobs, sampler_logprobs, advantages, completion_mask, *rest):
        whole = completion_mask.bool()
        largest.append(torch.where(whole, logprobs - old_logprobs, 0.0).exp().max().item())
        mask = whole & (advantages != 0).unsqueeze(1)
        ratio, sign = (
            (logprobs - old_logprobs).exp().detach()[mask],
            advantages.sign().unsqueeze(1).expand_as(mask)[mask],
        )
        lost = [place for low, high in RANGES.values() for place in lost_to(ratio, sign, low, high)]
        columns = torch.stack([torch.ones_like(lost[0]), *lost]).long()  # (5, tokens)
        bins = torch.bucketize(old_logprobs.detach()[mask].exp(), torch.tensor(BINS[1:-1]), right=True)
        for kind, keys in (("bin", bins), ("token", part["completion_ids"][mask])):
            for key in keys.unique().tolist():
                found = columns[:, keys == key].sum(1).tolist()
                name = f"{kind} {key if kind == 'bin' else tokenizer.convert_ids_to_tokens(key)}"
                counts[name] = [a + b for a, b in zip(counts[name], found)]
        total, metrics = policy_loss(logprobs, old_logprobs, sampler_logprobs, advantages, completion_mask, *rest)
        if objective in RANGES:
            low, high = RANGES[objective]
            ratio, advantages = torch.where(whole, logprobs - old_logprobs, 0.0).exp(), advantages.unsqueeze(1)
            surrogate = torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
            total = -torch.where(whole, surrogate, 0.0).sum()  # the sampler's weight is 1 on a CPU
        return total, metrics

    cispo.microbatches, cispo.policy_loss = remembered, loss
    cispo.main(ablations.parse(cispo, "--seed", seed, "--run-dir", f"{folder}/run", *FLAGS.split()))
    lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval/accuracy" in line]
    first = next((line["step"] for line in evaluations if line["eval/accuracy"] >= 0.9), None)
    # The final accuracy uses all 512 held-out prompts, the evaluations during training 128 of them.
    found = ablations.greedy(Path(folder, "run", "checkpoint"))
    found = {"accuracy": found["greedy accuracy"], "pass@1": lines[-1]["eval/pass@1"], "first at 0.9": first}
    found |= {"lowest after": min(line["eval/accuracy"] for line in evaluations if line["step"] >= (first or 0))}
    found |= {"entropy": statistics.mean(line["policy/entropy"] for line in lines[-5:])}
    return found | {"largest ratio": max(largest), "counts": counts}


def lost_to(ratio, sign, low, high):
    """Return two masks of the tokens that the clip of a range leaves without a gradient.

    The first has the tokens with a negative advantage below the range, the second those with a positive one above it.
    """
    return (ratio < 1 - low) & (sign < 0), (ratio > 1 + high) & (sign > 0)


def render(results):
    """Return the page: the results of each objective, and the tokens that the clips leave without a gradient."""
    text = f"`python benchmark/clipping.py`, one thread, {platform.machine()}.\n\n"
    names = ["accuracy", "pass@1", "first at 0.9", "lowest after", "entropy", "largest ratio"]
    text += f"| objective | seeds | accuracy, by seed | {' | '.join(names[1:])} |\n|{'---|' * (len(names) + 2)}\n"
    for objective in OBJECTIVES:
        runs = [found for key, found in sorted(results.items()) if key.startswith(f"{objective}, seed ")]
        if runs:
            cells = [" ".join(f"{found['accuracy']:.3f}" for found in runs)]
            for name in names[1:]:
                values = [found[name] for found in runs]
                cells.append("-" if None in values else f"{statistics.mean(values):.3g}")
            text += f"| {objective} | {len(runs)} | {' | '.join(cells)} |\n"
    for objective in OBJECTIVES:
        counts = collections.defaultdict(lambda: [0] * 5)
        for key, found in results.items():
            for name, numbers in found["counts"].items() if key.startswith(f"{objective}, seed ") else ():
                counts[name] = [a + b for a, b in zip(counts[name], numbers)]
        bins = {name: counts[name] for name in sorted(counts) if name.startswith("bin")}
        total = [sum(column) for column in zip(*bins.values())] or [0]
        if not total[0]:
            continue
        text += f"\nTokens without gradient, in percent of those in the row: training with {objective}.\n\n"
        text += "| sampled with probability | share of tokens | 0.2 below | 0.2 above | 0.28 above |\n"
        text += "|---|---|---|---|---|\n"
        rows = [("all", total)]
        rows += [(f"{BINS[int(name[4:])]:g} to {min(1, BINS[int(name[4:]) + 1]):g}", bins[name]) for name in bins]
        tokens = sorted((name for name in counts if name.startswith("token")), key=lambda name: -counts[name][4])
        rows += [(f"`{name[6:]}`", counts[name]) for name in tokens[:6]]
        for name, (number, low, high, _, higher) in rows:
            shares = [number / total[0], low / number, high / number, higher / number]
            text += f"| {name} | {' | '.join(f'{100 * share:.2f}' for share in shares)} |\n"
    return text


def main(seeds):
    path = RESULTS / "clipping.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for seed in seeds:
        for objective in OBJECTIVES:
            key = f"{objective}, seed {seed}"
            if key in results:
                continue
            with tempfile.TemporaryDirectory() as folder:
                environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
                command = [sys.executable, __file__, "run", objective, str(seed), folder]
                subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
                results[key] = json.loads(Path(folder, "found.json").read_text())
            path.write_text(json.dumps(results, indent=0) + "\n")
            (RESULTS / "clipping.md").write_text(render(results), encoding="utf-8")
            print(key, {name: value for name, value in results[key].items() if name != "counts"}, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        Path(sys.argv[4], "found.json").write_text(json.dumps(run(sys.argv[2], int(sys.argv[3]), sys.argv[4])))
    else:
        main([int(seed) for seed in sys.argv[1:]] or [1, 2, 3])
