"""A client keeps little of an append that the daemon does not read."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import spillway_kv
from daemon_process import running_daemon
from helpers import process_of
from spillway_kv.connection import wire


def resident() -> int:
    """Bytes of this process's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_daemon_that_reads_nothing_takes_no_memory_of_the_client(tmp_path: Path) -> None:
    """An append of 256 MiB in messages, while the daemon is stopped for a second."""
    rows = np.ones((1, 1, 1 << 18, 128), np.float32)
    with running_daemon(tmp_path) as target, spillway_kv.connect(target) as client:
        wire(client).regions.staged_bytes_min = 1 << 62
        model = client.create_model(
            layer_count=1,
            query_head_count=1,
            kv_head_count=1,
            head_dim=128,
            dtype="float32",
            hash_weights=None,
        )
        sequence = client.create_sequence(model)
        sequence.append(0, 0, rows[:, :, :1024], rows[:, :, :1024])
        daemon = process_of(target)
        thread = threading.Thread(
            target=lambda: sequence.append(0, 1024, rows, rows), name="append", daemon=True
        )
        before = resident()
        os.kill(daemon, signal.SIGSTOP)
        try:
            thread.start()
            most, until = 0, time.monotonic() + 1
            while time.monotonic() < until:
                most = max(most, resident() - before)
                time.sleep(0.01)
            assert thread.is_alive()
        finally:
            os.kill(daemon, signal.SIGCONT)
        # 8 MiB that the call keeps, a message that is being made, and what gRPC buffers.
        assert 4 << 20 < most < 48 << 20
        thread.join(timeout=60)
        assert not thread.is_alive()
        assert sequence.refresh().token_count == 1024 + (1 << 18)


def test_an_append_that_waits_ends_with_its_timeout(tmp_path: Path) -> None:
    rows = np.ones((1, 1, 1 << 17, 128), np.float32)
    with running_daemon(tmp_path) as target, spillway_kv.connect(target) as client:
        wire(client).regions.staged_bytes_min = 1 << 62
        model = client.create_model(
            layer_count=1, query_head_count=1, kv_head_count=1, head_dim=128, dtype="float32"
        )
        sequence = client.create_sequence(model)
        daemon = process_of(target)
        os.kill(daemon, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            with pytest.raises(spillway_kv.DeadlineExceeded):
                sequence.append(0, 0, rows, rows, timeout=0.5)
            assert time.monotonic() - begin < 20
        finally:
            os.kill(daemon, signal.SIGCONT)
