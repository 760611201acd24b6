"""Steps of grpo_process.py: in the text, among the tokens, and their advantages."""

from itertools import accumulate

import pytest
import tokenizers
import torch
from torch.testing import assert_close
from toy import TINY
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import grpo
import grpo_process

# ---- in the text

THOUGHT = r"<think>59+4=63;63+94=156;157+97=254</think>\boxed{254}"
SUM = {"prompt": "59+4+94+97=", "answer": "254"}  # its running totals are 63, 157 and 254
CLIPS = {  # as GSM8K has them
    "prompt": "Natalia sold clips to 48 of her friends in April, half as many in May, and 1,200 to a shop. How many?",
    "answer": "In May: 48/2 = <<48/2=24>>24\nBoth: 48+24 = <<48+24=72>>72\n1200+72=<<1200+72=1272>>1272\n#### 1272",
}


@pytest.mark.parametrize(
    "completion, steps",
    [
        (THOUGHT, [("<think>59+4=63;", 1.0), ("63+94=156;", 0.0), ("157+97=254", 1.0)]),
        ("<think>59+4=63;63+9", [("<think>59+4=63;", 1.0)]),  # cut off
        ("7" * 5000 + "+1=2;", []),  # more digits than int() takes
        ("5/0=5;0/0=63;", [("5/0=5;", 0.0), ("0/0=63;", 0.0)]),
        ("59+4=63;59+4=63;4+59=63;63+94=157;", [("59+4=63;", 1.0), ("59+4=63;4+59=63;63+94=157;", 1.0)]),  # once
        ("62+1=63;158-1=157;59*4=236;63-4=59", []),  # right, but of no use here
    ],
)
def test_an_equation_is_a_step_if_it_is_false_or_of_use(completion, steps):
    ends = accumulate(len(text) for text, _ in steps)
    expected = [(end, reward) for end, (_, reward) in zip(ends, steps)]
    row = SUM | {"prompt": "0+59+4+94+97="} if "0/0" in completion else SUM
    assert grpo_process.step_rewards(completion, row) == expected


@pytest.mark.parametrize(
    "completion, rewards",
    [
        ("- In May: 48 / 2 = 24 clips.\n- In all: 48 + 24 = 72 clips.", [1, 1]),
        (r"**May**: \(48 \div 2 = 24\), so $48 + 24 = 72$ and $1,200 + 72 = 1,272$", [1, 1, 1]),
        ("24 × 2 = 48, 24 \\times 2 = 49, 24 \\cdot 2 = 50, 72 − 48 = 24", [0, 0, 1]),  # 48 is given, not worked out
        ("48 / 2 &= 24.0 \\\\ 48 + 24 &= 74", [1, 0]),
        ("10 * 2 = 20. 1 + 1 = 2. 47 + 1 = 48", []),  # right and of no use
        ("x + 24 + 24 = 72, 2 * (48 + 24) = 72, (2 + 3) * 4 + 1 = 21, 48 * 2 + 1 = 24", []),  # parts of longer ones
        ("24 * 2 = 24 + 24 = 48, 24 * 2 = 2 * (12 + 12) = 48, $72 - 48 = 2 \\times 12 = 24$", []),
    ],
)
def test_steps_are_found_in_what_real_models_write(completion, rewards):
    """Blanks, bullets, dollars, LaTeX, other signs, thousands."""
    assert [reward for _, reward in grpo_process.step_rewards(completion, CLIPS)] == rewards


def test_where_the_row_does_not_say_what_is_needed_only_false_equations_are_steps():
    assert grpo_process.step_rewards("3 + 4 = 7, 3 + 4 = 8", {"prompt": "How many?", "answer": "7"}) == [(20, 0.0)]


def test_endless_right_sums_earn_at_most_what_the_right_steps_earn():
    terms = [87, 39, 86, 12, 55]
    totals = list(accumulate(terms))
    row = {"prompt": "87+39+86+12+55=", "answer": str(totals[-1])}
    right = [f"{total}+{term}={total + term};" for total, term in zip(totals, terms[1:])]
    counted = [f"{i}+1={i + 1};" for i in range(totals[-1])]
    below = [f"{total - 1}+1={total};" for total in totals]
    cases = [(right, 4), (right * 50, 4), (counted + right * 9, 4), (below * 50, 0), (["1+1=2;"] * 500, 0)]
    for equations, expected in cases:
        steps = grpo_process.step_rewards("".join(equations), row)
        assert [reward for _, reward in steps] == [1.0] * expected


# ---- among the tokens


def tiny_tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def byte_pair_tokenizer():
    """Its tokens go on over the ends of sums, have two of them, or are a part of a character."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    backend.train_from_iterator(["1+1=2;" * 9, "=63;63+", "=10;10+"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


@pytest.mark.parametrize(
    "make_tokenizer, text",
    [
        (tiny_tokenizer, THOUGHT),
        (byte_pair_tokenizer, THOUGHT),
        (byte_pair_tokenizer, "9+1=10;10+5=15;"),
        (byte_pair_tokenizer, "1+1=2;" * 5),
        (byte_pair_tokenizer, "naïve 12×30=42;€42+8=50; 🙂🙂7+7=14"),
    ],
)
def test_a_step_ends_at_the_token_that_writes_its_last_character(make_tokenizer, text, monkeypatch):
    """Wherever in the text it ends; the final answer at the last token."""
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    steps = [(end, float(end)) for end in range(1, len(text) + 1)]
    expected = []
    for end, reward in steps:
        tokens = 1
        while not tokenizer.decode(ids[:tokens]).startswith(text[:end]):
            tokens += 1
        expected.append((tokens, reward))
    monkeypatch.setattr(grpo_process, "step_rewards", lambda _text, _row: steps)
    found = grpo_process.find_steps(tokenizer, [*ids, tokenizer.eos_token_id], text, {}, 0.5)
    assert found == [*expected, (len(ids) + 1, 0.5)]


def test_the_steps_of_a_completion_are_those_of_its_row():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(THOUGHT, add_special_tokens=False)
    found = grpo_process.find_steps(tokenizer, ids, THOUGHT, SUM, 1.0)
    ended = [tokenizer.decode(ids[:tokens]) for tokens, _ in found]
    assert ended == ["<think>59+4=63;", "<think>59+4=63;63+94=156;", THOUGHT.partition("</think>")[0], THOUGHT]
    assert [reward for _, reward in found] == [1.0, 0.0, 1.0, 1.0]


# ---- advantages


def test_advantages_by_hand():
    """Five steps: mean 3/5, variance (3 · 0.4² + 2 · 0.6²) / 4; then two with 2 and 4; a token may end two steps."""
    steps = [[(2, 1.0), (3, 0.0), (5, 1.0)], [(1, 1.0), (1, 0.0)], [(4, 2.0)], [(3, 4.0)]]
    right = 0.4 / (0.3**0.5 + 1e-4)
    wrong = -0.6 / (0.3**0.5 + 1e-4)
    apart = 1 / (2**0.5 + 1e-4)
    two, one = 2 * right + wrong, right + wrong  # steps to come
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0, 0], [0, 0, 1, 0, 1, 1, 1]])
    expected = [
        [0.0, two, two, 0.0, one, right, right],
        [0.0, 0.0, 0.0, one, 0.0, 0.0, 0.0],
        [-apart, -apart, -apart, 0.0, -apart, 0.0, 0.0],
        [0.0, 0.0, apart, 0.0, apart, apart, 0.0],
    ]
    for given in (mask, mask.bool(), mask.float()):
        assert_close(grpo_process.compute_advantages(steps, 2, given), torch.tensor(expected))


def test_one_step_a_completion_is_the_advantage_of_grpo():
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0))
    steps = [[(5, reward)] for reward in rewards.tolist()]
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0]).repeat(12, 1)
    expected = grpo.compute_advantages(rewards, 4).unsqueeze(1) * mask
    assert_close(grpo_process.compute_advantages(steps, 4, mask), expected)


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 1.0])
def test_equal_step_rewards_have_advantage_exactly_0(reward):
    equal = [[(1, reward), (3, reward)], [(4, reward)], [(2, reward)] * 3, [(4, reward)]]
    different = [[(4, 0.0)], [(4, 1.0)]] * 2
    advantages = grpo_process.compute_advantages(equal + different, 4, torch.ones(8, 4, dtype=torch.long))
    assert (advantages[:4] == 0).all()
    assert (advantages[4:] != 0).all()
