"""Gradients of whole runs do not depend on microbatches, left-out completions or ranks; three recorded steps.

python -m pytest tests/test_updates.py
"""

import functools
import json
from pathlib import Path

import pytest
import torch
from processes import Forked, Ranks, finish, logged, run_on_ranks, start
from scripted import CASES, Rollouts, run
from toy import EVERY, ROOT, SCRIPTS, TINY, call, parse, read_jsonl, record, relative_error, short, train
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo

each_script = pytest.mark.parametrize("name", SCRIPTS)
TOKEN_MEANS = ("dapo", "cispo")  # the others divide by completions
RECORDED = Path(__file__).parent / "data" / "three_steps.json"


@each_script
def test_the_update_is_the_gradient_of_the_mean_loss(name, tmp_path, monkeypatch):
    """All completions of the rollout in one batch, also those of advantage 0, and the divisor of the paper."""
    script = SCRIPTS[name]
    seen, microbatches = {}, script.microbatches

    def record(batch, *rest):
        seen.setdefault("batch", {key: value.clone() for key, value in batch.items()})
        return microbatches(batch, *rest)

    monkeypatch.setattr(script, "microbatches", record)
    if name != "dapo":  # groups of even answers have advantage 0
        rule = script.is_correct
        monkeypatch.setattr(script, "reward_fn", lambda text, answer: float(int(answer) % 2 == 0 or rule(text, answer)))
    found = run(script, tmp_path, monkeypatch, num_steps=1, temperature=0.9)
    batch, args = seen["batch"], short(script, tmp_path, max_completion_length=48)
    assert name == "dapo" or 0 < found["metrics"][1]["reward/zero_std"] < 1
    policy = script.load_policy(args, AutoTokenizer.from_pretrained(TINY), torch.device("cpu"))
    logprobs, _ = policy(batch["ids"], batch["completion_mask"], 0.9)
    given = vars(args) | batch | {"logprobs": logprobs}
    given |= {"old_logprobs": logprobs.detach(), "ref_logprobs": logprobs.detach()}
    loss, _ = call(script.policy_loss, given)
    count = len(batch["ids"])
    if name in TOKEN_MEANS:
        count = batch["completion_mask"].sum()
    (loss / count).backward()
    expected = torch.cat([weight.grad.flatten() for weight in policy.parameters()])
    assert expected.norm() > 0.01
    assert relative_error(found["gradients"][0], expected) < 1e-4
    step = found["metrics"][1]
    assert step["loss/policy"] == pytest.approx((loss / count).item(), rel=1e-4, abs=1e-6)
    assert step["optim/grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)
    assert step["policy/sampler_kl"] > 0


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory):
    """The run of each case, with several completions in a microbatch; each is made once."""

    @functools.cache
    def run_case(case):
        with pytest.MonkeyPatch.context() as patch:
            return run(EVERY[case.split()[0]], tmp_path_factory.mktemp("one_rank"), patch, **CASES[case])

    return run_case


@pytest.mark.parametrize("name", EVERY)
def test_microbatches_change_nothing(name, on_one_rank, tmp_path, monkeypatch):
    """Nor does gradient checkpointing."""
    expected = on_one_rank(name)  # before anything is patched here
    settings = CASES[name] | {"microbatch_tokens": 1, "gradient_checkpointing": True}
    assert_same(run(EVERY[name], tmp_path, monkeypatch, **settings), expected, 1e-4)


def assert_same(found, expected, tolerance):
    for ours, right in zip(found["gradients"], expected["gradients"], strict=True):
        assert relative_error(ours, right) < tolerance
    first = next(weights for weights in expected["weights"] if len(weights) == len(expected["weights"][-1]))
    assert (expected["weights"][-1] - first).norm() > 0  # of ppo_rlhf.py's two models the value model moves last
    for ours, right in zip(found["metrics"], expected["metrics"], strict=True):
        assert ours.keys() == right.keys()
        for key, value in right.items():
            if not key.startswith("perf/"):
                assert ours[key] == pytest.approx(value, rel=10 * tolerance, abs=tolerance), (ours["step"], key)


@pytest.fixture(scope="module")
def on_two_ranks(request, tmp_path_factory):
    """A folder with what two ranks do in the cases of the tests that were asked for."""
    folder = tmp_path_factory.mktemp("two_ranks")
    items = [item for item in request.session.items if "on_two_ranks" in item.fixturenames]
    run_on_ranks("scripted.py", folder, *dict.fromkeys(item.callspec.params["case"] for item in items))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_gradients_and_metrics_of_one(case, on_two_ranks, on_one_rank):
    """They share prompts and have unequal numbers of microbatches; in bfloat16 they differ by rounding."""
    tolerance = 0.25 if "bfloat16" in case else 1e-4
    found = torch.load(on_two_ranks / case / "found.pt")
    assert_same(found, on_one_rank(case), tolerance)
    assert found["sharded"]  # after a forward without a gradient, too


@pytest.mark.parametrize("case", ["dapo"])
def test_one_rank_resumes_what_two_have_saved_and_back(case, on_two_ranks):
    """The folder has one model, whatever the number of ranks; dapo.py has a buffer of its own."""
    run_dir, consumed = on_two_ranks / case / "run", []
    for num_steps, kind in ((3, Forked), (4, Ranks)):
        finish(start(case, [f"--resume={run_dir}", f"--num-steps={num_steps}"], kind=kind))
        checkpoint = max(run_dir.glob("checkpoint-*"))
        state = {"policy": {"num_consumed": torch.tensor(0)}}
        torch.distributed.checkpoint.load(state, checkpoint_id=checkpoint / "state", no_dist=True)
        consumed.append(state["policy"]["num_consumed"].item())
    lines = logged(run_dir)
    assert [line["step"] for line in lines] == list(range(5))
    rounds = [line["rollout/rounds"] for line in lines[1:]]
    assert consumed == [4 * sum(rounds[:3]), 4 * sum(rounds)]  # prompts of a round
    AutoModelForCausalLM.from_pretrained(checkpoint)


@pytest.mark.parametrize("case", ["ppo_rlhf"])
def test_one_rank_resumes_both_models_of_ppo(case, on_two_ranks):
    script, run_dir = EVERY[case], on_two_ranks / case / "run"
    script.main(parse(script, resume=run_dir, num_steps=3))
    assert [line["step"] for line in logged(run_dir)] == [0, 1, 2, 3]


def test_the_default_command_learns(tmp_path):
    """In 16 of its 20 steps."""
    args = parse(grpo, num_steps=16, eval_prompts=128, run_dir=tmp_path / "run")
    grpo.main(args)
    lines = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert lines[0]["eval/accuracy"] < 0.6 and lines[16]["eval/accuracy"] > 0.9


def three_steps(script, folder, patch):
    """Metrics of three steps with two updates each, of rollouts that are scripted."""
    if hasattr(script, "generate"):
        patch.setattr(script, "generate", Rollouts())
    sizes = {"num_steps": 3, "max_completion_length": 48, "eval_every": 3, "learning_rate": 1e-4, "update_epochs": 2}
    args = short(script, folder, overlong_buffer=1.0, **sizes)
    script.main(args)
    return logged(args.run_dir)


@pytest.mark.parametrize("name", EVERY)
def test_three_steps_are_as_recorded(name, tmp_path, monkeypatch):
    """A change of a number must say so. PYTHONPATH=. python tests/test_updates.py records them anew."""
    found = three_steps(EVERY[name], tmp_path, monkeypatch)
    for ours, right in zip(found, json.loads(RECORDED.read_text())[name], strict=True):
        assert ours == pytest.approx(right, rel=1e-3, abs=1e-5)


def test_dr_grpo_trains_with_truncated_completions_as_wrong_ones(tmp_path, monkeypatch):
    """All rewards are 1: without the rule there would be no gradient."""
    monkeypatch.setattr(SCRIPTS["dr_grpo"], "reward_fn", lambda *_: 1.0)
    line = train(SCRIPTS["dr_grpo"], tmp_path, max_completion_length=6, num_steps=1)[1]
    assert 0 < line["rollout/truncated"] < 1 and line["optim/grad_norm"] > 0


def test_the_kl_term_pulls_completions_of_advantage_0(tmp_path, monkeypatch):
    rewards = iter([0.0, 1.0] * 8 + [1.0] * 16)
    monkeypatch.setattr(grpo, "reward_fn", lambda *_: next(rewards))
    lines = train(grpo, tmp_path, num_steps=2, eval_prompts=0)
    assert lines[2]["reward/zero_std"] == 1 and lines[2]["optim/grad_norm"] > 0


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "reinforce"])
def test_without_an_update_every_ratio_is_exactly_1(name, tmp_path, monkeypatch):
    found = run(SCRIPTS[name], tmp_path, monkeypatch, learning_rate=0.0, minibatch_size=4, temperature=0.9)
    assert [line["policy/approx_kl"] for line in found["metrics"][1:]] == [0.0, 0.0]


@pytest.mark.usefixtures("alone")
def test_dapo_keeps_the_first_groups_with_signal(monkeypatch):
    """Of two prompts a round, and two completions each; the first round has one such group, the second two."""
    dapo = SCRIPTS["dapo"]
    rewards = {"0": [1.0, 1.0], "1": [0.0, 1.0], "2": [1.0, 0.0], "3": [0.0, 1.0]}

    def sample_completions(_sampler, _tokenizer, rows, *_):
        return {"ids": torch.tensor([[row["number"]] for row in rows])}, [str(row["number"]) for row in rows]

    def score_completions(texts, _):
        return [reward for text in texts[::2] for reward in rewards.get(text, [0.0, 0.0])]

    monkeypatch.setattr(dapo, "pick_rows", lambda rows, start, count, _: rows[start : start + count])
    monkeypatch.setattr(dapo, "sample_completions", sample_completions)
    monkeypatch.setattr(dapo, "score_completions", score_completions)
    args = dapo.Args(prompts_per_step=2, group_size=2, max_rounds=5)
    sampler = torch.nn.Module()
    sampler.device = torch.device("cpu")
    rows = [{"number": i} for i in range(9)]
    batch, texts, _, _, kept, end = dapo.sample_groups(sampler, None, rows, 0, args)
    assert batch["ids"][kept].flatten().tolist() == [1, 1, 2, 2] and end == 4 and len(texts) == 8


def test_without_a_reference_completions_of_advantage_zero_are_not_computed(tmp_path, monkeypatch):
    """Their gradient is 0, and the divisor counts them."""
    calls = record(monkeypatch, grpo, "policy_loss")
    monkeypatch.setattr(grpo, "reward_fn", lambda completion, answer: float(len(completion) % 2) if answer else 0.0)
    found = run(grpo, tmp_path, monkeypatch, kl_coef=0.0, num_steps=1)
    seen = [(args[4], args[5]) for args, _ in calls]  # advantages and masks
    tokens = sum(mask.sum() for _, mask in seen)
    assert all((advantages != 0).all() for advantages, mask in seen if mask.any())
    assert found["metrics"][1]["reward/zero_std"] == 0 or tokens < found["metrics"][1]["rollout/length_mean"] * 16
    assert "policy/ref_kl" not in found["metrics"][1]


if __name__ == "__main__":
    import tempfile

    recorded = {}
    for name, script in EVERY.items():
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            recorded[name] = three_steps(script, folder, patch)
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
    print(f"{RECORDED.relative_to(ROOT)}: {', '.join(recorded)}")
