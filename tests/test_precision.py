"""bfloat16: what computes in it, the noise in the weights, and runs: python -m pytest tests/test_precision.py"""

import pytest
import torch
import transformers
from processes import assert_same_run
from tiny import (
    CPU,
    SIZES,
    build_model,
    make_args,
    make_batch,
    make_main_args,
    parse,
    relative_error,
)
from torch.distributed.tensor import DTensor

import dpo
import grpo_tools
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


def make_model(kind="llama", rank=0):
    model = build_model(KINDS[kind], dtype=torch.float32, scale=2.0)
    if rank:
        ppo_rlhf.add_adapters(model, rank)
    return model


def prepare(model, precision="bfloat16"):
    return ppo_rlhf.prepare_model(grpo_tools.LogprobModel(model), make_args(precision=precision), CPU)


def whole(weight):
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def weights_of(module):
    return {name: whole(weight).detach().clone() for name, weight in module.named_parameters()}


# ---- the forward and the backward pass


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_compute_in_bfloat16_and_all_else_and_the_gradients_are_float32(kind):
    policy = prepare(make_model(kind))
    seen = {}

    def record(name):
        return lambda module, args, output: seen.update({name: {args[0].dtype, module.weight.dtype, output.dtype}})

    for name, module in policy.model.named_modules():
        if isinstance(module, torch.nn.Linear | transformers.pytorch_utils.Conv1D):
            module.register_forward_hook(record(name))
    logprobs, _ = policy(make_batch(make_model(kind)), 0.7)
    logprobs.sum().backward()
    assert seen.pop("lm_head") == {torch.float32}
    assert len(seen) >= 8
    assert all(dtypes == {torch.bfloat16} for dtypes in seen.values())
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in policy.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_agree_with_float32_within_the_error_of_bfloat16_whatever_the_microbatches(kind):
    """bfloat16 has eight bits; ten microbatches round no more than one, because gradients add up in float32."""
    batch = make_batch(make_model(kind))
    gradients = []
    for precision, budget in (("float32", 999), ("bfloat16", 999), ("bfloat16", 1)):
        policy = prepare(make_model(kind), precision)
        args = make_args(microbatch_tokens=budget)
        grpo_tools.accumulate_gradients(policy, batch, torch.arange(8), 8, args)
        gradients.append(torch.cat([whole(parameter.grad).flatten() for parameter in policy.parameters()]))
    exact, one, many = gradients
    assert 1e-4 < relative_error(one, exact) < 0.03
    assert relative_error(many, exact) < 0.03


def test_the_processor_computes_where_torch_would_shard_on_another_device(monkeypatch):
    """As on a Mac, whose accelerator FSDP takes if it is not told otherwise."""
    asked = []
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda *_: asked.append(1) or torch.device("cpu"))
    policy = prepare(make_model())
    logprobs, _ = policy(make_batch(make_model()), 0.7)
    assert {weight.device.type for weight in policy.parameters()} == {"cpu"} and logprobs.requires_grad
    assert not asked


def test_ranks_add_their_gradients_in_float32(monkeypatch):
    """As they are told to: on one rank there is nothing to add, and on two the error is that of bfloat16 anyway."""
    given = []
    fully_shard = ppo_rlhf.fully_shard

    def recorded(module, **options):
        given.append(options)
        return fully_shard(module, **options)

    monkeypatch.setattr(ppo_rlhf, "fully_shard", recorded)
    prepare(make_model())
    dtypes = [options["mp_policy"].reduce_dtype for options in given if "mp_policy" in options]
    assert dtypes == [torch.float32] * 2


@pytest.mark.parametrize("trained", [True, False])
def test_nothing_stays_gathered_after_a_forward_pass_without_gradient(trained, monkeypatch):
    monkeypatch.setattr(ppo_rlhf, "WORLD_SIZE", 2)  # sharded as on two, on one
    policy = prepare(make_model().requires_grad_(trained), "float32")
    with torch.no_grad():
        policy(make_batch(make_model()), 0.7)
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())


# ---- the policy as the sampler


@pytest.mark.parametrize("precision, rank", [("float32", 2), ("bfloat16", 0), ("bfloat16", 2)])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "tied"])
def test_the_sampler_has_what_was_trained_rounded_in_its_blocks_and_leaves_nothing_gathered(kind, precision, rank):
    policy = prepare(make_model(kind, rank), precision)
    for change in (0.0, 0.1):  # the second rollout is of what was trained since the first
        for parameter in policy.parameters():
            parameter.data.add_(change * parameter.requires_grad)
        trained = weights_of(policy.model)
        with ppo_rlhf.gathered(policy) as sampler:
            for name, weight in sampler.named_parameters():
                dtype = getattr(torch, precision) if ".layers." in name else torch.float32
                assert not isinstance(weight, DTensor)
                assert weight.dtype == dtype
                assert torch.equal(weight, trained[name].to(dtype)), name
        for name, parameter in policy.model.named_parameters():
            assert torch.equal(whole(parameter), trained[name]), name
            assert isinstance(parameter, DTensor) == (precision == "bfloat16" and parameter.requires_grad)


@pytest.mark.parametrize("kind, rank", [("llama", 0), ("llama", 2), ("gemma3", 0), ("tied", 2), ("gpt2", 0)])
def test_the_sampler_has_the_log_probabilities_of_the_policy_to_the_last_bit(kind, rank):
    """Where it does not decode with a cache, which rounds in another order; and FSDP's hooks are back after it."""
    policy = prepare(make_model(kind, rank))
    batch = make_batch(make_model(kind))
    with torch.no_grad():
        with ppo_rlhf.gathered(policy) as sampler:
            found = grpo_tools.LogprobModel(sampler)(batch, 0.7)
        assert all(map(torch.equal, found, policy(batch, 0.7)))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "tied"])
def test_what_the_sampler_decodes_has_nearly_the_log_probabilities_of_the_policy(kind, attention):
    """Of prompts of several lengths: a mask whose lowest number becomes -inf in bfloat16 makes rows of nan."""
    policy = prepare(make_model(kind))
    policy.model.set_attn_implementation(attention)
    torch.manual_seed(1)
    prompts = ppo_rlhf.pad_left([{"prompt_ids": ids} for ids in ([3, 4, 5, 6, 7, 8], [9], [2, 3])] * 20, CPU)
    with ppo_rlhf.gathered(policy) as sampler:
        *completions, sampler_logprobs = ppo_rlhf.generate(sampler, *prompts, 12, 1.0, [1])
    with torch.no_grad():
        logprobs, _ = policy(dict(zip(INPUTS, [*prompts, *completions])), 1.0)
    log_weights = logprobs - sampler_logprobs
    assert log_weights.isfinite().all()
    assert (log_weights.expm1() - log_weights).sum() < 1e-3 * completions[1].sum()


# ---- noise, which rounds away, in trained weights of the blocks: by it small steps reach them


STORED = [torch.float16, torch.bfloat16, torch.float32]
LARGE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}


def stored_model(stored):
    """A model whose weights are as a folder of this dtype has them, some of which are 0."""
    config = transformers.LlamaConfig(**LARGE)
    model = build_model(config, dtype=torch.float32, scale=1.0).to(stored).float()
    for weight in model.parameters():
        weight.data.flatten()[:2] = torch.tensor([0.0, -0.0])
    return model


def test_noise_rounds_to_what_was_stored_and_is_uniform():
    offsets = []
    before = weights_of(stored_model(torch.float32))
    after = weights_of(prepare(stored_model(torch.float32)).model)
    for name, weight in after.items():
        if ".layers." in name:
            rounded = before[name].bfloat16().float()
            is_zero = before[name] == 0
            assert torch.equal(weight.bfloat16().float(), rounded), name
            assert torch.equal(weight[is_zero], before[name][is_zero])
            offsets.append((weight.view(torch.int32) - rounded.view(torch.int32))[~is_zero])
    offsets = torch.cat(offsets).double() / 32767
    assert len(offsets) > 1e6
    assert offsets.abs().max() <= 1
    assert abs(offsets.mean()) < 0.003
    assert torch.histc(offsets, 10, -1, 1).min() > 0.098 * len(offsets)


@pytest.mark.parametrize("rank", [0, 2])
def test_only_trained_weights_of_bfloat16_blocks_have_noise(rank):
    before = weights_of(make_model(rank=rank))
    for name, weight in weights_of(prepare(make_model(rank=rank), "float32").model).items():
        assert rank or torch.equal(weight, before[name]), name
    for name, weight in weights_of(prepare(make_model(rank=rank)).model).items():
        if ".layers." not in name:
            assert torch.equal(weight, before[name]), name
        elif rank and ".lora_" not in name:
            assert torch.equal(weight, before[name].bfloat16()), name
        elif ".lora_b." in name:
            assert not weight.any()
        else:
            assert weight.dtype == torch.float32, name
            assert (weight != before[name]).float().mean() > 0.9, name


def movement(stored, rate, steps):
    """How far the rounded weights of the blocks have moved in the mean, all gradients being 1."""
    policy = prepare(stored_model(stored))
    before = weights_of(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for _ in range(steps):
        for weight in policy.parameters():
            weight.grad = torch.ones_like(weight)
        ppo_rlhf.step_optimizer(policy, optimizer, rate, float("inf"))
    moved = []
    for name, weight in weights_of(policy).items():
        if ".layers." in name:
            difference = before[name].bfloat16().double() - weight.bfloat16().double()
            moved.append(difference[before[name] != 0])
    return torch.cat(moved).mean().item()


@pytest.mark.parametrize("stored", STORED, ids=["float16", "bfloat16", "float32"])
def test_small_steps_move_the_rounded_weights_in_the_mean_as_float32_is_moved(stored):
    """Without noise bfloat16 weights would need a hundred steps to move; of float16 ones any step would tip a tenth."""
    assert movement(stored, 1e-6, 10) == pytest.approx(1e-5, rel=0.1)
    assert 0 < movement(stored, 1e-8, 4) < 2 * 4e-8


@pytest.mark.parametrize("script, rank", [(grpo_tools, 0), (dpo, 2), (sft, 0)])
def test_a_resumed_run_equals_an_uninterrupted_one(script, rank, tmp_path):
    settings = {"precision": "bfloat16", "lora_rank": rank}
    if script is sft:
        settings["warmup_steps"] = 4  # no cosine yet
    for run, num_steps in (("whole", 4), ("parts", 2)):
        script.main(make_main_args(script, tmp_path, **settings, num_steps=num_steps, run_dir=tmp_path / run))
    script.main(parse(script, resume=tmp_path / "parts", num_steps=4))
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


# ---- what is changed for a while is as before, also after an error


def test_after_an_error_while_it_samples_the_policy_is_whole():
    """Such as Ctrl-C in a notebook, where the next cell goes on with the same policy."""
    policy, batch = prepare(make_model()), make_batch(make_model())
    before, _ = policy(batch, 0.7)
    with pytest.raises(KeyboardInterrupt), ppo_rlhf.gathered(policy):
        raise KeyboardInterrupt
    assert all(isinstance(weight, DTensor) for weight in policy.parameters())
    after, _ = policy(batch, 0.7)
    assert torch.equal(after, before)


def test_after_an_error_of_the_reference_the_adapters_are_on(monkeypatch):
    policy, batch = prepare(make_model(rank=2)), make_batch(make_model())
    for name, weight in policy.named_parameters():
        weight.data += 0.02 * ("lora_b" in name)
    before, _ = policy(batch, 0.7)
    assert not torch.equal(ppo_rlhf.without_adapters(policy, batch, 0.7)[0], before)
    with monkeypatch.context() as patch:
        patch.setattr(grpo_tools, "token_logprobs", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ppo_rlhf.without_adapters(policy, batch, 0.7)
    assert torch.equal(policy(batch, 0.7)[0], before)
