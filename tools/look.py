"""Write an HTML page with the settings, curves and completions of a run: python tools/look.py runs/my_run

The page is runs/my_run/look.html. To go to a step, use the slider or click on a curve.
"""

import argparse
import json
from pathlib import Path

from plot import PANELS, choose_metrics, read_rows, read_run

PAGE = r"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline';
  script-src 'unsafe-inline'">
<style>
:root { color-scheme: light dark; --good: light-dark(#0072b2, #56b4e9); --bad: light-dark(#d55e00, #f08c3c);
  --card: light-dark(#fff, #1d1f23); --soft: light-dark(#6b6d73, #9a9ca3); --rule: light-dark(#e3e3df, #303238) }
body { margin: 1.4rem; background: light-dark(#f6f6f4, #141518); font: 15px/1.45 system-ui; overflow-wrap: anywhere }
h1, figure b { font-size: 1.3rem } h1, figure, pre { margin: 0 } i { font-style: normal } #bar * { font: inherit }
small, figcaption, i, #where { color: var(--soft); font-size: .8rem } article div { flex: 1 } #query { flex: 1 1 13rem }
#settings, #bar, article { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem } #settings b { font-size: .8rem }
#curves, #list { display: grid; gap: .6rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, var(--w)), 1fr)) }
#curves { --w: 14.5rem; margin: 1rem 0 } #list { --w: 27rem; --mix: var(--soft) } #bar { gap: .6rem }
figure, article, #bar > * { padding: 9px; border: 1px solid var(--rule); border-radius: .6rem; background: var(--card) }
svg { width: 100%; height: 4.4rem; margin-top: .5rem; overflow: visible; fill: none; stroke: var(--good) }
svg * { stroke-width: 1.7; vector-effect: non-scaling-stroke } line { stroke: var(--soft); stroke-dasharray: 2 3 }
#step { width: 100%; margin: 0 0 1rem; accent-color: var(--good) } article small { float: right; margin-left: .8rem }
:has(:disabled) > :is(#step, #bar) { display: none } article { flex-wrap: nowrap; border-left: 6px solid var(--mix) }
article b { background: var(--mix); color: var(--card); border-radius: .35rem; padding: 0 .45rem; height: 1.5rem }
pre { font: 13px/1.6 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap } .prompt { font-weight: 700 }
</style>
<h1></h1>
<div id="settings"></div>
<div id="curves"></div>
<input id="step" type="range" aria-label="step">
<div id="bar"><select id="mark" aria-label="reward"><option>all<option>right<option>wrong</select>
<input id="query" type="search" placeholder="search all steps"></div>
<p id="where"></p>
<div id="list"></div>
<template id="setting"><span><i></i> <b></b></span></template>
<template id="chart"><figure><figcaption></figcaption><b></b> <small></small>
<svg viewBox="0 0 100 100" preserveAspectRatio="none"><line y2="100"/><polyline/></svg><i></i></figure></template>
<template id="card"><article><b></b><div><small></small><pre class="prompt"></pre><pre></pre></div></article></template>
<script type="application/json" id="run">@RUN@</script>
<script>
const $ = (id) => document.getElementById(id), run = JSON.parse($("run").textContent);
const add = (id, into) => $(into).appendChild($(id).content.firstElementChild.cloneNode(true));
const write = (node, texts) => { for (const name in texts) node.querySelector(name).textContent = texts[name]; };
const show = (x) => (isNaN(x) ? "-" : `${x % 1 ? +x.toPrecision(3) : +x}`);
const range = (values) => values.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [1 / 0, -1 / 0]);
const share = (low, x, high) => (high > low ? (100 * (x - low)) / (high - low) : 50);
const nearest = (rows, to) => rows.reduce((a, b) => (Math.abs(b.step - to) < Math.abs(a.step - to) ? b : a));
const plain = (prompt) => (prompt.map ? prompt.map((turn) => `${turn.role}: ${turn.content}`).join("\n") : `${prompt}`);

document.title = document.querySelector("h1").textContent = run.name;
run.settings.forEach(([name, value]) => write(add("setting", "settings"), { i: name, b: value }));
const [first, last] = range(run.metrics.map((row) => row.step));
Object.assign($("step"), { min: first, max: last, value: last });
const charts = run.panels.map(([key, title]) => {
  const rows = run.metrics.filter((row) => Number.isFinite(row[key])), [low, high] = range(rows.map((row) => row[key]));
  const chart = add("chart", "curves"), [svg, line, curve] = chart.querySelectorAll("svg, svg *");
  const under = (event) => first + ((last - first) * (event.clientX - svg.getBoundingClientRect().x)) / svg.clientWidth;
  write(chart, { figcaption: title, i: `${show(rows[0][key])} at the start, ${show(rows.at(-1)[key])} at the end` });
  curve.setAttribute("points", rows.map((row) => [share(first, row.step, last), 100 - share(low, row[key], high)]));
  chart.onpointermove = (event) => point(under(event));
  chart.onpointerleave = () => point($("step").value);
  chart.onclick = (event) => go(under(event));
  return (to) => {
    const row = nearest(rows, to);
    line.setAttribute("transform", `translate(${share(first, row.step, last)})`);
    write(chart, { b: show(row[key]), small: `step ${row.step}` });
  };
});
const point = (to) => charts.forEach((chart) => chart(to));

const scored = (row, score, parts = Object.entries(score ?? NaN)) => ({ // a number, a dictionary of parts, or missing
  ...row, parts: parts.map(([name, x]) => `${name} ${show(x)}`),
  value: parts.length ? parts.reduce((sum, [, x]) => sum + +x, 0) : +score });
const sampled = run.samples.flatMap((row) => row.completions.map((completion, i) => (
  scored({ ...row, completion }, row.rewards?.[i]))));
const [worst, best] = range(sampled.map((row) => row.value).filter(isFinite).concat(0, 1));
const goodness = (row) => share(worst, row.value, best);
const verdict = (row) => (isNaN(row.value) ? "" : goodness(row) < 50 ? "wrong" : "right");

function render() {
  point($("step").value);
  if (!sampled.length) return;
  const { step } = nearest(sampled, $("step").value);
  const mark = $("mark").value, word = $("query").value.toLowerCase();
  const pool = sampled.filter((row) => word || row.step === step);
  const found = pool.filter((row) => ["all", verdict(row)].includes(mark) &&
    `${plain(row.prompt)}\n${row.completion}`.toLowerCase().includes(word));
  const where = word ? "all steps" : `step ${step}`, cut = found.length > 200 ? ", the first 200 shown" : "";
  $("where").textContent = `${where}: ${found.length} of ${pool.length} completions${cut}`;
  $("list").replaceChildren();
  found.slice(0, 200).forEach((row, i) => {
    const card = add("card", "list"), prompt = row.prompt === found[i - 1]?.prompt ? "" : plain(row.prompt);
    const note = [...row.parts, word && `step ${row.step}`, row.answer && `answer ${row.answer}`].filter(Boolean);
    card.style.setProperty("--mix", verdict(row) && `color-mix(in oklab, var(--good) ${goodness(row)}%, var(--bad))`);
    write(card, { b: show(row.value), small: note.join(", "), ".prompt": prompt, ".prompt + pre": row.completion });
  });
}
const go = (step) => { $("step").value = step; $("query").value = ""; render(); };
document.oninput = (event) => (event.target.id === "step" ? go(event.target.value) : render());
$("mark").disabled = !sampled.length;
render();
</script>
"""


def gather(folder):
    """Return the data of a run that the page shows."""
    run = read_run(folder)
    if run is None:
        raise SystemExit(f"{folder} has no metrics")
    shown = {"script": run.script} | run.settings
    settings = [(name, str(value)) for name, value in shown.items() if str(value) not in ("None", "False", "")]
    panels = [(key, PANELS.get(key, key)) for key in choose_metrics([run])]
    rows = {name: read_rows(run.folder / f"{name}.jsonl") for name in ("metrics", "samples")}
    return {"name": run.name, "settings": settings, "panels": panels} | rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    folder = parser.parse_args().run
    # Without "<", no text of a run can end the script element that contains it.
    page = PAGE.replace("@RUN@", json.dumps(gather(folder)).replace("<", "\\u003c"))
    Path(folder, "look.html").write_text(page)
    print(f"written: {folder}/look.html")


if __name__ == "__main__":
    main()
