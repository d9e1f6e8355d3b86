"""Makes pages, tables and pictures from records, and compares what is committed with them."""

from __future__ import annotations

import difflib
import json
import re
import runpy
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pictures
import processes
from inputs import ROOT
from parts import Part
from rich.console import Console
from spillway_kv.lab.evaluation import report

Table = Callable[[Path], list[str]]
# Digests of what every picture shows.
MANIFEST = "results/pictures.json"
MARK = re.compile(
    r"^<!-- made by make evidence: (?P<name>\S+) -->\n(?P<text>.*?)^<!-- end of (?P<end>\S+) -->$",
    re.MULTILINE | re.DOTALL,
)


class Task(NamedTuple):
    """What one process makes: the page of a folder, or what a script makes.

    Attributes:
        docs: The folder docs/.
        folder: Below docs/results, for `spillway-lab eval report`; or empty.
        script: Of Python, with its arguments; or empty.
        draw: Whether pictures are written.
    """

    docs: Path
    folder: str
    script: str
    draw: bool


def render(parts: Sequence[Part], tables: Mapping[str, Table], docs: Path, draw: bool) -> None:
    """Makes the pages, tables and pictures of parts again.

    Args:
        parts: The parts.
        tables: The functions that make tables, by name.
        docs: The folder docs/. Its records are read, and its pages are written.
        draw: If not, pictures stay as they are. The digests of what they show are written still.

    Raises:
        ValueError: A page has marks of a table that does not exist, or a part has a table that is
            on no page.
        RuntimeError: A page or a script failed.
    """
    folders = dict.fromkeys(folder for part in parts for folder in part.reports)
    scripts = dict.fromkeys(script for part in parts for script in part.scripts)
    tasks = [Task(docs, folder, "", draw) for folder in folders]
    tasks += [Task(docs, "", script, draw) for script in scripts]
    shown: dict[str, str] = {}
    # A process for each task, because scripts of several folders have modules of one name.
    for found in processes.called(_make, tasks):
        shown |= found
    if shown:
        path = docs / MANIFEST
        before = json.loads(path.read_text()) if path.exists() else {}
        there = {name: digest for name, digest in before.items() if (docs / name).exists()}
        path.write_text(json.dumps(there | shown, indent=1, sort_keys=True) + "\n")
    _fill({name for part in parts for name in part.tables}, tables, docs)


def _make(task: Task) -> dict[str, str]:
    """Makes a page or pictures, and returns the digests of the pictures below docs/."""
    with pictures.observed(task.draw) as found:
        if task.folder:
            report.make(task.docs / "results" / task.folder, Console(quiet=True))
        else:
            words = shlex.split(task.script.replace("$DOCS", shlex.quote(str(task.docs))))
            program = ROOT / words[0]
            sys.argv = [str(program), *words[1:]]
            sys.path.insert(0, str(program.parent))
            try:
                runpy.run_path(str(program), run_name="__main__")
            except SystemExit as error:
                if error.code:
                    raise RuntimeError(f"{shlex.join(words)} ended with {error.code}") from None
    return {str(path.relative_to(task.docs.resolve())): digest for path, digest in found.items()}


def _fill(wanted: set[str], tables: Mapping[str, Table], docs: Path) -> None:
    """Writes the wanted tables between their marks, on all pages below docs/."""
    placed: set[str] = set()

    def filled(mark: re.Match[str]) -> str:
        name = mark["name"]
        if name not in tables or mark["end"] != name:
            raise ValueError(
                f"{page}: marks of {name} and {mark['end']}; tables are {', '.join(tables)}"
            )
        if name not in wanted:
            return mark[0]
        placed.add(name)
        lines = "\n".join(tables[name](docs))
        return f"<!-- made by make evidence: {name} -->\n\n{lines}\n\n<!-- end of {name} -->"

    for page in sorted(docs.rglob("*.md")):
        text = page.read_text()
        new = MARK.sub(filled, text)
        if new != text:
            page.write_text(new)
    if lacking := wanted - placed:
        raise ValueError(f"no page has marks of {', '.join(sorted(lacking))}")


def check(parts: Sequence[Part], tables: Mapping[str, Table], docs: Path) -> list[str]:
    """Returns what differs between the pages and what the records give; nothing if all agree.

    Pictures are compared by the digest of what they show.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve() / "docs"
        shutil.copytree(docs, copy, ignore=shutil.ignore_patterns("*.part", "work"))
        render(parts, tables, copy, draw=False)
        differences = []
        for made in sorted(copy.rglob("*")):
            name = str(made.relative_to(copy))
            if made.suffix != ".md" and name != MANIFEST:
                continue
            committed = docs / name
            old = committed.read_text().splitlines() if committed.exists() else []
            new = made.read_text().splitlines()
            if old != new:
                lines = difflib.unified_diff(
                    old, new, f"docs/{name}", f"docs/{name}, from the records", "", "", 0, ""
                )
                differences += list(lines)
        return differences
