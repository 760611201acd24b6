"""Estimate how much memory a script needs on a GPU, from the shape of the model.

    python tools/memory.py --model Qwen2.5-1.5B --gpu-gb 24
    python tools/memory.py --model path/to/folder --script ppo_rlhf --cpu-offload --microbatch-tokens 16384
    python tools/memory.py --model Qwen2.5-0.5B --script gkd --teacher Qwen2.5-7B --gpu-gb 48

The tool also takes the flags of the script. It prints the GB (1e9 bytes) of each part in the rollout and in the update,
and with --gpu-gb whether the run fits. It reads no weights. The formulas hold for models like Llama and Qwen2, and
assume that all prompts and completions have the maximum length. A script with a setting lora_rank trains an adapter.
"""

import argparse
import importlib
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

NAMES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size".split()
SHAPES = {  # as published in their config.json; the last value says whether the LM head is tied to the embedding
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False),
}
USABLE = 0.94  # of a GPU's GB; the driver reports about 1.07, but its context and gaps between tensors take the rest
BUS = 25e9  # bytes per second between the host's memory and a GPU, about those of PCIe 4.0 x16
LOGITS_AT_ONCE = 2**26  # as in the scripts


def load_config(name):
    """Return the config of a folder, of a shape named above, or of a model on the hub."""
    shape = name.removeprefix("Qwen/").removesuffix("-Instruct")
    if shape in SHAPES:
        *sizes, tied = SHAPES[shape]
        return Qwen2Config(**dict(zip(NAMES, sizes)), tie_word_embeddings=tied)
    return AutoConfig.from_pretrained(name).get_text_config()


def read_settings(script, **given):
    """Return the settings of a script: those given, and its defaults for the others."""
    return importlib.import_module(script).Args(**given)


def count_model(config):
    """Return the numbers of parameters in the blocks and outside them (root), and the sizes that activations have."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    blocks = sum(weight.numel() for name, weight in model.named_parameters() if ".layers." in name)
    return SimpleNamespace(
        blocks=blocks,
        root=model.num_parameters() - blocks,  # a tied head counts once
        embedding=config.vocab_size * config.hidden_size,
        tied=config.tie_word_embeddings,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        inner=config.intermediate_size,  # inside the MLP
        vocab=config.vocab_size,
        heads=heads,
        queries=heads * head_dim,
        keys=config.num_key_value_heads * head_dim,
    )


def weight_bytes(model, settings, ranks):
    """Return {model: bytes} of the weights of all models, and the bytes of those that are trained."""
    script, size = type(settings).__module__, getattr(torch, settings.precision).itemsize
    shards = float("inf") if settings.cpu_offload else ranks  # what is not on this GPU is on others, or on the host
    policy = 4 * (model.blocks + model.root) / shards
    scorer = policy - (0 if model.tied else 4 * model.embedding / shards)  # a scalar in place of the LM head
    if script == "reward_model":
        return {"reward model": scorer}, scorer
    parts, trained = {"policy": policy}, policy
    if hasattr(
        settings, "lora_rank"
    ):  # the reference is the policy without its adapter, of half a percent of the weights
        trained = 0.005 * policy
    elif getattr(settings, "kl_coef", 0) or script == "dpo":
        parts["reference"] = policy
    if hasattr(settings, "prompts_per_step"):
        parts["sampler"] = size * (model.blocks + model.root)
    if script == "ppo_rlhf":
        parts |= {"value model": scorer, "reward model": scorer}
        trained += scorer
    if script == "gkd":
        teacher = count_model(load_config(settings.teacher)) if settings.teacher else model
        root = size * (teacher.root - (0 if teacher.tied else teacher.embedding)) + 4 * teacher.embedding
        parts["teacher"] = (size * teacher.blocks + root) / shards + (root if shards > 1 else 0)
    return parts, trained


def update_bytes(model, settings, ranks):
    """Return the bytes of bfloat16 copies of the weights, of activations kept, and the most of temporary tensors."""
    script, size = type(settings).__module__, getattr(torch, settings.precision).itemsize
    lora = hasattr(settings, "lora_rank")
    row = settings.max_prompt_length + settings.max_completion_length
    tokens = max(settings.microbatch_tokens, 2 * row if script in ("dpo", "reward_model") else row)
    sharded = ranks > 1 or settings.cpu_offload
    copied = 2 * model.blocks if size == 2 and not sharded else 0  # by torch.autocast

    # What a block keeps of each token for its backward pass, and the temporary tensors of that pass
    mlp = 4 * size * model.inner  # gate, its SiLU, up, their product
    keys = model.keys if size == 2 else model.queries  # in float32, they are repeated
    attention = size * (2 * model.queries + 2 * keys) + 4 * model.heads  # query, key, value, output; log-sum
    norms = 2 * (12 * model.hidden + 4)  # each one's input, the normalised input, the output; a number per token
    if size == 2:  # in place of each output, its copies in bfloat16 for the five linear layers that read it
        norms = 2 * (8 * model.hidden + 4) + 10 * model.hidden
    block, temporary = mlp + attention + norms, size * (2 * model.inner + model.hidden)
    kept = tokens * model.layers * block
    backward = tokens * (temporary + 4 * model.hidden)
    end_of_forward = tokens * (2 * temporary + 8 * model.hidden)
    if settings.gradient_checkpointing:  # only the inputs of blocks are kept; the first is the embedding's output
        kept = tokens * (4 * model.hidden * (model.layers - 1) + size * model.hidden)
        backward += tokens * block + copied / model.layers
        end_of_forward += copied
        copied = 0

    at_once, count = LOGITS_AT_ONCE, 4  # logits, their softmax, temporary tensors of the entropy
    if script == "gkd":  # half as many logits of each model
        at_once, count = LOGITS_AT_ONCE // 2, 7
    chunk, head = 4 * min(at_once, tokens * model.vocab), 0
    if script != "reward_model":
        gradient = 0 if lora else 4 * model.embedding  # of the chunks before; then of this one, and their sum
        head = max(gradient + count * chunk, 3 * gradient) + 16 * tokens * model.hidden
        backward += gradient  # that of the LM head waits for that of the embedding
    if sharded:  # weights of this block and the next, and gradients, in the precision of products and in float32
        head += 4 * model.root  # gathered
        backward += 4 * model.root + (3 * size + 4) * model.blocks / model.layers
    elif not lora:  # a gradient of the MLP
        backward += 4 * model.inner * model.hidden
    return copied, kept, max(head, backward, end_of_forward)


def rollout_bytes(model, settings, ranks):
    """Return the bytes of the key-value cache of the rows decoded at once, and the most bytes of temporary tensors."""
    size, group_size = getattr(torch, settings.precision).itemsize, getattr(settings, "group_size", 1)
    held_out = settings.eval_prompts // ranks
    rows = min(settings.rollout_batch_size, max(settings.prompts_per_step * group_size // ranks, held_out))
    width = settings.max_prompt_length + settings.max_completion_length
    in_cache = 2 * size * model.keys * model.layers  # of a token
    cache, logits = in_cache * rows * width, rows * model.vocab
    # The keys of a layer are copied to add a token. To draw it, sampling holds the logits, and in float32 their
    # quotient by the temperature and the probabilities.
    decoding = max(cache / model.layers / 2 + size * logits, (size + 8) * logits)
    read = settings.max_prompt_length * max(rows // group_size, min(rows, held_out))
    if type(settings).__module__ == "grpo_tools":  # after a tool's reply it reads all tokens so far
        read = rows * width
    reading = read * (3 * size * model.inner + (4 * size + 2) * model.hidden + in_cache)
    return cache, max(decoding, reading - cache)


def account(config, settings, ranks=1, model=None):
    """Return rows (part, bytes on a GPU in the rollout, those in the update). The last row is their sum, the peak."""
    model = model or count_model(config)
    weights, trained = weight_bytes(model, settings, ranks)
    rows = [(name, number, number) for name, number in weights.items()]
    rows += [("AdamW", 2 * trained, 2 * trained), ("gradients", 0, trained)]
    if hasattr(settings, "prompts_per_step"):
        cache, decoding = rollout_bytes(model, settings, ranks)
        rows += [("key-value cache", cache, 0), ("decoding", decoding, 0)]
    copied, kept, temporary = update_bytes(model, settings, ranks)
    rows += [("bfloat16 copies of the weights", 0, copied), ("activations kept", 0, kept)]
    rows.append(("temporary tensors of one layer or the LM head", 0, temporary))
    return [*rows, ("peak", sum(row[1] for row in rows), sum(row[2] for row in rows))]


def host_bytes(config, settings):
    """Return the bytes that --cpu-offload takes of the host's memory, on all ranks together."""
    weights, trained = weight_bytes(count_model(config), replace(settings, cpu_offload=False), 1)
    return sum(weights.values()) - weights.get("sampler", 0) + 3 * trained


def moving_seconds(config, settings):
    """Return the seconds that a step of grpo.py takes to move weights and gradients with --cpu-offload on one GPU."""
    row = settings.max_prompt_length + settings.max_completion_length
    microbatches = settings.prompts_per_step * settings.group_size / max(1, settings.microbatch_tokens // row)
    passes = 4 + (settings.kl_coef > 0)  # old log-probabilities, forward, backward, gradients; those of the reference
    model = count_model(config)
    return microbatches * passes * 4 * (model.blocks + model.root) / BUS


def find_flags(config, settings, gb, ranks=1):
    """Return the first flags with which a run fits into this memory, or None. Slower ones come later."""
    model = count_model(config)
    sizes = [0, *(n for n in (256, 128, 64) if n < getattr(settings, "rollout_batch_size", 0))]  # 0: the default
    offloads = [False] if hasattr(settings, "lora_rank") else [False, True]
    for offload, size, recompute in itertools.product(offloads, sizes, [False, True]):
        flags = {"cpu_offload": offload, "gradient_checkpointing": recompute, "rollout_batch_size": size}
        flags = {name: value for name, value in flags.items() if value}
        _, *peaks = account(config, replace(settings, **flags), ranks, model)[-1]
        if max(peaks) <= USABLE * gb * 1e9:
            words = [f"--{name.replace('_', '-')} {value}" for name, value in flags.items()]
            return " ".join(words).replace(" True", "") or "defaults"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen2.5-0.5B", help=f"{', '.join(SHAPES)}, a folder or a hub name")
    parser.add_argument("--script", default="grpo", help="name of the script (default: grpo)")
    parser.add_argument("--ranks", type=int, default=1, help="number of GPUs that share the model out (default: 1)")
    parser.add_argument("--gpu-gb", type=float, help="memory of each GPU: print whether the run fits, or what would")
    args, flags = parser.parse_known_args()
    script = importlib.import_module(args.script)
    sys.argv = [sys.argv[0], "--model", args.model, *flags]
    config, settings = load_config(args.model), script.parse_args()
    print(f"{'GB':45}{'rollout':>9}{'update':>9}")
    for name, *peaks in account(config, settings, args.ranks):
        print(f"{name:45}" + "".join(f"{peak / 1e9:9.1f}" for peak in peaks))
    if settings.cpu_offload:
        print(f"{'memory of the host':45}{host_bytes(config, settings) / 1e9:18.1f}")
    if args.gpu_gb:
        found = find_flags(config, settings, args.gpu_gb, args.ranks) or "more GPUs, or shorter completions"
        said = "fits in" if found == "defaults" else f"needs {found} to fit in"
        print(f"{said} {args.gpu_gb:g} GB")


if __name__ == "__main__":
    main()
