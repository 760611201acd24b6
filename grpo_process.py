"""GRPO with process supervision: a reward for every step of a completion.

Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models" (2024)
https://arxiv.org/abs/2402.03300v3, equation 3 and section 4.1.3.

    J(θ) = E_q 1/G Σᵢ 1/|oᵢ| Σₜ { min(rᵢₜ Aᵢₜ, clip(rᵢₜ, 1 − ε, 1 + ε) Aᵢₜ) − β k3ᵢₜ }

    Aᵢₜ       Σⱼ (Rᵢⱼ − mean R) / std R over the steps j of oᵢ that end at token t or after it
    Rᵢⱼ       reward of a step; mean and std are over all steps of the G completions, all else is grpo.py's

Compared with grpo.py, whose departures from the paper it shares
- step_rewards finds the steps and says what each is worth; the final answer is the last one.

    python grpo_process.py
    python grpo_process.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k:main --group-size 8
"""

import bisect
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
import traceback
import warnings
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated

# Idle OpenMP threads spin, which slows a busy machine down; let them sleep. This must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
import tyro
import wandb
from datasets import load_dataset
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer


def by_model(embedded, real):
    """A default that depends on the model; resolve_args fills it in."""
    return field(default=None, metadata={"embedded": embedded, "real": real})


@dataclass
class Args:
    """Group Relative Policy Optimization of a language model, with process supervision."""

    # model and data
    model: str | None = None
    """folder or hub name of a causal language model (default: the embedded models/tiny)"""
    dataset: str | None = None
    """json, jsonl, csv or parquet file, folder, or hub name as in openai/gsm8k:main (default: data/addition)"""
    system_prompt: str | None = by_model("", "Reason step by step, and put your final answer within \\boxed{}.")
    """system message put before every prompt (embedded: none; real: asks for steps and a boxed answer)"""
    max_prompt_length: int | None = by_model(32, 512)
    """tokens; longer prompts are dropped and counted (embedded: 32; real: 512)"""

    # rollout
    num_steps: int | None = by_model(40, 200)
    """rollouts (0 only evaluates); with --resume, the new total (embedded: 40; real: 200)"""
    prompts_per_step: int | None = by_model(16, 64)
    """prompts per rollout, over all ranks (embedded: 16; real: 64)"""
    group_size: int = 8
    """completions per prompt, G in the paper"""
    max_completion_length: int | None = by_model(48, 1024)
    """tokens, the stop token included (embedded: 48; real: 1024)"""
    temperature: float = 1.0
    """of sampling, and of log-probabilities"""
    rollout_batch_size: int = 0
    """most completions decoded at once per rank (0: all)"""
    sampler_weight_cap: float = 2.0
    """most that a token counts, being likelier to the policy than to its sampler"""

    # optimization
    learning_rate: float | None = by_model(1.5e-4, 1e-6)
    """of AdamW; 135 M took 1e-5 (embedded: 1.5e-4; real: 1e-6)"""
    warmup_steps: int | None = by_model(8, 0)
    """optimizer steps over which the learning rate rises from 0 (embedded: 8; real: 0)"""
    minibatch_size: int | None = by_model(64, 256)
    """completions per optimizer step, over all ranks (embedded: 64; real: 256)"""
    microbatch_tokens: int | None = by_model(1024, 16384)
    """most padded tokens per pass: changes speed and memory only (embedded: 1024; real: 16384)"""
    update_epochs: int = 1
    """passes over each rollout"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to at most this norm"""
    gradient_checkpointing: bool = False
    """recompute activations: less memory, about a third more time"""
    precision: str | None = None
    """of the blocks, bfloat16 or float32 (bfloat16 on a GPU; real: and on a CPU that has it)"""
    lora_rank: int = 0
    """train adapters of this rank, at 3 to 10 times the rate (0: the model itself)"""

    # evaluation, saving, logging
    eval_every: int | None = by_model(20, 20)
    """steps between evaluations on held-out prompts (20)"""
    eval_prompts: int | None = by_model(512, 256)
    """held-out prompts per evaluation (embedded: 512; real: 256)"""
    save_every: int | None = by_model(20, 20)
    """steps between saves (20)"""
    run_dir: str | None = None
    """new folder of this run (default: runs/SCRIPT__SEED__TIME)"""
    resume: str | None = None
    """folder of a run to go on with, one you trust; speed, memory and schedule may be given anew"""
    seed: int = 1
    """of sampling and of the order of prompts"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline works)"""

    # the algorithm
    clip_eps: float = 0.2
    """epsilon of eq. 3, which the paper does not give"""
    kl_coef: float = 0.04
    """beta of eq. 3 (0.04 in section 4.2); 0 loads no reference model"""


def is_right(completion, answer):
    """Is the completion's final answer the answer, plain or GSM8K's after ####? Accuracy counts this."""
    given, gold = extract_answer(completion), parse_answer(extract_answer(answer) or answer)
    return given is not None and gold is not None and parse_answer(given) == gold


def reward_fn(completion, answer):
    """Return the reward of a completion. Edit this function, or assign another to the module."""
    return float(is_right(completion, answer))


def score_completions(completions, rows):
    """Return a reward for each completion; rows are the dataset's, with prompt, answer and other columns.

    Edit this one for what needs the prompt or many completions at once: a judge, a test runner.
    """
    return [reward_fn(completion, row["answer"]) for completion, row in zip(completions, rows)]


NUMBER = r"(?:[0-9]{1,9}(?:,[0-9]{3}){0,4}(?:\.[0-9]{1,9})?|\.[0-9]{1,9})"
# An operation on two numbers with its result, but no part of a longer equation.
STEP = rf"(?<![0-9.^])(?<![\w)^][-+*/])(?<![\w)^] [-+*/] )({NUMBER}) *([-+*/]) *({NUMBER}) *= *({NUMBER})"
STEP += r"(?![.,]?[0-9]| *[-+*/] *[0-9(]);?"


def read_numbers(text, pattern=".+"):
    return [Fraction(n.replace(",", "")) for part in re.findall(pattern, text) for n in re.findall(NUMBER, part)]


def step_rewards(completion, row):
    """Return (end, reward) of every step before the final answer, completion[:end] being all there is when it ends.

    A step is an equation. It earns 1, once, if its result is one that the row's answer works out, or a total of the
    sum in the prompt, and 0 if it is false; others are no steps. Edit or assign another.
    """
    xs = read_numbers(str(row["prompt"]), rf"{NUMBER}(?: *\+ *{NUMBER})+")
    needed = {*read_numbers(str(row["answer"]), r"=[ $\\]*[0-9.,]+")} or {sum(xs[:n]) for n in range(2, len(xs) + 1)}
    known, steps = needed.union(read_numbers(f"{row['prompt']} {row['answer']}")), []
    text = completion.replace("\\times", "     *").replace("\\cdot", "    *").replace("\\div", "   /")
    text = text.translate(str.maketrans("×·÷−$&\\", "**/-   "))  # as long as before
    for found in re.finditer(STEP, text) if needed else ():
        a, b, c = read_numbers(found.expand(r"\1 \3 \4"))
        right = c == {"+": a + b, "-": a - b, "*": a * b, "/": a / (b or math.nan)}[found[2]]
        if not right or (c in needed and {a, b} <= known):  # or 1+1=2;2+1=3 pays best
            steps.append((found.end(), float(right)))
            needed = needed - {c} if right else needed
    return steps


def find_steps(tokenizer, ids, completion, row, reward):
    """Return (tokens, reward) of all steps; the last of these first tokens ends the step, and may begin the next."""
    whole = tokenizer.decode(ids, skip_special_tokens=True)  # of padding, too
    opened = "" if whole.startswith(completion) else "<think>"  # by the prompt

    def num_characters(tokens):  # a part of a character decodes to another one
        text = opened + tokenizer.decode(ids[:tokens], skip_special_tokens=True)
        return len(os.path.commonprefix([text, completion]))

    steps = [*step_rewards(completion, row), (math.inf, reward)]
    if wrong := [step for step in steps if not (step[0] > 0 and abs(step[1]) < 1e38)]:
        raise SystemExit(f"step_rewards: {wrong[0]} is no (end, reward), of the completion {completion[:200]!r}")
    return [(bisect.bisect_left(range(len(ids)), end, key=num_characters), reward) for end, reward in steps]


def compute_advantages(steps, group_size, completion_mask):
    """Section 4.1.3: rewards normalised over all steps of a group, exactly 0 where they are equal; a token has the sum
    of those of the steps that end at it or after it. steps [(tokens, reward)] (B), mask (B, T) -> advantages (B, T).
    """
    advantages = torch.zeros_like(completion_mask, dtype=torch.float32)
    for first in range(0, len(steps), group_size):
        group = [(row, *step) for row in range(first, first + group_size) for step in steps[row]]
        rewards = torch.tensor([float(reward) for _, _, reward in group])
        normalised = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for (row, tokens, _), reward in zip(group, torch.where((rewards == rewards[0]).all(), 0.0, normalised)):
            advantages[row, :tokens] += reward
    return advantages


def policy_loss(
    logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    completion_mask,
    clip_eps,
    kl_coef,
    sampler_logprobs=None,
    sampler_weight_cap=2.0,
):
    """Eq. 3 to be minimised: mean over the tokens of each completion, summed over completions; divide by their number.

    All (B, T); ref_logprobs may be None. Metrics are sums over tokens, loss/* over completions.
    """
    mask = completion_mask.bool()
    lengths = mask.sum(1).clamp(min=1)  # (B,)
    # Masked first: whatever stands there, inf and nan included, must not reach the gradient.
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()  # (B, T)
    clipped_ratio = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    metrics, weight = {}, 1.0
    # The sampler rounds otherwise than π_old: π_old / π_sampler, capped, weighs its tokens (Yao et al. 2025).
    if sampler_logprobs is not None:
        log_weight = torch.where(mask, old_logprobs - sampler_logprobs, 0.0)
        weight = log_weight.exp().clamp(max=sampler_weight_cap)  # (B, T)
        metrics["policy/sampler_kl"] = (log_weight.expm1() - log_weight).sum()
    token_loss = -weight * torch.min(ratio * advantages, clipped_ratio * advantages)  # (B, T)
    loss = (torch.where(mask, token_loss, 0.0).sum(1) / lengths).sum()
    metrics |= {
        "loss/policy": loss.detach(),
        "policy/approx_kl": (ratio - log_ratio - 1).sum().detach(),
        "policy/clip_fraction_low": (mask & (ratio < 1 - clip_eps) & (advantages < 0)).sum(),
        "policy/clip_fraction_high": (mask & (ratio > 1 + clip_eps) & (advantages > 0)).sum(),
    }
    if ref_logprobs is not None:
        ref_log_ratio = torch.where(mask, ref_logprobs - logprobs, 0.0)
        token_kl = ref_log_ratio.exp() - ref_log_ratio - 1  # (B, T), k3: KL in value, not gradient (arXiv 2506.09477)
        metrics["policy/ref_kl"] = token_kl.sum().detach()
        if kl_coef:
            kl = (weight * token_kl / lengths.unsqueeze(1)).sum()
            loss = loss + kl_coef * kl
            metrics["loss/kl"] = kl_coef * kl.detach()
    return loss, metrics


def accumulate_gradients(policy, batch, rows, divisor, on_policy, args):
    """Add the gradients of policy_loss over the rows of all ranks, over divisor; return summed metrics."""
    totals = Counter()
    for part in microbatches(batch, rows, args.microbatch_tokens):
        logprobs, entropies = policy(
            part["prompt_ids"], part["prompt_mask"], part["completion_ids"], part["completion_mask"], args.temperature
        )
        loss, metrics = policy_loss(
            logprobs,
            logprobs.detach() if on_policy else part["old_logprobs"],
            part.get("ref_logprobs"),
            part["advantages"],
            part["completion_mask"],
            args.clip_eps,
            args.kl_coef,
            part.get("sampler_logprobs"),
            args.sampler_weight_cap,
        )
        (loss / divisor).backward()
        metrics["policy/entropy"] = entropies.sum().detach()
        metrics["num_tokens"] = part["completion_mask"].sum()
        totals.update(metrics)
    return totals


def main(args):
    rank, world_size, device = init_ranks()
    args = resolve_args(args)
    check_args(args, world_size)
    if args.group_size < 2:
        raise SystemExit(f"--group-size {args.group_size}: must be at least 2: one has advantage 0")
    tokenizer = load_tokenizer(args.model)
    train_prompts, eval_prompts, report = load_prompts(
        args.dataset, tokenizer, args.system_prompt, args.max_prompt_length, args.eval_prompts
    )
    model, stop_ids = load_model(args.model, tokenizer, args.lora_rank)
    longest = max(len(prompt["prompt_ids"]) for prompt in train_prompts + eval_prompts)
    check_model(model, train_prompts[0]["prompt_ids"], longest + args.max_completion_length)
    policy = shard(LogprobModel(model), device, args.precision, args.gradient_checkpointing)
    ref = None
    if args.kl_coef and args.lora_rank:
        ref = partial(policy, adapters=False)
    elif args.kl_coef:
        initial, _ = load_model(args.model, tokenizer)
        ref = shard(LogprobModel(initial.requires_grad_(False)), device, args.precision)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    last_step, progress = open_run(args, policy, optimizer, report)
    stops = catch_signals()
    minibatches_per_epoch = args.prompts_per_step * args.group_size // args.minibatch_size

    for step in range(last_step + 1, args.num_steps + 1):  # step 0 only evaluates
        torch.manual_seed(((args.seed * 1_000_003 + step) * 1_000_003 + rank) % 2**63)
        metrics, group, clock = {}, None, {"start": time.perf_counter()}
        if step > 0:
            # rollout: sample completions, score them, compare each with its group
            prompts = pick_rows(train_prompts, (step - 1) * args.prompts_per_step, args.prompts_per_step, args.seed)
            prompts = prompts[rank::world_size]
            with gathered(policy) as sampler:
                batch, texts = rollout(sampler, tokenizer, prompts, args.group_size, args.temperature, stop_ids, args)
            asked = [prompt for prompt in prompts for _ in range(args.group_size)]
            samples = zip(batch["completion_ids"].tolist(), texts, asked, batch["rewards"].tolist())
            steps = [find_steps(tokenizer, *sample) for sample in samples]
            batch["advantages"] = compute_advantages(steps, args.group_size, batch["completion_mask"])
            clock["rollout"] = time.perf_counter()

            # log-probabilities before the update, of rows that need them: the first minibatch is on policy
            orders = [torch.randperm(len(texts), device=device) for _ in range(args.update_epochs)]
            minibatches = [rows for order in orders for rows in order.tensor_split(minibatches_per_epoch)]
            # Rows of zero advantage have no policy gradient; they still count in the divisor.
            live = (batch["advantages"] != 0).any(1) | (ref is not None)  # (B,)
            first_epoch = [rows[live[rows]] for rows in minibatches[:minibatches_per_epoch]]
            later = first_epoch[1:] if args.update_epochs == 1 else first_epoch
            batch["old_logprobs"] = lookup_logprobs(policy, batch, later, args.microbatch_tokens, args.temperature)
            if ref is not None:
                batch["ref_logprobs"] = lookup_logprobs(
                    ref, batch, first_epoch, args.microbatch_tokens, args.temperature
                )
            clock["logprob"] = time.perf_counter()

            # update: one optimizer step per minibatch
            totals, divisors, grad_norms = Counter(), [], []
            for update, rows in enumerate(minibatches):
                divisors.append(args.minibatch_size)  # a mean over completions
                rows = rows[live[rows]]
                totals.update(accumulate_gradients(policy, batch, rows, divisors[-1], update == 0, args))
                optimizer_step = (step - 1) * len(minibatches) + update + 1
                learning_rate = args.learning_rate * min(1.0, optimizer_step / max(1, args.warmup_steps))
                grad_norms.append(step_optimizer(policy, optimizer, learning_rate, args.max_grad_norm))
            clock["update"] = time.perf_counter()

            # metrics of the whole step over all ranks, and its first group
            signals = batch | {"advantages": batch["advantages"].any(1)}
            totals["rollout/steps"] = sum(map(len, steps)) / len(steps) - 1
            metrics = step_metrics(totals, sum(divisors), signals, args.group_size, clock)
            if rank == 0 and not metrics["rollout/steps"]:
                warnings.warn("step_rewards found no step in a whole rollout: this is GRPO", stacklevel=1)
            metrics |= {"optim/grad_norm": sum(grad_norms) / len(grad_norms), "optim/learning_rate": learning_rate}
            metrics["optim/skipped"] = sum(not math.isfinite(norm) for norm in grad_norms)
            group = {key: prompts[0][key] for key in ("prompt", "answer")} | {"completions": texts[: args.group_size]}
            group |= {key: batch[key][: args.group_size].tolist() for key in ("rewards", "truncated")}

        # evaluation, logs, saving
        if eval_prompts and (step % args.eval_every == 0 or step == args.num_steps) and not all_reduce(len(stops)):
            with gathered(policy) as sampler:
                metrics |= evaluate(sampler, tokenizer, eval_prompts, stop_ids, args, step, rank, world_size)
        if rank == 0:
            log_step(args, step, metrics, group, progress)
        stopping = all_reduce(len(stops)) > 0
        if step > 0 and (stopping or step == args.num_steps or step % args.save_every == 0):
            save(args.run_dir, policy, optimizer, tokenizer, step)
        if stopping:
            break

    end_run(args, progress, stops)


# ---- below: plumbing, byte-identical in every script that has it, in the order in which main calls it

MODEL, DATASET = (str(Path(__file__).resolve().parent / name) for name in ("models/tiny", "data/addition"))
EVAL_SAMPLES = 4  # completions per held-out prompt, for pass@1 and pass@4
LORA_ALPHA = 32  # adapters count alpha / rank times
MAY_BE_0 = "seed num_steps rollout_batch_size warmup_steps weight_decay lora_rank eval_prompts".split()
MAY_BE_0 += "kl_coef overlong_buffer missing_stop_penalty ptx_coef gamma gae_lambda label_smoothing".split()
MAY_CHANGE = "resume num_steps learning_rate value_learning_rate eval_every save_every track".split()
MAY_CHANGE += "microbatch_tokens rollout_batch_size gradient_checkpointing".split()  # on --resume
CLEANUP = contextlib.ExitStack()
BAR = partial(tqdm, leave=False, delay=5, mininterval=2, disable=os.environ.get("RANK", "0") > "0")


def init_ranks():
    """Join a launcher's ranks, or be a group of one; return rank, world size and device."""
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=timedelta(hours=2), **alone)
        CLEANUP.push(lambda error, *_: error is None and dist.destroy_process_group())
    return dist.get_rank(), dist.get_world_size(), device


def resolve_args(args):
    """Fill in what was not given: from the run to resume, else by the model."""
    given = {f.name: getattr(args, f.name) for f in fields(args) if getattr(args, f.name) != f.default}
    if args.resume is not None:
        if fixed := [f"--{name.replace('_', '-')}" for name in given if name not in MAY_CHANGE]:
            raise SystemExit(f"--resume {args.resume}: a run keeps its {', '.join(fixed)}")
        with one_line(f"--resume {args.resume}: no run, of another script, or damaged"):
            saved = json.loads(Path(args.resume, "args.json").read_text())
            settings = {name: saved[name] for name in vars(args)}
            return Args(**settings | given | {"run_dir": args.resume})
    own, tiny = (Path(name, "tokenizer.json") for name in (given.get("model", MODEL), MODEL))
    embedded = own.is_file() and tiny.is_file() and own.read_bytes() == tiny.read_bytes()  # or made of it
    if torch.cuda.is_available():  # a T4 would only emulate bfloat16
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = not embedded and torch.cpu.get_capabilities().get("avx512_bf16")
    defaults = {f.name: f.metadata["embedded" if embedded else "real"] for f in fields(args) if f.metadata}
    defaults["precision"] = "bfloat16" if native else "float32"
    with contextlib.suppress(Exception):  # load_model reports
        named = json.loads(own.with_name("config.json").read_text())["task_defaults"]
        defaults |= (taken := {name: named[name] for name in {*defaults} & {*named} - {*given}})
        if taken and dist.get_rank() == 0:
            print(f"{own.parent}/config.json: task_defaults {taken}")
    now = all_reduce(time.time(), dist.ReduceOp.MAX)  # on all ranks the same
    run_dir = f"runs/{Path(__file__).stem}__{args.seed}__{datetime.fromtimestamp(now):%Y%m%d-%H%M%S-%f}"
    return Args(**{"model": MODEL, "dataset": DATASET, "run_dir": run_dir} | defaults | given)


@contextlib.contextmanager
def one_line(intro, of_user=False):
    """What fails inside ends the run with one line, of_user with its place in the code."""
    try:
        yield
    except (Exception, dcp.api.CheckpointException) as error:
        reason = " ".join(f"{type(error).__name__}: {error.__cause__ or error}".split())
        places = [place for place in traceback.extract_tb(error.__traceback__) if "/lib/python" not in place[0]]
        intro += f" {places[-1][0]}, line {places[-1][1]}" * of_user
        raise SystemExit(re.sub("(.{150}).+(.{150})", r"\1 ... \2", f"{intro}: {reason}")) from None


def all_reduce(values, op=dist.ReduceOp.SUM):
    """A number, or a list of them, reduced over ranks in float64."""
    values = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    if dist.is_initialized():
        dist.all_reduce(values, op)
    return values.tolist()


def check_args(args, world_size):
    """Exit with one line if the settings cannot work."""
    completions = getattr(args, "prompts_per_step", 0) * getattr(args, "group_size", 1)
    for name, value in vars(args).items():
        flag, zero = f"--{name.replace('_', '-')} {value}", name in MAY_BE_0
        most = 1 if name.endswith("learning_rate") else math.inf
        kind = value is not None and re.search(r"\bint|float", str(Args.__annotations__[name]))
        if kind and not (type(value).__name__ in ("int", kind[0]) and (1e-30 < value < most or value == 0 and zero)):
            raise SystemExit(f"{flag}: must be {'>=' if zero else '>'} 0 and < {most}")
        if name in ("prompts_per_step", "minibatch_size") and (completions % value or value % world_size):
            raise SystemExit(f"{flag} does not divide the {completions or value} completions over {world_size} ranks")
        if name == "precision" and value not in ("bfloat16", "float32"):
            raise SystemExit(f"{flag}: must be bfloat16 or float32")


def load_tokenizer(name, flag="--model"):
    """The tokenizer of a model."""
    transformers.logging.set_verbosity_error()  # what matters is said in one line
    transformers.logging.disable_progress_bar()
    with one_line(f"{flag} {name}: no model (in a run: checkpoint/) or tokenizer here or on the hub"):
        tokenizer = AutoTokenizer.from_pretrained(name)
        if len(tokenizer) < 2 or tokenizer.chat_template == "":
            raise ValueError("its tokenizer or chat template is empty")
        return tokenizer


def load_prompts(dataset, tokenizer, system_prompt, max_prompt_length, num_held_out):
    """Training and held-out prompts, and a line about each split."""
    limits = {"system_prompt": system_prompt, "max_prompt_length": max_prompt_length}
    return load_rows(dataset, num_held_out, partial(read_prompt, tokenizer=tokenizer, **limits))


def load_rows(dataset, num_held_out, read, flag="--dataset"):
    """Training and held-out rows as read makes them, and a line about each split."""
    kind = re.search(r"\.(json|csv|parquet)l?$", str(dataset).lower())
    with one_line(f"{flag} {dataset}: no json, jsonl, csv, parquet, folder or hub data, or empty or damaged"):
        name = [str(dataset)] if Path(dataset).exists() else str(dataset).split(":")
        splits = load_dataset(kind[1], data_files=str(dataset).replace("[", "[[]")) if kind else load_dataset(*name)
        train, test = list(splits["train"]), splits.get("test") or splits.get("validation")
    source = list(test or train)
    held_out = sorted(torch.randperm(len(source), generator=torch.Generator().manual_seed(0))[:num_held_out].tolist())
    rest = range(len(train)) if test else sorted({*range(len(train))} - {*held_out})
    loaded, report = [], []
    for split, rows, places in (("training", train, rest), ("held-out", source, held_out)):
        items = []  # texts are reasons to drop a row
        for place in places:
            with one_line(f"{flag} {dataset}: {split} row {place + 1}, {rows[place]!r:.80}"):
                items.append(read(rows[place]))
        kept = [item for item in items if not isinstance(item, str)]
        dropped = Counter(item for item in items if isinstance(item, str))
        text = json.dumps(kept, default=lambda value: type(value).__name__)
        names = kept[0].get("columns", "") if kept else ""
        report.append(f"{len(kept)} {split} rows {names}({zlib.crc32(text.encode()):08x}), dropped: {dict(dropped)}")
        if not kept and (split == "training" or num_held_out):
            raise SystemExit(f"{flag} {dataset}: too few rows for --eval-prompts {num_held_out}: {report[-1]}")
        loaded.append(kept)
    return *loaded, report


def read_prompt(row, tokenizer, system_prompt, max_prompt_length):
    """The row with prompt, answer (or None) and prompt_ids, or why it is dropped."""
    prompts = [name for name in ("prompt", "question", "problem") if name in row][:1]
    answers = [name for name in ("answer", "solution", "ground_truth") if name in row][:1]
    if not prompts:
        raise ValueError(f"no column prompt, question or problem, but {', '.join(row)}")
    prompt, answer = row[prompts[0]], row[answers[0]] if answers else None
    asked = prompt[-1].get("content") if prompt and isinstance(prompt, list) else prompt or ""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
        raise ValueError(f"an answer must be a text or a number, not {answer!r:.80}")
    if not str(asked).strip() or (answers and (answer is None or parse_answer(str(answer)) in (None, "nan"))):
        return "without prompt or answer"
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        return "ends in the assistant's turn"
    prompt_ids = encode_prompt(tokenizer, prompt, system_prompt)
    if not 0 < len(prompt_ids) <= max_prompt_length:
        return f"not 1 to {max_prompt_length} tokens"
    read = {"prompt": prompt, "answer": str(answer) if answers else None, "prompt_ids": prompt_ids}
    return {**row, **read, "columns": f"of {', '.join(prompts + answers)} "}


def parse_answer(text):
    """A number or fraction as a Fraction, another text normalised, None if nothing is left."""
    text = text.strip().removeprefix("**").removesuffix("**").strip()
    if len(text) > 1000:
        return text
    for written, meant in (("\u2212", "-"), ("\\!,", ","), ("\\$", "$"), ("\\%", "%")):
        text = text.replace(written, meant)
    text = text.removesuffix(".").strip()
    while text[:1] + text[-1:] in ("{}", "$$") and not re.search("[{}$]", text[1:-1]):
        text = text[1:-1].strip()
    flat = re.sub(r"^([+-]? ?)\\[dt]?frac ?\{([+-]?[0-9]+)\} ?\{([+-]?[0-9]+)\}$", r"\1\2/\3", text)
    number = r"((?:[1-9][0-9]{0,2}(?:(?:,|\\,|\{,\})[0-9]{3})+|[0-9]*)(?:\.[0-9]+)?)"
    match = re.fullmatch(rf"(?:[$£€] ?)?([+-]?) ?(?:[$£€] ?)?{number}(?: ?/ ?([+-]?[0-9]+))?", flat)
    if match and re.search("[0-9]", match[2]) and int(match[3] or 1):
        return Fraction(match[1] + re.sub(r"[^0-9.]", "", match[2])) / int(match[3] or 1)
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox) ?\{([^{}\\]*)\}", r"\1", text)
    return re.sub(r" ?([^\w ]) ?", r"\1", " ".join(text.split())) or None


def encode_prompt(tokenizer, prompt, system_prompt):
    """Token ids of a prompt, a text or a list of messages, up to the completion."""
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if not all(isinstance(message.get(key), str) for message in messages for key in ("role", "content")):
        raise ValueError(f"a prompt must be a text or messages of role and content, not {prompt!r:.80}")
    if system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if tokenizer.chat_template is None:
        ids = tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
        return ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids  # some always add it
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def load_model(name, tokenizer, lora_rank=0):
    """Load a language model; return it and its stop tokens, which checkpoints will name."""
    with one_line(f"--model {name}: cannot be loaded"):
        model, info = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, output_loading_info=True)
        heads = {key for key in info["unexpected_keys"] if key.count(".") == 1}  # a reward model's
        if wrong := sorted(info["missing_keys"] | heads):
            raise ValueError(f"it lacks {wrong[0]}, or a place for it: is it whole, a language model?")
        if not (stop_ids := find_stop_ids(model, tokenizer)):
            raise ValueError("its tokenizer names no eos_token: nothing ends a completion")
    model.get_input_embeddings().padding_idx = None  # that token may be in use, and would get no gradient
    # Its own may be refused when saved: a temperature without do_sample, say.
    model.generation_config = transformers.GenerationConfig(eos_token_id=stop_ids)
    return add_adapters(model, lora_rank) if lora_rank else model, stop_ids


def find_stop_ids(model, tokenizer):
    """Every id that ends a completion."""
    sources = model.generation_config, model.config.get_text_config(), tokenizer
    named = [find_turn_end(tokenizer), *(source.eos_token_id for source in sources)]
    return sorted({*sum((ids if isinstance(ids, list) else [ids] for ids in named), [])} - {None})


def find_turn_end(tokenizer):
    """The id that ends a turn in the chat template, else the end of text."""
    if tokenizer.chat_template is None:
        return tokenizer.eos_token_id
    chat = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"}]
    tail = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("Answer")[2].strip(" \n\t\u2581")
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    return next((i for i in ids if i in tokenizer.added_tokens_decoder), tokenizer.eos_token_id)


def add_adapters(model, rank):
    """Freeze the model; add two thin matrices to each linear layer of a block (arXiv 2106.09685)."""
    model.requires_grad_(False)
    torch.manual_seed(0)  # the same adapters on every rank
    model.adapters, scale = True, LORA_ALPHA / rank
    layers = [layer for block in find_blocks(model) for layer in block.modules() if type(layer) is nn.Linear]
    if not layers:
        raise SystemExit(f"--lora-rank {rank}: this model has no linear layers to adapt")

    def forward(layer, inputs):
        rows = inputs.flatten(0, -2)  # (N, D)
        adapted = rows.new_zeros(len(rows), layer.out_features)
        if model.adapters:
            adapted = layer.lora_b(layer.lora_a(rows)) * scale
        # One product, rounded once. Added to an output that is bfloat16 already, small changes would be lost.
        output = torch.addmm(adapted, rows, layer.weight.T)
        if layer.bias is not None:
            output = output + layer.bias
        return output.unflatten(0, inputs.shape[:-1])

    for layer in layers:
        layer.lora_a = nn.Linear(layer.in_features, rank, bias=False)
        layer.lora_b = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(layer.lora_b.weight)  # at first nothing changes
        layer.forward = partial(forward, layer)
    return model


def find_blocks(model):
    """The transformer blocks of a model; FSDP renames their class."""
    return [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]


def check_model(model, prompt_ids, max_length):
    """Exit unless generate, by cache and own logits, and token_logprobs agree."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_length
    if max_length > context:
        raise SystemExit(f"{max_length} tokens of prompt and completion are over the context of {context}")
    prompts = pad_left([prompt_ids[: 1 + i // 2] for i in range(16)], 0, model.device)
    half = range(0, model.config.get_text_config().vocab_size, 2)  # stop ids: rows end one by one
    with one_line(f"--model {model.name_or_path}: damaged, or of another kind"), torch.no_grad():
        *completions, sampled = generate(model, *prompts, 8, 1.0, half, 0, with_logprobs=True)
        gap = (token_logprobs(model, *prompts, *completions, 1.0)[0] - sampled).abs().max().item()
        if not gap < 0.01:
            raise ValueError(f"its log-probabilities with and without cache are {gap:.2g} apart")


def pad_left(rows, pad_id, device):
    """Ids and mask (B, P) of lists of token ids, padded on the left."""
    ids = [torch.tensor(row) for row in rows]  # one copy, not one a row
    padded = partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
    return padded(ids, padding_value=pad_id).to(device), padded([torch.ones_like(row) for row in ids]).to(device)


@torch.no_grad()
def generate(
    model, prompt_ids, prompt_mask, max_completion_length, temperature, stop_ids, pad_id, with_logprobs=False, edit=None
):
    """Sample a completion of each prompt, up to and including the first stop id; edit may write over it.

    prompts (B, P) left-padded -> ids, mask (B, T) right-padded, log-probabilities if asked for, 0 where masked.
    """
    stop_ids = torch.tensor(list(stop_ids), device=prompt_ids.device)
    completion_ids = prompt_ids.new_full((len(prompt_ids), max_completion_length), pad_id)
    completion_mask = torch.zeros_like(completion_ids)
    sampler_logprobs = completion_mask.float()
    # A prompt is read once, its cache repeated.
    both = torch.cat([prompt_ids, prompt_mask.long()], 1)  # (B, 2 P)
    unique, running = torch.unique_consecutive(both, dim=0, return_inverse=True)
    (ids, mask), cache = unique.chunk(2, 1), None
    rows = torch.arange(len(running), device=running.device)  # those that have not ended
    for t in BAR(range(max_completion_length), "tokens"):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        inputs = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
        output = model(input_ids=ids, **inputs, use_cache=True, logits_to_keep=1)
        logits, cache = output.logits[:, -1], output.past_key_values
        if t == 0:
            logits, mask = logits[running], prompt_mask
            cache.reorder_cache(running)
        tokens, logprobs = sample_tokens(logits, temperature)
        ended = torch.isin(tokens, stop_ids)
        if edit is not None:
            tokens, logprobs, ended = edit(rows, tokens, logprobs, ended)
        completion_ids[rows, t], completion_mask[rows, t], sampler_logprobs[rows, t] = tokens, 1, logprobs
        running = (~ended).nonzero().squeeze(1)
        if len(running) == 0:
            break
        if len(running) < len(rows):  # finished rows leave the batch
            rows, tokens, mask = rows[running], tokens[running], mask[running]
            cache.reorder_cache(running)
        ids, mask = tokens.unsqueeze(1), nn.functional.pad(mask, (0, 1), value=1)  # (B, 1), (B, P + t + 1)
    return (completion_ids, completion_mask, sampler_logprobs)[: 3 if with_logprobs else 2]


def sample_tokens(logits, temperature):
    """Draw ids (B,) of exactly softmax(logits / temperature), at 0 greedily; and their log-probabilities."""
    if temperature == 0:
        return logits.argmax(-1), torch.zeros(len(logits), device=logits.device)
    probabilities = (logits.float() / temperature).softmax(-1)  # (B, V)
    # In float32 sums rare ids of a large vocabulary never come.
    cdf = probabilities.cumsum(-1, dtype=torch.float64)
    draws = torch.rand(len(cdf), 1, dtype=cdf.dtype, device=cdf.device) * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, draws, right=True).clamp(max=cdf.shape[1] - 1)  # (B, 1)
    return tokens.squeeze(1), probabilities.gather(1, tokens).squeeze(1).log()


def token_logprobs(model, prompt_ids, prompt_mask, completion_ids, completion_mask, temperature):
    """Log-probabilities of completion tokens at the sampling temperature, and entropies, without gradient.

    prompts (B, P), completions (B, T) -> logprobs, entropies (B, T) in nats, 0 where masked.
    """
    completion_mask = completion_mask.bool()
    ids = torch.cat([prompt_ids, completion_ids], 1)  # (B, P + T)
    mask = torch.cat([prompt_mask.bool(), completion_mask], 1)
    # With padding on the right a causal model needs neither mask nor position ids.
    order = (~mask).long().argsort(dim=1, stable=True)[:, : mask.sum(1).max()]
    hidden = model.base_model(input_ids=ids.gather(1, order), use_cache=False).last_hidden_state  # (B, W, D)
    rows, columns = completion_mask.nonzero(as_tuple=True)  # (N,), once: a device waits
    # A token is predicted from the position before it.
    hidden = hidden[rows, (mask.cumsum(1) - 2)[rows, prompt_ids.shape[1] + columns]]  # (N, D)
    found = head_logprobs(model, hidden, completion_ids[rows, columns], temperature)  # two of (N,)
    blank = found[0].new_zeros(completion_mask.shape)
    return [blank.masked_scatter(completion_mask, values) for values in found]


def head_logprobs(model, hidden, targets, temperature):
    """Log-probabilities of targets (N,), and entropies, under softmax(head(hidden) / temperature)."""
    head, given = model.get_output_embeddings(), vars(model.config.get_text_config()).get
    scale = given("logit_scale") or given("lm_head_multiplier") or 1 / (given("logits_scaling") or 1)
    cap = given("final_logit_softcapping")

    def chunk_logprobs(hidden, targets):
        logits = head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # (n, V)
        logits = logits if scale == 1 else logits * scale
        logits = (logits / cap).tanh() * cap if cap else logits
        logprobs = (logits if temperature == 1 else logits / temperature).log_softmax(-1)
        known = logprobs.detach()  # last: not computed anew
        return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), -(known.exp() * known).sum(-1)

    # Never N x V logits at once: chunks, computed anew backwards.
    size = max(1, 2 ** (26 if hidden.is_cuda else 25) // head.weight.shape[0])
    run = partial(checkpoint, chunk_logprobs, use_reentrant=False) if len(hidden) > size else chunk_logprobs
    parts = [run(*chunk) for chunk in zip(hidden.split(size), targets.split(size))]
    return [torch.cat(part) for part in zip(*parts)]


def shard(policy, device, precision="float32", gradient_checkpointing=False):
    """Shard over the ranks (FSDP2), block by block; blocks may compute in bfloat16, all else is float32."""
    blocks = [block for model in policy.children() for block in find_blocks(model)]
    frozen = {weight for weight in policy.parameters() if not weight.requires_grad}
    alone, dtypes = dist.get_world_size() == 1, MixedPrecisionPolicy()
    if not blocks and (precision == "bfloat16" or not alone):
        raise SystemExit("this model names no blocks: --precision float32, one process")
    if precision == "bfloat16":
        torch.set_float32_matmul_precision("high")  # TF32 for the LM head
        dtypes = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        torch.manual_seed(0)  # the same noise on every rank
        for block in blocks:
            block.forward = partial(in_bfloat16, block.forward)
            for weight in block.parameters():
                weight.data = rounded = weight.data.bfloat16()  # for good, if frozen
                if weight.requires_grad:  # noise that rounds away: small steps reach it
                    noise = torch.randint(-32767, 32768, weight.shape, dtype=torch.int32) * (rounded != 0)
                    weight.data = (rounded.float().view(torch.int32) + noise).view(torch.float32)
    for block in blocks if gradient_checkpointing else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if precision == "bfloat16" or not alone:
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        ignored = frozen if alone else None  # which FSDP would hold twice
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=dtypes, ignored_params=ignored)
        # A root would stay gathered after its forward pass, a frozen one for ever.
        fully_shard(policy, mesh=mesh, reshard_after_forward=True, ignored_params=ignored)
        for module in (policy, *blocks):  # gradients are summed over ranks, not averaged
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return policy.to(device)


def in_bfloat16(forward, *args, **kwargs):
    """Call a block in bfloat16 on what is float32 outside."""
    return cast(forward(*cast(args, torch.bfloat16), **cast(kwargs, torch.bfloat16)), torch.float32)


def cast(value, dtype):
    """Cast floating-point tensors in tuples and dictionaries."""
    if isinstance(value, dict):  # a mask's lowest number would become -inf
        return {key: item if key == "attention_mask" else cast(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(cast(item, dtype) for item in value)
    return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value


class LogprobModel(nn.Module):
    """The unit that is sharded: the LM head, too, is gathered for its forward pass."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs, adapters=True):
        self.model.adapters = adapters  # without them it is what it was before training
        return token_logprobs(self.model, *inputs)


def open_run(args, policy, optimizer, report):
    """Write args.json, or load a state; return the last step, or -1, and a bar."""
    run_dir, last_step, rank, ranks = Path(args.run_dir), -1, dist.get_rank(), dist.get_world_size()
    run = {"script": Path(__file__).stem, "entry": Path(sys.argv[0]).name, "ranks": ranks, "data": report}
    weights = (getattr(weight, "_local_tensor", weight).detach() for weight in policy.parameters())
    bits = sum(weight.float().view(torch.int32).sum() for weight in weights)
    run["initial_weights"] = all_reduce(bits % 2**32) % 2**32
    if args.resume is not None:
        before = run | json.loads((run_dir / "args.json").read_text())["run"]
        if changed := [f"{name} was {before[name]}, now {run[name]}" for name in run if run[name] != before[name]]:
            raise SystemExit(f"--resume {run_dir}: {'; '.join(changed)}")
        last_step = load_state(run_dir, policy, optimizer)
        if last_step > args.num_steps:
            raise SystemExit(f"--num-steps {args.num_steps}: the run has done {last_step} already")
    if rank == 0:
        with contextlib.suppress(OSError):  # after | head -1
            print(*report, run_dir, sep="\n")
        text = json.dumps(asdict(args) | {"resume": None, "run": run}, indent=2, default=str)
        with one_line(f"--run-dir {run_dir} or --track: choose another, or --resume it"):
            run_dir.mkdir(parents=True, exist_ok=args.resume is not None)
            (run_dir / "args.unfinished").write_text(text)
            (run_dir / "args.unfinished").replace(run_dir / "args.json")
            wandb.init(name=run_dir.name, dir=run_dir, config=asdict(args), mode=None if args.track else "disabled")
    return last_step, CLEANUP.enter_context(tqdm(total=args.num_steps, initial=max(0, last_step), disable=rank > 0))


def load_state(run_dir, policy, optimizer):
    """Load the newest state, cut off what was logged after it, and return its step."""
    with one_line(f"--resume {run_dir}: there is no whole state to go on from"):
        path = max((run_dir / "state").glob("[0-9]*"))
        model, moments = dcp_state.get_state_dict(policy, optimizer)
        dcp.load({"model": model}, checkpoint_id=path)
        dcp.load({"optimizer": moments}, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
        dcp_state.set_state_dict(policy, optimizer, model_state_dict=model, optim_state_dict=moments)
    for log in [*run_dir.glob("metrics.jsonl"), *run_dir.glob("*samples.jsonl")] * (dist.get_rank() == 0):
        with one_line(f"{log} is damaged"), log.open("r+b") as file:
            kept = [line for line in file if line.endswith(b"\n") and json.loads(line)["step"] <= int(path.name)]
            file.truncate(sum(map(len, kept)))
    return int(path.name)


def catch_signals():
    """A list that fills when Ctrl-C or SIGTERM asks to stop; a second stops at once."""
    received = []

    def request_stop(signum, _frame):
        received.append(signum)
        signal.signal(signum, before[signum])
        os.write(2, b"\nstopping after this step; once more to stop at once\n")

    before = {signum: signal.signal(signum, request_stop) for signum in (signal.SIGINT, signal.SIGTERM)}
    CLEANUP.callback(lambda: [signal.signal(*handler) for handler in before.items()])
    return received


def pick_rows(rows, start, count, seed):
    """Return rows from a start in endless passes over all, each in its own order."""
    order = []
    for epoch in range(start // len(rows), (start + count - 1) // len(rows) + 1):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        order += torch.randperm(len(rows), generator=generator).tolist()
    return [rows[i] for i in order[start % len(rows) :][:count]]


@contextlib.contextmanager
def gathered(policy):
    """Inside, each rank has all weights, and samples from the model at its own pace."""
    shards = [module for module in (policy, *policy.model.modules()) if isinstance(module, FSDPModule)]
    hooks = [(module._forward_pre_hooks, module._forward_hooks) for module in shards]
    for module in shards:
        module.unshard()
        module._forward_pre_hooks, module._forward_hooks = {}, {}  # FSDP's cost a fifth of a rollout
    try:
        yield policy.model
    finally:
        for module, before in zip(shards, hooks):
            module._forward_pre_hooks, module._forward_hooks = before
            module.reshard()


def rollout(model, tokenizer, prompts, num_samples, temperature, stop_ids, args):
    """Sample and score completions of each prompt; return tensors (B, ...), texts."""
    batch, texts = sample_completions(model, tokenizer, prompts, num_samples, temperature, stop_ids, args)
    with one_line(f"score_completions has to return {len(texts)} finite numbers; are there answers?", True):
        rewards = score_completions(texts, [prompt for prompt in prompts for _ in range(num_samples)])
        batch["rewards"] = torch.tensor([*map(float, rewards)], device=batch["lengths"].device)
        if len(rewards) != len(texts) or not batch["rewards"].isfinite().all():
            raise ValueError(f"{rewards!r:.200}")
    return batch, texts


def sample_completions(model, tokenizer, prompts, num_samples, temperature, stop_ids, args):
    """Sample num_samples completions of each prompt, adjacent; return tensors, texts."""
    rows = [prompt["prompt_ids"] for prompt in prompts for _ in range(num_samples)]
    prompt_ids, prompt_mask = pad_left(rows, 0, next(model.parameters()).device)
    size, parts = args.rollout_batch_size or len(rows), []
    make_writer = globals().get("make_writer", lambda *_: None)  # of grpo_tools.py
    for chunk in zip(prompt_ids.split(size), prompt_mask.split(size)):
        edit = make_writer(len(chunk[0]), tokenizer, args)
        parts.append(generate(model, *chunk, args.max_completion_length, temperature, stop_ids, 0, True, edit))
    ids, mask, logprobs = (torch.cat(part) for part in zip(*parts))  # (B, T)
    lengths = mask.sum(1)  # (B,)
    completions = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist())]
    truncated = torch.tensor([row[-1] not in stop_ids for row in completions], device=ids.device)
    batch = {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": ids, "completion_mask": mask}
    batch |= {"sampler_logprobs": logprobs, "lengths": prompt_mask.sum(1) + lengths, "truncated": truncated}
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    # A thought that the chat template has opened is the completion's.
    opened = [tokenizer.decode(row[-9:]).rstrip().endswith("<think>") for row in rows]
    return batch, ["<think>" * begun + text for begun, text in zip(opened, texts)]


def extract_answer(text):
    """The final answer in a text: its last \\boxed{}, else after ####, else <answer>."""
    # Thoughts do not count, nor one that the prompt opened.
    text = re.sub("<think>.*?(</think>|\\Z)", " ", text, flags=re.DOTALL).rpartition("</think>")[2]
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


@torch.no_grad()
def lookup_logprobs(policy, batch, minibatches, max_tokens, temperature):
    """Log-probabilities (B, T) of the rows of these minibatches, without gradient; 0 in the others.

    The passes are those of the update: in bfloat16 a result depends on the rows beside it.
    """
    logprobs = torch.zeros(batch["completion_ids"].shape, device=batch["completion_ids"].device)
    for rows in minibatches:
        for part in microbatches(batch, rows, max_tokens):
            inputs = [part[key] for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")]
            result, _ = policy(*inputs, temperature)
            logprobs = logprobs.to(result.dtype).index_copy(0, part["rows"], result[: len(part["rows"])])
    logprobs.sum().item()  # waits for the device, whose time is of this phase
    return logprobs


def microbatches(batch, rows, max_tokens):
    """Cut rows, longest first, into parts of a row, or of up to max_tokens with padding."""
    parts, longest, lengths = [], 0, batch["lengths"][rows].tolist()
    for place in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if parts and (len(parts[-1]) + 1) * longest <= max_tokens:
            parts[-1].append(place)
        else:
            parts.append([place])
            longest = lengths[place]
    # Passes are collective: ranks with fewer parts add a row with masks of 0.
    parts += [[]] * (int(all_reduce(max(1, len(parts)), dist.ReduceOp.MAX)) - len(parts))
    for places in BAR(parts, "passes"):
        index = rows[places] if places else rows.new_zeros(1)
        part = {key: value[index] for key, value in batch.items()}
        masks = [key for key in part if key.endswith("mask") and key != "prompt_mask"]
        yield part | {key: part[key] * bool(places) for key in masks} | {"rows": index[: len(places)]}


def step_optimizer(policy, optimizer, learning_rate, max_grad_norm):
    """Clip the gradients and make a step, unless they are 0 or not finite; return their norm."""
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
    grad_norm = float(grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm)
    optimizer.skipped = 0 if math.isfinite(grad_norm) else getattr(optimizer, "skipped", 0) + 1
    if optimizer.skipped == 3:
        raise SystemExit(f"gradients {grad_norm} three times in a row: is --learning-rate too high?")
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    if 0 < grad_norm < math.inf:  # at 0 AdamW would go on in the direction it had
        optimizer.step()
    optimizer.zero_grad()
    return grad_norm


def step_metrics(totals, divisor, batch, group_size, clock):
    """Means over ranks (of policy/* over tokens, of loss/* by divisor), and the times."""
    groups = batch["rewards"].view(-1, group_size)
    own = {  # of a rank, all of which have equally many completions
        "reward/mean": groups.mean(),
        "reward/zero_std": (groups == groups[:, :1]).all(1).float().mean(),
        "rollout/live": (batch["advantages"] != 0).float().mean(),
        "rollout/length_mean": batch["completion_mask"].sum(1).float().mean(),
        "rollout/truncated": batch["truncated"].float().mean(),
        "rollout/completions": groups.numel() * dist.get_world_size(),
    }
    sums = {"ranks": 1, **totals, **own}
    sums = dict(zip(sums, all_reduce([float(value) for value in sums.values()])))
    ranks, counts = sums.pop("ranks"), {"policy": sums.pop("num_tokens"), "loss": divisor}
    counts = {name: counts.get(name.split("/")[0], ranks) for name in sums}
    metrics = {name: total / counts[name] for name, total in sums.items() if counts[name]}  # none of no tokens
    for before, (name, after) in zip(clock.values(), [*clock.items()][1:]):
        metrics[f"perf/{name}_seconds"] = after - before
    return metrics | {"perf/step_seconds": clock["update"] - clock["start"]}


def evaluate(model, tokenizer, prompts, stop_ids, args, step, rank, world_size):
    """Mean reward of greedy completions; with answers accuracy and pass@k, by is_right."""
    torch.manual_seed(args.seed % 2**63)
    rows = prompts[rank::world_size] or prompts[:1]  # there may be fewer than ranks
    batch, texts = rollout(model, tokenizer, rows, 1, 0.0, stop_ids, args)
    sums = {"num_rows": len(rows), "eval/reward": batch["rewards"].sum()}
    if rows[0]["answer"] is not None:
        _, samples = sample_completions(model, tokenizer, rows, EVAL_SAMPLES, args.temperature, stop_ids, args)
        right = [is_right(text, rows[i // EVAL_SAMPLES]["answer"]) for i, text in enumerate(samples)]
        right = torch.tensor(right).view(-1, EVAL_SAMPLES)
        sums["eval/accuracy"] = sum(is_right(text, row["answer"]) for text, row in zip(texts, rows))
        sums |= {"eval/pass@1": right.float().mean(1).sum(), f"eval/pass@{EVAL_SAMPLES}": right.any(1).sum()}
    for row, text, reward in zip(rows, texts, batch["rewards"].tolist()) if rank == 0 else ():
        sample = {"prompt": row["prompt"], "answer": row["answer"], "completion": text, "reward": reward}
        append_line(args, "eval_samples.jsonl", {"step": step} | sample)
    num_rows, *totals = all_reduce([float(total) for total in sums.values()])
    return {name: total / num_rows for name, total in zip([*sums][1:], totals)}


def append_line(args, name, row):
    """Append a row to a jsonl file of the run."""
    path = Path(args.run_dir, name)
    with one_line(f"{path}: mend it, then --resume {args.run_dir}"), path.open("a") as file:
        file.write(json.dumps(row, default=str) + "\n")


def log_step(args, step, metrics, group, progress):
    """Log metrics and group, if there is one; print what was found, and move the bar."""
    append_line(args, "metrics.jsonl", {"step": step} | metrics)
    wandb.log({"step": step} | metrics)
    progress.set_postfix({name: metrics[name] for name in ("reward/mean", "loss/mean") if name in metrics})
    progress.update() if step > 0 else progress.unpause()
    found = [f"{name[5:]} {value:.3f}" for name, value in metrics.items() if name.startswith("eval/")]
    if group is not None:
        append_line(args, "samples.jsonl", {"step": step} | group)
        progress.stuck = 0 if metrics["rollout/live"] else getattr(progress, "stuck", 0) + 1
    with contextlib.suppress(OSError):
        if found:
            tqdm.write(f"step {step}: {', '.join(found)}")
        if step == 0 and metrics.get(f"eval/pass@{EVAL_SAMPLES}") == metrics.get("eval/accuracy") == 0:
            tqdm.write(f"nothing is right: see {args.run_dir}/eval_samples.jsonl")
        if group is not None and (found or step == 1):
            tqdm.write(f"step {step}: {group['prompt']!r} -> {group['answer']!r}")  # repr: no control characters
            for text, reward, truncated in zip(group["completions"], group["rewards"], group["truncated"]):
                tqdm.write(f"  {reward:5.2f}  {text[-160:]!r}{' [cut off]' * truncated}")
        if group is not None and progress.stuck == 5:
            tqdm.write(f"step {step}: nothing to learn from in five steps: equal rewards")


def save(run_dir, policy, optimizer, tokenizer, step):
    """Write checkpoint/, a Hugging Face folder, then state/STEP, which --resume loads."""
    checkpoint, unfinished = Path(run_dir, "checkpoint"), Path(run_dir, "checkpoint.unfinished")
    state = Path(run_dir, "state", f"{step:08d}")
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(policy.model, options=options)
    for key in [key for key in weights if key.endswith(".lora_a.weight")]:
        layer = key.removesuffix("lora_a.weight")
        a, b = weights.pop(key), weights.pop(f"{layer}lora_b.weight")
        weights[f"{layer}weight"] = weights[f"{layer}weight"] + b @ a * (LORA_ALPHA / len(a))
    tied = policy.model.all_tied_weights_keys  # gathered from ranks they are two
    weights = {key: weight.float() for key, weight in weights.items() if key not in tied}
    fresh = not getattr(optimizer, "state", True)  # PPO's two have always made a step
    model, moments = dcp_state.get_state_dict(policy, optimizer)
    for values in optimizer.state.values() if fresh else ():
        values["step"].zero_()  # made for the moments
    with one_line(f"step {step} is not saved (no space left?): mend it, then --resume {run_dir}"):
        if dist.get_rank() == 0:
            policy.model.save_pretrained(unfinished, state_dict=weights)
            tokenizer.save_pretrained(unfinished)
            with contextlib.suppress(FileNotFoundError):  # it may not be removable
                checkpoint.rename(f"{checkpoint}.{time.time_ns()}")
            unfinished.rename(checkpoint)
        dcp.save({"model": model, "optimizer": moments}, checkpoint_id=state.with_name("unfinished"))
        if dist.get_rank() == 0:
            state.with_name("unfinished").rename(state)  # last: what a kill cuts short is done again
            for older in [*checkpoint.parent.glob("checkpoint.[0-9]*"), *sorted(state.parent.glob("[0-9]*"))[:-1]]:
                shutil.rmtree(older, ignore_errors=True)


def end_run(args, progress, stop_signals):
    """Print what improved and how to go on; after a signal exit as shells expect it."""
    progress.close()
    wandb.finish()
    if dist.get_rank() == 0:
        lines = [*map(json.loads, Path(args.run_dir, "metrics.jsonl").read_text().splitlines())]
        print(f"\n{lines[-1]['step']} steps in {sum(line.get('perf/step_seconds', 0) for line in lines):.0f} s")
        for name in [name for name in lines[0] if name.startswith("eval/")]:
            evaluated = [f"{line[name]:.3f}" for line in lines if name in line]
            print(f"{name[5:]:15} {' -> '.join([evaluated[0], *evaluated[1:][-1:]])}")
        if Path(args.run_dir, "checkpoint").exists():
            ranks, total = dist.get_world_size(), args.num_steps
            if lines[-1]["step"] >= total:
                total *= 2
            call = f"torchrun --shutdown-timeout 3600 --nproc-per-node {ranks}" if ranks > 1 else "python"
            print(f"checkpoint      {args.run_dir}/checkpoint, for --model and from_pretrained")
            flags = f"{shlex.join(['--resume', str(args.run_dir)])} --num-steps {total}"
            if Path(sys.argv[0]).name == Path(__file__).name:
                print(f"to go on        {call} {shlex.join(sys.argv[:1])} {flags}")
            else:  # a script that calls main, and may read no flags
                own = f"Args(resume={str(args.run_dir)!r}, num_steps={total})"
                print(f"to go on        {sys.argv[0]} with {own}, or {flags}")
    CLEANUP.close()
    if stop_signals:
        raise SystemExit(128 + stop_signals[0])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until catch_signals Ctrl-C just ends it
    getattr(sys.stdout, "reconfigure", dict)(errors="replace")
    for f in [f for f in fields(Args) if f.default is None]:  # its text names one
        Args.__annotations__[f.name] = Annotated[f.type, tyro.conf.arg(help_behavior_hint="")]
    with CLEANUP:
        main(tyro.cli(Args))
