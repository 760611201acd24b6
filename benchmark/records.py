"""What the benchmarks share: run a command, keep its record, and fill the tables of pages.

A file of records is JSON Lines with one run per line: its name, seed and command, the commit, the processor, CPU
minutes, GiB, and {metric: {step: value}}. A busy machine changes CPU minutes less than the time on a clock.
"""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from threading import Lock

ROOT = Path(__file__).resolve().parent.parent
RESULTS, DOCS = ROOT / "benchmark" / "results", ROOT / "docs"
LOCK = Lock()  # of the file of records


def processor():
    """Return the name of the processor."""
    information = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", information.read_text()) if information.exists() else []
    return names[0] if names else platform.processor()


def execute(command, folder):
    """Run a command, its output in FOLDER.log, on one thread; return its CPU minutes and its largest memory in GiB."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted run has left
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with open(f"{folder}.log", "w") as log:
        words = [sys.executable, *shlex.split(command)[1:], "--run-dir", str(folder)]
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{command}: see {folder}.log")
    return (usage.ru_utime + usage.ru_stime) / 60, usage.ru_maxrss / 2**20


def read_metrics(folder):
    """Return {metric: {step: value}} of a run."""
    metrics = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        step = str(row.pop("step"))
        for name, value in row.items():
            if not name.startswith("perf/"):
                metrics.setdefault(name, {})[step] = float(f"{value:.5g}")
    return metrics


def make_run(name, seed, command, folder):
    """Execute a run and return its record."""
    minutes, gib = execute(command, folder)
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    record = {"run": name, "seed": seed, "command": command, "commit": commit, "processor": processor()}
    return record | {"minutes": round(minutes, 1), "gib": round(gib, 2), "metrics": read_metrics(folder)}


def read_records(path):
    """Return the records of a file as {(run, seed): record}, and nothing if there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    return {(record["run"], record["seed"]): record for record in records}


def write_record(path, record, order):
    """Add a record to a file, or replace it there. Runs stand in the given order."""
    with LOCK:
        records = read_records(path) | {(record["run"], record["seed"]): record}
        found = sorted(records.values(), key=lambda one: (order.index(one["run"]), one["seed"]))
        path.write_text("".join(json.dumps(one) + "\n" for one in found))


def work(jobs, work_on, together):
    """Call work_on(*job) for all jobs, so many at a time. After an error no further job begins."""
    pool = ThreadPoolExecutor(together)
    futures = [pool.submit(work_on, *job) for job in jobs]
    try:
        for future in futures:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def first_and_last(records, metric):
    """Return a metric's first and last values of several runs, as two lists."""
    values = [list(record["metrics"][metric].values()) for record in records]
    return [one[0] for one in values], [one[-1] for one in values]


def spread(values):
    """Return the mean of values and, if there are several, the lowest and the highest."""
    text = f"{mean(values):.3f}"
    return f"{text} ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else text


def table(head, rows):
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"|{'|'.join(map(str, line))}|" for line in lines)


def fill(page, name, text):
    """Put a table into a page, between the lines <!-- NAME --> and <!-- end -->."""
    before, mark, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    if not mark:
        raise ValueError(f"{page} lacks the line <!-- {name} -->")
    _, end, after = rest.partition("<!-- end -->")
    page.write_text(f"{before}{mark}\n{text}\n\n{end}{after}", encoding="utf-8")
