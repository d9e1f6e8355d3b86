"""The map in ARCHITECTURE.md names every source folder, and nothing that no longer exists."""

from __future__ import annotations

import fnmatch
import re
import subprocess
from pathlib import Path

import pytest
from daemon_process import ROOT

PAGE = ROOT / "ARCHITECTURE.md"
if not PAGE.exists():
    pytest.skip("no checkout here, only what a bundle has of it", allow_module_level=True)

TEXT = PAGE.read_text()
SOURCES = (".c", ".cc", ".h", ".cu", ".cuh", ".py", ".proto", ".sh", ".cmake")
# In these folders, the map must name each subfolder; of others, only the top folder.
DIVIDED = ("host", "gpu", "engine", "services", "daemon", "clients", "docs", "proto")


def tracked() -> list[Path]:
    """The files that git tracks and that exist."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return [Path(name) for name in listed if (ROOT / name).exists()]


def rows() -> list[tuple[list[str], str]]:
    """The rows of the map: the names in the first column, and the text of the second."""
    table = TEXT.split("\n## Map\n", 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"^\| (`.*?) \| (.*) \|$", table, re.MULTILINE)
    assert len(found) > 20
    return [(re.findall(r"`([^`]+)`", folders), text) for folders, text in found]


def test_every_folder_of_sources_is_named() -> None:
    named = {name for folders, _ in rows() for name in folders}
    named |= set(re.findall(r"`([\w/]+/)`", "".join(text for _, text in rows())))
    wanted = set()
    for path in tracked():
        if path.suffix in SOURCES and len(path.parts) > 1:
            depth = 2 if path.parts[0] in DIVIDED and len(path.parts) > 2 else 1
            wanted.add("/".join(path.parts[:depth]) + "/")
    missing = {f for f in wanted if not any(n.startswith(f) or f.startswith(n) for n in named)}
    assert missing == set()


def test_every_path_that_is_named_is_there() -> None:
    for folders, _ in rows():
        for name in folders:
            assert (ROOT / name).exists(), name
    known = [f"{path}" for path in tracked()]
    roots = {path.parts[0] for path in tracked()}
    for name in re.findall(r"[`(]([\w.-]+/[\w./-]*)[`)]", TEXT):
        if name.split("/")[0] in roots:
            # Decision records may be named by their number, and sources without their suffix.
            ways = (name.rstrip("/") + "/", f"{name}-", f"{name}.")
            assert name in known or any(p.startswith(ways) for p in known), name


def test_every_name_in_the_map_is_somewhere() -> None:
    files = tracked()
    # Names of files and folders, with and without suffix.
    parts = {part for path in files for part in (*path.parts, path.stem, path.suffix)}
    said = "\n".join((ROOT / p).read_text() for p in files if p.suffix in (*SOURCES, ".txt"))
    words = set(re.findall(r"[\w.-]+", said))
    gone = []
    for folders, text in rows():
        for name in re.findall(r"`([^` ]+)`", text):
            bare = name.rstrip("/").removesuffix("()")
            if "/" not in bare and bare not in words and not fnmatch.filter(parts, bare):
                gone.append(f"{folders[0]}: {name}")
    assert gone == []
