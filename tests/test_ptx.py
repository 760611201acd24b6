"""ppo_rlhf.py --ptx-coef: its gradient against the plain log-likelihood, the texts it reads, runs with and without."""

import json
import re

import pytest
import torch
from preference_ranks import TEXTS, build_actor_critic
from test_cli import write_lines
from test_preference_runs import exit_message
from tiny import PAD_ID, relative_error

import ppo_rlhf

SMALL = {"num_steps": 1, "prompts_per_step": 8, "minibatch_size": 4, "max_completion_length": 8, "eval_prompts": 0}
SMALL |= {"reward_model": "none", "update_epochs": 1, "seed": 3}


# ---- the gradient


def gradients(policy, budget=10_000, coef=0.7):
    """The returned mean, and the gradients of policy and value model."""
    policy.zero_grad()
    args = ppo_rlhf.Args(ptx_coef=coef, microbatch_tokens=budget, temperature=0.5)
    mean = ppo_rlhf.accumulate_ptx(policy, ppo_rlhf.collate(TEXTS, PAD_ID, "cpu"), args)
    found = torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])
    return mean, found, [parameter.grad for parameter in policy.value_model.parameters()]


def test_gradient_is_that_of_the_plain_log_likelihood_of_the_trained_tokens():
    """Row by row without padding, by Hugging Face's own forward pass; at temperature 1, whatever samples."""
    policy, losses = build_actor_critic(), []
    for text in TEXTS:
        logprobs = policy.model(torch.tensor([text["ids"]])).logits[0].log_softmax(-1)
        losses += [-logprobs[t - 1, text["ids"][t]] for t in range(len(text["ids"])) if text["trained"][t]]
    expected = torch.autograd.grad(torch.stack(losses).mean(), list(policy.model.parameters()))
    mean, found, of_values = gradients(policy)
    assert mean == pytest.approx(sum(losses).item() / len(losses), rel=1e-12)
    assert relative_error(found, 0.7 * torch.cat([gradient.flatten() for gradient in expected])) < 1e-12
    assert all(gradient is None for gradient in of_values)


@pytest.mark.parametrize("budget", [1, 20, 40])
def test_microbatches_change_neither_gradient_nor_mean(budget):
    policy = build_actor_critic()
    whole, found = gradients(policy), gradients(policy, budget)
    assert found[0] == pytest.approx(whole[0], rel=1e-12) and relative_error(found[1], whole[1]) < 1e-12


def test_it_is_added_to_what_is_there():
    policy = build_actor_critic()
    _, found, _ = gradients(policy)
    ppo_rlhf.accumulate_ptx(
        policy, ppo_rlhf.collate(TEXTS, PAD_ID, "cpu"), ppo_rlhf.Args(ptx_coef=0.7, microbatch_tokens=30)
    )
    both = torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])
    assert relative_error(both, 2 * found) < 1e-12


# ---- texts


def read(path, rows, **settings):
    """The texts of a file with what is trained of them, and the report."""
    write_lines(path, *rows)
    settings = {"eval_prompts": 0, "max_prompt_length": 8, "max_completion_length": 6} | settings
    args = ppo_rlhf.Args(ptx_dataset=str(path), **settings)
    tokenizer = ppo_rlhf.load_tokenizer(ppo_rlhf.MODEL)
    texts, report = ppo_rlhf.load_texts(args, tokenizer)
    assert all(text["start"] == text["trained"].index(True) for text in texts)
    parts = [
        (tokenizer.decode(text["ids"][: text["start"]]), tokenizer.decode(text["ids"][text["start"] :]))
        for text in texts
    ]
    return parts, report


TURNS = {"prompt": "1+2=", "completion": "3"}
OF_TURNS = ("<|user|>1+2=<|assistant|>", "3<|end|>")


@pytest.mark.parametrize(
    "rows, parts, said",
    [
        ([{"text": "12+34=46"}, {"text": "1+2=3"}], [("1", "2+34=4"), ("1", "+2=3")], ": 2 training rows"),
        ([{"text": ""}, {"text": "7"}, {"text": None}, {"text": "1+"}], [("1", "+")], "3 dropped, without a token"),
        ([TURNS, TURNS | {"prompt": "1+" * 9}], [OF_TURNS], "1 dropped, longer than 8 + 6 tokens"),
        ([{"text": "1+1=2"}, TURNS], [("1", "+1=2"), OF_TURNS], ": 2 training rows"),
    ],
)
def test_rows_with_text_or_as_in_sft(tmp_path, monkeypatch, rows, parts, said):
    """What is trained follows a prompt, or the first token of a text, which is cut to 6 more."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    found, report = read(tmp_path / "texts.jsonl", rows)
    assert found == parts
    assert said in report and report.startswith("\n--ptx-dataset: ") and report.count("\n") == 1


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"ptx_dataset": ""}, "--ptx-dataset is missing: give a file of rows with text, or with prompt and completion"),
        ({"ptx_dataset": "no_such.jsonl"}, "--ptx-dataset no_such.jsonl: there is no such file or folder"),
        ({"ptx_dataset": "number.jsonl"}, r"--ptx-dataset .*number.jsonl: training row 1: text must be a text, not 5"),
        ({"ptx_dataset": "columns.jsonl"}, r"--ptx-dataset .*columns.jsonl: training row 1: needs a column prompt"),
        ({"ptx_dataset": "empty.jsonl"}, r"--ptx-dataset .*empty.jsonl: cannot be loaded: it has no rows"),
        ({"ptx_dataset": "short.jsonl"}, r"--ptx-dataset .*short.jsonl: 0 training rows .*1 dropped, without a token"),
        ({"ptx_coef": -1.0}, "--ptx-coef -1.0: must be at least 0"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, monkeypatch, settings, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name, rows in {
        "number": [{"text": 5}],
        "columns": [{"words": "a"}],
        "empty": [],
        "short": [{"text": "7"}],
    }.items():
        write_lines(tmp_path / f"{name}.jsonl", *rows)
    message = exit_message(ppo_rlhf, run_dir="mine", **SMALL | {"ptx_coef": 1.0} | settings)
    assert re.search(expected, message), message
    assert not (tmp_path / "mine").exists()


# ---- runs


def run(folder, **settings):
    ppo_rlhf.main(ppo_rlhf.Args(run_dir=str(folder), **SMALL | settings))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_without_it_no_text_is_read(tmp_path):
    (_, line) = run(tmp_path / "run", ptx_dataset="no_such_file.jsonl")
    assert "loss/ptx" not in line and line["loss/value"] > 0


def test_every_optimizer_step_has_as_many_texts_as_completions(tmp_path, monkeypatch):
    """In the order of pick_rows, over the steps of the run; the metric is their mean, before the coefficient."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(10, 21)]
    write_lines(tmp_path / "texts.jsonl", *rows)
    accumulate, seen, means = ppo_rlhf.accumulate_ptx, [], []

    def recorded(policy, batch, args):
        seen.extend(batch["prompt_ids"].tolist())
        means.append(accumulate(policy, batch, args))
        return means[-1]

    monkeypatch.setattr(ppo_rlhf, "accumulate_ptx", recorded)
    lines = run(tmp_path / "run", num_steps=2, ptx_coef=0.5, ptx_dataset=str(tmp_path / "texts.jsonl"))[1:]
    assert len(means) == 4 and len(seen) == 16
    assert len({*map(tuple, seen[:11])}) == 11  # a pass over all before any comes again
    assert [line["loss/ptx"] for line in lines] == pytest.approx([sum(means[:2]) / 2, sum(means[2:]) / 2])
    saved = json.loads((tmp_path / "run" / "args.json").read_text())
    assert saved["run"]["data"][-1].startswith("--ptx-dataset: 11 training rows (")
