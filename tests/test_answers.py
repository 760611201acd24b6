"""The rule that compares answers, and rewards in parts: python -m pytest tests/test_answers.py

Lines of the tables are "answer | text ¦ text ¦ ...", where ⏎ stands for a line break.
"""

import time
from decimal import Decimal
from fractions import Fraction

import numpy
import pytest
import torch
from toy import ROOT, read_jsonl

import grpo

DATA = ROOT / "tests" / "data"
REFUSED_RIGHT_ANSWERS = 29  # of 74: phrases, algebra, squared units and the like


def each_case(table):
    """Parametrize a test with every answer and text of a table."""
    pairs = []
    for line in table.strip("\n").split("\n"):
        answer, texts = line.replace("⏎", "\n").split(" | ")
        pairs += [(answer, text) for text in texts.split(" ¦ ")]
    return pytest.mark.parametrize("answer, text", pairs)


def box(text):
    return "\\boxed{" + text + "}"


def test_no_wrong_answer_of_the_collections_is_accepted_and_no_more_right_ones_are_refused_than_before():
    rows = read_jsonl(DATA / "verifier_cases.jsonl")
    rewards = {row["id"]: grpo.reward_fn(row["completion"], row["gold"]) for row in rows}
    assert [rewards[row["id"]] for row in rows if row["expect"] == 0] == [0.0] * 76
    refused = [row["id"] for row in rows if row["expect"] == 1 and rewards[row["id"]] != 1.0]
    assert len(refused) <= REFUSED_RIGHT_ANSWERS, refused
    rows = read_jsonl(DATA / "gsm8k_solutions_200.jsonl")
    rewards = [grpo.reward_fn(row["completion"], row["gold"]) for row in rows]
    assert len(rows) == 200 and rewards == [float(row["label"]) for row in rows]


# The last box counts with all that is in it, and goes before ####. What stands before </think> does not count.
@each_case(r"""
4 | so \boxed{3}, no, \boxed{4}. ¦ #### 3⏎\boxed{4} ¦ \boxed{4}⏎#### 3 ¦ \boxed{4}} and {so {on
6 \boxed{5} | \boxed{6 \boxed{5}} ¦ \boxed{4} \boxed{6 \boxed{5}} or so
\frac{1}{2} | \boxed{\frac{1}{2}} and more
\{1,\{2\}\} | \boxed{\{1,\{2\}\}}
3 apples | #### 3 apples ¦ #### 1⏎#### 3 apples⏎and so on ¦ ####3 apples ¦ ####	3 apples ⏎
6 | <think>\boxed{5}</think>\boxed{6} ¦ \boxed{5}</think>\boxed{6} ¦ <think>a<think>b</think>c</think>#### 6
None | <think>\boxed{4}. Wait ¦ <think>a</think>\boxed{4}<think>
None | \boxed{3} and then \boxed{4 ¦ \boxed{\frac{1}{2} ¦ #### 5⏎\boxed{4 ¦ \boxed 4 ¦ \fbox{4}
None | The answer is 42. ¦ 42 ¦ <answer>3</answer> ¦ <think>\boxed{5}</think> 5 ¦ #### 5</think> ¦ ### 5 ¦ boxed{5}
""")
def test_extract_answer(answer, text):
    assert str(grpo.extract_answer(text)) == answer


# Signs, currencies, separators, formatting and units.
@each_case(r"""
42 | 42 ¦  42  ¦ +42 ¦ 42. ¦ $42 ¦ \$42 ¦ $42$ ¦ $$42$$ ¦ {42} ¦ **42** ¦ 42* ¦ 42.0 ¦ 042 ¦ \text{42} ¦ 84/2 ¦ ٤٢
-42 | -42 ¦ - 42 ¦ -$42 ¦ $-42 ¦ -\$42.00 ¦ \left-42\right ¦ -\frac{84}{2} ¦ - \tfrac{42}1
1234 | 1,234 ¦ 1,\!234 ¦ 1\,234 ¦ 1{,}234 ¦ 1\!,234 ¦ $1,234.00 ¦ 1,234 \text{ dollars}
123456789/100 | 1,234,567.89 ¦ 1{,}234{,}567.89
10000 | 10,000 ¦ 10{,}000 ¦ 10,000 \text{ meters}.⏎ ¦ 20,000/2
1/2 | .5 ¦ 0.50 ¦ 1/2 ¦ 1 / 2 ¦ \frac{1}{2} ¦ \dfrac{1}{2} ¦ \tfrac12 ¦ \frac1{2} ¦ \frac{1}2 ¦ 2/4 ¦ \frac12 \text{ cm}
5 | 5 cm ¦ 5 \text{ cm} ¦ 5\text{ cm} ¦ 5\,\text{cm} ¦ 5 \mathrm{cm} ¦ 5 square feet ¦ 5 \text{ m}
5 | \(5\) ¦ \( 5 \). ¦ \mathbf{5} ¦ 5 hours ¦ 5 day
""")
def test_a_number_is_read_as_a_fraction(answer, text):
    value, _ = grpo.parse_answer(text)
    assert isinstance(value, Fraction) and value == Fraction(answer)


@each_case(r"""
3 1/2 | 3\frac12 ¦ 3\frac{1}{2} ¦ 3 \dfrac{1}{2} ¦ 3 1/2 ¦ 3  1/2
(1,2) | (1, 2) ¦ ( 1 , 2 ) ¦ \left(1, 2\right) ¦ (1,\ 2) ¦ (1,\;2) ¦ $(1,2)$
50% | 50% ¦ 50\% ¦ $50\%$ ¦ 50 \%
x=3 | x  =  3 ¦ $x=3$
Monday | \text{Monday} ¦ \textbf{Monday} ¦ **Monday** ¦ \text{ Monday }. ¦ \mathrm{Monday}
no solution | no solution ¦ \text{no  solution} ¦ no⏎solution
 |  ¦ ⏎ ¦ $$ ¦ {} ¦ \text{}
""")
def test_another_answer_is_read_without_its_blanks_and_formatting(answer, text):
    assert grpo.parse_answer(text) == (answer, "")


# Several answers, words and signs that change a number, other separators, blanks inside numbers, mixed numbers,
# rounded numbers, intervals, lists, nothing; then words in capitals, two answers and fractions in words, a decimal
# comma, a narrow space, digits after a fraction.
@each_case(r"""
5 | 5 or 6 ¦ 5 \text{ and } 6 ¦ 5, 6 ¦ 5; 6 ¦ 5⏎6 ¦ 5 \text{ or } x ¦ 5 and x ¦ 5 and a half ¦ 5 \text{ or } {-5}
5 | \pm 5 ¦ 5% ¦ 5\% ¦ 5\text{%} ¦ 5^\circ ¦ -5 ¦ --5 ¦ +-5 ¦ −5 ¦ –5 ¦ not 5 ¦ \neq 5 ¦ >5 ¦ ~5 ¦ 5! ¦ 5? ¦ 5+ ¦ \ge 5
5 | (5) ¦ [5] ¦ |5| ¦ (5,5) ¦ 4+1 ¦ 5*1 ¦ 5^2 ¦ \sqrt{5} ¦ \sqrt5 ¦ 5\pi ¦ 5π ¦ 5x ¦ 5 x ¦ 5i ¦ x=5 ¦ 5=5 ¦ 5:1 ¦ five
5 | 5/6/7 ¦ 5 \text{ million} ¦ 5\text{ billion} ¦ 5 trillions ¦ 5 thousand ¦ 5 \text{thousand} ¦ 5 hundred
5 | 5 hundredths ¦ 5 dozen ¦ 5 dozens of cm ¦ 5 square million ¦ 5 K ¦ 5k ¦ 5 M ¦ 5e0 ¦ 5×10 ¦ 5 10 ¦ 5 cm 6 ¦ 5_{10}
56 | 5⏎6 ¦ 5 6 ¦ 5. 6 ¦ 5,6 ¦ 5{,}6 ¦ \text{5}\text{6} ¦ 5, 6 cm
1234 | 1.234 ¦ 12,34 ¦ 1,,234 ¦ 1 234 ¦ 1'234 ¦ 1_234 ¦ 1, 234 ¦ 1234,5 ¦ 1;234
12345 | 1,2345 ¦ 12,345 6
1/3 | 0.33 ¦ 0.3333333333333333 ¦ .3
42 | 4 2 ¦ 4² ¦ 4₂ ¦ 4^2 ¦ 42 42 ¦ 4.2 ¦ 42/0 ¦ 42/42 ¦ 0x2a ¦ 101010_2
7/2 | 3 \cdot 1/2 ¦ 31/2 ¦ 3, 1/2 ¦ 3\frac12\frac12 ¦ 7/-2 ¦ 3/2
31/2 | 3\frac{1}{2} ¦ 3\frac12 ¦ 3 1/2 ¦ 3 \frac12 ¦ 3\,\frac12
3/2 | \frac12 3 ¦ 3/2/1 ¦ \frac{3}{2}x ¦ \frac{3}{2}\% ¦ \frac{3}{2x} ¦ \frac32\frac32 ¦ \frac{2}{3}
(1,2) | [1,2) ¦ (1,2] ¦ (2,1) ¦ (1,2,3) ¦ 1,2 ¦ (1.2) ¦ (12)
no | on ¦ yes ¦ no no ¦ n o ¦ No solution
0 |  ¦ . ¦ - ¦ $ ¦ \text{} ¦ nan ¦ None ¦ false ¦ \text{none} ¦ \emptyset
5 | 5 Million ¦ 5 MILLION ¦ 5 Thousand ¦ 5 \text{ Dozen} ¦ 5 or six ¦ 5 \text{ and six} ¦ 5 and one half ¦ 5 halves
5 | 5 percent ¦ 5 \text{ pi} ¦ 5 squared ¦ 5 square ¦ 5 bn ¦ 5 degrees below zero
5 | 6 \boxed{5} ¦ 5 apples ¦ 5 g ¦ 5 or so
2 | 2 thirds ¦ 2 \text{ thirds} ¦ 2 times ¦ 2 pairs
3 | 3 quarters ¦ 3 fourths of a mile
6 | 6 \boxed{5} ¦ 6 \boxed{6}
\rightarrow | \leftarrow
5 hours | 5 minutes ¦ 5 \text{ minutes} ¦ 5 days ¦ 5 apples
5 square feet | 5 feet ¦ 5 cubic feet
(1234) | (1,234) ¦ 1,234 ¦ \{1,234\}
1,234 | (1,234) ¦ 1,234,5 ¦ 1,234.5,0
3 PM | 3 AM
125 | 0,125 ¦ 0{,}125
31/2 | 3\ 1/2 ¦ 3\,1/2
56 | 5\,6 ¦ 5\ 6 ¦ $5$$6$ ¦ \$5\$6 ¦ 5\text{6}
1/23 | \frac{1}{2}3 ¦ \frac123
1234 | 1\ 234 ¦ 1,\ 234 ¦ 1,\,234
""")
def test_another_answer_is_refused(answer, text):
    assert grpo.reward_fn(box(text), answer) == 0.0


# An answer that is not final or cut off, and more or less than the answer.
@each_case(r"""
7 | I got 7, then \boxed{7 ¦ \boxed{7} no, \boxed{8 ¦ \boxed{7} no, \boxed{8} ¦ \boxed{7}\boxed{} ¦ \boxed{7}</think>
7 | #### 7, I think ¦ #### 7 or 8 ¦ #### 7 #### ¦ #### Step 7: add ¦ \boxed{8}⏎#### 7
48/2 = <<48/2=24>>24 clips.⏎#### 72 | \boxed{24} ¦ \boxed{48} ¦ \boxed{} ¦ #### 72 clips of 24
It is \boxed{5}, not 6.⏎#### 6 | \boxed{6}
["5", "6"] | \boxed{5} ¦ \boxed{6}
""")
def test_a_completion_without_this_as_its_final_answer_is_refused(answer, text):
    assert grpo.reward_fn(text, answer) == 0.0


# The answer of a row is a solution that ends in an answer, or the answer as it stands.
@each_case(r"""
48/2 = <<48/2=24>>24 clips.⏎That is 48+24 = <<48+24=72>>72.⏎#### 72 | \boxed{72} ¦ so it is \boxed{72}. ¦ #### 72.00
We get \boxed{\frac{1}{2}}. | \boxed{1/2} ¦ \boxed{0.5} ¦ #### \frac12
#### 1,234 | #### 1234 ¦ \boxed{\$1,234}
⏎ 5 cm ⏎ | \boxed{5} ¦ <think>\boxed{4}</think>\boxed{5} ¦ #### 5.0 cm ¦ \boxed{\boxed{5}}
\(5\) | \boxed{5} ¦ \boxed{5 \text{ hours}}
5 hours | \boxed{5} ¦ \boxed{5 \text{ hours}} ¦ \boxed{10/2 hours}
["5","6"] | \boxed{["5", "6"]}
""")
def test_the_right_answer_is_accepted(answer, text):
    assert grpo.reward_fn(text, answer) == 1.0


@pytest.mark.parametrize("answer", ["", " ", "$$", ".", "\\boxed{}", "#### "])
@pytest.mark.parametrize("text", ["", " ", "\\boxed{}", "\\boxed{ }", "\\boxed{$}", "#### ", "#### ."])
def test_nothing_is_never_the_right_answer(answer, text):
    assert grpo.reward_fn(text, answer) == 0.0


@pytest.mark.parametrize("answer, text", [(72, "72"), (3.0, "3"), (0.25, "1/4"), (Decimal("2.50"), "2.5")])
def test_an_answer_may_be_of_any_type(answer, text):
    assert grpo.is_correct(box(text), answer)
    assert not grpo.is_correct(box("73"), answer)


LONG = 200_000
HOSTILE = {"exponent": "1e999999999", "tower": "9^{9^{9^{9}}}", "surrogates": "\ud800\udfff" * 1000}
PIECES = ["1", "1,111", "{", "$", "+ ", "#", "####", "\\boxed{", "\\frac{1", "<think>", "</think>", "{,}111", "{word"]
HOSTILE |= {piece: piece * (LONG // len(piece)) for piece in PIECES}
UNITS = ["a", "word ", "illio", " ", ",", ",111"]
HOSTILE |= {f"5 and {piece}": f"5 {piece * (LONG // len(piece))}1" for piece in UNITS}
HOSTILE |= {start: start + "1" * LONG for start in ("1.", "1/", "\\frac{", "5 a")}
HOSTILE["nested boxes"] = "\\boxed{" * (LONG // 10) + "1" + "}" * (LONG // 10)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused_within_seconds(name):
    """A pattern that needs quadratic time would take minutes."""
    text = HOSTILE[name]
    started = time.process_time()
    for completion in (text, box(text), "\\boxed{" + text, "#### " + text, text + box("6"), f"{text}</think>{text}"):
        assert grpo.reward_fn(completion, "31337") == 0.0
    assert grpo.reward_fn(box("31337"), text) == 0.0
    assert time.process_time() - started < 5


@pytest.mark.parametrize("scores", [[0.5, 2], (0.5, numpy.int64(2)), [torch.tensor(0.5), 2], numpy.array([0.5, 2])])
def test_rewards_may_be_numbers_of_any_kind(scores):
    rewards, metrics = grpo.sum_parts(scores, "reward")
    assert rewards.dtype == torch.float32 and rewards.tolist() == [0.5, 2.0] and metrics == {}


@pytest.mark.usefixtures("alone")
def test_a_reward_is_the_sum_of_its_parts_whose_means_are_logged_by_name():
    scores = [{"right": True, "format": 0.25}, {"right": numpy.int64(0), "format": 0.5}, {"format": -2, "right": 1.0}]
    rewards, metrics = grpo.sum_parts(scores, "eval/reward")
    assert rewards.dtype == torch.float32 and rewards.tolist() == [1.25, 0.5, -1.0]
    assert grpo.mean_metrics([metrics]) == {"eval/reward/right": 2 / 3, "eval/reward/format": -1.25 / 3}


def test_metrics_have_one_order_whatever_order_the_parts_have():
    """Ranks add metrics up by their places."""
    for scores in ([{"b": 1.0, "a": 2.0}], [{"a": 2.0, "b": 1.0}]):
        assert [*grpo.sum_parts(scores, "reward")[1].items()] == [("reward/a", (2, 1)), ("reward/b", (1, 1))]


def test_a_part_that_a_completion_lacks_is_an_error():
    with pytest.raises(KeyError, match="format"):
        grpo.sum_parts([{"right": 1.0, "format": 0.5}, {"right": 1.0}], "reward")
