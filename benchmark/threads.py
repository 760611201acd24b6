"""Measure how the step time of grpo.py on a busy machine depends on the way its threads wait.

    python benchmark/threads.py          (10 to 20 minutes)

The program prints its measurements and writes them to benchmark/results/threads.json.

torch's threads wait for each other several times in every operation. They spin before they sleep, for 300,000 turns
unless libgomp's GOMP_SPINCOUNT is set. If the awaited thread is not running, because the machine has other work, a step
takes many times as long. The program runs grpo.py beside several loads, with several ways of waiting, which all
processes share. For a model this small, grpo.py takes a single thread. Here it takes as many as torch takes by itself.

A number is the median of perf/step_seconds, without the first two steps. A run ends after 12 steps or 75 seconds.
"""

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmark/results/threads.json"
WAITS = {
    "300,000 turns (libgomp's default)": {"GOMP_SPINCOUNT": "300000"},
    "3,000 turns": {"GOMP_SPINCOUNT": "3000"},
    "1,000 turns": {"GOMP_SPINCOUNT": "1000"},
    "none (OMP_WAIT_POLICY=PASSIVE)": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
}
BUSY_LOOP = [sys.executable, "-c", "while True: pass"]
TRAINING = [sys.executable, __file__, "train", "--num-steps", "100000", "--eval-prompts", "8", "--eval-every", "100000"]
SECONDS = 75  # longest time of a measured training run
LOADS = {  # {name: (other processes, variables of all processes, variables of the other processes)}
    "alone": ([], {}, {}),
    "alone, OMP_NUM_THREADS=8": ([], {"OMP_NUM_THREADS": "8"}, {}),
    "beside one busy loop": ([BUSY_LOOP], {}, {}),
    "beside one training": ([TRAINING], {}, {}),
    "beside three trainings with one thread each": ([TRAINING] * 3, {}, {"OMP_NUM_THREADS": "1"}),
    "beside three trainings": ([TRAINING] * 3, {}, {}),
}


def start(command, folder, variables):
    """Start a process in its own process group; a training run writes into the folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    if command is not BUSY_LOOP:
        command = [*command, "--run-dir", str(folder)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=ROOT, env=environment | variables, start_new_session=True, **quiet)


def read_seconds(folder):
    """Return the seconds of all finished steps except the first two."""
    log = folder / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [row["perf/step_seconds"] for row in map(json.loads, lines) if row["step"] > 2]


def measure(wait, load):
    """Return the median step time of a training run beside other processes, and the number of measured steps."""
    others, common, theirs = LOADS[load]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        own = {"HF_HUB_OFFLINE": "1"} | WAITS[wait] | common
        beside = [start(command, folder / f"other{i}", own | theirs) for i, command in enumerate(others)]
        if others:
            time.sleep(20)  # so that the others are training
        training = start(TRAINING, folder / "own", own)
        end = time.time() + SECONDS
        while time.time() < end and len(read_seconds(folder / "own")) < 10:
            time.sleep(1)
        seconds = read_seconds(folder / "own")
        for process in [training, *beside]:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return {"median": statistics.median(seconds) if seconds else None, "steps": len(seconds)}


def train():
    """Train with grpo.py, and leave the number of threads to torch."""
    sys.path.insert(0, str(ROOT))
    import grpo

    grpo.torch.set_num_threads = lambda _: None
    del sys.argv[1]
    grpo.main(grpo.parse_args())


def main():
    rows = {}
    for load in LOADS:
        for wait in WAITS:
            rows.setdefault(load, {})[wait] = measure(wait, load)
            print(load, wait, rows[load][wait], flush=True)
    machine = {"processors": os.cpu_count(), "machine": platform.machine()}
    RESULTS.write_text(json.dumps({"machine": machine, "seconds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    train() if sys.argv[1:2] == ["train"] else main()
