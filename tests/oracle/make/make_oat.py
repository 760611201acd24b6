"""Make the numbers of oat again. Its file of PPO needs vllm, so its statements and methods are taken from it by ast."""

import functools
from collections import defaultdict
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace

import numpy
import torch
from common import between, execute, find, gradient, load, main, tensors


def load_code(folder):
    """Import oat/utils/ops.py, which needs only torch, and name the file of PPO."""
    spec = spec_from_file_location("ops", folder / "oat/utils/ops.py")
    ops = module_from_spec(spec)
    spec.loader.exec_module(ops)
    return SimpleNamespace(ops=ops, ppo=folder / "oat/algorithms/ppo.py")


def names_of(code):
    return vars(code.ops) | {"torch": torch, "functools": functools}


def stub_learner(critic_type, group_size=None, **settings):
    args = SimpleNamespace(critic_type=critic_type, num_samples=group_size, **settings)
    return SimpleNamespace(args=args)


# ---- advantages


def compute_advantages(code, rewards, critic_type):
    """Call the method on rewards [groups, group size]."""
    compute = load(code.ppo, "PPOLearner.compute_monte_carlo_advantages", names_of(code))
    learner = stub_learner(critic_type, group_size=rewards.shape[1])
    return compute(learner, rewards.view(-1, 1), None).tolist()


def make_advantages(code, case):
    rewards = torch.tensor(case["inputs"]["rewards"], dtype=torch.float64)
    return {
        "oat_grpo": compute_advantages(code, rewards, "grpo"),
        "oat_drgrpo": compute_advantages(code, rewards, "drgrpo"),
        "oat_grpo_float32": compute_advantages(code, rewards.float(), "grpo"),
    }


def make_gae(code, case):
    config, inputs = case["config"], tensors(case["inputs"])
    rewards, mask = inputs["token_rewards"], inputs["mask"]
    last = torch.zeros_like(mask[:, :1])

    def critic(**_):
        return torch.cat([inputs["values"] * mask, last], dim=1)  # [B, T + 1]

    compute = load(code.ppo, "PPOLearner.compute_ppo_advantages", names_of(code))
    learner = stub_learner(
        "ppo",
        train_batch_size_per_device=len(mask),
        gamma=config["gamma"],
        lam=config["lam"],
        whiten_adv=config["whiten_adv"],
    )
    learner.critic = critic
    ids = torch.ones(len(mask), mask.shape[1] + 1)
    advantages, returns, _ = compute(learner, rewards, ids, ids, mask.bool())  # a float mask differs by 5e-8
    return {
        "token_rewards": rewards.tolist(),
        "advantages_whitened": (advantages * mask).tolist(),
        "returns": (returns * mask).tolist(),
    }


# ---- losses


def make_policy_loss(code, case):
    """Execute the statements of learning_step from the ratio of the policies to the loss with its KL term."""
    config, inputs = case["config"], tensors(case["inputs"])
    advantages = compute_advantages(code, inputs["rewards"], config["critic_type"])
    mask = inputs["mask"]
    logprobs = inputs["logp"].requires_grad_()
    args = SimpleNamespace(
        critic_type=config["critic_type"],
        generate_max_length=config["generate_max_length"],
        reinforce_update=False,
        cliprange=config["cliprange"],
        beta=config["beta"],
        tis_c=None,
    )
    namespace = names_of(code) | {
        "self": SimpleNamespace(args=args),
        "args": args,
        "new_logps": logprobs,
        "mb_logps": inputs["old_logp"],
        "mb_actor_logps": inputs["old_logp"],
        "mb_advantage": torch.tensor(advantages, dtype=torch.float64).unsqueeze(1),
        "mb_response_masks": mask,
        "mb_loss_masks": torch.ones(len(mask), dtype=mask.dtype),
        "ref_logps": inputs["ref_logp"],
        "mini_batch_inds": numpy.arange(len(mask)),
        "mb_last_valid_token_pos": mask.shape[1] + 1,
        "stats": defaultdict(list),
        "infos": {},
        "kl_v1_sum": 0,
        "kl_v2_sum": 0,
        "act_num_token": 0,
    }
    aggregator = "self.masked_aggregator = "
    execute(between(find(code.ppo, "PPOLearner._init"), aggregator, aggregator), namespace)
    step = find(code.ppo, "PPOLearner.learning_step")
    execute(between(step, "if args.reinforce_update:", "if args.beta > 0:"), namespace)
    loss, infos = namespace["loss"], namespace["infos"]
    return {
        "inputs": {"advantages": advantages},
        "loss": loss.item(),
        "grad_logp": gradient(loss, logprobs),
        "metrics": {name: infos[name].item() for name in ("pg_loss", "kl3", "reg_loss") if name in infos},
    }


def make_entropy(code, case):
    inputs = tensors(case["inputs"])
    logits = inputs["logits"].requires_grad_()
    entropy = code.ops.entropy_from_logits(logits)
    masked_sum = (entropy * inputs["mask"]).sum()
    return {"oat_entropy": entropy.tolist(), "oat_grad_logits_of_masked_sum": gradient(masked_sum, logits)}


MAKERS = {
    "advantages": make_advantages,
    "dr_grpo_oat": make_policy_loss,
    "entropy": make_entropy,
    "gae_oat": make_gae,
    "grpo_oat": make_policy_loss,
}


if __name__ == "__main__":
    main(MAKERS, load_code, package="oat", distribution="oat-llm")
