"""A cluster without Ray: its directory is in this process, its daemons wherever they are."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import spillway
from spillway_cluster import ClusterClient
from spillway_cluster.directory import DaemonRecord, Directory, MemoryStore
from spillway_cluster.directory_placement import DirectoryPlacement
from spillway_cluster.node import host_id


class _LocalDirectory:
    """A directory, asked one call at a time as its actor is."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._lock = threading.Lock()

    def ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        with self._lock:
            return getattr(self._directory, method)(*arguments, **named)


def cluster_of(targets: Sequence[str], part_count: int = 1) -> ClusterClient:
    """A client of these daemons, whose sequences lie in as many parts."""
    directory = Directory(MemoryStore())
    for slot, target in enumerate(targets):
        directory.register(
            DaemonRecord("", slot, "node", host_id(), target, memory_limit_bytes=1 << 40)
        )
    asked = _LocalDirectory(directory)
    return ClusterClient(DirectoryPlacement(asked, part_count, 1, spillway.connect), "local:")
