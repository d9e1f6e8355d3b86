"""Streams of decode steps to several daemons."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import spillway_kv
from spillway_kv.cluster.merging import heads_of, merged_results
from spillway_kv.cluster.part import MOVES_MAX, Part
from spillway_kv.cluster.sequence import ClusterSequence, local_policy
from spillway_kv.errors import SpillwayError
from spillway_kv.policy import Policy
from spillway_kv.results import AttendResult
from spillway_kv.tensors import Array, OutDType

if TYPE_CHECKING:
    from spillway_kv.cluster.client import ClusterClient


@dataclass
class _Step:
    """The contents of a step, kept so that it can be sent again if a part has moved."""

    sequence: ClusterSequence
    layer: int
    rows: tuple[Array, Array | None, Array | None]
    options: dict[str, Any]
    policy: Policy | None
    parts: list[Part]
    # For each part: the handle that was used and the answer. failed: the first error.
    handles: list[spillway_kv.Sequence]
    answers: dict[int, AttendResult] = field(default_factory=dict)
    failed: SpillwayError | None = None
    # Number of parts in flight.
    open_count: int = 0
    moves: int = 0


class ClusterStream:
    """A stream like `spillway_kv.DecodeStream`. `ClusterClient.decode` creates it.

    A step is sent to all of its daemons before the first answer is awaited. Not thread-safe.
    """

    def __init__(self, client: ClusterClient, timeout: float | None) -> None:
        self._client = client
        self._timeout = timeout
        self._streams: dict[str, spillway_kv.DecodeStream] = {}
        self._next_id = 1
        self._pending: dict[int, _Step] = {}
        # (daemon, its correlation id) -> (number of the step, index of the part).
        self._sent: dict[tuple[str, int], tuple[int, int]] = {}
        self._closed = False

    def __enter__(self) -> ClusterStream:
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
        sequence: ClusterSequence,
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
        """Sends one step without waiting for the answer, like `spillway_kv.DecodeStream.send`."""
        if self._closed:
            raise ValueError("the stream is closed")
        parts = sequence.parts_of(layer)
        if k is not None and start is None:
            start = sequence.layer_token_counts[layer]
        options = {"start": start, "visible": visible, "out_dtype": out_dtype}
        step = _Step(sequence, layer, (q, k, v), options, policy, parts, [])
        step.handles = [part.sequence for part in parts]
        number = self._next_id
        self._next_id += 1
        self._pending[number] = step
        for index in range(len(parts)):
            try:
                self._send(number, step, index)
            except BaseException as error:
                if step.open_count and isinstance(error, SpillwayError):
                    # The daemons that got the step will answer. recv() raises the error after that.
                    step.failed = error
                    break
                del self._pending[number]
                if step.open_count:
                    self.close()  # nothing would receive those answers
                raise
        return number

    def _send(self, number: int, step: _Step, index: int) -> None:
        """Sends a part of a step to the daemon that has it."""
        part = step.parts[index]
        share, daemon = part.share, part.daemon
        step.handles[index] = part.sequence
        q, k, v = step.rows
        stream = self._streams.get(daemon)
        if stream is None or stream.closed:
            stream = self._client.placement.client(daemon).decode(timeout=self._timeout)
            self._streams[daemon] = stream
        sent = stream.send(
            part.sequence,
            share.local(step.layer),
            heads_of(q, share.query_heads(step.sequence.group), 1),
            None if k is None else heads_of(k, share.heads, 0),
            None if v is None else heads_of(v, share.heads, 0),
            policy=local_policy(step.policy, share),
            **step.options,
        )
        self._sent[daemon, sent] = number, index
        step.open_count += 1

    def recv(self) -> tuple[int, AttendResult]:
        """Waits for the answers to the oldest step, like `spillway_kv.DecodeStream.recv`."""
        if not self._pending:
            raise ValueError("no step is in flight")
        number, step = next(iter(self._pending.items()))
        while step.open_count:
            daemon = next(d for (d, _), (n, _) in self._sent.items() if n == number)
            self._take(daemon)
        del self._pending[number]
        if step.failed is not None:
            step.failed.correlation_id = number
            raise step.failed
        parts = [step.answers[index] for index in range(len(step.parts))]
        return number, merged_results(parts, step.sequence.head_counts(step.layer))

    def _take(self, daemon: str) -> None:
        """Handles the next answer of one daemon."""
        try:
            sent, result = self._streams[daemon].recv()
        except SpillwayError as error:
            if error.correlation_id is not None:
                self._failed(*self._answered(daemon, error.correlation_id), error)
                return
            # The stream broke, and all its steps in flight with it.
            broken = [key for key in self._sent if key[0] == daemon]
            for _, each in broken:
                self._failed(*self._answered(daemon, each), error)
            return
        number, index = self._answered(daemon, sent)
        self._pending[number].answers[index] = result

    def _answered(self, daemon: str, sent: int) -> tuple[int, int]:
        number, index = self._sent.pop((daemon, sent))
        self._pending[number].open_count -= 1
        return number, index

    def _failed(self, number: int, index: int, error: SpillwayError) -> None:
        """Sends a part again if it has moved. Otherwise stores the error."""
        step = self._pending[number]
        try:
            moved = step.moves < MOVES_MAX and step.parts[index].follow(error, step.handles[index])
        except SpillwayError as lost:
            error, moved = lost, False
        if not moved:
            step.failed = step.failed or error
            return
        step.moves += 1
        q, k, _ = step.rows
        if k is not None and step.options["visible"] is None:
            # A later step may have appended its tokens already.
            start = step.options["start"]
            step.options["visible"] = range(start + 1, start + q.shape[0] + 1)
        try:
            self._send(number, step, index)
        except SpillwayError as again:
            step.failed = step.failed or again

    def step(
        self, sequence: ClusterSequence, layer: int, q: Array, *rest: Any, **options: Any
    ) -> Any:
        """Sends one step and waits for its answer. The arguments are those of `send`."""
        if self._pending:
            raise ValueError(
                f"{len(self._pending)} steps are in flight: receive their answers first"
            )
        self.send(sequence, layer, q, *rest, **options)
        return self.recv()[1]

    @property
    def transport(self) -> str:
        """`cluster`: several daemons."""
        return "cluster"

    @property
    def closed(self) -> bool:
        """Whether it was closed, or the stream of a daemon has ended with an error."""
        return self._closed or any(stream.closed for stream in self._streams.values())

    def close(self) -> None:
        """Ends the streams. Steps in flight are abandoned."""
        self._closed = True
        for stream in self._streams.values():
            stream.close()
