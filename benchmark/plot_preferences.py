"""From the runs of benchmark/preferences.sh to CSV files, two pictures and a table.

    python benchmark/plot_preferences.py [FOLDER]

With a folder of runs, gather their evaluations into benchmark/results/preferences_*.csv first; without, only draw.
Lines are seeds, thick ones their means; seconds are those of training, without evaluation.
"""

import csv
import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).resolve().parent / "results"
KEYS = {
    "accuracy": "eval/accuracy",
    "score": "eval/score",
    "kl": "rollout/ref_kl_sum",
    "explained_variance": "value/explained_variance",
    "pair_accuracy": "eval/pair_accuracy",
    "chosen_log_ratio": "eval/pair_chosen_log_ratio",
    "rejected_log_ratio": "eval/pair_rejected_log_ratio",
}
RUNS = ("dpo", "dpo_low", "ppo", "ppo_long", "ppo_kl0")


def gather(folder):
    """Write a CSV file per kind of run: a row per seed and evaluation."""
    for kind in RUNS:
        with (RESULTS / f"preferences_{kind}.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["seed", "step", "seconds", *KEYS])
            for run in sorted(Path(folder).glob(f"{kind}__*")):
                seconds = 0
                for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
                    seconds += line.get("perf/step_seconds", 0)
                    prompts = run / "prompts" / str(line["step"]) / "metrics.jsonl"  # by grpo.py, of dpo.py
                    line = (json.loads(prompts.read_text()) if prompts.exists() else {}) | line
                    if "eval/accuracy" in line:
                        values = [round(line[key], 5) if key in line else "" for key in KEYS.values()]
                        writer.writerow([run.name.split("__")[1], line["step"], round(seconds, 2), *values])


def read(kind):
    """Return {seed: rows} of a kind of run, numbers where there are any."""
    with (RESULTS / f"preferences_{kind}.csv").open() as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    return {seed: [row for row in rows if row["seed"] == seed] for seed in sorted({row["seed"] for row in rows})}


def draw_lines(axis, runs, column, color, label):
    for rows in runs.values():
        rows = [row for row in rows if column in row]
        axis.plot([row["step"] for row in rows], [row[column] for row in rows], color=color, alpha=0.3, linewidth=1)
    steps = sorted({row["step"] for rows in runs.values() for row in rows if column in row})
    means = [statistics.mean(r[column] for rows in runs.values() for r in rows if r["step"] == s) for s in steps]
    axis.plot(steps, means, color=color, linewidth=2.5, label=label)


def draw_panels(name, panels):
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4), layout="constrained")
    for axis, (title, lines) in zip(axes, panels.items()):
        for runs, column, color, label in lines:
            draw_lines(axis, runs, column, color, label)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(RESULTS / f"{name}.png", dpi=80)


def table(runs):
    print("| script | greedy accuracy, mean | lowest | highest | training, s |")
    print("|---|---|---|---|---|")
    for script, seeds in runs.items():
        last = [rows[-1] for rows in seeds.values()]
        accuracies = [row["accuracy"] for row in last]
        seconds = statistics.mean(row["seconds"] for row in last)
        print(
            f"| `{script}.py` | {statistics.mean(accuracies):.3f} | {min(accuracies):.3f} | {max(accuracies):.3f} | "
            f"{seconds:.0f} |"
        )
    variances = [rows[-1]["explained_variance"] for rows in runs["ppo_rlhf"].values()]
    print(f"explained variance of the value model at the end: {min(variances):.2f} to {max(variances):.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        gather(sys.argv[1])
    dpo, low, ppo, long, free = map(read, RUNS)
    with_kl, without_kl = "kl_coef 0.05", "kl_coef 0"
    draw_panels(
        "overoptimization",
        {
            "score by the reward model": [(long, "score", "C0", with_kl), (free, "score", "C3", without_kl)],
            "greedy accuracy by the rule": [(long, "accuracy", "C0", with_kl), (free, "accuracy", "C3", without_kl)],
        },
    )
    titles = {
        "accuracy": "greedy accuracy",
        "chosen_log_ratio": "chosen: log-probability over the reference, nats",
        "rejected_log_ratio": "rejected: log-probability over the reference, nats",
    }
    lines = {key: [(dpo, key, "C0", "beta 0.5"), (low, key, "C3", "beta 0.1")] for key in titles}
    draw_panels("dpo_path", {title: lines[key] for key, title in titles.items()})
    table({"dpo": dpo, "ppo_rlhf": ppo})
