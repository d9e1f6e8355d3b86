"""The process of one daemon. It outlives the actor that watches it."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Sequence as SequenceABC
from pathlib import Path

from spillway_kv.starting import wait_until_serving

# Grace time for a daemon of an earlier cluster.
_OTHERS_GRACE_SECONDS = 10.0


def make_own(folder: Path) -> None:
    """Makes a folder into which no other user can put files.

    Anyone who may write to /tmp can guess the name and create the folder first.

    Raises:
        PermissionError: Another user owns the folder or one above it, or may write to it.
    """
    # `mkdir` cannot set the mode of the folders above.
    for each in [*reversed(folder.absolute().parents), folder.absolute()]:
        with contextlib.suppress(FileExistsError):
            each.mkdir(mode=0o700)
        status = each.lstat()
        others_write = not stat.S_ISLNK(status.st_mode) and status.st_mode & stat.S_IWOTH
        if status.st_uid not in (0, os.getuid()) or (
            others_write and (each == folder.absolute() or not status.st_mode & stat.S_ISVTX)
        ):
            raise PermissionError(
                f"{each}, on the way to {folder}, has owner {status.st_uid} and mode "
                f"{stat.filemode(status.st_mode)}: users other than {os.getuid()} may change it"
            )


class DaemonProcess:
    """A daemon with its own folder, started by a guard that ends it with its Ray node.

    Not thread-safe, except `pid` and `wait`.

    Attributes:
        folder: Folder with its log, its address and its process id.
        target: gRPC target of the daemon.
        local_target: Target for clients on this machine, which can share memory with the daemon.
    """

    def __init__(
        self,
        folder: Path,
        command: SequenceABC[str],
        host: str,
        *,
        cluster: str,
        arena: Path | None = None,
    ) -> None:
        """Does not start the daemon yet. Ends a daemon of another cluster in the folder.

        Args:
            folder: Created if it does not exist, like those above it, with access only for this
                user.
            command: The daemon's program and options, without the address and the arena.
            host: Address of this machine on which the daemon listens; empty: a unix socket in the
                folder.
            cluster: Id of the cluster. A daemon of the same cluster in the folder is kept.
            arena: Folder on tmpfs in which the rows outlive the daemon. None: they do not.

        Raises:
            PermissionError: Another user may change the contents of one of the folders.
        """
        make_own(folder)
        self.folder = folder
        self._arena = arena
        self._command = list(command)
        if arena is not None:
            self._command += ["--arena-directory", str(arena)]
        self.local_target = f"unix:{self.folder}/spillwayd.sock"
        self.target = self._address(host) if host else self.local_target
        if host:
            self._command += ["--local-socket", self.local_target]
        noted = folder / "cluster"
        if not noted.exists() or noted.read_text() != cluster:
            self.stop(_OTHERS_GRACE_SECONDS)
            self.clear()
            noted.write_text(cluster)

    def _address(self, host: str) -> str:
        """Returns the address: that of the last daemon in the folder, or a free one."""
        noted = self.folder / "address"
        if noted.exists() and noted.read_text().startswith(f"tcp:{host}:"):
            return noted.read_text()
        with socket.create_server((host, 0)) as free:
            target = f"tcp:{host}:{free.getsockname()[1]}"
        noted.write_text(target)
        return target

    @property
    def log(self) -> Path:
        """The log file, to which each new daemon appends."""
        return self.folder / "spillwayd.log"

    @property
    def pid(self) -> int | None:
        """Process id of the running daemon. None if none runs."""
        try:
            pid = int((self.folder / "pid").read_text())
            # Another process may have this id now.
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except (OSError, ValueError):
            return None
        state = status.rpartition(")")[2].split()[0]
        return pid if self.target.encode() in command and state != "Z" else None

    def start(self, timeout: float) -> None:
        """Starts a daemon, unless one runs. Returns when it serves.

        Args:
            timeout: Seconds to wait.

        Raises:
            RuntimeError: The daemon does not serve.
        """
        if self._arena is not None:
            make_own(self._arena)
        guard: subprocess.Popen[bytes] | None = None
        if self.pid is None:
            (self.folder / "pid").unlink(missing_ok=True)
            with self.log.open("ab") as output:
                guard = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "spillway_kv.cluster.guard",
                        str(os.getppid()),
                        str(self.folder / "pid"),
                        "--",
                        *self._command,
                        "--listen",
                        self.target,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    # Ray kills the process groups of its workers.
                    start_new_session=True,
                )
        wait_until_serving(
            self._ended if guard is None else guard.poll, self.target, self.log, timeout
        )

    def _ended(self) -> int | None:
        """Returns None while a daemon runs."""
        return None if self.pid is not None else 0

    def wait(self, seconds: float) -> bool:
        """Waits until no daemon runs. Returns whether none does."""
        pid = self.pid
        if pid is None:
            return True
        try:
            daemon = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            ended, _, _ = select.select([daemon], [], [], seconds)
        finally:
            os.close(daemon)
        return bool(ended)

    def clear(self) -> None:
        """Removes the rows that a daemon has left in its arena. No daemon may be running."""
        if self._arena is not None:
            shutil.rmtree(self._arena, ignore_errors=True)

    def stop(self, grace: float) -> None:
        """Ends the daemon. Kills it if it does not end within the grace time."""
        pid = self.pid
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            if not self.wait(grace):
                os.kill(pid, signal.SIGKILL)
                self.wait(grace)
