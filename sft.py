"""SFT: supervised fine-tuning of a causal language model, with loss on completions and their stop token only.

Ouyang et al., "Training language models to follow instructions with human feedback" (2022), step 1 of section 3.1
https://arxiv.org/abs/2203.02155v1

    L(θ) = − 1/N Σᵢ Σₜ log π_θ(oᵢₜ | qᵢ, oᵢ,<ₜ)

    qᵢ, oᵢ    prompt and completion, the stop token included; or a conversation, of which oᵢ are the assistant's turns
    N         the trained tokens of the whole optimizer step, over all microbatches and ranks

Without --model it trains the embedded model, a Qwen3 of half a million parameters, from random weights: that is how
models/tiny was made.

    python sft.py
    python sft.py --model Qwen/Qwen2.5-0.5B --dataset my_chats.jsonl
"""

import json
import math
import os
import resource
import secrets
import shutil
import signal
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from pathlib import Path

import tokenizers
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def by_model(embedded, real):
    """The default of a setting that depends on the model; resolve_args fills it in."""
    return field(default=None, metadata={"embedded": embedded, "real": real})


@dataclass
class Args:
    """Supervised fine-tuning of a language model."""

    # model and data
    model: str | None = None
    """folder or hub name of a causal language model (default: the embedded one, from random weights)"""
    dataset: str | None = None
    """json, jsonl, csv or parquet file, folder, or hub name as in org/name:config (default: data/addition/sft.jsonl)"""
    system_prompt: str = ""
    """system message put before every conversation that has none"""
    max_prompt_length: int | None = by_model(32, 1024)
    """tokens before the first trained one; longer rows are dropped and counted (embedded: 32; real: 1024)"""
    max_completion_length: int | None = by_model(48, 1024)
    """tokens from the first trained one on; longer rows are dropped and counted (embedded: 48; real: 1024)"""

    # optimization
    num_steps: int | None = by_model(2200, 1000)
    """optimizer steps; with --resume, the new total (embedded: 2200; real: 1000)"""
    learning_rate: float | None = by_model(3e-3, 1e-5)
    """highest, reached after the warm-up; falls to 0 on a cosine (embedded: 3e-3; real: 1e-5)"""
    warmup_steps: int | None = by_model(300, 50)
    """optimizer steps over which the learning rate rises from 0 (embedded: 300; real: 50)"""
    minibatch_size: int | None = by_model(64, 64)
    """rows per optimizer step, over all ranks (embedded: 64; real: 64)"""
    microbatch_tokens: int | None = by_model(2048, 16384)
    """most padded tokens per forward and backward pass; changes speed and memory only (embedded: 2048; real: 16384)"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to at most this norm"""
    weight_decay: float = 0.1
    """of AdamW"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, about a third more time"""

    # evaluation, saving, logging
    eval_every: int | None = by_model(500, 100)
    """steps between evaluations on held-out rows (embedded: 500; real: 100)"""
    eval_prompts: int | None = by_model(512, 256)
    """held-out rows per evaluation (embedded: 512; real: 256)"""
    save_every: int | None = by_model(500, 100)
    """steps between saves (embedded: 500; real: 100)"""
    run_dir: str | None = None
    """new folder of this run (default: runs/SCRIPT__SEED__TIME)"""
    resume: str | None = None
    """folder of the run to continue, with its own settings; only --num-steps may be given besides"""
    seed: int = 1
    """of the random weights and of the order of rows"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline works)"""
    wandb_project: str = "rl-for-language-models"
    """Weights & Biases project"""


def completion_loss(logprobs, loss_mask):
    """Negative log-likelihood summed over the trained tokens, both (B, T); divide by their number."""
    loss = -torch.where(loss_mask.bool(), logprobs, 0.0).sum()
    return loss, {"loss/nll": loss.detach()}


def microbatch_loss(policy, part):
    """completion_loss of a microbatch, and its metrics with the number of trained tokens they sum over."""
    logprobs, entropies = policy(
        part["prompt_ids"], part["prompt_mask"], part["completion_ids"], part["completion_mask"], 1.0
    )
    loss, metrics = completion_loss(logprobs, part["loss_mask"])
    metrics["policy/entropy"] = torch.where(part["loss_mask"], entropies, 0.0).sum().detach()
    metrics["num_tokens"] = part["loss_mask"].sum()
    return loss, metrics


def accumulate_gradients(policy, batch, rows, divisor, args):
    """Add the gradients of completion_loss over these rows of every rank, divided by divisor; return summed metrics."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    totals = {}
    for part in microbatches(batch, rows, args.microbatch_tokens):
        loss, metrics = microbatch_loss(policy, part)
        (loss * (world_size / divisor)).backward()  # times world_size: FSDP averages gradients over ranks
        add_metrics(totals, metrics)
    return totals


def main(args):
    rank, world_size, device = init_ranks()
    args = resolve_args(args)
    check_args(args, world_size)
    model, tokenizer = load_model(args.model, device) if args.model else make_embedded_model(args.seed, device)
    stop_ids = find_stop_ids(model, tokenizer)
    pad_id = tokenizer.pad_token_id or 0  # any will do: padding is known by the mask
    train_rows, eval_rows, report = load_conversations(args, tokenizer, stop_ids)
    first_prompt_ids = train_rows[0]["ids"][: train_rows[0]["start"]]
    check_model(model, first_prompt_ids, args.max_prompt_length + args.max_completion_length)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = shard(LogprobModel(model).train(), device)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.98), weight_decay=args.weight_decay)
    last_step = open_run(args, policy, optimizer, tokenizer, report)
    stop_signals = catch_signals()
    progress = tqdm(
        total=args.num_steps, initial=max(0, last_step), desc=Path(__file__).stem, unit="step", disable=rank > 0
    )

    for step in range(last_step + 1, args.num_steps + 1):  # step 0 only evaluates
        metrics, start = {}, time.perf_counter()
        if step > 0:
            # batch: this rank's share of the step's rows
            picked = pick_rows(train_rows, (step - 1) * args.minibatch_size, args.minibatch_size, args.seed)
            share = picked[rank::world_size]
            batch = collate(share, pad_id, device)
            rows = torch.arange(len(share), device=device)

            # update: one optimizer step; the learning rate rises, then falls to 0 on a cosine
            divisor = sum(sum(row["trained"]) for row in picked)  # a mean over the trained tokens of all ranks
            optimizer.zero_grad()
            totals = accumulate_gradients(policy, batch, rows, divisor, args)
            decay = (step - args.warmup_steps) / max(1, args.num_steps - args.warmup_steps)
            factor = 0.5 * (1 + math.cos(math.pi * max(0.0, decay)))
            learning_rate = args.learning_rate * min(step / max(1, args.warmup_steps), factor)
            grad_norm = step_optimizer(policy, optimizer, learning_rate, args.max_grad_norm)
            check_finite(step, grad_norm, args.run_dir)

            # metrics of the step over all ranks
            metrics = step_metrics(totals, divisor, start)
            metrics |= {"optim/grad_norm": grad_norm, "optim/learning_rate": learning_rate}

        # evaluation, logs, saving
        if eval_rows and (step % args.eval_every == 0 or step == args.num_steps):
            metrics |= evaluate(policy, eval_rows, pad_id, args, rank, world_size)
        if rank == 0:
            log_step(args, step, metrics, progress)
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
MODEL, DATASET = None, str(HERE / "data" / "addition" / "sft.jsonl")
DEFAULTS = {field.name: tuple(field.metadata.values()) for field in fields(Args) if field.metadata}


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


def make_embedded_model(seed, device):
    """Return the embedded model, a small Qwen3 with random weights, and its tokenizer of 29 tokens."""
    special = ["<|pad|>", "<|unknown|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    # What rewards look for must be ordinary tokens: decoding would drop special ones.
    vocabulary = [*special, "<think>", "</think>", "\\boxed{", *"}0123456789+=;-*/., "]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<|unknown|>")
    )
    pattern = tokenizers.Regex(r"<think>|</think>|\\boxed\{|.")
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        unk_token="<|unknown|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
    )
    tokenizer.chat_template = (
        "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=0.1,  # about 1 / sqrt(hidden_size); the usual 0.02 is for far wider models
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device), tokenizer


def find_stop_ids(model, tokenizer):
    """Return every id that ends a completion: the union of generation_config's, config's and the tokenizer's."""
    stop_ids = set()
    configs = (model.generation_config, model.config.get_text_config(), tokenizer)
    for ids in (config.eos_token_id for config in configs):
        stop_ids.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return sorted(stop_ids)


def load_conversations(args, tokenizer, stop_ids):
    """Return training and held-out rows, lists of {ids, trained, start}, and a report of what was dropped."""
    loaded, report = [], []
    for split, rows in zip(("training", "held-out"), load_splits(args.dataset, args.eval_prompts)):
        if "messages" not in rows.column_names and not {"prompt", "completion"} <= set(rows.column_names):
            raise SystemExit(
                f"--dataset {args.dataset}: needs the columns prompt and completion, or messages; "
                f"found {', '.join(rows.column_names)}"
            )
        kept, num_untrained, num_long = [], 0, 0
        for number, row in enumerate(rows):
            if not row.get("messages") and (not row.get("prompt") or not row.get("completion")):
                num_untrained += 1
                continue
            try:
                ids, trained = encode_row(tokenizer, row, args.system_prompt, stop_ids)
            except ValueError as error:
                raise SystemExit(f"--dataset {args.dataset}: {split} row {number}: {error}") from None
            start = trained.index(True) if any(trained) else 0  # the first token has nothing to be predicted from
            if start == 0:
                num_untrained += 1
            elif start > args.max_prompt_length or len(ids) - start > args.max_completion_length:
                num_long += 1
            else:
                kept.append({"ids": ids, "trained": trained, "start": start})
        report.append(
            f"{len(kept)} {split} rows; dropped: {num_long} longer than {args.max_prompt_length} + "
            f"{args.max_completion_length} tokens, {num_untrained} without a token to train"
        )
        if not kept and (split == "training" or args.eval_prompts):
            raise SystemExit(f"--dataset {args.dataset}: no token would be trained: {report[-1]}")
        loaded.append(kept)
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


def encode_row(tokenizer, row, system_prompt, stop_ids):
    """Return the ids of a row, {prompt, completion} or {messages}, and which of them are trained."""
    prompt, completion, messages = row.get("prompt"), row.get("completion"), row.get("messages")
    if messages is None:
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        messages = messages + (
            completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
        )
    if system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if tokenizer.chat_template is not None:
        return encode_conversation(tokenizer, messages, stop_ids)
    if row.get("messages") is not None:
        raise ValueError("the tokenizer has no chat template, which messages need")
    prompt_ids = tokenizer("\n\n".join(message["content"] for message in messages[:-1]))["input_ids"]
    completion_ids = tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"]
    completion_ids = [*completion_ids, tokenizer.eos_token_id]
    return prompt_ids + completion_ids, [False] * len(prompt_ids) + [True] * len(completion_ids)


def encode_conversation(tokenizer, messages, stop_ids):
    """Return the ids of a conversation and which of them are trained: the assistant's turns, each up to its stop token.

    The turns are found by rendering the conversation's beginnings, each of which must begin the next; a ValueError
    says where one does not.
    """
    ids, trained = [], []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for part, is_prompt in ((messages[:i], True), (messages[: i + 1], False)):
            rendered = tokenizer.apply_chat_template(
                part, add_generation_prompt=is_prompt, tokenize=True, return_dict=True
            )["input_ids"]
            if rendered[: len(ids)] != ids:
                raise ValueError(f"the chat template changes what comes before message {i + 1}")
            turn = rendered[len(ids) :]
            stop = next((k for k, token in enumerate(turn) if token in stop_ids), len(turn))
            ids = rendered
            trained += [not is_prompt and k <= stop for k in range(len(turn))]
    return ids, trained


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


def pick_rows(rows, start, count, seed):
    """Return places start to start + count of an endless sequence of passes over the rows, each in its own order."""
    picked = []
    for epoch in range(start // len(rows), (start + count - 1) // len(rows) + 1):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
        first = epoch * len(rows)
        picked += [rows[i] for i in order[max(start - first, 0) : start + count - first]]
    return picked


def collate(rows, pad_id, device):
    """Return a batch of tensors: all before a row's first trained token is its prompt, the rest its completion."""
    prompt_ids, prompt_mask = pad_left([row["ids"][: row["start"]] for row in rows], pad_id, device)
    width = max(len(row["ids"]) - row["start"] for row in rows)

    def pad_right(values, fill):
        return torch.tensor([list(value) + [fill] * (width - len(value)) for value in values], device=device)

    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": pad_right([row["ids"][row["start"] :] for row in rows], pad_id),
        "completion_mask": pad_right([[1] * (len(row["ids"]) - row["start"]) for row in rows], 0),
        "loss_mask": pad_right([row["trained"][row["start"] :] for row in rows], False),
        "lengths": torch.tensor([len(row["ids"]) for row in rows], device=device),
    }


def pad_left(rows, pad_id, device):
    """Return ids and mask (B, P) of lists of token ids, padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


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


def add_metrics(totals, metrics):
    """Add metrics to totals; where the key ends in _max, keep the larger."""
    for key, value in metrics.items():
        before = totals.get(key, torch.zeros_like(value))
        totals[key] = torch.maximum(before, value) if key.endswith("_max") else before + value


def step_optimizer(policy, optimizer, learning_rate, max_grad_norm):
    """Clip the gradients and make a step, or none if they are not finite; return their norm before clipping."""
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
    grad_norm = float(grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    if math.isfinite(grad_norm):
        optimizer.step()
    return grad_norm


def check_finite(step, grad_norm, run_dir):
    """Exit if there was no optimizer step to make; what was saved before stands."""
    if not math.isfinite(grad_norm):
        raise SystemExit(f"step {step}: gradient norm {grad_norm}; the last good state is in {run_dir}")


def step_metrics(sums, divisor, start):
    """Means of a step over all ranks, its time and the peak of memory.

    sums has what to divide by, too: the number of pairs (pair/*) or of trained tokens (policy/*); loss/* is divided by
    the divisor of the step's loss.
    """
    seconds, sums = time.perf_counter() - start, reduce_metrics(sums)
    counts = {"loss": divisor, "pair": sums.pop("num_pairs", 0), "policy": sums.pop("num_tokens", 0)}
    metrics = {key: total / counts[key.split("/")[0]] for key, total in sums.items()}
    metrics["perf/step_seconds"] = seconds
    for kind, name in (("pair", "perf/pairs_per_second"), ("policy", "perf/train_tokens_per_second")):
        if counts[kind]:
            metrics[name] = counts[kind] / seconds
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    metrics["perf/peak_memory_gib"] = (torch.cuda.max_memory_allocated() or peak_bytes) / 2**30
    return metrics


def reduce_metrics(metrics):
    """Return metrics summed over ranks as numbers; where the key ends in _max, the maximum."""
    sums = [key for key in sorted(metrics) if not key.endswith("_max")]
    maxima = [key for key in sorted(metrics) if key.endswith("_max")]
    reduced = dict(zip(sums, all_reduce([float(metrics[key]) for key in sums])))
    return reduced | dict(zip(maxima, all_reduce([float(metrics[key]) for key in maxima], dist.ReduceOp.MAX)))


@torch.no_grad()
def evaluate(policy, rows, pad_id, args, rank, world_size):
    """Mean negative log-likelihood of the trained tokens of held-out rows."""
    start = time.perf_counter()
    share, device = rows[rank::world_size], policy.model.device
    batch, totals = collate(share or rows[:1], pad_id, device), {}
    for part in microbatches(batch, torch.arange(len(share), device=device), args.microbatch_tokens):
        _, metrics = microbatch_loss(policy, part)
        add_metrics(totals, metrics)
    sums = reduce_metrics(totals)
    loss = sums["loss/nll"] / sums["num_tokens"]
    metrics = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}
    return metrics | {"perf/eval_seconds": time.perf_counter() - start}


def log_step(args, step, metrics, progress):
    """Append to metrics.jsonl and Weights & Biases, and move the bar."""
    append_line(Path(args.run_dir) / "metrics.jsonl", {"step": step, **metrics})
    wandb.log(metrics, step=step)
    if step == 0:
        return
    shown = (("accuracy", "pair/accuracy", 2), ("loss", "loss/preference", 3), ("loss", "loss/nll", 3))
    shown = {name: f"{metrics[key]:.{digits}f}" for name, key, digits in shown if key in metrics}
    progress.set_postfix(shown, refresh=False)
    progress.update()


def append_line(path, row):
    """Append a row to a jsonl file."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


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
    evals = [line for line in lines if "eval/loss" in line]
    last_step = lines[-1]["step"]
    seconds = sum(line.get("perf/step_seconds", 0.0) for line in lines)
    rate = last_step * args.minibatch_size / max(seconds, 1e-9)
    print(f"\n{last_step} steps in {seconds:.0f} s: {last_step * args.minibatch_size} rows, {rate:.0f} a second")
    if evals:
        before, after = evals[0], evals[-1]
        print(f"held-out loss   {before['eval/loss']:.4f} (step {before['step']}) -> ", end="")
        print(f"{after['eval/loss']:.4f} nats a token (step {after['step']})")
    if last_step > 0:
        print(f"checkpoint      {Path(args.run_dir, 'checkpoint')}, which --model and from_pretrained load")
    more = f" --num-steps {2 * args.num_steps}" if last_step >= args.num_steps else ""
    print(f"to go on        python {Path(__file__).name} --resume {Path(args.run_dir)}{more}")


if __name__ == "__main__":
    main(tyro.cli(Args))
