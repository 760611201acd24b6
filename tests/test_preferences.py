"""Scores, and the gradients of both (and of ppo_rlhf) over two ranks."""

import shutil

import preference_ranks
import pytest
import torch
from helpers import gradient_of, tensor
from preference_ranks import NAMES, PAIRS, SHARES, build_scorer
from processes import run_on_ranks
from tiny import PAD_ID, TINY, build_model, edit_json, load_scorer, pad_right, relative_error, word_tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import dpo
import reward_model

STOP_ID = 5  # <|end|> of models/tiny
KINDS = ("chosen", "rejected")
each_script = pytest.mark.parametrize("script", [reward_model, dpo])


@pytest.fixture(scope="module", autouse=True)
def group():
    """A process group of one."""
    dpo.init_ranks()
    yield
    torch.distributed.destroy_process_group()


# ---- scores


def score_inputs(key="chosen_ids", pad_id=PAD_ID, margin=0):
    """Prompts padded on the left and completions on the right, by at least the margin."""
    prompts, completions = [[pair[name] for pair in PAIRS] for name in ("prompt_ids", key)]
    width = max(map(len, prompts)) + margin
    prompt_ids = torch.tensor([[pad_id] * (width - len(row)) + row for row in prompts])
    prompt_mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    return prompt_ids, prompt_mask, *pad_right(completions, max(map(len, completions)) + margin, pad_id)


@pytest.mark.parametrize("config", ["llama", "gpt2"])
def test_scores_do_not_depend_on_padding(config):
    """Nor do their gradients; the id that pads stands in prompts and completions, too."""
    model = build_scorer(config)
    weights = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums = [
        (weights * reward_model.sequence_scores(model, *inputs)).sum()
        for inputs in (score_inputs(), score_inputs(pad_id=7, margin=4))
    ]
    assert relative_error(*[gradient_of(model, sum_) for sum_ in sums]) < 1e-9
    with torch.no_grad():
        expected = reward_model.sequence_scores(model, *score_inputs())
        alone = [reward_model.sequence_scores(model, *(x[[row]] for x in score_inputs())) for row in range(8)]
        others = [reward_model.sequence_scores(model, *score_inputs(pad_id=i, margin=m)) for i, m in ((1, 0), (7, 5))]
        ids, mask, completion_ids, completion_mask = score_inputs()
        right = ids.gather(1, (1 - mask).argsort(dim=1, stable=True)), mask.sort(1, descending=True).values
        others.append(reward_model.sequence_scores(model, *right, completion_ids, completion_mask.bool()))
    assert expected.shape == (8,) and expected.std() > 0.1
    for scores in (torch.cat(alone), *others):
        torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-9)


# ---- the padding id of a reward model


@pytest.fixture(params=["pad token is the stop token", "no pad token", "as it is"])
def folder(request, tmp_path):
    """A copy of models/tiny with another padding token."""
    model = shutil.copytree(TINY, tmp_path / "model")
    if request.param != "as it is":
        token, pad_id = ("<|end|>", STOP_ID) if request.param.startswith("pad") else (None, None)
        edit_json(model / "tokenizer_config.json", pad_token=token)
        for name in ("config.json", "generation_config.json"):
            edit_json(model / name, pad_token_id=pad_id)
    return model


def test_the_score_is_read_at_the_stop_token_by_us_and_by_hugging_face(folder, tmp_path):
    torch.manual_seed(0)
    model, tokenizer = load_scorer(reward_model, folder)
    assert tokenizer.eos_token_id == reward_model.find_turn_end(tokenizer) == STOP_ID != tokenizer.pad_token_id
    prompt_ids = reward_model.encode_prompt(tokenizer, reward_model.as_messages("1+2=", ""))
    pair = {"prompt_ids": prompt_ids, "chosen_ids": [10, STOP_ID]}
    reward_model.check_scores(model, pair)
    # Padding, stop and other special ids may be sampled in the middle; the last is a stop token.
    completions = [[10, STOP_ID], [STOP_ID], [0, tokenizer.pad_token_id, STOP_ID, 12, STOP_ID], [STOP_ID, 0, STOP_ID]]
    policy = reward_model.ScoreModel(model)
    reward_model.save(tmp_path, policy, torch.optim.AdamW(policy.parameters()), tokenizer, 1)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32).eval()
    saved_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    assert loaded.config.pad_token_id == saved_tokenizer.pad_token_id == tokenizer.pad_token_id
    encoded = [{"input_ids": prompt_ids + ids} for ids in completions]
    padded = saved_tokenizer.pad(encoded, return_tensors="pt", padding_side="right")
    alone = [torch.tensor([row["input_ids"]]) for row in encoded]
    prompts = *reward_model.pad_left([pair] * 4, "cpu"), *pad_right(completions, 7)
    with torch.no_grad():
        ours = reward_model.sequence_scores(model, *prompts)
        theirs = loaded(**padded).logits.squeeze(1)
        at_last = [model.score(model.base_model(ids).last_hidden_state[0, -1]) for ids in alone]
        before_last = [model.score(model.base_model(ids).last_hidden_state[0, -2]) for ids in alone]
    torch.testing.assert_close(ours, torch.cat(at_last), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    assert (ours - torch.cat(before_last)).abs().min() > 1e-3
    model.config.pad_token_id = STOP_ID  # with which Hugging Face would read the score one token early
    with pytest.raises(SystemExit, match="a score is .* in Hugging Face"):
        reward_model.check_scores(model, pair)


def test_a_tokenizer_without_spare_special_token_gets_a_new_one(tmp_path):
    """And the model an embedding for it."""
    tokenizer = word_tokenizer(None)
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    tokenizer.bos_token = tokenizer.unk_token = None
    tokenizer.save_pretrained(tmp_path)
    config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config.vocab_size, config.eos_token_id, config.bos_token_id = len(tokenizer), tokenizer.eos_token_id, None
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model, loaded = load_scorer(reward_model, tmp_path)
    assert loaded.pad_token_id == len(tokenizer) == model.config.pad_token_id
    assert model.get_input_embeddings().num_embeddings == len(tokenizer) + 1
    reward_model.check_scores(model, {"prompt_ids": [3, 4], "chosen_ids": [5, loaded.eos_token_id]})


# ---- gradients that are accumulated


def collate(script, order=range(8), margin=0):
    """A batch of the pairs in this order, with columns of nothing but garbage on the outside."""
    batch = script.collate_pairs([PAIRS[i] for i in order], "cpu")
    for key in [key for key in batch if key.endswith(("ids", "mask"))]:
        sides = (margin, 0) if key.startswith("prompt") else (0, margin)
        batch[key] = torch.nn.functional.pad(batch[key], sides, value=0 if "mask" in key else 7)
    return batch


REFERENCES = [[-9.0 + 0.5 * i, -6.0 - 0.75 * i] for i in range(8)]  # exact in float32


def accumulate(script, policy, order=range(8), budget=10_000, margin=0):
    """Gradient and metrics of one optimizer step over the pairs in this order."""
    policy.zero_grad()
    batch = collate(script, order, margin)
    args = script.Args(microbatch_tokens=budget, **({"beta": 0.1} if script is dpo else {}))
    if script is dpo:
        batch["ref_logprobs"] = torch.tensor([REFERENCES[i] for i in order])
    totals = script.accumulate_gradients(policy, batch, torch.arange(8), 8, args)
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]), totals


@pytest.fixture(scope="module")
def policies():
    return {reward_model: reward_model.ScoreModel(build_scorer()), dpo: dpo.LogprobModel(build_model("llama"))}


@pytest.fixture(scope="module")
def wholes(policies):
    """Gradient and metrics of all pairs in one microbatch."""
    return {script: accumulate(script, policy) for script, policy in policies.items()}


@each_script
def test_accumulated_gradient_is_that_of_the_mean_loss(script, policies, wholes):
    model, batch, inputs = policies[script].model, collate(script), []
    for ids, mask in zip(batch["completion_ids"].unbind(1), batch["completion_mask"].unbind(1)):
        arguments = batch["prompt_ids"], batch["prompt_mask"], ids, mask
        if script is dpo:
            inputs.append(dpo.token_logprobs(model, *arguments, 1.0)[0].sum(1))
        else:
            inputs.append(reward_model.sequence_scores(model, *arguments))
    if script is dpo:
        inputs += [*tensor(REFERENCES).T, 0.1, 0.0]
    loss, metrics = script.preference_loss(*inputs)
    assert relative_error(wholes[script][0], gradient_of(model, loss / 8)) < 1e-9
    torch.testing.assert_close(dict(wholes[script][1]), metrics, rtol=1e-9, atol=1e-12)
    assert 0 < metrics["pair/accuracy"] < 8


CHANGES = [({"budget": 1}, 8), ({"budget": 36}, 5), ({"budget": 80}, 2), ({"margin": 3}, 1)]
CHANGES += [({"order": [5, 2, 7, 0, 3, 6, 1, 4], "budget": 36}, 5)]


@pytest.mark.parametrize("changes, count", CHANGES)
@each_script
def test_microbatches_change_neither_gradient_nor_metrics(script, policies, wholes, changes, count):
    """Nor does the order of the pairs, or padding."""
    assert len(list(script.microbatches(collate(script), torch.arange(8), changes.get("budget", 10_000)))) == count
    gradient, metrics = accumulate(script, policies[script], **changes)
    assert relative_error(gradient, wholes[script][0]) < 1e-9
    torch.testing.assert_close(dict(metrics), dict(wholes[script][1]), rtol=1e-9, atol=1e-12)


@each_script
def test_a_part_without_pairs_adds_nothing_and_reaches_every_parameter(script, policies, wholes, monkeypatch):
    """As on a rank that waits for the passes of the others: here they are said to make two more."""
    count = len(list(script.microbatches(collate(script), torch.arange(8), 36)))
    monkeypatch.setattr(script, "all_reduce", lambda value, *_: value + 2)
    parts = list(script.microbatches(collate(script), torch.arange(8), 36))
    assert [len(part["rows"]) for part in parts[count:]] == [0, 0]
    gradient, metrics = accumulate(script, policies[script], budget=36)
    assert relative_error(gradient, wholes[script][0]) < 1e-9
    torch.testing.assert_close(dict(metrics), dict(wholes[script][1]), rtol=1e-9, atol=1e-12)
    idle = parts[-1] | ({"ref_logprobs": torch.ones(1, 2)} if script is dpo else {})
    monkeypatch.setattr(script, "microbatches", lambda *_: [idle])
    gradient, metrics = accumulate(script, policies[script])
    assert not gradient.any() and all(value == 0 for value in metrics.values())


@pytest.mark.parametrize("budget", [1, 36, 10_000])
def test_sums_of_log_probabilities_are_in_the_order_of_the_pairs(policies, budget):
    """To find them is no training."""
    policy, args = policies[dpo], dpo.Args(microbatch_tokens=budget)
    policy.zero_grad()
    found = dpo.look_up_pairs(policy, PAIRS, args)
    assert not found.requires_grad and all(parameter.grad is None for parameter in policy.parameters())
    for row, key in zip(found, KINDS):
        with torch.no_grad():
            expected = dpo.token_logprobs(policy.model, *score_inputs(f"{key}_ids"), 1.0)[0].sum(1)
        torch.testing.assert_close(row, expected, rtol=1e-9, atol=1e-9)


def test_numbers_of_more_pairs_than_are_read_at_once(policies, monkeypatch):
    """Pairs are read 1024 at a time."""
    pairs = [
        {"prompt_ids": [2], "chosen_ids": [i % 11, 1], "rejected_ids": [i // 11 % 11, i % 7, 1]} for i in range(1030)
    ]
    read, collate_pairs = [], dpo.collate_pairs
    monkeypatch.setattr(dpo, "collate_pairs", lambda rows, *rest: read.append(len(rows)) or collate_pairs(rows, *rest))
    found = dpo.look_up_pairs(policies[dpo], pairs, dpo.Args(microbatch_tokens=2048))
    assert read == [1024, 6]
    some = [0, 1023, 1024, 1029]
    expected = dpo.look_up_pairs(policies[dpo], [pairs[i] for i in some], dpo.Args(microbatch_tokens=9))
    torch.testing.assert_close(found[:, some], expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("budget", [1, 10_000])
@each_script
def test_pairs_are_evaluated_as_they_are_trained_on(script, policies, wholes, budget):
    """Means of the sums that a step has, and no gradient."""
    policies[script].zero_grad()
    pairs = [{**pair, "ref_logprobs": REFERENCES[i]} for i, pair in enumerate(PAIRS)]
    args = script.Args(microbatch_tokens=budget, **({"beta": 0.1} if script is dpo else {}))
    evaluate = dpo.evaluate_pairs if script is dpo else reward_model.evaluate
    found = evaluate(policies[script], pairs, args)
    assert all(parameter.grad is None for parameter in policies[script].parameters())
    sums = {"eval/pair_" + key.rpartition("/")[2]: float(value) for key, value in wholes[script][1].items()}
    sums["eval/pair_loss"] = sums.pop("eval/pair_preference")
    assert len(found) >= 3
    assert found == pytest.approx({name: sums[name] / 8 for name in found}, rel=1e-9)


# ---- two processes


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What preference_ranks.py finds on each of two ranks."""
    folder = tmp_path_factory.mktemp("preference_ranks")
    run_on_ranks("preference_ranks.py", folder)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.fixture(scope="module")
def expected():
    """The same in this one process."""
    return preference_ranks.run()


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_have_the_gradient_and_metrics_of_one(results, expected, name):
    """And the references and evaluations; of PPO each rank has its rows' numbers and whitened advantages."""
    one = expected[name]
    for rank, share in zip(results, SHARES):
        two = rank[name]
        assert relative_error(two["gradient"], one["gradient"]) < 1e-9
        assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-9)
        if "references" in one:
            torch.testing.assert_close(two["references"], one["references"], rtol=1e-9, atol=0)
        for found, other in zip(two.get("evaluations", []), one.get("evaluations", []), strict=True):
            assert found == pytest.approx(other, rel=1e-9, abs=1e-12) and len(found) >= 3
        if "tokens" in one:
            tokens = one["tokens"][:, share, : two["tokens"].shape[2]]
            torch.testing.assert_close(two["tokens"], tokens, rtol=1e-9, atol=1e-12)
