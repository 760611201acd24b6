"""Sampling: the distribution, stopping, padding and copies: python -m pytest tests/test_generate.py"""

import functools
import json
import math
import random
import shutil

import pytest
import torch
from toy import TINY, build_model
from transformers import AutoTokenizer

import grpo

STOP = 5  # of the tokenizer in models/tiny
make_model = functools.partial(build_model, vocab_size=29, dtype=torch.float32)


def random_prompts(count, low, high):
    draw = random.Random(7)
    return [draw.choices(range(29), k=draw.randint(low, high)) for _ in range(count)]


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_samples_of_a_group_are_independent_draws_from_the_softmax(temperature, num_samples=20_000):
    """Two tokens after one prompt, which is read once, are within five standard errors of softmax(logits / T)."""
    model, prompt = make_model("llama", vocab_size=12), [7, 9, 11]
    ids = torch.arange(12)
    torch.manual_seed(1)
    completions = grpo.generate(model, [prompt] * num_samples, 2, temperature, [STOP])
    extended = torch.cat([torch.tensor([prompt] * 12), ids.unsqueeze(1)], 1)
    first = model(torch.tensor([prompt])).logits[:, -1].div(temperature).softmax(-1).detach()  # (1, V)
    second = model(extended).logits[:, -1].div(temperature).softmax(-1).detach()  # (V, V)
    second[STOP] = (ids == 0).float()  # nothing follows
    expected = (first.T * second).flatten() * num_samples
    places = [tokens[0] * 12 + (tokens + [0])[1] for tokens, _ in completions]
    counts = torch.tensor(places).bincount(minlength=144)
    assert ((counts - expected).abs() < 5 * expected.sqrt() + 5).all()
    firsts = torch.tensor([tokens[0] for tokens, _ in completions])
    alike, chance = (firsts[1:] == firsts[:-1]).float().mean(), first.square().sum()  # neighbours are independent
    assert (alike - chance).abs() < 5 * (chance * (1 - chance) / num_samples).sqrt()
    for tokens, logprobs in completions[:50]:
        right = [first[0, tokens[0]], *(second[tokens[0], token] for token in tokens[1:])]
        assert logprobs == pytest.approx([math.log(value) for value in right], abs=1e-4)


def greedy(model, prompt, max_completion_length, stop_ids):
    """Greedy decoding without padding, batch or cache."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_completion_length:
        ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_padded_batch_decodes_like_single_rows(kind):
    """Prompts of all lengths, copies of a prompt side by side and apart, prompts with the id of padding, 0."""
    model = make_model(kind)
    prompts = random_prompts(24, 1, 12) + [[0], [0, 0], [0, 0, 7]]
    prompts += [prompts[3]] * 2 + [prompts[0]]
    completions = grpo.generate(model, prompts, 30, 0.0, [STOP, 9])
    expected = [greedy(model, prompt, 30, [STOP, 9]) for prompt in prompts]
    assert [tokens for tokens, _ in completions] == expected
    lengths = [len(tokens) for tokens in expected]
    assert min(lengths) < 5 and max(lengths) == 30  # some leave the batch early, and some do not stop
    torch.manual_seed(0)
    for tokens, logprobs in grpo.generate(model, prompts, 30, 1.0, [STOP, 9]):
        assert len(tokens) == len(logprobs) and not {STOP, 9} & {*tokens[:-1]}
        assert len(tokens) == 30 or tokens[-1] in (STOP, 9)


def test_stop_ids_are_all_that_model_tokenizer_and_template_name(tmp_path):
    """And nothing else of a model's generation config changes what is sampled."""
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    wishes = {"do_sample": True, "top_k": 3, "top_p": 0.5, "temperature": 0.1, "repetition_penalty": 1.5}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    args = grpo.Args(model=str(tmp_path), precision="float32")
    for named, expected in (([7, 8], [STOP, 7, 8]), (7, [STOP, 7]), (None, [STOP])):
        (tmp_path / "generation_config.json").write_text(json.dumps(wishes | {"eos_token_id": named}))
        sampler = grpo.load_sampler(args, tokenizer, torch.device("cpu"))
        assert sampler.generation_config.eos_token_id == expected
        assert sampler.generation_config.to_diff_dict().keys() <= {"eos_token_id", "transformers_version"}
    tokenizer.eos_token = "<|user|>"  # a base model's may differ from what ends a turn in the template
    stop_ids = grpo.load_sampler(args, tokenizer, torch.device("cpu")).generation_config.eos_token_id
    assert stop_ids == sorted([STOP, tokenizer.convert_tokens_to_ids("<|user|>")])
    tokenizer.chat_template = None
    assert grpo.find_turn_end(tokenizer) is None


@pytest.mark.parametrize("limit, stop_ids", [(6, [STOP]), (12, [STOP]), (12, [STOP, 9])])
def test_batches_texts_and_truncation(limit, stop_ids):
    """What sample_completions makes of completions, in several batches, and texts without their stop token."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    args = grpo.Args(model=str(TINY), precision="float32", max_prompt_length=9, rollout_batch_size=3)
    args.max_completion_length = limit
    sampler = grpo.load_sampler(args, tokenizer, torch.device("cpu"))
    sampler.generation_config.eos_token_id = stop_ids
    rows = [{"prompt_ids": tokenizer.encode(text)} for text in ("12+34=", "5+6=", "5+6=", "1+1=", "99+1=")]
    for seed in range(10):  # some completions are as long as they may be, or have a token of id 0
        check_batch(sampler, tokenizer, rows, args, seed)


def check_batch(sampler, tokenizer, rows, args, seed):
    limit, stop_ids = args.max_completion_length, sampler.generation_config.eos_token_id
    torch.manual_seed(seed)
    batch, texts = grpo.sample_completions(sampler, tokenizer, rows, 2.0, args)
    torch.manual_seed(seed)
    pairs = []
    for part in (rows[:3], rows[3:]):
        prompts = [row["prompt_ids"] for row in part]
        pairs += grpo.generate(sampler, prompts, limit, 2.0, stop_ids)
    assert batch["ids"].shape == (5, 9 + limit)
    for i, (row, (tokens, logprobs)) in enumerate(zip(rows, pairs, strict=True)):
        start, end = len(row["prompt_ids"]), len(row["prompt_ids"]) + len(tokens)
        assert batch["ids"][i].tolist() == row["prompt_ids"] + tokens + [0] * (9 + limit - end)
        assert batch["completion_mask"][i].nonzero().flatten().tolist() == list(range(start, end))
        assert batch["sampler_logprobs"][i, start:end].tolist() == pytest.approx(logprobs)
        assert batch["sampler_logprobs"][i].count_nonzero() <= len(tokens)
        assert batch["total_lengths"][i] == end
        assert batch["truncated"][i] == (tokens[-1] not in stop_ids)
        assert texts[i] == tokenizer.decode([token for token in tokens if token not in stop_ids])


# ---- the draw


def test_ids_of_probability_zero_are_never_drawn():
    torch.manual_seed(0)
    logits = torch.randn(200, 300)
    logits[:, :130] = -torch.inf
    logits[:, 290:] = -torch.inf
    logits[:100, 131:280] = -torch.inf
    for _ in range(50):
        tokens, logprobs = grpo.sample_tokens(logits, 0.5)
        assert logits.gather(1, tokens.unsqueeze(1)).isfinite().all()
        assert logprobs.isfinite().all()


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 129, 1000])
def test_frequencies_of_a_vocabulary_of_any_size(vocab_size):
    torch.manual_seed(0)
    logits = 2 * torch.randn(vocab_size)
    tokens, logprobs = grpo.sample_tokens(logits.expand(50_000, -1), 1.0)
    expected = 50_000 * logits.softmax(-1)
    assert ((tokens.bincount(minlength=vocab_size) - expected).abs() < 5 * expected.sqrt() + 5).all()
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[tokens])


def test_rare_ids_of_a_large_vocabulary_are_drawn():
    """Of 151,936 ids the first has all but 0.02 of the probability, each other one 1.3e-7."""
    torch.manual_seed(0)
    logits = torch.full((1, 151_936), -math.log(151_935 * 49))
    logits[0, 0] = 0.0
    drawn = [grpo.sample_tokens(logits.expand(250, -1), 1.0) for _ in range(8)]
    tokens = torch.cat([tokens for tokens, _ in drawn])
    rare = tokens[tokens > 0]
    assert 15 < len(rare) < 70 and len(rare.unique()) == len(rare)  # 40 of 2,000, and 5 standard deviations
    assert 40_000 < rare.double().mean() < 110_000
    logprobs = torch.cat([logprobs for _, logprobs in drawn])[tokens > 0]
    assert logprobs.tolist() == pytest.approx([-15.84] * len(rare), abs=0.01)


def test_at_temperature_zero_the_likeliest_is_taken():
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = grpo.sample_tokens(logits, 0.0)
    assert torch.equal(tokens, logits.argmax(1)) and not logprobs.any()
