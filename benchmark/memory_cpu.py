"""Measure the memory of a step of grpo.py on a CPU, to check the predictions of tools/memory.py.

    python benchmark/memory_cpu.py

The program runs one step of grpo.py on models/smollm2 for each row of settings. It writes the largest resident size of
each process to benchmark/results/memory_cpu.json. A test compares it with the formulas and the section "On a CPU" of
docs/memory.md.

Every step runs in a separate process that saves nothing. Each row is measured twice: with glibc's defaults, and with
MALLOC_MMAP_THRESHOLD_ set. By default glibc keeps freed memory in pieces that are too small for large tensors. With the
variable, it gives this memory back to the system.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
MODEL, RESULT = ROOT / "models" / "smollm2", ROOT / "benchmark" / "results" / "memory_cpu.json"
COMMON = {"prompts_per_step": 4, "minibatch_size": 16, "eval_prompts": 0, "microbatch_tokens": 2048}
COMMON |= {"max_prompt_length": 160, "max_completion_length": 64}
ROWS = [{"precision": "bfloat16", "microbatch_tokens": 1024}]


def run(row):
    """Train for one step with these settings in this process; print its largest resident size in bytes."""
    import resource

    import grpo

    grpo.save = lambda *_: None
    grpo.reward_fn = lambda completion, _: len(completion)  # without a gradient AdamW would make no step
    with tempfile.TemporaryDirectory() as folder:
        settings = COMMON | row | {"num_steps": 1, "run_dir": f"{folder}/run"}
        grpo.main(grpo.Args(model=str(MODEL), dataset=str(ROOT / "data/word_problems/mawps"), **settings))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def measure(row, **variables):
    """Run the step in a separate process; return its largest resident size in bytes."""
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, __file__, "--run", json.dumps(row)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def main():
    rows = []
    for row in ROWS:
        found = {"bytes": measure(row), "bytes_given_back": measure(row, MALLOC_MMAP_THRESHOLD_="1048576")}
        rows.append({"settings": COMMON | row} | found)
        print(row, *(f"{value / 1e9:.2f} GB" for value in found.values()), flush=True)
        RESULT.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    run(json.loads(sys.argv[2])) if sys.argv[1:] else main()
