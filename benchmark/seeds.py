"""Train a script with its default settings and several seeds, one run after the other.

    python benchmark/seeds.py [SCRIPT] [SEED ...]        (default: grpo 1 2 3 4 5)

The program prints held-out accuracy, pass@1 and completion length before and after training, and the seconds of
training. It writes these numbers to benchmark/results/SCRIPT_seeds.json. The runs themselves go to a temporary folder.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(script, seeds):
    rows = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            command = [sys.executable, str(ROOT / f"{script}.py"), "--seed", str(seed), "--run-dir", str(run)]
            environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rows.append(
            {
                "seed": seed,
                "before": lines[0]["eval/accuracy"],
                "after": lines[-1]["eval/accuracy"],
                "pass@1 before": lines[0]["eval/pass@1"],
                "pass@1 after": lines[-1]["eval/pass@1"],
                "training seconds": sum(line.get("perf/step_seconds", 0.0) for line in lines),
                "length before": lines[1]["rollout/length_mean"],
                "length after": lines[-1]["rollout/length_mean"],
            }
        )
        print("  ".join(f"{key} {value:.3f}" if key != "seed" else f"seed {value}" for key, value in rows[-1].items()))
    mean = {key: statistics.mean(row[key] for row in rows) for key in rows[0] if key != "seed"}
    print("mean    " + "  ".join(f"{key} {value:.3f}" for key, value in mean.items()))
    print(f"lowest accuracy after training: {min(row['after'] for row in rows):.3f}")
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "processor": platform.machine()}
    result = {"script": script, "machine": machine, "seeds": rows, "mean": mean}
    path = ROOT / "benchmark" / "results" / f"{script}_seeds.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "grpo", [int(seed) for seed in sys.argv[2:]] or [1, 2, 3, 4, 5])
