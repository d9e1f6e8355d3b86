"""Short runs of the benchmarks of decode steps beside other clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from daemon_process import ROOT, binary, device


def told(name: str, *flags: str) -> dict[str, Any]:
    """Runs a program of bench/rpc and returns its output."""
    done = subprocess.run(
        [sys.executable, ROOT / f"bench/rpc/{name}.py", "--device", device() or "cpu", *flags],
        env={**os.environ, "SPILLWAYD": str(binary())},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["transport"] == "doorbell"
    return said


def test_steps_beside_a_giant_answer_as_alone() -> None:
    said = told("fairness", "--tokens", "4096", "--giants", "1", "--steps", "3", "--rounds", "1")
    assert said["steps_compared"] == 6
    assert max(said["errors"].values()) < 1e-3
    assert said["giant_count"] >= 1
    assert said["beside"]["p99_ms"] >= said["beside"]["p50_ms"] > 0


def test_steps_beside_clients_that_are_there_answer_as_alone() -> None:
    flags = ("--tokens", "4096", "--steps", "3", "--rounds", "1", "--clients", "1", "2", "4")
    said = told("presence", *flags)
    assert said["steps_compared"] == 9
    assert said["error"] < 1e-3
    assert list(said["step"]) == ["1", "2", "4"]
    assert all(len(of["each_round"]) == 1 for of in said["attend"].values())
