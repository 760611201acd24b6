"""Small random models, batches as the rollout makes them, and calls that fit every script of the online family."""

import copy
import gzip
import importlib.util
import inspect
import json
import sys
from pathlib import Path

import datasets
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, Qwen3Config

import grpo_tools
import ppo_rlhf

ROOT = Path(grpo_tools.__file__).parent
TINY = ROOT / "models" / "tiny"
SCRIPTS = {"grpo_tools": grpo_tools}
SETTINGS = {"temperature": 0.7, "microbatch_tokens": 10_000, "max_completion_length": 9, "kl_coef": 0.04}
SETTINGS |= {"clip_eps": 0.2, "clip_eps_low": 0.05, "clip_eps_high": 0.15}  # they clip a part of make_batch
SETTINGS["sampler_weight_cap"] = 2.0
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=1),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=8),
    "gpt2": GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
}
PROMPTS = [[3, 4], [5, 0, 1, 6, 7], [2], [8, 9, 10, 2, 3, 4], [7, 1, 0], [5, 5, 5, 5], [0], [9, 3]]
COMPLETIONS = [[4, 5, 1], [1], [6, 0, 7, 8, 2, 9, 1], [10, 3], [2, 2, 2, 2, 2, 2, 2, 2], [1], [0, 1], [3, 1]]
PAD_ID, CPU = 0, torch.device("cpu")


def build_model(config, vocab_size=11, dtype=torch.float64, scale=6.0):
    """A random model whose weights are scaled up, so that its distributions are far from uniform and differ."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[config] if isinstance(config, str) else config)  # a model may change its own
    config.vocab_size = vocab_size
    return scaled(AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval(), scale).to(dtype)


def scaled(model, scale):
    """The model with its weights scaled up, all of which computes in float64."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ in ("LlamaRMSNorm", "Qwen3RMSNorm"):  # they compute in float32
                norm = torch.nn.RMSNorm(child.weight.shape, child.variance_epsilon, dtype=torch.float64)
                setattr(module, name, norm)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.ndim > 1 else 1.0)
    return model


def parse(script, **settings):
    """The settings that a script's command line makes of these flags: with the defaults of its model, or of its run."""
    argv = [f"{script.__name__}.py"]
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            argv.append(f"--{flag}={value}")
    sys.argv = argv  # main, too, reads the name of the started file
    return script.parse_args()


def load(script, name):
    """A model as main loads it, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(str(name))
    return script.load_model(str(name), tokenizer), tokenizer


def load_scorer(script, name, new_head=True):
    """A reward model as main loads it, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(str(name))
    model = script.load_reward_model(str(name), new_head=new_head)
    if hasattr(script, "set_pad_token"):
        script.set_pad_token(model, tokenizer)
    return model, tokenizer


def pad_right(rows, width, pad_id=PAD_ID):
    """Return ids and mask (B, width) of lists of token ids, padded on the right."""
    ids = torch.tensor([row + [pad_id] * (width - len(row)) for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])


def make_batch(model, temperature=0.7):
    """Eight completions of several lengths, two of advantage 0; the three other log-probabilities are near."""
    prompt_ids, prompt_mask = grpo_tools.pad_left([{"prompt_ids": ids} for ids in PROMPTS], "cpu")
    completion_ids, completion_mask = pad_right(COMPLETIONS, 8)
    with torch.no_grad():
        inputs = (prompt_ids, prompt_mask, completion_ids, completion_mask)
        logprobs, _ = grpo_tools.token_logprobs(model, *inputs, temperature)
    action_mask = completion_mask.clone()
    action_mask[0, 1] = action_mask[2, :3] = action_mask[4, 4] = 0  # what a tool wrote
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(3, *logprobs.shape, generator=generator, dtype=torch.float64).to(logprobs.dtype)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "action_mask": action_mask,
        "indices": torch.arange(len(PROMPTS)),
        "advantages": torch.tensor([1.2, -0.7, 0.0, 0.4, -1.5, 0.0, 0.9, -0.3], dtype=logprobs.dtype),
        "old_logprobs": logprobs + 0.3 * noise[0],
        "ref_logprobs": logprobs + 0.5 * noise[1],
        "sampler_logprobs": logprobs + 0.3 * noise[0] + 0.5 * noise[2],
    }


def make_args(script=grpo_tools, **settings):
    """Those of the settings that the script has."""
    return script.Args(**{name: value for name, value in (SETTINGS | settings).items() if hasattr(script.Args, name)})


def call_policy_loss(script, args, **inputs):
    """A script's policy_loss of those inputs and settings that it takes, by name."""
    given = vars(args) | inputs
    names = inspect.signature(script.policy_loss).parameters
    return script.policy_loss(**{name: given[name] for name in names if name in given})


def call_accumulate_gradients(script, policy, batch, indices, args, divisor=8):
    """The added metrics of a script's accumulate_gradients."""
    return add_pairs(script.accumulate_gradients(policy, batch, indices, divisor, args))


def add_pairs(collected):
    """{name: (sum, count)} of dictionaries of such pairs, added as mean_metrics does."""
    totals = {}
    for metrics in collected:
        for name, (total, count) in metrics.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + float(total), before[1] + float(count))
    return totals


def load_module(path):
    """The module of a file that is on no path of imports."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_jsonl(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def few_rows(folder, file="addition/train.jsonl"):
    """Write 64 rows of a bundled dataset, which are read faster than all, and return the file."""
    return write_jsonl(folder / "rows.jsonl", read_jsonl(ROOT / "data" / file)[:64])


def write_jsonl(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def edit_json(path, **changes):
    """Change the entries of a json file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def record(patch, module, name):
    """Keep the arguments and the result of each call of a module's function, which goes on working."""
    function, calls = getattr(module, name), []

    def recorded(*args):
        calls.append((args, function(*args)))
        return calls[-1][1]

    patch.setattr(module, name, recorded)
    return calls


def exit_line(script, **settings):
    """Run main and return the line it exits with; a message, unlike None or 0, is exit status 1."""
    with pytest.raises(SystemExit) as caught:
        script.main(parse(script, **settings))
    message = caught.value.code
    assert isinstance(message, str) and 0 < len(message) < 600 and "\n" not in message
    return message


def shares_changed(checkpoint):
    """Share of the values that training changed, of each parameter of a language model."""
    before = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(checkpoint)
    return [(a != b).float().mean().item() for a, b in zip(before.parameters(), after.parameters(), strict=True)]


def relative_error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


FORMS = {
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
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)
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


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
ALTERNATING = (  # as Gemma's and Mistral's
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def word_tokenizer(chat_template):
    """A tokenizer of words that puts a BOS in front of every text."""
    words = "<bos> <unk> user assistant system be brief one two three four".split()
    inner = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", unk_token="<unk>")
    wrapped.chat_template = chat_template
    return wrapped


def write_rows(path, rows):
    """Write rows in the format of the path's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        plain = write_rows(path.with_suffix(""), rows)
        path.write_bytes(gzip.compress(Path(plain).read_bytes()))
    elif path.suffix in (".csv", ".tsv"):
        datasets.Dataset.from_list(rows).to_csv(path, sep="," if path.suffix == ".csv" else "\t")
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        write_jsonl(path, rows)
    return str(path)


def make_main_args(script, folder=None, **settings):
    """Settings of a short run of a model as small as the bundled one; with a folder, on a few rows written into it."""
    sizes = {"num_steps": 4, "prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "max_completion_length": 24}
    sizes |= {"eval_every": 2, "eval_prompts": 8, "save_every": 2, "warmup_steps": 0}
    if script is ppo_rlhf:
        sizes["minibatch_size"] = 4
    files = {"sft": "addition/sft.jsonl", "dpo": "preferences/train.jsonl", "reward_model": "preferences/train.jsonl"}
    if folder:
        rows = read_jsonl(ROOT / "data" / files.get(script.__name__, "addition/train.jsonl"))[:64]
        sizes["dataset"] = write_jsonl(folder / "rows.jsonl", rows)
    given = sizes | {"learning_rate": 1e-3, "tiny": True} | settings
    return parse(script, **{name: value for name, value in given.items() if hasattr(script.Args, name)})


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def weights(word, change):
    """A damage of those weights that have the word in their names; where change gives None they are dropped."""

    def damage(folder):
        found = load_file(folder / "model.safetensors")
        found |= {name: change(value.clone()) for name, value in found.items() if word in name}
        found = {name: value for name, value in found.items() if value is not None}
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def cut(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def adapters(folder):
    remove("config.json", "model.safetensors")(folder)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "no/such/model"}')
