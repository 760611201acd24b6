"""Time the update of grpo.py, and compare it with the speed at which the processor multiplies matrices.

    python benchmark/update.py --model models/smollm2
    git show COMMIT:grpo.py > /tmp/before.py; python benchmark/update.py --model models/smollm2 --before /tmp/before.py

An update is one pass forwards and backwards over 48 rows of 17 + 48 random tokens and an optimizer step. The limit is
the time of its products alone, at the measured speed of a 2048 x 2048 product in the same precision. With --before, the
updates of the two files alternate; the ratio is the median over pairs.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as in the scripts

import argparse
import importlib.util
import inspect
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
ROWS, PROMPT, COMPLETION = 48, 17, 48
SIDE = 2048  # of the product that measures the processor's speed


def load_script(path):
    """Import a version of grpo.py under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"grpo_{abs(hash(str(path)))}", path)
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    return script


class Update:
    """A model of its own, and one batch."""

    def __init__(self, path, args, precision):
        self.script = load_script(path)
        device = self.script.init_ranks()
        model = self.script.load_model(args.model, AutoTokenizer.from_pretrained(args.model))
        torch.set_num_threads(args.threads)
        self.args = self.script.Args(precision=precision, microbatch_tokens=2048)
        blocks = [weight for block in self.script.find_blocks(model) for weight in block.parameters()]
        head = model.get_output_embeddings().weight.numel()
        tokens = ROWS * (PROMPT + COMPLETION)
        self.flop = 6 * sum(weight.numel() for weight in blocks) * tokens, 6 * head * ROWS * COMPLETION
        vocab_size = model.config.get_text_config().vocab_size
        self.policy = self.script.prepare_model(self.script.LogprobModel(model), self.args, device)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-6, fused=True)
        ids = torch.randint(10, vocab_size, (ROWS, PROMPT + COMPLETION), device=device)
        mask, zeros = torch.ones_like(ids), torch.zeros(ROWS, COMPLETION, device=device)
        self.batch = {"prompt_ids": ids[:, :PROMPT], "prompt_mask": mask[:, :PROMPT]}
        self.batch |= {"completion_ids": ids[:, PROMPT:], "completion_mask": mask[:, PROMPT:]}
        self.batch["sampler_logprobs"] = zeros - 10.0
        self.batch["advantages"] = torch.linspace(-1, 1, ROWS, device=device)

    def seconds(self):
        """Make an update and return how long it took."""
        torch.set_float32_matmul_precision("highest")
        if self.args.precision == "bfloat16":  # the setting of its own use_bfloat16, which two versions share
            self.script.use_bfloat16([])
        start = time.perf_counter()
        indices = torch.arange(ROWS, device=self.policy.model.device)
        function = self.script.accumulate_gradients
        first = [True] * ("is_first" in inspect.signature(function).parameters)  # older versions have this argument
        function(self.policy, self.batch, indices, ROWS, *first, self.args)
        self.script.step_optimizer(self.policy, self.optimizer, 1e-6, 1.0)
        return time.perf_counter() - start


def speed(dtype):
    """Return the FLOP per second of a product of two large matrices."""
    torch.set_float32_matmul_precision("highest")
    a, times = torch.randn(SIDE, SIDE).to(dtype), []
    for _ in range(12):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return 2 * SIDE**3 / statistics.median(times)


def main(args):
    print("| precision | update, s | limit, s | share of the limit | ratio to before |\n|---|---|---|---|---|")
    for precision in args.precisions:
        updates = [Update(path, args, precision) for path in (ROOT / "grpo.py", args.before) if path]
        rounds = [[update.seconds() for update in updates] for _ in range(args.repeats + 1)][1:]  # the first warms up
        median = statistics.median(times[0] for times in rounds)
        ratio = f"{statistics.median(times[0] / times[1] for times in rounds):.2f}" if args.before else "-"
        fast = speed(getattr(torch, precision))
        limit = sum(updates[0].flop) / fast
        if precision == "bfloat16" and torch.cpu.get_capabilities().get("avx512_bf16", False) is False:
            print("this processor does not multiply bfloat16")
        print(f"| {precision} | {median:.2f} | {limit:.2f} | {limit / median:.0%} | {ratio} |", flush=True)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "models/tiny"), help="folder or name (default: models/tiny)")
    parser.add_argument("--before", type=Path, help="another version of grpo.py to compare with")
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"], help="default: both")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--repeats", type=int, default=7, help="updates to time (default: 7)")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_args())
