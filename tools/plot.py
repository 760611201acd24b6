"""Plot the metrics of runs against the step, and print a table of the last values.

    python tools/plot.py runs/grpo__1__1767268800
    python tools/plot.py runs/grpo__* runs/dapo__* --out curves.png
    python tools/plot.py runs/mine --metrics eval/accuracy reward/format

Runs of the same script (the part of a folder's name before the first "__") that differ only in the seed are drawn as
one line, their mean, with a band from the lowest to the highest value. A folder without metrics is left out.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from types import SimpleNamespace

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

PANELS = """eval/accuracy eval/pair_accuracy eval/loss eval/score eval/reward eval/pair_chosen_log_ratio
    eval/pair_rejected_log_ratio reward/mean reward/zero_std score/mean loss/nll loss/preference rollout/length_mean
    rollout/turns policy/entropy policy/ref_kl policy/approx_kl policy/clip_fraction_low
    policy/clip_fraction_high policy/cap_fraction value/explained_variance optim/grad_norm""".split()
NOT_LEARNING = ("seed", "run_dir", "resume", "track", "save_every")
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito's


def read_rows(path):
    """Return the rows of a JSONL file, or no rows if the file does not exist. nan and inf become None."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    lines = [line for line in lines if line.endswith("\n")]  # the last line of an active run may be incomplete
    return [json.loads(line, parse_constant=lambda _: None) for line in lines]


def read_run(folder):
    """Return the name, script, settings, curves {metric: {step: value}} and folder of a run; None if it has none."""
    folder, curves = Path(folder), {}
    for row in read_rows(folder / "metrics.jsonl"):
        for key, value in row.items():
            if key != "step" and value is not None:
                curves.setdefault(key, {})[row["step"]] = value
    if not curves:
        return None
    name, settings = folder.resolve().name, json.loads((folder / "args.json").read_text())
    return SimpleNamespace(name=name, script=name.split("__")[0], settings=settings, curves=curves, folder=folder)


def group_runs(runs):
    """Return {label: runs that differ only in the seed}."""
    groups = {}
    for run in runs:
        settings = {name: value for name, value in run.settings.items() if name not in NOT_LEARNING}
        groups.setdefault(run.script + json.dumps(settings, sort_keys=True), []).append(run)
    labels = {}
    for group in groups.values():
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        labels[f"{group[0].folder}{more}"] = group
    return labels


def mean_and_band(curves):
    """Return [(step, mean, lowest, highest, number of curves)] for the steps at which a curve has a value."""
    rows = []
    for step in sorted({step for curve in curves for step in curve}):
        values = [curve[step] for curve in curves if step in curve]
        rows.append((step, statistics.fmean(values), min(values), max(values), len(values)))
    return rows


def choose_metrics(runs):
    """Return the usual metrics that the runs have, and the parts of their rewards, in the order of the panels."""
    found = sorted({key for run in runs for key in run.curves})
    parts = [key for key in found if key.startswith(("reward/", "eval/reward/")) and key not in PANELS]
    return [key for key in PANELS if key in found] + parts


def draw(groups, keys):
    """Draw a panel for each metric, with a colour for each label."""
    columns = min(4, math.ceil(math.sqrt(len(keys))))
    rows = math.ceil(len(keys) / columns)
    size = (4.2 * columns, 2.9 * rows + 0.5)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis, key in zip(axes.flat, keys):
        for number, (label, group) in enumerate(groups.items()):
            curves = [run.curves[key] for run in group if key in run.curves]
            style = {"color": COLORS[number % 7], "linestyle": ("-", "--", ":")[number // 7 % 3]}
            steps, means, lowest, highest, _ = list(zip(*mean_and_band(curves))) or [()] * 5
            axis.plot(steps, means, marker="." if len(steps) < 25 else None, label=label, **style)
            axis.fill_between(steps, lowest, highest, color=style["color"], alpha=0.2, linewidth=0)
        axis.set(title=key, xlabel="step")
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(keys) :]:
        axis.axis("off")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center")
    return figure


def table(groups, keys):
    """Return a table of the last values."""
    lines = [("run", "metric", "runs", "step", "mean", "lowest", "highest"), ("---",) * 7]
    for label, group in groups.items():
        for key in keys:
            curves = [run.curves[key] for run in group if key in run.curves]
            for step, *values, count in mean_and_band(curves)[-1:]:
                lines.append((label, key, count, step, *(f"{value:.4g}" for value in values)))
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def main(args):
    found = {str(folder): read_run(folder) for folder in args.runs}
    runs = [run for run in found.values() if run]
    for folder, run in found.items():
        if run is None:
            print(f"left out: {folder} has no metrics")
    if not runs:
        raise SystemExit("there is nothing to plot")
    groups, keys = group_runs(runs), args.metrics or choose_metrics(runs)
    path = Path(args.out or (runs[0].folder / "plot.png" if len(runs) == 1 else "plot.png"))
    figure = draw(groups, keys)
    if args.title:
        figure.suptitle(args.title, fontsize="medium")
        if len(groups) == 1:  # the title says what the line is
            figure.legends[0].remove()
    figure.savefig(path, dpi=100)
    plt.close(figure)
    print(f"{table(groups, keys)}\nwritten: {path}")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--out", metavar="FILE", help="the picture (default: plot.png, of one run in its folder)")
    parser.add_argument("--metrics", nargs="+", metavar="KEY", help="names in metrics.jsonl (default: the usual ones)")
    parser.add_argument("--title", help="a title above all panels")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_args())
