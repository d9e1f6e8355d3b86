"""The Ray actors of a cluster: one directory, and one for each daemon."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import ray
from ray.experimental import internal_kv

from spillway_kv.cluster.directory import Directory
from spillway_kv.cluster.directory_placement import connected
from spillway_kv.cluster.handle import DirectoryHandle
from spillway_kv.cluster.node import Drained, Node, host_id
from spillway_kv.cluster.process import DaemonProcess
from spillway_kv.cluster.records import DaemonRecord
from spillway_kv.cluster.settings import Settings

# Ray is asked about its nodes at most this often, seconds.
_NODES_SECONDS = 0.5
_TABLE = b"spillway"


class KvStore:
    """Ray's own key-value store. It outlives actors, and all nodes except the head node."""

    def __init__(self, prefix: str) -> None:
        """prefix: of all keys in this store."""
        self._prefix = prefix

    def put(self, key: str, value: bytes) -> None:
        internal_kv._internal_kv_put(self._key(key), value, overwrite=True, namespace=_TABLE)

    def delete(self, key: str) -> None:
        internal_kv._internal_kv_del(self._key(key), namespace=_TABLE)

    def items(self) -> Iterable[tuple[str, bytes]]:
        for key in internal_kv._internal_kv_list(self._prefix, namespace=_TABLE):
            value = internal_kv._internal_kv_get(key, namespace=_TABLE)
            if value is not None:
                yield key.decode().removeprefix(self._prefix), value

    def clear(self) -> None:
        """Deletes all keys."""
        internal_kv._internal_kv_del(self._prefix, del_by_prefix=True, namespace=_TABLE)

    def _key(self, key: str) -> bytes:
        return (self._prefix + key).encode()


class _Deaths:
    """Tells why a node of Ray is dead."""

    def __init__(self) -> None:
        self._asked = 0.0
        self._deaths: dict[str, str] = {}

    def __call__(self, node: str) -> str:
        if time.monotonic() - self._asked > _NODES_SECONDS:
            self._deaths = {
                each["NodeID"]: ""
                if each["Alive"]
                else str(each.get("DeathReasonMessage") or "it died")
                for each in ray.nodes()
            }
            self._asked = time.monotonic()
        return self._deaths.get(node, "Ray knows it no more")


def records_of(namespace: str, cluster: str = "") -> KvStore:
    """Returns the records of a cluster's directory; without `cluster`, of all in the namespace."""
    return KvStore(f"records:{namespace}:{cluster}")


def group_of(namespace: str) -> KvStore:
    """Returns the store that has the placement group of a cluster."""
    return KvStore(f"group:{namespace}:")


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class DirectoryActor:
    """Serves a `Directory`, one call at a time."""

    def __init__(self, namespace: str, cluster: str) -> None:
        self._directory = Directory(records_of(namespace, cluster), _Deaths())

    def call(self, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Calls a public method of the directory."""
        if method.startswith("_"):
            raise ValueError(f"{method} is no method of the directory")
        return getattr(self._directory, method)(*arguments, **named)

    def pid(self) -> int:
        """Returns the process id of this actor."""
        return os.getpid()


class _RemoteDirectory:
    """The directory as a node sees it: passes the methods of `NodeDirectory` to its actor."""

    def __init__(self, handle: DirectoryHandle) -> None:
        self._handle = handle

    def __getattr__(self, method: str) -> Any:
        return partial(self._handle.ask, method)


@ray.remote(max_restarts=-1, max_task_retries=-1)
class NodeActor:
    """Serves a `Node`. If Ray restarts it, it finds its daemon running, or starts it again."""

    def __init__(self, namespace: str, cluster: str, slot: int, settings: Settings) -> None:
        context = ray.get_runtime_context()
        node = context.get_node_id()
        address = ray.util.get_node_ip_address() if settings.listen == "tcp" else ""
        folder = settings.folder(context.gcs_address, namespace, slot)
        process = DaemonProcess(
            folder,
            settings.command(),
            address,
            cluster=cluster,
            arena=settings.arena(context.gcs_address, namespace, slot),
        )
        record = DaemonRecord("", slot, node, host_id(), process.target, process.local_target)
        self._node = Node(
            process,
            _RemoteDirectory(DirectoryHandle(namespace)),
            record,
            lambda other: connected(other, host_id(), settings.connect),
            has_token=bool(settings.token_file),
        )
        self._failure: Exception | None = None
        try:
            self._node.start()
        except Exception as error:  # noqa: BLE001  (for `start` to tell)
            self._failure = error
            # If Ray has restarted this actor, nobody calls `start`.
            self._node.keep_starting()

    def start(self) -> str:
        """Returns the daemon's name once it serves."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return self._node.start()

    def drain(self, own_only: bool) -> Drained:
        """See `Node.drain`."""
        return self._node.drain(own_only=own_only)

    def stop(self) -> None:
        """See `Node.stop`."""
        self._node.stop()

    def pids(self) -> tuple[int, int | None]:
        """Returns the process ids of this actor and of the daemon."""
        return os.getpid(), self._node.pid
