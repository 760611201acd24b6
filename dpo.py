"""DPO: Direct Preference Optimization.

Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model" (2023)
https://arxiv.org/abs/2305.18290v3, equation 7.

    L(θ) = −E log σ(β h),   h = log π_θ(y_w)/π_ref(y_w) − log π_θ(y_l)/π_ref(y_l)

    y_w, y_l   completions of one prompt, of which the first was preferred (chosen) and the second was not (rejected)
    log π(y)   summed over the tokens of a completion, the stop token included
    π_ref      the model that training started from
    β          --beta; β log π_θ(y)/π_ref(y) is the reward that the policy implies

The loss sees only the difference h. It also falls when both log-probabilities fall and the rejected one falls faster.
What both completions share is pushed up and down equally, and the probability that the rejected one loses may go to any
other text. So the chosen completion often ends less likely than at the start (pair/chosen_log_ratio < 0), although the
margin between the rewards grows. Judge a run by grpo.py --model RUN/checkpoint --num-steps 0.

Compared with reward_model.py
- The same loss, on log-probability ratios instead of scores. --label-smoothing is the probability ε that a label is
  wrong (cDPO, Mitchell 2023): it mixes the losses of the two orders with weights 1 − ε and ε.
- The reference's log-probabilities are computed once, by the policy before its first step. No other model is loaded.

Departures from the paper
- AdamW instead of RMSprop.

    python dpo.py
    python dpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/ultrafeedback_binarized
"""

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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig

HERE = Path(__file__).resolve().parent


@dataclass
class Args:
    """Train a language model with DPO, Direct Preference Optimization."""

    # model and data; the defaults suit real models, and "task_defaults" in a model's config.json replaces them
    model: str = str(HERE / "models/tiny")
    """folder or Hugging Face name of a causal language model; models in models/ replace some defaults below"""
    dataset: str = str(HERE / "data/preferences")
    """file, folder or Hugging Face name; columns: chosen and rejected, with or without prompt (question, problem)"""
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
    """learning rate of AdamW; small models need a higher one, such as 1e-5 for 135 M parameters"""
    warmup_steps: int = 150
    """optimizer steps over which the learning rate rises from 0 (150 in the paper)"""
    minibatch_size: int = 64
    """pairs per optimizer step, over all ranks"""
    microbatch_tokens: int = 16384
    """maximum tokens per forward pass, including padding; lower it if the update runs out of memory"""
    max_grad_norm: float = 10.0
    """larger gradients are scaled down to this norm (10 in the authors' code)"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: saves memory, but the update takes about a third longer"""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """precision of the transformer blocks (auto: bfloat16 where the hardware supports it, otherwise float32)"""
    lora_rank: int = 0
    """train LoRA adapters of this rank; set --learning-rate 3 to 10 times higher (0: train the whole model)"""

    # evaluation, saving, logging
    eval_every: int = 100
    """steps between evaluations"""
    eval_prompts: int = 512
    """held-out pairs per evaluation"""
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

    # the algorithm
    beta: float = 0.1
    """beta of eq. 7: how strongly the policy is held near the reference (0.1 and 0.5 in appendix B)"""
    label_smoothing: float = 0.0
    """probability that chosen and rejected are swapped in the data (cDPO)"""


def pair_logprobs(policy, part):
    """Return the log-probabilities of the chosen and the rejected completions, summed over tokens, (2, n)."""
    flat = {
        "prompt_ids": part["prompt_ids"].repeat(2, 1),
        "prompt_mask": part["prompt_mask"].repeat(2, 1),
        "completion_ids": part["completion_ids"].transpose(0, 1).flatten(0, 1),  # (2n, T), all chosen ones first
        "completion_mask": part["completion_mask"].transpose(0, 1).flatten(0, 1),
    }
    logprobs, _ = policy(flat, 1.0)
    # There are no rows if this rank only keeps pace with the others.
    return logprobs.sum(1).view(2, -1)[:, : len(part["rows"])]


def preference_loss(
    chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs, beta, label_smoothing
):
    """Eq. 7, summed over pairs; the caller divides by their number.

    All (B,), in nats, summed over completion tokens. Returned metrics are sums over pairs.
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
def evaluate_pairs(policy, pairs, args):
    """Return the loss and its metrics on held-out pairs."""
    logprobs = look_up_pairs(policy, pairs, args)  # (2, N)
    ref_logprobs = torch.tensor([pair["ref_logprobs"] for pair in pairs]).T
    _, metrics = preference_loss(*logprobs, *ref_logprobs, args.beta, args.label_smoothing)
    metrics["pair/loss"] = metrics.pop("loss/preference")  # logged as eval/pair_loss
    return {f"eval/{name.replace('/', '_')}": total.item() / len(pairs) for name, total in metrics.items()}


def accumulate_gradients(policy, batch, rows, divisor, args):
    """Accumulate the gradients of preference_loss / divisor over these rows; return the sums of its metrics."""
    totals = Counter()
    for part in microbatches(batch, rows, args.microbatch_tokens):
        chosen_logprobs, rejected_logprobs = pair_logprobs(policy, part)
        ref_chosen_logprobs, ref_rejected_logprobs = part["ref_logprobs"][: len(part["rows"])].unbind(1)
        loss, metrics = preference_loss(
            chosen_logprobs,
            rejected_logprobs,
            ref_chosen_logprobs,
            ref_rejected_logprobs,
            args.beta,
            args.label_smoothing,
        )
        (loss / divisor).backward()
        totals.update(metrics)
    return totals


def main(args):
    rank, world_size, device = init_ranks()
    check_args(args, world_size)
    if args.label_smoothing >= 0.5:
        raise SystemExit("--label-smoothing must be below 0.5: at 0.5 labels carry no information, above it they flip")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train_pairs, eval_pairs = load_pairs(args, tokenizer)
    model = load_model(args.model, tokenizer, args.lora_rank)
    check_context(model, args.max_prompt_length + args.max_completion_length)
    first = [*train_pairs, *eval_pairs][0]
    check_logprobs(model, first["prompt_ids"] + first["chosen_ids"])
    policy = shard(LogprobModel(model), args, device)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    # The reference is the policy as it is here, before a state is loaded: its log-probabilities are computed once.
    for pairs in (train_pairs, eval_pairs):
        for pair, ref_logprobs in zip(pairs, look_up_pairs(policy, pairs, args).T.tolist()):
            pair["ref_logprobs"] = ref_logprobs
    last_step = open_run(args, policy, optimizer)
    stops, handlers = catch_signals()
    if last_step == 0 and eval_pairs:
        log_step(args, 0, evaluate_pairs(policy, eval_pairs, args))

    progress = tqdm(range(last_step + 1, args.num_steps + 1), disable=rank > 0)
    for step in progress:
        step_start = time.perf_counter()

        # batch: this rank's share of the step's pairs
        picked = pick_rows(train_pairs, (step - 1) * args.minibatch_size, args.minibatch_size, args.seed)
        share = picked[rank::world_size]
        batch = collate_pairs(share, device)
        batch["ref_logprobs"] = torch.tensor([pair["ref_logprobs"] for pair in share], device=device)  # (n, 2)
        rows = torch.arange(len(share), device=device)

        # update: one optimizer step
        divisor = args.minibatch_size  # a mean over pairs
        totals = accumulate_gradients(policy, batch, rows, divisor, args)
        learning_rate = args.learning_rate * min(1.0, step / max(1, args.warmup_steps))
        grad_norm = step_optimizer(policy, optimizer, learning_rate, args.max_grad_norm)

        # metrics, evaluation, logs, saving
        metrics = step_metrics(totals, divisor)
        metrics["optim/grad_norm"] = grad_norm
        metrics["optim/learning_rate"] = learning_rate
        metrics["perf/step_seconds"] = time.perf_counter() - step_start
        stopping = all_reduce(len(stops)) > 0
        if eval_pairs and not stopping and (step % args.eval_every == 0 or step == args.num_steps):
            metrics |= evaluate_pairs(policy, eval_pairs, args)
        log_step(args, step, metrics)
        progress.set_postfix(accuracy=metrics["pair/accuracy"])
        if stopping or step % args.save_every == 0 or step == args.num_steps:
            save(args.run_dir, policy, optimizer, tokenizer, step)
        if stopping:
            break

    end_run(args, stops, handlers)


# ---- below: what the scripts share, in the order of use, as identical copies (tests/sync_copies.py lists exceptions)

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
    if args.minibatch_size % world_size:
        raise SystemExit(f"--minibatch-size must be a multiple of the {world_size} ranks")
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


def load_pairs(args, tokenizer):
    """Load training and held-out pairs."""
    train_pairs, eval_pairs = load_rows(args, partial(read_pair, tokenizer=tokenizer, args=args))
    if dist.get_rank() == 0:
        first, names = [*train_pairs, *eval_pairs][0], ("prompt_ids", "chosen_ids", "rejected_ids")
        prompt, chosen, rejected = [tokenizer.decode(first[name]) for name in names]
        print(f"the first pair as the model reads it: {prompt!r}, chosen: {chosen!r}, rejected: {rejected!r}")
    return train_pairs, eval_pairs


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


def read_pair(row, tokenizer, args):
    """Return [{prompt_ids, chosen_ids, rejected_ids}], or why the pair is left out."""
    prompt, chosen, rejected = split_pair(row, tokenizer.chat_template is not None)
    if not prompt or not chosen.strip() or not rejected.strip():
        return ["without a common prompt and two completions"]
    messages = as_messages(prompt, row.get("system") or args.system_prompt)
    prompt_ids, chosen_ids = encode_completion(tokenizer, messages, chosen)
    _, rejected_ids = encode_completion(tokenizer, messages, rejected)
    if chosen_ids == rejected_ids:
        return ["with two equal completions"]
    longest = max(len(chosen_ids), len(rejected_ids))
    if len(prompt_ids) > args.max_prompt_length or longest > args.max_completion_length:
        return ["too long"]
    return [{"prompt_ids": prompt_ids, "chosen_ids": chosen_ids, "rejected_ids": rejected_ids}]


def split_pair(row, has_template):
    """Return the prompt that both completions share, a text or messages (None without one), and their two texts.

    chosen and rejected are completions of the row's prompt, texts or lists of messages; or whole chats, as lists of
    messages; or whole dialogues, as texts in the form of Anthropic's HH.
    """
    prompt = find_column(row, ("prompt", "question", "problem"), required=False)
    chosen, rejected = [find_column(row, (name,)) for name in ("chosen", "rejected")]
    if not chosen or not rejected:
        return None, "", ""
    if isinstance(chosen, list):
        return split_chats(prompt, chosen, rejected)
    if not prompt:
        head, mark, _ = os.path.commonprefix([chosen, rejected]).rpartition("\n\nAssistant:")
        prompt = head + mark
        chosen, rejected = chosen.removeprefix(prompt), rejected.removeprefix(prompt)
        if has_template:
            prompt = parse_dialogue(head)
            chosen, rejected = chosen.strip(), rejected.strip()
    return prompt or None, chosen, rejected


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


def split_chats(prompt, chosen, rejected):
    """Split chosen and rejected messages, which may begin with the prompt's, into their prompt and last texts."""
    before, prompts, texts = [], [], []
    if prompt:
        before = as_messages(prompt)
    for chat in (chosen, rejected):
        messages = as_messages(chat)
        if messages[0]["role"] == "assistant":  # what is not a whole chat continues the prompt
            messages = [*before, *messages]
        last = messages.pop()
        if last["role"] != "assistant":
            return None, "", ""
        prompts.append(messages)
        texts.append(last["content"])
    shared = [[(message["role"], message["content"].strip()) for message in messages] for messages in prompts]
    if shared[0] != shared[1]:
        return None, "", ""
    return prompts[0], *texts


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


def parse_dialogue(text):
    """Turn a dialogue in the form of Anthropic's HH into messages."""
    parts = re.split(r"\n\n(Human|Assistant):", text)[1:]  # speaker, text, speaker, text, ...
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2])]


def encode_completion(tokenizer, messages, text):
    """Return the ids of messages and of the completion that follows, up to its stop token, as the model reads them."""
    prompt_ids = encode_prompt(tokenizer, messages)
    if tokenizer.chat_template is None:
        return prompt_ids, [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    whole = [*messages, {"role": "assistant", "content": text}]
    check_chat(tokenizer, whole)
    ids = tokenizer.apply_chat_template(whole, return_dict=True)["input_ids"]
    if ids[: len(prompt_ids)] != prompt_ids:
        raise ValueError("the chat template renders the prompt differently when a completion follows")
    completion_ids = ids[len(prompt_ids) :]
    stop_ids = {find_turn_end(tokenizer), tokenizer.eos_token_id}
    for place, token in enumerate(completion_ids):
        if token in stop_ids:
            return prompt_ids, completion_ids[: place + 1]
    raise ValueError("the chat template writes no stop token after a completion")


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


def find_turn_end(tokenizer):
    """Find the special token that ends the assistant's turn in the chat template, or else the end of text."""
    if tokenizer.chat_template is None:
        return tokenizer.eos_token_id
    tail = tokenizer.apply_chat_template(CHAT, tokenize=False).rpartition("Answer")[2].strip()
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    return next((i for i in ids if i in tokenizer.added_tokens_decoder), tokenizer.eos_token_id)


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


def check_context(model, longest):
    """Exit if texts may be longer than the model's context."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", longest)
    if longest > context:
        raise SystemExit(f"the maximum lengths add up to {longest} tokens, but the model's context has only {context}")


@torch.no_grad()
def check_logprobs(model, prompt_ids):
    """Exit if token_logprobs differs from the model's own logits, because of an unusual LM head."""
    ids = torch.tensor([prompt_ids])
    ones = torch.ones_like(ids)
    expected = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:].unsqueeze(2))
    logprobs, _ = token_logprobs(model, ids[:, :1], ones[:, :1], ids[:, 1:], ones[:, 1:], 1.0)
    gap = (logprobs - expected.squeeze(2)).abs().max().item()
    if not gap < 0.01:  # nan too
        raise SystemExit(f"log-probabilities differ by {gap:.2g} from the model's own: its LM head is not supported")


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


@torch.no_grad()
def look_up_pairs(policy, pairs, args):
    """Return the log-probabilities (2, N) of all pairs, in float64; each rank computes a part."""
    device = policy.model.device
    found = torch.zeros(2, len(pairs), dtype=torch.float64)
    for first in inner_bar(range(0, len(pairs), 1024), "thousands of pairs"):
        own = range(first, min(first + 1024, len(pairs)))[dist.get_rank() :: dist.get_world_size()]
        batch = collate_pairs([pairs[i] for i in own] or pairs[:1], device)
        for part in microbatches(batch, torch.arange(len(own), device=device), args.microbatch_tokens):
            places = [own[i] for i in part["rows"].tolist()]
            found[:, places] = pair_logprobs(policy, part).cpu().double()
    return found.new_tensor(all_reduce(found))


def collate_pairs(pairs, device):
    """Return a batch of tensors: prompts (n, P) padded on the left, chosen and rejected completions (n, 2, T)."""
    prompt_ids, prompt_mask = pad_left(pairs, device)
    completions = []
    for pair in pairs:
        completions += [pair["chosen_ids"], pair["rejected_ids"]]
    completion_ids, completion_mask = pad_right(completions, device)  # (2n, T)
    longest = completion_mask.sum(1).view(-1, 2).amax(1)  # (n,)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids.view(len(pairs), 2, -1),
        "completion_mask": completion_mask.view(len(pairs), 2, -1),
        "lengths": 2 * (prompt_mask.sum(1) + longest),  # of both, padded to the longer one
        "live": torch.ones(len(pairs), dtype=torch.bool, device=device),
    }


def pad_left(prompts, device):
    """Pad the ids of prompts on the left; return ids and mask (B, P)."""
    rows = [torch.tensor(prompt["prompt_ids"]) for prompt in prompts]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left").to(device)
    return padded.clamp(min=0), (padded >= 0).long()


def pad_right(rows, device):
    """Pad lists of ids on the right; return ids and mask (B, T)."""
    rows = [torch.tensor(row) for row in rows]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1).to(device)
    return padded.clamp(min=0), (padded >= 0).long()


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


def all_reduce(values, op=dist.ReduceOp.SUM):
    """Reduce a number, or a list or tensor of numbers, over all ranks, in float64; return a number or lists."""
    values = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    dist.all_reduce(values, op)
    return values.tolist()


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


def pick_rows(rows, start, count, seed):
    """Pick count rows from place start on of an endless order: all rows shuffled, all shuffled anew, and so on."""
    order = []
    for epoch in range(start // len(rows), (start + count - 1) // len(rows) + 1):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        order += torch.randperm(len(rows), generator=generator).tolist()
    first = start % len(rows)
    return [rows[i] for i in order[first : first + count]]


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


def step_metrics(totals, divisor):
    """Return means over the pairs of all ranks."""
    sums = all_reduce([float(total) for total in totals.values()])
    return {name: total / divisor for name, total in zip(totals, sums)}


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
