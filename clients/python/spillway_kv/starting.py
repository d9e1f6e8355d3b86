"""Waits for a daemon that this program has started."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from spillway_kv.connecting import connect
from spillway_kv.errors import DeadlineExceeded, Unavailable

# Number of last lines of the log that the error quotes.
_LINE_COUNT = 20
_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 5.0


def wait_until_serving(
    poll: Callable[[], int | None], target: str, log: Path, timeout: float
) -> None:
    """Returns when a daemon serves.

    Args:
        poll: Like `subprocess.Popen.poll`: returns None while the daemon's process runs.
        target: gRPC target of the daemon.
        log: File with the daemon's output.
        timeout: Seconds to wait.

    Raises:
        RuntimeError: The daemon has ended or does not serve. The message has the end of the log.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            with connect(target, timeout=_ANSWER_SECONDS) as client:
                # Another process may have the address, while the daemon has ended.
                if client.health() and poll() is None:
                    return
        except (Unavailable, DeadlineExceeded):
            pass
        if poll() is not None or time.monotonic() > end:
            last = log.read_text(errors="replace").splitlines()[-_LINE_COUNT:]
            raise RuntimeError(f"spillwayd does not serve; {log} ends with\n" + "\n".join(last))
        time.sleep(_POLL_SECONDS)
