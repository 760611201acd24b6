"""The scripts that sample compute what other people's code does. Each file of tests/oracle names its source."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close
from toy import SCRIPTS, build_model, loss_and_gradient, read_oracle, tensor
from transformers import LlamaConfig

import dapo
import dr_grpo
import grpo
import reinforce

# In their settings and in ours; verl and oat have one name where TRL has another.
OURS = {"logp": "logprobs", "old_logp": "old_logprobs", "ref_logp": "ref_logprobs", "mask": "completion_mask"}
OURS |= {"epsilon_low": "clip_eps_low", "epsilon_high": "clip_eps_high", "beta": "kl_coef"}
OURS |= {"clip_ratio_low": "clip_eps_low", "clip_ratio_high": "clip_eps_high", "kl_loss_coef": "kl_coef"}
OURS |= {"generate_max_length": "max_completion_length", "cliprange": "clip_eps"}


def cases_of(script, name, rtol=1e-9, **config):
    """For parametrize, the cases of a file that have these settings, with a script and a tolerance."""
    cases = [case for case in read_oracle(name) if config.items() <= case["config"].items()]
    return [pytest.param(script, case, rtol, id=f"{name}-{case['name']}-{script}") for case in cases]


CASES = cases_of("grpo", "grpo_trl") + cases_of("grpo", "grpo_oat")
CASES += cases_of("grpo_tools", "grpo_trl", beta=0) + cases_of("grpo_tools", "grpo_oat", beta=0)
# verl adds 1e-8 to its denominators; with other values of clip_ratio_c it has a second clip.
CASES += cases_of("grpo", "grpo_verl", rtol=1e-6, clip_ratio_c=1e9)
CASES += cases_of("grpo_process", "grpo_trl")
CASES += cases_of("dr_grpo", "dr_grpo_trl", beta=0) + cases_of("dr_grpo", "dr_grpo_oat", beta=0)
CASES += cases_of("dapo", "dapo_trl", beta=0) + cases_of("cispo", "cispo_trl", beta=0)
CASES += cases_of("gspo", "gspo_trl", beta=0) + cases_of("gspo", "gspo_verl", rtol=1e-6, kl_loss_coef=0)
# The paper sums over tokens; verl also has means.
CASES += cases_of("reinforce", "reinforce_rloo_verl", rtol=1e-6, loss_agg_mode="seq-mean-token-sum")


@pytest.mark.parametrize("name, case, rtol", CASES)
def test_loss_and_gradient(name, case, rtol):
    """Divided by tokens or by completions; and where TRL has them, clip fractions of tokens and the KL divergence."""
    given = {OURS.get(key, key): value for key, value in (case["config"] | case["inputs"]).items()}
    given = {key: tensor(value) if isinstance(value, list) else value for key, value in given.items()}
    if given["advantages"].ndim == 2:  # verl's, which are the same for every token
        given["advantages"] = given["advantages"][:, 0]
    outputs, mask = case["outputs"], given["completion_mask"]
    loss, gradient, metrics = loss_and_gradient(name, given)
    count = mask.sum() if name in ("dapo", "cispo") else len(mask)
    assert (loss / count).item() == pytest.approx(outputs["loss"], rel=rtol, abs=rtol)
    assert_close(gradient / count, tensor(outputs["grad_logp"]), rtol=rtol, atol=rtol / 100)
    peers = {"policy/ref_kl": "kl"}
    if name != "gspo":  # TRL counts its clipped completions, not their tokens
        peers |= {f"policy/clip_fraction_{side}": f"clip_ratio/{side}_mean" for side in ("low", "high")}
    for key, peer in peers.items():
        if key in metrics and peer in outputs["metrics"]:
            total, count = metrics[key]
            assert total / count == pytest.approx(outputs["metrics"][peer], rel=1e-9)


ADVANTAGES = [(SCRIPTS[name].compute_advantages, "trl_group", 1e-6) for name in ("grpo", "dapo", "gspo", "cispo")]
ADVANTAGES.append((dr_grpo.compute_advantages, "oat_drgrpo", 1e-9))
for baseline, peer in (("leave_one_out", "verl_rloo"), ("group_mean", "verl_no_std")):
    ADVANTAGES.append((partial(reinforce.compute_advantages, baseline=baseline), peer, 1e-9))


@pytest.mark.parametrize("compute_advantages, peer, rtol", ADVANTAGES)
def test_advantages(compute_advantages, peer, rtol):
    for case in read_oracle("advantages"):
        rewards = tensor(case["inputs"]["rewards"])
        found = compute_advantages(rewards.view(-1), rewards.shape[1])
        assert_close(found, tensor(case["outputs"][peer]).view(-1), rtol=rtol, atol=rtol / 100)


def test_overlong_penalty():
    [case] = read_oracle("dapo_overlong")
    lengths = tensor(case["inputs"]["lengths"])
    limit = case["config"]["L_max"]
    penalty = dapo.overlong_penalty(lengths, limit, case["config"]["L_cache"])
    assert_close(penalty, tensor(case["outputs"]["trl"]))
    within = lengths <= limit  # verl's goes on falling past the limit, which no completion passes
    assert_close(penalty[within], tensor(case["outputs"]["verl"])[within])


@pytest.mark.parametrize("peer", ["verl", "open_instruct"])
def test_kl_divergence_from_the_reference(peer):
    [case] = read_oracle("kl")
    logprobs, ref_logprobs = tensor(case["inputs"]["logp"]), tensor(case["inputs"]["ref_logp"])
    inputs = {"logprobs": logprobs, "old_logprobs": logprobs, "ref_logprobs": ref_logprobs}
    inputs |= {"kl_coef": logprobs.shape[1], "advantages": torch.zeros(len(logprobs))}  # the loss divides by the length
    _, gradient, metrics = loss_and_gradient("grpo", inputs | {"completion_mask": torch.ones_like(logprobs)})
    expected = tensor(case["outputs"][f"{peer}_k3"])
    assert metrics["policy/ref_kl"] == pytest.approx((expected.sum().item(), expected.numel()))
    assert_close(gradient, tensor(case["outputs"][f"{peer}_k3_grad"]))


def head_logprobs(logits, targets, temperature):
    """grpo.head_logprobs of a model whose logits are the hidden states that it is given."""
    size = logits.shape[-1]
    config = LlamaConfig(hidden_size=size, num_attention_heads=1, head_dim=8, num_hidden_layers=1)
    model = build_model(config, vocab_size=size)
    torch.nn.init.eye_(model.lm_head.weight)
    return grpo.head_logprobs(grpo.Policy(model, "float32"), logits.flatten(0, 1), targets.flatten(), temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs(temperature):
    [case] = read_oracle("logprob")
    logits = tensor(case["inputs"]["logits"]).requires_grad_()
    targets = torch.tensor(case["inputs"]["index"])
    logprobs, _ = head_logprobs(logits, targets, temperature)
    logprobs.sum().backward()
    expected = f"trl_selective_log_softmax_T{temperature}"
    assert_close(logprobs.view(targets.shape), tensor(case["outputs"][expected]), rtol=1e-9, atol=0)
    assert_close(logits.grad, tensor(case["outputs"][f"{expected}_grad"]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("peer", ["trl", "verl", "oat"])
def test_entropies(peer):
    [case] = read_oracle("entropy")
    logits = tensor(case["inputs"]["logits"]).requires_grad_()
    _, entropies = head_logprobs(logits, torch.zeros(logits.shape[:2], dtype=torch.long), 1.0)
    expected = tensor(case["outputs"][f"{peer}_entropy"])
    assert_close(entropies.view(expected.shape), expected, rtol=1e-9, atol=0)
    assert not entropies.requires_grad
