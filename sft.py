"""SFT: supervised fine-tuning of a causal language model, with loss on completions and their stop token.

Ouyang et al., "Training language models to follow instructions with human feedback" (2022), step 1 of section 3.1
https://arxiv.org/abs/2203.02155v1

    L(θ) = − 1/N Σᵢ Σₜ log π_θ(oᵢₜ | qᵢ, oᵢ,<ₜ)

    qᵢ, oᵢ    prompt and completion, the stop token included; each turn of an assistant completes what precedes it
    N         the trained tokens of an optimizer step, over all microbatches and ranks

Departures from the paper
- No dropout. The paper uses residual dropout of 0.2.
- The learning rate rises from 0 and then falls nearly to 0. The paper's starts at its peak and falls to a tenth of it.
- AdamW has the betas 0.9 and 0.98 and a weight decay of 0.1, and gradients are clipped to norm 1. The paper's Adam has
  the betas 0.9 and 0.95.
- With bfloat16, blocks compute with rounded copies of float32 weights. These start with noise below the resolution of
  bfloat16, because small updates would change no copy: ten updates with a learning rate of 1e-6 lower the loss of
  SmolLM2 on 16 rows from 2.84 to 2.82 without the noise, and to 2.46 with it (docs/precision.md).

    python sft.py
    python sft.py --model Qwen/Qwen2.5-0.5B --dataset my_chats.jsonl

The first command trains the architecture of the bundled model, a Qwen3 of half a million parameters, from random
weights. It runs the settings TINY below, the second command those of Args.
"""

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
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

HERE = Path(__file__).resolve().parent
RANK = int(os.environ.get("RANK", 0))  # torchrun sets RANK and WORLD_SIZE
WORLD_SIZE = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1


@dataclass
class Args:
    """Train a language model with supervised fine-tuning."""

    # model and data
    model: str = str(HERE / "models/tiny/config.json")
    """folder or Hugging Face name of a causal language model, or the config.json of a folder: then its model starts
    from random weights"""
    tiny: bool = False
    """use the settings TINY, those of the bundled model, for a checkpoint of it"""
    dataset: str = str(HERE / "data/addition/sft.jsonl")
    """file, folder or Hugging Face NAME[:CONFIG[:SPLIT]] with the column messages, or with prompt (or question,
    problem) and completion (or response, solution, answer); the columns system and tools are read, too"""
    system_prompt: str = ""
    """system message placed before every chat that has none"""
    max_prompt_length: int = 1024
    """maximum tokens before a turn of the assistant; turns with more are dropped"""
    max_completion_length: int = 1024
    """maximum tokens per turn of the assistant, including the stop token; longer turns are dropped"""

    # optimization
    num_steps: int = 1000
    """optimizer steps (0: evaluate only)"""
    learning_rate: float = 1e-5
    """peak learning rate of AdamW, after the warm-up; small models need a higher one: 2e-4 for 135 M parameters"""
    warmup_steps: int = 50
    """optimizer steps over which the learning rate rises from 0"""
    minibatch_size: int = 64
    """examples (turns of the assistant) per optimizer step, over all ranks"""
    microbatch_tokens: int = 4096
    """maximum tokens per forward pass, including padding"""
    max_grad_norm: float = 1.0
    """larger gradients are scaled down to this norm"""
    weight_decay: float = 0.1
    """weight decay of AdamW"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: saves memory, but the update takes about a third longer"""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """precision of the transformer blocks (auto: bfloat16 where the hardware multiplies it, otherwise float32)"""
    lora_rank: int = 0
    """train LoRA adapters of this rank; set --learning-rate 3 to 10 times higher (0: train the whole model)"""

    # evaluation, saving, logging
    eval_every: int = 100
    """steps between evaluations"""
    eval_prompts: int = 256
    """held-out rows per evaluation (-1: all; of a training split, at most a fifth)"""
    save_every: int = 100
    """steps between saves"""
    run_dir: str = ""
    """new folder for logs and checkpoints (empty: runs/SCRIPT__SEED__TIME)"""
    resume: str = ""
    """folder of a run to continue; its settings become the defaults (loading an untrusted run can execute code)"""
    seed: int = 1
    """seed of random weights and of the order of examples"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline works)"""


# `python sft.py` trains the bundled model from random weights with these settings. --tiny gives them to a checkpoint.
TINY = {"learning_rate": 3e-3, "warmup_steps": 300, "num_steps": 2200}
TINY |= {"system_prompt": "", "max_prompt_length": 32, "max_completion_length": 48, "eval_prompts": 512}
TINY |= {"microbatch_tokens": 2048, "eval_every": 500, "save_every": 500, "precision": "float32"}


def completion_loss(logprobs, completion_mask):
    """Sum the negative log-likelihood over completion tokens; the caller divides by their number.

    Both (B, T), in nats. Metrics are pairs (sum, count), over tokens.
    """
    mask = completion_mask.bool()
    loss = -torch.where(mask, logprobs, 0.0).sum()
    return loss, {"loss/nll": (loss.detach(), mask.sum())}


def completion_logprobs(policy, examples):
    """Return the log-probabilities of completion tokens and their mask, (B, T) each."""
    rows = examples or [FILLER]  # a rank that has run out of examples still needs a pass, because FSDP's others do
    device = policy.model.device
    prompt_ids, prompt_mask = pad([row["prompt_ids"] for row in rows], device)
    completion_ids, completion_mask = pad([row["completion_ids"] for row in rows], device)
    logprobs = policy(prompt_ids, prompt_mask, completion_ids, completion_mask)
    return logprobs[: len(examples)], completion_mask[: len(examples)]  # without the filler


@torch.no_grad()
def evaluate(policy, examples, args):
    """Return the mean loss per completion token of held-out examples, and its exponential, the perplexity."""
    collected = []
    parts = microbatches(examples[RANK::WORLD_SIZE], args.microbatch_tokens)
    for part in inner_bar(parts, "evaluation"):
        logprobs, mask = completion_logprobs(policy, part)
        _, metrics = completion_loss(logprobs, mask)
        collected.append(metrics)
    loss = mean_metrics(collected)["loss/nll"]
    return {"eval/loss": loss, "eval/perplexity": math.exp(loss)}


def accumulate_gradients(policy, examples, divisor, args):
    """Accumulate the gradients of completion_loss / divisor over these examples; return a list of its metrics."""
    collected = []
    for part in microbatches(examples, args.microbatch_tokens):
        logprobs, mask = completion_logprobs(policy, part)
        loss, metrics = completion_loss(logprobs, mask)
        (loss / divisor).backward()
        collected.append(metrics)
    return collected


def main(args):
    device = init_ranks()
    check_args(args)
    pretraining = args.model.endswith("config.json")
    if pretraining and RANK == 0:
        print(f"{args.model}: random weights; to fine-tune a model, name its folder, as in --model models/tiny")
    tokenizer = AutoTokenizer.from_pretrained(args.model.removesuffix("config.json"))
    train_examples, eval_examples = load_chats(args, tokenizer)
    if pretraining:
        model = make_model(args.model, args.seed)
    else:
        model = load_model(args.model, tokenizer)
    check_model(model, args)
    if args.lora_rank:
        add_adapters(model, args.lora_rank)
    policy = prepare_model(LogprobModel(model), args, device)
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, (0.9, 0.98), fused=True)
    init_moments(optimizer)
    last_step = open_run(args, policy, optimizer)
    for group in optimizer.param_groups:
        group["weight_decay"] = args.weight_decay  # also if the state of the run to resume has another
    signals = catch_signals()
    if eval_examples and last_step == 0:
        log_step(args, 0, evaluate(policy, eval_examples, args))

    progress = tqdm(range(last_step + 1, args.num_steps + 1), disable=RANK > 0)
    for step in progress:
        step_start = time.perf_counter()

        # update: one optimizer step, to which each rank contributes its share of the examples
        first = (step - 1) * args.minibatch_size
        examples = pick_rows(train_examples, first, args.minibatch_size, args.seed)
        num_tokens = sum(len(example["completion_ids"]) for example in examples)
        divisor = num_tokens / WORLD_SIZE  # tokens of all ranks; FSDP takes the mean over ranks
        collected = accumulate_gradients(policy, examples[RANK::WORLD_SIZE], divisor, args)
        # The learning rate rises, then falls on a cosine, from its peak in the first step after the warm-up.
        decay = (step - 1 - args.warmup_steps) / max(1, args.num_steps - args.warmup_steps)
        factor = 0.5 * (1 + math.cos(math.pi * max(0.0, decay)))
        learning_rate = args.learning_rate * min(step / max(1, args.warmup_steps), factor)
        grad_norm = step_optimizer(policy, optimizer, learning_rate, args.max_grad_norm)

        # metrics, evaluation, logs, saving
        metrics = mean_metrics(collected)
        metrics["optim/grad_norm"] = grad_norm
        metrics["optim/learning_rate"] = learning_rate
        metrics["perf/step_seconds"] = time.perf_counter() - step_start
        stopping = stop_requested(signals)
        if eval_examples and not stopping and (step % args.eval_every == 0 or step == args.num_steps):
            metrics |= evaluate(policy, eval_examples, args)
        log_step(args, step, metrics)
        progress.set_postfix(loss=metrics["loss/nll"])
        if stopping or step % args.save_every == 0 or step == args.num_steps:
            save(args.run_dir, policy, optimizer, tokenizer, step)
        if stopping:
            break

    end_run(args, signals)


# ---- below: identical copies of what several scripts share, in the order of use
# This script's own are only load_chats, read_chats, make_model, microbatches, count_tokens.

PATHS = ("model", "dataset")  # flags that may name a file or folder
PROMPT_COLUMNS = ("prompt", "question", "problem")
COMPLETION_COLUMNS = ("completion", "response", "solution", "answer")
READ_COLUMNS = (*PROMPT_COLUMNS, *COMPLETION_COLUMNS, "messages", "system", "tools")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
LOGITS_AT_ONCE = 2**27 if torch.cuda.is_available() else 2**25  # of the head: 512 MiB on a GPU, 128 MiB on a CPU
LORA_ALPHA = 32  # an adapter's output is multiplied by alpha / rank
LESS_MEMORY = (
    "Out of memory: lower --microbatch-tokens, or add --gradient-checkpointing or --lora-rank 8; "
    "python tools/memory.py --script S --model M --gpu-gb G tells what fits"
)
LINEAR_LAYERS = ("Linear", "FalconLinear")  # classes that get adapters; subclasses, such as routers, may do more
FILLER = {"prompt_ids": [0], "completion_ids": [0]}  # an example whose results nobody uses

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
    for name in ("max_grad_norm", "eval_every", "save_every"):
        if getattr(args, name) <= 0:
            raise SystemExit(f"--{name.replace('_', '-')} must be above 0")
    if args.minibatch_size % WORLD_SIZE:
        raise SystemExit(f"--minibatch-size must be a multiple of the {WORLD_SIZE} ranks")
    if args.precision == "auto":
        args.precision = "bfloat16" if multiplies_bfloat16() else "float32"


def multiplies_bfloat16():
    """Return whether the GPU, or without one the CPU, multiplies bfloat16 itself."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu.get_capabilities().get("avx512_bf16", False)


def load_chats(args, tokenizer):
    """Load training and held-out examples, one per turn of the assistant, and print the first as the model reads it."""
    train_rows, held_out_rows = load_splits(args.dataset, args.eval_prompts)
    eval_examples = read_chats("held-out", held_out_rows, [], args, tokenizer)
    held_out = {tuple(example["prompt_ids"]) for example in eval_examples}
    train_examples = read_chats("training", train_rows, held_out, args, tokenizer)
    if args.num_steps > 0 and not train_examples:
        raise SystemExit(f"{args.dataset}: no example is left for training")
    if RANK == 0:
        first = (train_examples or eval_examples)[0]
        prompt, completion = [tokenizer.decode(first[name]) for name in ("prompt_ids", "completion_ids")]
        print(f"the first prompt: {prompt!r}; trained after it: {completion!r}")
    return train_examples, eval_examples


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


def read_chats(kind, rows, held_out, args, tokenizer):
    """Read a split's examples, without those whose prompt is held out; print how many were dropped, and why."""
    examples, dropped = [], Counter()
    for number, row in enumerate(rows):
        try:
            turns = read_chat(row, tokenizer, args)
        except Exception as error:
            raise SystemExit(f"{args.dataset}, {kind} row {number}: {error!r}; the row is {row!r:.300}") from error
        for example, reason in turns:
            if not reason and tuple(example["prompt_ids"]) in held_out:
                reason = "held out, or with a held-out prompt"
            if reason:
                dropped[reason] += 1
            else:
                examples.append(example)
    if RANK == 0:
        unknown = sum(tokenizer.unk_token_id in example["prompt_ids"] for example in examples)
        special = [re.escape(str(token)) for token in tokenizer.added_tokens_decoder.values() if token.special]
        marks = re.compile("|".join(special))
        marked = sum(marks.search(str(row)) is not None for row in rows)
        print(f"{len(examples)} {kind} examples, dropped: {dict(dropped)}, prompts with unknown tokens: {unknown}")
        print(f"{kind} rows with special tokens in their text: {marked}")
    return examples


def read_chat(row, tokenizer, args):
    """Return an example and "" for each turn of the assistant in a row, or None and why the turn is dropped."""
    messages = find_chat(row)
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        return [(None, "without a prompt and a completion")]
    if "user" not in roles[: roles.index("assistant")]:
        return [(None, "that begin with the assistant")]
    system_prompt = row.get("system") or args.system_prompt
    if system_prompt and roles[0] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    turns = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            turns.append(read_turn(messages[: place + 1], without_nulls(row.get("tools")), tokenizer, args))
    return turns


def find_chat(row):
    """Return a row's messages, or its prompt and completion as messages; an empty list if it has neither."""
    messages = find_column(row, ("messages",))
    if messages:
        return as_messages(messages, "user")
    prompt = find_column(row, PROMPT_COLUMNS)
    completion = find_column(row, COMPLETION_COLUMNS)
    if not prompt or not completion:
        return []
    return as_messages(prompt, "user") + as_messages(completion, "assistant")


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


def read_turn(chat, tools, tokenizer, args):
    """Return the ids of a chat's last turn and of all that precedes it, and ""; or None, and why it is dropped."""
    prompt_ids = encode_prompt(tokenizer, chat[:-1], tools)
    completion_ids = encode_completion(tokenizer, prompt_ids, chat, tools)
    if completion_ids is None:
        return None, "whose prompt reads differently when a completion follows"
    if len(completion_ids) == 1:  # a stop token alone
        return None, "with an empty completion"
    if len(prompt_ids) > args.max_prompt_length:
        return None, "with a prompt longer than --max-prompt-length"
    if len(completion_ids) > args.max_completion_length:
        return None, "with a completion longer than --max-completion-length"
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids}, ""


def encode_prompt(tokenizer, messages, tools):
    """Return the ids of messages, up to the place where the completion begins."""
    if tokenizer.chat_template is not None:
        return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    text = "\n\n".join(message["content"] for message in messages)
    ids = tokenizer(text, split_special_tokens=True)["input_ids"]
    if ids[-1] == tokenizer.eos_token_id:  # some tokenizers add it
        ids.pop()
    return ids


def encode_completion(tokenizer, prompt_ids, chat, tools):
    """Return the ids of a chat's last message, up to a stop token; None if the prompt's ids do not precede them."""
    if tokenizer.chat_template is None:
        ids = tokenizer(chat[-1]["content"], add_special_tokens=False)["input_ids"]
        completion_ids = [*ids, tokenizer.eos_token_id]
    else:
        ids = tokenizer.apply_chat_template(chat, tools=tools, return_dict=False)
        if ids[: len(prompt_ids)] != prompt_ids:
            return None
        completion_ids = ids[len(prompt_ids) :]
    # Nothing after the first stop token is ever sampled, such as a second one, or the line break of some templates.
    stop_ids = (tokenizer.eos_token_id, find_turn_end(tokenizer))
    for place, token in enumerate(completion_ids):
        if token in stop_ids:
            return completion_ids[: place + 1]
    raise ValueError("the chat template writes no stop token after a completion")


def find_turn_end(tokenizer):
    """Find the special token that ends the assistant's turn in the chat template; None if there is no template."""
    if tokenizer.chat_template is not None:
        chat = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"}]
        tail = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("Answer")[2].strip()
        for token in tokenizer(tail, add_special_tokens=False)["input_ids"]:
            if token in tokenizer.added_tokens_decoder:
                return token
    return None


def make_model(config_file, seed):
    """Make a model with random weights from its config.json."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config_file), dtype=torch.float32).eval()
    model.get_input_embeddings().padding_idx = None  # as in load_model
    if model.num_parameters() < 10_000_000:
        torch.set_num_threads(1)
    return model


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


@torch.no_grad()
def check_model(model, args):
    """Exit if texts may exceed the model's context, or if head_logprobs does not compute what the model does."""
    longest = args.max_prompt_length + args.max_completion_length
    context = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)
    if longest > context:
        raise SystemExit(
            f"--max-prompt-length and --max-completion-length add up to {longest} tokens, but the model's context has "
            f"only {context}; a checkpoint of the bundled model needs --tiny"
        )
    # A model may change its logits in a way that head_logprobs does not know.
    ids = torch.arange(8)  # eight arbitrary tokens, as inputs and as targets
    hidden = model.base_model(input_ids=ids.unsqueeze(0)).last_hidden_state
    logprobs = head_logprobs(model, hidden[0], ids)
    logits = model(input_ids=ids.unsqueeze(0)).logits
    expected = -nn.functional.cross_entropy(logits[0], ids, reduction="none")
    if not torch.allclose(logprobs, expected, atol=0.01):
        raise SystemExit("log-probabilities differ from the model's own: its LM head is not supported")


def head_logprobs(model, hidden, targets):
    """Return the log-probabilities of targets (N,) under softmax(head(hidden))."""
    head = model.get_output_embeddings()
    # What some families do to logits. If another is missing here, check_model says so.
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
        return logits.log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)

    # All logits (N, V) might not fit: compute them in chunks, and again in the backward pass.
    size = LOGITS_AT_ONCE // head.weight.shape[0]
    if len(hidden) <= size:
        return chunk_logprobs(hidden, targets)
    chunks = zip(hidden.split(size), targets.split(size))
    return torch.cat([checkpoint(chunk_logprobs, *chunk, use_reentrant=False) for chunk in chunks])


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

    def __init__(self, layer, rank):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_a = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)  # the model starts unchanged

    def forward(self, inputs):
        rows = inputs.flatten(0, -2)  # (N, D)
        adapted = self.lora_b(self.lora_a(rows)) * (LORA_ALPHA / self.lora_a.out_features)
        # addmm adds the adapter's output to the layer's before that is rounded. bfloat16 has 1, 1.008, 1.016:
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

    def forward(self, prompt_ids, prompt_mask, completion_ids, completion_mask):
        return token_logprobs(self.model, prompt_ids, prompt_mask, completion_ids, completion_mask)


def token_logprobs(model, prompt_ids, prompt_mask, completion_ids, completion_mask):
    """Return the log-probabilities of completion tokens.

    prompts (B, P), completions (B, T) -> logprobs (B, T) in nats, 0 outside the mask.
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
    flat_logprobs = head_logprobs(model, hidden, completion_ids[completion_mask])  # (N,)
    logprobs = flat_logprobs.new_zeros(completion_mask.shape)  # (B, T)
    logprobs[completion_mask] = flat_logprobs
    return logprobs


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
        os.write(2, b"\nsaving and stopping after this step; Ctrl-C stops at once\n")

    signal.signal(signal.SIGINT, request_stop)
    signal.signal(signal.SIGTERM, request_stop)
    return signals


def log_step(args, step, metrics):
    """Log the metrics of a step, and print those of an evaluation."""
    append_line(args, "metrics.jsonl", step, metrics)
    if RANK > 0:
        return
    if args.track:
        import wandb

        wandb.log({"step": step} | metrics)
    shown = [f"{name.removeprefix('eval/')} {value:.3f}" for name, value in metrics.items() if name.startswith("eval/")]
    if shown:
        tqdm.write(f"evaluation after step {step}: {', '.join(shown)}")


def append_line(args, name, step, values):
    """Append the values of a step to one of the run's jsonl files."""
    if RANK == 0:
        with Path(args.run_dir, name).open("a") as file:
            file.write(json.dumps({"step": step} | values, default=float) + "\n")


def microbatches(examples, max_tokens):
    """Split examples, longest first, into parts of up to max_tokens including padding, or of a single one."""
    examples = sorted(examples, key=count_tokens, reverse=True)
    parts = []
    first = 0
    while first < len(examples):
        size = max(1, max_tokens // count_tokens(examples[first]))
        parts.append(examples[first : first + size])
        first += size
    # FSDP needs equally many passes on all ranks, so those with fewer parts get empty ones.
    num_parts = int(all_reduce(len(parts), dist.ReduceOp.MAX))
    return parts + [[]] * (num_parts - len(parts))


def count_tokens(example):
    """Return how many tokens an example takes in a batch."""
    return len(example["prompt_ids"]) + len(example["completion_ids"])


def pad(rows, device):
    """Pad lists of ids on the right; return ids and mask (B, T)."""
    rows = [torch.tensor(row, device=device) for row in rows]
    mask = [torch.ones_like(row) for row in rows]
    return pad_sequence(rows, batch_first=True), pad_sequence(mask, batch_first=True)


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


def mix_seed(*numbers):
    """Return one seed for several numbers, such as seed, step and rank."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 1_000_003 + number) % 2**63
    return mixed


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
