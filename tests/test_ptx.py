"""ppo_rlhf.py --ptx-coef: its gradient against the plain log-likelihood, the texts it reads, runs with and without."""

import pytest
import torch
from preference_ranks import TEXTS, build_actor_critic
from tiny import parse, read_jsonl, record, relative_error, write_rows

import ppo_rlhf

SMALL = {"num_steps": 1, "prompts_per_step": 8, "minibatch_size": 4, "max_completion_length": 8, "eval_prompts": 0}
SMALL |= {"reward_model": "none", "update_epochs": 1, "seed": 3}


# ---- the gradient


def gradients(policy, budget=10_000, coef=0.7):
    """The returned mean, and the gradients of policy and value model."""
    policy.zero_grad()
    args = ppo_rlhf.Args(ptx_coef=coef, microbatch_tokens=budget, temperature=0.5)
    mean = ppo_rlhf.accumulate_ptx(policy, ppo_rlhf.collate(TEXTS, "cpu"), args)
    found = torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])
    return mean, found, [parameter.grad for parameter in policy.critic.parameters()]


@pytest.mark.usefixtures("alone")
def test_gradient_is_that_of_the_plain_log_likelihood_of_the_trained_tokens():
    """Row by row without padding, by Hugging Face's own forward pass; at temperature 1, whatever samples."""
    policy, losses = build_actor_critic(), []
    for text in TEXTS:
        start, ids = len(text["prompt_ids"]), text["prompt_ids"] + text["completion_ids"]
        logprobs = policy.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        losses += [-logprobs[t - 1, ids[t]] for t in range(start, len(ids))]
    expected = torch.autograd.grad(torch.stack(losses).mean(), list(policy.model.parameters()))
    mean, found, of_values = gradients(policy)
    assert mean == pytest.approx(sum(losses).item() / len(losses), rel=1e-12)
    assert relative_error(found, 0.7 * torch.cat([gradient.flatten() for gradient in expected])) < 1e-12
    assert all(gradient is None for gradient in of_values)


@pytest.mark.usefixtures("alone")
def test_microbatches_change_neither_gradient_nor_mean():
    """And it is added to what is there."""
    policy = build_actor_critic()
    mean, whole, _ = gradients(policy)
    for budget in (1, 20, 40):
        found = gradients(policy, budget)
        assert found[0] == pytest.approx(mean, rel=1e-12) and relative_error(found[1], whole) < 1e-12
    args = ppo_rlhf.Args(ptx_coef=0.7, microbatch_tokens=30)
    ppo_rlhf.accumulate_ptx(policy, ppo_rlhf.collate(TEXTS, "cpu"), args)
    both = torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])
    assert relative_error(both, 2 * whole) < 1e-12


# ---- texts


TURNS = {"prompt": "1+2=", "completion": "3"}
OF_TURNS = ("<|user|>1+2=<|assistant|>", "3<|end|>")


CHAT = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
UNFIT = "without a user's turn before the assistant's turn"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "rows, parts, dropped",
    [
        ([{"text": "12+34=46"}, {"text": "1+2=3"}], [("1", "2+34=4"), ("1", "+2=3")], {}),
        ([{"text": ""}, {"text": "7"}, {"text": "1+"}], [("1", "+")], {"without a text": 2}),
        ([TURNS, TURNS | {"prompt": "1+" * 9}], [OF_TURNS], {"too long": 1}),
        ([TURNS, TURNS | {"completion": "1" * 6}], [OF_TURNS], {"too long": 1}),
        ([TURNS, TURNS | {"completion": " "}], [OF_TURNS], {"without a completion": 1}),
        ([{"question": "1+2=", "response": "3"}, {"question": None, "response": "3"}], [OF_TURNS], {UNFIT: 1}),
        ([{"messages": CHAT}, {"messages": CHAT[1:]}], [OF_TURNS], {UNFIT: 1}),
    ],
)
def test_rows_with_text_or_as_in_sft(tmp_path, capsys, tokenizer, rows, parts, dropped):
    """What is trained follows a prompt, or the first token of a text, which is cut to 6 more."""
    dataset = write_rows(tmp_path / "texts.jsonl", rows)
    args = ppo_rlhf.Args(ptx_dataset=dataset, max_prompt_length=8, max_completion_length=6, system_prompt="")
    texts = ppo_rlhf.load_texts(args, tokenizer)
    assert [(tokenizer.decode(text["prompt_ids"]), tokenizer.decode(text["completion_ids"])) for text in texts] == parts
    said = f"{len(parts)} training rows of {dataset}, split train, dropped: {dropped}\n"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    "row, message", [({"text": {"a": 1}}, "text"), ({"words": "a"}, "prompt, question, problem .* words")]
)
def test_a_row_that_cannot_be_read_is_named(tmp_path, row, message):
    dataset = write_rows(tmp_path / "texts.jsonl", [row])
    with pytest.raises(SystemExit, match=f"^{dataset}, training row 0: ValueError.*{message}.*; the row is {{'"):
        run(tmp_path / "mine", ptx_coef=1.0, ptx_dataset=dataset)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("text", ["7", "", None])
def test_without_a_text_that_fits_nothing_is_trained(tmp_path, text):
    dataset = write_rows(tmp_path / "texts.jsonl", [{"text": text}] * 2)
    with pytest.raises(SystemExit, match=f"0 training rows of {dataset}, .* dropped: {{'without a text': 2}}"):
        run(tmp_path / "run", ptx_coef=1.0, ptx_dataset=dataset)
    assert not (tmp_path / "run").exists()


# ---- runs


def run(folder, **settings):
    ppo_rlhf.main(parse(ppo_rlhf, run_dir=folder, **SMALL | settings))
    return read_jsonl(folder / "metrics.jsonl")


def test_without_it_no_text_is_read(tmp_path):
    [line] = run(tmp_path / "run", ptx_dataset="no_such_file.jsonl")
    assert "loss/ptx" not in line and line["loss/value"] > 0


def test_every_optimizer_step_has_as_many_texts_as_completions(tmp_path, monkeypatch):
    """In the order of pick_rows, over the steps of the run; the metric is their mean, before the coefficient."""
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(10, 21)]
    write_rows(tmp_path / "texts.jsonl", rows)
    calls = record(monkeypatch, ppo_rlhf, "accumulate_ptx")
    lines = run(tmp_path / "run", num_steps=2, ptx_coef=0.5, ptx_dataset=str(tmp_path / "texts.jsonl"))
    seen, means = sum((batch["prompt_ids"].tolist() for (_, batch, _), _ in calls), []), [mean for _, mean in calls]
    assert len(means) == 4 and len(seen) == 16
    assert len({*map(tuple, seen[:11])}) == 11  # a pass over all before any comes again
    assert [line["loss/ptx"] for line in lines] == pytest.approx([sum(means[:2]) / 2, sum(means[2:]) / 2])
