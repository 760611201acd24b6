"""The command line: defaults of a model and of a run, --help, what is refused, and a script copied elsewhere."""

import ast
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from tiny import ROOT, TINY, edit_json, exit_line, parse, read_jsonl, write_jsonl
from tiny import SCRIPTS as OF_COMPLETIONS
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpo
import grpo
import grpo_process
import ppo_rlhf
import reinforce
import reward_model
import sft

SCRIPTS = [*OF_COMPLETIONS.values(), grpo_process]
HELPED = [*SCRIPTS, reward_model, dpo, ppo_rlhf, sft]
SMALL = {"num_steps": 1, "prompts_per_step": 2, "group_size": 2, "minibatch_size": 2, "max_completion_length": 4}
SMALL |= {"eval_prompts": 2}
TASK_DEFAULTS = json.loads((TINY / "config.json").read_text())["task_defaults"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a data set of ten sums in it."""
    monkeypatch.chdir(tmp_path)
    write_sums(tmp_path / "sums.jsonl")
    return tmp_path


def write_sums(path):
    rows = [{"prompt": f"{i}+1=", "answer": i + 1, "chosen": f"{i + 1}", "rejected": f"{i}"} for i in range(1, 11)]
    write_jsonl(path, rows)


def names_of(script):
    return [field.name for field in fields(script.Args)]


def small(script):
    """Those of the small settings that the script has."""
    return {name: value for name, value in SMALL.items() if name in names_of(script)}


# ---- bad settings

CONTEXT = "^prompt and completion may have [23][0-9]{2} tokens, but the model's context has 256"
BAD_CASES = [(grpo, {"minibatch_size": 3}, "^--minibatch-size 3 does not divide the 4 completions")]
BAD_CASES += [(script, {"max_completion_length": 250}, CONTEXT) for script in (grpo, dpo, reward_model, sft, ppo_rlhf)]
BAD_CASES += [(script, {"group_size": 1}, "^--group-size must be at least 2") for script in SCRIPTS]
BAD_CASES += [
    (reinforce, {"group_size": 1, "baseline": "group_mean"}, "^--group-size must be at least 2"),
    (ppo_rlhf, {"prompts_per_step": 6, "minibatch_size": 4}, "^--minibatch-size 4 does not divide the 6 completions"),
    (ppo_rlhf, {"reward_model": str(TINY)}, "models/tiny is not a complete reward model: score.weight is missing"),
]


@pytest.mark.parametrize("script, settings, expected", BAD_CASES)
def test_bad_settings_exit_with_one_line_and_leave_nothing_behind(folder, script, settings, expected):
    given = {"dataset": "sums.jsonl", "run_dir": "mine", **small(script), **settings}
    assert re.search(expected, exit_line(script, **given))
    assert [path.name for path in folder.iterdir()] == ["sums.jsonl"]


@pytest.mark.parametrize(
    "settings, error, expected",
    [
        ({"model": "no/such/model"}, OSError, "no/such/model"),
        ({"dataset": "no_such_file.jsonl"}, FileNotFoundError, "no_such_file.jsonl"),
        (
            {"system_prompt": "é" * 40},
            SystemExit,
            "0 held-out rows of sums.jsonl, split train, dropped: {'too long': 2}",
        ),
        ({"max_prompt_length": 3}, SystemExit, "0 held-out rows of sums.jsonl, split train, dropped: {'too long': 2}"),
    ],
)
def test_a_traceback_or_what_is_above_it_says_what_is_wrong(folder, capsys, settings, error, expected):
    with pytest.raises(error) as caught:
        grpo.main(parse(grpo, **{"dataset": "sums.jsonl", "run_dir": "mine", **small(grpo), **settings}))
    assert expected in f"{capsys.readouterr().out} {caught.value}"
    assert [path.name for path in folder.iterdir()] == ["sums.jsonl"]


def test_an_empty_chat_template_ends_the_run_and_names_the_text_that_it_does_not_write(folder):
    model = shutil.copytree(TINY, folder / "model")
    (model / "chat_template.jinja").write_text("")
    line = exit_line(grpo, model=model, dataset="sums.jsonl", run_dir="mine", **small(grpo))
    assert re.search("the chat template does not write the content of the message .*'2\\+1='", line)
    assert not (folder / "mine").exists()


@pytest.mark.parametrize("content", [{"args.json": "{}"}, {"notes.txt": "mine"}])
def test_a_run_folder_that_exists_is_left_alone(folder, content):
    (folder / "mine").mkdir()
    for name, text in content.items():
        (folder / "mine" / name).write_text(text)
    with pytest.raises(FileExistsError, match="'mine'"):
        grpo.main(parse(grpo, dataset="sums.jsonl", run_dir="mine", **small(grpo)))
    assert {path.name: path.read_text() for path in (folder / "mine").iterdir()} == content


def test_one_completion_a_prompt_trains_without_a_baseline(tmp_path):
    sizes = {"num_steps": 2, "prompts_per_step": 8, "group_size": 1, "eval_prompts": 4}
    reinforce.main(parse(reinforce, run_dir=tmp_path / "run", baseline="none", **sizes))
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(line["optim/grad_norm"] > 0 for line in lines[1:])
    assert all(len(line["completions"]) == 1 for line in read_jsonl(tmp_path / "run" / "samples.jsonl"))


CHOICES = {(reinforce, "baseline"): ["none", "group_mean", "leave_one_out"]}
CHOICES |= {(script, "precision"): ["auto", "bfloat16", "float32"] for script in HELPED}


@pytest.mark.parametrize("script, name", CHOICES)
def test_an_unknown_choice_is_refused(script, name, capsys):
    choices = CHOICES[script, name]
    for wrong in ("median", "float16", ""):
        with pytest.raises(SystemExit) as caught:
            parse(script, **{name: wrong})
        assert caught.value.code not in (0, None)
        text = capsys.readouterr().err
        assert all(word in text for word in (f"--{name}", wrong, *choices))
    assert [getattr(parse(script, **{name: choice}), name) for choice in choices] == choices


# ---- defaults


def defaults_of(script):
    """The settings of a script for the bundled models: its own defaults, the general ones of the model, its own."""
    named = {**TASK_DEFAULTS, **TASK_DEFAULTS.get(script.__name__, {})}
    named = {name: value for name, value in named.items() if name in names_of(script) and not isinstance(value, dict)}
    return vars(script.Args()) | named, named


@pytest.mark.parametrize("script", HELPED)
def test_defaults_of_the_bundled_model_apply_and_one_line_names_them(script, capsys):
    expected, named = defaults_of(script)
    assert vars(parse(script)) == expected and len(named) > 5
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("defaults of ")]
    assert line == f"defaults of {TINY}: { {name: named[name] for name in expected if name in named} }"
    given = {"num_steps": 7, "learning_rate": 0.25, "system_prompt": "x", "precision": "auto", "track": True}
    assert vars(parse(script, **given)) == expected | given
    own = TASK_DEFAULTS.get(script.__name__, {}).items()
    assert own <= vars(parse(script)).items()


def test_every_task_default_is_a_setting_of_a_script():
    scripts = {script.__name__: script for script in HELPED}
    for name, value in TASK_DEFAULTS.items():
        if isinstance(value, dict):
            assert {*value} <= {*names_of(scripts[name])}
        else:
            assert any(name in names_of(script) for script in HELPED)


@pytest.mark.parametrize("script", HELPED)
def test_a_model_without_defaults_of_its_own_gets_those_of_the_script(script, tmp_path, capsys):
    model = shutil.copytree(TINY, tmp_path / "model")
    for named in ({}, {"no_such_flag": 1, "other": {"num_steps": 3}}):
        edit_json(model / "config.json", task_defaults=named)
        assert parse(script, model=model) == script.Args(model=str(model))
    assert "defaults of" not in capsys.readouterr().out
    edit_json(model / "config.json", task_defaults={"num_steps": 5, "seed": 6, script.__name__: {"num_steps": 4}})
    assert parse(script, model=model) == script.Args(model=str(model), num_steps=4, seed=6)
    assert f"defaults of {model}: {{'num_steps': 4, 'seed': 6}}\n" in capsys.readouterr().out


def found_precision(script, **settings):
    args = script.Args(**settings)
    script.check_args(args, 1)
    return args.precision


@pytest.mark.parametrize("script", HELPED)
def test_models_compute_in_bfloat16_where_the_processor_multiplies_it(script, monkeypatch):
    assert found_precision(script) == "float32"
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert found_precision(script) == "bfloat16"
    assert found_precision(script, precision="float32") == parse(script).precision == "float32"


@pytest.mark.parametrize("script", HELPED)
@pytest.mark.parametrize("native", [True, False])
def test_a_gpu_without_bfloat16_units_computes_in_float32(script, native, monkeypatch):
    """A T4 or an RTX 20 emulates bfloat16, slowly; asked without its argument, torch says that it is supported."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    assert found_precision(script) == ("bfloat16" if native else "float32")
    assert found_precision(script, precision="bfloat16") == "bfloat16"


# Flags whose default is not that of the other scripts, and flags that grpo.py does not have.
OWN_DEFAULTS = dict.fromkeys(("gspo", "cispo"), {"minibatch_size"}) | {"reinforce": {"warmup_steps"}}
OWN_DEFAULTS |= {"dapo": {"warmup_steps", "minibatch_size"}, "grpo_tools": {"system_prompt"}}
RANGES = {"clip_eps_low": float, "clip_eps_high": float}
OWN_FLAGS = {
    **{"dapo": {"max_rounds": int, "overlong_buffer": float, **RANGES}, "gspo": RANGES},
    **{"cispo": {"clip_eps_high": float}, "grpo_tools": {"tool_tokens": int}},
}


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_flags_of_one_name_have_one_type_and_mostly_one_default(script):
    own, shared = ({field.name: field for field in fields(s.Args)} for s in (script, grpo))
    common = {*own} & {*shared}
    assert all(own[name].type == shared[name].type for name in common)
    differ = {name for name in common if own[name].default != shared[name].default}
    assert differ == OWN_DEFAULTS.get(script.__name__, set())
    added = {name: field.type for name, field in own.items() if name not in common and name != "baseline"}
    assert added == OWN_FLAGS.get(script.__name__, {})


# ---- help, and a script copied elsewhere


def parse_help(script):
    """{field: the string under it in the source}."""
    tree = ast.parse(Path(script.__file__).read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args").body
    return {
        field.target.id: text.value.value
        for field, text in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


@pytest.mark.parametrize("script", HELPED)
def test_every_flag_has_one_line_of_ascii_help_and_a_plain_default(script):
    help_lines = parse_help(script)
    assert list(help_lines) == names_of(script) and len(help_lines) <= (36 if script is ppo_rlhf else 32)
    assert all(text.isascii() and text.strip() and "\n" not in text for text in help_lines.values())
    assert not any(field.default is None for field in fields(script.Args))
    assert not any(field.metadata for field in fields(script.Args))


# Scripts are run one after the other in one process: importing torch is most of the time.
RUN_EACH = """
import json, os, runpy, sys
for folder, flags in json.loads(sys.argv[1]):
    os.chdir(folder)
    sys.argv = [os.path.basename(folder) + ".py", *flags]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        assert not error.code, (folder, error.code)
    print("\\n==== end of one")
"""


def copied_flags(script):
    """Flags of a run so large that some completions are right and some wrong: else there are no policy/*."""
    flags = {"model": str(TINY), "dataset": "sums.jsonl", "run_dir": "runs/one", **small(script)}
    flags |= {"prompts_per_step": 2, "group_size": 8, "max_completion_length": 48}
    return flags | ({"minibatch_size": 8} if "minibatch_size" in flags else {})


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """Copies of each script somewhere else and what they print, on an ascii console: once --help, once a step."""
    folder, home = (tmp_path_factory.mktemp(name) for name in ("elsewhere", "home"))
    jobs = []
    for script in [*HELPED, *SCRIPTS]:
        place = folder / ("run" if len(jobs) >= len(HELPED) else "help") / script.__name__
        place.mkdir(parents=True)
        shutil.copy(script.__file__, place)
        flags = copied_flags(script)
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        if place.parent.name == "run":
            rows = read_jsonl(ROOT / "data" / "addition" / "train.jsonl")[:40]  # half of which are answered rightly
            write_jsonl(place / "sums.jsonl", rows)
        jobs.append((str(place), flags if place.parent.name == "run" else ["--help"]))
    environment = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "COLUMNS": "200"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "HOME": str(home), "HF_HOME": str(home / "hf")}
    command = [sys.executable, "-c", RUN_EACH, json.dumps(jobs)]
    result = subprocess.run(command, env=os.environ | environment, capture_output=True)
    assert result.returncode == 0, result.stderr.decode()
    outputs = result.stdout.decode("ascii").split("\n==== end of one\n")
    assert list(home.iterdir()) == []
    return folder, dict(zip((place for place, _ in jobs), outputs))


@pytest.mark.parametrize("script", HELPED)
def test_help_works_on_an_ascii_console_and_writes_nothing(copied, script):
    folder = copied[0] / "help" / script.__name__
    text = copied[1][str(folder)]
    assert f"usage: {script.__name__}.py" in text
    assert [path.name for path in folder.iterdir()] == [f"{script.__name__}.py"]
    found = " ".join(re.sub("[^\\x20-\\x7e]", " ", text).split()).replace("| ", "").replace(" |", "")
    for field in fields(script.Args):
        flag = f"--{field.name.replace('_', '-')}"
        assert re.search(rf"{flag}\b", found), flag
        if isinstance(field.default, int | float):
            assert re.search(rf" {flag}[ ,][^-].*? \(default: {re.escape(str(field.default))}\)", found), flag


@pytest.mark.parametrize("script", HELPED)
def test_help_says_none_of_no_flag(copied, script):
    text = copied[1][str(copied[0] / "help" / script.__name__)]
    assert "{None}|STR" not in text and "(default: None)" not in text


METRICS = set(
    """reward/mean reward/zero_std rollout/length_mean rollout/truncated policy/entropy policy/sampler_kl loss/policy
    optim/grad_norm optim/learning_rate perf/rollout_seconds perf/step_seconds""".split()
)
CLIP = {"policy/approx_kl", "policy/clip_fraction_low", "policy/clip_fraction_high"}
OWN_METRICS = {
    "grpo": CLIP | {"policy/ref_kl", "loss/kl"},
    "reinforce": set(),
    "dr_grpo": CLIP | {"reward/trained_mean"},
    "dapo": CLIP | {"reward/trained_mean", "rollout/rounds", "rollout/groups", "rollout/prompts_consumed"},
    "gspo": CLIP,
    "cispo": {"policy/approx_kl", "policy/cap_fraction"},
    "grpo_tools": CLIP | {"rollout/tool_use", "rollout/tool_tokens", "rollout/calls"},
    "grpo_process": CLIP | {"policy/ref_kl", "loss/kl", "rollout/steps"},
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_copied_elsewhere_writes_all_parts_of_its_run(copied, script):
    folder = copied[0] / "run" / script.__name__
    run, output = folder / "runs" / "one", copied[1][str(folder)]
    assert "model: runs/one/checkpoint; to continue: --resume runs/one --num-steps N\n" in output
    parts = {"args.json", "metrics.jsonl", "samples.jsonl", "eval_samples.jsonl", "checkpoint", "state"}
    assert {path.name for path in run.iterdir() if path.name != "wandb"} == parts
    assert [path.name for path in (run / "state").iterdir()] == ["00000001"]
    # metrics
    lines = read_jsonl(run / "metrics.jsonl")
    evaluation = {"step", "eval/reward", "eval/accuracy", "eval/pass@1", "eval/pass@4"}
    expected = evaluation | METRICS | OWN_METRICS[script.__name__]
    assert [{*line} for line in lines] == [evaluation, expected]
    assert [line["step"] for line in lines] == [0, 1]
    # one group of samples a step
    [group] = read_jsonl(run / "samples.jsonl")
    assert group["step"] == 1 and group["prompt"].endswith("=")
    assert len(group["completions"]) == len(group["rewards"]) == 8
    # the checkpoint
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoint", dtype="auto")
    before = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    assert model.dtype == torch.float32
    pairs = list(zip(model.parameters(), before.parameters(), strict=True))
    assert all(after.isfinite().all() and after.shape == start.shape for after, start in pairs)
    tokenizers = (AutoTokenizer.from_pretrained(path) for path in (run / "checkpoint", TINY))
    assert len({tokenizer.chat_template for tokenizer in tokenizers}) == 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_copied_elsewhere_and_what_it_trained_have_the_defaults_of_the_model(copied, script, capsys):
    folder = copied[0] / "run" / script.__name__
    expected, named = defaults_of(script)
    saved = json.loads((folder / "runs" / "one" / "args.json").read_text())
    given = copied_flags(script)
    assert saved == json.loads(json.dumps(expected | given, default=str)) and len({*named} - {*given}) > 5
    [line] = [line for line in copied[1][str(folder)].splitlines() if line.startswith("defaults of ")]
    assert line == f"defaults of {TINY}: { {name: named[name] for name in expected if name in named} }"
    trained = folder / "runs" / "one" / "checkpoint"
    assert vars(parse(script, model=trained)) == expected | {"model": str(trained)}
    assert f"defaults of {trained}: " in capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS)
def test_resume_takes_the_settings_of_the_run_and_flags_override_them(copied, script, capsys):
    run = copied[0] / "run" / script.__name__ / "runs" / "one"
    saved = json.loads((run / "args.json").read_text())
    assert vars(parse(script, resume=run)) == saved | {"resume": str(run)}
    given = {"num_steps": 9, "group_size": 4, "learning_rate": 0.5, "precision": "bfloat16", "seed": 3}
    assert vars(parse(script, resume=run, **given)) == saved | {"resume": str(run)} | given
    assert "defaults of" not in capsys.readouterr().out
