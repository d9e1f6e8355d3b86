"""Rows fetched into arrays: through memory that the engine shares, and in messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import spillway_kv
import torch
from helpers import refused
from spillway_kv import BFloat16, Client, Model, Region, Selection, Sequence
from spillway_kv._proto import attention_service_pb2 as attention
from spillway_kv._proto import tensor_pb2 as tensors

MIB = 1 << 20
LAYERS, HEADS, DIM, TOKENS = 2, 2, 16, 1000  # as in the fixture `model`
INVALID, MISSING, RANGE = "INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE"
EVERY_TRANSPORT = pytest.mark.transports("messages", "doorbell", "regions", "embedded")
SPANS = [(0, TOKENS), (5, 6), (127, 129), (128, 256), (300, 999)]
# Edges of pages, neighbours, and the last token. Heads and pages have different numbers of rows.
CHOSEN = ([0, 1, 127, 128, 700, 999], [3])

Allocate = Callable[[tuple[int, ...]], Any]


@pytest.fixture
def region(client: Client) -> Iterator[Region]:
    region = client.attach_region(4 * MIB)
    yield region
    region.detach()


@pytest.fixture
def allocate(client: Client) -> Iterator[Allocate]:
    """Makes float32 arrays filled with poison, in memory that the engine can write to."""
    region = None if client.transport == "embedded" else client.attach_region(4 * MIB)

    def make(shape: tuple[int, ...]) -> Any:
        array = np.empty(shape, np.float32) if region is None else region.array(shape)
        array[:] = np.nan
        assert not array.size or client.connection.regions.slice_of(array) is not None
        return array

    yield make
    if region is not None:
        region.detach()


def filled(client: Client, model: Model, rng: np.random.Generator) -> tuple[Sequence, Any, Any]:
    """A sequence, and its K and V [LAYERS, HEADS, TOKENS, DIM]."""
    k, v = rng.standard_normal((2, LAYERS, HEADS, TOKENS, DIM), np.float32)
    sequence = client.create_sequence(model)
    sequence.append(0, 0, k, v)
    return sequence, k, v


def selection(*heads: list[int]) -> Selection:
    return Selection(
        offsets=np.cumsum([0, *map(len, heads)]),
        indices=np.concatenate([np.array(head, np.uint32) for head in heads]),
    )


def same(mine: Any, expected: Any) -> None:
    np.testing.assert_array_equal(np.asarray(mine), expected)


@EVERY_TRANSPORT
def test_tokens(client: Client, model: Model, allocate: Allocate, rng: np.random.Generator) -> None:
    sequence, k, v = filled(client, model, rng)
    for layer in range(LAYERS):
        for start, end in SPANS:
            shape = (HEADS, end - start, DIM)
            into = allocate(shape), allocate(shape)
            got = sequence.fetch(layer, start, end, into=into)
            assert got[0] is into[0]
            assert got[1] is into[1]
            for one, other in zip(got, (k, v), strict=True):
                same(one, other[layer, :, start:end])
    for one, other in zip(sequence.fetch(1), (k, v), strict=True):
        same(one, other[1])


@EVERY_TRANSPORT
def test_selected_rows(
    client: Client, model: Model, allocate: Allocate, rng: np.random.Generator
) -> None:
    sequence, k, v = filled(client, model, rng)
    for heads in (CHOSEN, ([], [5, 6]), ([5, 6], []), ([], []), ([*range(1000)], [7])):
        shape = (sum(map(len, heads)), DIM)
        into = allocate(shape), allocate(shape)
        sequence.fetch(1, selection=selection(*heads), into=into)
        for mine, all_rows in zip(into, (k, v), strict=True):
            same(mine, np.concatenate([all_rows[1, h, head] for h, head in enumerate(heads)]))
    chosen = sequence.select(0, rng.standard_normal((1, 4, DIM), np.float32))
    parts = np.split(chosen.indices, chosen.offsets[1:-1])
    for mine, all_rows in zip(sequence.fetch(0, selection=chosen), (k, v), strict=True):
        same(mine, np.concatenate([all_rows[0, h, part] for h, part in enumerate(parts)]))


@EVERY_TRANSPORT
def test_a_long_selection_is_split(
    client: Client, model: Model, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spillway_kv.fetching._SELECTED_MAX", 3)
    sequence, k, v = filled(client, model, rng)
    got = sequence.fetch(1, selection=selection(*CHOSEN))
    for mine, all_rows in zip(got, (k, v), strict=True):
        same(mine, np.concatenate([all_rows[1, h, head] for h, head in enumerate(CHOSEN)]))


@EVERY_TRANSPORT
def test_views_are_written_as_they_lie(
    client: Client, model: Model, allocate: Allocate, rng: np.random.Generator
) -> None:
    # The layout of models, [T, H, d], every second token, with K and V side by side.
    sequence, k, v = filled(client, model, rng)
    held = allocate((2 * TOKENS, 2, HEADS, DIM))
    views = tuple(held[::2, side].swapaxes(0, 1) for side in (0, 1))
    sequence.fetch(1, into=views)
    same(held[::2, 0].swapaxes(0, 1), k[1])
    same(held[::2, 1].swapaxes(0, 1), v[1])
    assert np.isnan(held[1::2]).all()
    rows = held.reshape(-1, DIM)[3:17:2]
    rows[:] = np.nan
    sequence.fetch(0, selection=selection(*CHOSEN), into=(rows, allocate((7, DIM))))
    same(rows, np.concatenate([k[0, h, head] for h, head in enumerate(CHOSEN)]))


@EVERY_TRANSPORT
def test_what_the_engine_does_not_see_is_filled_from_messages(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    sequence, k, v = filled(client, model, rng)
    into = np.empty((HEADS, DIM, TOKENS), np.float32).swapaxes(1, 2), np.empty_like(v[0])
    assert client.connection.regions.slice_of(into[0]) is None
    sequence.fetch(0, into=into)
    same(into[0], k[0])
    same(into[1], v[0])
    rows = np.empty((DIM, 7), np.float32).T
    sequence.fetch(1, selection=selection(*CHOSEN), into=(rows, np.empty((7, DIM), np.float32)))
    same(rows, np.concatenate([k[1, h, head] for h, head in enumerate(CHOSEN)]))


@EVERY_TRANSPORT
def test_kinds_and_element_types(client: Client, rng: np.random.Generator) -> None:
    numbers = rng.standard_normal((2, 1, HEADS, 300, DIM), np.float32)
    for dtype in ("float16", "bfloat16", "float32"):
        model = client.create_model(
            layer_count=1, query_head_count=4, kv_head_count=HEADS, head_dim=DIM, dtype=dtype
        )
        rows = torch.from_numpy(numbers).to(getattr(torch, dtype))
        sequence = client.create_sequence(model)
        sequence.append(0, 0, *rows)
        for mine, expected in zip(
            sequence.fetch(0, 10, like=rows), rows[:, 0, :, 10:], strict=True
        ):
            assert mine.dtype == rows.dtype
            assert torch.equal(mine, expected)
        made = sequence.fetch(0, 10)
        for mine, expected in zip(made, rows[:, 0, :, 10:], strict=True):
            if dtype == "bfloat16":
                assert isinstance(mine, BFloat16)
                same(mine.bits, expected.view(torch.uint16).numpy())
            else:
                same(mine, expected.numpy())
        with pytest.raises(
            ValueError, match=f"k has elements of .*, but the model's rows are {dtype}"
        ):
            other = np.float16 if dtype == "float32" else np.float32
            sequence.fetch(0, into=(np.zeros((HEADS, 300, DIM), other),) * 2)
        sequence.delete()
        client.delete_model(model)


def test_long_fetches_in_messages(client: Client, rng: np.random.Generator) -> None:
    # Each head needs several messages.
    model = client.create_model(
        layer_count=1, query_head_count=2, kv_head_count=2, head_dim=256, dtype="float32"
    )
    k, v = rng.standard_normal((2, 2, 1500, 256), np.float32)
    sequence = client.create_sequence(model)
    sequence.append(0, 0, k, v)
    every = selection([*range(1500)], [*range(1, 1500)])
    for got, expected in zip(sequence.fetch(0), (k, v), strict=True):
        same(got, expected)
    for got, expected in zip(sequence.fetch(0, selection=every), (k, v), strict=True):
        same(got, np.concatenate([expected[0], expected[1, 1:]]))
    sequence.delete()
    client.delete_model(model)


# Fetches while the sequence changes.


@EVERY_TRANSPORT
def test_rows_are_of_one_moment(client: Client, allocate: Allocate) -> None:
    model = client.create_model(
        layer_count=1, query_head_count=2, kv_head_count=2, head_dim=16, dtype="float32"
    )
    sequence = client.create_sequence(model)
    reader = client.get_sequence(sequence.name)
    shape = (2, 4000, 16)
    enough = threading.Event()

    def rewrite() -> None:
        number = 0
        while not enough.is_set():
            rows = np.full(shape, number, np.float32)
            sequence.append(0, 0, rows, -rows)
            sequence.truncate(0)
            number += 1

    k, v = allocate(shape), allocate(shape)
    writer = threading.Thread(target=rewrite)
    writer.start()
    seen = 0
    try:
        for _ in range(10_000):
            try:
                reader.fetch(0, 0, 4000, into=(k, v))
            except spillway_kv.OutOfRange:  # between a truncation and an append
                continue
            seen += 1
            number = k[0, 0, 0]
            assert (k == number).all()
            assert (v == -number).all()
            if seen == 20:
                break
    finally:
        enough.set()
        writer.join()
    assert seen == 20
    sequence.append(0, 0, np.ones(shape, np.float32), np.ones(shape, np.float32))
    reader.fetch(0, 0, 4000, into=(k, v))
    assert (k == 1).all()
    sequence.delete()
    client.delete_model(model)


def test_detached_after_it_was_asked_for(
    client: Client, model: Model, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence, k, v = filled(client, model, rng)
    region = client.attach_region(MIB)
    into = region.array((HEADS, TOKENS, DIM)), region.array((HEADS, TOKENS, DIM))
    into[0][:] = into[1][:] = 0
    stream, detach = sequence.state.stream, client.connection.regions._detach
    names: list[str] = []

    def stream_of_a_region_that_another_thread_detaches(*arguments: Any, **named: Any) -> Any:
        if not names:
            # The daemon does not know it yet, and writes to the region.
            region.detach()
        return stream(*arguments, **named)

    monkeypatch.setattr(client.connection.regions, "_detach", names.append)
    monkeypatch.setattr(sequence.state, "stream", stream_of_a_region_that_another_thread_detaches)
    sequence.fetch(0, into=into)
    assert names == [region.name]
    same(into[0], k[0])
    same(into[1], v[0])
    detach(region.name)


def test_detached_while_in_use(client: Client, model: Model, rng: np.random.Generator) -> None:
    sequence, k, _ = filled(client, model, rng)
    region = client.attach_region(MIB)
    into = region.array((HEADS, TOKENS, DIM)), region.array((HEADS, TOKENS, DIM))
    into[0][:] = 0
    outcome: list[Any] = []

    def fetch() -> None:
        try:
            outcome.append(sequence.fetch(0, into=into))
        except spillway_kv.NotFound as error:
            outcome.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    region.detach()
    thread.join()
    if isinstance(outcome[0], spillway_kv.NotFound):
        assert outcome[0].reason == "REGION_NOT_FOUND"
    else:
        same(into[0], k[0])


@EVERY_TRANSPORT
def test_leaves_nothing_behind(
    client: Client,
    model: Model,
    allocate: Allocate,
    no_leak: Callable[[], None],
    rng: np.random.Generator,
) -> None:
    sequence, k, _ = filled(client, model, rng)
    into = allocate((HEADS, TOKENS, DIM)), allocate((HEADS, TOKENS, DIM))
    sequence.fetch(0, into=into)
    with pytest.raises(spillway_kv.OutOfRange):
        sequence.fetch(0, 1, TOKENS + 1, into=into)
    sequence.delete()
    no_leak()
    same(into[0], k[0])


# Misuse.


def test_bad_arrays(client: Client, model: Model, rng: np.random.Generator) -> None:
    sequence, k, _ = filled(client, model, rng)
    good = np.empty((HEADS, 10, DIM), np.float32)
    read_only = good.copy()
    read_only.flags.writeable = False
    for into, told in (
        ((good[:, :9], good), r"k has shape \[2, 9, 16\], but the rows have \[2, 10, 16\]"),
        ((good, good[0]), r"v has shape \[10, 16\], but the rows have \[2, 10, 16\]"),
        ((read_only, good), "k is read-only"),
        (
            (good, np.zeros_like(good, np.float16)),
            "v has elements of float16, but the model's rows are float32",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            sequence.fetch(0, 0, 10, into=into)
    with pytest.raises(ValueError, match="no tokens to fetch: start 7, end 7"):
        sequence.fetch(0, 7, 7)
    with pytest.raises(ValueError, match="start and end, or selection, not both"):
        sequence.fetch(0, 0, 7, selection=selection([1], [2]))
    with pytest.raises(spillway_kv.InvalidArgument, match="layer"):
        sequence.fetch(2, 0, 7)
    same(sequence.fetch(0)[0], k[0])


SIZE = HEADS * 10 * DIM * 4  # bytes of ten tokens' K
BAD_SLICES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no name": ({"region": ""}, INVALID, "k.region"),
    "no such name": ({"region": "sequences/x"}, INVALID, "k.region"),
    "unknown": ({"region": "regions/unknown"}, MISSING, ""),
    "process": ({"region": "regions/process"}, MISSING, ""),
    "gpu": ({"region": "regions/gpu"}, MISSING, ""),
    "beyond": ({"offset": 4 * MIB - SIZE + 4}, INVALID, "k.offset"),
    "far beyond": ({"offset": 2**62}, INVALID, "k.offset"),
    "negative": ({"offset": -4}, INVALID, "k.offset"),
    "unaligned": ({"offset": 2}, INVALID, "k.offset"),
    "two strides": ({"strides": [64, 4]}, INVALID, "k.strides"),
    "a last stride": ({"strides": [640, 64, 8]}, INVALID, "k.strides"),
    "a negative stride": ({"strides": [-640, 64, 4]}, INVALID, "k.strides"),
    "an odd stride": ({"strides": [642, 64, 4]}, INVALID, "k.strides"),
    "strides beyond": ({"strides": [4 * MIB, 64, 4]}, INVALID, "k.offset"),
    "overflow": ({"strides": [640, 2**62, 4]}, INVALID, "k.strides"),
}


def request(sequence: Sequence, **fields: Any) -> attention.FetchPagesRequest:
    return attention.FetchPagesRequest(sequence=sequence.name, **fields)


def tokens(start: int, count: int) -> attention.TokenRange:
    return attention.TokenRange(start=start, count=count)


@pytest.mark.parametrize(("change", "code", "field"), BAD_SLICES.values(), ids=BAD_SLICES)
def test_bad_slices(
    client: Client,
    model: Model,
    region: Region,
    rng: np.random.Generator,
    change: dict[str, Any],
    code: str,
    field: str,
) -> None:
    sequence, _, _ = filled(client, model, rng)
    everything = region.array((MIB,))
    everything[:] = 7
    good: dict[str, Any] = {"region": region.name, "offset": 0}
    bad = tensors.RegionSlice(**{**good, **change})
    fetch = client.connection.stubs.attention.FetchPages
    for k, v in ((bad, tensors.RegionSlice(**good)), (tensors.RegionSlice(**good), bad)):
        asked = request(sequence, tokens=tokens(0, 10), k=k, v=v)
        error = refused(lambda asked=asked: list(fetch(asked)))  # type: ignore[misc]
        assert error.code == code, error
        expected = field if k is bad else field.replace("k.", "v.")
        assert [one.field for one in error.fields] == ([expected] if field else [])
    assert (everything == 7).all()


def test_an_answer_in_place_has_no_message(
    client: Client, model: Model, region: Region, rng: np.random.Generator
) -> None:
    sequence, k, v = filled(client, model, rng)
    shared = region.array((2, HEADS, 10, DIM))
    asked = request(
        sequence,
        tokens=tokens(990, 10),
        k=tensors.RegionSlice(region=region.name, offset=0),
        v=tensors.RegionSlice(region=region.name, offset=SIZE),
    )
    assert list(client.connection.stubs.attention.FetchPages(asked)) == []
    same(shared[0], k[0, :, 990:])
    same(shared[1], v[0, :, 990:])
    # All rows at the same place. This is the client's decision.
    asked.k.strides.extend([0, 0, 4])
    assert list(client.connection.stubs.attention.FetchPages(asked)) == []
    same(shared[1], v[0, :, 990:])


def test_bad_choices(
    client: Client, model: Model, region: Region, rng: np.random.Generator
) -> None:
    sequence, _, _ = filled(client, model, rng)
    place = tensors.RegionSlice(region=region.name)

    def chosen(offsets: list[int], *indices: int) -> dict[str, Any]:
        made = tensors.Tensor(
            dtype=tensors.DTYPE_U32,
            shape=[len(indices)],
            data=np.array(indices, np.uint32).tobytes(),
        )
        return {"selection": attention.Selection(offsets=offsets, indices=made)}

    cases: list[tuple[dict[str, Any], str, str, str]] = [
        ({"tokens": tokens(-1, 2)}, INVALID, "tokens.start", "value -1 "),
        ({"tokens": tokens(2**32, 1)}, INVALID, "tokens.start", "value 4294967296 "),
        ({"tokens": tokens(0, 0)}, INVALID, "tokens.count", "value 0 "),
        ({"tokens": tokens(0, -5)}, INVALID, "tokens.count", "value -5 "),
        ({"tokens": tokens(9, 2**63 - 1)}, INVALID, "tokens.count", "4294967286]"),
        ({"tokens": tokens(991, 10)}, RANGE, "", "token 1000 is not below the layer's length 1000"),
        (chosen([0, 2, 2], 5, 5), INVALID, "selection.indices", "5 after 5 is not ascending"),
        (chosen([0, 2, 2], 6, 5), INVALID, "selection.indices", "5 after 6 is not ascending"),
        (chosen([0, 1, 2], 0, 1000), RANGE, "", "KV head 1: token 1000 is not below"),
        (chosen([0, 3, 2], 1, 2), INVALID, "selection.offsets[1]", "value 3 is not in [0, 2]"),
        (chosen([0, 1], 1), INVALID, "selection.offsets", "3 values from 0"),
        (chosen([0, 1, 2**40], 1), INVALID, "selection.indices.shape", "1099511627776"),
        ({"tokens": tokens(0, 1), **chosen([0, 0, 0])}, INVALID, "tokens", "selection"),
    ]
    fetch = client.connection.stubs.attention.FetchPages
    for fields, code, field, told in cases:
        for places in ({}, {"k": place, "v": place}):
            asked = request(sequence, **fields, **places)
            error = refused(lambda asked=asked: list(fetch(asked)))  # type: ignore[misc]
            assert error.code == code, error
            assert [one.field for one in error.fields] == ([field] if field else [])
            assert told in error.message
            if code == RANGE:
                assert error.reason == "TOKEN_OUT_OF_RANGE"
                assert error.metadata["layer_token_count"] == "1000"
    halves: list[tuple[dict[str, Any], str]] = [({"k": place}, "v"), ({"v": place}, "k")]
    for half, field in halves:
        asked = request(sequence, tokens=tokens(0, 1), **half)
        error = refused(lambda asked=asked: list(fetch(asked)))  # type: ignore[misc]
        assert (error.code, error.fields[0].field) == (INVALID, field)
    asked = request(sequence, k=place, v=place)
    error = refused(lambda: list(client.connection.stubs.attention.FetchPages(asked)))
    assert (error.code, error.fields[0].field) == (INVALID, "tokens")
    assert "is not set, and selection is not either" in error.message
    # A count of tokens whose bytes overflow.
    far = request(sequence, tokens=tokens(0, 2**32 - 1), k=place, v=place)
    error = refused(lambda: list(client.connection.stubs.attention.FetchPages(far)))
    assert (error.code, error.fields[0].field) == (INVALID, "k.offset")


@pytest.mark.transports("embedded")
def test_memory_of_two_kinds_is_refused(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    sequence, k, _ = filled(client, model, rng)
    place = tensors.RegionSlice(region="regions/process", offset=k.__array_interface__["data"][0])
    asked = request(
        sequence, tokens=tokens(0, 1), k=place, v=tensors.RegionSlice(region="regions/gpu")
    )
    error = refused(lambda: list(client.connection.stubs.attention.FetchPages(asked)))
    assert (error.code, error.fields[0].field) == (INVALID, "v.region")
    assert "only one of k and v is in GPU memory" in error.message
