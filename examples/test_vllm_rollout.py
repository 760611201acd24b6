"""Tests of vllm_rollout.py: with an engine that is not vLLM, and with vLLM where it is installed.

python -m pytest examples/test_vllm_rollout.py
"""

import copy
import importlib.util
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import logged
from safetensors import safe_open
from torch.distributed.fsdp import fully_shard
from toy import ROOT, TINY, parse, short
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

import dapo
import grpo

sys.path.append(str(ROOT / "examples"))
import vllm_rollout
import vllm_rollouts

EXAMPLE = Path(vllm_rollout.__file__)
CPU = torch.device("cpu")
NAMES = ("load_policy", "load_sampler", "copy_weights", "sample_completions", "generate", "dist")
OWN = {script: {name: getattr(script, name) for name in NAMES} for script in (grpo, dapo)}
PROMPTS = ["59+4+94+97=", "1+2=", "1+2=", "30+40+50=", "7+8=", "99+98="]
HOT = 2.0  # a temperature, the highest that vLLM takes, at which many tokens are likely
WHY = "vllm is not installed (docs/vllm.md)"
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=WHY)


class Engine:
    """What the example uses of vllm.LLM, with a model of transformers; each call has to find it in the right state."""

    stale = ()  # names of weights that do not arrive, or "all"

    def __init__(self, model, dtype, max_model_len, load_format, **settings):
        self.settings = settings | {"dtype": dtype, "max_model_len": max_model_len}
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        with safe_open(Path(model, "model.safetensors"), "pt") as file:
            self.names = set(file.keys())
        assert load_format == "dummy"
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.zero_()  # what is not pushed is missed
        self.awake, self.fresh, self.events = {"weights", "kv_cache"}, False, []
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self.shutdown))
        torch.manual_seed(0)  # as vLLM seeds them

    def wake_up(self, tags):
        assert not self.awake & set(tags)
        self.awake |= set(tags)
        self.events.append(f"wake {' '.join(tags)}")

    def sleep(self, level):
        assert level in (1, 2) and self.awake == {"weights", "kv_cache"}
        self.awake.clear()
        self.events.append("sleep")

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights" and "weights" in self.awake
        weights = dict(kwargs["weights_iterator"])
        assert set(weights) == self.names and not any(hasattr(weight, "full_tensor") for weight in weights.values())
        for name, weight in weights.items():
            if self.stale != "all" and name not in self.stale:
                self.model.get_parameter(name).data.copy_(weight)
        self.fresh = False
        self.events.append("push")

    def apply_model(self, function):
        function(self.model)

    def reset_prefix_cache(self):
        self.fresh = True

    @torch.no_grad()
    def generate(self, requests, sampling, use_tqdm):
        assert self.awake == {"weights", "kv_cache"} and self.fresh and not use_tqdm
        outputs = []
        for request, given in zip(requests, sampling, strict=True):
            assert given.ignore_eos and given.logprobs == 0 and not given.detokenize
            prompt = request["prompt_token_ids"]
            assert len(prompt) + given.max_tokens <= self.settings["max_model_len"]
            torch.manual_seed(given.seed)  # it draws from torch's generators
            inputs = ([prompt], given.max_tokens, given.temperature, given.stop_token_ids)
            [(tokens, logprobs)] = OWN[grpo]["generate"](self.model, *inputs)
            found = [{token: SimpleNamespace(logprob=value)} for token, value in zip(tokens, logprobs)]
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(tokens), logprobs=found)]))
        self.events.append("generate")
        return outputs

    def shutdown(self):
        torch.distributed.destroy_process_group()
        self.events.append("shutdown")


@pytest.fixture(autouse=True)
def processor():
    """The real one, unlike in other tests: with vLLM, torch compiles for it."""
    yield
    torch.set_float32_matmul_precision("highest")  # prepare sets it for the whole process


@pytest.fixture
def fake(monkeypatch):
    """An engine that is not vLLM; afterwards, scripts get their own functions back."""
    for script, functions in OWN.items():
        for name, function in functions.items():
            monkeypatch.setattr(script, name, function)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Engine, SamplingParams=SimpleNamespace))


def make_policy(args):
    """The policy as main makes it, with weights that differ from those of the folder; its tokenizer; rows."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    policy = grpo.load_policy(args, tokenizer, CPU)
    change(policy.model)
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    return policy, tokenizer, [{"prompt_ids": prompt} for prompt in ids]


@torch.no_grad()
def change(model, words=("",)):
    """Change the weights whose names have one of these words in them."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if any(word in name for word in words):
            weight += 0.02 * torch.randn(weight.shape, generator=generator)


def settings(**given):
    return parse(grpo, **{"max_completion_length": 12, "precision": "float32"} | given)


def start(args):
    """Let vLLM sample; return a policy, an engine with its weights, the tokenizer and rows."""
    sampler = vllm_rollout.Sampler(grpo, args, 0.4)
    policy, tokenizer, rows = make_policy(args)
    assert grpo.load_sampler(args, tokenizer, CPU) is sampler
    return policy, sampler, tokenizer, rows


def sample(policy, sampler, tokenizer, rows, temperature, args, seed=1):
    torch.manual_seed(seed)
    grpo.copy_weights(policy, sampler)
    return grpo.sample_completions(sampler, tokenizer, rows, temperature, args)


@torch.no_grad()
def differences(policy, batch, temperature):
    """The absolute differences of the sampler's log-probabilities from the policy's, of tokens alone."""
    logprobs, _ = policy(batch["ids"], batch["completion_mask"], temperature)
    return (batch["sampler_logprobs"] - logprobs).abs()[batch["completion_mask"].bool()]


@pytest.mark.parametrize("rollout_batch_size", [512, 4])
@pytest.mark.usefixtures("fake")
def test_greedy_completions_are_those_of_the_own_loop(rollout_batch_size):
    """All of the batch: names, shapes, types, values, texts; some are cut off, others not."""
    args = settings(rollout_batch_size=rollout_batch_size, max_completion_length=5)
    policy, tokenizer, rows = make_policy(args)
    own, own_texts = sample(policy, grpo.load_sampler(args, tokenizer, CPU), tokenizer, rows, 0.0, args)
    policy, sampler, tokenizer, rows = start(args)
    batch, texts = sample(policy, sampler, tokenizer, rows, 0.0, args)
    assert texts == own_texts and list(batch) == list(own)
    for name in own:
        torch.testing.assert_close(batch[name], own[name], rtol=0, atol=0)
    assert 0 < batch["truncated"].sum() < len(PROMPTS)
    assert sampler.engine.settings["gpu_memory_utilization"] == 0.4


@pytest.mark.usefixtures("fake")
def test_samples_have_the_policy_s_log_probabilities_and_the_script_s_seed_decides_on_them():
    args = settings(temperature=0.8)
    policy, *others = start(args)
    found = []
    for seed in (1, 1, 2):
        batch, texts = sample(policy, *others, 0.8, args, seed)
        found.append((batch["ids"].tolist(), torch.rand(()).item()))  # what main draws afterwards
        assert differences(policy, batch, 0.8).max() < 1e-4
        assert not batch["sampler_logprobs"][~batch["completion_mask"].bool()].any()
    assert texts[1] != texts[2]  # the same prompt, with seeds of their own
    assert found[0] == found[1] and found[1][0] != found[2][0] and found[1][1] != found[2][1]


@pytest.mark.usefixtures("fake")
def test_the_engine_gets_the_weights_before_each_rollout_and_sleeps_between():
    args = settings()
    policy, sampler, tokenizer, rows = start(args)
    grpo.sample_completions(sampler, tokenizer, rows, 0.0, args)  # before the training, with the weights of the start
    evaluated = ["wake weights", "wake kv_cache", "generate", "sleep"]
    for _ in range(2):
        batch, _ = sample(policy, sampler, tokenizer, rows, 1.0, args)
        assert differences(policy, batch, 1.0).max() < 1e-4
        change(policy)
    pushed = ["wake weights", "push", "wake kv_cache", "generate", "sleep"]
    assert sampler.engine.events == ["push", "sleep", *evaluated, *pushed, *pushed]


@pytest.mark.parametrize("when", ["at the start", "after the first update"])
@pytest.mark.parametrize("stale", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "all"])
@pytest.mark.usefixtures("fake")
def test_weights_that_do_not_arrive_end_the_run(when, stale, monkeypatch):
    args = settings()
    if when == "at the start":
        monkeypatch.setattr(Engine, "stale", stale)
    policy, sampler, tokenizer, rows = start(args)
    if when == "after the first update":
        sample(policy, sampler, tokenizer, rows, 1.0, args)
        change(policy)
        monkeypatch.setattr(Engine, "stale", stale)
    sample(policy, sampler, tokenizer, rows, 0.0, args)  # an evaluation checks nothing
    with pytest.raises(SystemExit, match="^vLLM does not sample from the policy: log-probabilities differ by"):
        sample(policy, sampler, tokenizer, rows, 1.0, args)


@pytest.mark.usefixtures("fake")
def test_only_two_rollouts_are_checked(monkeypatch):
    args, checks = settings(), []
    policy, *others = start(args)
    monkeypatch.setattr(vllm_rollout.Sampler, "check", lambda *_: checks.append(1))
    counts = [len(sample(policy, *others, 1.0, args) and checks) for _ in range(4)]
    assert counts == [1, 2, 2, 2]


@pytest.mark.usefixtures("alone", "fake")
def test_with_bfloat16_it_gets_whole_weights_that_the_blocks_compute_with():
    args = settings(precision="bfloat16")
    policy, *others = start(args)
    fully_shard(policy)  # as on several ranks
    assert type(next(policy.parameters())).__name__ == "DTensor"
    batch, _ = sample(policy, *others, 1.0, args)
    assert others[0].engine.settings["dtype"] == "bfloat16"
    assert differences(policy, batch, 1.0).max() < 0.6  # rare tokens differ most


@pytest.mark.usefixtures("fake")
def test_ranks_have_an_engine_each_on_their_own_gpu(monkeypatch):
    _, sampler, tokenizer, _ = start(settings())
    assert sampler.engine.settings["distributed_executor_backend"] is None
    monkeypatch.setenv("RANK", "1")
    sampler.load_sampler(settings(), tokenizer, CPU)
    assert sampler.engine.settings["distributed_executor_backend"] == "external_launcher"


EVENTS = r"push sleep (wake weights (push )?wake kv_cache (generate )+sleep )*shutdown"


@pytest.mark.parametrize("script", [grpo, dapo], ids=lambda script: script.__name__)
@pytest.mark.usefixtures("fake")
def test_scripts_train_with_it_and_a_resumed_run_continues_alike(script, tmp_path, monkeypatch):
    for run, counts in (("whole", [2]), ("parts", [1, 2])):
        for count in counts:
            if count == counts[0]:
                sizes = {"num_steps": count, "save_every": 1, "eval_prompts": 2, "max_completion_length": 12}
                args = short(script, tmp_path, **sizes, run_dir=tmp_path / run)
            else:
                args = parse(script, resume=tmp_path / run, num_steps=count)
            for name, function in OWN[script].items():
                monkeypatch.setattr(script, name, function)
            sampler = vllm_rollout.Sampler(script, args, 0.4)
            script.main(args)
            events = sampler.engine.events
            assert re.fullmatch(EVENTS, " ".join(events)) and not torch.distributed.is_initialized()
            assert events.count("push") == (4 if run == "whole" else 3)  # one at the start, a rollout and an evaluation
    whole, parts = (
        [
            {name: value for name, value in line.items() if not name.startswith("eval/")}  # the last step has one, too
            for line in logged(tmp_path / run)
            if "policy/sampler_kl" in line
        ]
        for run in ("whole", "parts")
    )
    assert len(whole) == 2 and whole == parts
    assert all(line["policy/sampler_kl"] < 1e-9 for line in whole)


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["sft", "--seed", "2"], "^sft has no sampler that vLLM could replace"),
        (["dapo", "--temperature", "3"], "^--temperature must be between 0.01 and 2: vLLM takes no other$"),
        (["--temperature=0.001"], "^--temperature must be between"),
        (["--no-vllm"], "^vllm is not installed: pip install vllm"),
    ],
)
def test_what_does_not_work_says_so_before_anything_is_loaded(flags, expected, monkeypatch):
    installed = flags != ["--no-vllm"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True if installed else None)
    monkeypatch.setattr(sys, "argv", ["vllm_rollout.py", *flags])
    with pytest.raises(SystemExit, match=expected):
        vllm_rollout.main()


def test_the_flag_of_the_example_is_not_one_of_the_script(monkeypatch):
    given = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(vllm_rollout, "Sampler", lambda _script, _args, share: given.append(share))
    monkeypatch.setattr(grpo, "main", lambda args: given.append(args.num_steps))
    monkeypatch.setattr(sys, "argv", ["vllm_rollout.py", "--gpu-memory", "0.25", "--num-steps", "3"])
    vllm_rollout.main()
    assert given == [0.25, 3]


def test_the_page_has_the_runs_of_the_benchmark():
    assert vllm_rollouts.table() in (ROOT / "docs/vllm.md").read_text()
    for name, rows in vllm_rollouts.read_runs().items():
        assert [row["step"] for row in rows] == [str(step) for step in range(41)], name


# ---- with vLLM


@pytest.fixture(scope="module")
def real():
    """A policy in float32 whose weights are not those of the folder, and vLLM with them."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    args = settings(max_completion_length=40)
    policy, sampler, tokenizer, rows = start(args)
    own = grpo.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()  # for transformers' logits
    OWN[grpo]["copy_weights"](policy, own)
    yield SimpleNamespace(policy=policy, tokenizer=tokenizer, rows=rows, args=args, sampler=sampler, own=own)
    for name, function in OWN[grpo].items():
        setattr(grpo, name, function)


def draw(real, rows, temperature, length=40, seed=1):
    args = copy.copy(real.args)
    args.max_completion_length = length
    return sample(real.policy, real.sampler, real.tokenizer, rows, temperature, args, seed)


@needs_vllm
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_vllm_reports_the_policy_s_log_probabilities(real, temperature):
    batch, _ = draw(real, real.rows * 8, temperature)
    assert differences(real.policy, batch, temperature).max() < 1e-3


@needs_vllm
def test_vllm_is_greedy_at_temperature_0(real):
    batch, texts = draw(real, real.rows, 0.0)
    stop_ids = real.sampler.generation_config.eos_token_id
    prompts = [row["prompt_ids"] for row in real.rows]
    completions = OWN[grpo]["generate"](real.own, prompts, 40, 0.0, stop_ids)
    masks = batch["completion_mask"].bool()
    assert [ids[mask].tolist() for ids, mask in zip(batch["ids"], masks)] == [tokens for tokens, _ in completions]
    assert not batch["sampler_logprobs"].any() and len({*texts}) == 5


@needs_vllm
def test_vllm_draws_from_the_policy_s_distribution(real):
    """Chi-square of the first two tokens of 2000 completions, pooled so that at least five of a kind are expected."""
    count = 2000
    batch, _ = draw(real, real.rows[:1] * count, HOT, length=2)
    stop_ids = real.sampler.generation_config.eos_token_id
    ids = torch.tensor([real.rows[0]["prompt_ids"]])
    with torch.no_grad():
        first = (real.own(ids).logits[0, -1].double() / HOT).softmax(-1)
        after = torch.cat([ids.expand(len(first), -1), torch.arange(len(first)).unsqueeze(1)], 1)
        second = (real.own(after).logits[:, -1].double() / HOT).softmax(-1)
    expected = first.unsqueeze(1) * second * count  # (V, V)
    observed = torch.zeros_like(expected)
    for row, mask in zip(batch["ids"], batch["completion_mask"].bool()):
        tokens = row[mask].tolist()
        assert len(tokens) == 2 or tokens[0] in stop_ids
        observed[tokens[0], tokens[1] if len(tokens) == 2 else 0] += 1
    for stop in stop_ids:  # nothing follows
        expected[stop], observed[stop, 0] = 0, observed[stop].sum()
        expected[stop, 0] = first[stop] * count
    kinds = expected >= 5
    pairs = [*zip(observed[kinds].tolist(), expected[kinds].tolist())]
    pairs.append((observed[~kinds].sum().item(), expected[~kinds].sum().item()))
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in pairs if mean > 0)
    freedom = len(pairs) - 1
    print(f"chi-square {statistic:.1f} with {freedom} degrees of freedom")
    assert freedom > 10 and statistic < freedom + 4 * math.sqrt(2 * freedom) + 8  # beyond 1e-4 or so


@needs_vllm
def test_vllm_has_the_weights_after_a_step_and_without_the_push_it_has_not(real, monkeypatch):
    """Also those of the head, which is tied to the embeddings; each kind is changed alone."""
    before = copy.deepcopy(real.policy.state_dict())
    for part in ("embed_tokens", "q_proj", "down_proj", "norm"):
        change(real.policy, [part])
        batch, _ = draw(real, real.rows * 2, 1.0)
        assert differences(real.policy, batch, 1.0).max() < 1e-3
    optimizer = torch.optim.AdamW(real.policy.parameters(), fused=True)
    real.policy(batch["ids"], batch["completion_mask"], 1.0)[0].sum().backward()
    grpo.step_optimizer(real.policy, optimizer, 1e-3, 1.0)
    batch, _ = draw(real, real.rows * 2, 1.0)
    assert differences(real.policy, batch, 1.0).max() < 1e-3
    change(real.policy)
    with monkeypatch.context() as patch:
        patch.setattr(real.sampler.engine, "collective_rpc", lambda *_, **__: None)
        batch, _ = draw(real, real.rows * 2, 1.0)
    assert differences(real.policy, batch, 1.0).max() > 1e-2
    real.policy.load_state_dict(before)


def run_example(folder, *flags, before=""):
    """Run the example in a process of its own, or its main after a line; return its exit status and what it printed."""
    code = (
        f"import sys; sys.path.insert(0, {str(EXAMPLE.parent)!r})\nimport vllm_rollout\n{before}\nvllm_rollout.main()"
    )
    command = [sys.executable, *(["-c", code] if before else [str(EXAMPLE)]), *flags]
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=900)
    return done.returncode, done.stdout + done.stderr


@needs_vllm
@pytest.mark.parametrize("fault", ["a tied head that is left as it was", "a mixture of experts"])
def test_what_vllm_computes_wrongly_on_a_cpu_ends_the_run(fault, tmp_path):
    """vLLM 0.32 does both without a word."""
    flags, before = ["--num-steps", "2", "--eval-prompts", "8", "--run-dir", "run"], ""
    if fault == "a mixture of experts":
        tokenizer = AutoTokenizer.from_pretrained(TINY)
        sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": len(tokenizer)}
        config = Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, max_position_embeddings=256)
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(4.0 if weight.ndim > 1 else 1.0)
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        flags += ["--model", "model", "--tiny"]
    else:
        before = "vllm_rollout.pack_head = lambda model: None"
    status, said = run_example(tmp_path, *flags, before=before)
    assert status == 1 and "vLLM does not sample from the policy" in said.splitlines()[-1], said


@needs_vllm
def test_a_run_with_vllm_that_is_killed_goes_on_as_if_it_had_not_been(tmp_path):
    """Real processes, whose ends are clean."""
    flags = "--num-steps 3 --prompts-per-step 4 --minibatch-size 32 --eval-prompts 8 --save-every 1".split()
    status, said = run_example(tmp_path, *flags, "--run-dir", "whole")
    assert status == 0 and "Traceback" not in said, said
    command = [sys.executable, str(EXAMPLE), *flags, "--run-dir", "parts"]
    parts = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while parts.poll() is None and not (tmp_path / "parts" / "checkpoint-000001").exists():
        time.sleep(0.05)
    parts.kill()
    parts.wait()
    status, said = run_example(tmp_path, "--resume", "parts")
    assert status == 0 and "Traceback" not in said, said
    assert logged(tmp_path / "whole") == logged(tmp_path / "parts")
