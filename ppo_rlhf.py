"""PPO for RLHF: Proximal Policy Optimization against a reward model, with a KL penalty per token.

Schulman et al., "Proximal Policy Optimization Algorithms" (2017) https://arxiv.org/abs/1707.06347v2, equation 7;
Ouyang et al., "Training language models to follow instructions with human feedback" (2022)
https://arxiv.org/abs/2203.02155v1, equation 2; and the details of Huang et al., "The N+ Implementation Details of RLHF
with PPO" (2024) https://arxiv.org/abs/2403.17031v1.

    J(θ) = E Σₜ min(rₜ Aₜ, clip(rₜ, 1 − ε, 1 + ε) Aₜ)
    Rₜ = −β log π_old(oₜ)/π_ref(oₜ) + [t is the last token] (score − missing-stop penalty)
    Aₜ = Σₖ (γλ)ᵏ δₜ₊ₖ,   δₜ = Rₜ + γ V(sₜ₊₁) − V(sₜ),   V = 0 after the last token

    oₜ, sₜ    the t-th token of a completion, and the prompt with all tokens before it
    rₜ        π_θ(oₜ) / π_old(oₜ), π_old being the policy that sampled the completions
    score     the reward model's, normalised to mean 0 and deviation 1 on samples of the initial model
    V         the value model, which starts as a copy of the reward model and learns Aₜ + V_old(sₜ)
    ε, β, γ, λ   --clip-eps, --kl-coef, --gamma, --gae-lambda

Compared with grpo.py
- An advantage per token from a learned value model, in place of one per completion from its group: one completion a
  prompt, and four models in memory (policy, value model, reference, reward model).
- The score is learned. eval/accuracy and reward/mean are by reward_fn, which training does not see: where the score
  rises and they fall, the reward model is being fooled.
- The KL penalty is in the reward (k1, no gradient through it); the loss is a mean over tokens.

Departures from the papers
- No entropy bonus and no pretraining loss (PPO-ptx); no weight of the value loss, which has a model, a learning rate
  and a gradient norm of its own.
- Learning rates stay constant after the warm-up; those of Huang et al. fall to 0.
- The score belongs to the last token of a completion; the code of Huang et al. puts it one position later.
- A completion without stop token loses a penalty from its score; Huang et al. set its score to -1.

    python ppo_rlhf.py
    python ppo_rlhf.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset Anthropic/hh-rlhf --reward-model runs/.../checkpoint
"""

import copy
import json
import math
import os
import re
import resource
import secrets
import shutil
import signal
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from fractions import Fraction
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
import tyro
import wandb
from datasets import disable_progress_bars, get_dataset_config_names, load_dataset
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)


def by_model(embedded, real):
    """The default of a setting that depends on the model; resolve_args fills it in."""
    return field(default=None, metadata={"embedded": embedded, "real": real})


@dataclass
class Args:
    """PPO of a language model against a reward model."""

    # model and data
    model: str | None = None
    """folder or hub name of a causal language model (default: the embedded models/tiny)"""
    dataset: str | None = None
    """json, jsonl, csv or parquet file, folder, or hub name as in openai/gsm8k:main (default: data/addition)"""
    reward_model: str | None = by_model(str(Path(__file__).resolve().parent / "models" / "tiny-reward"), "")
    """folder or hub name, or none to train on reward_fn (embedded: models/tiny-reward; real: must be given)"""
    system_prompt: str = ""
    """system message put before every prompt that has none; as the reward model was trained"""
    max_prompt_length: int | None = by_model(32, 512)
    """tokens; longer prompts are dropped and counted (embedded: 32; real: 512)"""

    # rollout
    num_steps: int | None = by_model(30, 200)
    """rollouts; with --resume, the new total (embedded: 30; real: 200)"""
    prompts_per_step: int | None = by_model(128, 256)
    """prompts per rollout, over all ranks (embedded: 128; real: 256)"""
    max_completion_length: int | None = by_model(48, 1024)
    """tokens, the stop token included (embedded: 48; real: 1024)"""
    temperature: float = 1.0
    """sampling temperature; log-probabilities are those of this temperature too"""
    rollout_batch_size: int = 0
    """most completions decoded at once per rank (0: all)"""

    # optimization
    learning_rate: float | None = by_model(1e-4, 3e-6)
    """of the policy's AdamW (embedded: 1e-4; real: 3e-6, as Huang et al.)"""
    value_learning_rate: float | None = by_model(3e-4, 3e-6)
    """of the value model's AdamW (embedded: 3e-4; real: 3e-6, as Huang et al.)"""
    warmup_steps: int | None = by_model(8, 10)
    """optimizer steps over which the learning rate rises from 0 (embedded: 8; real: 10)"""
    minibatch_size: int | None = by_model(64, 64)
    """completions per optimizer step, over all ranks (embedded: 64; real: 64)"""
    microbatch_tokens: int | None = by_model(1024, 16384)
    """most padded tokens per forward and backward pass; changes speed and memory only (embedded: 1024; real: 16384)"""
    update_epochs: int | None = by_model(2, 4)
    """passes over each rollout (embedded: 2; real: 4, as Huang et al.)"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to at most this norm"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, about a third more time"""

    # evaluation, saving, logging
    eval_every: int | None = by_model(20, 20)
    """steps between evaluations on held-out prompts (embedded: 20; real: 20)"""
    eval_prompts: int | None = by_model(512, 256)
    """held-out prompts per evaluation (embedded: 512; real: 256)"""
    save_every: int | None = by_model(20, 20)
    """steps between saves (embedded: 20; real: 20)"""
    run_dir: str | None = None
    """new folder of this run (default: runs/SCRIPT__SEED__TIME)"""
    resume: str | None = None
    """folder of the run to continue, with its own settings; only --num-steps may be given besides"""
    seed: int = 1
    """of sampling and of the order of prompts"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline works)"""
    wandb_project: str = "rl-for-language-models"
    """Weights & Biases project"""

    # the algorithm
    clip_eps: float = 0.2
    """epsilon (0.2 in both papers)"""
    value_clip_eps: float = 0.2
    """how far a value may move from the old one before its gradient stops (0.2 in Huang et al.)"""
    kl_coef: float = 0.05
    """beta, the price of a nat of KL (0.05 in Huang et al.); 0 loads no reference model"""
    gamma: float = 1.0
    """discount (1: none)"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation (0.95 in Huang et al.)"""
    missing_stop_penalty: float = 1.0
    """taken off the score of a completion that was cut off before a stop token"""


def reward_fn(completion, answer):
    """Return 1.0 if the completion's final answer equals the answer (plain, or as in GSM8K after ####), else 0.0.

    Edit this function, or assign another one to the module, to train on a reward of your own.
    """
    given, gold = extract_answer(completion), parse_answer(extract_answer(answer) or answer)
    return float(given is not None and gold is not None and parse_answer(given) == gold)


def score_batch(reward_model, batch, policy, args):
    """Normalised scores (B,) of a rollout, or its rewards without a reward model; less the missing-stop penalty."""
    scores = batch["rewards"]
    if reward_model is not None:
        [scores] = look_up(reward_model, batch, args.microbatch_tokens)
        scores = (scores - policy.score_mean) / policy.score_std
    return scores - args.missing_stop_penalty * batch["truncated"].to(scores.dtype)


def token_rewards(scores, old_logprobs, ref_logprobs, completion_mask, kl_coef):
    """Eq. 2 of Ouyang et al. per token: the score at the last token, less kl_coef log(π_old / π_ref) at each.

    scores (B,), all else (B, T); ref_logprobs may be None where kl_coef is 0 -> (B, T), 0 where masked.
    """
    mask = completion_mask.bool()
    positions = torch.arange(mask.shape[1], device=mask.device)
    is_last = mask & (positions == (mask * positions).amax(1, keepdim=True))  # (B, T)
    rewards = torch.where(is_last, scores.unsqueeze(1), 0.0)
    if ref_logprobs is not None:
        rewards = rewards - kl_coef * torch.where(mask, old_logprobs - ref_logprobs, 0.0)
    return rewards


def compute_advantages(rewards, values, completion_mask, gamma, gae_lambda):
    """Generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438, eq. 16) and returns, its value targets.

    All (B, T), completions padded on the right; the value after the last token is 0 -> advantages, returns (B, T).
    """
    mask = completion_mask.bool()
    rewards, values = torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)
    advantages, next_value, next_advantage = [], torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]  # (B,)
        next_advantage = delta + gamma * gae_lambda * next_advantage
        next_value = values[:, t]
        advantages.append(next_advantage)
    advantages = torch.where(mask, torch.stack(advantages[::-1], 1), 0.0)
    return advantages, advantages + values


def whiten(x, mask):
    """Shift and scale x (B, T) to mean 0, variance 1 (ddof 1) over the positions of mask on all ranks; 0 elsewhere."""
    mask = mask.bool()
    x = torch.where(mask, x, 0.0)
    total, count = all_reduce([x.double().sum().item(), mask.sum().item()])
    centred = torch.where(mask, x - total / max(1, count), 0.0)
    variance = all_reduce(centred.double().square().sum().item()) / max(1, count - 1)
    return centred / math.sqrt(variance + 1e-8)


def policy_loss(logprobs, old_logprobs, advantages, completion_mask, clip_eps):
    """Eq. 7 of Schulman et al. to be minimised, summed over tokens; divide by their number.

    All (B, T). Metrics are sums over tokens.
    """
    mask = completion_mask.bool()
    # Masked first: whatever stands there, inf and nan included, must not reach the gradient.
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()  # (B, T)
    clipped_ratio = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    token_loss = -torch.min(ratio * advantages, clipped_ratio * advantages)  # (B, T)
    loss = torch.where(mask, token_loss, 0.0).sum()
    metrics = {
        "loss/policy": loss.detach(),
        "policy/approx_kl": (ratio - log_ratio - 1).sum().detach(),
        "policy/clip_fraction_low": (mask & (ratio < 1 - clip_eps) & (advantages < 0)).sum(),
        "policy/clip_fraction_high": (mask & (ratio > 1 + clip_eps) & (advantages > 0)).sum(),
        "policy/ratio_max": torch.where(mask, ratio, 0.0).max().detach(),
    }
    return loss, metrics


def value_loss(values, old_values, returns, completion_mask, value_clip_eps):
    """Half the squared error, or that of the value clipped around the old one if it is larger, summed over tokens.

    All (B, T); divide by the number of tokens. Metrics are sums over tokens.
    """
    mask = completion_mask.bool()
    error = torch.where(mask, values - returns, 0.0)
    clipped_values = torch.maximum(torch.minimum(values, old_values + value_clip_eps), old_values - value_clip_eps)
    clipped_error = torch.where(mask, clipped_values - returns, 0.0)
    loss = 0.5 * torch.maximum(error.square(), clipped_error.square()).sum()
    metrics = {
        "loss/value": loss.detach(),
        "value/clip_fraction": (mask & (clipped_error.square() > error.square())).sum(),
    }
    return loss, metrics


def accumulate_gradients(policy, batch, rows, divisor, on_policy, args):
    """Add the gradients of both losses over these rows of every rank, divided by divisor; return summed metrics."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    totals = {}
    for part in microbatches(batch, rows, args.microbatch_tokens):
        logprobs, entropies, values = policy(
            part["prompt_ids"], part["prompt_mask"], part["completion_ids"], part["completion_mask"], args.temperature
        )
        loss, metrics = policy_loss(
            logprobs,
            logprobs.detach() if on_policy else part["old_logprobs"],
            part["advantages"],
            part["completion_mask"],
            args.clip_eps,
        )
        error, value_metrics = value_loss(
            values, part["old_values"], part["returns"], part["completion_mask"], args.value_clip_eps
        )
        loss = loss + error  # no coefficient: the two models share no parameter
        metrics |= value_metrics
        if "ref_logprobs" in part:  # to be watched: the penalty is in the rewards
            ref_log_ratio = torch.where(part["completion_mask"].bool(), part["ref_logprobs"] - logprobs, 0.0)
            metrics["policy/ref_kl"] = (ref_log_ratio.exp() - ref_log_ratio - 1).sum().detach()
        (loss * (world_size / divisor)).backward()  # times world_size: FSDP averages gradients over ranks
        metrics["policy/entropy"] = entropies.sum().detach()
        metrics["num_tokens"] = part["completion_mask"].sum()
        add_metrics(totals, metrics)
    return totals


def main(args):
    rank, world_size, device = init_ranks()
    args = resolve_args(args)
    check_args(args, world_size)
    for name, value in (("gamma", args.gamma), ("gae-lambda", args.gae_lambda)):
        if value > 1:
            raise SystemExit(f"--{name} {value}: must be at most 1")
    if not args.reward_model:
        raise SystemExit(
            f"--reward-model is missing: make one with python reward_model.py --model {args.model} --dataset PAIRS and "
            "give its checkpoint folder, or --reward-model none to train on reward_fn"
        )
    model, tokenizer = load_model(args.model, device)
    train_prompts, eval_prompts, report = load_prompts(
        args.dataset, tokenizer, args.system_prompt, args.max_prompt_length, args.eval_prompts
    )
    stop_ids = find_stop_ids(model, tokenizer)
    check_model(model, train_prompts[0]["prompt_ids"], args.max_prompt_length + args.max_completion_length)
    # The value model starts as the reward model or, where there is none, as the policy with a new head.
    torch.manual_seed(args.seed)
    value_model, scorer_tokenizer = load_reward_model(
        args.model if args.reward_model == "none" else args.reward_model, device
    )
    check_reward_model(value_model, scorer_tokenizer, tokenizer, args)
    if args.gradient_checkpointing:
        for trained in (model, value_model):
            trained.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sampler = make_sampler(model, device)
    ref = shard(LogprobModel(copy.deepcopy(model)).requires_grad_(False), device) if args.kl_coef else None
    reward_model = None
    if args.reward_model != "none":
        reward_model = shard(ScoreModel(copy.deepcopy(value_model)).requires_grad_(False), device)
    policy = shard(ActorCritic(model, value_model).train(), device)
    groups = [{"params": list(trained.parameters())} for trained in (policy.model, policy.value_model)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0, fused=True)
    last_step = open_run(args, policy, optimizer, tokenizer, report)
    if reward_model is not None:
        policy.score_mean, policy.score_std = load_normalization(
            last_step, reward_model, sampler, tokenizer, train_prompts, stop_ids, args, rank, world_size
        )
    stop_signals = catch_signals()
    progress = tqdm(
        total=args.num_steps, initial=max(0, last_step), desc=Path(__file__).stem, unit="step", disable=rank > 0
    )
    minibatches_per_epoch = args.prompts_per_step // args.minibatch_size
    sync_sampler(policy, sampler)

    for step in range(last_step + 1, args.num_steps + 1):  # step 0 only evaluates
        torch.manual_seed((args.seed * 1_000_003 + step) * 1_000_003 + rank)
        metrics, samples, clock = {}, None, {"start": time.perf_counter()}
        if step > 0:
            # rollout: sample a completion of each prompt
            prompts = pick_rows(train_prompts, (step - 1) * args.prompts_per_step, args.prompts_per_step, args.seed)
            prompts = prompts[rank::world_size]
            batch, texts = rollout(sampler, tokenizer, prompts, 1, args.temperature, stop_ids, args)
            mask = batch["completion_mask"]
            clock["rollout"] = time.perf_counter()

            # scores, values and log-probabilities before the update; from them rewards and advantages of every token
            batch["scores"] = score_batch(reward_model, batch, policy, args)
            old_logprobs, _, old_values = look_up(policy, batch, args.microbatch_tokens, args.temperature)
            batch |= {"old_logprobs": old_logprobs, "old_values": old_values}
            if ref is not None:
                batch["ref_logprobs"], _ = look_up(ref, batch, args.microbatch_tokens, args.temperature)
            rewards = token_rewards(batch["scores"], old_logprobs, batch.get("ref_logprobs"), mask, args.kl_coef)
            advantages, returns = compute_advantages(rewards, old_values, mask, args.gamma, args.gae_lambda)
            batch |= {"advantages": whiten(advantages, mask), "returns": returns}
            clock["logprob"] = time.perf_counter()

            # update: one optimizer step per minibatch
            orders = [torch.randperm(len(texts), device=device) for _ in range(args.update_epochs)]
            minibatches = [rows for order in orders for rows in order.tensor_split(minibatches_per_epoch)]
            totals, divisors, grad_norms = {}, [], []
            for update, rows in enumerate(minibatches):
                divisors.append(all_reduce(mask[rows].sum()))  # a mean over tokens
                optimizer.zero_grad()
                add_metrics(totals, accumulate_gradients(policy, batch, rows, divisors[-1], update == 0, args))
                optimizer_step = (step - 1) * len(minibatches) + update + 1
                warmup = min(1.0, optimizer_step / max(1, args.warmup_steps))
                learning_rates = args.learning_rate * warmup, args.value_learning_rate * warmup
                grad_norms.append(step_optimizer(optimizer, learning_rates, args.max_grad_norm))
                check_finite(step, grad_norms[-1], args.run_dir)
            sync_sampler(policy, sampler)
            clock["update"] = time.perf_counter()

            # metrics of the whole step over all ranks, and its first samples
            metrics = step_metrics(totals | rollout_metrics(batch), sum(divisors), clock)
            metrics["value/explained_variance"] = explained_variance(returns, old_values, mask)
            policy_norms, value_norms = zip(*grad_norms)
            metrics["optim/grad_norm"] = sum(policy_norms) / len(grad_norms)
            metrics["optim/value_grad_norm"] = sum(value_norms) / len(grad_norms)
            metrics["optim/learning_rate"], metrics["optim/value_learning_rate"] = learning_rates
            samples = first_samples(prompts, texts, batch["rewards"], batch["scores"])

        # evaluation, logs, saving
        if eval_prompts and (step % args.eval_every == 0 or step == args.num_steps):
            metrics |= evaluate(
                sampler, policy, reward_model, tokenizer, eval_prompts, stop_ids, args, rank, world_size
            )
        if rank == 0:
            log_step(args, step, metrics, samples, progress)
        stopping = all_reduce(len(stop_signals)) > 0
        if step > 0 and (stopping or step == args.num_steps or step % args.save_every == 0):
            save(args.run_dir, policy, optimizer, tokenizer, step)
        if stopping:
            break

    progress.close()
    wandb.finish()
    if rank == 0:
        print_summary(args)


# ---- below: plumbing, byte-identical in every script that has it, in the order in which main calls it

HERE = Path(__file__).resolve().parent
MODEL, DATASET = str(HERE / "models" / "tiny"), str(HERE / "data" / "addition")
DEFAULTS = {field.name: tuple(field.metadata.values()) for field in fields(Args) if field.metadata}
EVAL_SAMPLES = 4  # completions per held-out prompt, for pass@1, pass@2 and pass@4
NORM_SAMPLES = 512  # completions of the initial model on which scores are normalised


def init_ranks():
    """Join the processes that torchrun started, if it did; return rank, world size and device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=2))
    return (dist.get_rank(), dist.get_world_size(), device) if dist.is_initialized() else (0, 1, device)


def resolve_args(args):
    """Return the settings of the run to resume, else args with the defaults of its model filled in."""
    names = [field.name for field in fields(Args)]
    if args.resume:
        changed = [f.name for f in fields(Args) if getattr(args, f.name) != f.default]
        changed = [name for name in changed if name not in ("resume", "num_steps")]
        path = Path(args.resume) / "args.json"
        if changed:
            flags = ", ".join("--" + name.replace("_", "-") for name in changed)
            raise SystemExit(f"--resume takes its settings from {path}: drop {flags}; only --num-steps may be given")
        if not path.is_file():
            raise SystemExit(f"--resume {args.resume}: not the folder of a run, it has no args.json")
        saved = json.loads(path.read_text())
        if sorted(saved) != sorted(names):
            raise SystemExit(f"--resume {args.resume}: a run of another script or version")
        num_steps = saved["num_steps"] if args.num_steps is None else args.num_steps
        return Args(**{**saved, "resume": args.resume, "run_dir": args.resume, "num_steps": num_steps})
    values = {name: getattr(args, name) for name in names}
    for name, defaults in DEFAULTS.items():
        values[name] = defaults[not is_embedded(args.model)] if values[name] is None else values[name]
    values |= {"model": args.model or MODEL, "dataset": args.dataset or DATASET}
    run_dir = [args.run_dir or f"runs/{Path(__file__).stem}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"]
    if dist.is_initialized():
        dist.broadcast_object_list(run_dir)  # the clocks of ranks differ
    return Args(**{**values, "run_dir": run_dir[0]})


def is_embedded(model):
    """Is this models/tiny, or what one of these scripts made of it?"""
    config = Path(model or HERE / "models" / "tiny") / "config.json"
    return model is None or (config.is_file() and json.loads(config.read_text()).get("vocab_size", math.inf) < 100)


def check_args(args, world_size):
    """Exit with one line if the settings cannot work."""
    at_least_1 = ("prompts_per_step", "group_size", "max_prompt_length", "max_completion_length", "minibatch_size")
    at_least_1 += ("microbatch_tokens", "update_epochs", "max_rounds", "eval_every", "save_every")
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')} {value}"
        if (name in ("temperature", "max_grad_norm") or name.endswith("learning_rate")) and not 0 < value < math.inf:
            raise SystemExit(f"{flag}: must be positive")
        if type(value) in (int, float) and value < (name in at_least_1) and name != "seed":
            raise SystemExit(f"{flag}: must be at least {int(name in at_least_1)}")
        if name in ("prompts_per_step", "minibatch_size") and value % world_size:
            raise SystemExit(f"{flag} does not divide over {world_size} ranks")
    sizes = {name: getattr(args, name) for name in ("prompts_per_step", "group_size") if hasattr(args, name)}
    if sizes and math.prod(sizes.values()) % getattr(args, "minibatch_size", 1):
        product = " times ".join(f"--{name.replace('_', '-')} {size}" for name, size in sizes.items())
        raise SystemExit(f"{product} is not a multiple of --minibatch-size {args.minibatch_size}")
    if not args.resume and Path(args.run_dir).exists():
        raise SystemExit(f"--run-dir {args.run_dir} exists: choose another, or go on with --resume {args.run_dir}")


def load_model(name, device):
    """Load a causal language model with float32 parameters and without dropout, and its tokenizer."""
    transformers.logging.disable_progress_bar()
    if not Path(name).exists() and (name.count("/") > 1 or name.startswith(("/", "."))):
        raise SystemExit(f"--model {name}: there is no such folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        config = AutoConfig.from_pretrained(name)
        for part in (config, config.get_text_config()):
            for key, value in vars(part).items():
                if "drop" in key and isinstance(value, float):
                    setattr(part, key, 0.0)
        # The checkpoint's own dtype is mostly bfloat16, in which a learning rate of 1e-6 moves one weight in fifty.
        model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"--model {name}: cannot be loaded: {' '.join(str(error).split())[:300]}") from None
    return model.to(device), tokenizer


def load_prompts(dataset, tokenizer, system_prompt, max_prompt_length, num_held_out):
    """Return training and held-out prompts, lists of {prompt, answer, prompt_ids}, and a report of what was dropped.

    The prompts of preference pairs will do, and a dataset without answers has "" for each.
    """
    loaded, report = [], []
    for split, rows in zip(("training", "held-out"), load_splits(dataset, num_held_out)):
        prompt_column = next((c for c in ("prompt", "question", "problem") if c in rows.column_names), None)
        answer_column = next((c for c in ("answer", "solution", "ground_truth") if c in rows.column_names), None)
        if prompt_column is None and not {"chosen", "rejected"} <= set(rows.column_names):
            raise SystemExit(
                f"--dataset {dataset}: needs a column prompt, question or problem, or the columns chosen and rejected; "
                f"found {', '.join(rows.column_names)}"
            )
        prompts, num_empty, num_long = [], 0, 0
        for row in rows:
            prompt = row[prompt_column] if prompt_column else split_pair(row, tokenizer.chat_template is not None)[0]
            answer = row[answer_column] if answer_column else ""
            answer = "" if answer is None else str(answer)
            if not prompt or (answer_column and parse_answer(extract_answer(answer) or answer) is None):
                num_empty += 1
                continue
            prompt_ids = encode_prompt(tokenizer, prompt, system_prompt)
            if len(prompt_ids) > max_prompt_length:
                num_long += 1
                continue
            prompts.append({"prompt": prompt, "answer": answer, "prompt_ids": prompt_ids})
        report.append(
            f"{len(prompts)} {split} prompts{'' if answer_column else ' without answers'}; dropped: {num_long} longer "
            f"than {max_prompt_length} tokens, {num_empty} without prompt or answer"
        )
        if not prompts and (split == "training" or num_held_out):
            raise SystemExit(f"--dataset {dataset}: {report[-1]}")
        loaded.append(prompts)
    return *loaded, "\n".join(report)


def load_splits(dataset, num_held_out):
    """Return (training rows, held-out rows): the test or validation split, else the last num_held_out rows."""
    disable_progress_bars()
    kinds = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
    path = Path(dataset)
    name, _, config = (dataset, "", "") if path.exists() else dataset.partition(":")
    try:
        if path.is_file():
            splits = load_dataset(kinds.get(path.suffix, "json"), data_files=dataset)
        else:
            configs = get_dataset_config_names(name)
            usual = configs if len(configs) == 1 else [c for c in ("main", "default") if c in configs]
            config = config or (usual[0] if usual else "")
            if config not in configs:
                raise ValueError(f"choose one of its configs, as in {name}:{configs[0]}; it has {', '.join(configs)}")
            splits = load_dataset(name, config)
    except Exception as error:  # whatever the dirt of a file or the hub brings up, the user needs the one line
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise SystemExit(f"--dataset {dataset}: cannot be loaded: {reason}") from None
    train = splits.get("train", [])
    held_out = next((splits[split] for split in ("test", "validation") if split in splits), None)
    if held_out is None and len(train) > num_held_out:
        held_out = train.select(list(range(len(train) - num_held_out, len(train))))
        train = train.select(range(len(train) - num_held_out))
    if held_out is None or len(train) == 0:
        raise SystemExit(
            f"--dataset {dataset}: {len(train)} training rows, and splits {', '.join(splits)}: too few, with "
            f"--eval-prompts {num_held_out} to hold out where there is no test split"
        )
    return train, held_out.select(range(min(num_held_out, len(held_out))))


def split_pair(row, has_template):
    """Return (prompt, chosen, rejected) of a row, the prompt a string or a list of chat messages, None if not shared.

    chosen and rejected are completions of the row's prompt, as strings or lists of messages; or whole conversations,
    as lists; or whole dialogues, as strings in the form of Anthropic's HH.
    """
    prompt, chosen, rejected = row.get("prompt"), row["chosen"] or "", row["rejected"] or ""
    if isinstance(chosen, list) or isinstance(rejected, list):
        before = prompt if isinstance(prompt, list) else []
        # What is not a whole conversation goes on from the prompt.
        whole = [list(m) if m and m[: len(before)] == before else [*before, *m] for m in (chosen, rejected)]
        if before or any(len(messages) > 1 for messages in whole):
            prompt = whole[0][:-1] if whole[0][:-1] == whole[1][:-1] else None
        return prompt, *(m[-1]["content"] or "" if m and m[-1]["role"] == "assistant" else "" for m in whole)
    if prompt is None:
        end = os.path.commonprefix([chosen, rejected]).rfind("\n\nAssistant:") + len("\n\nAssistant:")
        if end < len("\n\nAssistant:"):
            return None, chosen, rejected
        prompt, chosen, rejected = chosen[:end], chosen[end:], rejected[end:]
        if has_template:
            turns = re.split(r"\n\n(Human|Assistant):", prompt)[1:-2]  # speaker, text, speaker, text, ...
            roles = {"Human": "user", "Assistant": "assistant"}
            prompt = [{"role": roles[who], "content": what.strip()} for who, what in zip(turns[::2], turns[1::2])]
            chosen, rejected = chosen.strip(), rejected.strip()
    return prompt if isinstance(prompt, list) or prompt.strip() else None, chosen, rejected


def parse_answer(text):
    """Return an integer, decimal or simple fraction as an exact Fraction, anything else as a normalised string.

    Signs, currency signs and thousands separators are understood; None if nothing is left.
    """
    text = text.strip().removeprefix("**").removesuffix("**").strip()
    if len(text) > 1000:
        return text
    for written, meant in (("\u2212", "-"), ("\\!,", ","), ("\\$", "$"), ("\\%", "%")):
        text = text.replace(written, meant)
    text = text.removesuffix(".").strip()
    while text[:1] + text[-1:] in ("{}", "$$") and not re.search("[{}$]", text[1:-1]):
        text = text[1:-1].strip()
    flat = re.sub(r"^([+-]? ?)\\frac ?\{([+-]?[0-9]+)\} ?\{([+-]?[0-9]+)\}$", r"\1\2/\3", text)
    number = r"((?:[1-9][0-9]{0,2}(?:(?:,|\\,|\{,\})[0-9]{3})+|[0-9]*)(?:\.[0-9]+)?)"
    match = re.fullmatch(rf"(?:[$£€] ?)?([+-]?) ?(?:[$£€] ?)?{number}(?: ?/ ?([+-]?[0-9]+))?", flat)
    if match and re.search("[0-9]", match[2]) and int(match[3] or 1):
        return Fraction(match[1] + re.sub(r"[^0-9.]", "", match[2])) / int(match[3] or 1)
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox) ?\{([^{}\\]*)\}", r"\1", text)
    return re.sub(r" ?([^\w ]) ?", r"\1", " ".join(text.split())) or None


def extract_answer(text):
    """Return the final answer of a text or None: its last \\boxed{}, else what follows its last ####, else <answer>."""
    visible, thinking = [], False
    for part in re.split("(</?think>)", text):
        if part == "</think>":  # without an opening, everything so far was a thought
            visible = visible if thinking else []
        elif part != "<think>" and not thinking:
            visible.append(part)
        thinking = part == "<think>" or (thinking and part != "</think>")
    text = " ".join(visible)
    braces, start, end = re.compile(r"\\.|[{}]", re.DOTALL), 0, 0
    while (opening := text.find("\\boxed{", end)) >= 0:
        depth = 0
        for brace in braces.finditer(text, opening + 6, opening + 2000):
            depth += 1 if brace[0] == "{" else -1 if brace[0] == "}" else 0
            if depth == 0:
                break
        if depth != 0:
            return None  # cut off inside its box, or no answer but an essay
        start, end = opening, brace.end()
    if end > 0:
        sign = "-" if text[start - 1 : start] in ("-", "\u2212") else ""
        return sign + re.sub(r"^ *\\boxed\{([^{}]*)\} *$", r"\1", text[start + 7 : end - 1])
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0]
    opening, closing = text.rfind("<answer>"), text.rfind("</answer>")
    return text[opening + 8 : closing] if 0 <= opening < closing else None


def encode_prompt(tokenizer, prompt, system_prompt):
    """Return the token ids of a prompt (a string or a list of chat messages), up to where the completion begins."""
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if tokenizer.chat_template is None:
        return tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    encoding = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    return encoding["input_ids"]


def find_stop_ids(model, tokenizer):
    """Return every id that ends a completion: the union of generation_config's, config's and the tokenizer's."""
    stop_ids = set()
    configs = (model.generation_config, model.config.get_text_config(), tokenizer)
    for ids in (config.eos_token_id for config in configs):
        stop_ids.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return sorted(stop_ids)


@torch.no_grad()
def check_model(model, prompt_ids, max_length):
    """Exit if the context is too short, the LM head is scaled or capped, or the cache cannot drop rows."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_length
    if max_length > context:
        raise SystemExit(
            f"--max-prompt-length plus --max-completion-length is {max_length}, over the model's context of {context}"
        )
    half = min(8, len(prompt_ids))
    ids = torch.tensor([prompt_ids[:half] * 2], device=model.device)  # (1, 2 half)
    ones = torch.ones_like(ids[:, :half])
    plain = model(ids).logits[0].log_softmax(-1)  # (2 half, V)
    logprobs, _ = token_logprobs(model, ids[:, :half], ones, ids[:, half:], ones, 1.0)
    expected = plain[half - 1 : -1].gather(1, ids[0, half:, None]).squeeze(1)
    if not torch.allclose(logprobs[0], expected, atol=1e-2):
        raise SystemExit("this model scales or caps the output of its LM head, which these scripts do not reproduce")
    try:
        cache = model(ids[:, :half].repeat(2, 1), use_cache=True).past_key_values
        cache.batch_select_indices(torch.tensor([1], device=ids.device))
        cached = model(ids[:, half : half + 1], past_key_values=cache, use_cache=True).logits[0, -1].log_softmax(-1)
        same = torch.allclose(cached, plain[half], atol=1e-2)
    except (AttributeError, NotImplementedError, TypeError, IndexError):
        same = False
    if not same:
        raise SystemExit("the key-value cache of this model cannot drop finished rows, which generate() needs")


def token_logprobs(model, prompt_ids, prompt_mask, completion_ids, completion_mask, temperature):
    """Log-probability of every completion token at the sampling temperature, and the entropy of its distribution.

    prompts (B, P), completions (B, T) -> logprobs, entropies (B, T) in nats, 0 where masked.
    """
    completion_mask = completion_mask.bool()
    ids = torch.cat([prompt_ids, completion_ids], 1)  # (B, P + T)
    mask = torch.cat([prompt_mask.bool(), completion_mask], 1)
    # All padding goes to the right and off the end: a causal model then needs neither attention mask nor position ids.
    order = (~mask).long().argsort(dim=1, stable=True)[:, : mask.sum(1).max()]
    hidden = model.base_model(input_ids=ids.gather(1, order), use_cache=False).last_hidden_state  # (B, W, D)
    rows, columns = completion_mask.nonzero(as_tuple=True)  # (N,)
    # The token at one position is predicted from the position before it.
    positions = mask.sum(1)[rows] - completion_mask.sum(1)[rows] + completion_mask.cumsum(1)[rows, columns] - 2
    logprobs, entropies = head_logprobs(model, hidden[rows, positions], completion_ids[rows, columns], temperature)
    blank = torch.zeros(completion_mask.shape, dtype=logprobs.dtype, device=logprobs.device)
    return blank.masked_scatter(completion_mask, logprobs), blank.masked_scatter(completion_mask, entropies)


def head_logprobs(model, hidden, targets, temperature):
    """Log-probabilities of targets (N,), and entropies, under softmax(head(hidden) / temperature); hidden (N, D).

    Never N x V logits at once: they come in chunks, computed anew in the backward pass.
    """

    def chunk_logprobs(hidden, targets):
        logits = model.get_output_embeddings()(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature  # (n, V)
        logprobs = logits.log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), entropies

    size = max(1, 2 ** (26 if hidden.is_cuda else 24) // model.get_output_embeddings().weight.shape[0])
    chunks = zip(hidden.split(size), targets.split(size))
    if torch.is_grad_enabled():
        results = [checkpoint(chunk_logprobs, *chunk, use_reentrant=False) for chunk in chunks]
    else:
        results = [chunk_logprobs(*chunk) for chunk in chunks]
    logprobs, entropies = zip(*results)
    return torch.cat(logprobs), torch.cat(entropies)


def load_reward_model(name, device):
    """Load a reward model, or a causal language model with a new scalar head, in float32 and without dropout, and its
    tokenizer. Both get a padding id that is no stop token: Hugging Face looks for the last id that is not padding.
    """
    transformers.logging.set_verbosity_error()  # that the head is new is known
    transformers.logging.disable_progress_bar()
    if not Path(name).exists() and (name.count("/") > 1 or name.startswith(("/", "."))):
        raise SystemExit(f"reward model {name}: there is no such folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        config = AutoConfig.from_pretrained(name, num_labels=1)
        for part in (config, config.get_text_config()):
            for key, value in vars(part).items():
                if "drop" in key and isinstance(value, float):
                    setattr(part, key, 0.0)
        model = AutoModelForSequenceClassification.from_pretrained(name, config=config, dtype=torch.float32)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise SystemExit(f"reward model {name}: cannot be loaded: {' '.join(str(error).split())[:300]}") from None
    if not hasattr(model, "score"):
        raise SystemExit(f"reward model {name}: {type(model).__name__} has no scalar head called score")
    if not any("SequenceClassification" in architecture for architecture in config.architectures or ()):
        nn.init.normal_(model.score.weight, std=1 / math.sqrt(model.score.in_features + 1))
    try:
        model.generation_config = GenerationConfig.from_pretrained(name)  # which may name further stop tokens
    except OSError:
        model.generation_config = GenerationConfig()
    stop_ids = find_stop_ids(model, tokenizer)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in stop_ids:
        spare = [
            token for token in tokenizer.all_special_tokens if tokenizer.convert_tokens_to_ids(token) not in stop_ids
        ]
        tokenizer.add_special_tokens({"pad_token": (spare or ["<|pad|>"])[0]})
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer))
    model.config.get_text_config().pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
    return model.to(device), tokenizer


def check_reward_model(reward_model, scorer_tokenizer, tokenizer, args):
    """Exit if the reward model has never been trained as one, or reads other tokens than the policy writes."""
    architectures = reward_model.config.architectures or ()
    if args.reward_model != "none" and not any("SequenceClassification" in name for name in architectures):
        how = f"python reward_model.py --model {args.reward_model} --dataset PAIRS makes a reward model of it"
        raise SystemExit(f"--reward-model {args.reward_model}: a language model that gives no scores; {how}")
    scorer_ids = scorer_tokenizer.get_vocab()
    if any(scorer_ids.get(token) != index for token, index in tokenizer.get_vocab().items()):
        raise SystemExit(f"--reward-model {args.reward_model}: its tokenizer is not that of {args.model}")


def make_sampler(model, device):
    """Return the model that samples: a copy, bfloat16 on CUDA; on one CPU process the trained model itself."""
    if dist.is_initialized() or device.type == "cuda":
        return copy.deepcopy(model).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    return model


def shard(policy, device):
    """Shard parameters, gradients and optimizer state over the ranks (FSDP2), block by block."""
    if dist.is_initialized():
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for module in list(policy.modules()):
            if type(module).__name__ in (policy.model._no_split_modules or ()):
                fully_shard(module, mesh=mesh)
        fully_shard(policy, mesh=mesh)
    return policy


class LogprobModel(nn.Module):
    """The unit that is sharded: its forward returns log-probabilities, so the LM head is gathered with the rest."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args):
        # float32 parameters, bfloat16 compute
        with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
            return token_logprobs(self.model, *args)


class ScoreModel(nn.Module):
    """The unit that is sharded: its forward returns scores, so the scalar head is gathered with the rest."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args):
        return sequence_scores(self.model, *args)


def sequence_scores(model, prompt_ids, prompt_mask, completion_ids, completion_mask):
    """Scores (B,) of completions: the scalar head at the last token of each, which length finds and not its id."""
    hidden, lengths = hidden_states(model, prompt_ids, prompt_mask, completion_ids, completion_mask)
    last = hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]  # (B, D)
    return model.score(last.to(model.score.weight.dtype)).squeeze(1)


def hidden_states(model, prompt_ids, prompt_mask, completion_ids, completion_mask):
    """Last hidden states (B, W, D) of prompts and completions, all padding moved to the right, and lengths (B,)."""
    ids = torch.cat([prompt_ids, completion_ids], 1)  # (B, P + T)
    mask = torch.cat([prompt_mask.bool(), completion_mask.bool()], 1)
    lengths = mask.sum(1)
    # A causal model then needs neither attention mask nor position ids.
    order = (~mask).long().argsort(dim=1, stable=True)[:, : lengths.max()]
    with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
        hidden = model.base_model(input_ids=ids.gather(1, order), use_cache=False).last_hidden_state
    return hidden, lengths


class ActorCritic(nn.Module):
    """Policy and value model, which are trained, saved and sharded together but share no parameter."""

    def __init__(self, model, value_model):
        super().__init__()
        self.model = model
        self.value_model = value_model
        self.score_mean, self.score_std = 0.0, 1.0  # the value model begins as the reward model: values in its units

    def forward(self, *args):
        *inputs, temperature = args
        values = (token_values(self.value_model, *inputs) - self.score_mean) / self.score_std
        with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
            logprobs, entropies = token_logprobs(self.model, *inputs, temperature)
        return logprobs, entropies, torch.where(inputs[3].bool(), values, 0.0)


def token_values(model, prompt_ids, prompt_mask, completion_ids, completion_mask):
    """Value before every completion token: the scalar head where that token is predicted; (B, T), 0 where masked."""
    completion_mask = completion_mask.bool()
    hidden, lengths = hidden_states(model, prompt_ids, prompt_mask, completion_ids, completion_mask)
    rows, columns = completion_mask.nonzero(as_tuple=True)  # (N,)
    positions = lengths[rows] - completion_mask.sum(1)[rows] + completion_mask.cumsum(1)[rows, columns] - 2
    values = model.score(hidden[rows, positions].to(model.score.weight.dtype)).squeeze(1)
    blank = torch.zeros(completion_mask.shape, dtype=values.dtype, device=values.device)
    return blank.masked_scatter(completion_mask, values)


def open_run(args, policy, optimizer, tokenizer, report):
    """Make the run folder, or load the state of the run to resume and drop what was logged after it.

    Returns the last step done, -1 where nothing was saved.
    """
    run_dir = Path(args.run_dir)
    last_step = load_state(run_dir, policy, optimizer) or -1

    def prepare():
        (run_dir / "state").mkdir(parents=True, exist_ok=True)
        write_whole(run_dir / "args.json", json.dumps({**asdict(args), "resume": None}, indent=2) + "\n")
        for path in run_dir.glob("*.jsonl"):
            lines = path.read_text().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]  # the last may be half-written
            write_whole(path, "".join(line for line in whole if json.loads(line)["step"] <= last_step))
        if not (run_dir / "wandb_id").exists():
            write_whole(run_dir / "wandb_id", secrets.token_hex(4))

    on_rank_0(prepare)
    if last_step > 0:
        save_checkpoint(run_dir, policy, tokenizer)  # it may be older than the state
    wandb.init(
        project=args.wandb_project,
        name=run_dir.name,
        id=(run_dir / "wandb_id").read_text(),
        resume="allow",
        dir=run_dir,
        config=asdict(args),
        mode=None if args.track and is_rank_0() else "disabled",
    )
    if is_rank_0():
        millions = sum(parameter.numel() for parameter in policy.parameters()) / 1e6
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        print(f"{report}\n{run_dir}: {millions:.1f} M parameters on {num_ranks} x {policy.model.device.type}")
    return last_step


def load_state(run_dir, policy, optimizer):
    """Load the newest complete state and return its step, or 0 if there is none."""
    steps = sorted(path for path in (run_dir / "state").glob("*") if path.name.isdigit())
    if not steps:
        return 0
    model_state, optimizer_state = dcp_state.get_state_dict(policy, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    with warnings.catch_warnings(action="ignore"):  # that one process loads alone is meant
        dcp.load(state, checkpoint_id=steps[-1], no_dist=not dist.is_initialized())
    dcp_state.set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(steps[-1].name)


def write_whole(path, text):
    """Write a file that a reader finds complete or not at all."""
    path.with_suffix(".unfinished").write_text(text)
    path.with_suffix(".unfinished").replace(path)


def on_rank_0(function, *args):
    """Call function on one rank, while the others wait."""
    if not dist.is_initialized():
        return function(*args)
    dist.barrier()
    if is_rank_0():
        function(*args)
    dist.barrier()


def is_rank_0():
    """Is this the process that writes and prints?"""
    return not dist.is_initialized() or dist.get_rank() == 0


def save_checkpoint(run_dir, policy, tokenizer):
    """Write checkpoint/, a Hugging Face folder with the float32 parameters and the tokenizer."""
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = dcp_state.get_model_state_dict(policy, options=options)
    checkpoint, unfinished = Path(run_dir) / "checkpoint", Path(run_dir) / "checkpoint.unfinished"

    def publish():
        shutil.rmtree(unfinished, ignore_errors=True)
        policy.model.save_pretrained(
            unfinished, state_dict={key.removeprefix("model."): state[key] for key in state if key.startswith("model.")}
        )
        tokenizer.save_pretrained(unfinished)
        shutil.rmtree(checkpoint, ignore_errors=True)
        unfinished.rename(checkpoint)

    on_rank_0(publish)


def load_normalization(last_step, reward_model, sampler, tokenizer, prompts, stop_ids, args, rank, world_size):
    """Mean and standard deviation of the raw scores of samples of the initial model; a resumed run reads its own."""
    path = Path(args.run_dir) / "normalization.json"
    if last_step <= 0:
        torch.manual_seed(args.seed * 1_000_003 + rank)
        picked = pick_rows(prompts, 0, NORM_SAMPLES, args.seed)[rank::world_size]
        batch, _ = rollout(sampler, tokenizer, picked, 1, args.temperature, stop_ids, args)
        [scores] = look_up(reward_model, batch, args.microbatch_tokens)
        total, count = all_reduce([scores.double().sum().item(), len(scores)])
        deviation = (all_reduce((scores.double() - total / count).square().sum().item()) / (count - 1)) ** 0.5
        on_rank_0(write_whole, path, json.dumps({"mean": total / count, "std": max(deviation, 1e-6)}))
    return json.loads(path.read_text()).values()


def pick_rows(rows, start, count, seed):
    """Return places start to start + count of an endless sequence of passes over the rows, each in its own order."""
    picked = []
    for epoch in range(start // len(rows), (start + count - 1) // len(rows) + 1):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
        first = epoch * len(rows)
        picked += [rows[i] for i in order[max(start - first, 0) : start + count - first]]
    return picked


def rollout(model, tokenizer, prompts, num_samples, temperature, stop_ids, args):
    """Sample num_samples completions of each prompt and score them; return tensors (B, ...) and the texts."""
    pad_id = tokenizer.pad_token_id or 0  # any will do: padding is known by the mask
    prompts = [prompt for prompt in prompts for _ in range(num_samples)]
    prompt_ids, prompt_mask = pad_left([prompt["prompt_ids"] for prompt in prompts], pad_id, model.device)
    size = args.rollout_batch_size or len(prompts)
    parts = [
        generate(model, ids, mask, args.max_completion_length, temperature, stop_ids, pad_id)
        for ids, mask in zip(prompt_ids.split(size), prompt_mask.split(size))
    ]
    completion_ids, completion_mask = (torch.cat(part) for part in zip(*parts))
    lengths = completion_mask.sum(1)  # (B,)
    completions = [ids[:length] for ids, length in zip(completion_ids.tolist(), lengths.tolist())]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
    rewards = [reward_fn(text, prompt["answer"]) for text, prompt in zip(texts, prompts)]
    batch = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "lengths": prompt_mask.sum(1) + lengths,
        "rewards": torch.tensor(rewards, device=model.device, dtype=torch.float32),
        "truncated": torch.tensor([ids[-1] not in stop_ids for ids in completions], device=model.device),
    }
    return batch, texts


def pad_left(rows, pad_id, device):
    """Return ids and mask (B, P) of lists of token ids, padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


@torch.no_grad()
def generate(model, prompt_ids, prompt_mask, max_completion_length, temperature, stop_ids, pad_id):
    """Sample a completion of each prompt, up to and including the first stop id.

    prompts (B, P) left-padded -> completion_ids, completion_mask (B, max_completion_length) right-padded.
    """
    was_training = model.training
    model.eval()  # gradient checkpointing would turn the cache off
    stop_ids = torch.tensor(stop_ids, device=prompt_ids.device, dtype=torch.long)
    completion_ids = prompt_ids.new_full((len(prompt_ids), max_completion_length), pad_id)
    completion_mask = torch.zeros_like(completion_ids)
    # Completions of one prompt are adjacent: each prompt is read once.
    both = torch.cat([prompt_ids, prompt_mask.long()], 1)  # (B, 2 P)
    unique, row_of = torch.unique_consecutive(both, dim=0, return_inverse=True)
    ids, mask = unique.chunk(2, 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    cache, logits = output.past_key_values, output.logits[row_of, -1]  # (B, V)
    cache.batch_select_indices(row_of)
    mask, positions = mask[row_of], positions[row_of, -1:]
    rows = torch.arange(len(prompt_ids), device=prompt_ids.device)  # those still being written
    for t in range(max_completion_length):
        tokens = sample_tokens(logits, temperature)
        completion_ids[rows, t] = tokens
        completion_mask[rows, t] = 1
        running = torch.isin(tokens, stop_ids, invert=True).nonzero().squeeze(1)
        if t + 1 == max_completion_length or len(running) == 0:
            break
        if len(running) < len(rows):  # finished rows leave the batch
            rows, tokens, mask, positions = rows[running], tokens[running], mask[running], positions[running]
            cache.batch_select_indices(running)
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        positions = positions + 1
        ids = tokens.unsqueeze(1)
        output = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        logits = output.logits[:, -1]
    model.train(was_training)
    return completion_ids, completion_mask


def sample_tokens(logits, temperature):
    """Draw ids from exactly softmax(logits / temperature), by inverse CDF; temperature 0 is greedy. (B, V) -> (B,)"""
    if temperature == 0:
        return logits.argmax(-1)
    cdf = (logits.float() / temperature).softmax(-1).cumsum(-1)  # (B, V)
    # torch.rand does return 0, and a search from the left would then pick id 0 even at probability 0.
    draw = torch.rand(len(cdf), 1, device=cdf.device) * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, draw, right=True).squeeze(1)
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous()).squeeze(1)  # the last id of non-zero probability
    return torch.minimum(tokens, last)


@torch.no_grad()
def look_up(model, batch, max_tokens, *settings):
    """Run a model over the rollout without gradient, in microbatches; return each of its outputs for all rows."""
    done, outputs = [], []
    for part in microbatches(batch, torch.arange(len(batch["lengths"]), device=batch["lengths"].device), max_tokens):
        inputs = [part[key] for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")]
        results = model(*inputs, *settings)
        results = results if isinstance(results, tuple) else (results,)
        done.append(part["rows"])
        outputs.append([result[: len(part["rows"])] for result in results])
    order = torch.cat(done).argsort()
    return [torch.cat(parts)[order] for parts in zip(*outputs)]


def microbatches(batch, rows, max_tokens):
    """Cut rows of a batch, longest first, into parts of at most max_tokens padded tokens; a longer row stands alone.

    Forward and backward passes are collective, so every rank yields equally many parts: one that has fewer adds parts
    of no rows, where the first row of the batch stands in and its masks are 0.
    """
    parts, longest, lengths = [], 0, batch["lengths"][rows]
    for place in lengths.argsort(descending=True, stable=True).tolist():
        if parts and (len(parts[-1]) + 1) * longest <= max_tokens:
            parts[-1].append(place)
        else:
            parts.append([place])
            longest = int(lengths[place])
    for number in range(int(all_reduce(max(1, len(parts)), dist.ReduceOp.MAX))):
        if number < len(parts):
            index = rows[parts[number]]
            yield {"rows": index} | {key: value[index] for key, value in batch.items()}
        else:
            part = {key: value[:1] for key, value in batch.items()}
            masks = [key for key in part if key.endswith("mask") and key != "prompt_mask"]
            yield part | {key: torch.zeros_like(part[key]) for key in masks} | {"rows": rows[:0]}


def all_reduce(values, op=dist.ReduceOp.SUM):
    """Return a number, or a list of numbers, summed (or otherwise reduced) over ranks, in float64."""
    values = torch.as_tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(values, op)
    return values.tolist()


def catch_signals():
    """Return a list that fills when Ctrl-C or SIGTERM asks to stop after this step; a second time stops at once."""
    received = []

    def request_stop(signum, frame):  # noqa: ARG001
        received.append(signum)
        signal.signal(signum, signal.SIG_DFL)
        os.write(2, b"\nfinishing this step, then saving; once more to stop at once\n")

    signal.signal(signal.SIGINT, request_stop)
    signal.signal(signal.SIGTERM, request_stop)
    return received


@torch.no_grad()
def sync_sampler(policy, sampler):
    """Copy the trained parameters into the model that samples, which is whole on every rank."""
    if sampler is not policy.model:
        for trained, copied in zip(policy.model.parameters(), sampler.parameters(), strict=True):
            copied.copy_(trained.full_tensor() if hasattr(trained, "full_tensor") else trained)


def add_metrics(totals, metrics):
    """Add metrics to totals; where the key ends in _max, keep the larger."""
    for key, value in metrics.items():
        before = totals.get(key, torch.zeros_like(value))
        totals[key] = torch.maximum(before, value) if key.endswith("_max") else before + value


def step_optimizer(optimizer, learning_rates, max_grad_norm):
    """Clip the gradients of policy and value model apart and make a step, or none if they are not finite.

    Returns the two norms before clipping.
    """
    norms = []
    for group, learning_rate in zip(optimizer.param_groups, learning_rates):
        norm = nn.utils.clip_grad_norm_(group["params"], max_grad_norm)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        group["lr"] = learning_rate
    if all(map(math.isfinite, norms)):
        optimizer.step()
    return norms


def check_finite(step, grad_norms, run_dir):
    """Exit if there was no optimizer step to make; what was saved before stands."""
    if not all(map(math.isfinite, grad_norms)):
        raise SystemExit(f"step {step}: gradient norms {grad_norms}; the last good state is in {run_dir}")


def step_metrics(sums, divisor, clock):
    """Means of a whole step over all ranks, and its times.

    sums has what to divide by, too: the numbers of tokens (policy/*, value/*) and completions (reward/*, score/*,
    rollout/*); loss/* is divided by the divisor of the step's losses.
    """
    sums = reduce_metrics(sums)
    num_tokens, num_completions = sums.pop("num_tokens"), sums.pop("num_completions")
    counts = {"policy": num_tokens, "value": num_tokens, "loss": divisor}
    counts |= dict.fromkeys(("reward", "score", "rollout"), num_completions)
    metrics, names, times = {"rollout/completions": int(num_completions)}, list(clock), list(clock.values())
    for key, total in sums.items():
        metrics[key] = total if key.endswith("_max") else total / max(1, counts[key.split("/")[0]])
    for name, before, after in zip(names[1:], times, times[1:]):
        metrics[f"perf/{name}_seconds"] = after - before
    metrics["perf/step_seconds"] = times[-1] - times[0]
    metrics["perf/rollout_tokens_per_second"] = sums["rollout/length_mean"] / (times[1] - times[0])
    metrics["perf/train_tokens_per_second"] = num_tokens / (times[-1] - times[1])
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    metrics["perf/peak_memory_gib"] = (torch.cuda.max_memory_allocated() or peak_bytes) / 2**30
    return metrics


def reduce_metrics(metrics):
    """Return metrics summed over ranks as numbers; where the key ends in _max, the maximum."""
    sums = [key for key in sorted(metrics) if not key.endswith("_max")]
    maxima = [key for key in sorted(metrics) if key.endswith("_max")]
    reduced = dict(zip(sums, all_reduce([float(metrics[key]) for key in sums])))
    return reduced | dict(zip(maxima, all_reduce([float(metrics[key]) for key in maxima], dist.ReduceOp.MAX)))


def rollout_metrics(batch):
    """Sums over the completions of this rank's share of a rollout, and their number."""
    lengths = batch["completion_mask"].sum(1)
    metrics = {
        "num_completions": len(lengths),
        "reward/mean": batch["rewards"].sum(),
        "score/mean": batch["scores"].sum(),
        "rollout/length_mean": lengths.sum(),
        "rollout/length_max": lengths.max(),
        "rollout/truncated": batch["truncated"].sum(),
    }
    if "ref_logprobs" in batch:  # masked positions are 0 in both
        metrics["rollout/ref_kl_sum"] = (batch["old_logprobs"] - batch["ref_logprobs"]).sum()
    return metrics


def explained_variance(returns, values, mask):
    """1 - Var(returns - values) / Var(returns) over the positions of mask on all ranks.

    1 is perfect, 0 no better than a constant.
    """
    variances = []
    for x in (returns - values, returns):
        x = x[mask.bool()].double()
        total, count = all_reduce([x.sum().item(), x.numel()])
        variances.append(all_reduce((x - total / count).square().sum().item()))
    return 1 - variances[0] / max(variances[1], 1e-12)


def first_samples(prompts, texts, rewards, scores):
    """The first three prompts of a rollout, each with its completion, reward and score; samples.jsonl has the first."""
    rows = zip(prompts[:3], texts, rewards.tolist(), scores.tolist())
    return [
        {"prompt": prompt["prompt"], "completions": [text], "rewards": [reward], "scores": [score]}
        for prompt, text, reward, score in rows
    ]


def evaluate(sampler, policy, reward_model, tokenizer, prompts, stop_ids, args, rank, world_size):
    """The score of the greedy completions and, where there are answers, their accuracy by reward_fn, and pass@k.

    pass@k is the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374, eq. 1).
    """
    start = time.perf_counter()
    sums, has_answers = {"eval/score": 0.0}, any(prompt["answer"] for prompt in prompts)
    if has_answers:
        sums |= dict.fromkeys(("eval/accuracy", "eval/pass@1", "eval/pass@2", "eval/pass@4"), 0.0)
    share = prompts[rank::world_size]
    torch.manual_seed(args.seed)
    batch, _ = rollout(sampler, tokenizer, share or prompts[:1], 1, 0.0, stop_ids, args)
    scores = score_batch(reward_model, batch, policy, args)  # a pass of the sharded reward model: every rank makes it
    if share:
        sums["eval/score"] = scores.sum()
    if share and has_answers:
        sums["eval/accuracy"] = (batch["rewards"] == 1).sum()
        batch, _ = rollout(sampler, tokenizer, share, EVAL_SAMPLES, args.temperature, stop_ids, args)
        for correct in (batch["rewards"].view(-1, EVAL_SAMPLES) == 1).sum(1).tolist():
            for k in (1, 2, 4):
                sums[f"eval/pass@{k}"] += 1 - math.comb(EVAL_SAMPLES - correct, k) / math.comb(EVAL_SAMPLES, k)
    means = {key: total / len(prompts) for key, total in reduce_metrics(sums).items()}
    return means | {"perf/eval_seconds": time.perf_counter() - start}


def log_step(args, step, metrics, samples, progress):
    """Append to metrics.jsonl, samples.jsonl and Weights & Biases, and move the bar; now and then print the samples."""
    append_line(Path(args.run_dir) / "metrics.jsonl", {"step": step, **metrics})
    wandb.log(metrics, step=step)
    if samples is None:
        return
    append_line(Path(args.run_dir) / "samples.jsonl", {"step": step, **samples[0]})
    if step == 1 or step % args.eval_every == 0:
        for sample in samples:
            print_group(step, sample["prompt"], sample["completions"], sample["scores"])
    progress.set_postfix(
        score=f"{metrics['score/mean']:.2f}", length=f"{metrics['rollout/length_mean']:.0f}", refresh=False
    )
    progress.update()


def append_line(path, row):
    """Append a row to a jsonl file."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def print_group(step, prompt, texts, rewards):
    """Print a sampled group with its rewards, a line a completion."""
    tqdm.write(f"step {step}: {prompt if isinstance(prompt, str) else prompt[-1]['content']}")
    for text, reward in zip(texts, rewards):
        line = " ".join(text.split())
        tqdm.write(f"  {reward:5.2f}  {line if len(line) <= 160 else line[:100] + ' ... ' + line[-55:]}")


def save(run_dir, policy, optimizer, tokenizer, step):
    """Write state/<step>, which appears complete or not at all, remove older ones, then write checkpoint/."""
    states = Path(run_dir) / "state"
    model_state, optimizer_state = dcp_state.get_state_dict(policy, optimizer)
    state, unfinished = {"model": model_state, "optimizer": optimizer_state}, states / "unfinished"
    on_rank_0(shutil.rmtree, unfinished, True)
    with warnings.catch_warnings(action="ignore"):  # that one process saves alone is meant
        dcp.save(state, checkpoint_id=unfinished, no_dist=not dist.is_initialized())

    def publish():
        unfinished.rename(states / f"{step:08d}")
        for path in states.iterdir():
            if path.name != f"{step:08d}":
                shutil.rmtree(path)

    on_rank_0(publish)
    save_checkpoint(run_dir, policy, tokenizer)


def print_summary(args):
    """Print what improved, how fast, where the checkpoint is and how to go on."""
    lines = [json.loads(line) for line in Path(args.run_dir, "metrics.jsonl").read_text().splitlines()]
    evals = [line for line in lines if "eval/score" in line]
    last_step = lines[-1]["step"]
    seconds = sum(line.get("perf/step_seconds", 0.0) for line in lines)
    completions = sum(line.get("rollout/completions", 0) for line in lines)
    rate = completions / max(seconds, 1e-9)
    print(f"\n{last_step} steps in {seconds:.0f} s: {completions} completions, {rate:.0f} a second")
    names = {"eval/accuracy": "greedy accuracy", "eval/pass@1": "pass@1", "eval/pass@4": "pass@4"}
    for key, name in (names | {"eval/score": "score"}).items():
        if evals and key in evals[-1]:
            before, after = evals[0], evals[-1]
            print(f"{name:16}{before[key]:.3f} (step {before['step']}) -> {after[key]:.3f} (step {after['step']})")
    if last_step > 0:
        print(f"checkpoint      {Path(args.run_dir, 'checkpoint')}, which --model and from_pretrained load")
    more = f" --num-steps {2 * args.num_steps}" if last_step >= args.num_steps else ""
    print(f"to go on        python {Path(__file__).name} --resume {Path(args.run_dir)}{more}")


if __name__ == "__main__":
    main(tyro.cli(Args))
