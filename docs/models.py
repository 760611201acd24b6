"""Write docs/models.md, the list of architectures that the scripts can train: python docs/models.py

The architectures come from the table in tests/test_models.py.
"""

import sys
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

PATH = Path(__file__).parent / "models.md"
HEAD = """# Models

Written by `python docs/models.py` from the table of `tests/test_models.py`, with transformers {version}.

The scripts can train the {count} architectures below (`model_type` in config.json). For each of them the test makes a
small random model on a CPU, and compares padded batches with a forward pass of each sequence alone: log-probabilities,
gradients, and samples. Sparse attention (`index_topk`) is tested only on sequences that are short enough for it to keep
all tokens.

Other architectures may work as well. `dpo.py` and `sft.py` compare their log-probabilities with the model's own at the
start. The scripts that sample log `policy/sampler_kl`, the divergence between sampling and training: it should be
[5e-3 or less](is_this_normal.md#sampler_kl-grows). The run stops if it is above 0.1 per token in the first step
(`grpo_tools.py`, `gkd.py` and `ppo_rlhf.py`: above 0.5 in any step). Of some models that also read images (Qwen3.5),
only the language model is trained and saved.

Not supported: LoRA adapter folders (merge them into their model first), quantized checkpoints, models that transformers
cannot load as a causal language model (Qwen2.5-VL), and a reward model whose tokenizer differs from the policy's.

Some models have limits:

- `deepseek_v4` does not ignore padding, so its samples have wrong log-probabilities (`policy/sampler_kl` is 0.01 for a
  small random model).
- Models with longrope (some of `phi3`) read all rows of a batch differently as soon as one exceeds their original
  context. Then `policy/sampler_kl` grows.
- `zamba` and `zamba2`, whose blocks share weights, train in float32 on one process only, and are not tested.
- Layers that predict further tokens (`num_nextn_predict_layers`, `mtp_num_hidden_layers`) are neither trained nor
  saved. Set this number to 0 in the `config.json` of a checkpoint for programs that look for them.
- `biogpt` and `ctrl` do not name their blocks, so `--gradient-checkpointing` does nothing for them. The scripts that
  have `--lora-rank` need `--precision float32` for them.
- `--lora-rank` adds adapters only to linear layers. Fused expert weights and the layers of GPT-2 get none."""
SCORED = """
`reward_model.py` and the value and reward models of `ppo_rlhf.py` need a sequence classification class. transformers
has none for """
REFUSAL = """
## Refused

These models end in an error: sampling cannot use their cache, or their LM head or base model is not supported. With an
unsupported head, scripts that sample stop only after the first step, because `policy/sampler_kl` is too high, and say
that sampling and training disagree.

| error message contains | architectures |
|---|---|"""
TEMPLATES = """
## Chat templates without a system message

The chat templates of Gemma 1 and 2 and of some Mistral models refuse a system message. Set `--system-prompt ""`, and
put the instructions into the prompts."""


def render(trained, refused):
    names = lambda group: ", ".join(f"`{name}`" for name in sorted(group))  # noqa: E731
    every = {name for group in trained.values() for name in group}
    text = [HEAD.format(version=transformers.__version__, count=len(every))]
    for title, group in trained.items():
        text += ["", f"**{title}**: {names(group)}."]
    text += [f"{SCORED}{names(every - set(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES))}.", REFUSAL]
    lines = {}
    for name, (_, line) in refused.items():
        lines.setdefault(line, []).append(name)
    text += [f"| {line} | {names(group)} |" for line, group in lines.items()]
    return "\n".join([*text, TEMPLATES]) + "\n"


if __name__ == "__main__":
    sys.path[:0] = [str(PATH.parents[1]), str(PATH.parents[1] / "tests")]
    from test_models import REFUSED, TRAINED

    PATH.write_text(render(TRAINED, REFUSED), encoding="utf-8")
