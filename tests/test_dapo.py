"""DAPO's objective and its dynamic sampling: python -m pytest tests/test_dapo.py"""

import math

import dapo_ranks
import helpers
import pytest
import torch
from dapo_ranks import GROUP_SIZE, KINDS, assign, make_rows, scripted_generate
from helpers import each_invariance, loss_and_gradient, read_oracle, tensor
from processes import logged, run_on_ranks
from tiny import TINY, add_pairs, load, parse, read_jsonl, record, shares_changed, write_jsonl
from torch.testing import assert_close

import dapo

# ---- by hand


def test_loss_gradient_and_metrics_by_hand():
    # Ratios are clipped to 0.8 .. 1.28: -min(r A, clip(r) A), summed over all tokens of all completions.
    loss = -2.56 - 2.56 - 1.0 + 1.5 + 0.8 + 1.0
    gradient = [[0.0, 0.0, -1.0, 0.0], [1.5, 0.0, 1.0, 0.0]]  # -r A where not clipped
    metrics = {
        "policy/approx_kl": helpers.APPROX_KL,
        "policy/clip_fraction_low": 1,
        "policy/clip_fraction_high": 2,
    }
    helpers.check_by_hand(dapo, loss, gradient, metrics)


def test_it_clips_higher_above_than_below():
    for ratio, is_clipped in ((1.27, False), (1.29, True)):
        _, gradient, metrics = loss_and_gradient(dapo, helpers.two_completions(1.0, ratio))
        assert (gradient[0] == 0).all() == is_clipped
        assert metrics["policy/clip_fraction_high"] == (is_clipped, 2)


def test_overlong_penalty_by_hand():
    """With a limit of 48 and a buffer of 8 it falls from 0 at 40 to -1 at 48."""
    lengths = torch.tensor([0, 39, 40, 41, 44, 48])
    assert dapo.overlong_penalty(lengths, 48, 8).tolist() == [0, 0, 0, -0.125, -0.5, -1]
    assert (dapo.overlong_penalty(lengths, 48, 0) == 0).all()


def test_has_signal():
    rewards = tensor([1, 1, 0, 0, 1, 0, 0, 1])
    assert dapo.has_signal(rewards, 2).tolist() == [False, False, True, True]


def test_where_the_clip_stops_the_gradient():
    helpers.check_clip(dapo)


# ---- other libraries' numbers


@pytest.mark.parametrize("case", helpers.cases_of("dapo_trl", beta=0))
def test_loss_and_gradient_are_those_of_trl(case):
    helpers.check_loss_of_others(dapo, case, per_token=True)


def test_overlong_penalty_is_that_of_others():
    [case] = read_oracle("dapo_overlong")
    lengths = tensor(case["inputs"]["lengths"])
    limit = case["config"]["L_max"]
    penalty = dapo.overlong_penalty(lengths, limit, case["config"]["L_cache"])
    assert_close(penalty, tensor(case["outputs"]["trl"]))
    within = lengths <= limit  # verl's goes on falling past the limit, which no completion passes
    assert_close(penalty[within], tensor(case["outputs"]["verl"])[within])


# ---- the exact gradient


def test_expected_gradient_of_groups_of_two():
    helpers.check_gradient_of_groups_of_two(dapo, over_lengths=False)


# ---- invariances and a short run


@each_invariance
def test_what_does_not_matter(check):
    check(dapo)


def test_advantages_are_centred_and_0_without_a_difference():
    helpers.check_advantages(dapo.compute_advantages)


def test_a_short_run_in_bfloat16_learns(tmp_path):
    """Eight steps of a large learning rate raise accuracy and length; test_grpo.py has a run in float32."""
    sizes = {"num_steps": 8, "prompts_per_step": 6, "minibatch_size": 24, "max_completion_length": 40, "seed": 1}
    evaluation = {"eval_every": 8, "eval_prompts": 24, "save_every": 8, "precision": "bfloat16"}
    lines = helpers.train(dapo, tmp_path / "run", learning_rate=6e-4, warmup_steps=2, **sizes, **evaluation)
    assert [line["step"] for line in lines] == list(range(9))
    assert lines[-1]["eval/accuracy"] > lines[0]["eval/accuracy"] + 0.25
    lengths = [line["rollout/length_mean"] for line in lines[1:]]
    assert sum(lengths[-3:]) > sum(lengths[:3]) + 6
    for line in lines[1:]:
        assert all(math.isfinite(value) for value in line.values())
        assert line["optim/grad_norm"] > 0
        assert line["policy/approx_kl"] > 0  # the second minibatch is off-policy
        assert 0 < line["policy/sampler_kl"] < 1e-3
    assert min(shares_changed(tmp_path / "run" / "checkpoint")) > 0.5  # rows of unused tokens stay


# ---- rounds of dynamic sampling, with scripted completions

ROWS = make_rows(10)
SIZES = dapo_ranks.SETTINGS | {"prompts_per_step": 3, "minibatch_size": 12, "system_prompt": ""}
# Groups of every round (mixed, solved, not solved), and which are kept, of three that are wanted.
ROUNDS = {
    "first round is enough": ("mmm", [0, 1, 2]),
    "refilled twice, surplus dropped": ("msn nms mmm", [0, 4, 6]),
    "cap reached with too few": ("nsm sss nnm", [2, 8]),
    "cap reached without any": ("sss nnn sns", []),
    "full in the last round": ("sns nmn smm", [4, 7, 8]),
}


def script(monkeypatch, groups, place=0):
    """Sample groups of these letters; return the list that fills with the prompts of each round."""
    rounds = []
    monkeypatch.setattr(dapo, "generate", scripted_generate(assign(ROWS, groups, place), rounds))
    return rounds


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("place", [0, 5])
@pytest.mark.parametrize("name", ROUNDS)
def test_first_groups_with_signal_are_kept_in_order(monkeypatch, name, place):
    """Of rounds with prompts of different lengths, which are padded on the left to one width."""
    letters, expected = ROUNDS[name]
    groups = letters.replace(" ", "")
    rounds = script(monkeypatch, groups, place)
    model, tokenizer = load(dapo, TINY)
    args = dapo.Args(**SIZES)
    prompts = [dapo.read_row(row, args, tokenizer)[0] for row in ROWS]
    policy = dapo.LogprobModel(model)
    batch, texts, repeated, rewards, kept = dapo.sample_groups(policy, tokenizer, prompts, place, args, [])
    sampled = dapo.pick_rows(prompts, place, len(groups), 1)
    assert len(rounds) == len(letters.split())
    assert sum(rounds, []) == [prompt["prompt"] for prompt in sampled]
    assert repeated == [prompt for prompt in sampled for _ in range(GROUP_SIZE)]
    found = kept.view(-1, GROUP_SIZE)
    assert (found[:, 0] // GROUP_SIZE).tolist() == expected
    assert (found.diff(dim=1) == 1).all()
    kinds = [KINDS[kind] for group in groups for kind in dapo_ranks.GROUPS[group]]
    lengths = batch["completion_mask"].sum(1)
    assert rewards == [is_correct for is_correct, _ in kinds]
    assert lengths.tolist() == [length for _, length in kinds]
    assert len(texts) == len(kinds)
    for prompt, ids, mask in zip(repeated, batch["prompt_ids"], batch["prompt_mask"]):
        assert ids[mask == 1].tolist() == prompt["prompt_ids"]
        assert (mask.diff() >= 0).all()


# ---- whole steps


def train(folder, num_steps=1, **settings):
    """Run main and return its lines of metrics."""
    dataset = write_jsonl(folder / "prompts.jsonl", ROWS)
    settings = SIZES | {"num_steps": num_steps} | settings
    dapo.main(parse(dapo, dataset=dataset, run_dir=folder / "run", **settings))
    return read_jsonl(folder / "run" / "metrics.jsonl")


def test_step_without_any_signal_changes_nothing(tmp_path, monkeypatch):
    script(monkeypatch, "snnssnnns")
    [line] = train(tmp_path, minibatch_size=6)
    assert line["rollout/rounds"] == 3
    assert line["rollout/groups"] == 0
    assert line["reward/mean"] == pytest.approx(4 / 9)
    assert line["optim/grad_norm"] == line["loss/policy"] == 0
    assert all(math.isfinite(value) for value in line.values())
    assert max(shares_changed(tmp_path / "run" / "checkpoint")) == 0


def test_prompts_are_consumed_in_order_without_gaps_or_repeats(tmp_path, monkeypatch):
    rounds = script(monkeypatch, "msmnmssnmm")
    lines = train(tmp_path, num_steps=4, seed=1)
    consumed = 0
    for line in lines:
        consumed += 3 * line["rollout/rounds"]
        assert line["rollout/prompts_consumed"] == consumed
    assert consumed > 2 * len(ROWS)  # over the ends of two passes
    picked = dapo.pick_rows(ROWS, 0, consumed, 1)
    assert sum(rounds, []) == [row["prompt"] for row in picked]


def test_at_the_cap_it_trains_on_the_groups_found(tmp_path, monkeypatch):
    """As a mean over the tokens of these groups alone."""
    script(monkeypatch, ["s", "n", "rwwR", "s", "hwWr", "n"])
    calls = record(monkeypatch, dapo, "accumulate_gradients")
    [line] = train(tmp_path, max_rounds=2)
    [((_, batch, indices, divisor, *_), _)] = calls
    assert line["rollout/groups"] == line["rollout/rounds"] == 2
    assert sorted(indices.tolist()) == [8, 9, 10, 11, 16, 17, 18, 19]
    assert divisor == (8 + 7 + 7 + 16) + (12 + 7 + 16 + 8)
    rewards = torch.tensor([1.0, -1.0, -1.0, 0.0, 0.5, -1.0, -2.0, 1.0])
    expected = dapo.compute_advantages(rewards, GROUP_SIZE)
    assert_close(batch["advantages"][indices.sort().values], expected)


def test_advantages_have_the_mapped_reward_and_the_metrics_the_rules(tmp_path, monkeypatch):
    script(monkeypatch, ["rwhR", "Wwrr", "wwWh"])
    calls = record(monkeypatch, dapo, "compute_advantages")
    [line] = train(tmp_path)
    [((rewards, group_size), _)] = calls
    # +1 or -1, less a half for half of the buffer, less 1 at the limit
    assert rewards[:4].tolist() == [1.0, -1.0, 0.5, 0.0]
    assert rewards[4:8].tolist() == [-2.0, -1.0, 1.0, 1.0]
    assert rewards[8:].tolist() == [-1.0, -1.0, -2.0, 0.5]
    assert group_size == GROUP_SIZE
    assert line["reward/mean"] == pytest.approx(6 / 12)


def test_tokens_of_zero_advantage_count_in_the_divisor(tmp_path, monkeypatch):
    """Right at the limit is reward 0, in these groups the mean: no gradient, but 16 tokens."""
    script(monkeypatch, ["rwRR"] * 3)
    calls = record(monkeypatch, dapo, "accumulate_gradients")
    [line] = train(tmp_path)
    [((_, _, indices, divisor, *_), collected)] = calls
    assert sorted(indices.tolist()) == [0, 1, 4, 5, 8, 9]
    assert divisor == 3 * (8 + 7 + 16 + 16)
    metrics = add_pairs(collected)
    _, num_tokens = metrics["policy/entropy"]
    assert num_tokens == 3 * (8 + 7)
    total, count = metrics["loss/policy"]
    assert count == divisor
    assert line["loss/policy"] == pytest.approx(total / divisor)


def test_every_minibatch_is_divided_by_its_own_tokens(tmp_path, monkeypatch):
    script(monkeypatch, ["rwwh", "Rwhr", "hwww"])
    calls = record(monkeypatch, dapo, "accumulate_gradients")
    train(tmp_path, minibatch_size=4)
    seen = []
    divisors = set()
    for (_, batch, indices, divisor, *_), _ in calls:
        assert divisor == batch["completion_mask"][indices].sum()
        divisors.add(divisor)
        seen += indices.tolist()
    assert sorted(seen) == list(range(12))
    assert len(divisors) > 1


def test_the_overlong_buffer_is_a_fifth_of_the_limit_by_default(tmp_path, monkeypatch):
    """As in section 4.1, whatever --max-completion-length is."""
    calls = record(monkeypatch, dapo, "overlong_penalty")
    train(tmp_path, max_completion_length=48, overlong_buffer=None, max_rounds=1)
    [((_, *settings), _)] = calls
    assert settings == [48, 9]


def test_a_resumed_run_goes_on_with_the_prompts_after_those_of_its_state(tmp_path):
    """The count is part of the saved state: the log may be edited, or moved away."""
    *_, last = train(tmp_path, num_steps=2, save_every=1)
    log = tmp_path / "run" / "metrics.jsonl"
    log.write_text('{"step": 2, "rollout/prompts_consumed": 999}\n')
    dapo.main(parse(dapo, resume=tmp_path / "run", num_steps=3))
    *_, resumed = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    consumed = resumed["rollout/prompts_consumed"] - last["rollout/prompts_consumed"]
    assert consumed == 3 * resumed["rollout/rounds"]


# ---- two processes


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The folder with what dapo_ranks.py leaves on each of two ranks."""
    folder = tmp_path_factory.mktemp("dapo_ranks")
    write_jsonl(folder / "prompts.jsonl", make_rows(36))
    run_on_ranks("dapo_ranks.py", folder)
    return folder


def test_ranks_stop_after_the_same_round_and_share_the_prompts_of_each(two_ranks):
    rounds = [torch.load(two_ranks / f"{rank}.pt") for rank in (0, 1)]
    assert len(rounds[0]) == len(rounds[1]) == 9
    picked = [row["prompt"] for row in dapo.pick_rows(make_rows(36), 0, 36, 1)]
    assert sum(rounds[0], []) == picked[0::2]
    assert sum(rounds[1], []) == picked[1::2]
    lines = read_jsonl(two_ranks / "two" / "metrics.jsonl")
    assert [line["rollout/rounds"] for line in lines] == [3, 3, 3]
    assert [line["rollout/groups"] for line in lines] == [4, 3, 1]
    assert [line["rollout/prompts_consumed"] for line in lines] == [12, 24, 36]


def test_two_ranks_train_as_one(two_ranks, monkeypatch):
    """The groups of STEPS that two ranks find are those that one process finds."""
    monkeypatch.setattr(dapo, "generate", dapo.generate)  # run assigns it
    dapo_ranks.run(two_ranks, two_ranks / "one")
    found = logged(two_ranks / "two")
    alone = logged(two_ranks / "one")
    for line, expected in zip(found, alone, strict=True):
        assert line == pytest.approx(expected, rel=1e-3, abs=1e-6)
