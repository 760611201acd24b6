"""Bradley-Terry reward model: a language model with a scalar head that scores completions.

Ouyang et al., "Training language models to follow instructions with human feedback" (2022)
https://arxiv.org/abs/2203.02155v1, equation 1, with one pair per prompt.

    L(θ) = −E log σ(r_θ(x, y_w) − r_θ(x, y_l))

    x, y_w, y_l   prompt, and the completion that was preferred (chosen) and the one that was not (rejected)
    r_θ(x, y)     the score: the scalar head at the last token of the completion, which is always a stop token

Length finds that token, not its id; pad_token_id is another one, so that AutoModelForSequenceClassification finds it.

Departures from the paper
- A batch element is one pair; the paper's holds all pairs of the 4 to 9 ranked completions of a prompt.
- Scores are not shifted to mean 0 afterwards, the loss knows only differences; ppo_rlhf.py normalises what it loads.

    python reward_model.py
    python reward_model.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset Anthropic/hh-rlhf
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
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def by_model(embedded, real):
    """A default that depends on the model; resolve_args fills it in."""
    return field(default=None, metadata={"embedded": embedded, "real": real})


@dataclass
class Args:
    """Bradley-Terry reward model on top of a language model."""

    # model and data
    model: str | None = None
    """folder or hub name of a causal language model or of a reward model (default: the embedded models/tiny)"""
    dataset: str | None = None
    """json, jsonl, csv or parquet file, folder, or hub name as in org/name:config (default: data/preferences)"""
    system_prompt: str = ""
    """system message put before every prompt that has none"""
    max_prompt_length: int | None = by_model(32, 512)
    """tokens; pairs with a longer prompt are dropped and counted (embedded: 32; real: 512)"""
    max_completion_length: int | None = by_model(48, 512)
    """tokens, the stop token included; pairs with a longer one are dropped and counted (embedded: 48; real: 512)"""

    # optimization
    num_steps: int | None = by_model(256, 1000)
    """optimizer steps (0 only evaluates); with --resume, total and schedule anew (embedded: 256; real: 1000)"""
    learning_rate: float | None = by_model(8e-4, 9e-6)
    """highest, of AdamW; falls to 0 on a cosine; 135 M took 5e-5 (embedded: 8e-4; real: 9e-6)"""
    warmup_steps: int | None = by_model(10, 0)
    """optimizer steps over which the learning rate rises from 0 (embedded: 10; real: 0)"""
    minibatch_size: int | None = by_model(64, 64)
    """pairs per optimizer step, over all ranks (64)"""
    microbatch_tokens: int | None = by_model(2048, 16384)
    """most padded tokens per pass: changes speed and memory only (embedded: 2048; real: 16384)"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to at most this norm"""
    gradient_checkpointing: bool = False
    """recompute activations: less memory, about a third more time"""
    precision: str | None = None
    """of the blocks, bfloat16 or float32 (bfloat16 on a GPU; real: and on a CPU that has it)"""
    lora_rank: int = 0
    """train adapters of this rank, at 3 to 10 times the rate (0: the model itself)"""

    # evaluation, saving, logging
    eval_every: int | None = by_model(64, 100)
    """steps between evaluations on held-out pairs (embedded: 64; real: 100)"""
    eval_prompts: int | None = by_model(512, 512)
    """held-out pairs per evaluation (512)"""
    save_every: int | None = by_model(64, 100)
    """steps between saves (embedded: 64; real: 100)"""
    run_dir: str | None = None
    """new folder of this run (default: runs/SCRIPT__SEED__TIME)"""
    resume: str | None = None
    """folder of a run to go on with, one you trust; speed, memory and schedule may be given anew"""
    seed: int = 1
    """of the scalar head and of the order of pairs"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline works)"""


def sequence_scores(model, prompt_ids, prompt_mask, completion_ids, completion_mask):
    """Scores (B,) of completions: the scalar head at the last token of each, which length finds and not its id."""
    hidden, lengths = hidden_states(model, prompt_ids, prompt_mask, completion_ids, completion_mask)
    last = hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]  # (B, D)
    return model.score(last.to(model.score.weight.dtype)).squeeze(1)


def pair_scores(policy, part):
    """Scores of the chosen and the rejected completions of a microbatch, (2, n)."""
    prompts = [part[f"prompt_{kind}"].repeat(2, 1) for kind in ("ids", "mask")]
    completions = [torch.cat([part[f"chosen_{kind}"], part[f"rejected_{kind}"]]) for kind in ("ids", "mask")]
    # There are no rows where this rank only keeps step with the others.
    return policy(*prompts, *completions).view(2, -1)[:, : len(part["rows"])]


def preference_loss(chosen_scores, rejected_scores):
    """Eq. 1: -log sigmoid of the difference, both (B,), summed over pairs; divide by their number.

    Metrics are sums over pairs.
    """
    margins = chosen_scores - rejected_scores  # (B,)
    loss = -nn.functional.logsigmoid(margins).sum()
    metrics = {
        "loss/preference": loss.detach(),
        "pair/accuracy": (margins > 0).sum(),
        "pair/margin": margins.sum().detach(),
        "pair/chosen_score": chosen_scores.sum().detach(),
        "pair/rejected_score": rejected_scores.sum().detach(),
    }
    return loss, metrics


def accumulate_gradients(policy, batch, rows, divisor, args):
    """Add the gradients of preference_loss over the rows of all ranks, over divisor; return summed metrics."""
    totals = Counter()
    for part in microbatches(batch, rows, args.microbatch_tokens):
        chosen_scores, rejected_scores = pair_scores(policy, part)
        loss, metrics = preference_loss(chosen_scores, rejected_scores)
        (loss / divisor).backward()
        metrics["num_pairs"] = len(part["rows"])
        totals.update(metrics)
    return totals


def main(args):
    rank, world_size, device = init_ranks()
    args = resolve_args(args)
    check_args(args, world_size)
    tokenizer = load_tokenizer(args.model)
    stop_id = find_turn_end(tokenizer)
    train_pairs, eval_pairs, report = load_pairs(
        args.dataset,
        tokenizer,
        args.system_prompt,
        args.max_prompt_length,
        args.max_completion_length,
        args.eval_prompts,
        stop_id,
    )
    torch.manual_seed(args.seed)  # of the new scalar head
    model = load_reward_model(args.model, tokenizer, args.lora_rank)
    pad_id = tokenizer.pad_token_id
    longest = max(len(pair["prompt_ids"]) for pair in train_pairs + eval_pairs)
    check_model(model, train_pairs[0]["prompt_ids"], longest + args.max_completion_length, stop_id)
    policy = shard(ScoreModel(model), device, args.precision, args.gradient_checkpointing)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    last_step, progress = open_run(args, policy, optimizer, report)
    stops = catch_signals()

    for step in range(last_step + 1, args.num_steps + 1):  # step 0 only evaluates
        metrics, start = {}, time.perf_counter()
        if step > 0:
            # batch: this rank's share of the step's pairs
            picked = pick_rows(train_pairs, (step - 1) * args.minibatch_size, args.minibatch_size, args.seed)
            share = picked[rank::world_size]
            batch = collate_pairs(share, pad_id, device)
            rows = torch.arange(len(share), device=device)

            # update: one optimizer step; the learning rate rises, then falls to 0 on a cosine
            totals = accumulate_gradients(policy, batch, rows, args.minibatch_size, args)  # a mean over pairs
            decay = (step - args.warmup_steps) / max(1, args.num_steps - args.warmup_steps)
            factor = 0.5 * (1 + math.cos(math.pi * max(0.0, decay)))
            learning_rate = args.learning_rate * min(step / max(1, args.warmup_steps), factor)
            grad_norm = step_optimizer(policy, optimizer, learning_rate, args.max_grad_norm)

            # metrics of the step over all ranks
            metrics = step_metrics(totals, args.minibatch_size, start)
            metrics |= {"optim/grad_norm": grad_norm, "optim/learning_rate": learning_rate}
            metrics["optim/skipped"] = not math.isfinite(grad_norm)

        # evaluation, logs, saving
        if eval_pairs and (step % args.eval_every == 0 or step == args.num_steps) and not all_reduce(len(stops)):
            metrics |= evaluate(policy, eval_pairs, pad_id, args, rank, world_size)
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


def find_turn_end(tokenizer):
    """The id that ends a turn in the chat template, else the end of text."""
    if tokenizer.chat_template is None:
        return tokenizer.eos_token_id
    chat = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"}]
    tail = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("Answer")[2].strip(" \n\t\u2581")
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    return next((i for i in ids if i in tokenizer.added_tokens_decoder), tokenizer.eos_token_id)


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


def load_reward_model(name, tokenizer, lora_rank=0, new_head=True):
    """Load a reward model or, where a new scalar head will do, a causal language model, in float32.

    The tokenizer gets a padding id that ends no completion: Hugging Face looks for the last id that is not padding.
    """
    options = {"num_labels": 1, "dtype": torch.float32, "output_loading_info": True}
    with one_line(f"{'--model' if new_head else '--reward-model'} {name}: cannot be loaded"):
        model, info = AutoModelForSequenceClassification.from_pretrained(name, **options)
        if missing := sorted(info["missing_keys"] - {"score.weight"}):
            raise ValueError(f"it lacks {missing[0]}: is the folder whole, and all of one model?")
        if info["missing_keys"] and not new_head:
            raise ValueError("a language model that gives no scores: reward_model.py makes a reward model of it")
        if info["missing_keys"]:
            nn.init.normal_(model.score.weight, std=1 / math.sqrt(model.score.in_features + 1))
    unfit = {None, tokenizer.eos_token_id, find_turn_end(tokenizer)}
    if tokenizer.pad_token_id in unfit:
        spare = tokenizer.convert_ids_to_tokens(sorted({*tokenizer.all_special_ids} - unfit))
        tokenizer.add_special_tokens({"pad_token": [*spare, "<|pad|>"][0]})
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer))
    model.get_input_embeddings().padding_idx = None  # that token may be in use, and would get no gradient
    model.config.get_text_config().pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
    if lora_rank:
        add_adapters(model, lora_rank).score.requires_grad_(True)
    return model


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


@torch.no_grad()
def check_model(model, prompt_ids, max_length, stop_id):
    """Exit if the context is too short, or if Hugging Face reads another score from a padded row than we do."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_length
    if max_length > context:
        raise SystemExit(f"longest prompt and --max-completion-length make {max_length}, over the context of {context}")
    ids = torch.tensor([[*prompt_ids, stop_id]])
    ones = torch.ones_like(ids)
    padded = nn.functional.pad(ids, (0, 3), value=model.config.pad_token_id)
    with one_line(f"--model {model.name_or_path}: damaged, or not built as these scripts expect"):
        theirs = model(input_ids=padded, attention_mask=nn.functional.pad(ones, (0, 3))).logits.item()
        ours = sequence_scores(model, ids[:, :-1], ones[:, :-1], ids[:, -1:], ones[:, -1:]).item()
        if not abs(ours - theirs) < 0.01:
            raise ValueError(f"its score is {theirs:.3f} in Hugging Face, and {ours:.3f} at its last token")


def hidden_states(model, prompt_ids, prompt_mask, completion_ids, completion_mask):
    """Last hidden states (B, W, D) of prompts and completions, all padding moved to the right, and lengths (B,)."""
    ids = torch.cat([prompt_ids, completion_ids], 1)  # (B, P + T)
    mask = torch.cat([prompt_mask.bool(), completion_mask.bool()], 1)
    lengths = mask.sum(1)
    # A causal model then needs neither attention mask nor position ids.
    order = (~mask).long().argsort(dim=1, stable=True)[:, : lengths.max()]
    return model.base_model(input_ids=ids.gather(1, order), use_cache=False).last_hidden_state, lengths


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


class ScoreModel(nn.Module):
    """The unit that is sharded: its forward returns scores, so the scalar head is gathered with the rest."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        return sequence_scores(self.model, *inputs)


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


@torch.no_grad()
def evaluate(policy, pairs, pad_id, args, rank, world_size):
    """Loss, accuracy and margin on held-out pairs."""
    share, device = pairs[rank::world_size], policy.model.device
    batch, totals = collate_pairs(share or pairs[:1], pad_id, device), Counter()
    for part in microbatches(batch, torch.arange(len(share), device=device), args.microbatch_tokens):
        totals.update(preference_loss(*pair_scores(policy, part))[1])
    names = {"loss/preference": "loss", "pair/accuracy": "accuracy", "pair/margin": "margin"}
    sums = all_reduce([float(totals[name]) for name in names])
    return {f"eval/pair_{name}": total / len(pairs) for name, total in zip(names.values(), sums)}


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
