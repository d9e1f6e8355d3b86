"""Starts, shows, drains and ends the daemons of a cluster on a Ray cluster."""

from __future__ import annotations

import logging
import pickle
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import spillway_kv
from spillway_kv.cluster.actors import DirectoryActor, NodeActor, group_of, records_of
from spillway_kv.cluster.handle import DIRECTORY, DirectoryHandle
from spillway_kv.cluster.node import Drained
from spillway_kv.cluster.placement import Dealt
from spillway_kv.cluster.records import DaemonRecord
from spillway_kv.cluster.settings import Settings, check_namespace

NAMESPACE = "spillway"

_START_SECONDS = 180.0


@dataclass(frozen=True)
class Status:
    """The state of a cluster.

    Attributes:
        daemons: All daemons, also ended ones, ordered by slot.
        models: The models that clients have created.
        sequences: The daemons of each named sequence.
    """

    daemons: list[DaemonRecord]
    models: list[Dealt]
    sequences: dict[str, tuple[str, ...]]


def join(address: str = "auto") -> None:
    """Joins a Ray cluster, unless this process is already in one.

    Raises:
        Unavailable: There is no Ray cluster at the address.
    """
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError) as error:
        raise spillway_kv.Unavailable(
            f"no Ray cluster at {address!r} ({error}); ray start --head starts one"
        ) from None


def up(
    settings: Settings,
    namespace: str = NAMESPACE,
    *,
    timeout: float = _START_SECONDS,
    told: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Starts the directory and the daemons. This process must be in a Ray cluster.

    Args:
        settings: Settings of the daemons.
        namespace: Ray namespace. Each cluster of daemons has its own.
        timeout: Seconds that Ray may need to find free resources.
        told: Called with each message about progress.

    Returns:
        The daemons' names.

    Raises:
        AlreadyExists: There is a cluster in the namespace.
        ValueError: A setting is out of range.
        ResourceExhausted: Ray has too few free resources.
        SpillwayError: A daemon does not start. The message has the end of its log. All other
            daemons are ended again.
    """
    if settings.daemon_count < 1:
        raise ValueError(f"daemon_count {settings.daemon_count} is not 1 or more")
    check_namespace(namespace)
    # Separates the records of this cluster from those of earlier ones.
    cluster = secrets.token_hex(8)
    try:
        # If two clusters start at once, only one gets the name.
        directory = DirectoryActor.options(  # type: ignore[attr-defined]
            name=DIRECTORY, namespace=namespace, lifetime="detached"
        ).remote(namespace, cluster)
    except ValueError:
        raise spillway_kv.AlreadyExists(
            f"there is a Spillway cluster in Ray's namespace {namespace!r}; "
            "spillway-cluster down ends it"
        ) from None
    try:
        ray.get(directory.pid.remote(), timeout=_START_SECONDS)
        group = _placed(settings, namespace, timeout, told)
        return _started(settings, namespace, cluster, group, told)
    except BaseException as error:
        down(namespace)
        if isinstance(error, RayTaskError):
            raise spillway_kv.Unavailable(str(error.cause)) from None
        raise


def _placed(
    settings: Settings, namespace: str, timeout: float, told: Callable[[str], None]
) -> PlacementGroup:
    """Lets Ray reserve resources for the daemons."""
    _remove_group(namespace)
    group = placement_group(settings.bundles(), settings.strategy, lifetime="detached")
    # Stored, because Ray finds a group by name only in the namespace of the process that made it.
    group_of(namespace).put("group", pickle.dumps(group))
    told(f"waiting for Ray to find room for {settings.daemon_count} daemons")
    if not group.wait(timeout):
        raise spillway_kv.ResourceExhausted(
            f"Ray has no room for {settings.daemon_count} daemons of {settings.bundles()[0]} "
            f"({settings.strategy}) within {timeout:g} s; it has {ray.available_resources()}"
        )
    return group


def _started(
    settings: Settings,
    namespace: str,
    cluster: str,
    group: PlacementGroup,
    told: Callable[[str], None],
) -> list[str]:
    """Starts the daemons. Returns their names."""
    nodes = []
    for slot in range(settings.daemon_count):
        options = NodeActor.options(  # type: ignore[attr-defined]
            name=_node_name(slot),
            namespace=namespace,
            lifetime="detached",
            # Threads: the others answer calls while one drains.
            max_concurrency=4,
            num_cpus=settings.cpus,
            num_gpus=settings.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, slot),
        )
        nodes.append(options.remote(namespace, cluster, slot, settings))
    names = []
    for node in nodes:
        names.append(ray.get(node.start.remote(), timeout=_START_SECONDS))
        told(f"{names[-1]} serves")
    return names


def status(namespace: str = NAMESPACE) -> Status:
    """Returns the state of the cluster.

    Raises:
        Unavailable: There is no cluster in the namespace.
    """
    directory = DirectoryHandle(namespace)
    return Status(
        directory.ask("daemons"), directory.ask("models"), dict(directory.ask("sequences"))
    )


def node_of(daemon: str, namespace: str = NAMESPACE) -> Any:
    """Returns the Ray actor that watches a daemon.

    Raises:
        NotFound: There is no such daemon.
        Unavailable: There is no cluster in the namespace.
    """
    record: DaemonRecord = DirectoryHandle(namespace).ask("daemon", daemon)
    actor = _named(_node_name(record.slot), namespace)
    if actor is None or record.state in ("lost", "drained"):
        raise spillway_kv.NotFound(f"{daemon} is {record.state}")
    return actor


def drain(daemon: str, namespace: str = NAMESPACE, *, own_only: bool = False) -> Drained:
    """Moves all sequences of a daemon to other daemons, and ends it.

    Args:
        daemon: Name of the daemon, or id of its Ray node.
        namespace: Ray namespace of the cluster.
        own_only: As for `Node.drain`.

    Raises:
        NotFound: There is no such daemon.
        SpillwayError: As for `Node.drain`.
    """
    records = status(namespace).daemons
    live = [each for each in records if each.state in ("up", "draining")]
    names = [each.name for each in live if daemon in (each.name, each.node)]
    if not names:
        known = ", ".join(f"{each.name} on node {each.node}" for each in live)
        raise spillway_kv.NotFound(f"no daemon {daemon} serves; those that do: {known or 'none'}")
    drained = Drained()
    for name in names:
        try:
            one: Drained = ray.get(node_of(name, namespace).drain.remote(own_only))
        except RayTaskError as error:
            raise error.cause from None
        drained.moves.update(one.moves)
        drained.gone.extend(one.gone)
    return drained


def down(namespace: str = NAMESPACE, *, timeout: float = 60.0) -> None:
    """Ends all daemons and the directory. Their rows are lost. A second call is not an error.

    Args:
        namespace: Ray namespace of the cluster.
        timeout: Seconds for the daemons to end. Nodes that do not answer are left as they are.
    """
    slots = _slots(namespace)
    stops = []
    for slot in slots:
        actor = _named(_node_name(slot), namespace)
        if actor is not None:
            stops.append((actor, actor.stop.remote()))
    end = time.monotonic() + timeout
    for actor, stopped in stops:
        try:
            ray.get(stopped, timeout=max(1.0, end - time.monotonic()))
        except (RayError, GetTimeoutError):
            pass
        ray.kill(actor)
    directory = _named(DIRECTORY, namespace)
    if directory is not None:
        ray.kill(directory)
    records_of(namespace).clear()
    _remove_group(namespace)


def _slots(namespace: str) -> list[int]:
    """Returns the slots of the daemons that may exist."""
    names = ray.util.list_named_actors(all_namespaces=True)
    prefix = _node_name("")
    return sorted(
        int(each["name"].removeprefix(prefix))
        for each in names
        if each["namespace"] == namespace and each["name"].startswith(prefix)
    )


def _node_name(slot: int | str) -> str:
    return f"spillway-node-{slot}"


def _remove_group(namespace: str) -> None:
    """Releases the resources that Ray has reserved for the daemons."""
    store = group_of(namespace)
    for _, value in store.items():
        remove_placement_group(pickle.loads(value))  # noqa: S301  (of this cluster's own)
    store.clear()


def _named(name: str, namespace: str) -> Any:
    """Returns an actor by its name, or None."""
    try:
        return ray.get_actor(name, namespace)
    except ValueError:
        return None
