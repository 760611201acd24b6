"""DPO's objective: python -m pytest tests/test_dpo.py"""

import math

import pytest
import torch
from helpers import pair_results, random_pairs, read_oracle, sigmoid, tensor

import dpo
import reward_model

KINDS = ("chosen", "rejected")


# ---- by hand


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_by_hand(smoothing):
    """h is 1 and -3, β is 0.5."""
    inputs = [tensor(x) for x in ([-3.0, -5.0], [-4.0, -4.0], [-4.0, -4.0], [-4.0, -6.0])]
    loss, chosen, rejected, metrics = pair_results(dpo, inputs, label_smoothing=smoothing)
    right = math.log(1 + math.exp(-0.5)) + math.log(1 + math.exp(1.5))
    wrong = math.log(1 + math.exp(0.5)) + math.log(1 + math.exp(-1.5))
    expected = (1 - smoothing) * right + smoothing * wrong
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    gradient = [0.5 * ((1 - smoothing) * sigmoid(-m) - smoothing * sigmoid(m)) for m in (0.5, -1.5)]
    torch.testing.assert_close((chosen, rejected), (-tensor(gradient), tensor(gradient)), rtol=1e-12, atol=0)
    expected = {"loss/preference": expected, "pair/accuracy": 1, "pair/margin": -1.0}
    expected |= {"pair/chosen_reward": 0.0, "pair/rejected_reward": 1.0}
    expected |= {"pair/chosen_log_ratio": 0.0, "pair/rejected_log_ratio": 2.0}
    assert {key: value.item() for key, value in metrics.items()} == pytest.approx(expected, rel=1e-12)


# ---- other libraries' numbers


DPO_CASES = [case for case in read_oracle("dpo_eric_mitchell") if not case["config"]["ipo"]]  # IPO is another loss
assert {case["config"]["label_smoothing"] for case in DPO_CASES} == {0.0, 0.1}


@pytest.mark.parametrize("case", DPO_CASES, ids=lambda case: case["name"])
def test_loss_is_that_of_its_authors(case):
    names = [f"{model}_{kind}_logps" for model in ("policy", "reference") for kind in KINDS]
    inputs, outputs, config = [tensor(case["inputs"][name]) for name in names], case["outputs"], case["config"]
    settings = {"beta": config["beta"], "label_smoothing": config["label_smoothing"]}
    loss, chosen, rejected, metrics = pair_results(dpo, inputs, **settings)
    count = len(chosen)
    assert (loss / count).item() == pytest.approx(outputs["loss"], rel=1e-9)
    torch.testing.assert_close(chosen / count, tensor(outputs["grad_chosen"]), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(rejected / count, tensor(outputs["grad_rejected"]), rtol=1e-9, atol=1e-12)
    for kind in KINDS:
        assert metrics[f"pair/{kind}_reward"].item() == pytest.approx(sum(outputs[f"{kind}_rewards"]), rel=1e-9)
    for i in range(count):
        alone, *_ = pair_results(dpo, [x[i : i + 1] for x in inputs], **settings)
        assert alone.item() == pytest.approx(outputs["losses"][i], rel=1e-9)


@pytest.mark.parametrize("case", read_oracle("dpo_trl"), ids=lambda case: case["name"])
def test_loss_is_that_of_trl(case):
    """Of log-probabilities of tokens, which are summed over the completion."""
    assert case["config"]["loss_type"] == "sigmoid" and case["config"]["label_smoothing"] == 0
    logprobs, ref_logprobs, mask = (tensor(case["inputs"][key]) for key in ("logp", "ref_logp", "mask"))
    logprobs.requires_grad_()
    sums = [part for x in (logprobs, ref_logprobs) for part in (x * mask).sum(1).chunk(2)]
    loss, metrics = dpo.preference_loss(*sums, case["config"]["beta"], 0.0)
    count, expected = len(sums[0]), case["outputs"]["metrics"]
    (loss / count).backward()
    assert (loss / count).item() == pytest.approx(case["outputs"]["loss"], rel=1e-9)
    torch.testing.assert_close(logprobs.grad, tensor(case["outputs"]["grad_logp"]), rtol=1e-9, atol=1e-12)
    for ours, theirs in (("chosen_reward", "chosen"), ("rejected_reward", "rejected"), ("margin", "margins")):
        assert (metrics[f"pair/{ours}"] / count).item() == pytest.approx(expected[f"rewards/{theirs}"], rel=1e-9)
    assert (metrics["pair/accuracy"] / count).item() == pytest.approx(expected["rewards/accuracies"], rel=1e-6)


# ---- identities


def test_policy_that_is_the_reference_has_log_2():
    chosen, rejected, *_ = random_pairs(dpo)
    loss, chosen_gradient, rejected_gradient, metrics = pair_results(dpo, [chosen, rejected] * 2, beta=0.3)
    assert loss.item() == pytest.approx(6 * math.log(2), rel=1e-12)
    assert chosen_gradient.tolist() == pytest.approx([-0.15] * 6)
    assert rejected_gradient.tolist() == pytest.approx([0.15] * 6)
    assert metrics["pair/accuracy"] == 0 and metrics["pair/margin"] == 0


def test_it_is_the_reward_model_of_its_implied_rewards():
    chosen, rejected, ref_chosen, ref_rejected = inputs = random_pairs(dpo)
    loss, chosen_gradient, *_ = pair_results(dpo, inputs, beta=0.3)
    expected = pair_results(reward_model, (0.3 * (chosen - ref_chosen), 0.3 * (rejected - ref_rejected)))
    torch.testing.assert_close((loss, chosen_gradient), (expected[0], 0.3 * expected[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_margins_stay_finite_and_float32_agrees(dtype):
    """A margin of 900, and of -900: the loss is 0, and 900."""
    inputs = [tensor([900.0, -900.0], dtype), *[tensor([0.0, 0.0], dtype)] * 3]
    loss, chosen, rejected, _ = pair_results(dpo, inputs, beta=1.0)
    assert loss.item() == 900 and loss.dtype == dtype
    assert chosen.tolist() == [0.0, -1.0] and rejected.tolist() == [0.0, 1.0]
    actual, expected = (pair_results(dpo, random_pairs(dpo, used)) for used in (dtype, torch.float64))
    assert actual[0].dtype == actual[1].dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, check_dtype=False)
