"""The objectives of grpo and its siblings: by hand, against others' numbers, and against each other."""

import inspect
import itertools
import math

import pytest
import torch
from test_losses import gradient_of, hand_inputs, random_inputs, read_oracle, tensor  # noqa: F401, one is a fixture

import cispo
import dapo
import dr_grpo
import grpo
import grpo_process
import gspo
import reinforce

SIBLINGS = {"reinforce": reinforce, "dr_grpo": dr_grpo, "dapo": dapo, "gspo": gspo, "cispo": cispo}
SIBLINGS |= {"grpo_process": grpo_process}
EVERY = {"grpo": grpo} | SIBLINGS
SETTINGS = {"clip_eps": 0.2, "clip_eps_low": 0.2, "clip_eps_high": 0.28, "max_completion_length": 9}
WITHOUT_KL = {"ref_logprobs": None, "kl_coef": 0.0}
each_script = pytest.mark.parametrize("script", EVERY.values(), ids=EVERY)
OF_COMPLETIONS = {name: script for name, script in EVERY.items() if script is not grpo_process}
each_of_completions = pytest.mark.parametrize("script", OF_COMPLETIONS.values(), ids=OF_COMPLETIONS)


def policy_loss(script, inputs, **changes):
    """Call a script's policy_loss with those of the inputs and settings that it takes."""
    given = SETTINGS | inputs | changes
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
    for script in (grpo, dapo, gspo, cispo):
        torch.testing.assert_close(script.compute_advantages(flat, group_size), outputs["trl_group"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_of_completions
def test_group_of_equal_rewards_has_advantage_exactly_0_and_no_gradient(script, dtype):
    for reward, baseline in itertools.product((0.0, 0.1, 0.7, 1.0), ("group_mean", "leave_one_out")):
        advantages = advantages_of(script, tensor([reward] * 8 + [1.0, 0.0] * 4, dtype), 8, baseline)
        assert advantages.dtype == dtype
        assert advantages[:8].tolist() == [0.0] * 8 and (advantages[8:] != 0).all()
        inputs = random_inputs(dtype=dtype) | WITHOUT_KL | {"advantages": advantages[:6]}
        assert (loss_and_gradient(script, inputs)[1] == 0).all()


@each_of_completions
def test_group_of_one(script):
    rewards = tensor([0.3, 1.0, -2.0])
    assert advantages_of(script, rewards, 1).tolist() == [0.0, 0.0, 0.0]
    assert reinforce.compute_advantages(rewards, 1, "none").tolist() == rewards.tolist()


@each_of_completions
def test_advantages_are_centred_and_ignore_a_shift_of_the_rewards(script):
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shift = tensor([5.0, -3.0, 100.0]).repeat_interleave(4)
    for baseline in ("group_mean", "leave_one_out"):
        advantages = advantages_of(script, rewards, 4, baseline)
        assert advantages.view(3, 4).sum(1).abs().max() < 1e-12
        shifted = advantages_of(script, rewards + shift, 4, baseline)
        torch.testing.assert_close(shifted, advantages, rtol=1e-9, atol=1e-12)


# ---- the losses by hand


TOKEN_KL = (0.5 - math.log(1.5)) * 2 + (math.log(2) - 0.5) * 2 + (1 - math.log(2))
S1, S2 = 1.5 ** (1 / 3), 0.75 ** (1 / 3)  # the geometric means of the ratios of the two completions
CLIPPED_SUM, CLIPPED_GRADIENT = -2.4 - 2.4 - 1.0 + 1.5 + 0.8 + 1.0, tensor([[0, 0, -1, 0], [1.5, 0, 1, 0]])
CLIPPED = {"approx_kl": TOKEN_KL, "clip_fraction_low": 1, "clip_fraction_high": 2}
BY_HAND = {  # loss, gradient, metrics
    "reinforce": (2 * 6.0 - 4.5, [[-2.0, -2.0, -2.0, 0.0], [1.0, 1.0, 1.0, 0.0]], {}),
    "dr_grpo": (CLIPPED_SUM / 9, CLIPPED_GRADIENT / 9, CLIPPED),
    "dapo": (-2.56 - 2.56 - 1.0 + 1.5 + 0.8 + 1.0, CLIPPED_GRADIENT, CLIPPED),
    "grpo_process": (CLIPPED_SUM / 3, CLIPPED_GRADIENT / 3, CLIPPED),
    "gspo": (
        -2 * S1 + S2,
        [[-2 * S1 / 3] * 3 + [0.0], [S2 / 3] * 3 + [0.0]],
        {"approx_kl": TOKEN_KL, "clip_fraction_low": 0, "clip_fraction_high": 0},
    ),
    "cispo": (
        2 * (1.28 * 1 + 1.28 * 2 + 0.5 * 3) - (1.28 * 0.5 + 0.5 * 1.5 + 1.0 * 2.5),
        [[-2.56, -2.56, -1.0, 0.0], [1.28, 0.5, 1.0, 0.0]],
        {"approx_kl": TOKEN_KL, "cap_fraction": 3},
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_loss_gradient_and_metrics_by_hand(name, hand_inputs):  # noqa: F811
    expected_loss, expected_gradient, expected_metrics = BY_HAND[name]
    loss, gradient, metrics = loss_and_gradient(SIBLINGS[name], hand_inputs | WITHOUT_KL)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    expected_gradient = torch.as_tensor(expected_gradient, dtype=torch.float64)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-15)
    expected = {"loss/policy": expected_loss} | {f"policy/{key}": value for key, value in expected_metrics.items()}
    assert {key: value.item() for key, value in metrics.items()} == pytest.approx(expected, rel=1e-12)
    assert not any(value.requires_grad or value.ndim for value in metrics.values())


@pytest.mark.parametrize("low, high", [(0.05, 0.1), (0.3, 0.1), (0.05, 0.3)])
def test_gspo_clips_whole_completions(hand_inputs, low, high):  # noqa: F811
    """The ratios are 1.145 at advantage 2 and 0.909 at -1; each has three tokens, and its fractions are of tokens."""
    loss, gradient, metrics = loss_and_gradient(gspo, hand_inputs, clip_eps_low=low, clip_eps_high=high)
    clipped = [S1 > 1 + high, S2 < 1 - low]
    assert metrics["policy/clip_fraction_high"] == 3 * clipped[0]
    assert metrics["policy/clip_fraction_low"] == 3 * clipped[1]
    assert [(row == 0).all().item() for row in gradient] == clipped
    assert loss.item() == pytest.approx(-2 * min(S1, 1 + high) + max(S2, 1 - low))


CLIP_CASES = [  # advantage, ratio, gradient with bounds 1 - 0.2 and 1 + 0.28 (grpo, dr_grpo: 1 + 0.2)
    (1.0, 1.3, 0.0),  # clipped
    (-1.0, 0.7, 0.0),  # clipped
    (-2.0, 1.3, 2.6),  # too likely and bad: not clipped
    (-2.0, 9.0, 18.0),  # however far: no second clip
    (2.0, 0.7, -1.4),  # too unlikely and good: not clipped
    (2.0, 1.1, -2.2),
    (-2.0, 0.9, 1.8),
    (0.0, 9.0, 0.0),
]


def two_completions(advantage, ratio):
    """The second has ratio 1; both have a masked position."""
    old_logprobs = tensor([[-1.0, -2.0], [-1.0, -2.0]])
    inputs = {"old_logprobs": old_logprobs, "logprobs": old_logprobs + tensor([[math.log(ratio)], [0.0]])}
    inputs |= {"advantages": tensor([advantage, advantage]), "completion_mask": torch.tensor([[1, 0], [1, 0]])}
    return inputs | WITHOUT_KL | {"max_completion_length": 1}


@pytest.mark.parametrize("script", [grpo, dr_grpo, dapo, gspo], ids=lambda script: script.__name__)
@pytest.mark.parametrize("advantage, ratio, gradient", CLIP_CASES)
def test_where_the_clip_stops_the_gradient(script, advantage, ratio, gradient):
    _, actual, _ = loss_and_gradient(script, two_completions(advantage, ratio))
    torch.testing.assert_close(actual, tensor([[gradient, 0.0], [-advantage, 0.0]]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("advantage, ratio, gradient", CLIP_CASES)
def test_cispo_caps_the_weight_and_keeps_the_gradient(advantage, ratio, gradient):
    """Every token of an advantage has one, those that a clip leaves out, too; both signs have one cap."""
    _, actual, metrics = loss_and_gradient(cispo, two_completions(advantage, ratio))
    expected = tensor([[-min(ratio, 1.28) * advantage, 0.0], [-advantage, 0.0]])
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    assert (actual[0, 0] == 0) == (advantage == 0) and metrics["policy/cap_fraction"] == (ratio > 1.28)
    if gradient and ratio < 1.28:
        assert actual[0, 0].item() == pytest.approx(gradient)


@pytest.mark.parametrize("ratio, is_clipped", [(1.25, False), (1.27, False), (1.29, True)])
def test_dapo_clips_higher_above_than_below(ratio, is_clipped):
    assert (loss_and_gradient(dapo, two_completions(1.0, ratio))[1][0] == 0).all() == is_clipped
    assert (loss_and_gradient(dr_grpo, two_completions(1.0, ratio))[1][0] == 0).all()  # one range of 0.2


@pytest.mark.parametrize("script", [grpo, dr_grpo, dapo, gspo], ids=lambda script: script.__name__)
@pytest.mark.parametrize(
    "advantage, ratio, low, high",
    [
        (1.0, 1.25, 0, 1),  # above both 1 + 0.1 and, for grpo and dr_grpo, 1 + 0.2
        (-1.0, 0.85, 0, 0),  # above both 1 - 0.3 and 1 - 0.2
        (-1.0, 0.65, 1, 0),
        (-1.0, 9.0, 0, 0),  # outside, but on the side where nothing is clipped
        (1.0, 0.1, 0, 0),
        (0.0, 9.0, 0, 0),
        (0.0, 0.1, 0, 0),
    ],
)
def test_what_counts_as_clipped(script, advantage, ratio, low, high):
    inputs = two_completions(advantage, ratio) | {"clip_eps_low": 0.3, "clip_eps_high": 0.1}
    _, metrics = policy_loss(script, inputs)
    assert [metrics[f"policy/clip_fraction_{side}"].item() for side in ("low", "high")] == [low, high]


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


def test_overlong_penalty_is_that_of_others():
    [case] = read_oracle("dapo_overlong")
    lengths, config = case["inputs"]["lengths"], case["config"]
    penalty = dapo.overlong_penalty(tensor(lengths), config["L_max"], config["L_cache"])
    torch.testing.assert_close(penalty, tensor(case["outputs"]["trl"]))
    # verl's goes on falling past the limit, which no completion passes
    within = [i for i, length in enumerate(lengths) if length <= config["L_max"]]
    torch.testing.assert_close(penalty[within], tensor(case["outputs"]["verl"])[within])


# ---- DAPO's own functions


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_overlong_penalty_by_hand(dtype):
    lengths = torch.tensor([0, 1, 39, 40, 41, 44, 47, 48, 49], dtype=dtype)
    penalties = dapo.overlong_penalty(lengths, 48, 8)
    assert penalties.tolist() == [0, 0, 0, 0, -1 / 8, -1 / 2, -7 / 8, -1, -1]
    assert penalties.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert dapo.overlong_penalty(lengths[:-1], 48, 0).tolist() == [0.0] * 8
    expected = [-n / 48 for n in lengths[:-1].tolist()]
    assert dapo.overlong_penalty(lengths[:-1], 48, 48).tolist() == pytest.approx(expected)


def test_has_signal():
    rewards = tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.3, 0.3, 0.3, 0.3, 0.3, 0.4])
    assert dapo.has_signal(rewards, 3).tolist() == [False, False, True, True, False, True]


# ---- neighbours


@pytest.fixture
def inputs():
    return random_inputs() | WITHOUT_KL


@pytest.mark.parametrize(
    "script, divide_by",
    [
        (grpo, lambda mask: mask.sum(1, keepdim=True)),
        (dr_grpo, lambda mask: 9),  # noqa: ARG005
        (dapo, lambda mask: 1),  # noqa: ARG005
        (cispo, lambda mask: 1),  # noqa: ARG005
    ],
)
def test_at_ratio_1_the_gradient_is_that_of_reinforce_over_what_each_divides_by(script, divide_by, inputs):
    narrow = dict.fromkeys(("clip_eps", "clip_eps_low", "clip_eps_high"), 1e-6)
    gradient = loss_and_gradient(script, inputs, old_logprobs=inputs["logprobs"], **narrow)[1]
    expected = loss_and_gradient(reinforce, inputs)[1] / divide_by(inputs["completion_mask"])
    torch.testing.assert_close(gradient, expected)


def test_all_with_a_clip_are_equal_for_completions_of_one_token(inputs):
    one_token = {key: value[:, :1] for key, value in inputs.items() if torch.is_tensor(value) and value.ndim == 2}
    changes = one_token | {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "max_completion_length": 1}
    results = [loss_and_gradient(script, inputs, **changes)[:2] for script in (grpo, dr_grpo, dapo, gspo)]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_at_equal_lengths_dapo_is_length_times_grpo_and_dr_grpo_with_that_constant_is_grpo(inputs):
    inputs = inputs | {"completion_mask": torch.ones(6, 5), "clip_eps_high": 0.2, "max_completion_length": 5}
    expected, dapos, dr_grpos = (loss_and_gradient(script, inputs)[:2] for script in (grpo, dapo, dr_grpo))
    torch.testing.assert_close(dapos, tuple(5 * value for value in expected))
    torch.testing.assert_close(dr_grpos, expected)


def test_without_cap_and_clip_cispo_has_the_gradient_of_dapo(inputs):
    """r ∇ log π = ∇ r: where nothing is clipped, the two are one."""
    wide = {"clip_eps_low": 1e9, "clip_eps_high": 1e9}
    actual, expected = (loss_and_gradient(script, inputs, **wide)[1] for script in (cispo, dapo))
    torch.testing.assert_close(actual, expected)
    clipped = loss_and_gradient(dapo, inputs)[1]
    assert ((clipped == 0) & (actual != 0)).any() and (actual[inputs["completion_mask"]] != 0).all()


# ---- properties that all share


@pytest.fixture
def with_kl():
    """For those that have a KL term."""
    return random_inputs()


@each_script
def test_masked_positions_do_not_matter(script, with_kl):
    loss, gradient, metrics = loss_and_gradient(script, with_kl)
    mask, keys = with_kl["completion_mask"], ("logprobs", "old_logprobs", "ref_logprobs")
    dtypes = (torch.int64, torch.uint8, torch.float32, torch.float64)
    changes = [{"completion_mask": mask.to(dtype)} for dtype in dtypes]  # masks of every type are equal
    for garbage in (1e30, -1e30, math.inf, -math.inf, math.nan):
        for names in ([keys[0]], [keys[1]], [keys[2]], keys[:2]):
            changes.append({name: torch.where(mask, with_kl[name], garbage) for name in names})
    for change in changes:
        changed = loss_and_gradient(script, with_kl, **change)
        assert torch.equal(changed[0], loss) and torch.equal(changed[1], gradient) and changed[2] == metrics
    assert (gradient[~mask] == 0).all() and (gradient[mask] != 0).any()


@each_script
def test_padding_columns_do_not_matter(script, with_kl):
    keys = ("logprobs", "old_logprobs", "ref_logprobs")
    padded = {name: torch.cat([with_kl[name], torch.full((6, 3), 7.0)], 1) for name in keys}
    padded["completion_mask"] = torch.cat([with_kl["completion_mask"], torch.zeros(6, 3, dtype=torch.bool)], 1)
    loss, gradient, metrics = loss_and_gradient(script, with_kl)
    padded_loss, padded_gradient, padded_metrics = loss_and_gradient(script, with_kl, **padded)
    torch.testing.assert_close((padded_loss, padded_metrics), (loss, metrics))
    torch.testing.assert_close(padded_gradient, torch.cat([gradient, torch.zeros(6, 3)], 1))


@each_script
def test_row_without_tokens_counts_nothing(script, with_kl):
    mask = with_kl["completion_mask"].clone()
    mask[2] = False
    loss, gradient, metrics = loss_and_gradient(script, with_kl, completion_mask=mask)
    others = {key: value[[0, 1, 3, 4, 5]] for key, value in with_kl.items() if torch.is_tensor(value)}
    torch.testing.assert_close((loss, metrics), policy_loss(script, with_kl | others))
    assert (gradient[2] == 0).all()


@each_script
def test_rows_are_independent_and_their_order_does_not_matter(script, with_kl):
    loss, gradient, metrics = loss_and_gradient(script, with_kl)
    order = [3, 4, 5, 0, 2, 1]
    rows = [{key: value[[i]] for key, value in with_kl.items() if torch.is_tensor(value)} for i in order]
    results = [loss_and_gradient(script, with_kl | row) for row in rows]
    torch.testing.assert_close(sum(result[0] for result in results), loss)
    torch.testing.assert_close(torch.cat([result[1] for result in results]), gradient[order])
    for key in metrics:
        torch.testing.assert_close(sum(result[2][key] for result in results), metrics[key])


@each_script
def test_float32_stays_float32_and_agrees(script):
    loss, gradient, _ = loss_and_gradient(script, random_inputs(dtype=torch.float32))
    expected = loss_and_gradient(script, random_inputs())
    assert loss.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected[1], rtol=1e-5, atol=1e-6)


@each_script
def test_inputs_stay_as_they_are(script, with_kl):
    before = {key: value.clone() for key, value in with_kl.items() if torch.is_tensor(value)}
    loss_and_gradient(script, with_kl)
    if script is not grpo_process:
        rewards = tensor([1.0, 0.0, 0.0, 0.5, 0.5, 0.5])
        advantages_of(script, rewards, 3)
        assert rewards.tolist() == [1.0, 0.0, 0.0, 0.5, 0.5, 0.5]
    assert all(torch.equal(with_kl[key], value) for key, value in before.items())
