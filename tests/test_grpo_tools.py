"""A tool's replies are outside the loss and inside the context: python -m pytest tests/test_grpo_tools.py"""

import itertools
import math
import re

import helpers
import pytest
import tiny
import torch
from helpers import cases_of, each_invariance, gradient_of, tensor
from tiny import ROOT, TINY, build_model, load, pad_right, read_jsonl, record, relative_error, shares_changed
from torch.testing import assert_close
from two_ranks import gradient_of_parameters

import grpo_tools

# ---- by hand: the calculator

# {reply: texts after which the calculator says it}; from "So" on as real models write
REPLIES = {
    "46": ["<think>12+34=", "12+34=", "<think>1+2=3;12+34=", "So 12 + 34 = "],
    " 46": ["So 12 + 34 ="],
    " -2": ["- 48 - 50 ="],
    " 24": ["is $48 ÷ 2 =", "is **72 − 48 =", "x &= 12 × 2 =", r"so \(12 \cdot 2 ="],
    " 1800": [r"pay \$1,200 * \$1.50 ="],
    " 3.3333": ["about 10 / 3 ="],
    " 408": [grpo_tools.Args.system_prompt.partition("=")[0] + "="],  # the call that real models are shown
    "": ["…12+34=", "<think>12+34=4", "<think>1+2+3=", "<think>1+9999999999=", "It is 12 + 34", "He has 12 ="],
}
REPLIES[""] += ["never 10 / 0 =", "never 10 / 0.00 =", "x + 12 + 34 =", "(1 + 2) * 3 + 4 =", "It is -12 + 34 ="]


@pytest.mark.parametrize("reply", REPLIES)
def test_the_calculator(reply):
    for text in REPLIES[reply]:
        assert grpo_tools.tool_fn(text) == reply, text


# ---- completions with replies


def sample(monkeypatch, tool, prompts=("12+34=",), num_samples=8, temperature=1.5, model=TINY, **settings):
    """Sample with this tool; return a batch, its texts, the model and its tokenizer."""
    monkeypatch.setattr(grpo_tools, "tool_fn", tool)
    model, tokenizer = load(grpo_tools, model)
    settings = {"max_completion_length": 24, "tool_tokens": 64} | settings
    args = grpo_tools.Args(**settings)
    rows = []
    for prompt in prompts:
        prompt_ids = grpo_tools.encode_prompt(tokenizer, grpo_tools.as_messages(prompt, "user"), None)
        rows += [{"prompt_ids": prompt_ids}] * num_samples
    policy = grpo_tools.LogprobModel(model)
    torch.manual_seed(0)
    batch, texts = grpo_tools.sample_completions(policy, tokenizer, rows, temperature, args)
    return batch, texts, model, tokenizer


def spell(batch, tokenizer):
    """The completions as texts, what was not drawn between guillemets, which no vocabulary here has."""
    texts = []
    for ids, mask, drawn in zip(batch["completion_ids"], batch["completion_mask"], batch["action_mask"]):
        text = ""
        pairs = zip(drawn.tolist(), ids[mask == 1].tolist())
        for is_drawn, group in itertools.groupby(pairs, lambda pair: pair[0]):
            part = tokenizer.decode([token for _, token in group])
            text += part if is_drawn else f"«{part}»"
        texts.append(text)
    return texts


def check_logprobs(batch, model, temperature=1.5):
    """The log-probabilities of what was drawn are those of a forward pass over the whole completion."""
    inputs = [batch[key] for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")]
    logprobs, _ = grpo_tools.token_logprobs(model, *inputs, temperature)
    drawn = batch["action_mask"].bool()
    assert_close(logprobs[drawn], batch["sampler_logprobs"][drawn], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rollout_batch_size", [0, 5])
def test_several_calls_a_completion_and_what_they_leave(rollout_batch_size, monkeypatch):
    tool = grpo_tools.tool_fn
    settings = {"rollout_batch_size": rollout_batch_size, "max_completion_length": 48}
    prompts = ["87+39+86+12=", "98+76=", "56+31+90+85="]
    batch, texts, model, tokenizer = sample(monkeypatch, tool, prompts, **settings)
    spelled = spell(batch, tokenizer)
    assert max(text.count("«") for text in spelled) >= 3
    for text in spelled:
        for call in re.finditer("«([0-9]+)»", text):
            before = re.sub("[«»]", "", text[: call.start()])
            assert tool(before) == call[1]
    assert [re.sub("[«»]|<.end.>", "", text) for text in spelled] == texts
    check_logprobs(batch, model)
    assert not batch["truncated"].any()


def write(monkeypatch, tool, draws):
    """Generate with this tool where these tokens are drawn (T, B), each with log-probability -0.5; return lists."""
    model, tokenizer = load(grpo_tools, TINY)
    rows = iter(torch.tensor(draws))
    monkeypatch.setattr(grpo_tools, "tool_fn", tool)
    monkeypatch.setattr(grpo_tools, "sample_tokens", lambda logits, _: (next(rows), torch.full(logits.shape[:1], -0.5)))
    prompts = torch.ones(2, len(draws[0]), 3, dtype=torch.long)
    found = grpo_tools.generate(model, *prompts, len(draws), 1.0, model.generation_config.eos_token_id, tokenizer, 6)
    return [values.tolist() for values in found]


def test_the_tool_is_asked_only_after_tokens_that_can_end_a_call(monkeypatch, tokenizer):
    asked = []

    def tool(text):
        asked.append(text)

    tool.ends = "="
    ids = tokenizer.encode("12+34=46;46+8=54", add_special_tokens=False)
    write(monkeypatch, tool, [[token] for token in ids])
    assert asked == ["12+34=", "…;46+8="]  # all of six tokens, and the last six of more


def test_a_finished_completion_asks_nothing(monkeypatch, tokenizer):
    """One of sixteen stays in the batch for a while."""
    asked = []

    def tool(text):
        asked.append(text)

    tool.ends = "="
    equals, end, four = tokenizer.convert_tokens_to_ids(["=", "<|end|>", "4"])
    draws = [[end] + 15 * [four], [equals] + 15 * [four], [equals] + 15 * [end]]
    ids, mask, actions, logprobs = write(monkeypatch, tool, draws)
    assert not asked and [ids[0], ids[1]] == [[end, 0, 0], [four, four, end]]
    assert mask == actions == [[1, 0, 0]] + 15 * [[1, 1, 1]]
    assert logprobs[0] == [-0.5, 0, 0]


def test_what_is_drawn_where_a_reply_is_written_is_thrown_away(monkeypatch, tokenizer):
    """Be it a stop token, whose own reply would be another turn."""

    def tool(text):
        return "46" if text.endswith(("=", "<|end|>")) else ""

    equals, end, four, six = tokenizer.convert_tokens_to_ids(["=", "<|end|>", "4", "6"])
    ids, mask, actions, logprobs = write(monkeypatch, tool, [[equals, four], [end, end], [end, end]])
    assert ids == [[equals, four, six], [four, end, four]]  # the second row's end is answered
    assert mask == [[1, 1, 1], [1, 1, 1]]
    assert actions == [[1, 0, 0], [1, 1, 0]]
    assert logprobs == [[-0.5, 0, 0], [-0.5, -0.5, 0]]


@pytest.mark.parametrize("form", ["chatml", "gemma"])
def test_a_reply_to_a_stop_token_begins_another_turn(form, monkeypatch, tmp_path):
    """Of a model with other stop ids."""
    tokenizer = tiny.make_tokenizer(*tiny.FORMS[form])
    end = tiny.FORMS[form][0][1]
    turn = f"user: no{end}assistant: "

    def user(text):
        return turn if text.endswith(end) and text.count(end) == 1 else ""

    folder = tiny.make_folder(tmp_path / "model", tokenizer, initializer_range=0.3)
    settings = {"model": folder, "max_completion_length": 120, "tool_tokens": 120}
    batch, _, model, tokenizer = sample(monkeypatch, user, ["1+1="], 32, 2.0, **settings)
    of_two_turns = [text for text in spell(batch, tokenizer) if "«" in text]
    assert len(of_two_turns) > 2
    turns = set()
    for text in of_two_turns:
        first, _, rest = text.partition("«")
        said, _, second = rest.partition("»")
        assert first.endswith(end)
        assert said == turn or (turn.startswith(said) and not second)  # cut at the limit
        turns.add(second)
    assert turns != {""}
    assert not batch["truncated"].all()
    check_logprobs(batch, model, 2.0)


def test_endless_replies_are_cut(monkeypatch):
    asked = []

    def tool(text):
        asked.append(text)
        return "1" * 10**4

    batch, _, _, tokenizer = sample(monkeypatch, tool, tool_tokens=5)
    assert batch["truncated"].all()  # replies go on to the limit of 24 tokens
    assert batch["action_mask"].tolist() == [([1] + [0] * 5) * 4] * 8
    assert {text.count("«11111»") for text in spell(batch, tokenizer)} == {4}
    cut = [text[1:] for text in asked if text[0] == "…"]  # a window, no more, and said to be the end of more
    assert len(cut) == 8 * 3  # all but the first call of each completion
    ids = tokenizer(cut, add_special_tokens=False)["input_ids"]
    assert max(map(len, ids)) == 5


# ---- the exact gradient


def test_expected_gradient_is_that_of_the_expected_reward():
    """Over all completions of a tiny model whose token 2 is always followed by 3, which the tool says."""
    model = build_model("llama", vocab_size=5)
    length = 4

    def complete(ids=(), drawn=()):
        if ids and (len(ids) == length or (ids[-1] == 1 and drawn[-1])):  # 1 is the stop id
            yield list(ids), list(drawn)
        elif ids and drawn[-1] and ids[-1] == 2:
            yield from complete((*ids, 3), (*drawn, 0))
        else:
            for token in range(5):
                yield from complete((*ids, token), (*drawn, 1))

    completions, masks = zip(*complete())
    prompts = grpo_tools.pad_left([{"prompt_ids": [4, 0, 2]}] * len(completions), "cpu")
    ids, mask = pad_right(completions, length)
    drawn, _ = pad_right(masks, length)
    logprobs, _ = grpo_tools.token_logprobs(model, *prompts, ids, mask, 0.7)
    probabilities = (logprobs * drawn).sum(1).exp()
    assert probabilities.sum().item() == pytest.approx(1)
    rewards = helpers.tensor([(sum(c) + len(c)) % 3 for c in completions])
    exact = gradient_of(model, (probabilities * rewards).sum())

    def error(trained):
        advantages = rewards * probabilities.detach() * trained.sum(1)  # the loss divides by the length
        inputs = {"logprobs": logprobs, "old_logprobs": logprobs.detach(), "advantages": advantages}
        loss, _ = helpers.policy_loss(grpo_tools, inputs, completion_mask=trained)
        return relative_error(-gradient_of(model, loss), exact)

    assert error(drawn) < 1e-9
    assert error(mask) > 0.01  # with the tool's tokens trained, too


# ---- the loss and what does not matter


def test_loss_gradient_and_metrics_by_hand():
    # Ratios are clipped to 0.8 .. 1.2; -min(r A, clip(r) A) for each token, then the mean over the three tokens.
    loss = (-2.4 - 2.4 - 1.0) / 3 + (1.5 + 0.8 + 1.0) / 3
    gradient = [[0.0, 0.0, -1 / 3, 0.0], [0.5, 0.0, 1 / 3, 0.0]]  # -r A where not clipped
    metrics = {"policy/approx_kl": helpers.APPROX_KL, "policy/clip_fraction_low": 1, "policy/clip_fraction_high": 2}
    helpers.check_by_hand(grpo_tools, loss, gradient, metrics)


def test_advantages_by_hand():
    """A group of rewards 1, 0, 0, 1 has mean 1/2 and standard deviation √(1/3); 1, 0, 0, 0 has 1/4 and 1/2."""
    advantages = grpo_tools.compute_advantages(tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]), 4)
    half = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    quarter = 0.25 / (0.5 + 1e-4)
    expected = tensor([half, -half, -half, half, 3 * quarter, -quarter, -quarter, -quarter])
    assert_close(advantages, expected)


@pytest.mark.parametrize("case", cases_of("grpo_trl", beta=0) + cases_of("grpo_oat", beta=0))
def test_loss_and_gradient_are_those_of_others(case):
    helpers.check_loss_of_others(grpo_tools, case)


def test_advantages_are_those_of_trl():
    helpers.check_advantages_of_others(grpo_tools.compute_advantages, "trl_group", rtol=1e-6)


def test_expected_gradient_divides_by_the_length():
    """So it is not that of the expected reward."""
    rows = helpers.enumerate_rows()
    found = helpers.expected_gradient(grpo_tools, rows["advantages"])
    objective = (rows["probabilities"] * rows["advantages"] / rows["lengths"]).sum()
    assert relative_error(found, gradient_of(rows["model"], objective)) < 1e-9
    assert torch.cosine_similarity(found, helpers.true_gradient(), dim=0) < 0.9999


def test_expected_gradient_of_groups_of_two():
    """Division by the standard deviation turns it away from the gradient of the expected reward."""
    helpers.check_gradient_of_groups_of_two(grpo_tools, over_lengths=True)
    found = helpers.gradient_of_pairs(grpo_tools, grpo_tools.compute_advantages)
    assert torch.cosine_similarity(found, helpers.true_gradient(), dim=0) < 0.9999


def test_where_the_clip_stops_the_gradient():
    helpers.check_clip(grpo_tools)


@each_invariance
def test_what_does_not_matter(check):
    check(grpo_tools)


def test_advantages_are_centred_and_0_without_a_difference():
    helpers.check_advantages(grpo_tools.compute_advantages)


@pytest.mark.usefixtures("alone")
def test_tokens_of_the_tool_have_no_part_in_loss_gradient_or_metrics():
    model = build_model("llama")
    policy = grpo_tools.LogprobModel(model)
    batch = tiny.make_batch(model)
    mask = batch["action_mask"].bool()
    results = []
    args = tiny.make_args(grpo_tools)
    for garbage in (0.0, -torch.inf):
        model.zero_grad()
        given = batch | {"sampler_logprobs": torch.where(mask, batch["sampler_logprobs"], garbage)}
        totals = tiny.call_accumulate_gradients(grpo_tools, policy, given, torch.arange(8), args)
        results.append((totals, gradient_of_parameters(model)))
    (totals, gradient), (other_totals, other_gradient) = results
    assert gradient.norm() > 0
    assert torch.equal(gradient, other_gradient)
    assert totals == other_totals
    counts = {count for name, (_, count) in totals.items() if name != "loss/policy"}
    assert counts == {mask.sum().item()}
    assert mask.sum() < batch["completion_mask"].sum()


# ---- short runs

SIZES = {"prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "dataset": ROOT / "data/addition/test.jsonl"}


def test_the_default_run_cut_short_learns_without_replies(monkeypatch, tmp_path):
    monkeypatch.setattr(grpo_tools, "tool_fn", lambda _: "")
    torch.manual_seed(0)
    settings = {"num_steps": 16, "eval_every": 16, "eval_prompts": 64, "save_every": 16, "seed": 11}
    lines = helpers.train(grpo_tools, tmp_path / "run", **settings)
    first, last = lines[0], lines[-1]
    assert last["eval/accuracy"] > first["eval/accuracy"] + 0.1
    assert last["eval/pass@1"] > first["eval/pass@1"] + 0.05
    rewards = [line["reward/mean"] for line in lines[1:]]
    assert sum(rewards[-5:]) > sum(rewards[:5])
    assert last["rollout/length_mean"] > lines[1]["rollout/length_mean"]
    assert all(line["policy/approx_kl"] > 0 for line in lines[1:])  # the second minibatch is off-policy
    assert last["rollout/calls"] == last["rollout/tool_use"] == last["rollout/tool_tokens"] == 0
    assert min(shares_changed(tmp_path / "run" / "checkpoint")) > 0.5  # rows of unused tokens stay


def test_how_often_the_tool_was_used_by_hand(monkeypatch, tmp_path):
    """Every completion is an answer of a digit that the tool gives, and an end."""
    replies = {"\\boxed{": "7}"}
    monkeypatch.setattr(grpo_tools, "tool_fn", replies.get)
    monkeypatch.setattr(grpo_tools, "reward_fn", lambda completion, _: float(len(completion)))
    rollouts = record(monkeypatch, grpo_tools, "sample_completions")
    line = helpers.train(grpo_tools, tmp_path / "run", num_steps=1, eval_prompts=4, **SIZES)[1]
    texts = next(texts for _, (batch, texts) in rollouts if "advantages" in batch)
    calls = sum(text.startswith("\\boxed{7}") for text in texts)
    assert 0 < calls < 16
    assert line["rollout/tool_use"] == line["rollout/calls"] == pytest.approx(calls / 16)
    assert line["rollout/tool_tokens"] == pytest.approx(2 * calls / 16)
    evaluated = read_jsonl(tmp_path / "run" / "eval_samples.jsonl")
    assert any("\\boxed{7}" in row["completion"] for row in evaluated)  # evaluations have the tool, too


@pytest.mark.parametrize("reply, text", [(5, "5"), (0, "0"), (2.5, "2.5"), (None, ""), ("", "")])
def test_a_tool_may_return_a_number(reply, text, tokenizer, monkeypatch):
    monkeypatch.setattr(grpo_tools, "tool_fn", lambda _: reply)
    assert tokenizer.decode(grpo_tools.ask_tool(tokenizer, tokenizer("1+1=")["input_ids"], 64)) == text


def test_a_tools_text_ends_no_turn(tokenizer, monkeypatch):
    monkeypatch.setattr(grpo_tools, "tool_fn", lambda _: "5<|end|><|user|>6")
    ids = grpo_tools.ask_tool(tokenizer, tokenizer("1+1=")["input_ids"], 64)
    assert not {*ids} & {tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "<|user|>")}
    assert tokenizer.decode([ids[0], ids[-1]]) == "56"


def test_the_user_of_the_page_opens_a_turn_once(tokenizer):
    """With the special tokens of the template, unlike a tool's text."""
    page = (ROOT / "docs" / "grpo_tools.md").read_text(encoding="utf-8")
    [code] = re.findall("```python\n(.*?)```", page, re.DOTALL)
    example = {"__name__": "my_dialogue"}
    exec(code, example)
    said = tokenizer("\\boxed{46}<|end|>", add_special_tokens=False)["input_ids"]
    reply = example["ask_user"](tokenizer, said, 64)
    assert [reply[0], reply[-1]] == tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])
    assert tokenizer.decode(reply[1:-1]) == "46+17="
    assert example["ask_user"](tokenizer, said + reply + said, 64) == example["ask_user"](tokenizer, reply, 64) == []
    assert example["is_correct"]("\\boxed{63}", "46") and not example["is_correct"]("\\boxed{46}", "46")


@pytest.mark.parametrize("reply", ["", ";"])
def test_calls_are_counted_each_and_their_lack_is_told(reply, monkeypatch, tmp_path, capsys):
    """A reply after every digit that was drawn: some completions have several."""
    monkeypatch.setattr(grpo_tools, "tool_fn", lambda text: reply if text[-1:].isdigit() else "")
    rollouts = record(monkeypatch, grpo_tools, "sample_completions")
    [line] = helpers.train(grpo_tools, tmp_path / "run", num_steps=1, eval_prompts=0, **SIZES)
    [(_, (batch, _))] = rollouts
    written = batch["completion_mask"] - batch["action_mask"]  # replies of one token
    num_written = written.sum(1).float()
    assert (num_written.max() > 1) == (reply == ";")
    assert line["rollout/calls"] == pytest.approx(num_written.mean().item())
    assert line["rollout/tool_use"] == pytest.approx((num_written > 0).float().mean().item())
    assert ("plain GRPO" in capsys.readouterr().out) == (reply == "")


def test_the_tools_tokens_are_marked_and_padding_is_left_out(tokenizer):
    ids = tokenizer("1+2=3;1", add_special_tokens=False)["input_ids"]
    batch = {"completion_ids": torch.tensor([ids]), "completion_mask": torch.ones(1, len(ids)).long()}
    batch["completion_mask"][0, -1] = 0
    batch["action_mask"] = batch["completion_mask"].clone()
    batch["action_mask"][0, 4] = 0
    assert grpo_tools.mark_replies(tokenizer, batch) == ["1+2=«3»;"]
