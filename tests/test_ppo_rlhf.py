"""PPO's token rewards, advantages and losses, its gradients, and --ptx-coef: python -m pytest tests/test_ppo_rlhf.py"""

import math

import helpers
import pytest
import torch
from helpers import each_invariance, enumerate_rows, gradient_of, read_oracle, tensor
from preference_ranks import INPUTS, PAIRS, TEXTS, build_actor_critic, build_scorer, make_ppo_batch
from tiny import ROOT, add_pairs, build_model, pad_right, record, relative_error, write_rows
from torch.testing import assert_close
from two_ranks import gradient_of_parameters

import ppo_rlhf
from ppo_rlhf import compute_advantages, explained_variance, policy_loss, token_rewards, value_loss, whiten

pytestmark = pytest.mark.usefixtures("alone")
NAN = math.nan  # at masked positions, which must not matter

# ---- by hand


def test_token_rewards_by_hand():
    old_logprobs = tensor([[-0.5, -4.0, NAN], [-1.0, NAN, -1.0]])
    ref_logprobs = tensor([[-0.5, -2.0, NAN], [-2.0, NAN, -3.0]])
    mask = old_logprobs.isfinite()  # the second row has a hole: its last token is still the third
    scores = tensor([-1.0, 3.0])
    rewards = token_rewards(scores, old_logprobs, ref_logprobs, mask, 0.1)
    expected = tensor([[0.0, -0.8, 0.0], [-0.1, 0.0, 2.8]])
    assert_close(rewards, expected)
    without = token_rewards(scores, old_logprobs, None, mask, 0.0)  # which needs no reference
    assert_close(without, tensor([[0.0, -1.0, 0.0], [0.0, 0.0, 3.0]]))


def test_advantages_and_returns_by_hand():
    rewards = tensor([[1.0, 0.5, 2.0], [0.0, 1.0, NAN]])
    values = tensor([[0.2, 0.4, -0.3], [0.5, 0.5, NAN]])
    mask = rewards.isfinite()
    advantages, returns = compute_advantages(rewards, values, mask, 0.9, 0.8)
    # deltas 1.16, -0.17, 2.3; -0.05, 0.5
    second = -0.17 + 0.72 * 2.3
    first = 1.16 + 0.72 * second
    expected = tensor([[first, second, 2.3], [0.31, 0.5, 0.0]])
    assert_close(advantages, expected)
    assert_close(returns, expected + values.where(mask, 0.0))


def test_whiten_by_hand():
    values = tensor([[1.0, 2.0, NAN], [4.0, NAN, NAN]])
    centred = tensor([[-4, -1, 0], [5, 0, 0]]) / 3
    std = math.sqrt(7 / 3 + 1e-8)
    found = whiten(values, values.isfinite())
    assert_close(found, centred / std)
    constant = tensor([[3.0, 3.0]])
    assert (whiten(constant, constant.isfinite()) == 0).all()


def test_policy_loss_gradient_and_metrics_by_hand():
    # Ratios 1.5, 2, 0.5 and 1.5, 0.5, 1 are clipped to 0.8 .. 1.2; each token has its own advantage.
    advantages = tensor([[2.0, -1.0, 2.0, 5.0], [-1.0, -1.0, 3.0, 5.0]])
    loss = -2.4 + 2.0 - 1.0 + 1.5 + 0.8 - 3.0
    gradient = [[0.0, 2.0, -1.0, 0.0], [1.5, 0.0, -3.0, 0.0]]
    sums = {"policy/approx_kl": helpers.APPROX_KL, "policy/clip_fraction_low": 1, "policy/clip_fraction_high": 1}
    helpers.check_by_hand(ppo_rlhf, loss, gradient, sums, advantages=advantages)


def test_where_the_clip_stops_the_gradient():
    helpers.check_clip(ppo_rlhf)


def test_value_loss_by_hand():
    # Each value, around the old value of 1: above on its way to the return, which is stopped; above and away from the
    # return, which is called back; below on its way; below and away; within 0.2.
    values = tensor([[1.5, 1.5, 0.5, 0.5, 1.1, NAN]]).requires_grad_()
    returns = tensor([[2.0, 0.5, 0.0, 1.2, 2.0, NAN]])
    old_values = torch.ones_like(returns)
    loss, metrics = value_loss(values, old_values, returns, returns.isfinite(), 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(0.32 + 0.5 + 0.32 + 0.245 + 0.405)
    assert_close(values.grad, tensor([[0.0, 1.0, 0.0, -0.7, -0.9, 0.0]]))
    assert add_pairs([metrics]) == {"value/clip_fraction": (2, 5)}


def test_explained_variance_by_hand():
    returns = tensor([[1.0, 2.0, NAN], [4.0, NAN, NAN]])
    mask = returns.isfinite()
    assert explained_variance(returns, returns + 5, mask) == pytest.approx(1)
    assert explained_variance(returns, 0 * returns, mask) == pytest.approx(0)
    assert explained_variance(returns, -returns, mask) == pytest.approx(-3)


# ---- other libraries' numbers


def read_case(case):
    """The settings, the inputs and the outputs of a case, the latter as tensors."""
    inputs = {name: tensor(value) for name, value in case["inputs"].items()}
    outputs = {name: tensor(value) for name, value in case["outputs"].items()}
    return case["config"], inputs, outputs


CASES = read_oracle("gae_verl") + read_oracle("gae_oat")
# The score of Huang et al. stands one token later than ours, which does not matter at λ = 1.
CASES += read_oracle("gae_summarize")[1:]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_advantages_and_returns_are_those_of_verl_oat_and_huang_et_al(case):
    config, inputs, outputs = read_case(case)
    mask = inputs["mask"]
    rewards = inputs.get("token_rewards")
    if rewards is None:
        rewards = token_rewards(
            inputs["scores"],
            inputs["old_logp"],
            inputs["ref_logp"],
            mask,
            helpers.first_of(config, "kl_coef_in_reward", "kl_coef"),
        )
    advantages, returns = compute_advantages(rewards, inputs["values"], mask, config["gamma"], config["lam"])
    assert_close(returns * mask, outputs["returns"] * mask)
    whitened = whiten(advantages, mask)
    if config.get("whiten") == "ddof=0":
        count = mask.sum()
        whitened *= (count / (count - 1)).sqrt()
    assert_close(whitened, outputs["advantages_whitened"] * mask, rtol=1e-6, atol=0)


def test_losses_and_gradients_are_those_of_verl():
    _, case = read_oracle("ppo_verl")  # the first has a second clip
    config, inputs, outputs = read_case(case)
    mask = inputs["mask"]
    count = mask.sum()
    logprobs = inputs["new_logp"].requires_grad_()
    values = inputs["vpred"].requires_grad_()
    old_logprobs, clip_eps = inputs["old_logp"], config["clip_ratio"]
    loss, metrics = policy_loss(logprobs, old_logprobs, old_logprobs, inputs["advantages"], mask, clip_eps, 2.0)
    error, value_metrics = value_loss(values, inputs["values"], inputs["returns"], mask, config["cliprange_value"])
    ((loss + error) / count).backward()
    assert_close(logprobs.grad, outputs["grad_logp"], rtol=1e-6, atol=1e-9)
    assert_close(values.grad, outputs["grad_vpred"])
    clipped = metrics["policy/clip_fraction_low"][0] + metrics["policy/clip_fraction_high"][0]
    found = {
        "pg_loss": loss,
        "vf_loss": error,
        "pg_clipfrac": clipped,
        "vf_clipfrac": value_metrics["value/clip_fraction"][0],
    }
    for name, value in found.items():
        assert (value / count).item() == pytest.approx(outputs[name].item())


# ---- values of a model


@pytest.mark.parametrize("config", ["llama", "gpt2"])
def test_values_are_scores_of_the_prefixes(config):
    """By Hugging Face's own forward pass of what stands before each token, alone and without padding."""
    model = build_scorer(config)
    model.config.pad_token_id = None  # else a prefix that ends in that id is read elsewhere
    prompt_ids, prompt_mask = ppo_rlhf.pad_left(PAIRS, "cpu")
    ids, mask = pad_right([pair["chosen_ids"] for pair in PAIRS], 9)
    expected = torch.zeros(8, 9, dtype=torch.float64)
    with torch.no_grad():
        values = ppo_rlhf.token_values(model, prompt_ids, prompt_mask, ids, mask)
        for row, t in mask.nonzero().tolist():
            prefix = PAIRS[row]["prompt_ids"] + PAIRS[row]["chosen_ids"][:t]
            expected[row, t] = model(torch.tensor([prefix])).logits
    assert_close(values * mask, expected)  # ActorCritic.values masks them
    assert values[mask.bool()].std() > 0.1


# ---- the exact gradient


def exact_values(rows, rewards):
    """Expected rewards to go after every prefix (R, T), by summing over all completions that begin so."""
    prompt_ids, _, completion_ids, mask = rows["inputs"]
    probabilities = rows["probabilities"].detach()
    to_go = rewards.flip(1).cumsum(1).flip(1)
    values = torch.zeros_like(rewards)
    for row, t in mask.nonzero().tolist():
        weights = probabilities * mask[:, t]
        weights = weights * (prompt_ids == prompt_ids[row]).all(1)
        weights = weights * (completion_ids[:, :t] == completion_ids[row, :t]).all(1)
        values[row, t] = (weights * to_go[:, t]).sum() / weights.sum()
    return values


@pytest.mark.parametrize("gae_lambda", [1.0, 0.95, 0.0])
@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_expected_gradient_is_exact_with_exact_values(kl_coef, gae_lambda):
    """That of E[score] - kl_coef KL(π || ref), at ratio 1. With the values of the policy itself every λ is unbiased;
    with any others λ = 1 is.
    """
    rows = enumerate_rows()
    model = rows["model"]
    mask = rows["mask"]
    scores = rows["rewards"]
    probabilities = rows["probabilities"]
    ref = build_model("llama", vocab_size=helpers.VOCAB_SIZE, scale=4.0)
    ref_logprobs = helpers.exact_logprobs(ref).detach()
    log_ratio = probabilities.log() - (ref_logprobs * mask).sum(1)
    objective = (probabilities * (scores - kl_coef * log_ratio)).sum()
    logprobs, _ = ppo_rlhf.token_logprobs(model, *rows["inputs"], helpers.TEMPERATURE)
    rewards = token_rewards(scores, logprobs.detach(), ref_logprobs, mask, kl_coef)
    values = exact_values(rows, rewards)
    weights = probabilities.detach().unsqueeze(1)
    for used_values in (values, values.sin() + 1, torch.zeros_like(values)):
        advantages, _ = compute_advantages(rewards, used_values, mask, 1.0, gae_lambda)
        found = helpers.expected_gradient(ppo_rlhf, advantages, weights=weights)
        error = relative_error(found, gradient_of(model, objective))
        is_unbiased = used_values is values or gae_lambda == 1
        assert (error < 1e-9) == is_unbiased


# ---- invariances


@each_invariance
def test_what_does_not_matter(check):
    check(ppo_rlhf)


# ---- gradients that are accumulated


@pytest.fixture(scope="module")
def policy():
    return build_actor_critic()


@pytest.fixture(scope="module")
def batch(policy):
    return make_ppo_batch(policy)


def accumulate(policy, batch, budget=10_000):
    """Gradient and metrics of one optimizer step over all rows."""
    policy.zero_grad()
    args = ppo_rlhf.Args(temperature=0.7, microbatch_tokens=budget)
    collected = ppo_rlhf.accumulate_gradients(policy, batch, torch.arange(8), 30, args)
    return gradient_of_parameters(policy), add_pairs(collected)


def test_accumulated_gradient_is_that_of_both_losses(policy, batch):
    mask = batch["completion_mask"]
    inputs = [batch[key] for key in INPUTS]
    logprobs, entropies = ppo_rlhf.token_logprobs(policy.model, *inputs, 0.7)
    values = (ppo_rlhf.token_values(policy.critic.model, *inputs) - 0.3) / 1.7
    others = (batch["old_logprobs"], batch["sampler_logprobs"], batch["advantages"])
    loss, metrics = policy_loss(logprobs, *others, mask, 0.2, 2.0)
    error, value_metrics = value_loss(values, batch["old_values"], batch["returns"], mask, 0.2)
    gradient, found = accumulate(policy, batch)
    assert relative_error(gradient, gradient_of(policy, (loss + error) / 30)) < 1e-12
    expected = metrics | value_metrics
    expected |= {"loss/policy": (loss.detach(), mask.sum()), "loss/value": (error.detach(), mask.sum())}
    expected["policy/entropy"] = (entropies.sum(), mask.sum())
    helpers.assert_pairs(found, add_pairs([expected]))


@pytest.mark.parametrize("budget", [1, 20, 60])
def test_microbatches_change_neither_gradient_nor_metrics(policy, batch, budget):
    gradient, metrics = accumulate(policy, batch, budget=budget)
    expected_gradient, expected_metrics = accumulate(policy, batch)
    assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-9)
    helpers.assert_pairs(metrics, expected_metrics)


@pytest.mark.parametrize("budget", [20, 10_000])
def test_looked_up_numbers_are_in_the_order_of_the_rows(policy, batch, budget):
    """Whatever the microbatches, whose rows go by length."""
    args = ppo_rlhf.Args(temperature=0.7, microbatch_tokens=budget)
    reward_model = ppo_rlhf.InForward(policy.critic.model, ppo_rlhf.sequence_scores)
    with torch.no_grad():
        logprobs, _ = policy.actor(batch, 0.7)
        values, scores = policy.values(batch), reward_model(batch)
    assert_close(ppo_rlhf.compute_logprobs(policy.actor, batch, [torch.arange(8)], args), logprobs)
    assert_close(ppo_rlhf.compute_values(policy, batch, [torch.arange(8)], args), values)
    assert_close(ppo_rlhf.compute_scores(reward_model, batch, args), scores)


def test_values_keep_no_hidden_state_per_token_of_the_widest_completion(policy):
    """Else --max-completion-length 1024 would cost as much memory, however short the completions are."""
    width, hidden_size = 200, policy.critic.model.config.hidden_size
    ids, mask = pad_right([[3, 4, 5]] * 4, width)
    prompts = (torch.tensor([[6, 7]] * 4), torch.ones(4, 2, dtype=torch.long))
    sizes = []

    def record(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        ppo_rlhf.token_values(policy.critic.model, *prompts, ids, mask)
    assert max(sizes) < 4 * width * hidden_size / 2


# ---- texts of --ptx-dataset


def ptx_gradient(policy, budget=10_000):
    """The mean that accumulate_ptx returns, and the gradient of the policy."""
    policy.zero_grad()
    args = ppo_rlhf.Args(ptx_coef=0.7, microbatch_tokens=budget, temperature=0.5)
    [(total, count)] = ppo_rlhf.accumulate_ptx(policy, TEXTS, args).values()
    return total.item() / count, gradient_of_parameters(policy.model)


def test_gradient_is_that_of_the_plain_log_likelihood_of_the_trained_tokens(policy):
    """Row by row without padding, by Hugging Face's own forward pass; at temperature 1, whatever samples."""
    losses = []
    for text in TEXTS:
        start = len(text["prompt_ids"])
        ids = text["prompt_ids"] + text["completion_ids"]
        logprobs = policy.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for t in range(start, len(ids)):
            losses.append(-logprobs[t - 1, ids[t]])
    loss = torch.stack(losses).mean()
    mean, gradient = ptx_gradient(policy)
    assert mean == pytest.approx(loss.item())
    assert relative_error(gradient, gradient_of(policy.model, 0.7 * loss)) < 1e-12
    assert all(parameter.grad is None for parameter in policy.critic.parameters())


@pytest.mark.parametrize("budget", [1, 20, 40])
def test_microbatches_change_neither_gradient_nor_mean(policy, budget):
    mean, gradient = ptx_gradient(policy, budget)
    expected_mean, expected = ptx_gradient(policy)
    assert mean == pytest.approx(expected_mean)
    assert relative_error(gradient, expected) < 1e-12


TURNS = {"prompt": "1+2=", "completion": "3"}
OF_TURNS = ("<|user|>1+2=<|assistant|>", "3<|end|>")


LONGER = "longer than --max-completion-length"


@pytest.mark.parametrize(
    "rows, parts, dropped",
    [
        ([{"text": "12+34=46"}, {"text": "1+"}], [("1", "2+34=4"), ("1", "+")], {}),
        ([{"text": ""}, {"text": "7"}, {"text": "1+"}], [("1", "+")], {"without a text": 2}),
        ([TURNS, TURNS | {"completion": "1" * 6}], [OF_TURNS], {f"with a completion {LONGER}": 1}),
    ],
)
def test_rows_with_text_or_as_in_sft(tmp_path, capsys, tokenizer, rows, parts, dropped):
    """What is trained follows a prompt, or the first token of a text, which is cut to 6 more."""
    dataset = write_rows(tmp_path / "texts.jsonl", rows)
    settings = {"max_prompt_length": 8, "max_completion_length": 6, "system_prompt": ""}
    args = ppo_rlhf.Args(ptx_dataset=dataset, ptx_coef=1.0, **settings)
    found = []
    for text in ppo_rlhf.load_texts(args, tokenizer):
        prompt = tokenizer.decode(text["prompt_ids"])
        completion = tokenizer.decode(text["completion_ids"])
        found.append((prompt, completion))
    assert found == parts
    out = capsys.readouterr().out
    assert f"dropped: {dropped}\n" in out and f"{parts[0][1]!r} is trained after {parts[0][0]!r}" in out


def run(folder, **settings):
    """A short run without a reward model."""
    sizes = {"prompts_per_step": 8, "minibatch_size": 4, "max_completion_length": 8, "eval_prompts": 0}
    sizes["dataset"] = ROOT / "data" / "addition" / "test.jsonl"
    settings = {"reward_model": "none", "update_epochs": 1, "seed": 3} | sizes | settings
    return helpers.train(ppo_rlhf, folder, **settings)


def test_without_it_no_text_is_read(tmp_path):
    [line] = run(tmp_path / "run", num_steps=1, ptx_dataset="no_such_file.jsonl")
    assert "loss/ptx" not in line
    assert line["loss/value"] > 0


def test_every_optimizer_step_has_as_many_texts_as_completions(tmp_path, monkeypatch):
    """In the order of pick_rows, over the steps of the run; the metric is their mean, before the coefficient."""
    rows = [{"text": f"{i}+1={i + 1}"} for i in range(10, 21)]
    dataset = write_rows(tmp_path / "texts.jsonl", rows)
    calls = record(monkeypatch, ppo_rlhf, "accumulate_ptx")
    lines = run(tmp_path / "run", num_steps=2, ptx_coef=0.5, ptx_dataset=dataset)
    seen = [tuple(text["completion_ids"]) for (_, texts, _), _ in calls for text in texts]
    assert len(seen) == 16
    assert len(set(seen[:11])) == 11  # a pass over all before any comes again
    totals, counts = zip(*(metric["loss/ptx"] for _, metric in calls))
    for line, first in zip(lines, (0, 2), strict=True):
        expected = sum(totals[first : first + 2]).item() / sum(counts[first : first + 2])
        assert line["loss/ptx"] == pytest.approx(expected)
