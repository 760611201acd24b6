"""Learning curves: from the runs of benchmark/curves.sh to CSV files, a picture and a table.

    python benchmark/plot.py [FOLDER]

With a folder of runs, first gather them into benchmark/results/curves_SCRIPT.csv; without, draw from those files.
Seconds are those of training, without evaluation. Lines are means over seeds, bands go from the lowest to the highest.
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
SCRIPTS = ("reinforce", "grpo", "dr_grpo", "dapo", "gspo", "cispo")
COLUMNS = {  # panel: (column, key in metrics.jsonl)
    "greedy accuracy": ("accuracy", "eval/accuracy"),
    "reward": ("reward", "reward/mean"),
    "completion tokens": ("length", "rollout/length_mean"),
    "entropy, nats per token": ("entropy", "policy/entropy"),
}


def gather(folder):
    """Write a CSV file per script: a row per seed and step."""
    for script in SCRIPTS:
        with (RESULTS / f"curves_{script}.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["seed", "step", "completions", "seconds", *(column for column, _ in COLUMNS.values())])
            for run in sorted(Path(folder).glob(f"{script}__*")):
                completions = seconds = 0
                for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
                    completions += line.get("rollout/completions", 0)
                    seconds += line.get("perf/step_seconds", 0)
                    values = [line.get(key) for _, key in COLUMNS.values()]
                    values = ["" if value is None else round(value, 5) for value in values]
                    writer.writerow([run.name.split("__")[1], line["step"], completions, round(seconds, 2), *values])


def read(script):
    """Return the rows of a script, numbers where there are any."""
    with (RESULTS / f"curves_{script}.csv").open() as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def draw(curves):
    figure, axes = plt.subplots(2, len(COLUMNS), figsize=(16, 7), layout="constrained")
    for row, (x, unit) in enumerate((("completions", "completions"), ("seconds", "seconds of training, one core"))):
        for axis, (panel, (column, _)) in zip(axes[row], COLUMNS.items()):
            for script, rows in curves.items():
                steps = sorted({r["step"] for r in rows if column in r})
                groups = [[r for r in rows if r["step"] == step and column in r] for step in steps]
                places = [statistics.mean(r[x] for r in group) for group in groups]
                values = [[r[column] for r in group] for group in groups]
                [line] = axis.plot(places, [statistics.mean(v) for v in values], label=script)
                axis.fill_between(
                    places, list(map(min, values)), list(map(max, values)), color=line.get_color(), alpha=0.15
                )
            axis.set(title=panel, xlabel=unit)
            axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.savefig(RESULTS / "curves.png", dpi=80)


def table(curves):
    print("| script | greedy accuracy, mean | std | lowest | completions | training, s | to 0.9, s |")
    print("|---|---|---|---|---|---|---|")
    for script, rows in curves.items():
        finals, totals, reached = [], [], []
        for seed in sorted({r["seed"] for r in rows}):
            evaluations = [r for r in rows if r["seed"] == seed and "accuracy" in r]
            finals.append(evaluations[-1]["accuracy"])
            totals.append(evaluations[-1])
            reached.append(next((r["seconds"] for r in evaluations if r["accuracy"] >= 0.9), float("inf")))
        completions, seconds = (statistics.mean(r[key] for r in totals) for key in ("completions", "seconds"))
        print(
            f"| `{script}.py` | {statistics.mean(finals):.3f} | {statistics.stdev(finals):.3f} | {min(finals):.3f} | "
            f"{completions:.0f} | {seconds:.0f} | {statistics.mean(reached):.0f} |"
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        gather(sys.argv[1])
    curves = {script: read(script) for script in SCRIPTS if (RESULTS / f"curves_{script}.csv").exists()}
    most = max(row["completions"] for row in curves["grpo"])
    curves = {script: [row for row in rows if row["completions"] <= most] for script, rows in curves.items()}
    draw(curves)
    table(curves)
