"""Messages that cannot be parsed: every call says which one, and what was applied before it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from helpers import encode, refused
from http2 import DATA, END_HEADERS, END_STREAM, HEADERS, frame, raw, request
from spillway_kv import Client, Model
from spillway_kv._proto import attention_service_pb2 as attention
from spillway_kv._proto import tensor_pb2

# A field of two bytes, of which only one is there.
TRUNCATED = b"\x0a\x02x"
SERVICE = "/spillway.v1."


@pytest.fixture(scope="module")
def channel(target: str) -> Iterator[grpc.Channel]:
    """A channel that sends bytes unchanged."""
    with grpc.insecure_channel(target) as channel:
        yield channel


def chunk(name: str, start: int, fill: float = 1.0) -> bytes:
    """An append of one token to both layers."""
    rows = encode(np.full((2, 2, 1, 16), fill, np.float32), "rows")
    kv = attention.KvChunk(sequence=name, token_start=start, k=rows, v=rows)
    return attention.AppendRequest(chunk=kv).SerializeToString()


@pytest.mark.parametrize(
    "method",
    [
        "AdminService/GetStatistics",
        "AttentionService/Attend",
        "AttentionService/Select",
        "MemoryService/AttachRegion",
        "ModelService/CreateModel",
        "SequenceService/CreateSequence",
        "SequenceService/LoadSequence",
    ],
)
def test_a_unary_call_names_the_message_that_does_not_parse(
    channel: grpc.Channel, method: str
) -> None:
    call: Any = channel.unary_unary(SERVICE + method)
    error = refused(lambda: call(TRUNCATED, timeout=30))
    assert error.code == "INVALID_ARGUMENT"
    assert (
        f"not a valid spillway.v1.{method.split('/')[1]}Request: its 3 bytes do not parse"
        in str(error)
    )
    assert error.reason == "MESSAGE_UNREADABLE"


def test_a_fetch_names_the_message_that_does_not_parse(channel: grpc.Channel) -> None:
    call: Any = channel.unary_stream(SERVICE + "AttentionService/FetchPages")
    error = refused(lambda: list(call(TRUNCATED, timeout=30)))
    assert error.code == "INVALID_ARGUMENT"
    assert "not a valid spillway.v1.FetchPagesRequest" in str(error)


def test_an_append_says_what_came_before_a_message_that_does_not_parse(
    channel: grpc.Channel, client: Client, model: Model
) -> None:
    name = client.create_sequence(model).name
    call: Any = channel.stream_unary(SERVICE + "AttentionService/Append")
    good = [chunk(name, 0), chunk(name, 0), chunk(name, 1)]
    error = refused(lambda: call(iter([*good, TRUNCATED, chunk(name, 2)]), timeout=30))
    assert error.code == "INVALID_ARGUMENT"
    assert (
        "message 4 of the stream: the message is not a valid spillway.v1.AppendRequest: its 3 "
        "bytes do not parse; compression is not supported; before it 2 chunks "
        "were appended and 1 were there already" in error.message
    )
    assert error.metadata["appended_chunk_count"] == "2"
    assert client.get_sequence(name).refresh().token_count == 2


def test_an_upload_names_the_message_that_does_not_parse(channel: grpc.Channel) -> None:
    call: Any = channel.stream_unary(SERVICE + "ModelService/UploadHashWeights")
    error = refused(lambda: call(iter([TRUNCATED]), timeout=30))
    assert error.code == "INVALID_ARGUMENT"
    assert "not a valid spillway.v1.UploadHashWeightsRequest" in str(error)


def test_a_message_of_millions_of_empty_items_is_not_read(channel: grpc.Channel) -> None:
    call: Any = channel.unary_unary(SERVICE + "AttentionService/Attend")
    error = refused(lambda: call(b"\x12\x00" * (1 << 20), timeout=30))
    assert error.code == "INVALID_ARGUMENT"
    assert "it has more than 16384 fields" in error.message


def calls(channel: grpc.Channel) -> dict[str, Callable[..., Any]]:
    """Calls of every kind, each with one message."""
    append: Any = channel.stream_unary(SERVICE + "AttentionService/Append")
    step: Any = channel.stream_stream(SERVICE + "AttentionService/Step")
    attend: Any = channel.unary_unary(SERVICE + "AttentionService/Attend")
    return {
        "append": lambda message, **more: append(iter([message]), **more),
        "step": lambda message, **more: list(step(iter([message]), **more)),
        "attend": lambda message, **more: attend(message, **more),
    }


@pytest.mark.parametrize("method", ["Append", "Step", "Attend"])
def test_a_message_compressed_in_an_unknown_way_is_refused(target: str, method: str) -> None:
    # gRPC's own clients have the same algorithms as the daemon.
    headers = request(f"{SERVICE}AttentionService/{method}", ("grpc-encoding", "br"))
    compressed = b"\x8b\x01\x80\x0a\x02a\x03"
    message = b"\x01" + struct.pack(">I", len(compressed)) + compressed
    with raw(target) as connection:
        connection.send(frame(HEADERS, END_HEADERS, 1, headers))
        connection.send(frame(DATA, END_STREAM, 1, message))
        assert connection.receives(b"compression is not supported")


@pytest.mark.parametrize("kind", ["append", "step", "attend"])
@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_messages_are_refused_and_not_undone(
    channel: grpc.Channel, kind: str, algorithm: Any
) -> None:
    call = calls(channel)[kind]
    # Ten MiB of zeros are ten KiB when compressed.
    error = refused(lambda: call(bytes(10 << 20), timeout=30, compression=algorithm))
    assert error.code == "UNIMPLEMENTED", str(error)
    assert "is disabled" in error.message, str(error)


@pytest.mark.parametrize("kind", ["append", "step", "attend"])
def test_a_message_that_is_too_large_is_refused(channel: grpc.Channel, kind: str) -> None:
    call = calls(channel)[kind]
    error = refused(lambda: call(bytes((4 << 20) + 1), timeout=30))
    assert error.code == "RESOURCE_EXHAUSTED", str(error)
    assert "larger than max" in error.message, str(error)


def test_an_error_quotes_no_more_than_people_read(client: Client, model: Model) -> None:
    sequence = client.create_sequence(model)
    q = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_F32, shape=[12345] * 3000)
    request = attention.AttendRequest(items=[attention.AttendItem(sequence=sequence.name, q=q)])
    error = refused(lambda: client.connection.stubs.attention.Attend(request))
    assert error.code == "INVALID_ARGUMENT"
    assert len(error.message) < 1100
    assert "... (cut, of " in error.message
