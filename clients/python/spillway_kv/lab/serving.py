"""Runs a daemon during a program."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spillway_kv.starting import wait_until_serving


def find_binary(root: Path) -> Path:
    """Returns the daemon's program: $SPILLWAYD, or the release build of a checkout.

    Raises:
        FileNotFoundError: There is no such program.
    """
    binary = Path(os.environ.get("SPILLWAYD", root / "build/release/daemon/spillwayd"))
    if not binary.exists():
        raise FileNotFoundError(f"no daemon at {binary}; run make build, or set SPILLWAYD")
    return binary


def prefer_library(binary: Path) -> None:
    """Uses the libspillway next to a daemon, in a build tree or an unpacked archive.

    If `SPILLWAY_LIBRARY` names a file, it is not changed.
    """
    path = binary.resolve().parent.parent / "lib/libspillway.so.1"
    if path.exists() and not os.environ.get("SPILLWAY_LIBRARY"):
        os.environ["SPILLWAY_LIBRARY"] = str(path)


class Daemon:
    """A daemon at an address. It can be killed and started again. Not thread-safe.

    Clients use the libspillway next to the daemon.

    Attributes:
        target: gRPC target of the daemon.
    """

    def __init__(self, binary: Path, target: str, log: Path, *flags: str, timeout: float) -> None:
        """Does not start the daemon yet.

        Args:
            binary: The daemon's program.
            target: Target on which it listens.
            log: File to which its output is appended.
            flags: Options other than its address. Without `--sampling-seed`, it is 0.
            timeout: Seconds until it must serve.
        """
        prefer_library(binary)
        self.target = target
        # Results can be repeated.
        seed = [] if "--sampling-seed" in flags else ["--sampling-seed", "0"]
        self._command = [str(binary), "--listen", target, *seed, *flags]
        self._log, self._timeout = log, timeout
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the running daemon."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts the daemon. Returns when it serves.

        Raises:
            RuntimeError: It does not serve.
        """
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C then only ends this program, which ends the daemon.
                start_new_session=True,
            )
        try:
            wait_until_serving(self._process.poll, self.target, self._log, self._timeout)
        except BaseException:
            self.end()
            raise

    def kill(self) -> None:
        """Kills the daemon, like a crash."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def end(self) -> int:
        """Ends the daemon gracefully. Returns its exit status, or 0 if none runs."""
        if self._process is None:
            return 0
        end(self._process)
        status, self._process = self._process.returncode, None
        return status


@contextmanager
def running_daemon(binary: Path, log: Path, *flags: str, timeout: float) -> Iterator[str]:
    """The same as `restartable_daemon`, for callers that only need the target."""
    with restartable_daemon(binary, log, *flags, timeout=timeout) as daemon:
        yield daemon.target


@contextmanager
def restartable_daemon(binary: Path, log: Path, *flags: str, timeout: float) -> Iterator[Daemon]:
    """Starts spillwayd on its own socket, yields it, and ends it.

    Args:
        binary: The daemon's program.
        log: File for its output, which is emptied first.
        flags: Options other than its address.
        timeout: Seconds until it must serve.

    Raises:
        RuntimeError: It does not serve.
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
    """Asks a process to end, and kills it if it has not ended after 30 seconds."""
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
