"""Write docs/models.md, which architectures train, from the table in tests/test_models.py."""

import sys
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

PATH = Path(__file__).parent / "models.md"
HEAD = """# Models

Written by `python docs/models.py` from the table of `tests/test_models.py`, with transformers {version}.

These {count} architectures (`model_type` in config.json) train. Of each a small random model was compared, on a CPU,
with its own forward pass of each sequence alone: log-probabilities and gradients of padded batches, and samples of
padded groups whose rows finish at different times. Sparse attention (`index_topk`) was compared where it still keeps
all tokens. Others may train as well: at start a script that samples compares that with training on beginnings of one
prompt, and ends with an error where it finds a difference. If a model also reads images (Gemma 3, Qwen3.5), only its
language model is trained and saved, and the script says so. Models that transformers cannot load as a causal language
model (Qwen2.5-VL) are refused.

Not supported: LoRA adapter folders (merge them into their model first), quantized checkpoints, training the vision part
of a model, and a reward model whose tokenizer differs from the policy's.

`zamba` and `zamba2`, whose blocks share weights, train in float32 on one process only, and are not tested. `biogpt` and
`ctrl` name no blocks, so nothing of them can compute in bfloat16: they need `--precision float32`. `--lora-rank` needs
weights in linear layers: experts that are held together, and GPT-2's layers, get no adapters, and a model without any
linear layer in its blocks has nothing to train."""
SCORED = """
`reward_model.py`, and the value and reward models of `ppo_rlhf.py`, need a sequence classification class. transformers
has no such class for """
REFUSAL = """
## Refused

The check at the start ends the run. The first of these have a cache that sampling cannot use, since prompts of a batch
are padded, groups share a prompt and finished rows leave; the others a head or a body that the scripts do not
reproduce.

| architecture | in the error |
|---|---|"""
TEMPLATES = """
## Chat templates without a system message

Those of Gemma 1 and 2 and of some Mistral models refuse one. With the default `--system-prompt` of real models the run
then ends with the template's own words: give `--system-prompt ""`, and put what is to be said into the prompts."""


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
