"""Rows fetched into GPU memory by an embedded engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from daemon_process import on_gpu
from helpers import delete_model, refused
from spillway_kv import Client, Model, Selection, Sequence
from spillway_kv._proto import attention_service_pb2 as attention
from spillway_kv._proto import tensor_pb2 as tensors

GPU = on_gpu()
needs_gpu = pytest.mark.skipif(not GPU, reason="needs SPILLWAY_TEST_DEVICE=cuda:N")

LAYERS, KV_HEADS, DIM, TOKENS = 2, 3, 48, 5000
# All tokens, one token, across a page's edge, one whole page, and from the middle of a page on.
SPANS = [(0, TOKENS), (5, 6), (127, 129), (128, 256), (333, 4999)]


@pytest.fixture(params=["bfloat16", "float16", "float32"])
def model(engine: Client, request: pytest.FixtureRequest) -> Iterator[Model]:
    model = engine.create_model(
        layer_count=LAYERS,
        query_head_count=KV_HEADS,
        kv_head_count=KV_HEADS,
        head_dim=DIM,
        dtype=request.param,
    )
    yield model
    delete_model(engine, model)


def filled(engine: Client, model: Model, tokens: int = TOKENS) -> tuple[Sequence, torch.Tensor]:
    """A sequence, and its K and V [2, LAYERS, KV_HEADS, tokens, DIM]."""
    made = torch.randn(
        (2, LAYERS, KV_HEADS, tokens, DIM), generator=torch.Generator().manual_seed(3)
    )
    rows = made.to(getattr(torch, model.dtype))
    sequence = engine.create_sequence(model)
    sequence.append(0, 0, *rows)
    return sequence, rows


def poisoned(rows: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=rows.dtype, device="cuda")


def expect(mine: Any, rows: torch.Tensor) -> None:
    for one, expected in zip(mine, rows, strict=True):
        assert one.device.type == "cuda"
        assert torch.equal(one.cpu(), expected)


@needs_gpu
def test_tokens(engine: Client, model: Model) -> None:
    sequence, rows = filled(engine, model)
    for layer in range(LAYERS):
        for start, end in SPANS:
            shape = (KV_HEADS, end - start, DIM)
            into = poisoned(rows, *shape), poisoned(rows, *shape)
            assert engine.connection.regions.slice_of(into[0]) is not None
            got = sequence.fetch(layer, start, end, into=into)
            assert got[0] is into[0]
            expect(got, rows[:, layer, :, start:end])
    expect(sequence.fetch(1, like=into[0]), rows[:, 1])


@needs_gpu
def test_many_launches(engine: Client) -> None:
    # More pages and more selected rows than one launch takes.
    model = engine.create_model(
        layer_count=1, query_head_count=3, kv_head_count=3, head_dim=16, dtype="float16"
    )
    count = 130_000
    rows = torch.randn((2, 3, count, 16), generator=torch.Generator().manual_seed(5)).half()
    sequence = engine.create_sequence(model)
    sequence.append(0, 0, *rows)
    expect(sequence.fetch(0, 77, like=rows.cuda()), rows[:, :, 77:])
    heads = [np.arange(h, count, h + 1, dtype=np.uint32) for h in range(3)]
    chosen = Selection(offsets=np.cumsum([0, *map(len, heads)]), indices=np.concatenate(heads))
    expected = [torch.cat([rows[side, h, h :: h + 1] for h in range(3)]) for side in (0, 1)]
    expect(sequence.fetch(0, selection=chosen, like=rows.cuda()), torch.stack(expected))
    delete_model(engine, model)


@needs_gpu
def test_long_stretches(engine: Client) -> None:
    """After a long append, a head's rows are contiguous; after short ones, heads alternate."""
    model = engine.create_model(
        layer_count=1, query_head_count=2, kv_head_count=2, head_dim=128, dtype="float16"
    )
    count = 60_000  # 30 MiB per head
    rows = torch.randn((2, 2, count, 128), generator=torch.Generator().manual_seed(6)).half()
    sequence = engine.create_sequence(model)
    cuts = (25_000, 25_001, *range(25_128, 28_000, 128), count)
    start = 0
    for end in cuts:
        sequence.append(0, start, *rows[:, :, start:end])
        start = end
    for begin, end in ((0, count), (77, 59_900), (24_999, 28_001)):
        into = poisoned(rows, 2, end - begin, 2, 256)
        # [T, H_kv, d] in memory with gaps, and in C order.
        k, v = (side[:, :, 8:136].transpose(0, 1) for side in into)
        expect(sequence.fetch(0, begin, end, into=(k, v)), rows[:, :, begin:end])
        assert into[..., :8].isnan().all()
        assert into[..., 136:].isnan().all()
        expect(sequence.fetch(0, begin, end, like=into), rows[:, :, begin:end])
    delete_model(engine, model)


@needs_gpu
def test_selected_rows(engine: Client, model: Model) -> None:
    sequence, rows = filled(engine, model)
    heads: tuple[list[int], ...]
    for heads in (
        ([0, 1, 127, 128, 700, 4999], [], [3]),
        ([], [9], []),
        ([], [], []),
        ([*range(TOKENS)], [*range(0, TOKENS, 7)], [*range(1, TOKENS, 129)]),
    ):
        chosen = Selection(
            offsets=np.cumsum([0, *map(len, heads)]),
            indices=np.concatenate([np.array(head, np.uint32) for head in heads]),
        )
        count = sum(map(len, heads))
        into = poisoned(rows, count, DIM), poisoned(rows, count, DIM)
        sequence.fetch(1, selection=chosen, into=into)
        expected = [
            torch.cat([rows[side, 1, h, head] for h, head in enumerate(heads)]) for side in (0, 1)
        ]
        expect(into, torch.stack(expected))


@needs_gpu
def test_rows_that_a_query_on_the_gpu_selected(engine: Client, model: Model) -> None:
    sequence, rows = filled(engine, model)
    chosen = sequence.select(1, torch.ones((1, KV_HEADS, DIM), dtype=rows.dtype, device="cuda"))
    assert chosen.indices.device.type == "cuda"
    heads = [
        chosen.indices[begin:end].cpu()
        for begin, end in zip(chosen.offsets[:-1], chosen.offsets[1:], strict=True)
    ]
    expected = [
        torch.cat([rows[side, 1, h, head] for h, head in enumerate(heads)]) for side in (0, 1)
    ]
    expect(sequence.fetch(1, selection=chosen, like=rows.cuda()), torch.stack(expected))


@needs_gpu
def test_rows_that_came_from_the_gpu(engine: Client, model: Model) -> None:
    _, rows = filled(engine, model)
    sequence = engine.create_sequence(model)
    sequence.append(0, 0, *rows.cuda())
    expect(sequence.fetch(1, like=rows.cuda()), rows[:, 1])


@needs_gpu
def test_views_are_written_as_they_lie(engine: Client, model: Model) -> None:
    sequence, rows = filled(engine, model)
    held = poisoned(rows, 2 * TOKENS, 2, KV_HEADS, DIM)
    k, v = (held[::2, side].transpose(0, 1) for side in (0, 1))
    assert engine.connection.regions.slice_of(k) is not None
    sequence.fetch(0, into=(k, v))
    expect((k, v), rows[:, 0])
    assert held[1::2].isnan().all()


@needs_gpu
def test_rows_that_are_not_aligned_are_sent(engine: Client, model: Model) -> None:
    sequence, rows = filled(engine, model)
    wide = poisoned(rows, 2, KV_HEADS, TOKENS, DIM + 1)
    k, v = wide[..., 1:]
    assert engine.connection.regions.slice_of(k) is None
    sequence.fetch(0, into=(k, v))
    expect((k, v), rows[:, 0])
    assert wide[..., 0].isnan().all()


@needs_gpu
def test_waits_for_the_stream(engine: Client, model: Model) -> None:
    sequence, rows = filled(engine, model)
    into = poisoned(rows, KV_HEADS, TOKENS, DIM), poisoned(rows, KV_HEADS, TOKENS, DIM)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    into[0].zero_()
    sequence.fetch(0, into=into)
    expect(into, rows[:, 0])


def request(sequence: Sequence, k: int, v: int, region: str) -> attention.FetchPagesRequest:
    """A request to fetch ten tokens to these addresses."""
    return attention.FetchPagesRequest(
        sequence=sequence.name,
        tokens=attention.TokenRange(count=10),
        k=tensors.RegionSlice(region=region, offset=k),
        v=tensors.RegionSlice(region=region, offset=v),
    )


@needs_gpu
def test_other_memory_is_refused(engine: Client, model: Model) -> None:
    sequence, rows = filled(engine, model)
    there = poisoned(rows, KV_HEADS, 10, DIM)
    host = torch.zeros((KV_HEADS, 10, DIM), dtype=rows.dtype)
    fetch = engine.connection.stubs.attention.FetchPages
    for k, v, told in (
        (host.data_ptr(), there.data_ptr(), "k is not in the memory of cuda"),
        (there.data_ptr(), host.data_ptr(), "v is not in the memory of cuda"),
        (there.data_ptr(), there.data_ptr() + 8, "rows of v are not aligned to 16 bytes"),
    ):
        asked = request(sequence, k, v, "regions/gpu")
        error = refused(lambda asked=asked: list(fetch(asked)))  # type: ignore[misc]
        assert error.code == "INVALID_ARGUMENT"
        assert told in error.message
    assert there.isnan().all()
    assert (host == 0).all()
    expect(sequence.fetch(1, like=there), rows[:, 1])


@pytest.mark.skipif(GPU, reason="of the CPU device")
def test_the_cpu_device_refuses_gpu_memory(engine: Client, model: Model) -> None:
    sequence, _ = filled(engine, model, 20)
    asked = request(sequence, 4096, 8192, "regions/gpu")
    error = refused(lambda: list(engine.connection.stubs.attention.FetchPages(asked)))
    assert error.code == "INVALID_ARGUMENT"
    assert "k and v are in GPU memory, which the device cannot write" in error.message
