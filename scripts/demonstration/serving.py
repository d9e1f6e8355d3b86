"""A daemon for as long as the demonstration runs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from spillway import _serving


def running_daemon(binary: Path, log: Path, device: str = "cpu") -> AbstractContextManager[str]:
    """Starts spillwayd, yields the target, ends it."""
    return _serving.running_daemon(binary, log, "--device", device, timeout=30)
