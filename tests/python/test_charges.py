"""The daemon's limits hold for everything that clients can make it keep."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
import spillway_kv
from daemon_process import on_gpu, running_daemon
from helpers import delete_model, encode, refused, resident_bytes, settles
from http2 import END_HEADERS, HEADERS, frame, raw, request
from raw_grpc import error_of
from spillway_kv import Client, Model
from spillway_kv._proto import attention_service_pb2 as attention
from spillway_kv._proto import model_service_pb2 as models
from spillway_kv._proto import sequence_service_pb2 as sequences

# On a GPU, some of this small memory is pinned, so sizes differ.
of_the_cpu = pytest.mark.skipif(on_gpu(), reason="sizes are the CPU device's")

SERVICE = "/spillway.v1."
MIB = 1 << 20
FLAGS = ("--memory-limit", "256MiB", "--model-count-max", "20", "--stream-idle", "2")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The target of a small daemon that allows few models and does not wait for idle clients."""
    folder = tmp_path_factory.mktemp("small")
    with running_daemon(folder, *FLAGS, "--open-stream-count-max", "40") as target:
        yield target


@pytest.fixture(scope="module")
def client(target: str) -> Iterator[Client]:
    """A client of that daemon."""
    with spillway_kv.connect(target) as client:
        yield client


@pytest.fixture(scope="module")
def channel(target: str) -> Iterator[grpc.Channel]:
    """A channel that sends bytes unchanged."""
    with grpc.insecure_channel(target) as channel:
        yield channel


class Messages:
    """The messages of a stream. The stream stays open until it is closed explicitly."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def send(self, message: bytes) -> None:
        self._queue.put(message)

    def end(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._queue.get, None)


def stepping(channel: grpc.Channel) -> Any:
    """The call Step on this channel."""
    return channel.stream_stream(
        SERVICE + "AttentionService/Step",
        response_deserializer=attention.StepResponse.FromString,
    )


def step_of(name: str) -> bytes:
    """Begins a step of a sequence, and attends in it."""
    begin = attention.DecodeStep(parts=[attention.DecodeStep.Part(sequence=name)], token_count=1)
    request = attention.StepRequest(begin=begin, attend=attention.StepAttend())
    return request.SerializeToString()


def test_names_that_failed_are_not_kept(target: str, channel: grpc.Channel) -> None:
    before = resident_bytes(target)
    messages = Messages()
    answers = stepping(channel)(iter(messages), timeout=120)
    for i in range(200):
        name = f"sequences/{i}" + "x" * (3 * MIB)
        messages.send(step_of(name))
        assert next(answers).status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert resident_bytes(target) - before < 200 * MIB
    messages.end()
    assert list(answers) == []


@of_the_cpu
def test_calls_that_wait_are_charged(client: Client, target: str) -> None:
    model = client.create_model(
        layer_count=1, query_head_count=16, kv_head_count=1, head_dim=256, dtype="float16"
    )
    sequence = client.create_sequence(model)
    rows = np.ones((1, 1, 4096, 256), np.float16)
    for start in range(0, 32768, 4096):
        sequence.append(0, start, rows, rows)
    # Attends keep the sequence busy. Then other requests wait for it, each with 3 MiB in an unknown
    # field.
    busy = attention.AttendRequest(items=[attend_item(sequence.name, 128)]).SerializeToString()
    padding = b"\xfa\x7f" + b"\x80\x80\xc0\x01" + bytes(3 * MIB)
    wait = sequences.TruncateSequenceRequest(name=sequence.name, token_count=32768)

    def arrived(call: Any, held: int) -> bool:
        memory = client.statistics().memory
        return call.done() or memory.other_bytes >= held + 3 * MIB

    with grpc.insecure_channel(target) as channel:
        attend: Any = channel.unary_unary(SERVICE + "AttentionService/Attend")
        truncate: Any = channel.unary_unary(SERVICE + "SequenceService/TruncateSequence")
        attends: list[Any] = []
        waiting: list[Any] = []

        def refused_calls() -> list[Any]:
            return [call for call in waiting if call.done() and call.exception() is not None]

        while len(refused_calls()) < 3 and len(waiting) < 200:
            # Always keep four attends waiting, even if the other requests are sent slowly.
            while sum(not call.done() for call in attends) < 4:
                attends.append(attend.future(busy, timeout=120))
            held = client.statistics().memory.other_bytes
            waiting.append(truncate.future(wait.SerializeToString() + padding, timeout=120))
            # gRPC itself limits how many requests arrive at the same time, and closes connections
            # above that.
            settles(partial(arrived, waiting[-1], held))
        # All waiting messages together may take 32 MiB.
        assert sum(not call.done() for call in waiting) <= 10
        refusals = [error_of(call.exception()) for call in refused_calls()]
        assert len(refusals) >= 3
        for refusal in refusals:
            assert refusal.code == "RESOURCE_EXHAUSTED"
            assert "that messages have" in refusal.message
        assert any(call.exception(timeout=120) is None for call in waiting)
        assert any(call.exception(timeout=120) is None for call in attends)
    delete_model(client, model)


def attend_item(name: str, query_count: int) -> attention.AttendItem:
    """An item with queries for the 16 heads of a sequence."""
    q = encode(np.ones((query_count, 16, 256), np.float16), "q")
    return attention.AttendItem(sequence=name, q=q)


def test_a_call_whose_request_never_comes_ends(target: str) -> None:
    with raw(target) as connection:
        connection.acknowledge()
        headers = request(f"{SERVICE}AdminService/GetServerInfo")
        connection.send(frame(HEADERS, END_HEADERS, 1, headers))
        assert connection.receives(b"the request did not arrive within 2 seconds")


@of_the_cpu
def test_the_most_models(client: Client) -> None:
    before = client.statistics().memory.used_bytes
    made: list[Model] = []
    error = refused(lambda: made.extend(waiting_model(client) for _ in range(21)))
    assert len(made) == 20
    assert error.code == "RESOURCE_EXHAUSTED"
    assert error.reason == "MODEL_COUNT_EXHAUSTED"
    assert "there are 20 models already" in error.message
    # Each model is charged, with or without weights.
    assert client.statistics().memory.used_bytes - before >= 20 * 4096
    for model in made:
        client.delete_model(model)
    # Messages of calls that have just ended may still be charged, in either figure.
    assert abs(client.statistics().memory.used_bytes - before) < 1024


def waiting_model(client: Client) -> Model:
    """A model that waits for its hash weights."""
    return client.create_model(
        layer_count=1,
        query_head_count=1,
        kv_head_count=1,
        head_dim=16,
        dtype="float32",
        hash_weights=spillway_kv.MlpHash(),
    )


def upload_message(model: Model, total_bytes: int, data: bytes = b"") -> bytes:
    return models.UploadHashWeightsRequest(
        name=model.name, total_bytes=total_bytes, data=data
    ).SerializeToString()


@of_the_cpu
def test_an_upload_is_charged_what_arrived(client: Client, channel: grpc.Channel) -> None:
    model = waiting_model(client)
    upload: Any = channel.stream_unary(SERVICE + "ModelService/UploadHashWeights")
    before = client.statistics().memory.used_bytes
    messages = Messages()
    call = upload.future(iter(messages), timeout=60)
    messages.send(upload_message(model, 200 * MIB, bytes(MIB)))
    assert settles(lambda: client.statistics().memory.used_bytes >= before + MIB)
    assert client.statistics().memory.used_bytes < before + 8 * MIB
    # Then the client sends nothing.
    error = refused(call.result)
    assert error.code == "ABORTED"
    assert error.reason == "STREAM_IDLE"
    assert "the stream had no message for 2 seconds" in error.message
    messages.end()
    assert client.statistics().memory.used_bytes == before
    error = refused(lambda: upload(iter([upload_message(model, 1 << 30)]), timeout=60))
    assert error.code == "RESOURCE_EXHAUSTED"
    assert "needs 1073741824 bytes" in error.message
    client.delete_model(model)


def test_a_silent_append_ends_and_a_stream_of_steps_stays(channel: grpc.Channel) -> None:
    steps, appends = Messages(), Messages()
    answers = stepping(channel)(iter(steps), timeout=60)
    append: Any = channel.stream_unary(SERVICE + "AttentionService/Append")
    error = refused(append.future(iter(appends), timeout=60).result)
    assert error.code == "ABORTED"
    assert error.reason == "STREAM_IDLE"
    appends.end()
    steps.send(step_of("sequences/none"))
    assert next(answers).status.code == grpc.StatusCode.NOT_FOUND.value[0]
    steps.end()
    assert list(answers) == []


def everything_of(sequence: str, count: int) -> attention.FetchPagesRequest:
    """Requests every row of the first layer."""
    request = attention.FetchPagesRequest()
    request.sequence = sequence
    request.tokens.count = count
    return request


@pytest.fixture
def long_sequence(client: Client) -> Iterator[tuple[spillway_kv.Sequence, int]]:
    """A sequence with 32 MiB of rows in one layer, more than connections buffer; its tokens."""
    model = client.create_model(
        layer_count=1, query_head_count=2, kv_head_count=2, head_dim=128, dtype="float32"
    )
    sequence = client.create_sequence(model)
    token_count = 32 * MIB // (2 * 2 * 128 * 4)
    rows = np.zeros((2, token_count, 128), np.float32)
    sequence.append(0, 0, rows, rows)
    yield sequence, token_count
    delete_model(client, model)


def fetching(channel: grpc.Channel) -> Any:
    """The call FetchPages on this channel."""
    return channel.unary_stream(
        SERVICE + "AttentionService/FetchPages",
        request_serializer=attention.FetchPagesRequest.SerializeToString,
        response_deserializer=attention.FetchPagesResponse.FromString,
    )


def test_a_fetch_that_is_not_read_ends(
    client: Client, channel: grpc.Channel, long_sequence: tuple[spillway_kv.Sequence, int]
) -> None:
    sequence, token_count = long_sequence
    fetch = fetching(channel)
    before = client.statistics().memory.used_bytes
    pages = fetch(everything_of(sequence.name, token_count), timeout=120)
    assert next(pages).kv_head == 0
    assert client.statistics().memory.used_bytes > before
    # Others are served while the fetch waits. When the fetch ends, its memory is released.
    assert settles(lambda: client.statistics().memory.used_bytes == before)
    error = refused(lambda: list(pages))
    assert error.code == "ABORTED"
    assert "the client has read nothing for 2 seconds" in error.message
    # A client that reads gets all rows.
    read = fetch(everything_of(sequence.name, token_count), timeout=60)
    assert sum(page.indices.shape[0] for page in read) == 2 * token_count


def test_rows_are_not_kept_for_a_process_that_is_stopped(
    client: Client, target: str, long_sequence: tuple[spillway_kv.Sequence, int]
) -> None:
    sequence, token_count = long_sequence
    script = f"""
import grpc
from test_charges import everything_of, fetching
with grpc.insecure_channel({target!r}) as channel:
    pages = fetching(channel)(everything_of({sequence.name!r}, {token_count}), timeout=300)
    next(pages)
    print("begun", flush=True)
    list(pages)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGSTOP)
        sequence.delete()
        assert settles(lambda: client.statistics().memory.row_bytes == 0)
    finally:
        process.kill()
        process.wait()


def test_the_most_streams(client: Client, channel: grpc.Channel) -> None:
    step, message = stepping(channel), step_of("sequences/none")
    streams: list[tuple[Messages, Any]] = []
    for _ in range(40):
        messages = Messages()
        answers = step(iter(messages), timeout=60)
        messages.send(message)
        assert next(answers)
        streams.append((messages, answers))
    for call in (
        lambda: list(step(iter([message]), timeout=60)),
        lambda: channel.stream_unary(SERVICE + "AttentionService/Append")(iter([]), timeout=60),
        lambda: channel.stream_unary(SERVICE + "ModelService/UploadHashWeights")(
            iter([]), timeout=60
        ),
    ):
        error = refused(call)
        assert error.code == "RESOURCE_EXHAUSTED"
        assert error.reason == "STREAM_COUNT_EXHAUSTED"
        assert "40 streams are open already" in error.message
    # Short calls are still served.
    assert client.get_server_info().boot_id
    for messages, answers in streams:
        messages.end()
        assert list(answers) == []
    assert settles(lambda: opens(step, message))


def opens(step: Any, message: bytes) -> bool:
    """Whether the daemon accepts a new stream."""
    try:
        list(step(iter([message]), timeout=60))
    except grpc.RpcError:
        return False
    return True
