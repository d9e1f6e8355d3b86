"""Builds wheels from copies of the sources, and reads them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from daemon_process import ROOT


def build(package: Path, output: Path, library: Path | None) -> Path:
    """Builds the wheel of the package, with this libspillway if `library` is given."""
    environment = {k: v for k, v in os.environ.items() if k != "SPILLWAY_LIBRARY_FILE"}
    if library is not None:
        environment["SPILLWAY_LIBRARY_FILE"] = str(library)
    # Downloads nothing: the environment has the build tools.
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", output, package],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = output.glob("*.whl")
    return wheel


def copied(folder: Path) -> Path:
    """Copies the sources of the package and of the API, without build output."""
    left_out = shutil.ignore_patterns("build", "_proto", "*.egg-info", "__pycache__")
    shutil.copy(ROOT / "VERSION", folder)
    for name in ("proto", "clients/python"):
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    return folder / "clients/python"


def files(wheel: Path) -> set[str]:
    """The names of the files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata(wheel: Path, name: str) -> str:
    """The text of a file in the wheel's .dist-info folder."""
    with zipfile.ZipFile(wheel) as archive:
        (found,) = (n for n in archive.namelist() if n.endswith(f".dist-info/{name}"))
        return archive.read(found).decode()
