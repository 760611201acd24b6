r"""A reward for code, by unit tests: the last ```python block of a completion must give the value of every call.

    {"prompt": "Write add(a, b) in Python.", "answer": "[[\"add(2, 3)\", 5], [\"add('a', 'b')\", \"ab\"]]"}
    python examples/code_reward.py --model Qwen/Qwen2.5-Coder-0.5B-Instruct --dataset my_tests.jsonl --system-prompt ""

An answer is a JSON list of [call, value], or its row is refused. Values are compared as JSON: 5, 5.0, "5" and true are
four things, a tuple is a list, and a call such as repr(f(3)) asks for what JSON lacks. A program runs in a process of
its own (code_sandbox.py) that never gets the values. README.md says what that takes, and stops; --unsafe goes without.
"""

import json
import os
import re
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from subprocess import PIPE, Popen

SECONDS, MEMORY, CORE, UNSAFE = 5, 2**29, resource.getrlimit(resource.RLIMIT_CORE)[1] and 1, False
NAMESPACES = "unshare --mount --net --pid --ipc --uts --fork --kill-child".split()
CHILD = [sys.executable, "-I", "-S", str(Path(__file__).resolve().with_name("code_sandbox.py"))]


def run(program, calls):
    """Return the values of the calls after the program as JSON in bytes, or less if it does not get that far."""
    user, nobody = ([], 65534) if os.getuid() == 0 else (["--map-root-user"], 0)
    job = json.dumps([program, calls, not UNSAFE, nobody, SECONDS, MEMORY]).encode()
    # A clock of its own, so that it ends even where this process is killed; a core of 1 byte is never made.
    command = f"timeout -s KILL {SECONDS} prlimit --core={CORE}".split() + ([] if UNSAFE else NAMESPACES + user) + CHILD
    env = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    try:
        with Popen(command, -1, None, PIPE, PIPE, PIPE, cwd="/", env=env, start_new_session=True) as process:
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(job)
            values, said = process.stdout.read(2**20), process.stderr.read(2**16).decode(errors="replace")
    except OSError as error:
        said = str(error)
    if said and "shut in\n" not in said:  # which is said before the program runs: what follows is its doing
        raise SystemExit(f"programs cannot be shut in: {said.splitlines()[-1]}; see --unsafe in examples/README.md")
    return values


def read_prompt(read, row, **settings):
    """Read a row as grpo.py does; refuse one whose tests cannot be scored."""
    prompts = read(row, **settings)
    for prompt in prompts:  # one, or why it is dropped
        if isinstance(prompt, str):
            break
        try:
            calls, _ = zip(*json.loads(prompt["answer"]), strict=True)
            all(compile(call.strip(), "call", "eval") for call in calls)
        except Exception:
            raise ValueError("its answer is not a JSON list of expressions and values, [call, value]") from None
    return prompts


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
    """Return a reward for each completion, as many at once as there are CPUs for each rank."""
    with ThreadPoolExecutor(max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))) as pool:
        return list(pool.map(reward_fn, completions, [row["answer"] for row in rows]))


if __name__ == "__main__":
    UNSAFE = "--unsafe" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--unsafe"]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    run("", ["0"]) or sys.exit("programs do not start here in time")  # refused at once or never
    import grpo

    grpo.read_prompt = partial(read_prompt, grpo.read_prompt)
    grpo.parse_gold = str  # tests are no answer that a completion repeats
    grpo.is_right, grpo.reward_fn, grpo.score_completions = is_right, reward_fn, score_completions
    grpo.main(grpo.parse_args())
