"""Dr. GRPO's objective: python -m pytest tests/test_dr_grpo.py"""

import helpers
import pytest
import torch
from helpers import cases_of, each_invariance, tensor, true_gradient
from tiny import few_rows, record, relative_error
from torch.testing import assert_close

import dr_grpo

# ---- by hand


def test_loss_gradient_and_metrics_by_hand():
    # Ratios are clipped to 0.8 .. 1.2: -min(r A, clip(r) A) for each token, over the constant 9, whatever the length.
    loss = (-2.4 - 2.4 - 1.0 + 1.5 + 0.8 + 1.0) / 9
    gradient = [[0, 0, -1 / 9, 0], [1.5 / 9, 0, 1 / 9, 0]]  # -r A where not clipped
    metrics = {"policy/approx_kl": helpers.APPROX_KL, "policy/clip_fraction_low": 1, "policy/clip_fraction_high": 2}
    helpers.check_by_hand(dr_grpo, loss, gradient, metrics, max_completion_length=9)


def test_advantages_by_hand():
    """Rewards less the mean of the group, not divided by its standard deviation."""
    advantages = dr_grpo.compute_advantages(tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]), 4)
    assert_close(advantages, tensor([0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5]))


def test_where_the_clip_stops_the_gradient():
    helpers.check_clip(dr_grpo)


# ---- other libraries' numbers


@pytest.mark.parametrize("case", cases_of("dr_grpo_oat", beta=0) + cases_of("dr_grpo_trl", beta=0))
def test_loss_and_gradient_are_those_of_others(case):
    helpers.check_loss_of_others(dr_grpo, case)


def test_advantages_are_those_of_oat():
    helpers.check_advantages_of_others(dr_grpo.compute_advantages, "oat_drgrpo", rtol=1e-9)


# ---- the exact gradient


def test_expected_gradient_of_groups_of_two():
    """The mean of the group contains the reward itself, which leaves (1 - 1/G) of the gradient, in its direction."""
    found = helpers.gradient_of_pairs(dr_grpo, dr_grpo.compute_advantages)
    assert relative_error(found, true_gradient() / 2 / 9) < 1e-9


# ---- invariances and short runs


@each_invariance
def test_what_does_not_matter(check):
    check(dr_grpo)


def test_advantages_are_centred_and_0_without_a_difference():
    helpers.check_advantages(dr_grpo.compute_advantages)


def test_truncated_completions_count_as_wrong(tmp_path, monkeypatch):
    """In the advantages only: reward/mean stays that of the rule, which here finds everything right."""
    monkeypatch.setattr(dr_grpo, "reward_fn", lambda _completion, _answer: 1.0)
    rollouts = record(monkeypatch, dr_grpo, "sample_completions")
    calls = record(monkeypatch, dr_grpo, "compute_advantages")
    sizes = {"prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "max_completion_length": 8}
    [line] = helpers.train(dr_grpo, tmp_path / "run", num_steps=1, eval_prompts=0, dataset=few_rows(tmp_path), **sizes)
    [(_, (batch, _texts))] = rollouts
    [((rewards, _group_size), _)] = calls
    truncated = batch["truncated"]
    assert truncated.any() and not truncated.all()
    assert torch.equal(rewards, 1.0 - truncated.float())
    assert line["reward/mean"] == line["reward/zero_std"] == 1
    assert line["reward/trained_mean"] == pytest.approx(1 - line["rollout/truncated"])
    assert line["optim/grad_norm"] > 0
