"""Check on a GPU that the scripts compute correctly, measure their speed, and test the predictions of tools/memory.py.

    python benchmark/gpu.py                          (at most ten minutes)
    python benchmark/gpu.py --tiny --out gpu.md      (runs the same code with tiny models, also on a CPU)

The program writes benchmark/results/gpu_NAME.md with a table per section: what was measured, and what is expected if
there is an expectation. It exits with status 1 if an expectation is not met or a section fails.

Every section is a separate process. If one fails or takes too long, the program writes this down and goes on with the
next. The models have random weights, the shapes of Qwen2.5-0.5B and Qwen2.5-1.5B, and the tokenizer of models/tiny. Run
nothing else on the GPU meanwhile.
"""

import contextlib
import importlib
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

# Only the child processes import torch, so that the end of a process frees what it had on the GPU.
ROOT = Path(__file__).resolve().parent.parent
PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312}  # bfloat16, dense
SIZES = {  # tokens per completion, rows of rollouts and of passes; prompts, group size and tokens of the training runs
    "Qwen2.5-0.5B": {"tokens": 1024, "rows": (64, 512), "passes": 16, "prompts": 32, "group": 8, "length": 512},
    "Qwen2.5-1.5B": {"tokens": 1024, "rows": (512,), "passes": 16, "prompts": 16, "group": 8, "length": 512},
    "tiny": {"tokens": 24, "rows": (8, 16), "passes": 4, "prompts": 2, "group": 2, "length": 16},
}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True}
DEFAULT_RUNS = {  # {script: (metric of the last evaluation, least, most)}; wider than the default runs on a CPU
    "grpo": ("eval/accuracy", 0.96, 1.0),
    "dr_grpo": ("eval/accuracy", 0.96, 1.0),
    "dapo": ("eval/accuracy", 0.96, 1.0),
    "gspo": ("eval/accuracy", 0.96, 1.0),
    "cispo": ("eval/accuracy", 0.96, 1.0),
    "grpo_process": ("eval/accuracy", 0.96, 1.0),
    "grpo_tools": ("eval/accuracy", 0.96, 1.0),
    "reinforce": ("eval/accuracy", 0.96, 1.0),
    "dpo": ("eval/pair_accuracy", 0.78, 0.85),
    "ppo_rlhf": ("eval/accuracy", 0.93, 1.0),
    "reward_model": ("eval/pair_accuracy", 0.78, 0.86),
    "sft": ("eval/loss", 1.23, 1.43),  # after 100 steps
}

FLOAT32, WITHOUT_NOISE, WITH_NOISE = "float32", "bfloat16, on the grid", "bfloat16, with noise"
BFLOAT16 = ["--precision", "bfloat16"]  # the bundled model's default is float32
TRAININGS = [("grpo", {"gradient_checkpointing": True}), ("ppo_rlhf", {}), ("dpo", {})]
NO_STOP = [-1]  # ids that end a completion: none


@dataclass
class Args:
    out: str | None = None
    """file for the results (default: benchmark/results/gpu_NAME.md)"""
    minutes: float = 10.0
    """time limit; sections for which no time is left are skipped"""
    tiny: bool = False
    """use tiny models and few tokens"""
    peak_tflops: float | None = None
    """peak TFLOPS of this GPU in bfloat16, for the utilisation (known for H100, H200 and A100)"""
    skip: list[str] = field(default_factory=list)
    """sections to skip, by the first words of their names"""


def sections(tiny):
    """Return (name, function, its settings, most seconds) of every section, the most important first."""
    jobs, sizes = [], ["tiny"] if tiny else list(SIZES)[:2]

    def add_training(size, script, flags):
        name = " ".join(["training", script, *flags, size])
        jobs.append((name, time_training, {"size": size, "script": script, "flags": flags}, 120))

    for size in sizes:
        if size == sizes[0]:
            jobs.append((f"numbers {size}", check_numbers, {"size": size}, 150))
        add_training(size, "grpo", {})
        jobs.append((f"rollout {size}", time_rollout, {"size": size}, 200))
        jobs.append((f"passes {size}", time_passes, {"size": size}, 80))
        if size == sizes[0]:
            jobs.append(("default run", check_defaults, {"scripts": ["grpo"]}, 150))
    jobs.append((f"bfloat16 {sizes[0]}", check_bfloat16, {"size": sizes[0]}, 100))
    jobs.append(("resume", check_resume, {}, 150))
    for script, flags in TRAININGS:
        add_training(sizes[0], script, flags)
    jobs.append(("other default runs", check_defaults, {"scripts": [*DEFAULT_RUNS][1:]}, 250))
    jobs.append(("ranks", check_ranks, {}, 150))
    return jobs


# ---- checks: each yields rows of (name, measured value, expectation or "", whether it is met or None)


def check_numbers(job):
    """Compare sampler and training by position, compare decoding with an uncached forward, and train a little."""
    import torch

    grpo, tokens = importlib.import_module("grpo"), SIZES[job["size"]]["tokens"]
    loaded = load(job)
    policy, sampler = grpo.load_policy(*loaded), grpo.load_sampler(*loaded)
    torch.manual_seed(1)
    prompts = make_prompts(8)
    sampled = grpo.generate(sampler, prompts, tokens, 1.0, NO_STOP)
    batch = make_batch(prompts, sampled, sampler.device)
    with torch.no_grad():
        logprobs, _ = policy(batch["ids"], batch["completion_mask"], 1.0)
    difference = of_completions(logprobs - batch["sampler_logprobs"], prompts, tokens)  # (8, tokens)
    for start, end in ((0, 128), (128, 512), (512, 1024)):
        if start < tokens:
            part = difference[:, start:end]
            kl = (part.expm1() - part).mean().item()
            what = f"sampler and training, positions {start} to {min(end, tokens)}: KL"
            yield what, kl, "under 0.01", kl < 0.01
            yield "... mean absolute difference of log-probabilities", part.abs().mean().item(), "", None
            yield (
                "... largest difference of log-probabilities",
                part.abs().max().item(),
                "under 0.5",
                part.abs().max().item() < 0.5,
            )
    yield from check_greedy(grpo, sampler, prompts, min(64, tokens))
    yield from check_learning(grpo, policy, prompts, sampled, min(64, tokens))


def check_greedy(grpo, sampler, prompts, tokens):
    """Compare greedy decoding with an uncached forward: where tokens differ, their logits must be nearly equal."""
    import torch

    completions = grpo.generate(sampler, prompts, tokens, 0.0, NO_STOP)
    ids = make_batch(prompts, completions, sampler.device)["ids"]
    with torch.no_grad():
        logits = sampler(input_ids=ids, use_cache=False).logits[:, :-1].float()
    gaps = logits.max(2).values - logits.gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)  # of each token after the first
    gaps = of_completions(torch.nn.functional.pad(gaps, (1, 0)), prompts, tokens)  # (8, tokens)
    equal = (gaps == 0).float().mean().item()
    yield "greedy decoding and uncached forward: share of equal tokens", equal, "over 0.9", equal > 0.9
    yield (
        "... largest gap between the highest logit and the chosen one",
        gaps.max().item(),
        "under 0.2",
        gaps.max().item() < 0.2,
    )


def check_learning(grpo, policy, prompts, sampled, tokens):
    """Check that four optimizer steps make completions more likely if all have advantage 1."""
    import torch

    device = policy.model.device
    batch = make_batch(prompts, [(ids[:tokens], logprobs[:tokens]) for ids, logprobs in sampled], device)
    batch["advantages"] = torch.ones(len(prompts), device=device)
    args = grpo.Args(kl_coef=0.0)
    rows, means = torch.arange(len(prompts), device=device), []
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    num_tokens = batch["completion_mask"].sum()
    for _ in range(4):
        batch["old_logprobs"] = grpo.compute_logprobs(policy, batch, [rows], args)
        means.append((batch["old_logprobs"].sum() / num_tokens).item())
        for part in grpo.microbatches(batch, rows, args.microbatch_tokens):
            logprobs, _ = policy(part["ids"], part["completion_mask"], args.temperature)
            before = part["old_logprobs"], part["sampler_logprobs"], None
            settings = args.clip_eps, args.kl_coef, args.sampler_weight_cap
            loss, _ = grpo.policy_loss(logprobs, *before, part["advantages"], part["completion_mask"], *settings)
            (loss / len(prompts)).backward()
        norm = grpo.step_optimizer(policy, optimizer, 1e-4 if device.type == "cuda" else 1e-3, 1.0)
        yield "gradient norm", norm, "positive", 0 < norm < float("inf")
    means.append((grpo.compute_logprobs(policy, batch, [rows], args).sum() / num_tokens).item())
    yield "mean log-probability of the completions before four optimizer steps", means[0], "", None
    yield "... after these steps", means[-1], "higher", means[-1] > means[0]


def check_bfloat16(job):
    """Compare how far ten steps with a small learning rate lower the loss in float32, in bfloat16, and with noise."""
    grpo, falls = importlib.import_module("grpo"), {}
    args, tokenizer, device = load(job)
    batch = read_sums(grpo, tokenizer, device)
    for kind in (FLOAT32, WITHOUT_NOISE, WITH_NOISE):
        args.precision = kind.partition(",")[0]
        losses = take_small_steps(grpo, grpo.load_policy(args, tokenizer, device), batch, kind)
        falls[kind] = losses[0] - losses[-1]
        yield f"{kind}: fall of the loss", falls[kind], "", None
    share = falls[WITH_NOISE] / falls[FLOAT32]
    yield "... with noise, of the fall in float32", share, "0.7 to 1.3", 0.7 < share < 1.3


def read_sums(grpo, tokenizer, device, count=16):
    """Return a batch of prompts and completions of the bundled task."""
    lines = (ROOT / "data" / "addition" / "sft.jsonl").read_text().splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    stop = [grpo.find_turn_end(tokenizer)]
    completions = [tokenizer(row["completion"], add_special_tokens=False)["input_ids"] + stop for row in rows]
    return make_batch(prompts, [(ids, [0.0] * len(ids)) for ids in completions], device)


def take_small_steps(grpo, policy, batch, kind, steps=10):
    """Return the steps + 1 losses of a batch at a learning rate of 1e-6: before each step, and after the last."""
    import torch

    if kind == WITHOUT_NOISE:
        with torch.no_grad():
            for weight in policy.parameters():
                weight.copy_(weight.bfloat16())
    optimizer, losses = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True), []
    for step in range(steps + 1):
        logprobs, _ = policy(batch["ids"], batch["completion_mask"], 1.0)
        loss = -logprobs.sum() / batch["completion_mask"].sum()
        losses.append(loss.item())
        if step < steps:
            loss.backward()
            grpo.step_optimizer(policy, optimizer, 1e-6, 1.0)
    return losses


def check_resume(job):
    """Compare a run that is resumed after two steps with an uninterrupted run of four steps."""
    folder, small = Path(job["folder"]), ["--prompts-per-step", "8", "--minibatch-size", "32", "--eval-prompts", "16"]
    steps = {}
    run_script("grpo", [*BFLOAT16, "--num-steps", "4", "--run-dir", str(folder / "whole"), *small])
    run_script("grpo", [*BFLOAT16, "--num-steps", "2", "--run-dir", str(folder / "half"), *small])
    run_script("grpo", ["--resume", str(folder / "half"), "--num-steps", "4"])
    for name in ("whole", "half"):
        steps[name] = [line for line in read_metrics(folder / name) if line["step"] > 0]
    numbers = [line["step"] for line in steps["half"]]
    yield "steps of a run that was resumed", " ".join(map(str, numbers)), "1 2 3 4", numbers == [1, 2, 3, 4]
    for key, most in (("rollout/length_mean", 2.0), ("reward/mean", 0.2)):
        gaps = [abs(a[key] - b[key]) for a, b in zip(steps["whole"], steps["half"])]
        yield f"{key}: largest difference from an uninterrupted run", max(gaps), f"at most {most}", max(gaps) <= most


def check_ranks(job):
    """Check that two processes, each with half of the model and of the data, learn as well as one."""
    import torch

    if torch.cuda.device_count() == 1:
        yield "GPUs", torch.cuda.device_count(), "", None
        return
    run = Path(job["folder"]) / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run_script("grpo", [*BFLOAT16, "--run-dir", str(run)], torchrun)
    accuracy = read_metrics(run)[-1]["eval/accuracy"]
    yield "grpo.py on two processes: eval/accuracy", accuracy, "at least 0.96", accuracy >= 0.96


def check_defaults(job):
    """Run scripts with their defaults except for the precision, four at a time; sft.py runs only 100 steps."""
    folder = Path(job["folder"])

    def run(script):
        try:
            short = ["--num-steps", "100"] if script == "sft" else []
            run_script(script, [*BFLOAT16, "--run-dir", str(folder / script), *short])
            return read_metrics(folder / script)[-1]
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        lines = list(pool.map(run, job["scripts"]))
    for script, line in zip(job["scripts"], lines):
        key, least, most = DEFAULT_RUNS[script]
        value = line if isinstance(line, str) else line[key]
        yield f"{script}: {key}", value, f"{least} to {most}", not isinstance(line, str) and least <= value <= most


def run_script(script, flags, launcher=None):
    """Run a script of this repository; if it fails, raise an error with the end of its output."""
    command = [*(launcher or [sys.executable]), str(ROOT / f"{script}.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script}: " + " ".join((done.stdout + done.stderr).split())[-300:])


def read_metrics(run_dir):
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]


# ---- speed and memory


def time_rollout(job):
    """Time our generate and transformers'; compare our peak with formulas."""
    grpo, size, rates = importlib.import_module("grpo"), SIZES[job["size"]], {}
    sampler = grpo.load_sampler(*load(job))
    device = sampler.device
    for rows in size["rows"]:
        formula = rollout_formula(sampler.config, rows, 16, size["tokens"])
        if formula > 0.94e9 * gpu_gb():
            yield f"{rows} rows x {size['tokens']}", "not run: too little memory", "", None
            continue
        prompts = make_prompts(rows, copies=8)

        def ours(tokens, prompts=prompts):
            grpo.generate(sampler, prompts, tokens, 1.0, NO_STOP)

        seconds, peak = timed(ours, size["tokens"], device)
        rates[rows] = rows * size["tokens"] / seconds
        yield f"{rows} rows x {size['tokens']}: seconds", seconds, "", None
        yield "... tokens a second", rates[rows], "", None
        yield from compare_peak("... peak", peak, formula)
    if rates:
        yield from time_peer(sampler, max(rates), rates[max(rates)], size)


def time_peer(model, rows, our_rate, size):
    """Time transformers' generate on the same rows with the same model."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    prompts = [torch.tensor(prompt, device=model.device) for prompt in make_prompts(rows, copies=8)]
    ids = pad_sequence(prompts, batch_first=True, padding_value=0, padding_side="left")
    mask = (ids != 0).long()  # no prompt has the id 0

    def theirs(tokens):
        settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, **settings)

    seconds, _ = timed(theirs, size["tokens"], model.device)
    yield f"transformers' generate, {rows} rows: tokens a second", rows * size["tokens"] / seconds, "", None
    yield "... ours / transformers'", our_rate * seconds / (rows * size["tokens"]), "", None


def time_passes(job):
    """Time forward and backward passes over the same rows, by their size and that of the LM head's chunks."""
    import torch

    grpo, size = importlib.import_module("grpo"), SIZES[job["size"]]
    policy = grpo.load_policy(*load(job))
    device, prompts = policy.model.device, make_prompts(size["passes"])
    completions = torch.randint(6, 28, (len(prompts), size["tokens"])).tolist()
    batch = make_batch(prompts, [(ids, [0.0] * len(ids)) for ids in completions], device)
    rows, first = torch.arange(len(prompts), device=device), None
    for max_tokens in (4096, 16384):
        for chunk in (2**26, 2**28):
            grpo.LOGITS_AT_ONCE = chunk

            def run(_, max_tokens=max_tokens):
                for part in grpo.microbatches(batch, rows, max_tokens):
                    policy(part["ids"], part["completion_mask"], 1.0)[0].sum().backward()
                policy.zero_grad()

            seconds, peak = timed(run, 0, device)
            first = first or seconds
            what = f"passes of {max_tokens} tokens, 2^{chunk.bit_length() - 1} logits at once"
            yield f"{what}: tokens a second", len(prompts) * size["tokens"] / seconds, "", None
            yield "... seconds / those of the first row", seconds / first, "", None
            yield "... peak, GB", peak / 1e9 if peak else "", "", None


def rollout_formula(config, rows, prompt_length, tokens):
    """Return the bytes that tools/memory.py predicts for a rollout of a sampler alone."""
    memory = load_memory()
    given = {"prompts_per_step": max(1, rows // 8), "group_size": min(8, rows), "eval_prompts": 0}
    given |= {"max_prompt_length": prompt_length, "max_completion_length": tokens}
    model = memory.count_model(config)
    working = memory.rollout_bytes(model, memory.read_settings("grpo", **given), 1)
    return 2 * (model.blocks + model.root) + sum(working)


def timed(function, tokens, device):
    """Return the seconds and the peak bytes of a call, after a short call as warm-up."""
    import torch

    function(min(8, tokens))
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    function(tokens)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() if device.type == "cuda" else None


def time_training(job):
    """Train for three steps with a script; yield speed and utilisation of the last update, and its peaks."""
    import torch

    memory, script, size = load_memory(), importlib.import_module(job["script"]), SIZES[job["size"]]
    settings = training_settings(job, size)
    config = memory.load_config(settings["model"])
    given = {name: settings[name] for name in memory.SETTINGS if name in settings} | {"max_prompt_length": 32}
    before = memory.read_settings(job["script"], **given)
    fit = memory.find_fit(config, before, gpu_gb())
    if fit is None:
        yield "not run", "too little memory", "", None
        return
    yield "flags that tools/memory.py suggests for this GPU", memory.as_flags(fit, before), "", None
    settings |= {name: value for name, value in vars(fit).items() if value != getattr(before, name)}
    peaks, script.save = watch_peaks(script), lambda *_: None  # nothing is written
    ends = watch_ends(script)
    with contextlib.redirect_stdout(sys.stderr):
        script.main(script.Args(**settings))
    line = read_metrics(settings["run_dir"])[-1]
    yield "seconds per step", line["perf/step_seconds"], "", None
    tokens = trained_tokens(job, line, size, settings)
    if peaks:
        yield "rollout: seconds", line["perf/rollout_seconds"], "", None
        yield "... tokens a second", tokens / line["perf/rollout_seconds"], "", None
        sampler_kl = line["policy/sampler_kl"]
        yield "... policy/sampler_kl", sampler_kl, "under 0.01", sampler_kl < 0.01
    seconds = line["perf/step_seconds"]  # of dpo.py, which only updates
    if peaks:  # the update begins after the log-probabilities and values of before
        seconds = ends.pop("step_optimizer") - max(ends.values())
    yield "update: seconds", seconds, "", None
    yield "update: tokens a second", tokens / seconds, "", None
    if job["peak_tflops"]:
        flops = flops_per_token(memory.count_models(config, job["script"]), size["length"])
        yield "update: model FLOP utilisation", tokens * flops / seconds / job["peak_tflops"] / 1e12, "", None
    _, rollout, update = memory.account(config, fit)[-1]
    last = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    if peaks:
        yield from compare_peak("peak of the rollout", peaks[-1], rollout)
    yield from compare_peak("peak of the update", last, update)


def watch_peaks(script):
    """Return a list that gets the peak of every rollout.

    After training, torch's own peak covers only the time since the last rollout.
    """
    import torch

    peaks, sample_completions = [], getattr(script, "sample_completions", None)
    if sample_completions is None:  # the script has no rollouts
        return peaks

    def watched(*inputs):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        found = sample_completions(*inputs)
        peaks.append(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        return found

    script.sample_completions = watched
    return peaks


def watch_ends(script):
    """Return a dictionary that gets the time at which the last call of each of these functions ended."""
    import torch

    ends = {}

    def watched(name, function):
        def timed(*inputs):
            found = function(*inputs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends[name] = time.perf_counter()
            return found

        return timed

    for name in ("compute_logprobs", "compute_scores", "step_optimizer"):
        if hasattr(script, name):
            setattr(script, name, watched(name, getattr(script, name)))
    return ends


def flops_per_token(models, length):
    """Return 6 FLOPs per weight in a matrix product, plus causal attention over the length, without recomputation."""
    weights = sum(model.blocks + (model.embedding if name == "policy" else 0) for name, model in models.items())
    return 6 * weights + sum(6 * model.layers * model.queries * length for model in models.values())


def training_settings(job, size):
    """Return the settings of a short training run in which all rows are as long as allowed."""
    settings = {"model": job["model"], "num_steps": 3, "eval_prompts": 0, "run_dir": f"{job['folder']}/run"}
    settings |= {"max_completion_length": size["length"], "precision": "bfloat16", "system_prompt": ""} | job["flags"]
    if job["script"] == "dpo":
        return settings | {"dataset": make_pairs(job["folder"], size["length"]), "minibatch_size": size["prompts"]}
    settings |= {"dataset": str(ROOT / "data" / "addition")}
    if job["script"] == "ppo_rlhf":
        rows = size["prompts"] * size["group"]
        settings |= {"reward_model": job["model"], "update_epochs": 1}
        return settings | {"prompts_per_step": rows, "minibatch_size": rows // 2}
    rows = size["prompts"] * size["group"]
    return settings | {"prompts_per_step": size["prompts"], "group_size": size["group"], "minibatch_size": rows // 2}


def trained_tokens(job, line, size, settings):
    """Return the number of completion tokens that a step trained on."""
    if job["script"] == "dpo":
        return 2 * settings["minibatch_size"] * size["length"]
    return settings["prompts_per_step"] * settings.get("group_size", 1) * line["rollout/length_mean"]


def make_pairs(folder, length):
    """Write a dataset of random digits in which all completions are nearly as long as allowed; return its folder."""
    rng, path = random.Random(1), Path(folder) / "pairs"
    path.mkdir()
    for split, count in (("train", 256), ("test", 2)):
        texts = [["".join(rng.choices("0123456789", k=length - 4)) for _ in range(2)] for _ in range(count)]
        lines = [json.dumps({"prompt": "1+2=", "chosen": chosen, "rejected": other}) for chosen, other in texts]
        (path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return str(path)


def compare_peak(what, peak, formula):
    """Yield a row that compares the measured peak with tools/memory.py; without a GPU, only the prediction."""
    if peak is None:
        yield f"{what} by tools/memory.py, GB", formula / 1e9, "", None
    else:
        holds = 0.6 * formula <= peak <= 1.05 * formula
        yield f"{what}, GB", peak / 1e9, f"0.6 to 1.05 of {formula / 1e9:.2f} (tools/memory.py)", holds


# ---- models and prompts


def make_model(folder, size):
    """Write a random model of this size, with the tokenizer of models/tiny, which uses the first ids of the model."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    memory = load_memory()
    config = Qwen2Config(**TINY) if size == "tiny" else memory.load_config(size)
    # With 0.04, distributions are peaked enough for rounding to matter, but far from those of a trained model.
    config.initializer_range, config.max_position_embeddings = 0.04, 4096
    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, 5, 0
    config.num_labels = 1  # ppo_rlhf.py loads it as its reward model, too, with another head
    torch.manual_seed(1)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "models" / "tiny" / name, folder)


def load(job):
    """Return settings, tokenizer and device, from which grpo.py loads a policy or a sampler."""
    from transformers import AutoTokenizer

    grpo = importlib.import_module("grpo")
    args = grpo.Args(model=job["model"], precision="bfloat16")
    return args, AutoTokenizer.from_pretrained(job["model"]), grpo.init_ranks()


def make_prompts(rows, copies=1):
    """Return random prompts of 8 to 16 ids, with adjacent copies of each."""
    rng = random.Random(1)
    prompts = [[rng.randrange(6, 28) for _ in range(rng.randint(8, 16))] for _ in range(rows // copies)]
    return [prompt for prompt in prompts for _ in range(copies)]


def make_batch(prompts, completions, device):
    """Return prompts and what generate returned as a batch, in the form that the scripts use."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids, masks, logprobs, lengths = [], [], [], []
    for prompt, (tokens, token_logprobs) in zip(prompts, completions):
        ids.append(torch.tensor(prompt + tokens))
        masks.append(torch.tensor([0] * len(prompt) + [1] * len(tokens)))
        logprobs.append(torch.tensor([0.0] * len(prompt) + token_logprobs))
        lengths.append(len(ids[-1]))
    batch = {"ids": ids, "completion_mask": masks, "sampler_logprobs": logprobs}
    batch = {name: pad_sequence(rows, batch_first=True) for name, rows in batch.items()}  # (B, L)
    return {name: rows.to(device) for name, rows in (batch | {"total_lengths": torch.tensor(lengths)}).items()}


def of_completions(values, prompts, tokens):
    """Return the values (B, L) of completions that all have this many tokens: (B, tokens)."""
    import torch

    return torch.stack([row[len(prompt) : len(prompt) + tokens] for row, prompt in zip(values, prompts)])


def gpu_gb():
    """Return the nominal GB of the GPU, assuming that the driver reports 1.07e9 bytes for each; without a GPU, 1e6."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 1.07e9 if torch.cuda.is_available() else 1e6


def load_memory():
    sys.path.insert(0, str(ROOT / "tools"))
    return importlib.import_module("memory")


# ---- the processes and the file


def run_child(job):
    """Run one section in this process; print every row as a line of JSON to stdout."""
    stdout, sys.stdout = sys.stdout, sys.stderr
    sys.path.insert(0, str(ROOT))
    try:
        if job["section"] == "model":
            make_model(job["model"], job["size"])
        else:
            import torch

            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 4)))
            for row in {function.__name__: function for _, function, *_ in sections(False)}[job["section"]](job):
                print(json.dumps(row), file=stdout, flush=True)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        print(json.dumps(["failed", f"{type(error).__name__}: {error}"[:300], "", False]), file=stdout, flush=True)


def start_child(job, limit):
    """Run a section in a separate process; return its rows."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # as in the scripts
    command = [sys.executable, __file__, "child", json.dumps(job)]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            text, _ = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            child.kill()
            late = ["failed", f"not done in {limit:.0f} s", "", False]
            text = f"{child.communicate()[0] or ''}\n{json.dumps(late)}"
        rows = [json.loads(line) for line in text.splitlines() if line.startswith("[")]
        if child.returncode not in (0, -9):
            errors.seek(0)
            rows.append(["failed", f"exit status {child.returncode}: {errors.read()[-300:]}", "", False])
    return rows


def read_machine():
    """Return the name of the GPU, empty without one, and a line with the machine and versions."""
    ask = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '', torch.version.cuda)"
    *name, cuda = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True).stdout.split()
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "transformers"))
    name, python = " ".join(name), platform.python_version()
    return name, f"{name or platform.machine()}, {os.cpu_count()} cores, Python {python}, {versions}, CUDA {cuda}"


def write(out, machine, seconds, results):
    """Write the results so far."""
    command = f"python benchmark/gpu.py {' '.join(sys.argv[1:])}".strip()
    lines = ["# benchmark/gpu.py", "", f"{machine}. `{command}`, {seconds:.0f} s.", ""]
    for name, (rows, took) in results.items():
        lines += [
            f"## {name} ({took:.0f} s)",
            "",
            "| quantity | measured | expected | as expected |",
            "|---|---:|---|---|",
        ]
        for what, value, expected, holds in rows:
            shown = f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")
            lines.append(f"| {what} | {shown} | {expected} | {({True: 'yes', False: '**no**'}).get(holds, '')} |")
        lines.append("")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(lines))


def main(args):
    name, machine = read_machine()
    if not name and not args.tiny:
        raise SystemExit("no GPU: --tiny runs the same code on the CPU with tiny models")
    slug = re.sub(r"\W+", "_", name or platform.machine()).strip("_").lower()
    out = Path(args.out) if args.out else ROOT / "benchmark" / "results" / f"gpu_{slug}.md"
    peak = args.peak_tflops or next((value for key, value in PEAK_TFLOPS.items() if key in name), None)
    start, results = time.perf_counter(), {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (title, function, given, limit) in enumerate(sections(args.tiny)):
            if any(title.startswith(word) for word in args.skip):
                continue
            job = {"section": function.__name__, "folder": f"{folder}/{number}", "peak_tflops": peak, **given}
            Path(job["folder"]).mkdir()
            begun = time.perf_counter()
            left = 60 * args.minutes - (begun - start)
            print(f"{begun - start:4.0f} s  {title}", flush=True)
            if left < 20:
                results[title] = [["not run", "no time left", "", None]], 0.0
            else:
                rows = []
                if "size" in given:
                    job["model"] = f"{folder}/{given['size']}"
                    if not Path(job["model"]).exists():
                        rows = start_child(job | {"section": "model"}, left)
                rows += start_child(job, min(limit, 60 * args.minutes - (time.perf_counter() - start)))
                results[title] = rows, time.perf_counter() - begun
            for what, value, expected, holds in results[title][0]:
                expectation = f", expected {expected}" if expected else ""
                print(f"        {what}: {value}{expectation}{' FAILED' * (holds is False)}")
            write(out, machine, time.perf_counter() - start, results)
            shutil.rmtree(job["folder"], ignore_errors=True)
    failed = [title for title, (rows, _) in results.items() if any(holds is False for *_, holds in rows)]
    print(f"{out}: " + (f"failed: {', '.join(failed)}" if failed else "all results are as expected"))
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        run_child(json.loads(sys.argv[2]))
    else:
        import tyro

        main(tyro.cli(Args, description="Check and time the scripts on a GPU."))
