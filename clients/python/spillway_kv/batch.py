"""Sequences that take decode steps together, and the checks of a step's tensors."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Any

from spillway_kv._proto import attention_service_pb2
from spillway_kv.connection import Connection
from spillway_kv.policy import Policy
from spillway_kv.results import Model
from spillway_kv.sequence import Sequence
from spillway_kv.tensors import DTypeName, OutDType, dtype_number, dtype_of
from spillway_kv.tracing import trace_id


class Batch:
    """Sequences of one model that take steps together.

    Attributes:
        sequences: The sequences, in the order of the tensors.
        token_count: Number of new tokens of each sequence in a step.
        model: Model of the sequences.
    """

    def __init__(
        self, connection: Connection, sequences: SequenceABC[Sequence], token_count: int
    ) -> None:
        """Asks for the model if it is not known.

        Raises:
            ValueError: The sequences are of different models, one is named twice, or there are too
                few or too many of them or of the tokens.
            NotFound: The first sequence was deleted or has expired.
        """
        limits = connection.server_info.limits
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
        self.model = self.sequences[0].state.described()
        # Id of the trace in which the steps were begun.
        self._trace = trace_id()

    def description(
        self, starts: SequenceABC[int], policy: Policy | None
    ) -> attention_service_pb2.DecodeStep:
        """Returns the message that begins a step at these positions."""
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

    def check(self, q: Any, k: Any, v: Any, out_dtype: OutDType | None) -> int:
        """Checks the tensors of a layer, as `check_tensors` does."""
        counts = len(self.sequences), self.token_count
        return check_tensors(self.model, counts, (q, k, v), out_dtype)

    def forget(self) -> None:
        """Makes the next use of a length of a sequence ask the daemon for it."""
        for sequence in self.sequences:
            sequence.state.forget()


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
