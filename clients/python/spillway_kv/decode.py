"""The Decode stream: appends the new tokens' K/V of a layer and attends, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence as SequenceABC
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import grpc

from spillway_kv import _split, forks
from spillway_kv._native import NativeCall
from spillway_kv._proto import attention_service_pb2
from spillway_kv.errors import (
    Cancelled,
    SpillwayError,
    Unavailable,
    error_from_rpc,
    error_from_status,
)
from spillway_kv.policy import Policy
from spillway_kv.restart import BROKEN
from spillway_kv.results import AttendResult
from spillway_kv.sequence import Sequence
from spillway_kv.tensors import (
    Array,
    Decoder,
    OutDType,
    decoder_like,
    dtype_number,
    engine_array,
    fill,
)
from spillway_kv.tracing import trace_id

if TYPE_CHECKING:
    from spillway_kv.connection import Connection


_METHOD = "/spillway.v1.AttentionService/Decode"
_RESPONSE = attention_service_pb2.DecodeResponse


class _Pending(NamedTuple):
    sequence: Sequence
    appends: bool
    decode: Decoder
    # Kept so that it can be sent again after a restart.
    request: attention_service_pb2.DecodeRequest


class _GrpcioStream:
    """The messages of one stream. One thread may send while another one receives."""

    name = "grpcio"

    def __init__(self, connection: Connection, timeout: float | None) -> None:
        self._requests: queue.SimpleQueue[attention_service_pb2.DecodeRequest | None] = (
            queue.SimpleQueue()
        )
        self._responses = connection.stubs.attention.Decode(
            iter(self._requests.get, None), timeout=timeout, metadata=connection.metadata
        )

    def send(self, request: attention_service_pb2.DecodeRequest) -> None:
        """Sends a message. If the stream has ended, `receive` raises the error."""
        self._requests.put(request)

    def receive(self) -> attention_service_pb2.DecodeResponse | None:
        """Waits for a message. Returns None if the daemon ended the stream.

        Raises:
            SpillwayError: The stream broke.
        """
        try:
            return next(self._responses, None)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None

    def cancel(self) -> None:
        """Ends the stream. A waiting `receive` returns."""
        self._requests.put(None)
        self._responses.cancel()


class _NativeStream:
    """The same, through libspillway."""

    def __init__(self, call: NativeCall, name: str) -> None:
        self._call = call
        self.name = name
        self.cancel = call.cancel

    def send(self, request: attention_service_pb2.DecodeRequest) -> None:
        self._call.send(request.SerializeToString())

    def receive(self) -> attention_service_pb2.DecodeResponse | None:
        message = self._call.receive()
        return None if message is None else _RESPONSE.FromString(message)


class DecodeStream:
    """A long-lived stream of decode steps. `Client.decode` creates it.

    Messages for one sequence are served in order. Messages for different sequences may be
    answered in any order. One thread may send while another one receives. An error is raised by
    the `recv` or `step` that gets the answer. It has a `correlation_id`, and the stream stays
    open. A failed message appended nothing, unless its K/V were committed before the attend
    failed. The lengths of the sequence are therefore requested again when they are next used.
    After a restart of a daemon whose rows outlive the process, steps in flight are sent again,
    unless the stream has a timeout.
    """

    def __init__(self, connection: Connection, timeout: float | None) -> None:
        self._wire = connection
        self._timeout = timeout
        self._stream = self._opened()
        self._breaks = connection.restarts.breaks()
        self._pending: dict[int, _Pending] = {}
        # Held while steps are sent, so that after a restart each of them is sent again once.
        self._sending = threading.RLock()
        self._next_id = 1
        self._closed = False
        # Trace id of the messages. None: that of the trace that is active when a message is sent.
        self._trace: str | None = None
        forks.leaves(self)

    def leave_to_parent(self, error: str) -> None:
        """In a forked process: makes every use raise a RuntimeError with this text."""
        self._sending = threading.RLock()
        forks.keep(self._stream)
        self._stream = cast(Any, forks.Left(error))
        self._pending.clear()

    def _opened(self) -> _GrpcioStream | _NativeStream:
        connection = self._wire
        if connection.native is None:
            return _GrpcioStream(connection, self._timeout)
        return _NativeStream(connection.native.open(_METHOD, self._timeout), connection.transport)

    def _resume(self, error: Unavailable | Cancelled) -> None:
        """Sends the steps in flight again when the daemon is back; otherwise raises `error`."""
        if self._timeout is not None:
            raise error
        self._breaks.wait(error)
        with self._sending:
            self._stream.cancel()
            self._stream = self._opened()
            if self._closed:  # by another thread, which may have cancelled only the old stream
                self._stream.cancel()
                raise error
            for pending in self._pending.values():
                request = pending.request
                if request.HasField("append") and not request.visible_token_counts:
                    # Tokens of a later step may have been appended already.
                    start, count = request.append.token_start, request.append.k.shape[1]
                    request.visible_token_counts.extend(range(start + 1, start + count + 1))
                self._stream.send(request)

    def __enter__(self) -> DecodeStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def send(
        self,
        sequence: Sequence,
        layer: int,
        q: Array,
        k: Array | None = None,
        v: Array | None = None,
        *,
        start: int | None = None,
        visible: SequenceABC[int] | None = None,
        policy: Policy | None = None,
        out_dtype: OutDType | None = None,
    ) -> int:
        """Sends one step without waiting for the answer.

        Args:
            sequence: The sequence to append to and attend to.
            layer: Layer, [0, layer_count).
            q: Queries [T, H_q, d].
            k: Keys of the new tokens, 1 to 16, [H_kv, T, d]. None attends without appending.
            v: Values, with the same shape.
            start: Position of the first new token. None means the layer's length as this handle
                knows it, including steps in flight.
            visible: Visible tokens of each query. None is causal over the last T tokens.
            policy: Overrides the sequence's policy for this step.
            out_dtype: Element type of the output. None means that of q.

        Returns:
            The correlation id, which `recv` returns with the answer.
        """
        if self._closed:
            raise ValueError("the stream is closed")
        if (k is None) != (v is None):
            raise ValueError("give both k and v, or neither")
        request = attention_service_pb2.DecodeRequest(correlation_id=self._next_id, layer=layer)
        if trace := trace_id() if self._trace is None else self._trace:
            request.trace_id = trace
        sequence._fill_item(request, q, policy, visible)
        if out_dtype is not None:
            request.out_dtype = dtype_number(out_dtype)  # type: ignore[assignment]
        if k is not None and v is not None:
            k, v = engine_array(k, "k"), engine_array(v, "v")
            shape = _split.check_shape(k, ("H_kv", "T", "d"), "k")
            if start is None:
                start = sequence.layer_token_counts[layer]
            # Filled in place, because putting a message into another one copies it, with all rows.
            request.append.token_start = start
            request.append.generation = sequence.generation
            fill(request.append.k, k, "k")
            fill(request.append.v, v, "v")
            sequence._expect(layer, start + shape[1])
        self._next_id += 1
        pending = _Pending(sequence, k is not None, decoder_like(q), request)
        with self._sending:
            self._pending[request.correlation_id] = pending
            self._stream.send(request)
        return request.correlation_id

    def recv(self) -> tuple[int, AttendResult]:
        """Waits for the next answer.

        Returns:
            The correlation id of the step and its result.

        Raises:
            SpillwayError: The step failed, or the stream broke.
            ValueError: No step is in flight.
        """
        if not self._pending:
            raise ValueError("no step is in flight")
        try:
            response = self._receive()
        except SpillwayError:
            self._closed = True
            # Ends grpcio's thread, which still waits for messages to send.
            self._stream.cancel()
            for step in list(self._pending.values()):
                step.sequence._forget()
            raise
        pending = self._pending.pop(response.correlation_id)
        if response.result.status.code:
            if pending.appends:
                pending.sequence._forget()
            failure = pending.sequence._explain(error_from_status(response.result.status))
            failure.correlation_id = response.correlation_id
            raise failure
        return response.correlation_id, AttendResult(response.result, pending.decode)

    def _receive(self) -> attention_service_pb2.DecodeResponse:
        while True:
            try:
                response = self._stream.receive()
                if response is not None:
                    self._breaks.clear()
                    return response
                raise Unavailable("the daemon ended the stream with steps in flight")
            except BROKEN as error:
                if self._closed:
                    raise
                self._resume(error)

    def step(
        self,
        sequence: Sequence,
        layer: int,
        q: Array,
        k: Array | None = None,
        v: Array | None = None,
        *,
        start: int | None = None,
        visible: SequenceABC[int] | None = None,
        policy: Policy | None = None,
        out_dtype: OutDType | None = None,
    ) -> AttendResult:
        """Sends one step and waits for its answer. The arguments are those of `send`.

        Raises:
            SpillwayError: The step failed, or the stream broke.
            ValueError: Other steps are in flight. Receive their answers first.
        """
        if self._pending:
            raise ValueError(
                f"{len(self._pending)} steps are in flight: receive their answers first"
            )
        self.send(
            sequence,
            layer,
            q,
            k,
            v,
            start=start,
            visible=visible,
            policy=policy,
            out_dtype=out_dtype,
        )
        return self.recv()[1]

    @property
    def transport(self) -> str:
        """How the messages are transported, as for `Client.transport`."""
        return self._stream.name

    @property
    def closed(self) -> bool:
        """Whether the stream has ended, by `close` or by a failure."""
        return self._closed

    def close(self) -> None:
        """Ends the stream. Steps in flight are abandoned."""
        if not self._closed:
            self._closed = True
            for step in list(self._pending.values()):
                step.sequence._forget()
            if not self._wire.left:
                self._stream.cancel()
