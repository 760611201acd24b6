"""Plot the runs of examples/sorting/run.sh, and print a table of their last values and examples of hacked completions.

    python examples/sorting/show.py [FOLDER] [PICTURE]         (default: runs/sorting, and sorting.png in that folder)

A completion is hacked if it earns 1 or more, as the sorted list does, and is not the sorted list.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import plot

REWARDS = ("exact", "position", "inclusion", "repaired")
TITLES = {
    "reward/mean": "reward of samples",
    "eval/accuracy": "exact match, greedy",
    "eval/pass@1": "exact match of samples",
    "rollout/length_mean": "completion tokens",
}


def find_hacked(run):
    """Return the hacked greedy completions of the evaluation that has the most of them."""
    steps = {}
    for row in plot.read_rows(run.folder / "eval_samples.jsonl"):
        is_hacked = row["reward"] >= 1 and row["completion"].split() != row["answer"].split()
        steps.setdefault(row["step"], []).extend([row] if is_hacked else [])
    return max(steps.values(), key=len)


def main(folder, picture):
    groups = {name: [plot.read_run(run) for run in sorted(folder.glob(f"{name}__*"))] for name in REWARDS}
    groups = {name: runs for name, runs in groups.items() if runs}
    if not groups:
        raise SystemExit(f"{folder} has no runs of {', '.join(REWARDS)}; run sh examples/sorting/run.sh first")
    plot.PANELS |= TITLES
    plot.draw(groups, list(TITLES)).savefig(picture, dpi=80)
    for run in (run for runs in groups.values() for run in runs):
        hacked = find_hacked(run)
        print(f"{run.name}: {len(hacked)} hacked completions" + (f" at step {hacked[0]['step']}" if hacked else ""))
        for row in hacked[:4]:
            print(f"    {row['prompt']:12}  {row['reward']:.2f}  {row['completion']}")
    print(f"\n{plot.table(groups, TITLES)}\nwritten: {picture}")


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sorting")
    main(folder, Path(sys.argv[2]) if len(sys.argv) > 2 else folder / "sorting.png")
