"""Tests of tools/memory.py: it counts the bytes that small models allocate on a CPU; docs/memory.md has its numbers."""

import re
import sys
from dataclasses import replace

import memory
import pytest
import torch
import torch.distributed as dist
import tyro
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from toy import EVERY, ROOT, TINY
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config

CPU, PAGE = torch.device("cpu"), (ROOT / "docs" / "memory.md").read_text()
TRAINED = ("policy", "value model")
MODELS = {  # what each kind of script loads, and how; the sampling scripts that are not here are as grpo
    "grpo": {"policy": "load_policy", "reference": "load_policy", "sampler": "load_sampler"},
    "dpo": {"policy": "load_policy", "reference": "load_policy"},
    "sft": {"policy": "load_policy"},
    "reward_model": {"reward model": "load_reward_model"},
    "gkd": {"policy": "load_policy", "sampler": "load_sampler", "teacher": "load_teacher"},
}
MODELS["ppo_rlhf"] = MODELS["grpo"] | {"value model": "load_scorer", "reward model": "load_scorer"}
RANKS = pytest.mark.parametrize("ranks", [1, 4], indirect=True)


@pytest.fixture(autouse=True)
def no_copies(monkeypatch):
    """On some processors oneDNN copies the weights for its products, so that a count would hang on the machine."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


@pytest.fixture
def ranks(request, monkeypatch):
    """The number of ranks; the others exist only in the sizes of what this rank allocates."""
    for module in EVERY.values():
        monkeypatch.setattr(module, "WORLD_SIZE", request.param)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    return request.param


def make_config(hidden=64, inner=256, layers=4, vocab=300, tied=True):
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocab}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    return Qwen2Config(**sizes, num_labels=1, bos_token_id=None, eos_token_id=1, pad_token_id=0)


def load_models(script, config, folder, **given):
    """Return {name: model} as the script's main loads them, and its settings; the teacher is wider than the student."""
    module, tokenizer = EVERY[script], AutoTokenizer.from_pretrained(TINY)
    wider = make_config(2 * config.hidden_size, vocab=config.vocab_size, tied=config.tie_word_embeddings)
    made = {"model": AutoModelForCausalLM.from_config(config), "teacher": AutoModelForCausalLM.from_config(wider)}
    made["reward_model"] = AutoModelForSequenceClassification.from_config(config)
    for name in made.keys() & vars(module.Args()):
        given[name] = str(folder / name)
        made[name].save_pretrained(given[name])
        tokenizer.save_pretrained(given[name])
    settings = memory.read_settings(script, **given)
    models = {name: getattr(module, load)(settings, tokenizer, CPU) for name, load in MODELS[script].items()}
    for name, model in models.items():
        model.requires_grad_(name in TRAINED or script == "reward_model")
    return models, settings


def update(script, models, settings, ids, mask):
    """Do the forward and backward passes of a microbatch, as main does."""
    module, policy = EVERY[script], next(iter(models.values()))
    batch = {"ids": ids, "completion_mask": mask, "total_lengths": torch.full([len(ids)], ids.shape[1])}
    batch |= dict.fromkeys("old_logprobs sampler_logprobs advantages old_values returns".split(), mask.float())
    pairs = {"chosen_ids": ids[::2], "chosen_mask": mask[::2], "rejected_ids": ids[1::2], "rejected_mask": mask[1::2]}
    if script == "ppo_rlhf":
        return module.accumulate_gradients(policy, models["value model"], batch, torch.arange(len(ids)), 9, settings)
    if script == "gkd":
        hidden = models["teacher"](ids, mask)
        divergences, _, _ = policy(ids, mask.bool(), models["teacher"].model, hidden, settings)
        loss, _ = module.distillation_loss(divergences, mask)
    elif script == "reward_model":
        loss, _ = module.pair_loss(policy, pairs)
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


def compare_update(script, config, ranks, folder, length=128, tokens=512, **given):
    """Return the bytes of an update by the formulas / those that it allocates when there are gradients already."""
    given |= {"max_prompt_length": 1, "max_completion_length": length - 1, "microbatch_tokens": tokens}
    models, settings = load_models(script, config, folder, **given)
    ids = torch.randint(2, config.vocab_size, (tokens // length, length))
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    update(script, models, settings, ids, mask)
    counted = count_peak(lambda: update(script, models, settings, ids, mask))
    return sum(memory.update_bytes(memory.count_model(config), settings, ranks)) / counted


@RANKS
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("script", MODELS)
def test_bytes_of_weights_and_moments(script, tied, ranks, tmp_path):
    config = make_config(tied=tied)
    models, settings = load_models(script, config, tmp_path)
    weights, trained = memory.weight_bytes(memory.count_model(config), settings, ranks)
    counted = {name: count_bytes(model.parameters()) for name, model in models.items()}
    if script == "gkd" and ranks > 1:  # what is outside the teacher's blocks stays gathered, beside the shards
        root = [weight for name, weight in models["teacher"].named_parameters() if ".layers." not in name]
        counted["teacher"] += sum(weight.numel() * weight.element_size() for weight in root)
    assert weights == pytest.approx(counted, rel=2e-3)  # a scalar head is not counted
    own = [name for name in models if name in TRAINED or script == "reward_model"]
    assert trained == sum(weights[name] for name in own)


@RANKS
@pytest.mark.parametrize("given", [{}, {"gradient_checkpointing": True}, {"precision": "float32"}])
@pytest.mark.parametrize("script", ["grpo", "gkd", "reward_model", "ppo_rlhf", "sft"])
def test_an_update_takes_what_was_counted(script, given, ranks, tmp_path):
    config, sizes = make_config(), {}
    if script == "sft" and "precision" not in given:  # the weights and their copies are the largest part
        config, sizes = make_config(128, 512, 8), {"length": 16, "tokens": 64}
    ratio = compare_update(script, config, ranks, tmp_path, **sizes, **given)
    assert 0.95 < ratio < 1.15, ratio


@RANKS
@pytest.mark.parametrize("at_once", [2**20, 2**18])
@pytest.mark.parametrize("script", ["grpo", "gkd"])
def test_the_head_takes_what_was_counted(script, at_once, ranks, tmp_path, monkeypatch):
    """The gradients of the chunks or of the embedding are the largest part."""
    assert memory.LOGITS_AT_ONCE == EVERY[script].LOGITS_AT_ONCE
    monkeypatch.setattr(EVERY[script], "LOGITS_AT_ONCE", at_once)
    monkeypatch.setattr(memory, "LOGITS_AT_ONCE", at_once)
    config = make_config(hidden=128, inner=128, layers=1, vocab=5000)
    ratio = compare_update(script, config, ranks, tmp_path, length=32, tokens=256)
    assert 0.95 < ratio < 1.15, ratio


@pytest.mark.parametrize("inner, vocab, length, tokens", [(128, 99, 16, 96), (128, 20_000, 16, 8), (1024, 99, 128, 2)])
def test_the_rollout_takes_what_was_counted(inner, vocab, length, tokens):
    """The cache is the largest part, or the logits, or what reading the prompts takes."""
    config = make_config(hidden=128, inner=inner, layers=3, vocab=vocab)
    sampler = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    # Without padding there is no mask, and attention takes another path.
    prompts = [torch.randint(2, 99, (length - 3 * (number == 0),)).tolist() for number in range(8)]
    prompts = [prompt for prompt in prompts for _ in range(4)]
    counted = count_peak(lambda: EVERY["grpo"].generate(sampler, prompts, tokens, 1.0, []))
    sizes = {"prompts_per_step": 8, "group_size": 4, "max_prompt_length": length, "max_completion_length": tokens}
    settings = memory.read_settings("grpo", eval_prompts=0, **sizes)
    assert 0.9 < sum(memory.rollout_bytes(memory.count_model(config), settings, 1)) / counted < 1.15
    # After a tool's reply, grpo_tools.py reads completions of different lengths up to the last token.
    prompts = [prompt + [number] * tokens for number, prompt in enumerate(prompts)]
    counted = count_peak(lambda: EVERY["grpo_tools"].generate(sampler, prompts, 1, 1.0, []))
    settings = memory.read_settings("grpo_tools", eval_prompts=0, **sizes)
    assert 0.9 < sum(memory.rollout_bytes(memory.count_model(config), settings, 1)) / counted < 1.25


def test_the_page_has_the_flags_that_fit():
    table = re.search("<!-- flags -->(.*?)<!-- end -->", PAGE, re.DOTALL)[1].strip().splitlines()
    cards, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    assert len(rows) == 8 and cards[1:6] == ["16 GB", "24 GB", "48 GB", "80 GB", "8 x 80 GB"]
    for name, *cells in rows:
        config = memory.load_config(f"Qwen2.5-{name.split(',')[0]}")
        settings = memory.read_settings("grpo", precision="float32" if "float32" in name else "bfloat16")
        if "LoRA" in name:  # as docs/forks/lora.diff adds it
            settings = type("Args", (EVERY["grpo"].Args,), {"lora_rank": 16, "__module__": "grpo"})()
        for card, cell in zip(cards[1:], cells, strict=True):
            if card.endswith("GB"):
                ranks, gb = re.findall(r"\d+", f"1 x {card}")[-2:]
                found = memory.find_flags(config, settings, int(gb), int(ranks)) or "no"
                short = {"--cpu-offload": "O", "--gradient-checkpointing": "C", "--rollout-batch-size": "R"}
                assert cell == " ".join(short.get(word, word) for word in found.split()), (name, card)
            elif "LoRA" not in name:
                larger = replace(settings, microbatch_tokens=16384)
                seconds = [memory.moving_seconds(config, given) for given in (settings, larger)]
                numbers = [memory.host_bytes(config, settings) / 1e9] if "host" in card else seconds
                assert cell == ", ".join(f"{number:.0f}" for number in numbers), (name, card)


def test_the_flags_of_the_first_run_fit_and_take_the_time_that_the_page_says():
    """Peaks are those of the cards' data sheets, in TFLOP/s."""
    page = (ROOT / "docs" / "first_run.md").read_text()
    rows = re.search("<!-- times -->(.*?)<!-- end -->", page, re.DOTALL)[1].strip().splitlines()[2:]
    peaks = {"T4": 8.1, "RTX 4090": 165, "L40S": 362, "A100": 312}
    assert len(rows) == 9
    for row in rows:
        card, size, flags, host, *said = row[1:-1].split("|")
        name, gb = card.removesuffix(" GB").split(", ")
        config = memory.load_config(f"Qwen2.5-{size}")
        settings = tyro.cli(EVERY["grpo"].Args, args=flags.strip("`").split())
        _, *needed = memory.account(config, settings)[-1]
        assert max(needed) <= memory.USABLE * float(gb) * 1e9
        model = memory.count_model(config)
        completions, parameters = settings.prompts_per_step * settings.group_size, model.blocks + model.root
        seconds = 0.02 * settings.max_completion_length * completions / settings.rollout_batch_size
        operations = (12 if settings.gradient_checkpointing else 10) * parameters * completions * 450
        seconds += operations / (peaks[name] * 1e12 / 3)
        if settings.cpu_offload:
            seconds += 5 * 4 * parameters * completions * 450 / settings.microbatch_tokens / 25e9
        assert [f"{seconds:.0f}", f"{seconds * 200 / 3600:.2g}"] == said
        assert host == (f"{memory.host_bytes(config, settings) / 1e9:.0f}" if settings.cpu_offload else "")


def find_flags(script, model, gb):
    return memory.find_flags(memory.load_config(model), memory.read_settings(script), gb)


def test_other_scripts_need_what_the_page_says(capsys, monkeypatch):
    for script in ("grpo_tools", "gkd", "dpo", "reward_model", "sft"):
        assert find_flags(script, "Qwen2.5-0.5B", 24) == find_flags(script, "Qwen2.5-1.5B", 80) == "defaults"
    assert find_flags("ppo_rlhf", "Qwen2.5-0.5B", 48) == "defaults"
    assert find_flags("ppo_rlhf", "Qwen2.5-1.5B", 80) == "--gradient-checkpointing"
    assert find_flags("dpo", "Qwen2.5-1.5B", 24) == "--cpu-offload"
    command, peak, host = re.search(
        r"`python tools/(memory.py [^`]*)` prints\s.*?(\S+) GB.*?(\S+) GB", PAGE, re.S
    ).groups()
    monkeypatch.setattr(sys, "argv", command.split())
    memory.main()
    *_, found, on_host, fits = capsys.readouterr().out.splitlines()
    assert max(found.split()[1:], key=float) == peak and on_host.split()[-1] == host and fits == "fits in 24 GB"
