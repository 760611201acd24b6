"""Tests of the recipes of examples/ with small settings: their stages, and what happens after a failure or a kill.

The shell scripts run unchanged. This process does what they call python for, which saves a start for each stage.
"""

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import run_file, run_shell
from toy import ROOT, TINY, read_jsonl

import grpo

sys.path.append(str(ROOT / "examples"))
SCORE = grpo.score_completions
format_reward = importlib.import_module("format_reward")  # it replaces score_completions
one_sentence = importlib.import_module("one_sentence")
grpo.score_completions = SCORE

SETTINGS = {"DATASET": "sums", "EVAL_PROMPTS": "2", "PROMPTS": "8", "SAMPLES": "4", "ROUNDS": "2", "STEPS": "2"}
SETTINGS |= {"EPOCHS": "1", "SFT": "--warmup-steps 0", "DPO": "--warmup-steps 0"}
GRPO = "--prompts-per-step 2 --group-size 4 --minibatch-size 8 --warmup-steps 0 --kl-coef 0 --save-every 1"
GRPO += " --max-completion-length 24"

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
    "iterative_grpo": {"round_1": BASE, "round_2": SAVED("round_1")},
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
    """Run what python would run with these words and return the exit status; killed = {folder: step to die in}."""
    name, dies_at = Path(words[0]).stem, killed.get(words[-1])
    module = grpo if name == "format_reward" else importlib.import_module(name)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", words)
        if name == "format_reward":
            patched.setattr(grpo, "score_completions", format_reward.score_completions)
        if dies_at:
            pick, calls = module.pick_rows, []

            def die(*given):
                calls.append(given)
                if len(calls) == dies_at:
                    raise Killed
                return pick(*given)

            patched.setattr(module, "pick_rows", die)
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
    path, environment = ROOT / "examples" / f"{name}.sh", {**SETTINGS, "GRPO": GRPO, "RUNS": "runs", **settings}
    found, said, asked = run_shell(path, "3", do=lambda words: do(words, monkeypatch, killed or {}), **environment)
    assert found == status, said
    return said.splitlines(), asked


def flag(words, name):
    return words[words.index(f"--{name}") + 1]


def logged(stage):
    lines = read_jsonl(f"runs/{stage}/metrics.jsonl")
    return [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in lines]


def test_another_model_has_its_own_settings_unless_it_is_said_to_be_a_checkpoint_of_the_bundled_one(monkeypatch):
    asked = []
    monkeypatch.setattr(sys.modules[__name__], "do", lambda words, *_: asked.append(words) or 1)
    for settings in ({}, {"MODEL": "mine"}, {"MODEL": "mine", "TINY": "--tiny"}):
        call("iterative_grpo", monkeypatch, status=1, **settings)
    assert ["--tiny" in words for words in asked] == [True, False, True]


@pytest.mark.parametrize("name", STAGES)
def test_stages_go_on_from_each_other_and_a_second_call_only_prints_the_table(name, monkeypatch):
    lines, asked = call(name, monkeypatch)
    assert lines[: len(asked)] == [f"runs/{stage}" for stage in STAGES[name]]
    assert [flag(words, "model") for words in asked] == [*STAGES[name].values()]
    assert [words[-1] for words in asked] == [f"runs/{stage}" for stage in STAGES[name]]
    sampled = [flag(words, "seed") for words in asked if name == "iterative_grpo" or "sample" in words[0]]
    assert len({*sampled}) == len(sampled)  # with the same seed, two rounds would sample the same
    table = [line.split() for line in lines[len(asked) + 1 :]]
    first = [stage for stage in STAGES[name] if stage.startswith(("eval", "round", "rl"))][0]
    for row, line in ((table[0], logged(first)[0]), (table[-1], logged([*STAGES[name]][-1])[-1])):
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


def test_a_failure_stops_the_recipe_and_mended_it_goes_on_here_as_star_does(monkeypatch):
    lines, asked = call("expert_iteration", monkeypatch, status=1, SFT="--no-such-flag")
    assert lines == ["runs/eval_0", "runs/right_1.jsonl", "runs/sft_1"] and len(asked) == 3
    lines, asked = call("expert_iteration", monkeypatch, START="first")  # each round starts from the first model
    assert lines[0] == "runs/sft_1" and len(asked) == 5 and "--resume" not in asked[0]
    assert [flag(words, "model") for words in asked] == [BASE, *map(MADE, ("sft_1", "sft_1")), BASE, MADE("sft_2")]


def test_killed_stages_go_on_from_their_last_save_or_begin_anew_and_end_the_same(monkeypatch):
    whole, _ = call("iterative_grpo", monkeypatch)
    expected = logged("round_1"), logged("round_2")
    Path("runs").rename("whole")
    lines, _ = call("iterative_grpo", monkeypatch, {"runs/round_1": 1}, status=137)  # nothing saved
    assert lines == ["runs/round_1"]
    lines, asked = call("iterative_grpo", monkeypatch, {"runs/round_1": 2}, status=137)
    assert lines == ["runs/round_1"] and "--resume" not in asked[0] and len(logged("round_1")) == 2
    lines, asked = call("iterative_grpo", monkeypatch, {"runs/round_2": 2}, status=137)
    assert lines == ["runs/round_1", "runs/round_2"] and asked[0][1:] == ["--resume", "runs/round_1"]
    lines, asked = call("iterative_grpo", monkeypatch)
    assert [words[1:] for words in asked] == [["--resume", "runs/round_2"]]
    assert lines == ["runs/round_2", *whole[2:]] and (logged("round_1"), logged("round_2")) == expected


def test_the_shells_run_their_stages_alike_and_are_short():
    texts = [(ROOT / "examples" / f"{name}.sh").read_text() for name in STAGES]
    for name in ("run", "show"):
        assert len({text[text.index(f"\n{name}() {{") :].partition("\n}\n")[0] for text in texts}) == 1
    assert all(text.count("\n") <= 81 and "set -eu\n" in text for text in texts)


# ---- accuracy and format


FORMS = {
    "<think>1+1=2</think>\\boxed{2}": (True, True),
    " <think>a < b\n</think>\n\\boxed{2}\n": (True, True),
    "\\boxed{2}": (True, False),
    "<think>1+1=3</think>\\boxed{3}": (False, True),
    "so <think>1+1=2</think>\\boxed{2}": (True, False),
    "<think>1</think>\\boxed{2}<think>2</think>": (False, False),
    "<think>1</think>": (False, False),
    "<think></think>\\boxed{2}": (True, False),
    "<think>1+1=2 \\boxed{2}": (True, False),
}


def test_the_parts_of_the_reward_are_accuracy_and_format_with_their_weights():
    scores = format_reward.score_completions([*FORMS], [{"answer": "2"}] * len(FORMS))
    assert scores == [{"accuracy": 0.8 * right, "format": 0.2 * form} for right, form in FORMS.values()]
    rewards, _ = grpo.sum_parts(scores, "reward")
    assert rewards.tolist() == pytest.approx([0.8 * right + 0.2 * form for right, form in FORMS.values()])


def test_its_runs_log_accuracy_by_the_rule_and_both_parts_and_go_on():
    """The script takes the flags of grpo.py."""
    flags = "--dataset sums --eval-prompts 4 --num-steps 1"
    for words in (f"{flags} {GRPO} --run-dir runs/a", "--resume runs/a --num-steps 2"):
        assert "reward/accuracy " in run_file(ROOT / "examples" / "format_reward.py", *words.split())
    assert len(logged("a")) == 3
    for line in logged("a"):
        assert line["eval/reward/accuracy"] == pytest.approx(0.8 * line["eval/accuracy"])
        assert line["eval/reward"] == pytest.approx(line["eval/reward/accuracy"] + line["eval/reward/format"])
    for row in read_jsonl("runs/a/samples.jsonl"):
        assert row["rewards"] == format_reward.score_completions(row["completions"], [row] * 4)
    for line in logged("a")[1:]:
        parts = line["reward/accuracy"] + line["reward/format"]
        assert line["reward/mean"] == pytest.approx(parts) and parts > 0


# ---- one sentence

SENTENCES = {
    "It is late because the train stood still.": 3,
    "It's late, because 1,000 trains stood.": 3,
    '"Late, because of snow!"': 3,
    "It is late. Because the train stood still.": 2,
    "it is late because the train stood still.": 2,
    "It is late because the train stood still": 2,
    "It is late because the train stood still and nobody of all who waited knew why it did.": 2,
    "It is late.": 2,
    "Late\nbecause of snow.": 2,
    "": 0,
}


def test_one_sentence_with_a_word_in_it(capsys):
    assert [sum(one_sentence.checks(text)) for text in SENTENCES] == [*SENTENCES.values()]
    rewards = one_sentence.score_completions([*SENTENCES], [{}] * len(SENTENCES))
    assert rewards == [1.0 if met == 3 else met / 9 for met in SENTENCES.values()]
    assert "0.300 of 10 completions meet all three" in capsys.readouterr().out


def test_its_task_is_its_data_and_its_instruction_unless_flags_or_a_run_say_otherwise(monkeypatch):
    parsed = []
    monkeypatch.setattr(grpo, "main", parsed.append)
    Path("run").mkdir()
    Path("run/args.json").write_text(json.dumps({"dataset": "mine", "system_prompt": "Sing."}))
    for words in ("--seed 2", "--dataset sums", "--resume run"):
        monkeypatch.setattr(sys, "argv", ["one_sentence.py", *words.split()])
        with monkeypatch.context() as patched:
            patched.setattr(grpo, "score_completions", SCORE)  # it replaces this
            runpy.run_path(str(ROOT / "examples" / "one_sentence.py"), run_name="__main__")
    usual, other, resumed = parsed
    assert usual.seed == 2 and Path(usual.dataset, "test.jsonl").exists()
    assert (usual.prompts_per_step, usual.max_prompt_length, usual.learning_rate) == (16, 160, 1e-5)
    assert usual.system_prompt == other.system_prompt == one_sentence.ASK and Path(other.dataset).name == "sums"
    assert str(one_sentence.MOST) in one_sentence.ASK and one_sentence.WORD in one_sentence.ASK
    assert (resumed.dataset, resumed.system_prompt) == ("mine", "Sing.")
