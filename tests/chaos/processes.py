"""Starts writers in their own processes, and makes folders in memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chaos.contents import LAYERS

TESTS = Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """The environment of a process that imports modules of the tests."""
    folders = [str(TESTS), str(TESTS / "python"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


class WriterProcess:
    """A writer (`chaos.writer`) that runs until it or its daemon is killed."""

    def __init__(self, target: str, tag: int, seed: int, how: str, *settings: str) -> None:
        self.tag = tag
        self._process = subprocess.Popen(
            [sys.executable, "-m", "chaos.writer", target, str(tag), str(seed), how, *settings],
            stdout=subprocess.PIPE,
            env=environment(),
        )
        self._acknowledged = [0] * LAYERS
        self._begun = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process ID."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith(b"\n"):
                self._acknowledged = [int(word) for word in line.split()]
                self._begun.set()

    def wait_until_it_writes(self) -> None:
        """Returns when the writer has printed its first acknowledged length."""
        if not self._begun.wait(60):
            raise RuntimeError(f"writer {self.tag} did not begin in a minute")

    def kill(self) -> list[int]:
        """Kills the writer; returns the acknowledged length of each layer."""
        self._process.kill()
        return self.ended()

    def ended(self) -> list[int]:
        """Waits for a writer that ends because its daemon is gone; returns the same lengths."""
        try:
            status = self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise RuntimeError(
                f"writer {self.tag} did not notice that its daemon is gone"
            ) from None
        self._reader.join(60)
        if status not in (75, -9):
            raise RuntimeError(f"writer {self.tag} ended with {status}")
        return self._acknowledged


@contextmanager
def small_file_system(folder: Path, size: str) -> Iterator[Path | None]:
    """Mounts a tmpfs of this size in a folder. Yields None if that is not allowed."""
    place = folder / "small"
    place.mkdir()
    options = f"size={size},mode=0700"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
