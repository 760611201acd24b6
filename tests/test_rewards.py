r"""The verifier: what it accepts and, above all, what it refuses; and rewards of a user's own.

Lines of the tables are "answer | text ¦ text ¦ ...", where ⏎ stands for a line break.
    python -m pytest tests/test_rewards.py
"""

import math
import random
from fractions import Fraction

import numpy
import pytest
import torch
from helpers import train
from tiny import ROOT, SCRIPTS, read_jsonl, write_jsonl

import gkd
import grpo_tools
import ppo_rlhf

DATA = ROOT / "tests" / "data"
REFUSED_RIGHT_ANSWERS = 28  # of 74: phrases, units, algebra and the like, which a strict verifier leaves alone


def each_case(table):
    """Parametrize a test with every answer and text of a table; the answer None stands for none."""
    pairs = []
    for line in table.strip("\n").split("\n"):
        answer, texts = line.replace("⏎", "\n").split(" | ")
        answer = None if answer == "None" else answer
        pairs += [(answer, text) for text in texts.split(" ¦ ")]
    return pytest.mark.parametrize("answer, text", pairs)


def box(text):
    return "\\boxed{" + text + "}"


def test_no_wrong_answer_of_the_collection_is_accepted_and_no_more_right_ones_are_refused_than_before():
    wrong_rewards, refused = [], []
    for row in read_jsonl(DATA / "verifier_cases.jsonl"):
        reward = grpo_tools.reward_fn(row["completion"], row["gold"])
        if row["expect"] == 0:
            wrong_rewards.append(reward)
        elif reward != 1.0:
            refused.append(row["id"])
    assert wrong_rewards == [0.0] * 76
    assert len(refused) <= REFUSED_RIGHT_ANSWERS, refused


def test_labels_of_gsm8k_solutions():
    rows = read_jsonl(DATA / "gsm8k_solutions_200.jsonl")
    rewards = [grpo_tools.reward_fn(row["completion"], row["gold"]) for row in rows]
    assert len(rows) == 200 and rewards == [float(row["label"]) for row in rows]


# The last box counts. A box goes before ####, which goes before <answer>. Thoughts never count.
# A box that has no braces, or that is cut off, may hold another answer, so there is none.
@each_case(r"""
4 | so \boxed{3}, no, \boxed{4}.
 | \boxed{} ¦ ####
\frac{1}{2} | \boxed{\frac{1}{2}} and more
{{1}} | \boxed{{{1}}}
\{1\} | \boxed{\{1\}}
1 | \boxed{1}⏎#### 2
2 | #### 2⏎<answer>3</answer> ¦ #### 1⏎#### 2
3 apples | #### 3 apples
3 | ####3 ¦ ####	3⏎and so on ¦ <answer>3</answer> ¦ <answer>2</answer> no <answer>3</answer>
6 | <think>\boxed{5}</think>\boxed{6} ¦ \boxed{6}<think>\boxed{5} ¦ \boxed{5}</think>\boxed{6}
6 | <think>a<think>b</think>c</think>\boxed{6}
5 | <think></think>\boxed{5}
-5 | -\boxed{5} ¦ −\boxed{5}
\boxed{5} | \boxed{\boxed{5}}
5 | \boxed 5 ¦ $\boxed 5$ ¦ \boxed{4} \boxed 5 ¦ \boxed 4, no, \boxed{5} ¦ \boxed {5} ¦ it is \boxed 5 for all
5. | so \boxed 5. ¦ so \boxed 5.⏎
None | \boxed ¦ \boxed{4}, put in \boxed ¦ $\boxed$
None | \boxed{3} and then \boxed{4 ¦ \boxed{\frac{1}{2} ¦ <answer>3 ¦ 3</answer> ¦ The answer is 42. ¦ 42 ¦ \fbox{42}
None | <think>\boxed{5}</think> ¦ <think>\boxed{5} ¦ \boxed{5}</think>6 ¦ <think>a</think>\boxed{5}</think>
None | <think>#### 5</think> ¦ <think><answer>5</answer></think> ¦ #### 5⏎\boxed{4
""")
def test_extract_answer(answer, text):
    assert grpo_tools.extract_answer(text) == answer


@each_case(r"""
42 | 42 ¦  42  ¦ +42 ¦ 42. ¦ $42 ¦ \$42 ¦ £42 ¦ € 42 ¦ $42$ ¦ {42} ¦ **42**
-42 | -42 ¦ - 42 ¦ −42 ¦ -$42 ¦ $-42
1234 | 1,234 ¦ 1\,234 ¦ 1{,}234 ¦ 1\!,234
1/2 | .5 ¦ 1/2 ¦ \frac{1}{2} ¦ \dfrac{1}{2} ¦ \frac12 ¦ \frac 1 2 ¦ \frac1{2} ¦ \frac{1}2 ¦ \(\frac12\)
-1/2 | -1/2 ¦ 1/-2 ¦ -\frac{1}{2} ¦ \frac{-1}{2} ¦ -\tfrac12
5 | $5$ ¦ $$5$$ ¦ \(5\) ¦ \[5\] ¦ \( 5 \) ¦ \(5\). ¦ **$5$**
1/10 | 0.1 ¦ \frac1{10}
1000 | 1e3 ¦ 1e+03
1/100000 | 1e-05
50% | 50% ¦ 50\% ¦ $50\%$
123456789/100 | 1,234,567.89
3/2 | 6/4
7 | 007
9007199254740993 | 9007199254740993
kg | \mathrm{kg} ¦ \text{kg}
12 | \text{12} ¦ \text{1}\text{2}
(1,2) | (1, 2)
x=3 | x  =  3
42 | ４２ ¦ ٤٢ ¦ ४२ ¦ 4​2 ¦ ﻿42‎ ¦ 4­2 ¦ ⁦42⁩
1/2 | १/२ ¦ ٠.٥
1234 | १,२३४
(1,2) | (1, ٢)
x_2 | x₂ ¦ x_2
-3/4 | －３／４ ¦ −⁠３/４
café | café ¦ café
x^2 | x² ¦ x^2
 |  ¦ ⏎
""")
def test_parse_answer(answer, text):
    parsed = grpo_tools.parse_answer(text)
    assert parsed == (Fraction(answer) if isinstance(parsed, Fraction) else answer)


# Several, units, words, other signs and thousands separators, blanks inside numbers, mixed numbers, intervals, lists,
# nothing, digits that are not ASCII.
@each_case(r"""
5 | 5 or 6 ¦ 5 \text{ and } 6 ¦ 5; 6 ¦ \pm 5 ¦ 5% ¦ 5\% ¦ 5 cm ¦ 5^\circ ¦ -5 ¦ --5 ¦ +-5 ¦ not 5 ¦ \neq 5 ¦ >5 ¦ ~5
5 | (5) ¦ [5,6] ¦ 4+1 ¦ 5! ¦ 5? ¦ <b>5</b> ¦ 5 <!-- 6 --> ¦ ~~5~~ ¦ \text{not }5 ¦ five ¦ 5* ¦ 5⏎6 ¦ Ⅴ ¦ −5 ¦ ≥ 5
56 | 5⏎6
6 | 5 or 6 ¦ x=5 ¦ 5=6 ¦ **5** or **6**
3 | 1, 2, 3
48/2 = <<48/2=24>>24 clips.⏎#### 72 | 24 ¦ 48
\{1,2,3\} | \{1,2\}
1 | 1, 2, 3 ¦ \frac{1}{0} ¦ 1e3
1234 | 1.234 ¦ 12,34 ¦ 1,,234 ¦ 1 234 ¦ 1\ 234 ¦ 1'234 ¦ 1_234
42 | 4 2 ¦ 4² ¦ 4₂
x₂ | x² ¦ x^2 ¦ x2
-42 | - 4 2
11/2 | 1\frac{1}{2} ¦ 1 1/2
3/2 | 1\frac12 ¦ \frac1{2}3
12 | \frac12 ¦ 1\!2 ¦ ½
1/2 | \frac123 ¦ 1\frac12 ¦ 1\frac{1}{2}
1/3 | 0.33 ¦ 0.3333333333333333
(1,2) | [1,2)
["5", "6"] | 5 ¦ 6
["2"] | 2
["\\sqrt{2}"] | \sqrt{2}
42 | \boxed{42}
0 |  ¦ . ¦ - ¦ $ ¦ \text{} ¦ nan ¦ None
""")
def test_another_answer_is_refused(answer, text):
    assert grpo_tools.reward_fn(box(text), answer) == 0.0


# An answer that is not final, a decimal comma, an outer box that is not closed, a sign before the box, and more than
# the answer in a box without braces.
@each_case(r"""
7 | I got 7, then \boxed{7 ¦ \boxed{7} no, \boxed{8 ¦ \boxed{7} no, \boxed{8} ¦ \boxed{7}\boxed{} ¦ #### 7 or 8
7 | #### 7 #### ¦ #### 7, but I am not sure ¦ <answer>7</answer><answer>8</answer> ¦ <answer>7, 8</answer> ¦ <answer>7
7 | <answer>not 7</answer> ¦ The answer is 7 ¦ 7 ¦ <think>\boxed{7} ¦ <think>7</think> ¦ \boxed{7}</think>
7 |  ¦ #### 7⏎#### 8
 | \boxed{} ¦ \boxed{ }
123 | \boxed{0,123} ¦ \boxed{00,123}
5 | \boxed{6 \boxed{5}} ¦ \boxed{1 or \boxed{5} ¦ \boxed{\text{not }\boxed{5}} ¦ -\boxed{5}
2 | #### Step 2: add the numbers
42 | #### 4<think>x</think>2
6 | \boxed{6}, put in \boxed ¦ \boxed 6.5 ¦ \boxed -6 ¦ \boxed 6\% ¦ -\boxed 6
6 | \boxed 6^{2} ¦ \boxed 6\frac12 ¦ \boxed 6 \boxed{7 ¦ \boxed 6, no, \boxed 7 ¦ \boxed
x | \boxed x=5 ¦ \boxed x+1
""")
def test_a_completion_without_this_as_its_final_answer_is_refused(answer, text):
    assert grpo_tools.reward_fn(text, answer) == 0.0


@each_case(r"""
48/2 = <<48/2=24>>24 clips.⏎That is 48+24 = <<48+24=72>>72.⏎#### 72 | \boxed{72}
#### 72 | so it is \boxed{72}.
We get \boxed{\frac{1}{2}}. | \boxed{1/2}
1/2 | <answer> 0.5 </answer>
⏎ 5 ⏎ | \boxed{5}
5 | <think>\boxed{4}</think>\boxed{5} ¦ \boxed{5}} and cut off in the mid
It is $\boxed 2$. | \boxed{2} ¦ \boxed 2 ¦ It is \boxed 2. ¦ so $\boxed 2$, as asked
5 | \boxed 4, no, \boxed 5.
5 | \(\boxed 5\) ¦ \[\boxed 5\] ¦ **\boxed 5** ¦ \boxed 5, so ¦ {\boxed 5}
1/2 | \boxed 1/2 ¦ \boxed\frac12
""")
def test_the_right_answer_is_accepted(answer, text):
    assert grpo_tools.reward_fn(text, answer) == 1.0


# A text without a final answer of its own is the answer as it stands.
@each_case(r"""
5 | 5 ¦ #### 5 ¦ \boxed{5} ¦ $5$ ¦ \(5\)
0.5 | \frac12 ¦ We get \boxed{\frac{1}{2}}.
yes | yes ¦ \text{yes}
["5","6"] | ["5", "6"]
[5] | [5]
one two three four five six seven eight | one two three four five six seven eight
5 | \boxed 5
 |  ¦ ⏎ ¦ $$
""")
def test_an_answer_of_a_row_is_a_solution_or_a_text(answer, text):
    assert grpo_tools.parse_gold(text) == grpo_tools.parse_answer(answer)
    if answer == "":
        assert grpo_tools.reward_fn(box(text), text) == 0.0


# ---- anything a model may write

LONG = 1_000_000
HOSTILE = {
    "braces": "{" * LONG,
    "boxes": "\\boxed{" * (LONG // 7),
    "boxes without braces": "\\boxed 6 " * (LONG // 45),
    "nested boxes": "\\boxed{" * 100_000 + "1" + "}" * 100_000,
    "a list that is no json": '["\\sqrt{2}"]',
    "words": "word " * (LONG // 5),
    "thoughts": "<think>" * (LONG // 7),
    "tags": "<answer>" * (LONG // 8) + "</answer>",
    "digits": "1" * LONG,
    "blanks": " " * LONG,
    "separators": "1" + ",111" * (LONG // 4),
    "exponent": "1E1000000000",
    "tower": "9^{9^{9^{9}}}",
    "surrogates": "\ud800\udfff" * 1000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused_and_finishes(name):
    text = HOSTILE[name]
    for completion in (text, box(text), "\\boxed{" + text, "#### " + text, f"<answer>{text}</answer>", text + box("6")):
        assert grpo_tools.reward_fn(completion, "5") == 0.0


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_ground_truth_raises_nothing(name):
    assert grpo_tools.reward_fn(box("5"), HOSTILE[name]) == 0.0


def test_random_text_raises_nothing():
    draw = random.Random(0)
    pieces = r"\boxed{ } { #### <think> </think> <answer> </answer> \frac{ $ / , . . 5 1,234 - \ * \text{ %".split()
    pieces += ["\n", " ", "\ud800", "\x00", "\u0664", "\u202e"]
    for _ in range(1500):
        text = "".join(draw.choices(pieces, k=16)) + chr(draw.randrange(0x110000))
        assert grpo_tools.reward_fn(text, "31337") == 0.0
        assert grpo_tools.reward_fn(box("31337"), text) == 0.0
        assert grpo_tools.reward_fn(text, text) in (0.0, 1.0)


# ==== rewards of a user's own: what they are given, what is asked of them, and what is then reported


SMALL = {"num_steps": 1, "prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "max_completion_length": 16}
SMALL |= {"eval_prompts": 4, "max_rounds": 1}  # a fifth of the rows, which have no test split
ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": i % 3} for i in range(1, 21)]


def small_run(script, folder, **settings):
    dataset = write_jsonl(folder / "rows.jsonl", ROWS)
    return train(script, folder / "run", **SMALL | {"dataset": dataset} | settings)


NUMBERS = [numpy.array([0.5, 2.0]), torch.tensor([0.5, 2.0]), (0.5, 2), [torch.tensor(0.5), numpy.int64(2)]]


@pytest.mark.parametrize("rewards", NUMBERS)
def test_numbers_of_any_kind_become_floats(rewards):
    found, means = grpo_tools.sum_parts(rewards, ["x", "y"], "reward")
    assert found == [0.5, 2.0] and means == {}
    assert {type(reward) for reward in found} == {float}


WRONG = [([0.5, value], f"it is {value} for the completion 'y\\n'") for value in (math.nan, math.inf, -math.inf)]
WRONG += [([0.5, None], "it is nan for the completion 'y\\n'"), ([None, 0.5], "it is nan for the completion 'x'")]
WRONG += [([0.5] * count, f"there are {count} rewards for 2 completions") for count in (0, 1, 3)]
WRONG += [(torch.tensor([0.5, math.nan]), "it is nan for the completion 'y\\n'")]


@pytest.mark.parametrize("rewards, message", WRONG)
def test_a_number_for_each_completion_is_asked_for_in_one_line(rewards, message):
    with pytest.raises(SystemExit) as error:
        grpo_tools.sum_parts(rewards, ["x", "y\n"], "reward")
    start = "" if message.startswith("there") else "a reward must be a finite number, but "
    assert str(error.value) == start + message and "\n" not in str(error.value)


@pytest.mark.usefixtures("alone")
def test_a_reward_is_the_sum_of_its_parts_and_their_means_are_logged_by_name():
    scores = [{"right": 1.0, "format": 0.25}, {"right": 0.0, "format": 0.5}, {"format": -2.0, "right": 1.0}]
    rewards, means = grpo_tools.sum_parts(scores, ["x", "y", "z"], "eval/reward")
    assert rewards == [1.25, 0.5, -1.0] and {type(reward) for reward in rewards} == {float}
    assert means == {"eval/reward/right": (2.0, 3), "eval/reward/format": (-1.25, 3)}
    assert grpo_tools.mean_metrics([means]) == {"eval/reward/right": 2 / 3, "eval/reward/format": -1.25 / 3}


@pytest.mark.parametrize("kind", [int, bool, float, numpy.float32, numpy.bool_, torch.tensor])
def test_parts_may_be_numbers_of_any_kind(kind):
    scores = [{"right": kind(1), "format": 0.5}, {"right": kind(0), "format": 2}]
    rewards, means = grpo_tools.sum_parts(scores, ["x", "y"], "reward")
    assert rewards == [1.5, 2.0] and {type(reward) for reward in rewards} == {float}
    assert means == {"reward/right": (1.0, 2), "reward/format": (2.5, 2)}


def test_means_have_one_order_whatever_order_the_parts_have():
    """Ranks add metrics up by their places, and a judge's parts may come in any order."""
    for scores in ([{"b": 1.0, "a": 2.0}], [{"a": 2.0, "b": 1.0}]):
        assert [*grpo_tools.sum_parts(scores, ["x"], "reward")[1].items()] == [
            ("reward/a", (2, 1)),
            ("reward/b", (1, 1)),
        ]


FULL = {"right": 1.0, "format": 0.5}
WRONG_PARTS = [
    ([{"right": 1.0}, FULL], "format", "nan", "x"),  # the first completion lacks a part
    ([FULL, {"right": 1.0}], "format", "nan", "y\n"),
    ([FULL, {}], "format", "nan", "y\n"),
    ([FULL, {"format": 0.5, "wrong": 1.0}], "right", "nan", "y\n"),
    ([FULL, FULL | {"format": None}], "format", "nan", "y\n"),
    ([FULL | {"right": None}, FULL], "right", "nan", "x"),
    ([FULL, FULL | {"right": torch.tensor(math.nan)}], "right", "nan", "y\n"),
    ([FULL, FULL | {"right": math.inf}], "right", "inf", "y\n"),
    ([FULL, FULL | {"right": -math.inf, "format": math.inf}], "format", "inf", "y\n"),  # their sum is no number
]


@pytest.mark.parametrize("scores, name, value, text", WRONG_PARTS)
def test_a_part_that_is_missing_or_not_finite_is_named_with_its_completion(scores, name, value, text):
    with pytest.raises(SystemExit) as error:
        grpo_tools.sum_parts(scores, ["x", "y\n"], "reward")
    assert str(error.value) == f"{name} must be a finite number, but it is {value} for the completion {text!r}"


def test_there_must_be_parts_for_each_completion():
    with pytest.raises(SystemExit, match="^there are 1 rewards for 2 completions$"):
        grpo_tools.sum_parts([FULL], ["x", "y"], "reward")


# Without held-out prompts the first rewards are those of a rollout.
@pytest.mark.parametrize("script, eval_prompts", [(grpo_tools, 4), *[(script, 0) for script in SCRIPTS.values()]])
@pytest.mark.usefixtures("alone")
def test_rewards_that_are_not_finite_train_nothing_and_end_the_run(script, eval_prompts, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "score_completions", lambda texts, _: [0.0, math.nan] * (len(texts) // 2))
    with pytest.raises(SystemExit, match="must be a finite number, but it is nan"):
        small_run(script, tmp_path, eval_prompts=eval_prompts)
    assert not (tmp_path / "run" / "checkpoint").exists()


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_completions_are_scored_as_a_batch_with_all_columns_of_their_rows(script, tmp_path, monkeypatch):
    calls = []

    def score_completions(completions, rows):
        calls.append([(row["prompt"], row["answer"], row["level"]) for row in rows])
        assert len(completions) == len(rows) and all(isinstance(text, str) for text in completions)
        return [len(text) % 2 for text in completions]

    monkeypatch.setattr(script, "score_completions", score_completions)
    small_run(script, tmp_path)
    before, rollout, after = calls
    given = {(row["prompt"], row["answer"], row["level"]) for row in ROWS}
    assert len(before) == len(after) == 4 and len(rollout) == 16
    assert {*before, *rollout} <= given
    for first in range(0, 16, 4):  # those of one prompt are adjacent
        assert len({*rollout[first : first + 4]}) == 1


def score_in_parts(text):
    """Parts whose sums are exact, in an order of their own and of several types."""
    right = len(text) % 2
    if right:
        return {"right": True, "format": torch.tensor(len(text) % 3 / 4)}
    return {"format": len(text) % 3 / 4, "right": numpy.int64(0)}


def own_metrics(lines):
    return [{name: value for name, value in line.items() if name[:5] != "perf/"} for line in lines]


SCORED = SCRIPTS | {"ppo_rlhf": ppo_rlhf, "gkd": gkd}


@pytest.mark.parametrize("script", SCORED.values(), ids=SCORED)
@pytest.mark.usefixtures("alone")
def test_a_reward_in_parts_trains_as_its_sum_does_and_its_parts_are_logged(script, tmp_path, monkeypatch, capsys):
    scored = []  # a list for each evaluation and rollout

    def score_completions(texts, _rows):
        scored.append([score_in_parts(text) for text in texts])
        return scored[-1]

    (tmp_path / "parts").mkdir()
    monkeypatch.setattr(script, "score_completions", score_completions)
    lines = own_metrics(small_run(script, tmp_path / "parts", reward_model="none"))
    printed = capsys.readouterr().out
    floats = [[{name: float(value) for name, value in parts.items()} for parts in batch] for batch in scored]
    sums = [[sum(parts.values()) for parts in batch] for batch in floats]
    means = [(lines[0], "eval/reward", "eval/reward", 0), (lines[1], "eval/reward", "eval/reward", -1)]
    means += [(lines[1], "reward", "reward/mean", 1)] * (script is not gkd)  # its training uses no reward
    for line, prefix, mean, batch in means:
        count = len(floats[batch])
        for name in ("right", "format"):
            assert line.pop(f"{prefix}/{name}", None) == sum(parts[name] for parts in floats[batch]) / count
        assert line[mean] == sum(sums[batch]) / count
    assert not any(name.endswith(("/right", "/format")) for line in lines for name in line)

    samples, evaluated = (read_jsonl(tmp_path / f"parts/run/{name}.jsonl") for name in ("samples", "eval_samples"))
    if script is ppo_rlhf:  # its samples have scores, which differ from rewards by the penalty for a missing stop token
        assert all(type(score) is float for score in [*samples[0]["scores"], *(row["score"] for row in evaluated)])
    else:
        assert [row["reward"] for row in evaluated] == floats[0] + floats[-1]
    if script not in (ppo_rlhf, gkd):
        assert samples[0]["rewards"] == floats[1][:4]
        assert all(f"{parts}  " in printed for parts in scored[1][:4])

    # the same run with the sums
    (tmp_path / "sums").mkdir()
    monkeypatch.setattr(script, "score_completions", lambda *_: sums.pop(0))
    assert own_metrics(small_run(script, tmp_path / "sums", reward_model="none")) == lines
    plain = read_jsonl(tmp_path / "sums/run/samples.jsonl")
    assert [row["completions"] for row in plain] == [row["completions"] for row in samples]


@pytest.mark.parametrize("eval_prompts", [4, 0])
@pytest.mark.usefixtures("alone")
def test_a_part_that_is_missing_ends_the_run_before_it_trains(eval_prompts, monkeypatch, tmp_path):
    scores = [{"right": 1.0, "format": 0.5}, {"right": 1.0}]
    monkeypatch.setattr(grpo_tools, "score_completions", lambda texts, _: scores * (len(texts) // 2))
    with pytest.raises(SystemExit, match="^format must be a finite number, but it is nan for the completion '"):
        small_run(grpo_tools, tmp_path, eval_prompts=eval_prompts)
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_a_reward_that_needs_no_answers_needs_no_column_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo_tools, "reward_fn", lambda text, _answer: len(text) % 3)
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": row["prompt"]} for row in ROWS])
    lines = small_run(grpo_tools, tmp_path, dataset=prompts)
    assert "eval/reward" in lines[0] and "eval/accuracy" not in lines[0]
