"""Chat templates that open a thought, and those that write one before an answer that has none."""

from types import SimpleNamespace

import pytest
from tiny import make_tokenizer, write_jsonl

import dpo
import grpo
import grpo_process
import reward_model
import sft

TURN = "<|im_start|>{{ m.role }}\n"
LATER = "{{ m.content.split('</think>')[-1].strip() }}<|im_end|>\n"  # the thoughts of a finished turn are left out
THOUGHT = "{% set parts = m.content.split('</think>') %}"
THOUGHT += "<think>\n{{ parts[0].split('<think>')[-1].strip() if parts|length > 1 }}\n</think>\n\n"


def template(before_answer, opening):
    """Of ChatML, with this before every answer of the assistant, and this at the end of a prompt."""
    turns = f"{TURN}{{% if m.role == 'assistant' %}}{before_answer}{{% endif %}}{LATER}"
    prompt = f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{opening}{{% endif %}}"
    return f"{{% for m in messages %}}{turns}{{% endfor %}}{prompt}"


TEMPLATES = {  # of the form of
    "DeepSeek-R1-Distill, QwQ": template("", "<think>\n"),
    "Qwen3": template(THOUGHT, ""),
    "Qwen3-Thinking": template(THOUGHT, "<think>\n"),
}
PROMPT = "<|im_start|>user\n17*3=<|im_end|>\n<|im_start|>assistant\n"
ROWS = [{"prompt": "17*3=", "chosen": "<think>50+1</think>51", "rejected": "50"}] * 4


def tokenizer_of(form):
    return make_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], TEMPLATES[form])


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_thought_that_the_prompt_opens_is_the_completions(form, monkeypatch):
    tokenizer = tokenizer_of(form)
    opened = form != "Qwen3"
    completions = [r"17*3... maybe \boxed{51}?", r"maybe \boxed{50}? no</think>\boxed{51}<|im_end|>"]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in completions]
    ids, mask = grpo.pad_left([{"prompt_ids": row[::-1]} for row in rows], "cpu")
    monkeypatch.setattr(grpo, "generate", lambda *_: (ids.flip(1), mask.flip(1), mask.float()))
    prompt = {"prompt_ids": grpo.encode_prompt(tokenizer, grpo.as_messages("17*3=", ""))}
    assert tokenizer.decode(prompt["prompt_ids"]) == PROMPT + "<think>\n" * opened
    config = SimpleNamespace(eos_token_id=[grpo.find_turn_end(tokenizer)])
    policy = SimpleNamespace(model=SimpleNamespace(device="cpu", generation_config=config), modules=list)
    _, texts = grpo.sample_completions(policy, tokenizer, [prompt] * 2, 1.0, grpo.Args())
    assert texts == ["<think>" * opened + text.removesuffix("<|im_end|>") for text in completions]
    assert [grpo.is_right(text, "51") for text in texts] == [not opened, True]
    row, said = {"prompt": "17+34=", "answer": "51"}, "17+34=51;</think>51 "
    ids = tokenizer(said)["input_ids"]
    for padding in ([], ids):  # whatever its id says
        steps = grpo_process.find_steps(tokenizer, [*ids, *padding], "<think>" * opened + said, row, 1.0)
        assert steps[0] == (9, 1.0)


@pytest.mark.parametrize("script", [dpo, reward_model])
@pytest.mark.usefixtures("alone")
def test_a_pair_is_trained_as_the_template_writes_a_finished_chat(script, tmp_path):
    args = script.Args(dataset=write_jsonl(tmp_path / "pairs.jsonl", ROWS), eval_prompts=0)
    for form in ("Qwen3", "Qwen3-Thinking"):
        tokenizer = tokenizer_of(form)
        (pair, *_), _ = script.load_pairs(args, tokenizer)
        for name, text in (("chosen", "50+1\n</think>\n\n51"), ("rejected", "\n</think>\n\n50")):
            whole = tokenizer.decode(pair["prompt_ids"] + pair[f"{name}_ids"])
            assert whole == f"{PROMPT}<think>\n{text}<|im_end|>"
    said = {"50+1": "renders the prompt differently", "<think>50+1</think>51": "does not write the content of the mess"}
    for text, reason in said.items():  # it writes what follows the thought
        args.dataset = write_jsonl(tmp_path / "pairs.jsonl", [ROWS[0] | {"chosen": text}] * 4)
        with pytest.raises(SystemExit, match=f"pairs.jsonl, training row 0: .*the chat template {reason}"):
            script.load_pairs(args, tokenizer_of("DeepSeek-R1-Distill, QwQ"))


@pytest.mark.usefixtures("alone")
def test_an_example_is_trained_as_the_template_writes_a_finished_chat(tmp_path):
    rows = [{"prompt": "17*3=", "completion": "51"}] * 4
    args = sft.Args(dataset=write_jsonl(tmp_path / "rows.jsonl", rows), eval_prompts=0)
    for form in TEMPLATES:
        tokenizer = tokenizer_of(form)
        if form.startswith("DeepSeek"):
            with pytest.raises(
                SystemExit, match="rows.jsonl, training row 0: .*template renders the prompt differently"
            ):
                sft.load_chats(args, tokenizer)
            continue
        row = sft.load_chats(args, tokenizer)[0][0]
        assert tokenizer.decode(row["prompt_ids"]) == PROMPT + "<think>\n" * (form == "Qwen3-Thinking")
        completion = tokenizer.decode(row["completion_ids"])
        assert completion == "<think>\n" * (form == "Qwen3") + "\n</think>\n\n51<|im_end|>"
