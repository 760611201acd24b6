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
    "rollout/length_mean": "completion tokens",
}


def find_hacked(run):
    """Return the hacked completions of the last group in samples.jsonl that has the most of them."""
    groups = []
    for row in plot.read_rows(run.folder / "samples.jsonl"):
        pairs = zip(row["completions"], row["rewards"])
        hacked = [pair for pair in pairs if pair[1] >= 1 and pair[0].split() != row["answer"].split()]
        groups.append((row, hacked))
    return max(reversed(groups), key=lambda group: len(group[1]))


def main(folder, picture):
    groups = {name: [plot.read_run(run) for run in sorted(folder.glob(f"{name}__*"))] for name in REWARDS}
    groups = {name: runs for name, runs in groups.items() if runs}
    if not groups:
        raise SystemExit(f"{folder} has no runs of {', '.join(REWARDS)}; run sh examples/sorting/run.sh first")
    plot.PANELS |= TITLES
    plot.draw(groups, list(TITLES)).savefig(picture, dpi=80)
    for run in (run for runs in groups.values() for run in runs):
        row, hacked = find_hacked(run)
        print(f"{run.name}: {len(hacked)} of {len(row['rewards'])} completions at step {row['step']} are hacked")
        for completion, reward in hacked[:4]:
            print(f"    {row['prompt']:12}  {reward:.2f}  {completion}")
    print(f"\n{plot.table(groups, TITLES)}\nwritten: {picture}")


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sorting")
    main(folder, Path(sys.argv[2]) if len(sys.argv) > 2 else folder / "sorting.png")
