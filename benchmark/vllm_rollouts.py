"""Compare rollouts by vLLM with those of grpo.py's own sampler.

    python benchmark/vllm_rollouts.py runs                       (three default runs, five minutes)
    python benchmark/vllm_rollouts.py times                      (models/tiny, 128 completions of up to 48 tokens)
    python benchmark/vllm_rollouts.py times models/smollm2       (48 completions of up to 64 tokens)

The first trains the bundled model with the own sampler, and with vLLM in float32 and in bfloat16, and writes the logs'
accuracy, pass@1, sampler_kl and seconds to benchmark/results/vllm.csv. The second times rollouts in one process, in
alternating pairs, and prints medians. docs/vllm.md says how to install vLLM.
"""

import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmark/results/vllm.csv"
COLUMNS = ["eval/accuracy", "eval/pass@1", "policy/sampler_kl", "perf/rollout_seconds", "perf/step_seconds"]
RUNS = {
    "own sampler, float32": ["grpo.py"],
    "vLLM, float32": ["examples/vllm_rollout.py"],
    "vLLM, bfloat16": ["examples/vllm_rollout.py", "--precision", "bfloat16"],
}
PAIRS = 5


def run_all():
    """Make the default runs, and write a row for each step."""
    rows = []
    for name, command in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder, "run")
            subprocess.run([sys.executable, *command, "--run-dir", str(run)], cwd=ROOT, check=True)
            for line in map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines()):
                rows.append([name, line["step"], *(line.get(column, "") for column in COLUMNS)])
    with RESULTS.open("w", newline="") as file:
        csv.writer(file).writerows([["run", "step", *COLUMNS], *rows])


def read_runs():
    """Return {run: [row of strings by column]}."""
    found = {name: [] for name in RUNS}
    with RESULTS.open(newline="") as file:
        for row in csv.DictReader(file):
            found[row["run"]].append(row)
    return found


def table():
    """Return the runs as a Markdown table."""
    runs = read_runs()
    evaluated = [row["step"] for row in next(iter(runs.values())) if row["eval/accuracy"]]
    lines = [f"|run|accuracy at steps {', '.join(evaluated)}|pass@1 at {evaluated[-1]}|"]
    lines[0] += "`policy/sampler_kl`: median, largest|seconds of a rollout, of a step|"
    lines.append("|---|---|---|---|---|")
    for name, rows in runs.items():
        accuracy = [f"{float(row['eval/accuracy']):.3f}" for row in rows if row["eval/accuracy"]]
        kl = [float(row["policy/sampler_kl"]) for row in rows if row["policy/sampler_kl"]]
        seconds = [
            statistics.median(float(row[column]) for row in rows[1:])
            for column in ("perf/rollout_seconds", "perf/step_seconds")
        ]
        pass_at_1 = rows[-1]["eval/pass@1"]  # empty in new runs, which no longer log it
        cells = [name, ", ".join(accuracy), pass_at_1 and f"{float(pass_at_1):.3f}"]
        cells += [f"{statistics.median(kl):.0e}, {max(kl):.0e}", f"{seconds[0]:.2f}, {seconds[1]:.2f}"]
        lines.append(f"|{'|'.join(cells)}|")
    return "\n".join(lines)


def time_rollouts(model):
    """Time pairs of rollouts, and the push of weights that is part of the engine's."""
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
    import torch
    import vllm_rollout

    import grpo

    sizes = ["--max-completion-length", "64", "--max-prompt-length", "64"] if model else []
    count, text = (48, "Tell me about the sea, in one sentence.") if model else (128, "59+4+94+97=")
    sys.argv = ["grpo.py", "--precision", "float32", *(["--model", model] if model else []), *sizes]
    args = grpo.parse_args()
    device = grpo.init_ranks()
    tokenizer = grpo.AutoTokenizer.from_pretrained(args.model)
    chat = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    rows = [{"prompt_ids": ids}] * count
    names = ("copy_weights", "sample_completions", "generate")
    own = {name: getattr(grpo, name) for name in names}
    samplers = {"own sampler": grpo.load_sampler(args, tokenizer, device)}
    engine = vllm_rollout.Sampler(grpo, args, 0.4)
    ours = {name: getattr(grpo, name) for name in names}
    policy = grpo.load_policy(args, tokenizer, device)
    samplers["vLLM"] = engine.load_sampler(args, tokenizer, device)
    seconds = {"own sampler": [], "vLLM": [], "push": []}
    for pair in range(-1, PAIRS):  # the first is not counted
        for name, functions in (("own sampler", own), ("vLLM", ours)):
            for function, value in functions.items():
                setattr(grpo, function, value)
            torch.manual_seed(pair)
            start, cpu = time.perf_counter(), time.process_time()
            grpo.copy_weights(policy, samplers[name])
            batch, _ = grpo.sample_completions(samplers[name], tokenizer, rows, 1.0, args)
            spent = time.perf_counter() - start, time.process_time() - cpu, int(batch["completion_mask"].sum())
            if pair >= 0:
                seconds[name].append(spent)
        start, cpu = time.perf_counter(), time.process_time()
        engine.copy_weights(policy, engine)
        if pair >= 0:
            seconds["push"].append((time.perf_counter() - start, time.process_time() - cpu, 0))
    print(f"{args.model}: {count} completions of up to {args.max_completion_length} tokens, {PAIRS} pairs")
    for name, values in seconds.items():
        wall, cpu, tokens = (statistics.median(column) for column in zip(*values))
        print(f"| {name} | {wall:.2f} | {cpu:.2f} | {tokens:.0f} |")
    per_token = [[cpu / tokens for _, cpu, tokens in seconds[name]] for name in ("vLLM", "own sampler")]
    ratios = [ours / theirs for ours, theirs in zip(*per_token)]
    print("CPU seconds a token, vLLM / own sampler:", [round(ratio, 2) for ratio in ratios])
    engine.engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "runs":
        run_all()
        print(table())
    else:
        time_rollouts(sys.argv[2] if len(sys.argv) > 2 else "")
