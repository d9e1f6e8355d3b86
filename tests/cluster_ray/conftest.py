"""A Ray cluster of several nodes on this machine, and daemons on them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/python"))

from ray_nodes import RayNodes  # noqa: E402


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """A head without cores, and three nodes of one core each."""
    made = RayNodes(3)
    yield made
    made.close()
