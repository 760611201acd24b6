"""grpo_process.py: steps in the text and among the tokens, their advantages by hand, and what main makes of them."""

import itertools
import math

import pytest
import tokenizers
import torch
from helpers import (
    CLIP_CASES,
    COUNTED_AS_CLIPPED,
    TEMPERATURE,
    WITHOUT_KL,
    angle,
    check_by_hand,
    check_clip,
    check_counted_as_clipped,
    each_invariance,
    enumerate_rows,
    expected_gradient,
    gradient_of,
    gradient_over_lengths,
    loss_gradient,
    random_inputs,
    tensor,
    true_gradient,
)
from sync_copies import definitions
from tiny import TINY, parse, read_jsonl, record, relative_error
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import grpo
import grpo_process

THOUGHT = r"<think>59+4=63;63+94=156;157+97=254</think>\boxed{254}"
SMALL = {"num_steps": 1, "prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "max_completion_length": 16}


def advantages_of(steps, group_size, num_tokens):
    return grpo_process.compute_advantages(steps, group_size, torch.ones(len(steps), num_tokens, dtype=torch.long))


# ---- steps in the text


SUM = {"prompt": "59+4+94+97=", "answer": "254"}
CLIPS = {  # as GSM8K has them
    "prompt": "Natalia sold clips to 48 of her friends in April, half as many in May, and 1,200 to a shop. How many?",
    "answer": "In May: 48/2 = <<48/2=24>>24\nBoth: 48+24 = <<48+24=72>>72\n1200+72=<<1200+72=1272>>1272\n#### 1272",
}


@pytest.mark.parametrize(
    "completion, steps",
    [
        (THOUGHT, [("<think>59+4=63;", 1.0), ("63+94=156;", 0.0), ("157+97=254", 1.0)]),
        (r"\boxed{255}", []),
        ("", []),
        ("<think>59+4=63;63+9", [("<think>59+4=63;", 1.0)]),  # cut off
        ("a1+1=3 or 59+4=63;", [("a1+1=3", 0.0), (" or 59+4=63;", 1.0)]),
        ("1+=1;+2=2;1-1=0;", []),
        ("7" * 5000 + "+1=2;", []),  # more digits than int() takes
        ("5/0=5;", [("5/0=5;", 0.0)]),
        ("94+63=157", [("94+63=157", 1.0)]),
        ("59+4=63;59+4=63;4+59=63;63+94=157;", [("59+4=63;", 1.0), ("59+4=63;4+59=63;63+94=157;", 1.0)]),  # once
        ("62+1=63;158-1=157", []),  # right sums, but not of this prompt
        ("59*4=236;97-4=93;", []),
    ],
)
def test_the_rule_finds_equations_and_checks_each(completion, steps):
    ends = itertools.accumulate(len(text) for text, _ in steps)
    assert grpo_process.step_rewards(completion, SUM) == list(zip(ends, [reward for _, reward in steps]))


@pytest.mark.parametrize(
    "completion, rewards",
    [
        ("48/2=24", [1]),
        ("- In May: 48 / 2 = 24 clips.\n- In all: 48 + 24 = 72 clips.", [1, 1]),
        (r"**May**: \(48 \div 2 = 24\), so $48 + 24 = 72$ and $1,200 + 72 = 1,272$", [1, 1, 1]),
        ("$48 ÷ 2 = $24 and \\$1200 + \\$72 = \\$1272.", [1, 1]),
        ("24 × 2 = 48, 24 \\times 2 = 49, 24 \\cdot 2 = 50, 72 − 48 = 24", [0, 0, 1]),  # 48 is given, not worked out
        ("48 / 2 &= 24.0 \\\\ 48 + 24 &= 74", [1, 0]),
        ("48 * 3 = 72", [0]),
        ("10 * 2 = 20. 1 + 1 = 2. 47 + 1 = 48", []),  # right and of no use
        ("x + 24 + 24 = 72, 2 * (48 + 24) = 72, (2 + 3) * 4 + 1 = 21, 48 * 2 + 1 = 24", []),  # parts of longer ones
        ("48 / 2 = 24 + 0, 24 + 48 = 72 / 3 = 24.5, 48 / 2 = 24.5", [0, 0]),
    ],
)
def test_steps_are_found_in_what_real_models_write(completion, rewards):
    """Blanks, bullets, dollars, LaTeX, other signs, thousands."""
    steps = grpo_process.step_rewards(completion, CLIPS)
    assert [reward for _, reward in steps] == rewards
    assert all(completion[:end].rstrip(";")[-1].isdigit() for end, _ in steps)


@pytest.mark.parametrize(
    "prompt, answer, completion, rewards",
    [
        ("What is 12 + 34 + 5?", "51", "12 + 34 = 46 and 46 + 5 = 51", [1, 1]),
        ([{"role": "user", "content": "12+34="}], "46", "12+34=46", [1]),
        ("How many?", "7", "3 + 4 = 7, 3 + 4 = 8", []),  # nothing says what is needed
        ("How many?", None, "3 + 4 = 7", []),
    ],
)
def test_what_a_row_needs_is_in_its_prompt_or_its_answer(prompt, answer, completion, rewards):
    steps = grpo_process.step_rewards(completion, {"prompt": prompt, "answer": answer})
    assert [reward for _, reward in steps] == rewards


@pytest.mark.parametrize("terms", [[59, 4, 94], [10, 20, 30, 40, 50], [87, 39, 86, 12, 55, 61, 70, 23]])
def test_endless_right_sums_earn_at_most_what_the_right_steps_earn(terms):
    totals = list(itertools.accumulate(terms))
    row = {"prompt": "+".join(map(str, terms)) + "=", "answer": str(totals[-1])}
    right = [f"{total}+{term}={total + term};" for total, term in zip(totals, terms[1:])]
    counted = [f"{i}+1={i + 1};" for i in range(totals[-1])]
    below = [f"{total - 1}+1={total};" for total in totals]
    earned = len(terms) - 1
    for text in (right, right * 50, counted, counted + right * 9, below * 50, ["1+1=2;"] * 500, right[:1] * 500):
        rewards = [reward for _, reward in grpo_process.step_rewards("".join(text), row)]
        assert sum(rewards) == len(rewards) <= earned
        assert len(rewards) == sum(step in text for step in right)


# ---- steps among the tokens


def byte_pair_tokenizer():
    """Its tokens go on over the ends of sums, have two of them, or are a part of a character."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    backend.train_from_iterator(["1+1=2;" * 9, "=63;63+", "=10;10+"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def written_by(tokenizer, ids):
    """What is written after each token, as bytes."""
    of_character = {character: byte for byte, character in bytes_to_unicode().items()}
    tokens = tokenizer.convert_ids_to_tokens(ids)
    if tokenizer.vocab_size < 100:  # the embedded one, whose tokens are what they write
        return list(itertools.accumulate(token.encode() for token in tokens))
    return list(itertools.accumulate(bytes(of_character[character] for character in token) for token in tokens))


@pytest.mark.parametrize(
    "make_tokenizer, text",
    [
        (lambda: AutoTokenizer.from_pretrained(TINY), THOUGHT),
        (byte_pair_tokenizer, THOUGHT),
        (byte_pair_tokenizer, "9+1=10;10+5=15;"),
        (byte_pair_tokenizer, "1+1=2;" * 5),
        (byte_pair_tokenizer, "naïve 12+30=42;€42+8=50; 🙂🙂7+7=14"),
    ],
)
def test_a_step_ends_at_the_token_that_writes_its_last_character(make_tokenizer, text, monkeypatch):
    """Wherever in the text it ends, against the bytes of single tokens; the final answer at the last token."""
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    written, sampled = written_by(tokenizer, ids), [*ids, tokenizer.eos_token_id]
    assert tokenizer.decode(sampled, skip_special_tokens=True) == text and written[-1] == text.encode()
    ends = range(1, len(text) + 1)
    monkeypatch.setattr(grpo_process, "step_rewards", lambda _text, row: [(end, row[end]) for end in ends])
    expected = [
        1 + next(i for i, so_far in enumerate(written) if so_far.startswith(text[:end].encode())) for end in ends
    ]
    rewards = [float(end) for end in range(len(text) + 1)]
    found = grpo_process.find_steps(tokenizer, sampled, text, rewards, 0.5)
    assert found == [*zip(expected, rewards[1:]), (len(sampled), 0.5)]


def test_the_tokens_of_the_second_tokenizer_are_the_hard_cases():
    tokenizer = byte_pair_tokenizer()
    ids = tokenizer.encode("1+1=2;" * 5 + "63;63+€", add_special_tokens=False)
    tokens = [tokenizer.decode([token]) for token in ids]
    assert [token for token in tokens if token.count(";") > 1] and tokens.count("�") == 3
    assert [token for token in tokens if ";" in token[:-1]]


@pytest.mark.parametrize("step", [(0, 1.0), (-3, 1.0), (5, float("nan")), (5, float("inf")), (float("nan"), 1.0)])
def test_a_step_without_place_or_reward_is_refused(step, monkeypatch):
    monkeypatch.setattr(grpo_process, "step_rewards", lambda *_: [(3, 1.0), step])
    with pytest.raises(SystemExit, match=r"step_rewards returned \(.*\), which is no \(end, reward\)"):
        grpo_process.find_steps(byte_pair_tokenizer(), [5, 6], "1+1=2;", {}, 1.0)


# ---- advantages


def test_advantages_by_hand():
    """Five steps: mean 3/5, variance (3 · 0.4² + 2 · 0.6²) / 4; then two with 2 and 4; a token may end two steps."""
    steps = [[(2, 1.0), (3, 0.0), (5, 1.0)], [(1, 1.0), (1, 0.0)], [(4, 2.0)], [(3, 4.0)]]
    right, wrong = (sign / (0.3**0.5 + 1e-4) for sign in (0.4, -0.6))
    apart = 1 / (2**0.5 + 1e-4)
    expected = [
        [2 * right + wrong] * 2 + [right + wrong] + [right] * 2,
        [right + wrong] + [0.0] * 4,
        [-apart] * 4 + [0.0],
        [apart] * 3 + [0.0] * 2,
    ]
    torch.testing.assert_close(advantages_of(steps, 2, 5), tensor(expected, torch.float32))


def test_one_step_a_completion_is_the_advantage_of_grpo():
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0))
    steps = [[(5, reward)] for reward in rewards.tolist()]
    expected = grpo.compute_advantages(rewards, 4).unsqueeze(1).expand(12, 5)
    torch.testing.assert_close(advantages_of(steps, 4, 5), expected)


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 1.0])
def test_equal_step_rewards_have_advantage_exactly_0(reward):
    steps = [[(1, reward), (3, reward)], [(4, reward)], [(2, reward)] * 3, [(4, reward)]] + [[(4, 0.0)], [(4, 1.0)]] * 2
    assert (advantages_of(steps, 4, 4)[:4] == 0).all() and (advantages_of(steps, 4, 4)[4:] != 0).all()


# ---- the loss


def test_the_loss_is_that_of_grpo_whose_advantage_is_the_same_for_every_token():
    inputs = random_inputs()
    for ref_logprobs, kl_coef in ((None, 0.0), (inputs["old_logprobs"] - 0.3, 0.04)):
        given = inputs | {"ref_logprobs": ref_logprobs, "clip_eps": 0.2, "kl_coef": kl_coef}
        expanded = given | {"advantages": inputs["advantages"].unsqueeze(1).expand_as(inputs["logprobs"])}
        results = [
            loss_gradient(lambda logprobs: script.policy_loss(**own | {"logprobs": logprobs}), inputs["logprobs"])  # noqa: B023
            for script, own in ((grpo, given), (grpo_process, expanded))
        ]
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
        assert results[0][2] == results[1][2]


def test_every_token_has_its_own_advantage():
    """Ratios 1.5, 0.5, 1 with advantages 2, -1, 3: clipped, clipped, and all of it."""
    logprobs = tensor([[-1.0, -2.0, -3.0, -4.0]])
    inputs = {"old_logprobs": logprobs - tensor([[1.5, 0.5, 1.0, 9.0]]).log(), "ref_logprobs": None}
    inputs |= {"advantages": tensor([[2.0, -1.0, 3.0, 5.0]]), "completion_mask": torch.tensor([[1, 1, 1, 0]])}
    loss, gradient, metrics = loss_gradient(
        lambda logprobs: grpo_process.policy_loss(logprobs, **inputs, clip_eps=0.2, kl_coef=0.0), logprobs
    )
    assert loss.item() == pytest.approx((-2.4 + 0.8 - 3.0) / 3)
    torch.testing.assert_close(gradient, tensor([[0.0, 0.0, -1.0, 0.0]]))
    assert metrics["policy/clip_fraction_low"] == metrics["policy/clip_fraction_high"] == 1


def test_gradients_are_accumulated_as_in_grpo():
    """So that what is tested of its microbatches, ranks and adapters holds here."""
    assert definitions("grpo_process")["accumulate_gradients"] == definitions("grpo")["accumulate_gradients"]


# ---- a step of main


def train(folder, monkeypatch, **settings):
    """Run main; return its metrics, and what reached accumulate_gradients: batches and rows."""
    calls = record(monkeypatch, grpo_process, "accumulate_gradients")
    settings = SMALL | {"eval_prompts": 0, "run_dir": str(folder / "run")} | settings
    grpo_process.main(parse(grpo_process, **settings))
    seen = [(batch, rows.tolist()) for (_, batch, rows, *_), _ in calls]
    return read_jsonl(folder / "run" / "metrics.jsonl")[0], seen


def test_main_gives_each_token_the_rewards_of_the_steps_to_come(tmp_path, monkeypatch):
    """A step after every second character, right where that is a digit."""
    calls, rollouts = [], record(monkeypatch, grpo_process, "sample_completions")

    def step_rewards(completion, row):
        calls.append((completion, row["prompt"]))
        return [(end, float(completion[end - 1].isdigit())) for end in range(2, len(completion) + 1, 2)]

    monkeypatch.setattr(grpo_process, "step_rewards", step_rewards)
    line, seen = train(tmp_path, monkeypatch, kl_coef=0.0)
    [((_, tokenizer, prompts, *_), (batch, texts))] = rollouts
    assert calls == [(text, prompt["prompt"]) for text, prompt in zip(texts, prompts)]
    ids, rewards = batch["completion_ids"].tolist(), batch["rewards"].tolist()
    steps = [
        grpo_process.find_steps(tokenizer, ids[row], texts[row], {"prompt": ""}, rewards[row]) for row in range(16)
    ]
    expected = grpo_process.compute_advantages(steps, 4, batch["completion_mask"])
    assert torch.equal(seen[0][0]["advantages"], expected) and (expected != expected[:, :1]).any()
    assert line["reward/mean"] == pytest.approx(sum(rewards) / 16)
    assert batch["live"].all() and sorted(row for _, rows in seen for row in rows) == list(range(16))


def test_how_many_steps_were_found_by_hand(tmp_path, monkeypatch):
    """One after each character of a text, and two more; that of the final answer does not count."""
    lengths = []

    def step_rewards(completion, _row):
        lengths.append(len(completion) + 2)
        return [(end, 0.0) for end in range(1, len(completion) + 3)]

    monkeypatch.setattr(grpo_process, "step_rewards", step_rewards)
    line, _ = train(tmp_path, monkeypatch, kl_coef=0.0)
    assert len(lengths) == 16 and line["rollout/steps"] == pytest.approx(sum(lengths) / 16)


@pytest.mark.parametrize("steps", [0, 1])
def test_rollouts_without_any_step_are_told_of(steps, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grpo_process, "step_rewards", lambda _, row: [(1, float(row["answer"]))] * steps)
    line, _ = train(tmp_path, monkeypatch, kl_coef=0.0, num_steps=2)
    told = [text for text in capsys.readouterr().out.splitlines() if "step_rewards" in text]
    expected = "step_rewards found no step in any completion, so that this step is plain GRPO"
    assert told == [f"step {step}: {expected}" for step in (1, 2)] * (1 - steps)
    assert line["rollout/steps"] == steps


def test_the_shipped_rule_finds_steps_from_the_first_rollout_on(tmp_path, monkeypatch):
    line, _ = train(tmp_path, monkeypatch, kl_coef=0.0, max_completion_length=48)
    assert line["rollout/steps"] > 0


def test_groups_of_equal_steps_cost_no_pass(tmp_path, monkeypatch):
    """Here the first of four; the sums count, whatever the final answers are worth."""
    prompts = []

    def step_rewards(_completion, row):
        prompts.append(row["prompt"])
        return [(1, float(row["prompt"] != prompts[0]))]

    monkeypatch.setattr(grpo_process, "step_rewards", step_rewards)
    monkeypatch.setattr(grpo_process, "reward_fn", lambda *_: 0.0)
    calls = record(monkeypatch, grpo_process, "policy_loss")
    line, seen = train(tmp_path, monkeypatch, kl_coef=0.0)
    assert seen[0][0]["live"].tolist() == [False] * 4 + [True] * 12
    assert sum(len(logprobs) for (logprobs, *_), _ in calls) == 12
    assert line["reward/mean"] == 0 and line["reward/zero_std"] == 1 and line["optim/grad_norm"] > 0


# ---- the loss by hand, the exact gradient, and what does not matter

# Two completions of three tokens with ratios 1.5, 2, 0.5 and 1.5, 0.5, 1; the last column is padding.
RATIOS = tensor([[1.5, 2.0, 0.5, 9.0], [1.5, 0.5, 1.0, 9.0]])
LOGPROBS = tensor([[-1.0, -2.0, -3.0, -4.0], [-0.5, -1.5, -2.5, -3.5]])
INPUTS = {
    "logprobs": LOGPROBS,
    "old_logprobs": LOGPROBS - RATIOS.log(),
    "advantages": tensor([2.0, -1.0]),
    "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]]),
} | WITHOUT_KL


def test_loss_gradient_and_metrics_by_hand():
    # Ratios are clipped to 0.8 .. 1.2; -min(r A, clip(r) A) for each token, then the mean over the three tokens.
    loss = (-2.4 - 2.4 - 1.0 + 1.5 + 0.8 + 1.0) / 3
    gradient = [[0.0, 0.0, -1 / 3, 0.0], [1.5 / 3, 0.0, 1 / 3, 0.0]]  # -r A where not clipped
    # approx_kl is the sum over tokens of r - log r - 1.
    kl = (0.5 - math.log(1.5)) + (1 - math.log(2)) + (math.log(2) - 0.5)
    kl += (0.5 - math.log(1.5)) + (math.log(2) - 0.5) + 0
    metrics = {"approx_kl": kl, "clip_fraction_low": 1, "clip_fraction_high": 2}
    check_by_hand(grpo_process, INPUTS, loss, gradient, metrics)


@pytest.mark.parametrize("advantage, ratio, gradient", CLIP_CASES)
def test_where_the_clip_stops_the_gradient(advantage, ratio, gradient):
    check_clip(grpo_process, advantage, ratio, gradient)


@pytest.mark.parametrize("advantage, ratio, low, high", COUNTED_AS_CLIPPED)
def test_what_counts_as_clipped(advantage, ratio, low, high):
    check_counted_as_clipped(grpo_process, advantage, ratio, low, high)


@each_invariance
def test_what_does_not_matter(check):
    check(grpo_process)


def test_expected_gradient_divides_by_the_length():
    found = expected_gradient(grpo_process, enumerate_rows()["advantages"])
    assert relative_error(found, gradient_over_lengths()) < 1e-9
    assert angle(found, true_gradient()) > 0.01  # so it is not the gradient of the expected reward


def test_step_rewards_to_come_give_the_gradient_of_their_expected_sum():
    """Every token is a step of reward 1 or -1. What was rewarded before a token is no matter of that token, so that it
    drops out in expectation, and a token that had none of what comes would be missed.
    """
    rows = enumerate_rows()
    signs = torch.where(rows["inputs"][2] % 2 == 0, 1.0, -1.0) * rows["mask"]  # (R, T)
    steps = []
    for own in ([int(sign) for sign in row if sign] for row in signs):
        # Another completion makes the mean of the group 0 and its standard deviation that of three of each.
        others = [1] * (3 - own.count(1)) + [-1] * (3 - own.count(-1))
        steps += [list(enumerate(own, start=1)), [(1, sign) for sign in others]]
    mask = rows["mask"].repeat_interleave(2, 0)
    advantages = grpo_process.compute_advantages(steps, 2, mask)[::2] * ((6 / 5) ** 0.5 + 1e-4)  # (R, T)
    weights = (rows["probabilities"].detach() * rows["lengths"]).unsqueeze(1)  # the loss divides by the length
    logprobs = grpo_process.token_logprobs(rows["model"], *rows["inputs"], TEMPERATURE)[0]
    loss, _ = grpo_process.policy_loss(
        logprobs, logprobs.detach(), None, advantages * weights, rows["mask"], clip_eps=0.2, kl_coef=0.0
    )
    exact = gradient_of(rows["model"], (rows["probabilities"] * signs.sum(1)).sum())
    assert relative_error(-gradient_of(rows["model"], loss), exact) < 1e-6
