"""Run on two ranks by test_randomness.py: two steps of every script that samples, and of sft.py, and one rollout."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from tiny import PROMPTS, TINY, build_model, parse
from tiny import SCRIPTS as ONLINE
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

import grpo
import grpo_process
import ppo_rlhf
import sft

SCRIPTS = ONLINE | {"grpo_process": grpo_process, "ppo_rlhf": ppo_rlhf, "sft": sft}
NUM_STEPS, ROWS_PER_STEP, GROUP_SIZE = 2, 4, 4
# One prompt for all, so that what is sampled differs by random numbers alone; the answers name the rows.
ROWS = [{"prompt": "12+34=", "answer": str(i), "completion": str(i)} for i in range(1, 11)]
SETTINGS = {"num_steps": NUM_STEPS, "prompts_per_step": ROWS_PER_STEP, "group_size": GROUP_SIZE, "max_rounds": 1}
SETTINGS |= {"max_completion_length": 12, "overlong_buffer": 0.34, "eval_prompts": 0, "reward_model": "none", "seed": 5}
SETTINGS |= {"learning_rate": 1e-3, "warmup_steps": 0, "temperature": 3.0}


def make_args(name, folder, run_dir):
    sizes = {"minibatch_size": ROWS_PER_STEP if name in ("sft", "ppo_rlhf") else ROWS_PER_STEP * GROUP_SIZE}
    given = SETTINGS | sizes | {"dataset": f"{folder}/rows.jsonl", "run_dir": f"{folder}/{run_dir}"}
    return parse(SCRIPTS[name], **{key: given[key] for key in given if hasattr(SCRIPTS[name].Args, key)})


def run(name, folder):
    """Train; return what this rank saw: of each rollout the answers, completions, sum of the sampler's parameters and
    random numbers to come, and of each optimizer step the divisor and the tokens of this rank.
    """
    script, seen, divisors = SCRIPTS[name], [], []
    script.reward_fn = lambda text, _answer: float(sum(text.encode()) % 2)
    ranks = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    script.init_ranks = lambda: ranks  # all scripts share one group of ranks, which end_run would end
    script.save = script.end_run = script.check_model = lambda *_: None
    if name == "sft":
        collate, tokenizer = script.collate, AutoTokenizer.from_pretrained(TINY)

        def recorded(rows, *rest):
            answers = [tokenizer.decode(row["completion_ids"], skip_special_tokens=True) for row in rows]
            seen.append({"answers": answers})
            return collate(rows, *rest)

        script.collate = recorded
    else:
        sample_completions, generate = script.sample_completions, script.generate

        def recorded_generate(model, *rest):
            draws = torch.rand(3, generator=torch.Generator().set_state(torch.get_rng_state())).tolist()
            weights = sum(parameter.double().sum().item() for parameter in model.parameters())
            seen.append({"weights": weights, "draws": draws})
            return generate(model, *rest)

        def recorded_sample(policy, tokenizer, prompts, *rest):
            batch, texts = sample_completions(policy, tokenizer, prompts, *rest)
            answers = [prompt["answer"] for prompt in prompts[:: 1 if name == "ppo_rlhf" else GROUP_SIZE]]
            seen[-1] |= {"answers": answers, "texts": texts}
            return batch, texts

        script.generate, script.sample_completions = recorded_generate, recorded_sample
    accumulate = script.accumulate_gradients

    def recorded_accumulate(policy, batch, rows, divisor, *rest):
        divisors.append([float(divisor), batch["completion_mask"][rows].sum().item()])
        return accumulate(policy, batch, rows, divisor, *rest)

    script.accumulate_gradients = recorded_accumulate
    script.main(make_args(name, folder, name))
    return {"rollouts": seen, "divisors": divisors}


def sample_gathered(precision):
    """What is true of a rollout by a policy, compared with one by a model that was never sharded."""
    plain, model = (build_model("llama", dtype=torch.float32) for _ in range(2))
    noise, randint = [], torch.randint
    torch.randint = lambda *given, **more: [drawn := randint(*given, **more), noise.append(drawn.sum().item())][0]
    torch.manual_seed(dist.get_rank())
    args = SimpleNamespace(precision=precision, gradient_checkpointing=True)
    policy = grpo.shard(grpo.LogprobModel(model), args, plain.device)
    torch.randint, noises = randint, [grpo.all_reduce(sum(noise), op) for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX)]
    if precision == "bfloat16":
        plain.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: output.bfloat16())
        for block in plain.model.layers:
            block.bfloat16().forward = partial(grpo.in_bfloat16, block.forward)
    prompts = *grpo.pad_left([{"prompt_ids": ids} for ids in PROMPTS], plain.device), 8, 1.0, [1, 3], 0, True
    with grpo.gathered(policy) as sampler:
        torch.manual_seed(0)
        sampled = grpo.generate(sampler, *prompts)
        inputs = *prompts[:2], *sampled[:2], 1.0
        scored = grpo.token_logprobs(sampler, *inputs)[0]
    torch.manual_seed(0)
    batch = dict(zip(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), inputs))
    expected, (logprobs, _) = grpo.generate(plain, *prompts), policy(batch, 1.0)
    logprobs.sum().backward()
    weights, num_ranks = list(policy.parameters()), dist.get_world_size()
    sharded = [weight for weight in weights if isinstance(weight, DTensor)]
    held = sum(weight.to_local().numel() for weight in sharded) * num_ranks
    return {
        "noise": noises[0] == noises[1] and bool(noise) == (precision == "bfloat16"),
        "samples": all(map(torch.equal, sampled, expected)),
        "scored inside": torch.equal(scored, grpo.token_logprobs(plain, *inputs)[0]),
        "scored outside": torch.equal(logprobs, scored),
        "scored as sampled": bool((logprobs - sampled[2]).abs().max() < (1e-4 if precision == "float32" else 0.1)),
        "sharded again": len(sharded) == (len(weights) if precision == "bfloat16" or num_ranks > 1 else 0)
        and (not sharded or 0.9 < held / sum(weight.numel() for weight in plain.parameters()) < 1.1),
        "trains": all(weight.grad.shape == weight.shape and bool((weight.grad != 0).any()) for weight in weights),
    }


if __name__ == "__main__":
    folder, _ = Path(sys.argv[1]), grpo.init_ranks()
    results = {precision: sample_gathered(precision) for precision in ("float32", "bfloat16")}
    results |= {name: run(name, folder) for name in SCRIPTS}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
