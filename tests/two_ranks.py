"""Run on two ranks by test_gradients.py: gradients, metrics and log-probabilities of a batch split over two ranks."""

import sys

import torch
import torch.distributed as dist
from tiny import SCRIPTS, build_model, call_accumulate_gradients, make_args, make_batch

import grpo

SHARES = ([0, 1, 2, 3, 4], [5, 6, 7])  # rows of the batch, or pairs, on each rank
# name: (dtype, rows with a gradient, precision, rank of adapters)
CASES = {
    "different lengths": (torch.float64, [0, 1, 2, 3, 4, 5, 6, 7], "float32", 0),
    "one rank idle": (torch.float64, [0, 2, 4], "float32", 0),
    "float32": (torch.float32, [0, 1, 2, 3, 4, 6], "float32", 0),
    "bfloat16": (torch.float32, [0, 1, 2, 3, 4, 6], "bfloat16", 0),
    "adapters": (torch.float32, [0, 1, 2, 3, 4, 6], "float32", 2),
    "adapters in bfloat16": (torch.float32, [0, 1, 2, 3, 4, 6], "bfloat16", 2),
}
ARGS = make_args(microbatch_tokens=24)


def take(batch, rows):
    """The rows of a batch, trimmed to their own longest prompt and completion, as a rollout of these alone has them."""
    part = {key: value[rows] for key, value in batch.items()}
    prompt, completion = part["prompt_mask"].sum(1).max(), part["completion_mask"].sum(1).max()
    for key in ("prompt_ids", "prompt_mask"):
        part[key] = part[key][:, -prompt:]
    for key in [key for key in part if key.startswith(("completion", "action")) or key.endswith("logprobs")]:
        part[key] = part[key][:, :completion]
    return part


def gradient_of_parameters(policy):
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.requires_grad]
    gradients = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in gradients]
    return torch.cat([grad.flatten() for grad in gradients])


def sum_over_ranks(metrics):
    return dict(zip(metrics, grpo.all_reduce([float(value) for value in metrics.values()])))


def run(script, dtype, live_rows, precision, lora_rank):
    args = make_args(script, microbatch_tokens=ARGS.microbatch_tokens, precision=precision)
    model = build_model("llama", dtype=dtype)
    if lora_rank:
        script.add_adapters(model, lora_rank)
    for name, parameter in model.named_parameters():  # adapters that have been trained
        if "lora_b" in name:
            parameter.data.fill_(0.02)
    batch = make_batch(model)
    share = SHARES[dist.get_rank()] if dist.get_world_size() > 1 else sum(SHARES, [])
    batch = take(batch, share)
    rows = torch.tensor([share.index(row) for row in live_rows if row in share], dtype=torch.long)
    policy = script.shard(script.LogprobModel(model), args, torch.device("cpu"))
    logprobs = grpo.lookup_logprobs(policy, batch, [rows], ARGS)
    metrics = sum_over_ranks(call_accumulate_gradients(script, policy, batch, rows, args))
    return {"gradient": gradient_of_parameters(policy), "metrics": metrics, "logprobs": logprobs}


if __name__ == "__main__":
    grpo.init_ranks()
    results = {(name, case): run(SCRIPTS[name], *CASES[case]) for name in SCRIPTS for case in CASES}
    torch.save(results, f"{sys.argv[1]}/{dist.get_rank()}.pt")
    dist.destroy_process_group()
