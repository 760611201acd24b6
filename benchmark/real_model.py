"""Scripts on a real language model: models/smollm2 on instructions with constraints, word problems, and pairs.

    python benchmark/real_model.py                              every run that benchmark/results/real_model.csv lacks
    python benchmark/real_model.py --runs grpo dapo --seeds 1   these, and first what they begin from
    python benchmark/real_model.py --show                       the commands
    python benchmark/real_model.py --page                       write the tables and pictures of the pages

Two runs work at a time, with a core each. Start one of these commands at a time, since each writes the csv. A run is a
folder runs/real_model/NAME_SEED. An interrupted run is resumed, and its minutes are then those of the last part.

The csv has a row for every step that was logged. A trained model that is evaluated on other data has a row with the
name of these data in the column "look". Every run has a row "whole" with its minutes and GiB. Some completions of each
evaluation are in real_model_samples.jsonl.
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
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
from examples.instructions import words_of  # noqa: E402

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


def on_words(script, flags="", data=MAWPS, looks=("MAWPS", "SVAMP"), steps=16, rate="1e-5", **options):
    flags = f"--dataset {data} {WORDS} --num-steps {steps} --learning-rate {rate} {flags}"
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
    "reinforce": on_words("reinforce"),
    "grpo": on_words("grpo", "--kl-coef 0", looks=("MAWPS", "SVAMP", "16 samples")),
    "dr_grpo": on_words("dr_grpo"),
    "dapo": on_words("dapo", "--max-rounds 2 --warmup-steps 0", steps=8),  # as many completions as the others
    "gspo": on_words("gspo"),
    "cispo": on_words("cispo"),
    "grpo_svamp": on_words("grpo", "--kl-coef 0", SVAMP, ("MAWPS", "SVAMP", "16 samples")),
    "grpo_tools": on_words("grpo_tools", data=SVAMP),
    "grpo_tools_both": on_words("grpo_tools", data="data/word_problems"),
    "grpo_process": on_words("grpo_process", "--kl-coef 0"),
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


def command_of(name, seed, look=""):
    """Return a command as a list: of a run, of an evaluation of its checkpoint, or of the sampling of its data."""
    run = RUNS[name]
    target = folder_of(f"{name}_on_{look}".replace(", ", "_") if look else name, seed)
    target = ["--seed", seed, "--run-dir", target]
    model = folder_of(run.base, seed) / "checkpoint" if run.base else MODEL
    checkpoint = folder_of(name, seed) / "checkpoint"
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
        flags += ["--reward-model", folder_of(run.reward_model, seed) / "checkpoint"] if run.reward_model else []
        flags += ["--teacher", folder_of(run.teacher, 1) / "checkpoint"] if run.teacher else []
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
    if [*folder.glob("state/[0-9]*")]:
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


def one(name, seed, threads):
    """Do what the csv lacks of a run and its evaluations; return its rows of the csv, and completions."""
    key, folder = {"run": name, "seed": seed}, folder_of(name, seed)
    rows = [row for row in read_csv() if key.items() <= row.items()]
    samples = [line for line in read_jsonl(SAMPLES) if key.items() <= line.items()]
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
        evaluated = read_jsonl(folder / "eval_samples.jsonl")
        mark_right(rows, evaluated)
        ends = [[line for line in evaluated if line["step"] == evaluated[end]["step"]] for end in (0, -1) if evaluated]
        samples = [key | line for end in ends for line in shown_of(end)]
    for look in [look for look in RUNS[name].looks if look not in looks_of(rows)]:
        command = command_of(name, seed, look)
        if look == "16 samples":
            options = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True, "check": True}
            output = subprocess.run([sys.executable, *command[1:]], **options).stdout
            found = json.loads(output.splitlines()[-1])
        else:
            execute(command, threads)
            lines = read_jsonl(Path(command[-1], "eval_samples.jsonl"))
            found = read_jsonl(Path(command[-1], "metrics.jsonl"))[0]
            if look != "instructions":
                found |= count_equations(lines)
            samples += [key | {"look": look} | line for line in lines[:3]]
        rows.append(key | {"look": look} | found)
        if look == "instructions":
            mark_right(rows[-1:], lines)
    return rows, samples


def shown_of(lines):
    """Return the completions that are kept of an evaluation: three, or one for each kind of constraint."""
    kinds = {kind: prompt for prompt, kind in reversed(held_out().items())}  # the first of each kind
    return [line for line in lines if line["prompt"] in kinds.values()] or lines[:3]


def held_out():
    """Return the kind of constraint of each held-out instruction."""
    rows = read_jsonl(ROOT / CONSTRAINTS / "test.jsonl")
    return {row["prompt"]: json.loads(row["answer"])["kind"] for row in rows}


def mark_right(rows, lines):
    """Add to rows of evaluations how the held-out instructions were followed.

    "right" has a 0 or 1 for each instruction, in the order of the file. "recall" is the mean share of the words of the
    reference answer, in data/manners, that the completion has (the recall of ROUGE-1, for distinct words).
    """
    references = {row["prompt"]: row["chosen"] for row in read_jsonl(ROOT / MANNERS / "test.jsonl")}
    for row in rows:
        found = {line["prompt"]: line for line in lines if line["step"] == row["step"]}
        if "eval/accuracy" not in row or found.keys() != held_out().keys():
            continue
        row["right"] = "".join("1" if found[prompt]["reward"] else "0" for prompt in held_out())
        shares = []
        for prompt, line in found.items():
            expected = {*words_of(references[prompt.rpartition("\n\n")[0]])}
            shares.append(len(expected & {*words_of(line["completion"])}) / len(expected))
        row["recall"] = mean(shares)


def count_completions(rows, args):
    """Add to the rows of steps how many completions each sampled, of dapo.py with those that it discards."""
    before = 0
    for row in rows:
        if "reward/mean" in row:
            consumed = row.get("rollout/prompts_consumed", before + args["prompts_per_step"])
            row["rollout/completions"] = (consumed - before) * args.get("group_size", 1)
            before = consumed


def count_equations(lines):
    """Of the equations in greedy completions: how many are true, and how many have each operation."""
    found = [re.findall(r"([\d.]+) ([-+*/]) ([\d.]+) = (-?[\d.]+)", line["completion"]) for line in lines]
    true, operations = 0, Counter(operation for equations in found for _, operation, _, _ in equations)
    for a, operation, b, c in (equation for equations in found for equation in equations):
        with suppress(ValueError, ZeroDivisionError):
            a, b, c = float(a), float(b), float(c)
            true += abs({"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else math.inf}[operation] - c) < 1e-3
    names = {"+": "sums", "-": "differences", "*": "products", "/": "quotients"}
    shares = {f"equations/{name}": operations[sign] / operations.total() for sign, name in names.items()}
    return {"equations/true": true / operations.total()} | shares if operations else {}


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
    policy = grpo.prepare_model(grpo.LogprobModel(grpo.load_model(checkpoint, tokenizer)), args, device)
    torch.manual_seed(seed)
    repeated = [prompt for prompt in prompts for _ in range(num_samples)]
    _, texts = grpo.sample_completions(policy, tokenizer, repeated, 1.0, args)
    rewards = grpo.score_completions(texts, repeated)
    right = [sum(rewards[i : i + num_samples]) for i in range(0, len(rewards), num_samples)]
    wrong = {
        k: [math.comb(num_samples - int(n), k) / math.comb(num_samples, k) for n in right] for k in (1, 2, 4, 8, 16)
    }
    return {"step": 0} | {f"eval/pass@{k}": 1 - mean(values) for k, values in wrong.items()}


def read_csv():
    """The rows of the csv, with numbers as numbers; what a row does not have is left out."""
    if not RESULT.exists():
        return []
    with open(RESULT, newline="") as file:
        rows = [{key: value for key, value in row.items() if value != ""} for row in csv.DictReader(file)]
    texts = ("run", "look", "right")
    return [{key: value if key in texts else float(value) for key, value in row.items()} for row in rows]


def write(rows, samples):
    """Put the rows of a run into the csv, and its samples beside it, in place of those it had."""
    ours = rows[0]["run"], rows[0]["seed"]
    order = [*RUNS].index
    for path, new, old in ((RESULT, rows, read_csv()), (SAMPLES, samples, read_jsonl(SAMPLES))):
        kept = [row for row in old if (row["run"], row["seed"]) != ours] + new
        kept.sort(key=lambda row: (order(row["run"]), row["seed"]))
        if path is SAMPLES:
            path.write_text("".join(json.dumps(row) + "\n" for row in kept))
            continue
        names = list(dict.fromkeys(["run", "seed", "look", "step", *(name for row in kept for name in row)]))
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            for row in kept:
                writer.writerow(
                    {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()}
                )


def make(jobs, together):
    """Run the jobs, each after those it begins from, so many at a time."""
    pool, futures, lock = ThreadPoolExecutor(together), {}, Lock()

    def job(name, seed):
        for base in {(base, seed) for base in (RUNS[name].base, RUNS[name].reward_model)} & {*futures}:
            while not (folder_of(*base) / "trained").exists() and not futures[base].done():
                time.sleep(1)
        print(f"{datetime.now():%H:%M} {name} {seed}", flush=True)
        rows, samples = one(name, seed, 2 // together)
        with lock:
            write(rows, samples)
        shutil.rmtree(folder_of(name, seed) / "state", ignore_errors=True)  # 1.6 GB
        print(f"{datetime.now():%H:%M} {name} {seed}: done", flush=True)

    for name, seed in jobs:
        futures[name, seed] = pool.submit(job, name, seed)
    pool.shutdown()
    for (name, seed), future in futures.items():
        if future.exception():
            print(f"{name} {seed}: {future.exception()}")


def over_seeds(values, before=None):
    """A mean with the half of its range over seeds, after that of before."""
    text = f"{mean(values):.3f}" + (f" ± {(max(values) - min(values)) / 2:.3f}" if len(values) > 1 else "")
    return text if before is None else f"{mean(before):.3f} -> {text}"


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def cost(rows, name):
    whole = [row for row in rows if row["run"] == name and row.get("look") == "whole"]
    return [len(whole), f"{max(row['minutes'] for row in whole):.0f}", f"{max(row['gib'] for row in whole):.1f}"]


TITLES = {"instruct": "original model", "grpo_svamp": "`grpo.py` on SVAMP", "grpo_tools": "`grpo_tools.py` on SVAMP"}
TITLES |= {"grpo_tools_both": "`grpo_tools.py` on both", "grpo_float32": "`grpo.py` in float32"}
TITLES |= {"grpo_kl": "`grpo.py --kl-coef 0.04`", "grpo_warmup": "`grpo.py --warmup-steps 8`"}
TITLES |= {"grpo_one_update": "`grpo.py --minibatch-size 128`"}
TITLES |= {f"grpo_{rate}": f"`grpo.py --learning-rate {rate}`" for rate in ("1e-6", "3e-6", "3e-5")}
METRICS = {"eval/accuracy": "accuracy", "eval/pass@1": "pass@1", "eval/pass@4": "pass@4", "equations/true": "equations"}


def title_of(name):
    return TITLES.get(name, f"`{name}.py`")


def words_table(rows):
    """What held-out problems say of each run that was looked at, of `sft.py` also with the calculator."""
    lines = []
    for name in RUNS:
        for suffix in ("", ", calculator"):
            own = [row for row in rows if row["run"] == name]
            looks = {data: [row for row in own if row.get("look") == data + suffix] for data in ON_WORDS}
            if any(looks.values()):
                title = title_of(name) + suffix
                found = [[row[m] for row in looks[data] if m in row] for data in ON_WORDS for m in METRICS]
                lines.append([title, *(over_seeds(values) if values else "" for values in found), *cost(rows, name)])
    head = [f"{data} {title}" for data in ON_WORDS for title in METRICS.values()]
    return table(["", *head, "seeds", "minutes", "GiB"], lines)


def short_words_table(rows):
    """The table of the page: the main rows of words_table, and the lowest and highest mean of six other scripts."""
    columns = [(data, metric) for data in ON_WORDS for metric in ("eval/accuracy", "eval/pass@1")]

    def found(name, suffix=""):
        own = [row for row in rows if row["run"] == name]
        return [[row[m] for row in own if row.get("look") == data + suffix and m in row] for data, m in columns]

    lines = []
    for name in ("sft", "sft, calculator", "grpo", "others", "grpo_svamp", "grpo_tools", "grpo_tools_both"):
        name, mark, suffix = name.partition(", ")
        if name == "others":
            others = [other for other in ON_MAWPS if other != "grpo"]
            means = zip(*([mean(values) for values in found(other)] for other in others))
            minutes = max((cost(rows, other)[1] for other in others), key=float)
            title = f"{len(others)} other scripts: lowest to highest mean"
            lines.append([title, *(f"{min(values):.3f} to {max(values):.3f}" for values in means), minutes])
            continue
        values = map(over_seeds, found(name, mark + suffix))
        lines.append([title_of(name) + mark + suffix, *values, cost(rows, name)[1]])
    return table(["", *(f"{data} {METRICS[metric]}" for data, metric in columns), "minutes"], lines)


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


def evaluations_table(rows, metrics=None):
    """What the evaluations of a run itself say, first and last; metrics: {run: names}, by default all."""
    lines = []
    for name in metrics or ("sft", "reward_model", "dpo", "ppo_rlhf", "one_sentence"):
        own = [row for row in rows if row["run"] == name and "look" not in row]
        for metric in dict.fromkeys(key for row in own for key in row if key.startswith("eval/")):
            if metrics and metric[5:] not in metrics[name]:
                continue
            by_seed = {}
            for row in own:
                if metric in row:
                    by_seed.setdefault(row["seed"], []).append(row[metric])
            first, last = zip(*((values[0], values[-1]) for values in by_seed.values()))
            if {*first, *last} == {0}:
                continue  # of ppo_rlhf.py, which has the reward model's score in its place
            lines.append([f"`{name}.py`", metric[5:], over_seeds(last, first), *cost(rows, name)[1:]])
    return table(["script", "metric on held-out data", "before -> after", "minutes", "GiB"], lines)


def parts_of(name):
    """Return the third arguments of command_of for all commands of a run."""
    return [*(["data"] if RUNS[name].sampled else []), "", *RUNS[name].looks]


def completions(_):
    """Two held-out problems with their answers, and each model's greedy completions of them."""
    rows = read_jsonl(SAMPLES)
    lines = []
    for name in ("instruct", "sft", "grpo", "grpo_tools"):
        found = [row for row in rows if row["run"] == name and row.get("look") == "MAWPS" and row["seed"] == 1]
        answers = [row["answer"].partition(r"\boxed{")[2].rstrip("}") for row in found[:2]]
        lines = lines or [["problem", f"{row['prompt']} ({answer})", ""] for row, answer in zip(found, answers)]
        lines += [[title_of(name), " ".join(row["completion"].split())[:160], row["reward"]] for row in found[:2]]
    return table(["", "text", "reward"], lines)


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
    metrics = ("eval/accuracy", "eval/pass@1", "eval/pass@4", "recall")
    found = instructions_by_step(rows, **runs)
    lines = [[title, *(over_seeds([row[m] for row in found[title]]) for m in metrics)] for title in found]
    return table(["", "greedy accuracy", "pass@1", "pass@4", "words of the reference"], lines)


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


def replies(_, kinds=None):
    """Greedy completions before and after, seed 1: the first held-out instruction of each kind, or of these kinds."""
    found = {}
    for row in read_jsonl(SAMPLES):
        if row["run"] == "instructions" and row["seed"] == 1:
            found.setdefault(row["prompt"], []).append((row["completion"], row["reward"]))
    lines = []
    for prompt in (prompt for prompt, kind in held_out().items() if not kinds or kind in kinds):
        for (before, reward_before), (after, reward_after) in [found[prompt]] if prompt in found else []:
            texts = (" ".join(text.replace("|", "\\|").split()) for text in (prompt, before, after))
            lines.append([*texts, f"{reward_before:g} → {reward_after:g}"])
    return table(["instruction", "before", "after", "reward"], lines)


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
TABLES = {"instructions": instructions_table, "kinds": kinds_table, "errors": errors_table}
TABLES |= {"distilled": partial(instructions_table, runs=("instructions_teacher", "instructions_gkd"))}
TABLES |= {"others": others_table, "replies": replies, "words": words_table, "samples": samples_table}
TABLES |= {"evaluations": evaluations_table, "completions": completions}
TABLES |= {"words in short": short_words_table, "some replies": partial(replies, kinds=("at most", "quotes"))}
MAIN = {"reward_model": ["pair_accuracy"], "dpo": ["pair_accuracy", "pair_chosen_log_ratio", "pair_rejected_log_ratio"]}
MAIN |= {"ppo_rlhf": ["score"], "one_sentence": ["reward"]}
TABLES |= {"main evaluations": partial(evaluations_table, metrics=MAIN)}


def write_page(page, rows):
    """The page with every table that it names."""
    for name, make_table in TABLES.items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        if mark:
            page = f"{before}{mark}\n{make_table(rows)}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return page


ON_MAWPS = ("reinforce", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "grpo_process")
PANELS = {
    "MAWPS": ON_MAWPS,
    "grpo.py, seed 1, by learning rate (else 1e-5)": ("grpo_1e-6", "grpo_3e-6", "grpo", "grpo_3e-5", "grpo_float32"),
    "other problems, other rewards": ("grpo_svamp", "grpo_tools", "grpo_tools_both", "one_sentence"),
}


def draw(rows):
    """Draw the reward of each step and the four around it: a mean over the seeds that all runs of a panel have."""
    figure, panels = plt.subplots(1, len(PANELS), figsize=(5 * len(PANELS), 4.5))
    for axes, (title, names) in zip(panels, PANELS.items()):
        seeds = set.intersection(*({*RUNS[name].seeds} for name in names))
        for name in names:
            found = {}
            for row in rows:
                if row["run"] == name and row["seed"] in seeds and "look" not in row and "reward/mean" in row:
                    found.setdefault(row["step"], []).append(row["reward/mean"])
                    size = row["rollout/completions"]  # of dapo.py with those that it discards
            smooth = [mean(value for other in found if abs(other - at) <= 2 for value in found[other]) for at in found]
            if found:
                axes.plot([size * step for step in found], smooth, label=title_of(name).replace("`", ""))
        axes.set(title=title, xlabel="completions", ylim=(0, None))
        axes.legend(fontsize="small")
    panels[0].set_ylabel("reward, mean of five steps")
    figure.savefig(PICTURES / "real_model.png", dpi=110, bbox_inches="tight")
    plt.close(figure)


def draw_instructions(rows):
    """Draw accuracy on held-out instructions by step, and the training reward of six scripts."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    found = instructions_by_step(rows)
    tuned = found.pop("`sft.py` on right samples", None)
    steps = [int(title.split()[-1]) for title in found]
    for metric, label in (("eval/accuracy", "greedy"), ("eval/pass@1", "sampled (pass@1)")):
        values = [[row[metric] for row in evaluated] for evaluated in found.values()]
        left.plot(steps, [*map(mean, values)], marker="o", label=f"grpo.py, {label}")
        left.fill_between(steps, [*map(min, values)], [*map(max, values)], alpha=0.2)
    if tuned:
        accuracy = mean(row["eval/accuracy"] for row in tuned)
        left.axhline(accuracy, color="gray", linestyle="--", label="sft.py on its own right samples, greedy")
    left.set(title="held-out instructions followed: mean and range of 3 seeds", xlabel="step of 128 completions")
    left.set(ylabel="share of 200 instructions", xticks=steps, ylim=(0, 1))
    left.legend(fontsize="small")
    for script, found in trained_on_instructions(rows).items():
        smooth = [mean(reward for _, reward in found[max(0, i - 1) : i + 2]) for i in range(len(found))]
        right.plot([completions for completions, _ in found], smooth, label=script)
    right.set(title="reward in training: one run each", xlabel="completions", ylim=(0, 1))
    right.set_ylabel("mean reward of three steps")
    right.legend(fontsize="small")
    figure.savefig(PICTURES / "instructions.png", dpi=110, bbox_inches="tight")
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
    show: bool = False
    """print the commands, run nothing"""
    page: bool = False
    """make tables and pictures of the csv, run nothing"""
    pass_at: str | None = None
    """print pass@k of a checkpoint"""


def main(args):
    os.chdir(ROOT)
    if args.pass_at:
        return print(json.dumps(pass_at(args.pass_at, args.seeds[0])))
    rows, jobs = read_csv(), set()
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
        jobs |= {(base, one) for base, one in own if base and not (folder_of(base, one) / "checkpoint").exists()}
    order = [*bases, *args.runs].index
    jobs = sorted(jobs, key=lambda job: (job[0] not in bases, job[1], order(job[0])))  # what others begin from first
    if args.show:
        commands = [command_of(*job, look) for job in jobs for look in parts_of(job[0])]
        print(*map(shlex.join, commands), sep="\n")
        return None
    if not args.page:
        make(jobs, args.together)
    for page in PAGES:
        page.write_text(write_page(page.read_text(), read_csv()))
    draw(read_csv())
    draw_instructions(read_csv())


if __name__ == "__main__":
    main(tyro.cli(Args))
