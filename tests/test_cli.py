"""The command line: one clear line for what a user can get wrong, --help, and a script copied elsewhere."""

import ast
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, fields
from itertools import permutations
from pathlib import Path

import datasets
import pytest
import torch
import tyro
from tiny import load
from transformers import AutoModelForCausalLM, AutoTokenizer

import cispo
import dapo
import dpo
import dr_grpo
import grpo
import grpo_process
import grpo_tools
import gspo
import ppo_rlhf
import reinforce
import reward_model
import sft

SCRIPTS = [grpo, reinforce, dr_grpo, dapo, gspo, cispo, grpo_process, grpo_tools]
NAMES = [script.__name__ for script in SCRIPTS]
HELPED = [*SCRIPTS, reward_model, dpo, ppo_rlhf, sft]
SCRIPT = Path(grpo.__file__)
TINY = SCRIPT.parent / "models" / "tiny"
SMALL = {"num_steps": 1, "prompts_per_step": 2, "group_size": 2, "minibatch_size": 2, "max_completion_length": 4}
SMALL |= {"eval_prompts": 2, "overlong_buffer": 2}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a data set of ten sums in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_sums(tmp_path / "sums.jsonl")
    return tmp_path


def write_sums(path):
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": i + 1}) + "\n" for i in range(1, 11)))


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.name


def names_of(script):
    return [field.name for field in fields(script.Args)]


def small(script):
    """Those of the small settings that the script has."""
    return {name: value for name, value in SMALL.items() if name in names_of(script)}


def exit_message(script=grpo, **settings):
    """Run main and return the line it exits with; a message, unlike None or 0, is exit status 1."""
    with pytest.raises(SystemExit) as caught:
        script.main(script.Args(**{"dataset": "sums.jsonl", **small(script), **settings}))
    message = caught.value.code
    assert isinstance(message, str) and 0 < len(message) < 600 and "\n" not in message
    return message


def read_metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


# ---- bad input

BASELINES = ["none", "group_mean", "leave_one_out"]
BAD_SETTINGS = [
    ({"model": "no/such/model"}, "--model no/such/model: there is no such folder"),
    ({"dataset": "no_such_file.jsonl"}, "--dataset no_such_file.jsonl: there is no such file"),
    ({"group_size": 1}, "--group-size 1"),
    ({"group_size": 0}, "--group-size 0"),
    ({"minibatch_size": 3}, "--prompts-per-step 2 times --group-size 2 .*--minibatch-size 3"),
    ({"temperature": 0.0}, "--temperature 0"),
    ({"temperature": -1.0}, "--temperature -1"),
    ({"prompts_per_step": 0}, "--prompts-per-step 0"),
    ({"microbatch_tokens": 0}, "--microbatch-tokens 0"),
    ({"update_epochs": 0}, "--update-epochs 0"),
    ({"max_completion_length": 300}, "longest prompt .* 30[6-9] tokens, over the context of 256"),
    ({"max_prompt_length": 3}, "0 training rows .*; 8 dropped, longer than 3 tokens"),
    ({"overlong_buffer": 5}, "--overlong-buffer 5: must be at most --max-completion-length"),
    ({"overlong_buffer": -1}, "--overlong-buffer -1"),
    ({"max_rounds": 0}, "--max-rounds 0"),
    ({"clip_eps": -0.1}, "--clip-eps -0.1"),
    ({"clip_eps_low": -0.1}, "--clip-eps-low -0.1"),
    ({"clip_eps_high": -0.1}, "--clip-eps-high -0.1"),
    ({"kl_coef": -0.1}, "--kl-coef -0.1"),
]
BAD_CASES = [(script, *case) for script in SCRIPTS for case in BAD_SETTINGS if {*case[0]} <= {*names_of(script)}]


@pytest.mark.parametrize("script, settings, expected", BAD_CASES)
def test_bad_settings_exit_with_one_line_and_leave_nothing_behind(folder, script, settings, expected):
    assert re.search(expected, exit_message(script, **settings))
    assert not (folder / "runs").exists()
    assert re.search(expected, exit_message(script, **settings, run_dir="mine"))
    assert not (folder / "mine").exists()


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_one_completion_a_prompt_is_refused_where_the_baseline_is_that_of_a_group(folder, baseline):
    assert "--group-size 1" in exit_message(reinforce, baseline=baseline, group_size=1)
    assert not (folder / "runs").exists()


def test_one_completion_a_prompt_trains_without_a_baseline(tmp_path):
    sizes = {"num_steps": 2, "prompts_per_step": 8, "group_size": 1, "eval_prompts": 4}
    reinforce.main(reinforce.Args(run_dir=str(tmp_path / "run"), baseline="none", **sizes))
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(line["optim/grad_norm"] > 0 and line["rollout/completions"] == 8 for line in lines[1:])
    assert all(line["reward/std"] == 0 for line in lines[1:])


def test_an_unknown_baseline_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        tyro.cli(reinforce.Args, args=["--baseline", "median"])
    assert caught.value.code not in (0, None)
    text = capsys.readouterr().err
    assert "--baseline" in text and "median" in text and all(name in text for name in BASELINES)
    assert [tyro.cli(reinforce.Args, args=["--baseline", name]).baseline for name in BASELINES] == BASELINES


BAD_ROWS = [
    ([], "bad.jsonl: cannot be loaded: it has no rows"),
    ([{"input": "1+1=", "target": "2"}] * 5, "needs a column prompt, question or problem; found input, target"),
    ([{"prompt": "1+1=", "other": "2"}] * 5, "no column answer, solution or ground_truth"),
    ([{"prompt": "1+1=", "answer": ""}] * 5, "0 training rows .*; 3 dropped, without answer"),
    ([{"prompt": "1+1=", "answer": "2"}], "1 training rows"),
]


@pytest.mark.parametrize("rows, expected", BAD_ROWS)
def test_bad_data_exits_with_one_line_and_leaves_nothing_behind(folder, rows, expected):
    assert re.search(expected, exit_message(dataset=write_lines(folder / "bad.jsonl", *rows), run_dir="mine"))
    assert not (folder / "mine").exists() and not (folder / "runs").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"eval_prompts": -1},
        {"rollout_batch_size": -1},
        {"num_steps": -1},
        {"learning_rate": -1.0},
        {"temperature": float("nan")},
        {"max_grad_norm": 0.0},
    ],
)
def test_impossible_settings_exit_before_the_run_folder_is_made(folder, settings):
    exit_message(**settings, run_dir="mine")
    assert not (folder / "mine").exists()


@pytest.mark.parametrize("content", [{"args.json": "{}"}, {"notes.txt": "mine", ".lock": ""}])
def test_a_run_folder_that_exists_is_left_alone(folder, content):
    (folder / "mine").mkdir()
    for name, text in content.items():
        (folder / "mine" / name).write_text(text)
    assert "--run-dir mine exists" in exit_message(run_dir="mine")
    assert {path.name: path.read_text() for path in (folder / "mine").iterdir()} == content


# ---- --resume


def resume_message(script=grpo, **settings):
    with pytest.raises(SystemExit) as caught:
        script.main(script.Args(**settings))
    assert isinstance(caught.value.code, str) and "\n" not in caught.value.code
    return caught.value.code


def test_resume_of_something_that_is_no_run(folder):
    assert "--resume nothing: not the folder of a run" in resume_message(resume="nothing")
    assert not (folder / "nothing").exists()


@pytest.mark.parametrize("added, removed", [({"baseline": "none"}, ()), ({}, ("kl_coef",))])
def test_resume_of_a_run_of_another_version(folder, added, removed):
    saved = {key: value for key, value in (asdict(grpo.Args()) | added).items() if key not in removed}
    (folder / "other").mkdir()
    write_lines(folder / "other" / "args.json", saved)
    assert "another script or version" in resume_message(resume="other")
    assert [json.loads(path.read_text()) for path in (folder / "other").iterdir()] == [saved]


@pytest.mark.parametrize("script, other", list(permutations(SCRIPTS[:5], 2)))
def test_resume_of_a_run_of_another_script(folder, script, other):
    """Scripts are told apart by the names of their settings; grpo_process has those of grpo (test_runs.py)."""
    assert set(names_of(script)) != set(names_of(other))
    (folder / "other").mkdir()
    write_lines(folder / "other" / "args.json", asdict(other.Args()))
    assert "another script or version" in resume_message(script, resume="other")
    assert [json.loads(path.read_text()) for path in (folder / "other").iterdir()] == [asdict(other.Args())]


@pytest.mark.parametrize("script", SCRIPTS)
def test_resume_with_another_flag(folder, script):
    (folder / "run").mkdir()
    (folder / "run" / "args.json").write_text(json.dumps(asdict(script.Args())))
    message = resume_message(script, resume="run", group_size=4, learning_rate=1e-5, num_steps=9)
    assert "drop --group-size, --learning-rate;" in message and "only --num-steps" in message
    assert [path.name for path in (folder / "run").iterdir()] == ["args.json"]


# ---- the default depends on the model


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("model, which", [(None, 0), (str(TINY), 0), ("some/model", 1)])
def test_defaults_follow_the_model(script, model, which):
    resolved = script.resolve_args(script.Args(model=model))
    expected = {name: values[which] for name, values in script.DEFAULTS.items()}
    assert {name: getattr(resolved, name) for name in expected} == expected
    assert script.resolve_args(script.Args(model=model, num_steps=7, system_prompt="x")).num_steps == 7


# Flags whose default is not that of the other scripts.
OWN_DEFAULTS = {
    "reinforce": {"warmup_steps"},
    "dr_grpo": set(),
    "dapo": {"num_steps", "warmup_steps", "minibatch_size"},
    "gspo": {"minibatch_size"},
    "cispo": {"minibatch_size"},
    "grpo_tools": set(),
    "grpo_process": set(),
}


def defaults_of(script):
    return {field.name: (field.default, script.DEFAULTS.get(field.name)) for field in fields(script.Args)}


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_flags_of_one_name_have_one_type_and_mostly_one_default(script):
    common = {*names_of(script)} & {*names_of(grpo)}
    types, expected = ({field.name: field.type for field in fields(s.Args)} for s in (script, grpo))
    assert {name: types[name] for name in common} == {name: expected[name] for name in common}
    defaults, expected = defaults_of(script), defaults_of(grpo)
    assert {name for name in common if defaults[name] != expected[name]} == OWN_DEFAULTS[script.__name__]


def test_flags_that_grpo_does_not_have():
    added = {script.__name__: {*names_of(script)} - {*names_of(grpo)} for script in SCRIPTS[1:]}
    ranges = {"clip_eps_low", "clip_eps_high"}
    assert added == {
        "reinforce": {"baseline"},
        "dr_grpo": set(),
        "dapo": {"max_rounds", "overlong_buffer", *ranges},
        "gspo": ranges,
        "cispo": {"clip_eps_high"},
        "grpo_tools": {"tool_tokens"},
        "grpo_process": set(),
    }
    types = [{field.name: field.type for field in fields(script.Args)} for script in (dapo, gspo, cispo)]
    assert all(found.get(name, float) is float for found in types for name in ranges)


# ---- the scripts' help


def parse_help(script):
    """{field: the string under it in the source}."""
    tree = ast.parse(Path(script.__file__).read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args").body
    return {
        field.target.id: text.value.value
        for field, text in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_has_one_line_of_ascii_help(script):
    help_lines = parse_help(script)
    assert list(help_lines) == names_of(script)
    assert len(help_lines) <= 32
    for text in help_lines.values():
        assert text.isascii() and text.strip() and "\n" not in text


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_states_both_defaults_where_they_depend_on_the_model(script):
    help_lines = parse_help(script)
    optional = [f.name for f in fields(script.Args) if f.default is None]
    own = {"overlong_buffer"} if script is dapo else set()  # a share of another setting
    assert set(optional) - set(script.DEFAULTS) == {"model", "dataset", "run_dir", "resume", *own}
    assert set(script.DEFAULTS) <= set(optional)
    for name, values in script.DEFAULTS.items():
        stated = re.search(r"\(embedded: (\S+); real: ([^,)\s]+)", help_lines[name])
        if name == "system_prompt":
            assert "(embedded: none; real: asks for steps and a boxed answer)" in help_lines[name]
            assert values[0] == "" and "step by step" in values[1] and "\\boxed{}" in values[1]
        else:
            assert tuple(map(float, stated.groups())) == values


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


def run_each(jobs, **environment):
    """Run the script alone in each of the folders with the flags given; return what each printed."""
    command = [sys.executable, "-c", RUN_EACH, json.dumps(jobs)]
    result = subprocess.run(command, env=os.environ | environment, capture_output=True)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode("ascii").split("\n==== end of one\n")


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """Copies of each script somewhere else and what they print, on an ascii console: once --help, once a step."""
    folder, home = (tmp_path_factory.mktemp(name) for name in ("elsewhere", "home"))
    jobs = []
    for script in [*HELPED, *SCRIPTS]:
        place = folder / ("run" if len(jobs) >= len(HELPED) else "help") / script.__name__
        place.mkdir(parents=True)
        shutil.copy(script.__file__, place)
        flags = {"model": TINY, "dataset": "sums.jsonl", "run_dir": "runs/one", **small(script)}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        if place.parent.name == "run":
            write_sums(place / "sums.jsonl")
        jobs.append((str(place), flags if place.parent.name == "run" else ["--help"]))
    environment = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "COLUMNS": "200"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "HOME": str(home), "HF_HOME": str(home / "hf")}
    outputs = run_each(jobs, **environment, HF_DATASETS_CACHE=str(tmp_path_factory.mktemp("cache")))
    assert list(home.iterdir()) == []
    return folder, dict(zip((place for place, _ in jobs), outputs))


@pytest.mark.parametrize("script", HELPED)
def test_help_works_on_an_ascii_console_and_writes_nothing(copied, script):
    folder = copied[0] / "help" / script.__name__
    text = copied[1][str(folder)]
    for name in names_of(script):
        assert re.search(rf"--{name.replace('_', '-')}\b", text), name
    assert f"usage: {script.__name__}.py" in text
    assert "(default: None)" not in text and "{None}" not in text
    if script in SCRIPTS:
        assert all(f" {section} options " in text for section in ("rollout", "the-algorithm"))
    assert [path.name for path in folder.iterdir()] == [f"{script.__name__}.py"]


# ---- a script copied elsewhere

METRICS = set(
    """reward/mean reward/std reward/zero_std_all_right reward/zero_std_all_wrong
    rollout/completions rollout/length_mean rollout/length_max rollout/truncated rollout/live
    policy/entropy policy/sampler_kl loss/policy optim/grad_norm optim/learning_rate""".split()
)
RATIO = {"policy/approx_kl", "policy/ratio_max"}
CLIP = {"policy/clip_fraction_low", "policy/clip_fraction_high"}
OWN_METRICS = {
    "grpo": RATIO | CLIP | {"policy/ref_kl", "loss/kl"},
    "reinforce": set(),
    "dr_grpo": RATIO | CLIP | {"reward/trained_mean"},
    "dapo": RATIO | CLIP | {"reward/trained_mean", "rollout/rounds", "rollout/groups", "rollout/prompts_consumed"},
    "gspo": RATIO | {"policy/clip_fraction_sequences_low", "policy/clip_fraction_sequences_high"},
    "cispo": RATIO | {"policy/cap_fraction"},
    "grpo_tools": RATIO | CLIP | {"rollout/tool_use", "rollout/tool_tokens"},
    "grpo_process": RATIO | CLIP | {"policy/ref_kl", "loss/kl"},
}


@pytest.fixture(params=SCRIPTS, ids=NAMES)
def script(request):
    return request.param


@pytest.fixture
def finished_run(copied, script):
    """The folder of a run of one step."""
    folder = copied[0] / "run" / script.__name__
    output = copied[1][str(folder)]
    assert "runs/one/checkpoint" in output and f"{script.__name__}.py --resume runs/one" in output
    return folder / "runs" / "one"


def test_a_run_writes_its_five_parts(finished_run, script):
    names = {path.name for path in finished_run.iterdir()}
    assert names >= {"args.json", "metrics.jsonl", "samples.jsonl", "checkpoint", "state"}
    assert not [name for name in names if "unfinished" in name]
    assert [path.name for path in (finished_run / "state").iterdir()] == ["00000001"]
    saved = json.loads((finished_run / "args.json").read_text())
    assert list(saved) == [*names_of(script), "run"]
    assert small(script).items() <= saved.items() and saved["learning_rate"] == script.DEFAULTS["learning_rate"][0]


def test_keys_of_the_metrics(finished_run, script):
    lines = read_metrics(finished_run)
    assert [line["step"] for line in lines] == [0, 1]
    evaluation = {"step", "eval/reward", "eval/accuracy", "eval/pass@1", "eval/pass@2", "eval/pass@4"}
    keys = [{key for key in line if not key.startswith("perf/")} for line in lines]
    assert keys[0] == evaluation
    assert keys[1] == evaluation | METRICS | OWN_METRICS[script.__name__]
    assert "perf/step_seconds" in lines[1]


def test_one_group_of_samples_a_step(finished_run):
    (line,) = (finished_run / "samples.jsonl").read_text().splitlines()
    group = json.loads(line)
    assert group["step"] == 1 and group["prompt"].endswith("+1=")
    assert len(group["completions"]) == len(group["rewards"]) == 2


def test_the_checkpoint_loads_with_its_tokenizer(finished_run):
    model = AutoModelForCausalLM.from_pretrained(finished_run / "checkpoint", dtype="auto")
    before = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    assert model.dtype == torch.float32
    pairs = list(zip(model.parameters(), before.parameters(), strict=True))
    assert all(after.isfinite().all() and after.shape == start.shape for after, start in pairs)
    tokenizer = AutoTokenizer.from_pretrained(finished_run / "checkpoint")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(TINY).chat_template


# ---- editing


def test_another_reward_function_is_looked_up_when_called(monkeypatch):
    model, tokenizer = load(grpo, TINY)
    asked = []
    monkeypatch.setattr(grpo, "reward_fn", lambda completion, answer: asked.append((completion, answer)) or 0.25)
    prompts = [{"prompt": "1+1=", "answer": answer, "prompt_ids": [3, 11, 20, 11, 21, 4]} for answer in ("2", "3")]
    args = grpo.Args(max_completion_length=4)
    batch, texts = grpo.rollout(model, tokenizer, prompts, 2, 1.0, grpo.find_stop_ids(model, tokenizer), args)
    assert batch["rewards"].tolist() == [0.25] * 4
    assert asked == list(zip(texts, ["2", "2", "3", "3"]))
