"""What main wires together in a short run of every script, and the numbers of three steps (to record them anew:
`PYTHONPATH=. python tests/test_steps.py`). Run the tests with: python -m pytest tests/test_steps.py
"""

import functools
import importlib
import json
import math
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from preference_ranks import build_scorer
from tiny import (
    COMPLETIONS,
    PROMPTS,
    TINY,
    add_pairs,
    few_rows,
    load,
    pad_right,
    parse,
    read_jsonl,
    record,
    write_jsonl,
)

import gkd
import grpo_tools
import ppo_rlhf

WITH_REFERENCE = ["ppo_rlhf"]
CLIPPED = ["grpo_tools"]
ONLINE = CLIPPED
SAMPLED = [*ONLINE, "ppo_rlhf"]
SUPERVISED = ["reward_model", "dpo", "sft"]
SCRIPTS = {name: importlib.import_module(name) for name in [*SAMPLED, *SUPERVISED]}
NUM_STEPS, GROUP_SIZE, TEMPERATURE, MAX_NORM = 3, 4, 0.8, 0.25
ROWS = [  # for every script
    {"prompt": f"{i}+1=", "answer": str(i + 1), "completion": f"{i + 1}", "chosen": f"{i + 1}", "rejected": f"{i}{i}"}
    for i in range(1, 13)
]
SETTINGS = """num_steps=3 prompts_per_step=4 group_size=4 minibatch_size=8 warmup_steps=4 max_rounds=2 seed=3
    temperature=0.8 max_completion_length=12 overlong_buffer=0.34 learning_rate=1e-3 value_learning_rate=2e-3
    max_grad_norm=0.25 microbatch_tokens=64 eval_prompts=0 beta=0.1 reward_model=none"""
OWN = dict.fromkeys(SUPERVISED, "minibatch_size=4 warmup_steps=2")
OWN["ppo_rlhf"] = "minibatch_size=2 update_epochs=2 gamma=0.99 gae_lambda=0.9 kl_coef=0.1 missing_stop_penalty=0.5"


def score(text, answer):
    """A reward by chance, but always 0 where the answer is a multiple of 4: some groups have no signal."""
    return float(int(answer) % 4 != 0 and sum(text.encode()) % 2)


def logprobs_of(script, model, batch):
    inputs = [batch[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")]
    with torch.no_grad():
        return script.token_logprobs(model, *inputs, TEMPERATURE)[0]


def make_args(script, text, **more):
    """Those of the settings that the script has, with the defaults of its model."""
    settings = dict(setting.split("=") for setting in text.split()) | more
    return parse(script, **{name: value for name, value in settings.items() if hasattr(script.Args, name)})


def record_passes(patch, script):
    """Keep the indices of every pass, none for a filler: for each call of microbatches a list of lists."""
    microbatches, calls = script.microbatches, []

    def recorded(*given):
        passes = []
        calls.append(passes)
        for part in microbatches(*given):
            passes.append(part["indices"].tolist() if part["completion_mask"].any() else [])
            yield part

    patch.setattr(script, "microbatches", recorded)
    return calls


def gradient_norm(policy):
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    return math.hypot(*[gradient.norm().item() for gradient in gradients])


def record_updates(patch, script, name):
    """Keep the batch of each step, the log-probabilities of the policy that sampled it, and its updates."""
    accumulate, steps = script.accumulate_gradients, []
    passes = record_passes(patch, script) if name in SAMPLED else [[]]

    def recorded(policy, batch, *rest):
        before = gradient_norm(policy)  # left by the optimizer step before
        if not steps or steps[-1].batch is not batch:
            logprobs = logprobs_of(script, policy.model, batch) if name in SAMPLED else None
            steps.append(SimpleNamespace(batch=batch, logprobs=logprobs, updates=[]))
        collected = accumulate(policy, batch, *rest)
        divisor = float(rest[1] if name in SAMPLED else rest[0])
        update = SimpleNamespace(divisor=divisor, metrics=add_pairs(collected), before=before)
        update.after, update.rows = gradient_norm(policy), sum(passes[-1], [])
        steps[-1].updates.append(update)
        return collected

    patch.setattr(script, "accumulate_gradients", recorded)
    return steps


def record_run(name, folder):
    """Run main and keep what reaches its optimizer steps and leaves its rollouts."""
    script = SCRIPTS[name]
    settings = f"{SETTINGS} {OWN.get(name, '')}"
    args = make_args(script, settings, dataset=write_jsonl(folder / "rows.jsonl", ROWS), run_dir=folder / "run")
    run = SimpleNamespace(script=script, args=args, rollouts=[])
    with pytest.MonkeyPatch.context() as patch:
        run.steps = record_updates(patch, script, name)
        optimizer_steps = record(patch, script, "step_optimizer")
        if name in SAMPLED:
            run.rollouts = record(patch, script, "sample_completions")
            patch.setattr(script, "reward_fn", score)
        script.main(run.args)
    run.lines = read_jsonl(folder / "run" / "metrics.jsonl")  # no step 0, as nothing is evaluated
    run.updates = sum((step.updates for step in run.steps), [])
    run.learning_rates = [given[2] for given, _ in optimizer_steps]
    run.norms = [norm for _, norm in optimizer_steps]
    assert {given[3] for given, _ in optimizer_steps} == {MAX_NORM}
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Returns the recorded run of a name, which is made when it is first asked for."""
    return functools.cache(lambda name: record_run(name, tmp_path_factory.mktemp("steps")))


def each(names):
    return pytest.mark.parametrize("name", names)


# ---- the optimizer step


def linear_with_gradient(gradient):
    policy = torch.nn.Linear(3, 1, bias=False)
    policy.weight.grad = torch.tensor([gradient])
    return policy


@pytest.mark.parametrize("gradient, factor", [([3.0, 0.0, 4.0], 0.1), ([0.3, 0.0, 0.1], 1.0)])
def test_a_gradient_is_scaled_down_to_the_largest_norm(gradient, factor):
    policy = linear_with_gradient(gradient)
    before, optimizer = policy.weight.detach().clone(), torch.optim.SGD(policy.parameters())
    norm = grpo_tools.step_optimizer(policy, optimizer, 0.2, 0.5)
    assert norm == pytest.approx(math.hypot(*gradient))  # before clipping
    torch.testing.assert_close(policy.weight.detach(), before - 0.2 * factor * torch.tensor([gradient]))


def test_without_a_finite_gradient_there_is_no_step_which_is_said(capsys):
    """AdamW would go on in the direction it had."""
    policy = linear_with_gradient([1.0, -1.0, 2.0])
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.1)
    assert grpo_tools.step_optimizer(policy, optimizer, 0.1, 1.0) > 0
    for number in (0.0, math.nan, math.inf, 1.0, math.nan, math.nan):
        before = policy.weight.detach().clone()
        policy.weight.grad = torch.full((1, 3), number)
        grpo_tools.step_optimizer(policy, optimizer, 0.1, 1.0)
        assert torch.equal(policy.weight, before) == (number != 1.0)
    assert capsys.readouterr().out.count("skipped an optimizer step") == 4


def test_gradients_of_policy_and_value_model_are_scaled_down_apart(runs):
    run = runs("ppo_rlhf")
    norms, value_norms = run.norms[::2], run.norms[1::2]
    whole = [math.hypot(*pair) for pair in zip(norms, value_norms, strict=True)]
    assert whole == pytest.approx([update.after for update in run.updates])  # not clipped before, as one
    for name, found in (("grad_norm", norms), ("value_grad_norm", value_norms)):
        means = torch.tensor(found).view(NUM_STEPS, -1).mean(1).tolist()
        assert [line[f"optim/{name}"] for line in run.lines] == pytest.approx(means)


@each(SCRIPTS)
def test_an_optimizer_step_has_no_gradient_of_the_one_before(runs, name):
    updates = runs(name).updates
    assert [update.before for update in updates] == [0.0] * len(updates)
    assert sum(update.after > 0 for update in updates) > 1


@each(SCRIPTS)
def test_the_learning_rate_rises_over_the_warm_up(runs, name):
    """Then it stays; that of reward_model and sft falls on a cosine, whose last step still trains."""
    run = runs(name)
    per_step = len(run.updates) // NUM_STEPS
    expected = [1e-3 * min(1.0, number / run.args.warmup_steps) for number in range(1, len(run.updates) + 1)]
    if name in ("reward_model", "sft"):
        assert (run.args.num_steps, run.args.warmup_steps) == (3, 2)
        expected[-1] = 1e-3  # the first step after the warm-up
    found = run.learning_rates
    if name == "ppo_rlhf":
        found, of_values = found[::2], found[1::2]
        assert of_values == pytest.approx([2 * rate for rate in expected])
    assert found == pytest.approx(expected)
    assert [line["optim/learning_rate"] for line in run.lines] == found[per_step - 1 :: per_step]


def test_a_forward_pass_leaves_ids_and_masks_as_they_are():
    """Inputs that no other pass has seen: to write the same again would not show."""
    prompts = [{"prompt_ids": ids} for ids in PROMPTS]
    inputs = *ppo_rlhf.pad_left(prompts, "cpu"), *pad_right(COMPLETIONS, 9)
    before, model = [x.clone() for x in inputs], build_scorer()
    ppo_rlhf.sequence_scores(model, *inputs)
    ppo_rlhf.token_values(model, *inputs)
    ppo_rlhf.token_logprobs(load(ppo_rlhf, TINY)[0], *inputs, 0.7)
    assert all(map(torch.equal, inputs, before))


@each(SAMPLED)
def test_a_reward_is_that_of_its_own_prompt_and_completion(runs, name):
    rewards, num_samples = [], 1 if name == "ppo_rlhf" else GROUP_SIZE
    for (_, _, prompts, *_), (batch, texts) in runs(name).rollouts:
        assert prompts == [prompt for prompt in prompts[::num_samples] for _ in range(num_samples)]
        asked = [ids[mask == 1].tolist() for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"])]
        assert asked == [prompt["prompt_ids"] for prompt in prompts]
        rewards.append([score(text, prompt["answer"]) for text, prompt in zip(texts, prompts, strict=True)])
    means = [sum(expected) / len(expected) for expected in rewards]
    assert [line["reward/mean"] for line in runs(name).lines] == pytest.approx(means)
    assert 0 < sum(means) < len(means)


@each(ONLINE)
def test_rows_of_advantage_0_are_trained_for_the_kl_term_alone(runs, name):
    """Without one they cost no pass; the others are in one minibatch each of every epoch."""
    epochs, num_dead = getattr(runs(name).args, "update_epochs", 1), 0
    for step in runs(name).steps:
        advantages = step.batch["advantages"]
        dead = (advantages == 0).view(len(advantages), -1).all(1)
        trained = (~dead).nonzero().squeeze(1).tolist()
        if name in WITH_REFERENCE:
            trained = list(range(len(advantages)))
        num_dead += dead.sum().item()
        assert sorted(row for update in step.updates for row in update.rows) == sorted(trained * epochs)
    assert num_dead > 0


@each(SCRIPTS)
def test_rows_without_gradient_count_in_the_divisor(runs, name):
    for step in runs(name).steps:
        divisors = [update.divisor for update in step.updates]
        if name == "sft":
            assert divisors == [sum(len(row["completion_ids"]) for row in step.batch)]
            continue
        if name in SAMPLED:
            mask = step.batch["completion_mask"]
        if name == "ppo_rlhf":
            assert divisors == [mask[update.rows].sum().item() for update in step.updates]
        else:
            assert divisors == [runs(name).args.minibatch_size] * len(divisors)


@each([*CLIPPED, "ppo_rlhf"])
def test_old_logprobs_are_those_of_the_policy_that_sampled(runs, name):
    """Of every row that is no longer on policy: those of the first minibatch come back in the second epoch only."""
    compared = 0
    for step in runs(name).steps:
        for update in step.updates[1:]:
            old, expected = step.batch["old_logprobs"][update.rows], step.logprobs[update.rows]
            torch.testing.assert_close(old, expected, rtol=1e-4, atol=1e-5)
            compared += (expected < 0).sum().item()
    assert compared > 20


@each([*CLIPPED, "ppo_rlhf"])
def test_the_first_minibatch_is_on_policy_and_no_other(runs, name):
    num_moved = 0
    for step in runs(name).steps:
        first, *others = step.updates
        assert first.metrics["policy/approx_kl"][0] == 0
        moved = [update for update in others if first.rows and update.rows]
        assert all(update.metrics["policy/approx_kl"][0] > 0 for update in moved)
        num_moved += len(moved)
    assert num_moved > 1


@each(WITH_REFERENCE)
def test_the_reference_stays_the_initial_model(runs, name):
    run = runs(name)
    initial, _ = load(run.script, TINY)
    for step in run.steps:
        expected = logprobs_of(run.script, initial, step.batch)
        torch.testing.assert_close(step.batch["ref_logprobs"], expected, rtol=1e-4, atol=1e-5)
    assert (step.logprobs - expected).abs().max() > 0.01  # the policy went elsewhere


@pytest.mark.usefixtures("alone")
def test_ppo_whitens_advantages_and_not_returns(runs):
    steps = runs("ppo_rlhf").steps
    ppo_rlhf.init_ranks()  # again, where main has ended them
    for step in steps:
        batch, mask = step.batch, step.batch["completion_mask"]
        torch.testing.assert_close(batch["scores"], batch["rule_rewards"] - 0.5 * batch["truncated"].float())
        rewards = ppo_rlhf.token_rewards(batch["scores"], batch["old_logprobs"], batch["ref_logprobs"], mask, 0.1)
        advantages, returns = ppo_rlhf.compute_advantages(rewards, batch["old_values"], mask, 0.99, 0.9)
        torch.testing.assert_close(batch["returns"], returns)
        torch.testing.assert_close(batch["advantages"], ppo_rlhf.whiten(advantages, mask))
        assert (batch["advantages"] - advantages).abs().max() > 0.1


@each(SCRIPTS)
def test_losses_and_policy_metrics_are_means_over_the_whole_step(runs, name):
    run = runs(name)
    keys = {key for key in run.lines[0] if key.startswith(("loss/", "policy/", "value/", "pair/"))}
    keys -= {"value/explained_variance"}
    if name == "ppo_rlhf":
        keys -= {"policy/ref_kl"}  # of the rollout
    assert len(keys) > (name != "sft")
    for step, line in zip(run.steps, run.lines, strict=True):
        for key in keys:
            totals, counts = zip(*(update.metrics[key] for update in step.updates))
            expected = sum(update.divisor for update in step.updates)
            if not key.startswith("loss/") and name in SAMPLED:
                mask = step.batch["action_mask" if name == "grpo_tools" else "completion_mask"]
                expected = sum(mask[update.rows].sum().item() for update in step.updates)
            assert sum(counts) == expected, key
            assert line[key] == pytest.approx(sum(totals) / expected, rel=1e-6), key
        if name != "ppo_rlhf":  # which has two
            norms = [update.after for update in step.updates]
            assert line["optim/grad_norm"] == pytest.approx(sum(norms) / len(norms))


@each([*CLIPPED, "ppo_rlhf"])
def test_where_nothing_has_moved_every_ratio_is_exactly_1(name, tmp_path, monkeypatch):
    """Old log-probabilities come from the passes of the update: in bfloat16 other rows beside one may change it."""
    script = SCRIPTS[name]
    calls = record_passes(monkeypatch, script)
    monkeypatch.setattr(script, "reward_fn", score)
    settings = f"{SETTINGS} {OWN.get(name, '')} num_steps=2 learning_rate=1e-29 value_learning_rate=1e-29"
    settings += f" precision=bfloat16 prompts_per_step=8 minibatch_size={4 if name == 'ppo_rlhf' else 16}"
    settings += f" update_epochs=1 microbatch_tokens=40 run_dir={tmp_path}/run"
    script.main(make_args(script, settings, dataset=write_jsonl(tmp_path / "rows.jsonl", ROWS * 2)))
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    for line in lines:
        assert line["policy/approx_kl"] == 0
        assert line["optim/grad_norm"] > 0
        assert line.get("policy/ref_kl", 0.0) == 0
    # A step looks up both minibatches of the policy, and of the reference; then it updates.
    num_ref = 2 if name in WITH_REFERENCE else 0
    *lookups, update, later_update = calls[-num_ref - 4 :]
    assert lookups == [update, later_update] + [update, later_update][:num_ref]
    assert len(later_update) > 1 and max(map(len, later_update)) > 1  # several passes, and rows beside others


# ---- recorded numbers: what "Numerics: unchanged" means

RECORDED = Path(__file__).with_name("reference.json")
THREE_STEPS = SCRIPTS | {"gkd": gkd}
FILES = dict.fromkeys(THREE_STEPS, "addition/train.jsonl") | {"sft": "addition/sft.jsonl"}
FILES |= dict.fromkeys(["dpo", "reward_model"], "preferences/train.jsonl")
NUM_NUDGED = 8


def nudge_weights(patch, script, seed):
    """Change all weights by about a millionth: what that changes in a number, another processor's rounding may too."""
    prepare_model = script.prepare_model

    def nudged(model, *rest):
        generator = torch.Generator().manual_seed(seed)  # the same change for the policy and its reference
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1 + 1e-6 * torch.randn(parameter.shape, generator=generator)
        return prepare_model(model, *rest)

    patch.setattr(script, "prepare_model", nudged)


def three_steps(name, folder, seed_of_nudge=None):
    """The metrics of three steps, but for times. Asserts when main saves, and which models have gradients."""
    settings = f"num_steps=3 save_every=2 eval_prompts=0 seed=5 precision=float32 run_dir={folder}/run"
    settings += f" dataset={few_rows(folder, FILES[name])}"
    save, init_moments = THREE_STEPS[name].save, THREE_STEPS[name].init_moments
    saved, prepared, trained = [], [], []  # steps, optimizers, whether a model has gradients

    def save_and_note(*given):
        saved.append(given[-1])
        save(*given)

    def init_and_note(optimizer):
        prepared.append(optimizer)
        init_moments(optimizer)

    def prepare_and_note(model, *rest):
        trained.append(any(parameter.requires_grad for parameter in model.parameters()))
        return prepare_model(model, *rest)

    if name in SUPERVISED:
        settings += " minibatch_size=16"
    elif name == "ppo_rlhf":
        settings += " prompts_per_step=16 minibatch_size=8 max_completion_length=24"
    else:
        settings += " prompts_per_step=8 group_size=4 minibatch_size=16 max_completion_length=24"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_rlhf, "NORM_SAMPLES", 32)
        patch.setattr(THREE_STEPS[name], "save", save_and_note)
        patch.setattr(THREE_STEPS[name], "init_moments", init_and_note)
        if seed_of_nudge is not None:
            nudge_weights(patch, THREE_STEPS[name], seed_of_nudge)
        prepare_model = THREE_STEPS[name].prepare_model  # perhaps with the nudge
        patch.setattr(THREE_STEPS[name], "prepare_model", prepare_and_note)
        start = time.perf_counter()
        THREE_STEPS[name].main(make_args(THREE_STEPS[name], settings))
        seconds = time.perf_counter() - start
    assert saved == [2, 3] and len(prepared) == (2 if name == "ppo_rlhf" else 1)
    assert trained.count(True) == len(prepared), trained  # those with an optimizer
    lines = read_jsonl(folder / "run" / "metrics.jsonl")
    assert 0 < sum(line["perf/step_seconds"] for line in lines) < seconds
    assert all(0 <= line.get("perf/rollout_seconds", 0) < line["perf/step_seconds"] for line in lines)
    return [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in lines]


@each(THREE_STEPS)
def test_three_steps_have_the_recorded_numbers(name, tmp_path):
    """To four digits, or to ten times what a nudge of the weights changed when they were recorded.

    Most counts are compared exactly, as no nudge changed them. In step 1 of dpo the policy still is the reference, the
    sign of every margin is rounding, and nudges changed pair/accuracy so much that nothing of it is compared.
    """
    recorded = json.loads(RECORDED.read_text())
    expected = [
        {key: pytest.approx(value, rel=1e-4, abs=1e-8 + 10 * changes[key]) for key, value in line.items()}
        for line, changes in zip(recorded["metrics"][name], recorded["changed_by_nudges"][name], strict=True)
    ]
    assert three_steps(name, tmp_path) == expected


def record_steps(name):
    """The metrics of three steps, and how far each was at most from its number in the runs with nudged weights."""
    runs = []
    for seed in [None, *range(NUM_NUDGED)]:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(three_steps(name, Path(folder), seed))
    metrics, *nudged = runs
    changes = [
        {key: float(f"{max(abs(line[key] - value) for line in lines):.1e}") for key, value in expected.items()}
        for expected, *lines in zip(metrics, *nudged, strict=True)
    ]
    return metrics, changes


if __name__ == "__main__":
    torch.set_num_threads(1)
    numbers = {"metrics": {}, "changed_by_nudges": {}}
    for name in THREE_STEPS:
        numbers["metrics"][name], numbers["changed_by_nudges"][name] = record_steps(name)
    RECORDED.write_text(json.dumps(numbers, indent=1) + "\n")
