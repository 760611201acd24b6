"""Tests of the mistakes on docs/is_this_normal.md: the edits fit grpo.py, and the table is what was measured."""

import re

import mistakes
import pytest

RESULTS = mistakes.read_results()


@pytest.mark.parametrize("name", mistakes.MISTAKES)
def test_each_edit_fits_once_and_shows_in_a_metric_or_a_test(name):
    """The metric is outside the range of the right script with all seeds."""
    metric, edits = mistakes.MISTAKES[name]
    source = mistakes.edited(edits)
    compile(source, "grpo.py", "exec")
    assert source != mistakes.edited({})
    if "/" in metric:
        right, wrong = ([run[metric] for run in RESULTS[key].values()] for key in (mistakes.RIGHT, name))
        assert len(right) == len(mistakes.RIGHT_SEEDS) and len(wrong) >= 2
        assert mistakes.is_outside(wrong, right)
    else:
        tests = "".join(path.read_text() for path in (mistakes.ROOT / "tests").glob("test_*.py"))
        assert f"def {metric}(" in tests


def test_the_page_has_the_table():
    page = mistakes.PAGE.read_text(encoding="utf-8")
    table = re.search(r"<!-- mistakes -->\n(.*?)<!-- end -->", page, re.S)[1]
    assert table.strip() == mistakes.make_table(RESULTS).strip()


def test_check_says_which_metrics_are_outside_with_all_seeds(monkeypatch, capsys, tmp_path):
    script = tmp_path / "my_grpo.py"
    script.write_text("my script")
    right = RESULTS[mistakes.RIGHT]
    changed = {1: {"policy/ref_kl": 1.2, "eval/accuracy": 0.1}, 2: {"policy/ref_kl": 2.2, "eval/accuracy": 0.9}}
    monkeypatch.setattr(mistakes, "run", lambda _, seed: right[seed] | changed[seed])
    mistakes.check(script, [1, 2])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("outside")] == ["policy/ref_kl"]
