"""Losses and advantages of the scripts that sample, by hand, and what must not matter to them."""

import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close
from toy import NAMES, SCRIPTS, add_pairs, loss_and_gradient, policy_loss, tensor

import dapo
import dr_grpo
import grpo
import reinforce

CLIPPED = {"grpo": 1.2, "dr_grpo": 1.2, "grpo_process": 1.2, "dapo": 1.28, "gspo": 1.28}  # ratios, to 0.8 .. this
each_script = pytest.mark.parametrize("name", NAMES)


def k3(ratio):
    return ratio - 1 - math.log(ratio)


# ---- by hand: completions of three and two tokens, the first with a gap, after prompts and before padding

MASK = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 0, 0]])


def spread(values, elsewhere):
    """(B, L) of the five tokens' values."""
    return torch.full(MASK.shape, elsewhere, dtype=torch.float64).masked_scatter(MASK.bool(), tensor(values))


R1 = [1.5, 2.0, 0.5, 1.5, 0.5]  # the ratios r
W1 = [1.0, 0.5, 3.0, 1.5, 0.25]  # the weights w, before the cap of 2
RHO = [2.0, 0.5, 1.0, math.e, 1.0]  # the reference over the policy
LOGPROBS = spread([-1.0, -2.0, -3.0, -0.5, -1.5], -7.0)
OLD_LOGPROBS = LOGPROBS - spread(R1, 9.0).log()
INPUTS = {
    "logprobs": LOGPROBS,
    "old_logprobs": OLD_LOGPROBS,
    "sampler_logprobs": OLD_LOGPROBS - spread(W1, 9.0).log(),
    "ref_logprobs": LOGPROBS + spread(RHO, 9.0).log(),
    "advantages": tensor([2.0, -1.0]),
    "completion_mask": MASK,
    "kl_coef": 0.1,
}
S1, S2 = (1.5 * 2 * 0.5) ** (1 / 3), (1.5 * 0.5) ** (1 / 2)  # GSPO's ratios and weights, geometric means
V1, V2 = (1 * 0.5 * 3) ** (1 / 3), (1.5 * 0.25) ** (1 / 2)
REF_KL = k3(2) + k3(0.5) + k3(math.e)  # 0 at ρ = 1
# β = 0.1 times the terms w (ρ - log ρ - 1), and their derivatives w (1 - ρ)
KL = 0.1 * ((k3(2) + 0.5 * k3(0.5)) / 3 + 1.5 * k3(math.e) / 2)
KL_GRADIENT = [0.1 * -1 / 3, 0.1 * 0.25 / 3, 0.0, 0.1 * 1.5 * (1 - math.e) / 2, 0.0]
LOW, HIGH = "policy/clip_fraction_low", "policy/clip_fraction_high"
# {script: (loss, gradient of each token, numbers of clipped tokens)}
BY_HAND = {
    # -w A log π, and -w A; here w = π / π_sampler
    "reinforce": (2 * (1 + 0.5 * 2 + 2 * 3) - (1.5 * 0.5 + 0.25 * 1.5), [-2.0, -1.0, -4.0, 1.5, 0.25], {}),
    # w times -min(r A, clip(r) A), r clipped to 0.8 .. 1.2, is -2.4, -1.2, -2 and 2.25, 0.2; -w r A where not clipped
    "grpo": (
        -5.6 / 3 + 2.45 / 2 + KL,
        [a + b for a, b in zip([0.0, 0.0, -2 / 3, 2.25 / 2, 0.0], KL_GRADIENT)],
        {LOW: 1, HIGH: 2, "policy/ref_kl": REF_KL},
    ),
    "dr_grpo": ((-5.6 + 2.45) / 9, [0.0, 0.0, -2 / 9, 2.25 / 9, 0.0], {LOW: 1, HIGH: 2}),  # over the constant 9
    # clipped to 0.8 .. 1.28: -2.56, -1.28, -2 and 2.25, 0.2, all tokens alike
    "dapo": (-5.84 + 2.45, [0.0, 0.0, -2.0, 2.25, 0.0], {LOW: 1, HIGH: 2}),
    # -w s A, which is divided among its tokens
    "gspo": (-2 * V1 * S1 + V2 * S2, [-2 * V1 * S1 / 3] * 3 + [V2 * S2 / 2] * 2, {LOW: 0, HIGH: 0}),
    # -w min(r, 1.28) A log π, and the factor before log π, also where the ratio is capped
    "cispo": (
        2.56 * 1 + 1.28 * 2 + 2 * 3 - (1.92 * 0.5 + 0.125 * 1.5),
        [-2.56, -1.28, -2.0, 1.92, 0.125],
        {"policy/cap_fraction": 3},
    ),
    # with the advantages 2, -1, 3 and -1, 0: -2.4, 1, -3 and 2.25, 0
    "grpo_process": (
        -4.4 / 3 + 2.25 / 2 + KL,
        [a + b for a, b in zip([0.0, 1 / 3, -3 / 3, 2.25 / 2, 0.0], KL_GRADIENT)],
        {LOW: 0, HIGH: 1, "policy/ref_kl": REF_KL},
    ),
}


@each_script
def test_loss_gradient_and_metrics_by_hand(name):
    inputs = dict(INPUTS)
    expected_loss, expected_gradient, sums = BY_HAND[name]
    sums = sums | {"policy/sampler_kl": sum(k3(w) for w in W1)}
    if name == "reinforce":  # π_old is the policy itself
        inputs["sampler_logprobs"] = LOGPROBS - spread(W1, 9.0).log()
    else:
        sums["policy/approx_kl"] = sum(k3(r) for r in R1)
    if name == "grpo_process":
        inputs["advantages"] = spread([2.0, -1.0, 3.0, -1.0, 0.0], 5.0)
    loss, gradient, metrics = loss_and_gradient(name, inputs)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    assert_close(gradient, spread(expected_gradient, 0.0), rtol=1e-12, atol=1e-15)
    assert metrics == {key: pytest.approx((total, 5), rel=1e-12) for key, total in sums.items()}


def one_token(cases):
    """A completion of one token for each pair of advantage and ratio, at the second of three places."""
    advantages, ratios = tensor(cases).T
    old_logprobs = torch.full((len(cases), 3), -1.0, dtype=torch.float64)
    mask = torch.zeros(len(cases), 3)
    mask[:, 1] = 1
    logprobs = old_logprobs + ratios.log().unsqueeze(1)
    inputs = {"logprobs": logprobs, "old_logprobs": old_logprobs, "max_completion_length": 1}
    return inputs | {"advantages": advantages, "completion_mask": mask}


@pytest.mark.parametrize("name, high", CLIPPED.items())
def test_the_clip_stops_the_gradient_on_the_side_of_the_advantage_only(name, high):
    clipped = [(1.0, high + 0.01), (2.0, 9.0), (-1.0, 0.79), (-2.0, 0.1)]
    # Too likely and bad, or too unlikely and good: no clip, however far.
    free = [(1.0, high - 0.01), (-1.0, 0.81), (-2.0, high + 0.01), (-2.0, 9.0), (0.5, 0.79), (0.5, 0.1)]
    free += [(0.0, 9.0), (0.0, 0.1)]
    expected = [0.0] * 4 + [-advantage * ratio for advantage, ratio in free]
    _, gradient, metrics = loss_and_gradient(name, one_token(clipped + free))
    assert_close(gradient[:, 1], tensor(expected))
    assert metrics[LOW] == metrics[HIGH] == (2, 12)


def test_cispo_caps_the_ratio_for_both_signs_and_keeps_every_gradient():
    cases = [(advantage, ratio) for advantage in (1.0, -2.0, 0.0) for ratio in (0.1, 1.0, 1.27, 1.29, 9.0)]
    _, gradient, metrics = loss_and_gradient("cispo", one_token(cases))
    assert_close(gradient[:, 1], tensor([-advantage * min(ratio, 1.28) for advantage, ratio in cases]))
    assert metrics["policy/cap_fraction"] == (6, 15)


@pytest.mark.parametrize("low, high", [(0.1, 0.1), (0.2, 0.1), (0.1, 0.2)])
def test_gspo_clips_whole_completions_and_counts_their_tokens(low, high):
    """S1 = 1.145 has advantage 2, S2 = 0.866 has -1; the clipped ratios still have the weights V1 and V2."""
    loss, gradient, metrics = loss_and_gradient("gspo", INPUTS | {"clip_eps_low": low, "clip_eps_high": high})
    assert loss.item() == pytest.approx(-2 * V1 * min(S1, 1 + high) + V2 * max(S2, 1 - low))
    assert gradient.any(1).tolist() == [S1 <= 1 + high, S2 >= 1 - low]
    assert (metrics[LOW], metrics[HIGH]) == ((2 * (S2 < 1 - low), 5), (3 * (S1 > 1 + high), 5))


@each_script
def test_the_weight_is_capped_and_the_kl_of_the_sampler_is_not(name):
    now = LOGPROBS if name == "reinforce" else OLD_LOGPROBS
    plain, plain_gradient, _ = loss_and_gradient(name, INPUTS | {"sampler_logprobs": now})
    for weight, counted in ((1.5, 1.5), (5.0, 2.0), (0.2, 0.2)):
        loss, gradient, metrics = loss_and_gradient(name, INPUTS | {"sampler_logprobs": now - math.log(weight)})
        assert_close(loss, counted * plain)
        assert_close(gradient, counted * plain_gradient)
        assert metrics["policy/sampler_kl"] == pytest.approx((5 * k3(weight), 5))


def test_k3_is_exact_near_0_and_nowhere_negative():
    """x² / 2 + x³ / 6 + ...; exp(x) - 1 - x would round to multiples of 6e-8."""
    for x in (1e-4, -1e-4, 1e-3):
        assert grpo.k3(torch.tensor(x)).item() == pytest.approx(x**2 / 2 + x**3 / 6, rel=0.01)
    values = grpo.k3(torch.cat([torch.linspace(-20, 5, 1001), torch.logspace(-30, 0, 1001)]))
    assert (values >= 0).all() and grpo.k3(torch.zeros(1)) == 0


# ---- what must not matter


def random_inputs():
    """Five completions with gaps, after prompts and before padding, and a row without a token."""
    generator = torch.Generator().manual_seed(0)
    logprobs, old, ref, sampler, places = torch.randn(5, 6, 9, generator=generator, dtype=torch.float64)
    mask = places > -0.3
    mask[:, [0, 8]] = False
    mask[5] = False
    return {
        "logprobs": logprobs - 2,
        "old_logprobs": logprobs - 2 + 0.3 * old,
        "ref_logprobs": logprobs - 2 + ref,
        "sampler_logprobs": logprobs - 2 + 0.3 * sampler,
        "advantages": tensor([0.5, -1.5, 1.0, 1.1, -0.2, -0.9]),
        "completion_mask": mask,
        "kl_coef": 0.04,
        "clip_eps_low": 0.03,  # GSPO, too, clips some
        "clip_eps_high": 0.03,
    }


def tensors_of(inputs):
    return {name: value for name, value in inputs.items() if torch.is_tensor(value)}


@each_script
def test_only_log_probabilities_get_a_gradient_and_inputs_stay_as_they_are(name):
    given = {key: value.clone() for key, value in tensors_of(random_inputs()).items()}
    floats = [value.requires_grad_() for value in given.values() if value.is_floating_point()]
    loss, _ = policy_loss(name, random_inputs() | given)
    loss.backward()
    assert [value.grad is not None for value in floats] == [True, False, False, False, False]
    for key, value in tensors_of(random_inputs()).items():
        assert torch.equal(given[key], value)


@each_script
def test_neither_what_stands_outside_the_mask_matters_nor_the_type_of_the_mask(name):
    inputs = random_inputs()
    mask = inputs["completion_mask"]
    changes = [{"completion_mask": mask.long()}, {"completion_mask": mask.float()}]
    for garbage in (1e30, math.inf, -math.inf, math.nan):
        filled = {key: torch.where(mask, inputs[key], garbage) for key in inputs if key.endswith("logprobs")}
        if name == "grpo_process":
            filled["advantages"] = torch.where(mask, inputs["advantages"].unsqueeze(1), garbage)
        changes += [{key: value} for key, value in filled.items()] + [filled]
    loss, gradient, metrics = loss_and_gradient(name, inputs)
    assert gradient[mask].any() and not gradient[~mask].any()
    for change in changes:
        changed_loss, changed_gradient, changed_metrics = loss_and_gradient(name, inputs | change)
        assert torch.equal(changed_loss, loss)
        assert torch.equal(changed_gradient, gradient)
        assert changed_metrics == metrics


@each_script
def test_a_batch_is_the_sum_of_its_rows_however_they_are_padded(name):
    """One row after the other, with more places before and behind; the one without tokens adds nothing."""
    inputs = random_inputs()
    results = []
    for i in range(6):
        row = {key: value[[i]] for key, value in tensors_of(inputs).items()}
        for key, value in row.items():
            if value.ndim == 2:
                row[key] = torch.nn.functional.pad(value, (i, 7 - i))
        loss, gradient, metrics = loss_and_gradient(name, inputs | row)
        results.append((loss, gradient[:, i : i + 9], metrics))
    losses, gradients, all_metrics = zip(*results)
    loss, gradient, metrics = loss_and_gradient(name, inputs)
    assert_close(loss, sum(losses))
    assert_close(gradient, torch.cat(gradients))
    assert metrics == {key: pytest.approx(pair) for key, pair in add_pairs(all_metrics).items()}
    assert losses[5] == 0 and not gradients[5].any() and set(all_metrics[5].values()) == {(0, 0)}


@each_script
def test_float32_gives_the_same_in_float32(name):
    expected_loss, expected_gradient, expected_metrics = loss_and_gradient(name, random_inputs())
    singles = {key: value.float() for key, value in tensors_of(random_inputs()).items() if value.is_floating_point()}
    loss, gradient, metrics = loss_and_gradient(name, random_inputs() | singles)
    assert loss.dtype == gradient.dtype == torch.float32
    assert_close(loss.double(), expected_loss, rtol=1e-5, atol=1e-5)
    assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-5)
    assert metrics == {key: pytest.approx(pair, rel=1e-4) for key, pair in expected_metrics.items()}


# ---- neighbours


def results(name, **changes):
    return loss_and_gradient(name, random_inputs() | changes)


def test_at_ratio_1_grpo_is_reinforce_over_the_length():
    inputs = random_inputs()
    now = {"old_logprobs": inputs["logprobs"], "ref_logprobs": None}
    _, gradient, _ = results("grpo", **now)
    _, expected, _ = results("reinforce", **now)
    lengths = inputs["completion_mask"].sum(1, keepdim=True).clamp(min=1)
    assert_close(gradient, expected / lengths)


def test_gspo_is_grpo_for_completions_of_one_token():
    mask = torch.eye(9)[[3, 1, 4, 1, 5, 7]]
    given = {"clip_eps": 0.03, "ref_logprobs": None, "completion_mask": mask}
    *found, metrics = results("gspo", **given)
    *expected, expected_metrics = results("grpo", **given)
    assert_close(found, expected)
    assert metrics == {key: pytest.approx(pair) for key, pair in expected_metrics.items()}


def test_dapo_and_dr_grpo_are_grpo_at_equal_lengths():
    """Five tokens each: DAPO is five times GRPO, and Dr. GRPO is GRPO if its constant is five."""
    mask = torch.tensor([0, 1, 1, 1, 0, 1, 1, 0, 0]).repeat(6, 1)
    given = {"clip_eps": 0.03, "ref_logprobs": None, "completion_mask": mask, "max_completion_length": 5}
    loss, gradient, metrics = results("grpo", **given)
    for name, factor in (("dapo", 5), ("dr_grpo", 1)):
        found_loss, found_gradient, found_metrics = results(name, **given)
        assert_close((found_loss, found_gradient), (factor * loss, factor * gradient))
        assert found_metrics == metrics


def test_where_nothing_is_clipped_cispo_has_the_gradient_of_dapo():
    """r ∇ log π = ∇ r"""
    _, expected, _ = results("dapo", clip_eps_low=1e9, clip_eps_high=1e9)
    _, gradient, _ = results("cispo", clip_eps_high=1e9)
    assert_close(gradient, expected)


def test_grpo_process_is_grpo_if_all_tokens_have_the_same_advantage():
    *found, metrics = results("grpo_process")
    *expected, expected_metrics = results("grpo")
    assert all(map(torch.equal, found, expected)) and metrics == expected_metrics


# ---- advantages

REWARDS = [1.0, 0.0, 0.0, 1.0, 5.0, 4.0, 4.0, 4.0]  # with the means 1/2 and 17/4, and the deviations √(1/3) and 1/2
HALF, QUARTER = 0.5 / (math.sqrt(1 / 3) + 1e-4), 0.25 / (0.5 + 1e-4)
STANDARDISED = [HALF, -HALF, -HALF, HALF, 3 * QUARTER, -QUARTER, -QUARTER, -QUARTER]
CENTRED = [0.5, -0.5, -0.5, 0.5, 0.75, -0.25, -0.25, -0.25]
OTHERS = [2 / 3, -2 / 3, -2 / 3, 2 / 3, 1.0, -1 / 3, -1 / 3, -1 / 3]  # less the mean of the three others
BASELINES = {"group_mean": CENTRED, "leave_one_out": OTHERS, "none": REWARDS}
ADVANTAGES = {SCRIPTS[name].compute_advantages: STANDARDISED for name in ("grpo", "dapo", "gspo", "cispo")}
ADVANTAGES[dr_grpo.compute_advantages] = CENTRED
for baseline, expected in BASELINES.items():
    ADVANTAGES[partial(reinforce.compute_advantages, baseline=baseline)] = expected


@pytest.mark.parametrize("compute_advantages, expected", ADVANTAGES.items())
def test_advantages_by_hand(compute_advantages, expected):
    rewards = tensor(REWARDS)
    assert_close(compute_advantages(rewards, 4), tensor(expected))
    assert rewards.tolist() == REWARDS


@pytest.mark.parametrize("compute_advantages", list(ADVANTAGES)[:-1])  # without a baseline they are the rewards
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_have_advantage_exactly_0_and_others_have_not(dtype, compute_advantages):
    for group_size in (2, 3, 6, 7, 12):
        for reward in (0.0, 0.1, -0.7, 1 / 3, 1.1):
            rewards = torch.full((2 * group_size,), reward, dtype=dtype)
            rewards[-1] = 2.0
            advantages = compute_advantages(rewards, group_size)
            assert advantages.dtype == dtype
            assert not advantages[:group_size].any() and advantages[group_size:].all()


def test_advantages_of_grpo_and_dr_grpo_are_the_same_at_standard_deviation_1():
    rewards = tensor([0.0, 1.0, 2.0, -3.0, -3.0, -3.0])
    assert_close(grpo.compute_advantages(rewards, 3) * (1 + 1e-4), dr_grpo.compute_advantages(rewards, 3))


def test_dr_grpo_gives_truncated_completions_the_lowest_reward_and_at_most_0():
    rewards = tensor([1.0, 0.0, 1.0, 1.0, -1.0, -0.5, 0.5, 1.0, 0.5])
    truncated = torch.tensor([True, False, False, True, False, True, True, False, True])
    expected = [0.0, 0.0, 1.0, -1.0, -1.0, -1.0, 0.0, 1.0, 0.0]
    assert dr_grpo.punish_truncation(rewards, truncated, 3).tolist() == expected
    assert rewards.tolist() == [1.0, 0.0, 1.0, 1.0, -1.0, -0.5, 0.5, 1.0, 0.5]


def test_the_overlong_penalty_falls_from_0_to_minus_1_over_the_buffer():
    """Of 8 tokens before the limit of 48; without a buffer there is none, not even at the limit."""
    lengths = torch.tensor([1, 39, 40, 41, 44, 48])
    assert dapo.overlong_penalty(lengths, 48, 8).tolist() == [0, 0, 0, -0.125, -0.5, -1]
    assert dapo.overlong_penalty(lengths, 48, 0).tolist() == [0] * 6


def test_a_group_has_signal_unless_all_its_rewards_are_equal():
    rewards = tensor([0.1, 0.1, 0.1, 0.1, 0.1, 0.2, 0.3, 0.1, 0.1, 0.0, 0.0, 0.0])
    assert dapo.has_signal(rewards, 3).tolist() == [False, True, True, False]
