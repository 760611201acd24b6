"""DAPO's objective: python -m pytest tests/test_dapo.py"""

import math

import pytest
import torch
from dapo_ranks import (
    GROUP_SIZE,
    GROUPS,
    KINDS,
    MAX_COMPLETION_LENGTH,
    MAX_ROUNDS,
    OVERLONG_BUFFER,
    STEPS,
    assign,
    read_prompts,
    run,
    scripted_generate,
    write_prompts,
)
from helpers import (
    CLIP_CASES,
    COUNTED_AS_CLIPPED,
    WITHOUT_KL,
    angle,
    cases_of,
    check_advantages,
    check_advantages_of_others,
    check_by_hand,
    check_clip,
    check_counted_as_clipped,
    check_gradient_of_groups_of_two,
    check_learning,
    check_loss_of_others,
    each_invariance,
    enumerate_rows,
    every_pair,
    expected_gradient,
    loss_and_gradient,
    random_inputs,
    read_oracle,
    tensor,
    true_gradient,
    two_completions,
)
from processes import run_on_ranks
from tiny import TINY, load, parse, read_jsonl, record, relative_error

import dapo
import dr_grpo
import grpo
import gspo

# ---- by hand

# Two completions of three tokens with ratios 1.5, 2, 0.5 and 1.5, 0.5, 1; the last column is padding.
RATIOS = tensor([[1.5, 2.0, 0.5, 9.0], [1.5, 0.5, 1.0, 9.0]])
LOGPROBS = tensor([[-1.0, -2.0, -3.0, -4.0], [-0.5, -1.5, -2.5, -3.5]])
INPUTS = {
    "logprobs": LOGPROBS,
    "old_logprobs": LOGPROBS - RATIOS.log(),
    "advantages": tensor([2.0, -1.0]),
    "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]]),
}
INPUTS |= {"clip_eps_low": 0.2, "clip_eps_high": 0.28}


def test_loss_gradient_and_metrics_by_hand():
    # Ratios are clipped to 0.8 .. 1.28: -min(r A, clip(r) A), summed over all tokens of all completions.
    loss = -2.56 - 2.56 - 1.0 + 1.5 + 0.8 + 1.0
    gradient = [[0.0, 0.0, -1.0, 0.0], [1.5, 0.0, 1.0, 0.0]]  # -r A where not clipped
    # approx_kl is the sum over tokens of r - log r - 1.
    kl = (0.5 - math.log(1.5)) + (1 - math.log(2)) + (math.log(2) - 0.5)
    kl += (0.5 - math.log(1.5)) + (math.log(2) - 0.5) + 0
    check_by_hand(dapo, INPUTS, loss, gradient, {"approx_kl": kl, "clip_fraction_low": 1, "clip_fraction_high": 2})


@pytest.mark.parametrize("ratio, is_clipped", [(1.25, False), (1.27, False), (1.29, True)])
def test_it_clips_higher_above_than_below(ratio, is_clipped):
    assert (loss_and_gradient(dapo, two_completions(1.0, ratio))[1][0] == 0).all() == is_clipped
    assert (loss_and_gradient(dr_grpo, two_completions(1.0, ratio))[1][0] == 0).all()  # one range of 0.2


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_overlong_penalty_by_hand(dtype):
    """With a limit of 48 and a buffer of 8 it falls from 0 at 40 to -1 at 48."""
    lengths = torch.tensor([0, 1, 39, 40, 41, 44, 47, 48, 49], dtype=dtype)
    penalties = dapo.overlong_penalty(lengths, 48, 8)
    assert penalties.tolist() == [0, 0, 0, 0, -1 / 8, -1 / 2, -7 / 8, -1, -1]
    assert penalties.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert dapo.overlong_penalty(lengths[:-1], 48, 0).tolist() == [0.0] * 8
    expected = [-n / 48 for n in lengths[:-1].tolist()]
    assert dapo.overlong_penalty(lengths[:-1], 48, 48).tolist() == pytest.approx(expected)


def test_has_signal():
    rewards = tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.3, 0.3, 0.3, 0.3, 0.3, 0.4])
    assert dapo.has_signal(rewards, 3).tolist() == [False, False, True, True, False, True]


@pytest.mark.parametrize("advantage, ratio, gradient", CLIP_CASES)
def test_where_the_clip_stops_the_gradient(advantage, ratio, gradient):
    check_clip(dapo, advantage, ratio, gradient)


@pytest.mark.parametrize("advantage, ratio, low, high", COUNTED_AS_CLIPPED)
def test_what_counts_as_clipped(advantage, ratio, low, high):
    check_counted_as_clipped(dapo, advantage, ratio, low, high)


def test_at_equal_lengths_it_is_length_times_grpo():
    inputs = random_inputs() | WITHOUT_KL | {"completion_mask": torch.ones(6, 5), "clip_eps_high": 0.2}
    found, expected = (loss_and_gradient(script, inputs)[:2] for script in (dapo, grpo))
    torch.testing.assert_close(found, tuple(5 * value for value in expected))


def test_all_with_a_clip_are_equal_for_completions_of_one_token():
    inputs = random_inputs() | WITHOUT_KL
    one_token = {key: value[:, :1] for key, value in inputs.items() if torch.is_tensor(value) and value.ndim == 2}
    changes = one_token | {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "max_completion_length": 1}
    results = [loss_and_gradient(script, inputs, **changes)[:2] for script in (dapo, grpo, dr_grpo, gspo)]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


# ---- other libraries' numbers


@pytest.mark.parametrize("case, rtol", cases_of("dapo_trl", lambda config: config["beta"] == 0))
def test_loss_and_gradient_are_those_of_trl(case, rtol):
    check_loss_of_others(dapo, case, rtol, divisor="tokens")


def test_advantages_are_those_of_trl():
    check_advantages_of_others(dapo.compute_advantages, "trl_group", rtol=1e-6)


def test_overlong_penalty_is_that_of_others():
    [case] = read_oracle("dapo_overlong")
    lengths, config = case["inputs"]["lengths"], case["config"]
    penalty = dapo.overlong_penalty(tensor(lengths), config["L_max"], config["L_cache"])
    torch.testing.assert_close(penalty, tensor(case["outputs"]["trl"]))
    # verl's goes on falling past the limit, which no completion passes
    within = [i for i, length in enumerate(lengths) if length <= config["L_max"]]
    torch.testing.assert_close(penalty[within], tensor(case["outputs"]["verl"])[within])


# ---- the exact gradient


@pytest.mark.parametrize("centred", [True, False])
def test_expected_gradient_is_that_of_the_expected_reward(centred):
    rows = enumerate_rows()
    found = expected_gradient(dapo, rows["advantages"] if centred else rows["rewards"])
    assert relative_error(found, true_gradient()) < 1e-9


def test_expected_gradient_of_groups_of_two():
    """Division by the standard deviation turns it away from the gradient of the expected reward."""
    check_gradient_of_groups_of_two(dapo, over_lengths=False)
    pick, weights = every_pair()
    advantages = dapo.compute_advantages(enumerate_rows()["rewards"][pick], 2)
    assert angle(expected_gradient(dapo, advantages, pick, weights), true_gradient()) > 0.01


# ---- invariances and a short run


@each_invariance
def test_what_does_not_matter(check):
    check(dapo)


def test_advantages_are_centred_and_0_without_a_difference():
    check_advantages(dapo, dapo.compute_advantages)


@pytest.mark.slow
def test_a_short_run_learns(tmp_path):
    check_learning(dapo, tmp_path / "run")


# ==== dAPO's dynamic sampling, with scripted completions


SIZES = {"prompts_per_step": 3, "group_size": GROUP_SIZE, "minibatch_size": 12, "max_rounds": 3, "eval_prompts": 0}
SIZES |= {"max_completion_length": MAX_COMPLETION_LENGTH, "overlong_buffer": OVERLONG_BUFFER}


@pytest.fixture(scope="module")
def tiny():
    return load(dapo, TINY)


@pytest.fixture
def dataset(tmp_path):
    """A file of ten prompts."""
    return write_prompts(tmp_path / "prompts.jsonl", 10)


def read_metrics(run_dir):
    return [line for line in read_jsonl(run_dir / "metrics.jsonl") if line["step"] > 0]


def script(monkeypatch, tokenizer, patterns):
    """Sample as patterns say; returns the list that fills with the prompts of each round."""
    rounds = []
    monkeypatch.setattr(dapo, "generate", scripted_generate(tokenizer, patterns, rounds))
    return rounds


def train(tmp_path, dataset, num_steps=1, **settings):
    """Run main and return its lines of metrics."""
    args = {**SIZES, "dataset": dataset, "num_steps": num_steps, "run_dir": tmp_path / "run", **settings}
    dapo.main(parse(dapo, **args))
    return read_metrics(tmp_path / "run")


# ---- rounds of sampling

# Groups of every round (mixed, solved, not solved), and which are kept, of three that are wanted.
ROUNDS = {
    "first round is enough": ("mmm", [0, 1, 2]),
    "refilled twice, surplus dropped": ("msn nms mmm", [0, 4, 6]),
    "refilled once, surplus dropped": ("mms mmm", [0, 1, 3]),
    "cap reached with too few": ("nsm sss nnm", [2, 8]),
    "cap reached with all solved": ("sss sss sss", []),
    "cap reached with none solved": ("nnn nnn nnn", []),
    "full in the last round": ("sns nmn smm", [4, 7, 8]),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("name", ROUNDS)
def test_first_groups_with_signal_are_kept_in_order(tiny, dataset, monkeypatch, name, start):
    (model, tokenizer), (letters, expected) = tiny, ROUNDS[name]
    prompts, num_rounds = read_prompts(dataset), len(letters.split())
    letters = letters.replace(" ", "")
    patterns = assign(prompts, start, letters)
    rounds = script(monkeypatch, tokenizer, patterns)
    policy, args = dapo.LogprobModel(model), dapo.Args(**SIZES)
    batch, texts, repeated, rows = dapo.sample_groups(policy, tokenizer, prompts, start, args)
    assert len(rounds) == num_rounds
    sampled = dapo.pick_rows(prompts, start, 3 * num_rounds, args.seed)
    assert repeated == [prompt for prompt in sampled for _ in range(GROUP_SIZE)]
    assert sum(rounds, []) == [prompt["prompt"] for prompt in sampled]
    assert rows.tolist() == [GROUP_SIZE * group + i for group in expected for i in range(GROUP_SIZE)]
    rewards = [KINDS[kind][0] for prompt in sampled for kind in patterns[prompt["prompt"]]]
    assert batch["rewards"].tolist() == rewards
    assert len(texts) == len(rewards) and all(len(value) == len(rewards) for value in batch.values())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("longer_first", [True, False])
def test_rounds_of_different_prompt_lengths_are_merged_unchanged(tiny, dataset, monkeypatch, longer_first):
    (model, tokenizer), prompts = tiny, read_prompts(dataset)
    # Long and short prompts stand where the first and the second round pick theirs.
    by_length = sorted(prompts, key=lambda prompt: len(prompt["prompt_ids"]), reverse=longer_first)
    places = dapo.pick_rows(range(10), 0, 10, 1)
    prompts = [by_length[places.index(i)] for i in range(10)]
    script(monkeypatch, tokenizer, assign(prompts, 0, "msnmmn"))
    parts = record(monkeypatch, dapo, "sample_completions")
    batch, *_ = dapo.sample_groups(dapo.LogprobModel(model), tokenizer, prompts, 0, dapo.Args(**SIZES))
    asked = [ids[mask == 1].tolist() for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"])]
    assert asked == [prompt["prompt_ids"] for prompt in by_length[:6] for _ in range(GROUP_SIZE)]
    widths = [max(map(len, half)) for half in (asked[: 3 * GROUP_SIZE], asked[3 * GROUP_SIZE :])]
    assert (widths[0] > widths[1]) == longer_first and widths[0] != widths[1]
    assert (batch["prompt_mask"].diff(dim=1) >= 0).all()  # padded on the left
    for key in batch.keys() - {"prompt_ids", "prompt_mask"}:
        assert torch.equal(batch[key], torch.cat([part[key] for _, (part, _) in parts])), key
    assert torch.equal(batch["lengths"], batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1))


# ---- whole steps


@pytest.mark.parametrize("letters", ["sssssssss", "nnnnnnnnn", "snnssnnns"])
def test_step_without_any_signal_changes_nothing(tiny, tmp_path, dataset, monkeypatch, letters):
    script(monkeypatch, tiny[1], assign(read_prompts(dataset), 0, letters))
    (line,) = train(tmp_path, dataset, minibatch_size=6)
    assert line["rollout/rounds"] == 3 and line["rollout/groups"] == 0
    assert all(math.isfinite(value) for value in line.values())
    assert line["reward/mean"] == pytest.approx(letters.count("s") / 9)
    assert line["optim/grad_norm"] == line["loss/policy"] == 0 and "policy/approx_kl" not in line
    after, _ = load(dapo, tmp_path / "run" / "checkpoint")
    before, _ = load(dapo, TINY)
    assert all(torch.equal(a, b) for a, b in zip(after.parameters(), before.parameters(), strict=True))


def test_prompts_are_consumed_in_order_without_gaps_or_repeats(tiny, tmp_path, dataset, monkeypatch):
    prompts = read_prompts(dataset)
    rounds = script(monkeypatch, tiny[1], assign(prompts, 0, "msmnmssnmm"))
    lines = train(tmp_path, dataset, num_steps=4, seed=1)
    per_step = [line["rollout/rounds"] for line in lines]
    assert sum(per_step) == len(rounds) and min(per_step) < max(per_step)
    consumed = [3 * sum(per_step[: i + 1]) for i in range(4)]
    assert [line["rollout/prompts_consumed"] for line in lines] == consumed
    assert consumed[-1] > 2 * len(prompts)  # over the ends of two passes
    assert sum(rounds, []) == [prompt["prompt"] for prompt in dapo.pick_rows(prompts, 0, consumed[-1], 1)]


def test_at_the_cap_it_trains_on_the_groups_found(tiny, tmp_path, dataset, monkeypatch):
    """The gradient is that of these groups alone: a mean over their own tokens."""
    prompts = read_prompts(dataset)
    script(monkeypatch, tiny[1], assign(prompts, 0, ["s", "n", "rwwR", "s", "hwWr", "n"]))
    gradients, accumulate = [], dapo.accumulate_gradients

    def recording(policy, batch, rows, divisor, *args):
        metrics = accumulate(policy, batch, rows, divisor, *args)
        gradient = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
        gradients.append((sorted(rows.tolist()), divisor, gradient))
        return metrics

    monkeypatch.setattr(dapo, "accumulate_gradients", recording)
    (line,) = train(tmp_path, dataset, max_rounds=2)
    assert line["rollout/groups"] == 2 and line["rollout/rounds"] == 2
    ((rows, divisor, gradient),) = gradients
    assert rows == [8, 9, 10, 11, 16, 17, 18, 19]
    assert divisor == (8 + 7 + 7 + 16) + (12 + 7 + 16 + 8)

    model, tokenizer = load(dapo, TINY)
    picked = dapo.pick_rows(prompts, 0, 6, 1)
    policy, args = dapo.LogprobModel(model), dapo.Args(**SIZES)
    prompts = [picked[i] for i in (2, 4) for _ in range(GROUP_SIZE)]
    part, _ = dapo.sample_completions(policy, tokenizer, prompts, 1.0, args)
    rewards = torch.tensor([[1.0, -1.0, -1.0, 0.0], [0.5, -1.0, -2.0, 1.0]])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    mask = part["completion_mask"]
    logprobs, _ = dapo.token_logprobs(model, part["prompt_ids"], part["prompt_mask"], part["completion_ids"], mask, 1.0)
    (-(logprobs * mask * advantages.view(-1, 1)).sum() / mask.sum()).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert relative_error(gradient, expected) < 1e-4
    assert line["optim/grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)


def test_advantages_have_the_mapped_reward_and_the_metrics_the_rules(tiny, tmp_path, dataset, monkeypatch):
    patterns = assign(read_prompts(dataset), 0, ["rwhR", "Wwrr", "wwWh"])
    script(monkeypatch, tiny[1], patterns)
    calls = record(monkeypatch, dapo, "compute_advantages")
    (line,) = train(tmp_path, dataset)
    (((rewards, group_size), _),) = calls
    # +1 or -1, less a half for half of the buffer, less 1 at the limit
    expected = [[1.0, -1.0, 0.5, 0.0], [-2.0, -1.0, 1.0, 1.0], [-1.0, -1.0, -2.0, 0.5]]
    assert group_size == GROUP_SIZE and rewards.view(-1, GROUP_SIZE).tolist() == expected
    assert line["reward/mean"] == pytest.approx(6 / 12)


def test_tokens_of_zero_advantage_count_in_the_divisor(tiny, tmp_path, dataset, monkeypatch):
    """Right at the limit is reward 0, in these groups the mean: no gradient, but 16 tokens."""
    script(monkeypatch, tiny[1], assign(read_prompts(dataset), 0, ["rwRR"] * 3))
    calls = record(monkeypatch, dapo, "accumulate_gradients")
    (line,) = train(tmp_path, dataset)
    (((_, batch, rows, divisor, *_), metrics),) = calls
    assert sorted(rows.tolist()) == list(range(12)) and (batch["advantages"][[2, 3, 6, 7, 10, 11]] == 0).all()
    assert batch["live"].tolist() == [True, True, False, False] * 3
    assert divisor == 3 * (8 + 7 + 16 + 16) and metrics["num_tokens"] == 3 * (8 + 7)
    assert line["loss/policy"] == pytest.approx(float(metrics["loss/policy"]) / divisor)


def test_every_minibatch_is_divided_by_its_own_tokens(tiny, tmp_path, dataset, monkeypatch):
    script(monkeypatch, tiny[1], assign(read_prompts(dataset), 0, ["rwwh", "Rwhr", "hwww"]))
    calls = record(monkeypatch, dapo, "accumulate_gradients")
    train(tmp_path, dataset, minibatch_size=4)
    seen = []
    for (_, batch, rows, divisor, *_), _ in calls:
        assert len(rows) == 4 and divisor == batch["completion_mask"][rows].sum()
        seen += rows.tolist()
    assert sorted(seen) == list(range(12))
    assert len({divisor for (_, _, _, divisor, *_), _ in calls}) > 1


# ---- two processes


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The folder with what dapo_ranks.py leaves on each of two ranks."""
    folder = tmp_path_factory.mktemp("dapo_ranks")
    write_prompts(folder / "prompts.jsonl", 36)
    run_on_ranks("dapo_ranks.py", folder)
    return folder


def test_script_lets_ranks_find_signal_in_different_rounds():
    """Over the steps: one full two rounds before the other, one full and one not at the cap, one without any."""
    signal = {letter: {KINDS[kind][0] for kind in group} for letter, group in GROUPS.items()}
    assert signal == {"m": {True, False}, "s": {True}, "n": {False}}
    found = [[step.replace(" ", "")[rank::2].count("m") for rank in (0, 1)] for step in STEPS]
    assert found == [[2, 2], [1, 2], [0, 1]]
    first = STEPS[0].split()
    assert first[0][::2].count("m") == 2 and "".join(first[:2])[1::2].count("m") == 1
    assert all(len(step.split()) == MAX_ROUNDS for step in STEPS)


def test_ranks_stop_after_the_same_round_and_share_the_prompts_of_each(two_ranks):
    rounds = [torch.load(two_ranks / f"{rank}.pt") for rank in (0, 1)]
    assert len(rounds[0]) == len(rounds[1]) == 9
    merged = [prompt for pair in zip(sum(rounds[0], []), sum(rounds[1], []), strict=True) for prompt in pair]
    prompts = read_prompts(str(two_ranks / "prompts.jsonl"))
    assert merged == [prompt["prompt"] for prompt in dapo.pick_rows(prompts, 0, 36, 1)]
    lines = read_metrics(two_ranks / "two")
    assert [line["rollout/rounds"] for line in lines] == [3, 3, 3]
    assert [line["rollout/groups"] for line in lines] == [4, 3, 1]
    assert [line["rollout/prompts_consumed"] for line in lines] == [12, 24, 36]


def test_two_ranks_train_as_one(two_ranks, monkeypatch):
    """The groups of STEPS that two ranks find are those that one process finds."""
    monkeypatch.setattr(dapo, "generate", dapo.generate)  # run assigns it
    run(two_ranks, two_ranks / "one")
    for line, expected in zip(read_metrics(two_ranks / "two"), read_metrics(two_ranks / "one"), strict=True):
        assert line.keys() == expected.keys()
        for key in line:
            if not key.startswith("perf/"):
                assert line[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-6), key


@pytest.mark.parametrize("limit, buffer", [(48, 9), (3, 0)])
def test_the_overlong_buffer_is_a_fifth_of_the_limit_by_default(limit, buffer, tmp_path, dataset, monkeypatch):
    """As in section 4.1, whatever --max-completion-length is."""
    calls = record(monkeypatch, dapo, "overlong_penalty")
    train(tmp_path, dataset, max_completion_length=limit, overlong_buffer=None, max_rounds=1)
    [((_, *settings), _)] = calls
    assert settings == [limit, buffer]


def test_prompts_of_steps_after_the_state_that_is_resumed_are_not_counted(tmp_path, dataset):
    first = train(tmp_path, dataset, num_steps=2, save_every=1)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 3, "rollout/prompts_consumed": 999}\n')
    dapo.main(parse(dapo, resume=tmp_path / "run", num_steps=3))
    last, done = read_metrics(tmp_path / "run")[-1], first[-1]["rollout/prompts_consumed"]
    assert last["rollout/prompts_consumed"] - done == last["rollout/rounds"] * SIZES["prompts_per_step"]
