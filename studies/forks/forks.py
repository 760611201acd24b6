"""Compare the forks of docs/forks/ with the scripts that they fork.

    python benchmark/forks.py [FORK ...] [--results FILE]                        (default: all forks)
    python benchmark/forks.py --page                  (runs nothing; writes the tables of docs/forks/*.md)

The program applies the diff on a fork's page to its script and trains the result. It does the runs as
benchmark/claims.py does, with the same settings and columns; both sides of GDPO get a reward of two parts. It writes
the runs to benchmark/results/forks.csv and skips those that are already there. Use --results to begin a file of your
own.
"""

import argparse
import csv
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import claims
from claims import LEARN, ON_EASY_TASK, ROOT, cell, measure, value_of

RESULTS = ROOT / "benchmark" / "results" / "forks.csv"
PAGES = ROOT / "docs" / "forks"
SEEDS = claims.THREE_SEEDS
MANY_UPDATES = cell("grpo", "3e-4", 16)

RUNS = {  # {fork: {row of its table: run}}; the name after a bar is a fork, or "two parts", not one of claims.PATCHES
    "maxrl": {"`grpo.py`": f"grpo {LEARN}", "`my_maxrl.py`": f"grpo {LEARN} | maxrl"},
    "dppo": {"`grpo.py`": MANY_UPDATES, "`my_dppo.py`": f"{MANY_UPDATES} | dppo"},
    "gdpo": {"`grpo.py`": f"grpo {LEARN} | two parts", "`my_gdpo.py`": f"grpo {LEARN} | gdpo"},
    "ipo": {
        "`dpo.py --beta 0.5`": f"dpo {ON_EASY_TASK}",
        "`my_ipo.py --beta 0.5`": f"dpo {ON_EASY_TASK} | ipo",
        "`dpo.py --beta 0.1`": f"dpo --beta 0.1 {ON_EASY_TASK}",
        "`my_ipo.py --beta 0.1`": f"dpo --beta 0.1 {ON_EASY_TASK} | ipo",
    },
    "simpo": {
        "`dpo.py`": f"dpo {ON_EASY_TASK}",
        "`my_simpo.py`": f"dpo {ON_EASY_TASK} | simpo",
        "`my_simpo.py --beta 10 --gamma 3`": f"dpo --beta 10 --gamma 3 {ON_EASY_TASK} | simpo",
    },
}
# GDPO is for rewards of several parts. Here they are a right answer, and exactly three dots after it.
SCORES = '[reward_fn(completion, row["answer"]) for completion, row in zip(completions, rows)]'
PARTS = '{"right": reward_fn(completion, row["answer"]), "dots": float(completion.endswith("}..."))}'
TWO_PARTS = [(SCORES, f"[{PARTS} for completion, row in zip(completions, rows)]")]
PART_COLUMNS = {"part_right": "reward/right", "part_dots": "reward/dots"}  # in addition to those of claims.py
ACCURACY = {"greedy accuracy": ("accuracy", 40, 40)}
SAMPLED = ACCURACY | {"pass@1": ("pass@1", 40, 40), "pass@4": ("pass@4", 40, 40)}
PAIRS = ACCURACY | {"log-ratio of the chosen": ("chosen", 36, 40), "of the rejected": ("rejected", 36, 40)}
COLUMNS = {  # {fork: {title: (column of claims.py, first step, last step)}}
    "maxrl": {"reward, steps 31 to 40": ("reward", 31, 40), "groups all wrong": ("all_wrong", 31, 40)} | SAMPLED,
    "dppo": {f"reward, steps {a} to {b}": ("reward", a, b) for a, b in ((6, 10), (16, 20), (31, 40))} | ACCURACY,
    "gdpo": {
        f"{part}, steps {a} to {b}": (column, a, b)
        for part, column in (("right", "part_right"), ("three dots", "part_dots"))
        for a, b in ((6, 10), (31, 40))
    }
    | ACCURACY,
    "ipo": PAIRS,
    "simpo": PAIRS,
}


def diff_of(name):
    """Return the diff on a fork's page."""
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    return re.search(r"^```diff\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1]


def forked(name):
    """Return the text of the script that is forked, and the fork that replaces it."""
    script = next(iter(RUNS[name].values())).split()[0]
    source = (ROOT / f"{script}.py").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"my_{name}.py")
        file.write_text(source, encoding="utf-8")
        subprocess.run(["git", "apply", "-p0"], cwd=folder, input=diff_of(name).encode(), check=True)
        return source, file.read_text(encoding="utf-8")


def table(name, found):
    """Return the markdown table of a fork: the mean, lowest and highest value over the seeds."""
    lines = [f"| | {' | '.join(COLUMNS[name])} |", "|---" * (len(COLUMNS[name]) + 1) + "|"]
    for side, run in RUNS[name].items():
        cells = [side]
        for column, first, last in COLUMNS[name].values():
            values = [value_of(found.get((run, seed), []), column, first, last) for seed in SEEDS]
            ends = None if None in values else f"{min(values):.3g} to {max(values):.3g}"
            cells.append(f"{statistics.mean(values):.3g} ({ends})" if ends else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def fill(name, page, found):
    """Return the page of a fork with its table filled in."""
    before, mark, rest = page.partition("<!-- runs -->\n")
    return f"{before}{mark}\n{table(name, found)}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("forks", nargs="*", metavar="FORK", help=f"forks to run: {' '.join(RUNS)} (default: all)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="csv of finished runs, which are skipped")
    parser.add_argument("--page", action="store_true", help="run nothing; write the tables of the pages")
    args = parser.parse_args()
    if unknown := {*args.forks} - {*RUNS}:
        parser.error(f"unknown fork: {' '.join(unknown)}; --help lists all forks")
    claims.COLUMNS |= PART_COLUMNS
    header = ["run", "seed", "step", *claims.COLUMNS]
    if not args.results.exists():
        args.results.write_text(",".join(header) + "\n", encoding="utf-8")
    chosen, found = args.forks or [*RUNS], claims.read(args.results)
    wanted = [(run, seed) for name in chosen for run in RUNS[name].values() for seed in SEEDS]
    wanted = [key for key in dict.fromkeys(wanted) if key not in found and not args.page]
    claims.PATCHES |= {name: [forked(name)] for name in RUNS} | {"two parts": TWO_PARTS}
    claims.PATCHES["gdpo"] += TWO_PARTS
    for run, seed in wanted:
        rows = measure(run, seed)
        with args.results.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, header, lineterminator="\n").writerows(rows)
        print(run, seed, rows[-1] if rows else "failed", flush=True)
    found = claims.read(args.results)
    for name in chosen:
        if args.page:
            path = PAGES / f"{name}.md"
            path.write_text(fill(name, path.read_text(encoding="utf-8"), found), encoding="utf-8")
        else:
            print(f"\n{name}\n\n{table(name, found)}")
    return any(key not in found for key in wanted)


if __name__ == "__main__":
    sys.exit(main())
