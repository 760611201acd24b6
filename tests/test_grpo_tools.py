"""A tool's replies are outside the loss and inside the context: python -m pytest tests/test_grpo_tools.py"""

import re

import pytest
import tokenizers
import torch
import toy
from test_losses import random_inputs
from test_process_rewards import byte_pair_tokenizer
from torch.testing import assert_close
from toy import ROOT, TINY, build_model, gradient_of, relative_error
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import grpo
import grpo_tools

STOP, END = 5, "<|end|>"  # of the bundled model
REPLIES = {  # of the calculator, to texts; from "So" on as real models write
    "46": "<think>12+34= | 12+34= | <think>1+2=3;12+34= | So 12 + 34 = ",
    " 46": "So 12 + 34 =",
    " -2": "- 48 - 50 =",
    " 24": r"is $48 ÷ 2 = | is **72 − 48 = | x &= 12 × 2 = | so \(12 \cdot 2 =",
    " 1800": r"pay \$1,200 * \$1.50 =",
    " 3.3333": "about 10 / 3 =",
    " 20": "10 / 0.5 = | 10 ÷ 00.50 =",
    " 408": grpo_tools.Args.system_prompt.partition("=")[0] + "=",  # the call that real models are shown
    None: "<think>12+34=4 | <think>1+2+3= | <think>1+9999999999= | It is 12 + 34 | He has 12 = | -1,200-5= | x1,200-5="
    r" | 10 \div 0.00 = | x + 12 + 34 = | (1 + 2) * 3 + 4 = | It is -12 + 34 = | 2\times3+4= | 2 \times 3 + 4 =",
}


@pytest.mark.parametrize("reply", REPLIES)
def test_the_calculator(reply):
    for text in REPLIES[reply].split(" | "):
        assert grpo_tools.tool_fn(text) == reply, text


def use_tool(monkeypatch, reply_to, ends="="):
    """Let the tool be this function; return the texts that it is asked about."""
    asked = []
    monkeypatch.setattr(grpo_tools, "tool_fn", lambda text: asked.append(text) or reply_to(text))
    grpo_tools.tool_fn.ends = ends
    return asked


def load():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    return grpo_tools.load_sampler(grpo_tools.Args(model=str(TINY), precision="float32"), tokenizer, "cpu"), tokenizer


def sample(sampler, tokenizer, prompts, temperature=1.5, **settings):
    """Return the batch of a completion of each prompt, texts, and texts with the tool's tokens in guillemets."""
    args = grpo_tools.Args(**{"max_completion_length": 48, "max_prompt_length": 32} | settings)
    torch.manual_seed(0)
    rows = [{"prompt_ids": prompt} for prompt in prompts]
    batch, texts = grpo_tools.sample_completions(sampler, tokenizer, rows, temperature, args)
    return batch, texts, spell(tokenizer, batch)


def spell(tokenizer, batch):
    texts = []
    for ids, mask, tool_mask in zip(batch["ids"], batch["completion_mask"], batch["tool_mask"]):
        by_policy, counts = mask[mask + tool_mask > 0].unique_consecutive(return_counts=True)
        pieces = [tokenizer.decode(piece) for piece in ids[mask + tool_mask > 0].split(counts.tolist())]
        texts.append("".join(piece if sampled else f"«{piece}»" for piece, sampled in zip(pieces, by_policy)))
    return texts


def plain_logprobs(model, ids, temperature):
    """Log-probabilities (L) of a sequence's tokens, 0 for the first, by the model's own logits."""
    logprobs = (model(ids.unsqueeze(0)).logits[0, :-1] / temperature).log_softmax(-1)
    return torch.nn.functional.pad(logprobs.gather(1, ids[1:, None]).squeeze(1), (1, 0))


def test_completions_are_sampled_as_often_as_they_are_likely(monkeypatch):
    """Of up to four letters; b ends them, and c a call: the first is answered, others only end a turn in the middle."""
    use_tool(monkeypatch, lambda text: "d" if text.endswith("c") and "d" not in text else None, "c")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip("abcde", range(5))), unk_token="a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    model, covered = build_model("llama", 5, dtype=torch.float32, scale=4.0), 0.0
    model.generation_config.eos_token_id = [1]
    settings = {"temperature": 0.7, "max_completion_length": 4, "rollout_batch_size": 5000}
    *_, texts = sample(model, PreTrainedTokenizerFast(tokenizer_object=backend), [[4, 0]] * 6000, **settings)
    for text in {*texts}:
        ids = torch.tensor([4, 0, *("abcde".index(letter) for letter in re.sub("[«»]", "", text))])
        by_policy = torch.tensor([False, False, *(letter != "_" for letter in re.sub("«.»", "_", text))])
        probability = (plain_logprobs(model, ids, 0.7) * by_policy).sum().exp().item()
        assert abs(texts.count(text) - 6000 * probability) < 5 * (6000 * probability) ** 0.5 + 3
        covered += probability
    assert 0.98 < covered < 1 + 1e-5 and len({*texts}) > 50


@pytest.mark.parametrize("rollout_batch_size", [128, 5])
def test_conversations_have_the_log_probabilities_of_the_models_logits(rollout_batch_size, monkeypatch):
    """With several calls each; what follows a reply depends on it, and what precedes it does not."""
    calculator, (model, tokenizer) = grpo_tools.tool_fn, load()
    asked = use_tool(monkeypatch, calculator)
    prompts = [tokenizer.encode(f"<|user|>{text}=<|assistant|>") for text in ["87+39+86+12"] * 9 + ["98+76"] * 9]
    batch, texts, spelled = sample(model, tokenizer, prompts, rollout_batch_size=rollout_batch_size)
    for i, text in enumerate(spelled):
        for reply in re.finditer("«(.+?)»", text):
            assert calculator(re.sub("[«»]", "", text[: reply.start()])) == reply[1]
        assert re.sub("[«»]|<.end.>", "", text) == texts[i]
        names = ("ids", "completion_mask", "tool_mask", "sampler_logprobs")
        ids, mask, tool_mask, sampled = (batch[name][i, : batch["total_lengths"][i]] for name in names)
        expected = plain_logprobs(model, ids, 1.5)
        assert_close(sampled, expected * mask, rtol=1e-4, atol=1e-4)
        if tool_mask.any():
            place, changed = tool_mask.argmax(), ids.clone()
            changed[place] += 1
            differs = (plain_logprobs(model, changed, 1.5) - expected).abs() > 1e-4
            assert differs[place + 1 :].any() and not differs[:place].any()
    assert len(asked) == sum(text.count("=") for text in texts) >= sum(text.count("«") for text in spelled) >= 10


# Of at most 12 tokens, and 3 in a reply: texts with replies; the policy's turns in each completion; the completions, …
# if truncated; rows and limit of each call of generate. E is a stop token, and in the last three, ends calls.
TURNS = [
    ("1+2= 3", "1+2= ;4= 5E, 7E", "1+2=«3»;4=5E, 7E", "2x12 1x7 1x4"),  # only one of the calls has a reply
    ("1= 23456, 1=234= 5", "1= = 7E", "1=«234»=«5»7E", "1x12 1x7 1x5"),  # a reply that is too long, and another
    ("123456789-= 99", "123456789-=", "123456789-=«9»…", "1x12"),  # there is little room for it
    ("1234567890-= 99", "1234567890-=", "1234567890-=…", "1x12"),  # and none
    ("1= 2", "1234567890-1, 123456789--E", "1234567890-1…, 123456789--E", "2x12"),  # no reply
    ("123456= 0, 1= 2", "123456= 9999, 1= 34= 5678 E", "123456=«0»9999…, 1=«2»34=5678E", "2x12 1x9 2x4 1x2"),  # a wait
    ("7E 8", "7E 9E", "7E«8»9E", "1x12 1x9"),  # a dialogue
    ("7E E", "7E 8E", "7E«E»8E", "1x12 1x9"),  # a stop token in a reply ends nothing
    ("1234567890E E", "1234567890E", "1234567890E«E»…", "1x12"),
]


@pytest.mark.parametrize("replies, turns, expected, calls", TURNS)
def test_turns(replies, turns, expected, calls, monkeypatch):
    (sampler, tokenizer), found_calls = load(), []
    replies = dict(pair.replace("E", END).split() for pair in replies.split(", "))
    use_tool(monkeypatch, replies.get, END if END in str(replies) else "=")
    if END in replies.values():  # as the example of docs/grpo_tools.md, which writes special tokens
        monkeypatch.setattr(grpo_tools, "ask_tool", lambda _, ids, __: [STOP] * (tokenizer.decode(ids) in replies))
    running = [iter(row.replace("E", END).split()) for row in turns.split(", ")]

    def generate(_model, prompts, limit, _temperature, stop_ids):
        found_calls.append(f"{len(prompts)}x{limit}")
        samples = [tokenizer.encode(next(running[prompt[0] - 10]), add_special_tokens=False) for prompt in prompts]
        assert all(len(ids) == limit or ids[-1] in stop_ids for ids in samples)
        assert not {token for ids in samples for token in ids[:-1]} & {*stop_ids}
        return [(ids, [-0.5] * len(ids)) for ids in samples]

    monkeypatch.setattr(grpo_tools, "generate", generate)
    prompts = [[10 + i] for i in range(len(running))]
    batch, _, spelled = sample(sampler, tokenizer, prompts, max_completion_length=12, tool_tokens=3)
    found = [text.replace(END, "E") + "…" * truncated for text, truncated in zip(spelled, batch["truncated"])]
    assert ", ".join(found) == expected and " ".join(found_calls) == calls
    assert torch.equal(batch["sampler_logprobs"], -0.5 * batch["completion_mask"])


@pytest.mark.parametrize("reply, text", [(5, "5"), (0, "0"), (2.5, "2.5"), (None, ""), ("", ""), (f"5{END}6", "5 6")])
def test_a_reply_may_be_a_number_and_has_no_stop_token(reply, text, monkeypatch):
    _, tokenizer = load()
    use_tool(monkeypatch, lambda _: reply)
    ids = grpo_tools.ask_tool(tokenizer, tokenizer.encode("1+1="), 64)
    assert STOP not in ids and re.sub("<.+>", " ", tokenizer.decode(ids)) == text


@pytest.mark.parametrize("ends", ["=", ";1", "\n", END])
def test_a_call_may_end_in_any_token_that_contains_its_end(ends):
    """Also amid other characters, as in "=10;10+", and in a token whose name in the vocabulary is not its text."""
    tokenizer = byte_pair_tokenizer()
    expected = [i for i in range(len(tokenizer)) if ends in tokenizer.decode([i])]
    assert sorted(grpo_tools.find_call_ends(tokenizer, ends)) == expected != [] and (ends != "=" or len(expected) > 3)


@pytest.mark.parametrize("garbage", [0.0, torch.inf, -torch.inf, torch.nan])
def test_loss_and_advantages_are_those_of_grpo_without_a_reference(garbage):
    """Of completions with gaps, whatever stands there."""
    inputs = random_inputs() | {"ref_logprobs": None, "clip_eps": 0.03}
    expected = toy.loss_and_gradient("grpo", inputs)
    for key in ("logprobs", "old_logprobs", "sampler_logprobs"):
        inputs[key] = torch.where(inputs["completion_mask"], inputs[key], garbage)
    found = toy.loss_and_gradient("grpo_tools", inputs)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]) and found[2] == expected[2]
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.3, 0.3, 0.3, 0.3])
    assert torch.equal(grpo_tools.compute_advantages(rewards, 4), grpo.compute_advantages(rewards, 4))


@pytest.mark.parametrize("precision, tolerance", [("float32", 1e-4), ("bfloat16", 0.1)])
def test_an_update_and_metrics_of_a_rollout_with_replies(precision, tolerance, tmp_path, monkeypatch):
    """The gradient is that of the model's own logits, at the policy's tokens only; the tool's use is by hand."""
    rollouts, gradients = toy.record(monkeypatch, grpo_tools, "sample_completions"), []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)  # of the whole process
    monkeypatch.setattr(
        grpo_tools, "step_optimizer", lambda policy, *_: gradients.extend(w.grad for w in policy.parameters()) or 1.0
    )
    monkeypatch.setattr(grpo_tools, "score_completions", lambda texts, _: [float(len(text) % 5) for text in texts])
    settings = {"num_steps": 1, "minibatch_size": 16, "max_completion_length": 48, "seed": 3, "precision": precision}
    line = toy.train(grpo_tools, tmp_path, microbatch_tokens=200, **settings)[1]
    (_, tokenizer, *_), (batch, texts) = rollouts[1]
    replies = [text.count("«") for text in spell(tokenizer, batch)]
    sampled, written = batch["completion_mask"].sum().item(), batch["tool_mask"].sum().item()
    assert max(replies) > 1 and line["rollout/calls"] == sum(replies) / 16
    assert line["rollout/tool_use"] == sum(count > 0 for count in replies) / 16
    assert [line["rollout/length_mean"], line["rollout/tool_tokens"]] == [(sampled + written) / 16, written / 16]
    assert 0 < line["policy/sampler_kl"] < tolerance / 100
    model, objective = AutoModelForCausalLM.from_pretrained(TINY), 0.0
    advantages = grpo_tools.compute_advantages(torch.tensor([float(len(text) % 5) for text in texts]), 4)
    for i, advantage in enumerate(advantages):
        ids, mask = (batch[name][i, : batch["total_lengths"][i]] for name in ("ids", "completion_mask"))
        objective = objective + advantage * (plain_logprobs(model, ids, 1.0) * mask).sum() / mask.sum() / 16
    found = -torch.cat([gradient.flatten() for gradient in gradients])
    assert relative_error(found, gradient_of(model, objective)) < tolerance


def test_the_user_of_the_page_opens_a_turn_once():
    """With the special tokens of the template, unlike a tool's text."""
    [code] = re.findall("```python\n(.*?)```", (ROOT / "docs/grpo_tools.md").read_text(encoding="utf-8"), re.DOTALL)
    example, (_, tokenizer) = {"__name__": "my_dialogue"}, load()
    exec(code, example)
    said = tokenizer.encode(f"\\boxed{{46}}{END}", add_special_tokens=False)
    reply = example["ask_user"](tokenizer, said, 64)
    assert tokenizer.decode(reply) == "<|user|>46+17=<|assistant|>" and len(reply) == 8
    assert example["ask_user"](tokenizer, said + reply + said, 64) == example["ask_user"](tokenizer, reply, 64) == []
    assert example["is_correct"]("\\boxed{63}", "46") and not example["is_correct"]("\\boxed{46}", "46")


def test_the_default_command_learns_to_call(tmp_path):
    """In 14 of its 30 steps."""
    grpo_tools.main(toy.parse(grpo_tools, num_steps=14, eval_prompts=128, run_dir=tmp_path / "run"))
    lines = toy.read_jsonl(tmp_path / "run/metrics.jsonl")
    assert lines[0]["eval/accuracy"] < 0.6 and lines[14]["eval/accuracy"] > 0.9 and lines[14]["rollout/tool_use"] > 0.4
