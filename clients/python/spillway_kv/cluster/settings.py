"""Settings with which the daemons of a cluster are started."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import spillway_kv

Strategy = Literal["SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK"]
Listen = Literal["tcp", "unix"]


# Namespaces are parts of folder names and keys.
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


def check_namespace(namespace: str) -> None:
    """Raises ValueError for a namespace that is not valid."""
    if not _NAMESPACE.fullmatch(namespace):
        raise ValueError(f"namespace {namespace!r} is not of the form {_NAMESPACE.pattern}")


def _plain(address: str) -> str:
    """Returns an address in a form that a file name may have."""
    return re.sub(r"[^A-Za-z0-9.]", "-", address)


@dataclass(frozen=True)
class Settings:
    """Settings that are the same for every daemon.

    Attributes:
        daemon_count: Number of daemons.
        strategy: How Ray puts them on nodes: spread, one per node if possible, or packed on few
            nodes. The strict ones fail if this is not possible.
        cpus: Cores of each daemon, which Ray reserves for it, and its worker threads.
        gpus: GPUs of each daemon, which Ray reserves for it. 0: it runs on the CPU.
        memory_limit: Host memory of each daemon, such as "64GiB". Empty: three quarters of its
            machine's.
        listen: tcp: on the node's address, for clients on other machines, and on a socket in
            `state_folder` for clients on the same one. unix: only on the socket.
        allow_remote: Whether the node's address may be other than loopback. Everybody who can
            reach it may use the daemon, unless `config` requires certificates or a token.
        config: File with settings of the daemons, on every node. Empty: none.
        binary: The daemon's program file. Empty: spillwayd, as the nodes find it.
        state_folder: Folder for logs and sockets on every node. Empty: one of this user in /tmp.
        arena_folder: Folder on tmpfs, below which each daemon keeps its rows through a restart.
            Empty: rows end with their daemon.
        token_file: File on every node with the bearer token for the daemons, if they require
            one.
        resume_seconds: Seconds that a daemon may need to come back.
    """

    daemon_count: int = 1
    strategy: Strategy = "SPREAD"
    cpus: float = 1.0
    gpus: float = 0.0
    memory_limit: str = ""
    listen: Listen = "tcp"
    allow_remote: bool = False
    config: str = ""
    binary: str = ""
    state_folder: str = ""
    arena_folder: str = "/dev/shm"
    token_file: str = ""
    resume_seconds: float = 60.0

    def bundles(self) -> list[dict[str, float]]:
        """Returns the resources that Ray reserves for each daemon."""
        one = {"CPU": self.cpus}
        if self.gpus:
            one["GPU"] = self.gpus
        return [dict(one) for _ in range(self.daemon_count)]

    def folder(self, ray_address: str, namespace: str, slot: int) -> Path:
        """Returns the folder with a daemon's log and socket.

        Args:
            ray_address: Address of the Ray cluster's head. A machine may be in several Ray
                clusters.
            namespace: Ray namespace of the daemons.
            slot: Slot of the daemon.
        """
        base = self.state_folder or f"/tmp/spillway-cluster-{os.getuid()}"
        return Path(base) / _plain(ray_address) / namespace / str(slot)

    def arena(self, ray_address: str, namespace: str, slot: int) -> Path | None:
        """Returns the folder for a daemon's rows. Arguments as for `folder`."""
        if not self.arena_folder:
            return None
        own = f"spillway-cluster-{os.getuid()}-{_plain(ray_address)}-{namespace}-{slot}"
        return Path(self.arena_folder) / own

    def command(self) -> list[str]:
        """Returns a daemon's command line, without its address and arena.

        Raises:
            FileNotFoundError: The daemon's program was not found.
        """
        binary = self.binary or os.environ.get("SPILLWAYD") or shutil.which("spillwayd")
        if not binary or not os.access(binary, os.X_OK):
            raise FileNotFoundError(
                f"no daemon at {binary or 'PATH'}: install spillwayd, or name it with --binary"
            )
        command = [binary, "--device", "auto" if self.gpus else "cpu"]
        command += ["--threads", str(max(1, int(self.cpus)))]
        if self.config:
            command += ["--config", self.config]
        if self.memory_limit:
            command += ["--memory-limit", self.memory_limit]
        if self.allow_remote:
            command += ["--allow-remote"]
        return command

    def connect(self, target: str) -> spillway_kv.Client:
        """Connects to one of the daemons."""
        token = Path(self.token_file).read_text().strip() if self.token_file else None
        return spillway_kv.connect(target, token=token, resume_seconds=self.resume_seconds)
