"""Several nodes of Ray on this machine."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from daemon_process import binary
from ray.cluster_utils import Cluster
from spillway_kv.cluster import deploy
from spillway_kv.cluster.settings import Settings
from spillway_kv.lab import serving


class RayNodes:
    """A head without cores, and nodes of one core each. This process joins the cluster.

    Attributes:
        address: The address of the cluster.
    """

    def __init__(self, count: int) -> None:
        serving.prefer_library(binary())
        # Node actors take the path of the daemon from this variable.
        os.environ["SPILLWAYD"] = str(binary())
        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        self._nodes: list[Any] = [self._cluster.add_node(num_cpus=1) for _ in range(count)]
        self.address: str = self._cluster.address
        ray.init(address=self.address, log_to_driver=False, logging_level=logging.WARNING)

    def add(self, gpu_count: int = 0) -> None:
        """Adds a node, with GPUs of this machine."""
        self._nodes.append(self._cluster.add_node(num_cpus=1, num_gpus=gpu_count))

    def remove(self, node_id: str) -> None:
        """Kills a node at once, as if its machine were switched off."""
        node = next(each for each in self._nodes if each.node_id == node_id)
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """Ends all nodes."""
        ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def daemons(count: int, **options: Any) -> Iterator[list[str]]:
    """Runs daemons on as many nodes; yields their names, and ends them afterwards."""
    settings = Settings(
        daemon_count=count,
        strategy="STRICT_SPREAD",
        memory_limit="512MiB",
        **{"listen": "unix", **options},
    )
    try:
        yield deploy.up(settings)
    finally:
        deploy.down()


def program(nodes: RayNodes, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs spillway-cluster with these arguments."""
    return subprocess.run(
        [sys.executable, "-m", "spillway_kv.cluster.cli", *arguments, "--address", nodes.address],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "COLUMNS": "200"},
    )
