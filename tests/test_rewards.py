"""The verifier: what it accepts and, above all, what it refuses."""

import math
import random
import re
from fractions import Fraction

import numpy
import pytest
import torch
from tiny import ROOT, SCRIPTS, parse, read_jsonl, write_jsonl

import dapo
import dr_grpo
import grpo

DATA = ROOT / "tests" / "data"
REFUSED_RIGHT_ANSWERS = 27  # of 74: phrases, units, algebra and the like, which a strict verifier leaves alone


def box(text):
    return "\\boxed{" + text + "}"


# ---- collections of cases


def test_no_wrong_answer_of_the_collection_is_accepted():
    wrong = [row for row in read_jsonl(DATA / "verifier_cases.jsonl") if row["expect"] == 0]
    assert len(wrong) == 76
    assert [row["id"] for row in wrong if grpo.reward_fn(row["completion"], row["gold"]) != 0.0] == []


def test_no_more_right_answers_of_the_collection_are_refused_than_before():
    right = [row for row in read_jsonl(DATA / "verifier_cases.jsonl") if row["expect"] == 1]
    refused = [row["id"] for row in right if grpo.reward_fn(row["completion"], row["gold"]) != 1.0]
    print(f"{len(refused)} of {len(right)} right answers refused: {refused}")
    assert len(refused) <= REFUSED_RIGHT_ANSWERS


def test_labels_of_gsm8k_solutions():
    rows = read_jsonl(DATA / "gsm8k_solutions_200.jsonl")
    assert len(rows) == 200
    assert [grpo.reward_fn(row["completion"], row["gold"]) for row in rows] == [float(row["label"]) for row in rows]


# ---- where the answer stands

# {final answer: texts that have it}
EXTRACT = {
    # of the last box, with nested braces; a box goes before ####, #### before <answer>
    **{"4": r"so \boxed{3}, no, \boxed{4}.", "": r"\boxed{} ¦ ####", r"\frac{1}{2}": r"\boxed{\frac{1}{2}} and more"},
    **{"{{1}}": r"\boxed{{{1}}}", r"\{1\}": r"\boxed{\{1\}}", r"\{5": r"\boxed{\{5}", r"5\}": r"\boxed{5\}} 6}"},
    **{"1": "\\boxed{1}\n#### 2", "2": "#### 2\n<answer>3</answer> ¦ #### 1\n#### 2", "3 apples": "#### 3 apples"},
    "3": "####3 ¦ ####\t3\nand so on ¦ <answer>3</answer> ¦ <answer>2</answer> no <answer>3</answer>",
    # thoughts never count
    "6": r"""<think>\boxed{5}</think>\boxed{6} ¦ \boxed{6}<think>\boxed{5} ¦ \boxed{5}</think>\boxed{6}
 ¦ <think>a<think>b</think>c</think>\boxed{6}""",
    "5": r"<think></think>\boxed{5} ¦ \boxed 5 ¦ so \boxed 5. ¦ $\boxed 5$ ¦ \boxed 5, as 2+3=5 ¦ \boxed{4} \boxed 5",
    **{"5.5": r"\boxed 5.5 ¦ \boxed 5.5.", "-5": r"\boxed -5", "1/2": r"\boxed 1/2", "1,234": r"\boxed 1,234"},
    None: r"""\boxed{3} and then \boxed{4 ¦ \boxed{\frac{1}{2} ¦ <answer>3 ¦ 3</answer> ¦ </answer>3<answer>
 ¦ The answer is 42. ¦ 42 ¦ \fbox{42} ¦ <think>\boxed{5}</think> ¦ <think>\boxed{5} ¦ \boxed{5}</think>6
 ¦ <think>a</think>\boxed{5}</think> ¦ <think>#### 5</think> ¦ <think><answer>5</answer></think>""",
}
EXTRACT = [(text, answer) for answer, texts in EXTRACT.items() for text in re.split(r"\s*¦ ", texts)]
ESSAY = "\\boxed{" + "1+" * 2000 + "1}"


@pytest.mark.parametrize("text, expected", [*EXTRACT, ("", None), ("#### 5\n\\boxed{4", None), (ESSAY, None)])
def test_extract_answer(text, expected):
    assert grpo.extract_answer(text) == expected


# ---- what counts as the same

# {what it is: texts that are parsed to it}
PARSE = {
    42: r"42 ¦  42  ¦ +42 ¦ 42. ¦ $42 ¦ \$42 ¦ £42 ¦ € 42 ¦ $42$ ¦ {42} ¦ **42**",
    -42: "-42 ¦ - 42 ¦ \u221242 ¦ -$42 ¦ $-42",
    1234: r"1,234 ¦ 1\,234 ¦ 1{,}234 ¦ 1\!,234",
    0.5: r".5 ¦ 1/2 ¦ \frac{1}{2} ¦ \dfrac{1}{2} ¦ \frac12 ¦ \frac 1 2 ¦ \frac1{2} ¦ \frac{1}2 ¦ \(\frac12\)",
    Fraction(-1, 2): r"-1/2 ¦ 1/-2 ¦ -\frac{1}{2} ¦ \frac{-1}{2} ¦ -\tfrac12",
    Fraction(1, 10): r"0.1 ¦ \frac1{10}",
    5: r"$5$ ¦ $$5$$ ¦ \(5\) ¦ \[5\] ¦ \( 5 \) ¦ \(5\). ¦ **$5$**",
    **{7: "007", 0: "-0", Fraction(85, 2): "42.50", Fraction(123456789, 100): "1,234,567.89"},
    **{Fraction(-3, 4): r"-\tfrac{3}{4}", Fraction(3, 2): "6/4"},
    **{9007199254740993: "9007199254740993", "blue": r"\text{ blue }", "kg": r"\mathrm{kg}", "(1,2)": "(1, 2)"},
    **{"x=3": "x  =  3", "new york": "new   york", "1/0": "1/0", r"\frac{1}{0}": r"\frac{1}{0}", None: " ¦   ¦ \n"},
}


@pytest.mark.parametrize("text, expected", [(text, value) for value in PARSE for text in PARSE[value].split(" ¦ ")])
def test_parse_answer(text, expected):
    parsed = grpo.parse_answer(text)
    assert parsed == expected and isinstance(parsed, (Fraction, str, type(None)))


# {answer: what stands in the box and must not be taken for it}
NOT_EQUAL = {
    "5": r"""5 or 6 ¦ 5 \text{ and } 6 ¦ 5; 6 ¦ \pm 5 ¦ 5% ¦ 5\% ¦ 5 cm ¦ 5^\circ ¦ -5 ¦ --5 ¦ +-5 ¦ - -5 ¦ not 5
 ¦ \neq 5 ¦ \neg 5 ¦ >5 ¦ \approx 5 ¦ ~5 ¦ (5) ¦ [5,6] ¦ 4+1 ¦ 5! ¦ 5? ¦ <b>5</b> ¦ 5 <!-- 6 --> ¦ `5` ¦ ~~5~~
 ¦ \sout{5} ¦ \text{not }5 ¦ five ¦ 5* ¦ 5..""",
    **{"6": "5 or 6 ¦ x=5 ¦ 5=6 ¦ **5** or **6**", "3": "1, 2, 3", "B": "A, B", "0.05": "5%", "5 m": "5 cm"},
    **{r"\{1,2,3\}": r"\{1,2\}", "5000": "5k", "1": r"1, 2, 3 ¦ \frac{1}{0} ¦ 1e3", "123": "1,2,3 ¦ ,123"},
    # thousands separators of other forms, blanks inside numbers
    "1234": r"1.234 ¦ 12,34 ¦ 1,,234 ¦ 1 234 ¦ 1\ 234 ¦ 1'234 ¦ 1_234",
    **{"1234.5": "1.234,5", "12345": "1,2345", "1234567": "1234,567", "1.23": "1,23", "123456": "1,234,56"},
    **{"42": "4 2", "1.5": "1. 5 ¦ 1 .5", "-42": "- 4 2"},
    # mixed numbers, fractions, powers
    **{"11/2": r"1\frac{1}{2} ¦ 1 1/2", "1/6": "1/2/3", "1/25": r"\frac{1}{2}5"},
    **{"3/2": r"1\frac12 ¦ \frac1{2}3", "12": r"\frac12 ¦ 1\!2", "1/2": r"\frac123 ¦ 1\frac12 ¦ 1\frac{1}{2}"},
    **{"-1/2": r"-\frac{-1}{2}", "1/3": "0.33 ¦ 0.3333333333333333", "103": "10^3", "23": "2e3"},
    # intervals, text, nothing
    **{"(1,2)": "[1,2)", r"-\infty": r"\infty", "x1": "x_1", "on": "no", "ab": "a b", "No": "no", "A*": "A"},
    "0": r"¦ . ¦ - ¦ $ ¦ \text{} ¦ nan ¦ None",
}
NOT_EQUAL = [(given, answer) for answer, texts in NOT_EQUAL.items() for given in re.split(r"\s*¦ ", texts)]
NOT_EQUAL += [("", ""), (" ", " "), ("5\n6", "5"), ("5\n6", "56")]
# digits that are not ASCII, other minus signs, invisible characters
NOT_EQUAL += [("1\u2009234", "1234"), ("\u0664\u0662", "42"), ("\uff14\uff12", "42"), ("4\u00b2", "42")]
NOT_EQUAL += [("\u00b2", "2")]
NOT_EQUAL += [("\u00bd", "12"), ("\u2164", "5"), ("\u22125", "5"), ("\u20135", "5"), ("\u2265 5", "5")]
NOT_EQUAL += [("4\u00a02", "42"), ("4\u200b2", "42"), ("4\x002", "42"), ("\u202e24", "42")]


@pytest.mark.parametrize("given, answer", NOT_EQUAL)
def test_another_answer_is_refused(given, answer):
    assert grpo.reward_fn(box(given), answer) == 0.0


# {answer: whole completions that must not be taken for it}
REFUSED = {
    "7": r"""I got 7, then \boxed{7 ¦ \boxed{7} no, \boxed{8 ¦ \boxed{7} no, \boxed{8} ¦ \boxed{7}\boxed{} ¦ #### 7 or 8
 ¦ #### 7 #### ¦ #### 7, but I am not sure ¦ <answer>7</answer><answer>8</answer> ¦ <answer>7, 8</answer> ¦ <answer>7
 ¦ <answer>not 7</answer> ¦ The answer is 7 ¦ 7 ¦ <think>\boxed{7} ¦ <think>7</think> ¦ \boxed{7}</think>""",
    # a decimal comma, an outer box that is not closed, a sign before the box
    "123": r"\boxed{0,123} ¦ \boxed{00,123}",
    "5": r"\boxed{6 \boxed{5}} ¦ \boxed{1 or \boxed{5} ¦ \boxed{\text{not }\boxed{5}} ¦ -\boxed{5}",
    **{"2": "#### Step 2: add the numbers", "42": "#### 4<think>x</think>2"},
    # a box without braces ends at a blank or a punctuation mark, or else it holds more than its beginning
    "6": r"""\boxed 6.5 ¦ \boxed 6,5 ¦ \boxed 6/5 ¦ \boxed -6 ¦ \boxed 6-7 ¦ \boxed 6x ¦ \boxed 6% ¦ \boxed 6\%
 ¦ \boxed 6+7 ¦ \boxed 6^{2} ¦ \boxed 6\sqrt{2} ¦ \boxed 6\frac12 ¦ \boxed 6 \boxed{7 ¦ \boxed 6, no, \boxed 7
 ¦ \boxed""",
    "x": r"\boxed x=5 ¦ \boxed x+1",
}
REFUSED = [(text, answer) for answer, texts in REFUSED.items() for text in re.split(r"\s*¦ ", texts)]


@pytest.mark.parametrize("completion, answer", [*REFUSED, ("#### 7\n#### 8", "7"), ("", ""), ("", "7")])
def test_a_completion_without_this_as_its_final_answer_is_refused(completion, answer):
    assert grpo.reward_fn(completion, answer) == 0.0


ACCEPTED = [
    ("#### 1,234", "reasoning\n#### 1,234"),
    ("\\boxed{1234}", "48/2 = <<48/2=24>>24 clips.\n#### 1,234"),
    ("so it is \\boxed{72}.", "#### 72"),
    ("#### 72.", "72"),
    ("#### $72.00", "72"),
    ("\\boxed{1/2}", "We get \\boxed{\\frac{1}{2}}."),
    ("<answer> 0.5 </answer>", "1/2"),
    ("\\boxed{5}", "\n 5 \n"),
    ("\\boxed{\\text{Monday}}", "Monday"),
    ("\\boxed{x = 3}", "x=3"),
    ("\\boxed{(1,2)}", "(1, 2)"),
    ("<think>\\boxed{4}</think>\\boxed{5}", "5"),
    ("\\boxed{5}} and cut off in the mid", "5"),
    ("so it is $\\boxed 5$.", "5"),
    ("\\boxed{\\(\\frac12\\)}", "$0.5$"),
    ("#### $5$", "\\boxed 5"),
    ("\\boxed{2}", '["2"]'),
    ("\\boxed{\\sqrt{2}}", '["\\\\sqrt{2}"]'),
]


@pytest.mark.parametrize("completion, answer", ACCEPTED)
def test_the_right_answer_is_accepted(completion, answer):
    assert grpo.reward_fn(completion, answer) == 1.0


def test_the_answer_of_a_whole_solution_is_what_follows_its_marker():
    solution = "She sells 48/2 = <<48/2=24>>24 clips.\nThat is 48+24 = <<48+24=72>>72.\n#### 72"
    assert [grpo.reward_fn(box(given), solution) for given in ("72", "24", "48", solution)] == [1.0, 0.0, 0.0, 0.0]


# {what parse_gold makes of it: answers}
GOLD = {
    5: r"5 ¦ #### 5 ¦ \boxed{5} ¦ \boxed 5 ¦ $5$ ¦ \(5\)",
    **{Fraction(1, 2): r"\frac12 ¦ We get \boxed{\frac{1}{2}}.", "yes": "yes ¦ \\text{yes}"},
    **{'["5","6"]': '["5", "6"]', "[5]": "[5]", '["5",6]': '["5", 6]', "new york city": '["new york city"]'},
    "to be or not to be to be or not to be": "to be or not to be to be or not to be",  # four words, often
    "a b c d e f g h i j": "a b c d e f g h i j",
    "one two three four five six seven": "one two three four five six seven",
    None: """ ¦ [""] ¦ one two three four five six seven eight ¦ We add both, then halve what we have got.
 ¦ #### One finds it by adding both of the numbers, in order.""",
}
GOLD = [(answer, expected) for expected, answers in GOLD.items() for answer in re.split(r"\s*¦ ", answers)]


@pytest.mark.parametrize("answer, expected", GOLD)
def test_an_answer_of_a_row_is_a_solution_a_list_of_one_text_or_nothing_if_it_is_prose(answer, expected):
    assert grpo.parse_gold(answer) == expected
    assert expected is not None or grpo.reward_fn(box(answer), answer) == 0.0


@pytest.mark.parametrize("answer, text", [('["5", "6"]', "5"), ('["5", "6"]', "6"), ('["56"]', "5"), ("[5]", "5")])
def test_a_list_of_more_is_not_one_of_them(answer, text):
    assert grpo.reward_fn(box(text), answer) == 0.0


# ---- anything a model may write

LONG = 1_000_000
HOSTILE = {
    "braces": "{" * LONG,
    "closing braces": "}" * LONG,
    "boxes": "\\boxed{" * (LONG // 7),
    "closed boxes": "\\boxed{1}" * (LONG // 9),
    "boxes without braces": "\\boxed 1" * (LONG // 8),
    "points": "\\boxed " + "." * LONG,
    "lists": '["' * (LONG // 2) + '"]',
    "a list that is no json": '["\\sqrt{2}"]',
    "a line break in a list": '["6\n"]',
    "words": "word " * (LONG // 5),
    "nested boxes": "\\boxed{" * 100_000 + "1" + "}" * 100_000,
    "thoughts": "<think>" * (LONG // 7),
    "closed thoughts": "</think>" * (LONG // 8),
    "tags": "<answer>" * (LONG // 8) + "</answer>",
    "markers": "#### " * (LONG // 5),
    "digits": "1" * LONG,
    "blanks": " " * LONG,
    "line breaks": "\n" * LONG,
    "backslashes": "\\" * LONG,
    "dollars": "$" * LONG,
    "stars": "*" * LONG,
    "separators": "1" + ",111" * (LONG // 4),
    "fractions": "\\frac{1}{" * (LONG // 9),
    "negative spaces": "\\!" * (LONG // 2),
    "exponent": "1E1000000000",
    "tower": "9^{9^{9^{9}}}",
    "division": "1/" + "0" * 900,
    "long fraction": "1" * 480 + "/" + "9" * 480,
    "null bytes": "\x00" * 1000,
    "surrogates": "\ud800\udfff" * 1000,
    "format": "%s{0.__class__}{",
    "regex": "^.*$(((",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused_and_finishes(name):
    text = HOSTILE[name]
    for completion in (text, box(text), "\\boxed{" + text, "#### " + text, f"<answer>{text}</answer>", text + box("6")):
        assert grpo.reward_fn(completion, "5") == 0.0


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_ground_truth_raises_nothing(name):
    assert grpo.reward_fn(box("5"), HOSTILE[name]) == 0.0


def test_random_text_raises_nothing():
    draw = random.Random(0)
    pieces = r"\boxed{ } { #### <think> </think> <answer> </answer> \frac{ $ / , . . 5 1,234 - \ * \text{ %".split()
    pieces += ["\n", " ", "\ud800", "\x00", "\u0664", "\u202e"]
    for _ in range(1500):
        parts = [draw.choice(pieces) if draw.random() < 0.8 else chr(draw.randrange(0x110000)) for _ in range(20)]
        text = "".join(parts)
        assert grpo.reward_fn(text, "31337") == 0.0
        assert grpo.reward_fn(box("31337"), text) == 0.0
        assert grpo.reward_fn(text, text) in (0.0, 1.0)


def test_nothing_is_evaluated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in ("__import__('os').system('touch PWNED')", "open('PWNED', 'w')", "exit()", "2+3", "10**10**10"):
        for completion in (code, box(code), "#### " + code, f"<answer>{code}</answer>"):
            assert grpo.reward_fn(completion, "5") == 0.0
            assert grpo.reward_fn(box("5"), completion) == 0.0
    assert list(tmp_path.iterdir()) == []


# ==== rewards of a user's own: what they are given, what is asked of them, and what is then reported


SMALL = {"num_steps": 1, "prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "max_completion_length": 16}
SMALL |= {"eval_prompts": 4, "max_rounds": 1}
ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": i % 3} for i in range(1, 13)]


def small_args(script, folder, rows=ROWS, **settings):
    names = vars(script.Args())
    given = SMALL | {"dataset": write_jsonl(folder / "rows.jsonl", rows), "run_dir": str(folder / "run")} | settings
    return parse(script, **{name: value for name, value in given.items() if name in names})


def logged(folder, name="metrics"):
    return read_jsonl(folder / "run" / f"{name}.jsonl")


def train_on(rewards, monkeypatch, folder, num_steps=1):
    """A run in which two groups of two completions get these rewards."""
    sizes = {"prompts_per_step": 2, "group_size": 2, "minibatch_size": 4, "eval_prompts": 0, "num_steps": num_steps}
    monkeypatch.setattr(grpo, "score_completions", lambda *_: rewards)
    grpo.main(small_args(grpo, folder, **sizes))


ARRAYS = [numpy.array([0.5, 1.0, 0.0, 2.0]), torch.tensor([0.5, 1.0, 0.0, 2.0]), (0.5, 1.0, 0, 2)]
ARRAYS += [[torch.tensor(0.5), True, False, torch.tensor(2.0)], [numpy.float32(0.5), 1, numpy.int64(0), 2.0]]


@pytest.mark.parametrize("rewards", ARRAYS)
def test_numbers_of_any_kind_are_rewards_and_so_are_arrays_of_them(rewards, monkeypatch, tmp_path):
    train_on(rewards, monkeypatch, tmp_path)
    assert logged(tmp_path)[0]["reward/mean"] == 0.875
    assert logged(tmp_path, "samples")[0]["rewards"] == [0.5, 1.0]


BAD = [None, [], [1.0], [0.0, 1.0], [1.0] * 3, [0.0, 1.0] * 3, 1.0, (i for i in "ab"), torch.tensor(1.0)]
BAD += [[0.0, 0.0, 0.0, reward] for reward in (10**400, "much", None, [1.0, 2.0], {})]


@pytest.mark.parametrize("rewards", BAD)
@pytest.mark.usefixtures("alone")
def test_a_number_for_each_completion_is_asked_for(rewards, monkeypatch, tmp_path):
    with pytest.raises((TypeError, SystemExit), match="score_completions returned|not iterable|0-d tensor"):
        train_on(rewards, monkeypatch, tmp_path)


WRONG = [([0.5, None], r"^score_completions returned None for the row \{'level': 1\}$")]
WRONG += [(["a", 1], r"^score_completions returned 'a' for the row \{'level': 0\}$")]
WRONG += [([0.5], "^score_completions returned 1 rewards for 2 completions$")]
WRONG += [((i for i in range(3)), "^score_completions returned 3 rewards for 2 completions$")]


@pytest.mark.parametrize("rewards, message", WRONG)
def test_what_is_wrong_with_rewards_is_said_in_one_line(rewards, message, monkeypatch):
    monkeypatch.setattr(grpo, "score_completions", lambda *_: rewards)
    with pytest.raises(SystemExit, match=message):
        grpo.compute_rewards(["x", "y"], [{"level": 0}, {"level": 1}])


def test_rewards_become_floats(monkeypatch):
    monkeypatch.setattr(grpo, "score_completions", lambda texts, rows: numpy.array([len(texts), rows[1]["level"]]))
    rewards = grpo.compute_rewards(["x", "y"], [{"level": 0}, {"level": 1}])
    assert rewards == [2.0, 1.0] and {type(reward) for reward in rewards} == {float}


def test_an_error_in_reward_fn_has_a_note_of_its_completion_and_row(monkeypatch):
    monkeypatch.setattr(grpo, "reward_fn", lambda text, answer: 1 / (len(text) - answer))
    rows = [{"answer": 3, "level": i} for i in range(2)]
    with pytest.raises(ZeroDivisionError) as error:
        grpo.compute_rewards(["x", "abc"], rows)
    assert error.value.__notes__ == [f"in the reward of the completion 'abc' of the row {rows[1]}"]


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e39])
@pytest.mark.usefixtures("alone")
def test_rewards_that_are_not_finite_train_nothing_and_end_the_run(reward, monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="gradient's norm was nan three times in a row"):
        train_on([0.0, 1.0, 0.0, reward], monkeypatch, tmp_path, num_steps=4)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_completions_are_scored_as_a_batch_with_all_columns_of_their_rows(script, tmp_path, monkeypatch):
    calls = []

    def score_completions(completions, rows):
        calls.append([(row["prompt"], row["answer"], row["level"]) for row in rows])
        assert len(completions) == len(rows) and all(isinstance(text, str) for text in completions)
        return [len(text) % 2 for text in completions]

    monkeypatch.setattr(script, "score_completions", score_completions)
    script.main(small_args(script, tmp_path))
    before, rollout, after = calls
    given = {(row["prompt"], row["answer"], row["level"]) for row in ROWS}
    assert len(before) == len(after) == 4 and len(rollout) == 16 and {*before, *rollout} <= given
    assert all(len({*rollout[first : first + 4]}) == 1 for first in range(0, 16, 4))  # those of one prompt adjacent


def test_accuracy_is_by_the_rule_where_a_bonus_changes_the_reward(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "reward_fn", lambda text, answer: grpo.is_right(text, answer) + 0.2 * ("<think>" in text))
    grpo.main(small_args(grpo, tmp_path, eval_prompts=8, num_steps=0))
    (line,) = logged(tmp_path)
    samples = logged(tmp_path, "eval_samples")
    right = [grpo.is_right(sample["completion"], sample["answer"]) for sample in samples]
    assert line["eval/accuracy"] == sum(right) / 8 > 0
    assert line["eval/reward"] == pytest.approx(sum(sample["reward"] for sample in samples) / 8)
    assert line["eval/pass@4"] >= line["eval/pass@1"] > 0


@pytest.mark.parametrize("script", [grpo, dapo])
def test_a_reward_that_needs_no_answers_needs_no_column_of_them(script, tmp_path, monkeypatch):
    rows = [{"prompt": row["prompt"]} for row in ROWS]
    with pytest.raises(TypeError, match="NoneType"):  # the rule does need them
        script.main(small_args(script, tmp_path, rows, run_dir=str(tmp_path / "by rule")))
    monkeypatch.setattr(script, "reward_fn", lambda text, _answer: len(text) % 3)
    script.main(small_args(script, tmp_path, rows))
    lines = logged(tmp_path)
    assert "eval/reward" in lines[0] and not [key for key in lines[0] if "accuracy" in key or "pass@" in key]


# ---- what is trained on where that is not the reward, and where nothing is


def test_a_truncated_completion_gets_the_lowest_reward_of_its_group_and_at_most_0():
    """Of rewards of +1 and -1 a 0 would be a prize for being cut off."""
    rewards = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 2.0, 3.0])
    truncated = torch.tensor([True, False, True, False, True, False, False, True])
    trained = dr_grpo.punish_truncation(rewards, truncated, 4)
    assert trained.tolist() == [-1.0, -1.0, -1.0, 1.0, 0.0, 1.0, 2.0, 0.0]
    zero_one = torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert dr_grpo.punish_truncation(zero_one, truncated[:4], 4).tolist() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("script", [dr_grpo, dapo])
def test_the_reward_that_is_trained_on_is_logged_beside_the_rule_s(script, tmp_path):
    script.main(small_args(script, tmp_path, max_completion_length=8))
    line = logged(tmp_path)[1]
    assert line["rollout/truncated"] > 0
    if script is dr_grpo:
        assert line["reward/trained_mean"] <= line["reward/mean"]
    else:
        assert line["reward/trained_mean"] < 2 * line["reward/mean"] - 1
    grpo.main(small_args(grpo, tmp_path, run_dir=str(tmp_path / "grpo")))
    assert "reward/trained_mean" not in read_jsonl(tmp_path / "grpo" / "metrics.jsonl")[1]


@pytest.mark.parametrize("script", [grpo, dr_grpo])
def test_it_is_told_where_there_is_nothing_to_learn_from(script, tmp_path, monkeypatch, capfd):
    """After five steps: here there is something in the first and in the twelfth."""
    steps, sample = [], script.sample_completions
    monkeypatch.setattr(script, "sample_completions", lambda *args: steps.append(0) or sample(*args))
    monkeypatch.setattr(
        script, "score_completions", lambda texts, _: [i % 2 * (len(steps) in (1, 12)) for i, _ in enumerate(texts)]
    )
    script.main(small_args(script, tmp_path, num_steps=15, eval_prompts=0))
    told = [line for line in "".join(capfd.readouterr()).splitlines() if "no learning signal" in line]
    assert [re.search("step ([0-9]+)", line)[1] for line in told] == ["10"]
    signals = [line["reward/zero_std"] < 1 for line in logged(tmp_path)]
    assert [step for step, found in enumerate(signals, 1) if found] == [1, 12]
