"""PPO for RLHF: Proximal Policy Optimization against a reward model, with a KL penalty per token.

Schulman et al., "Proximal Policy Optimization Algorithms" (2017) https://arxiv.org/abs/1707.06347v2, equation 7;
Ouyang et al., "Training language models to follow instructions with human feedback" (2022)
https://arxiv.org/abs/2203.02155v1, equation 2; details of Huang et al., "The N+ Implementation Details of RLHF with
PPO" (2024) https://arxiv.org/abs/2403.17031v1.

Maximise J over θ, and minimise L over φ:

    J(θ) = Eₜ wₜ min(rₜ Âₜ, clip(rₜ, 1 − ε, 1 + ε) Âₜ)
    L(φ) = Eₜ ½ max((V − Gₜ)², (clip(V, V_old − ε_V, V_old + ε_V) − Gₜ)²),   Gₜ = Aₜ + V_old(sₜ)
    Aₜ = Σₖ (γλ)ᵏ δₜ₊ₖ,   δₜ = Rₜ + γ V_old(sₜ₊₁) − V_old(sₜ),   V_old = 0 after the last token
    Rₜ = −β log π_old(oₜ)/π_ref(oₜ), and at the last token of a completion the score is added

    Eₜ        mean over the tokens of all completions of an optimizer step, stop tokens included
    oₜ, sₜ    the t-th token of a completion, and the prompt with all tokens before it; π(oₜ) is short for π(oₜ|sₜ)
    π_old, V_old   policy and value model before the step's first update
    rₜ        π_θ(oₜ) / π_old(oₜ)
    Âₜ        Aₜ, shifted and scaled to mean 0 and variance 1 over all tokens of the rollout
    V         the value model, with parameters φ. It starts as a copy of the reward model, normalised as the score is
    score     the reward model's, with mean 0 and variance 1 on --norm-samples completions of the initial policy; if the
              completion has no stop token, minus --missing-stop-penalty
    π_ref     the model that training started from
    wₜ        min(π_old(oₜ) / π_sampler(oₜ), --sampler-weight-cap); π_sampler is π_old, but rounded to bfloat16
    ε, ε_V, β, γ, λ   --clip-eps, --value-clip-eps, --kl-coef, --gamma, --gae-lambda

Departures from the papers
- The weight w is that of Yao et al. (2025), "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
- There is no entropy bonus, and no PPO-ptx. The value loss has no coefficient: V has its own weights and learning rate.
- Huang et al. only shift scores. Here they are scaled, too, so β, ε_V and the penalty are in units of their deviation.
- The code of Huang et al. puts the score one position later, sets it to -1 without a stop token, and lets learning
  rates fall to 0. AdamW's betas are 0.9 and 0.95. Both models' gradients are clipped to norm 1, each for itself.

    python ppo_rlhf.py                                                                     # the settings TINY below
    python ppo_rlhf.py --model Qwen/Qwen2.5-0.5B-Instruct --reward-model runs/REWARD_MODEL_RUN/checkpoint-000200
"""

import json
import math
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Literal

if int(os.environ.get("RANK", 0)) > 0:
    os.environ["TQDM_DISABLE"] = "1"  # only the first rank shows progress bars
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: idle threads that spin slow a busy machine down
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # batches differ in size: leave no gaps
os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")  # cuDNN is slow for new sizes, wrong on B200

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro
from datasets import load_dataset
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig
from transformers.integrations import sdpa_attention

RANK = int(os.environ.get("RANK", 0))  # torchrun sets these
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
HERE = Path(__file__).resolve().parent


@dataclass
class Args:
    """Train a language model with PPO against a reward model."""

    # the algorithm
    clip_eps: float = 0.2
    """epsilon (0.2 in Schulman et al. and in Huang et al.)"""
    value_clip_eps: float = 0.2
    """how far a value may move towards its return before its gradient stops (0.2 in Huang et al., not scaled)"""
    kl_coef: float = 0.05
    """beta, the weight of the KL penalty (0.05 in Huang et al., of unscaled scores); with 0 no reference is loaded"""
    gamma: float = 1.0
    """discount factor (1: no discounting)"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation (0.95 in Huang et al.)"""
    norm_samples: int = 512
    """completions of the initial policy on which scores are normalised to mean 0 and variance 1, over all ranks"""
    missing_stop_penalty: float = 1.0
    """subtracted from the normalised score of a completion that was cut off before a stop token"""
    sampler_weight_cap: float = 2.0
    """cap on the weight w of each token, which corrects for rounding differences between sampling and training"""

    # model and data
    model: str = ""
    """folder or Hugging Face name of a causal language model (empty: the bundled model with its settings TINY)"""
    tiny: bool = False
    """use the settings TINY with --model, for checkpoints of the bundled model"""
    dataset: str = "HuggingFaceH4/ultrafeedback_binarized:default:train_prefs"
    """file, folder or hub NAME[:CONFIG[:SPLIT]] with the column prompt, and answer for the accuracy (docs/data.md)"""
    reward_model: str = ""
    """folder or Hugging Face name of a reward model with the same tokenizer, such as a checkpoint of reward_model.py"""
    system_prompt: str = ""
    """system message before every prompt that has none; give the one with which the reward model was trained"""
    max_prompt_length: int = 512
    """maximum tokens per prompt; longer prompts are dropped"""

    # rollout
    num_steps: int = 200
    """training steps, each of which samples one rollout"""
    prompts_per_step: int = 256
    """prompts per rollout, over all ranks"""
    max_completion_length: int = 1024
    """maximum tokens per completion, including the stop token"""
    temperature: float = 1.0
    """temperature of rollouts and of their log-probabilities"""
    rollout_batch_size: int = 512
    """maximum completions sampled at once on each rank"""

    # optimization
    learning_rate: float = 3e-6
    """learning rate of the policy's AdamW; small models need a higher one, such as 1e-5 for 135 M parameters"""
    value_learning_rate: float = 3e-6
    """learning rate of the value model's AdamW; small models need a higher one, such as 3e-5 for 135 M parameters"""
    warmup_steps: int = 1
    """training steps over which the learning rates rise from 0; at most half of the run"""
    minibatch_size: int = 64
    """completions per optimizer step, over all ranks"""
    microbatch_tokens: int = 4096
    """maximum tokens per forward pass, including padding"""
    update_epochs: int = 4
    """passes over each rollout (4 in Huang et al.)"""
    max_grad_norm: float = 1.0
    """larger gradients are scaled down to this norm; 0 leaves them as they are"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: saves memory, but the update takes about a third longer"""
    cpu_offload: bool = False
    """keep all but the sampler in the host's memory: fits larger models, but is slower"""
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """precision of matrix products (float32 on GPUs before Ampere, such as T4 and V100); weights are float32"""

    # evaluation, saving, logging
    eval_every: int = 20
    """steps between evaluations"""
    eval_prompts: int = 256
    """held-out prompts per evaluation; of a training split, at most a fifth"""
    save_every: int = 20
    """steps between saves"""
    run_dir: str = ""
    """new folder for logs and checkpoints (empty: runs/SCRIPT__SEED__TIME, or that of --resume)"""
    resume: str = ""
    """folder of a run to continue; its settings become the defaults"""
    seed: int = 1
    """seed of sampling and of the order of prompts"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline works)"""


# The settings of the bundled model, which adds numbers.
TINY = Args(
    model=f"{HERE}/models/tiny",
    dataset=f"{HERE}/data/addition",
    reward_model=f"{HERE}/models/tiny-reward",
    learning_rate=1e-4,
    value_learning_rate=3e-4,
    warmup_steps=2,
    num_steps=30,
    prompts_per_step=128,
    microbatch_tokens=1024,
    update_epochs=2,
    max_prompt_length=32,
    max_completion_length=48,
    eval_prompts=512,
    precision="float32",
)


# What you may edit: score_rollout is the reward, and evaluations count is_correct as accuracy.


def is_correct(completion, answer):
    """Return whether the final answer of a completion equals the answer of a row, which may be a whole solution."""
    if answer is None:
        raise ValueError("no column answer, solution or ground_truth: write a reward that needs none")
    value, unit = parse_answer(extract_answer(completion) or "")
    right_value, right_unit = parse_answer(extract_answer(str(answer)) or str(answer))
    return value != "" and value == right_value and (unit == right_unit or "" in (unit, right_unit))


def score_rollout(reward_model, batch, texts, rows, args):  # noqa: ARG001
    """Return scores (B,): the reward model's, reduced without a stop token. A rule can use texts and rows instead."""
    scores = compute_scores(reward_model, batch, args)  # (B, L), at each place as if the completion ended there
    scores = scores[torch.arange(len(scores)), batch["total_lengths"] - 1]  # (B,)
    return scores - args.missing_stop_penalty * batch["truncated"]


def normalise_scores(scorer, sampler, tokenizer, rows, args):
    """Give a Scorer scores of mean 0 and variance 1 on samples of the initial policy."""
    if RANK == 0:
        print(f"sampling {args.norm_samples} completions, to normalise the scores of the reward model")
    torch.manual_seed(hash((args.seed, RANK)))
    rows = pick_rows(rows, 0, args.norm_samples, args.seed)[RANK::WORLD_SIZE]
    batch, _ = sample_completions(sampler, tokenizer, rows, args.temperature, args)
    scores = compute_scores(scorer, batch, args)
    mean, variance = mean_and_variance(scores[torch.arange(len(scores)), batch["total_lengths"] - 1])
    scorer.mean.fill_(mean)
    scorer.std.fill_(math.sqrt(variance + 1e-8))


def token_rewards(scores, old_logprobs, ref_logprobs, completion_mask, kl_coef):
    """Eq. 2 of Ouyang et al. per token: the score at the last token, minus kl_coef log(π_old / π_ref) at each.

    scores (B,), all else (B, L); ref_logprobs may be None if kl_coef is 0 -> (B, L), 0 outside the mask.
    """
    mask = completion_mask.bool()
    places = torch.arange(mask.shape[1], device=mask.device)  # (L,)
    last = (places * mask).amax(1, keepdim=True)  # (B, 1), the place of the last token
    rewards = torch.where(mask & (places == last), scores.unsqueeze(1), 0.0)  # (B, L)
    if ref_logprobs is not None:
        rewards = rewards - kl_coef * torch.where(mask, old_logprobs - ref_logprobs, 0.0)
    return rewards


def compute_advantages(rewards, values, completion_mask, gamma, gae_lambda):
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16), and returns, the targets of the values.

    All (B, L); values are of what stands before each token -> advantages, returns (B, L), 0 outside the mask.
    """
    mask = completion_mask.bool()
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])  # (B,), 0 after the last token, also of a truncated completion
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]  # (B,)
        advantages[:, t] = delta + gamma * gae_lambda * next_advantage
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], advantages[:, t], next_advantage)
    return torch.where(mask, advantages, 0.0), torch.where(mask, advantages + values, 0.0)


def mean_and_variance(x):
    """Return mean and variance (divisor N - 1) of the numbers of all ranks."""
    x = x.double()
    sums = torch.tensor([x.numel(), x.sum(), x.square().sum()], dtype=torch.float64)
    dist.all_reduce(sums)
    count, total, squares = sums.tolist()
    mean = total / count
    return mean, (squares - count * mean**2) / max(1, count - 1)


def whiten(x, mask):
    """Shift and scale x (B, L) to mean 0 and variance 1 over the mask on all ranks; 0 elsewhere."""
    mask = mask.bool()
    mean, variance = mean_and_variance(x[mask])
    return torch.where(mask, (x - mean) / math.sqrt(variance + 1e-8), 0.0)


def k3(log_ratio):
    """Estimate KL(p || q) from log(q / p) at samples of p (Schulman's k3): unbiased, and never negative."""
    return log_ratio.expm1() - log_ratio  # expm1(x) is exp(x) - 1 without rounding errors near 0


def policy_loss(
    logprobs,
    old_logprobs,
    sampler_logprobs,
    advantages,
    completion_mask,
    clip_eps,
    sampler_weight_cap,
):
    """Return eq. 7 of Schulman et al. negated and summed over tokens (the caller divides by their number), and metrics.

    All (B, L). Only logprobs get a gradient. Metrics are pairs (sum, number of tokens).
    """
    mask = completion_mask.bool()
    old_logprobs = old_logprobs.detach()
    advantages = advantages.detach()
    # What stands outside the mask must not matter, not even inf or nan: set log-ratios to 0 there before exp.
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()  # (B, L)
    clipped_ratio = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    token_loss = -torch.min(ratio * advantages, clipped_ratio * advantages)  # (B, L)
    sampler_log_ratio = torch.where(mask, old_logprobs - sampler_logprobs, 0.0).detach()
    weight = sampler_log_ratio.exp().clamp(max=sampler_weight_cap)  # (B, L)
    loss = torch.where(mask, weight * token_loss, 0.0).sum()

    metrics = {}
    num_tokens = mask.sum()
    metrics["policy/approx_kl"] = (k3(log_ratio.detach()).sum(), num_tokens)  # KL(old || policy), at first 0
    metrics["policy/clip_fraction_low"] = (((ratio < 1 - clip_eps) & (advantages < 0)).sum(), num_tokens)
    metrics["policy/clip_fraction_high"] = (((ratio > 1 + clip_eps) & (advantages > 0)).sum(), num_tokens)
    metrics["policy/sampler_kl"] = (k3(sampler_log_ratio).sum(), num_tokens)  # KL(sampler || old)
    return loss, metrics


def value_loss(values, old_values, returns, completion_mask, value_clip_eps):
    """Half the squared error, or that of the value clipped around the old one if it is larger, summed over tokens.

    All (B, L); the caller divides by the number of tokens. Only values get a gradient. Metrics are as in policy_loss.
    """
    mask = completion_mask.bool()
    old_values = old_values.detach()
    returns = returns.detach()
    clipped_values = values.clamp(old_values - value_clip_eps, old_values + value_clip_eps)
    error = torch.where(mask, values - returns, 0.0).square()  # (B, L)
    clipped_error = torch.where(mask, clipped_values - returns, 0.0).square()
    loss = 0.5 * torch.maximum(error, clipped_error).sum()
    return loss, {"value/clip_fraction": ((clipped_error > error).sum(), mask.sum())}


def rollout_metrics(batch, scores, rewards, ref_logprobs):
    """Return metrics of a rollout as pairs (sum, count); the objective is the sum of a completion's rewards."""
    mask = batch["completion_mask"].bool()
    returns = batch["returns"][mask]  # (N,)
    _, variance = mean_and_variance(returns)
    _, unexplained = mean_and_variance(returns - batch["old_values"][mask])
    metrics = {
        "objective/mean": (rewards.sum(), len(mask)),
        "score/mean": (scores.sum(), len(mask)),
        "rollout/length_mean": (mask.sum(), len(mask)),
        "rollout/truncated": (batch["truncated"].sum(), len(mask)),
        "value/explained_variance": (1 - unexplained / max(variance, 1e-12), 1),
    }
    if ref_logprobs is not None:  # KL(π_old || π_ref) at samples of π_old, per completion and per token
        ref_log_ratio = batch["old_logprobs"] - ref_logprobs  # both are 0 outside the mask
        metrics["rollout/ref_kl_sum"] = (ref_log_ratio.sum(), len(mask))
        metrics["policy/ref_kl"] = (k3(-ref_log_ratio).sum(), mask.sum())
    return metrics


# A batch is a dictionary of tensors with a row for each of B completions:
#   ids               (B, L)  a prompt, its completion and padding
#   completion_mask   (B, L)  1 at the completion's tokens, 0 elsewhere
#   sampler_logprobs, old_logprobs                 (B, L)  log-probability of each token in the mask, 0 elsewhere
#   old_values, returns, advantages                (B, L)  at the same places: old_values of what stands before a token
#   total_lengths, truncated, row                  (B,)    lengths with the prompt; without a stop token; its number


def values_before(scores):
    """Return the value of what stands before each token, at the token's place: scores (B, L), moved by one place."""
    return nn.functional.pad(scores[:, :-1], (1, 0))


def accumulate_gradients(policy, value_model, batch, indices, divisor, args):
    """Accumulate the gradients of both losses / divisor over these completions; return dictionaries of metrics."""
    collected = []
    for microbatch in inner_bar(microbatches(batch, indices, args.microbatch_tokens), "update"):
        mask = microbatch["completion_mask"]
        num_tokens = mask.sum()
        logprobs, entropies = policy(microbatch["ids"], mask, args.temperature)
        loss, metrics = policy_loss(
            logprobs,
            microbatch["old_logprobs"],
            microbatch["sampler_logprobs"],
            microbatch["advantages"],
            mask,
            args.clip_eps,
            args.sampler_weight_cap,
        )
        (loss / divisor).backward()
        values = values_before(value_model(microbatch["ids"]))
        error, value_metrics = value_loss(
            values, microbatch["old_values"], microbatch["returns"], mask, args.value_clip_eps
        )
        (error / divisor).backward()  # separately, as the models share no weights: the policy's memory is free by now
        metrics["loss/policy"] = (loss.detach(), num_tokens)
        metrics["loss/value"] = (error.detach(), num_tokens)
        metrics["policy/entropy"] = (entropies.sum(), num_tokens)
        collected.append(metrics | value_metrics)
    return collected


def main(args):
    device = init_ranks()
    check_args(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train_rows, eval_rows = load_rows(args, tokenizer)
    policy = load_policy(args, tokenizer, device)
    ref = None
    if args.kl_coef:
        ref = load_policy(args, tokenizer, device).requires_grad_(False)
    sampler = load_sampler(args, tokenizer, device)
    value_model = load_scorer(args, tokenizer, device)
    reward_model = load_scorer(args, tokenizer, device).requires_grad_(False)
    models = PolicyAndValue(policy, value_model)
    settings = {"betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.0, "fused": True}  # eps as Huang et al.
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, **settings)
    value_optimizer = torch.optim.AdamW(value_model.parameters(), args.value_learning_rate, **settings)
    open_run(args, device)
    first_step = load_state(args, models, [optimizer, value_optimizer]) + 1
    rank_minibatch_size = args.minibatch_size // WORLD_SIZE
    if first_step == 1:  # the sampler still has the weights that it was loaded with, and V those of the reward model
        normalise_scores(value_model, sampler, tokenizer, train_rows, args)
    reward_model.mean.copy_(value_model.mean)  # normalise_scores or load_state has set the value model's
    reward_model.std.copy_(value_model.std)
    if first_step == 1:
        log_step(args, 0, evaluate(sampler, reward_model, tokenizer, eval_rows, args))

    progress = tqdm(range(first_step, args.num_steps + 1))
    for step in progress:
        # Random numbers depend on the step, so that a resumed run continues as if it had not been interrupted.
        torch.manual_seed(hash((args.seed, step, RANK)))  # the hash of integers is the same in every process
        step_start = time.perf_counter()

        # rollout: sample a completion per prompt, and score it
        copy_weights(policy, sampler)
        start = (step - 1) * args.prompts_per_step
        rows = pick_rows(train_rows, start, args.prompts_per_step, args.seed)[RANK::WORLD_SIZE]
        batch, texts = sample_completions(sampler, tokenizer, rows, args.temperature, args)
        batch["row"] = torch.arange(len(rows), device=device)  # which compute_logprobs needs
        completion_mask = batch["completion_mask"]
        scores = score_rollout(reward_model, batch, texts, rows, args)
        collected = [{"perf/rollout_seconds": (time.perf_counter() - step_start, 1)}]

        # log-probabilities, values and advantages before the update, in the minibatches of the first epoch
        minibatches = torch.randperm(len(rows), device=device).split(rank_minibatch_size)
        batch["old_logprobs"] = compute_logprobs(policy, batch, minibatches, args)
        ref_logprobs = None
        if ref is not None:
            ref_logprobs = compute_logprobs(ref, batch, minibatches, args)
        rewards = token_rewards(scores, batch["old_logprobs"], ref_logprobs, completion_mask, args.kl_coef)
        values = values_before(compute_scores(value_model, batch, args))
        advantages, returns = compute_advantages(rewards, values, completion_mask, args.gamma, args.gae_lambda)
        batch["old_values"] = values
        batch["returns"] = returns
        batch["advantages"] = whiten(advantages, completion_mask)  # only these: returns keep the unit of values
        collected.append(rollout_metrics(batch, scores, rewards, ref_logprobs))

        # update: one optimizer step of policy and value model per minibatch
        warmup = min(1.0, step / max(1, min(args.warmup_steps, args.num_steps // 2)))
        learning_rate = args.learning_rate * warmup
        value_learning_rate = args.value_learning_rate * warmup
        for _ in range(args.update_epochs):
            for indices in minibatches:
                num_tokens = completion_mask[indices].sum()
                dist.all_reduce(num_tokens)  # of all ranks, divided by their number because FSDP averages over them
                collected += accumulate_gradients(policy, value_model, batch, indices, num_tokens / WORLD_SIZE, args)
                grad_norm = step_optimizer(policy, optimizer, learning_rate, args.max_grad_norm)
                value_grad_norm = step_optimizer(value_model, value_optimizer, value_learning_rate, args.max_grad_norm)
                collected.append({"optim/grad_norm": (grad_norm, 1), "optim/value_grad_norm": (value_grad_norm, 1)})
            minibatches = torch.randperm(len(rows), device=device).split(rank_minibatch_size)  # of the next epoch

        # metrics, evaluation, logs, saving
        metrics = mean_metrics(collected)
        agree = metrics.get("policy/sampler_kl", 0.0) <= 0.1  # rounding gives about 0.001, a wrong mask 0.2 or nan
        if step == first_step and not agree:  # later, one rare token may give as much
            raise SystemExit(f"sampling and training disagree: a KL per token of {metrics['policy/sampler_kl']:.2g}")
        metrics["optim/learning_rate"] = learning_rate
        metrics["optim/value_learning_rate"] = value_learning_rate
        metrics["perf/step_seconds"] = time.perf_counter() - step_start
        if step % args.eval_every == 0 or step == args.num_steps:
            copy_weights(policy, sampler)
            metrics |= evaluate(sampler, reward_model, tokenizer, eval_rows, args)
        log_step(args, step, metrics)
        log_group(args, step, rows[0], texts[:1], scores[:1].tolist())
        progress.set_postfix(objective=metrics["objective/mean"])
        if step % args.save_every == 0 or step == args.num_steps:
            save(args, models, [optimizer, value_optimizer], tokenizer, step)

    dist.destroy_process_group()


# ---- below: identical copies of what several scripts share, in the order of use
# This script's own are only check_args, load_scorer, Scorer, PolicyAndValue, compute_scores, evaluate,
# compute_logprobs.

LOGITS_AT_ONCE = 2**26  # at most, tokens times vocabulary: 256 MiB
inner_bar = partial(tqdm, leave=False, delay=5)  # a progress bar that appears after five seconds
VALUE = r"[+-]? ?(?:\d{1,30}|[1-9]\d{0,2}(?:,\d{3}){1,9})?(?:\.\d{1,30}|(?<=\d) ?/ ?[1-9]\d{0,29})?(?<=\d)"
UNIT = "(?:square |cubic )?(?:[cmk]?m|feet|(?:meter|mile|unit)s?)|kg|(?:degree|dollar|cent|minute|hour|day|week|year)s?"


def parse_args():
    """Read the flags over the defaults that apply: those of Args, of TINY, or of the run to resume."""
    given = tyro.cli(Args)
    if given.resume:
        if given.run_dir not in ("", given.resume):
            raise SystemExit("a resumed run goes on in its own folder: leave out --run-dir, or copy the folder first")
        return tyro.cli(Args, default=Args(**json.loads(Path(given.resume, "args.json").read_text())))
    if given.tiny or not given.model:
        return tyro.cli(Args, default=TINY)
    return given


def init_ranks():
    """Join the process group of torchrun, or make a group of one; return this rank's device."""
    device = torch.device("cpu")
    backend = "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    store = None if WORLD_SIZE > 1 else dist.HashStore()  # the timeout is long, as some ranks may sample longer
    dist.init_process_group(backend, store=store, rank=RANK, world_size=WORLD_SIZE, timeout=timedelta(hours=2))
    return device


def check_args(args):
    """Exit if sizes do not fit together."""
    if args.prompts_per_step % args.minibatch_size:
        raise SystemExit(f"--minibatch-size must divide the {args.prompts_per_step} completions of a step")
    if args.minibatch_size % WORLD_SIZE:
        raise SystemExit(f"--minibatch-size must be a multiple of the {WORLD_SIZE} ranks")


def load_rows(args, tokenizer):
    """Load training rows, and held-out rows of the test split, or of the training split if there is none."""
    path, _, rest = args.dataset.partition(":")
    config, _, split = rest.partition(":")
    if Path(path).is_file():
        splits = load_dataset(Path(path).suffix[1:].replace("jsonl", "json"), data_files=path)
    else:
        splits = load_dataset(path, config or None)
    train = split or "train"
    test = train.replace("train", "test")  # train_sft -> test_sft
    if test not in splits:
        test = train
    held_out = splits[test].shuffle(seed=0)  # the same for every --seed
    limit = len(held_out) // 5 if test == train else len(held_out)
    eval_rows = read_rows(held_out.select(range(min(args.eval_prompts, limit))), args, tokenizer)
    eval_prompts = [row["prompt_ids"] for row in eval_rows]
    train_rows = [row for row in read_rows(splits[train], args, tokenizer) if row["prompt_ids"] not in eval_prompts]
    if RANK == 0:
        times = args.num_steps * args.prompts_per_step / max(1, len(train_rows))
        print(f"{len(train_rows)} of {len(splits[train])} training rows: {times:.1f} passes; {len(eval_rows)} held out")
        print(f"the first prompt: {tokenizer.decode(train_rows[0]['prompt_ids'])!r}")
        print(f"its answer: {train_rows[0]['answer']!r}")
    return train_rows, eval_rows


def read_rows(rows, args, tokenizer):
    """Return rows with prompt, answer and prompt_ids; drop those without prompt or answer, or with a long prompt."""
    columns = rows.column_names
    prompt_column = next((name for name in ("prompt", "question", "problem") if name in columns), None)
    answer_column = next((name for name in ("answer", "solution", "ground_truth") if name in columns), None)
    if prompt_column is None:
        raise SystemExit(f"{args.dataset} has none of the columns prompt, question and problem, but {columns}")
    kept = []
    for row in inner_bar(rows, "rows"):
        prompt = row[prompt_column]
        answer = row.get(answer_column)
        if not prompt or (answer is None and answer_column):
            continue
        messages = prompt
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        if args.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": args.system_prompt}, *messages]
        if tokenizer.chat_template:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        else:
            ids = tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
        if len(ids) <= args.max_prompt_length:
            kept.append({**row, "prompt": prompt, "answer": answer, "prompt_ids": ids})
    return kept


def load_policy(args, tokenizer, device):
    """Load a Policy with float32 weights, set up its precision, and share it out among the ranks."""
    model = load_model(args, tokenizer, torch.float32)
    model.get_input_embeddings().padding_idx = None  # a padding token may occur in prompts: train it, too
    return prepare(Policy(model, args.precision), args, device)


def load_model(args, tokenizer, dtype):
    """Load a language model, with dropout off, and put the ids of all its stop tokens into its generation config."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    if model.num_parameters() < 10_000_000:
        torch.set_num_threads(1)  # on a CPU, more threads would mostly wait for each other
    stop_ids = model.generation_config.eos_token_id
    if not isinstance(stop_ids, list):
        stop_ids = [stop_ids]
    stop_ids = {*stop_ids, tokenizer.eos_token_id, find_turn_end(tokenizer)} - {None}
    model.generation_config = GenerationConfig(eos_token_id=sorted(stop_ids))
    return model


def find_turn_end(tokenizer):
    """Find the special token that ends a turn in the chat template; base models may have another as their eos token."""
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"}]
        tail = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("Answer")[2]
        for token in tokenizer.encode(tail, add_special_tokens=False):
            if token in tokenizer.added_tokens_decoder:
                return token
    return None


def prepare(policy, args, device):
    """Set up precision and gradient checkpointing, and share weights out among the ranks, or offload them."""
    if args.precision == "bfloat16":
        torch.set_float32_matmul_precision("medium")  # of the head: TF32 on GPUs, bfloat16 on CPUs
        add_rounding_noise(policy, device)
    else:  # on a GPU, grouped-query attention in float32 would keep L x L numbers per head: repeat the keys instead
        sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    names = policy.model._no_split_modules  # of the classes of transformer blocks
    blocks = [module for module in policy.modules() if type(module).__name__ in names]
    if args.gradient_checkpointing:  # transformers' own works only in training mode, with dropout
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if WORLD_SIZE == 1 and not args.cpu_offload:
        return policy.to(device)
    mp_policy = MixedPrecisionPolicy(getattr(torch, args.precision), torch.float32, cast_forward_inputs=False)
    shard = partial(fully_shard, reshard_after_forward=True)
    if args.cpu_offload:
        shard = partial(shard, offload_policy=CPUOffloadPolicy())
    for block in blocks:
        shard(block, mp_policy=mp_policy)
    return shard(policy)  # embedding and head, in float32


@torch.no_grad()
def add_rounding_noise(policy, device):
    """Give float32 weights noise in the lower 16 bits, which products in bfloat16 round away again.

    All of 0.9981 to 1.0038 rounds to 1: from exactly 1, a step of 0.0001 never changes the rounded weight.
    """
    torch.manual_seed(0)  # the same noise on every rank, in the policy and in the reference
    for weight in policy.parameters():
        rounded = weight.to(device).bfloat16().float()  # one weight at a time fits, and a GPU draws faster
        bits = rounded.view(torch.int32)
        noise = torch.randint_like(bits, -32767, 32768) * (rounded != 0)
        weight.copy_((bits + noise).view(torch.float32))


class Policy(nn.Module):
    """A language model whose forward returns log-probabilities: FSDP gathers weights, also the head's, only in it."""

    def __init__(self, model, precision):
        super().__init__()
        self.model = model
        self.bfloat16 = precision == "bfloat16"
        # Of Gemma. If a family changes its logits in another way, policy/sampler_kl ends the run.
        self.cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def forward(self, ids, mask, temperature):
        """ids, mask (B, L), padded on the right -> logprobs, entropies (B, L) in nats, 0 outside the mask."""
        # A causal model does not see padding on the right, so it needs no attention mask.
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.bfloat16):
            hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # (B, L, D)
        # The output at place t predicts token t + 1. N tokens are in the mask, none of them at place 0.
        mask = mask.bool()
        hidden = hidden[:, :-1][mask[:, 1:]].float()  # (N, D)
        targets = ids[mask]  # (N,)
        # All logits (N, V) might not fit: compute them in chunks, and again in the backward pass.
        chunk_size = LOGITS_AT_ONCE // self.model.get_output_embeddings().weight.shape[0]
        chunks = zip(hidden.split(chunk_size), targets.split(chunk_size))
        results = [checkpoint(head_logprobs, self, *chunk, temperature, use_reentrant=False) for chunk in chunks]
        zeros = hidden.new_zeros(mask.shape)  # (B, L)
        return [zeros.masked_scatter(mask, torch.cat(parts)) for parts in zip(*results)]


def head_logprobs(policy, hidden, targets, temperature):
    """Return log-probabilities of targets (N,), and entropies, under softmax(logits / temperature); hidden (N, D)."""
    logits = policy.model.get_output_embeddings()(hidden)  # (N, V)
    if policy.cap:
        logits = policy.cap * (logits / policy.cap).tanh()
    logits /= temperature
    logprobs = logits.log_softmax(-1)
    with torch.no_grad():  # entropies are only logged
        entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), entropies


def load_sampler(args, tokenizer, device):
    """Load the model that samples, in the precision that it computes with."""
    return load_model(args, tokenizer, getattr(torch, args.precision)).to(device)


def load_scorer(args, tokenizer, device):
    """Load the reward model with float32 weights as a Scorer, and prepare it; the value model starts as it, too."""
    vocabulary = AutoTokenizer.from_pretrained(args.reward_model).get_vocab()
    if not tokenizer.get_vocab().items() <= vocabulary.items():
        raise SystemExit(f"--reward-model {args.reward_model}: its tokenizer is not that of {args.model}")
    model = AutoModelForSequenceClassification.from_pretrained(args.reward_model, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None  # as in load_policy
    return prepare(Scorer(model, args.precision), args, device)


class Scorer(nn.Module):
    """A model with a scalar head, the reward model or the value model, whose forward returns normalised scores."""

    def __init__(self, model, precision):
        super().__init__()
        self.model = model
        self.bfloat16 = precision == "bfloat16"
        self.register_buffer("mean", torch.tensor(0.0))  # of scores; normalise_scores sets both
        self.register_buffer("std", torch.tensor(1.0))

    def forward(self, ids):
        """ids (B, L), padded on the right -> scores (B, L), at each place that of the tokens up to it."""
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.bfloat16):
            hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # (B, L, D)
        scores = self.model.score(hidden.float()).squeeze(2)  # (B, L)
        return (scores - self.mean) / self.std


class PolicyAndValue(nn.Module):
    """Both trained models, for open_run and save: state/ has both, and the Hugging Face folder has the policy."""

    def __init__(self, policy, value_model):
        super().__init__()
        self.policy = policy
        self.value_model = value_model

    @property
    def model(self):
        return self.policy.model


def open_run(args, device):
    """Choose args.run_dir if it is empty, make it, with args.json and a copy of this file, and start W&B."""
    started = max_over_ranks(int(time.time()))  # the same on all ranks
    args.run_dir = args.resume or args.run_dir or f"runs/{Path(sys.argv[0]).stem}__{args.seed}__{started}"
    if RANK == 0:
        run_dir = Path(args.run_dir)
        run_dir.mkdir(parents=True, exist_ok=bool(args.resume))
        (run_dir / "args.json").write_text(json.dumps(vars(args), indent=2))
        shutil.copy(__file__, run_dir)  # the code that made the run
        print(f"{run_dir}: {args.model}, {args.precision}, {WORLD_SIZE} x {device}")
        if args.track:
            import wandb

            id_file = run_dir / "wandb_id"  # two folders may have the same name, but not the same id
            if not id_file.exists():
                id_file.write_text(os.urandom(8).hex())
            wandb.init(id=id_file.read_text(), name=run_dir.name, resume="allow", config=vars(args))


def max_over_ranks(number):
    """Return the largest of all ranks' integers."""
    number = torch.tensor(number)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()


def load_state(args, policy, optimizer):
    """Load the newest state in the run's folder, and cut the logs to its step; return this step, 0 in a new run."""
    run_dir = Path(args.run_dir)
    saves = sorted(run_dir.glob("checkpoint-??????"))
    last_step = 0
    if saves:
        weights, moments = dcp_state.get_state_dict(policy, optimizer)  # dcp.load fills them in place
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # a weight that never had a gradient has no moments
        dcp.load({"policy": weights, "optimizer": moments}, checkpoint_id=saves[-1] / "state", planner=planner)
        dcp_state.set_state_dict(policy, optimizer, model_state_dict=weights, optim_state_dict=moments)
        last_step = int(saves[-1].name.removeprefix("checkpoint-"))
    if RANK == 0:
        for log in run_dir.glob("*.jsonl"):
            lines = [line for line in log.read_text().splitlines(True) if line.endswith("\n")]  # a kill cuts one
            log.write_text("".join(line for line in lines if saves and json.loads(line)["step"] <= last_step))
    return last_step


def pick_rows(rows, start, count, seed):
    """Return rows start to start + count of an endless series: all rows shuffled, all shuffled anew, and so on."""
    picked = []
    for place in range(start, start + count):
        epoch, offset = divmod(place, len(rows))
        if offset == 0 or not picked:
            generator = torch.Generator().manual_seed(hash((seed, epoch)))
            order = torch.randperm(len(rows), generator=generator).tolist()
        picked.append(rows[order[offset]])
    return picked


def sample_completions(sampler, tokenizer, rows, temperature, args):
    """Sample one completion per row; return a batch (see above main) and texts. Adjacent equal prompts are faster."""
    stop_ids = sampler.generation_config.eos_token_id
    completions = []
    for start in range(0, len(rows), args.rollout_batch_size):
        prompts = [row["prompt_ids"] for row in rows[start : start + args.rollout_batch_size]]
        completions += generate(sampler, prompts, args.max_completion_length, temperature, stop_ids)
    length = args.max_prompt_length + args.max_completion_length  # L
    sequences, texts = [], []
    for row, (tokens, logprobs) in zip(rows, completions):
        before = [0] * len(row["prompt_ids"])
        after = [0] * (length - len(before) - len(tokens))
        sequence = {
            "ids": row["prompt_ids"] + tokens + after,
            "completion_mask": before + [1] * len(tokens) + after,
            "sampler_logprobs": before + logprobs + after,
            "total_lengths": len(before) + len(tokens),
            "truncated": tokens[-1] not in stop_ids,
        }
        sequences.append(sequence)
        texts.append(tokenizer.decode([token for token in tokens if token not in stop_ids]))
    batch = {}
    for name in sequences[0]:
        batch[name] = torch.tensor([sequence[name] for sequence in sequences], device=sampler.device)
    return batch, texts


@torch.no_grad()
def generate(model, prompts, max_completion_length, temperature, stop_ids):
    """Sample one completion per prompt, up to and including the first stop id; greedily at temperature 0.

    prompts: B lists of ids -> B pairs of lists (ids, log-probabilities). The model must be in eval mode.
    """
    completions = [([], []) for _ in prompts]
    active = list(range(len(prompts)))  # the A completions that have not ended
    logits, cache, mask = prefill(model, prompts)
    stop_ids = torch.tensor(stop_ids, device=logits.device)
    for t in tqdm(range(max_completion_length), "tokens", leave=False, delay=5):
        tokens, logprobs = sample_tokens(logits, temperature)
        for i, token, logprob in zip(active, tokens.tolist(), logprobs.tolist()):
            completions[i][0].append(token)
            completions[i][1].append(logprob)
        going = torch.isin(tokens, stop_ids, invert=True).nonzero().squeeze(1)
        if len(going) == 0 or t == max_completion_length - 1:
            break
        if len(going) < len(active):  # the others leave the batch
            active = [active[i] for i in going.tolist()]
            tokens = tokens[going]
            mask = mask[going]
            cache.reorder_cache(going)
        mask = nn.functional.pad(mask, (0, 1), value=1)  # (A, P + t + 1)
        positions = mask.sum(1, keepdim=True) - 1
        output = model(tokens.unsqueeze(1), attention_mask=mask, position_ids=positions, past_key_values=cache)
        logits = output.logits[:, -1]  # (A, V)
    return completions


def prefill(model, prompts):
    """Run prompts, equal neighbours once; return logits of their next tokens (B, V), a cache, and its mask (B, P)."""
    ids = [torch.tensor(prompt) for prompt in prompts]
    ids = pad_sequence(ids, batch_first=True, padding_value=-1, padding_side="left").to(model.device)  # (B, P)
    ids, copies = ids.unique_consecutive(dim=0, return_inverse=True)  # (U, P), and (B,): each prompt's row in U
    mask = (ids >= 0).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output = model(ids * mask, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    cache = output.past_key_values
    cache.reorder_cache(copies)  # it selects rows, so it can also repeat them
    return output.logits[copies, -1], cache, mask[copies]


def sample_tokens(logits, temperature):
    """Sample ids (A,) from softmax(logits / temperature), greedily at 0; return them and their log-probabilities."""
    if temperature == 0:
        return logits.argmax(-1), torch.zeros_like(logits[:, 0])
    probabilities = (logits.float() / temperature).softmax(-1)  # (A, V)
    # First draw one of V / 128 blocks, padded with 0, and then a place in it: on a CPU this is much faster.
    blocks = nn.functional.pad(probabilities, (0, -probabilities.shape[1] % 128)).unflatten(1, (-1, 128))
    block = torch.multinomial(blocks.sum(-1), 1)  # (A, 1)
    place = torch.multinomial(blocks.take_along_dim(block.unsqueeze(2), 1).squeeze(1), 1)  # (A, 1), in the block
    tokens = 128 * block + place
    return tokens.squeeze(1), probabilities.gather(1, tokens).squeeze(1).log()


@torch.no_grad()
def compute_scores(scorer, batch, args):
    """Return a Scorer's scores (B, L) at all places of a batch, without gradient."""
    scores = torch.zeros_like(batch["sampler_logprobs"])
    rows = torch.arange(len(scores), device=scores.device)
    for microbatch in inner_bar(microbatches(batch | {"row": rows}, rows, args.microbatch_tokens), "scores"):
        values = scorer(microbatch["ids"])
        scores[microbatch["row"], : values.shape[1]] = values  # a filler repeats the first place of completion 0
    return scores


def microbatches(batch, indices, max_tokens):
    """Split completions, longest first, into parts of at most max_tokens with padding, but at least one completion."""
    parts = []
    lengths = batch["total_lengths"]
    rest = indices[lengths[indices].argsort(descending=True, stable=True)]
    while len(rest) > 0:
        length = lengths[rest[0]].item()
        size = max(1, max_tokens // length)
        parts.append(select(batch, rest[:size], length))
        rest = rest[size:]
    # FSDP needs equally many passes on all ranks: fill up with the first token of a prompt, which is not in the mask.
    num_parts = max_over_ranks(len(parts))
    while len(parts) < num_parts:
        parts.append(select(batch, torch.tensor([0]), 1))
    return parts


def select(batch, indices, length):
    """Return these rows of a batch, with (B, L) tensors cut to this length."""
    part = {}
    for name, values in batch.items():
        part[name] = values[indices]
        if values.dim() > 1:
            part[name] = part[name][:, :length]
    return part


def log_step(args, step, metrics):
    """Log the metrics of a step, and print those of an evaluation."""
    if RANK == 0:
        metrics = {"step": step} | metrics
        with Path(args.run_dir, "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        shown = [f"{name} {value:.3f}" for name, value in metrics.items() if name.startswith("eval/")]
        if shown:
            tqdm.write(f"step {step}: {', '.join(shown)}")
        if args.track:
            import wandb

            wandb.log(metrics)


def evaluate(sampler, reward_model, tokenizer, rows, args):
    """Return the mean score and, with answers, the accuracy of greedy completions; nothing if no rows are held out."""
    if not rows:
        return {}
    rows = rows[RANK::WORLD_SIZE] or rows[:1]  # all ranks must reduce the same metrics
    batch, texts = sample_completions(sampler, tokenizer, rows, 0.0, args)
    scores = score_rollout(reward_model, batch, texts, rows, args)
    metrics = {"eval/score": (scores.sum(), len(rows))}
    metrics["eval/truncated"] = (batch["truncated"].sum(), len(rows))
    if rows[0]["answer"] is not None:
        correct = [is_correct(text, row["answer"]) for text, row in zip(texts, rows)]
        metrics["eval/accuracy"] = (sum(correct), len(rows))
    return mean_metrics([metrics])


def parse_answer(text):
    """Return a number as a Fraction with its unit or "", and any other answer as a text without formatting, with ""."""
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf|mbox) ?\{([^{}]*)\}", r" \1 ", text)  # 5\text{cm} -> 5 cm
    text = re.sub(r",\\!|\\!,|\{,\}|\\,(?=\d{3})", ",", text)  # 1{,}234 -> 1,234
    text = re.sub(r"\\(?:(?:left|right|boxed)\b|[!,;:() $]|(?=%))|\$|\.\s*$", " ", text)  # \(5\). -> 5, 5\% -> 5 %
    text = re.sub(r"\\[dt]?frac(?:\{(\d+)\}|(\d))(?:\{(\d+)\}|(\d))", r" \1\2/\3\4 ", text)  # 3\frac12 -> 3 1/2
    text = " ".join(text.split()).strip("{}* ")  # it may cut a text, but in the same way on both sides
    match = re.fullmatch(f"({VALUE})(?: ({UNIT}))?", text)
    if match:
        return Fraction(re.sub("[, ]", "", match[1])), match[2] or ""  # 1,234.50 cm -> 1234.5, cm
    return re.sub(r" ?([^\w\s]) ?", r"\1", text), ""  # ( 1, 2 ) -> (1,2)


def extract_answer(text):
    r"""Return the final answer of a text: its last \boxed{}, else the rest of the line after ####, else None."""
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return None  # the thought was cut off
    answer = None
    while "\\boxed{" in text:
        text = text.partition("\\boxed{")[2]
        answer = read_braces(text)
        if answer is None:
            return None  # the box was cut off
        text = text[len(answer) :]
    if answer is None and "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0]
    return answer


def read_braces(text):
    """Return a text up to the brace that closes one that is open before it; None if no brace does."""
    depth = 1
    for place, letter in enumerate(text):
        if letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
        if depth == 0:
            return text[:place]


def mean_metrics(collected):
    """Add each metric's (sum, count) over microbatches and ranks, and divide. All ranks have the same names."""
    totals = {}
    for metrics in collected:
        for name, pair in metrics.items():
            totals[name] = totals.get(name, 0) + torch.tensor(pair, dtype=torch.float64)
    sums = torch.stack(list(totals.values()))
    dist.all_reduce(sums)
    return {name: total / count for name, (total, count) in zip(totals, sums.tolist()) if count > 0}


@torch.no_grad()
def copy_weights(policy, sampler):
    """Give the sampler the weights of the policy, all of them on every rank."""
    for weight, copy in zip(policy.parameters(), sampler.parameters(), strict=True):
        if isinstance(weight, DTensor):
            weight = weight.to(copy.device, copy.dtype).full_tensor()
        copy.copy_(weight)


@torch.no_grad()
def compute_logprobs(policy, batch, minibatches, args):
    """Return log-probabilities (B, L) in the update's microbatches: others would round to ratios other than 1."""
    logprobs = torch.zeros_like(batch["sampler_logprobs"])
    for indices in minibatches:
        for microbatch in inner_bar(microbatches(batch, indices, args.microbatch_tokens), "log-probabilities"):
            values, _ = policy(microbatch["ids"], microbatch["completion_mask"], args.temperature)
            logprobs[microbatch["row"], : values.shape[1]] = values
    return logprobs


def step_optimizer(policy, optimizer, learning_rate, max_grad_norm):
    """Clip the gradients and make an optimizer step, unless they are 0 or not finite; return their norm."""
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm or torch.inf)  # 0 is no limit
    if isinstance(grad_norm, DTensor):
        grad_norm = grad_norm.full_tensor()
    optimizer.param_groups[0]["lr"] = learning_rate
    if grad_norm.isfinite() and grad_norm > 0:  # without a gradient AdamW would continue in its last direction
        optimizer.step()
    elif RANK == 0:
        tqdm.write(f"skipped an optimizer step, because the gradient norm was {grad_norm}")
    optimizer.zero_grad()
    return grad_norm.item()


def log_group(args, step, row, texts, scores):
    """Log a group of completions; in step 1 and every --eval-every steps, print their ends, too."""
    if RANK == 0:
        line = {"step": step, "prompt": row["prompt"], "answer": row["answer"], "completions": texts, "rewards": scores}
        with Path(args.run_dir, "samples.jsonl").open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")  # an answer may be a date
        if step == 1 or step % args.eval_every == 0:
            tqdm.write(f"step {step}: prompt {row['prompt']!r}, answer {row['answer']!r}, rewards and completions:")
            for text, score in zip(texts, scores):
                tqdm.write(f"{score}  {text[-160:]!r}")


def save(args, policy, optimizer, tokenizer, step):
    """Write checkpoint-STEP/, a Hugging Face model, with state/, which --resume loads; then remove older states."""
    unfinished = Path(args.run_dir, "unfinished")
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(policy.model, options=options)  # only on rank 0
    if RANK == 0:
        for name in policy.model.all_tied_weights_keys:  # second names, such as that of a head that is the embedding
            weights.pop(name, None)
        policy.model.save_pretrained(unfinished, state_dict=weights)
        tokenizer.save_pretrained(unfinished)
    weights, moments = dcp_state.get_state_dict(policy, optimizer)
    dcp.save({"policy": weights, "optimizer": moments}, checkpoint_id=unfinished / "state")
    if RANK == 0:
        older_states = list(Path(args.run_dir).glob("checkpoint-??????/state"))
        unfinished.rename(f"{args.run_dir}/checkpoint-{step:06d}")  # the last thing to do: a killed save does not count
        for folder in older_states:
            shutil.rmtree(folder)
        tqdm.write(f"saved {args.run_dir}/checkpoint-{step:06d}")


if __name__ == "__main__":
    main(parse_args())
