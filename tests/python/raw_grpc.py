"""The daemon's services by grpcio, as clients without libspillway call them."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf import message_factory
from google.rpc import status_pb2
from spillway_kv import SpillwayError
from spillway_kv._proto import (
    admin_service_pb2,
    attention_service_pb2,
    memory_service_pb2,
    model_service_pb2,
    sequence_service_pb2,
)
from spillway_kv.errors import error_from_status


class Stubs:
    """grpcio's callables of the services' methods, by name."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.models = _service(channel, model_service_pb2, "ModelService")
        self.sequences = _service(channel, sequence_service_pb2, "SequenceService")
        self.attention = _service(channel, attention_service_pb2, "AttentionService")
        self.memory = _service(channel, memory_service_pb2, "MemoryService")
        self.admin = _service(channel, admin_service_pb2, "AdminService")


def _service(channel: grpc.Channel, module: Any, name: str) -> Any:
    service = module.DESCRIPTOR.services_by_name[name]
    made = SimpleNamespace()
    for method in service.methods:
        kinds = [
            "stream" if s else "unary" for s in (method.client_streaming, method.server_streaming)
        ]
        call = getattr(channel, "_".join(kinds))(
            f"/{service.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        setattr(made, method.name, call)
    return made


@functools.cache
def raw(target: str) -> Stubs:
    """The services of a daemon. The channel stays open."""
    return Stubs(grpc.insecure_channel(target))


def error_of(error: Any) -> SpillwayError:
    """The exception that a client raises for an error of grpcio."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return error_from_status(status_pb2.Status.FromString(value))
    code, _ = error.code().value
    return error_from_status(status_pb2.Status(code=code, message=error.details() or ""))
