"""--lora-rank: adapters by hand, checkpoints without them, and a reference that is the model without them."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from tiny import (
    CPU,
    ROOT,
    SIZES,
    TINY,
    build_model,
    make_args,
    make_batch,
    make_main_args,
    parse,
    read_jsonl,
    relative_error,
    write_jsonl,
)
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config, Qwen3Config

import dapo
import dpo
import dr_grpo
import grpo
import gspo
import ppo_rlhf
import reinforce
import reward_model
import sft

pytestmark = pytest.mark.usefixtures("alone")
SCRIPTS = [grpo, reinforce, dr_grpo, dapo, gspo, dpo, sft, ppo_rlhf, reward_model]
INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
QWEN2 = Qwen2Config(**SIZES, num_key_value_heads=1)
TIED = Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True)


def with_adapters(config="llama", rank=3, dtype=torch.float64, moved=True):
    """A model whose adapters have been trained a little, unless they are not moved."""
    model = build_model(config, dtype=dtype)
    grpo.add_adapters(model, rank)
    model.to(dtype)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".lora_b." in name and moved:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return model


def logprobs_of(model, batch):
    return grpo.token_logprobs(model, *(batch[key] for key in INPUTS), 0.7)[0]


def test_adapters_change_nothing_at_first_and_are_all_that_is_trained():
    model, plain = with_adapters(moved=False), build_model("llama")
    batch = make_batch(plain)
    assert torch.equal(logprobs_of(model, batch), logprobs_of(plain, batch))
    linear = [module for module in plain.base_model.modules() if isinstance(module, torch.nn.Linear)]
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * len(linear) == 28 and all(".lora_" in name for name in trained)
    assert sum(p.numel() for p in trained.values()) == sum(3 * (m.in_features + m.out_features) for m in linear)
    assert not any(name.startswith("lm_head") for name in trained)
    logprobs_of(model, batch).sum().backward()
    assert all((parameter.grad is not None) == (name in trained) for name, parameter in model.named_parameters())


def test_gradients_of_adapters_are_those_of_the_weight_they_add_to():
    """With W = W_0 + s B A, dL/dB = s dL/dW A^T and dL/dA = s B^T dL/dW; s = 32 / rank."""
    model, merged = with_adapters(), build_model("llama")
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_a")}
    for name, layer in layers.items():
        merged.get_submodule(name).weight.data += 32 / 3 * layer.lora_b.weight.data @ layer.lora_a.weight.data
    batch = make_batch(merged)
    torch.testing.assert_close(logprobs_of(model, batch), logprobs_of(merged, batch), rtol=1e-9, atol=1e-9)
    for each in (model, merged):
        (logprobs_of(each, batch) * batch["advantages"].unsqueeze(1)).sum().backward()
    for name, layer in layers.items():
        gradient = merged.get_submodule(name).weight.grad
        assert relative_error(layer.lora_b.weight.grad, 32 / 3 * gradient @ layer.lora_a.weight.T) < 1e-9
        assert relative_error(layer.lora_a.weight.grad, 32 / 3 * layer.lora_b.weight.T @ gradient) < 1e-9


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_reference_is_the_model_without_adapters_to_the_last_bit(precision, ranks, monkeypatch):
    batch, minibatches = make_batch(build_model("llama", dtype=torch.float32)), [torch.arange(8)]
    found, args = {}, make_args(precision=precision)
    for moved in (False, True):
        model = with_adapters(dtype=torch.float32, moved=moved)
        with monkeypatch.context() as patch:
            patch.setattr(grpo.dist, "get_world_size", lambda: ranks)  # sharded as on so many, on one
            patch.setattr(grpo.dist, "init_device_mesh", lambda kind, _: init_device_mesh(kind, (1,)))
            policy = grpo.shard(grpo.LogprobModel(model), args, CPU)
        ref = partial(policy, adapters=False)
        found[moved] = [grpo.lookup_logprobs(which, batch, minibatches, args) for which in (policy, ref, policy)]
        assert torch.equal(found[moved][0], found[moved][2])  # and they are on again
    assert torch.equal(found[False][0], found[False][1]) and torch.equal(found[False][0], found[True][1])
    assert (found[True][0] - found[True][1]).abs().max() > 0.1


def test_frozen_weights_are_held_once_in_bfloat16_in_the_blocks_and_adapters_in_float32():
    policy = grpo.shard(grpo.LogprobModel(with_adapters(dtype=torch.float32)), make_args(precision="bfloat16"), CPU)
    for name, parameter in policy.named_parameters():
        inside, adapter = ".layers." in name, ".lora_" in name
        assert parameter.dtype == (torch.bfloat16 if inside and not adapter else torch.float32), name
        assert hasattr(parameter, "full_tensor") == adapter, name  # what is frozen FSDP would hold twice


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", ["llama", TIED], ids=["llama", "tied"])
def test_checkpoints_are_ordinary_folders_of_one_dtype(config, precision, tmp_path, tokenizer):
    model = with_adapters(config, dtype=torch.float32)
    policy = grpo.shard(grpo.LogprobModel(model), make_args(precision=precision), CPU)
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
    grpo.save(tmp_path, policy, optimizer, tokenizer, 1)
    saved = load_file(tmp_path / "checkpoint" / "model.safetensors")
    plain = build_model(config, dtype=torch.float32)
    assert saved.keys() == {*plain.state_dict()} - ({"lm_head.weight"} if config is TIED else set())
    assert {value.dtype for value in saved.values()} == {torch.float32}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").eval()
    batch = make_batch(plain)
    with torch.no_grad():
        error = relative_error(logprobs_of(loaded, batch), policy(batch, 0.7)[0])
    assert error < (1e-5 if precision == "float32" else 0.05)
    for name, parameter in policy.named_parameters():  # saving changed nothing
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_training_moves_what_adapters_reach_and_nothing_else(script, tmp_path):
    settings = {"num_steps": 2, "save_every": 2, "eval_prompts": 0, "lora_rank": 2}
    if script in (sft, reward_model):
        settings |= {"model": str(TINY), "minibatch_size": 8}
    args = make_main_args(script, tmp_path, **settings, run_dir=str(tmp_path / "run"))
    script.main(args)
    before = load_file(TINY / "model.safetensors")
    after = load_file(tmp_path / "run" / "checkpoint" / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "_proj." in name}
    if script is reward_model:
        loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "checkpoint")
        assert after.keys() - before.keys() == {"score.weight"} and loaded.score.weight.dtype == torch.float32
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["optim/grad_norm"] > 0


@pytest.mark.parametrize("rank, precision", [(0, "float32"), (0, "bfloat16"), (2, "float32"), (2, "bfloat16")])
def test_gradient_checkpointing_changes_no_gradient(rank, precision):
    batch, found = make_batch(build_model("llama", dtype=torch.float32)), []
    for recomputed in (False, True):
        args = make_args(precision=precision, gradient_checkpointing=recomputed)
        model = with_adapters(rank=rank, dtype=torch.float32) if rank else build_model("llama", dtype=torch.float32)
        policy = grpo.shard(grpo.LogprobModel(model), args, CPU)
        logprobs, _ = policy(batch, 0.7)
        logprobs.sum().backward()
        trained = [parameter.grad for parameter in policy.parameters() if parameter.requires_grad]
        found.append(torch.cat([getattr(grad, "full_tensor", lambda grad=grad: grad)().flatten() for grad in trained]))
    assert found[0].norm() > 0 and torch.equal(*found)


def test_gradients_are_freed_after_each_step():
    for model in (with_adapters(dtype=torch.float32), build_model("llama", dtype=torch.float32)):
        policy = grpo.LogprobModel(model)
        optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
        logprobs_of(policy.model, make_batch(policy.model)).sum().backward()
        assert grpo.step_optimizer(policy, optimizer, 1e-3, 1.0) > 0
        assert all(parameter.grad is None for parameter in policy.parameters())


def train_adapters(folder, precision, **settings):
    """A run of sft.py with adapters on the same 64 rows in each step; its lines."""
    rows = read_jsonl(ROOT / "data" / "addition" / "sft.jsonl")[:64]
    settings = {"model": str(TINY), "dataset": write_jsonl(folder / "rows.jsonl", rows), "eval_prompts": 16} | settings
    settings |= {"lora_rank": 8, "warmup_steps": 0, "precision": precision, "run_dir": str(folder / precision)}
    sft.main(parse(sft, minibatch_size=48, **settings))
    return read_jsonl(folder / precision / "metrics.jsonl")


def test_small_steps_of_adapters_reach_a_model_in_bfloat16(tmp_path):
    """A small output added to one that is rounded already would be lost, and the loss would not fall."""
    falls = {}
    for precision in ("float32", "bfloat16"):
        lines = train_adapters(tmp_path, precision, num_steps=20, learning_rate=1e-5)
        losses = [line["loss/nll"] for line in lines if "loss/nll" in line]
        falls[precision] = losses[0] - losses[-1]
    assert falls["float32"] > 0 and falls["bfloat16"] > 0.4 * falls["float32"]


def test_a_checkpoint_in_bfloat16_is_the_model_that_was_trained(tmp_path):
    lines = train_adapters(tmp_path, "bfloat16", num_steps=10, learning_rate=1e-3)
    checkpoint = str(tmp_path / "bfloat16" / "checkpoint")
    settings = {"dataset": str(tmp_path / "rows.jsonl"), "eval_prompts": 16, "precision": "bfloat16"}
    sft.main(parse(sft, model=checkpoint, num_steps=0, run_dir=tmp_path / "again", **settings))
    [again] = read_jsonl(tmp_path / "again" / "metrics.jsonl")
    losses = [line["loss/nll"] for line in lines if "loss/nll" in line]
    assert losses[-1] < losses[0] - 0.01
    assert again["eval/loss"] == pytest.approx(lines[-1]["eval/loss"], rel=0.01)


@pytest.mark.parametrize("config", ["llama", QWEN2], ids=["llama", "with biases"])
def test_adapters_that_add_nothing_change_no_bit_in_bfloat16(config):
    """So policy and reference are equal at the start, also in layers with a bias."""
    model, batch = with_adapters(config, dtype=torch.float32, moved=False), make_batch(build_model("llama"))
    policy = grpo.shard(grpo.LogprobModel(model), make_args(precision="bfloat16"), CPU)
    found = [policy(batch, 0.7, adapters)[0] for adapters in (True, False)]
    assert torch.equal(*found)
