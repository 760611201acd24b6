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
the maximum length.
"""

import argparse
import importlib
import os
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as in the scripts

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config

NAMES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size".split()
SHAPES = {  # as published in their config.json; the last value says whether the LM head is tied to the embedding
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False),
}
SMALL = {"SmolLM2-135M": (576, 1536, 30, 9, 3, 49152, True)}  # measured on a CPU
CARDS = ((1, 24), (1, 48), (1, 80), (1, 141), (2, 24), (8, 80))  # number of GPUs, GB of each
USABLE = 0.94  # of a GPU's GB; the driver reports about 1.07, but its context and gaps between tensors take the rest
SCRIPTS = "grpo dr_grpo dapo gspo reinforce cispo grpo_process grpo_tools gkd ppo_rlhf dpo reward_model sft".split()
SETTINGS = {  # flags that affect memory, with the value for scripts that lack the flag
    "precision": "bfloat16",
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
NORM_SAMPLES = 512  # as in ppo_rlhf.py
PROCESS = 0.7e9  # on a CPU: Python, the libraries, the data


def load_config(name):
    """Return the config of a folder or config.json, of a shape named above, or of a model on the hub."""
    shape = name.removeprefix("Qwen/").removeprefix("HuggingFaceTB/").removesuffix("-Instruct")
    if shape in SHAPES | SMALL and not Path(name).exists():  # the hub's models of these names have these shapes
        *sizes, tied = (SHAPES | SMALL)[shape]
        return Qwen2Config(**dict(zip(NAMES, sizes)), tie_word_embeddings=tied)
    return AutoConfig.from_pretrained(name).get_text_config()


def read_settings(script, tiny=False, **given):
    """Return a script's settings: those given, else those of its TINY if tiny is set, else its own defaults."""
    module = importlib.import_module(script)
    own = {field.name: field.default for field in fields(module.Args)}
    given = {name: value for name, value in given.items() if value is not None}
    unknown = [name for name in given if name in SETTINGS and name not in own]
    if unknown:
        raise SystemExit(f"{script}.py has no --{unknown[0].replace('_', '-')}")
    if tiny:
        own = vars(module.TINY)
    own = {name: value for name, value in own.items() if name in SETTINGS}
    return SimpleNamespace(script=script, cpu=False, teacher=None, **SETTINGS | own | given)


def count_model(config, kind=AutoModelForCausalLM):
    """Return the numbers of parameters in the blocks and outside them (root), and the sizes that activations have."""
    config.num_labels = 1  # of a model with a scalar head
    with torch.device("meta"):
        model = kind.from_config(config)
    blocks = [block for block in model.modules() if type(block).__name__ in model._no_split_modules]
    in_blocks = sum(weight.numel() for block in blocks for weight in block.parameters())
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return SimpleNamespace(
        blocks=in_blocks,
        root=sum(weight.numel() for weight in model.parameters()) - in_blocks,  # a tied head counts once
        layers=len(blocks),
        hidden=config.hidden_size,
        inner=config.intermediate_size,  # inside the MLP
        heads=heads,
        queries=heads * head_dim,
        keys=config.num_key_value_heads * head_dim,
        vocab=config.vocab_size,
        embedding=config.vocab_size * config.hidden_size,
        tied=config.tie_word_embeddings,
    )


def count_models(config, script):
    """Return {name: sizes} of the models that a script trains. The update needs the most memory for the first."""
    if script == "reward_model":
        return {"reward model": count_model(config, AutoModelForSequenceClassification)}
    models = {"policy": count_model(config)}
    if script == "ppo_rlhf":
        models["value model"] = count_model(config, AutoModelForSequenceClassification)
    return models


def number_size(settings):
    """Return the bytes of a number in the precision of matrix products."""
    return 2 if settings.precision == "bfloat16" else 4


def weight_bytes(models, settings, ranks):
    """Return {part: bytes} of what stays in memory, and the bytes of the gradients, which only the update has."""
    rows, gradients = {}, 0
    for name, model in models.items():
        weights = 4 * (model.blocks + model.root) / ranks
        rows[name] = weights
        rows[f"{name}: AdamW"] = 2 * weights
        gradients += weights
        if name == "policy" and (settings.kl_coef or settings.script == "dpo"):
            rows["reference"] = weights
        if name == "policy" and settings.prompts_per_step:
            rows["sampler"] = number_size(settings) * (model.blocks + model.root)
        if name == "value model":
            rows["reward model"] = weights
    if settings.script == "gkd":
        teacher = settings.teacher or models["policy"]
        root = number_size(settings) * (teacher.root - (0 if teacher.tied else teacher.embedding))
        root += 4 * teacher.embedding  # the head, in float32
        rows["teacher"] = (number_size(settings) * teacher.blocks + root) / ranks + (root if ranks > 1 else 0)
    return rows, gradients


def block_bytes(model, settings):
    """Return the bytes per token that a block keeps for its backward pass, and the temporary ones of that pass."""
    size = number_size(settings)
    mlp = 4 * size * model.inner  # gate, its SiLU, up, their product
    attention = size * (2 * model.queries + 2 * model.keys) + 4 * model.heads  # query, key, value, output; log-sum
    norms = 2 * (12 * model.hidden + 4)  # each one's input, the normalised input, the output; a number per token
    if size == 2:  # in place of each output, its copies in bfloat16 for the five linear layers that read it
        norms = 2 * (8 * model.hidden + 4) + 10 * model.hidden
    return mlp + attention + norms, size * (2 * model.inner + model.hidden)


def head_bytes(model, settings, tokens):
    """Return the most bytes of temporary tensors in the backward pass of the LM head."""
    at_once, chunks = LOGITS_AT_ONCE, 4  # logits, their softmax, temporary tensors of the entropy
    if settings.script == "gkd":  # half as many logits of each model; this is for --divergence jsd, others have fewer
        at_once, chunks = LOGITS_AT_ONCE // 2, 11
    chunk = 4 * min(at_once, tokens * model.vocab)
    gradient = 4 * model.embedding
    most = max(chunks * chunk, gradient + chunk)
    if tokens * model.vocab > at_once:  # the gradient of the chunks before, that of this chunk, and their sum
        most = max(gradient + chunks * chunk, 3 * gradient)
    return most + 16 * tokens * model.hidden


def update_bytes(model, settings, ranks):
    """Return the bytes of bfloat16 copies of the weights, of activations kept, and the most of temporary tensors."""
    row = settings.max_prompt_length + settings.max_completion_length
    tokens = max(settings.microbatch_tokens, 2 * row if settings.script in ("dpo", "reward_model") else row)
    size, again = number_size(settings), 0
    copied = 2 * model.blocks if size == 2 and ranks == 1 else 0  # by torch.autocast
    block, temporary = block_bytes(model, settings)
    kept = tokens * model.layers * block
    if settings.gradient_checkpointing:  # only the inputs of blocks; the first is the embedding's output
        kept = tokens * (4 * model.hidden * (model.layers - 1) + size * model.hidden)
        again = tokens * block
    head, gradient, copies = head_bytes(model, settings, tokens), 4 * model.embedding, 1
    if settings.script == "reward_model":  # no gradient of an LM head waits for that of the embedding
        head = gradient = 0
    elif model.tied:
        copies = 3  # both gradients, and then their sum
    root = 4 * model.root if ranks > 1 else 0  # gathered
    backward = root + gradient + again + tokens * (temporary + 4 * model.hidden)
    if ranks > 1:  # weights of this block and the next, and gradients, in the precision of products and in float32
        backward += (3 * size + 4) * model.blocks / model.layers
    else:  # a gradient of the MLP
        backward += 4 * model.inner * model.hidden
    end_of_forward = tokens * (2 * temporary + 8 * model.hidden)
    if settings.gradient_checkpointing:  # then copies are not kept
        backward += copied / model.layers
        end_of_forward += copied
        copied = 0
    end = max(2 * root, root + copies * 4 * model.embedding) - kept - copied  # when activations are gone
    return copied, kept, max(root + head, backward, end_of_forward, end)


def rollout_bytes(model, settings, ranks):
    """Return the bytes of the key-value cache of the rows decoded at once, and the most bytes of temporary tensors."""
    size = number_size(settings)
    prompts, held_out = settings.prompts_per_step // ranks, settings.eval_prompts // ranks
    cap = settings.rollout_batch_size or prompts * settings.group_size
    rows = min(cap, max(prompts * settings.group_size, held_out))
    width = settings.max_prompt_length + settings.max_completion_length
    in_cache = 2 * size * model.keys * model.layers  # of a token
    cache, logits = in_cache * rows * width, rows * model.vocab
    # The keys of a layer are copied to add a token. To draw it, sampling holds the logits, and in float32 their
    # quotient by the temperature and the probabilities.
    decoding = max(cache / model.layers / 2 + size * logits, (size + 8) * logits)
    read = settings.max_prompt_length * max(min(cap // settings.group_size, prompts), min(cap, held_out))
    if settings.script == "grpo_tools":  # after a tool's reply it reads all tokens so far
        read = rows * width
    reading = read * (3 * size * model.inner + (4 * size + 2) * model.hidden + in_cache)
    return cache, max(decoding, reading - cache)


def account(config, settings, ranks=1, models=None):
    """Return rows (part, bytes in the rollout, bytes in the update). The last row is their sum, the peak."""
    models = models or count_models(config, settings.script)
    model = next(iter(models.values()))
    weights, gradients = weight_bytes(models, settings, ranks)
    rows = [("process", PROCESS, PROCESS)] if settings.cpu else []
    rows += [(name, bytes_, bytes_) for name, bytes_ in weights.items()]
    rows.append(("gradients", 0, gradients))
    if settings.prompts_per_step:
        rollout = rollout_bytes(model, settings, ranks)
        if settings.script == "ppo_rlhf":  # it starts with a larger rollout, when AdamW has no moments yet
            larger = SimpleNamespace(**vars(settings) | {"prompts_per_step": NORM_SAMPLES})
            first = rollout_bytes(model, larger, ranks)
            if sum(first) > sum(rollout) + 2 * gradients:
                rollout = first
                rows = [(name, 0 if "AdamW" in name else bytes_, update) for name, bytes_, update in rows]
        rows += [("key-value cache", rollout[0], 0), ("decoding", rollout[1], 0)]
    copied, kept, temporary = update_bytes(model, settings, ranks)
    if copied:
        rows.append(("bfloat16 copies of the weights", 0, copied))
    rows += [("activations kept", 0, kept), ("temporary tensors of one layer or the LM head", 0, temporary)]
    if not settings.prompts_per_step:
        rows = [(name, 0, update) for name, _, update in rows]
    return [*rows, ("peak", sum(row[1] for row in rows), sum(row[2] for row in rows))]


def find_fit(config, settings, gb, ranks=1, models=None):
    """Return the first settings that fit, or None."""
    models = models or count_models(config, settings.script)
    updates = [{}, {"gradient_checkpointing": True}]
    updates += [updates[1] | {"microbatch_tokens": n} for n in (4096, 2048) if n < settings.microbatch_tokens]
    largest = settings.rollout_batch_size or settings.prompts_per_step * settings.group_size // ranks
    rollouts = [{}, *({"rollout_batch_size": n} for n in (256, 128, 64, 32) if n < largest)]
    found = {}
    for column, steps in ((1, rollouts), (2, updates)):
        for step in steps:
            tried = SimpleNamespace(**vars(settings) | step)
            if account(config, tried, ranks, models)[-1][column] <= USABLE * gb * 1e9:
                found[column] = step
                break
    return SimpleNamespace(**vars(settings) | found[1] | found[2]) if len(found) == 2 else None


def as_flags(settings, before):
    """Return the flags that turn the settings `before` into `settings`."""
    changed = {name: value for name, value in vars(settings).items() if value != getattr(before, name)}
    flags = [f"--{name.replace('_', '-')} {value}".removesuffix(" True") for name, value in changed.items()]
    return " ".join(flags) or "defaults"


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def in_gb(bytes_):
    return f"{bytes_ / 1e9:.1f}" if bytes_ else ""


def flags_table():
    """Return a table of the flags to add to grpo.py, as letters, by shape and GPUs."""
    settings, rows = read_settings("grpo"), []
    letters = {"--gradient-checkpointing": "C", "--microbatch-tokens": "M", "--rollout-batch-size": "R"}
    for name in SHAPES:
        fits = [find_fit(load_config(name), settings, gb, ranks) for ranks, gb in CARDS]
        cells = [as_flags(fit, settings) if fit else "no" for fit in fits]
        for flag, letter in letters.items():
            cells = [cell.replace(flag, letter) for cell in cells]
        rows.append([name, *cells])
    return table(["", *(f"{ranks} x {gb} GB" if ranks > 1 else f"{gb} GB" for ranks, gb in CARDS)], rows)


def parts_table():
    """Return a table of the parts of grpo.py, which says which parts only the rollout or only the update has."""
    accounts = [account(load_config(name), read_settings("grpo")) for name in SHAPES]
    rows = []
    for parts in zip(*(parts[:-1] for parts in accounts)):  # the same part of each shape
        name, rollout, update = parts[0]
        label = "" if rollout == update else " (rollout)" if rollout else " (update)"
        rows.append([name + label, *(in_gb(max(part[1:])) for part in parts)])
    for column, name in ((1, "rollout"), (2, "update")):
        peaks = [in_gb(parts[-1][column]) for parts in accounts]
        rows.append([f"**peak of the {name}**", *peaks])
    return table(["GB", *SHAPES], rows)


def write_page(path):
    """Write the tables into docs/memory.md, each between the comment with its name and the next comment."""
    text = Path(path).read_text()
    for name, lines in {"flags": flags_table(), "parts of grpo": parts_table()}.items():
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", rf"\1\n{lines}\n\n\2", text, flags=re.DOTALL)
    Path(path).write_text(text)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(SHAPES | SMALL)
    parser.add_argument("--model", default="Qwen2.5-0.5B", help=f"{names}, a folder or a hub name (default: the first)")
    parser.add_argument("--script", default="grpo", choices=SCRIPTS, help="name of the script (default: grpo)")
    parser.add_argument("--teacher", help="the same for the teacher of gkd (default: a model of the student's shape)")
    parser.add_argument("--tiny", action="store_true", help="use the script's settings for the bundled model")
    parser.add_argument("--ranks", type=int, default=1, help="number of GPUs that share the model out (default: 1)")
    parser.add_argument("--gpu-gb", type=float, help="memory of a GPU: print whether the run fits, or which flags help")
    parser.add_argument("--cpu-gb", type=float, help="memory of a machine without a GPU: print the same")
    parser.add_argument("--write", metavar="PAGE", help="only write the tables of docs/memory.md")
    for name, value in SETTINGS.items():
        kind = {"action": "store_true", "default": None} if value is False else {"type": type(value)}
        parser.add_argument(f"--{name.replace('_', '-')}", **kind, help="as in the script, which has the default")
    return parser.parse_args()


def main(args):
    if args.write:
        return write_page(args.write)
    config = load_config(args.model)
    settings = read_settings(args.script, args.tiny, **{name: getattr(args, name) for name in SETTINGS})
    settings.cpu = args.cpu_gb is not None
    models = count_models(config, args.script)
    if args.teacher:
        settings.teacher = count_model(load_config(args.teacher))
    for name, model in models.items():
        print(f"{name}: {model.blocks / 1e6:.1f} M parameters in its blocks, {model.root / 1e6:.1f} M outside them")
    rows = account(config, settings, args.ranks, models)
    print(table(["GB", "rollout", "update"], [[name, in_gb(first), in_gb(second)] for name, first, second in rows]))
    gb = args.cpu_gb or args.gpu_gb
    if gb:
        fit = find_fit(config, settings, gb, args.ranks, models)
        if fit == settings:
            print(f"fits in {gb:g} GB")
        elif fit:
            print(f"does not fit in {gb:g} GB; this would fit: {as_flags(fit, settings)}")
        else:
            other = "shorter completions" if settings.cpu else "more GPUs, or shorter completions"
            print(f"does not fit in {gb:g} GB; no flags of this script help: use {other}")
    sizes = [4 * (model.blocks + model.root) for model in models.values()]
    teacher = weight_bytes(models, settings, 1)[0].get("teacher", 0)
    host = max(sizes[0], teacher) * args.ranks
    print(f"host memory at the start: {in_gb(host)} GB, because each rank reads the whole model")
    disk = sizes[0] + 3 * sum(sizes)  # the first model, and a state with all trained models and their AdamW
    print(f"disk: {in_gb(disk)} GB per run, {in_gb(2 * disk)} GB while it saves")


if __name__ == "__main__":
    main(parse_args())
