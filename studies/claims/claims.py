"""Test the headline claims of papers with the scripts, most of them on the harder bundled task.

    python benchmark/claims.py [CLAIM ...] [--results FILE] [--jobs 2]           (default: all claims)
    python benchmark/claims.py --page                     (runs nothing; writes the page and its pictures)

The program makes the runs of the claims and prints a table of each. It adds finished runs to
benchmark/results/claims.csv, with a row for every five steps, and skips runs that are already there. Use --results to
begin a file of your own. With --page it writes benchmark/results/claims.md, tables in docs/claims.md and pictures.

CLAIMS is the table of claims: what a paper says, the runs that are compared, and the tests. A run is a separate process
with one thread. It is a script with flags, and sometimes with one of PATCHES. Claims that name the same run share it.

A test names two runs, or two stretches of steps of one run, and a column of which the first should have more. The
number of a test is the mean difference between the two, paired by seed. It uses the seeds 1 to 5, or 1 to 3 where runs
take long, and has a 95 % interval (Student's t). The verdict is
- "seen" if the interval lies above 0,
- "opposite" if it lies below 0,
- "no difference" if it contains 0 and lies within the differences that are negligible (BOUNDS),
- "floor" or "ceiling" instead of "no difference" if no difference could show, because both sides are within .05 of the
  lowest or the highest value that a share can have,
- "inconclusive" otherwise.
The first test of a claim decides. If a claim has two halves, its first two tests decide, each with its own verdict.

Tests that decide get a grade if they are seen or opposite. So do further tests that an advice on the page rests on.
- A: the test survives Holm's correction over all tests that can get a grade, and the seeds 6 to 8 show the same by
  themselves. Nobody had looked at these seeds when the claim and the test were written.
- B: it survives the correction, but the seeds 6 to 8 do not show it, or were not run.
- C: it does not survive the correction, whatever the seeds 6 to 8 show.
"""

import argparse
import csv
import importlib
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from ablations import DETAILS, UNCHANGED, edit, greedy, parse

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results" / "claims.csv"
SEEDS, BIN = (1, 2, 3, 4, 5), 5  # BIN: steps per row of the csv
UNSEEN_SEEDS = (6, 7, 8)
THREE_SEEDS = (1, 2, 3)  # for the map, the details, and runs that take long
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}  # {number of seeds: t of 95 %}
TUNING_SEED = 6  # for TUNING; not one of the seeds that decide
LONG = "--model models/long --dataset data/long --tiny --max-completion-length 112"
FLAGS = f"{LONG} --save-every 1000 --eval-every 1000 --eval-prompts 256"
# Flags in place of FLAGS: only the easy task, data/addition, has pairs and a reward model.
ON_EASY_TASK = "--num-steps 40 --eval-every 5"
# {folder: (arguments of data/long/make.py, flags of sft.py)}: models/long with another habit, made when a run needs it.
BASES = {
    "bases/rare": ("0.005", "--num-steps 100 --learning-rate 1e-3 --warmup-steps 20"),
    "bases/twice": ("0.25 0.15", "--num-steps 300 --learning-rate 1.5e-3 --warmup-steps 30"),
}

MANY = "256 samples"  # prefix of a patch: sample from the trained model, on 64 held-out prompts
OF_LONG = f"{MANY} of long sums"  # on prompts with six to eight terms
PASS = (1, 4, 16, 64, 256)

FRESH = "the first minibatch alone"  # every optimizer step then has its own rollout
ONE_MINIBATCH = [(".split(rank_minibatch_size)", ".split(rank_minibatch_size)[:1]")]
DELAYS = (1, 4, 16)


def sampled_before(delay):
    """Return edits that make the sampler some optimizer steps old and take the ratio to its log-probabilities."""
    rollout = "        batch, texts = sample_completions(policy, tokenizer, rows, args.temperature, args)"
    keep = "{key: value.clone() for key, value in policy.state_dict().items()}"
    return [
        (
            rollout,
            f"        past = [*(past if step > 1 else []), {keep}][-{delay + 1} :]\n"
            f"        policy.load_state_dict(past[0])\n{rollout}\n        policy.load_state_dict(past[-1])",
        ),
        ('part.get("old_logprobs", logprobs),', 'part["sampler_logprobs"],'),
    ]


# Changes that no flag can make: {name: [(old text, new text), ...]}. The edits of ablations.py are added below.
PATCHES = {
    "divided by both": [DETAILS["dr_grpo"][f"divided by the {what}"][1][0] for what in ("completion's length", "std")],
    "any right sum counts": [
        ("elif result in needed and {a, b} <= known:", "else:"),
        ("needed.remove(result)", "needed.discard(result)"),
    ],
    "reference follows": [
        (
            "        # rollout: sample a group",
            "        if step > 1 and step % 10 == 1:\n"
            "            ref.load_state_dict(policy.state_dict())\n"
            "        # rollout: sample a group",
        )
    ],
    FRESH: ONE_MINIBATCH,
    **{f"sampled {delay} steps ago": ONE_MINIBATCH + sampled_before(delay) for delay in DELAYS},
    "random rewards": [
        (
            "        scores = score_completions(texts, rows)\n        if stop",
            "        scores = (torch.rand(len(texts)) < 0.5).tolist()\n        if stop",
        )
    ],
    "from step 31 on measured, not trained": [
        ("args.group_size, args.baseline)", 'args.group_size, args.baseline if step > 30 else "leave_one_out")'),
        (
            "learning_rate = args.learning_rate * min(1.0,",
            "learning_rate = (args.learning_rate if step <= 30 else 1e-20) * min(1.0,",
        ),
    ],
    MANY: [],
    OF_LONG: [],
    **{
        f"{OF_LONG}, {side}": [("        return rewards\n", f"        return (2 * rewards - 1){clamp}\n")]
        for side, clamp in (("both", ""), ("right ones alone", ".clamp(min=0)"), ("wrong ones alone", ".clamp(max=0)"))
    },
}
PATCHES |= {
    f"{script}: {name}": edits for script, found in DETAILS.items() for name, (_, edits) in found.items() if edits
}

COLUMNS = {  # {column: key of metrics.jsonl}; means over the steps of a row, except for SUMS
    "completions": "observed/completions",
    "seconds": "perf/step_seconds",
    "accuracy": "eval/accuracy",
    "pass@1": "eval/pass@1",
    "pass@4": "eval/pass@4",
    "reward": "reward/mean",
    "length": "rollout/length_mean",
    "truncated": "rollout/truncated",
    "entropy": "policy/entropy",
    "kl": "policy/approx_kl",
    "ref_kl": "rollout/ref_kl_sum",
    "clipped_low": "policy/clip_fraction_low",
    "clipped_high": "policy/clip_fraction_high",
    "grad_norm": "optim/grad_norm",
    **{
        name: f"observed/{name}"
        for name in "clipped length_right length_wrong dots_right dots_wrong works all_right all_wrong".split()
    },
    **{f"reward_{kind}": f"observed/reward_{kind}" for kind in ("few", "many")},
    "score": "eval/score",
    "chosen": "eval/pair_chosen_log_ratio",
    "rejected": "eval/pair_rejected_log_ratio",
    "pass@1 of 256": "observed/pass@1",
    **{f"{name}@{k} of 256": f"observed/{name}@{k}" for name in ("pass", "maj") for k in PASS[1:]},
    "signal": "observed/signal",
}
SUMS = ("completions", "seconds")
# {column: largest difference that is negligible, in the column's unit}; in other columns, every difference counts.
SHARES = "reward reward_few reward_many accuracy works truncated all_right all_wrong clipped pass@1".split()
SHARES += ["maj@64 of 256", *(f"pass@{k} of 256" for k in PASS)]
BOUNDS = dict.fromkeys((*SHARES, "score"), 0.05)
BOUNDS |= dict.fromkeys(("dots_wrong", "dots_right", "length"), 5)  # completions have at most 112 tokens
BOUNDS |= {"entropy": 0.02, "chosen": 0.2}  # nats
TITLES = {  # titles of columns whose names are not clear by themselves
    "seconds": "seconds of training",
    "accuracy": "greedy accuracy",
    "length": "tokens of a completion",
    "dots_wrong": "dots of a wrong completion",
    "dots_right": "dots of a right completion",
    "truncated": "share cut off at the limit",
    "works": "share showing work",
    "reward_few": "reward of three to five terms",
    "reward_many": "reward of six to eight terms",
    "all_right": "groups all right",
    "all_wrong": "groups all wrong",
    "entropy": "entropy, nats per token",
    "clipped": "tokens clipped",
    "grad_norm": "gradient norm",
    "signal": "the gradient's squared signal-to-noise ratio",
    "ref_kl": "KL from the start, nats per completion",
    "score": "score of the reward model",
    "chosen": "log-ratio of the chosen",
    "rejected": "log-ratio of the rejected",
    "maj@64 of 256": "majority of 64",
    **{f"pass@{k} of 256": f"pass@{k}" for k in PASS},
}


SIDES = {  # sides with other names in the pictures
    "with 1/length": "Dr. GRPO with 1/length",
    "with both": "Dr. GRPO with 1/length and 1/std",
    "DAPO, 0.2": "DAPO (upper clip 0.2)",
    "DAPO, 0.2, mean per completion": "DAPO, mean per completion",
    "beta 0.1": "β = 0.1",
    "beta 0.5": "β = 0.5",
}


@dataclass
class Test:
    """A test that the first side has more of a column than the second, over these steps (or completions)."""

    column: str
    more: str
    less: str
    first: int
    last: int
    less_from: tuple | None = None  # first and last of the second side, if they differ
    by: str = "step"
    later: bool = False  # whether it was written after some of its runs had been seen


@dataclass
class Claim:
    """A claim of a paper and the runs that test it, {side: script and flags [| patch]}; the first tests decide."""

    says: str
    runs: dict
    tests: list
    halves: int = 1  # parts of the claim, each with a test that decides
    seeds: tuple = SEEDS
    setting: str = ""  # how it differs from other claims with the same text
    advised: tuple = ()  # places of further tests that are graded because an advice on the page rests on them

    def graded(self):
        """Return the places of the tests that can get a grade."""
        return *range(self.halves), *self.advised


CLIPPED = "cispo: the clipped objective of dapo.py"
LEARN = "--learning-rate 3e-4 --num-steps 40"
GRPO, DR_GRPO, DAPO = f"grpo --kl-coef 0 {LEARN}", f"dr_grpo {LEARN}", f"dapo {LEARN}"
SMALL_GROUPS = f"{DAPO} --group-size 4 --prompts-per-step 32"
RARE = "--model bases/rare --prompts-per-step 32 --minibatch-size 16 --learning-rate 1e-4 --num-steps 100"
MANY_FROM = f"--eval-prompts 64 | {MANY}"
STAYS = "--learning-rate 1e-20 --num-steps 25"
RATES, UPDATES = ("1e-4", "3e-4", "1e-3"), (1, 4, 16)
FAMILY = {
    "grpo": "grpo --kl-coef 0",
    "dr_grpo": "dr_grpo",
    "dapo": "dapo --max-rounds 1",
    "gspo": "gspo",
    "cispo": "cispo",
}
GSPO_WIDE = "gspo --clip-eps-low 3e-3 --clip-eps-high 4e-3"  # ten times the paper's range


def cell(name, rate, updates):
    """Return the run of a script (or a script with flags) with a learning rate and a number of updates per rollout."""
    return f"{FAMILY.get(name, name)} --learning-rate {rate} --num-steps 40 --minibatch-size {128 // updates}"


def fresh(name, rate, patch=FRESH):
    """Return a run with as many optimizer steps as the first fifteen rollouts of cell.

    Each step trains on the first minibatch of a fresh rollout.
    """
    return cell(name, rate, 16).replace("--num-steps 40", "--num-steps 240") + f" | {patch}"


REUSED = ("grpo", "gspo", "cispo")
TUNING = {("reinforce", rate): f"reinforce --learning-rate {rate} --num-steps 40" for rate in RATES}
TUNING |= {
    ("ppo_rlhf", rate, other): f"ppo_rlhf --reward-model none --kl-coef 0 --num-steps 40 --learning-rate {rate}"
    f" --value-learning-rate {other}"
    for rate in RATES
    for other in RATES
}
SIGNAL = [
    Test("reward", "dynamic", "one round", 16, 25),
    Test("reward", "dynamic", "one round", 2560, 5120, by="completions"),
    Test("reward", "dynamic", "one round", 31, 40, later=True),
]

REPEATS = "with a model that repeats some of its steps"

CLAIMS = {
    "dr_grpo_length": Claim(
        "Liu 2025, figures 1 and 5: wrong completions grow longer under GRPO, not under Dr. GRPO",
        {"GRPO": GRPO, "Dr. GRPO": DR_GRPO, "GRPO with its KL term": f"grpo {LEARN}"},
        [
            Test("dots_wrong", "GRPO", "Dr. GRPO", 31, 40),
            Test("truncated", "GRPO", "Dr. GRPO", 31, 40),
            Test("reward", "Dr. GRPO", "GRPO", 31, 40),
            Test("dots_wrong", "GRPO", "GRPO with its KL term", 31, 40),
            Test("dots_right", "GRPO", "Dr. GRPO", 31, 40, later=True),
        ],
    ),
    "dr_grpo_parts": Claim(
        "Liu 2025, section 3.1: dividing by the length favours long wrong completions",
        {
            "Dr. GRPO": DR_GRPO,
            "with 1/length": f"{DR_GRPO} | dr_grpo: divided by the completion's length",
            "with 1/std": f"{DR_GRPO} | dr_grpo: divided by the std",
            "with both": f"{DR_GRPO} | divided by both",
            "GRPO": GRPO,
            # These runs were added to compare rewards by the number of terms:
            "Dr. GRPO, 20 steps": "dr_grpo --learning-rate 3e-4 --num-steps 20",
            "with 1/std, 20 steps": "dr_grpo --learning-rate 3e-4 --num-steps 20 | dr_grpo: divided by the std",
        },
        [
            Test("dots_wrong", "with 1/length", "Dr. GRPO", 31, 40),
            Test("dots_wrong", "with 1/std", "Dr. GRPO", 31, 40),
            Test("dots_wrong", "with both", "with 1/length", 31, 40),
            Test("dots_wrong", "with 1/length", "Dr. GRPO", 11, 20, later=True),
            Test("dots_wrong", "with 1/std", "Dr. GRPO", 11, 20, later=True),
            Test("dots_wrong", "GRPO", "with both", 31, 40, later=True),
            Test("reward", "Dr. GRPO", "with 1/length", 31, 40, later=True),
            Test("reward", "Dr. GRPO", "with 1/std", 31, 40, later=True),
            Test("works", "Dr. GRPO", "with 1/length", 6, 20, later=True),
            Test("works", "Dr. GRPO", "with 1/std", 6, 20, later=True),
            *(
                Test(f"reward_{n}", "with 1/std, 20 steps", "Dr. GRPO, 20 steps", 6, 20, later=True)
                for n in ("many", "few")
            ),
        ],
    ),
    "dapo_signal": Claim(
        "Yu 2025, figure 3b: more and more groups are all right and teach nothing",
        {"GRPO": GRPO},
        [
            Test("all_right", "GRPO", "GRPO", 31, 40, (1, 10)),
            Test("all_wrong", "GRPO", "GRPO", 1, 10, (31, 40), later=True),
        ],
    ),
    "dapo_sampling": Claim(
        "Yu 2025, figure 6: dynamic sampling reaches the same reward in fewer steps",
        {"dynamic": f"{DAPO} --max-rounds 4", "one round": f"{DAPO} --max-rounds 1"},
        SIGNAL,
    ),
    "dapo_groups_of_4": Claim(
        "Yu 2025, figure 6: dynamic sampling reaches the same reward in fewer steps",
        {"dynamic": f"{SMALL_GROUPS} --max-rounds 4", "one round": f"{SMALL_GROUPS} --max-rounds 1"},
        SIGNAL,
        setting="in groups of four",
    ),
    "dapo_clip": Claim(
        "Yu 2025, figure 2: a higher upper clip keeps entropy from collapsing",
        {
            "0.28": cell("dapo", "1e-4", 16),
            "0.2": cell("dapo --max-rounds 1 --clip-eps-high 0.2", "1e-4", 16),
            "0.28, 3e-4": f"{DAPO} --minibatch-size 8",
            "0.2, 3e-4": f"{DAPO} --minibatch-size 8 --clip-eps-high 0.2",
        },
        [
            Test("entropy", "0.28", "0.2", 31, 40),
            Test("reward", "0.28", "0.2", 31, 40),
            Test("entropy", "0.28, 3e-4", "0.2, 3e-4", 31, 40),
            Test("reward", "0.28, 3e-4", "0.2, 3e-4", 31, 40),
        ],
    ),
    "dapo_overlong": Claim(
        "Yu 2025, figure 5: a penalty that rises towards the length limit makes training stable",
        {
            "penalty": f"{DAPO} --max-completion-length 88",
            "none": f"{DAPO} --max-completion-length 88 --overlong-buffer 0",
        },
        [Test("truncated", "none", "penalty", 31, 40), Test("reward", "penalty", "none", 31, 40)],
    ),
    "dapo_overlong_twice": Claim(
        "Yu 2025, figure 5: a penalty that rises towards the length limit makes training stable",
        {
            "penalty": f"dapo --model bases/twice --max-completion-length 88 {LEARN}",
            "none": f"dapo --model bases/twice --max-completion-length 88 --overlong-buffer 0 {LEARN}",
        },
        [
            Test("truncated", "none", "penalty", 31, 40),
            Test("reward", "penalty", "none", 31, 40),
            Test("length", "none", "penalty", 31, 40),
            Test("truncated", "none", "penalty", 11, 25, later=True),
            Test("reward", "penalty", "none", 11, 25, later=True),
        ],
        setting=REPEATS,
    ),
    "rare_habit": Claim(
        "Chen 2025, section 3.1: a clip keeps rare tokens rare; CISPO (1) and a higher clip (2) spread them",
        {
            "CISPO": f"cispo {RARE}",
            "DAPO": f"dapo --max-rounds 1 {RARE}",
            "DAPO, 0.2": f"dapo --max-rounds 1 --clip-eps-high 0.2 {RARE}",
            "GRPO": f"grpo --kl-coef 0 {RARE}",
            "CISPO, DAPO's objective": f"cispo {RARE} | {CLIPPED}",
        },
        [
            Test("works", "CISPO", "CISPO, DAPO's objective", 1, 100, later=True),  # the clip alone
            Test("works", "DAPO", "DAPO, 0.2", 1, 100),
            Test("works", "CISPO", "DAPO", 1, 100),  # decided at first, but differs in more than the clip
            Test("works", "CISPO", "GRPO", 1, 100),
            Test("entropy", "DAPO", "DAPO, 0.2", 1, 100),
            Test("works", "DAPO, 0.2", "GRPO", 1, 100, later=True),
        ],
        halves=2,
    ),
    "rare_habit_parts": Claim(
        "Yu 2025, section 3.3: a mean over each completion gives tokens of long ones too little weight",
        {
            "GRPO": f"grpo --kl-coef 0 {RARE}",
            "GRPO, one mean over tokens": f"grpo --kl-coef 0 {RARE} | grpo: one mean over all tokens",
            "DAPO, 0.2": f"dapo --max-rounds 1 --clip-eps-high 0.2 {RARE}",
            "DAPO, 0.2, mean per completion": f"dapo --max-rounds 1 --clip-eps-high 0.2 {RARE}"
            " | dapo: mean per completion",
        },
        [
            # These tests were written after the results of rare_habit had been seen.
            Test("works", "GRPO, one mean over tokens", "GRPO", 1, 100, later=True),
            Test("works", "DAPO, 0.2", "DAPO, 0.2, mean per completion", 1, 100, later=True),
            Test("works", "DAPO, 0.2", "GRPO, one mean over tokens", 1, 100, later=True),
            Test("works", "GRPO, one mean over tokens", "GRPO", 91, 100, later=True),
        ],
    ),
    **{
        f"cispo_{rate}": Claim(
            "Chen 2025, figure 2: with many updates per rollout CISPO learns faster than DAPO (1) and GRPO (2)",
            {name: cell(name, rate, 16) for name in ("cispo", "dapo", "grpo")}
            | {"dapo's objective": f"{cell('cispo', rate, 16)} | {CLIPPED}"},
            [
                Test("reward", "cispo", "dapo", 6, 15),
                Test("reward", "cispo", "grpo", 6, 15),
                Test("reward", "cispo", "dapo's objective", 6, 15, later=True),
                Test("reward", "cispo", "dapo's objective", 31, 40, later=True),
                Test("reward", "cispo", "dapo", 31, 40),
                Test("reward", "cispo", "grpo", 31, 40),
            ],
            halves=2,
        )
        for rate in RATES[:2]
    },
    **{
        f"gspo_{updates}_{rate}": Claim(
            "Zheng 2025, figures 1 and 2: GSPO learns faster than GRPO (1) and clips far more tokens (2)",
            {
                "GSPO": cell("gspo", rate, updates),
                "GRPO": cell("grpo", rate, updates),
                "GSPO, ten times wider": cell(GSPO_WIDE, rate, updates),
            },
            [
                Test("reward", "GSPO", "GRPO", 6, 10, later=True),
                Test("clipped", "GSPO", "GRPO", 31, 40),
                Test("reward", "GSPO", "GRPO", 31, 40),
                Test("reward", "GSPO, ten times wider", "GRPO", 31, 40),
                Test("reward", "GSPO, ten times wider", "GRPO", 6, 10, later=True),
                Test("reward", "GSPO, ten times wider", "GSPO", 6, 10, later=True),
            ],
            halves=2,
        )
        for updates in (4, 16)
        for rate in RATES
    },
    "gspo_stability": Claim(
        "Zheng 2025, abstract: GSPO is more stable (in the paper: for mixtures of experts)",
        {f"{name.upper()}, 16, 3e-4": cell(name, "3e-4", 16) for name in ("gspo", "grpo")},
        [Test("reward", "GSPO, 16, 3e-4", "GRPO, 16, 3e-4", 31, 40, later=True)],
    ),
    **{
        f"reuse_{rate}": Claim(
            "Often said: many updates per rollout break training",
            {f"{name}, reused": cell(name, rate, 16) for name in REUSED}
            | {f"{name}, fresh": fresh(name, rate) for name in REUSED}
            | {"grpo, one update of 128": cell("grpo", rate, 1)},
            [
                *(Test("reward", f"{name}, fresh", f"{name}, reused", 161, 240, (11, 15)) for name in REUSED),
                Test("reward", "grpo, fresh", "grpo, reused", 1, 80, (1, 5)),
                Test("reward", "grpo, one update of 128", "grpo, fresh", 31, 40, (161, 240)),
            ],
            seeds=THREE_SEEDS,
        )
        for rate in RATES[:2]
    },
    "stale": Claim(
        "Often said: the older the sampler, the less the policy learns",
        {"0 steps old": fresh("grpo", "1e-4")}
        | {f"{n} steps old": fresh("grpo", "1e-4", f"sampled {n} steps ago") for n in DELAYS},
        [
            *(Test("reward", "0 steps old", f"{n} steps old", 161, 240) for n in DELAYS[::-1]),
            Test("clipped", "16 steps old", "1 steps old", 161, 240),
        ],
        seeds=THREE_SEEDS,
    ),
    "process": Claim(
        "Shao 2024, figure 5: a reward for every step beats a reward for the answer",
        {
            "answer": f"grpo {LEARN}",
            "steps": f"grpo_process {LEARN}",
            "any right sum": f"grpo_process {LEARN} | any right sum counts",
        },
        [Test("reward", "steps", "answer", 31, 40), Test("reward", "any right sum", "answer", 31, 40)],
    ),
    "process_twice": Claim(
        "Shao 2024, figure 5: a reward for every step beats a reward for the answer",
        {
            "answer": f"grpo --model bases/twice {LEARN}",
            "steps": f"grpo_process --model bases/twice {LEARN}",
            "any right sum": f"grpo_process --model bases/twice {LEARN} | any right sum counts",
        },
        [
            Test("reward", "steps", "answer", 31, 40),
            Test("reward", "any right sum", "answer", 31, 40),
            Test("truncated", "any right sum", "answer", 31, 40),
        ],
        setting=REPEATS,
    ),
    "grpo_iterative": Claim(
        "Shao 2024, figure 6: a reference that follows the policy lets it learn more",
        {
            "follows": f"grpo --kl-coef 0.5 {LEARN} | reference follows",
            "stays": f"grpo --kl-coef 0.5 {LEARN}",
            "follows, 0.04": f"grpo {LEARN} | reference follows",
            "stays, 0.04": f"grpo {LEARN}",
        },
        [
            Test("reward", "follows", "stays", 31, 40),
            Test("dots_wrong", "follows", "stays", 31, 40),
            Test("reward", "follows, 0.04", "stays, 0.04", 31, 40),
            Test("dots_wrong", "follows, 0.04", "stays, 0.04", 31, 40),
        ],
    ),
    "grpo_sharpens": Claim(
        "Shao 2024, figure 7: training improves the majority vote, and not the best of many answers",
        {
            "after": f"grpo {LEARN} {MANY_FROM}",
            "before": f"grpo --num-steps 0 {MANY_FROM}",
            "after, long sums": f"grpo {LEARN} {MANY_FROM} of long sums",
            "before, long sums": f"grpo --num-steps 0 {MANY_FROM} of long sums",
        },
        [
            *(
                Test(f"{column} of 256", "after, long sums", "before, long sums", 40, 40, (0, 0))
                for column in ("maj@64", "pass@1", "pass@16", "pass@256")
            ),
            # These tests decided at first, but pass@256 is at its ceiling on sums of any length:
            *(
                Test(f"{column} of 256", "after", "before", 40, 40, (0, 0))
                for column in ("maj@64", "pass@16", "pass@256")
            ),
        ],
    ),
    "reinforce_baseline": Claim(
        "Ahmadian 2024, section 2.3: the mean reward of the others as baseline makes the gradient less noisy",
        {
            "leave_one_out": f"reinforce {LEARN}",
            "group_mean": f"reinforce --baseline group_mean {LEARN}",
            "none": f"reinforce --baseline none {LEARN}",
            # The same 25 batches with a fixed policy: models/long, or models/long after 30 steps.
            **{f"{name}, at the start": f"reinforce --baseline {name} {STAYS}" for name in ("leave_one_out", "none")},
            "none, rewards -1 and 1, at the start": f"reinforce --baseline none {STAYS}"
            " | reinforce: --baseline none, rewards -1 and 1",
            **{
                f"{name}, after 30 steps": f"reinforce --baseline {name} --learning-rate 3e-4 --num-steps 55"
                " | from step 31 on measured, not trained"
                for name in ("leave_one_out", "none")
            },
        },
        [
            Test("signal", "leave_one_out, at the start", "none, at the start", 25, 25),
            Test("signal", "leave_one_out, after 30 steps", "none, after 30 steps", 55, 55),
            Test("signal", "leave_one_out, at the start", "none, rewards -1 and 1, at the start", 25, 25),
            Test("reward", "leave_one_out", "none", 31, 40),
            Test("reward", "leave_one_out", "group_mean", 31, 40),
        ],
    ),
    "rloo_ppo": Claim(
        "Ahmadian 2024, abstract: REINFORCE with that baseline is better than PPO, and simpler",
        {"RLOO": TUNING["reinforce", "3e-4"], "PPO": TUNING["ppo_rlhf", "1e-4", "1e-4"]},  # the best on TUNING_SEED
        [
            Test("reward", "RLOO", "PPO", 31, 40),
            Test("reward", "RLOO", "PPO", 6, 15),
            Test("seconds", "PPO", "RLOO", 40, 40),
        ],
    ),
    "one_sided": Claim(
        "Zhu 2025, figure 1: learning from wrong answers alone keeps pass@k, from right ones alone lowers it",
        {
            side: f"reinforce --baseline none {LEARN} --eval-prompts 64 | {OF_LONG}, {side}"
            for side in ("wrong ones alone", "right ones alone", "both")
        },
        [
            Test("pass@256 of 256", "wrong ones alone", "right ones alone", 40, 40),
            Test("pass@16 of 256", "wrong ones alone", "right ones alone", 40, 40),
            Test("pass@1 of 256", "right ones alone", "wrong ones alone", 40, 40),
            Test("pass@1 of 256", "both", "right ones alone", 40, 40),
        ],
        seeds=THREE_SEEDS,
    ),
    "random_rewards": Claim(
        "Shao 2025, section 4: random rewards teach what the clip favours, and nothing without a clip",
        {
            "clip": f"{cell('grpo', '1e-4', 16)} | random rewards",
            "no clip": f"{cell('grpo --clip-eps 1000 --kl-coef 0', '1e-4', 16)} | random rewards",
        },
        [
            Test("accuracy", "clip", "no clip", 40, 40),
            Test("works", "clip", "no clip", 31, 40),
            Test("entropy", "no clip", "clip", 31, 40),
        ],
        seeds=THREE_SEEDS,
    ),
    "ppo_penalty": Claim(
        "Gao 2022, figure 1: optimised too far, true quality falls (1), the reward model's score rises (2)",
        {"no penalty": f"ppo_rlhf --kl-coef 1e-9 {ON_EASY_TASK}", "penalty": f"ppo_rlhf {ON_EASY_TASK}"},
        [
            Test("accuracy", "no penalty", "no penalty", 10, 15, (36, 40)),
            Test("score", "no penalty", "no penalty", 36, 40, (10, 15)),
            Test("accuracy", "penalty", "no penalty", 36, 40),
            Test("ref_kl", "no penalty", "penalty", 36, 40),
        ],
        halves=2,
    ),
    "dpo_displacement": Claim(
        "Razin 2024, figure 1: DPO makes the chosen responses less likely, too",
        {"beta 0.1": f"dpo --beta 0.1 {ON_EASY_TASK}", "beta 0.5": f"dpo {ON_EASY_TASK}"},
        [
            Test("chosen", "beta 0.1", "beta 0.1", 1, 5, (36, 40)),
            Test("chosen", "beta 0.5", "beta 0.5", 1, 5, (36, 40)),
            Test("chosen", "beta 0.5", "beta 0.1", 36, 40),
            Test("accuracy", "beta 0.5", "beta 0.1", 40, 40),
        ],
        advised=(3,),  # the advice is to raise beta
    ),
}
MAP = {(name, rate, updates): cell(name, rate, updates) for name in FAMILY for rate in RATES for updates in UPDATES}
PROMPTS = (4, 16, 64)  # prompts per rollout, with one update each, until 5,120 completions have been sampled
BATCH = {
    (prompts, rate): cell("grpo", rate, 1)
    if prompts == 16
    else f"grpo --kl-coef 0 --learning-rate {rate} --num-steps {640 // prompts} --warmup-steps {128 // prompts}"
    f" --prompts-per-step {prompts} --minibatch-size {8 * prompts}"
    for prompts in PROMPTS
    for rate in RATES
}
ONLINE = ("grpo", "reinforce", "dr_grpo", "dapo", "gspo", "cispo", "grpo_process")
SEEN_ON_EASY_TASK = {
    "one optimizer step per rollout",
    "ratio per token, same clip range",
    "a gradient through the ratio",
    "each token rewarded by the steps before it",
    "every completion normalised by itself",
}
DONE_OTHERWISE = {  # {(script, detail): run}: changes of ablations.py whose effect data/addition hides
    (script, name): f"{script} {flags} {LEARN}".replace("  ", " ") + f" | {script}: {name}" * bool(edits)
    for script in ONLINE
    for name, (flags, edits) in DETAILS[script].items()
    if name not in SEEN_ON_EASY_TASK and "bfloat16" not in name
}
PAGE = ROOT / "docs" / "claims.md"
ALL_TABLES, TABLES_LINK = RESULTS.with_suffix(".md"), "../benchmark/results/claims.md"  # the link is from docs/
PICTURES = {  # {claim: (title, sides, {column: unit})}
    "dr_grpo_parts": (
        "Filler dots without a KL term: GRPO, Dr. GRPO, and Dr. GRPO with GRPO's divisions put back",
        ("Dr. GRPO", "with 1/length", "with both", "GRPO"),
        {"dots_wrong": "tokens", "truncated": "share of completions", "reward": "share of right answers"},
    ),
    "rare_habit_parts": (
        "A rare habit, showing the work first: one mean over all tokens against a mean per completion",
        ("GRPO", "GRPO, one mean over tokens", "DAPO, 0.2, mean per completion", "DAPO, 0.2"),
        {"works": "share of completions", "length": "tokens", "reward": "share of right answers"},
    ),
    "dpo_displacement": (
        "DPO with two values of β: log-ratios of held-out pairs to the reference",
        ("beta 0.1", "beta 0.5"),
        {"chosen": "nats per response", "rejected": "nats per response"},
    ),
}
MEASURED = {"reward": ".3f", "accuracy": ".3f", "length": ".1f", "dots_wrong": ".2f", "truncated": ".3f"}
MEASURED |= {"entropy": ".3f", "grad_norm": ".3f"}
SETS = {"map": MAP, "batch": BATCH, "details": DONE_OTHERWISE, "tuning": TUNING}
SEEDS_OF_SETS = {"map": THREE_SEEDS, "batch": THREE_SEEDS, "details": THREE_SEEDS, "tuning": (TUNING_SEED,)}


# ---- a run


def make_base(name):
    """Make one of BASES in runs/ if it is missing: train models/long a little more with sft.py."""
    made, (habits, flags) = ROOT / "runs" / name, BASES[name]
    if not made.exists():
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, ROOT / "data/long/make.py", folder, *habits.split()], check=True)
            flags = f"--max-completion-length 128 {flags} --eval-prompts 0 --run-dir {folder}/run".split()
            program = [sys.executable, ROOT / "sft.py", "--model", ROOT / "models/long", "--tiny"]
            program += ["--dataset", f"{folder}/sft.jsonl", *flags]
            subprocess.run(program, check=True, capture_output=True)
            made.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(f"{folder}/run/checkpoint", made)


def observe(script, patch, flags):
    """Run a script in this process; log more about every rollout, such as the lengths of right completions."""
    import torch
    from transformers import AutoTokenizer

    sys.path[:0] = [os.getcwd(), str(ROOT)]
    module = importlib.import_module(script)
    args = parse(module, *flags)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    plus, dot, think = tokenizer.convert_tokens_to_ids(["+", ".", "<think>"])
    plain, plain_mean = getattr(module, "rollout_metrics", None), module.mean_metrics

    def rollout_metrics(batch, *given):
        metrics, mask = plain(batch, *given), batch["completion_mask"].bool()
        metrics["observed/completions"] = (len(mask), 1)
        if not given:  # ppo_rlhf.py has no groups
            return metrics
        rewards, group_size = given
        right = rewards > 0.5
        groups = right.view(-1, group_size)
        terms = 1 + (batch["prompt_ids"] == plus).sum(1)
        found = {"works": batch["completion_ids"][:, 0] == think}
        found |= {"all_right": groups.all(1), "all_wrong": ~groups.any(1)}
        for name, values in (("length", mask.sum(1)), ("dots", (mask & (batch["completion_ids"] == dot)).sum(1))):
            found |= {f"{name}_right": values[right], f"{name}_wrong": values[~right]}
        found |= {"reward_few": rewards[terms <= 5], "reward_many": rewards[terms > 5]}
        return metrics | {f"observed/{name}": (values.sum(), len(values)) for name, values in found.items()}

    def mean_metrics(collected):
        metrics = plain_mean(collected)
        if "observed/works" in metrics:  # not those of an evaluation
            clipped = [metrics.get(f"policy/clip_fraction_{side}", 0.0) for side in ("low", "high")]
            metrics["observed/clipped"] = sum(clipped)
        return metrics

    if script != "dpo":  # dpo.py has no completions
        module.rollout_metrics, module.mean_metrics = rollout_metrics, mean_metrics
    torch.set_num_threads(1)
    signal = watch_gradients(module)
    module.main(args)
    if (found := signal()) is not None:
        at_the_end("run/metrics.jsonl", {"observed/signal": found})
    if script == "dpo":  # dpo.py does not sample
        at_the_end("run/metrics.jsonl", {"eval/accuracy": greedy("run/checkpoint")["greedy accuracy"]})
    if patch.startswith(MANY):
        model = "run/checkpoint" if Path("run/checkpoint").exists() else "models/long"
        at_the_end("run/metrics.jsonl", sample_many(module, model, args.seed, OF_LONG in patch))


def watch_gradients(module):
    """Return a function that returns the squared signal-to-noise ratio of the gradients, or None.

    It uses the steps that do not move the policy and needs at least two. The ratio is the squared norm of the mean
    gradient, minus what the variance adds to it, divided by the variance.
    """
    import torch

    plain, total, squares = module.step_optimizer, 0.0, []

    def step_optimizer(policy, optimizer, learning_rate, max_grad_norm):
        nonlocal total
        if learning_rate <= 1e-20:
            gradient = torch.cat([weight.grad.flatten() for weight in policy.parameters()]).double()
            total = total + gradient
            squares.append(gradient.square().sum().item())
        return plain(policy, optimizer, learning_rate, max_grad_norm)

    def signal():
        if len(squares) < 2:
            return None
        n, sum_of_squares = len(squares), sum(squares)
        squared_signal = (total.square().sum().item() - sum_of_squares) / (n * (n - 1))
        return squared_signal / (sum_of_squares / n - squared_signal)

    module.step_optimizer = step_optimizer
    return signal


def at_the_end(log, metrics):
    """Append metrics to a log, for its last step."""
    last = json.loads(Path(log).read_text().splitlines()[-1])["step"]
    with Path(log).open("a") as file:
        file.write(json.dumps({"step": last, **metrics}) + "\n")


def sample_many(module, model, seed, of_long):
    """Return pass@k and the accuracy of the majority of k answers, from 256 completions per prompt."""
    import torch
    from transformers import AutoTokenizer

    module.init_ranks()
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = module.LogprobModel(module.load_model(model, tokenizer))
    args = parse(module, *f"{LONG} --rollout-batch-size 256 --eval-prompts 128".split())
    _, prompts = module.load_rows(args, tokenizer)
    prompts = [prompt for prompt in prompts if not of_long or prompt["prompt"].count("+") >= 5][:64]
    repeated = [prompt for prompt in prompts for _ in range(PASS[-1])]
    torch.manual_seed(seed)
    _, texts = module.sample_completions(policy, tokenizer, repeated, 1.0, args)
    answers = [text and module.parse_answer(text) for text in map(module.extract_answer, texts)]
    found = dict.fromkeys([f"observed/{name}@{k}" for name in ("pass", "maj") for k in PASS], 0.0)
    for i, prompt in enumerate(prompts):
        own, gold = answers[i * PASS[-1] : (i + 1) * PASS[-1]], module.parse_answer(prompt["answer"])
        for k in PASS:
            all_wrong = math.comb(len(own) - own.count(gold), k) / math.comb(len(own), k)
            votes = [Counter(own[j : j + k]).most_common(1)[0][0] for j in range(0, len(own), k)]
            found[f"observed/pass@{k}"] += (1 - all_wrong) / len(prompts)
            found[f"observed/maj@{k}"] += votes.count(gold) / len(votes) / len(prompts)
    return found


def measure(run, seed):
    """Make a run and return its rows, [{column: value}]. If it fails, print the error and return no rows."""
    command, _, patch = run.partition(" | ")
    script, *flags = command.split()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("models", "data", "runs/bases"):
            Path(folder, Path(name).name).symlink_to(ROOT / name)
        source = (ROOT / f"{script}.py").read_text(encoding="utf-8")
        Path(folder, f"{script}.py").write_text(edit(source, PATCHES[patch] if patch else []), encoding="utf-8")
        program = [sys.executable, __file__, "observe", script, patch]
        program += [*FLAGS.split() * (ON_EASY_TASK not in run), *flags, "--seed", str(seed), "--run-dir", "run"]
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(f"{run}, seed {seed} failed: {done.stderr.strip()[-300:]}", flush=True)
            return []
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return [{"run": run, "seed": seed, **row} for row in rows_of(lines)]


def rows_of(lines):
    """Return a row for every five steps, with means of the logged values, or sums from the beginning for SUMS."""
    rows, sums = [], dict.fromkeys(SUMS, 0.0)
    for first in range(1, lines[-1]["step"] + 1, BIN) if lines[-1]["step"] else (0,):
        part = [line for line in lines if first <= line["step"] < first + BIN]
        row = {"step": part[-1]["step"]}
        for column, key in COLUMNS.items():
            values = [line[key] for line in part if line.get(key) is not None]
            sums |= {column: sums[column] + sum(values)} if column in sums else {}
            value = sums[column] if column in sums else statistics.mean(values) if values else None
            row[column] = "" if value is None else f"{value:.5g}"
        rows.append(row)
    return rows


def read(path=RESULTS):
    """Return the rows of a csv as {(run, seed): [{column: number or None}]}."""
    found = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = row.pop("run"), int(row.pop("seed"))
            found.setdefault(key, []).append({name: float(value) if value else None for name, value in row.items()})
    return found


# ---- the verdict


def value_of(rows, column, first, last, by="step"):
    """Return the mean of a column over the rows of these steps (or completions), or None without values."""
    values = [row[column] for row in rows if first <= row[by] <= last and row[column] is not None]
    return statistics.mean(values) if values else None


def sides_of(claim, test, found, seeds):
    """Return the two lists that a test compares, each with a number or None per seed."""
    stretches = (test.more, test.first, test.last), (test.less, *(test.less_from or (test.first, test.last)))
    return [
        [value_of(found.get((claim.runs[side], seed), []), test.column, first, last, test.by) for seed in seeds]
        for side, first, last in stretches
    ]


def interval(more, less):
    """Return the mean of the paired differences and the half-width of its 95 % interval."""
    differences = [a - b for a, b in zip(more, less, strict=True)]
    half = STUDENT[len(differences)] * statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.mean(differences), half


def effect(more, less):
    """Return the mean of the paired differences and the half-width of its interval, as text."""
    mean, half = interval(more, less)
    return f"{mean:+.3g} ± {half:.2g}"


def verdict(column, more, less):
    """Return the verdict on two lists of numbers of a column, with one number per seed."""
    mean, half = interval(more, less)
    if abs(mean) > half:
        return "seen" if mean > 0 else "opposite"
    if abs(mean) + half > BOUNDS.get(column, 0):
        return "inconclusive"
    means = statistics.mean(more), statistics.mean(less)
    if column in SHARES and max(means) < 0.05:
        return "floor"
    return "ceiling" if column in SHARES and min(means) > 0.95 else "no difference"


def chance(more, less):
    """Return the p-value of the mean of the paired differences (two-sided, Student's t)."""
    (mean, half), n = interval(more, less), len(more)
    edge = math.atan(abs(mean) / half * STUDENT[n] / math.sqrt(n - 1))
    # If t = sqrt(n - 1) tan(x), the density of x is proportional to cos(x) to the power n - 2.
    inner, whole = (
        sum(math.cos(end * (i + 0.5) / 1000) ** (n - 2) for i in range(1000)) * end for end in (edge, math.pi / 2)
    )
    return 1 - inner / whole


def graded(found):
    """Return {(claim, place): (column, more, less)} of the tests that can get a grade and were run."""
    keys = [(name, place) for name, claim in CLAIMS.items() for place in claim.graded()]
    tests = [(CLAIMS[name], CLAIMS[name].tests[place]) for name, place in keys]
    sides = {key: (test.column, *sides_of(claim, test, found, claim.seeds)) for key, (claim, test) in zip(keys, tests)}
    return {key: side for key, side in sides.items() if None not in side[1] + side[2]}


def survivors(sides):
    """Return the keys of the tests that survive Holm's correction at 5 %; sides is the result of graded."""
    chances = sorted((chance(more, less), key) for key, (_, more, less) in sides.items())
    left = []
    for place, (value, key) in enumerate(chances):
        if value > 0.05 / (len(chances) - place):
            break
        left.append(key)
    return left


def unseen(key, found):
    """Return the two sides of a test with the seeds 6 to 8, or None if these were not run."""
    claim, test = CLAIMS[key[0]], CLAIMS[key[0]].tests[key[1]]
    sides = sides_of(claim, test, found, UNSEEN_SEEDS)
    return None if None in sum(sides, []) else sides


def grade(key, sides, kept, found):
    """Return the grade of a test, given the keys that survive, or an empty text if it is not seen or opposite."""
    result, again = verdict(*sides[key]), unseen(key, found)
    if result not in ("seen", "opposite"):
        return ""
    repeated = again is not None and verdict(sides[key][0], *again) == result
    return "C" if key not in kept else "A" if repeated else "B"


def stated(result, letter):
    """Return a verdict and its grade, as text."""
    return f"{result} ({letter})" if letter else result


def stretch(by, first, last):
    """Return a stretch of steps or completions, as text."""
    steps = f"{first}" if first == last else f"{first}–{last}"
    return f"{steps} {by}" if by == "completions" else steps


def table(names, found, seeds=None):
    """Return the markdown table of claims with the same text: a row per test, and a column per claim.

    Rows that decide are bold. With seeds, the table is for the screen: it has all verdicts, but no grades.
    """
    graded_sides = {} if seeds else graded(found)
    kept = survivors(graded_sides)
    rows = {}
    for name in names:
        claim = CLAIMS[name]
        for place, test in enumerate(claim.tests):
            bold = "**" * (place < claim.halves)
            label = " − ".join(dict.fromkeys((test.more, test.less)))
            label = f"{bold}{TITLES.get(test.column, test.column)}: {label}{bold}{' †' * test.later}"
            steps = [stretch(test.by, test.first, test.last)]
            steps += [stretch(test.by, *test.less_from)] if test.less_from else []
            more, less = sides_of(claim, test, found, seeds or claim.seeds)
            cells = rows.setdefault(f"| {label} | {' − '.join(steps)} |", dict.fromkeys(names, ""))
            if None in more + less:
                cells[name] = "not run"
                continue
            cells[name] = f"{statistics.mean(more):.3g}, {statistics.mean(less):.3g}: "
            if len(more) not in STUDENT:
                cells[name] += f"{statistics.mean(more) - statistics.mean(less):+.3g}, {len(more)} seeds"
                continue
            cells[name] += effect(more, less)
            if seeds:
                cells[name] += f", **{verdict(test.column, more, less)}**"
            elif (key := (name, place)) in graded_sides:
                found_out = verdict(test.column, more, less)
                cells[name] += f", **{stated(found_out, grade(key, graded_sides, kept, found))}**"
    lines = [f"| difference | steps | {' | '.join(f'`{name}`' for name in names)} |"]
    lines.append("|---|---" + "|---" * len(names) + "|")
    lines += [f"{row} {' | '.join(cells.values())} |" for row, cells in rows.items()]
    return "\n".join(lines) + "\n"


def by_text():
    """Return {text: names} of the claims; claims with the same text test it in several settings."""
    found = {}
    for name, claim in CLAIMS.items():
        found.setdefault(claim.says, []).append(name)
    return found


def ends(found, run):
    """Return the greedy accuracy after a run of a map, as the mean over its finished seeds, or None without any."""
    values = [rows[-1]["accuracy"] for seed in THREE_SEEDS if (rows := found.get((run, seed)))]
    return statistics.mean(values) if values else None


def heat(found):
    """Return the markdown table of the map."""
    lines = ["| | " + " | ".join(f"{rate}, {n}" for rate in RATES for n in UPDATES) + " |"]
    lines.append("|---|" + "---|" * (len(RATES) * len(UPDATES)))
    for name in FAMILY:
        values = [ends(found, MAP[name, rate, updates]) for rate in RATES for updates in UPDATES]
        lines.append(f"| `{name}.py` | {' | '.join('-' if v is None else f'{v:.2f}' for v in values)} |")
    return "\n".join(lines) + "\n"


def batches(found):
    """Return the markdown table of greedy accuracy by batch size and learning rate, after equally many completions."""
    lines = [f"| completions of a step, steps | {' | '.join(RATES)} |", "|---|" + "---|" * len(RATES)]
    for prompts in PROMPTS:
        values = [ends(found, BATCH[prompts, rate]) for rate in RATES]
        cells = " | ".join("-" if value is None else f"{value:.2f}" for value in values)
        lines.append(f"| {8 * prompts}, {640 // prompts} | {cells} |")
    return "\n".join(lines) + "\n"


def tuned(found):
    """Return the markdown table of the search for learning rates: reward of steps 31 to 40 on the tuning seed."""
    lines = ["| learning rate | RLOO | " + " | ".join(f"PPO, value model {rate}" for rate in RATES) + " |"]
    lines.append("|---|---" + "|---" * len(RATES) + "|")
    for rate in RATES:
        runs = [TUNING["reinforce", rate], *(TUNING["ppo_rlhf", rate, other] for other in RATES)]
        values = [value_of(found.get((run, TUNING_SEED), []), "reward", 31, 40) for run in runs]
        lines.append(f"| {rate} | {' | '.join('-' if value is None else f'{value:.3f}' for value in values)} |")
    return "\n".join(lines) + "\n"


def otherwise(found, script, columns):
    """Return the markdown table of a script's changed details: means of steps 31 to 40.

    A number is bold if the 95 % interval of its difference from the last unchanged row above it does not contain 0.
    """
    plain = []
    head = "| | " + " | ".join(TITLES.get(column, column) for column in columns) + " |"
    lines = [head, "|---" * (len(columns) + 1) + "|"]
    for (name, detail), run in DONE_OTHERWISE.items():
        if name == script:
            runs = [found.get((run, seed), []) for seed in THREE_SEEDS]
            plain = runs if detail.startswith(UNCHANGED) else plain
            cells = [detail]
            for column, digits in columns.items():
                own, base = ([value_of(rows, column, 31, 40) for rows in side] for side in (runs, plain))
                known = None not in own + base
                bold = "**" * (known and verdict(column, own, base) in ("seen", "opposite"))
                cells.append(f"{bold}{statistics.mean(own):{digits}}{bold}" if known else "-")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# ---- the page


def summary(found):
    """Return the markdown table of all claims: their texts, the differences that decide, and the verdicts.

    Claims with the same text, tested in several settings, share a row.
    """
    lines = ["| claim | difference | verdict (grade) |", "|---|---|---|"]
    sides = graded(found)
    kept = survivors(sides)
    for says, names in by_text().items():
        name, effects, verdicts = names[0], [], []
        for half in range(CLAIMS[name].halves):
            keys = [(name, half) for name in names]
            means = [interval(*sides[key][1:])[0] for key in keys]
            shown = effect(*sides[keys[0]][1:]) if len(keys) == 1 else f"{min(means):+.3g} to {max(means):+.3g}"
            column = CLAIMS[name].tests[half].column
            repeated = half and column == CLAIMS[name].tests[0].column
            effects.append(shown if repeated else f"{TITLES.get(column, column)}: {shown}")
            found_out = [stated(verdict(*sides[key]), grade(key, sides, kept, found)) for key in keys]
            counted = Counter(found_out)
            verdicts.append(found_out[0] if len(keys) == 1 else ", ".join(f"{n} {it}" for it, n in counted.items()))
        label = f"[`{name}`]({TABLES_LINK}#{name})" + f" ({len(names)} settings)" * (len(names) > 1)
        lines.append(f"| {label}: {says} | {'; '.join(effects)} | {' + '.join(verdicts)} |")
    return "\n".join(lines) + "\n"


def gspo_cells(found):
    """Return the markdown table that compares GSPO with GRPO in every setting."""
    lines = [
        "| updates, learning rate | reward, steps 6–10 | verdict (grade) | reward, steps 31–40 |",
        "|---|---|---|---|",
    ]
    sides = graded(found)
    kept = survivors(sides)
    for name, claim in CLAIMS.items():
        if parts := re.fullmatch(r"gspo_(\d+)_(.*)", name):
            early, late = (effect(*sides_of(claim, claim.tests[place], found, claim.seeds)) for place in (0, 2))
            found_out = stated(verdict(*sides[name, 0]), grade((name, 0), sides, kept, found))
            lines.append(f"| {parts[1]}, {parts[2]} | {early} | {found_out} | {late} |")
    return "\n".join(lines) + "\n"


def grades(found):
    """Return the markdown table of the tests that survive, with what their grades rest on."""
    lines = ["| test | p | seeds 6 to 8 alone | grade |", "|---|---|---|---|"]
    sides = graded(found)
    kept = survivors(sides)
    for key, side in sides.items():
        if key in kept:
            (name, place), again, letter = key, unseen(key, found), grade(key, sides, kept, found)
            part = f" ({place + 1})" if CLAIMS[name].halves > 1 else ""
            part = f", {TITLES[CLAIMS[name].tests[place].column]}" if place in CLAIMS[name].advised else part
            alone = effect(*again) if again else "-"
            lines.append(f"| `{name}`{part} | {chance(*side[1:]):.2g} | {alone} | {letter} |")
    return "\n".join(lines) + "\n"


def half_show_work(found, side):
    """Return the range of steps (seeds 1 to 8) at which over half of a side's completions first show their work."""
    run = CLAIMS["rare_habit_parts"].runs[side]
    steps = [next(row["step"] for row in found[run, seed] if row["works"] > 0.5) for seed in SEEDS + UNSEEN_SEEDS]
    return f"{min(steps):.0f} to {max(steps):.0f}"


def at_equal_divergence(found):
    """Return the greedy accuracy of the runs without and with the penalty at the same KL; means over seeds.

    This KL is the one at the end of the run with the penalty. The accuracy of the run without it, where it first has
    this KL, is a linear interpolation between two rows.
    """
    free, held = (CLAIMS["ppo_penalty"].runs[side] for side in ("no penalty", "penalty"))
    without = []
    for seed in SEEDS:
        limit, rows = found[held, seed][-1]["ref_kl"], found[free, seed]
        before, after = next((a, b) for a, b in zip(rows, rows[1:]) if a["ref_kl"] <= limit <= b["ref_kl"])
        part = (limit - before["ref_kl"]) / (after["ref_kl"] - before["ref_kl"])
        without.append(before["accuracy"] + part * (after["accuracy"] - before["accuracy"]))
    return statistics.mean(without), statistics.mean(found[held, seed][-1]["accuracy"] for seed in SEEDS)


def notes(found):
    """Return {claim: a sentence with further numbers of its runs}."""
    own_means, one_mean = (half_show_work(found, side) for side in ("GRPO", "GRPO, one mean over tokens"))
    rare, dpo, random = (CLAIMS[name] for name in ("rare_habit", "dpo_displacement", "random_rewards"))
    over_dapo, over_grpo = (effect(*sides_of(rare, rare.tests[place], found, SEEDS[1:])) for place in (2, 3))
    one_round = CLAIMS["dapo_groups_of_4"].runs["one round"]
    equal = sum(
        statistics.mean(value_of(found[one_round, seed], column, 31, 40) for seed in SEEDS)
        for column in ("all_right", "all_wrong")
    )
    costs = [more - less for more, less in zip(*sides_of(dpo, dpo.tests[3], found, SEEDS + UNSEEN_SEEDS))]
    floor = sum(sides_of(random, random.tests[0], found, THREE_SEEDS), [])
    free, held = at_equal_divergence(found)
    runs = (DONE_OTHERWISE["dr_grpo", name] for name in ("truncated completions keep their reward", UNCHANGED))
    lenient, plain = (
        statistics.mean(value_of(found[run, seed], "dots_wrong", 31, 40) for seed in THREE_SEEDS) for run in runs
    )
    found_out = {
        "dr_grpo_parts": "If only completions that are cut off keep their reward, Dr. GRPO ends with"
        f" {lenient:.2f} dots of a wrong completion,\nagainst {plain:.2f} (seeds 1 to 3).",
        "rare_habit": "Without seed 1, on which learning rate and number of steps were chosen, the difference to DAPO"
        f" is {over_dapo}, and that to GRPO {over_grpo}.",
        "rare_habit_parts": "More than half of the completions show their work for the first time at steps"
        f" {own_means} with GRPO, and at steps {one_mean} with one mean over tokens (seeds 1 to 8).",
        "dapo_groups_of_4": f"With one round {equal:.2f} of the groups have no signal at steps 31 to 40.",
        "dpo_displacement": f"With a β of 0.1 greedy accuracy is {min(costs):.3f} to {max(costs):.3f} lower"
        " (seeds 1 to 8).",
        "random_rewards": f"Greedy accuracy over all runs: {min(floor):.3f} to {max(floor):.3f}.",
        "ppo_penalty": "Where the run without penalty first has the KL with which the other ends, its greedy accuracy"
        f" is {free:.3f}, against {held:.3f} (linear interpolation between rows, means over seeds).",
    }
    settings = [CLAIMS[name] for name in ("dapo_overlong", "dapo_overlong_twice")]
    shares = [sides_of(claim, claim.tests[0], found, SEEDS)[0] for claim in settings]
    counts = [sum(share > 0.05 for share in side) for side in shares]
    found_out["dapo_overlong"] = (
        f"Without penalty more than .05 of the completions are cut off in {counts[0]} of 5 seeds, and with the other"
        f" model in {counts[1]}."
    )
    return found_out


def tables(found):
    """Return {name: markdown table} of the claims that are the first with their text, and of the sets."""
    sets = {"map": heat(found), "batch": batches(found), "tuning": tuned(found)}
    sets["details"] = "\n".join(f"`{script}.py`:\n\n{otherwise(found, script, MEASURED)}" for script in ONLINE)
    return {names[0]: table(names, found) for names in by_text().values()} | sets


def all_tables(found):
    """Return the text of benchmark/results/claims.md: the tables of all claims, of the map and of the tuning."""
    own, extra, sides = tables(found), notes(found), graded(found)
    largest = max(chance(*sides[key][1:]) for key in survivors(sides))
    parts = [
        "# The tables of the papers' claims",
        "`python benchmark/claims.py --page` writes this file from `claims.csv`. [The page](../../docs/claims.md) has"
        " the claims and\nthe meaning of verdicts and grades. `CLAIMS` in the program has the commands of the runs.",
        "A cell has the means of both sides, and their difference with its 95 % interval. Bold rows decide, and other"
        " rows have no\nverdict. † marks a test that was written when runs of it had been seen.",
    ]
    for names in by_text().values():
        parts += [f"## {names[0]}", own[names[0]]]
        settings = [f"`{name}`: {CLAIMS[name].setting}." for name in names if CLAIMS[name].setting]
        parts += [" ".join(settings)] if settings else []
        parts += [extra[name] for name in names if name in extra]
    parts += ["## tuning", f"Mean reward of steps 31 to 40, seed {TUNING_SEED}.", own["tuning"]]
    parts += [
        "## details",
        "`python benchmark/claims.py details` prints a table of each script whose details were changed one at a time"
        " on longer\nsums: means of steps 31 to 40 over seeds 1 to 3. It does not train, because the runs are in"
        " `claims.csv`.",
        "## grades",
        f"These of the {len(sides)} graded tests survive Holm's correction (p up to {largest:.2g}): grade A or B.",
        grades(found),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def fill(page, found):
    """Return the page with its tables filled in, each between <!-- NAME --> and <!-- end -->."""
    for name, text in (tables(found) | {"gspo": gspo_cells(found), "summary": summary(found)}).items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        if mark:
            page = before + mark + "\n" + text + "\n<!-- end -->" + rest.partition("<!-- end -->")[2]
    return page


def save(figure, name):
    figure.savefig(ROOT / "docs" / "pictures" / f"claim_{name}.png", dpi=90)


def draw(name, found):
    """Draw the picture of a claim: lines are means over seeds, and bands show their range."""
    from matplotlib.figure import Figure

    title, sides, columns = PICTURES[name]
    figure = Figure(figsize=(4 * len(columns), 4.2), layout="constrained")
    axes = figure.subplots(1, len(columns))
    for axis, (column, unit) in zip(axes, columns.items()):
        for side, run in ((side, CLAIMS[name].runs[side]) for side in sides):
            by_step = {}
            for row in (row for seed in SEEDS for row in found[run, seed] if row[column] is not None):
                by_step.setdefault(row["step"], []).append(row[column])
            [line] = axis.plot([*by_step], [*map(statistics.mean, by_step.values())], label=SIDES.get(side, side))
            low, high = ([*map(extreme, by_step.values())] for extreme in (min, max))
            axis.fill_between([*by_step], low, high, color=line.get_color(), alpha=0.15)
        axis.set(title=TITLES.get(column, column), xlabel="step", ylabel=unit)
        axis.grid(alpha=0.3)
    figure.suptitle(f"{title}\nmean of five seeds; band: lowest to highest seed", fontsize=11)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(sides))
    save(figure, name)


def draw_map(found):
    """Draw the map: a panel per script, with learning rates against updates per rollout."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 * len(FAMILY), 3), layout="constrained")
    axes = figure.subplots(1, len(FAMILY), sharey=True)
    for axis, script in zip(axes, FAMILY):
        for x, rate in enumerate(RATES):
            for y, updates in enumerate(UPDATES):
                if (value := ends(found, MAP[script, rate, updates])) is not None:
                    image = axis.imshow([[value]], extent=(x, x + 1, y, y + 1), vmin=0, vmax=1, cmap="viridis")
                    axis.text(x + 0.5, y + 0.5, f"{value:.2f}", ha="center", va="center", color="wk"[value > 0.5])
        axis.set(title=f"{script}.py", xlim=(0, len(RATES)), ylim=(0, len(UPDATES)), xlabel="learning rate", aspect=0.8)
        axis.set_xticks([x + 0.5 for x in range(len(RATES))], RATES)
        axis.set_yticks([y + 0.5 for y in range(len(UPDATES))], map(str, UPDATES))
    axes[0].set_ylabel("updates per rollout")
    figure.colorbar(image, ax=axes, label="share of right answers", shrink=0.7)
    figure.suptitle("Greedy accuracy on 256 held-out prompts after 40 steps, mean of three seeds", fontsize=11)
    save(figure, "map")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "claims", nargs="*", metavar="CLAIM", help=f"claims to test: {' '.join([*CLAIMS, *SETS])} (default: all)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="csv of finished runs, which are skipped")
    parser.add_argument("--seeds", nargs="+", type=int, help="seeds to run (default: those of the page)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--page", action="store_true", help="run nothing; write the tables and pictures of the page")
    args = parser.parse_args()
    if unknown := {*args.claims} - {*CLAIMS, *SETS}:
        parser.error(f"unknown claim: {' '.join(unknown)}; --help lists all claims")
    if not args.results.exists():
        args.results.write_text(",".join(["run", "seed", "step", *COLUMNS]) + "\n", encoding="utf-8")
    found, chosen = read(args.results), args.claims or [*CLAIMS, *SETS]
    wanted = {
        (run, seed): None  # unique and in order
        for name in chosen
        for run in (SETS.get(name) or CLAIMS[name].runs).values()
        for seed in args.seeds or (SEEDS_OF_SETS[name] if name in SETS else CLAIMS[name].seeds)
    }
    wanted = [] if args.page else [key for key in wanted if key not in found]
    for name in BASES:
        if any(f"--model {name} " in run for run, _ in wanted):
            make_base(name)
    with ThreadPoolExecutor(args.jobs) as pool:
        for done in as_completed([pool.submit(measure, *key) for key in wanted]):
            with args.results.open("a", newline="", encoding="utf-8") as file:
                rows = done.result()
                csv.DictWriter(file, ["run", "seed", "step", *COLUMNS], lineterminator="\n").writerows(rows)
            if rows:
                names = "seconds", "reward", "accuracy", "length", "dots_wrong"
                shown = {name: rows[-1][name] for name in names if rows[-1][name]}
                print(f"{rows[-1]['run']}, seed {rows[-1]['seed']}: {shown}", flush=True)
    found = read(args.results)
    failed = [key for key in wanted if key not in found]
    sets = tables(found) if {*chosen} & {*SETS} else {}
    for name in chosen * (not args.page):
        text = table([name], found, args.seeds or CLAIMS[name].seeds) if name in CLAIMS else sets[name]
        print(f"\n{name}\n\n{text}")
    if args.page:
        PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
        ALL_TABLES.write_text(all_tables(found), encoding="utf-8")
        draw_map(found)
        for name in PICTURES:
            draw(name, found)
    return len(failed) > 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["observe"]:
        observe(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        sys.exit(main())
