"""A run's folder, its kills and resumes, and what it prints: python -m pytest tests/test_saved_runs.py"""

import dataclasses
import json
import shutil
import signal
import sys

import pytest
import torch
from processes import finish, kill_at, logged, start
from safetensors.torch import load_file
from torch.distributed.checkpoint import CheckpointException
from toy import EVERY, NAMES, SCRIPTS, TINY, parse, read_jsonl, short, train
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The folder of a run of grpo.py that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    train(grpo, folder, warmup_steps=2)
    return folder / "run"


def assert_same_run(run, expected):
    for name in sorted(path.name for path in expected.glob("*.jsonl")):
        assert logged(run, name) == logged(expected, name)
    checkpoints, expected_ones = (sorted(folder.glob("checkpoint-*")) for folder in (run, expected))
    assert not (run / "unfinished").exists()
    for checkpoint, right in zip(checkpoints, expected_ones, strict=True):
        assert checkpoint.name == right.name and (checkpoint / "state").exists() == (right / "state").exists()
        weights, right_weights = (load_file(folder / "model.safetensors") for folder in (checkpoint, right))
        assert all(torch.equal(weights[name], weight) for name, weight in right_weights.items())


@pytest.mark.parametrize("name", EVERY)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(name, tmp_path):
    """Its settings come from args.json, a flag wins over them, and the policy's own buffers are restored."""
    script, precision = EVERY[name], "bfloat16" if name in ("grpo", "ppo_rlhf", "dpo") else "float32"
    settings = {"precision": precision, "eval_every": 1, "save_every": 1}
    train(script, tmp_path, run_dir=tmp_path / "whole", num_steps=2, **settings)
    train(script, tmp_path, run_dir=tmp_path / "cut", num_steps=1, **settings)
    args = parse(script, resume=tmp_path / "cut", num_steps=2)
    assert args.learning_rate == 1e-3 and args.precision == precision
    script.main(args)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    assert len(read_jsonl(tmp_path / "cut/metrics.jsonl")) == 3


# A kill at these calls, where: in a step, while saving weights or the state, after the new checkpoint is there.
KILLS = {
    "in a step": kill_at("step_optimizer", "len(calls) == 7"),
    "before the state": kill_at("dcp_state.get_state_dict", "len(calls) == 2"),
    "after the state": kill_at("dcp.save", "len(calls) == 2"),
    "before older ones are removed": kill_at("Path.rename", "str(args[0]).endswith('unfinished') and len(calls) > 2"),
}


@pytest.mark.parametrize("when", KILLS)
def test_kill_9_costs_at_most_the_steps_since_the_last_save(when, whole_run, tmp_path):
    short(grpo, tmp_path, run_dir=tmp_path / "run", warmup_steps=2)
    finish(start("grpo", sys.argv[1:], KILLS[when]), -signal.SIGKILL)
    saves = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert saves == (["checkpoint-000002", "checkpoint-000004"] if "older" in when else ["checkpoint-000002"])
    assert (tmp_path / "run/unfinished").exists() == ("state" in when)
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # as a kill may cut a line off
    grpo.main(parse(grpo, resume=tmp_path / "run"))
    if "older" in when:  # nothing was left to do, also not to remove the older state
        shutil.rmtree(tmp_path / "run/checkpoint-000002/state")
    assert_same_run(tmp_path / "run", whole_run)


def test_a_run_that_was_never_saved_starts_over_and_no_run_is_overwritten(whole_run, tmp_path):
    short(grpo, tmp_path, run_dir=tmp_path / "run", warmup_steps=2)
    finish(start("grpo", sys.argv[1:], kill_at("step_optimizer", "len(calls) == 3")), -signal.SIGKILL)
    assert [line["step"] for line in read_jsonl(tmp_path / "run/metrics.jsonl")] == [0, 1]
    grpo.main(parse(grpo, resume=tmp_path / "run"))
    assert_same_run(tmp_path / "run", whole_run)
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(FileExistsError):
        train(grpo, tmp_path, run_dir=tmp_path / "run")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_a_checkpoint_is_the_model_and_stops_where_it_was_trained_to_stop(tmp_path, monkeypatch):
    """transformers loads it, with tied weights too, and decodes what the run's evaluation decoded."""
    model = AutoModelForCausalLM.from_pretrained(TINY)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path / "model")
    (tmp_path / "model/generation_config.json").unlink()
    seen, evaluate = [], grpo.sample_completions

    def record(sampler, tokenizer, rows, temperature, args):
        batch, texts = evaluate(sampler, tokenizer, rows, temperature, args)
        seen.append((rows, texts))
        return batch, texts

    monkeypatch.setattr(grpo, "sample_completions", record)
    train(grpo, tmp_path, model=tmp_path / "model", num_steps=2, learning_rate=1e-4, eval_prompts=12)
    checkpoint = tmp_path / "run/checkpoint-000002"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(checkpoint / "model.safetensors")
    rows, texts = seen[-1]
    for row, text in zip(rows, texts, strict=True):
        prompt = torch.tensor([row["prompt_ids"]])
        ids = loaded.generate(prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :]
        assert tokenizer.decode(ids[ids != 5]) == text and (ids[:-1] != 5).all()


def test_what_is_saved_logged_and_printed(tmp_path, capsys):
    lines = train(grpo, tmp_path)
    printed = capsys.readouterr().out
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert ["eval/accuracy" in line for line in lines] == [True, False, True, False, True]
    assert lines[0]["eval/accuracy"] == lines[0]["eval/reward"]
    assert 0 <= lines[0].get("eval/truncated", -1) <= 1 and "eval/truncated 0." in printed
    wanted = {"reward/mean", "reward/zero_std", "rollout/length_mean", "rollout/truncated", "policy/approx_kl"}
    wanted |= {"policy/ref_kl", "policy/sampler_kl", "policy/entropy", "loss/policy", "optim/grad_norm"}
    assert wanted | {"optim/learning_rate", "perf/rollout_seconds", "perf/step_seconds"} < lines[1].keys()
    samples = read_jsonl(tmp_path / "run/samples.jsonl")
    assert [sample["step"] for sample in samples] == [1, 2, 3, 4]
    for sample, line in zip(samples, lines[1:]):
        assert len(sample["completions"]) == len(sample["rewards"]) == 4
        rewards = [grpo.reward_fn(text, sample["answer"]) for text in sample["completions"]]
        assert sample["rewards"] == rewards
        assert 0 <= line["reward/mean"] <= 1
    saved = json.loads((tmp_path / "run/args.json").read_text())
    assert saved == vars(short(grpo, tmp_path)) | {"run_dir": str(tmp_path / "run")}
    for line in ("58 of 64 training rows", "56 of 64 training rows"):  # 8 are held out, of 64 // 5 at most
        assert (line in printed) == (line == "56 of 64 training rows")
    assert "step 0: eval/" in printed and "step 4: eval/" in printed
    assert f"step 1: prompt {samples[0]['prompt']!r}" in printed
    assert repr(samples[1]["completions"][3][-160:]) in printed
    assert f"saved {tmp_path}/run/checkpoint-000004" in printed
    older = tmp_path / "run" / "checkpoint-000002"
    assert (older / "model.safetensors").is_file() and not (older / "state").exists()


def test_runs_without_a_folder_get_one_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(grpo, tmp_path, run_dir=None, num_steps=1, seed=7)
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("grpo__7__1") and (folder / "checkpoint-000001/state").exists()


def test_weights_and_biases_gets_the_metrics(tmp_path, monkeypatch):
    import wandb

    wandb.teardown()  # a session that another test has begun keeps its settings
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    lines = train(grpo, tmp_path, num_steps=2, track=True)
    run_id = (tmp_path / "run/wandb_id").read_text()
    assert wandb.run.id == run_id and wandb.run.name == "run" and wandb.config["group_size"] == 4
    assert {name: wandb.run.summary[name] for name in lines[2]} == lines[2]
    wandb.teardown()  # it waits for wandb's own process
    assert [*tmp_path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")]
    grpo.main(parse(grpo, resume=tmp_path / "run", num_steps=3))
    assert wandb.run.id == run_id  # it goes on in its own run
    wandb.teardown()
    train(grpo, tmp_path, num_steps=1, track=True, run_dir=tmp_path / "other/run")
    assert wandb.run.id != run_id and wandb.run.name == "run"
    wandb.teardown()


# ---- rewards of one's own, and what stops or skips an update


def test_parts_of_rewards_are_added_logged_and_trained(tmp_path, monkeypatch):
    def in_parts(completion, answer):
        return {"right": float(grpo.is_correct(completion, answer)), "short": 0.5 if len(completion) < 15 else 0.0}

    monkeypatch.setattr(grpo, "reward_fn", in_parts)
    lines = train(grpo, tmp_path, num_steps=1)
    for line, prefix, mean in ((lines[0], "eval/reward", "eval/reward"), (lines[1], "reward", "reward/mean")):
        assert line[mean] == pytest.approx(line[f"{prefix}/right"] + line[f"{prefix}/short"])
        assert line[f"{prefix}/short"] > 0
    assert lines[0]["eval/accuracy"] == pytest.approx(lines[0]["eval/reward/right"])
    assert {*read_jsonl(tmp_path / "run/samples.jsonl")[0]["rewards"][0]} == {"right", "short"}


def run_with(monkeypatch, tmp_path, name, function, **settings):
    monkeypatch.setattr(grpo, name, function)
    return train(grpo, tmp_path, num_steps=2, eval_prompts=0, **settings)


@pytest.mark.parametrize("reward, norm", [(1.0, 0.0), (float("nan"), float("nan"))])
def test_a_gradient_that_is_zero_or_not_finite_makes_no_step(reward, norm, tmp_path, monkeypatch, capsys):
    """Also not by AdamW's momentum of the first step, in which rewards differ."""
    rewards = iter([0.0, 1.0] * 8 + [reward] * 16)
    lines = run_with(monkeypatch, tmp_path, "reward_fn", lambda *_: next(rewards), kl_coef=0.0, save_every=1)
    assert lines[1]["optim/grad_norm"] > 0 and str(lines[2]["optim/grad_norm"]) == str(norm)
    assert capsys.readouterr().out.count("skipped an optimizer step, because the gradient norm was") == 2
    key, weight = "optimizer.state.model.model.norm.weight.step", "policy.model.model.norm.weight"
    state = {key: torch.tensor(0.0), weight: torch.zeros(96)}
    torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "run/checkpoint-000002/state", no_dist=True)
    assert state[key] == 2  # both in the first step
    saved = load_file(tmp_path / "run/checkpoint-000002/model.safetensors")["model.norm.weight"]
    assert saved.isfinite().all() and torch.equal(saved, state[weight])


def test_a_weight_without_a_gradient_can_be_resumed(tmp_path, monkeypatch):
    """As an expert that no token has met: it has no moments."""
    load_model = grpo.load_model

    def with_one_more_weight(*given):
        model = load_model(*given)
        model.unused = torch.nn.Parameter(torch.zeros(2, dtype=model.dtype))
        return model

    monkeypatch.setattr(grpo, "load_model", with_one_more_weight)
    train(grpo, tmp_path, num_steps=1)
    grpo.main(parse(grpo, resume=tmp_path / "run", num_steps=2))
    assert len(read_jsonl(tmp_path / "run/metrics.jsonl")) == 3


def test_a_sampler_that_samples_from_another_policy_ends_the_run_unsaved(tmp_path, monkeypatch):
    draw = grpo.sample_tokens
    with pytest.raises(SystemExit, match="sampling and training disagree: a KL per token of"):
        run_with(monkeypatch, tmp_path, "sample_tokens", lambda logits, t: draw(logits / 4, t), save_every=1)
    assert not [*(tmp_path / "run").glob("checkpoint-*")]


def test_large_gradients_are_clipped_and_the_learning_rate_warms_up(tmp_path, monkeypatch):
    norms, rates, step = [], [], torch.optim.AdamW.step

    def record(optimizer, *rest):
        weights = optimizer.param_groups[0]["params"]
        norms.append(torch.stack([weight.grad.norm() for weight in weights]).norm().item())
        rates.append(optimizer.param_groups[0]["lr"])
        return step(optimizer, *rest)

    monkeypatch.setattr(torch.optim.AdamW, "step", record)
    lines = train(grpo, tmp_path, num_steps=4, warmup_steps=2, max_grad_norm=1e-3, eval_prompts=0)
    assert norms == pytest.approx([1e-3] * 8, rel=1e-3)
    assert all(line["optim/grad_norm"] > 2e-3 for line in lines[1:])  # as they were
    assert [line["optim/learning_rate"] for line in lines[1:]] == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3])
    assert rates == pytest.approx([5e-4] * 2 + [1e-3] * 6)


# ---- flags


def test_defaults_are_those_of_the_model_that_is_named(tmp_path):
    for name, script in EVERY.items():
        tiny, real = parse(script), parse(script, model="some/model")
        assert tiny == script.TINY and tiny.model == str(TINY / "config.json" if name == "sft" else TINY)
        assert real == script.Args(model="some/model")
        assert real.dataset == "openai/gsm8k:main" or name in ("ppo_rlhf", "dpo", "reward_model", "sft")
        again = parse(script, model=tmp_path, tiny=True, num_steps=3)
        assert vars(again) == vars(script.TINY) | {"model": str(tmp_path), "tiny": True, "num_steps": 3}


def test_a_flag_has_one_type_in_all_scripts():
    types = {}
    for script in EVERY.values():
        for field in dataclasses.fields(script.Args):
            assert types.setdefault(field.name, field.type) == field.type and field.default is not None


def test_a_resumed_run_has_no_other_folder(tmp_path):
    train(grpo, tmp_path, num_steps=1)
    with pytest.raises(SystemExit, match="leave out --run-dir"):
        parse(grpo, resume=tmp_path / "run", run_dir=tmp_path / "other")
    (tmp_path / "run").rename(tmp_path / "moved")
    grpo.main(parse(grpo, resume=tmp_path / "moved", num_steps=2))
    assert len(read_jsonl(tmp_path / "moved/metrics.jsonl")) == 3 and not (tmp_path / "run").exists()


def test_a_run_whose_newest_state_is_missing_loses_nothing(tmp_path):
    train(grpo, tmp_path, num_steps=4)
    shutil.rmtree(tmp_path / "run/checkpoint-000004/state")
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointException):
        grpo.main(parse(grpo, resume=tmp_path / "run"))
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_a_maximum_norm_of_0_clips_nothing(tmp_path):
    runs = [train(grpo, tmp_path, run_dir=tmp_path / str(norm), num_steps=2, max_grad_norm=norm) for norm in (0.0, 1e9)]
    for ours, other in zip(*runs, strict=True):
        assert all(ours[key] == other[key] for key in ours if not key.startswith("perf/"))
    assert runs[0][2]["policy/ref_kl"] > 0


@pytest.mark.parametrize("name", ["grpo", "ppo_rlhf", "dpo", "sft"])
def test_a_run_that_is_shorter_than_its_warm_up_reaches_its_learning_rate(name, tmp_path):
    lines = train(EVERY[name], tmp_path, num_steps=4, warmup_steps=150, eval_prompts=0, save_every=4)
    assert [line["optim/learning_rate"] for line in lines[1:3]] == pytest.approx([5e-4, 1e-3])


@pytest.mark.parametrize("flags", [{"minibatch_size": 7}, {"prompts_per_step": 3}])
def test_sizes_that_do_not_fit_are_refused_at_once(flags, tmp_path):
    with pytest.raises(SystemExit, match="--minibatch-size must divide the"):
        train(grpo, tmp_path, **flags)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", NAMES)
def test_sizes_that_ranks_cannot_share_are_refused(name, monkeypatch):
    """By 3 ranks: prompts alone, and completions of an optimizer step alone."""
    script = SCRIPTS[name]
    monkeypatch.setattr(script, "WORLD_SIZE", 3)
    for sizes in ({"prompts_per_step": 4, "minibatch_size": 12}, {"prompts_per_step": 6, "minibatch_size": 8}):
        args = script.Args(group_size=12, prompts_per_step=sizes["prompts_per_step"])
        if name != "reinforce":
            args.minibatch_size = sizes["minibatch_size"]
        elif args.prompts_per_step % 3 == 0:
            continue
        with pytest.raises(SystemExit, match="of the 3 ranks"):
            script.check_args(args)


@pytest.mark.parametrize("name", EVERY)
def test_help_is_plain_ascii(name, capsys):
    """Greek letters would break it on some consoles, so the module's docstring is not in it."""
    with pytest.raises(SystemExit):
        parse(EVERY[name], help=True)
    printed = capsys.readouterr().out
    for flag in ("--model", "--learning-rate", "--resume"):
        assert flag in printed
    assert printed.translate(dict.fromkeys(map(ord, "─│╭╮╰╯"))).isascii()
