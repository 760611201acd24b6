r"""Run grpo.py with a reward for code: a completion earns 1 if its last ```python block passes all unit tests.

    python examples/code_reward.py --model Qwen/Qwen2.5-Coder-0.5B-Instruct --dataset my_tests.jsonl --system-prompt ""

It takes the flags of grpo.py. The answer of a row is a JSON list of [call, value]:

    {"prompt": "Write add(a, b) in Python.", "answer": "[[\"add(2, 3)\", 5], [\"add('a', 'b')\", \"ab\"]]"}

Values are compared as JSON: 5, 5.0, "5" and true are all different, and a tuple equals a list. For a value that JSON
lacks, use a call such as repr(f(3)).

Each program runs in a sandboxed process of its own (code_sandbox.py). It gets only the calls; the parent process keeps
the values. Its limits are 5 seconds, 512 MB of memory, 16 MB of files (in memory), 1 MB of output and one thread. It
can import the standard library, but it has no network, no environment variables and no capabilities, and all that it
sees of the host are libraries, which it can only read. The kernel refuses 29 system calls, such as those for sockets
and for starting another program. Each rank runs as many programs at once as there are CPUs for it.

The sandbox needs Linux 5.12 or newer, util-linux, and namespaces. Root can create them; other users can if the system
allows it. Many containers do not allow it: the run then stops before it loads the model. If you run as root, every user
must be able to read the Python interpreter. Only x86-64 was tested.

--unsafe keeps the refused calls and all limits except the one on files. But a program can then read the data with the
answers, change files and disturb the training, as far as the user (for root: nobody) may do so.

The sandbox does not protect against kernel bugs, a slow machine (the 5 seconds are wall time), or a model that has
memorized the tests.
"""

import json
import os
import re
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from subprocess import PIPE, Popen

SECONDS, MEMORY, CORE, UNSAFE = 5, 2**29, resource.getrlimit(resource.RLIMIT_CORE)[1] and 1, False
NAMESPACES = "unshare --mount --net --pid --ipc --uts --fork --kill-child".split()
CHILD = [sys.executable, "-I", "-S", str(Path(__file__).resolve().with_name("code_sandbox.py"))]


def run(program, calls):
    """Run the program, then the calls, and return their values as JSON bytes, or less if the program fails."""
    user, nobody = ([], 65534) if os.getuid() == 0 else (["--map-root-user"], 0)
    job = json.dumps([program, calls, not UNSAFE, nobody, SECONDS, MEMORY]).encode()
    # timeout ends the program even if this process is killed. A core limit of 1 byte prevents core dumps.
    command = f"timeout -s KILL {SECONDS} prlimit --core={CORE}".split() + ([] if UNSAFE else NAMESPACES + user) + CHILD
    env = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    try:
        with Popen(command, -1, None, PIPE, PIPE, PIPE, cwd="/", env=env, start_new_session=True) as process:
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(job)
            values, said = process.stdout.read(2**20), process.stderr.read(2**16).decode(errors="replace")
    except OSError as error:
        said = str(error)
    if said and "sandbox is ready\n" not in said:  # the child writes this before the program runs
        reason = said.splitlines()[-1]
        raise SystemExit(f"cannot create the sandbox for programs: {reason}; see --unsafe in examples/code_reward.py")
    return values


@lru_cache(2**13)
def is_correct(completion, answer):
    """Return whether the completion's last program passes every test of the answer. Accuracy counts this."""
    programs = re.findall(r"```python\n(.*?)```", completion, re.DOTALL)
    calls, values = zip(*json.loads(answer))
    return bool(programs) and run(programs[-1], calls) == json.dumps(values, sort_keys=True).encode()


def reward_fn(completion, answer):
    """Return 1 if all tests pass and otherwise 0, because trivial programs can pass some of the tests."""
    return float(is_correct(completion, answer))


def score_completions(completions, rows):
    """Return the reward of each completion. As many programs run at once as there are CPUs for each rank."""
    with ThreadPoolExecutor(max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))) as pool:
        return list(pool.map(reward_fn, completions, [row["answer"] for row in rows]))


if __name__ == "__main__":
    UNSAFE = "--unsafe" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--unsafe"]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    run("", ["0"]) or sys.exit(f"an empty program did not end within {SECONDS} seconds")  # fail now, not in training
    import grpo

    grpo.is_correct, grpo.reward_fn, grpo.score_completions = is_correct, reward_fn, score_completions
    grpo.main(grpo.parse_args())
