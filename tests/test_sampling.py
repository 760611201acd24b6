"""Sampling, and the evaluations that sample."""

import importlib
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from main_ranks import sample_gathered
from tiny import ROOT, TINY, load, parse
from tiny import SCRIPTS as ONLINE
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import grpo
import ppo_rlhf

SCRIPTS = ONLINE | {"ppo_rlhf": ppo_rlhf}
SAMPLES = [[0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 1], [1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 1, 0], [0.5, 0.5, 0, 0.5]]
GREEDY = [0, 1, 0.5, 1, 0.9, 0.1, 1]  # 1 is right
TRUNCATED = [True, False, False, True, False, True, False]
PROMPTS = [{"prompt": f"{i}", "answer": "1", "prompt_ids": [i]} for i in range(len(GREEDY))]


def reward(text):
    """A reward of one's own: a bonus for an answer with a point, and never 1."""
    return 0.5 * ("{1}" in text) + 0.25 * ("." in text)


@pytest.fixture
def evaluate(monkeypatch, tmp_path):
    """Calls a script's evaluate with the rewards above, on every rank; returns its metrics and what each sampled."""

    def call(script, prompts=PROMPTS, world_size=1, **settings):
        sampled, sums = [[] for _ in range(world_size)], []

        def sample_completions(_policy, _tokenizer, prompts, temperature, _args, _edit=None):
            sampled[len(sums)].append((prompts, temperature))
            places = [int(prompt["prompt"]) for prompt in prompts]
            right = [GREEDY[i] for i in places]
            if temperature > 0:
                right = [SAMPLES[i][number % 4] for number, i in enumerate(places)]
            texts = [f"\\boxed{{{value}}}" for value in right]
            return {"truncated": torch.tensor([TRUNCATED[i] for i in places])}, texts

        def all_reduce(values):
            sums.append(values)
            return [sum(column) for column in zip(*sums)]

        monkeypatch.setattr(script, "sample_completions", sample_completions)
        monkeypatch.setattr(script, "score_completions", lambda texts, _rows: [reward(text) for text in texts])
        monkeypatch.setattr(script, "all_reduce", all_reduce)
        monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
        args = script.Args(run_dir=str(tmp_path), **settings)
        policy = SimpleNamespace(model=SimpleNamespace(device="cpu"), actor=None)
        scorer = [None] if script is ppo_rlhf else []
        for rank in range(world_size):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            metrics = script.evaluate(policy, *scorer, None, prompts, args, 4)
        return metrics, sampled

    return call


each_script = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)


@each_script
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(script, evaluate):
    """Of four samples, that is the share of right ones, and whether any is right; a reward of 0.5 is not."""
    metrics, _ = evaluate(script)
    right = [[value == 1 for value in samples] for samples in SAMPLES]
    assert metrics["eval/pass@1"] == pytest.approx(sum(map(sum, right)) / 28)
    assert metrics["eval/pass@4"] == pytest.approx(sum(map(any, right)) / 7)


@each_script
def test_accuracy_counts_right_greedy_completions_whatever_the_reward_is(script, evaluate):
    metrics, _ = evaluate(script)
    assert metrics["eval/accuracy"] == pytest.approx(3 / 7)
    assert metrics["eval/reward"] == pytest.approx((3 * 0.5 + 3 * 0.25) / 7)


@each_script
def test_without_answers_the_reward_is_all_there_is(script, evaluate):
    metrics, sampled = evaluate(script, [prompt | {"answer": None} for prompt in PROMPTS])
    assert {*metrics} - {"eval/score"} == {"eval/reward"}
    assert [temperature for _, temperature in sampled[0]] == [0.0]


@each_script
def test_one_greedy_completion_which_is_kept_and_samples_at_the_temperature_of_training(script, evaluate, tmp_path):
    _, sampled = evaluate(script, temperature=0.7)
    assert sampled == [[(PROMPTS, 0.0), ([prompt for prompt in PROMPTS for _ in range(4)], 0.7)]]
    rows = [json.loads(line) for line in (tmp_path / "eval_samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4] * 7
    assert [row["completion"] for row in rows] == [f"\\boxed{{{value}}}" for value in GREEDY]
    assert [row["prompt"] for row in rows] == [prompt["prompt"] for prompt in PROMPTS]


@each_script
def test_ranks_share_the_held_out_prompts(script, evaluate):
    """Sums are divided by the number of all prompts; with fewer prompts than ranks some are evaluated twice."""
    whole, _ = evaluate(script)
    metrics, sampled = evaluate(script, world_size=2)
    shares = [[prompt["prompt"] for prompt in of_rank[0][0]] for of_rank in sampled]
    assert sorted(sum(shares, [])) == [prompt["prompt"] for prompt in PROMPTS] and min(map(len, shares)) == 3
    assert metrics == pytest.approx(whole)
    metrics, sampled = evaluate(script, PROMPTS[1:2], world_size=3)
    assert metrics == pytest.approx(evaluate(script, PROMPTS[1:2])[0]) and len(sampled[2][0][0]) == 1


@each_script
def test_evaluation_draws_the_same_samples_every_time(script, evaluate):
    states = []
    for seed in (5, 5, 6):
        torch.rand(3)  # training in between
        evaluate(script, seed=seed)
        states.append(torch.rand(3).tolist())
    assert states[0] == states[1] != states[2]


# ---- scores of PPO


def test_score_of_a_cut_off_completion_is_less_by_the_penalty(evaluate):
    metrics, _ = evaluate(ppo_rlhf, missing_stop_penalty=2.0)
    assert metrics["eval/score"] == pytest.approx((3 * 0.5 + 3 * 0.25 - 2.0 * sum(TRUNCATED)) / 7)


@pytest.mark.parametrize("penalty", [0.0, 2.0])
@pytest.mark.parametrize("scored", [True, False])
def test_the_penalty_is_in_units_of_the_normalised_score(monkeypatch, penalty, scored):
    """A reward model's score is normalised first; without one the reward of the rule is the score."""
    raw = torch.tensor([7.0, 3.0, -1.0])
    monkeypatch.setattr(ppo_rlhf, "look_up_scores", lambda _model, _batch, _args: raw)
    batch = {"rewards": torch.tensor([1.0, 0.0, 0.5]), "truncated": torch.tensor([False, True, True])}
    policy = SimpleNamespace(score_mean=3.0, score_std=4.0)
    args = ppo_rlhf.Args(missing_stop_penalty=penalty, microbatch_tokens=9)
    scores = ppo_rlhf.score_batch(object() if scored else None, batch, policy, args)
    expected = [1.0, 0.0 - penalty, -1.0 - penalty] if scored else [1.0, 0.0 - penalty, 0.5 - penalty]
    assert scores.tolist() == expected


# The embedded data of scripts that look at all of it before they evaluate: a few rows will do.
FILES = {"sft": "addition/sft.jsonl"} | dict.fromkeys(("dpo", "reward_model"), "preferences/train.jsonl")


@pytest.mark.parametrize("name", ["grpo", "dpo", "ppo_rlhf", "reward_model", "sft"])
def test_no_steps_evaluate_a_checkpoint_and_save_nothing(name, tmp_path, capsys):
    script, run = importlib.import_module(name), tmp_path / "run"
    given = {"model": str(TINY)} if name == "sft" else {}
    if name in FILES:
        rows = (ROOT / "data" / FILES[name]).read_text().splitlines()[:32]
        (tmp_path / "rows.jsonl").write_text("\n".join(rows))
        given["dataset"] = str(tmp_path / "rows.jsonl")
    script.main(parse(script, num_steps=0, eval_prompts=4, run_dir=run, **given))
    assert "to continue" not in capsys.readouterr().out
    [line] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert line["step"] == 0 and any(key.startswith("eval/") for key in line)
    assert not (run / "checkpoint").exists() and not [*(run / "state").glob("*")]
    if "eval/accuracy" in line:
        rows = [json.loads(row) for row in (run / "eval_samples.jsonl").read_text().splitlines()]
        right = [script.is_right(row["completion"], str(eval(row["prompt"].rstrip("=")))) for row in rows]
        assert len(right) == 4 and line["eval/accuracy"] == sum(right) / 4


# ==== sampling: the distribution, stopping, padding, and agreement with plain forward passes


PAD, STOP = 0, 5  # of the tokenizer in models/tiny


def make_model(kind="llama", vocab_size=29, **settings):
    """A random model whose next-token distributions are far from uniform."""
    torch.manual_seed(0)
    sizes = {"vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": STOP, "pad_token_id": PAD, **settings}
    if kind == "gpt2":
        config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=128, initializer_range=0.3, **sizes)
        return GPT2LMHeadModel(config).eval()
    sizes |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(max_position_embeddings=128, initializer_range=0.25, **sizes)
    return LlamaForCausalLM(config).eval()


def load_tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def load_with(folder, of_config, of_generation):
    """A model as main loads it, whose configs name these stop ids, and its tokenizer, which names STOP."""
    model = make_model()
    model.config.eos_token_id, model.generation_config.eos_token_id = of_config, of_generation
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    return load(grpo, folder)


def sample(model, rows, num_samples, temperature, stop_ids, **settings):
    """What sample_completions returns for each of these prompts, that many times."""
    model.generation_config.eos_token_id = stop_ids
    prompts = [{"prompt_ids": ids} for ids in rows for _ in range(num_samples)]
    args = grpo.Args(**settings)
    return grpo.sample_completions(grpo.LogprobModel(model), load_tokenizer(), prompts, temperature, args)


def pad_left(rows):
    return grpo.pad_left([{"prompt_ids": ids} for ids in rows], "cpu")


def plain_greedy(model, prompt, max_completion_length, stop_ids):
    """Greedy decoding without padding, batch or cache."""
    ids = list(prompt)
    for _ in range(max_completion_length):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


def generate_lists(model, prompts, max_completion_length, temperature=0.0, stop_ids=(STOP,)):
    """Completions up to the end of their mask, as lists."""
    ids, mask = pad_left(prompts)
    completion_ids, completion_mask = grpo.generate(
        model, ids, mask, max_completion_length, temperature, list(stop_ids), PAD
    )
    return [row[:length] for row, length in zip(completion_ids.tolist(), completion_mask.sum(1).tolist())]


def random_prompts(count, low, high, vocab_size=29):
    draw = torch.Generator().manual_seed(7)
    lengths = torch.randint(low, high + 1, (count,), generator=draw).tolist()
    return [torch.randint(6, vocab_size, (length,), generator=draw).tolist() for length in lengths]


def chi_squared_p(counts, probabilities):
    """Probability of counts at least this far from expectation; cells expected less than 5 times count as one."""
    expected = probabilities.double() * counts.sum()
    rare = expected < 5
    counts = torch.cat([counts[~rare].double(), counts[rare].sum().view(1).double()])
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


def check_distribution(model, stop_ids, temperature, num_samples=20_000):
    """Sample two tokens after one prompt and compare with softmax(logits / temperature) of full forwards."""
    prompt = torch.tensor([[7, 9, 11]])
    vocab_size = model.config.vocab_size
    torch.manual_seed(1)
    rows = prompt.repeat(num_samples, 1)
    tokens, mask = grpo.generate(model, rows, torch.ones_like(rows), 2, temperature, stop_ids, PAD)
    with torch.no_grad():
        first = (model(prompt).logits[0, -1] / temperature).softmax(-1)
        extended = torch.cat([prompt.repeat(vocab_size, 1), torch.arange(vocab_size).unsqueeze(1)], 1)
        second = (model(extended).logits[:, -1] / temperature).softmax(-1)  # (V, V)
    assert chi_squared_p(tokens[:, 0].bincount(minlength=vocab_size), first) > 1e-3
    going_on = mask[:, 1] == 1
    assert torch.equal(going_on, torch.isin(tokens[:, 0], torch.tensor(stop_ids), invert=True))
    joint = first.unsqueeze(1) * second
    joint[stop_ids] = 0
    pairs = tokens[going_on, 0] * vocab_size + tokens[going_on, 1]
    assert chi_squared_p(pairs.bincount(minlength=vocab_size**2), (joint / joint.sum()).flatten()) > 1e-3


# ---- the distribution


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_samples_follow_the_softmax_of_the_logits(temperature):
    check_distribution(make_model(vocab_size=12), [STOP], temperature)


def test_generation_config_of_the_model_does_not_change_the_distribution(tmp_path):
    load_with(tmp_path, STOP, None)
    wishes = {"do_sample": True, "top_k": 3, "top_p": 0.5, "temperature": 0.1, "repetition_penalty": 1.5}
    (tmp_path / "generation_config.json").write_text(json.dumps({**wishes, "eos_token_id": [STOP, 9]}))
    model, _ = load(grpo, tmp_path)
    assert model.generation_config.eos_token_id == [STOP, 9]
    check_distribution(model, [STOP, 9], 0.7)


def draw(monkeypatch, draws):
    """Let the random numbers of sample_tokens be these, one a row."""
    draws = torch.as_tensor(draws, dtype=torch.float64).view(-1, 1)
    monkeypatch.setattr(torch, "rand", lambda *size, dtype=None, **_: draws.expand(size).to(dtype or torch.float32))


@pytest.mark.parametrize("value", [0.0, 1 - 2**-53, None])
def test_ids_of_probability_zero_are_never_sampled(monkeypatch, value):
    if value is not None:
        draw(monkeypatch, value)
    torch.manual_seed(0)
    logits = torch.randn(200, 50)
    logits[:, 0] = logits[:, 47:] = -torch.inf
    logits[:100, 1:40] = -torch.inf
    for temperature in (0.5, 1.0, 2.0):
        tokens, logprobs = grpo.sample_tokens(logits, temperature)
        assert logits[torch.arange(200), tokens].isfinite().all() and logprobs.isfinite().all()


def test_rare_ids_of_a_large_vocabulary_are_drawn_as_often_as_they_are_likely(monkeypatch):
    """Of 151,936 ids the first has nearly all probability, each other 1e-8, but for every third, which has none."""
    rare = torch.arange(1, 151_936)
    rare = rare[rare % 3 != 0]
    logits = torch.full((1, 151_936), -torch.inf)
    logits[0, 0], logits[0, rare] = 0.0, -18.4
    tail = 1 / (1 + torch.tensor(18.4, dtype=torch.float64).exp() / len(rare))
    draw(monkeypatch, 1 - tail + tail * (torch.arange(100) + 0.5) / 100)
    tokens, logprobs = grpo.sample_tokens(logits.expand(100, -1), 1.0)
    shares = (torch.searchsorted(rare, tokens) * 10 // len(rare)).bincount(minlength=10)
    assert torch.isin(tokens, rare).all() and len(shares) == 10
    assert 9 <= shares.min() and shares.max() <= 11
    torch.testing.assert_close(logprobs, torch.full((100,), -18.4), atol=1e-2, rtol=0)
    draw(monkeypatch, 1 - tail / 2 + tail / len(rare) * torch.arange(100))  # one id after the other
    tokens, _ = grpo.sample_tokens(logits.expand(100, -1), 1.0)
    assert len(tokens.unique()) >= 99 and torch.isin(tokens, rare).all()


def test_temperature_0_is_argmax():
    logits = torch.randn(64, 29, generator=torch.Generator().manual_seed(0))
    assert torch.equal(grpo.sample_tokens(logits, 0)[0], logits.argmax(-1))


# ---- stopping


def test_stop_ids_are_the_union_of_all_that_name_one(tmp_path):
    model, _ = load_with(tmp_path, 9, [7, 8])
    assert model.generation_config.eos_token_id == [STOP, 7, 8, 9]
    model, _ = load_with(tmp_path, 9, None)
    assert model.generation_config.eos_token_id == [STOP, 9]


def test_every_stop_id_ends_a_completion_and_counts_in_the_mask(tmp_path):
    model, _ = load_with(tmp_path, 9, [7, 8])
    stop_ids = model.generation_config.eos_token_id
    torch.manual_seed(0)
    ids, mask = pad_left(random_prompts(200, 2, 6))
    completion_ids, completion_mask = grpo.generate(model, ids, mask, 60, 1.0, stop_ids, PAD)
    lengths = completion_mask.sum(1)
    assert lengths.min() == 1 and lengths.max() > 30  # rows of very different lengths
    ends = set()
    for row, row_mask, length in zip(completion_ids.tolist(), completion_mask.tolist(), lengths.tolist()):
        assert row_mask == [1] * length + [0] * (60 - length)
        assert row[length:] == [PAD] * (60 - length)
        assert not set(row[: length - 1]) & set(stop_ids)
        assert length == 60 or row[length - 1] in stop_ids
        ends.add(row[length - 1])
    assert ends >= set(stop_ids)


def test_a_completion_of_full_length_is_truncated_unless_it_ends_in_a_stop_id():
    torch.manual_seed(0)
    batch, texts = sample(make_model(), random_prompts(30, 2, 6), 10, 1.0, [STOP, 9], max_completion_length=3)
    lengths = batch["completion_mask"].sum(1)
    last = batch["completion_ids"].gather(1, (lengths - 1).unsqueeze(1)).squeeze(1)
    stopped = (last == STOP) | (last == 9)
    assert torch.equal(batch["truncated"], ~stopped)
    full = lengths == 3
    assert (full & stopped).any() and (full & ~stopped).any() and not full.all()
    assert len(texts) == 300 and torch.equal(batch["lengths"], batch["prompt_mask"].sum(1) + lengths)


# ---- batching and padding


def test_pad_left():
    ids, mask = pad_left([[3, 4], [5], [6, 7, 8]])
    assert ids.tolist() == [[0, 3, 4], [0, 0, 5], [6, 7, 8]]
    assert mask.tolist() == [[0, 1, 1], [0, 0, 1], [1, 1, 1]]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_padded_batch_decodes_like_single_rows(kind):
    model = make_model(kind)
    prompts = random_prompts(24, 1, 12)
    prompts += [prompts[3], prompts[3], prompts[0]]  # a group, and a repetition further on
    prompts += [[PAD, 8, PAD, PAD, 9], [STOP, 11, 12, STOP], [7, STOP, PAD]]  # pad and stop ids inside a prompt
    stop_ids = [STOP, 12, 17]
    expected = [plain_greedy(model, prompt, 25, stop_ids) for prompt in prompts]
    assert len({len(completion) for completion in expected}) > 3
    assert generate_lists(model, prompts, 25, stop_ids=stop_ids) == expected


@pytest.mark.parametrize("size", [1, 3, 0])
def test_rollout_batch_size_does_not_change_greedy_completions(size):
    model = make_model()
    rows = random_prompts(5, 1, 9)
    batch, _ = sample(model, rows, 2, 0.0, [STOP, 12], max_completion_length=12, rollout_batch_size=size)
    lengths = batch["completion_mask"].sum(1).tolist()
    completions = [row[:length] for row, length in zip(batch["completion_ids"].tolist(), lengths)]
    assert completions == [plain_greedy(model, ids, 12, [STOP, 12]) for ids in rows for _ in range(2)]


# ---- agreement with the training forward


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampler_training_forward_and_plain_forward_give_the_same_logprobs(kind, temperature):
    model = make_model(kind)
    torch.manual_seed(0)
    ids, mask = pad_left(random_prompts(16, 1, 9))
    completion_ids, completion_mask, sampler_logprobs = grpo.generate(
        model, ids, mask, 20, temperature, [STOP, 9, 12], PAD, with_logprobs=True
    )
    logprobs, _ = grpo.token_logprobs(model, ids, mask, completion_ids, completion_mask, temperature)
    for row in range(16):
        length, prompt = int(completion_mask[row].sum()), ids[row, mask[row] == 1]
        tokens = completion_ids[row, :length]
        logits = model(torch.cat([prompt, tokens]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
        plain = (logits / temperature).log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(logprobs[row, :length], plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(sampler_logprobs, logprobs, atol=1e-5, rtol=0)
    greedy = grpo.generate(model, ids, mask, 20, 0.0, [STOP, 9, 12], PAD, with_logprobs=True)
    assert torch.equal(greedy[2], torch.zeros_like(greedy[2]))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.usefixtures("alone")
def test_the_policy_samples_and_scores_as_a_plain_model_to_the_last_bit(precision):
    """On one rank; test_randomness.py has two."""
    assert sample_gathered(precision) == dict.fromkeys(sample_gathered(precision), True)


def test_generate_changes_none_of_its_inputs():
    model = make_model()
    ids, mask = pad_left(random_prompts(6, 1, 9))
    stop_ids, inputs = [STOP, 9], (ids.clone(), mask.clone())
    torch.manual_seed(0)
    grpo.generate(model, ids, mask, 12, 1.0, stop_ids, PAD)
    assert torch.equal(ids, inputs[0]) and torch.equal(mask, inputs[1]) and stop_ids == [STOP, 9]
