"""GRPO with tools: a tool's replies stand in the completion, but not in its loss.

Jin et al., "Search-R1: Training LLMs to Reason and Leverage Search Engines with Reinforcement Learning" (2025)
https://arxiv.org/abs/2503.09516, over GRPO, Shao et al. (2024), https://arxiv.org/abs/2402.03300v3, equation 3.

    J(θ) = E_q 1/G Σᵢ 1/Σₜ mᵢₜ Σₜ mᵢₜ min(rᵢₜ Aᵢ, clip(rᵢₜ, 1 − ε, 1 + ε) Aᵢ)

    q, oᵢ     prompt, and the i-th of its G completions, including the tool's replies
    mᵢₜ       1 where the policy sampled the token, stop tokens included, 0 where the tool wrote it
    rᵢₜ       π_θ(oᵢₜ) / π_old(oᵢₜ), given all tokens before, including the tool's; Aᵢ and ε as in grpo.py

Compared with grpo.py
- tool_fn is asked wherever a call can end. Its reply is written next, and the policy continues, even after a stop.
- The tool's tokens are left out of the loss, the entropy and means over tokens. They count in rollout/length_mean and
  in the limit.

Departures from the papers: those of grpo.py. There is no KL term. The tool here is a calculator, and a reply has at
most --tool-tokens.

    python grpo_tools.py
    python grpo_tools.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k:main --group-size 8
"""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Literal

# Idle OpenMP threads spin, which slows a busy machine down; let them sleep. This must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro
import wandb
from datasets import load_dataset
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig

HERE = Path(__file__).resolve().parent


@dataclass
class Args:
    """Train a language model with GRPO to call tools."""

    # model and data; the defaults suit real models, and "task_defaults" in a model's config.json replaces them
    model: str = str(HERE / "models/tiny")
    """folder or Hugging Face name of a causal language model; models in models/ replace some defaults below"""
    dataset: str = str(HERE / "data/addition")
    """file, folder or Hugging Face name; columns: prompt (question, problem) and answer (solution, ground_truth)"""
    system_prompt: str = (
        "Reason step by step. Write each calculation as 12 * 34 =, with two numbers: a calculator puts in the result. "
        "Put your final answer within \\boxed{}."
    )
    """system message placed before every prompt that has none"""
    max_prompt_length: int = 512
    """maximum tokens per prompt; longer prompts are dropped"""

    # rollout
    num_steps: int = 200
    """training steps, each of which samples one rollout (0: evaluate only)"""
    prompts_per_step: int = 64
    """prompts per rollout, over all ranks"""
    group_size: int = 8
    """completions per prompt, G in the paper"""
    max_completion_length: int = 1024
    """maximum tokens per completion, including the stop token"""
    temperature: float = 1.0
    """temperature of sampling and of all log-probabilities"""
    rollout_batch_size: int = 0
    """maximum completions sampled at once on each rank (0: all); set it if sampling runs out of memory"""
    sampler_weight_cap: float = 2.0
    """cap on each token's importance weight, which corrects for rounding differences of sampling and training"""

    # optimization
    learning_rate: float = 1e-6
    """learning rate of AdamW; small models need a higher one, such as 1e-5 for 135 M parameters"""
    warmup_steps: int = 0
    """optimizer steps over which the learning rate rises from 0"""
    minibatch_size: int = 256
    """completions per optimizer step, over all ranks"""
    microbatch_tokens: int = 16384
    """maximum tokens per forward pass, including padding; lower it if the update runs out of memory"""
    update_epochs: int = 1
    """passes over each rollout"""
    max_grad_norm: float = 1.0
    """larger gradients are scaled down to this norm"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: saves memory, but the update takes about a third longer"""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """precision of the transformer blocks (auto: bfloat16 where the hardware supports it, otherwise float32)"""
    lora_rank: int = 0
    """train LoRA adapters of this rank; set --learning-rate 3 to 10 times higher (0: train the whole model)"""

    # evaluation, saving, logging
    eval_every: int = 20
    """steps between evaluations"""
    eval_prompts: int = 256
    """held-out prompts per evaluation"""
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

    # the algorithm
    clip_eps: float = 0.2
    """epsilon in eq. 3; the paper does not give its value"""
    tool_tokens: int = 512
    """tool_fn reads at most this many tokens at the end of a completion, and replies with at most as many"""


def is_right(completion, answer):
    """Return whether the completion's final answer equals the answer, which may be a GSM8K solution ending in ####."""
    given = extract_answer(completion)
    gold = parse_gold(answer)
    return given is not None and gold is not None and parse_answer(given) == gold


def reward_fn(completion, answer):
    """Return the reward of a completion. Edit this function, or assign another to the module."""
    return float(is_right(completion, answer))


def score_completions(completions, rows):
    """Return one reward per completion; each row has the prompt, the answer and the dataset's other columns.

    Edit this function for rewards that need the prompt or many completions at once, such as a judge or a test runner.
    """
    rewards = []
    for completion, row in zip(completions, rows):
        try:
            rewards.append(reward_fn(completion, row["answer"]))
        except Exception as error:
            error.add_note(f"in the reward of the completion {completion!r} of the row {row}")
            raise
    return rewards


NUMBER = r"([0-9]{1,9}(?:,[0-9]{3}){0,4}(?:\.[0-9]{1,9})?|\.[0-9]{1,9})"
CALL = rf"(?:^|(?<=[^-0-9.^…]))(?<![\w)^][-+*/])(?<![\w)^] [-+*/] ){NUMBER} *([-+*/]) *{NUMBER} *= *$"


def tool_fn(text):
    """Return what a tool replies to this unfinished completion, or "" if nothing was asked.

    It is asked after each token that contains its "ends", or after every token if it has none. The text begins with
    "…" if its beginning is cut off. This tool is a calculator. Edit this function, or assign another to the module.
    """
    plain = text.replace("\\times", "*").replace("\\cdot", "*").replace("\\div", "/")
    call = re.search(CALL, plain.translate(str.maketrans("×·÷−$&\\", "**/-   ")))
    if call is None:
        return ""
    a, b = [Fraction(number.replace(",", "")) for number in call.group(1, 3)]
    if call[2] == "+":
        result = a + b
    elif call[2] == "-":
        result = a - b
    elif call[2] == "*":
        result = a * b
    elif b == 0:
        return ""
    else:
        result = a / b
    reply = str(result)
    if result.denominator > 1:
        reply = str(round(float(result), 4))
    if text.endswith(" ="):
        reply = " " + reply
    return reply


tool_fn.ends = "="


class ToolUse:
    """What generate calls after each draw: it asks the tool, and writes its replies over the draws that follow."""

    def __init__(self, tokenizer, args):
        self.tokenizer = tokenizer
        self.limit = args.tool_tokens

    def __call__(self, t, rows, tokens, logprobs, ended):
        """Edit the draws of these rows at position t, all (N,); return tokens, logprobs, ended."""
        if t == 0:
            self.windows = [[] for _ in rows]  # the last tokens of each completion
            self.replies = [[] for _ in rows]  # what is still to be written into it
        tokens, logprobs, ended = tokens.clone(), logprobs.clone(), ended.clone()
        for i, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist())):
            written = bool(self.replies[row])
            if written:
                token = self.replies[row].pop(0)
                tokens[i] = token
                logprobs[i] = -math.inf  # the sampler did not draw it
                ended[i] = False
            self.windows[row] = [*self.windows[row], token][-self.limit :]
            if not written and getattr(tool_fn, "ends", "") in self.tokenizer.decode(token):
                self.replies[row] = self.ask(self.windows[row])
                if self.replies[row]:
                    ended[i] = False  # a reply to a stop token begins another turn
        return tokens, logprobs, ended

    def ask(self, window):
        """Return the ids of the tool's reply to the text of this window."""
        text = self.tokenizer.decode(window)
        if len(window) == self.limit:
            text = "…" + text
        reply = tool_fn(text) or ""
        return self.tokenizer(reply[: 16 * self.limit], add_special_tokens=False)["input_ids"][: self.limit]


def mark_replies(tokenizer, batch):
    """Return the texts of a batch with the tool's tokens between « and », such as 36 - 12 =« 24»."""
    texts = []
    for ids, mask, logprobs in zip(batch["completion_ids"], batch["completion_mask"], batch["sampler_logprobs"]):
        by_tool, counts = logprobs[mask == 1].isinf().unique_consecutive(return_counts=True)
        text = ""
        for replied, part in zip(by_tool, ids[mask == 1].split(counts.tolist())):
            piece = tokenizer.decode(part, skip_special_tokens=True)
            text += f"«{piece}»" if replied else piece
        texts.append(text)
    return texts


def compute_advantages(rewards, group_size):
    """Normalise rewards within each group (section 4.1.2); exactly 0 where all rewards of a group are equal.

    rewards (B,), completions of one prompt adjacent -> advantages (B,).
    """
    groups = rewards.view(-1, group_size)  # (B/G, G)
    std = groups.std(1, keepdim=True, correction=min(1, group_size - 1))
    advantages = (groups - groups.mean(1, keepdim=True)) / (std + 1e-4)
    # The float32 mean of eight rewards of 0.1 is not exactly 0.1, so their advantages would not be exactly 0.
    equal = (groups == groups[:, :1]).all(1, keepdim=True)
    return torch.where(equal, 0.0, advantages).view(-1)  # (B,)


def policy_loss(
    logprobs,
    old_logprobs,
    advantages,
    completion_mask,
    clip_eps,
    sampler_logprobs=None,
    sampler_weight_cap=2.0,
):
    """The negative of eq. 3, summed over completions; the caller divides by their number.

    advantages (B,), all else (B, T). Returned metrics are sums: policy/* over tokens, loss/* over completions.
    """
    mask = completion_mask.bool()
    lengths = mask.sum(1).clamp(min=1)  # (B,)
    advantages = advantages.unsqueeze(1)  # (B, 1)
    metrics = {}

    # Mask before exp: an inf or nan in the padding would reach the gradient.
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()  # (B, T)
    clipped_ratio = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    metrics["policy/approx_kl"] = (ratio - log_ratio - 1).sum().detach()
    metrics["policy/clip_fraction_low"] = (mask & (ratio < 1 - clip_eps) & (advantages < 0)).sum()
    metrics["policy/clip_fraction_high"] = (mask & (ratio > 1 + clip_eps) & (advantages > 0)).sum()

    # The sampler rounds differently from π_old, so tokens are weighted by π_old / π_sampler, capped (Yao et al. 2025).
    weight = 1.0
    if sampler_logprobs is not None:
        log_weight = torch.where(mask, old_logprobs - sampler_logprobs, 0.0)
        weight = log_weight.exp().clamp(max=sampler_weight_cap)  # (B, T)
        metrics["policy/sampler_kl"] = (log_weight.expm1() - log_weight).sum()  # k3, more exact near 0

    token_loss = -weight * torch.min(ratio * advantages, clipped_ratio * advantages)  # (B, T)
    loss = (torch.where(mask, token_loss, 0.0).sum(1) / lengths).sum()
    metrics["loss/policy"] = loss.detach()
    return loss, metrics


def accumulate_gradients(policy, batch, rows, divisor, on_policy, args):
    """Accumulate the gradients of policy_loss / divisor over these rows; return the sums of its metrics."""
    totals = Counter()
    for part in microbatches(batch, rows, args.microbatch_tokens):
        logprobs, entropies = policy(part, args.temperature)
        action_mask = part["action_mask"] * part["completion_mask"]  # 0 if this rank only keeps pace with the others
        if on_policy:  # π_θ still is π_old; keep its log-probabilities for later epochs (a filler has no rows)
            part["old_logprobs"] = logprobs.detach()
            batch["old_logprobs"][part["rows"]] = part["old_logprobs"][: len(part["rows"])]
        loss, metrics = policy_loss(
            logprobs,
            part["old_logprobs"],
            part["advantages"],
            action_mask,
            args.clip_eps,
            part["sampler_logprobs"],
            args.sampler_weight_cap,
        )
        (loss / divisor).backward()
        totals.update(metrics)
        totals["policy/entropy"] += (entropies * action_mask).sum().detach()
        totals["num_tokens"] += action_mask.sum()
    return totals


def main(args):
    rank, world_size, device = init_ranks()
    check_args(args, world_size)
    if args.group_size < 2:
        raise SystemExit("--group-size must be at least 2: a group of one has advantage 0")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train_prompts, eval_prompts = load_prompts(args, tokenizer)
    model = load_model(args.model, tokenizer, args.lora_rank)
    check_model(model, [*train_prompts, *eval_prompts][0]["prompt_ids"], args)
    policy = shard(LogprobModel(model), args, device)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    last_step = open_run(args, policy, optimizer)
    tool_use = ToolUse(tokenizer, args)
    stops, handlers = catch_signals()
    minibatches_per_epoch = args.prompts_per_step * args.group_size // args.minibatch_size
    if last_step == 0 and eval_prompts:
        log_step(args, 0, evaluate(policy, tokenizer, eval_prompts, args, 0, tool_use))

    progress = tqdm(range(last_step + 1, args.num_steps + 1), disable=rank > 0)
    for step in progress:
        torch.manual_seed(((args.seed * 1_000_003 + step) * 1_000_003 + rank) % 2**63)
        step_start = time.perf_counter()

        # rollout: sample a group of completions per prompt, score them, and compare each with its group
        start = (step - 1) * args.prompts_per_step
        prompts = pick_rows(train_prompts, start, args.prompts_per_step, args.seed)[rank::world_size]
        prompts = [prompt for prompt in prompts for _ in range(args.group_size)]  # (B,)
        batch, texts = sample_completions(policy, tokenizer, prompts, args.temperature, args, tool_use)
        # The tool's tokens have a sampler_logprobs of -inf; they are no actions.
        batch["action_mask"] = batch["completion_mask"] * batch["sampler_logprobs"].isfinite()
        batch["rewards"] = torch.tensor(compute_rewards(texts, prompts), dtype=torch.float32, device=device)
        batch["advantages"] = compute_advantages(batch["rewards"], args.group_size)
        # Only live rows are computed. A row of zero advantage adds nothing to the gradient.
        batch["live"] = batch["advantages"] != 0  # (B,)
        rollout_end = time.perf_counter()

        # shuffled minibatches, and log-probabilities before the update (the first minibatch's: from its gradient pass)
        minibatches = []
        for _ in range(args.update_epochs):
            minibatches += torch.randperm(len(texts), device=device).tensor_split(minibatches_per_epoch)
        first_epoch = minibatches[:minibatches_per_epoch]  # every completion once
        batch["old_logprobs"] = lookup_logprobs(policy, batch, first_epoch[1:], args)

        # update: one optimizer step per minibatch
        totals, divisors, grad_norms = Counter(), [], []
        for update, rows in enumerate(minibatches):
            divisors.append(args.minibatch_size)  # a mean over completions
            totals.update(accumulate_gradients(policy, batch, rows, divisors[-1], update == 0, args))
            optimizer_step = (step - 1) * len(minibatches) + update + 1
            learning_rate = args.learning_rate * min(1.0, optimizer_step / max(1, args.warmup_steps))
            grad_norms.append(step_optimizer(policy, optimizer, learning_rate, args.max_grad_norm))

        # metrics, evaluation, logs, saving
        tool_mask = batch["completion_mask"] - batch["action_mask"]  # (B, T)
        totals["rollout/tool_use"] = (tool_mask > 0).any(1).sum()
        totals["rollout/tool_tokens"] = tool_mask.sum()
        replies = batch["action_mask"][:, :-1] * tool_mask[:, 1:]  # 1 where a tool's token follows a sampled one
        totals["rollout/calls"] = replies.sum()
        metrics = step_metrics(totals, sum(divisors), batch, args.group_size)
        if rank == 0 and metrics["rollout/calls"] == 0:
            tqdm.write(f"step {step}: tool_fn replied to no completion, so this update is plain GRPO")
        metrics["optim/grad_norm"] = sum(grad_norms) / len(grad_norms)
        metrics["optim/learning_rate"] = learning_rate
        metrics["perf/rollout_seconds"] = rollout_end - step_start
        metrics["perf/step_seconds"] = time.perf_counter() - step_start
        stopping = all_reduce(len(stops)) > 0
        if eval_prompts and not stopping and (step % args.eval_every == 0 or step == args.num_steps):
            metrics |= evaluate(policy, tokenizer, eval_prompts, args, step, tool_use)
        log_step(args, step, metrics)
        marked = mark_replies(tokenizer, batch)
        log_group(args, step, prompts[0], marked, batch["rewards"], shown=step == 1 or "eval/reward" in metrics)
        progress.set_postfix(reward=metrics["reward/mean"])
        if stopping or step % args.save_every == 0 or step == args.num_steps:
            save(args.run_dir, policy, optimizer, tokenizer, step)
        if stopping:
            break

    end_run(args, stops, handlers)


# ---- below: what the scripts share, in the order of use, as identical copies (tests/sync_copies.py lists exceptions)

EVAL_SAMPLES = 4  # completions per held-out prompt, for pass@1 and pass@4
CHAT = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"}]
LORA_ALPHA = 32  # an adapter's output is multiplied by alpha / rank

# A progress bar within a step, which appears after five seconds.
inner_bar = partial(tqdm, leave=False, delay=5, disable=os.environ.get("RANK", "0") != "0")


def parse_args():
    """Read the flags; defaults are the settings of the run to resume, or those in the model's config.json."""
    args = tyro.cli(Args)  # for --model and --resume
    if args.resume:
        settings = json.loads(Path(args.resume, "args.json").read_text())
    else:
        named = read_config(args.model).get("task_defaults", {})
        named |= named.get(Path(__file__).stem, {})  # a dict has the settings of the script of that name
        settings = {name: named[name] for name in vars(args) if not isinstance(named.get(name, {}), dict)}
        if settings and os.environ.get("RANK", "0") == "0":
            print(f"defaults from {args.model}/config.json (your flags replace them): {settings}")
    return tyro.cli(Args, default=Args(**settings))


def read_config(name):
    """Return what a model's config.json holds; exit if such a model cannot be trained here."""
    if Path(name, "adapter_config.json").exists():
        raise SystemExit(f"{name} is a LoRA adapter: merge it into its model first, with merge_and_unload() of peft")
    config, _ = PreTrainedConfig.get_config_dict(name)
    if "quantization_config" in config:
        raise SystemExit(f"{name} is quantized: train the checkpoint that it was made from (--lora-rank saves memory)")
    return config


def init_ranks():
    """Join the process group of torchrun, or make a group of one; return rank, world size and device."""
    device = torch.device("cpu")
    backend = "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timedelta(hours=2))
    elif not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size(), device


def check_args(args, world_size):
    """Exit if batches cannot be divided evenly, and replace the precision "auto"."""
    completions = args.prompts_per_step * args.group_size
    minibatch_size = getattr(args, "minibatch_size", completions)  # reinforce.py makes one update per rollout
    if completions % minibatch_size:
        raise SystemExit(f"--minibatch-size {minibatch_size} does not divide the {completions} completions of a step")
    if args.prompts_per_step % world_size or minibatch_size % world_size:
        raise SystemExit(f"--prompts-per-step and --minibatch-size must be multiples of the {world_size} ranks")
    if args.precision == "auto":
        args.precision = find_precision()


def find_precision():
    """Choose bfloat16 where the GPU or the CPU multiplies it natively, otherwise float32."""
    if torch.cuda.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = torch.cpu.get_capabilities().get("avx512_bf16", False)
    if native:
        return "bfloat16"
    return "float32"


def load_prompts(args, tokenizer):
    """Load training and held-out prompts."""
    train_prompts, eval_prompts = load_rows(args, partial(read_prompt, tokenizer=tokenizer, args=args))
    if dist.get_rank() == 0:
        first = [*train_prompts, *eval_prompts][0]
        print(f"the first prompt as the model reads it: {tokenizer.decode(first['prompt_ids'])!r}")
        print(f"its answer: {first['answer']!r}")
    return train_prompts, eval_prompts


def load_rows(args, read):
    """Load training and held-out rows; read returns a row's examples, and a reason (text) for each one left out."""
    needed = {"held-out": args.eval_prompts > 0, "training": args.num_steps > 0}
    loaded, held_out = [], set()  # held-out rows come first
    for kind, split, rows in load_splits(args.dataset, args.eval_prompts):
        examples, dropped = [], Counter()
        for number, row in enumerate(rows):
            try:
                if row.get("tools"):
                    raise ValueError('tool calls are not supported: the column "tools" must be empty')
                found = read(row)
            except Exception as error:
                raise SystemExit(f"{args.dataset}, {kind} row {number}: {error!r}; the row is {row!r:.300}") from error
            for example in found:
                if isinstance(example, str):
                    dropped[example] += 1
                elif tuple(example["prompt_ids"]) in held_out:
                    dropped["with a held-out prompt"] += 1
                else:
                    examples.append(example)
        held_out = {tuple(example["prompt_ids"]) for example in examples}
        loaded.append(examples)
        report = f"{len(examples)} {kind} rows of {args.dataset}, split {split}, dropped: {dict(dropped)}"
        if needed[kind] and not examples:
            raise SystemExit(f"no {kind} row is left (--eval-prompts holds out {args.eval_prompts}): {report}")
        if dist.get_rank() == 0:
            print(report)
    return loaded[1], loaded[0]


def load_splits(name, num_held_out):
    """Load held-out rows (of the test, validation or else training split) and the training split, these included."""
    path, config, train = name, "", ""
    if not Path(name).exists():
        path, config, train = f"{name}::".split(":")[:3]  # NAME, NAME:CONFIG or NAME:CONFIG:SPLIT
    file_type = Path(name).suffix[1:].lower().replace("jsonl", "json")
    file = name.replace("[", "[[]")  # load_dataset would read [ as a pattern
    if file_type == "csv":
        splits = load_dataset(file_type, data_files=file, keep_default_na=False)
    elif file_type in ("json", "parquet"):
        splits = load_dataset(file_type, data_files=file)
    else:
        splits = load_dataset(path, config or None)
    train = train or min([split for split in splits if split.startswith("train")], key=len, default="train")
    tests = [train.replace("train", split) for split in ("test", "validation", "train")]  # test_sft for train_sft
    test = next(split for split in tests if split in splits)
    order = torch.randperm(len(splits[test]), generator=torch.Generator().manual_seed(0))
    held_out = splits[test].select(order[:num_held_out].sort().values)
    return [("held-out", test, held_out), ("training", train, splits.get(train, []))]


def read_prompt(row, tokenizer, args):
    """Add to a row its prompt (a text or messages), its answer (a text or None) and its prompt_ids."""
    if "prompt_ids" in row:
        raise ValueError("the script writes a column prompt_ids of its own: give yours another name")
    prompt = find_column(row, ("prompt", "question", "problem"))
    with_verl = {**(row.get("reward_model") or {}), **row}  # verl has the answer in reward_model.ground_truth
    answer = find_column(with_verl, ("answer", "solution", "ground_truth"), required=False)
    messages = as_messages(prompt, row.get("system") or args.system_prompt)
    if not messages or messages[-1]["role"] in ("system", "assistant") or not messages[-1]["content"].strip():
        return ["without a user's turn at its end"]
    if answer is not None and parse_gold(answer) is None:
        return ["without an answer that a completion can match"]
    prompt_ids = encode_prompt(tokenizer, messages)
    if len(prompt_ids) > args.max_prompt_length:
        return ["too long"]
    return [{**row, "prompt": prompt, "answer": answer, "prompt_ids": prompt_ids}]


def find_column(row, names, required=True):
    """Return the first of these columns that a row has, as a text or messages; a missing value is an empty text."""
    for name in names:
        if name in row:
            value = row[name]
            if value is None or value != value:  # nan
                value = ""
            elif isinstance(value, float):
                value = f"{Decimal(str(value)):f}"  # 0.00001, not 1e-05
            elif isinstance(value, int):
                value = str(value)
            elif not isinstance(value, str | list):
                raise ValueError(f"the column {name} was read as a {type(value).__name__}: write it as a string")
            if isinstance(value, str) and re.match(r'\s*\[\s*\{\s*"(role|content)"', value):
                value = json.loads(value)  # messages in a csv file
            return value
    if required:
        raise ValueError(f"one of the columns {', '.join(names)} is needed, but the row has only {', '.join(row)}")
    return None


def as_messages(prompt, system_prompt=""):
    """Return a prompt, a text or a list of messages, as a list of messages with the system prompt."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages = []
    for message in prompt:
        filled = {name: value for name, value in message.items() if value not in (None, [])}  # parquet fills in nulls
        if set(filled) - {"role", "content"} or not isinstance(filled.get("content", ""), str):
            raise ValueError(f"a message may have only a role and a text as content, but this one is {filled}")
        messages.append({"content": ""} | filled)
    if system_prompt and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def parse_gold(answer):
    """Parse a row's answer, which may be a solution that ends in it, or a JSON list of it; return None for prose."""
    listed = re.fullmatch(r'\["([^"]*)"\]', answer)
    if listed:
        answer = listed[1].replace("\\\\", "\\")  # JSON doubles a backslash
    answer = extract_answer(answer) or answer
    words = re.findall(r"(?<!\S)[A-Za-z]{2,}(?=[,.]?(?!\S))", answer)
    if len(set(words)) >= 8:  # prose
        return None
    return parse_answer(answer)


def extract_answer(text):
    """Return the final answer in a text: its last \\boxed{}, else what follows ####, else <answer>, else None."""
    # Leave out thoughts, also one whose <think> is in the prompt. Then turn  \boxed 5  into  \boxed{5}.
    text = re.sub(r"<think>.*?(</think>|\Z)", " ", text, flags=re.DOTALL).rpartition("</think>")[2]
    text = re.sub(r"\\boxed ((?>[\w.,/-]*\w))(?=[\s.,;:!?$]|\\[)\]]|\Z)", r"\\boxed{\1}", text)
    answer, start = None, text.find("\\boxed{")
    while start >= 0:
        end = find_closing_brace(text, start + 6)  # start + 6: the brace in \boxed{
        if end is None:
            return None  # cut off inside its box
        answer = re.sub(r"^ *\\boxed\{([^{}]*)\} *$", r"\1", text[start + 7 : end])  # a box in a box
        if text[start - 1 : start] in ("-", "\u2212"):
            answer = "-" + answer
        start = text.find("\\boxed{", end)
    if answer is None and "####" in text:
        answer = text.rpartition("####")[2].strip().partition("\n")[0]
    elif answer is None and "<answer>" in text.rpartition("</answer>")[0]:
        answer = text.rpartition("</answer>")[0].rpartition("<answer>")[2]
    return answer


def find_closing_brace(text, start):
    """Return the place of the brace that closes the one at start, or None."""
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start, start + 2000):  # a longer box is no answer
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
        if depth == 0:
            return brace.start()
    return None


def parse_answer(text):
    """Return a number (1,234.5, -$3, 7 / 2) as a Fraction, other text in a normal form, or None if nothing is left."""
    text = text.strip().removeprefix("**").removesuffix("**").strip()
    if len(text) > 1000:  # Python refuses to read numbers of more than 4300 digits
        return text
    for written, meant in (("\u2212", "-"), ("\\!,", ","), ("\\$", "$"), ("\\%", "%")):
        text = text.replace(written, meant)
    text = re.sub(r"\\[()\[\]]|\$\$", "$", text.removesuffix(".").strip())  # \( \) \[ \] $$ -> $
    while re.fullmatch(r"\{[^{}$]*\}|\$[^$]*\$", text):  # {5}, $5$ -> 5
        text = text[1:-1].strip()
    text = re.sub(r"\\[dt]?frac ?(?:\{([^{}]*)\}|([0-9])) ?(?:\{([^{}]*)\}|([0-9]))", r"\\frac{\1\2}{\3\4}", text)
    flat = re.sub(r"^([+-]? ?)\\frac\{([+-]?[0-9]+)\}\{([+-]?[0-9]+)\}$", r"\1\2/\3", text)
    number = r"((?:[1-9][0-9]{0,2}(?:(?:,|\\,|\{,\})[0-9]{3})+|[0-9]*)(?:\.[0-9]+)?)"
    match = re.fullmatch(rf"(?:[$£€] ?)?([+-]?) ?(?:[$£€] ?)?{number}(?: ?/ ?([+-]?[0-9]+))?", flat)
    if match and re.search("[0-9]", match[2]):
        sign, digits, divisor = match[1], re.sub(r"[^0-9.]", "", match[2]), int(match[3] or 1)
        if divisor != 0:
            return Fraction(sign + digits) / divisor
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox) ?\{([^{}\\]*)\}", r"\1", text)
    text = " ".join(text.split())
    return re.sub(r" ?([^\w ]) ?", r"\1", text) or None  # (1, 2) -> (1,2)


def encode_prompt(tokenizer, messages):
    """Return the ids of messages, up to the place where the completion begins."""
    if tokenizer.chat_template is not None:
        check_chat(tokenizer, messages)
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    ids = tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    if ids[-1] == tokenizer.eos_token_id:  # some tokenizers add it
        ids.pop()
    return ids


def check_chat(tokenizer, messages):
    """Raise an error if the chat template leaves a text out, or if a text already has the template's special tokens."""
    written = "".join(tokenizer.apply_chat_template(messages, tokenize=False).split())
    frame = tokenizer.apply_chat_template(CHAT, tokenize=False)
    special = [str(token).strip() for token in tokenizer.added_tokens_decoder.values() if token.special]
    for i, message in enumerate(messages):
        content = message["content"]
        if any(token and token in frame and token in content for token in special):
            raise ValueError(f"{content!r} already has the chat template's tokens: pass plain texts or messages")
        # Templates may shorten what the assistant said in earlier turns.
        earlier = message["role"] == "assistant" and i < len(messages) - 1
        if not earlier and "".join(content.split()) not in written:
            raise ValueError(f"the chat template does not write the content of the message {message}")


def load_model(name, tokenizer, lora_rank=0):
    """Load a language model in float32, and put all its stop tokens into its generation config."""
    architectures = read_config(name).get("architectures")  # may be missing
    options = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}  # see below
    try:
        model, info = AutoModelForCausalLM.from_pretrained(name, **options)
    except ValueError as error:
        raise SystemExit(f"{name} ({architectures}) is not a causal language model: {error!s:.200}") from error
    unfit = sorted([*info["missing_keys"], *info["mismatched_keys"]], key=str)
    if unfit:
        raise SystemExit(f"{name}: the weights do not fit config.json, or some are missing: {unfit[0]}")
    if architectures and type(model).__name__ not in architectures:
        print(f"{name} is a {architectures[0]}: only its text model, {type(model).__name__}, is trained and saved")
    model.get_input_embeddings().padding_idx = None  # otherwise a pad token that is in use would not be trained
    stop_ids = {find_turn_end(tokenizer)}
    for source in (model.generation_config, model.config.get_text_config(), tokenizer):
        ids = source.eos_token_id
        stop_ids.update(ids if isinstance(ids, list) else [ids])
    # A new config, because transformers refuses to save some old ones (a temperature without do_sample).
    model.generation_config = GenerationConfig(eos_token_id=sorted(stop_ids - {None}))
    if lora_rank:
        add_adapters(model, lora_rank)
    return model


def find_turn_end(tokenizer):
    """Find the special token that ends the assistant's turn in the chat template, or else the end of text."""
    if tokenizer.chat_template is None:
        return tokenizer.eos_token_id
    tail = tokenizer.apply_chat_template(CHAT, tokenize=False).rpartition("Answer")[2].strip()
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    return next((i for i in ids if i in tokenizer.added_tokens_decoder), tokenizer.eos_token_id)


def add_adapters(model, rank):
    """Freeze the model and add LoRA adapters to each linear layer of its blocks (arXiv 2106.09685)."""
    model.requires_grad_(False)
    model.adapters = True  # whether they are used
    torch.manual_seed(0)  # the same adapters on every rank

    def forward(layer, inputs):
        rows = inputs.flatten(0, -2)  # (N, D)
        adapted = rows.new_zeros(len(rows), layer.out_features)
        if model.adapters:
            adapted = layer.lora_b(layer.lora_a(rows)) * (LORA_ALPHA / rank)
        # addmm adds the two products before it rounds to bfloat16. Adding a small adapter output to a layer output
        # that is already rounded would lose it: in bfloat16 1 + 0.003 is 1.
        output = torch.addmm(adapted, rows, layer.weight.T)
        if layer.bias is not None:
            output = output + layer.bias
        return output.unflatten(0, inputs.shape[:-1])

    for block in find_blocks(model):
        for layer in list(block.modules()):
            if type(layer) is nn.Linear:
                layer.lora_a = nn.Linear(layer.in_features, rank, bias=False)
                layer.lora_b = nn.Linear(rank, layer.out_features, bias=False)
                nn.init.zeros_(layer.lora_b.weight)  # the model starts unchanged
                layer.forward = partial(forward, layer)


def find_blocks(model):
    """Find the transformer blocks of a model. Call it before FSDP, which renames their class."""
    names = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in names]


@torch.no_grad()
def check_model(model, prompt_ids, args):
    """Exit if a text may exceed the context, or if sampling and training disagree about log-probabilities."""
    longest = args.max_prompt_length + args.max_completion_length
    context = getattr(model.config.get_text_config(), "max_position_embeddings", longest)
    if longest > context:
        raise SystemExit(f"the maximum lengths add up to {longest} tokens, but the model's context has only {context}")
    prompts = [{"prompt_ids": prompt_ids[: 1 + i]} for i in range(8)]  # of several lengths, so that there is padding
    ids, mask = pad_left(prompts, model.device)
    stop_ids = range(0, model.config.get_text_config().vocab_size, 2)  # every second id, so that rows end one by one
    completion_ids, completion_mask, sampled = generate(model, ids, mask, 8, 1.0, stop_ids, 0, with_logprobs=True)
    logprobs, _ = token_logprobs(model, ids, mask, completion_ids, completion_mask, 1.0)
    gap = (logprobs - sampled).abs().max().item()
    if not gap < 0.01:  # nan too
        raise SystemExit(
            f"log-probabilities of sampling and training differ by {gap:.2g}: the model's cache or head is unsupported"
        )


def pad_left(prompts, device):
    """Pad the ids of prompts on the left; return ids and mask (B, P)."""
    rows = [torch.tensor(prompt["prompt_ids"]) for prompt in prompts]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left").to(device)
    return padded.clamp(min=0), (padded >= 0).long()


@torch.no_grad()
def generate(
    model, prompt_ids, prompt_mask, max_completion_length, temperature, stop_ids, pad_id, with_logprobs=False, edit=None
):
    """Sample one completion per prompt, up to and including the first stop id; edit may replace sampled tokens.

    prompts (B, P) left-padded -> ids and mask (B, T) right-padded, and on request log-probabilities, 0 where masked.
    """
    stop_ids = torch.tensor(list(stop_ids), device=prompt_ids.device)
    completion_ids = prompt_ids.new_full((len(prompt_ids), max_completion_length), pad_id)
    completion_mask = torch.zeros_like(completion_ids)
    sampler_logprobs = completion_mask.float()
    rows = torch.arange(len(prompt_ids), device=prompt_ids.device)  # completions not yet finished
    # Copies of a prompt are read once; its cache is then repeated for each copy.
    unique, copies = prompt_ids.masked_fill(prompt_mask == 0, -1).unique_consecutive(dim=0, return_inverse=True)
    ids, mask, cache = unique.clamp(min=0), (unique >= 0).long(), None
    for t in inner_bar(range(max_completion_length), "tokens"):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]  # of the new ids
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits, cache = output.logits[:, -1], output.past_key_values
        if t == 0:
            logits, mask = logits[copies], mask[copies]
            cache.reorder_cache(copies)  # selects these rows, some several times
        tokens, logprobs = sample_tokens(logits, temperature)
        ended = torch.isin(tokens, stop_ids)
        if edit is not None:
            tokens, logprobs, ended = edit(t, rows, tokens, logprobs, ended)
        completion_ids[rows, t] = tokens
        completion_mask[rows, t] = 1
        sampler_logprobs[rows, t] = logprobs
        going = (~ended).nonzero().squeeze(1)
        if len(going) == 0:
            break
        if len(going) < len(rows):  # finished rows leave the batch
            rows, tokens, mask = rows[going], tokens[going], mask[going]
            cache.reorder_cache(going)
        ids = tokens.unsqueeze(1)  # (B, 1)
        mask = nn.functional.pad(mask, (0, 1), value=1)  # (B, P + t + 1)
    if with_logprobs:
        return completion_ids, completion_mask, sampler_logprobs
    return completion_ids, completion_mask


def sample_tokens(logits, temperature):
    """Sample ids (B,) from softmax(logits / temperature), greedily at 0; return them and their log-probabilities."""
    if temperature == 0:
        return logits.argmax(-1), torch.zeros(len(logits), device=logits.device)
    probabilities = (logits.float() / temperature).softmax(-1)  # (B, V)
    # In float32 the sum would absorb rare tokens of a large vocabulary, and they would never be sampled.
    cdf = probabilities.cumsum(-1, dtype=torch.float64)
    draws = torch.rand(len(cdf), 1, dtype=cdf.dtype, device=cdf.device) * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, draws, right=True).clamp(max=cdf.shape[1] - 1)  # (B, 1)
    return tokens.squeeze(1), probabilities.gather(1, tokens).squeeze(1).log()


def token_logprobs(model, prompt_ids, prompt_mask, completion_ids, completion_mask, temperature):
    """Return the log-probabilities of completion tokens, and entropies (without gradient).

    prompts (B, P), completions (B, T) -> logprobs, entropies (B, T) in nats, 0 where masked.
    """
    completion_mask = completion_mask.bool()
    ids = torch.cat([prompt_ids, completion_ids], 1)  # (B, P + T)
    mask = torch.cat([prompt_mask.bool(), completion_mask], 1)
    # Move all padding to the right, where a causal model needs neither mask nor position ids:
    # the row  _ p0 p1 c0 c1 _  becomes  p0 p1 c0 c1 _ _
    order = (~mask).long().argsort(dim=1, stable=True)[:, : mask.sum(1).max()]
    hidden = model.base_model(input_ids=ids.gather(1, order), use_cache=False).last_hidden_state  # (B, W, D)
    # Each token is predicted at the position before its own. c0 is the third token of its row, so it stands at
    # position 2 and is predicted at position 1: its running count minus 2.
    positions = mask.cumsum(1)[:, prompt_ids.shape[1] :] - 2  # (B, T)
    rows = completion_mask.nonzero()[:, 0]  # (N,)
    hidden = hidden[rows, positions[completion_mask]]  # (N, D)
    logprobs, entropies = head_logprobs(model, hidden, completion_ids[completion_mask], temperature)  # (N,)
    zeros = logprobs.new_zeros(completion_mask.shape)
    return zeros.masked_scatter(completion_mask, logprobs), zeros.masked_scatter(completion_mask, entropies)


def head_logprobs(model, hidden, targets, temperature):
    """Return log-probabilities of targets (N,), and entropies, under softmax(head(hidden) / temperature)."""
    head = model.get_output_embeddings()
    config = model.config.get_text_config().to_dict()  # model families scale or cap their logits
    scale = config.get("logit_scale") or config.get("lm_head_multiplier") or 1 / (config.get("logits_scaling") or 1)
    cap = config.get("final_logit_softcapping")

    def chunk_logprobs(hidden, targets):
        logits = head(hidden) * scale  # (n, V)
        if cap:
            logits = (logits / cap).tanh() * cap
        logprobs = (logits / temperature).log_softmax(-1)
        # Detached, since they are only logged; an entropy bonus would need their gradient.
        entropies = -(logprobs.exp() * logprobs).detach().sum(-1)
        return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), entropies

    # All logits (N, V) might not fit: compute chunks of 2**25 numbers, and compute them again in the backward pass.
    size = max(1, 2**25 // head.weight.shape[0])
    if len(hidden) <= size:
        return chunk_logprobs(hidden, targets)
    chunks = zip(hidden.split(size), targets.split(size))
    parts = [checkpoint(chunk_logprobs, *chunk, use_reentrant=False) for chunk in chunks]
    return [torch.cat(values) for values in zip(*parts)]


def shard(policy, args, device):
    """Set up bfloat16, gradient checkpointing and FSDP2, which shards the blocks and casts them, even on one rank."""
    blocks = find_blocks(policy.model)
    dtypes = MixedPrecisionPolicy()
    frozen = None
    if args.precision == "bfloat16":
        compute_in_bfloat16(blocks)
        dtypes = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)  # weights, gradients
    if args.gradient_checkpointing:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if args.precision == "bfloat16" or dist.get_world_size() > 1:
        if dist.get_world_size() == 1:
            frozen = {weight for weight in policy.parameters() if not weight.requires_grad}  # FSDP would copy them
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=dtypes, ignored_params=frozen)
        fully_shard(policy, mesh=mesh, reshard_after_forward=True, ignored_params=frozen)  # all else, such as the head
        for module in (policy, *blocks):  # gradients are summed over ranks, not averaged
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return policy.to(device)


def compute_in_bfloat16(blocks):
    """Let the blocks compute in bfloat16, from float32 weights that small steps can still move."""
    torch.set_float32_matmul_precision("high")  # TF32 for the LM head
    torch.manual_seed(0)  # the same noise on every rank
    for block in blocks:
        block.forward = partial(in_bfloat16, block.forward)
        for weight in block.parameters():
            rounded = weight.data.bfloat16()
            weight.data = rounded  # what frozen weights keep
            if weight.requires_grad:  # float32 again, with noise in the lower 16 bits
                # The blocks round the noise away, so the model starts unchanged. Some weights now lie so near a border
                # of rounding that a small step takes them to the next bfloat16; without noise it would take none.
                noise = torch.randint(-32767, 32768, weight.shape, dtype=torch.int32) * (rounded != 0)
                weight.data = (rounded.float().view(torch.int32) + noise).view(torch.float32)


def in_bfloat16(forward, *args, **kwargs):
    """Call a block in bfloat16 on inputs that are float32 outside of it, and return float32."""
    for name, value in kwargs.items():
        if name != "attention_mask":  # its lowest number would become -inf
            kwargs[name] = cast(value, torch.bfloat16)
    return cast(forward(*cast(args, torch.bfloat16), **kwargs), torch.float32)


def cast(value, dtype):
    """Cast a floating-point tensor, or those in a tuple."""
    if isinstance(value, tuple):
        return tuple(cast(item, dtype) for item in value)
    if torch.is_tensor(value) and value.is_floating_point():
        return value.to(dtype)
    return value


class LogprobModel(nn.Module):
    """token_logprobs as the forward of a module, because only there FSDP gathers weights, here of the LM head."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.bad_gradients = 0  # steps in a row whose gradient norm was inf or nan

    def forward(self, batch, temperature, adapters=True):
        self.model.adapters = adapters  # False: it is the initial model, until a pass sets True again
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        return token_logprobs(self.model, *(batch[name] for name in names), temperature)


def open_run(args, policy, optimizer):
    """Create the run's folder, or load the state of the run to resume; return the last step done."""
    last_step = 0
    if args.resume:
        args.run_dir = args.resume
        last_step = load_state(Path(args.run_dir), policy, optimizer)
    elif not args.run_dir:
        started = datetime.fromtimestamp(all_reduce(time.time(), dist.ReduceOp.MAX))  # the same on all ranks
        args.run_dir = f"runs/{Path(sys.argv[0]).stem}__{args.seed}__{started:%Y%m%d-%H%M%S-%f}"
    if dist.get_rank() == 0:
        print(f"{args.run_dir}: {args.precision} on {policy.model.device}, number of ranks: {dist.get_world_size()}")
        settings = asdict(args) | {"resume": ""}
        Path(args.run_dir).mkdir(parents=True, exist_ok=bool(args.resume))
        Path(args.run_dir, "args.json").write_text(json.dumps(settings, indent=2))
        Path(args.run_dir, "metrics.jsonl").touch()
        if args.track:
            wandb.init(name=args.run_dir, dir=args.run_dir, config=settings)
    return last_step


def load_state(run_dir, policy, optimizer):
    """Load the newest state, remove later lines from the logs, and return the state's step."""
    folders = sorted(run_dir.glob("state/0*"))  # not state/unfinished
    if not folders:
        raise SystemExit(f"--resume {run_dir}: this run has no saved state; start it again without --resume")
    model, moments = dcp_state.get_state_dict(policy, optimizer)
    dcp.load({"model": model}, checkpoint_id=folders[-1])
    # Weights that never had a gradient have no moments.
    dcp.load({"optimizer": moments}, checkpoint_id=folders[-1], planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    dcp_state.set_state_dict(policy, optimizer, model_state_dict=model, optim_state_dict=moments)
    step = int(folders[-1].name)
    if dist.get_rank() == 0:
        for log in [*run_dir.glob("metrics.jsonl"), *run_dir.glob("*samples.jsonl")]:
            lines = [line for line in log.read_text().splitlines(True) if line.endswith("\n")]  # whole ones
            log.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
    return step


def all_reduce(values, op=dist.ReduceOp.SUM):
    """Reduce a number, or a list or tensor of numbers, over all ranks, in float64; return a number or lists."""
    values = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    dist.all_reduce(values, op)
    return values.tolist()


def catch_signals():
    """Return a list to which Ctrl-C and SIGTERM append, and the previous handlers; a second signal stops at once."""
    received, handlers = [], {}

    def request_stop(signum, _frame):
        received.append(signum)
        signal.signal(signum, handlers[signum])
        os.write(2, b"\nsaving and stopping after this step; press Ctrl-C again to stop at once\n")

    for signum in (signal.SIGINT, signal.SIGTERM):
        handlers[signum] = signal.signal(signum, request_stop)
    return received, handlers


def log_step(args, step, metrics):
    """Log the metrics of a step, and print those of an evaluation."""
    append_line(args, "metrics.jsonl", {"step": step} | metrics)
    if dist.get_rank() > 0:
        return
    if args.track:
        wandb.log({"step": step} | metrics)
    found = [f"{name.removeprefix('eval/')} {value:.3f}" for name, value in metrics.items() if name.startswith("eval/")]
    if found:
        tqdm.write(f"evaluation after step {step}: {', '.join(found)}")
    recent = [line.get("reward/zero_std") for line in read_metrics(args)[-5:]]
    if step % 5 == 0 and recent == [1.0] * 5:
        tqdm.write(f"step {step}: no learning signal for five steps: all completions of each group had the same reward")


def append_line(args, name, row):
    """Append a row to one of the run's jsonl files."""
    if dist.get_rank() == 0:
        with Path(args.run_dir, name).open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")


def read_metrics(args):
    """Read metrics.jsonl, one dictionary per line."""
    return [json.loads(line) for line in Path(args.run_dir, "metrics.jsonl").read_text().splitlines()]


def evaluate(policy, tokenizer, prompts, args, step, edit=None):
    """Return the mean reward of greedy completions and, with answers, accuracy and pass@k; log rank 0's samples."""
    torch.manual_seed(args.seed % 2**63)
    own = prompts[dist.get_rank() :: dist.get_world_size()] or prompts[:1]  # every rank takes part: one may count twice
    _, texts = sample_completions(policy, tokenizer, own, 0.0, args, edit)
    samples = []
    if own[0]["answer"] is not None:
        repeated = [prompt for prompt in own for _ in range(EVAL_SAMPLES)]
        _, samples = sample_completions(policy, tokenizer, repeated, args.temperature, args, edit)
    rewards = compute_rewards(texts, own)
    totals = Counter(num_prompts=len(own))
    for i, (prompt, text, reward) in enumerate(zip(own, texts, rewards)):
        answer = prompt["answer"]
        row = {"step": step, "prompt": prompt["prompt"], "answer": answer, "completion": text, "reward": reward}
        append_line(args, "eval_samples.jsonl", row)
        totals["eval/reward"] += reward
        if answer is not None:
            group = samples[i * EVAL_SAMPLES : (i + 1) * EVAL_SAMPLES]
            num_right = sum(is_right(sample, answer) for sample in group)
            totals["eval/accuracy"] += is_right(text, answer)
            totals["eval/pass@1"] += num_right / EVAL_SAMPLES
            totals[f"eval/pass@{EVAL_SAMPLES}"] += num_right > 0
    sums = dict(zip(totals, all_reduce(list(totals.values()))))
    num_prompts = sums.pop("num_prompts")
    return {name: total / num_prompts for name, total in sums.items()}


def sample_completions(policy, tokenizer, prompts, temperature, args, edit=None):
    """Sample one completion per prompt; return tensors (B, ...) and texts. Adjacent equal prompts are read once."""
    stop_ids = policy.model.generation_config.eos_token_id
    prompt_ids, prompt_mask = pad_left(prompts, policy.model.device)  # (B, P)
    parts, size, limit = [], args.rollout_batch_size or len(prompts), args.max_completion_length
    with gathered(policy) as model:
        for ids, mask in zip(prompt_ids.split(size), prompt_mask.split(size)):
            parts.append(generate(model, ids, mask, limit, temperature, stop_ids, 0, True, edit))
    completion_ids, completion_mask, sampler_logprobs = [torch.cat(values) for values in zip(*parts)]
    lengths = completion_mask.sum(1)  # (B,)
    unwritten_ids = {*stop_ids, tokenizer.pad_token_id, tokenizer.bos_token_id}
    texts, truncated = [], []
    for prompt, ids, length in zip(prompts, completion_ids.tolist(), lengths.tolist()):
        truncated.append(ids[length - 1] not in stop_ids)
        text = tokenizer.decode([token for token in ids[:length] if token not in unwritten_ids])
        # Some templates end the prompt with <think> (up to nine tokens); it belongs to the completion.
        if tokenizer.decode(prompt["prompt_ids"][-9:]).rstrip().endswith("<think>"):
            text = "<think>" + text
        texts.append(text)
    batch = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "sampler_logprobs": sampler_logprobs,
        "lengths": prompt_mask.sum(1) + lengths,  # with the prompt
        "truncated": torch.tensor(truncated, device=model.device),
        "live": torch.ones_like(lengths, dtype=torch.bool),  # rows that need to be computed
    }
    return batch, texts


@contextlib.contextmanager
def gathered(policy):
    """Gather all weights on every rank, so that each can sample at its own pace."""
    shards = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    hooks = []
    for module in shards:
        module.unshard()
        # FSDP's hooks would gather the weights again for every token.
        hooks.append((module._forward_pre_hooks, module._forward_hooks))
        module._forward_pre_hooks, module._forward_hooks = {}, {}
    yield policy.model
    for module, before in zip(shards, hooks):
        module._forward_pre_hooks, module._forward_hooks = before
        module.reshard()


def compute_rewards(texts, rows):
    """Return the rewards of score_completions as floats; exit if there is not one number per completion."""
    rewards = list(score_completions(texts, rows))
    if len(rewards) != len(rows):
        raise SystemExit(f"score_completions returned {len(rewards)} rewards for {len(rows)} completions")
    for i, reward in enumerate(rewards):
        try:
            rewards[i] = float(reward)
        except Exception as error:
            raise SystemExit(f"score_completions returned {reward!r} for the row {rows[i]}, not a number") from error
    return rewards


def pick_rows(rows, start, count, seed):
    """Pick count rows from place start on of an endless order: all rows shuffled, all shuffled anew, and so on."""
    order = []
    for epoch in range(start // len(rows), (start + count - 1) // len(rows) + 1):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        order += torch.randperm(len(rows), generator=generator).tolist()
    first = start % len(rows)
    return [rows[i] for i in order[first : first + count]]


@torch.no_grad()
def lookup_logprobs(policy, batch, minibatches, args):
    """Return log-probabilities (B, T) for the live rows in these minibatches, and 0 for all others.

    The microbatches are the same as in the update, because bfloat16 results depend on them.
    """
    logprobs = torch.zeros_like(batch["sampler_logprobs"])
    for rows in minibatches:
        for part in microbatches(batch, rows, args.microbatch_tokens):
            found, _ = policy(part, args.temperature)
            logprobs[part["rows"]] = found[: len(part["rows"])]
    return logprobs


def microbatches(batch, rows, max_tokens):
    """Yield the live rows, longest first, in parts of up to max_tokens including padding, or of a single row."""
    live = rows[batch["live"][rows]]
    rest = live[batch["lengths"][live].argsort(descending=True, stable=True)]
    parts = []
    while len(rest) > 0:
        size = max(1, max_tokens // batch["lengths"][rest[0]].item())
        parts.append(rest[:size])
        rest = rest[size:]
    # All ranks must make equally many passes, at least one. A filler is one row with all tokens masked, and no "rows".
    num_parts = int(all_reduce(max(1, len(parts)), dist.ReduceOp.MAX))
    for index in inner_bar(parts, "microbatches"):
        yield {name: values[index] for name, values in batch.items()} | {"rows": index}
    for _ in range(num_parts - len(parts)):
        part = {name: values[:1] for name, values in batch.items()} | {"rows": rest}  # empty
        part["completion_mask"] = torch.zeros_like(part["completion_mask"])
        yield part


def step_optimizer(policy, optimizer, learning_rate, max_grad_norm):
    """Clip the gradients and make an optimizer step, unless they are 0 or not finite; return their norm."""
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
    if hasattr(grad_norm, "full_tensor"):  # FSDP's
        grad_norm = grad_norm.full_tensor()
    grad_norm = grad_norm.item()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    policy.bad_gradients += 1  # unless this one is finite
    if math.isfinite(grad_norm):
        policy.bad_gradients = 0
        if grad_norm > 0:  # without a gradient AdamW would continue in its last direction
            optimizer.step()
    optimizer.zero_grad()
    if policy.bad_gradients == 3:
        raise SystemExit(f"the gradient norm was {grad_norm} three times in a row: try a lower --learning-rate")
    return grad_norm


def step_metrics(totals, divisor, batch, group_size):
    """Return means over all ranks: policy/* over trained tokens, loss/* over the divisor, all else over completions."""
    groups = batch["rewards"].view(-1, group_size)
    totals["reward/mean"] = groups.sum()  # this and the next three are sums until they are divided below
    totals["reward/zero_std"] = (groups == groups[:, :1]).all(1).sum() * group_size  # completions of these groups
    totals["rollout/length_mean"] = batch["completion_mask"].sum()
    totals["rollout/truncated"] = batch["truncated"].sum()
    sums = dict(zip(totals, all_reduce([float(total) for total in totals.values()])))
    num_completions = groups.numel() * dist.get_world_size()
    divisors = {"policy": sums.pop("num_tokens"), "loss": divisor}
    metrics = {}
    for name, total in sums.items():
        count = divisors.get(name.partition("/")[0], num_completions)
        if count > 0:  # without trained tokens there are no policy/*
            metrics[name] = total / count
    return metrics


def log_group(args, step, prompt, texts, rewards, shown):
    """Log the completions of the first prompt, and print them if they are to be shown."""
    row = {"step": step, "prompt": prompt["prompt"], "answer": prompt["answer"]}
    row |= {"completions": texts[: args.group_size], "rewards": rewards[: args.group_size].tolist()}
    append_line(args, "samples.jsonl", row)
    if shown and dist.get_rank() == 0:
        tqdm.write(f"step {step}: prompt {row['prompt']!r}, answer {row['answer']!r}, rewards and ends of completions:")
        for text, reward in zip(row["completions"], row["rewards"]):
            tqdm.write(f"{reward:8.2f}  {text[-160:]!r}")


def save(run_dir, policy, optimizer, tokenizer, step):
    """Write checkpoint/, a Hugging Face model, and then state/STEP, which --resume loads."""
    rank, run_dir = dist.get_rank(), Path(run_dir)
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(policy.model, options=options)  # only on rank 0
    unfinished = run_dir / "state/unfinished"
    if rank == 0:
        merge_adapters(weights)
        tied = policy.model.all_tied_weights_keys  # gathering made copies of them
        weights = {name: weight.float() for name, weight in weights.items() if name not in tied}
        policy.model.save_pretrained(run_dir / "checkpoint.new", state_dict=weights)
        tokenizer.save_pretrained(run_dir / "checkpoint.new")
        shutil.rmtree(run_dir / "checkpoint", ignore_errors=True)
        (run_dir / "checkpoint.new").rename(run_dir / "checkpoint")
    fresh = isinstance(optimizer, torch.optim.Optimizer) and not optimizer.state  # ppo_rlhf.py has a list
    model, moments = dcp_state.get_state_dict(policy, optimizer)
    if fresh:  # get_state_dict made an optimizer step with learning rate 0, to create the state: do not count it
        for values in optimizer.state.values():
            values["step"].zero_()
    dcp.save({"model": model, "optimizer": moments}, checkpoint_id=unfinished)
    if rank == 0:
        unfinished.rename(run_dir / f"state/{step:08d}")  # last, so that a killed save does not count
        for older in sorted(run_dir.glob("state/0*"))[:-1]:
            shutil.rmtree(older, ignore_errors=True)


def merge_adapters(weights):
    """Add the adapters among these weights to the weights of their layers."""
    for name in [name for name in weights if name.endswith("lora_a.weight")]:
        layer = name.removesuffix("lora_a.weight")
        a, b = weights.pop(name), weights.pop(layer + "lora_b.weight")
        weights[layer + "weight"] = weights[layer + "weight"] + b @ a * (LORA_ALPHA / len(a))


def end_run(args, stops, handlers):
    """Print the first and last evaluation and how to continue; after a signal exit with its code."""
    if dist.get_rank() == 0:
        evaluations = [row for row in read_metrics(args) if any(name.startswith("eval/") for name in row)]
        if len(evaluations) > 1:
            for name in evaluations[0]:
                if name.startswith("eval/"):
                    print(f"{name.removeprefix('eval/')} {evaluations[0][name]:.3f} -> {evaluations[-1][name]:.3f}")
        if Path(args.run_dir, "checkpoint").exists():
            print(f"model: {args.run_dir}/checkpoint; to continue: --resume {args.run_dir} --num-steps N")
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    dist.destroy_process_group()
    if stops:
        raise SystemExit(128 + stops[0])


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a letter that the terminal lacks must not end a run
    main(parse_args())
