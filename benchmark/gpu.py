"""Check on a GPU that the scripts compute correctly, and measure their speed and memory.

    python benchmark/gpu.py                                (at most ten minutes)
    python benchmark/gpu.py --tiny --sections numbers      (a section with a tiny model, also on a CPU)

The program writes benchmark/results/gpu_NAME.md with a table: what was measured, and what is expected, if anything is.
It exits with status 1 if an expectation is not met. The models have random weights, the shapes of Qwen2.5-0.5B and
Qwen2.5-1.5B, and the tokenizer of models/tiny. Run nothing else on the GPU meanwhile.

    numbers     sampler and training agree, and so do cached and uncached greedy decoding
    training    seconds per step and peak memory of training runs, against tools/memory.py; with vLLM if it is installed
    defaults    the default runs of all scripts but sft.py, in bfloat16
"""

import importlib.util
import json
import os
import platform
import random
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

# Only child processes import torch, so that the end of a process frees what it had on the GPU.
ROOT = Path(__file__).resolve().parent.parent
SECTIONS = ["numbers", "training", "defaults"]
LENGTH = {"Qwen2.5-0.5B": 512, "Qwen2.5-1.5B": 512, "tiny": 16}  # of completions, tokens
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True}
DEFAULTS = dict.fromkeys("grpo dr_grpo dapo gspo cispo reinforce grpo_process grpo_tools gkd".split(), "accuracy 0.96")
DEFAULTS |= {"ppo_rlhf": "accuracy 0.93", "dpo": "pair_accuracy 0.78", "reward_model": "pair_accuracy 0.78"}
NO_STOP = [-1]  # ids that end a completion: none


@dataclass
class Args:
    sections: list[str] = field(default_factory=lambda: SECTIONS)
    """what to do"""
    minutes: float = 10.0
    """time limit; what has not ended by then fails"""
    tiny: bool = False
    """use a tiny model, also on a CPU"""
    out: str = ""
    """file for the results (default: benchmark/results/gpu_NAME.md)"""


# ---- sections that run in a process of their own; each yields rows (quantity, measured, expected or "", whether it is)


def check_numbers(folder):
    """Compare the sampler with training, and cached greedy decoding with a forward pass over the whole completions."""
    import torch
    from transformers import AutoTokenizer

    sys.path.insert(0, str(ROOT))
    grpo, length = importlib.import_module("grpo"), LENGTH[Path(folder).name]
    args, tokenizer = grpo.Args(model=folder, precision="bfloat16"), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(1)
    rng, device = random.Random(1), grpo.init_ranks()
    prompts = [[rng.randrange(6, 28) for _ in range(rng.randint(8, 16))] for _ in range(8)]
    policy, sampler = grpo.load_policy(args, tokenizer, device), grpo.load_sampler(args, tokenizer, device)
    sampled = grpo.generate(sampler, prompts, length, 1.0, NO_STOP)
    ids, mask = make_batch(prompts, [tokens for tokens, _ in sampled], device)
    expected = torch.tensor([logprobs for _, logprobs in sampled], device=device)
    with torch.no_grad():
        logprobs, _ = policy(ids, mask, 1.0)
    difference = logprobs[mask > 0].view_as(expected) - expected
    kl = (difference.expm1() - difference).mean().item()
    yield "sampler and training: KL", kl, "under 0.01", kl < 0.01
    largest = difference.abs().max().item()
    yield "largest difference of log-probabilities", largest, "under 0.5", largest < 0.5

    greedy = [tokens for tokens, _ in grpo.generate(sampler, prompts, min(64, length), 0.0, NO_STOP)]
    ids, mask = make_batch(prompts, greedy, device)
    with torch.no_grad():
        logits = sampler(input_ids=ids, use_cache=False).logits[:, :-1].float()
    gaps = logits.max(2).values - logits.gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)
    gaps = gaps[mask[:, 1:] > 0]
    equal = (gaps == 0).float().mean().item()
    yield "greedy decoding and uncached forward: share of equal tokens", equal, "over 0.9", equal > 0.9
    gap = gaps.max().item()
    yield "largest gap between the highest logit and the chosen one", gap, "under 0.2", gap < 0.2


def make_batch(prompts, completions, device):
    """Return ids and mask (B, L) of prompts and completions."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.tensor(prompt + tokens) for prompt, tokens in zip(prompts, completions)]
    masks = [torch.tensor([0] * len(prompt) + [1] * len(tokens)) for prompt, tokens in zip(prompts, completions)]
    return [pad_sequence(rows, batch_first=True).to(device) for rows in (ids, masks)]


def make_model(folder):
    """Write a random model of the shape that the folder's name says, with the tokenizer of models/tiny."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    size = Path(folder).name
    config = Qwen2Config(**TINY) if size == "tiny" else load_memory().load_config(size)
    # With 0.04, distributions are peaked enough for rounding to matter, but far from those of a trained model.
    config.initializer_range, config.max_position_embeddings = 0.04, 4096
    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, 5, 0
    config.num_labels = 1  # ppo_rlhf.py loads it as its reward model, too, with another head
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "models" / "tiny" / name, folder)
    return []


def load_memory():
    sys.path.insert(0, str(ROOT / "tools"))
    return importlib.import_module("memory")


# ---- sections that run scripts


def train(folder, script, launcher, flags):
    """Train for three steps in this process, and yield the speed of the last one and the peak memory."""
    import torch

    run = Path(tempfile.mkdtemp(dir=Path(folder).parent))
    words = ["--model", folder, "--dataset", str(ROOT / "data" / "addition"), "--precision", "bfloat16"]
    words += ["--system-prompt", "", "--max-prompt-length", "32", "--num-steps", "3", "--eval-prompts", "0"]
    words += ["--max-completion-length", str(LENGTH[Path(folder).name]), "--save-every", "100", *flags]
    sys.argv = [*launcher, *words, "--run-dir", str(run / "run")]
    runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
    metrics = read_metrics(run / "run")[-1]
    yield "seconds per step", metrics["perf/step_seconds"], "", None
    yield "... of these, the rollout", metrics["perf/rollout_seconds"], "", None
    kl = metrics["policy/sampler_kl"]
    yield "policy/sampler_kl", kl, "under 0.01", kl < 0.01
    memory, given = load_memory(), json.loads((run / "run" / "args.json").read_text())
    settings = memory.read_settings(script, **given)
    _, rollout, update = memory.account(memory.load_config(folder), settings)[-1]
    formula = max(rollout, update)
    if not torch.cuda.is_available():
        yield "peak memory by tools/memory.py, GB", formula / 1e9, "", None
    elif "vllm" not in launcher[0]:
        peak = torch.cuda.max_memory_allocated()
        holds = 0.6 * formula <= peak <= 1.05 * formula
        yield "peak memory, GB", peak / 1e9, f"0.6 to 1.05 of {formula / 1e9:.2f} (tools/memory.py)", holds


def check_defaults(folder, scripts, flags=()):
    """Yield the last evaluation of default runs in bfloat16. Four scripts run at a time."""

    def run(script):
        words = ["--tiny", "--precision", "bfloat16", "--run-dir", f"{folder}_{script}", *flags]
        command = [sys.executable, f"{script}.py", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return done.stderr[-300:] if done.returncode else read_metrics(f"{folder}_{script}")[-1]

    with ThreadPoolExecutor(4) as pool:
        for script, found in zip(scripts, pool.map(run, scripts)):
            metric, least = DEFAULTS[script].split()
            value = found if isinstance(found, str) else found[f"eval/{metric}"]
            holds = not isinstance(found, str) and value >= float(least)
            yield f"{script}.py: eval/{metric}", value, f"at least {least}", holds


def read_metrics(run):
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


# ---- the program

FUNCTIONS = {function.__name__: function for function in (check_numbers, make_model, train, check_defaults)}


def jobs_of(args, folder):
    """Return (section, title, function, its arguments) of everything to do, in order."""
    small = f"{folder}/{'tiny' if args.tiny else 'Qwen2.5-0.5B'}"
    flags = ["--prompts-per-step", "2", "--minibatch-size", "2"] if args.tiny else ["--prompts-per-step", "32"]
    jobs = [("numbers", f"numbers, {Path(small).name}", "check_numbers", [small])]
    ppo = [*flags, "--reward-model", small] if args.tiny else ["--reward-model", small]  # 256 prompts by default
    runs = [("grpo", ["grpo.py"], flags), ("ppo_rlhf", ["ppo_rlhf.py"], ppo)]
    runs += [("grpo", ["grpo.py"], [*flags, more]) for more in ("--gradient-checkpointing", "--cpu-offload")]
    if importlib.util.find_spec("vllm"):
        runs += [(script, ["examples/vllm_rollout.py", script], more) for script, _, more in runs[:2]]
    for script, launcher, more in runs:
        chosen = [word for word in more if word.startswith(("--grad", "--cpu"))]
        title = " ".join([*launcher, *chosen, f"on {Path(small).name}"])
        jobs.append(("training", title, "train", [small, script, launcher, more]))
    if not args.tiny:
        large = f"{folder}/Qwen2.5-1.5B"
        jobs.append(("training", "grpo.py on Qwen2.5-1.5B", "train", [large, "grpo", ["grpo.py"], flags]))
    jobs.append(("defaults", "default runs", "check_defaults", [small, list(DEFAULTS)]))
    return [job for job in jobs if job[0] in args.sections]


def run_child(function, arguments):
    """Print what one of the functions above yields as lines of JSON, with all other output on stderr."""
    stdout, sys.stdout = sys.stdout, sys.stderr
    for row in FUNCTIONS[function](*arguments):
        print(json.dumps(row), file=stdout, flush=True)


def start_child(function, arguments, seconds):
    """Run one of the functions above in a process of its own, and return its rows."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, __file__, "child", function, json.dumps(arguments)]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            text, _ = child.communicate(timeout=max(1, seconds))
        except subprocess.TimeoutExpired:
            child.kill()
            text, _ = child.communicate()
        rows = [json.loads(line) for line in text.splitlines() if line.startswith("[")]
        if child.returncode:
            errors.seek(0)
            rows.append(["failed", " ".join(errors.read()[-300:].split()) or "no time left", "", False])
    return rows


def read_machine():
    """Return the name of the GPU, empty without one, and a line with the machine and versions."""
    code = "import torch, transformers; name = torch.cuda.get_device_name() if torch.cuda.is_available() else ''; "
    code += "print(f'{name}|torch {torch.__version__}, transformers {transformers.__version__}')"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    name, versions = text.split("|")
    return name, f"{name or platform.machine()}, {os.cpu_count()} cores, {versions}"


def write(out, machine, results):
    """Write the results so far as a table."""
    lines = [
        "# benchmark/gpu.py",
        "",
        machine,
        "",
        "|section|quantity|measured|expected|as expected|",
        "|---|---|---|---|---|",
    ]
    for title, rows in results.items():
        for quantity, value, expected, holds in rows:
            shown = f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
            answer = {True: "yes", False: "**no**", None: ""}[holds]
            lines.append(f"|{title}|{quantity}|{shown}|{expected}|{answer}|")
    out.write_text("\n".join(lines) + "\n")


def main(args):
    name, machine = read_machine()
    if not name and not args.tiny:
        raise SystemExit("no GPU: --tiny runs the same code on the CPU with a tiny model")
    slug = re.sub(r"\W+", "_", name or platform.machine()).strip("_").lower()
    out = Path(args.out or ROOT / "benchmark" / "results" / f"gpu_{slug}.md")
    end, results = time.monotonic() + 60 * args.minutes, {}
    with tempfile.TemporaryDirectory() as folder:
        for _, title, function, arguments in jobs_of(args, folder):
            if not Path(arguments[0]).exists():
                start_child("make_model", arguments[:1], end - time.monotonic())
            results[title] = start_child(function, arguments, end - time.monotonic())
            for quantity, value, expected, holds in results[title]:
                print(title, quantity, value, expected, "FAILED" if holds is False else "", sep="  ", flush=True)
            write(out, machine, results)
    failed = [title for title, rows in results.items() if any(holds is False for *_, holds in rows)]
    print(f"{out}: failed: {', '.join(failed)}" if failed else f"{out}: all results are as expected")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        run_child(sys.argv[2], json.loads(sys.argv[3]))
    else:
        import tyro

        main(tyro.cli(Args))
