"""The command line: one clear line for what a user can get wrong, --help, and a script copied elsewhere."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo

SCRIPT = Path(grpo.__file__)
TINY = SCRIPT.parent / "models" / "tiny"
SMALL = {"num_steps": 1, "prompts_per_step": 2, "group_size": 2, "minibatch_size": 2, "max_completion_length": 4}
SMALL |= {"eval_prompts": 2}


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


def exit_message(**settings):
    """Run main and return the line it exits with; a message, unlike None or 0, is exit status 1."""
    with pytest.raises(SystemExit) as caught:
        grpo.main(grpo.Args(**{"dataset": "sums.jsonl", **SMALL, **settings}))
    message = caught.value.code
    assert isinstance(message, str) and 0 < len(message) < 600 and "\n" not in message
    return message


# ---- bad input

BAD_SETTINGS = [
    ({"model": "no/such/model"}, "--model no/such/model: there is no such folder"),
    ({"dataset": "no_such_file.jsonl"}, "--dataset no_such_file.jsonl: cannot be loaded"),
    ({"group_size": 1}, "--group-size 1"),
    ({"group_size": 0}, "--group-size 0"),
    ({"minibatch_size": 3}, "--prompts-per-step 2 times --group-size 2 .*--minibatch-size 3"),
    ({"temperature": 0.0}, "--temperature 0"),
    ({"temperature": -1.0}, "--temperature -1"),
    ({"prompts_per_step": 0}, "--prompts-per-step 0"),
    ({"microbatch_tokens": 0}, "--microbatch-tokens 0"),
    ({"update_epochs": 0}, "--update-epochs 0"),
    ({"max_prompt_length": 200, "max_completion_length": 100}, "300, over the model's context of 256"),
    ({"max_prompt_length": 3}, "0 training prompts; dropped: 8 longer than 3 tokens"),
]


@pytest.mark.parametrize("settings, expected", BAD_SETTINGS)
def test_bad_settings_exit_with_one_line_and_leave_nothing_behind(folder, settings, expected):
    assert re.search(expected, exit_message(**settings))
    assert not (folder / "runs").exists()
    assert re.search(expected, exit_message(**settings, run_dir="mine"))
    assert not (folder / "mine").exists()


BAD_ROWS = [
    ([], "--dataset bad.jsonl"),
    ([{"input": "1+1=", "target": "2"}] * 5, "question or problem .* found input, target"),
    ([{"prompt": "1+1=", "other": "2"}] * 5, "answer, solution or ground_truth; found prompt, other"),
    ([{"prompt": "1+1=", "answer": ""}] * 5, "0 training prompts; .*3 without prompt or answer"),
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


@pytest.mark.parametrize("content", [{}, {"args.json": "{}"}])
def test_a_run_folder_that_exists_is_left_alone(folder, content):
    (folder / "mine").mkdir()
    for name, text in content.items():
        (folder / "mine" / name).write_text(text)
    assert "--run-dir mine exists" in exit_message(run_dir="mine")
    assert {path.name: path.read_text() for path in (folder / "mine").iterdir()} == content


# ---- --resume


def resume_message(**settings):
    with pytest.raises(SystemExit) as caught:
        grpo.main(grpo.Args(**settings))
    assert isinstance(caught.value.code, str) and "\n" not in caught.value.code
    return caught.value.code


def test_resume_of_something_that_is_no_run(folder):
    assert "--resume nothing: not the folder of a run" in resume_message(resume="nothing")
    assert not (folder / "nothing").exists()


@pytest.mark.parametrize("added, removed", [({"baseline": "none"}, ()), ({}, ("kl_coef",))])
def test_resume_of_a_run_of_another_script(folder, added, removed):
    saved = {key: value for key, value in (asdict(grpo.Args()) | added).items() if key not in removed}
    (folder / "other").mkdir()
    write_lines(folder / "other" / "args.json", saved)
    assert "another script or version" in resume_message(resume="other")
    assert [json.loads(path.read_text()) for path in (folder / "other").iterdir()] == [saved]


def test_resume_with_another_flag(folder):
    (folder / "run").mkdir()
    (folder / "run" / "args.json").write_text(json.dumps(asdict(grpo.Args())))
    message = resume_message(resume="run", group_size=4, learning_rate=1e-5, num_steps=9)
    assert "drop --group-size, --learning-rate;" in message and "only --num-steps" in message
    assert [path.name for path in (folder / "run").iterdir()] == ["args.json"]


# ---- the default depends on the model


@pytest.mark.parametrize("model, which", [(None, 0), (str(TINY), 0), ("some/model", 1)])
def test_defaults_follow_the_model(model, which):
    resolved = grpo.resolve_args(grpo.Args(model=model))
    assert {name: getattr(resolved, name) for name in grpo.DEFAULTS} == {k: v[which] for k, v in grpo.DEFAULTS.items()}
    assert grpo.resolve_args(grpo.Args(model=model, num_steps=7, system_prompt="x")).num_steps == 7


# ---- the script's help


def parse_help():
    """{field: the string under it in the source}."""
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args").body
    return {
        field.target.id: text.value.value
        for field, text in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def test_every_flag_has_one_line_of_ascii_help():
    help_lines = parse_help()
    assert list(help_lines) == [field.name for field in fields(grpo.Args)]
    assert len(help_lines) <= 32
    for text in help_lines.values():
        assert text.isascii() and text.strip() and "\n" not in text


def test_help_states_both_defaults_where_they_depend_on_the_model():
    help_lines = parse_help()
    optional = [f.name for f in fields(grpo.Args) if f.default is None]
    assert set(optional) - set(grpo.DEFAULTS) == {"model", "dataset", "run_dir", "resume"}
    for name, values in grpo.DEFAULTS.items():
        stated = re.search(r"\(embedded: (\S+); real: ([^,)\s]+)", help_lines[name])
        if name == "system_prompt":
            assert "(embedded: none; real: asks for steps and a boxed answer)" in help_lines[name]
            assert values[0] == "" and "step by step" in values[1] and "\\boxed{}" in values[1]
        else:
            assert tuple(map(float, stated.groups())) == values


def test_help_works_on_an_ascii_console_and_writes_nothing(tmp_path):
    shutil.copy(SCRIPT, tmp_path)
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "COLUMNS": "200"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "grpo.py", "--help"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert result.returncode == 0, result.stderr.decode()
    text = result.stdout.decode("ascii")
    for field in fields(grpo.Args):
        assert re.search(rf"--{field.name.replace('_', '-')}\b", text), field.name
    assert [path.name for path in tmp_path.iterdir()] == ["grpo.py"]


# ---- a script copied elsewhere

METRICS = set(
    """reward/mean reward/std reward/zero_std_all_right reward/zero_std_all_wrong
    rollout/completions rollout/length_mean rollout/length_max rollout/truncated
    policy/approx_kl policy/ref_kl policy/clip_fraction_low policy/clip_fraction_high policy/entropy policy/ratio_max
    optim/grad_norm optim/learning_rate""".split()
)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """The folder of a run of one step, made by a copy of the script somewhere else."""
    folder = tmp_path_factory.mktemp("elsewhere")
    shutil.copy(SCRIPT, folder)
    write_sums(folder / "sums.jsonl")
    command = [sys.executable, "grpo.py", "--model", str(TINY), "--dataset", "sums.jsonl", "--run-dir", "runs/one"]
    for name, value in SMALL.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    environment = os.environ | {"HF_DATASETS_CACHE": str(folder / "cache")}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "runs/one/checkpoint" in result.stdout and "--resume runs/one" in result.stdout
    return folder / "runs" / "one"


def test_a_run_writes_its_five_parts(finished_run):
    names = {path.name for path in finished_run.iterdir()}
    assert names >= {"args.json", "metrics.jsonl", "samples.jsonl", "checkpoint", "state"}
    assert not [name for name in names if "unfinished" in name]
    assert [path.name for path in (finished_run / "state").iterdir()] == ["00000001"]
    saved = json.loads((finished_run / "args.json").read_text())
    assert list(saved) == [field.name for field in fields(grpo.Args)]
    assert SMALL.items() <= saved.items() and saved["learning_rate"] == grpo.DEFAULTS["learning_rate"][0]


def test_keys_of_the_metrics(finished_run):
    lines = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    evaluation = {"step", "eval/accuracy", "eval/pass@1", "eval/pass@2", "eval/pass@4"}
    keys = [{key for key in line if not key.startswith("perf/")} for line in lines]
    assert keys[0] == evaluation
    losses = {key for key in keys[1] if key.startswith("loss/")}
    assert keys[1] - losses == evaluation | METRICS and "loss/policy" in losses
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
    model, tokenizer = grpo.load_model(str(TINY), "cpu")
    asked = []
    monkeypatch.setattr(grpo, "reward_fn", lambda completion, answer: asked.append((completion, answer)) or 0.25)
    prompts = [{"prompt": "1+1=", "answer": answer, "prompt_ids": [3, 11, 20, 11, 21, 4]} for answer in ("2", "3")]
    args = grpo.Args(max_completion_length=4)
    batch, texts = grpo.rollout(model, tokenizer, prompts, 2, 1.0, grpo.find_stop_ids(model, tokenizer), args)
    assert batch["rewards"].tolist() == [0.25] * 4
    assert asked == list(zip(texts, ["2", "2", "3", "3"]))
