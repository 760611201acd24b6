"""Write docs/side_by_side.md: tables of all scripts, and the diffs of the online scripts against grpo.py.

    python docs/side_by_side.py

The page gives a reason for each hunk. The diffs leave out docstrings and help texts.
"""

import ast
import difflib
import importlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "side_by_side.md"
# The reason for each hunk, in the order of the hunks.
NOTES = {
    "reinforce": [
        "One optimizer step per rollout: no minibatches and no epochs. RLOO warms up for 3 % of the steps.",
        "No clipping and no KL term. The baseline b is the subject of this script, so `--baseline` chooses it.",
        "The advantage is Rᵢ − bᵢ. bᵢ is 0, the mean of the group, or the mean of the others (RLOO, section 2.3). "
        "Nothing is divided by std R.",
        "There is no ratio, so log-probabilities of an older policy are not needed. The weight that corrects for the "
        "sampler's rounding is π_θ / π_sampler.",
        "Williams' eq. 11: (R − b) ∇ log π, with log-probabilities summed over the tokens of a completion.",
        "Every step is on-policy.",
        "`policy_loss` has other arguments here.",
        "Without a baseline, one completion per prompt is enough.",
        "No reference model. RLOO has a KL penalty in the reward, which this script leaves out (see the departures on "
        "[its page](reinforce.md#departures-from-the-paper)).",
        "One optimizer step per rollout.",
        "The policy gradient only holds for the policy that sampled, so there is one step. Its loss is divided by the "
        "number of completions. Without a KL term, rows with advantage 0 have no gradient.",
    ],
    "dr_grpo": [
        "No KL term (table 6).",
        "The paper finds two biases in GRPO. The first, division by std R, is removed here: Aᵢ = Rᵢ − mean R (section "
        "3.2).",
        "No reference model.",
        "The constant divisor is an argument.",
        "Lengths are not needed.",
        "The second bias is removed: a constant replaces 1/|oᵢ| (listing 1). There is no KL term (table 6). A "
        "truncated completion counts as wrong, as in the authors' code.",
        "No reference model.",
        "`policy_loss` has other arguments here.",
        "No reference model.",
        "Advantages come from the rewards with truncation punished. Without a KL term, rows with advantage 0 have no "
        "gradient.",
        "No reference model.",
        "A metric is added: the mean of the rewards that training uses.",
    ],
    "dapo": [
        "The maximum number of rounds of dynamic sampling.",
        "A warm-up of 20 rollouts, and several updates per rollout (section 4.1).",
        "Two clip ranges (section 3.1), no KL term (section 2.3), and the buffer of eq. 13, a fifth of the maximum "
        "length.",
        "Two clip ranges, and no reference model.",
        "Lengths are not needed.",
        "Clip-higher (section 3.1), also in the metrics.",
        "The loss is eq. 8's sum over all tokens instead of a mean per completion (section 3.3), without a KL term. "
        "`overlong_penalty` is eq. 13, and `has_signal` is the constraint of eq. 11. `sample_groups` samples until the "
        "batch is full of groups that have right and wrong completions (section 3.2).",
        "`policy_loss` has other arguments here.",
        "No reference model (section 2.3). A resumed run continues with the prompt after the last one that was used.",
        "Dynamic sampling replaces the single rollout. The reward is +1 or −1 (eq. 7) plus the punishment of eq. 13. "
        "Without a KL term, rows with advantage 0 have no gradient.",
        "Only groups with a signal are trained on, and there is no reference model.",
        "The mean over tokens (section 3.3), taken over the whole optimizer step, as in the authors' code.",
        "Metrics are added: the cost of dynamic sampling, and the mean of the rewards that training uses.",
    ],
    "gspo": [
        "Four minibatches per rollout (section 5.1).",
        "The two clip ranges of section 5.1, and no KL term, which the paper leaves out.",
        "Two clip ranges, and no reference model.",
        "A completion has one ratio, as it has one advantage.",
        "Eq. 7: the ratio is the geometric mean of the tokens' ratios. In the metrics, a clipped completion counts "
        "with all its tokens.",
        "Eq. 5, without a KL term. The weight that corrects for the sampler's rounding is a geometric mean, too. "
        "Without clipping, weight times ratio is then the ratio of eq. 7 between policy and sampler.",
        "`policy_loss` has other arguments here.",
        "No reference model.",
        "Without a KL term, rows with advantage 0 have no gradient.",
        "No reference model.",
    ],
    "cispo": [
        "More optimizer steps per rollout, closer to the paper's sixteen (section 3.1).",
        "Only an upper limit, because the paper's ε_low never takes effect. The paper has no KL term either (section "
        "3.1).",
        "Only an upper limit, and no reference model.",
        "Lengths are not needed.",
        "Eq. 5: the ratio is a capped weight through which no gradient flows, so no token loses its gradient. The "
        "metric counts capped tokens, whatever their advantage.",
        "Eq. 4: the weight times the policy gradient of every token. GRPO takes the smaller of two surrogates, one of "
        "which has no gradient where it is clipped. The sum runs over all tokens instead of a mean per completion, "
        "and there is no KL term.",
        "`policy_loss` has other arguments here.",
        "No reference model.",
        "Without a KL term, rows with advantage 0 have no gradient.",
        "No reference model.",
        "The mean over tokens of eq. 4, taken over the whole optimizer step.",
    ],
    "grpo_process": [
        "`bisect` finds the token that ends a step.",
        "Section 4.1.3. `step_rewards` finds the steps and their rewards, and `find_steps` the tokens that end them. "
        "`compute_advantages` normalises the rewards over all steps of the group. A token's advantage is their sum "
        "over the steps that end at it or later. The final answer is the last step.",
        "Each token has its own advantage.",
        "Advantages come from the rewards of a completion's steps instead of its one reward, so each token has its own "
        "advantage.",
        "The number of steps is logged, and a message is printed if no step was found.",
    ],
    "grpo_tools": [
        "The default system prompt tells a real model how to call the tool.",
        "The maximum number of tokens that the tool reads and writes. There is no KL term.",
        "The tool, and `ToolUse`, which `generate` calls after every sampled token. It asks the tool when a call may "
        "have ended. It replaces the next sampled tokens by the reply, and marks them with log-probability −inf. "
        "`mark_replies` marks the replies in the logged samples.",
        "No KL term.",
        "No KL term.",
        "No KL term.",
        "All ranks need equally many forward passes, so a rank may add a row whose tokens are all masked.",
        "`policy_loss` has other arguments here. The mask has only the policy's own tokens, so the tool's are in no "
        "loss and no mean.",
        "The entropy and the count of tokens leave out the tool's tokens, too.",
        "The tool, and no reference model.",
        "Evaluations use the tool, too.",
        "The tool's tokens have log-probability −inf, so `action_mask` has only the tokens that the policy sampled. "
        "Without a KL term, rows with advantage 0 have no gradient.",
        "No reference model.",
        "How often and how much the tool wrote is logged, and a message is printed if it never replied.",
        "Evaluations use the tool, too. The logged samples show its replies between « and ».",
    ],
}


def code_lines(script):
    """Return [(enclosing function or class, line)] for the code above the line, without docstrings and help texts."""
    source = (ROOT / f"{script}.py").read_text(encoding="utf-8").partition("# ---- below")[0]
    tree, owners, texts = ast.parse(source), {}, set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            owners |= dict.fromkeys(range(first, node.end_lineno + 1), f"`{node.name}`")
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(source.splitlines(), start=1)
    return [(owners.get(number, "outside functions"), line) for number, line in lines if number not in texts]


def code_hunks(script):
    """Return [(where, diff lines)] for the code of a script against grpo.py, with one line of context."""
    before, after = code_lines("grpo"), code_lines(script)
    matcher = difflib.SequenceMatcher(None, [line for _, line in before], [line for _, line in after], autojunk=False)
    hunks = []
    for group in matcher.get_grouped_opcodes(1):
        diff, places = [], []
        for kind, i1, i2, j1, j2 in group:
            if kind == "equal":
                diff += ["  " + line for _, line in before[i1:i2]]
            else:
                diff += ["- " + line for _, line in before[i1:i2]] + ["+ " + line for _, line in after[j1:j2]]
                places += [name for name, line in before[i1:i2] + after[j1:j2] if line.strip()]
        hunks.append((", ".join(dict.fromkeys(places)), diff))
    return hunks


HEAD = """# Side by side

The tables compare all scripts. The diffs below compare the scripts that sample their own completions, except PPO, with
`grpo.py`. They show only the part above the line `# ---- below`, without docstrings and help texts. All other code of
these scripts is identical (`tests/test_copies.py`, `docs/test_diffs.py`). This page is written by
`python docs/side_by_side.py`.

| | REINFORCE | GRPO | Dr. GRPO | DAPO | GSPO | CISPO |
|---|---|---|---|---|---|---|
| script | `reinforce.py` | `grpo.py` | `dr_grpo.py` | `dapo.py` | `gspo.py` | `cispo.py` |
| paper | [Williams 1992](https://doi.org/10.1007/BF00992696), [Ahmadian 2024](https://arxiv.org/abs/2402.14740v2) | \
[Shao 2024](https://arxiv.org/abs/2402.03300v3) | [Liu 2025](https://arxiv.org/abs/2503.20783v2) | \
[Yu 2025](https://arxiv.org/abs/2503.14476v2) | [Zheng 2025](https://arxiv.org/abs/2507.18071v2) | \
[Chen 2025](https://arxiv.org/abs/2506.13585v1) |
| objective | Σᵢ Aᵢ Σₜ log π | Σᵢ 1/\\|oᵢ\\| Σₜ min(r A, clip(r) A) − β k3 | Σᵢ Σₜ min(r A, clip(r) A) | \
Σᵢ Σₜ min(r A, clip(r) A) | Σᵢ min(s A, clip(s) A) | \
Σᵢ Σₜ sg(min(r, cap)) A log π |
| advantage Aᵢ | R − b, where b is 0, the group's mean, or the mean of the others | (R − mean) / std | R − mean | \
(R − mean) / std | (R − mean) / std | (R − mean) / std |
| reward R | rule | rule | rule; a truncated completion gets its group's lowest reward, or 0 if that is lower | \
±1 by the rule, overlong penalty | rule | rule |
| weight of a token | 1 / N | 1 / (\\|oᵢ\\| × N) | 1 / (L × N) | 1 / number of tokens | \
1 / (\\|oᵢ\\| × N) | 1 / number of tokens |
| ratio | none | of the token | of the token | of the token | of the completion, its tokens' geometric mean | \
of the token |
| clipping | none | 0.2 | 0.2 | 0.2 below, 0.28 above | 3e-4 below, 4e-4 above | none; r is capped at 5 |
| KL | none | k3 to the initial model, in the loss | none | none | none | none |
| groups with equal rewards | skipped | only the KL term | skipped | replaced by other prompts | skipped | skipped |
| models in memory | policy | policy, reference | policy | policy | policy | policy |
"""
MORE = """
The next table shows how two more scripts differ from GRPO:

| | GRPO, process supervision | GRPO, tools |
|---|---|---|
| script | `grpo_process.py` | `grpo_tools.py` |
| paper | [Shao 2024](https://arxiv.org/abs/2402.03300v3) | [Jin 2025](https://arxiv.org/abs/2503.09516v1) |
| objective | as in GRPO | as in GRPO, over the tokens that the policy wrote, without a KL term |
| advantage | of a token: Σ (R − mean) / std over the steps that end at it or later | as in GRPO |
| reward R | a rule for every step, and for the answer | rule |
| weight of a token | as in GRPO | 1 / (own tokens of oᵢ × N); 0 for tokens of the tool |
| KL | as in GRPO | none |
| groups with equal rewards | as in GRPO | skipped |
| models in memory | policy, reference | policy |
"""
FOOT = """
π is π_θ(oᵢₜ), r is the ratio π_θ / π_old of a token, s is the ratio of a completion, and sg stops the gradient. N is
the number of completions of an optimizer step, and L is `--max-completion-length`. Sums are over completions i and
their tokens t. k1 and k3 are [estimators of the KL divergence](kl.md).

The other four scripts do not use groups:

| | SFT | reward model | DPO | PPO |
|---|---|---|---|---|
| script | `sft.py` | `reward_model.py` | `dpo.py` | `ppo_rlhf.py` |
| paper | [Ouyang 2022](https://arxiv.org/abs/2203.02155v1) | [Ouyang 2022](https://arxiv.org/abs/2203.02155v1) | \
[Rafailov 2023](https://arxiv.org/abs/2305.18290v3) | [Schulman 2017](https://arxiv.org/abs/1707.06347v2), \
[Ouyang 2022](https://arxiv.org/abs/2203.02155v1), [Huang 2024](https://arxiv.org/abs/2403.17031v1) |
| learns from | completions | pairs | pairs | its own samples |
| objective | Σ log π | Σ log σ(s_w − s_l) | Σ log σ(β (Σₜ log π/π_ref of y_w − Σₜ log π/π_ref of y_l)) | \
Σᵢ Σₜ min(r A, clip(r) A), and the value loss |
| advantage | - | - | - | GAE of the reward, per token, whitened |
| reward R | - | - | - | last token: score, less a penalty if there is no stop token; each token: − β log π_old/π_ref |
| weight of a token | 1 / number of tokens | 1 / number of pairs; only the last token has a score | \
1 / number of pairs | 1 / number of tokens |
| ratio | none | none | none | of the token |
| clipping | none | none | none | 0.2; values within 0.2 of the old ones |
| KL | none | none | β, implied by the loss | k1 to the initial model, in the reward |
| models in memory | policy | reward model | policy; the reference's log-probabilities are computed once | \
policy, value model, reference, reward model |
"""
NAMES = """
y_w and y_l are the preferred and the other completion of a pair, and s_w and s_l are their scores. A rollout of PPO has
one completion per prompt."""


def updates_per_rollout(script):
    """Return the optimizer steps per rollout with a script's defaults, for the bundled model and for a real one."""
    named = json.loads((ROOT / "models" / "tiny" / "config.json").read_text(encoding="utf-8"))["task_defaults"]
    real = vars(importlib.import_module(script).Args())
    found = []
    for settings in (real | named | named.get(script, {}), real):
        completions = settings["prompts_per_step"] * settings.get("group_size", 1)
        minibatch_size = settings["minibatch_size"] if "minibatch_size" in real else completions
        found.append(completions // minibatch_size * settings.get("update_epochs", 1))
    return found


def render():
    sys.path.insert(0, str(ROOT))
    columns = ("reinforce", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo_rlhf")
    updates = ["{}, {}".format(*updates_per_rollout(script)) for script in columns]
    row = "| updates per rollout (bundled model, real model) | {} |".format
    text = [HEAD + row(" | ".join(updates[:-1])), MORE + FOOT + row(" | ".join(["-", "-", "-", updates[-1]])), NAMES]
    for script, notes in NOTES.items():
        text += ["", f"## `{script}.py` against `grpo.py`"]
        for (where, diff), note in zip(code_hunks(script), notes, strict=True):
            text += ["", f"{where}: {note}", "", "```diff", *diff, "```"]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
