"""Compute the exact numbers of docs/details.md and write its tables: python docs/details.py

A tiny policy has 1,093 completions of up to six tokens, so expectations are sums over all of them, in float64: nothing
is sampled. A variant of a detail gives every token of every completion a coefficient, and its expected gradient is
compared with the gradient of the objective. Groups are summed over the counts of their types (reward, length).
"""

import itertools
import json
import math
import os
import re
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
# A completion is right if a 3 directly follows a 2 in it; the second task asks for two of these.
REWARDS = rows(float(any(pair == (2, 3) for pair in zip(c, c[1:]))) for c in COMPLETIONS)
RARE_REWARDS = rows(float(sum(pair == (2, 3) for pair in zip(c, c[1:])) > 1) for c in COMPLETIONS)
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
    long = [prefix for prefix in PREFIXES if len(prefix) == LONGEST - 1]
    logits = model(torch.tensor([[*PROMPT, *prefix] for prefix in long])).logits
    first = {}
    for row, prefix in enumerate(long):
        for n in range(LONGEST):
            first.setdefault(prefix[:n], (row, len(PROMPT) - 1 + n))
    return torch.stack([logits[first[prefix]] for prefix in PREFIXES])


def probabilities(logprobs):
    """Return the probability of each completion (N,)."""
    return at_tokens(logprobs).sum(1).exp()


def at_tokens(table):
    """Return what a table (prefixes, V) says of each token of each completion (N, T), 0 after its end."""
    return table.reshape(-1)[TOKENS] * MASK


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


def train(model, steps, rate=3e-3):
    """Follow the exact gradient of the expected reward for some steps of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for _ in range(steps):
        optimizer.zero_grad()
        (-(probabilities(next_logits(model).log_softmax(-1)) * REWARDS).sum()).backward()
        optimizer.step()
    return model


def new_model():
    return build_model("llama", vocab_size=VOCAB_SIZE, scale=3.0)


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


# ---- groups, by the counts of their types


def compositions(total, parts):
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


class Groups:
    """All groups of some size, told apart by how many completions of each type they have."""

    def __init__(self, size, names, chances):
        found = {}
        for place, name in enumerate(names):
            found.setdefault(name, []).append(place)
        self.names = sorted(found)
        self.members = [torch.tensor(found[name]) for name in self.names]
        self.size, self.chances = size, chances
        self.share = rows(chances[members].sum() for members in self.members)  # of each type
        self.counts = rows(compositions(size, len(self.names)))  # (groups, types)
        ways = math.lgamma(size + 1) - torch.lgamma(self.counts + 1).sum(1)
        self.weights = (ways + torch.xlogy(self.counts, self.share).sum(1)).exp()  # chance of each group

    def coefficients(self, weigh):
        """Return the mean coefficient of each completion (N, 1), for weights (groups, types) of a loss."""
        each = (self.weights.unsqueeze(1) * self.counts * weigh).sum(0) / self.share  # (types,)
        return self.spread(each)

    def spread(self, each):
        values = torch.zeros(len(self.chances), 1, dtype=torch.float64)
        for members, value in zip(self.members, each):
            values[members] = value
        return values


def centred(groups, reward):
    """Return R - mean R of each type in each group (groups, types)."""
    return reward - (groups.counts * reward).sum(1, keepdim=True) / groups.counts.sum(1, keepdim=True)


def deviation(groups, reward, ddof):
    squares = (groups.counts * centred(groups, reward) ** 2).sum(1, keepdim=True)
    return (squares / (groups.counts.sum(1, keepdim=True) - ddof)).sqrt()


# ---- the situations: a policy, the sampler, and how far both have come


def situation(policy, sampler_logprobs, reference):
    chances = probabilities(sampler_logprobs)
    found = SimpleNamespace(policy=policy, scores=policy.scores, sampler=sampler_logprobs, chances=chances)
    found.reference = reference
    found.own = probabilities(policy.logprobs)
    right, wrong = (drawn(64, found.own * (REWARDS == value), seed=1) for value in (1, 0))
    found.pairs, found.texts = list(zip(right, wrong)), drawn(16, found.own * REWARDS, seed=2)
    found.types = [(int(reward), int(length)) for reward, length in zip(REWARDS, LENGTHS)]
    return found


def rounded(logits, step):
    return (logits / step).round() * step


def situations():
    """Return {name: situation}: at the start, after training, and after training with a sampler that rounds."""
    start = freeze(new_model())
    trained = freeze(train(new_model(), 8))
    coarse = rounded(trained.logits, 0.25).log_softmax(-1)  # as of a sampler with few bits
    nearby = start.logprobs + 0.3 * torch.randn(start.logprobs.shape, generator=torch.Generator().manual_seed(0))
    return {
        "start": situation(start, start.logprobs, nearby.log_softmax(-1)),
        "trained": situation(trained, trained.logprobs, start.logprobs),
        "rounds": situation(trained, coarse, start.logprobs),
    }


def measure(found, target):
    """Return the relative error and the cosine of a gradient against that of the objective."""
    norm, scale = found.norm(), target.norm()
    cosine = (found @ target / (norm * scale)).item() if norm > 1e-12 * scale else math.nan
    return ((found - target).norm() / scale).item(), cosine, (norm / scale).item()


def true_gradient(at):
    """The gradient of the expected reward of the policy."""
    return expect((REWARDS - at.own @ REWARDS).unsqueeze(1), at.own, at.scores)


# ---- the details: each function returns {variant: (gradient, gradient of the objective)}

GROUP, HALF = 8, 3  # completions of a group; of each of two parts where a batch is split


def against(target, at, coefficients, scores=None):
    scores = at.scores if scores is None else scores
    return {name: (expect(values, at.chances, scores), target) for name, values in coefficients.items()}


def baseline(at):
    return (REWARDS - at.chances @ REWARDS).unsqueeze(1)  # (N, 1)


def divisors(at):
    groups = Groups(GROUP, at.types, at.chances)
    reward, length = (rows(values) for values in zip(*groups.names))
    advantage, total = centred(groups, reward), (groups.counts * length).sum(1, keepdim=True)
    longest = torch.where(groups.counts > 0, length, 0.0).amax(1, keepdim=True)
    weighed = {
        "A": advantage / length / GROUP,
        "B": advantage / total,
        "C": advantage / LONGEST / GROUP,
        "E": advantage / (len(PROMPT) + longest - 1) / GROUP,
        "F": advantage / GROUP,
        "G": advantage / longest / GROUP,
    }
    found = {name: groups.coefficients(value) for name, value in weighed.items()}
    found["D"] = halves(at)["B"]
    return against(true_gradient(at), at, dict(sorted(found.items())))


def halves(at):
    """Coefficients for a batch in two equal parts, centred over both: one divisor, or one for each part."""
    part = Groups(HALF, at.types, at.chances)
    reward, length = (rows(values) for values in zip(*part.names))
    tokens, rewards = ((part.counts * value).sum(1) for value in (length, reward))  # (groups,)
    first = torch.zeros_like(part.share)
    second = torch.zeros_like(part.share)
    for chance, own_tokens, own_rewards, counts in zip(part.weights, tokens, rewards, part.counts):
        weight = chance * part.weights  # of all other halves (groups,)
        advantage = reward - ((own_rewards + rewards) / (2 * HALF)).unsqueeze(1)  # (groups, types)
        first += counts * (weight.unsqueeze(1) * 2 * advantage / (own_tokens + tokens).unsqueeze(1)).sum(0)
        second += counts * (weight.unsqueeze(1) * advantage).sum(0) / own_tokens
    return {"A": part.spread(first / part.share), "B": part.spread(second / part.share)}


def microbatches(at):
    return against(true_gradient(at), at, halves(at))


def by_reward(at, weigh):
    groups = Groups(GROUP, [int(reward) for reward in REWARDS], at.chances)
    reward = rows(groups.names)
    return groups, groups.coefficients(weigh(groups, reward) / GROUP)


def deviations(at):
    found = {}
    for name, ddof, epsilon in (("A", 1, 1e-4), ("B", 1, 1e-6), ("C", 1, 1e-8), ("D", 1, 1e-9), ("E", 0, 1e-4)):
        _, found[name] = by_reward(
            at, lambda groups, r, ddof=ddof, eps=epsilon: centred(groups, r) / (deviation(groups, r, ddof) + eps)
        )
    _, found["G"] = by_reward(at, centred)
    return against(true_gradient(at), at, found)


def own_reward(at):
    _, inside = by_reward(at, centred)
    return against(true_gradient(at), at, {"A": inside, "B": inside * GROUP / (GROUP - 1)})


def two_prompts(at):
    """Two prompts, an easy and a hard one, of which a batch has a group each; both have the same completions."""
    found = {}
    target = expect((REWARDS + RARE_REWARDS).unsqueeze(1) / 2, at.own, at.scores)
    easy, hard = (Groups(GROUP, list(map(int, values)), at.chances) for values in (REWARDS, RARE_REWARDS))
    for name in ("A", "B", "D"):
        gradient = 0.0
        for own, other in ((easy, hard), (hard, easy)):
            reward = rows(own.names)
            advantage = centred(own, reward)
            if name == "A":
                advantage = advantage / (deviation(own, reward, 1) + 1e-4)
            if name == "B":  # the deviation of both groups' rewards; the mean of its inverse over the other group
                right = [(group.counts * rows(group.names)).sum(1) for group in (own, other)]
                total = right[0].unsqueeze(1) + right[1]  # (groups, other groups)
                spread = ((total - total**2 / (2 * GROUP)) / (2 * GROUP - 1)).sqrt() + 1e-4
                advantage = advantage * (other.weights / spread).sum(1, keepdim=True)
            gradient = gradient + expect(own.coefficients(advantage / GROUP), at.chances, at.scores) / 2
        found[name] = (gradient, target)
    return found


def temperatures(at):
    temperature, coarse = 0.6, 0.6015625  # the second is bfloat16's nearest to the first
    sampler = tempered(at.policy.logits, temperature)
    chances = probabilities(sampler)
    advantage = (REWARDS - chances @ REWARDS).unsqueeze(1)
    own = tempered_scores(at.policy, temperature)
    target = expect(advantage, chances, own)
    found = {"A": own, "B": at.scores, "C": tempered_scores(at.policy, coarse)}
    return {name: (expect(advantage, chances, scores), target) for name, scores in found.items()}


def reported(at):
    """The weight is 1 with what the sampler really did; with what it would do at temperature 1 it is not."""
    temperature = 0.6
    sampler = tempered(at.policy.logits, temperature)
    chances, scores = probabilities(sampler), tempered_scores(at.policy, temperature)
    advantage = (REWARDS - chances @ REWARDS).unsqueeze(1)
    raw = at_tokens(sampler - at.policy.logprobs).exp().clamp(max=2)
    target = expect(advantage, chances, scores)
    return {"A": (target, target), "B": (expect(advantage * raw, chances, scores), target)}


def truncations(at):
    chances = at.policy.logprobs.exp()
    ordered, order = chances.sort(-1, descending=True)
    nucleus = torch.zeros_like(chances).scatter(-1, order, ((ordered.cumsum(-1) - ordered) < 0.9).double() * ordered)
    top = torch.zeros_like(chances).scatter(-1, order[:, :3], ordered[:, :3])
    found = {"A": (true_gradient(at), true_gradient(at))}
    for name, kept in (("B", nucleus), ("C", top)):
        truncated = kept / kept.sum(-1, keepdim=True)
        sampled = torch.where(MASK > 0, truncated.reshape(-1)[TOKENS], 1.0).prod(1)
        mean = torch.einsum("xv,xvp->xp", truncated, at.scores)
        own = at.scores - mean.unsqueeze(1)  # of the sampler, whose softmax is over what is kept
        advantage = (REWARDS - sampled @ REWARDS).unsqueeze(1)
        found[name] = (expect(advantage, sampled, at.scores), expect(advantage, sampled, own))
    return found


def stop_tokens(at):
    stop = LAST * STOPPED.unsqueeze(1)
    return against(true_gradient(at), at, {"A": baseline(at) * MASK, "B": baseline(at) * (MASK - stop)})


def cut_off(at):
    stopped = STOPPED.unsqueeze(1)
    kept = at.chances * STOPPED
    conditional = (REWARDS - kept @ REWARDS / kept.sum()).unsqueeze(1)
    lowered = REWARDS - 0.5 * (1 - STOPPED)
    found = {"A": baseline(at), "B": baseline(at) * stopped, "C": conditional * stopped}
    for name, reward in (("D", lowered), ("E", REWARDS * STOPPED)):
        found[name] = (reward - at.chances @ reward).unsqueeze(1)
    return against(true_gradient(at), at, found)


def equal_groups(at):
    """The KL term of completions in groups of equal rewards, which are dropped or not; k3 in the loss, as for G07."""
    k3 = 1 - at_tokens(at.reference - at.policy.logprobs).exp() * MASK
    share = at.chances @ REWARDS
    same = torch.where(REWARDS > 0, share, 1 - share) ** (GROUP - 1)  # chance that all others have the same reward
    target = expect(k3, at.chances, at.scores)
    return against(target, at, {"A": k3, "B": k3 * (1 - same).unsqueeze(1)})


def kl_gradient(at):
    ratios = at_tokens(at.policy.logprobs - at.reference)
    return expect(ratios.sum(1, keepdim=True), at.own, at.scores)


def kl_estimators(at):
    k1 = at_tokens(at.policy.logprobs - at.reference)
    r, rho = k1.exp(), (-k1).exp()
    found = {"A": 1 - rho, "B": k1, "C": k1.sum(1, keepdim=True), "D": k1, "E": k1 + 1, "F": r - 1}
    return against(kl_gradient(at), at, found | {"G": torch.ones_like(k1), "H": -k1.sum(1, keepdim=True)})


BETA = 0.1


def kl_in_reward(at):
    k1 = at_tokens(at.policy.logprobs - at.reference)
    reverse = (k1.exp() - k1 - 1) * MASK
    target = true_gradient(at) - BETA * kl_gradient(at)
    to_go = k1.flip(1).cumsum(1).flip(1)
    whole, mean = (REWARDS - BETA * value for value in (k1.sum(1), reverse.sum(1) / LENGTHS))
    found = {"A": (whole - at.chances @ whole).unsqueeze(1), "B": baseline(at) - BETA * to_go}
    found |= {"C": (mean - at.chances @ mean).unsqueeze(1), "none": baseline(at)}
    return against(target, at, found)


def kl_of_tokens(at):
    k1 = at_tokens(at.policy.logprobs - at.reference)
    k3, reverse = (-k1).exp() + k1 - 1, k1.exp() - k1 - 1
    to_go = [value.flip(1).cumsum(1).flip(1) for value in (k1, k1.clamp(-10, 10), k3 * MASK)]
    mean = ((reverse * MASK).sum(1) / LENGTHS).unsqueeze(1)
    return against(kl_gradient(at), at, dict(zip("ABC", to_go)) | {"D": mean})


def weights_of(at):
    return torch.where(MASK > 0, at_tokens(at.policy.logprobs - at.sampler).exp(), 1.0)  # (N, T)


def kl_weights(at):
    rho = at_tokens(at.reference - at.policy.logprobs).exp()
    target = expect(1 - rho, at.own, at.scores)
    return against(target, at, {"A": 1 - rho, "ours": weights_of(at).clamp(max=2) * (1 - rho)})


def sampler_weights(at):
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
    return against(true_gradient(at), at, {name: value * baseline(at) for name, value in found.items()})


# ---- after an update: completions of the old policy, and a policy that has moved


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


def clips(at):
    later = at.later
    ratio, advantage = weights_of(later), baseline(later)
    bad = advantage < 0
    inside = {high: torch.where(bad, ratio >= 0.8, ratio <= 1 + high) for high in (0.2, 0.272)}
    found = {"A": ratio * inside[0.2], "B": ratio * inside[0.2] * ~(bad & (ratio > 3)), "C": ratio * inside[0.272]}
    found |= {"D": torch.ones_like(ratio), "unclipped": ratio}
    return against(true_gradient(later), later, {name: value * advantage for name, value in found.items()})


def caps(at):
    later = at.later
    ratio, advantage = weights_of(later), baseline(later)
    found = {"A": ratio.clamp(max=0.2), "B": ratio.clamp(0.8, 1.2), "C": ratio.clamp(max=1.272)}
    found["ours"] = ratio.clamp(max=5)
    return against(true_gradient(later), later, {name: value * advantage for name, value in found.items()})


def sequence_ratios(at):
    later = at.soon
    ratio, advantage = weights_of(later), baseline(later)
    length = LENGTHS.unsqueeze(1)
    mean = (ratio.log().sum(1, keepdim=True) / length).exp()
    kept = torch.where(advantage < 0, mean >= 1 - 3e-4, mean <= 1 + 4e-4)
    average = later.chances @ LENGTHS
    found = {"A": mean * kept / length, "B": mean * kept / average}
    return against(true_gradient(later), later, {name: value * advantage for name, value in found.items()})


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


def score_places(at):
    return against(true_gradient(at), at, {"A": gae(at, 1.0, 0.95), "B": gae(at, 1.0, 0.95, shifted=True)})


def discounts(at):
    found = {"A": gae(at, 1.0, 0.95), "B": gae(at, 1.0, 1.0), "C": gae(at, 0.99, 0.95)}
    return against(true_gradient(at), at, found)


def whitenings(at):
    advantages = gae(at, 1.0, 0.95)
    weights = at.chances.unsqueeze(1) * MASK
    mean = (weights * advantages).sum() / weights.sum()
    return against(true_gradient(at), at, {"E": advantages, "A": (advantages - mean) * MASK})


def missing_stops(at):
    replaced = torch.where(STOPPED > 0, REWARDS, -1.0)
    lowered = REWARDS - (1 - STOPPED)
    low = torch.where(STOPPED > 0, 2 * REWARDS - 2, -1.0)
    scores = {"A": replaced, "low": low, "B": lowered, "C": REWARDS}
    found = {name: (value - at.chances @ value).unsqueeze(1) for name, value in scores.items()}
    return against(true_gradient(at), at, found)


def value_losses(at):
    """The gradient by the values themselves, which an update has moved from 0 to half of the truth."""
    old = torch.zeros_like(MASK)
    weights = at.chances.unsqueeze(1) * MASK
    values, returns = values_of(at), REWARDS.unsqueeze(1) * MASK
    found = {}
    for name, clip, weight in (("plain", 9.0, 1.0), ("A", 0.2, 1.0), ("B", 0.5, 1.0), ("C", 0.2, None)):
        clipped = old + (values - old).clamp(-clip, clip)
        active = (values - returns) ** 2 >= (clipped - returns) ** 2
        each = (values - returns) * (active | ((values - old).abs() <= clip)) * weights
        if weight is None:  # a mean over the tokens of each completion
            each = each / LENGTHS.unsqueeze(1)
        table = torch.zeros(len(PREFIXES), dtype=torch.float64)
        found[name] = table.index_add(0, PREFIX_OF.reshape(-1), each.reshape(-1))
    target = found.pop("plain")
    return {name: (value, target) for name, value in found.items()}


# ---- DPO and SFT: a fixed batch


def drawn(count, chances, seed):
    """Return the places of completions that are drawn with these chances."""
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(chances, count, replacement=True, generator=generator).tolist()


def pair_gradient(at, beta, coefficient=lambda margin, beta: -beta * torch.sigmoid(-beta * margin), **changes):
    """Return the summed gradient of a loss of pairs, whose derivative by the margin is given."""
    tokens = changes.get("tokens", MASK)
    logratios = at_tokens(at.policy.logprobs - at.reference) * tokens
    if changes.get("mean"):
        tokens = tokens / LENGTHS.unsqueeze(1)
        logratios = logratios / LENGTHS.unsqueeze(1)
    sums = logratios.sum(1)
    weights = torch.zeros(len(COMPLETIONS), dtype=torch.float64)
    tokens_of = [LENGTHS[chosen] + LENGTHS[rejected] + 2 * len(PROMPT) for chosen, rejected in at.pairs]
    for (chosen, rejected), count in zip(at.pairs, tokens_of):
        slope = coefficient(sums[chosen] - sums[rejected], beta)
        if changes.get("by_tokens"):
            slope = slope * count / (sum(tokens_of) / len(tokens_of))
        weights[chosen] += slope
        weights[rejected] -= slope
    return expect(tokens, weights, at.scores)


def pair_sums(at):
    target = pair_gradient(at, 0.1)
    mean = sum(LENGTHS[place] for pair in at.pairs for place in pair) / (2 * len(at.pairs))
    found = {"A": target, "same": pair_gradient(at, 0.1 * mean, mean=True), "B": pair_gradient(at, 5.0, mean=True)}
    return {name: (value, target) for name, value in found.items()}


def smoothed(epsilon, robust=False):
    def coefficient(margin, beta):
        wrong = epsilon * beta * torch.sigmoid(beta * margin)
        right = (1 - epsilon) * beta * torch.sigmoid(-beta * margin)
        return (-right - wrong) / (1 - 2 * epsilon) if robust else wrong - right

    return coefficient


def label_smoothing(at):
    target = pair_gradient(at, 0.1, smoothed(0.1))
    found = {"A": target, "B": pair_gradient(at, 0.1, smoothed(0.1, robust=True)), "C": pair_gradient(at, 0.1)}
    return {name: (value, target) for name, value in found.items()}


def pair_stops(at):
    target = pair_gradient(at, 0.1)
    without = pair_gradient(at, 0.1, tokens=MASK - LAST * STOPPED.unsqueeze(1))
    return {"with": (target, target), "without": (without, target)}


def pair_weights(at):
    target = pair_gradient(at, 0.1)
    return {"A": (target, target), "B": (pair_gradient(at, 0.1, by_tokens=True), target)}


def text_gradient(at, divide):
    weights = torch.zeros(len(COMPLETIONS), dtype=torch.float64)
    for start in range(0, len(at.texts), 4):
        part = at.texts[start : start + 4]
        for place in part:
            weights[place] -= 1 / divide(place, part)
    return expect(MASK, weights, at.scores)


def text_means(at):
    whole = sum(LENGTHS[place] for place in at.texts)
    target = text_gradient(at, lambda _place, _part: whole)
    found = {
        "A": target,
        "B": text_gradient(at, lambda _place, part: 4 * sum(LENGTHS[other] for other in part)),
        "C": text_gradient(at, lambda place, _part: len(at.texts) * LENGTHS[place]),
        "D": text_gradient(at, lambda _place, _part: len(at.texts)),
    }
    return {name: (value, target) for name, value in found.items()}


def prompt_tokens(at):
    target = text_gradient(at, lambda _place, _part: 1)
    model = at.policy.model
    logprobs = model(torch.tensor([PROMPT])).logits.log_softmax(-1)
    with_prompt = target - len(at.texts) * flat_gradient(logprobs[0, 0, PROMPT[1]], model)
    return {"A": (target, target), "B": (with_prompt, target)}


def entropies(at):
    """The gradient of the entropy after each prefix at temperature 0.6, and at 1; prefixes are sampled at 0.6."""
    chances, found = probabilities(tempered(at.policy.logits, 0.6)), {}
    visits = torch.zeros(len(PREFIXES), dtype=torch.float64)
    visits.index_add_(0, PREFIX_OF.reshape(-1), (chances.unsqueeze(1) * MASK).reshape(-1))
    for name, temperature in (("A", 0.6), ("C", 1.0)):
        logprobs, scores = tempered(at.policy.logits, temperature), tempered_scores(at.policy, temperature)
        slopes = -(logprobs.exp() * (logprobs + 1)) * visits.unsqueeze(1)
        found[name] = torch.einsum("xv,xvp->p", slopes, scores)
    return {name: (value, found["A"]) for name, value in found.items()}


EXACT = {
    "G01": divisors,
    "G02": microbatches,
    "G03": deviations,
    "G04": two_prompts,
    "G05": own_reward,
    "G07": kl_estimators,
    "G09": kl_in_reward,
    "G11": temperatures,
    "G12": truncations,
    "G13": stop_tokens,
    "G14": cut_off,
    "G15": sampler_weights,
    "G16": kl_weights,
    "G17": clips,
    "G18": caps,
    "G19": sequence_ratios,
    "G21": equal_groups,
    "G23": entropies,
    "G32": reported,
    "P01": score_places,
    "P02": kl_of_tokens,
    "P04": whitenings,
    "P05": value_losses,
    "P06": discounts,
    "P07": missing_stops,
    "D01": pair_sums,
    "D02": label_smoothing,
    "D03": pair_stops,
    "D07": pair_weights,
    "S01": text_means,
    "S02": prompt_tokens,
}


def compute():
    """Return {detail: {variant: {situation: (relative error, cosine, ratio of norms)}}}, and the policies' rewards."""
    found, right = {}, {}
    for name, at in situations().items():
        right[name] = f"{at.own @ REWARDS:.2f}"
        at.later, at.soon = moved(at, 0.05), moved(at, 2e-4)
        for detail, function in EXACT.items():
            for variant, (gradient, target) in function(at).items():
                found.setdefault(detail, {}).setdefault(variant, {})[name] = measure(gradient, target)
    return found, right


# ---- the page

PAGE, DATA = ROOT / "docs" / "details.md", ROOT / "docs" / "details.json"
PICTURE = ROOT / "docs" / "pictures" / "details.png"
NAMES = {"trl": "TRL", "nano-aha-moment": "nano-aha", "dpo": "DPO's-reference"}
HEAD = """# Details: what ten code bases do differently, and what it does to the gradient

[Pages](README.md) · [claims](claims.md) · [KL estimators](kl.md)

Each table is a detail in which implementations differ, each of its rows a variant. The numbers are exact: a tiny policy
has 1,093 completions, so every expectation is a sum. Ten code bases were read at one commit each; a name links to the
line.

**The ten details with the largest differences** (cosine of the expected gradient with that of the objective, after some
training; * acts only with an option set):

{top}

![Cosine of each variant with the gradient of the objective, after training](pictures/details.png)

*Details with a cosine below 0.99 at the start or after training; letters are those of the tables.*

## How to read the tables

- **Cell:** cosine with the gradient of the objective; relative error and ratio of the norms in brackets. A cosine of
  1.000 with an error is **scale only**: AdamW ignores a constant factor; gradient clipping and a KL weight do not.
  "-": no gradient.
- **Objective:** the expected reward, unless a note names another. KL rows: the KL divergence from the reference. DPO
  and SFT: the first variant.
- **Policy:** a random Llama with 4,816 weights, 4 tokens and at most 6 per completion. A completion is right if a 3
  directly follows a 2. "start" is right with {start}; "trained" follows eight exact steps and is right with {trained}.
  "rounds" is trained, with a sampler whose logits are rounded to quarters.
- **Reference:** of "trained" it is the start, of "start" the start with noise of 0.3 in its log-probabilities.
- **What may not carry over:** how far a cosine is from 1. Real completions are longer, and real rewards depend on their
  length in another way.
- **Groups** have 8 completions. Unless it is the detail, the baseline is their mean, which makes a gradient of ×0.87.
  Where a batch is split, it has two parts of 3. "ours" is what our scripts do.
- **Defaults only:** a code base stands beside its default, or beside the option in brackets. No name means: not found
  in it, or not confirmed.

| code base | commit | date |
|---|---|---|
{snapshots}

TRL is 1.10.0.dev0; in 1.16.0 its PPO trainer is gone.
"""
TOP = (
    (
        "P05",
        "A",
        "A clipped value loss (TRL, summarize, `ppo_rlhf.py`; with a mean per completion, as in oat and rlhf-book, "
        "<P05 C>), where an update moves values by up to 0.5 and the clip is 0.2",
    ),
    (
        "P07",
        "A",
        "Score −1 for a completion without a stop token, where scores are 0 and 1 (summarize); "
        "`ppo_rlhf.py` subtracts 1, <P07 B>",
    ),
    ("P02", "D", "A KL penalty per completion that is the mean of r − log r − 1 (rlhf-book)*"),
    (
        "G14",
        "E",
        "Reward 0 for a completion that is cut off (oat's `run_math_rl`, `dr_grpo.py`), where many right ones are; "
        "less 0.5 is <G14 D> (`dapo.py` lowers it gradually)",
    ),
    ("D01", "B", "DPO with means over tokens and β 5 (open-instruct), in place of sums and β 0.1"),
    ("S02", "B", "SFT on prompt tokens, too (TRL for texts and messages, summarize)"),
    ("G13", "B", "A stop token that is not trained (nanochat)"),
    ("G01", "A", "A mean over each completion's own tokens (rlhf-book, `grpo.py`, as in GRPO's paper)"),
    ("G09", "C", "The penalty of number 3, in the reward of a group (rlhf-book)*"),
    ("G32", "B", "Log-probabilities of temperature 1 for samples at 0.6 (oat sets no mode)*"),
)
FOOT = """
## What enumeration cannot decide

| detail | variants, and whose default they are | ours | why no number |
|---|---|---|---|
{rows}

`python docs/details.py` computes the numbers and writes this page from `docs/details.json`.
"""
SITUATIONS = ("start", "trained", "rounds")
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
    columns = SITUATIONS[2:] if detail["id"] in ("G15", "G16") else SITUATIONS[:2]
    lines = [f"### {detail['title']}", ""]
    if detail["note"]:
        lines += [textwrap.fill(detail["note"], 120), ""]
    lines += [f"|variant|default of|{'|'.join(columns)}|", f"|---|---|{'---|' * len(columns)}"]
    for letter, (key, formula) in zip(LETTERS, detail["variants"].items()):
        who = [link(cell, snapshots) for cell in detail["cells"] if cell["variant"] == key]
        own = [place["where"] for place in detail["ours"] if place["variant"] == key]
        who += [f"**ours:** {'; '.join(own)}"] if own else []
        numbers = found.get(detail["id"], {}).get(key)
        cells = [shown(numbers[name]) if numbers else "-" for name in columns]
        lines.append(f"|{letter}: {formula}|{', '.join(who)}|{'|'.join(cells)}|")
    return "\n".join([*lines, ""])


def undecided(detail, snapshots):
    variants = []
    for key, formula in detail["variants"].items():
        who = [link(cell, snapshots) for cell in detail["cells"] if cell["variant"] == key]
        variants.append(f"{key}, {formula}: {', '.join(who) or '-'}")
    return f"|{detail['title']}|{'; '.join(variants)}|{detail['ours']}|{detail['why']}|"


def render(found, right):
    """Return the page, for the numbers of compute and the shares of right completions."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    snapshots = data["snapshots"]
    top = []
    for number, (detail, variant, sentence) in enumerate(TOP, 1):
        title = next(row["title"] for row in data["details"] if row["id"] == detail)
        cosine = found[detail][variant]["trained"][1]
        for other, key in re.findall(r"<(\w+) (\w+)>", sentence):
            sentence = sentence.replace(f"<{other} {key}>", f"{found[other][key]['trained'][1]:.3f}")
        top.append(f"{number}. {sentence}: [{cosine:.3f}](#{anchor(title)}).")
    table = [
        f"|[{NAMES.get(name, name)}](https://github.com/{found_at['repo']})|`{found_at['commit'][:8]}`|{found_at['date']}|"
        for name, found_at in snapshots.items()
    ]
    parts = [HEAD.format(top="\n".join(top), snapshots="\n".join(table), **right)]
    groups = dict.fromkeys(row["group"] for row in data["details"])
    for group in groups:
        parts.append(f"## {group}\n")
        parts += [section(row, found, snapshots) for row in data["details"] if row["group"] == group]
    rows = "\n".join(undecided(row, snapshots) for row in data["undecided"])
    return "\n".join(parts) + FOOT.format(rows=rows)


def anchor(title):
    """Return GitHub's anchor of a heading."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


def draw(found):
    """Draw the cosines of all variants after training."""
    import matplotlib.pyplot as plt
    from PIL import PngImagePlugin

    data = json.loads(DATA.read_text(encoding="utf-8"))
    details = []
    for row in data["details"]:
        values = [found[row["id"]][key] for key in row["variants"] if key in found[row["id"]]]
        if any(abs(numbers[name][1] - 1) > 0.01 for numbers in values for name in SITUATIONS[:2]):
            details.append(row)
    figure, axes = plt.subplots(figsize=(11, 0.36 * len(details) + 1.2))
    drawn_cells = []
    for y, row in enumerate(details):
        for x, (letter, key) in enumerate(zip(LETTERS, row["variants"])):
            numbers = found[row["id"]].get(key)
            cosine = numbers["trained"][1] if numbers else math.nan
            if numbers:
                drawn_cells.append((row["id"], key, cosine if math.isnan(cosine) else round(cosine, 2)))
            colour = "#dddddd" if math.isnan(cosine) else plt.cm.RdYlGn(max(cosine, 0.0))
            axes.barh(y, 0.96, left=x, height=0.9, color=colour)
            text = f"{letter} {'-' if math.isnan(cosine) else format(cosine, '.2f')}"
            dark = cosine < 0.2 or cosine > 0.8
            axes.text(x + 0.48, y, text, ha="center", va="center", color="white" if dark else "black")
    titles = [row["title"] for row in details]
    axes.set(yticks=range(len(details)), yticklabels=titles, xticks=[], xlim=(0, 8))
    axes.set_title(
        "cosine with the gradient of the objective, after training (green: 1, red: 0 or less, grey: no gradient)"
    )
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    info = PngImagePlugin.PngInfo()
    info.add_itxt("drawn", repr(drawn_cells))  # a test compares it
    figure.savefig(PICTURE, dpi=110, bbox_inches="tight", pil_kwargs={"pnginfo": info})
    plt.close(figure)


def main():
    torch.set_num_threads(1)
    found, right = compute()
    PAGE.write_text(render(found, right), encoding="utf-8")
    draw(found)


if __name__ == "__main__":
    main()
