"""A daemon for as long as a program of ours runs."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spillway.client import connect
from spillway.errors import DeadlineExceeded, Unavailable

_LINE_COUNT = 20  # of the log, for who is told that nothing serves


def find_binary(root: Path) -> Path:
    """The daemon to run: $SPILLWAYD, else the release build's of a checkout.

    Raises:
        FileNotFoundError: There is none.
    """
    binary = Path(os.environ.get("SPILLWAYD", root / "build/release/daemon/spillwayd"))
    if not binary.exists():
        raise FileNotFoundError(f"no daemon at {binary}; run make build, or set SPILLWAYD")
    return binary


def prefer_library(binary: Path) -> None:
    """Takes the libspillway that lies with a daemon, in a build tree or an unpacked archive.

    Where `SPILLWAY_LIBRARY` is set, that stays.
    """
    for folder in ("clients/c", "lib"):
        path = binary.resolve().parent.parent / folder / "libspillway.so.1"
        if path.exists():
            os.environ.setdefault("SPILLWAY_LIBRARY", str(path))


@contextmanager
def running_daemon(binary: Path, log: Path, *flags: str, timeout: float) -> Iterator[str]:
    """Starts spillwayd on a socket of its own, yields the target, ends it by its pid.

    Decode streams go through the libspillway that lies with it.

    Args:
        binary: The daemon.
        log: Where its output goes.
        flags: Beside its address.
        timeout: Seconds until it must serve.

    Raises:
        RuntimeError: It does not.
    """
    prefer_library(binary)
    with tempfile.TemporaryDirectory(prefix="spillway-") as folder, log.open("wb") as output:
        target = f"unix:{folder}/spillwayd.sock"
        process = subprocess.Popen(
            [binary, "--listen", target, *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C ends the program, which then ends the daemon.
            start_new_session=True,
        )
        try:
            wait_until_serving(process, target, log, timeout)
            yield target
        finally:
            end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """Asks a process of ours to end, and ends it where it does not in 30 seconds."""
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until_serving(
    process: subprocess.Popen[bytes], target: str, log: Path, timeout: float
) -> None:
    """Waits for a daemon that was started here.

    Raises:
        RuntimeError: It ended, or does not serve after so many seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            with connect(target, timeout=5) as client:
                if client.health():
                    return
        except (Unavailable, DeadlineExceeded):
            if process.poll() is not None or time.monotonic() > deadline:
                last = log.read_text(errors="replace").splitlines()[-_LINE_COUNT:]
                raise RuntimeError(
                    f"spillwayd does not serve; {log} ends with\n" + "\n".join(last)
                ) from None
        time.sleep(0.05)
