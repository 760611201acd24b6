"""Measure what happens on the bundled task if an implementation detail of a script is changed.

    python benchmark/ablations.py [SCRIPT ...] [--seeds 1 2] [--only NAME]        (default: all, seed 1)

The program trains edited copies of the scripts. DETAILS lists the flags and edits of each detail. Every run is a
separate process with one thread.

It adds finished runs to benchmark/results/details.csv, skips runs that are already there, and writes
benchmark/results/details.md after each run. The exact effect of details on the gradient is on docs/details.md.
"""

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
UNCHANGED = "unchanged"

# 5 is <|end|>, the stop token of models/tiny.
MASK = '            part["completion_mask"],\n            args.clip_eps'
NO_STOP = (MASK, MASK.replace("],\n", '] * (part["completion_ids"] != 5),\n'))
SUM_OF_TOKENS = "loss = torch.where(mask, weight * token_loss, 0.0).sum()"
MEANS_OF_COMPLETIONS = "loss = (torch.where(mask, weight * token_loss, 0.0).sum(1) / mask.sum(1).clamp(min=1)).sum()"
TOKENS = "all_reduce(token_counts[update])"
NO_STOP_ID = ("return completion_ids[: place + 1]", "return completion_ids[:place]")
MICROBATCHES = "microbatches(batch, indices, args.microbatch_tokens)"
MEANS_OF_MICROBATCHES = [
    (
        f"collected = []\n    for part in {MICROBATCHES}:",
        f"collected = []\n    parts = [*{MICROBATCHES}]\n    for part in parts:",
    ),
    ("(loss / divisor).backward()", '(loss / part["completion_mask"].sum() / len(parts)).backward()'),
]
OLD_OF_SAMPLER = ("compute_logprobs(policy, batch, first_epoch, args)", 'batch["sampler_logprobs"]')
CENTRED = "advantages = groups - groups.mean(1, keepdim=True)"
WHITENED = 'batch["advantages"] = whiten(advantages, mask)'
VALUES = "return self.normalise(self.critic(batch))"
PPO_BACKWARD = "        ((actor_loss + critic_loss) / divisor).backward()"
NO_TOOL = ("reply = tool_fn(text)", "reply = None")
NO_SAMPLER = ('part["sampler_logprobs"],', 'part["old_logprobs"],')  # the weight is then 1
TOOL_TRAINED = [
    ('part["action_mask"] * part["completion_mask"]', 'part["completion_mask"]'),
    NO_SAMPLER,  # the tool's reply has no log-probabilities of the sampler
]

# {script: {name of the detail: (flags, [(old text, new text), ...])}}
DETAILS = {
    "grpo": {
        UNCHANGED: ("", []),
        "stop token not trained": ("", [NO_STOP]),
        "one optimizer step per rollout": ("--minibatch-size 128", []),
        "one mean over all tokens": (
            "",
            [
                ("(token_loss.sum(1) / lengths).sum()", "token_loss.sum()"),
                (
                    "divisor = rank_minibatch_size",
                    'divisor = all_reduce(batch["completion_mask"][indices].sum().item()) / WORLD_SIZE',
                ),
            ],
        ),
        "no KL term": ("--kl-coef 0", []),
        "KL term with the wrong sign": ("", [("token_loss + kl_coef * ref_kl", "token_loss - kl_coef * ref_kl")]),
        "std with ddof 0": ("", [("groups.std(1, keepdim=True)", "groups.std(1, keepdim=True, correction=0)")]),
        "unchanged, --temperature 0.7": ("--temperature 0.7", []),
        "--temperature 0.7, log-probabilities at 1": (
            "--temperature 0.7",
            [
                ("logprobs, entropies = policy(part, args.temperature)", "logprobs, entropies = policy(part, 1.0)"),
                ("part_logprobs, _ = policy(part, args.temperature)", "part_logprobs, _ = policy(part, 1.0)"),
                NO_SAMPLER,  # the sampler's weight would correct the error
            ],
        ),
        "unchanged, 16 optimizer steps per rollout": ("--minibatch-size 8", []),
        "no clip, 16 optimizer steps per rollout": ("--minibatch-size 8 --clip-eps 1000", []),
    },
    "reinforce": {
        UNCHANGED: ("", []),
        "--baseline none": ("--baseline none", []),
        "--baseline none, rewards -1 and 1": (
            "--baseline none",
            [("        return rewards\n", "        return 2 * rewards - 1\n")],  # reward/mean still uses 0 and 1
        ),
        "--baseline group_mean": ("--baseline group_mean", []),
        "mean over a completion's tokens": (
            "",
            [("(weight * logprobs).sum(1)", "(weight * logprobs).sum(1) / mask.sum(1).clamp(min=1)")],
        ),
        "stop token not trained": (
            "",
            [
                (
                    'part["completion_mask"],\n            args.sampler_weight_cap',
                    'part["completion_mask"] * (part["completion_ids"] != 5),\n            args.sampler_weight_cap',
                )
            ],
        ),
    },
    "dr_grpo": {
        UNCHANGED: ("", []),
        "divided by the completion's length": (
            "",
            [(f"{SUM_OF_TOKENS} / max_completion_length", MEANS_OF_COMPLETIONS)],
        ),
        "divided by the std": (
            "",
            [(CENTRED, f"{CENTRED[:13]}({CENTRED[13:]}) / (groups.std(1, keepdim=True) + 1e-4)")],
        ),
        "divided by the longest completion of the microbatch": (
            "",
            [(f"{SUM_OF_TOKENS} / max_completion_length", f"{SUM_OF_TOKENS} / mask.sum(1).max().clamp(min=1)")],
        ),
        "truncated completions keep their reward": (
            "",
            [
                (
                    "return torch.where(truncated, lowest, rewards)",
                    "return torch.where(truncated & False, lowest, rewards)",
                )
            ],
        ),
    },
    "dapo": {
        UNCHANGED: ("", []),
        "--clip-eps-high 0.2": ("--clip-eps-high 0.2", []),
        "no dynamic sampling": (
            "",
            [("return (groups != groups[:, :1]).any(1)", "return torch.ones_like(groups[:, 0], dtype=torch.bool)")],
        ),
        "mean per completion": (
            "",
            [
                (f"{SUM_OF_TOKENS}\n", f"{MEANS_OF_COMPLETIONS}\n"),
                (TOKENS, "args.minibatch_size"),
            ],
        ),
        "mean of the microbatches' means": ("", MEANS_OF_MICROBATCHES),
        "no length penalty (--overlong-buffer 0)": ("--overlong-buffer 0", []),
        "rewards 0 and 1": ("", [("2 * rewards - 1 + penalty", "rewards + penalty")]),
    },
    "gspo": {
        UNCHANGED: ("", []),
        "ratio per token, same clip range": (
            "",
            [
                ("    ratio = (log", "    advantages = advantages.unsqueeze(1)\n    ratio = (log"),
                ("ratio = (log_ratio.sum(1) / lengths).exp()", "ratio = log_ratio.exp()"),
                ("weight = (sampler_log_ratio.sum(1) / lengths).exp()", "weight = sampler_log_ratio.exp()"),
                (
                    "torch.where(mask.any(1), weight * sequence_loss, 0.0).sum()",
                    "(torch.where(mask, weight * sequence_loss, 0.0).sum(1) / lengths).sum()",
                ),
                ("lengths * clipped_low", "mask * clipped_low"),
                ("lengths * clipped_high", "mask * clipped_high"),
            ],
        ),
        "product of the ratios": (
            "",
            [("ratio = (log_ratio.sum(1) / lengths).exp()", "ratio = log_ratio.sum(1).exp()")],
        ),
        "clip range 0.2": ("--clip-eps-low 0.2 --clip-eps-high 0.2", []),
        "π_old from the sampler": ("", [OLD_OF_SAMPLER]),
        "unchanged, --precision bfloat16": ("--precision bfloat16", []),
        "--precision bfloat16, π_old from the sampler": ("--precision bfloat16", [OLD_OF_SAMPLER]),
    },
    "dpo": {
        UNCHANGED: ("", []),
        "mean of log-probabilities, not sum": (
            "",
            [
                (
                    "logprobs.sum(1).view(2, -1)",
                    "(logprobs.sum(1) / logprobs.new_tensor([len(ids) for ids in chosen + rejected])).view(2, -1)",
                )
            ],
        ),
        "no reference": (
            "",
            [("ref_logprobs = torch.stack(", "ref_logprobs = 0.0 * torch.stack(")],
        ),
        "stop token not appended": (
            "",
            [NO_STOP_ID],
        ),
        "--beta 0.1": ("--beta 0.1", []),
        "--label-smoothing 0.1": ("--label-smoothing 0.1", []),
    },
    "ppo_rlhf": {
        UNCHANGED: ("", []),
        "advantages not whitened": (
            "",
            [(WHITENED, 'batch["advantages"] = advantages')],
        ),
        "value targets from whitened advantages": (
            "",
            [(WHITENED, f'{WHITENED}\n    batch["returns"] = batch["advantages"] + batch["old_values"]')],
        ),
        "value model from the policy, new head": (
            "",
            [
                (
                    "value_model = load_reward_model(args.reward_model, new_head=False)",
                    "torch.manual_seed(args.seed)\n        value_model = load_reward_model(args.model)",
                ),
                (VALUES, "return self.critic(batch)"),
            ],
        ),
        "KL in the loss": (
            "",
            [
                ('batch.get("ref_logprobs"), mask, args.kl_coef)', 'batch.get("ref_logprobs"), mask, 0.0)'),
                (
                    PPO_BACKWARD,
                    '        log_ratio = part["ref_logprobs"] - logprobs  # masked positions are 0 in both\n'
                    f"        actor_loss = actor_loss + args.kl_coef * k3(log_ratio).sum()\n{PPO_BACKWARD}",
                ),
            ],
        ),
        "score not normalised": (
            "",
            [
                ("agent.score_mean.fill_(mean)", "agent.score_mean.fill_(0.0 * mean)"),
                ("agent.score_std.fill_(max(math.sqrt(variance), 1e-6))", "agent.score_std.fill_(1.0)"),
            ],
        ),
        "--gae-lambda 1": ("--gae-lambda 1", []),
        "no clipping of values": ("--value-clip-eps 1000", []),
        "--missing-stop-penalty 0": ("--missing-stop-penalty 0", []),
        "stop token not trained": (
            "",
            [
                (
                    "            mask,\n            args.clip",
                    '            mask * (part["completion_ids"] != 5),\n            args.clip',
                )
            ],
        ),
    },
    "reward_model": {
        UNCHANGED: ("", []),
        # This has the effect of not appending the stop token, since the token before it sees all other tokens.
        "score read one token before the last": (
            "",
            [
                ("hidden[rows, lengths - 1]", "hidden[rows, lengths - 2]"),
                # The script's own check would stop the run.
                ("if not torch.allclose(score, expected, atol=0.01):", "if False:"),
            ],
        ),
        "score read at the last column, padding or not": (
            "",
            [("hidden[rows, lengths - 1]", "hidden[:, -1]")],
        ),
        "scalar head with std 1": ("", [("std=1 / math.sqrt(model.score.in_features + 1)", "std=1.0")]),
        "constant learning rate": ("", [("factor = 0.5 * (1 + math.cos(math.pi * max(0.0, decay)))", "factor = 1.0")]),
    },
    "sft": {
        UNCHANGED: ("", []),
        "stop token not trained": ("", [NO_STOP_ID]),
        "prompt trained too": (
            "",
            [
                ('row["prompt_ids"] for row', 'row["prompt_ids"][:1] for row'),
                ('row["completion_ids"] for row', '(row["prompt_ids"] + row["completion_ids"])[1:] for row'),
                (
                    'len(example["completion_ids"]) for',
                    'len((example["prompt_ids"] + example["completion_ids"])[1:]) for',
                ),
            ],
        ),
        "mean of the rows' means": (
            "",
            [
                (
                    "-torch.where(mask, logprobs, 0.0).sum()",
                    "-(torch.where(mask, logprobs, 0.0).sum(1) / mask.sum(1).clamp(min=1)).sum()",
                ),
                ('sum(len(example["completion_ids"]) for example in examples)', "len(examples)"),
            ],
        ),
    },
    "cispo": {
        UNCHANGED: ("", []),
        "the clipped objective of dapo.py": (
            "",
            [
                (
                    "-clipped_ratio * advantages * logprobs",
                    "-torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)",
                )
            ],
        ),
        "--clip-eps-high 0.2": ("--clip-eps-high 0.2", []),
        "also a lower bound of 0.8": ("", [(".clamp(max=1 + clip_eps_high)", ".clamp(0.8, 1 + clip_eps_high)")]),
        "a gradient through the ratio": ("", [("1 + clip_eps_high).detach()", "1 + clip_eps_high)")]),
        "mean per completion": (
            "",
            [
                (f"{SUM_OF_TOKENS}\n", f"{MEANS_OF_COMPLETIONS}\n"),
                (TOKENS, "args.minibatch_size"),
            ],
        ),
    },
    "grpo_tools": {
        UNCHANGED: ("", []),
        "no tool": ("", [NO_TOOL]),
        "the tool's tokens trained, too": ("", TOOL_TRAINED),
        "unchanged, 20 steps at --temperature 1.5": ("--num-steps 20 --temperature 1.5", []),
        "no tool, 20 steps at --temperature 1.5": ("--num-steps 20 --temperature 1.5", [NO_TOOL]),
        "the tool's tokens trained, too, 20 steps at --temperature 1.5": (
            "--num-steps 20 --temperature 1.5",
            TOOL_TRAINED,
        ),
    },
}
TO_COME = "advantages[row, :tokens] += advantage"
DETAILS["grpo_process"] = {
    UNCHANGED: ("", []),
    "each token rewarded by the final answer only": ("", [(TO_COME, "advantages[row, :tokens] = advantage")]),
    "each token rewarded by the steps before it": ("", [(TO_COME, "advantages[row, tokens:] += advantage")]),
    "every completion normalised by itself": (
        "",
        [
            ("for first in range(0, len(steps), group_size):", "for first, group_size in enumerate([1] * len(steps)):"),
            ("(rewards.std() + 1e-4)", "(rewards.std(correction=min(1, len(rewards) - 1)) + 1e-4)"),
        ],
    ),
}
FLAGS = dict.fromkeys(DETAILS, "--eval-every 4 --eval-prompts 128")
FLAGS |= {"dpo": "", "reward_model": "", "sft": "--num-steps 600"}
# Columns that are only in the csv, of all scripts and of single ones.
HIDDEN = {"greedy accuracy halfway", "truncated"}
USUAL = {"greedy accuracy", "pass@1", "length", "gradient norm"}
HIDDEN_OF = {
    "grpo_process": USUAL | {"step of 0.9"},
    "grpo_tools": USUAL | {"step of 0.9", "greedy with tool", "tool use"},
    "ppo_rlhf": USUAL | {"KL", "explained variance"},
    "dpo": {"pair accuracy", "chosen log ratio", "rejected log ratio", "greedy accuracy", "length"},
    "reward_model": {"loss", "accuracy"},
    "sft": {"loss", "greedy accuracy", "length"},
}


def edit(source, edits):
    """Replace each old text, which must occur exactly once, with its new text and return the source."""
    for old, new in edits:
        if source.count(old) != 1:
            raise ValueError(f"this text occurs {source.count(old)} times in the script, not once: {old}")
        source = source.replace(old, new)
    return source


def run(script, detail, seed):
    """Make a run and return its numbers as {name: value}. If it fails, print the error and return None."""
    flags, edits = DETAILS[script][detail]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("models", "data"):  # where the script looks for its defaults
            Path(folder, name).symlink_to(ROOT / name)
        source = edit((ROOT / f"{script}.py").read_text(encoding="utf-8"), edits)
        Path(folder, f"{script}.py").write_text(source, encoding="utf-8")
        command = [sys.executable, f"{script}.py", "--seed", str(seed), "--run-dir", "run"]
        command += [*FLAGS[script].split(), *flags.split()]
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            return print(f"{script}, {detail}, seed {seed} failed: {done.stderr.strip()[-300:]}", flush=True)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        return measure(script, lines, Path(folder, "run", "checkpoint"))


def measure(script, lines, checkpoint):
    """Return the numbers of a run as {name: value}; the unedited scripts measure checkpoints of dpo and sft."""
    last = lines[-1]
    if script == "reward_model":
        found = {
            "loss": last["eval/pair_loss"],
            "accuracy": last["eval/pair_accuracy"],
            "margin": last["eval/pair_margin"],
        }
        return found | accuracy_by_kind(checkpoint)
    if script == "sft":
        return {"loss": held_out_loss(checkpoint)} | greedy(checkpoint)
    if script == "dpo":
        return held_out_pairs(checkpoint) | greedy(checkpoint)
    evaluated = [line for line in lines if "eval/accuracy" in line]
    middle = min(evaluated, key=lambda line: abs(line["step"] - last["step"] / 2))
    good = [line["step"] for line in evaluated if line["eval/accuracy"] >= 0.9]
    found = {
        "greedy accuracy halfway": middle["eval/accuracy"],
        "greedy accuracy": greedy(checkpoint)["greedy accuracy"],  # on all held-out prompts
        "pass@1": last["eval/pass@1"],
        "step of 0.9": good[0] if good else None,
        "length": statistics.mean(line["rollout/length_mean"] for line in lines[-5:]),
        "truncated": statistics.mean(line["rollout/truncated"] for line in lines[-5:]),
        "gradient norm": statistics.mean(line["optim/grad_norm"] for line in lines if "optim/grad_norm" in line),
    }
    if script == "grpo_tools":  # grpo.py measured the greedy accuracy above, without the tool
        found["greedy with tool"] = last["eval/accuracy"]
        found["tool use"] = statistics.mean(line["rollout/tool_use"] for line in lines[-5:])
    if script == "ppo_rlhf":
        found["score"] = last["eval/score"]
        for name, key in (("explained variance", "value/explained_variance"), ("KL", "rollout/ref_kl_sum")):
            found[name] = statistics.mean(line[key] for line in lines[-5:])
    return found


def parse(script, *flags):
    """Return the settings that a script makes of these flags on its command line."""
    before, sys.argv = sys.argv, [f"{script.__name__}.py", *map(str, flags)]
    try:
        return script.parse_args()
    finally:
        sys.argv = before


def greedy(checkpoint):
    """Return accuracy, mean length and the share cut off of greedy completions of the held-out prompts."""
    from transformers import AutoTokenizer

    import grpo

    grpo.init_ranks()
    args, tokenizer = parse(grpo, "--model", checkpoint, "--tiny"), AutoTokenizer.from_pretrained(checkpoint)
    _, prompts = grpo.load_rows(args, tokenizer)
    policy = grpo.LogprobModel(grpo.load_model(checkpoint, tokenizer))
    batch, texts = grpo.sample_completions(policy, tokenizer, prompts, 0.0, args)
    return {
        "greedy accuracy": statistics.mean(grpo.score_completions(texts, prompts)),
        "length": batch["completion_mask"].sum(1).double().mean().item(),
        "truncated": batch["truncated"].double().mean().item(),
    }


def held_out_loss(checkpoint):
    """Return the mean negative log-likelihood of the held-out completions."""
    from transformers import AutoTokenizer

    import sft

    sft.init_ranks()
    args, tokenizer = parse(sft, "--model", checkpoint, "--tiny"), AutoTokenizer.from_pretrained(checkpoint)
    policy = sft.LogprobModel(sft.load_model(checkpoint, tokenizer))
    return sft.evaluate(policy, sft.load_chats(args, tokenizer)[1], args)["eval/loss"]


def accuracy_by_kind(checkpoint):
    """Return the accuracy of a reward model on each kind of held-out pairs."""
    from transformers import AutoTokenizer

    import reward_model

    reward_model.init_ranks()
    args, tokenizer = parse(reward_model), AutoTokenizer.from_pretrained(checkpoint)
    _, pairs = reward_model.load_pairs(args, tokenizer)
    rows = [json.loads(line) for line in Path(args.dataset, "test.jsonl").read_text().splitlines()]
    policy = reward_model.ScoreModel(reward_model.load_reward_model(checkpoint, new_head=False))
    found = {}
    for kind in sorted({row["kind"] for row in rows}):
        some = [pair for row, pair in zip(rows, pairs, strict=True) if row["kind"] == kind]
        found[kind] = reward_model.evaluate(policy, some, args)["eval/pair_accuracy"]
    return found


def held_out_pairs(checkpoint):
    """Return the accuracy and the log-ratios on held-out pairs, as sums over tokens including the stop token."""
    from transformers import AutoTokenizer

    import dpo

    dpo.init_ranks()
    args, tokenizer = parse(dpo), AutoTokenizer.from_pretrained(checkpoint)
    _, pairs = dpo.load_pairs(args, tokenizer)
    policy, ref = (dpo.LogprobModel(dpo.load_model(name, tokenizer)) for name in (checkpoint, args.model))
    dpo.add_ref_logprobs(ref, pairs, args)
    found = dpo.evaluate(policy, pairs, args)
    names = {
        "pair accuracy": "accuracy",
        "chosen log ratio": "chosen_log_ratio",
        "rejected log ratio": "rejected_log_ratio",
    }
    return {name: found[f"eval/pair_{key}"] for name, key in names.items()}


def read_results(path):
    """Return the numbers in the file as {(script, detail, seed): {name: value}}."""
    results = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            numbers = results.setdefault((row["script"], row["detail"], int(row["seed"])), {})
            numbers[row["name"]] = float(row["value"]) if row["value"] else None
    return results


def render(results):
    """Return the page: a table per script with means over seeds, without the columns that only the csv has."""
    page = "# Details of the scripts, changed one at a time\n\n"
    page += f"`python benchmark/ablations.py`, one thread, {platform.machine()}: means over the seeds of the heading.\n"
    page += "`benchmark/README.md` explains the columns, and `benchmark/ablations.py` has the edits. Some runs are of\n"
    page += "earlier versions of the scripts. `details.csv` has further columns, and all those of `grpo_process.py`,\n"
    page += "`grpo_tools.py`, `dpo.py` and `sft.py`.\n"
    for script, details in DETAILS.items():
        hidden = HIDDEN | HIDDEN_OF.get(script, set())
        rows = []
        for detail in details:
            seeds = " ".join(str(seed) for found, name, seed in sorted(results) if (found, name) == (script, detail))
            runs = [results[script, detail, int(seed)] for seed in seeds.split()]
            if runs:
                names = [name for name in runs[0] if name not in hidden]
                rows.append((detail, seeds, [mean([numbers.get(name) for numbers in runs]) for name in names]))
        if rows and names:
            usual = rows[0][1]
            page += f"\n## {script}.py, seed{'s' * (' ' in usual)} {usual}\n\n"
            page += f"| | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}\n"
            for detail, seeds, cells in rows:
                other = f" (seeds {seeds})" * (seeds != usual)
                page += f"| {detail}{other} | {' | '.join(cells)} |\n"
    return page


def mean(values):
    """Return the mean of a column with at most three decimals, or a dash where a run has no such number."""
    return "-" if None in values else f"{statistics.mean(values):.3f}".rstrip("0").rstrip(".")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "scripts", nargs="*", default=[], metavar="SCRIPT", help=f"scripts to run: {' '.join(DETAILS)} (default: all)"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--only", help="run only the detail with this name")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    path = RESULTS / "details.csv"
    if not path.exists():
        path.write_text("script,detail,seed,name,value\n", encoding="utf-8")
    for seed in args.seeds:
        for script in args.scripts or DETAILS:
            for detail in DETAILS[script]:
                if (script, detail, seed) in read_results(path) or args.only not in (None, detail):
                    continue
                numbers = run(script, detail, seed)
                if numbers is None:
                    continue
                with path.open("a", newline="", encoding="utf-8") as file:
                    csv.writer(file, lineterminator="\n").writerows(
                        [script, detail, seed, name, value] for name, value in numbers.items()
                    )
                (RESULTS / "details.md").write_text(render(read_results(path)), encoding="utf-8")
                print(f"{script}, {detail}, seed {seed}: {numbers}", flush=True)


if __name__ == "__main__":
    main()
