"""Estimate how much memory a script needs on a GPU or a CPU, from the shape of the model.

    python tools/memory.py --model Qwen2.5-1.5B --gpu-gb 24
    python tools/memory.py --model path/to/folder --script ppo_rlhf --gradient-checkpointing --microbatch-tokens 4096
    python tools/memory.py --model models/smollm2 --script sft --microbatch-tokens 4096 --cpu-gb 8
    python tools/memory.py --model Qwen2.5-0.5B --script gkd --teacher Qwen2.5-7B --gpu-gb 48
    python tools/memory.py --model models/tiny --tiny --cpu-gb 2
    python tools/memory.py --write docs/memory.md

The tool prints the memory of each part in the rollout and in the update. With --gpu-gb or --cpu-gb, it also prints
whether the run fits. --write only updates the tables of docs/memory.md.

The tool reads no weights. The defaults of its flags are those of the script's Args or, with --tiny, those of its TINY.
A GB is 1e9 bytes. The formulas hold for models like Llama and Qwen2, and assume that all prompts and completions have
the maximum length. In bytes, for bfloat16, they are:

    B, R  parameters in the blocks, and outside them (embedding, last norm, LM head; a tied head counts once)
    V, L  vocabulary size, number of layers
    h, f  hidden size, width inside the MLP
    q, k  output sizes of the query and the key projection

    sharded, so divide by the number of GPUs
        4 (B + R)         policy
        8 (B + R)         its AdamW
        4 (B + R)         its gradients, until the last step of an update
        4 (B + R)         reference
    on every GPU
        2 (B + R)         sampler
    added by the rollout on every GPU
        4 k L             key-value cache, per token of prompt and completion
        2 k + 2 V         decoding: the keys of one layer per token, and logits per completion, or 10 V if that is more
        6 f + 10 h        reading prompts, per token of the prompts that are read at once, and their cache
    added by the update: the activations, and the largest of the temporary parts
        8 f + 26 h + 4 q + 4 k   activations of a block per token of a microbatch
        4 h                      the same with --gradient-checkpointing; one block at a time needs the row above, too
        2 B                      copies of the weights in bfloat16, on one GPU; with --gradient-checkpointing only in
                                 the forward pass
        4 R                      weights outside the blocks, gathered, if there are several GPUs
        LM head                  four chunks of 2^26 float32 numbers and a gradient of the embedding, or three of its
                                 gradients if that is more, and 16 h per token
        backward of a block      a gradient of the embedding, 4 f + 6 h per token, and 10 per parameter of the block if
                                 there are several GPUs, else 4 f h
        end of the backward      three gradients of a tied embedding

The other six scripts (OTHERS) still differ. --precision auto counts as bfloat16, and as float32 with --cpu-gb. Frozen
models take 2 B + 4 R, and so does a copy of the policy's weights in the rollout, which replaces the sampler. Hidden
states are bfloat16 (16 h, not 26 h), and there are no other copies of weights. Chunks of logits have 2^27 numbers, or
2^25 on a CPU. The cache grows in blocks of 128 tokens, and logits take up to 24 V. With adapters of rank r, there is
one frozen model, and the adapters with their AdamW and gradients take 16 r (in + out) for every linear layer of the
blocks.
"""

import argparse
import importlib
import json
import math
import os
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as in the scripts

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config

NAMES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size".split()
SHAPES = {  # as published in their config.json; the last value says whether the LM head shares the embedding
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False),
}
SMALL = {"SmolLM2-135M": (576, 1536, 30, 9, 3, 49152, True)}  # measured on a CPU
CARDS = ((1, 24), (1, 48), (1, 80), (1, 141), (2, 24), (8, 80))  # number of GPUs, GB of each
USABLE = 0.94  # of a GPU's GB; the driver reports about 1.07, but its context and gaps between tensors take the rest
OTHERS = ("grpo_tools", "gkd", "ppo_rlhf", "dpo", "reward_model", "sft")  # see above
SCRIPTS = ("grpo", "dr_grpo", "dapo", "gspo", "reinforce", "cispo", "grpo_process", *OTHERS)
SETTINGS = {  # flags that affect memory, with the value for scripts that lack the flag
    "precision": "bfloat16",
    "lora_rank": 0,
    "gradient_checkpointing": False,
    "microbatch_tokens": 4096,
    "rollout_batch_size": 0,
    "prompts_per_step": 0,
    "group_size": 1,
    "eval_prompts": 0,
    "max_prompt_length": 512,
    "max_completion_length": 1024,
    "kl_coef": 0.0,
}
LOGITS_AT_ONCE = 2**26  # as in the scripts
OTHERS_LOGITS = {"GPU": 2**27, "CPU": 2**25}
CACHE_BLOCK = 128  # of the other scripts
PROCESS = 0.7e9  # on a CPU: Python, the libraries, the data
EVAL_SAMPLES = 4  # of the other scripts
# in the table of docs/memory.md
LETTERS = {"--gradient-checkpointing": "C", "--microbatch-tokens": "M", "--rollout-batch-size": "R"}


def load_config(name):
    """Return the config of a folder or config.json, of a shape named above, or of a model on the hub."""
    known = SHAPES | SMALL
    shape = name.removeprefix("Qwen/").removeprefix("HuggingFaceTB/").removesuffix("-Instruct")
    if shape in known and not Path(name).exists():  # the hub's models of these names have these shapes
        *sizes, tied = known[shape]
        return Qwen2Config(**dict(zip(NAMES, sizes)), tie_word_embeddings=tied)
    try:
        return AutoConfig.from_pretrained(name).get_text_config()
    except (OSError, ValueError):
        shapes = f"one of the known shapes: {', '.join(known)}"
        message = f"{name}: cannot load a config of this name; give a local folder with a config.json, or {shapes}"
        raise SystemExit(message) from None


def read_settings(script, tiny=False, **given):
    """Return a script's settings: those given, else those of its TINY if tiny is set, else its own defaults."""
    module = importlib.import_module(script)
    own = {field.name: field.default for field in fields(module.Args)}
    unknown = [name for name, value in given.items() if value is not None and name in SETTINGS and name not in own]
    if unknown:
        raise SystemExit(f"{script}.py has no --{unknown[0].replace('_', '-')}")
    if script in OTHERS:
        own["precision"] = SETTINGS["precision"]  # the default on a GPU, wherever this runs
    if tiny:
        own |= module.TINY if script in OTHERS else vars(module.TINY)
    settings = SETTINGS | {name: value for name, value in own.items() if name in SETTINGS}
    settings |= {name: value for name, value in given.items() if value is not None}
    return SimpleNamespace(script=script, cpu=False, teacher=None, **settings)


def count_model(config, kind=AutoModelForCausalLM):
    """Return the sizes in the formulas below, and the numbers of parameters inside and outside the blocks."""
    with torch.device("meta"):
        model = kind.from_config(config)
    blocks = [block for block in model.modules() if type(block).__name__ in model._no_split_modules]
    linears = [layer for layer in blocks[0].modules() if isinstance(layer, nn.Linear)]
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    in_blocks = sum(weight.numel() for block in blocks for weight in block.parameters())
    return SimpleNamespace(
        layers=len(blocks),
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=heads,
        queries=heads * head_dim,
        keys=config.num_key_value_heads * head_dim,
        blocks=in_blocks,
        root=sum(weight.numel() for weight in model.parameters()) - in_blocks,
        embedding=config.vocab_size * config.hidden_size,
        vocab=config.vocab_size,
        adapters=len(blocks) * sum(layer.in_features + layer.out_features for layer in linears),  # of rank 1
    )


def count_models(config, script):
    """Return {name: sizes} of the models that a script trains. PPO also trains a value model."""
    scorer = AutoModelForSequenceClassification
    if script == "reward_model":
        return {"reward model": count_model(config, scorer)}
    models = {"policy": count_model(config)}
    return models | ({"value model": count_model(config, scorer)} if script == "ppo_rlhf" else {})


def weight_bytes(models, settings, ranks):
    """Return {part: bytes} of what stays in memory, and the bytes of the gradients, which only the update has."""
    inside = 2 if settings.precision == "bfloat16" else 4
    rows, gradients = {}, 0
    for name, model in models.items():
        total, frozen = model.blocks + model.root, inside * model.blocks + 4 * model.root
        if settings.script not in OTHERS:
            frozen = 4 * total
        trained = settings.lora_rank * model.adapters or total
        rows[name] = (frozen if settings.lora_rank else 4 * total) / ranks
        if settings.lora_rank:
            rows[f"{name}: adapters"] = 4 * trained / ranks
        rows[f"{name}: AdamW"] = 8 * trained / ranks
        gradients += 4 * trained / ranks
        if name == "policy" and settings.kl_coef and not settings.lora_rank:
            rows["reference"] = frozen / ranks
        if settings.script not in OTHERS:
            rows["sampler"] = inside * total
        if name == "value model":
            rows["reward model"] = frozen / ranks
    if settings.teacher:  # its head stays gathered
        rows["teacher"] = (inside * settings.teacher.blocks + 4 * settings.teacher.root) / ranks
        rows["teacher"] += 4 * settings.teacher.root if ranks > 1 else 0
    return rows, gradients


def is_sharded(settings, ranks):
    """Return whether FSDP wraps the policy's weights. In OTHERS it does on one GPU, too, to compute in bfloat16."""
    return ranks > 1 or (settings.script in OTHERS and settings.precision == "bfloat16" and not settings.lora_rank)


def gathered_bytes(model, settings, ranks):
    """Return the bytes, on every rank, of the policy's weights as OTHERS gather them for a rollout."""
    inside = 2 if settings.precision == "bfloat16" else 4
    whole = inside * model.blocks + 4 * model.root if is_sharded(settings, ranks) else 0
    adapters = inside * settings.lora_rank * model.adapters if settings.precision == "bfloat16" or ranks > 1 else 0
    return whole + adapters


def kept_per_token(model, settings):
    """Return the bytes per token that a block keeps for its backward pass, and the temporary ones of that pass."""
    size, rank = (2 if settings.precision == "bfloat16" else 4), settings.lora_rank
    mlp = 4 * size * model.inner  # gate, its SiLU, up, their product
    attention = size * (2 * model.queries + 2 * model.keys) + 4 * model.heads  # query, key, value, output; log-sum
    # Each norm keeps its input in float32, its output, and if its weight is trained, the normalised input.
    norms = 2 * (4 * model.hidden + size * (1 if rank else 2) * model.hidden + 4)
    if settings.script not in OTHERS and settings.precision == "bfloat16":
        # The normalised input is float32, too, and each of five linear layers has its own bfloat16 copy of the output.
        norms = 2 * (8 * model.hidden + 4) + 5 * size * model.hidden
    thin = 7 * size * rank
    return mlp + attention + norms + thin, size * (2 * model.inner + model.hidden)


def copied_bytes(model, settings, ranks):
    """Return the bytes of the bfloat16 copies that torch.autocast makes of the policy's weights."""
    is_autocast = settings.script not in OTHERS and settings.precision == "bfloat16" and ranks == 1
    return 2 * model.blocks * is_autocast


def update_bytes(models, settings, ranks):
    """Return the bytes of activations that a microbatch keeps, and the most bytes of temporary tensors."""
    row = settings.max_prompt_length + settings.max_completion_length
    tokens = max(settings.microbatch_tokens, 2 * row if settings.script == "dpo" else row)
    size, kept, work = (2 if settings.precision == "bfloat16" else 4), 0, []
    is_other, sharded = settings.script in OTHERS, is_sharded(settings, ranks)
    gathered = sum(4 * model.root for model in models.values()) if sharded else 0
    for name, model in models.items():
        whole, more = kept_per_token(model, settings)
        inputs = 4 * model.hidden * (model.layers - 1) + size * model.hidden  # of blocks; the first has the embedding's
        kept += tokens * (inputs if settings.gradient_checkpointing else model.layers * whole)
        gradient = 0 if settings.lora_rank else 4 * model.embedding
        # A chunk of logits, its softmax, and the temporary tensors of the entropy.
        vocab, chunks = model.vocab, 4
        if settings.teacher:  # the logits of both models, and the temporary tensors of their divergence
            vocab, chunks = vocab + settings.teacher.vocab, 6
        at_once = OTHERS_LOGITS["CPU" if settings.cpu else "GPU"] if is_other else LOGITS_AT_ONCE
        chunk = 4 * min(at_once, tokens * vocab)
        if is_other:
            head = gradient + max(gradient + (chunks - 1) * chunk, chunks * chunk) if name == "policy" else gradient
        elif tokens * vocab > at_once:  # the gradient of the chunks before, that of this chunk, and their sum
            head = max(gradient + chunks * chunk, 3 * gradient)
        else:
            head = max(chunks * chunk, gradient + chunk)
        work.append(gathered + head + 16 * tokens * model.hidden)
        copied = copied_bytes(model, settings, ranks) if settings.gradient_checkpointing else 0
        if is_other:
            # The block's weights and gradients in the dtype that it computes in, and the gradients in float32.
            block = (2 * size + 4) * model.blocks / model.layers if sharded else 0
        elif sharded:  # and the weights of the next block
            block = (3 * size + 4) * model.blocks / model.layers
        else:  # a gradient of the MLP
            block = 4 * model.inner * model.hidden + copied / model.layers
        again = whole if settings.gradient_checkpointing else 0
        work.append(gathered + gradient + block + tokens * (again + more + 4 * model.hidden))
        if is_other:
            # Gradients outside the blocks: as computed and as sent between ranks, or as sent and as received.
            work.append(0 if settings.lora_rank else 2 * gathered)
        else:
            # The same at the end, when activations are gone. A tied embedding has two gradients, and then their sum.
            is_tied = model.root < 2 * model.embedding
            work.append(max(2 * gathered, gathered + (3 if is_tied else 1) * gradient) - kept)
            work.append(copied + tokens * (2 * more + 8 * model.hidden))  # the end of the forward pass
    return kept, max(work)


def rollout_bytes(model, settings, ranks):
    """Return the bytes of the key-value cache of the rows decoded at once, and the most bytes of temporary tensors."""
    size, is_other = (2 if settings.precision == "bfloat16" else 4), settings.script in OTHERS
    prompts, held_out = settings.prompts_per_step // ranks, settings.eval_prompts // ranks
    cap = settings.rollout_batch_size or prompts * settings.group_size
    rows = min(cap, max(prompts * settings.group_size, held_out * (EVAL_SAMPLES if is_other else 1)))
    block = CACHE_BLOCK if is_other else 1
    width = settings.max_prompt_length + math.ceil(settings.max_completion_length / block) * block
    cache = 2 * size * model.keys * model.layers * rows * width
    logits = rows * model.vocab
    read = settings.max_prompt_length * max(min(cap // settings.group_size, prompts), min(cap, held_out))
    if is_other:
        # The keys of a layer are copied to make room for a block of tokens. To draw a token, sampling holds the logits,
        # the probabilities, and the probabilities and their sums in float64.
        decoding = max(cache / model.layers / 2 + 4 * logits, 24 * logits)
        decoding += 6 * 8 * rows * width  # ids, masks and positions
        prefill = read * (3 * size * model.inner + (size + 8) * model.hidden)
    else:
        # The keys of a layer are copied to add a token. To draw it, sampling holds the logits, and in float32 their
        # quotient by the temperature and the probabilities.
        decoding = max(cache / model.layers / 2 + size * logits, (size + 8) * logits)
        in_cache = 2 * size * model.keys * model.layers
        prefill = read * (3 * size * model.inner + (4 * size + 2) * model.hidden + in_cache)
    return cache, max(decoding, prefill - cache)


def account(config, settings, ranks=1, models=None):
    """Return rows (part, bytes in the rollout, bytes in the update). The last row is their sum, the peak."""
    models = models or count_models(config, settings.script)
    weights, gradients = weight_bytes(models, settings, ranks)
    rows = [("process", PROCESS, PROCESS)] if settings.cpu else []
    rows += [(name, bytes_, bytes_) for name, bytes_ in weights.items()]
    rows.append(("gradients", 0, gradients))
    if settings.prompts_per_step:
        cache, decoding = rollout_bytes(models["policy"], settings, ranks)
        if settings.script in OTHERS:
            rows += [("copy of the weights", gathered_bytes(models["policy"], settings, ranks), 0)]
        rows += [("key-value cache", cache, 0), ("decoding", decoding, 0)]
    kept, work = update_bytes(models, settings, ranks)
    copied = sum(copied_bytes(model, settings, ranks) for model in models.values())
    if copied and not settings.gradient_checkpointing:
        rows.append(("bfloat16 copies of the weights", 0, copied))
    rows += [("activations kept", 0, kept), ("temporary tensors of one layer or the LM head", 0, work)]
    if not settings.prompts_per_step:
        rows = [(name, 0, update) for name, _, update in rows]
    return [*rows, ("peak", sum(row[1] for row in rows), sum(row[2] for row in rows))]


def find_fit(config, settings, gpu_gb, ranks=1, models=None):
    """Return the first settings that fit, or None: with all weights trained, or else (in OTHERS) with adapters."""
    models = models or count_models(config, settings.script)
    regimes = [{}] + [{"lora_rank": 8}] * (settings.script in OTHERS and not settings.lora_rank)
    updates = [{}] + [{"gradient_checkpointing": True}] * (not settings.gradient_checkpointing)
    updates += [updates[-1] | {"microbatch_tokens": n} for n in (4096, 2048) if n < settings.microbatch_tokens]
    largest = settings.rollout_batch_size or settings.prompts_per_step * settings.group_size // ranks
    rollouts = [{}] + [{"rollout_batch_size": n} for n in (256, 128, 64, 32) if n < largest]
    for regime in regimes:
        found = {}
        for column, steps in ((1, rollouts if settings.prompts_per_step else [{}]), (2, updates)):
            for step in steps:
                tried = SimpleNamespace(**vars(settings) | regime | step)
                if account(config, tried, ranks, models)[-1][column] <= USABLE * gpu_gb * 1e9:
                    found[column] = step
                    break
        if len(found) == 2:
            return SimpleNamespace(**vars(settings) | regime | found[1] | found[2])
    return None


def as_flags(settings, before):
    """Return the flags that turn the settings `before` into `settings`."""
    changed = {name: value for name, value in vars(settings).items() if value != getattr(before, name)}
    order = ("lora_rank", "gradient_checkpointing", "microbatch_tokens", "rollout_batch_size")
    words = [(name, "" if changed[name] is True else f" {changed[name]:g}") for name in order if name in changed]
    return " ".join(f"--{name.replace('_', '-')}{value}" for name, value in words) or "defaults"


def table(header, rows, space=""):
    """Return a Markdown table, with this space around each cell."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"|{space}{f'{space}|{space}'.join(map(str, line))}{space}|" for line in lines)


def in_gb(bytes_):
    return f"{bytes_ / 1e9:.1f}" if bytes_ else ""


def parts_table(script, **settings):
    """Return a table of the parts of all shapes. Parts that only the rollout or only the update has are labelled so."""
    columns, parts = [], {}
    for name in SHAPES:
        rows = account(load_config(name), read_settings(script, **settings))
        *inner, (_, rollout, update) = rows
        columns.append({part: max(first, second) for part, first, second in inner})
        columns[-1] |= {"**peak of the rollout**": rollout, "**peak of the update**": update}
        parts |= dict.fromkeys(columns[-1], "")
        parts |= {part: " (rollout)" if first else " (update)" for part, first, second in inner if first != second}
    rows = [[f"{part}{phase}", *(in_gb(column[part]) for column in columns)] for part, phase in parts.items()]
    return table(["GB", *SHAPES], rows)


def as_letters(flags):
    """Return flags with a letter in place of each name."""
    for flag, letter in LETTERS.items():
        flags = flags.replace(flag, letter)
    return flags


def flags_table(script):
    """Return a table of the flags to add to a script, as letters, by shape and GPUs."""
    settings, rows = read_settings(script), []
    for name in SHAPES:
        config = load_config(name)
        models = count_models(config, script)
        fits = [find_fit(config, settings, gb, ranks, models) for ranks, gb in CARDS]
        rows.append([name, *(as_letters(as_flags(fit, settings)) if fit else "no" for fit in fits)])
    return table(["", *(f"{ranks} x {gb} GB" if ranks > 1 else f"{gb} GB" for ranks, gb in CARDS)], rows)


def read_measured():
    """Yield (settings, bytes by the formulas, measured row) of benchmark/memory_cpu.py."""
    config, path = load_config(*SMALL), Path(__file__).resolve().parents[1] / "benchmark/results/memory_cpu.json"
    for row in json.loads(path.read_text()):
        settings = read_settings("grpo", **row["settings"])
        settings.cpu = True
        yield settings, max(account(config, settings)[-1][1:]), row


def measured_table():
    """Return a table of the formulas and the measurements of benchmark/memory_cpu.py."""
    names, rows = ("microbatch_tokens", "gradient_checkpointing"), []
    for settings, formula, row in read_measured():
        flags = [f"--{name.replace('_', '-')} {getattr(settings, name)}" for name in names if getattr(settings, name)]
        measured = [in_gb(row[kind]) for kind in ("bytes", "bytes_given_back")]
        rows.append([settings.precision, f"`{' '.join(flags).replace(' True', '')}`", in_gb(formula), *measured])
    header = ["precision", "flags", "formula, GB", "measured, GB"]
    return table([*header, "measured with `MALLOC_MMAP_THRESHOLD_`, GB"], rows)


def write_page(path):
    """Write the tables into docs/memory.md, each between the comment with its name and the next comment."""
    tables = {"flags": flags_table("grpo"), "parts of grpo": parts_table("grpo")}
    tables["measured on a CPU"] = measured_table()
    text = Path(path).read_text()
    for name, lines in tables.items():
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", rf"\1\n{lines}\n\n\2", text, flags=re.DOTALL)
    Path(path).write_text(text)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(SHAPES | SMALL)
    parser.add_argument("--model", default="Qwen2.5-0.5B", help=f"{names}, a folder or a hub name (default: the first)")
    parser.add_argument("--script", default="grpo", choices=SCRIPTS, help="name of the script (default: grpo)")
    parser.add_argument("--teacher", help="the same for the teacher of gkd (default: a model of the student's shape)")
    parser.add_argument("--tiny", action="store_true", help="use the script's settings for the bundled model")
    parser.add_argument(
        "--ranks", type=int, default=1, help="number of GPUs over which torchrun shards the model (default: 1)"
    )
    parser.add_argument(
        "--gpu-gb", type=float, help="memory of a GPU: print whether the run fits, and if not, which flags help"
    )
    parser.add_argument("--cpu-gb", type=float, help="memory of a machine without a GPU: print the same")
    parser.add_argument("--write", metavar="PAGE", help="only write the tables of docs/memory.md")
    for name, value in SETTINGS.items():
        flag = f"--{name.replace('_', '-')}"
        if value is False:
            parser.add_argument(flag, action="store_true", default=None, help="as in the script")
        else:
            parser.add_argument(flag, type=type(value), help="as in the script (default: the script's)")
    return parser.parse_args()


def main(args):
    if args.write:
        return write_page(args.write)
    config = load_config(args.model)
    given = {name: getattr(args, name) for name in SETTINGS}
    if args.cpu_gb and args.script in OTHERS:
        given["precision"] = given["precision"] or "float32"  # which takes more memory than bfloat16
    settings = read_settings(args.script, args.tiny, **given)
    settings.cpu = args.cpu_gb is not None
    models = count_models(config, args.script)
    if args.script == "gkd":
        settings.teacher = count_model(load_config(args.teacher or args.model))
    for name, model in models.items():
        print(f"{name}: {model.blocks / 1e6:.1f} M parameters in its blocks, {model.root / 1e6:.1f} M outside them")
    rows = account(config, settings, args.ranks, models)
    cells = [[name, in_gb(first), in_gb(second)] for name, first, second in rows]
    print(table(["GB", "rollout", "update"], cells, space=" "))
    if gb := args.cpu_gb or args.gpu_gb:
        peak, fit = max(rows[-1][1:]), find_fit(config, settings, gb, args.ranks, models)
        answer = "fits" if peak <= USABLE * gb * 1e9 else "does not fit"
        other = "shorter completions" if settings.cpu else "more GPUs, or shorter completions"
        remedy = f"this would fit: {as_flags(fit, settings)}" if fit else f"no flags of this script help: use {other}"
        print(f"{answer} in {gb:g} GB" + ("" if answer == "fits" else f"; {remedy}"))
    whole, *others = [model.blocks + model.root for model in models.values()]  # a checkpoint has only the first model
    state = 12 * (whole + sum(others))
    if settings.lora_rank:  # the frozen weights, in the precision in which they compute
        state = sum((2 if settings.precision == "bfloat16" else 4) * m.blocks + 4 * m.root for m in models.values())
    print(f"host memory at the start: {in_gb(4 * whole * args.ranks)} GB, because each rank reads the whole model")
    saving = 4 * whole + state + max(4 * whole, state)  # a second checkpoint, and then a second state
    if args.script not in OTHERS:
        saving = 2 * (4 * whole + state)  # both are written before the older ones are removed
    print(f"disk: {in_gb(4 * whole + state)} GB per run, {in_gb(saving)} GB while it saves")


if __name__ == "__main__":
    main(parse_args())
