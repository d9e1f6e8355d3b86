"""Appends of a prompt that run in threads of a cache."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from helpers import wait_for
from spillway.transformers.appends import Appends
from spillway.transformers.rows import Row, RowStore


class _Collecting:
    """A sequence with whose append the garbage collector finalizes the cache, in that thread."""

    def __init__(self, store: RowStore) -> None:
        self.store = store
        self.said: list[str] = []

    def append(self, *_: Any) -> None:
        try:
            self.store.release()
            self.said.append("released")
        except RuntimeError as error:
            self.said.append(str(error))

    def delete(self) -> None:
        self.said.append("deleted")


def test_a_cache_that_is_finalized_in_its_own_thread_deletes_its_sequences() -> None:
    nothing: Any = None
    store = RowStore(
        nothing,
        nothing,
        model=None,
        policy=None,
        hash_weights=None,
        ttl=None,
        prefill_block_token_count=1024,
        config_fields={},
    )
    sequence = _Collecting(store)
    rows = torch.ones((1, 1, 16))
    store.rows = [Row(cast(Any, sequence))]
    store.appends.start(cast(Any, sequence), 0, 0, rows, rows)
    wait_for(lambda: len(sequence.said) == 2)
    assert sequence.said == ["deleted", "released"]


def test_a_cache_that_does_nothing_has_no_threads() -> None:
    appends = Appends()
    rows = torch.ones((1, 1, 16))
    gate = threading.Event()
    there: list[int] = []

    class _Waiting:
        def append(self, *_: Any) -> None:
            gate.wait(30)

        def _forget(self) -> None:
            there.append(threading.active_count())

    before = threading.active_count()
    sequence = cast(Any, _Waiting())
    for layer in range(8):
        appends.start(sequence, layer, 0, rows, rows)
    assert threading.active_count() == before + 4
    gate.set()
    appends.finish()
    assert len(there) == 8
    wait_for(lambda: threading.active_count() == before)
    # An error of an append is raised, and `abandon` forgets it.
    appends.start(cast(Any, SimpleNamespace(_forget=lambda: None)), 0, 0, rows, rows)
    with pytest.raises(AttributeError):
        appends.finish()
    appends.abandon()
    appends.finish()
    wait_for(lambda: threading.active_count() == before)
