"""What the tests of the scripts that sample share: small models, batches as a rollout makes them, and short runs."""

import copy
import importlib
import inspect
import json
import sys
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "models" / "tiny"
LOSS = {"clip_eps": 0.2, "clip_eps_low": 0.2, "clip_eps_high": 0.28, "max_completion_length": 9, "kl_coef": 0.0}
LOSS |= {"ref_logprobs": None, "sampler_weight_cap": 2.0}
NAMES = ("reinforce", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "grpo_process")
SCRIPTS = {name: importlib.import_module(name) for name in NAMES}
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


def short(script, folder, **settings):
    """Settings of a short run on 64 rows, which are written into a folder; it goes to folder/run."""
    sizes = {"num_steps": 4, "prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "max_completion_length": 24}
    sizes |= {"eval_every": 2, "eval_prompts": 8, "save_every": 2, "warmup_steps": 0, "learning_rate": 1e-3}
    rows = read_jsonl(ROOT / "data/addition/train.jsonl")[:64]
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
    return call(SCRIPTS[name].policy_loss, given)


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
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def relative_error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


def gradient_of(model, objective):
    """The gradient of an objective with respect to all weights, flat."""
    gradients = torch.autograd.grad(objective, list(model.parameters()), retain_graph=True, allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])
