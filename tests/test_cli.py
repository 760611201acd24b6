"""The command line: one clear line for what a user can get wrong, --help, and a script copied elsewhere."""

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
import tyro
from tiny import ROOT, TINY, exit_line, read_jsonl, write_jsonl
from tiny import SCRIPTS as OF_COMPLETIONS
from transformers import AutoModelForCausalLM, AutoTokenizer

import dapo
import dpo
import grpo
import grpo_process
import grpo_tools
import ppo_rlhf
import reinforce
import reward_model
import sft

SCRIPTS = [*OF_COMPLETIONS.values(), grpo_process]
HELPED = [*SCRIPTS, reward_model, dpo, ppo_rlhf, sft]
SMALL = {"num_steps": 1, "prompts_per_step": 2, "group_size": 2, "minibatch_size": 2, "max_completion_length": 4}
SMALL |= {"eval_prompts": 2, "overlong_buffer": 2}


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


def exit_message(script=grpo, **settings):
    return exit_line(script, **{"dataset": "sums.jsonl", **small(script), **settings})


# ---- bad settings

BAD_SETTINGS = [  # which the same lines refuse in every script
    ({"model": "no/such/model"}, "^--model no/such/model: "),
    ({"dataset": "no_such_file.jsonl"}, "^--dataset no_such_file.jsonl: "),
    ({"minibatch_size": 3}, "^--minibatch-size 3 does not divide the 4 completions"),
    ({"max_completion_length": 300}, "30[6-9] .*context of 256"),
    ({"max_prompt_length": 3}, "^--dataset sums.jsonl: .*0 training rows .*3 tokens"),
    *[({"precision": wrong}, f"^--precision {wrong}: must be bfloat16 or float32") for wrong in ("float16", "", 16)],
]
POSITIVE = (
    "prompts_per_step group_size temperature microbatch_tokens update_epochs max_grad_norm learning_rate clip_eps"
)
BAD_SETTINGS += [({name: 0}, f"^--{name.replace('_', '-')} 0: must be") for name in POSITIVE.split()]
NEVER_NEGATIVE = "kl_coef eval_prompts rollout_batch_size num_steps learning_rate temperature"
BAD_SETTINGS += [({name: -1}, f"^--{name.replace('_', '-')} -1: must be") for name in NEVER_NEGATIVE.split()]
BAD_SETTINGS += [
    ({"kl_coef": math.nan}, "^--kl-coef nan: must be"),
    ({"clip_eps": math.inf}, "^--clip-eps inf: must be > 0 and < inf"),
    ({"learning_rate": math.inf}, "^--learning-rate inf: must be > 0 and < 1"),
]
BAD_CASES = [(grpo, *case) for case in BAD_SETTINGS]
BAD_CASES += [(script, {"group_size": 1}, "^--group-size 1") for script in SCRIPTS]
BAD_CASES += [(reinforce, {"group_size": 1, "baseline": "leave_one_out"}, "^--group-size 1")]
BAD_CASES += [(dapo, {"overlong_buffer": 5}, "^--overlong-buffer 5: over --max-completion-length")]
BAD_CASES += [(dapo, {"overlong_buffer": -1}, "^--overlong-buffer -1"), (dapo, {"max_rounds": 0}, "^--max-rounds 0")]
BAD_CASES += [
    (dapo, {"clip_eps_low": -0.1}, "^--clip-eps-low -0.1"),
    (grpo_tools, {"tool_tokens": 0}, "^--tool-tokens"),
]
BAD_CASES += [(ppo_rlhf, {"gamma": math.nan}, "^--gamma nan"), (sft, {"weight_decay": -1.0}, "^--weight-decay -1.0")]
BAD_CASES += [(dpo, {"label_smoothing": wrong}, f"^--label-smoothing {wrong}") for wrong in (0.5, math.inf)]
BAD_CASES += [
    *[(script, {"max_completion_length": 250}, "2[5-9][0-9].* context of 256") for script in (reward_model, dpo)],
    (ppo_rlhf, {"model": "some/model"}, "^--reward-model.* reward_model.py, or none"),
    (ppo_rlhf, {"reward_model": str(TINY)}, "^--reward-model .*models/tiny: .*no scores.* reward_model.py"),
    (ppo_rlhf, {"prompts_per_step": 6, "minibatch_size": 4}, "^--minibatch-size 4 does not divide"),
    (ppo_rlhf, {"gamma": 1.01}, "^--gamma 1.01: must be at most 1"),
]


@pytest.mark.parametrize("script, settings, expected", BAD_CASES)
def test_bad_settings_exit_with_one_line_and_leave_nothing_behind(folder, script, settings, expected):
    assert re.search(expected, exit_message(script, **settings, run_dir="mine"))
    assert not (folder / "runs").exists() and not (folder / "mine").exists()


@pytest.mark.parametrize("content", [{"args.json": "{}"}, {"notes.txt": "mine"}])
def test_a_run_folder_that_exists_is_left_alone(folder, content):
    (folder / "mine").mkdir()
    for name, text in content.items():
        (folder / "mine" / name).write_text(text)
    assert exit_message(run_dir="mine").startswith("--run-dir mine")
    assert {path.name: path.read_text() for path in (folder / "mine").iterdir()} == content


def test_one_completion_a_prompt_trains_without_a_baseline(tmp_path):
    sizes = {"num_steps": 2, "prompts_per_step": 8, "group_size": 1, "eval_prompts": 4}
    reinforce.main(reinforce.Args(run_dir=str(tmp_path / "run"), baseline="none", **sizes))
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(line["optim/grad_norm"] > 0 and line["rollout/completions"] == 8 for line in lines[1:])


def test_an_unknown_baseline_is_refused(capsys):
    baselines = ["none", "group_mean", "leave_one_out"]
    with pytest.raises(SystemExit) as caught:
        tyro.cli(reinforce.Args, args=["--baseline", "median"])
    assert caught.value.code not in (0, None)
    text = capsys.readouterr().err
    assert all(word in text for word in ("--baseline", "median", *baselines))
    assert [tyro.cli(reinforce.Args, args=["--baseline", name]).baseline for name in baselines] == baselines


# ---- defaults


def by_model(script):
    """{setting: (its default for the embedded model, for others)}"""
    found = {field.name: field.metadata for field in fields(script.Args) if field.metadata}
    return {name: (values["embedded"], values["real"]) for name, values in found.items()}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("model, which", [(None, 0), (str(TINY), 0), ("some/model", 1)])
def test_defaults_follow_the_model(script, model, which):
    resolved = script.resolve_args(script.Args(model=model))
    expected = {name: values[which] for name, values in by_model(script).items()}
    assert expected and {name: getattr(resolved, name) for name in expected} == expected
    given = script.resolve_args(script.Args(model=model, num_steps=7, system_prompt="x"))
    assert (given.num_steps, given.system_prompt) == (7, "x")


@pytest.mark.parametrize("script", SCRIPTS)
def test_real_models_compute_in_bfloat16_where_the_processor_multiplies_it(script, monkeypatch):
    def found(**settings):
        return script.resolve_args(script.Args(**settings)).precision

    assert found() == found(model="some/model") == "float32"
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert found() == found(model=str(TINY)) == found(model="some/model", precision="float32") == "float32"
    assert found(model="some/model") == "bfloat16"


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("native", [True, False])
def test_a_gpu_without_bfloat16_units_computes_in_float32(script, native, monkeypatch):
    """A T4 or an RTX 20 emulates bfloat16, slowly; asked without its argument, torch says that it is supported."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    assert script.resolve_args(script.Args()).precision == ("bfloat16" if native else "float32")
    assert script.resolve_args(script.Args(precision="bfloat16")).precision == "bfloat16"


def test_an_empty_chat_template_is_one_line(folder):
    model = shutil.copytree(TINY, folder / "model")
    (model / "chat_template.jinja").write_text("")
    message = exit_message(model=str(model))
    assert message.startswith(f"--model {model}: ") and "chat template is empty" in message


def test_the_embedded_model_is_known_by_its_tokenizer(tmp_path):
    """So is what was trained from it; a model of proteins, say, has a small vocabulary too."""
    trained, other = (shutil.copytree(TINY, tmp_path / name) for name in ("trained", "other"))
    (trained / "config.json").unlink()
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text.replace('"="', '"K"'), encoding="utf-8")
    found = [grpo.resolve_args(grpo.Args(model=str(path))).max_prompt_length for path in (trained, other)]
    assert found == [32, 512]


# Flags whose default is not that of the other scripts, and flags that grpo.py does not have.
OWN_DEFAULTS = dict.fromkeys(("gspo", "cispo"), {"minibatch_size"}) | {"reinforce": {"warmup_steps"}}
OWN_DEFAULTS |= {"dapo": {"num_steps", "warmup_steps", "minibatch_size"}, "grpo_tools": {"system_prompt"}}
RANGES = {"clip_eps_low": float, "clip_eps_high": float}
OWN_FLAGS = {
    **{"dapo": {"max_rounds": int, "overlong_buffer": int | None, **RANGES}, "gspo": RANGES},
    **{"cispo": {"clip_eps_high": float}, "grpo_tools": {"tool_tokens": int | None}},
}


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_flags_of_one_name_have_one_type_and_mostly_one_default(script):
    own, shared = ({field.name: field for field in fields(s.Args)} for s in (script, grpo))
    common = {*own} & {*shared}
    assert all(own[name].type == shared[name].type for name in common)
    differ = {
        name
        for name in common
        if (own[name].default, own[name].metadata) != (shared[name].default, shared[name].metadata)
    }
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


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_has_one_line_of_ascii_help_and_states_both_defaults(script):
    help_lines = parse_help(script)
    assert list(help_lines) == names_of(script) and len(help_lines) <= 32
    assert all(text.isascii() and text.strip() and "\n" not in text for text in help_lines.values())
    optional = {field.name for field in fields(script.Args) if field.default is None}
    own = {"overlong_buffer"} if script is dapo else set()  # a share of another setting
    assert optional - {*by_model(script)} == {"model", "dataset", "run_dir", "resume", "precision", *own}
    for name, values in by_model(script).items():
        if name == "system_prompt":
            assert "(embedded: none; real: asks for steps and a boxed answer)" in help_lines[name]
            assert values[0] == "" and "step by step" in values[1] and "\\boxed{}" in values[1]
        else:
            stated = re.search(r"\(embedded: (\S+); real: ([^,)\s]+)|\((\d+)\)", help_lines[name])
            one, other, both = (number and float(number) for number in stated.groups())
            assert values == ((both, both) if both else (one, other))


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
        # Large enough that some completions are right and some wrong: without a trained token there are no policy/*.
        flags |= {"prompts_per_step": 2, "group_size": 8, "max_completion_length": 48, "system_prompt": ""}
        flags |= {"minibatch_size": 8} if "minibatch_size" in flags else {}
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
    for name in names_of(script):
        assert re.search(rf"--{name.replace('_', '-')}\b", text), name
    assert f"usage: {script.__name__}.py" in text
    assert "(default: None)" not in text  # a flag's own text says what it is by default
    assert [path.name for path in folder.iterdir()] == [f"{script.__name__}.py"]


def test_numbers_are_checked_on_the_command_line_as_well():
    """Where the types of Args have their texts on them, and those that are no numbers have "hint" in their name."""
    flags = ["--system-prompt", "-1", "--precision", "float32", "--max-prompt-length", "-1"]
    command = [sys.executable, grpo.__file__, *flags]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr == "--max-prompt-length -1: must be > 0 and < inf\n"


METRICS = set(
    """reward/mean reward/zero_std rollout/completions rollout/length_mean rollout/truncated rollout/live
    policy/entropy policy/sampler_kl loss/policy optim/grad_norm optim/learning_rate optim/skipped
    perf/rollout_seconds perf/logprob_seconds perf/update_seconds perf/step_seconds""".split()
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
    assert "runs/one/checkpoint" in output and f"{script.__name__}.py --resume runs/one" in output
    parts = {"args.json", "metrics.jsonl", "samples.jsonl", "eval_samples.jsonl", "checkpoint", "state"}
    assert {path.name for path in run.iterdir() if path.name != "wandb"} == parts
    assert [path.name for path in (run / "state").iterdir()] == ["00000001"]
    # metrics
    lines = read_jsonl(run / "metrics.jsonl")
    evaluation = {"step", "eval/reward", "eval/accuracy", "eval/pass@1", "eval/pass@4"}
    expected = evaluation | METRICS | OWN_METRICS[script.__name__]
    if script is reinforce:  # always on policy
        expected -= {"perf/logprob_seconds"}
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
