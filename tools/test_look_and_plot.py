"""Tests of tools/plot.py and tools/look.py: numbers, labels and pages, for real runs and for made-up ones."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

os.environ["MPLBACKEND"] = "Agg"  # no window

import look
import plot
import pytest
from toy import ROOT, parse, read_jsonl, write_jsonl

import dpo
import gkd
import grpo

TOOLS = ROOT / "tools"
HOSTILE = '</script><img src=x onerror=alert(1)><!--<script>alert(2)</script> & &lt; \u2028 \ud800 @RUN@ "q" \\u003c'


def write_run(folder, rows, **settings):
    """Make the folder of a run with these metrics, as the scripts do."""
    folder.mkdir(parents=True)
    args = {"model": "models/tiny", "learning_rate": 0.1, "seed": 1, "run_dir": str(folder)} | settings
    (folder / "args.json").write_text(json.dumps(args))
    write_jsonl(folder / "metrics.jsonl", rows)
    return folder


def accuracies(*values):
    return [{"step": 4 * place, "eval/accuracy": value} for place, value in enumerate(values)]


def labels(*folders):
    return {label: [run.name for run in group] for label, group in groups(*folders).items()}


def groups(*folders):
    return plot.group_runs([plot.read_run(folder) for folder in folders])


def draw_lines(*folders, key="eval/accuracy"):
    """Return the lines [(steps, values)] and the first band {step: (lowest, highest)} of the figure's first panel."""
    axis = plot.draw(groups(*folders), [key]).axes[0]
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines]
    band = {}
    for step, value in axis.collections[0].get_paths()[0].vertices if axis.collections[0].get_paths() else ():
        band.setdefault(step, []).append(value)
    plot.plt.close("all")
    return lines, {step: (min(values), max(values)) for step, values in band.items()}


def run_plot(capsys, *folders, **options):
    plot.main(SimpleNamespace(**{"runs": list(map(str, folders)), "out": None, "metrics": None} | options))
    return capsys.readouterr().out


def table_cells(text):
    """Return {(run, metric): the other cells} of a printed table."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {tuple(row[:2]): row[2:] for row in rows[2:]}


def test_seeds_become_a_mean_and_a_band(tmp_path, capsys):
    runs = [
        write_run(tmp_path / f"grpo__{seed}", accuracies(*values), seed=seed)
        for seed, values in enumerate([(0.25, 0.5, 1.0), (0.25, 0.25, 0.5), (0.25, 0.75, 0.75)])
    ]
    lines, band = draw_lines(*runs)
    assert lines[0] == ([0, 4, 8], [0.25, 0.5, 0.75])
    assert band == {0: (0.25, 0.25), 4: (0.25, 0.75), 8: (0.5, 1.0)}
    printed = run_plot(capsys, *runs, out=str(tmp_path / "three.png"))
    assert table_cells(printed) == {("grpo", "eval/accuracy"): ["3", "8", "0.75", "0.5", "1"]}
    assert f"written: {tmp_path / 'three.png'}" in printed
    assert (tmp_path / "three.png").read_bytes().startswith(b"\x89PNG")


def test_where_not_all_runs_have_a_step_lines_are_thin(tmp_path, capsys):
    long = write_run(tmp_path / "grpo__long", accuracies(0.0, 0.5, 0.75, 1.0))
    short = write_run(tmp_path / "grpo__short", accuracies(0.5, 1.0), seed=2)
    with (short / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "eval/accu')  # an active run may have an incomplete line
    without = write_run(tmp_path / "grpo__without", [{"step": 1, "reward/mean": 1.0}], seed=3)
    lines, _ = draw_lines(long, short, without)
    assert lines[0] == ([0, 4], [0.25, 0.75])
    assert ([4, 8, 12], [0.5, 0.75, 1.0]) in lines[1:]
    cells = table_cells(run_plot(capsys, long, short, without, f"{short}/.", out=str(tmp_path / "x.png")))
    assert cells["grpo", "eval/accuracy"] == ["2", "4", "0.75", "0.5", "1"]  # a run given twice counts once
    assert cells["grpo", "reward/mean"] == ["1", "1", "1", "1", "1"]
    other = [{"step": 1, "eval/accuracy": 0.25}, {"step": 2, "eval/accuracy": 1.0}]
    lines, _ = draw_lines(write_run(tmp_path / "x__a", accuracies(0.5)), write_run(tmp_path / "x__b", other, seed=2))
    assert lines[0] == ([], []) and ([1, 2], [0.25, 1.0]) in lines


def test_a_single_run_has_its_name_and_several_seeds_their_script(tmp_path):
    rows = accuracies(0.5)
    a = write_run(tmp_path / "grpo__a", rows)
    b = write_run(tmp_path / "grpo__b", rows, seed=2, resume="x", eval_every=3)
    c = write_run(tmp_path / "grpo__c", rows, learning_rate=0.2, system_prompt="so long " * 20)
    d = write_run(tmp_path / "grpo__d", rows, learning_rate=0.2, system_prompt="so long " * 20, seed=2)
    e = write_run(tmp_path / "mine", rows, learning_rate=0.3)
    f = write_run(tmp_path / "other" / "mine", rows)
    assert labels(a, b) == {"grpo": ["grpo__a", "grpo__b"]}
    assert labels(a, c) == {"grpo__a": ["grpo__a"], "grpo__c": ["grpo__c"]}
    assert labels(a, b, c, d) == {"grpo": ["grpo__a", "grpo__b"], "grpo (grpo__c, ...)": ["grpo__c", "grpo__d"]}
    assert labels(e, f) == {"mine": ["mine"], str(f): ["mine"]}


def test_settings_that_differ_stand_below_the_table(tmp_path, capsys):
    a = write_run(tmp_path / "a", accuracies(0.5), beta=0.1)
    b = write_run(tmp_path / "b", accuracies(0.5), learning_rate=0.2, seed=2)
    printed = run_plot(capsys, a, b, out=str(tmp_path / "x.png"))
    assert "\na: learning_rate 0.1\nb: learning_rate 0.2\nwritten: " in printed


def test_the_legend_fits_into_the_picture(tmp_path):
    runs = [write_run(tmp_path / f"{name}_run_with_quite_a_long_name", accuracies(0.5)) for name in "ab"]
    figure = plot.draw(groups(*runs), ["eval/accuracy"])
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    plot.plt.close(figure)
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width


def test_metrics_can_be_chosen_and_what_is_no_number_is_left_out(tmp_path, capsys):
    rows = [{"step": 1, "own/key": 1.5}, {"step": 2, "own/key": float("nan")}, {"step": 3, "own/key": "torch.inf"}]
    run = write_run(tmp_path / "a", rows)
    assert table_cells(run_plot(capsys, run, metrics=["own/key"])) == {("a", "own/key"): ["1", "1", *["1.5"] * 3]}
    assert (run / "plot.png").exists()


def test_runs_without_metrics_are_left_out(tmp_path, capsys):
    good, new = write_run(tmp_path / "good", accuracies(0.5)), write_run(tmp_path / "new", [])
    (crashed := write_run(tmp_path / "crashed", []) / "metrics.jsonl").unlink()
    printed = run_plot(capsys, new, good, crashed.parent, out=str(tmp_path / "x.png"))
    assert printed.startswith(f"left out: {new}: no metrics yet\nleft out: {crashed.parent}: no metrics yet\n")
    assert [*table_cells(printed)] == [("good", "eval/accuracy")] and (tmp_path / "x.png").exists()
    with pytest.raises(SystemExit, match="^[^;]*new: no metrics yet; [^;]*crashed: no metrics yet$"):
        run_plot(capsys, new, crashed.parent)


BAD = {
    "nothing": "no such folder",
    "folder": "not a run, it has no args.json",
    "new": "no metrics yet",
    "newer": "no metrics yet",
    "broken": "line 2 is not a JSON object with a step",
    "list": "not a JSON object of settings",
}


def test_bad_input_is_one_line(tmp_path):
    (tmp_path / "folder").mkdir()
    write_run(tmp_path / "new", [])
    (write_run(tmp_path / "newer", []) / "metrics.jsonl").unlink()
    (write_run(tmp_path / "broken", []) / "metrics.jsonl").write_text('{"step": 1, "a": 1}\n{"step": 2\n{"step": 3}\n')
    (write_run(tmp_path / "list", accuracies(0.5)) / "args.json").write_text("[]")
    for name, message in BAD.items():
        for call in (look.gather, plot.read_run):
            with pytest.raises(SystemExit, match=message) as caught:
                call(str(tmp_path / name))
            assert "\n" not in str(caught.value) and str(tmp_path / name) in str(caught.value)
    run, nowhere = str(write_run(tmp_path / "good", accuracies(0.5))), str(tmp_path / "no" / "x.png")
    for tool, options, message in (
        (plot, {"metrics": ["a/b"]}, "no run has a/b; choose --metrics from eval/accuracy"),
        (plot, {"out": nowhere}, "No such file"),
        (plot, {"out": str(tmp_path / "x.xyz")}, "not supported"),
        (look, {"out": nowhere}, "No such file"),
    ):
        with pytest.raises(SystemExit, match=message):
            tool.main(SimpleNamespace(**{"run": run, "runs": [run], "out": None, "metrics": None} | options))


@pytest.mark.parametrize("tool, file", [("plot", "plot.png"), ("look", "look.html")])
def test_command_lines(tool, file, tmp_path):
    run = write_run(tmp_path / "a", accuracies(0.5))
    done = subprocess.run([sys.executable, TOOLS / f"{tool}.py", run], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith(f"written: {run / file}\n") and not done.stderr


def read_page(folder):
    """Return the data in a run's page, and check that it contains no < and that the rest is the same on every page."""
    out = folder / "page.html"
    look.main(SimpleNamespace(run=str(folder), out=str(out)))
    head, _, foot = look.PAGE.partition("@RUN@")
    data = out.read_text().removeprefix(head).removesuffix(foot)
    assert out.read_text() == head + data + foot and "<" not in data
    assert head.endswith('<script type="application/json" id="run">') and foot.startswith("</script>")
    return json.loads(data)


def test_the_page_itself_loads_nothing_and_inserts_no_html():
    words = "innerHTML outerHTML insertAdjacentHTML document.write eval( fetch( url( import( src= href= action="
    assert [word for word in words.split() if word in look.PAGE] == []
    assert "default-src 'none'" in look.PAGE and look.PAGE.count("http") == look.PAGE.count("http-equiv") == 1
    assert len((TOOLS / "look.py").read_text().splitlines()) <= 155


def tiny_run(script, folder, data, **settings):
    """Train the bundled model for two steps on a few rows of its data."""
    rows = (TOOLS.parent / "data" / data / "train.jsonl").read_text().splitlines(keepends=True)[:20]
    folder.with_suffix(".jsonl").write_text("".join(rows))
    settings |= {"dataset": str(folder.with_suffix(".jsonl"))}
    settings |= {"num_steps": 2, "eval_prompts": 4, "eval_every": 1, "run_dir": str(folder)}
    script.main(parse(script, **settings))
    return folder


def test_pages_of_real_runs(tmp_path):
    grpo_run = tiny_run(grpo, tmp_path / "grpo", "addition", prompts_per_step=2, group_size=2, minibatch_size=4)
    data = read_page(grpo_run)
    for name in ("metrics", "samples"):
        assert data[name] == read_jsonl(grpo_run / f"{name}.jsonl") and data[name]
    assert len(data["samples"][0]["completions"]) == 2
    shown = [key for key, _ in data["panels"]]
    assert shown[:4] == ["eval/accuracy", "reward/mean", "rollout/length_mean", "policy/entropy"]
    assert {"policy/ref_kl", "policy/clip_fraction_low", "optim/grad_norm"} <= set(shown)
    settings = dict(data["settings"])
    assert settings["script"] == "grpo" and settings["group_size"] == "2" and settings["model"] == "models/tiny"
    assert not {"run_dir", "resume", "track"} & set(settings)

    dpo_run = tiny_run(dpo, tmp_path / "dpo", "preferences", minibatch_size=4)
    data = read_page(dpo_run)
    assert data["samples"] == [] and data["panels"][0][0] == "eval/pair_accuracy"

    both = ["eval/accuracy", "eval/pair_accuracy", "optim/grad_norm"]
    assert plot.choose_metrics(groups(grpo_run, dpo_run)) == both
    sft_run = write_run(tmp_path / "sft", [{"step": 1, "eval/loss": 1.0, "loss/nll": 1.0}])
    assert plot.choose_metrics(groups(grpo_run, sft_run)) == ["eval/accuracy", "eval/loss"]  # the main ones of each


def rewards_in_parts(*names):
    return {name: place / 4 for place, name in enumerate(names)}


def test_parts_of_a_reward_are_shown_behind_it_if_there_is_room(tmp_path, capsys):
    usual = ["eval/accuracy", "reward/mean", *[key for key in plot.PANELS if key.startswith(("rollout/", "policy/"))]]
    rest = rewards_in_parts("reward/zero_std", "eval/reward")
    parts = ["reward/format", "reward/right", "eval/reward/format", "eval/reward/right"]
    run = write_run(tmp_path / "a", [{"step": 1} | rewards_in_parts(*usual, *parts[::-1]) | rest])
    shown = [*usual[:2], *parts, *usual[2:]]
    assert plot.choose_metrics(groups(run)) == shown
    titles = dict(read_page(run)["panels"])
    assert [*titles] == shown and titles["reward/mean"] == "reward" and titles["reward/right"] == "reward/right"
    cells = table_cells(run_plot(capsys, run, metrics=parts))
    assert float(cells["a", "reward/right"][-1]) == (len(usual) + 2) / 4  # it is the third of the parts as written
    many = [f"reward/{place:02}" for place in range(20)]
    run = write_run(tmp_path / "b", [{"step": 1} | rewards_in_parts(*usual, *many, "eval/reward/00")])
    shown = [*usual[:2], *many[: 16 - len(usual)], *usual[2:]]
    assert plot.choose_metrics(groups(run)) == shown and len(shown) == 16
    run_plot(capsys, run)
    # of several lines, those that two have
    run = write_run(tmp_path / "c", [{"step": 1} | rewards_in_parts("eval/accuracy", "reward/mean", "reward/right")])
    assert plot.choose_metrics(groups(tmp_path / "a", run)) == ["eval/accuracy", "reward/mean", "reward/right"]


@pytest.mark.skipif(shutil.which("node") is None, reason="it runs the page's functions with node")
def test_the_page_shows_sums_with_their_parts_and_completions_without_rewards():
    samples = [
        {"step": 1, "prompt": "a", "completions": ["x", "y"], "rewards": [{"right": True, "form": 0.25}, {"right": 0}]},
        {"step": 1, "prompt": "b", "completions": ["x", "y"], "rewards": [0.123456, True]},
        {"step": 1, "prompt": "c", "completions": ["x"], "rewards": [-2.0]},
        {"step": 1, "prompt": "d", "completions": ["x"]},
    ]
    script = look.PAGE[look.PAGE.index("const range =") :]
    helpers = script[: script.index("document.title")]
    show = next(line for line in look.PAGE.splitlines() if line.startswith("const show ="))
    code = script[script.index("const scored =") : script.index("function render")]
    run = json.dumps({"samples": samples})
    found = "sampled.map((row) => [row.parts.join(), show(row.value), verdict(row)])"
    program = f"const run = {run};\n{show}\n{helpers}{code}console.log(JSON.stringify({found}))"
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [
        ["right 1,form 0.25", "1.25", "right"],
        ["right 0", "0", "right"],  # nearer to the best value, 1.25, than to the worst, -2
        ["", "0.123", "right"],
        ["", "1", "right"],
        ["", "-2", "wrong"],
        ["", "-", ""],
    ]


def test_a_run_with_a_reward_in_parts_and_one_of_a_script_whose_samples_have_no_rewards(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "reward_fn", lambda text, _answer: {"long": len(text) / 64, "even": len(text) % 2 == 0})
    settings = {"prompts_per_step": 2, "group_size": 2, "minibatch_size": 4}
    data = read_page(tiny_run(grpo, tmp_path / "grpo", "addition", **settings))
    assert [{*parts} for row in data["samples"] for parts in row["rewards"]] == [{"long", "even"}] * 4
    assert {"reward/long", "reward/even", "eval/reward/long", "eval/reward/even"} < {key for key, _ in data["panels"]}
    data = read_page(tiny_run(gkd, tmp_path / "gkd", "addition", prompts_per_step=2))
    assert len(data["samples"]) == 4 and not any("rewards" in row for row in data["samples"])


def test_a_hostile_run_cannot_leave_its_element(tmp_path):
    rows = [{"step": 1, "reward/mean": 0.5, "policy/entropy": float("nan")}, {"step": 2, "reward/mean": 0.5}]
    run = write_run(tmp_path / "a", rows, system_prompt=HOSTILE)
    samples = [{"step": 1, "prompt": [{"role": "user", "content": HOSTILE}], "answer": HOSTILE}]
    samples[0] |= {"completions": [HOSTILE], "rewards": [1]}
    write_jsonl(run / "samples.jsonl", samples)
    with (run / "samples.jsonl").open("a") as file:
        file.write('{"step": 2, "pro')
    data = read_page(run)
    assert data["samples"] == samples
    assert dict(data["settings"])["system_prompt"] == HOSTILE
    assert data["metrics"][0]["policy/entropy"] is None  # JSON has no nan
