"""--precision: what computes in bfloat16, what stays float32, and what it does to gradients, samples and a run."""

import gc
import json

import pytest
import torch
import torch.distributed as dist
import transformers
from tiny import SIZES, build_model, call_accumulate_gradients, make_args, make_batch, relative_error
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

import dpo
import grpo
import ppo_rlhf
import sft

pytestmark = pytest.mark.usefixtures("alone")
CPU = torch.device("cpu")
INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
KINDS = {
    "llama": "llama",
    "gpt2": "gpt2",
    "gemma3": transformers.Gemma3TextConfig(**SIZES, num_key_value_heads=1, head_dim=8, vocab_size=11),
    "tied": transformers.Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True),
}


def make_model(kind="llama"):
    return build_model(KINDS[kind], dtype=torch.float32, scale=2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_compute_in_bfloat16_and_all_else_and_the_gradients_are_float32(kind):
    policy = grpo.shard(grpo.LogprobModel(make_model(kind)).train(), CPU, "bfloat16")
    batch, seen = make_batch(make_model(kind)), {}

    def record(name):
        return lambda module, args, output: seen.update({name: {args[0].dtype, module.weight.dtype, output.dtype}})

    for name, module in policy.named_modules():
        if isinstance(module, torch.nn.Linear | transformers.pytorch_utils.Conv1D):
            module.register_forward_hook(record(name))
    logprobs, _ = policy(*(batch[key] for key in INPUTS), 0.7)
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
    found = {}
    for name, precision, budget in (("exact", None, 999), ("one", "bfloat16", 999), ("many", "bfloat16", 1)):
        policy = grpo.LogprobModel(make_model(kind)).train()
        policy = grpo.shard(policy, CPU, precision) if precision else policy
        batch = make_batch(make_model(kind))
        call_accumulate_gradients(grpo, policy, batch, torch.arange(8), make_args(microbatch_tokens=budget))
        gradients = [parameter.grad for parameter in policy.parameters()]
        gradients = [gradient.full_tensor() if precision else gradient for gradient in gradients]
        found[name] = torch.cat([gradient.flatten() for gradient in gradients])
    assert 1e-4 < relative_error(found["one"], found["exact"]) < 0.03
    assert relative_error(found["many"], found["exact"]) < 0.03


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "tied"])
def test_the_sampler_computes_as_the_policy_does(kind, attention):
    """Its blocks are rounded to bfloat16, its buffers are not, nor what is outside the blocks."""
    model = make_model(kind)
    model.set_attn_implementation(attention)
    before = {name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    sampler = grpo.make_sampler(model, CPU, "bfloat16")
    inside = {name for block in grpo.find_blocks(sampler) for name in block.parameters()}
    for name, parameter in sampler.named_parameters():
        assert not parameter.requires_grad
        expected = before[name].to(torch.bfloat16 if parameter in inside else torch.float32)
        assert expected.dtype == parameter.dtype and torch.equal(parameter, expected)
    buffers = dict(sampler.named_buffers())
    assert all(torch.equal(buffers[name], value) for name, value in model.named_buffers())
    assert sampler.get_output_embeddings().weight.dtype == torch.float32
    if kind == "tied":
        assert sampler.get_output_embeddings().weight is sampler.get_input_embeddings().weight

    policy = grpo.shard(grpo.LogprobModel(model).train(), CPU, "bfloat16")
    torch.manual_seed(1)
    prompt_ids, prompt_mask = grpo.pad_left([[3, 4, 5, 6, 7, 8], [9], [2, 3]] * 20, 0, CPU)
    *completions, sampler_logprobs = grpo.generate(
        sampler, prompt_ids, prompt_mask, 12, 1.0, [1], 0, with_logprobs=True
    )
    with torch.no_grad():
        logprobs, _ = policy(prompt_ids, prompt_mask, *completions, 1.0)
    log_weight = logprobs - sampler_logprobs
    assert log_weight.isfinite().all()
    assert ((log_weight.expm1() - log_weight).sum() / completions[1].sum()).item() < 1e-3
    for name, parameter in model.named_parameters():  # nothing of the trained model was touched
        assert torch.equal(parameter.full_tensor(), before[name])


@pytest.mark.parametrize("kind", KINDS)
def test_the_sampler_has_the_log_probabilities_of_the_policy_to_the_last_bit(kind):
    """Where it does not decode with a cache, which rounds in another order."""
    model = make_model(kind)
    batch, sampler = make_batch(model), grpo.make_sampler(model, CPU, "bfloat16")
    policy = grpo.shard(grpo.LogprobModel(model).train(), CPU, "bfloat16")
    with torch.no_grad():
        found = [each(*(batch[key] for key in INPUTS), 0.7) for each in (grpo.LogprobModel(sampler), policy)]
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_in_float32_on_one_process_nothing_is_sharded_copied_or_hooked():
    model = make_model()
    policy = grpo.shard(grpo.LogprobModel(model).train(), CPU, "float32")
    assert grpo.make_sampler(model, CPU, "float32") is model
    assert not dist.is_initialized()
    for module in policy.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert not any(isinstance(parameter, DTensor) for parameter in policy.parameters())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_group_of_one_in_float32_changes_no_bit(precision):
    """What CUDA does on one GPU with --precision float32; in bfloat16 it does change some."""
    batch, found = make_batch(make_model()), []
    for sharded in (False, True):
        policy = grpo.LogprobModel(make_model()).train()
        if sharded:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            policy = grpo.shard(policy, CPU, precision)
        call_accumulate_gradients(grpo, policy, batch, torch.arange(8), make_args())
        found.append([parameter.grad for parameter in policy.parameters()])
    same = all(torch.equal(a, b.full_tensor()) for a, b in zip(*found))
    assert same == (precision == "float32")


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_ranks_add_their_gradients_in_float32(monkeypatch):
    """As they are told to: on one rank there is nothing to add, and on two the error is that of bfloat16 anyway."""
    given, fully_shard = [], grpo.fully_shard
    monkeypatch.setattr(
        grpo, "fully_shard", lambda *args, **options: given.append(options) or fully_shard(*args, **options)
    )
    grpo.shard(grpo.LogprobModel(make_model()).train(), CPU, "bfloat16")
    policies = [options["mp_policy"] for options in given if "mp_policy" in options]
    assert len(policies) == 2 and all(policy.reduce_dtype == torch.float32 for policy in policies)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("trained", [True, False])
def test_nothing_stays_gathered_after_a_forward_pass_without_gradient(trained):
    policy = grpo.shard(grpo.LogprobModel(make_model().requires_grad_(trained)), CPU, "float32")
    batch = make_batch(make_model())
    with torch.no_grad():
        policy(*(batch[key] for key in INPUTS), 0.7)
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())


def test_a_model_with_a_frozen_weight_is_trained():
    model = make_model()
    model.base_model.norm.weight.requires_grad_(False)
    assert grpo.make_sampler(model, CPU, "bfloat16") is not model
    policy = grpo.shard(grpo.LogprobModel(model).train(), CPU, "bfloat16")
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())


@pytest.mark.parametrize("name", ["mamba", "llama"])
def test_blocks_are_not_within_one_another(name):
    sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
    model = build_model(transformers.MambaConfig(**sizes) if name == "mamba" else name, dtype=torch.float32)
    assert grpo.find_blocks(model) == list(model.base_model.layers)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 2])
def test_the_sampler_gets_what_was_trained(rank, precision):
    model = grpo.add_adapters(make_model(), rank)
    sampler = grpo.make_sampler(model, CPU, precision)
    policy = grpo.shard(grpo.LogprobModel(model).train(), CPU, precision)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1)
    grpo.sync_sampler(policy, sampler)
    for expected, copied in zip(policy.model.parameters(), sampler.parameters(), strict=True):
        assert torch.equal(copied, expected.full_tensor().to(copied.dtype))


def make_main_args(script, folder=None, **settings):
    """Settings of a short run; what learns from a large file of rows gets a few of them, in the folder."""
    sizes = {"num_steps": 4, "prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "max_completion_length": 24}
    sizes |= {"eval_every": 2, "eval_prompts": 8, "save_every": 2, "warmup_steps": 0, "overlong_buffer": 4}
    sizes |= {"reward_model": str(grpo.HERE / "models" / "tiny-reward")} if script is ppo_rlhf else {}
    sizes |= {"minibatch_size": 4} if script is ppo_rlhf else {}
    files = {"sft": "addition/sft.jsonl"} | dict.fromkeys(("dpo", "reward_model"), "preferences/train.jsonl")
    if folder and script.__name__ in files:
        rows = (grpo.HERE / "data" / files[script.__name__]).read_text().splitlines()[:64]
        (folder / "rows.jsonl").write_text("\n".join(rows))
        sizes["dataset"] = str(folder / "rows.jsonl")
    given = sizes | {"learning_rate": 1e-3} | settings
    return script.Args(**{name: value for name, value in given.items() if hasattr(script.Args, name)})


class Stop(Exception):
    pass


@pytest.mark.parametrize("script", [grpo, ppo_rlhf], ids=["grpo", "ppo_rlhf"])
def test_start_up_holds_one_whole_float32_model_at_most(script, monkeypatch, tmp_path):
    """Whenever a model is loaded, no other one has blocks that are float32 and not sharded."""
    load_pretrained, found = script.load_pretrained, []

    def count_others(*args, **settings):
        model, missing = load_pretrained(*args, **settings)
        gc.collect()
        skipped = known | {id(module) for module in model.modules()}
        models = [
            thing for thing in gc.get_objects() if isinstance(thing, PreTrainedModel) and id(thing) not in skipped
        ]
        blocks = [block for other in models for block in script.find_blocks(other)]
        weights = [weight for block in blocks for weight in block.parameters()]
        whole = [w for w in weights if not isinstance(w, DTensor) and w.dtype == torch.float32]
        found.append((len(weights), len(whole)))
        return model, missing

    def stop(*_):
        raise Stop

    known = {id(thing) for thing in gc.get_objects() if isinstance(thing, PreTrainedModel)}
    monkeypatch.setattr(script, "load_pretrained", count_others)
    monkeypatch.setattr(script, "open_run", stop)
    with pytest.raises(Stop):
        script.main(make_main_args(script, precision="bfloat16", run_dir=str(tmp_path / "run")))
    assert len(found) == (2 if script is grpo else 4)
    assert found[-1][0] > 50 and all(whole == 0 for _, whole in found)


def test_the_reference_is_what_the_policy_was_to_the_last_bit():
    """Also in bfloat16, where one is cast for each forward and the other was rounded once."""
    tokenizer = grpo.load_tokenizer(grpo.MODEL)
    model, _ = grpo.load_model(grpo.MODEL, tokenizer)
    batch = make_batch(model)
    args = make_args(model=grpo.MODEL, precision="bfloat16")
    policy = grpo.shard(grpo.LogprobModel(model).train(), CPU, "bfloat16")
    ref = grpo.load_initial(policy, tokenizer, CPU, args)
    rows = torch.arange(8)
    before = grpo.lookup_logprobs(policy, batch, rows, 999, 0.7)
    assert torch.equal(grpo.lookup_logprobs(ref, batch, rows, 999, 0.7), before)
    assert {parameter.dtype for parameter in ref.model.base_model.layers.parameters()} == {torch.bfloat16}
    for parameter in policy.parameters():
        parameter.data.mul_(1.1)
    assert torch.equal(grpo.lookup_logprobs(ref, batch, rows, 999, 0.7), before)


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
    schedule = {"num_steps": 4} if script is not sft else {"num_steps": 4, "warmup_steps": 4}  # no cosine yet
    script.main(make_main_args(script, tmp_path, **settings, **schedule, run_dir=str(tmp_path / "whole")))
    assert not dist.is_initialized()
    script.main(
        make_main_args(script, tmp_path, **settings, **schedule | {"num_steps": 2}, run_dir=str(tmp_path / "parts"))
    )
    script.main(script.Args(resume=str(tmp_path / "parts"), num_steps=4))
    for file in ("checkpoint/model.safetensors", "samples.jsonl", "eval_samples.jsonl"):
        if (tmp_path / "whole" / file).exists():
            assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes(), file
    lines = [(tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in ("whole", "parts")]
    last = [{k: v for k, v in json.loads(run[-1]).items() if not k.startswith("perf/")} for run in lines]
    assert last[0] == last[1]


def test_the_embedded_task_is_learned_in_bfloat16(tmp_path):
    """Begun: `python benchmark/variants.py precision` has whole runs of every script."""
    settings = {"num_steps": 12, "learning_rate": 3e-4, "eval_prompts": 0, "run_dir": str(tmp_path / "run")}
    grpo.main(grpo.Args(precision="bfloat16", **settings))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-12:]
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    assert all(0 < line["policy/sampler_kl"] < 1e-3 for line in lines)


@pytest.mark.parametrize("precision", ["float16", "bf16", "", 16])
def test_other_precisions_are_refused(precision, tmp_path):
    with pytest.raises(SystemExit, match="--precision .*: must be bfloat16 or float32"):
        grpo.main(grpo.Args(precision=precision, run_dir=str(tmp_path / "run")))
