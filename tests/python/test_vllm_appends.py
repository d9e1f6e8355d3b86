"""Appends of prompts that run while the model computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from spillway_kv.prefill_kernels import copy_rows
from spillway_kv.vllm import appends as module
from spillway_kv.vllm.appends import Appends, Chunk

LAYERS, HEADS, DIM = 5, 2, 16
COUNTS = (3, 4, 2)


class Sequence:
    """What was appended: K and V [H_kv, T, d] by layer."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.calls = 0

    def append(self, first: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        assert start == 0
        self.calls += 1
        for i in range(k.shape[0]):
            assert first + i not in self.layers
            self.layers[first + i] = k[i].clone(), v[i].clone()


def at_once(append: Callable[[], None]) -> None:
    append()


def tensors(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer for all chunks, as views of the model's [T, H_kv, d]."""
    made = torch.arange(2 * sum(COUNTS) * HEADS * DIM).view(2, -1, HEADS, DIM) + 10_000 * layer
    k, v = made.float().transpose(1, 2)
    return k, v


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what was copied."""
    made: list[tuple[int, ...]] = []

    def counted(to: torch.Tensor, rows: torch.Tensor) -> None:
        made.append(tuple(rows.shape))
        copy_rows(to, rows)

    monkeypatch.setattr(module, "copy_rows", counted)
    return made


def chunks_of(sequences: list[Any]) -> list[Chunk]:
    chunks, begin = [], 0
    for key, (sequence, count) in enumerate(zip(sequences, COUNTS, strict=True)):
        chunks.append(Chunk(key, sequence, 0, begin, begin + count))
        begin += count
    return chunks


def test_chunks_beside_each_other_are_copied_together(copies: list[tuple[int, ...]]) -> None:
    layer_bytes = 2 * sum(COUNTS) * HEADS * DIM * 4
    # An append collects a third of the bytes: two layers.
    with closing(Appends(LAYERS, at_once, bytes_max=6 * layer_bytes)) as appends:
        sequences = [Sequence() for _ in COUNTS]
        chunks = chunks_of(sequences)
        for layer in range(LAYERS):
            # One of them is lost while the second append collects.
            chunks[1].lost = layer >= 3
            appends.add(chunks, layer, *tensors(layer), share=1.0)
        for key in (0, 2):
            appends.settle(key)
        appends.forget(1)
    assert copies == [(HEADS, sum(COUNTS), DIM)] * 2 * LAYERS
    assert [sequence.calls for sequence in sequences] == [3, 1, 3]
    for chunk, sequence in zip(chunks, sequences, strict=True):
        assert sorted(sequence.layers) == list(range(2 if chunk.lost else LAYERS))
        for layer, found in sequence.layers.items():
            wanted = (x[:, chunk.begin : chunk.end] for x in tensors(layer))
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_block_counts_until_its_last_append_has_ended(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer_bytes = 2 * sum(COUNTS) * HEADS * DIM * 4
    with closing(Appends(LAYERS, at_once, bytes_max=6 * layer_bytes)) as appends:
        gate = threading.Event()
        monkeypatch.setattr(Sequence, "append", lambda *_: gate.wait(60))
        chunks = chunks_of([Sequence() for _ in COUNTS])
        chunks[lost].lost = True
        for layer in range(2):
            assert appends._waiting_bytes() == 0
            appends.add(chunks, layer, *tensors(layer), share=1.0)
        assert appends._waiting_bytes() == 2 * layer_bytes
        gate.set()


def test_a_step_that_breaks_off_is_begun_again() -> None:
    with closing(Appends(LAYERS, at_once)) as appends:
        before, after = [Sequence() for _ in COUNTS], [Sequence() for _ in COUNTS]
        for layer in range(2):
            appends.add(chunks_of(before), layer, *tensors(layer), share=1.0)
        # Its requests are computed again: all of them, or without the first one.
        for key in range(3):
            appends.forget(key)
        for layer in range(LAYERS):
            appends.add(chunks_of(after)[1:], layer, *tensors(layer), share=1.0)
        for key in (1, 2):
            appends.settle(key)
        assert not appends._blocks
        assert appends.end_of(1) is None
    assert [sequence.calls for sequence in before] == [0, 0, 0]
    assert [sorted(sequence.layers) for sequence in after] == [[], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert torch.equal(after[2].layers[4][1], tensors(4)[1][:, 7:9])
