"""Appends of K/V in GPU memory, to an embedded engine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from daemon_process import on_gpu
from helpers import delete_model, refused
from spillway_kv import Client, Model, OutOfRange, Policy, Sequence
from spillway_kv._proto import attention_service_pb2
from spillway_kv.tensors import dtype_number

GPU = on_gpu()
needs_gpu = pytest.mark.skipif(not GPU, reason="needs SPILLWAY_TEST_DEVICE=cuda:N")

LAYERS, HEADS, KV_HEADS, DIM = 3, 6, 2, 64


@pytest.fixture(
    params=[
        ("bfloat16", "model"),
        ("float16", "model"),
        ("float32", "model"),
        ("bfloat16", "int8"),
        ("float32", "int8"),
    ],
    ids=lambda param: "-".join(param),
)
def model(engine: Client, request: pytest.FixtureRequest) -> Iterator[Model]:
    dtype, row_type = request.param
    model = engine.create_model(
        layer_count=LAYERS,
        query_head_count=HEADS,
        kv_head_count=KV_HEADS,
        head_dim=DIM,
        dtype=dtype,
        row_type=row_type,
    )
    yield model
    delete_model(engine, model)


def rows(model: Model, tokens: int, seed: int = 2) -> torch.Tensor:
    """K and V [2, LAYERS, KV_HEADS, tokens, DIM] on the host."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn((2, LAYERS, KV_HEADS, tokens, DIM), generator=generator)
    return made.to(getattr(torch, model.dtype))


def answers(sequence: Sequence, model: Model) -> list[Any]:
    """Outputs that depend on rows and codes: by the default policy, and exact."""
    generator = torch.Generator().manual_seed(9)
    q = torch.randn((1, HEADS, DIM), generator=generator).to(getattr(torch, model.dtype))
    made = []
    for layer in range(LAYERS):
        for policy in (None, Policy(selector="all"), Policy(dense_token_count=1024)):
            result = sequence.attend(layer, q, policy=policy)
            made += [result.out.float(), result.certificate.relative_errors]
    return made


def expect_same(mine: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@needs_gpu
@pytest.mark.parametrize(
    "cuts",
    [
        (3000,),
        (20000,),  # several stages
        (100, 1000, 1029),  # the first pages fill in the second append
        (1023, 1024, 1025, 5000),
        (2047, 9000, 9001, 9130),
    ],
)
def test_gives_the_bits_of_appends_from_the_host(
    engine: Client, model: Model, cuts: tuple[int, ...]
) -> None:
    k, v = rows(model, cuts[-1])
    mine, theirs = (engine.create_sequence(model) for _ in range(2))
    start = 0
    for end in cuts:
        part = slice(start, end)
        # Views with the strides of the whole tensors.
        mine.append(0, start, k.cuda()[:, :, part], v.cuda()[:, :, part])
        theirs.append(0, start, k[:, :, part], v[:, :, part])
        start = end
        expect_same(answers(mine, model), answers(theirs, model))
    assert mine.refresh().layer_token_counts == (cuts[-1],) * LAYERS
    # Later appends continue after these.
    more = rows(model, 200, seed=4)
    for sequence in (mine, theirs):
        sequence.append(0, cuts[-1], *more)
    expect_same(answers(mine, model), answers(theirs, model))


@needs_gpu
def test_reads_what_the_stream_has_yet_to_write(engine: Client, model: Model) -> None:
    k, v = rows(model, 3000)
    mine, theirs = (engine.create_sequence(model) for _ in range(2))
    late_k, late_v = torch.zeros_like(k, device="cuda"), torch.zeros_like(v, device="cuda")
    there = k.cuda(), v.cuda()
    torch.cuda._sleep(200_000_000)
    late_k.copy_(there[0])
    late_v.copy_(there[1])
    mine.append(0, 0, late_k, late_v)
    late_k.zero_()
    theirs.append(0, 0, k, v)
    expect_same(answers(mine, model), answers(theirs, model))


@needs_gpu
@pytest.mark.parametrize("length", [500, 3000, 12000])
def test_an_element_that_is_not_finite_appends_nothing(
    engine: Client, model: Model, length: int
) -> None:
    k, v = rows(model, length)
    k[1, 1, 400, 7] = float("nan")
    v[1, 0, 400, 7] = float("inf")
    k[2, 0, 3, 1] = float("inf")
    sequence = engine.create_sequence(model)
    told = re.escape("V is not finite at layer 1, KV head 0, token 400, element 7")
    with pytest.raises(OutOfRange, match=told):
        sequence.append(0, 0, k.cuda(), v.cuda())
    assert sequence.refresh().layer_token_counts == (0,) * LAYERS
    good = rows(model, length)
    other = engine.create_sequence(model)
    sequence.append(0, 0, *good.cuda())
    other.append(0, 0, *good)
    expect_same(answers(sequence, model), answers(other, model))


@needs_gpu
def test_rows_that_are_not_aligned_are_copied(engine: Client, model: Model) -> None:
    k, v = rows(model, 1100)
    wide = torch.zeros((2, LAYERS, KV_HEADS, 1100, DIM + 1), dtype=k.dtype, device="cuda")
    wide[0, ..., 1:], wide[1, ..., 1:] = k.cuda(), v.cuda()
    mine, theirs = (engine.create_sequence(model) for _ in range(2))
    mine.append(0, 0, wide[0, ..., 1:], wide[1, ..., 1:])
    theirs.append(0, 0, k, v)
    expect_same(answers(mine, model), answers(theirs, model))


@needs_gpu
def test_rows_follow_what_is_there(engine: Client, model: Model) -> None:
    k, v = rows(model, 300).cuda()
    sequence = engine.create_sequence(model)
    sequence.append(0, 0, k, v)
    with pytest.raises(OutOfRange, match="rows in GPU memory can only follow them"):
        sequence.append(0, 200, k, v)
    with pytest.raises(OutOfRange, match="layer 0 has 300 tokens"):
        sequence.append(0, 400, k, v)
    # An address in host memory, and one that is not the GPU's.
    chunk = chunk_at(sequence, k.cpu().data_ptr(), 300)
    error = refused(lambda: append(engine, chunk))
    assert "k is not in the memory of cuda" in error.message
    assert sequence.refresh().layer_token_counts == (300,) * LAYERS


def chunk_at(sequence: Sequence, address: int, start: int) -> Any:
    """A chunk of one layer and ten tokens in GPU memory."""
    request = attention_service_pb2.AppendRequest()
    chunk = request.chunk
    chunk.sequence, chunk.token_start = sequence.name, start
    for tensor in (chunk.k, chunk.v):
        tensor.dtype = dtype_number(sequence.state.described().dtype)  # type: ignore[assignment]
        tensor.shape.extend((1, KV_HEADS, 10, DIM))
        tensor.slice.region, tensor.slice.offset = "regions/gpu", address
    return request


def append(engine: Client, request: Any) -> Any:
    return engine.connection.call(engine.connection.stubs.attention.Append, iter([request]))


@pytest.mark.skipif(GPU, reason="of the CPU device")
def test_the_cpu_device_refuses_gpu_memory(engine: Client, model: Model) -> None:
    sequence = engine.create_sequence(model)
    request = chunk_at(sequence, 4096, 0)
    error = refused(lambda: append(engine, request))
    assert error.code == "INVALID_ARGUMENT"
    assert "K and V are in GPU memory, which the device cannot read" in error.message
    request.chunk.v.slice.region = "regions/process"
    error = refused(lambda: append(engine, request))
    assert "only one of k and v is in GPU memory" in error.message
    assert sequence.refresh().layer_token_counts == (0,) * LAYERS


def test_attends_do_not_read_gpu_memory(engine: Client, model: Model) -> None:
    sequence = engine.create_sequence(model)
    sequence.append(0, 0, *rows(model, 5))
    request = attention_service_pb2.AttendRequest(layer=0)
    item = request.items.add(sequence=sequence.name)
    item.q.dtype = dtype_number(model.dtype)  # type: ignore[assignment]
    item.q.shape.extend((1, HEADS, DIM))
    item.q.slice.region, item.q.slice.offset = "regions/gpu", 4096
    error = refused(
        lambda: engine.connection.call(engine.connection.stubs.attention.Attend, request)
    )
    assert error.code == "INVALID_ARGUMENT"
    assert "regions/gpu is only for rows that Append reads or FetchPages writes" in error.message
