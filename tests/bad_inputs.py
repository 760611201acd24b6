"""What a user gets for a bad input: one clear line, a misleading one, a traceback, or silent training.

    python tests/bad_inputs.py [SCRIPT...] [--root FOLDER] [--only WORD]

Each case runs in a folder of its own, in one worker process per script (whose imports are paid once), with settings
that would train one tiny step. It is clear if the script exits with one line of at most 350 characters that has all
the words the table expects: the flag or the file, and the cause. Exit status 1 unless 95 % are clear and none silent.
"""

import argparse
import contextlib
import importlib
import io
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path

import tyro

ONLINE = ("grpo", "dr_grpo", "dapo", "gspo", "reinforce", "cispo", "grpo_process", "grpo_tools")
PROMPTED = (*ONLINE, "ppo_rlhf")
PAIRED = ("reward_model", "dpo")
ALL = (*PROMPTED, *PAIRED, "sft")
KINDS = ("clear", "misleading", "traceback", "silent")
LIMIT = 90  # seconds a case
OVERLONG = "x" * 300  # of a name, which the line that names it may have whole
SMALL = {"num_steps": 1, "prompts_per_step": 2, "group_size": 2, "minibatch_size": 2, "max_completion_length": 8}
SMALL |= {"eval_prompts": 2, "overlong_buffer": 2, "warmup_steps": 0}


@dataclass
class Case:
    """A bad input of a script: what is prepared in its folder, with which settings it runs, and what must be said."""

    script: str
    group: str
    name: str
    words: tuple  # regular expressions, each of which the line must have
    settings: dict = field(default_factory=dict)
    prepare: object = None  # called with the worker in the folder of the case; may return settings
    patch: dict = field(default_factory=dict)  # {name: what stands in for it in the script}
    line: list = None  # the command line, instead of settings


# ---- what the cases are made of


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


GOOD = {
    "prompts": [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(1, 13)],
    "pairs": [{"prompt": f"{i}+1=", "chosen": f"={i + 1}", "rejected": f"={i + 2}"} for i in range(1, 13)],
    "chats": [{"messages": [user(f"{i}+1="), assistant(f"={i + 1}")]} for i in range(1, 13)],
}


def reads(script):
    return "pairs" if script in PAIRED else "chats" if script == "sft" else "prompts"


def write(path, content):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else lines(content))


def files(**contents):
    """A preparation that writes these files, dots in whose names are two underscores, and gives no settings."""

    def prepare(_):
        for name, content in contents.items():
            write(name.replace("__", "."), content)

    return prepare


def dataset(name, content):
    """A preparation that writes one file and gives it as --dataset."""

    def prepare(_):
        write(name, content)
        return {"dataset": name.partition("/")[0]}

    return prepare


def model(change, flag="model", source="tiny"):
    """A preparation that copies an embedded model, damages it and gives it as --model."""

    def prepare(worker):
        shutil.copytree(worker.root / "models" / source, "mine")
        change(Path("mine"))
        return {flag: "mine"}

    return prepare


def run_folder(change, **settings):
    """A preparation that copies a finished run, damages it and resumes it."""

    def prepare(worker):
        worker.copy_run("run")
        change(Path("run"))
        return {"resume": "run", "num_steps": 2, "bare": True, **settings}

    return prepare


# ---- settings


def numeric_fields(script, root):
    """[(name, is_float)] of a script's settings that are numbers, read from its source."""
    text = (root / f"{script}.py").read_text(encoding="utf-8").partition("class Args:")[2].partition("\n\n\n")[0]
    found = re.findall(r"^    (\w+): (?:int|float)\b.*$", text, re.MULTILINE)
    return [(name, f"    {name}: float" in text) for name in found if name != "seed"]


POSITIVE = {"prompts_per_step", "group_size", "max_prompt_length", "max_completion_length", "minibatch_size"}
POSITIVE |= {"microbatch_tokens", "update_epochs", "max_rounds", "eval_every", "save_every", "temperature", "beta"}
POSITIVE |= {"learning_rate", "value_learning_rate", "max_grad_norm", "sampler_weight_cap"}
SIGNED = {"min_reward"}


def flag(name):
    return "--" + name.replace("_", "-")


def setting_cases(root):
    """nan for every float of every script; inf, -1 and 0 where the first script that has the field has it."""
    seen = set()
    for script in ALL:
        for name, is_float in numeric_fields(script, root):
            values = [math.nan] if is_float else []
            if name not in seen:
                values += [math.inf] * is_float + [-1.0 if is_float else -1] * (name not in SIGNED)
                values += [0] * (name in POSITIVE)
            seen.add(name)
            for value in values:
                words = (flag(name), "must be|must not|at least|finite|number")
                yield Case(script, "settings", f"{flag(name)} {value}", words, {name: value})
    at = {script: {} for script in ALL}
    for script in ("grpo", "dr_grpo", "dapo", "gspo", "ppo_rlhf"):  # reinforce has one step a rollout
        at[script] |= {"minibatch_size": (3, ("--minibatch-size 3", "multiple"))}
    for script in ONLINE:
        at[script] |= {"group_size": (1, ("--group-size 1", "at least 2"))}
    at["dapo"] |= {"overlong_buffer": (99, ("--overlong-buffer 99", "--max-completion-length"))}
    at["ppo_rlhf"] |= {"gamma": (1.5, ("--gamma", "at most 1")), "gae_lambda": (1.5, ("--gae-lambda", "at most 1"))}
    at["dpo"] |= {"label_smoothing": (0.6, ("--label-smoothing", "0.5"))}
    for script, changes in at.items():
        for name, (value, words) in changes.items():
            yield Case(script, "settings", f"{flag(name)} {value}", words, {name: value})
        too_long = {"max_prompt_length": 400, "max_completion_length": 400}
        if script not in ("sft", *PAIRED):  # there the data says how long it is
            words = ("--max-completion-length", "context", "256")
            yield Case(script, "settings", "context too short", words, too_long)
        words = ("--eval-prompts", "12 (training )?rows|too few")
        yield Case(script, "settings", "--eval-prompts 100 of 12 rows", words, {"eval_prompts": 100})
        for name in ("model", "dataset", "resume", "run_dir"):
            words = (flag(name), "empty|unset|missing|no such")
            yield Case(script, "settings", f'{flag(name)} ""', words, {name: ""})
    yield Case(
        "grpo", "settings", "--learning-rate 1e30", ("--learning-rate",), {"learning_rate": 1e30, "num_steps": 3}
    )
    yield Case("sft", "settings", "--learning-rate 1e30", ("--learning-rate",), {"learning_rate": 1e30, "num_steps": 3})
    for number, script in enumerate(ALL):
        for value in (("float16", ""), (8, "bf16"), ("fp32", "float16"))[number % 3]:
            words = (f"--precision {value}", "bfloat16 or float32")
            yield Case(script, "settings", f"--precision {value!r}", words, {"precision": value})
        value = (-1, 1.5, "abc")[number % 3]
        words = (f"--lora-rank {value}", "must be")
        yield Case(script, "settings", f"--lora-rank {value!r}", words, {"lora_rank": value})
        words = ("--lora-rank 2", "linear layers")
        yield Case(script, "settings", "--lora-rank of GPT-2", words, {"lora_rank": 2}, model(as_gpt2))
    for number, script in enumerate(PROMPTED):
        value = (0, -1, math.inf, "2")[number % 4]
        words = (f"--sampler-weight-cap {value}", "must be")
        yield Case(script, "settings", f"--sampler-weight-cap {value!r}", words, {"sampler_weight_cap": value})
    for script, bad, value in (
        ("grpo", "--precision", "float16"),
        ("sft", "--precision", ""),
        ("sft", "--min-reward", "right"),
        ("dpo", "--precision", "8"),
        ("reward_model", "--lora-rank", "-1"),
        ("ppo_rlhf", "--lora-rank", "1.5"),
        ("gspo", "--lora-rank", "abc"),
        ("dapo", "--sampler-weight-cap", "0"),
        ("dr_grpo", "--sampler-weight-cap", "-1"),
        ("reinforce", "--sampler-weight-cap", "nan"),
        ("ppo_rlhf", "--sampler-weight-cap", "inf"),
        ("cispo", "--clip-eps-high", "-1"),
        ("ppo_rlhf", "--ptx-coef", "nan"),
        ("grpo_tools", "--tool-tokens", "0"),
    ):
        words = (bad, re.escape(value), "must be|invalid|[Ii]nvalid|expected|not a valid|parsing|unparsable")
        yield Case(script, "command line", f"{bad} {value or repr(value)}", words, line=[bad, value])
    for script, bad in (("grpo", "--group-sizes"), ("dpo", "--betas"), ("sft", "--epochs"), ("ppo_rlhf", "--kl")):
        yield Case(script, "command line", f"{bad} 4", (bad,), line=[bad, "4"])
    for script, bad in (("dapo", "--num-steps"), ("reward_model", "--seed"), ("gspo", "--clip-eps-low")):
        yield Case(script, "command line", f"{bad} ten", (bad, "ten"), line=[bad, "ten"])
    for script in ("dr_grpo", "sft"):
        yield Case(script, "command line", "--num-steps without value", ("--num-steps",), line=["--num-steps"])
    yield Case(
        "reinforce", "command line", "--baseline median", ("--baseline", "median"), line=["--baseline", "median"]
    )


def as_gpt2(folder):
    """Make a model of another family, most of whose weights are in layers of its own, with the folder's tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256}
    eos = json.loads((folder / "config.json").read_text())["eos_token_id"]
    GPT2LMHeadModel(GPT2Config(vocab_size=29, **sizes, bos_token_id=None, eos_token_id=eos)).save_pretrained(folder)


# ---- data files

MANY = {script: index for index, script in enumerate(ALL)}


def in_turn(number, scripts):
    return scripts[number % len(scripts)]


def file_cases():
    """Each kind of damaged file by one reader of prompts, of pairs and of chats, in turn."""

    def broken(kind):
        return lines(GOOD[kind][:6]) + '{"prompt": "1+1=", "answer": \n' + lines(GOOD[kind][6:])

    def columns(kind):
        return {"train.jsonl": GOOD[kind], "test.jsonl": [{"x": 1}] * 4}

    damaged = {
        "no such file": (None, "nope.jsonl", ("nope.jsonl", "no such file")),
        "no such folder": (None, "data/nope", ("data/nope", "no such (file|folder)")),
        "no such absolute path": (None, "/nope/rows.jsonl", ("/nope/rows.jsonl", "no such file")),
        "empty file": (lambda _: "", "bad.jsonl", ("bad.jsonl", "empty|no rows|0 .*rows")),
        "blank file": (lambda _: "\n\n\n", "bad.jsonl", ("bad.jsonl", "empty|no rows|0 .*rows")),
        "empty list": (lambda _: "[]", "bad.json", ("bad.json", "empty|no rows|0 .*rows")),
        "empty csv": (lambda _: "", "bad.csv", ("bad.csv", "empty|no rows|No columns")),
        "broken JSON": (broken, "bad.jsonl", ("bad.jsonl", "(row|line) 7", "JSON|value|object|Expect")),
        "half a file": (lambda kind: lines(GOOD[kind])[:-9], "bad.jsonl", ("bad.jsonl", "(row|line) 12")),
        "one object": (lambda _: '{"a": 1}', "bad.json", ("bad.json", "column|1 training rows")),
        "a string": (lambda _: '"hello"', "bad.json", ("bad.json", "(row|line) [01]|JSON|rows")),
        "a list of numbers": (lambda _: "[1, 2, 3]", "bad.json", ("bad.json", "column|object")),
        "binary": (lambda _: bytes(range(256)) * 9, "bad.jsonl", ("bad.jsonl", "JSON|decode|(row|line) 1|cannot be")),
        "text": (lambda _: "hello\nthere\n", "bad.txt", ("bad.txt", "(row|line) 1")),
        "not parquet": (lambda _: b"PAR1junk", "bad.parquet", ("bad.parquet", "[Pp]arquet")),
        "csv without header": (
            lambda _: "1+1=,2\n" * 9,
            "bad.csv",
            ("bad.csv", "column", "found 1\\+1=, ?2"),
        ),
        "ragged csv": (lambda _: "prompt,answer\n1,2\n1,2,3,4\n", "bad.csv", ("bad.csv", "line 3")),
        "folder without data": (lambda _: "# hi", "folder/README.md", ("folder", "data files")),
        "splits of other columns": (columns, "folder", ("folder", "column", "x")),
        "one row": (lambda kind: GOOD[kind][:1], "bad.jsonl", ("bad.jsonl", "1 (training )?rows?", "--eval-prompts")),
        "other columns": (lambda _: [{"text": "a", "label": 1}] * 9, "bad.jsonl", ("bad.jsonl", "found text, label")),
    }
    for number, (name, (make, path, words)) in enumerate(damaged.items()):
        for script in (in_turn(number, PROMPTED), in_turn(number, PAIRED), "sft"):

            def prepare(_, make=make, path=path, script=script):
                content = make and make(reads(script))
                for inner, rows in content.items() if isinstance(content, dict) else []:
                    write(f"{path}/{inner}", rows)
                if content is not None and not isinstance(content, dict):
                    write(path, content)
                return {"dataset": path.partition("/")[0] if path.startswith("folder") else path}

            yield Case(script, "data files", name, ("--dataset", *words), prepare=prepare)
        if number in (0, 2, 3, 7, 14, 20):
            settings = {"eval_dataset": path}
            make_file = None if make is None else (lambda _, make=make, path=path: write(path, make("prompts")))
            yield Case("dpo", "data files", f"--eval-dataset: {name}", ("--eval-dataset", *words), settings, make_file)
    for script, kind, words in (
        ("grpo", "pairs", ("answer",)),
        ("gspo", "chats", ("prompt", "found messages")),
        ("dpo", "prompts", ("chosen", "found prompt, answer")),
        ("reward_model", "chats", ("chosen", "found messages")),
        ("sft", "pairs", ("completion", "found prompt, chosen, rejected")),
        ("ppo_rlhf", "chats", ("prompt", "found messages")),
    ):
        words = ("--dataset", "bad.jsonl", *words)
        yield Case(script, "data files", f"{kind} of another script", words, prepare=dataset("bad.jsonl", GOOD[kind]))
    words = ("--dataset", "mine", "cast|column|data files")
    yield Case("grpo", "data files", "a model for --dataset", words, prepare=model(lambda _: None, "dataset"))


# ---- rows

STRANGE = {"int": 7, "dict": {"a": 1}, "list of strings": ["a", "b"], "list of ints": [1, 2], "bool": True}
MESSAGES = {
    "a message without role": [{"content": "1+1="}],
    "a message without content": [{"role": "user"}],
    "content of parts": [{"role": "user", "content": [{"type": "text", "text": "1+1="}]}],
    "content an int": [{"role": "user", "content": 7}],
    "role null": [{"role": None, "content": "1+1="}],
}
STRICT = (  # alternating turns, as Gemma's and Mistral's templates want them
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{% if message['role'] == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def strict(rows):
    """A preparation with a model whose template refuses two turns of one role in a row."""

    def prepare(worker):
        shutil.copytree(worker.root / "models" / "tiny", "mine")
        Path("mine/chat_template.jinja").write_text(STRICT)
        write("bad.jsonl", rows)
        return {"dataset": "bad.jsonl", "model": "mine"}

    return prepare


def row_cases():
    """One damaged row, the seventh of twelve, or where none alone is damage, all rows."""

    def seventh(kind, row):
        return [*GOOD[kind][:6], row, *GOOD[kind][7:]]

    number, at = 0, ("--dataset", "bad.jsonl", "row 7")
    for name, value in STRANGE.items():
        if name not in ("int", "bool"):
            words = (*at, "answer|list|dict|object")
            rows = seventh("prompts", {"prompt": "1+1=", "answer": value})
            for script in (in_turn(number, ONLINE), "ppo_rlhf"):
                yield Case(script, "rows", f"answer a {name}", words, prepare=dataset("bad.jsonl", rows))
        rows = [{"prompt": "1+1=", "answer": True}] * 12 if name == "bool" else None
        if rows:
            words = ("--dataset", "bad.jsonl", "row 1", "bool|True|true")
            yield Case(in_turn(number, ONLINE), "rows", "answers bools", words, prepare=dataset("bad.jsonl", rows))
        for column in ("prompt", "chosen", "rejected", "completion", "messages"):
            kind = {"prompt": "prompts", "completion": "chats", "messages": "chats"}.get(column, "pairs")
            row = {**(GOOD["pairs"][6] if kind == "pairs" else {"prompt": "1+1=", "answer": "2"}), column: value}
            rows = seventh(kind, row) if kind == "pairs" or column == "prompt" else None
            if column == "completion":
                rows = [{"prompt": "1+1=", "completion": "=2"}] * 6
                rows += [{"prompt": "1+1=", "completion": value}, *rows]
            if column == "messages":
                rows = seventh("chats", {"messages": value})
            owners = {"prompts": (in_turn(number, ONLINE), "ppo_rlhf"), "pairs": PAIRED, "chats": ("sft",)}[kind]
            for script in owners:
                words = (*at, column)
                yield Case(script, "rows", f"{column} a {name}", words, prepare=dataset("bad.jsonl", rows))
        number += 1
    for name, messages in MESSAGES.items():
        words = (*at, "role|content")
        rows = seventh("prompts", {"prompt": messages, "answer": "2"})
        for script in (in_turn(number, ONLINE), "ppo_rlhf"):
            yield Case(script, "rows", f"prompt: {name}", words, prepare=dataset("bad.jsonl", rows))
        rows = seventh("pairs", {**GOOD["pairs"][6], "prompt": messages})
        yield Case(in_turn(number, PAIRED), "rows", f"prompt: {name}", words, prepare=dataset("bad.jsonl", rows))
        bad = [user("1+1="), {**messages[0], **({"role": "assistant"} if messages[0].get("role") else {})}]
        rows = seventh("pairs", {"prompt": None, "chosen": [user("1+1="), assistant("2")], "rejected": bad})
        yield Case(in_turn(number, PAIRED), "rows", f"rejected: {name}", words, prepare=dataset("bad.jsonl", rows))
        rows = seventh("chats", {"messages": bad})
        yield Case("sft", "rows", f"messages: {name}", words, prepare=dataset("bad.jsonl", rows))
        number += 1
    rows = seventh("chats", {"messages": "hi"})
    yield Case("sft", "rows", "messages a string", (*at, "messages"), prepare=dataset("bad.jsonl", rows))
    sampled = {"prompt": "1+1=", "completion": "=2", "reward": 1.0}
    for name, value in {"a word": "good", "a list": [1.0], "an object": {"a": 1}}.items():
        rows = [*[sampled] * 6, {**sampled, "reward": value}, *[sampled] * 5]
        words, prepare = (*at, "reward|number|object"), dataset("bad.jsonl", rows)
        yield Case("sft", "rows", f"--min-reward: a reward {name}", words, {"min_reward": 1.0}, prepare)
    rows = seventh("pairs", {"prompt": "1+1=", "chosen": [assistant("2")], "rejected": "3"})
    for script in PAIRED:
        words = (*at, "chosen|rejected")
        yield Case(script, "rows", "chosen a list, rejected a string", words, prepare=dataset("bad.jsonl", rows))
    yield from whole_file_cases()


def whole_file_cases():
    """Rows that are dropped one by one, where none is left."""
    two_turns = [user("1+1="), user("2+2=")]
    refused = ("--dataset", "bad.jsonl", "roles must alternate")
    for script, row in (
        ("grpo", {"prompt": two_turns, "answer": "2"}),
        ("ppo_rlhf", {"prompt": two_turns, "answer": "2"}),
        ("dpo", {"prompt": two_turns, "chosen": "2", "rejected": "3"}),
        ("reward_model", {"prompt": two_turns, "chosen": "2", "rejected": "3"}),
        ("sft", {"messages": [*two_turns, assistant("4")]}),
    ):
        yield Case(script, "rows", "the template refuses all", refused, prepare=strict([row] * 12))
    ends = [user("1+1="), assistant("2")]
    for script, name, row, words in (
        ("grpo", "answers empty", {"prompt": "1+1=", "answer": ""}, ("0 training rows", "answer")),
        ("gspo", "answers null", {"prompt": "1+1=", "answer": None}, ("answer",)),
        ("dapo", "prompts empty", {"prompt": "", "answer": "1"}, ("prompt",)),
        ("dr_grpo", "prompts too long", {"prompt": "1+" * 40, "answer": "1"}, ("longer than 32 tokens",)),
        ("reinforce", "prompts end in the assistant's turn", {"prompt": ends, "answer": "2"}, ("assistant",)),
        ("ppo_rlhf", "prompts end in the assistant's turn", {"prompt": ends, "answer": "2"}, ("assistant",)),
        ("ppo_rlhf", "prompts of no messages", {"prompt": [], "answer": "2"}, ("prompt",)),
        ("grpo", "contents null", {"prompt": [user(None)], "answer": "2"}, ("prompt|content",)),
        ("dpo", "pairs identical", {"prompt": "1+1=", "chosen": "2", "rejected": "2"}, ("identical",)),
        ("reward_model", "pairs empty", {"prompt": "1+1=", "chosen": "2", "rejected": ""}, ("empty",)),
        (
            "reward_model",
            "pairs share no prompt",
            {"chosen": ends, "rejected": [user("3"), assistant("2")]},
            ("prompt",),
        ),
        (
            "dpo",
            "pairs end in the user's turn",
            {"chosen": ends[:1], "rejected": ends[:1]},
            ("empty|assistant|prompt",),
        ),
        ("dpo", "contents null", {"chosen": ends, "rejected": [user("1+1="), assistant(None)]}, ("empty",)),
        ("sft", "contents null", {"messages": [user("1+1="), assistant(None)]}, ("train|empty",)),
        ("sft", "no assistant's turn", {"messages": [user("1+1="), user("2")]}, ("train|assistant",)),
        ("sft", "no messages", {"messages": []}, ("train|messages",)),
        ("sft", "completions too long", {"prompt": "1", "completion": "1" * 99}, ("longer|too long",)),
        ("sft", "answers empty", {"question": "1+1=", "answer": ""}, ("0 training rows", "token to train")),
        ("sft", "answers numbers", {"question": "1+1=", "answer": 2}, ("row 1", "answer must be a text")),
        ("sft", "questions without answers", {"question": "1+1=", "score": 1}, ("completion", "found question, score")),
        ("sft", "solutions without problems", {"solution": "2"}, ("prompt", "found solution")),
    ):
        words = ("--dataset", "bad.jsonl", *words)
        yield Case(script, "rows", name, words, prepare=dataset("bad.jsonl", [row] * 12))
    for name, reward, words in (
        ("too low", {"reward": 0.5}, ("0 training rows", "reward below 1")),
        ("null", {"reward": None}, ("0 training rows", "without reward")),
        ("bools", {"reward": True}, ("row 1", "reward must be a number")),
        ("missing", {}, ("--min-reward", "column reward", "found prompt, completion")),
    ):
        words, rows = ("--dataset", "bad.jsonl", *words), [{"prompt": "1+1=", "completion": "2", **reward}] * 12
        yield Case("sft", "rows", f"--min-reward: {name}", words, {"min_reward": 1.0}, dataset("bad.jsonl", rows))
    rows = [{"prompt": row["prompt"]} for row in GOOD["prompts"]]
    for script in (*ONLINE, "ppo_rlhf"):
        settings = {"reward_model": "none"} if script == "ppo_rlhf" else {}
        words = ("answer",)
        yield Case(script, "rows", "no answers for reward_fn", words, settings, dataset("bad.jsonl", rows))
    settings = {"reward_model": "none"}
    yield Case("ppo_rlhf", "rows", "pairs for reward_fn", ("answer",), settings, dataset("bad.jsonl", GOOD["pairs"]))


# ---- models


def edit_json(path, **changes):
    values = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in (values | changes).items() if value != "DELETE"}))


def edit_weights(folder, change):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def drop(word):
    def change(weights):
        for name in [name for name in weights if word in name]:
            del weights[name]

    return lambda folder: edit_weights(folder, change)


def poison(word, value):
    def change(weights):
        for name in [name for name in weights if word in name]:
            weights[name].fill_(value)

    return lambda folder: edit_weights(folder, change)


def fewer_tokens(folder):
    """Embeddings of 20 tokens, of the 29 that the tokenizer has."""
    edit_json(folder / "config.json", vocab_size=20)
    edit_weights(
        folder,
        lambda weights: weights.update(
            {
                "model.embed_tokens.weight": next(
                    value[:20].clone() for name, value in weights.items() if "embed_tokens" in name
                )
            }
        ),
    )


def cut(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MODELS = {
    "a tensor missing": (drop("layers.2.mlp.up_proj"), ("missing|lacks", "layers.2.mlp.up_proj|tensor|weight")),
    "a layer missing": (drop("layers.3."), ("missing|lacks", "layers.3|tensor|weight")),
    "weights cut short": (cut("model.safetensors", 100_000), ("model.safetensors|weights|safetensors|incomplete",)),
    "weights empty": (cut("model.safetensors", 0), ("model.safetensors|weights|safetensors|[Hh]eader",)),
    "no weights": (remove("model.safetensors"), ("safetensors|weights",)),
    "no tokenizer": (remove(*TOKENIZER), ("tokenizer",)),
    "tokenizer cut short": (cut("tokenizer.json", 200), ("tokenizer",)),
    "config cut short": (cut("config.json", 200), ("config",)),
    "config empty": (cut("config.json", 0), ("config",)),
    "no config": (remove("config.json"), ("config",)),
    "config without model_type": (lambda f: edit_json(f / "config.json", model_type="DELETE"), ("model_type|config",)),
    "unknown model_type": (lambda f: edit_json(f / "config.json", model_type="qwen99"), ("qwen99",)),
    "another hidden size": (lambda f: edit_json(f / "config.json", hidden_size=64), ("size|shape",)),
    "more layers in the config": (
        lambda f: edit_json(f / "config.json", num_hidden_layers=5, layer_types=["full_attention"] * 5),
        ("missing|lacks",),
    ),
    "nan weights": (poison("layers.1.mlp", math.nan), ("nan|not finite|NaN|finite",)),
    "inf weights": (poison("norm", math.inf), ("nan|not finite|NaN|inf|finite",)),
    "fewer tokens than the tokenizer": (fewer_tokens, ("vocabulary|tokenizer|embedding", "20|29")),
    "an empty folder": (lambda f: [path.unlink() for path in f.iterdir()], ("config|tokenizer|empty|no model",)),
    "a file": (lambda f: (shutil.rmtree(f), f.write_text("hi")), ("file|folder",)),
}


def no_stop_token(folder):
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|end|>", ""))
    edit_json(folder / "tokenizer_config.json", eos_token="DELETE")
    edit_json(folder / "config.json", eos_token_id=None)
    if (folder / "generation_config.json").exists():
        edit_json(folder / "generation_config.json", eos_token_id=None)


def model_cases():
    """Each damage by an online script, by one of the others, and by reward_model; and reward models for ppo_rlhf."""
    for number, (name, (change, words)) in enumerate(MODELS.items()):
        for script in (in_turn(number, ONLINE), in_turn(number, ("sft", "dpo", "ppo_rlhf")), "reward_model"):
            scorer = {"reward_model": "none"} if script == "ppo_rlhf" else {}
            yield Case(script, "models", name, ("--model", "mine", *words), scorer, model(change))
        if number % 3 == 0:
            words = ("--reward-model", "mine", *words)
            prepare = model(change, "reward_model", "tiny-reward")
            yield Case("ppo_rlhf", "models", f"--reward-model: {name}", words, prepare=prepare)
    for script in ("grpo", "sft", "dpo", "reward_model"):
        words = ("stop token|eos_token|end",)
        yield Case(script, "models", "no stop token", words, prepare=model(no_stop_token))
    for number, script in enumerate(ALL):
        where = ("no/such/folder", "./nope", "/nope/model")[number % 3]
        scorer = {"reward_model": "none"} if script == "ppo_rlhf" else {}
        yield Case(script, "models", f"--model {where}", ("--model", where, "no such"), scorer | {"model": where})
    for script in ("gspo", "sft", "reward_model"):
        words = ("--model", "nobody/nothing")
        yield Case(script, "models", "no such hub name", words, {"model": "nobody/nothing"})
    for script in ("grpo", "dpo", "reward_model", "ppo_rlhf"):
        words = ("--model", "base", "checkpoint")
        prepare = run_folder(lambda folder: folder.rename("base"), model="base", resume=None, bare=False)
        yield Case(script, "models", "a run folder instead of its checkpoint", words, prepare=prepare)
    words = ("--reward-model", "no/such/folder", "no such")
    yield Case("ppo_rlhf", "models", "no such reward model", words, {"reward_model": "no/such/folder"})
    words = ("--reward-model", "head|score|trained")
    yield Case("ppo_rlhf", "models", "a policy as reward model", words, prepare=model(lambda _: None, "reward_model"))
    words = ("--reward-model", "missing")
    yield Case("ppo_rlhf", "models", "no reward model", words, {"reward_model": ""})


# ---- runs


def newest(folder):
    return max((folder / "state").iterdir())


def in_state(change):
    return lambda folder: change(newest(folder))


def cut_shards(state):
    for path in state.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:2000])


def damaged_line(folder):
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval\n' + text)


RUNS = {
    "args.json cut short": (cut("args.json", 50), ("args.json",)),
    "args.json empty": (cut("args.json", 0), ("args.json",)),
    "args.json a list": (lambda f: (f / "args.json").write_text("[1]"), ("args.json|another script",)),
    "args.json missing": (remove("args.json"), ("args.json",)),
    "args.json of wrong types": (
        lambda f: edit_json(f / "args.json", max_completion_length="many"),
        ("args.json|max.completion.length",),
    ),
    "args.json of an unknown precision": (
        lambda f: edit_json(f / "args.json", precision="float16"),
        ("precision float16",),
    ),
    "args.json of another rank of adapters": (lambda f: edit_json(f / "args.json", lora_rank=2), ("state", "lacks")),
    "no state": (lambda f: shutil.rmtree(f / "state"), ("state",)),
    "state empty": (lambda f: (shutil.rmtree(f / "state"), (f / "state").mkdir()), ("state",)),
    "state without .metadata": (in_state(lambda s: (s / ".metadata").unlink()), ("state",)),
    ".metadata cut short": (in_state(lambda s: cut(".metadata", 50)(s)), ("state",)),
    "state cut short": (in_state(cut_shards), ("state",)),
    "state without its file": (in_state(lambda s: [p.unlink() for p in s.glob("*.distcp")]), ("state",)),
    "a damaged line of metrics": (damaged_line, ("metrics.jsonl",)),
    "the dataset is gone": (lambda f: edit_json(f / "args.json", dataset="gone.jsonl"), ("gone.jsonl", "no such file")),
    "the model is gone": (lambda f: edit_json(f / "args.json", model="./gone"), ("--model", "gone", "no such")),
}


def run_cases():
    """Each damage in a run of an online script, of one of the others, and of sft."""
    for number, (name, (change, words)) in enumerate(RUNS.items()):
        for script in (in_turn(number, ONLINE), in_turn(number, ("ppo_rlhf", "dpo", "reward_model")), "sft"):
            yield Case(script, "runs", name, words, prepare=run_folder(change))
    change = lambda folder: (folder / "reference_train.json").write_text('{"cho')  # noqa: E731
    yield Case("dpo", "runs", "reference cut short", ("reference_train.json",), prepare=run_folder(change))
    change = lambda folder: (folder / "normalization.json").write_text('{"me')  # noqa: E731
    yield Case("ppo_rlhf", "runs", "normalization cut short", ("normalization.json",), prepare=run_folder(change))
    for number, script in enumerate(ALL):
        name, settings, words = (
            ("--resume of nothing", {"resume": "nothing"}, ("--resume nothing",)),
            ("--resume of a file", {"resume": "good.jsonl"}, ("--resume good.jsonl",)),
            ("--resume with other flags", {"resume": "nothing", "seed": 3}, ("--resume", "--seed")),
        )[number % 3]
        yield Case(script, "runs", name, words, {**settings, "bare": True})
        words = ("checkpoint", "--resume", "folder of (the|a) run|run")
        prepare = run_folder(lambda _: None, resume="run/checkpoint")
        if number % 2:
            yield Case(script, "runs", "--resume of a checkpoint", words, prepare=prepare)
        else:
            prepare = run_folder(lambda _: None, num_steps=0)
            yield Case(script, "runs", "--num-steps below what is done", ("--num-steps",), prepare=prepare)
    earlier = dict.fromkeys(("precision", "lora_rank", "sampler_weight_cap"), "DELETE")
    for number, script in enumerate(ALL):
        prepare = run_folder(lambda folder: edit_json(folder / "args.json", **earlier))
        yield Case(script, "runs", "a run of an earlier version", ("args.json", "version"), prepare=prepare)
        given = ({"lora_rank": 2}, {"precision": "bfloat16"}, {"precision": "bfloat16", "lora_rank": 4})[number % 3]
        words = ("--resume", *map(flag, given), "only --num-steps")
        name = f"--resume with {' and '.join(map(flag, given))}"
        yield Case(script, "runs", name, words, prepare=run_folder(lambda _: None, **given))
    change = lambda folder: edit_json(folder / "args.json", baseline="none")  # noqa: E731
    for script in ("grpo", "sft", "ppo_rlhf"):
        yield Case(script, "runs", "a run of another script", ("another script",), prepare=run_folder(change))
    for number, script in enumerate(ALL):
        name, where, words = (
            ("--run-dir exists", "here", ("--run-dir here", "exists")),
            ("--run-dir under a file", "good.jsonl/run", ("--run-dir good.jsonl/run",)),
            ("--run-dir unwritable", "/proc/run", ("--run-dir /proc/run",)),
            ("--run-dir over-long", OVERLONG, ("--run-dir",)),
        )[number % 4]
        yield Case(script, "runs", name, words, {"run_dir": where}, files(**{"here/args__json": "{}"}))
    for script in ("grpo", "sft", "dpo"):
        yield Case(script, "runs", "--track without a key", ("--track|WANDB|[Ww]andb|wandb",), {"track": True})


# ---- rewards


def reward_cases():
    """What reward_fn or score_completions may wrongly return."""
    values = {"nan": math.nan, "None": None, "a string": "good", "inf": math.inf, "a list": [1.0]}
    for number, (name, value) in enumerate(values.items()):
        for script in (in_turn(number, ONLINE), "ppo_rlhf"):
            settings = {"reward_model": "none"} if script == "ppo_rlhf" else {}
            patch = {"reward_fn": lambda completion, answer, value=value: value}  # noqa: ARG005
            yield Case(script, "rewards", f"reward_fn gives {name}", ("reward",), settings, patch=patch)
    batches = {"too few": [1.0] * 3, "too many": [1.0] * 99, "none": [], "a number": 1.0, "nothing": None}
    for number, (name, value) in enumerate(batches.items()):
        for script in (in_turn(number, ONLINE), "ppo_rlhf"):
            settings = {"reward_model": "none"} if script == "ppo_rlhf" else {}
            patch = {"score_completions": lambda completions, rows, value=value: value}  # noqa: ARG005
            yield Case(script, "rewards", f"score_completions gives {name}", ("reward|score",), settings, patch=patch)


def all_cases(root):
    return [*setting_cases(root), *file_cases(), *row_cases(), *model_cases(), *run_cases(), *reward_cases()]


# ---- running them


class Worker:
    """In a process of its own: one script, imported once, and one finished run of it."""

    def __init__(self, script, root):
        self.root, self.name = Path(root), script
        sys.path.insert(0, str(root))
        self.script = importlib.import_module(script)
        assert Path(self.script.__file__).parent == self.root, self.script.__file__
        if script == "ppo_rlhf":
            self.script.NORM_SAMPLES = 8
        self.finished = None

    def settings_of(self, given):
        """The case's settings over the small ones that the script has; bare: none but the case's own."""
        names = {field.name for field in fields(self.script.Args)}
        small = {} if given.get("bare") else {name: value for name, value in SMALL.items() if name in names}
        small |= {} if given.get("bare") else {"dataset": "good.jsonl"}
        if "eval_dataset" in names and not given.get("bare"):
            small["eval_dataset"] = ""
        return small | {name: value for name, value in given.items() if name != "bare"}

    def copy_run(self, target):
        """Copy a finished run of one step, which the first call makes."""
        if self.finished is None:
            folder = Path(tempfile.mkdtemp(prefix="bad_inputs_run_"))
            shutil.copy("good.jsonl", folder / "good.jsonl")
            settings = self.settings_of({"dataset": str(folder / "good.jsonl"), "run_dir": str(folder / "run")})
            self.script.main(self.script.Args(**settings))
            self.finished = folder / "run"
        shutil.copytree(self.finished, target)

    def run(self, case):
        """Return how a case ends and with which text."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        saved = {name: getattr(self.script, name) for name in case.patch}
        write("good.jsonl", GOOD[reads(self.name)])
        errors = io.StringIO()
        try:
            given = {**case.settings, **((case.prepare and case.prepare(self)) or {})}
            for name, value in case.patch.items():
                setattr(self.script, name, value)
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
                if case.line is not None:
                    sys.argv = [f"{self.name}.py", *case.line]
                    parse_args = getattr(self.script, "parse_args", lambda: tyro.cli(self.script.Args))
                    self.script.main(parse_args())
                else:
                    self.script.main(self.script.Args(**self.settings_of(given)))
            return "silent", ""
        except SystemExit as error:
            text = error.code if isinstance(error.code, str) else errors.getvalue()
            boxed = case.line is not None and not isinstance(error.code, str)
            short = boxed or (
                isinstance(error.code, str) and "\n" not in text and len(text.replace(OVERLONG, "")) <= 350
            )
            clear = short and all(re.search(word, text) for word in case.words)
            return "clear" if clear else "misleading", text
        except BaseException as error:
            return "traceback", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        finally:
            for name, value in saved.items():
                setattr(self.script, name, value)
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(connection, script, root):
    """A worker's loop: numbers of cases come in, results go out; what is printed goes nowhere."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "WANDB_SILENT": "true"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9"}
    os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="bad_inputs_cache_")
    os.environ.pop("WANDB_API_KEY", None)
    os.environ["HOME"] = os.environ["HF_DATASETS_CACHE"]  # no .netrc
    import torch

    torch.set_num_threads(1)
    worker, cases = Worker(script, root), all_cases(Path(root))
    while (number := connection.recv()) is not None:
        with tempfile.TemporaryDirectory(prefix="bad_inputs_") as folder:
            os.chdir(folder)
            if any(not hasattr(worker.script, name) for name in cases[number].patch):
                result = None, "the script has no such function"
            else:
                result = worker.run(cases[number])
            os.chdir("/")
        connection.send(result)
    shutil.rmtree(os.environ["HF_DATASETS_CACHE"], ignore_errors=True)
    if worker.finished:
        shutil.rmtree(worker.finished.parent, ignore_errors=True)


def start(script, root):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, script, str(root)), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def run_all(cases, numbers, root):
    """{number: (kind, text, seconds)} of the cases; a worker that hangs or dies is replaced."""
    results = {}
    for script in ALL:
        worker = None
        for number in [number for number in numbers if cases[number].script == script]:
            worker, begin = worker or start(script, root), time.perf_counter()
            process, connection = worker
            connection.send(number)
            try:
                if not connection.poll(LIMIT):
                    raise EOFError
                kind, text = connection.recv()
            except (EOFError, ConnectionError):
                kind, text, worker = "traceback", f"no end within {LIMIT} s, or the process died", None
                process.kill()
            if kind is not None:
                results[number] = kind, text, time.perf_counter() - begin
        if worker:
            worker[1].send(None)
            worker[0].join(30)
        done = [results[n] for n in results if cases[n].script == script]
        if done:
            counts = Counter(kind for kind, *_ in done)
            print(row(script, counts), f"{sum(seconds for *_, seconds in done):6.0f} s", flush=True)
    return results


def row(name, counts):
    return f"{name:14}" + "".join(f"{counts[kind]:>12}" for kind in KINDS) + f"{sum(counts.values()):>8}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scripts", nargs="*", help="default: all")
    parser.add_argument("--root", default=Path(__file__).parent.parent, help="the checkout whose scripts are run")
    parser.add_argument("--only", default="", help="only cases whose group or name has this word")
    given = parser.parse_args()
    root, scripts = Path(given.root).resolve(), given.scripts or ALL
    cases = all_cases(root)
    numbers = [
        n for n, case in enumerate(cases) if case.script in scripts and given.only in f"{case.group}: {case.name}"
    ]
    begin = time.perf_counter()
    print(f"{len(numbers)} bad inputs\n\n{'script':14}" + "".join(f"{kind:>12}" for kind in KINDS) + f"{'all':>8}")
    results = run_all(cases, numbers, root)
    total = Counter(kind for kind, *_ in results.values())
    print(row("all", total), f"{time.perf_counter() - begin:6.0f} s")
    for group in dict.fromkeys(case.group for case in cases):
        kinds = Counter(results[n][0] for n in results if cases[n].group == group)
        print(row(group, kinds)) if kinds else None
    print()
    for number, (kind, text, _) in results.items():
        if kind != "clear":
            case = cases[number]
            print(f"{kind:11} {case.script}, {case.group}: {case.name}: {' '.join(text.split())[:420]}")
    return 0 if total["clear"] >= 0.95 * total.total() and not total["silent"] else 1


if __name__ == "__main__":
    sys.exit(main())
