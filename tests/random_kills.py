"""Kill runs at random moments, resume and compare them: python tests/random_kills.py [SCRIPT ...] [--kills N]"""

import argparse
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
FLAGS = dict.fromkeys(("grpo_tools",), GROUPS)
FLAGS |= {"sft": [], "dpo": [], "ppo_rlhf": "--prompts-per-step 8".split()}


def steps_of(run):
    """The steps that are logged whole, and those of which there is a state."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(True) if path.exists() else []
    logged = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
    return logged, [int(path.name) for path in run.glob("state/0*")]


def wait_for_a_step(run, saved, process):
    """Return when the process has made a step that was not saved before, or has ended."""
    begin, path = time.time(), run / "metrics.jsonl"  # which resuming rewrites first of all
    while process.poll() is None:
        if path.exists() and path.stat().st_mtime >= begin and max(steps_of(run)[0], default=0) > saved:
            return
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
            if process.poll() is None:
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
    for place, script in enumerate(args.scripts):
        kills = len(range(place, args.kills, len(args.scripts)))
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
