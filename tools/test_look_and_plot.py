"""Tests of tools/plot.py and tools/look.py: numbers, labels and pages, for real runs and for made-up ones."""

import json
import shutil
import subprocess
import sys

import look
import plot
import pytest
from toy import ROOT, read_jsonl, train, write_jsonl

import dpo
import grpo

PAGE = (ROOT / "tools" / "look.html").read_text()
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


def groups(*folders):
    return plot.group_runs([plot.read_run(folder) for folder in folders])


def run_plot(capsys, *arguments):
    sys.argv = ["plot.py", *map(str, arguments)]
    plot.main(plot.parse_args())
    return capsys.readouterr().out


def table_cells(text):
    """Return {(run, metric): the other cells} of a printed table."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {tuple(row[:2]): row[2:] for row in rows[2:]}


def test_seeds_become_a_mean_and_a_band(tmp_path, capsys):
    values = [(0.25, 0.5, 1.0), (0.25, 0.25, 0.5), (0.25, 0.75)]  # the last run has crashed
    runs = [write_run(tmp_path / f"grpo__{seed}", accuracies(*values[seed]), seed=seed) for seed in range(3)]
    with (runs[2] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "eval/accu')  # an active run may have an incomplete line
    axis = plot.draw(groups(*runs), ["eval/accuracy"]).axes[0]
    [line], band = axis.lines, {}
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 4, 8], [0.25, 0.5, 0.75])
    for step, value in axis.collections[0].get_paths()[0].vertices:
        band.setdefault(step, set()).add(value)
    assert band == {0: {0.25}, 4: {0.25, 0.75}, 8: {0.5, 1.0}}
    printed = run_plot(capsys, *runs, "--out", tmp_path / "three.png", "--title", "Three")
    assert table_cells(printed) == {(f"{runs[0]} and 2 more", "eval/accuracy"): ["2", "8", "0.75", "0.5", "1"]}
    assert printed.endswith(f"written: {tmp_path / 'three.png'}\n")
    assert (tmp_path / "three.png").read_bytes().startswith(b"\x89PNG")


def test_only_runs_of_one_script_that_differ_in_the_seed_are_one_line(tmp_path):
    rows = accuracies(0.5)
    a = write_run(tmp_path / "grpo__a", rows)
    b = write_run(tmp_path / "grpo__b", rows, seed=2, resume="x")
    c = write_run(tmp_path / "grpo__c", rows, learning_rate=0.2)
    d = write_run(tmp_path / "gspo__d", rows)
    found = {label: [run.name for run in group] for label, group in groups(a, b, c, d).items()}
    assert found == {f"{a} and 1 more": ["grpo__a", "grpo__b"], str(c): ["grpo__c"], str(d): ["gspo__d"]}


def test_what_has_no_metrics_is_left_out(tmp_path, capsys):
    good, empty = write_run(tmp_path / "good", accuracies(0.5)), write_run(tmp_path / "empty", [])
    (crashed := write_run(tmp_path / "crashed", []) / "metrics.jsonl").unlink()
    (nothing := tmp_path / "nothing").mkdir()
    file = write_jsonl(tmp_path / "samples.jsonl", [{"prompt": "1+1="}])
    left_out = [empty, crashed.parent, nothing, file]
    printed = run_plot(capsys, good, *left_out)
    assert printed.startswith("".join(f"left out: {path} has no metrics\n" for path in left_out))
    assert [*table_cells(printed)] == [(str(good), "eval/accuracy")] and (good / "plot.png").exists()
    with pytest.raises(SystemExit, match="nothing to plot"):
        run_plot(capsys, *left_out)


def read_page(folder):
    """Return the data in a run's page, and check that it contains no < and that the rest is the same on every page."""
    sys.argv = ["look.py", str(folder)]
    look.main()
    text, (head, _, foot) = (folder / "look.html").read_text(), PAGE.partition("@RUN@")
    data = text.removeprefix(head).removesuffix(foot)
    assert text == head + data + foot and "<" not in data
    assert head.endswith('<script type="application/json" id="run">') and foot.startswith("</script>")
    return json.loads(data)


def test_pages_and_metrics_of_real_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "reward_fn", lambda text, _: {"long": len(text) / 64, "even": len(text) % 2 == 0})
    train(grpo, tmp_path / "a", num_steps=2)
    data = read_page(tmp_path / "a" / "run")
    for name in ("metrics", "samples"):
        assert data[name] == read_jsonl(tmp_path / "a" / "run" / f"{name}.jsonl") and data[name]
    assert [{*parts} for row in data["samples"] for parts in row["rewards"]] == [{"long", "even"}] * 8
    shown = data["panels"]
    assert {"eval/accuracy", "reward/long", "eval/reward/even", "policy/ref_kl", "optim/grad_norm"} < {*shown}
    assert dict(data["settings"])["group_size"] == "4"
    train(dpo, tmp_path / "b", num_steps=2)
    data = read_page(tmp_path / "b" / "run")
    assert data["samples"] == [] and data["panels"][0] == "eval/pair_accuracy"
    assert dict(data["settings"])["script"] == "dpo"  # though the folder's name is run
    both = plot.choose_metrics([plot.read_run(tmp_path / name / "run") for name in "ab"])
    assert {*shown, *data["panels"]} == {*both}


def test_a_hostile_run_cannot_leave_its_element(tmp_path):
    rows = [{"step": 1, "reward/mean": 0.5, "policy/entropy": float("nan")}, {"step": 2, "reward/mean": 0.5}]
    run = write_run(tmp_path / "a", rows, system_prompt=HOSTILE)
    samples = [{"step": 1, "prompt": [{"role": "user", "content": HOSTILE}], "answer": HOSTILE}]
    samples[0] |= {"completions": [HOSTILE], "rewards": [1]}
    write_jsonl(run / "samples.jsonl", samples)
    data = read_page(run)
    assert data["samples"] == samples and dict(data["settings"])["system_prompt"] == HOSTILE
    assert data["metrics"][0]["policy/entropy"] is None  # JSON has no nan
    words = "innerHTML outerHTML insertAdjacentHTML document.write eval( fetch( url( import( src= href= action="
    assert [word for word in words.split() if word in PAGE] == [] and "default-src 'none'" in PAGE


@pytest.mark.skipif(shutil.which("node") is None, reason="it runs the page's functions with node")
def test_the_page_shows_sums_with_their_parts_and_completions_without_rewards():
    samples = [
        {"step": 1, "prompt": "a", "completions": ["x", "y"], "rewards": [{"right": True, "form": 0.25}, {"right": 0}]},
        {"step": 1, "prompt": "b", "completions": ["x"], "rewards": [-2.0]},
        {"step": 1, "prompt": "c", "completions": ["x"]},
    ]
    helpers = PAGE[PAGE.index("const show =") : PAGE.index("document.title")]
    code = PAGE[PAGE.index("const scored =") : PAGE.index("function render")]
    found = "sampled.map((row) => [row.parts.join(), show(row.value), verdict(row)])"
    program = f"const run = {json.dumps({'samples': samples})};\n{helpers}{code}console.log(JSON.stringify({found}))"
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [
        ["right 1,form 0.25", "1.25", "right"],
        ["right 0", "0", "right"],  # nearer to the best value, 1.25, than to the worst, -2
        ["", "-2", "wrong"],
        ["", "-", ""],
    ]
