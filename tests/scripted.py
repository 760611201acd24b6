"""One rollout for every script and number of ranks: python -m pytest tests/test_updates.py

Completions depend only on the prompt and on their number in its group, so that two ranks have what one has.
Started on several ranks, this file saves into a folder what scripts do with them: scripted.py FOLDER CASE ...
"""

import hashlib
import itertools
import random
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from toy import EVERY, TINY, read_jsonl, short
from transformers import AutoTokenizer

GROUP_SIZE, PROMPTS_PER_STEP = 4, 4
CASES = {name: {} for name in EVERY}
CASES["gkd"] = {"on_policy_fraction": 0.5, "source": "addition/sft.jsonl"}
CASES["ppo_rlhf"] = {"max_completion_length": 24, "sampler_weight_cap": 1.05, "kl_coef": 0.3, "gamma": 0.97}
CASES["ppo_rlhf"] |= {"learning_rate": 3e-4, "value_learning_rate": 1e-4}
SLOW = {"precision": "bfloat16", "learning_rate": 1e-5, "value_learning_rate": 1e-5}
CASES |= {f"{name} bfloat16": CASES[name] | SLOW for name in ("grpo", "gkd", "ppo_rlhf", "reward_model")}
SAVED = ("dapo", "ppo_rlhf")  # the cases whose checkpoint is resumed


def solutions(prompt):
    """Completions of one sum, with and without steps, long and short; the first is right and the second wrong."""
    terms = [int(term) for term in prompt.rstrip("=").split("+")]
    draw = random.Random(int(hashlib.sha256(prompt.encode()).hexdigest(), 16))
    for number in itertools.count():
        slip = draw.choice([0, 0, 1])
        if number < 2:
            slip = number
        total, steps = terms[0], []
        for term in terms[1:]:
            steps.append(f"{total}+{term}={total + term + slip}")
            total += term + slip
        thought = draw.choice(["", f"<think>{';'.join(steps)}</think>"])
        yield f"{thought}\\boxed{{{total}}}", draw


class Rollouts:
    """Takes the place of a script's generate."""

    def __init__(self):
        self.tokenizer = AutoTokenizer.from_pretrained(TINY)
        self.running = {}
        self.interrupted = []  # ids of sequences that stopped before the end of their script, and the rest of it

    def __call__(self, model, prompts, max_completion_length, temperature, stop_ids):
        completions = []
        for ids in prompts:
            begun = next((row for row in self.interrupted if ids[: len(row[0])] == row[0]), None)
            if begun:  # a tool may have said the digits that come next
                self.interrupted.remove(begun)
                script = begun[1]
                if len(ids) > len(begun[0]):
                    script = list(itertools.dropwhile(lambda pair: 10 <= pair[0] < 20, script))
            else:
                prompt = self.tokenizer.decode(ids).removeprefix("<|user|>").removesuffix("<|assistant|>")
                text, draw = next(self.running.setdefault((prompt, temperature), solutions(prompt)))
                tokens = (self.tokenizer.encode(text) + stop_ids[:1])[:max_completion_length]
                script = [(token, 0.2 * draw.random() - 0.1) for token in tokens]
            end = next((place for place, (token, _) in enumerate(script, 1) if token in stop_ids), len(script))
            tokens, noise = (list(values) for values in zip(*script[: min(end, max_completion_length)]))
            if len(tokens) == end < len(script):
                self.interrupted.append((ids + tokens, script[end:]))
            with torch.no_grad():
                logits = model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1].float()
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
            # A sampler that differs a little has weights other than 1.
            completions.append((tokens, [logprob + slip for logprob, slip in zip(logprobs.tolist(), noise)]))
        return completions


def run(script, folder, patch, saved=False, **settings):
    """Run two steps of a script; return the gradient of each update, metrics, and on one rank the weights.

    Each step has one update, so that its completions are the same on one rank and on two.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found = {"gradients": [], "weights": [], "sharded": True}
    step_optimizer = script.step_optimizer

    def full(tensor):
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone().flatten()

    def recorded(policy, *rest):
        found["gradients"].append(torch.cat([full(weight.grad) for weight in policy.parameters()]))
        norm = step_optimizer(policy, *rest)
        if script.WORLD_SIZE == 1:
            found["weights"].append(torch.cat([full(weight) for weight in policy.parameters()]))
        return norm

    def watched(compute):
        def computed(*given):
            logprobs = compute(*given)
            policy = next(value for value in given if isinstance(value, torch.nn.Module))
            found["sharded"] = all(isinstance(weight, DTensor) for weight in policy.parameters())
            return logprobs

        return computed

    for name in ("compute_logprobs", "add_logprobs"):
        if hasattr(script, name):
            patch.setattr(script, name, watched(getattr(script, name)))
    patch.setattr(script, "step_optimizer", recorded)
    if not saved:
        patch.setattr(script, "save", lambda *_: None)
    if hasattr(script, "generate"):
        patch.setattr(script, "generate", Rollouts())
    sizes = {"prompts_per_step": PROMPTS_PER_STEP, "group_size": GROUP_SIZE, "minibatch_size": 16, "num_steps": 2}
    sizes |= {"max_completion_length": 48, "microbatch_tokens": 200, "max_grad_norm": 1000.0, "learning_rate": 1e-4}
    sizes |= {"eval_every": 100, "eval_prompts": 6, "max_rounds": 3, "save_every": 100, "update_epochs": 1}
    if not hasattr(script.Args, "group_size"):
        sizes["prompts_per_step"] *= GROUP_SIZE
    args = short(script, folder, **sizes | settings)
    script.main(args)
    found["metrics"] = read_jsonl(f"{args.run_dir}/metrics.jsonl")
    return found


if __name__ == "__main__":
    import pytest

    torch._C._set_print_stack_traces_on_fatal_signal(True)  # of gloo's threads, too, which faulthandler cannot see
    target, cases = Path(sys.argv[1]), sys.argv[2:]  # parse changes sys.argv
    device = EVERY["grpo"].init_ranks()
    torch.distributed.destroy_process_group, destroy = lambda: None, torch.distributed.destroy_process_group
    for case in cases:
        script = EVERY[case.split()[0]]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(script, "init_ranks", lambda: device)  # once for all
            # With few tokens in a microbatch, ranks have unequal numbers of them.
            found = run(script, target / case, patch, case in SAVED, microbatch_tokens=80, **CASES[case])
        if script.RANK == 0:
            torch.save(found, target / case / "found.pt")
    destroy()
