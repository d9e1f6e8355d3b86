"""Decode steps through a daemon's doorbell: refused, misused, interrupted and abandoned."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import decode_by_doorbell as runner
import numpy as np
import pytest
import spillway_kv
from daemon_process import on_gpu, running_daemon
from helpers import delete_model, refused, settles
from spillway_kv import Client, Model, Sequence
from spillway_kv._proto import attention_service_pb2 as attention
from spillway_kv._proto import memory_service_pb2 as memory

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 16  # as in the fixture `model`
BEGIN, ATTEND, RESULTS, END = 1, 2, 3, 4
OPEN, NEXT, ATTEND_ON_GPU, FINISH, DECODER_RESULTS, SUMS, CLOSE = range(5, 12)
F32 = 1
# Offsets from host/ipc/bell.h and services/doorbell/doorbell_memory.h.
RUNG, ANSWERED, CALL, ANSWER, TEXT, DATA = 0, 64, 128, 192, 256, 16 << 10
FUTEX, FUTEX_WAKE = {"x86_64": 202, "aarch64": 98}[platform.machine()], 1
CALL_FORM, ANSWER_FORM = "<IiIIIIqq", "<iIqq"


def normal(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape, np.float32)


def step_tensors(rng: np.random.Generator, count: int = 1) -> tuple[Any, Any, Any]:
    return (
        normal(rng, count, 1, HEADS, DIM),
        normal(rng, count, KV_HEADS, 1, DIM),
        normal(rng, count, KV_HEADS, 1, DIM),
    )


def expect_steps_answered(client: Client) -> None:
    """Runs a step with a new model, in which one token attends to itself."""
    model = client.create_model(
        layer_count=1, query_head_count=1, kv_head_count=1, head_dim=16, dtype="float32"
    )
    ones = np.ones((1, 1, 1, 16), np.float32)
    with client.begin_step([client.create_sequence(model)]) as step:
        np.testing.assert_array_equal(step.attend(0, ones, ones, ones)[0], ones)


def other_memory(client: Client) -> int:
    """Bytes of memory other than rows and codes. They include regions."""
    return client.statistics().memory.other_bytes


class RawDoorbell:
    """A client of a doorbell that can write anything to the shared memory."""

    def __init__(self, client: Client, byte_count: int = 0) -> None:
        path = client.target.removeprefix("unix:") + ".regions"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(path)
        self.session = self.socket.recv(256).decode()
        request = memory.AttachDoorbellRequest(session=self.session, byte_count=byte_count)
        self.region = client.connection.stubs.memory.AttachDoorbell(request).region
        self.socket.send(self.region.name.encode())
        _, (descriptor,), _, _ = socket.recv_fds(self.socket, 256, 1)
        self.memory = mmap.mmap(descriptor, self.region.byte_count)
        os.close(descriptor)
        self.rung = 0

    def call(
        self,
        kind: int,
        layer: int = 0,
        dtypes: tuple[int, int] = (F32, F32),
        offset: int = 0,
        byte_count: int = 0,
        data: bytes = b"",
    ) -> tuple[int, str]:
        """Rings and waits. Returns the code and the text of the answer."""
        self.memory[DATA : DATA + len(data)] = data
        struct.pack_into(
            CALL_FORM, self.memory, CALL, kind, layer, *dtypes, 1, 0, offset, byte_count
        )
        self.rung += 1
        struct.pack_into("<I", self.memory, RUNG, self.rung)
        number = ctypes.addressof(ctypes.c_uint32.from_buffer(self.memory, RUNG))
        everybody = ctypes.c_int(2**31 - 1)
        ctypes.CDLL(None).syscall(FUTEX, ctypes.c_void_p(number), FUTEX_WAKE, everybody, None)
        answered = functools.partial(struct.unpack_from, "<I", self.memory, ANSWERED)
        assert settles(lambda: answered() == (self.rung,), pause=0.0002)
        code, size, _, _ = struct.unpack_from(ANSWER_FORM, self.memory, ANSWER)
        return code, self.memory[TEXT : TEXT + size].decode(errors="replace")

    def close(self) -> None:
        self.memory.close()
        self.socket.close()


@pytest.fixture
def raw(client: Client) -> Iterator[RawDoorbell]:
    doorbell = RawDoorbell(client)
    yield doorbell
    doorbell.close()


def description(*sequences: Sequence) -> bytes:
    message = attention.DecodeStep(token_count=1)
    for sequence in sequences:
        message.parts.add(
            sequence=sequence.name,
            token_start=sequence.token_count,
            generation=sequence.generation,
        )
    return message.SerializeToString()


def test_it_is_what_carries_steps_and_is_kept(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    sequences = [client.create_sequence(model) for _ in range(2)]
    before = other_memory(client)
    with client.begin_step(sequences) as step:
        for layer in range(LAYERS):
            step.attend(layer, *step_tensors(rng, 2))
        taken = other_memory(client)
    assert client.step_transport == "doorbell"
    assert client.statistics().transport.steps == "doorbell"
    for _ in range(20):
        with client.begin_step(sequences) as step:
            for layer in range(LAYERS):
                step.attend(layer, *step_tensors(rng, 2))
    # Consecutive steps share one doorbell, which may have existed before.
    assert other_memory(client) == taken >= before


# Refused calls.


def test_none_where_no_memory_is_shared(tmp_path: Path) -> None:
    with running_daemon(tmp_path):
        # The socket for regions is not beside a link to the daemon's socket.
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "spillwayd.sock").symlink_to(tmp_path / "spillwayd.sock")
        with spillway_kv.connect(f"unix:{elsewhere}/spillwayd.sock") as client:
            assert client.step_transport == "doorbell"
            expect_steps_answered(client)
            assert client.step_transport == "messages"
            told = client.statistics().transport
            assert told.steps == "messages"
            assert "no doorbell: " in told.reason
            assert "spillwayd.sock.regions: No such file" in told.reason


def test_doorbells_are_refused(client: Client, engine: Client) -> None:
    call = client.connection.stubs.memory.AttachDoorbell
    for session, byte_count, code in (
        ("", 1, "NOT_FOUND"),
        ("no-session", 1, "NOT_FOUND"),
        ("no-session", 2**63 - 1, "INVALID_ARGUMENT"),
        ("no-session", -1, "INVALID_ARGUMENT"),
    ):
        request = memory.AttachDoorbellRequest(session=session, byte_count=byte_count)
        assert refused(functools.partial(call, request)).code == code
    request = memory.AttachDoorbellRequest(session="x", byte_count=1)
    assert (
        refused(lambda: engine.connection.stubs.memory.AttachDoorbell(request)).code
        == "UNIMPLEMENTED"
    )


def test_memory_and_the_number_of_doorbells_are_bounded(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "--memory-limit", "64MiB") as target, ExitStack() as stack:
        client = stack.enter_context(spillway_kv.connect(target))
        error = refused(lambda: RawDoorbell(client, byte_count=1 << 40))
        assert error.code == "RESOURCE_EXHAUSTED"
        doorbells: list[RawDoorbell] = []
        with pytest.raises(Exception, match="RESOURCE_EXHAUSTED|--memory-limit"):
            while len(doorbells) < 600:
                doorbells.append(RawDoorbell(client))
        assert 100 < len(doorbells) < 600
        before = other_memory(client)
        for doorbell in doorbells:
            doorbell.close()
        assert settles(lambda: other_memory(client) <= before - len(doorbells) * (128 << 10))
        RawDoorbell(client).close()


# Wrong contents of the shared memory.


def test_calls_that_make_no_sense(raw: RawDoorbell, client: Client, model: Model) -> None:
    sequence = client.create_sequence(model)
    named = description(sequence)
    for code, said, call in (
        (3, "0 is no call", {"kind": 0}),
        (3, "4294967295 is no call", {"kind": 2**32 - 1}),
        (9, "no step has begun", {"kind": ATTEND}),
        (9, "no step has begun", {"kind": RESULTS}),
        (0, "", {"kind": END}),
        (3, "not in [0, ", {"kind": BEGIN, "byte_count": -1}),
        (3, "not in [0, ", {"kind": BEGIN, "byte_count": 2**63 - 1}),
        (
            3,
            "not a serialised spillway.v1.DecodeStep",
            {"kind": BEGIN, "byte_count": 9, "data": b"\xff" * 9},
        ),
        (3, "0 sequences are not in [1, 256]", {"kind": BEGIN}),
        (0, "", {"kind": BEGIN, "byte_count": len(named), "data": named}),
        (3, "value 2 is not in [0, 2)", {"kind": ATTEND, "layer": 2}),
        (3, "value -1 is not in [0, 2)", {"kind": ATTEND, "layer": -1}),
        (3, "q_dtype", {"kind": ATTEND, "dtypes": (0, F32)}),
        (3, "out_dtype", {"kind": ATTEND, "dtypes": (F32, 9)}),
        (0, "", {"kind": RESULTS}),
        (3, "offset", {"kind": RESULTS, "offset": 1}),
        (3, "offset", {"kind": RESULTS, "offset": -1}),
        (11, "is not finite", {"kind": ATTEND, "data": b"\xff" * 256}),
        (0, "", {"kind": ATTEND, "data": bytes(1024)}),
    ):
        told, text = raw.call(**call)
        assert (told, said in text) == (code, True), (call, told, text)
    # Results that are too long for one answer are read in pieces.
    pieces = []
    for offset in (0, 10):
        assert raw.call(RESULTS, offset=offset)[0] == 0
        size = struct.unpack_from(ANSWER_FORM, raw.memory, ANSWER)[2]
        pieces.append(raw.memory[DATA : DATA + size])
    assert pieces[0][10:] == pieces[1]
    (result,) = attention.AttendResponse.FromString(pieces[0]).results
    assert set(result.certificate.visible_token_counts) == {1}
    # Only the last attend has appended.
    assert sequence.refresh().layer_token_counts == (1, 0)


def test_decoder_calls_that_make_no_sense(raw: RawDoorbell, client: Client, model: Model) -> None:
    sequence = client.create_sequence(model)
    named = description(sequence)
    opening: dict[str, Any] = {"kind": OPEN, "byte_count": len(named), "data": named}
    cases: tuple[tuple[int, str, dict[str, Any]], ...] = (
        *((9, "no decoder is open", {"kind": kind}) for kind in range(NEXT, CLOSE)),
        (0, "", {"kind": CLOSE}),
        (3, "12 is no call", {"kind": 12}),
        (3, "not in [0, ", {"kind": OPEN, "byte_count": -1}),
        (
            3,
            "not a serialised spillway.v1.DecodeStep",
            {"kind": OPEN, "byte_count": 9, "data": b"\xff" * 9},
        ),
        (3, "0 sequences are not in [1, 256]", {"kind": OPEN, "offset": 100}),
        (3, "token_count_max: value 0 is not in [1, ", opening),
        (3, "token_count_max: value -5 is not in [1, ", {**opening, "offset": -5}),
        (3, "token_count_max: value 4611686018427387904", {**opening, "offset": 2**62}),
    )
    for code, said, call in cases:
        told, text = raw.call(**call)
        assert (told, said in text) == (code, True), (call, told, text)
    if not on_gpu():
        told, text = raw.call(**{**opening, "offset": 100})
        assert (told, "cpu:0 has no streams" in text) == (12, True), (told, text)
    # After this, neither the sequence nor the doorbell is blocked.
    assert raw.call(BEGIN, byte_count=len(named), data=named)[0] == 0
    assert raw.call(ATTEND)[0] == 0
    sequence.delete()


def test_tensors_that_do_not_fit(client: Client) -> None:
    model = client.create_model(
        layer_count=1, query_head_count=64, kv_head_count=64, head_dim=256, dtype="float32"
    )
    sequences = [client.create_sequence(model) for _ in range(8)]
    named = description(*sequences)
    raw = RawDoorbell(client)
    assert raw.call(BEGIN, byte_count=len(named), data=named)[0] == 0
    code, text = raw.call(ATTEND)
    # Four tensors of 8 * 64 heads of 1 KiB, and the log-sum-exps.
    assert code == 9
    assert f"take {4 * 8 * 64 * 1024 + 8 * 64 * 4} bytes" in text
    assert sequences[0].refresh().token_count == 0
    raw.close()
    delete_model(client, model)


def test_noise_in_it_harms_nobody(
    raw: RawDoorbell, client: Client, model: Model, rng: np.random.Generator
) -> None:
    """Random bytes everywhere, except in the numbers of the bells, which are rung normally."""
    sequence = client.create_sequence(model)
    named = description(sequence)
    for _ in range(200):
        if rng.integers(2):
            raw.call(BEGIN, byte_count=len(named), data=named)
        noise = rng.integers(0, 256, 8192, np.uint8).tobytes()
        raw.memory[DATA : DATA + 8192] = noise
        fields = [int(x) for x in rng.integers(0, [13, 6, 6, 6])]
        sizes = [int(x) for x in rng.integers(-(2**63), 2**63 - 1, 2)]
        raw.call(fields[0], fields[1] - 1, (fields[2], fields[3]), sizes[0], sizes[1])
    with client.begin_step([client.create_sequence(model)]) as step:
        out, _ = step.attend(0, *step_tensors(rng))
        assert np.isfinite(out).all()


# Clients and daemons that end.


def test_a_detached_or_closed_one_is_freed(client: Client, no_leak: Callable[[], None]) -> None:
    before = other_memory(client)
    for close in (True, False):
        raw = RawDoorbell(client, byte_count=32 << 20)
        assert other_memory(client) >= before + (32 << 20)
        if close:
            raw.close()
        else:
            request = memory.DetachRegionRequest(session=raw.session, name=raw.region.name)
            client.connection.stubs.memory.DetachRegion(request)
            raw.memory.close()
        assert settles(lambda: other_memory(client) <= before)


def test_a_hundred_cuts(client: Client) -> None:
    """Runners are killed at random points, and the next runner loses no token."""
    model = client.create_model(
        layer_count=runner.LAYERS,
        query_head_count=runner.HEADS,
        kv_head_count=runner.KV_HEADS,
        head_dim=runner.DIM,
        dtype="float32",
    )
    before = other_memory(client)

    def decoded(cut_count: int, token_count: int) -> list[str]:
        sequence = client.create_sequence(model)
        arguments = [client.target, sequence.name, str(cut_count), str(token_count), "5"]
        command = [sys.executable, runner.__file__, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        sequence.delete()
        return done.stdout.split()

    cut = decoded(100, 150)
    undisturbed = decoded(0, len(cut) - 1)
    assert cut == undisturbed[: len(cut)]
    assert len(set(cut)) > 20
    assert settles(lambda: other_memory(client) <= before)
    delete_model(client, model)


def test_nobody_spins_while_nobody_rings(
    raw: RawDoorbell, client: Client, model: Model, rng: np.random.Generator
) -> None:
    """If a step waits, neither the client nor the daemon uses CPU time."""
    peer = raw.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    daemon = Path("/proc", str(struct.unpack("3i", peer)[0]), "stat")

    def used() -> float:
        fields = daemon.read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")

    with client.begin_step([client.create_sequence(model)]) as step:
        step.attend(0, *step_tensors(rng))
        begin = used()
        time.sleep(0.5)
        assert used() - begin < 0.25
