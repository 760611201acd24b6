"""Tests of the mistakes on docs/is_this_normal.md: the edits fit grpo.py, and the table is what was measured."""

import re

import mistakes
import pytest

PAGE = mistakes.PAGE.read_text(encoding="utf-8")
SHOWN = [name for name, (metric, _) in mistakes.MISTAKES.items() if "/" in metric]
RESULTS = mistakes.read_results()


@pytest.mark.parametrize("name", mistakes.MISTAKES)
def test_each_edit_fits_once_and_leaves_a_script_that_compiles(name):
    _, edits = mistakes.MISTAKES[name]
    source = mistakes.edited(edits)
    compile(source, "grpo.py", "exec")
    assert source != mistakes.edited({})


def test_an_edit_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="occurs 0 times"):
        mistakes.edited({"no such text": ""})


def test_the_page_has_the_table():
    table = re.search(r"<!-- mistakes -->\n(.*?)<!-- end -->", PAGE, re.S)[1]
    assert table.strip() == mistakes.make_table(RESULTS).strip()


@pytest.mark.parametrize("name", SHOWN)
def test_the_number_is_outside_the_range_of_the_right_script_with_all_seeds(name):
    metric, _ = mistakes.MISTAKES[name]
    right = [run[metric] for run in RESULTS[mistakes.RIGHT].values()]
    wrong = [run[metric] for run in RESULTS[name].values()]
    assert len(right) == len(mistakes.RIGHT_SEEDS) and len(wrong) >= 2
    assert mistakes.is_outside(wrong, right)


def test_check_says_which_metrics_are_outside_with_all_seeds(monkeypatch, capsys, tmp_path):
    script = tmp_path / "my_grpo.py"
    script.write_text("my script")
    right = RESULTS[mistakes.RIGHT]

    def run(source, seed):
        assert source == "my script"
        numbers = {metric: value for metric, value in right[seed].items() if metric != "processor seconds"}
        return numbers | {"policy/ref_kl": 0.2 + seed, "eval/accuracy": 0.1 if seed == 1 else 0.9}

    monkeypatch.setattr(mistakes, "run", run)
    mistakes.check(script, [1, 2])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("outside")] == ["policy/ref_kl"]
    assert any(line.split()[0] == "eval/accuracy" and line.endswith("0.1–0.9".ljust(21)) for line in lines)


def test_tests_that_find_the_others_exist():
    tests = "".join(path.read_text() for path in (mistakes.ROOT / "tests").glob("test_*.py"))
    for name in {*mistakes.MISTAKES} - {*SHOWN}:
        assert f"def {mistakes.MISTAKES[name][0]}(" in tests
