"""--lora-rank: adapters by hand, checkpoints without them, and a reference that is the model without them."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from test_precision import CPU, make_main_args
from tiny import SIZES, build_model, make_batch, relative_error
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, MixtralConfig, Qwen3Config

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
TIED = Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True)


def with_adapters(config="llama", rank=3, dtype=torch.float64, moved=True):
    """A model whose adapters have been trained a little, unless they are not moved."""
    model = grpo.add_adapters(build_model(config, dtype=dtype), rank).to(dtype)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b") and moved:
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
    assert grpo.add_adapters(plain, 0) is plain and all(p.requires_grad for p in plain.parameters())


def test_gradients_of_adapters_are_those_of_the_weight_they_add_to():
    """With W = W_0 + s B A, dL/dB = s dL/dW A^T and dL/dA = s B^T dL/dW; s = 32 / rank."""
    model, merged = with_adapters(), build_model("llama")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, grpo.LoRALinear)}
    for name, layer in layers.items():
        merged.get_submodule(name).weight.data += 32 / 3 * layer.lora_b.data @ layer.lora_a.data
    batch = make_batch(merged)
    torch.testing.assert_close(logprobs_of(model, batch), logprobs_of(merged, batch), rtol=1e-9, atol=1e-9)
    for each in (model, merged):
        (logprobs_of(each, batch) * batch["advantages"].unsqueeze(1)).sum().backward()
    for name, layer in layers.items():
        gradient = merged.get_submodule(name).weight.grad
        assert relative_error(layer.lora_b.grad, 32 / 3 * gradient @ layer.lora_a.T) < 1e-9
        assert relative_error(layer.lora_a.grad, 32 / 3 * layer.lora_b.T @ gradient) < 1e-9


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [0, 1])
def test_the_reference_is_the_model_without_adapters_to_the_last_bit(precision, ranks):
    if ranks:  # sharded, as on several ranks
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    batch, rows = make_batch(build_model("llama", dtype=torch.float32)), torch.arange(8)
    found = {}
    for moved in (False, True):
        model = with_adapters(dtype=torch.float32, moved=moved)
        policy = grpo.shard(grpo.LogprobModel(model).train(), CPU, precision)
        ref = grpo.load_initial(policy, None, CPU, make_main_args(grpo, lora_rank=3))
        found[moved] = [grpo.lookup_logprobs(which, batch, rows, 999, 0.7) for which in (policy, ref, policy)]
        assert torch.equal(found[moved][0], found[moved][2])  # and they are on again
    assert torch.equal(found[False][0], found[False][1]) and torch.equal(found[False][0], found[True][1])
    assert (found[True][0] - found[True][1]).abs().max() > 0.1


def test_on_one_process_the_model_itself_samples_with_frozen_weights_in_bfloat16():
    model = with_adapters(dtype=torch.float32)
    assert grpo.make_sampler(model, CPU, "bfloat16") is model
    policy = grpo.shard(grpo.LogprobModel(model).train(), CPU, "bfloat16")
    assert not dist.is_initialized()
    for name, parameter in policy.named_parameters():
        inside, adapter = ".layers." in name, ".lora_" in name
        assert parameter.dtype == (torch.bfloat16 if inside and not adapter else torch.float32), name
    batch = make_batch(build_model("llama", dtype=torch.float32))
    *completions, sampled = grpo.generate(
        model, batch["prompt_ids"], batch["prompt_mask"], 9, 0.7, [1], 0, with_logprobs=True
    )
    logprobs, _ = policy(batch["prompt_ids"], batch["prompt_mask"], *completions, 0.7)
    assert (logprobs - sampled).abs().max() < 0.2  # two roundings of one model, at weights six times the usual


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", ["llama", TIED], ids=["llama", "tied"])
def test_checkpoints_are_ordinary_folders_of_one_dtype(config, precision, tmp_path):
    model = with_adapters(config, dtype=torch.float32)
    policy = grpo.shard(grpo.LogprobModel(model).train(), CPU, precision)
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    tokenizer = grpo.load_tokenizer(grpo.MODEL)
    grpo.save_checkpoint(tmp_path, policy, tokenizer)
    saved = load_file(tmp_path / "checkpoint" / "model.safetensors")
    plain = build_model(config, dtype=torch.float32)
    tied = config is TIED
    assert saved.keys() == {*plain.state_dict()} - ({"lm_head.weight"} if tied else set())
    assert {value.dtype for value in saved.values()} == {torch.float32}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").eval()
    batch = make_batch(plain)
    with torch.no_grad():
        error = relative_error(logprobs_of(loaded, batch), logprobs_of(model, batch))
    assert error < (1e-5 if precision == "float32" else 0.05)
    for name, parameter in policy.named_parameters():  # saving changed nothing
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_training_moves_what_adapters_reach_and_nothing_else(script, tmp_path):
    settings = {"num_steps": 2, "save_every": 2, "eval_prompts": 0, "lora_rank": 2}
    if script in (sft, reward_model):
        settings |= {"model": str(grpo.HERE / "models" / "tiny"), "minibatch_size": 8}
    args = make_main_args(script, tmp_path, **settings, run_dir=str(tmp_path / "run"))
    script.main(args)
    before = load_file(grpo.HERE / "models" / "tiny" / "model.safetensors")
    after = load_file(tmp_path / "run" / "checkpoint" / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "_proj." in name}
    if script is reward_model:
        loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "checkpoint")
        assert after.keys() - before.keys() == {"score.weight"} and loaded.score.weight.dtype == torch.float32
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["optim/grad_norm"] > 0


@pytest.mark.parametrize("rank, precision", [(0, "bfloat16"), (2, "float32"), (2, "bfloat16")])
def test_gradient_checkpointing_changes_no_gradient(rank, precision):
    batch, found = make_batch(build_model("llama", dtype=torch.float32)), []
    for recomputed in (False, True):
        model = with_adapters(rank=rank, dtype=torch.float32)
        if recomputed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy = grpo.shard(grpo.LogprobModel(model).train(), CPU, precision)
        logprobs, _ = policy(*(batch[key] for key in INPUTS), 0.7)
        logprobs.sum().backward()
        trained = [parameter.grad for parameter in policy.parameters() if parameter.requires_grad]
        found.append(torch.cat([getattr(grad, "full_tensor", lambda grad=grad: grad)().flatten() for grad in trained]))
    assert found[0].norm() > 0 and torch.equal(*found)


@pytest.mark.parametrize("config", ["gpt2", MixtralConfig(**SIZES, num_key_value_heads=1, num_local_experts=4)])
def test_models_whose_weights_are_not_in_linear_layers_are_refused(config):
    with pytest.raises(SystemExit, match="--lora-rank 2: most weights of .* are not in linear layers: use 0"):
        grpo.add_adapters(build_model(config), 2)


def test_gradients_are_freed_after_each_step():
    for adapters in (0, 2):
        policy = grpo.LogprobModel(grpo.add_adapters(build_model("llama", dtype=torch.float32), adapters))
        optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
        logprobs_of(policy.model, make_batch(policy.model)).sum().backward()
        assert grpo.step_optimizer(policy, optimizer, 1e-3, 1.0) > 0
        assert all(parameter.grad is None for parameter in policy.parameters())
