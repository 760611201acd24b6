"""The default runs of all scripts: the tables of docs/results.md and of the scripts' pages, and the pages' pictures.

    python benchmark/default_runs.py [SCRIPT ...]    make the runs that the csv lacks, then the tables and pictures
    python benchmark/default_runs.py --page          write only the tables

Each script runs with its defaults and seeds 1 to 5 (sft.py: 1 to 3), and evaluates more often than by default. Two runs
work at a time, with one thread each, in runs/defaults. An interrupted run is resumed; its minutes are then not known.
To repeat a run, delete its rows in the csv and its folder.

benchmark/results/default_runs.csv has the metrics that the pages name, of every step; of sft.py, of every step with an
evaluation. dpo.py does not sample, so grpo.py evaluates its checkpoint, and these numbers are in the row of the last
step.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from threading import Lock

from real_model import execute, read_jsonl, saves_of, table

ROOT = Path(__file__).resolve().parent.parent
RESULT, PAGE = ROOT / "benchmark" / "results" / "default_runs.csv", ROOT / "docs" / "results.md"
FOLDER = Path("runs", "defaults")
SCRIPTS = ("reinforce", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "grpo_process", "grpo_tools")
SCRIPTS += ("gkd", "ppo_rlhf", "dpo", "reward_model", "sft")
EVAL_EVERY = {"dapo": 2, "ppo_rlhf": 5, "reward_model": 16, "sft": 100}
# In a script's picture, the first six of these that it has.
DRAWN = "eval/score eval/accuracy eval/pair_accuracy eval/pair_loss eval/loss reward/mean".split()
DRAWN += "loss/distillation rollout/length_mean policy/entropy policy/ref_kl rollout/ref_kl_sum".split()
DRAWN += ["eval/pair_chosen_log_ratio", "eval/pair_rejected_log_ratio"]
EVALUATED = {  # on held-out rows
    "eval/accuracy": "greedy accuracy",
    "eval/pass@1": "pass@1",
    "eval/score": "score, in standard deviations of the initial model's scores",
    "eval/pair_accuracy": "pairs in the right order",
    "eval/pair_loss": "loss of pairs, nats",
    "eval/pair_chosen_log_ratio": "log-probability of the preferred completions relative to the reference, nats",
    "eval/pair_rejected_log_ratio": "log-probability of the rejected completions relative to the reference, nats",
    "eval/loss": "loss, nats per token",
}
SAMPLED = {  # on the completions of each step; the pictures show more
    "loss/distillation": "divergence from the teacher, nats per token",
    "rollout/ref_kl_sum": "KL to the reference, nats per completion",
    "rollout/tool_use": "share of completions that call the tool",
    "rollout/tool_tokens": "tokens of a completion that the tool wrote",
    "value/explained_variance": "explained variance of the value model",
}
DIGITS = {"rollout/tool_tokens": 1}  # after the point, if not 3
# What the pages name outside of the tables, and loss/kl and eval/pass@4, which are in the csv but no longer logged.
OTHERS = ["reward/mean", "reward/zero_std", "loss/policy", "loss/kl"]
OTHERS += ["rollout/length_mean", "policy/entropy", "policy/ref_kl", "policy/approx_kl", "eval/pass@4"]
OTHERS += ["policy/clip_fraction_low", "policy/clip_fraction_high", "policy/cap_fraction"]
OTHERS += ["optim/grad_norm", "optim/value_grad_norm", "rollout/truncated", "rollout/rounds", "rollout/steps"]
OTHERS += ["perf/step_seconds"]


def seeds_of(script):
    return range(1, 4) if script == "sft" else range(1, 6)


def run(script, seed):
    """Run a script, and return its rows of the csv."""
    folder = FOLDER / f"{script}__{seed}"
    resumed = bool(saves_of(folder))
    flags = ["--eval-every", str(EVAL_EVERY.get(script, 4)), "--seed", str(seed), "--run-dir", str(folder)]
    minutes, gib = execute(["python", f"{script}.py", *flags], 1)
    rows = read_jsonl(folder / "metrics.jsonl")
    if script == "dpo":
        flags = ["--tiny", "--num-steps", "0", "--seed", str(seed), "--run-dir", f"{folder}_sampled"]
        execute(["python", "grpo.py", "--model", str(folder / "checkpoint-000064"), *flags], 1)
        sampled = read_jsonl(Path(f"{folder}_sampled", "metrics.jsonl"))[0]
        rows[-1] = sampled | rows[-1]
    if script == "sft":
        rows = [row for row in rows if "eval/loss" in row]
    kept = ["step", *OTHERS, *EVALUATED]
    kept += SAMPLED if script != "sft" else []
    rows = [{name: row[name] for name in kept if name in row} for row in rows]
    if not resumed:
        rows[-1] |= {"minutes": minutes, "gib": gib}
    return [{"script": script, "seed": seed} | row for row in rows]


def read_rows():
    """Return the rows of the csv, with numbers as numbers and without empty cells."""
    if not RESULT.exists():
        return []
    with open(RESULT, newline="") as file:
        rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [{name: value if name == "script" else float(value) for name, value in row.items()} for row in rows]


def write_rows(rows):
    rows.sort(key=lambda row: (SCRIPTS.index(row["script"]), row["seed"], row["step"]))
    names = ["script", "seed", "step", *EVALUATED, *SAMPLED, *OTHERS, "minutes", "gib"]
    with open(RESULT, "w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: f"{v:.6g}" if isinstance(v, float) else v for name, v in row.items()})


def values_of(rows, script, seed, metric):
    """Return the values of a metric in a run, in the order of the steps."""
    return [row[metric] for row in rows if (row["script"], row["seed"]) == (script, seed) and metric in row]


def has(rows, script, metric):
    """Return whether a script has a metric; dpo.py's values before training are those of grpo.py."""
    scripts = {script, "grpo"} if (script, metric) == ("dpo", "eval/pass@1") else {script}
    return all(any(row["script"] == name and metric in row for row in rows) for name in scripts)


def before_and_after(rows, script, metric):
    """Return the values of a metric before and after training, one per seed.

    Metrics of training samples are medians of the first and of the last five steps.
    """
    size = 5 if metric in SAMPLED else 1
    runs = [values_of(rows, script, seed, metric) for seed in seeds_of(script)]
    before = [median(values[:size]) for values in runs]
    if script == "dpo" and metric in ("eval/accuracy", "eval/pass@1"):  # grpo.py starts from the same model
        before, _ = before_and_after(rows, "grpo", metric)
    return before, [median(values[-size:]) for values in runs]


def spread(values, digits=3):
    """Return a mean with the lowest and the highest value."""
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def minutes_of(rows, script):
    """Return the mean minutes of a script's runs."""
    return f"{mean(row['minutes'] for row in rows if row['script'] == script and 'minutes' in row):.1f}"


def table_of_all(rows):
    """Return the table of docs/results.md: accuracy and pass@1 after training, and minutes."""
    lines = []
    for script in SCRIPTS:
        if has(rows, script, "eval/accuracy"):
            cells = ["", ""]
            for i, metric in enumerate(("eval/accuracy", "eval/pass@1")):
                if has(rows, script, metric):  # most scripts no longer log pass@1
                    cells[i] = spread(before_and_after(rows, script, metric)[1])
            lines.append([f"`{script}.py`", *cells, minutes_of(rows, script)])
    return table(["script", "greedy accuracy", "pass@1", "minutes"], lines)


def table_of_own(rows):
    """Return the table of docs/results.md with the metrics that single scripts have."""
    lines = []
    for script in ("ppo_rlhf", "dpo", "reward_model", "sft"):
        for metric in ("eval/score", "eval/pair_accuracy", "eval/loss"):
            if has(rows, script, metric):
                before, after = before_and_after(rows, script, metric)
                minutes = minutes_of(rows, script) if script in ("reward_model", "sft") else ""  # else above
                lines.append([f"`{script}.py`", f"`{metric}`", f"{mean(before):.3f}", spread(after), minutes])
    return table(["script", "metric", "before", "after", "minutes"], lines)


def table_of(rows, script):
    """Return the table of a script's page."""

    def lines_of(metrics):
        for metric, title in metrics.items():
            if has(rows, script, metric):
                before, after = before_and_after(rows, script, metric)
                digits = DIGITS.get(metric, 3)
                yield [title, f"{mean(before):.{digits}f}", spread(after, digits)]

    lines = [*lines_of(EVALUATED)]
    if has(rows, script, "eval/accuracy") and script != "dpo":
        lowest = [min(values_of(rows, script, seed, "eval/accuracy")) for seed in seeds_of(script)]
        good = [row for row in rows if row["script"] == script and row.get("eval/accuracy", 0) >= 0.9]
        first = [min(row["step"] for row in good if row["seed"] == seed) for seed in seeds_of(script)]
        lines.append(["lowest greedy accuracy on the way", "", spread(lowest)])
        lines.append(["first evaluated step with accuracy of at least 0.9", "", spread(first, 0)])
    if script == "sft":
        for step in (500, 1000):
            values = [row["eval/loss"] for row in rows if (row["script"], row["step"]) == ("sft", step)]
            lines.append([f"loss after {step:,} steps, nats per token", "", spread(values)])
    if sampled := [*lines_of(SAMPLED)]:
        lines += [["*medians of training steps:*", "*steps 1 to 5*", "*last five steps*"], *sampled]
    number = {3: "three", 5: "five"}[len(seeds_of(script))]
    head = [[" ", "before", f"after: mean of {number} seeds (lowest to highest)"], ["---"] * 3]
    return "\n".join(f"|{'|'.join(line)}|" for line in head + lines)


def fill(page, name, text):
    """Return the page with a table between its two marks."""
    before, mark, rest = page.partition(f"<!-- {name} -->\n")
    if not mark:
        raise ValueError(f"the page lacks the line <!-- {name} -->")
    _, end, after = rest.partition("<!-- end -->")
    return f"{before}{mark}\n{text}\n\n{end}{after}"


def filled_pages(rows):
    """Return {path: the page with its tables}."""
    results = fill(PAGE.read_text(encoding="utf-8"), "default runs", table_of_all(rows))
    pages = {PAGE: fill(results, "metrics of single scripts", table_of_own(rows))}
    for script in SCRIPTS:
        path = ROOT / "docs" / f"{script}.md"
        pages[path] = fill(path.read_text(encoding="utf-8"), "default run", table_of(rows, script))
    return pages


def draw(scripts):
    """Draw each script's picture from the csv: the mean over its seeds, and a band from the lowest to the highest."""
    rows = read_rows()
    with tempfile.TemporaryDirectory() as folder:
        for script in scripts:
            runs = [Path(folder, f"{script}__{seed}") for seed in seeds_of(script)]
            for seed, run in zip(seeds_of(script), runs):
                run.mkdir()
                (run / "args.json").write_text(json.dumps({"seed": seed}))
                own = [row for row in rows if (row["script"], row["seed"]) == (script, seed)]
                (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
            found = [name for name in DRAWN if any(name in row for row in rows if row["script"] == script)][:6]
            title = f"python {script}.py\nlines: mean of {len(runs)} seeds; bands: lowest to highest"
            command = ["tools/plot.py", *map(str, runs), "--out", f"docs/pictures/{script}.png", "--title", title]
            subprocess.run([sys.executable, *command, "--metrics", *found], check=True, stdout=subprocess.DEVNULL)


def make(scripts):
    """Make the runs that the csv lacks."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    lock = Lock()

    def job(script, seed):
        rows = run(script, seed)
        with lock:
            write_rows([row for row in read_rows() if (row["script"], row["seed"]) != (script, seed)] + rows)
        print(f"{script}.py, seed {seed}: done", flush=True)

    done = {(row["script"], row["seed"]) for row in read_rows()}
    jobs = [(script, seed) for seed in range(1, 6) for script in scripts if seed in seeds_of(script)]
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(job, *found) for found in jobs if found not in done]
        try:
            for future in futures:
                future.result()
        finally:  # after an error or Ctrl-C, start no further runs
            pool.shutdown(cancel_futures=True)


def main(words):
    os.chdir(ROOT)
    scripts = [word for word in words if word != "--page"] or SCRIPTS
    if unknown := set(scripts) - set(SCRIPTS):
        raise SystemExit(f"no such script: {' '.join(sorted(unknown))}; choose from {' '.join(SCRIPTS)}")
    if "--page" not in words:
        make(scripts)
        draw(scripts)
    for path, text in filled_pages(read_rows()).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
