"""PPO's token rewards, advantages, whitening and losses; its exact expected gradient; its accumulated gradients."""

import math

import pytest
import torch
from helpers import (
    CLIP_CASES,
    COMPLETIONS,
    MAX_LENGTH,
    PROMPTS,
    TEMPERATURE,
    VOCAB_SIZE,
    exact_logprobs,
    gradient_of,
    read_oracle,
    tensor,
)
from preference_ranks import INPUTS, PAIRS, TEXTS, build_actor_critic, build_scorer, make_ppo_batch
from tiny import build_model, pad_right, parse, read_jsonl, record, relative_error, write_rows

import ppo_rlhf
from ppo_rlhf import compute_advantages, explained_variance, policy_loss, token_rewards, value_loss, whiten


@pytest.fixture(scope="module", autouse=True)
def group():
    """A process group of one."""
    ppo_rlhf.init_ranks()
    yield
    if torch.distributed.is_initialized():  # main ends the group
        torch.distributed.destroy_process_group()


def random_inputs(dtype=torch.float64):
    """Six completions of 1 to 5 tokens; ratios and values on both sides of their clip ranges."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(7, 6, 5, generator=generator, dtype=torch.float64).to(dtype)
    return {
        "logprobs": noise[0] - 2,
        "old_logprobs": noise[0] - 2 + 0.3 * noise[1],
        "ref_logprobs": noise[0] - 2 + noise[2],
        "advantages": noise[3],
        "rewards": noise[3] + noise[4],
        "values": noise[4],
        "old_values": noise[4] + 0.4 * noise[5],
        "returns": noise[6],
        "scores": tensor([0.5, -1.5, 1.0, 1.1, -0.2, -0.9], dtype),
        "completion_mask": torch.arange(5) < torch.tensor([[5], [1], [3], [2], [4], [5]]),
    }


# function: what it takes and how it is called
FUNCTIONS = {
    "token_rewards": (("old_logprobs", "ref_logprobs"), lambda x, *rest: token_rewards(x["scores"], *rest, 0.05)),
    "compute_advantages": (("rewards", "values"), lambda x, *rest: compute_advantages(*rest, 0.9, 0.8)),  # noqa: ARG005
    "whiten": (("advantages",), lambda x, *rest: whiten(*rest)),  # noqa: ARG005
    "policy_loss": (("logprobs", "old_logprobs", "advantages"), lambda x, *rest: policy_loss(*rest, 0.2)),  # noqa: ARG005
    "value_loss": (("values", "old_values", "returns"), lambda x, *rest: value_loss(*rest, 0.2)),  # noqa: ARG005
    "explained_variance": (("returns", "values"), lambda x, *rest: explained_variance(*rest)),  # noqa: ARG005
}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def results_of(name, inputs):
    """Everything a function returns, as tensors by name; of a loss also its gradient."""
    names, function = FUNCTIONS[name]
    first, *others = (inputs[key].detach().clone() for key in names)
    is_loss = name.endswith("_loss")
    outputs = function(inputs, first.requires_grad_(is_loss), *others, inputs["completion_mask"])
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    results = {f"output {i}": torch.as_tensor(x) for i, x in enumerate(outputs) if not isinstance(x, dict)}
    if is_loss:
        outputs[0].backward()
        results = {"loss": outputs[0].detach(), "gradient": first.grad, **outputs[1]}
    return results


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# ---- by hand


def test_token_rewards_by_hand():
    old_logprobs = tensor([[-1.0, -2.0, -3.0], [-0.5, -4.0, 9.0], [-1.0, -1.0, -1.0]])
    ref_logprobs = tensor([[-1.5, -1.0, -3.0], [-0.5, -2.0, 8.0], [-2.0, 5.0, -3.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1]])  # the last with a hole: its last token is still the third
    rewards = token_rewards(tensor([2.0, -1.0, 3.0]), old_logprobs, ref_logprobs, mask, 0.1)
    expected = tensor([[-0.05, 0.1, 2.0], [0.0, -0.8, 0.0], [-0.1, 0.0, 2.8]])
    torch.testing.assert_close(rewards, expected, rtol=1e-12, atol=1e-15)
    without = token_rewards(tensor([2.0, -1.0, 3.0]), old_logprobs, None, mask, 0.0)  # which needs no reference
    assert without.tolist() == [[0, 0, 2], [0, -1, 0], [0, 0, 3]]


def test_advantages_and_returns_by_hand():
    rewards = tensor([[1.0, 0.5, 2.0], [3.0, 9.0, 9.0], [0.0, 1.0, 9.0]])
    values = tensor([[0.2, 0.4, -0.3], [1.0, 9.0, 9.0], [0.5, 0.5, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]])
    advantages, returns = compute_advantages(rewards, values, mask, 0.9, 0.8)
    # deltas 1.16, -0.17, 2.3; 2; -0.05, 0.5
    expected = tensor([[1.16 + 0.72 * (-0.17 + 0.72 * 2.3), -0.17 + 0.72 * 2.3, 2.3], [2, 0, 0], [0.31, 0.5, 0]])
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(returns, expected + values * mask, rtol=1e-12, atol=1e-15)


def test_whiten_by_hand():
    whitened = whiten(tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]]))
    expected = tensor([[-4 / 3, -1 / 3, 0.0], [5 / 3, 0.0, 0.0]]) / math.sqrt(7 / 3 + 1e-8)
    torch.testing.assert_close(whitened, expected, rtol=1e-12, atol=0)
    for values in ([[3.0, 9.0]], [[3.0, 3.0]]):  # without variance
        assert whiten(tensor(values), torch.tensor(values) == 3.0).tolist() == [[0.0, 0.0]]


def test_policy_loss_gradient_and_metrics_by_hand():
    ratios = tensor([[1.5, 2.0, 0.5, 9.0], [1.5, 0.5, 1.0, 9.0]])
    logprobs = tensor([[-1.0, -2.0, -3.0, -4.0], [-0.5, -1.5, -2.5, -3.5]]).requires_grad_()
    advantages = tensor([[2.0, -1.0, 2.0, 5.0], [-1.0, -1.0, 3.0, 5.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])
    loss, metrics = policy_loss(logprobs, logprobs.detach() - ratios.log(), advantages, mask, 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(-2.4 + 2.0 - 1.0 + 1.5 + 0.8 - 3.0, rel=1e-12)
    expected = tensor([[0.0, 2.0, -1.0, 0.0], [1.5, 0.0, -3.0, 0.0]])
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-12, atol=1e-15)
    approx_kl = 2 * (0.5 - math.log(1.5)) + (1 - math.log(2)) + 2 * (math.log(2) - 0.5)
    expected = {"loss/policy": -2.1, "policy/approx_kl": approx_kl}
    expected |= {"policy/clip_fraction_low": 1, "policy/clip_fraction_high": 1}
    assert {key: value.item() for key, value in metrics.items()} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "value, target, loss, gradient, clipped",
    [
        (1.1, 2.0, 0.405, -0.9, 0),  # within 0.2 of the old value, which is 1
        (1.5, 2.0, 0.32, 0.0, 1),  # above, and on its way to the return: stopped
        (1.5, 0.5, 0.5, 1.0, 0),  # above, and away from the return: called back
        (0.5, 0.0, 0.32, 0.0, 1),
        (0.5, 1.2, 0.245, -0.7, 0),
        (1.0, 1.0, 0.0, 0.0, 0),
    ],
)
def test_value_loss_by_hand(value, target, loss, gradient, clipped):
    values = tensor([[value, 7.0]]).requires_grad_()
    mask = torch.tensor([[1, 0]])
    actual, metrics = value_loss(values, tensor([[1.0, 0.0]]), tensor([[target, 0.0]]), mask, 0.2)
    actual.backward()
    assert actual.item() == metrics["loss/value"].item() == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(values.grad, tensor([[gradient, 0.0]]), rtol=1e-12, atol=0)
    assert metrics["value/clip_fraction"].item() == clipped


@pytest.mark.parametrize(
    "values, expected",
    [([1.0, 2.0, 4.0], 1.0), ([6.0, 7.0, 9.0], 1.0), ([5.0, 5.0, 5.0], 0.0), ([-1.0, -2.0, -4.0], -3.0)],
)
def test_explained_variance_by_hand(values, expected):
    returns = tensor([[1.0, 2.0, 99.0], [4.0, 99.0, 99.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    values = torch.zeros_like(returns).masked_scatter(mask.bool(), tensor(values))
    assert explained_variance(returns, values, mask) == pytest.approx(expected, abs=1e-12)


# ---- against other people's code


@pytest.mark.parametrize("case", read_oracle("gae_verl") + read_oracle("gae_oat"), ids=lambda case: case["name"])
def test_rewards_advantages_and_returns_are_those_of_verl_and_oat(case):
    inputs = {key: tensor(values) for key, values in case["inputs"].items()}
    outputs = {key: tensor(values) for key, values in case["outputs"].items()}
    mask, config, rewards = inputs["mask"], case["config"], inputs.get("token_rewards")
    if rewards is None:
        scores, logprobs, ref_logprobs = (inputs[key] for key in ("scores", "old_logp", "ref_logp"))
        rewards = token_rewards(scores, logprobs, ref_logprobs, mask, config["kl_coef_in_reward"])
        torch.testing.assert_close(rewards, outputs["token_rewards"], rtol=1e-9, atol=1e-15)
    advantages, returns = compute_advantages(rewards, inputs["values"], mask, config["gamma"], config["lam"])
    torch.testing.assert_close(returns * mask, outputs["returns"] * mask, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(whiten(advantages, mask), outputs["advantages_whitened"] * mask, rtol=1e-6, atol=0)


@pytest.mark.parametrize("case, num_rows", zip(read_oracle("gae_summarize"), (1, 4)))
def test_returns_are_those_of_huang_et_al_where_the_place_of_the_score_does_not_matter(case, num_rows):
    """Theirs stands one later, unless the completion is of full width: as good as ours there, and at λ = 1."""
    inputs = {key: tensor(values) for key, values in case["inputs"].items()}
    outputs = {key: tensor(values) for key, values in case["outputs"].items()}
    mask, config = inputs["mask"], case["config"]
    rewards = token_rewards(inputs["scores"], inputs["old_logp"], inputs["ref_logp"], mask, config["kl_coef"])
    advantages, returns = compute_advantages(rewards, inputs["values"], mask, config["gamma"], config["lam"])
    is_full = mask.all(1)
    torch.testing.assert_close(rewards[is_full], outputs["token_rewards"][is_full], rtol=1e-9, atol=1e-15)
    same = is_full | (config["lam"] == 1)
    assert is_full.sum() == 1 and same.sum() == num_rows
    torch.testing.assert_close(returns[same], (outputs["returns"] * mask)[same], rtol=1e-9, atol=1e-15)
    if same.all():
        ddof_0 = math.sqrt(mask.sum() / (mask.sum() - 1))
        torch.testing.assert_close(ddof_0 * whiten(advantages, mask), outputs["advantages_whitened"], rtol=1e-6, atol=0)


def test_losses_and_gradients_are_those_of_verl():
    [case] = [case for case in read_oracle("ppo_verl") if case["config"]["clip_ratio_c"] == 1e9]  # no second clip
    inputs = {key: tensor(values) for key, values in case["inputs"].items()}
    mask, config, outputs = inputs["mask"], case["config"], case["outputs"]
    new_logp, vpred = inputs["new_logp"].requires_grad_(), inputs["vpred"].requires_grad_()
    loss, metrics = policy_loss(new_logp, inputs["old_logp"], inputs["advantages"], mask, config["clip_ratio"])
    error, value_metrics = value_loss(vpred, inputs["values"], inputs["returns"], mask, config["cliprange_value"])
    count = mask.sum()
    ((loss + error) / count).backward()
    assert (loss / count).item() == pytest.approx(outputs["pg_loss"], rel=1e-6, abs=1e-8)
    assert (error / count).item() == pytest.approx(outputs["vf_loss"], rel=1e-9)
    torch.testing.assert_close(new_logp.grad, tensor(outputs["grad_logp"]), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(vpred.grad, tensor(outputs["grad_vpred"]), rtol=1e-9, atol=1e-12)
    clipped = metrics["policy/clip_fraction_low"] + metrics["policy/clip_fraction_high"]
    assert (clipped / count).item() == pytest.approx(outputs["pg_clipfrac"], rel=1e-6)
    assert (value_metrics["value/clip_fraction"] / count).item() == pytest.approx(outputs["vf_clipfrac"], rel=1e-6)


# ---- identities


def test_gamma_and_lambda_1_give_the_reward_to_go():
    x = random_inputs()
    mask = x["completion_mask"]
    advantages, returns = compute_advantages(x["rewards"], x["values"], mask, 1.0, 1.0)
    to_go = (x["rewards"] * mask).flip(1).cumsum(1).flip(1) * mask
    torch.testing.assert_close(returns, to_go)
    torch.testing.assert_close(advantages, to_go - x["values"] * mask)


@pytest.mark.parametrize("advantage, ratio, gradient", CLIP_CASES)
def test_where_the_clip_stops_the_gradient(advantage, ratio, gradient):
    """However far the ratio of a bad token rises, there is no second clip."""
    old_logprobs = tensor([[-1.0, -2.0]])
    logprobs = (old_logprobs + math.log(ratio)).requires_grad_()
    policy_loss(logprobs, old_logprobs, tensor([[advantage, 5.0]]), torch.tensor([[1, 0]]), 0.2)[0].backward()
    torch.testing.assert_close(logprobs.grad, tensor([[gradient, 0.0]]), rtol=1e-12, atol=0)


# ---- masks, padding, types


@pytest.mark.parametrize("garbage", [math.nan, -math.inf, 1e30])
@each_function
def test_masked_positions_do_not_matter(name, garbage):
    x = random_inputs()
    expected = results_of(name, x)
    names = FUNCTIONS[name][0]
    for filled in [*((key,) for key in names), names]:
        changed = {key: torch.where(x["completion_mask"], x[key], garbage) for key in filled}
        assert_equal(results_of(name, x | changed), expected)
    for dtype in (torch.int64, torch.uint8, torch.float32, torch.float64):
        assert_equal(results_of(name, x | {"completion_mask": x["completion_mask"].to(dtype)}), expected)


@each_function
def test_float32_stays_float32_and_agrees(name):
    actual, expected = results_of(name, random_inputs(torch.float32)), results_of(name, random_inputs())
    for key, value in expected.items():
        if value.dtype == torch.float64 and name != "explained_variance":  # which returns a number
            assert actual[key].dtype == torch.float32
        torch.testing.assert_close(actual[key], value, rtol=1e-4, atol=1e-5, check_dtype=False)


@each_function
def test_inputs_stay_as_they_are(name):
    x = random_inputs()
    names, function = FUNCTIONS[name]
    function(x, *(x[key] for key in names), x["completion_mask"])
    assert_equal(x, random_inputs())


# ---- values of a model


@pytest.mark.parametrize("config", ["llama", "gpt2"])
def test_values_are_scores_of_the_prefixes(config):
    """By Hugging Face's own forward pass of what stands before each token, alone and without padding."""
    model = build_scorer(config)
    model.config.pad_token_id = None  # else a prefix that ends in that id is read elsewhere
    inputs = *ppo_rlhf.pad_left(PAIRS, "cpu"), *pad_right([pair["chosen_ids"] for pair in PAIRS], 9)
    with torch.no_grad():
        values = ppo_rlhf.token_values(model, *inputs)
        expected = torch.zeros(8, 9, dtype=torch.float64)
        for row, pair in enumerate(PAIRS):
            for t in range(len(pair["chosen_ids"])):
                expected[row, t] = model(torch.tensor([pair["prompt_ids"] + pair["chosen_ids"][:t]])).logits
        filled = [torch.where(mask.bool(), ids, 7) for ids, mask in (inputs[:2], inputs[2:])]
        assert_equal(ppo_rlhf.token_values(model, filled[0], inputs[1].bool(), filled[1], inputs[3].bool()), values)
    torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-12)
    assert values[inputs[3].bool()].std() > 0.1


# ---- the exact gradient


@pytest.fixture(scope="module")
def model():
    return build_model("llama", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def rows(model):
    """Every completion of every prompt with its score, probability (with graph) and reference's log-probabilities."""
    prompts = [prompt for prompt in PROMPTS for _ in COMPLETIONS]
    completions = COMPLETIONS * len(PROMPTS)
    inputs = *ppo_rlhf.pad_left([{"prompt_ids": ids} for ids in prompts], "cpu"), *pad_right(completions, MAX_LENGTH)
    mask = inputs[3]
    logprobs, _ = exact_logprobs(model)
    ref = build_model("llama", vocab_size=VOCAB_SIZE, scale=4.0)
    scores = tensor([(sum(c) + len(c) + p[0]) % 3 for p, c in zip(prompts, completions)])
    return {
        "inputs": inputs,
        "mask": mask,
        "prefixes": [[(*p, "|", *c[:t]) for t in range(MAX_LENGTH)] for p, c in zip(prompts, completions)],
        "sequence_logprobs": (logprobs * mask).sum(1),
        "ref_logprobs": exact_logprobs(ref)[0].detach(),
        "scores": scores,
    }


def exact_values(rows, rewards):
    """Expected rewards to go after every prefix (R, T), by summing over all completions that begin so."""
    probabilities = rows["sequence_logprobs"].detach().exp().tolist()
    to_go = rewards.flip(1).cumsum(1).flip(1)
    sums, masses = {}, {}
    for row, probability in enumerate(probabilities):
        for t in range(int(rows["mask"][row].sum())):
            prefix = rows["prefixes"][row][t]
            sums[prefix] = sums.get(prefix, 0.0) + probability * to_go[row, t].item()
            masses[prefix] = masses.get(prefix, 0.0) + probability
    values = [[sums[p] / masses[p] if p in sums else 0.0 for p in prefixes] for prefixes in rows["prefixes"]]
    return tensor(values) * rows["mask"]


def gradient_error(model, rows, kl_coef, gae_lambda=1.0, change_rewards=None, change_values=None, true_kl_coef=None):
    """Relative error of PPO's expected gradient at ratio 1, against that of E[score] - kl_coef KL(π || ref)."""
    log_ratio = rows["sequence_logprobs"] - (rows["ref_logprobs"] * rows["mask"]).sum(1)
    penalty = (kl_coef if true_kl_coef is None else true_kl_coef) * log_ratio
    exact = gradient_of(model, (rows["sequence_logprobs"].exp() * (rows["scores"] - penalty)).sum())
    logprobs, _ = ppo_rlhf.token_logprobs(model, *rows["inputs"], TEMPERATURE)
    old_logprobs, mask = logprobs.detach(), rows["mask"]
    rewards = token_rewards(rows["scores"], old_logprobs, rows["ref_logprobs"], mask, kl_coef)
    rewards = change_rewards(rewards, rows) if change_rewards else rewards
    values = exact_values(rows, rewards)
    values = change_values(values) if change_values else values
    advantages, _ = compute_advantages(rewards, values, mask, 1.0, gae_lambda)
    # The loss is proportional to positive factors of the advantages: probabilities may stand there.
    weights = rows["sequence_logprobs"].detach().exp().unsqueeze(1)
    loss, _ = policy_loss(logprobs, old_logprobs, weights * advantages, mask, 0.2)
    return relative_error(gradient_of(model, loss), -exact)


@pytest.mark.parametrize("gae_lambda", [1.0, 0.95, 0.0])
@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_expected_gradient_is_exact_with_exact_values(model, rows, kl_coef, gae_lambda):
    """With the values of the policy itself every λ is unbiased; with any others λ = 1 is."""
    assert gradient_error(model, rows, kl_coef, gae_lambda) < 1e-9
    assert gae_lambda < 1 or gradient_error(model, rows, kl_coef, 1.0, change_values=lambda x: x.sin() + 1) < 1e-9


def score_one_early(rewards, rows):
    """Move the score of every completion that has a token before its last."""
    scores = token_rewards(rows["scores"], None, None, rows["mask"], 0.0)
    scores = scores * (rows["mask"].sum(1, keepdim=True) > 1)
    return rewards - scores + scores.roll(-1, 1)


WRONG = {
    "score one token early": {"change_rewards": score_one_early},
    "KL dropped": {"kl_coef": 0.0, "true_kl_coef": 0.5},
    "KL of the other sign": {"kl_coef": -0.5, "true_kl_coef": 0.5},
    "values of the next state": {"gae_lambda": 0.5, "change_values": lambda values: values.roll(-1, 1)},
    "wrong values at λ = 0": {"gae_lambda": 0.0, "change_values": lambda values: values.sin() + 1},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_gradients_are_told_apart(model, rows, wrong):
    assert gradient_error(model, rows, **{"kl_coef": 0.5} | WRONG[wrong]) > 1e-3


# ---- a step as a whole, and gradients that are accumulated


def test_metrics_of_a_step_are_means_over_what_they_count():
    totals = {"loss/value": 6.0, "policy/entropy": 30.0, "value/clip_fraction": 5.0, "num_tokens": 20}
    masks = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]])
    batch = {"rewards": tensor([1.0, 0, 0, 0]), "scores": tensor([-2.0, 0, 0, 0]), "completion_mask": masks}
    batch |= {"old_logprobs": -1.0 * masks, "ref_logprobs": -2.0 * masks, "lengths": masks.sum(1)}
    batch["truncated"] = torch.tensor([False, True, False, False])
    expected = {"loss/value": 0.5, "policy/entropy": 1.5, "value/clip_fraction": 0.25, "reward/mean": 0.25}
    expected |= {"score/mean": -0.5, "rollout/length_mean": 2.5, "rollout/truncated": 0.25, "rollout/ref_kl_sum": 2.5}
    assert ppo_rlhf.step_metrics(totals, 12, batch) == expected


@pytest.fixture(scope="module")
def policy():
    return build_actor_critic()


@pytest.fixture(scope="module")
def batch(policy):
    return make_ppo_batch(policy)


def accumulate(policy, batch, rows=range(8), budget=10_000, on_policy=False):
    """Gradient and metrics of one optimizer step over these rows."""
    rows = torch.tensor([*rows], dtype=torch.long)
    policy.zero_grad()
    args = ppo_rlhf.Args(temperature=0.7, microbatch_tokens=budget)
    metrics = ppo_rlhf.accumulate_gradients(policy, batch, rows, 30, on_policy, args)
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]), metrics


@pytest.fixture(scope="module")
def whole(policy, batch):
    return accumulate(policy, batch)


def test_accumulated_gradient_is_that_of_both_losses(policy, batch, whole):
    inputs, mask = [batch[key] for key in INPUTS], batch["completion_mask"]
    logprobs, entropies = ppo_rlhf.token_logprobs(policy.model, *inputs, 0.7)
    values = (ppo_rlhf.token_values(policy.critic.model, *inputs) - 0.3) / 1.7
    loss, metrics = policy_loss(
        logprobs, batch["old_logprobs"], batch["advantages"], mask, 0.2, batch["sampler_logprobs"], 2.0
    )
    error, value_metrics = value_loss(values, batch["old_values"], batch["returns"], mask, 0.2)
    assert relative_error(whole[0], gradient_of(policy, (loss + error) / 30)) < 1e-12
    ref_log_ratio = (batch["ref_logprobs"] - logprobs.detach()) * mask
    counts = {"policy/entropy": entropies.sum(), "num_tokens": mask.sum()}
    counts["policy/ref_kl"] = (ref_log_ratio.exp() - ref_log_ratio - 1).sum()
    torch.testing.assert_close(dict(whole[1]), {**metrics, **value_metrics, **counts}, check_dtype=False)
    assert value_metrics["value/clip_fraction"] > 0 and metrics["policy/clip_fraction_high"] > 0


def permute(batch):
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    return {key: value[order] for key, value in batch.items()}


def pad(batch):
    """Columns of nothing but garbage on the outside."""
    padded = {"lengths": batch["lengths"]}
    for key in [key for key in batch if key != "lengths"]:
        sides = (3, 0) if key.startswith("prompt") else (0, 4)
        value = 0 if "mask" in key else 7 if "ids" in key else math.nan
        padded[key] = torch.nn.functional.pad(batch[key], sides, value=value) if batch[key].ndim > 1 else batch[key]
    return padded


@pytest.mark.parametrize(
    "change, budget, count", [(dict, 1, 8), (dict, 20, 4), (dict, 60, 2), (permute, 30, 3), (pad, 10_000, 1)]
)
def test_microbatches_change_neither_gradient_nor_metrics(policy, batch, whole, change, budget, count):
    """Nor do the order of the rows, and padding."""
    assert len(list(ppo_rlhf.microbatches(change(batch), torch.arange(8), budget))) == count
    gradient, metrics = accumulate(policy, change(batch), budget=budget)
    assert relative_error(gradient, whole[0]) < 1e-9
    torch.testing.assert_close(dict(metrics), dict(whole[1]), rtol=1e-9, atol=1e-12)


def test_of_no_rows_there_is_no_gradient_and_all_metrics_are_0(policy, batch):
    gradient, metrics = accumulate(policy, batch, [])
    assert (gradient == 0).all() and all(value == 0 for value in metrics.values())


def test_on_policy_the_ratio_is_1(policy, batch, whole):
    gradient, metrics = accumulate(policy, batch, on_policy=True)
    assert metrics["policy/approx_kl"] == 0
    with torch.no_grad():
        logprobs, _ = ppo_rlhf.token_logprobs(policy.model, *(batch[key] for key in INPUTS), 0.7)
    assert relative_error(gradient, accumulate(policy, batch | {"old_logprobs": logprobs})[0]) < 1e-9
    assert relative_error(gradient, whole[0]) > 1e-3


@pytest.mark.parametrize("budget", [1, 20, 10_000])
def test_looked_up_numbers_are_in_the_order_of_the_rows(policy, batch, budget):
    """Whatever the microbatches, whose rows go by length."""
    batch = batch | {"rewards": torch.zeros(8, dtype=torch.float64)}
    before = {key: value.clone() for key, value in batch.items()}
    args = ppo_rlhf.Args(temperature=0.7, microbatch_tokens=budget)
    with torch.no_grad():
        logprobs, _, values = policy(batch, 0.7)
    found = ppo_rlhf.lookup_logprobs(policy, batch, [torch.arange(8)], args)
    torch.testing.assert_close(found, [logprobs, values], rtol=1e-9, atol=1e-12)
    assert not any(x.requires_grad for x in found)
    model = policy.critic.model
    scores = ppo_rlhf.look_up_scores(ppo_rlhf.ScoreModel(model), batch, args)
    alone = [ppo_rlhf.sequence_scores(model, *(batch[key][[row]] for key in INPUTS)) for row in range(8)]
    torch.testing.assert_close(scores, torch.cat(alone).detach(), rtol=1e-9, atol=1e-12)
    assert_equal(batch, before)


# ==== ppo_rlhf.py --ptx-coef


SMALL = {"num_steps": 1, "prompts_per_step": 8, "minibatch_size": 4, "max_completion_length": 8, "eval_prompts": 0}
SMALL |= {"reward_model": "none", "update_epochs": 1, "seed": 3}


# ---- the gradient


def gradients(policy, budget=10_000, coef=0.7):
    """The returned mean, and the gradients of policy and value model."""
    policy.zero_grad()
    args = ppo_rlhf.Args(ptx_coef=coef, microbatch_tokens=budget, temperature=0.5)
    mean = ppo_rlhf.accumulate_ptx(policy, ppo_rlhf.collate(TEXTS, "cpu"), args)
    found = torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])
    return mean, found, [parameter.grad for parameter in policy.critic.parameters()]


@pytest.mark.usefixtures("alone")
def test_gradient_is_that_of_the_plain_log_likelihood_of_the_trained_tokens():
    """Row by row without padding, by Hugging Face's own forward pass; at temperature 1, whatever samples."""
    policy, losses = build_actor_critic(), []
    for text in TEXTS:
        start, ids = len(text["prompt_ids"]), text["prompt_ids"] + text["completion_ids"]
        logprobs = policy.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        losses += [-logprobs[t - 1, ids[t]] for t in range(start, len(ids))]
    expected = torch.autograd.grad(torch.stack(losses).mean(), list(policy.model.parameters()))
    mean, found, of_values = gradients(policy)
    assert mean == pytest.approx(sum(losses).item() / len(losses), rel=1e-12)
    assert relative_error(found, 0.7 * torch.cat([gradient.flatten() for gradient in expected])) < 1e-12
    assert all(gradient is None for gradient in of_values)


@pytest.mark.usefixtures("alone")
def test_microbatches_change_neither_gradient_nor_mean():
    """And it is added to what is there."""
    policy = build_actor_critic()
    mean, whole, _ = gradients(policy)
    for budget in (1, 20, 40):
        found = gradients(policy, budget)
        assert found[0] == pytest.approx(mean, rel=1e-12) and relative_error(found[1], whole) < 1e-12
    args = ppo_rlhf.Args(ptx_coef=0.7, microbatch_tokens=30)
    ppo_rlhf.accumulate_ptx(policy, ppo_rlhf.collate(TEXTS, "cpu"), args)
    both = torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])
    assert relative_error(both, 2 * whole) < 1e-12


# ---- texts


TURNS = {"prompt": "1+2=", "completion": "3"}
OF_TURNS = ("<|user|>1+2=<|assistant|>", "3<|end|>")


CHAT = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
UNFIT = "without a user's turn before the assistant's turn"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "rows, parts, dropped",
    [
        ([{"text": "12+34=46"}, {"text": "1+2=3"}], [("1", "2+34=4"), ("1", "+2=3")], {}),
        ([{"text": ""}, {"text": "7"}, {"text": "1+"}], [("1", "+")], {"without a text": 2}),
        ([TURNS, TURNS | {"prompt": "1+" * 9}], [OF_TURNS], {"too long": 1}),
        ([TURNS, TURNS | {"completion": "1" * 6}], [OF_TURNS], {"too long": 1}),
        ([TURNS, TURNS | {"completion": " "}], [OF_TURNS], {"without a completion": 1}),
        ([{"question": "1+2=", "response": "3"}, {"question": None, "response": "3"}], [OF_TURNS], {UNFIT: 1}),
        ([{"messages": CHAT}, {"messages": CHAT[1:]}], [OF_TURNS], {UNFIT: 1}),
    ],
)
def test_rows_with_text_or_as_in_sft(tmp_path, capsys, tokenizer, rows, parts, dropped):
    """What is trained follows a prompt, or the first token of a text, which is cut to 6 more."""
    dataset = write_rows(tmp_path / "texts.jsonl", rows)
    args = ppo_rlhf.Args(ptx_dataset=dataset, max_prompt_length=8, max_completion_length=6, system_prompt="")
    texts = ppo_rlhf.load_texts(args, tokenizer)
    assert [(tokenizer.decode(text["prompt_ids"]), tokenizer.decode(text["completion_ids"])) for text in texts] == parts
    said = f"{len(parts)} training rows of {dataset}, split train, dropped: {dropped}\n"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    "row, message", [({"text": {"a": 1}}, "text"), ({"words": "a"}, "prompt, question, problem .* words")]
)
def test_a_row_that_cannot_be_read_is_named(tmp_path, row, message):
    dataset = write_rows(tmp_path / "texts.jsonl", [row])
    with pytest.raises(SystemExit, match=f"^{dataset}, training row 0: ValueError.*{message}.*; the row is {{'"):
        run(tmp_path / "mine", ptx_coef=1.0, ptx_dataset=dataset)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("text", ["7", "", None])
def test_without_a_text_that_fits_nothing_is_trained(tmp_path, text):
    dataset = write_rows(tmp_path / "texts.jsonl", [{"text": text}] * 2)
    with pytest.raises(SystemExit, match=f"0 training rows of {dataset}, .* dropped: {{'without a text': 2}}"):
        run(tmp_path / "run", ptx_coef=1.0, ptx_dataset=dataset)
    assert not (tmp_path / "run").exists()


# ---- runs


def run(folder, **settings):
    ppo_rlhf.main(parse(ppo_rlhf, run_dir=folder, **SMALL | settings))
    return read_jsonl(folder / "metrics.jsonl")


def test_without_it_no_text_is_read(tmp_path):
    [line] = run(tmp_path / "run", ptx_dataset="no_such_file.jsonl")
    assert "loss/ptx" not in line and line["loss/value"] > 0


def test_every_optimizer_step_has_as_many_texts_as_completions(tmp_path, monkeypatch):
    """In the order of pick_rows, over the steps of the run; the metric is their mean, before the coefficient."""
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(10, 21)]
    write_rows(tmp_path / "texts.jsonl", rows)
    calls = record(monkeypatch, ppo_rlhf, "accumulate_ptx")
    lines = run(tmp_path / "run", num_steps=2, ptx_coef=0.5, ptx_dataset=str(tmp_path / "texts.jsonl"))
    seen, means = sum((batch["prompt_ids"].tolist() for (_, batch, _), _ in calls), []), [mean for _, mean in calls]
    assert len(means) == 4 and len(seen) == 16
    assert len({*map(tuple, seen[:11])}) == 11  # a pass over all before any comes again
    assert [line["loss/ptx"] for line in lines] == pytest.approx([sum(means[:2]) / 2, sum(means[2:]) / 2])
