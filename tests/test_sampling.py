"""Sampling, and the evaluations that sample: python -m pytest tests/test_sampling.py"""

import functools
import gc
import itertools
import json
import math
import random
import shutil
import weakref
from types import SimpleNamespace

import pytest
import torch
from tiny import SCRIPTS as ONLINE
from tiny import SIZES, TINY, build_model, load, make_tokenizer, pad_right, read_jsonl
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer, Gemma3TextConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import gkd
import grpo_tools
import ppo_rlhf

GREEDY = "0 1 0.5 1 0.9 0.1 1".split()  # one completion a prompt; 1 is right
SAMPLES = "0000 0100 1001 1101 1111 0010 2202".split()  # four completions a prompt
PROMPTS = [{"prompt": str(i), "answer": "1"} for i in range(7)]


boxed = "\\boxed{{{}}}".format


def reward(texts, _rows):
    """A reward of one's own: a bonus for an answer with a point, and never 1."""
    return [("{1}" in text) / 2 + ("." in text) / 4 for text in texts]


@pytest.fixture
def evaluate(monkeypatch, tmp_path):
    """Calls a script's evaluate with the rewards above, on every rank; returns its metrics and what each sampled."""

    def call(script, prompts=PROMPTS, world_size=1, score=reward, **settings):
        sampled, sums = [], {}

        def sample_completions(_policy, _tokenizer, prompts, temperature, _args):
            sampled.append((prompts, temperature))
            places = [int(prompt["prompt"]) for prompt in prompts]
            values = [GREEDY[i] for i in places]
            if temperature > 0:
                values = [SAMPLES[i][number % 4] for number, i in enumerate(places)]
            batch = {"truncated": torch.zeros(len(prompts), dtype=torch.bool)}
            return batch, list(map(boxed, values))

        def all_reduce(values):
            values = torch.tensor(values)
            sums[values.shape] = sums.get(values.shape, 0) + values
            return sums[values.shape].tolist()

        monkeypatch.setattr(script, "sample_completions", sample_completions)
        monkeypatch.setattr(script, "score_completions", score)
        monkeypatch.setattr(script, "all_reduce", all_reduce)
        monkeypatch.setattr(script, "WORLD_SIZE", world_size)
        model = SimpleNamespace(device="cpu")
        policy = SimpleNamespace(model=model, actor=None)
        args = script.Args(run_dir=str(tmp_path), **settings)
        for rank in range(world_size):
            monkeypatch.setattr(script, "RANK", rank)
            if script is ppo_rlhf:
                metrics = script.evaluate(policy, None, None, prompts, args, 4)
            else:
                metrics = script.evaluate(policy, None, prompts, args, 4)
        return metrics, sampled

    return call


each_script = pytest.mark.parametrize("script", [*ONLINE.values(), ppo_rlhf, gkd], ids=[*ONLINE, "ppo_rlhf", "gkd"])


@each_script
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(script, evaluate):
    """Of four samples, that is the share of right ones, and whether any is right."""
    metrics, _ = evaluate(script)
    assert metrics["eval/pass@1"] == pytest.approx(11 / 28)
    assert metrics["eval/pass@4"] == pytest.approx(5 / 7)


@each_script
def test_accuracy_counts_right_greedy_completions_whatever_the_reward_is(script, evaluate):
    metrics, _ = evaluate(script)
    assert metrics["eval/accuracy"] == pytest.approx(3 / 7)
    assert metrics["eval/reward"] == pytest.approx(2.25 / 7)


@pytest.mark.parametrize("script", [grpo_tools, ppo_rlhf])  # the two that differ
def test_one_greedy_completion_which_is_kept_and_samples_at_the_temperature_of_training(script, evaluate, tmp_path):
    _, sampled = evaluate(script, temperature=0.7)
    repeated = [prompt for prompt in PROMPTS for _ in range(4)]
    assert sampled == [(PROMPTS, 0.0), (repeated, 0.7)]
    rows = read_jsonl(tmp_path / "eval_samples.jsonl")
    assert {row["step"] for row in rows} == {4}
    assert [row["completion"] for row in rows] == list(map(boxed, GREEDY))


@each_script
def test_parts_of_the_reward_are_means_over_both_ranks(script, evaluate):
    """Each rank has an order of its own."""

    def reward_in_parts(texts, rows):
        parts = [{"right": score / 2, "long": 8.0} for score in reward(texts, rows)]
        if script.RANK == 1:
            return [{"long": part["long"], "right": part["right"]} for part in parts]
        return parts

    metrics, _ = evaluate(script, world_size=2, score=reward_in_parts)
    assert metrics["eval/reward/right"] == pytest.approx(2.25 / 2 / 7) and metrics["eval/reward/long"] == 8
    assert metrics["eval/reward"] == pytest.approx(2.25 / 2 / 7 + 8)


def test_a_thought_is_opened_where_the_prompt_of_the_row_opens_it(monkeypatch):
    """Some templates open one unless the system message says /no_think."""
    tokenizer = make_tokenizer(["<eos>", "<think>", "</think>"], None)
    ids, mask = pad_right([tokenizer.encode("2", add_special_tokens=False)] * 3, 4)
    monkeypatch.setattr(ppo_rlhf, "generate", lambda *_: (ids, mask, mask.float()))
    model = SimpleNamespace(device="cpu", generation_config=SimpleNamespace(eos_token_id=[]))
    policy = SimpleNamespace(model=model, modules=list)
    rows = [{"prompt_ids": tokenizer.encode(text)} for text in ("1+1=", "1+1=<think>", "<think></think>1+1=")]
    _, texts = ppo_rlhf.sample_completions(policy, tokenizer, rows, 1.0, ppo_rlhf.Args())
    assert texts == ["2", "<think>2", "2"]


@each_script
def test_ranks_share_the_held_out_prompts(script, evaluate):
    whole, _ = evaluate(script)
    metrics, sampled = evaluate(script, world_size=2)
    assert metrics == pytest.approx(whole)
    shares = [len(prompts) for prompts, temperature in sampled if temperature == 0]
    assert shares == [4, 3]


def test_the_penalty_is_in_units_of_the_normalised_score(monkeypatch):
    """A reward model's score is normalised first; without one the reward of the rule is the score."""
    monkeypatch.setattr(ppo_rlhf, "compute_scores", lambda *_: torch.tensor([7.0, 3.0, -1.0]))
    rule_scores = [{"right": 1, "short": 0}, {"right": 0, "short": 0.0}, {"right": 0.25, "short": 0.25}]
    monkeypatch.setattr(ppo_rlhf, "score_completions", lambda *_: rule_scores)
    policy = SimpleNamespace(model=SimpleNamespace(device="cpu"), score_mean=3.0, score_std=4.0)
    policy.normalise = functools.partial(ppo_rlhf.ActorCritic.normalise, policy)
    batch = {"truncated": torch.tensor([False, True, True])}
    args = ppo_rlhf.Args(missing_stop_penalty=2.0)
    for reward_model, scores in (("a model", [1.0, -2.0, -3.0]), (None, [1.0, -2.0, -1.5])):
        given = policy, reward_model, batch, ["", "", ""], PROMPTS[:3], "eval/reward", args
        found, part_means = ppo_rlhf.score_rollout(*given)
        assert part_means == {"eval/reward/right": (1.25, 3), "eval/reward/short": (0.25, 3)}
        assert found["scores"].tolist() == scores
        assert found["rule_rewards"].tolist() == [1.0, 0.0, 0.5]


# ---- sampling: the distribution, stopping, padding, and agreement with plain forward passes

STOP = 5  # of the tokenizer in models/tiny
make_model = functools.partial(build_model, vocab_size=29, dtype=torch.float32)


def load_with(folder, of_config, of_generation):
    """A model as main loads it, whose configs name these stop ids, and whose tokenizer names STOP."""
    model = make_model("llama")
    model.config.eos_token_id = of_config
    model.generation_config.eos_token_id = of_generation
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    return load(ppo_rlhf, folder)[0]


def sample(model, rows, temperature, stop_ids, **settings):
    """What sample_completions returns for these prompts."""
    model.generation_config.eos_token_id = stop_ids
    policy = grpo_tools.LogprobModel(model)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    prompts = [{"prompt_ids": ids} for ids in rows]
    return ppo_rlhf.sample_completions(policy, tokenizer, prompts, temperature, ppo_rlhf.Args(**settings))


def pad_left(rows):
    return ppo_rlhf.pad_left([{"prompt_ids": ids} for ids in rows], "cpu")


def plain_greedy(model, prompt, max_completion_length, stop_ids):
    """Greedy decoding without padding, batch or cache."""
    ids = list(prompt)
    for _ in range(max_completion_length):
        logits = model(torch.tensor([ids])).logits[0, -1]
        ids.append(logits.argmax().item())
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


def completions_of(batch):
    """Completions up to the end of their mask, as lists."""
    pairs = zip(batch["completion_ids"], batch["completion_mask"])
    return [ids[: mask.sum()].tolist() for ids, mask in pairs]


def random_prompts(count, low, high):
    draw = random.Random(7)
    lengths = [draw.randint(low, high) for _ in range(count)]
    return [draw.choices(range(6, 29), k=length) for length in lengths]


def check_distribution(model, stop_ids, temperature, num_samples=20_000):
    """Two sampled tokens after one prompt are within five standard errors of softmax(logits / temperature)."""
    prompt = torch.tensor([[7, 9, 11]])
    ids = torch.arange(model.config.vocab_size)
    torch.manual_seed(1)
    rows = prompt.repeat(num_samples, 1)
    tokens, _, _ = ppo_rlhf.generate(model, rows, torch.ones_like(rows), 2, temperature, stop_ids)
    extended = torch.cat([prompt.repeat(len(ids), 1), ids.unsqueeze(1)], 1)
    first = model(prompt).logits[:, -1] / temperature  # (1, V)
    second = model(extended).logits[:, -1] / temperature  # (V, V)
    first = first.detach().softmax(-1)
    second = second.detach().softmax(-1)
    second[stop_ids] = (ids == 0).float()  # padding
    expected = (first.T * second).flatten() * num_samples
    places = tokens[:, 0] * len(ids) + tokens[:, 1]
    counts = places.bincount(minlength=len(expected))
    tolerance = 5 * expected.sqrt() + 5
    assert ((counts - expected).abs() < tolerance).all()


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_samples_follow_the_softmax_of_the_logits(temperature):
    check_distribution(make_model("llama", vocab_size=12), [STOP], temperature)


def test_generation_config_of_the_model_does_not_change_the_distribution(tmp_path):
    load_with(tmp_path, STOP, None)
    wishes = {"do_sample": True, "top_k": 3, "top_p": 0.5, "temperature": 0.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(wishes))
    model, _ = load(ppo_rlhf, tmp_path)
    check_distribution(model, [STOP, 9], 0.7)


def draw(monkeypatch, draws):
    """Let the random numbers of sample_tokens be these, one a row."""

    def rand(*size, dtype, **_):
        return torch.as_tensor(draws).view(-1, 1).expand(size).to(dtype)

    monkeypatch.setattr(torch, "rand", rand)


@pytest.mark.parametrize("value", torch.tensor([0, 1 - 2**-53], dtype=torch.float64))
def test_ids_of_probability_zero_are_never_sampled(monkeypatch, value):
    draw(monkeypatch, value)
    torch.manual_seed(0)
    logits = torch.randn(200, 50)
    logits[:, 0] = -torch.inf
    logits[:, 47:] = -torch.inf
    logits[:100, 1:40] = -torch.inf
    tokens, logprobs = ppo_rlhf.sample_tokens(logits, 0.5)
    sampled = logits.gather(1, tokens.unsqueeze(1))
    assert sampled.isfinite().all()
    assert logprobs.isfinite().all()


def test_rare_ids_of_a_large_vocabulary_are_drawn_as_often_as_they_are_likely(monkeypatch):
    """Of 151,936 ids the first has nearly all probability, each other 1e-8, but for every third, which has none."""
    ids = torch.arange(151_936)
    rare = ids[ids % 3 != 0]
    logits = torch.full((1, 151_936), -torch.inf)
    logits[0, 0] = 0.0
    logits[0, rare] = -18.4
    tail = 1 / (1 + math.exp(18.4) / len(rare))
    places = torch.arange(50) * 2000
    places = torch.cat([places, places + 1])  # pairs of neighbours
    draw(monkeypatch, 1 - tail + tail * (places.double() + 0.5) / len(rare))
    tokens, logprobs = ppo_rlhf.sample_tokens(logits.expand(100, -1), 1.0)
    assert torch.isin(tokens, rare).all()
    found = torch.searchsorted(rare, tokens)
    assert (found - places).abs().max() < 10  # the probability of the first id is rounded
    assert len(found.unique()) >= 98
    assert logprobs.tolist() == pytest.approx([-18.4] * 100, abs=1e-2)


def test_stop_ids_are_the_union_of_all_that_name_one(tmp_path):
    for named, expected in (([7, 8], [STOP, 7, 8]), (7, [STOP, 7]), (None, [STOP])):
        assert load_with(tmp_path, 9, named).generation_config.eos_token_id == expected
    (tmp_path / "generation_config.json").unlink()  # then it is made from the model's config
    assert load(ppo_rlhf, tmp_path)[0].generation_config.eos_token_id == [STOP, 9]


def test_every_stop_id_ends_a_completion_and_counts_in_the_mask(tmp_path):
    model = load_with(tmp_path, 9, [7, 8])
    stop_ids = model.generation_config.eos_token_id
    torch.manual_seed(0)
    ids, mask = pad_left(random_prompts(200, 2, 6))
    completion_ids, completion_mask, sampler_logprobs = ppo_rlhf.generate(model, ids, mask, 60, 1.0, stop_ids)
    assert completion_mask.sum(1).max() > 30  # rows of very different lengths
    ends = set()
    for row, own in zip(completion_ids.tolist(), completion_mask.tolist()):
        length = sum(own)
        assert own == sorted(own, reverse=True)
        assert not any(row[length:])  # padding
        assert set(stop_ids).isdisjoint(row[: length - 1])
        if length < 60:
            ends.add(row[length - 1])
    assert ends == {*stop_ids}
    assert not sampler_logprobs[completion_mask == 0].any()


def test_a_completion_of_full_length_is_truncated_unless_it_ends_in_a_stop_id():
    torch.manual_seed(0)
    batch, _ = sample(make_model("llama"), random_prompts(30, 2, 6) * 10, 1.0, [STOP, 9], max_completion_length=3)
    full = []
    for completion, truncated in zip(completions_of(batch), batch["truncated"]):
        stopped = completion[-1] in (STOP, 9)
        assert truncated != stopped
        if len(completion) == 3:
            full.append(stopped)
    assert any(full)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_padded_batch_decodes_like_single_rows(kind):
    model = make_model(kind)
    prompts = random_prompts(24, 1, 12)
    prompts += [prompts[3]] * 2 + [prompts[0]]  # a group, and a repetition further on
    prompts += [[0, 8, 0, 9], [5, 11, 5]]  # pad and stop ids inside a prompt
    stop_ids = [STOP, 12, 17]
    expected = [plain_greedy(model, prompt, 25, stop_ids) for prompt in prompts]
    for size in (0, 3):
        batch, _ = sample(model, prompts, 0.0, stop_ids, max_completion_length=25, rollout_batch_size=size)
        assert completions_of(batch) == expected


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampler_training_forward_and_plain_forward_give_the_same_logprobs(kind, temperature):
    model = make_model(kind)
    torch.manual_seed(0)
    ids, mask = pad_left(random_prompts(16, 1, 9))
    sampled = ppo_rlhf.generate(model, ids, mask, 20, temperature, [STOP, 9, 12])
    completion_ids, completion_mask, sampler_logprobs = sampled
    logprobs, _ = ppo_rlhf.token_logprobs(model, ids, mask, completion_ids, completion_mask, temperature)
    torch.testing.assert_close(sampler_logprobs, logprobs, atol=1e-5, rtol=0)
    for row in range(16):
        prompt = ids[row, mask[row] == 1]
        tokens = completion_ids[row, completion_mask[row] == 1]
        whole = torch.cat([prompt, tokens]).unsqueeze(0)
        logits = model(whole).logits[0, len(prompt) - 1 : -1]
        plain = (logits / temperature).log_softmax(-1)
        expected = plain[torch.arange(len(tokens)), tokens]
        torch.testing.assert_close(logprobs[row, : len(tokens)], expected, atol=1e-5, rtol=0)


class Written(TorchDispatchMode):
    """Counts the bytes that operators write, without those of views."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.bytes += out.nbytes
        return out


def count_written(monkeypatch, model, tokens, stop_ids=()):
    """The tokens of key-value cache that updates and departures write while 64 completions are sampled."""
    written = Written()

    def counted(method, *args):
        with written:
            return method(*args)

    with monkeypatch.context() as patch:
        for owner, name in ((DynamicLayer, "update"), (ppo_rlhf.RoomyLayer, "update"), (DynamicLayer, "reorder_cache")):
            patch.setattr(owner, name, functools.partialmethod(functools.partial(counted, getattr(owner, name))))
        torch.manual_seed(0)
        ids = torch.randint(6, 29, (8, 8)).repeat_interleave(8, 0)
        ppo_rlhf.generate(model, ids, torch.ones_like(ids), tokens, 1.0, stop_ids)
    config = model.config
    size = 2 * 4 * config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    return written.bytes / (len(ids) * config.num_hidden_layers * size)


def test_the_cache_copies_a_few_tokens_for_each_new_one(monkeypatch):
    """Not all tokens: with room for 128, at most four; completions that leave add less than sixteen whole caches."""
    model = make_model("llama")
    assert count_written(monkeypatch, model, 256) < 4 * 256
    assert count_written(monkeypatch, model, 512) < 4 * 512
    assert count_written(monkeypatch, model, 512, [20, 21]) < 4 * 512 + 16 * 520
    with monkeypatch.context() as patch:
        patch.setattr(ppo_rlhf.RoomyLayer, "update", DynamicLayer.update)
        assert count_written(monkeypatch, model, 256) > 100 * 256


def test_the_cache_is_freed_at_once(monkeypatch):
    """Without Python's garbage collector, which may come too late for the next rollout's cache."""
    caches = []
    prefill = ppo_rlhf.prefill

    def watch(*args):
        logits, cache = prefill(*args)
        caches.extend(weakref.ref(layer) for layer in cache.layers)
        return logits, cache

    monkeypatch.setattr(ppo_rlhf, "prefill", watch)
    ids, mask = pad_left(random_prompts(4, 2, 6))
    gc.disable()
    try:
        ppo_rlhf.generate(make_model("llama"), ids, mask, 4, 1.0, [STOP])
        assert caches and [cache() for cache in caches] == [None] * len(caches)
    finally:
        gc.enable()


def test_only_layers_of_the_usual_type_get_room():
    """One layer of this model has a sliding window."""
    ids, mask = pad_left(random_prompts(4, 2, 6))
    model = make_model("llama")
    assert {type(layer) for layer in ppo_rlhf.prefill(model, ids, mask)[1].layers} == {ppo_rlhf.RoomyLayer}
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    model = make_model(Gemma3TextConfig(**SIZES, num_key_value_heads=1, head_dim=8, **windows))
    kinds = [type(layer) for layer in ppo_rlhf.prefill(model, ids, mask)[1].layers]
    assert kinds == [DynamicSlidingWindowLayer, ppo_rlhf.RoomyLayer]


def test_finished_completions_leave_in_eighths(monkeypatch):
    """Sixteen completions end one after the other, each a token after the one before; two leave at a time, then one."""
    model, sizes = make_model("llama"), []
    ends = torch.arange(16)
    steps = itertools.count()

    def sample_tokens(logits, _temperature):
        sizes.append(len(logits))
        tokens = torch.where(ends == next(steps), STOP, 7)
        return tokens[remaining()], torch.full([len(logits)], -0.5)

    def remaining():
        """The completions that are still in the batch: the last ones."""
        return slice(16 - sizes[-1], None)

    monkeypatch.setattr(ppo_rlhf, "sample_tokens", sample_tokens)
    ids, mask = pad_left(random_prompts(16, 2, 6))
    ids, mask, logprobs = ppo_rlhf.generate(model, ids, mask, 20, 1.0, [STOP])
    assert sizes == [16, 16, 14, 14, 12, 12, 10, 10, 8, 7, 6, 5, 4, 3, 2, 1]
    assert mask.sum(1).tolist() == [*range(1, 17)]
    assert (ids == mask * torch.where(ends.unsqueeze(1) == torch.arange(20), STOP, 7)).all()
    assert (logprobs == -0.5 * mask).all()


@pytest.mark.parametrize("script, most", [(grpo_tools, 8), (ppo_rlhf, 4)])
def test_an_evaluation_samples_at_once_what_a_step_samples(script, most, monkeypatch):
    """Greedy completions are those of a single batch."""
    found, sizes = [], []
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    policy = SimpleNamespace(model=script.load_model(TINY, tokenizer), modules=lambda: [])
    rows = [{"prompt_ids": tokenizer.encode(f"<|user|>{i}+{i + 9}=<|assistant|>")} for i in range(20)]
    generate = script.generate

    def watch(model, ids, *args):
        sizes.append(len(ids))
        return generate(model, ids, *args)

    monkeypatch.setattr(script, "generate", watch)
    for given in (0, 100):
        sizes.clear()
        settings = {"prompts_per_step": 4, "group_size": 2, "minibatch_size": 4, "rollout_batch_size": given}
        names = vars(script.Args())
        args = script.Args(**{name: value for name, value in settings.items() if name in names})
        script.check_args(args)
        found.append(script.sample_completions(policy, tokenizer, rows, 0.0, args)[1])
        assert max(sizes) == (given and 20 or most) and sum(sizes) == 20
    assert found[0] == found[1]
