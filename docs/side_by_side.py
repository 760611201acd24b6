"""Write docs/side_by_side.md: tables of all scripts, and what each online script changes in the code of grpo.py, with
the reason for each hunk.

    python docs/side_by_side.py

Docstrings and help texts are left out of the comparison; the papers' formulas are at the head of each script.
"""

import ast
import difflib
import importlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "side_by_side.md"
# One sentence a hunk, in the order of the hunks.
NOTES = {
    "reinforce": [
        "One optimizer step per rollout: no minibatches, no passes over old completions; the warm-up is RLOO's 3 %.",
        "No clipping and no KL term; b is the subject of this script, and `--baseline` is one of three words.",
        "Rᵢ − bᵢ with b = 0, the mean of the group, or (RLOO, section 2.3) the mean of the others; no 1/std R.",
        "There is no ratio, so there are no log-probabilities of an older policy: the sampler's weight is π_θ / "
        "π_sampler.",
        "Williams' eq. 11, (R − b) ∇ log π, whose log-probabilities are summed over the tokens of a completion.",
        "Every step is on policy.",
        "What policy_loss takes.",
        "Without a baseline one completion per prompt is enough.",
        "No reference model: RLOO has its KL penalty in the reward, which is left out (Departures).",
        "One optimizer step per rollout.",
        "The policy gradient holds for the policy that sampled: one step, whose divisor is the number of completions; "
        "without KL term, a row of zero advantage has no gradient at all.",
    ],
    "dr_grpo": [
        "No KL term (table 6).",
        "The first bias: Aᵢ = Rᵢ − mean R, without 1/std R (section 3.2).",
        "No reference model.",
        "The constant is an argument.",
        "Lengths are not needed.",
        "The second bias: a constant in place of 1/|oᵢ| (listing 1); no KL term (table 6); a truncated completion "
        "counts as wrong, as in the authors' code.",
        "No reference model.",
        "What policy_loss takes.",
        "No reference model.",
        "The reward that training sees; without KL term, a row of zero advantage has no gradient at all.",
        "No reference model.",
        "The reward that training sees.",
    ],
    "dapo": [
        "The most rounds of dynamic sampling.",
        "20 rollouts of warm-up, several updates per rollout (section 4.1).",
        "Two clip ranges (section 3.1), no KL term (section 2.3), and the buffer of eq. 13: a fifth of the limit.",
        "Two clip ranges, and no reference model.",
        "Lengths are not needed.",
        "Clip-higher (section 3.1), in the metrics as well.",
        "Eq. 8's sum over all tokens in place of a mean per completion (section 3.3), without KL term; the soft "
        "overlong punishment of eq. 13; the constraint of eq. 11; dynamic sampling (section 3.2): sample until the "
        "batch is full of groups neither all right nor all wrong.",
        "What policy_loss takes.",
        "No reference model (section 2.3); a resumed run goes on where the run before stopped consuming prompts.",
        "Dynamic sampling in place of one rollout; the reward is +1 or −1 (eq. 7) plus the punishment of eq. 13; "
        "without KL term, a row of zero advantage has no gradient at all.",
        "Only groups with signal are trained on, and there is no reference model.",
        "The token mean (section 3.3), here over the whole optimizer step, as in the authors' code.",
        "What dynamic sampling costs, and the reward that training sees.",
    ],
    "gspo": [
        "Four minibatches per rollout (section 5.1).",
        "The two clip ranges of section 5.1, and no KL term, which the paper leaves out.",
        "Two clip ranges, and no reference model.",
        "A completion has one ratio, as it has one advantage.",
        "Eq. 7: the geometric mean of its tokens' ratios; a completion that is clipped counts with all its tokens.",
        "Eq. 5, and no KL term; the sampler's weight is such a mean, too: unclipped, weight times ratio is eq. 7 "
        "against what sampled.",
        "What policy_loss takes.",
        "No reference model.",
        "Without KL term, a row of zero advantage has no gradient at all.",
        "No reference model.",
    ],
    "cispo": [
        "More optimizer steps of each rollout, nearer to the paper's sixteen (section 3.1).",
        "One range, above: the paper sets ε_low so that it never binds, and has no KL term (section 3.1).",
        "One range, and no reference model.",
        "Lengths are not needed.",
        "Eq. 5: the ratio is a weight, capped, through which no gradient flows; no token loses its gradient, and what "
        "is counted is how many are capped, whatever their advantage.",
        "Eq. 4: the weight times the policy gradient, of every token, in place of the smaller of two surrogates, of "
        "which one has no gradient where it is clipped; the sum over all tokens in place of a mean per completion; no "
        "KL term.",
        "What policy_loss takes.",
        "No reference model.",
        "Without KL term, a row of zero advantage has no gradient at all.",
        "No reference model.",
        "The token mean of eq. 4, here over the whole optimizer step.",
    ],
    "grpo_process": [
        "To find the token that ends a step.",
        "Section 4.1.3: what the steps are and what each is worth, where they end among the tokens, and their "
        "rewards, normalised over all steps of the group and summed from a token on; the final answer is the last "
        "step.",
        "A token has its own advantage.",
        "The steps of every completion, in place of its reward; a completion has as many advantages as tokens.",
        "How many steps were found; none is said.",
    ],
    "grpo_tools": [
        "How a real model is told to call the tool.",
        "How much of a text the tool sees, and may say; no KL term.",
        "The tool, and what `generate` asks for every draw: after certain tokens it asks the tool, whose reply it "
        "writes over the draws that follow, with the log-probability −inf.",
        "No KL term.",
        "No KL term.",
        "No KL term.",
        "Of a row that only keeps pace with the other ranks no token counts.",
        "What policy_loss takes: the mask of the policy's own tokens, so that the tool's are in no loss and no mean.",
        "Nor in the entropy and the count of tokens.",
        "No reference model; the tool.",
        "Evaluations have the tool, too.",
        "What was drawn has a finite log-probability, what was replied has not; without KL term, a row of zero "
        "advantage has no gradient at all.",
        "No reference model.",
        "How often and how much the tool wrote; a step without any reply is said.",
        "Evaluations have the tool, too.",
    ],
}


def code_lines(script):
    """Return [(enclosing function or class, line)] of the code above the line, without docstrings and help texts."""
    source = (ROOT / f"{script}.py").read_text(encoding="utf-8").partition("# ---- below")[0]
    tree, owners, texts = ast.parse(source), {}, set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            owners |= dict.fromkeys(range(first, node.end_lineno + 1), node.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(source.splitlines(), start=1)
    return [(owners.get(number, "module"), line) for number, line in lines if number not in texts]


def code_hunks(script):
    """Return [(where, diff lines)] of the code of a script against that of grpo.py, with one line of context."""
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
        hunks.append((", ".join(f"`{name}`" for name in dict.fromkeys(places)), diff))
    return hunks


HEAD = """# Side by side

Made by `python docs/side_by_side.py`. Tables of all scripts, then the online scripts hunk by hunk, above the
line that parts the algorithm from the plumbing. Below it they are one text, and what this page does not show above
it is identical to the letter (`tests/test_copies.py`, `docs/test_diffs.py`).

| | REINFORCE | GRPO | Dr. GRPO | DAPO | GSPO | CISPO |
|---|---|---|---|---|---|---|
| script | `reinforce.py` | `grpo.py` | `dr_grpo.py` | `dapo.py` | `gspo.py` | `cispo.py` |
| paper | [1](https://doi.org/10.1007/BF00992696), [2](https://arxiv.org/abs/2402.14740v2) | \
[3](https://arxiv.org/abs/2402.03300v3) | [4](https://arxiv.org/abs/2503.20783v2) | \
[5](https://arxiv.org/abs/2503.14476v2) | [6](https://arxiv.org/abs/2507.18071v2) | \
[11](https://arxiv.org/abs/2506.13585v1) |
| objective | Σᵢ Aᵢ Σₜ log π | Σᵢ 1/\\|oᵢ\\| Σₜ min(r A, clip(r) A) − β k3 | Σᵢ Σₜ min(r A, clip(r) A) | \
Σᵢ Σₜ min(r A, clip(r) A) | Σᵢ min(s A, clip(s) A) | \
Σᵢ Σₜ sg(min(r, cap)) A log π |
| advantage Aᵢ | R − b, b none, mean or mean of the others | (R − mean) / std | R − mean | (R − mean) / std | \
(R − mean) / std | (R − mean) / std |
| reward R | rule | rule | rule, its group's lowest (at most 0) if truncated | ±1 by the rule, overlong penalty | \
rule | rule |
| weight of a token | 1 / completions | 1 / (\\|oᵢ\\| completions) | 1 / (L completions) | 1 / tokens | \
1 / (\\|oᵢ\\| completions) | 1 / tokens |
| ratio | none | of the token | of the token | of the token | of the completion, its tokens' geometric mean | \
of the token |
| clipping | none | 0.2 | 0.2 | 0.2 below, 0.28 above | 3e-4 below, 4e-4 above | none; r counts up to 5 |
| KL | none | k3 to the initial model, in the loss | none | none | none | none |
| groups without signal | no pass | only the KL term | no pass | replaced by other prompts | no pass | no pass |
| models in memory | policy | policy, reference | policy | policy | policy | policy |
"""
MORE = """
Two more are GRPO but for these rows:

| | GRPO, process supervision | GRPO, tools |
|---|---|---|
| script | `grpo_process.py` | `grpo_tools.py` |
| paper | [3](https://arxiv.org/abs/2402.03300v3) | [12](https://arxiv.org/abs/2503.09516v1) |
| objective | as GRPO's | as GRPO's, over the tokens that the policy wrote, without KL term |
| advantage | of a token: Σ (R − mean) / std over the steps that end at it or later | as GRPO's |
| reward R | a rule for every step, and for the answer | rule |
| weight of a token | 1 / (\\|oᵢ\\| completions) | 1 / (own tokens of oᵢ, completions); 0 for those of the tool |
| models in memory | policy, reference | policy |
"""
FOOT = """
π is π_θ(oᵢₜ), r the ratio π_θ / π_old of a token, s that of a completion, L `--max-completion-length`; sums are over
completions i and their tokens t.

| | SFT | reward model | DPO | PPO |
|---|---|---|---|---|
| script | `sft.py` | `reward_model.py` | `dpo.py` | `ppo_rlhf.py` |
| paper | [7](https://arxiv.org/abs/2203.02155v1) | [7](https://arxiv.org/abs/2203.02155v1) | \
[8](https://arxiv.org/abs/2305.18290v3) | [9](https://arxiv.org/abs/1707.06347v2), \
[7](https://arxiv.org/abs/2203.02155v1), [10](https://arxiv.org/abs/2403.17031v1) |
| learns from | completions | pairs | pairs | its own samples |
| objective | Σ log π | Σ log σ(s_w − s_l) | Σ log σ(β (Σₜ log π/π_ref of y_w − Σₜ log π/π_ref of y_l)) | \
Σᵢ Σₜ min(r A, clip(r) A), and the value loss |
| advantage | - | - | - | GAE of the reward, per token, whitened |
| reward R | - | - | - | score − missing-stop penalty at the last token, − β log π_old/π_ref at each |
| weight of a token | 1 / tokens | 1 / pairs, of the score at the last token | 1 / pairs | 1 / tokens |
| ratio | none | none | none | of the token |
| clipping | none | none | none | 0.2; values within 0.2 of the old ones |
| KL | none | none | β, implied by the loss | k1 to the initial model, in the reward |
| models in memory | policy | reward model | policy; the reference's log-probabilities are kept | \
policy, value model, reference, reward model |
"""
NAMES = """
y_w and y_l are the preferred and the other completion of a pair, s their scores. A rollout of PPO has one completion a
prompt."""


def updates_per_rollout(script):
    """The optimizer steps that a script makes of each rollout by default: of the embedded model, and of a real one."""
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
    row = "| updates per rollout (embedded, real) | {} |".format
    text = [HEAD + row(" | ".join(updates[:-1])), MORE + FOOT + row(" | ".join(["-", "-", "-", updates[-1]])), NAMES]
    for script, notes in NOTES.items():
        text += ["", f"## `{script}.py` against `grpo.py`", ""]
        text += ["Code only: docstrings and help texts are left out."]
        for (where, diff), note in zip(code_hunks(script), notes, strict=True):
            text += ["", f"{where}: {note}", "", "```diff", *diff, "```"]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
