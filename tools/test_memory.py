"""Tests of tools/memory.py: it counts the bytes that small models allocate on a CPU; docs/memory.md has its tables."""

import json
import re
import sys
from pathlib import Path

import memory
import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from toy import EVERY, TINY
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config

ROOT, CPU = Path(memory.__file__).parents[1], torch.device("cpu")
PAGE = (ROOT / "docs" / "memory.md").read_text()
MODELS = {  # what each kind of script loads, and how; the sampling scripts that are not here are as grpo
    "grpo": {"policy": "load_policy", "reference": "load_policy", "sampler": "load_sampler"},
    "dpo": {"policy": "load_policy", "reference": "load_policy"},
    "sft": {"policy": "load_policy"},
    "reward_model": {"reward model": "load_reward_model"},
    "gkd": {"policy": "load_policy", "sampler": "load_sampler", "teacher": "load_teacher"},
}
MODELS["ppo_rlhf"] = MODELS["grpo"] | {"value model": "load_scorer", "reward model": "load_scorer"}
RANKS = pytest.mark.parametrize("ranks", [1, 4], indirect=True)
PRECISIONS = pytest.mark.parametrize(
    "ranks, precision", [(1, "bfloat16"), (1, "float32"), (4, "bfloat16")], indirect=["ranks"]
)


@pytest.fixture(autouse=True)
def without_onednn(monkeypatch):
    """For some products in bfloat16 it allocates copies, on some processors and not on others."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


@pytest.fixture
def ranks(request, monkeypatch):
    """The number of ranks; the others exist only in the sizes of what this rank allocates."""
    for module in EVERY.values():
        monkeypatch.setattr(module, "WORLD_SIZE", request.param)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    return request.param


def make_config(hidden=64, inner=256, layers=4, vocab=300, tied=True, shared=1):
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocab}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4 // shared, "tie_word_embeddings": tied}
    return Qwen2Config(**sizes, num_labels=1, bos_token_id=None, eos_token_id=1, pad_token_id=0)


def load_models(settings, config, folder):
    """Return {name: model} as the script's main loads them, and its args; the teacher is wider than the student."""
    module, tokenizer = EVERY[settings.script], AutoTokenizer.from_pretrained(TINY)
    wider = make_config(4 * config.hidden_size, vocab=config.vocab_size, tied=config.tie_word_embeddings)
    made = {"model": AutoModelForCausalLM.from_config(config), "teacher": AutoModelForCausalLM.from_config(wider)}
    made["reward_model"] = AutoModelForSequenceClassification.from_config(config)
    given = {name: getattr(settings, name) for name in ("precision", "gradient_checkpointing", "microbatch_tokens")}
    if settings.script == "gkd":
        settings.teacher = memory.count_model(wider)
        given["divergence"] = "jsd"  # of the three, it takes the most
    for name in made.keys() & vars(module.Args()):
        given[name] = str(folder / name)
        made[name].save_pretrained(given[name])
        tokenizer.save_pretrained(given[name])
    args = module.Args(**given)
    models = {name: getattr(module, load)(args, tokenizer, CPU) for name, load in MODELS[settings.script].items()}
    for name, model in models.items():
        model.requires_grad_(name in memory.count_models(config, settings.script))
    return models, args


def update(script, models, args, ids, mask):
    """Do the forward and backward passes of a microbatch, as main does."""
    module, policy = EVERY[script], next(iter(models.values()))
    batch = {"ids": ids, "completion_mask": mask, "total_lengths": torch.full([len(ids)], ids.shape[1])}
    batch |= dict.fromkeys("old_logprobs sampler_logprobs advantages old_values returns".split(), mask.float())
    pairs = {"chosen_ids": ids[::2], "chosen_mask": mask[::2], "rejected_ids": ids[1::2], "rejected_mask": mask[1::2]}
    if script == "ppo_rlhf":
        return module.accumulate_gradients(policy, models["value model"], batch, torch.arange(len(ids)), 9, args)
    if script == "gkd":
        hidden = models["teacher"](ids, mask)
        divergences, logprobs, _ = policy(ids, mask.bool(), models["teacher"].model, hidden, args)
        loss, _ = module.distillation_loss(divergences, mask)
    elif script == "dpo":
        loss, _ = module.pair_loss(policy, models["reference"], pairs, args)
    elif script == "reward_model":
        loss, _ = module.pair_loss(policy, pairs)
    elif script == "sft":
        loss, _ = module.batch_loss(policy, batch)
    else:
        loss = policy(ids, mask, 1.0)[0].sum()
    return loss.backward()


def count_bytes(tensors):
    """Return the bytes that this rank has of tensors."""
    return sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors)


def count_peak(run):
    """Return the most bytes that a call allocates at once, in addition to those that were allocated before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def compare_update(script, config, ranks, folder, length, tokens, precision="bfloat16", checkpointing=False):
    """Return the bytes of an update by the formulas / those that it allocates when there are gradients already."""
    sizes = {"max_prompt_length": 1, "max_completion_length": length - 1, "microbatch_tokens": tokens}
    settings = memory.read_settings(script, precision=precision, gradient_checkpointing=checkpointing, **sizes)
    models, args = load_models(settings, config, folder)
    ids = torch.randint(2, config.vocab_size, (tokens // length, length))
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    update(script, models, args, ids, mask)
    counted = count_peak(lambda: update(script, models, args, ids, mask))
    counts = memory.count_models(config, script)
    return sum(memory.update_bytes(next(iter(counts.values())), settings, ranks)) / counted


@PRECISIONS
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("script", MODELS)
def test_bytes_of_weights_gradients_and_moments_are_exact(script, precision, tied, ranks, tmp_path):
    config, settings = make_config(tied=tied), memory.read_settings(script, precision=precision)
    models, _ = load_models(settings, config, tmp_path)
    trained = memory.count_models(config, script)
    weights, gradients = memory.weight_bytes(trained, settings, ranks)
    counted, counted_gradients = {}, 0
    for name, model in models.items():
        counted[name] = count_bytes(model.parameters())
        if name in trained:
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            for weight in model.parameters():
                weight.grad = torch.zeros_like(weight)
            optimizer.step()
            moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
            counted[f"{name}: AdamW"] = count_bytes(moments)
            counted_gradients += counted[name]
        elif name == "teacher" and ranks > 1:  # what is outside its blocks stays gathered, beside the shards
            root = [weight for name, weight in model.named_parameters() if ".layers." not in name]
            counted[name] += sum(weight.numel() * weight.element_size() for weight in root)
    nearly = {"rel": 0 if ranks == 1 else 1e-3}  # the scalar head is on one rank only
    assert weights == pytest.approx(counted, **nearly)
    assert gradients == pytest.approx(counted_gradients, **nearly)


@PRECISIONS
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("script", MODELS)
def test_an_update_takes_what_was_counted(script, precision, checkpointing, ranks, tmp_path):
    config, length, tokens = make_config(), 128, 512
    if script == "grpo":
        config = make_config(128, 320, 3, shared=4)
    elif script == "sft":  # weights and their copies are the largest part
        config, length, tokens = make_config(128, 512, 8), 16, 64
    ratio = compare_update(script, config, ranks, tmp_path, length, tokens, precision, checkpointing)
    assert 0.95 < ratio < 1.15, ratio


@RANKS
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tokens, at_once", [(64, 2**26), (256, 2**26), (256, 2**20), (256, 2**18)])
@pytest.mark.parametrize("script", ["grpo", "gkd"])
def test_the_head_takes_what_was_counted(script, tokens, at_once, tied, ranks, tmp_path, monkeypatch):
    """One chunk of logits or several; the gradients of the embedding or the chunks are the largest part."""
    assert memory.LOGITS_AT_ONCE == EVERY[script].LOGITS_AT_ONCE
    monkeypatch.setattr(EVERY[script], "LOGITS_AT_ONCE", at_once)
    monkeypatch.setattr(memory, "LOGITS_AT_ONCE", at_once)
    config = make_config(hidden=128, inner=128, layers=1, vocab=5000, tied=tied)
    ratio = compare_update(script, config, ranks, tmp_path, 32, tokens)
    assert 0.95 < ratio < 1.15, ratio


@pytest.mark.parametrize("shared", [1, 4])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("inner, vocab, length, tokens", [(128, 99, 16, 96), (128, 20_000, 16, 8), (1024, 99, 128, 2)])
def test_the_rollout_takes_what_was_counted(inner, vocab, length, tokens, precision, shared):
    """The cache is the largest part, or the logits, or what reading the prompts takes."""
    config = make_config(hidden=128, inner=inner, layers=3, vocab=vocab, shared=shared)
    sampler = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, precision)).eval()
    # Without padding there is no mask, and attention takes another path.
    prompts = [torch.randint(2, 99, (length - 3 * (number == 0),)).tolist() for number in range(8)]
    prompts = [prompt for prompt in prompts for _ in range(4)]
    counted = count_peak(lambda: EVERY["grpo"].generate(sampler, prompts, tokens, 1.0, []))
    sizes = {"prompts_per_step": 8, "group_size": 4, "max_prompt_length": length, "max_completion_length": tokens}
    settings = memory.read_settings("grpo", precision=precision, eval_prompts=0, **sizes)
    assert 0.9 < sum(memory.rollout_bytes(memory.count_model(config), settings, 1)) / counted < 1.15
    # After a tool's reply, grpo_tools.py reads completions of different lengths up to the last token.
    prompts = [prompt + [number] * tokens for number, prompt in enumerate(prompts)]
    counted = count_peak(lambda: EVERY["grpo_tools"].generate(sampler, prompts, 1, 1.0, []))
    settings.script = "grpo_tools"
    assert 0.9 < sum(memory.rollout_bytes(memory.count_model(config), settings, 1)) / counted < 1.25


def test_ppo_starts_with_a_larger_rollout_when_adamw_has_no_moments():
    config, settings = memory.load_config("SmolLM2-135M"), memory.read_settings("ppo_rlhf")
    rows = {name: rollout for name, rollout, _ in memory.account(config, settings)}
    of_grpo = {name: rollout for name, rollout, _ in memory.account(config, memory.read_settings("grpo"))}
    assert rows["key-value cache"] == of_grpo["key-value cache"] and rows["policy: AdamW"] == 0  # 512 completions
    larger = {name: rollout for name, rollout, _ in memory.account(memory.load_config("Qwen2.5-1.5B"), settings)}
    assert larger["value model: AdamW"] > 0
    assert f"NORM_SAMPLES = {memory.NORM_SAMPLES}  #" in (ROOT / "ppo_rlhf.py").read_text()


# ---- the tool


def run(command, capsys, monkeypatch):
    """Return what the tool prints."""
    monkeypatch.setattr(sys, "argv", command.split())
    memory.main(memory.parse_args())
    return capsys.readouterr().out


def test_shapes_are_those_of_the_published_models():
    """The numbers are those of Qwen2.5's model cards, in billions, with and without the embedding."""
    for name, total, rest in zip(memory.SHAPES, (0.49, 1.54, 3.09, 7.61), (0.36, 1.31, 2.77, 6.53)):
        model = memory.count_model(memory.load_config(f"Qwen/{name}-Instruct"))
        assert abs((model.blocks + model.root) / 1e9 - total) < 0.01
        matrices = 1 if model.tied else 2
        assert abs((model.blocks + model.root - matrices * model.embedding) / 1e9 - rest) < 0.01


CARDS = {"0.5B": {"ppo_rlhf": 48}, "1.5B": {"ppo_rlhf": 141, "sft": 48, "reward_model": 48}}
FITS = [(name, "0.5B", CARDS["0.5B"].get(name, 24)) for name in memory.SCRIPTS]
FITS += [(name, "1.5B", CARDS["1.5B"].get(name, 80)) for name in memory.SCRIPTS]
FITS += [("ppo_rlhf --gradient-checkpointing", "1.5B", 80), ("gkd --teacher Qwen2.5-7B", "0.5B", 48)]


@pytest.mark.parametrize("script, size, gb", FITS)
def test_the_defaults_fit(script, size, gb, capsys, monkeypatch):
    command = f"memory.py --script {script} --model Qwen/Qwen2.5-{size}-Instruct --gpu-gb {gb}"
    assert f"\nfits in {gb} GB\n" in run(command, capsys, monkeypatch)


def test_what_is_found_to_fit_fits_and_nothing_before_it_does():
    config, settings = memory.load_config("Qwen2.5-0.5B"), memory.read_settings("grpo")
    fit = memory.find_fit(config, settings, 16)
    assert max(memory.account(config, fit)[-1][1:]) <= 16e9 * memory.USABLE
    assert memory.as_flags(fit, settings) == "--gradient-checkpointing --rollout-batch-size 128"
    for name, value in (("gradient_checkpointing", False), ("rollout_batch_size", 256)):
        tried = memory.SimpleNamespace(**vars(fit) | {name: value})
        assert max(memory.account(config, tried)[-1][1:]) > 16e9 * memory.USABLE
    assert memory.find_fit(config, settings, 1) is None


def test_command_line_says_what_fits(capsys, monkeypatch):
    said = run("memory.py --gpu-gb 16 --max-completion-length 512", capsys, monkeypatch)
    assert "host memory at the start: 2.0 GB" in said and "disk: 7.9 GB per run, 15.8 GB while" in said
    assert "| key-value cache |" in said and "does not fit in 16 GB; this would fit: --gradient-checkpointing" in said
    said = run("memory.py --model SmolLM2-135M --cpu-gb 16", capsys, monkeypatch)
    assert "| process | 0.7 | 0.7 |" in said
    assert "does not fit in 16 GB; this would fit: --rollout-batch-size 256" in said
    assert "disk: 13.8 GB per run" in run("memory.py --script ppo_rlhf", capsys, monkeypatch)
    said = run("memory.py --script gkd --teacher Qwen2.5-7B --ranks 2", capsys, monkeypatch)
    assert "host memory at the start: 32.6 GB" in said  # 2 bytes a weight of the teacher, and 4 for those of its head
    tiny = f"memory.py --model {TINY} --cpu-gb 2"
    assert "does not fit in 2 GB" in run(tiny, capsys, monkeypatch)
    assert "\nfits in 2 GB" in run(f"{tiny} --tiny", capsys, monkeypatch)
    with pytest.raises(SystemExit, match="dpo.py has no --group-size"):
        run("memory.py --script dpo --group-size 4", capsys, monkeypatch)


def test_the_page_has_the_tables_and_numbers_of_the_tool(tmp_path, capsys, monkeypatch):
    (tmp_path / "memory.md").write_text(PAGE)
    memory.write_page(tmp_path / "memory.md")
    assert (tmp_path / "memory.md").read_text() == PAGE, "python tools/memory.py --write docs/memory.md"
    answer = r"`python tools/(memory.py [^`]*--gpu-gb 80)` prints a peak of (\S+) GB"
    command, peak = re.search(answer, PAGE).groups()
    said = run(command, capsys, monkeypatch)
    rollout, update = re.search(r"\| peak \| (\S+) \| (\S+) \|", said).groups()
    assert max(float(rollout), float(update)) == float(peak) and "\nfits in 80 GB\n" in said


def test_the_page_has_what_a_process_held():
    """The formulas are within 20 % of what benchmark/memory_cpu.py measured when freed memory was given back."""
    [row] = json.loads((ROOT / "benchmark/results/memory_cpu.json").read_text())
    settings = memory.read_settings("grpo", **row["settings"])
    settings.cpu = True
    formula = max(memory.account(memory.load_config("SmolLM2-135M"), settings)[-1][1:])
    assert 0.8 < formula / row["bytes_given_back"] < 1.2
    numbers = [f"{number / 1e9:.1f} GB" for number in (formula, row["bytes"], row["bytes_given_back"])]
    said = PAGE.partition("## On a CPU")[2].partition("\n## ")[0]
    assert [number for number in numbers if number not in said] == []
