"""The objectives of the siblings of grpo: by hand, against others' numbers, and against each other."""

import inspect
import math

import pytest
import torch
from test_losses import gradient_of, random_inputs, read_oracle, tensor

import cispo
import dapo
import dr_grpo
import grpo
import grpo_process
import gspo
import reinforce

SIBLINGS = {"reinforce": reinforce, "dr_grpo": dr_grpo, "dapo": dapo, "gspo": gspo, "cispo": cispo}
SIBLINGS |= {"grpo_process": grpo_process}
SETTINGS = {"clip_eps": 0.2, "clip_eps_low": 0.2, "clip_eps_high": 0.28, "max_completion_length": 9, "kl_coef": 0.0}
each_sibling = pytest.mark.parametrize("script", SIBLINGS.values(), ids=SIBLINGS)
OF_COMPLETIONS = {name: script for name, script in SIBLINGS.items() if script is not grpo_process}
each_of_completions = pytest.mark.parametrize("script", OF_COMPLETIONS.values(), ids=OF_COMPLETIONS)


def policy_loss(script, inputs, **changes):
    """Call a script's policy_loss with those of the inputs and settings that it takes."""
    given = SETTINGS | inputs | changes
    if script in (grpo, grpo_process) and "ref_logprobs" not in changes:
        given["ref_logprobs"] = None
    if script is grpo_process:  # a token has its own advantage
        given["advantages"] = given["advantages"].unsqueeze(1).expand_as(given["logprobs"])
    names = inspect.signature(script.policy_loss).parameters
    return script.policy_loss(**{name: given[name] for name in names if name in given})


def loss_and_gradient(script, inputs, **changes):
    inputs = inputs | changes
    return gradient_of(lambda logprobs: policy_loss(script, inputs, logprobs=logprobs), inputs["logprobs"])


def advantages_of(script, rewards, group_size, baseline="leave_one_out"):
    settings = (baseline,) if script is reinforce else ()
    return script.compute_advantages(rewards, group_size, *settings)


# ---- advantages by hand and by others


def test_advantages_by_hand():
    rewards = tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    centred = tensor([0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5])
    torch.testing.assert_close(dr_grpo.compute_advantages(rewards, 4), centred)
    torch.testing.assert_close(reinforce.compute_advantages(rewards, 4, "group_mean"), centred)
    leave_one_out = tensor([1.0, -1 / 3, -1 / 3, -1 / 3, 2 / 3, 2 / 3, -2 / 3, -2 / 3])
    torch.testing.assert_close(reinforce.compute_advantages(rewards, 4, "leave_one_out"), leave_one_out)
    torch.testing.assert_close(reinforce.compute_advantages(rewards, 4, "none"), rewards)


@pytest.mark.parametrize("case", read_oracle("advantages"), ids=lambda case: case["name"])
def test_advantages_are_those_of_others(case):
    rewards = tensor(case["inputs"]["rewards"])
    flat, group_size = rewards.view(-1), rewards.shape[1]
    outputs = {name: tensor(values).view(-1) for name, values in case["outputs"].items()}
    torch.testing.assert_close(dr_grpo.compute_advantages(flat, group_size), outputs["oat_drgrpo"])
    torch.testing.assert_close(reinforce.compute_advantages(flat, group_size, "leave_one_out"), outputs["verl_rloo"])
    for script in (dapo, gspo, cispo):
        torch.testing.assert_close(script.compute_advantages(flat, group_size), outputs["trl_group"], rtol=1e-6, atol=0)


def test_dapo_gspo_and_cispo_have_the_advantages_of_grpo():
    rewards = torch.randn(24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for script in (dapo, gspo, cispo):
        assert torch.equal(script.compute_advantages(rewards, 6), grpo.compute_advantages(rewards, 6))


def test_leave_one_out_is_the_mean_of_the_others():
    rewards = torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = [rewards[i] - (rewards[i // 5 * 5 : i // 5 * 5 + 5].sum() - rewards[i]) / 4 for i in range(10)]
    actual = reinforce.compute_advantages(rewards, 5, "leave_one_out")
    torch.testing.assert_close(actual, torch.stack(expected))
    torch.testing.assert_close(dr_grpo.compute_advantages(rewards, 5) * 5 / 4, actual)


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 1.0])
@each_of_completions
def test_group_of_equal_rewards_has_no_gradient_in_float32(script, reward):
    baselines = ("group_mean", "leave_one_out") if script is reinforce else (None,)
    for baseline in baselines:
        advantages = advantages_of(script, tensor([reward] * 8 + [1.0, 0.0] * 4, torch.float32), 8, baseline)
        assert advantages[:8].tolist() == [0.0] * 8
        inputs = random_inputs(dtype=torch.float32) | {"advantages": advantages[:6]}
        assert (loss_and_gradient(script, inputs)[1] == 0).all()


@each_of_completions
def test_group_of_one(script):
    rewards = tensor([0.3, 1.0, -2.0])
    assert advantages_of(script, rewards, 1).tolist() == [0.0, 0.0, 0.0]
    assert reinforce.compute_advantages(rewards, 1, "none").tolist() == rewards.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_of_completions
def test_advantages_have_the_type_of_the_rewards(script, dtype):
    rewards = tensor([0.3, 1.0, -2.0, 0.1, 0.1, 0.1], dtype)
    for baseline in ("none", "group_mean", "leave_one_out"):
        assert advantages_of(script, rewards, 3, baseline).dtype == dtype


@each_of_completions
def test_advantages_are_centred_and_ignore_a_shift_of_the_rewards(script):
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shift = tensor([5.0, -3.0, 100.0]).repeat_interleave(4)
    for baseline in ("group_mean", "leave_one_out"):
        advantages = advantages_of(script, rewards, 4, baseline)
        assert advantages.view(3, 4).sum(1).abs().max() < 1e-12
        shifted = advantages_of(script, rewards + shift, 4, baseline)
        torch.testing.assert_close(shifted, advantages, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("script, factor", [(reinforce, 3), (dr_grpo, 3), (dapo, 1), (gspo, 1), (cispo, 1)])
def test_only_the_standard_deviation_takes_away_the_scale_of_the_rewards(script, factor):
    rewards = 1e6 * torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = factor * advantages_of(script, rewards, 4)
    torch.testing.assert_close(advantages_of(script, 3 * rewards, 4), expected, rtol=1e-9, atol=0)


@each_of_completions
def test_permuting_rewards_permutes_advantages(script):
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    order = torch.tensor([8, 10, 9, 11, 1, 0, 2, 3, 7, 6, 5, 4])  # groups among themselves, and inside each
    for baseline in ("none", "group_mean", "leave_one_out"):
        advantages = advantages_of(script, rewards, 4, baseline)
        permuted = advantages_of(script, rewards[order], 4, baseline)
        torch.testing.assert_close(permuted, advantages[order], rtol=1e-12, atol=1e-12)


# ---- the losses by hand


@pytest.fixture
def hand_inputs():
    """Ratios 1.5, 2, 0.5 at advantage 2 and 1.5, 0.5, 1 at advantage -1; the last column is padding."""
    ratios = tensor([[1.5, 2.0, 0.5, 9.0], [1.5, 0.5, 1.0, 9.0]])
    logprobs = tensor([[-1.0, -2.0, -3.0, -4.0], [-0.5, -1.5, -2.5, -3.5]])
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs - ratios.log(),
        "advantages": tensor([2.0, -1.0]),
        "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]]),
    }


TOKEN_KL = (0.5 - math.log(1.5)) * 2 + (math.log(2) - 0.5) * 2 + (1 - math.log(2))
S1, S2 = 1.5 ** (1 / 3), 0.75 ** (1 / 3)  # the geometric means of the ratios of the two completions
BY_HAND = {  # loss, gradient, metrics
    "reinforce": (2 * 6.0 - 4.5, [[-2.0, -2.0, -2.0, 0.0], [1.0, 1.0, 1.0, 0.0]], {}),
    "dr_grpo": (
        (-2.4 - 2.4 - 1.0 + 1.5 + 0.8 + 1.0) / 9,
        [[0.0, 0.0, -1 / 9, 0.0], [1.5 / 9, 0.0, 1 / 9, 0.0]],
        {"approx_kl": TOKEN_KL, "clip_fraction_low": 1, "clip_fraction_high": 2, "ratio_max": 2.0},
    ),
    "dapo": (
        -2.56 - 2.56 - 1.0 + 1.5 + 0.8 + 1.0,
        [[0.0, 0.0, -1.0, 0.0], [1.5, 0.0, 1.0, 0.0]],
        {"approx_kl": TOKEN_KL, "clip_fraction_low": 1, "clip_fraction_high": 2, "ratio_max": 2.0},
    ),
    "grpo_process": (
        (-2.4 - 2.4 - 1.0 + 1.5 + 0.8 + 1.0) / 3,
        [[0.0, 0.0, -1 / 3, 0.0], [1.5 / 3, 0.0, 1 / 3, 0.0]],
        {"approx_kl": TOKEN_KL, "clip_fraction_low": 1, "clip_fraction_high": 2, "ratio_max": 2.0},
    ),
    "gspo": (
        -2 * S1 + S2,
        [[-2 * S1 / 3] * 3 + [0.0], [S2 / 3] * 3 + [0.0]],
        {"approx_kl": TOKEN_KL, "clip_fraction_sequences_low": 0, "clip_fraction_sequences_high": 0, "ratio_max": S1},
    ),
    "cispo": (
        2 * (1.28 * 1 + 1.28 * 2 + 0.5 * 3) - (1.28 * 0.5 + 0.5 * 1.5 + 1.0 * 2.5),
        [[-2.56, -2.56, -1.0, 0.0], [1.28, 0.5, 1.0, 0.0]],
        {"approx_kl": TOKEN_KL, "cap_fraction": 3, "ratio_max": 2.0},
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_loss_gradient_and_metrics_by_hand(name, hand_inputs):
    expected_loss, expected_gradient, expected_metrics = BY_HAND[name]
    loss, gradient, metrics = loss_and_gradient(SIBLINGS[name], hand_inputs)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    torch.testing.assert_close(gradient, tensor(expected_gradient), rtol=1e-12, atol=1e-15)
    expected = {"loss/policy": expected_loss} | {f"policy/{key}": value for key, value in expected_metrics.items()}
    assert {key: value.item() for key, value in metrics.items()} == pytest.approx(expected, rel=1e-12)
    assert not any(value.requires_grad or value.ndim for value in metrics.values())


@pytest.mark.parametrize("low, high", [(0.05, 0.1), (0.3, 0.1), (0.05, 0.3)])
def test_gspo_clips_whole_completions(hand_inputs, low, high):
    """The ratios are 1.145 at advantage 2 and 0.909 at -1."""
    loss, gradient, metrics = loss_and_gradient(gspo, hand_inputs, clip_eps_low=low, clip_eps_high=high)
    clipped = [S1 > 1 + high, S2 < 1 - low]
    assert metrics["policy/clip_fraction_sequences_high"] == clipped[0]
    assert metrics["policy/clip_fraction_sequences_low"] == clipped[1]
    assert [(row == 0).all().item() for row in gradient] == clipped
    assert loss.item() == pytest.approx(-2 * min(S1, 1 + high) + max(S2, 1 - low))


CLIP_CASES = [  # advantage, ratio, gradient with bounds 1 - 0.2 and 1 + 0.28 (dr_grpo: 1 + 0.2)
    (1.0, 1.3, 0.0),
    (-1.0, 0.7, 0.0),
    (-2.0, 1.3, 2.6),
    (-2.0, 9.0, 18.0),
    (2.0, 0.7, -1.4),
    (2.0, 1.1, -2.2),
    (-2.0, 0.9, 1.8),
    (0.0, 9.0, 0.0),
]


@pytest.mark.parametrize("script", [dr_grpo, dapo, gspo], ids=lambda script: script.__name__)
@pytest.mark.parametrize("advantage, ratio, gradient", CLIP_CASES)
def test_where_the_clip_stops_the_gradient(script, advantage, ratio, gradient):
    old_logprobs = tensor([[-1.0, -2.0]])
    inputs = {"logprobs": old_logprobs + math.log(ratio), "old_logprobs": old_logprobs}
    inputs |= {"advantages": tensor([advantage]), "completion_mask": torch.tensor([[1, 0]]), "max_completion_length": 1}
    torch.testing.assert_close(loss_and_gradient(script, inputs)[1], tensor([[gradient, 0.0]]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("advantage, ratio, gradient", CLIP_CASES)
def test_cispo_caps_the_weight_and_keeps_the_gradient(advantage, ratio, gradient):
    """Every token of an advantage has one, those that a clip leaves out, too; both signs have one cap."""
    old_logprobs = tensor([[-1.0, -2.0]])
    inputs = {"logprobs": old_logprobs + math.log(ratio), "old_logprobs": old_logprobs}
    inputs |= {"advantages": tensor([advantage]), "completion_mask": torch.tensor([[1, 0]])}
    actual = loss_and_gradient(cispo, inputs)[1]
    torch.testing.assert_close(actual, tensor([[-min(ratio, 1.28) * advantage, 0.0]]), rtol=1e-12, atol=0)
    assert (actual[0, 0] == 0) == (advantage == 0)
    if gradient and ratio < 1.28:
        assert actual[0, 0].item() == pytest.approx(gradient)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio, is_capped", [(0.1, 0), (1.27, 0), (1.29, 1), (9.0, 1)])
def test_what_counts_as_capped(advantage, ratio, is_capped):
    """Of two completions, one of ratio 1, both with a masked position."""
    old_logprobs = tensor([[-1.0, -2.0], [-1.0, -2.0]])
    inputs = {"old_logprobs": old_logprobs, "logprobs": old_logprobs + tensor([[math.log(ratio)], [0.0]])}
    inputs |= {"advantages": tensor([advantage, advantage]), "completion_mask": torch.tensor([[1, 0], [1, 0]])}
    assert policy_loss(cispo, inputs)[1]["policy/cap_fraction"] == is_capped


@pytest.mark.parametrize("ratio, is_clipped", [(1.25, False), (1.27, False), (1.29, True)])
def test_dapo_clips_higher_above_than_below(ratio, is_clipped):
    old_logprobs = tensor([[-1.0]])
    inputs = {"old_logprobs": old_logprobs, "logprobs": old_logprobs + math.log(ratio)}
    inputs |= {"advantages": tensor([1.0]), "completion_mask": torch.ones(1, 1)}
    assert (loss_and_gradient(dapo, inputs)[1] == 0).item() == is_clipped
    assert (loss_and_gradient(dr_grpo, inputs)[1] == 0).item()  # one range of 0.2


@pytest.mark.parametrize("script", [dr_grpo, dapo, gspo], ids=lambda script: script.__name__)
@pytest.mark.parametrize(
    "advantage, ratio, low, high",
    [
        (1.0, 1.25, 0, 1),  # above both 1 + 0.1 and, for dr_grpo, 1 + 0.2
        (-1.0, 0.85, 0, 0),  # above both 1 - 0.3 and 1 - 0.2
        (-1.0, 0.65, 1, 0),
        (-1.0, 9.0, 0, 0),  # outside, but on the side where nothing is clipped
        (1.0, 0.1, 0, 0),
        (0.0, 9.0, 0, 0),
        (0.0, 0.1, 0, 0),
    ],
)
def test_what_counts_as_clipped(script, advantage, ratio, low, high):
    """Of two completions, one of ratio 1, both with a masked position."""
    old_logprobs = tensor([[-1.0, -2.0], [-1.0, -2.0]])
    inputs = {"old_logprobs": old_logprobs, "logprobs": old_logprobs + tensor([[math.log(ratio)], [0.0]])}
    inputs |= {"advantages": tensor([advantage, advantage]), "completion_mask": torch.tensor([[1, 0], [1, 0]])}
    _, metrics = policy_loss(script, inputs, clip_eps=0.2, clip_eps_low=0.3, clip_eps_high=0.1)
    counts = [value.item() for key, value in sorted(metrics.items()) if "clip_fraction" in key]
    assert counts == [high, low]


@pytest.mark.parametrize("script", [dr_grpo, dapo, gspo, cispo], ids=lambda script: script.__name__)
def test_largest_ratio_is_not_that_of_the_padding(script):
    logprobs, mask = tensor([[-1.0, -2.0], [-1.0, -3.0]]), torch.tensor([[1, 0], [1, 1]])
    inputs = {"logprobs": logprobs, "old_logprobs": logprobs + 0.5, "advantages": tensor([1.0, -1.0])}
    _, metrics = policy_loss(script, inputs, completion_mask=mask)
    assert metrics["policy/ratio_max"].item() == pytest.approx(math.exp(-0.5), rel=1e-12)


# ---- the losses against other people's code


def oracle_cases():
    for script, name, divisor, rtol, wanted in [
        ("dr_grpo", "dr_grpo_oat", "rows", 1e-9, lambda config: config["beta"] == 0),
        ("dr_grpo", "dr_grpo_trl", "rows", 1e-9, lambda config: config["beta"] == 0),
        ("dapo", "dapo_trl", "tokens", 1e-9, lambda config: config["beta"] == 0),
        ("gspo", "gspo_trl", "rows", 1e-9, lambda config: config["beta"] == 0),
        ("cispo", "cispo_trl", "tokens", 1e-9, lambda config: config["beta"] == 0),
        # verl adds 1e-8 to its denominators
        ("gspo", "gspo_verl", "rows", 1e-6, lambda config: config["kl_loss_coef"] == 0),
        # its other modes weigh tokens otherwise than the paper
        ("reinforce", "reinforce_rloo_verl", "rows", 1e-6, lambda c: c["loss_agg_mode"] == "seq-mean-token-sum"),
    ]:
        for case in read_oracle(name):
            if wanted(case["config"]):
                yield pytest.param(script, case, divisor, rtol, id=f"{name}-{case['name']}")


def test_number_of_cases_by_others():
    assert len(list(oracle_cases())) == 2 + 2 + 4 + 4 + 4 + 4 + 2


@pytest.mark.parametrize("script, case, divisor, rtol", oracle_cases())
def test_loss_and_gradient_are_those_of_others(script, case, divisor, rtol):
    config, inputs = case["config"], {k: tensor(v) for k, v in case["inputs"].items() if isinstance(v, list)}
    mask, advantages = inputs["mask"], inputs["advantages"]
    given = {
        "logprobs": inputs["logp"],
        "old_logprobs": inputs["old_logp"],
        "advantages": advantages if advantages.ndim == 1 else advantages[:, 0],
        "completion_mask": mask,
        "clip_eps_low": config.get("epsilon_low", config.get("clip_ratio_low")),
        "clip_eps_high": config.get("epsilon_high", config.get("clip_ratio_high")),
        "max_completion_length": config.get("max_completion_length", config.get("generate_max_length")),
    }
    loss, gradient, _ = loss_and_gradient(SIBLINGS[script], given)
    count = mask.sum() if divisor == "tokens" else len(mask)
    assert (loss / count).item() == pytest.approx(case["outputs"]["loss"], rel=rtol, abs=rtol)
    torch.testing.assert_close(gradient / count, tensor(case["outputs"]["grad_logp"]), rtol=rtol, atol=rtol / 100)


@pytest.mark.parametrize(
    "script, name", [("dr_grpo", "dr_grpo_oat"), ("dr_grpo", "dr_grpo_trl"), ("reinforce", "reinforce_rloo_verl")]
)
def test_advantages_in_these_cases_are_those_of_others(script, name):
    cases = read_oracle(name)
    assert len(cases) == (6 if script == "reinforce" else 4)
    for case in cases:
        advantages = advantages_of(SIBLINGS[script], tensor(case["inputs"]["rewards"]).view(-1), case["inputs"]["G"])
        expected = tensor(case["inputs"]["advantages"])
        expected = expected if expected.ndim == 1 else expected[:, 0]
        torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-12)


def test_overlong_penalty_is_that_of_others():
    [case] = read_oracle("dapo_overlong")
    lengths, config = case["inputs"]["lengths"], case["config"]
    penalty = dapo.overlong_penalty(tensor(lengths), config["L_max"], config["L_cache"])
    torch.testing.assert_close(penalty, tensor(case["outputs"]["trl"]))
    # verl's goes on falling past the limit, which no completion passes
    within = [i for i, length in enumerate(lengths) if length <= config["L_max"]]
    torch.testing.assert_close(penalty[within], tensor(case["outputs"]["verl"])[within])


# ---- DAPO's own functions


def test_overlong_penalty_by_hand():
    lengths = torch.tensor([1, 40, 41, 44, 48])
    assert dapo.overlong_penalty(lengths, 48, 8).tolist() == pytest.approx([0, 0, -1 / 8, -1 / 2, -1])
    assert dapo.overlong_penalty(lengths, 48, 0).tolist() == [0.0] * 5
    assert dapo.overlong_penalty(lengths.float(), 48, 48).tolist() == pytest.approx(
        [-n / 48 for n in (1, 40, 41, 44, 48)]
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("length, penalty", [(0, 0), (39, 0), (40, 0), (41, -1 / 8), (47, -7 / 8), (48, -1), (49, -1)])
def test_overlong_penalty_at_the_ends_of_the_buffer(length, penalty, dtype):
    lengths = torch.tensor([length], dtype=dtype)
    penalties = dapo.overlong_penalty(lengths, 48, 8)
    assert penalties.tolist() == [penalty] and lengths.tolist() == [length]
    assert penalties.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_has_signal():
    rewards = tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.3, 0.3, 0.3, 0.3, 0.3, 0.4])
    assert dapo.has_signal(rewards, 3).tolist() == [False, False, True, True, False, True]


# ---- neighbours


@pytest.fixture
def inputs():
    return random_inputs()


def equal_lengths(inputs):
    return inputs | {"completion_mask": torch.ones(6, 5)}


def test_grpo_at_ratio_1_is_reinforce_over_length(inputs):
    lengths = inputs["completion_mask"].sum(1, keepdim=True)
    grpo_gradient = loss_and_gradient(grpo, inputs, old_logprobs=inputs["logprobs"])[1]
    torch.testing.assert_close(grpo_gradient, loss_and_gradient(reinforce, inputs)[1] / lengths)


def test_dr_grpo_at_ratio_1_is_reinforce_over_the_constant(inputs):
    gradient = loss_and_gradient(dr_grpo, inputs, old_logprobs=inputs["logprobs"])[1]
    torch.testing.assert_close(gradient, loss_and_gradient(reinforce, inputs)[1] / 9)


def test_all_with_a_clip_are_equal_for_completions_of_one_token(inputs):
    one_token = {key: value[:, :1] for key, value in inputs.items() if torch.is_tensor(value) and value.ndim == 2}
    changes = one_token | {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "max_completion_length": 1}
    results = [loss_and_gradient(script, inputs, **changes)[:2] for script in (grpo, dr_grpo, dapo, gspo)]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


@pytest.mark.parametrize("script", [dr_grpo, dapo, gspo, cispo], ids=lambda script: script.__name__)
def test_clip_ranges_do_not_matter_at_the_sampling_policy(script, inputs):
    narrow, wide = (
        loss_and_gradient(
            script, inputs, old_logprobs=inputs["logprobs"], clip_eps=eps, clip_eps_low=eps, clip_eps_high=eps
        )
        for eps in (1e-6, 0.9)
    )
    torch.testing.assert_close(narrow, wide, rtol=1e-12, atol=0)
    assert (wide[1][inputs["completion_mask"]] != 0).all()


def test_dapo_is_length_times_grpo_at_equal_lengths(inputs):
    actual = loss_and_gradient(dapo, equal_lengths(inputs), clip_eps_high=0.2)
    expected = loss_and_gradient(grpo, equal_lengths(inputs))
    torch.testing.assert_close(actual[0], 5 * expected[0])
    torch.testing.assert_close(actual[1], 5 * expected[1])


def test_cispo_at_ratio_1_has_the_gradient_of_dapo(inputs):
    same = {"old_logprobs": inputs["logprobs"]}
    torch.testing.assert_close(loss_and_gradient(cispo, inputs, **same)[1], loss_and_gradient(dapo, inputs, **same)[1])


def test_without_cap_and_clip_cispo_has_the_gradient_of_dapo(inputs):
    """r ∇ log π = ∇ r: where nothing is clipped, the two are one."""
    wide = {"clip_eps_low": 1e9, "clip_eps_high": 1e9}
    actual, expected = (loss_and_gradient(script, inputs, **wide)[1] for script in (cispo, dapo))
    torch.testing.assert_close(actual, expected)
    clipped = loss_and_gradient(dapo, inputs)[1]
    assert ((clipped == 0) & (actual != 0)).any() and (actual[inputs["completion_mask"]] != 0).all()


def test_dr_grpo_is_grpo_where_all_lengths_are_the_constant(inputs):
    actual = loss_and_gradient(dr_grpo, equal_lengths(inputs), max_completion_length=5)
    torch.testing.assert_close(actual[:2], loss_and_gradient(grpo, equal_lengths(inputs))[:2])


def test_gspo_gradient_is_constant_over_a_completion_and_depends_on_its_mean_ratio_only(inputs):
    mask = inputs["completion_mask"]
    settings = {"clip_eps_low": 0.9, "clip_eps_high": 9.0}
    loss, gradient, _ = loss_and_gradient(gspo, inputs, **settings)
    for row, row_mask in zip(gradient, mask):
        torch.testing.assert_close(row[row_mask], row[row_mask][:1].expand(row_mask.sum()))
    moved = inputs["logprobs"].clone()
    moved[0, :2] += tensor([0.7, -0.7])
    moved_loss, moved_gradient, _ = loss_and_gradient(gspo, inputs, logprobs=moved, **settings)
    torch.testing.assert_close((moved_loss, moved_gradient), (loss, gradient))


@pytest.mark.parametrize(
    "script, depends", [(grpo, True), (gspo, True), (dr_grpo, False), (dapo, False), (reinforce, False), (cispo, False)]
)
def test_whether_the_weight_of_a_token_depends_on_the_length(inputs, script, depends):
    same = {"old_logprobs": inputs["logprobs"]}
    shorter = inputs["completion_mask"].clone()
    shorter[0, 3:] = False
    before = loss_and_gradient(script, inputs, **same)[1]
    after = loss_and_gradient(script, inputs, **same, completion_mask=shorter)[1]
    assert torch.allclose(before[0, :3], after[0, :3]) != depends
    torch.testing.assert_close(before[1:], after[1:])


# ---- properties that all share


@pytest.mark.parametrize("garbage", [1e30, -1e30, math.inf, -math.inf, math.nan])
@each_sibling
def test_masked_positions_do_not_matter(script, garbage, inputs):
    loss, gradient, metrics = loss_and_gradient(script, inputs)
    mask = inputs["completion_mask"]
    for names in (["logprobs"], ["old_logprobs"], ["logprobs", "old_logprobs"]):
        filled = {name: torch.where(mask, inputs[name], garbage) for name in names}
        filled_loss, filled_gradient, filled_metrics = loss_and_gradient(script, inputs, **filled)
        assert torch.equal(filled_loss, loss) and torch.equal(filled_gradient, gradient)
        assert filled_metrics == metrics
    assert (gradient[~mask] == 0).all() and (gradient[mask] != 0).any()


@each_sibling
def test_padding_columns_do_not_matter(script, inputs):
    padded = {name: torch.cat([inputs[name], torch.full((6, 3), 7.0)], 1) for name in ("logprobs", "old_logprobs")}
    padded["completion_mask"] = torch.cat([inputs["completion_mask"], torch.zeros(6, 3, dtype=torch.bool)], 1)
    loss, gradient, metrics = loss_and_gradient(script, inputs)
    padded_loss, padded_gradient, padded_metrics = loss_and_gradient(script, inputs, **padded)
    torch.testing.assert_close((padded_loss, padded_metrics), (loss, metrics))
    torch.testing.assert_close(padded_gradient, torch.cat([gradient, torch.zeros(6, 3)], 1))


@each_sibling
def test_row_without_tokens_counts_nothing(script, inputs):
    mask = inputs["completion_mask"].clone()
    mask[2] = False
    loss, gradient, metrics = loss_and_gradient(script, inputs, completion_mask=mask)
    others = {key: value[[0, 1, 3, 4, 5]] for key, value in inputs.items() if torch.is_tensor(value)}
    torch.testing.assert_close((loss, metrics), policy_loss(script, inputs | others))
    assert (gradient[2] == 0).all()


@each_sibling
def test_rows_are_independent_and_their_order_does_not_matter(script, inputs):
    loss, gradient, metrics = loss_and_gradient(script, inputs)
    order = [3, 4, 5, 0, 2, 1]
    rows = [{key: value[[i]] for key, value in inputs.items() if torch.is_tensor(value)} for i in order]
    results = [loss_and_gradient(script, inputs | row) for row in rows]
    torch.testing.assert_close(sum(result[0] for result in results), loss)
    torch.testing.assert_close(torch.cat([result[1] for result in results]), gradient[order])
    for key in metrics.keys() - {"policy/ratio_max"}:
        torch.testing.assert_close(sum(result[2][key] for result in results), metrics[key])


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32, torch.float64])
@each_sibling
def test_masks_of_every_type_are_equal(script, dtype, inputs):
    loss, gradient, metrics = loss_and_gradient(script, inputs)
    changed = loss_and_gradient(script, inputs, completion_mask=inputs["completion_mask"].to(dtype))
    assert torch.equal(changed[0], loss) and torch.equal(changed[1], gradient) and changed[2] == metrics


@each_sibling
def test_float32_stays_float32_and_agrees(script):
    loss, gradient, _ = loss_and_gradient(script, random_inputs(dtype=torch.float32))
    expected = loss_and_gradient(script, random_inputs())
    assert loss.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected[1], rtol=1e-5, atol=1e-6)


@each_sibling
def test_inputs_stay_as_they_are(script, inputs):
    before = {key: value.clone() for key, value in inputs.items() if torch.is_tensor(value)}
    loss_and_gradient(script, inputs)
    if script is not grpo_process:
        rewards = tensor([1.0, 0.0, 0.0, 0.5, 0.5, 0.5])
        advantages_of(script, rewards, 3)
        assert rewards.tolist() == [1.0, 0.0, 0.0, 0.5, 0.5, 0.5]
    assert all(torch.equal(inputs[key], value) for key, value in before.items())
