"""Real processes without the seconds of importing torch: forked from one server that has imported the libraries.
For example: python -m pytest tests/test_saved_runs.py
"""

import faulthandler
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parent.parent
# Where libraries do not bear a fork each process imports them anew, as without a server.
CONTEXT = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
SECONDS = 600  # after which something hangs, however loaded the machine is


class Forked:
    """A process that runs code with sys.argv and more environment; its interface is that of subprocess.Popen."""

    def __init__(self, code, argv, **environment):
        self.log = tempfile.NamedTemporaryFile()
        arguments = code, list(map(str, argv)), environment, os.getcwd(), self.log.name
        self.process = CONTEXT.Process(target=execute, args=arguments, daemon=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}", prepend=os.pathsep)  # for the server
            CONTEXT.set_forkserver_preload(["libraries"])
            self.process.start()
        self.pid, self.returncode = self.process.pid, None

    def poll(self):
        return self.process.exitcode

    def communicate(self, timeout=SECONDS):
        """Wait for the end; return what was printed, as if standard error went into standard output."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(Path(self.log.name).read_text())
        self.returncode = self.process.exitcode
        return Path(self.log.name).read_text(), None


class Ranks:
    """Processes as torchrun starts them; the store by which they meet is in this process, as it is in torchrun."""

    def __init__(self, code, argv, count=2, **environment):
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(self.store.port), "WORLD_SIZE": str(count)}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        environment |= {"TORCHELASTIC_RUN_ID": "tests", "LOCAL_WORLD_SIZE": str(count), "GROUP_WORLD_SIZE": "1"}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        self.forked = [Forked(code, argv, **environment, **rank) for rank in ranks]
        self.returncode = None

    def communicate(self, timeout=SECONDS):
        """Wait for the end of all, or of the first that fails, without which the others would wait for ever."""
        running, self.returncode = list(self.forked), 0
        while running and not self.returncode:
            done = wait([rank.process.sentinel for rank in running], timeout)
            ended = [rank for rank in running if rank.process.sentinel in done]
            running = [rank for rank in running if rank not in ended]
            self.returncode = max((abs(rank.poll()) for rank in ended), default=1)
        for rank in running:
            rank.process.kill()
        self.forked.sort(key=lambda rank: rank in ended)  # what the one that failed says comes last
        return "".join(rank.communicate()[0] for rank in self.forked), None


def run_on_ranks(file, *argv, **environment):
    """Run a file, of this folder if nothing else is said, on two ranks to their end."""
    code = f"import runpy; runpy.run_path({str(ROOT / 'tests' / file)!r}, run_name='__main__')"
    ranks = Ranks(code, [file, *argv], CUDA_VISIBLE_DEVICES="", **environment)
    before, signal, stacks = ranks.communicate()[0].partition("\nSIG")  # the first stack is of the thread that crashed
    codes = [rank.returncode for rank in ranks.forked]
    assert not any(codes), f"{codes} {before[-8000:]}{signal}{stacks[:8000]}"


def run_file(file, *argv, given="", expected=0):
    """Run a file of the repository as the command line does, with this standard input; return what it printed."""
    code = f"import io, runpy, sys; sys.stdin = io.StringIO({given!r})\nsys.path.insert(0, {str(file.parent)!r})\n"
    code += f"runpy.run_path({str(file)!r}, run_name='__main__')"
    return finish(Forked(code, [file, *argv]), expected)


ASK = """#!/bin/sh
cd "$HERE"
printf '%s\\n' "$@" > ask.part
mv ask.part ask
until [ -e tell ]; do sleep 0.02; done
read status < tell
rm tell
exit "$status"
"""


def run_shell(path, *argv, do, **environment):
    """Run a shell script, in this folder, whose calls of python are done by do(words), which returns their status.

    Return the script's exit status, what it printed, and the words of each call.
    """
    python, asked = Path("bin/python").resolve(), []
    python.parent.mkdir(exist_ok=True)
    python.write_text(ASK)
    python.chmod(0o755)
    environment = os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}", "HERE": os.getcwd()} | environment
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    shell = subprocess.Popen(["sh", str(path), *argv], env=environment, **pipes)
    while shell.poll() is None:
        if Path("ask").exists():
            asked.append(Path("ask").read_text().splitlines())
            Path("ask").unlink()
            Path("tell.part").write_text(f"{do(asked[-1])}\n")
            Path("tell.part").rename("tell")
        time.sleep(0.02)
    return shell.returncode, shell.stdout.read(), asked


def execute(code, argv, environment, folder, log):
    """What the process does."""
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()  # a signal without a word says where it came
    os.environ |= environment
    os.chdir(folder)
    sys.argv = argv
    try:
        exec(compile(code, argv[0], "exec"), {"__name__": "__main__"})
    finally:
        sys.stdout.flush()  # before the reason of a SystemExit is written


KILL = """
{name}, calls = script.{target}, []
def killed(*args, **settings):
    result = {name}(*args, **settings)
    calls.append(args)
    if {when}:
        os.kill(os.getpid(), 9)
    return result
script.{target} = killed
"""


def kill_at(target, when="True"):
    """Lines that kill the process as a function of the script returns, where a condition on its calls holds."""
    return KILL.format(name=target.replace(".", "_"), target=target, when=when)


def start(script, flags, kill="", kind=Forked):
    """Run a script as the command line does, after some lines about it."""
    code = f"import os, sys\nimport {script} as script\n{kill}\n"
    code += f"text = open({str(ROOT / script) + '.py'!r}).read().rpartition('if __name__ ==')[2].partition(':')[2]\n"
    code += "exec('if True:' + text, vars(script))"
    return kind(code, [f"{script}.py", *flags])


def finish(process, expected=0):
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == expected, output
    return output


def logged(run, name="metrics.jsonl"):
    """The lines of a run's log without its times."""
    path = Path(run, name)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]
