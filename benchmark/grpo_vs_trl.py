"""Compare the time and memory of grpo.py with TRL's GRPOTrainer on a CPU. TRL samples with transformers, without vLLM.

    pip install -r benchmark/requirements.txt
    python benchmark/grpo_vs_trl.py                          (all cases; run nothing else on the machine meanwhile)
    python benchmark/grpo_vs_trl.py --cases "bundled float32" --repeats 1

Both sides train the same model on the same prompts with the same group size, lengths, learning rate, number of updates
and loss, but TRL multiplies the KL term by the ratio, and grpo.py every token by w. Each repetition is a process, and
the sides alternate. The first step is a warm-up and is not counted. Times are medians over all other steps, in seconds:

    rollout   sampling, decoding of tokens to text, and rewards
    update    the rest of the step: log-probabilities of policy and reference, forward, backward, optimizer
    peak      largest resident memory of the whole process, up to the end of its last step

The real model is SmolLM2-135M, fine-tuned on the format of its answers by `python benchmark/real_model.py sft`. The
table is printed and written to docs/results.md, every step to benchmark/results/grpo_vs_trl.json.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median

from records import DOCS, RESULTS, ROOT, fill, processor, table

# Only the child processes import torch: on Linux a child's peak memory is at least its parent's at the fork.
BUNDLED = {
    "model": "models/tiny",
    "dataset": "data/addition",
    "system_prompt": "",
    "prompts_per_step": 16,
    "max_prompt_length": 32,
    "max_completion_length": 48,
    "minibatch_size": 64,
    "learning_rate": 1.5e-4,
    "microbatch_tokens": 4096,
}
REAL = {
    "model": "runs/real_model/sft_1/checkpoint-000024",
    "dataset": "data/word_problems/mawps",
    "system_prompt": r"Reason step by step, and put your final answer within \boxed{}.",
    "prompts_per_step": 8,
    "max_prompt_length": 160,
    "max_completion_length": 48,
    "minibatch_size": 32,
    "learning_rate": 1e-5,
    "microbatch_tokens": 2048,
}
TRL_BATCH_SIZE = {"models/tiny": 64, REAL["model"]: 16}  # 16 rows of the real data have about microbatch_tokens tokens
CASES = {
    f"{name} {precision}": settings | {"precision": precision, "group_size": 8, "warmup_steps": 0}
    for name, settings in {"bundled": BUNDLED, "real": REAL}.items()
    for precision in ("float32", "bfloat16")
}
STEPS = {"bundled": 10, "real": 2}  # timed, of a process


@dataclass
class Args:
    cases: list[str] = field(default_factory=lambda: list(CASES))
    """what to compare"""
    repeats: int = 3
    """processes per side"""
    threads: int = os.cpu_count()
    """threads of each side"""


def load_grpo():
    sys.path.insert(0, str(ROOT))
    import grpo

    grpo.torch.set_num_threads = lambda _: None  # grpo.py gives a small model one thread, TRL does not
    return grpo


def run_ours(settings, steps, seed, folder):
    """Train with grpo.py; return the steps that its metrics describe, and the peak memory."""
    grpo = load_grpo()
    grpo.save = lambda *_: None  # the peak must not include saving
    grpo.main(grpo.Args(**settings, num_steps=1 + steps, eval_prompts=0, run_dir=f"{folder}/run", seed=seed))
    rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    found = []
    for row in rows[-1 - steps :]:
        rollout = row["perf/rollout_seconds"]
        step = {"rollout": rollout, "update": row["perf/step_seconds"] - rollout}
        found.append(step | {"length": row["rollout/length_mean"], "reward": row["reward/mean"]})
    return found, peak_gib()


def run_trl(settings, num_steps, seed, folder):
    """Train with TRL; a subclass and a callback measure the times."""
    import transformers
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    grpo = load_grpo()
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["model"])
    rows = load_dataset("json", data_files=f"{settings['dataset']}/train.jsonl", split="train")
    own = {name: settings[name] for name in ("system_prompt", "max_prompt_length", "dataset")}
    # Prompts are text with the chat template already applied, in the order of grpo.py.
    texts = [tokenizer.decode(row["prompt_ids"]) for row in grpo.read_rows(rows, grpo.Args(**own), tokenizer)]
    rows = rows.remove_columns("prompt").add_column("prompt", texts)
    rows = rows.select(grpo.pick_rows(range(len(rows)), 0, len(rows), seed))
    steps = []

    def reward(completions, answer, **_):
        return [grpo.reward_fn(completion, gold) for completion, gold in zip(completions, answer)]

    class TimedTrainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            # A step begins here, with the rollout and the log-probabilities of the old policy and the reference.
            steps.append({"start": time.perf_counter(), "rollout": 0.0, "updates": 0})
            return super()._generate_and_score_completions(inputs)

        def _generate(self, prompts):
            start = time.perf_counter()
            result = super()._generate(prompts)
            steps[-1]["rollout"] += time.perf_counter() - start
            steps[-1]["length"] = mean(len(ids) for ids in result[1])
            return result

        def _calculate_rewards(self, *args):
            start = time.perf_counter()
            result = super()._calculate_rewards(*args)
            steps[-1]["rollout"] += time.perf_counter() - start
            steps[-1]["reward"] = result.mean().item()
            return result

    class StepEnd(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):  # noqa: ARG002
            steps[-1] |= {"end": time.perf_counter(), "peak": peak_gib(), "updates": steps[-1]["updates"] + 1}

    batch_size = TRL_BATCH_SIZE[settings["model"]]
    completions = settings["prompts_per_step"] * settings["group_size"]
    updates = completions // settings["minibatch_size"]
    trainer = TimedTrainer(
        model=settings["model"],
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=f"{folder}/trl",
            loss_type="grpo",
            beta=0.04,
            epsilon=0.2,
            scale_rewards="group",
            num_generations=settings["group_size"],
            max_completion_length=settings["max_completion_length"],
            temperature=1.0,
            top_k=0,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=settings["minibatch_size"] // batch_size,
            steps_per_generation=completions // batch_size,
            max_steps=updates * (1 + num_steps),
            learning_rate=settings["learning_rate"],
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            use_cpu=True,
            bf16=settings["precision"] == "bfloat16",
            gradient_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            shuffle_dataset=False,
            report_to="none",
            disable_tqdm=True,
            seed=seed,
        ),
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[StepEnd()],
    )
    trainer.train()
    for step in steps:
        assert step.pop("updates") == updates
        step["update"] = step.pop("end") - step.pop("start") - step["rollout"]
    return steps, [step.pop("peak") for step in steps][-1]


def peak_gib():
    """Return the largest resident memory of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def run_child(side, case, seed):
    """Run one side in this process, with its output on stderr, and print the result to stdout."""
    settings = CASES[case] | {name: str(ROOT / CASES[case][name]) for name in ("model", "dataset")}
    TRL_BATCH_SIZE[settings["model"]] = TRL_BATCH_SIZE[CASES[case]["model"]]
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        run = {"grpo.py": run_ours, "TRL": run_trl}[side]
        steps, peak = run(settings, STEPS[case.split()[0]], seed, folder)
    print(json.dumps({"case": case, "side": side, "seed": seed, "peak": peak, "steps": steps}))


def start_child(side, case, seed, threads):
    """Run one side in a separate process and return its result."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "child", side, case, str(seed)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def make_table(runs):
    """Return medians over the timed steps of all processes of a side, and the ratios."""
    lines = []
    for case in dict.fromkeys(run["case"] for run in runs):
        values = {}
        for side in ("grpo.py", "TRL"):
            own = [run for run in runs if (run["case"], run["side"]) == (case, side)]
            steps = [step for run in own for step in run["steps"][1:]]  # without the warm-up
            rollout, update = median(step["rollout"] for step in steps), median(step["update"] for step in steps)
            step = median(step["rollout"] + step["update"] for step in steps)
            values[side] = [rollout, update, step, median(run["peak"] for run in own)]
        for i, quantity in enumerate(("rollout, s", "update, s", "step, s", "peak memory, GiB")):
            ours, theirs = values["grpo.py"][i], values["TRL"][i]
            lines.append([case if i == 0 else "", quantity, f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"])
    return table(["case", "median", "`grpo.py`", "TRL", "ratio"], lines)


def main(args):
    packages = {name: version(name) for name in ("torch", "transformers", "trl", "accelerate")}
    report = {"processor": processor(), "threads": args.threads, "packages": packages, "runs": []}
    for seed in range(1, args.repeats + 1):
        for case in args.cases:
            for side in ("grpo.py", "TRL"):
                found = start_child(side, case, seed, args.threads)
                report["runs"].append(found)
                seconds = median(step["rollout"] + step["update"] for step in found["steps"][1:])
                print(f"{case}, {side}: {seconds:.2f} s per step, {found['peak']:.2f} GiB", flush=True)
    print(make_table(report["runs"]))
    (RESULTS / "grpo_vs_trl.json").write_text(json.dumps(report, indent=1) + "\n")
    fill(DOCS / "results.md", "against TRL", make_table(report["runs"]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        run_child(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        import tyro

        main(tyro.cli(Args))
