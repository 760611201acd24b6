"""What the server of tests/processes.py imports: the libraries of the scripts, but no script, since these read their
rank from the environment when they are imported.
"""

import sys

import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

import grpo
import reward_model

for script in (grpo, reward_model):
    del sys.modules[script.__name__]
