"""GRPO with tools: an environment's replies stand in the completion, but are not trained.

Jin et al., "Search-R1: Training LLMs to Reason and Leverage Search Engines with Reinforcement Learning" (2025)
https://arxiv.org/abs/2503.09516v1, over GRPO, Shao et al. (2024), https://arxiv.org/abs/2402.03300v3, equation 3.

    J(θ) = E_q 1/G Σᵢ 1/Σₜ mᵢₜ Σₜ mᵢₜ wᵢₜ min(rᵢₜ Aᵢ, clip(rᵢₜ, 1 − ε, 1 + ε) Aᵢ)

    q, oᵢ     prompt, and the i-th of its G completions, the environment's replies included
    π(oᵢₜ)    the probability of the t-th token, given q and the tokens before it, also those of the environment
    mᵢₜ       1 where the policy sampled the token, stop tokens included; 0 where the environment wrote it
    rᵢₜ       π_θ(oᵢₜ) / π_old(oᵢₜ); π_old is the policy before the step's first update
    Aᵢ        (Rᵢ − mean R) / std R over the group, the same for every token of a completion
    wᵢₜ       min(π_old(oᵢₜ) / π_sampler(oᵢₜ), --sampler-weight-cap); π_sampler is π_old, but rounded to bfloat16
    ε         --clip-eps

Compared with grpo.py, a completion has turns: where the policy ends one, the completion's Environment replies, and the
policy goes on. Loss, entropy and means over tokens leave out the replies; --max-completion-length counts them. There
is no KL term and no reference model.

Departures from the papers are those of grpo.py. The environment is a calculator; that of Search-R1 is a search engine.

    python grpo_tools.py                                                                    # the settings TINY below
    python grpo_tools.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k:main     # those of Args, on 24 GB
"""

import json
import operator
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from functools import cache, partial
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
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.integrations import sdpa_attention

RANK = int(os.environ.get("RANK", 0))  # torchrun sets these
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
HERE = Path(__file__).resolve().parent


@dataclass
class Args:
    """Train a language model with GRPO in an environment, such as a tool."""

    # the algorithm
    group_size: int = 8
    """completions per prompt, G in the paper"""
    clip_eps: float = 0.2
    """epsilon in eq. 3; the paper does not give its value"""
    tool_tokens: int = 512
    """maximum tokens of a reply, or of each message in it"""
    sampler_weight_cap: float = 2.0
    """cap on the weight w of each token, which corrects for rounding differences between sampling and training"""

    # model and data
    model: str = ""
    """folder or Hugging Face name of a causal language model (empty: the bundled model with its settings TINY)"""
    tiny: bool = False
    """use the settings TINY with --model, for checkpoints of the bundled model"""
    dataset: str = "openai/gsm8k:main"
    """file, folder or hub NAME[:CONFIG[:SPLIT]]; columns prompt (question, problem), answer (solution, ground_truth)"""
    system_prompt: str = (
        "Reason step by step. Write each calculation as 12 * 34 =, with two numbers: a calculator puts in the result. "
        "Put your final answer within \\boxed{}."
    )
    """system message before every prompt that has none (empty for models that allow none, such as Gemma 2)"""
    max_prompt_length: int = 512
    """maximum tokens per prompt; longer prompts are dropped"""

    # rollout
    num_steps: int = 200
    """training steps, each of which samples one rollout"""
    prompts_per_step: int = 64
    """prompts per rollout, over all ranks"""
    max_completion_length: int = 1024
    """maximum tokens per completion, including the stop token"""
    temperature: float = 1.0
    """temperature of rollouts and of their log-probabilities"""
    rollout_batch_size: int = 128
    """maximum completions sampled at once on each rank"""

    # optimization
    learning_rate: float = 1e-6
    """learning rate of AdamW; small models need a higher one, such as 1e-5 for 135 M parameters"""
    warmup_steps: int = 0
    """training steps over which the learning rate rises from 0; at most half of the run"""
    minibatch_size: int = 256
    """completions per optimizer step, over all ranks"""
    microbatch_tokens: int = 4096
    """maximum tokens per forward pass, including padding"""
    update_epochs: int = 1
    """passes over each rollout"""
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
    system_prompt="",
    learning_rate=1.5e-4,
    warmup_steps=4,
    num_steps=20,
    prompts_per_step=16,
    minibatch_size=64,
    microbatch_tokens=1024,
    max_prompt_length=32,
    max_completion_length=48,
    eval_every=10,
    eval_prompts=512,
    precision="float32",
)


# The task: edit Environment, and is_correct, which evaluations count as accuracy.


def is_correct(completion, answer):
    """Return whether the final answer of a completion equals the answer of a row, which may be a whole solution."""
    if answer is None:
        raise ValueError("no column answer, solution or ground_truth: write a reward that needs none")
    value, unit = parse_answer(extract_answer(completion) or "")
    right_value, right_unit = parse_answer(extract_answer(str(answer)) or str(answer))
    return value != "" and value == right_value and (unit == right_unit or "" in (unit, right_unit))


NUMBER = r"(\d{1,7}(?:\.\d{1,4})?)"
CALCULATION = rf"(?: ?\d*[.,] )?[ (]*{NUMBER} *([-+*]|/(?! *[0.]+ *=)) *{NUMBER}( *)="  # but no division by 0
FORMULA = r"(?:\\[a-z]+|[-\d.,+*/^() =])*\Z"  # all at the end of a text that may be one formula: 2\times3 + 4 =
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


class Environment:
    """What a completion meets, one instance each: edit this. It is a calculator, which writes 408 after 12 * 34 =."""

    stop_strings = ["="]  # they end a turn of the policy, as the model's stop tokens do; there may be none: []

    def __init__(self, row):
        """Begin a completion. The row has the prompt, the answer and the dataset's other columns."""
        self.row = row

    def reply(self, text):
        """Return what follows a turn with this text: another text, which may be "", or None to end the completion.

        Or messages, [{"role": "tool", "content": "408"}]: the chat template writes them, and begins a new turn.
        """
        if "=" not in text:
            return None  # the turn ended with a stop token
        calculation = re.fullmatch(CALCULATION, re.search(FORMULA, text)[0])
        if not calculation:
            return ""
        first, sign, second, blank = calculation.groups()
        result = OPERATIONS[sign](float(first), float(second))
        return f"{blank}{round(result, 4):.15g}"

    def reward(self, completion):
        """Return the reward of the text with its replies: a number, or parts, such as {"correct": 1.0, "format": 0}."""
        return float(is_correct(completion, self.row["answer"]))


def compute_advantages(rewards, group_size):
    """Normalise rewards within each group (section 4.1.2); exactly 0 where all rewards of a group are equal.

    rewards (B,), completions of one prompt adjacent -> advantages (B,).
    """
    groups = rewards.view(-1, group_size)  # (B/G, G)
    centred = groups - groups.mean(1, keepdim=True)
    advantages = centred / (groups.std(1, keepdim=True) + 1e-4)
    # The mean of equal rewards may differ from them by rounding, but main looks for advantages of exactly 0.
    equal = (groups == groups[:, :1]).all(1, keepdim=True)
    return torch.where(equal, 0.0, advantages).view(-1)  # (B,)


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
    """Return eq. 3 negated and summed over completions (the caller divides by their number), and metrics.

    advantages (B,), all else (B, L). Only logprobs get a gradient. Metrics are pairs (sum, number of tokens).
    """
    mask = completion_mask.bool()
    old_logprobs = old_logprobs.detach()
    advantages = advantages.detach().unsqueeze(1)  # (B, 1)
    # What stands outside the mask must not matter, not even inf or nan: set log-ratios to 0 there before exp.
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()  # (B, L)
    clipped_ratio = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    token_loss = -torch.min(ratio * advantages, clipped_ratio * advantages)  # (B, L)
    metrics = {}
    num_tokens = mask.sum()
    sampler_log_ratio = torch.where(mask, old_logprobs - sampler_logprobs, 0.0).detach()
    weight = sampler_log_ratio.exp().clamp(max=sampler_weight_cap)  # (B, L)
    token_loss = torch.where(mask, weight * token_loss, 0.0)
    lengths = mask.sum(1).clamp(min=1)  # (B,); microbatches adds rows without tokens
    loss = (token_loss.sum(1) / lengths).sum()

    metrics["policy/approx_kl"] = (k3(log_ratio.detach()).sum(), num_tokens)  # KL(old || policy), at first 0
    metrics["policy/clip_fraction_low"] = (((ratio < 1 - clip_eps) & (advantages < 0)).sum(), num_tokens)
    metrics["policy/clip_fraction_high"] = (((ratio > 1 + clip_eps) & (advantages > 0)).sum(), num_tokens)
    metrics["policy/sampler_kl"] = (k3(sampler_log_ratio).sum(), num_tokens)  # KL(sampler || old)
    return loss, metrics


# A batch is a dictionary of tensors with a row for each of B completions:
#   ids                                    (B, L)  a prompt, its completion with the replies, and padding
#   completion_mask                        (B, L)  1 at tokens that the policy sampled, 0 elsewhere
#   sampler_logprobs, old_logprobs         (B, L)  log-probability of each token in the mask, 0 elsewhere
#   advantages, total_lengths, truncated   (B,)    lengths with the prompt; truncated: up to --max-completion-length


def main(args):
    device = init_ranks()
    check_args(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train_rows, eval_rows = load_rows(args, tokenizer)
    policy = load_policy(args, tokenizer, device)
    sampler = load_sampler(args, tokenizer, device)
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, (0.9, 0.95), weight_decay=0.0, fused=True)
    open_run(args, device)
    first_step = load_state(args, policy, optimizer) + 1
    rank_minibatch_size = args.minibatch_size // WORLD_SIZE
    if first_step == 1:  # the sampler still has the weights that it was loaded with
        log_step(args, 0, evaluate(sampler, tokenizer, eval_rows, args))

    progress = tqdm(range(first_step, args.num_steps + 1))
    for step in progress:
        # Random numbers depend on the step, so that a resumed run continues as if it had not been interrupted.
        torch.manual_seed(hash((args.seed, step, RANK)))  # the hash of integers is the same in every process
        step_start = time.perf_counter()

        # rollout: sample a group of completions per prompt, score them, and compare each with its group
        copy_weights(policy, sampler)
        start = (step - 1) * args.prompts_per_step
        rows = pick_rows(train_rows, start, args.prompts_per_step, args.seed)[RANK::WORLD_SIZE]
        rows = [row for row in rows for _ in range(args.group_size)]  # a row for each completion
        batch, texts, scores = sample_completions(sampler, tokenizer, rows, args.temperature, args)
        rewards, rollout_metrics = sum_parts(scores, "reward")
        groups = rewards.view(-1, args.group_size)
        rollout_metrics["reward/mean"] = (rewards.sum(), len(rows))
        rollout_metrics["reward/zero_std"] = ((groups.amin(1) == groups.amax(1)).sum(), len(groups))
        rollout_metrics["rollout/length_mean"] = (batch["completion_mask"].sum(), len(rows))
        rollout_metrics["rollout/truncated"] = (batch["truncated"].sum(), len(rows))
        rollout_metrics["rollout/turns"] = ((batch["completion_mask"].diff() == 1).sum(), len(rows))
        batch["advantages"] = compute_advantages(rewards, args.group_size).to(device)
        rollout_metrics["perf/rollout_seconds"] = (time.perf_counter() - step_start, 1)

        # minibatches, each a list of microbatches, which get their log-probabilities before the update
        minibatches = []
        for indices in torch.randperm(len(rows), device=device).split(rank_minibatch_size):
            indices = indices[batch["advantages"][indices] != 0]  # those of advantage 0 have no gradient
            minibatches.append(microbatches(batch, indices, args.microbatch_tokens))
        add_logprobs("old_logprobs", policy, minibatches, args)

        # update: one optimizer step per minibatch
        warmup_steps = min(args.warmup_steps, args.num_steps // 2)
        learning_rate = args.learning_rate * min(1.0, step / max(1, warmup_steps))
        collected = [rollout_metrics]
        for minibatch in minibatches * args.update_epochs:  # the same ones in each epoch
            minibatch_loss = 0.0
            for microbatch in inner_bar(minibatch, "update"):
                mask = microbatch["completion_mask"]
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
                loss = loss / rank_minibatch_size  # all completions, also those left out; FSDP averages over ranks
                loss.backward()
                minibatch_loss += loss.detach()
                metrics["policy/entropy"] = (entropies.sum(), mask.sum())
                collected.append(metrics)
            grad_norm = step_optimizer(policy, optimizer, learning_rate, args.max_grad_norm)
            collected.append({"loss/policy": (minibatch_loss, 1), "optim/grad_norm": (grad_norm, 1)})

        # metrics, evaluation, logs, saving
        metrics = mean_metrics(collected)
        agree = metrics.get("policy/sampler_kl", 0.0) <= 0.1  # rounding gives about 0.001, a wrong mask 0.2 or nan
        if step == first_step and not agree:  # later, one rare token may give as much
            raise SystemExit(f"sampling and training disagree: a KL per token of {metrics['policy/sampler_kl']:.2g}")
        metrics["optim/learning_rate"] = learning_rate
        metrics["perf/step_seconds"] = time.perf_counter() - step_start
        if step % args.eval_every == 0 or step == args.num_steps:
            copy_weights(policy, sampler)
            metrics |= evaluate(sampler, tokenizer, eval_rows, args)
        log_step(args, step, metrics)
        log_group(args, step, rows[0], texts[: args.group_size], scores[: args.group_size])
        progress.set_postfix(reward=metrics["reward/mean"])
        if step % args.save_every == 0 or step == args.num_steps:
            save(args, policy, optimizer, tokenizer, step)

    dist.destroy_process_group()


# ---- below: identical copies of what several scripts share, in the order of use
# This script's own are only evaluate, sample_completions, take_turns, find_last_tokens, encode_reply.

LOGITS_AT_ONCE = 2**26  # at most, tokens times vocabulary: 256 MiB
inner_bar = partial(tqdm, leave=False, delay=5)  # a progress bar that appears after five seconds
VALUE = r"[+-]? ?(?:\d{1,30}|[1-9]\d{0,2}(?:,\d{3}){1,9})?(?:\.\d{1,30}|(?<=\d) ?/ ?[1-9]\d{0,29})?(?<=\d)"
UNIT = "(?:square |cubic )?(?:[cmk]?m|feet|(?:meter|mile|unit)s?)|kg|(?:degree|dollar|cent|minute|hour|day|week|year)s?"


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
    size = args.prompts_per_step * args.group_size
    if size % args.minibatch_size:
        raise SystemExit(f"--minibatch-size must divide the {size} completions of a step")
    if args.prompts_per_step % WORLD_SIZE or args.minibatch_size % WORLD_SIZE:
        raise SystemExit(f"--prompts-per-step and --minibatch-size must be multiples of the {WORLD_SIZE} ranks")


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


def evaluate(sampler, tokenizer, rows, args):
    """Return the mean reward and the accuracy of greedy completions; nothing if no rows are held out."""
    if not rows:
        return {}
    rows = rows[RANK::WORLD_SIZE] or rows[:1]  # all ranks must reduce the same metrics
    batch, texts, scores = sample_completions(sampler, tokenizer, rows, 0.0, args)
    rewards, metrics = sum_parts(scores, "eval/reward")
    metrics["eval/reward"] = (rewards.sum(), len(rows))
    metrics["eval/truncated"] = (batch["truncated"].sum(), len(rows))
    if rows[0]["answer"] is not None:
        correct = [is_correct(text, row["answer"]) for text, row in zip(texts, rows)]
        metrics["eval/accuracy"] = (sum(correct), len(rows))
    return mean_metrics([metrics])


def sample_completions(sampler, tokenizer, rows, temperature, args):
    """Sample one completion per row, each with an Environment; return a batch (see above main), texts and scores."""
    stop_ids = sampler.generation_config.eos_token_id
    completions = take_turns(sampler, tokenizer, rows, temperature, args)
    length = args.max_prompt_length + args.max_completion_length  # L
    sequences, texts, scores = [], [], []
    for environment, ids, mask, logprobs, _ in completions:
        before = [0] * (len(ids) - len(mask))
        after = [0] * (length - len(ids))
        sequence = {
            "ids": ids + after,
            "completion_mask": before + mask + after,
            "sampler_logprobs": before + logprobs + after,
            "total_lengths": len(ids),
            "truncated": len(mask) == args.max_completion_length,
        }
        sequences.append(sequence)
        texts.append(tokenizer.decode([token for token in ids[len(before) :] if token not in stop_ids]))
        scores.append(environment.reward(texts[-1]))
    batch = {}
    for name in sequences[0]:
        batch[name] = torch.tensor([sequence[name] for sequence in sequences], device=sampler.device)
    return batch, texts, scores


def take_turns(sampler, tokenizer, rows, temperature, args):
    """Let policy and environments write in turns; return (environment, ids, mask, log-probabilities, _) of each row.

    ids: prompt and completion. mask and log-probabilities: only of the completion, 0 at the tokens of replies.
    Each turn reads all tokens so far again.
    """
    stop_ids = sampler.generation_config.eos_token_id
    pause_ids = stop_ids + find_last_tokens(tokenizer, tuple(Environment.stop_strings))
    completions = [(Environment(row), list(row["prompt_ids"]), [], [], []) for row in rows]
    room = [args.max_completion_length] * len(rows)  # tokens that each completion may still get
    while any(room):
        # The smallest room is the limit of all, so completions with less than half of the largest wait.
        active = [i for i, left in enumerate(room) if left >= max(room) / 2][: args.rollout_batch_size]
        prompts = [completions[i][1] for i in active]
        samples = generate(sampler, prompts, min(room[i] for i in active), temperature, pause_ids)
        for i, (tokens, token_logprobs) in zip(active, samples):
            environment, ids, mask, logprobs, turn = completions[i]
            turn += tokens
            text = tokenizer.decode([token for token in turn if token not in stop_ids])
            reply = ""
            if tokens[-1] in stop_ids or any(string in text for string in Environment.stop_strings):
                reply = environment.reply(text)
                turn.clear()
            room[i] -= len(tokens)
            reply_ids = encode_reply(tokenizer, reply, tokens[-1], args.tool_tokens)[: room[i]]
            room[i] -= len(reply_ids)
            if reply is None:
                room[i] = 0
            ids += tokens + reply_ids
            mask += [1] * len(tokens) + [0] * len(reply_ids)
            logprobs += token_logprobs + [0.0] * len(reply_ids)
    return completions


@cache
def find_last_tokens(tokenizer, stop_strings):
    """Find the ids of all tokens that contain the last character of one of these strings."""
    ends = {string[-1] for string in stop_strings}
    return [token for token in tokenizer.get_vocab().values() if ends & set(tokenizer.decode(token))]


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


def encode_reply(tokenizer, reply, last_id, tool_tokens):
    """Return the ids of a text, in which <|end|> is plain text, or of messages as the chat template writes them."""
    if not isinstance(reply, list):
        return tokenizer.encode(reply or "", add_special_tokens=False, split_special_tokens=True)[:tool_tokens]
    # What the template writes after ANSWER is the reply.
    chat = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}]
    for message in reply:
        content = encode_reply(tokenizer, message["content"], last_id, tool_tokens)
        chat.append(message | {"content": tokenizer.decode(content)})
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True).partition("ANSWER")[2]
    stop_token = tokenizer.decode(last_id)  # the policy has written it, if no stop string interrupted its turn
    return tokenizer.encode(text.removeprefix(stop_token), add_special_tokens=False)


def sum_parts(scores, name):
    """Return rewards (B,), each the sum of its parts if it has any, and metrics of the parts as pairs (sum, count)."""
    metrics = {}
    if isinstance(scores[0], dict):
        metrics = {f"{name}/{part}": (sum(score[part] for score in scores), len(scores)) for part in sorted(scores[0])}
        scores = [sum(score.values()) for score in scores]
    return torch.tensor(scores, dtype=torch.float32), metrics


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


@torch.no_grad()
def add_logprobs(name, policy, minibatches, args):
    """Give each microbatch its log-probabilities (B, L). Other microbatches would round to ratios other than 1."""
    for minibatch in minibatches:
        for microbatch in inner_bar(minibatch, name):
            microbatch[name], _ = policy(microbatch["ids"], microbatch["completion_mask"], args.temperature)


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
