"""Scripts on a real language model: models/smollm2 on instructions with constraints, word problems, and pairs.

    python benchmark/real_model.py                              every run that benchmark/results/real_model.csv lacks
    python benchmark/real_model.py --runs dpo ppo_rlhf --seeds 1   these, and first what they begin from
    python benchmark/real_model.py --show                       the commands
    python benchmark/real_model.py --results mine.csv           the same in a csv of your own, which may be new
    python benchmark/real_model.py --page                       write the tables and the picture of the pages

Two runs work at a time, with a core each. Start one of these commands at a time, since each writes the csv. A run is a
folder runs/real_model/NAME_SEED. An interrupted run is resumed, and its minutes are then those of the last part.

The csv has a row for every step that was logged. A trained model that is evaluated on other data has a row with the
name of these data in the column "look". Every run has a row "whole" with its minutes and GiB. Only the csv in
benchmark/results makes pages.

The columns eval/pass@1, eval/pass@4, right, recall and equations/..., and real_model_samples.jsonl, are of version
0.6.0 and before, which logged completions of evaluations. Some tables of the pages need them; new runs lack them.
"""

import csv
import importlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import mean
from threading import Lock

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as in the scripts

import matplotlib.pyplot as plt
import numpy as np
import torch
import tyro
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import grpo  # noqa: E402

FOLDER, RESULTS = Path("runs", "real_model"), ROOT / "benchmark" / "results"
RESULT, SAMPLES = RESULTS / "real_model.csv", RESULTS / "real_model_samples.jsonl"
PAGES = [ROOT / "docs" / "real_model.md", RESULTS / "real_model.md"]
PICTURES = ROOT / "docs" / "pictures"
MODEL, MAWPS, SVAMP, MANNERS = "models/smollm2", "data/word_problems/mawps", "data/word_problems/svamp", "data/manners"
BOXED = r"Reason step by step, and put your final answer within \boxed{}."
# For two cores and 8 GB of memory; a script gets those that it has and that its run does not name.
SMALL = {"max-prompt-length": 160, "max-completion-length": 64, "prompts-per-step": 16, "minibatch-size": 64}
SMALL |= {"microbatch-tokens": 2048, "eval-prompts": 64, "num-steps": 20, "learning-rate": "1e-5"}
WORDS = "--max-completion-length 48 --eval-prompts 0"
PAIRS = f"--dataset {MANNERS} --max-prompt-length 128 --max-completion-length 96 --eval-prompts 100 --minibatch-size 32"
CONSTRAINTS = "data/constraints"
ON_WORDS = {"MAWPS": MAWPS, "SVAMP": SVAMP}


@dataclass
class Run:
    """A script, its flags, the run whose checkpoint is its --model, and the data to evaluate its own checkpoint on.

    The teacher is the checkpoint of a run with seed 1.

    The field sampled has the flags of tools/sample.py that write its --dataset.
    """

    script: str
    flags: str
    base: str = ""
    looks: tuple = ()
    system_prompt: str = ""
    reward_model: str = ""
    precision: str = "bfloat16"
    seeds: tuple = (1, 2, 3)
    sampled: str = ""
    teacher: str = ""


def on_words(script, flags="", data=MAWPS, looks=("MAWPS", "SVAMP"), rate="1e-5", **options):
    flags = f"--dataset {data} {WORDS} --num-steps 16 --learning-rate {rate} {flags}"
    return Run(script, flags, "sft", looks, BOXED, **options)


RUNS = {
    "instruct": Run(
        "grpo",
        f"--dataset {MAWPS} --max-completion-length 48 --eval-prompts 0 --num-steps 3 --kl-coef 0",
        "",
        ("MAWPS",),
        BOXED,
    ),
    "sft": Run(
        "sft",
        f"--dataset {MAWPS} --num-steps 24 --learning-rate 2e-4 --warmup-steps 3 --eval-every 8",
        looks=("MAWPS", "SVAMP", "16 samples", "MAWPS, calculator", "SVAMP, calculator"),
        system_prompt=BOXED,
    ),
    "grpo": on_words("grpo", "--kl-coef 0", looks=("MAWPS", "SVAMP", "16 samples")),
    "grpo_svamp": on_words("grpo", "--kl-coef 0", SVAMP, ("MAWPS", "SVAMP", "16 samples")),
    "grpo_tools": on_words("grpo_tools", data=SVAMP),
    "grpo_tools_both": on_words("grpo_tools", data="data/word_problems"),
    "grpo_1e-6": on_words("grpo", "--kl-coef 0", rate="1e-6", seeds=(1,)),
    "grpo_3e-6": on_words("grpo", "--kl-coef 0", rate="3e-6", seeds=(1,)),
    "grpo_3e-5": on_words("grpo", "--kl-coef 0", rate="3e-5", seeds=(1,)),
    "grpo_float32": on_words("grpo", "--kl-coef 0", precision="float32", seeds=(1,)),
    "grpo_kl": on_words("grpo", "--kl-coef 0.04", seeds=(3,)),
    "grpo_warmup": on_words("grpo", "--kl-coef 0 --warmup-steps 8", seeds=(3,)),
    "grpo_one_update": on_words("grpo", "--kl-coef 0 --minibatch-size 128", seeds=(3,)),
    "reward_model": Run("reward_model", f"{PAIRS} --num-steps 30 --learning-rate 5e-5 --eval-every 10"),
    "dpo": Run("dpo", f"{PAIRS} --num-steps 30 --learning-rate 1e-5 --warmup-steps 3 --eval-every 10"),
    "ppo_rlhf": Run(
        "ppo_rlhf",
        f"--dataset {MANNERS} --max-prompt-length 128 --max-completion-length 64 --eval-prompts 64 --minibatch-size 32 "
        "--num-steps 12 --prompts-per-step 64 --update-epochs 2 --learning-rate 1e-5 --value-learning-rate 3e-5 "
        "--eval-every 12 --microbatch-tokens 512 --rollout-batch-size 64",
        reward_model="reward_model",
    ),
    "one_sentence": Run(
        "examples/one_sentence",
        "--num-steps 20 --learning-rate 1e-5 --kl-coef 0 --eval-every 10 --max-completion-length 48",
    ),
    "instructions": Run("examples/instructions.py grpo", "--eval-prompts 200 --eval-every 5", precision="float32"),
    "instructions_sft": Run(
        "sft",
        "--eval-prompts 0 --num-steps 40 --minibatch-size 32 --learning-rate 5e-5 --warmup-steps 0",
        looks=("instructions",),
        sampled="--split train --num-prompts 320 --num-samples 8 --keep right --show 0",
        precision="float32",
    ),
}
RUNS["instructions_teacher"] = Run("examples/instructions.py grpo", "--eval-prompts 200 --eval-every 20", seeds=(1,))
RUNS["instructions_gkd"] = Run(
    "examples/instructions.py gkd", "--eval-prompts 200 --eval-every 5", teacher="instructions_teacher"
)
for other in ("reinforce", "dr_grpo", "dapo", "gspo", "cispo"):
    steps = "--max-rounds 2 --num-steps 8" if other == "dapo" else "--num-steps 16"  # of as many completions
    options = {"precision": "float32", "seeds": (1,)}
    RUNS[f"instructions_{other}"] = Run(f"examples/instructions.py {other}", f"--eval-prompts 0 {steps}", **options)


def folder_of(name, seed):
    return FOLDER / f"{name}_{seed}"


def checkpoint_of(name, seed):
    """Return the folder of the model that a run trains; its name has the last step."""
    steps = re.search(r"--num-steps (\d+)", RUNS[name].flags)
    return folder_of(name, seed) / f"checkpoint-{int(steps[1]) if steps else 20:06d}"


def saves_of(folder):
    """Return what a run could be resumed from."""
    return [*folder.glob("checkpoint-*/state")]


def command_of(name, seed, look=""):
    """Return a command as a list: of a run, of an evaluation of its checkpoint, or of the sampling of its data."""
    run = RUNS[name]
    target = folder_of(f"{name}_on_{look}".replace(", ", "_") if look else name, seed)
    target = ["--seed", seed, "--run-dir", target]
    model = checkpoint_of(run.base, seed) if run.base else MODEL
    checkpoint = checkpoint_of(name, seed)
    own = run.script if " " in run.script else f"{run.script}.py"
    if look == "16 samples":
        return ["python", "benchmark/real_model.py", "--pass-at", str(checkpoint), "--seeds", str(seed)]
    if look == "data":
        flags = ["examples/instructions.py", "sample", "--model", model, *run.sampled.split()]
        target = ["--seed", seed, "--out", data_of(name, seed)]
    elif look == "instructions":
        flags = ["examples/instructions.py", "grpo", "--model", checkpoint, "--num-steps", 0, "--eval-prompts", 200]
    elif look:
        data, _, calculator = look.partition(", ")
        script = "grpo_tools.py" if calculator else "grpo.py" if run.script == "sft" else own
        flags = [script, "--model", checkpoint, "--dataset", ON_WORDS[data], "--num-steps", 0]
        flags += ["--eval-prompts", 150, "--max-prompt-length", 160, "--max-completion-length", 48]
    else:
        flags = [*own.split(), "--model", model, *run.flags.split()]
        flags += ["--dataset", data_of(name, seed)] if run.sampled else []
        flags += ["--reward-model", checkpoint_of(run.reward_model, seed)] if run.reward_model else []
        flags += ["--teacher", checkpoint_of(run.teacher, 1)] if run.teacher else []
        if not own.startswith("examples/"):  # these have such settings of their own
            settings = vars(importlib.import_module(run.script).Args())
            for name, value in SMALL.items():
                if name.replace("-", "_") in settings and f"--{name}" not in flags:
                    flags += [f"--{name}", value]
    flags += ["--system-prompt", run.system_prompt] if run.system_prompt else []
    return ["python", *map(str, [*flags, "--precision", run.precision, *target])]


def data_of(name, seed):
    return FOLDER / f"{name}_data_{seed}.jsonl"


def execute(command, threads):
    """Run a command to its end; return its minutes and its maximum of memory in GiB."""
    folder, begun = Path(command[-1]), time.time()
    if saves_of(folder):
        first_flag = next(i for i, word in enumerate(command) if word.startswith("--"))
        command = [*command[:first_flag], "--resume", str(folder)]
    elif folder.exists():
        shutil.rmtree(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.log", "a") as log:
        process = subprocess.Popen([sys.executable, *command[1:]], cwd=ROOT, env=environment, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{shlex.join(command)}: see {folder}.log")
    return (time.time() - begun) / 60, usage.ru_maxrss / 2**20


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def one(name, seed, threads, results):
    """Do what the csv lacks of a run and its evaluations; return its rows of the csv."""
    key, folder = {"run": name, "seed": seed}, folder_of(name, seed)
    rows = [row for row in read_csv(results) if key.items() <= row.items()]
    if RUNS[name].sampled and not data_of(name, seed).exists():
        execute(command_of(name, seed, "data"), threads)
    if not (folder / "trained").exists() or "whole" not in looks_of(rows):
        minutes, gib = execute(command_of(name, seed), threads)
        (folder / "trained").touch()  # others may begin from it
    if "whole" not in looks_of(rows):  # else the run is made again for others to begin from
        steps = read_jsonl(folder / "metrics.jsonl")
        rows = [key | {metric: value * 1 for metric, value in line.items()} for line in steps]  # of False 0
        count_completions(rows, json.loads((folder / "args.json").read_text()))
        rows.append(key | {"look": "whole", "step": steps[-1]["step"], "minutes": minutes, "gib": gib})
        if RUNS[name].sampled:
            rows[-1]["samples"] = len(read_jsonl(data_of(name, seed)))
    for look in [look for look in RUNS[name].looks if look not in looks_of(rows)]:
        command = command_of(name, seed, look)
        if look == "16 samples":
            options = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True, "check": True}
            output = subprocess.run([sys.executable, *command[1:]], **options).stdout
            found = json.loads(output.splitlines()[-1])
        else:
            execute(command, threads)
            found = read_jsonl(Path(command[-1], "metrics.jsonl"))[0]
        rows.append(key | {"look": look} | found)
    return rows


def held_out():
    """Return the kind of constraint of each held-out instruction."""
    rows = read_jsonl(ROOT / CONSTRAINTS / "test.jsonl")
    return {row["prompt"]: json.loads(row["answer"])["kind"] for row in rows}


def count_completions(rows, args):
    """Add to the rows of steps how many completions each sampled, of dapo.py with those that it discards."""
    for row in rows:
        if "reward/mean" in row:
            prompts = args["prompts_per_step"] * row.get("rollout/rounds", 1)
            row["rollout/completions"] = prompts * args.get("group_size", 1)


def looks_of(rows):
    return {row["look"] for row in rows if "look" in row}


def pass_at(checkpoint, seed, num_prompts=100, num_samples=16):
    """{"eval/pass@k": of that many samples a prompt}, without bias (Chen et al. 2021, eq. 1)."""
    device = grpo.init_ranks()
    args = grpo.Args(
        model=checkpoint,
        dataset=str(ROOT / MAWPS),
        system_prompt=BOXED,
        max_prompt_length=160,
        max_completion_length=48,
        precision="bfloat16",
        eval_prompts=num_prompts,
    )
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    _, prompts = grpo.load_rows(args, tokenizer)
    sampler = grpo.load_sampler(args, tokenizer, device)
    torch.manual_seed(seed)
    repeated = [prompt for prompt in prompts for _ in range(num_samples)]
    _, texts = grpo.sample_completions(sampler, tokenizer, repeated, 1.0, args)
    rewards = grpo.score_completions(texts, repeated)
    right = [sum(rewards[i : i + num_samples]) for i in range(0, len(rewards), num_samples)]
    wrong = {
        k: [math.comb(num_samples - int(n), k) / math.comb(num_samples, k) for n in right] for k in (1, 2, 4, 8, 16)
    }
    return {"step": 0} | {f"eval/pass@{k}": 1 - mean(values) for k, values in wrong.items()}


def read_csv(results=RESULT):
    """The rows of the csv, with numbers as numbers; what a row does not have is left out."""
    if not results.exists():
        return []
    with open(results, newline="") as file:
        rows = [{key: value for key, value in row.items() if value != ""} for row in csv.DictReader(file)]
    texts = ("run", "look", "right")
    return [{key: value if key in texts else float(value) for key, value in row.items()} for row in rows]


def write(rows, results):
    """Put the rows of a run into the csv, in place of those it had."""
    ours = rows[0]["run"], rows[0]["seed"]
    kept = [row for row in read_csv(results) if (row["run"], row["seed"]) != ours] + rows
    kept.sort(key=lambda row: ([*RUNS].index(row["run"]), row["seed"]))
    names = list(dict.fromkeys(["run", "seed", "look", "step", *(name for row in kept for name in row)]))
    with open(results, "w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for row in kept:
            writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})


def make(jobs, together, results):
    """Run the jobs, each after those it begins from, so many at a time."""
    pool, futures, lock = ThreadPoolExecutor(together), {}, Lock()

    def job(name, seed):
        for base in {(base, seed) for base in (RUNS[name].base, RUNS[name].reward_model)} & {*futures}:
            while not (folder_of(*base) / "trained").exists() and not futures[base].done():
                time.sleep(1)
        print(f"{datetime.now():%H:%M} {name} {seed}", flush=True)
        rows = one(name, seed, 2 // together, results)
        with lock:
            write(rows, results)
        for state in saves_of(folder_of(name, seed)):
            shutil.rmtree(state)  # 1.6 GB
        print(f"{datetime.now():%H:%M} {name} {seed}: done", flush=True)

    for name, seed in jobs:
        futures[name, seed] = pool.submit(job, name, seed)
    pool.shutdown()
    for (name, seed), future in futures.items():
        if future.exception():
            print(f"{name} {seed}: {future.exception()}")


def over_seeds(values, before=None):
    """A mean with its lowest and highest value over seeds, after the mean of before."""
    if not values:
        return ""
    text = f"{mean(values):.3f}"
    lowest, highest = f"{min(values):.3f}", f"{max(values):.3f}"
    if lowest != highest:
        text += f" ({lowest} to {highest})"
    return text if before is None else f"{mean(before):.3f} → {text}"


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"|{'|'.join(map(str, line))}|" for line in lines)


def cost(rows, name):
    whole = [row for row in rows if row["run"] == name and row.get("look") == "whole"]
    return [len(whole), f"{max(row['minutes'] for row in whole):.0f}", f"{max(row['gib'] for row in whole):.1f}"]


START = "start: `sft.py`"
WITHOUT_CALCULATOR = {START: "sft", "`grpo.py` on MAWPS": "grpo", "`grpo.py` on SVAMP": "grpo_svamp"}
WITH_CALCULATOR = {START: "sft", "`grpo_tools.py` on SVAMP": "grpo_tools", "`grpo_tools.py` on both": "grpo_tools_both"}
METRICS = {"eval/accuracy": "accuracy", "eval/pass@1": "pass@1"}
SETTINGS = {  # {(run of grpo.py on MAWPS, seed): title}
    ("grpo_1e-6", 1): "`--learning-rate 1e-6`",
    ("grpo_3e-6", 1): "`--learning-rate 3e-6`",
    ("grpo", 1): "as on the page",
    ("grpo_3e-5", 1): "`--learning-rate 3e-5`",
    ("grpo_float32", 1): "`--precision float32`",
    ("grpo", 3): "as on the page",
    ("grpo_kl", 3): "`--kl-coef 0.04`",
    ("grpo_warmup", 3): "`--warmup-steps 8`",
    ("grpo_one_update", 3): "`--minibatch-size 128`",
}


def values_of(rows, name, look, metric):
    """Return a metric of all seeds of a run, evaluated on the data of this name."""
    return [row[metric] for row in rows if row["run"] == name and row.get("look") == look and metric in row]


def words_table(rows, runs, look_of_start=""):
    """Return what held-out problems say of these runs {title: name}; sft.py is also evaluated with the calculator."""
    columns = [(data, metric) for data in ON_WORDS for metric in METRICS] + [("SVAMP", "equations/differences")]
    lines = []
    for title, name in runs.items():
        suffix = look_of_start if title == START else ""
        cells = [over_seeds(values_of(rows, name, data + suffix, metric)) for data, metric in columns]
        lines.append([title, *cells, cost(rows, name)[1]])
    head = [f"{data} {title}" for data in ON_WORDS for title in METRICS.values()]
    return table(["", *head, "SVAMP: subtractions", "minutes"], lines)


def settings_table(rows):
    """Return what held-out problems say of grpo.py on MAWPS with other settings, one seed each."""
    lines = []
    for (name, seed), title in SETTINGS.items():
        own = [row for row in rows if (row["run"], row["seed"]) == (name, seed)]
        cells = [over_seeds(values_of(own, name, "MAWPS", metric)) for metric in METRICS]
        lines.append([title, seed, *cells, *cost(own, name)[1:]])
    return table(["", "seed", *METRICS.values(), "minutes", "GiB"], lines)


def samples_table(rows):
    """pass@k before and after grpo.py."""
    names = {"sft": "after `sft.py`", "grpo": "after `grpo.py`"}
    looks = {name: [row for row in rows if row["run"] == name and row.get("look") == "16 samples"] for name in names}
    ks = (1, 2, 4, 8, 16)
    lines = [
        [names[name], *(over_seeds([row[f"eval/pass@{k}"] for row in found]) for k in ks)]
        for name, found in looks.items()
        if found
    ]
    return table(["", *(f"pass@{k}" for k in ks)], lines)


EVALUATED = {  # {run: metrics of its own evaluations}
    "reward_model": ["pair_accuracy"],
    "dpo": ["pair_accuracy", "pair_chosen_log_ratio", "pair_rejected_log_ratio"],
    "ppo_rlhf": ["score"],
    "one_sentence": ["reward"],
}


def evaluations_table(rows):
    """Return what the evaluations of a run itself say, first and last."""
    lines = []
    for name, metrics in EVALUATED.items():
        for metric in metrics:
            by_seed = {}
            for row in rows:
                if row["run"] == name and "look" not in row and f"eval/{metric}" in row:
                    by_seed.setdefault(row["seed"], []).append(row[f"eval/{metric}"])
            first, last = zip(*((values[0], values[-1]) for values in by_seed.values()))
            lines.append([f"`{name}.py`", f"`{metric}`", over_seeds(last, first), *cost(rows, name)[1:]])
    return table(["script", "metric on held-out data", "before → after", "minutes", "GiB"], lines)


def parts_of(name):
    """Return the third arguments of command_of for all commands of a run."""
    return [*(["data"] if RUNS[name].sampled else []), "", *RUNS[name].looks]


def instructions_by_step(rows, runs=("instructions", "instructions_sft")):
    """Return {title: rows of all seeds} of these runs' evaluations on held-out instructions."""
    found = {}
    for row in (row for row in rows if "right" in row and row["run"] in runs):
        titles = {"instructions": f"`grpo.py`, step {row['step']:.0f}", "instructions_sft": "`sft.py` on right samples"}
        titles |= {"instructions_teacher": "the teacher", "instructions_gkd": f"`gkd.py`, step {row['step']:.0f}"}
        if row["run"] != "instructions_teacher" or row["step"] > 0:
            found.setdefault(titles[row["run"]], []).append(row)
    return found


def trained_on_instructions(rows):
    """Return {script: a pair per step, completions so far and mean reward} of the runs with seed 1 that sample."""
    found = {}
    for name in (name for name in RUNS if name.startswith("instructions") and name != "instructions_teacher"):
        steps = [row for row in rows if row["run"] == name and row["seed"] == 1 and "reward/mean" in row]
        completions = accumulate(row["rollout/completions"] for row in steps)
        if steps:
            script = f"{name.partition('_')[2] or 'grpo'}.py"
            found[script] = list(zip(completions, (row["reward/mean"] for row in steps)))
    return found


def others_table(rows):
    """Training reward of all scripts on instructions, at the beginning and after 1,536 completions."""
    lines = []
    for script, found in trained_on_instructions(rows).items():
        first = [reward for completions, reward in found if completions <= 512]
        last = [reward for completions, reward in found if 1536 < completions <= 2048]
        lines.append([f"`{script}`", f"{mean(first):.2f}", f"{mean(last):.2f}"])
    return table(["mean reward in training, seed 1", "first 512 completions", "last 512 of 2,048"], lines)


def rights_of(rows):
    """Return the column "right" of rows of evaluations as an array of numbers (seeds, 200)."""
    return np.array([[int(digit) for digit in row["right"]] for row in rows])


def instructions_table(rows, **runs):
    """What the model does with held-out instructions, by step, and after fine-tuning on its own right samples."""
    metrics = ("eval/accuracy", "eval/pass@1", "recall")
    found = instructions_by_step(rows, **runs)
    lines = [[title, *(over_seeds([row[m] for row in found[title]]) for m in metrics)] for title in found]
    return table(["", "greedy accuracy", "pass@1", "words of the reference"], lines)


def accuracy_by_kind(rows):
    """Return {title: {kind: greedy accuracy as text}} before, after grpo.py and after sft.py, means over seeds."""
    kinds = np.array([*held_out().values()])
    accuracies = {}
    for title, found in instructions_by_step(rows).items():
        right = rights_of(found)
        if title.endswith((" step 0", " step 20", "samples")):
            title = "before" if title.endswith(" step 0") else title
            accuracies[title] = {KINDS[kind]: f"{right[:, kinds == kind].mean():.2f}" for kind in KINDS}
            accuracies[title]["all"] = f"{right.mean():.3f}"
    return accuracies


def kinds_table(rows):
    """Return the table of greedy accuracy by kind of constraint: a row per kind, with every seed of grpo.py."""
    accuracies, kinds = accuracy_by_kind(rows), np.array([*held_out().values()])
    evaluated = instructions_by_step(rows)["`grpo.py`, step 20"]
    rights = rights_of(evaluated)
    by_seed = {KINDS[kind]: [f"{value:.2f}" for value in rights[:, kinds == kind].mean(1)] for kind in KINDS}
    by_seed["all"] = [f"{value:.3f}" for value in rights.mean(1)]
    seeds = [f"seed {row['seed']:.0f}" for row in evaluated]
    before, after, tuned = accuracies.values()
    lines = [[kind, before[kind], after[kind], *by_seed[kind], tuned[kind]] for kind in before]
    return table(["constraint", *list(accuracies)[:2], *seeds, list(accuracies)[2]], lines)


def errors_table(rows):
    """The rise of greedy accuracy, with its standard errors over instructions and over seeds."""
    found = instructions_by_step(rows)
    before = rights_of(found.pop("`grpo.py`, step 0"))
    lines = []
    for title, after in found.items():
        change = rights_of(after) - before[: len(after)]  # (seeds, 200)
        errors = [means.std(ddof=1) / len(means) ** 0.5 for means in (change.mean(0), change.mean(1))]
        lines.append([title, f"{change.mean():.3f}", *(f"{error:.3f}" for error in errors)])
    return table(["", "rise of greedy accuracy", "standard error, instructions", "standard error, seeds"], lines)


def completions_of(kind):
    """Return the first held-out instruction of a kind, and its rows of seed 1 before and after training."""
    prompt = next(prompt for prompt, other in held_out().items() if other == kind)
    before, after = (
        row
        for row in read_jsonl(SAMPLES)
        if row["run"] == "instructions" and row["seed"] == 1 and row["prompt"] == prompt
    )
    return prompt, before, after


KINDS = {
    "quotes": "in quotation marks",
    "end": "end with a phrase",
    "at most": "at most n words",
    "include": "include a word",
    "bullets": "n bullet points",
    "lowercase": "lowercase",
    "no commas": "no commas",
    "begin": "begin with a word (not trained)",
}
TABLES = {
    "instructions": instructions_table,
    "kinds": kinds_table,
    "distilled": partial(instructions_table, runs=("instructions_teacher", "instructions_gkd")),
    "without calculator": partial(words_table, runs=WITHOUT_CALCULATOR),
    "with calculator": partial(words_table, runs=WITH_CALCULATOR, look_of_start=", calculator"),
    "evaluations": evaluations_table,
    "settings": settings_table,
    "samples": samples_table,
    "errors": errors_table,
    "others": others_table,
}


def write_page(page, rows):
    """The page with every table that it names."""
    for name, make_table in TABLES.items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        if mark:
            page = f"{before}{mark}\n{make_table(rows)}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return page


def draw_instructions(rows):
    """Draw docs/pictures/instructions.png: held-out instructions followed by step, and one of them before and after.

    `python benchmark/real_model.py --page` draws it from benchmark/results/real_model.csv and real_model_samples.jsonl.
    """
    evaluated = [row for row in rows if row["run"] == "instructions" and "right" in row]
    by_step = {}
    for row in evaluated:
        by_step.setdefault(row["step"], []).append(row["eval/accuracy"])
    means = {step: mean(values) for step, values in by_step.items()}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), width_ratios=(1, 1.2))
    figure.suptitle("GRPO on SmolLM2-135M: 200 held-out instructions, each with one constraint", size=13, y=0.97)

    left.axhline(means[0], color="gray", linestyle="--")
    left.text(20, means[0] - 0.02, f"before training: {means[0]:.2f}", color="dimgray", size=11, ha="right", va="top")
    for seed in sorted({row["seed"] for row in evaluated}):
        own = [row for row in evaluated if row["seed"] == seed]
        values = [row["eval/accuracy"] for row in own]
        left.plot([row["step"] for row in own], values, color="tab:blue", alpha=0.45, linewidth=1)
    left.plot([*means], [*means.values()], color="tab:blue", linewidth=3)
    left.text(0.3, 0.68, "bold: mean of 3 seeds", color="tab:blue", size=11, weight="bold")
    left.text(20.4, means[20], f"{means[20]:.2f}", color="tab:blue", size=13, weight="bold", va="center")
    left.set(xlabel="step (128 completions each)", ylabel="share that meets it (greedy)", ylim=(0, 0.75), xlim=(0, 23))
    left.set_xticks([*means])
    left.tick_params(labelsize=11)
    left.xaxis.label.set_size(11)
    left.yaxis.label.set_size(11)
    left.spines[["top", "right"]].set_visible(False)

    prompt, before, after = completions_of("quotes")
    *instruction, constraint = prompt.split("\n\n")
    right.axis("off")
    right.set(xlim=(0, 1), ylim=(0, 1))
    lines = (
        ("prompt", "\n".join(instruction), "black", 1.0),
        ("its constraint", constraint, "black", 0.72),
        ("before training: not met", before["completion"], "firebrick", 0.51),
        ("after 20 steps (seed 1): met", after["completion"], "darkgreen", 0.30),
    )
    for title, text, color, top in lines:
        right.text(0, top, title, size=10, color=color, weight="bold", va="top")
        right.text(0.02, top - 0.08, text, size=11.5, color=color, va="top")
    note = "The reward does not check the content:\nneither answer is in the active voice."
    right.text(0, 0.08, note, size=10, color="dimgray", va="top", style="italic")
    figure.tight_layout()
    figure.savefig(PICTURES / "instructions.png", dpi=125)
    plt.close(figure)


@dataclass
class Args:
    """What to do; by default all that the csv lacks."""

    runs: list[str] = field(default_factory=lambda: list(RUNS))
    """rows of the page"""
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])
    """of each"""
    together: int = 2
    """runs at a time; two cores are shared among them"""
    results: Path = RESULT
    """csv of finished runs, which are skipped"""
    show: bool = False
    """print the commands, run nothing"""
    page: bool = False
    """make tables and the picture of the committed csv, run nothing"""
    pass_at: str | None = None
    """print pass@k of a checkpoint"""


def main(args):
    results = args.results.resolve()
    os.chdir(ROOT)
    if args.pass_at:
        return print(json.dumps(pass_at(args.pass_at, args.seeds[0])))
    rows, jobs = read_csv(results), set()
    for name in args.runs:
        for seed in args.seeds:
            done = looks_of(row for row in rows if (row["run"], row["seed"]) == (name, seed))
            if seed in RUNS[name].seeds and (args.show or not {"whole", *RUNS[name].looks} <= done):
                jobs.add((name, seed))
    needed = {base for run in RUNS.values() for base in (run.base, run.reward_model, run.teacher)}
    bases = [name for name in RUNS if name in needed]
    for name, seed in list(jobs):
        run = RUNS[name]
        own = {(run.base, seed), (run.reward_model, seed), (run.teacher, 1)}
        jobs |= {(base, one) for base, one in own if base and not checkpoint_of(base, one).exists()}
    order = [*bases, *args.runs].index
    jobs = sorted(jobs, key=lambda job: (job[0] not in bases, job[1], order(job[0])))  # what others begin from first
    if args.show:
        commands = [command_of(*job, look) for job in jobs for look in parts_of(job[0])]
        print(*map(shlex.join, commands), sep="\n")
        return None
    if not args.page:
        make(jobs, args.together, results)
    if results == RESULT:
        for page in PAGES:
            page.write_text(write_page(page.read_text(), read_csv()))
        draw_instructions(read_csv())


if __name__ == "__main__":
    main(tyro.cli(Args))
