"""Run on two ranks by test_preferences.py: reward_model, dpo and ppo_rlhf on pairs and batches split over two ranks.

python -m pytest tests/test_preferences.py
"""

import copy
import sys

import torch
import torch.distributed as dist
from tiny import COMPLETIONS, CONFIGS, PAD_ID, PROMPTS, add_pairs, build_model, make_batch, scaled
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
        values = policy.values(batch)
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
    policy = reward_model.prepare_model(reward_model.ScoreModel(build_scorer()), args, device)
    pairs = [PAIRS[i] for i in share if i in rows]
    collected = reward_model.accumulate_gradients(policy, pairs, 8 / dist.get_world_size(), args)
    results = results_of(policy, sum_over_ranks(add_pairs(collected)))
    # The second rank has none of a single pair.
    results["evaluations"] = [reward_model.evaluate(policy, PAIRS[:count], args) for count in (8, 3, 1)]
    return results


def run_dpo(share, device, rows):
    args = dpo.Args(microbatch_tokens=BUDGET, beta=0.3, label_smoothing=0.1)
    reference = dpo.prepare_model(dpo.LogprobModel(build_model("llama", scale=5.5)), args, device)
    pairs = [dict(pair) for pair in PAIRS]
    dpo.add_ref_logprobs(reference, pairs, args)
    policy = dpo.prepare_model(dpo.LogprobModel(build_model("llama")), args, device)
    own = [pairs[i] for i in share if i in rows]
    collected = dpo.accumulate_gradients(policy, own, 8 / dist.get_world_size(), args)
    results = results_of(
        policy, sum_over_ranks(add_pairs(collected)), references=torch.stack([pair["ref_logprobs"] for pair in pairs])
    )
    results["evaluations"] = [dpo.evaluate(policy, pairs[:count], args) for count in (8, 3, 1)]
    return results


def run_ppo(share, device, rows):
    args = ppo_rlhf.Args(microbatch_tokens=BUDGET, temperature=0.7, ptx_coef=0.3)
    policy = build_actor_critic()
    batch = take(make_ppo_batch(policy), share) | {"indices": torch.arange(len(share))}
    mask = batch["completion_mask"]
    for name in ("advantages", "old_values", "returns"):
        batch[name] = batch[name][:, : mask.shape[1]]
    ppo_rlhf.prepare_model(policy.actor, args, device)
    ppo_rlhf.prepare_model(policy.critic, args, device)
    everything = [torch.arange(len(share))]
    logprobs = ppo_rlhf.compute_logprobs(policy.actor, batch, everything, args)
    values = ppo_rlhf.compute_values(policy, batch, everything, args)
    whitened = ppo_rlhf.whiten(batch["advantages"], mask)
    divisor = 30 / dist.get_world_size()
    collected = ppo_rlhf.accumulate_gradients(policy, batch, places_in(share, rows), divisor, args)
    collected.append(ppo_rlhf.accumulate_ptx(policy, [TEXTS[i] for i in share], args))
    metrics = sum_over_ranks(add_pairs(collected))
    return results_of(policy, metrics, tokens=torch.stack([logprobs, values, whitened]))


RUNS = {
    "reward_model": run_reward_model,
    "dpo": run_dpo,
    "ppo_rlhf": run_ppo,
}


def run():
    """The results by name and rows, of this rank's share or of all pairs and rows in one process."""
    device = ppo_rlhf.init_ranks()
    share = SHARES[dist.get_rank()] if dist.get_world_size() > 1 else sum(SHARES, [])
    results = {}
    for name, run_script in RUNS.items():
        results[name] = run_script(share, device, range(8))
        results[f"{name}, one rank idle"] = run_script(share, device, [0, 2, 4])
    return results


if __name__ == "__main__":
    torch.save(run(), f"{sys.argv[1]}/{dist.get_rank()}.pt")
    dist.destroy_process_group()
