"""What a user gets for a bad input: an error that names the problem, one that does not, or silent training.

    python tests/bad_inputs.py [SCRIPT...] [--root FOLDER] [--only WORD]

Each case runs in a folder of its own, in one worker process per script (whose imports are paid once), with settings
that would train one tiny step. It is clear if the script ends with an error, and if the error's messages and notes, or
the counts of rows that were printed before, have all the words the table expects. Exit status 1 unless 95 % are clear
and none silent.
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
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ONLINE = ("grpo", "dr_grpo", "dapo", "gspo", "reinforce", "cispo", "grpo_process", "grpo_tools")
PROMPTED = (*ONLINE, "ppo_rlhf")
PAIRED = ("reward_model", "dpo")
ALL = (*PROMPTED, *PAIRED, "sft")
KINDS = ("clear", "unclear", "silent")
LIMIT = 90  # seconds a case
SMALL = {"num_steps": 1, "prompts_per_step": 2, "group_size": 2, "minibatch_size": 2, "max_completion_length": 8}
SMALL |= {"eval_prompts": 2, "warmup_steps": 0}


@dataclass
class Case:
    """A bad input of a script: what is prepared in its folder, with which settings it runs, and what must be said."""

    script: str
    group: str
    name: str
    words: tuple  # regular expressions, each of which the text must have
    settings: dict = field(default_factory=dict)  # None leaves one out
    prepare: object = None  # called with the worker in the folder of the case; may return settings
    patch: dict = field(default_factory=dict)  # {name: what stands in for it in the script}


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


def dataset(name, content):
    """A preparation that writes a file of bytes, a text or rows, if there is a content, and gives it as --dataset."""

    def prepare(_):
        if content is not None:
            text = lines(content) if isinstance(content, list) else content
            Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return {"dataset": name}

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
        return dict.fromkeys(SMALL) | {"dataset": None, "resume": "run", "num_steps": 2, **settings}

    return prepare


def in_turn(number, scripts):
    return scripts[number % len(scripts)]


# ---- settings


def setting_cases():
    for script in PROMPTED:
        if script != "reinforce":  # which has one optimizer step a rollout
            words = ("--minibatch-size", "divide|multiple")
            yield Case(script, "settings", "--minibatch-size 3", words, {"minibatch_size": 3})
    for script in ONLINE:
        settings = {"group_size": 1, "minibatch_size": 1}
        yield Case(script, "settings", "--group-size 1", ("--group-size", "at least 2"), settings)
    for script, name, value, words in (
        ("ppo_rlhf", "gamma", 1.5, ("--gamma", "at most 1")),
        ("ppo_rlhf", "gae_lambda", 1.5, ("--gae-lambda", "at most 1")),
        ("ppo_rlhf", "ptx_coef", 1.0, ("--ptx-coef", "--ptx-dataset")),
        ("dpo", "label_smoothing", 0.6, ("--label-smoothing", "0.5")),
    ):
        yield Case(script, "settings", f"{name} {value}", words, {name: value})
    for number, script in enumerate(
        ("grpo", "ppo_rlhf", "dpo", "reward_model", "sft")
    ):  # each has functions of its own
        settings = {"max_prompt_length": 200, "max_completion_length": 200}
        yield Case(script, "settings", "context too short", ("400 tokens", "context has 256"), settings)
        yield Case(script, "settings", "--precision float16", ("precision", "float16"), {"precision": "float16"})
        settings = {"lora_rank": 2, "max_prompt_length": 32, "system_prompt": ""}
        yield Case(script, "settings", "--lora-rank of GPT-2", ("grad",), settings, model(as_gpt2))
        yield Case(script, "settings", "an unknown flag", ("--nothing",), {"nothing": 1})
        words = ("gradient's norm was nan", "--learning-rate")
        settings = {"learning_rate": "nan", "num_steps": 5}
        yield Case(script, "settings", "--learning-rate nan", words, settings)
        words = ("FileExistsError", "here")
        yield Case(script, "settings", "--run-dir exists", words, {"run_dir": "here"}, lambda _: Path("here").mkdir())
        name, where = in_turn(number, (("model", "no/such"), ("dataset", "nope.jsonl"), ("resume", "nothing")))
        yield Case(script, "settings", f"--{name} {where}", (where,), {name: where})


def as_gpt2(folder):
    """Make a model of another family, most of whose weights are in layers of its own, with the folder's tokenizer."""
    from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

    config = json.loads((folder / "config.json").read_text())
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256, "vocab_size": 29}
    kind = GPT2LMHeadModel if config["architectures"] == ["Qwen3ForCausalLM"] else GPT2ForSequenceClassification
    kind(GPT2Config(**sizes, bos_token_id=None, eos_token_id=config["eos_token_id"])).save_pretrained(folder)


# ---- data


def file_cases():
    """Each kind of damaged file by one reader of prompts, of pairs and of chats, in turn."""

    def broken(kind):
        return lines(GOOD[kind][:6]) + '{"prompt": "1+1=", "answer": \n' + lines(GOOD[kind][6:])

    damaged = {
        "empty file": (lambda _: "", "bad.jsonl", ()),
        "empty list": (lambda _: "[]", "bad.json", ("no data",)),
        "broken JSON": (broken, "bad.jsonl", ("JSON|value|object|Expect",)),
        "half a file": (lambda kind: lines(GOOD[kind])[:-9], "bad.jsonl", ("JSON|value|string",)),
        "a list of numbers": (lambda _: "[1, 2, 3]", "bad.json", ()),
        "binary": (lambda _: bytes(range(256)) * 9, "bad.jsonl", ()),
        "not parquet": (lambda _: b"PAR1junk", "bad.parquet", ("[Pp]arquet",)),
        "csv without header": (lambda _: "1+1=,2\n" * 9, "bad.csv", ("1\\+1=",)),
        "ragged csv": (lambda _: "prompt,answer\n1,2\n1,2,3,4\n", "bad.csv", ("line 3",)),
        "one row": (lambda kind: GOOD[kind][:1], "bad.jsonl", ("too few rows", "0 training rows")),
        "one prompt": (lambda kind: GOOD[kind][:1] * 9, "bad.jsonl", ("with a held-out prompt': 7",)),
        "other columns": (lambda _: [{"text": "a", "label": 1}] * 9, "bad.jsonl", ("text|chosen",)),
    }
    for number, (name, (make, path, words)) in enumerate(damaged.items()):
        for script in (in_turn(number, PROMPTED), in_turn(number, PAIRED), "sft"):
            yield Case(script, "data files", name, words, prepare=dataset(path, make(reads(script))))
    for script, kind, words in (
        ("grpo", "chats", ("prompt", "messages")),
        ("dpo", "prompts", ("chosen",)),
        ("reward_model", "chats", ("chosen",)),
        ("sft", "pairs", ("completion", "prompt, chosen, rejected")),
        ("ppo_rlhf", "chats", ("prompt", "messages")),
    ):
        prepare = dataset("bad.jsonl", GOOD[kind])
        yield Case(script, "data files", f"{kind} of another script", words, prepare=prepare)


STRICT = (  # alternating turns, as Gemma's and Mistral's templates want them
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{% if message['role'] == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def strict(row):
    """A preparation with a model whose template refuses two turns of one role in a row."""

    def prepare(worker):
        change = lambda folder: (folder / "chat_template.jinja").write_text(STRICT)  # noqa: E731
        return model(change)(worker) | dataset("bad.jsonl", [row] * 12)(worker)

    return prepare


ROW = "bad.jsonl, training row "


def row_cases():
    """One damaged row, the eighth of twelve, which is among those of training; or where none alone is damage, all."""

    def eighth(script, **row):
        good = GOOD[reads(script)]
        return [*good[:7], {**good[7], **row}, *good[8:]]

    def case(script, name, rows, *words):
        return Case(script, "rows", name, words, prepare=dataset("bad.jsonl", rows))

    for number, script in enumerate(PROMPTED):
        value = in_turn(number, (["a", "b"], [1, 2]))
        yield case(script, f"prompt {value}", eighth(script, prompt=value), ROW, "prompt")
    for script in PAIRED:
        for column in ("chosen", "rejected"):
            for value in ({"a": 1}, [1, 2]):
                rows = eighth(script, **{column: value})
                yield case(script, f"{column} {value}", rows, f"{ROW}|[Cc]olumn|JSON", column)
    yield case("sft", "messages a string", [{"messages": "hi"}] * 12, "without a completion")
    yield case("sft", "messages of strings", eighth("sft", messages=["hi"]), "bad.jsonl|JSON")
    two_turns = [user("1+1="), user("2+2=")]
    for script, row in (
        ("grpo", {"prompt": two_turns, "answer": "2"}),
        ("ppo_rlhf", {"prompt": two_turns, "answer": "2"}),
        ("dpo", {"prompt": two_turns, "chosen": "2", "rejected": "3"}),
        ("reward_model", {"prompt": two_turns, "chosen": "2", "rejected": "3"}),
        ("sft", {"messages": [*two_turns, assistant("4")]}),
    ):
        words = ("roles must alternate", "bad.jsonl, held-out row 0: ")
        yield Case(script, "rows", "the template refuses all", words, prepare=strict(row))
    ends = [user("1+1="), assistant("2")]
    answer, turn = "without an answer that a completion can match", "without a user's turn at its end"
    completion, pair = "without a completion", "without one prompt and two completions"
    prose = "The number is found by adding both of them, one after the other."
    for script, name, row, reason in (
        ("grpo", "answers empty", {"prompt": "1+1=", "answer": ""}, answer),
        ("gspo", "answers null", {"prompt": "1+1=", "answer": None}, answer),
        ("cispo", "answers prose", {"prompt": "1+1=", "answer": prose}, answer),
        ("dapo", "prompts empty", {"prompt": "", "answer": "1"}, turn),
        ("reinforce", "prompts that end in an answer", {"prompt": ends, "answer": "1"}, turn),
        ("grpo_tools", "prompts without messages", {"prompt": [], "answer": "1"}, turn),
        ("dr_grpo", "prompts too long", {"prompt": "1+" * 40, "answer": "1"}, "too long"),
        ("dpo", "pairs identical", {"prompt": "1+1=", "chosen": "2", "rejected": "2"}, "with two equal completions"),
        ("reward_model", "pairs empty", {"prompt": "1+1=", "chosen": "2", "rejected": ""}, pair),
        ("reward_model", "pairs share no prompt", {"chosen": ends, "rejected": [user("3"), ends[1]]}, pair),
        ("dpo", "pairs of questions", {"chosen": ends[:1], "rejected": ends[:1]}, pair),
        ("sft", "no assistant's turn", {"messages": [user("1+1="), user("2")]}, completion),
        ("sft", "no user's turn", {"messages": ends[1:]}, "without a user's turn before the assistant's turn"),
        ("sft", "completions too long", {"prompt": "1", "completion": "1" * 99}, "too long"),
        ("sft", "answers empty", {"question": "1+1=", "answer": ""}, completion),
    ):
        counted = f"too few rows .* 0 held-out rows of bad.jsonl, split train, dropped: .*{reason}['\"]: 2"
        yield case(script, name, [row] * 12, counted)
    marked = "<|user|>1+1=<|assistant|>"
    weighed = [user("1+1="), {**assistant("2"), "weight": 0}]
    for script, name, row, words in (
        (
            "grpo_process",
            "a column of the script's own",
            {"prompt": "1", "answer": "1", "prompt_ids": [1]},
            "prompt_ids",
        ),
        ("ppo_rlhf", "prompts with special tokens", {"prompt": marked, "answer": "2"}, "already has the chat template"),
        ("dpo", "prompts with special tokens", {"prompt": marked, "chosen": "2", "rejected": "3"}, "already has the"),
        (
            "sft",
            "completions with special tokens",
            {"prompt": "1+1=", "completion": "2<|end|>"},
            "already has the chat",
        ),
        ("sft", "messages with weights", {"messages": weighed}, "the rest would be lost: .*weight"),
        ("grpo", "messages of parts", {"prompt": [user([{"type": "text"}])], "answer": "1"}, "the rest would be lost"),
        ("dr_grpo", "answers of a struct", {"prompt": "1+1=", "answer": {"value": 1}}, "answer was read as a dict"),
        ("reward_model", "completions of a struct", {"chosen": {"a": 1}, "rejected": "3"}, "chosen was read as a dict"),
    ):
        yield case(script, name, [row] * 12, "bad.jsonl, held-out row 0: ", words)
    yield case("sft", "questions without answers", [{"question": "1+1=", "score": 1}] * 12, "completion", "score")
    yield case("sft", "solutions without problems", [{"solution": "2"}] * 12, "prompt", "solution")


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


def adapters(folder):
    remove("config.json", "model.safetensors")(folder)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "no/such/model"}')


MODELS = {
    "a tensor missing": (weights("layers.2.mlp.up_proj", lambda _: None), ("missing", "layers.2.mlp.up_proj.weight")),
    "a layer missing": (weights("layers.3.", lambda _: None), ("missing", "layers.3.")),
    "weights cut short": (cut("model.safetensors", 100_000), ("[Ss]afetensor",)),
    "no weights": (remove("model.safetensors"), ("model.safetensors",)),
    "config cut short": (cut("config.json", 200), ("config.json",)),
    "another hidden size": (edited("config.json", hidden_size=64), ("do not fit its config.json|size|shape",)),
    "more layers in the config": (
        edited("config.json", num_hidden_layers=5, layer_types=["full_attention"] * 5),
        ("missing", "layers.4."),
    ),
    "nan weights": (weights("layers.1.mlp", lambda value: value * math.nan), ("nan",)),
    "inf weights": (weights("norm", lambda value: value + math.inf), ("nan",)),
    "adapters": (adapters, ("is a LoRA adapter: merge it",)),
    "quantized": (edited("config.json", quantization_config={"quant_method": "gptq"}), ("quantized|gptq|GPTQ",)),
    "an encoder and decoder": (edited("config.json", model_type="t5"), ("(language|reward) model",)),
    "fewer tokens than the tokenizer": (fewer_tokens, ("index out of range",)),
    "a run folder instead of its checkpoint": (
        lambda f: (shutil.copytree(f, "run/checkpoint"), shutil.rmtree(f), Path("run").rename(f)),
        ("tokenizer|config",),
    ),
}


def other_tokenizer(folder):
    """A tokenizer one of whose tokens the policy's has, but with another number."""
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"1"', '"§"').replace('"2"', '"1"').replace('"§"', '"2"'))


def model_cases():
    """Each damage by an online script, by one of the others, and by reward_model; and reward models for ppo_rlhf."""
    for number, (name, (change, words)) in enumerate(MODELS.items()):
        for script in (in_turn(number, ONLINE), in_turn(number, ("sft", "dpo", "ppo_rlhf")), "reward_model"):
            own = {"reward_model": "none"} if script == "ppo_rlhf" else {}
            yield Case(script, "models", name, words, own, model(change))
        if number % 3 == 0:
            prepare = model(change, "reward_model", "tiny-reward")
            yield Case("ppo_rlhf", "models", f"--reward-model: {name}", words, prepare=prepare)
    for name, change, source, words in (
        ("a policy as reward model", lambda _: None, "tiny", ("score.weight is missing",)),
        ("a reward model of another tokenizer", other_tokenizer, "tiny-reward", ("--reward-model", "tokenizer")),
    ):
        yield Case("ppo_rlhf", "models", name, words, prepare=model(change, "reward_model", source))


# ---- runs


def in_state(change):
    return lambda folder: change(max((folder / "state").iterdir()))


def cut_shards(state):
    for path in state.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:2000])


RUNS = {
    "args.json cut short": (cut("args.json", 50), ("JSON",)),
    "args.json missing": (remove("args.json"), ("args.json",)),
    "args.json of an unknown setting": (edited("args.json", nothing=1), ("nothing",)),
    "args.json of another rank of adapters": (edited("args.json", lora_rank=2), ("lora_a",)),
    "no state": (lambda f: shutil.rmtree(f / "state"), ("--resume", "state")),
    "state without .metadata": (in_state(lambda s: (s / ".metadata").unlink()), ("metadata",)),
    "state cut short": (in_state(cut_shards), ()),
    "state without its file": (in_state(lambda s: [p.unlink() for p in s.glob("*.distcp")]), ("distcp",)),
    "the dataset is gone": (edited("args.json", dataset="gone.jsonl"), ("gone.jsonl",)),
}


def run_cases():
    """Each damage in a run of an online script, of one of the others, and of sft."""
    for number, (name, (change, words)) in enumerate(RUNS.items()):
        for script in (in_turn(number, ONLINE), in_turn(number, ("ppo_rlhf", "dpo", "reward_model")), "sft"):
            yield Case(script, "runs", name, words, prepare=run_folder(change))


# ---- rewards


def reward_cases():
    """What reward_fn or score_completions may wrongly return."""
    rewards = {"nan": math.nan, "None": None, "a string": "good", "a list": [1.0, 2.0]}
    batches = {"too few": [0.0, 1.0], "too many": [0.0, 1.0] * 50, "none": [], "a number": 1.0, "nothing": None}
    for function, values in (("reward_fn", rewards), ("score_completions", batches)):
        for number, (name, value) in enumerate(values.items()):
            patch = {function: lambda *_, value=value: value}
            settings = {"num_steps": 4, "eval_prompts": 0}
            yield Case(in_turn(number, ONLINE), "rewards", f"{function} gives {name}", (), settings, patch=patch)
    rows = [{"prompt": row["prompt"]} for row in GOOD["prompts"]]
    for script in ("grpo", "grpo_process", "grpo_tools"):
        yield Case(script, "rewards", "no answers for reward_fn", ("None",), prepare=dataset("bad.jsonl", rows))


def all_cases():
    return [*setting_cases(), *file_cases(), *row_cases(), *model_cases(), *run_cases(), *reward_cases()]


# ---- running them


def messages_of(error):
    """The messages and notes of an error and of those that it followed."""
    texts = []
    while error is not None:
        texts += traceback.format_exception_only(error)
        error = error.__cause__ or error.__context__
    return " ".join(texts)


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

    def train(self, settings):
        """Run main with the small settings that the script has, and these."""
        from tiny import parse  # which knows the scripts of this root now

        names = vars(self.script.Args())
        small = {name: value for name, value in SMALL.items() if name in names}
        self.script.main(parse(self.script, **{**small, "dataset": "good.jsonl", **settings}))

    def copy_run(self, target):
        """Copy a finished run of one step, which the first call makes."""
        if self.finished is None:
            folder = Path(tempfile.mkdtemp(prefix="bad_inputs_run_"))
            shutil.copy("good.jsonl", folder / "good.jsonl")
            self.train({"dataset": str(folder / "good.jsonl"), "run_dir": str(folder / "run")})
            self.finished = folder / "run"
        shutil.copytree(self.finished, target)

    def run(self, case):
        """Return how a case ends and with which text."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        saved = {name: getattr(self.script, name) for name in case.patch}
        Path("good.jsonl").write_text(lines(GOOD[reads(self.name)]))
        output, kind, text = io.StringIO(), "silent", ""
        try:
            given = {**case.settings, **((case.prepare and case.prepare(self)) or {})}
            for name, value in case.patch.items():
                setattr(self.script, name, value)
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                self.train(given)
        except BaseException as error:
            counts = [line for line in output.getvalue().splitlines() if " rows of " in line]
            usage = output.getvalue()[-1000:] if isinstance(error, SystemExit) and error.code == 2 else ""
            text = " ".join([*counts, usage, messages_of(error)])
            kind = "clear" if all(re.search(word, text) for word in case.words) else "unclear"
        finally:
            for name, value in saved.items():
                setattr(self.script, name, value)
            for number, handler in before.items():
                signal.signal(number, handler)
        return kind, text


def serve(connection, script, root):
    """A worker's loop: numbers of cases come in, results go out; what is printed goes nowhere."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false"}
    os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="bad_inputs_cache_")
    import torch

    torch.set_num_threads(1)
    worker, cases = Worker(script, root), all_cases()
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
                results[number], worker = ("unclear", f"no end within {LIMIT} s, or the process died"), None
                process.kill()
            kind, text = results[number]
            if kind != "clear":
                case = cases[number]
                print(f"{kind}: {script}, {case.group}: {case.name}: {' '.join(text.split())[-420:]}", flush=True)
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
    cases = all_cases()
    words = [f"{case.group}: {case.name}" for case in cases]
    numbers = [n for n, case in enumerate(cases) if case.script in scripts and given.only in words[n]]
    print(f"{len(numbers)} bad inputs\n\n{'script':14}" + "".join(f"{kind:>12}" for kind in KINDS) + f"{'all':>8}")
    results = run_all(cases, numbers, root)
    total = Counter(kind for kind, _ in results.values())
    print(row("all", total))
    for group in dict.fromkeys(case.group for case in cases):
        kinds = Counter(results[n][0] for n in results if cases[n].group == group)
        print(row(group, kinds)) if kinds else None
    return 0 if total["clear"] >= 0.95 * total.total() and not total["silent"] else 1


if __name__ == "__main__":
    sys.exit(main())
