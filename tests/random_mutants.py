"""Change one random place of a script at a time, and see whether a test fails: python tests/random_mutants.py grpo:60.

mutants.txt has bugs that somebody thought of, each with the test that must fail. Here a seed chooses the places, and
any test of tests/ may catch the change, except test_copies.py, which notices every edit of a copy. Places are in the
functions above the line "# ---- below", and below it in those that compute on tensors; what is changed are operators,
comparisons, conditions, numbers and calls. Default values of flags, texts and what is printed are left alone. A change
of a function that several scripts share is made in all of them.

Each change alone has to pass the tests of the script's own file, and of QUICK or test_steps.py. All that do are made
together, for all other tests; each of them then runs the tests that failed alone, until no test fails with those that
are left.

The results go to benchmark/results/random_mutants.csv, and what is there is not run again.
"""

import argparse
import ast
import csv
import functools
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import mutants
from sync_copies import ALL, MARKER

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results" / "random_mutants.csv"
COLUMNS = ["script", "seed", "number", "function", "line", "old", "new", "verdict", "test", "error"]
SECONDS_PER_TEST = 60  # ten times as many for one that trains
SECONDS = 3600  # at most, per change
# The functions below the line that compute on tensors, in any script.
TENSORS = """LoraLinear add_rounding_noise LogprobModel token_logprobs head_logprobs without_adapters hidden_states
    sequence_scores sample_completions pad_left generate prefill RoomyLayer append_token sample_tokens mean_metrics
    compute_logprobs microbatches rollout_metrics step_optimizer pad count_tokens""".split()
QUICK = [f"test_{name}.py" for name in ("accumulation", "logprobs", "sampling", "rewards")]
SWAPPED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*"}
SWAPPED |= {ast.BitAnd: "|", ast.BitOr: "&", ast.And: "or", ast.Or: "and"}
COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
COMPARED |= {ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"}
OPPOSITE = {"min": "max", "max": "min", "minimum": "maximum", "any": "all", "all": "any", "argmax": "argmin"}
OPPOSITE |= {"SUM": "MAX", "zeros": "ones", "ones": "zeros", "zeros_like": "ones_like", "ones_like": "zeros_like"}
# Methods whose call can be left out, so that the object takes the place of the result.
TENSOR_METHODS = """abs all any bool clamp clone contiguous cumsum detach div_ exp expm1 flatten flip float long log
    log_softmax logsigmoid masked_fill max mean min mul_ neg nan_to_num pow round sigmoid softmax sort sum square sqrt
    squeeze std unsqueeze repeat_interleave roll tolist item""".split()


class Places(ast.NodeVisitor):
    """Collects (first position, last position, new text) of all changes of a function; positions are (line, column)."""

    def __init__(self, source):
        self.source, self.found = source, []

    def text(self, node):
        return ast.get_source_segment(self.source, node)

    def change(self, node, new):
        self.found.append(((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), new))

    def skip(self, node):
        """Texts and messages: their numbers and operators compute nothing."""

    visit_JoinedStr = visit_Raise = visit_arguments = visit_Import = visit_ImportFrom = skip

    def between(self, left, right, old, new):
        """Replace an operator, which stands between two operands."""
        lines = self.source.splitlines()
        start, stop = (left.end_lineno, left.end_col_offset), (right.lineno, right.col_offset)
        for number in range(start[0], stop[0] + 1):
            first = start[1] if number == start[0] else 0
            last = stop[1] if number == stop[0] else len(lines[number - 1])
            match = re.search(old, lines[number - 1][first:last])
            if match:
                place = (number, first + match.start()), (number, first + match.end())
                self.found.append((*place, new))
                return

    def visit_BinOp(self, node):
        if type(node.op) in SWAPPED and not isinstance(node.left, ast.JoinedStr):
            self.between(node.left, node.right, r"//|[-+*/%&|]", SWAPPED[type(node.op)])
        self.generic_visit(node)

    def visit_AugAssign(self, node):
        if type(node.op) in SWAPPED:
            self.between(node.target, node.value, r"(//|[-+*/%&|])=", f"{SWAPPED[type(node.op)]}=")
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        self.between(*node.values[:2], r"\b(and|or)\b", SWAPPED[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if not isinstance(node.operand, ast.Constant):
            self.change(node, self.text(node.operand))
        self.generic_visit(node)

    def visit_Compare(self, node):
        if type(node.ops[0]) in COMPARED:
            old = r"not\s+in|is\s+not|\b(in|is)\b|[<>]=?|[!=]="
            self.between(node.left, node.comparators[0], old, COMPARED[type(node.ops[0])])
        self.generic_visit(node)

    def visit_condition(self, node):
        self.change(node.test, f"(not ({self.text(node.test)}))")
        self.generic_visit(node)

    visit_If = visit_IfExp = visit_While = visit_condition

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            self.change(node, repr(not node.value))
        elif isinstance(node.value, int):
            self.change(node, repr(node.value - 1 if node.value else 1))
        elif isinstance(node.value, float):
            self.change(node, repr(node.value * 2 if node.value else 1.0))

    def visit_Attribute(self, node):
        if node.attr in OPPOSITE:
            start = (node.end_lineno, node.end_col_offset - len(node.attr))
            self.found.append((start, (node.end_lineno, node.end_col_offset), OPPOSITE[node.attr]))
        self.generic_visit(node)

    def visit_Name(self, node):
        if node.id in OPPOSITE:
            self.change(node, OPPOSITE[node.id])

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call) and self.text(node.value.func) == "print":
            return
        if isinstance(node.value, ast.Call):
            self.change(node, "pass")
        self.generic_visit(node)

    def visit_Call(self, node):
        called = ast.unparse(node.func).split(".")
        starred = any(isinstance(argument, ast.Starred) for argument in node.args[:2])
        if len(node.args) > 1 and not starred and called[-1] not in ("min", "max"):
            first, second = node.args[:2]
            text = "".join(self.text_between(first, second))
            start, stop = (first.lineno, first.col_offset), (second.end_lineno, second.end_col_offset)
            self.found.append((start, stop, self.text(second) + text + self.text(first)))
        if isinstance(node.func, ast.Attribute) and node.func.attr in TENSOR_METHODS and called[0] != "torch":
            self.change(node, self.text(node.func.value))
        self.generic_visit(node)

    def text_between(self, first, second):
        lines = self.source.splitlines(keepends=True)[first.end_lineno - 1 : second.lineno]
        lines[-1] = lines[-1][: second.col_offset]
        lines[0] = lines[0][first.end_col_offset :]
        return lines


# A change of a function: the text of the function, first and last position, and the text that comes between them.
Change = namedtuple("Change", "function text start stop new")


def changed(change, text=None):
    """Return the text of the function, or another one that is longer after the place, with the change."""
    lines = (text or change.text).splitlines(keepends=True)
    before = "".join(lines[: change.start[0] - 1]) + lines[change.start[0] - 1][: change.start[1]]
    after = lines[change.stop[0] - 1][change.stop[1] :] + "".join(lines[change.stop[0] :])
    return before + change.new + after


@functools.cache
def functions(script):
    """Return {name: text} of the functions and classes of a script whose places count."""
    source = (ROOT / f"{script}.py").read_text(encoding="utf-8")
    line = source[: source.index(MARKER)].count("\n")
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name != "Args":
            if node.lineno < line or node.name in TENSORS:
                found[node.name] = ast.get_source_segment(source, node)
    return found


def all_changes(script):
    """Return the changes of every place of a script."""
    found = []
    for name, text in functions(script).items():
        tree = ast.parse(text).body[0]
        after = tree.body[0].end_lineno if ast.get_docstring(tree) else 0
        places = Places(text)
        places.visit(tree)
        found += [Change(name, text, *place) for place in sorted(places.found) if place[0][0] > after]
    return found


def chosen_changes(script, count, seed):
    return random.Random(f"{script} {seed}").sample(all_changes(script), count)


def scripts_of(changes):
    """Return the scripts that have a function of the changes in the same text."""
    return [script for script in ALL if any(functions(script).get(each.function) == each.text for each in changes)]


def plant(changes, folder):
    """Make changes in a copy of the repository, the last place of a function first; return those that overlap none."""
    made = []
    for script in scripts_of(changes):
        path = folder / f"{script}.py"
        source = path.read_text(encoding="utf-8")
        for name, text in functions(script).items():
            new, limit = text, (10**9, 0)
            for change in sorted(changes, key=lambda each: each.start, reverse=True):
                if (change.function, change.text) == (name, text) and change.stop <= limit:
                    new, limit = changed(change, new), change.start
                    made.append(change)
            source = source.replace(text, new)
        path.write_text(source, encoding="utf-8")
    return [change for change in changes if change in made]


def difference(change):
    """Return (number of the line in the function, old line, new line) of the first line that differs."""
    old, new = change.text.splitlines(), changed(change).splitlines()
    number = next(i for i, (a, b) in enumerate(zip(old, new)) if a != b)
    return number + 1, old[number].strip(), new[number].strip()


class Chosen:
    """A pytest plugin: only tests that can run one of these scripts, in the order that soonest catches a change."""

    def __init__(self, scripts, in_main):
        self.scripts, self.in_main = scripts, in_main

    def can_fail(self, item):
        own = item.path.stem.removeprefix("test_")
        if own in ALL and own not in self.scripts:
            return False
        named = {word for word in re.split(r"[-\[\]]", item.name) if word in ALL}
        return not named or bool(named & set(self.scripts))

    def rank(self, item):
        """Fast tests come first, but for a change of main those that run it."""
        slow = item.get_closest_marker("slow") is not None
        own = item.path.stem.removeprefix("test_") in ALL
        return (not own, not slow) if self.in_main else (slow, not own)

    def pytest_collection_modifyitems(self, items):
        items[:] = sorted(filter(self.can_fail, items), key=self.rank)

    def pytest_runtest_setup(self, item):
        signal.signal(signal.SIGALRM, too_slow)
        signal.alarm(SECONDS_PER_TEST * (1 if item.get_closest_marker("slow") is None else 10))


def too_slow(*_):
    raise TimeoutError("the test did not end")


def run(changes, tests, copy):
    """Return (the changes that were made, pytest's exit status, [(test that failed, its error)], output)."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(shutil.copytree(copy, folder, symlinks=True, dirs_exist_ok=True))
        made = plant(changes, folder)
        plugins = [Chosen(scripts_of(changes), all(change.function == "main" for change in changes))]
        flags = ["-x"] if len(changes) == 1 else []
        status, output = mutants.run_tests(folder, [(test, None) for test in tests], SECONDS, flags, plugins)
    return made, status, re.findall(r"^(?:FAILED|ERROR) tests/(.+?)(?: - (\w+).*)?$", output, re.MULTILINE), output


def try_alone(key, change, tests, copy):
    """Return a row of the results of one change."""
    begun = time.perf_counter()
    _, status, failed, output = run([change], tests, copy)
    verdict = "caught" if failed else {0: "survived", None: "no end"}.get(status, f"exit status {status}")
    row = [*key, change.function, *difference(change), verdict, *(failed or [("", "")])[0]]
    print(f"{time.perf_counter() - begun:4.0f} s  {verdict}:", *row[:6], "->", row[6], *row[8:], flush=True)
    return dict(zip(COLUMNS, row)), output


def first_tests(script, change):
    """Return the files of tests that a change has to pass alone."""
    return [f"test_{script}.py", *(["test_steps.py"] if change.function == "main" else QUICK)]


def write(rows):
    with open(RESULTS, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows))


def read():
    """Return {(script, seed, number): row}."""
    if not RESULTS.exists():
        return {}
    with open(RESULTS, newline="", encoding="utf-8") as file:
        return {(row["script"], int(row["seed"]), int(row["number"])): row for row in csv.DictReader(file)}


def main():
    parser = argparse.ArgumentParser(description="Change random places of the scripts, and see whether a test fails.")
    parser.add_argument("counts", nargs="+", help="a script and the number of changes, as in grpo:60")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="make this one change, and show what the tests say")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    args = parser.parse_args()
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    rows, changes = read(), {}
    for script, count in (word.split(":") for word in args.counts):
        for number, change in enumerate(chosen_changes(script, int(count), args.seed)):
            changes[script, args.seed, number] = change
    tests = sorted(path.name for path in (ROOT / "tests").glob("test_*.py") if path.name != "test_copies.py")
    with tempfile.TemporaryDirectory() as copy, ThreadPoolExecutor(args.jobs) as pool:
        mutants.copy_repository(Path(copy))
        for name in ("tools", "benchmark"):  # some tests run or read what is there
            shutil.copytree(ROOT / name, Path(copy, name))
        shutil.copy(ROOT / "README.md", copy)
        if args.only is not None:
            [(key, change)] = [(key, change) for key, change in changes.items() if key[2] == args.only]
            print(try_alone(key, change, tests, copy)[1])
            return
        todo = [key for key in changes if key not in rows]
        todo = [pool.submit(try_alone, key, changes[key], first_tests(key[0], changes[key]), copy) for key in todo]
        for done in as_completed(todo):
            row, _ = done.result()
            rows[row["script"], row["seed"], row["number"]] = row
            write(rows)
        left = [key for key in changes if rows[key]["verdict"] == "survived"]
        print(f"{len(left)} left for all tests", flush=True)
        while left:
            made, _, failed, _ = run([changes[key] for key in left], tests, copy)
            print(f"{len(made)} of {len(left)} together: {len(failed)} tests failed", flush=True)
            if not failed:
                left = [key for key in left if changes[key] not in made]  # those whose place overlaps another's
                continue
            names = [name for name, _ in failed]
            todo = [pool.submit(try_alone, key, changes[key], names, copy) for key in left]
            for row, _ in (done.result() for done in as_completed(todo)):
                rows[row["script"], row["seed"], row["number"]] = row
            write(rows)
            before, left = left, [key for key in left if rows[key]["verdict"] == "survived"]
            if left == before:
                raise SystemExit(f"these tests fail only with several changes, or by chance: {names}")
    survivors = [row for row in rows.values() if row["verdict"] == "survived"]
    print(f"{len(rows) - len(survivors)} of {len(rows)} caught")


if __name__ == "__main__":
    main()
