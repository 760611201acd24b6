"""Plant known bugs, one at a time, and see that tests fail: python tests/mutants.py [WORDS ...] [--jobs 2].

A row of mutants.txt is a bug that was found in public code, or is easily made: after # its name and the scripts it is
planted in, then a diff. Before a few rows stand, after !, the tests that must fail, all of them, and after a slash in
which cases. Code that is identical in several scripts, as test_copies.py sees to, needs one test; other code one of
each script.
"""

import argparse
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 600  # at most, per mutant
# Errors of a row that was written wrongly, and not what the bug does.
BROKEN = re.compile(r"(Name|Import|ModuleNotFound|Attribute|UnboundLocal|Type|Key|Index|Value|Runtime)Error")

# Those of the scripts with groups that have the same lines.
NAMES = {"GROUPED_TOKENWISE": "grpo dr_grpo dapo grpo_process"}
NAMES["GROUPED_CLIPPED"] = NAMES["GROUPED_TOKENWISE"] + " gspo"
NAMES["GROUPED_OLD"] = NAMES["GROUPED_CLIPPED"] + " cispo"
NAMES["GROUPED"] = NAMES["GROUPED_OLD"] + " reinforce"

# Every process of tests is forked from one that has imported the large libraries.
SERVER = multiprocessing.get_context("forkserver")
PRELOAD = "torch.distributed.fsdp transformers.models.llama.modeling_llama transformers.models.qwen3.modeling_qwen3"
SERVER.set_forkserver_preload([*PRELOAD.split(), "datasets", "wandb", "tyro", "pytest"])

MUTANTS = (Path(__file__).resolve().parent / "mutants.txt").read_text(encoding="utf-8")


@dataclass
class Mutant:
    name: str
    scripts: list
    old: list = field(default_factory=list)  # lines
    new: list = field(default_factory=list)
    tests: list = field(default_factory=list)  # (node, case or None)


def read_mutants():
    """The rows of mutants.txt."""
    found, tests, in_row = [], [], True
    for line in MUTANTS.strip("\n").split("\n"):
        kind, text = line[:2], line[2:]
        if kind == "! ":
            tests, in_row = [text] if in_row else [*tests, text], False
        elif kind == "# ":
            name, scripts = text.split(" @ ")
            found.append(Mutant(name, expand(scripts.split())))
            found[-1].tests = [pair for test in tests for pair in read_test(test, found[-1].scripts)]
        else:
            in_row = True
            found[-1].old += [text] * (kind != "+ ")
            found[-1].new += [text] * (kind != "- ")
    return found


def read_test(text, scripts):
    """(node, case or None) of each case of a test; each stands for those of the row's scripts."""
    node, _, cases = text.partition(" / ")
    if "{}" in node:  # in the file of each script
        return [(node.format(script), None) for script in (expand(cases.split(", ")) if cases else scripts)]
    cases = scripts if cases == "each" else expand(cases.split(", "))
    return [(NAMES.get(node, node), case or None) for case in cases]


def expand(words):
    """The words, those that name several in full."""
    return [name for word in words for name in (NAMES[word].split() if word in NAMES else [word])]


def copy_repository(folder):
    """Make a copy of what tests need, with links to what none of them changes."""
    for path in (*ROOT.glob("*.py"), ROOT / "pyproject.toml"):
        shutil.copy(path, folder)
    for name in ("tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("models", "data"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "temporary").mkdir()


def with_bug(mutant, folder):
    """Return {path: text} of the scripts with the bug; a row that does not fit them is an error."""
    texts = {}
    old, new = "\n".join(mutant.old), "\n".join(mutant.new)
    for path in (folder / f"{script}.py" for script in mutant.scripts):
        text = path.read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise SystemExit(f"{mutant.name}: {path.name} has {text.count(old)} times, not once:\n{old}")
        texts[path] = text.replace(old, new)
        compile(texts[path], path.name, "exec")
    return texts


def run_pytest(folder, arguments, plugins, log):
    """Run pytest in a copy of the repository; this is the target of a process of its own."""
    os.setsid()  # to end what torchrun started, too
    os.chdir(folder)
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    temporary = str(folder / "temporary")
    os.environ |= {"TMPDIR": temporary, "HF_DATASETS_CACHE": temporary, "COLUMNS": "300"}
    tempfile.tempdir = None  # it is looked up anew
    sys.path[:] = [path for path in sys.path if not Path(path).is_relative_to(ROOT)]
    import pytest

    sys.exit(pytest.main(arguments, plugins))


def run_tests(folder, tests, seconds, flags=(), plugins=()):
    """Return pytest's exit status, None if it took longer than these seconds, and its output."""
    arguments = ["-q", *flags, "-p", "no:cacheprovider", *dict.fromkeys(f"tests/{node}" for node, _ in tests)]
    log = Path(tempfile.mkdtemp(dir=folder), "log")
    process = SERVER.Process(target=run_pytest, args=(folder, arguments, plugins, log))
    process.start()
    process.join(seconds)
    status = process.exitcode
    if status is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return status, log.read_text(encoding="utf-8", errors="replace")


def failure_of(node, case, output):
    """The line of pytest's summary that says that this test failed, in this case if one is named; else None."""
    for line in re.findall(r"^FAILED tests/(.*)", output, re.MULTILINE):
        failed, _, error = line.partition(" - ")
        name, _, cases = failed.partition("[")
        if node in (name, failed) and (case is None or case in cases.removesuffix("]").split("-")):
            return None if BROKEN.match(error) else line
    return None


def try_mutant(mutant, copy):
    """Return (mutant, verdict)."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(shutil.copytree(copy, folder, symlinks=True, dirs_exist_ok=True))
        for path, text in with_bug(mutant, folder).items():
            path.write_text(text, encoding="utf-8")
        status, output = run_tests(folder, mutant.tests, SECONDS)
    missed = [test for test in mutant.tests if not failure_of(*test, output)]
    # Status 1 is failed tests; others are errors of collection, no tests, or no end.
    verdict = "caught" if status == 1 and not missed else f"SURVIVED, pytest's exit status {status}"
    seconds = time.perf_counter() - start
    print(f"{seconds:4.0f} s  {verdict}: {mutant.name}", flush=True)
    if verdict != "caught":
        print("\n".join([*output.splitlines()[-25:], *(f"no failure: {test}" for test in missed)]), flush=True)
    return mutant, verdict


def main():
    parser = argparse.ArgumentParser(description="Plant known bugs, one at a time, and see that a test fails.")
    parser.add_argument("words", nargs="*", help="plant only bugs whose name has one of these in it")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    args = parser.parse_args()
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    mutants = read_mutants()
    chosen = [mutant for mutant in mutants if not args.words or any(word in mutant.name for word in args.words)]
    if not chosen or len({mutant.name for mutant in mutants}) < len(mutants):
        raise SystemExit("no bug of that name, or two of one name")
    with tempfile.TemporaryDirectory() as copy, tempfile.TemporaryDirectory() as clean:
        copy_repository(Path(copy))  # once: nobody's edits come in between
        for mutant in chosen:
            with_bug(mutant, Path(copy))
        shutil.copytree(copy, clean, symlinks=True, dirs_exist_ok=True)
        by_file = {}
        for node, case in dict.fromkeys(test for mutant in chosen for test in mutant.tests):
            by_file.setdefault(node.partition("::")[0], []).append((node, case))
        results = []
        with ThreadPoolExecutor(args.jobs) as pool:
            for status, output in pool.map(lambda tests: run_tests(Path(clean), tests, SECONDS * 6), by_file.values()):
                print(f"without any bug: {output.splitlines()[-1]}", flush=True)
                if status != 0:
                    raise SystemExit(f"{output[-3000:]}\nwithout any bug the tests must pass")
            for result in pool.map(try_mutant, chosen, [copy] * len(chosen)):
                results.append(result)
    survivors = [mutant.name for mutant, verdict in results if verdict != "caught"]
    print(f"{len(results) - len(survivors)} of {len(results)} caught", *survivors, sep="\n")
    raise SystemExit(bool(survivors))


if __name__ == "__main__":
    main()
