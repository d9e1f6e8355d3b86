"""The README's example of transformers runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import spillway

ROOT = Path(__file__).resolve().parents[2]


def test_generate(client: spillway.Client, loaded: tuple[Any, Any]) -> None:
    del loaded  # The model is where the example reads it.
    done = subprocess.run(
        [sys.executable, ROOT / "clients/python/examples/generate.py"],
        cwd=ROOT,
        env={**os.environ, "SPILLWAY_TARGET": client.target},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answer, rows, error = done.stdout.strip().rsplit("\n", 2)
    assert answer
    assert 0 < float(rows.split("%")[0]) < 40
    assert 0 < float(error.removeprefix("certified error ")) < 0.1
