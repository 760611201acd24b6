"""DPO: Direct Preference Optimization.

Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model" (2023)
https://arxiv.org/abs/2305.18290v3, equation 7.

    L(θ) = −E log σ(β h),   h = log π_θ(y_w|x)/π_ref(y_w|x) − log π_θ(y_l|x)/π_ref(y_l|x)

    x, y_w, y_l   prompt, and the completion that was preferred (chosen) and the one that was not (rejected)
    log π(y|x)    summed over the tokens of a completion, the stop token included
    π_ref         the model that training started from
    β             --beta; β log π_θ(y|x)/π_ref(y|x) is the reward that the policy implies

Departure from the paper: AdamW (betas 0.9 and 0.95, no weight decay) instead of RMSprop.

    python dpo.py                                          # the settings TINY below
    python dpo.py --model Qwen/Qwen2.5-0.5B-Instruct       # those of Args, on 24 GB
"""

import json
import os
import re
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
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.integrations import sdpa_attention

RANK = int(os.environ.get("RANK", 0))  # torchrun sets these
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
HERE = Path(__file__).resolve().parent


@dataclass
class Args:
    """Train a language model with DPO, Direct Preference Optimization."""

    # the algorithm
    beta: float = 0.1
    """beta of eq. 7: how strongly the policy is held near the reference (0.1 and 0.5 in appendix B)"""
    label_smoothing: float = 0.0
    """probability, below 0.5, that chosen and rejected are swapped in the data (cDPO, Mitchell 2023); 0 in the paper"""

    # model and data
    model: str = ""
    """folder or Hugging Face name of a causal language model (empty: the bundled model with its settings TINY)"""
    tiny: bool = False
    """use the settings TINY with --model, for checkpoints of the bundled model"""
    dataset: str = "trl-lib/ultrafeedback_binarized"
    """file, folder or Hugging Face NAME[:CONFIG[:SPLIT]] with the columns chosen and rejected, and perhaps prompt"""
    system_prompt: str = ""
    """system message before every prompt that has none"""
    max_prompt_length: int = 512
    """maximum tokens per prompt; pairs with a longer one are dropped"""
    max_completion_length: int = 512
    """maximum tokens per completion, including the stop token; pairs with a longer one are dropped"""

    # optimization
    num_steps: int = 1000
    """optimizer steps"""
    learning_rate: float = 5e-7
    """learning rate of AdamW (the paper has 1e-6); small models need a higher one: 1e-5 for 135 M parameters"""
    warmup_steps: int = 150
    """steps over which the learning rate rises from 0 (150 in the paper); at most half of the run"""
    minibatch_size: int = 64
    """pairs per optimizer step, over all ranks"""
    microbatch_tokens: int = 4096
    """maximum tokens per forward pass, including padding"""
    max_grad_norm: float = 10.0
    """larger gradients are scaled down to this norm (10 in the authors' code); 0 leaves them as they are"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: saves memory, but the update takes about a third longer"""
    cpu_offload: bool = False
    """keep weights, gradients and AdamW's state in the host's memory: fits larger models, but is slower"""
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """precision of matrix products (float32 on GPUs before Ampere, such as T4 and V100); weights are float32"""

    # evaluation, saving, logging
    eval_every: int = 100
    """steps between evaluations"""
    eval_prompts: int = 512
    """held-out pairs per evaluation"""
    save_every: int = 100
    """steps between saves"""
    run_dir: str = ""
    """new folder for logs and checkpoints (empty: runs/SCRIPT__SEED__TIME, or that of --resume)"""
    resume: str = ""
    """folder of a run to continue; its settings become the defaults"""
    seed: int = 1
    """seed of the order of pairs"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline works)"""


# The settings of the bundled model, which adds numbers.
TINY = Args(
    model=f"{HERE}/models/tiny",
    dataset=f"{HERE}/data/preferences",
    beta=0.5,
    learning_rate=1e-4,
    warmup_steps=8,
    num_steps=64,
    microbatch_tokens=2048,
    max_prompt_length=32,
    max_completion_length=48,
    eval_every=32,
    save_every=32,
    precision="float32",
)


def preference_loss(
    chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs, beta, label_smoothing
):
    """Return eq. 7 summed over pairs (the caller divides by their number) of log-probabilities (B,), and metrics."""
    chosen_log_ratios = chosen_logprobs - ref_chosen_logprobs.detach()  # (B,)
    rejected_log_ratios = rejected_logprobs - ref_rejected_logprobs.detach()
    margins = beta * (chosen_log_ratios - rejected_log_ratios)
    losses = -(1 - label_smoothing) * nn.functional.logsigmoid(margins)
    losses = losses - label_smoothing * nn.functional.logsigmoid(-margins)
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
    return losses.sum(), metrics


# A batch is a dictionary of tensors with a row for each of B pairs:
#   chosen_ids, rejected_ids     (B, L)  a prompt, one of its completions and padding
#   chosen_mask, rejected_mask   (B, L)  1 at the completion's tokens, 0 elsewhere
#   total_lengths                (B,)    length of the longer of both, with the prompt


def pair_logprobs(policy, batch):
    """Return the log-probabilities (B,) of the chosen and of the rejected completions, summed over their tokens."""
    ids = torch.cat([batch["chosen_ids"], batch["rejected_ids"]])  # (2B, L)
    mask = torch.cat([batch["chosen_mask"], batch["rejected_mask"]])
    logprobs, _ = policy(ids, mask, 1.0)
    return logprobs.sum(1).chunk(2)


def pair_loss(policy, ref, batch, args):
    """Return preference_loss of a batch, and its metrics."""
    chosen, rejected = pair_logprobs(policy, batch)
    with torch.no_grad():
        ref_chosen, ref_rejected = pair_logprobs(ref, batch)
    pairs = batch["chosen_mask"].any(1)  # microbatches adds rows without tokens, which are no pairs
    logprobs = [side[pairs] for side in (chosen, rejected, ref_chosen, ref_rejected)]
    return preference_loss(*logprobs, args.beta, args.label_smoothing)


@torch.no_grad()
def evaluate(policy, ref, rows, args, device):
    """Return the mean loss of held-out pairs, and its metrics; nothing if no pairs are held out."""
    if not rows:
        return {}
    rows = rows[RANK::WORLD_SIZE] or rows[:1]  # all ranks must reduce the same metrics
    batch = make_batch(rows, device)
    indices = torch.arange(len(rows), device=device)
    collected = []
    for microbatch in inner_bar(microbatches(batch, indices, args.microbatch_tokens // 2), "pairs"):
        _, metrics = pair_loss(policy, ref, microbatch, args)
        metrics["pair/loss"] = metrics.pop("loss/preference")
        collected.append(metrics)
    return {f"eval/{name.replace('/', '_')}": value for name, value in mean_metrics(collected).items()}


def main(args):
    device = init_ranks()
    check_args(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train_rows, eval_rows = load_rows(args, tokenizer)
    policy = load_policy(args, tokenizer, device)
    ref = load_policy(args, tokenizer, device).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, (0.9, 0.95), weight_decay=0.0, fused=True)
    open_run(args, device)
    first_step = load_state(args, policy, optimizer) + 1
    if first_step == 1:
        log_step(args, 0, evaluate(policy, ref, eval_rows, args, device))

    progress = tqdm(range(first_step, args.num_steps + 1))
    for step in progress:
        step_start = time.perf_counter()

        # update: one optimizer step, to which each rank contributes its share of the pairs
        rows = pick_rows(train_rows, (step - 1) * args.minibatch_size, args.minibatch_size, args.seed)[RANK::WORLD_SIZE]
        batch = make_batch(rows, device)
        indices = torch.arange(len(rows), device=device)
        collected = []
        for microbatch in inner_bar(microbatches(batch, indices, args.microbatch_tokens // 2), "pairs"):
            loss, metrics = pair_loss(policy, ref, microbatch, args)
            loss = loss / len(rows)  # FSDP averages over ranks
            loss.backward()
            collected.append(metrics)
        learning_rate = args.learning_rate * min(1.0, step / max(1, min(args.warmup_steps, args.num_steps // 2)))
        grad_norm = step_optimizer(policy, optimizer, learning_rate, args.max_grad_norm)

        # metrics, evaluation, logs, saving
        metrics = mean_metrics(collected)
        metrics["optim/grad_norm"] = grad_norm
        metrics["optim/learning_rate"] = learning_rate
        metrics["perf/step_seconds"] = time.perf_counter() - step_start
        if step % args.eval_every == 0 or step == args.num_steps:
            metrics |= evaluate(policy, ref, eval_rows, args, device)
        log_step(args, step, metrics)
        progress.set_postfix(accuracy=metrics["pair/accuracy"])
        if step % args.save_every == 0 or step == args.num_steps:
            save(args, policy, optimizer, tokenizer, step)

    dist.destroy_process_group()


# ---- below: identical copies of what several scripts share, in the order of use

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
    eval_rows = read_rows(held_out.select(range(min(args.eval_prompts, limit))), args, tokenizer)
    eval_prompts = [row["prompt"] for row in eval_rows]
    train_rows = [row for row in read_rows(splits[train], args, tokenizer) if row["prompt"] not in eval_prompts]
    if RANK == 0:
        passes = round(args.num_steps * args.minibatch_size / max(1, len(train_rows)), 1)
        print(f"{len(train_rows)} to train on, {len(eval_rows)} held out (with their prompts); {passes} passes")
        for name in ("prompt", "chosen", "rejected"):
            print(f"the first {name}: {tokenizer.decode(train_rows[0][name + '_ids'])!r}")
    return train_rows, eval_rows


def read_rows(rows, args, tokenizer):
    """Return the ids of pairs; drop those with a long text, and those whose completions have different prompts."""
    stop_id = find_turn_end(tokenizer) or tokenizer.eos_token_id
    prompt_column = next((name for name in ("prompt", "question", "problem") if name in rows.column_names), None)
    kept, num_long = [], 0
    for row in inner_bar(rows, "rows"):
        chosen = find_chat(row.get(prompt_column), row["chosen"], tokenizer)
        rejected = find_chat(row.get(prompt_column), row["rejected"], tokenizer)
        prompt = chosen[:-1]
        if not prompt or rejected[:-1] != prompt:
            continue
        system = []
        if args.system_prompt and prompt[0]["role"] != "system":
            system = [{"role": "system", "content": args.system_prompt}]
        prompt_ids, chosen_ids = encode_chat(tokenizer, system + chosen, stop_id)
        _, rejected_ids = encode_chat(tokenizer, system + rejected, stop_id)
        longest = max(len(chosen_ids), len(rejected_ids))
        if len(prompt_ids) > args.max_prompt_length or longest > args.max_completion_length:
            num_long += 1
            continue
        kept.append(dict(prompt=prompt, prompt_ids=prompt_ids, chosen_ids=chosen_ids, rejected_ids=rejected_ids))
    if RANK == 0:
        print(f"read: {len(kept)} of {len(rows)} pairs; {num_long} are too long, any others have no common prompt")
    return kept


def find_turn_end(tokenizer):
    """Find the special token that ends a turn in the chat template; base models may have another as their eos token."""
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"}]
        tail = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("Answer")[2]
        for token in tokenizer.encode(tail, add_special_tokens=False):
            if token in tokenizer.added_tokens_decoder:
                return token
    return None


def find_chat(prompt, completion, tokenizer):
    """Return the messages of a side of a pair: a completion of the prompt, a whole chat, or a dialogue of hh-rlhf."""
    if prompt is None and isinstance(completion, str):
        return parse_dialogue(completion, tokenizer)
    chat = as_messages(completion, "assistant")
    if chat and chat[0]["role"] == "assistant":
        return as_messages(prompt, "user") + chat
    return chat


def parse_dialogue(text, tokenizer):
    r"""Turn a text such as "\n\nHuman: Hi\n\nAssistant: Hello" into messages."""
    if not tokenizer.chat_template:  # then the model reads the dialogue as it stands
        prompt, mark, completion = text.rpartition("\n\nAssistant:")
        return as_messages(prompt + mark, "user") + as_messages(completion, "assistant")
    roles = {"Human": "user", "Assistant": "assistant"}
    _, *parts = re.split(r"\n\n(Human|Assistant):", text)  # speaker, text, speaker, text, ...
    return [{"role": roles[who], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2])]


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


def make_batch(rows, device):
    """Return a batch of pairs; above main is what it consists of."""
    ids, mask = [], []
    for name in ("chosen_ids", "rejected_ids"):
        for row in rows:
            ids.append(torch.tensor(row["prompt_ids"] + row[name]))
            mask.append(torch.tensor([0] * len(row["prompt_ids"]) + [1] * len(row[name])))
    total_lengths = torch.tensor([len(row_ids) for row_ids in ids])  # (2B,), all chosen ones first
    batch = {"total_lengths": total_lengths.view(2, -1).amax(0)}
    batch["chosen_ids"], batch["rejected_ids"] = pad_sequence(ids, batch_first=True).chunk(2)
    batch["chosen_mask"], batch["rejected_mask"] = pad_sequence(mask, batch_first=True).chunk(2)
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
