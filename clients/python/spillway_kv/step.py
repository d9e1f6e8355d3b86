"""Decode steps of several sequences: announced once, then attended layer by layer."""

from __future__ import annotations

import operator
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from spillway_kv._library import Sums
from spillway_kv._native import Carrier
from spillway_kv._native_step import NativeStep
from spillway_kv._proto import attention_service_pb2
from spillway_kv.attend_sums import LayerStatistics
from spillway_kv.connection import wire
from spillway_kv.errors import Cancelled, NotFound, SpillwayError
from spillway_kv.policy import Policy
from spillway_kv.restart import BROKEN
from spillway_kv.results import AttendResult, Model
from spillway_kv.sequence import Sequence, explained
from spillway_kv.tensors import (
    Array,
    DTypeName,
    OutDType,
    decoder_like,
    dtype_number,
    dtype_of,
    engine_array,
)
from spillway_kv.tracing import trace_id

if TYPE_CHECKING:
    from spillway_kv.client import Client

T = TypeVar("T")


class _Together:
    """Sequences of one model that take steps together, with the checks of their tensors."""

    def __init__(self, client: Client, sequences: SequenceABC[Sequence], token_count: int) -> None:
        limits = client.server_info.limits
        if not 1 <= len(sequences) <= limits.attend_item_count_max:
            raise ValueError(
                f"{len(sequences)} sequences are not in [1, {limits.attend_item_count_max}]"
            )
        if not 1 <= token_count <= limits.sparse_query_token_count_max:
            raise ValueError(
                f"token_count {token_count} is not in [1, {limits.sparse_query_token_count_max}]"
            )
        seen = set()
        for sequence in sequences:
            if sequence.name in seen:
                raise ValueError(f"{sequence.name} is named twice")
            if sequence.model != sequences[0].model:
                raise ValueError(
                    f"{sequence.name} is of {sequence.model}, {sequences[0].name} of "
                    f"{sequences[0].model}"
                )
            seen.add(sequence.name)
        self.sequences = tuple(sequences)
        self.token_count = token_count
        self._model = self.sequences[0]._described()

        # Id of the trace in which this was begun.
        self._trace = trace_id()

    def _description(
        self, starts: SequenceABC[int], policy: Policy | None
    ) -> attention_service_pb2.DecodeStep:
        message = attention_service_pb2.DecodeStep(
            token_count=self.token_count,
            policy=None if policy is None else policy.to_proto(),
            trace_id=self._trace,
        )
        for sequence, start in zip(self.sequences, starts, strict=True):
            message.parts.add(
                sequence=sequence.name, token_start=start, generation=sequence.generation
            )
        return message

    def _check(self, q: Any, k: Any, v: Any, out_dtype: OutDType | None) -> int:
        """Checks the tensors of a layer. Returns the element type of the output."""
        return check_tensors(
            self._model, (len(self.sequences), self.token_count), (q, k, v), out_dtype
        )


@dataclass(frozen=True)
class HeadShapes:
    """The heads of a model whose other properties do not matter.

    Attributes:
        query_head_count: Query heads per layer.
        kv_head_count: K/V heads per layer.
        head_dim: Elements of a key.
        dtype: Element type of K and V rows.
    """

    query_head_count: int
    kv_head_count: int
    head_dim: int
    dtype: DTypeName


def check_tensors(
    model: Model | HeadShapes,
    counts: tuple[int, int],
    arrays: tuple[Any, Any, Any],
    out_dtype: OutDType | None,
) -> int:
    """Checks the tensors of a layer of a step.

    Args:
        model: Model of the sequences.
        counts: Number of sequences of the step, and number of new tokens of each.
        arrays: q, k and v.
        out_dtype: Requested element type of the output.

    Returns:
        Number of the output's element type.

    Raises:
        ValueError: A shape or type does not fit.
    """
    q, k, v = arrays
    batch, tokens = counts
    rows = (batch, model.kv_head_count, tokens, model.head_dim)
    queries = (batch, tokens, model.query_head_count, model.head_dim)
    for array, shape, what in ((q, queries, "q"), (k, rows, "k"), (v, rows, "v")):
        if tuple(array.shape) != shape:
            raise ValueError(f"{what} has shape {list(array.shape)}, not {list(shape)}")
        if what != "q" and dtype_of(array, what) != dtype_number(model.dtype):
            raise ValueError(f"{what} has another dtype than the model, {model.dtype}")
    return dtype_of(q, "q") if out_dtype is None else dtype_number(out_dtype)


def _raised(error: SpillwayError) -> NoReturn:
    raise error


class DecodeStep(_Together):
    """One decode step of several sequences. `Client.begin_step` creates it.

    Positions and policy are the same in all layers and are sent once. Layers may be attended in
    any order. Each layer attends after its new tokens are appended. With an embedded engine
    nothing is copied: it reads q, k and v in place, and writes the outputs to new arrays. With a
    daemon on this host, they are passed through shared memory, and with other daemons in
    messages. Not thread-safe, but any thread may close it: an attend that runs then
    completes, or raises ValueError.

    Attributes:
        sequences: The sequences, in the order of the arrays.
        starts: Position of the first new token of each sequence.
        token_count: Number of new tokens of each sequence.
    """

    def __init__(
        self,
        client: Client,
        sequences: SequenceABC[Sequence],
        token_count: int,
        policy: Policy | None,
        starts: SequenceABC[int] | None = None,
    ) -> None:
        super().__init__(client, sequences, token_count)
        self._client, self._policy = client, policy
        self._wire = wire(client)
        self.starts = self._checked(starts)
        # None: the step must be begun again before the next attend.
        self._kind: NativeStep | None = self._wire.restarts.again(self._begun)
        self._closed = False
        # Outputs of the last attend. None: it has failed, or there was none.
        self._last: tuple[Any, Any] | None = None

    def _checked(self, starts: SequenceABC[int] | None) -> tuple[int, ...]:
        """Returns the position of the first new token of each sequence."""
        if starts is None:
            return tuple(sequence.token_count for sequence in self.sequences)
        if len(starts) != len(self.sequences):
            raise ValueError(
                f"{len(starts)} starts for {len(self.sequences)} sequences: one for each is needed"
            )
        for sequence, start in zip(self.sequences, starts, strict=True):
            if start < 0:
                raise ValueError(f"start {start} of {sequence.name} is below 0")
        return tuple(map(operator.index, starts))

    def _begun(self) -> NativeStep:
        message = self._description(self.starts, self._policy)
        try:
            step = NativeStep(self._wire.channel, message, self._model, self._wire.carrier)
        except NotFound as error:
            raise explained(error, self.sequences) from None
        carrier, reason = step.carrier()
        if carrier == Carrier.MESSAGES:
            # Statistics.transport reports this.
            self._wire.no_doorbell = reason
        return step

    def _ask(
        self, layer: int, q: Any, k: Any, v: Any, out_dtype: int, at_once: bool
    ) -> Callable[[], tuple[Any, Any]]:
        if self._closed:
            raise ValueError("the step is closed")
        kind = self._kind = self._kind or self._begun()
        if self._closed:  # by another thread, which may not have seen it
            kind.end()
            raise ValueError("the step is closed")
        return self._unbroken(partial(kind.ask, layer, q, k, v, out_dtype, at_once=at_once))

    def _unbroken(self, call: Callable[[], T]) -> T:
        """Calls. If a restart breaks the call, makes the next attend begin the step again."""
        try:
            return call()
        except BROKEN:
            # The announced step has ended. The layer may or may not have the new tokens.
            if self._kind is not None and self._client.server_info.store_id:
                self._kind.end()
                self._kind = None
            raise

    def __enter__(self) -> DecodeStep:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def attend(
        self, layer: int, q: Array, k: Array, v: Array, *, out_dtype: OutDType | None = None
    ) -> tuple[Any, Any]:
        """Appends the new tokens' K and V to a layer, and attends.

        Args:
            layer: Layer, [0, layer_count).
            q: Queries [B, T, H_q, d] after the positional encoding. Query t of a sequence sees
                the tokens before the step and the new tokens up to t.
            k: Keys of the new tokens [B, H_kv, T, d] in the model's dtype.
            v: Values, with the same shape.
            out_dtype: Element type of the output. None means that of q.

        Returns:
            Output [B, T, H_q, d] and log-sum-exp [B, T, H_q], of q's kind and device.

        Raises:
            SpillwayError: The first sequence that failed. Its layer does not have the new tokens
                then. The layers of the other sequences may have them.
            ValueError: A shape does not fit the step.
            KeyboardInterrupt: Raised while waiting for the answer. The step is then closed. The
                daemon may still append this layer's new tokens. `Sequence.truncate` to `starts`
                waits for that, and makes all layers equally long again.
        """
        return self._asked(layer, q, k, v, out_dtype, at_once=False)()

    def _asked(
        self, layer: int, q: Any, k: Any, v: Any, out_dtype: OutDType | None, *, at_once: bool
    ) -> Callable[[], tuple[Any, Any]]:
        """The same as `attend` in two parts, for callers that ask several daemons before they wait.

        Args:
            layer: As for `attend`, like the arrays.
            q: Queries.
            k: Keys.
            v: Values.
            out_dtype: Element type of the output.
            at_once: Return before the answer has arrived.

        Returns:
            A function that waits for the answer and returns it. It must be called before anything
            else is done with the step. It raises the same errors as `attend`, except ValueErrors,
            which are raised here.
        """
        q, k, v = engine_array(q, "q"), engine_array(k, "k"), engine_array(v, "v")
        asked = self._check(q, k, v, out_dtype)
        self._last = None
        ask = partial(self._ask, layer, q, k, v, asked)
        first: Callable[[], tuple[Any, Any]] | None
        try:
            first = self._guarded(partial(ask, at_once))
        except BROKEN as error:
            first = partial(_raised, error)

        def answer() -> tuple[Any, Any]:
            nonlocal first
            taken, first = first, None
            return self._unbroken(taken or ask(False))

        return partial(self._guarded, lambda: self._noted(layer, answer))

    def _noted(self, layer: int, answer: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        outputs = self._wire.restarts.again(answer)
        self._appended(layer)
        self._last = outputs
        return outputs

    def _appended(self, layer: int) -> None:
        """Notes that the new tokens are appended to a layer."""
        for sequence, start in zip(self.sequences, self.starts, strict=True):
            sequence._expect(layer, start + self.token_count)

    def _guarded(self, call: Callable[[], T]) -> T:
        """Calls. After a failure, the lengths of the sequences are asked for again."""
        try:
            return call()
        except BaseException as error:
            for sequence in self.sequences:
                sequence._forget()
            if isinstance(error, NotFound):
                raise explained(error, self.sequences) from None
            if isinstance(error, Cancelled) and self._closed:
                raise ValueError("the step is closed") from None  # by another thread
            if not isinstance(error, Exception):
                self.close()
            raise

    def results(self) -> list[AttendResult]:
        """Returns the full results of the last attend, one per sequence, with certificates.

        Raises:
            ValueError: No layer was attended, or the last attend failed.
        """
        kind, (out, lse) = self._attended()
        made = []
        for i, message in enumerate(kind.results()):
            result = AttendResult(message, decoder_like(None))
            result.__dict__.update(out=out[i], lse=lse[i])
            made.append(result)
        return made

    def sums(self) -> Sums | LayerStatistics:
        """Returns the sums over the results of the last attend, without the results themselves.

        Raises:
            ValueError: No layer was attended, or the last attend failed.
        """
        return self._attended()[0].sums()

    def _attended(self) -> tuple[NativeStep, tuple[Any, Any]]:
        if self._wire.left:
            raise RuntimeError(self._wire.left)
        if self._closed:
            raise ValueError("the step is closed")
        if self._kind is None or self._last is None:
            raise ValueError(
                "the step has no results: no layer was attended, or the last attend failed"
            )
        return self._kind, self._last

    def close(self) -> None:
        """Ends the step."""
        self._closed = True
        kind = self._kind
        if kind is not None:
            kind.end()
