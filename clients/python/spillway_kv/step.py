"""Decode steps of several sequences: announced once, then attended layer by layer."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from types import TracebackType
from typing import Any

from spillway_kv._library import Sums
from spillway_kv.attend_sums import LayerStatistics
from spillway_kv.connection import Connection
from spillway_kv.policy import Policy
from spillway_kv.results import AttendResult
from spillway_kv.sequence import Sequence
from spillway_kv.step_state import StepState
from spillway_kv.tensors import Array, OutDType, decoder_like


class DecodeStep:
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
        connection: Connection,
        sequences: SequenceABC[Sequence],
        token_count: int,
        policy: Policy | None,
        starts: SequenceABC[int] | None = None,
    ) -> None:
        self.state = StepState(connection, sequences, token_count, policy, starts)
        """@private For other modules of the package."""
        self.sequences = self.state.batch.sequences
        self.starts = self.state.starts
        self.token_count = token_count

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
        return self.state.ask(layer, q, k, v, out_dtype, at_once=False)()

    def results(self) -> list[AttendResult]:
        """Returns the full results of the last attend, one per sequence, with certificates.

        Raises:
            ValueError: No layer was attended, or the last attend failed.
        """
        native, (out, lse) = self.state.attended()
        made = []
        for i, message in enumerate(native.results()):
            result = AttendResult(message, decoder_like(None))
            result.__dict__.update(out=out[i], lse=lse[i])
            made.append(result)
        return made

    def sums(self) -> Sums | LayerStatistics:
        """Returns the sums over the results of the last attend, without the results themselves.

        Raises:
            ValueError: No layer was attended, or the last attend failed.
        """
        return self.state.attended()[0].sums()

    def close(self) -> None:
        """Ends the step."""
        self.state.close()
