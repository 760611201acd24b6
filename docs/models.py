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
small random model on a CPU, and compares padded batches with a forward pass of each sequence alone. It checks
log-probabilities, gradients, and samples of groups in which rows finish at different times. Sparse attention
(`index_topk`) is tested only on sequences that are short enough for it to keep all tokens.

Other architectures may work as well. At the start, `dpo.py` and `sft.py` compare their log-probabilities with the
model's own, and refuse an LM head that they do not support. The scripts that sample log `policy/sampler_kl`, the
divergence between sampling and training, and stop after a step in which it exceeds 0.5 per token. Look at it in the
first steps of a new architecture: it should be about 0.001 or less. transformers refuses models that it cannot load as
a causal language model (Qwen2.5-VL). Of some models that also read images (Qwen3.5), only the language model is trained
and saved.

Not supported: LoRA adapter folders (merge them into their model first), quantized checkpoints (they end in an error of
transformers), training the vision part of a model, and a reward model whose tokenizer differs from the policy's.

Some models have limits:

- `deepseek_v4` does not ignore padding, so its samples have wrong log-probabilities (`policy/sampler_kl` is 0.01 for a
  small random model).
- Models with longrope (some of `phi3`) read all rows of a batch differently as soon as one exceeds their original
  context. Then `policy/sampler_kl` grows, and above 0.5 the run stops.
- `zamba` and `zamba2`, whose blocks share weights, train in float32 on one process only, and are not tested.
- Layers that predict further tokens (`num_nextn_predict_layers`, `mtp_num_hidden_layers`) are not loaded by
  transformers, so they are neither trained nor saved. Set this number to 0 in the `config.json` of a checkpoint for
  programs that look for them.
- `biogpt` and `ctrl` do not name their blocks, so no part of them can compute in bfloat16. Use `--precision float32`.
- `--lora-rank` adds adapters only to linear layers. Fused expert weights and the layers of GPT-2 get no adapters, and a
  model without any linear layer in its blocks would have nothing to train."""
SCORED = """
`reward_model.py` and the value and reward models of `ppo_rlhf.py` need a sequence classification class. transformers
has none for """
REFUSAL = """
## Refused

These models end in an error. Most of them have a cache that sampling cannot use, because sampling pads the prompts of a
batch, shares a prompt within a group, and removes finished rows from the batch. The others have an LM head or a base
model that the scripts do not support; with an unsupported head, the scripts that sample do not stop at the start, but
after the first step in which `policy/sampler_kl` exceeds 0.5.

| architecture | error message contains |
|---|---|"""
TEMPLATES = """
## Chat templates without a system message

The chat templates of Gemma 1 and 2 and of some Mistral models refuse a system message. With the default
`--system-prompt` for real models, the run then ends with the template's own error. Set `--system-prompt ""`, and put
the instructions into the prompts."""


def render(trained, refused):
    names = lambda group: ", ".join(f"`{name}`" for name in sorted(group))  # noqa: E731
    every = {name for group in trained.values() for name in group}
    text = [HEAD.format(version=transformers.__version__, count=len(every))]
    for title, group in trained.items():
        text += ["", f"**{title}**: {names(group)}."]
    text += [f"{SCORED}{names(every - set(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES))}.", REFUSAL]
    text += [f"| `{name}` | {line} |" for name, (_, line) in refused.items()]
    return "\n".join([*text, TEMPLATES]) + "\n"


if __name__ == "__main__":
    sys.path[:0] = [str(PATH.parents[1]), str(PATH.parents[1] / "tests")]
    from test_models import REFUSED, TRAINED

    PATH.write_text(render(TRAINED, REFUSED), encoding="utf-8")
