"""Decode steps without libspillway: the messages of `AttentionService.Step`, by grpcio."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from functools import partial
from typing import Any, cast

import grpc
import numpy as np

from spillway_kv import forks
from spillway_kv._proto import attention_service_pb2, tensor_pb2
from spillway_kv.attend_sums import LayerStatistics
from spillway_kv.connection import Connection
from spillway_kv.errors import SpillwayError, Unavailable, error_from_rpc, error_from_status
from spillway_kv.results import AttendResult, Model
from spillway_kv.tensors import BFloat16, decoder_like, dtype_of, fill, is_torch, itemsize


class CallStep:
    """A step of a daemon. The methods are those of `NativeStep`."""

    def __init__(
        self, connection: Connection, message: attention_service_pb2.DecodeStep, model: Model
    ) -> None:
        """Does not ask the daemon: the first attend raises the error if it refuses the step."""
        self._wire, self._message, self._model = connection, message, model
        # None: the next attend opens a stream, and begins the step.
        self._stream: _Stream | None = None
        self._results: list[attention_service_pb2.AttendResult] = []
        self._unanswered = self._ended = False
        forks.leaves(self)

    def leave_to_parent(self, error: str) -> None:
        """In a forked process: makes every use raise a RuntimeError with this text."""
        forks.keep(self._stream)
        self._stream = cast(Any, forks.Left(error))

    def ask(
        self, layer: int, q: Any, k: Any, v: Any, out_dtype: int, *, at_once: bool
    ) -> Callable[[], tuple[Any, Any]]:
        """As for `NativeStep.ask`. Sending messages never waits."""
        if self._unanswered:
            # Its answer would be taken for that of this attend.
            self._drop()
        requests = self._requests(layer, q, k, v, out_dtype)
        stream = self._stream
        if stream is None:
            stream = self._stream = _Stream(self._wire)
            requests[0].begin.CopyFrom(self._message)
        if self._ended:  # by another thread, which may not have seen the stream
            stream.cancel()
        self._unanswered = True
        for request in requests:
            stream.send(request)
        return partial(self._answer, stream, layer, q)

    def _requests(
        self, layer: int, q: Any, k: Any, v: Any, out_dtype: int
    ) -> list[attention_service_pb2.StepRequest]:
        tokens, model, q_dtype = self._message.token_count, self._model, dtype_of(q, "q")
        part_bytes = tokens * model.head_dim * model.query_head_count * itemsize(q_dtype)
        part_bytes += 2 * tokens * model.head_dim * model.kv_head_count * itemsize(dtype_of(k, "k"))
        most = (self._wire.budget_bytes - self._message.ByteSize()) // part_bytes
        if most < 1:
            raise ValueError(
                f"q, k and v of one sequence take {part_bytes} bytes, more than a message of "
                f"{self._wire.budget_bytes}"
            )
        made = []
        for start in range(0, q.shape[0], most):
            request = attention_service_pb2.StepRequest()
            attend = request.attend
            attend.layer, attend.part_start = layer, start
            if out_dtype != q_dtype:
                attend.out_dtype = out_dtype  # type: ignore[assignment]
            part = slice(start, start + most)
            fill(attend.q, q[part], "q")
            fill(attend.k, _by_token(k[part]), "k")
            fill(attend.v, _by_token(v[part]), "v")
            made.append(request)
        return made

    def _answer(self, stream: _Stream, layer: int, q: Any) -> tuple[Any, Any]:
        self._results = []
        tensors: dict[str, list[tensor_pb2.Tensor]] = {"out": [], "lse": []}
        status = None
        try:
            while len(self._results) < q.shape[0] and (status is None or self._results):
                answer = stream.receive()
                end = len(self._results) + len(answer.results)
                known = answer.results or answer.status.code
                if answer.layer != layer or end > q.shape[0] or not known:
                    raise SpillwayError("the daemon's answer is not valid", code="INTERNAL")
                self._results.extend(answer.results)
                tensors["out"].append(answer.out)
                tensors["lse"].append(answer.lse)
                if answer.status.code:
                    status = answer.status
            if status is not None:
                raise error_from_status(status)
        except SpillwayError:
            # The daemon may have ended the stream, or have tensors of some sequences only.
            self._drop()
            raise
        self._unanswered = False
        out, lse = (decoder_like(q)(_joined(each)) for each in tensors.values())
        return out, lse

    def results(self) -> SequenceABC[attention_service_pb2.AttendResult]:
        """Returns the results of the last attend, without tensors."""
        shape = self._message.token_count, self._model.query_head_count, self._model.head_dim
        for result in self._results:
            if not result.out.shape:
                # The statistics need the shape of the output.
                result.out.shape.extend(shape)
        return self._results

    def sums(self) -> LayerStatistics:
        """Returns the sums over the sequences of the last attend."""
        return LayerStatistics.of(
            [AttendResult(each, decoder_like(None)) for each in self.results()]
        )

    def _drop(self) -> None:
        """Ends the stream. An attend without an answer is given up."""
        stream, self._stream = self._stream, None
        self._unanswered = False
        if stream is not None and not self._wire.left:
            stream.cancel()

    def end(self) -> None:
        """Ends the step. An attend without an answer is given up."""
        self._ended = True
        self._drop()


class _Stream:
    """The messages of one call. One thread may send while another one receives."""

    def __init__(self, connection: Connection) -> None:
        self._requests: queue.SimpleQueue[attention_service_pb2.StepRequest | None] = (
            queue.SimpleQueue()
        )
        presence = connection.presence
        # Without the trace that is active now: the message that begins the step has its trace.
        self._responses = connection.stubs.attention.Step(
            iter(self._requests.get, None), metadata=presence and presence.metadata
        )
        # Ends grpcio's thread, which waits for messages to send, also for a step that is never
        # closed.
        weakref.finalize(self, self._requests.put, None)

    def send(self, request: attention_service_pb2.StepRequest) -> None:
        """Sends a message. If the stream has ended, `receive` raises the error."""
        self._requests.put(request)

    def receive(self) -> attention_service_pb2.StepResponse:
        """Waits for a message.

        Raises:
            SpillwayError: The stream has ended.
        """
        try:
            answer = next(self._responses, None)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        if answer is None:
            raise Unavailable("the daemon ended the stream with a step in flight")
        return cast(attention_service_pb2.StepResponse, answer)

    def cancel(self) -> None:
        """Ends the stream. A waiting `receive` returns."""
        self._requests.put(None)
        self._responses.cancel()


def _by_token(rows: Any) -> Any:
    """Rows [B, H, T, d] as [B, T, H, d]."""
    if isinstance(rows, BFloat16):
        return BFloat16(np.swapaxes(rows.bits, 1, 2))
    return rows.transpose(1, 2) if is_torch(rows) else np.swapaxes(rows, 1, 2)


def _joined(parts: list[tensor_pb2.Tensor]) -> tensor_pb2.Tensor:
    """Joins tensors along their first dimension."""
    if len(parts) == 1:
        return parts[0]
    shape = sum(part.shape[0] for part in parts), *parts[0].shape[1:]
    data = b"".join(part.data for part in parts)
    return tensor_pb2.Tensor(dtype=parts[0].dtype, shape=shape, data=data)
