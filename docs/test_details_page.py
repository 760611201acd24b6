"""Tests of docs/details.py: its sums are exact, and docs/details.md has its numbers."""

import json
import re

import details
import pytest
import torch

import grpo

DATA = json.loads(details.DATA.read_text(encoding="utf-8"))
PAGE = details.PAGE.read_text(encoding="utf-8")
NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+")


@pytest.fixture(scope="module")
def situations():
    return details.situations()


@pytest.fixture(scope="module")
def computed(situations):
    return details.compute(situations)


def test_completions_are_all_there_are_and_scores_are_gradients(situations):
    assert len(set(details.COMPLETIONS)) == len(details.COMPLETIONS) == 1093
    for at in situations.values():
        assert at.chances.sum().item() == pytest.approx(1, rel=1e-12)
        expected = (details.probabilities(details.next_logits(at.policy.model).log_softmax(-1)) * details.REWARDS).sum()
        direct = details.flat_gradient(expected, at.policy.model)
        torch.testing.assert_close(details.true_gradient(at), direct, rtol=1e-9, atol=1e-12)


def test_groups_are_all_there_are_and_their_mean_takes_an_eighth_of_the_gradient(situations):
    at = situations["trained"]
    assert details.Groups(8, at.chances).weights.sum().item() == pytest.approx(1, rel=1e-9)
    [(target, found)] = [found for detail, *found in details.of_groups(at) if detail == "G05"]
    for name, factor in (("A", 7 / 8), ("B", 1)):
        torch.testing.assert_close(found[name], factor * target, rtol=1e-9, atol=1e-12)


def test_a_batch_in_two_parts_with_one_divisor_is_the_batch(situations):
    """Of six completions, the parts of three are summed over pairs of groups, the whole over its own groups."""
    at = situations["start"]
    whole = details.Groups(2 * details.HALF, at.chances)
    expected = whole.coefficients(whole.centred / (whole.counts @ whole.length).unsqueeze(1))
    torch.testing.assert_close(details.halves(at)["A"], expected, rtol=1e-9, atol=1e-12)


def test_our_variants_are_what_our_loss_does(situations):
    """grpo.policy_loss on all completions: the mean per completion, k3 as the KL term, and a capped weight of both."""
    at = situations["rounds"]
    logprobs = details.at_tokens(at.policy.logprobs).requires_grad_()
    sampler, reference = (details.at_tokens(values) for values in (at.sampler, at.reference))
    advantages = details.baseline(at)
    inputs = (logprobs, logprobs.detach(), sampler, reference, advantages.squeeze(1), details.MASK.bool())
    loss, _ = grpo.policy_loss(*inputs, clip_eps=0.2, kl_coef=0.5, sampler_weight_cap=2.0)
    [slopes] = torch.autograd.grad(loss, logprobs)
    weight = details.weights_of(at).clamp(max=2)
    k3 = 1 - details.at_tokens(at.reference - at.policy.logprobs).exp()
    expected = -weight * (advantages - 0.5 * k3) / details.LENGTHS.unsqueeze(1) * details.MASK
    torch.testing.assert_close(slopes, expected, rtol=1e-9, atol=1e-12)


def test_the_tables_have_the_numbers_that_are_computed(computed):
    expected = details.render(computed)
    assert NUMBER.sub("", PAGE) == NUMBER.sub("", expected), "python docs/details.py"
    for found, number in zip(NUMBER.findall(PAGE), NUMBER.findall(expected), strict=True):
        assert float(found) == pytest.approx(float(number), abs=0.0101)  # of the last digit


def test_the_introduction_lists_the_lowest_cosines_of_variants_that_somebody_has(computed, situations):
    introduction, lowest = PAGE.partition(details.MARK)[0], []
    for row in DATA["details"]:
        used = {place["variant"] for place in row["cells"] + row["ours"]}
        lowest.append((min(computed[row["id"]][key]["trained"][1] for key in used), row["title"]))
    listed = re.findall(r"^\d+\. .*\[(-?[\d.]+)\]\(#([\w-]+)\)", introduction, re.M)
    assert len(listed) >= 5
    for (number, anchor), (cosine, title) in zip(listed, sorted(lowest)):
        assert float(number) == pytest.approx(cosine, abs=0.00101)
        assert anchor == re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
    for name in ("start", "trained"):
        assert f"{situations[name].own @ details.REWARDS:.2f}" in introduction


def test_every_detail_has_a_number_or_a_reason():
    rows = DATA["details"] + DATA["undecided"]
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(row["why"] and row["ours"] for row in DATA["undecided"])
    for row in rows:
        assert {cell["variant"] for cell in row["cells"]} <= row["variants"].keys()
