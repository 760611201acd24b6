"""Tests of docs/details.py: its sums are exact, and docs/details.md has its numbers and links."""

import json
import math
import re

import pytest
import torch
from PIL import Image
from toy import ROOT, load_module

import grpo

details = load_module(ROOT / "docs" / "details.py")
DATA = json.loads(details.DATA.read_text(encoding="utf-8"))
PAGE = details.PAGE.read_text(encoding="utf-8")
NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+")


@pytest.fixture(scope="module")
def situations():
    return details.situations()


@pytest.fixture(scope="module")
def computed(situations):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(details, "situations", lambda: situations)  # which take seconds
        return details.compute()


def test_completions_are_all_there_are_and_scores_are_gradients(situations):
    assert len(set(details.COMPLETIONS)) == len(details.COMPLETIONS) == 1093
    for at in situations.values():
        assert at.chances.sum().item() == pytest.approx(1, rel=1e-12)
        expected = (details.probabilities(details.next_logits(at.policy.model).log_softmax(-1)) * details.REWARDS).sum()
        direct = details.flat_gradient(expected, at.policy.model)
        torch.testing.assert_close(details.true_gradient(at), direct, rtol=1e-9, atol=1e-12)


def test_groups_are_all_there_are_and_their_mean_takes_an_eighth_of_the_gradient(situations):
    at = situations["trained"]
    groups = details.Groups(8, at.types, at.chances)
    assert groups.weights.sum().item() == pytest.approx(1, rel=1e-9)
    found = details.own_reward(at)
    for name, factor in (("A", 7 / 8), ("B", 1)):
        gradient, target = found[name]
        torch.testing.assert_close(gradient, factor * target, rtol=1e-9, atol=1e-12)


def test_a_batch_in_two_parts_with_one_divisor_is_the_batch(situations):
    """Of six completions, the parts of three are summed over pairs of groups, the whole over its own groups."""
    at = situations["start"]
    whole = details.Groups(2 * details.HALF, at.types, at.chances)
    reward, length = (details.rows(values) for values in zip(*whole.names))
    tokens = (whole.counts * length).sum(1, keepdim=True)
    expected = whole.coefficients(details.centred(whole, reward) / tokens)
    torch.testing.assert_close(details.halves(at)["A"], expected, rtol=1e-9, atol=1e-12)


def test_our_variants_are_what_our_loss_does(situations):
    """grpo.policy_loss on all completions: the mean per completion, k3 as the KL term, and a capped weight of both."""
    at = situations["rounds"]
    mask = details.MASK.bool()
    logprobs = details.at_tokens(at.policy.logprobs).requires_grad_()
    sampler, reference = (details.at_tokens(values) for values in (at.sampler, at.reference))
    advantages = details.baseline(at).squeeze(1)
    inputs = (logprobs, logprobs.detach(), sampler, reference, advantages, mask)
    loss, _ = grpo.policy_loss(*inputs, clip_eps=0.2, kl_coef=0.5, sampler_weight_cap=2.0)
    [slopes] = torch.autograd.grad(loss, logprobs)
    weight = details.weights_of(at).clamp(max=2)
    k3 = 1 - details.at_tokens(at.reference - at.policy.logprobs).exp()
    expected = -weight * (details.baseline(at) - 0.5 * k3) / details.LENGTHS.unsqueeze(1) * details.MASK
    torch.testing.assert_close(slopes, expected, rtol=1e-9, atol=1e-12)


def test_the_page_has_the_numbers_that_are_computed(computed):
    expected = details.render(*computed)
    assert NUMBER.sub("", PAGE) == NUMBER.sub("", expected)
    for found, number in zip(NUMBER.findall(PAGE), NUMBER.findall(expected), strict=True):
        assert float(found) == pytest.approx(float(number), abs=0.0101)  # of the last digit


def test_the_picture_has_the_cosines_that_are_computed(computed):
    drawn = Image.open(details.PICTURE).info["drawn"]
    shown = eval(drawn, {"nan": math.nan})
    assert {detail for detail, _, _ in shown} >= {detail for detail, _, _ in details.TOP}
    for detail, variant, cosine in shown:
        assert cosine == pytest.approx(computed[0][detail][variant]["trained"][1], abs=0.0101, nan_ok=True)


def test_the_ten_are_the_lowest_cosines_of_variants_that_somebody_has(computed):
    lowest = {}
    for row in DATA["details"]:
        used = {place["variant"] for place in row["cells"] + row["ours"]}
        cosines = {key: computed[0][row["id"]][key]["trained"][1] for key in used & computed[0][row["id"]].keys()}
        key = min(cosines, key=cosines.get)
        lowest[row["id"], key] = cosines[key]
    assert sorted(lowest, key=lowest.get)[:10] == [(detail, variant) for detail, variant, _ in details.TOP]


def test_every_detail_has_a_number_or_a_reason_and_links_to_lines():
    rows = DATA["details"] + DATA["undecided"]
    assert len(rows) >= 36 and len({row["id"] for row in rows}) == len(rows)
    assert {row["id"] for row in DATA["details"]} == details.EXACT.keys()
    assert all(row["why"] and row["ours"] for row in DATA["undecided"])
    for row in rows:
        assert {cell["variant"] for cell in row["cells"]} <= row["variants"].keys()
        for cell in row["cells"]:
            assert cell["repo"] in DATA["snapshots"] and re.fullmatch(r"\d+(-\d+)?", cell["line"])
    assert len(PAGE.split()) <= 3500
    assert len(re.findall(r"/blob/[0-9a-f]{40}/[^)#]+#L\d+", PAGE)) == sum(len(row["cells"]) for row in rows)
