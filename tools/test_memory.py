"""Tests of tools/memory.py: its formulas agree with small models on a CPU, and docs/memory.md has its tables."""

import re
import sys
from pathlib import Path

import memory
import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config

import gkd
import grpo
import grpo_tools
import ppo_rlhf

ROOT, CPU = Path(grpo.__file__).parent, torch.device("cpu")
PAGE = ROOT / "docs" / "memory.md"
pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(autouse=True)
def without_onednn(monkeypatch):
    """For some products in bfloat16 it allocates copies, on some processors and not on others."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def make_config(hidden=64, inner=256, layers=4, vocab=300, tied=True, shared=1):
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocab}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4 // shared, "tie_word_embeddings": tied}
    return Qwen2Config(**sizes, bos_token_id=None, eos_token_id=1, pad_token_id=0)


def make_settings(script="grpo", kl_coef=0.0, **settings):
    read = memory.read_settings(script, **{"precision": "bfloat16"} | settings)
    read.cpu, read.kl_coef = True, kl_coef  # grpo_tools.py has no --kl-coef, but its formula has a reference
    return read


def make_policy(config, settings):
    """Return a random policy, made as in main of grpo.py or grpo_tools.py."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    if settings.script == "grpo":
        return grpo.prepare(grpo.Policy(model, settings.precision), settings, CPU)
    if settings.lora_rank:
        grpo_tools.add_adapters(model, settings.lora_rank)
    return grpo_tools.prepare_model(grpo_tools.LogprobModel(model), settings, CPU)


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


def count_bytes(tensors):
    """Return the bytes of tensors, and count shared storage once."""
    tensors = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in tensors if storage.nbytes()}.values())


def count_update(config, settings, rows):
    """Return the peak of a forward and backward pass over rows of full length, with gradients already allocated."""
    policy = make_policy(config, settings)
    ids = torch.randint(0, config.vocab_size, (rows, settings.max_prompt_length + settings.max_completion_length))
    given = (ids, torch.ones_like(ids), 1.0)
    given[1][:, : settings.max_prompt_length] = 0
    if settings.script != "grpo":
        ids = ids.split([settings.max_prompt_length, settings.max_completion_length], 1)
        batch = {"prompt_ids": ids[0], "prompt_mask": torch.ones_like(ids[0])}
        given = (batch | {"completion_ids": ids[1], "completion_mask": torch.ones_like(ids[1])}, 1.0)

    def run():
        policy(*given)[0].sum().backward()

    run()
    return count_peak(run)


def formula(config, settings, ranks=1):
    """Return what the update allocates by the formulas, beside weights, gradients and moments."""
    rows = memory.account(config, settings, ranks)
    weights = memory.weight_bytes(memory.count_models(config, settings.script), settings, ranks)
    return rows[-1][2] - memory.PROCESS - sum(weights[0].values()) - weights[1]


@pytest.fixture(params=[1, 4])
def ranks(request, monkeypatch):
    """The number of ranks; the others exist only in the sizes of what this rank allocates."""
    monkeypatch.setattr(grpo, "WORLD_SIZE", request.param)
    if request.param > 1:
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    return request.param


# ---- what stays in memory


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("rank", [None, 0, 4])
def test_bytes_of_weights_gradients_and_moments_are_exact(rank, precision, tied):
    """None for grpo.py, else the rank of the adapters of grpo_tools.py."""
    script = "grpo" if rank is None else "grpo_tools"
    config = make_config(tied=tied)
    settings = make_settings(script, precision=precision, kl_coef=0.04, lora_rank=rank)
    policy, sampler = make_policy(config, settings), None
    reference = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    if script == "grpo":
        reference = grpo.prepare(grpo.Policy(reference, precision), settings, CPU)
        sampler = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, precision))
    else:
        reference = grpo_tools.prepare_model(grpo_tools.LogprobModel(reference), settings, CPU)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    for weight in trained:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    adapters = [weight for name, weight in policy.named_parameters() if "lora_" in name]
    base = [weight for name, weight in policy.named_parameters() if "lora_" not in name]
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    counted = {"policy": count_bytes(base), "policy: AdamW": count_bytes(moments)}
    if rank:
        counted["policy: adapters"] = count_bytes(adapters)
    else:
        counted["reference"] = count_bytes(reference.parameters())
    if sampler:
        counted["sampler"] = count_bytes(sampler.parameters())
    weights, gradients = memory.weight_bytes(memory.count_models(config, script), settings, ranks=1)
    assert weights == counted
    assert gradients == count_bytes(weight.grad for weight in trained)


def test_ppo_has_a_value_model_and_a_reward_model_too():
    config, settings = make_config(), make_settings("ppo_rlhf")
    config.num_labels = 1
    value_model = AutoModelForSequenceClassification.from_config(config)
    weights, gradients = memory.weight_bytes(memory.count_models(config, "ppo_rlhf"), settings, ranks=1)
    assert weights["value model"] == count_bytes(value_model.parameters())
    scorer = ppo_rlhf.InForward(value_model.requires_grad_(False), ppo_rlhf.sequence_scores)
    ppo_rlhf.prepare_model(scorer, settings, CPU)
    assert weights["reward model"] == count_bytes(scorer.parameters())
    assert gradients == weights["policy"] + weights["value model"]


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_gkd_has_a_teacher_too_and_compares_both_heads(precision):
    """The teacher is wider. Of the six chunks of logits that are counted, only jsd needs all."""
    config, of_teacher = (make_config(hidden=hidden, layers=1, vocab=20_000) for hidden in (64, 128))
    settings = memory.read_settings("gkd", precision=precision, microbatch_tokens=512)
    settings.cpu = True
    settings.teacher = memory.count_model(of_teacher)
    models = memory.count_models(config, "gkd")
    weights, _ = memory.weight_bytes(models, settings, ranks=1)
    teacher = gkd.TeacherModel(AutoModelForCausalLM.from_config(of_teacher).requires_grad_(False))
    teacher = gkd.prepare_model(teacher, settings, CPU)
    assert weights["teacher"] == count_bytes(teacher.parameters())
    shared, _ = memory.weight_bytes(models, settings, ranks=2)  # its head is gathered
    assert shared["teacher"] == weights["teacher"] / 2 + 4 * settings.teacher.root

    args = gkd.Args(divergence="jsd", max_completion_length=248, max_prompt_length=8)
    student = gkd.prepare_model(gkd.StudentModel(AutoModelForCausalLM.from_config(config)), settings, CPU)
    for weight in student.parameters():
        weight.grad = torch.zeros_like(weight)
    ids = torch.randint(0, 20_000, (2, 256)).split([8, 248], 1)
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    batch = dict(zip(names, (ids[0], torch.ones_like(ids[0]), ids[1], torch.ones_like(ids[1]))))

    def run():
        with torch.no_grad():
            hidden = teacher(batch)
        student(batch, teacher.model, hidden, args)[0].sum().backward()

    run()
    settings.max_prompt_length, settings.max_completion_length = 8, 248
    assert 0.8 < sum(memory.update_bytes(models, settings, 1)) / count_peak(run) < 1.3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("precision, rank", [("bfloat16", 0), ("bfloat16", 8), ("float32", 0), ("float32", 8)])
def test_what_is_gathered_for_a_rollout_takes_what_was_counted_and_is_given_back(precision, rank, tied):
    config = make_config(hidden=256, inner=512, vocab=3000, tied=tied)
    settings = make_settings("grpo_tools", precision=precision, lora_rank=rank)
    policy = make_policy(config, settings)

    def run():
        with grpo_tools.gathered(policy):
            pass

    expected = memory.gathered_bytes(memory.count_model(config), settings, ranks=1)
    assert expected <= count_peak(run) <= 1.05 * expected
    assert expected <= count_peak(run) <= 1.05 * expected  # the first call freed everything


def test_ranks_share_all_but_what_they_gather_and_the_sampler():
    for script in ("grpo", "grpo_tools"):
        settings, models = make_settings(script), memory.count_models(make_config(), script)
        (one, gradients), (four, quarter) = (memory.weight_bytes(models, settings, ranks) for ranks in (1, 4))
        assert one.pop("sampler", 0) == four.pop("sampler", 0)
        assert four == {name: size / 4 for name, size in one.items()} and quarter == gradients / 4
    gathered = [memory.gathered_bytes(models["policy"], settings, ranks) for ranks in (1, 4)]
    assert gathered[0] == gathered[1] > 0


# ---- what is allocated for a while

SIZES = [(64, 256, 4, 128, 1), (128, 320, 3, 256, 4)]
LARGE = [*SIZES, (128, 512, 8, 16, 1)]  # of the last, weights and their copies are the largest part


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("hidden, inner, layers, length, shared", LARGE)
def test_activations_are_those_counted(hidden, inner, layers, length, shared, precision, checkpointing, ranks):
    lengths = {"max_prompt_length": 1, "max_completion_length": length - 1, "microbatch_tokens": min(512, 4 * length)}
    settings = make_settings(precision=precision, gradient_checkpointing=checkpointing, **lengths)
    config = make_config(hidden, inner, layers, shared=shared)
    counted = count_update(config, settings, rows=settings.microbatch_tokens // length)
    assert 0.95 < formula(config, settings, ranks) / counted < (1.12 if ranks == 1 else 1.18)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tokens, at_once", [(64, 2**26), (256, 2**26), (256, 2**20), (256, 2**18)])
def test_the_head_takes_what_was_counted(tokens, at_once, tied, ranks, monkeypatch):
    """One chunk of logits or several; the gradients of the embedding or the chunks are the largest part."""
    monkeypatch.setattr(grpo, "LOGITS_AT_ONCE", at_once)
    monkeypatch.setattr(memory, "LOGITS_AT_ONCE", at_once)
    lengths = {"max_prompt_length": 1, "max_completion_length": 31, "microbatch_tokens": tokens}
    settings = make_settings(**lengths)
    config = make_config(hidden=128, inner=128, layers=1, vocab=10_000, tied=tied)
    counted = count_update(config, settings, rows=tokens // 32)
    assert 0.95 < formula(config, settings, ranks) / counted < 1.1


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
    counted = count_peak(lambda: grpo.generate(sampler, prompts, tokens, 1.0, []))
    lengths = {"max_prompt_length": length, "max_completion_length": tokens}
    settings = make_settings(precision=precision, prompts_per_step=8, group_size=4, eval_prompts=0, **lengths)
    assert 0.9 < sum(memory.rollout_bytes(memory.count_model(config), settings, 1)) / counted < 1.15


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision, rank", [("bfloat16", 0), ("bfloat16", 8), ("float32", 8)])
@pytest.mark.parametrize("hidden, inner, layers, length, shared", SIZES)
def test_activations_of_the_other_scripts(hidden, inner, layers, length, shared, precision, rank, checkpointing):
    """The formula is at most 3 % too low or 12 % too high. With so many tokens, parts of constant size hardly count."""
    lengths = {"max_prompt_length": 4, "max_completion_length": length - 4, "microbatch_tokens": 512}
    given = {"lora_rank": rank, "gradient_checkpointing": checkpointing, "precision": precision}
    settings = make_settings("grpo_tools", **given, **lengths)
    config = make_config(hidden, inner, layers, shared=shared)
    counted = count_update(config, settings, rows=512 // length)
    assert 0.97 < formula(config, settings) / counted < 1.12


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tokens", [64, 1024])
def test_the_head_of_the_other_scripts(tokens, tied):
    """With 64 tokens, the gradients of the embedding are the largest part; with 1,024, the chunks of logits are."""
    lengths = {"max_prompt_length": 1, "max_completion_length": 31, "microbatch_tokens": tokens}
    settings = make_settings("grpo_tools", **lengths)
    config = make_config(hidden=256, inner=256, layers=1, vocab=20_000, tied=tied)
    counted = count_update(config, settings, rows=tokens // 32)
    assert 0.9 < formula(config, settings) / counted < 1.25


@pytest.mark.parametrize("shared", [1, 4])
@pytest.mark.parametrize("vocab, tokens", [(100, 96), (20_000, 8)])
def test_the_rollout_of_the_other_scripts(vocab, tokens, shared):
    """In one case the cache is the largest part, in the other the logits are."""
    config = make_config(hidden=128, inner=128, layers=3, vocab=vocab, shared=shared)
    policy = make_policy(config, make_settings("grpo_tools"))
    prompts = torch.randint(2, 100, (8, 16)).repeat_interleave(4, 0)
    mask = torch.ones_like(prompts)
    mask[:4, :3] = 0  # without padding there is no mask, and attention takes another path
    with grpo_tools.gathered(policy) as sampler:
        counted = count_peak(lambda: ppo_rlhf.generate(sampler, prompts, mask, tokens, 1.0, []))
    lengths = {"max_prompt_length": 16, "max_completion_length": tokens}
    settings = make_settings("grpo_tools", prompts_per_step=8, group_size=4, **lengths)
    settings.eval_prompts = 0
    formula = sum(memory.rollout_bytes(memory.count_model(config), settings, 1))
    assert 0.9 < formula / counted < 1.2


# ---- the tool


def test_parameters_are_those_of_the_published_models():
    """The numbers are those of Qwen2.5's model cards, in billions, with and without the embedding."""
    for name, total, rest in zip(memory.SHAPES, (0.49, 1.54, 3.09, 7.61), (0.36, 1.31, 2.77, 6.53)):
        config = memory.load_config(name)
        model = memory.count_model(config)
        assert abs((model.blocks + model.root) / 1e9 - total) < 0.01
        matrices = 1 if config.tie_word_embeddings else 2
        assert abs((model.blocks + model.root - matrices * model.embedding) / 1e9 - rest) < 0.01


@pytest.mark.parametrize("name", [*memory.SHAPES, *memory.SMALL])
def test_a_model_of_the_hub_with_a_known_shape_needs_no_hub(name):
    """The tests have no hub."""
    owner = "HuggingFaceTB" if name in memory.SMALL else "Qwen"
    shape = memory.load_config(name).to_dict()
    for model in (f"{owner}/{name}", f"{owner}/{name}-Instruct", f"{name}-Instruct"):
        assert memory.load_config(model).to_dict() == shape


def test_a_folder_with_the_name_of_a_known_shape_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_config(hidden=32).save_pretrained("Qwen/Qwen2.5-1.5B-Instruct")
    assert memory.load_config("Qwen/Qwen2.5-1.5B-Instruct").hidden_size == 32


@pytest.mark.parametrize("name", ["nobody/Qwen2.5-1.5B", "no/such/folder", "empty", "unknown", "broken"])
def test_a_model_that_cannot_be_loaded_is_named_in_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, text in {"empty": None, "unknown": '{"model_type": "none"}', "broken": "{"}.items():
        Path(folder).mkdir()
        if text:
            Path(folder, "config.json").write_text(text)
    monkeypatch.setattr(sys, "argv", ["memory.py", "--model", name])
    with pytest.raises(SystemExit) as end:
        memory.main(memory.parse_args())
    said = str(end.value)
    assert said.startswith(f"{name}: ") and "a local folder" in said and "\n" not in said
    assert all(shape in said for shape in memory.SHAPES | memory.SMALL)


def test_what_is_found_to_fit_fits_and_nothing_before_it_does():
    for script, size, gb in (("grpo", "0.5B", 18), ("grpo_tools", "1.5B", 24)):
        config, settings = memory.load_config(f"Qwen2.5-{size}"), make_settings(script)
        fit = memory.find_fit(config, settings, gb)
        assert max(memory.account(config, fit)[-1][1:]) <= gb * 1e9 * memory.USABLE
        assert max(memory.account(config, settings)[-1][1:]) > gb * 1e9 * memory.USABLE
        larger = memory.SimpleNamespace(**vars(fit) | {"rollout_batch_size": 2 * fit.rollout_batch_size})
        assert memory.account(config, larger)[-1][1] > gb * 1e9 * memory.USABLE
        assert memory.find_fit(config, settings, 1) is None
        assert (fit.lora_rank > 0) == (script == "grpo_tools")  # grpo.py has no adapters


FITS = [(script, "0.5B", 48 if script == "ppo_rlhf" else 24) for script in memory.SCRIPTS]
FITS += [(script, "1.5B", 48 if script in ("dpo", "reward_model", "sft") else 80) for script in memory.SCRIPTS]
FITS.remove(("ppo_rlhf", "1.5B", 80))


@pytest.mark.parametrize("script, size, gb", FITS)
def test_the_defaults_fit(script, size, gb, capsys, monkeypatch):
    """On the smallest card that people train such a model on, without any flag but for the model and the data."""
    command = f"memory.py --script {script} --model Qwen/Qwen2.5-{size}-Instruct --gpu-gb {gb}"
    monkeypatch.setattr(sys, "argv", command.split())
    memory.main(memory.parse_args())
    assert f"\nfits in {gb} GB\n" in capsys.readouterr().out


@pytest.mark.parametrize("script", ["grpo", "grpo_tools"])
def test_an_evaluation_takes_no_more_than_a_step(script):
    settings = memory.read_settings(script)
    model = memory.count_model(memory.load_config("Qwen2.5-0.5B"))
    without = memory.SimpleNamespace(**vars(settings) | {"eval_prompts": 0})
    assert settings.eval_prompts > settings.prompts_per_step
    assert memory.rollout_bytes(model, settings, 1) == memory.rollout_bytes(model, without, 1)


def test_constants_are_those_of_the_scripts():
    assert memory.LOGITS_AT_ONCE == grpo.LOGITS_AT_ONCE
    assert (memory.CACHE_BLOCK, memory.EVAL_SAMPLES) == (grpo_tools.CACHE_BLOCK, grpo_tools.EVAL_SAMPLES)
    assert memory.OTHERS_LOGITS == {"GPU": 2**27, "CPU": 2**25}
    assert "LOGITS_AT_ONCE = 2**27 if torch.cuda.is_available() else 2**25  #" in (ROOT / "grpo_tools.py").read_text()


def test_command_line_says_what_fits(capsys, monkeypatch):
    command = ["memory.py", "--model", "Qwen2.5-0.5B", "--gpu-gb", "16", "--max-completion-length", "512"]
    monkeypatch.setattr(sys, "argv", command)
    memory.main(memory.parse_args())
    said = capsys.readouterr().out
    assert "host memory at the start: 2.0 GB" in said and "disk: 7.9 GB per run, 15.8 GB while" in said
    assert "| key-value cache |" in said and "does not fit in 16 GB; this would fit: --gradient-checkpointing" in said
    monkeypatch.setattr(sys, "argv", ["memory.py", "--model", "SmolLM2-135M", "--cpu-gb", "16"])
    memory.main(memory.parse_args())
    said = capsys.readouterr().out
    assert "| process | 0.7 | 0.7 |" in said
    assert "does not fit in 16 GB; this would fit: --rollout-batch-size 256" in said  # in bfloat16, the default
    monkeypatch.setattr(sys, "argv", "memory.py --script grpo_tools --model SmolLM2-135M --cpu-gb 16".split())
    memory.main(memory.parse_args())
    said = capsys.readouterr().out
    assert "| copy of the weights |  |  |" in said  # float32, the default on a CPU
    assert "does not fit in 16 GB; this would fit: --rollout-batch-size 128" in said
    monkeypatch.setattr(sys, "argv", [*command, "--script", "dpo", "--group-size", "4"])
    with pytest.raises(SystemExit, match="dpo.py has no --group-size"):
        memory.main(memory.parse_args())
    monkeypatch.setattr(sys, "argv", [*command, "--lora-rank", "8"])
    with pytest.raises(SystemExit, match="grpo.py has no --lora-rank"):
        memory.main(memory.parse_args())


def test_settings_are_those_of_the_bundled_model_only_if_they_are_asked_for(capsys, monkeypatch):
    real, tiny = (memory.read_settings("grpo", tiny, prompts_per_step=8) for tiny in (False, True))
    assert (real.microbatch_tokens, real.prompts_per_step, real.eval_prompts) == (4096, 8, 256)
    assert (tiny.microbatch_tokens, tiny.prompts_per_step, tiny.eval_prompts) == (1024, 8, 512)
    assert (real.group_size, real.precision, tiny.group_size, tiny.precision) == (8, "bfloat16", 8, "float32")
    answers = []
    for flags in ([], ["--tiny"]):
        command = ["memory.py", "--model", str(ROOT / "models" / "tiny"), "--cpu-gb", "2", *flags]
        monkeypatch.setattr(sys, "argv", command)
        memory.main(memory.parse_args())
        answers.append("does not fit in 2 GB" in capsys.readouterr().out)
    assert answers == [True, False]


def test_the_formulas_are_what_a_process_held():
    """The formulas are within 20 % of the measurements of benchmark/memory_cpu.py that give freed memory back."""
    rows = [(formula / row["bytes_given_back"], row["settings"]) for _, formula, row in memory.read_measured()]
    assert len(rows) == 1 and [row for row in rows if not 0.8 < row[0] < 1.2] == []


def test_the_page_is_what_the_tool_writes(tmp_path):
    page = PAGE.read_text()
    (tmp_path / "memory.md").write_text(page)
    memory.write_page(tmp_path / "memory.md")
    assert (tmp_path / "memory.md").read_text() == page, "python tools/memory.py --write docs/memory.md"


def test_the_page_has_the_answer_to_its_command_for_eight_gpus(capsys, monkeypatch):
    answer = r"`python tools/(memory.py [^`]*--gpu-gb 80)` prints a peak of (\S+) GB"
    command, peak = re.search(answer, PAGE.read_text()).groups()
    monkeypatch.setattr(sys, "argv", command.split())
    memory.main(memory.parse_args())
    said = capsys.readouterr().out
    rollout, update = re.search(r"\| peak \| (\S+) \| (\S+) \|", said).groups()
    assert max(float(rollout), float(update)) == float(peak) and "\nfits in 80 GB\n" in said


def torchrun_commands():
    """Yield (page, command) for every torchrun command on the pages, with its lines joined."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.md"))]:
        for command in re.findall(r"torchrun [^`\n]*?\w+\.py[^`\n]*", page.read_text().replace("\\\n", " ")):
            yield page.name, " ".join(command.split())


def test_every_torchrun_command_of_the_pages_fits_its_gpus():
    """The GPUs have 80 GB. Commands that resume are left out, because they use the settings of their run."""
    fit = []
    for page, command in torchrun_commands():
        script, flags = re.search(r"(\w+)\.py(.*)", command).groups()
        ranks = int(re.search(r"--nproc-per-node (\d+)", command)[1])
        model = re.search(r"--model (\S+)", flags)
        if "--resume" in flags:
            continue
        config = memory.load_config(model[1] if model else str(ROOT / "models" / "tiny"))
        given = {}
        for flag, value in re.findall(r"--([a-z-]+)(?: ([^ -]\S*))?", flags):
            name = flag.replace("-", "_")
            if name in memory.SETTINGS:
                given[name] = type(memory.SETTINGS[name])(value or True)
        settings = memory.read_settings(script, model is None or "--tiny" in flags, **given)
        peak = max(memory.account(config, settings, ranks)[-1][1:])
        fit.append((page, command, peak <= 80e9 * memory.USABLE))
    assert fit and [row for row in fit if not row[2]] == []


@pytest.mark.parametrize(
    "flags, disk",
    [("reward_model", "7.9 GB per run"), ("ppo_rlhf", "13.8 GB per run"), ("gkd --lora-rank 8", "3.2 GB per run")],
)
def test_command_line_counts_the_states_of_all_trained_models(flags, disk, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["memory.py", "--script", *flags.split()])
    memory.main(memory.parse_args())
    assert f"disk: {disk}" in capsys.readouterr().out
