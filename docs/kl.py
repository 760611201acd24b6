"""Compute the tables of docs/kl.md: estimators of the KL divergence and their exact gradients.

    python docs/kl.py            write the tables
    python docs/kl.py --train    first train runs with them (a few minutes each) and write benchmark/results/kl.md

The expectations are exact sums over all completions of a tiny model in float64. Nothing is sampled.
"""

import contextlib
import inspect
import json
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as in the scripts

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from toy import build_model, pad, parse

import grpo

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "kl.md", ROOT / "benchmark" / "results" / "kl.md"
VOCAB_SIZE, STOP_ID, PROMPT = 5, 1, [2, 3]
SIZES = 0.002, 0.02, 0.2  # standard deviations of the noise that is added to the policy's weights to make the reference


# ---- the estimators, as functions of the log-probabilities of sampled tokens


def k1(logprobs, ref_logprobs):
    return logprobs - ref_logprobs


def k2(logprobs, ref_logprobs):
    return (logprobs - ref_logprobs) ** 2 / 2


def k3(logprobs, ref_logprobs):
    return (ref_logprobs - logprobs).exp() - (ref_logprobs - logprobs) - 1


def ratio_k3(logprobs, ref_logprobs):
    return (logprobs - logprobs.detach()).exp() * k3(logprobs, ref_logprobs)


def in_loss(estimator, logprobs, ref_logprobs):
    """Return the derivative of the estimator by each token's log-probability (N, T), for fixed samples."""
    logprobs = logprobs.detach().requires_grad_()
    return torch.autograd.grad(estimator(logprobs, ref_logprobs).sum(), logprobs)[0]


def to_go(values):
    """Return the sum over this and all later tokens (N, T)."""
    return values.flip(1).cumsum(1).flip(1)


# ---- every completion of a tiny policy


def complete(max_length, prefix=()):
    """Yield every completion of any ids that ends with the stop id or at the maximum length."""
    for token in range(VOCAB_SIZE):
        completion = [*prefix, token]
        is_whole = token == STOP_ID or len(completion) == max_length
        yield from [completion] if is_whole else complete(max_length, completion)


def enumerate_policy(max_length=3):
    """Return a random policy, its N completions, their probabilities, and the gradients of all log-probabilities."""
    model = build_model("llama", vocab_size=VOCAB_SIZE)
    completions = list(complete(max_length))
    ids, mask = pad([[]] * len(completions), completions)  # (N, T)
    policy = SimpleNamespace(model=model, ids=ids, mask=mask, lengths=mask.sum(1, keepdim=True))
    policy.logprobs, policy.distributions = token_logprobs(policy, model)
    policy.probabilities = policy.logprobs.sum(1).exp()  # (N,), with graph
    policy.sampled = policy.probabilities.detach()
    size = sum(parameter.numel() for parameter in model.parameters())
    policy.jacobian = torch.zeros(*ids.shape, size, dtype=torch.float64)  # (N, T, P)
    for row, t in mask.nonzero().tolist():
        policy.jacobian[row, t] = gradient(policy, policy.logprobs[row, t])
    return policy


def token_logprobs(policy, model):
    """Return the log-probabilities of the completions' tokens (N, T), masked to 0, and of all ids (N, T, V)."""
    ids = torch.cat([torch.tensor([PROMPT] * len(policy.ids)), policy.ids], 1)
    distributions = model(ids).logits.log_softmax(-1)[:, len(PROMPT) - 1 : -1]
    return distributions.gather(2, policy.ids.unsqueeze(2)).squeeze(2) * policy.mask, distributions


def gradient(policy, objective):
    gradients = torch.autograd.grad(objective, list(policy.model.parameters()), retain_graph=True)
    return torch.cat([part.flatten() for part in gradients])


def make_ref(size, seed=2):
    """Return a reference model: the policy's weights plus noise."""
    model, generator = build_model("llama", vocab_size=VOCAB_SIZE), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model.requires_grad_(False)


def compare(policy, size):
    """Return the KL divergence of completions from a reference with this noise, its gradients, and all estimates."""
    logprobs, (ref_logprobs, ref_distributions) = policy.logprobs.detach(), token_logprobs(policy, make_ref(size))
    kl = (policy.probabilities * k1(policy.logprobs, ref_logprobs).sum(1)).sum()
    p, q = policy.distributions, ref_distributions
    prefixes = policy.sampled.unsqueeze(1) * policy.mask  # (N, T): they sum to the probability of each prefix
    token_kl, reverse_kl = (p.exp() * (p - q)).sum(2), (q.exp() * (q - p)).sum(2)  # (N, T), after each prefix
    found = SimpleNamespace(kl=kl.item(), gradient=gradient(policy, kl))
    found.token_gradient = gradient(policy, (prefixes * token_kl).sum())
    found.token_reverse_gradient = gradient(policy, (prefixes * reverse_kl).sum())

    values = {estimator.__name__: estimator(logprobs, ref_logprobs) for estimator in (k1, k2, k3)}  # (N, T)
    loss = {e.__name__: in_loss(e, logprobs, ref_logprobs) for e in (k1, k2, k3, ratio_k3)}
    whole = {name: value.sum(1, keepdim=True) for name, value in values.items()}  # (N, 1)
    found.values = {name: moments(policy, value) for name, value in whole.items()}
    found.negative = {name: (policy.sampled @ (value < 0).double()).item() for name, value in whole.items()}
    later = to_go(values["k1"])
    coefficients = {
        ("loss", "k1", "1"): loss["k1"],
        ("loss", "k2", r"$`\mathrm{k1}_t`$"): loss["k2"],
        ("loss", "ratio · k3", r"$`\mathrm{k1}_t`$"): loss["ratio_k3"],
        ("loss", "k3", r"$`1-\rho_t`$"): loss["k3"],
        ("loss", "k3 / \\|y\\|, `grpo.py`", r"$`(1-\rho_t)/\lvert y\rvert`$"): loss["k3"] / policy.lengths,
        ("reward", "k1", r"$`\sum_s\mathrm{k1}_s`$"): whole["k1"],
        ("reward", "k1, less its mean", r"$`\sum_s\mathrm{k1}_s-\mathrm{KL}`$"): whole["k1"] - kl.item(),
        ("reward", "k1 of this and later tokens, `ppo_rlhf.py`", r"$`\sum_{s\ge t}\mathrm{k1}_s`$"): later,
        ("reward", "k2", r"$`\sum_s\mathrm{k2}_s`$"): whole["k2"],
        ("reward", "k3", r"$`\sum_s\mathrm{k3}_s`$"): whole["k3"],
    }
    found.rows = {key: mean_and_std(policy, value) for key, value in coefficients.items()}
    return found


def moments(policy, values):
    """Return the mean and standard deviation of one sample (N, 1)."""
    mean = policy.sampled @ values
    return mean.item(), (policy.sampled @ (values - mean) ** 2).sqrt().item()


def mean_and_std(policy, coefficients):
    """Return the mean over completions of Σₜ coefficientₜ ∇log π(yₜ), and the square root of its total variance."""
    gradients = ((coefficients * policy.mask).unsqueeze(2) * policy.jacobian).sum(1)  # (N, P)
    mean = policy.sampled @ gradients
    return mean, (policy.sampled @ ((gradients - mean) ** 2).sum(1)).sqrt().item()


# ---- training: runs of grpo.py with one changed line of policy_loss

KL_LINE = "token_loss = token_loss + kl_coef * ref_kl"
EDITS = {
    "k3, unchanged": KL_LINE,
    "k2": "token_loss = token_loss + kl_coef * torch.where(mask, ref_logprobs - logprobs, 0.0) ** 2 / 2",
    "ratio · k3": "token_loss = token_loss + kl_coef * ratio * ref_kl",
    "wrong sign": "token_loss = token_loss - kl_coef * ref_kl",
    "none": "token_loss = token_loss + 0 * ref_kl",
}
RUNS = [(0.04, name) for name in ("k3, unchanged", "k2", "wrong sign", "none")]
RUNS += [(0.4, name) for name in ("k3, unchanged", "k2", "ratio · k3", "wrong sign")]
POLICY_LOSS = inspect.getsource(grpo.policy_loss)


def edit_policy_loss(name):
    """Replace the KL term of grpo.policy_loss in this process by the one of this name."""
    if POLICY_LOSS.count(KL_LINE) != 1:
        raise SystemExit(f"policy_loss of grpo.py does not have the line {KL_LINE}")
    exec(POLICY_LOSS.replace(KL_LINE, EDITS[name]), vars(grpo))


def train(runs=RUNS, path=RESULTS, **settings):
    """Train the runs and write their table, one line at the end of each run."""
    head = "`python docs/kl.py --train`, seed 1. Accuracy is at the end, the others are means over "
    head += "the last five steps.\n\n| `--kl-coef` | KL term | greedy accuracy | `policy/ref_kl` "
    head += "| nats per completion | length |\n|---|---|---|---|---|---|\n"
    path.write_text(head, encoding="utf-8")
    for kl_coef, name in runs:
        edit_policy_loss(name)
        with tempfile.TemporaryDirectory() as folder:
            with contextlib.redirect_stdout(sys.stderr):
                grpo.main(parse(grpo, kl_coef=kl_coef, run_dir=f"{folder}/run", **settings))
            lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        kl, length = ([line[key] for line in lines[1:][-5:]] for key in ("policy/ref_kl", "rollout/length_mean"))
        row = [f"{kl_coef:g}", name, f"{lines[-1]['eval/accuracy']:.3f}"]
        row += [f"{statistics.mean(kl):.3g}", f"{statistics.mean(k * n for k, n in zip(kl, length)):.3g}"]
        row = f"| {' | '.join(row)} | {statistics.mean(length):.1f} |\n"
        print(row, end="", flush=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(row)


# ---- the page


def number(value, digits=3):
    return "0" if abs(value) < 1e-9 else f"{value:.{digits}f}"


def distance(policy_gradient, target, scale):
    return ((policy_gradient - target).norm() / scale.norm()).item()


def gradient_rows(found):
    """Yield a line for each estimator that compares its expected gradient with the two true ones."""
    for (where, name, coefficient), (mean, _) in found.rows.items():
        is_noise = mean.norm() < 1e-9 * found.gradient.norm()
        cosine = (mean @ found.gradient / (mean.norm() * found.gradient.norm())).item()
        numbers = [number(distance(mean, found.gradient, found.gradient)), "-" if is_noise else f"{cosine:.3f}"]
        numbers.append(number(distance(mean, found.token_gradient, found.token_gradient)))
        yield f"|{where}|{name}|{coefficient}|{'|'.join(numbers)}|"


def size_row(size, found):
    """Return a line of the table of distances."""
    by_name = {key[:2]: mean for key, (mean, _) in found.rows.items()}
    errors = [by_name[key] for key in (("loss", "k2"), ("loss", "k3"), ("reward", "k3"))]
    numbers = [f"{found.kl:.3g}", *(number(distance(mean, found.gradient, found.gradient)) for mean in errors)]
    return f"|{size}|{'|'.join(numbers)}|"


def fill(page):
    """Return the page with the rows of its tables computed again."""
    policy = enumerate_policy()
    found = {size: compare(policy, size) for size in SIZES}
    far = found[SIZES[-1]]
    values = [
        f"|{name}|{mean:.4f}|{number(mean - far.kl, 4)}|{std:.3f}|{number(far.negative[name])}|"
        for name, (mean, std) in far.values.items()
    ]
    tables = {
        "|estimator|": values,
        "|where|": gradient_rows(far),
        "|noise|": [size_row(size, found[size]) for size in SIZES],
    }
    for head, rows in tables.items():
        lines = "".join(row + "\n" for row in rows)
        page, count = re.subn(rf"(?m)(^{re.escape(head)}.*\n\|[-|]+\n)(?:\|.*\n)*", lambda m: m[1] + lines, page)  # noqa: B023
        assert count == 1, head
    return page


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["--train"]:
        train()
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
