"""Tests of docs/forks/: its diffs apply to the scripts, its forks train, and wrong losses fail."""

import importlib
import itertools
import json
import math
import re
import shutil
import statistics
import subprocess
from pathlib import Path

import pytest
import torch
from processes import run_on_ranks
from sync_copies import MARKER
from toy import (
    LOSS,
    ROOT,
    add_pairs,
    build_model,
    call,
    gradient_of,
    load_module,
    pad,
    parse,
    read_jsonl,
    read_oracle,
    record,
    relative_error,
    tensor,
    write_jsonl,
)
from transformers import AutoTokenizer

import dpo
import grpo
import ppo_rlhf

SCRIPTS = {"maxrl": grpo, "dppo": grpo, "gdpo": grpo, "ipo": dpo, "simpo": dpo, "ptx": ppo_rlhf}
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "forks").glob("*.md"))}
INTRODUCTION = (ROOT / "docs" / "fork.md").read_text(encoding="utf-8")
COPY = "    cp {1}.py my_{0}.py\n    sed -n '/^--- my_{0}.py/,/^```$/p' docs/forks/{0}.md | git apply -p0\n"
ONE_LINE = {  # {one-line fork: (old text in grpo.py, new text)}
    name: (old, new)
    for name, old, new in re.findall(r"^- \*\*(.+?)\*\*.*\n +`(.+)`\n +becomes `(.+)`", INTRODUCTION, re.M)
}
each_fork = pytest.mark.parametrize("name", SCRIPTS)
KINDS = ("chosen", "rejected")


@pytest.fixture(scope="module")
def rows():
    """Every completion of two prompts, of up to three of five tokens of which 1 ends it; probabilities have a graph."""
    model = build_model("llama", vocab_size=5)
    completions = [list(tokens) for length in (1, 2, 3) for tokens in itertools.product(range(5), repeat=length)]
    completions = [ids for ids in completions if 1 not in ids[:-1] and (ids[-1] == 1 or len(ids) == 3)]
    ids, mask = pad(*zip(*itertools.product([[2, 3], [4, 1, 0, 2]], completions)))
    logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    logprobs = torch.nn.functional.pad(logprobs, (1, 0)) * mask  # (R, L)
    probabilities = logprobs.sum(1).exp()
    assert probabilities.sum().item() == pytest.approx(2)
    rewards = ((ids.sum(1) + mask.sum(1)) % 3).double()
    means = (probabilities.detach() * rewards).view(2, -1).sum(1)
    advantages = rewards - means.repeat_interleave(len(completions))
    names = ("model", "mask", "logprobs", "probabilities", "rewards", "advantages", "lengths")
    return dict(zip(names, (model, mask, logprobs, probabilities, rewards, advantages, mask.sum(1)), strict=True))


@pytest.fixture
def model(rows):
    return rows["model"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a folder with the current scripts, the bundled models, and the forks that the pages' commands create."""
    folder = tmp_path_factory.mktemp("forks")
    for name in ("docs", "models", "data"):
        (folder / name).symlink_to(ROOT / name)
    for name, script in SCRIPTS.items():
        shutil.copy(ROOT / f"{script.__name__}.py", folder)
        command = COPY.format(name, script.__name__)
        assert command in PAGES[name]
        subprocess.run(["sh", "-c", command], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def forks(folder):
    """Import the forks as {name: module}."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield {name: importlib.import_module(f"my_{name}") for name in SCRIPTS}


# ---- losses by hand and exact gradients; each check must fail on the wrong versions below


def loss_of(fork, logprobs, old_logprobs, advantages, mask, **settings):
    """Return a fork's policy_loss without a reference, and its metrics as pairs of floats."""
    inputs = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages, "completion_mask": mask}
    loss, metrics = call(fork.policy_loss, LOSS | {"sampler_logprobs": old_logprobs} | inputs | settings)
    return loss, add_pairs([metrics])


def check_maxrl(fork, model, rows):
    """The groups of four have one, three, none and all right. Over all groups of three, it is log p to second order."""
    rewards = tensor([1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1])
    expected = tensor([3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0, 0, 0, 0, 0, 0, 0])
    torch.testing.assert_close(fork.compute_advantages(rewards, 4), expected, rtol=1e-12, atol=1e-12)
    right = rows["rewards"] == 1
    p = (rows["probabilities"] * right).view(2, -1).sum(1)  # (2,), per prompt
    exact = gradient_of(model, -((1 - p) + (1 - p) ** 2 / 2).sum())
    groups = tensor([*itertools.product([0, 1], repeat=3)])  # (8, 3)
    own = fork.compute_advantages(groups.flatten(), 3).view(8, 3)[:, 0]  # (8,), of the first in each group
    others = groups[:, 1:].sum(1)
    p = p.detach().unsqueeze(1)
    chances = p**others * (1 - p) ** (2 - others)  # (2, 8), the probability of the two others
    mean = [(chances * own)[:, groups[:, 0] == kind].sum(1).repeat_interleave(len(right) // 2) for kind in (0, 1)]
    # The loss is linear in advantages. Multiply by the lengths, because it is a mean over each completion.
    advantages = torch.where(right, mean[1], mean[0]) * rows["probabilities"].detach() * rows["lengths"]
    logprobs = rows["logprobs"]
    loss, _ = loss_of(fork, logprobs, logprobs.detach(), advantages, rows["mask"])
    assert relative_error(gradient_of(model, loss), -exact) < 1e-9


def check_dppo(fork, model, rows):
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
    logprobs = rows["logprobs"]
    advantages = rows["advantages"] * rows["probabilities"].detach()
    loss, _ = loss_of(fork, logprobs, logprobs.detach(), advantages, rows["mask"], clip_eps=0.15)
    exact = gradient_of(model, (rows["probabilities"] * rows["advantages"] / rows["lengths"]).sum())
    assert relative_error(gradient_of(model, loss), -exact) < 1e-9


def check_gdpo(fork, *_):
    """Of the page's group of four, one is right and two others have the format. Then come TRL's numbers."""
    right, format = tensor([1, 0, 0, 0]), tensor([0, 1, 1, 0])
    sums = (right - 0.25) / (0.5 + 1e-4) + (format - 0.5) / (1 / 3**0.5 + 1e-4)
    expected = sums / ((sums.square().sum().item() / 3) ** 0.5 + 1e-4)
    parts = [{"right": a, "format": b} for a, b in zip(right.tolist(), format.tolist())]
    torch.testing.assert_close(fork.compute_advantages(parts, 4), expected, rtol=1e-12, atol=0)
    both = expected, grpo.compute_advantages(right + format, 4)
    shown = [0.69, 0.40, 0.40, -1.49], [0.50, 0.50, 0.50, -1.50]  # in the page's table
    torch.testing.assert_close(both, (tensor(shown[0]), tensor(shown[1])), rtol=0, atol=0.005)
    for case in read_oracle("gdpo_trl"):
        groups = tensor(case["inputs"]["rewards"])  # (B/G, G, K)
        scores = [dict(enumerate(parts)) for group in groups.tolist() for parts in group]
        found = fork.compute_advantages(scores, groups.shape[1])
        torch.testing.assert_close(found, tensor(case["outputs"]["advantages"]), rtol=1e-7, atol=1e-7)
        assert (found.view(groups.shape[:2])[(groups == groups[:, :1]).all(2).all(1)] == 0).all()
    numbers = [0.1, 0.1, 0.1, 1, 0, 0]  # the mean of the first three is not 0.1, but 0.10000000000000002
    found = fork.compute_advantages(numbers, 3).tolist()
    assert found[:3] == [0, 0, 0] and found == fork.compute_advantages([{"a": x} for x in numbers], 3).tolist()


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
    """The gradient is that of PPO's loss less 0.7 times the mean log-likelihood, which plain forward passes give."""
    models = {"model": ROOT / "models/tiny", "reward_model": ROOT / "models/tiny-reward", "tiny": True}
    args = parse(fork, ptx_coef=0.7, temperature=0.5, microbatch_tokens=40, **models)
    tokenizer, cpu = AutoTokenizer.from_pretrained(args.model), torch.device("cpu")
    policy, value_model = fork.load_policy(args, tokenizer, cpu), fork.load_scorer(args, tokenizer, cpu)
    ids, mask = pad([[3, 4], [5, 0, 1, 6]], [[7, 8, 9], [10, 5]])
    batch = {"ids": ids, "completion_mask": mask, "total_lengths": torch.tensor([5, 6])}
    noise = torch.randn(5, *ids.shape, generator=torch.Generator().manual_seed(0))
    batch |= dict(zip(("old_logprobs", "sampler_logprobs", "advantages", "old_values", "returns"), noise))
    texts = ["12+34=46", "<|user|>1+2=<|assistant|>\\boxed{3}<|end|>", "", "7", "1+2=3;" * 30]  # the last is cut off
    fork.accumulate_gradients(policy, value_model, batch, torch.arange(2), 6, args)
    metrics = fork.accumulate_ptx(policy, tokenizer, [{"text": text} for text in texts], args)
    found = torch.cat([weight.grad.flatten() for weight in policy.parameters()])
    logprobs, _ = policy(ids, mask, 0.5)
    names = ("old_logprobs", "sampler_logprobs", "advantages")
    loss, _ = fork.policy_loss(logprobs, *(batch[name] for name in names), mask, 0.2, 2.0)
    lines = [tokenizer(text)["input_ids"][:80] for text in texts]
    likelihoods = [
        policy.model(torch.tensor([line])).logits[0, :-1].log_softmax(-1)[range(len(line) - 1), line[1:]]
        for line in lines
        if len(line) > 1
    ]
    mean = torch.cat(likelihoods).mean()
    assert relative_error(found, gradient_of(policy.model, loss / 6 - 0.7 * mean)) < 1e-4
    [(total, count)] = add_pairs(metrics).values()
    assert total / count == pytest.approx(-mean.item(), rel=1e-4)


CHECKS = {name: globals()[f"check_{name}"] for name in SCRIPTS}
GROUP_STD, WHITEN = "groups.std(1, keepdim=True)", "advantages / (mean_metrics("
MOVED, PARTS = "advantages.sign() * moved", "scores], dtype=torch.float64)"
WRONG = {  # {fork: {mistake in its loss: (old text, new text)}}
    "maxrl": {
        "over the deviation": ("mean.clamp(min=1e-4)", "groups.std(1, keepdim=True)"),
        "not divided": (" / mean.clamp(min=1e-4)", ""),
        "no baseline": ("(groups - mean)", "groups"),
        "the mean of all groups": ("groups.mean(1, keepdim=True)  #", "groups.mean().expand(len(groups), 1)  #"),
        "the wrong sign": ("(groups - mean)", "(mean - groups)"),
    },
    "dppo": {
        "how far the ratio is from 1": (MOVED, "advantages.sign() * (ratio - 1)"),
        "log-probabilities": ("logprobs.detach().exp() - old_logprobs.exp()", "log_ratio"),
        "both directions": (MOVED, "moved.abs()"),
        "the other direction": (MOVED, "-advantages.sign() * moved"),
        "no bound below": (MOVED, "(advantages > 0) * moved"),
        "nothing is left out": ("torch.where(outside, 0.0, -ratio * advantages)", "-ratio * advantages"),
        "padding counts": ("torch.where(mask, weight * token_loss, 0.0)", "weight * token_loss"),
        "no ratio": ("-ratio * advantages", "-advantages * logprobs"),
        "a sum in place of the mean": ("(token_loss.sum(1) / lengths).sum()", "token_loss.sum()"),
        "the wrong sign": ("-ratio * advantages", "ratio * advantages"),
    },
    "gdpo": {
        "the parts are added up first": (PARTS, f"{PARTS}.sum(1, keepdim=True)"),
        "the first part alone": (".sum(2)", "[:, :, 0]"),
        "the std of all groups": (GROUP_STD, "groups.std((0, 1), keepdim=True)"),
        "not divided by the group's std": (f"({GROUP_STD} + 1e-4)", "1"),
        "not divided by the batch's std": (WHITEN, "advantages  # ("),
        "the batch's std with divisor B": ("len(scores) - 1 / WORLD_SIZE", "len(scores)"),
        "the batch's mean is subtracted": (WHITEN, WHITEN.replace("advantages", "(advantages - advantages.mean())")),
        "rounding": ("torch.where(equal, 0.0, advantages)", "advantages"),
        "the wrong sign": ("centred = groups -", "centred = -groups +"),
    },
    "ipo": {
        "twice the target": ("(margins - 0.5)", "(margins - 1.0)"),
        "the target without tau": ("(margins - 0.5) ** 2 / beta**2", "(margins / beta - 0.5) ** 2"),
        "not divided": ("(margins - 0.5) ** 2 / beta**2", "(margins - 0.5) ** 2"),
        "no square": ("(margins - 0.5) ** 2 / beta**2", "(margins - 0.5).abs() / beta"),
        "the wrong sign": ("(margins - 0.5)", "(margins + 0.5)"),
        "smoothed towards the same target": ("(margins + 0.5)", "(margins - 0.5)"),
    },
    "simpo": {
        "sums of log-probabilities": ("(chosen_logprobs / lengths[:, 0] -", "(chosen_logprobs -"),
        "the other's length": ("rejected_logprobs / lengths[:, 1])", "rejected_logprobs / lengths[:, 0])"),
        "log-ratios": ("(chosen_logprobs /", "(chosen_log_ratios /"),
        "no target": ("margins - gamma", "margins"),
        "the target on the other side": ("margins - gamma", "margins + gamma"),
        "the target times beta": ("margins - gamma", "margins - beta * gamma"),
        "the wrong sign": ("margins = beta", "margins = -beta"),
    },
    "ptx": {
        "the wrong sign": ("loss = -logprobs.sum()", "loss = logprobs.sum()"),
        "the temperature of samples": ("mask, 1.0)", "mask, args.temperature)"),
        "a mean per microbatch": ("loss / num_tokens", "loss / mask.sum()"),
        "no coefficient": ("(args.ptx_coef * loss", "(loss"),
        "texts are not cut off": ('["input_ids"][:limit]', '["input_ids"]'),
        "the second token is left out": ("torch.arange(len(text)) > 0", "torch.arange(len(text)) > 1"),
    },
}


@each_fork
@pytest.mark.usefixtures("alone")
def test_loss_by_hand_and_exact_gradient(name, forks, model, rows):
    CHECKS[name](forks[name], model, rows)


@pytest.mark.parametrize("name, mistake", [(name, mistake) for name in WRONG for mistake in WRONG[name]])
@pytest.mark.usefixtures("alone")
def test_a_wrong_loss_is_caught(name, mistake, folder, tmp_path, model, rows):
    source, (old, new) = (folder / f"my_{name}.py").read_text(encoding="utf-8"), WRONG[name][mistake]
    assert source.count(old) == 1
    (tmp_path / "wrong.py").write_text(source.replace(old, new), encoding="utf-8")
    with pytest.raises(AssertionError):
        CHECKS[name](load_module(tmp_path / "wrong.py"), model, rows)


@pytest.mark.parametrize("name", ["maxrl", "dppo", "ipo"])
def test_the_script_that_is_forked_has_another_loss(name, model, rows):
    with pytest.raises(AssertionError):
        CHECKS[name](SCRIPTS[name], model, rows)


# ---- training


def train(fork, folder, *names, **settings):
    """Train for two steps; return the metrics, and the calls of the named functions."""
    with pytest.MonkeyPatch.context() as patch:
        calls = [record(patch, fork, name) for name in names]
        fork.main(parse(fork, run_dir=folder, num_steps=2, eval_prompts=4, minibatch_size=8, seed=3, **settings))
    lines = read_jsonl(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(line["optim/grad_norm"] > 0 for line in lines[1:])
    return lines, *calls


ONLINE = {"prompts_per_step": 4, "group_size": 4, "warmup_steps": 0, "learning_rate": 4e-4}


@pytest.mark.parametrize("name", ["maxrl", "dppo"])
def test_forks_of_grpo_train(name, forks, tmp_path):
    lines, calls = train(forks[name], tmp_path / "run", "policy_loss", **ONLINE)
    assert calls and all(line["policy/approx_kl"] > 0 and "policy/ref_kl" in line for line in lines[1:])


def test_gdpo_trains_on_parts_and_leaves_out_completions_of_advantage_0(forks, tmp_path, monkeypatch):
    fork = forks["gdpo"]

    def score_completions(texts, rows):
        pairs = zip(texts, rows)
        return [{"right": fork.is_correct(text, row["answer"]), "even": len(text) % 2 == 0} for text, row in pairs]

    monkeypatch.setattr(fork, "score_completions", score_completions)
    names = "compute_advantages", "microbatches"
    lines, calls, passes = train(fork, tmp_path / "run", *names, kl_coef=0.0, **ONLINE)
    for ((scores, group_size), advantages), line in zip(calls, lines[1:], strict=True):
        assert group_size == 4 and advantages.any()
        for part in ("right", "even"):
            assert line[f"reward/{part}"] == statistics.mean(score[part] for score in scores)
    updates = passes[2:4], passes[6:8]  # each after the passes for the old log-probabilities
    for (_, advantages), pair in zip(calls, updates, strict=True):
        assert all(torch.equal(given[0]["advantages"], advantages.float()) for given, _ in pair)
        used = torch.cat([given[1] for given, _ in pair]).sort().values
        assert torch.equal(used, advantages.nonzero().flatten()) and len(used) < len(advantages)


RANKS = """
import json, sys
from pathlib import Path
folder, scores = Path(sys.argv[1]), json.loads(sys.argv[2])
sys.path.insert(0, str(folder))
import my_gdpo
my_gdpo.init_ranks()
scores = scores[:8] if my_gdpo.RANK == 0 else scores[8:]
Path(f"{my_gdpo.RANK}.json").write_text(json.dumps(my_gdpo.compute_advantages(scores, 4).tolist()))
my_gdpo.dist.destroy_process_group()
"""


@pytest.mark.usefixtures("alone")
def test_gdpo_divides_by_the_standard_deviation_over_all_ranks(forks, folder, tmp_path, monkeypatch):
    """One rank has two groups, the other has one."""
    monkeypatch.chdir(tmp_path)
    Path("ranks.py").write_text(RANKS)
    rights = [1, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 0]
    scores = [{"right": right, "even": i % 3 == 0} for i, right in enumerate(rights)]
    run_on_ranks(tmp_path / "ranks.py", folder, json.dumps(scores))
    found = [x for rank in (0, 1) for x in json.loads(Path(f"{rank}.json").read_text())]
    assert found == pytest.approx(forks["gdpo"].compute_advantages(scores, 4).tolist(), rel=1e-12)
    assert found[:8] != pytest.approx(forks["gdpo"].compute_advantages(scores[:8], 4).tolist(), rel=1e-3)


@pytest.mark.parametrize("name", ["ipo", "simpo"])
def test_forks_of_dpo_train(name, forks, tmp_path):
    pairs = read_jsonl(ROOT / "data" / "preferences" / "train.jsonl")[:40]
    dataset = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    names = ("pair_logprobs", "preference_loss")
    lines, passes, losses = train(forks[name], tmp_path / "run", *names, dataset=dataset, microbatch_tokens=10_000)
    assert all("pair/chosen_log_ratio" in line for line in lines[1:]) and "eval/pair_loss" in lines[-1]
    assert [len(given[0]) for given, _ in losses] == [4, 8, 8, 4]  # an evaluation, two steps, another evaluation
    for ((_, batch), logprobs), (given, _) in zip(passes[::2], losses, strict=True):  # the others are the reference's
        assert given[0].tolist() == logprobs[0].tolist()
        assert given[0].requires_grad == (len(given[0]) == 8)
        if name == "simpo":
            assert given[4].tolist() == torch.stack([batch[f"{kind}_mask"].sum(1) for kind in KINDS], 1).tolist()


def test_ptx_trains_on_as_many_texts_as_completions(forks, tmp_path):
    """No text comes twice before all have come once; they become more likely."""
    (tmp_path / "texts").mkdir()
    write_jsonl(tmp_path / "texts/train.jsonl", [{"text": f"{i}+1={i + 1}"} for i in range(10, 80)])
    sizes = {"prompts_per_step": 16, "ptx_dataset": tmp_path / "texts", "learning_rate": 1e-3, "ptx_coef": 10.0}
    lines, calls = train(forks["ptx"], tmp_path / "run", "accumulate_ptx", **sizes)
    texts = [row["text"] for (_, _, rows, _), _ in calls for row in rows]
    assert len(texts) == 2 * 2 * 16 and len({*texts}) == 64  # steps, epochs, completions
    assert lines[2]["loss/ptx"] < lines[1]["loss/ptx"] - 0.5
    assert all(line["loss/value"] > 0 and line["policy/approx_kl"] > 0 for line in lines[1:])


RANKS_OF_PTX = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
import my_ptx
device = my_ptx.init_ranks()
args = my_ptx.TINY
args.microbatch_tokens = 20
tokenizer = my_ptx.AutoTokenizer.from_pretrained(args.model)
policy = my_ptx.load_policy(args, tokenizer, device)
rows = [{"text": "1+2=3;" * number} for number in (1, 2, 3, 4, 5, 6)]
metrics = my_ptx.accumulate_ptx(policy, tokenizer, rows[my_ptx.RANK :: my_ptx.WORLD_SIZE], args)
mean = my_ptx.mean_metrics(metrics)["loss/ptx"]
gradient = torch.cat([weight.grad.full_tensor().flatten() for weight in policy.parameters()])
torch.save((mean, gradient), f"{my_ptx.RANK}.pt")
my_ptx.dist.destroy_process_group()
"""


@pytest.mark.usefixtures("alone")
def test_ptx_divides_by_the_tokens_of_all_ranks(forks, folder, tmp_path, monkeypatch):
    fork = forks["ptx"]
    monkeypatch.chdir(tmp_path)
    Path("ranks.py").write_text(RANKS_OF_PTX)
    run_on_ranks(tmp_path / "ranks.py", folder)
    tokenizer = AutoTokenizer.from_pretrained(fork.TINY.model)
    policy = fork.load_policy(fork.TINY, tokenizer, torch.device("cpu"))
    rows = [{"text": "1+2=3;" * number} for number in (1, 2, 3, 4, 5, 6)]
    expected = fork.mean_metrics(fork.accumulate_ptx(policy, tokenizer, rows, fork.TINY))["loss/ptx"]
    gradient = torch.cat([weight.grad.flatten() for weight in policy.parameters()])
    for rank in (0, 1):
        mean, found = torch.load(f"{rank}.pt")
        assert mean == pytest.approx(expected, rel=1e-5) and relative_error(found, gradient) < 1e-5


# ---- the pages


@each_fork
def test_pages_are_short_and_edit_nothing_below_the_line(name, folder):
    text, fork = re.sub(r"^```diff\n.*?^```\n", "", PAGES[name], flags=re.DOTALL | re.MULTILINE), f"my_{name}.py"
    assert len(text.splitlines()) <= 50 and "## Results" in text and "arxiv.org/abs/" in text
    source = (ROOT / f"{SCRIPTS[name].__name__}.py").read_text(encoding="utf-8")
    changed = (folder / fork).read_text(encoding="utf-8")
    assert changed != source and changed.partition(MARKER)[2] == source.partition(MARKER)[2]
    diff = re.search(r"^```diff\n(.*?)^```", PAGES[name], re.DOTALL | re.MULTILINE)[1]
    added = [line for line in diff.splitlines()[2:] if line.startswith("+")]
    assert len(added) <= (40 if name == "ptx" else 17)
    assert f"](forks/{name}.md)" in INTRODUCTION and SCRIPTS.keys() == PAGES.keys()


# ---- one-line forks, in fork.md


@pytest.fixture(scope="module", params=["SAPO", "IcePop", "MC-GRPO", "REINFORCE++"])
def short_fork(request, tmp_path_factory):
    """Return the name, and grpo.py with the line of fork.md as a module."""
    old, new = ONE_LINE[request.param]
    source = (ROOT / "grpo.py").read_text(encoding="utf-8")
    assert source.count(old) == 1 and len(ONE_LINE) == 4
    path = tmp_path_factory.mktemp("short") / "short.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    return request.param, load_module(path)


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


def test_forks_of_one_line_are_those_of_their_papers(short_fork):
    check_short(*short_fork)
    with pytest.raises(AssertionError):
        check_short(short_fork[0], grpo)
