"""grpo_tools.py: replies stand in the completion, outside its loss, and inside the context of what follows."""

import itertools
import math
import re

import pytest
import torch
from helpers import (
    CLIP_CASES,
    COUNTED_AS_CLIPPED,
    WITHOUT_KL,
    check_advantages,
    check_advantages_of_others,
    check_by_hand,
    check_clip,
    check_counted_as_clipped,
    check_gradient_of_groups_of_two,
    each_invariance,
    gradient_of,
    tensor,
)
from tiny import (
    FORMS,
    TINY,
    build_model,
    call_accumulate_gradients,
    load,
    make_args,
    make_batch,
    make_folder,
    make_tokenizer,
    pad_right,
    parse,
    read_jsonl,
    record,
    relative_error,
)

import grpo
import grpo_tools

SUM = "<think>12+34="


def sample(texts_of_tool, monkeypatch, prompts=("12+34=",), num_samples=8, temperature=1.5, model=TINY, **settings):
    """A batch of completions with these replies, its texts, and what the tool was asked."""
    asked = []
    monkeypatch.setattr(grpo_tools, "tool_fn", lambda text: asked.append(text) or texts_of_tool(text))
    model, tokenizer = load(grpo_tools, model)
    args = grpo_tools.Args(**{"max_completion_length": 24, "tool_tokens": 64, **settings})
    messages = [grpo_tools.as_messages(prompt, "") for prompt in prompts]
    rows = [{"prompt_ids": grpo_tools.encode_prompt(tokenizer, chat)} for chat in messages for _ in range(num_samples)]
    torch.manual_seed(0)
    policy, edit = grpo_tools.LogprobModel(model), grpo_tools.ToolUse(tokenizer, args)
    batch, texts = grpo_tools.sample_completions(policy, tokenizer, rows, temperature, args, edit)
    batch["action_mask"] = batch["completion_mask"] * batch["sampler_logprobs"].isfinite()
    return batch, texts, asked, model, tokenizer


def spell(batch, tokenizer):
    """The completions as texts, what was not drawn between guillemets, which no vocabulary here has."""
    texts = []
    for ids, mask, drawn in zip(batch["completion_ids"], batch["completion_mask"], batch["action_mask"]):
        parts = itertools.groupby(zip(ids[mask == 1].tolist(), drawn.tolist()), lambda pair: pair[1])
        parts = [(drawn, tokenizer.decode([i for i, _ in pairs])) for drawn, pairs in parts]
        texts.append("".join(text if drawn else f"«{text}»" for drawn, text in parts))
    return texts


def agree(batch, model, temperature=1.5):
    """Are the log-probabilities of what was drawn those of a forward pass over the whole completion?"""
    inputs = [batch[key] for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")]
    logprobs, _ = grpo_tools.token_logprobs(model, *inputs, temperature)
    drawn = batch["action_mask"].bool()
    return torch.allclose(logprobs[drawn], batch["sampler_logprobs"][drawn], atol=1e-4)


# ---- the calculator


# {text: what the calculator says after it}; from "So" on as real models write
REPLIES = {SUM: "46", "12+34=": "46", "<think>12+34=46;46+8=": "54"}
REPLIES |= dict.fromkeys(("…12+34=", SUM + "4", "<think>1+2+3=", ""), "")
REPLIES |= {"<think>1+" + "9" * 10 + "=": "", "So 12 + 34 =": " 46", "So 12 + 34 = ": "46", "1. In May: 48/2=": "24"}
REPLIES |= {"- 48 - 50 =": " -2", r"and $48 \times 2 =": " 96", r"so \(48 \cdot 2=": "96", "is $48 ÷ 2 =": " 24"}
REPLIES |= {"is **72 − 48 =": " 24", r"pay \$1,200 * \$1.50 =": " 1800", r"x &= 24 × 2 =": " 48"}
REPLIES |= {"about 10 / 4 =": " 2.5", "about 10 / 3 =": " 3.3333"}
REPLIES |= dict.fromkeys(("never 10 / 0 =", "never 10 / 0.00 =", "x + 12 + 34 =", "(1 + 2) * 3 + 4 =", "x^2 + 3 ="), "")
REPLIES |= dict.fromkeys(("It is 12 + 34", "He has 12 =", "It is -12 + 34 ="), "")


@pytest.mark.parametrize("text, reply", REPLIES.items())
def test_the_calculator(text, reply):
    assert grpo_tools.tool_fn(text) == reply


def test_the_system_prompt_of_real_models_teaches_a_call():
    call = grpo_tools.Args.system_prompt.partition("=")
    assert call[1] and grpo_tools.tool_fn("".join(call[:2])) == " 408"
    assert parse(grpo_tools).system_prompt == "" and "=" not in grpo.Args.system_prompt


def test_the_tool_is_asked_only_after_tokens_that_can_end_a_call(monkeypatch, tokenizer):
    """The newest token is looked at alone; the window is decoded where it has the ending."""
    asked, decoded, decode = [], [], tokenizer.decode

    def tool(text):
        asked.append(text)
        return ""

    ids = tokenizer("<think>12+34=46;46+8=54</think>", add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(ids) or decode(ids))
    monkeypatch.setattr(grpo_tools, "tool_fn", tool)
    for ends, times in (("=", 2), (";", 1), (None, len(ids))):
        del asked[:], decoded[:]
        if ends is not None:
            tool.ends = ends
        else:
            del tool.ends  # one that says nothing of it is asked after every token
        write = grpo_tools.ToolUse(tokenizer, grpo_tools.Args(tool_tokens=64))
        for t, i in enumerate(ids):
            write(t, torch.tensor([0]), torch.tensor([i]), torch.tensor([-0.5]), torch.tensor([False]))
        assert len(asked) == sum(isinstance(tokens, list) for tokens in decoded) == times
        assert all(text.endswith(ends or "") for text in asked)
    assert asked[-1] == decode(ids)


def test_the_shipped_tool_says_what_ends_its_calls():
    assert grpo_tools.tool_fn.ends == "="


@pytest.mark.parametrize("rollout_batch_size", [0, 5])
def test_several_calls_a_completion_and_what_they_leave(rollout_batch_size, monkeypatch):
    tool, prompts = grpo_tools.tool_fn, ["87+39+86+12=", "98+76=", "56+31+90+85="]
    settings = {"rollout_batch_size": rollout_batch_size, "max_completion_length": 48}
    batch, texts, asked, model, tokenizer = sample(tool, monkeypatch, prompts, **settings)
    spelled = spell(batch, tokenizer)
    assert max(text.count("«") for text in spelled) >= 3
    for text in spelled:
        for call in re.finditer("«([0-9]+)»", text):
            before = text[: call.start()].replace("«", "").replace("»", "")
            assert tool(before) == call[1]
    assert [re.sub("[«»]|<.end.>", "", text) for text in spelled] == texts
    assert agree(batch, model)
    assert len(asked) == batch["action_mask"].sum()  # after each token that was drawn
    assert not batch["truncated"].any()


def test_what_a_tool_says_is_read_by_what_follows(monkeypatch):
    """After a forced false result the rest of the sum goes on from it, mostly."""
    batch, texts, *_ = sample(lambda text: "99" if text.endswith("12+34=") else "", monkeypatch, ["12+34+11="], 64, 1.0)
    told = [text for text in texts if "12+34=99;" in text]
    assert len(told) > 5 and sum("99+11=" in text for text in told) > len(told) / 2


def test_what_is_drawn_where_a_reply_is_written_is_thrown_away(monkeypatch, tokenizer):
    """Be it a stop token, whose own reply would be another turn."""
    monkeypatch.setattr(grpo_tools, "tool_fn", lambda text: "46" if text.endswith(("=", "<|end|>")) else "")
    equals, end, four, six = tokenizer.convert_tokens_to_ids(["=", "<|end|>", "4", "6"])
    write = grpo_tools.ToolUse(tokenizer, grpo_tools.Args(tool_tokens=64))
    drawn = [([equals, four], [False, False]), ([end, end], [True, True]), ([end, end], [True, True])]
    written = []
    for t, (tokens, ended) in enumerate(drawn):
        draws = (torch.tensor([0, 1]), torch.tensor(tokens), torch.tensor([-0.5, -0.5]), torch.tensor(ended))
        written.append([values.tolist() for values in write(t, *draws)])
    assert written[0] == [[equals, four], [-0.5, -0.5], [False, False]]
    assert written[1] == [[four, end], [-math.inf, -0.5], [False, False]]  # the second row's end is answered
    assert written[2] == [[six, four], [-math.inf, -math.inf], [False, False]]


# ---- dialogues, on a model with other stop ids


@pytest.mark.parametrize("form", ["chatml", "gemma"])
def test_a_reply_to_a_stop_token_begins_another_turn(form, monkeypatch, tmp_path):
    tokenizer = make_tokenizer(*FORMS[form])
    end = FORMS[form][0][1]
    folder = make_folder(tmp_path / "model", tokenizer, initializer_range=0.3)
    turn = f"user: no{end}assistant: "
    user = lambda text: turn if text.endswith(end) and text.count(end) == 1 else ""  # noqa: E731
    settings = {"model": folder, "max_completion_length": 120, "tool_tokens": 120}
    batch, _, _, model, tokenizer = sample(user, monkeypatch, ["1+1="], 32, 2.0, **settings)
    spelled = spell(batch, tokenizer)
    of_two_turns = [text for text in spelled if "«" in text]
    assert len(of_two_turns) > 2
    turns = []
    for text in of_two_turns:
        first, rest = text.split("«")
        assert first.endswith(end) and first.count(end) == 1
        said, _, second = rest.partition("»")
        assert said == turn or (turn.startswith(said) and not second)  # cut at the limit
        turns.append(second)
    assert any(turns)
    assert any(not cut for cut in batch["truncated"].tolist())
    assert agree(batch, model, 2.0)


# ---- bad tools


FAILURES = [(ZeroDivisionError, lambda _: 1 / 0), (TypeError, lambda _: 5), (TypeError, lambda _: {"1"})]


@pytest.mark.parametrize("error, tool", FAILURES)
def test_a_tool_that_fails_or_replies_no_text_is_an_error(error, tool, monkeypatch):
    with pytest.raises(error):
        sample(tool, monkeypatch)


def test_endless_replies_are_cut(monkeypatch):
    batch, _, asked, _, tokenizer = sample(lambda _: "1" * 10**4, monkeypatch, tool_tokens=5)
    assert batch["completion_mask"].sum(1).tolist() == [24] * 8  # replies go on to the limit
    assert batch["truncated"].all()
    assert batch["action_mask"].tolist() == [([1] + [0] * 5) * 4] * 8
    assert {text.count("«11111»") for text in spell(batch, tokenizer)} == {4}
    cut = [text[1:] for text in asked if text[0] == "…"]  # a window, no more, and said to be the end of more
    assert max(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in cut) == 5


def test_nothing_said_is_none_too(monkeypatch):
    batch, *_ = sample(lambda _: None, monkeypatch)
    assert (batch["action_mask"] == batch["completion_mask"]).all()


# ---- the loss


def test_without_replies_it_is_grpo_without_kl_bit_for_bit(monkeypatch, tmp_path):
    monkeypatch.setattr(grpo_tools, "tool_fn", lambda _: "")
    sizes = {"num_steps": 2, "prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "eval_prompts": 8}
    lines = []
    for script, more in ((grpo, {"kl_coef": 0.0}), (grpo_tools, {})):
        script.main(parse(script, run_dir=tmp_path / script.__name__, **sizes, **more))
        lines.append(read_jsonl(tmp_path / script.__name__ / "metrics.jsonl"))
    kept = [
        [{key: row[key] for key in row if key[:5] != "perf/" and "tool" not in key} for row in run] for run in lines
    ]
    assert [row.pop("rollout/calls") for row in kept[1][1:]] == [0, 0]
    assert kept[0] == kept[1] and lines[1][1]["rollout/tool_tokens"] == 0
    states = [(tmp_path / name / "checkpoint" / "model.safetensors").read_bytes() for name in ("grpo", "grpo_tools")]
    assert states[0] == states[1]


@pytest.mark.usefixtures("alone")
def test_tokens_of_the_tool_have_no_part_in_loss_gradient_or_metrics():
    model = build_model("llama")
    policy, batch = grpo_tools.LogprobModel(model), make_batch(model)
    mask, rows, args = batch["action_mask"], torch.arange(8), make_args(grpo_tools)
    results = []
    for garbage in (0.0, -torch.inf):
        changed = torch.where(mask.bool(), batch["sampler_logprobs"], garbage)
        given = batch | {"sampler_logprobs": changed}
        totals = call_accumulate_gradients(grpo_tools, policy, given, rows, args)
        results.append((totals, torch.cat([weight.grad.flatten() for weight in model.parameters()])))
        model.zero_grad()
    (totals, gradient), (other_totals, other_gradient) = results
    assert gradient.norm() > 0 and torch.equal(gradient, other_gradient) and totals == other_totals
    assert totals["num_tokens"] == mask.sum() < batch["completion_mask"].sum()


def test_expected_gradient_is_that_of_the_expected_reward():
    """Over all completions of a tiny model whose token 2 is always followed by 3, which the tool says."""
    model, prompt, length, temperature = build_model("llama", vocab_size=5), [4, 0, 2], 4, 0.7
    said, stop = {2: 3}, 1

    def complete(ids=(), drawn=()):
        if ids and (len(ids) == length or (ids[-1] == stop and drawn[-1])):
            yield list(ids), list(drawn)
        elif ids and drawn[-1] and ids[-1] in said:
            yield from complete((*ids, said[ids[-1]]), (*drawn, 0))
        else:
            for token in range(5):
                yield from complete((*ids, token), (*drawn, 1))

    completions, masks = zip(*complete())
    prompts = grpo_tools.pad_left([{"prompt_ids": prompt}] * len(completions), "cpu")
    (ids, mask), (drawn, _) = pad_right(list(completions), length), pad_right(list(masks), length)
    logprobs, _ = grpo_tools.token_logprobs(model, *prompts, ids, mask, temperature)
    probabilities = (logprobs * drawn).sum(1).exp()
    assert probabilities.sum().item() == pytest.approx(1, rel=1e-12)
    rewards = torch.tensor([(sum(c) + len(c)) % 3 for c in completions]).double()
    advantages = (rewards - (probabilities * rewards).sum()).detach() * probabilities.detach() * drawn.sum(1)

    def error(mask):
        loss, _ = grpo_tools.policy_loss(
            logprobs, logprobs.detach(), advantages * mask.sum(1) / drawn.sum(1), mask, 0.2
        )
        return relative_error(-gradient_of(model, loss), gradient_of(model, (probabilities * rewards).sum()))

    assert error(drawn) < 1e-9
    assert error(mask) > 0.01  # with the tool's tokens trained, too


def test_how_often_the_tool_was_used_by_hand(monkeypatch, tmp_path):
    """Every completion is an answer of a digit that the tool gives, and an end."""
    replies = {"\\boxed{": "7}"}
    monkeypatch.setattr(grpo_tools, "tool_fn", replies.get)
    monkeypatch.setattr(grpo_tools, "reward_fn", lambda completion, _: float(len(completion)))
    rollouts, run = record(monkeypatch, grpo_tools, "sample_completions"), tmp_path / "run"
    sizes = {"num_steps": 1, "prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "eval_prompts": 4}
    grpo_tools.main(parse(grpo_tools, run_dir=run, **sizes))
    line = read_jsonl(run / "metrics.jsonl")[1]
    texts = next(texts for _, (batch, texts) in rollouts if "advantages" in batch)
    calls = sum(text.startswith("\\boxed{7}") for text in texts)
    assert 0 < calls < 16
    assert line["rollout/tool_use"] == line["rollout/calls"] == pytest.approx(calls / 16)
    assert line["rollout/tool_tokens"] == pytest.approx(2 * calls / 16)
    evaluated = read_jsonl(run / "eval_samples.jsonl")
    assert any("\\boxed{7}" in row["completion"] for row in evaluated)  # evaluations have the tool, too


def test_calls_are_counted_each(monkeypatch, tmp_path):
    """A reply after every digit that was drawn: some completions have several."""
    tool = lambda text: ";" if text[-1:].isdigit() else ""  # noqa: E731
    monkeypatch.setattr(grpo_tools, "tool_fn", tool)
    rollouts, run = record(monkeypatch, grpo_tools, "sample_completions"), tmp_path / "run"
    sizes = {"num_steps": 1, "prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "eval_prompts": 0}
    grpo_tools.main(parse(grpo_tools, run_dir=run, **sizes))
    [line], [(_, (batch, _))] = read_jsonl(run / "metrics.jsonl"), rollouts
    runs = [
        sum(not drawn for drawn, _ in itertools.groupby(row[mask == 1].isfinite().tolist()))
        for row, mask in zip(batch["sampler_logprobs"], batch["completion_mask"])
    ]
    assert max(runs) > 1 and line["rollout/calls"] == pytest.approx(sum(runs) / 16)
    assert line["rollout/tool_use"] == pytest.approx(sum(count > 0 for count in runs) / 16)


@pytest.mark.parametrize("reply", ["", "7"])
def test_rollouts_without_any_call_are_told_of(reply, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(grpo_tools, "tool_fn", lambda _: reply)
    sizes = {"num_steps": 2, "prompts_per_step": 4, "group_size": 4, "minibatch_size": 8, "eval_prompts": 0}
    grpo_tools.main(parse(grpo_tools, run_dir=tmp_path / "run", **sizes))
    told = [text for text in capsys.readouterr().out.splitlines() if "tool_fn" in text]
    expected = "tool_fn replied to no completion, so that this step is plain GRPO"
    assert told == [f"step {step}: {expected}" for step in (1, 2)] * (reply == "")


# ---- the loss by hand, advantages, and what does not matter

# Two completions of three tokens with ratios 1.5, 2, 0.5 and 1.5, 0.5, 1; the last column is padding.
RATIOS = tensor([[1.5, 2.0, 0.5, 9.0], [1.5, 0.5, 1.0, 9.0]])
LOGPROBS = tensor([[-1.0, -2.0, -3.0, -4.0], [-0.5, -1.5, -2.5, -3.5]])
INPUTS = {
    "logprobs": LOGPROBS,
    "old_logprobs": LOGPROBS - RATIOS.log(),
    "advantages": tensor([2.0, -1.0]),
    "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]]),
} | WITHOUT_KL


def test_loss_gradient_and_metrics_by_hand():
    # Ratios are clipped to 0.8 .. 1.2; -min(r A, clip(r) A) for each token, then the mean over the three tokens.
    loss = (-2.4 - 2.4 - 1.0 + 1.5 + 0.8 + 1.0) / 3
    gradient = [[0.0, 0.0, -1 / 3, 0.0], [1.5 / 3, 0.0, 1 / 3, 0.0]]  # -r A where not clipped
    # approx_kl is the sum over tokens of r - log r - 1.
    kl = (0.5 - math.log(1.5)) + (1 - math.log(2)) + (math.log(2) - 0.5)
    kl += (0.5 - math.log(1.5)) + (math.log(2) - 0.5) + 0
    metrics = {"approx_kl": kl, "clip_fraction_low": 1, "clip_fraction_high": 2}
    check_by_hand(grpo_tools, INPUTS, loss, gradient, metrics)


@pytest.mark.parametrize("advantage, ratio, gradient", CLIP_CASES)
def test_where_the_clip_stops_the_gradient(advantage, ratio, gradient):
    check_clip(grpo_tools, advantage, ratio, gradient)


@pytest.mark.parametrize("advantage, ratio, low, high", COUNTED_AS_CLIPPED)
def test_what_counts_as_clipped(advantage, ratio, low, high):
    check_counted_as_clipped(grpo_tools, advantage, ratio, low, high)


@each_invariance
def test_what_does_not_matter(check):
    check(grpo_tools)


def test_advantages_are_centred_and_0_without_a_difference():
    check_advantages(grpo_tools, grpo_tools.compute_advantages)


def test_advantages_are_those_of_trl():
    check_advantages_of_others(grpo_tools.compute_advantages, "trl_group", rtol=1e-6)


def test_expected_gradient_of_groups_of_two():
    check_gradient_of_groups_of_two(grpo_tools, over_lengths=True)
