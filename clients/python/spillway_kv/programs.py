"""The programs of this package. Each needs an extra, and says so if it is missing."""

from __future__ import annotations

import sys
from importlib import import_module

from spillway_kv._extras import needs


def lab() -> None:
    """Runs `spillway-lab`."""
    _run("spillway-lab", "spillway_kv.lab.cli", "lab")


def cluster() -> None:
    """Runs `spillway-cluster`."""
    _run("spillway-cluster", "spillway_kv.cluster.cli", "ray")


def _run(program: str, module: str, extra: str) -> None:
    try:
        # Commands import what they need when they run.
        with needs(extra, program):
            import_module(module).main()
    except ModuleNotFoundError as error:
        sys.exit(str(error))
