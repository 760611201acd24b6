"""What the tests of the scripts share: small models and tokenizers, batches, short runs, and numbers of others."""

import copy
import importlib.util
import inspect
import json
import os
import sys
from pathlib import Path

import tokenizers
import torch
from tokenizers import models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "models" / "tiny"
LOSS = {"clip_eps": 0.2, "clip_eps_low": 0.2, "clip_eps_high": 0.28, "max_completion_length": 9, "kl_coef": 0.0}
LOSS |= {"ref_logprobs": None, "sampler_weight_cap": 2.0}
NAMES = ("reinforce", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "grpo_process")
SCRIPTS = {name: importlib.import_module(name) for name in NAMES}
OTHERS = ("gkd", "grpo_tools", "ppo_rlhf", "dpo", "reward_model", "sft")
EVERY = SCRIPTS | {name: importlib.import_module(name) for name in OTHERS}
FILES = dict.fromkeys(("dpo", "reward_model"), "preferences/train.jsonl") | {"sft": "addition/sft.jsonl"}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=1),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=8),
    "gpt2": GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
}
PROMPTS = [[3, 4], [5, 0, 1, 6, 7], [2], [8, 9, 10, 2, 3, 4], [7, 1, 0], [5, 5, 5, 5], [0], [9, 3]]
COMPLETIONS = [[4, 5, 1], [1], [6, 0, 7, 8, 2, 9, 1], [10, 3], [2, 2, 2, 2, 2, 2, 2, 2], [1], [0, 1], [3, 1]]


def build_model(config, vocab_size=11, dtype=torch.float64, scale=6.0):
    """A random model whose weights are scaled up, so that its distributions are far from uniform and differ."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[config] if isinstance(config, str) else config)  # a model may change its own
    config.vocab_size = vocab_size
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ in ("LlamaRMSNorm", "Qwen3RMSNorm"):  # they compute in float32
                norm = torch.nn.RMSNorm(child.weight.shape, child.variance_epsilon, dtype=torch.float64)
                setattr(module, name, norm)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.ndim > 1 else 1.0)
    return model.to(dtype)


def pad(prompts, completions):
    """Ids and completion mask (B, L) of prompts and completions."""
    pairs = list(zip(prompts, completions, strict=True))
    ids = [torch.tensor(prompt + completion) for prompt, completion in pairs]
    masks = [torch.tensor([0] * len(prompt) + [1] * len(completion)) for prompt, completion in pairs]
    return pad_sequence(ids, batch_first=True), pad_sequence(masks, batch_first=True)


def parse(script, **settings):
    """The settings that a script's command line makes of these flags."""
    argv = [f"{script.__name__}.py"]
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            argv.append(f"--{flag}={value}")
    sys.argv = argv  # main, too, reads the name of the started file
    return script.parse_args()


def short(script, folder, source=None, **settings):
    """Settings of a short run on the first 64 rows of a file in data/, written into a folder; it goes to folder/run."""
    Path(folder).mkdir(exist_ok=True)
    sizes = {"num_steps": 4, "prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "max_completion_length": 24}
    sizes |= {"eval_every": 2, "eval_prompts": 8, "save_every": 2, "warmup_steps": 0, "learning_rate": 1e-3}
    sizes |= {"norm_samples": 16}
    if not hasattr(script.Args, "group_size"):
        sizes["prompts_per_step"] *= settings.get("group_size", sizes["group_size"])
    source = source or FILES.get(script.__name__, "addition/train.jsonl")
    rows = read_jsonl(ROOT / "data" / source)[:64]
    sizes |= {"tiny": True, "dataset": write_jsonl(Path(folder) / "rows.jsonl", rows), "run_dir": Path(folder) / "run"}
    return parse(script, **{name: value for name, value in (sizes | settings).items() if hasattr(script.Args, name)})


def train(script, folder, **settings):
    """Make a short run; return the lines of its metrics."""
    args = short(script, folder, **settings)
    script.main(args)
    return read_jsonl(f"{args.run_dir}/metrics.jsonl")


def call(function, given):
    """Call a function with those of the given values that it takes."""
    return function(**{name: given[name] for name in inspect.signature(function).parameters if name in given})


def policy_loss(name, inputs):
    """A script's policy_loss: without sampler_logprobs the sampler is the policy, and (B,) advantages suit all."""
    given = LOSS | inputs
    given.setdefault("sampler_logprobs", given["logprobs" if name == "reinforce" else "old_logprobs"])
    if name == "grpo_process" and given["advantages"].ndim == 1:
        given["advantages"] = given["advantages"].unsqueeze(1).expand_as(given["logprobs"])
    return call(EVERY[name].policy_loss, given)


def loss_and_gradient(name, inputs):
    """The loss, its gradient with respect to logprobs, and the metrics as pairs of floats."""
    logprobs = inputs["logprobs"].detach().clone().requires_grad_()
    loss, metrics = policy_loss(name, inputs | {"logprobs": logprobs})
    assert not any(torch.as_tensor(value).requires_grad for pair in metrics.values() for value in pair)
    loss.backward()
    return loss.detach(), logprobs.grad, add_pairs([metrics])


def add_pairs(collected):
    """{name: (sum, count)} of dictionaries of such pairs, added as mean_metrics does."""
    totals = {}
    for metrics in collected:
        for name, (total, count) in metrics.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + float(total), before[1] + float(count))
    return totals


def read_jsonl(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def write_jsonl(path, rows):
    part = Path(f"{path}.{os.getpid()}")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(part.replace(path))  # whole at once: of two ranks that write the same file, one may read it already


def relative_error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


def gradient_of(model, objective):
    """The gradient of an objective with respect to all weights, flat."""
    gradients = torch.autograd.grad(objective, list(model.parameters()), retain_graph=True, allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


def read_oracle(name):
    """The cases of another library's numbers."""
    return json.loads((ROOT / "tests/oracle" / f"{name}.json").read_text())["cases"]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def load_module(path):
    """The module of a file that is on no path of imports."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(patch, module, name):
    """Keep the arguments and the result of each call of a module's function, which goes on working."""
    function, calls = getattr(module, name), []

    def recorded(*args):
        calls.append((args, function(*args)))
        return calls[-1][1]

    patch.setattr(module, name, recorded)
    return calls


FORMS = {  # special tokens, the first of which is the end of text, and the chat template
    "chatml": (
        ["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ),
    "llama 3": (
        ["<|end_of_text|>", "<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ),
    "gemma": (
        ["<eos>", "<end_of_turn>", "<bos>", "<start_of_turn>", "\n"],
        "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    ),
    "phi 3": (
        ["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"],
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    ),
}


def make_tokenizer(special, template):
    """A tokenizer of single characters and of these special tokens, the first of which is its end of text."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"] * ("\n" not in special)
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<unk>", *special, *characters])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    tokens = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": special[0]}
    tokens["additional_special_tokens"] = special[1:]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)
    tokenizer.chat_template = template
    return tokenizer


def make_folder(folder, tokenizer, **settings):
    """A folder with a random Llama whose only stop token is the tokenizer's end of text, and that tokenizer."""
    torch.manual_seed(0)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=len(tokenizer), **ids, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
