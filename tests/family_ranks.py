"""Run by torchrun in test_family_gradients.py: gradients and metrics of a batch split over two ranks."""

import sys

import torch
import torch.distributed as dist
from tiny import build_model, make_batch
from two_ranks import CASES, SHARES, take

import dapo
import dr_grpo
import gspo
import reinforce

SCRIPTS = {"reinforce": reinforce, "dr_grpo": dr_grpo, "dapo": dapo, "gspo": gspo}


def run(script, live_rows):
    rank, _, device = script.init_ranks()
    model = build_model("llama")
    share = SHARES[rank] if dist.is_initialized() else sum(SHARES, [])
    batch = take(make_batch(model), share)
    rows = torch.tensor([share.index(row) for row in live_rows if row in share], dtype=torch.long)
    policy = script.shard(script.LogprobModel(model).train(), device)
    args = script.Args(temperature=0.7, microbatch_tokens=24, max_completion_length=9)
    flags = () if script is reinforce else (False,)
    metrics = script.reduce_metrics(script.accumulate_gradients(policy, batch, rows, 8, *flags, args))
    gradients = [parameter.grad for parameter in policy.parameters()]
    gradients = [grad.full_tensor() if dist.is_initialized() else grad for grad in gradients]
    return {"gradient": torch.cat([grad.flatten() for grad in gradients]), "metrics": metrics}


if __name__ == "__main__":
    cases = ("different lengths", "one rank idle")
    results = {(name, case): run(script, CASES[case][1]) for name, script in SCRIPTS.items() for case in cases}
    torch.save(results, f"{sys.argv[1]}/{dist.get_rank()}.pt")
    dist.destroy_process_group()
