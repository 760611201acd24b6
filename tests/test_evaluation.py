"""What evaluate counts: accuracy and pass@k by the rule, whatever the reward is; of PPO also score and penalty."""

import importlib
import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tiny import ROOT, TINY, parse
from tiny import SCRIPTS as ONLINE

import ppo_rlhf

SCRIPTS = ONLINE | {"ppo_rlhf": ppo_rlhf}
SAMPLES = [[0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 1], [1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 1, 0], [0.5, 0.5, 0, 0.5]]
GREEDY = [0, 1, 0.5, 1, 0.9, 0.1, 1]  # 1 is right
TRUNCATED = [True, False, False, True, False, True, False]
PROMPTS = [{"prompt": f"{i}", "answer": "1", "prompt_ids": [i]} for i in range(len(GREEDY))]


def reward(text):
    """A reward of one's own: a bonus for an answer with a point, and never 1."""
    return 0.5 * ("{1}" in text) + 0.25 * ("." in text)


@pytest.fixture
def evaluate(monkeypatch, tmp_path):
    """Calls a script's evaluate with the rewards above, on every rank; returns its metrics and what each sampled."""

    def call(script, prompts=PROMPTS, world_size=1, **settings):
        sampled, sums = [[] for _ in range(world_size)], []

        def sample_completions(_policy, _tokenizer, prompts, temperature, _args, _edit=None):
            sampled[len(sums)].append((prompts, temperature))
            places = [int(prompt["prompt"]) for prompt in prompts]
            right = [GREEDY[i] for i in places]
            if temperature > 0:
                right = [SAMPLES[i][number % 4] for number, i in enumerate(places)]
            texts = [f"\\boxed{{{value}}}" for value in right]
            return {"truncated": torch.tensor([TRUNCATED[i] for i in places])}, texts

        def all_reduce(values):
            sums.append(values)
            return [sum(column) for column in zip(*sums)]

        monkeypatch.setattr(script, "sample_completions", sample_completions)
        monkeypatch.setattr(script, "score_completions", lambda texts, _rows: [reward(text) for text in texts])
        monkeypatch.setattr(script, "all_reduce", all_reduce)
        monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
        args = script.Args(run_dir=str(tmp_path), **settings)
        policy = SimpleNamespace(model=SimpleNamespace(device="cpu"), actor=None)
        scorer = [None] if script is ppo_rlhf else []
        for rank in range(world_size):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            metrics = script.evaluate(policy, *scorer, None, prompts, args, 4)
        return metrics, sampled

    return call


each_script = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)


@each_script
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(script, evaluate):
    """Of four samples, that is the share of right ones, and whether any is right; a reward of 0.5 is not."""
    metrics, _ = evaluate(script)
    right = [[value == 1 for value in samples] for samples in SAMPLES]
    assert metrics["eval/pass@1"] == pytest.approx(sum(map(sum, right)) / 28)
    assert metrics["eval/pass@4"] == pytest.approx(sum(map(any, right)) / 7)


@each_script
def test_accuracy_counts_right_greedy_completions_whatever_the_reward_is(script, evaluate):
    metrics, _ = evaluate(script)
    assert metrics["eval/accuracy"] == pytest.approx(3 / 7)
    assert metrics["eval/reward"] == pytest.approx((3 * 0.5 + 3 * 0.25) / 7)


@each_script
def test_without_answers_the_reward_is_all_there_is(script, evaluate):
    metrics, sampled = evaluate(script, [prompt | {"answer": None} for prompt in PROMPTS])
    assert {*metrics} - {"eval/score"} == {"eval/reward"}
    assert [temperature for _, temperature in sampled[0]] == [0.0]


@each_script
def test_one_greedy_completion_which_is_kept_and_samples_at_the_temperature_of_training(script, evaluate, tmp_path):
    _, sampled = evaluate(script, temperature=0.7)
    assert sampled == [[(PROMPTS, 0.0), ([prompt for prompt in PROMPTS for _ in range(4)], 0.7)]]
    rows = [json.loads(line) for line in (tmp_path / "eval_samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4] * 7
    assert [row["completion"] for row in rows] == [f"\\boxed{{{value}}}" for value in GREEDY]
    assert [row["prompt"] for row in rows] == [prompt["prompt"] for prompt in PROMPTS]


@each_script
def test_ranks_share_the_held_out_prompts(script, evaluate):
    """Sums are divided by the number of all prompts; with fewer prompts than ranks some are evaluated twice."""
    whole, _ = evaluate(script)
    metrics, sampled = evaluate(script, world_size=2)
    shares = [[prompt["prompt"] for prompt in of_rank[0][0]] for of_rank in sampled]
    assert sorted(sum(shares, [])) == [prompt["prompt"] for prompt in PROMPTS] and min(map(len, shares)) == 3
    assert metrics == pytest.approx(whole)
    metrics, sampled = evaluate(script, PROMPTS[1:2], world_size=3)
    assert metrics == pytest.approx(evaluate(script, PROMPTS[1:2])[0]) and len(sampled[2][0][0]) == 1


@each_script
def test_evaluation_draws_the_same_samples_every_time(script, evaluate):
    states = []
    for seed in (5, 5, 6):
        torch.rand(3)  # training in between
        evaluate(script, seed=seed)
        states.append(torch.rand(3).tolist())
    assert states[0] == states[1] != states[2]


# ---- scores of PPO


def test_score_of_a_cut_off_completion_is_less_by_the_penalty(evaluate):
    metrics, _ = evaluate(ppo_rlhf, missing_stop_penalty=2.0)
    assert metrics["eval/score"] == pytest.approx((3 * 0.5 + 3 * 0.25 - 2.0 * sum(TRUNCATED)) / 7)


@pytest.mark.parametrize("penalty", [0.0, 2.0])
@pytest.mark.parametrize("scored", [True, False])
def test_the_penalty_is_in_units_of_the_normalised_score(monkeypatch, penalty, scored):
    """A reward model's score is normalised first; without one the reward of the rule is the score."""
    raw = torch.tensor([7.0, 3.0, -1.0])
    monkeypatch.setattr(ppo_rlhf, "look_up_scores", lambda _model, _batch, _args: raw)
    batch = {"rewards": torch.tensor([1.0, 0.0, 0.5]), "truncated": torch.tensor([False, True, True])}
    policy = SimpleNamespace(score_mean=3.0, score_std=4.0)
    args = ppo_rlhf.Args(missing_stop_penalty=penalty, microbatch_tokens=9)
    scores = ppo_rlhf.score_batch(object() if scored else None, batch, policy, args)
    expected = [1.0, 0.0 - penalty, -1.0 - penalty] if scored else [1.0, 0.0 - penalty, 0.5 - penalty]
    assert scores.tolist() == expected


# The embedded data of scripts that look at all of it before they evaluate: a few rows will do.
FILES = {"sft": "addition/sft.jsonl"} | dict.fromkeys(("dpo", "reward_model"), "preferences/train.jsonl")


@pytest.mark.parametrize("name", ["grpo", "dpo", "ppo_rlhf", "reward_model", "sft"])
def test_no_steps_evaluate_a_checkpoint_and_save_nothing(name, tmp_path, capsys):
    script, run = importlib.import_module(name), tmp_path / "run"
    given = {"model": str(TINY)} if name == "sft" else {}
    if name in FILES:
        rows = (ROOT / "data" / FILES[name]).read_text().splitlines()[:32]
        (tmp_path / "rows.jsonl").write_text("\n".join(rows))
        given["dataset"] = str(tmp_path / "rows.jsonl")
    script.main(parse(script, num_steps=0, eval_prompts=4, run_dir=run, **given))
    assert "to continue" not in capsys.readouterr().out
    [line] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert line["step"] == 0 and any(key.startswith("eval/") for key in line)
    assert not (run / "checkpoint").exists() and not [*(run / "state").glob("*")]
    if "eval/accuracy" in line:
        rows = [json.loads(row) for row in (run / "eval_samples.jsonl").read_text().splitlines()]
        right = [script.is_right(row["completion"], str(eval(row["prompt"].rstrip("=")))) for row in rows]
        assert len(right) == 4 and line["eval/accuracy"] == sum(right) / 4
