"""Write an HTML page with the settings, curves and completions of a run: python tools/look.py runs/my_run

The page is runs/my_run/look.html. To go to a step, use the slider or click on a curve.
"""

import argparse
import json
from pathlib import Path

from plot import choose_metrics, read_rows, read_run


def gather(folder):
    """Return the data of a run that the page shows."""
    run = read_run(folder)
    if run is None:
        raise SystemExit(f"{folder} has no metrics")
    copies = [path.stem for path in run.folder.glob("*.py")]  # a run keeps a copy of its script
    shown = {"script": (copies or [run.script])[0]} | run.settings
    settings = [(name, str(value)) for name, value in shown.items() if str(value) not in ("None", "False", "")]
    rows = {name: read_rows(run.folder / f"{name}.jsonl") for name in ("metrics", "samples")}
    return {"name": run.name, "settings": settings, "panels": choose_metrics([run])} | rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    folder = parser.parse_args().run
    # Without "<", no text of a run can end the script element that contains it.
    data = json.dumps(gather(folder)).replace("<", "\\u003c")
    page = Path(__file__).with_name("look.html").read_text(encoding="utf-8")
    Path(folder, "look.html").write_text(page.replace("@RUN@", data), encoding="utf-8")
    print(f"written: {folder}/look.html")


if __name__ == "__main__":
    main()
