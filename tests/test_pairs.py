"""dpo.py, reward_model.py and sft.py: losses, rows, log-probabilities and scores, and what runs leave.

python -m pytest tests/test_pairs.py
"""

import json
import math
import shutil

import pytest
import torch
import toy
from datasets import Dataset
from scripted import run
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.testing import assert_close
from toy import ROOT, TINY, read_jsonl, read_oracle, relative_error, tensor, write_jsonl
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import dpo
import grpo
import ppo_rlhf
import reward_model
import sft

CPU = torch.device("cpu")
KINDS = ("chosen_ids", "rejected_ids")
of_pairs = pytest.mark.parametrize("script", [dpo, reward_model])


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


# ---- losses


def pair_results(script, inputs, **settings):
    """Loss, gradients of its first two inputs, and the sums of the metrics, whose counts are those of the pairs."""
    inputs = [x.detach().clone() for x in inputs]
    for x in inputs[:2]:
        x.requires_grad_()
    settings = {"beta": 0.5, "label_smoothing": 0.0} | settings if script is dpo else {}
    loss, metrics = script.preference_loss(*inputs, **settings)
    loss.backward()
    assert {count for _, count in metrics.values()} == {len(inputs[0])}
    return loss.detach(), inputs[0].grad, inputs[1].grad, {name: total.item() for name, (total, _) in metrics.items()}


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo_by_hand(smoothing):
    """The differences of log-ratios are 1 and -3; beta is 0.5, so the margins are 0.5 and -1.5."""
    inputs = [tensor(x) for x in ([-3.0, -5.0], [-4.0, -4.0], [-4.0, -4.0], [-4.0, -6.0])]
    loss, chosen, rejected, metrics = pair_results(dpo, inputs, label_smoothing=smoothing)
    right = math.log(1 + math.exp(-0.5)) + math.log(1 + math.exp(1.5))
    wrong = math.log(1 + math.exp(0.5)) + math.log(1 + math.exp(-1.5))
    expected_loss = (1 - smoothing) * right + smoothing * wrong
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    gradient = 0.5 * (1 - smoothing) * tensor([sigmoid(-0.5), sigmoid(1.5)])
    gradient -= 0.5 * smoothing * tensor([sigmoid(0.5), sigmoid(-1.5)])
    assert_close((chosen, rejected), (-gradient, gradient), rtol=1e-12, atol=0)
    expected = {"loss/preference": expected_loss, "pair/accuracy": 1, "pair/margin": -1.0}
    expected |= {"pair/chosen_reward": 0.0, "pair/rejected_reward": 1.0}
    expected |= {"pair/chosen_log_ratio": 0.0, "pair/rejected_log_ratio": 2.0}
    assert metrics == pytest.approx(expected, rel=1e-12)


def test_reward_model_by_hand():
    loss, chosen, rejected, metrics = pair_results(reward_model, [tensor([1.0, 0.5, 2.0]), tensor([0.0, 1.0, 2.0])])
    expected_loss = math.log(1 + math.exp(-1)) + math.log(1 + math.exp(0.5)) + math.log(2)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    gradient = tensor([sigmoid(-1), sigmoid(0.5), 0.5])
    assert_close((chosen, rejected), (-gradient, gradient), rtol=1e-12, atol=0)
    expected = {"loss/preference": expected_loss, "pair/accuracy": 1.5, "pair/margin": 0.5}  # a tie counts half
    assert metrics == pytest.approx(expected | {"pair/chosen_score": 3.5, "pair/rejected_score": 3.0}, rel=1e-12)


def test_sft_by_hand():
    """What stands outside the mask does not matter; the loss is a sum, and its metric a sum and a count."""
    logprobs = tensor([[math.nan, -1.0, -2.0], [-math.inf, -4.0, math.inf]]).requires_grad_()
    loss, metrics = sft.completion_loss(logprobs, torch.tensor([[0, 1, 1], [0, 1, 0]]))
    loss.backward()
    assert loss.item() == 7 and logprobs.grad.tolist() == [[0, -1, -1], [0, -1, 0]]
    assert [float(value) for value in metrics["loss/nll"]] == [7, 3]


CASES = [case for case in read_oracle("dpo_eric_mitchell") if not case["config"]["ipo"]]  # IPO is another loss


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_dpo_is_that_of_its_authors(case):
    names = [f"{model}_{kind}_logps" for model in ("policy", "reference") for kind in ("chosen", "rejected")]
    inputs = [tensor(case["inputs"][name]) for name in names]
    settings = {name: case["config"][name] for name in ("beta", "label_smoothing")}
    loss, *gradients, metrics = pair_results(dpo, inputs, **settings)
    expected, count = case["outputs"], len(inputs[0])
    assert_close(loss / count, tensor(expected["loss"]), rtol=1e-9, atol=0)
    for kind, gradient in zip(("chosen", "rejected"), gradients):
        assert_close(gradient / count, tensor(expected[f"grad_{kind}"]), rtol=1e-9, atol=1e-12)
        assert metrics[f"pair/{kind}_reward"] == pytest.approx(sum(expected[f"{kind}_rewards"]), rel=1e-9)


@pytest.mark.parametrize("case", read_oracle("dpo_trl"), ids=lambda case: case["name"])
def test_dpo_is_that_of_trl(case):
    """TRL's inputs are log-probabilities of tokens, which are summed over the completion."""
    mask, ref_logprobs = tensor(case["inputs"]["mask"]), tensor(case["inputs"]["ref_logp"])
    logprobs = tensor(case["inputs"]["logp"]).requires_grad_()
    inputs = [*(logprobs * mask).sum(1).chunk(2), *(ref_logprobs * mask).sum(1).chunk(2)]
    loss, metrics = dpo.preference_loss(*inputs, case["config"]["beta"], 0.0)
    loss = loss / len(inputs[0])
    loss.backward()
    expected = case["outputs"]
    assert_close(loss, tensor(expected["loss"]), rtol=1e-9, atol=0)
    assert_close(logprobs.grad, tensor(expected["grad_logp"]), rtol=1e-9, atol=1e-12)
    margin = metrics["pair/margin"][0].item() / len(inputs[0])
    assert margin == pytest.approx(expected["metrics"]["rewards/margins"], rel=1e-9)


def test_reward_model_is_that_of_trl():
    [case] = [case for case in read_oracle("rm_trl") if case["config"]["center_rewards_coefficient"] is None]
    loss, *gradients, _ = pair_results(reward_model, tensor(case["inputs"]["scores"]).chunk(2))
    count = len(gradients[0])
    assert_close(loss / count, tensor(case["outputs"]["loss"]), rtol=1e-9, atol=0)
    assert_close(torch.cat(gradients) / count, tensor(case["outputs"]["grad_scores"]), rtol=1e-9, atol=1e-12)


def test_dpo_is_log_2_at_the_reference_and_else_the_reward_model_of_its_implied_rewards():
    inputs = 3 * torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double()
    chosen, rejected, ref_chosen, ref_rejected = inputs
    loss, chosen_gradient, _, metrics = pair_results(dpo, [chosen, rejected, chosen, rejected], beta=0.3)
    assert loss.item() == pytest.approx(6 * math.log(2), rel=1e-12)
    assert_close(chosen_gradient, torch.full_like(chosen, -0.15))
    assert (metrics["pair/accuracy"], metrics["pair/margin"]) == (3, 0)  # a tie counts half
    loss, gradient, *_ = pair_results(dpo, inputs, beta=0.3)
    rewards = [0.3 * (chosen - ref_chosen), 0.3 * (rejected - ref_rejected)]
    expected_loss, expected_gradient, *_ = pair_results(reward_model, rewards)
    assert_close((loss, gradient), (expected_loss, 0.3 * expected_gradient))


@of_pairs
def test_extreme_margins_stay_finite(script):
    """The loss of a margin of 900 is 0, and that of -900 is 900."""
    inputs = [torch.tensor([900.0, -900.0]), *torch.zeros(3 if script is dpo else 1, 2)]
    loss, chosen, rejected, _ = pair_results(script, inputs, beta=1.0)
    assert loss.item() == 900 and loss.dtype == torch.float32
    assert (chosen.tolist(), rejected.tolist()) == ([0.0, -1.0], [0.0, 1.0])


# ---- rows


def message(role, content):
    return {"role": role, "content": content}


HISTORY = [message("user", "1+1="), message("assistant", "2"), message("user", "2+2=")]
FOUR, FIVE = [message("assistant", "4")], [message("assistant", "5")]
CHATS = {"chosen": HISTORY + FOUR, "rejected": HISTORY + FIVE}
DIALOGUE = "\n\nHuman: 1+1=\n\nAssistant: 2\n\nHuman: 2+2=\n\nAssistant:"
DIALOGUES = {"chosen": DIALOGUE + " 4", "rejected": DIALOGUE + " 5"}
PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
SHORT, LONG = "<|user|>2+2=<|assistant|>", "<|user|>1+1=<|assistant|>2<|end|><|user|>2+2=<|assistant|>"
FORMS_OF_PAIRS = [
    (PAIR, SHORT),
    ({"problem": "2+2=", "chosen": 4, "rejected": 5}, SHORT),
    ({"prompt": "2+2=", "chosen": FOUR, "rejected": FIVE}, SHORT),
    ({"prompt": HISTORY, "chosen": "4", "rejected": "5"}, LONG),
    ({"question": HISTORY, "chosen": FOUR, "rejected": FIVE}, LONG),
    ({"prompt": "2+2=", **CHATS}, LONG),  # as in UltraFeedback: whole chats, and the prompt once more
    (CHATS, LONG),
    (DIALOGUES, LONG),
]


def load(script, folder, rows, tokenizer, **settings):
    """Training and held-out rows."""
    dataset = write_jsonl(folder / "rows.jsonl", rows)
    settings = {"max_prompt_length": 60, "max_completion_length": 60, "eval_prompts": 0} | settings
    return script.load_rows(script.Args(dataset=dataset, **settings), tokenizer)


def texts_of(row, tokenizer):
    """The ids of a row as texts, with special tokens."""
    return [tokenizer.decode(ids) for name, ids in row.items() if name.endswith("_ids")]


@pytest.mark.parametrize("row, prompt", FORMS_OF_PAIRS)
def test_every_form_of_a_pair_is_encoded_with_the_chat_template(row, prompt, tmp_path, tokenizer):
    [pair], _ = load(dpo, tmp_path, [row], tokenizer)
    assert texts_of(pair, tokenizer) == [prompt, "4<|end|>", "5<|end|>"]
    [pair], _ = load(dpo, tmp_path, [row], tokenizer, system_prompt="9")
    assert texts_of(pair, tokenizer)[0] == "<|system|>9" + prompt


def test_without_a_template_a_dialogue_is_read_as_it_stands(tmp_path, tokenizer):
    tokenizer.chat_template = None
    [pair], _ = load(dpo, tmp_path, [DIALOGUES], tokenizer, max_prompt_length=100)
    assert pair["prompt_ids"] == tokenizer(DIALOGUE)["input_ids"]
    assert texts_of(pair, tokenizer)[1:] == [" 4<|end|>", " 5<|end|>"]
    [pair], _ = load(dpo, tmp_path, [{"prompt": HISTORY, "chosen": "4", "rejected": "5"}], tokenizer)
    assert pair["prompt_ids"] == tokenizer("1+1=\n\n2\n\n2+2=")["input_ids"]


def test_real_dialogues_are_split_at_the_last_turn_where_what_precedes_it_is_the_same(tmp_path):
    """60 rows of Anthropic/hh-rlhf."""
    tokenizer = toy.make_tokenizer(*toy.FORMS["chatml"])
    rows = read_jsonl(ROOT / "tests/data/hh_60.jsonl")
    pairs, _ = load(dpo, tmp_path, rows, tokenizer, max_prompt_length=10**6, max_completion_length=10**6)
    heads = [[row[name].rpartition("\n\nAssistant:")[0] for name in ("chosen", "rejected")] for row in rows]
    same = [row for row, (chosen, rejected) in zip(rows, heads) if chosen == rejected]
    assert 0 < len(same) == len(pairs) < len(rows)
    for row, pair in zip(same, pairs):
        assert pair["prompt"][0]["role"] == pair["prompt"][-1]["role"] == "user"
        text = "".join(f"\n\n{'Human' if m['role'] == 'user' else 'Assistant'}: {m['content']}" for m in pair["prompt"])
        assert text.split() == row["chosen"].rpartition("\n\nAssistant:")[0].split()
        for name in ("chosen", "rejected"):
            completion = row[name].rpartition("\n\nAssistant:")[2].strip()
            assert pair[f"{name}_ids"] == tokenizer(completion + "<|im_end|>")["input_ids"]


LEFT_OUT = [
    {"chosen": None},
    {"prompt": None},
    {"prompt": None, **CHATS, "rejected": FIVE},
    {"prompt": None, "chosen": HISTORY[:1] + FOUR, "rejected": HISTORY[2:] + FIVE},
    {"prompt": None, "chosen": "\n\nHuman: 1+1=\n\nAssistant: 4", "rejected": "\n\nHuman: 1+2=\n\nAssistant: 5"},
    {"prompt": "1" * 5},  # 7 tokens
    {"chosen": "1" * 8},  # 9 tokens with the stop token
    {"rejected": "1" * 8},
]


@pytest.mark.parametrize("change", LEFT_OUT)
def test_pairs_that_lack_something_or_are_long_are_left_out(tmp_path, tokenizer, change, capsys):
    rows = [PAIR, PAIR | change, PAIR | {"prompt": "1" * 4, "chosen": "1" * 7}]
    pairs, _ = load(dpo, tmp_path, rows, tokenizer, max_prompt_length=6, max_completion_length=8)
    assert [texts_of(pair, tokenizer)[0] for pair in pairs] == [SHORT, "<|user|>1111<|assistant|>"]
    said = capsys.readouterr().out.splitlines()
    num_long = int(change in LEFT_OUT[-3:])
    assert said[-5] == f"read: 2 of 3 pairs; {num_long} are too long, any others have no common prompt"
    assert said[-4] == "2 to train on, 0 held out (with their prompts); 32000.0 passes"
    assert said[-3:] == [
        f"the first prompt: {SHORT!r}",
        "the first chosen: '4<|end|>'",
        "the first rejected: '5<|end|>'",
    ]


def test_no_held_out_prompt_is_trained_on(tmp_path, tokenizer):
    rows = [{"prompt": f"{i % 5}+1=", "chosen": "4", "rejected": str(i)} for i in range(10)]
    train, [held_out] = load(dpo, tmp_path, rows, tokenizer, eval_prompts=1)
    assert len(train) == 8 and held_out["prompt_ids"] not in [row["prompt_ids"] for row in train]


FORMS_OF_EXAMPLES = [
    ({"prompt": "2+2=", "completion": "4"}, [[SHORT, "4<|end|>"]]),
    ({"question": "2+2=", "problem": "9", "solution": 4, "answer": "9"}, [[SHORT, "4<|end|>"]]),
    ({"prompt": HISTORY[2:], "response": FOUR}, [[SHORT, "4<|end|>"]]),
    ({"messages": HISTORY + FOUR}, [["<|user|>1+1=<|assistant|>", "2<|end|>"], [LONG, "4<|end|>"]]),
    ({"text": "2+2=4"}, [["2", "+2=4<|end|>"]]),  # nothing comes before the first token
    ({"messages": HISTORY[2:]}, []),
    ({"prompt": "2+2=", "completion": "1" * 60}, []),
    ({"prompt": "1" * 59, "completion": "4"}, []),
    ({"prompt": "2+2=", "completion": None}, []),
]


@pytest.mark.parametrize("row, expected", FORMS_OF_EXAMPLES)
def test_each_turn_of_the_assistant_is_trained_with_its_stop_token(row, expected, tokenizer):
    args = sft.Args(max_prompt_length=60, max_completion_length=60)
    examples = sft.read_rows(Dataset.from_list([row]), args, tokenizer)
    assert [texts_of(example, tokenizer) for example in examples] == expected


def test_rows_of_sft_are_prepared_once_and_again_after_a_change(tmp_path, tokenizer, monkeypatch):
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(9)]
    args = sft.Args(dataset=toy.write_jsonl(tmp_path / "rows.jsonl", rows), eval_prompts=0)
    first, _ = sft.load_rows(args, tokenizer)
    calls = toy.record(monkeypatch, sft, "encode_chat")
    again, _ = sft.load_rows(args, tokenizer)
    assert again.to_list() == first.to_list() and len(again) == 9 and calls == []
    args.system_prompt = "9"
    changed, _ = sft.load_rows(args, tokenizer)
    assert len(calls) == 9 and changed[0]["prompt_ids"] != first[0]["prompt_ids"]


@pytest.mark.parametrize("script, message", [(sft, "has no messages, no text and no completion, but"), (dpo, "chosen")])
def test_a_missing_column_is_named(script, message, tmp_path, tokenizer):
    with pytest.raises((SystemExit, KeyError), match=message):
        load(script, tmp_path, [{"prompt": "1", "output": "2"}], tokenizer)


def test_long_texts_are_cut_and_a_system_prompt_stands_before_a_chat(tmp_path, tokenizer):
    examples, _ = load(sft, tmp_path, [{"text": "1+2+3"}], tokenizer, max_completion_length=3)
    assert [texts_of(example, tokenizer) for example in examples] == [["1", "+2"]]
    examples, _ = load(sft, tmp_path, [{"prompt": "2+2=", "completion": "4"}], tokenizer, system_prompt="9")
    assert [texts_of(example, tokenizer) for example in examples] == [["<|system|>9" + SHORT, "4<|end|>"]]


def encode(tokenizer, prompt, completion):
    """The prompt and the completion as they are trained."""
    stop_id = dpo.find_turn_end(tokenizer) or tokenizer.eos_token_id
    chat = [message("user", prompt), message("assistant", completion)]
    prompt_ids, completion_ids = dpo.encode_chat(tokenizer, chat, stop_id)
    return tokenizer.decode(prompt_ids), tokenizer.decode(completion_ids)


THOUGHT = "{% set parts = m.content.split('</think>') %}"
THOUGHT += "<think>\n{{ parts[0].split('<think>')[-1].strip() if parts|length > 1 }}\n</think>\n\n"
START = "<|im_start|>user\n17*3=<|im_end|>\n<|im_start|>assistant\n"
TEMPLATES = {  # what stands before an answer, what a prompt ends with, and what is trained after it
    "ChatML": ("", "", START, "50, as I think<|im_end|>"),
    "Qwen3": (THOUGHT, "", START, "<think>\n\n</think>\n\n50, as I think<|im_end|>"),
    "Qwen3-Thinking": (THOUGHT, "<think>\n", START + "<think>\n", "\n</think>\n\n50, as I think<|im_end|>"),
    "QwQ, which writes prompts differently": ("", "<think>\n", START + "<think>\n", "50, as I think<|im_end|>"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_completion_is_what_follows_the_prompt_in_the_whole_chat(name):
    before, opening, prompt, completion = TEMPLATES[name]
    turn = "<|im_start|>{{ m.role }}\n"
    answer = "{{ m.content.split('</think>')[-1].strip() }}<|im_end|>\n"
    before = f"{{% if m.role == 'assistant' %}}{before}{{% endif %}}"
    template = f"{{% for m in messages %}}{turn}{before}{answer}{{% endfor %}}"
    template += f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{opening}{{% endif %}}"
    tokenizer = toy.make_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], template)
    assert encode(tokenizer, "17*3=", "50, as I think") == (prompt, completion)


@pytest.mark.parametrize("form", toy.FORMS)
def test_the_stop_token_is_the_first_special_token_after_an_answer(form):
    """Phi 3 writes a second one."""
    special, template = toy.FORMS[form]
    prompt, completion = encode(toy.make_tokenizer(special, template), "1+1=", "2")
    assert completion == "2" + special[1] and prompt.endswith(("\n", ">"))


def test_a_tokenizer_that_writes_a_blank_before_a_text_trains_the_tokens_of_the_whole_chat():
    """SentencePiece writes one."""
    words = ["<unk>", "<end>", "\u2581", "1", "2", "3", "\u25813"]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [("\u2581", "3")], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<end>")
    turn = "{{ m.content }}{% if m.role == 'assistant' %}<end>{% endif %}"
    tokenizer.chat_template = f"{{% for m in messages %}}{turn}{{% endfor %}}"
    _, ids = dpo.encode_chat(tokenizer, [message("user", "12"), message("assistant", "3")], 1)
    assert tokenizer.convert_ids_to_tokens(ids) == ["3", "<end>"]


def test_only_the_prompt_begins_with_a_bos_token(tokenizer):
    bos = tokenizer.bos_token = "<|system|>"
    special = [(bos, tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=special
    )
    tokenizer.chat_template = None
    assert encode(tokenizer, "1+1=", "2") == (f"{bos}1+1=", "2<|end|>")


# ---- updates


def scores_of(model, rows, name):
    """Scores of the last tokens, each text alone and without padding."""
    hidden = [model.base_model(torch.tensor([row["prompt_ids"] + row[name]])).last_hidden_state[0, -1] for row in rows]
    return model.score(torch.stack(hidden)).squeeze(1)


def logprobs_of(model, rows, name):
    """Sums of log-probabilities, by the model's logits, each text alone and without padding."""
    sums = []
    for row in rows:
        start, ids = len(row["prompt_ids"]), torch.tensor(row["prompt_ids"] + row[name])
        logprobs = model(ids.unsqueeze(0)).logits[0, start - 1 : -1].log_softmax(-1)
        sums.append(logprobs.gather(1, ids[start:, None]).sum())
    return torch.stack(sums)


@pytest.mark.parametrize("name", ["dpo", "reward_model", "sft"])
def test_the_second_update_is_the_gradient_of_the_mean_loss(name, tmp_path, monkeypatch):
    """By plain logits; dpo.py's policy has left its reference by then. Microbatches differ in length."""
    script = {"dpo": dpo, "reward_model": reward_model, "sft": sft}[name]
    picked, policies = [], []
    make_batch, step_optimizer = script.make_batch, script.step_optimizer

    def keep_rows(rows, device):
        picked.append(rows)
        return make_batch(rows, device)

    def keep_weights(policy, *rest):
        policies.append({key: weight.clone() for key, weight in policy.model.state_dict().items()})
        return step_optimizer(policy, *rest)

    monkeypatch.setattr(script, "make_batch", keep_rows)
    monkeypatch.setattr(script, "step_optimizer", keep_weights)
    settings = {"model": TINY, "eval_prompts": 0, "learning_rate": 1e-3}
    found = run(script, tmp_path, monkeypatch, **settings)
    args, tokenizer, rows = toy.short(script, tmp_path, **settings), AutoTokenizer.from_pretrained(TINY), picked[1]
    assert len(rows) == 16
    if name == "reward_model":
        model = reward_model.load_reward_model(args, tokenizer, CPU).model
        model.load_state_dict(policies[1])
        loss, _ = reward_model.preference_loss(
            *[scores_of(model, rows, kind) for kind in ("chosen_ids", "rejected_ids")]
        )
    else:
        model, ref = (AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32) for _ in range(2))
        model.load_state_dict(policies[1])
    if name == "sft":
        loss = -logprobs_of(model, rows, "completion_ids").sum() * 16 / sum(len(row["completion_ids"]) for row in rows)
    elif name == "dpo":
        sums = [logprobs_of(each, rows, kind) for each in (model, ref) for kind in KINDS]
        loss, metrics = dpo.preference_loss(*sums, args.beta, 0.0)
        assert found["metrics"][2]["pair/margin"] == pytest.approx(metrics["pair/margin"][0].item() / 16, rel=1e-3)
        assert found["metrics"][0]["step"] == 0 and found["metrics"][1]["pair/margin"] == 0
    (loss / 16).backward()
    expected = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    assert relative_error(found["gradients"][1], expected) < 1e-4
    assert found["metrics"][2]["loss/nll" if name == "sft" else "loss/preference"] == pytest.approx(loss.item() / 16)


# ---- scores and checkpoints

STOP_ID = 5  # <|end|> of models/tiny


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("pad_token", ["as it is", "the stop token", None])
def test_the_score_is_read_at_the_stop_token_by_us_and_by_hugging_face(pad_token, tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "model")
    if pad_token != "as it is":
        edit_json(folder / "tokenizer_config.json", pad_token=pad_token and "<|end|>")
        edit_json(folder / "config.json", pad_token_id=pad_token and STOP_ID)
    args = toy.parse(reward_model, model=folder, tiny=True, run_dir=tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = reward_model.load_reward_model(args, tokenizer, CPU)
    assert tokenizer.pad_token_id != STOP_ID
    prompt_ids = tokenizer("<|user|>1+2=<|assistant|>")["input_ids"]
    # Stop tokens and padding may stand in the middle, too.
    completions = [[10, STOP_ID], [STOP_ID], [0, tokenizer.pad_token_id, STOP_ID, 12, STOP_ID]]
    rows = [{"prompt_ids": prompt_ids, "chosen_ids": ids, "rejected_ids": ids} for ids in completions]
    batch = reward_model.make_batch(rows, CPU)
    scores = policy(batch["chosen_ids"], batch["chosen_mask"])
    assert_close(scores, scores_of(policy.model, rows, "chosen_ids"), rtol=1e-4, atol=1e-4)
    assert (scores - scores.mean()).abs().min() > 1e-3
    policy.model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    inputs = [{"input_ids": row["prompt_ids"] + row["chosen_ids"]} for row in rows]
    inputs = AutoTokenizer.from_pretrained(tmp_path / "saved").pad(inputs, return_tensors="pt", padding_side="right")
    assert_close(loaded.eval()(**inputs).logits.squeeze(1), scores, rtol=1e-4, atol=1e-4)


def test_a_tokenizer_without_a_spare_special_token_gets_one_and_the_model_an_embedding(tmp_path):
    words = {word: i for i, word in enumerate(["<eos>", "one", "two"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="one"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    tokenizer.save_pretrained(tmp_path)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=3, eos_token_id=0, bos_token_id=None)).save_pretrained(tmp_path)
    policy = reward_model.load_reward_model(reward_model.Args(model=str(tmp_path)), tokenizer, CPU)
    assert tokenizer.pad_token_id == policy.model.config.pad_token_id == 3
    assert policy.model.get_input_embeddings().num_embeddings == 4
    assert policy.model.score.weight.std().item() == pytest.approx(1 / math.sqrt(65), rel=0.3)  # transformers: 0.02


def test_a_new_head_depends_on_the_seed_alone(tokenizer):
    models = [reward_model.load_reward_model(toy.parse(reward_model, seed=seed), tokenizer, CPU) for seed in (1, 1, 2)]
    heads = [each.model.score.weight for each in models]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_a_reward_model_learns_and_its_checkpoint_scores_as_training_did(tmp_path):
    rows = write_jsonl(tmp_path / "pairs.jsonl", read_jsonl(ROOT / "data/preferences/train.jsonl")[:512])
    settings = {"dataset": rows, "eval_every": 20, "eval_prompts": 64, "num_steps": 20}
    settings |= {"minibatch_size": 16, "warmup_steps": 4}
    first, *lines = toy.train(reward_model, tmp_path, **settings)
    last = lines[-1]
    assert last["eval/pair_loss"] < first["eval/pair_loss"] and last["eval/pair_accuracy"] > 0.5
    rates = [line["optim/learning_rate"] for line in lines]
    assert rates[3] == rates[4] == 1e-3  # the end of the warm-up, and the start of the cosine
    assert 0 < rates[-1] < 2e-5  # whose last step still trains
    checkpoint = tmp_path / "run/checkpoint-000020"
    args = toy.short(reward_model, tmp_path, **settings | {"model": checkpoint})
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    _, held_out = reward_model.load_rows(args, tokenizer)
    margin = scores_of(model, held_out, "chosen_ids") - scores_of(model, held_out, "rejected_ids")
    assert margin.mean().item() == pytest.approx(last["eval/pair_margin"], abs=1e-4)
    policy = reward_model.load_reward_model(args, tokenizer, CPU)  # trained further, it keeps its head
    assert torch.equal(policy.model.score.weight, model.score.weight)


def test_dpo_learns_to_tell_pairs_apart(tmp_path):
    rows = write_jsonl(tmp_path / "pairs.jsonl", read_jsonl(ROOT / "data/preferences/train.jsonl")[:256])
    sizes = {"num_steps": 12, "minibatch_size": 16, "eval_every": 20, "eval_prompts": 48}
    first, *lines = toy.train(dpo, tmp_path, dataset=rows, learning_rate=3e-4, warmup_steps=2, beta=0.1, **sizes)
    assert first["eval/pair_loss"] == pytest.approx(math.log(2), abs=1e-6)  # the policy is the reference at first
    assert (first["eval/pair_accuracy"], first["eval/pair_margin"]) == (0.5, 0)
    assert sum(line["loss/preference"] for line in lines[-4:]) / 4 < math.log(2) - 0.02
    assert lines[-1]["eval/pair_loss"] < first["eval/pair_loss"] and lines[-1]["eval/pair_margin"] > 0.05
    assert [line["optim/learning_rate"] for line in lines[:3]] == [1.5e-4, 3e-4, 3e-4]


def test_sft_starts_from_random_weights_says_so_learns_and_stops_where_it_was_trained_to_stop(tmp_path, capsys):
    rows = write_jsonl(tmp_path / "texts.jsonl", [{"prompt": f"{i}+1=", "completion": "1"} for i in range(100)])
    settings = {"dataset": rows, "num_steps": 40, "eval_every": 40, "save_every": 40, "learning_rate": 3e-3}
    lines = toy.train(sft, tmp_path, **settings, minibatch_size=16, warmup_steps=3)
    assert "/models/tiny/config.json: random weights; to fine-tune a model, name its folder" in capsys.readouterr().out
    assert lines[0]["eval/loss"] > 3 and lines[-1]["eval/loss"] < 0.1
    assert lines[-1]["eval/perplexity"] == pytest.approx(math.exp(lines[-1]["eval/loss"]))
    checkpoint = tmp_path / "run/checkpoint-000040"
    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = tokenizer("<|user|>7+1=<|assistant|>", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(model.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]) == "1<|end|>"


def test_the_weight_decay_of_a_resumed_run_is_that_of_its_flag(tmp_path, monkeypatch):
    calls = toy.record(monkeypatch, sft, "step_optimizer")
    toy.train(sft, tmp_path, num_steps=1, save_every=1)
    sft.main(toy.parse(sft, resume=tmp_path / "run", num_steps=2, weight_decay=0.5))
    used = [optimizer for (_, optimizer, *_), _ in calls]
    assert [optimizer.param_groups[0]["weight_decay"] for optimizer in used] == [0.1, 0.5]


def test_checkpoints_go_from_script_to_script(tmp_path):
    """From fine-tuning to DPO and to a reward model, and from both to PPO; then grpo.py evaluates."""
    steps = {"num_steps": 1, "save_every": 1, "tiny": True}
    toy.train(sft, tmp_path / "sft", model=TINY, **steps)
    model = tmp_path / "sft/run/checkpoint-000001"
    for script in (dpo, reward_model):
        toy.train(script, tmp_path / script.__name__, model=model, **steps)
    steps["reward_model"] = tmp_path / "reward_model/run/checkpoint-000001"
    *_, line = toy.train(ppo_rlhf, tmp_path / "ppo", model=tmp_path / "dpo/run/checkpoint-000001", **steps)
    assert line["optim/grad_norm"] > 0
    model = tmp_path / "ppo/run/checkpoint-000001"
    [line] = toy.train(grpo, tmp_path / "eval", **steps | {"num_steps": 0, "model": model})
    assert 0 <= line["eval/accuracy"] <= 1
