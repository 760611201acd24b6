"""Tests of examples/code_reward.py: right programs pass, and attacks on the sandbox, the reward or the machine fail."""

import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from toy import ROOT, load_module, read_jsonl, write_jsonl

import grpo

code_reward = load_module(ROOT / "examples" / "code_reward.py")
try:
    code_reward.run("", ["0"])
    no_box = ""
except SystemExit as error:
    no_box = str(error)
boxed = pytest.mark.skipif(bool(no_box), reason=no_box)

ADD = "def add(a, b):\n    return a + b\n"
TESTS = json.dumps([["add(2, 3)", 5], ["add([1], [2])", [1, 2]], ["add('a', 'b')", "ab"]])


def completion(program):
    return f"<think>easy</think>\nHere it is:\n```python\n{program}\n```\nDone."


def count_processes():
    """Return how many processes run a sandbox or wait for one."""
    count = 0
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            count += code_reward.CHILD[-1].encode() in file.read_bytes()
    return count


REWARDS = [
    (completion(ADD), 1),
    (completion(ADD + "import heapq, itertools, math, re, collections, ssl, sqlite3, random\nrandom.random()"), 1),
    (completion(ADD + "print('x' * 10**8)\nopen('notes', 'w').write('mine')"), 1),
    (completion("def add(a, b):\n    return b + a"), 0),
    (completion("def add(a, b:"), 0),
    (completion("raise ValueError"), 0),
    (completion("def add(a, b):\n    return str(a + b)"), 0),
    (completion("def add(a, b):\n    return a + b + 0.0 if a == 2 else a + b"), 0),
    (completion(ADD) + completion("wrong = True"), 0),
    (completion("wrong = True") + completion(ADD), 1),
    ("def add(a, b):\n    return a + b", 0),
    ("", 0),
]


@boxed
def test_the_last_program_must_pass_every_test_with_values_of_the_same_types():
    """All completions are scored in parallel, and the rewards come in their order."""
    texts, rewards = zip(*REWARDS)
    assert code_reward.score_completions(texts, [{"answer": TESTS}] * len(texts)) == [*map(float, rewards)]


# Each program has a right add, or would have one without the other things that it does.
HOSTILE = """
# a loop that ignores signals
import signal
for number in {*range(1, 32)} - {9, 19}:
    signal.signal(number, signal.SIG_IGN)
while True:
    pass
# a flood of values
import os
for number in range(3, 64):
    try:
        for _ in range(100):
            os.write(number, b"5" * 10**5)
    except OSError:
        pass
# a value equal to all
class Any(str):
    __eq__ = __ne__ = lambda *_: True
    __hash__ = None
add = lambda *_: Any("5")
"""


@boxed
@pytest.mark.parametrize("program", [f"{ADD}# {block}" for block in HOSTILE.split("\n# ")[1:]])
def test_hostile_programs_earn_nothing_and_end(program, monkeypatch):
    monkeypatch.setattr(code_reward, "SECONDS", 2)
    assert code_reward.reward_fn(completion(program), TESTS) == 0


@boxed
def test_the_values_are_nowhere_in_the_process():
    secret = "".join(map(chr, (115, 51, 99, 114, 51, 116)))  # the program, too, has only its pieces
    search = 'import gc\nsecret = lambda: "".join(map(chr, (115, 51, 99, 114, 51, 116)))'
    tests = [["secret() in repr(gc.get_objects())", False], ["secret()", secret]]
    assert code_reward.reward_fn(completion(search), json.dumps(tests)) == 1


@boxed
def test_a_program_ends_if_the_run_is_killed():
    code = "import code_reward\ncode_reward.SECONDS = 2\ncode_reward.run('import time; time.sleep(99)', [])"
    env = os.environ | {"PYTHONPATH": str(ROOT / "examples")}
    with subprocess.Popen([sys.executable, "-c", code], env=env) as process:
        while count_processes() < 3:  # the clock, unshare and the program
            time.sleep(0.1)
        process.kill()
    deadline = time.monotonic() + 10
    while count_processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert count_processes() == 0


PRELUDE = """
import ctypes, errno, json, mmap, os, socket, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
def met(attack, *args):
    try:
        return attack(*args)
    except OSError as error:
        return errno.errorcode[error.errno]
    except BaseException as error:
        return type(error).__name__
def system(name, *args):
    if getattr(libc, name)(*args) < 0:
        raise OSError(ctypes.get_errno(), name)
def write(path, size=0):
    with open(path, "wb") as file:
        file.write(b"x" * size)
"""
PATHS = [str(ROOT / "grpo.py"), str(ROOT / "data"), "/etc", "/usr/bin", "/tmp", "/proc/1"]
PACKAGES = [os.path.dirname(os.__file__) + "/site-packages", "/usr/lib/python3/dist-packages"]
NUMBERS = [*runpy.run_path(str(ROOT / "examples" / "code_sandbox.py"))["NUMBERS"].values()]
# {attack: its value, or the errors that may stop it}; the first are stopped without a sandbox, too.
LIMITS = {
    "os.fork()": "EAGAIN",
    "threading.Thread(target=print).start()": "RuntimeError",
    f"sorted({{met(system, 'syscall', number, *[0] * 6) for number in {NUMBERS}}})": ["EPERM"],
    "len(bytearray(10**10))": "MemoryError",
    "write('big', 2**21)": "EFBIG",
    "dict(os.environ)": {},
    "socket.create_connection(('127.0.0.1', 22), 2)": "EPERM",
}
ATTACKS = LIMITS | {
    "[os.getpid(), os.getppid(), met(os.listdir, '/proc')]": [1, 0, "ENOENT"],
    "[write(f'file{number}', 10**6) for number in range(17)]": "ENOSPC",
    f"[met(os.stat, path) for path in {PATHS}]": ["ENOENT"] * len(PATHS),
    "os.listdir('../' * 9 + 'etc')": "ENOENT",
    "open(os.__file__, 'a')": "EROFS|EACCES",
    "write('/usr/lib/owned')": "EROFS",
    f"[name for path in {PACKAGES} if os.path.isdir(path) for name in os.listdir(path)]": [],
    "write('x.so', 4096) or mmap.mmap(os.open('x.so', 0), 4096, mmap.MAP_PRIVATE, 5)": "EPERM",  # code of its own
    "[met(system, 'umount2', path, 2) for path in (b'/', b'/usr/lib')]": ["EPERM"] * 2,
    "os.setresuid(1, 1, 1)": "EPERM|EINVAL",
    "system('capset', b'\\x22\\x05\\x08\\x20' + bytes(4), b'\\xff' * 24)": "EPERM",
    "sys.stdin.read() + open(0).read() or 'nothing'": "nothing",
}
RUN = """
import json, os, sys, code_reward
from concurrent.futures import ThreadPoolExecutor
code_reward.UNSAFE, code_reward.SECONDS, prelude, attacks = json.load(sys.stdin)
with ThreadPoolExecutor(4) as pool:
    print(json.dumps([*pool.map(lambda attack: code_reward.run(prelude, [attack]).decode(), attacks)]))
"""


@pytest.mark.parametrize(
    "ordinary, unsafe", [pytest.param(False, False, marks=boxed), pytest.param(True, False, marks=boxed), (True, True)]
)
def test_attacks_meet_what_stops_them(ordinary, unsafe):
    """For the user of the tests and an ordinary one. With --unsafe, only the limits and the refused calls remain."""
    command, expected = [sys.executable, "-c", RUN], LIMITS if unsafe else ATTACKS
    if ordinary and os.getuid() == 0:
        command = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "/usr/bin/python3", "-c", RUN]
        if not shutil.which("setpriv") or not os.path.exists(command[-3]):
            pytest.skip("root needs setpriv and /usr/bin/python3 to become an ordinary user")
    attacks = [f"met(lambda: {attack})" for attack in [*expected, "os.path.isdir('/etc')"]]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        for path in (ROOT / "examples").glob("code_*.py"):
            shutil.copy(path, folder)
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        prelude = PRELUDE + "os.chdir('/tmp')\n" * unsafe
        given = json.dumps([unsafe, 60, prelude, attacks])  # 60 seconds, as the machine may be busy
        done = subprocess.run(command, input=given, text=True, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
    *found, reads = [json.loads(values)[0] for values in json.loads(done.stdout)]
    for (attack, allowed), value in zip(expected.items(), found, strict=True):
        assert value == allowed or value in str(allowed).split("|"), attack
    assert reads == unsafe


def test_without_namespaces_it_is_refused_in_one_line(tmp_path):
    for name in ("timeout", "prlimit"):
        (tmp_path / name).symlink_to(shutil.which(name))
    (tmp_path / "unshare").write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    command = [sys.executable, str(ROOT / "examples" / "code_reward.py"), "--num-steps", "1"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    [said] = done.stderr.splitlines()
    assert done.returncode == 1 and "unshare failed: Operation not permitted; see --unsafe" in said


@boxed
def test_the_command_trains_on_the_reward(tmp_path, monkeypatch):
    """The bundled model writes sums instead of programs, so programs replace its texts; half of them are right."""
    answers = [json.dumps([["add(2, 3)", 5], ["add(1, 1)", number]]) for number in (2, 3, 2, 2, 2)]
    rows = [{"prompt": f"{number}+1=", "answer": answer} for number, answer in enumerate(answers, 1)]
    write_jsonl(tmp_path / "tests.jsonl", rows)
    sample, programs = grpo.sample_completions, (completion(ADD), completion("add = max"))

    def sample_completions(*args):
        batch, texts = sample(*args)
        return batch, [programs[number % 2] for number in range(len(texts))]

    for name in ("is_correct", "reward_fn", "score_completions"):
        monkeypatch.setattr(grpo, name, getattr(grpo, name))
    monkeypatch.setattr(grpo, "sample_completions", sample_completions)
    monkeypatch.setattr(sys, "path", [*sys.path])
    flags = "--num-steps 2 --prompts-per-step 4 --group-size 2 --minibatch-size 8 --max-completion-length 8"
    flags += f" --eval-prompts 1 --dataset {tmp_path / 'tests.jsonl'} --run-dir {tmp_path / 'run'}"
    monkeypatch.setattr(sys, "argv", ["code_reward.py", *flags.split()])
    runpy.run_path(str(ROOT / "examples" / "code_reward.py"), run_name="__main__")
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line.get("reward/mean") for line in lines] == [None, 3 / 8, 3 / 8]
    assert lines[0]["eval/accuracy"] == 1
    assert lines[1]["reward/zero_std"] == 1 / 4 and lines[1]["optim/grad_norm"] > 0
