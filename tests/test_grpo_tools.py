"""An environment's replies are outside the loss and inside the context: python -m pytest tests/test_grpo_tools.py"""

import re
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import toy
from test_losses import random_inputs
from test_process_rewards import byte_pair_tokenizer
from torch.testing import assert_close
from toy import FORMS, ROOT, TINY, build_model, gradient_of, make_tokenizer, relative_error
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import grpo
import grpo_tools

STOP, END = 5, "<|end|>"  # of the bundled model
REPLIES = {  # of the calculator, to texts; from "So" on as real models write
    "46": "<think>12+34= | 12+34= | 1+2;12+34= | So:\n12 + 34= | (12 + 34=",
    " 46": "So 12 + 34 = | x. 12 + 34 = | 2. 12 + 34 = | In 2020, 12 + 34 = | So $12 + 34 = | We have \\( 12 + 34 =",
    " 24": "is $48 / 2 = | is 72 - 48 = | is 1.5 * 16 =",
    " 3.3333": "about 10 / 3 =",
    " 20": "10 / 0.5 =",
    " 99999980000001": "9999999 * 9999999 =",
    " 408": grpo_tools.Args.system_prompt.partition("=")[0] + "=",  # the call that real models are shown
    "": "12+34=4 | <think>1+2+3= | 1+99999999= | He has 12 = | -1,200-5= | 1,200-5= | .5+2= | 10 / 0.00 = | x + 1 + 2 ="
    r" | (1 + 2) * 3 + 4 = | It is -12 + 34 = | 2\times3+4= | x\times 3 + 4 = | 2 * 3 + 4 = | 2**72 - 48 = | 1+2) =",
    None: "It is 12 + 34",
}


@pytest.mark.parametrize("reply", REPLIES)
def test_the_calculator(reply):
    for text in REPLIES[reply].split(" | "):
        assert grpo_tools.Environment({}).reply(text) == reply, text


PAGE, EXAMPLES = (ROOT / "docs/grpo_tools.md").read_text(encoding="utf-8"), []
for code in re.findall("```python\n(.*?)```", PAGE, re.DOTALL):
    EXAMPLES.append({"__name__": "my_environment"})
    exec(code, EXAMPLES[-1])
SEARCH, FUNCTIONS, GUESS = (example["Environment"] for example in EXAMPLES)


def use(monkeypatch, base=grpo_tools.Environment, reply_to=None, **attributes):
    """Let completions meet an environment; return those that are made, with what they were asked and what they said."""
    made = []

    class Environment(base):
        def __init__(self, row):
            super().__init__(row)
            self.turns_seen = []
            made.append(self)

        def reply(self, text):
            reply = reply_to(self, text) if reply_to else super().reply(text)
            self.turns_seen.append((text, reply))
            return reply

    for name, value in attributes.items():
        setattr(Environment, name, value)
    monkeypatch.setattr(grpo_tools, "Environment", Environment)
    return made


def load():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    return grpo_tools.load_sampler(grpo_tools.Args(model=str(TINY), precision="float32"), tokenizer, "cpu"), tokenizer


def sample(sampler, tokenizer, prompts, temperature=1.5, row=None, **settings):
    """Return the batch of a completion of each prompt, texts, scores, and texts with replies in guillemets."""
    args = grpo_tools.Args(**{"max_completion_length": 48, "max_prompt_length": 32} | settings)
    torch.manual_seed(0)
    rows = [{"prompt_ids": prompt, "answer": "46"} | (row or {}) for prompt in prompts]
    batch, texts, scores = grpo_tools.sample_completions(sampler, tokenizer, rows, temperature, args)
    return batch, texts, scores, spell(tokenizer, batch, prompts)


def spell(tokenizer, batch, prompts):
    spelled = []
    for ids, mask, end, prompt in zip(batch["ids"], batch["completion_mask"], batch["total_lengths"], prompts):
        begin = len(prompt)
        by_policy, counts = mask[begin:end].unique_consecutive(return_counts=True)
        pieces = [tokenizer.decode(piece) for piece in ids[begin:end].split(counts.tolist())]
        spelled.append("".join(piece if sampled else f"«{piece}»" for piece, sampled in zip(pieces, by_policy)))
        assert not mask[:begin].any() and not mask[end:].any() and not ids[end:].any()
    return spelled


def play(monkeypatch, tokenizer, stop_id, *scripts, **settings):
    """Let a policy write these ids; return what sample returns, and rows and limit of each call of generate."""
    running, calls = [[*script] for script in scripts], []

    def generate(_model, prompts, limit, _temperature, stop_ids):
        calls.append(f"{len(prompts)}x{limit}")
        samples = []
        for prompt in prompts:
            rest = running[prompt[0] - 10]
            assert rest, "the policy was to end"
            end = next((place for place, token in enumerate(rest, 1) if token in stop_ids), len(rest))
            samples.append(rest[: min(end, limit)])
            del rest[: min(end, limit)]
        return [(ids, [-0.5] * len(ids)) for ids in samples]

    monkeypatch.setattr(grpo_tools, "generate", generate)
    sampler = SimpleNamespace(device="cpu", generation_config=SimpleNamespace(eos_token_id=[stop_id]))
    found = sample(sampler, tokenizer, [[10 + i] for i in range(len(running))], **settings)
    batch = found[0]
    for ids, mask, script, rest in zip(batch["ids"], batch["completion_mask"], scripts, running):
        assert ids[mask.bool()].tolist() == script[: len(script) - len(rest)]  # as they were sampled
    assert torch.equal(batch["sampler_logprobs"], -0.5 * batch["completion_mask"])
    return *found, calls


def plain_logprobs(model, ids, temperature):
    """Log-probabilities (L) of a sequence's tokens, 0 for the first, by the model's own logits."""
    logprobs = (model(ids.unsqueeze(0)).logits[0, :-1] / temperature).log_softmax(-1)
    return torch.nn.functional.pad(logprobs.gather(1, ids[1:, None]).squeeze(1), (1, 0))


def test_completions_are_sampled_as_often_as_they_are_likely(monkeypatch):
    """Of up to four letters; b ends them, and c a turn: the first is answered, others only interrupt the sampling."""

    def reply_to(environment, text):
        if "c" in text:
            return "" if environment.turns_seen else "d"
        return None

    use(monkeypatch, reply_to=reply_to, stop_strings=["c"])
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
    model, tokenizer = load()
    made = use(monkeypatch)
    prompts = [tokenizer.encode(f"<|user|>{text}=<|assistant|>") for text in ["87+39+86+12"] * 9 + ["98+76"] * 9]
    batch, texts, _, spelled = sample(model, tokenizer, prompts, rollout_batch_size=rollout_batch_size)
    for i, environment in enumerate(made):
        seen = "".join(f"{text}«{reply}»" if reply else text for text, reply in environment.turns_seen)
        assert spelled[i].replace(END, "") == seen or batch["truncated"][i]
        assert re.sub("[«»]|<.end.>", "", spelled[i]) == texts[i]
        names = ("ids", "completion_mask", "sampler_logprobs")
        ids, mask, sampled = (batch[name][i, : batch["total_lengths"][i]] for name in names)
        expected = plain_logprobs(model, ids, 1.5)
        assert_close(sampled, expected * mask, rtol=1e-4, atol=1e-4)
        if "«" in spelled[i]:
            place, changed = len(prompts[i]) + (1 - mask[len(prompts[i]) :]).argmax(), ids.clone()
            changed[place] += 1
            differs = (plain_logprobs(model, changed, 1.5) - expected).abs() > 1e-4
            assert differs[place + 1 :].any() and not differs[:place].any()
    assert sum(text.count("«") for text in spelled) >= 10 and len(made) == 18 > batch["truncated"].sum()


# Of at most 12 tokens, and 3 in a reply: replies to turns (to others "" after "=", else None); what the policy writes,
# where E is a stop token; the completions, … if truncated; rows and limit of each call of generate.
TURNS = [
    ("1+2= 3", "1+2=;4=5E, 7E", "1+2=«3»;4=5E, 7E", "2x12 1x7 1x4"),  # only one of the turns has a reply
    ("1= 23456, = 5", "1==7E", "1=«234»=«5»7E", "1x12 1x7 1x5"),  # a reply that is too long, and another
    ("123456789-= 99", "123456789-=1", "123456789-=«9»…", "1x12"),  # there is little room for it
    ("1234567890-= 99", "1234567890-=1", "1234567890-=…", "1x12"),  # and none
    ("1= 2", "1234567890-12, 123456789-E", "1234567890-1…, 123456789-E", "2x12"),  # no reply
    ("123456= 0, 1= 2", "123456=9999, 1=34=5678E", "123456=«0»9999…, 1=«2»34=5678E", "2x12 1x9 2x4 1x2"),  # a wait
    ("7 8", "7E9E", "7E«8»9E", "1x12 1x9"),  # a reply to a stop token
    ("12= None", "12=3", "12=", "1x12"),  # an end without one
]


@pytest.mark.parametrize("replies, scripts, expected, calls", TURNS)
def test_turns(replies, scripts, expected, calls, monkeypatch):
    _, tokenizer = load()
    replies = dict(pair.split() for pair in replies.split(", "))

    def reply_to(_, text):
        reply = replies.get(text, "" if "=" in text else "None")
        return None if reply == "None" else reply

    made = use(monkeypatch, reply_to=reply_to)
    scripts = [tokenizer.encode(text.replace("E", END), add_special_tokens=False) for text in scripts.split(", ")]
    sizes = {"max_completion_length": 12, "tool_tokens": 3}
    batch, *_, spelled, found_calls = play(monkeypatch, tokenizer, STOP, *scripts, **sizes)
    found = [text.replace(END, "E") + "…" * truncated for text, truncated in zip(spelled, batch["truncated"])]
    assert ", ".join(found) == expected and " ".join(found_calls) == calls
    for text, environment in zip(found, made):  # a turn may be sampled in parts, and only whole ones are shown
        policy, seen = re.sub("«.*?»|E", "", text), "".join(text for text, _ in environment.turns_seen)
        assert policy == seen or (text.endswith("…") and policy.startswith(seen))


QWEN = """{% for m in messages %}{% if m.role == 'tool' %}
{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}{{ '\n<tool_response>\n' + m.content }}
{{- '\n</tool_response>' }}{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TOKENIZER = make_tokenizer(FORMS["chatml"][0], QWEN)
TOKENIZER.add_tokens(["</sear", ">.", '>"'])
TURN_END = grpo_tools.find_turn_end(TOKENIZER)


@pytest.fixture
def chat(monkeypatch):
    """Let an environment meet a policy that writes a text, or these ids, with a Qwen-style template."""

    def chat(environment, written, **settings):
        made = use(monkeypatch, environment)
        ids = TOKENIZER.encode(written) if isinstance(written, str) else written
        found = play(monkeypatch, TOKENIZER, TURN_END, ids, max_completion_length=900, **settings)
        return SimpleNamespace(batch=found[0], score=found[2][0], spelled=found[3][0], turns_seen=made[0].turns_seen)

    return chat


@pytest.mark.parametrize("end", ["</sear c h >", "< / s e a r c h >", "< / s e a r c h >.", '</sear c h >"'])
def test_a_search_ends_in_any_tokens_and_a_page_has_no_stop_token(end, chat, monkeypatch):
    page = "In Australia, <|im_end|> is text."
    monkeypatch.setitem(SEARCH.reply.__globals__, "PAGES", ["Oslo.", page, "Paris."])
    query, answer = "a > b, <b> <search>capital of Australia", "I see.<answer>Canberra</answer>"
    ids = TOKENIZER.encode(query) + TOKENIZER.convert_tokens_to_ids(end.split())
    found = chat(SEARCH, ids + TOKENIZER.encode(answer + "no"), row={"answer": "Canberra"})
    turn, reply = query + end.replace(" ", ""), f"\n\n<information>{page}</information>\n\n"
    assert found.spelled == f"{turn}«{reply}»{answer}" and found.score == 1.0 and TURN_END not in found.batch["ids"]
    assert found.turns_seen == [(turn, reply), (answer, None)] and not found.batch["truncated"].any()


def test_calls_are_answered_in_the_form_of_the_chat_template(chat):
    """A call, an error, two calls in a turn, and an answer: the whole is the chat as the template writes it."""
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 12, "b": 34}}\n</tool_call>'
    turns = [call, "<tool_call>{12</tool_call>", f"{call}\n{call}", "It is \\boxed{408}."]
    found = chat(FUNCTIONS, "<|im_end|>".join([*turns, ""]), row={"answer": "408"})
    error = found.turns_seen[1][1][0]["content"]
    messages = [{"role": "user", "content": "?"}]
    for turn, replies in zip(turns, [["408"], [error], ["408", "408"], []]):
        messages.append({"role": "assistant", "content": turn})
        messages += [{"role": "tool", "content": reply} for reply in replies]
    whole = TOKENIZER.apply_chat_template(messages, tokenize=False).partition("assistant\n")[2]
    assert re.sub("[«»]", "", found.spelled) == whole.removesuffix("\n") and error.startswith("JSONDecodeError")
    assert [text for text, _ in found.turns_seen] == turns and found.score == 1.0
    assert re.sub("«.*?»", "", found.spelled, flags=re.DOTALL) == "<|im_end|>".join([*turns, ""])


@pytest.mark.parametrize("stop_strings, end", [([], ""), (["</tool_call>"], "<|im_end|>")])
def test_a_message_is_cut_and_still_ends(stop_strings, end, chat, monkeypatch):
    """Also after a stop string, where the environment ends the turn of the policy."""
    monkeypatch.setattr(FUNCTIONS, "stop_strings", stop_strings)
    monkeypatch.setitem(FUNCTIONS.reply.__globals__, "call", lambda _: "12345678 <|im_end|>")
    found = chat(FUNCTIONS, f"<tool_call></tool_call>{'' if end else '<|im_end|>'}46<|im_end|>", tool_tokens=5)
    response = f"«{end}\n<|im_start|>user\n<tool_response>\n12345\n</tool_response><|im_end|>\n<|im_start|>assistant\n»"
    assert found.spelled == f"<tool_call></tool_call>{'' if end else '<|im_end|>'}{response}46<|im_end|>"


GAMES = [("40 60 50 46", True, ["higher", "lower", "lower"]), ("46", True, []), ("none", False, [])]


@pytest.mark.parametrize("guesses, won, hints", [*GAMES, ("1 2 3 4 5 6 7 8", False, ["higher"] * 6)])
def test_a_game_has_a_state(guesses, won, hints, chat):
    found = chat(GUESS, "".join(f"Is it {guess}?<|im_end|>" for guess in guesses.split()))
    assert found.score == {"won": won, "quick": pytest.approx(0.1 * won * (7 - len(guesses.split())))}
    assert re.findall("user\n(.*?)<", found.spelled) == hints


@pytest.mark.parametrize("string", ["=", "a;", "b\n", END])
def test_a_stop_string_may_end_in_any_token_that_contains_its_last_character(string):
    """Also amid other characters, as in "=10;10+", and in a token whose name in the vocabulary is not its text."""
    tokenizer = byte_pair_tokenizer()
    expected = [i for i in range(len(tokenizer)) if {string[-1], "0"} & {*tokenizer.decode([i])}]
    assert sorted(grpo_tools.find_last_tokens(tokenizer, (string, "0"))) == expected and len(expected) > 3


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


CALCULATOR = grpo_tools.Environment
UPDATES = [(CALCULATOR, "float32", 1e-4), (CALCULATOR, "bfloat16", 0.1), (GUESS, "float32", 1e-4)]


@pytest.mark.parametrize("environment, precision, tolerance", UPDATES)
def test_an_update_and_metrics_of_a_rollout_with_replies(environment, precision, tolerance, tmp_path, monkeypatch):
    """The gradient is that of the model's own logits, at the policy's tokens only; turns are counted by hand."""
    rollouts, gradients = toy.record(monkeypatch, grpo_tools, "sample_completions"), []

    def step_optimizer(policy, *_):
        gradients.extend(weight.grad.flatten() for weight in policy.parameters())
        return 1.0

    monkeypatch.setattr(grpo_tools, "step_optimizer", step_optimizer)
    use(monkeypatch, environment, reward=lambda _, text: {"length": len(text) % 5, "half": 0.5})
    settings = {"num_steps": 1, "minibatch_size": 16, "max_completion_length": 48, "seed": 3, "precision": precision}
    line = toy.train(grpo_tools, tmp_path, microbatch_tokens=200, **settings)[1]
    (_, tokenizer, rows, *_), (batch, texts, scores) = rollouts[1]
    spelled = spell(tokenizer, batch, [row["prompt_ids"] for row in rows])
    turns = [len(re.findall("(?:^|»)[^«]", text)) for text in spelled]
    assert max(turns) > 2 and line["rollout/turns"] == sum(turns) / 16
    assert line["rollout/length_mean"] == batch["completion_mask"].sum().item() / 16
    assert line["rollout/truncated"] == batch["truncated"].sum().item() / 16
    assert scores == [{"length": len(text) % 5, "half": 0.5} for text in texts] and line["reward/half"] == 0.5
    assert 0 < line["policy/sampler_kl"] < tolerance / 100
    model, objective = AutoModelForCausalLM.from_pretrained(TINY), 0.0
    advantages = grpo_tools.compute_advantages(torch.tensor([sum(score.values()) for score in scores]), 4)
    for i, advantage in enumerate(advantages):
        ids, mask = (batch[name][i, : batch["total_lengths"][i]] for name in ("ids", "completion_mask"))
        objective = objective + advantage * (plain_logprobs(model, ids, 1.0) * mask).sum() / mask.sum() / 16
    assert relative_error(-torch.cat(gradients), gradient_of(model, objective)) < tolerance


def test_the_default_command_learns_to_call(tmp_path):
    """In 14 of its 30 steps."""
    grpo_tools.main(toy.parse(grpo_tools, num_steps=14, eval_prompts=128, run_dir=tmp_path / "run"))
    lines = toy.read_jsonl(tmp_path / "run/metrics.jsonl")
    assert lines[0]["eval/accuracy"] < 0.6 and lines[14]["eval/accuracy"] > 0.9 and lines[14]["rollout/turns"] > 1.5
