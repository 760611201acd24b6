"""Trained weights of blocks that compute in bfloat16 have noise that rounds away, by which small steps reach them."""

import json

import pytest
import torch
from tiny import TINY, build_model, load, make_args, make_batch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

import grpo

pytestmark = pytest.mark.usefixtures("alone")
CPU = torch.device("cpu")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
STORED = [torch.float16, torch.bfloat16, torch.float32]


def make_model(stored, config="llama"):
    """A model whose weights are as a folder of this dtype has them, some of which are 0."""
    model = build_model(config, dtype=torch.float32, scale=1.0).to(stored).float()
    for weight in model.parameters():
        weight.data.flatten()[:2] = torch.tensor([0.0, -0.0])
    return model


def shard(model, precision="bfloat16"):
    return grpo.shard(grpo.LogprobModel(model), make_args(precision=precision), CPU)


def whole(weight):
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def weights_of(model):
    return {name: whole(weight).detach().clone() for name, weight in model.named_parameters()}


def test_the_table_of_the_page_is_of_what_was_measured():
    import bfloat16  # of benchmark/

    page = (bfloat16.ROOT / "docs" / "precision.md").read_text(encoding="utf-8")
    assert bfloat16.table(json.loads(bfloat16.RESULT.read_text())) in page


@pytest.mark.parametrize("stored", STORED)
def test_what_is_computed_is_the_same_to_the_last_bit(stored, monkeypatch):
    """By the policy when it was loaded, as by the reference, which is rounded."""
    found, batch = [], make_batch(make_model(stored))
    for trained in (True, False):
        policy = shard(make_model(stored).requires_grad_(trained))
        found.append(policy(batch, 0.7)[0].detach())
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.zeros((), dtype=torch.int32))
    policy = shard(make_model(stored))
    found.append(policy(batch, 0.7)[0].detach())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_noise_rounds_to_what_was_stored_and_is_uniform():
    config, offsets = LlamaConfig(**SIZES), []
    before = weights_of(make_model(torch.float32, config))
    policy = shard(make_model(torch.float32, config))
    for name, weight in weights_of(policy.model).items():
        if ".layers." in name:
            assert torch.equal(weight.bfloat16(), before[name].bfloat16()), name
            assert torch.equal(weight[before[name] == 0], before[name][before[name] == 0])
            rounded = before[name].bfloat16().float()
            offsets.append((weight.view(torch.int32) - rounded.view(torch.int32))[rounded != 0])
    offsets = torch.cat(offsets).double() / 32767
    assert len(offsets) > 1e6 and offsets.abs().max() <= 1 and abs(offsets.mean()) < 0.003
    assert torch.histc(offsets, 10, -1, 1).min() > 0.098 * len(offsets)


@pytest.mark.parametrize("rank", [0, 2])
def test_only_trained_weights_of_bfloat16_blocks_have_noise(rank):
    def load():
        torch.manual_seed(1)
        model = make_model(torch.float32)
        if rank:
            grpo.add_adapters(model, rank)
        return model

    before, after = (weights_of(load()), {})
    for precision in ("float32", "bfloat16"):
        after[precision] = weights_of(shard(load(), precision).model)
    for name, weight in before.items():
        assert torch.equal(after["float32"][name], weight), name
        trained = not rank or ".lora_" in name
        if ".layers." not in name:
            assert torch.equal(after["bfloat16"][name], weight), name
        elif not trained:
            assert torch.equal(after["bfloat16"][name], weight.bfloat16()), name
        elif ".lora_b." in name:
            assert not after["bfloat16"][name].any()
        else:
            changed = (after["bfloat16"][name] != weight)[weight != 0].float().mean()
            assert changed > 0.9 and after["bfloat16"][name].dtype == torch.float32, name


def test_a_checkpoint_read_in_bfloat16_is_the_model_that_was_sampled(tmp_path, tokenizer):
    model, _ = load(grpo, TINY)
    policy = shard(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    grpo.save(str(tmp_path), policy, optimizer, tokenizer, 1)
    read = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32).named_parameters())
    with grpo.gathered(policy) as sampler:
        sampled = {name: weight for name, weight in sampler.named_parameters() if ".layers." in name}
        assert sampled and all(torch.equal(read[name].bfloat16(), weight) for name, weight in sampled.items())


def movement(stored, rate, steps):
    """How far the rounded weights of the blocks have moved in the mean, all gradients being 1."""
    model = make_model(stored, LlamaConfig(**SIZES))
    policy, before = shard(model), None
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in range(steps + 1):
        if step > 0:
            for weight in policy.parameters():
                weight.grad = torch.ones_like(weight)
            grpo.step_optimizer(policy, optimizer, rate, float("inf"))
        inside = [weight for name, weight in weights_of(policy).items() if ".layers." in name and weight.dim() > 1]
        rounded = [weight.bfloat16().double() for weight in inside]
        before = rounded if step == 0 else before
    moved = torch.cat([(old - new)[old != 0] for old, new in zip(before, rounded)])
    return moved.mean().item()


@pytest.mark.parametrize("stored", STORED, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_small_steps_move_the_rounded_weights_in_the_mean_as_float32_is_moved(stored):
    """As weights are stored in bfloat16 they would need a hundred steps at this rate to move at all."""
    assert movement(stored, 1e-6, 10) == pytest.approx(1e-5, rel=0.1)


@pytest.mark.parametrize("noise", [True, False])
def test_adapters_move_as_float32_is_moved_with_and_without_noise(noise):
    model = make_model(torch.bfloat16, LlamaConfig(**SIZES))
    grpo.add_adapters(model, 8)
    loaded = weights_of(model)
    policy = shard(model)
    adapters = {name: weight for name, weight in policy.model.named_parameters() if ".lora_" in name}
    for name, weight in adapters.items() if not noise else ():
        weight.to_local().detach().copy_(loaded[name])
    before = {name: whole(weight).detach().bfloat16().double() for name, weight in adapters.items()}
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for _ in range(10):
        for weight in adapters.values():
            weight.grad = torch.ones_like(weight)
        grpo.step_optimizer(policy, optimizer, 1e-5, float("inf"))
    for kind in ("lora_a", "lora_b"):
        moved = [before[name] - whole(adapters[name]).detach().bfloat16() for name in adapters if kind in name]
        assert torch.cat([part.flatten() for part in moved]).mean().item() == pytest.approx(1e-4, rel=0.05)


@pytest.mark.parametrize("stored", STORED, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_no_step_tips_more_weights_than_its_rate_says(stored):
    """As weights are stored in float16 one in ten lies between two numbers, and a step of any size would move it."""
    assert 0 < movement(stored, 1e-8, 4) < 2 * 4e-8
