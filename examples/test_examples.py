"""Tests of the shell scripts of examples/ with small settings, and of format_reward.py.

The shell scripts run unchanged. This process does what they call python for, which saves a start for each stage.
"""

import importlib
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import logged, run_file, run_shell
from toy import ROOT, TINY, read_jsonl

import grpo

sys.path.append(str(ROOT / "examples"))
SCORE = grpo.score_completions
format_reward = importlib.import_module("format_reward")  # it replaces score_completions
grpo.score_completions = SCORE

GRPO = "--prompts-per-step 2 --group-size 4 --minibatch-size 8 --warmup-steps 0 --kl-coef 0 --save-every 1"
GRPO += " --max-completion-length 24"
SETTINGS = {"DATASET": "sums", "EVAL_PROMPTS": "2", "PROMPTS": "8", "ROUNDS": "2", "STEPS": "2", "EPOCHS": "1"}
SETTINGS |= {"SFT": "--warmup-steps 0", "DPO": "--warmup-steps 0", "GRPO": GRPO, "RUNS": "runs"}

# The stages of each recipe, and the model that each stage starts from.
BASE, MADE, SAVED = str(TINY), "runs/{}/checkpoint-000001".format, "runs/{}/checkpoint-000002".format
STAGES = {
    "expert_iteration": {
        **{"eval_0": BASE, "right_1.jsonl": BASE, "sft_1": BASE, "eval_1": MADE("sft_1")},
        **{"right_2.jsonl": MADE("sft_1"), "sft_2": MADE("sft_1"), "eval_2": MADE("sft_2")},
    },
    "online_dpo": {
        **{"eval_0": BASE, "pairs_1.jsonl": BASE, "dpo_1": BASE, "eval_1": MADE("dpo_1")},
        **{"pairs_2.jsonl": MADE("dpo_1"), "dpo_2": MADE("dpo_1"), "eval_2": MADE("dpo_2")},
    },
    "r1_pipeline": {
        **{"cold": BASE, "rl_1": "runs/cold/checkpoint-000004", "right.jsonl": SAVED("rl_1")},
        **{"sft": BASE, "rl_2": MADE("sft")},
    },
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sums").mkdir()
    for split, count in (("train", 16), ("test", 4)):
        rows = (ROOT / f"data/addition/{split}.jsonl").read_text().splitlines(keepends=True)
        Path(f"sums/{split}.jsonl").write_text("".join(rows[:count]))


class Killed(BaseException):
    """End a stage without cleaning up, as kill -9 does."""


def do(words, monkeypatch, killed):
    """Run what python would run with these words and return the exit status; killed is a stage that ends in step 2."""
    name = Path(words[0]).stem
    module = grpo if name == "format_reward" else importlib.import_module(name)

    def pick_rows(rows, start, *given):
        if start > 0:
            raise Killed
        return pick(rows, start, *given)

    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", words)
        if name == "format_reward":
            patched.setattr(grpo, "score_completions", format_reward.score_completions)
        if words[-1] == killed:
            pick = module.pick_rows
            patched.setattr(module, "pick_rows", pick_rows)
        try:
            module.main(module.parse_args())
        except SystemExit:
            return 1
        except Killed:
            return 137
        finally:
            if dist.is_initialized():  # the end of a process ends its group, too
                dist.destroy_process_group()
    return 0


def call(name, monkeypatch, killed=None, status=0, **settings):
    """Run a shell script with seed 3; return the lines that it prints and the words of its calls of python."""
    path = ROOT / "examples" / f"{name}.sh"
    found, said, asked = run_shell(path, "3", do=lambda words: do(words, monkeypatch, killed), **SETTINGS | settings)
    assert found == status, said
    return said.splitlines(), asked


def flag(words, name):
    return words[words.index(f"--{name}") + 1]


@pytest.mark.parametrize("name", STAGES)
def test_stages_go_on_from_each_other_and_a_second_call_only_prints_the_table(name, monkeypatch):
    lines, asked = call(name, monkeypatch)
    assert lines[: len(asked)] == [f"runs/{stage}" for stage in STAGES[name]]
    assert [flag(words, "model") for words in asked] == [*STAGES[name].values()]
    assert [words[-1] for words in asked] == [f"runs/{stage}" for stage in STAGES[name]]
    sampled = [flag(words, "seed") for words in asked if "sample" in words[0]]
    assert len({*sampled}) == len(sampled)  # with the same seed, two rounds would sample the same
    table = [line.split() for line in lines[len(asked) + 1 :]]
    first = [stage for stage in STAGES[name] if stage.startswith(("eval", "rl"))][0]
    for row, line in (
        (table[0], logged(Path("runs", first))[0]),
        (table[-1], logged(Path("runs", [*STAGES[name]][-1]))[-1]),
    ):
        assert row[-1] == f"{line['eval/accuracy']:.3f}"
    assert call(name, monkeypatch) == (lines[len(asked) :], [])
    if name == "r1_pipeline":
        check_pipeline(asked)


def check_pipeline(asked):
    """Check its reward function, that the completions it keeps are right, and that its cold start has thoughts."""
    assert [Path(words[0]).name for words in asked if "rl_" in words[-1]] == ["format_reward.py"] * 2
    cold, right, rows = map(read_jsonl, ("runs/cold.jsonl", "runs/thoughts.jsonl", "sums/train.jsonl"))
    assert len(cold) == 256 and all(format_reward.has_format(row["completion"]) for row in cold)
    answers = {row["prompt"]: row["answer"] for row in rows}
    assert right and all(grpo.is_correct(row["completion"], answers[row["prompt"]]) for row in right)
    assert all(format_reward.has_format(row["completion"]) for row in right)


def test_a_failure_or_a_kill_stops_a_recipe_which_goes_on_and_ends_the_same(monkeypatch):
    whole, _ = call("r1_pipeline", monkeypatch)
    expected = logged(Path("runs/rl_1")), logged(Path("runs/rl_2"))
    Path("runs").rename("whole")
    lines, _ = call("r1_pipeline", monkeypatch, status=1, SFT="--no-such-flag")
    assert lines == ["runs/cold"]
    lines, asked = call("r1_pipeline", monkeypatch, "runs/rl_1", status=137)
    assert lines == ["runs/cold", "runs/rl_1"] and "--resume" not in asked[0]
    lines, asked = call("r1_pipeline", monkeypatch)
    assert asked[0][1:] == ["--resume", "runs/rl_1"] and lines == whole[1:]
    assert (logged(Path("runs/rl_1")), logged(Path("runs/rl_2"))) == expected


def test_the_shells_share_their_functions():
    texts = [(ROOT / "examples" / f"{name}.sh").read_text() for name in STAGES]
    for name in ("run", "show"):
        assert len({text[text.index(f"\n{name}() {{") :].partition("\n}\n")[0] for text in texts}) == 1


FORMS = {
    "<think>1+1=2</think>\\boxed{2}": (True, True),
    " <think>a < b\n</think>\n\\boxed{2}\n": (True, True),
    "\\boxed{2}": (True, False),
    "<think>1+1=3</think>\\boxed{3}": (False, True),
    "so <think>1+1=2</think>\\boxed{2}": (True, False),
    "<think>1</think>\\boxed{2}<think>2</think>": (False, False),
    "<think>1</think>": (False, False),
    "<think></think>\\boxed{2}": (True, False),
}


def test_the_parts_of_the_reward_are_accuracy_and_format_with_their_weights():
    scores = format_reward.score_completions([*FORMS], [{"answer": "2"}] * len(FORMS))
    assert scores == [{"accuracy": 0.8 * right, "format": 0.2 * form} for right, form in FORMS.values()]


def test_format_reward_takes_the_flags_of_grpo_and_logs_both_parts():
    flags = f"--dataset sums --eval-prompts 4 --num-steps 1 {GRPO} --run-dir run"
    assert "reward/accuracy " in run_file(ROOT / "examples" / "format_reward.py", *flags.split())
    before, line = logged(Path("run"))
    assert before["eval/reward/accuracy"] == pytest.approx(0.8 * before["eval/accuracy"])
    assert line["reward/mean"] == pytest.approx(line["reward/accuracy"] + line["reward/format"])
    [row] = read_jsonl("run/samples.jsonl")
    assert row["rewards"] == format_reward.score_completions(row["completions"], [row] * 4)
