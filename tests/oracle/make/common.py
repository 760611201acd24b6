"""What the programs share: they read a file's inputs, make its outputs again, and write or compare them."""

import argparse
import ast
import copy
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import platform
import sys
from pathlib import Path

import numpy
import torch

ORACLE = Path(__file__).resolve().parent.parent
LARGEST_DIFFERENCE = 1e-12


def read_oracle(name):
    return json.loads((ORACLE / f"{name}.json").read_text())


# ---- a file's numbers


def tensors(inputs, dtype=torch.float64):
    """Return the inputs, with each list as a tensor."""
    found = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, list):
            found[name] = torch.tensor(value, dtype=dtype)
    return found


def gradient(loss, leaf):
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0].tolist()


def remake(name, maker, code):
    """Return a file's content with outputs that maker(code, case) makes anew.

    A maker returns outputs, and under "inputs" those inputs that the other project's code computes, such as advantages.
    """
    document = copy.deepcopy(read_oracle(name))
    programs = {source["program"] for source in document["source"]}
    for case in document["cases"]:
        outputs = maker(code, case)
        case["inputs"] |= outputs.pop("inputs", {})
        if len(programs) == 1:
            case["outputs"] = outputs
        else:
            case["outputs"] |= outputs
    return document


def differences(stored, made):
    """Yield the absolute difference of each pair of numbers; what is missing or of another kind differs infinitely."""
    if isinstance(stored, dict) and isinstance(made, dict):
        if stored.keys() != made.keys():
            yield math.inf
        for key in stored.keys() & made.keys():
            yield from differences(stored[key], made[key])
    elif isinstance(stored, list) and isinstance(made, list):
        if len(stored) != len(made):
            yield math.inf
        for pair in zip(stored, made):
            yield from differences(*pair)
    elif is_number(stored) and is_number(made) and math.isfinite(made):
        yield abs(stored - made)
    elif stored != made:
        yield math.inf


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def largest_difference(name, document):
    return max(differences(read_oracle(name)["cases"], document["cases"]), default=0.0)


# ---- a program


def package_folder(package):
    """Return the folder that an installed package is in, without importing it."""
    return Path(importlib.util.find_spec(package).origin).parent.parent


def main(makers, load_code, package=None, distribution=None):
    """Make each file's outputs again with load_code(folder). Write them, or with --check compare them.

    The folder is where the package is installed, or without a package the one that the user names.
    """
    parser = argparse.ArgumentParser()
    help_check = f"compare with the files instead of writing them; exits with 1 above {LARGEST_DIFFERENCE}"
    parser.add_argument("--check", action="store_true", help=help_check)
    if package is None:
        parser.add_argument("--folder", type=Path, required=True, help="a checkout of the other project")
    args = parser.parse_args()
    folder = args.folder if package is None else package_folder(package)
    torch.set_num_threads(1)
    code = load_code(folder)
    failed = False
    for name, maker in makers.items():
        document = remake(name, maker, code)
        difference = largest_difference(name, document)
        failed = failed or difference > LARGEST_DIFFERENCE
        print(f"{name}.json: largest difference {difference:.1e}")
        if not args.check:
            note_versions(document, folder, distribution)
            (ORACLE / f"{name}.json").write_text(json.dumps(document))
    if args.check and failed:
        raise SystemExit(1)


def note_versions(document, folder, distribution):
    """Note what the numbers were made with. A checkout's files must be those of the commit that is noted."""
    for source in document["source"]:
        if source["program"] != Path(sys.argv[0]).name:
            continue
        path = folder / source["path"]
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if distribution is None and digest != source["sha256"]:
            raise SystemExit(f"{path} is not that of commit {source['commit']}.")
        if distribution is not None:
            source["commit"] = f"PyPI {distribution}=={importlib.metadata.version(distribution)}"
        source["sha256"] = digest
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
    document["environment"] |= versions


# ---- parts of a file that cannot be imported


def find(path, name):
    """Return the node of a function or of Class.method in a file."""
    node = ast.parse(path.read_text(), filename=str(path))
    for part in name.split("."):
        definitions = [child for child in node.body if isinstance(child, (ast.FunctionDef, ast.ClassDef))]
        [node] = [child for child in definitions if child.name == part]
    return node


def execute(statements, namespace):
    """Execute statements of the other project's code. Return the namespace."""
    module = ast.Module(body=statements, type_ignores=[])
    exec(compile(module, "<the other project's code>", "exec"), namespace)
    return namespace


def load(path, name, namespace):
    """Return a function of a file, or a method as a function of self, without executing the rest of the file."""
    node = find(path, name)
    node.decorator_list = []
    return execute([node], namespace)[node.name]


def between(node, first, last):
    """Return the statements of one block, from the one that starts with `first` to the one that starts with `last`."""
    for parent in ast.walk(node):
        for block in (getattr(parent, "body", None), getattr(parent, "orelse", None)):
            if not isinstance(block, list):
                continue
            sources = [ast.unparse(statement) for statement in block]
            starts = [i for i, source in enumerate(sources) if source.startswith(first)]
            ends = [i for i, source in enumerate(sources) if source.startswith(last)]
            if starts and ends:
                return block[starts[0] : ends[-1] + 1]
    raise ValueError(f"no block has the statements {first!r} and {last!r}")
