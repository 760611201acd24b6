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
rewards tell the pairs apart ever better; judge a run by what the model then says.

Compared with reward_model.py
- The same loss, of log-probability ratios in place of scores; --label-smoothing is the chance ε that a label is wrong
  (cDPO, Mitchell 2023: 1 − ε and ε times the losses of the two orders).
- The reference's log-probabilities are computed once, by the policy before its first step, and kept in the run folder:
  no second model is in memory.

Departures from the paper
- AdamW in place of RMSprop.

    python dpo.py
    python dpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/ultrafeedback_binarized
"""

import copy
import json
import math
import os
import re
import resource
import secrets
import shutil
import signal
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from fractions import Fraction
from pathlib import Path

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
    """Direct Preference Optimization of a language model."""

    # model and data
    model: str | None = None
    """folder or hub name of a causal language model (default: the embedded models/tiny)"""
    dataset: str | None = None
    """json, jsonl, csv or parquet file, folder, or hub name as in org/name:config (default: data/preferences)"""
    eval_dataset: str | None = by_model(str(Path(__file__).resolve().parent / "data" / "addition"), "")
    """prompts with answers, in the form of grpo.py's, for eval/accuracy (embedded: data/addition; real: none)"""
    system_prompt: str = ""
    """system message put before every prompt that has none"""
    max_prompt_length: int | None = by_model(32, 512)
    """tokens; pairs with a longer prompt are dropped and counted (embedded: 32; real: 512)"""
    max_completion_length: int | None = by_model(48, 512)
    """tokens, the stop token included; pairs with a longer one are dropped and counted (embedded: 48; real: 512)"""

    # optimization
    num_steps: int | None = by_model(64, 1000)
    """optimizer steps; with --resume, the new total (embedded: 64; real: 1000)"""
    learning_rate: float | None = by_model(1e-4, 5e-7)
    """of AdamW (embedded: 1e-4; real: 5e-7, as the authors' code)"""
    warmup_steps: int | None = by_model(8, 150)
    """optimizer steps over which the learning rate rises from 0 (embedded: 8; real: 150, as the paper)"""
    minibatch_size: int | None = by_model(64, 64)
    """pairs per optimizer step, over all ranks (embedded: 64; real: 64)"""
    microbatch_tokens: int | None = by_model(2048, 16384)
    """most padded tokens per forward and backward pass; changes speed and memory only (embedded: 2048; real: 16384)"""
    max_grad_norm: float = 10.0
    """gradients are scaled down to at most this norm (10 in the authors' code)"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, about a third more time"""

    # evaluation, saving, logging
    eval_every: int | None = by_model(32, 100)
    """steps between evaluations on held-out pairs and prompts (embedded: 32; real: 100)"""
    eval_prompts: int | None = by_model(512, 512)
    """held-out pairs, and prompts with answers, per evaluation (embedded: 512; real: 512)"""
    temperature: float = 1.0
    """sampling temperature in evaluations"""
    rollout_batch_size: int = 0
    """most completions decoded at once per rank in evaluations (0: all)"""
    save_every: int | None = by_model(32, 100)
    """steps between saves (embedded: 32; real: 100)"""
    run_dir: str | None = None
    """new folder of this run (default: runs/SCRIPT__SEED__TIME)"""
    resume: str | None = None
    """folder of the run to continue, with its own settings; only --num-steps may be given besides"""
    seed: int = 1
    """of the order of pairs and of samples"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline works)"""
    wandb_project: str = "rl-for-language-models"
    """Weights & Biases project"""

    # the algorithm
    beta: float | None = by_model(0.5, 0.1)
    """beta of eq. 7, the price of leaving the reference (embedded: 0.5; real: 0.1, both in appendix B)"""
    label_smoothing: float = 0.0
    """chance that chosen and rejected are swapped in the data (cDPO)"""


def reward_fn(completion, answer):
    """Return 1.0 if the completion's final answer equals the answer (plain, or as in GSM8K after ####), else 0.0.

    Edit this function, or assign another one to the module, to train on a reward of your own.
    """
    given, gold = extract_answer(completion), parse_answer(extract_answer(answer) or answer)
    return float(given is not None and gold is not None and parse_answer(given) == gold)


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


def microbatch_loss(policy, part, args):
    """preference_loss of a microbatch, and its metrics with the number of pairs they sum over."""
    chosen_logprobs, rejected_logprobs = pair_logprobs(policy, part)
    loss, metrics = preference_loss(
        chosen_logprobs,
        rejected_logprobs,
        part["ref_chosen"],
        part["ref_rejected"],
        args.beta,
        args.label_smoothing,
    )
    metrics["num_pairs"] = torch.tensor(len(part["rows"]))
    return loss, metrics


def accumulate_gradients(policy, batch, rows, divisor, args):
    """Add the gradients of preference_loss over these rows of every rank, divided by divisor; return summed metrics."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    totals = {}
    for part in microbatches(batch, rows, args.microbatch_tokens):
        loss, metrics = microbatch_loss(policy, part, args)
        (loss * (world_size / divisor)).backward()  # times world_size: FSDP averages gradients over ranks
        add_metrics(totals, metrics)
    return totals


def main(args):
    rank, world_size, device = init_ranks()
    args = resolve_args(args)
    if not 0 < args.beta < math.inf:
        raise SystemExit(f"--beta {args.beta}: must be positive")
    check_args(args, world_size)
    if args.label_smoothing >= 0.5:
        raise SystemExit(f"--label-smoothing {args.label_smoothing}: must be under 0.5, or labels mean nothing")
    model, tokenizer = load_model(args.model, device)
    pad_id = tokenizer.pad_token_id or 0  # any will do: padding is known by the mask
    stop_ids = find_stop_ids(model, tokenizer)
    stop_id = stop_ids[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    train_pairs, eval_pairs, report = load_pairs(
        args.dataset,
        tokenizer,
        args.system_prompt,
        args.max_prompt_length,
        args.max_completion_length,
        args.eval_prompts,
        stop_id,
    )
    eval_prompts = []
    if args.eval_dataset:
        _, eval_prompts, _ = load_prompts(
            args.eval_dataset, tokenizer, args.system_prompt, args.max_prompt_length, args.eval_prompts
        )
    check_model(model, train_pairs[0]["prompt_ids"], args.max_prompt_length + args.max_completion_length)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sampler = make_sampler(model, device) if eval_prompts else model  # no copy where nothing will be sampled
    policy = shard(LogprobModel(model).train(), device)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    last_step = open_run(args, policy, optimizer, tokenizer, report)
    # The reference is the policy before its first step: its log-probabilities are computed here, once.
    for name, pairs in (("train", train_pairs), ("held_out", eval_pairs)):
        path = Path(args.run_dir) / f"reference_{name}.json"
        add_reference(policy, pairs, path, last_step, pad_id, args, rank, world_size)
    stop_signals = catch_signals()
    progress = tqdm(
        total=args.num_steps, initial=max(0, last_step), desc=Path(__file__).stem, unit="step", disable=rank > 0
    )

    for step in range(last_step + 1, args.num_steps + 1):  # step 0 only evaluates
        metrics, start = {}, time.perf_counter()
        if step > 0:
            # batch: this rank's share of the step's pairs, with the reference's log-probabilities
            picked = pick_rows(train_pairs, (step - 1) * args.minibatch_size, args.minibatch_size, args.seed)
            share = picked[rank::world_size]
            batch = collate_pairs(share, pad_id, device) | collate_reference(share, device)
            rows = torch.arange(len(share), device=device)

            # update: one optimizer step
            divisor = args.minibatch_size  # a mean over pairs
            optimizer.zero_grad()
            totals = accumulate_gradients(policy, batch, rows, divisor, args)
            learning_rate = args.learning_rate * min(1.0, step / max(1, args.warmup_steps))
            grad_norm = step_optimizer(policy, optimizer, learning_rate, args.max_grad_norm)
            check_finite(step, grad_norm, args.run_dir)

            # metrics of the step over all ranks
            metrics = step_metrics(totals, divisor, start)
            metrics |= {"optim/grad_norm": grad_norm, "optim/learning_rate": learning_rate}

        # evaluation, logs, saving
        if eval_pairs and (step % args.eval_every == 0 or step == args.num_steps):
            start = time.perf_counter()
            metrics |= evaluate_pairs(policy, eval_pairs, pad_id, args, rank, world_size)
            if eval_prompts:
                sync_sampler(policy, sampler)
                metrics |= evaluate(sampler, tokenizer, eval_prompts, stop_ids, args, rank, world_size)
            metrics["perf/eval_seconds"] = time.perf_counter() - start  # of both
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
MODEL, DATASET = str(HERE / "models" / "tiny"), str(HERE / "data" / "preferences")
DEFAULTS = {field.name: tuple(field.metadata.values()) for field in fields(Args) if field.metadata}
EVAL_SAMPLES = 4  # completions per held-out prompt, for pass@1, pass@2 and pass@4


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


def find_stop_ids(model, tokenizer):
    """Return every id that ends a completion: the union of generation_config's, config's and the tokenizer's."""
    stop_ids = set()
    configs = (model.generation_config, model.config.get_text_config(), tokenizer)
    for ids in (config.eos_token_id for config in configs):
        stop_ids.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return sorted(stop_ids)


def load_pairs(dataset, tokenizer, system_prompt, max_prompt_length, max_completion_length, num_held_out, stop_id):
    """Return training and held-out pairs, lists of {prompt_ids, chosen_ids, rejected_ids, kind}, and a report of what
    was dropped. Completions end in stop_id.
    """
    loaded, report = [], []
    for split, rows in zip(("training", "held-out"), load_splits(dataset, num_held_out)):
        if not {"chosen", "rejected"} <= set(rows.column_names):
            raise SystemExit(
                f"--dataset {dataset}: needs the columns chosen and rejected; found {', '.join(rows.column_names)}"
            )
        pairs, dropped = [], dict.fromkeys(("without shared prompt", "empty", "identical", "too long"), 0)
        for row in rows:
            prompt, *completions = split_pair(row, tokenizer.chat_template is not None)
            if not prompt:
                dropped["without shared prompt"] += 1
            elif not all(completion.strip() for completion in completions):
                dropped["empty"] += 1
            else:
                prompt_ids = encode_prompt(tokenizer, prompt, system_prompt)
                encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in completions]
                chosen_ids, rejected_ids = (ids if ids[-1:] == [stop_id] else [*ids, stop_id] for ids in encoded)
                if chosen_ids == rejected_ids:
                    dropped["identical"] += 1
                elif (
                    len(prompt_ids) > max_prompt_length
                    or max(map(len, (chosen_ids, rejected_ids))) > max_completion_length
                ):
                    dropped["too long"] += 1
                else:
                    pair = {"prompt_ids": prompt_ids, "chosen_ids": chosen_ids, "rejected_ids": rejected_ids}
                    pairs.append({**pair, "kind": row.get("kind")})
        counts = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        report.append(
            f"{len(pairs)} {split} pairs; dropped: {counts} (over {max_prompt_length} + {max_completion_length} tokens)"
        )
        if not pairs and (split == "training" or num_held_out):
            raise SystemExit(f"--dataset {dataset}: {report[-1]}")
        loaded.append(pairs)
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


def split_pair(row, has_template):
    """Return (prompt, chosen, rejected) of a row, the prompt a string or a list of chat messages, None if not shared.

    chosen and rejected are completions of the row's prompt, as strings or lists of messages; or whole conversations,
    as lists; or whole dialogues, as strings in the form of Anthropic's HH.
    """
    prompt, chosen, rejected = row.get("prompt"), row["chosen"] or "", row["rejected"] or ""
    if isinstance(chosen, list) or isinstance(rejected, list):
        before = prompt if isinstance(prompt, list) else []
        # What is not a whole conversation goes on from the prompt.
        whole = [list(m) if m and m[: len(before)] == before else [*before, *m] for m in (chosen, rejected)]
        if before or any(len(messages) > 1 for messages in whole):
            prompt = whole[0][:-1] if whole[0][:-1] == whole[1][:-1] else None
        return prompt, *(m[-1]["content"] or "" if m and m[-1]["role"] == "assistant" else "" for m in whole)
    if prompt is None:
        end = os.path.commonprefix([chosen, rejected]).rfind("\n\nAssistant:") + len("\n\nAssistant:")
        if end < len("\n\nAssistant:"):
            return None, chosen, rejected
        prompt, chosen, rejected = chosen[:end], chosen[end:], rejected[end:]
        if has_template:
            turns = re.split(r"\n\n(Human|Assistant):", prompt)[1:-2]  # speaker, text, speaker, text, ...
            roles = {"Human": "user", "Assistant": "assistant"}
            prompt = [{"role": roles[who], "content": what.strip()} for who, what in zip(turns[::2], turns[1::2])]
            chosen, rejected = chosen.strip(), rejected.strip()
    return prompt if isinstance(prompt, list) or prompt.strip() else None, chosen, rejected


def encode_prompt(tokenizer, prompt, system_prompt):
    """Return the token ids of a prompt (a string or a list of chat messages), up to where the completion begins."""
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if tokenizer.chat_template is None:
        return tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    encoding = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    return encoding["input_ids"]


def load_prompts(dataset, tokenizer, system_prompt, max_prompt_length, num_held_out):
    """Return training and held-out prompts, lists of {prompt, answer, prompt_ids}, and a report of what was dropped."""
    loaded, report = [], []
    for split, rows in zip(("training", "held-out"), load_splits(dataset, num_held_out)):
        prompt_column = next((c for c in ("prompt", "question", "problem") if c in rows.column_names), None)
        answer_column = next((c for c in ("answer", "solution", "ground_truth") if c in rows.column_names), None)
        if prompt_column is None or answer_column is None:
            raise SystemExit(
                f"--dataset {dataset}: needs a column prompt, question or problem and a column answer, solution or "
                f"ground_truth; found {', '.join(rows.column_names)}"
            )
        prompts, num_empty, num_long, num_texts = [], 0, 0, 0
        for row in rows:
            prompt, answer = row[prompt_column], row[answer_column]
            answer = "" if answer is None else str(answer)
            gold = parse_answer(extract_answer(answer) or answer)
            if not prompt or gold is None:
                num_empty += 1
                continue
            prompt_ids = encode_prompt(tokenizer, prompt, system_prompt)
            if len(prompt_ids) > max_prompt_length:
                num_long += 1
                continue
            num_texts += isinstance(gold, str)
            prompts.append({"prompt": prompt, "answer": answer, "prompt_ids": prompt_ids})
        report.append(
            f"{len(prompts)} {split} prompts; dropped: {num_long} longer than {max_prompt_length} tokens, {num_empty} "
            f"without prompt or answer; {num_texts} answers cannot be parsed as numbers and are compared as text"
        )
        if not prompts and (split == "training" or num_held_out):
            raise SystemExit(f"--dataset {dataset}: {report[-1]}")
        loaded.append(prompts)
    return *loaded, "\n".join(report)


def parse_answer(text):
    """Return an integer, decimal or simple fraction as an exact Fraction, anything else as a normalised string.

    Signs, currency signs and thousands separators are understood; None if nothing is left.
    """
    text = text.strip().removeprefix("**").removesuffix("**").strip()
    if len(text) > 1000:
        return text
    for written, meant in (("\u2212", "-"), ("\\!,", ","), ("\\$", "$"), ("\\%", "%")):
        text = text.replace(written, meant)
    text = text.removesuffix(".").strip()
    while text[:1] + text[-1:] in ("{}", "$$") and not re.search("[{}$]", text[1:-1]):
        text = text[1:-1].strip()
    flat = re.sub(r"^([+-]? ?)\\frac ?\{([+-]?[0-9]+)\} ?\{([+-]?[0-9]+)\}$", r"\1\2/\3", text)
    number = r"((?:[1-9][0-9]{0,2}(?:(?:,|\\,|\{,\})[0-9]{3})+|[0-9]*)(?:\.[0-9]+)?)"
    match = re.fullmatch(rf"(?:[$£€] ?)?([+-]?) ?(?:[$£€] ?)?{number}(?: ?/ ?([+-]?[0-9]+))?", flat)
    if match and re.search("[0-9]", match[2]) and int(match[3] or 1):
        return Fraction(match[1] + re.sub(r"[^0-9.]", "", match[2])) / int(match[3] or 1)
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox) ?\{([^{}\\]*)\}", r"\1", text)
    return re.sub(r" ?([^\w ]) ?", r"\1", " ".join(text.split())) or None


def extract_answer(text):
    """Return the final answer of a text or None: its last \\boxed{}, else what follows its last ####, else <answer>."""
    visible, thinking = [], False
    for part in re.split("(</?think>)", text):
        if part == "</think>":  # without an opening, everything so far was a thought
            visible = visible if thinking else []
        elif part != "<think>" and not thinking:
            visible.append(part)
        thinking = part == "<think>" or (thinking and part != "</think>")
    text = " ".join(visible)
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


def make_sampler(model, device):
    """Return the model that samples: a copy, bfloat16 on CUDA; on one CPU process the trained model itself."""
    if dist.is_initialized() or device.type == "cuda":
        return copy.deepcopy(model).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    return model


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


@torch.no_grad()
def add_reference(policy, pairs, path, last_step, pad_id, args, rank, world_size):
    """Put the log-probabilities of the reference, which the policy is before its first step, into the pairs as
    ref_chosen and ref_rejected, sums in nats; and into a file, from which a resumed run reads them.
    """
    if last_step <= 0:
        device, found = policy.model.device, torch.zeros(2, len(pairs), dtype=torch.float64)
        for first in tqdm(range(0, len(pairs), 1024), path.stem, unit="x1024", leave=False, disable=rank > 0):
            own = list(range(first, min(first + 1024, len(pairs))))[rank::world_size]
            batch = collate_pairs([pairs[i] for i in own] or pairs[:1], pad_id, device)
            for part in microbatches(batch, torch.arange(len(own), device=device), args.microbatch_tokens):
                logprobs = torch.stack(pair_logprobs(policy, part))  # (2, n)
                found[:, [own[i] for i in part["rows"].tolist()]] = logprobs.cpu().double()
        found = all_reduce(found)
        on_rank_0(write_whole, path, json.dumps(found))
    found = json.loads(path.read_text())
    if len(found[0]) != len(pairs):
        raise SystemExit(f"--dataset {args.dataset} is not what it was: {len(found[0])} pairs before, {len(pairs)} now")
    for pair, chosen, rejected in zip(pairs, *found):
        pair |= {"ref_chosen": chosen, "ref_rejected": rejected}


def collate_pairs(pairs, pad_id, device):
    """Return a batch of tensors: prompts padded on the left, completions on the right."""
    prompt_ids, prompt_mask = pad_left([pair["prompt_ids"] for pair in pairs], pad_id, device)
    batch = {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask}
    width = max(len(pair[key]) for pair in pairs for key in ("chosen_ids", "rejected_ids"))
    for key in ("chosen", "rejected"):
        rows = [pair[f"{key}_ids"] for pair in pairs]
        batch[f"{key}_ids"] = torch.tensor([row + [pad_id] * (width - len(row)) for row in rows], device=device)
        batch[f"{key}_mask"] = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    longer = torch.maximum(batch["chosen_mask"].sum(1), batch["rejected_mask"].sum(1))
    batch["lengths"] = 2 * (prompt_mask.sum(1) + longer)  # tokens of both, padded to the longer
    return batch


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


def pair_logprobs(policy, part):
    """Log-probabilities of the chosen and the rejected completions of a microbatch, summed over tokens, each (n,)."""
    logprobs, _ = policy(
        part["prompt_ids"].repeat(2, 1),
        part["prompt_mask"].repeat(2, 1),
        torch.cat([part["chosen_ids"], part["rejected_ids"]]),
        torch.cat([part["chosen_mask"], part["rejected_mask"]]),
        1.0,
    )
    chosen, rejected = logprobs.sum(1).chunk(2)  # masked positions are 0
    num_pairs = len(part["rows"])  # 0 where this rank only keeps step with the others
    return chosen[:num_pairs], rejected[:num_pairs]


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


def collate_reference(pairs, device):
    """What add_reference put into the pairs, as tensors (n,) to go with collate_pairs."""
    keys = ("ref_chosen", "ref_rejected")
    return {key: torch.tensor([pair[key] for pair in pairs], dtype=torch.float32, device=device) for key in keys}


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
def evaluate_pairs(policy, pairs, pad_id, args, rank, world_size):
    """The loss and its metrics on held-out pairs."""
    share, device = pairs[rank::world_size], policy.model.device
    present = share or pairs[:1]
    batch = collate_pairs(present, pad_id, device) | collate_reference(present, device)
    totals = {}
    for part in microbatches(batch, torch.arange(len(share), device=device), args.microbatch_tokens):
        _, metrics = microbatch_loss(policy, part, args)
        add_metrics(totals, metrics)
    sums = reduce_metrics(totals)
    count = sums.pop("num_pairs")
    names = {"loss/preference": "loss"}
    return {f"eval/pair_{names.get(key, key.split('/')[1])}": total / count for key, total in sums.items()}


@torch.no_grad()
def sync_sampler(policy, sampler):
    """Copy the trained parameters into the model that samples, which is whole on every rank."""
    if sampler is not policy.model:
        for trained, copied in zip(policy.model.parameters(), sampler.parameters(), strict=True):
            copied.copy_(trained.full_tensor() if hasattr(trained, "full_tensor") else trained)


def evaluate(model, tokenizer, prompts, stop_ids, args, rank, world_size):
    """Greedy accuracy, and pass@k by the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374, eq. 1)."""
    start = time.perf_counter()
    sums = dict.fromkeys(("eval/accuracy", "eval/pass@1", "eval/pass@2", "eval/pass@4"), 0.0)
    share = prompts[rank::world_size]
    if share:
        torch.manual_seed(args.seed)
        batch, _ = rollout(model, tokenizer, share, 1, 0.0, stop_ids, args)
        sums["eval/accuracy"] = (batch["rewards"] == 1).sum()
        batch, _ = rollout(model, tokenizer, share, EVAL_SAMPLES, args.temperature, stop_ids, args)
        for correct in (batch["rewards"].view(-1, EVAL_SAMPLES) == 1).sum(1).tolist():
            for k in (1, 2, 4):
                sums[f"eval/pass@{k}"] += 1 - math.comb(EVAL_SAMPLES - correct, k) / math.comb(EVAL_SAMPLES, k)
    means = {key: total / len(prompts) for key, total in reduce_metrics(sums).items()}
    return means | {"perf/eval_seconds": time.perf_counter() - start}


def rollout(model, tokenizer, prompts, num_samples, temperature, stop_ids, args):
    """Sample num_samples completions of each prompt and score them; return tensors (B, ...) and the texts."""
    pad_id = tokenizer.pad_token_id or 0  # any will do: padding is known by the mask
    prompts = [prompt for prompt in prompts for _ in range(num_samples)]
    prompt_ids, prompt_mask = pad_left([prompt["prompt_ids"] for prompt in prompts], pad_id, model.device)
    size = args.rollout_batch_size or len(prompts)
    parts = [
        generate(model, ids, mask, args.max_completion_length, temperature, stop_ids, pad_id)
        for ids, mask in zip(prompt_ids.split(size), prompt_mask.split(size))
    ]
    completion_ids, completion_mask = (torch.cat(part) for part in zip(*parts))
    lengths = completion_mask.sum(1)  # (B,)
    completions = [ids[:length] for ids, length in zip(completion_ids.tolist(), lengths.tolist())]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
    rewards = [reward_fn(text, prompt["answer"]) for text, prompt in zip(texts, prompts)]
    batch = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "lengths": prompt_mask.sum(1) + lengths,
        "rewards": torch.tensor(rewards, device=model.device, dtype=torch.float32),
        "truncated": torch.tensor([ids[-1] not in stop_ids for ids in completions], device=model.device),
    }
    return batch, texts


@torch.no_grad()
def generate(model, prompt_ids, prompt_mask, max_completion_length, temperature, stop_ids, pad_id):
    """Sample a completion of each prompt, up to and including the first stop id.

    prompts (B, P) left-padded -> completion_ids, completion_mask (B, max_completion_length) right-padded.
    """
    was_training = model.training
    model.eval()  # gradient checkpointing would turn the cache off
    stop_ids = torch.tensor(stop_ids, device=prompt_ids.device, dtype=torch.long)
    completion_ids = prompt_ids.new_full((len(prompt_ids), max_completion_length), pad_id)
    completion_mask = torch.zeros_like(completion_ids)
    # Completions of one prompt are adjacent: each prompt is read once.
    both = torch.cat([prompt_ids, prompt_mask.long()], 1)  # (B, 2 P)
    unique, row_of = torch.unique_consecutive(both, dim=0, return_inverse=True)
    ids, mask = unique.chunk(2, 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    cache, logits = output.past_key_values, output.logits[row_of, -1]  # (B, V)
    cache.batch_select_indices(row_of)
    mask, positions = mask[row_of], positions[row_of, -1:]
    rows = torch.arange(len(prompt_ids), device=prompt_ids.device)  # those still being written
    for t in range(max_completion_length):
        tokens = sample_tokens(logits, temperature)
        completion_ids[rows, t] = tokens
        completion_mask[rows, t] = 1
        running = torch.isin(tokens, stop_ids, invert=True).nonzero().squeeze(1)
        if t + 1 == max_completion_length or len(running) == 0:
            break
        if len(running) < len(rows):  # finished rows leave the batch
            rows, tokens, mask, positions = rows[running], tokens[running], mask[running], positions[running]
            cache.batch_select_indices(running)
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        positions = positions + 1
        ids = tokens.unsqueeze(1)
        output = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        logits = output.logits[:, -1]
    model.train(was_training)
    return completion_ids, completion_mask


def sample_tokens(logits, temperature):
    """Draw ids from exactly softmax(logits / temperature), by inverse CDF; temperature 0 is greedy. (B, V) -> (B,)"""
    if temperature == 0:
        return logits.argmax(-1)
    cdf = (logits.float() / temperature).softmax(-1).cumsum(-1)  # (B, V)
    # torch.rand does return 0, and a search from the left would then pick id 0 even at probability 0.
    draw = torch.rand(len(cdf), 1, device=cdf.device) * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, draw, right=True).squeeze(1)
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous()).squeeze(1)  # the last id of non-zero probability
    return torch.minimum(tokens, last)


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
    """Print what improved, where the checkpoint is and how to go on."""
    lines = [json.loads(line) for line in Path(args.run_dir, "metrics.jsonl").read_text().splitlines()]
    evals = [line for line in lines if "eval/pair_loss" in line]
    last_step = lines[-1]["step"]
    seconds = sum(line.get("perf/step_seconds", 0.0) for line in lines)
    rate = last_step * args.minibatch_size / max(seconds, 1e-9)
    print(f"\n{last_step} steps in {seconds:.0f} s: {last_step * args.minibatch_size} pairs, {rate:.0f} a second")
    names = {"eval/accuracy": "greedy accuracy", "eval/pass@1": "pass@1", "eval/pass@4": "pass@4"}
    names |= {"eval/pair_loss": "held-out loss", "eval/pair_accuracy": "held-out pairs told apart"}
    names |= {"eval/pair_chosen_log_ratio": "chosen: log-probability over reference"}
    for key, name in names.items():
        if evals and key in evals[0]:
            print(f"{name:40}{evals[0][key]:.3f} (step {evals[0]['step']}) -> {evals[-1][key]:.3f}")
    if last_step > 0:
        print(f"checkpoint      {Path(args.run_dir, 'checkpoint')}, which --model and from_pretrained load")
    more = f" --num-steps {2 * args.num_steps}" if last_step >= args.num_steps else ""
    print(f"to go on        python {Path(__file__).name} --resume {Path(args.run_dir)}{more}")


if __name__ == "__main__":
    main(tyro.cli(Args))
