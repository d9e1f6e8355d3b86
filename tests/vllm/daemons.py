"""A daemon that tests end and start again."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from types import TracebackType

import spillway_kv
from hardware import DAEMON

ROOT = Path(__file__).resolve().parents[2]


class Daemon:
    """A spillwayd on a socket in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.chmod(0o700)
        self.target = f"unix:{folder}/spillwayd.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Daemon:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(30)

    def start(self) -> None:
        """Starts the daemon and waits until it serves."""
        binary = os.environ.get("SPILLWAYD", str(ROOT / "build/release/daemon/spillwayd"))
        with (self._folder / "daemon.log").open("ab") as log:
            self._process = subprocess.Popen(
                [binary, "--listen", self.target, "--memory-limit", "4GiB", *DAEMON],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        until = time.monotonic() + 30
        while True:
            try:
                with spillway_kv.connect(self.target, timeout=5):
                    return
            except spillway_kv.Unavailable:
                assert self._process.poll() is None, "the daemon has ended"
                assert time.monotonic() < until, "the daemon does not serve"
                time.sleep(0.05)

    def kill(self) -> None:
        """Kills the daemon, and with it all its data."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def sequence_count(self) -> int:
        """The number of its sequences."""
        with spillway_kv.connect(self.target) as client:
            return sum(1 for _ in client.list_sequences())

    def token_count(self) -> int:
        """The number of tokens in all its sequences."""
        with spillway_kv.connect(self.target) as client:
            return sum(sequence.token_count for sequence in client.list_sequences())

    def kv_head_counts(self) -> list[int]:
        """The number of KV heads of each of its models."""
        with spillway_kv.connect(self.target) as client:
            return [model.kv_head_count for model in client.list_models()]
