"""GKD: divergences, exact gradients, and what main does with teacher and data: python -m pytest tests/test_gkd.py"""

import math

import pytest
import torch
import toy
from scripted import run
from test_exact_gradients import TEMPERATURE, enumerate_rows
from torch.testing import assert_close
from toy import COMPLETIONS, PROMPTS, SIZES, TINY, add_pairs, build_model, gradient_of, pad, relative_error
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config

import gkd

JSD = {"divergence": "jsd", "jsd_beta": 0.3, "temperature": TEMPERATURE}


def plain_divergence(student, teacher, kind):
    """D(teacher || student) of probabilities (N, V), a sum over the vocabulary: (N,)."""
    pairs = {"forward_kl": [(1, teacher, student)], "reverse_kl": [(1, student, teacher)]}
    mixture = 0.3 * teacher + 0.7 * student
    pairs["jsd"] = [(0.3, teacher, mixture), (0.7, student, mixture)]
    return sum(weight * (p * (p / q).log()).sum(-1) for weight, p, q in pairs[kind])


def distributions(model, ids):
    """The model's probabilities of each token but the first of a sequence (L - 1, 11), by its own logits."""
    return (model(ids.unsqueeze(0)).logits[0, :-1, :11] / TEMPERATURE).softmax(-1)


def compare(model, teacher, ids, mask, **settings):
    """What the student's forward returns: divergences, log-probabilities and entropies."""
    hidden = gkd.Teacher(teacher, "float32")(ids, mask)
    return gkd.Policy(model, "float32")(ids, mask, teacher, hidden, gkd.Args(**JSD | settings))


BY_HAND = [("forward_kl", 3 / 4 * math.log(2) + 1 / 4 * math.log(2 / 5))]
BY_HAND += [("reverse_kl", -3 / 8 * math.log(2) + 5 / 8 * math.log(5 / 2))]
# The mixture, a quarter of the teacher and three of the student, is 5/16, 5/32 and 17/32.
OF_TEACHER = 3 / 4 * math.log(8 / 5) + 1 / 4 * math.log(8 / 17)
BY_HAND += [("jsd", 1 / 4 * OF_TEACHER + 3 / 4 * (3 / 8 * math.log(4 / 5) + 5 / 8 * math.log(20 / 17)))]


@pytest.mark.parametrize("kind, expected", BY_HAND)
def test_divergence_by_hand(kind, expected):
    """Three words; of the second token, teacher and student think the same."""
    teacher, student = torch.tensor([[2, 1, 1], [2, 1, 5]], dtype=torch.float64) / torch.tensor([[4], [8]])
    logprobs, teacher_logprobs = torch.stack([student, teacher]).log(), torch.stack([teacher, teacher]).log()
    found = gkd.token_divergence(logprobs, teacher_logprobs, kind, 0.25)
    assert found.tolist() == pytest.approx([expected, 0.0], rel=1e-12, abs=1e-15)


def test_loss_by_hand():
    """Tokens of 0.2 and 0.6 nats, and one of 3: means of 0.4 and 3. What stands outside the mask does not count."""
    divergences = torch.tensor([[math.nan, 0.2, 0.6], [9.0, 3.0, math.inf], [7.0, 7.0, 7.0]]).requires_grad_()
    mask = torch.tensor([[0, 1, 1], [0, 1, 0], [0, 0, 0]])
    for given in (mask, mask.bool(), mask.float()):
        loss, metrics = gkd.distillation_loss(divergences, given)
        [gradient] = torch.autograd.grad(loss, divergences)
        assert loss.item() == pytest.approx(3.4)
        assert_close(gradient, torch.tensor([[0.0, 0.5, 0.5], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
        assert add_pairs([metrics]) == {"loss/distillation": (pytest.approx(3.4), 2)}  # the last is a filler


@pytest.mark.parametrize("case", toy.read_oracle("gkd_trl"))
def test_divergences_are_those_of_trl(case):
    """There a beta of 0 is the forward KL and 1 the reverse one; between them the teacher weighs beta, as here."""
    beta, temperature = case["config"].values()
    given = {name: toy.tensor(values) for name, values in case["inputs"].items()}
    student, mask = given["student_logits"].requires_grad_(), given["mask"].flatten()
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    logprobs = [(x.flatten(0, 1) / temperature).log_softmax(-1) for x in (student, given["teacher_logits"])]
    loss = (gkd.token_divergence(*logprobs, kind, beta) * mask).sum() / mask.sum()
    [gradient] = torch.autograd.grad(loss, student)
    assert loss.item() == pytest.approx(case["outputs"]["loss"], rel=1e-9)
    assert_close(gradient, toy.tensor(case["outputs"]["grad_student_logits"]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_expected_gradient_is_that_of_the_objective(kind):
    """Over every completion: the mean divergence of its tokens, with no gradient through what is sampled."""
    model, ids, mask, _, exact, probabilities = enumerate_rows(3)
    teacher = build_model("qwen3", vocab_size=5, scale=3.0)
    chances, objective = probabilities.detach().float(), 0.0
    for chance, row, kept in zip(chances, ids, mask.bool()):
        divergence = plain_divergence(distributions(exact, row), distributions(teacher, row).detach(), kind)
        objective = objective + chance * divergence[kept[1:]].mean()
    divergences, logged, entropies = compare(model, teacher.float(), ids, mask, divergence=kind)
    assert not logged.requires_grad and not entropies.requires_grad  # a graph would keep all logits
    loss, _ = gkd.distillation_loss(chances.unsqueeze(1) * divergences, mask)
    assert relative_error(gradient_of(model, loss).double(), gradient_of(exact, objective)) < 1e-5
    if kind == "reverse_kl":  # a policy gradient with the advantage log π_T - log π_θ has the expectation of the sum
        logprobs, _ = toy.EVERY["grpo"].Policy(model, "float32")(ids, mask, TEMPERATURE)
        torch.testing.assert_close(logged, logprobs.detach(), rtol=1e-5, atol=1e-5)
        _, teacher_logprobs, _ = compare(teacher, teacher, ids, mask)
        sampled = ((logprobs - teacher_logprobs).detach() * logprobs).sum(1)
        right = gradient_of(model, (chances * divergences.sum(1)).sum())
        assert relative_error(gradient_of(model, (chances * sampled).sum()), right) < 1e-5


CAPPED = Gemma2Config(**SIZES, num_key_value_heads=1, head_dim=8, final_logit_softcapping=5.0)
PAIRS = [("llama", 11, "qwen3", 11), (CAPPED, 11, "qwen3", 11), ("gpt2", 11, CAPPED, 13), ("qwen3", 13, "llama", 11)]


@pytest.mark.parametrize("student, size, teacher, teacher_size", PAIRS)
def test_tokens_are_compared_as_each_sequence_alone_would_be(student, size, teacher, teacher_size, monkeypatch):
    """By the logits that both models have (as of Qwen2.5), with caps; in chunks, of which none is kept."""
    ids, mask = pad(PROMPTS, COMPLETIONS)
    mask[2, 7], mask[5] = 0, 0  # a gap, and a row without any token
    model = build_model(student, size, dtype=torch.float32)
    teacher = build_model(teacher, teacher_size, dtype=torch.float32)
    expected = []
    for row in ids:
        of_model, of_teacher = distributions(model, row), distributions(teacher, row).detach()
        values = [plain_divergence(of_model, of_teacher, "jsd"), of_model[range(len(row) - 1), row[1:]].log()]
        values.append(-(of_model * of_model.log()).sum(-1))
        expected.append(torch.nn.functional.pad(torch.stack(values), (1, 0)))
    expected = torch.stack(expected, 1) * mask  # (3, B, L)
    monkeypatch.setattr(gkd, "LOGITS_AT_ONCE", 220)  # ten tokens of two models, or eight
    rows = []
    for each in (model, teacher):
        each.get_output_embeddings().register_forward_hook(lambda _module, _inputs, output: rows.append(len(output)))
    found = compare(model, teacher, ids, mask)
    assert_close(torch.stack(found), expected, rtol=1e-3, atol=1e-4)
    assert max(rows) <= 10 and sum(rows) == 2 * mask.sum() and not found[2].requires_grad
    gradient = gradient_of(model, found[0].sum())
    assert relative_error(gradient, gradient_of(model, expected[0].sum())) < 1e-3 and sum(rows) == 4 * mask.sum()


STEPS = [({"microbatch_tokens": 1}, 4), ({"gradient_checkpointing": True, "on_policy_fraction": 0.25}, 2)]
STEPS += [({"on_policy_fraction": 0.0}, 0), ({"on_policy_fraction": 1.0}, 8)]


@pytest.mark.parametrize("settings, num_sampled", STEPS)
def test_the_update_is_the_gradient_of_the_mean_loss(settings, num_sampled, tmp_path, monkeypatch):
    calls = toy.record(monkeypatch, gkd, "microbatches")
    settings = JSD | {"num_steps": 1, "prompts_per_step": 8, "on_policy_fraction": 0.5} | settings
    found = run(gkd, tmp_path, monkeypatch, source="addition/sft.jsonl", **settings)  # rows without answers
    batches = [batch for (batch, *_), _ in calls]
    assert [len(batch["ids"]) for batch in batches] == [count for count in (num_sampled, 8 - num_sampled) if count]
    tokenizer, device, line = AutoTokenizer.from_pretrained(TINY), torch.device("cpu"), found["metrics"][1]
    policy, teacher = (load(gkd.TINY, tokenizer, device) for load in (gkd.load_policy, gkd.load_teacher))
    texts = {row["prompt"]: row["completion"] for row in toy.read_jsonl(tmp_path / "rows.jsonl")}
    loss, entropies, prompts = 0.0, [], []
    for batch in batches:
        mask = batch["completion_mask"].bool()
        divergences, logprobs, entropy = compare(policy.model, teacher.model, batch["ids"], mask)
        loss = loss + (divergences.sum(1) / mask.sum(1)).sum() / 8
        entropies += entropy[mask].tolist()
        if "sampler_logprobs" in batch:
            kl = gkd.k3((logprobs - batch["sampler_logprobs"])[mask]).mean()
            assert line["policy/sampler_kl"] == pytest.approx(kl.item(), rel=1e-4) and kl > 1e-3
        for ids, kept, length in zip(batch["ids"], mask, batch["total_lengths"]):
            prompts.append(tokenizer.decode(ids[: kept.nonzero().min()])[8:-13])  # between <|user|> and <|assistant|>
            text = tokenizer.decode(ids[kept]).removesuffix("<|end|>")
            assert "sampler_logprobs" in batch or text == texts.get(prompts[-1])
            assert ids[length - 1] == tokenizer.eos_token_id and not ids[length:].any()
    assert len({*prompts} & {*texts}) == 8
    assert relative_error(found["gradients"][0], gradient_of(policy, loss)) < 1e-4
    assert line["loss/distillation"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["policy/entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)
    assert ("policy/sampler_kl" in line) == ("rollout/length_mean" in line) == (num_sampled > 0)
    assert len(toy.read_jsonl(tmp_path / "run/samples.jsonl")) == min(num_sampled, 4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_teacher_stays_as_it_is(precision, tmp_path, monkeypatch):
    dtype, loaded = getattr(torch, precision), toy.record(monkeypatch, gkd, "load_teacher")
    toy.train(gkd, tmp_path, precision=precision, num_steps=1)
    given = AutoModelForCausalLM.from_pretrained(gkd.TINY.teacher).state_dict()
    for name, weight in loaded[0][1].model.named_parameters():
        assert weight.dtype == (torch.float32 if name == "lm_head.weight" else dtype) and not weight.requires_grad
        assert torch.equal(weight.to(dtype), given[name].to(dtype))


@pytest.mark.parametrize("form", toy.FORMS)
def test_completions_are_what_follows_the_prompt_in_the_whole_chat_and_rows_without_are_left_out(form, capsys):
    args, tokenizer = gkd.Args(max_completion_length=24), toy.make_tokenizer(*toy.FORMS[form])
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "so 2"}]
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
    completions = ["so 2", "", None, "8" * 23, "8" * 24, chat[1:]]
    rows = gkd.add_completions([{"prompt_ids": prompt, "response": text} for text in completions], args, tokenizer)
    ids = [row["prompt_ids"] + row["completion_ids"] for row in rows]
    whole = tokenizer.apply_chat_template(chat, return_dict=False)
    assert ids[0] == ids[2] == whole[: len(ids[0])] and len(ids[1]) == len(prompt) + 24 and len(ids) == 3
    assert ids[0][-1] == gkd.find_turn_end(tokenizer) and "3 training rows" in capsys.readouterr().out


WRONG = [({"teacher": ""}, "--teacher must"), ({"teacher": "other"}, "another vocabulary")]
WRONG += [({"on_policy_fraction": 1.1}, "at most 1"), ({"on_policy_fraction": 0.5}, "needs a column completion")]


@pytest.mark.parametrize("settings, message", WRONG)
def test_what_cannot_work_is_said_before_training(settings, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    toy.make_folder("other", toy.make_tokenizer(*toy.FORMS["chatml"]))
    with pytest.raises(SystemExit, match=message):
        toy.train(gkd, tmp_path, **settings)


@pytest.mark.usefixtures("alone")
def test_noise_is_for_trained_weights_only():
    args, tokenizer = toy.parse(gkd, precision="bfloat16"), AutoTokenizer.from_pretrained(toy.TINY)
    student = gkd.load_policy(args, tokenizer, torch.device("cpu")).state_dict()
    teacher = gkd.load_teacher(args, tokenizer, torch.device("cpu")).state_dict()
    given = AutoModelForCausalLM.from_pretrained(args.teacher, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(teacher[f"model.{name}"].float(), weight.float()) for name, weight in given.items())
    assert any((weight != weight.bfloat16()).any() for weight in student.values())


def test_the_default_run_cut_short_learns_and_a_teacher_of_itself_has_nothing_to_teach(tmp_path):
    settings = {"dataset": None, "prompts_per_step": 32, "max_completion_length": 48, "eval_prompts": 128}
    first, *lines = toy.train(gkd, tmp_path, num_steps=12, eval_every=12, **settings)
    losses = [line["loss/distillation"] for line in lines]  # of 32 completions each
    assert sum(losses[-4:]) / 4 < 0.3 * sum(losses[:3]) / 3
    assert lines[-1]["eval/accuracy"] > first["eval/accuracy"] + 0.2
    first, line = toy.train(gkd, tmp_path, model=gkd.TINY.teacher, run_dir=tmp_path / "same", num_steps=1, **settings)
    assert first["eval/accuracy"] > 0.95 and line["loss/distillation"] == 0  # grpo.py has made it of the student
