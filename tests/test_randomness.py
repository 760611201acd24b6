"""Two ranks share the rows, draw different random numbers, sample from the trained policy, and divide by one number."""

import json

import pytest
from main_ranks import GROUP_SIZE, NUM_STEPS, ROWS, ROWS_PER_STEP, SCRIPTS, SETTINGS, make_args
from processes import run_on_ranks
from tiny import read_jsonl, write_jsonl

import sft

SAMPLED = [name for name in SCRIPTS if name != "sft"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What main_ranks.py sees on each of two ranks, by script."""
    folder = tmp_path_factory.mktemp("main_ranks")
    write_jsonl(folder / "rows.jsonl", ROWS)
    run_on_ranks("main_ranks.py", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) | {"folder": folder} for rank in (0, 1)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_ranks_share_the_rows_of_every_step(ranks, name):
    """Together they have those of one process, and none twice."""
    rows = SCRIPTS[name].pick_rows([row["answer"] for row in ROWS], 0, NUM_STEPS * ROWS_PER_STEP, SETTINGS["seed"])
    for step in range(NUM_STEPS):
        shares = [rank[name]["rollouts"][step]["answers"] for rank in ranks]
        assert [len(share) for share in shares] == [ROWS_PER_STEP // 2] * 2
        assert sorted(sum(shares, [])) == sorted(rows[step * ROWS_PER_STEP : (step + 1) * ROWS_PER_STEP])
    assert len(set(rows)) == len(rows)
    assert all(len(rank[name]["rollouts"]) == NUM_STEPS for rank in ranks)


@pytest.mark.parametrize("name", SAMPLED)
def test_ranks_and_steps_draw_different_random_numbers(ranks, name):
    """All prompts are one: two rollouts of one policy from equal random numbers would be equal."""
    for key, count in (("texts", ROWS_PER_STEP // 2 * (1 if name == "ppo_rlhf" else GROUP_SIZE)), ("draws", 3)):
        seen = [rank[name]["rollouts"][step][key] for rank in ranks for step in range(NUM_STEPS)]
        assert {len(values) for values in seen} == {count}
        assert len({tuple(values) for values in seen}) == len(seen)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_rollout_is_of_the_policy_as_it_is_trained(ranks, name):
    """Every rank samples with all weights, gathered anew after the parameters spread over both have moved."""
    first, second = ([rank[name]["rollouts"][step]["weights"] for rank in ranks] for step in range(NUM_STEPS))
    assert first[0] == first[1] and second[0] == second[1] != first[0]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_ranks_sample_and_score_as_a_plain_model_to_the_last_bit(ranks, precision):
    for rank in ranks:
        assert rank[precision] == dict.fromkeys(rank[precision], True)


@pytest.mark.parametrize("name", SCRIPTS)
def test_ranks_divide_by_one_number(ranks, name):
    """A mean over tokens is over those of both."""
    first, second = (rank[name]["divisors"] for rank in ranks)
    assert [divisor for divisor, _ in first] == [divisor for divisor, _ in second]
    assert len(first) == NUM_STEPS * (2 if name == "ppo_rlhf" else 1)  # epochs
    if name in ("ppo_rlhf", "sft"):
        assert all(divisor == own + others for (divisor, own), (_, others) in zip(first, second))
        assert any(own != others for (_, own), (_, others) in zip(first, second))


def test_two_ranks_of_sft_train_as_one_process_does(ranks):
    folder = ranks[0]["folder"]
    sft.main(make_args("sft", folder, "alone"))
    found, expected = (read_jsonl(folder / name / "metrics.jsonl") for name in ("sft", "alone"))
    assert len(found) == len(expected) == NUM_STEPS
    for line, other in zip(found, expected):
        assert line.keys() == other.keys()
        for key in line:
            if not key.startswith("perf/"):
                assert line[key] == pytest.approx(other[key], rel=1e-4), (line["step"], key)
    assert found[-1]["optim/grad_norm"] > 0.1
