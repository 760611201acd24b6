import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from grpo import compute_advantages, policy_loss

ORACLE = Path(__file__).parent / "oracle"  # numbers of other people's code, float64; each file names its source


def read_oracle(name):
    return json.loads((ORACLE / f"{name}.json").read_text())["cases"]


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def gradient_of(loss_fn, logprobs):
    logprobs = logprobs.detach().clone().requires_grad_()
    loss, metrics = loss_fn(logprobs)
    loss.backward()
    return loss.detach(), logprobs.grad, metrics


def random_inputs(seed=0, dtype=torch.float64):
    """Six completions of 1 to 5 tokens, of two groups; a third of the ratios are outside the clip range."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, noise, ref_noise = torch.randn(3, 6, 5, generator=generator, dtype=torch.float64)
    return {
        "logprobs": (logprobs - 2).to(dtype),
        "old_logprobs": (logprobs - 2 + 0.3 * noise).to(dtype),
        "ref_logprobs": (logprobs - 2 + ref_noise).to(dtype),
        "advantages": tensor([0.5, -1.5, 1.0, 1.1, -0.2, -0.9], dtype),
        "completion_mask": torch.arange(5) < torch.tensor([[5], [1], [3], [2], [4], [5]]),
        "clip_eps": 0.2,
        "kl_coef": 0.04,
    }


def loss_and_gradient(inputs, **changes):
    inputs = inputs | changes
    return gradient_of(lambda logprobs: policy_loss(**inputs | {"logprobs": logprobs}), inputs["logprobs"])


# ---- by hand


def test_advantages_by_hand():
    advantages = compute_advantages(tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]), 4)
    half, quarter = 0.5 / (math.sqrt(1 / 3) + 1e-4), 0.25 / (0.5 + 1e-4)
    expected = tensor([half, -half, -half, half, 3 * quarter, -quarter, -quarter, -quarter])
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=0)


@pytest.fixture
def hand_inputs():
    """Ratios 1.5, 2, 0.5 at advantage 2 and 1.5, 0.5, 1 at advantage -1; the last column is padding."""
    ratios = tensor([[1.5, 2.0, 0.5, 9.0], [1.5, 0.5, 1.0, 9.0]])
    ref_ratios = tensor([[2.0, 0.5, 1.0, 9.0], [1.0, 1.0, math.e, 9.0]])  # reference over policy
    logprobs = tensor([[-1.0, -2.0, -3.0, -4.0], [-0.5, -1.5, -2.5, -3.5]])
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs - ratios.log(),
        "ref_logprobs": logprobs + ref_ratios.log(),
        "advantages": tensor([2.0, -1.0]),
        "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]]),
        "clip_eps": 0.2,
        "kl_coef": 0.1,
    }


def test_loss_gradient_and_metrics_by_hand(hand_inputs):
    policy = tensor([[0.0, 0.0, -2 * 0.5, 0.0], [1.5, 0.0, 1.0, 0.0]]) / 3
    kl = tensor([[1 - 2.0, 1 - 0.5, 0.0, 0.0], [0.0, 0.0, 1 - math.e, 0.0]]) / 3
    loss, gradient, metrics = loss_and_gradient(hand_inputs)
    torch.testing.assert_close(gradient, policy + 0.1 * kl, rtol=1e-12, atol=1e-15)
    expected = {
        "loss/policy": (-2.4 - 2.4 - 1.0) / 3 + (1.5 + 0.8 + 1.0) / 3,
        "loss/kl": 0.1 * ((1 - math.log(2)) + (math.log(2) - 0.5) + math.e - 2) / 3,
        "policy/approx_kl": (0.5 - math.log(1.5)) * 2 + (math.log(2) - 0.5) * 2 + (1 - math.log(2)),
        "policy/ref_kl": 0.5 + math.e - 2,
        "policy/clip_fraction_low": 1,
        "policy/clip_fraction_high": 2,
    }
    assert {key: value.item() for key, value in metrics.items()} == pytest.approx(expected, rel=1e-12)
    assert loss.item() == pytest.approx(expected["loss/policy"] + expected["loss/kl"], rel=1e-12)
    assert not any(value.requires_grad or value.ndim for value in metrics.values())


# ---- the loss against other people's code


def loss_cases():
    for name, coef, rtol in [
        ("grpo_trl", "beta", 1e-9),
        ("grpo_oat", "beta", 1e-9),
        ("grpo_verl", "kl_loss_coef", 1e-6),  # adds 1e-8 to its denominators
    ]:
        for case in read_oracle(name):
            if case["config"].get("clip_ratio_c", 1e9) == 1e9:  # others of verl's have a second clip
                yield pytest.param(case, case["config"][coef], rtol, id=f"{name}-{case['name']}")


@pytest.mark.parametrize("case, kl_coef, rtol", loss_cases())
def test_loss_and_gradient_are_those_of_others(case, kl_coef, rtol):
    inputs = {key: tensor(values) for key, values in case["inputs"].items() if isinstance(values, list)}
    advantages = inputs["advantages"] if inputs["advantages"].ndim == 1 else inputs["advantages"][:, 0]
    rows = len(inputs["logp"])
    loss, gradient, _ = gradient_of(
        lambda logprobs: policy_loss(
            logprobs, inputs["old_logp"], inputs["ref_logp"], advantages, inputs["mask"], 0.2, kl_coef
        ),
        inputs["logp"],
    )
    assert (loss / rows).item() == pytest.approx(case["outputs"]["loss"], rel=rtol, abs=rtol)
    torch.testing.assert_close(gradient / rows, tensor(case["outputs"]["grad_logp"]), rtol=rtol, atol=rtol / 100)


@pytest.mark.parametrize("peer", ["verl", "open_instruct"])
def test_k3_is_that_of_others(peer):
    [case] = read_oracle("kl")
    logprobs, ref_logprobs = tensor(case["inputs"]["logp"]), tensor(case["inputs"]["ref_logp"])

    def k3(logprobs, ref_logprobs):
        loss, _ = policy_loss(logprobs, logprobs.detach(), ref_logprobs, tensor([0.0]), torch.ones(1, 1), 0.2, 1.0)
        return loss, None

    for row, column in itertools.product(range(logprobs.shape[0]), range(logprobs.shape[1])):
        place = slice(row, row + 1), slice(column, column + 1)
        value, gradient, _ = gradient_of(lambda x, place=place: k3(x, ref_logprobs[place]), logprobs[place])
        assert value.item() == pytest.approx(case["outputs"][f"{peer}_k3"][row][column], rel=1e-9)
        assert gradient.item() == pytest.approx(case["outputs"][f"{peer}_k3_grad"][row][column], rel=1e-9)


# ---- the KL term


def test_kl_coef_0_needs_no_reference():
    loss, gradient, metrics = loss_and_gradient(random_inputs(), kl_coef=0.0)
    without = loss_and_gradient(random_inputs(), kl_coef=0.0, ref_logprobs=None)
    assert torch.equal(without[0], loss) and torch.equal(without[1], gradient)
    assert metrics.keys() - without[2].keys() == {"policy/ref_kl"}
    assert "loss/kl" not in metrics


def test_k3_is_positive_and_has_the_right_direction():
    """Far from 1 the two directions differ: ρ - log ρ - 1 with ρ = reference over policy."""
    for log_ratio in (-20.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 5.0):  # of policy over reference
        logprobs, ones = tensor([[-1.0]]), torch.ones(1, 1)
        _, metrics = policy_loss(logprobs, logprobs, logprobs - log_ratio, tensor([0.0]), ones, 0.2, 1.0)
        k3 = metrics["policy/ref_kl"].item()
        assert k3 == pytest.approx(math.expm1(-log_ratio) + log_ratio, rel=1e-9) and (k3 > 0) == (log_ratio != 0)
