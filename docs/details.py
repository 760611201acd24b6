"""Compute the exact numbers of docs/details.md and write its tables: python docs/details.py

A tiny policy has 1,093 completions of up to six tokens, so expectations are sums over all of them, in float64: nothing
is sampled. A variant of a detail gives every token of every completion a coefficient, and its expected gradient is
compared with the gradient of the objective. Groups are summed over the counts of their types (reward, length).
"""

import itertools
import json
import math
import os
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as in the scripts

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from toy import build_model  # noqa: E402

VOCAB_SIZE, STOP_ID, LONGEST, PROMPT = 4, 1, 6, [2, 3]
OTHERS = [token for token in range(VOCAB_SIZE) if token != STOP_ID]
PREFIXES = [prefix for n in range(LONGEST) for prefix in itertools.product(OTHERS, repeat=n)]
PLACE = {prefix: place for place, prefix in enumerate(PREFIXES)}
COMPLETIONS = [
    (*prefix, token)
    for prefix in PREFIXES
    for token in range(VOCAB_SIZE)
    if token == STOP_ID or len(prefix) == LONGEST - 1
]


def rows(values):
    return torch.tensor(list(values), dtype=torch.float64)


LENGTHS = rows(map(len, COMPLETIONS))
STOPPED = rows(float(completion[-1] == STOP_ID) for completion in COMPLETIONS)
# A completion is right if a 3 directly follows a 2 in it.
REWARDS = rows(float(any(pair == (2, 3) for pair in zip(c, c[1:]))) for c in COMPLETIONS)
MASK = (torch.arange(LONGEST) < LENGTHS[:, None]).double()  # (N, T)
LAST = MASK * (torch.arange(LONGEST) == LENGTHS[:, None] - 1)
# The place of each token in a flat table of all prefixes and the tokens that may follow them.
TOKENS = torch.tensor(
    [[PLACE[c[:t]] * VOCAB_SIZE + c[t] if t < len(c) else 0 for t in range(LONGEST)] for c in COMPLETIONS]
)
PREFIX_OF = TOKENS // VOCAB_SIZE  # (N, T)


# ---- policies


def next_logits(model):
    """Return the logits of the next token after each prefix (prefixes, V), with graph."""
    parts = []
    for _, same_length in itertools.groupby(PREFIXES, len):
        parts.append(model(torch.tensor([[*PROMPT, *prefix] for prefix in same_length])).logits[:, -1])
    return torch.cat(parts)


def at_tokens(table):
    """Return what a table (prefixes, V) says of each token of each completion (N, T), 0 after its end."""
    return table.reshape(-1)[TOKENS] * MASK


def probabilities(logprobs):
    """Return the probability of each completion (N,)."""
    return at_tokens(logprobs).sum(1).exp()


def flat_gradient(value, model):
    parts = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
    return torch.cat([part.flatten() for part in parts])


def freeze(model):
    """Return a policy: its log-probabilities (prefixes, V) and their gradients (prefixes, V, P)."""
    scores = []
    for _, same_length in itertools.groupby(PREFIXES, len):
        same_length = list(same_length)
        for first in range(0, len(same_length), 8):
            part = same_length[first : first + 8]
            logprobs = model(torch.tensor([[*PROMPT, *prefix] for prefix in part])).logits[:, -1].log_softmax(-1)
            one_each = torch.eye(logprobs.numel(), dtype=logprobs.dtype).view(-1, *logprobs.shape)
            gradients = torch.autograd.grad(logprobs, list(model.parameters()), one_each, is_grads_batched=True)
            rows_of_part = torch.cat([gradient.flatten(1) for gradient in gradients], 1)
            scores.append(rows_of_part.view(len(part), VOCAB_SIZE, -1))
    with torch.no_grad():
        logits = next_logits(model)
    return SimpleNamespace(model=model, logits=logits, logprobs=logits.log_softmax(-1), scores=torch.cat(scores))


def new_model():
    return build_model("llama", vocab_size=VOCAB_SIZE, scale=3.0)


def train(model, steps):
    """Follow the exact gradient of the expected reward for some steps of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        (-(probabilities(next_logits(model).log_softmax(-1)) * REWARDS).sum()).backward()
        optimizer.step()
    return model


def tempered(logits, temperature):
    return (logits / temperature).log_softmax(-1)


def tempered_scores(policy, temperature):
    """Return the gradients of log softmax(z / T) (prefixes, V, P)."""
    chances = tempered(policy.logits, temperature).exp()
    mean = torch.einsum("xv,xvp->xp", chances, policy.scores)
    return (policy.scores - mean.unsqueeze(1)) / temperature


def expect(coefficients, chances, scores):
    """Return Σₙ chance Σₜ coefficient ∇log π(token): coefficients (N, T) or (N, 1), chances (N,)."""
    weights = (chances.unsqueeze(1) * coefficients * MASK).reshape(-1)
    table = torch.zeros(len(PREFIXES) * VOCAB_SIZE, dtype=torch.float64).index_add(0, TOKENS.reshape(-1), weights)
    return table @ scores.reshape(len(table), -1)


# ---- the situations: a policy, the sampler, and the reference


def situation(policy, sampler_logprobs, reference):
    found = SimpleNamespace(policy=policy, scores=policy.scores, sampler=sampler_logprobs, reference=reference)
    found.chances, found.own = probabilities(sampler_logprobs), probabilities(policy.logprobs)
    right, wrong = (drawn(64, found.own * (REWARDS == value), seed=1) for value in (1, 0))
    found.pairs = torch.stack([right, wrong])  # (2, 64), the places of completions
    found.texts = drawn(16, found.own * REWARDS, seed=2).view(4, 4)  # four micro-batches
    return found


def drawn(count, chances, seed):
    """Return the places of completions that are drawn with these chances."""
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(chances, count, replacement=True, generator=generator)


def situations():
    """Return {name: situation}: at the start, after training, and after training with a sampler that rounds."""
    start = freeze(new_model())
    trained = freeze(train(new_model(), 8))
    rounded = ((trained.logits / 0.25).round() * 0.25).log_softmax(-1)  # as of a sampler with few bits
    nearby = start.logprobs + 0.3 * torch.randn(start.logprobs.shape, generator=torch.Generator().manual_seed(0))
    return {
        "start": situation(start, start.logprobs, nearby.log_softmax(-1)),
        "trained": situation(trained, trained.logprobs, start.logprobs),
        "rounds": situation(trained, rounded, start.logprobs),
    }


def moved(at, size):
    """Return the situation after a step along the gradient, of completions that were sampled before it."""
    gradient = true_gradient(at)
    model, place = new_model(), 0
    model.load_state_dict(at.policy.model.state_dict())
    with torch.no_grad():
        for weight in model.parameters():
            step = gradient[place : place + weight.numel()].view(weight.shape)
            weight += size * step / gradient.norm()
            place += weight.numel()
    return situation(freeze(model), at.sampler, at.reference)


def true_gradient(at):
    """Return the gradient of the expected reward of the policy."""
    return expect((REWARDS - at.own @ REWARDS).unsqueeze(1), at.own, at.scores)


def kl_gradient(at):
    """Return the gradient of the KL divergence of the policy from the reference."""
    log_ratios = at_tokens(at.policy.logprobs - at.reference)
    return expect(log_ratios.sum(1, keepdim=True), at.own, at.scores)


def baseline(at, rewards=REWARDS):
    """Return the rewards less their mean (N, 1)."""
    return (rewards - at.chances @ rewards).unsqueeze(1)


def weights_of(at):
    """Return the probability of each token by the policy over that by the sampler (N, T)."""
    return at_tokens(at.policy.logprobs - at.sampler).exp()


def to_go(values):
    """Return the sum over this and all later tokens (N, T)."""
    return values.flip(1).cumsum(1).flip(1)


# ---- groups, by the counts of their types

GROUP, HALF = 8, 3  # completions of a group; of each of two parts where a batch is split


def compositions(total, parts):
    """Yield all ways to write a number as a sum of so many counts."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


class Groups:
    """All groups of some size, told apart by how many completions of each type (reward, length) they have."""

    def __init__(self, size, chances):
        types = list(zip(REWARDS.tolist(), LENGTHS.tolist()))
        names = sorted(set(types))
        self.type_of = torch.tensor([names.index(name) for name in types])  # (N,)
        self.reward, self.length = rows(names).T  # of each type
        self.share = torch.zeros(len(names), dtype=torch.float64).index_add(0, self.type_of, chances)
        self.counts = rows(compositions(size, len(names)))  # (groups, types)
        ways = math.lgamma(size + 1) - torch.lgamma(self.counts + 1).sum(1)
        self.weights = (ways + torch.xlogy(self.counts, self.share).sum(1)).exp()  # chance of each group
        self.centred = self.reward - (self.counts @ self.reward / size).unsqueeze(1)  # R - mean R (groups, types)
        self.squares = (self.counts * self.centred**2).sum(1, keepdim=True)

    def coefficients(self, weigh):
        """Return the mean coefficient of each completion (N, 1), for weights (groups, types) of a loss."""
        return self.spread((self.weights.unsqueeze(1) * self.counts * weigh).sum(0))

    def spread(self, sums):
        """Return sums over the completions of each type as means, one per completion (N, 1)."""
        return (sums / self.share)[self.type_of].unsqueeze(1)


def halves(at):
    """Coefficients for a batch in two equal parts, centred over both: one divisor, or one for each part."""
    part = Groups(HALF, at.chances)
    tokens, rewards = part.counts @ part.length, part.counts @ part.reward  # (groups,)
    one_divisor, own_divisors = torch.zeros_like(part.share), torch.zeros_like(part.share)
    for chance, own_tokens, own_rewards, counts in zip(part.weights, tokens, rewards, part.counts):
        advantage = part.reward - ((own_rewards + rewards) / (2 * HALF)).unsqueeze(1)  # (groups, types)
        weighed = (chance * part.weights).unsqueeze(1) * advantage  # over all other halves
        one_divisor += counts * (weighed * 2 / (own_tokens + tokens).unsqueeze(1)).sum(0)
        own_divisors += counts * weighed.sum(0) / own_tokens
    return {"A": part.spread(one_divisor), "B": part.spread(own_divisors)}


# ---- the details: functions that yield (detail, gradient of the objective, {variant: gradient})


def gradients(at, coefficients):
    """Return {variant: gradient} of {variant: coefficients}, over completions of the sampler."""
    return {name: expect(values, at.chances, at.scores) for name, values in coefficients.items()}


def of_groups(at):
    groups, parts, target = Groups(GROUP, at.chances), halves(at), true_gradient(at)
    longest = torch.where(groups.counts > 0, groups.length, 0.0).amax(1, keepdim=True)
    divisors = {
        "A": groups.length * GROUP,
        "B": (groups.counts @ groups.length).unsqueeze(1),
        "C": LONGEST * GROUP,
        "E": (len(PROMPT) + longest - 1) * GROUP,
        "F": GROUP,
        "G": longest * GROUP,
    }
    found = {name: groups.coefficients(groups.centred / divisor) for name, divisor in divisors.items()}
    yield "G01", target, gradients(at, found | {"D": parts["B"]})
    yield "G02", target, gradients(at, parts)
    std = (groups.squares / (GROUP - 1)).sqrt()
    divisors = {"A": std + 1e-4, "B": std + 1e-6, "C": std + 1e-8, "D": std + 1e-9, "G": 1.0}
    divisors["E"] = (groups.squares / GROUP).sqrt() + 1e-4
    found = {name: groups.coefficients(groups.centred / divisor / GROUP) for name, divisor in divisors.items()}
    yield "G03", target, gradients(at, found)
    yield "G05", target, gradients(at, {"A": found["G"], "B": found["G"] * GROUP / (GROUP - 1)})


def of_temperatures(at):
    """Samples at temperature 0.6, and a weight that is 1 only with what the sampler really did."""
    sampler, own = tempered(at.policy.logits, 0.6), tempered_scores(at.policy, 0.6)
    chances = probabilities(sampler)
    advantage = (REWARDS - chances @ REWARDS).unsqueeze(1)
    target = expect(advantage, chances, own)
    rounded = tempered_scores(at.policy, 0.6015625)  # bfloat16's nearest to 0.6
    found = {"A": own, "B": at.scores, "C": rounded}
    yield "G11", target, {name: expect(advantage, chances, scores) for name, scores in found.items()}
    weight = at_tokens(sampler - at.policy.logprobs).exp().clamp(max=2)
    yield "G32", target, {"A": target, "B": expect(advantage * weight, chances, own)}


def of_truncation(at):
    yield "G12", true_gradient(at), {"A": true_gradient(at)}
    ordered, order = at.policy.logprobs.exp().sort(-1, descending=True)
    empty = torch.zeros_like(ordered)
    nucleus = empty.scatter(-1, order, ((ordered.cumsum(-1) - ordered) < 0.9).double() * ordered)
    top = empty.scatter(-1, order[:, :3], ordered[:, :3])
    for name, kept in (("B", nucleus), ("C", top)):
        truncated = kept / kept.sum(-1, keepdim=True)
        sampled = torch.where(MASK > 0, truncated.reshape(-1)[TOKENS], 1.0).prod(1)
        mean = torch.einsum("xv,xvp->xp", truncated, at.scores)
        own = at.scores - mean.unsqueeze(1)  # of the sampler, whose softmax is over what is kept
        advantage = (REWARDS - sampled @ REWARDS).unsqueeze(1)
        yield "G12", expect(advantage, sampled, own), {name: expect(advantage, sampled, at.scores)}


def of_masks(at):
    target, own, stopped = true_gradient(at), baseline(at), STOPPED.unsqueeze(1)
    yield "G13", target, gradients(at, {"A": own, "B": own * (MASK - LAST * stopped)})
    kept = at.chances * STOPPED
    conditional = (REWARDS - kept @ REWARDS / kept.sum()).unsqueeze(1)
    found = {"A": own, "B": own * stopped, "C": conditional * stopped}
    found |= {"D": baseline(at, REWARDS - 0.5 * (1 - STOPPED)), "E": baseline(at, REWARDS * STOPPED)}
    yield "G14", target, gradients(at, found)


def of_kl(at, beta=0.1):
    k1 = at_tokens(at.policy.logprobs - at.reference)  # log r, where r is the policy over the reference
    k3, reverse = ((-k1).exp() + k1 - 1), (k1.exp() - k1 - 1)
    whole, mean = k1.sum(1, keepdim=True), (reverse.sum(1) / LENGTHS).unsqueeze(1)
    in_loss = 1 - (-k1).exp()  # the derivative of k3
    found = {"A": in_loss, "B": k1, "C": whole, "D": k1, "E": k1 + 1}
    found |= {"F": k1.exp() - 1, "G": torch.ones_like(k1), "H": -whole}
    yield "G07", kl_gradient(at), gradients(at, found)
    found = {"A": to_go(k1), "B": to_go(k1.clamp(-10, 10)), "C": to_go(k3), "D": mean}
    yield "P02", kl_gradient(at), gradients(at, found)
    penalised = [baseline(at, REWARDS - beta * penalty.squeeze(1)) for penalty in (whole, mean)]
    found = {"A": penalised[0], "B": baseline(at) - beta * to_go(k1), "C": penalised[1], "none": baseline(at)}
    yield "G09", true_gradient(at) - beta * kl_gradient(at), gradients(at, found)
    share = at.chances @ REWARDS
    same = torch.where(REWARDS > 0, share, 1 - share) ** (GROUP - 1)  # chance that all others have the same reward
    found = {"A": in_loss, "B": in_loss * (1 - same).unsqueeze(1)}
    yield "G21", expect(in_loss, at.chances, at.scores), gradients(at, found)
    found = {"A": in_loss, "ours": weights_of(at).clamp(max=2) * in_loss}
    yield "G16", expect(in_loss, at.own, at.scores), gradients(at, found)


def of_sampler_weights(at):
    w = weights_of(at)
    whole, mean = w.prod(1, keepdim=True), (w.log().sum(1) / LENGTHS).exp().unsqueeze(1)
    found = {
        "A": torch.ones_like(w),
        "B": w.clamp(max=2),
        "C": w.clamp(0.5, 5),
        "D": torch.where(whole <= 3, whole, 0.0),
        "E": w * (w >= 0.5) * (w <= 2),
        "F": w * (mean >= 0.5) * (mean <= 5),
        "G": whole.clamp(max=2),
    }
    yield "G15", true_gradient(at), gradients(at, {name: value * baseline(at) for name, value in found.items()})


def after_an_update(at):
    """Completions of the old policy, and a policy that has moved; it has moved very little for GSPO."""
    later, soon = moved(at, 0.05), moved(at, 2e-4)
    advantage, ratio = baseline(at), weights_of(later)
    bad = advantage < 0
    inside = {high: torch.where(bad, ratio >= 0.8, ratio <= 1 + high) for high in (0.2, 0.272)}
    clips = {"A": ratio * inside[0.2], "B": ratio * inside[0.2] * ~(bad & (ratio > 3)), "C": ratio * inside[0.272]}
    clips |= {"D": torch.ones_like(ratio), "unclipped": ratio}
    caps = {"A": ratio.clamp(max=0.2), "B": ratio.clamp(0.8, 1.2), "C": ratio.clamp(max=1.272)}
    caps["ours"] = ratio.clamp(max=5)
    length = LENGTHS.unsqueeze(1)
    mean = (weights_of(soon).log().sum(1, keepdim=True) / length).exp()
    kept = torch.where(bad, mean >= 1 - 3e-4, mean <= 1 + 4e-4)
    ratios = {"A": mean * kept / length, "B": mean * kept / (at.chances @ LENGTHS)}
    for detail, place, found in (("G17", later, clips), ("G18", later, caps), ("G19", soon, ratios)):
        values = {name: value * advantage for name, value in found.items()}
        yield detail, true_gradient(place), gradients(place, values)


# ---- PPO: a value of each prefix, which is half of the truth


def values_of(at):
    """Return half the expected reward after each prefix, at the places of the tokens (N, T)."""
    totals = torch.zeros(2, len(PREFIXES), dtype=torch.float64)
    weights = at.own.unsqueeze(1) * MASK
    for total, value in zip(totals, (weights, weights * REWARDS.unsqueeze(1))):
        total.index_add_(0, PREFIX_OF.reshape(-1), value.reshape(-1))
    return 0.5 * (totals[1] / totals[0])[PREFIX_OF] * MASK


def gae(at, gamma, lam, shifted=False):
    """Return advantages (N, T); shifted: the score comes one place later, with half of it as the value there.

    A completion that fills the limit has no later place.
    """
    values = values_of(at)
    advantages, later = torch.zeros_like(values), torch.zeros(len(values), dtype=torch.float64)
    for t in reversed(range(LONGEST)):
        last = LAST[:, t]
        beyond = last * (LENGTHS < LONGEST) * shifted
        following = values[:, t + 1] if t + 1 < LONGEST else torch.zeros_like(later)
        reward = REWARDS * (last - beyond) + gamma * 0.5 * REWARDS * beyond
        delta = reward + gamma * following * (1 - last) - values[:, t]
        after = torch.where(last > 0, 0.5 * REWARDS * beyond, later)
        later = (delta + gamma * lam * after) * MASK[:, t]
        advantages[:, t] = later
    return advantages


def of_ppo(at):
    target, advantages, visits = true_gradient(at), gae(at, 1.0, 0.95), at.chances.unsqueeze(1) * MASK
    yield "P01", target, gradients(at, {"A": advantages, "B": gae(at, 1.0, 0.95, shifted=True)})
    mean = (visits * advantages).sum() / visits.sum()
    yield "P04", target, gradients(at, {"E": advantages, "A": advantages - mean})
    yield "P06", target, gradients(at, {"A": advantages, "B": gae(at, 1.0, 1.0), "C": gae(at, 0.99, 0.95)})
    scores = {"A": torch.where(STOPPED > 0, REWARDS, -1.0), "low": torch.where(STOPPED > 0, 2 * REWARDS - 2, -1.0)}
    scores |= {"B": REWARDS - (1 - STOPPED), "C": REWARDS}
    yield "P07", target, gradients(at, {name: baseline(at, value) for name, value in scores.items()})


def of_value_losses(at):
    """The gradient by the values themselves, which an update has moved from 0 to half of the truth."""
    visits, values = at.chances.unsqueeze(1) * MASK, values_of(at)
    errors, found = values - REWARDS.unsqueeze(1) * MASK, {}
    for name, clip, divisor in (("plain", 9.0, 1.0), ("A", 0.2, 1.0), ("B", 0.5, 1.0), ("C", 0.2, LENGTHS[:, None])):
        clipped = values.clamp(-clip, clip)
        active = errors**2 >= (clipped - values + errors) ** 2
        each = errors * (active | (values.abs() <= clip)) * visits / divisor
        table = torch.zeros(len(PREFIXES), dtype=torch.float64)
        found[name] = table.index_add(0, PREFIX_OF.reshape(-1), each.reshape(-1))
    yield "P05", found.pop("plain"), found


# ---- DPO and SFT: a fixed batch


def pair_gradient(at, beta=0.1, tokens=MASK, smoothing=0.0, by_tokens=False):
    """Return the summed gradient of DPO's loss, for the weight of each token in a completion's sum (N, T)."""
    sums = (at_tokens(at.policy.logprobs - at.reference) * tokens).sum(1)
    chosen, rejected = at.pairs
    margins = beta * (sums[chosen] - sums[rejected])
    slopes = beta * (smoothing * margins.sigmoid() - (1 - smoothing) * (-margins).sigmoid())
    if by_tokens:
        counts = LENGTHS[chosen] + LENGTHS[rejected] + 2 * len(PROMPT)
        slopes = slopes * counts / counts.mean()
    weights = torch.zeros(len(COMPLETIONS), dtype=torch.float64)
    weights = weights.index_add(0, chosen, slopes).index_add(0, rejected, -slopes)
    return expect(tokens, weights, at.scores)


def of_pairs(at):
    target, means = pair_gradient(at), MASK / LENGTHS.unsqueeze(1)
    same = pair_gradient(at, 0.1 * LENGTHS[at.pairs].mean(), means)
    yield "D01", target, {"A": target, "same": same, "B": pair_gradient(at, 5.0, means)}
    robust = pair_gradient(at, smoothing=-0.1 / (1 - 2 * 0.1))  # with 1 - 0.2 as the divisor of its loss
    yield "D02", pair_gradient(at, smoothing=0.1), {"A": pair_gradient(at, smoothing=0.1), "B": robust, "C": target}
    without_stop = pair_gradient(at, tokens=MASK - LAST * STOPPED.unsqueeze(1))
    yield "D03", target, {"with": target, "without": without_stop}
    yield "D07", target, {"A": target, "B": pair_gradient(at, by_tokens=True)}


def of_texts(at):
    lengths, found = LENGTHS[at.texts], {}  # (4, 4)
    divisors = {"A": lengths.sum(), "B": 4 * lengths.sum(1, keepdim=True), "C": 16 * lengths, "D": rows([16])}
    for name, divisor in divisors.items():
        weights = (-1 / divisor).expand(4, 4).flatten()
        weights = torch.zeros(len(COMPLETIONS), dtype=torch.float64).index_add(0, at.texts.flatten(), weights)
        found[name] = expect(MASK, weights, at.scores)
    yield "S01", found["A"], found
    prompt = at.policy.model(torch.tensor([PROMPT])).logits.log_softmax(-1)[0, 0, PROMPT[1]]
    yield "S02", found["D"], {"A": found["D"], "B": found["D"] - flat_gradient(prompt, at.policy.model)}


def measure(found, target):
    """Return the relative error of a gradient against that of the objective, their cosine, and ratio of norms."""
    norm, scale = found.norm(), target.norm()
    cosine = (found @ target / (norm * scale)).item() if norm > 1e-12 * scale else math.nan
    return ((found - target).norm() / scale).item(), cosine, (norm / scale).item()


def compute(at_all):
    """Return {detail: {variant: {situation: (relative error, cosine, ratio of norms)}}}."""
    found = {}
    functions = (of_groups, of_temperatures, of_truncation, of_masks, of_kl, of_sampler_weights, after_an_update)
    for name, at in at_all.items():
        for function in (*functions, of_ppo, of_value_losses, of_pairs, of_texts):
            for detail, target, variants in function(at):
                for variant, gradient in variants.items():
                    found.setdefault(detail, {}).setdefault(variant, {})[name] = measure(gradient, target)
    return found


# ---- the page

PAGE, DATA = ROOT / "docs" / "details.md", ROOT / "docs" / "details.json"
MARK = "<!-- Everything below this line is written by docs/details.py. -->\n"
NAMES = {"trl": "TRL", "nano-aha-moment": "nano-aha", "dpo": "DPO's-reference"}
LETTERS = "ABCDEFGH"


def link(cell, snapshots):
    found = snapshots[cell["repo"]]
    first, *last = cell["line"].split("-")
    lines = f"L{first}-L{last[0]}" if last else f"L{first}"
    name = NAMES.get(cell["repo"], cell["repo"])
    qualifier = f" ({cell['if']})" if cell["if"] else ""
    return f"[{name}](https://github.com/{found['repo']}/blob/{found['commit']}/{cell['file']}#{lines}){qualifier}"


def shown(values):
    error, cosine, ratio = values
    if error < 5e-4:
        return "exact"
    return f"{'-' if math.isnan(cosine) else f'{cosine:.3f}'} ({error:.2f}, ×{ratio:.2f})"


def section(detail, found, snapshots):
    """Return the table of a detail."""
    columns = ["rounds"] if detail["id"] in ("G15", "G16") else ["start", "trained"]
    lines = [f"### {detail['title']}", ""]
    if detail["note"]:
        lines += [textwrap.fill(detail["note"], 120), ""]
    lines += [f"|variant|default of|{'|'.join(columns)}|", f"|---|---|{'---|' * len(columns)}"]
    for letter, (key, formula) in zip(LETTERS, detail["variants"].items()):
        who = [link(cell, snapshots) for cell in detail["cells"] if cell["variant"] == key]
        own = [place["where"] for place in detail["ours"] if place["variant"] == key]
        who += [f"**ours:** {'; '.join(own)}"] if own else []
        cells = [shown(found[detail["id"]][key][name]) for name in columns]
        lines.append(f"|{letter}: {formula}|{', '.join(who)}|{'|'.join(cells)}|")
    return "\n".join([*lines, ""])


def undecided(detail, snapshots):
    variants = []
    for key, formula in detail["variants"].items():
        who = [link(cell, snapshots) for cell in detail["cells"] if cell["variant"] == key]
        variants.append(f"{key}, {formula}: {', '.join(who) or '-'}")
    return f"|{detail['title']}|{'; '.join(variants)}|{detail['ours']}|{detail['why']}|"


def render(found):
    """Return the page: its introduction as it is, and the tables for the numbers of compute."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    snapshots = data["snapshots"]
    introduction, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    parts = [introduction + mark, "| code base | commit | date |\n|---|---|---|"]
    for name, at in snapshots.items():
        link_of = f"[{NAMES.get(name, name)}](https://github.com/{at['repo']})"
        parts.append(f"|{link_of}|`{at['commit'][:8]}`|{at['date']}|")
    for group, details in itertools.groupby(data["details"], lambda row: row["group"]):
        parts.append(f"\n## {group}\n")
        parts.append("\n".join(section(row, found, snapshots) for row in details).rstrip("\n"))
    parts.append("\n## What enumeration cannot decide\n")
    parts.append("| detail | variants, and whose default they are | ours | why no number |\n|---|---|---|---|")
    parts += [undecided(row, snapshots) for row in data["undecided"]]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(render(compute(situations())), encoding="utf-8")
