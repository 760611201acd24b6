"""What main wires together, in one short recorded run of every script: rows, divisors, learning rates, references."""

import math
from types import SimpleNamespace

import pytest
import torch
from preference_ranks import build_scorer
from tiny import COMPLETIONS, PROMPTS, TINY, build_model, load, pad_right, parse, read_jsonl, write_jsonl

import cispo
import dapo
import dpo
import dr_grpo
import grpo
import grpo_process
import grpo_tools
import gspo
import ppo_rlhf
import reinforce
import reward_model
import sft

WITH_REFERENCE = ["grpo", "grpo_process", "ppo_rlhf"]
CLIPPED = ["grpo", "grpo without KL", "dr_grpo", "dapo", "gspo", "cispo", "grpo_process", "grpo_tools"]
ONLINE = [*CLIPPED, "reinforce"]
SAMPLED = [*ONLINE, "ppo_rlhf"]
SUPERVISED = ["reward_model", "dpo", "sft"]
SCRIPTS = {"grpo without KL": grpo} | {
    script.__name__: script
    for script in (grpo, dr_grpo, dapo, gspo, reinforce, ppo_rlhf, reward_model, dpo, sft)
    + (cispo, grpo_process, grpo_tools)
}
GROUP_SIZE, PROMPTS_PER_STEP, NUM_STEPS = 4, 4, 3
ROWS = [  # for every script
    {"prompt": f"{i}+1=", "answer": str(i + 1), "completion": f"{i + 1}", "chosen": f"{i + 1}", "rejected": f"{i}{i}"}
    for i in range(1, 13)
]
SETTINGS = {"num_steps": NUM_STEPS, "learning_rate": 1e-3, "value_learning_rate": 2e-3}
SETTINGS |= {"prompts_per_step": PROMPTS_PER_STEP, "group_size": GROUP_SIZE, "temperature": 0.8, "max_rounds": 2}
SETTINGS |= {"max_completion_length": 12, "overlong_buffer": 0.34, "max_grad_norm": 0.25, "microbatch_tokens": 64}
SETTINGS |= {"eval_prompts": 0, "beta": 0.1, "reward_model": "none", "seed": 3}
OWN = {"grpo without KL": {"kl_coef": 0.0, "update_epochs": 2}}
OWN["ppo_rlhf"] = {"update_epochs": 2, "gamma": 0.99, "gae_lambda": 0.9, "kl_coef": 0.1, "missing_stop_penalty": 0.5}
INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def score(text, answer):
    """A reward by chance, but always 0 where the answer is a multiple of 4: some groups have no signal."""
    return float(int(answer) % 4 != 0 and sum(text.encode()) % 2)


def logprobs_of(script, model, batch):
    with torch.no_grad():
        return script.token_logprobs(model, *(batch[key] for key in INPUTS), SETTINGS["temperature"])[0]


def make_args(script, settings):
    """Those of the settings that the script has, with the defaults of its model."""
    return parse(script, **{name: value for name, value in settings.items() if hasattr(script.Args, name)})


def record_passes(patch, script):
    """Keep the rows of every pass: for each call of microbatches a list of lists."""
    microbatches, calls = script.microbatches, []

    def recorded(*given):
        passes = []
        calls.append(passes)
        for part in microbatches(*given):
            passes.append(part["rows"].tolist())
            yield part

    patch.setattr(script, "microbatches", recorded)
    return calls


def gradient_norm(policy):
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    return math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))


def record(name, folder):
    """Run main and keep what reaches its optimizer steps and leaves its rollouts."""
    script, patch = SCRIPTS[name], pytest.MonkeyPatch()
    settings = SETTINGS | {"warmup_steps": 2 if name in SUPERVISED else 4} | OWN.get(name, {})
    settings["minibatch_size"] = minibatch_size = 2 if name == "ppo_rlhf" else 4 if name in SUPERVISED else 8
    settings |= {"dataset": write_jsonl(folder / "rows.jsonl", ROWS), "run_dir": str(folder / "run")}
    args = make_args(script, settings)
    run = SimpleNamespace(name=name, script=script, args=args, updates=[], rollouts=[], minibatch_size=minibatch_size)
    accumulate, step_optimizer = script.accumulate_gradients, script.step_optimizer

    def recorded_accumulate(policy, batch, rows, divisor, *rest):
        before = gradient_norm(policy)  # left by the optimizer step before
        is_first = not run.updates or run.updates[-1].batch is not batch
        logprobs = logprobs_of(script, policy.model, batch) if is_first and name in SAMPLED else None
        metrics = accumulate(policy, batch, rows, divisor, *rest)
        trained = sum(passes[-1], [])
        update = SimpleNamespace(batch=batch, rows=trained, divisor=float(divisor), metrics=metrics)
        update.gradient_before, update.gradient_after = before, gradient_norm(policy)
        update.sampling_logprobs, update.steps = logprobs if is_first else run.updates[-1].sampling_logprobs, []
        run.updates.append(update)
        return metrics

    def recorded_step(model, optimizer, learning_rate, max_grad_norm):
        taken = SimpleNamespace(learning_rate=learning_rate, max_grad_norm=max_grad_norm, gradient=gradient_norm(model))
        taken.own = {*model.parameters()} == {weight for group in optimizer.param_groups for weight in group["params"]}
        taken.norm = step_optimizer(model, optimizer, learning_rate, max_grad_norm)
        run.updates[-1].steps.append(taken)
        return taken.norm

    def recorded_sample(policy, tokenizer, prompts, *rest):
        batch, texts = sample_completions(policy, tokenizer, prompts, *rest)
        run.rollouts.append((prompts, batch, texts))
        return batch, texts

    with patch.context() as patch:
        passes = record_passes(patch, script)
        patch.setattr(script, "accumulate_gradients", recorded_accumulate)
        patch.setattr(script, "step_optimizer", recorded_step)
        if name in SAMPLED:
            sample_completions = script.sample_completions
            patch.setattr(script, "sample_completions", recorded_sample)
            patch.setattr(script, "reward_fn", score)
        script.main(args)
    run.lines = read_jsonl(folder / "run" / "metrics.jsonl")  # no step 0, as nothing is evaluated
    run.steps = [[update for update in run.updates if update.batch is batch] for batch in batches_of(run)]
    return run


def batches_of(run):
    batches = []
    for update in run.updates:
        if not batches or batches[-1] is not update.batch:
            batches.append(update.batch)
    return batches


def groups_found(batch):
    """The groups that dapo trains on: the first four that have both rewards."""
    rewards = batch["rewards"].view(-1, GROUP_SIZE)
    return (rewards != rewards[:, :1]).any(1).nonzero().squeeze(1).tolist()[:PROMPTS_PER_STEP]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Returns the recorded run of a name, which is made when it is first asked for."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = record(name, tmp_path_factory.mktemp("steps"))
        return made[name]

    return get


def each(names):
    return pytest.mark.parametrize("name", names)


# ---- the optimizer step


def linear_with_gradient(gradient):
    policy = torch.nn.Linear(3, 1, bias=False)
    policy.weight.grad = torch.tensor([gradient])
    policy.bad_gradients = 0
    return policy


@pytest.mark.parametrize("gradient, factor", [([3.0, 0.0, 4.0], 0.1), ([0.3, 0.0, 0.1], 1.0)])
def test_a_gradient_is_scaled_down_to_the_largest_norm(gradient, factor):
    policy = linear_with_gradient(gradient)
    before, optimizer = policy.weight.detach().clone(), torch.optim.SGD(policy.parameters())
    norm = grpo.step_optimizer(policy, optimizer, 0.2, 0.5)
    assert norm == pytest.approx(math.hypot(*gradient))  # before clipping
    torch.testing.assert_close(policy.weight.detach(), before - 0.2 * factor * torch.tensor([gradient]))


def test_without_a_finite_gradient_there_is_no_step_and_three_in_a_row_end_the_run():
    """AdamW would go on in the direction it had."""
    policy = linear_with_gradient([1.0, -1.0, 2.0])
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.1)
    assert grpo.step_optimizer(policy, optimizer, 0.1, 1.0) > 0
    before = policy.weight.detach().clone()
    policy.weight.grad = torch.zeros_like(policy.weight)
    assert grpo.step_optimizer(policy, optimizer, 0.1, 1.0) == 0
    assert torch.equal(policy.weight, before)
    for number in (math.nan, math.inf, 1.0, math.nan, math.nan):
        before = policy.weight.detach().clone()
        policy.weight.grad = torch.tensor([[1.0, number, 0.0]])
        assert math.isfinite(grpo.step_optimizer(policy, optimizer, 0.1, 1.0)) == (number == 1.0)
        assert torch.equal(policy.weight, before) == (number != 1.0) and policy.weight.isfinite().all()
    policy.weight.grad = torch.tensor([[1.0, math.nan, 0.0]])
    with pytest.raises(SystemExit, match="nan three times in a row.*--learning-rate"):
        grpo.step_optimizer(policy, optimizer, 0.1, 1.0)


@pytest.mark.parametrize("script", [dr_grpo, gspo, cispo, reinforce])
def test_a_step_without_signal_leaves_the_weights_as_they_are(script, tmp_path, monkeypatch):
    """Although the first one gave AdamW a direction; no reward differs from the others of its group any more."""
    weights, step_optimizer = [], script.step_optimizer

    def recorded(policy, *rest):
        norm = step_optimizer(policy, *rest)
        weights.append((norm, [weight.detach().clone() for weight in policy.parameters()]))
        return norm

    monkeypatch.setattr(script, "step_optimizer", recorded)
    monkeypatch.setattr(script, "reward_fn", lambda text, _: len(text) % 3 if not weights else 1.0)
    sizes = {"num_steps": 2, "prompts_per_step": 4, "group_size": 4, "minibatch_size": 16, "eval_prompts": 0}
    script.main(make_args(script, sizes | {"run_dir": tmp_path / "run"}))
    (first, trained), (second, left) = weights
    assert first > 0 == second and all(map(torch.equal, trained, left))


@each(SCRIPTS)
def test_the_largest_norm_is_that_of_the_settings(runs, name):
    taken = [step for update in runs(name).updates for step in update.steps]
    assert {step.max_grad_norm for step in taken} == {SETTINGS["max_grad_norm"]}
    assert [step.norm for step in taken] == pytest.approx([step.gradient for step in taken])


def test_gradients_of_policy_and_value_model_are_scaled_down_apart(runs):
    run = runs("ppo_rlhf")
    assert {len(update.steps) for update in run.updates} == {2}
    for place, name in enumerate(("grad_norm", "value_grad_norm")):
        for updates, line in zip(run.steps, run.lines, strict=True):
            norms = [update.steps[place].norm for update in updates]
            assert line[f"optim/{name}"] == pytest.approx(sum(norms) / len(norms))
    assert all(step.own for update in run.updates for step in update.steps)  # clipped apart, not as one


@each(SCRIPTS)
def test_an_optimizer_step_has_no_gradient_of_the_one_before(runs, name):
    updates = runs(name).updates
    assert [update.gradient_before for update in updates] == [0.0] * len(updates)
    assert sum(update.gradient_after > 0 for update in updates) > 1


@each(SCRIPTS)
def test_the_learning_rate_rises_over_the_warm_up(runs, name):
    """Then it stays; that of reward_model and sft has fallen to 0 in the last step."""
    run = runs(name)
    per_step = {"reinforce": 1, "grpo without KL": 4, "ppo_rlhf": 4}.get(name, 1 if name in SUPERVISED else 2)
    assert len(run.updates) == NUM_STEPS * per_step
    expected = [1e-3 * min(1.0, number / run.args.warmup_steps) for number in range(1, NUM_STEPS * per_step + 1)]
    if name in ("reward_model", "sft"):
        expected[-1] = 0.0
    found = [update.steps[0].learning_rate for update in run.updates]
    if name == "ppo_rlhf":
        of_values = [update.steps[1].learning_rate for update in run.updates]
        assert of_values == pytest.approx([2 * rate for rate in expected])
        assert [line["optim/value_learning_rate"] for line in run.lines] == of_values[per_step - 1 :: per_step]
    assert found == pytest.approx(expected)
    assert [line["optim/learning_rate"] for line in run.lines] == found[per_step - 1 :: per_step]


# ---- the rows of a step


@each([name for name in SCRIPTS if name != "grpo without KL"])
def test_a_forward_pass_leaves_ids_and_masks_as_they_are(name):
    """Inputs that no other pass has seen: to write the same again would not show."""
    script = SCRIPTS[name]
    prompts = [{"prompt_ids": ids} for ids in PROMPTS]
    inputs = *script.pad_left(prompts, "cpu"), *pad_right(COMPLETIONS, 9)
    before = [x.clone() for x in inputs]
    if hasattr(script, "token_logprobs"):
        script.token_logprobs(build_model("llama"), *inputs, 0.7)
    if hasattr(script, "sequence_scores"):
        script.sequence_scores(build_scorer(), *inputs)
    if hasattr(script, "token_values"):
        script.token_values(build_scorer(), *inputs)
    assert all(map(torch.equal, inputs, before)) and not inputs[3].all()


@each(SAMPLED)
def test_a_reward_is_that_of_its_own_prompt_and_completion(runs, name):
    rewards, num_samples = [], 1 if name == "ppo_rlhf" else GROUP_SIZE
    for prompts, batch, texts in runs(name).rollouts:
        assert prompts == [prompt for prompt in prompts[::num_samples] for _ in range(num_samples)]
        asked = [ids[mask == 1].tolist() for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"])]
        assert asked == [prompt["prompt_ids"] for prompt in prompts]
        expected = [score(text, prompt["answer"]) for text, prompt in zip(texts, prompts, strict=True)]
        assert batch["rewards"].tolist() == expected
        rewards += expected
    assert 0 < sum(rewards) < len(rewards)


@each([name for name in SCRIPTS if name != "dapo"])
def test_a_pass_trains_on_every_row_once(runs, name):
    """The twelve rows are those of three steps."""
    run = runs(name)
    if name in SAMPLED:
        num_samples = 1 if name == "ppo_rlhf" else GROUP_SIZE
        rows = [prompt["prompt"] for prompts, *_ in run.rollouts for prompt in prompts[::num_samples]]
    else:
        rows = [ids for batch in batches_of(run) for ids in batch["prompt_ids"].tolist()]
        rows = ["".join(map(str, ids)) for ids in rows]
    assert len(rows) == len(set(rows)) == len(ROWS)


@each(ONLINE)
def test_rows_of_advantage_0_are_trained_for_the_kl_term_alone(runs, name):
    """Without one they cost no pass; the others are in one minibatch each of every epoch."""
    epochs, num_dead = OWN.get(name, {}).get("update_epochs", 1), 0
    for updates in runs(name).steps:
        advantages = updates[0].batch["advantages"]
        dead = (advantages == 0).view(len(advantages), -1).all(1)  # those of grpo_process are per token
        live = (~dead).nonzero().squeeze(1).tolist()
        if name in WITH_REFERENCE:
            live = list(range(len(advantages)))
        elif name == "dapo":  # a late answer may have an advantage where all are right
            live = [row for row in live if row // GROUP_SIZE in groups_found(updates[0].batch)]
        num_dead += dead.sum().item()
        assert sorted(row for update in updates for row in update.rows) == sorted(live * epochs)
    assert num_dead > 0


def test_the_kl_term_pulls_rows_of_advantage_0(runs, tmp_path, monkeypatch):
    """With nothing to learn from rewards the reference has all the gradient, once it is another policy."""
    lookup_logprobs = grpo.lookup_logprobs

    def lookup(policy, *rest):
        logprobs = lookup_logprobs(policy, *rest)
        return logprobs if any(p.requires_grad for p in policy.parameters()) else logprobs - 0.5 * (logprobs != 0)

    monkeypatch.setattr(grpo, "lookup_logprobs", lookup)
    monkeypatch.setattr(grpo, "reward_fn", lambda _text, _answer: 1.0)
    dataset = runs("grpo").args.dataset
    settings = {"num_steps": 1, "prompts_per_step": 4, "group_size": 2, "minibatch_size": 8, "eval_prompts": 0}
    grpo.main(parse(grpo, dataset=dataset, run_dir=tmp_path / "run", max_completion_length=12, **settings))
    line = read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]
    assert line["reward/zero_std"] == 1 and line["loss/policy"] == 0
    assert line["optim/grad_norm"] > 1e-3
    k3 = math.exp(-0.5) + 0.5 - 1
    assert line["policy/ref_kl"] == pytest.approx(k3, rel=1e-4)
    assert line["loss/kl"] == pytest.approx(0.04 * k3, rel=1e-4)


@each(SCRIPTS)
def test_rows_without_gradient_count_in_the_divisor(runs, name):
    run = runs(name)
    for updates in run.steps:
        batch, divisors = updates[0].batch, [update.divisor for update in updates]
        if name == "dapo":  # tokens of all completions that were found, in two minibatches
            num_tokens = batch["completion_mask"].view(-1, GROUP_SIZE, 12)[groups_found(batch)].sum().item()
            assert sum(divisors) == max(num_tokens, len(updates)) and len(set(divisors)) > 1
        elif name == "cispo":  # tokens of all completions, in two minibatches
            assert sum(divisors) == batch["completion_mask"].sum().item() and len(divisors) == 2
        elif name == "ppo_rlhf":
            assert divisors == [batch["completion_mask"][update.rows].sum().item() for update in updates]
        elif name == "sft":
            assert divisors == [batch["completion_mask"].sum().item()]
        elif name == "reinforce":
            assert divisors == [PROMPTS_PER_STEP * GROUP_SIZE]
        else:
            assert divisors == [run.minibatch_size] * len(updates)


# ---- policies that are not trained


@each([*CLIPPED, "ppo_rlhf"])
def test_old_logprobs_are_those_of_the_policy_that_sampled(runs, name):
    """Of every row that is no longer on policy: those of the first minibatch come back in the second epoch only."""
    compared = 0
    for updates in runs(name).steps:
        for update in updates[1:]:
            old = update.batch["old_logprobs"][update.rows]
            expected = update.sampling_logprobs[update.rows]
            torch.testing.assert_close(old, expected, rtol=1e-4, atol=1e-5)
            compared += (expected < 0).sum().item()
    assert compared > 20


@each([*CLIPPED, "ppo_rlhf"])
def test_the_first_minibatch_is_on_policy_and_no_other(runs, name):
    num_moved = 0
    for updates in runs(name).steps:
        divergences = [update.metrics["policy/approx_kl"].item() for update in updates]
        moved = [i for i in range(1, len(updates)) if updates[i].rows and updates[0].rows]
        assert divergences[0] == 0 and all(divergences[i] > 0 for i in moved)
        num_moved += len(moved)
    assert num_moved > 1


@each(WITH_REFERENCE)
def test_the_reference_stays_the_initial_model(runs, name):
    run = runs(name)
    initial, _ = load(run.script, TINY)
    for update in run.updates:
        expected = logprobs_of(run.script, initial, update.batch)
        torch.testing.assert_close(update.batch["ref_logprobs"], expected, rtol=1e-4, atol=1e-5)
    assert (run.updates[-1].sampling_logprobs - expected).abs().max() > 0.01  # the policy went elsewhere


@pytest.mark.usefixtures("alone")
def test_ppo_whitens_advantages_and_not_returns(runs):
    run = runs("ppo_rlhf")
    ppo_rlhf.init_ranks()  # again, where main has ended them
    for batch in batches_of(run):
        mask, values = batch["completion_mask"], batch["old_values"]
        torch.testing.assert_close(batch["scores"], batch["rewards"] - 0.5 * batch["truncated"].float())
        rewards = ppo_rlhf.token_rewards(batch["scores"], batch["old_logprobs"], batch["ref_logprobs"], mask, 0.1)
        advantages, returns = ppo_rlhf.compute_advantages(rewards, values, mask, 0.99, 0.9)
        torch.testing.assert_close(batch["returns"], returns)
        torch.testing.assert_close(batch["advantages"], ppo_rlhf.whiten(advantages, mask))
        assert (batch["advantages"] - advantages).abs().max() > 0.1
    assert any(batch["truncated"].any() for batch in batches_of(run))


# ---- metrics


@each(SCRIPTS)
def test_losses_and_policy_metrics_are_means_over_the_whole_step(runs, name):
    run = runs(name)
    keys = {key for key in run.lines[0] if key.startswith(("loss/", "policy/", "value/", "pair/"))}
    keys -= {"value/explained_variance"}
    assert len(keys) > (1 if name in ("reinforce", "sft") else 3)
    for updates, line in zip(run.steps, run.lines, strict=True):
        for key in keys:
            values = [float(update.metrics[key]) for update in updates]
            by_divisor = key.startswith("loss/") or name in SUPERVISED
            counts = [u.divisor if by_divisor else float(u.metrics["num_tokens"]) for u in updates]
            assert line[key] == pytest.approx(sum(values) / max(1, sum(counts)), rel=1e-6), key
        norms = [update.steps[0].norm for update in updates]
        assert line["optim/grad_norm"] == pytest.approx(sum(norms) / len(norms))


@each(SAMPLED)
def test_rewards_and_lengths_are_means_over_the_rollout(runs, name):
    run = runs(name)
    rollouts = iter(run.rollouts)
    for line in run.lines:
        batches = [next(rollouts)[1] for _ in range(line.get("rollout/rounds", 1))]
        rewards, truncated = (torch.cat([batch[key] for batch in batches]).double() for key in ("rewards", "truncated"))
        lengths = torch.cat([batch["completion_mask"] for batch in batches]).sum(1).double()
        assert line["reward/mean"] == pytest.approx(rewards.mean().item())
        assert line["rollout/length_mean"] == pytest.approx(lengths.mean().item())
        assert line["rollout/truncated"] == pytest.approx(truncated.mean().item())
        if name != "ppo_rlhf":
            groups = rewards.view(-1, GROUP_SIZE)
            equal = (groups == groups[:, :1]).all(1).double()
            assert line["reward/zero_std"] == pytest.approx(equal.mean().item())
    assert next(rollouts, None) is None


@each([*CLIPPED, "ppo_rlhf"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_where_nothing_has_moved_every_ratio_is_exactly_1(name, precision, tmp_path, monkeypatch):
    """Old log-probabilities come from the passes of the update: in bfloat16 other rows beside one may change it."""
    script = SCRIPTS[name]
    calls = record_passes(monkeypatch, script)
    monkeypatch.setattr(script, "reward_fn", score)
    monkeypatch.setattr(script, "NORM_SAMPLES", 16, raising=False)
    rows = [row for row in ROWS for _ in range(2)]
    settings = SETTINGS | OWN.get(name, {}) | {"num_steps": 2, "learning_rate": 1e-29, "value_learning_rate": 1e-29}
    settings |= {"dataset": write_jsonl(tmp_path / "rows.jsonl", rows), "run_dir": str(tmp_path / "run")}
    settings |= {"precision": precision, "prompts_per_step": 8, "update_epochs": 1}
    settings |= {"minibatch_size": 4 if name == "ppo_rlhf" else 16, "microbatch_tokens": 40, "reward_model": "none"}
    script.main(make_args(script, settings))
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["policy/approx_kl"] for line in lines] == [0.0] * len(lines) and len(lines) >= 2
    assert all(line["optim/grad_norm"] > 0 for line in lines)
    if name in WITH_REFERENCE:
        assert [line["policy/ref_kl"] for line in lines] == [0.0] * len(lines)
    # A step looks up two minibatches of the policy, or the second of them, and of the reference, and updates on both.
    num_old, num_ref = 2 if name == "ppo_rlhf" else 1, 2 if name in WITH_REFERENCE else 0
    per_step = num_old + num_ref + 2
    assert len(calls) == per_step * len(lines)
    for first in range(0, len(calls), per_step):
        *lookups, update, later_update = calls[first : first + per_step]
        assert lookups[:num_old] == [update, later_update][-num_old:]
        assert lookups[num_old:] == [update, later_update][:num_ref]
        assert len(later_update) > 1 and max(map(len, later_update)) > 1  # several passes, and rows beside others
