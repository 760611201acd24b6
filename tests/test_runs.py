"""What a run is, who may write into its folder, and what resuming one refuses: each with one line."""

import functools
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wandb
from processes import Forked

import dpo
import grpo
import ppo_rlhf
import reward_model
import sft

ROOT = Path(grpo.__file__).parent
SMALL = {"num_steps": 2, "prompts_per_step": 2, "group_size": 2, "minibatch_size": 2, "max_completion_length": 4}
SMALL |= {"eval_prompts": 2, "save_every": 1}
PAIRS = {"num_steps": 1, "minibatch_size": 2, "eval_prompts": 2, "eval_dataset": ""}


def write_sums(path, count=10):
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": i + 1}) + "\n" for i in range(1, count + 1)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a data set and a run of two steps in it, both named by relative paths."""
    folder = tmp_path_factory.mktemp("finished")
    before = os.getcwd()
    os.chdir(folder)
    write_sums(folder / "sums.jsonl")
    grpo.main(grpo.Args(dataset="sums.jsonl", run_dir="run", **SMALL))
    os.chdir(before)
    return folder


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    """A copy of that run, whose data set is beside it."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    change(tmp_path / "run" / "args.json", dataset=str(tmp_path / "sums.jsonl"))
    return tmp_path / "run"


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def exit_line(script=grpo, **settings):
    with pytest.raises(SystemExit) as caught:
        script.main(script.Args(**settings))
    assert isinstance(caught.value.code, str) and "\n" not in caught.value.code and len(caught.value.code) < 700
    return caught.value.code


def forbid_loading(monkeypatch):
    """What is refused is refused before the model loads."""
    monkeypatch.setattr(grpo, "load_model", lambda *_: pytest.fail("the model was loaded"))


# ---- what a run is


def settings_of(run):
    return json.loads((run / "args.json").read_text())


def test_a_run_says_what_it_was(run):
    described = settings_of(run)["run"]
    assert described["script"] == "grpo" and described["processes"] == 1
    assert [re.sub(r"\(.*\)", "", line) for line in described["data"]] == ["8 training rows ", "2 held-out rows "]
    assert {"reward_fn", "compute_advantages", "policy_loss", "main"} <= {*described["functions"]}
    assert not {"load_model", "generate"} & {*described["functions"]}


def test_a_changed_function_is_one_line(run, capsys, monkeypatch):
    grpo.main(grpo.Args(resume=str(run), num_steps=2))
    assert "warning" not in capsys.readouterr().out
    monkeypatch.setattr(grpo, "reward_fn", lambda *_: 0.25)
    grpo.main(grpo.Args(resume=str(run), num_steps=2))
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1 and warnings[0].endswith(": reward_fn")


def test_functions_are_told_apart_by_their_source():
    class Judge:
        def __call__(self):
            return 1

    assert grpo.fingerprint(grpo.reward_fn) != grpo.fingerprint(grpo.is_right)
    assert grpo.fingerprint(grpo.reward_fn) == ppo_rlhf.fingerprint(ppo_rlhf.reward_fn)
    for odd in (len, functools.partial(max, 1), Judge()):  # no address, which differs from process to process
        assert grpo.fingerprint(odd) == grpo.fingerprint(type(odd).__name__)


@pytest.mark.parametrize(
    "described, expected",
    [({"script": "gspo"}, "script was gspo .* and is grpo"), ({"processes": 2}, "processes was 2 .* and is 1")],
)
def test_another_script_or_number_of_processes_is_refused(run, described, expected):
    now = settings_of(run)["run"]
    change(run / "args.json", run=now | described | {"command": "torchrun --nproc-per-node 2 x.py"})
    line = exit_line(resume=str(run))
    assert re.search(expected, line) and "torchrun --nproc-per-node 2 x.py" in line


def test_other_data_is_refused(run):
    path = run.parent / "sums.jsonl"
    path.write_text(path.read_text().replace("9+1=", "8+1="))
    assert re.search("data was .*8 training rows .* and is .*8 training rows", exit_line(resume=str(run)))


def test_an_edited_file_of_pairs_is_refused(tmp_path):
    lines = (ROOT / "data" / "preferences" / "train.jsonl").read_text().splitlines(keepends=True)[:12]
    (tmp_path / "pairs.jsonl").write_text("".join(lines))
    dpo.main(dpo.Args(dataset=str(tmp_path / "pairs.jsonl"), run_dir=str(tmp_path / "run"), **PAIRS))
    (tmp_path / "pairs.jsonl").write_text("".join(reversed(lines)))
    assert "data was" in exit_line(dpo, resume=str(tmp_path / "run"), num_steps=2)


def test_resume_from_another_folder(run, tmp_path_factory, monkeypatch):
    change(run / "args.json", num_steps=3)
    assert all(os.path.isabs(settings_of(run)[name]) for name in ("model", "dataset"))
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    grpo.main(grpo.Args(resume=str(run)))
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3]


def test_relative_paths_are_saved_as_absolute_ones(finished):
    assert settings_of(finished / "run")["dataset"] == str(finished / "sums.jsonl")


# ---- the command to go on with


def printed_command(capsys):
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("to go on")]
    return shlex.split(line.removeprefix("to go on"))


def test_the_command_is_that_of_the_script_that_was_started(run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["my runs/own reward.py", "--seed", "3"])
    moved = run.rename(run.parent / "a run")
    grpo.main(grpo.Args(resume=str(moved)))
    assert printed_command(capsys) == ["python", "my runs/own reward.py", "--resume", str(moved), "--num-steps", "4"]


def test_the_command_is_torchruns_where_that_was_used(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    monkeypatch.setattr(grpo.dist, "is_torchelastic_launched", lambda: True)
    for nodes, expected in (("1", ""), ("2", "--nnodes 2 ")):
        monkeypatch.setenv("GROUP_WORLD_SIZE", nodes)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert grpo.entry_command() == f"torchrun {expected}--nproc-per-node 4 grpo.py"


def test_a_run_of_one_evaluation_has_no_arrow(tmp_path, capsys):
    grpo.main(grpo.Args(run_dir=str(tmp_path / "run"), **SMALL | {"num_steps": 0}))
    text = capsys.readouterr().out
    assert "->" not in text and "greedy accuracy" in text and "evaluated only" in text and "to go on" not in text


# ---- one folder, one process


def hold(run_dir):
    """A process that holds the lock of a folder until its standard input ends."""
    code = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(run_dir / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    return process


def test_a_second_process_on_one_folder_is_refused(run):
    other = hold(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert "another process" in exit_line(resume=str(run), num_steps=3)
    other.communicate()
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    grpo.main(grpo.Args(resume=str(run), num_steps=3))


def test_a_folder_filled_while_the_model_was_loading_is_left_alone(tmp_path, monkeypatch):
    load_model = grpo.load_model

    def slow(*args):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "args.json").write_text("{}")
        return load_model(*args)

    monkeypatch.setattr(grpo, "load_model", slow)
    assert "another process" in exit_line(run_dir=str(tmp_path / "run"), **SMALL)
    assert (tmp_path / "run" / "args.json").read_text() == "{}"


def test_runs_of_one_second_have_names_of_their_own():
    assert len({grpo.resolve_args(grpo.Args()).run_dir for _ in range(20)}) == 20


def test_a_folder_without_settings_is_adopted(tmp_path):
    (tmp_path / "run").mkdir(exist_ok=True)
    grpo.main(grpo.Args(run_dir=str(tmp_path / "run"), **SMALL | {"num_steps": 1}))
    assert settings_of(tmp_path / "run")["run"]["script"] == "grpo"


# ---- refused before the model loads


@pytest.mark.parametrize("name", ["model", "dataset", "resume", "run_dir"])
def test_an_empty_string_is_refused(name):
    assert f'--{name.replace("_", "-")} "" is empty' in exit_line(**{name: ""})


def test_without_a_state_there_is_nothing_to_go_on_from(run, monkeypatch):
    forbid_loading(monkeypatch)
    (run / "state" / "00000002").rename(run / "state" / "unfinished")
    before = (run / "metrics.jsonl").read_text()
    assert "start a new run" in exit_line(resume=str(run))
    assert (run / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("inside", ["checkpoint", "state/00000002"])
def test_a_folder_inside_a_run_is_understood(run, inside):
    assert f"did you mean {run}?" in exit_line(resume=str(run / inside))


def test_fewer_steps_than_were_done_are_refused(run, monkeypatch):
    forbid_loading(monkeypatch)
    before = (run / "args.json").read_text()
    assert "--num-steps 1: the run has done 2 already" in exit_line(resume=str(run), num_steps=1)
    assert (run / "args.json").read_text() == before


@pytest.mark.parametrize("name", ["clip_eps", "kl_coef", "temperature", "learning_rate", "max_grad_norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_settings_are_finite(name, value):
    assert re.search(f"--{name.replace('_', '-')} (nan|inf): must be", exit_line(**{name: value}))


@pytest.mark.parametrize("script, name", [(ppo_rlhf, "gamma"), (sft, "weight_decay"), (dpo, "label_smoothing")])
def test_settings_of_other_scripts_are_finite(script, name):
    assert "nan: must be" in exit_line(script, **{name: float("nan")})
    assert "must be" in exit_line(script, **{name: -1.0})


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    forbid_loading(monkeypatch)
    (tmp_path / "file").write_text("")
    for run_dir in ("a" * 300, f"{tmp_path}/file/run", f"{tmp_path}/{'b' * 256}/run"):
        assert "cannot be made" in exit_line(run_dir=run_dir)
    assert not (tmp_path / "b").exists() and (tmp_path / "file").read_text() == ""


def test_track_without_a_key_is_refused(tmp_path, monkeypatch):
    forbid_loading(monkeypatch)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    assert "wandb login" in exit_line(track=True, run_dir=str(tmp_path / "run"))


@pytest.mark.parametrize("seed", [20250101, -7, 10**20 - 1])
def test_any_integer_is_a_seed(tmp_path, seed):
    grpo.main(grpo.Args(seed=seed, run_dir=str(tmp_path / "run"), **SMALL | {"num_steps": 1}))
    assert (tmp_path / "run" / "checkpoint").exists()
    pairs = {"num_steps": 1, "minibatch_size": 2, "eval_prompts": 2}
    if seed == 10**20 - 1:
        for script in (sft, reward_model):
            script.main(script.Args(seed=seed, run_dir=str(tmp_path / script.__name__), **pairs))


def test_small_seeds_draw_what_they_drew_before():
    generator = torch.Generator().manual_seed(5 * 1_000_003)
    assert grpo.pick_rows(list(range(50)), 0, 50, 5) == torch.randperm(50, generator=generator).tolist()


# ---- numbers that are not finite


def test_a_gradient_that_is_not_finite_says_what_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "step_optimizer", lambda *_: float("nan"))
    line = exit_line(run_dir=str(tmp_path / "run"), **SMALL)
    assert re.search("step 1: gradient norm nan: .*--learning-rate too high. nothing was saved yet", line)
    (tmp_path / "run" / "state" / "00000004").mkdir(parents=True)
    with pytest.raises(SystemExit, match="checkpoint is of step 4"):
        grpo.check_finite(5, float("nan"), tmp_path / "run")
    grpo.check_finite(5, 1.0, tmp_path / "run")


# ---- damaged runs


def damage(path, text=""):
    path.write_text(text)
    return path.name


def test_damaged_settings_name_their_file(run, monkeypatch):
    forbid_loading(monkeypatch)
    (run / "args.json").write_text('{"model": ')
    assert f"{run}/args.json is damaged" in exit_line(resume=str(run))


@pytest.mark.parametrize("bad", ['{"step": 1, "rew\n', "[1]\n", '{"reward": 1}\n', "\0\xff\n"])
def test_a_damaged_line_is_named(run, bad):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes("".join([lines[0], bad, *lines[1:]]).encode("latin-1"))
    assert f"{run}/metrics.jsonl: line 2 is damaged" in exit_line(resume=str(run), num_steps=3)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("content", [None, b"", b"rubbish", "half"])
def test_a_damaged_state_is_named(run, name, content):
    path = run / "state" / "00000002" / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content == "half" else content)
    line = exit_line(resume=str(run), num_steps=3)
    assert f"{run}/state/00000002 is damaged" in line and f"{run}/checkpoint" in line


def test_damaged_reference_and_normalization_are_named(tmp_path):
    dpo.main(dpo.Args(run_dir=str(tmp_path / "dpo"), **PAIRS))
    (tmp_path / "dpo" / "reference_train.json").write_text("[[0.1")
    assert "reference_train.json is damaged" in exit_line(dpo, resume=str(tmp_path / "dpo"), num_steps=2)
    sizes = {"num_steps": 1, "prompts_per_step": 2, "minibatch_size": 2, "max_completion_length": 4, "eval_prompts": 2}
    ppo_rlhf.main(ppo_rlhf.Args(run_dir=str(tmp_path / "ppo"), **sizes))
    (tmp_path / "ppo" / "normalization.json").write_text("")
    assert "normalization.json is damaged" in exit_line(ppo_rlhf, resume=str(tmp_path / "ppo"), num_steps=2)


def test_older_states_are_removed_on_resume(run):
    shutil.copytree(run / "state" / "00000002", run / "state" / "00000001")
    (run / "state" / "unfinished").mkdir()
    grpo.main(grpo.Args(resume=str(run)))
    assert [path.name for path in (run / "state").iterdir()] == ["00000002"]


# ---- a parameter that never gets a gradient


def with_unused_parameter(monkeypatch):
    load_model = grpo.load_model

    def load(*args):
        model, stop_ids = load_model(*args)
        model.unused = torch.nn.Parameter(torch.ones(3))
        return model, stop_ids

    monkeypatch.setattr(grpo, "load_model", load)


def test_a_parameter_without_gradient_does_not_prevent_resuming(tmp_path, monkeypatch):
    with_unused_parameter(monkeypatch)
    for name, steps in (("reference", 3), ("run", 2)):
        grpo.main(grpo.Args(run_dir=str(tmp_path / name), **SMALL | {"num_steps": steps, "eval_every": 9}))
    grpo.main(grpo.Args(resume=str(tmp_path / "run"), num_steps=3))
    saved = [torch.load(export(tmp_path / name, tmp_path), weights_only=False) for name in ("reference", "run")]
    assert all(saved[1]["model"][name].equal(value) for name, value in saved[0]["model"].items())


def export(run, folder):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    [state] = (run / "state").iterdir()
    dcp_to_torch_save(state, folder / f"{run.name}.pt")
    return folder / f"{run.name}.pt"


def test_a_state_that_lacks_a_tensor_is_refused(run):
    state = torch.load(export(run, run.parent), weights_only=False)
    name = next(name for name in state["model"] if "q_proj" in name)
    del state["model"][name]
    shutil.rmtree(run / "state" / "00000002")
    torch.distributed.checkpoint.save(state, checkpoint_id=run / "state" / "00000002", no_dist=True)
    line = exit_line(resume=str(run), num_steps=3)
    assert "is damaged" in line and name.removeprefix("model.") in line


# ---- a full disk

FULL_DISK = """
import resource, signal, sys
import grpo
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
save = grpo.save
def limited(*args):
    if args[-1] == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES, BYTES))
    save(*args)
grpo.save = limited
grpo.main(grpo.Args(run_dir=sys.argv[1], **SMALL))
"""


@pytest.mark.parametrize("limit", [200_000, 2_500_000])
def test_a_save_that_finds_no_room_is_one_line_and_leaves_the_last_state(tmp_path, limit):
    """The smaller limit stops the state, the larger one might stop the checkpoint."""
    code = FULL_DISK.replace("SMALL", repr(SMALL)).replace("BYTES", str(limit))
    process = Forked(code, ["grpo.py", tmp_path / "run"])
    output, _ = process.communicate()
    assert process.returncode == 1 and "Traceback" not in output, output
    line = output.strip().splitlines()[-1]
    assert re.search("step 2 could not be saved, [0-9]+ MB were free; mend it, then --resume .*run", line), line
    assert not [path for path in (tmp_path / "run").rglob("*unfinished*")]
    grpo.main(grpo.Args(resume=str(tmp_path / "run")))


# ---- what is printed and logged


def test_without_a_terminal_there_are_lines_and_no_bar(tmp_path, capfd):
    grpo.main(grpo.Args(run_dir=str(tmp_path / "run"), **SMALL))
    out, err = capfd.readouterr()
    assert "it/s]" not in err and "model shards" not in out + err
    assert re.search(r"^step 0: accuracy [0-9.]+, pass@1", out, re.MULTILINE)
    assert all(re.search(rf"^step {step}: reward [0-9.-]+, length [0-9]+$", out, re.MULTILINE) for step in (1, 2))


def test_weights_and_biases_counts_our_steps(run, monkeypatch):
    logged, metrics = [], []
    monkeypatch.setattr(wandb, "init", lambda **_: None)  # it would put its own functions there
    monkeypatch.setattr(wandb, "log", logged.append)
    monkeypatch.setattr(wandb, "define_metric", lambda *args, **kwargs: metrics.append((args, kwargs)))
    grpo.main(grpo.Args(resume=str(run), num_steps=3))
    assert metrics == [(("*",), {"step_metric": "step"})]
    assert [line["step"] for line in logged] == [3]


# ---- what users do to runs


@pytest.mark.parametrize("damaged", [None, {}, {"script": "grpo"}])
def test_a_damaged_description_of_the_run_is_named(run, damaged):
    change(run / "args.json", run=damaged)
    assert f"{run}/args.json is damaged" in exit_line(resume=str(run))


@pytest.mark.parametrize(
    "change_of", [{"temperature": "1"}, {"seed": 1.5}, {"num_steps": "5"}, {"learning_rate": None}]
)
def test_settings_of_another_type_are_one_line(run, change_of):
    change(run / "args.json", **change_of)
    assert re.search("args.json is damaged|must be a number", exit_line(resume=str(run)))


def test_what_a_user_keeps_in_the_folder_stays(run):
    (run / "notes.jsonl").write_text("mine\n")
    (run / "state" / ".DS_Store").write_text("")
    grpo.main(grpo.Args(resume=run, num_steps=4))  # a Path will do
    assert (run / "notes.jsonl").read_text() == "mine\n" and (run / "state" / "00000004").is_dir()


def test_a_finished_run_without_metrics_is_resumed_in_vain(run):
    (run / "metrics.jsonl").unlink()
    grpo.main(grpo.Args(resume=str(run)))


def test_signals_are_handed_back(run):
    grpo.main(grpo.Args(resume=str(run)))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_settings_that_a_user_adds_are_flags(monkeypatch, tmp_path):
    """Without help, with help of two lines, or with a default that is made anew."""
    text = "from dataclasses import dataclass, field\n\n\n@dataclass\nclass Args:\n    # mine\n    plain: int = 3\n"
    text += '    long: str = "a"\n    """two\n    lines"""\n    # more\n    none: str | None = None\n'
    text += "    many: list[int] = field(default_factory=list)\n"
    (tmp_path / "own_args.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(grpo, "Args", importlib.import_module("own_args").Args)
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--plain", "4", "--none", "b", "--many", "1", "2"])
    assert vars(grpo.parse_args()) == {"plain": 4, "long": "a", "none": "b", "many": [1, 2]}
