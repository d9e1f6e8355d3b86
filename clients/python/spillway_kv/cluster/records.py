"""The records of a directory, and its store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from spillway_kv.cluster.placement import Moved

State = Literal["up", "down", "draining", "drained", "lost"]


@dataclass(frozen=True)
class DaemonRecord:
    """A daemon, as last reported by its node.

    Attributes:
        name: Name of the daemon. A successor without its rows has another name.
        slot: Index of the daemon's bundle in the placement group.
        node: Ray's id of the node.
        host: Id of the machine: the kernel's boot id.
        local_target: Target for clients on the same machine; empty: the same as `target`.
        target: Target for all other clients.
        version: Version of the daemon.
        boot_id: boot_id of its process.
        store_id: Id of the files in which its rows outlive it; empty: they do not.
        state: `up`; `down` until its node has restarted it; `draining` and `drained`; `lost`, with
            all its rows.
        reason: Why it is lost or down.
        memory_limit_bytes: Limit on its memory.
        memory_used_bytes: Memory in use.
        sequence_count: Number of its sequences.
        restart_count: How often its node has restarted it.
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
        source: The daemon that has the part.
        moved: The daemon that will have it, and the generations.
    """

    source: str
    moved: Moved


class Named(NamedTuple):
    """A named sequence: the id of the call that took the name, the parts' daemons, and the time.

    The time is one of `time.monotonic()` in the directory's process: when the sequence was named,
    or when the directory started.
    """

    claim: str
    daemons: tuple[str, ...]
    noted: float


class Store(Protocol):
    """Stores the directory's records, and outlives the directory."""

    def put(self, key: str, value: bytes) -> None: ...

    def delete(self, key: str) -> None: ...

    def items(self) -> Iterable[tuple[str, bytes]]: ...


class MemoryStore:
    """A store in memory. It outlives the directory, but not the process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def delete(self, key: str) -> None:
        self.values.pop(key, None)

    def items(self) -> Iterable[tuple[str, bytes]]:
        return list(self.values.items())
