"""Measure how long grpo.py samples on a CPU that does other work, too.

    python benchmark/threads.py models/smollm2          (about ten minutes)

A rollout samples 16 completions of 12 tokens in float32. The program measures rollouts with one thread and with one for
each core: alone, beside busy loops, and beside another process that samples without end. It prints the medians, and
writes them with the least and the most to benchmark/results/threads.json. docs/runs.md shows them.
"""

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmark/results/threads.json"
CORES = os.cpu_count()
ROLLOUTS = 7  # of which the first is not counted
LOOP = [sys.executable, "-c", "while True: pass"]


def sample(model):
    """Sample rollouts without end, and print the seconds of each."""
    sys.path.insert(0, str(ROOT))
    import grpo

    grpo.init_ranks()
    tokenizer = grpo.AutoTokenizer.from_pretrained(model)
    policy = grpo.load_model(model, tokenizer)
    torch = grpo.torch
    ids = torch.randint(3, len(tokenizer), (16, 64), generator=torch.Generator().manual_seed(0))
    while True:
        start = time.perf_counter()
        grpo.generate(policy, ids, torch.ones_like(ids), 12, 1.0, [])
        print(time.perf_counter() - start, flush=True)


def start(command, threads):
    """Start a process in its own process group."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def measure(model, threads, others):
    """Return the seconds of rollouts with this many threads, beside other processes [(command, its threads)]."""
    sampler = [sys.executable, __file__, "sample", model]
    processes = [start(command or sampler, count) for command, count in others]
    try:
        for (command, _), process in zip(others, processes):
            if command is None:
                process.stdout.readline()  # it samples
        processes.append(start(sampler, threads))
        return [float(processes[-1].stdout.readline()) for _ in range(ROLLOUTS)][1:]
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def table(found):
    """Return a Markdown table of {load: {number of threads: seconds}}."""
    columns = [*next(iter(found.values()))]
    lines = [f"| seconds of a rollout | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for name, row in found.items():
        cells = [f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})" for times in row.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(model):
    loads = {"alone": [], "beside a busy loop": [(LOOP, 1)]}
    loads[f"beside {CORES} busy loops"] = [(LOOP, 1)] * CORES
    loads["beside a rollout with one thread"] = [(None, 1)]
    loads[f"beside a rollout with {CORES} threads"] = [(None, CORES)]
    found = {}
    for name, others in loads.items():
        found[name] = {f"threads: {threads}": measure(model, threads, others) for threads in (1, CORES)}
        print(table({name: found[name]}), flush=True)
    RESULTS.write_text(json.dumps({"cores": CORES, "machine": platform.machine(), "seconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "sample":
        sample(sys.argv[2])
    else:
        main(sys.argv[1])
