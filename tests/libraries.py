"""What the server of tests/processes.py imports: the libraries of the scripts, but no script, since these read their
rank from the environment when they are imported. transformers also compiles a thousand regular expressions, which each
process would do again as it loads its first model.
"""

import sys

import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import grpo_tools
import reward_model

get_checkpoint_conversion_mapping("qwen3")
for script in (grpo_tools, reward_model):
    del sys.modules[script.__name__]
