"""Scripted sampling for test_dapo.py; on two ranks, training that finds signal in different rounds."""

import os
import sys
from pathlib import Path

import torch
from tiny import TINY, load, pad_right, parse, write_jsonl

import dapo

GROUP_SIZE, MAX_COMPLETION_LENGTH, OVERLONG_BUFFER = 4, 16, 0.5
# A completion by its letter: (is it right?, tokens).
KINDS = {"r": (True, 8), "w": (False, 7), "h": (True, 12), "R": (True, 16), "W": (False, 16)}
# A group by its letter: mixed, solved, not solved.
GROUPS = {"m": "rwwr", "s": "rRrr", "n": "wWww"}
# Groups of one step for each line, of one round for each word; of a word, the ranks have every other letter.
STEPS = ("mnms smns nsnm", "nmsm snns msns", "ssnn nmss snns")
MAX_ROUNDS = 3


def write_prompts(path, count):
    """Sums with prompts of different lengths, and answers of at most two digits."""
    return write_jsonl(path, [{"prompt": f"{i}+{'0' * (i % 4)}1=", "answer": str(i + 1)} for i in range(1, count + 1)])


def read_prompts(dataset):
    """The prompts that main trains on, in the order of the file."""
    _, tokenizer = load(dapo, TINY)
    _, (_, _, rows) = dapo.load_splits(dataset, 0)
    args = parse(dapo, dataset=dataset)
    return [prompt for row in rows for prompt in dapo.read_prompt(row, tokenizer, args)]


def assign(prompts, places, letters, seed=1):
    """Return {prompt: its completions' letters}, for prompts in the order in which they are picked."""
    picked = dapo.pick_rows(prompts, places, len(letters), seed)
    return {prompt["prompt"]: GROUPS.get(letter, letter) for prompt, letter in zip(picked, letters)}


def scripted_generate(tokenizer, patterns, rounds):
    """Stands for dapo.generate: writes the completions that patterns want, and adds its prompts to rounds."""
    real = dapo.generate

    def generate(model, prompt_ids, prompt_mask, max_completion_length, temperature, stop_ids, *rest, **options):
        if max_completion_length != MAX_COMPLETION_LENGTH:  # check_model asks for fewer
            return real(model, prompt_ids, prompt_mask, max_completion_length, temperature, stop_ids, *rest, **options)
        pad_id, with_logprobs, edit = rest
        assert with_logprobs and edit is None
        prompts = [
            tokenizer.decode(ids[mask == 1], skip_special_tokens=True) for ids, mask in zip(prompt_ids, prompt_mask)
        ]
        rounds.append(prompts[::GROUP_SIZE])
        completions = []
        for row, prompt in enumerate(prompts):
            is_right, length = KINDS[patterns[prompt][row % GROUP_SIZE]]
            answer = sum(map(int, prompt.removesuffix("=").split("+"))) + (not is_right)
            filling = "1" * (length - len(str(answer)) - 5)  # the two marks of thought, the box and the stop token
            text = f"<think>{filling}</think>\\boxed{{{answer}}}"
            completions.append(tokenizer(text, add_special_tokens=False)["input_ids"] + stop_ids[:1])
            assert len(completions[-1]) == length
        ids, mask = pad_right(completions, max_completion_length, pad_id)
        logprobs, _ = dapo.token_logprobs(model, prompt_ids, prompt_mask, ids, mask, max(temperature, 0.1))
        return ids, mask, logprobs.detach()

    return generate


def run(folder, run_dir):
    """Train over STEPS; return the prompts of every round of this rank."""
    _, tokenizer = load(dapo, TINY)
    dataset, rounds = str(folder / "prompts.jsonl"), []
    patterns = assign(read_prompts(dataset), 0, "".join(STEPS).replace(" ", ""))
    dapo.generate = scripted_generate(tokenizer, patterns, rounds)
    settings = {"num_steps": len(STEPS), "prompts_per_step": 4, "max_rounds": MAX_ROUNDS, "group_size": GROUP_SIZE}
    settings |= {"max_completion_length": MAX_COMPLETION_LENGTH, "overlong_buffer": OVERLONG_BUFFER}
    dapo.main(parse(dapo, dataset=dataset, run_dir=run_dir, minibatch_size=16, eval_prompts=0, **settings))
    return rounds


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    rounds = run(folder, folder / "two")
    torch.save(rounds, folder / f"{os.environ['RANK']}.pt")
