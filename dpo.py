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

import contextlib
import copy
import fcntl
import hashlib
import inspect
import json
import math
import os
import re
import resource
import secrets
import shlex
import shutil
import signal
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":  # until there is something to save, Ctrl-C just ends it
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
import tyro
import wandb
from datasets import disable_progress_bars, get_dataset_config_names, load_dataset, logging
from jinja2 import TemplateError
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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
    """optimizer steps (0 only evaluates); with --resume, the new total (embedded: 64; real: 1000)"""
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
    precision: str = "bfloat16" if torch.cuda.is_available() else "float32"
    """bfloat16 or float32, of the transformer blocks; all else is float32 (on CUDA bfloat16 unless it is given)"""
    lora_rank: int = 0
    """train adapters of this rank, at 3 to 10 times the learning rate, and freeze the model (0: train all of it)"""

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


def is_right(completion, answer):
    """Does the completion's final answer equal the answer (plain, or as in GSM8K after ####)? Accuracy counts this."""
    given, gold = extract_answer(completion), parse_answer(extract_answer(answer) or answer)
    return given is not None and gold is not None and parse_answer(given) == gold


def reward_fn(completion, answer):
    """Return the reward of a completion. Edit this function, or assign another one to the module."""
    return float(is_right(completion, answer))


def score_completions(completions, rows):
    """Return a reward for each completion; rows are the dataset's, with prompt, answer and all other columns.

    Edit or replace this one for what needs the prompt or many completions at once: a judge, a test runner.
    """
    return [reward_fn(completion, row["answer"]) for completion, row in zip(completions, rows)]


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
    eval_prompts = []
    if args.eval_dataset:
        _, eval_prompts, eval_report = load_prompts(
            args.eval_dataset,
            tokenizer,
            args.system_prompt,
            args.max_prompt_length,
            args.eval_prompts,
            "--eval-dataset",
        )
        report += f"\n{eval_report.splitlines()[-1]} of --eval-dataset"
    model, stop_ids = load_model(args.model, tokenizer, args.lora_rank)
    longest = max(len(row["prompt_ids"]) for row in train_pairs + eval_pairs + eval_prompts)
    check_model(model, train_pairs[0]["prompt_ids"], longest + args.max_completion_length, generates=bool(eval_prompts))
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sampler = make_sampler(model, device, args.precision) if eval_prompts else model  # no copy where nothing is sampled
    policy = shard(LogprobModel(model).train(), device, args.precision)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    last_step, progress = open_run(args, policy, optimizer, tokenizer, report)
    # The reference is the policy before its first step: its log-probabilities are computed here, once.
    for name, pairs in (("train", train_pairs), ("held_out", eval_pairs)):
        path = Path(args.run_dir) / f"reference_{name}.json"
        add_reference(policy, pairs, path, last_step, pad_id, args, rank, world_size)
    stop_signals = catch_signals()

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
                metrics |= evaluate(sampler, tokenizer, eval_prompts, stop_ids, args, step, rank, world_size)
            metrics["perf/eval_seconds"] = time.perf_counter() - start  # of both
        if rank == 0:
            log_step(args, step, metrics, progress)
        stopping = all_reduce(len(stop_signals)) > 0
        if step > 0 and (stopping or step == args.num_steps or step % args.save_every == 0):
            save(args.run_dir, policy, optimizer, tokenizer, step)
        if stopping:
            break

    end_run(args, progress, stop_signals)


# ---- below: plumbing, byte-identical in every script that has it, in the order in which main calls it

HERE = Path(__file__).resolve().parent
MODEL, DATASET = str(HERE / "models" / "tiny"), str(HERE / "data" / "preferences")
DEFAULTS = {field.name: tuple(field.metadata.values()) for field in fields(Args) if field.metadata}
ADAPTERS = ("lora_a", "lora_b", "score.weight")  # what --lora-rank trains
LORA_ALPHA = 32  # adapters count alpha / rank times, so that a rank needs no learning rate of its own
EVAL_SAMPLES = 4  # completions per held-out prompt, for pass@1, pass@2 and pass@4


def parse_args():
    """Return Args from the command line, whose help has a section for each comment in Args and one default a flag."""
    source, sections = inspect.getsource(Args), {}
    for setting in fields(Args):
        before, _, after = source.partition(f"\n    {setting.name}: ")
        title = re.findall(r"\n    # (.*)", "\n    # settings" + before)[-1]
        hint, words = {}, re.match(r'.*\n    """(.*)"""', after)
        if words:
            hint["help"] = words[1]
        if setting.default is None:  # the words tell what it will be
            kind = getattr(setting.type, "__args__", [setting.type])[0]
            hint |= {"help_behavior_hint": "", "metavar": kind.__name__.upper()}
        default = field(default=setting.default, default_factory=setting.default_factory)
        section = sections.setdefault(re.sub(r"\W+", "_", title), [])
        section.append((setting.name, Annotated[setting.type, tyro.conf.arg(**hint)], default))
    kinds = {name: make_dataclass(name, settings) for name, settings in sections.items()}
    members = [(name, tyro.conf.OmitArgPrefixes[kind], field(default_factory=kind)) for name, kind in kinds.items()]
    given = tyro.cli(make_dataclass("Args", members), description=Args.__doc__)
    return Args(**{name: value for section in vars(given).values() for name, value in vars(section).items()})


def init_ranks():
    """Join the processes that torchrun started, if it did; return rank, world size and device."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until catch_signals, Ctrl-C just ends the process
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=2))
    return (dist.get_rank(), dist.get_world_size(), device) if dist.is_initialized() else (0, 1, device)


def resolve_args(args):
    """Return the settings of the run to resume, else args with the defaults of its model filled in."""
    values = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    for name in ("model", "dataset", "eval_dataset", "reward_model", "run_dir", "resume"):
        if values.get(name) == "" and DEFAULTS.get(name, [None])[-1] != "":
            raise SystemExit(f'--{name.replace("_", "-")} "" is empty: is a shell variable not set?')
    if args.resume:
        return resume_args(args, values)
    for name, defaults in DEFAULTS.items():
        values[name] = defaults[not is_embedded(args.model)] if values[name] is None else values[name]
    values |= {"model": args.model or MODEL, "dataset": args.dataset or DATASET}
    for name in ("model", "dataset", "eval_dataset", "reward_model"):
        if os.path.exists(values.get(name) or ""):
            values[name] = os.path.abspath(values[name])  # it may be resumed from another folder
    unique = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    run_dir = [values["run_dir"] or f"runs/{Path(__file__).stem}__{args.seed}__{unique}"]
    if dist.is_initialized():
        dist.broadcast_object_list(run_dir)
    return Args(**{**values, "run_dir": run_dir[0]})


def resume_args(args, values):
    """Return the settings of the run to resume, or exit if it cannot go on; values are what was given now."""
    path = Path(args.resume) / "args.json"
    changed = [f.name for f in fields(Args) if values[f.name] != f.default]
    if changed := [name for name in changed if name not in ("resume", "num_steps")]:
        flags = ", ".join("--" + name.replace("_", "-") for name in changed)
        raise SystemExit(f"--resume takes its settings from {path}: drop {flags}; only --num-steps may be given")
    if not os.path.isfile(path):
        meant = [f"; did you mean {run}?" for run in path.parents[1:3] if os.path.isfile(run / "args.json")]
        raise SystemExit(f"--resume {args.resume}: not the folder of a run, it has no args.json{''.join(meant)}")
    with one_line(f"{path} is damaged, or of a run of another script or version: put back what it was"):
        saved = json.loads(path.read_text())
        if not {"script", "processes", "data", "command", "functions", "wandb_id"} <= {*saved.pop("run")}:
            raise ValueError('of "run" something is missing')
        if saved.keys() != values.keys():
            raise ValueError("it has other settings")
        steps, num_steps = saved_steps(args.resume), args.num_steps
        if not steps:
            raise SystemExit(f"--resume {args.resume}: no state was saved there to go on from: start a new run")
        saved["num_steps"] = saved["num_steps"] if num_steps is None else num_steps
        if saved["num_steps"] < steps[-1]:
            raise SystemExit(f"--num-steps {num_steps}: the run has done {steps[-1]} already")
    return Args(**{**saved, "resume": values["resume"], "run_dir": values["resume"]})


@contextlib.contextmanager
def one_line(intro):
    """Whatever fails inside ends the run with one line, the intro and the reason, instead of a traceback."""
    try:
        yield
    except (Exception, dcp.api.CheckpointException) as error:
        error = next(iter(getattr(error, "failures", {0: [error]}).values()))[0]  # of a checkpoint's, the first rank's
        reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        reason = reason if len(reason) <= 220 else f"{reason[:110]} ... {reason[-110:]}"
        raise SystemExit(f"{intro}: {reason}") from None


def saved_steps(run_dir):
    """The steps of which there is a complete state, in order."""
    return sorted(int(path.name) for path in Path(run_dir, "state").glob("*") if path.name.isdigit())


def is_embedded(model):
    """Is this models/tiny, or what one of these scripts made of it?"""
    try:
        return model is None or json.loads(Path(model, "config.json").read_text())["vocab_size"] < 100
    except (OSError, ValueError, KeyError, TypeError):  # load_tokenizer and load_model say what is wrong
        return False


def check_args(args, world_size):
    """Exit with one line if the settings cannot work."""
    at_least_1 = ("prompts_per_step", "group_size", "max_prompt_length", "max_completion_length", "minibatch_size")
    at_least_1 += ("microbatch_tokens", "update_epochs", "max_rounds", "tool_tokens", "eval_every", "save_every")
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')} {value}"
        kinds = getattr(Args.__dataclass_fields__[name].type, "__args__", (Args.__dataclass_fields__[name].type,))
        if {int, float} & {*kinds} and (type(value) not in (int, *kinds) or (value is None and name in DEFAULTS)):
            raise SystemExit(f"{flag}: must be a number of type {kinds[0].__name__}")
        if name.endswith(("temperature", "max_grad_norm", "weight_cap", "learning_rate")) and not 0 < value < math.inf:
            raise SystemExit(f"{flag}: must be positive")
        if type(value) is float and not math.isfinite(value):
            raise SystemExit(f"{flag}: must be a finite number")
        if type(value) in (int, float) and value < (name in at_least_1) and name not in ("seed", "min_reward"):
            raise SystemExit(f"{flag}: must be at least {int(name in at_least_1)}")
        if name in ("prompts_per_step", "minibatch_size") and value % world_size:
            raise SystemExit(f"{flag} does not divide over {world_size} ranks")
    if args.num_steps == args.eval_prompts == 0:
        raise SystemExit("--num-steps 0 only evaluates, and --eval-prompts 0 leaves nothing to evaluate on")
    if args.precision not in ("bfloat16", "float32"):
        raise SystemExit(f"--precision {args.precision}: must be bfloat16 or float32")
    sizes = {name: getattr(args, name) for name in ("prompts_per_step", "group_size") if hasattr(args, name)}
    if sizes and math.prod(sizes.values()) % getattr(args, "minibatch_size", 1):
        product = " times ".join(f"--{name.replace('_', '-')} {size}" for name, size in sizes.items())
        raise SystemExit(f"{product} is not a multiple of --minibatch-size {args.minibatch_size}")
    if args.track and os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False):
        raise SystemExit("--track: no key of Weights & Biases: call wandb login once, or set WANDB_MODE=offline")
    run_dir = Path(args.run_dir)
    if not args.resume and is_rank_0():  # an empty folder may be there, of a run that was killed as it began
        if os.path.lexists(run_dir) and not (run_dir.is_dir() and not any(run_dir.iterdir())):
            more = f", or go on with --resume {run_dir}" if saved_steps(run_dir) else ""
            raise SystemExit(f"--run-dir {run_dir} exists: choose another{more}")
        with one_line(f"--run-dir {run_dir}: cannot be made"):
            parent = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
            if not (parent.is_dir() and os.access(parent, os.W_OK)):
                raise OSError(f"{parent} is not a folder one can write to")


def is_rank_0():
    """Is this the process that writes and prints?"""
    return not dist.is_initialized() or dist.get_rank() == 0


def load_tokenizer(name, flag="--model"):
    """Return the tokenizer of a model, or exit; read first, because the data can be read with it before the model."""
    transformers.logging.set_verbosity_error()  # what matters is said in one line
    transformers.logging.disable_progress_bar()
    if os.path.isfile(Path(name, "checkpoint", "config.json")):
        raise SystemExit(f"{flag} {name}: the folder of a run; did you mean {Path(name, 'checkpoint')}?")
    if not os.path.exists(name) and (name.count("/") > 1 or name.startswith(("/", "."))):
        raise SystemExit(f"{flag} {name}: there is no such folder")
    with one_line(f"{flag} {name}: its config or tokenizer cannot be loaded"):
        tokenizer, config = AutoTokenizer.from_pretrained(name), AutoConfig.from_pretrained(name).get_text_config()
        if tokenizer.get_vocab().keys() <= {*tokenizer.all_special_tokens}:
            raise ValueError("the folder lacks tokenizer.json")
        if find_turn_end(tokenizer) is None:
            raise ValueError("nothing ends a completion: name an eos_token in tokenizer_config.json")
        for token, i in tokenizer.get_vocab().items():  # those of images may be further ones, which no text has
            if i >= config.vocab_size and (i < tokenizer.vocab_size or token in (tokenizer.chat_template or "")):
                raise ValueError(f"it gives {token!r} the id {i}, and the model has {config.vocab_size} embeddings")
    return tokenizer


def find_turn_end(tokenizer):
    """Return the id with which the chat template ends an assistant's turn, else the tokenizer's end of text."""
    chat = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"}]
    try:
        _, found, tail = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("Answer")
    except (ValueError, TemplateError):  # there is none, or it refuses this
        return tokenizer.eos_token_id
    ids, added = tokenizer(tail, add_special_tokens=False)["input_ids"], tokenizer.added_tokens_decoder
    ends = [i for i in ids if found and i in added and added[i].content.strip(" \n\t\u2581")]  # no run of blanks
    return ends[0] if ends else tokenizer.eos_token_id


def load_pairs(dataset, tokenizer, system_prompt, max_prompt_length, max_completion_length, num_held_out, stop_id):
    """Return training and held-out pairs, {prompt_ids, chosen_ids, rejected_ids, kind}, and a report of those
    dropped. Completions end in stop_id.
    """

    def read(row):
        prompt, *completions = split_pair(row, tokenizer.chat_template is not None)
        messages, remark = as_messages(prompt, "prompt"), None
        if not messages:
            return None, "dropped, without shared prompt"
        if messages[-1]["role"] == "assistant":
            return None, "dropped, whose prompt ends in the assistant's turn"
        if not all(completion.strip() for completion in completions):
            return None, "dropped, empty"
        prompt_ids = encode_prompt(tokenizer, prompt, system_prompt)
        encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in completions]
        chosen_ids, rejected_ids = (ids if ids[-1:] == [stop_id] else [*ids, stop_id] for ids in encoded)
        if chosen_ids == rejected_ids:
            return None, "dropped, identical"
        longest = max(len(chosen_ids), len(rejected_ids))
        if len(prompt_ids) > max_prompt_length or longest > max_completion_length:
            return None, f"dropped, longer than {max_prompt_length} + {max_completion_length} tokens"
        if tokenizer.chat_template is None and len(messages) > 1:
            remark = "of several messages, joined by blank lines: there is no chat template"
        pair = {"prompt_ids": prompt_ids, "chosen_ids": chosen_ids, "rejected_ids": rejected_ids}
        return {**pair, "kind": row.get("kind") and str(row["kind"])}, remark

    return load_rows(dataset, num_held_out, read)


def split_pair(row, has_template):
    """Return (prompt, chosen, rejected) of a row, the prompt a string or a list of chat messages, None if not shared.

    chosen and rejected are completions of the row's prompt, as strings or lists of messages; or whole conversations,
    as lists; or whole dialogues, as strings in the form of Anthropic's HH.
    """
    if not {"chosen", "rejected"} <= {*row}:
        raise ValueError(f"needs the columns chosen and rejected; found {', '.join(row)}")
    for name in ("prompt", "chosen", "rejected"):
        as_messages(row.get(name), name)  # a ValueError where it is neither
    prompt, chosen, rejected = row.get("prompt"), row["chosen"] or "", row["rejected"] or ""
    if chosen and rejected and type(chosen) is not type(rejected):
        raise ValueError("chosen and rejected must both be strings or both be lists of messages")
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


def as_messages(value, name, role="user"):
    """Return a text, said by role, or a list of chat messages as messages; [] where they, or one of them, are empty."""
    is_text = role and isinstance(value, str) and not value.startswith('[{"role"')  # such a list is still to be decoded
    messages = [{"role": role, "content": value}] if is_text else value or []
    for message in messages if isinstance(messages, list) else [None]:
        types = [type(message.get(key, 0)) for key in ("role", "content")] if isinstance(message, dict) else None
        if types not in ([str, str], [str, type(None)]):
            wanted = f"a {'text or a ' if role else ''}list of messages with a role and a content of text"
            raise ValueError(f"{name} must be {wanted}, not {value!r:.80}")
    whole = messages and all(message["content"] is not None for message in messages)
    return messages if whole and messages[-1]["content"].strip() else []


def encode_prompt(tokenizer, prompt, system_prompt):
    """Return the token ids of a prompt (a string or a list of chat messages), up to where the completion begins."""
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if tokenizer.chat_template is not None:
        return render_chat(tokenizer, messages, True)
    text = "\n\n".join(message["content"] for message in messages)
    ids, bare = tokenizer(text)["input_ids"], tokenizer(text, add_special_tokens=False)["input_ids"]
    while ids and ids[-1:] != bare[-1:]:  # some tokenizers end every text with a stop token
        ids = ids[:-1]
    return ids


def render_chat(tokenizer, messages, add_generation_prompt):
    """Return the ids the chat template makes of messages; a system message that it refuses opens the first user's."""
    options = {"add_generation_prompt": add_generation_prompt, "tokenize": True, "return_dict": True}
    try:
        return tokenizer.apply_chat_template(messages, **options)["input_ids"]
    except TemplateError:
        if [message["role"] for message in messages[:2]] != ["system", "user"]:
            raise
        both = "\n\n".join(message["content"] for message in messages[:2])
        return render_chat(tokenizer, [{"role": "user", "content": both}, *messages[2:]], add_generation_prompt)


def load_rows(dataset, num_held_out, read, flag="--dataset"):
    """Return training and held-out rows as read makes them, and a report: how many, of what, and what was dropped.

    read(row) returns an item, or None where the row is dropped, and what there is to say of it, or None.
    """
    loaded, report = [], []
    for split, rows in zip(("training", "held-out"), load_splits(dataset, num_held_out, flag)):
        kept, remarks = [], {}
        for number, row in enumerate(rows, 1):
            with one_line(f"{flag} {dataset}: {split} row {number}"):
                try:
                    item, remark = read(row)
                except TemplateError as error:
                    item, remark = None, f"dropped, refused by the chat template ({str(error)[:100]})"
            kept += [] if item is None else [item]
            remarks[remark] = remarks.get(remark, 0) + 1
        said = [f"; {count} {remark}" for remark, count in remarks.items() if remark]
        content = fingerprint(json.dumps(kept, default=lambda value: type(value).__name__))
        report.append(f"{len(kept)} {split} rows ({content}){''.join(said)}")
        if not kept and (split == "training" or num_held_out):
            raise SystemExit(f"{flag} {dataset}: {report[-1]}")
        loaded.append(kept)
    return *loaded, "\n".join(report)


def load_splits(dataset, num_held_out, flag="--dataset"):
    """Return (training rows, held-out rows): the test or validation split, else the last num_held_out rows."""
    splits = read_splits(dataset, flag)
    train = splits.get("train", [])
    held_out = next((splits[split] for split in ("test", "validation") if split in splits), None)
    if held_out is None and len(train) > num_held_out:
        held_out = train.select(list(range(len(train) - num_held_out, len(train))))
        train = train.select(range(len(train) - num_held_out))
    if held_out is None or len(train) == 0:
        raise SystemExit(
            f"{flag} {dataset}: {len(train)} training rows, and splits {', '.join(splits)}: too few, with "
            f"--eval-prompts {num_held_out} to hold out where there is no test split"
        )
    return train, held_out.select(range(min(num_held_out, len(held_out))))


def read_splits(dataset, flag):
    """Return the splits of a file, a folder or a data set of the hub."""
    disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)  # what it says of a damaged file stands in the one line
    kinds = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
    name, _, config = (dataset, "", "") if os.path.exists(dataset) else dataset.partition(":")
    path, kind = Path(name), kinds.get(Path(name).suffix.lower(), "json")
    if not os.path.exists(path) and (path.suffix.lower() in kinds or name[:1] in "./~" or name.count("/") > 1):
        raise SystemExit(f"{flag} {dataset}: there is no such file or folder")
    problem = "cannot be loaded" if os.path.exists(path) else "no such file or folder, nor on the hub"
    with one_line(f"{flag} {dataset}: {problem}"):
        if path.is_file() and path.open("rb").read(1000).strip() in (b"", b"[]"):
            raise ValueError("it has no rows")
        inside = [] if (path / "README.md").exists() else path.rglob("*")  # which may say what of it is data
        if len({kinds.get(inner.suffix) for inner in inside if inner.name != "dataset_infos.json"} - {None}) > 1:
            raise ValueError("it has files of several kinds, of which only one would be read")
        if path.is_file():
            try:
                splits = load_dataset(kind, data_files=re.sub(r"([*?[])", r"[\1]", dataset))  # no pattern
            except Exception:
                for number, line in enumerate(() if path.suffix == ".json" or kind != "json" else path.open(), 1):
                    with one_line(f"{flag} {dataset}: line {number} is not JSON"):
                        line.isspace() or json.loads(line)
                raise
        else:
            configs = get_dataset_config_names(name)
            usual = configs if len(configs) == 1 else [c for c in ("main", "default") if c in configs]
            config = config or (usual[0] if usual else "")
            if config not in configs:
                raise ValueError(f"choose one of its configs, as in {name}:{configs[0]}; it has {', '.join(configs)}")
            splits = load_dataset(name, config)
    return splits


def fingerprint(thing):
    """A short hash of a text or of a function's source; of what has none, such as a partial, of its type's name."""
    with contextlib.suppress(OSError, TypeError):
        thing = thing if isinstance(thing, str) else inspect.getsource(thing)
    return hashlib.sha256((thing if isinstance(thing, str) else type(thing).__name__).encode()).hexdigest()[:12]


def load_prompts(dataset, tokenizer, system_prompt, max_prompt_length, num_held_out, flag="--dataset"):
    """Return training and held-out prompts, rows with prompt, answer and prompt_ids, and a report of what was dropped.

    Where there is no column of answers they are None.
    """
    train, held_out, report = load_rows(
        dataset, num_held_out, lambda row: read_prompt(row, tokenizer, system_prompt, max_prompt_length), flag
    )
    if train[0]["answer"] is None:
        with one_line(f"{flag} {dataset}: no column answer, solution or ground_truth; the reward fails"):
            score_completions(["Answer"], train[:1])
    return train, held_out, report


def read_prompt(row, tokenizer, system_prompt, max_prompt_length):
    """Return the row with its prompt, answer and prompt_ids, or None where it is dropped, and a remark or None."""
    prompts = [name for name in ("prompt", "question", "problem") if name in row]
    answers = [row[name] for name in ("answer", "solution", "ground_truth") if name in row]
    if not prompts:
        raise ValueError(f"needs a column prompt, question or problem; found {', '.join(row)}")
    prompt, answer, remark = row[prompts[0]], answers[0] if answers else None, None if answers else "without answer"
    messages = as_messages(prompt, prompts[0])
    if not messages:
        return None, "dropped, without prompt"
    if messages[-1]["role"] == "assistant":
        return None, "dropped, ending in the assistant's turn"
    if answers:
        if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
            raise ValueError(f"an answer must be a text or a number, not {answer!r:.80}")
        answer = "" if answer is None or answer != answer else str(answer)  # nan is unequal to itself
        gold = parse_answer(extract_answer(answer) or answer)
        if gold is None:
            return None, "dropped, without answer"
        remark = "whose answer is no number and is compared as text" if isinstance(gold, str) else None
    prompt_ids = encode_prompt(tokenizer, prompt, system_prompt)
    if len(prompt_ids) > max_prompt_length:
        return None, f"dropped, longer than {max_prompt_length} tokens"
    if tokenizer.chat_template is None and len(messages) > 1:
        remark = "of several messages, joined by blank lines: there is no chat template"
    return {**row, "prompt": prompt, "answer": answer, "prompt_ids": prompt_ids}, remark


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
    flat = re.sub(r"^([+-]? ?)\\[dt]?frac ?\{([+-]?[0-9]+)\} ?\{([+-]?[0-9]+)\}$", r"\1\2/\3", text)
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


def load_model(name, tokenizer, lora_rank=0):
    """Load a causal language model; return it and its stop tokens, which its checkpoints will name, too."""
    model, _ = load_pretrained(AutoModelForCausalLM, name)
    with one_line(f"--model {name}: eos_token_id in generation_config.json or config.json is wrong"):
        stop_ids = find_stop_ids(model, tokenizer)
    model.generation_config.eos_token_id = stop_ids
    # save_pretrained refuses what does nothing, such as a temperature without do_sample, unless it came that way.
    model.generation_config._original_object_hash = hash(model.generation_config)
    return add_adapters(model, lora_rank), stop_ids


def load_pretrained(auto_class, name, flag="--model", **settings):
    """Load a model with float32 parameters, without dropout and whole, or exit; return it and the keys it lacks, which
    may be those of a scalar head.
    """
    with one_line(f"{flag} {name}: cannot be loaded"):
        config = AutoConfig.from_pretrained(name, **settings)
        for part in (config, config.get_text_config()):
            for key, value in vars(part).items():
                if ("drop" in key or "jitter" in key) and isinstance(value, float):
                    setattr(part, key, 0.0)
        options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        # The checkpoint's own dtype is mostly bfloat16, in which a learning rate of 1e-6 moves one weight in fifty.
        model, info = auto_class.from_pretrained(name, config=config, dtype=torch.float32, **options)
        faults = [f"it lacks {key}" for key in sorted(info["missing_keys"]) if not key.startswith("score.")]
        for key, found, expected in sorted(info["mismatched_keys"]):
            faults.append(f"{key} has the size {[*found]}, where config.json asks for {[*expected]}")
        faults += [f"{key} is not finite" for key, value in model.named_parameters() if not value.isfinite().all()]
        if faults:
            raise ValueError(f"{faults[0]}; is the folder whole, and all of one model?")
    unused = sorted(key for key in info["unexpected_keys"] if not key.startswith("lm_head."))
    if unused and is_rank_0():
        print(f"warning: {flag} {name}: {len(unused)} tensors are not used, such as {unused[0]}: does config.json fit?")
    return model, info["missing_keys"]


def find_stop_ids(model, tokenizer):
    """Return every id that ends a completion: a turn's end, generation_config's, config's and the tokenizer's."""
    stop_ids = {find_turn_end(tokenizer)} - {None}
    configs = (getattr(model, "generation_config", tokenizer), model.config.get_text_config(), tokenizer)
    for ids in (config.eos_token_id for config in configs):
        stop_ids.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return sorted(stop_ids)


def add_adapters(model, rank):
    """Freeze the model and give every linear layer of its blocks adapters (Hu et al. 2021, arXiv 2106.09685).

    At first they change nothing. A scalar head is trained as it is; rank 0 leaves the model as it is.
    """
    layers = [layer for block in find_blocks(model) for layer in block.modules() if type(layer) is nn.Linear]
    covered = sum(layer.weight.numel() for layer in layers)
    if rank and 2 * covered <= sum(weight.numel() for block in find_blocks(model) for weight in block.parameters()):
        raise SystemExit(f"--lora-rank {rank}: most weights of {type(model).__name__} are not in linear layers: use 0")
    generator = torch.Generator().manual_seed(0)  # the same on every rank
    for layer in layers if rank else ():
        thin = (torch.rand(rank, layer.in_features, generator=generator) * 2 - 1) / layer.in_features**0.5
        layer.__class__, layer.lora_a = LoRALinear, nn.Parameter(thin)
        layer.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))
    for name, weight in model.named_parameters() if rank else ():
        weight.requires_grad_(name.endswith(ADAPTERS))
    return model


def find_blocks(model):
    """The transformer blocks of a model; none once they are sharded, because FSDP gives their class another name."""
    found = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    inner = {module for block in found for module in [*block.modules()][1:]}  # Mamba names its mixers, too
    return [block for block in found if block not in inner]


class LoRALinear(nn.Linear):
    """A frozen linear layer, to which a trained product of two thin matrices is added."""

    enabled = True  # while False, all of them are what they were before training

    def forward(self, x):
        output = super().forward(x)
        if LoRALinear.enabled:
            thin = nn.functional.linear(x, self.lora_a.to(x.dtype))
            output = output + nn.functional.linear(thin, self.lora_b.to(x.dtype)) * (LORA_ALPHA / len(self.lora_a))
        return output


@torch.no_grad()
def check_model(model, prompt_ids, max_length, generates=True):
    """Exit where log-probabilities would not be the model's own, or a cache could not do what generate asks of it."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_length
    if max_length > context:
        raise SystemExit(
            f"the longest prompt and --max-completion-length make {max_length} tokens, over the context of {context}"
        )
    half = min(8, len(prompt_ids))
    ids = torch.tensor([prompt_ids[:half] * 2], device=model.device)  # (1, 2 half)
    ones = torch.ones_like(ids[:, :half])
    with one_line(f"{type(model).__name__} is not built as these scripts expect"):
        inputs = (model.train(), ids[:, :half], ones, ids[:, half:], ones, 1.0)
        first, second = (token_logprobs(*inputs)[0][0] for _ in range(2))  # (half,)
        plain = model.eval()(ids, use_cache=False).logits[0].log_softmax(-1)  # (2 half, V)
    if not torch.allclose(first, second, atol=1e-4):
        raise SystemExit("this model is random in training: two passes give different log-probabilities")
    if not torch.allclose(first, plain[half - 1 : -1].gather(1, ids[0, half:, None]).squeeze(1), atol=1e-2):
        raise SystemExit("this model changes the output of its LM head in a way these scripts do not reproduce")
    if generates:
        with one_line("the key-value cache of this model cannot skip padding or drop rows, which generate() needs"):
            both, mask = pad_left([[0, *ids[0].tolist()], ids[0, :half].tolist()], 0, ids.device)
            _, cache = next_logits(model, both, mask, {})
            select_rows(cache, torch.tensor([1], device=ids.device))
            for end in range(half + 1, 2 * half + 1):  # the padded one is alone now, and goes on
                mask = nn.functional.pad(mask[-1:], (0, 1), value=1)
                logits, cache = next_logits(model, nn.functional.pad(ids[:, :end], (half + 1, 0)), mask, cache)
                if not torch.allclose(logits[0].log_softmax(-1), plain[end - 1], atol=1e-2):
                    raise ValueError("it goes on with another text")


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
        logprobs = (head_logits(model, hidden) / temperature).log_softmax(-1)  # (n, V)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), entropies

    weights = [weight for weight in model.get_output_embeddings().parameters() if weight.requires_grad]
    size = max(1, 2 ** (26 if hidden.is_cuda else 24) // model.get_output_embeddings().weight.shape[0])
    return Recomputed.apply(chunk_logprobs, size, hidden, targets, *weights)


def head_logits(model, hidden):
    """Logits (n, V) of hidden states (n, D), at least float32, the LM head's, scaled and capped as by the model."""
    logits = model.get_output_embeddings()(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    given = vars(model.config.get_text_config()).get
    scale = given("logit_scale") or given("lm_head_multiplier") or 1 / (given("logits_scaling") or 1)
    cap = given("final_logit_softcapping") or given("logits_soft_cap") or given("output_logit_soft_cap")
    logits = logits if scale == 1 else logits * scale
    return (logits / cap).tanh() * cap if cap else logits


class Recomputed(torch.autograd.Function):
    """compute(hidden, targets) in chunks, of which nothing is kept for the backward pass, where they are made anew.

    torch.utils.checkpoint would keep what it recomputes for an output that gets no gradient, as entropies mostly do,
    and autograd a gradient of the weights for every chunk.
    """

    @staticmethod
    def forward(ctx, compute, size, hidden, targets, *weights):
        ctx.compute, ctx.size = compute, size
        ctx.save_for_backward(hidden, targets, *weights)
        ctx.set_materialize_grads(False)
        chunks = zip(hidden.split(size), targets.split(size))
        return tuple(torch.cat(parts) for parts in zip(*(compute(*chunk) for chunk in chunks)))

    @staticmethod
    def backward(ctx, *gradients):
        hidden, targets, *weights = ctx.saved_tensors
        hidden_gradients, sums = [], [torch.zeros_like(weight) for weight in weights]
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]
        chunks = (hidden, targets, *(gradients[i] for i in used))
        for part, part_targets, *part_gradients in zip(*(tensor.split(ctx.size) for tensor in chunks)):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                outputs = ctx.compute(part, part_targets)
            found = torch.autograd.grad([outputs[i] for i in used], (part, *weights), part_gradients)
            hidden_gradients.append(found[0])
            for total, gradient in zip(sums, found[1:]):
                total += gradient
        return None, None, torch.cat(hidden_gradients), None, *sums


def pad_left(rows, pad_id, device):
    """Return ids and mask (B, P) of lists of token ids, padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def next_logits(model, ids, mask, cache):
    """Logits (B, V) of what follows ids (B, L), padded on the left, and the cache that holds these.

    Given the cache of all before the last, only that one is read. Where a model's cache cannot be told which rows to
    keep it is left empty, and all are read again for every token.
    """
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    if cache:
        ids, positions = ids[:, -1:], positions[:, -1:]
        mask = mask[:, -1:] if "cache_params" in cache else mask  # no attention, no mask of what was before
    output = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, **cache, use_cache=True, logits_to_keep=1
    )
    names = ("past_key_values", "cache_params")
    cache = {name: output[name] for name in names if hasattr(output.get(name), "reorder_cache")}
    if cache:
        return output.logits[:, -1], cache
    order = (1 - mask).argsort(dim=1, stable=True)  # padding goes to the right, as in token_logprobs
    hidden = model.base_model(input_ids=ids.gather(1, order), use_cache=False).last_hidden_state  # (B, L, D)
    return head_logits(model, hidden[torch.arange(len(ids), device=ids.device), mask.sum(1) - 1]), cache


def select_rows(cache, rows):
    """Keep these rows of a cache, whether its layers hold keys and values or states."""
    for layers in cache.values():
        if hasattr(layers, "linear_cache"):  # MiniMax's, which would reorder only its keys and values
            layers.batch_select_indices(rows)
        else:
            layers.reorder_cache(rows)


def make_sampler(model, device, precision="float32"):
    """Return the model that samples: a copy that computes as the sharded one does, or the trained model itself."""
    if not needs_shards(model, device, precision):
        return model
    inside, copies = {weight for block in find_blocks(model) for weight in block.parameters()}, {}
    for weight in model.parameters():  # rounded one by one: no second float32 model, and buffers stay float32
        dtype = torch.bfloat16 if precision == "bfloat16" and weight in inside else weight.dtype
        copies[id(weight)] = nn.Parameter(weight.detach().to(device, dtype, copy=True), requires_grad=False)
    sampler = copy.deepcopy(model, copies).to(device)
    if precision == "bfloat16":
        cast_blocks(sampler)
    return sampler


def needs_shards(model, device, precision):
    """Is this model sharded? On one process only if FSDP casts its weights: frozen ones are cast once and for all."""
    return dist.is_initialized() or (is_trained(model) and (device.type == "cuda" or precision == "bfloat16"))


def is_trained(model):
    """Is more of this model trained than adapters? Some models have a weight or two that never are."""
    return any(weight.requires_grad and not name.endswith(ADAPTERS) for name, weight in model.named_parameters())


def cast_blocks(model):
    """Let the blocks compute in bfloat16: round their frozen weights, cast what goes in and what comes out."""

    def cast(value, dtype):
        if isinstance(value, dict):  # float32's lowest number, of which masks are made, would become -inf
            return {key: item if key == "attention_mask" else cast(item, dtype) for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(cast(item, dtype) for item in value)
        return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value

    for block in find_blocks(model):
        for weight in block.parameters():  # block.to() would round buffers, too, such as the frequencies of positions
            weight.data = weight.data if weight.requires_grad else weight.data.to(torch.bfloat16)
        block.register_forward_pre_hook(lambda _, *inputs: cast(inputs, torch.bfloat16), with_kwargs=True)
        block.register_forward_hook(lambda _, args, output: cast(output, torch.float32))  # noqa: ARG005


def shard(policy, device, precision="float32"):
    """Move to the device; shard parameters, gradients and optimizer state over the ranks (FSDP2), block by block.

    In bfloat16 the blocks compute in it, from float32 parameters where they are trained and with float32 gradients;
    what is outside them, the LM head above all, computes in float32.
    """
    for model in policy.children():
        mesh = shard_blocks(model, device, precision)
    if needs_shards(policy, device, precision):
        fully_shard(policy, mesh=mesh, reshard_after_forward=True)  # else a frozen one would stay gathered
    return policy.to(device)


def shard_blocks(model, device, precision):
    """Do for the blocks of one model what shard does for the whole; return the mesh of ranks, if there is one."""
    if device.type == "cuda" and precision == "bfloat16":
        torch.set_float32_matmul_precision("high")  # TF32, for the LM head
    if precision == "bfloat16" and not is_trained(model):
        cast_blocks(model)
    if not needs_shards(model, device, precision):
        return None
    if not dist.is_initialized():  # FSDP wants a group, be it of one
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    bfloat16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    weights = [weight for block in find_blocks(model) for weight in block.parameters()]
    if len({*weights}) < len(weights):
        raise SystemExit(f"{type(model).__name__} shares weights between blocks: it needs --lora-rank and one process")
    for block in find_blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=bfloat16 if precision == "bfloat16" else MixedPrecisionPolicy())
    return mesh


class LogprobModel(nn.Module):
    """The unit that is sharded: its forward returns log-probabilities, so the LM head is gathered with the rest."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args):
        return token_logprobs(self.model, *args)


def open_run(args, policy, optimizer, tokenizer, report):
    """Make the run folder, or load the state of the run to resume and drop what was logged after it.

    Returns the last step done, -1 in a new run, and the progress bar.
    """
    run_dir = Path(args.run_dir)
    on_rank_0(take_folder, args, report.splitlines())
    last_step = load_state(run_dir, policy, optimizer) if args.resume else -1
    on_rank_0(drop_later, run_dir, last_step)
    if last_step > 0:
        save_checkpoint(run_dir, policy, tokenizer)  # it may be older than the state
    with one_line("--track"):
        wandb.init(
            project=args.wandb_project,
            name=run_dir.name,
            id=json.loads((run_dir / "args.json").read_text())["run"]["wandb_id"],
            resume="allow",
            dir=run_dir,
            config=asdict(args),
            mode=None if args.track and is_rank_0() else "disabled",
        )
        wandb.define_metric("*", step_metric="step")  # by its own count wandb would drop what is logged again
    if is_rank_0():
        millions = sum(weight.numel() for weight in policy.parameters()) / 1e6
        trained = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad) / 1e6
        part = f", of which {trained:.2f} M are trained," if trained < millions else ""
        where = f"{dist.get_world_size() if dist.is_initialized() else 1} x {policy.model.device.type}"
        print(f"{report}\n{run_dir}: {millions:.1f} M parameters{part} on {where} in {args.precision}")
    hidden = None if is_rank_0() else True  # None: where the output is no terminal
    bar = tqdm(total=args.num_steps, initial=max(0, last_step), desc=Path(__file__).stem, unit="step", disable=hidden)
    return last_step, bar


def on_rank_0(function, *args):
    """Call function on one rank, while the others wait."""
    if not dist.is_initialized():
        return function(*args)
    dist.barrier()
    if is_rank_0():
        function(*args)
    dist.barrier()


def take_folder(args, data):
    """Make the run folder, or take the one to resume if that is what this run is, for this process alone."""
    run_dir, names = Path(args.run_dir), list(globals())  # in the order of the file, whatever a user assigned
    names = names[names.index("Args") + 1 : names.index("main") + 1]
    run = {
        "script": Path(__file__).stem,
        "processes": dist.get_world_size() if dist.is_initialized() else 1,
        "data": data,
        "command": entry_command(),
        "functions": {name: fingerprint(globals()[name]) for name in names},
        "wandb_id": secrets.token_hex(4),
    }
    if args.resume:
        now, run = run, json.loads((run_dir / "args.json").read_text())["run"]
        for key in ("script", "processes", "data"):
            if now[key] != run[key]:
                raise SystemExit(f"--resume {run_dir}: {key} was {run[key]} ({run['command']}), and is {now[key]}")
        if changed := [name for name in now["functions"] if now["functions"][name] != run["functions"].get(name)]:
            print(f"warning: not what it was when {run['command']} began this run: {', '.join(changed)}")
    with one_line(f"--run-dir {run_dir}: another process works in it, or it cannot be written"):
        if not args.resume:
            run_dir.mkdir(parents=True, exist_ok=run_dir.is_dir() and not any(run_dir.iterdir()))
        lock = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT)
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends
        (run_dir / "state").mkdir(exist_ok=True)
        write_whole(run_dir / "args.json", json.dumps({**asdict(args), "resume": None, "run": run}, indent=2) + "\n")


def entry_command():
    """The command that started this process, without its settings."""
    script = sys.argv[0] if sys.argv[0].endswith(".py") else Path(__file__).name
    if not dist.is_torchelastic_launched():
        return f"python {shlex.quote(script)}"
    nodes = f"--nnodes {os.environ['GROUP_WORLD_SIZE']} " if os.environ["GROUP_WORLD_SIZE"] != "1" else ""
    return f"torchrun {nodes}--nproc-per-node {os.environ['LOCAL_WORLD_SIZE']} {shlex.quote(script)}"


def write_whole(path, text):
    """Write a file that a reader finds complete or not at all."""
    path.with_suffix(".unfinished").write_text(text)
    path.with_suffix(".unfinished").replace(path)


def load_state(run_dir, policy, optimizer):
    """Load the newest complete state and return its step."""
    path = run_dir / "state" / f"{saved_steps(run_dir)[-1]:08d}"
    model_state, optimizer_state = dcp_state.get_state_dict(policy, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # nothing was saved of parameters that get no gradient
    with one_line(f"{path} is damaged: start a new run, perhaps from {run_dir}/checkpoint"):
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        if lacking := {f"model.{name}" for name in model_state} - saved.keys():
            raise ValueError(f"it lacks {min(lacking)}")
        with warnings.catch_warnings(action="ignore"):  # that one process loads alone is meant
            dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized(), planner=planner)
        dcp_state.set_state_dict(
            policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    return int(path.name)


def drop_later(run_dir, last_step):
    """Remove what a resumed run logged or saved besides the step it goes on from."""
    for path in [*run_dir.glob("metrics.jsonl"), *run_dir.glob("*samples.jsonl")]:
        kept = []
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            with one_line(f"{path}: line {number} is damaged: delete it, or put back what it was"):
                if line.endswith(b"\n") and json.loads(line)["step"] <= last_step:  # the last may be half-written
                    kept.append(line.decode())
        write_whole(path, "".join(kept))
    for path in (run_dir / "state").iterdir():
        if path.name != f"{last_step:08d}":
            shutil.rmtree(path, ignore_errors=True)  # a file is left alone


def save_checkpoint(run_dir, policy, tokenizer):
    """Write checkpoint/, a Hugging Face folder with the float32 parameters and the tokenizer."""
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = dcp_state.get_model_state_dict(policy, options=options)
    checkpoint, unfinished = Path(run_dir) / "checkpoint", Path(run_dir) / "checkpoint.unfinished"
    own = {key.removeprefix("model."): value.float() for key, value in state.items() if key.startswith("model.")}
    for key in [key for key in own if key.endswith(".lora_a")]:
        a, b = own.pop(key), own.pop(key[:-1] + "b")
        weight = key.removesuffix("lora_a") + "weight"
        own[weight] = own[weight] + b @ a * (LORA_ALPHA / len(a))
    for key in policy.model.all_tied_weights_keys:  # of one storage here, of two where they were gathered from ranks
        own.pop(key, None)

    def publish():
        shutil.rmtree(unfinished, ignore_errors=True)
        policy.model.save_pretrained(unfinished, state_dict=own)
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
        for first in tqdm(range(0, len(pairs), 1024), path.stem, unit="x1024", leave=False, disable=rank > 0 or None):
            own = list(range(first, min(first + 1024, len(pairs))))[rank::world_size]
            batch = collate_pairs([pairs[i] for i in own] or pairs[:1], pad_id, device)
            for part in microbatches(batch, torch.arange(len(own), device=device), args.microbatch_tokens):
                logprobs = torch.stack(pair_logprobs(policy, part))  # (2, n)
                found[:, [own[i] for i in part["rows"].tolist()]] = logprobs.cpu().double()
        found = all_reduce(found)
        on_rank_0(write_whole, path, json.dumps(found))
    with one_line(f"{path} is damaged: start a new run, perhaps from {args.run_dir}/checkpoint"):
        for pair, chosen, rejected in zip(pairs, *json.loads(path.read_text()), strict=True):
            pair |= {"ref_chosen": float(chosen), "ref_rejected": float(rejected)}


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
        more = "; the traceback torchrun prints is its own" if dist.is_torchelastic_launched() else ""
        os.write(2, f"\nstopping after this step, saving what was trained{more}; once more to stop at once\n".encode())

    signal.signal(signal.SIGINT, request_stop)
    signal.signal(signal.SIGTERM, request_stop)
    return received


def pick_rows(rows, start, count, seed):
    """Return places start to start + count of an endless sequence of passes over the rows, each in its own order."""
    picked = []
    for epoch in range(start // len(rows), (start + count - 1) // len(rows) + 1):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(len(rows), generator=generator).tolist()
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
    """Clip the gradients, make a step, or none if they are not finite, and free them; return the norm before."""
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
    grad_norm = float(grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    if math.isfinite(grad_norm):
        optimizer.step()
    optimizer.zero_grad()
    return grad_norm


def check_finite(step, grad_norm, run_dir):
    """Exit if there was no optimizer step to make; what was saved before stands."""
    if not math.isfinite(grad_norm):
        steps = saved_steps(run_dir)
        saved = f"{run_dir}/checkpoint is of step {steps[-1]}" if steps else "nothing was saved yet"
        raise SystemExit(f"step {step}: gradient norm {grad_norm}: is --learning-rate too high? {saved}")


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
            if trained.requires_grad:
                copied.copy_(trained.full_tensor() if hasattr(trained, "full_tensor") else trained)


def evaluate(model, tokenizer, prompts, stop_ids, args, step, rank, world_size):
    """Reward of the greedy completions, which are kept, and where there are answers what count_right says."""
    start, share, sums, texts, samples = time.perf_counter(), prompts[rank::world_size], {"eval/reward": 0.0}, [], []
    if rank == 0:
        tqdm.write(f"evaluating on {len(prompts)} prompts")
    torch.manual_seed(args.seed % 2**63)
    if share:
        batch, texts = rollout(model, tokenizer, share, 1, 0.0, stop_ids, args)
        sums["eval/reward"] = batch["rewards"].sum()
        samples = [{"completion": text, "reward": reward} for text, reward in zip(texts, batch["rewards"].tolist())]
    keep_samples(args.run_dir, step, share, samples)
    if prompts[0]["answer"]:
        sums |= count_right(model, tokenizer, share, texts, stop_ids, args)
    means = {key: total / len(prompts) for key, total in reduce_metrics(sums).items()}
    return means | {"perf/eval_seconds": time.perf_counter() - start}


def rollout(model, tokenizer, prompts, num_samples, temperature, stop_ids, args):
    """Sample num_samples completions of each prompt and score them; return tensors (B, ...) and the texts."""
    batch, texts = sample_completions(model, tokenizer, prompts, num_samples, temperature, stop_ids, args)
    start = time.perf_counter()
    rewards = score_completions(texts, [prompt for prompt in prompts for _ in range(num_samples)])
    rewards = rewards.tolist() if hasattr(rewards, "tolist") else rewards  # an array's or a tensor's
    if not isinstance(rewards, list | tuple) or len(rewards) != len(texts):
        raise SystemExit(f"score_completions must return a reward for each of {len(texts)} texts, not {rewards!r:.80}")
    for reward, text in zip(rewards, texts):
        if not hasattr(reward, "__float__") or not abs(reward) < 1e38:
            raise SystemExit(f"reward {reward!r}: no finite number; it was given to the completion {text[:200]!r}")
    batch["rewards"] = torch.tensor([float(reward) for reward in rewards], device=model.device)
    batch["reward_seconds"] = torch.full_like(batch["rewards"], (time.perf_counter() - start) / len(texts))
    return batch, texts


def sample_completions(model, tokenizer, prompts, num_samples, temperature, stop_ids, args):
    """Sample num_samples completions of each prompt, those of one prompt adjacent; return tensors (B, ...), texts."""
    pad_id = tokenizer.pad_token_id or 0  # any will do: padding is known by the mask
    prompts = [prompt for prompt in prompts for _ in range(num_samples)]
    prompt_ids, prompt_mask = pad_left([prompt["prompt_ids"] for prompt in prompts], pad_id, model.device)
    size = args.rollout_batch_size or len(prompts)
    limits, parts = (args.max_completion_length, temperature, stop_ids, pad_id), []
    make_writer = globals().get("make_writer")  # of a script that writes between the tokens that are drawn
    for ids, mask in zip(prompt_ids.split(size), prompt_mask.split(size)):
        edit = make_writer and make_writer(len(ids), tokenizer, args)
        parts.append(generate(model, ids, mask, *limits, with_logprobs=True, edit=edit))
    completion_ids, completion_mask, sampler_logprobs = (torch.cat(part) for part in zip(*parts))
    lengths = completion_mask.sum(1)  # (B,)
    completions = [ids[:length] for ids, length in zip(completion_ids.tolist(), lengths.tolist())]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
    batch = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "sampler_logprobs": sampler_logprobs,
        "lengths": prompt_mask.sum(1) + lengths,
        "truncated": torch.tensor([ids[-1] not in stop_ids for ids in completions], device=model.device),
    }
    return batch, texts


@torch.no_grad()
def generate(
    model, prompt_ids, prompt_mask, max_completion_length, temperature, stop_ids, pad_id, with_logprobs=False, edit=None
):
    """Sample a completion of each prompt, up to and including the first stop id.

    prompts (B, P) left-padded -> completion_ids, completion_mask (B, max_completion_length) right-padded; and, if
    asked for, the log-probabilities this model sampled the tokens with, 0 where masked and at temperature 0.
    edit, if given, is told what was drawn in each row, and returns what is written there (grpo_tools.py).
    """
    was_training = model.training
    model.eval()  # gradient checkpointing would turn the cache off
    stop_ids = torch.tensor(stop_ids, device=prompt_ids.device, dtype=torch.long)
    completion_ids = prompt_ids.new_full((len(prompt_ids), max_completion_length), pad_id)
    completion_mask, sampler_logprobs = torch.zeros_like(completion_ids), torch.zeros_like(completion_ids).float()
    logits, cache = read_prompts(model, prompt_ids, prompt_mask)
    ids, mask, rows = prompt_ids, prompt_mask, torch.arange(len(prompt_ids), device=prompt_ids.device)  # not yet ended
    for t in range(max_completion_length):
        tokens, logprobs = sample_tokens(logits, temperature)
        ended = torch.isin(tokens, stop_ids)
        if edit is not None:
            tokens, logprobs, ended = edit(rows, tokens, logprobs, ended)
        completion_ids[rows, t], sampler_logprobs[rows, t] = tokens, logprobs
        completion_mask[rows, t] = 1
        running = (~ended).nonzero().squeeze(1)
        if t + 1 == max_completion_length or len(running) == 0:
            break
        if len(running) < len(rows):  # finished rows leave the batch
            rows, tokens, ids, mask = rows[running], tokens[running], ids[running], mask[running]
            select_rows(cache, running)
        ids = torch.cat([ids, tokens.unsqueeze(1)], 1)  # (B, P + t + 1)
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        logits, cache = next_logits(model, ids, mask, cache)
    model.train(was_training)
    return (completion_ids, completion_mask, sampler_logprobs)[: 3 if with_logprobs else 2]


def read_prompts(model, prompt_ids, prompt_mask):
    """Logits (B, V) of what follows the prompts (B, P), and the cache that holds these.

    Completions of one prompt are adjacent: each prompt is read once.
    """
    both = torch.cat([prompt_ids, prompt_mask.long()], 1)  # (B, 2 P)
    unique, row_of = torch.unique_consecutive(both, dim=0, return_inverse=True)
    logits, cache = next_logits(model, *unique.chunk(2, 1), {})
    select_rows(cache, row_of)
    return logits[row_of], cache


def sample_tokens(logits, temperature):
    """Draw ids from exactly softmax(logits / temperature), by inverse CDF; temperature 0 is greedy.

    (B, V) -> ids and their log-probabilities (B,), which are 0 at temperature 0.
    """
    if temperature == 0:
        return logits.argmax(-1), torch.zeros(len(logits), device=logits.device)
    probabilities = (logits.float() / temperature).softmax(-1)  # (B, V)
    cdf = probabilities.cumsum(-1)
    # torch.rand does return 0, and a search from the left would then pick id 0 even at probability 0.
    draw = torch.rand(len(cdf), 1, device=cdf.device) * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, draw, right=True).squeeze(1)
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous()).squeeze(1)  # the last id of non-zero probability
    tokens = torch.minimum(tokens, last)
    return tokens, probabilities.gather(1, tokens.unsqueeze(1)).squeeze(1).log()


def keep_samples(run_dir, step, prompts, samples):
    """Append the prompts with their samples, those of all ranks, to eval_samples.jsonl."""
    own = [{"prompt": row["prompt"], "answer": row["answer"]} | sample for row, sample in zip(prompts, samples)]
    parts = [own]
    if dist.is_initialized():
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own)
    for sample in (sample for part in parts for sample in part if is_rank_0()):
        append_line(Path(run_dir) / "eval_samples.jsonl", {"step": step} | sample)


def append_line(path, row):
    """Append a row to a jsonl file."""
    with one_line(f"{path}: when this is mended, go on with --resume {path.parent}"), path.open("a") as file:
        file.write(json.dumps(row, default=str) + "\n")


def count_right(model, tokenizer, prompts, texts, stop_ids, args):
    """Sums over prompts of greedy accuracy, of these texts, and pass@k: both count is_right, whatever the reward is.

    pass@k is the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374, eq. 1).
    """
    sums = dict.fromkeys(("eval/accuracy", "eval/pass@1", "eval/pass@2", "eval/pass@4"), 0.0)
    samples = []
    if prompts:
        _, samples = sample_completions(model, tokenizer, prompts, EVAL_SAMPLES, args.temperature, stop_ids, args)
    for number, row in enumerate(prompts):
        sums["eval/accuracy"] += is_right(texts[number], row["answer"])
        own = samples[number * EVAL_SAMPLES : (number + 1) * EVAL_SAMPLES]
        correct = sum(is_right(text, row["answer"]) for text in own)
        for k in (1, 2, 4):
            sums[f"eval/pass@{k}"] += 1 - math.comb(EVAL_SAMPLES - correct, k) / math.comb(EVAL_SAMPLES, k)
    return sums


def log_step(args, step, metrics, progress):
    """Append to metrics.jsonl and Weights & Biases, and print."""
    append_line(Path(args.run_dir) / "metrics.jsonl", {"step": step, **metrics})
    wandb.log({"step": step, **metrics})
    shown = (("accuracy", "pair/accuracy", 2), ("loss", "loss/preference", 3), ("loss", "loss/nll", 3))
    shown = {name: f"{metrics[key]:.{digits}f}" for name, key, digits in shown if key in metrics}
    show_step(step, metrics, progress, shown)


def show_step(step, metrics, progress, shown):
    """Print what an evaluation found, and move the bar; where that is hidden, print a line now and then."""
    found = [f"{key[5:]} {value:.3f}" for key, value in metrics.items() if key[:5] == "eval/" and "/" not in key[5:]]
    if found:
        tqdm.write(f"step {step}: {', '.join(found)}")
    if step > 0:
        progress.set_postfix(shown, refresh=False)
        progress.update()
        if progress.disable and step % max(1, progress.total // 100) == 0:
            print(f"step {step}: {', '.join(f'{name} {value}' for name, value in shown.items())}", flush=True)


def save(run_dir, policy, optimizer, tokenizer, step):
    """Write state/<step>, which appears complete or not at all, remove older ones, then write checkpoint/."""
    states, free = Path(run_dir) / "state", shutil.disk_usage(run_dir).free / 2**20
    model_state, optimizer_state = dcp_state.get_state_dict(policy, optimizer)
    state, unfinished = {"model": model_state, "optimizer": optimizer_state}, states / "unfinished"

    def publish():
        unfinished.rename(states / f"{step:08d}")
        for path in states.iterdir():
            if path.name != f"{step:08d}":
                shutil.rmtree(path, ignore_errors=True)

    more = f"; mend it, then --resume {run_dir}" if saved_steps(run_dir) else ""
    with one_line(f"{run_dir}: step {step} could not be saved, {free:.0f} MB were free{more}"):
        try:
            with warnings.catch_warnings(action="ignore"):  # that one process saves alone is meant
                dcp.save(state, checkpoint_id=unfinished, no_dist=not dist.is_initialized())
            on_rank_0(publish)
            save_checkpoint(run_dir, policy, tokenizer)
        finally:  # what does not fit must not fill the disk
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.rmtree(Path(run_dir) / "checkpoint.unfinished", ignore_errors=True)


def end_run(args, progress, stop_signals):
    """Close what was opened and print the summary; after a signal exit as shells count, so that a && b stops there."""
    progress.close()
    wandb.finish()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    metrics = Path(args.run_dir, "metrics.jsonl")
    if is_rank_0() and metrics.exists() and metrics.stat().st_size:
        print_summary(args)
    if dist.is_initialized() and not dist.is_torchelastic_launched():
        dist.destroy_process_group()  # that of one
    if stop_signals:
        raise SystemExit(128 + stop_signals[0])


def print_summary(args):
    """Print what improved, where the checkpoint is and how to go on."""
    lines = [json.loads(line) for line in Path(args.run_dir, "metrics.jsonl").read_text().splitlines()]
    print_work(args, lines, lines[-1]["step"] * args.minibatch_size, "pairs")
    names = {"eval/accuracy": "greedy accuracy", "eval/pass@1": "pass@1", "eval/pass@4": "pass@4"}
    names |= {"eval/pair_loss": "held-out loss", "eval/pair_accuracy": "held-out pairs told apart"}
    names |= {"eval/pair_chosen_log_ratio": "chosen: log-probability over reference"}
    print_ends(args, lines, names, "which --model and from_pretrained load")


def print_work(args, lines, count, kind):
    """Print how much was done, and how fast; with --num-steps 0, that the model was evaluated and that is all."""
    seconds = sum(line.get("perf/step_seconds", 0.0) for line in lines)
    rate = count / max(seconds, 1e-9)
    done = f"{lines[-1]['step']} steps in {seconds:.0f} s: {count} {kind}, {rate:.0f} a second"
    print(f"\n{done}" if args.num_steps else f"\n{args.model or 'the new model'}: evaluated only, with --num-steps 0")


def print_ends(args, lines, names, use):
    """Print metrics of the first evaluation and of the last, where the checkpoint is, and the command that goes on."""
    width = max([16, *(len(name) + 1 for name in names.values())])
    for key, name in names.items():
        found = [f"{line[key]:.3f} (step {line['step']})" for line in lines if key in line]
        if found:
            print(f"{name:{width}}{' -> '.join(found[:1] + found[1:][-1:])}")
    if not saved_steps(args.run_dir):
        if args.num_steps:
            print("nothing was trained or saved: there is nothing to go on from")
        return
    print(f"checkpoint      {Path(args.run_dir, 'checkpoint')}, {use}")
    more = f" --num-steps {2 * args.num_steps}" if lines[-1]["step"] >= args.num_steps else ""
    print(f"to go on        {entry_command()} --resume {shlex.quote(str(Path(args.run_dir)))}{more}")
    if Path(sys.argv[0]).name != Path(__file__).name:
        print("                or, where that takes no flags, main(Args(resume=...))")


if __name__ == "__main__":
    main(parse_args())
