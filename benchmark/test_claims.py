"""Test benchmark/claims.py: its rule, its patches, the task, and the pages, whose numbers are those of the csv."""

import json
import re
import statistics
import sys

import ablations
import claims
import pytest
from sync_copies import ROOT

import grpo

PAGE = claims.PAGE.read_text(encoding="utf-8")
FOUND = claims.read()
SIDES = claims.graded(FOUND)
KEPT = claims.survivors(SIDES)
TABLES, NOTES, SUMMARY = claims.tables(FOUND), claims.notes(FOUND), claims.summary(FOUND)
EVERYTHING = claims.all_tables(FOUND)
GROUPS = {name: names[0] for names in claims.by_text().values() for name in names}  # {claim: its table}
RUNS = {run for claim in claims.CLAIMS.values() for run in claim.runs.values()}
RUNS |= {run for runs in claims.SETS.values() for run in runs.values()}
NOTHING = dict.fromkeys(claims.COLUMNS, "")
# {p-value: shift that gives it to -2, -1, 0, 1, 2}: quantile of Student's t (4 degrees) times the standard error.
SHIFTS = {0.01: 4.6041 * 0.5**0.5, 0.02: 3.7470 * 0.5**0.5, 0.03: 3.2976 * 0.5**0.5}


def test_the_rule_by_numbers_worked_out_by_hand():
    # The differences 1 to 5 have mean 3 and deviation sqrt(2.5). The half-width is 2.776 sqrt(2.5) / sqrt(5) = 1.963.
    more, less = [2.0, 4.0, 6.0, 8.0, 10.0], [1.0, 2.0, 3.0, 4.0, 5.0]
    assert claims.interval(more, less) == (3.0, pytest.approx(1.963, abs=1e-3))
    assert (claims.verdict("reward", more, less), claims.verdict("reward", less, more)) == ("seen", "opposite")
    assert claims.verdict("reward", [*more[:4], 0.0], less) == "inconclusive"
    near = [0.51, 0.49, 0.5, 0.52, 0.5]
    assert claims.verdict("reward", near, [0.5] * 5) == "no difference"
    assert claims.verdict("seconds", near, [0.5] * 5) == "inconclusive"  # has no bound
    # Near 0 and near 1, no difference could show. This holds for shares only, and dots are not a share.
    low, high = [value - 0.49 for value in near], [value + 0.49 for value in near]
    assert claims.verdict("accuracy", low, [0.01] * 5) == "floor"
    assert claims.verdict("accuracy", high, [0.99] * 5) == "ceiling"
    assert claims.verdict("dots_wrong", low, [0.01] * 5) == "no difference"


def test_a_claim_in_two_parts_has_two_verdicts_and_settings_are_counted():
    rows = dict(re.findall(r"^\| \[`(\S+)`\].* \| (.*) \|$", SUMMARY, re.M))
    assert rows["ppo_penalty"] == "seen (C) + inconclusive"
    assert rows["rare_habit"] == "inconclusive + inconclusive"
    assert rows["cispo_1e-4"] == "1 inconclusive, 1 opposite (A) + 1 opposite (C), 1 opposite (B)"
    speed, clipping = rows["gspo_4_1e-4"].split(" + ")
    assert speed == "2 opposite (C), 1 inconclusive, 1 opposite (A), 2 seen (C)"
    assert clipping == "4 seen (A), 1 seen (B), 1 inconclusive"
    assert len(rows) == len({claim.says for claim in claims.CLAIMS.values()})


def test_what_chance_alone_would_show():
    # Quantiles of Student's t for 0.05 and 0.01: 2.776 and 4.604 with 4 degrees of freedom, 4.303 and 9.925 with 2.
    for n, quantile, expected in ((5, 2.776, 0.05), (5, 4.604, 0.01), (3, 4.303, 0.05), (3, 9.925, 0.01)):
        spread = [i - (n - 1) / 2 for i in range(n)]
        shift = quantile * statistics.stdev(spread) / n**0.5
        assert claims.chance([value + shift for value in spread], [0.0] * n) == pytest.approx(expected, rel=2e-3)


def test_holms_correction_by_hand():
    """0.01 is less than 0.05 / 3, 0.02 is less than 0.05 / 2, and 0.03 is less than 0.05 but not than 0.05 / 2."""
    more = {chance: [value + shift for value in (-2.0, -1.0, 0.0, 1.0, 2.0)] for chance, shift in SHIFTS.items()}
    sides = {(f"{chance}", 0): ("reward", values, [0.0] * 5) for chance, values in more.items()}
    assert claims.survivors(sides) == [("0.01", 0), ("0.02", 0), ("0.03", 0)]
    sides[("0.03 again", 0)] = sides.pop(("0.02", 0))[:1] + sides[("0.03", 0)][1:]
    assert claims.survivors(sides) == [("0.01", 0)]


def test_a_is_for_what_unseen_seeds_show_by_themselves():
    claim = claims.CLAIMS["dapo_signal"]
    [run] = claim.runs.values()
    key, rows = ("dapo_signal", 0), FOUND[run, 1]
    grades = [claims.grade(key, SIDES, kept, FOUND) for kept in ([], [key])]
    again = FOUND | {(run, seed): FOUND[run, seed - 5] for seed in claims.UNSEEN_SEEDS}
    flat = FOUND | {(run, seed): [row | {"all_right": 0.1 * seed} for row in rows] for seed in claims.UNSEEN_SEEDS}
    assert grades == ["C", "A" if (run, 6) in FOUND else "B"]
    assert [claims.grade(key, SIDES, [key], found) for found in (again, flat)] == ["A", "B"]
    assert claims.grade(("process", 0), SIDES, [("process", 0)], FOUND) == ""
    # Tests that an advice rests on are graded and count in the correction, but do not decide their claim.
    assert ("dpo_displacement", 3) in SIDES and "**greedy accuracy" not in TABLES["dpo_displacement"]
    assert "+0.133 ± 0.022, **seen (B)** |" in TABLES["dpo_displacement"]


def test_any_number_of_seeds_is_shown():
    one, none, three = (claims.table(["dapo_signal"], FOUND, seeds) for seeds in ([1], [99], [1, 2, 3]))
    assert ", 1 seeds |" in one and "| not run |" in none and three.count("**seen**") == 2


def test_a_table_has_a_column_for_each_setting_and_an_empty_cell_where_a_setting_has_no_such_test():
    lines = claims.table(["process", "process_twice"], FOUND).splitlines()
    assert lines[0] == "| difference | steps | `process` | `process_twice` |" and len(lines) == 5
    assert lines[2].startswith("| **reward: steps − answer** | 31–40 | 0.684, 0.687: -0.00266 ± 0.02, **no diff")
    assert lines[2].endswith(" 0.44, 0.377: +0.0636 ± 0.052, **seen (C)** |")
    assert re.fullmatch(r"\| share cut off .* \| 31–40 \|  \| 0.516, 0.000938: \+0.515 ± 0.12 \|", lines[4])


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
    compile(ablations.edit(source, edits), "patched", "exec")


def test_the_csv_has_every_step_of_every_run_and_no_other_runs():
    for (run, seed), rows in FOUND.items():
        assert run in RUNS and seed in claims.SEEDS + claims.UNSEEN_SEEDS
        last = int(re.search(r"--num-steps (\d+)", run)[1])
        assert [row["step"] for row in rows] == ([*range(claims.BIN, last + 1, claims.BIN)] or [0]), run
        assert all(0 <= (row["reward"] or 0) <= 1 for row in rows), f"{run}: rewards are not between 0 and 1"


def test_the_rates_of_rloo_and_ppo_are_the_best_of_the_tuning_seed():
    for side, script in (("RLOO", "reinforce"), ("PPO", "ppo_rlhf")):
        runs = [run for key, run in claims.TUNING.items() if key[0] == script]
        rewards = {run: claims.value_of(FOUND[run, claims.TUNING_SEED], "reward", 31, 40) for run in runs}
        assert max(rewards, key=rewards.get) == claims.CLAIMS["rloo_ppo"].runs[side]


def test_the_pages_have_the_tables_of_the_csv():
    assert claims.fill(PAGE, FOUND) == PAGE
    assert claims.ALL_TABLES.read_text(encoding="utf-8") == EVERYTHING
    for name, claim in claims.CLAIMS.items():
        assert all((run, seed) in FOUND for run in claim.runs.values() for seed in claim.seeds), name
        assert f"## {GROUPS[name]}\n" in EVERYTHING and f"`{name}`" in TABLES[GROUPS[name]]
    for name, runs in claims.SETS.items():
        assert all((run, seed) in FOUND for run in runs.values() for seed in claims.SEEDS_OF_SETS[name]), name
    assert all(f"<!-- {name} -->" in PAGE for name in ("summary", "batch", "gspo"))
    assert all((ROOT / "docs" / "pictures" / f"claim_{name}.png").exists() for name in ("map", *claims.PICTURES))
    assert len(PAGE.encode()) <= 20_000 and len(PAGE.split()) <= 2000 and len(EVERYTHING.split()) <= 3000


def sections():
    """Yield (heading, prose, claims whose tables it links to) of each section; the first has no heading."""
    for section in ("\n" + PAGE).split("\n## "):
        other = r"<!-- \w.*?<!-- end -->|!\[.*?\]\(.*?\)|^    .*$"
        prose = " ".join(re.sub(other, "", section, flags=re.DOTALL | re.MULTILINE).split())
        yield section.partition("\n")[0], prose, re.findall(r"results/claims\.md#([\w-]+)\)", section)


SECTIONS = [*sections()]
FRONT = ("Five findings", "All claims")  # use all tables


@pytest.mark.parametrize("heading, prose, names", SECTIONS, ids=[section[0] or "begin" for section in SECTIONS])
def test_sections_have_numbers_of_their_tables(heading, prose, names):
    texts = [TABLES.get(name, "") + NOTES.get(name, "") for name in names]
    texts += [*re.findall(r"<!-- \w.*?<!-- end -->", PAGE, re.DOTALL), TABLES["map"]]
    text = " ".join(texts + [EVERYTHING] * heading.startswith(FRONT))
    known = [abs(float(number)) for number in re.findall(r"(?<![\w.])[+-]?\d*\.?\d+(?![\w.-])", text)]
    for said in re.findall(r"(?<![Ss]ection )(?<![\w.])\d*\.\d+(?![\w-])", prose):
        rounding = 0.5001 / 10 ** len(said.partition(".")[2])
        assert any(abs(number - float(said)) < rounding for number in known), said
    pairs = {(abs(float(mean)), float(half)) for mean, half in re.findall(r"([+-][\d.]*\d) ± ([\d.]*\d)", text)}
    for mean, half in re.findall(r"([\d.]*\d) ± ([\d.]*\d)", prose):
        assert (float(mean), float(half)) in pairs, f"{mean} ± {half}"


# (sentence of the page, claim and place of the test, whether the test's first side has more)
DIRECTIONS = [
    ("A wrong completion ends with 52.3 ± 7.1 more dots", "dr_grpo_length", 0, True),
    ("The length division alone adds 7.31 ± 2 at the end", "dr_grpo_parts", 0, True),
    ("and 29 ± 9.5 at steps 11 to 20", "dr_grpo_parts", 3, True),
    ("both divisions still has 42 ± 5.5 fewer dots than GRPO", "dr_grpo_parts", 5, True),
    ("leads in groups of four by 0.0689 ± 0.056", "dapo_groups_of_4", 2, True),
    ("it is behind, by 0.105 ± 0.041 in groups of eight", "dapo_sampling", 1, False),
    ("helps a model that says one step in seven twice, by 0.0636 ± 0.052 (C)", "process_twice", 0, True),
    ("helps with a KL coefficient of 0.5", "grpo_iterative", 0, True),
    ("wrong completions end with 42.2 ± 11 more dots", "grpo_iterative", 3, True),
    ("one update of all 128 completions gives 0.155 ± 0.14 more reward", "reuse_3e-4", 4, True),
    ("The baseline makes the gradient noisier if rewards are 0 and 1 (C)", "reinforce_baseline", 0, False),
    ("If they are −1 and 1, it is less noisy", "reinforce_baseline", 2, True),
    ("is 0.133 ± 0.022 higher with a β of 0.5 than with 0.1", "dpo_displacement", 3, True),
]


@pytest.mark.parametrize("sentence, name, place, first_has_more", DIRECTIONS)
def test_sentences_have_the_sign_of_their_rows(sentence, name, place, first_has_more):
    assert any(sentence in prose and GROUPS[name] in names for _, prose, names in SECTIONS), sentence
    for letter in re.findall(r"\(([ABC])\)", sentence):
        assert letter == claims.grade((name, place), SIDES, KEPT, FOUND)
    claim = claims.CLAIMS[name]
    mean, _ = claims.interval(*claims.sides_of(claim, claim.tests[place], FOUND, claim.seeds))
    assert (mean > 0) == first_has_more


def test_the_findings_have_the_grades_of_their_tests():
    [text] = [prose for heading, prose, _ in SECTIONS if heading == "Five findings"]
    findings = re.split(r" (?=[1-5]\. \*\*)", text)[1:]
    rests_on = [
        [("dr_grpo_length", 0)],
        [("rare_habit_parts", 0)],
        [("gspo_16_3e-4", 0)],
        [],
        [("dpo_displacement", 0), ("dpo_displacement", 3)],
    ]
    for finding, keys in zip(findings, rests_on, strict=True):
        assert re.findall(r"\(([ABC])\)", finding) == [claims.grade(key, SIDES, KEPT, FOUND) for key in keys]
    stable = [("gspo_16_1e-4", 0), ("gspo_4_1e-4", 0), ("gspo_4_3e-4", 0)]
    assert "(A in one of them, C in two)" in findings[2]
    assert [claims.grade(key, SIDES, KEPT, FOUND) for key in stable] == ["A", "C", "C"]
    assert {claims.verdict(*SIDES[key]) for key in stable} == {"opposite"}
    accuracy = {key: claims.ends(FOUND, run) for key, run in claims.MAP.items() if key[0] == "grpo" and key[2] > 1}
    assert {key[1:] for key, value in accuracy.items() if value >= 0.695} == {("1e-4", 4), ("3e-4", 4), ("1e-4", 16)}
    assert "no difference" in findings[3] and claims.verdict(*SIDES["rloo_ppo", 0]) == "no difference"
    texts = {claim.says for claim in claims.CLAIMS.values()}
    beliefs = [text for text in texts if text.startswith("Often said")]
    assert f"We tested {len(texts) - len(beliefs)} claims of papers" in SECTIONS[0][1] and len(beliefs) == 2


def test_other_numbers_of_the_page_by_hand():
    rows = [{"step": 5 * i + 5.0, "works": 0.1 * i} for i in range(11)]
    run = claims.CLAIMS["rare_habit_parts"].runs["GRPO"]
    found = {(run, seed): rows[seed - 1 :] for seed in range(1, 9)}
    assert claims.half_show_work(found, "GRPO") == "35 to 40"  # .6 at step 35; seed 8 begins with .7 at step 40
    free, held = (claims.CLAIMS["ppo_penalty"].runs[side] for side in ("no penalty", "penalty"))
    path = [{"ref_kl": kl, "accuracy": accuracy} for kl, accuracy in ((0.0, 1.0), (1.0, 0.9), (3.0, 0.5), (2.0, 0.7))]
    found = {(free, seed): path for seed in claims.SEEDS}
    found |= {(held, seed): [{"ref_kl": 1.5, "accuracy": 0.95}] for seed in claims.SEEDS}
    assert claims.at_equal_divergence(found) == (pytest.approx(0.8), pytest.approx(0.95))


def test_runs_have_the_settings_of_the_bundled_model_but_longer_completions_and_flags_come_later():
    args = claims.parse(grpo, *claims.FLAGS.split())
    own = {"max_completion_length": 112, "eval_prompts": 256, "eval_every": 1000, "save_every": 1000, "tiny": True}
    assert {name: vars(args)[name] for name in grpo.TINY.keys() | own} == grpo.TINY | own
    assert claims.parse(grpo, *f"{claims.FLAGS} --max-completion-length 88".split()).max_completion_length == 88


def test_what_is_observed_of_a_run_agrees_with_what_it_logs():
    sizes = "--num-steps 1 --prompts-per-step 2 --minibatch-size 16 --eval-prompts 0"
    [row] = claims.measure(f"grpo --kl-coef 0 {sizes}", 1)
    assert row["completions"] == "16" and row["step"] == 1 and row["accuracy"] == ""
    length, right, wrong, share = (float(row[name]) for name in ("length", "length_right", "length_wrong", "reward"))
    assert length == pytest.approx(share * right + (1 - share) * wrong, rel=1e-3)
    assert float(row["dots_wrong"]) > 0 and 0 < float(row["works"]) < 1
    assert json.loads(row["all_right"]) + json.loads(row["all_wrong"]) <= 1
