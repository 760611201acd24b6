"""The update of grpo.py is timed, alone and beside another version: python -m pytest benchmark/test_update.py"""

from argparse import Namespace

import pytest
import update
from tiny import ROOT, TINY

pytestmark = pytest.mark.usefixtures("alone")


def test_a_precision_has_a_row_of_numbers(capsys, monkeypatch):
    monkeypatch.setattr(update, "SIDE", 256)
    given = {"model": str(TINY), "threads": 1, "repeats": 1, "precisions": ["bfloat16"]}
    update.main(Namespace(**given, before=ROOT / "grpo.py"))
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| bfloat16")]
    seconds, _, share, ratio = (float(cell.strip().removesuffix("%")) for cell in row.split("|")[2:-1])
    assert seconds > 0 and 0 <= share <= 100 and ratio > 0
