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
import gc
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
AUTO = ["--precision", "auto"]  # bfloat16 on a GPU; the bundled model's default is float32
TRAININGS = [("grpo", {"lora_rank": 16}), ("grpo", {"gradient_checkpointing": True}), ("ppo_rlhf", {}), ("dpo", {})]


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

    grpo, size = importlib.import_module("grpo"), SIZES[job["size"]]
    policy, device = build(job)
    torch.manual_seed(1)
    ids, mask = make_prompts(8, device)
    with grpo.gathered(policy) as sampler:
        sampled = grpo.generate(sampler, ids, mask, size["tokens"], 1.0, [])
    with torch.no_grad():
        batch = make_batch(ids, mask, *sampled)
        logprobs, _ = policy(batch, 1.0)
    difference = logprobs - batch["sampler_logprobs"]
    for start, end in ((0, 128), (128, 512), (512, 1024)):
        if start < size["tokens"]:
            part = difference[:, start:end]
            kl = (part.expm1() - part).mean().item()
            what = f"sampler and training, positions {start} to {min(end, size['tokens'])}: KL"
            yield what, kl, "under 1e-3", kl < 1e-3
            yield "... mean absolute difference of log-probabilities", part.abs().mean().item(), "", None
            yield (
                "... largest difference of log-probabilities",
                part.abs().max().item(),
                "under 0.5",
                part.abs().max().item() < 0.5,
            )
    yield from check_greedy(grpo, policy, ids, mask, min(64, size["tokens"]))
    yield from check_learning(grpo, policy, ids, mask, sampled, min(64, size["tokens"]))


def check_greedy(grpo, policy, ids, mask, tokens):
    """Compare greedy decoding with an uncached forward: where tokens differ, their logits must be nearly equal."""
    import torch

    with torch.no_grad(), grpo.gathered(policy) as sampler:
        completions = grpo.generate(sampler, ids, mask, tokens, 0.0, [])[0]
        whole = torch.cat([mask, torch.ones_like(completions)], 1)
        positions = (whole.cumsum(1) - 1).clamp(min=0)
        output = sampler(
            input_ids=torch.cat([ids, completions], 1), attention_mask=whole, position_ids=positions, use_cache=False
        )
    logits = output.logits[:, ids.shape[1] - 1 : -1].float()
    gaps = logits.max(2).values - logits.gather(2, completions.unsqueeze(2)).squeeze(2)
    equal = (gaps == 0).float().mean().item()
    yield "greedy decoding and uncached forward: share of equal tokens", equal, "over 0.9", equal > 0.9
    yield (
        "... largest gap between the highest logit and the chosen one",
        gaps.max().item(),
        "under 0.2",
        gaps.max().item() < 0.2,
    )


def check_learning(grpo, policy, ids, mask, sampled, tokens):
    """Check that four optimizer steps make completions more likely if all have advantage 1."""
    import torch

    batch = make_batch(ids, mask, *(tensor[:, :tokens] for tensor in sampled))
    batch["advantages"] = torch.ones(len(ids), device=ids.device)
    batch["indices"] = torch.arange(len(ids), device=ids.device)
    args = grpo.Args(kl_coef=0.0)
    rows, means = batch["indices"], []
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for _ in range(4):
        batch["old_logprobs"] = grpo.compute_logprobs(policy, batch, [rows], args)
        means.append(batch["old_logprobs"].mean().item())
        grpo.accumulate_gradients(policy, batch, rows, len(ids), args)
        norm = grpo.step_optimizer(policy, optimizer, 1e-4 if ids.is_cuda else 1e-3, 1.0)
        yield "gradient norm", norm, "positive", 0 < norm < float("inf")
    means.append(grpo.compute_logprobs(policy, batch, [rows], args).mean().item())
    yield "mean log-probability of the completions before four optimizer steps", means[0], "", None
    yield "... after these steps", means[-1], "higher", means[-1] > means[0]


def check_bfloat16(job):
    """Compare how far ten steps with a small learning rate lower the loss in float32, in bfloat16, and with noise."""
    from transformers import AutoTokenizer

    grpo = importlib.import_module("grpo")
    device = grpo.init_ranks()
    tokenizer, falls = AutoTokenizer.from_pretrained(job["model"]), {}
    batch = read_sums(tokenizer, device)
    for kind in (FLOAT32, WITHOUT_NOISE, WITH_NOISE):
        model = grpo.load_model(job["model"], tokenizer)
        losses = take_small_steps(model, batch, kind, device)
        falls[kind] = losses[0] - losses[-1]
        yield f"{kind}: fall of the loss", falls[kind], "", None
    share = falls[WITH_NOISE] / falls[FLOAT32]
    yield "... with noise, of the fall in float32", share, "0.7 to 1.3", 0.7 < share < 1.3


def read_sums(tokenizer, device, count=16):
    """Return a batch of prompts and completions of the bundled task."""
    import torch

    grpo = importlib.import_module("grpo")
    lines = (ROOT / "data" / "addition" / "sft.jsonl").read_text().splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    messages = [grpo.as_messages(row["prompt"], "user") for row in rows]
    prompts = [{"prompt_ids": grpo.encode_prompt(tokenizer, each, None)} for each in messages]
    stop = [grpo.find_turn_end(tokenizer)]
    completions = [tokenizer(row["completion"], add_special_tokens=False)["input_ids"] + stop for row in rows]
    longest = max(map(len, completions))
    ids = [row + [0] * (longest - len(row)) for row in completions]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in completions]
    batch = {"completion_ids": torch.tensor(ids).to(device), "completion_mask": torch.tensor(mask).to(device)}
    batch["prompt_ids"], batch["prompt_mask"] = grpo.pad_left(prompts, device)
    return batch


def take_small_steps(model, batch, kind, device, steps=10):
    """Return the steps + 1 losses of a batch at a learning rate of 1e-6: before each step, and after the last."""
    import torch

    grpo = importlib.import_module("grpo")
    loaded = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    args = grpo.Args(precision=kind.partition(",")[0])
    policy = grpo.prepare_model(grpo.LogprobModel(model), args, device)
    if kind == WITHOUT_NOISE:
        for name, weight in policy.model.named_parameters():
            own = getattr(weight, "_local_tensor", weight).data
            in_block = any(part.isdigit() for part in name.split("."))
            own.copy_(loaded[name].bfloat16() if in_block else loaded[name])
    optimizer, losses = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True), []
    for step in range(steps + 1):
        logprobs, _ = policy(batch, 1.0)
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
    run_script("grpo", [*AUTO, "--num-steps", "4", "--run-dir", str(folder / "whole"), *small])
    run_script("grpo", [*AUTO, "--num-steps", "2", "--run-dir", str(folder / "half"), *small])
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
    run_script("grpo", [*AUTO, "--run-dir", str(run)], torchrun)
    accuracy = read_metrics(run)[-1]["eval/accuracy"]
    yield "grpo.py on two processes: eval/accuracy", accuracy, "at least 0.96", accuracy >= 0.96


def check_defaults(job):
    """Run scripts with their defaults except for the precision, four at a time; sft.py runs only 100 steps."""
    folder = Path(job["folder"])

    def run(script):
        try:
            short = ["--num-steps", "100"] if script == "sft" else []
            run_script(script, [*AUTO, "--run-dir", str(folder / script), *short])
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
    """Time our generate, with and without room in its cache, and transformers'; compare our peak with formulas."""
    from transformers.cache_utils import DynamicLayer

    grpo, size, rates, formulas = importlib.import_module("grpo"), SIZES[job["size"]], {}, {}
    policy, device = build(job, trained=False)
    for rows in size["rows"]:
        formulas[rows] = rollout_formula(policy.model.config, rows, 16, size["tokens"])
        if formulas[rows] > 0.94e9 * gpu_gb():
            yield f"{rows} rows x {size['tokens']}", "not run: too little memory", "", None
            continue
        ids, mask = make_prompts(rows, device, copies=8)

        def ours(tokens, ids=ids, mask=mask):
            with grpo.gathered(policy) as sampler:
                grpo.generate(sampler, ids, mask, tokens, 1.0, [])

        seconds, peak = timed(ours, size["tokens"], device)
        rates[rows] = rows * size["tokens"] / seconds
        yield f"{rows} rows x {size['tokens']}: seconds", seconds, "", None
        yield "... tokens a second", rates[rows], "", None
        yield from compare_peak("... peak", peak, formulas[rows])
    if rates:
        room, grpo.RoomyLayer.update = grpo.RoomyLayer.update, DynamicLayer.update
        without, _ = timed(ours, size["tokens"], device)  # the most rows
        grpo.RoomyLayer.update = room
        yield "... seconds with a cache that is copied for each token", without, "", None
        yield "... with room / copied", seconds / without, "", None
    policy = None
    free(device)
    if rates:
        yield from time_peer(job, max(rates), rates[max(rates)], size, device)


def time_peer(job, rows, our_rate, size, device):
    """Time transformers' generate on the same rows, with everything in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16).to(device).eval()
    ids, mask = make_prompts(rows, device, copies=8)

    def theirs(tokens):
        settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, **settings)

    seconds, _ = timed(theirs, size["tokens"], device)
    yield f"transformers' generate, {rows} rows: tokens a second", rows * size["tokens"] / seconds, "", None
    yield "... ours / transformers'", our_rate * seconds / (rows * size["tokens"]), "", None


def time_passes(job):
    """Time forward and backward passes over the same rows, by their size and that of the LM head's chunks."""
    import torch

    grpo, size = importlib.import_module("grpo"), SIZES[job["size"]]
    policy, device = build(job)
    ids, mask = make_prompts(size["passes"], device)
    completions = torch.randint(6, 28, (len(ids), size["tokens"]), device=device)
    ones = torch.ones_like(completions)
    batch = make_batch(ids, mask, completions, ones, ones.float())
    rows, first = torch.arange(len(ids), device=device), None
    for max_tokens in (4096, 16384):
        for chunk in (2**25, 2**27):
            grpo.LOGITS_AT_ONCE = chunk

            def run(_, max_tokens=max_tokens):
                for part in grpo.microbatches(batch, rows, max_tokens):
                    policy(part, 1.0)[0].sum().backward()
                policy.zero_grad()

            seconds, peak = timed(run, 0, device)
            first = first or seconds
            what = f"passes of {max_tokens} tokens, 2^{chunk.bit_length() - 1} logits at once"
            yield f"{what}: tokens a second", completions.numel() / seconds, "", None
            yield "... seconds / those of the first row", seconds / first, "", None
            yield "... peak, GB", peak / 1e9 if peak else "", "", None


def rollout_formula(config, rows, prompt_length, tokens):
    """Return the bytes that tools/memory.py predicts for a rollout of a frozen model."""
    memory = load_memory()
    given = {"prompts_per_step": max(1, rows // 8), "group_size": min(8, rows), "eval_prompts": 0}
    given |= {"max_prompt_length": prompt_length, "max_completion_length": tokens}
    model = memory.count_model(config)
    working = memory.rollout_bytes(model, memory.read_settings("grpo", **given), 1)
    return 2 * model.blocks + 4 * model.root + sum(working)


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
    peaks, updates, script.save = watch_peaks(script), watch_updates(script), lambda *_: None  # nothing is written
    with contextlib.redirect_stdout(sys.stderr):
        script.main(script.Args(**settings))
    line = read_metrics(settings["run_dir"])[-1]
    yield "seconds per step", line["perf/step_seconds"], "", None
    tokens = trained_tokens(job, line, size, settings)
    if peaks:
        yield "rollout: seconds", line["perf/rollout_seconds"], "", None
        yield "... tokens a second", tokens / line["perf/rollout_seconds"], "", None
        sampler_kl = line["policy/sampler_kl"]
        yield "... policy/sampler_kl", sampler_kl, "under 1e-3", sampler_kl < 1e-3
    seconds = sum(updates[-len(updates) // settings["num_steps"] :])  # of the last step
    yield "update: seconds", seconds, "", None
    yield "update: tokens a second", tokens / seconds, "", None
    if job["peak_tflops"]:
        flops = flops_per_token(memory.count_models(config, job["script"]), size["length"])
        yield "update: model FLOP utilisation", tokens * flops / seconds / job["peak_tflops"] / 1e12, "", None
    rows = memory.account(config, fit)
    left_out = sum(row[2] for row in rows if row[0] == "reward model")  # --reward-model none has none
    last = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    if peaks:
        yield from compare_peak("peak of the rollout", peaks[-1], rows[-1][1] - left_out)
    yield from compare_peak("peak of the update", last, rows[-1][2] - left_out)


def watch_peaks(script):
    """Return a list that gets the peak of every rollout.

    After training, torch's own peak covers only the time since the last rollout.
    """
    import torch

    peaks, gathered = [], getattr(script, "gathered", None)
    if gathered is None:  # the script has no rollouts
        return peaks

    @contextlib.contextmanager
    def watched(policy):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with gathered(policy) as sampler:
            yield sampler
        peaks.append(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    script.gathered = watched
    return peaks


def watch_updates(script):
    """Return a list that gets the seconds of every call that is part of an update."""
    import torch

    updates = []

    def watched(function):
        def timed(*inputs):
            start = time.perf_counter()
            found = function(*inputs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            updates.append(time.perf_counter() - start)
            return found

        return timed

    for name in ("accumulate_gradients", "step_optimizer"):
        setattr(script, name, watched(getattr(script, name)))
    return updates


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
        settings |= {"reward_model": "none", "update_epochs": 1}
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
    torch.manual_seed(1)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "models" / "tiny" / name, folder)


def build(job, trained=True):
    """Return a model and the device, as main of grpo.py makes them: the policy, or the reference if not trained."""
    from transformers import AutoTokenizer

    grpo = importlib.import_module("grpo")
    device = grpo.init_ranks()
    model = grpo.load_model(job["model"], AutoTokenizer.from_pretrained(job["model"])).requires_grad_(trained)
    return grpo.prepare_model(grpo.LogprobModel(model), grpo.Args(precision="bfloat16"), device), device


def make_prompts(rows, device, copies=1):
    """Return random prompts of 8 to 16 ids, padded on the left, with adjacent copies of each."""
    grpo, rng = importlib.import_module("grpo"), random.Random(1)
    prompts = [[rng.randrange(6, 28) for _ in range(rng.randint(8, 16))] for _ in range(rows // copies)]
    return grpo.pad_left([{"prompt_ids": prompt} for prompt in prompts for _ in range(copies)], device)


def make_batch(prompt_ids, prompt_mask, completion_ids, completion_mask, sampler_logprobs):
    """Return prompts and the results of generate as a batch, in the form that the scripts use."""
    batch = {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": completion_ids}
    return batch | {"completion_mask": completion_mask, "sampler_logprobs": sampler_logprobs}


def gpu_gb():
    """Return the nominal GB of the GPU, assuming that the driver reports 1.07e9 bytes for each; without a GPU, 1e6."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 1.07e9 if torch.cuda.is_available() else 1e6


def load_memory():
    sys.path.insert(0, str(ROOT / "tools"))
    return importlib.import_module("memory")


def free(device):
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
