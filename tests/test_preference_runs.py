"""Real runs of reward_model.py, dpo.py and ppo_rlhf.py, alone and one after the other."""

import json
import math
import shutil
from pathlib import Path

import details
import pytest
import torch
from processes import compare_killed_and_resumed, logged, run_on_ranks
from tiny import ROOT, TEMPLATE, TINY, exit_line, load_scorer, parse, shares_changed, word_tokenizer
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import dpo
import grpo
import ppo_rlhf
import reward_model
import sft

SCRIPTS = [reward_model, dpo, ppo_rlhf]
NAMES = [script.__name__ for script in SCRIPTS]
SMALL = {
    "reward_model": {"minibatch_size": 8},
    "dpo": {"minibatch_size": 8},
    "ppo_rlhf": {"prompts_per_step": 8, "minibatch_size": 4, "update_epochs": 1, "max_completion_length": 24},
}
SMALL = {name: {"eval_prompts": 3, "warmup_steps": 2, "seed": 3, **sizes} for name, sizes in SMALL.items()}


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """A folder with the first of the embedded pairs; beside it one of fewer, and one of sums."""
    folder = tmp_path_factory.mktemp("data")
    kinds = ("preferences", "pairs", (448, 64)), ("preferences", "few", (64, 16)), ("addition", "sums", (64, 16))
    for source, name, sizes in kinds:
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
def runs(tmp_path_factory, pairs):
    """The folders of a short run of each script, that of ppo_rlhf.py with the reward model of the first."""
    runs = {name: tmp_path_factory.mktemp("runs") / name for name in NAMES}
    sizes = {"num_steps": 20, "minibatch_size": 32, "learning_rate": 1e-3, "warmup_steps": 4}
    settings = {"reward_model": {"dataset": pairs, "eval_prompts": 64, **sizes}}
    sizes = {"num_steps": 14, "minibatch_size": 32, "learning_rate": 2e-4, "warmup_steps": 2}
    settings["dpo"] = {"dataset": pairs, "eval_prompts": 64, "beta": 0.1, **sizes}
    sizes = {"num_steps": 12, "prompts_per_step": 32, "minibatch_size": 16, "update_epochs": 2, "warmup_steps": 2}
    sizes |= {"learning_rate": 4e-4, "value_learning_rate": 1e-3, "kl_coef": 0.02}
    settings["ppo_rlhf"] = {"reward_model": str(runs["reward_model"] / "checkpoint"), "eval_prompts": 16, **sizes}
    for script in SCRIPTS:
        script.main(parse(script, run_dir=runs[script.__name__], eval_every=20, **settings[script.__name__]))
    return runs


@pytest.fixture(scope="session")
def scorer(runs):
    return str(runs["reward_model"] / "checkpoint")


@pytest.fixture
def few_norm_samples(monkeypatch):
    monkeypatch.setattr(ppo_rlhf, "NORM_SAMPLES", 16)


def small_settings(script, run, pairs, scorer, **settings):
    """Settings of a run as small as useful."""
    own = {"run_dir": str(run), "dataset": pairs, **SMALL[script.__name__]}
    if script is ppo_rlhf:
        own |= {"dataset": str(Path(pairs).parent / "sums"), "reward_model": str(scorer)}
    return own | settings


def run_small(script, *given, **settings):
    script.main(parse(script, **small_settings(script, *given, **settings)))


def mean(lines, key):
    return sum(line[key] for line in lines) / len(lines)


# ---- learning


@pytest.mark.parametrize("name", NAMES)
def test_a_run_writes_its_parts_and_a_line_of_finite_metrics_a_step(runs, name):
    run, lines = runs[name], logged(runs[name])
    assert [line["step"] for line in lines] == list(range(len(lines))) and len(lines) > 9
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(line["optim/grad_norm"] > 0 and line["optim/learning_rate"] >= 0 for line in lines[1:])
    assert all(key.startswith(("eval/", "step")) for key in lines[0]) and len(lines[0]) > 3
    names = {path.name for path in run.iterdir()}
    assert names >= {"args.json", "metrics.jsonl", "checkpoint", "state"}
    for file in ("samples.jsonl", "eval_samples.jsonl"):  # the others do not sample
        assert (file in names) == (name == "ppo_rlhf")
    assert [path.name for path in (run / "state").iterdir()] == [f"{len(lines) - 1:08d}"]


def test_a_reward_model_learns_to_prefer_shown_work(runs):
    lines = logged(runs["reward_model"])
    before, after = lines[0], lines[-1]
    assert after["eval/pair_loss"] < before["eval/pair_loss"] and after["eval/pair_accuracy"] > 0.5
    assert lines[-1]["optim/learning_rate"] < 1e-8 < lines[4]["optim/learning_rate"] == 1e-3  # warm-up, then a cosine
    for line in lines[1:]:
        assert line["pair/margin"] == pytest.approx(line["pair/chosen_score"] - line["pair/rejected_score"], abs=1e-5)


def test_dpo_learns_to_tell_pairs_apart(runs):
    lines = logged(runs["dpo"])
    before, after = lines[0], lines[-1]
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
    assert min(shares_changed(runs["dpo"] / "checkpoint")) > 0.5  # rows of unused tokens stay


def test_ppo_raises_the_score(runs):
    lines = logged(runs["ppo_rlhf"])
    assert abs(lines[1]["score/mean"]) < 0.7  # normalised on samples of the initial model; 4 standard errors
    assert mean(lines[-3:], "score/mean") > mean(lines[1:4], "score/mean") + 0.25
    assert lines[-1]["eval/score"] > lines[0]["eval/score"]
    assert all(line["policy/approx_kl"] > 0 for line in lines[1:])  # the second minibatch is off-policy
    assert lines[1]["rollout/ref_kl_sum"] == pytest.approx(0, abs=1e-3) and lines[-1]["policy/ref_kl"] > 0
    assert all(line["value/explained_variance"] <= 1 for line in lines[1:])
    assert mean(lines[-3:], "value/explained_variance") > lines[1]["value/explained_variance"]
    assert all(line["optim/value_grad_norm"] > 0 for line in lines[1:])
    assert min(shares_changed(runs["ppo_rlhf"] / "checkpoint")) > 0.5  # rows of unused tokens stay
    samples = logged(runs["ppo_rlhf"], "samples.jsonl")
    assert [sample["step"] for sample in samples] == list(range(1, 13))
    for sample in samples:
        assert sample["prompt"].endswith("=")
        assert len(sample["completions"]) == len(sample["scores"]) == 1 and math.isfinite(sample["scores"][0])


def test_without_a_reward_model_the_reward_of_reward_fn_is_the_score(tmp_path, monkeypatch, pairs):
    """Less the penalty of completions without a stop token; of each prompt with its own answer."""
    asked = []
    monkeypatch.setattr(ppo_rlhf, "reward_fn", lambda text, answer: asked.append((text, answer)) or len(text) / 10)
    run, sizes = tmp_path / "run", {"num_steps": 1, "eval_prompts": 0, "max_completion_length": 8}
    run_small(ppo_rlhf, run, pairs, "none", missing_stop_penalty=3.0, **sizes)
    [line], [sample] = logged(run), logged(run, "samples.jsonl")
    assert len(asked) == 8 and line["reward/mean"] == pytest.approx(sum(len(text) for text, _ in asked) / 80)
    assert 0 < line["rollout/truncated"] < 1 and line["optim/grad_norm"] > 0
    assert line["score/mean"] == pytest.approx(line["reward/mean"] - 3 * line["rollout/truncated"])
    assert sample["completions"] == [asked[0][0]]
    assert pytest.approx(len(asked[0][0]) / 10) in (sample["scores"][0], sample["scores"][0] + 3)
    assert sum(map(int, sample["prompt"].removesuffix("=").split("+"))) == int(asked[0][1])


@pytest.mark.usefixtures("few_norm_samples")
def test_without_kl_penalty_no_reference_is_loaded(tmp_path, monkeypatch, pairs, scorer):
    frozen, logprob_model = [], ppo_rlhf.LogprobModel
    monkeypatch.setattr(ppo_rlhf, "LogprobModel", lambda model: frozen.append(model) or logprob_model(model))
    for kl_coef in (0.0, 0.1):
        run = tmp_path / str(kl_coef)
        settings = {"num_steps": 1, "eval_prompts": 0, "kl_coef": kl_coef}
        run_small(ppo_rlhf, run, pairs, scorer, **settings)
        assert any("ref_kl" in key for key in logged(run)[0]) == bool(kl_coef)
        assert len(frozen) == 1 + bool(kl_coef)  # the policy, and its reference
        frozen.clear()


# ---- checkpoints, and one script after the other


@pytest.mark.usefixtures("alone")
def test_the_checkpoint_of_a_reward_model_scores_as_training_did_and_trained_further_keeps_its_head(
    tmp_path, runs, scorer, pairs
):
    checkpoint, last = scorer, logged(runs["reward_model"])[-1]
    model, info = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.num_labels == 1 and model.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.pad_token_id == model.config.pad_token_id != tokenizer.eos_token_id
    _, held_out = reward_model.load_pairs(reward_model.Args(dataset=pairs, eval_prompts=64), tokenizer)
    scores = []
    for key in ("chosen_ids", "rejected_ids"):
        encoded = [{"input_ids": pair["prompt_ids"] + pair[key]} for pair in held_out]
        with torch.no_grad():
            scores.append(model.eval()(**tokenizer.pad(encoded, return_tensors="pt", padding_side="right")).logits)
    margins = (scores[0] - scores[1]).squeeze(1)
    assert margins.mean().item() == pytest.approx(last["eval/pair_margin"], abs=1e-4)
    assert (margins > 0).float().mean().item() == pytest.approx(last["eval/pair_accuracy"], abs=0.02)
    settings = {"model": str(checkpoint), "num_steps": 0, "eval_prompts": 64}
    run_small(reward_model, tmp_path / "run", pairs, None, **settings)
    assert logged(tmp_path / "run")[0]["eval/pair_loss"] == pytest.approx(last["eval/pair_loss"], abs=1e-5)


@pytest.mark.usefixtures("alone")
def test_the_embedded_reward_model_tells_held_out_pairs_apart():
    """models/tiny-reward is what reward_model.py's default command leaves, and the default of ppo_rlhf.py."""
    folder = Path(parse(ppo_rlhf).reward_model)
    assert folder == ROOT / "models" / "tiny-reward"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4e6
    model, tokenizer = load_scorer(reward_model, folder)
    args = parse(reward_model)
    _, held_out = reward_model.load_pairs(args, tokenizer)
    assert len(held_out) == 512
    metrics = reward_model.evaluate(reward_model.ScoreModel(model), held_out, args)
    assert metrics["eval/pair_accuracy"] > 0.8
    accuracies = details.accuracy_by_kind(folder)
    assert len(accuracies) == 5
    assert min(accuracies["right work, wrong answer"], accuracies["right work, right answer"]) >= 0.93
    assert accuracies["right work, wrong work"] >= 0.65


def test_from_fine_tuning_to_dpo_to_evaluation(tmp_path, few):
    sizes = {"num_steps": 1, "minibatch_size": 8, "eval_prompts": 4}
    lines = (ROOT / "data" / "addition" / "sft.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "sft.jsonl").write_text("".join(lines[:64]))
    data = str(tmp_path / "sft.jsonl")
    sft.main(parse(sft, model=TINY, dataset=data, run_dir=tmp_path / "sft", **sizes))
    settings = {"model": str(tmp_path / "sft" / "checkpoint"), "num_steps": 2, "learning_rate": 1e-4}
    run_small(dpo, tmp_path / "dpo", few, None, eval_prompts=8, **settings)
    model = str(tmp_path / "dpo" / "checkpoint")
    settings = {"dataset": str(Path(few).parent / "sums"), "num_steps": 0, "eval_prompts": 8, "seed": 3}
    grpo.main(parse(grpo, model=model, rollout_batch_size=3, run_dir=tmp_path / "grpo", **settings))
    (line,) = logged(tmp_path / "grpo")
    assert {*line} == {"step", "eval/accuracy", "eval/pass@1", "eval/pass@4", "eval/reward"}
    answers = [(row["completion"], row["answer"]) for row in logged(tmp_path / "grpo", "eval_samples.jsonl")]
    assert len(answers) == 8 and line["eval/accuracy"] == sum(grpo.is_right(*pair) for pair in answers) / 8


# ---- bad input


def test_a_reward_model_with_another_tokenizer_is_refused(tmp_path, scorer):
    shutil.copytree(scorer, tmp_path / "other", ignore=shutil.ignore_patterns("*token*"))
    word_tokenizer(TEMPLATE).save_pretrained(tmp_path / "other")
    message = exit_line(ppo_rlhf, reward_model=str(tmp_path / "other"), run_dir=str(tmp_path / "mine"))
    assert message.startswith(f"--reward-model {tmp_path / 'other'}: its tokenizer is not that of")


# ---- killed and resumed


def load_state(run, folder):
    """Everything in the newest state of a run: parameters and what the optimizer keeps, by name."""
    (state,) = (run / "state").iterdir()
    dcp_to_torch_save(state, folder / "state.pt")
    flat, todo = {}, [("", torch.load(folder / "state.pt", weights_only=False))]
    while todo:
        name, value = todo.pop()
        if isinstance(value, dict | list):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            todo += [(f"{name}/{key}", inner) for key, inner in pairs]
        else:
            flat[name] = value
    return flat


@pytest.mark.usefixtures("few_norm_samples")
@pytest.mark.parametrize(("script", "kill_at_call"), [(reward_model, "5"), (dpo, "5"), (ppo_rlhf, "10")], ids=NAMES)
def test_run_killed_once_and_resumed_is_bit_identical(tmp_path, monkeypatch, script, kill_at_call, few, scorer):
    settings = {"num_steps": 6, "eval_every": 3, "save_every": 2}
    if script is ppo_rlhf:
        texts = (ROOT / "data" / "addition" / "sft.jsonl").read_text().splitlines(keepends=True)[:50]
        (tmp_path / "texts.jsonl").write_text("".join(texts))
        settings |= {"ptx_coef": 0.5, "ptx_dataset": str(tmp_path / "texts.jsonl")}
    settings = small_settings(script, None, few, scorer, **settings)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if name != "run_dir"]
    more = "script.NORM_SAMPLES = 16\n"
    run, reference = compare_killed_and_resumed(script, flags, kill_at_call, tmp_path, monkeypatch, more)
    state, expected = load_state(run, tmp_path), load_state(reference, tmp_path)
    assert state.keys() == expected.keys() and any("exp_avg" in name for name in state)
    for part in ("critic", "score_std"):
        assert any(part in name for name in state) == (script is ppo_rlhf)
    for name, value in expected.items():
        assert torch.equal(state[name], value) if torch.is_tensor(value) else state[name] == value, name


# ---- two ranks

RANKS = """
import importlib, json, sys
import torch
from grpo import init_ranks
from tiny import parse
ranks = init_ranks()
for name, settings in json.loads(sys.argv[1]):
    script = importlib.import_module(name)
    script.NORM_SAMPLES = 16
    script.init_ranks, script.end_run = lambda: ranks, lambda *_: None  # one group of ranks for all runs
    script.main(parse(script, **settings))
    script.main(parse(script, resume=settings["run_dir"], num_steps=3))
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, few, scorer):
    """The folder of runs of the three scripts on two ranks, one step each, then resumed to three.

    Of 3 held-out pairs and 1 prompt some ranks have fewer.
    """
    folder = tmp_path_factory.mktemp("ranks")
    jobs = {}
    for script in SCRIPTS:
        settings = {"num_steps": 1, "microbatch_tokens": 320, "gradient_checkpointing": True}
        settings["eval_prompts"] = 1 if script is ppo_rlhf else 3
        jobs[script.__name__] = small_settings(script, folder / script.__name__, few, scorer, **settings)
    (folder / "each.py").write_text(RANKS)
    run_on_ranks(folder / "each.py", json.dumps(list(jobs.items())))
    return folder, jobs


@pytest.mark.parametrize("script", [reward_model, dpo])
def test_two_ranks_train_as_one_process_does(tmp_path, two_ranks, script):
    """Whatever the microbatches, and with activations recomputed or not."""
    folder, jobs = two_ranks
    others = {"run_dir": str(tmp_path / "run"), "microbatch_tokens": 100_000, "gradient_checkpointing": False}
    script.main(parse(script, **jobs[script.__name__] | others))
    script.main(parse(script, resume=tmp_path / "run", num_steps=3))
    lines, expected = logged(folder / script.__name__), logged(tmp_path / "run")
    assert [line["step"] for line in lines] == [line["step"] for line in expected] == [0, 1, 2, 3]
    for line, other in zip(lines, expected):
        assert line.keys() == other.keys()
        for key in line:
            # Before the first step of DPO every margin is 0 but for its last bits.
            if not (script is dpo and key.endswith("pair_accuracy") | ("/accuracy" in key)):
                assert line[key] == pytest.approx(other[key], rel=1e-4, abs=2e-5), (line["step"], key)


def test_two_ranks_of_ppo_log_finite_numbers_and_resume(two_ranks):
    folder, _ = two_ranks
    lines = logged(folder / "ppo_rlhf")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(line["optim/grad_norm"] > 0 for line in lines[1:])
    assert all(line["policy/approx_kl"] > 0 for line in lines[1:])
    assert len({line["optim/grad_norm"] for line in lines[1:]}) == 3
    assert min(shares_changed(folder / "ppo_rlhf" / "checkpoint")) > 0.5
