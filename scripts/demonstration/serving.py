"""A daemon for as long as the demonstration runs."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

from spillway import _serving


def running_daemon(binary: Path, log: Path, device: str = "cpu") -> AbstractContextManager[str]:
    """Starts spillwayd, yields the target, ends it."""
    return _serving.running_daemon(binary, log, "--device", device, timeout=30)


def find_binary(root: Path) -> Path:
    """The daemon to run: $SPILLWAYD, else the release build's."""
    binary = Path(os.environ.get("SPILLWAYD", root / "build/release/daemon/spillwayd"))
    if not binary.exists():
        raise FileNotFoundError(f"no daemon at {binary}; run make build, or set SPILLWAYD")
    return binary
