"""Regions of a GPU's memory, shared with a daemon by CUDA IPC: used, misused, left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv
import torch
from daemon_process import device, on_gpu, running_daemon
from helpers import delete_model, once_reached, refused, wait_for
from spillway_kv import Client, GpuRegion, Model, Policy, Selection, Sequence
from spillway_kv._proto import attention_service_pb2 as attention
from spillway_kv._proto import memory_service_pb2 as memory
from spillway_kv._proto import tensor_pb2 as tensors

pytestmark = pytest.mark.skipif(not on_gpu(), reason="needs SPILLWAY_TEST_DEVICE=cuda:N")

MIB = 1 << 20
LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 64
INVALID, MISSING = "INVALID_ARGUMENT", "NOT_FOUND"


def first_gpu() -> str:
    return device().split(",")[0]


@pytest.fixture(params=["bfloat16", "float16", "float32"])
def model(client: Client, request: pytest.FixtureRequest) -> Iterator[Model]:
    model = client.create_model(
        layer_count=LAYERS,
        query_head_count=HEADS,
        kv_head_count=KV_HEADS,
        head_dim=DIM,
        dtype=request.param,
    )
    yield model
    delete_model(client, model)


@pytest.fixture
def region(client: Client) -> Iterator[GpuRegion]:
    region = client.attach_region(64 * MIB, device=first_gpu())
    yield region
    region.detach()


def shared_bytes(client: Client) -> int:
    return sum(device.shared_used_bytes for device in client.get_server_info().devices)


def rows(model: Model, tokens: int, seed: int = 2) -> torch.Tensor:
    """K and V [2, LAYERS, KV_HEADS, tokens, DIM] on the host."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn((2, LAYERS, KV_HEADS, tokens, DIM), generator=generator)
    return made.to(getattr(torch, model.dtype))


def placed(region: GpuRegion, values: torch.Tensor, dtype: Any) -> torch.Tensor:
    """A copy of the values in the region."""
    tensor = region.tensor(tuple(values.shape), dtype)
    return tensor.copy_(values)


def beside(client: Client, model: Model, region: GpuRegion) -> Sequence:
    """A new sequence on the region's GPU. This matters if there are several GPUs."""
    row = region.tensor((1, model.kv_head_count, 1, model.head_dim), model.dtype).zero_()
    torch.cuda.synchronize()
    for _ in range(8):
        # A sequence on another GPU is kept, so that the next one is placed elsewhere.
        sequence = client.create_sequence(model)
        try:
            sequence.append(0, 0, row, row)
        except spillway_kv.InvalidArgument as error:
            if "is on cuda:" not in error.message:
                raise
            continue
        sequence.truncate(0)
        return sequence
    raise AssertionError("no sequence is placed on the region's GPU")


def answers(sequence: Sequence, model: Model) -> list[Any]:
    """Outputs that depend on rows and codes: by the default policy, and exact."""
    generator = torch.Generator().manual_seed(9)
    q = torch.randn((1, HEADS, DIM), generator=generator).to(getattr(torch, model.dtype))
    made = []
    for layer in range(LAYERS):
        for policy in (None, Policy(selector="all"), Policy(dense_token_count=1024)):
            result = sequence.attend(layer, q, policy=policy)
            made += [result.out.float(), result.lse, result.certificate.relative_errors]
    return made


def expect_same(mine: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_a_region_has_zeros_and_the_size_that_it_says(client: Client) -> None:
    before = shared_bytes(client)
    region = client.attach_region(3 * MIB + 1, device=first_gpu())
    assert region.byte_count == 4 * MIB
    assert shared_bytes(client) == before + 4 * MIB
    whole = region.tensor((MIB,), "float32")
    assert whole.device == torch.device(region.device)
    assert not whole.any()
    with pytest.raises(ValueError, match="do not fit"):
        region.tensor((1,), "float32")
    del whole
    region.detach()
    wait_for(lambda: shared_bytes(client) == before)
    with pytest.raises(ValueError, match="is detached"):
        region.tensor((1,), "float32")


def test_a_gpu_is_named_by_its_uuid_too(client: Client) -> None:
    uuid = client.server_info.devices[0].uuid
    region = client.attach_region(1, device=uuid)
    request = memory.ListRegionsRequest(session=client.connection.regions.session)
    (listed,) = [
        one
        for one in client.connection.stubs.memory.ListRegions(request).regions
        if one.name == region.name
    ]
    assert (listed.device, listed.byte_count) == (uuid, 2 * MIB)
    region.detach()


def test_two_regions_do_not_overlap(client: Client) -> None:
    one, other = (client.attach_region(2 * MIB, device=first_gpu()) for _ in range(2))
    assert abs(one.address - other.address) >= 2 * MIB
    first, second = (region.tensor((2 * MIB // 4,), "float32") for region in (one, other))
    first.fill_(1)
    second.fill_(2)
    assert bool((first == 1).all())
    del first, second
    one.detach()
    other.detach()


@pytest.mark.parametrize("cuts", [(3000,), (20000,), (100, 1000, 1029), (2047, 9000, 9001)])
def test_gives_the_bits_of_messages(
    client: Client, model: Model, region: GpuRegion, cuts: tuple[int, ...]
) -> None:
    k, v = rows(model, cuts[-1])
    there_k, there_v = (placed(region, x, model.dtype) for x in (k, v))
    mine, theirs = (client.create_sequence(model) for _ in range(2))
    start = 0
    for end in cuts:
        part = slice(start, end)
        one = there_k[:, :, part], there_v[:, :, part]
        assert client.connection.regions.slice_of(one[0]) is not None
        assert mine.append(0, start, *one).appended_chunk_count == 1
        theirs.append(0, start, k[:, :, part], v[:, :, part])
        start = end
        expect_same(answers(mine, model), answers(theirs, model))
    assert mine.refresh().layer_token_counts == (cuts[-1],) * LAYERS


def test_reads_what_the_stream_has_yet_to_write(
    client: Client, model: Model, region: GpuRegion
) -> None:
    k, v = rows(model, 3000)
    late = [region.tensor(tuple(x.shape), model.dtype).zero_() for x in (k, v)]
    there = k.cuda(), v.cuda()
    torch.cuda._sleep(200_000_000)
    for to, values in zip(late, there, strict=True):
        to.copy_(values)
    mine, theirs = (client.create_sequence(model) for _ in range(2))
    mine.append(0, 0, *late)
    theirs.append(0, 0, k, v)
    expect_same(answers(mine, model), answers(theirs, model))


def test_what_lies_in_none_goes_through_one_of_the_clients_own(target: str) -> None:
    with spillway_kv.connect(target) as client:
        model = client.create_model(
            layer_count=LAYERS,
            query_head_count=HEADS,
            kv_head_count=KV_HEADS,
            head_dim=DIM,
            dtype="bfloat16",
        )
        k, v = rows(model, 1500)
        mine, theirs = (client.create_sequence(model) for _ in range(2))
        there = k.cuda(), v.cuda()
        assert client.connection.regions.slice_of(there[0]) is None
        if len(client.server_info.devices) > 1:
            assert not client.connection.regions.stages(*there)
            return
        before = shared_bytes(client)
        # Views, whose rows are not contiguous.
        assert mine.append(0, 0, *(x[:, :, :1000] for x in there)).appended_chunk_count == 1
        assert shared_bytes(client) == before + 128 * MIB
        assert mine.append(0, 1000, *(x[:, :, 1000:] for x in there)).layer_token_counts == (
            1500,
            1500,
        )
        theirs.append(0, 0, k, v)
        expect_same(answers(mine, model), answers(theirs, model))
        # Rows that exist are compared, as always.
        assert mine.append(0, 0, *there).already_present_chunk_count > 0
        with pytest.raises(spillway_kv.AlreadyExists):
            mine.append(0, 0, there[1], there[0])
        k[0, 0, 3, 1] = float("nan")
        fresh = client.create_sequence(model)
        with pytest.raises(spillway_kv.OutOfRange, match="K is not finite at layer 0"):
            fresh.append(0, 0, k.cuda(), v.cuda())
        assert fresh.refresh().token_count == 0
        fresh.append(0, 0, *there)
        assert shared_bytes(client) == before + 128 * MIB
        delete_model(client, model)


def test_appends_beyond_what_the_clients_own_region_holds(client: Client) -> None:
    model = client.create_model(
        layer_count=2, query_head_count=8, kv_head_count=8, head_dim=128, dtype="float16"
    )
    # 2 layers of 96 MiB of K and V.
    values = torch.randn((2, 2, 8, 24_576, 128), generator=torch.Generator().manual_seed(1)).half()
    sequence = client.create_sequence(model)
    result = sequence.append(0, 0, *values.cuda())
    assert result.layer_token_counts == (24_576, 24_576)
    for layer in range(2):
        got = sequence.fetch(layer, like=values)
        assert torch.equal(got[0], values[0, layer])
        assert torch.equal(got[1], values[1, layer])
    delete_model(client, model)


def test_threads_append_at_once(client: Client, model: Model) -> None:
    values = [rows(model, 4000, seed).cuda() for seed in range(6)]
    sequences = [client.create_sequence(model) for _ in values]

    def append(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            sequences[index].append(0, 0, *values[index])

    torch.cuda.synchronize()
    threads = [threading.Thread(target=append, args=(i,)) for i in range(len(values))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for sequence, sent in zip(sequences, values, strict=True):
        got = sequence.fetch(1, like=sent.cpu())
        assert torch.equal(got[0], sent[0, 1].cpu())
        assert torch.equal(got[1], sent[1, 1].cpu())


def test_an_element_that_is_not_finite_appends_nothing(
    client: Client, model: Model, region: GpuRegion
) -> None:
    k, v = rows(model, 3000)
    k[1, 1, 400, 7] = float("nan")
    there = [placed(region, x, model.dtype) for x in (k, v)]
    sequence = client.create_sequence(model)
    with pytest.raises(spillway_kv.OutOfRange, match="K is not finite at layer 1") as caught:
        sequence.append(0, 0, *there)
    assert caught.value.reason == "NON_FINITE"
    assert sequence.refresh().layer_token_counts == (0,) * LAYERS


def test_rows_are_fetched_into_it(client: Client, model: Model, region: GpuRegion) -> None:
    count = 5000
    values = rows(model, count)
    sequence = client.create_sequence(model)
    sequence.append(0, 0, *values)
    for start, end in ((0, count), (5, 6), (127, 129), (333, 4999)):
        region.reset()
        shape = (KV_HEADS, end - start, DIM)
        into = [region.tensor(shape, model.dtype).fill_(float("nan")) for _ in range(2)]
        got = sequence.fetch(1, start, end, into=(into[0], into[1]))
        assert got[0] is into[0]
        for one, expected in zip(into, values[:, 1, :, start:end], strict=True):
            assert torch.equal(one.cpu(), expected)
    region.reset()
    heads = [[0, 1, 127, 128, 700, 4999], [3]]
    chosen = Selection(
        offsets=np.cumsum([0, *map(len, heads)]),
        indices=np.concatenate([np.array(head, np.uint32) for head in heads]),
    )
    into = [region.tensor((7, DIM), model.dtype).fill_(float("nan")) for _ in range(2)]
    sequence.fetch(0, selection=chosen, into=(into[0], into[1]))
    for one, side in zip(into, values[:, 0], strict=True):
        expected = torch.cat([side[h, head] for h, head in enumerate(heads)])
        assert torch.equal(one.cpu(), expected)


# Queries and outputs.


def tensor(
    region: GpuRegion, there: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...] = ()
) -> tensors.Tensor:
    place = tensors.RegionSlice(
        region=region.name, offset=there.data_ptr() - region.address, strides=strides
    )
    return tensors.Tensor(dtype=tensors.DTYPE_F32, shape=shape, slice=place)


def test_queries_and_outputs_in_it(client: Client, region: GpuRegion) -> None:
    model = client.create_model(
        layer_count=1, query_head_count=HEADS, kv_head_count=KV_HEADS, head_dim=DIM, dtype="float32"
    )
    sequence = client.create_sequence(model)
    generator = torch.Generator().manual_seed(4)
    sequence.append(0, 0, *torch.randn((2, 1, KV_HEADS, 2000, DIM), generator=generator))
    q = torch.randn((3, HEADS, DIM), generator=generator)
    expected = sequence.attend(0, q)
    there = placed(region, q, "float32")
    assert client.connection.regions.slice_on_gpu_of(there) is not None
    assert client.connection.regions.slice_on_gpu_of(q.cuda()) is None
    result_there = sequence.attend(0, there)
    assert result_there.out.device == there.device
    assert torch.equal(result_there.out.cpu(), expected.out)
    turned = placed(region, q.transpose(0, 1).contiguous(), "float32")
    torch.cuda.synchronize()
    for one, strides in ((there, ()), (turned, (DIM * 4, 3 * DIM * 4, 4))):
        out = region.tensor((3, HEADS, DIM), "float32").zero_()
        lse = region.tensor((3, HEADS), "float32").zero_()
        torch.cuda.synchronize()
        places: dict[str, Any] = {
            "out": tensor(region, out, (1,)).slice,
            "lse": tensor(region, lse, (1,)).slice,
        }
        asked = tensor(region, one, (3, HEADS, DIM), strides)
        item = attention.AttendItem(sequence=sequence.name, q=asked, **places)
        (result,) = client.connection.stubs.attention.Attend(
            attention.AttendRequest(items=[item])
        ).results
        assert result.status.code == 0, result.status
        assert result.out.slice.region == region.name
        assert torch.equal(out.cpu(), expected.out)
        assert torch.equal(lse.cpu(), expected.lse)
    delete_model(client, model)


def test_what_is_not_finite_is_found_in_it(client: Client, region: GpuRegion) -> None:
    model = client.create_model(
        layer_count=1, query_head_count=HEADS, kv_head_count=KV_HEADS, head_dim=DIM, dtype="float32"
    )
    sequence = client.create_sequence(model)
    sequence.append(0, 0, *torch.randn((2, 1, KV_HEADS, 20, DIM)))
    q = torch.zeros((1, HEADS, DIM))
    q[0, 2, 5] = float("inf")
    there = placed(region, q, "float32")
    torch.cuda.synchronize()
    item = attention.AttendItem(sequence=sequence.name, q=tensor(region, there, (1, HEADS, DIM)))
    request = attention.AttendRequest(items=[item])
    error = refused(lambda: client.connection.stubs.attention.Attend(request))
    assert (error.code, error.reason) == ("OUT_OF_RANGE", "NON_FINITE")
    delete_model(client, model)


# Misuse.


SIZE = KV_HEADS * 10 * DIM * 4  # bytes of ten tokens' K in one layer
BAD_SLICES: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown": ({"region": "regions/unknown"}, MISSING, ""),
    "of an embedded engine": ({"region": "regions/gpu"}, MISSING, ""),
    "beyond": ({"offset": 64 * MIB - SIZE + 4}, INVALID, "chunk.k.offset"),
    "far beyond": ({"offset": 2**62}, INVALID, "chunk.k.offset"),
    "negative": ({"offset": -4}, INVALID, "chunk.k.offset"),
    "half an element": ({"offset": 2}, INVALID, "chunk.k.offset"),
    "a last stride": ({"strides": [0, 10 * DIM * 4, DIM * 4, 8]}, INVALID, "chunk.k.strides"),
    "strides beyond": ({"strides": [0, 64 * MIB, DIM * 4, 4]}, INVALID, "chunk.k.offset"),
    "overflow": ({"strides": [0, DIM * 4, 2**62, 4]}, INVALID, "chunk.k.strides"),
    # Aligned to elements, but not to what kernels read at a time.
    "unaligned": ({"offset": 4}, INVALID, ""),
    "unaligned rows": ({"strides": [0, 10 * DIM * 4, DIM * 4 + 4, 4]}, INVALID, ""),
}


@pytest.mark.parametrize(("change", "code", "field"), BAD_SLICES.values(), ids=BAD_SLICES)
def test_bad_slices(
    client: Client, region: GpuRegion, change: dict[str, Any], code: str, field: str
) -> None:
    model = client.create_model(
        layer_count=1, query_head_count=HEADS, kv_head_count=KV_HEADS, head_dim=DIM, dtype="float32"
    )
    sequence = client.create_sequence(model)
    good: dict[str, Any] = {"region": region.name, "offset": 0}
    chunk = attention.KvChunk(sequence=sequence.name)
    for message, place in ((chunk.k, {**good, **change}), (chunk.v, good)):
        message.dtype = tensors.DTYPE_F32
        message.shape.extend([1, KV_HEADS, 10, DIM])
        message.slice.CopyFrom(tensors.RegionSlice(**place))
    request = attention.AppendRequest(chunk=chunk)
    error = refused(lambda: client.connection.stubs.attention.Append(iter([request])))
    assert error.code == code, error
    assert [violation.field for violation in error.fields] == ([field] if field else [])
    if not field and code == INVALID:
        assert "not aligned to 16 bytes" in error.message
    assert sequence.refresh().token_count == 0
    # K in the message and V in the region.
    chunk.k.ClearField("slice")
    chunk.k.data = bytes(SIZE)
    request = attention.AppendRequest(chunk=chunk)
    error = refused(lambda: client.connection.stubs.attention.Append(iter([request])))
    assert error.code == INVALID
    assert "only one of k and v is in GPU memory" in error.message
    delete_model(client, model)


@pytest.mark.skipif(len(device().split(",")) < 2, reason="two GPUs are not there")
def test_a_region_of_another_gpu(client: Client) -> None:
    names = [one.name for one in client.server_info.devices]
    regions = [client.attach_region(2 * MIB, device=name) for name in names]
    model = client.create_model(
        layer_count=1, query_head_count=HEADS, kv_head_count=KV_HEADS, head_dim=DIM, dtype="float32"
    )
    sequence = client.create_sequence(model)
    appended, told = 0, []
    for region in regions:
        k, v = (placed(region, torch.ones(1, KV_HEADS, 10, DIM), "float32") for _ in range(2))
        try:
            sequence.append(0, 10 * appended, k, v)
            appended += 1
        except spillway_kv.InvalidArgument as error:
            told.append((error.fields[0].field, error.message))
    assert appended == 1
    assert len(told) == len(regions) - 1
    for field, message in told:
        assert field == "chunk.k"
        assert "is in the memory of cuda:" in message
        assert "is on cuda:" in message
    delete_model(client, model)
    for region in regions:
        region.detach()


def test_detached_while_in_use(client: Client, model: Model) -> None:
    before = shared_bytes(client)
    region = client.attach_region(128 * MIB, device=first_gpu())
    values = torch.randn((2, 1, KV_HEADS, 60_000, DIM), generator=torch.Generator().manual_seed(1))
    values = values.to(getattr(torch, model.dtype))
    k, v = (placed(region, x, model.dtype) for x in values)
    torch.cuda.synchronize()
    sequence = beside(client, model, region)
    outcome: list[Any] = []

    def append() -> None:
        try:
            outcome.append(sequence.append(0, 0, k, v))
        except spillway_kv.NotFound as error:
            outcome.append(error)

    thread = threading.Thread(target=append)
    thread.start()
    time.sleep(0.005)
    region.detach()
    thread.join()
    if isinstance(outcome[0], spillway_kv.NotFound):
        assert outcome[0].reason == "REGION_NOT_FOUND"
        assert sequence.refresh().layer_token_counts == (0, 0)
    else:
        got = sequence.fetch(0, like=values)
        assert torch.equal(got[0], values[0, 0])
        assert torch.equal(got[1], values[1, 0])
    # The client's own kernels can still use this memory.
    assert torch.equal(k.cpu(), values[0])
    wait_for(lambda: shared_bytes(client) == before)
    # Other regions of the daemon have other memory.
    again = client.attach_region(128 * MIB, device=first_gpu())
    again.tensor((128 * MIB // 4,), "float32").fill_(3)
    assert torch.equal(k.cpu(), values[0])
    again.detach()


def test_changed_while_in_use(client: Client, model: Model) -> None:
    region = client.attach_region(64 * MIB, device=first_gpu())
    count = 30_000
    dtype = getattr(torch, model.dtype)
    good = torch.randn((1, KV_HEADS, count, DIM)).to(dtype).cuda()
    k, v = (region.tensor(tuple(good.shape), model.dtype).copy_(good) for _ in range(2))
    torch.cuda.synchronize()
    stop = threading.Event()

    def scribble() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not stop.is_set():
                k[:, :, ::7] = float("nan")
                k.copy_(good)
                stream.synchronize()

    thread = threading.Thread(target=scribble)
    thread.start()
    seen = set()
    try:
        for _ in range(20):
            sequence = beside(client, model, region)
            try:
                sequence.append(0, 0, k, v)
                seen.add("appended")
            except spillway_kv.OutOfRange as error:
                seen.add(error.reason)
            length = sequence.refresh().layer_token_counts[0]
            assert length in (0, count)
            if length:
                got = sequence.fetch(0, like=good)
                assert bool(torch.isfinite(got[0].float()).all())
            sequence.delete()
    finally:
        stop.set()
        thread.join()
        region.detach()
    assert seen <= {"NON_FINITE", "appended"}
    assert client.health()


def test_a_killed_client_leaves_nothing(client: Client, target: str) -> None:
    before = shared_bytes(client)
    script = f"""
        import spillway_kv, sys, time, torch
        client = spillway_kv.connect({target!r})
        region = client.attach_region(64 << 20, device={first_gpu()!r})
        tensor = region.tensor((16 << 20,), "float32").fill_(5)
        torch.cuda.synchronize()
        print(region.name, flush=True)
        while True:
            tensor += 1
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("regions/")
    assert shared_bytes(client) >= before + 64 * MIB
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    wait_for(lambda: shared_bytes(client) == before)
    assert client.health()


def test_the_gpus_limit_is_kept(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path, "--gpu-memory-limit", "1GiB") as target,
        spillway_kv.connect(target) as client,
    ):
        with pytest.raises(spillway_kv.ResourceExhausted, match="--gpu-memory-limit"):
            client.attach_region(2 << 30, device=first_gpu())
        client.attach_region(64 * MIB, device=first_gpu()).detach()


def test_a_daemon_that_restarted_knows_no_region(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as target:
        client = spillway_kv.connect(target)
        region = client.attach_region(2 * MIB, device=first_gpu())
        k = region.tensor((1, KV_HEADS, 10, DIM), "float32").fill_(1)
        torch.cuda.synchronize()
    with running_daemon(tmp_path) as target:
        once_reached(client.health)
        model = client.create_model(
            layer_count=1,
            query_head_count=HEADS,
            kv_head_count=KV_HEADS,
            head_dim=DIM,
            dtype="float32",
        )
        sequence = client.create_sequence(model)
        with pytest.raises(spillway_kv.NotFound, match=region.name):
            sequence.append(0, 0, k, k)
        # The memory that this process mapped is still valid.
        assert bool((k == 1).all())
        with spillway_kv.connect(target) as anew:
            fresh = anew.attach_region(2 * MIB, device=first_gpu())
            k = fresh.tensor((1, KV_HEADS, 10, DIM), "float32").fill_(1)
            beside(anew, model, fresh).append(0, 0, k, k)
        delete_model(client, model)
        client.close()
