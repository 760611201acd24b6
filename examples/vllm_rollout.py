"""Sample with vLLM instead of a script's own loop; each rank has an engine in its process, on its own GPU.

    python examples/vllm_rollout.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k:main
    python examples/vllm_rollout.py ppo_rlhf --model ...   (or any script that samples, a fork, or a file with a reward)
    torchrun --nproc-per-node 8 examples/vllm_rollout.py --model ...

It takes the script's flags and --gpu-memory, the share of a GPU that the engine may have while it samples (0.4). It
replaces load_sampler, copy_weights and generate of the script. docs/vllm.md says how to install vLLM.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as in the scripts
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine is no process of its own
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # each push would warn that a tied head is not loaded twice
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, without a GPU

import torch
import torch.distributed as dist
from evaluate import import_script
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion


class Sampler:
    """A vLLM engine, in place of the model with which a script samples."""

    def __init__(self, script, gpu_memory):
        self.script, self.gpu_memory, self.script_samples = script, gpu_memory, script.sample_completions
        for name in ("load_sampler", "copy_weights", "sample_completions", "generate"):
            setattr(script, name, getattr(self, name))

    def load_sampler(self, args, tokenizer, device):
        """Start an engine, which joins the script's process group, and give it the weights of the folder."""
        self.vllm = importlib.import_module("vllm")  # after the script has set up its ranks
        self.dtype = getattr(torch, args.precision)
        self.engine = self.vllm.LLM(
            args.model,
            load_format="dummy",  # random weights, so that check finds those that do not arrive
            dtype=args.precision,
            max_model_len=args.max_prompt_length + args.max_completion_length,
            logprobs_mode="processed_logprobs",  # after the temperature
            hf_overrides={"head_dtype": "float32"},  # as in the policy
            gpu_memory_utilization=self.gpu_memory,
            enable_sleep_mode=torch.cuda.is_available(),
            enforce_eager=not torch.cuda.is_available(),  # on a CPU, compiling takes longer than it saves
            # With torchrun, each engine takes its rank's GPU; without this, all would take the first.
            distributed_executor_backend="external_launcher" if "RANK" in os.environ else None,
        )
        model = self.script.load_model(args, tokenizer, torch.float32)
        self.device, self.generation_config = device, model.generation_config
        self.copy_weights(SimpleNamespace(model=model), self)
        self.check(model, tokenizer.encode("1 + 1 ="), min(16, args.max_completion_length))
        self.engine.sleep(level=1)
        # At its end, main destroys the process group, in which the engine has its own: the engine destroys both.
        shutdown = self.engine.llm_engine.engine_core.shutdown
        self.script.dist = SimpleNamespace(**vars(dist) | {"destroy_process_group": shutdown})
        return self

    @torch.no_grad()
    def check(self, model, prompt, length):
        """Exit if the engine's log-probabilities are not the model's: these are rounded, others far from them."""
        tokens, logprobs = zip(*self.generate(self, [prompt] * 8, length, 1.0, []))
        logits = model(torch.tensor([prompt + ids for ids in tokens])).logits[:, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(2, torch.tensor(tokens).unsqueeze(2)).squeeze(2)
        difference = (expected - torch.tensor(logprobs)).abs().mean()
        if not difference < 0.1:
            raise SystemExit(f"vLLM computes this model differently: log-probabilities are off by {difference:.2g}")

    @torch.no_grad()
    def copy_weights(self, policy, _sampler):
        """Give the engine the weights of the policy."""
        torch.cuda.empty_cache()  # memory that torch keeps for later is not free for the engine
        self.engine.wake_up(["weights"])  # which does nothing if they are awake
        model, named_weights = policy.model, policy.model.named_parameters()
        if hasattr(model, "get_base_model"):  # with the adapters of docs/forks/lora.md
            model, named_weights = model.get_base_model(), self.script.merge_weights(policy)
        weights = {}
        for name, weight in named_weights:
            if isinstance(weight, DTensor):
                weight = weight.full_tensor()
            weights[name] = weight.detach().to(self.dtype)
        weights = revert_weight_conversion(model, weights)  # to the names in checkpoints, as in save_pretrained
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
        self.engine.apply_model(pack_head)
        self.engine.reset_prefix_cache()

    def sample_completions(self, *inputs):
        """Sample as the script does, perhaps in several turns. The engine sleeps before and afterwards."""
        torch.cuda.empty_cache()
        self.engine.wake_up(["weights"])
        self.engine.wake_up(["kv_cache"])
        found = self.script_samples(*inputs)
        self.engine.sleep(level=1)
        return found

    def generate(self, _sampler, prompts, max_completion_length, temperature, stop_ids):
        """Sample one completion per prompt, up to and including the first stop id, as a script's generate does."""
        options = {"temperature": temperature, "max_tokens": max_completion_length, "stop_token_ids": list(stop_ids)}
        options |= {"ignore_eos": True, "logprobs": 0, "detokenize": False}  # 0: of the sampled token alone
        first_seed = torch.randint(2**31, ()).item()  # the script seeds torch with its seed, the step and the rank
        sampling = [self.vllm.SamplingParams(seed=first_seed + number, **options) for number in range(len(prompts))]
        with torch.random.fork_rng():  # the engine draws from torch's generators, too
            requests = self.engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        completions = []
        for request in requests:
            [output] = request.outputs
            logprobs = [found[token].logprob for token, found in zip(output.token_ids, output.logprobs)]
            completions.append((list(output.token_ids), logprobs))
        return completions


def pack_head(model):
    """On a CPU, vLLM keeps a packed copy of a tied head, which reload_weights leaves as it was: pack it again."""
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead":
            module.quant_method.process_weights_after_loading(module)


def main():
    named = len(sys.argv) > 1 and not sys.argv[1].startswith("-")
    script = import_script(sys.argv.pop(1) if named else "grpo")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--gpu-memory", type=float, default=0.4)
    own, sys.argv[1:] = parser.parse_known_args()
    Sampler(script, own.gpu_memory)
    script.main(script.parse_args())


if __name__ == "__main__":
    main()
