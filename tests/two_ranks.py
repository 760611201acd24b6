"""What two ranks run (python -m pytest tests/test_accumulation.py): gradients of a batch that is split over them."""

import sys

import torch
import torch.distributed as dist
from tiny import SCRIPTS, TINY, add_pairs, build_model, call_accumulate_gradients, make_args, make_batch
from transformers import AutoTokenizer

import gkd
import grpo_tools

SHARES = ([0, 1, 2, 3, 4], [5, 6, 7])  # rows of the batch, or pairs, on each rank
SOME = [0, 1, 2, 3, 4, 6]
# name: (dtype, rows with a gradient, precision, rank of adapters)
CASES = {
    "different lengths": (torch.float64, range(8), "float32", 0),
    "one rank idle": (torch.float64, [0, 2, 4], "float32", 0),
    "float32": (torch.float32, SOME, "float32", 0),
    "bfloat16": (torch.float32, SOME, "bfloat16", 0),
    "adapters": (torch.float32, SOME, "float32", 2),
    "adapters in bfloat16": (torch.float32, SOME, "bfloat16", 2),
}


def take(batch, rows):
    """The rows of a batch, trimmed to their own longest prompt and completion, as a rollout of these alone has them."""
    part = {key: value[rows] for key, value in batch.items()}
    prompt = part["prompt_mask"].sum(1).max()
    completion = part["completion_mask"].sum(1).max()
    for key, value in part.items():
        if key.startswith("prompt"):
            part[key] = value[:, -prompt:]
        elif key.startswith(("completion", "action")) or key.endswith("logprobs"):
            part[key] = value[:, :completion]
    return part


def gradient_of_parameters(policy):
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.requires_grad]
    gradients = [gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient for gradient in gradients]
    return torch.cat([gradient.flatten() for gradient in gradients])


def sum_over_ranks(metrics):
    """Each metric's sum and count, added over ranks."""
    return dict(zip(metrics, grpo_tools.all_reduce([list(pair) for pair in metrics.values()])))


def run_gkd(dtype, precision, lora_rank):
    """The same of gkd.py, whose teacher has another architecture; each rank has its share of the batch."""
    torch.set_float32_matmul_precision("highest")
    args = gkd.Args(temperature=0.7, microbatch_tokens=24, precision=precision, divergence="jsd", teacher=str(TINY))
    args.max_prompt_length = args.max_completion_length = 8
    model = build_model("llama", dtype=dtype)
    if lora_rank:
        gkd.add_adapters(model, lora_rank)
    for name, parameter in model.named_parameters():
        if "lora_b" in name:
            parameter.data.fill_(0.02)
    share = SHARES[dist.get_rank()] if dist.get_world_size() > 1 else sum(SHARES, [])
    batch = take(make_batch(model), share)
    policy = gkd.prepare_model(gkd.StudentModel(model), args, torch.device("cpu"))
    load_model, gkd.load_model = gkd.load_model, lambda *_: build_model("qwen3", dtype=dtype, scale=4.0)
    teacher = gkd.load_teacher(args, AutoTokenizer.from_pretrained(TINY), torch.device("cpu"))
    gkd.load_model = load_model
    metrics = add_pairs(gkd.accumulate_gradients(policy, teacher, batch, 8 / dist.get_world_size(), args))
    return {"gradient": gradient_of_parameters(policy), "metrics": sum_over_ranks(metrics)}


def run(script, dtype, live_rows, precision, lora_rank):
    if script is gkd:
        return run_gkd(dtype, precision, lora_rank)
    torch.set_float32_matmul_precision("highest")  # use_bfloat16 of another case has set it for the whole process
    args = make_args(script, microbatch_tokens=24, precision=precision)
    model = build_model("llama", dtype=dtype)
    if lora_rank:
        script.add_adapters(model, lora_rank)
    for name, parameter in model.named_parameters():  # adapters that have been trained
        if "lora_b" in name:
            parameter.data.fill_(0.02)
    share = SHARES[dist.get_rank()] if dist.get_world_size() > 1 else sum(SHARES, [])
    batch = take(make_batch(model), share)
    batch["indices"] = torch.arange(len(share))
    indices = torch.tensor([share.index(row) for row in live_rows if row in share], dtype=torch.long)
    policy = script.prepare_model(script.LogprobModel(model), args, torch.device("cpu"))
    divisor = 8 / dist.get_world_size()  # FSDP takes the mean over ranks
    metrics = call_accumulate_gradients(script, policy, batch, indices, args, divisor=divisor)
    return {"gradient": gradient_of_parameters(policy), "metrics": sum_over_ranks(metrics)}


if __name__ == "__main__":
    grpo_tools.init_ranks()
    results = {}
    for name, script in (SCRIPTS | {"gkd": gkd}).items():
        for case, settings in CASES.items():
            results[name, case] = run(script, *settings)
    torch.save(results, f"{sys.argv[1]}/{dist.get_rank()}.pt")
    dist.destroy_process_group()
