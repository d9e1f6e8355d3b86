"""Daemons with a directory in this process: a cluster without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import spillway_kv
from daemon_process import running_daemon
from spillway_kv.cluster import ClusterClient
from spillway_kv.cluster.directory import Directory
from spillway_kv.cluster.directory_placement import DirectoryPlacement, LocalDirectory, connected
from spillway_kv.cluster.node import Node, host_id
from spillway_kv.cluster.process import DaemonProcess
from spillway_kv.cluster.records import DaemonRecord, MemoryStore


class MortalDirectory(LocalDirectory):
    """A directory that tests may kill, and whose nodes may die."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.dead_nodes: dict[str, str] = {}
        super().__init__(self._started())

    def _started(self) -> Directory:
        return Directory(self.store, lambda node: self.dead_nodes.get(node, ""))

    def restart(self) -> None:
        """Replaces it by a new directory with the same store."""
        with self._lock:
            self._directory = self._started()

    def __getattr__(self, method: str) -> Any:
        return partial(self.ask, method)


class LocalCluster:
    """Daemons and their nodes.

    Attributes:
        directory: The directory of the daemons.
        nodes: The nodes, by the daemons' names.
    """

    def __init__(self, directory: MortalDirectory) -> None:
        self.directory = directory
        self.nodes: dict[str, Node] = {}

    def connect(
        self,
        part_count: int = 1,
        layer_groups: int = 1,
        owner: str = "",
        *,
        connect: Callable[[str], spillway_kv.Client] = spillway_kv.connect,
    ) -> ClusterClient:
        placement = DirectoryPlacement(self.directory, part_count, layer_groups, connect, owner)
        return ClusterClient(placement, "local")


def record(slot: int, target: str) -> DaemonRecord:
    """The record of a daemon on its own node."""
    return DaemonRecord("", slot, f"node-{slot}", host_id(), target, target)


class Served:
    """Stands for the process of a daemon that the test itself starts and ends."""

    def wait(self, seconds: float) -> bool:
        return threading.Event().wait(0.1)

    def start(self, timeout: float) -> None:
        pass

    def stop(self, grace: float) -> None:
        pass

    def clear(self) -> None:
        pass

    pid = None


@contextmanager
def local_cluster(
    folder: Path, count: int, *flags: str, command: list[str] | None = None
) -> Iterator[LocalCluster]:
    """Runs daemons, each as if on its own node.

    Args:
        folder: The folder for their files.
        count: The number of daemons.
        flags: The flags of each daemon.
        command: The command with which a node starts its daemon. The node then also watches and
            restarts it. None: the node does not start its daemon.
    """
    cluster = LocalCluster(MortalDirectory())
    with ExitStack() as stack:
        for slot in range(count):
            own = folder / str(slot)
            own.mkdir()
            process: Any
            if command is None:
                target = stack.enter_context(running_daemon(own, *flags))
                process = Served()
            else:
                process = DaemonProcess(
                    own, [*command, *flags], "", cluster="c", arena=Path(f"/dev/shm/{own.name}")
                )
                target = process.target
            node = Node(
                process,
                cluster.directory,
                record(slot, target),
                lambda other: connected(other, host_id(), spillway_kv.connect),
            )
            cluster.nodes[node.start()] = node
            stack.callback(node.stop)
        yield cluster
