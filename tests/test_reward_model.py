"""The objective of a reward model: python -m pytest tests/test_reward_model.py"""

import math

import pytest
import torch
from helpers import pair_results, random_pairs, read_oracle, sigmoid, tensor

import reward_model

# ---- by hand


def test_loss_by_hand():
    loss, chosen, rejected, metrics = pair_results(reward_model, (tensor([1.0, 0.5, 2.0]), tensor([0.0, 1.0, 2.0])))
    expected = math.log(1 + math.exp(-1)) + math.log(1 + math.exp(0.5)) + math.log(2)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    gradient = tensor([sigmoid(-1), sigmoid(0.5), 0.5])
    torch.testing.assert_close((chosen, rejected), (-gradient, gradient), rtol=1e-12, atol=0)
    expected = {"loss/preference": expected, "pair/accuracy": 1, "pair/margin": 0.5}
    expected |= {"pair/chosen_score": 3.5, "pair/rejected_score": 3.0}
    assert {key: value.item() for key, value in metrics.items()} == pytest.approx(expected, rel=1e-12)


# ---- other libraries' numbers


def test_loss_is_that_of_trl():
    [case] = [case for case in read_oracle("rm_trl") if case["config"]["center_rewards_coefficient"] is None]
    loss, chosen, rejected, metrics = pair_results(reward_model, tensor(case["inputs"]["scores"]).chunk(2))
    count = len(chosen)
    assert (loss / count).item() == pytest.approx(case["outputs"]["loss"], rel=1e-9)
    gradient = torch.cat([chosen, rejected]) / count
    torch.testing.assert_close(gradient, tensor(case["outputs"]["grad_scores"]), rtol=1e-9, atol=1e-12)
    for name in ("accuracy", "margin"):
        assert (metrics[f"pair/{name}"] / count).item() == pytest.approx(case["outputs"]["metrics"][name], rel=1e-9)


# ---- extreme margins


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_margins_stay_finite_and_float32_agrees(dtype):
    """A margin of 900, and of -900: the loss is 0, and 900."""
    inputs = [tensor([900.0, -900.0], dtype), *[tensor([0.0, 0.0], dtype)]]
    loss, chosen, rejected, _ = pair_results(reward_model, inputs, beta=1.0)
    assert loss.item() == 900 and loss.dtype == dtype
    assert chosen.tolist() == [0.0, -1.0] and rejected.tolist() == [0.0, 1.0]
    actual, expected = (pair_results(reward_model, random_pairs(reward_model, used)) for used in (dtype, torch.float64))
    assert actual[0].dtype == actual[1].dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, check_dtype=False)
