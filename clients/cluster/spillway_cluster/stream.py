"""Streams of decode steps to several daemons."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from spillway.errors import SpillwayError
from spillway.policy import Policy
from spillway.results import AttendResult
from spillway.tensors import Array, OutDType

from spillway_cluster.merging import heads_of, merged_results
from spillway_cluster.sequence import SplitSequence, local_policy

if TYPE_CHECKING:
    from spillway_cluster.client import SplitClient


@dataclass
class _Asked:
    numbers: list[int]
    head_counts: list[int]
    answers: dict[int, AttendResult]
    failed: SpillwayError | None = None


class SplitStream:
    """As `spillway.DecodeStream`; `SplitClient.decode` makes it.

    A step is sent to all its daemons before the first answer is waited for. Not thread-safe.
    """

    def __init__(self, client: SplitClient, timeout: float | None) -> None:
        self._streams = [each.decode(timeout=timeout) for each in client.clients]
        self._next_id = 1
        self._pending: dict[int, _Asked] = {}
        # What each daemon's stream calls a step.
        self._ids: list[dict[int, int]] = [{} for _ in client.clients]

    def __enter__(self) -> SplitStream:
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
        sequence: SplitSequence,
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
        """Sends one step without waiting for its answer; as `spillway.DecodeStream.send`."""
        numbers = sequence.pieces_of(layer)
        if k is not None and start is None:
            start = sequence.layer_token_counts[layer]
        number_of_step = self._next_id
        self._next_id += 1
        for number in numbers:
            share, part = sequence.pieces[number]
            sent = self._streams[number].send(
                part,
                share.local(layer),
                heads_of(q, share.query_heads(sequence.group), 1),
                None if k is None else heads_of(k, share.heads, 0),
                None if v is None else heads_of(v, share.heads, 0),
                start=start,
                visible=visible,
                policy=local_policy(policy, share),
                out_dtype=out_dtype,
            )
            self._ids[number][sent] = number_of_step
        counts = [len(sequence.pieces[number].share.kv_heads) for number in numbers]
        self._pending[number_of_step] = _Asked(numbers, counts, {})
        return number_of_step

    def recv(self) -> tuple[int, AttendResult]:
        """Waits for the answers to the oldest step; as `spillway.DecodeStream.recv`."""
        if not self._pending:
            raise ValueError("no step is in flight")
        step, asked = next(iter(self._pending.items()))
        for number in asked.numbers:
            while step in self._ids[number].values():
                self._take(number)
        del self._pending[step]
        if asked.failed is not None:
            asked.failed.correlation_id = step
            raise asked.failed
        parts = [asked.answers[number] for number in asked.numbers]
        return step, merged_results(parts, asked.head_counts)

    def _take(self, number: int) -> None:
        """Takes one daemon's next answer."""
        try:
            sent, result = self._streams[number].recv()
        except SpillwayError as error:
            if error.correlation_id is None:
                raise
            step = self._ids[number].pop(error.correlation_id)
            self._pending[step].failed = self._pending[step].failed or error
            return
        step = self._ids[number].pop(sent)
        self._pending[step].answers[number] = result

    def step(
        self, sequence: SplitSequence, layer: int, q: Array, *rest: Any, **options: Any
    ) -> Any:
        """Sends one step and waits for its answer; arguments as `send`."""
        if self._pending:
            raise ValueError(f"{len(self._pending)} steps are in flight; recv them first")
        self.send(sequence, layer, q, *rest, **options)
        return self.recv()[1]

    @property
    def transport(self) -> str:
        """`split`: several daemons."""
        return "split"

    @property
    def closed(self) -> bool:
        """Whether a stream has ended, by `close` or by a failure."""
        return any(stream.closed for stream in self._streams)

    def close(self) -> None:
        """Ends the streams; steps in flight are abandoned."""
        for stream in self._streams:
            stream.close()
