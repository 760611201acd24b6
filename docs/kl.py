"""Compute the tables of docs/kl.md, estimators of the KL divergence and their exact gradients: python docs/kl.py

The policy, and the sums over all of its completions, are those of docs/details.py.
"""

import re
from types import SimpleNamespace

import details
import torch
from details import LENGTHS, MASK, at_tokens, expect, to_go

PAGE = details.ROOT / "docs" / "kl.md"
SIZES = 0.002, 0.02, 0.2  # standard deviations of the noise that is added to the policy's weights to make the reference


def make_reference(size):
    """Return the log-probabilities of a model whose weights are those of the policy plus noise (prefixes, V)."""
    model, generator = details.new_model(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        return details.next_logits(model).log_softmax(-1)


def compare(policy, size):
    """Return the estimators, their coefficients in a gradient, and the true gradients, for a reference with noise."""
    reference = make_reference(size)
    log_ratios = policy.logprobs - reference  # (prefixes, V)
    k1, chances = at_tokens(log_ratios), details.probabilities(policy.logprobs)  # (N, T), (N,)
    found = SimpleNamespace(logprobs=policy.logprobs, reference=reference, chances=chances)
    found.values = {"k1": k1, "k2": k1**2 / 2, "k3": ((-k1).exp() + k1 - 1)}
    whole = {name: value.sum(1, keepdim=True) for name, value in found.values.items()}  # (N, 1)
    found.kl = (chances @ whole["k1"]).item()
    found.coefficients = {
        ("loss", "k1", "1"): MASK,
        ("loss", "k2", r"$`\mathrm{k1}_t`$"): k1,
        ("loss", "ratio · k3", r"$`\mathrm{k1}_t`$"): k1,
        ("loss", "k3", r"$`1-\rho_t`$"): 1 - (-k1).exp(),
        ("loss", "k3 / \\|y\\|, `grpo.py`", r"$`(1-\rho_t)/\lvert y\rvert`$"): (1 - (-k1).exp()) / LENGTHS[:, None],
        ("reward", "k1", r"$`\sum_s\mathrm{k1}_s`$"): whole["k1"],
        ("reward", "k1, less its mean", r"$`\sum_s\mathrm{k1}_s-\mathrm{KL}`$"): whole["k1"] - found.kl,
        ("reward", "k1 of this and later tokens, `ppo_rlhf.py`", r"$`\sum_{s\ge t}\mathrm{k1}_s`$"): to_go(k1),
        ("reward", "k2", r"$`\sum_s\mathrm{k2}_s`$"): whole["k2"],
        ("reward", "k3", r"$`\sum_s\mathrm{k3}_s`$"): whole["k3"],
    }
    found.gradients = {key[:2]: expect(value, chances, policy.scores) for key, value in found.coefficients.items()}
    found.gradient = expect(whole["k1"], chances, policy.scores)
    visits = torch.zeros(len(log_ratios), dtype=torch.float64)
    visits.index_add_(0, details.PREFIX_OF.reshape(-1), (chances.unsqueeze(1) * MASK).reshape(-1))
    slopes = visits.unsqueeze(1) * policy.logprobs.exp() * log_ratios  # of the divergence after each prefix
    found.token_gradient = torch.einsum("xv,xvp->p", slopes, policy.scores)
    return found


def number(value, digits=3):
    return "0" if abs(value) < 1e-9 else f"{value:.{digits}f}"


def distance(gradient, target):
    return number(((gradient - target).norm() / target.norm()).item())


def value_rows(found):
    for name, values in found.values.items():
        sums = values.sum(1)
        mean = (found.chances @ sums).item()
        std = (found.chances @ (sums - mean) ** 2).sqrt().item()
        negative = (found.chances @ (sums < -1e-12).double()).item()
        yield f"|{name}|{mean:.4f}|{number(mean - found.kl, 4)}|{std:.3f}|{number(negative)}|"


def gradient_rows(found):
    target = found.gradient
    for where, name, coefficient in found.coefficients:
        gradient = found.gradients[where, name]
        cosine = "-"
        if gradient.norm() > 1e-9 * target.norm():
            cosine = number((gradient @ target / (gradient.norm() * target.norm())).item())
        errors = distance(gradient, target), distance(gradient, found.token_gradient)
        yield f"|{where}|{name}|{coefficient}|{errors[0]}|{cosine}|{errors[1]}|"


def size_row(size, found):
    names = ("loss", "k2"), ("loss", "k3"), ("reward", "k3")
    return f"|{size}|{found.kl:.3g}|{'|'.join(distance(found.gradients[name], found.gradient) for name in names)}|"


def fill(page):
    """Return the page with the rows of its tables computed again."""
    policy = details.freeze(details.new_model())
    found = {size: compare(policy, size) for size in SIZES}
    far = found[SIZES[-1]]
    tables = {"|estimator|": value_rows(far), "|where|": gradient_rows(far)}
    tables["|noise|"] = [size_row(size, found[size]) for size in SIZES]
    for head, rows in tables.items():
        before, between, after = re.split(rf"(?m)(^{re.escape(head)}.*\n\|[-|]+\n)(?:\|.*\n)*", page)
        page = before + between + "".join(row + "\n" for row in rows) + after
    return page


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
