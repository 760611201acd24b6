"""DPO: Direct Preference Optimization.

Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model" (2023)
https://arxiv.org/abs/2305.18290v3, equation 7.

    L(θ) = −E log σ(β h),   h = log π_θ(y_w)/π_ref(y_w) − log π_θ(y_l)/π_ref(y_l)

    y_w, y_l   completions of one prompt, of which the first was preferred (chosen) and the second not (rejected)
    log π(y)   summed over the tokens of a completion, the stop token included
    π_ref      the model training started from
    β          --beta; β log π_θ(y)/π_ref(y) is the reward that the policy implies

The loss sees only the difference h. It falls as well when both log-probabilities fall, the rejected one's faster: what
two completions of a prompt have in common is pushed up and down at once, and the probability that is taken from the
rejected one goes anywhere. So log π_θ(y_w) often ends below the reference's (pair/chosen_log_ratio < 0) while the
rewards tell the pairs apart ever better; judge a run by grpo.py --model RUN/checkpoint --num-steps 0.

Compared with reward_model.py
- The same loss, of log-probability ratios in place of scores; --label-smoothing is the chance ε that a label is wrong
  (cDPO, Mitchell 2023: 1 − ε and ε times the losses of the two orders).
- The reference's log-probabilities are computed once, by the policy before its first step; no other model is loaded.

Departures from the paper
- AdamW in place of RMSprop.

    python dpo.py
    python dpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/ultrafeedback_binarized
"""

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
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timedelta
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer


def by_model(embedded, real):
    """A default that depends on the model; resolve_args fills it in."""
    return field(default=None, metadata={"embedded": embedded, "real": real})


@dataclass
class Args:
    """Direct Preference Optimization of a language model."""

    # model and data
    model: str | None = None
    """folder or hub name of a causal language model (default: the embedded models/tiny)"""
    dataset: str | None = None
    """json, jsonl, csv or parquet file, folder, or hub name as in org/name:config (default: data/preferences)"""
    system_prompt: str = ""
    """system message put before every prompt that has none"""
    max_prompt_length: int | None = by_model(32, 512)
    """tokens; pairs with a longer prompt are dropped and counted (embedded: 32; real: 512)"""
    max_completion_length: int | None = by_model(48, 512)
    """tokens, the stop token included; pairs with a longer one are dropped and counted (embedded: 48; real: 512)"""

    # optimization
    num_steps: int | None = by_model(64, 1000)
    """optimizer steps (0 only evaluates); with --resume, the new total (embedded: 64; real: 1000)"""
    learning_rate: float | None = by_model(1e-4, 5e-7)
    """of AdamW; 135 M took 1e-5 (embedded: 1e-4; real: 5e-7)"""
    warmup_steps: int | None = by_model(8, 150)
    """optimizer steps over which the learning rate rises from 0 (embedded: 8; real: 150, as the paper)"""
    minibatch_size: int | None = by_model(64, 64)
    """pairs per optimizer step, over all ranks (64)"""
    microbatch_tokens: int | None = by_model(2048, 16384)
    """most padded tokens per pass: changes speed and memory only (embedded: 2048; real: 16384)"""
    max_grad_norm: float = 10.0
    """gradients are scaled down to at most this norm (10 in the authors' code)"""
    gradient_checkpointing: bool = False
    """recompute activations: less memory, about a third more time"""
    precision: str | None = None
    """of the blocks, bfloat16 or float32 (bfloat16 on a GPU; real: and on a CPU that has it)"""
    lora_rank: int = 0
    """train adapters of this rank, at 3 to 10 times the rate (0: the model itself)"""

    # evaluation, saving, logging
    eval_every: int | None = by_model(32, 100)
    """steps between evaluations on held-out pairs (embedded: 32; real: 100)"""
    eval_prompts: int | None = by_model(512, 512)
    """held-out pairs per evaluation (512)"""
    save_every: int | None = by_model(32, 100)
    """steps between saves (embedded: 32; real: 100)"""
    run_dir: str | None = None
    """new folder of this run (default: runs/SCRIPT__SEED__TIME)"""
    resume: str | None = None
    """folder of a run to go on with, one you trust; speed, memory and schedule may be given anew"""
    seed: int = 1
    """of the order of pairs"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline works)"""

    # the algorithm
    beta: float | None = by_model(0.5, 0.1)
    """beta of eq. 7, the price of leaving the reference (embedded: 0.5; real: 0.1, both in appendix B)"""
    label_smoothing: float = 0.0
    """chance that chosen and rejected are swapped in the data (cDPO)"""


def pair_logprobs(policy, part):
    """Log-probabilities of the chosen and the rejected completions of a microbatch, summed over tokens, (2, n)."""
    prompts = [part[f"prompt_{kind}"].repeat(2, 1) for kind in ("ids", "mask")]
    completions = [torch.cat([part[f"chosen_{kind}"], part[f"rejected_{kind}"]]) for kind in ("ids", "mask")]
    logprobs, _ = policy(*prompts, *completions, 1.0)
    # There are no rows where this rank only keeps step with the others.
    return logprobs.sum(1).view(2, -1)[:, : len(part["rows"])]


def preference_loss(
    chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs, beta, label_smoothing
):
    """Eq. 7, all (B,) in nats, summed over completion tokens; summed over pairs; divide by their number.

    Metrics are sums over pairs.
    """
    chosen_log_ratios = chosen_logprobs - ref_chosen_logprobs  # (B,)
    rejected_log_ratios = rejected_logprobs - ref_rejected_logprobs
    margins = beta * (chosen_log_ratios - rejected_log_ratios)
    losses = -(1 - label_smoothing) * nn.functional.logsigmoid(margins)
    losses = losses - label_smoothing * nn.functional.logsigmoid(-margins)
    loss = losses.sum()
    metrics = {
        "loss/preference": loss.detach(),
        "pair/accuracy": (margins > 0).sum(),
        "pair/margin": margins.sum().detach(),
        "pair/chosen_reward": beta * chosen_log_ratios.sum().detach(),
        "pair/rejected_reward": beta * rejected_log_ratios.sum().detach(),
        "pair/chosen_log_ratio": chosen_log_ratios.sum().detach(),
        "pair/rejected_log_ratio": rejected_log_ratios.sum().detach(),
    }
    return loss, metrics


@torch.no_grad()
def evaluate_pairs(policy, pairs, pad_id, args, rank, world_size):
    """The loss and its metrics on held-out pairs."""
    logprobs = look_up_pairs(pair_logprobs, policy, pairs, pad_id, args, rank, world_size)  # (2, N)
    ref_logprobs = torch.tensor([pair["ref_logprobs"] for pair in pairs]).T
    _, metrics = preference_loss(*logprobs, *ref_logprobs, args.beta, args.label_smoothing)
    metrics["pair/loss"] = metrics.pop("loss/preference")
    return {f"eval/{name.replace('/', '_')}": total.item() / len(pairs) for name, total in metrics.items()}


def accumulate_gradients(policy, batch, rows, divisor, args):
    """Add the gradients of preference_loss over the rows of all ranks, over divisor; return summed metrics."""
    totals = Counter()
    for part in microbatches(batch, rows, args.microbatch_tokens):
        chosen_logprobs, rejected_logprobs = pair_logprobs(policy, part)
        loss, metrics = preference_loss(
            chosen_logprobs,
            rejected_logprobs,
            *part["ref_logprobs"].unbind(1),
            args.beta,
            args.label_smoothing,
        )
        (loss / divisor).backward()
        metrics["num_pairs"] = len(part["rows"])
        totals.update(metrics)
    return totals


def main(args):
    rank, world_size, device = init_ranks()
    args = resolve_args(args)
    check_args(args, world_size)
    if args.label_smoothing >= 0.5:
        raise SystemExit(f"--label-smoothing {args.label_smoothing}: must be under 0.5, or labels mean nothing")
    tokenizer = load_tokenizer(args.model)
    pad_id = tokenizer.pad_token_id or 0  # any will do: padding is known by the mask
    train_pairs, eval_pairs, report = load_pairs(
        args.dataset,
        tokenizer,
        args.system_prompt,
        args.max_prompt_length,
        args.max_completion_length,
        args.eval_prompts,
        find_turn_end(tokenizer),
    )
    model, _ = load_model(args.model, tokenizer, args.lora_rank)
    longest = max(len(pair["prompt_ids"]) for pair in train_pairs + eval_pairs)
    check_model(model, train_pairs[0]["prompt_ids"], longest + args.max_completion_length)
    policy = shard(LogprobModel(model), device, args.precision, args.gradient_checkpointing)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    # The reference is the policy as it is here, before a state is loaded: its log-probabilities are computed once.
    for pairs in (train_pairs, eval_pairs):
        found = look_up_pairs(pair_logprobs, policy, pairs, pad_id, args, rank, world_size).tolist()
        for pair, *logprobs in zip(pairs, *found):
            pair["ref_logprobs"] = logprobs
    last_step, progress = open_run(args, policy, optimizer, report)
    stops = catch_signals()

    for step in range(last_step + 1, args.num_steps + 1):  # step 0 only evaluates
        metrics, start = {}, time.perf_counter()
        if step > 0:
            # batch: this rank's share of the step's pairs
            picked = pick_rows(train_pairs, (step - 1) * args.minibatch_size, args.minibatch_size, args.seed)
            share = picked[rank::world_size]
            batch = collate_pairs(share, pad_id, device)
            batch["ref_logprobs"] = torch.tensor([pair["ref_logprobs"] for pair in share], device=device)  # (n, 2)
            rows = torch.arange(len(share), device=device)

            # update: one optimizer step
            divisor = args.minibatch_size  # a mean over pairs
            totals = accumulate_gradients(policy, batch, rows, divisor, args)
            learning_rate = args.learning_rate * min(1.0, step / max(1, args.warmup_steps))
            grad_norm = step_optimizer(policy, optimizer, learning_rate, args.max_grad_norm)

            # metrics of the step over all ranks
            metrics = step_metrics(totals, divisor, start)
            metrics |= {"optim/grad_norm": grad_norm, "optim/learning_rate": learning_rate}
            metrics["optim/skipped"] = not math.isfinite(grad_norm)

        # evaluation, logs, saving
        if eval_pairs and (step % args.eval_every == 0 or step == args.num_steps) and not all_reduce(len(stops)):
            metrics |= evaluate_pairs(policy, eval_pairs, pad_id, args, rank, world_size)
        if rank == 0:
            log_step(args, step, metrics, progress)
        stopping = all_reduce(len(stops)) > 0
        if step > 0 and (stopping or step == args.num_steps or step % args.save_every == 0):
            save(args.run_dir, policy, optimizer, tokenizer, step)
        if stopping:
            break

    end_run(args, progress, stops)


# ---- below: plumbing, byte-identical in every script that has it, in the order in which main calls it

MODEL, DATASET = (str(Path(__file__).resolve().parent / name) for name in ("models/tiny", "data/preferences"))
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


def load_pairs(dataset, tokenizer, system_prompt, max_prompt_length, max_completion_length, num_held_out, stop_id):
    """Return training and held-out pairs of token ids, completions ending in stop_id, and a line about each split."""
    if stop_id is None:
        raise SystemExit("nothing ends a completion: name an eos_token in tokenizer_config.json")

    def read(row):
        prompt, *texts = split_pair(row, tokenizer.chat_template is not None)
        if not prompt or not all(text.strip() for text in texts):
            return "without shared prompt, or empty"
        if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            return "ends in the assistant's turn"
        prompt_ids = encode_prompt(tokenizer, prompt, system_prompt)
        completions = [encode_completion(tokenizer, prompt, text, stop_id) for text in texts]
        if completions[0] == completions[1]:
            return "identical"
        if not 0 < len(prompt_ids) <= max_prompt_length or max_completion_length < max(map(len, completions)):
            return f"not 1 to {max_prompt_length} + {max_completion_length} tokens"
        return {"prompt_ids": prompt_ids, "chosen_ids": completions[0], "rejected_ids": completions[1]}

    return load_rows(dataset, num_held_out, read)


def split_pair(row, has_template):
    """Return (prompt, chosen, rejected) of a row, the prompt a string or a list of chat messages, None if not shared.

    chosen and rejected are completions of the row's prompt, as strings or lists of messages; or whole conversations,
    as lists; or whole dialogues, as strings in the form of Anthropic's HH.
    """
    if not {"chosen", "rejected"} <= {*row}:
        raise ValueError(f"needs the columns chosen and rejected; found {', '.join(row)}")
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if not chosen or not rejected:
        return None, "", ""
    if isinstance(chosen, list):
        before = prompt if isinstance(prompt, list) else []
        # What is not a whole conversation goes on from the prompt.
        chats = [chat if chat[: len(before)] == before else [*before, *chat] for chat in (chosen, rejected)]
        if before or any(len(chat) > 1 for chat in chats):
            prompt = chats[0][:-1] if chats[0][:-1] == chats[1][:-1] else None
        return prompt, *(chat[-1]["content"] or "" if chat[-1]["role"] == "assistant" else "" for chat in chats)
    if prompt is None:
        head, mark, _ = os.path.commonprefix([chosen, rejected]).rpartition("\n\nAssistant:")
        prompt = head + mark
        chosen, rejected = chosen.removeprefix(prompt), rejected.removeprefix(prompt)
        if has_template:
            turns = re.split(r"\n\n(Human|Assistant):", prompt)[1:-2]  # speaker, text, speaker, text, ...
            roles = {"Human": "user", "Assistant": "assistant"}
            prompt = [{"role": roles[who], "content": what.strip()} for who, what in zip(turns[::2], turns[1::2])]
            chosen, rejected = chosen.strip(), rejected.strip()
    return prompt or None, chosen, rejected


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


def encode_completion(tokenizer, prompt, text, stop_id):
    """Return the token ids of a completion as the chat template writes it after a prompt, up to stop_id."""
    if tokenizer.chat_template is not None:
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        start = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        messages = [*messages, {"role": "assistant", "content": text}]
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        if not whole.startswith(start):
            raise ValueError(f"the chat template ends a prompt in {start[-30:]!r}, but begins no finished turn with it")
        text = whole.removeprefix(start)
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], stop_id]
    return ids[: ids.index(stop_id) + 1]


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


def find_turn_end(tokenizer):
    """The id that ends a turn in the chat template, else the end of text."""
    if tokenizer.chat_template is None:
        return tokenizer.eos_token_id
    chat = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"}]
    tail = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("Answer")[2].strip(" \n\t\u2581")
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    return next((i for i in ids if i in tokenizer.added_tokens_decoder), tokenizer.eos_token_id)


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
    """Exit if token_logprobs and the model's own logits differ."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_length
    if max_length > context:
        raise SystemExit(f"prompts and completions of {max_length} tokens, over the context of {context}")
    ids = torch.tensor([prompt_ids[:16] * 2], device=model.device)  # (1, 2 P)
    prompts, completions = ((half, torch.ones_like(half)) for half in ids.chunk(2, 1))
    with one_line(f"--model {model.name_or_path}: damaged, or of another kind"), torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[:, ids.shape[1] // 2 - 1 : -1]  # (1, P, V)
        found, _ = token_logprobs(model, *prompts, *completions, 1.0)  # (1, P)
        if not (plain.gather(2, completions[0].unsqueeze(2)).squeeze(2) - found).abs().max() < 0.01:
            raise ValueError("its own logits are not those of its LM head")


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


@torch.no_grad()
def look_up_pairs(function, policy, pairs, pad_id, args, rank, world_size):
    """What function(policy, part) says of all pairs, which the ranks share, (2, N) in float64."""
    found, device = torch.zeros(2, len(pairs), dtype=torch.float64), policy.model.device
    for first in tqdm(range(0, len(pairs), 1024), "pairs", unit="x1024", leave=False, disable=rank > 0 or None):
        own = range(first, min(first + 1024, len(pairs)))[rank::world_size]
        batch = collate_pairs([pairs[i] for i in own] or pairs[:1], pad_id, device)
        for part in microbatches(batch, torch.arange(len(own), device=device), args.microbatch_tokens):
            found[:, [own[i] for i in part["rows"].tolist()]] = function(policy, part).cpu().double()
    return torch.tensor(all_reduce(found), dtype=torch.float64)


def collate_pairs(pairs, pad_id, device):
    """Return a batch of tensors: prompts (n, P) padded on the left, completions (n, T) on the right."""
    prompt_ids, prompt_mask = pad_left([pair["prompt_ids"] for pair in pairs], pad_id, device)
    rows = [torch.tensor(pair[key]) for key in ("chosen_ids", "rejected_ids") for pair in pairs]
    ids = nn.utils.rnn.pad_sequence(rows, True, pad_id).to(device)  # (2 n, T)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True).to(device)
    parts = zip(("chosen_ids", "rejected_ids", "chosen_mask", "rejected_mask"), (*ids.chunk(2), *mask.chunk(2)))
    batch = {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, **dict(parts)}
    batch["lengths"] = 2 * (prompt_mask.sum(1) + mask.sum(1).view(2, -1).amax(0))  # of both, padded to the longer
    return batch


def pad_left(rows, pad_id, device):
    """Ids and mask (B, P) of lists of token ids, padded on the left."""
    ids = [torch.tensor(row) for row in rows]  # one copy, not one a row
    padded = partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
    return padded(ids, padding_value=pad_id).to(device), padded([torch.ones_like(row) for row in ids]).to(device)


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


def step_metrics(totals, divisor, start):
    """Means of a step over all ranks, pair/* over pairs and loss/* over divisor, and its time."""
    sums = dict(zip(totals, all_reduce([float(total) for total in totals.values()])))
    counts = {"loss": divisor, "pair": sums.pop("num_pairs")}
    metrics = {name: total / counts[name.split("/")[0]] for name, total in sums.items()}
    return metrics | {"perf/step_seconds": time.perf_counter() - start}


def log_step(args, step, metrics, progress):
    """Log the metrics, print what an evaluation found, and move the bar."""
    append_line(args, "metrics.jsonl", {"step": step} | metrics)
    wandb.log({"step": step} | metrics)
    progress.set_postfix({key: metrics[key] for key in ("pair/accuracy", "loss/nll", "score/mean") if key in metrics})
    progress.update() if step > 0 else progress.unpause()
    if found := [f"{name[5:]} {value:.3f}" for name, value in metrics.items() if name.startswith("eval/")]:
        with contextlib.suppress(OSError):  # after | head -1
            tqdm.write(f"step {step}: {', '.join(found)}")


def append_line(args, name, row):
    """Append a row to a jsonl file of the run."""
    path = Path(args.run_dir, name)
    with one_line(f"{path}: mend it, then --resume {args.run_dir}"), path.open("a") as file:
        file.write(json.dumps(row, default=str) + "\n")


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
