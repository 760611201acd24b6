"""Reward model: its loss, its scores, and its checkpoint: python -m pytest tests/test_reward_model.py"""

import math
import shutil

import pytest
import torch
from helpers import gradient_of, pair_results, read_oracle, sigmoid, tensor, train
from preference_ranks import PAIRS, build_scorer
from tiny import ROOT, SIZES, TINY, edit_json, load_scorer, parse, relative_error, word_tokenizer
from torch.nn.functional import pad
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import ppo_rlhf
import reward_model

STOP_ID = 5  # <|end|> of models/tiny


# ---- the loss


def test_loss_by_hand():
    scores = [tensor([1.0, 0.5, 2.0]), tensor([0.0, 1.0, 2.0])]
    loss, chosen, rejected, metrics = pair_results(reward_model, scores)
    expected_loss = math.log(1 + math.exp(-1)) + math.log(1 + math.exp(0.5)) + math.log(2)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    gradient = tensor([sigmoid(-1), sigmoid(0.5), 0.5])
    assert_close((chosen, rejected), (-gradient, gradient), rtol=1e-12, atol=0)
    expected = {
        "loss/preference": expected_loss,
        "pair/accuracy": 1.5,  # a tie counts half
        "pair/margin": 0.5,
        "pair/chosen_score": 3.5,
        "pair/rejected_score": 3.0,
    }
    assert metrics == pytest.approx(expected, rel=1e-12)


def test_loss_is_that_of_trl():
    cases = read_oracle("rm_trl")
    [case] = [case for case in cases if case["config"]["center_rewards_coefficient"] is None]
    scores = tensor(case["inputs"]["scores"]).chunk(2)
    loss, chosen, rejected, _ = pair_results(reward_model, scores)
    expected = case["outputs"]
    assert_close(loss / len(chosen), tensor(expected["loss"]), rtol=1e-9, atol=0)
    gradient = torch.cat([chosen, rejected]) / len(chosen)
    assert_close(gradient, tensor(expected["grad_scores"]), rtol=1e-9, atol=1e-12)


def test_extreme_margins_stay_finite():
    """The loss of a margin of 900 is 0, and that of -900 is 900."""
    scores = [torch.tensor([900.0, -900.0]), torch.zeros(2)]
    loss, chosen, rejected, _ = pair_results(reward_model, scores)
    assert loss.item() == 900
    assert chosen.tolist() == [0.0, -1.0]
    assert rejected.tolist() == [0.0, 1.0]


# ---- scores


@pytest.mark.parametrize("config", ["llama", "gpt2"])
def test_scores_do_not_depend_on_padding(config):
    """Nor do their gradients; the id that pads stands in prompts and completions, too."""
    model = build_scorer(config)
    prompt_ids, prompt_mask = ppo_rlhf.pad_left(PAIRS, "cpu")
    completion_ids, completion_mask = reward_model.pad([pair["chosen_ids"] for pair in PAIRS], "cpu")
    scores = reward_model.sequence_scores(model, prompt_ids, prompt_mask, completion_ids, completion_mask)
    assert scores.std() > 0.1
    padded_scores = reward_model.sequence_scores(
        model,
        pad(prompt_ids, (4, 0), value=7),
        pad(prompt_mask, (4, 0)),
        pad(completion_ids, (0, 5), value=7),
        pad(completion_mask, (0, 5)),
    )
    assert_close(padded_scores, scores, rtol=1e-9, atol=1e-9)
    weights = torch.linspace(-1, 1, 8, dtype=torch.float64)
    gradient = gradient_of(model, (weights * scores).sum())
    padded_gradient = gradient_of(model, (weights * padded_scores).sum())
    assert relative_error(padded_gradient, gradient) < 1e-9
    for pair, score in zip(PAIRS, scores):
        ids = torch.tensor([pair["prompt_ids"] + pair["chosen_ids"]])
        hidden = model.base_model(ids).last_hidden_state
        assert_close(model.score(hidden[0, -1])[0], score, rtol=1e-9, atol=1e-9)


@pytest.fixture(params=["pad token is the stop token", "no pad token", "as it is"])
def folder(request, tmp_path):
    """A copy of models/tiny with another padding token."""
    model = shutil.copytree(TINY, tmp_path / "model")
    token, pad_id = None, None
    if request.param == "pad token is the stop token":
        token, pad_id = "<|end|>", STOP_ID
    if request.param != "as it is":
        edit_json(model / "tokenizer_config.json", pad_token=token)
        edit_json(model / "config.json", pad_token_id=pad_id)
        edit_json(model / "generation_config.json", pad_token_id=pad_id)
    return model


@pytest.mark.usefixtures("alone")
def test_the_score_is_read_at_the_stop_token_by_us_and_by_hugging_face(folder, tmp_path):
    torch.manual_seed(0)
    model, tokenizer = load_scorer(reward_model, folder)
    assert tokenizer.eos_token_id == reward_model.find_turn_end(tokenizer) == STOP_ID != tokenizer.pad_token_id
    prompt_ids = reward_model.encode_prompt(tokenizer, reward_model.as_messages("1+2=", "user"), None)
    policy = reward_model.ScoreModel(model)
    reward_model.save(tmp_path, policy, torch.optim.AdamW(policy.parameters()), tokenizer, 1)
    checkpoint = tmp_path / "checkpoint"
    loaded = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32)
    saved_tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert loaded.config.pad_token_id == saved_tokenizer.pad_token_id == tokenizer.pad_token_id
    # Stop tokens and padding may be sampled in the middle, too.
    completions = [[10, STOP_ID], [STOP_ID], [0, tokenizer.pad_token_id, STOP_ID, 12, STOP_ID]]
    prompts = reward_model.pad([prompt_ids] * 3, "cpu")
    padded = reward_model.pad(completions, "cpu")
    encoded = [{"input_ids": prompt_ids + ids} for ids in completions]
    inputs = saved_tokenizer.pad(encoded, return_tensors="pt", padding_side="right")
    with torch.no_grad():
        ours = reward_model.sequence_scores(model, *prompts, *padded)
        theirs = loaded.eval()(**inputs).logits.squeeze(1)
        at_last, before_last = [], []
        for row in encoded:
            hidden = model.base_model(torch.tensor([row["input_ids"]])).last_hidden_state
            at_last.append(model.score(hidden[0, -1]))
            before_last.append(model.score(hidden[0, -2]))
    assert_close(ours, torch.cat(at_last), rtol=1e-4, atol=1e-4)
    assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    assert (ours - torch.cat(before_last)).abs().min() > 1e-3
    pair = {"prompt_ids": prompt_ids, "chosen_ids": [10, STOP_ID]}
    args = reward_model.Args(max_prompt_length=100, max_completion_length=100)
    reward_model.check_model(model, pair, args)
    model.config.pad_token_id = STOP_ID  # with which Hugging Face would read the score one token early
    with pytest.raises(SystemExit, match="the score of a text is .*, but transformers reads"):
        reward_model.check_model(model, pair, args)


def test_a_tokenizer_without_spare_special_token_gets_a_new_one(tmp_path):
    """And the model an embedding for it."""
    tokenizer = word_tokenizer(None)
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    tokenizer.bos_token = tokenizer.unk_token = None
    tokenizer.save_pretrained(tmp_path)
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = LlamaConfig(**SIZES, vocab_size=len(tokenizer), **ids)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model, loaded = load_scorer(reward_model, tmp_path)
    assert loaded.pad_token_id == len(tokenizer) == model.config.pad_token_id
    assert model.get_input_embeddings().num_embeddings == len(tokenizer) + 1
    pair = {"prompt_ids": [3, 4], "chosen_ids": [5, loaded.eos_token_id]}
    reward_model.check_model(model, pair, reward_model.Args())


# ---- a short run, and the embedded model


def test_a_run_learns_and_its_checkpoint_scores_as_training_did(tmp_path):
    rows = (ROOT / "data" / "preferences" / "train.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join(rows[:512]))
    settings = {"dataset": str(tmp_path / "rows.jsonl"), "eval_every": 20, "eval_prompts": 64, "num_steps": 20}
    settings |= {"minibatch_size": 16, "learning_rate": 1e-3, "warmup_steps": 4}
    lines = train(reward_model, tmp_path / "run", **settings)
    first, last = lines[0], lines[-1]
    assert last["eval/pair_loss"] < first["eval/pair_loss"]
    assert last["eval/pair_accuracy"] > 0.5
    rates = [line["optim/learning_rate"] for line in lines[1:]]
    assert rates[3] == rates[4] == 1e-3  # the end of the warm-up, and the start of the cosine
    assert 0 < rates[-1] < 2e-5  # whose last step still trains
    checkpoint = str(tmp_path / "run" / "checkpoint")
    # Hugging Face computes the same margins from what was saved.
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    reward_model.init_ranks()
    args = parse(reward_model, model=checkpoint, tiny=True, **settings)
    _, held_out = reward_model.load_pairs(args, tokenizer)
    scores = []
    for name in ("chosen_ids", "rejected_ids"):
        rows = [{"input_ids": pair["prompt_ids"] + pair[name]} for pair in held_out]
        inputs = tokenizer.pad(rows, return_tensors="pt", padding_side="right")
        with torch.no_grad():
            scores.append(model(**inputs).logits)
    margin = (scores[0] - scores[1]).mean().item()
    assert margin == pytest.approx(last["eval/pair_margin"], abs=1e-4)
    # Trained further, it keeps its head.
    [line] = train(reward_model, tmp_path / "again", model=checkpoint, tiny=True, **settings | {"num_steps": 0})
    assert line["eval/pair_loss"] == pytest.approx(last["eval/pair_loss"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_the_embedded_reward_model_tells_held_out_pairs_apart(tmp_path):
    """models/tiny-reward is what reward_model.py's default command leaves, and the default of ppo_rlhf.py."""
    folder = parse(ppo_rlhf).reward_model
    assert folder == str(ROOT / "models" / "tiny-reward")
    model, tokenizer = load_scorer(reward_model, folder)
    pairs = ROOT / "data" / "preferences"
    shutil.copy(pairs / "test.jsonl", tmp_path)
    (tmp_path / "train.jsonl").write_text("".join((pairs / "train.jsonl").read_text().splitlines(keepends=True)[:8]))
    args = parse(reward_model, dataset=tmp_path)
    _, held_out = reward_model.load_pairs(args, tokenizer)
    assert len(held_out) == 512
    metrics = reward_model.evaluate(reward_model.ScoreModel(model), held_out, args)
    assert metrics["eval/pair_accuracy"] > 0.8
