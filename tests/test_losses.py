import itertools
import json
import math
from pathlib import Path

import pytest
import torch

import grpo
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


# ---- advantages


def test_advantages_by_hand():
    advantages = compute_advantages(tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]), 4)
    half, quarter = 0.5 / (math.sqrt(1 / 3) + 1e-4), 0.25 / (0.5 + 1e-4)
    expected = tensor([half, -half, -half, half, 3 * quarter, -quarter, -quarter, -quarter])
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("case", read_oracle("advantages"), ids=lambda case: case["name"])
def test_advantages_are_those_of_trl(case):
    rewards = tensor(case["inputs"]["rewards"])
    advantages = compute_advantages(rewards.view(-1), rewards.shape[1])
    torch.testing.assert_close(advantages, tensor(case["outputs"]["trl_group"]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 1.0])
def test_equal_rewards_have_advantage_exactly_0(reward, dtype):
    assert compute_advantages(tensor([reward] * 8 + [1.0, 0.0] * 4, dtype), 8)[:8].tolist() == [0.0] * 8


def test_group_of_one_has_advantage_0():
    assert compute_advantages(tensor([0.3, 1.0, -2.0]), 1).tolist() == [0.0, 0.0, 0.0]


def test_advantages_ignore_shift_and_scale_of_rewards():
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    advantages = compute_advantages(rewards, 4)
    shift = tensor([5.0, -3.0, 100.0]).repeat_interleave(4)
    torch.testing.assert_close(compute_advantages(rewards + shift, 4), advantages, rtol=1e-9, atol=1e-12)
    # 1e-4 beside the standard deviation is all that a scale changes.
    torch.testing.assert_close(compute_advantages(1e4 * rewards, 4), advantages, rtol=1e-3, atol=0)
    torch.testing.assert_close(compute_advantages(1e8 * rewards, 4), compute_advantages(1e9 * rewards, 4))


def test_advantages_of_a_group_are_centred_and_bounded():
    rewards = tensor([float(bits) for group in itertools.product((0, 1), repeat=4) for bits in group])
    groups = compute_advantages(rewards, 4).view(-1, 4)
    assert groups.sum(1).abs().max() < 1e-12
    assert groups.abs().max() < 3 / math.sqrt(4)  # (G - 1) / sqrt(G)
    assert groups.abs().max() > 0.999 * 3 / math.sqrt(4)


def test_permuting_rewards_permutes_advantages():
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    advantages = compute_advantages(rewards, 4)
    order = torch.tensor([8, 10, 9, 11, 1, 0, 2, 3, 7, 6, 5, 4])  # groups among themselves, and inside each
    torch.testing.assert_close(compute_advantages(rewards[order], 4), advantages[order], rtol=1e-12, atol=1e-12)


# ---- the loss by hand


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


def test_loss_by_hand(hand_inputs):
    policy = (-2.4 - 2.4 - 1.0) / 3 + (1.5 + 0.8 + 1.0) / 3
    kl = ((1 - math.log(2)) + (math.log(2) - 0.5) + 0) / 3 + (0 + 0 + math.e - 2) / 3
    loss, _ = policy_loss(**hand_inputs)
    assert loss.item() == pytest.approx(policy + 0.1 * kl, rel=1e-12)


def test_gradient_by_hand(hand_inputs):
    policy = tensor([[0.0, 0.0, -2 * 0.5, 0.0], [1.5, 0.0, 1.0, 0.0]]) / 3
    kl = tensor([[1 - 2.0, 1 - 0.5, 0.0, 0.0], [0.0, 0.0, 1 - math.e, 0.0]]) / 3
    _, gradient, _ = loss_and_gradient(hand_inputs)
    torch.testing.assert_close(gradient, policy + 0.1 * kl, rtol=1e-12, atol=1e-15)


def test_metrics_by_hand(hand_inputs):
    _, metrics = policy_loss(**hand_inputs)
    assert {key: value.item() for key, value in metrics.items()} == pytest.approx(
        {
            "loss/policy": (-5.8 + 3.3) / 3,
            "loss/kl": 0.1 * (0.5 + math.e - 2) / 3,
            "policy/approx_kl": (0.5 - math.log(1.5)) * 2 + (math.log(2) - 0.5) * 2 + (1 - math.log(2)),
            "policy/ref_kl": 0.5 + math.e - 2,
            "policy/clip_fraction_low": 1,
            "policy/clip_fraction_high": 2,
            "policy/ratio_max": 2.0,
        },
        rel=1e-12,
    )
    assert not any(value.requires_grad or value.ndim for value in metrics.values())


@pytest.mark.parametrize(
    "advantage, ratio, gradient",
    [
        (1.0, 1.3, 0.0),  # clipped
        (-1.0, 0.7, 0.0),  # clipped
        (-2.0, 1.3, 2.6),  # too likely and bad: not clipped
        (-2.0, 9.0, 18.0),  # however far: no second clip
        (2.0, 0.7, -1.4),  # too unlikely and good: not clipped
        (2.0, 1.1, -2.2),
        (-2.0, 0.9, 1.8),
        (0.0, 1.1, 0.0),
        (0.0, 9.0, 0.0),
    ],
)
def test_where_the_clip_stops_the_gradient(advantage, ratio, gradient):
    old_logprobs = tensor([[-1.0, -2.0]])
    mask = torch.tensor([[1, 0]])
    _, actual, _ = gradient_of(
        lambda logprobs: policy_loss(logprobs, old_logprobs, None, tensor([advantage]), mask, 0.2, 0.0),
        old_logprobs + math.log(ratio),
    )
    torch.testing.assert_close(actual, tensor([[gradient, 0.0]]), rtol=1e-12, atol=0)


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


# ---- properties of the loss


@pytest.mark.parametrize("clip_eps", [1e-6, 0.2, 0.9])
def test_gradient_at_the_sampling_policy_is_that_of_reinforce(clip_eps):
    inputs = random_inputs()
    mask = inputs["completion_mask"].double()
    _, gradient, _ = loss_and_gradient(inputs, old_logprobs=inputs["logprobs"], kl_coef=0.0, clip_eps=clip_eps)
    torch.testing.assert_close(gradient, -inputs["advantages"][:, None] * mask / mask.sum(1, keepdim=True))


def test_group_of_equal_rewards_has_no_gradient_in_float32():
    advantages = compute_advantages(tensor([0.1] * 8, torch.float32), 8)[:6]
    _, gradient, _ = loss_and_gradient(random_inputs(dtype=torch.float32), advantages=advantages, kl_coef=0.0)
    assert (gradient == 0).all()


@pytest.mark.parametrize("garbage", [1e30, -1e30, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("names", [["logprobs"], ["old_logprobs"], ["ref_logprobs"], ["logprobs", "old_logprobs"]])
def test_masked_positions_do_not_matter(names, garbage):
    inputs = random_inputs()
    mask = inputs["completion_mask"]
    loss, gradient, metrics = loss_and_gradient(inputs)
    filled = {name: torch.where(mask, inputs[name], garbage) for name in names}
    filled_loss, filled_gradient, filled_metrics = loss_and_gradient(inputs, **filled)
    assert torch.equal(filled_loss, loss) and torch.equal(filled_gradient, gradient)
    assert filled_metrics == metrics
    assert (gradient[~mask] == 0).all() and (gradient[mask] != 0).any()


def test_padding_columns_do_not_matter():
    inputs = random_inputs()
    loss, gradient, metrics = loss_and_gradient(inputs)
    padded = {
        name: torch.cat([inputs[name], torch.full((6, 3), 7.0).to(inputs[name].dtype)], 1)
        for name in ("logprobs", "old_logprobs", "ref_logprobs")
    }
    mask = torch.cat([inputs["completion_mask"], torch.zeros(6, 3, dtype=torch.bool)], 1)
    padded_loss, padded_gradient, padded_metrics = loss_and_gradient(inputs, **padded, completion_mask=mask)
    torch.testing.assert_close(padded_loss, loss)
    torch.testing.assert_close(padded_gradient, torch.cat([gradient, torch.zeros(6, 3)], 1))
    torch.testing.assert_close(padded_metrics, metrics)


def test_row_without_tokens_counts_nothing():
    inputs = random_inputs()
    mask = inputs["completion_mask"].clone()
    mask[2] = False
    loss, gradient, _ = loss_and_gradient(inputs, completion_mask=mask)
    others = {key: value[[0, 1, 3, 4, 5]] for key, value in inputs.items() if torch.is_tensor(value)}
    torch.testing.assert_close(loss, policy_loss(**inputs | others)[0])
    assert (gradient[2] == 0).all()


def test_row_does_not_depend_on_other_rows():
    inputs = random_inputs()
    loss, gradient, metrics = loss_and_gradient(inputs)
    rows = [
        loss_and_gradient({key: value[[i]] if torch.is_tensor(value) else value for key, value in inputs.items()})
        for i in range(6)
    ]
    torch.testing.assert_close(sum(row[0] for row in rows), loss)
    torch.testing.assert_close(torch.cat([row[1] for row in rows]), gradient)
    for key in metrics.keys() - {"policy/ratio_max"}:
        torch.testing.assert_close(sum(row[2][key] for row in rows), metrics[key])


def test_permuting_groups_permutes_the_gradient():
    inputs = random_inputs()
    loss, gradient, metrics = loss_and_gradient(inputs)
    order = torch.tensor([3, 4, 5, 0, 1, 2])
    permuted = {key: value[order] for key, value in inputs.items() if torch.is_tensor(value)}
    permuted_loss, permuted_gradient, permuted_metrics = loss_and_gradient(inputs, **permuted)
    torch.testing.assert_close(permuted_loss, loss)
    torch.testing.assert_close(permuted_gradient, gradient[order])
    torch.testing.assert_close(permuted_metrics, metrics)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32, torch.float64])
def test_masks_of_every_type_are_equal(dtype):
    inputs = random_inputs()
    loss, gradient, metrics = loss_and_gradient(inputs)
    changed = loss_and_gradient(inputs, completion_mask=inputs["completion_mask"].to(dtype))
    assert torch.equal(changed[0], loss) and torch.equal(changed[1], gradient) and changed[2] == metrics


def test_float32_stays_float32_and_agrees():
    loss, gradient, metrics = loss_and_gradient(random_inputs(dtype=torch.float32))
    expected = loss_and_gradient(random_inputs())
    assert loss.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected[1], rtol=1e-5, atol=1e-6)
    assert float(metrics["policy/approx_kl"]) == pytest.approx(float(expected[2]["policy/approx_kl"]), rel=1e-4)


def test_inputs_stay_as_they_are():
    inputs = random_inputs()
    before = {key: value.clone() for key, value in inputs.items() if torch.is_tensor(value)}
    loss_and_gradient(inputs)
    rewards = tensor([1.0, 0.0, 0.0, 0.5, 0.5, 0.5])
    rewards_before = rewards.clone()
    compute_advantages(rewards, 3)
    assert torch.equal(rewards, rewards_before)
    assert all(torch.equal(inputs[key], value) for key, value in before.items())


def test_kl_coef_0_needs_no_reference():
    loss, gradient, metrics = loss_and_gradient(random_inputs(), kl_coef=0.0)
    without = loss_and_gradient(random_inputs(), kl_coef=0.0, ref_logprobs=None)
    assert torch.equal(without[0], loss) and torch.equal(without[1], gradient)
    assert metrics.keys() - without[2].keys() == {"policy/ref_kl"}
    assert "loss/kl" not in metrics


# ---- the KL term


def k3_of(log_ratio):
    """k3 of one token whose policy over reference has this logarithm."""
    logprobs = tensor([[-1.0]])
    _, metrics = policy_loss(logprobs, logprobs, logprobs - log_ratio, tensor([0.0]), torch.ones(1, 1), 0.2, 1.0)
    return metrics["policy/ref_kl"].item()


def test_k3_is_positive_and_0_only_where_equal():
    assert all(k3_of(log_ratio) > 0 for log_ratio in (-20.0, -1.0, -1e-3, 1e-3, 1.0, 20.0))
    assert k3_of(0.0) == 0


def test_k3_has_the_right_direction():
    """Far from 1 the two directions differ: ρ - log ρ - 1 with ρ = reference over policy."""
    assert k3_of(1.0) == pytest.approx(math.exp(-1), rel=1e-12)
    assert k3_of(-1.0) == pytest.approx(math.e - 2, rel=1e-12)
    assert k3_of(5.0) == pytest.approx(math.exp(-5) + 4, rel=1e-12)


def test_k3_in_the_loss_has_mean_kl():
    logits, ref_logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    logprobs, ref_logprobs = logits.log_softmax(0), ref_logits.log_softmax(0)
    mean = sum(
        p.exp() * policy_loss(p.view(1, 1), p.view(1, 1), q.view(1, 1), tensor([0.0]), torch.ones(1, 1), 0.2, 1.0)[0]
        for p, q in zip(logprobs, ref_logprobs)
    )
    kl = (logprobs.exp() * (logprobs - ref_logprobs)).sum()
    assert kl > 0.1
    torch.testing.assert_close(mean, kl, rtol=1e-12, atol=0)


def test_largest_ratio_is_that_of_the_tokens_not_of_the_padding():
    logprobs, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[1, 0]])
    _, metrics = grpo.policy_loss(logprobs, logprobs + 0.5, None, torch.ones(1), mask, 0.2, 0.0)
    assert metrics["policy/ratio_max"].item() == pytest.approx(0.60653066)


def test_metrics_add_up_and_maxima_stay_maxima():
    totals = {}
    for value in (2.0, math.inf, 1.0):
        grpo.add_metrics(totals, {"policy/ratio_max": torch.tensor(value), "loss/policy": torch.tensor(value)})
    assert totals == {"policy/ratio_max": math.inf, "loss/policy": math.inf}
