"""Compare the time and memory of grpo.py with TRL's GRPOTrainer on a CPU. TRL samples with transformers, without vLLM.

    pip install -r benchmark/requirements.txt
    python benchmark/grpo_vs_trl.py
    python benchmark/grpo_vs_trl.py --size real --out benchmark/results/grpo_vs_trl_real.json
    python benchmark/grpo_vs_trl.py --size learning --out benchmark/results/grpo_vs_trl_learning.json

The program prints a line per process and a table. It writes every step to benchmark/results/grpo_vs_trl.json, or to the
file that --out names.

Both sides train the same model on the same prompts with the same group size, lengths, learning rate, loss and number of
optimizer steps. Each repetition of a side is a separate process, and the sides alternate. Times are seconds per step. A
step is one rollout with its two optimizer steps. The first step of a process is a warm-up and is not counted.

    rollout   sampling, decoding of tokens to text, and rewards
    update    the rest of the step: log-probabilities of policy and reference, forward, backward, optimizer
    step      rollout + update, up to the end of the last optimizer step, without logging and saving
    peak      largest resident memory of the whole process, up to the end of its last step

"real" measures a model of 135 million parameters that was trained on the format of its answers, in float32 and in
bfloat16. The first command that `python benchmark/real_model.py --runs sft --seeds 1 --show` prints makes this model.
"learning" trains the bundled model for 20 steps with five seeds and evaluates the result of both sides on the held-out
prompts.
"""

import contextlib
import json
import math
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

# Only the child processes import torch: on Linux a child's peak memory is at least its parent's at the fork.
ROOT = Path(__file__).resolve().parent.parent

SIZES = {
    "bundled": {
        "prompts_per_step": 16,
        "group_size": 8,
        "max_prompt_length": 32,
        "max_completion_length": 48,
        "minibatch_size": 64,
        "learning_rate": 1.5e-4,
        "warmup_steps": 8,
        "microbatch_tokens": 1024,
        "trl_batch_size": 64,  # per_device_train_batch_size: 64, 32 and 16 are equally fast within the noise
        "repeats": 3,
        "steps": 10,
    },
    "large": {
        "prompts_per_step": 8,
        "group_size": 8,
        "max_prompt_length": 16,
        "max_completion_length": 256,
        "minibatch_size": 32,
        "learning_rate": 1e-6,
        "warmup_steps": 0,
        "microbatch_tokens": 512,  # as fast as 1024 and 2048, with the least memory
        "trl_batch_size": 8,  # 16 and 32 are not clearly faster, and take 1.5 and 1.9 times the memory
        "repeats": 5,
        "steps": 1,
    },
}
REAL = {
    "model": "runs/real_model/sft_1/checkpoint-000024",
    "dataset": "data/word_problems/mawps",
    "system_prompt": r"Reason step by step, and put your final answer within \boxed{}.",
    "prompts_per_step": 8,
    "group_size": 8,
    "max_prompt_length": 160,
    "max_completion_length": 48,
    "minibatch_size": 32,
    "learning_rate": 1e-5,
    "warmup_steps": 0,
    "microbatch_tokens": 2048,
    "trl_batch_size": 16,  # 16 rows have about microbatch_tokens tokens
    "repeats": 3,
    "steps": 2,
}
SIZES |= {"real float32": REAL, "real bfloat16": REAL | {"precision": "bfloat16"}}
SIZES |= {"learning": SIZES["bundled"] | {"repeats": 5, "steps": 19, "eval_prompts": 512}}
CHOICES = {"both": ["bundled", "large"], "real": ["real float32", "real bfloat16"]}
CLIP_EPS, KL_COEF, MAX_GRAD_NORM = 0.2, 0.04, 1.0
VOCAB_SIZE, STOP_RATE = 32_000, 1 / 40  # of the large model


@dataclass
class Args:
    size: Literal["bundled", "large", "both", "real", "learning"] = "both"
    """bundled, learning: models/tiny; large: random, 58 M parameters; both: both; real: trained, 135 M"""
    repeats: int | None = None
    """processes per side (bundled, real: 3; large, learning: 5)"""
    steps: int | None = None
    """timed steps per process (bundled: 10; large: 1; real: 2; learning: 19)"""
    threads: int = os.cpu_count()
    """threads of each side"""
    trl_batch_size: int | None = None
    """TRL's per_device_train_batch_size (bundled, learning: 64; large: 8; real: 16)"""
    out: str = str(ROOT / "benchmark" / "results" / "grpo_vs_trl.json")
    """file for the results"""


# ---- the large case


def parity_reward(completion, answer):  # noqa: ARG001
    """Return 1.0 if the completion has an even number of words: about half of every group."""
    return float(len(completion.split()) % 2 == 0)


def make_large(folder):
    """Write random prompts, and a random Phi model whose stop token has probability 1/40 at every position."""
    import tokenizers
    import torch
    import transformers

    words = ["<pad>", "<unk>", "<end>", *(f"w{i}" for i in range(VOCAB_SIZE - 3))]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="<end>"
    )
    config = transformers.PhiConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        max_position_embeddings=512,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    model = transformers.PhiForCausalLM(config)
    # After a layer norm with weight 1, the logits are normal with variance 512 std², which gives the sum of their
    # exponentials. The logit of the stop token is its bias alone.
    with torch.no_grad():
        variance = config.hidden_size * config.initializer_range**2
        model.lm_head.weight[2] = 0.0
        model.lm_head.bias[:2] = -30.0
        model.lm_head.bias[2] = math.log(VOCAB_SIZE) + variance / 2 - math.log(1 / STOP_RATE - 1)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "data").mkdir()
    rng = random.Random(1)
    for split, count in (("train", 512), ("test", 1)):
        prompts = [" ".join(rng.choice(words[3:]) for _ in range(rng.randint(8, 16))) for _ in range(count)]
        lines = [json.dumps({"prompt": prompt, "answer": "0"}) + "\n" for prompt in prompts]
        (folder / "data" / f"{split}.jsonl").write_text("".join(lines))


def load_grpo(size):
    sys.path.insert(0, str(ROOT))
    import grpo

    grpo.torch.set_num_threads = lambda _: None  # grpo.py gives a small model one thread, TRL does not
    if size == "large":
        grpo.reward_fn = parity_reward
    return grpo


# ---- the two sides: each returns a list of {rollout, update, length_mean, reward_mean} and its peak GiB


def run_ours(job):
    """Train with grpo.py, whose metrics include the times."""
    settings, grpo = job["settings"], load_grpo(job["size"])
    names = "prompts_per_step group_size max_prompt_length max_completion_length minibatch_size microbatch_tokens"
    names = f"{names} learning_rate warmup_steps".split()
    run_dir = Path(job["folder"]) / f"run_{job['seed']}"
    if "eval_prompts" not in settings:
        grpo.save = lambda *_: None  # the peak must not include saving
    grpo.main(
        grpo.Args(
            **{name: settings[name] for name in names},
            model=job["model"],
            dataset=job["dataset"],
            system_prompt=settings.get("system_prompt", ""),
            precision=settings.get("precision", "float32"),
            clip_eps=CLIP_EPS,
            kl_coef=KL_COEF,
            max_grad_norm=MAX_GRAD_NORM,
            num_steps=1 + job["steps"],
            eval_prompts=0,
            run_dir=str(run_dir),
            seed=job["seed"],
        )
    )
    steps = []
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["step"] > 0]
    for line in lines:
        steps.append(
            {
                "rollout": line["perf/rollout_seconds"],
                "update": line["perf/step_seconds"] - line["perf/rollout_seconds"],
                "length_mean": line["rollout/length_mean"],
                "reward_mean": line["reward/mean"],
            }
        )
    return steps, peak_gib(), run_dir / f"checkpoint-{1 + job['steps']:06d}"


def run_trl(job):
    """Train with TRL; a subclass and a callback measure the times."""
    import torch
    import transformers
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    settings, grpo = job["settings"], load_grpo(job["size"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
    rows = load_dataset("json", data_files=str(Path(job["dataset"], "train.jsonl")), split="train")
    # The prompts are text with the chat template already applied, which saves TRL this work in its rollout.
    texts, own = [], {"max_prompt_length": settings["max_prompt_length"], "dataset": job["dataset"]}
    for row in grpo.read_rows(rows, grpo.Args(system_prompt=settings.get("system_prompt", ""), **own), tokenizer):
        texts.append(tokenizer.decode(row["prompt_ids"]) if tokenizer.chat_template else row["prompt"])
        assert tokenizer(texts[-1])["input_ids"] == row["prompt_ids"]
    rows = rows.remove_columns("prompt").add_column("prompt", texts)
    # The prompts have grpo.py's order, so that the rewards of a step differ only by sampling.
    rows = rows.select(grpo.pick_rows(range(len(rows)), 0, len(rows), job["seed"]))

    def reward(completions, answer, **_):
        return [grpo.reward_fn(completion, gold) for completion, gold in zip(completions, answer)]

    steps = []

    class TimedTrainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            # A step begins here, with the rollout and the log-probabilities of the old policy and the reference.
            steps.append({"start": time.perf_counter(), "rollout": 0.0, "optimizer_steps": 0})
            return super()._generate_and_score_completions(inputs)

        def _generate(self, prompts):
            start = time.perf_counter()
            result = super()._generate(prompts)
            steps[-1]["rollout"] += time.perf_counter() - start
            steps[-1]["length_mean"] = statistics.mean(len(ids) for ids in result[1])
            return result

        def _calculate_rewards(self, *args):
            start = time.perf_counter()
            result = super()._calculate_rewards(*args)
            steps[-1]["rollout"] += time.perf_counter() - start
            steps[-1]["reward_mean"] = result.mean().item()
            return result

    class StepEnd(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):  # noqa: ARG002
            steps[-1]["end"] = time.perf_counter()  # the last optimizer step overwrites the others
            steps[-1]["peak"] = peak_gib()
            steps[-1]["optimizer_steps"] += 1

    batch_size = settings["trl_batch_size"]
    completions_per_step = settings["prompts_per_step"] * settings["group_size"]
    updates_per_step = completions_per_step // settings["minibatch_size"]
    trainer = TimedTrainer(
        model=job["model"],
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(Path(job["folder"]) / f"trl_{job['seed']}"),
            loss_type="grpo",
            beta=KL_COEF,
            epsilon=CLIP_EPS,
            scale_rewards="group",
            num_generations=settings["group_size"],
            num_iterations=1,
            max_completion_length=settings["max_completion_length"],
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            min_p=None,
            repetition_penalty=1.0,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=settings["minibatch_size"] // batch_size,
            steps_per_generation=completions_per_step // batch_size,
            max_steps=updates_per_step * (1 + job["steps"]),
            learning_rate=settings["learning_rate"],
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=settings["warmup_steps"],
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=MAX_GRAD_NORM,
            use_cpu=True,
            bf16=settings.get("precision") == "bfloat16",
            gradient_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            shuffle_dataset=False,
            report_to="none",
            disable_tqdm=True,
            seed=job["seed"],
        ),
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[StepEnd()],
    )
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    trainer.train()
    for step in steps:
        assert step.pop("optimizer_steps") == updates_per_step
        step["update"] = step.pop("end") - step.pop("start") - step["rollout"]
    peak = [step.pop("peak") for step in steps]
    folder = Path(job["folder"], "trained")
    if "eval_prompts" in settings:
        trainer.save_model(str(folder))
    return steps, peak[-1], folder


def evaluate(job, model):
    """Return the metrics of grpo.py's evaluation of a trained model on held-out prompts."""
    settings, run_dir = job["settings"], Path(job["folder"], "evaluation")
    names = ("max_prompt_length", "max_completion_length", "eval_prompts")
    grpo = load_grpo(job["size"])
    grpo.main(
        grpo.Args(
            **{name: settings[name] for name in names},
            model=str(model),
            dataset=job["dataset"],
            system_prompt=settings.get("system_prompt", ""),
            precision="float32",
            num_steps=0,
            run_dir=str(run_dir),
            seed=job["seed"],
        )
    )
    return json.loads((run_dir / "metrics.jsonl").read_text())


def peak_gib():
    """Return the largest resident memory of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**30


def run_child(job):
    """Run one side in this process, with its output on stderr, and print the result to stdout."""
    with contextlib.redirect_stdout(sys.stderr):
        import torch

        if job["side"] == "make_large":
            make_large(Path(job["folder"]))
            result = {}
        else:
            steps, peak, model = {"ours": run_ours, "trl": run_trl}[job["side"]](job)
            result = {"peak_gib": peak, "threads": torch.get_num_threads(), "steps": steps}
            if "eval_prompts" in job["settings"]:
                result |= evaluate(job, model)
    print(json.dumps(result))


# ---- the comparison


def start_child(job, threads):
    """Run a job in a separate process and return its result."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, __file__, "child", json.dumps(job)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{job['side']} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_side(size, settings, repeat, side, folder, threads):
    """Run one side once, in a separate process."""
    if size == "large":
        model, dataset = Path(folder, "model"), Path(folder, "data")
    else:
        model, dataset = ROOT / settings.get("model", "models/tiny"), ROOT / settings.get("dataset", "data/addition")
    if not model.exists():
        raise SystemExit(
            f"{model} is missing: run the first command that "
            "`python benchmark/real_model.py --runs sft --seeds 1 --show` prints"
        )
    job = {"folder": tempfile.mkdtemp(dir=folder), "size": size, "settings": settings, "steps": settings["steps"]}
    job |= {"model": str(model), "dataset": str(dataset), "side": side, "seed": repeat + 1}
    return {"side": side, "seed": repeat + 1, **start_child(job, threads)}


def summarize(settings, runs):
    """Return medians over the timed steps of all processes of a side, and the ratio of ours to TRL's."""
    completions = settings["prompts_per_step"] * settings["group_size"]
    summary = {}
    for side in ("ours", "trl"):
        mine = [run for run in runs if run["side"] == side]
        steps = [step for run in mine for step in run["steps"][1:]]  # without the warm-up
        tokens = sum(step["length_mean"] * completions for step in steps)
        summary[side] = {
            "rollout_seconds": statistics.median(step["rollout"] for step in steps),
            "update_seconds": statistics.median(step["update"] for step in steps),
            "step_seconds": statistics.median(step["rollout"] + step["update"] for step in steps),
            "peak_gib": statistics.median(run["peak_gib"] for run in mine),
            "tokens_per_second": tokens / sum(step["rollout"] + step["update"] for step in steps),
            "length_mean": statistics.mean(step["length_mean"] for step in steps),
            "timed_steps": len(steps),
        }
    summary["ratio"] = {key: summary["ours"][key] / summary["trl"][key] for key in summary["ours"]}
    return summary


def table(results):
    """Return the results as a markdown table."""
    names = {
        "rollout_seconds": "rollout, s",
        "update_seconds": "update, s",
        "step_seconds": "step, s",
        "peak_gib": "peak memory, GiB",
        "tokens_per_second": "completion tokens per second",
        "length_mean": "completion length, mean",
    }
    lines = ["| size | | grpo.py | TRL | grpo.py / TRL |", "|---|---|---:|---:|---:|"]
    for size, result in results.items():
        for key, name in names.items():
            ours, trl, ratio = (result["summary"][column][key] for column in ("ours", "trl", "ratio"))
            lines.append(f"| {size} | {name} | {ours:.4g} | {trl:.4g} | {ratio:.2f} |")
    return "\n".join(lines)


def main(args):
    packages = ("torch", "transformers", "trl", "accelerate", "datasets")
    report = {
        "machine": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
        "threads": args.threads,
        "results": {},
    }
    out, sizes, runs = Path(args.out), CHOICES.get(args.size, [args.size]), {}
    out.parent.mkdir(parents=True, exist_ok=True)
    given = {name: getattr(args, name) for name in ("repeats", "steps", "trl_batch_size")}
    given = {name: value for name, value in given.items() if value}
    settings = {size: SIZES[size] | given for size in sizes}
    with tempfile.TemporaryDirectory() as folder:
        if "large" in sizes:
            start_child({"side": "make_large", "folder": folder}, args.threads)
        jobs = [
            (size, repeat, side)
            for repeat in range(max(settings[size]["repeats"] for size in sizes))
            for size in sizes
            for side in ("ours", "trl")
            if repeat < settings[size]["repeats"]
        ]
        for size, repeat, side in jobs:
            found = run_side(size, settings[size], repeat, side, folder, args.threads)
            runs.setdefault(size, []).append(found)
            median = statistics.median(step["rollout"] + step["update"] for step in found["steps"][1:])
            line = f"{size}, run {repeat + 1}, {side:4} {median:7.2f} s per step, peak {found['peak_gib']:.2f} GiB"
            print(line, flush=True)
            if {run["side"] for run in runs[size]} == {"ours", "trl"}:
                result = {"settings": settings[size], "summary": summarize(settings[size], runs[size])}
                report["results"][size] = result | {"runs": runs[size]}
                out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{table(report['results'])}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        run_child(json.loads(sys.argv[2]))
    else:
        import tyro

        main(tyro.cli(Args, description="Compare the time and memory of grpo.py with TRL's GRPOTrainer."))
