"""Appends of a prompt that run in threads of a cache."""

from __future__ import annotations

from typing import Any, cast

import torch
from helpers import wait_for
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
    )
    sequence = _Collecting(store)
    rows = torch.ones((1, 1, 16))
    store.rows = [Row(cast(Any, sequence))]
    store.appends.start(cast(Any, sequence), 0, 0, rows, rows)
    wait_for(lambda: len(sequence.said) == 2)
    assert sequence.said == ["deleted", "released"]
