"""Real runs of reward_model.py, dpo.py and ppo_rlhf.py, alone and one after the other."""

import json
import math
import re
import shutil
import signal
from dataclasses import asdict, fields
from itertools import permutations
from pathlib import Path

import datasets
import pytest
import torch
from processes import run_on_ranks
from test_cli import names_of, parse_help
from test_data import TEMPLATE, word_tokenizer
from test_resume import KILLS, assert_same_run, finish, logged, start
from tiny import load_scorer
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import dpo
import grpo
import ppo_rlhf
import reward_model
import sft

SCRIPTS = [reward_model, dpo, ppo_rlhf]
NAMES = [script.__name__ for script in SCRIPTS]
ROOT = Path(grpo.__file__).parent
TINY = ROOT / "models" / "tiny"
SMALL = {
    "reward_model": {"minibatch_size": 8},
    "dpo": {"minibatch_size": 8, "rollout_batch_size": 3},
    "ppo_rlhf": {"prompts_per_step": 8, "minibatch_size": 4, "update_epochs": 1, "max_completion_length": 24},
}
SMALL = {name: {"eval_prompts": 3, "warmup_steps": 2, "seed": 3, **sizes} for name, sizes in SMALL.items()}


@pytest.fixture(scope="session", autouse=True)
def cache_in_temporary_folder(tmp_path_factory):
    before, datasets.config.HF_DATASETS_CACHE = datasets.config.HF_DATASETS_CACHE, tmp_path_factory.mktemp("cache")
    yield
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """A folder with the first of the embedded pairs; beside it one of fewer, and one of sums."""
    folder, kinds = tmp_path_factory.mktemp("data"), (("preferences", "pairs", (448, 64)),)
    for source, name, sizes in (*kinds, ("preferences", "few", (64, 16)), ("addition", "sums", (64, 16))):
        (folder / name).mkdir()
        for split, count in zip(("train", "test"), sizes):
            lines = (ROOT / "data" / source / f"{split}.jsonl").read_text().splitlines(keepends=True)
            (folder / name / f"{split}.jsonl").write_text("".join(lines[:count]))
    return str(folder / "pairs")


@pytest.fixture(scope="session")
def few(pairs):
    """64 pairs, for runs of a few steps."""
    return str(Path(pairs).parent / "few")


@pytest.fixture(scope="session")
def reward_run(tmp_path_factory, pairs):
    """The folder of a short run of reward_model.py."""
    run = tmp_path_factory.mktemp("reward") / "run"
    sizes = {"num_steps": 20, "minibatch_size": 32, "learning_rate": 1e-3, "warmup_steps": 4}
    evaluation = {"eval_every": 20, "eval_prompts": 64, "save_every": 20}
    reward_model.main(reward_model.Args(dataset=pairs, run_dir=str(run), seed=1, **sizes, **evaluation))
    return run


@pytest.fixture(scope="session")
def dpo_run(tmp_path_factory, pairs):
    run = tmp_path_factory.mktemp("dpo") / "run"
    sizes = {"num_steps": 14, "minibatch_size": 32, "learning_rate": 2e-4, "warmup_steps": 2, "beta": 0.1}
    evaluation = {"eval_every": 14, "eval_prompts": 64, "eval_dataset": "", "save_every": 14}
    dpo.main(dpo.Args(dataset=pairs, run_dir=str(run), seed=1, **sizes, **evaluation))
    return run


@pytest.fixture(scope="session")
def ppo_run(tmp_path_factory, reward_run):
    """The folder of a short run of ppo_rlhf.py with that reward model."""
    run = tmp_path_factory.mktemp("ppo") / "run"
    sizes = {"num_steps": 12, "prompts_per_step": 32, "minibatch_size": 16, "update_epochs": 2, "warmup_steps": 2}
    rates = {"learning_rate": 4e-4, "value_learning_rate": 1e-3, "kl_coef": 0.02}
    evaluation = {"eval_every": 12, "eval_prompts": 16, "save_every": 12}
    scorer = str(reward_run / "checkpoint")
    ppo_rlhf.main(ppo_rlhf.Args(reward_model=scorer, run_dir=str(run), seed=1, **sizes, **rates, **evaluation))
    return run


@pytest.fixture
def runs(reward_run, dpo_run, ppo_run):
    return {"reward_model": reward_run, "dpo": dpo_run, "ppo_rlhf": ppo_run}


@pytest.fixture
def few_norm_samples(monkeypatch):
    monkeypatch.setattr(ppo_rlhf, "NORM_SAMPLES", 16)


def small_args(script, run, pairs, scorer, **settings):
    """Settings of a run as small as useful."""
    sums = str(Path(pairs).parent / "sums")
    own = {
        "reward_model": {"dataset": pairs},
        "dpo": {"dataset": pairs, "eval_dataset": sums},
        "ppo_rlhf": {"dataset": sums, "reward_model": str(scorer)},
    }
    return script.Args(**{"run_dir": str(run), **SMALL[script.__name__], **own[script.__name__], **settings})


def mean(lines, key):
    return sum(line[key] for line in lines) / len(lines)


def shares_changed(checkpoint):
    """Share of the values that training changed, of each parameter of a language model."""
    before = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(checkpoint)
    return [(a != b).float().mean().item() for a, b in zip(before.parameters(), after.parameters(), strict=True)]


# ---- learning


@pytest.mark.parametrize("name", NAMES)
def test_metrics_are_finite_and_a_line_a_step(runs, name):
    lines = logged(runs[name])
    assert [line["step"] for line in lines] == list(range(len(lines))) and len(lines) > 9
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(line["optim/grad_norm"] > 0 and line["optim/learning_rate"] >= 0 for line in lines[1:])
    assert all(key.startswith(("eval/", "step")) for key in lines[0]) and len(lines[0]) > 3


def test_a_reward_model_learns_to_prefer_shown_work(reward_run):
    lines = logged(reward_run)
    before, after = lines[0], lines[-1]
    keys = [f"eval/pair_accuracy/right work, {loser}" for loser in ("wrong answer", "right answer")]
    accuracies = [sum(line[key] for key in keys) / 2 for line in (before, after)]
    assert accuracies[1] > max(0.8, accuracies[0])
    assert after["eval/pair_accuracy"] > 0.5
    shares = [after[key] for key in after if re.fullmatch("eval/calibration/.*/share", key)]
    assert sum(shares) == pytest.approx(1) and 0 <= after["eval/calibration_error"] <= 1
    assert lines[-1]["optim/learning_rate"] < 1e-8 < lines[4]["optim/learning_rate"] == 1e-3  # warm-up, then a cosine
    for line in lines[1:]:
        assert line["pair/margin"] == pytest.approx(line["pair/chosen_score"] - line["pair/rejected_score"], abs=1e-5)


def test_dpo_learns_to_tell_pairs_apart(dpo_run):
    lines = logged(dpo_run)
    before, after = lines[0], lines[-1]
    for key in ("loss/preference", "pair/margin", "pair/chosen_log_ratio", "pair/rejected_log_ratio"):
        assert all(key in line for line in lines[1:])
    # The policy is the reference: log 2. Padding differs from batch to batch, and the last bits with it.
    assert before["eval/pair_loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert lines[1]["loss/preference"] == pytest.approx(math.log(2), abs=1e-4)
    assert abs(before["eval/pair_chosen_log_ratio"]) < 1e-3 and abs(lines[1]["pair/margin"]) < 1e-3
    assert mean(lines[-4:], "loss/preference") < math.log(2) - 0.02
    assert mean(lines[-4:], "pair/margin") > mean(lines[1:5], "pair/margin") + 0.05
    assert after["eval/pair_loss"] < before["eval/pair_loss"] and after["eval/pair_margin"] > 0.05
    for line in lines[1:]:
        log_ratio = line["pair/chosen_log_ratio"] - line["pair/rejected_log_ratio"]
        assert line["pair/margin"] == pytest.approx(0.1 * log_ratio, abs=1e-4)
    assert min(shares_changed(dpo_run / "checkpoint")) > 0.5  # rows of unused tokens stay


def test_ppo_raises_the_score(ppo_run):
    lines = logged(ppo_run)
    assert mean(lines[-3:], "score/mean") > mean(lines[1:4], "score/mean") + 0.25
    assert lines[-1]["eval/score"] > lines[0]["eval/score"]
    assert all(line["policy/approx_kl"] > 0 for line in lines[1:])  # the second minibatch is off-policy
    assert max(line["policy/ratio_max"] for line in lines[1:]) > 1.1
    assert lines[1]["rollout/ref_kl_sum"] == pytest.approx(0, abs=1e-3) and lines[-1]["policy/ref_kl"] > 0
    assert all(line["value/explained_variance"] <= 1 for line in lines[1:])
    assert mean(lines[-3:], "value/explained_variance") > lines[1]["value/explained_variance"]
    assert all(line["optim/value_grad_norm"] > 0 for line in lines[1:])
    assert all(line["rollout/completions"] == 32 for line in lines[1:])
    assert min(shares_changed(ppo_run / "checkpoint")) > 0.5  # rows of unused tokens stay


def test_scores_are_normalised_on_samples_of_the_initial_model(ppo_run):
    normalization = json.loads((ppo_run / "normalization.json").read_text())
    assert list(normalization) == ["mean", "std"] and normalization["std"] > 0
    assert abs(logged(ppo_run)[1]["score/mean"]) < 0.7  # 4 standard errors of 32 samples


def test_without_a_reward_model_the_reward_of_reward_fn_is_the_score(tmp_path, monkeypatch, pairs):
    asked, printed = [], []
    monkeypatch.setattr(ppo_rlhf, "reward_fn", lambda text, answer: asked.append((text, answer)) or len(text) / 10)
    monkeypatch.setattr(ppo_rlhf, "print_group", lambda *group: printed.append(group))
    run = tmp_path / "run"
    ppo_rlhf.main(small_args(ppo_rlhf, run, pairs, "none", num_steps=1, eval_prompts=0, missing_stop_penalty=0.0))
    line, sample = logged(run)[1], logged(run, "samples.jsonl")[0]
    assert len(asked) == 8 and line["reward/mean"] == pytest.approx(sum(len(text) for text, _ in asked) / 80)
    assert line["score/mean"] == pytest.approx(line["reward/mean"]) and line["reward/mean"] > 0
    assert sample["rewards"] == sample["scores"] == [pytest.approx(len(sample["completions"][0]) / 10)]
    assert line["optim/grad_norm"] > 0
    assert len({prompt for _, prompt, *_ in printed}) == 3
    for (text, answer), (_, prompt, texts, scores) in zip(asked, printed):
        assert sum(map(int, prompt.removesuffix("=").split("+"))) == int(answer)  # printed under its own prompt
        assert texts == [text] and scores == [pytest.approx(len(text) / 10)]
    assert not (run / "normalization.json").exists()


def test_a_completion_without_stop_token_pays_the_penalty(tmp_path, monkeypatch, pairs):
    monkeypatch.setattr(ppo_rlhf, "reward_fn", lambda _text, _answer: 2.0)
    run = tmp_path / "run"
    sizes = {"num_steps": 1, "eval_prompts": 0, "max_completion_length": 8}
    ppo_rlhf.main(small_args(ppo_rlhf, run, pairs, "none", missing_stop_penalty=3.0, **sizes))
    line = logged(run)[1]
    assert 0 < line["rollout/truncated"] < 1 and line["reward/mean"] == 2
    assert line["score/mean"] == pytest.approx(2 - 3 * line["rollout/truncated"])


@pytest.mark.usefixtures("few_norm_samples")
def test_without_kl_penalty_no_reference_is_loaded(tmp_path, monkeypatch, pairs, reward_run):
    frozen, logprob_model = [], ppo_rlhf.LogprobModel
    monkeypatch.setattr(ppo_rlhf, "LogprobModel", lambda model: frozen.append(model) or logprob_model(model))
    for kl_coef in (0.0, 0.1):
        run = tmp_path / str(kl_coef)
        settings = {"num_steps": 1, "eval_prompts": 0, "kl_coef": kl_coef}
        ppo_rlhf.main(small_args(ppo_rlhf, run, pairs, reward_run / "checkpoint", **settings))
        assert any("ref_kl" in key for key in logged(run)[1]) == bool(kl_coef)
        assert len(frozen) == bool(kl_coef)


@pytest.mark.usefixtures("few_norm_samples")
@pytest.mark.parametrize("script", SCRIPTS)
def test_training_does_not_depend_on_the_microbatch_budget(tmp_path, script, few, reward_run):
    lines = []
    for budget in (100, 100_000):
        run = tmp_path / str(budget)
        settings = {"num_steps": 1, "microbatch_tokens": budget, "gradient_checkpointing": budget == 100}
        settings |= {"eval_dataset": ""} if script is dpo else {}
        script.main(small_args(script, run, few, reward_run / "checkpoint", **settings))
        lines.append(logged(run)[1])
    assert lines[0].keys() == lines[1].keys() and lines[0]["optim/grad_norm"] > 0
    for key in lines[0]:
        if key != "pair/accuracy":  # before the first step of DPO every margin is 0 but for its last bits
            assert lines[0][key] == pytest.approx(lines[1][key], rel=1e-3, abs=1e-4), key


# ---- run folders


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_writes_its_parts(runs, script):
    run = runs[script.__name__]
    names = {path.name for path in run.iterdir()}
    assert names >= {"args.json", "metrics.jsonl", "checkpoint", "state"}
    assert ("samples.jsonl" in names) == (script is ppo_rlhf)
    assert not [path for path in run.rglob("*") if "unfinished" in path.name]
    saved = json.loads((run / "args.json").read_text())
    assert list(saved) == [*names_of(script), "run"] and None not in [saved[name] for name in script.DEFAULTS]
    assert [path.name for path in (run / "state").iterdir()] == [f"{saved['num_steps']:08d}"]


def test_one_sample_a_step_of_ppo(ppo_run):
    samples = logged(ppo_run, "samples.jsonl")
    assert [sample["step"] for sample in samples] == list(range(1, 13))
    for sample in samples:
        assert sample["prompt"].endswith("=") and sample["rewards"] in ([0.0], [1.0])
        assert len(sample["completions"]) == len(sample["scores"]) == 1 and math.isfinite(sample["scores"][0])


@pytest.mark.parametrize("name", ["dpo", "ppo_rlhf"])
def test_the_checkpoint_of_a_policy_loads_with_its_tokenizer(runs, name):
    checkpoint = runs[name] / "checkpoint"
    model, info = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.float32 and type(model).__name__ == "Qwen3ForCausalLM"
    tokenizer, expected = (AutoTokenizer.from_pretrained(folder) for folder in (checkpoint, TINY))
    assert tokenizer.chat_template == expected.chat_template and tokenizer.get_vocab() == expected.get_vocab()


def test_the_checkpoint_of_a_reward_model_loads_and_scores_as_training_did(reward_run, pairs):
    checkpoint = reward_run / "checkpoint"
    model, info = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.num_labels == 1 and model.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.pad_token_id == model.config.pad_token_id != tokenizer.eos_token_id
    _, held_out, _ = reward_model.load_pairs(pairs, tokenizer, "", 32, 48, 64, tokenizer.eos_token_id)
    scores = []
    for key in ("chosen_ids", "rejected_ids"):
        encoded = [{"input_ids": pair["prompt_ids"] + pair[key]} for pair in held_out]
        with torch.no_grad():
            scores.append(model.eval()(**tokenizer.pad(encoded, return_tensors="pt", padding_side="right")).logits)
    margins = (scores[0] - scores[1]).squeeze(1)
    last = logged(reward_run)[-1]
    assert margins.mean().item() == pytest.approx(last["eval/pair_margin"], abs=1e-4)
    assert (margins > 0).float().mean().item() == pytest.approx(last["eval/pair_accuracy"], abs=0.02)


def test_the_embedded_reward_model_tells_held_out_pairs_apart():
    """models/tiny-reward is what reward_model.py's default command leaves, and the default of ppo_rlhf.py."""
    folder = Path(ppo_rlhf.resolve_args(ppo_rlhf.Args()).reward_model)
    assert folder == ROOT / "models" / "tiny-reward"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4e6
    model, tokenizer = load_scorer(reward_model, folder)
    stop_id = tokenizer.eos_token_id
    _, held_out, _ = reward_model.load_pairs(reward_model.DATASET, tokenizer, "", 32, 48, 512, stop_id)
    policy, args = reward_model.ScoreModel(model), reward_model.Args(microbatch_tokens=8192)
    metrics = reward_model.evaluate(policy, held_out, tokenizer.pad_token_id, args, 0, 1)
    accuracies = {key.rpartition("/")[2]: metrics[key] for key in metrics if key.startswith("eval/pair_accuracy/")}
    assert len(accuracies) == 5
    assert min(accuracies["right work, wrong answer"], accuracies["right work, right answer"]) >= 0.93
    assert accuracies["right work, wrong work"] >= 0.65


# ---- one script after the other


def test_a_reward_model_trained_further_keeps_its_head(tmp_path, reward_run, pairs):
    run = tmp_path / "run"
    settings = {"model": str(reward_run / "checkpoint"), "num_steps": 0, "eval_prompts": 64}
    reward_model.main(small_args(reward_model, run, pairs, None, **settings))
    expected = logged(reward_run)[-1]
    assert logged(run)[0]["eval/pair_loss"] == pytest.approx(expected["eval/pair_loss"], abs=1e-5)


def test_from_fine_tuning_to_dpo_to_evaluation(tmp_path, few):
    sizes = {"num_steps": 1, "minibatch_size": 8, "eval_prompts": 4}
    lines = (ROOT / "data" / "addition" / "sft.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "sft.jsonl").write_text("".join(lines[:64]))
    data = str(tmp_path / "sft.jsonl")
    sft.main(sft.Args(model=str(TINY), dataset=data, run_dir=str(tmp_path / "sft"), **sizes))
    settings = {"model": str(tmp_path / "sft" / "checkpoint"), "num_steps": 2, "learning_rate": 1e-4}
    dpo.main(small_args(dpo, tmp_path / "dpo", few, None, eval_prompts=8, **settings))
    expected = logged(tmp_path / "dpo")[-1]
    model = str(tmp_path / "dpo" / "checkpoint")
    settings = {"dataset": str(Path(few).parent / "sums"), "num_steps": 0, "eval_prompts": 8, "seed": 3}
    grpo.main(grpo.Args(model=model, rollout_batch_size=3, run_dir=str(tmp_path / "grpo"), **settings))
    (line,) = logged(tmp_path / "grpo")
    assert {key: value for key, value in line.items() if key.startswith("eval/")} == {
        key: expected[key] for key in ("eval/accuracy", "eval/pass@1", "eval/pass@2", "eval/pass@4", "eval/reward")
    }


# ---- bad input


def exit_message(script, **settings):
    """Run main and return the line it exits with; a message, unlike None or 0, is exit status 1."""
    with pytest.raises(SystemExit) as caught:
        script.main(script.Args(**settings))
    message = caught.value.code
    assert isinstance(message, str) and 0 < len(message) < 600 and "\n" not in message
    return message


def test_a_real_model_needs_a_reward_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = exit_message(ppo_rlhf, model="some/model")
    assert "--reward-model" in message and "python reward_model.py --model some/model --dataset" in message
    assert "none" in message and list(tmp_path.iterdir()) == []


def test_a_reward_model_with_another_tokenizer_is_refused(tmp_path, monkeypatch, reward_run):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(reward_run / "checkpoint", tmp_path / "other")
    for path in (tmp_path / "other").glob("*token*"):
        path.unlink()
    word_tokenizer(TEMPLATE).save_pretrained(tmp_path / "other")
    message = exit_message(ppo_rlhf, reward_model=str(tmp_path / "other"), run_dir="mine")
    assert f"--reward-model {tmp_path / 'other'}" in message and "tokenizer" in message
    assert not (tmp_path / "mine").exists()


BAD_SETTINGS = [
    (ppo_rlhf, {"reward_model": str(TINY)}, "models/tiny: a language model that gives no scores; .* reward_model.py"),
    (dpo, {"label_smoothing": 0.5}, "--label-smoothing 0.5"),
    (dpo, {"label_smoothing": -0.1}, "--label-smoothing -0.1"),
    (dpo, {"beta": 0.0}, "--beta 0.0: must be positive"),
    (dpo, {"beta": -1.0}, "--beta -1.0: must be positive"),
    (dpo, {"temperature": 0.0}, "--temperature 0.0"),
    (dpo, {"dataset": str(ROOT / "data" / "addition")}, "columns chosen and rejected; found prompt, answer"),
    (reward_model, {"dataset": str(ROOT / "data" / "addition")}, "columns chosen and rejected; found prompt, answer"),
    (reward_model, {"model": "no/such/model"}, "no/such/model: there is no such folder"),
    (dpo, {"model": "no/such/model"}, "--model no/such/model: there is no such folder"),
    (ppo_rlhf, {"reward_model": "no/such/model"}, "no/such/model: there is no such folder"),
    (ppo_rlhf, {"reward_model": "none", "prompts_per_step": 6, "minibatch_size": 4}, "not a multiple of"),
    (ppo_rlhf, {"reward_model": "none", "gae_lambda": 1.5}, "--gae-lambda 1.5: must be at most 1"),
    (ppo_rlhf, {"reward_model": "none", "gamma": 1.01}, "--gamma 1.01: must be at most 1"),
    (ppo_rlhf, {"reward_model": "none", "kl_coef": -1.0}, "--kl-coef -1.0"),
    *(
        (script, {"max_completion_length": 250}, "make 2[5-9][0-9] tokens, over the context of 256")
        for script in (reward_model, dpo)
    ),
]


@pytest.mark.parametrize("script, settings, expected", BAD_SETTINGS)
def test_bad_settings_exit_with_one_line_and_leave_nothing_behind(
    tmp_path, monkeypatch, few, script, settings, expected
):
    monkeypatch.chdir(tmp_path)
    settings = settings if script is ppo_rlhf else {"dataset": few} | settings
    assert re.search(expected, exit_message(script, **settings, run_dir="mine"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_folder_that_exists_is_left_alone(tmp_path, script):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    settings = {"reward_model": "none"} if script is ppo_rlhf else {}
    assert "mine exists" in exit_message(script, run_dir=str(tmp_path / "mine"), **settings)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("script, other", list(permutations([*SCRIPTS, grpo, sft], 2)))
def test_resume_of_a_run_of_another_script(tmp_path, script, other):
    saved = asdict(other.Args())
    (tmp_path / "args.json").write_text(json.dumps(saved))
    assert "another script or version" in exit_message(script, resume=str(tmp_path))
    assert [json.loads(path.read_text()) for path in tmp_path.iterdir()] == [saved]


def test_resume_with_another_flag(tmp_path):
    for script in SCRIPTS:
        (tmp_path / "args.json").write_text(json.dumps(asdict(script.Args())))
        message = exit_message(script, resume=str(tmp_path), learning_rate=1e-5, num_steps=9)
        assert "drop --learning-rate;" in message and "only --num-steps" in message


# ---- killed and resumed


def flags_of(args):
    changed = {f.name: getattr(args, f.name) for f in fields(args) if getattr(args, f.name) != f.default}
    return [text for name, value in changed.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def load_state(run, folder):
    """Everything in the newest state of a run: parameters and what the optimizer keeps, by name."""
    (state,) = (run / "state").iterdir()
    dcp_to_torch_save(state, folder / "state.pt")
    flat, todo = {}, [("", torch.load(folder / "state.pt", weights_only=False))]
    while todo:
        name, value = todo.pop()
        if isinstance(value, dict | list):
            todo += [
                (f"{name}/{key}", v) for key, v in (value.items() if isinstance(value, dict) else enumerate(value))
            ]
        else:
            flat[name] = value
    return flat


@pytest.mark.usefixtures("few_norm_samples")
@pytest.mark.parametrize(("script", "kill_at_call"), [(reward_model, 5), (dpo, 5), (ppo_rlhf, 10)], ids=NAMES)
def test_run_killed_once_and_resumed_is_bit_identical(tmp_path, script, kill_at_call, few, reward_run):
    """The killed run is a process of its own; the others are in this one, which has not seen what that one did."""
    reference, run = tmp_path / "reference", tmp_path / "run"
    settings = {"num_steps": 6, "eval_every": 3, "save_every": 2}
    if script is ppo_rlhf:
        texts = (ROOT / "data" / "addition" / "sft.jsonl").read_text().splitlines(keepends=True)[:50]
        (tmp_path / "texts.jsonl").write_text("".join(texts))
        settings |= {"ptx_coef": 0.5, "ptx_dataset": str(tmp_path / "texts.jsonl")}
    args = [small_args(script, folder, few, reward_run / "checkpoint", **settings) for folder in (reference, run)]
    kill = KILLS["in the first step after a save"].replace("KILL_AT_CALL", str(kill_at_call))
    process = start(script.__name__, flags_of(args[1]), f"script.NORM_SAMPLES = 16\n{kill}")
    script.main(args[0])
    finish(process, -signal.SIGKILL)
    assert logged(run)[-1]["step"] == 4 and len(logged(run)) == 5
    assert [path.name for path in (run / "state").iterdir()] == ["00000004"]
    script.main(script.Args(resume=str(run)))
    assert len(logged(run)) == 7
    assert_same_run(run, reference)
    state, expected = load_state(run, tmp_path), load_state(reference, tmp_path)
    assert state.keys() == expected.keys() and any("exp_avg" in name for name in state)
    assert any("value_model" in name for name in state) == (script is ppo_rlhf)
    for name, value in expected.items():
        assert torch.equal(state[name], value) if torch.is_tensor(value) else state[name] == value, name


def test_resumed_dpo_reads_its_reference_from_the_run_folder(tmp_path, few):
    """A file with other numbers shows which are used; computed anew they would be those of the trained policy."""
    run = tmp_path / "run"
    settings = {"num_steps": 1, "eval_prompts": 3, "eval_dataset": ""}
    dpo.main(small_args(dpo, run, few, None, **settings))
    for name in ("train", "held_out"):
        path = run / f"reference_{name}.json"
        chosen, rejected = json.loads(path.read_text())
        assert len(chosen) == len(rejected) >= {"train": 60, "held_out": 3}[name] and max(chosen + rejected) <= 0
        path.write_text(json.dumps([[value - 1000 for value in chosen], rejected]))
    texts = [(run / f"reference_{name}.json").read_text() for name in ("train", "held_out")]
    dpo.main(dpo.Args(resume=str(run), num_steps=2))
    last = logged(run)[2]
    assert last["pair/chosen_log_ratio"] == pytest.approx(1000, abs=20) and abs(last["pair/rejected_log_ratio"]) < 20
    assert last["eval/pair_chosen_log_ratio"] == pytest.approx(1000, abs=20)
    assert texts == [(run / f"reference_{name}.json").read_text() for name in ("train", "held_out")]


@pytest.mark.usefixtures("few_norm_samples")
def test_resumed_ppo_reads_its_normalisation_from_the_run_folder(tmp_path, pairs, reward_run):
    run = tmp_path / "run"
    ppo_rlhf.main(small_args(ppo_rlhf, run, pairs, reward_run / "checkpoint", num_steps=1, eval_prompts=0))
    (run / "normalization.json").write_text('{"mean": -1000.0, "std": 2.0}')
    ppo_rlhf.main(ppo_rlhf.Args(resume=str(run), num_steps=2))
    assert logged(run)[2]["score/mean"] == pytest.approx(500, abs=20)


def test_resumed_dpo_refuses_other_pairs(tmp_path, few):
    run = tmp_path / "run"
    shutil.copytree(few, tmp_path / "pairs")
    dataset = str(tmp_path / "pairs")
    dpo.main(small_args(dpo, run, dataset, None, num_steps=1, eval_prompts=0, eval_dataset=""))
    lines = (tmp_path / "pairs" / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "pairs" / "train.jsonl").write_text("".join(lines[:-9]))
    assert "data was" in exit_message(dpo, resume=str(run), num_steps=2)


# ---- two ranks

# Runs each job twice: one step, then resumed to three. Each rank writes what it was told by all_reduce.
RANKS = """
import importlib, json, os, sys
jobs, folder = json.loads(sys.argv[1]), sys.argv[2]
told = {}
for name, settings in jobs:
    script, numbers = importlib.import_module(name), told.setdefault(name, [])
    script.NORM_SAMPLES = 16
    reduce_metrics = script.reduce_metrics
    script.reduce_metrics = lambda metrics: numbers.append(reduce_metrics(metrics)) or numbers[-1]
    script.main(script.Args(**settings))
    if name == "ppo_rlhf":
        sync_sampler = script.sync_sampler
        def sync(policy, sampler):
            sync_sampler(policy, sampler)
            numbers.append([p.double().abs().sum().item() for p in sampler.parameters()])
            numbers.append([policy.score_mean, policy.score_std])
        script.sync_sampler = sync
    script.main(script.Args(resume=settings["run_dir"], num_steps=3))
with open(f"{folder}/rank{os.environ['RANK']}.json", "w") as file:
    json.dump(told, file)
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, few, reward_run):
    """The folder of runs of the three scripts on two ranks; of 3 held-out pairs and 1 prompt, some ranks have fewer."""
    folder = tmp_path_factory.mktemp("ranks")
    jobs = []
    for script in SCRIPTS:
        settings = {"num_steps": 1, "microbatch_tokens": 320, "eval_prompts": 1 if script is ppo_rlhf else 3}
        args = small_args(script, folder / script.__name__, few, reward_run / "checkpoint", **settings)
        jobs.append((script.__name__, {f.name: getattr(args, f.name) for f in fields(args)}))
    (folder / "each.py").write_text(RANKS)
    run_on_ranks(folder / "each.py", json.dumps(jobs), folder, HF_DATASETS_CACHE=str(folder / "cache"))
    return folder, dict(jobs)


@pytest.mark.parametrize("script", [reward_model, dpo])
def test_two_ranks_train_as_one_process_does(tmp_path, two_ranks, script):
    folder, jobs = two_ranks
    script.main(script.Args(**{**jobs[script.__name__], "run_dir": str(tmp_path / "run")}))
    script.main(script.Args(resume=str(tmp_path / "run"), num_steps=3))
    lines, expected = logged(folder / script.__name__), logged(tmp_path / "run")
    assert [line["step"] for line in lines] == [line["step"] for line in expected] == [0, 1, 2, 3]
    for line, other in zip(lines, expected):
        assert line.keys() == other.keys()
        for key in line:
            # Samples differ by rank; before the first step of DPO every margin is 0 but for its last bits.
            if "pass@" not in key and not (script is dpo and key.endswith("pair_accuracy") | ("/accuracy" in key)):
                assert line[key] == pytest.approx(other[key], rel=1e-4, abs=2e-5), (line["step"], key)


def test_two_ranks_of_ppo_log_finite_numbers_and_resume(two_ranks):
    folder, _ = two_ranks
    lines = logged(folder / "ppo_rlhf")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(line["optim/grad_norm"] > 0 and line["rollout/completions"] == 8 for line in lines[1:])
    assert all(line["policy/approx_kl"] > 0 for line in lines[1:])
    assert len({line["optim/grad_norm"] for line in lines[1:]}) == 3
    assert min(shares_changed(folder / "ppo_rlhf" / "checkpoint")) > 0.5


@pytest.mark.parametrize("name", NAMES)
def test_ranks_agree(two_ranks, name):
    """On summed metrics, and for PPO on the sampler's parameters and the normalisation."""
    told = [json.loads((two_ranks[0] / f"rank{rank}.json").read_text())[name] for rank in (0, 1)]
    assert len(told[0]) >= 3 and told[0] == told[1]


# ---- the scripts' help


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_has_one_line_of_ascii_help(script):
    help_lines = parse_help(script)
    assert list(help_lines) == names_of(script)
    assert len(help_lines) <= (40 if script is ppo_rlhf else 32)
    for text in help_lines.values():
        assert text.isascii() and text.strip() and "\n" not in text


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_states_both_defaults_where_they_depend_on_the_model(script):
    help_lines = parse_help(script)
    optional = {f.name for f in fields(script.Args) if f.default is None}
    assert optional == {*script.DEFAULTS, "model", "dataset", "run_dir", "resume"}
    for name, values in script.DEFAULTS.items():
        embedded, real = re.search(r"\(embedded: (\S+); real: ([^,)]+)", help_lines[name]).groups()
        if isinstance(values[0], str):
            assert values == (str(ROOT / embedded), "") and real in ("none", "must be given")
        else:
            assert (float(embedded), float(real)) == values


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("model, which", [(None, 0), (str(TINY), 0), ("some/model", 1)])
def test_defaults_follow_the_model(script, model, which):
    resolved = script.resolve_args(script.Args(model=model))
    expected = {name: values[which] for name, values in script.DEFAULTS.items()}
    assert {name: getattr(resolved, name) for name in expected} == expected
    assert script.resolve_args(script.Args(model=model, num_steps=7)).num_steps == 7
