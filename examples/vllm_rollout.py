"""Sample with vLLM instead of a script's own loop; each rank has an engine in its process, on its own GPU.

    python examples/vllm_rollout.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k:main
    python examples/vllm_rollout.py dapo --model ...          (any script that has a function load_sampler)
    torchrun --nproc-per-node 8 examples/vllm_rollout.py --model ...

It takes the script's flags and --gpu-memory, the share of a GPU that the engine may have while it samples (0.4). The
engine gets the policy's weights before each rollout and each evaluation, and sleeps during the update. docs/vllm.md
says how to install vLLM, and what was run.
"""

import argparse
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
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from transformers.core_model_loading import revert_weight_conversion

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}  # mean difference of log-probabilities that rounding explains
CHECKED = 16  # completions whose log-probabilities are compared


class Sampler:
    """An engine, in place of the model with which a script samples."""

    def __init__(self, script, args, gpu_memory):
        if not 0.01 <= args.temperature <= 2:
            raise SystemExit("--temperature must be between 0.01 and 2: vLLM takes no other")
        self.script, self.args, self.gpu_memory = script, args, gpu_memory
        self.engine = self.policy = None
        self.own_load_policy, self.own_sample_completions = script.load_policy, script.sample_completions
        for name in ("load_policy", "load_sampler", "copy_weights", "sample_completions", "generate"):
            setattr(script, name, getattr(self, name))
        self.awake = set()  # parts of the engine
        self.checks_left = 2  # comparisons with the policy's log-probabilities: before the first update, and after it
        self.check_next = False

    def load_policy(self, *given):
        """Load the policy or the reference as the script does, and keep the first, which is the policy."""
        loaded = self.own_load_policy(*given)
        self.policy = self.policy or loaded
        return loaded

    def load_sampler(self, args, _tokenizer, device):
        """Start an engine, which joins the script's process group, and give it the weights of the policy."""
        from vllm import LLM

        on_gpu = torch.cuda.is_available()
        with torch.random.fork_rng():  # the engine seeds torch's generators
            self.engine = LLM(
                args.model,
                load_format="dummy",  # random weights, so that the first check finds those that do not arrive
                dtype=args.precision,
                max_model_len=args.max_prompt_length + args.max_completion_length,
                logprobs_mode="processed_logprobs",  # after the temperature
                hf_overrides={"head_dtype": "float32"},  # as in the policy
                gpu_memory_utilization=self.gpu_memory,
                enable_sleep_mode=on_gpu,
                enforce_eager=not on_gpu,  # on a CPU, compiling takes longer than it saves
                # With torchrun, each engine takes its rank's GPU; without this, all would take the first.
                distributed_executor_backend="external_launcher" if "RANK" in os.environ else None,
            )
        self.awake = {"weights", "kv_cache"}
        self.device, self.generation_config = device, self.policy.model.generation_config
        self.copy_weights(self.policy, self)
        self.sleep()
        # At its end, main destroys the process group, in which the engine has its own: let the engine do it.
        shutdown = self.engine.llm_engine.engine_core.shutdown
        self.script.dist = SimpleNamespace(**vars(dist) | {"destroy_process_group": shutdown})
        return self

    def wake_up(self, tag):
        """Wake a part of the engine, if it sleeps."""
        if not self.awake:
            torch.cuda.empty_cache()  # memory that torch keeps for later is not free for the engine
        if tag not in self.awake:
            self.engine.wake_up([tag])
        self.awake.add(tag)

    def sleep(self):
        """Let the engine free its memory."""
        self.engine.sleep(level=1)
        self.awake.clear()

    @torch.no_grad()
    def copy_weights(self, policy, _sampler):
        """Give the engine the weights of the policy."""
        self.wake_up("weights")
        weights = {}
        for name, weight in policy.model.named_parameters():
            if isinstance(weight, DTensor):
                weight = weight.full_tensor()
            weights[name] = weight.detach().to(getattr(torch, self.args.precision))
        weights = revert_weight_conversion(policy.model, weights)  # to the names in checkpoints, as in save_pretrained
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
        self.engine.apply_model(pack_head)
        self.check_next = self.checks_left > 0

    def sample_completions(self, *given):
        """Sample completions as the script does, and let the engine sleep afterwards."""
        self.wake_up("weights")
        self.wake_up("kv_cache")
        self.engine.reset_prefix_cache()
        sampled = self.own_sample_completions(*given)
        self.sleep()
        return sampled

    def generate(self, _sampler, prompts, max_completion_length, temperature, stop_ids):
        """Sample one completion per prompt, up to and including the first stop id, as a script's generate does."""
        from vllm import SamplingParams

        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        options = {"temperature": temperature, "max_tokens": max_completion_length, "stop_token_ids": list(stop_ids)}
        options |= {"ignore_eos": True, "logprobs": 0, "detokenize": False}  # 0: of the sampled token alone
        first_seed = torch.randint(2**31, ()).item()  # the script seeds torch with its seed, the step and the rank
        sampling = [SamplingParams(seed=first_seed + number, **options) for number in range(len(requests))]
        with torch.random.fork_rng():  # the engine draws from torch's generators, too
            outputs = self.engine.generate(requests, sampling, use_tqdm=False)
        completions = []
        for [output] in (output.outputs for output in outputs):
            logprobs = [0.0] * len(output.token_ids)
            if temperature > 0:
                logprobs = [found[token].logprob for token, found in zip(output.token_ids, output.logprobs)]
            completions.append((list(output.token_ids), logprobs))
        if self.check_next and temperature > 0:
            self.check_next = False
            self.checks_left -= 1
            self.check(temperature, prompts[:CHECKED], completions[:CHECKED])
        return completions

    @torch.no_grad()
    def check(self, temperature, prompts, completions):
        """Exit if the log-probabilities of these completions are not the policy's."""
        ids, mask, sampler_logprobs = [], [], []
        for prompt, (tokens, logprobs) in zip(prompts, completions):
            ids.append(torch.tensor(prompt + tokens))
            mask.append(torch.tensor([0] * len(prompt) + [1] * len(tokens)))
            sampler_logprobs.append(torch.tensor([0.0] * len(prompt) + logprobs))
        ids, mask, sampler_logprobs = (
            pad_sequence(values, batch_first=True).to(self.device) for values in (ids, mask, sampler_logprobs)
        )
        logprobs, _ = self.policy(ids, mask, temperature)
        difference = (logprobs - sampler_logprobs).abs().sum() / mask.sum()
        if not difference < TOLERANCE[self.args.precision]:
            raise SystemExit(
                f"vLLM does not sample from the policy: log-probabilities differ by {difference:.2g} on average, more "
                "than by rounding; it computes this model in another way, or lacks some weights (see docs/vllm.md)"
            )


def pack_head(model):
    """On a CPU, vLLM keeps a packed copy of a tied head, which reload_weights leaves as it was: pack it again."""
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead":
            module.quant_method.process_weights_after_loading(module)


def main():
    name = "grpo"
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        name = sys.argv.pop(1)
    script = importlib.import_module(name)
    if not hasattr(script, "load_sampler"):
        raise SystemExit(f"{name} has no sampler that vLLM could replace: run it without vLLM")
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit("vllm is not installed: pip install vllm (for a CPU, see docs/vllm.md)")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--gpu-memory", type=float, default=0.4)
    own, sys.argv[1:] = parser.parse_known_args()
    args = script.parse_args()
    Sampler(script, args, own.gpu_memory)
    script.main(args)


if __name__ == "__main__":
    main()
