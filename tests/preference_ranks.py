"""Run on two ranks by test_preferences.py: reward_model, dpo and ppo_rlhf on pairs and batches split over two ranks."""

import copy
import sys

import torch
import torch.distributed as dist
from tiny import COMPLETIONS, CONFIGS, PAD_ID, PROMPTS, build_model, make_batch, scaled
from transformers import AutoModelForSequenceClassification
from two_ranks import SHARES, gradient_of_parameters, sum_over_ranks, take

import dpo
import ppo_rlhf
import reward_model

BUDGET = 36
# Ids 0 and 1, which may be padding and stop token, stand in the middle of completions too.
PAIRS = [
    {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
    for prompt, chosen, rejected in zip(PROMPTS, COMPLETIONS, [*COMPLETIONS[3:], [5, 1, 0, 1], [1, 7, 1], [2, 1]])
]
TEXTS = [{"prompt_ids": prompt, "completion_ids": completion} for prompt, completion in zip(PROMPTS, COMPLETIONS)]
INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
NAMES = [f"{name}{idle}" for name in ("reward_model", "dpo", "ppo_rlhf") for idle in ("", ", one rank idle")]


def build_scorer(config="llama", vocab_size=11, dtype=torch.float64, scale=4.0):
    """A random sequence classifier with one label, as build_model makes language models."""
    torch.manual_seed(3)
    config = copy.deepcopy(CONFIGS[config])
    config.vocab_size, config.num_labels, config.pad_token_id = vocab_size, 1, PAD_ID
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float64).eval()
    return scaled(model, scale).to(dtype)


def build_actor_critic():
    policy = ppo_rlhf.ActorCritic(build_model("llama"), build_scorer())
    policy.score_mean.fill_(0.3)
    policy.score_std.fill_(1.7)
    return policy


def make_ppo_batch(policy):
    """The batch of make_batch with advantages, old values and returns of every token."""
    batch = make_batch(policy.model)
    with torch.no_grad():
        _, _, values = policy(batch, 0.7)
    noise = torch.randn(3, *values.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    mask = batch["completion_mask"]
    batch["advantages"] = noise[0] * mask
    return batch | {"old_values": (values + 0.3 * noise[1]) * mask, "returns": (values + noise[2]) * mask}


def evaluate_each(evaluate, policy, pairs, args):
    """Evaluations on all pairs, on three, and on one, of which the second rank has none."""
    return [evaluate(policy, pairs[:count], args) for count in (8, 3, 1)]


def run_reward_model(share, device, live_rows):
    args = reward_model.Args(microbatch_tokens=BUDGET)
    policy = reward_model.shard(reward_model.ScoreModel(build_scorer()), args, device)
    batch = reward_model.collate_pairs([PAIRS[i] for i in share], device)
    rows = torch.tensor([share.index(row) for row in live_rows if row in share], dtype=torch.long)
    metrics = sum_over_ranks(reward_model.accumulate_gradients(policy, batch, rows, 8, args))
    results = {"gradient": gradient_of_parameters(policy), "metrics": metrics}
    return results | {"evaluations": evaluate_each(reward_model.evaluate, policy, PAIRS, args)}


def run_dpo(share, device, live_rows):
    args = dpo.Args(microbatch_tokens=BUDGET, beta=0.3, label_smoothing=0.1)
    reference = dpo.shard(dpo.LogprobModel(build_model("llama", scale=5.5)), args, device)
    found = dpo.look_up_pairs(reference, PAIRS, args)
    pairs = [pair | {"ref_logprobs": logprobs} for pair, *logprobs in zip(PAIRS, *found.tolist())]
    policy = dpo.shard(dpo.LogprobModel(build_model("llama")), args, device)
    batch = dpo.collate_pairs([pairs[i] for i in share], device)
    batch["ref_logprobs"] = torch.tensor([pairs[i]["ref_logprobs"] for i in share], device=device)
    rows = torch.tensor([share.index(row) for row in live_rows if row in share], dtype=torch.long)
    metrics = sum_over_ranks(dpo.accumulate_gradients(policy, batch, rows, 8, args))
    results = {"gradient": gradient_of_parameters(policy), "metrics": metrics, "references": found}
    return results | {"evaluations": evaluate_each(dpo.evaluate_pairs, policy, pairs, args)}


def run_ppo(share, device, live_rows):
    args = ppo_rlhf.Args(microbatch_tokens=BUDGET, temperature=0.7, ptx_coef=0.3)
    policy = build_actor_critic()
    batch = make_ppo_batch(policy)
    narrow = take(batch, share)
    width = narrow["completion_mask"].shape[1]
    narrow |= {key: narrow[key][:, :width] for key in ("advantages", "old_values", "returns")}
    for part in (policy.actor, policy.critic):
        ppo_rlhf.shard(part, args, device)
    logprobs, values = ppo_rlhf.lookup_logprobs(policy, narrow, [torch.arange(len(share))], args)
    mask = narrow["completion_mask"]
    whitened = ppo_rlhf.whiten(narrow["advantages"], mask)
    rows = torch.tensor([share.index(row) for row in live_rows if row in share], dtype=torch.long)
    metrics = sum_over_ranks(ppo_rlhf.accumulate_gradients(policy, narrow, rows, 30, False, args))
    metrics["ptx"] = ppo_rlhf.accumulate_ptx(policy, ppo_rlhf.collate([TEXTS[i] for i in share], device), args)
    metrics["explained_variance"] = ppo_rlhf.explained_variance(narrow["returns"], narrow["old_values"], mask)
    tokens = torch.stack([logprobs, values, whitened])
    return {"gradient": gradient_of_parameters(policy), "metrics": metrics, "tokens": tokens}


def run():
    """Everything by name: of this rank's share, or of all pairs and rows in one process."""
    rank, world_size, device = ppo_rlhf.init_ranks()
    share = SHARES[rank] if world_size > 1 else sum(SHARES, [])
    runs = [(each, rows) for each in (run_reward_model, run_dpo, run_ppo) for rows in (range(8), [0, 2, 4])]
    return {name: each(share, device, rows) for name, (each, rows) in zip(NAMES, runs, strict=True)}


if __name__ == "__main__":
    torch.save(run(), f"{sys.argv[1]}/{dist.get_rank()}.pt")
    dist.destroy_process_group()
