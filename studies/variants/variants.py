"""Measure how a setting changes learning on the bundled task, with several seeds.

    python benchmark/variants.py lora|precision|sampler [SEED ...]        (default: 1 2 3 4 5)

The program writes its table to benchmark/results/VARIANT.md. Every run is a separate process with one thread.

- `lora` compares training all parameters of grpo.py with training adapters.
- `precision` compares float32 with bfloat16 in several scripts.
- `sampler` trains grpo.py with a sampler whose weights are rounded to 4 or 3 bits, with a scale per row. Evaluations
  use the policy without this rounding. The errors are much larger than those of bfloat16 and 8-bit samplers, to show
  what --sampler-weight-cap is for.
"""

import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RANK = "--lora-rank 8 --learning-rate"
TABLES = {
    "lora": {
        "all parameters, 1.5e-4": "grpo",
        "rank 8, 4.5e-4": f"grpo {RANK} 4.5e-4",
        "rank 8, 1.5e-3": f"grpo {RANK} 1.5e-3",
        "rank 1, 4.5e-4": "grpo --lora-rank 1 --learning-rate 4.5e-4",
    },
    "precision": {
        f"{script}, {precision}": f"{script} --precision {precision}"
        for script in ("grpo", "reinforce", "dr_grpo", "dapo", "gspo", "dpo", "ppo_rlhf --reward-model none")
        for precision in ("float32", "bfloat16")
    },
    "sampler": {
        f"{bits} bits, weights {'capped at 2' if weighted else 'off'}": f"crude {bits} {weighted}"
        for bits in (4, 3)
        for weighted in (1, 0)
    },
}


def run_crude(bits, weighted, flags):
    """Train grpo.py with a sampler whose weights are rounded to this number of bits."""
    sys.path.insert(0, str(ROOT))
    from ablations import parse

    import grpo

    whole_sample, whole_evaluate, whole_loss = grpo.sample_completions, grpo.evaluate, grpo.policy_loss

    def sample_completions(policy, *rest):
        policy = copy.deepcopy(policy)
        for weight in (weight for weight in policy.parameters() if weight.ndim > 1):
            step = weight.data.abs().amax(1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
            weight.data = (weight.data / step).round() * step
        return whole_sample(policy, *rest)

    def evaluate(*inputs):  # uses the policy without rounding
        grpo.sample_completions = whole_sample
        metrics = whole_evaluate(*inputs)
        grpo.sample_completions = sample_completions
        return metrics

    def policy_loss(logprobs, old_logprobs, sampler_logprobs, *rest):
        if weighted:
            return whole_loss(logprobs, old_logprobs, sampler_logprobs, *rest)
        loss, metrics = whole_loss(logprobs, old_logprobs, old_logprobs, *rest)  # every weight is 1
        del metrics["policy/sampler_kl"]
        return loss, metrics

    grpo.sample_completions, grpo.evaluate, grpo.policy_loss = sample_completions, evaluate, policy_loss
    grpo.main(parse(grpo, *flags))


def metrics_of(program, run_dir):
    """Run a program; return the lines of its metrics.jsonl."""
    command = [sys.executable, *program, "--run-dir", run_dir]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]


def run(command, seed):
    """Run a command with a seed; return metrics of the first and last evaluation, and the mean KL of the sampler."""
    script, *flags = command.split()
    program = [str(ROOT / f"{script}.py"), *flags] if script != "crude" else [__file__, "crude", *flags]
    with tempfile.TemporaryDirectory() as folder:
        lines = metrics_of([*program, "--seed", str(seed)], f"{folder}/run")
        if script == "dpo":  # dpo.py does not sample, so grpo.py evaluates its models
            evaluate = [str(ROOT / "grpo.py"), *flags, "--seed", str(seed), "--num-steps", "0", "--tiny", "--model"]
            models = (str(ROOT / "models" / "tiny"), f"{folder}/run/checkpoint")
            lines = [metrics_of([*evaluate, model], f"{folder}/{i}")[0] for i, model in enumerate(models)]
    kl = [line["policy/sampler_kl"] for line in lines if "policy/sampler_kl" in line]
    found = {"before": lines[0]["eval/accuracy"], "after": lines[-1]["eval/accuracy"]}
    found |= {"pass@1 after": lines[-1]["eval/pass@1"], "sampler KL": statistics.mean(kl) if kl else None}
    return found


def main(variant, seeds):
    rows = []
    for name, command in TABLES[variant].items():
        results = [run(command, seed) for seed in seeds]
        after = " ".join(f"{result['after']:.3f}" for result in results)
        means = []
        for key in ("before", "after", "pass@1 after", "sampler KL"):
            values = [result[key] for result in results]
            means.append("" if None in values else f"{statistics.mean(values):.3{'g' if key == 'sampler KL' else 'f'}}")
        rows.append(f"| {name} | {means[0]} | {after} | {' | '.join(means[1:])} |")
        print(rows[-1], flush=True)
    head = f"`python benchmark/variants.py {variant}`, seeds {' '.join(map(str, seeds))}, one thread, "
    head += f"{platform.machine()}: greedy accuracy on the held-out prompts before, after each seed, and means.\n\n"
    head += "| | before | after, by seed | after | pass@1 after | policy/sampler_kl |\n|---|---|---|---|---|---|\n"
    (ROOT / "benchmark" / "results" / f"{variant}.md").write_text(head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "crude":
        run_crude(int(sys.argv[2]), bool(int(sys.argv[3])), sys.argv[4:])
    else:
        main(sys.argv[1], [int(seed) for seed in sys.argv[2:]] or [1, 2, 3, 4, 5])
