"""Tests of the forks docs/forks/async.md and docs/forks/lora.md; without peft, those of the second are skipped."""

import importlib
import itertools
import shutil
import subprocess
import time

import pytest
import torch
from processes import logged, run_on_ranks
from scripted import Rollouts
from torch.nn.utils import parameters_to_vector
from toy import ROOT, TINY, make_folder, parse, record, train
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo

COPY = "    cp grpo.py my_{0}.py\n    git apply -p0 docs/forks/{0}.diff\n"
RANKS = """
import importlib, scripted, sys, toy
sys.path.insert(0, sys.argv[1])
script = importlib.import_module(sys.argv[2])
script.generate = scripted.Rollouts()
toy.train(script, sys.argv[3], num_steps=3, minibatch_size=16)
"""
each_fork = pytest.mark.parametrize("name", ["async", "lora"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a folder with grpo.py and the bundled models, from which forks can be imported."""
    folder = tmp_path_factory.mktemp("forks")
    for name in ("docs", "models", "data"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "grpo.py", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


def make(folder, name):
    """Create a fork by the command of its page, and import it."""
    if name == "lora":
        pytest.importorskip("peft")
    command = COPY.format(name)
    assert command in (ROOT / f"docs/forks/{name}.md").read_text(encoding="utf-8")
    subprocess.run(["sh", "-c", command], cwd=folder, check=True)
    return importlib.import_module(f"my_{name}")


@each_fork
def test_diffs_are_short_and_pages_are_listed(name):
    diff = (ROOT / f"docs/forks/{name}.diff").read_text(encoding="utf-8")
    assert 0 < len([line for line in diff.splitlines()[2:] if line.startswith(("+", "-"))]) <= 60
    assert f"](forks/{name}.md)" in (ROOT / "docs/fork.md").read_text(encoding="utf-8")


@each_fork
def test_two_ranks_have_the_numbers_of_one(name, folder, tmp_path, monkeypatch):
    script = make(folder, name)
    (tmp_path / "ranks.py").write_text(RANKS)
    run_on_ranks(tmp_path / "ranks.py", folder, f"my_{name}", tmp_path / "two")
    monkeypatch.setattr(script, "generate", Rollouts())
    train(script, tmp_path / "one", num_steps=3, minibatch_size=16)
    one, two = logged(tmp_path / "one/run"), logged(tmp_path / "two/run")
    assert len(one) == 4 and one[3]["policy/ref_kl"] > 1e-4
    assert one == [pytest.approx(line, rel=2e-4, abs=1e-6) for line in two]


def test_async_rollouts_are_one_step_old_and_evaluations_are_not(folder, tmp_path, monkeypatch):
    """The sleep makes the update end first, so the next copy of the weights and the evaluations must wait."""
    script = make(folder, "async")
    sample_completions, step_optimizer, sampled, weights = script.sample_completions, script.step_optimizer, [], []

    def slow(sampler, tokenizer, rows, temperature, args):
        before = parameters_to_vector(sampler.parameters())
        batch, texts = sample_completions(sampler, tokenizer, rows, temperature, args)
        time.sleep(0.5)
        assert torch.equal(parameters_to_vector(sampler.parameters()), before)
        sampled.append((temperature, before, batch["ids"]))
        return batch, texts

    def step(policy, *rest):
        weights.append(parameters_to_vector(policy.parameters()))
        return step_optimizer(policy, *rest)

    monkeypatch.setattr(script, "sample_completions", slow)
    monkeypatch.setattr(script, "step_optimizer", step)
    lines = train(script, tmp_path, num_steps=5)
    found = {0: [], 1: []}
    for temperature, before, _ in sampled[:-1]:  # the last evaluation is after all steps, which have two updates each
        found[temperature] += [step for step in range(5) if torch.equal(weights[2 * step], before)]
    assert found == {0: [0, 2, 4], 1: [0, 0, 1, 2, 3]}
    assert lines[1]["policy/sampler_kl"] < 1e-9
    assert all(line["policy/sampler_kl"] > 1e-6 for line in lines[2:])
    calls = record(monkeypatch, grpo, "sample_completions")
    train(grpo, tmp_path / "grpo", num_steps=1)
    assert torch.equal(calls[1][1][0]["ids"], sampled[1][2])  # after the first evaluation


def test_async_numbers_do_not_depend_on_speed_and_a_resumed_run_starts_fresh(folder, tmp_path, monkeypatch):
    script = make(folder, "async")
    train(script, tmp_path / "fast")
    sample_tokens = script.sample_tokens
    monkeypatch.setattr(script, "sample_tokens", lambda *given: time.sleep(0.01) or sample_tokens(*given))
    train(script, tmp_path / "slow")
    assert logged(tmp_path / "fast/run") == logged(tmp_path / "slow/run")
    script.main(parse(script, resume=tmp_path / "slow/run", num_steps=6))
    lines = logged(tmp_path / "slow/run")
    assert len(lines) == 7 and lines[5]["policy/sampler_kl"] < 1e-9 < lines[6]["policy/sampler_kl"]


def test_an_error_in_the_thread_ends_an_async_run(folder, tmp_path, monkeypatch):
    script = make(folder, "async")

    def fail(*_):
        raise ConnectionError("no judge")

    monkeypatch.setattr(script, "pick_rows", fail)  # which only the thread calls
    with pytest.raises(ConnectionError, match="no judge"):
        train(script, tmp_path)
    assert [line["step"] for line in logged(tmp_path / "run")] == [0]


def test_lora_has_the_start_model_as_reference_and_saves_and_samples_merged_weights(folder, tmp_path, monkeypatch):
    script = make(folder, "lora")
    start = grpo.load_policy(grpo.TINY, AutoTokenizer.from_pretrained(TINY), torch.device("cpu"))
    add_logprobs, gaps = script.add_logprobs, {"old_logprobs": [], "ref_logprobs": []}

    def compare(name, policy, minibatches, args):
        add_logprobs(name, policy, minibatches, args)
        for microbatch in itertools.chain(*minibatches):
            initial, _ = start(microbatch["ids"], microbatch["completion_mask"], args.temperature)
            gaps[name].append((microbatch[name] - initial).abs().max())

    monkeypatch.setattr(script, "add_logprobs", compare)
    policies = record(monkeypatch, script, "copy_weights")
    lines = train(script, tmp_path / "whole")
    assert max(gaps["ref_logprobs"]) < 1e-5 < 1e-2 < gaps["old_logprobs"][-1]  # the policy in the last step
    assert all(line["policy/sampler_kl"] < 1e-9 and line["optim/grad_norm"] > 0 for line in lines[1:])
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "whole/run/checkpoint-000004")
    ids = torch.randint(20, (3, 9))
    assert torch.allclose(saved(ids).logits, policies[0][0][0].model(ids).logits, atol=1e-4)
    before = start.model.state_dict()
    changed = {name for name, weight in saved.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if "_proj" in name}
    train(script, tmp_path / "parts", num_steps=2)
    script.main(parse(script, resume=tmp_path / "parts/run", num_steps=4))
    assert logged(tmp_path / "parts/run") == logged(tmp_path / "whole/run")


def test_lora_trains_a_tied_model_in_bfloat16_with_gradient_checkpointing(folder, tmp_path, monkeypatch):
    script = make(folder, "lora")
    monkeypatch.setattr(script, "score_completions", lambda texts, _: [len(text) % 2 for text in texts])
    model = make_folder(tmp_path / "model", AutoTokenizer.from_pretrained(TINY), tie_word_embeddings=True)
    lines = train(script, tmp_path, model=model, precision="bfloat16", gradient_checkpointing=True, num_steps=2)
    assert all(line["policy/sampler_kl"] < 1e-3 and line["optim/grad_norm"] > 0 for line in lines[1:])
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoint-000002", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
