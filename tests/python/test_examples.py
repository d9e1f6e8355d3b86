"""The README's examples are the files that run here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_process import binary, on_gpu
from spillway_lab.serving import prefer_library

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = (
    "clients/python/examples/generate.py",
    "clients/python/examples/attend.py",
    "clients/cpp/examples/attend.cc",
)


@pytest.mark.parametrize("example", EXAMPLES)
def test_readme_shows_it(example: str) -> None:
    assert (ROOT / example).read_text() in (ROOT / "README.md").read_text()


def run(target: str, *command: str | Path) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "SPILLWAY_TARGET": target},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python(target: str) -> None:
    made = run(target, sys.executable, ROOT / "clients/python/examples/attend.py")
    assert "out (1, 16, 64)" in made
    assert "layer 1 promises" in made


def test_decode_loop(target: str) -> None:
    prefer_library(binary())
    where = "cuda" if on_gpu() else "cpu"
    loop = ROOT / "clients/python/examples/decode.py"
    tokens, told = run(target, sys.executable, loop, "--check", "--device", where).splitlines()
    assert len(set(tokens.split())) > 30
    # Attention of a random model is flat: the error bound leaves some logits close.
    same = int(told.removesuffix(" of 64 tokens follow by attention over all K/V too"))
    assert same >= 48


def test_cpp(target: str) -> None:
    made = run(target, binary().parents[1] / "clients/cpp/attend_example")
    assert "rows of 5000 read" in made
