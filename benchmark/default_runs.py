"""The default runs of all scripts with seeds 1 to 3: the table of docs/results.md, and a picture for each script.

    python benchmark/default_runs.py [SCRIPT ...]    make the runs that the file lacks, then the table and the pictures
    python benchmark/default_runs.py --page          only write the table again

The records are in benchmark/results/default_runs.jsonl, the runs in runs/defaults. Two work at a time, with one thread
each. To repeat a run, delete its line. dpo.py does not sample, so grpo.py evaluates its checkpoint.
"""

import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

from records import DOCS, RESULTS, ROOT, fill, first_and_last, make_run, read_records, spread, table, work, write_record

RECORDS, FOLDER = RESULTS / "default_runs.jsonl", Path("runs", "defaults")
SCRIPTS = ["reinforce", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "grpo_process", "grpo_tools"]
SCRIPTS += ["gkd", "ppo_rlhf", "dpo", "reward_model", "sft"]
SEEDS = (1, 2, 3)
EVAL_EVERY = {"dapo": 2, "gkd": 4, "ppo_rlhf": 5, "dpo": 8, "reward_model": 16, "sft": 100}  # else 3
EVALUATED = {
    "eval/accuracy": "greedy accuracy",
    "eval/score": "score",
    "eval/pair_accuracy": "pairs in the right order",
    "eval/pair_chosen_log_ratio": "log-ratio of the chosen, nats",
    "eval/pair_rejected_log_ratio": "log-ratio of the rejected, nats",
    "eval/loss": "loss, nats per token",
}
# In a script's picture, the first six of these that it has.
DRAWN = "eval/score eval/accuracy eval/pair_accuracy eval/pair_loss eval/loss reward/mean".split()
DRAWN += "loss/distillation rollout/length_mean policy/entropy policy/ref_kl rollout/ref_kl_sum".split()
DRAWN += ["eval/pair_chosen_log_ratio", "eval/pair_rejected_log_ratio"]


def run(script, seed):
    """Make a run and add its record to the file."""
    folder = FOLDER / f"{script}__{seed}"
    command = f"python {script}.py --eval-every {EVAL_EVERY.get(script, 3)} --seed {seed}"
    record = make_run(script, seed, command, folder)
    if script == "dpo":
        steps = {}
        for step, model in (("0", "models/tiny"), ("64", f"{folder}/checkpoint-000064")):
            evaluation = f"python grpo.py --tiny --model {model} --num-steps 0"
            evaluated = make_run(script, seed, evaluation, Path(f"{folder}_{step}"))
            steps[step] = evaluated["metrics"]["eval/accuracy"]["0"]
        record["metrics"]["eval/accuracy"] = steps
    if script == "sft":  # of 2,200 steps, those with an evaluation
        record["metrics"] = {name: values for name, values in record["metrics"].items() if name.startswith("eval/")}
    write_record(RECORDS, record, SCRIPTS)
    print(f"{script}.py, seed {seed}: {record['minutes']} CPU minutes", flush=True)


def table_of_all(records):
    """Return the table of docs/results.md: what each script's evaluations say before and after training."""
    lines = []
    for script in SCRIPTS:
        own = [records[script, seed] for seed in SEEDS if (script, seed) in records]
        title = f"`{script}.py`"
        minutes = f"{mean(record['minutes'] for record in own):.1f}" if own else ""
        for metric, words in EVALUATED.items():
            if own and metric in own[0]["metrics"]:
                before, after = first_and_last(own, metric)
                lines.append([title, words, f"{mean(before):.3f}", spread(after), minutes])
                title = minutes = ""
    return table(["script", "on held-out rows", "before", "after", "CPU minutes"], lines)


def draw(script):
    """Draw a script's picture from its runs: the mean over seeds, and a band from the lowest to the highest."""
    records = read_records(RECORDS)
    found = [name for name in DRAWN if name in records[script, 1]["metrics"]][:6]
    runs = [str(FOLDER / f"{script}__{seed}") for seed in SEEDS]
    title = f"python {script}.py\nlines: mean of {len(SEEDS)} seeds; bands: lowest to highest"
    command = ["tools/plot.py", *runs, "--out", f"docs/pictures/{script}.png", "--title", title, "--metrics", *found]
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)


def main(words):
    os.chdir(ROOT)
    scripts = [word for word in words if word != "--page"] or SCRIPTS
    if "--page" not in words:
        done = read_records(RECORDS)
        work([(script, seed) for seed in SEEDS for script in scripts if (script, seed) not in done], run, together=2)
        for script in scripts:
            if all((FOLDER / f"{script}__{seed}").exists() for seed in SEEDS):
                draw(script)
    fill(DOCS / "results.md", "default runs", table_of_all(read_records(RECORDS)))


if __name__ == "__main__":
    main(sys.argv[1:])
