"""Short runs of `make chaos` and `make soak`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def run(module: str, flags: list[str]) -> str:
    """Runs a program of tests/chaos, which must find nothing wrong; returns its output."""
    folders = [str(TESTS), str(TESTS / "python"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, folders))
    done = subprocess.run(
        [sys.executable, "-m", module, *flags],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_chaos() -> None:
    counts = {
        "--daemon-kills": 8,
        "--client-kills": 8,
        "--runner-kills": 6,
        "--rounds": 2,
        "--messages": 3000,
    }
    flags = [str(word) for pair in counts.items() for word in pair]
    told = run("chaos", flags)
    assert "acknowledged rows lost: 0\nwrong answers: 0\n" in told
    assert "8 daemon killed" in told


def test_soak() -> None:
    # Too short for a trend of memory. This only tests that the program works and leaves nothing.
    told = run("chaos.soak", ["--minutes", "0.15", "--every", "1", "--limit", "1000000"])
    assert "'client killed': 1" in told
    assert "wrong: []" in told
