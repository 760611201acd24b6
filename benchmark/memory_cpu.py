"""Does tools/memory.py know what a run takes on a CPU? A step of grpo.py on models/smollm2, and the most that it held.

    python benchmark/memory_cpu.py              every row; writes benchmark/results/memory_cpu.json

docs/memory.md has them beside the formulas (`python tools/memory.py --write docs/memory.md`). A row is a process that
saves nothing; what it held is its largest resident size. Each is measured twice: as it is, and with glibc told to give
back what was freed (MALLOC_MMAP_THRESHOLD_), which it otherwise keeps in pieces that large tensors do not fit into.
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
ROWS = [
    {"precision": precision} | row
    for row in ({"microbatch_tokens": 1024}, {}, {"gradient_checkpointing": True}, {"lora_rank": 8})
    for precision in ("bfloat16", "float32")
]


def run(row):
    """Train a step with these settings in this process; print the most memory it had, in bytes."""
    import resource

    import grpo

    grpo.save = lambda *_: None
    with tempfile.TemporaryDirectory() as folder:
        settings = COMMON | row | {"num_steps": 1, "run_dir": f"{folder}/run"}
        grpo.main(grpo.Args(model=str(MODEL), dataset=str(ROOT / "data/word_problems/mawps"), **settings))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def measure(row, **variables):
    """The same in a process of its own."""
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
