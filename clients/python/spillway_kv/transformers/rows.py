"""The daemon's side of a cache: one sequence per batch row."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from spillway_kv.attend_sums import LayerStatistics
from spillway_kv.client import Client
from spillway_kv.decoding import Decoding
from spillway_kv.errors import SpillwayError
from spillway_kv.policy import Policy
from spillway_kv.prefill import Prefill
from spillway_kv.results import AttendResult
from spillway_kv.sequence import Sequence
from spillway_kv.transformers.appends import Appends
from spillway_kv.transformers.daemon_model import DaemonModel
from spillway_kv.transformers.transfer import to_host

_EXACT = Policy(selector="all")


@dataclass
class Row:
    """A batch row: its sequence, and the number of padding positions before it."""

    sequence: Sequence
    padding: int = 0


def delete(rows: SequenceABC[Row]) -> None:
    """Deletes the rows' sequences. Sequences that the daemon has lost are not an error."""
    for row in rows:
        # The client may be closed, the daemon gone, or the sequence expired. If it still exists,
        # its ttl will delete it.
        with suppress(SpillwayError, ValueError):
            row.sequence.delete()


@contextmanager
def _deleted_on_error(rows: SequenceABC[Row]) -> Iterator[None]:
    """Deletes the rows in the list if an error prevents others from being made."""
    try:
        yield
    except BaseException:
        delete(rows)
        raise


class RowStore:
    """Creates, forks, truncates and deletes the sequences of a cache's rows.

    It does not refer to the cache's contents, so that these can be garbage-collected while their
    finalizer holds the store. Not thread-safe.
    """

    def __init__(
        self,
        client: Client,
        model: DaemonModel,
        *,
        policy: Policy | None,
        ttl: datetime.timedelta | float | None,
        prefill_block_token_count: int,
    ) -> None:
        self.client = client
        self.model = model
        self.policy = policy
        self.rows: list[Row] = []
        # Whether the sequences outlive the cache.
        self.keeps = False
        # Appends of the rows' prompts. They may continue between forward passes.
        self.appends = Appends()
        self.prefill = Prefill(block_token_count=prefill_block_token_count)
        # Overrides the policy of the rows. A fork has the policy of its source.
        self.request_policy: Policy | None = None
        self._ttl = ttl
        self._decoding = Decoding(client)

    def open(self, batch_size: int, dtype: torch.dtype, scaling: float) -> None:
        """Creates the model in the daemon, and an empty sequence for each row."""
        model = self.model.suitable(dtype, scaling, anew=not self.rows)
        if not self.rows:
            made: list[Row] = []
            with _deleted_on_error(made):
                for _ in range(batch_size):
                    sequence = self.client.create_sequence(model, policy=self.policy, ttl=self._ttl)
                    made.append(Row(sequence))
            self.rows = made
        if len(self.rows) != batch_size:
            raise ValueError(f"the cache holds {len(self.rows)} rows, the batch has {batch_size}")

    def decode(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: SequenceABC[int],
        *,
        exact: bool = False,
        with_results: bool = False,
    ) -> torch.Tensor:
        """Appends the new tokens of all rows, and attends with their queries.

        Args:
            layer: The layer.
            q: Queries [B, H_q, T, d]. All T tokens of each row are new.
            k: Keys [B, H_kv, T, d].
            v: Values, with the same shape.
            starts: Position of each row's first new token.
            exact: Attend to all tokens, whatever the policy.
            with_results: `results` is called afterwards.

        Returns:
            Output [B, T, H_q, d] on q's device.
        """
        if layer == 0 or not self._decoding.in_step:
            self.appends.finish()
            self._decoding.begin(
                [row.sequence for row in self.rows],
                starts,
                device=q.device,
                policy=_EXACT if exact else self.request_policy,
                token_count=q.shape[2],
                decoder=not (exact or with_results),
            )
        return self._decoding.attend(layer, q.transpose(1, 2), k, v)

    def results(self) -> list[AttendResult]:
        """Returns the results of the last `decode`, one for each row."""
        return self._decoding.results()

    def suspend(self) -> None:
        """Closes the decoder and waits for appends, after which the rows are complete.

        Raises:
            SpillwayError: An append, or a step on the GPU, has failed.
        """
        self.end_decoding()
        self.appends.finish()

    def end_decoding(self) -> None:
        """Closes the decoder, so that other requests for the sequences are served again.

        Raises:
            SpillwayError: A step has failed on the GPU.
        """
        self._decoding.release()

    def take_statistics(self) -> dict[int, LayerStatistics]:
        """Returns the statistics of `decode` for each layer since the last call."""
        return self._decoding.take_statistics()

    def step(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: SequenceABC[int],
        counts: SequenceABC[int],
        *,
        exact: bool = False,
    ) -> list[tuple[int, torch.Tensor, AttendResult]]:
        """The same as `decode`, with another number of new tokens for each row.

        Args:
            layer: The layer.
            q: Queries [B, H_q, T, d].
            k: Keys [B, H_kv, T, d].
            v: Values, with the same shape.
            starts: Position of each row's first new token.
            counts: Number of new tokens of each row, at most T: the last ones of its T positions.
                Rows without new tokens are left out.
            exact: Attend to all tokens, whatever the policy.

        Returns:
            A tuple (row, queries [count, H_q, d], result) for each row with new tokens, all in host
            memory.
        """
        self.suspend()
        q, k, v = to_host((q, k, v))
        length = q.shape[2]
        active = [row for row, count in enumerate(counts) if count > 0]
        queries = {row: q[row, :, length - counts[row] :].transpose(0, 1) for row in active}
        for row in active:
            new = slice(length - counts[row], length)
            self.rows[row].sequence.append(layer, starts[row], k[row, :, new], v[row, :, new])
        answers = self.client.attend(
            layer,
            {self.rows[row].sequence: query for row, query in queries.items()},
            _EXACT if exact else self.request_policy,
        )
        return [(row, queries[row], answers[self.rows[row].sequence]) for row in active]

    def selected(self, indices: SequenceABC[int]) -> list[Row]:
        """Returns rows of which row i is what row indices[i] is now. Does not replace the rows.

        A sequence that is needed again is forked. If a fork fails, no fork is left.
        """
        self.suspend()
        rows: list[Row] = []
        forks: list[Row] = []
        taken: set[int] = set()
        with _deleted_on_error(forks):
            for index in indices:
                source = self.rows[index]
                if index in taken:
                    forks.append(Row(source.sequence.fork(), source.padding))
                    rows.append(forks[-1])
                else:
                    taken.add(index)
                    rows.append(source)
        return rows

    def truncate(self, length: int) -> None:
        """Cuts every row so that it ends at this position, which includes padding."""
        self.suspend()
        self.cut(length)

    def cut(self, length: int) -> None:
        """The same, if no append and no decoder is running."""
        for row in self.rows:
            row.sequence.truncate(max(length - row.padding, 0))
            row.padding = min(row.padding, length)

    def fork(self) -> RowStore:
        """Copies every row. The sequences of the copy share pages with these."""
        self.suspend()
        made = RowStore(
            self.client,
            copy.copy(self.model),
            policy=self.policy,
            ttl=self._ttl,
            prefill_block_token_count=self.prefill.block_token_count,
        )
        made.request_policy = self.request_policy
        with _deleted_on_error(made.rows):
            made.rows.extend(Row(row.sequence.fork(), row.padding) for row in self.rows)
        return made

    def abandon(self) -> None:
        """Gives up work in progress. What it has appended stays until `cut` or `drop`."""
        self.appends.abandon()
        self.prefill.close()
        self._decoding.abandon()

    def drop(self) -> None:
        """Empties the store, and deletes the sequences unless they are to be kept."""
        rows, self.rows = self.rows, []
        if not self.keeps:
            delete(rows)

    def release(self) -> None:
        """Deletes the sequences. Sequences that the daemon has lost are not an error."""
        try:
            self.abandon()
        finally:
            self.drop()
