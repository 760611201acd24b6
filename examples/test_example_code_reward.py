"""Tests of examples/code_reward.py: right programs pass, and attacks on the sandbox, the reward or the machine fail."""

import json
import os
import resource
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist
from datasets import Dataset
from toy import ROOT, TINY, load_module, read_jsonl, write_jsonl
from transformers import AutoTokenizer

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
SECRET = "".join(map(chr, (115, 51, 99, 114, 51, 116)))


def completion(program):
    return f"<think>easy</think>\nHere it is:\n```python\n{program}\n```\nDone."


def processes():
    """Return the ids of the processes that run a sandbox or wait for one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found += [folder.name] * (code_reward.CHILD[-1].encode() in (folder / "cmdline").read_bytes())
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Check that a test leaves no process behind. A process that was killed may take a moment to disappear."""
    yield
    for _ in range(60):
        if not processes():
            return
        time.sleep(0.1)
    raise AssertionError(f"processes are left: {processes()}")


# ---- the reward


REWARDS = [
    (completion(ADD), 1),
    (completion(ADD + "import heapq, itertools, math, re, collections, ssl, sqlite3, random\nrandom.random()"), 1),
    (completion(ADD + "print('x' * 10**8)\nopen('notes', 'w').write('mine')"), 1),
    (completion(ADD + "if __name__ == '__main__':\n    raise SystemExit(input())"), 1),
    (completion("def add(a, b):\n    return b + a"), 0),
    (completion("def add(a, b):\n    return a + b if a == 2 else None"), 0),
    (completion("def add(a, b:"), 0),
    (completion("raise ValueError"), 0),
    (completion("def add(a, b):\n    return str(a + b)"), 0),
    (completion("def add(a, b):\n    return a + b + 0.0 if a == 2 else a + b"), 0),
    (completion(ADD) + completion("wrong = True"), 0),
    (completion("wrong = True") + completion(ADD), 1),
    ("def add(a, b):\n    return a + b", 0),
    ("```python\n" + ADD, 0),
    ("", 0),
]
VALUES = [("5", "5.0"), ("1", "True"), ("'5'", "5"), ("[1]", "[True]"), ("None", "''")]


@boxed
def test_the_last_program_must_pass_every_test_with_values_of_the_same_types():
    """All completions are scored in parallel, and the rewards come in their order."""
    texts, rewards = zip(*REWARDS)
    assert code_reward.score_completions(texts, [{"answer": TESTS}] * len(texts)) == [*map(float, rewards)]
    rows = [{"answer": json.dumps([["f()", eval(value)]])} for value, _ in VALUES for _ in range(2)]
    programs = [completion(f"def f():\n    return {value}") for pair in VALUES for value in pair]
    assert code_reward.score_completions(programs, rows) == [1.0, 0.0] * len(VALUES)


@pytest.mark.parametrize("ranks, boxes", [("1", 8), ("3", 2), ("9", 1)])
def test_the_ranks_of_a_machine_share_its_cpus(ranks, boxes, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(code_reward, "ThreadPoolExecutor", pool := MagicMock())
    code_reward.score_completions([], [])
    pool.assert_called_once_with(boxes)


# ---- attacks: {name: (expression, its value or the error that stops it)}

PRELUDE = """
import ctypes, errno, gc, json, mmap, os, resource, socket, subprocess, sys, threading
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
PACKAGES = [os.path.dirname(os.__file__) + "/site-packages", "/usr/lib/python3/dist-packages"]
def write(path, size=0):
    with open(path, "wb") as file:
        file.write(b"x" * size)
read = lambda path: open(path).read()
"""
CASES = {
    # attacks that are stopped without a sandbox, too
    "fork": ("os.fork()", "EAGAIN"),
    "thread": ("threading.Thread(target=print).start()", "RuntimeError"),
    "refused calls": ("sorted({met(system, 'syscall', number, *[0] * 6) for number in NUMBERS})", ["EPERM"]),
    "a big array": ("len(bytearray(10**10))", "MemoryError"),
    "a big file": ("write('big', 2**21)", "EFBIG"),
    "more processes allowed": ("resource.setrlimit(resource.RLIMIT_NPROC, (9, 9))", "ValueError"),
    "variables, cores": ("[dict(os.environ), resource.getrlimit(resource.RLIMIT_CORE)[1] in (0, 1)]", [{}, True]),
    "sockets": ("[met(socket.create_connection, ('127.0.0.1', 22), 2), met(socket.socketpair)]", ["EPERM"] * 2),
    "a million timers": ("system('timer_create', 0, None, bytes(8))", "EAGAIN"),
    "the disk": ("system('fallocate', 3, 1, *map(ctypes.c_long, (0, 2**30)))", "ESPIPE"),  # beyond the end of a file
    "outlive the training": ("read('/proc/self/oom_score_adj')", "1000\n|ENOENT"),  # if memory runs out
    # attacks that the sandbox stops
    "see other processes": ("[os.getpid(), os.getppid(), met(os.listdir, '/proc')]", [1, 0, "ENOENT"]),
    "locked memory": ("system('mlockall', 1)", "EPERM|ENOMEM"),
    "many files": ("[write(f'file{number}') for number in range(257)]", "ENOSPC"),
    "many megabytes": ("[write(f'file{number}', 10**6) for number in range(17)]", "ENOSPC"),
    "many descriptors": ("[os.dup(0) for _ in range(65)]", "EMFILE"),
    "the data": ("[met(os.stat, path) for path in PATHS]", ["ENOENT"] * 6),
    "the data from below": ("os.listdir('../' * 9 + os.path.dirname(PATHS[0]))", "ENOENT"),
    "folders left open": ("{met(os.listdir, number) for number in range(64)} - {'ENOTDIR', 'EBADF'} or 'none'", "none"),
    "the interpreter": ("open(os.__file__, 'a')", "EROFS|EACCES"),
    "packages": ("[name for path in PACKAGES if os.path.isdir(path) for name in os.listdir(path)]", []),
    "libraries": ("write('/usr/lib/owned')", "EROFS"),
    "a mount among them": ("write(os.path.dirname(os.__file__) + '/wsgiref/owned')", "EROFS"),
    "devices": ("os.mknod('sda', 0o60666, os.makedev(8, 0))", "EPERM"),
    "code of its own": ("write('x.so', 4096) or mmap.mmap(os.open('x.so', 0), 4096, mmap.MAP_PRIVATE, 5)", "EPERM"),
    "unmount": ("[met(system, 'umount2', path, 2) for path in (b'/', b'/usr/lib')]", ["EPERM"] * 2),
    "another user": ("os.setresuid(1, 1, 1)", "EPERM|EINVAL"),
    "capabilities": ("system('capset', b'\\x22\\x05\\x08\\x20' + bytes(4), b'\\xff' * 24)", "EPERM"),
    "stdin again": ("sys.stdin.read() + read(0) or 'nothing'", "nothing"),
}
# These use up what others need, or write what others see. All others leave the process as it was.
ALONE = {"a big array", "a big file", "many files", "many megabytes", "many descriptors", "code of its own"}
ALONE |= {"stdin again"}
# Each program has a right add, or would have one without the other things that it does.
HOSTILE = """
# a loop that nothing ends
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
# signals ignored
import signal
for number in {*range(1, 32)} - {9, 19}:
    signal.signal(number, signal.SIG_IGN)
while True:
    pass
# a sleep in a session of its own
import os, time
os.setsid()
time.sleep(1000)
# a flood of values
import os
for number in range(3, 64):
    try:
        for _ in range(100):
            os.write(number, b"5" * 10**5)
    except OSError:
        pass
# an end
import os
os._exit(0)
# a crash
import os
os.abort()
# a deep repr
import functools, sys
sys.setrecursionlimit(10**9)
add = lambda *_: repr(functools.reduce(lambda deep, _: [deep], range(10**5), []))
# values that cannot be read
import fcntl, os
os.write(3, b"5") and fcntl.fcntl(3, fcntl.F_SETFL, os.O_DIRECT) or os._exit(1)
# no descriptors
import os
os.closerange(0, 64)
# a value equal to all
class Any(str):
    __eq__ = __ne__ = lambda *_: True
    __hash__ = None
add = lambda *_: Any("5")
# a deep value
import functools
add = lambda *_: functools.reduce(lambda deep, _: [deep], range(10**6), [])
# a long value
add = lambda *_: "(" * 10**7
# a writer of its own
import json
json.dumps = lambda *_, **__: "[5, [1, 2]]"
"""
ENDLESS = ("a loop that nothing ends", "signals ignored")
HOSTILE = {block.partition("\n")[0]: f"{ADD}# {block}" for block in HOSTILE.split("\n# ")[1:]}


@pytest.fixture
def prelude(tmp_path):
    """Return PRELUDE with paths that everyone can read on the host (the data first) and with the refused calls."""
    data = tmp_path / "tests.jsonl"
    data.write_text(json.dumps({"prompt": "", "answer": TESTS}))
    data.chmod(0o644)
    known = [str(path) for path in (data, ROOT / "grpo.py", ROOT / "data", tmp_path, "/etc", "/usr/bin")]
    numbers = runpy.run_path(str(ROOT / "examples" / "code_sandbox.py"))["NUMBERS"]
    assert len(numbers) == 29
    cores = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, cores[1:] * 2)  # a user may allow core dumps of the training
    yield f"{PRELUDE}PATHS, NUMBERS = {known}, {[*numbers.values()]}\n"
    resource.setrlimit(resource.RLIMIT_CORE, cores)
    assert data.read_text().endswith("}") and [path.name for path in tmp_path.iterdir()] == ["tests.jsonl"]
    assert not Path(os.__file__).with_name("owned.py").exists() and not Path("/usr/lib/owned").exists()


@boxed
def test_hostile_programs_earn_nothing_and_end(monkeypatch, prelude):  # noqa: ARG001
    for seconds, names in ((1, ENDLESS), (3, HOSTILE.keys() - ENDLESS)):
        monkeypatch.setattr(code_reward, "SECONDS", seconds)
        programs = [completion(HOSTILE[name]) for name in names]
        with ThreadPoolExecutor(len(programs)) as pool:  # side by side: many of them go on to the limit
            rewards = pool.map(code_reward.reward_fn, programs, [TESTS] * len(programs))
        assert dict(zip(names, rewards)) == dict.fromkeys(names, 0)
    assert len(code_reward.run(HOSTILE["a flood of values"], ["add(2, 3)"])) == 2**20  # which is cut off


@boxed
def test_the_values_are_nowhere_in_the_process():
    """The program only has pieces of what it looks for. A second test checks that these pieces give the secret."""
    search = f"""
secret = lambda: "".join(map(chr, {list(map(ord, SECRET))}))
def places():
    for thing in gc.get_objects():
        if type(thing) in (list, tuple):
            yield repr(thing)
    frame = sys._getframe()
    while frame:
        yield repr(frame.f_locals) + repr(frame.f_globals)
        frame = frame.f_back
"""
    tests = [["any(secret() in place for place in places())", False], ["secret()", SECRET]]
    assert code_reward.reward_fn(completion(PRELUDE + search), json.dumps(tests)) == 1


@boxed
def test_a_program_ends_if_the_run_is_killed():
    """nothing_is_left checks that no process remains."""
    code = "import code_reward\ncode_reward.SECONDS = 2\ncode_reward.run('import time; time.sleep(99)', [])"
    env = os.environ | {"PYTHONPATH": str(ROOT / "examples")}
    with subprocess.Popen([sys.executable, "-c", code], env=env) as process:
        while len(processes()) < 3:  # the clock, unshare and the program
            time.sleep(0.1)
        process.kill()


def as_nobody(code, job):
    """Return what Python code that imports code_reward prints for an ordinary user, with a mount in the libraries."""
    user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    check = ["-c", "import os, sys; assert sys.version_info >= (3, 11) and os.access(sys.executable, os.X_OK)"]
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become another user, with setpriv")
    pythons = [path for path in (sys.executable, "/usr/bin/python3") if os.path.exists(path)]
    usable = [path for path in pythons if subprocess.run([*user, path, *check], capture_output=True).returncode == 0]
    if not usable:
        pytest.skip("there is no Python 3.11 that an ordinary user can start")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        for path in (ROOT / "examples").glob("code_*.py"):
            shutil.copy(path, folder)
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        mount = 'mount -t tmpfs none "$("$0" -c "import wsgiref; print(*wsgiref.__path__)")" && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", mount, usable[0]] * (not no_box) + [*user, usable[0], "-c", code]
        done = subprocess.run(command, input=json.dumps(job), text=True, env=env, cwd="/", capture_output=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "user", [*(pytest.param(user, marks=boxed) for user in ("this", "an ordinary one")), "an ordinary one, unsafe"]
)
def test_attacks_meet_what_stops_them(user, prelude, monkeypatch):
    """With --unsafe, the limits and refused calls remain, and a program can read what its user can read."""
    unsafe, seconds = user.endswith("unsafe"), 60  # none of these attacks is about time, and the machine may be busy
    monkeypatch.setattr(code_reward, "SECONDS", seconds)
    cases = [*CASES][:11] if unsafe else [*CASES]
    together = [name for name in cases if name not in ALONE]
    alone = [name for name in cases if name in ALONE]
    names = together + alone
    attacks = [f"met(lambda: {CASES[name][0]})" for name in names]
    calls = [[*attacks[: len(together)], "os.path.isdir(PATHS[-1])"]]  # of one process, whose start takes most time
    calls += [[attack] for attack in attacks[len(together) :]]
    if user == "this":
        given = [code_reward.run(prelude, part).decode() for part in calls]
    else:
        code = "import json, sys, code_reward\nprelude, calls = json.load(sys.stdin)\n"
        code += f"code_reward.UNSAFE, code_reward.SECONDS = {unsafe}, {seconds}\n"
        code += "print(json.dumps([code_reward.run(prelude, part).decode() for part in calls]))"
        given = as_nobody(code, [prelude + "os.chdir('/tmp')\n" * unsafe, calls])
    (*given, reads), *others = (json.loads(values) for values in given)
    given += sum(others, [])
    allowed = {name: value.split("|") if isinstance(value, str) else [value] for name, (_, value) in CASES.items()}
    found = dict(zip(names, given, strict=True))
    assert {name: value for name, value in found.items() if value not in allowed[name]} == {}
    assert reads == unsafe


# ---- the command line


@pytest.mark.parametrize("reason", ["No such file or directory", "unshare failed: Operation not permitted"])
def test_without_namespaces_it_is_refused_in_one_line(reason, tmp_path):
    """It stops before slow imports. The second message is that of an unshare without permission."""
    for name in ("timeout", "prlimit"):
        (tmp_path / name).symlink_to(shutil.which(name))
    if reason.startswith("unshare"):
        (tmp_path / "unshare").write_text(f"#!/bin/sh\necho 'unshare: {reason}' >&2\nexit 1\n")
        (tmp_path / "unshare").chmod(0o755)
    command = [sys.executable, "-X", "importtime", str(ROOT / "examples" / "code_reward.py"), "--num-steps", "1"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 1 and done.stdout == "" and "torch" not in done.stderr
    assert len(said) == 1 and reason in said[0] and "--unsafe" in said[0]


SAID = "in all of these many different words there are ten of them"


def test_rows_are_left_out_as_in_grpo_but_not_for_the_words_of_a_test():
    answer = json.dumps([["f()", SAID]])
    rows = Dataset.from_list([{"prompt": prompt, "answer": answer} for prompt in ("1+1=1+1=1+1=1+1=", None, "1+1=")])
    args = grpo.Args(max_prompt_length=8, system_prompt="")
    [found] = code_reward.read_rows(grpo.read_rows, rows, args, AutoTokenizer.from_pretrained(TINY))
    assert found["prompt"] == "1+1=" and found["answer"] == answer


@boxed
def test_the_command_line_refuses_rows_without_tests_and_trains_on_the_reward(tmp_path, monkeypatch):
    """The bundled model writes sums instead of programs, so programs replace its texts; half of them are right."""
    answers = [json.dumps([["add(2, 3)", 5], ["add(1, 1)", number]]) for number in (2, 3, 2, 2, 2)]
    rows = [{"prompt": f"{number}+1=", "answer": answer} for number, answer in enumerate(answers, 1)]
    no_tests = [{}] + [{"answer": a} for a in (5, "f()", "[]", '["f()"]', '[["f()", 1, 2]]', '[["f = 1", 1]]')]
    sample, programs = grpo.sample_completions, (completion(ADD), completion("add = max"))

    def sample_completions(*args):
        batch, texts = sample(*args)
        return batch, [programs[number % 2] for number in range(len(texts))]

    for name in ("is_correct", "read_rows", "reward_fn", "score_completions"):
        monkeypatch.setattr(grpo, name, getattr(grpo, name))
    monkeypatch.setattr(grpo, "sample_completions", sample_completions)
    monkeypatch.setattr(sys, "path", [*sys.path])
    flags = "--num-steps 2 --prompts-per-step 4 --group-size 2 --minibatch-size 8 --max-completion-length 8"
    flags += f" --eval-prompts 1 --dataset {tmp_path / 'tests.jsonl'} --run-dir {tmp_path / 'run'}"
    monkeypatch.setattr(sys, "argv", ["code_reward.py", *flags.split()])
    for data in [*([{"prompt": "1+1="} | row] * 5 for row in no_tests), rows]:
        write_jsonl(tmp_path / "tests.jsonl", data)
        refused = pytest.raises(SystemExit, match=r"tests.jsonl: .* pairs \[call, value\]: ")
        with monkeypatch.context() if data is rows else refused:
            assert not (tmp_path / "run").exists()
            runpy.run_path(str(ROOT / "examples" / "code_reward.py"), run_name="__main__")
        if dist.is_initialized():  # the end of a process ends its group, too
            dist.destroy_process_group()
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line.get("reward/mean") for line in lines] == [None, 3 / 8, 3 / 8]
    assert lines[0]["eval/accuracy"] == 1
    assert lines[1]["reward/zero_std"] == 1 / 4 and lines[1]["optim/grad_norm"] > 0
