"""A daemon for as long as the demonstration runs."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import spillway


@contextmanager
def running_daemon(binary: Path, log: Path, device: str = "cpu") -> Iterator[str]:
    """Starts spillwayd on a socket of its own, yields the target, ends it by its pid."""
    with tempfile.TemporaryDirectory(prefix="spillway-demo-") as folder, log.open("wb") as output:
        target = f"unix:{folder}/spillwayd.sock"
        process = subprocess.Popen(
            [binary, "--listen", target, "--device", device],
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C ends the demonstration, which then ends the daemon.
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


def find_binary(root: Path) -> Path:
    """The daemon to run: $SPILLWAYD, else the release build's."""
    binary = Path(os.environ.get("SPILLWAYD", root / "build/release/daemon/spillwayd"))
    if not binary.exists():
        raise FileNotFoundError(f"no daemon at {binary}; run make build, or set SPILLWAYD")
    return binary


def _wait_until_serving(process: subprocess.Popen[bytes], target: str, log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            with spillway.connect(target, timeout=5) as client:
                if client.health():
                    return
        except (spillway.Unavailable, spillway.DeadlineExceeded):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"spillwayd does not serve; {log} ends with\n"
                    + "\n".join(log.read_text(errors="replace").splitlines()[-20:])
                ) from None
        time.sleep(0.05)
