"""Appends of a prompt that run in threads of a cache."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from helpers import wait_for
from interrupts import Interrupted
from spillway_kv.transformers import appends as module
from spillway_kv.transformers.appends import Appends
from spillway_kv.transformers.rows import Row, RowStore


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
    store = RowStore(nothing, nothing, policy=None, ttl=None, prefill_block_token_count=1024)
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
        def append(self, layer: int, *_: Any) -> None:
            gate.wait(30)
            there.append(layer)

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
    appends.start(cast(Any, SimpleNamespace()), 0, 0, rows, rows)
    with pytest.raises(AttributeError):
        appends.finish()
    appends.abandon()
    appends.finish()
    wait_for(lambda: threading.active_count() == before)


def test_after_an_interrupt_nothing_is_waited_for_that_does_not_end() -> None:
    rows = torch.ones((1, 1, 16))
    for line in itertools.count():
        appends = Appends()
        done: list[int] = []
        sequence = SimpleNamespace(append=lambda layer, *_: done.append(layer))  # noqa: B023

        def work(appends: Appends = appends, sequence: Any = sequence) -> None:
            for layer in range(6):
                appends.start(sequence, layer, 0, rows, rows)
            appends.wait_for(sequence, 2)
            appends.finish()

        hit = Interrupted(line, (str(module.__file__),)).run(work)
        abandons = threading.Thread(target=appends.abandon, daemon=True)
        abandons.start()
        abandons.join(30)
        assert not abandons.is_alive(), f"interrupted at line {line}"
        # What was started is done, in any order.
        assert sorted(done) == list(range(len(done)))
        appends.start(cast(Any, sequence), 6, 0, rows, rows)
        appends.finish()
        assert done[-1] == 6
        if not hit:
            break
    assert line > 60
    assert len(done) == 7
