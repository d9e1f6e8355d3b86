"""A daemon for as long as a program of ours runs."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spillway.starting import wait_until_serving


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


class Daemon:
    """A daemon at an address, which may be killed and started again. Not thread-safe.

    Decode streams go through the libspillway that lies with it.

    Attributes:
        target: Its gRPC target.
    """

    def __init__(self, binary: Path, target: str, log: Path, *flags: str, timeout: float) -> None:
        """Does not start it.

        Args:
            binary: The daemon.
            target: Where it shall listen.
            log: Where its output goes, after what is there.
            flags: Beside its address.
            timeout: Seconds until it must serve.
        """
        prefer_library(binary)
        self.target = target
        self._command = [str(binary), "--listen", target, *flags]
        self._log, self._timeout = log, timeout
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns when it serves.

        Raises:
            RuntimeError: It does not.
        """
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C ends the program, which then ends the daemon.
                start_new_session=True,
            )
        try:
            wait_until_serving(self._process.poll, self.target, self._log, self._timeout)
        except BaseException:
            self.end()
            raise

    def kill(self) -> None:
        """Ends it as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def end(self) -> int:
        """Ends it in good order and returns its exit status; 0 where none runs."""
        if self._process is None:
            return 0
        end(self._process)
        status, self._process = self._process.returncode, None
        return status


@contextmanager
def running_daemon(binary: Path, log: Path, *flags: str, timeout: float) -> Iterator[str]:
    """As `restartable_daemon`, for who needs its target alone."""
    with restartable_daemon(binary, log, *flags, timeout=timeout) as daemon:
        yield daemon.target


@contextmanager
def restartable_daemon(binary: Path, log: Path, *flags: str, timeout: float) -> Iterator[Daemon]:
    """Starts spillwayd on a socket of its own, yields it, ends it by its pid.

    Args:
        binary: The daemon.
        log: Where its output goes, in place of what is there.
        flags: Beside its address.
        timeout: Seconds until it must serve.

    Raises:
        RuntimeError: It does not.
    """
    log.write_bytes(b"")
    with tempfile.TemporaryDirectory(prefix="spillway-") as folder:
        daemon = Daemon(binary, f"unix:{folder}/spillwayd.sock", log, *flags, timeout=timeout)
        try:
            daemon.start()
            yield daemon
        finally:
            daemon.end()


def end(process: subprocess.Popen[Any]) -> None:
    """Asks a process of ours to end, and ends it where it does not in 30 seconds."""
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
