"""Memory that client and daemon share: used, misused, and left behind."""

from __future__ import annotations

import mmap
import os
import re
import signal
import socket
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
from daemon_process import on_gpu, running_daemon
from helpers import delete_model, once_reached, refused, wait_for
from spillway_kv import Client, Model, Region, Sequence
from spillway_kv._proto import attention_service_pb2 as attention
from spillway_kv._proto import memory_service_pb2 as memory
from spillway_kv._proto import tensor_pb2 as tensors

MIB = 1 << 20
HEADS, DIM = 2, 16  # as in the fixture `model`, which has two layers and four query heads
INVALID, MISSING, RANGE = "INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE"
BOTH = pytest.mark.transports("doorbell", "embedded")


@pytest.fixture
def region(client: Client) -> Iterator[Region]:
    region = client.attach_region(4 * MIB)
    yield region
    region.detach()


def rows_of(sequence: Sequence, layer: int, count: int) -> Any:
    """All rows of a layer [H_kv, T, 2, d], as the daemon returns them."""
    return np.stack(sequence.fetch(layer, 0, count), axis=2)


def expect_rows(sequence: Sequence, k: Any, v: Any) -> None:
    """Checks the rows of both layers; k and v are [layers, H_kv, T, d]."""
    for layer in range(2):
        expected = np.stack([k[layer], v[layer]], axis=2)
        np.testing.assert_array_equal(rows_of(sequence, layer, k.shape[2]), expected)


def normal(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape, np.float32)


def test_appends_from_a_region(
    client: Client, model: Model, region: Region, rng: np.random.Generator
) -> None:
    k, v = region.array((2, HEADS, 300, DIM)), region.array((2, HEADS, 300, DIM))
    k[:], v[:] = normal(rng, *k.shape), normal(rng, *v.shape)
    sequence = client.create_sequence(model)
    # One message for both layers. It has no rows.
    assert sequence.append(0, 0, k, v).appended_chunk_count == 1
    expect_rows(sequence, k, v)
    assert sequence.append(0, 0, k, v).already_present_chunk_count == 1
    assert client.connection.regions.slice_of(k) is not None
    assert client.connection.regions.slice_of(k.copy()) is None


def test_a_region_has_tensors(client: Client, region: Region) -> None:
    half = region.tensor((3, 5), "bfloat16")
    assert (half.dtype, half.shape) == (torch.bfloat16, (3, 5))
    whole = region.tensor((2,), "float32")
    half.fill_(1)
    whole.fill_(2)
    assert half.float().sum() == 15
    assert client.connection.regions.slice_of(half[1:]) is not None
    with pytest.raises(ValueError, match="do not fit"):
        region.tensor((4 * MIB,))
    region.reset()
    assert region.tensor((2 * MIB,)).nbytes == 4 * MIB


@BOTH
def test_views_are_read_as_they_lie(client: Client, model: Model, rng: np.random.Generator) -> None:
    # The layout of models: [T, H, d], every second token.
    held = normal(rng, 2, 400, 2, HEADS, DIM)
    if client.transport != "embedded":
        shared = client.attach_region(MIB).array(held.shape)
        shared[:] = held
        held = shared
    k, v = (held[:, ::2, side].swapaxes(1, 2) for side in (0, 1))
    sequence = client.create_sequence(model)
    sequence.append(0, 0, k, v)
    expect_rows(sequence, k, v)
    as_torch = client.create_sequence(model)
    as_torch.append(0, 0, torch.from_numpy(k), torch.from_numpy(v))
    expect_rows(as_torch, k, v)


@BOTH
def test_what_cannot_be_read_in_place_is_sent(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    k, v = normal(rng, 2, HEADS, 50, DIM), normal(rng, 2, HEADS, 50, DIM)
    sequence = client.create_sequence(model)
    sequence.append(0, 0, k[..., ::-1][..., ::-1], np.asfortranarray(v))
    expect_rows(sequence, k, v)


@BOTH
def test_what_is_not_finite_is_named_and_appends_nothing(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    k, v = normal(rng, 2, HEADS, 300, DIM), normal(rng, 2, HEADS, 300, DIM)
    if client.transport != "embedded":
        region = client.attach_region(MIB)
        shared = region.array((2, *k.shape))
        shared[0], shared[1] = k, v
        k, v = shared
    sequence = client.create_sequence(model)
    sequence.append(0, 0, k[:, :, :10], v[:, :, :10])
    for bad, (layer, head, token, element), value in (
        (k, (1, 1, 299, 15), np.nan),
        (v, (0, 0, 130, 3), -np.inf),
    ):
        kept = bad[layer, head, token, element].copy()
        bad[layer, head, token, element] = value
        with pytest.raises(spillway_kv.OutOfRange) as caught:
            sequence.append(0, 10, k[:, :, 10:], v[:, :, 10:])
        error = caught.value
        assert error.reason == "NON_FINITE"
        what = "k" if bad is k else "v"
        assert [violation.field for violation in error.fields] == [f"chunk.{what}"]
        place = f"layer {layer}, KV head {head}, token {token}, element {element}"
        assert f"{what.upper()} is not finite at {place}" in error.message
        bad[layer, head, token, element] = kept
    assert sequence.refresh().layer_token_counts == (10, 10)
    sequence.append(0, 10, k[:, :, 10:], v[:, :, 10:])
    expect_rows(sequence, k, v)


# Misuse.


SIZE = HEADS * 10 * DIM * 4  # bytes of ten tokens' K in one layer
BAD_SLICES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no name": ({"region": ""}, INVALID, "chunk.k.region"),
    "no such name": ({"region": "sequences/x"}, INVALID, "chunk.k.region"),
    "unknown": ({"region": "regions/unknown"}, MISSING, ""),
    "process": ({"region": "regions/process"}, MISSING, ""),
    "beyond": ({"offset": 4 * MIB - SIZE + 4}, INVALID, "chunk.k.offset"),
    "far beyond": ({"offset": 2**62}, INVALID, "chunk.k.offset"),
    "negative": ({"offset": -4}, INVALID, "chunk.k.offset"),
    "unaligned": ({"offset": 2}, INVALID, "chunk.k.offset"),
    "three strides": ({"strides": [640, 64, 4]}, INVALID, "chunk.k.strides"),
    "a last stride": ({"strides": [0, 640, 64, 8]}, INVALID, "chunk.k.strides"),
    "a negative stride": ({"strides": [0, -640, 64, 4]}, INVALID, "chunk.k.strides"),
    "an odd stride": ({"strides": [0, 642, 64, 4]}, INVALID, "chunk.k.strides"),
    "strides beyond": ({"strides": [0, 4 * MIB, 64, 4]}, INVALID, "chunk.k.offset"),
    "overflow": ({"strides": [0, 640, 2**62, 4]}, INVALID, "chunk.k.strides"),
}


@pytest.mark.parametrize(("change", "code", "field"), BAD_SLICES.values(), ids=BAD_SLICES)
def test_bad_slices(
    client: Client,
    model: Model,
    region: Region,
    change: dict[str, Any],
    code: str,
    field: str,
) -> None:
    sequence = client.create_sequence(model)
    good: dict[str, Any] = {"region": region.name, "offset": 0}
    chunk = attention.KvChunk(sequence=sequence.name)
    for tensor, place in ((chunk.k, {**good, **change}), (chunk.v, good)):
        tensor.dtype = tensors.DTYPE_F32
        tensor.shape.extend([1, HEADS, 10, DIM])
        tensor.slice.CopyFrom(tensors.RegionSlice(**place))
    request = attention.AppendRequest(chunk=chunk)
    error = refused(lambda: client.connection.stubs.attention.Append(iter([request])))
    assert error.code == code, error
    assert [violation.field for violation in error.fields] == ([field] if field else [])
    assert sequence.refresh().token_count == 0


def filled(client: Client, model: Model, rng: np.random.Generator) -> Sequence:
    sequence = client.create_sequence(model)
    k, v = normal(rng, 2, HEADS, 20, DIM), normal(rng, 2, HEADS, 20, DIM)
    sequence.append(0, 0, k, v)
    return sequence


def tensor(region: str, offset: int, *shape: int, strides: tuple[int, ...] = ()) -> tensors.Tensor:
    place = tensors.RegionSlice(region=region, offset=offset, strides=strides)
    return tensors.Tensor(dtype=tensors.DTYPE_F32, shape=shape, slice=place)


def test_queries_and_outputs_in_a_region(
    client: Client, model: Model, region: Region, rng: np.random.Generator
) -> None:
    sequence = filled(client, model, rng)
    q, out, lse = region.array((3, 4, DIM)), region.array((3, 4, DIM)), region.array((3, 4))
    q[:] = normal(rng, 3, 4, DIM)
    expected = sequence.attend(0, q.copy())
    at = {id(a): a.__array_interface__["data"][0] - region.address for a in (q, out, lse)}
    places: dict[str, Any] = {
        "out": tensors.RegionSlice(region=region.name, offset=at[id(out)]),
        "lse": tensors.RegionSlice(region=region.name, offset=at[id(lse)]),
    }
    item = attention.AttendItem(
        sequence=sequence.name, q=tensor(region.name, at[id(q)], 3, 4, DIM), **places
    )
    (result,) = client.connection.stubs.attention.Attend(
        attention.AttendRequest(items=[item])
    ).results
    assert result.out.slice.region == region.name
    np.testing.assert_array_equal(out, expected.out)
    np.testing.assert_array_equal(lse, expected.lse)
    out[:], lse[:] = 0, 0
    # Transposed queries.
    turned = region.array((4, 3, DIM))
    turned[:] = q.swapaxes(0, 1)
    start = turned.__array_interface__["data"][0] - region.address
    item = attention.AttendItem(
        sequence=sequence.name,
        q=tensor(region.name, start, 3, 4, DIM, strides=(DIM * 4, 3 * DIM * 4, 4)),
        **places,
    )
    (result,) = client.connection.stubs.attention.Attend(
        attention.AttendRequest(items=[item])
    ).results
    assert result.status.code == 0
    np.testing.assert_array_equal(out, expected.out)
    np.testing.assert_array_equal(lse, expected.lse)


def test_bad_queries_and_outputs(
    client: Client, model: Model, region: Region, rng: np.random.Generator
) -> None:
    sequence = filled(client, model, rng)
    region.array((4 * MIB // 4,))[:] = 0

    def attend(**fields: Any) -> spillway_kv.SpillwayError:
        fields = {"q": tensor(region.name, 0, 1, 4, DIM), **fields}
        item = attention.AttendItem(sequence=sequence.name, **fields)
        return refused(
            lambda: client.connection.stubs.attention.Attend(attention.AttendRequest(items=[item]))
        )

    def fields_of(error: spillway_kv.SpillwayError) -> list[str]:
        return [violation.field for violation in error.fields]

    # 10^12 queries, all at the same place.
    many = attend(q=tensor(region.name, 0, 2**40, 4, DIM, strides=(0, DIM * 4, 4)))
    assert (many.code, fields_of(many)) == (INVALID, ["items[0].q.shape"])
    end = 4 * MIB - 4 * DIM * 4
    for place, field in (
        ({"offset": end + 4}, "items[0].out.offset"),
        ({"offset": end, "strides": [256, 64, 4]}, "items[0].out.strides"),
        ({"offset": -4}, "items[0].out.offset"),
    ):
        error = attend(out=tensors.RegionSlice(region=region.name, **place))
        assert (error.code, fields_of(error)) == (INVALID, [field])
    error = attend(lse=tensors.RegionSlice(region=region.name, offset=4 * MIB - 12))
    assert (error.code, fields_of(error)) == (INVALID, ["items[0].lse.offset"])
    assert attend(out=tensors.RegionSlice(region="regions/unknown")).code == MISSING
    # A request that accepts no slice.
    request = attention.FetchPagesRequest(
        sequence=sequence.name,
        selection=attention.Selection(offsets=[0, 1, 2], indices=tensor(region.name, 0, 2)),
    )
    assert (
        refused(lambda: list(client.connection.stubs.attention.FetchPages(request))).code == INVALID
    )


class Session:
    """A session of its own, by the socket and the calls that memory_service.proto describes."""

    def __init__(self, client: Client, target: str) -> None:
        self._stub = client.connection.stubs.memory
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(target.removeprefix("unix:") + ".regions")
        self._name = self._socket.recv(256).decode()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        self._socket.close()

    def attach(self, byte_count: int) -> str:
        request = memory.AttachRegionRequest(session=self._name, byte_count=byte_count)
        name: str = self._stub.AttachRegion(request).region.name
        return name

    def ask(self, name: str) -> tuple[bytes, int | None]:
        """What the socket tells of a region, and its descriptor."""
        self._socket.send(name.encode())
        told, descriptors, _, _ = socket.recv_fds(self._socket, 256, 1)
        return told, descriptors[0] if descriptors else None

    def detach(self, name: str) -> None:
        self._stub.DetachRegion(memory.DetachRegionRequest(session=self._name, name=name))


def test_sessions_and_regions_that_are_not_there(client: Client, region: Region) -> None:
    stub, session = client.connection.stubs.memory, client.connection.regions.session
    for call in (
        lambda: stub.AttachRegion(memory.AttachRegionRequest(session="none", byte_count=1)),
        lambda: stub.ListRegions(memory.ListRegionsRequest()),
        lambda: stub.DetachRegion(memory.DetachRegionRequest(name=region.name)),
    ):
        assert refused(call).reason == "SESSION_NOT_FOUND"
    for count in (0, -1, -(2**62)):
        request = memory.AttachRegionRequest(session=session, byte_count=count)
        error = refused(lambda request=request: stub.AttachRegion(request))  # type: ignore[misc]
        assert (error.code, error.fields[0].field) == (INVALID, "byte_count")
    request = memory.AttachRegionRequest(session=session, byte_count=2**62)
    assert refused(lambda: stub.AttachRegion(request)).code == "RESOURCE_EXHAUSTED"
    gone = memory.DetachRegionRequest(session=session, name="regions/none")
    assert refused(lambda: stub.DetachRegion(gone)).reason == "REGION_NOT_FOUND"
    listed = stub.ListRegions(memory.ListRegionsRequest(session=session)).regions
    assert region.name in [one.name for one in listed]


def test_a_session_has_its_own(client: Client, target: str, region: Region) -> None:
    with spillway_kv.connect(target) as other:
        theirs = other.attach_region(4096)
        stub, session = other.connection.stubs.memory, other.connection.regions.session
        listed = stub.ListRegions(memory.ListRegionsRequest(session=session)).regions
        assert [one.name for one in listed] == [theirs.name]
        taken = memory.DetachRegionRequest(session=session, name=region.name)
        assert refused(lambda: stub.DetachRegion(taken)).reason == "REGION_NOT_FOUND"
    # Its socket does not return another client's region either.
    with Session(client, target) as mine:
        assert mine.ask(region.name) == (b"this session has no such region", None)


def test_the_most_regions_of_a_session(target: str) -> None:
    with spillway_kv.connect(target) as client:
        for _ in range(256):
            client.attach_region(1)
        with pytest.raises(spillway_kv.ResourceExhausted, match="256 regions"):
            client.attach_region(1)


def other_bytes(client: Client) -> int:
    """Bytes of memory other than rows and codes. They include regions."""
    return client.statistics().memory.other_bytes


def test_detached_while_in_use(client: Client, model: Model, rng: np.random.Generator) -> None:
    region = client.attach_region(64 * MIB)
    count = 100_000
    k, v = region.array((1, HEADS, count, DIM)), region.array((1, HEADS, count, DIM))
    k[:], v[:] = normal(rng, *k.shape), normal(rng, *v.shape)
    k_sent, v_sent = k.copy(), v.copy()
    sequence = client.create_sequence(model)
    held = other_bytes(client)
    outcome: list[Any] = []

    def append() -> None:
        try:
            outcome.append(sequence.append(0, 0, k, v))
        except spillway_kv.NotFound as error:
            outcome.append(error)

    thread = threading.Thread(target=append)
    thread.start()
    time.sleep(0.01)
    region.detach()
    k[:], v[:] = 7, 7  # the daemon does not use these values any more, or only for some rows
    thread.join()
    if isinstance(outcome[0], spillway_kv.NotFound):
        assert outcome[0].reason == "REGION_NOT_FOUND"
        assert sequence.refresh().layer_token_counts == (0, 0)
    else:
        got = rows_of(sequence, 0, count)
        sent = np.stack([k_sent[0], v_sent[0]], axis=2)
        assert (got[got != sent] == 7).all()
    # Only the page tables of appended rows may remain.
    wait_for(lambda: other_bytes(client) < held - 60 * MIB)


def test_a_client_that_keeps_its_descriptors_holds_no_more_than_the_limit(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path, "--device", "cpu", "--memory-limit", "64MiB") as target,
        spillway_kv.connect(target) as client,
        Session(client, target) as mine,
    ):
        kept: list[mmap.mmap] = []
        with pytest.raises(spillway_kv.ResourceExhausted, match="a region needs"):
            while len(kept) < 10:
                name = mine.attach(16 * MIB)
                _, descriptor = mine.ask(name)
                assert descriptor is not None
                kept.append(mmap.mmap(descriptor, 16 * MIB))
                kept[-1].write(b"\7" * 16 * MIB)
                mine.detach(name)
                assert os.fstat(descriptor).st_blocks == 0
                assert kept[-1][0] == kept[-1][-1] == 0
                kept[-1].seek(0)
                kept[-1].write(b"\7" * 16 * MIB)
                os.close(descriptor)
        assert len(kept) == 3
        assert client.statistics().memory.used_bytes >= 48 * MIB
        for memory_of_region in kept:
            memory_of_region.close()
        client.attach_region(48 * MIB)


CHILD_KEEPS_NOTHING = """
import os, sys
import spillway_kv

client = spillway_kv.connect(sys.argv[1])
region = client.attach_region(32 << 20)
is_child = os.fork() == 0
if is_child:
    del region, client
else:
    region.array((1000,))[:] = 1
    client.close()
print("child" if is_child else "parent", flush=True)
# Both wait until nobody writes to their input any more.
sys.stdin.read()
os._exit(0)
"""


def test_a_child_keeps_none_of_its_parents_regions(client: Client, target: str) -> None:
    before = other_bytes(client)
    with subprocess.Popen(
        [sys.executable, "-c", CHILD_KEEPS_NOTHING, target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert sorted(process.stdout.readline() for _ in range(2)) == ["child\n", "parent\n"]
        wait_for(lambda: other_bytes(client) < before + MIB)
        process.stdin.close()


def test_arrays_in_a_detached_region_keep_their_content(client: Client, target: str) -> None:
    before = other_bytes(client)
    with spillway_kv.connect(target) as other:
        detached, closed = (other.attach_region(4 * MIB) for _ in range(2))
        arrays = [region.array((1000,)) for region in (detached, closed)]
        tensors_ = [region.tensor((1000,), "float32") for region in (detached, closed)]
        for value in (*arrays, *tensors_):
            value[:] = 3
        detached.detach()
        detached.detach()
    for value in (*arrays, *tensors_):
        assert (value == 3).all()
        value[:] = 4
        assert (value == 4).all()
    # Nothing of the regions is left in the daemon.
    wait_for(lambda: other_bytes(client) < before + MIB)


def test_a_detached_region_has_no_new_arrays(client: Client) -> None:
    region = client.attach_region(4096)
    region.detach()
    with pytest.raises(ValueError, match=f"{region.name} is detached"):
        region.array((1,))
    with pytest.raises(ValueError, match=f"{region.name} is detached"):
        region.tensor((1,))


def test_sessions_that_own_nothing_keep_nobody_out(client: Client, target: str) -> None:
    path = target.removeprefix("unix:") + ".regions"
    silent: list[socket.socket] = []
    try:
        for _ in range(1100):
            silent.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            silent[-1].connect(path)
            assert silent[-1].recv(256)
        with spillway_kv.connect(target) as other:
            other.attach_region(4096).detach()
        # The daemon has closed the oldest ones.
        assert silent[0].recv(1) == b""
    finally:
        for connection in silent:
            connection.close()


def test_changed_while_in_use(client: Client, model: Model, rng: np.random.Generator) -> None:
    region = client.attach_region(16 * MIB)
    count = 50_000
    k, v = region.array((1, HEADS, count, DIM)), region.array((1, HEADS, count, DIM))
    good = normal(rng, *k.shape)
    k[:], v[:] = good, good
    stop = threading.Event()

    def scribble() -> None:
        while not stop.is_set():
            k[0, :, ::7] = np.nan
            k[0, :, ::7] = good[0, :, ::7]

    thread = threading.Thread(target=scribble)
    thread.start()
    seen = set()
    try:
        for _ in range(20):
            sequence = client.create_sequence(model)
            try:
                sequence.append(0, 0, k, v)
                seen.add("appended")
            except spillway_kv.OutOfRange as error:
                seen.add(error.reason)
            length = sequence.refresh().layer_token_counts[0]
            assert length in (0, count)
            assert length == 0 or np.isfinite(rows_of(sequence, 0, count)).all()
            sequence.delete()
    finally:
        stop.set()
        thread.join()
        region.detach()
    assert "NON_FINITE" in seen
    assert seen <= {"NON_FINITE", "appended"}


def test_a_killed_client_leaves_nothing(client: Client, target: str) -> None:
    before = other_bytes(client)
    script = f"""
        import spillway_kv, sys, time
        client = spillway_kv.connect({target!r})
        region = client.attach_region(64 << 20)
        print(region.name, flush=True)
        time.sleep(60)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("regions/")
    assert other_bytes(client) >= before + 64 * MIB
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    wait_for(lambda: other_bytes(client) < before + MIB)


def test_a_daemon_that_restarted_knows_no_region(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as target:
        client = spillway_kv.connect(target)
        region = client.attach_region(MIB)
        k = region.array((HEADS, 10, DIM))
        k[:] = 1
    with running_daemon(tmp_path) as target:
        once_reached(client.health)
        model = client.create_model(
            layer_count=1, query_head_count=4, kv_head_count=HEADS, head_dim=DIM, dtype="float32"
        )
        sequence = client.create_sequence(model)
        with pytest.raises(spillway_kv.NotFound, match=region.name):
            sequence.append(0, 0, k, k)
        # With a new region, the client knows that the old one is gone: its array is sent.
        rows = client.attach_region(MIB).array((HEADS, 10, DIM))
        rows[:] = 2
        assert (k == 1).all()
        sequence.append(0, 0, k, k)
        sequence.append(0, 10, rows, rows)
        found = rows_of(sequence, 0, 20)
        assert (found[:, :10] == 1).all()
        assert (found[:, 10:] == 2).all()
        region.detach()
        sequence.truncate(0)
        with spillway_kv.connect(target) as anew:
            k = anew.attach_region(MIB).array((HEADS, 10, DIM))
            k[:] = 1
            anew.get_sequence(sequence.name).append(0, 0, k, k)
        delete_model(client, model)
        client.close()


def test_after_an_interrupt_a_region_is_given_back(
    target: str, model: Model, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    rows = normal(rng, 2, 2, HEADS, 50, DIM)
    with spillway_kv.connect(target) as client:
        sequence = client.create_sequence(model)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(client.connection.channel, "map_region", interrupted)
            client.attach_region(MIB)
        k, v = client.attach_region(MIB).array(rows.shape)
        k[:], v[:] = rows
        sequence.append(0, 0, k, v)
        expect_rows(sequence, *rows)
        assert own_regions(client) == 1


def test_only_regions_of_the_session_are_mapped(target: str) -> None:
    with spillway_kv.connect(target) as client, spillway_kv.connect(target) as other:
        mine, theirs = client.attach_region(MIB), other.attach_region(MIB)
        channel = client.connection.channel
        for name, told in (
            (theirs.name, "this session has no such region"),
            ("regions/none", "this session has no such region"),
        ):
            response = memory.AttachRegionResponse(
                region=memory.Region(name=name, byte_count=MIB)
            ).SerializeToString()
            with pytest.raises(spillway_kv.NotFound, match=told):
                channel.map_region(response)
        for nothing in (b"", b"\xff", memory.AttachRegionResponse().SerializeToString()):
            with pytest.raises(spillway_kv.InvalidArgument, match="no AttachRegionResponse"):
                channel.map_region(nothing)
        # The session goes on, and a region can be mapped twice.
        again = channel.map_region(
            memory.AttachRegionResponse(
                region=memory.Region(name=mine.name, byte_count=MIB)
            ).SerializeToString()
        )
        mine.array((4,))[:] = 7
        assert (np.asarray(again)[:16].view(np.float32) == 7).all()


def own_regions(client: Client) -> int:
    """How many regions the client's session has. The client itself has attached all of them."""
    request = memory.ListRegionsRequest(session=client.connection.regions.session)
    return len(client.connection.stubs.memory.ListRegions(request).regions)


def large(rng: np.random.Generator) -> tuple[Any, Any]:
    """K and V [2, H_kv, T, d] of 20,000 tokens: 10 MiB."""
    return normal(rng, 2, HEADS, 20_000, DIM), normal(rng, 2, HEADS, 20_000, DIM)


def two_layers(client: Client) -> Model:
    return client.create_model(
        layer_count=2, query_head_count=4, kv_head_count=HEADS, head_dim=DIM, dtype="float32"
    )


def test_large_appends_go_by_a_region_of_the_clients_own(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    k, v = large(rng)
    with running_daemon(tmp_path) as target, spillway_kv.connect(target) as client:
        sequence = client.create_sequence(two_layers(client))
        sequence.append(0, 0, k[:, :, :10], v[:, :, :10])
        assert client.connection.regions.session == ""  # that append was small
        result = sequence.append(0, 10, k[:, :, 10:], v[:, :, 10:])
        # The rows went through a region: they would not fit into one message.
        assert (result.appended_chunk_count, result.layer_token_counts) == (1, (20_000, 20_000))
        expect_rows(sequence, k, v)
        again = sequence.append(0, 10, k[:, :, 10:], v[:, :, 10:])
        assert (again.appended_chunk_count, again.already_present_chunk_count) == (0, 1)
        with pytest.raises(spillway_kv.AlreadyExists):
            sequence.append(0, 10, k[:, :, 10:], k[:, :, 10:])
        k[1, 1, 15_000, 3] = np.inf
        with pytest.raises(spillway_kv.OutOfRange):
            client.create_sequence(sequence.model).append(0, 0, k, v)
        assert own_regions(client) == 1
        # The daemon counts the region's memory, and releases it with the client.
        assert other_bytes(client) >= 16 * MIB
        with spillway_kv.connect(target) as other:
            client.close()
            wait_for(lambda: other_bytes(other) < 16 * MIB)


def test_large_appends_of_several_threads(tmp_path: Path, rng: np.random.Generator) -> None:
    with running_daemon(tmp_path) as target, spillway_kv.connect(target) as client:
        model = two_layers(client)
        rows = [large(rng) for _ in range(4)]
        sequences = [client.create_sequence(model) for _ in rows]
        threads = [
            threading.Thread(target=sequence.append, args=(0, 0, k, v))
            for sequence, (k, v) in zip(sequences, rows, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for sequence, (k, v) in zip(sequences, rows, strict=True):
            expect_rows(sequence, k, v)
        assert own_regions(client) == 1


def test_large_appends_after_a_restart(tmp_path: Path, rng: np.random.Generator) -> None:
    k, v = large(rng)
    with running_daemon(tmp_path) as target:
        client = spillway_kv.connect(target)
        client.create_sequence(two_layers(client)).append(0, 0, k, v)
        assert own_regions(client) == 1
    with running_daemon(tmp_path):
        once_reached(client.health)
        # first in messages, because the region is gone, then through a new region
        for _ in range(2):
            sequence = client.create_sequence(two_layers(client))
            sequence.append(0, 0, k, v)
            expect_rows(sequence, k, v)
        assert own_regions(client) == 1
        client.close()


def test_large_appends_where_there_is_no_memory_for_a_region(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    k, v = large(rng)
    with (
        running_daemon(tmp_path, "--memory-limit", "64MiB") as target,
        spillway_kv.connect(target) as client,
    ):
        region = client.attach_region(30 * MIB)
        sequence = client.create_sequence(two_layers(client))
        assert client.statistics().transport.rows == "regions"
        sequence.append(0, 0, k, v)
        expect_rows(sequence, k, v)
        assert own_regions(client) == 1  # only the test's region
        assert client.statistics().transport.rows == "messages"
        region.detach()


def test_an_append_goes_on_in_messages_when_memory_runs_out_on_the_way(tmp_path: Path) -> None:
    # A token has 4 KiB, which gives pieces of 4,032 tokens, or messages of 1,008. After the first
    # piece there is no memory for the second one, unless the client gives its region back.
    model: dict[str, Any] = {"layer_count": 1, "query_head_count": 8, "kv_head_count": 8}
    k = np.ones((8, 8190, 128), np.float16)
    with (
        running_daemon(tmp_path, "--memory-limit", "64MiB") as target,
        spillway_kv.connect(target) as client,
    ):
        sequence = client.create_sequence(
            client.create_model(**model, head_dim=128, dtype="float16")
        )
        assert sequence.append(0, 0, k, k).layer_token_counts == (8190,)
        assert client.statistics().transport.rows == "messages"


@pytest.mark.transports("embedded")
def test_an_embedded_engine_has_its_process_memory_alone(client: Client) -> None:
    with pytest.raises(ValueError, match="has no regions"):
        client.attach_region(MIB)
    request = memory.AttachRegionRequest(session="any", byte_count=1)
    assert (
        refused(lambda: client.connection.stubs.memory.AttachRegion(request)).code
        == "UNIMPLEMENTED"
    )


# GPU regions on a machine without a GPU. test_gpu_regions.py has the other tests.


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("cpu:0", "has no memory of its own"),
        ("cuda:99", "is not a device of the engine, which has: "),
        ("GPU-00000000-0000-0000-0000-000000000000", "is not a device of the engine, which has: "),
        ("cpu", "is not a device of the engine, which has: "),
    ],
)
def test_a_device_without_memory_of_its_own(client: Client, device: str, told: str) -> None:
    if on_gpu() and device == "cpu:0":
        pytest.skip("of a daemon without a GPU")
    client.attach_region(1).detach()
    request = memory.ListRegionsRequest(session=client.connection.regions.session)
    before, listed = other_bytes(client), client.connection.stubs.memory.ListRegions(request)
    with pytest.raises(spillway_kv.InvalidArgument, match=re.escape(told)) as caught:
        client.attach_region(MIB, device=device)
    assert [violation.field for violation in caught.value.fields] == ["device"]
    assert device in caught.value.message
    assert client.connection.stubs.memory.ListRegions(request) == listed
    # Messages of calls that have just ended may still be charged, in either figure.
    assert abs(other_bytes(client) - before) < 1024


def test_what_is_no_handle_is_not_mapped(client: Client) -> None:
    nowhere = "GPU-00000000-0000-0000-0000-000000000000"
    for handle, codes in ((b"short", {INVALID}), (bytes(64), {MISSING})):
        with pytest.raises(spillway_kv.SpillwayError) as caught:
            client.connection.channel.map_region(
                memory.AttachRegionResponse(
                    region=memory.Region(name="regions/1", byte_count=MIB, device=nowhere),
                    ipc_handle=handle,
                ).SerializeToString()
            )
        # A build without CUDA cannot map.
        assert caught.value.code in codes | {"UNIMPLEMENTED"}, caught.value
