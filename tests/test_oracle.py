"""The programs that made the numbers of other people's code: tests/oracle/make."""

import ast
import json
import math
from pathlib import Path

import pytest

ORACLE = Path(__file__).parent / "oracle"
MAKE = ORACLE / "make"


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    monkeypatch.syspath_prepend(MAKE)


def programs_of(name):
    """The programs that a file names as those that made its numbers."""
    document = json.loads((ORACLE / f"{name}.json").read_text())
    return {source["program"] for source in document["source"]}


def files_of(program):
    """The files in the table MAKERS of a program, which is not imported, since it needs its package."""
    for statement in ast.parse(program.read_text()).body:
        if isinstance(statement, ast.Assign) and statement.targets[0].id == "MAKERS":
            return {key.value for key in statement.value.keys}
    raise ValueError(f"{program.name} has no MAKERS")


def test_every_file_is_made_by_the_programs_that_it_and_the_readme_name():
    names = {path.stem for path in ORACLE.glob("*.json")}
    programs = {path.name: files_of(path) for path in MAKE.glob("make_*.py")}
    rows = {}
    for line in (MAKE / "README.md").read_text().splitlines():
        if line.startswith("| `make_"):
            program, _, files = [cell.strip() for cell in line.strip("|").split("|")]
            rows[program.strip("`")] = set(files.split(", "))
    assert rows == programs
    for name in names:
        assert programs_of(name) == {program for program, files in programs.items() if name in files}
    assert set().union(*programs.values()) == names


def test_the_numbers_of_trl_are_made_again():
    trl = pytest.importorskip("trl")
    if trl.__version__ != "1.16.0":
        pytest.skip(f"trl is {trl.__version__}, not 1.16.0")
    from common import LARGEST_DIFFERENCE, largest_difference, remake
    from make_trl import MAKERS

    for name, maker in MAKERS.items():
        assert largest_difference(name, remake(name, maker, None)) <= LARGEST_DIFFERENCE, name


@pytest.mark.parametrize(
    "stored, made, difference",
    [
        ({"loss": 1.0, "grad": [[1.0, 2.0]]}, {"loss": 1.0, "grad": [[1.0, 2.5]]}, 0.5),
        ([1.0, 2.0], [1.0], math.inf),
        ({"loss": 1.0}, {}, math.inf),
        ({"loss": 1.0}, {"loss": 1.0, "kl": 0.0}, math.inf),
        ({"loss": 1.0}, {"loss": "nan"}, math.inf),
        ([1.0, 2.0], [math.nan, 2.0], math.inf),
    ],
)
def test_the_programs_see_a_difference(stored, made, difference):
    from common import differences

    assert max(differences(stored, made)) == difference
