"""DPO: its loss, its reference, and a short run: python -m pytest tests/test_dpo.py"""

import math

import pytest
import torch
from helpers import pair_results, random_pairs, read_oracle, sigmoid, tensor, train
from preference_ranks import PAIRS
from tiny import ROOT, build_model, few_rows, shares_changed
from torch.testing import assert_close

import dpo
import reward_model

KINDS = ("chosen", "rejected")


# ---- the loss by hand


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_by_hand(smoothing):
    """The differences of log-ratios are 1 and -3; beta is 0.5, so the margins are 0.5 and -1.5."""
    inputs = [
        tensor([-3.0, -5.0]),  # chosen
        tensor([-4.0, -4.0]),  # rejected
        tensor([-4.0, -4.0]),  # chosen, by the reference
        tensor([-4.0, -6.0]),  # rejected, by the reference
    ]
    loss, chosen, rejected, metrics = pair_results(dpo, inputs, label_smoothing=smoothing)
    right = math.log(1 + math.exp(-0.5)) + math.log(1 + math.exp(1.5))
    wrong = math.log(1 + math.exp(0.5)) + math.log(1 + math.exp(-1.5))
    expected_loss = (1 - smoothing) * right + smoothing * wrong
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    gradient = 0.5 * (1 - smoothing) * tensor([sigmoid(-0.5), sigmoid(1.5)])
    gradient -= 0.5 * smoothing * tensor([sigmoid(0.5), sigmoid(-1.5)])
    assert_close((chosen, rejected), (-gradient, gradient), rtol=1e-12, atol=0)
    expected = {
        "loss/preference": expected_loss,
        "pair/accuracy": 1,
        "pair/margin": -1.0,
        "pair/chosen_reward": 0.0,
        "pair/rejected_reward": 1.0,
        "pair/chosen_log_ratio": 0.0,
        "pair/rejected_log_ratio": 2.0,
    }
    assert metrics == pytest.approx(expected, rel=1e-12)


# ---- other libraries' numbers

CASES = [case for case in read_oracle("dpo_eric_mitchell") if not case["config"]["ipo"]]  # IPO is another loss


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_loss_is_that_of_its_authors(case):
    inputs = []
    for model in ("policy", "reference"):
        for kind in KINDS:
            inputs.append(tensor(case["inputs"][f"{model}_{kind}_logps"]))
    settings = {name: case["config"][name] for name in ("beta", "label_smoothing")}
    loss, *gradients, metrics = pair_results(dpo, inputs, **settings)
    expected = case["outputs"]
    count = len(inputs[0])
    assert_close(loss / count, tensor(expected["loss"]), rtol=1e-9, atol=0)
    for kind, gradient in zip(KINDS, gradients):
        expected_gradient = tensor(expected[f"grad_{kind}"])
        assert_close(gradient / count, expected_gradient, rtol=1e-9, atol=1e-12)
        expected_reward = sum(expected[f"{kind}_rewards"])
        assert metrics[f"pair/{kind}_reward"] == pytest.approx(expected_reward, rel=1e-9)


@pytest.mark.parametrize("case", read_oracle("dpo_trl"), ids=lambda case: case["name"])
def test_loss_is_that_of_trl(case):
    """TRL's inputs are log-probabilities of tokens, which are summed over the completion."""
    mask = tensor(case["inputs"]["mask"])
    logprobs = tensor(case["inputs"]["logp"]).requires_grad_()
    ref_logprobs = tensor(case["inputs"]["ref_logp"])
    chosen, rejected = (logprobs * mask).sum(1).chunk(2)
    ref_chosen, ref_rejected = (ref_logprobs * mask).sum(1).chunk(2)
    beta = case["config"]["beta"]
    loss, metrics = dpo.preference_loss(chosen, rejected, ref_chosen, ref_rejected, beta, 0.0)
    loss = loss / len(chosen)
    loss.backward()
    expected = case["outputs"]
    assert_close(loss, tensor(expected["loss"]), rtol=1e-9, atol=0)
    expected_gradient = tensor(expected["grad_logp"])
    assert_close(logprobs.grad, expected_gradient, rtol=1e-9, atol=1e-12)
    margin = metrics["pair/margin"][0].item() / len(chosen)
    assert margin == pytest.approx(expected["metrics"]["rewards/margins"], rel=1e-9)


# ---- identities


def test_policy_that_is_the_reference_has_log_2():
    chosen, rejected, *_ = random_pairs(dpo)
    inputs = [chosen, rejected, chosen, rejected]
    loss, chosen_gradient, rejected_gradient, metrics = pair_results(dpo, inputs, beta=0.3)
    assert loss.item() == pytest.approx(6 * math.log(2), rel=1e-12)
    gradient = torch.full_like(chosen, 0.15)
    assert_close((chosen_gradient, rejected_gradient), (-gradient, gradient))
    assert metrics["pair/accuracy"] == 3  # a tie counts half
    assert metrics["pair/margin"] == 0


def test_it_is_the_reward_model_of_its_implied_rewards():
    chosen, rejected, ref_chosen, ref_rejected = inputs = random_pairs(dpo)
    loss, gradient, *_ = pair_results(dpo, inputs, beta=0.3)
    rewards = [0.3 * (chosen - ref_chosen), 0.3 * (rejected - ref_rejected)]
    expected_loss, expected_gradient, *_ = pair_results(reward_model, rewards)
    assert_close(loss, expected_loss)
    assert_close(gradient, 0.3 * expected_gradient)


def test_extreme_margins_stay_finite():
    """The loss of a margin of 900 is 0, and that of -900 is 900."""
    zeros = torch.zeros(2)
    inputs = [torch.tensor([900.0, -900.0]), zeros, zeros, zeros]
    loss, chosen, rejected, _ = pair_results(dpo, inputs, beta=1.0)
    assert loss.item() == 900
    assert loss.dtype == torch.float32
    assert chosen.tolist() == [0.0, -1.0]
    assert rejected.tolist() == [0.0, 1.0]


# ---- log-probabilities of pairs, such as the reference's


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("budget", [1, 36, 10_000])
def test_sums_of_log_probabilities_are_in_the_order_of_the_pairs(budget):
    policy = dpo.LogprobModel(build_model("llama"))
    args = dpo.Args(microbatch_tokens=budget)
    pairs = [dict(pair) for pair in PAIRS]
    dpo.add_ref_logprobs(policy, pairs, args)
    prompts = dpo.pad([pair["prompt_ids"] for pair in pairs], "cpu")
    for place, kind in enumerate(KINDS):
        completions = dpo.pad([pair[f"{kind}_ids"] for pair in pairs], "cpu")
        logprobs = dpo.token_logprobs(policy.model, *prompts, *completions)
        found = [pair["ref_logprobs"][place].item() for pair in pairs]
        assert found == pytest.approx(logprobs.sum(1).tolist(), rel=1e-9)


@pytest.mark.usefixtures("alone")
def test_before_training_half_of_the_pairs_count_as_told_apart():
    """The policy still is the reference, so every margin is exactly 0."""
    policy, pairs = dpo.LogprobModel(build_model("llama")), [dict(pair) for pair in PAIRS]
    args = dpo.Args(microbatch_tokens=36)
    dpo.add_ref_logprobs(policy, pairs, args)
    found = dpo.evaluate(policy, pairs, args)
    assert (found["eval/pair_accuracy"], found["eval/pair_margin"]) == (0.5, 0.0)
    assert found["eval/pair_loss"] == pytest.approx(math.log(2), rel=1e-12)


def test_to_evaluate_only_the_reference_reads_no_training_pairs(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(dpo, "add_ref_logprobs", lambda _policy, pairs, _args: read.append(len(pairs)))
    monkeypatch.setattr(dpo, "evaluate", lambda *_: {})
    dataset = few_rows(tmp_path, "preferences/train.jsonl")
    train(dpo, tmp_path / "run", num_steps=0, eval_prompts=8, dataset=dataset)
    assert read == [8]


# ---- a short run


def test_a_run_learns_to_tell_pairs_apart(tmp_path):
    run = tmp_path / "run"
    rows = (ROOT / "data" / "preferences" / "train.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join(rows[:256]))
    sizes = {"num_steps": 12, "minibatch_size": 16, "eval_every": 20, "eval_prompts": 48}
    settings = {"dataset": tmp_path / "rows.jsonl", "learning_rate": 3e-4, "warmup_steps": 2, "beta": 0.1}
    first, *lines = train(dpo, run, **sizes, **settings)
    last = lines[-1]
    assert [line["step"] for line in lines] == list(range(1, 13))
    # The policy is the reference at first. Padding differs from batch to batch, and the last bits with it.
    assert first["eval/pair_loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert lines[0]["loss/preference"] == pytest.approx(math.log(2), abs=1e-4)
    losses = [line["loss/preference"] for line in lines]
    last_loss = sum(losses[-4:]) / 4
    assert last_loss < math.log(2) - 0.02
    assert last["eval/pair_loss"] < first["eval/pair_loss"]
    assert last["eval/pair_margin"] > 0.05
    for line in lines:
        log_ratio = line["pair/chosen_log_ratio"] - line["pair/rejected_log_ratio"]
        assert line["pair/margin"] == pytest.approx(0.1 * log_ratio, abs=1e-4)
    assert min(shares_changed(run / "checkpoint")) > 0.5  # rows of unused tokens stay


def test_labels_that_say_nothing_are_refused(alone):  # noqa: ARG001
    with pytest.raises(SystemExit, match="label-smoothing must be below 0.5"):
        dpo.main(dpo.Args(label_smoothing=0.5))
