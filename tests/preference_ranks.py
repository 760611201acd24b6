"""Run on two ranks by test_preferences.py: reward_model, dpo and ppo_rlhf on pairs and batches split over two ranks.

python -m pytest tests/test_preferences.py
"""

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
INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
# Ids 0 and 1, which may be padding and stop token, stand in the middle of completions too.
REJECTED = [*COMPLETIONS[3:], [5, 1, 0, 1], [1, 7, 1], [2, 1]]
PAIRS = [
    {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
    for prompt, chosen, rejected in zip(PROMPTS, COMPLETIONS, REJECTED)
]
TEXTS = [{"prompt_ids": pair["prompt_ids"], "completion_ids": pair["chosen_ids"]} for pair in PAIRS]


def build_scorer(config="llama", vocab_size=11, dtype=torch.float64, scale=4.0):
    """A random sequence classifier with one label, made as build_model makes language models."""
    torch.manual_seed(3)
    config = copy.deepcopy(CONFIGS[config])
    config.vocab_size = vocab_size
    config.num_labels = 1
    config.pad_token_id = PAD_ID
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
    mask = batch["completion_mask"]
    with torch.no_grad():
        _, _, values = policy(batch, 0.7)
    generator = torch.Generator().manual_seed(4)
    noise = torch.randn(3, *values.shape, generator=generator, dtype=torch.float64)
    batch["advantages"] = noise[0] * mask
    batch["old_values"] = (values + 0.3 * noise[1]) * mask
    batch["returns"] = (values + noise[2]) * mask
    return batch


def places_in(share, rows):
    """The places in a rank's share of those of the rows that it has."""
    return torch.tensor([share.index(row) for row in rows if row in share], dtype=torch.long)


def results_of(policy, metrics, **others):
    return {"gradient": gradient_of_parameters(policy), "metrics": metrics, **others}


def run_reward_model(share, device, rows):
    args = reward_model.Args(microbatch_tokens=BUDGET)
    policy = reward_model.shard(reward_model.ScoreModel(build_scorer()), args, device)
    batch = reward_model.collate_pairs([PAIRS[i] for i in share], device)
    totals = reward_model.accumulate_gradients(policy, batch, places_in(share, rows), 8, args)
    results = results_of(policy, sum_over_ranks(totals))
    # The second rank has none of a single pair.
    results["evaluations"] = [reward_model.evaluate(policy, PAIRS[:count], args) for count in (8, 3, 1)]
    return results


def run_dpo(share, device, rows):
    args = dpo.Args(microbatch_tokens=BUDGET, beta=0.3, label_smoothing=0.1)
    reference = dpo.shard(dpo.LogprobModel(build_model("llama", scale=5.5)), args, device)
    ref_logprobs = dpo.look_up_pairs(reference, PAIRS, args)
    policy = dpo.shard(dpo.LogprobModel(build_model("llama")), args, device)
    batch = dpo.collate_pairs([PAIRS[i] for i in share], device)
    batch["ref_logprobs"] = ref_logprobs.T[share].float().to(device)
    totals = dpo.accumulate_gradients(policy, batch, places_in(share, rows), 8, args)
    results = results_of(policy, sum_over_ranks(totals), references=ref_logprobs)
    pairs = [pair | {"ref_logprobs": found} for pair, found in zip(PAIRS, ref_logprobs.T.tolist())]
    results["evaluations"] = [dpo.evaluate_pairs(policy, pairs[:count], args) for count in (8, 3, 1)]
    return results


def run_ppo(share, device, rows):
    args = ppo_rlhf.Args(microbatch_tokens=BUDGET, temperature=0.7, ptx_coef=0.3)
    policy = build_actor_critic()
    batch = take(make_ppo_batch(policy), share)
    mask = batch["completion_mask"]
    for name in ("advantages", "old_values", "returns"):
        batch[name] = batch[name][:, : mask.shape[1]]
    ppo_rlhf.shard(policy.actor, args, device)
    ppo_rlhf.shard(policy.critic, args, device)
    looked_up = ppo_rlhf.lookup_logprobs(policy, batch, [torch.arange(len(share))], args)
    whitened = ppo_rlhf.whiten(batch["advantages"], mask)
    totals = ppo_rlhf.accumulate_gradients(policy, batch, places_in(share, rows), 30, False, args)
    metrics = sum_over_ranks(totals)
    texts = ppo_rlhf.collate([TEXTS[i] for i in share], device)
    metrics["ptx"] = ppo_rlhf.accumulate_ptx(policy, texts, args)
    metrics["explained_variance"] = ppo_rlhf.explained_variance(batch["returns"], batch["old_values"], mask)
    return results_of(policy, metrics, tokens=torch.stack([*looked_up, whitened]))


RUNS = {
    "reward_model": run_reward_model,
    "dpo": run_dpo,
    "ppo_rlhf": run_ppo,
}


def run():
    """The results by name and rows, of this rank's share or of all pairs and rows in one process."""
    rank, world_size, device = ppo_rlhf.init_ranks()
    share = SHARES[rank] if world_size > 1 else sum(SHARES, [])
    results = {}
    for name, run_script in RUNS.items():
        results[name] = run_script(share, device, range(8))
        results[f"{name}, one rank idle"] = run_script(share, device, [0, 2, 4])
    return results


if __name__ == "__main__":
    torch.save(run(), f"{sys.argv[1]}/{dist.get_rank()}.pt")
    dist.destroy_process_group()
