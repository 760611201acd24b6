"""Show what common mistakes change in the metrics of grpo.py, in a short run that is sensitive to them.

    python benchmark/mistakes.py [NAME ...] [--seeds 1 2 3]     (default: all mistakes, seeds 1 to 3)
    python benchmark/mistakes.py --check grpo.py        (compares this script with the right one, and writes nothing)
    python benchmark/mistakes.py --page                 (runs nothing; writes the table on docs/is_this_normal.md)

MISTAKES has the source replacements of each mistake in grpo.py. The program trains edited copies, one after the other,
and first the right script with seeds 1 to 7. It adds the numbers of finished runs to benchmark/results/mistakes.csv
and skips runs that are already there.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results" / "mistakes.csv"
PAGE = ROOT / "docs" / "is_this_normal.md"
RIGHT, RIGHT_SEEDS = "right script", (1, 2, 3, 4, 5, 6, 7)
FLAGS = "--model models/long --dataset data/long --tiny --max-completion-length 112 --temperature 0.8 --kl-coef 0.2"
FLAGS += " --minibatch-size 16 --microbatch-tokens 512 --num-steps 10 --eval-every 5 --eval-prompts 128"

OLD = "policy, batch, first_epoch, args)"
LOSS_MASK = "mask,\n                    args.clip_eps"
FORWARD = 'entropies = policy(microbatch["ids"], mask, args.temperature)'
NO_STOP = LOSS_MASK.replace("mask", 'mask * (microbatch["ids"] != 5)')  # 5 is the stop token
GROUPS = "rewards.view(-1, group_size)  # (B/G, G)"
UNGROUPED = "torch.where(equal, 0.0, advantages).view(-1)"
CENTRED = "groups - groups.mean(1, keepdim=True)"
CENTRED_ELSEWHERE = "(rewards - groups.mean(1).repeat(group_size)).view_as(groups)"
STD = "groups.std(1, keepdim=True)"
MASK_OF_PROMPTS = "model(ids * mask, attention_mask=mask"
MASK_OF_TOKENS = "model(tokens.unsqueeze(1), attention_mask=mask"
OPTIMIZER_STEP = "(step - 1) * len(minibatches) + update + 1"
BY_HAND = "test_advantages_by_hand"
# {name: (metric that shows it, or test that finds it if none does, {old text: new text})}, in the order of the page
MISTAKES = {
    "mask shifted by a token": ("eval/accuracy", {LOSS_MASK: LOSS_MASK.replace("mask", "mask.roll(1, 1)")}),
    "rewards not centred": ("eval/accuracy", {CENTRED: "groups"}),
    "warm-up counted in rollouts": ("eval/accuracy", {OPTIMIZER_STEP: "step"}),
    "answer of the next row": ("eval/reward", {"zip(completions, rows)": "zip(completions, rows[1:] + rows[:1])"}),
    "KL term with the wrong sign": ("policy/ref_kl", {"+ kl_coef * ref_kl": "- kl_coef * ref_kl"}),
    "reference is the current policy": (
        "policy/ref_kl",
        {"load_policy(args, tokenizer, device).requires_grad_(False)": "policy"},
    ),
    "gradients not set to zero": ("policy/ref_kl", {"    optimizer.zero_grad()\n": ""}),
    "no temperature in the update": (
        "policy/approx_kl",
        {FORWARD: FORWARD.replace("args.temperature", "1.0")},
    ),
    "old log-probabilities of the current policy": (
        "policy/approx_kl",
        {'microbatch["old_logprobs"]': "logprobs"},
    ),
    "max instead of min in the loss": ("policy/approx_kl", {"torch.min(ratio": "torch.max(ratio"}),
    "stop token not trained": ("optim/grad_norm", {LOSS_MASK: NO_STOP}),
    "std with divisor G": ("optim/grad_norm", {STD: "groups.std(1, keepdim=True, correction=0)"}),
    "loss divided by the microbatch": (
        "optim/grad_norm",
        {"loss / rank_minibatch_size": 'loss / len(microbatch["advantages"])'},
    ),
    "loss divided by the padded length": ("optim/grad_norm", {"mask.sum(1).clamp(min=1)": "mask.shape[1]"}),
    "mean of another group": ("loss/policy", {CENTRED: CENTRED_ELSEWHERE}),
    "log-probabilities shifted by a token": (
        "policy/sampler_kl",
        {"hidden[:, :-1][mask[:, 1:]]": "hidden[mask]"},
    ),
    "old log-probabilities of another row": ("policy/sampler_kl", {OLD: f"{OLD}.roll(1, 0)"}),
    "padding of prompts attended to": (
        "policy/sampler_kl",
        {text: text.replace("=mask", "=None") for text in (MASK_OF_PROMPTS, MASK_OF_TOKENS)},
    ),
    "groups across prompts": (
        BY_HAND,
        {GROUPS: "rewards.view(group_size, -1).T", UNGROUPED: "(~equal * advantages).T.reshape(-1)"},
    ),
    "std of the batch": (BY_HAND, {STD: "groups.std()"}),
}


def edited(edits):
    """Return the source of grpo.py with each old text, which must occur exactly once, replaced."""
    source = (ROOT / "grpo.py").read_text(encoding="utf-8")
    for old, new in edits.items():
        if source.count(old) != 1:
            raise ValueError(f"this text occurs {source.count(old)} times in grpo.py, not once: {old}")
        source = source.replace(old, new)
    return source


def run(source, seed):
    """Make a run with one thread and return the means of its metrics as {metric: value}."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("models", "data"):
            Path(folder, name).symlink_to(ROOT / name)
        Path(folder, "grpo.py").write_text(source, encoding="utf-8")
        command = [sys.executable, "grpo.py", *FLAGS.split(), "--seed", str(seed), "--run-dir", "run"]
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    numbers = measure(lines[1:])  # without the evaluation before step 1
    if done.returncode:
        if "sampling and training disagree" not in done.stderr:
            raise RuntimeError(done.stderr[-2000:])
        numbers["policy/sampler_kl"] = 0.1  # or more: the script stops above 0.1, before it logs the step
    return numbers


def measure(lines):
    """Return the mean of each metric over the steps that have it, rounded as in the file of results."""
    metrics = {name for line in lines for name in line if not name.startswith(("perf/", "step"))}
    means = {name: statistics.mean([line[name] for line in lines if name in line]) for name in sorted(metrics)}
    return {name: float(f"{mean:.6g}") for name, mean in means.items()}


def read_results():
    """Return the numbers in the file as {name of the mistake: {seed: {metric: value}}}."""
    results = {}
    with RESULTS.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            runs = results.setdefault(row["mistake"], {})
            runs.setdefault(int(row["seed"]), {})[row["metric"]] = float(row["value"])
    return results


def make_runs(names, seeds):
    if not RESULTS.exists():
        RESULTS.write_text("mistake,seed,metric,value\n", encoding="utf-8")
    wanted = [(RIGHT, seed, {}) for seed in RIGHT_SEEDS]
    wanted += [(name, seed, MISTAKES[name][1]) for seed in seeds for name in names]
    for name, seed, edits in wanted:
        if seed in read_results().get(name, {}):
            continue
        before = os.times()
        numbers = run(edited(edits), seed)
        after = os.times()
        seconds = after.children_user + after.children_system - before.children_user - before.children_system
        numbers["processor seconds"] = seconds
        with RESULTS.open("a", newline="", encoding="utf-8") as file:
            rows = [[name, seed, metric, f"{value:.6g}"] for metric, value in numbers.items()]
            csv.writer(file, lineterminator="\n").writerows(rows)
        print(f"{name}, seed {seed}: {seconds:.0f} seconds", flush=True)


def check(script, seeds):
    """Print the metrics of a script beside those of the right script, and which are outside with all these seeds."""
    source = Path(script).read_text(encoding="utf-8")
    runs = [run(source, seed) for seed in seeds]
    right_runs = [*read_results()[RIGHT].values()]
    for metric in right_runs[0]:
        right = [numbers[metric] for numbers in right_runs]
        values = [numbers[metric] for numbers in runs if metric in numbers]  # a run that stops has fewer
        if values:
            outside = "outside" if is_outside(values, right) else ""
            print(f"{metric:28} {spread(right):20} {spread(values):20} {outside}")


def is_outside(values, right):
    return max(values) < min(right) or min(values) > max(right)


def make_table(results):
    """Return a row for each mistake, with its metric over the seeds of the right script, and over its own."""
    table = "| mistake | metric | right script | with the mistake |\n|---|---|---|---|\n"
    above = ""
    for name, (metric, _) in MISTAKES.items():
        if metric.startswith("test_"):
            table += f"| {name} | only `{metric}` finds it | | |\n"
            continue
        right, wrong = [spread([run[metric] for run in results[key].values()]) for key in (RIGHT, name)]
        cells = f"`{metric}` | {right}"
        if metric == above:  # said once
            cells = " | "
        above = metric
        table += f"| {name} | {cells} | {wrong} |\n"
    return table


def spread(values):
    """Return the lowest and the highest value with three significant digits, or one if they look alike."""
    ends = [f"{float(f'{value:.3g}'):g}" for value in (min(values), max(values))]
    dash = " to " if min(values) < 0 else "–"
    return dash.join(dict.fromkeys(ends))


def write_page(results):
    page = PAGE.read_text(encoding="utf-8")
    before, mark, rest = page.partition("<!-- mistakes -->\n")
    if not mark:
        raise ValueError(f"{PAGE} lacks the line <!-- mistakes -->")
    after = rest.partition("<!-- end -->")[2]
    PAGE.write_text(f"{before}{mark}\n{make_table(results)}\n<!-- end -->{after}", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[], metavar="NAME", help="mistakes of MISTAKES (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="seeds of the mistakes")
    parser.add_argument("--page", action="store_true", help="only write the table of finished runs on the page")
    parser.add_argument("--check", metavar="FILE", help="only run this script and compare it with the right script")
    args = parser.parse_args()
    if args.check:
        check(args.check, args.seeds)
    elif args.page:
        write_page(read_results())
    else:
        make_runs(args.names or [*MISTAKES], args.seeds)


if __name__ == "__main__":
    main()
