"""Runs a daemon during an evaluation."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

from spillway_kv.lab import serving


def find_binary() -> Path:
    """Returns the daemon's program: $SPILLWAYD, or that on the PATH."""
    named = os.environ.get("SPILLWAYD") or shutil.which("spillwayd")
    if not named or not Path(named).exists():
        raise FileNotFoundError(
            f"no daemon at {named or 'the path'}; name it with SPILLWAYD, or a running one with "
            "--daemon"
        )
    return Path(named)


def running_daemon(log: Path, device: str) -> AbstractContextManager[str]:
    """Starts spillwayd, yields its target, and ends it.

    Its audit is off, so that nothing changes the effect of a policy.
    """
    flags = ("--device", device, "--audit-share", "0")
    return serving.running_daemon(find_binary(), log, *flags, timeout=60)
