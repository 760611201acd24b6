"""Tests of tools/compare.py, in a real browser where chromium is installed: python -m pytest tools/test_compare.py"""

import difflib
import html
import json
import re
import shutil
import subprocess
import sys

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


def write_page(folder, left, right):
    sys.argv = ["compare.py", str(left), str(right), "--no-open", "--out", str(folder / "compare.html")]
    compare.main()
    return (folder / "compare.html").read_text()


def open_page(folder, page, place="", code=""):
    """Return the elements of the page after this code has run in it, and what the code found."""
    path = folder / "opened.html"
    later = f"setTimeout(() => {{ const found = {{}}; {code} document.title += JSON.stringify(found); }}, 500);"
    path.write_text(f"{page}<script>{later}</script>")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,900", "--virtual-time-budget=9000"]
    command = [BROWSER, *flags, f"--user-data-dir={folder / 'profile'}", "--dump-dom", f"{path.as_uri()}#{place}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    title = html.unescape(re.search("<title>(.*?)</title>", done.stdout, re.S)[1])
    return done.stdout, json.loads(title[title.index("{") :])


@in_browser
def test_a_pair_shows_the_lines_that_difflib_finds(tmp_path):
    code = """
    for (const side of ["left", "right"]) found[side] = [...document.querySelectorAll(`.changed > .${side}`)]
      .map((cell) => +cell.dataset.number).filter((number) => number);
    found.count = $("count").textContent;
    """
    _, shown = open_page(tmp_path, write_page(tmp_path, "grpo", "dapo"), "", code)
    texts = [(ROOT / name).read_text().partition(MARKER)[0] for name in ("grpo.py", "dapo.py")]
    left, right = [text.rstrip().split("\n") for text in texts]
    found = {"left": set(), "right": set()}
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag != "equal":
            found["left"] |= {number + 1 for number in range(i1, i2) if left[number].strip()}
            found["right"] |= {number + 1 for number in range(j1, j2) if right[number].strip()}
    for side, lines in (("left", left), ("right", right)):
        assert {number for number in shown[side] if lines[number - 1].strip()} == found[side]
    assert int(shown["count"].split()[0]) > 10


@in_browser
def test_a_link_goes_to_its_function_keys_to_differences_and_nothing_is_fetched(tmp_path):
    code = """
    const visible = () => [...document.querySelectorAll(".row")].filter((row) => row.checkVisibility()).length;
    const section = document.querySelector("h2 a[href='#policy_loss']").closest("section");
    found.top = section.getBoundingClientRect().top - document.querySelector("header").offsetHeight;
    found.first = changes.findIndex((row) => section.contains(row));
    found.pressed = ["n", "n", "p", "p"].map((key) => (document.onkeydown({ key, target: document.body }), here));
    found.folded = visible();
    document.querySelectorAll("summary").forEach((summary) => summary.click());
    found.opened = visible();
    $("nodocs").click();
    found.docs = visible();
    found.fetched = performance.getEntriesByType("resource").length;
    """
    page = write_page(tmp_path, "grpo", "dapo")
    _, found = open_page(tmp_path, page, "policy_loss", code)
    assert 0 < found["top"] < 200 and found["first"] > 1
    assert [place - found["first"] for place in found["pressed"]] == [0, 1, 0, -1]
    assert found["folded"] + 20 < found["opened"] > found["docs"] and found["fetched"] == 0
    assert not re.search(r'(src|href)="(?!#)', page) and "default-src 'none'" in page
    code = """
    const row = [...document.querySelectorAll(".row")].find((row) => row.textContent.startsWith("def generate("));
    found.shown = row.checkVisibility() && !$("only").checked;
    """  # below the line, the function that is the same in both
    assert open_page(tmp_path, page, "generate", code)[1] == {"shown": True}


@in_browser
def test_text_of_a_script_cannot_run(tmp_path):
    (tmp_path / "my_fork.py").write_text(HOSTILE)
    page = write_page(tmp_path, "grpo", tmp_path / "my_fork.py")
    dom, found = open_page(tmp_path, page, "", "found.title = document.title;")
    assert found == {"title": "grpo and my_fork, side by side"}
    assert "<b>bold" not in dom and "<img" not in dom and "&lt;img src=x" in dom


def test_functions_of_one_name_stand_side_by_side_and_others_alone():
    texts = ['"""Title"""\nimport os\n\n\ndef add(a):\n    pass\n\n\ndef last():\n    pass\n']
    texts += ["import os\n\n\ndef last():\n    pass\n\n\nX = 1\n\n\ndef add(b):\n    pass\n"]
    left, right = [{"blocks": compare.split_blocks(text)} for text in texts]
    assert left["blocks"] == [("lines at the top", 0, 2), ("add", 4, 6), ("last", 8, 10)]
    names = [(ours and ours[0], theirs and theirs[0]) for ours, theirs in compare.match_blocks(left, right)]
    top = ("lines at the top", "lines at the top")
    assert names == [top, ("add", "add"), ("last", "last"), (None, "lines after last")]


def test_changed_parts_of_a_line_are_marked():
    texts = ["x = loss + old", "x = loss - new"]
    left, right = [{"text": [text], "lines": compare.read_tokens(text)} for text in texts]
    [row] = compare.align(left, right, [("", 0, 1), ("", 0, 1)])
    assert [[text for _, text, marked in tokens if marked] for tokens in row[3:]] == [["+", "old"], ["-", "new"]]
