"""The services of a daemon or an embedded engine, by their descriptors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf import message_factory

from spillway_kv._native import NativeCall, NativeChannel
from spillway_kv._proto import (
    admin_service_pb2,
    attention_service_pb2,
    memory_service_pb2,
    model_service_pb2,
    sequence_service_pb2,
)
from spillway_kv.errors import SpillwayError


class Services:
    """The methods of the daemon's services, by name: `models.GetModel(request, timeout=...)`.

    A method with a stream of requests takes an iterator, and sends all of them at the start: with
    many responses that are not read it may stand still. One with a stream of responses returns
    an iterable with a method `cancel`. The others return a message.

    Args:
        channel: Carries the calls.
    """

    def __init__(self, channel: NativeChannel) -> None:
        self.models: Any = _Service(channel, model_service_pb2, "ModelService")
        self.sequences: Any = _Service(channel, sequence_service_pb2, "SequenceService")
        self.attention: Any = _Service(channel, attention_service_pb2, "AttentionService")
        self.memory: Any = _Service(channel, memory_service_pb2, "MemoryService")
        self.admin: Any = _Service(channel, admin_service_pb2, "AdminService")


class _Service:
    """The methods of a service."""

    def __init__(self, channel: NativeChannel, module: Any, name: str) -> None:
        service = module.DESCRIPTOR.services_by_name[name]
        for method in service.methods:
            setattr(self, method.name, _Method(channel, service.full_name, method))


class _Method:
    """A method of a service."""

    def __init__(self, channel: NativeChannel, service: str, method: Any) -> None:
        self._channel = channel
        self._path = f"/{service}/{method.name}"
        self._streams = method.client_streaming
        self._response = message_factory.GetMessageClass(method.output_type)
        self._answer = self._responses if method.server_streaming else self._one_response

    def __call__(self, request: Any, timeout: float | None = None, *, named: bool = True) -> Any:
        """Calls the method.

        Args:
            request: A message, or an iterator of messages.
            timeout: Seconds for the whole call. None means no limit.
            named: Whether the call names this client.
        """
        call = self._channel.open(self._path, timeout, named=named)
        with call.cancelled_on_error():
            for message in request if self._streams else (request,):
                if not call.send(message.SerializeToString()):
                    break
            call.send_end()
            return self._answer(call)

    def _responses(self, call: NativeCall) -> _Responses:
        return _Responses(call, self._response)

    def _one_response(self, call: NativeCall) -> Any:
        response = call.answer()
        if response is None:
            raise SpillwayError(f"{self._path} gave no answer", code="INTERNAL")
        return self._response.FromString(response)


class _Responses:
    """The responses of a call, which can be cancelled."""

    def __init__(self, call: NativeCall, kind: Any) -> None:
        self._call = call
        self._kind = kind
        self.cancel = call.cancel

    def __iter__(self) -> Iterator[Any]:
        while (response := self._call.receive()) is not None:
            yield self._kind.FromString(response)
