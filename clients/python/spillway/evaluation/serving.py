"""A daemon for as long as an evaluation runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spillway.client import connect
from spillway.errors import DeadlineExceeded, Unavailable


def find_binary() -> Path:
    """The daemon to run: $SPILLWAYD, else the one on the path."""
    named = os.environ.get("SPILLWAYD") or shutil.which("spillwayd")
    if not named or not Path(named).exists():
        raise FileNotFoundError(
            f"no daemon at {named or 'the path'}; name it with SPILLWAYD, or a running one with "
            "--daemon"
        )
    return Path(named)


@contextmanager
def running_daemon(log: Path, device: str) -> Iterator[str]:
    """Starts spillwayd on a socket of its own, yields the target, ends it by its pid.

    Its audit is off, so that nothing changes what a policy does.
    """
    with tempfile.TemporaryDirectory(prefix="spillway-eval-") as folder, log.open("wb") as output:
        target = f"unix:{folder}/spillwayd.sock"
        process = subprocess.Popen(
            [find_binary(), "--listen", target, "--device", device, "--audit-share", "0"],
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C ends the evaluation, which then ends the daemon.
            start_new_session=True,
        )
        try:
            _wait_until_serving(process, target, log)
            yield target
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_serving(process: subprocess.Popen[bytes], target: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with connect(target, timeout=5) as client:
                if client.health():
                    return
        except (Unavailable, DeadlineExceeded):
            if process.poll() is not None or time.monotonic() > deadline:
                last = log.read_text(errors="replace").splitlines()[-20:]
                raise RuntimeError("spillwayd does not serve:\n" + "\n".join(last)) from None
        time.sleep(0.05)
