"""A client keeps little of an append that the daemon does not read."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import spillway_kv
from daemon_process import running_daemon
from helpers import process_of, resident_bytes_of, stopped


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[tuple[int, spillway_kv.Sequence]]:
    """A daemon's process, and a sequence of it to which a client appends in messages."""
    with running_daemon(tmp_path) as target, spillway_kv.connect(target) as client:
        client.connection.regions.staged_bytes_min = 1 << 62
        model = client.create_model(
            layer_count=1,
            query_head_count=1,
            kv_head_count=1,
            head_dim=128,
            dtype="float32",
            hash_weights=None,
        )
        yield process_of(target), client.create_sequence(model)


def test_a_daemon_that_reads_nothing_takes_no_memory_of_the_client(
    daemon: tuple[int, spillway_kv.Sequence],
) -> None:
    """An append of 256 MiB in messages, while the daemon is stopped for a second."""
    pid, sequence = daemon
    rows = np.ones((1, 1, 1 << 18, 128), np.float32)
    sequence.append(0, 0, rows[:, :, :1024], rows[:, :, :1024])
    thread = threading.Thread(
        target=lambda: sequence.append(0, 1024, rows, rows), name="append", daemon=True
    )
    before = resident_bytes_of(os.getpid())
    with stopped(pid):
        thread.start()
        most, until = 0, time.monotonic() + 1
        while time.monotonic() < until:
            most = max(most, resident_bytes_of(os.getpid()) - before)
            time.sleep(0.01)
        assert thread.is_alive()
    # 8 MiB that the call keeps, a message that is being made, and what gRPC buffers.
    assert 4 << 20 < most < 48 << 20
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert sequence.refresh().token_count == 1024 + (1 << 18)


def test_an_append_that_waits_ends_with_its_timeout(
    daemon: tuple[int, spillway_kv.Sequence],
) -> None:
    pid, sequence = daemon
    rows = np.ones((1, 1, 1 << 17, 128), np.float32)
    with stopped(pid):
        begin = time.monotonic()
        with pytest.raises(spillway_kv.DeadlineExceeded):
            sequence.append(0, 0, rows, rows, timeout=0.5)
        assert time.monotonic() - begin < 20
