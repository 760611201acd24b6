"""Plot the metrics of runs against the step, and print a table of the last values.

    python tools/plot.py runs/grpo__1__1767268800
    python tools/plot.py runs/grpo__* runs/dapo__* --out curves.png

The tool saves the picture to --out, and also shows it if there is a screen. Runs of the same script that differ only in
the seed are drawn as one line, their mean, with a band from the lowest to the highest value. The script is the part of
a folder's name before the first "__". The band ends at the last step that all of these runs have, and thin lines show
later values of single runs. With several lines, the picture shows the metrics that at least two lines have, and each
run's main evaluation, such as eval/accuracy. If the reward has parts, the picture also shows them, as long as it has at
most 16 panels. Below the table, the tool prints the settings that differ. Runs without metrics are left out.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
from matplotlib.backends import BackendFilter, backend_registry

EVALUATIONS = {  # the first of these that a run has is its main evaluation
    "eval/accuracy": "greedy accuracy",
    "eval/pair_accuracy": "held-out pairs ranked correctly",
    "eval/loss": "held-out loss, nats per token",
    "eval/score": "held-out score",
    "eval/reward": "held-out reward",
}
PANELS = EVALUATIONS | {
    "eval/pair_chosen_log_ratio": "log-ratio of chosen completions, nats",
    "eval/pair_rejected_log_ratio": "log-ratio of rejected completions, nats",
    "reward/mean": "reward",
    "score/mean": "score",
    "loss/nll": "loss, nats per token",
    "loss/preference": "loss",
    "rollout/length_mean": "completion tokens",
    "rollout/tool_use": "share of completions with a tool call",
    "policy/entropy": "entropy, nats per token",
    "policy/ref_kl": "KL to the reference, nats per token",
    "policy/approx_kl": "KL of the update, nats per token",
    "policy/clip_fraction_low": "share of tokens clipped below",
    "policy/clip_fraction_high": "share of tokens clipped above",
    "policy/cap_fraction": "share of tokens with a capped ratio",
    "value/explained_variance": "explained variance of the values",
    "optim/grad_norm": "gradient norm",
}
NOT_PARTS = ("reward/mean", "reward/zero_std")  # any other reward/NAME is a part of the reward
MOST_PANELS = 16
NOT_LEARNING = ("seed", "run_dir", "resume", "track", "eval_every", "save_every")
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito's


class NoMetrics(SystemExit):
    """A run that has not logged anything."""


def read_rows(path):
    """Return the rows of a JSONL file, or no rows if the file does not exist. nan and inf become None."""
    lines, rows = path.read_bytes().splitlines(keepends=True) if path.is_file() else [], []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line, parse_constant=lambda _: None)
            rows.append(row | {"step": int(row["step"])})
        except (ValueError, TypeError, KeyError):
            if line.endswith(b"\n"):  # the last line of an active run may be incomplete
                raise SystemExit(f"{path}: line {number} is not a JSON object with a step") from None
    return rows


def read_run(folder):
    """Return the name, script, settings, curves {metric: {step: value}} and folder of a run."""
    folder = Path(folder)
    if not (folder / "args.json").is_file():
        raise SystemExit(f"{folder}: " + ("not a run, it has no args.json" if folder.is_dir() else "no such folder"))
    try:
        args = json.loads((folder / "args.json").read_text())
        name = folder.resolve().name
        script = name.split("__")[0]
        settings = {name: value for name, value in args.items() if name not in NOT_LEARNING}
    except (ValueError, AttributeError):
        raise SystemExit(f"{folder / 'args.json'}: not a JSON object of settings") from None
    curves = {}
    for row in read_rows(folder / "metrics.jsonl"):
        for key, value in row.items():
            if isinstance(value, int | float) and key != "step":
                curves.setdefault(key, {})[row["step"]] = value
    if not curves:
        raise NoMetrics(f"{folder}: no metrics yet")
    about = {"name": name, "script": script, "settings": settings, "curves": curves}
    return SimpleNamespace(**about, args=args, folder=folder)


def group_runs(runs):
    """Return {label: runs that differ only in the seed}. The label is a single run's name, or the script of several."""
    settings, groups = {}, {}
    for run in runs:
        settings.setdefault((run.script, json.dumps(run.settings, sort_keys=True)), []).append(run)
    for group in settings.values():
        label = group[0].name if len(group) == 1 else group[0].script
        if label in groups and len(group) > 1:
            label = f"{label} ({group[0].name}, ...)"
        elif label in groups:
            label = str(group[0].folder)  # another folder with this name
        groups[label] = group
    return groups


def differences(groups):
    """Return a line for each label, with those of its settings that differ between labels."""
    lines = []
    for label, group in groups.items():
        found = []
        for name, value in group[0].settings.items():
            if any(others[0].settings.get(name, value) != value for others in groups.values()):
                found.append(f"{name} {value}")
        if found:
            lines.append(f"{label}: {', '.join(found)}")
    return lines


def mean_and_band(curves):
    """Return [(step, mean, lowest, highest)] for the steps at which every curve has a value."""
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    columns = [[curve[step] for curve in curves] for step in steps]
    return [(step, statistics.fmean(column), min(column), max(column)) for step, column in zip(steps, columns)]


def choose_metrics(groups):
    """Choose which of the usual metrics to show, and parts of the reward if there is room."""
    found = sorted({key for group in groups.values() for run in group for key in run.curves})
    counts = {key: sum(any(key in run.curves for run in group) for group in groups.values()) for key in found}
    mains = {next((key for key in EVALUATIONS if key in run.curves), "") for group in groups.values() for run in group}
    shared = [key for key in found if counts[key] >= min(2, len(groups)) and key != "eval/reward"]  # mostly accuracy
    chosen = [key for key in PANELS if key in mains or key in shared]
    parts = [key for key in shared if key.startswith("reward/") and key not in NOT_PARTS]
    parts += [key for key in shared if key.startswith("eval/reward/")]
    parts = parts[: max(0, MOST_PANELS - len(chosen))]
    place = [*PANELS].index("reward/mean") + 1  # parts stand behind it
    keys = [*PANELS][:place] + parts + [*PANELS][place:]
    return [key for key in keys if key in chosen or key in parts]


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
            steps, means, lowest, highest = list(zip(*mean_and_band(curves))) or [()] * 4
            name = label if len(group) == 1 else f"{label}: mean of {len(group)}"
            axis.plot(steps, means, marker="." if len(steps) < 25 else None, label=name, **style)
            axis.fill_between(steps, lowest, highest, color=style["color"], alpha=0.2, linewidth=0)
            for curve in curves:
                later = sorted(step for step in curve if not steps or step >= steps[-1])
                axis.plot(later, [curve[step] for step in later], linewidth=0.7, **style)
        axis.set(title=PANELS.get(key, key), xlabel="step")
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(keys) :]:
        axis.axis("off")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    per_row = max(1, min(len(labels), 30 * columns // max(map(len, labels))))
    figure.legend(handles, labels, loc="outside upper center", ncols=per_row)
    return figure


def table(groups, keys):
    """Return a table of the values at the last step that all runs of a label share."""
    lines = [("run", "metric", "runs", "step", "mean", "lowest", "highest"), ("---",) * 7]
    for label, group in groups.items():
        for key in keys:
            curves = [run.curves[key] for run in group if key in run.curves]
            for step, *values in mean_and_band(curves)[-1:]:
                lines.append((label, key, len(curves), step, *(f"{value:.4g}" for value in values)))
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def main(args):
    runs, empty = [], []
    for folder in {Path(folder).resolve(): folder for folder in args.runs}.values():
        try:
            runs.append(read_run(folder))
        except NoMetrics as error:
            empty.append(str(error))
    if not runs:
        raise SystemExit("; ".join(empty))
    for message in empty:
        print(f"left out: {message}")
    groups = group_runs(runs)
    found = {key for run in runs for key in run.curves}
    keys = args.metrics or choose_metrics(groups)
    if not keys or not found.issuperset(keys):
        lacking = ", ".join(key for key in keys if key not in found) or "any of the usual metrics"
        raise SystemExit(f"no run has {lacking}; choose --metrics from {', '.join(sorted(found))}")
    path = Path(args.out or (runs[0].folder / "plot.png" if len(runs) == 1 else "plot.png"))
    figure = draw(groups, keys)
    if getattr(args, "title", None):
        figure.suptitle(args.title, fontsize="medium")
        if len(groups) == 1:  # the title says what the line is
            figure.legends[0].remove()
    try:
        figure.savefig(path, dpi=100)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: {error}") from None
    print(table(groups, keys))
    print(*differences(groups), f"written: {path}", sep="\n")
    if plt.get_backend().lower() in backend_registry.list_builtin(BackendFilter.INTERACTIVE):
        plt.show()
    plt.close(figure)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--out", metavar="FILE", help="where to write the picture (default: RUN/plot.png, or plot.png for several runs)"
    )
    parser.add_argument(
        "--metrics", nargs="+", metavar="KEY", help="metrics in metrics.jsonl to show (default: the usual ones)"
    )
    parser.add_argument("--title", help="a title above all panels")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_args())
