"""What a directory notes, and where."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from spillway_cluster.placement import Moved

State = Literal["up", "down", "draining", "drained", "lost"]


@dataclass(frozen=True)
class DaemonRecord:
    """A daemon as its node last told.

    Attributes:
        name: Of this daemon; one that comes in its place with other rows has another name.
        slot: Number of the placement group's bundle.
        node: Ray's id of the node.
        host: What tells this machine from others, the kernel's boot id.
        local_target: Where clients on the same machine reach it; empty: as all others.
        target: Where all others do.
        version: Of the daemon.
        boot_id: Of its process.
        store_id: Of its rows, which outlive it; empty: they do not.
        state: up; down, until its node has started it again; draining and drained; lost, with
            all it had.
        reason: Why it is lost or down.
        memory_limit_bytes: Everything it may hold.
        memory_used_bytes: What it holds.
        sequence_count: Sequences that it has.
        restart_count: How often its node has started it again.
    """

    name: str
    slot: int
    node: str
    host: str
    target: str
    local_target: str = ""
    version: str = ""
    boot_id: str = ""
    store_id: str = ""
    state: State = "up"
    reason: str = ""
    memory_limit_bytes: int = 0
    memory_used_bytes: int = 0
    sequence_count: int = 0
    restart_count: int = 0


@dataclass(frozen=True)
class MoveUnderWay:
    """A part that is being moved.

    Attributes:
        source: The daemon that has it.
        moved: Where it will be.
    """

    source: str
    moved: Moved


class Named(NamedTuple):
    """A named sequence: whose claim it is, its parts' daemons, and when it was noted."""

    claim: str
    daemons: tuple[str, ...]
    noted: float


class Store(Protocol):
    """Where the directory's records outlive it."""

    def put(self, key: str, value: bytes) -> None: ...

    def delete(self, key: str) -> None: ...

    def items(self) -> Iterable[tuple[str, bytes]]: ...


class MemoryStore:
    """Outlives the directory, but not the process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def delete(self, key: str) -> None:
        self.values.pop(key, None)

    def items(self) -> Iterable[tuple[str, bytes]]:
        return list(self.values.items())
