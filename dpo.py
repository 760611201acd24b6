"""DPO: Direct Preference Optimization.

Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model" (2023)
https://arxiv.org/abs/2305.18290v3, equation 7.

    L(θ) = −E log σ(β h),   h = log π_θ(y_w|x)/π_ref(y_w|x) − log π_θ(y_l|x)/π_ref(y_l|x)

    x, y_w, y_l   prompt, and the completion that was preferred (chosen) and the one that was not (rejected)
    log π(y|x)    summed over the tokens of a completion, the stop token included
    π_ref         the model that training started from
    β             --beta; β log π_θ(y|x)/π_ref(y|x) is the reward that the policy implies

The loss sees only the difference h. It also falls when both log-probabilities fall and the rejected one falls faster.
What both completions share is pushed up and down equally. Probability that is taken from the rejected completion may
flow to any text, not only to the chosen one. So the chosen completion often ends less likely than at the start
(pair/chosen_log_ratio < 0), although the margin between the rewards grows. To see whether answers got better, let
another script sample and score some for its own prompts: grpo.py --model RUN/checkpoint --num-steps 0 (and --tiny, if
it is the bundled model).

Departures from the paper
- AdamW (betas 0.9 and 0.95, no weight decay) instead of RMSprop. The learning rate is that of the authors' code, 5e-7;
  the paper has 1e-6.
- --label-smoothing is the probability ε that a label is wrong (cDPO, Mitchell 2023). It mixes the losses of the two
  orders with weights 1 − ε and ε; with 0, the default, the loss is the paper's.
- The reference's log-probabilities are computed once, by the policy before its first step. No other model is loaded.
- With bfloat16, blocks compute with rounded copies of float32 weights. These start with noise below the resolution of
  bfloat16, because small updates would change no copy: ten updates with a learning rate of 1e-6 lower the loss of
  SmolLM2 on 16 rows from 2.84 to 2.82 without the noise, and to 2.46 with it (docs/precision.md).

    python dpo.py
    python dpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/ultrafeedback_binarized

The first command runs the settings TINY below, the second those of Args.
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
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

HERE = Path(__file__).resolve().parent
RANK = int(os.environ.get("RANK", 0))  # torchrun sets RANK and WORLD_SIZE
WORLD_SIZE = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1


@dataclass
class Args:
    """Train a language model with DPO, Direct Preference Optimization."""

    # the algorithm
    beta: float = 0.1
    """beta of eq. 7: how strongly the policy is held near the reference (0.1 and 0.5 in appendix B)"""
    label_smoothing: float = 0.0
    """probability, below 0.5, that chosen and rejected are swapped in the data (cDPO)"""

    # model and data
    model: str = str(HERE / "models/tiny")
    """folder or Hugging Face name of a causal language model"""
    tiny: bool = False
    """use the settings TINY, those of the bundled model, for a checkpoint of it"""
    dataset: str = str(HERE / "data/preferences")
    """file, folder or Hugging Face NAME[:CONFIG[:SPLIT]] with the columns chosen and rejected, with or without prompt
    (or question, problem); the columns system and tools are read, too"""
    system_prompt: str = ""
    """system message placed before every prompt that has none"""
    max_prompt_length: int = 512
    """maximum tokens per prompt; pairs with a longer one are dropped"""
    max_completion_length: int = 512
    """maximum tokens per completion, including the stop token; pairs with a longer one are dropped"""

    # optimization
    num_steps: int = 1000
    """optimizer steps (0: evaluate only)"""
    learning_rate: float = 5e-7
    """learning rate of AdamW (5e-7 in the authors' code); small models need a higher one: 1e-5 for 135 M parameters"""
    warmup_steps: int = 150
    """optimizer steps over which the learning rate rises from 0 (150 in the paper)"""
    minibatch_size: int = 64
    """pairs per optimizer step, over all ranks"""
    microbatch_tokens: int = 4096
    """maximum tokens per forward pass, including padding"""
    max_grad_norm: float = 10.0
    """larger gradients are scaled down to this norm (10 in the authors' code)"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: saves memory, but the update takes about a third longer"""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """precision of the transformer blocks (auto: bfloat16 where the hardware multiplies it, otherwise float32)"""
    lora_rank: int = 0
    """train LoRA adapters of this rank; set --learning-rate 3 to 10 times higher (0: train the whole model)"""

    # evaluation, saving, logging
    eval_every: int = 100
    """steps between evaluations"""
    eval_prompts: int = 512
    """held-out pairs per evaluation (-1: all; of a training split, at most a fifth)"""
    save_every: int = 100
    """steps between saves"""
    run_dir: str = ""
    """new folder for logs and checkpoints (empty: runs/SCRIPT__SEED__TIME)"""
    resume: str = ""
    """folder of a run to continue; its settings become the defaults (loading an untrusted run can execute code)"""
    seed: int = 1
    """seed of the order of pairs"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline works)"""


# Without --model, the bundled model is trained with these settings; with --tiny, also a checkpoint of it.
TINY = {"learning_rate": 1e-4, "warmup_steps": 8, "num_steps": 64, "beta": 0.5}
TINY |= {"system_prompt": "", "max_prompt_length": 32, "max_completion_length": 48, "eval_prompts": 512}
TINY |= {"microbatch_tokens": 2048, "eval_every": 32, "save_every": 32, "precision": "float32"}


def preference_loss(
    chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs, beta, label_smoothing
):
    """Eq. 7, summed over pairs; the caller divides by their number.

    The four log-probabilities are (B,), in nats, summed over completion tokens. Metrics are pairs (sum, count).
    """
    chosen_log_ratios = chosen_logprobs - ref_chosen_logprobs.detach()  # (B,)
    rejected_log_ratios = rejected_logprobs - ref_rejected_logprobs.detach()
    margins = beta * (chosen_log_ratios - rejected_log_ratios)
    losses = -(1 - label_smoothing) * nn.functional.logsigmoid(margins)
    losses = losses - label_smoothing * nn.functional.logsigmoid(-margins)
    loss = losses.sum()
    values = {
        "loss/preference": losses,
        "pair/accuracy": (margins > 0) + 0.5 * (margins == 0),  # before training, all margins are 0
        "pair/margin": margins,
        "pair/chosen_reward": beta * chosen_log_ratios,
        "pair/rejected_reward": beta * rejected_log_ratios,
        "pair/chosen_log_ratio": chosen_log_ratios,
        "pair/rejected_log_ratio": rejected_log_ratios,
    }
    metrics = {name: (value.detach().sum(), len(value)) for name, value in values.items()}
    return loss, metrics


def pair_logprobs(policy, pairs):
    """Return the log-probabilities of the chosen and the rejected completions, summed over tokens, (B, 2)."""
    prompts = [pair["prompt_ids"] for pair in pairs]
    chosen = [pair["chosen_ids"] for pair in pairs]
    rejected = [pair["rejected_ids"] for pair in pairs]
    device = policy.model.device
    logprobs = policy(*pad(prompts * 2, device), *pad(chosen + rejected, device))  # (2B, T), all chosen ones first
    return logprobs.sum(1).view(2, -1).T


def pair_loss(policy, pairs, args):
    """Return preference_loss of these pairs, which have the reference's log-probabilities, and its metrics."""
    rows = pairs or [FILLER]  # a rank that has run out of pairs still needs a pass, because FSDP's others do
    logprobs = pair_logprobs(policy, rows)  # (B, 2)
    ref_logprobs = torch.stack([row["ref_logprobs"] for row in rows]).to(logprobs)  # (B, 2)
    count = len(pairs)  # without the filler
    return preference_loss(
        chosen_logprobs=logprobs[:count, 0],
        rejected_logprobs=logprobs[:count, 1],
        ref_chosen_logprobs=ref_logprobs[:count, 0],
        ref_rejected_logprobs=ref_logprobs[:count, 1],
        beta=args.beta,
        label_smoothing=args.label_smoothing,
    )


@torch.no_grad()
def add_ref_logprobs(policy, pairs, args):
    """Add ref_logprobs (2,) to each pair: its pair_logprobs under this policy. Every rank computes a part."""
    for pair in pairs:
        pair["ref_logprobs"] = torch.zeros(2, dtype=torch.float64)
    parts = microbatches(pairs[RANK::WORLD_SIZE], args.microbatch_tokens)
    for part in inner_bar(parts, "reference"):
        for pair, logprobs in zip(part, pair_logprobs(policy, part or [FILLER])):
            pair["ref_logprobs"] = logprobs.double().cpu()
    table = torch.stack([pair["ref_logprobs"] for pair in pairs])  # (pairs, 2), 0 where another rank computes the pair
    dist.all_reduce(table)
    for pair, logprobs in zip(pairs, table):
        pair["ref_logprobs"] = logprobs


@torch.no_grad()
def evaluate(policy, pairs, args):
    """Return the loss and its metrics on held-out pairs."""
    collected = []
    parts = microbatches(pairs[RANK::WORLD_SIZE], args.microbatch_tokens)
    for part in inner_bar(parts, "evaluation"):
        _, metrics = pair_loss(policy, part, args)
        metrics["pair/loss"] = metrics.pop("loss/preference")
        collected.append(metrics)
    return {f"eval/{name.replace('/', '_')}": value for name, value in mean_metrics(collected).items()}


def accumulate_gradients(policy, pairs, divisor, args):
    """Accumulate the gradients of preference_loss / divisor over these pairs; return a list of its metrics."""
    collected = []
    for part in microbatches(pairs, args.microbatch_tokens):
        loss, metrics = pair_loss(policy, part, args)
        (loss / divisor).backward()
        collected.append(metrics)
    return collected


def main(args):
    device = init_ranks()
    check_args(args)
    if args.label_smoothing >= 0.5:
        raise SystemExit("--label-smoothing must be below 0.5: at 0.5 labels say nothing, above it they are swapped")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train_pairs, eval_pairs = load_pairs(args, tokenizer)
    model = load_model(args.model, tokenizer)
    check_model(model, args)
    if args.lora_rank:
        add_adapters(model, args.lora_rank)
    policy = prepare_model(LogprobModel(model), args, device)
    # The reference is the policy as it is here, before open_run may load a state. It reads all pairs once.
    if eval_pairs:
        add_ref_logprobs(policy, eval_pairs, args)
    if args.num_steps > 0:
        add_ref_logprobs(policy, train_pairs, args)
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, (0.9, 0.95), weight_decay=0.0, fused=True)
    init_moments(optimizer)
    last_step = open_run(args, policy, optimizer)
    signals = catch_signals()
    divisor = args.minibatch_size // WORLD_SIZE  # pairs of this rank; FSDP takes the mean over ranks
    if eval_pairs and last_step == 0:
        log_step(args, 0, evaluate(policy, eval_pairs, args))

    progress = tqdm(range(last_step + 1, args.num_steps + 1), disable=RANK > 0)
    for step in progress:
        step_start = time.perf_counter()

        # update: one optimizer step, to which each rank contributes its share of the pairs
        first = (step - 1) * args.minibatch_size
        pairs = pick_rows(train_pairs, first, args.minibatch_size, args.seed)
        collected = accumulate_gradients(policy, pairs[RANK::WORLD_SIZE], divisor, args)
        learning_rate = args.learning_rate * min(1.0, step / max(1, args.warmup_steps))
        grad_norm = step_optimizer(policy, optimizer, learning_rate, args.max_grad_norm)

        # metrics, evaluation, logs, saving
        metrics = mean_metrics(collected)
        metrics["optim/grad_norm"] = grad_norm
        metrics["optim/learning_rate"] = learning_rate
        metrics["perf/step_seconds"] = time.perf_counter() - step_start
        stopping = stop_requested(signals)
        if eval_pairs and not stopping and (step % args.eval_every == 0 or step == args.num_steps):
            metrics |= evaluate(policy, eval_pairs, args)
        log_step(args, step, metrics)
        progress.set_postfix(accuracy=metrics["pair/accuracy"])
        if stopping or step % args.save_every == 0 or step == args.num_steps:
            save(args.run_dir, policy, optimizer, tokenizer, step)
        if stopping:
            break

    end_run(args, signals)


# ---- below: identical copies of what several scripts share, in the order of use

PATHS = ("model", "dataset")  # flags that may name a file or folder
PROMPT_COLUMNS = ("prompt", "question", "problem")
READ_COLUMNS = (*PROMPT_COLUMNS, "chosen", "rejected", "system", "tools")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
LOGITS_AT_ONCE = 2**27 if torch.cuda.is_available() else 2**25  # of the head: 512 MiB on a GPU, 128 MiB on a CPU
LORA_ALPHA = 32  # an adapter's output is multiplied by alpha / rank
LESS_MEMORY = (
    "Out of memory: lower --microbatch-tokens, or add --gradient-checkpointing or --lora-rank 8; "
    "python tools/memory.py --script S --model M --gpu-gb G tells what fits"
)
LINEAR_LAYERS = ("Linear", "FalconLinear")  # classes that get adapters; subclasses, such as routers, may do more
FILLER = {"prompt_ids": [0], "chosen_ids": [0], "rejected_ids": [0], "ref_logprobs": torch.zeros(2)}  # for nobody

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


def load_pairs(args, tokenizer):
    """Load training pairs and held-out pairs, and print the first as the model reads it."""
    train_rows, held_out_rows = load_splits(args.dataset, args.eval_prompts)
    eval_pairs = read_pairs("held-out", held_out_rows, [], args, tokenizer)
    held_out = {tuple(pair["prompt_ids"]) for pair in eval_pairs}
    train_pairs = read_pairs("training", train_rows, held_out, args, tokenizer)
    if args.num_steps > 0 and not train_pairs:
        raise SystemExit(f"{args.dataset}: no pair is left for training")
    if RANK == 0:
        first = (train_pairs or eval_pairs)[0]
        names = ("prompt_ids", "chosen_ids", "rejected_ids")
        prompt, chosen, rejected = [tokenizer.decode(first[name]) for name in names]
        print(f"the first prompt: {prompt!r}; trained after it: chosen {chosen!r}, rejected {rejected!r}")
    return train_pairs, eval_pairs


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


def read_pairs(kind, rows, held_out, args, tokenizer):
    """Read a split's pairs, without those whose prompt is held out; print how many were dropped, and why."""
    pairs, dropped = [], Counter()
    for number, row in enumerate(rows):
        try:
            pair, reason = read_pair(row, tokenizer, args)
        except Exception as error:
            raise SystemExit(f"{args.dataset}, {kind} row {number}: {error!r}; the row is {row!r:.300}") from error
        if not reason and tuple(pair["prompt_ids"]) in held_out:
            reason = "held out, or with a held-out prompt"
        if reason:
            dropped[reason] += 1
        else:
            pairs.append(pair)
    if RANK == 0:
        unknown = sum(tokenizer.unk_token_id in pair["prompt_ids"] for pair in pairs)
        special = [re.escape(str(token)) for token in tokenizer.added_tokens_decoder.values() if token.special]
        marks = re.compile("|".join(special))
        marked = sum(marks.search(str(row)) is not None for row in rows)
        print(f"{len(pairs)} {kind} rows, dropped: {dict(dropped)}, prompts with unknown tokens: {unknown}")
        print(f"{kind} rows with special tokens in their text: {marked}")
    return pairs


def read_pair(row, tokenizer, args):
    """Return the ids of a row's prompt and completions, and ""; or None, and why the row is dropped."""
    prompt, chosen, rejected = split_pair(row, tokenizer.chat_template is not None)
    if not prompt:
        return None, "without the columns chosen and rejected, and a prompt that both share"
    system_prompt = row.get("system") or args.system_prompt
    if system_prompt and prompt[0]["role"] != "system":
        prompt.insert(0, {"role": "system", "content": system_prompt})
    tools = without_nulls(row.get("tools"))
    prompt_ids = encode_prompt(tokenizer, prompt, tools)
    chosen_ids = encode_completion(tokenizer, prompt_ids, [*prompt, chosen], tools)
    rejected_ids = encode_completion(tokenizer, prompt_ids, [*prompt, rejected], tools)
    if chosen_ids is None or rejected_ids is None:
        return None, "whose prompt reads differently when a completion follows"
    if min(len(chosen_ids), len(rejected_ids)) == 1:  # a stop token alone
        return None, "with an empty completion"
    if chosen_ids == rejected_ids:
        return None, "with two equal completions"
    if len(prompt_ids) > args.max_prompt_length:
        return None, "with a prompt longer than --max-prompt-length"
    if max(len(chosen_ids), len(rejected_ids)) > args.max_completion_length:
        return None, "with a completion longer than --max-completion-length"
    return {"prompt_ids": prompt_ids, "chosen_ids": chosen_ids, "rejected_ids": rejected_ids}, ""


def split_pair(row, has_template):
    """Return the prompt of a row, messages, and its two completions, a message each; no prompt if they share none.

    chosen and rejected are one of
    - completions of the row's prompt, as texts or messages,
    - whole chats, as messages, which begin with the prompt,
    - dialogues in the form of Anthropic's HH, as texts of a row without a prompt.
    """
    prompt = find_column(row, PROMPT_COLUMNS)
    chats = []
    for name in ("chosen", "rejected"):
        completion = find_column(row, (name,))
        if not completion:
            return [], None, None
        if isinstance(completion, str) and not prompt:
            chat = parse_dialogue(completion, has_template)
        else:
            chat = as_messages(completion, "assistant")
            if prompt and chat[0]["role"] == "assistant":  # it is not a whole chat yet
                chat = as_messages(prompt, "user") + chat
        chats.append(chat)
    if [] in chats:  # a text that is no dialogue
        return [], None, None
    *prompt, chosen = chats[0]
    *rejected_prompt, rejected = chats[1]
    if prompt != rejected_prompt or not chosen["role"] == rejected["role"] == "assistant":
        return [], None, None
    return prompt, chosen, rejected


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


def parse_dialogue(text, has_template):
    """Turn a dialogue in the form of Anthropic's HH into messages; [] if it is none."""
    head, mark, answer = text.rpartition("\n\nAssistant:")
    if not mark:
        return []
    if not has_template:  # then the model reads the dialogue as it stands
        return [{"role": "user", "content": head + mark}, {"role": "assistant", "content": answer}]
    roles = {"Human": "user", "Assistant": "assistant"}
    parts = re.split(r"\n\n(Human|Assistant):", text)[1:]  # speaker, text, speaker, text, ...
    return [{"role": roles[who], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2])]


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


def microbatches(pairs, max_tokens):
    """Split pairs, longest first, into parts of up to max_tokens including padding, or of a single pair."""
    pairs = sorted(pairs, key=count_tokens, reverse=True)
    parts = []
    first = 0
    while first < len(pairs):
        size = max(1, max_tokens // count_tokens(pairs[first]))
        parts.append(pairs[first : first + size])
        first += size
    # FSDP needs equally many passes on all ranks, so those with fewer parts get empty ones.
    num_parts = int(all_reduce(len(parts), dist.ReduceOp.MAX))
    return parts + [[]] * (num_parts - len(parts))


def count_tokens(pair):
    """Return how many tokens a pair takes in a batch, where both completions are as long as the longer one."""
    return 2 * (len(pair["prompt_ids"]) + max(len(pair["chosen_ids"]), len(pair["rejected_ids"])))


def all_reduce(values, op=dist.ReduceOp.SUM):
    """Reduce a number, or lists of numbers, over all ranks, in float64."""
    values = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(values, op)
    return values.tolist()


def pad(rows, device):
    """Pad lists of ids on the right; return ids and mask (B, T)."""
    rows = [torch.tensor(row, device=device) for row in rows]
    mask = [torch.ones_like(row) for row in rows]
    return pad_sequence(rows, batch_first=True), pad_sequence(mask, batch_first=True)


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
