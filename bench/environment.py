"""Describes where and when a result was measured."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def describe() -> dict[str, Any]:
    """Command, hardware, date and commit: the head of every result file."""
    return {
        "command": "python " + shlex.join([os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "hardware": {
            "processor": _processor(),
            "core_count": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "last_level_cache": _last_level_cache(),
            "kernel": platform.release(),
        },
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


def _git(*args: str) -> str:
    run = subprocess.run(("git", *args), cwd=ROOT, capture_output=True, text=True)
    return run.stdout.strip() if run.returncode == 0 else ""


def _commit() -> str:
    # The results in docs may have changed since the commit, but the code may not.
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    return (_git("rev-parse", "--short=12", "HEAD") or "unknown") + ("+changes" if changed else "")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _last_level_cache() -> str:
    caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return caches[-1].read_text().strip() if caches else "unknown"
