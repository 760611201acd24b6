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
ABSENT = "no such|no model|no (json|whole)|not there|cannot be loaded"
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
    """Write a file of bytes, a text or rows; or a folder of these by name."""
    path = Path(path)
    for name, inner in content.items() if isinstance(content, dict) else ():
        write(path / name, inner)
    if not isinstance(content, dict):
        path.parent.mkdir(parents=True, exist_ok=True)
        content = lines(content) if isinstance(content, list) else content
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def dataset(path, content):
    """A preparation that writes one file or folder, if there is a content, and gives it as --dataset."""

    def prepare(_):
        if content is not None:
            write(path, content)
        return {"dataset": path.partition("/")[0] if path.startswith("folder") else path}

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


def unscored(script):
    """Settings without a reward model."""
    return {"reward_model": "none"} if script == "ppo_rlhf" else {}


def flag(name):
    return "--" + name.replace("_", "-")


def setting_cases(root):
    """nan for every float of every script; inf, -1 and 0 where the first script that has the field has it."""
    seen = set()
    for script in ALL:
        for name, is_float in numeric_fields(script, root):
            values = [math.nan] if is_float else []
            if name not in seen:
                values += [math.inf] * is_float + [-1.0 if is_float else -1]
                values += [0] * (name in POSITIVE)
            seen.add(name)
            for value in values:
                yield setting(script, name, value, "must be|must not|at least|finite|number")
    for script in ("grpo", "dr_grpo", "dapo", "gspo", "ppo_rlhf"):  # reinforce has one step a rollout
        yield setting(script, "minibatch_size", 3, "3", "divide")
    for script in ONLINE:
        yield setting(script, "group_size", 1, "1", "at least 2")
    for script, name, value, *words in (
        ("dapo", "overlong_buffer", 99, "99", "--max-completion-length"),
        ("ppo_rlhf", "gamma", 1.5, "at most 1"),
        ("ppo_rlhf", "gae_lambda", 1.5, "at most 1"),
        ("dpo", "label_smoothing", 0.6, "0.5"),
    ):
        yield setting(script, name, value, *words)
    for number, script in enumerate(ALL):
        if script in PROMPTED:  # elsewhere the data says how long it is
            too_long = {"max_prompt_length": 400, "max_completion_length": 400}
            yield Case(script, "settings", "context too short", ("completion", "context", "256"), too_long)
        words = ("--eval-prompts", "12 (training )?rows|too few")
        yield Case(script, "settings", "--eval-prompts 100 of 12 rows", words, {"eval_prompts": 100})
        for name in ("model", "dataset", "resume", "run_dir"):
            settings = {name: "", "bare": name == "resume"} | (unscored(script) if name == "model" else {})
            words = (flag(name), f"{ABSENT}|no run|empty|missing|choose another")
            yield Case(script, "settings", f'{flag(name)} ""', words, settings)
        for value in (("float16", ""), (8, "bf16"), ("fp32", "float16"))[number % 3]:
            yield setting(script, "precision", value, str(value), "bfloat16 or float32")
        yield setting(script, "lora_rank", -1, "-1", "must be")
        words = ("--lora-rank 2", "linear layers")
        yield Case(script, "settings", "--lora-rank of GPT-2", words, {"lora_rank": 2}, model(as_gpt2))
    for number, script in enumerate(PROMPTED):
        value = (0, -1, math.inf)[number % 3]
        yield setting(script, "sampler_weight_cap", value, str(value), "must be")
    for script in ("grpo", "sft"):
        settings = {"learning_rate": 1e30, "num_steps": 3}
        yield Case(script, "settings", "--learning-rate 1e30", ("--learning-rate",), settings)
    wrong = "must be|invalid|[Ii]nvalid|expected|not a valid|parsing|unparsable"
    unparsable = "grpo --precision float16, sft --precision , dpo --precision 8, reward_model --lora-rank -1, "
    unparsable += "ppo_rlhf --lora-rank 1.5, gspo --lora-rank abc"
    unknown = "grpo --group-sizes 4, dpo --betas 4, sft --epochs 4, ppo_rlhf --kl 4"
    no_number = "dapo --num-steps ten, reward_model --seed ten, gspo --clip-eps-low ten, reinforce --baseline median"
    for calls, words in ((unparsable, (wrong,)), (unknown, None), (no_number, ())):
        for script, bad, value in (call.split(" ") for call in calls.split(", ")):
            expected = (bad,) if words is None else (bad, re.escape(value), *words)
            yield Case(script, "command line", f"{bad} {value!r}", expected, line=[bad, value])
    for script in ("dr_grpo", "sft"):
        yield Case(script, "command line", "--num-steps without value", ("--num-steps",), line=["--num-steps"])


def setting(script, name, value, *words):
    """A case of one setting, which the line names."""
    return Case(script, "settings", f"{flag(name)} {value!r}", (flag(name), *words), {name: value})


def as_gpt2(folder):
    """Make a model of another family, most of whose weights are in layers of its own, with the folder's tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256}
    eos = json.loads((folder / "config.json").read_text())["eos_token_id"]
    GPT2LMHeadModel(GPT2Config(vocab_size=29, **sizes, bos_token_id=None, eos_token_id=eos)).save_pretrained(folder)


# ---- data files


def in_turn(number, scripts):
    return scripts[number % len(scripts)]


def file_cases():
    """Each kind of damaged file by one reader of prompts, of pairs and of chats, in turn."""

    def broken(kind):
        return lines(GOOD[kind][:6]) + '{"prompt": "1+1=", "answer": \n' + lines(GOOD[kind][6:])

    def columns(kind):
        return {"train.jsonl": GOOD[kind], "test.jsonl": [{"x": 1}] * 4}

    empty = "empty|no rows|0 .*rows|No columns"
    damaged = {
        "no such file": (None, "nope.jsonl", (ABSENT,)),
        "no such folder": (None, "data/nope", (ABSENT,)),
        "no such absolute path": (None, "/nope/rows.jsonl", (ABSENT,)),
        "empty file": (lambda _: "", "bad.jsonl", (empty,)),
        "blank file": (lambda _: "\n\n\n", "bad.jsonl", (empty,)),
        "empty list": (lambda _: "[]", "bad.json", (empty,)),
        "empty csv": (lambda _: "", "bad.csv", (empty,)),
        "broken JSON": (broken, "bad.jsonl", ("JSON|value|object|Expect",)),
        "half a file": (lambda kind: lines(GOOD[kind])[:-9], "bad.jsonl", ("damaged|JSON",)),
        "one object": (lambda _: '{"a": 1}', "bad.json", ("column|too few",)),
        "a string": (lambda _: '"hello"', "bad.json", ("damaged|JSON|rows",)),
        "a list of numbers": (lambda _: "[1, 2, 3]", "bad.json", ("column|object",)),
        "binary": (lambda _: bytes(range(256)) * 9, "bad.jsonl", ("damaged|JSON|decode|cannot be",)),
        "text": (lambda _: "hello\nthere\n", "bad.txt", ("jsonl|row 1",)),
        "not parquet": (lambda _: b"PAR1junk", "bad.parquet", ("[Pp]arquet",)),
        "csv without header": (lambda _: "1+1=,2\n" * 9, "bad.csv", ("column", "1\\+1=, ?2")),
        "ragged csv": (lambda _: "prompt,answer\n1,2\n1,2,3,4\n", "bad.csv", ("line 3",)),
        "folder without data": (lambda _: "# hi", "folder/README.md", ("data files",)),
        "splits of other columns": (columns, "folder", ("column|cast", "x")),
        "one row": (lambda kind: GOOD[kind][:1], "bad.jsonl", ("too few|--eval-prompts",)),
        "other columns": (lambda _: [{"text": "a", "label": 1}] * 9, "bad.jsonl", ("column", "text, label")),
    }
    for number, (name, (make, path, words)) in enumerate(damaged.items()):
        words = (path.partition("/")[0] if path.startswith("folder") else re.escape(path), *words)
        for script in (in_turn(number, PROMPTED), in_turn(number, PAIRED), "sft"):
            prepare = dataset(path, make and make(reads(script)))
            yield Case(script, "data files", name, ("--dataset", *words), prepare=prepare)
    for script, kind, words in (
        ("gspo", "chats", ("prompt", "messages")),
        ("dpo", "prompts", ("chosen", "prompt, answer")),
        ("reward_model", "chats", ("chosen", "messages")),
        ("sft", "pairs", ("completion", "prompt, chosen, rejected")),
        ("ppo_rlhf", "chats", ("prompt", "messages")),
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
        write("bad.jsonl", rows)
        change = lambda folder: (folder / "chat_template.jinja").write_text(STRICT)  # noqa: E731
        return {"dataset": "bad.jsonl", **model(change)(worker)}

    return prepare


def row_case(script, name, rows, *words):
    """A case of rows of a file that can be read."""
    return Case(script, "rows", name, ("--dataset", "bad.jsonl", *words), prepare=dataset("bad.jsonl", rows))


def row_cases():
    """One damaged row, the seventh of twelve, or where none alone is damage, all rows."""

    def seventh(script, **row):
        good = GOOD[reads(script)]
        return [*good[:6], {**good[6], **row}, *good[7:]]

    for number, (name, value) in enumerate(STRANGE.items()):
        for script in (in_turn(number, ONLINE), "ppo_rlhf"):
            yield row_case(script, f"prompt a {name}", seventh(script, prompt=value), "row 7", "prompt")
            if name not in ("int", "bool"):
                words = "row 7", "answer|list|dict|object"
                yield row_case(script, f"answer a {name}", seventh(script, answer=value), *words)
        for script in PAIRED:
            for column in ("chosen", "rejected"):
                yield row_case(script, f"{column} a {name}", seventh(script, **{column: value}), "row 7", column)
        rows = [{"prompt": "1+1=", "completion": value if i == 6 else "=2"} for i in range(12)]
        yield row_case("sft", f"completion a {name}", rows, "row 7", "completion|content of a message")
        yield row_case("sft", f"messages a {name}", seventh("sft", messages=value), "row 7", "messages")
    yield row_case("reinforce", "answers bools", [{"prompt": "1+1=", "answer": True}] * 12, "row ", "bool|True|true")
    yield row_case("sft", "messages a string", seventh("sft", messages="hi"), "row 7", "messages")
    for number, (name, messages) in enumerate(MESSAGES.items()):
        words, pair_script = ("row 7", "role|content"), in_turn(number, PAIRED)
        for script in (in_turn(number, ONLINE), "ppo_rlhf", pair_script):
            yield row_case(script, f"prompt: {name}", seventh(script, prompt=messages), *words)
        bad = [user("1+1="), {**messages[0], **({"role": "assistant"} if messages[0].get("role") else {})}]
        if name != "role null":  # of nothing that an assistant says: such a row is dropped and counted
            yield row_case("sft", f"messages: {name}", seventh("sft", messages=bad), *words)
            row = {"prompt": None, "chosen": [user("1+1="), assistant("2")], "rejected": bad}
            yield row_case(pair_script, f"rejected: {name}", seventh(pair_script, **row), *words)
    for script in PAIRED:
        rows = seventh(script, chosen=[assistant("2")])
        yield row_case(script, "chosen a list, rejected a string", rows, "row 7", "chosen|rejected")
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
        ("grpo", "answers empty", {"prompt": "1+1=", "answer": ""}, ("too few", "answer")),
        ("gspo", "answers null", {"prompt": "1+1=", "answer": None}, ("answer",)),
        ("dapo", "prompts empty", {"prompt": "", "answer": "1"}, ("prompt",)),
        ("dr_grpo", "prompts too long", {"prompt": "1+" * 40, "answer": "1"}, ("(longer than|1 to) 32 tokens",)),
        ("reinforce", "prompts end in the assistant's turn", {"prompt": ends, "answer": "2"}, ("assistant",)),
        ("ppo_rlhf", "prompts end in the assistant's turn", {"prompt": ends, "answer": "2"}, ("assistant",)),
        ("ppo_rlhf", "prompts of no messages", {"prompt": [], "answer": "2"}, ("prompt",)),
        ("grpo", "contents null", {"prompt": [user(None)], "answer": "2"}, ("prompt|content",)),
        ("dpo", "pairs identical", {"prompt": "1+1=", "chosen": "2", "rejected": "2"}, ("identical",)),
        ("reward_model", "pairs empty", {"prompt": "1+1=", "chosen": "2", "rejected": ""}, ("empty",)),
        ("reward_model", "pairs share no prompt", {"chosen": ends, "rejected": [user("3"), ends[1]]}, ("prompt",)),
        ("dpo", "pairs of questions", {"chosen": ends[:1], "rejected": ends[:1]}, ("empty|assistant|prompt",)),
        ("dpo", "contents null", {"chosen": ends, "rejected": [user("1+1="), assistant(None)]}, ("empty",)),
        ("sft", "contents null", {"messages": [user("1+1="), assistant(None)]}, ("train|empty",)),
        ("sft", "no assistant's turn", {"messages": [user("1+1="), user("2")]}, ("train|assistant",)),
        ("sft", "no messages", {"messages": []}, ("train|messages",)),
        ("sft", "completions too long", {"prompt": "1", "completion": "1" * 99}, ("longer|too long",)),
        ("sft", "answers empty", {"question": "1+1=", "answer": ""}, ("too few", "token to train")),
        ("sft", "answers numbers", {"question": "1+1=", "answer": 2}, ("row ", "must be a text")),
        ("sft", "questions without answers", {"question": "1+1=", "score": 1}, ("completion", "found question, score")),
        ("sft", "solutions without problems", {"solution": "2"}, ("prompt", "found solution")),
    ):
        yield row_case(script, name, [row] * 12, *words)
    rows = [{"prompt": row["prompt"]} for row in GOOD["prompts"]]
    for script in (*ONLINE, "ppo_rlhf"):
        prepare = dataset("bad.jsonl", rows)
        yield Case(script, "rows", "no answers for reward_fn", ("answer",), unscored(script), prepare)
    prepare = dataset("bad.jsonl", GOOD["pairs"])
    yield Case("ppo_rlhf", "rows", "pairs for reward_fn", ("answer",), unscored("ppo_rlhf"), prepare)


# ---- models


def edit_json(path, **changes):
    values = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in (values | changes).items() if value != "DELETE"}))


def edited(name, **changes):
    """A damage of a json file of a folder."""
    return lambda folder: edit_json(folder / name, **changes)


def weights(word, change):
    """A damage of those weights that have the word in their names; where change gives None they are dropped."""

    def damage(folder):
        from safetensors.torch import load_file, save_file

        found = load_file(folder / "model.safetensors")
        found |= {name: change(value.clone()) for name, value in found.items() if word in name}
        found = {name: value for name, value in found.items() if value is not None}
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def fewer_tokens(folder):
    """Embeddings of 20 tokens, of the 29 that the tokenizer has."""
    edit_json(folder / "config.json", vocab_size=20)
    weights("embed_tokens", lambda value: value[:20].clone())(folder)


def cut(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MODELS = {
    "a tensor missing": (
        weights("layers.2.mlp.up_proj", lambda _: None),
        ("missing|lacks", "layers.2.mlp.up_proj|tensor|weight"),
    ),
    "a layer missing": (weights("layers.3.", lambda _: None), ("missing|lacks", "layers.3|tensor|weight")),
    "weights cut short": (cut("model.safetensors", 100_000), ("model.safetensors|weights|safetensors|incomplete",)),
    "weights empty": (cut("model.safetensors", 0), ("model.safetensors|weights|safetensors|[Hh]eader",)),
    "no weights": (remove("model.safetensors"), ("safetensors|weights",)),
    "no tokenizer": (remove(*TOKENIZER), ("tokenizer",)),
    "tokenizer cut short": (cut("tokenizer.json", 200), ("tokenizer",)),
    "config cut short": (cut("config.json", 200), ("config",)),
    "config empty": (cut("config.json", 0), ("config",)),
    "no config": (remove("config.json"), ("config",)),
    "config without model_type": (edited("config.json", model_type="DELETE"), ("model_type|config",)),
    "unknown model_type": (edited("config.json", model_type="qwen99"), ("qwen99",)),
    "another hidden size": (edited("config.json", hidden_size=64), ("size|shape",)),
    "more layers in the config": (
        edited("config.json", num_hidden_layers=5, layer_types=["full_attention"] * 5),
        ("missing|lacks",),
    ),
    "nan weights": (weights("layers.1.mlp", lambda value: value * math.nan), ("nan|damaged",)),
    "inf weights": (weights("norm", lambda value: value + math.inf), ("nan|damaged|not finite",)),
    "fewer tokens than the tokenizer": (fewer_tokens, ("tokenizer|index out of range",)),
    "an empty folder": (lambda f: [path.unlink() for path in f.iterdir()], ("config|tokenizer|empty|no model",)),
    "a file": (lambda f: (shutil.rmtree(f), f.write_text("hi")), ("file|folder",)),
}


def no_stop_token(folder):
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|end|>", ""))
    edit_json(folder / "tokenizer_config.json", eos_token="DELETE")
    for name in ("config.json", "generation_config.json"):
        edit_json(folder / name, eos_token_id=None)


def model_cases():
    """Each damage by an online script, by one of the others, and by reward_model; and reward models for ppo_rlhf."""
    for number, (name, (change, words)) in enumerate(MODELS.items()):
        for script in (in_turn(number, ONLINE), in_turn(number, ("sft", "dpo", "ppo_rlhf")), "reward_model"):
            yield Case(script, "models", name, ("--model", "mine", *words), unscored(script), model(change))
        if number % 3 == 0:
            words = ("--reward-model", "mine", *words)
            prepare = model(change, "reward_model", "tiny-reward")
            yield Case("ppo_rlhf", "models", f"--reward-model: {name}", words, prepare=prepare)
    for script in ("grpo", "sft", "dpo", "reward_model"):
        yield Case(script, "models", "no stop token", ("eos_token|stop token",), prepare=model(no_stop_token))
    for number, script in enumerate(ALL):
        where = ("no/such/folder", "./nope", "/nope/model")[number % 3]
        settings = {"model": where} | unscored(script)
        yield Case(script, "models", f"--model {where}", ("--model", where, ABSENT), settings)
    for script in ("gspo", "sft", "reward_model"):
        yield Case(script, "models", "no such hub name", ("--model", "nobody/nothing"), {"model": "nobody/nothing"})
    for script in ("grpo", "dpo", "reward_model", "ppo_rlhf"):
        words = ("--model", "base", "checkpoint")
        settings = {"model": "base", "resume": None, "bare": False} | unscored(script)
        prepare = run_folder(lambda folder: folder.rename("base"), **settings)
        yield Case(script, "models", "a run folder instead of its checkpoint", words, prepare=prepare)
    for name, where, words in (
        ("no such reward model", "no/such/folder", (ABSENT,)),
        ("a policy as reward model", "models/tiny", ("scores|trained",)),
        ("no reward model", "", ("missing",)),
    ):
        prepare = (lambda worker: {"reward_model": str(worker.root / "models/tiny")}) if "policy" in name else None
        yield Case("ppo_rlhf", "models", name, ("--reward-model", where, *words), {"reward_model": where}, prepare)


# ---- runs


def in_state(change):
    return lambda folder: change(max((folder / "state").iterdir()))


def cut_shards(state):
    for path in state.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:2000])


def damaged_line(folder):
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval\n' + text)


def edit_run(**changes):
    """A damage of what args.json says of the run."""

    def damage(folder):
        run = json.loads((folder / "args.json").read_text())["run"]
        edit_json(folder / "args.json", run=run | changes)

    return damage


RUNS = {
    "args.json cut short": (cut("args.json", 50), ("damaged",)),
    "args.json empty": (cut("args.json", 0), ("damaged",)),
    "args.json a list": (lambda f: (f / "args.json").write_text("[1]"), ("damaged|another script",)),
    "args.json missing": (remove("args.json"), ("args.json",)),
    "args.json of a length of -1": (edited("args.json", max_completion_length=-1), ("--max-completion-length -1",)),
    "args.json of an unknown precision": (edited("args.json", precision="float16"), ("precision float16",)),
    "args.json of another rank of adapters": (edited("args.json", lora_rank=2), ("initial_weights",)),
    "a run of another script": (edit_run(script="another"), ("another",)),
    "a run on other data": (edit_run(data=["9 training rows (0)"]), ("9 training rows",)),
    "a run of more ranks": (edit_run(ranks=9), ("ranks was 9",)),
    "no state": (lambda f: shutil.rmtree(f / "state"), ("state",)),
    "state empty": (lambda f: (shutil.rmtree(f / "state"), (f / "state").mkdir()), ("state",)),
    "state without .metadata": (in_state(lambda s: (s / ".metadata").unlink()), ("state",)),
    ".metadata cut short": (in_state(lambda s: cut(".metadata", 50)(s)), ("state",)),
    "state cut short": (in_state(cut_shards), ("state",)),
    "state without its file": (in_state(lambda s: [p.unlink() for p in s.glob("*.distcp")]), ("state",)),
    "a damaged line of metrics": (damaged_line, ("metrics.jsonl",)),
    "the dataset is gone": (edited("args.json", dataset="gone.jsonl"), ("gone.jsonl", ABSENT)),
    "the model is gone": (edited("args.json", model="./gone"), ("--model", "gone", ABSENT)),
}


def run_cases():
    """Each damage in a run of an online script, of one of the others, and of sft."""
    for number, (name, (change, words)) in enumerate(RUNS.items()):
        for script in (in_turn(number, ONLINE), in_turn(number, ("ppo_rlhf", "dpo", "reward_model")), "sft"):
            yield Case(script, "runs", name, words, prepare=run_folder(change))
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
        prepare = run_folder(edited("args.json", **earlier))
        yield Case(script, "runs", "a run of an earlier version", ("args.json|version|damaged",), prepare=prepare)
        given = ({"lora_rank": 2}, {"precision": "bfloat16"}, {"precision": "bfloat16", "lora_rank": 4})[number % 3]
        words = ("--resume", *map(flag, given), "keeps its")
        name = f"--resume with {' and '.join(map(flag, given))}"
        yield Case(script, "runs", name, words, prepare=run_folder(lambda _: None, **given))
    for number, script in enumerate(ALL):
        name, where, words = (
            ("--run-dir exists", "here", ("--run-dir here", "exists")),
            ("--run-dir under a file", "good.jsonl/run", ("--run-dir good.jsonl/run",)),
            ("--run-dir unwritable", "/proc/run", ("--run-dir /proc/run",)),
            ("--run-dir over-long", OVERLONG, ("--run-dir",)),
        )[number % 4]
        yield Case(script, "runs", name, words, {"run_dir": where}, lambda _: write("here/args.json", "{}"))
    for script in ("grpo", "sft", "dpo"):
        yield Case(script, "runs", "--track without a key", ("--track|WANDB|[Ww]andb|wandb",), {"track": True})


# ---- rewards


def reward_cases():
    """What reward_fn or score_completions may wrongly return."""
    rewards = {"nan": math.nan, "None": None, "a string": "good", "inf": math.inf, "a list": [1.0]}
    batches = {"too few": [1.0] * 3, "too many": [1.0] * 99, "none": [], "a number": 1.0, "nothing": None}
    for function, values in (("reward_fn", rewards), ("score_completions", batches)):
        for number, (name, value) in enumerate(values.items()):
            for script in (in_turn(number, ONLINE), "ppo_rlhf"):
                what, patch = f"{function} gives {name}", {function: lambda *_, value=value: value}
                yield Case(script, "rewards", what, ("reward|score",), unscored(script), patch=patch)


def all_cases(root):
    return [*setting_cases(root), *file_cases(), *row_cases(), *model_cases(), *run_cases(), *reward_cases()]


# ---- running them


class Worker:
    """In a process of its own: one script, imported once, and one finished run of it."""

    def __init__(self, script, root):
        self.root, self.name = Path(root), script
        sys.path.insert(0, str(root))
        sys.argv = [f"{script}.py"]
        self.script = importlib.import_module(script)
        assert Path(self.script.__file__).parent == self.root, self.script.__file__
        if script == "ppo_rlhf":
            self.script.NORM_SAMPLES = 8
        self.finished = None

    def settings_of(self, given):
        """The case's settings over the small ones that the script has; bare: none but the case's own."""
        names = {field.name for field in fields(self.script.Args)}
        small = {} if given.get("bare") else {**SMALL, "dataset": "good.jsonl"}
        small = {name: value for name, value in small.items() if name in names}
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
                    self.script.main(tyro.cli(self.script.Args, args=case.line))
                else:
                    self.script.main(self.script.Args(**self.settings_of(given)))
            return "silent", ""
        except SystemExit as error:
            text = error.code if isinstance(error.code, str) else errors.getvalue()
            short = "\n" not in text and len(text.replace(OVERLONG, "")) <= 350
            boxed = case.line is not None and not isinstance(error.code, str)  # by tyro
            clear = (short or boxed) and all(re.search(word, text) for word in case.words)
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
            connection.send(worker.run(cases[number]))
            os.chdir("/")
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
    """{number: (kind, text)} of the cases; a worker that hangs or dies is replaced."""
    results = {}
    for script in ALL:
        worker, own = None, [number for number in numbers if cases[number].script == script]
        for number in own:
            process, connection = worker = worker or start(script, root)
            connection.send(number)
            try:
                if not connection.poll(LIMIT):
                    raise EOFError
                results[number] = connection.recv()
            except (EOFError, ConnectionError):
                results[number], worker = ("traceback", f"no end within {LIMIT} s, or the process died"), None
                process.kill()
        if worker:
            connection.send(None)
            process.join(30)
        if own:
            print(row(script, Counter(results[number][0] for number in own)), flush=True)
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
    words = [f"{case.group}: {case.name}" for case in cases]
    numbers = [n for n, case in enumerate(cases) if case.script in scripts and given.only in words[n]]
    print(f"{len(numbers)} bad inputs\n\n{'script':14}" + "".join(f"{kind:>12}" for kind in KINDS) + f"{'all':>8}")
    results = run_all(cases, numbers, root)
    total = Counter(kind for kind, _ in results.values())
    print(row("all", total))
    for group in dict.fromkeys(case.group for case in cases):
        kinds = Counter(results[n][0] for n in results if cases[n].group == group)
        print(row(group, kinds)) if kinds else None
    print()
    for number, (kind, text) in results.items():
        if kind != "clear":
            case = cases[number]
            print(f"{kind:11} {case.script}, {case.group}: {case.name}: {' '.join(text.split())[:420]}")
    return 0 if total["clear"] >= 0.95 * total.total() and not total["silent"] else 1


if __name__ == "__main__":
    sys.exit(main())
