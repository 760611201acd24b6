"""Steps in the text and among the tokens, and their advantages: python -m pytest tests/test_grpo_process.py"""

import itertools
from functools import partial

import helpers
import pytest
import tokenizers
import torch
from helpers import each_invariance, enumerate_rows, gradient_of, loss_and_gradient, random_inputs, tensor
from sync_copies import definitions
from tiny import TINY, few_rows, record, relative_error
from torch.testing import assert_close
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import grpo
import grpo_process

THOUGHT = r"<think>59+4=63;63+94=156;157+97=254</think>\boxed{254}"

# ---- by hand: steps in the text

SUM = {"prompt": [{"role": "user", "content": "59+4+94+97="}], "answer": "254"}
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
        ("5/0=5;", [("5/0=5;", 0.0)]),
        ("59+4=63;59+4=63;4+59=63;63+94=157;", [("59+4=63;", 1.0), ("59+4=63;4+59=63;63+94=157;", 1.0)]),  # once
        ("62+1=63;158-1=157;59*4=236", []),  # right, but of no use here
    ],
)
def test_the_rule_finds_equations_and_checks_each(completion, steps):
    expected = []
    end = 0
    for text, reward in steps:
        end += len(text)
        expected.append((end, reward))
    assert grpo_process.step_rewards(completion, SUM) == expected


@pytest.mark.parametrize(
    "completion, rewards",
    [
        ("- In May: 48 / 2 = 24 clips.\n- In all: 48 + 24 = 72 clips.", [1, 1]),
        (r"**May**: \(48 \div 2 = 24\), so $48 + 24 = 72$ and $1,200 + 72 = 1,272$", [1, 1, 1]),
        ("24 × 2 = 48, 24 \\times 2 = 49, 24 \\cdot 2 = 50, 72 − 48 = 24", [0, 0, 1]),  # 48 is given, not worked out
        ("48 / 2 &= 24.0 \\\\ 48 + 24 &= 74", [1, 0]),
        ("10 * 2 = 20. 1 + 1 = 2. 47 + 1 = 48", []),  # right and of no use
        ("x + 24 + 24 = 72, 2 * (48 + 24) = 72, (2 + 3) * 4 + 1 = 21, 48 * 2 + 1 = 24", []),  # parts of longer ones
    ],
)
def test_steps_are_found_in_what_real_models_write(completion, rewards):
    """Blanks, bullets, dollars, LaTeX, other signs, thousands."""
    steps = grpo_process.step_rewards(completion, CLIPS)
    assert [reward for _, reward in steps] == rewards


def test_a_row_that_does_not_say_what_is_needed_has_no_steps():
    assert grpo_process.step_rewards("3 + 4 = 7, 3 + 4 = 8", {"prompt": "How many?", "answer": "7"}) == []


def test_endless_right_sums_earn_at_most_what_the_right_steps_earn():
    terms = [87, 39, 86, 12, 55]
    totals = list(itertools.accumulate(terms))
    row = {"prompt": "87+39+86+12+55=", "answer": str(totals[-1])}
    right = [f"{total}+{term}={total + term};" for total, term in zip(totals, terms[1:])]
    counted = [f"{i}+1={i + 1};" for i in range(totals[-1])]
    below = [f"{total - 1}+1={total};" for total in totals]
    cases = [(right, 4), (right * 50, 4), (counted + right * 9, 4), (below * 50, 0), (["1+1=2;"] * 500, 0)]
    for equations, expected in cases:
        steps = grpo_process.step_rewards("".join(equations), row)
        assert [reward for _, reward in steps] == [1.0] * expected


# ---- by hand: steps among the tokens


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
        (partial(AutoTokenizer.from_pretrained, TINY), THOUGHT),
        (byte_pair_tokenizer, THOUGHT),
        (byte_pair_tokenizer, "9+1=10;10+5=15;"),
        (byte_pair_tokenizer, "1+1=2;" * 5),
        (byte_pair_tokenizer, "naïve 12+30=42;€42+8=50; 🙂🙂7+7=14"),
    ],
)
def test_a_step_ends_at_the_token_that_writes_its_last_character(make_tokenizer, text, monkeypatch):
    """Wherever in the text it ends; the final answer at the last token."""
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    ends = range(1, len(text) + 1)
    steps = [(end, float(end)) for end in ends]
    monkeypatch.setattr(grpo_process, "step_rewards", lambda _text, _row: steps)
    sampled = [*ids, tokenizer.eos_token_id]
    found = grpo_process.find_steps(tokenizer, sampled, text, {}, 0.5)
    expected = []
    for end in ends:
        tokens = 1
        while not tokenizer.decode(ids[:tokens]).startswith(text[:end]):
            tokens += 1
        expected.append((tokens, float(end)))
    assert found == [*expected, (len(sampled), 0.5)]


@pytest.mark.parametrize("step", [(0, 1.0), (-3, 1.0), (5, float("nan")), (5, float("inf"))])
def test_a_step_without_place_or_reward_is_refused(step, monkeypatch):
    monkeypatch.setattr(grpo_process, "step_rewards", lambda *_: [(3, 1.0), step])
    with pytest.raises(SystemExit, match=r"step_rewards returned \(.*\)"):
        grpo_process.find_steps(byte_pair_tokenizer(), [5, 6], "1+1=2;", {}, 1.0)


# ---- by hand: advantages and loss


def advantages_of(steps, group_size, num_tokens):
    mask = torch.ones(len(steps), num_tokens, dtype=torch.long)
    return grpo_process.compute_advantages(steps, group_size, mask)


def test_advantages_by_hand():
    """Five steps: mean 3/5, variance (3 · 0.4² + 2 · 0.6²) / 4; then two with 2 and 4; a token may end two steps."""
    steps = [
        [(2, 1.0), (3, 0.0), (5, 1.0)],
        [(1, 1.0), (1, 0.0)],
        [(4, 2.0)],
        [(3, 4.0)],
    ]
    right = 0.4 / (0.3**0.5 + 1e-4)
    wrong = -0.6 / (0.3**0.5 + 1e-4)
    apart = 1 / (2**0.5 + 1e-4)
    expected = [
        [2 * right + wrong] * 2 + [right + wrong] + [right] * 2,
        [right + wrong] + [0.0] * 4,
        [-apart] * 4 + [0.0],
        [apart] * 3 + [0.0] * 2,
    ]
    assert_close(advantages_of(steps, 2, 5), tensor(expected, torch.float32))


def test_one_step_a_completion_is_the_advantage_of_grpo():
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0))
    steps = [[(5, reward)] for reward in rewards.tolist()]
    expected = grpo.compute_advantages(rewards, 4).unsqueeze(1).expand(12, 5)
    assert_close(advantages_of(steps, 4, 5), expected)


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 1.0])
def test_equal_step_rewards_have_advantage_exactly_0(reward):
    equal = [[(1, reward), (3, reward)], [(4, reward)], [(2, reward)] * 3, [(4, reward)]]
    different = [[(4, 0.0)], [(4, 1.0)]] * 2
    advantages = advantages_of(equal + different, 4, 4)
    assert (advantages[:4] == 0).all()
    assert (advantages[4:] != 0).all()


def test_the_loss_is_that_of_grpo_whose_advantage_is_the_same_for_every_token():
    loss, gradient, metrics = loss_and_gradient(grpo_process, random_inputs())
    expected_loss, expected_gradient, expected_metrics = loss_and_gradient(grpo, random_inputs())
    assert torch.equal(loss, expected_loss)
    assert torch.equal(gradient, expected_gradient)
    assert metrics == expected_metrics


def test_every_token_has_its_own_advantage():
    """Ratios 1.5, 2, 0.5 with advantages 2, -1, 3: only the first is clipped."""
    advantages = tensor([[2.0, -1.0, 3.0, 5.0], [0.0, 0.0, 0.0, 5.0]])
    gradient = [[0.0, 2.0 / 3, -1.5 / 3, 0.0], [0.0, 0.0, 0.0, 0.0]]
    metrics = {"policy/approx_kl": helpers.APPROX_KL, "policy/clip_fraction_low": 0, "policy/clip_fraction_high": 1}
    helpers.check_by_hand(grpo_process, (-2.4 + 2.0 - 1.5) / 3, gradient, metrics, advantages=advantages)


def test_where_the_clip_stops_the_gradient():
    helpers.check_clip(grpo_process)


def test_gradients_are_accumulated_as_in_grpo():
    """So that what is tested of its microbatches, ranks and adapters holds here."""
    assert definitions("grpo_process")["accumulate_gradients"] == definitions("grpo")["accumulate_gradients"]


# ---- the exact gradient


def test_step_rewards_to_come_give_the_gradient_of_their_expected_sum():
    """Every token is a step of reward 1 or -1. What was rewarded before a token drops out in expectation."""
    rows = enumerate_rows()
    signs = torch.where(rows["inputs"][2] % 2 == 0, 1.0, -1.0) * rows["mask"]  # (R, T)
    steps = []
    for row in signs.tolist():
        own = [sign for sign in row if sign]
        # Another completion makes the mean of the group 0 and its standard deviation that of three of each.
        others = [(1, 1.0)] * (3 - own.count(1))
        others += [(1, -1.0)] * (3 - own.count(-1))
        steps += [list(enumerate(own, start=1)), others]
    advantages = grpo_process.compute_advantages(steps, 2, rows["mask"].repeat_interleave(2, 0))
    to_come = advantages[::2] * ((6 / 5) ** 0.5 + 1e-4)  # (R, T)
    weights = rows["probabilities"].detach() * rows["lengths"]  # the loss divides by the length
    found = helpers.expected_gradient(grpo_process, to_come, weights=weights.unsqueeze(1))
    expected_sum = (rows["probabilities"] * signs.sum(1)).sum()
    exact = gradient_of(rows["model"], expected_sum)
    assert relative_error(found, exact) < 1e-6


# ---- invariances


@each_invariance
def test_what_does_not_matter(check):
    check(grpo_process)


# ---- a step of main


def train(folder, monkeypatch, step_rewards, **settings):
    """Run main with this rule; return the metrics of its first step and its first batch."""
    monkeypatch.setattr(grpo_process, "step_rewards", step_rewards)
    calls = record(monkeypatch, grpo_process, "accumulate_gradients")
    sizes = {"prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "max_completion_length": 16}
    settings = {"num_steps": 1, "eval_prompts": 0, "kl_coef": 0.0, "dataset": few_rows(folder)} | sizes | settings
    line, *_ = helpers.train(grpo_process, folder / "run", **settings)
    (_, batch, *_), _ = calls[0]
    return line, batch


def test_main_gives_each_token_the_rewards_of_the_steps_to_come(tmp_path, monkeypatch):
    """A step after every second character, right where that is a digit."""
    asked = []

    def step_rewards(completion, row):
        asked.append((completion, row["prompt"]))
        return [(end, float(completion[end - 1].isdigit())) for end in range(2, len(completion) + 1, 2)]

    rollouts = record(monkeypatch, grpo_process, "sample_completions")
    line, batch = train(tmp_path, monkeypatch, step_rewards)
    [((_, tokenizer, prompts, *_), (_, texts))] = rollouts
    assert asked == [(text, prompt["prompt"]) for text, prompt in zip(texts, prompts)]
    rewards = grpo_process.score_completions(texts, prompts)
    steps = []
    for ids, text, reward in zip(batch["completion_ids"].tolist(), texts, rewards):
        steps.append(grpo_process.find_steps(tokenizer, ids, text, {"prompt": ""}, reward))
    expected = grpo_process.compute_advantages(steps, 4, batch["completion_mask"])
    assert torch.equal(batch["advantages"], expected)
    assert (expected != expected[:, :1]).any()
    assert line["reward/mean"] == pytest.approx(sum(rewards) / 16)
    num_steps = sum(len(found) - 1 for found in steps)  # the final answer does not count
    assert line["rollout/steps"] == pytest.approx(num_steps / 16)


@pytest.mark.parametrize("steps", [0, 1])
def test_rollouts_without_any_step_are_told_of(steps, tmp_path, monkeypatch, capsys):
    line, _ = train(tmp_path, monkeypatch, lambda _, row: [(1, float(row["answer"]))] * steps)
    assert ("plain GRPO" in capsys.readouterr().out) == (steps == 0)
    assert line["rollout/steps"] == steps


def test_groups_of_equal_steps_cost_no_pass(tmp_path, monkeypatch):
    """Here the first of four; the sums count, whatever the final answers are worth."""
    prompts = []

    def step_rewards(_completion, row):
        prompts.append(row["prompt"])
        return [(1, float(row["prompt"] != prompts[0]))]

    monkeypatch.setattr(grpo_process, "reward_fn", lambda *_: 0.0)
    calls = record(monkeypatch, grpo_process, "policy_loss")
    line, batch = train(tmp_path, monkeypatch, step_rewards)
    assert batch["advantages"].any(1).tolist() == [False] * 4 + [True] * 12
    assert sum(len(logprobs) for (logprobs, *_), _ in calls) == 12
    assert line["reward/mean"] == 0
    assert line["optim/grad_norm"] > 0
