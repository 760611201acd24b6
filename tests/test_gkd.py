"""GKD: divergences, exact gradients, and what main does with teacher and data: python -m pytest tests/test_gkd.py"""

import math

import pytest
import torch
from helpers import MAX_LENGTH, TEMPERATURE, enumerate_rows, gradient_of, read_oracle, tensor, train
from processes import Ranks, finish, logged, start
from tiny import (
    FORMS,
    ROOT,
    SIZES,
    TINY,
    add_pairs,
    build_model,
    exit_line,
    few_rows,
    load,
    make_batch,
    make_folder,
    make_tokenizer,
    parse,
    read_jsonl,
    record,
    relative_error,
    shares_changed,
    user,
    write_jsonl,
)
from torch.testing import assert_close
from transformers import CohereConfig, Gemma2Config

import gkd
import ppo_rlhf

pytestmark = pytest.mark.usefixtures("alone")
TEACHER = ROOT / "models" / "tiny-teacher"
KINDS = ["forward_kl", "reverse_kl", "jsd"]
NAMES = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
each_kind = pytest.mark.parametrize("kind", KINDS)


def plain_divergence(student, teacher, kind, beta):
    """D(teacher || student) of probabilities (N, V), a sum over the vocabulary: (N,)."""
    if kind == "forward_kl":
        return (teacher * (teacher / student).log()).sum(-1)
    if kind == "reverse_kl":
        return (student * (student / teacher).log()).sum(-1)
    mixture = beta * teacher + (1 - beta) * student
    of_teacher = teacher * (teacher / mixture).log()
    return (beta * of_teacher + (1 - beta) * student * (student / mixture).log()).sum(-1)


def next_probabilities(model, row):
    """The distribution before each token of a completion (n, V), from plain logits of the sequence alone."""
    prompt_ids, prompt_mask, completion_ids, completion_mask = row
    prompt = prompt_ids[prompt_mask.bool()]
    ids = torch.cat([prompt, completion_ids[completion_mask.bool()]]).unsqueeze(0)
    return (model(ids).logits[0, len(prompt) - 1 : -1] / TEMPERATURE).softmax(-1)


def compare(model, teacher, batch, **settings):
    """What the student's forward returns: divergences, log-probabilities and entropies."""
    args = gkd.Args(**{"temperature": TEMPERATURE} | settings)
    with torch.no_grad():
        teacher_hidden = gkd.TeacherModel(teacher)(batch)
    return gkd.StudentModel(model)(batch, teacher, teacher_hidden, args)


# ---- by hand


HALVES, LAST = tensor([1 / 2, 1 / 4, 1 / 4]), tensor([1 / 4, 1 / 8, 5 / 8])  # of teacher and student
BY_HAND = {
    "forward_kl": 3 / 4 * math.log(2) + 1 / 4 * math.log(2 / 5),
    "reverse_kl": -3 / 8 * math.log(2) + 5 / 8 * math.log(5 / 2),
    # The mixture, a quarter of the teacher and three of the student, is 5/16, 5/32 and 17/32.
    "jsd": 1 / 4 * (3 / 4 * math.log(8 / 5) + 1 / 4 * math.log(8 / 17))
    + 3 / 4 * (3 / 8 * math.log(4 / 5) + 5 / 8 * math.log(20 / 17)),
}


@each_kind
def test_divergence_by_hand(kind):
    """Three words; of the second token, teacher and student think the same."""
    logprobs, teacher_logprobs = torch.stack([LAST, HALVES]).log(), torch.stack([HALVES, HALVES]).log()
    found = gkd.token_divergence(logprobs, teacher_logprobs, kind, 0.25)
    assert_close(found, tensor([BY_HAND[kind], 0.0]), rtol=1e-12, atol=1e-15)


def test_loss_by_hand():
    """Two tokens of 0.2 and 0.6 nats, and one of 3: means of 0.4 and 3. What stands at masked places does not count."""
    divergences = tensor([[0.2, 0.6, math.nan], [3.0, 9.0, math.inf], [7.0, 7.0, 7.0]]).requires_grad_()
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    for given in (mask, mask.bool(), mask.float()):
        divergences.grad = None
        loss, metrics = gkd.distillation_loss(divergences, given)
        loss.backward()
        assert loss.item() == pytest.approx(3.4)
        assert_close(divergences.grad, tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
        assert add_pairs([metrics]) == {"loss/distillation": (pytest.approx(3.4), 2)}  # the last is a filler


# ---- another library's numbers


@pytest.mark.parametrize("case", read_oracle("gkd_trl"), ids=lambda case: case["name"])
def test_divergences_are_those_of_trl(case):
    """There a beta of 0 is the forward KL and 1 the reverse one; between them the teacher weighs beta, as here."""
    beta, temperature = case["config"].values()
    student, teacher, mask = (tensor(case["inputs"][name]) for name in ("student_logits", "teacher_logits", "mask"))
    student.requires_grad_()
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    logprobs, teacher_logprobs = (logits.flatten(0, 1) / temperature for logits in (student, teacher))
    found = gkd.token_divergence(logprobs.log_softmax(-1), teacher_logprobs.log_softmax(-1), kind, beta)
    loss = (found * mask.flatten()).sum() / mask.sum()
    loss.backward()
    assert loss.item() == pytest.approx(case["outputs"]["loss"], rel=1e-9)
    assert_close(student.grad, tensor(case["outputs"]["grad_student_logits"]), rtol=1e-9, atol=1e-12)


def test_jsd_nears_both_kls_at_its_ends():
    """JSD(β) / β is the forward KL for a small β, and JSD(β) / (1 - β) the reverse one for a large β (section 2)."""
    logprobs, teacher_logprobs = LAST.log().unsqueeze(0), HALVES.log().unsqueeze(0)
    low, high = (gkd.token_divergence(logprobs, teacher_logprobs, "jsd", beta).item() for beta in (1e-6, 1 - 1e-6))
    assert low / 1e-6 == pytest.approx(BY_HAND["forward_kl"], rel=1e-4)
    assert high / 1e-6 == pytest.approx(BY_HAND["reverse_kl"], rel=1e-4)


# ---- the exact gradient


@each_kind
def test_expected_gradient_is_that_of_the_objective(kind):
    """Over every completion: the mean divergence of its tokens, with no gradient through what is sampled."""
    rows = enumerate_rows()
    batch = dict(zip(NAMES, rows["inputs"]))
    teacher = build_model("qwen3", vocab_size=5, scale=3.0)
    chances = rows["probabilities"].detach()
    exact = 0.0
    for chance, row in zip(chances, zip(*rows["inputs"])):
        student, target = next_probabilities(rows["model"], row), next_probabilities(teacher, row).detach()
        exact = exact + chance * plain_divergence(student, target, kind, 0.3).mean()
    divergences, _, _ = compare(rows["model"], teacher, batch, divergence=kind, jsd_beta=0.3)
    losses = [gkd.distillation_loss(row[None], mask[None])[0] for row, mask in zip(divergences, rows["mask"])]
    loss = (chances * torch.stack(losses)).sum()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-12)
    assert relative_error(gradient_of(rows["model"], loss), gradient_of(rows["model"], exact)) < 1e-9
    assert all(weight.grad is None for weight in teacher.parameters())


def test_reverse_kl_is_the_expectation_of_what_sampled_tokens_would_give():
    """A policy gradient with the advantage log π_T - log π_θ of each sampled token has the same expectation."""
    rows = enumerate_rows()
    batch = dict(zip(NAMES, rows["inputs"]))
    teacher = build_model("llama", vocab_size=5, scale=3.0)
    lengths = torch.full_like(rows["lengths"], MAX_LENGTH)  # one divisor, because a length depends on what follows
    chances = rows["probabilities"].detach()
    divergences, logprobs, _ = compare(rows["model"], teacher, batch, divergence="reverse_kl")
    teacher_logprobs, _ = ppo_rlhf.token_logprobs(teacher, *rows["inputs"], TEMPERATURE)
    sampled = ((logprobs - teacher_logprobs).detach() * logprobs).sum(1)
    exact = gradient_of(rows["model"], (chances * divergences.sum(1) / lengths).sum())
    assert relative_error(gradient_of(rows["model"], (chances * sampled / lengths).sum()), exact) < 1e-9


# ---- the heads, in chunks


@pytest.fixture
def batch():
    return make_batch(build_model("llama"))


@pytest.fixture
def teacher():
    return build_model("qwen3", scale=4.0).requires_grad_(False)


def test_tokens_are_compared_as_each_sequence_alone_would_be(batch, teacher):
    model = build_model("llama")
    divergences, logprobs, entropies = compare(model, teacher, batch, divergence="jsd", jsd_beta=0.3)
    expected_logprobs, expected_entropies = ppo_rlhf.token_logprobs(
        model, *(batch[name] for name in NAMES), TEMPERATURE
    )
    assert_close(logprobs, expected_logprobs, rtol=1e-9, atol=1e-12)
    assert_close(entropies, expected_entropies, rtol=1e-9, atol=1e-12)
    for found, row in zip(divergences, zip(*(batch[name] for name in NAMES))):
        expected = plain_divergence(next_probabilities(model, row), next_probabilities(teacher, row), "jsd", 0.3)
        assert_close(found[: len(expected)], expected, rtol=1e-9, atol=1e-12)
        assert (found[len(expected) :] == 0).all()
    assert divergences.requires_grad and not entropies.requires_grad


CAPPED = Gemma2Config(**SIZES, num_key_value_heads=1, head_dim=8, final_logit_softcapping=5.0)
SCALED = CohereConfig(**SIZES, num_key_value_heads=1, logit_scale=0.25)


def test_logits_are_scaled_and_capped_as_the_models_do_it(batch):
    model, teacher = (build_model(config, scale=20.0, dtype=torch.float32) for config in (CAPPED, SCALED))
    divergences, _, _ = compare(model, teacher, batch, divergence="forward_kl")
    for found, row in zip(divergences, zip(*(batch[name] for name in NAMES))):
        expected = plain_divergence(
            next_probabilities(model, row), next_probabilities(teacher, row), "forward_kl", None
        )
        assert_close(found[: len(expected)], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size, calls", [(1000, 1), (10, 3)])
def test_logits_never_stand_in_memory_at_once_and_nothing_of_a_chunk_is_kept(size, calls, batch, teacher, monkeypatch):
    """The batch has 26 tokens. A backward computes every chunk again."""
    model, kept, rows = build_model("llama"), [], []
    plain = gradient_of(model, compare(model, teacher, batch)[0].sum())
    monkeypatch.setattr(gkd, "LOGITS_AT_ONCE", 22 * size)  # two vocabularies of 11
    for head in (model.lm_head, teacher.lm_head):
        head.register_forward_hook(lambda _module, _inputs, output: rows.append(len(output)))
    hooks = (lambda value: kept.append(tuple(value.shape)) or value), (lambda value: value)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        divergences, _, _ = compare(model, teacher, batch)
    assert max(rows) <= size and len(rows) == 2 * calls
    assert not {(min(size, 26), 11), (26, 11)} & {*kept}
    assert_close(gradient_of(model, divergences.sum()), plain, rtol=1e-9, atol=1e-12)
    assert len(rows) == 4 * calls


def test_a_vocabulary_that_is_padded_to_another_size_is_compared_where_both_have_words(batch, teacher):
    """As of Qwen2.5: 151,936 logits with 0.5 B parameters and 152,064 with 7 B, of one tokenizer."""
    model, padded = build_model("llama"), build_model("qwen3", vocab_size=13, scale=4.0).requires_grad_(False)
    padded.load_state_dict(
        teacher.state_dict()
        | {
            name: torch.cat([weight, torch.full((2, 16), 5.0, dtype=weight.dtype)])
            for name, weight in teacher.state_dict().items()
            if len(weight) == 11
        }
    )
    for found, expected in zip(compare(model, padded, batch), compare(model, teacher, batch)):
        assert_close(found, expected, rtol=1e-12, atol=0)


# ---- gradients that are accumulated


def accumulate(batch, teacher, **settings):
    model = build_model("llama")
    args = gkd.Args(**{"temperature": TEMPERATURE, "microbatch_tokens": 10_000} | settings)
    policy = gkd.StudentModel(model)
    metrics = gkd.accumulate_gradients(policy, gkd.TeacherModel(teacher), batch, 8, args)
    return torch.cat([weight.grad.flatten() for weight in policy.parameters()]), add_pairs(metrics)


@pytest.mark.parametrize("budget, count", [(1, 8), (20, 4), (60, 2)])
def test_microbatches_order_and_padding_change_nothing(budget, count, batch, teacher):
    whole, metrics = accumulate(batch, teacher)
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    for given in (batch, {name: value[order] for name, value in batch.items()}):
        assert len(list(gkd.microbatches(given, torch.arange(8), budget))) == count
        gradient, found = accumulate(given, teacher, microbatch_tokens=budget)
        assert relative_error(gradient, whole) < 1e-9
        assert_close(found, metrics, rtol=1e-9, atol=0)
    padded = dict(batch)
    for name in NAMES:
        filling = torch.full((8, 3), 0 if name.endswith("mask") else 7)
        padded[name] = torch.cat([filling, batch[name]] if name.startswith("prompt") else [batch[name], filling], 1)
    padded["sampler_logprobs"] = torch.nn.functional.pad(batch["sampler_logprobs"], (0, 3))
    gradient, found = accumulate(padded, teacher)
    assert relative_error(gradient, whole) < 1e-9
    assert_close(found, metrics, rtol=1e-9, atol=0)


def test_gradient_is_that_of_the_mean_over_completions_and_metrics_are_sums(batch, teacher):
    model = build_model("llama")
    divergences, logprobs, entropies = compare(model, teacher, batch)
    mask = batch["completion_mask"]
    loss = (divergences.sum(1) / mask.sum(1)).mean()
    gradient, metrics = accumulate(batch, teacher)
    assert relative_error(gradient, gradient_of(model, loss)) < 1e-12
    ratio = (logprobs.detach() - batch["sampler_logprobs"])[mask.bool()]
    num_tokens = mask.sum().item()
    expected = {"loss/distillation": (8 * loss.item(), 8), "policy/entropy": (entropies.sum().item(), num_tokens)}
    expected["policy/sampler_kl"] = ((ratio.expm1() - ratio).sum().item(), num_tokens)
    assert metrics == {name: pytest.approx(pair) for name, pair in expected.items()}
    del batch["sampler_logprobs"]  # completions of the dataset
    without, metrics = accumulate(batch, teacher)
    assert torch.equal(without, gradient) and "policy/sampler_kl" not in metrics


# ---- short runs

SMALL = {"num_steps": 2, "prompts_per_step": 4, "max_completion_length": 16, "eval_prompts": 4, "warmup_steps": 0}
ROWS = read_jsonl(ROOT / "data" / "addition" / "sft.jsonl")[:64]  # prompts and completions, and no answers


@pytest.fixture
def completions(tmp_path):
    return {"dataset": write_jsonl(tmp_path / "completions.jsonl", ROWS), "max_completion_length": 48}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_teacher_stays_as_it_is_in_the_precision_of_the_student(precision, tmp_path, monkeypatch):
    calls = record(monkeypatch, gkd, "accumulate_gradients")
    train(gkd, tmp_path / "run", **SMALL, dataset=few_rows(tmp_path), precision=precision)
    for (policy, teacher, *_), _ in calls:
        assert all(weight.requires_grad for weight in policy.parameters())
        before = load(gkd, TEACHER)[0].state_dict()
        for name, weight in teacher.model.named_parameters():
            assert not weight.requires_grad and weight.grad is None
            in_blocks = precision == "bfloat16" and ".layers." in name
            assert weight.dtype == (torch.bfloat16 if in_blocks else torch.float32)
            assert torch.equal(weight, before[name].to(weight.dtype))
    assert len(calls) == 2 and calls[0][0][1].model is not calls[0][0][0].model


def test_a_share_of_completions_is_sampled_and_the_others_are_those_of_the_dataset(completions, tmp_path, monkeypatch):
    calls = record(monkeypatch, gkd, "accumulate_gradients")
    settings = SMALL | completions | {"on_policy_fraction": 0.25, "prompts_per_step": 8}
    lines = train(gkd, tmp_path / "run", **settings)
    assert not any("eval/reward" in line for line in lines)  # without answers there is nothing to check
    _, tokenizer = load(gkd, TINY)
    texts = {row["prompt"]: row["completion"] for row in ROWS}
    for ((_, _, sampled, divisor, _), _), ((_, _, given, other, _), _) in zip(calls[::2], calls[1::2], strict=True):
        assert (divisor, other, len(sampled["prompt_ids"]), len(given["prompt_ids"])) == (8, 8, 2, 6)
        for ids, mask, row, row_mask in zip(*(given[name] for name in NAMES)):
            prompt = tokenizer.decode(ids[mask.bool()], skip_special_tokens=True)
            text = tokenizer.decode(row[row_mask.bool()])
            assert text == texts[prompt] + tokenizer.convert_ids_to_tokens(gkd.find_turn_end(tokenizer))
    assert len(read_jsonl(tmp_path / "run" / "samples.jsonl")) == 4
    assert all(line["policy/sampler_kl"] < 1e-6 and line["optim/grad_norm"] > 0 for line in lines)


def test_completions_of_the_dataset_alone(completions, tmp_path, monkeypatch):
    monkeypatch.setattr(gkd, "generate", None)
    lines = train(gkd, tmp_path / "run", **SMALL | completions, on_policy_fraction=0.0)
    assert all(line["loss/distillation"] > 0 and "rollout/length_mean" not in line for line in lines)
    assert not (tmp_path / "run" / "samples.jsonl").exists()


def test_rows_without_a_completion_that_fits_are_left_out_and_counted(tmp_path, capsys):
    rows = [{"prompt": f"{i}+1=", "completion": f"{i + 1}", "answer": f"{i + 1}"} for i in range(10, 20)]
    rows += [{"prompt": "1+1=", "completion": ""}, {"prompt": "2+1=", "completion": "3" * 20}, {"prompt": "3+1="}]
    settings = SMALL | {"dataset": write_jsonl(tmp_path / "rows.jsonl", rows), "eval_prompts": 0}
    train(gkd, tmp_path / "run", **settings, on_policy_fraction=0.5)
    said = "training rows without a completion of at most --max-completion-length tokens: 3\n"
    assert said in capsys.readouterr().out
    dataset = write_jsonl(tmp_path / "prompts.jsonl", rows[-1:] * 5)
    message = exit_line(gkd, **settings | {"dataset": dataset}, on_policy_fraction=0.5, run_dir=tmp_path / "other")
    assert message == f"{dataset}: --on-policy-fraction below 1 needs completions, in the column completion"


def test_another_vocabulary_ends_before_anything_is_trained(tmp_path):
    folder = make_folder(tmp_path / "teacher", make_tokenizer(*FORMS["chatml"]))
    message = exit_line(gkd, teacher=folder, run_dir=tmp_path / "run")
    assert message == f"--teacher {folder} has another vocabulary than --model: name one with the same"
    assert not (tmp_path / "run").exists()


WRONG = [({"jsd_beta": 1.0}, "--jsd-beta must lie between 0 and 1")]
WRONG += [({"on_policy_fraction": 1.1}, "--on-policy-fraction must be at least 0 and at most 1")]


@pytest.mark.parametrize("settings, message", WRONG)
def test_settings_that_cannot_work(settings, message, tmp_path):
    assert exit_line(gkd, **settings, run_dir=tmp_path / "run").startswith(message)


@pytest.mark.parametrize("fraction", [0.5, 0.0])
def test_two_ranks_train_as_one_process_does(fraction, completions, tmp_path):
    """With completions of the dataset to the last digits; what is sampled differs by random numbers."""
    flags = "--num-steps 2 --prompts-per-step 8 --max-completion-length 48 --eval-prompts 0 --microbatch-tokens 64"
    flags = [*flags.split(), "--dataset", completions["dataset"], "--on-policy-fraction", fraction]
    both = start("gkd", [*flags, "--run-dir", tmp_path / "both"], kind=Ranks)
    alone = start("gkd", [*flags, "--run-dir", tmp_path / "alone"])
    finish(both), finish(alone)
    assert len(logged(tmp_path / "both")) == 2
    for line, other in zip(logged(tmp_path / "both"), logged(tmp_path / "alone"), strict=True):
        assert line.keys() == other.keys()
        for name in line.keys() - {"perf/step_seconds", "perf/rollout_seconds"} if fraction == 0 else ():
            assert line[name] == pytest.approx(other[name], rel=1e-4)


def test_adapters_learn_from_the_teacher(tmp_path):
    first, *lines = train(gkd, tmp_path / "run", **SMALL | {"num_steps": 8}, lora_rank=4, learning_rate=3e-3)
    assert lines[-1]["loss/distillation"] < lines[0]["loss/distillation"]


def test_the_default_run_cut_short_learns(tmp_path):
    settings = {"num_steps": 12, "eval_every": 12, "eval_prompts": 64, "prompts_per_step": 32, "learning_rate": 1e-3}
    first, *lines = train(gkd, tmp_path / "run", **settings)
    losses = [line["loss/distillation"] for line in lines]
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
    assert lines[-1]["eval/accuracy"] > first["eval/accuracy"] + 0.2
    assert min(shares_changed(tmp_path / "run" / "checkpoint")) > 0.5  # rows of unused tokens stay
    sample = read_jsonl(tmp_path / "run" / "samples.jsonl")[0]
    assert sample.keys() == {"step", "prompt", "answer", "completions"} and len(sample["completions"]) == 1


def test_the_embedded_teacher_is_what_grpo_made():
    """models/tiny-teacher is what grpo.py's default command leaves, and the default of gkd.py."""
    args = parse(gkd)
    assert args.teacher == str(TEACHER)
    model, tokenizer = load(ppo_rlhf, TEACHER)
    rows = read_jsonl(ROOT / "data" / "addition" / "test.jsonl")[:128]
    prompts = [{"prompt_ids": ppo_rlhf.encode_prompt(tokenizer, [user(row["prompt"])], None)} for row in rows]
    prompt_ids, prompt_mask = ppo_rlhf.pad_left(prompts, "cpu")
    ids, mask, _ = ppo_rlhf.generate(model, prompt_ids, prompt_mask, 48, 0.0, [5])
    texts = [tokenizer.decode(row[kept.bool()][:-1]) for row, kept in zip(ids, mask)]
    assert sum(ppo_rlhf.is_correct(text, row["answer"]) for text, row in zip(texts, rows)) / len(rows) > 0.95
