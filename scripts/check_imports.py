"""Checks that modules of the Python package import neither in a circle nor private names.

Imports in functions and for type checkers count too. Modules whose names begin with an underscore
are no private names: they are private to the package. ruff (SLF001) checks that no module reads a
private name of another's objects.
"""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Container, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "clients/python"


def modules() -> dict[str, Path]:
    """Returns the package's modules by name, without generated ones."""
    found = {}
    for path in sorted(ROOT.glob("spillway_kv/**/*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "_proto" not in parts:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.AST, known: Container[str]) -> Iterator[str]:
    """Yields the names that are imported; of `from a import b` either the module `a.b` or `a`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module


def private(tree: ast.AST, known: Container[str]) -> Iterator[str]:
    """Yields the private names of modules of the package that are imported anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if alias.name.startswith("_") and alias.name[1] != "_" and name not in known:
                    yield name


def main() -> int:
    """Prints what is wrong, if anything is. Returns 1 then."""
    known = modules()
    trees = {name: ast.parse(path.read_text()) for name, path in known.items()}
    wrong = [(name, what) for name, tree in trees.items() for what in private(tree, known)]
    for name, what in wrong:
        print(f"{name} imports {what}, which is private")
    if wrong:
        return 1
    graph = {
        name: set(imported(tree, known)) & known.keys() - {name} for name, tree in trees.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        print("modules import each other in a circle:", " <- ".join(error.args[1]))
        return 1
    print(f"The imports of {len(known)} modules have no circle, and no private names.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
