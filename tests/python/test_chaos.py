"""A short form of `make chaos`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_chaos() -> None:
    counts = {
        "--daemon-kills": 8,
        "--client-kills": 8,
        "--runner-kills": 6,
        "--rounds": 2,
        "--messages": 3000,
    }
    flags = [str(word) for pair in counts.items() for word in pair]
    folders = [str(TESTS), str(TESTS / "python"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, folders))
    done = subprocess.run(
        [sys.executable, "-m", "chaos", *flags],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "acknowledged rows lost: 0\nwrong answers: 0\n" in done.stdout
    assert "8 daemon killed" in done.stdout
