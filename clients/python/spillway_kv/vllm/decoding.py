"""Decode steps of several requests with one token each. Does not import vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import spillway_kv
from spillway_kv.attend_sums import LayerStatistics
from spillway_kv.kept_decoder import KeptDecoder
from spillway_kv.policy import Policy
from spillway_kv.sequence import Sequence
from spillway_kv.step import DecodeStep
from spillway_kv.vllm.step_plan import PlannedRequest


@dataclass
class Row:
    """A request of the step, and the position of its tokens in the batch.

    Attributes:
        plan: The request.
        begin: Position of its first token in the batch.
        sequence: Sequence with its K/V.
        alive: False if it was lost in this step.
    """

    plan: PlannedRequest
    begin: int
    sequence: Sequence
    alive: bool = True

    @property
    def end(self) -> int:
        """Position after its last token in the batch."""
        return self.begin + self.plan.token_count


class Group:
    """Rows with one token each that attend with the same policy.

    Attributes:
        rows: The rows, in the order of the batch.
        policy: Their policy. None means the engine's default.
        together: Whether they are served together. After a failure each is served on its own.
    """

    def __init__(self, rows: list[Row], policy: Policy | None) -> None:
        self.rows = rows
        self.policy = policy
        self.together = True
        first, last = rows[0].begin, rows[-1].begin
        # A slice makes no copy of the tensors.
        self._index: slice | torch.Tensor = slice(first, last + 1)
        if last - first + 1 != len(rows):
            self._index = torch.tensor([row.begin for row in rows], device="cpu")

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Appends and attends for all rows. Tensors are those of the batch, [N, H, d].

        Raises:
            SpillwayError: The first failure. Some rows may have been appended.
        """
        index = self._index
        answer = self._attend(layer, q[index, None], k[index, :, None], v[index, :, None])
        out[index] = answer[:, 0]

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        raise NotImplementedError

    def end(self) -> None:
        """Ends the step.

        Raises:
            SpillwayError: The step has failed, and this is known only now.
        """
        raise NotImplementedError


class StepGroup(Group):
    """Rows that are served by a `DecodeStep`: on any engine, with any policy."""

    def __init__(
        self,
        client: spillway_kv.Client,
        rows: list[Row],
        policy: Policy | None,
        statistics: Callable[[], LayerStatistics],
    ) -> None:
        super().__init__(rows, policy)
        self._client = client
        self._statistics = statistics
        self._step: DecodeStep | None = None

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if self._step is None:
            sequences = [row.sequence for row in self.rows]
            self._step = self._client.begin_step(sequences, policy=self.policy)
        answer: torch.Tensor
        answer, _ = self._step.attend(layer, q, k, v)
        for result in self._step.results():
            self._statistics().add(result)
        return answer

    def end(self) -> None:
        """Ends the step."""
        step, self._step = self._step, None
        if step is not None:
            step.close()


class DecoderGroup(Group):
    """Rows that are served by a decoder on the model's stream."""

    def __init__(
        self,
        kept: KeptDecoder,
        rows: list[Row],
        policy: Policy | None,
        statistics: Callable[[], LayerStatistics],
    ) -> None:
        super().__init__(rows, policy)
        self._kept = kept
        self._statistics = statistics
        self._begun = False

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if not self._begun:
            self._kept.next()
            self._begun = True
        return self._kept.attend(layer, q, k, v)

    def end(self) -> None:
        """Waits for the step. Its tokens then belong to the sequences."""
        if self._begun:
            self._kept.decoder.finish()
            for _, sums in self._kept.take():
                self._statistics().add_sums(sums)


class Decoders:
    """Decoders on the engine's GPU, kept open while the same requests decode together.

    Args:
        client: Client of the engine.
        statistics: Returns the statistics to which attends are added.
    """

    def __init__(
        self, client: spillway_kv.Client, statistics: Callable[[], LayerStatistics]
    ) -> None:
        self._client = client
        self._statistics = statistics
        # Keys: the keys of the requests. Values: the decoder, and the length of each sequence.
        self._kept: dict[tuple[int, ...], tuple[KeptDecoder, dict[int, int]]] = {}
        self._refused = False

    def begin(self, groups: list[list[PlannedRequest]], others: set[int]) -> set[int]:
        """Closes the decoders that the step's groups do not continue.

        Args:
            groups: Groups of requests that decode together.
            others: Sequences that the step uses in another way, by drops or forks.

        Returns:
            Sequences that decoders still hold. Their lengths are those of the plan.
        """
        going_on = {tuple(r.key for r in group): group for group in groups}
        held: set[int] = set()
        for keys in list(self._kept):
            _, counts = self._kept[keys]
            group = going_on.get(keys)
            if (
                group is None
                or others & set(keys)
                or any(counts[request.key] != request.start for request in group)
            ):
                self._close(keys)
            else:
                held |= set(keys)
        return held

    def group(self, rows: list[Row], policy: Policy | None) -> DecoderGroup | None:
        """Returns a group with a decoder, or None if no decoder supports it."""
        keys = tuple(row.plan.key for row in rows)
        kept = self._kept.get(keys)
        if kept is not None and not kept[0].serves(policy, 1):
            self._close(keys)
            kept = None
        if kept is None:
            if self._refused:
                return None
            try:
                decoder = KeptDecoder(self._client, [r.sequence for r in rows], policy, 1)
            except spillway_kv.SpillwayError as error:
                # No decoders are opened for other policies either.
                self._refused = error.code == "UNIMPLEMENTED"
                return None
            kept = self._kept[keys] = decoder, {}
        kept[1].update({row.plan.key: row.plan.start + 1 for row in rows})
        return DecoderGroup(kept[0], rows, policy, self._statistics)

    def let_go(self, rows: list[Row]) -> None:
        """Closes the decoder of a group, so that its sequences can be used in other ways."""
        self._close(tuple(row.plan.key for row in rows))

    def close(self) -> None:
        """Closes all decoders."""
        for keys in list(self._kept):
            self._close(keys)

    def _close(self, keys: tuple[int, ...]) -> None:
        kept = self._kept.pop(keys, None)
        if kept is not None:
            kept[0].decoder.close()
