"""A cluster without Ray: the directory is in this process, the daemons can be anywhere."""

from __future__ import annotations

from collections.abc import Sequence

import spillway_kv
from spillway_kv.cluster import ClusterClient
from spillway_kv.cluster.directory import Directory
from spillway_kv.cluster.directory_placement import DirectoryPlacement, LocalDirectory
from spillway_kv.cluster.node import host_id
from spillway_kv.cluster.records import DaemonRecord, MemoryStore


def cluster_of(targets: Sequence[str], part_count: int = 1) -> ClusterClient:
    """A client of these daemons that splits its sequences into `part_count` parts."""
    directory = Directory(MemoryStore())
    for slot, target in enumerate(targets):
        directory.register(
            DaemonRecord("", slot, "node", host_id(), target, memory_limit_bytes=1 << 40)
        )
    placement = DirectoryPlacement(LocalDirectory(directory), part_count, 1, spillway_kv.connect)
    return ClusterClient(placement, "local:")
