"""Measure whether small steps of AdamW reach transformer blocks that compute in bfloat16.

    python benchmark/bfloat16.py --model path/to/model
    python benchmark/bfloat16.py --draw                  (draws the last results, without training)

The program trains on 16 fixed rows with several learning rates and records the loss before each step and after the
last. It writes benchmark/results/bfloat16.json and draws docs/pictures/bfloat16.png, the picture of docs/precision.md.

It compares four kinds of blocks:
- "float32": the blocks compute in float32.
- "bfloat16, on the grid": the weights are rounded to bfloat16 first, as in a model that is stored in bfloat16.
- "bfloat16, as loaded": the weights are not changed after loading.
- "bfloat16, with noise": what the scripts do. Rounding the weights to bfloat16 removes the noise again.
"""

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as in the scripts

import matplotlib.pyplot as plt
import torch
import tyro
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import grpo  # noqa: E402

KINDS = ("float32", "bfloat16, on the grid", "bfloat16, as loaded", "bfloat16, with noise")
RESULT, PICTURE = ROOT / "benchmark" / "results" / "bfloat16.json", ROOT / "docs" / "pictures" / "bfloat16.png"


@dataclass
class Args:
    """Settings of the measurement."""

    model: str = str(ROOT / "models" / "tiny")
    """folder of the model, or its name on the Hugging Face hub"""
    rates: list[float] = field(default_factory=lambda: [1e-6, 1e-5, 1e-7])
    """learning rates to compare"""
    steps: int = 10
    """optimizer steps of each run"""
    kinds: list[str] = field(default_factory=lambda: list(KINDS))
    """kinds of blocks to compare"""
    draw: bool = False
    """draw the picture from the results file, without training"""


def read_rows(tokenizer, device, count=16):
    """Return a batch of prompts and completions of the bundled task."""
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


def train(model, batch, kind, rate, steps, device):
    """Return the steps + 1 losses on the rows: before each step, and after the last."""
    loaded = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    args = grpo.Args(precision=kind.partition(",")[0])
    policy = grpo.prepare_model(grpo.LogprobModel(model), args, device)
    for name, weight in policy.model.named_parameters():
        own = getattr(weight, "_local_tensor", weight).data
        if kind == KINDS[1]:
            own.copy_(loaded[name].bfloat16() if any(part.isdigit() for part in name.split(".")) else loaded[name])
        elif kind == KINDS[2]:
            own.copy_(loaded[name])
    optimizer, losses = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True), []
    for step in range(steps + 1):
        logprobs, _ = policy(batch, 1.0)
        loss = -logprobs.sum() / batch["completion_mask"].sum()
        losses.append(loss.item())
        if step < steps:
            loss.backward()
            grpo.step_optimizer(policy, optimizer, rate, 1.0)
    return losses


def draw(results):
    rates = sorted({row["rate"] for row in results["rows"]})
    shape = {"figsize": (4 * len(rates), 3.4), "sharey": True, "constrained_layout": True, "squeeze": False}
    figure, axes = plt.subplots(1, len(rates), **shape)
    figure.suptitle("With noise, bfloat16 follows float32 (the thick line under it) at all three learning rates")
    for axis, rate in zip(axes[0], rates):
        for row in [row for row in results["rows"] if row["rate"] == rate]:
            width = 6 if row["kind"] == "float32" else 1.5
            axis.plot(row["losses"], marker=".", linewidth=width, alpha=0.4 if width == 6 else 1, label=row["kind"])
        axis.set(title=f"learning rate {rate:g}", xlabel="optimizer steps")
    axes[0][0].set(ylabel="loss on the 16 rows, nats per token")
    axes[0][0].legend(fontsize=8)
    figure.savefig(PICTURE, dpi=110)


def main(args):
    if not args.draw:
        device = grpo.init_ranks()
        tokenizer, rows = AutoTokenizer.from_pretrained(args.model), []
        batch = read_rows(tokenizer, device)
        for rate in args.rates:
            for kind in args.kinds:
                start = time.perf_counter()
                model = grpo.load_model(args.model, tokenizer)
                losses = [round(loss, 4) for loss in train(model, batch, kind, rate, args.steps, device)]
                rows.append({"kind": kind, "rate": rate, "losses": losses})
                print(f"learning rate {rate:g}, {kind}: {losses} ({time.perf_counter() - start:.0f} s)", flush=True)
        about = {"model": Path(args.model).name, "torch": torch.__version__, "device": device.type}
        text = ",\n".join(json.dumps(row) for row in rows)
        RESULT.write_text(f'{{"about": {json.dumps(about)}, "rows": [\n{text}\n]}}\n')
    draw(json.loads(RESULT.read_text()))


if __name__ == "__main__":
    main(tyro.cli(Args, description="Compare the losses by step of blocks in float32 and in bfloat16."))
