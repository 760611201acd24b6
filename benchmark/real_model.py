"""Scripts on SmolLM2-135M-Instruct: instructions with constraints, word problems, and pairs of answers.

    python benchmark/real_model.py [RUN ...]    make the runs that the file lacks, then the tables and the picture
    python benchmark/real_model.py --show       print the commands
    python benchmark/real_model.py --page       only write the tables and the picture again

Make models/smollm2 first (see its README). Records are in benchmark/results/real_model.jsonl, runs in runs/real_model.
Two work at a time, with one thread each. To repeat one, delete its line, and that of the run it begins from.
"""

import os
import shutil
import sys
from pathlib import Path
from statistics import mean

import matplotlib.pyplot as plt
from records import DOCS, RESULTS, ROOT, fill, first_and_last, make_run, read_records, spread, table, work, write_record

RECORDS, FOLDER = RESULTS / "real_model.jsonl", Path("runs", "real_model")
MODEL = "--model models/smollm2"
INSTRUCTIONS = f"{MODEL} --eval-prompts 200 --eval-every 5"
PAIRS = f"{MODEL} --dataset data/manners --precision bfloat16 --microbatch-tokens 2048 --eval-prompts 100"
PAIRS += " --max-prompt-length 128 --max-completion-length 96 --minibatch-size 32 --num-steps 30 --eval-every 10"
WORDS = r"--system-prompt 'Reason step by step, and put your final answer within \boxed{}.' --precision bfloat16"
WORDS += " --microbatch-tokens 2048 --max-prompt-length 160 --eval-prompts 150"
MAWPS, SVAMP = "--dataset data/word_problems/mawps", "--dataset data/word_problems/svamp"
COLD = f"--model {FOLDER}/sft_1/checkpoint-000024"
SAMPLED = f"{WORDS} --max-completion-length 48 --prompts-per-step 16 --minibatch-size 64 --learning-rate 1e-5"
SAMPLED += " --num-steps 16 --eval-every 16"
COMMANDS = {
    "instructions": f"examples/instructions.py {INSTRUCTIONS} --precision float32",
    "instructions_bfloat16": f"examples/instructions.py {INSTRUCTIONS} --precision bfloat16",
    "reward_model": f"reward_model.py {PAIRS} --learning-rate 5e-5",
    "sft": f"sft.py {MODEL} {MAWPS} {WORDS} --max-completion-length 64 --num-steps 24 --learning-rate 2e-4 "
    "--warmup-steps 3 --eval-every 8",
    "dpo": f"dpo.py {PAIRS} --learning-rate 1e-5 --warmup-steps 3",
    "ppo_rlhf": f"ppo_rlhf.py {MODEL} --reward-model {FOLDER}/reward_model_1/checkpoint-000030 --dataset data/manners "
    "--precision bfloat16 --microbatch-tokens 512 --rollout-batch-size 64 --eval-prompts 64 --max-prompt-length 128 "
    "--max-completion-length 64 --prompts-per-step 64 --minibatch-size 32 --update-epochs 2 --learning-rate 1e-5 "
    "--value-learning-rate 3e-5 --num-steps 12 --eval-every 12",
    "gkd": f"examples/instructions.py gkd {INSTRUCTIONS} --precision bfloat16 "
    f"--teacher {FOLDER}/instructions_bfloat16_1/checkpoint-000020",
    "grpo_process": f"grpo_process.py {COLD} {MAWPS} {SAMPLED} --kl-coef 0",
    "grpo_tools": f"grpo_tools.py {COLD} {SVAMP} {SAMPLED}",
}
FIRST = ("instructions", "instructions_bfloat16", "reward_model", "sft")  # the others begin from these
BY_STEP = {
    "instructions": "`grpo.py`, float32",
    "instructions_bfloat16": "`grpo.py`, bfloat16",
    "gkd": "`gkd.py`, bfloat16",
}
EVALUATED = {  # {(run, metric): words}
    ("reward_model", "eval/pair_accuracy"): "pairs in the right order",
    ("dpo", "eval/pair_accuracy"): "pairs in the right order",
    ("dpo", "eval/pair_chosen_log_ratio"): "log-ratio of the chosen answers, nats",
    ("dpo", "eval/pair_rejected_log_ratio"): "log-ratio of the rejected answers, nats",
    ("ppo_rlhf", "eval/score"): "score",
    ("sft", "eval/loss"): "loss on MAWPS, nats per token",
    ("grpo_process", "eval/accuracy"): "greedy accuracy on MAWPS",
    ("grpo_tools", "eval/accuracy"): "greedy accuracy on SVAMP, with the calculator",
}


def seeds_of(name):
    return (1, 2, 3) if name in ("instructions", "instructions_bfloat16") else (1,)


def run(name, seed):
    """Make a run, add its record to the file, and delete its state of the optimizer, which takes 1.6 GB."""
    folder = FOLDER / f"{name}_{seed}"
    record = make_run(name, seed, f"python {COMMANDS[name]} --seed {seed}", folder)
    write_record(RECORDS, record, list(COMMANDS))
    for state in folder.glob("checkpoint-*/state"):
        shutil.rmtree(state)
    print(f"{name}, seed {seed}: {record['minutes']} CPU minutes", flush=True)


def records_of(records, name):
    """Return the records of a run that there are, one per seed."""
    return [records[name, seed] for seed in seeds_of(name) if (name, seed) in records]


def cost(own):
    """Return the most CPU minutes and the largest memory of some runs."""
    own = [record for record in own if "minutes" in record]
    minutes, gib = ([record[key] for record in own] for key in ("minutes", "gib"))
    return [f"{max(minutes):.0f}", f"{max(gib):.1f}"] if own else ["", ""]


def accuracies(own):
    """Return {step: greedy accuracies of the runs}."""
    return {
        step: [record["metrics"]["eval/accuracy"][step] for record in own]
        for step in own[0]["metrics"]["eval/accuracy"]
    }


def instructions_table(records):
    """Return the greedy accuracy on held-out instructions by step."""
    lines = []
    for name, title in BY_STEP.items():
        if own := records_of(records, name):
            lines.append([title, *map(spread, accuracies(own).values()), *cost(own)])
    return table(["", *(f"step {step}" for step in (0, 5, 10, 15, 20)), "CPU minutes", "GiB"], lines)


def evaluations_table(records):
    """Return what the evaluations of the other runs say, first and last."""
    lines = []
    for (name, metric), words in EVALUATED.items():
        if own := records_of(records, name):
            before, after = first_and_last(own, metric)
            lines.append([f"`{name}.py`", words, spread(before), spread(after), *cost(own)])
    return table(["script", "on held-out data", "before", "after", "CPU minutes", "GiB"], lines)


def draw(records):
    """Draw docs/pictures/instructions.png: held-out instructions followed by step."""
    figure, axes = plt.subplots(figsize=(7, 3.5))
    for name, color in (("instructions", "tab:blue"), ("instructions_bfloat16", "tab:orange")):
        own = records_of(records, name)
        by_step = accuracies(own)
        steps = [int(step) for step in by_step]
        for i in range(len(own)):
            axes.plot(steps, [values[i] for values in by_step.values()], color=color, alpha=0.4, linewidth=1)
        means = [mean(values) for values in by_step.values()]
        axes.plot(steps, means, color=color, linewidth=3, label=f"{BY_STEP[name].replace('`', '')}, seeds: {len(own)}")
    axes.set(xlabel="step (128 completions each)", ylabel="greedy accuracy", ylim=0, xticks=steps)
    axes.set_title("GRPO on SmolLM2-135M: 200 held-out instructions with a constraint")
    axes.legend(loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(DOCS / "pictures" / "instructions.png", dpi=125)


def main(words):
    os.chdir(ROOT)
    names = [word for word in words if not word.startswith("--")] or list(COMMANDS)
    records = read_records(RECORDS)
    jobs = [(name, seed) for seed in (1, 2, 3) for name in names if seed in seeds_of(name)]
    if "--show" in words:
        for name, seed in jobs:
            print(f"python {COMMANDS[name]} --seed {seed} --run-dir {FOLDER}/{name}_{seed}")
        return
    if "--page" not in words:
        missing = [job for job in jobs if job not in records]
        work([job for job in missing if job[0] in FIRST], run, together=2)
        work([job for job in missing if job[0] not in FIRST], run, together=2)
    records = read_records(RECORDS)
    fill(DOCS / "real_model.md", "instructions", instructions_table(records))
    fill(DOCS / "real_model.md", "evaluations", evaluations_table(records))
    draw(records)


if __name__ == "__main__":
    main(sys.argv[1:])
