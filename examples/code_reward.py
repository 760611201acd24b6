r"""A reward for code, by unit tests: the last ```python block of a completion must give the value of every call.

    {"prompt": "Write add(a, b) in Python.", "answer": "[[\"add(2, 3)\", 5], [\"add('a', 'b')\", \"ab\"]]"}
    python examples/code_reward.py --model Qwen/Qwen2.5-Coder-0.5B-Instruct --dataset my_tests.jsonl --system-prompt ""

An answer is a JSON list of [call, value]. Values are compared as JSON: 5, 5.0, "5" and true are four things, a tuple
is a list, and a call such as repr(f(3)) or sorted(f(3)) asks for what JSON lacks. A program runs in a process of its
own (code_sandbox.py) that gets the calls and never the values; what it gives is compared here, as bytes, not parsed.

It sees the folders of libraries, read-only and without packages, and an empty folder in memory: no network, no other
process or thread, no other file, no environment; 5 seconds, 512 MB. That takes Linux on x86-64 (or aarch64, not tried)
and namespaces, which root has, and users where the system lets them. Elsewhere, as in many containers, it is refused:
--unsafe goes without, limits and refused system calls stay, but a program reads and writes what the user may (of root:
what nobody may), the data included. Not protected from: bugs of the kernel, what timing tells, busy CPUs (as many run
at once as there are), data kept in a folder of libraries, and programs that know the tests by heart.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

SECONDS, MEMORY, UNSAFE = 5, 2**29, False
NAMESPACES = "unshare --mount --net --pid --ipc --uts --fork --kill-child".split()
CHILD = [sys.executable, "-I", "-S", str(Path(__file__).resolve().with_name("code_sandbox.py"))]


def run(program, calls):
    """Return the values of the calls after the program as JSON in bytes, or less if it does not get that far."""
    user, nobody = ([], 65534) if os.getuid() == 0 else (["--map-root-user"], 0)
    job = json.dumps([program, calls, not UNSAFE, nobody, SECONDS, MEMORY]).encode()
    # A clock of its own, so that it ends even where this process is killed.
    command = ["timeout", "-s", "KILL", str(SECONDS), *([] if UNSAFE else [*NAMESPACES, *user]), *CHILD]
    env = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    with tempfile.TemporaryFile() as values:
        options = {"stdout": values, "stderr": subprocess.PIPE, "cwd": "/", "env": env, "start_new_session": True}
        try:
            problem = subprocess.run(command, input=job, **options).stderr
        except OSError as error:
            problem = str(error).encode()
        if problem:
            reason = problem.decode().strip().splitlines()[-1]
            raise SystemExit(f"programs cannot be shut in here: {reason}; see --unsafe in examples/code_reward.py")
        values.seek(0)
        return values.read()


@lru_cache(2**13)
def is_right(completion, answer):
    """Does the completion's program pass every test of the answer? Accuracy counts this."""
    programs = re.findall(r"```python\n(.*?)```", completion, re.DOTALL)
    calls, values = zip(*json.loads(answer))
    return bool(programs) and run(programs[-1], calls) == json.dumps(values, sort_keys=True).encode()


def reward_fn(completion, answer):
    """Return the reward of a completion: all tests or nothing, because some may be passed without a thought."""
    return float(is_right(completion, answer))


def score_completions(completions, rows):
    """Return a reward for each completion, as many at once as there are CPUs."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(reward_fn, completions, [row["answer"] for row in rows]))


if __name__ == "__main__":
    UNSAFE = "--unsafe" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--unsafe"]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    run("", ["0"])  # refused at once or never
    import grpo

    grpo.is_right, grpo.reward_fn, grpo.score_completions = is_right, reward_fn, score_completions
    grpo.main(grpo.tyro.cli(grpo.Args))
