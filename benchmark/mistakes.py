"""Show what common mistakes change in the metrics of grpo.py, in a short run that is sensitive to them.

    python benchmark/mistakes.py                                  make the runs that the file lacks, and the table
    python benchmark/mistakes.py --check my_grpo.py --my-flag 3   compare a script of yours with the right one

MISTAKES has the edits of grpo.py that make each mistake. The right script runs with seeds 1 to 7, the edited ones with
seeds 1 to 3. The records are in benchmark/results/mistakes.jsonl.
"""

import os
import sys
from pathlib import Path
from statistics import mean

from records import DOCS, RESULTS, ROOT, fill, make_run, read_records, table, work, write_record

RECORDS, FOLDER = RESULTS / "mistakes.jsonl", Path("runs", "mistakes")
RIGHT, RIGHT_SEEDS, SEEDS = "right script", (1, 2, 3, 4, 5, 6, 7), (1, 2, 3)
FLAGS = "--tiny --model models/long --dataset data/long --max-completion-length 112 --temperature 0.8 --warmup-steps 2"
FLAGS += " --kl-coef 0.2 --minibatch-size 16 --microbatch-tokens 512 --num-steps 10 --eval-every 5 --eval-prompts 128"

LOSS_MASK = "mask,\n                    args.clip_eps"
FORWARD = 'entropies = policy(microbatch["ids"], mask, args.temperature)'
CENTRED = "groups - groups.mean(1, keepdim=True)"
REFERENCE = "load_policy(args, tokenizer, device).requires_grad_(False)"
# {name: (metric that shows it, old text, new text)}, in the order of the page
MISTAKES = {
    "mask shifted by a token": ("eval/accuracy", LOSS_MASK, LOSS_MASK.replace("mask", "mask.roll(1, 1)")),
    "rewards not centred": ("eval/accuracy", CENTRED, "groups"),
    "answer of the next row": ("eval/reward", "zip(completions, rows)", "zip(completions, rows[1:] + rows[:1])"),
    "KL term with the wrong sign": ("policy/ref_kl", "+ kl_coef * ref_kl", "- kl_coef * ref_kl"),
    "reference is the current policy": ("loss/policy", REFERENCE, "policy"),
    "gradients not set to zero": ("policy/ref_kl", "    optimizer.zero_grad()\n", ""),
    "no temperature in the update": ("policy/approx_kl", FORWARD, FORWARD.replace("args.temperature", "1.0")),
    "old log-probabilities of the current policy": ("policy/approx_kl", 'microbatch["old_logprobs"]', "logprobs"),
    "max instead of min in the loss": ("policy/approx_kl", "torch.min(ratio", "torch.max(ratio"),
    "loss divided by the microbatch": (
        "loss/policy",
        "loss / rank_minibatch_size",
        'loss / len(microbatch["advantages"])',
    ),
    "loss divided by the padded length": ("optim/grad_norm", "mask.sum(1).clamp(min=1)", "mask.shape[1]"),
    "log-probabilities shifted by a token": ("policy/sampler_kl", "hidden[:, :-1][mask[:, 1:]]", "hidden[mask]"),
}


def edited(name):
    """Return the source of grpo.py with a mistake. Its old text must occur exactly once."""
    source = (ROOT / "grpo.py").read_text(encoding="utf-8")
    if name == RIGHT:
        return source
    _, old, new = MISTAKES[name]
    if source.count(old) != 1:
        raise ValueError(f"this text occurs {source.count(old)} times in grpo.py, not once: {old}")
    return source.replace(old, new)


def run(name, source, seed, own_flags=()):
    """Run a script and return its record with the mean of each metric over steps, and without metrics if it stops."""
    folder = FOLDER / f"{name.replace(' ', '_')}_{seed}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    script = folder.with_suffix(".py")
    script.write_text(source, encoding="utf-8")
    try:
        record = make_run(name, seed, f"python {script} {FLAGS} --seed {seed} {' '.join(own_flags)}", folder)
    except RuntimeError:
        if "sampling and training disagree" not in Path(f"{folder}.log").read_text():
            raise
        return {"run": name, "seed": seed, "metrics": {}}
    for metric, values in record["metrics"].items():
        record["metrics"][metric] = mean(value for step, value in values.items() if step != "0")
    return record


def values_of(records, name, metric):
    """Return a metric of all seeds, or nothing if one of the runs stopped."""
    found = [record["metrics"].get(metric) for (other, _), record in records.items() if other == name]
    return [] if None in found else found


def spread(values):
    """Return the lowest and the highest value with three significant digits."""
    ends = [f"{value:.3g}" for value in (min(values, default=0), max(values, default=0))]
    return " to ".join(dict.fromkeys(ends)) if values else "the run stops"


def is_outside(values, right):
    return not values or max(values) < min(right) or min(values) > max(right)


def make_table(records):
    lines = []
    for name, (metric, *_) in MISTAKES.items():
        right, wrong = values_of(records, RIGHT, metric), values_of(records, name, metric)
        lines.append([name, f"`{metric}`", spread(right), spread(wrong)])
    return table(["mistake", "metric", "right script", "with the mistake"], lines)


def check(path, own_flags):
    """Print the metrics of a script beside those of the right one, and which are outside with all seeds."""
    records = read_records(RECORDS)
    own = {("own", seed): run("own", Path(path).read_text(encoding="utf-8"), seed, own_flags) for seed in SEEDS}
    for metric in records[RIGHT, 1]["metrics"]:
        right, values = values_of(records, RIGHT, metric), values_of(own, "own", metric)
        outside = "outside" if is_outside(values, right) else ""
        print(f"{metric:28} {spread(right):24} {spread(values):24} {outside}")


def main(words):
    if words[:1] == ["--check"]:
        path = Path(words[1]).resolve()
        os.chdir(ROOT)
        check(path, words[2:])
        return
    os.chdir(ROOT)
    names = [RIGHT, *MISTAKES]
    jobs = [(name, seed) for name in names for seed in (RIGHT_SEEDS if name == RIGHT else SEEDS)]
    done = read_records(RECORDS)

    def make(name, seed):
        write_record(RECORDS, run(name, edited(name), seed), names)
        print(f"{name}, seed {seed}", flush=True)

    work([job for job in jobs if job not in done], make, together=2)
    fill(DOCS / "is_this_normal.md", "mistakes", make_table(read_records(RECORDS)))


if __name__ == "__main__":
    main(sys.argv[1:])
