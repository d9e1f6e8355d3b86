"""Records what Spillway's plugin uses of a version of vLLM.

    vllm_contract.py SITE VERSION    SITE: a folder that contains vLLM's sources, the folder `vllm`

Writes tests/python/vllm_contracts/VERSION.json: the parameters of functions and methods, and the
fields of classes, whose names occur in the plugin. It reads sources and imports nothing, so that it
works for builds that do not run here. tests/python/test_vllm_contract.py compares the plugin with
every recorded version.
"""

from __future__ import annotations

import ast
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = ROOT / "clients/python/spillway_kv/vllm"
CONTRACTS = ROOT / "tests/python/vllm_contracts"
# What the plugin uses without an import: classes of objects that vLLM passes to it.
PASSED = (
    ("vllm.config.cache", "CacheConfig"),
    ("vllm.config.model", "ModelConfig"),
    ("vllm.config.parallel", "ParallelConfig"),
    ("vllm.config.scheduler", "SchedulerConfig"),
    ("vllm.config.speculative", "SpeculativeConfig"),
    ("vllm.v1.attention.backends.flash_attn", "_get_sliding_window_configs"),
    ("vllm.v1.core.sched.output", "CachedRequestData"),
    ("vllm.v1.core.sched.output", "KVConnectorBlockState"),
    ("vllm.v1.core.sched.output", "NewRequestData"),
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec"),
    ("vllm.v1.outputs", "KVConnectorOutput"),
    ("vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator", "StandaloneARSpeculator"),
    ("vllm.v1.worker.gpu_worker", "Worker"),
)


def imported(folder: Path = PLUGIN) -> list[tuple[str, str]]:
    """Returns (module, name) of everything that the plugin imports from vLLM."""
    found = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found |= {(str(node.module), alias.name) for alias in node.names}
    return sorted(found)


def names_used(folder: Path = PLUGIN) -> set[str]:
    """Returns the names of all attributes, keywords and functions in the plugin."""
    found = {"__init__"}
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg is not None:
                found.add(node.arg)
            elif isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                # Names for getattr.
                found.add(node.value)
    return found


class Sources:
    """vLLM's sources.

    Args:
        site: The folder that contains the folder `vllm`.
    """

    def __init__(self, site: Path) -> None:
        self._site = site
        self._module = functools.cache(self._parse)
        self._used = names_used()

    def _path(self, module: str) -> Path | None:
        path = self._site.joinpath(*module.split("."))
        for found in (path.with_suffix(".py"), path / "__init__.py"):
            if found.is_file():
                return found
        return None

    def _parse(self, module: str) -> ast.Module | None:
        path = self._path(module)
        return None if path is None else ast.parse(path.read_text())

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Returns the module that defines a name, and the definition. Follows imports."""
        if self._path(f"{module}.{name}") is not None:
            return module, ast.Module([], [])
        tree = self._module(module)
        if tree is None:
            return None
        for node in _statements(tree):
            if getattr(node, "name", None) == name:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name and node.module:
                        return self.find(_absolute(module, self._path(module), node), alias.name)
        # Packages that import names when they are used have them in a table of strings.
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name:
                        where = getattr(value, "value", "")
                        if isinstance(where, str) and ":" in where:
                            inner = where.partition(":")[0]
                            package = inner if not inner.startswith(".") else module + inner
                            return self.find(package, name)
        return None

    def describe(self, module: str, name: str) -> dict[str, Any] | None:
        """Returns what is recorded of a name, or None if it does not exist."""
        found = self.find(module, name)
        if found is None:
            return None
        where, node = found
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return {"parameters": _parameters(node)}
        if isinstance(node, ast.ClassDef):
            methods: dict[str, list[str]] = {}
            fields: set[str] = set()
            for each in self._lineage(where, node):
                for inner in _statements(each):
                    if isinstance(inner, ast.FunctionDef):
                        if inner.name in self._used:
                            methods.setdefault(inner.name, _parameters(inner))
                        fields |= _attributes(inner)
                    elif isinstance(inner, ast.Assign | ast.AnnAssign):
                        fields |= set(_targets(inner))
            return {"methods": dict(sorted(methods.items())), "fields": sorted(fields & self._used)}
        return {}

    def _lineage(self, module: str, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
        """Yields the class and its bases, as far as they are vLLM's."""
        yield node
        for base in node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name):
                found = self.find(module, name.id)
                if found is not None and isinstance(found[1], ast.ClassDef):
                    yield from self._lineage(*found)


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yields a body's statements, also those under conditions."""
    for node in getattr(tree, "body", ()):
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node)
            for other in node.orelse:
                yield other
                yield from _statements(other) if isinstance(other, ast.If | ast.Try) else ()


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _attributes(method: ast.FunctionDef) -> set[str]:
    """Returns the attributes of self that a method sets."""
    return {
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = node.args
    names = [each.arg for each in (*given.posonlyargs, *given.args)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [each.arg for each in given.kwonlyargs]
    names += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return names


def _absolute(module: str, path: Path | None, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return str(node.module)
    parts = module.split(".")
    if path is not None and path.name == "__init__.py":
        parts = [*parts, ""]
    return ".".join([*parts[: -node.level], str(node.module)])


def contract(site: Path) -> dict[str, Any]:
    """Returns what is recorded of vLLM's sources."""
    sources = Sources(site)
    made = {}
    for module, name in [*imported(), *PASSED]:
        described = sources.describe(module, name)
        if described is None:
            raise SystemExit(f"{module} has no {name}")
        made[f"{module}:{name}"] = described
    return dict(sorted(made.items()))


def main() -> None:
    """Writes the record of a version."""
    site, version = sys.argv[1:]
    CONTRACTS.mkdir(exist_ok=True)
    path = CONTRACTS / f"{version}.json"
    path.write_text(json.dumps(contract(Path(site)), indent=1) + "\n")
    print(f"{path}: {len(json.loads(path.read_text()))} names")


if __name__ == "__main__":
    main()
