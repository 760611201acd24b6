"""What dpo.py, reward_model.py and ppo_rlhf.py share: pairs in microbatches, ranks and resumed runs.

python -m pytest tests/test_preferences.py
"""

import json
import math
import shutil
from functools import cache

import preference_ranks
import pytest
import torch
from helpers import assert_pairs, gradient_of, train
from preference_ranks import PAIRS, SHARES, build_scorer
from processes import compare_killed_and_resumed, logged, run_on_ranks
from tiny import (
    ROOT,
    TEMPLATE,
    TINY,
    add_pairs,
    build_model,
    exit_line,
    parse,
    relative_error,
    word_tokenizer,
    write_jsonl,
)
from torch.testing import assert_close

import dpo
import grpo_tools
import ppo_rlhf
import reward_model
import sft

SCRIPTS = [reward_model, dpo, ppo_rlhf]
of_pairs = pytest.mark.parametrize("script", [reward_model, dpo])


# ---- batches and gradients


REFERENCES = torch.tensor([[-9.0 + 0.5 * i, -6.0 - 0.75 * i] for i in range(8)])


@cache
def build_policy(script):
    if script is dpo:
        return dpo.LogprobModel(build_model("llama"))
    return reward_model.ScoreModel(build_scorer())


def pairs_in(order=range(8)):
    """The pairs in this order, with references, which reward_model.py does not read."""
    return [PAIRS[i] | {"ref_logprobs": REFERENCES[i]} for i in order]


def accumulate(script, pairs, budget=10_000):
    """Gradient and metrics of one optimizer step over the pairs."""
    policy = build_policy(script)
    policy.zero_grad()
    args = script.Args(microbatch_tokens=budget)
    collected = script.accumulate_gradients(policy, pairs, 8, args)
    gradient = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    return gradient, add_pairs(collected)


def check_same(found, expected):
    """Compare gradients and metrics."""
    assert relative_error(found[0], expected[0]) < 1e-9
    assert_pairs(found[1], expected[1])


@of_pairs
@pytest.mark.usefixtures("alone")
def test_accumulated_gradient_is_that_of_the_mean_loss(script):
    model, inputs = build_policy(script).model, []
    for name in ("chosen_ids", "rejected_ids"):
        completions = script.pad([pair[name] for pair in PAIRS], "cpu")
        rows = *ppo_rlhf.pad_left(PAIRS, "cpu"), *completions
        if script is dpo:
            logprobs = dpo.token_logprobs(model, *rows)
            inputs.append(logprobs.sum(1))
        else:
            inputs.append(reward_model.sequence_scores(model, *rows))
    if script is dpo:
        inputs += [*REFERENCES.T, 0.1, 0.0]
    loss, metrics = script.preference_loss(*inputs)
    expected = gradient_of(model, loss / 8), add_pairs([metrics])
    check_same(accumulate(script, pairs_in()), expected)
    assert 0 < metrics["pair/accuracy"][0] < 8


@pytest.mark.parametrize("budget, count", [(1, 8), (36, 5), (80, 2)])
@of_pairs
@pytest.mark.usefixtures("alone")
def test_microbatches_change_neither_gradient_nor_metrics(script, budget, count):
    """Nor does the order of the pairs."""
    shuffled = pairs_in([5, 2, 7, 0, 3, 6, 1, 4])
    assert len(script.microbatches(shuffled, budget)) == count
    expected = accumulate(script, pairs_in())
    check_same(accumulate(script, shuffled, budget), expected)


@of_pairs
@pytest.mark.usefixtures("alone")
def test_a_part_without_pairs_adds_nothing_and_reaches_every_parameter(script, monkeypatch):
    """A rank that waits for the passes of the others has such parts: here they are said to make two more."""
    expected = accumulate(script, pairs_in())
    monkeypatch.setattr(script, "all_reduce", lambda value, *_: value + 2)
    *_, one, other = script.microbatches(pairs_in(), 36)
    assert one == other == []
    check_same(accumulate(script, pairs_in(), 36), expected)
    monkeypatch.setattr(script, "microbatches", lambda *_: [other])
    gradient, metrics = accumulate(script, pairs_in())
    assert not gradient.any()
    assert not any(sum(pair) for pair in metrics.values())


@pytest.mark.parametrize("budget", [1, 10_000])
@of_pairs
@pytest.mark.usefixtures("alone")
def test_pairs_are_evaluated_as_they_are_trained_on(script, budget):
    policy = build_policy(script)
    args = script.Args(microbatch_tokens=budget)
    _, sums = accumulate(script, pairs_in())
    found = script.evaluate(policy, pairs_in(), args)
    for name, key in (("loss", "loss/preference"), ("accuracy", "pair/accuracy"), ("margin", "pair/margin")):
        assert found[f"eval/pair_{name}"] == pytest.approx(sums[key][0] / 8, rel=1e-9)


# ---- two ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What preference_ranks.py finds on each of two ranks."""
    folder = tmp_path_factory.mktemp("preference_ranks")
    run_on_ranks("preference_ranks.py", folder)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.fixture(scope="module")
def expected():
    """The same in this one process."""
    found = preference_ranks.run()
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.parametrize("idle", ["", ", one rank idle"])
@pytest.mark.parametrize("name", preference_ranks.RUNS)
def test_two_ranks_have_the_gradient_and_metrics_of_one(results, expected, name, idle):
    """And the references and evaluations; of PPO each rank has its rows' numbers and whitened advantages."""
    one = expected[name + idle]
    for rank, share in zip(results, SHARES):
        two = rank[name + idle]
        assert relative_error(two["gradient"], one["gradient"]) < 1e-9
        assert_pairs(two["metrics"], one["metrics"])
        if name == "dpo":
            assert_close(two["references"], one["references"], rtol=1e-9, atol=0)
        if name == "ppo_rlhf":
            width = two["tokens"].shape[2]
            tokens = one["tokens"][:, share, :width]
            assert_close(two["tokens"], tokens, rtol=1e-9, atol=1e-12)
        else:
            for ours, theirs in zip(two["evaluations"], one["evaluations"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-9)


# ---- runs


def small_settings(script, folder, **settings):
    """Settings of a run on 64 pairs, of which ppo_rlhf.py takes the prompts."""
    rows = (ROOT / "data" / "preferences" / "train.jsonl").read_text().splitlines()
    (folder / "rows.jsonl").write_text("\n".join(rows[:64]))
    sizes = {"dataset": str(folder / "rows.jsonl"), "eval_prompts": 3, "minibatch_size": 8, "warmup_steps": 2}
    if script is ppo_rlhf:
        sizes |= {"eval_prompts": 1, "prompts_per_step": 8, "minibatch_size": 4, "update_epochs": 1}
        sizes |= {"max_completion_length": 16}
    return sizes | settings


def mean(lines, key):
    return sum(line[key] for line in lines) / len(lines)


def test_ppo_raises_the_score(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo_rlhf, "NORM_SAMPLES", 128)
    sizes = {"num_steps": 9, "prompts_per_step": 32, "minibatch_size": 16, "update_epochs": 2, "eval_prompts": 16}
    rates = {"learning_rate": 4e-4, "value_learning_rate": 1e-3, "warmup_steps": 2, "kl_coef": 0.02}
    first, *lines = train(ppo_rlhf, tmp_path / "run", **sizes, **rates)
    assert abs(lines[0]["score/mean"]) < 0.7  # normalised on samples of the initial model; 4 standard errors
    assert mean(lines[-3:], "score/mean") > mean(lines[:3], "score/mean") + 0.25
    assert lines[-1]["eval/score"] > first["eval/score"]
    assert mean(lines[-3:], "value/explained_variance") > lines[0]["value/explained_variance"]
    assert lines[0]["rollout/ref_kl_sum"] == pytest.approx(0, abs=1e-3)
    assert lines[-1]["policy/ref_kl"] > 0
    for line in lines:
        assert line["policy/approx_kl"] > 0  # the second minibatch is off-policy
        assert line["optim/value_grad_norm"] > 0


def test_checkpoints_go_from_script_to_script(tmp_path, monkeypatch):
    """From fine-tuning to DPO and to a reward model, and from both to PPO; then the accuracy is evaluated."""
    monkeypatch.setattr(ppo_rlhf, "NORM_SAMPLES", 16)
    texts = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(10, 30)]
    steps = [
        (sft, {"model": TINY, "tiny": True, "dataset": write_jsonl(tmp_path / "texts.jsonl", texts)}),
        (dpo, {"model": tmp_path / "sft" / "checkpoint", "tiny": True}),
        (reward_model, {"model": tmp_path / "sft" / "checkpoint", "tiny": True}),
        (
            ppo_rlhf,
            {"model": tmp_path / "dpo/checkpoint", "reward_model": tmp_path / "reward_model/checkpoint", "tiny": True},
        ),
    ]
    for script, settings in steps:
        settings = small_settings(script, tmp_path, num_steps=1, **settings)
        *_, line = train(script, tmp_path / script.__name__, **settings)
        assert line["optim/grad_norm"] > 0
    model = tmp_path / "ppo_rlhf" / "checkpoint"
    [line] = train(grpo_tools, tmp_path / "grpo_tools", model=model, tiny=True, num_steps=0, eval_prompts=8)
    samples = logged(tmp_path / "grpo_tools", "eval_samples.jsonl")
    right = [grpo_tools.is_correct(sample["completion"], sample["answer"]) for sample in samples]
    assert line["eval/accuracy"] == sum(right) / 8


def test_a_reward_model_with_another_tokenizer_is_refused(tmp_path):
    folder = shutil.copytree(ROOT / "models" / "tiny-reward", tmp_path / "other")
    word_tokenizer(TEMPLATE).save_pretrained(folder)
    message = exit_line(ppo_rlhf, reward_model=folder, run_dir=tmp_path / "run")
    assert message.startswith(f"--reward-model {folder}: its tokenizer differs from that of")


@pytest.mark.parametrize("script", SCRIPTS)
def test_run_killed_once_and_resumed_is_bit_identical(tmp_path, monkeypatch, script):
    monkeypatch.setattr(ppo_rlhf, "NORM_SAMPLES", 16)
    settings = small_settings(script, tmp_path, num_steps=6, eval_every=3, save_every=2)
    if script is ppo_rlhf:
        texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": f"{i}+1={i + 1}"} for i in range(10, 60)])
        settings |= {"ptx_coef": 0.5, "ptx_dataset": texts}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    kill_at_call = "10" if script is ppo_rlhf else "5"  # in step 5
    compare_killed_and_resumed(script, flags, kill_at_call, tmp_path, monkeypatch, "script.NORM_SAMPLES = 16\n")


RANKS = """
import importlib, json, sys
import torch
from ppo_rlhf import init_ranks
from tiny import parse
ranks = init_ranks()
for name, settings in json.loads(sys.argv[1]).items():
    script = importlib.import_module(name)
    script.NORM_SAMPLES = 16
    script.init_ranks, script.end_run = lambda: ranks, lambda *_: None  # one group of ranks for all runs
    args = parse(script, **settings)
    torch.distributed.barrier()  # as init_ranks would: no rank makes the folder before all have read their flags
    script.main(args)
    script.main(parse(script, resume=settings["run_dir"], num_steps=3))
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The folder of runs on two ranks, one step each, then resumed to three; one rank has fewer held-out rows."""
    folder = tmp_path_factory.mktemp("ranks")
    jobs = {}
    for script in SCRIPTS:
        settings = small_settings(script, folder, num_steps=1, microbatch_tokens=320, gradient_checkpointing=True)
        jobs[script.__name__] = settings | {"run_dir": str(folder / script.__name__)}
    (folder / "each.py").write_text(RANKS)
    run_on_ranks(folder / "each.py", json.dumps(jobs))
    return folder


@of_pairs
def test_two_ranks_train_as_one_process_does(tmp_path, two_ranks, script):
    """Whatever the microbatches, and with activations recomputed or not."""
    train(script, tmp_path / "run", **small_settings(script, tmp_path, num_steps=1))
    script.main(parse(script, resume=tmp_path / "run", num_steps=3))
    lines, expected = logged(two_ranks / script.__name__), logged(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line, other in zip(lines, expected, strict=True):
        if script is dpo:  # before the first step every margin is 0 but for its last bits
            other |= {name: line[name] for name in line if name.endswith("accuracy")}
        assert line == pytest.approx(other, rel=1e-4, abs=2e-5)


def test_two_ranks_of_ppo_train_and_resume(two_ranks):
    first, *lines = logged(two_ranks / "ppo_rlhf")
    assert first.keys() == {"step", "eval/score"}  # neither rule nor accuracy, as pairs have no answers
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert all(math.isfinite(value) for value in line.values())
        assert line["policy/approx_kl"] > 0
        assert line["optim/grad_norm"] > 0
