"""--precision: what computes in bfloat16, what stays float32, and what it does to gradients, samples and a run."""

import gc
import json

import pytest
import torch
import transformers
from tiny import (
    CPU,
    SIZES,
    build_model,
    call_accumulate_gradients,
    make_args,
    make_batch,
    make_main_args,
    parse,
    read_jsonl,
    relative_error,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

import dpo
import grpo
import ppo_rlhf
import sft

pytestmark = pytest.mark.usefixtures("alone")
INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
KINDS = {
    "llama": "llama",
    "gpt2": "gpt2",
    "gemma3": transformers.Gemma3TextConfig(**SIZES, num_key_value_heads=1, head_dim=8, vocab_size=11),
    "tied": transformers.Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True),
}


def make_model(kind="llama"):
    return build_model(KINDS[kind], dtype=torch.float32, scale=2.0)


def make_policy(kind="llama", precision="bfloat16", rank=0):
    model = make_model(kind)
    if rank:
        grpo.add_adapters(model, rank)
    return grpo.shard(grpo.LogprobModel(model), make_args(precision=precision), CPU)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# ---- the forward and the backward pass


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_compute_in_bfloat16_and_all_else_and_the_gradients_are_float32(kind):
    policy, batch, seen = make_policy(kind), make_batch(make_model(kind)), {}

    def record(name):
        return lambda module, args, output: seen.update({name: {args[0].dtype, module.weight.dtype, output.dtype}})

    for name, module in policy.named_modules():
        if isinstance(module, torch.nn.Linear | transformers.pytorch_utils.Conv1D):
            module.register_forward_hook(record(name))
    logprobs, _ = policy(batch, 0.7)
    inside = [dtypes for name, dtypes in seen.items() if not name.endswith("lm_head")]
    assert len(inside) >= 8 and all(dtypes == {torch.bfloat16} for dtypes in inside)
    assert seen["model.lm_head"] == {torch.float32} and logprobs.dtype == torch.float32
    logprobs.sum().backward()
    for parameter in policy.parameters():
        assert isinstance(parameter, DTensor) and parameter.dtype == torch.float32
        assert parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_agree_with_float32_within_the_error_of_bfloat16_whatever_the_microbatches(kind):
    """bfloat16 has eight bits; ten microbatches round no more than one, because gradients add up in float32."""
    found, batch = {}, make_batch(make_model(kind))
    for name, precision, budget in (("exact", "float32", 999), ("one", "bfloat16", 999), ("many", "bfloat16", 1)):
        policy = make_policy(kind, precision)
        call_accumulate_gradients(grpo, policy, batch, torch.arange(8), make_args(microbatch_tokens=budget))
        found[name] = torch.cat([whole(parameter.grad).flatten() for parameter in policy.parameters()])
    assert 1e-4 < relative_error(found["one"], found["exact"]) < 0.03
    assert relative_error(found["many"], found["exact"]) < 0.03


def test_ranks_add_their_gradients_in_float32(monkeypatch):
    """As they are told to: on one rank there is nothing to add, and on two the error is that of bfloat16 anyway."""
    given, fully_shard = [], grpo.fully_shard
    monkeypatch.setattr(
        grpo, "fully_shard", lambda *args, **options: given.append(options) or fully_shard(*args, **options)
    )
    make_policy()
    policies = [options["mp_policy"] for options in given if "mp_policy" in options]
    assert len(policies) == 2 and all(policy.reduce_dtype == torch.float32 for policy in policies)


@pytest.mark.parametrize("trained", [True, False])
def test_nothing_stays_gathered_after_a_forward_pass_without_gradient(trained, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(grpo.dist, "get_world_size", lambda: 2)  # sharded as on two, on one
        patch.setattr(grpo.dist, "init_device_mesh", lambda kind, _: init_device_mesh(kind, (1,)))
        model = make_model().requires_grad_(trained)
        policy = grpo.shard(grpo.LogprobModel(model), make_args(precision="float32"), CPU)
    batch = make_batch(make_model())
    with torch.no_grad():
        policy(batch, 0.7)
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())


# ---- the policy as the sampler


def test_in_float32_on_one_process_nothing_is_sharded_or_hooked():
    policy = make_policy(precision="float32")
    with grpo.gathered(policy) as sampler:
        assert sampler is policy.model
    for module in policy.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert not any(isinstance(parameter, DTensor) for parameter in policy.parameters())


@pytest.mark.parametrize("precision, rank", [("float32", 2), ("bfloat16", 0), ("bfloat16", 2)])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "tied"])
def test_the_sampler_has_what_was_trained_rounded_in_its_blocks_and_leaves_nothing_gathered(kind, precision, rank):
    policy = make_policy(kind, precision, rank)
    for changed in (False, True):  # the second rollout is of what was trained since the first
        for parameter in policy.parameters() if changed else ():
            parameter.data.add_(0.1 * parameter.requires_grad)
        trained = {name: whole(parameter).clone() for name, parameter in policy.model.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in policy.model.named_buffers()}
        with grpo.gathered(policy) as sampler:
            assert not any(isinstance(weight, DTensor) for weight in sampler.parameters())
            for name, weight in sampler.named_parameters():
                dtype = getattr(torch, precision) if ".layers." in name else torch.float32
                assert weight.dtype == dtype and torch.equal(weight, trained[name].to(dtype)), name
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in policy.model.named_buffers())
        for name, parameter in policy.model.named_parameters():
            assert torch.equal(whole(parameter), trained[name]), name
            assert isinstance(parameter, DTensor) == (precision == "bfloat16" and parameter.requires_grad)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sampler_has_the_log_probabilities_of_the_policy_to_the_last_bit(kind, rank):
    """Where it does not decode with a cache, which rounds in another order; and FSDP's hooks are back after it."""
    if kind == "gpt2" and rank:
        return
    policy, batch = make_policy(kind, rank=rank), make_batch(make_model(kind))
    with torch.no_grad():
        with grpo.gathered(policy) as sampler:
            found = grpo.LogprobModel(sampler)(batch, 0.7)
        again = policy(batch, 0.7)
    assert torch.equal(found[0], again[0]) and torch.equal(found[1], again[1])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "tied"])
def test_what_the_sampler_decodes_has_nearly_the_log_probabilities_of_the_policy(kind, attention):
    """Of prompts of several lengths: a mask whose lowest number becomes -inf in bfloat16 makes rows of nan."""
    policy = make_policy(kind)
    policy.model.set_attn_implementation(attention)
    torch.manual_seed(1)
    prompts = grpo.pad_left([{"prompt_ids": ids} for ids in ([3, 4, 5, 6, 7, 8], [9], [2, 3])] * 20, CPU)
    with grpo.gathered(policy) as sampler, torch.no_grad():
        *completions, sampler_logprobs = grpo.generate(sampler, *prompts, 12, 1.0, [1], 0, with_logprobs=True)
    with torch.no_grad():
        logprobs, _ = policy(dict(zip(INPUTS, [*prompts, *completions])), 1.0)
    log_weight = logprobs - sampler_logprobs
    assert log_weight.isfinite().all()
    assert ((log_weight.expm1() - log_weight).sum() / completions[1].sum()).item() < 1e-3


# ---- models and runs


class Stop(Exception):
    pass


def test_start_up_holds_one_whole_float32_model_at_most(monkeypatch, tmp_path):
    """When the reference is loaded, the policy is sharded."""
    load_model, found = grpo.load_model, []

    def count_others(*args):
        gc.collect()
        others = [thing for thing in gc.get_objects() if isinstance(thing, PreTrainedModel) and id(thing) not in known]
        weights = [weight for other in others for weight in other.base_model.layers.parameters()]
        found.append([isinstance(weight, DTensor) for weight in weights])
        return load_model(*args)

    def stop(*_):
        raise Stop

    known = {id(thing) for thing in gc.get_objects() if isinstance(thing, PreTrainedModel)}
    monkeypatch.setattr(grpo, "load_model", count_others)
    monkeypatch.setattr(grpo, "open_run", stop)
    with pytest.raises(Stop):
        grpo.main(make_main_args(grpo, precision="bfloat16", run_dir=str(tmp_path / "run")))
    assert found[0] == [] and len(found[1]) > 50 and all(found[1]) and len(found) == 2


def test_the_reference_is_what_the_policy_was_to_the_last_bit():
    """Also in bfloat16, where one is cast for each forward and the other was rounded once."""
    policy, ref = make_policy(), make_model().requires_grad_(False)
    batch, minibatches, args = make_batch(make_model()), [torch.arange(8)], make_args(precision="bfloat16")
    ref = grpo.shard(grpo.LogprobModel(ref), args, CPU)
    before = grpo.lookup_logprobs(policy, batch, minibatches, args)
    assert torch.equal(grpo.lookup_logprobs(ref, batch, minibatches, args), before)
    assert {parameter.dtype for parameter in ref.model.base_model.layers.parameters()} == {torch.bfloat16}
    for parameter in policy.parameters():
        parameter.data.mul_(1.1)
    assert torch.equal(grpo.lookup_logprobs(ref, batch, minibatches, args), before)


def test_a_rollout_of_ppo_gathers_the_policy_and_not_the_value_model(tmp_path, monkeypatch):
    parts, gathered, shard, generate = [], [], ppo_rlhf.shard, ppo_rlhf.generate

    def recorded_shard(part, *settings):
        parts.append(shard(part, *settings))
        return parts[-1]

    def recorded_generate(*inputs, **options):
        gathered.append([not any(isinstance(weight, DTensor) for weight in part.parameters()) for part in parts[:2]])
        return generate(*inputs, **options)

    monkeypatch.setattr(ppo_rlhf, "shard", recorded_shard)
    monkeypatch.setattr(ppo_rlhf, "generate", recorded_generate)
    settings = {"precision": "bfloat16", "num_steps": 1, "reward_model": "none", "kl_coef": 0.0}
    ppo_rlhf.main(make_main_args(ppo_rlhf, tmp_path, **settings, run_dir=str(tmp_path / "run")))
    assert gathered.pop(0) == []  # that of check_model, before anything is sharded
    assert len(parts) == 2 and len(gathered) == 5 and all(found == [True, False] for found in gathered)


RUNS = {
    "bfloat16": (grpo, {"precision": "bfloat16"}),
    "adapters in bfloat16": (grpo, {"lora_rank": 2, "precision": "bfloat16"}),
    "ppo_rlhf, adapters in bfloat16": (ppo_rlhf, {"lora_rank": 2, "precision": "bfloat16", "eval_prompts": 0}),
    "dpo, adapters in bfloat16": (dpo, {"lora_rank": 2, "precision": "bfloat16"}),
    "sft, bfloat16": (sft, {"precision": "bfloat16"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_equals_an_uninterrupted_one(name, tmp_path, monkeypatch):
    monkeypatch.setattr(ppo_rlhf, "NORM_SAMPLES", 16)
    script, settings = RUNS[name]
    settings = settings if script is not sft else settings | {"warmup_steps": 4}  # no cosine yet
    for run, num_steps in (("whole", 4), ("parts", 2)):
        args = make_main_args(script, tmp_path, **settings, num_steps=num_steps, run_dir=str(tmp_path / run))
        script.main(args)
    script.main(parse(script, resume=tmp_path / "parts", num_steps=4))
    for file in ("checkpoint/model.safetensors", "samples.jsonl", "eval_samples.jsonl"):
        if (tmp_path / "whole" / file).exists():
            assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes(), file
    lines = [(tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in ("whole", "parts")]
    last = [{k: v for k, v in json.loads(run[-1]).items() if not k.startswith("perf/")} for run in lines]
    assert last[0] == last[1]


def test_the_embedded_task_is_learned_in_bfloat16(tmp_path):
    """Begun: `python benchmark/variants.py precision` has whole runs of every script."""
    settings = {"num_steps": 12, "learning_rate": 3e-4, "eval_prompts": 0, "run_dir": str(tmp_path / "run")}
    grpo.main(parse(grpo, precision="bfloat16", **settings))
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-12:]
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    assert all(0 < line["policy/sampler_kl"] < 1e-3 for line in lines)
