"""GRPO: Group Relative Policy Optimization, with outcome rewards.

Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models" (2024)
https://arxiv.org/abs/2402.03300v3, equations 3 and 4.

    J(θ) = E_q 1/G Σᵢ 1/|oᵢ| Σₜ wᵢₜ { min(rᵢₜ Aᵢ, clip(rᵢₜ, 1 − ε, 1 + ε) Aᵢ) − β k3ᵢₜ }

    q, oᵢ     prompt, and the i-th of its G completions; |oᵢ| counts its tokens, the stop token included
    π(oᵢₜ)    the probability of the t-th token, given q and the tokens before it
    rᵢₜ       π_θ(oᵢₜ) / π_old(oᵢₜ); π_old is the policy before the step's first update
    Aᵢ        (Rᵢ − mean R) / std R over the group, the same for every token of a completion
    k3ᵢₜ      ρ − log ρ − 1 with ρ = π_ref(oᵢₜ) / π_θ(oᵢₜ); π_ref is the model that training started from
    wᵢₜ       min(π_old(oᵢₜ) / π_sampler(oᵢₜ), --sampler-weight-cap); the sampler has the weights of π_old, but computes
              token by token with a cache, so bfloat16 rounds differently
    ε, β      --clip-eps, --kl-coef

Departures from the paper
- The weight w, which is near 1, is that of Yao et al. (2025), "Your Efficient RL Framework Secretly Brings You
  Off-Policy RL Training".
- By the defaults of Args, a rollout has 512 completions, 8 for each of 64 prompts, and is used for two optimizer steps
  of 256. The paper samples 64 for each of 16 prompts and makes one step, so that its ratio is always 1. Learning rate
  and β are the paper's.
- AdamW's betas are 0.9 and 0.95, and gradients are clipped to norm 1. The paper does not give its own.
- The standard deviation (divisor G − 1) gets 1e-4 added, and equal rewards have advantage 0; the paper says neither.
- The reference stays the initial model; the paper's iterative variant replaces it between iterations.
- The reward is a rule that checks the final answer; the paper trains a reward model.
- With bfloat16, blocks compute with rounded copies of float32 weights. These start with noise below the resolution of
  bfloat16, because small updates would change no copy: ten updates with a learning rate of 1e-6 lower the loss of
  SmolLM2 on 16 rows from 2.84 to 2.82 without the noise, and to 2.46 with it (docs/precision.md).

    python grpo.py
    python grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k:main --group-size 8

The first command runs the settings TINY below, the second those of Args.
"""

import contextlib
import gzip
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
import unicodedata
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Literal

# These must be set before torch is imported. Idle OpenMP threads spin, which slows a busy machine down: let them sleep.
# On a GPU, let pieces of memory grow: batches differ in size, and pieces of fixed sizes would have gaps between them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import pandas
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro
from datasets import Dataset, load_dataset, load_dataset_builder
from pyarrow.parquet import ParquetFile
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.cache_utils import DynamicLayer

HERE = Path(__file__).resolve().parent
RANK = int(os.environ.get("RANK", 0))  # torchrun sets RANK and WORLD_SIZE
WORLD_SIZE = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1


@dataclass
class Args:
    """Train a language model with GRPO, Group Relative Policy Optimization."""

    # the algorithm
    group_size: int = 8
    """completions per prompt, G in the paper"""
    clip_eps: float = 0.2
    """epsilon in eq. 3; the paper does not give its value"""
    kl_coef: float = 0.04
    """beta in eq. 3 (0.04 in section 4.2); with 0 no reference model is loaded"""
    sampler_weight_cap: float = 2.0
    """cap on the weight w of each token, which corrects for rounding differences of sampling and training"""

    # model and data
    model: str = str(HERE / "models/tiny")
    """folder or Hugging Face name of a causal language model"""
    tiny: bool = False
    """use the settings TINY, those of the bundled model, for a checkpoint of it"""
    dataset: str = str(HERE / "data/addition")
    """file, folder or Hugging Face NAME[:CONFIG[:SPLIT]] with the columns prompt (or question, problem) and answer
    (or solution, ground_truth); the columns system and tools are read, too"""
    system_prompt: str = "Reason step by step, and put your final answer within \\boxed{}."
    """system message placed before every prompt that has none"""
    max_prompt_length: int = 512
    """maximum tokens per prompt; longer prompts are dropped"""

    # rollout
    num_steps: int = 200
    """training steps, each of which samples one rollout (0: evaluate only)"""
    prompts_per_step: int = 64
    """prompts per rollout, over all ranks"""
    max_completion_length: int = 1024
    """maximum tokens per completion, including the stop token"""
    temperature: float = 1.0
    """temperature of rollouts and of their log-probabilities"""
    rollout_batch_size: int = 0
    """maximum completions sampled at once on each rank, also in evaluations (0: as many as a step samples)"""

    # optimization
    learning_rate: float = 1e-6
    """learning rate of AdamW; small models need a higher one, such as 1e-5 for 135 M parameters"""
    warmup_steps: int = 0
    """optimizer steps, two per rollout by default, over which the learning rate rises from 0"""
    minibatch_size: int = 256
    """completions per optimizer step, over all ranks; at most those of a rollout"""
    microbatch_tokens: int = 4096
    """maximum tokens per forward pass, including padding"""
    update_epochs: int = 1
    """passes over each rollout"""
    max_grad_norm: float = 1.0
    """larger gradients are scaled down to this norm"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: saves memory, but the update takes about a third longer"""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """precision of the transformer blocks (auto: bfloat16 where the hardware multiplies it, otherwise float32)"""
    lora_rank: int = 0
    """train LoRA adapters of this rank; set --learning-rate 3 to 10 times higher (0: train the whole model)"""

    # evaluation, saving, logging
    eval_every: int = 20
    """steps between evaluations"""
    eval_prompts: int = 256
    """held-out prompts per evaluation (-1: all; of a training split, at most a fifth)"""
    save_every: int = 20
    """steps between saves"""
    run_dir: str = ""
    """new folder for logs and checkpoints (empty: runs/SCRIPT__SEED__TIME)"""
    resume: str = ""
    """folder of a run to continue; its settings become the defaults (loading an untrusted run can execute code)"""
    seed: int = 1
    """seed of sampling and of the order of prompts"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline works)"""


# Without --model, the bundled model is trained with these settings; with --tiny, also a checkpoint of it.
TINY = {"learning_rate": 1.5e-4, "warmup_steps": 8, "num_steps": 40, "prompts_per_step": 16, "minibatch_size": 64}
TINY |= {"system_prompt": "", "max_prompt_length": 32, "max_completion_length": 48, "eval_prompts": 512}
TINY |= {"microbatch_tokens": 1024, "rollout_batch_size": 2048, "precision": "float32"}


# The next three functions are the reward. Edit any of them. Evaluations count is_correct as accuracy.


def is_correct(completion, answer):
    """Return whether the final answer of a completion equals a row's answer."""
    if answer is None:
        raise ValueError("no column answer, solution or ground_truth: rename a column, or write a reward of your own")
    extracted = parse_answer(extract_answer(completion) or "")
    return extracted != "" and extracted == parse_gold(answer)


def reward_fn(completion, answer):
    """Return the reward of one completion. An answer is a text, "148" for a number, or None without such a column."""
    return is_correct(completion, answer) * 0.5 ** (len(completion) / 1000)


def score_completions(completions, rows):
    """Return one reward per completion; each row has the prompt, the answer and the dataset's other columns.

    Edit this function for rewards that need the prompt or many completions at once, such as a judge or a test runner. A
    reward is a number or a dictionary of parts, such as {"right": 1.0, "format": 0.1}: then it is their sum.
    """
    return [reward_fn(completion, row["answer"]) for completion, row in zip(completions, rows)]


def compute_advantages(rewards, group_size):
    """Normalise rewards within each group (section 4.1.2); exactly 0 where all rewards of a group are equal.

    rewards (B,), completions of one prompt adjacent -> advantages (B,).
    """
    groups = rewards.view(-1, group_size)  # (B/G, G)
    centred = groups - groups.mean(1, keepdim=True)
    advantages = centred / (groups.std(1, keepdim=True) + 1e-4)
    # The float32 mean of equal rewards may differ from them by rounding, but main looks for advantages of exactly 0.
    equal = (groups == groups[:, :1]).all(1, keepdim=True)
    return torch.where(equal, 0.0, advantages).view(-1)  # (B,)


def k3(log_ratio):
    """Estimate KL(p || q) from log(q / p) at samples of p (Schulman's k3): unbiased, and never negative."""
    return log_ratio.expm1() - log_ratio  # expm1(x) is exp(x) - 1 without rounding errors near 0


def policy_loss(
    logprobs,
    old_logprobs,
    sampler_logprobs,
    ref_logprobs,
    advantages,
    completion_mask,
    clip_eps,
    kl_coef,
    sampler_weight_cap,
):
    """The negative of eq. 3, summed over completions; the caller divides by their number.

    advantages (B,), all else (B, T); ref_logprobs may be None. Only logprobs get a gradient.
    Metrics are pairs (sum, count), over tokens.
    """
    mask = completion_mask.bool()
    old_logprobs = old_logprobs.detach()
    advantages = advantages.detach().unsqueeze(1)  # (B, 1)
    # Other code may leave inf or nan at masked places: set them to 0 before exp.
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()  # (B, T)
    clipped_ratio = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    token_loss = -torch.min(ratio * advantages, clipped_ratio * advantages)  # (B, T)
    if ref_logprobs is not None:
        # As in the paper, although the expected gradient of k3 is not that of KL(π_θ || π_ref) (arXiv 2506.09477).
        ref_kl = k3(torch.where(mask, ref_logprobs.detach() - logprobs, 0.0))
        token_loss = token_loss + kl_coef * ref_kl
    sampler_log_ratio = torch.where(mask, old_logprobs - sampler_logprobs, 0.0).detach()
    weight = sampler_log_ratio.exp().clamp(max=sampler_weight_cap)  # (B, T)
    token_loss = torch.where(mask, weight * token_loss, 0.0)
    lengths = mask.sum(1).clamp(min=1)  # (B,); a filler of microbatches has no tokens
    loss = (token_loss.sum(1) / lengths).sum()

    num_tokens = mask.sum()
    # At masked places all log-ratios are 0 and ratios 1, so they add nothing to these sums.
    metrics = {
        "policy/approx_kl": (k3(log_ratio.detach()).sum(), num_tokens),  # 0 in a step's first update
        "policy/clip_fraction_low": (((ratio < 1 - clip_eps) & (advantages < 0)).sum(), num_tokens),
        "policy/clip_fraction_high": (((ratio > 1 + clip_eps) & (advantages > 0)).sum(), num_tokens),
        "policy/sampler_kl": (k3(sampler_log_ratio).sum(), num_tokens),
    }
    if ref_logprobs is not None:
        metrics["policy/ref_kl"] = (ref_kl.detach().sum(), num_tokens)
    return loss, metrics


# A batch is a dictionary of tensors with a row for each of B completions: prompt_ids, prompt_mask (B, P);
# completion_ids, completion_mask, sampler_logprobs (B, T); advantages, indices, truncated (B,); with several updates,
# old_logprobs (B, T); with a reference, ref_logprobs (B, T). policy(batch, temperature) returns log-probabilities and
# entropies (B, T).


def accumulate_gradients(policy, batch, indices, divisor, args):
    """Accumulate the gradients of policy_loss / divisor over these completions; return dictionaries of metrics."""
    total_loss = 0.0
    collected = []
    for part in microbatches(batch, indices, args.microbatch_tokens):
        logprobs, entropies = policy(part, args.temperature)
        loss, metrics = policy_loss(
            logprobs,
            part.get("old_logprobs", logprobs),
            part["sampler_logprobs"],
            part.get("ref_logprobs"),
            part["advantages"],
            part["completion_mask"],
            args.clip_eps,
            args.kl_coef,
            args.sampler_weight_cap,
        )
        (loss / divisor).backward()
        total_loss += loss.detach()
        metrics["policy/entropy"] = (entropies.sum(), part["completion_mask"].sum())
        collected.append(metrics)
    collected.append({"loss/policy": (total_loss, divisor)})
    return collected


def main(args):
    device = init_ranks()
    check_args(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train_rows, eval_rows = load_rows(args, tokenizer)
    model = load_model(args.model, tokenizer)
    check_model(model, args)
    show_first_row((train_rows or eval_rows)[0], model, tokenizer)
    if args.lora_rank:
        add_adapters(model, args.lora_rank)
    policy = prepare_model(LogprobModel(model), args, device)
    ref = None
    if args.kl_coef and args.lora_rank:
        ref = partial(without_adapters, policy)  # the policy without its adapters is the initial model
    elif args.kl_coef:
        initial = load_model(args.model, tokenizer).requires_grad_(False)
        ref = prepare_model(LogprobModel(initial), args, device)
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, (0.9, 0.95), weight_decay=0.0, fused=True)
    init_moments(optimizer)
    last_step = open_run(args, policy, optimizer)
    signals = catch_signals()
    rank_minibatch_size = args.minibatch_size // WORLD_SIZE
    if eval_rows and last_step == 0:
        log_step(args, 0, evaluate(policy, tokenizer, eval_rows, args, 0))

    progress = tqdm(range(last_step + 1, args.num_steps + 1), disable=RANK > 0)
    for step in progress:
        # Random numbers depend on the step, so that a resumed run continues as if it had not been interrupted.
        torch.manual_seed(mix_seed(args.seed, step, RANK))
        step_start = time.perf_counter()

        # rollout: sample a group of completions per prompt, score them, and compare each with its group
        first = (step - 1) * args.prompts_per_step
        rows = pick_rows(train_rows, first, args.prompts_per_step, args.seed)[RANK::WORLD_SIZE]
        rows = [row for row in rows for _ in range(args.group_size)]  # a row for each completion
        batch, texts = sample_completions(policy, tokenizer, rows, args.temperature, args)
        scores = score_completions(texts, rows)
        if stop_requested(signals):  # Ctrl-C may have ended programs that the reward runs, so drop this rollout
            save(args.run_dir, policy, optimizer, tokenizer, step - 1)
            break
        rewards, part_means = sum_parts(scores, texts, "reward")
        rewards = torch.tensor(rewards, dtype=torch.float32, device=device)  # (B,)
        batch["advantages"] = compute_advantages(rewards, args.group_size)
        rollout_end = time.perf_counter()

        # shuffled minibatches, and log-probabilities before the update
        minibatches = []
        for _ in range(args.update_epochs):
            minibatches += torch.randperm(len(texts), device=device).split(rank_minibatch_size)
        if ref is None:  # completions of advantage 0 have no gradient: leave them out, also of the update's metrics
            minibatches = [indices[batch["advantages"][indices] != 0] for indices in minibatches]
        first_epoch = minibatches[: len(minibatches) // args.update_epochs]  # has each completion once
        if len(minibatches) > 1:  # with a single update, the policy is π_old itself
            batch["old_logprobs"] = compute_logprobs(policy, batch, first_epoch, args)
        if ref is not None:
            batch["ref_logprobs"] = compute_logprobs(ref, batch, first_epoch, args)

        # update: one optimizer step per minibatch
        collected = [rollout_metrics(batch, rewards, args.group_size), part_means]
        for update, indices in enumerate(minibatches):
            divisor = rank_minibatch_size  # completions, also those left out; FSDP takes the mean over ranks
            collected += accumulate_gradients(policy, batch, indices, divisor, args)
            optimizer_step = (step - 1) * len(minibatches) + update + 1
            learning_rate = args.learning_rate * min(1.0, optimizer_step / max(1, args.warmup_steps))
            grad_norm = step_optimizer(policy, optimizer, learning_rate, args.max_grad_norm)
            collected.append({"optim/grad_norm": (grad_norm, 1)})

        # metrics, evaluation, logs, saving
        metrics = mean_metrics(collected)
        check_sampler(metrics)
        metrics["optim/learning_rate"] = learning_rate
        metrics["perf/rollout_seconds"] = rollout_end - step_start
        metrics["perf/step_seconds"] = time.perf_counter() - step_start
        stopping = stop_requested(signals)
        if eval_rows and not stopping and (step % args.eval_every == 0 or step == args.num_steps):
            evaluation = evaluate(policy, tokenizer, eval_rows, args, step)
            stopping = stop_requested(signals)  # if so, the reward's programs may have been ended, too
            if not stopping:
                metrics |= evaluation
        log_step(args, step, metrics)
        log_group(args, step, rows[0], texts[: args.group_size], scores[: args.group_size])
        progress.set_postfix(reward=metrics["reward/mean"])
        if stopping or step % args.save_every == 0 or step == args.num_steps:
            save(args.run_dir, policy, optimizer, tokenizer, step)
        if stopping:
            break

    end_run(args, signals)


# ---- below: identical copies of what several scripts share, in the order of use

PATHS = ("model", "dataset")  # flags that may name a file or folder
PROMPT_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth")
READ_COLUMNS = (*PROMPT_COLUMNS, *ANSWER_COLUMNS, "system", "tools")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
EVAL_SAMPLES = 4  # completions per held-out prompt, for pass@1 and pass@4
LOGITS_AT_ONCE = 2**27 if torch.cuda.is_available() else 2**25  # of the head: 512 MiB on a GPU, 128 MiB on a CPU
CACHE_BLOCK = 128  # tokens for which a key-value cache makes room at once
LORA_ALPHA = 32  # an adapter's output is multiplied by alpha / rank
LESS_MEMORY = (
    "Out of memory while sampling: lower --rollout-batch-size; while updating: lower --microbatch-tokens, or add "
    "--gradient-checkpointing or --lora-rank 8; python tools/memory.py --script S --model M --gpu-gb G tells what fits"
)
LINEAR_LAYERS = ("Linear", "FalconLinear")  # classes that get adapters; subclasses, such as routers, may do more

# A progress bar within a step, which appears after five seconds.
inner_bar = partial(tqdm, leave=False, delay=5, disable=RANK > 0)


def parse_args():
    """Read the flags. Their defaults are TINY, those of Args or, with --resume, the settings of the run."""
    given, _ = tyro.cli(Args, default=Args(model=""), add_help=False, return_unknown_args=True)
    defaults = {}
    if given.resume:
        file = Path(given.resume, "args.json")
        if not file.exists():
            raise SystemExit(f"--resume {given.resume}: this is not the folder of a run, {file} does not exist")
        settings = json.loads(file.read_text())
        unknown = sorted(settings.keys() - vars(Args()).keys() - {"script"})
        if unknown and RANK == 0:
            print(f"{file}: settings that this version does not have are ignored: {', '.join(unknown)}")
        defaults = {name: value for name, value in settings.items() if name in vars(Args())}
        defaults["run_dir"] = ""  # the same folder again, unless --run-dir names another
    elif given.tiny or not given.model:
        defaults = TINY
    args = tyro.cli(Args, default=Args(**defaults))
    for name in PATHS:  # absolute, because a run may be resumed from another folder
        path = getattr(args, name)
        if path and (Path(path).exists() or Path(path.split(":")[0]).exists()):
            setattr(args, name, os.path.abspath(path))
        elif path.startswith(("/", ".")):
            raise SystemExit(f"--{name} {path}: there is no such file or folder")
    if args.resume:
        current = vars(args) | {"script": Path(sys.argv[0]).name}  # the started file, which may import this one
        # Another dataset or eval_prompts would train on held-out rows, another script or lora_rank would not load.
        for name in ("script", "dataset", "eval_prompts", "lora_rank"):
            if current[name] != settings.get(name, current[name]):
                message = f"{name} must stay {settings[name]}, not {current[name]}"
                raise SystemExit(f"--resume {args.resume}: {message} (if data have moved, edit {file})")
    if args.resume and not args.run_dir and RANK == 0:
        lock_run(args.resume)
    if args.run_dir and Path(args.run_dir).exists():
        raise SystemExit(f"--run-dir {args.run_dir} exists: name a new folder, or give --resume {args.run_dir} alone")
    return args


def lock_run(run_dir):
    """Exit if another process runs this run; let no other run it until this process ends, also if it is killed."""
    file = os.open(f"{run_dir}/args.json", os.O_RDWR)  # never closed, which would unlock it
    try:
        os.lockf(file, os.F_TLOCK, 0)
    except BlockingIOError as error:
        raise SystemExit(f"{run_dir}: another process is still running this run") from error
    except OSError:  # a file system without locks
        pass


def init_ranks():
    """Join the process group of torchrun, or make a group of one; return this rank's device."""
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's has none
        sys.stdout.reconfigure(errors="replace")  # a letter that the terminal lacks must not end a run
    sys.excepthook = explain_error
    device = torch.device("cpu")
    backend = "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timedelta(hours=2))  # ranks may sample for very different times
    elif not dist.is_initialized():  # it is in a notebook, after a run that failed
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def explain_error(kind, error, traceback):
    """Print an error as Python does, and if memory did not suffice, what to do."""
    sys.__excepthook__(kind, error, traceback)
    if issubclass(kind, torch.OutOfMemoryError):
        print(LESS_MEMORY, file=sys.stderr)


def check_args(args):
    """Exit if a setting cannot work, and replace the precision "auto"."""
    for name in ("temperature", "max_grad_norm", "eval_every", "save_every"):
        if getattr(args, name) <= 0:
            raise SystemExit(f"--{name.replace('_', '-')} must be above 0")
    if args.group_size < 2:
        raise SystemExit("--group-size must be at least 2: a group of one has advantage 0")
    size = args.prompts_per_step * args.group_size
    args.minibatch_size = min(args.minibatch_size, size)
    args.rollout_batch_size = args.rollout_batch_size or size // WORLD_SIZE
    if size % args.minibatch_size:
        allowed = f"must divide --prompts-per-step times --group-size, as {size} does"
        raise SystemExit(f"--minibatch-size {args.minibatch_size} {allowed}")
    if args.prompts_per_step % WORLD_SIZE or args.minibatch_size % WORLD_SIZE:
        raise SystemExit(f"--prompts-per-step and --minibatch-size must be multiples of the {WORLD_SIZE} ranks")
    if args.precision == "auto":
        args.precision = "bfloat16" if multiplies_bfloat16() else "float32"


def multiplies_bfloat16():
    """Return whether the GPU, or without one the CPU, multiplies bfloat16 itself."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu.get_capabilities().get("avx512_bf16", False)


def load_rows(args, tokenizer):
    """Load training rows and held-out rows."""
    train_split, held_out_split = load_splits(args.dataset, args.eval_prompts)
    eval_rows = read_rows("held-out", held_out_split, [], args, tokenizer)
    held_out = {tuple(row["prompt_ids"]) for row in eval_rows}
    train_rows = read_rows("training", train_split, held_out, args, tokenizer)
    if args.num_steps > 0 and not train_rows:
        raise SystemExit(f"{args.dataset}: no row is left for training")
    return train_rows, eval_rows


def load_splits(name, num_held_out):
    """Load training rows and rows to hold out, whose prompts are taken out when training rows are read.

    Rows are held out of the split test, else of validation, else of train. For train_sft, these are test_sft and so on.
    """
    path, config, split = name, None, ""
    if not Path(name).exists():  # NAME, NAME:CONFIG or NAME:CONFIG:SPLIT
        path, config, split, *_ = [*name.split(":"), "", ""]
    try:
        if Path(path).is_dir():
            splits = read_folder(os.path.abspath(path), config)
        elif Path(path).exists():
            splits = {"train": read_file(path)}
        else:
            splits = load_dataset(path, config or None)
    except Exception as error:  # datasets wraps the error that says more
        raise SystemExit(f"{name} cannot be read: {error.__cause__ or error}") from error
    train = split or "train"
    candidates = [train.replace("train", kind) for kind in ("test", "validation", "train")]
    candidates = [candidate for candidate in candidates if candidate in splits]
    if not candidates or (split and split not in splits):
        raise SystemExit(f"{name} has only the splits {list(splits)}: name one of them, as in NAME:CONFIG:SPLIT")
    source = candidates[0]
    rows = splits[source]
    limit = len(rows)
    if source == train:
        limit = len(rows) // 5
    if num_held_out < 0 or num_held_out > limit:
        num_held_out = limit
    if RANK == 0:
        unread = [column for column in next(iter(rows), {}) if column not in READ_COLUMNS]
        print(f"{name}: {num_held_out} of {len(rows)} rows of split {source} are held out; unread columns: {unread}")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    held_out = [rows[i] for i in order[:num_held_out].sort().values.tolist()]
    return splits.get(train, []), held_out


def read_folder(folder, config):
    """Read the files of a folder by split, which datasets finds in its README.md or their names."""
    # datasets takes [1] or ? in the name of a folder for a pattern, so it gets links in a folder with a plain name.
    with tempfile.TemporaryDirectory() as place:
        links = shutil.copytree(folder, f"{place}/links", copy_function=os.symlink)
        files = load_dataset_builder(links, config or None, cache_dir=place).config.data_files
        return {str(split): [row for file in files[split] for row in read_file(file)] for split in files}


def read_file(path):
    """Read a file's rows as they stand in it: 007 is no 7, NA is no missing value, and a date stays a text."""
    file_type = Path(path.lower().removesuffix(".gz")).suffix
    if file_type == ".arrow":  # of Dataset.save_to_disk
        return Dataset.from_file(path)
    if file_type in SEPARATORS:
        table = pandas.read_csv(path, sep=SEPARATORS[file_type], dtype=str, keep_default_na=False, index_col=False)
        return table.to_dict("records")
    if file_type == ".parquet":
        return ParquetFile(path).read().to_pylist(maps_as_pydicts="lossy")
    data = Path(path).read_bytes()
    if data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    text = data.decode("utf-8-sig").strip()
    if text.startswith("{"):  # JSON Lines
        text = "[" + text.replace("\n{", "\n,{") + "]"
    rows = json.loads(text)
    columns = dict.fromkeys(column for row in rows for column in row)
    return [columns | row for row in rows]


def read_rows(kind, rows, held_out, args, tokenizer):
    """Read a split's rows, without those whose prompts are held out; print how many were dropped, and why."""
    kept, dropped = [], Counter()
    for number, row in enumerate(rows):
        try:
            row_read, reason = read_row(row, args, tokenizer)
        except Exception as error:
            raise SystemExit(f"{args.dataset}, {kind} row {number}: {error!r}; the row is {row!r:.300}") from error
        if not reason and tuple(row_read["prompt_ids"]) in held_out:
            reason = "held out, or with a held-out prompt"
        if reason:
            dropped[reason] += 1
        else:
            kept.append(row_read)
    if RANK == 0:  # many unknown tokens are a sign of a wrong tokenizer
        unknown = sum(tokenizer.unk_token_id in row["prompt_ids"] for row in kept)
        special = [re.escape(str(token)) for token in tokenizer.added_tokens_decoder.values() if token.special]
        marks = re.compile("|".join(special))
        marked = sum(marks.search(str(row["prompt"])) is not None for row in kept)
        print(f"{len(kept)} {kind} rows, dropped: {dict(dropped)}, prompts with unknown tokens: {unknown}")
        prose = sum(len(str(parse_gold(row["answer"] or "")).split()) > 7 for row in kept)
        print(f"{kind} rows with special tokens in their text: {marked}, with prose as the answer: {prose}")
    return kept


def read_row(row, args, tokenizer):
    """Return the row with its prompt, answer and prompt_ids, and ""; or None, and why the row is dropped."""
    prompt = find_column(row, PROMPT_COLUMNS)
    answer = find_column(row, ANSWER_COLUMNS)
    if not prompt:
        return None, f"without a prompt in one of the columns {', '.join(PROMPT_COLUMNS)}"
    if isinstance(answer, list):
        column = next(name for name in ANSWER_COLUMNS if name in row)
        raise ValueError(f"column {column}: an answer must be a text, not a list")
    if answer is not None and parse_gold(answer) == "":
        return None, "without an answer"
    messages = as_messages(prompt, "user")
    system_prompt = row.get("system") or args.system_prompt
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    continued = messages[-1]["role"] == "assistant"
    prompt_ids = encode_prompt(tokenizer, messages, without_nulls(row.get("tools")), continued)
    if len(prompt_ids) > args.max_prompt_length:
        return None, "with a prompt longer than --max-prompt-length"
    return {**row, "prompt": prompt, "answer": answer, "prompt_ids": prompt_ids}, ""


def find_column(row, names):
    """Return the first of these columns in a row, a text or messages: "" if it is empty, None if there is none."""
    for name in names:
        if name in row:
            value = row[name]
            if value is None or value != value:  # only nan differs from itself
                return ""
            if isinstance(value, bytes):
                value = value.decode()
            if isinstance(value, (str, list)):
                return value
            return json.dumps(value, default=str).strip('"')  # numbers and dates as texts, and true rather than True
    return None


def parse_gold(answer):
    """Parse the answer of a row, which may be a whole solution such as GSM8K's "2 + 2 = 4 #### 4"."""
    return parse_answer(extract_answer(answer) or answer)


# Ways to write an answer, and what they become. parse_answer goes through them twice: **$5$** -> $5$ -> 5. Between, it
# brings letters into Unicode's form NFKC: a wide ２ is a 2, x^² is x^2, and é is one letter.
NOTATIONS = (
    ("\u2212", "-"),  # the minus sign that is not a hyphen
    ("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufe0f\ufeff]", ""),  # marks without width
    ("([¹²³⁰-ⁿ])", r"^\1"),  # 4² is no 42
    ("([₀-₎])", r"_\1"),  # x₂ -> x_₂ -> x_2
    (r"\\([$%])", r"\1"),  # \$ \% -> $ %
    (r"\\[()\[\]]|\$\$", "$"),  # \( \) \[ \] $$ -> $
    (r"^(?:\*\*(.*)\*\*|\$([^$]*)\$|\{([^{}]*)\}|(.*)\.)$", r"\1\2\3\4"),  # **5** $5$ {5} 5. -> 5
    (r"(?<=[0-9])(?:\\!,|,\\!|\\,|\{,\})(?=[0-9])", ","),  # 1{,}000 1\,000 1,\!000 -> 1,000
    (r"^([+-]?) ?[$£€] ?(?!.*\$)", r"\1"),  # -$5 -> -5
    (r"\\[dt]frac", r"\\frac"),  # \dfrac \tfrac -> \frac
    (r"\\frac ?([0-9])", r"\\frac{\1}"),  # \frac12 -> \frac{1}2
    (r"(\\frac\{[^{}]*\}) ?([0-9])", r"\1{\2}"),  # \frac{1}2 -> \frac{1}{2}
    (r"^([+-]?) ?\\frac\{([+-]?[0-9]+)\}\{([+-]?[0-9]+)\}$", r"\1\2/\3"),  # -\frac{1}{2} -> -1/2
    (r"\\(?:text|textbf|mathrm|mbox) ?\{([^{}\\]*)\}", r"\1"),  # \text{red} -> red
)
NUMBER = re.compile(
    r"([+-]?) ?"  # sign
    r"(?=[0-9.])"  # the text does not end here, although each of the next parts may be empty
    r"((?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]*)(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,2})?)"  # 1,234  5  .5  1e-05
    r"(?: ?/ ?([+-]?0*[1-9][0-9]*))?"  # a divisor other than 0
)


def parse_answer(text):
    r"""Return a number as a Fraction, and other texts in a normal form, so that equal answers compare as equal.

    1,234.5  ->  Fraction(2469, 2)      -$3          ->  Fraction(-3)      50\%           ->  50%
    7 / 2    ->  Fraction(7, 2)         \frac{1}{2}  ->  Fraction(1, 2)    \text{(1, 2)}  ->  (1,2)
    """
    if len(text) > 1000:  # no answer is that long, and Python refuses to read numbers of more than 4300 digits
        return text
    text = re.sub(r"\d", lambda digit: str(unicodedata.decimal(digit[0])), text)  # digits of any script
    for _ in range(2):
        for pattern, replacement in NOTATIONS:
            text = re.sub(pattern, replacement, text).strip()
        text = unicodedata.normalize("NFKC", text)
    number = NUMBER.fullmatch(text)
    if number:
        sign, digits, divisor = number.groups()
        return Fraction(sign + digits.replace(",", "")) / int(divisor or 1)
    return re.sub(r" ?([^\w ]) ?", r"\1", " ".join(text.split()))  # ( 1, 2 ) -> (1,2)


def extract_answer(text):
    r"""Return the final answer of a text: its last \boxed{}, else what follows ####, else <answer>, else None.

    If a \boxed is cut off, the answer is not known: None.

    <think>\boxed{1}</think> So \boxed{2}.  ->  2
    -\boxed{\frac{1}{2}}                    ->  -\frac{1}{2}
    It is $\boxed 2$.                       ->  2
    1 + 1 = 2 #### 2                        ->  2
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]  # drop thoughts, also one that was cut off
    answer = None
    while "\\boxed" in text:
        before, _, after = text.partition("\\boxed")
        answer = read_braces(after)
        if answer is None:  # a box that was cut off: the final answer is not known
            return None
        text = after[len(answer) :]
        if before.endswith(("-", "\u2212")):
            answer = "-" + answer
    if answer is not None:
        return answer
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0]
    closed = text.rpartition("</answer>")[0]
    if "<answer>" in closed:
        return closed.rpartition("<answer>")[2]
    return None


def read_braces(text):
    """Return what the braces at the start of a text enclose, {a{b}}c -> a{b}, or its first word; None if cut off."""
    text = text.strip()
    if not text.startswith("{"):
        # Up to a blank, $, }, *, \) or \], without a comma or semicolon at the end.
        return re.match(r"(?:[^\s$}*\\]|\\(?![)\]]))*(?<![,;])", text)[0] or None
    depth = 0
    for place, letter in enumerate(text):
        if letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
        if depth == 0:
            return text[1:place]
    return None


def as_messages(value, role):
    """Return a text as a message of this role, and messages as they are, without nulls."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = without_nulls(value)
    for message in messages:
        if "content" in message and isinstance(message["content"], list):  # parts {"type": "text", "text": "5"}
            message["content"] = "".join(part["text"] for part in message["content"])
    return messages


def without_nulls(value):
    """Take out the nulls with which Arrow gives all dictionaries of a column the same keys."""
    if isinstance(value, dict):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def encode_prompt(tokenizer, messages, tools, continued=False):
    """Return the ids of messages, up to the place where the completion begins; it may continue the last message."""
    if tokenizer.chat_template is not None:
        how = {"add_generation_prompt": not continued, "continue_final_message": continued}
        return tokenizer.apply_chat_template(messages, tools=tools, return_dict=False, **how)
    text = "\n\n".join(message["content"] for message in messages)
    ids = tokenizer(text, split_special_tokens=True)["input_ids"]
    if ids[-1] == tokenizer.eos_token_id:  # some tokenizers add it
        ids.pop()
    return ids


def load_model(name, tokenizer):
    """Load a language model in float32, with dropout off, and put all its stop tokens into its generation config."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, output_loading_info=True)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise SystemExit(f"{name} is no causal language model (an adapter must be merged first): {reason}") from error
    if info["missing_keys"]:
        raise SystemExit(f"{name}: weights are missing, among them {min(info['missing_keys'])}")
    if hasattr(model, "peft_config"):
        raise SystemExit(f"{name} is an adapter: merge it into its model first, with merge_and_unload() of peft")
    if RANK == 0 and type(model).__name__ not in str(model.config.architectures):
        print(f"{name}: its language model, {type(model).__name__}, is trained and saved")
    if model.num_parameters() < 10_000_000:
        torch.set_num_threads(1)  # on a CPU, more threads would mostly wait for each other
    # nn.Embedding gives the row padding_idx no gradient, but the padding token may also be the stop token.
    model.get_input_embeddings().padding_idx = None
    stop_ids = model.generation_config.eos_token_id
    if not isinstance(stop_ids, list):
        stop_ids = [stop_ids]
    stop_ids = {*stop_ids, tokenizer.eos_token_id, find_turn_end(tokenizer)}
    # A new config keeps only the stop tokens: transformers refuses to save some others (a temperature, do_sample off).
    model.generation_config = GenerationConfig(eos_token_id=sorted(stop_ids - {None}))
    return model


def find_turn_end(tokenizer):
    """Find the special token that ends the assistant's turn in the chat template; None if there is no template."""
    if tokenizer.chat_template is not None:
        chat = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"}]
        tail = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("Answer")[2].strip()
        for token in tokenizer(tail, add_special_tokens=False)["input_ids"]:
            if token in tokenizer.added_tokens_decoder:
                return token
    return None


def check_model(model, args):
    """Exit if a prompt and its completion may exceed the model's context."""
    longest = args.max_prompt_length + args.max_completion_length
    context = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)
    if longest > context:
        raise SystemExit(
            f"--max-prompt-length and --max-completion-length add up to {longest} tokens, but the model's context has "
            f"only {context}; a checkpoint of the bundled model needs --tiny"
        )


def show_first_row(row, model, tokenizer):
    """Print a row's prompt as the model reads it, its answer, and what ends a completion."""
    if RANK == 0:
        print(f"the first prompt: {tokenizer.decode(row['prompt_ids'])!r}")
        print(f"its answer: {row['answer']!r}")
        if row["answer"] is not None:
            print(f"a correct completion must give: {parse_gold(row['answer'])}")
        stop_tokens = tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id)
        print(f"tokens that end a completion: {stop_tokens}")


def add_adapters(model, lora_rank):
    """Freeze a model and give each linear layer of its blocks a LoRA adapter (arXiv 2106.09685)."""
    model.requires_grad_(False)
    torch.manual_seed(0)  # the same adapters on every rank
    for block in find_blocks(model):
        for name, layer in list(block.named_modules()):
            if type(layer).__name__ in LINEAR_LAYERS:
                block.set_submodule(name, LoraLinear(layer, lora_rank))
    if not any(isinstance(module, LoraLinear) for module in model.modules()):
        raise SystemExit(f"--lora-rank: the blocks of {type(model).__name__} have none of the layers {LINEAR_LAYERS}")


def find_blocks(model):
    """Find the transformer blocks of a model. Call it before FSDP, which renames their class."""
    names = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in names]


class LoraLinear(nn.Module):
    """A frozen linear layer, whose weights keep their names, and its adapter."""

    alpha = LORA_ALPHA  # of all adapters; without_adapters sets it to 0 for a while, so that they add nothing

    def __init__(self, layer, lora_rank):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_a = nn.Linear(layer.in_features, lora_rank, bias=False)
        self.lora_b = nn.Linear(lora_rank, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)  # the model starts unchanged

    def forward(self, inputs):
        rows = inputs.flatten(0, -2)  # (N, D)
        adapted = self.lora_b(self.lora_a(rows)) * (LoraLinear.alpha / self.lora_a.out_features)
        # addmm adds the adapter's output before the product is rounded (a bias comes later). bfloat16 has 1 and 1.008:
        # 1.002 + 0.003 is 1.008 if it is rounded once, but 1.002 alone is rounded to 1, and 1 + 0.003 to 1 again.
        output = torch.addmm(adapted, rows, self.weight.T)
        if self.bias is not None:
            output = output + self.bias
        return output.unflatten(0, inputs.shape[:-1])


def prepare_model(policy, args, device):
    """Set up bfloat16, gradient checkpointing and FSDP2, where they are needed.

    With bfloat16, trained weights and their accumulated gradients are float32, and frozen weights of blocks bfloat16.
    Blocks compute in bfloat16, all else in float32, but for matrix products (see use_bfloat16).
    """
    blocks = find_blocks(policy.model)
    mp_policy = MixedPrecisionPolicy()
    if args.precision == "bfloat16":
        use_bfloat16(blocks)
        mp_policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    if args.gradient_checkpointing:  # transformers' own works only in training mode, with dropout
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    # On one rank, all that FSDP2 does is to keep float32 weights and to compute with bfloat16 copies of them.
    if args.precision == "bfloat16" or WORLD_SIZE > 1:
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        frozen = set()
        if WORLD_SIZE == 1:  # frozen weights have their final precision, so copies would only take memory
            frozen = {weight for weight in policy.parameters() if not weight.requires_grad}
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=mp_policy, ignored_params=frozen)
        # all else, such as the head; by default, a root would keep its weights gathered after a forward
        fully_shard(policy, mesh=mesh, reshard_after_forward=True, ignored_params=frozen)
    return policy.to(device)


def use_bfloat16(blocks):
    """Let the blocks compute in bfloat16, from float32 weights that small steps can still move."""
    torch.set_float32_matmul_precision("medium")  # float32 products, such as heads: TF32 on GPUs, bfloat16 on CPUs
    torch.manual_seed(0)  # the same noise on every rank
    for block in blocks:
        block.forward = partial(in_bfloat16, block.forward)
        for weight in block.parameters():
            weight.data = weight.data.bfloat16()  # frozen weights stay so
            if weight.requires_grad:
                weight.data = add_rounding_noise(weight.data)


def in_bfloat16(forward, *args, **kwargs):
    """Call a block in bfloat16 on inputs that are float32 outside of it, and return float32."""
    for name, value in kwargs.items():
        if name != "attention_mask":  # its lowest float32 would become -inf, and a row of -inf gives nan
            kwargs[name] = cast(value, torch.bfloat16)
    return cast(forward(*cast(args, torch.bfloat16), **kwargs), torch.float32)


def cast(value, dtype):
    """Cast a floating-point tensor, or those in a tuple."""
    if isinstance(value, tuple):
        return tuple(cast(item, dtype) for item in value)
    if torch.is_tensor(value) and value.is_floating_point():
        return value.to(dtype)
    return value


def add_rounding_noise(rounded):
    """Return bfloat16 numbers as float32, with noise in the lower 16 bits that rounding to bfloat16 takes away again.

    All of 0.9981 to 1.0038 rounds to 1, so a step of 0.0001 would change no bfloat16 copy of a weight that starts at
    exactly 1. Of weights that start at random places in this range, a step takes some over its edge, in proportion to
    the step's size. Most checkpoints hold bfloat16 numbers, which have no lower bits; those of float32 lose theirs.
    """
    # As an int32, the last bit that bfloat16 keeps is 2**16. The noise is less than half of it, also at powers of two.
    noise = torch.randint(-32767, 32768, rounded.shape, dtype=torch.int32) * (rounded != 0)
    return (rounded.float().view(torch.int32) + noise).view(torch.float32)


class LogprobModel(nn.Module):
    """A model whose forward is token_logprobs, because FSDP gathers the weights of a head only in a forward."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch, temperature):
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        return token_logprobs(self.model, *[batch[name] for name in names], temperature)


def token_logprobs(model, prompt_ids, prompt_mask, completion_ids, completion_mask, temperature):
    """Return the log-probabilities of completion tokens, and entropies (without gradient).

    prompts (B, P), completions (B, T) -> logprobs, entropies (B, T) in nats, 0 outside the mask.
    """
    completion_mask = completion_mask.bool()
    ids = torch.cat([prompt_ids, completion_ids], 1)  # (B, P + T)
    mask = torch.cat([prompt_mask.bool(), completion_mask], 1)
    targets = torch.cat([torch.zeros_like(prompt_ids, dtype=torch.bool), completion_mask], 1)  # which tokens these are
    # With all padding moved to the right, a causal model needs neither mask nor position ids.
    ids = pad_sequence([row[kept] for row, kept in zip(ids, mask)], batch_first=True)  # (B, W)
    targets = pad_sequence([row[kept] for row, kept in zip(targets, mask)], batch_first=True)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # (B, W, D)
    # Each token is predicted at the place before its own. Both masks give the N tokens in the same order, row by row.
    hidden = hidden[:, :-1][targets[:, 1:]]  # (N, D)
    flat_logprobs, flat_entropies = head_logprobs(model, hidden, completion_ids[completion_mask], temperature)  # (N,)
    logprobs = flat_logprobs.new_zeros(completion_mask.shape)  # (B, T)
    entropies = torch.zeros_like(logprobs)
    logprobs[completion_mask] = flat_logprobs
    entropies[completion_mask] = flat_entropies
    return logprobs, entropies


def head_logprobs(model, hidden, targets, temperature):
    """Return log-probabilities of targets (N,), and entropies, under softmax(head(hidden) / temperature)."""
    head = model.get_output_embeddings()
    # What some families do to logits. If another is missing here, policy/sampler_kl shows it (see check_sampler).
    config = model.config.get_text_config().to_dict()
    scale = config.get("logit_scale") or 1  # Cohere's
    scale = config.get("lm_head_multiplier", scale)  # Falcon-H1's
    scale = scale / config.get("logits_scaling", 1)  # Granite's
    cap = config.get("final_logit_softcapping")  # Gemma's

    def chunk_logprobs(hidden, targets):
        logits = head(hidden)  # (n, V)
        if scale != 1:
            logits = logits * scale
        if cap:
            logits = (logits / cap).tanh() * cap
        if temperature != 1:
            logits = logits / temperature
        logprobs = logits.log_softmax(-1)
        with torch.no_grad():  # entropies are only logged; an entropy bonus would need their gradient
            entropies = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), entropies

    # All logits (N, V) might not fit: compute them in chunks, and again in the backward pass.
    size = LOGITS_AT_ONCE // head.weight.shape[0]
    if len(hidden) <= size:
        return chunk_logprobs(hidden, targets)
    chunks = zip(hidden.split(size), targets.split(size))
    parts = [checkpoint(chunk_logprobs, *chunk, use_reentrant=False) for chunk in chunks]
    logprobs, entropies = zip(*parts)
    return torch.cat(logprobs), torch.cat(entropies)


def without_adapters(policy, batch, temperature):
    """Compute log-probabilities as the model did before it had adapters."""
    LoraLinear.alpha = 0
    try:
        return policy(batch, temperature)
    finally:
        LoraLinear.alpha = LORA_ALPHA


def init_moments(optimizer):
    """Make AdamW's state, all 0. If there is none, get_state_dict makes it by a step, which AdamW would count."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.requires_grad:
                optimizer.state[weight] = {
                    "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                    "exp_avg": torch.zeros_like(weight),
                    "exp_avg_sq": torch.zeros_like(weight),
                }


def open_run(args, policy, optimizer):
    """Create the run's folder, or load the state of the run to resume; return the last step done."""
    last_step = 0
    if args.resume:
        args.run_dir = args.run_dir or args.resume
        if RANK == 0 and args.run_dir != args.resume:  # a copy goes on, and the old run stays as it is
            shutil.copytree(args.resume, args.run_dir, symlinks=True, ignore=shutil.ignore_patterns("wandb*"))
        dist.barrier()
        last_step = load_state(Path(args.run_dir), policy, optimizer)
    elif not args.run_dir:
        started = int(1e6 * all_reduce(time.time(), dist.ReduceOp.MAX))  # in microseconds, the same on all ranks
        args.run_dir = f"runs/{Path(sys.argv[0]).stem}__{args.seed}__{started}"
    if RANK == 0:
        kind = type(policy.model).__name__
        where = f"{policy.model.device}, CPU threads: {torch.get_num_threads()}, number of ranks: {WORLD_SIZE}"
        print(f"{args.run_dir}: {kind}, {args.precision} on {where}, steps done: {last_step}")
        Path(args.run_dir).mkdir(parents=True, exist_ok=bool(args.resume))
        settings = {"script": Path(sys.argv[0]).name} | vars(args)
        Path(args.run_dir, "args.json").write_text(json.dumps(settings, indent=2))
        lock_run(args.run_dir)
        if args.track:
            track_run(args)
    return last_step


def load_state(run_dir, policy, optimizer):
    """Load the newest state, if there is one, remove later lines from the logs, and return the state's step."""
    step = 0
    folders = sorted(run_dir.glob("state/0*"))  # steps have eight digits; not state/unfinished
    if folders:
        # dcp.load fills tensors in place, so it is given the present state.
        model, moments = dcp_state.get_state_dict(policy, optimizer)
        dcp.load({"model": model, "optimizer": moments}, checkpoint_id=folders[-1])
        dcp_state.set_state_dict(policy, optimizer, model_state_dict=model, optim_state_dict=moments)
        step = int(folders[-1].name)
    elif (run_dir / "checkpoint").exists() and not (run_dir / "state").exists():
        raise SystemExit(f"--resume {run_dir}: state/ is gone; start a new run with --model {run_dir}/checkpoint")
    if RANK == 0:
        for name in ("metrics.jsonl", "samples.jsonl", "eval_samples.jsonl"):
            log = run_dir / name
            if log.exists():
                lines = [line for line in log.read_text().splitlines(True) if line.endswith("\n")]  # whole ones
                # Without a state, the evaluation before training is repeated.
                log.write_text("".join(line for line in lines if step > 0 and json.loads(line)["step"] <= step))
    return step


def all_reduce(values, op=dist.ReduceOp.SUM):
    """Reduce a number, or lists of numbers, over all ranks, in float64."""
    values = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(values, op)
    return values.tolist()


def track_run(args):
    """Start a run of Weights & Biases, or continue that of the run to resume."""
    import wandb  # which takes its time

    file = Path(args.run_dir, "wandb_id")
    if not file.exists():
        file.write_text(os.urandom(8).hex())
    run_id = file.read_text()
    wandb.init(id=run_id, resume="allow", name=args.run_dir, dir=args.run_dir, config=vars(args), allow_val_change=True)


def catch_signals():
    """Return a list to which Ctrl-C and SIGTERM append; Ctrl-C after one of them stops the run at once."""
    signals = []

    def request_stop(signum, _frame):
        signals.append(signum)
        # The next Ctrl-C is a KeyboardInterrupt. SIGTERM may come again: a scheduler sends one, and torchrun another.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Unlike print, os.write is safe in a signal handler.
        os.write(2, b"\nsaving and stopping soon; Ctrl-C stops at once\n")

    def hold():
        # A signal to a new process must wait until reset_child has run there.
        if signal.getsignal(signal.SIGTERM) is request_stop:  # main has not ended
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))

    def release():  # also where hold did nothing
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))

    def reset_child():
        # multiprocessing ends a reward's processes with SIGTERM. Ctrl-C must leave them alone, or else a pool waits for
        # tasks of dead processes without end. Programs that they start do not inherit a handler, unlike SIG_IGN.
        if signal.getsignal(signal.SIGTERM) is request_stop:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, lambda *_: None)
            release()

    signal.signal(signal.SIGINT, request_stop)
    signal.signal(signal.SIGTERM, request_stop)
    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=reset_child)
    return signals


def log_step(args, step, metrics):
    """Log the metrics of a step; print those of an evaluation, and that there was nothing to learn from."""
    append_line(args, "metrics.jsonl", step, metrics)
    if RANK > 0:
        return
    if args.track:
        import wandb

        wandb.log({"step": step} | metrics)
    shown = [f"{name.removeprefix('eval/')} {value:.3f}" for name, value in metrics.items() if name.startswith("eval/")]
    if shown:
        tqdm.write(f"evaluation after step {step}: {', '.join(shown)}")
    if metrics.get("reward/zero_std") == 1:
        tqdm.write(f"step {step}: all completions of each group have the same reward (see docs/is_this_normal.md)")


def append_line(args, name, step, values):
    """Append the values of a step to one of the run's jsonl files."""
    if RANK == 0:
        with Path(args.run_dir, name).open("a") as file:
            file.write(json.dumps({"step": step} | values, default=float) + "\n")


def evaluate(policy, tokenizer, rows, args, step):
    """Return the mean reward of greedy completions and, for rows with answers, accuracy and pass@k; log samples."""
    torch.manual_seed(mix_seed(args.seed))  # the same in each evaluation
    rows = rows[RANK::WORLD_SIZE] or rows[:1]  # every rank must take part, so one row may count twice
    _, texts = sample_completions(policy, tokenizer, rows, 0.0, args)
    scores = score_completions(texts, rows)
    rewards, part_means = sum_parts(scores, texts, "eval/reward")
    metrics = {"eval/reward": (sum(rewards), len(rows))} | part_means
    for row, text, score in zip(rows, texts, scores):
        sample = {"prompt": row["prompt"], "answer": row["answer"], "completion": text, "reward": score}
        append_line(args, "eval_samples.jsonl", step, sample)
    if rows[0]["answer"] is not None:
        metrics["eval/accuracy"] = (are_correct(texts, rows).sum(), len(rows))
        repeated = [row for row in rows for _ in range(EVAL_SAMPLES)]
        _, texts = sample_completions(policy, tokenizer, repeated, args.temperature, args)
        correct = are_correct(texts, repeated)
        metrics["eval/pass@1"] = (correct.sum(), len(repeated))
        metrics[f"eval/pass@{EVAL_SAMPLES}"] = (correct.view(-1, EVAL_SAMPLES).any(1).sum(), len(rows))
    return mean_metrics([metrics])


def mix_seed(*numbers):
    """Return one seed for several numbers, such as seed, step and rank."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 1_000_003 + number) % 2**63
    return mixed


def sample_completions(policy, tokenizer, rows, temperature, args):
    """Sample one completion per row; return tensors (B, ...) and texts. Adjacent equal prompts share a prefill."""
    stop_ids = policy.model.generation_config.eos_token_id
    device = policy.model.device
    prompt_ids, prompt_mask = pad_left(rows, device)  # (B, P)
    size = args.rollout_batch_size or len(rows)
    parts = []
    with gathered(policy) as model:
        for ids, mask in zip(prompt_ids.split(size), prompt_mask.split(size)):
            parts.append(generate(model, ids, mask, args.max_completion_length, temperature, stop_ids))
    completion_ids, completion_mask, sampler_logprobs = [torch.cat(values) for values in zip(*parts)]  # (B, T)
    texts, truncated = [], []
    for row, ids, mask in zip(rows, completion_ids, completion_mask.bool()):
        ids = ids[mask].tolist()
        truncated.append(ids[-1] not in stop_ids)
        text = tokenizer.decode([token for token in ids if token not in stop_ids])
        if tokenizer.decode(row["prompt_ids"]).rstrip().endswith("<think>"):  # the template has opened a thought
            text = "<think>" + text
        texts.append(text)
    batch = {
        "indices": torch.arange(len(rows), device=device),
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "sampler_logprobs": sampler_logprobs,
        "truncated": torch.tensor(truncated, device=device),
    }
    return batch, texts


def pad_left(rows, device):
    """Pad the prompts of rows on the left; return ids and mask (B, P)."""
    prompts = [torch.tensor(row["prompt_ids"]) for row in rows]
    padded = pad_sequence(prompts, batch_first=True, padding_value=-1, padding_side="left").to(device)
    mask = (padded >= 0).long()
    return padded * mask, mask


@contextlib.contextmanager
def gathered(policy):
    """Gather all weights on every rank, so that each can sample at its own pace."""
    shards = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    hooks = []
    for module in shards:
        module.unshard()
        # These hooks (of torch 2.13) are FSDP's. They take a third of a token's time, also if nothing is resharded.
        hooks.append((module._forward_pre_hooks, module._forward_hooks))
        module._forward_pre_hooks, module._forward_hooks = {}, {}
    try:
        yield policy.model
    finally:
        for module, before in zip(shards, hooks):
            module._forward_pre_hooks, module._forward_hooks = before
            module.reshard()


@torch.no_grad()
def generate(model, prompt_ids, prompt_mask, max_completion_length, temperature, stop_ids):
    """Sample one completion per prompt, up to and including the first stop id.

    prompts (B, P) padded on the left -> ids, mask and log-probabilities (B, T), all 0 after a completion's end.
    """
    stop_ids = torch.tensor(list(stop_ids), device=prompt_ids.device)
    completion_ids = prompt_ids.new_zeros(len(prompt_ids), max_completion_length)
    completion_mask = torch.zeros_like(completion_ids)
    sampler_logprobs = torch.zeros(completion_mask.shape, device=prompt_ids.device)
    active = torch.arange(len(prompt_ids), device=prompt_ids.device)  # the A completions in the batch
    going = torch.ones_like(active)  # 0 for those of them that are finished

    mask = prompt_mask
    logits, cache = prefill(model, prompt_ids, prompt_mask)
    for t in inner_bar(range(max_completion_length), "tokens"):
        tokens, logprobs = sample_tokens(logits, temperature)
        completion_ids[active, t] = tokens * going
        completion_mask[active, t] = going
        sampler_logprobs[active, t] = logprobs * going
        going = going * ~torch.isin(tokens, stop_ids)
        num_going = going.sum().item()
        if num_going == 0 or t == max_completion_length - 1:
            break
        # Finished completions leave the batch when they are an eighth of it, because that copies the whole cache.
        if num_going <= 7 / 8 * len(active):
            kept = going.nonzero().squeeze(1)
            active, going, tokens, mask = active[kept], going[kept], tokens[kept], mask[kept]
            cache.reorder_cache(kept)
        mask = nn.functional.pad(mask, (0, 1), value=1)  # (A, P + t + 1)
        output = model(
            input_ids=tokens.unsqueeze(1),
            attention_mask=mask,
            position_ids=mask.sum(1, keepdim=True) - 1,
            past_key_values=cache,
            use_cache=True,
        )
        logits = output.logits[:, -1]  # (A, V)
    return completion_ids, completion_mask, sampler_logprobs


def prefill(model, prompt_ids, prompt_mask):
    """Read prompts (B, P), adjacent copies once; return the logits of their next tokens (B, V), and a cache."""
    # The mask is compared, too, because a prompt may contain the padding id 0.
    prompts = torch.cat([prompt_ids, prompt_mask], 1)  # (B, 2P)
    prompts, copies = prompts.unique_consecutive(dim=0, return_inverse=True)  # (U, 2P); copies (B,): where each is
    ids, mask = prompts.chunk(2, dim=1)
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=True,
        logits_to_keep=1,
    )
    cache = output.past_key_values
    cache.reorder_cache(copies)  # it selects rows, so it can also repeat them
    for layer in cache.layers:
        if type(layer) is DynamicLayer:  # others, such as those with a sliding window, keep their own update
            layer.__class__ = RoomyLayer
    return output.logits[copies, -1], cache


class RoomyLayer(DynamicLayer):
    """A layer of a key-value cache that appends tokens in place; DynamicLayer copies all tokens to append one."""

    def update(self, keys, values):
        self.keys = append_token(self.keys, keys)
        self.values = append_token(self.values, values)
        return self.keys, self.values


def append_token(held, new):
    """Append new (A, H, 1, D) to held (A, H, L, D) in place; if there is no room, copy it, with room for a block."""
    rows, heads, length, size = held.shape
    if held.is_contiguous():  # no room follows the last token of each head
        held = nn.functional.pad(held, (0, 0, 0, CACHE_BLOCK))[:, :, :length]
    longer = held.as_strided((rows, heads, length + 1, size), held.stride())
    longer[:, :, length] = new[:, :, 0]
    return longer


def sample_tokens(logits, temperature):
    """Sample ids (A,) from softmax(logits / temperature), greedily at 0; return them and their log-probabilities."""
    if temperature == 0:
        return logits.argmax(-1), torch.zeros_like(logits[:, 0])
    probabilities = (logits.float() / temperature).softmax(-1)  # (A, V)
    # Invert the cumulative distribution. On a CPU this is 4 to 10 times faster than torch.multinomial. In float32 the
    # sum would round away rare tokens. A draw on the edge of two tokens gives the second: never a probability of 0.
    cdf = probabilities.cumsum(-1, dtype=torch.float64)
    draws = torch.rand(len(cdf), 1, dtype=cdf.dtype, device=cdf.device) * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, draws, right=True).clamp(max=cdf.shape[1] - 1)  # (A, 1)
    return tokens.squeeze(1), probabilities.gather(1, tokens).squeeze(1).log()


def sum_parts(scores, texts, prefix):
    """Return rewards as floats, each the sum of its parts, and the means of parts as {prefix/NAME: (sum, count)}.

    Exit if a completion lacks a part that another has, or if a part, or a reward without parts, is not a finite number.
    """
    if len(scores) != len(texts):
        raise SystemExit(f"there are {len(scores)} rewards for {len(texts)} completions")
    if not isinstance(scores[0], dict):
        scores = [{"a reward": score} for score in scores]
    parts = pandas.DataFrame(scores, dtype=float)  # a column for each part; nan where it is missing
    means = {}
    for name, values in sorted(parts.items()):  # in the same order on all ranks
        for value, text in zip(values, texts):
            if not math.isfinite(value):
                raise SystemExit(f"{name} must be a finite number, but it is {value} for the completion {text!r}")
        if name != "a reward":
            means[f"{prefix}/{name}"] = (values.sum(), len(values))
    return parts.sum(axis=1).tolist(), means


def are_correct(texts, rows):
    """Return which completions are correct, (B,)."""
    return torch.tensor([is_correct(text, row["answer"]) for text, row in zip(texts, rows)])


def mean_metrics(collected):
    """Add each metric's (sum, count) over microbatches and ranks, and divide; skip those with count 0."""
    totals = {}
    for metrics in collected:
        for name, sum_and_count in metrics.items():
            totals[name] = totals.get(name, 0) + torch.tensor(sum_and_count, dtype=torch.float64)
    sums = all_reduce([total.tolist() for total in totals.values()])
    return {name: total / count for name, (total, count) in zip(totals, sums) if count > 0}


def pick_rows(rows, start, count, seed):
    """Return rows start to start + count of an endless series: all rows shuffled, all shuffled anew, and so on."""
    picked = []
    while len(picked) < count:
        epoch, first = divmod(start + len(picked), len(rows))
        generator = torch.Generator().manual_seed(mix_seed(seed, epoch))
        order = torch.randperm(len(rows), generator=generator).tolist()
        picked += [rows[i] for i in order[first : first + count]]
    return picked[:count]


def stop_requested(signals):
    """Return whether a signal has come to any rank."""
    return all_reduce(len(signals), dist.ReduceOp.MAX) > 0


def save(run_dir, policy, optimizer, tokenizer, step):
    """Write checkpoint/, a Hugging Face model, and then state/STEP, which --resume loads; once, not before step 1."""
    run_dir = Path(run_dir)
    state = run_dir / f"state/{step:08d}"
    if step == 0 or all_reduce(state.exists(), dist.ReduceOp.MAX):
        return
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(policy.model, options=options)  # only on rank 0
    if RANK == 0:
        merge_adapters(weights)
        tied = policy.model.all_tied_weights_keys  # second names of weights, such as a head that is the embedding
        weights = {name: weight.float() for name, weight in weights.items() if name not in tied}
        policy.model.save_pretrained(run_dir / "checkpoint.new", state_dict=weights)
        tokenizer.save_pretrained(run_dir / "checkpoint.new")
        shutil.rmtree(run_dir / "checkpoint", ignore_errors=True)
        (run_dir / "checkpoint.new").rename(run_dir / "checkpoint")
    model, moments = dcp_state.get_state_dict(policy, optimizer)
    dcp.save({"model": model, "optimizer": moments}, checkpoint_id=run_dir / "state/unfinished")
    if RANK == 0:
        # The last thing to do, so that a killed save does not count.
        (run_dir / "state/unfinished").rename(state)
        for older in sorted(run_dir.glob("state/0*"))[:-1]:
            shutil.rmtree(older, ignore_errors=True)


def merge_adapters(weights):
    """Add the adapters among these weights to the weights of their layers."""
    for name in list(weights):
        if name.endswith("lora_a.weight"):
            layer = name.removesuffix("lora_a.weight")
            a, b = weights.pop(name), weights.pop(layer + "lora_b.weight")
            weights[layer + "weight"] = weights[layer + "weight"] + b @ a * (LORA_ALPHA / len(a))


@torch.no_grad()
def compute_logprobs(policy, batch, minibatches, args):
    """Return log-probabilities (B, T) of the completions in these minibatches, and 0 for all others.

    The microbatches are those of the first epoch's updates, so that bfloat16 rounds alike, and the first ratio is 1.
    """
    logprobs = torch.zeros_like(batch["sampler_logprobs"])
    for indices in minibatches:
        for part in microbatches(batch, indices, args.microbatch_tokens):
            part_logprobs, _ = policy(part, args.temperature)
            logprobs[part["indices"]] += part_logprobs  # not =, because a filler has index 0, too, and only zeros
    return logprobs


def microbatches(batch, indices, max_tokens):
    """Split completions, longest first, into parts of at most max_tokens with padding, but at least one completion."""
    lengths = batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)  # (B,)
    order = lengths[indices].argsort(descending=True, stable=True)
    rest = indices[order]
    parts = []
    while len(rest) > 0:
        size = max(1, max_tokens // lengths[rest[0]].item())
        parts.append({name: values[rest[:size]] for name, values in batch.items()})
        rest = rest[size:]
    # FSDP needs equally many passes on all ranks, at least one. A filler is one completion with all tokens masked.
    num_parts = all_reduce(max(1, len(parts)), dist.ReduceOp.MAX)
    while len(parts) < num_parts:
        filler = {name: values[:1] for name, values in batch.items()}
        filler["completion_mask"] = torch.zeros_like(filler["completion_mask"])
        parts.append(filler)
    return inner_bar(parts, "microbatches")


def rollout_metrics(batch, rewards, group_size):
    """Return metrics of a rollout as pairs (sum, count)."""
    groups = rewards.view(-1, group_size)
    return {
        "reward/mean": (rewards.sum(), len(rewards)),
        "reward/zero_std": ((groups == groups[:, :1]).all(1).sum(), len(groups)),
        "rollout/length_mean": (batch["completion_mask"].sum(), len(rewards)),
        "rollout/truncated": (batch["truncated"].sum(), len(rewards)),
    }


def step_optimizer(policy, optimizer, learning_rate, max_grad_norm):
    """Clip the gradients and make an optimizer step, unless they are 0 or not finite; return their norm."""
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
    if hasattr(grad_norm, "full_tensor"):  # FSDP's
        grad_norm = grad_norm.full_tensor()
    grad_norm = grad_norm.item()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    if not math.isfinite(grad_norm):
        if RANK == 0:
            tqdm.write(f"skipped an optimizer step, because the gradient norm was {grad_norm}")
    elif grad_norm > 0:  # without a gradient AdamW would continue in its last direction
        optimizer.step()
    optimizer.zero_grad()
    return grad_norm


def check_sampler(metrics):
    """Exit, without saving, if sampling and training disagree: then the update was wrong."""
    sampler_kl = metrics.get("policy/sampler_kl", 0.0)
    if not sampler_kl <= 0.5:  # or nan; rounding gives less than 0.01
        raise SystemExit(f"sampling and training disagree about log-probabilities (KL {sampler_kl:.2g} per token)")


def log_group(args, step, row, texts, scores):
    """Log a group of completions; with the first step and each evaluation, print their ends, too."""
    sample = {"prompt": row["prompt"], "answer": row["answer"], "completions": texts, "rewards": [*scores]}
    append_line(args, "samples.jsonl", step, sample)
    if RANK == 0 and (step in (1, args.num_steps) or step % args.eval_every == 0):
        tqdm.write(f"step {step}: prompt {row['prompt']!r}, answer {row['answer']!r}, rewards and completions:")
        for text, score in zip(texts, scores):
            tqdm.write(f"{score}  {text[-160:]!r}")


def end_run(args, signals):
    """Print first and last evaluation and how to go on; after a signal to any rank, exit with its code."""
    signum = int(all_reduce(max(signals, default=0), dist.ReduceOp.MAX))
    if RANK == 0:
        file = Path(args.run_dir, "metrics.jsonl")
        file.touch()  # if there was nothing to do
        log = [json.loads(line) for line in file.read_text().splitlines()]
        evaluations = [metrics for metrics in log if any(name.startswith("eval/") for name in metrics)]
        if len(evaluations) > 1:
            for name, value in evaluations[0].items():
                if name.startswith("eval/"):
                    print(f"{name.removeprefix('eval/')} {value:.3f} -> {evaluations[-1][name]:.3f}")
        command = shlex.join(["python", sys.argv[0], "--resume", args.run_dir])
        saved = Path(args.run_dir, "checkpoint").exists()
        if saved:
            print(f"model: {args.run_dir}/checkpoint")
        if signum:
            print(f"to continue: {command}")
        elif saved:
            print(f"to train for longer: {command} --num-steps N")
        Path(args.run_dir, "args.json").read_bytes()  # closing the file ends the lock, which matters in a notebook
    dist.destroy_process_group()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signum:
        raise SystemExit(128 + signum)


if __name__ == "__main__":
    main(parse_args())
