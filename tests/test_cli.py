"""The command line: defaults of a model and of a run, --help, what is refused, and a script copied elsewhere.
Run with: python -m pytest tests/test_cli.py
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from tiny import ROOT, TINY, exit_line, load_module, parse, read_jsonl, write_jsonl
from tiny import SCRIPTS as OF_COMPLETIONS
from transformers import AutoModelForCausalLM

import dpo
import gkd
import grpo_tools
import ppo_rlhf
import reward_model
import sft

SCRIPTS = [*OF_COMPLETIONS.values()]
HELPED = [*SCRIPTS, reward_model, dpo, ppo_rlhf, gkd, sft]
SMALL = {"num_steps": 1, "prompts_per_step": 2, "group_size": 2, "minibatch_size": 2, "max_completion_length": 4}
SMALL |= {"eval_prompts": 2}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a data set of ten sums in it."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}+1=", "answer": i + 1, "chosen": f"{i + 1}", "rejected": f"{i}"} for i in range(1, 11)]
    write_jsonl("sums.jsonl", rows)
    return tmp_path


def names_of(script):
    return [field.name for field in fields(script.Args)]


def small(script):
    """Those of the small settings that the script has, with a data set and a folder."""
    given = SMALL | {"dataset": "sums.jsonl", "run_dir": "mine"}
    return {name: value for name, value in given.items() if name in names_of(script)}


CONTEXT = "add up to [23][0-9]{2} tokens, but the model's context has only 256; a checkpoint of .* needs --tiny$"
BAD_CASES = [(script, {"max_completion_length": 250}, CONTEXT) for script in (grpo_tools, dpo, ppo_rlhf)]
BAD_CASES += [
    (
        grpo_tools,
        {"minibatch_size": 3},
        "^--minibatch-size 3 must divide --prompts-per-step times --group-size, as 4 does$",
    ),
    (ppo_rlhf, {"prompts_per_step": 6, "minibatch_size": 4}, "^--minibatch-size 4 must divide --prompts-per-step 6$"),
    (grpo_tools, {"group_size": 1}, "^--group-size must be at least 2"),
    (ppo_rlhf, {"reward_model": str(TINY)}, "models/tiny is not a complete reward model: .* score.weight$"),
]


@pytest.mark.parametrize("script, settings, expected", BAD_CASES)
def test_bad_settings_exit_with_one_line_and_leave_nothing_behind(folder, script, settings, expected):
    assert re.search(expected, exit_line(script, **small(script) | settings))
    assert [path.name for path in folder.iterdir()] == ["sums.jsonl"]


def test_a_minibatch_has_at_most_the_completions_of_a_rollout():
    """Few prompts per step need no --minibatch-size."""
    for script in (grpo_tools, ppo_rlhf):
        given = {"prompts_per_step": 4, "group_size": 4, "reward_model": str(TINY)}
        args = script.Args(**{name: value for name, value in given.items() if name in names_of(script)})
        script.check_args(args)
        assert args.minibatch_size == (4 if script is ppo_rlhf else 16)


@pytest.mark.parametrize("flag", ["model", "dataset"])
@pytest.mark.parametrize("path", ["/no/such place", "./no/such", "../no"])
@pytest.mark.usefixtures("folder")
def test_a_path_of_nothing_is_not_looked_for_on_the_hub(flag, path):
    with pytest.raises(SystemExit, match=f"^--{flag} {path}: there is no such file or folder$"):
        parse(grpo_tools, **small(grpo_tools) | {flag: path})


def test_a_folder_may_be_named_with_a_split(folder):
    (folder / "pairs").mkdir()
    name = f"{folder / 'pairs'}::train_prefs"
    for given in (name, "pairs::train_prefs", "./pairs::train_prefs"):
        assert parse(grpo_tools, **small(grpo_tools) | {"dataset": given}).dataset == name


@pytest.mark.parametrize("model", [TINY, "no/such/model"])
def test_a_model_that_is_named_is_trained_with_the_settings_of_real_models(model):
    assert (
        parse(grpo_tools).num_steps
        == parse(grpo_tools, model=model, tiny=True).num_steps
        == grpo_tools.TINY["num_steps"]
    )
    assert parse(grpo_tools, model=model).num_steps == grpo_tools.Args.num_steps


def test_a_link_to_a_script_finds_the_bundled_model(folder):
    (folder / "linked.py").symlink_to(ROOT / "grpo_tools.py")
    module = load_module(folder / "linked.py")
    assert module.Args.model == str(TINY)


@pytest.mark.parametrize("content", [{"args.json": "{}"}, {"notes.txt": "mine"}])
def test_a_run_folder_that_exists_is_left_alone(folder, content):
    (folder / "mine").mkdir()
    for name, text in content.items():
        (folder / "mine" / name).write_text(text)
    with pytest.raises(SystemExit, match="^--run-dir mine exists: name a new folder, or give --resume mine alone$"):
        parse(grpo_tools, **small(grpo_tools))  # before it loads anything
    assert {path.name: path.read_text() for path in (folder / "mine").iterdir()} == content


def test_paths_become_absolute_and_names_stay(folder):
    """A run may be resumed from another folder. A name on the hub is no path, and an empty setting is none either."""
    args = parse(grpo_tools, model=os.path.relpath(TINY), dataset="sums.jsonl")
    assert (args.model, args.dataset) == (str(TINY), str(folder / "sums.jsonl"))
    assert parse(grpo_tools, dataset="openai/gsm8k:main").dataset == "openai/gsm8k:main"
    shutil.copytree(TINY, "scorer")
    args = parse(ppo_rlhf, reward_model="scorer", ptx_dataset="sums.jsonl")
    assert (args.reward_model, args.ptx_dataset) == (str(folder / "scorer"), str(folder / "sums.jsonl"))
    assert parse(gkd, teacher="scorer").teacher == args.reward_model
    args = parse(ppo_rlhf, reward_model="none")
    assert (args.reward_model, args.ptx_dataset) == ("none", "")


GIVEN = {"num_steps": 7, "learning_rate": 0.25, "system_prompt": "x", "precision": "auto", "track": True}


@pytest.mark.parametrize("script", HELPED)
def test_the_bundled_model_has_its_settings_and_another_model_those_of_args(script, tmp_path):
    tiny = vars(script.Args(**script.TINY))
    assert vars(parse(script)) == tiny and len(script.TINY) > 8
    assert vars(parse(script, **GIVEN)) == tiny | GIVEN
    other = {"model": str(tmp_path)}  # whatever is in it
    assert vars(parse(script, **other)) == vars(script.Args()) | other
    assert vars(parse(script, tiny=True, **other, **GIVEN)) == tiny | other | GIVEN | {"tiny": True}


@pytest.mark.parametrize("script", HELPED)
def test_help_shows_what_would_run(script, capsys):
    shown = {}
    for flags in ({}, {"model": "other"}, {"model": "other", "tiny": True}):
        with pytest.raises(SystemExit, match="^0$"):
            parse(script, help=True, **flags)
        out = " ".join(re.sub("[│╭╰─╮╯]", " ", capsys.readouterr().out).split())
        shown[len(flags)] = re.search(r"--learning-rate FLOAT.*?\(default: ([^)]*)\)", out)[1]
    rates = [float(shown[count]) for count in range(3)]
    assert rates == [script.TINY["learning_rate"], script.Args().learning_rate, script.TINY["learning_rate"]]


@pytest.mark.parametrize("script", [grpo_tools, sft])
def test_resume_takes_the_settings_of_the_run_and_flags_override_them(script, tmp_path, capsys):
    settings = vars(parse(script, num_steps=5, learning_rate=0.25))
    kept = {"script": f"{script.__name__}.py", "run_dir": "elsewhere", "clip_range": 3}
    (tmp_path / "args.json").write_text(json.dumps(settings | kept))
    capsys.readouterr()
    assert vars(parse(script, resume=tmp_path)) == settings | {"resume": str(tmp_path)}
    said = capsys.readouterr().out
    assert said == f"{tmp_path}/args.json: settings that this version does not have are ignored: clip_range\n"
    given = {"num_steps": 9, "precision": "bfloat16", "seed": 3}
    assert vars(parse(script, resume=tmp_path, **given)) == settings | {"resume": str(tmp_path)} | given


def test_what_decides_which_rows_are_held_out_stays_as_it_was(folder):
    """Other values would train on rows that an evaluation then counts, or evaluate on trained ones."""
    write_jsonl("other.jsonl", [])
    settings = {"script": "grpo_tools.py"} | vars(parse(grpo_tools, dataset="sums.jsonl"))
    (folder / "args.json").write_text(json.dumps(settings))
    for name, value in {"dataset": "other.jsonl", "eval_prompts": 3, "lora_rank": 2}.items():
        with pytest.raises(SystemExit, match=f"^--resume {folder}: {name} must stay {settings[name]}, not "):
            parse(grpo_tools, resume=folder, **{name: value})
    assert parse(grpo_tools, resume=folder, dataset="sums.jsonl", eval_prompts=512, lora_rank=0).resume == str(folder)


@pytest.mark.parametrize("environment, expected", [({"WORLD_SIZE": "4"}, 1), ({"WORLD_SIZE": "4", "RANK": "2"}, 4)])
def test_only_torchrun_makes_several_ranks(environment, expected, monkeypatch):
    """Some clusters set WORLD_SIZE for each of their jobs."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert load_module(ROOT / "grpo_tools.py").WORLD_SIZE == expected


@pytest.mark.parametrize("script", HELPED)
def test_settings_that_must_be_above_zero_are_named(script):
    for name in {"temperature", "max_grad_norm", "eval_every", "save_every"} & {*names_of(script)}:
        with pytest.raises(SystemExit, match=f"^--{name.replace('_', '-')} must be above 0$"):
            script.check_args(script.Args(**{name: 0}))


def found_precision(script, **settings):
    args = script.Args(**settings)
    script.check_args(args)
    return args.precision


@pytest.mark.parametrize("script", [grpo_tools, dpo, ppo_rlhf])  # each has another check of its settings
def test_models_compute_in_bfloat16_where_the_processor_multiplies_it(script, monkeypatch):
    assert found_precision(script) == "float32"
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert found_precision(script) == "bfloat16"
    assert found_precision(script, precision="float32") == "float32"


@pytest.mark.parametrize("native", [True, False])
def test_a_gpu_without_bfloat16_units_computes_in_float32(native, monkeypatch):
    """A T4 or an RTX 20 emulates bfloat16, slowly; asked without its argument, torch says that it is supported."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    assert found_precision(grpo_tools) == ("bfloat16" if native else "float32")


@pytest.mark.parametrize("script", HELPED)
def test_flags_of_one_name_have_one_type_and_each_a_default(script):
    types = {field.name: field.type for other in (ppo_rlhf, grpo_tools) for field in fields(other.Args)}
    for field in fields(script.Args):
        assert field.type == types.get(field.name, field.type)
        assert field.default is not None


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


def copied_settings(script):
    return small(script) | {"model": str(TINY), "max_prompt_length": 64, "system_prompt": "", "precision": "float32"}


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """Copies of each script somewhere else and what they print, on an ascii console: once --help, once a step."""
    folder, home = (tmp_path_factory.mktemp(name) for name in ("elsewhere", "home"))
    jobs = [(folder / "help" / script.__name__, ["--help"]) for script in HELPED]
    for script in SCRIPTS:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in copied_settings(script).items()]
        jobs.append((folder / "run" / script.__name__, flags))
    rows = [{"prompt": f"π: {i}+1=", "answer": i + 1} for i in range(1, 11)]  # a letter that the console lacks
    for place, _ in jobs:
        place.mkdir(parents=True)
        shutil.copy(ROOT / f"{place.name}.py", place)
        if place.parent.name == "run":
            write_jsonl(place / "sums.jsonl", rows)
    environment = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "COLUMNS": "200"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "HOME": str(home), "HF_HOME": str(home / "hf")}
    command = [sys.executable, "-c", RUN_EACH, json.dumps(jobs, default=str)]
    result = subprocess.run(command, env=os.environ | environment, capture_output=True)
    assert result.returncode == 0, result.stderr.decode()
    outputs = result.stdout.decode("ascii").split("\n==== end of one\n")
    assert list(home.iterdir()) == []
    return dict(zip((place for place, _ in jobs), outputs)), folder


@pytest.mark.parametrize("script", HELPED)
def test_help_works_on_an_ascii_console_and_writes_nothing(copied, script):
    place = copied[1] / "help" / script.__name__
    text = copied[0][place]
    assert f"usage: {script.__name__}.py" in text
    assert [path.name for path in place.iterdir()] == [f"{script.__name__}.py"]
    assert all(re.search(rf"--{name.replace('_', '-')}\b", text) for name in names_of(script))
    assert f"(default: {script.TINY['learning_rate']})" in text


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_copied_elsewhere_writes_all_parts_of_its_run(copied, script):
    place = copied[1] / "run" / script.__name__
    run = place / "mine"
    assert f"to train for longer: python {script.__name__}.py --resume mine --num-steps N\n" in copied[0][place]
    parts = {"args.json", "metrics.jsonl", "samples.jsonl", "eval_samples.jsonl", "checkpoint", "state"}
    assert {path.name for path in run.iterdir()} == parts
    assert [path.name for path in (run / "state").iterdir()] == ["00000001"]
    expected = vars(script.Args()) | copied_settings(script) | {"dataset": str(place / "sums.jsonl")}
    if "rollout_batch_size" in expected:
        expected["rollout_batch_size"] = 4  # as many as a step samples
    assert json.loads((run / "args.json").read_text()) == {"script": f"{script.__name__}.py"} | expected
    assert [line["step"] for line in read_jsonl(run / "metrics.jsonl")] == [0, 1]
    [group] = read_jsonl(run / "samples.jsonl")  # one a step
    assert len(group["completions"]) == len(group["rewards"]) == 2
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoint", dtype="auto")
    assert model.dtype == torch.float32
    assert all(weight.isfinite().all() for weight in model.parameters())
