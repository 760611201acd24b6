"""Scripted sampling for test_dapo.py; on two ranks, training that finds signal in different rounds."""

import os
import sys
from pathlib import Path

import torch
from tiny import TINY, pad_right, parse
from transformers import AutoTokenizer

import dapo

# A completion by its letter: (is it right?, tokens).
KINDS = {"r": (True, 8), "w": (False, 7), "h": (True, 12), "R": (True, 16), "W": (False, 16)}
# A group by its letter: mixed, solved, not solved.
GROUPS = {"m": "rwwr", "s": "rRrr", "n": "wWww"}
GROUP_SIZE = 4
SETTINGS = {"group_size": GROUP_SIZE, "max_rounds": 3, "eval_prompts": 0}
SETTINGS |= {"max_completion_length": 16, "overlong_buffer": 0.5}
# Groups of one step for each line, of one round for each word; of a word, the ranks have every other letter.
# Over the steps: one rank is full two rounds before the other; one is full and one not at the cap; one finds nothing.
STEPS = ("mnms smns nsnm", "nmsm snns msns", "ssnn nmss snns")


def make_rows(count):
    """Sums with prompts of different lengths, and answers of at most two digits."""
    return [{"prompt": f"{i}+{'0' * (i % 4)}1=", "answer": str(i + 1)} for i in range(1, count + 1)]


def assign(rows, groups, place=0):
    """Return {prompt: its completions' letters}, for rows in the order in which they are picked from this place on."""
    picked = dapo.pick_rows(rows, place, len(groups), 1)
    return {row["prompt"]: GROUPS.get(group, group) for row, group in zip(picked, groups)}


def write_completion(prompt, letter):
    """Return the text of a completion that has, with its stop token, the tokens of its kind."""
    is_correct, length = KINDS[letter]
    answer = sum(int(term) for term in prompt.removesuffix("=").split("+"))
    if not is_correct:
        answer += 1
    filling = "1" * (length - len(str(answer)) - 5)  # the two marks of thought, the box and the stop token
    return f"<think>{filling}</think>\\boxed{{{answer}}}"


def scripted_generate(patterns, rounds):
    """Stands for dapo.generate: writes the completions that patterns want, and adds its prompts to rounds."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)

    def generate(model, prompt_ids, prompt_mask, limit, temperature, stop_ids):
        prompts = tokenizer.batch_decode(prompt_ids, skip_special_tokens=True)
        rounds.append(prompts[::GROUP_SIZE])
        completions = []
        for row, prompt in enumerate(prompts):
            text = write_completion(prompt, patterns[prompt][row % GROUP_SIZE])
            completions.append(tokenizer.encode(text, add_special_tokens=False) + stop_ids[:1])
        ids, mask = pad_right(completions, limit)
        logprobs, _ = dapo.token_logprobs(model, prompt_ids, prompt_mask, ids, mask, temperature)
        return ids, mask, logprobs.detach()

    return generate


def run(folder, run_dir):
    """Train over STEPS; return the prompts of every round of this rank."""
    rows = make_rows(36)
    rounds = []
    dapo.generate = scripted_generate(assign(rows, "".join(STEPS).replace(" ", "")), rounds)
    sizes = {"num_steps": 3, "prompts_per_step": 4, "minibatch_size": 16}
    dapo.main(parse(dapo, dataset=folder / "prompts.jsonl", run_dir=run_dir, **sizes, **SETTINGS))
    return rounds


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    rounds = run(folder, folder / "two")
    torch.save(rounds, folder / f"{os.environ['RANK']}.pt")
