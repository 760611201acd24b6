"""Write docs/side_by_side.md, tables that compare the scripts: python docs/side_by_side.py"""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "side_by_side.md"
LEGEND = r"""# Side by side

The tables compare all scripts. This command opens a page that shows two of them side by side, function by function:

    python tools/compare.py grpo gspo

![policy_loss of GRPO and GSPO side by side](pictures/compare.png)

## Symbols

A script maximises a sum over completions i and their tokens t: weight of a token × w × objective.

```math
r=\frac{\pi_\theta(o_{it})}{\pi_\text{old}(o_{it})},\qquad
s=\left(\frac{\pi_\theta(o_i)}{\pi_\text{old}(o_i)}\right)^{1/|o_i|},\qquad
w=\min\left(\frac{\pi_\text{old}(o_{it})}{\pi_\text{sampler}(o_{it})},\text{cap}\right)
```

- π is π_θ(oᵢₜ), and sg stops the gradient.
- A is the advantage, clip(r) is r between 1 − lower and 1 + upper clip range, and the caps of w and of CISPO's r are
  flags of their own. β weights the KL term (`--kl-coef`), except in DPO, where it is `--beta`.
- N is the number of completions of an optimizer step, and L is `--max-completion-length`.
- w, near 1, corrects the sampler's rounding. In GSPO it is one number per completion, a geometric mean; in REINFORCE
  π_θ stands for π_old. Scripts that sample nothing have no w, and GKD has none.
- k1 and k3 are [estimators of the KL divergence](kl.md). D is the divergence that `--divergence` names.

## Scripts with groups
"""
HEAD = """
| |REINFORCE|GRPO|Dr. GRPO|DAPO|GSPO|CISPO|
|---|---|---|---|---|---|---|
|script|`reinforce.py`|`grpo.py`|`dr_grpo.py`|`dapo.py`|`gspo.py`|`cispo.py`|
|objective|A log π|min(r A, clip(r) A) − β k3|min(r A, clip(r) A)|min(r A, clip(r) A)|\
min(s A, clip(s) A), one per completion|sg(min(r, cap)) A log π|
|advantage Aᵢ|R − b, where b is 0, the group's mean, or the mean of the others|(R − mean) / std|R − mean|\
(R − mean) / std|(R − mean) / std|(R − mean) / std|
|reward R|rule|rule|rule; a truncated completion gets the lower of 0 and its group's lowest reward|\
±1 by the rule, overlong penalty|rule|rule|
|weight of a token|1 / N|1 / (\\|oᵢ\\| × N)|1 / (L × N)|1 / number of tokens|\
1 / N per completion; the gradient of s gives each token 1 / \\|oᵢ\\||1 / number of tokens|
|ratio|none|of the token|of the token|of the token|of the completion, its tokens' geometric mean|\
of the token|
|clipping|none|0.2|0.2|0.2 below, 0.28 above|3e-4 below, 4e-4 above|none; r is at most 5|
|KL|none|k3 to the initial model, in the loss|none|none|none|none|
|groups with equal rewards|skipped|only the KL term|skipped|replaced by other prompts|skipped|skipped|
|models in memory|policy|policy, reference|policy|policy|policy|policy|
"""
MORE = """
Two more scripts, and how they differ from GRPO:

| |GRPO, process supervision|GRPO, tools|
|---|---|---|
|script|`grpo_process.py`|`grpo_tools.py`|
|objective|as in GRPO|as in GRPO, over the tokens that the policy wrote, without a KL term|
|advantage|of a token: Σ (R − mean) / std over the steps that end at it or later|as in GRPO|
|reward R|a rule for every step, and for the answer|rule|
|weight of a token|as in GRPO|1 / (own tokens of oᵢ × N); 0 for tokens of the tool|
|KL|as in GRPO|none|
|groups with equal rewards|as in GRPO|skipped|
|models in memory|policy, reference|policy|
"""
FOOT = """
## Scripts without groups

y_w and y_l are the preferred and the other completion of a pair, s_w and s_l their scores, and π_T is the teacher. A
rollout of PPO has one completion per prompt.

| |SFT|reward model|DPO|PPO|GKD|
|---|---|---|---|---|---|
|script|`sft.py`|`reward_model.py`|`dpo.py`|`ppo_rlhf.py`|`gkd.py`|
|learns from|completions|pairs|pairs|its own samples|its own samples, completions, a teacher|
|objective|log π|log σ(s_w − s_l)|log σ(β (Σₜ log π/π_ref of y_w − Σₜ log π/π_ref of y_l))|\
min(r A, clip(r) A), and the value loss|− D(π_T ‖ π), a sum over the vocabulary|
|advantage|-|-|-|GAE of the reward, per token, whitened|-|
|reward R|-|-|-|last token: score, less a penalty if there is no stop token; each token: − β log π_old/π_ref\
|-|
|weight of a token|1 / number of tokens|1 / number of pairs; only the last token has a score|\
1 / number of pairs|1 / number of tokens|1 / (\\|oᵢ\\| × N)|
|ratio|none|none|none|of the token|none|
|clipping|none|none|none|0.2; values within 0.2 of the old ones|none|
|KL|none|none|β, implied by the loss|k1 to the initial model, in the reward\
|the loss: to or from the teacher|
|models in memory|policy|reward model|policy, reference|\
policy, value model, reference, reward model|student, teacher|
"""


def updates_per_rollout(script):
    """Return the optimizer steps per rollout with a script's defaults, for the bundled model and for a real one."""
    module = importlib.import_module(script)
    real = vars(module.Args())
    found = []
    for settings in (vars(module.TINY), real):
        completions = settings["prompts_per_step"] * settings.get("group_size", 1)
        minibatch_size = settings["minibatch_size"] if "minibatch_size" in real else completions
        found.append(completions // minibatch_size * settings.get("update_epochs", 1))
    return found


def render():
    sys.path.insert(0, str(ROOT))
    columns = ("reinforce", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo_rlhf", "gkd")
    updates = ["{}, {}".format(*updates_per_rollout(script)) for script in columns]
    row = "|updates per rollout (bundled model, real model)|{}|".format
    text = [LEGEND + HEAD + row("|".join(updates[:-2])), MORE + FOOT + row("|".join(["-"] * 3 + updates[-2:]))]
    text.append("\n[Each script's page](README.md) has its objective in full.")
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
