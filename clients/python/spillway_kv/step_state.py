"""The calls of a decode step, which is begun again if a restart of the daemon breaks it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from functools import partial
from typing import Any, NoReturn, TypeVar

from spillway_kv._native import Carrier
from spillway_kv._native_step import NativeStep
from spillway_kv.batch import Batch
from spillway_kv.connection import Connection
from spillway_kv.errors import Cancelled, NotFound, SpillwayError
from spillway_kv.policy import Policy
from spillway_kv.restart import BROKEN
from spillway_kv.sequence import Sequence
from spillway_kv.sequence_state import explained
from spillway_kv.tensors import OutDType, engine_array

T = TypeVar("T")


def _raised(error: SpillwayError) -> NoReturn:
    raise error


class StepState:
    """What a `DecodeStep` is about, also for callers that ask several daemons at once.

    Attributes:
        batch: The sequences.
        starts: Position of the first new token of each sequence.
        native: The step in libspillway. None: it must be begun again before the next attend.
        outputs: Output and log-sum-exp of the last attend. None: it has failed, or there was none.
    """

    def __init__(
        self,
        connection: Connection,
        sequences: SequenceABC[Sequence],
        token_count: int,
        policy: Policy | None,
        starts: SequenceABC[int] | None,
    ) -> None:
        """Begins the step. Arguments as for `Client.begin_step`."""
        self.batch = Batch(connection, sequences, token_count)
        self._wire, self._policy = connection, policy
        self.starts = self._checked(starts)
        self.native: NativeStep | None = connection.restarts.again(self._begun)
        self.outputs: tuple[Any, Any] | None = None
        self._closed = False

    def _checked(self, starts: SequenceABC[int] | None) -> tuple[int, ...]:
        """Returns the position of the first new token of each sequence."""
        sequences = self.batch.sequences
        if starts is None:
            return tuple(sequence.token_count for sequence in sequences)
        if len(starts) != len(sequences):
            raise ValueError(
                f"{len(starts)} starts for {len(sequences)} sequences: one for each is needed"
            )
        for sequence, start in zip(sequences, starts, strict=True):
            if start < 0:
                raise ValueError(f"start {start} of {sequence.name} is below 0")
        return tuple(map(operator.index, starts))

    def _begun(self) -> NativeStep:
        message = self.batch.description(self.starts, self._policy)
        try:
            step = NativeStep(self._wire.channel, message, self.batch.model, self._wire.carrier)
        except NotFound as error:
            raise self._explained(error) from None
        carrier, reason = step.carrier()
        if carrier == Carrier.MESSAGES:
            # Statistics.transport reports this.
            self._wire.no_doorbell = reason
        return step

    def _explained(self, error: NotFound) -> SpillwayError:
        return explained(error, (sequence.state for sequence in self.batch.sequences))

    def ask(
        self, layer: int, q: Any, k: Any, v: Any, out_dtype: OutDType | None, *, at_once: bool
    ) -> Callable[[], tuple[Any, Any]]:
        """The same as `DecodeStep.attend` in two parts.

        Args:
            layer: As for `DecodeStep.attend`, like the arrays.
            q: Queries.
            k: Keys.
            v: Values.
            out_dtype: Element type of the output.
            at_once: Return before the answer has arrived.

        Returns:
            A function that waits for the answer and returns it. It must be called before anything
            else is done with the step. It raises the same errors as `DecodeStep.attend`, except
            ValueErrors, which are raised here.
        """
        q, k, v = engine_array(q, "q"), engine_array(k, "k"), engine_array(v, "v")
        asked = self.batch.check(q, k, v, out_dtype)
        self.outputs = None
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

    def _ask(
        self, layer: int, q: Any, k: Any, v: Any, out_dtype: int, at_once: bool
    ) -> Callable[[], tuple[Any, Any]]:
        if self._closed:
            raise ValueError("the step is closed")
        native = self.native = self.native or self._begun()
        if self._closed:  # by another thread, which may not have seen it
            native.end()
            raise ValueError("the step is closed")
        return self._unbroken(partial(native.ask, layer, q, k, v, out_dtype, at_once=at_once))

    def _unbroken(self, call: Callable[[], T]) -> T:
        """Calls. If a restart breaks the call, makes the next attend begin the step again."""
        try:
            return call()
        except BROKEN:
            # The announced step has ended. The layer may or may not have the new tokens.
            if self.native is not None and self._wire.server_info.store_id:
                self.native.end()
                self.native = None
            raise

    def _noted(self, layer: int, answer: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        outputs = self._wire.restarts.again(answer)
        self.note_append(layer)
        self.outputs = outputs
        return outputs

    def note_append(self, layer: int) -> None:
        """Notes that the new tokens are appended to a layer."""
        for sequence, start in zip(self.batch.sequences, self.starts, strict=True):
            sequence.state.expect(layer, start + self.batch.token_count)

    def _guarded(self, call: Callable[[], T]) -> T:
        """Calls. After a failure, the lengths of the sequences are asked for again."""
        try:
            return call()
        except BaseException as error:
            self.batch.forget()
            if isinstance(error, NotFound):
                raise self._explained(error) from None
            if isinstance(error, Cancelled) and self._closed:
                raise ValueError("the step is closed") from None  # by another thread
            if not isinstance(error, Exception):
                self.close()
            raise

    def attended(self) -> tuple[NativeStep, tuple[Any, Any]]:
        """Returns the step in libspillway and the outputs of the last attend.

        Raises:
            ValueError: No layer was attended, or the last attend failed, or the step is closed.
        """
        if self._wire.left:
            raise RuntimeError(self._wire.left)
        if self._closed:
            raise ValueError("the step is closed")
        if self.native is None or self.outputs is None:
            raise ValueError(
                "the step has no results: no layer was attended, or the last attend failed"
            )
        return self.native, self.outputs

    def close(self) -> None:
        """Ends the step."""
        self._closed = True
        native = self.native
        if native is not None:
            native.end()
