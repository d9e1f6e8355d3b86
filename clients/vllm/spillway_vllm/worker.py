"""A worker's side: the attends of a step. Without vLLM.

One rank's worker has its own engine or its own sequences in a daemon, of the KV heads
that the rank has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import spillway
import torch
from spillway.attend_sums import LayerStatistics
from spillway.policy import Policy
from spillway.prefill import Prefill
from spillway.sequence import Sequence
from spillway.step import DecodeStep

from spillway_vllm.sequences import Lost, Sequences, Shapes
from spillway_vllm.settings import Settings
from spillway_vllm.step_plan import Loss, PlannedRequest, StepPlan, StepReport

_logger = logging.getLogger("vllm.spillway")

_EXACT = Policy(selector="all")


@dataclass
class _Row:
    """A request of the step, and which of the batch's tokens are its."""

    plan: PlannedRequest
    begin: int
    sequence: Sequence
    alive: bool = True

    @property
    def end(self) -> int:
        return self.begin + self.plan.token_count

    @property
    def is_single(self) -> bool:
        """Whether it is one token after others, which a decode step attends."""
        return self.plan.token_count == 1 and self.plan.start > 0


class _Group:
    """Requests of one token each that attend by one policy, together."""

    def __init__(self, client: spillway.Client, rows: list[_Row], policy: Policy | None) -> None:
        self._client = client
        self.rows = rows
        self.policy = policy
        # Each on its own from a failure to the end of the step.
        self.together = True
        self._step: DecodeStep | None = None
        first, last = rows[0].begin, rows[-1].begin
        # A slice takes no copy of the tensors.
        self._index: slice | torch.Tensor = slice(first, last + 1)
        if last - first + 1 != len(rows):
            self._index = torch.tensor([row.begin for row in rows])

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> list[spillway.AttendResult]:
        """Appends and attends for all rows; tensors are the batch's, [N, H, d]."""
        if self._step is None:
            self._step = self._client.begin_step(
                [row.sequence for row in self.rows], policy=self.policy
            )
        index = self._index
        answer, _ = self._step.attend(layer, q[index, None], k[index, :, None], v[index, :, None])
        out[index] = answer[:, 0]
        return self._step.results()

    def close(self) -> None:
        """Ends the step."""
        step, self._step = self._step, None
        if step is not None:
            step.close()


class Worker:
    """The sequences of a rank's requests, and their attends. For one thread.

    A step is `begin`, then `attend` for each layer in order, then `end`.

    Args:
        settings: Where K/V are kept.
        shapes: Of this rank's layers.
        device: Where the model's tensors are.
        policy: Of decode steps; None is the engine's default.
    """

    def __init__(
        self, settings: Settings, shapes: Shapes, device: torch.device, policy: Policy | None
    ) -> None:
        self._scale = shapes.scale
        self._policy = policy
        self._sequences = Sequences(settings, shapes, device)
        self._prefill = Prefill()
        self._report = StepReport()
        self._groups: list[_Group] = []
        self._prompts: list[_Row] = []
        self._single: list[tuple[_Row, Policy | None]] = []
        self.statistics = LayerStatistics()
        self.prompt_token_count = 0

    @property
    def sequence_count(self) -> int:
        """Sequences that it holds, kept ones too."""
        return len(self._sequences)

    def close(self) -> None:
        """Ends the engine, or the connection to the daemon; sequences go."""
        self._prefill.close()
        self._sequences.close()

    def begin(self, plan: StepPlan, begins: dict[int, int]) -> None:
        """Makes the step's sequences ready.

        Args:
            plan: The step.
            begins: Position in the batch of each request's first token, by key.
        """
        self._report = StepReport()
        self._groups, self._prompts, self._single = [], [], []
        self._sequences.begin(plan)
        rows = []
        for request in sorted(plan.requests, key=lambda request: begins[request.key]):
            try:
                sequence = self._sequences.ready(request)
            except Lost as loss:
                self._lose(request, loss)
                continue
            rows.append(_Row(request, begins[request.key], sequence))
        self._arrange(rows)

    def _arrange(self, rows: list[_Row]) -> None:
        """Puts the requests together that are served together."""
        client = self._sequences.client
        limit = client.server_info.limits.attend_item_count_max
        singles = [row for row in rows if row.is_single]
        self._prompts = [row for row in rows if not row.is_single]
        for policy, decodes in ((self._policy, True), (_EXACT, False)):
            alike = [row for row in singles if row.plan.decodes is decodes]
            for first in range(0, len(alike), limit):
                self._groups.append(_Group(client, alike[first : first + limit], policy))

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Appends the new tokens' K and V at a layer, and attends.

        Args:
            layer: Of the engine's layers, in order.
            q: Queries [N, H_q, d] after the positional encoding.
            k: Keys [N, H_kv, d].
            v: Values, the same shape.
            out: Is written, [N, H_q, d]; zeros for requests that are lost.
        """
        for group in self._groups:
            if group.together:
                try:
                    results = group.attend(layer, q, k, v, out)
                except spillway.SpillwayError as error:
                    _logger.warning("a step of %d requests: %s", len(group.rows), error)
                    group.close()
                    group.together = False
                    self._single += [(row, group.policy) for row in group.rows]
                else:
                    for result in results:
                        self.statistics.add(result)
        for row, policy in self._single:
            self._serve(row, out, partial(self._attend_one, row, policy, layer, q, k, v))
        for row in self._prompts:
            self._serve(row, out, partial(self._attend_prompt, row, layer, q, k, v))

    def _serve(self, row: _Row, out: torch.Tensor, serve: Callable[[], torch.Tensor]) -> None:
        """Writes what it is served with; a request that cannot be served is lost."""
        if row.alive:
            try:
                out[row.begin : row.end] = self._sequences.patiently(serve)
                return
            except Lost as loss:
                row.alive = False
                self._lose(row.plan, loss)
        out[row.begin : row.end].zero_()

    def _attend_one(
        self,
        row: _Row,
        policy: Policy | None,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """One token of one request; its rows may be there already."""
        new = slice(row.begin, row.end)
        row.sequence.append(layer, row.plan.start, k[new].transpose(0, 1), v[new].transpose(0, 1))
        result = row.sequence.attend(layer, q[new], policy)
        self.statistics.add(result)
        return cast(torch.Tensor, result.out)

    def _attend_prompt(
        self, row: _Row, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Several tokens of one request, exactly, to all before them."""
        new = slice(row.begin, row.end)
        keys, values = k[new].transpose(0, 1), v[new].transpose(0, 1)
        row.sequence.append(layer, row.plan.start, keys, values)
        if layer == 0:
            self.prompt_token_count += row.plan.token_count
        return self._prefill.attend(
            row.sequence,
            layer,
            q[new],
            keys,
            values,
            start=row.plan.start,
            scale=self._scale,
        )

    def end(self) -> StepReport:
        """Ends the step.

        Returns:
            What was lost in it.
        """
        for group in self._groups:
            group.close()
        self._groups, self._prompts, self._single = [], [], []
        report, self._report = self._report, StepReport()
        report.gone, self._sequences.gone = self._sequences.gone, set()
        return report

    def _lose(self, request: PlannedRequest, loss: Lost) -> None:
        """Gives up a request's rows, and says so."""
        self._sequences.drop(request.key)
        self._report.losses[request.key] = Loss(request.epoch, loss.kind, str(loss))
