"""Real processes without the seconds of importing torch: forked from one server that has imported every script."""

import faulthandler
import multiprocessing
import os
import sys
import tempfile
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
            patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # from where the server imports
            CONTEXT.set_forkserver_preload(sorted(path.stem for path in ROOT.glob("*.py")))
            self.process.start()
        self.pid, self.returncode = self.process.pid, None

    def send_signal(self, signum):
        os.kill(self.pid, signum)

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
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(self.store.port), "GROUP_WORLD_SIZE": "1"}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        environment |= {"TORCHELASTIC_RUN_ID": "tests", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        self.forked = [Forked(code, argv, **environment, **rank) for rank in ranks]
        self.returncode = None

    def poll(self):
        return next((rank.poll() for rank in self.forked if rank.poll() is not None), None)

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
        return "".join(rank.communicate()[0] for rank in self.forked), None


def run_on_ranks(file, *argv, **environment):
    """Run a file, of this folder if nothing else is said, on two ranks to their end."""
    code = f"import runpy; runpy.run_path({str(ROOT / 'tests' / file)!r}, run_name='__main__')"
    ranks = Ranks(code, [file, *argv], CUDA_VISIBLE_DEVICES="", **environment)
    output, _ = ranks.communicate()
    assert ranks.returncode == 0, f"{[rank.returncode for rank in ranks.forked]} {output[-4000:]}"


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
