"""Make the numbers of verl again: its file of losses is imported with stubs for the packages that it only mentions."""

import importlib
import os
import sys
from types import ModuleType, SimpleNamespace

import numpy
import torch
from common import between, execute, find, gradient, main, tensors


class ActorConfig(SimpleNamespace):
    def get(self, name, default):
        return getattr(self, name, default)


def add_module(name, **attributes):
    module = ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module
    return module


def load_core_algos(folder):
    """Import verl/trainer/ppo/core_algos.py without executing the __init__.py of verl, which needs ray."""
    os.environ["VERL_FORCE_DEVICE"] = "cpu"  # without it the vectorized advantages of 0.7.0 raise
    add_module("omegaconf", DictConfig=dict)
    add_module("tensordict", TensorDict=dict)
    add_module("transformers", PreTrainedTokenizer=object)
    for name in ("verl", "verl.utils", "verl.workers"):
        add_module(name, __path__=[str(folder / name.replace(".", "/"))])
    add_module("verl.trainer.config", AlgoConfig=type("AlgoConfig", (), {}))
    add_module("verl.workers.config", ActorConfig=ActorConfig)
    groupwise = importlib.import_module("verl.utils.groupwise")
    sys.modules["verl.utils"].as_torch_index = groupwise.as_torch_index
    sys.modules["verl.utils"].group_mean_std = groupwise.group_mean_std
    core_algos = importlib.import_module("verl.trainer.ppo.core_algos")
    core_algos.folder = folder
    return core_algos


# ---- advantages


def groups_of(rewards):
    """Return rewards [groups, group size] as token rewards [B, 1], their mask and the group of each row."""
    groups = numpy.arange(len(rewards)).repeat(rewards.shape[1])
    token_rewards = rewards.reshape(-1, 1)
    return token_rewards, torch.ones_like(token_rewards), groups


def make_advantages(core_algos, case):
    rewards = torch.tensor(case["inputs"]["rewards"], dtype=torch.float64)

    def advantages_of(compute, values, **settings):
        advantages, _ = compute(*groups_of(values), **settings)
        return advantages.squeeze(1).tolist()

    grpo = core_algos.compute_grpo_outcome_advantage
    return {
        "verl_std": advantages_of(grpo, rewards),
        "verl_no_std": advantages_of(grpo, rewards, norm_adv_by_std_in_grpo=False),
        "verl_vectorized_std_float32": advantages_of(core_algos.compute_grpo_vectorized_outcome_advantage, rewards),
        "verl_rloo": advantages_of(core_algos.compute_rloo_outcome_advantage, rewards),
        "verl_rloo_vectorized": advantages_of(core_algos.compute_rloo_vectorized_outcome_advantage, rewards),
        "verl_std_float32": advantages_of(grpo, rewards.float()),
    }


def compute_gae(core_algos, case):
    """Return token rewards, advantages and returns; the score stands at the last token, and rewards only at tokens."""
    config, inputs = case["config"], tensors(case["inputs"])
    mask = inputs["mask"]
    positions = torch.arange(1, mask.shape[1] + 1)
    last = (mask * positions).argmax(dim=1)  # [B]
    token_scores = torch.zeros_like(mask)
    token_scores[torch.arange(len(mask)), last] = inputs["scores"]
    kl_coef = config["kl_coef_in_reward"]
    rewards = core_algos.compute_rewards(token_scores, inputs["old_logp"], inputs["ref_logp"], kl_coef) * mask
    advantages, returns = core_algos.compute_gae_advantage_return(
        rewards, inputs["values"], mask, config["gamma"], config["lam"]
    )
    return rewards, advantages, returns


def make_gae(core_algos, case):
    rewards, advantages, returns = compute_gae(core_algos, case)
    mask = torch.tensor(case["inputs"]["mask"], dtype=torch.float64)
    return {
        "token_rewards": rewards.tolist(),
        "advantages_whitened": (advantages * mask).tolist(),
        "returns": (returns * mask).tolist(),
        "advantages_unmasked_raw": advantages.tolist(),
    }


# ---- losses


def make_policy_loss(core_algos, case):
    config, inputs = case["config"], tensors(case["inputs"])
    mask = inputs["mask"]
    token_rewards, _, groups = groups_of(inputs["rewards"])
    logprobs = inputs["logp"].requires_grad_()
    settings = ActorConfig(clip_ratio=0.2, global_batch_info={})
    if config.get("advantage") == "rloo":
        compute_loss = core_algos.compute_policy_loss_reinforce
        advantages, _ = core_algos.compute_rloo_outcome_advantage(token_rewards, mask, groups)
    else:
        compute_loss = core_algos.get_policy_loss_fn(config["policy_loss"])
        settings.clip_ratio_low = config["clip_ratio_low"]
        settings.clip_ratio_high = config["clip_ratio_high"]
        settings.clip_ratio_c = config["clip_ratio_c"]
        advantages, _ = core_algos.compute_grpo_outcome_advantage(
            token_rewards, mask, groups, norm_adv_by_std_in_grpo=config["norm_adv_by_std_in_grpo"]
        )
    aggregation = config["loss_agg_mode"]
    policy_loss, metrics = compute_loss(inputs["old_logp"], logprobs, advantages, mask, aggregation, settings)
    outputs = {"inputs": {"advantages": advantages.tolist()}}
    loss = policy_loss
    kl_coef = config.get("kl_loss_coef", 0.0)
    if kl_coef > 0:
        kl = core_algos.kl_penalty(logprobs, inputs["ref_logp"], config["kl_loss_type"])
        kl_loss = core_algos.agg_loss(kl, mask, aggregation)
        loss = policy_loss + kl_coef * kl_loss
        metrics["kl_loss"] = kl_loss.item()
    outputs |= {"loss": loss.item(), "grad_logp": gradient(loss, logprobs), "metrics": metrics}
    if "policy_loss" in config:
        outputs["pg_loss"] = policy_loss.item()
    return outputs


def make_ppo(core_algos, case):
    config, inputs = case["config"], tensors(case["inputs"])
    mask = inputs["mask"]
    logprobs = inputs["new_logp"].requires_grad_()
    values = inputs["vpred"].requires_grad_()
    settings = ActorConfig(
        clip_ratio=config["clip_ratio"],
        clip_ratio_low=None,
        clip_ratio_high=None,
        clip_ratio_c=config["clip_ratio_c"],
        global_batch_info={},
    )
    aggregation = config["loss_agg_mode"]
    _, advantages, returns = compute_gae(core_algos, case)
    policy_loss, metrics = core_algos.compute_policy_loss_vanilla(
        inputs["old_logp"], logprobs, advantages, mask, aggregation, settings
    )
    value_loss, clip_fraction = core_algos.compute_value_loss(
        values, returns, inputs["values"], mask, config["cliprange_value"], aggregation
    )
    return {
        "inputs": {"advantages": advantages.tolist(), "returns": returns.tolist()},
        "pg_loss": policy_loss.item(),
        "vf_loss": value_loss.item(),
        "grad_logp": gradient(policy_loss, logprobs),
        "grad_vpred": gradient(value_loss, values),
        "pg_clipfrac": metrics["actor/pg_clipfrac"],
        "vf_clipfrac": clip_fraction.item(),
        "pg_clipfrac_lower": metrics["actor/pg_clipfrac_lower"],
        "ppo_kl_k1": metrics["actor/ppo_kl"],
    }


# ---- parts


def make_overlong_penalty(core_algos, case):
    """Execute the statements of the reward manager, which is a method of 100 lines."""
    config = case["config"]
    method = find(core_algos.folder / "verl/workers/reward_manager/dapo.py", "DAPORewardManager.__call__")
    statements = between(method, "overlong_buffer_len = ", "overlong_reward = ")
    buffer = SimpleNamespace(len=config["L_cache"], penalty_factor=config["penalty_factor"])
    manager = SimpleNamespace(overlong_buffer_cfg=buffer, max_resp_len=config["L_max"])
    penalties = []
    for length in case["inputs"]["lengths"]:
        names = execute(statements, {"self": manager, "valid_response_length": length})
        penalties.append(float(names["overlong_reward"]))
    return {"verl": penalties}


def make_entropy(core_algos, case):
    inputs = tensors(case["inputs"])
    mask = inputs["mask"]
    logits = inputs["logits"].requires_grad_()
    entropy = core_algos.verl_F.entropy_from_logits(logits)
    outputs = {
        "verl_entropy": entropy.tolist(),
        "verl_grad_logits_of_masked_sum": gradient((entropy * mask).sum(), logits),
    }
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        loss = core_algos.compute_entropy_loss(logits, mask, aggregation)
        outputs[f"verl_entropy_{aggregation}"] = loss.item()
    return outputs


def make_kl(core_algos, case):
    inputs = tensors(case["inputs"])
    logprobs = inputs["logp"].requires_grad_()
    outputs = {}
    for estimator in ("k1", "k2", "k3", "abs"):
        kl = core_algos.kl_penalty(logprobs, inputs["ref_logp"], estimator)
        outputs[f"verl_{estimator}"] = kl.tolist()
        outputs[f"verl_{estimator}_grad"] = gradient(kl.sum(), logprobs)
    for estimator in ("k1+", "k3+"):
        try:
            core_algos.kl_penalty(logprobs, inputs["ref_logp"], estimator)
        except NotImplementedError:
            outputs[f"verl_{estimator}"] = "raises NotImplementedError"
    return outputs


MAKERS = {
    "advantages": make_advantages,
    "dapo_overlong": make_overlong_penalty,
    "entropy": make_entropy,
    "gae_verl": make_gae,
    "grpo_verl": make_policy_loss,
    "gspo_verl": make_policy_loss,
    "kl": make_kl,
    "ppo_verl": make_ppo,
    "reinforce_rloo_verl": make_policy_loss,
}


if __name__ == "__main__":
    main(MAKERS, load_core_algos, package="verl", distribution="verl")
