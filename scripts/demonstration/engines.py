"""The engines of the demo: in its process, in a daemon, or in two daemons on two Ray nodes."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import spillway_kv
from rich.console import Console
from spillway_kv.lab import serving

# The number of the token of the second answer at which a daemon is killed.
_KILLED_AT = 3


class Trouble(Protocol):
    """What happens to the daemons while a question is answered a second time."""

    def before(self, console: Console) -> None:
        """Is called between the two answers."""

    def on_token(self, number: int) -> None:
        """Is called at each token of the second answer; the first has number 0."""


class Restart:
    """Kills the daemon, which holds the prompt's K/V, and starts a new one."""

    def __init__(self, daemon: serving.Daemon) -> None:
        self._daemon = daemon

    def before(self, console: Console) -> None:
        killed = self._daemon.pid
        begin = time.perf_counter()
        self._daemon.kill()
        self._daemon.start()
        seconds = time.perf_counter() - begin
        console.print(
            f"  kill -9 {killed}; process {self._daemon.pid} serves after {seconds:.1f} s and "
            "has the prompt's K/V; the same question again:"
        )

    def on_token(self, number: int) -> None:
        pass


class KillOne:
    """Kills one of two daemons in the middle of the answer. Its node starts it again."""

    def __init__(self, daemon: str) -> None:
        self._daemon = daemon

    def _pid(self) -> int:
        import ray  # noqa: PLC0415
        from spillway_kv.cluster import deploy  # noqa: PLC0415

        _, pid = ray.get(deploy.node_of(self._daemon).pids.remote())
        return int(pid)

    def before(self, console: Console) -> None:
        self._killed = self._pid()
        console.print(
            f"  the same question again, and kill -9 {self._killed}, {self._daemon}, at token "
            f"{_KILLED_AT} of the answer:"
        )

    def on_token(self, number: int) -> None:
        if number == _KILLED_AT:
            os.kill(self._killed, signal.SIGKILL)


@contextmanager
def embedded(root: Path, device: str) -> Iterator[spillway_kv.Client]:
    """Yields a client with an engine in this process."""
    if "SPILLWAY_LIBRARY" not in os.environ:
        serving.prefer_library(serving.find_binary(root))
    with spillway_kv.connect(
        "embedded:", settings={"device.name": device, "models.sampling_seed": 0}
    ) as client:
        yield client


@contextmanager
def daemon(
    root: Path, device: str, log: Path, restart: bool
) -> Iterator[tuple[spillway_kv.Client, Trouble | None]]:
    """Runs a daemon, which writes the log. With `restart`, its rows outlive it in a folder."""
    with tempfile.TemporaryDirectory(prefix="spillway-demo-", dir="/dev/shm") as arena:
        kept = ("--arena-directory", arena) if restart else ()
        flags = ("--device", device, *kept)
        with (
            serving.restartable_daemon(
                serving.find_binary(root), log, *flags, timeout=30
            ) as served,
            spillway_kv.connect(served.target) as client,
        ):
            yield client, Restart(served) if restart else None


@contextmanager
def cluster(
    root: Path, device: str, folder: Path, console: Console
) -> Iterator[tuple[Any, Trouble | None]]:
    """Runs two daemons on two Ray nodes. They share the KV heads of every sequence."""
    import logging  # noqa: PLC0415

    import ray  # noqa: PLC0415
    from ray.cluster_utils import Cluster  # noqa: PLC0415
    from spillway_kv.cluster import deploy  # noqa: PLC0415
    from spillway_kv.cluster.settings import Settings  # noqa: PLC0415

    binary = serving.find_binary(root)
    serving.prefer_library(binary)
    with ExitStack() as stack:
        console.print("  starting two nodes of Ray in this machine ...")
        nodes = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        stack.callback(nodes.shutdown)
        for _ in range(2):
            nodes.add_node(num_cpus=1, num_gpus=int(device.startswith("cuda")))
        ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
        stack.callback(ray.shutdown)
        settings = Settings(
            daemon_count=2,
            strategy="STRICT_SPREAD",
            gpus=int(device.startswith("cuda")),
            listen="unix",
            memory_limit="2GiB",
            binary=str(binary),
            state_folder=str(folder.resolve()),
        )
        stack.callback(deploy.down)
        deploy.up(settings)
        client = stack.enter_context(spillway_kv.connect("ray:?parts=2"))
        for record in deploy.status().daemons:
            console.print(f"  {record.name} on node {record.node[:8]}: {record.target}")
        yield client, KillOne("daemon-1")
