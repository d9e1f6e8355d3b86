"""Checks that no modules of the Python package import each other in a circle.

Imports that run when a module is imported count; those in functions and for type checkers do not.
"""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Container, Iterable, Iterator
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


def imported(nodes: Iterable[ast.AST], known: Container[str]) -> Iterator[str]:
    """Yields the names that are imported; of `from a import b` either the module `a.b` or `a`."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported(node.orelse, known)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module
        else:
            yield from imported(ast.iter_child_nodes(node), known)


def main() -> int:
    """Prints a circle, if there is one. Returns 1 then."""
    known = modules()
    graph = {
        name: set(imported(ast.parse(path.read_text()).body, known)) & known.keys() - {name}
        for name, path in known.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        print("modules import each other in a circle:", " <- ".join(error.args[1]))
        return 1
    print(f"The imports of {len(known)} modules have no circle.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
