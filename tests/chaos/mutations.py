"""Sends valid messages with random changes to every call of every service."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import spillway_kv
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from spillway_kv._proto import (
    admin_service_pb2,
    attention_service_pb2,
    memory_service_pb2,
    model_service_pb2,
    sequence_service_pb2,
    tensor_pb2,
)
from spillway_kv.lab import serving

from chaos.contents import LAYERS, SHAPES, Tally, check_sequence, rows

FAMILIES = {
    "AdminService": admin_service_pb2,
    "AttentionService": attention_service_pb2,
    "MemoryService": memory_service_pb2,
    "ModelService": model_service_pb2,
    "SequenceService": sequence_service_pb2,
}
# Left out, because these calls make the daemon write or read files.
LEFT_OUT = {"SaveSequence", "LoadSequence", "DeleteSnapshot"}


def methods(family: str) -> list[tuple[str, bool, bool, Any]]:
    """(name, whether requests are a stream, whether responses are, request class) of each call."""
    module = FAMILIES[family]
    file = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
    found = []
    for service in file.service:
        for method in service.method:
            if method.name in LEFT_OUT:
                continue
            request = getattr(module, method.input_type.rsplit(".", 1)[1])
            found.append((method.name, method.client_streaming, method.server_streaming, request))
    return found


def tensor(array: np.ndarray) -> tensor_pb2.Tensor:
    """The tensor message of an array, as float32."""
    return tensor_pb2.Tensor(
        shape=array.shape, dtype=tensor_pb2.DTYPE_F32, data=array.astype("<f4").tobytes()
    )


def valid(request: Any, random: np.random.Generator) -> Any:
    """A message of the type `request` that the daemon accepts, or nearly accepts."""
    message = request()
    name = "sequences/s" if random.random() < 0.8 else "sequences/none"
    fields = {field.name for field in message.DESCRIPTOR.fields}
    k = rows(7, int(random.integers(0, 400)), int(random.integers(1, 4)))
    q = tensor(k[0].transpose(1, 0, 2).repeat(2, axis=1)[:1])
    if "name" in fields:
        message.name = name
    if "chunk" in fields and message.DESCRIPTOR.fields_by_name["chunk"].message_type:
        chunk = message.chunk
        chunk.sequence, chunk.token_start = name, int(random.integers(0, 400))
        chunk.k.CopyFrom(tensor(k))
        chunk.v.CopyFrom(tensor(-k))
    if "items" in fields:
        item = message.items.add(sequence=name)
        item.q.CopyFrom(q)
    if "item" in fields:
        message.item.sequence = name
        message.item.q.CopyFrom(q)
    if "attend" in fields:
        if random.random() < 0.8:
            message.begin.token_count = 1
            message.begin.parts.add(sequence=name, token_start=int(random.integers(0, 400)))
        new = tensor(k[0, :, :1].transpose(1, 0, 2)[None])
        message.attend.layer = int(random.integers(0, LAYERS))
        message.attend.q.CopyFrom(q)
        message.attend.q.shape.insert(0, 1)
        message.attend.k.CopyFrom(new)
        message.attend.v.CopyFrom(new)
    if "model" in fields and message.DESCRIPTOR.fields_by_name["model"].message_type:
        model = message.model
        model.layer_count, model.query_head_count, model.kv_head_count = 2, 4, 2
        model.head_dim, model.dtype = 32, tensor_pb2.DTYPE_F32
        model.hash_weights.rotation.bits_per_dim = 3
    if "sequence" in fields and message.DESCRIPTOR.fields_by_name["sequence"].message_type:
        message.sequence.model = "models/m"
        message.sequence.policy.epsilon = 0.1
    if "byte_count" in fields:
        message.byte_count = int(random.integers(0, 1 << 20))
    return message


def mutate(data: bytes, random: np.random.Generator) -> bytes:
    """Changes a few bytes: flips, cuts, repeats, inserts. Sometimes changes nothing."""
    made = bytearray(data)
    for _ in range(int(random.integers(0, 5))):
        at = int(random.integers(0, len(made) + 1))
        kind = int(random.integers(0, 5))
        if kind == 0 and made:
            made[min(at, len(made) - 1)] ^= 1 << int(random.integers(0, 8))
        elif kind == 1 and made:
            made[min(at, len(made) - 1)] = int(random.choice([0, 1, 127, 128, 255]))
        elif kind == 2:
            del made[at : at + int(random.integers(0, 16))]
        elif kind == 3:
            made[at:at] = random.bytes(int(random.integers(0, 16)))
        else:
            made[at:at] = made[at : at + int(random.integers(0, 64))]
    return bytes(made)


def send(
    channel: grpc.Channel, family: str, count: int, random: np.random.Generator, tally: Tally
) -> None:
    """Sends `count` messages to the calls of a service."""
    calls = methods(family)
    sent = 0
    while sent < count:
        name, asks_stream, answers_stream, request = calls[int(random.integers(len(calls)))]
        path = f"/spillway.v1.{family}/{name}"
        batch = int(random.integers(1, 9)) if asks_stream else 1
        messages = [
            mutate(valid(request, random).SerializeToString(), random) for _ in range(batch)
        ]
        kinds: dict[tuple[bool, bool], Any] = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, False): channel.stream_unary,
            (True, True): channel.stream_stream,
        }
        call = kinds[asks_stream, answers_stream](path)
        asked: Any = iter(messages) if asks_stream else messages[0]
        try:
            answer = call(asked, timeout=20)
            if answers_stream:
                for _ in itertools.islice(answer, 64):
                    pass
                answer.cancel()
        except grpc.RpcError as error:
            failed: Any = error
            code = failed.code()
            if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
                tally.wrong(f"{family}.{name} answers {code}: {failed.details()}")
            if code is grpc.StatusCode.UNAVAILABLE:
                raise
        sent += batch
    tally.fault(f"mutated messages to {family}", sent)


def mutate_messages(
    binary: Path, folder: Path, count: int, random: np.random.Generator, *flags: str
) -> Tally:
    """Sends `count` messages to every service. The daemon must go on and keep its data."""
    tally = Tally()
    limits = ("--memory-limit", "512MiB", "--snapshot-folder", "", "--log-level", "error")
    with serving.running_daemon(
        binary, folder / "mutations.log", *limits, *flags, timeout=120
    ) as target:
        with (
            spillway_kv.connect(target) as client,
            grpc.insecure_channel(target) as channel,
        ):
            client.create_model("m", **SHAPES)
            for family in FAMILIES:
                control = client.create_sequence("models/m", "control-of-nobody-else", ttl=0)
                k = rows(3, 0, 2500)
                control.append(0, 0, k, -k)
                try:
                    client.create_sequence("models/m", "s")
                except spillway_kv.AlreadyExists:
                    pass
                send(channel, family, count, random, tally)
                check_sequence(control, 3, [2500] * LAYERS, tally)
                control.delete()
                if not client.health():
                    tally.wrong(f"not healthy after {family}")
    return tally
