"""The placement of a client that asks a directory, and then calls the daemons itself."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from typing import Any, Protocol

import spillway_kv
from spillway_kv.cluster.directory import Directory
from spillway_kv.cluster.node import host_id
from spillway_kv.cluster.placement import Dealt, Moved
from spillway_kv.cluster.records import DaemonRecord
from spillway_kv.errors import SpillwayError, Unavailable

# How long a new sequence waits for daemons that are being restarted.
_RESTART_SECONDS = 30.0
_PAUSE_SECONDS = 0.05


class Asked(Protocol):
    """A directory, in this process or an actor. Thread-safe."""

    def ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Calls a method of `Directory`.

        Raises:
            SpillwayError: The error that the method raised; UNAVAILABLE if the directory does not
                answer.
        """


class LocalDirectory:
    """A directory in this process. Like its actor, it serves one call at a time."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._lock = threading.Lock()

    def ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        with self._lock:
            return getattr(self._directory, method)(*arguments, **named)


class DirectoryPlacement:
    """Asks the directory where parts are, and connects to the daemons directly. Thread-safe."""

    def __init__(
        self,
        directory: Asked,
        part_count: int,
        layer_groups: int,
        connect: Callable[[str], spillway_kv.Client],
        owner: str = "",
    ) -> None:
        """Sends nothing yet.

        Args:
            directory: Directory of the cluster.
            part_count: As in `Placement`.
            layer_groups: As in `Placement`.
            connect: Creates a client for a target.
            owner: Id of the token of these clients, which distinguishes it from other tokens;
                empty: they have none.
        """
        self.part_count = part_count
        self.layer_groups = layer_groups
        self._directory = directory
        self._connect = connect
        self._owner = owner
        self._lock = threading.Lock()
        self._clients: dict[str, spillway_kv.Client] = {}
        self._host = host_id()

    def records(self) -> list[DaemonRecord]:
        """Returns the records of all daemons, including those that have ended."""
        records: list[DaemonRecord] = self._directory.ask("daemons")
        return records

    def daemons(self) -> list[str]:
        return [each.name for each in self.records() if each.state in ("up", "draining")]

    def restarting(self) -> list[str]:
        return [each.name for each in self.records() if each.state == "down"]

    def client(self, daemon: str) -> spillway_kv.Client:
        with self._lock:
            if daemon in self._clients:
                return self._clients[daemon]
        client = connected(self._directory.ask("daemon", daemon), self._host, self._connect)
        client.connection.restarts.given_up = lambda: self.loss(daemon)
        with self._lock:
            if daemon not in self._clients:
                self._clients[daemon] = client
                return client
            known = self._clients[daemon]
        client.close()
        return known

    def dealt(self, name: str) -> Dealt | None:
        dealt: Dealt | None = self._directory.ask("model", name)
        return dealt

    def add_model(self, dealt: Dealt) -> None:
        self._directory.ask("add_model", dealt)

    def note_weights(self, dealt: Dealt) -> None:
        self._directory.ask("note_weights", dealt)

    def drop_model(self, name: str) -> None:
        self._directory.ask("drop_model", name)

    def choose(self, part_count: int, sequence: str, model: Dealt | None = None) -> list[str]:
        known = ("", "") if model is None else (model.model.name, model.made)
        claim = self._claim()
        end = time.monotonic() + _RESTART_SECONDS
        while True:
            try:
                chosen: list[str] = self._directory.ask(
                    "choose", part_count, sequence, claim, known
                )
                return chosen
            except Unavailable:
                # Waits for daemons that are being restarted, as calls do that need them.
                states = [each.state for each in self.records()]
                enough = states.count("up") + states.count("down") >= part_count
                if not enough or time.monotonic() > end:
                    raise
            time.sleep(_PAUSE_SECONDS)

    def put(self, sequence: str, daemons: SequenceABC[str]) -> None:
        self._directory.ask("put", sequence, list(daemons), self._claim())

    def _claim(self) -> str:
        return f"{self._owner}.{secrets.token_hex(8)}"

    def find(self, sequence: str) -> list[str] | None:
        found: list[str] | None = self._directory.ask("find", sequence)
        return found

    def drop(self, sequence: str, older_than: float = 0.0) -> None:
        self._directory.ask("drop", sequence, older_than, self._owner)

    def deleted(self, sequence: str, parts: SequenceABC[tuple[str, str]]) -> list[tuple[str, str]]:
        copies: list[tuple[str, str]] = self._directory.ask("deleted", sequence, list(parts))
        return copies

    def moved(self, part: str, daemon: str, *, gone: bool) -> Moved | None:
        moved: Moved | None = self._directory.ask("moved", part, daemon, gone)
        return moved

    def loss(self, daemon: str) -> SpillwayError | None:
        try:
            reason = self._directory.ask("loss", daemon)
        except SpillwayError:
            return None  # not known
        return spillway_kv.Unavailable(reason, reason="DAEMON_LOST") if reason else None

    def close(self) -> None:
        with self._lock:
            clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()


def connected(
    record: DaemonRecord, host: str, connect: Callable[[str], spillway_kv.Client]
) -> spillway_kv.Client:
    """Connects to a daemon, through its unix socket if it is on this machine.

    Raises:
        Unavailable: The daemon is gone for good, or does not answer.
    """
    if record.state in ("lost", "drained"):
        raise spillway_kv.Unavailable(
            f"{record.name} is {record.state}: {record.reason}", reason="DAEMON_LOST"
        )
    if record.local_target and record.host == host:
        path = record.local_target.removeprefix("unix:")
        if os.access(path, os.W_OK):
            return connect(record.local_target)
    return connect(record.target)
