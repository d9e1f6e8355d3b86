"""A daemon whose memory is full: what it still does, and what is left after it is emptied."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np
import pytest
import spillway_kv
from daemon_process import on_gpu, running_daemon
from helpers import delete_model

LIMIT_BYTES = 128 << 20
LAYER_COUNT = 2
HEAD_COUNT = 4


@pytest.fixture
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[spillway_kv.Client]:
    """A new daemon for each test."""
    folder = tmp_path_factory.mktemp("full")
    with (
        running_daemon(folder, "--memory-limit", str(LIMIT_BYTES)) as target,
        spillway_kv.connect(target) as client,
    ):
        yield client


def new_model(client: spillway_kv.Client, head_dim: int = 128) -> spillway_kv.Model:
    return client.create_model(
        layer_count=LAYER_COUNT,
        query_head_count=HEAD_COUNT,
        kv_head_count=HEAD_COUNT,
        head_dim=head_dim,
        dtype="float32",
    )


def rows_of(model: spillway_kv.Model, token_count: int) -> np.ndarray:
    rng = np.random.default_rng(5)
    shape = (LAYER_COUNT, HEAD_COUNT, token_count, model.head_dim)
    return rng.standard_normal(shape, np.float32)


def fill(sequence: spillway_kv.Sequence, rows: np.ndarray) -> spillway_kv.ResourceExhausted:
    """Appends until the daemon refuses; returns the error."""
    with pytest.raises(spillway_kv.ResourceExhausted) as caught:
        for start in itertools.count(0, rows.shape[2]):
            sequence.append(0, start, rows, rows)
    return caught.value


def test_a_daemon_that_was_full_and_is_empty_takes_a_prompt(client: spillway_kv.Client) -> None:
    model = new_model(client)
    rows = rows_of(model, 500)
    # Two times: the second fill must get the memory that the first one released.
    token_counts = []
    for _ in range(2):
        sequence = client.create_sequence(model)
        fill(sequence, rows)
        token_counts.append(sequence.refresh().token_count)
        full = client.statistics().memory
        sequence.delete()
        empty = client.statistics().memory
        assert full.used_bytes > LIMIT_BYTES / 2
        assert empty.used_bytes < 1 << 20
        assert empty.row_bytes == empty.index_bytes == 0
        prompt = client.create_sequence(model)
        prompt.append(0, 0, rows_of(model, 4096), rows_of(model, 4096))
        assert prompt.refresh().token_count == 4096
        prompt.delete()
    assert token_counts[0] == token_counts[1] > 5000
    delete_model(client, model)


def test_what_one_model_leaves_another_takes(client: spillway_kv.Client) -> None:
    # Pages of 64, 32 and 160 KiB.
    rows_bytes = []
    for head_dim in (64, 32, 160):
        model = new_model(client, head_dim)
        sequence = client.create_sequence(model)
        fill(sequence, rows_of(model, 300))
        rows_bytes.append(client.statistics().memory.row_bytes)
        delete_model(client, model)
    assert min(rows_bytes) > 0.85 * max(rows_bytes)
    assert min(rows_bytes) > LIMIT_BYTES / 2


def test_a_full_daemon_attends_and_forks_and_shortens(client: spillway_kv.Client) -> None:
    model = new_model(client)
    sequence = client.create_sequence(model)
    # Smaller and smaller chunks, until there is no room for another page.
    for token_count in (500, 128, 1):
        rows = rows_of(model, token_count)
        with pytest.raises(spillway_kv.ResourceExhausted):
            for _ in range(10_000):
                start = sequence.refresh().token_count
                sequence.append(0, start, rows, rows)
    q = np.ones((8, HEAD_COUNT, 128), np.float32)
    for policy in (None, spillway_kv.Policy(selector="all")):
        assert sequence.attend(0, q, policy=policy).out.shape == q.shape
    copy = sequence.fork()
    copy.truncate(100)
    assert copy.refresh().token_count == 100
    copy.delete()
    sequence.truncate(1000)
    rows = rows_of(model, 500)
    sequence.append(0, 1000, rows, rows)
    assert sequence.refresh().token_count == 1500
    delete_model(client, model)


def test_memory_that_stays_free_goes_back_to_the_system(client: spillway_kv.Client) -> None:
    model = new_model(client)
    sequence = client.create_sequence(model)
    fill(sequence, rows_of(model, 500))
    full = client.statistics().memory.arena_committed_bytes
    assert full > LIMIT_BYTES / 2
    delete_model(client, model)
    # The memory is not released at once, because the next context would have to get it again.
    assert client.statistics().memory.arena_committed_bytes > full / 2
    deadline = time.monotonic() + 60
    while client.statistics().memory.arena_committed_bytes > 0:
        assert time.monotonic() < deadline, client.statistics().memory
        time.sleep(0.2)


def test_a_refusal_names_the_limit_and_who_holds_the_memory(client: spillway_kv.Client) -> None:
    model = new_model(client)
    small, large = (client.create_sequence(model) for _ in range(2))
    small.append(0, 0, rows_of(model, 100), rows_of(model, 100))
    error = fill(large, rows_of(model, 500))
    memory = client.statistics().memory
    held = large.refresh()
    # On a GPU, the index has its own memory.
    large_bytes = held.row_bytes + (0 if on_gpu() else held.index_bytes)
    assert error.needed_bytes is not None
    assert error.free_bytes is not None
    assert error.needed_bytes > error.free_bytes
    assert f"needs {error.needed_bytes} bytes" in error.message
    assert f"{error.free_bytes} bytes are free" in error.message
    assert f"limit of {LIMIT_BYTES} bytes, which --memory-limit sets" in error.message
    assert f"held by rows and codes {memory.used_bytes - memory.other_bytes}, " in error.message
    assert f"the largest is {large.name} with {large_bytes}" in error.message
    assert error.metadata["limit_bytes"] == str(LIMIT_BYTES)
    assert error.metadata["limit_setting"] == "--memory-limit"
    assert error.metadata["largest_sequence"] == large.name
    assert error.metadata["largest_sequence_bytes"] == str(large_bytes)
    delete_model(client, model)
