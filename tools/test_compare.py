"""Tests of tools/compare.py, in a real browser where chromium is installed: python -m pytest tools/test_compare.py"""

import ast
import difflib
import html
import json
import re
import shutil
import subprocess
from argparse import Namespace
from pathlib import Path

import compare
import pytest
from sync_copies import MARKER
from toy import ROOT

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
in_browser = pytest.mark.skipif(BROWSER is None, reason="the page was not opened: no chromium is installed")
HOSTILE = '''"""</script><script>document.title = "taken"</script>"""
import os  # <img src=x onerror="document.title='taken'">


def policy_loss(a):
    return "<b>bold</b>" + a  # <!-- and -->
'''


def write_page(folder, *scripts):
    path = folder / "compare.html"
    compare.main(Namespace(scripts=scripts, out=path, no_open=True))
    return path.read_text()


def open_page(folder, page, place="", code="", width=1300):
    """Return the elements of the page after this code has run in it; what the code prints is in the title."""
    path = folder / "opened.html"
    path.write_text(f"{page}<script>{{{code}}}</script>")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--virtual-time-budget=9000"]
    command = [BROWSER, *flags, f"--user-data-dir={folder / 'profile'}", "--dump-dom", f"{path.as_uri()}#{place}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    title = html.unescape(re.search("<title>(.*?)</title>", done.stdout, re.S)[1])
    return done.stdout, title


def lines_of(script, above):
    """The lines of a script, or those above the line."""
    text = (ROOT / f"{script}.py").read_text()
    return text.partition(MARKER)[0].rstrip().split("\n") if above else text.split("\n")


CHANGED = """
const numbers = (side) => [...document.querySelectorAll(`.changed > .${side}[data-number]`)]
  .map((cell) => +cell.dataset.number);
document.title = JSON.stringify({ left: numbers("left"), right: numbers("right"), count: $("count").textContent });
"""


@in_browser
@pytest.mark.parametrize("pair, all_lines", [("grpo/dapo", False), ("dapo/grpo", False), ("dpo/reward_model", True)])
def test_a_pair_shows_the_lines_that_difflib_finds(pair, all_lines, tmp_path):
    names = pair.split("/")
    page = write_page(tmp_path, *sorted(names), "sft")
    code = ('$("only").checked = false; render();' if all_lines else "") + CHANGED
    _, title = open_page(tmp_path, page, pair, code)
    shown = json.loads(title)
    left, right = (lines_of(name, above=not all_lines) for name in names)
    found = {"left": set(), "right": set()}
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag != "equal":
            found["left"] |= {number + 1 for number in range(i1, i2) if left[number].strip()}
            found["right"] |= {number + 1 for number in range(j1, j2) if right[number].strip()}
    # Functions that moved are beside their counterpart here, but not in difflib, so the page may have less, not more.
    for side, lines in (("left", left), ("right", right)):
        marked = {number for number in shown[side] if lines[number - 1].strip()}
        assert len(marked & found[side]) > 0.9 * len(marked)
        if not all_lines:
            assert marked == found[side]
    assert int(shown["count"].split()[0]) > 10


@in_browser
def test_folds_open_keys_go_to_differences_and_nothing_is_fetched(tmp_path):
    page = write_page(tmp_path, "grpo", "gspo")
    code = """
    const shown = () => [...document.querySelectorAll(".row")].filter((row) => row.checkVisibility()).length;
    const before = shown();
    document.querySelectorAll("summary").forEach((summary) => summary.click());
    const opened = shown(), rows = [...document.querySelectorAll(".row")];
    const here = () => rows.indexOf(document.querySelector(".here"));
    const places = ["n", "n", "p"].map((key) => (document.onkeydown({ key, target: document.body }), here()));
    $("nodocs").click();
    document.title = JSON.stringify({ before, opened, docs: shown(), places,
      fetched: performance.getEntriesByType("resource").length });
    """
    dom, title = open_page(tmp_path, page, "grpo/gspo/policy_loss", code)
    found = json.loads(title)
    assert found["opened"] > found["before"] + 20 and found["docs"] < found["opened"]
    assert found["places"][0] == found["places"][2] < found["places"][1]
    assert found["fetched"] == 0 and not re.search(r'(src|href)="(?!#)', dom)
    assert "default-src 'none'" in page


@in_browser
def test_a_part_below_the_line_is_one_fold_and_a_link_to_it_shows_it(tmp_path):
    page = write_page(tmp_path, "dr_grpo", "gspo")
    code = """
    const summaries = [...document.querySelectorAll("summary")].map((summary) => summary.textContent);
    document.title = JSON.stringify({ only: $("only").checked, last: summaries.at(-1) });
    """
    _, title = open_page(tmp_path, page, "dr_grpo/gspo/save", code)
    assert json.loads(title)["only"] is False
    below = (ROOT / "gspo.py").read_text().partition(MARKER)[2]
    assert below == (ROOT / "dr_grpo.py").read_text().partition(MARKER)[2]
    count = sum(end - first for _, first, end in compare.split_blocks(below)) + 2  # the line itself, an empty one
    assert json.loads(title)["last"] == f"below the line, the same in both: {count} lines"


LOOK = """
const found = {};
const titled = (name) => [...document.querySelectorAll("h2")].find((title) => title.textContent.startsWith(name));
const topOf = (node) => node.getBoundingClientRect().top - document.querySelector("header").offsetHeight;
const press = (key) => { document.onkeydown({ key, target: document.body }); return here; };
"""


def look_at(folder, place, code, first=""):
    """Return what this code finds in the page of two scripts at this place, after other code has run first."""
    later = f"setTimeout(() => {{ {code} document.title = JSON.stringify(found); }}, 500);"
    return json.loads(open_page(folder, write_page(folder, *place.split("/")[:2]), place, LOOK + first + later)[1])


@in_browser
@pytest.mark.parametrize("place, first", [("grpo/dapo/main", ""), ("grpo/dapo", 'titled("main").firstChild.click();')])
def test_a_link_to_main_goes_to_main(place, first, tmp_path):
    found = look_at(tmp_path, place, 'found.top = topOf(titled("main")); found.scrolled = scrollY;', first)
    assert found["scrolled"] > 1000 and 0 < found["top"] < 200


@in_browser
def test_after_a_link_keys_go_to_the_differences_around_its_place(tmp_path):
    code = """
    const section = titled("policy_loss").closest("section");
    found.first = changes.findIndex((row) => section.contains(row));
    found.pressed = ["n", "n", "p", "p"].map(press);
    render();
    found.pressed.push(press("p"));
    """
    found = look_at(tmp_path, "grpo/dapo/policy_loss", code)
    assert found["first"] > 1
    assert [place - found["first"] for place in found["pressed"]] == [0, 1, 0, -1, -1]


@in_browser
def test_a_link_below_the_line_unticks_the_box_only_on_arrival(tmp_path):
    code = """
    const look = () => [$("only").checked, titled("compute_logprobs") !== undefined];
    found.arrived = look();
    $("only").click();
    found.ticked = look();
    onhashchange();
    found.again = look();
    """
    found = look_at(tmp_path, "grpo/reinforce/compute_logprobs", code)
    assert found == {"arrived": [False, True], "ticked": [True, False], "again": [False, True]}


@in_browser
@pytest.mark.parametrize("name", ["reward_fn", "generate"])  # above and below the line
def test_a_link_to_a_function_that_is_the_same_in_both_shows_it(name, tmp_path):
    code = f"""
    const row = [...document.querySelectorAll(".row")].find((row) => row.textContent.startsWith("def {name}("));
    found.top = row.checkVisibility() ? topOf(row) : null;
    found.scrolled = scrollY;
    found.before = changes.filter((change) => topOf(change) < topOf(row)).length;
    found.count = changes.length;
    found.next = press("n");
    """
    found = look_at(tmp_path, f"grpo/dapo/{name}", code)
    assert found["scrolled"] > 0 and found["top"] is not None and 0 < found["top"] < 200
    assert found["next"] == min(found["before"], found["count"] - 1)


@in_browser
def test_text_of_a_script_cannot_run(tmp_path):
    (tmp_path / "my_fork.py").write_text(HOSTILE)
    page = write_page(tmp_path, "grpo", str(tmp_path / "my_fork.py"))
    dom, title = open_page(tmp_path, page)
    assert title == "grpo and my_fork, side by side"
    assert "<b>bold" not in dom and "<img" not in dom and "&lt;img src=x" in dom


@in_browser
@pytest.mark.parametrize("width, shown", [(412, 1), (1300, 2)])
def test_on_a_phone_equal_lines_are_shown_once(width, shown, tmp_path):
    page = write_page(tmp_path, "grpo", "gspo")
    code = """
    const row = document.querySelector(".row:not(.changed)");
    document.title = [...row.children].filter((cell) => cell.checkVisibility()).length;
    """
    assert open_page(tmp_path, page, code=code, width=width)[1] == str(shown)


def test_a_file_with_a_syntax_error_is_shown_as_a_text(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text((ROOT / "grpo.py").read_text().replace("def main(args):", "def main(args:"))
    with pytest.raises(SyntaxError):
        ast.parse(broken.read_text())
    assert '"the file"' in write_page(tmp_path, "grpo", str(broken))


def test_what_differs_is_said_in_the_terms_of_the_tables():
    left, right = compare.read_script("grpo"), compare.read_script("dapo")
    sections = compare.compare(left, right, compare.read_terms())
    [notes] = [section["notes"] for section in sections if section["names"] == ["policy_loss", "policy_loss"]]
    assert "clipping: 0.2 → 0.2 below, 0.28 above" in notes
    assert "weight of a token: 1 / (|oᵢ| × N) → 1 / number of tokens" in notes
    assert not any(note.startswith("ratio") for note in notes)  # it is the same


def test_a_function_that_moved_or_changed_its_name_stands_beside_its_counterpart():
    body = "(values):\n    total = 0\n    for value in values:\n        total += value\n    return total\n\n\n"
    left = {"text": [], "blocks": compare.split_blocks(f"def add{body}def last():\n    pass\n")}
    right = {"text": [], "blocks": compare.split_blocks(f"def last():\n    pass\n\n\ndef add_all{body}")}
    left["text"] = f"def add{body}def last():\n    pass\n".split("\n")
    right["text"] = f"def last():\n    pass\n\n\ndef add_all{body}".split("\n")
    names = [(ours and ours[0], theirs and theirs[0]) for ours, theirs in compare.match_blocks(left, right)]
    assert names == [("add", "add_all"), ("last", "last")]


@pytest.mark.parametrize("name, message", [("nope", "no such file, and no script of this name"), (None, "give two")])
def test_what_cannot_be_compared_is_said(name, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        write_page(tmp_path, *(["grpo", name] if name else ["grpo"]))
    assert not Path(tmp_path, "compare.html").exists()
