"""Write docs/side_by_side.md, tables that compare the scripts: python docs/side_by_side.py"""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "side_by_side.md"
HEAD = """# Side by side

The tables compare all scripts. This command opens a page that shows two scripts side by side, function by function, and
says above a function what differs in the terms of these tables:

    python tools/compare.py grpo gspo

![policy_loss of GRPO and GSPO side by side](pictures/compare.png)

What differs between two papers stands above the line `# ---- below`. Below it, the scripts that sample their own
completions are the same, except for a few functions that `tests/sync_copies.py` lists. `python docs/side_by_side.py`
writes this page.

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

The other five scripts do not use groups:

| | SFT | reward model | DPO | PPO | GKD |
|---|---|---|---|---|---|
| script | `sft.py` | `reward_model.py` | `dpo.py` | `ppo_rlhf.py` | `gkd.py` |
| paper | [Ouyang 2022](https://arxiv.org/abs/2203.02155v1) | [Ouyang 2022](https://arxiv.org/abs/2203.02155v1) | \
[Rafailov 2023](https://arxiv.org/abs/2305.18290v3) | [Schulman 2017](https://arxiv.org/abs/1707.06347v2), \
[Ouyang 2022](https://arxiv.org/abs/2203.02155v1), [Huang 2024](https://arxiv.org/abs/2403.17031v1) | \
[Agarwal 2023](https://arxiv.org/abs/2306.13649v3) |
| learns from | completions | pairs | pairs | its own samples | its own samples, completions, a teacher |
| objective | Σ log π | Σ log σ(s_w − s_l) | Σ log σ(β (Σₜ log π/π_ref of y_w − Σₜ log π/π_ref of y_l)) | \
Σᵢ Σₜ min(r A, clip(r) A), and the value loss | − Σᵢ 1/\\|oᵢ\\| Σₜ D(π_T ‖ π), each D a sum over the vocabulary |
| advantage | - | - | - | GAE of the reward, per token, whitened | - |
| reward R | - | - | - | last token: score, less a penalty if there is no stop token; each token: − β log π_old/π_ref \
| - |
| weight of a token | 1 / number of tokens | 1 / number of pairs; only the last token has a score | \
1 / number of pairs | 1 / number of tokens | 1 / (\\|oᵢ\\| × N) |
| ratio | none | none | none | of the token | none |
| clipping | none | none | none | 0.2; values within 0.2 of the old ones | none |
| KL | none | none | β, implied by the loss | k1 to the initial model, in the reward \
| the loss: to or from the teacher |
| models in memory | policy | reward model | policy; the reference's log-probabilities are computed once | \
policy, value model, reference, reward model | student, teacher |
"""
NAMES = """
y_w and y_l are the preferred and the other completion of a pair, and s_w and s_l are their scores. A rollout of PPO has
one completion per prompt. π_T is the teacher."""


def updates_per_rollout(script):
    """Return the optimizer steps per rollout with a script's defaults, for the bundled model and for a real one."""
    module = importlib.import_module(script)
    real = vars(module.Args())
    found = []
    for settings in (real | module.TINY, real):
        completions = settings["prompts_per_step"] * settings.get("group_size", 1)
        minibatch_size = settings["minibatch_size"] if "minibatch_size" in real else completions
        found.append(completions // minibatch_size * settings.get("update_epochs", 1))
    return found


def render():
    sys.path.insert(0, str(ROOT))
    columns = ("reinforce", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo_rlhf", "gkd")
    updates = ["{}, {}".format(*updates_per_rollout(script)) for script in columns]
    row = "| updates per rollout (bundled model, real model) | {} |".format
    text = [HEAD + row(" | ".join(updates[:-2])), MORE + FOOT + row(" | ".join(["-", "-", "-", *updates[-2:]])), NAMES]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
