"""The verifier: what it accepts and, above all, what it refuses."""

import json
import random
from fractions import Fraction
from pathlib import Path

import pytest

import grpo

DATA = Path(__file__).parent / "data"
REFUSED_RIGHT_ANSWERS = 28  # of 74: phrases, units, algebra and the like, which a strict verifier leaves alone


def read_lines(name):
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def box(text):
    return "\\boxed{" + text + "}"


# ---- collections of cases


def test_no_wrong_answer_of_the_collection_is_accepted():
    wrong = [row for row in read_lines("verifier_cases.jsonl") if row["expect"] == 0]
    assert len(wrong) == 76
    assert [row["id"] for row in wrong if grpo.reward_fn(row["completion"], row["gold"]) != 0.0] == []


def test_no_more_right_answers_of_the_collection_are_refused_than_before():
    right = [row for row in read_lines("verifier_cases.jsonl") if row["expect"] == 1]
    refused = [row["id"] for row in right if grpo.reward_fn(row["completion"], row["gold"]) != 1.0]
    print(f"{len(refused)} of {len(right)} right answers refused: {refused}")
    assert len(refused) <= REFUSED_RIGHT_ANSWERS


def test_labels_of_gsm8k_solutions():
    rows = read_lines("gsm8k_solutions_200.jsonl")
    assert len(rows) == 200
    assert [grpo.reward_fn(row["completion"], row["gold"]) for row in rows] == [float(row["label"]) for row in rows]


# ---- where the answer stands

EXTRACT = [
    # the last box, with nested braces
    ("so \\boxed{3}, no, \\boxed{4}.", "4"),
    ("\\boxed{\\frac{1}{2}} and more", "\\frac{1}{2}"),
    ("\\boxed{{{1}}}", "{{1}}"),
    ("\\boxed{\\{1\\}}", "\\{1\\}"),
    ("\\boxed{\\{5}", "\\{5"),
    ("\\boxed{5\\}} 6}", "5\\}"),
    ("\\boxed{}", ""),
    ("\\boxed{3} and then \\boxed{4", None),
    ("\\boxed{\\frac{1}{2}", None),
    ("#### 5\n\\boxed{4", None),
    ("\\boxed{" + "1+" * 2000 + "1}", None),  # no answer but an essay
    # a box before ####, #### before <answer>
    ("\\boxed{1}\n#### 2", "1"),
    ("#### 2\n<answer>3</answer>", "2"),
    ("#### 1\n#### 2", "2"),
    ("####3", "3"),
    ("####\t3\nand so on", "3"),
    ("#### 3 apples", "3 apples"),
    ("####", ""),
    ("<answer>3</answer>", "3"),
    ("<answer>2</answer> no <answer>3</answer>", "3"),
    ("<answer>3", None),
    ("3</answer>", None),
    ("</answer>3<answer>", None),
    # nothing else is an answer
    ("The answer is 42.", None),
    ("42", None),
    ("", None),
    ("\\fbox{42}", None),
    # thoughts never count
    ("<think>\\boxed{5}</think>\\boxed{6}", "6"),
    ("<think>\\boxed{5}</think>", None),
    ("<think>\\boxed{5}", None),
    ("\\boxed{6}<think>\\boxed{5}", "6"),
    ("\\boxed{5}</think>\\boxed{6}", "6"),
    ("\\boxed{5}</think>6", None),
    ("<think>a</think>\\boxed{5}</think>", None),
    ("<think>a<think>b</think>c</think>\\boxed{6}", "6"),
    ("<think>#### 5</think>", None),
    ("<think><answer>5</answer></think>", None),
    ("<think></think>\\boxed{5}", "5"),
]


@pytest.mark.parametrize("text, expected", EXTRACT)
def test_extract_answer(text, expected):
    assert grpo.extract_answer(text) == expected


# ---- what counts as the same

PARSE = [
    ("42", 42),
    (" 42 ", 42),
    ("-42", -42),
    ("+42", 42),
    ("- 42", -42),
    ("\u221242", -42),
    ("007", 7),
    ("-0", 0),
    ("42.", 42),
    ("42.50", Fraction(85, 2)),
    (".5", Fraction(1, 2)),
    ("$42", 42),
    ("\\$42", 42),
    ("-$42", -42),
    ("$-42", -42),
    ("£42", 42),
    ("€ 42", 42),
    ("$42$", 42),
    ("{42}", 42),
    ("**42**", 42),
    ("1,234", 1234),
    ("1,234,567.89", Fraction(123456789, 100)),
    ("1\\,234", 1234),
    ("1{,}234", 1234),
    ("1\\!,234", 1234),
    ("1/2", Fraction(1, 2)),
    ("-1/2", Fraction(-1, 2)),
    ("1/-2", Fraction(-1, 2)),
    ("\\frac{1}{2}", Fraction(1, 2)),
    ("\\dfrac{1}{2}", Fraction(1, 2)),
    ("-\\tfrac{3}{4}", Fraction(-3, 4)),
    ("-\\frac{1}{2}", Fraction(-1, 2)),
    ("\\frac{-1}{2}", Fraction(-1, 2)),
    ("6/4", Fraction(3, 2)),
    ("9007199254740993", 9007199254740993),
    ("0.1", Fraction(1, 10)),
    ("\\text{ blue }", "blue"),
    ("\\mathrm{kg}", "kg"),
    ("(1, 2)", "(1,2)"),
    ("x  =  3", "x=3"),
    ("new   york", "new york"),
    ("1/0", "1/0"),
    ("\\frac{1}{0}", "\\frac{1}{0}"),
    ("", None),
    ("  ", None),
    ("\n", None),
]


@pytest.mark.parametrize("text, expected", PARSE)
def test_parse_answer(text, expected):
    parsed = grpo.parse_answer(text)
    assert parsed == expected and isinstance(parsed, (Fraction, str, type(None)))


# What stands in the box, and the answer it must not be taken for.
NOT_EQUAL = [
    # lists of candidates
    ("1, 2, 3", "3"),
    ("1, 2, 3", "1"),
    ("1,2,3", "123"),
    ("5 or 6", "5"),
    ("5 or 6", "6"),
    ("5 \\text{ and } 6", "5"),
    ("5; 6", "5"),
    ("5\n6", "5"),
    ("5\n6", "56"),
    ("\\pm 5", "5"),
    ("A, B", "B"),
    ("\\{1,2\\}", "\\{1,2,3\\}"),
    # units and percent
    ("5%", "5"),
    ("5\\%", "5"),
    ("5%", "0.05"),
    ("5 cm", "5"),
    ("5 cm", "5 m"),
    ("5k", "5000"),
    ("5^\\circ", "5"),
    # thousands separators of other forms
    ("1.234", "1234"),
    ("1.234,5", "1234.5"),
    ("12,34", "1234"),
    ("1,2345", "12345"),
    ("1234,567", "1234567"),
    ("1,23", "1.23"),
    (",123", "123"),
    ("1,,234", "1234"),
    ("1,234,56", "123456"),
    ("1 234", "1234"),
    ("1\\ 234", "1234"),
    ("1\u2009234", "1234"),
    ("1'234", "1234"),
    ("1_234", "1234"),
    # mixed numbers, fractions, powers
    ("1\\frac{1}{2}", "1/2"),
    ("1\\frac{1}{2}", "11/2"),
    ("1 1/2", "11/2"),
    ("1/2/3", "1/6"),
    ("\\frac{1}{2}5", "1/25"),
    ("-\\frac{-1}{2}", "-1/2"),
    ("\\frac{1}{0}", "1"),
    ("0.33", "1/3"),
    ("0.3333333333333333", "1/3"),
    ("4\u00b2", "42"),
    ("10^3", "103"),
    ("2e3", "23"),
    ("1e3", "1"),
    # digits that are not ASCII
    ("\u0664\u0662", "42"),
    ("\uff14\uff12", "42"),
    ("\u00b2", "2"),
    ("\u00bd", "12"),
    ("\u2164", "5"),
    # signs, negations, intervals, equations
    ("-5", "5"),
    ("\u22125", "5"),
    ("\u20135", "5"),
    ("--5", "5"),
    ("+-5", "5"),
    ("- -5", "5"),
    ("not 5", "5"),
    ("\\neq 5", "5"),
    ("\\neg 5", "5"),
    (">5", "5"),
    ("\u2265 5", "5"),
    ("\\approx 5", "5"),
    ("~5", "5"),
    ("(5)", "5"),
    ("[5,6]", "5"),
    ("[1,2)", "(1,2)"),
    ("x=5", "6"),
    ("5=6", "6"),
    ("4+1", "5"),
    ("5!", "5"),
    ("5?", "5"),
    # blanks and invisible characters inside numbers
    ("4 2", "42"),
    ("4\u00a02", "42"),
    ("4\u200b2", "42"),
    ("4\x002", "42"),
    ("\u202e24", "42"),
    ("1. 5", "1.5"),
    ("1 .5", "1.5"),
    ("- 4 2", "-42"),
    # wrappers of html and markdown
    ("<b>5</b>", "5"),
    ("5 <!-- 6 -->", "5"),
    ("`5`", "5"),
    ("~~5~~", "5"),
    ("\\sout{5}", "5"),
    ("**5** or **6**", "6"),
    ("\\text{not }5", "5"),
    # nothing, and text
    ("", "0"),
    ("", ""),
    (" ", " "),
    (".", "0"),
    ("-", "0"),
    ("$", "0"),
    ("\\text{}", "0"),
    ("five", "5"),
    ("no", "on"),
    ("a b", "ab"),
    ("no", "No"),
    ("nan", "0"),
    ("None", "0"),
    ("\\infty", "-\\infty"),
    ("x_1", "x1"),
]


@pytest.mark.parametrize("given, answer", NOT_EQUAL)
def test_another_answer_is_refused(given, answer):
    assert grpo.reward_fn(box(given), answer) == 0.0


# Whole completions, and the answer they must not be taken for.
REFUSED = [
    ("I got 7, then \\boxed{7", "7"),
    ("\\boxed{7} no, \\boxed{8", "7"),
    ("\\boxed{7} no, \\boxed{8}", "7"),
    ("\\boxed{7}\\boxed{}", "7"),
    ("#### 7 or 8", "7"),
    ("#### 7\n#### 8", "7"),
    ("#### 7 ####", "7"),
    ("#### 7, but I am not sure", "7"),
    ("#### Step 2: add the numbers", "2"),
    ("<answer>7</answer><answer>8</answer>", "7"),
    ("<answer>7, 8</answer>", "7"),
    ("<answer>7", "7"),
    ("<answer>not 7</answer>", "7"),
    ("The answer is 7", "7"),
    ("7", "7"),
    ("<think>\\boxed{7}", "7"),
    ("<think>7</think>", "7"),
    ("\\boxed{7}</think>", "7"),
    ("", ""),
    ("", "7"),
]


@pytest.mark.parametrize("completion, answer", REFUSED)
def test_a_completion_without_this_as_its_final_answer_is_refused(completion, answer):
    assert grpo.reward_fn(completion, answer) == 0.0


# Found by looking for false accepts.
NEAR_MISSES = [
    ("\\boxed{0,123}", "123"),  # 0.123 with a decimal comma
    ("\\boxed{00,123}", "123"),
    ("\\boxed{6 \\boxed{5}}", "5"),
    ("\\boxed{1 or \\boxed{5}", "5"),  # the outer box is not closed
    ("\\boxed{\\text{not }\\boxed{5}}", "5"),
    ("#### 4<think>x</think>2", "42"),
    ("\\boxed{A}", "A*"),
    ("\\boxed{5*}", "5"),
    ("\\boxed{1\\!2}", "12"),
    ("\\boxed{5..}", "5"),
    ("-\\boxed{5}", "5"),
]


@pytest.mark.parametrize("completion, answer", NEAR_MISSES)
def test_near_misses_are_refused(completion, answer):
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
]


@pytest.mark.parametrize("completion, answer", ACCEPTED)
def test_the_right_answer_is_accepted(completion, answer):
    assert grpo.reward_fn(completion, answer) == 1.0


def test_the_answer_of_a_whole_solution_is_what_follows_its_marker():
    solution = "She sells 48/2 = <<48/2=24>>24 clips.\nThat is 48+24 = <<48+24=72>>72.\n#### 72"
    assert [grpo.reward_fn(box(given), solution) for given in ("72", "24", "48", solution)] == [1.0, 0.0, 0.0, 0.0]


# ---- anything a model may write

LONG = 1_000_000
HOSTILE = {
    "braces": "{" * LONG,
    "closing braces": "}" * LONG,
    "boxes": "\\boxed{" * (LONG // 7),
    "closed boxes": "\\boxed{1}" * (LONG // 9),
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
    pieces = [
        "\\boxed{",
        "}",
        "{",
        "####",
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "\\frac{",
        "$",
        "/",
        ",",
        ".",
    ]
    pieces += [".", "5", "1,234", "-", "\\", "\n", " ", "*", "\\text{", "%", "\ud800", "\x00", "\u0664", "\u202e"]
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
