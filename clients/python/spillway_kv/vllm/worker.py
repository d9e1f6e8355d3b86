"""The worker's side: the attends of a step. Does not import vLLM.

The worker of each rank has its own engine, or its own sequences in a daemon, with the KV heads of
the rank.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch

import spillway_kv
from spillway_kv.attend_sums import LayerStatistics
from spillway_kv.policy import Policy
from spillway_kv.prefill import Prefill
from spillway_kv.vllm.decoding import Decodings, Group, Row
from spillway_kv.vllm.sequences import Lost, Sequences, Shapes
from spillway_kv.vllm.settings import Settings
from spillway_kv.vllm.step_plan import Loss, PlannedRequest, StepPlan, StepReport

_logger = logging.getLogger("vllm.spillway")

_EXACT = Policy(selector="all")


def _is_single(request: PlannedRequest) -> bool:
    """Whether the request has one token after others, so that a decode step can attend it."""
    return request.token_count == 1 and request.start > 0


class Worker:
    """The sequences of a rank's requests, and their attends. For one thread.

    For each step call `begin`, then `attend` for each layer in order, then `end`.

    Args:
        settings: Where K/V are kept.
        shapes: Shapes of this rank's layers.
        device: Device of the model's tensors.
        policy: Policy of decode steps. None means the engine's default.
    """

    def __init__(
        self, settings: Settings, shapes: Shapes, device: torch.device, policy: Policy | None
    ) -> None:
        self._scale = shapes.scale
        self._policy = policy
        self._sequences = Sequences(settings, shapes, device)
        self._prefill = Prefill()
        self._decodings = Decodings(self._sequences.client)
        self._report = StepReport()
        self._groups: list[Group] = []
        self._prompts: list[Row] = []
        self._single: list[tuple[Row, Policy | None]] = []
        # Positions in the batch of requests that were lost before the first layer.
        self._lost: list[slice] = []
        self.statistics = LayerStatistics()
        self.prompt_token_count = 0

    @property
    def sequence_count(self) -> int:
        """Number of sequences, including kept ones."""
        return len(self._sequences)

    def close(self) -> None:
        """Deletes the sequences, and ends the engine or the connection to the daemon."""
        self._prefill.close()
        self._decodings.close()
        self._sequences.close()

    def begin(self, plan: StepPlan, begins: dict[int, int]) -> None:
        """Prepares the sequences of the step.

        Args:
            plan: The step.
            begins: Position in the batch of each request's first token, by key.
        """
        self._report = StepReport()
        self._groups, self._prompts, self._single, self._lost = [], [], [], []
        requests = sorted(plan.requests, key=lambda request: begins[request.key])
        others = {r.source.key for r in requests if r.source is not None}
        together = [group for group, exact in self._together(requests) if not exact]
        held = self._decodings.begin(together, others | set(plan.dropped))
        self._sequences.begin(plan)
        rows = {}
        for request in requests:
            try:
                if request.key in held:
                    sequence = self._sequences.held(request.key)
                else:
                    sequence = self._sequences.ready(request)
            except Lost as loss:
                self._lose(request, loss)
                first = begins[request.key]
                self._lost.append(slice(first, first + request.token_count))
                continue
            rows[request.key] = Row(request, begins[request.key], sequence)
        there = [row.plan for row in rows.values()]
        for group, exact in self._together(there):
            policy = _EXACT if exact else self._policy
            members = [rows[r.key] for r in group]
            self._groups.append(self._decodings.group(members, policy, exact=exact))
        self._prompts = [row for row in rows.values() if not _is_single(row.plan)]

    def _together(
        self, requests: list[PlannedRequest]
    ) -> Iterator[tuple[list[PlannedRequest], bool]]:
        """Yields groups of one-token requests that attend together, and whether they do exactly."""
        limit = self._sequences.client.server_info.limits.attend_item_count_max
        for exact in (False, True):
            alike = [r for r in requests if _is_single(r) and r.decodes is not exact]
            for first in range(0, len(alike), limit):
                yield alike[first : first + limit], exact

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Appends the new tokens' K and V at a layer, and attends.

        Args:
            layer: Index among the engine's layers.
            q: Queries [N, H_q, d] after the positional encoding.
            k: Keys [N, H_kv, d].
            v: Values, with the same shape.
            out: Written, [N, H_q, d]. Zeros for requests that are lost.
        """
        for group in self._groups:
            if group.together:
                on_stream = group.on_stream
                try:
                    group.attend(layer, q, k, v, out)
                except spillway_kv.SpillwayError as error:
                    self._part(group, layer, error, on_stream=on_stream)
        for row, policy in self._single:
            self._serve(row, out, partial(self._attend_one, row, policy, layer, q, k, v))
        for row in self._prompts:
            self._serve(row, out, partial(self._attend_prompt, row, layer, q, k, v))
        for lost in self._lost:
            out[lost].zero_()

    def _part(
        self, group: Group, layer: int, error: spillway_kv.SpillwayError, *, on_stream: bool
    ) -> None:
        """For the rest of the step, serves the rows of a failed group one by one.

        on_stream: whether a decoder served them.
        """
        _logger.warning("a step of %d requests: %s", len(group.rows), error)
        group.together = False
        with contextlib.suppress(spillway_kv.SpillwayError):
            group.end()
        self._decodings.let_go(group.rows)
        if on_stream and layer > 0:
            # It is not known what its earlier layers have done on the GPU.
            for row in group.rows:
                row.alive = False
                self._lose(row.plan, Lost(error.message))
        self._single += [(row, group.policy) for row in group.rows]

    def _serve(self, row: Row, out: torch.Tensor, serve: Callable[[], torch.Tensor]) -> None:
        """Writes the output of a request, or zeros if the request is or gets lost."""
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
        row: Row,
        policy: Policy | None,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """Attends for one token of one request. Its rows may have been appended already."""
        new = slice(row.begin, row.end)
        row.sequence.append(layer, row.plan.start, k[new].transpose(0, 1), v[new].transpose(0, 1))
        result = row.sequence.attend(layer, q[new], policy)
        self.statistics.add(result)
        return cast(torch.Tensor, result.out)

    def _attend_prompt(
        self, row: Row, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attends exactly for several tokens of one request, to all tokens before them."""
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
            The report: what was lost in the step.
        """
        for group in self._groups:
            if group.together:
                on_stream = group.on_stream
                try:
                    group.end()
                except spillway_kv.SpillwayError as error:
                    self._part(group, 1, error, on_stream=on_stream)
            for statistics in group.take_statistics():
                self.statistics.add_sums(statistics)
        self._groups, self._prompts, self._single, self._lost = [], [], [], []
        report, self._report = self._report, StepReport()
        report.gone, self._sequences.gone = self._sequences.gone, set()
        return report

    def _lose(self, request: PlannedRequest, loss: Lost) -> None:
        """Drops a request's rows, and adds the loss to the report."""
        self._sequences.drop(request.key)
        self._report.losses[request.key] = Loss(request.epoch, loss.kind, str(loss))
