"""Carry what scripts share from one of them into the others, and print what changed.

    python tests/sync_copies.py grpo.py

The table in test_copies.py says what is shared. Among the online scripts everything below the line is one block
and goes over whole; elsewhere functions go one by one, each to where its copy stands. Commit before: it writes files.
"""

import sys
from pathlib import Path

from test_copies import ALL, BLOCK, MARKER, ROOT, SHARED, definitions


def carry(source, target, folder=ROOT):
    """Write source's shared functions into target, both names without .py; return the names of those that changed."""
    path = folder / f"{target}.py"
    text, ours, theirs = path.read_text(encoding="utf-8"), definitions(source, folder), definitions(target, folder)
    names = [name for name, scripts in SHARED if source in scripts and target in scripts]
    whole = source in BLOCK and target in BLOCK
    if missing := [name for name in names if name not in theirs and not whole]:
        print(f"{target}.py lacks {', '.join(missing)}: add it where main first needs it", file=sys.stderr)
    changed = [name for name in names if name in theirs and ours[name] != theirs[name]]
    for name in changed:
        text = text.replace(theirs[name], ours[name])
    if whole:
        block = (folder / f"{source}.py").read_text(encoding="utf-8").partition(MARKER)[2]
        if text.partition(MARKER)[2] != block:
            text = text.partition(MARKER)[0] + MARKER + block
            changed = [*changed, "the block below the line"]
    if changed:
        path.write_text(text, encoding="utf-8")
    return changed


if __name__ == "__main__":
    if len(sys.argv) != 2 or Path(sys.argv[1]).stem not in ALL:
        raise SystemExit("usage: python tests/sync_copies.py SCRIPT.py, the script whose text the others shall have")
    source = Path(sys.argv[1]).stem
    for target in sorted({*ALL} - {source}):
        print(f"{target}.py: {', '.join(carry(source, target)) or 'nothing to change'}")
