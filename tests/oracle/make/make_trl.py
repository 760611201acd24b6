"""Make the numbers of TRL again, with the installed package: its methods are called with a stub as self."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import trl.trainer.grpo_trainer
from common import between, execute, find, gradient, main, tensors
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

GRPO_TRAINER = Path(trl.trainer.grpo_trainer.__file__)


def stub_trainer(**attributes):
    """A trainer in one process without gradient accumulation."""

    def same(values, **_):
        return values

    accelerator = SimpleNamespace(
        gather=same,
        gather_for_metrics=same,
        reduce=same,
        num_processes=1,
        process_index=0,
        device=torch.device("cpu"),
    )
    metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    return SimpleNamespace(accelerator=accelerator, aux_loss_enabled=False, _metrics=metrics, **attributes)


def metrics_of(trainer, mode, names):
    return {name: trainer._metrics[mode][name][0] for name in names if name in trainer._metrics[mode]}


# ---- advantages


def compute_advantages(rewards, group_size, aggregation="sum_then_normalize", scale_rewards="group"):
    """Execute the statements of _generate_and_score_completions on rewards [B, parts]."""
    trainer = stub_trainer(
        multi_objective_aggregation=aggregation,
        scale_rewards=scale_rewards,
        reward_weights=torch.ones(rewards.shape[1], dtype=rewards.dtype),
        reward_funcs=[None] * rewards.shape[1],
    )
    method = find(GRPO_TRAINER, "GRPOTrainer._generate_and_score_completions")
    namespace = vars(trl.trainer.grpo_trainer) | {
        "self": trainer,
        "rewards_per_func": rewards,
        "num_generations": group_size,
        "device": rewards.device,
    }
    execute(between(method, "unscorable_mask = ", "advantages = torch.nan_to_num("), namespace)
    return namespace["advantages"].tolist()


def make_advantages(_, case):
    rewards = torch.tensor(case["inputs"]["rewards"], dtype=torch.float64).view(-1, 1)
    group_size = case["config"]["G"]
    return {
        "trl_group": compute_advantages(rewards, group_size),
        "trl_batch": compute_advantages(rewards, group_size, scale_rewards="batch"),
        "trl_none": compute_advantages(rewards, group_size, scale_rewards="none"),
        "trl_group_float32": compute_advantages(rewards.float(), group_size),
    }


def make_gdpo(_, case):
    rewards = torch.tensor(case["inputs"]["rewards"], dtype=torch.float64)
    aggregation = case["config"]["multi_objective_aggregation"]
    return {"advantages": compute_advantages(rewards.flatten(0, 1), rewards.shape[1], aggregation)}


# ---- losses of completions


def make_policy_loss(_, case):
    config, inputs = case["config"], tensors(case["inputs"])
    rewards, mask = inputs["rewards"], inputs["mask"]
    scale_rewards = config.get("scale_rewards", "group")
    advantages = compute_advantages(rewards.view(-1, 1), rewards.shape[1], scale_rewards=scale_rewards)
    logprobs = inputs["logp"].requires_grad_()

    def forward(*_, **__):
        return logprobs, torch.zeros_like(logprobs), None

    is_cispo = config["loss_type"] == "cispo"
    trainer = stub_trainer(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        loss_type=config["loss_type"],
        importance_sampling_level=config["importance_sampling_level"],
        epsilon_low=config.get("epsilon_low"),
        epsilon_high=config["epsilon_max"] if is_cispo else config["epsilon_high"],
        beta=config["beta"],
        max_completion_length=config.get("max_completion_length"),
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=forward,
    )
    ids = torch.zeros(mask.shape, dtype=torch.long)
    batch = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "old_per_token_logps": inputs["old_logp"],
        "ref_per_token_logps": inputs.get("ref_logp"),
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, batch)
    names = ["kl", "cispo_clip_ratio", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"]
    names += ["clip_ratio/low_min", "clip_ratio/high_max"]
    return {
        "inputs": {"advantages": advantages},
        "loss": loss.item(),
        "grad_logp": gradient(loss, logprobs),
        "metrics": metrics_of(trainer, "train", names),
    }


def make_overlong_penalty(_, case):
    penalty = get_soft_overlong_punishment(case["config"]["L_max"], case["config"]["L_cache"])
    return {"trl": penalty([[0] * length for length in case["inputs"]["lengths"]])}


def make_distillation(_, case):
    inputs = tensors(case["inputs"])
    student = inputs["student_logits"].requires_grad_()
    labels = torch.where(inputs["mask"] == 1, 0, -100)
    loss = GKDTrainer.generalized_jsd_loss(student, inputs["teacher_logits"], labels=labels, **case["config"])
    return {"loss": loss.item(), "grad_student_logits": gradient(loss, student)}


# ---- losses of pairs


def make_dpo(_, case):
    config, inputs = case["config"], tensors(case["inputs"])
    mask = inputs["mask"]
    logprobs = inputs["logp"].requires_grad_()

    def model_of(values):
        def forward(**_):  # TRL's head gives 0 at masked positions
            zeros = torch.zeros_like(mask)
            log_probs = values * mask
            return SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

        return forward

    trainer = stub_trainer(
        model=SimpleNamespace(training=False, is_gradient_checkpointing=False),
        ref_model=model_of(inputs["ref_logp"]),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        beta=config["beta"],
        loss_types=[config["loss_type"]],
        loss_weights=[1.0],
        label_smoothing=config["label_smoothing"],
        f_divergence_type=config["f_divergence"],
        ld_alpha=None,
        precompute_ref_logps=False,
        use_weighting=False,
        _total_train_tokens=0,
    )
    first = torch.zeros_like(mask[:, :1])  # TRL drops the first position, which nothing predicts
    completion_mask = torch.cat([first, mask], dim=1)
    batch = {"input_ids": torch.zeros(completion_mask.shape, dtype=torch.long), "completion_mask": completion_mask}
    loss = DPOTrainer._compute_loss(trainer, model_of(logprobs), batch, return_outputs=False)
    names = ["rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"]
    names += ["logps/chosen", "logps/rejected"]
    return {
        "loss": loss.item(),
        "grad_logp": gradient(loss, logprobs),
        "metrics": metrics_of(trainer, "eval", names),
    }


def make_reward_model(_, case):
    scores = torch.tensor(case["inputs"]["scores"], dtype=torch.float64).requires_grad_()

    def forward(**_):
        return SimpleNamespace(logits=scores.unsqueeze(1))

    trainer = stub_trainer(
        model=SimpleNamespace(training=False),
        args=SimpleNamespace(center_rewards_coefficient=case["config"]["center_rewards_coefficient"]),
        _total_train_tokens=0,
    )
    loss = RewardTrainer.compute_loss(trainer, forward, {})
    names = ["accuracy", "margin", "min_reward", "max_reward", "mean_reward"]
    return {
        "loss": loss.item(),
        "grad_scores": gradient(loss, scores),
        "metrics": metrics_of(trainer, "eval", names),
    }


# ---- logits


def make_logprobs(_, case):
    outputs = {}
    index = torch.tensor(case["inputs"]["index"])
    for temperature in (1.0, 0.7):
        logits = torch.tensor(case["inputs"]["logits"], dtype=torch.float64).requires_grad_()
        logprobs = selective_log_softmax(logits, index, temperature=temperature)
        name = f"trl_selective_log_softmax_T{temperature}"
        outputs[name] = logprobs.tolist()
        outputs[f"{name}_grad"] = gradient(logprobs.sum(), logits)
    return outputs


def make_entropy(_, case):
    inputs = tensors(case["inputs"])
    logits = inputs["logits"].requires_grad_()
    entropy = entropy_from_logits(logits)
    masked_sum = (entropy * inputs["mask"]).sum()
    return {"trl_entropy": entropy.tolist(), "trl_grad_logits_of_masked_sum": gradient(masked_sum, logits)}


MAKERS = {
    "advantages": make_advantages,
    "cispo_trl": make_policy_loss,
    "dapo_overlong": make_overlong_penalty,
    "dapo_trl": make_policy_loss,
    "dpo_trl": make_dpo,
    "dr_grpo_trl": make_policy_loss,
    "entropy": make_entropy,
    "gdpo_trl": make_gdpo,
    "gkd_trl": make_distillation,
    "grpo_trl": make_policy_loss,
    "gspo_trl": make_policy_loss,
    "logprob": make_logprobs,
    "rm_trl": make_reward_model,
}


if __name__ == "__main__":
    main(MAKERS, lambda _: None, package="trl", distribution="trl")
