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

    python sft.py                               # the settings TINY below, from random weights
    python sft.py --model Qwen/Qwen2.5-0.5B     # those of Args, on 24 GB
"""

import json
import math
import os
import shutil
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.integrations import sdpa_attention

RANK = int(os.environ.get("RANK", 0))  # torchrun sets these
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
HERE = Path(__file__).resolve().parent


@dataclass
class Args:
    """Train a language model with supervised fine-tuning."""

    # model and data
    model: str = ""
    """folder or Hugging Face name of a causal language model, or a config.json: then its model starts from random
    weights (empty: the config.json of the bundled model, with the settings TINY)"""
    tiny: bool = False
    """use the settings TINY with --model, for checkpoints of the bundled model"""
    dataset: str = "trl-lib/Capybara"
    """file, folder or Hugging Face NAME[:CONFIG[:SPLIT]] with the column messages, or text, or prompt (or question,
    problem) and completion (or response, solution, answer)"""
    system_prompt: str = ""
    """system message before every chat that has none"""
    max_prompt_length: int = 1024
    """maximum tokens before a turn of the assistant; turns with more are dropped"""
    max_completion_length: int = 1024
    """maximum tokens per turn of the assistant, including the stop token; longer turns are dropped, and texts cut"""

    # optimization
    num_steps: int = 1000
    """optimizer steps"""
    learning_rate: float = 1e-5
    """peak learning rate of AdamW, after the warm-up; small models need a higher one: 2e-4 for 135 M parameters"""
    warmup_steps: int = 50
    """steps over which the learning rate rises from 0; at most half of the run"""
    minibatch_size: int = 64
    """examples (turns of the assistant) per optimizer step, over all ranks"""
    microbatch_tokens: int = 4096
    """maximum tokens per forward pass, including padding"""
    max_grad_norm: float = 1.0
    """larger gradients are scaled down to this norm; 0 leaves them as they are"""
    weight_decay: float = 0.1
    """weight decay of AdamW"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: saves memory, but the update takes about a third longer"""
    cpu_offload: bool = False
    """keep weights, gradients and AdamW's state in the host's memory: fits larger models, but is slower"""
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """precision of matrix products (float32 on GPUs before Ampere, such as T4 and V100); weights are float32"""

    # evaluation, saving, logging
    eval_every: int = 100
    """steps between evaluations"""
    eval_prompts: int = 256
    """held-out rows per evaluation"""
    save_every: int = 100
    """steps between saves"""
    run_dir: str = ""
    """new folder for logs and checkpoints (empty: runs/SCRIPT__SEED__TIME, or that of --resume)"""
    resume: str = ""
    """folder of a run to continue; its settings become the defaults"""
    seed: int = 1
    """seed of random weights and of the order of examples"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline works)"""


# The settings of the bundled model, which adds numbers.
TINY = Args(
    model=f"{HERE}/models/tiny/config.json",
    dataset=f"{HERE}/data/addition/sft.jsonl",
    learning_rate=3e-3,
    warmup_steps=300,
    num_steps=2200,
    microbatch_tokens=2048,
    max_prompt_length=32,
    max_completion_length=48,
    eval_every=500,
    eval_prompts=512,
    save_every=500,
    precision="float32",
)


def completion_loss(logprobs, completion_mask):
    """Sum the negative log-likelihood over completion tokens; the caller divides by their number.

    Both (B, L), in nats. Metrics are pairs (sum, count), over tokens.
    """
    mask = completion_mask.bool()
    loss = -torch.where(mask, logprobs, 0.0).sum()
    return loss, {"loss/nll": (loss.detach(), mask.sum())}


# A batch is a dictionary of tensors with a row for each of B examples:
#   ids               (B, L)  a prompt, its completion and padding
#   completion_mask   (B, L)  1 at the completion's tokens, 0 elsewhere
#   total_lengths     (B,)    lengths with the prompt


def batch_loss(policy, batch):
    """Return completion_loss of a batch, and its metrics."""
    logprobs, _ = policy(batch["ids"], batch["completion_mask"], 1.0)
    return completion_loss(logprobs, batch["completion_mask"])


@torch.no_grad()
def evaluate(policy, rows, args, device):
    """Return the mean loss per completion token of held-out examples, and its exponential, the perplexity."""
    if not rows:
        return {}
    rows = rows[RANK::WORLD_SIZE] or rows[:1]  # all ranks must reduce the same metrics
    batch = make_batch(rows, device)
    indices = torch.arange(len(rows), device=device)
    collected = []
    for microbatch in inner_bar(microbatches(batch, indices, args.microbatch_tokens), "examples"):
        _, metrics = batch_loss(policy, microbatch)
        collected.append(metrics)
    loss = mean_metrics(collected)["loss/nll"]
    return {"eval/loss": loss, "eval/perplexity": math.exp(loss)}


def main(args):
    device = init_ranks()
    check_args(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model.removesuffix("config.json"))
    train_rows, eval_rows = load_rows(args, tokenizer)
    policy = load_policy(args, tokenizer, device)
    optimizer = torch.optim.AdamW(
        policy.parameters(), args.learning_rate, (0.9, 0.98), weight_decay=args.weight_decay, fused=True
    )
    open_run(args, device)
    first_step = load_state(args, policy, optimizer) + 1
    optimizer.param_groups[0]["weight_decay"] = args.weight_decay  # that of the flag, also after a resume
    if first_step == 1:
        log_step(args, 0, evaluate(policy, eval_rows, args, device))

    progress = tqdm(range(first_step, args.num_steps + 1))
    for step in progress:
        step_start = time.perf_counter()

        # update: one optimizer step, to which each rank contributes its share of the examples
        start = (step - 1) * args.minibatch_size
        rows = pick_rows(train_rows, start, args.minibatch_size, args.seed)
        num_tokens = sum(len(row["completion_ids"]) for row in rows)  # of all ranks
        rows = rows[RANK::WORLD_SIZE]
        batch = make_batch(rows, device)
        indices = torch.arange(len(rows), device=device)
        collected = []
        for microbatch in inner_bar(microbatches(batch, indices, args.microbatch_tokens), "examples"):
            loss, metrics = batch_loss(policy, microbatch)
            loss = loss / (num_tokens / WORLD_SIZE)  # FSDP averages over ranks
            loss.backward()
            collected.append(metrics)
        # The learning rate rises, then falls on a cosine, from its peak in the first step after the warm-up.
        warmup_steps = min(args.warmup_steps, args.num_steps // 2)
        decay = (step - 1 - warmup_steps) / max(1, args.num_steps - warmup_steps)
        factor = 0.5 * (1 + math.cos(math.pi * max(0.0, decay)))
        learning_rate = args.learning_rate * min(step / max(1, warmup_steps), factor)
        grad_norm = step_optimizer(policy, optimizer, learning_rate, args.max_grad_norm)

        # metrics, evaluation, logs, saving
        metrics = mean_metrics(collected)
        metrics["optim/grad_norm"] = grad_norm
        metrics["optim/learning_rate"] = learning_rate
        metrics["perf/step_seconds"] = time.perf_counter() - step_start
        if step % args.eval_every == 0 or step == args.num_steps:
            metrics |= evaluate(policy, eval_rows, args, device)
        log_step(args, step, metrics)
        progress.set_postfix(loss=metrics["loss/nll"])
        if step % args.save_every == 0 or step == args.num_steps:
            save(args, policy, optimizer, tokenizer, step)

    dist.destroy_process_group()


# ---- below: identical copies of what several scripts share, in the order of use
# This script's own are only load_rows, read_rows, encode_rows, find_chat, load_model, make_batch.

COMPLETIONS = ("completion", "response", "solution", "answer")  # columns: the first that there is counts
LOGITS_AT_ONCE = 2**26  # at most, tokens times vocabulary: 256 MiB
inner_bar = partial(tqdm, leave=False, delay=5)  # a progress bar that appears after five seconds


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
    if args.minibatch_size % WORLD_SIZE:
        raise SystemExit(f"--minibatch-size must be a multiple of the {WORLD_SIZE} ranks")


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
    if RANK > 0:
        max_over_ranks(0)  # wait: the first rank prepares the rows, and the others find them on the disk
    eval_rows = read_rows(held_out.select(range(min(args.eval_prompts, limit))), args, tokenizer).to_list()
    eval_prompts = [row["prompt"] for row in eval_rows]
    train_rows = read_rows(splits[train], args, tokenizer)
    train_rows = train_rows.filter(lambda prompt: prompt not in eval_prompts, input_columns="prompt")
    if RANK == 0:
        passes = round(args.num_steps * args.minibatch_size / max(1, len(train_rows)), 1)
        counts = f"{len(train_rows)} to train on, {len(eval_rows)} held out"
        print(f"{len(splits[train])} training rows; read: {counts}; {passes} passes")
        for name, ids in train_rows[0].items():
            if name.endswith("_ids"):
                print(f"the first {name.removesuffix('_ids')}: {tokenizer.decode(ids)!r}")
    if RANK == 0 and WORLD_SIZE > 1:
        max_over_ranks(0)  # the others may go on
    return train_rows, eval_rows


def max_over_ranks(number):
    """Return the largest of all ranks' integers."""
    number = torch.tensor(number)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()


def read_rows(rows, args, tokenizer):
    """Return a data set with the ids of examples, which datasets keeps on disk, so that a resumed run need not wait."""
    if {"messages", "text", *COMPLETIONS}.isdisjoint(rows.column_names):
        raise SystemExit(f"{args.dataset} has no messages, no text and no completion, but {rows.column_names}")
    settings = {"tokenizer": tokenizer, "system_prompt": args.system_prompt}
    settings |= {"max_prompt": args.max_prompt_length, "max_completion": args.max_completion_length}
    return rows.map(encode_rows, batched=True, remove_columns=rows.column_names, fn_kwargs=settings)


def encode_rows(batch, tokenizer, system_prompt, max_prompt, max_completion):
    """Return the ids of examples, one for each turn of an assistant or each text; drop long turns, and cut texts."""
    stop_id = find_turn_end(tokenizer) or tokenizer.eos_token_id
    examples = []
    for values in zip(*batch.values()):
        row = dict(zip(batch, values))
        chat = find_chat(row)
        if not chat and row.get("text"):
            ids = [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id][:max_completion]
            # Nothing comes before the first token, so it cannot be trained.
            examples.append({"prompt": row["text"], "prompt_ids": ids[:1], "completion_ids": ids[1:]})
        if system_prompt and chat and chat[0]["role"] != "system":
            chat = [{"role": "system", "content": system_prompt}, *chat]
        for place, message in enumerate(chat):
            if message["role"] == "assistant":
                prompt_ids, completion_ids = encode_chat(tokenizer, chat[: place + 1], stop_id)
                if len(prompt_ids) <= max_prompt and len(completion_ids) <= max_completion:
                    ids = {"prompt_ids": prompt_ids, "completion_ids": completion_ids}
                    examples.append({"prompt": str(chat[:place]), **ids})
    names = ("prompt", "prompt_ids", "completion_ids")
    return {name: [example[name] for example in examples] for name in names}


def find_turn_end(tokenizer):
    """Find the special token that ends a turn in the chat template; base models may have another as their eos token."""
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"}]
        tail = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("Answer")[2]
        for token in tokenizer.encode(tail, add_special_tokens=False):
            if token in tokenizer.added_tokens_decoder:
                return token
    return None


def find_chat(row):
    """Return a row's messages, or its prompt and completion as messages; none if one of them is missing."""
    if row.get("messages"):
        return row["messages"]
    prompt = next((row[name] for name in ("prompt", "question", "problem") if name in row), None)
    completion = next((row[name] for name in COMPLETIONS if name in row), None)
    if prompt is None or completion is None:
        return []
    return as_messages(prompt, "user") + as_messages(completion, "assistant")


def as_messages(value, role):
    """Return a text as a message of this role, messages as they are, and none for a missing value."""
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [{"role": role, "content": str(value)}]


def encode_chat(tokenizer, chat, stop_id):
    """Return the ids that precede the last message of a chat, and those of the message up to its stop token."""
    *prompt, completion = chat
    if tokenizer.chat_template:
        prompt_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template(chat, return_dict=False)
        completion_ids = ids[len(prompt_ids) :]
        if ids[: len(prompt_ids)] == prompt_ids and stop_id in completion_ids:
            return prompt_ids, completion_ids[: completion_ids.index(stop_id) + 1]
    else:
        prompt_ids = tokenizer("\n\n".join(message["content"] for message in prompt))["input_ids"]
    # There is no template, or it writes a prompt differently if a completion follows.
    completion_ids = tokenizer(completion["content"], add_special_tokens=False)["input_ids"]
    return prompt_ids, [*completion_ids, stop_id]


def load_policy(args, tokenizer, device):
    """Load a Policy with float32 weights, set up its precision, and share it out among the ranks."""
    model = load_model(args, tokenizer, torch.float32)
    model.get_input_embeddings().padding_idx = None  # a padding token may occur in prompts: train it, too
    return prepare(Policy(model, args.precision), args, device)


def load_model(args, tokenizer, dtype):
    """Load a language model, or make one with random weights; its generation config gets the ids of all stop tokens."""
    if args.model.endswith("config.json"):
        if RANK == 0:
            print(f"{args.model}: random weights; to fine-tune a model, name its folder, as in --model models/tiny")
        torch.manual_seed(args.seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model), dtype=dtype).eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    if model.num_parameters() < 10_000_000:
        torch.set_num_threads(1)  # on a CPU, more threads would mostly wait for each other
    stop_ids = model.generation_config.eos_token_id
    if not isinstance(stop_ids, list):
        stop_ids = [stop_ids]
    stop_ids = {*stop_ids, tokenizer.eos_token_id, find_turn_end(tokenizer)} - {None}
    model.generation_config = GenerationConfig(eos_token_id=sorted(stop_ids))
    return model


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


def make_batch(rows, device):
    """Return a batch of examples; above main is what it consists of."""
    ids = [torch.tensor(row["prompt_ids"] + row["completion_ids"]) for row in rows]
    mask = [torch.tensor([0] * len(row["prompt_ids"]) + [1] * len(row["completion_ids"])) for row in rows]
    batch = {
        "ids": pad_sequence(ids, batch_first=True),
        "completion_mask": pad_sequence(mask, batch_first=True),
        "total_lengths": torch.tensor([len(row_ids) for row_ids in ids]),
    }
    return {name: values.to(device) for name, values in batch.items()}


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


def mean_metrics(collected):
    """Add each metric's (sum, count) over microbatches and ranks, and divide. All ranks have the same names."""
    totals = {}
    for metrics in collected:
        for name, pair in metrics.items():
            totals[name] = totals.get(name, 0) + torch.tensor(pair, dtype=torch.float64)
    sums = torch.stack(list(totals.values()))
    dist.all_reduce(sums)
    return {name: total / count for name, (total, count) in zip(totals, sums.tolist()) if count > 0}


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
