"""benchmark/claims.py: its rule and its patches, the task, and the page, whose numbers are those of the csv."""

import json
import re
import statistics
import sys

import claims
import details
import pytest
from sync_copies import ROOT
from tiny import load, parse

import grpo

PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
FOUND = claims.read()
RUNS = {run for claim in claims.CLAIMS.values() for run in claim.runs.values()}
RUNS |= {run for runs in claims.SETS.values() for run in runs.values()}
NOTHING = dict.fromkeys(claims.COLUMNS, "")
# Shifts by which -2, -1, 0, 1 and 2 have this chance: quantiles of Student's t, 4 degrees, by their standard error.
SHIFTS = {0.01: 4.6041 * 0.5**0.5, 0.02: 3.7470 * 0.5**0.5, 0.03: 3.2976 * 0.5**0.5}
LONG = str(ROOT / "models" / "long")


def test_the_rule_by_numbers_worked_out_by_hand():
    # Differences 1 to 5: mean 3, deviation sqrt(2.5), 2.776 sqrt(2.5) / sqrt(5) = 1.963.
    more, less = [2.0, 4.0, 6.0, 8.0, 10.0], [1.0, 2.0, 3.0, 4.0, 5.0]
    assert claims.interval(more, less) == (3.0, pytest.approx(1.963, abs=1e-3))
    assert (claims.verdict("reward", more, less), claims.verdict("reward", less, more)) == ("seen", "opposite")
    assert claims.verdict("reward", [*more[:4], 0.0], less) == "inconclusive"
    near = [0.51, 0.49, 0.5, 0.52, 0.5]
    assert claims.verdict("reward", near, [0.5] * 5) == "no difference"
    assert claims.verdict("seconds", near, [0.5] * 5) == "inconclusive"  # for which nothing says what does not matter


def test_two_halves_and_what_chance_alone_would_show():
    assert claims.whole(["seen"]) == claims.whole(["seen", "seen"]) == "seen"
    assert claims.whole(["seen", "opposite"]) == claims.whole(["inconclusive", "seen"]) == "half"
    assert claims.whole(["opposite", "no difference"]) == "opposite"
    assert claims.whole(["no difference", "inconclusive"]) == "inconclusive"
    # Quantiles of Student's t with 4 degrees of freedom are 2.776 for 0.05 and 4.604 for 0.01; with 2 4.303 and 9.925.
    for n, quantile, expected in ((5, 2.776, 0.05), (5, 4.604, 0.01), (3, 4.303, 0.05), (3, 9.925, 0.01)):
        spread = [i - (n - 1) / 2 for i in range(n)]
        shift = quantile * statistics.stdev(spread) / n**0.5
        assert claims.chance([value + shift for value in spread], [0.0] * n) == pytest.approx(expected, rel=2e-3)


def test_holms_correction_by_hand():
    """0.01 is under a third of 0.05, 0.02 under a half of it, 0.03 under the whole, but not under a half."""
    more = {chance: [value + shift for value in (-2.0, -1.0, 0.0, 1.0, 2.0)] for chance, shift in SHIFTS.items()}
    sides = {(f"{chance}", 0): ("reward", values, [0.0] * 5) for chance, values in more.items()}
    assert claims.survivors(sides) == [("0.01", 0), ("0.02", 0), ("0.03", 0)]
    sides[("0.03 again", 0)] = sides.pop(("0.02", 0))[:1] + sides[("0.03", 0)][1:]
    assert claims.survivors(sides) == [("0.01", 0)]


def test_a_is_for_what_unseen_seeds_show_by_themselves():
    claim = claims.CLAIMS["dapo_signal"]
    [run] = claim.runs.values()
    sides = claims.deciding(FOUND)
    key, rows = ("dapo_signal", 0), FOUND[run, 1]
    grades = [claims.trust(key, sides, kept, FOUND) for kept in ([], [key])]
    again = FOUND | {(run, seed): FOUND[run, seed - 5] for seed in claims.UNSEEN_SEEDS}
    flat = FOUND | {(run, seed): [row | {"all_right": 0.1 * seed} for row in rows] for seed in claims.UNSEEN_SEEDS}
    assert grades == ["C", "A" if (run, 6) in FOUND else "B"]
    assert [claims.trust(key, sides, [key], found) for found in (again, flat)] == ["A", "B"]
    assert claims.trust(("process", 0), sides, [("process", 0)], FOUND) == ""


def test_any_number_of_seeds_is_shown():
    claim = claims.CLAIMS["dapo_signal"]
    assert "of 1 seeds" in claims.table(claim, FOUND, [1]) and "not run" in claims.table(claim, FOUND, [99])
    assert "**seen**" in claims.table(claim, FOUND, [1, 2, 3])


def test_a_run_that_fails_is_told_by_the_exit_status(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["claims.py", "dapo_signal", "--seeds", "1", "--results", str(tmp_path / "mine.csv")]
    )
    monkeypatch.setattr(claims, "measure", lambda *_: [])
    assert claims.main() == 1
    monkeypatch.setattr(claims, "measure", lambda run, seed: [{"run": run, "seed": seed, "step": 40} | NOTHING])
    assert claims.main() == 0


@pytest.mark.parametrize("run", sorted(run for run in RUNS if " | " in run))
def test_patches_are_short_and_fit_their_scripts(run):
    edits = claims.PATCHES[run.partition(" | ")[2]]
    assert sum(new.count("\n") + 1 for _, new in edits) <= 10
    source = (ROOT / f"{run.split()[0]}.py").read_text(encoding="utf-8")
    compile(details.edit(source, edits), "patched", "exec")


def test_the_csv_has_every_step_of_every_run_and_no_other_runs():
    for (run, seed), rows in FOUND.items():
        assert run in RUNS and seed in claims.SEEDS + claims.UNSEEN_SEEDS
        last = int(re.search(r"--num-steps (\d+)", run)[1])
        assert [row["step"] for row in rows] == ([*range(claims.BIN, last + 1, claims.BIN)] or [0]), run
        assert all(0 <= (row["reward"] or 0) <= 1 for row in rows), f"{run}: rewards on another scale than the others'"


def test_the_rates_of_rloo_and_ppo_are_the_best_of_the_tuning_seed():
    for side, script in (("RLOO", "reinforce"), ("PPO", "ppo_rlhf")):
        runs = [run for key, run in claims.TUNING.items() if key[0] == script]
        rewards = {run: claims.value_of(FOUND[run, claims.TUNING_SEED], "reward", 31, 40) for run in runs}
        assert max(rewards, key=rewards.get) == claims.CLAIMS["rloo_ppo"].runs[side]


def test_the_page_has_the_numbers_of_the_csv_and_few_words():
    assert all(claims.fill(page, FOUND) == page for page in (path.read_text(encoding="utf-8") for path in claims.PAGES))
    for name, claim in claims.CLAIMS.items():
        assert all((run, seed) in FOUND for run in claim.runs.values() for seed in claim.seeds), name
        assert f"<!-- {name} -->" in PAGE, name
    for name, runs in claims.SETS.items():
        assert all((run, seed) in FOUND for run in runs.values() for seed in claims.SEEDS_OF_SETS[name]), name
    assert all(f"<!-- {name} -->" in PAGE for name in ("summary", "map", "batch", "tuning"))
    front = ("Five findings", "All claims", "How it is decided", "The runs")  # what they say is of all tables
    for section in PAGE.split("\n## ")[1:]:
        in_front = section.startswith(front)
        tables = re.findall(r"<!-- \w.*?<!-- end -->", PAGE if in_front else section, re.DOTALL)
        other = r"<!-- \w.*?<!-- end -->|!\[.*?\]\(.*?\)|^    .*$|^<.*$"
        prose = re.sub(other, "", section, flags=re.DOTALL | re.MULTILINE)
        assert len(prose.split()) <= (220 if in_front else 120), section.splitlines()[0]
        known = [abs(float(number)) for number in re.findall(r"(?<![\w.])-?\d*\.?\d+(?![\w.-])", " ".join(tables))]
        for said in re.findall(r"(?<![Ss]ection )(?<![\w.])\d*\.\d+(?![\w-])", prose):
            rounding = 0.5001 / 10 ** len(said.partition(".")[2])
            assert any(abs(number - float(said)) < rounding for number in known), (section.splitlines()[0], said)


def test_the_model_names_the_limit_of_its_task_and_so_do_its_checkpoints(tmp_path):
    assert parse(grpo).max_completion_length == 48
    assert parse(grpo, model=LONG).max_completion_length == 112
    assert parse(grpo, model=LONG, max_completion_length=60).max_completion_length == 60
    model, tokenizer = load(grpo, LONG)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert parse(grpo, model=tmp_path).max_completion_length == 112


def test_what_is_observed_of_a_run_agrees_with_what_it_logs():
    sizes = "--num-steps 1 --prompts-per-step 2 --minibatch-size 16 --eval-prompts 0"
    [row] = claims.measure(f"grpo --kl-coef 0 {sizes}", 1)
    assert row["completions"] == "16" and row["step"] == 1 and row["accuracy"] == ""
    length, right, wrong, share = (float(row[name]) for name in ("length", "length_right", "length_wrong", "reward"))
    assert length == pytest.approx(share * right + (1 - share) * wrong, rel=1e-3)
    assert float(row["dots_wrong"]) > 0 and 0 < float(row["works"]) < 1
    assert json.loads(row["all_right"]) + json.loads(row["all_wrong"]) <= 1
