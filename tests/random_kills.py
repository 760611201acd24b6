"""Kill runs at random moments, resume them, and compare them with runs that were left alone.

    python tests/random_kills.py [SCRIPT ...] [--kills 20] [--seed 0]

Each script makes one run in peace. Another of the same settings is started, and resumed again and again: each time it
is killed with SIGKILL at a random moment after its first step, until the kills are spent. What ends before is compared,
and another is begun. Exit status 1 unless weights, samples and metrics are always those of the run in peace.
"""

import argparse
import contextlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from processes import assert_same_run, finish, start

SIZES = "--num-steps 30 --eval-prompts 8 --eval-every 7 --save-every 2 --warmup-steps 2 --minibatch-size 8".split()
GROUPS = "--prompts-per-step 4 --group-size 4 --max-completion-length 32".split()
FLAGS = dict.fromkeys(("grpo", "dapo", "cispo", "grpo_process", "grpo_tools"), GROUPS)
FLAGS |= {"sft": [], "dpo": [], "ppo_rlhf": "--prompts-per-step 8".split()}


def steps_of(run):
    """The steps that are logged whole, and those of which there is a state."""
    lines = (run / "metrics.jsonl").read_text().splitlines(True) if (run / "metrics.jsonl").exists() else []
    logged = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
    return logged, [int(path.name) for path in run.glob("state/*") if path.name.isdigit()]


def wait_for_a_step(run, saved, process):
    """Return when the process has made a step that was not saved before, or has ended."""
    begin, path = time.time(), run / "metrics.jsonl"  # which resuming rewrites first of all
    while process.poll() is None and (
        not path.exists() or path.stat().st_mtime < begin or max(steps_of(run)[0], default=0) <= saved
    ):
        time.sleep(0.02)


def kill_and_resume(script, flags, run, reference, kills, seconds):
    """Kill a run this many times and compare what it comes to; return the step that each kill came after."""
    killed_after = []
    while True:
        logged, states = steps_of(run)
        if not states:
            shutil.rmtree(run, ignore_errors=True)
        process = start(script, ["--resume", str(run)] if states else [*flags, "--run-dir", str(run)])
        if len(killed_after) < kills:
            wait_for_a_step(run, max(states, default=0), process)
            time.sleep(random.uniform(0, seconds))
            with contextlib.suppress(ProcessLookupError):  # it has ended
                process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            killed_after.append(steps_of(run)[0][-1])
            continue
        assert process.returncode == 0
        assert_same_run(run, reference)
        if len(killed_after) == kills:
            return killed_after
        shutil.rmtree(run)  # it ended before its time: another one


def main():
    parser = argparse.ArgumentParser(description="Kill runs at random moments, resume and compare them.")
    parser.add_argument("scripts", nargs="*", default=list(FLAGS), help=f"of {', '.join(FLAGS)}; default: all of them")
    parser.add_argument("--kills", type=int, default=20, help="in all, shared among the scripts")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    random.seed(args.seed)
    shares = [args.kills // len(args.scripts) + (i < args.kills % len(args.scripts)) for i in range(len(args.scripts))]
    for script, kills in zip(args.scripts, shares):
        with tempfile.TemporaryDirectory() as folder:
            reference, flags = Path(folder, "reference"), [*SIZES, *FLAGS[script]]
            process = start(script, [*flags, "--run-dir", str(reference)])
            wait_for_a_step(reference, 0, process)
            begin = time.perf_counter()
            finish(process)
            seconds = time.perf_counter() - begin
            steps = kill_and_resume(script, flags, Path(folder, "run"), reference, kills, seconds / 2)
            print(f"{script}: the same after {kills} kills, after steps {steps} of 30", flush=True)


if __name__ == "__main__":
    sys.exit(main())
