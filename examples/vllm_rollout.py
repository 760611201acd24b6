"""Sample with vLLM instead of a script's own loop; each rank has an engine in its process, on its own GPU.

    python examples/vllm_rollout.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k:main
    python examples/vllm_rollout.py dapo --model ...          (any script that samples, but grpo_tools)
    torchrun --nproc-per-node 8 examples/vllm_rollout.py --model ...

It takes the script's flags and --gpu-memory, the share of a GPU that the engine may have while it samples (0.4). The
engine gets the policy's weights before each rollout and each evaluation, and sleeps during the update. docs/vllm.md
says how to install vLLM, and what was run.
"""

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as in the scripts
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine is no process of its own
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # each push would warn that a tied head is not loaded twice
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, without a GPU

import torch
import torch.distributed as dist
from transformers.core_model_loading import revert_weight_conversion

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}  # mean difference of log-probabilities that rounding explains
CHECKED = 16  # completions whose log-probabilities are compared


class Sampler:
    """An engine, and what takes the place of a script's gathered and generate."""

    def __init__(self, script, args, gpu_memory):
        if not 0.01 <= args.temperature <= 2:
            raise SystemExit("--temperature must be between 0.01 and 2: vLLM takes no other")
        self.script, self.args, self.gpu_memory = script, args, gpu_memory
        self.engine = self.policy = None
        self.own_gathered, self.own_step, self.own_end = script.gathered, script.step_optimizer, script.end_run
        script.gathered, script.generate = self.gathered, self.generate
        script.step_optimizer, script.end_run = self.step_optimizer, self.end_run
        self.check_next = True  # whether to compare the next samples' log-probabilities with the policy's

    def start(self):
        """Start an engine, which joins the script's process group. Its weights are random until the first push."""
        from vllm import LLM

        on_gpu = torch.cuda.is_available()
        with torch.random.fork_rng():  # the engine seeds torch's generators
            self.engine = LLM(
                self.args.model,
                load_format="dummy",
                dtype=self.args.precision,
                max_model_len=self.args.max_prompt_length + self.args.max_completion_length,
                logprobs_mode="processed_logprobs",  # after the temperature
                hf_overrides={"head_dtype": "float32"},  # as in the scripts
                gpu_memory_utilization=self.gpu_memory,
                enable_sleep_mode=on_gpu,
                enforce_eager=not on_gpu,  # on a CPU, compiling takes longer than it saves
                # With torchrun, each engine takes its rank's GPU; without this, all would take the first.
                distributed_executor_backend="external_launcher" if "RANK" in os.environ else None,
            )

    @contextlib.contextmanager
    def gathered(self, policy):
        """Wake the engine with the policy's weights, and let it sleep in the end."""
        self.policy = policy
        if self.engine is None:
            self.start()
        torch.cuda.empty_cache()  # memory that torch keeps for later is not free for the engine
        self.engine.wake_up(["weights"])
        with self.own_gathered(policy) as model, torch.no_grad():
            weights = {name: weight.data for name, weight in model.named_parameters()}
            self.script.merge_adapters(weights)
            weights = revert_weight_conversion(model, weights)  # to the names of checkpoints, as save_pretrained does
            self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
            self.engine.apply_model(pack_head)
            del weights
        self.engine.wake_up(["kv_cache"])
        self.engine.reset_prefix_cache()
        yield policy.model
        self.engine.sleep(level=1)

    def generate(self, _model, prompt_ids, prompt_mask, max_completion_length, temperature, stop_ids):
        """Sample one completion per prompt, up to and including the first stop id, as a script's generate does.

        prompts (B, P) padded on the left -> ids, mask and log-probabilities (B, T), all 0 after a completion's end.
        """
        from vllm import SamplingParams

        requests = [{"prompt_token_ids": ids[mask].tolist()} for ids, mask in zip(prompt_ids, prompt_mask.bool())]
        options = {"temperature": temperature, "max_tokens": max_completion_length, "stop_token_ids": list(stop_ids)}
        options |= {"ignore_eos": True, "logprobs": 0, "detokenize": False}  # 0: of the sampled token alone
        first_seed = torch.randint(2**31, ()).item()  # the script seeds torch with its seed, the step and the rank
        sampling = [SamplingParams(seed=first_seed + number, **options) for number in range(len(requests))]
        with torch.random.fork_rng():  # the engine draws from torch's generators, too
            outputs = self.engine.generate(requests, sampling, use_tqdm=False)
        completion_ids = torch.zeros(len(requests), max_completion_length, dtype=torch.long)
        completion_mask = torch.zeros_like(completion_ids)
        sampler_logprobs = completion_mask.float()
        for row, [output] in enumerate(output.outputs for output in outputs):
            length = len(output.token_ids)
            completion_ids[row, :length] = torch.tensor(output.token_ids)
            completion_mask[row, :length] = 1
            if temperature > 0:
                found = [logprobs[token].logprob for token, logprobs in zip(output.token_ids, output.logprobs)]
                sampler_logprobs[row, :length] = torch.tensor(found)
        sampled = [values.to(prompt_ids.device) for values in (completion_ids, completion_mask, sampler_logprobs)]
        # gkd.py has no log-probabilities without its teacher, but logs policy/sampler_kl in each step, too.
        if self.check_next and temperature > 0 and hasattr(self.script, "token_logprobs"):
            self.check_next = False
            self.check(temperature, prompt_ids, prompt_mask, *sampled)
        return sampled

    @torch.no_grad()
    def check(self, temperature, *tensors):
        """Exit if the log-probabilities of a few completions are not the policy's."""
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "sampler_logprobs")
        batch = {name: values[:CHECKED] for name, values in zip(names, tensors)}
        logprobs, _ = self.policy(batch, temperature)
        difference = (logprobs - batch["sampler_logprobs"]).abs().sum() / batch["completion_mask"].sum()
        if not difference < TOLERANCE[self.args.precision]:
            raise SystemExit(
                f"vLLM does not sample from the policy: log-probabilities differ by {difference:.2g} on average, more "
                "than by rounding; it computes this model in another way, or lacks some weights (see docs/vllm.md)"
            )

    def step_optimizer(self, *given):
        """Make the first optimizer step; the next samples are from changed weights."""
        self.check_next = True
        self.script.step_optimizer = self.own_step
        return self.own_step(*given)

    def end_run(self, args, signals):
        """End a run as the script does, but let the engine destroy the process group, in which it has its own."""
        if self.engine is not None:
            shutdown = self.engine.llm_engine.engine_core.shutdown
            self.script.dist = SimpleNamespace(**vars(dist) | {"destroy_process_group": shutdown})
        self.own_end(args, signals)


def pack_head(model):
    """On a CPU, vLLM keeps a packed copy of a tied head, which reload_weights leaves as it was: pack it again."""
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead":
            module.quant_method.process_weights_after_loading(module)


def main():
    name = "grpo"
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        name = sys.argv.pop(1)
    if name == "grpo_tools":
        raise SystemExit("grpo_tools samples in a loop of its own, in which the tool writes, too: run it without vLLM")
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit("vllm is not installed: pip install vllm (for a CPU, see docs/vllm.md)")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--gpu-memory", type=float, default=0.4)
    own, sys.argv[1:] = parser.parse_known_args()
    script = importlib.import_module(name)
    args = script.parse_args()
    Sampler(script, args, own.gpu_memory)
    script.main(args)


if __name__ == "__main__":
    main()
