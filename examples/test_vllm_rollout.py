"""Tests of vllm_rollout.py: with an engine that is not vLLM, and with vLLM where it is installed.

python -m pytest examples/test_vllm_rollout.py
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import logged
from safetensors import safe_open
from sync_copies import SAMPLING
from test_forks_more import folder, make  # noqa: F401, a fixture
from torch.distributed.fsdp import fully_shard
from toy import EVERY, ROOT, parse, short
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo

sys.path.append(str(ROOT / "examples"))
import vllm_rollout

CPU = torch.device("cpu")
NAMES = ("load_sampler", "copy_weights", "sample_completions", "generate", "dist")
OWN = {EVERY[script]: {name: getattr(EVERY[script], name) for name in NAMES} for script in SAMPLING}
PROMPTS = ["59+4+94+97=", "1+2=", "1+2=", "30+40+50=", "7+8=", "99+98="]
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="not installed (docs/vllm.md)")


class Engine:
    """What the example uses of vllm.LLM, with a model of transformers; each call has to find it in the right state."""

    stale = None  # the name of a weight that does not arrive

    def __init__(self, model, dtype, load_format, **settings):
        self.settings = settings
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        with safe_open(Path(model, "model.safetensors"), "pt") as file:
            self.names = set(file.keys())
        assert load_format == "dummy"
        torch.manual_seed(0)  # as vLLM seeds them
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.uniform_(-1e-3, 1e-3)  # vLLM's random weights
        self.awake, self.fresh, self.events = {"weights", "kv_cache"}, True, []
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self.shutdown))

    def wake_up(self, tags):
        if not self.awake.issuperset(tags):
            self.awake.update(tags)
            self.events.append(f"wake {' '.join(tags)}")

    def sleep(self, level):
        assert level == 1 and self.awake == {"weights", "kv_cache"}
        self.awake.clear()
        self.events.append("sleep")

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights" and "weights" in self.awake
        weights = dict(kwargs["weights_iterator"])
        assert set(weights) - {*self.model.all_tied_weights_keys} == self.names
        assert not any(hasattr(weight, "full_tensor") for weight in weights.values())
        for name, weight in weights.items():
            if name != self.stale:
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


STAND_IN = SimpleNamespace(LLM=Engine, SamplingParams=SimpleNamespace)


@pytest.fixture
def fake(monkeypatch):
    """An engine that is not vLLM; afterwards, scripts get their own functions back."""
    for script, functions in OWN.items():
        for name, function in functions.items():
            monkeypatch.setattr(script, name, function)
    monkeypatch.setitem(sys.modules, "vllm", STAND_IN)


@torch.no_grad()
def change(model, part=""):
    """Change the weights whose names have this part."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if part in name:
            weight += 0.02 * torch.randn(weight.shape, generator=generator)


class Rollouts:
    """A policy whose weights are not those of the folder, an engine, and what a script does with both."""

    def __init__(self, **settings):
        self.args = parse(grpo, **{"max_completion_length": 5, "precision": "float32"} | settings)
        self.tokenizer = AutoTokenizer.from_pretrained(self.args.model)
        self.policy = grpo.load_policy(self.args, self.tokenizer, CPU)
        change(self.policy.model)
        chats = [[{"role": "user", "content": text}] for text in PROMPTS]
        given = {"add_generation_prompt": True, "return_dict": False}
        self.rows = [{"prompt_ids": self.tokenizer.apply_chat_template(chat, **given)} for chat in chats]
        self.sampler = vllm_rollout.Sampler(grpo, 0.4)
        assert grpo.load_sampler(self.args, self.tokenizer, CPU) is self.sampler

    def draw(self, temperature, rows=None, seed=1):
        torch.manual_seed(seed)
        grpo.copy_weights(self.policy, self.sampler)
        return grpo.sample_completions(self.sampler, self.tokenizer, rows or self.rows, temperature, self.args)

    @torch.no_grad()
    def difference(self, batch, temperature):
        """The largest difference of a log-probability from the policy's."""
        logprobs, _ = self.policy(batch["ids"], batch["completion_mask"], temperature)
        return (batch["sampler_logprobs"] - logprobs).abs().max()


@pytest.fixture(scope="module", params=["a stand-in", pytest.param("vLLM", marks=needs_vllm)])
def rollouts(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "a stand-in":
            patch.setitem(sys.modules, "vllm", STAND_IN)
        else:
            torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
        for name, function in OWN[grpo].items():
            patch.setattr(grpo, name, function)
        yield Rollouts()


def test_greedy_completions_are_those_of_the_own_loop(rollouts):
    """Some are cut off, others not."""
    own = OWN[grpo]["load_sampler"](rollouts.args, rollouts.tokenizer, CPU)
    OWN[grpo]["copy_weights"](rollouts.policy, own)
    stop_ids = own.generation_config.eos_token_id
    prompts = [row["prompt_ids"] for row in rollouts.rows]
    completions = OWN[grpo]["generate"](own, prompts, rollouts.args.max_completion_length, 0.0, stop_ids)
    batch, _ = rollouts.draw(0.0)
    found = [ids[mask.bool()].tolist() for ids, mask in zip(batch["ids"], batch["completion_mask"])]
    assert found == [tokens for tokens, _ in completions]
    assert 0 < batch["truncated"].sum() < len(PROMPTS)


def test_samples_have_the_policy_s_log_probabilities_whatever_weights_change(rollouts):
    """Also after a change of the head, which is tied to the embeddings."""
    for part in ("embed_tokens", "q_proj", "down_proj", "norm"):
        change(rollouts.policy, part)
        for temperature in (1.0, 0.7):
            batch, _ = rollouts.draw(temperature)
            assert rollouts.difference(batch, temperature) < 1e-3


def test_the_script_s_seed_decides_on_the_samples(rollouts):
    found = []
    for seed in (1, 1, 2):
        batch, texts = rollouts.draw(2.0, seed=seed)
        found.append((batch["ids"].tolist(), torch.rand(()).item()))  # what main draws afterwards
        assert texts[1] != texts[2]  # the same prompt, with seeds of their own
    assert found[0] == found[1] and found[1][0] != found[2][0] and found[1][1] != found[2][1]


def test_samples_follow_the_policy_s_distribution(rollouts):
    """The shares of first tokens among 1000 completions of one prompt, at a temperature at which many are likely."""
    if isinstance(rollouts.sampler.engine, Engine):
        pytest.skip("the stand-in samples with the script's own loop")
    batch, _ = rollouts.draw(2.0, rollouts.rows[:1] * 1000)
    prompt = torch.tensor([rollouts.rows[0]["prompt_ids"]])
    with torch.no_grad():
        expected = (rollouts.policy.model(prompt).logits[0, -1] / 2).softmax(-1)
    shares = torch.bincount(batch["ids"][:, prompt.shape[1]], minlength=len(expected)) / 1000
    sigma = (expected * (1 - expected) / 1000).sqrt()
    assert (expected > 1e-3).sum() > 10 and ((shares - expected).abs() < 5 * sigma + 2e-3).all()


@pytest.mark.usefixtures("alone", "fake")
def test_with_bfloat16_it_gets_whole_weights_that_the_blocks_compute_with():
    rollouts = Rollouts(precision="bfloat16")
    fully_shard(rollouts.policy)  # as on several ranks
    assert type(next(rollouts.policy.parameters())).__name__ == "DTensor"
    batch, _ = rollouts.draw(1.0)
    assert rollouts.difference(batch, 1.0) < 0.6  # rare tokens differ most


@pytest.mark.usefixtures("fake")
def test_ranks_have_an_engine_each_on_their_own_gpu(monkeypatch):
    rollouts = Rollouts()
    assert rollouts.sampler.engine.settings["distributed_executor_backend"] is None
    monkeypatch.setenv("RANK", "1")
    rollouts.sampler.load_sampler(rollouts.args, rollouts.tokenizer, CPU)
    assert rollouts.sampler.engine.settings["distributed_executor_backend"] == "external_launcher"


@pytest.mark.parametrize("name", [*SAMPLING, "lora"])
@pytest.mark.usefixtures("fake")
def test_every_script_trains_with_it(name, folder, tmp_path, monkeypatch):  # noqa: F811
    """The engine gets weights at the start, before each rollout and before each evaluation, and sleeps between."""
    script = EVERY.get(name) or make(folder, name)
    for function in NAMES:
        monkeypatch.setattr(script, function, getattr(script, function))  # afterwards, it gets its own back
    args = short(script, tmp_path, num_steps=2, eval_every=1, eval_prompts=2, max_completion_length=48, group_size=8)
    sampler = vllm_rollout.Sampler(script, 0.4)
    script.main(args)
    events = " ".join(sampler.engine.events)
    assert re.fullmatch("push generate sleep (wake weights (push )?wake kv_cache (generate )+sleep )+shutdown", events)
    assert events.count("push") == 5 and not torch.distributed.is_initialized()
    assert events.count("wake weights wake kv_cache") == 1 + (name == "ppo_rlhf")  # before training
    assert (events.count("generate") > events.count("sleep")) == (name == "grpo_tools")  # several turns
    found = [line["policy/sampler_kl"] for line in logged(tmp_path / "run") if "policy/sampler_kl" in line]
    assert max(found) < 1e-9  # without a reward that differs in a group, a step has none


@pytest.mark.parametrize("stale", ["embed_tokens", "layers.1.mlp.down_proj", "norm"])
@pytest.mark.usefixtures("fake")
def test_weights_that_do_not_arrive_end_the_run(stale, monkeypatch):
    monkeypatch.setattr(Engine, "stale", f"model.{stale}.weight")
    with pytest.raises(SystemExit, match="vLLM computes this model differently: log-probabilities are"):
        Rollouts()


def test_it_takes_a_script_or_a_file_with_an_environment_and_has_a_flag_of_its_own(tmp_path, monkeypatch):
    given, dapo, tools = [], EVERY["dapo"], EVERY["grpo_tools"]
    (tmp_path / "my_game.py").write_text("class Environment:\n    pass\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(tools, "Environment", tools.Environment)  # the file replaces it
    monkeypatch.setattr(vllm_rollout, "Sampler", lambda script, share: given.append((script, share)))
    for name, script in (("dapo", dapo), (f"{tmp_path}/my_game.py", tools)):
        monkeypatch.setattr(script, "main", lambda args: given.append(args.num_steps))
        monkeypatch.setattr(sys, "argv", ["vllm_rollout.py", name, "--gpu-memory", "0.25", "--num-steps", "3"])
        vllm_rollout.main()
    assert given == [(dapo, 0.25), 3, (tools, 0.25), 3] and tools.Environment.__module__ == "my_game"


# ---- whole runs with vLLM


def run_example(cwd, *flags, before=""):
    """Run the example in a process of its own, after a line about it; return its status and what it printed."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r})\nimport vllm_rollout\n{before}\n"
    command = [sys.executable, "-c", code + "vllm_rollout.main()", *flags]
    done = subprocess.run(command, cwd=cwd, text=True, capture_output=True, timeout=900)
    return done.returncode, done.stdout + done.stderr


@needs_vllm
def test_a_tied_head_that_is_left_as_it_was_ends_the_run(tmp_path):
    """On a CPU, vLLM 0.32 leaves it without a word."""
    flags = "--num-steps 2 --eval-prompts 8 --run-dir run".split()
    status, said = run_example(tmp_path, *flags, before="vllm_rollout.pack_head = lambda model: None")
    assert status == 1 and "vLLM computes this model differently" in said.splitlines()[-1], said


@needs_vllm
@pytest.mark.parametrize("name", ["grpo", "grpo_tools", "gkd", "ppo_rlhf"])
def test_a_resumed_run_with_vllm_is_the_uninterrupted_one(name, tmp_path):
    """Real processes, whose ends are clean."""
    flags = [f"--prompts-per-step={4 if name.startswith('grpo') else 32}", "--eval-prompts=8", "--eval-every=1"]
    flags += ["--save-every=1"] + ["--minibatch-size=32"] * (name != "gkd")
    for given in ("--num-steps=2 --run-dir=whole", "--num-steps=1 --run-dir=parts", "--num-steps=2 --resume=parts"):
        status, said = run_example(tmp_path, name, *flags, *given.split())
        assert status == 0 and "Traceback" not in said, said
    assert logged(tmp_path / "whole") == logged(tmp_path / "parts")
