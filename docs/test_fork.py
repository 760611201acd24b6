"""What docs/fork.md shows is true: its diffs apply to grpo.py, its forks train, and its test knows a wrong loss."""

import importlib
import inspect
import math
import re
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import WITHOUT_KL, random_inputs
from sync_copies import MARKER
from tiny import ROOT, build_model, load_module, make_args, make_batch, parse, read_jsonl, record, relative_error

import cispo
import grpo

PAGE = (ROOT / "docs" / "fork.md").read_text(encoding="utf-8")
DIFFS = dict(re.findall(r"^```diff\n--- (\w+)\.py\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
[TEST] = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
COPY = "    cp grpo.py {0}.py\n    sed -n '/^--- {0}.py/,/^```$/p' docs/fork.md | git apply -p0\n"
SIZES = {"prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "warmup_steps": 0, "learning_rate": 4e-4}
TWO_GROUPS = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0]), 3
WRONG = {  # mistakes in the loss of my_cispo.py: what is replaced by what
    "the gradient goes through the ratio": ("ratio.detach().clamp", "ratio.clamp"),
    "no cap": (".clamp(max=1 + clip_eps)", ""),
    "a bound below": (".clamp(max=1 + clip_eps)", ".clamp(1 - clip_eps, 1 + clip_eps)"),
    "capped tokens are dropped": ("* advantages * logprobs", "* advantages * logprobs * (ratio < 1 + clip_eps)"),
    "the wrong sign": ("token_loss = -weight", "token_loss = weight"),
    "a mean in place of the sum": ("token_loss, 0.0).sum()", "token_loss, 0.0).mean()"),
    "padding counts": ("torch.where(mask, token_loss, 0.0).sum()", "token_loss.sum()"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """grpo.py of now and the forks that the page's own commands make of it, beside the embedded model."""
    folder = tmp_path_factory.mktemp("forks")
    for name in ("docs", "models", "data"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "grpo.py", folder)
    for name in DIFFS:
        assert COPY.format(name) in PAGE
        subprocess.run(["sh", "-c", COPY.format(name)], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def forks(folder):
    """{name: module} of the forks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield {name: importlib.import_module(name) for name in DIFFS}


def train(fork, folder):
    """A run of two steps of two minibatches: its metrics, samples, and the divisors and tokens of its rollouts."""
    with pytest.MonkeyPatch.context() as patch:
        calls = record(patch, fork, "accumulate_gradients")
        fork.main(parse(fork, run_dir=folder, num_steps=2, eval_prompts=4, seed=3, **SIZES))
    lines, samples = read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "samples.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(line["optim/grad_norm"] > 0 and line["policy/approx_kl"] > 0 for line in lines[1:])
    divisors, tokens = zip(*((given[3], given[1]["completion_mask"].sum().item()) for given, _ in calls))
    return lines, samples, divisors, tokens


def failures(fork):
    """The names of the page's tests, and those of them that this module fails where the page has its fork."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "my_cispo", fork)
        names = {}
        exec(TEST, names)
    tests, failed = [name for name in names if name.startswith("test_")], []
    for name in tests:
        try:
            names[name]()
        except AssertionError:
            failed.append(name)
    return tests, failed


@pytest.mark.parametrize("name", DIFFS)
def test_a_fork_adds_at_most_ten_lines_and_only_the_entropy_bonus_edits_below_the_line(name, folder):
    added = [line for line in DIFFS[name].splitlines()[1:] if line.startswith("+")]
    source, fork = ((folder / f"{script}.py").read_text(encoding="utf-8") for script in ("grpo", name))
    assert 1 <= len(added) <= 10 and source != fork
    assert (source.partition(MARKER)[2] == fork.partition(MARKER)[2]) == (name != "my_entropy")


def test_the_length_penalty_is_what_the_page_says(forks, tmp_path):
    lines, samples, divisors, _ = train(forks["my_short"], tmp_path / "run")
    found = {(text, reward) for line in samples for text, reward in zip(line["completions"], line["rewards"])}
    right = [(text, reward) for text, reward in found if reward]
    assert right and len(right) < len(found) and divisors == (8,) * 4
    assert [reward for _, reward in right] == pytest.approx([0.5 ** (len(text) / 1000) for text, _ in right])
    assert lines[0]["eval/reward"] < lines[0]["eval/accuracy"]  # which counts is_right


def test_cispo_trains_on_token_means_without_a_reference(forks, tmp_path):
    lines, _, divisors, tokens = train(forks["my_cispo"], tmp_path / "run")
    assert [sum(divisors[:2]), sum(divisors[2:])] == [tokens[0], tokens[2]]
    assert not any(key in lines[-1] for key in ("loss/kl", "policy/ref_kl", "policy/clip_fraction_low"))


def test_the_fork_has_the_loss_and_the_gradient_of_cispo(forks):
    inputs, results = random_inputs() | WITHOUT_KL, []
    for script, settings in ((cispo, {"clip_eps_high": 0.2}), (forks["my_cispo"], {"clip_eps": 0.2})):
        logprobs = inputs["logprobs"].clone().requires_grad_()
        given = inputs | settings | {"logprobs": logprobs}
        names = inspect.signature(script.policy_loss).parameters
        loss, metrics = script.policy_loss(**{name: given[name] for name in names if name in given})
        loss.backward()
        capped = metrics.get("policy/cap_fraction", metrics.get("policy/clip_fraction_high"))
        results.append([loss.item(), capped.item(), *logprobs.grad.flatten().tolist()])
    assert results[0] == results[1]
    assert cispo.compute_advantages(*TWO_GROUPS).tolist() == forks["my_cispo"].compute_advantages(*TWO_GROUPS).tolist()


def test_the_test_of_the_page_passes_on_its_fork_and_fails_on_grpo(forks):
    tests, failed = failures(forks["my_cispo"])
    assert len(tests) == 2 and not failed
    assert failures(grpo)[1] == tests


@pytest.mark.usefixtures("alone")
def test_entropies_have_the_gradient_of_plain_logits_in_the_fork_and_none_in_grpo(forks, tmp_path):
    """Of rows of advantage 0, without KL term: what is left is the bonus."""
    fork, model = forks["my_entropy"], build_model("llama")
    batch = make_batch(model)
    batch["advantages"], rows = torch.zeros_like(batch["advantages"]), torch.arange(8)
    inputs = [batch[key] for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")]
    assert not grpo.token_logprobs(model, *inputs, 0.7)[1].requires_grad
    mean_entropies = []
    for prompt_ids, prompt_mask, completion_ids, completion_mask in zip(*inputs):
        ids = torch.cat([prompt_ids[prompt_mask == 1], completion_ids[completion_mask == 1]]).unsqueeze(0)
        distributions = (model(ids).logits[0, prompt_mask.sum() - 1 : -1] / 0.7).log_softmax(-1)
        mean_entropies.append(-(distributions.exp() * distributions).sum(1).mean())
    exact = torch.autograd.grad(sum(mean_entropies) / 8, list(model.parameters()))
    args = make_args(fork, kl_coef=0.0, microbatch_tokens=20, entropy_coef=0.3)
    metrics = fork.accumulate_gradients(fork.LogprobModel(model), batch, rows, 8, True, args)
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert relative_error(-gradient, 0.3 * torch.cat([part.flatten() for part in exact])) < 1e-9
    assert metrics["policy/entropy"] > 0 and not metrics["policy/entropy"].requires_grad
    train(fork, tmp_path / "run")


@pytest.mark.parametrize("mistake", WRONG)
def test_the_test_of_the_page_fails_on_a_wrong_loss(mistake, folder, tmp_path):
    source, (old, new) = (folder / "my_cispo.py").read_text(encoding="utf-8"), WRONG[mistake]
    assert source.count(old) == 1
    (tmp_path / "wrong.py").write_text(source.replace(old, new), encoding="utf-8")
    assert failures(load_module(tmp_path / "wrong.py"))[1]
