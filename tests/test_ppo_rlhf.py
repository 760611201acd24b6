"""PPO's rewards, advantages and losses, its value model, and its runs: python -m pytest tests/test_ppo_rlhf.py"""

import math
from types import SimpleNamespace

import pytest
import scripted
import torch
import toy
from test_exact_gradients import LIMIT, TEMPERATURE, enumerate_rows
from test_other_libraries import OURS
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves
from toy import ROOT, TINY, build_model, call, gradient_of, parse, relative_error, tensor, train
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import ppo_rlhf
from ppo_rlhf import compute_advantages, policy_loss, token_rewards, value_loss, whiten

SETTINGS = {"kl_coef": 0.1, "gamma": 0.9, "gae_lambda": 0.8, "clip_eps": 0.2, "value_clip_eps": 0.2}
SETTINGS |= {"sampler_weight_cap": 1.2, "scores": torch.arange(6.0).double()}
REWARD = ROOT / "models/tiny-reward"
alone = pytest.mark.usefixtures("alone")


def test_rewards_advantages_and_returns_by_hand():
    """The second completion has a gap. With γ = λ = 1, advantages are the rewards to come less the values."""
    mask = torch.tensor([[0, 1, 1, 1], [1, 0, 1, 0]])
    logprobs, ref_logprobs = tensor([[9, -2, -4, -1], [-1, 9, -1, 9]]), tensor([[9, -2, -2, -1], [-2, 9, -3, 9]])
    rewards = token_rewards(tensor([-1.0, 3.0]), logprobs, ref_logprobs, mask, 0.1)
    assert_close(rewards, tensor([[0.0, 0.0, 0.2, -1.0], [-0.1, 0.0, 2.8, 0.0]]))
    assert_close(token_rewards(tensor([5.0, 3.0]), logprobs, None, mask, 0.1)[1], tensor([0.0, 0.0, 3.0, 0.0]))
    values = tensor([[9.0, 0.2, 0.4, -0.3], [0.5, 9.0, 0.5, 9.0]])
    advantages, returns = compute_advantages(rewards, values, mask, 0.9, 0.8)
    second = -0.47 + 0.72 * -0.7  # with the deltas 0.16, -0.47, -0.7; and -0.15, 2.3
    expected = tensor([[0.0, 0.16 + 0.72 * second, second, -0.7], [-0.15 + 0.72 * 2.3, 0.0, 2.3, 0.0]])
    assert_close((advantages, returns), (expected, expected + values * mask))
    to_come = rewards.flip(1).cumsum(1).flip(1) * mask
    assert_close(compute_advantages(rewards, values, mask, 1.0, 1.0), (to_come - values * mask, to_come))


X = torch.randn(9, 6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
KEYS = "old_logprobs ref_logprobs sampler_logprobs advantages values old_values returns rewards".split()
INPUTS = dict(zip(KEYS, X)) | {"logprobs": X[0] + 0.3 * X[1], "x": X[3]}
MASK = (X[8] > -0.3) & (torch.arange(6) != 5).unsqueeze(1)  # with gaps, and a row without a token
OUTSIDE = ((0.0, MASK), (1e30, MASK.long()), (math.inf, MASK.float()), (-math.inf, MASK), (math.nan, MASK))
TRAINED = {policy_loss: "logprobs", value_loss: "values"}


@alone
@pytest.mark.parametrize("function", [token_rewards, compute_advantages, whiten, policy_loss, value_loss])
def test_neither_what_stands_outside_the_mask_matters_nor_the_type_of_the_mask(function):
    """And logprobs alone get a gradient, or values."""
    results = []
    for garbage, mask in OUTSIDE:
        filled = {name: x.where(MASK, garbage).requires_grad_(function in TRAINED) for name, x in INPUTS.items()}
        results.append(tree_leaves(call(function, SETTINGS | filled | {"completion_mask": mask, "mask": mask})))
        if function in TRAINED:
            results[-1][0].backward()
            assert [name for name, x in filled.items() if x.grad is not None] == [TRAINED[function]]
            results[-1].append(filled[TRAINED[function]].grad)
        assert all(map(torch.equal, results[-1], results[0]))
    assert all((x[~MASK] == 0).all() for x in results[0] if x.shape == MASK.shape)


# The score of Huang et al. stands one token later than ours, which does not matter at λ = 1.
CASES = toy.read_oracle("gae_verl") + toy.read_oracle("gae_oat") + toy.read_oracle("gae_summarize")[1:]
NAMES = {"new_logp": "logprobs", "lam": "gae_lambda", "kl_coef_in_reward": "kl_coef", "token_rewards": "rewards"}
NAMES |= OURS | {"clip_ratio": "clip_eps", "cliprange_value": "value_clip_eps"}


def read_case(case):
    """The settings and inputs of a case, in our names, and its outputs."""
    given = case["config"] | {name: tensor(value) for name, value in case["inputs"].items()}
    return {NAMES.get(name, name): x for name, x in given.items()}, {k: tensor(x) for k, x in case["outputs"].items()}


@alone
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_advantages_and_returns_are_those_of_verl_oat_and_huang_et_al(case):
    given, outputs = read_case(case)
    mask = given["completion_mask"]
    if "rewards" not in given:
        given["rewards"] = call(token_rewards, given)
    advantages, returns = call(compute_advantages, given)
    assert_close(returns, outputs["returns"] * mask)
    factor = 1 / math.sqrt(1 - 1 / mask.sum()) if given.get("whiten") == "ddof=0" else 1.0
    assert_close(factor * whiten(advantages, mask), outputs["advantages_whitened"] * mask, rtol=1e-6, atol=0)


def test_losses_gradients_and_metrics_are_those_of_verl():
    given, outputs = read_case(toy.read_oracle("ppo_verl")[1])  # the first has a second clip
    given |= {"old_values": given["values"], "values": given["vpred"].requires_grad_(), "sampler_weight_cap": 2.0}
    given |= {"logprobs": given["logprobs"].requires_grad_(), "sampler_logprobs": given["old_logprobs"]}
    loss, metrics = call(policy_loss, given)
    error, value_metrics = call(value_loss, given)
    count = given["completion_mask"].sum()
    ((loss + error) / count).backward()
    assert_close(given["logprobs"].grad, outputs["grad_logp"], rtol=1e-6, atol=1e-9)
    assert_close(given["values"].grad, outputs["grad_vpred"])
    log_ratio = (given["logprobs"] - given["old_logprobs"]).detach() * given["completion_mask"]
    assert_close(metrics["policy/approx_kl"][0], (log_ratio.exp() - 1 - log_ratio).sum())
    clipped = metrics["policy/clip_fraction_low"][0] + metrics["policy/clip_fraction_high"][0]
    found = torch.stack([loss, error, clipped, value_metrics["value/clip_fraction"][0]]) / count
    assert_close(found, torch.stack([outputs[name] for name in ("pg_loss", "vf_loss", "pg_clipfrac", "vf_clipfrac")]))


@pytest.mark.parametrize("gae_lambda", [1.0, 0.95])
def test_expected_gradient_is_that_of_the_score_less_the_kl_divergence(gae_lambda):
    """At ratio 1. With the expected rewards to come as values, every λ is unbiased; with any others λ = 1 is."""
    model, ids, mask, scores, exact, probabilities = enumerate_rows(LIMIT)
    models = model, build_model("llama", 5, dtype=torch.float32, scale=4.0)
    logprobs, ref_logprobs = (ppo_rlhf.Policy(each, "float32")(ids, mask, TEMPERATURE)[0] for each in models)
    old_logprobs, ref_logprobs, weights = logprobs.detach(), ref_logprobs.detach(), probabilities.detach()
    objective = (probabilities * (scores - 0.5 * (probabilities.log() - ref_logprobs.sum(1)))).sum()
    rewards = token_rewards(scores, old_logprobs, ref_logprobs, mask, 0.5)
    to_come, values = rewards.flip(1).cumsum(1).flip(1), torch.zeros_like(rewards)
    for row, t in mask.nonzero().tolist():
        same = weights * mask[:, t] * (ids[:, :t] == ids[row, :t]).all(1)  # completions that begin so
        values[row, t] = (same * to_come[:, t]).sum() / same.sum()
    for used in (values, values.sin() + 1):
        advantages, _ = compute_advantages(rewards, used, mask, 1.0, gae_lambda)
        loss, _ = policy_loss(logprobs, old_logprobs, old_logprobs, advantages * weights[:, None], mask, 0.2, 2.0)
        error = relative_error(-gradient_of(model, loss).double(), gradient_of(exact, objective))
        assert (error < 1e-4) == (used is values or gae_lambda == 1)


# ---- runs


def test_the_second_update_is_that_of_the_equations(tmp_path, monkeypatch):
    """The reference and the reward model are still the first ones; scores and values are Hugging Face's."""
    sampled = toy.record(monkeypatch, ppo_rlhf, "sample_completions")
    found = scripted.run(ppo_rlhf, tmp_path, monkeypatch, **scripted.CASES["ppo_rlhf"])
    weights, gradients = found["weights"][:2], found["gradients"][2:]  # of the policy and of the value model
    policy, ref = (AutoModelForCausalLM.from_pretrained(TINY) for _ in range(2))
    value_model, reward_model = (AutoModelForSequenceClassification.from_pretrained(REWARD) for _ in range(2))
    for model, moved_to, rate in zip((policy, value_model), weights, (3e-4, 1e-4)):
        moved = (moved_to - parameters_to_vector(model.parameters())).abs().max().item()
        assert moved == pytest.approx(rate, rel=0.01)  # AdamW's first step
        vector_to_parameters(moved_to, model.parameters())
    norm, held_out, _, batch, _ = [batch for _, (batch, _) in sampled]
    norm_scores, eval_scores, scores = (reward_model(x["ids"]).logits[:, 0].detach() for x in (norm, held_out, batch))
    mean, std = norm_scores.mean(), norm_scores.std()
    scores = (scores - mean) / std - 1.0 * batch["truncated"]
    ids, mask = batch["ids"], batch["completion_mask"].bool()
    logprobs, ref_logprobs = (ppo_rlhf.Policy(model, "float32")(ids, mask, 1.0)[0] for model in (policy, ref))
    hidden = value_model.base_model(ids).last_hidden_state[:, :-1]
    values = (torch.cat([torch.zeros(len(ids), 1), value_model.score(hidden).squeeze(2)], 1) - mean) / std
    rewards = token_rewards(scores, logprobs.detach(), ref_logprobs.detach(), mask, 0.3)
    advantages, returns = compute_advantages(rewards, values.detach(), mask, 0.97, 0.95)
    whitened = (advantages - advantages[mask].mean()) / advantages[mask].std()
    weights = (logprobs - batch["sampler_logprobs"])[mask].exp().detach()
    loss = -(weights.clamp(max=1.05) * (whitened * logprobs)[mask]).mean()
    error = (values - returns)[mask].square().mean() / 2
    for ours, right in zip(gradients, (gradient_of(policy, loss), gradient_of(value_model, error)), strict=True):
        assert relative_error(ours, right) < 1e-4
    expected = {"score/mean": scores.mean(), "objective/mean": rewards.sum(1).mean(), "loss/value": error}
    expected["value/explained_variance"] = 1 - advantages[mask].var() / returns[mask].var()
    expected |= {"policy/sampler_kl": (weights - 1 - weights.log()).mean(), "policy/approx_kl": torch.tensor(0.0)}
    expected["rollout/ref_kl_sum"] = (logprobs - ref_logprobs).sum(1).mean()
    first, _, line = found["metrics"]
    for name, x in expected.items():
        assert line[name] == pytest.approx(x.item(), rel=1e-4), name
    truncated = held_out["truncated"].float()
    assert first["eval/score"] == pytest.approx(((eval_scores - mean) / std - truncated).mean().item(), rel=1e-4)
    assert first["eval/accuracy"] == pytest.approx(1 - truncated.mean().item())  # the first of each prompt is right


def test_without_a_kl_penalty_there_is_no_reference_and_rows_need_no_answer(tmp_path):
    rows = toy.write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"{i}+{i + 9}="} for i in range(40)])
    lines = train(ppo_rlhf, tmp_path, dataset=rows, kl_coef=0.0, num_steps=1)
    assert {*lines[0]} == {"step", "eval/score", "eval/truncated"} and "policy/ref_kl" not in lines[1]


def test_a_reward_model_with_another_tokenizer_is_refused():
    with pytest.raises(SystemExit, match="its tokenizer is not that of"):
        ppo_rlhf.load_scorer(parse(ppo_rlhf), SimpleNamespace(get_vocab=lambda: {"new": 1}), torch.device("cpu"))
