"""Daemons whose rows outlive them, and a writer for their sequences."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import spillway_kv
from daemon_process import binary, device_flags
from spillway_kv.lab import serving

LAYERS, HEADS, DIM = 2, 2, 32
SHAPES: dict[str, Any] = {
    "layer_count": LAYERS,
    "query_head_count": 4,
    "kv_head_count": HEADS,
    "head_dim": DIM,
    "dtype": "float32",
}


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder in tmpfs, which is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="spillway-test-", dir="/dev/shm") as name:
        yield Path(name)


@dataclass
class Daemon:
    """Daemons with one address and one arena directory; one runs at a time."""

    served: serving.Daemon
    arena: Path

    @property
    def target(self) -> str:
        return self.served.target

    def start(self) -> None:
        self.served.start()

    def kill(self) -> None:
        """Kills the daemon, like a crash."""
        self.served.kill()

    def stop(self) -> None:
        """Ends the daemon normally."""
        assert self.served.end() == 0


def over(arena: Path, folder: Path, *flags: str) -> Daemon:
    """A daemon with an arena directory. It is not started."""
    own = ("--arena-directory", str(arena), "--snapshot-folder", "")
    flags = device_flags(*(flags or ("--memory-limit", "512MiB")))
    target, log = f"unix:{folder}/spillwayd.sock", folder / "spillwayd.log"
    return Daemon(serving.Daemon(binary(), target, log, *own, *flags, timeout=60), arena)


@contextmanager
def daemon(folder: Path, *flags: str) -> Iterator[Daemon]:
    """Runs a daemon with a new, empty arena directory."""
    with folder_in_memory() as arena:
        each = over(arena, folder, *flags)
        each.start()
        try:
            yield each
        finally:
            each.stop()


def rows(tag: int, start: int, count: int) -> np.ndarray:
    """K of a writer's tokens [start, start + count), [LAYERS, HEADS, count, DIM] float32.

    The rows of a token do not depend on the chunk that contains them.
    """
    token = np.arange(start, start + count, dtype=np.uint64)
    layer, head, dim = (np.arange(n, dtype=np.uint64) for n in (LAYERS, HEADS, DIM))
    mixed = (
        layer[:, None, None, None] * np.uint64(7919)
        + head[None, :, None, None] * np.uint64(104729)
        + token[None, None, :, None] * np.uint64(1299709)
        + dim[None, None, None, :] * np.uint64(15485863)
        + np.uint64(tag) * np.uint64(32452843)
    )
    mixed = (mixed ^ (mixed >> np.uint64(13))) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1.0).astype(np.float32)


@dataclass
class Writer:
    """Appends its own rows to a sequence, and remembers what was acknowledged."""

    tag: int
    name: str
    acknowledged: int = 0

    def append(self, sequence: spillway_kv.Sequence, count: int) -> None:
        k = rows(self.tag, self.acknowledged, count)
        sequence.append(0, self.acknowledged, k, -k)
        self.acknowledged += count

    def check(self, client: spillway_kv.Client) -> spillway_kv.Sequence:
        """Checks that all acknowledged rows are there, and that every row is this writer's."""
        sequence = client.get_sequence(self.name)
        for layer, length in enumerate(sequence.layer_token_counts):
            assert length >= self.acknowledged, (layer, length, self.acknowledged)
            if length == 0:
                continue
            k, v = sequence.fetch(layer, 0, length)
            expected = rows(self.tag, 0, length)[layer]
            np.testing.assert_array_equal(np.asarray(k), expected)
            np.testing.assert_array_equal(np.asarray(v), -expected)
        return sequence
