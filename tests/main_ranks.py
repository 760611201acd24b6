"""What two ranks run (python -m pytest tests/test_resume.py): two steps of a script that samples, or sft.py."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from tiny import PROMPTS, TINY, build_model, parse
from tiny import SCRIPTS as ONLINE
from transformers import AutoTokenizer

import gkd
import grpo_tools
import ppo_rlhf
import sft

SCRIPTS = ONLINE | {"ppo_rlhf": ppo_rlhf, "gkd": gkd, "sft": sft}
NUM_STEPS, ROWS_PER_STEP, GROUP_SIZE = 2, 4, 4
# One prompt for all, so that what is sampled differs by random numbers alone; the answers name the rows.
ROWS = [{"prompt": "12+34=", "answer": str(i), "completion": str(i)} for i in range(1, 11)]
SEED = 5
SETTINGS = """num_steps=2 prompts_per_step=4 group_size=4 max_rounds=1 max_completion_length=12 overlong_buffer=0.34
    eval_prompts=0 reward_model=none seed=5 learning_rate=1e-3 warmup_steps=0 temperature=3"""


def make_args(name, folder, run_dir):
    script, given = SCRIPTS[name], dict(setting.split("=") for setting in SETTINGS.split())
    given |= {"minibatch_size": 16, "dataset": f"{folder}/rows.jsonl", "run_dir": f"{folder}/{run_dir}"}
    if name in ("sft", "ppo_rlhf"):
        given["minibatch_size"] = 4
    return parse(script, **{key: value for key, value in given.items() if hasattr(script.Args, key)})


def run(name, folder):
    """Train; return the answers and random numbers of each rollout, and divisor and own tokens of each update."""
    script, rollouts, divisors = SCRIPTS[name], [], []
    accumulate = script.accumulate_gradients
    tokenizer = AutoTokenizer.from_pretrained(TINY)

    def recorded_accumulate(policy, batch, indices, divisor, *rest):
        mask = batch["completion_mask"]
        divisors.append([float(divisor), mask[indices].sum().item()])
        return accumulate(policy, batch, indices, divisor, *rest)

    def recorded_accumulate_gkd(policy, teacher, batch, divisor, *rest):
        divisors.append([float(divisor), batch["completion_mask"].sum().item()])
        return accumulate(policy, teacher, batch, divisor, *rest)

    def recorded_accumulate_sft(policy, rows, divisor, *rest):
        completions = [row["completion_ids"] for row in rows]
        divisors.append([float(divisor), sum(map(len, completions))])
        rollouts.append({"answers": tokenizer.batch_decode(completions, skip_special_tokens=True)})
        return accumulate(policy, rows, divisor, *rest)

    def recorded_sample(policy, tokenizer, prompts, *rest):
        draws = torch.rand(3, generator=torch.Generator().set_state(torch.get_rng_state())).tolist()
        answers = [prompt["answer"] for prompt in prompts[:: 1 if name in ("ppo_rlhf", "gkd") else GROUP_SIZE]]
        rollouts.append({"draws": draws, "answers": answers})
        return sample_completions(policy, tokenizer, prompts, *rest)

    script.accumulate_gradients = recorded_accumulate_sft
    if name != "sft":
        script.accumulate_gradients = recorded_accumulate_gkd if name == "gkd" else recorded_accumulate
        sample_completions = script.sample_completions
        script.sample_completions = recorded_sample
    script.reward_fn = lambda text, _answer: float(sum(text.encode()) % 2)
    script.init_ranks = lambda: torch.device("cpu")  # all scripts share one group of ranks, which end_run would end
    script.save = script.end_run = script.check_model = lambda *_: None
    torch.set_float32_matmul_precision("highest")  # use_bfloat16 of another case may have set it
    args = make_args(name, folder, name)
    dist.barrier()  # as init_ranks would: no rank makes the folder before all have read their flags
    script.main(args)
    return {"rollouts": rollouts, "divisors": divisors}


def shard_with_noise(model, precision):
    """The policy, and whether its weights got noise in bfloat16 alone and the same on every rank."""
    noise, randint = [], torch.randint

    def recorded(*given, **more):
        drawn = randint(*given, **more)
        noise.append(drawn.sum().item())
        return drawn

    torch.randint = recorded
    torch.manual_seed(dist.get_rank())
    args = SimpleNamespace(precision=precision, gradient_checkpointing=True)
    policy = ppo_rlhf.prepare_model(grpo_tools.LogprobModel(model), args, torch.device("cpu"))
    torch.randint = randint
    lowest, highest = (ppo_rlhf.all_reduce(sum(noise), op) for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX))
    return policy, lowest == highest and bool(noise) == (precision == "bfloat16")


def sample_gathered(precision):
    """What is true of a rollout by a policy, compared with one by a model that was never sharded."""
    plain, model = (build_model("llama", dtype=torch.float32) for _ in range(2))
    policy, noise = shard_with_noise(model, precision)
    if precision == "bfloat16":
        plain.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: output.bfloat16())
        for block in plain.model.layers:
            block.bfloat16().forward = partial(ppo_rlhf.in_bfloat16, block.forward)
    prompts = *ppo_rlhf.pad_left([{"prompt_ids": ids} for ids in PROMPTS], "cpu"), 8, 1.0, [1, 3]
    with ppo_rlhf.gathered(policy) as sampler:
        torch.manual_seed(0)
        sampled = ppo_rlhf.generate(sampler, *prompts)
        inputs = *prompts[:2], *sampled[:2]
        scored = ppo_rlhf.token_logprobs(sampler, *inputs, 1.0)[0]
    torch.manual_seed(0)
    expected = ppo_rlhf.generate(plain, *prompts)
    batch = dict(zip(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), inputs))
    logprobs, _ = policy(batch, 1.0)
    logprobs.sum().backward()
    held = sum(weight.to_local().numel() for weight in policy.parameters()) * dist.get_world_size()
    num_weights = sum(weight.numel() for weight in plain.parameters())
    gap = (logprobs - sampled[2]).abs().max()
    return {
        "noise": noise,
        "samples": all(map(torch.equal, sampled, expected)),
        "scored inside": torch.equal(scored, ppo_rlhf.token_logprobs(plain, *inputs, 1.0)[0]),
        "scored outside": torch.equal(logprobs, scored),
        "scored as sampled": bool(gap < (1e-4 if precision == "float32" else 0.1)),
        "sharded evenly": 0.9 < held / num_weights < 1.1,
        "trains": all(bool((weight.grad != 0).any()) for weight in policy.parameters()),
    }


if __name__ == "__main__":
    folder, _ = Path(sys.argv[1]), ppo_rlhf.init_ranks()
    results = {precision: sample_gathered(precision) for precision in ("float32", "bfloat16")}
    results |= {name: run(name, folder) for name in SCRIPTS}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
