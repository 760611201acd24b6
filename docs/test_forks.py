"""Tests of docs/forks/: its diffs apply to the scripts, its forks train, and wrong losses fail."""

import itertools
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import details
import pytest
import torch
from processes import run_on_ranks
from sync_copies import MARKER
from test_fork import edited
from toy import (
    LOSS,
    ROOT,
    add_pairs,
    call,
    gradient_of,
    load_module,
    parse,
    read_jsonl,
    read_oracle,
    tensor,
    write_jsonl,
)
from toy import relative_error as error
from transformers import AutoTokenizer

import dpo
import grpo
import ppo_rlhf

SCRIPTS = {"maxrl": grpo, "dppo": grpo, "gdpo": grpo, "ipo": dpo, "simpo": dpo, "ptx": ppo_rlhf}
PAGES = {name: (ROOT / "docs" / "forks" / f"{name}.md").read_text(encoding="utf-8") for name in SCRIPTS}
INTRODUCTION = (ROOT / "docs" / "fork.md").read_text(encoding="utf-8")
COPY = "    cp {1}.py my_{0}.py\n    sed -n '/^--- my_{0}.py/,/^```$/p' docs/forks/{0}.md | git apply -p0\n"
ONE_LINE = {  # {one-line fork: (old text in grpo.py, new text)}
    name: (old, new)
    for name, old, new in re.findall(r"^- \*\*(.+?)\*\*.*\n +`(.+)`\n +becomes `(.+)`", INTRODUCTION, re.M)
}
each_fork = pytest.mark.parametrize("name", SCRIPTS)


@pytest.fixture(scope="module")
def rows():
    """The model of docs/details.py, and all of its completions; their log-probabilities (N, T) have a graph."""
    model = details.new_model()
    logprobs = details.at_tokens(details.next_logits(model).log_softmax(-1))
    return SimpleNamespace(model=model, logprobs=logprobs, probabilities=logprobs.sum(1).exp(), right=details.REWARDS)


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    """Make a folder with the scripts and the forks that the pages' commands create, as {name: module}."""
    folder = tmp_path_factory.mktemp("forks")
    for name in ("docs", "models", "data"):
        (folder / name).symlink_to(ROOT / name)
    for name, script in SCRIPTS.items():
        shutil.copy(ROOT / f"{script.__name__}.py", folder)
        command = COPY.format(name, script.__name__)
        assert command in PAGES[name]
        subprocess.run(["sh", "-c", command], cwd=folder, check=True)
    return {name: load_module(folder / f"my_{name}.py") for name in SCRIPTS}


def source_of(module):
    return Path(module.__file__).read_text(encoding="utf-8")


# ---- losses by hand and exact gradients; each check must fail on the wrong versions below


def loss_of(fork, logprobs, old_logprobs, advantages, mask, **settings):
    """Return a fork's policy_loss without a reference, and its metrics as pairs of floats."""
    inputs = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages, "completion_mask": mask}
    loss, metrics = call(fork.policy_loss, LOSS | {"sampler_logprobs": old_logprobs} | inputs | settings)
    return loss, add_pairs([metrics])


def check_maxrl(fork, rows):
    """The groups of four have one, three, none and all right. Over all groups of three, it is log p to second order."""
    rewards = tensor([1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1])
    expected = tensor([3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0, 0, 0, 0, 0, 0, 0])
    torch.testing.assert_close(fork.compute_advantages(rewards, 4), expected, rtol=1e-12, atol=1e-12)
    p = rows.probabilities @ rows.right
    exact = gradient_of(rows.model, -(1 - p) - (1 - p) ** 2 / 2)
    groups = tensor([*itertools.product([0, 1], repeat=3)])  # (8, 3)
    own = fork.compute_advantages(groups.flatten(), 3).view(8, 3)[:, 0]  # (8,), of the first in each group
    others = groups[:, 1:].sum(1)
    chances = p.detach() ** others * (1 - p.detach()) ** (2 - others)  # (8,), the probability of the two others
    wrong, right = ((chances * own)[groups[:, 0] == kind].sum() for kind in (0, 1))
    advantages = torch.where(rows.right > 0, right, wrong) * details.LENGTHS
    assert error(expected_gradient(fork, rows, advantages), exact) < 1e-9


def expected_gradient(fork, rows, advantages, **settings):
    """Return minus the mean gradient of a loss that is linear in advantages, where nothing has moved."""
    weighed = advantages * rows.probabilities.detach()
    loss, _ = loss_of(fork, rows.logprobs, rows.logprobs.detach(), weighed, details.MASK.bool(), **settings)
    return -gradient_of(rows.model, loss)


def check_dppo(fork, rows):
    """The second and fourth of six tokens are outside. The third and sixth moved back, and the fifth only a little."""
    new = tensor([[0.3, 0.5, 0.3, 0.9], [0.3, 0.005, 0.6, 0.9]])
    old = tensor([[0.2, 0.2, 0.6, 0.1], [0.5, 0.010, 0.3, 0.1]])  # the last column is padding
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])
    logprobs = new.log().requires_grad_()
    loss, metrics = loss_of(fork, logprobs, old.log(), tensor([2.0, -1.0]), mask, clip_eps=0.15)
    loss.backward()
    assert loss.item() == pytest.approx(-2 * (1.5 + 0.5) / 3 + (0.5 + 2.0) / 3, rel=1e-12)
    expected = tensor([[-2 * 1.5, 0.0, -2 * 0.5, 0.0], [0.0, 0.5, 2.0, 0.0]]) / 3
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-12, atol=1e-15)
    assert [metrics[f"policy/clip_fraction_{side}"] for side in ("low", "high")] == [(1, 6), (1, 6)]
    # If nothing has moved, it is the gradient of the expected reward, divided by each completion's length.
    advantages = rows.right - (rows.probabilities @ rows.right).detach()
    exact = gradient_of(rows.model, (rows.probabilities * advantages / details.LENGTHS).sum())
    assert error(expected_gradient(fork, rows, advantages, clip_eps=0.15), exact) < 1e-9


def check_gdpo(fork, *_):
    """Of a group of four, one is right and two others have the format. Then come TRL's numbers."""
    right, format = tensor([1, 0, 0, 0]), tensor([0, 1, 1, 0])
    sums = (right - 0.25) / (0.5 + 1e-4) + (format - 0.5) / (1 / 3**0.5 + 1e-4)
    expected = sums / ((sums.square().sum().item() / 3) ** 0.5 + 1e-4)
    parts = [{"right": a, "format": b} for a, b in zip(right.tolist(), format.tolist())]
    torch.testing.assert_close(fork.compute_advantages(parts, 4), expected, rtol=1e-12, atol=0)
    for case in read_oracle("gdpo_trl"):
        groups = tensor(case["inputs"]["rewards"])  # (B/G, G, K)
        scores = [dict(enumerate(parts)) for group in groups.tolist() for parts in group]
        found = fork.compute_advantages(scores, groups.shape[1])
        torch.testing.assert_close(found, tensor(case["outputs"]["advantages"]), rtol=1e-7, atol=1e-7)
    # The mean of the first three numbers is not 0.1, but 0.10000000000000002.
    assert fork.compute_advantages([0.1, 0.1, 0.1, 1, 0, 0], 3).tolist()[:3] == [0, 0, 0]


def results_of(fork, inputs, *settings):
    """Return the loss, the gradients by the chosen and the rejected log-probabilities, and the metrics."""
    inputs = [value.clone() for value in inputs]
    for value in inputs[:2]:
        value.requires_grad_()
    loss, metrics = fork.preference_loss(*inputs, *settings)
    loss.backward()
    return loss.item(), inputs[0].grad, inputs[1].grad, metrics


def check_ipo(fork, *_):
    """Margins are 1 and -3 nats; their target is 2, or -2 if labels are swapped. Then come DPO's authors' numbers."""
    inputs = [tensor(x) for x in ([-3.0, -5.0], [-4.0, -4.0], [-4.0, -4.0], [-4.0, -6.0])]
    for smoothing in (0.0, 0.1):
        loss, chosen, rejected, _ = results_of(fork, inputs, 0.25, smoothing)
        assert loss == pytest.approx((1 - smoothing) * (1 + 25) + smoothing * (9 + 1), rel=1e-12)
        gradient = tensor([2 * ((1 - smoothing) * (h - 2) + smoothing * (h + 2)) for h in (1, -3)])
        torch.testing.assert_close((chosen, rejected), (gradient, -gradient), rtol=1e-12, atol=0)
    cases = [case for case in read_oracle("dpo_eric_mitchell") if case["config"]["ipo"]]
    assert {case["config"]["beta"] for case in cases} == {0.1, 0.5}
    for case in cases:
        names = [f"{which}_{kind}_logps" for which in ("policy", "reference") for kind in ("chosen", "rejected")]
        given = [tensor(case["inputs"][name]) for name in names]
        loss, chosen, _, _ = results_of(fork, given, case["config"]["beta"], 0.0)
        assert loss / len(chosen) == pytest.approx(case["outputs"]["loss"], rel=1e-9)
        torch.testing.assert_close(chosen / len(chosen), tensor(case["outputs"]["grad_chosen"]), rtol=1e-9, atol=1e-12)


def check_simpo(fork, *_):
    """Means per token are -1 and -4 nats, and -4 and -0.5 nats. With a beta of 2, the margins are 6 and -7."""
    logprobs = [tensor([-3.0, -8.0]), tensor([-4.0, -2.0])]
    lengths = torch.tensor([[3, 1], [2, 4]])
    for refs in ([tensor([0.0, 0.0])] * 2, [tensor([-7.0, 1.0]), tensor([2.0, -3.0])]):
        loss, chosen, rejected, metrics = results_of(fork, [*logprobs, *refs], lengths, 2.0, 0.5)
        assert loss == pytest.approx(math.log(1 + math.exp(-5.5)) + math.log(1 + math.exp(7.5)), rel=1e-12)
        slopes = 2.0 * tensor([-5.5, 7.5]).sigmoid()
        gradients = -slopes / lengths[:, 0], slopes / lengths[:, 1]
        torch.testing.assert_close((chosen, rejected), gradients, rtol=1e-12, atol=0)
        found = [metrics[f"pair/{key}"] for key in ("accuracy", "margin", "chosen_reward", "rejected_reward")]
        assert found == [(1, 2), (-1.0, 2), (-10.0, 2), (-9.0, 2)]


def check_ptx(fork, *_):
    """The gradient is that of -0.7 times the mean log-likelihood, which plain forward passes give."""
    models = {"model": ROOT / "models/tiny", "reward_model": ROOT / "models/tiny-reward", "tiny": True}
    args = parse(fork, ptx_coef=0.7, temperature=0.5, microbatch_tokens=40, **models)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    policy = fork.load_policy(args, tokenizer, torch.device("cpu"))
    texts = ["12+34=46", "<|user|>1+2=<|assistant|>\\boxed{3}<|end|>", "", "7", "1+2=3;" * 30]  # the last is cut off
    metrics = fork.accumulate_ptx(policy, tokenizer, [{"text": text} for text in texts], args)
    found = torch.cat([weight.grad.flatten() for weight in policy.parameters()])
    likelihoods = []
    for line in [tokenizer(text)["input_ids"][:80] for text in texts if len(text) > 1]:
        logprobs = policy.model(torch.tensor([line])).logits[0, :-1].log_softmax(-1)
        likelihoods.append(logprobs[range(len(line) - 1), line[1:]])
    mean = torch.cat(likelihoods).mean()
    assert error(found, gradient_of(policy.model, -0.7 * mean)) < 1e-4
    [(total, count)] = add_pairs(metrics).values()
    assert total / count == pytest.approx(-mean.item(), rel=1e-4)


CHECKS = {"maxrl": check_maxrl, "dppo": check_dppo, "gdpo": check_gdpo}
CHECKS |= {"ipo": check_ipo, "simpo": check_simpo, "ptx": check_ptx}
GROUP_STD, MOVED, PARTS = "groups.std(1, keepdim=True)", "advantages.sign() * moved", "scores], dtype=torch.float64)"
WRONG = [  # (fork, old text, new text)
    ("maxrl", "mean.clamp(min=1e-4)", GROUP_STD),
    ("maxrl", "(groups - mean)", "groups"),
    ("dppo", MOVED, "advantages.sign() * (ratio - 1)"),
    ("dppo", MOVED, "moved.abs()"),
    ("dppo", "torch.where(outside, 0.0, -ratio * advantages)", "-ratio * advantages"),
    ("dppo", "torch.where(mask, weight * token_loss, 0.0)", "weight * token_loss"),
    ("gdpo", PARTS, f"{PARTS}.sum(1, keepdim=True)"),
    ("gdpo", "advantages / (mean_metrics(", "advantages  # ("),
    ("gdpo", "torch.where(equal, 0.0, advantages)", "advantages"),
    ("ipo", "(margins - 0.5)", "(margins - 1.0)"),
    ("ipo", "(margins - 0.5) ** 2 / beta**2", "(margins / beta - 0.5) ** 2"),
    ("ipo", "(margins + 0.5)", "(margins - 0.5)"),
    ("simpo", "(chosen_logprobs / lengths[:, 0] -", "(chosen_logprobs -"),
    ("simpo", "(chosen_logprobs /", "(chosen_log_ratios /"),
    ("simpo", "margins - gamma", "margins + gamma"),
    ("ptx", "loss = -logprobs.sum()", "loss = logprobs.sum()"),
    ("ptx", "mask, 1.0)", "mask, args.temperature)"),
    ("ptx", "loss / num_tokens", "loss / mask.sum()"),
]


@each_fork
@pytest.mark.usefixtures("alone")
def test_loss_by_hand_and_exact_gradient(name, forks, rows):
    CHECKS[name](forks[name], rows)


@pytest.mark.parametrize("name, old, new", WRONG)
@pytest.mark.usefixtures("alone")
def test_a_wrong_loss_is_caught(name, old, new, forks, tmp_path, rows):
    wrong = edited(source_of(forks[name]), {old: new}, tmp_path / "wrong.py")
    with pytest.raises(AssertionError):
        CHECKS[name](wrong, rows)


# ---- training


@each_fork
def test_forks_train(name, forks, tmp_path, monkeypatch):
    """The rewards of GDPO have parts; the texts of PPO-ptx become more likely."""
    fork, settings = forks[name], {"prompts_per_step": 4, "group_size": 4, "warmup_steps": 0, "learning_rate": 4e-4}
    if name == "gdpo":
        parts = [{"right": right, "even": even} for right in (0.0, 1.0) for even in (0.0, 1.0)]
        monkeypatch.setattr(fork, "score_completions", lambda texts, _rows: [parts[len(text) % 4] for text in texts])
    if SCRIPTS[name] is dpo:
        pairs = read_jsonl(ROOT / "data" / "preferences" / "train.jsonl")[:40]
        settings = {"dataset": write_jsonl(tmp_path / "pairs.jsonl", pairs)}
    if name == "ptx":
        (tmp_path / "texts").mkdir()
        write_jsonl(tmp_path / "texts/train.jsonl", [{"text": f"{i}+1={i + 1}"} for i in range(10, 80)])
        settings = {"prompts_per_step": 16, "ptx_dataset": tmp_path / "texts", "learning_rate": 1e-3, "ptx_coef": 10.0}
    sizes = {"num_steps": 2, "eval_prompts": 4, "minibatch_size": 8, "seed": 3}
    fork.main(parse(fork, run_dir=tmp_path / "run", **sizes | settings))
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(line["optim/grad_norm"] > 0 for line in lines[1:])
    if name == "gdpo":
        assert all("reward/right" in line and "reward/even" in line for line in lines[1:])
    if name == "ptx":
        assert lines[2]["loss/ptx"] < lines[1]["loss/ptx"] - 0.5


RANKS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import my_gdpo, my_ptx
device = my_ptx.init_ranks()
rank, world_size = my_ptx.RANK, my_ptx.WORLD_SIZE
scores = [{"right": i % 5 == 0, "even": i % 3 == 0} for i in range(12)]
scores = scores if world_size == 1 else (scores[:8], scores[8:])[rank]
args = my_ptx.TINY
args.microbatch_tokens = 20
tokenizer = my_ptx.AutoTokenizer.from_pretrained(args.model)
policy = my_ptx.load_policy(args, tokenizer, device)
rows = [{"text": "1+2=3;" * number} for number in (1, 2, 3, 4, 5, 6)]
metrics = my_ptx.accumulate_ptx(policy, tokenizer, rows[rank::world_size], args)
gradients = [weight.grad for weight in policy.parameters()]
gradients = [weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in gradients]
gradient = torch.cat([weight.flatten() for weight in gradients])
torch.save((my_gdpo.compute_advantages(scores, 4), gradient), f"{sys.argv[2]}/{world_size}{rank}.pt")
my_ptx.dist.destroy_process_group()
"""


def test_gdpo_and_ptx_divide_by_numbers_of_all_ranks(forks, tmp_path, monkeypatch):
    """Of GDPO's groups one rank has two and the other has one; the texts of PPO-ptx differ in length."""
    folder = Path(forks["ptx"].__file__).parent
    monkeypatch.setattr(sys, "argv", ["ranks.py", str(folder), str(tmp_path)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    exec(RANKS, {})
    (tmp_path / "ranks.py").write_text(RANKS)
    run_on_ranks(tmp_path / "ranks.py", folder, tmp_path)
    [(advantages, gradient), *ranks] = [torch.load(tmp_path / f"{name}.pt") for name in ("10", "20", "21")]
    found = torch.cat([own for own, _ in ranks])
    torch.testing.assert_close(found, advantages, rtol=1e-12, atol=0)
    assert all(error(own, gradient) < 1e-5 for _, own in ranks)


@each_fork
def test_forks_edit_nothing_below_the_line(name, forks):
    source, changed = source_of(SCRIPTS[name]), source_of(forks[name])
    assert changed != source and changed.partition(MARKER)[2] == source.partition(MARKER)[2]
    assert f"](forks/{name}.md)" in INTRODUCTION


# ---- one-line forks, in fork.md


def check_short(name, script):
    """Check by hand: soft gates at ratios of 1.5 and 0.5; weights of 0.4, 0.6, 1.8 and 3; groups of four or five."""
    if name == "MC-GRPO":  # the groups have many values, two right, three right, or all equal
        rewards = tensor([0.1, 0.2, 0.9, 0.4, 0.3, 1, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1])
        centred = tensor([-0.2, -0.1, 0.6, 0.1, 0.0, 1, 0, 0, 0, 1, 0, 0, -1, -1, 0, 0, 0, 0, 0, 0])
        stds = tensor([0.097**0.5, 0.3**0.5, 0.3**0.5, 0.0]).repeat_interleave(5)  # 0.388 / 4, and 1.2 / 4
        found = script.compute_advantages(rewards, 5)
        return torch.testing.assert_close(found, centred / (stds + 1e-4), rtol=1e-12, atol=1e-15)
    if name == "REINFORCE++":
        found = script.compute_advantages(tensor([1, 0, 0, 0, 1, 1, 0, 0]), 4)
        centred = tensor([0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5])
        expected = centred / (math.sqrt((0.75**2 + 3 * 0.25**2 + 4 * 0.5**2) / 7) + 1e-4)
        return torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    old, mask = tensor([[-2.0, -3.0, -1.0, -1.5]] * 2), torch.ones(2, 4)
    ratios = tensor([[1.5, 0.5, 1.0, 1.0]] * 2) if name == "SAPO" else torch.ones(2, 4).double()
    weights = tensor([[0.4, 0.6, 1.8, 3.0]] * 2) if name == "IcePop" else torch.ones(2, 4).double()
    advantages, sampler = tensor([2.0, -1.0]), old - weights.log()
    loss, _ = loss_of(script, old + ratios.log(), old, advantages, mask, sampler_logprobs=sampler)
    gates = [sum(4 / tau / (1 + math.exp(-tau * (ratio - 1))) for ratio in (1.5, 0.5, 1.0, 1.0)) for tau in (1.0, 1.05)]
    expected = {"SAPO": -2 * gates[0] / 4 + gates[1] / 4, "IcePop": -(2 - 1) * (0.6 + 1.8) / 4}
    assert loss.item() == pytest.approx(expected[name], rel=1e-9)


@pytest.mark.parametrize("name", ["SAPO", "IcePop", "MC-GRPO", "REINFORCE++"])
def test_forks_of_one_line_are_those_of_their_papers(name, tmp_path):
    old, new = ONE_LINE[name]
    check_short(name, edited(source_of(grpo), {old: new}, tmp_path / "short.py"))
    with pytest.raises(AssertionError):
        check_short(name, grpo)
