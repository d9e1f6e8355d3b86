"""Decode steps of sequences whose heads lie on several daemons."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from types import TracebackType
from typing import TYPE_CHECKING, Any

import spillway
from spillway.policy import Policy
from spillway.results import AttendResult
from spillway.tensors import Array, OutDType

from spillway_cluster.merging import heads_of, joined, merged_results
from spillway_cluster.sequence import SplitSequence, local_policy

if TYPE_CHECKING:
    from spillway_cluster.client import SplitClient


class SplitStep:
    """As `spillway.DecodeStep`; `SplitClient.begin_step` makes it. Not thread-safe.

    Attributes:
        sequences: The sequences, in the order of the arrays.
        starts: Position of each one's first new token.
        token_count: New tokens of each.
    """

    def __init__(
        self,
        client: SplitClient,
        sequences: SequenceABC[SplitSequence],
        token_count: int,
        policy: Policy | None,
    ) -> None:
        if not sequences:
            raise ValueError("a step needs a sequence")
        self._client = client
        self.sequences = tuple(sequences)
        self.token_count = token_count
        self.starts = tuple(sequence.token_count for sequence in sequences)
        first = sequences[0]
        self._steps: list[spillway.DecodeStep] = []
        try:
            for number, daemon in enumerate(client.clients):
                share = first.pieces[number].share
                self._steps.append(
                    daemon.begin_step(
                        [sequence.pieces[number].sequence for sequence in sequences],
                        token_count=token_count,
                        policy=local_policy(policy, share),
                    )
                )
        except BaseException:
            self.close()
            raise
        self._last: list[int] = []

    def __enter__(self) -> SplitStep:
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
        """Appends the new tokens' K and V at a layer and attends, on all daemons at once.

        Arguments, results and errors as of `spillway.DecodeStep.attend`. After an error some
        daemons may have the new tokens; the same call may be repeated.
        """
        first = self.sequences[0]
        numbers = first.pieces_of(layer)

        def ask(number: int) -> tuple[Any, Any]:
            share = first.pieces[number].share
            return self._steps[number].attend(
                share.local(layer),
                heads_of(q, share.query_heads(first.group), 2),
                heads_of(k, share.heads, 1),
                heads_of(v, share.heads, 1),
                out_dtype=out_dtype,
            )

        answers = self._client.each(ask, numbers)
        self._last = numbers
        return joined([out for out, _ in answers], 2), joined([lse for _, lse in answers], 2)

    def results(self) -> list[AttendResult]:
        """Returns all of the last attend, one for each sequence: certificate and counts too."""
        if not self._last:
            raise ValueError("the step's last layer was not attended")
        parts = [self._steps[number].results() for number in self._last]
        heads = [len(self.sequences[0].pieces[number].share.kv_heads) for number in self._last]
        return [merged_results(list(each), heads) for each in zip(*parts, strict=True)]

    def close(self) -> None:
        """Ends the step."""
        for step in self._steps:
            step.close()
