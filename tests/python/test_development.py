"""Programs build against an installed libspillway, as the example's page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from daemon_process import ROOT, binary
from helpers import fences

EXAMPLE = ROOT / "docs/examples/embedded"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
BUILD = binary().resolve().parents[1]
if not EXAMPLE.exists() or not (BUILD / "CMakeCache.txt").exists():
    pytest.skip("no checkout with a build here", allow_module_level=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of spillway-dev and the library of spillway, in a folder that is not the root."""
    root = tmp_path_factory.mktemp("installed")
    subprocess.run(
        ["cmake", "--install", BUILD, "--prefix", root, "--component", "development"],
        check=True,
        capture_output=True,
    )
    shutil.copy(BUILD / "lib/libspillway.so.1", root / LIBRARIES)
    return root


@pytest.mark.parametrize("way", ["cmake", "pkg-config"])
def test_the_example_builds_and_runs(installed: Path, tmp_path: Path, way: str) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "embedded")
    blocks = fences("docs/examples/embedded/README.md", "sh")
    (commands,) = (block for block in blocks if way in block)
    done = subprocess.run(
        ["bash", "-euc", commands],
        cwd=tmp_path / "embedded",
        env={
            **os.environ,
            "CMAKE_PREFIX_PATH": str(installed / "usr"),
            "PKG_CONFIG_PATH": str(installed / LIBRARIES / "pkgconfig"),
            "LD_LIBRARY_PATH": str(installed / LIBRARIES),
            "CMAKE_BUILD_PARALLEL_LEVEL": "2",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.search(
        r"^attended to 3000 tokens; certified error of head 0: (\S+)$", done.stdout, re.MULTILINE
    )
    assert told
    assert 0 <= float(told[1]) < 0.5
