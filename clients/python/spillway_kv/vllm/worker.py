"""The worker's side: the attends of a step. Does not import vLLM.

The worker of each rank has its own engine, or its own sequences in a daemon, with the KV heads of
the rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch

import spillway_kv
from spillway_kv.attend_sums import LayerStatistics
from spillway_kv.policy import Policy
from spillway_kv.vllm.decoding import Decodings, Group, Row
from spillway_kv.vllm.model_graph import ModelGraph
from spillway_kv.vllm.prompts import Prompts
from spillway_kv.vllm.sequences import Lost, Sequences, Shapes
from spillway_kv.vllm.settings import Settings
from spillway_kv.vllm.step_plan import Loss, PlannedRequest, StepPlan, StepReport

_logger = logging.getLogger("vllm.spillway")

_EXACT = Policy(selector="all")
# How often counts of decoders are taken. It costs a call per layer.
_COUNT_SECONDS = 0.25


def _is_step(request: PlannedRequest) -> bool:
    """Whether a decode step can attend the request: it has one token after others, or drafts."""
    return request.start > 0 and (request.decodes or request.token_count == 1)


class Worker:
    """The sequences of a rank's requests, and their attends. For one thread.

    For each step call `begin`, then `attend` for each layer in order, then `end`.

    Args:
        settings: Where K/V are kept.
        shapes: Shapes of this rank's layers.
        device: Device of the model's tensors.
        policy: Policy of decode steps. None means the engine's default.
        length_max: Most tokens that a request can have; None if that is not known.
        sinks: As for `set_sinks`.
    """

    def __init__(
        self,
        settings: Settings,
        shapes: Shapes,
        device: torch.device,
        policy: Policy | None,
        length_max: int | None = None,
        sinks: Sequence[torch.Tensor | None] = (),
    ) -> None:
        self._policy = policy
        self._device = device
        self._shapes = shapes
        self._last_layer = shapes.layer_count - 1
        self._sequences = Sequences(settings, shapes, device, sinks)
        self._decodings = Decodings(self._sequences.client, length_max, self._sequences.make_room)
        self._prompts = Prompts(self._sequences, shapes.scale, shapes.layer_count, sinks)
        # Sequences that have other sinks than the model has now.
        self._outdated: set[int] = set()
        self._report = StepReport()
        self._groups: list[Group] = []
        self._single: list[tuple[Row, Policy | None]] = []
        # Positions in the batch of requests that were lost before the first layer.
        self._lost: list[slice] = []
        self._statistics = LayerStatistics()
        self._counted_at = time.monotonic()
        self._prompt_token_count = 0
        # Requests and tokens of the step.
        self._counts = 0, 0
        # Whether it has requests that are not attended by a decode step.
        self._had_prompts = False

    @property
    def sequence_count(self) -> int:
        """Number of sequences, including kept ones."""
        return len(self._sequences)

    def close(self) -> None:
        """Deletes the sequences, and ends the engine or the connection to the daemon."""
        self._prompts.close()
        self._decodings.close()
        self._sequences.close()

    def set_sinks(self, sinks: Sequence[torch.Tensor | None]) -> None:
        """Sets the logits of learned sinks. If they differ, the next step loses all sequences.

        Args:
            sinks: Of each layer, [H_q] float32 on the model's device, or None. Empty: no layer has
                any.
        """
        self._outdated |= self._sequences.set_sinks(sinks)
        self._prompts.set_sinks(sinks)

    def begin(self, plan: StepPlan, begins: dict[int, int]) -> None:
        """Prepares the sequences of the step.

        Args:
            plan: The step.
            begins: Position in the batch of each request's first token, by key.
        """
        if self._outdated:
            plan = replace(plan, dropped=[*plan.dropped, *self._outdated])
            self._outdated = set()
        self._report = StepReport()
        self._groups, self._single, self._lost = [], [], []
        self._counts = len(plan.requests), sum(r.token_count for r in plan.requests)
        requests = sorted(plan.requests, key=lambda request: begins[request.key])
        others = {r.source.key for r in requests if r.source is not None}
        apart = self._apart(requests)
        together = [group for group, exact in self._together(requests, apart=apart) if not exact]
        held = self._decodings.begin(together, others | set(plan.dropped), apart=apart)
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
        for group, exact in self._together(there, apart=apart):
            policy = _EXACT if exact else self._policy
            members = [rows[r.key] for r in group]
            self._groups.append(self._decodings.group(members, policy, exact=exact))
            self._begin_together(self._groups[-1])
            if apart and not exact and self._groups[-1].lacks_decoder:
                self._decodings.join()
        prompts = [row for row in rows.values() if not _is_step(row.plan)]
        self._prompt_token_count += sum(row.plan.token_count for row in prompts)
        self._prompts.begin(prompts, self._device)

    def _apart(self, requests: list[PlannedRequest]) -> bool:
        """Whether requests that decoded together go on without the others.

        Also in the step after one with prompts: it does not have the requests whose prompts these
        were, and while it begins, the GPU still computes them.
        """
        before, self._had_prompts = self._had_prompts, not all(_is_step(r) for r in requests)
        return (before or self._had_prompts) and self._decodings.stay_apart

    def _together(
        self, requests: list[PlannedRequest], *, apart: bool
    ) -> Iterator[tuple[list[PlannedRequest], bool]]:
        """Yields groups of requests whose steps are made together, and whether they are exact.

        apart: whether requests that decoded together go on without the others.
        """
        limit = self._sequences.client.server_info.limits.attend_item_count_max
        kinds: dict[tuple[bool, int], list[PlannedRequest]] = {}
        for request in requests:
            if _is_step(request):
                kinds.setdefault((not request.decodes, request.token_count), []).append(request)
        for (exact, _), alike in sorted(kinds.items(), key=lambda kind: kind[0]):
            parts = self._decodings.parts(alike) if apart and not exact else [alike]
            for part in parts:
                for first in range(0, len(part), limit):
                    yield part[first : first + limit], exact

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
                    group.attend(layer, q, k, v, out, last=layer == self._last_layer)
                except spillway_kv.SpillwayError as error:
                    self._part(group, layer, error, on_stream=on_stream)
        for row, policy in self._single:
            self._serve(row, out, partial(self._attend_one, row, policy, layer, q, k, v))
        self._prompts.attend(layer, q, k, v, out, self._lose_row)
        for lost in self._lost:
            out[lost].zero_()

    def new_graph(self, without_owner: Callable[[torch.Tensor], torch.Tensor]) -> ModelGraph:
        """Returns a graph for a capture of the model. Arguments as for `ModelGraph`."""
        return ModelGraph(self._shapes.heads, self._last_layer, without_owner)

    def run(self, graph: ModelGraph) -> None:
        """Runs the model as a graph, and attends at all layers.

        Args:
            graph: The graph. The tokens of the batch are the first ones of its tensors.
        """
        group = self._alone(graph)
        if group is not None:
            try:
                if group.run(graph):
                    return
            except spillway_kv.SpillwayError as error:
                # Nothing of it has run.
                graph.failed = True
                _logger.warning(
                    "steps of up to %d requests run in pieces from now on", graph.step.counts[0]
                )
                self._part(group, 0, error, on_stream=True)
        count = self._counts[1]
        for open_layer in graph.pieces():
            tensors = (open_layer.q, open_layer.k, open_layer.v, open_layer.out)
            self.attend(open_layer.layer, *(x[:count] for x in tensors))

    def _alone(self, graph: ModelGraph) -> Group | None:
        """Returns the group with all requests of the step, if the graph can run with it."""
        if graph.failed or len(self._groups) != 1 or self._single:
            return None
        (group,) = self._groups
        alone = len(group.rows) == self._counts[0] == self._counts[1]
        return group if alone and group.together else None

    def _begin_together(self, group: Group) -> None:
        """Begins a group's step, if necessary with memory of finished requests."""
        while True:
            try:
                group.begin(self._device)
                return
            except spillway_kv.ResourceExhausted as error:
                if not (self._sequences.make_room() and self._are_ready(group)):
                    self._part_before(group, error)
                    return
            except spillway_kv.SpillwayError as error:
                self._part_before(group, error)
                return

    def _are_ready(self, group: Group) -> bool:
        """Whether the sequences still have the planned lengths.

        An earlier step that has failed on the GPU has cut them, and a decoder does not check that.
        """
        try:
            for row in group.rows:
                row.sequence = self._sequences.ready(row.plan)
        except Lost:
            return False
        return True

    def _part_before(self, group: Group, error: spillway_kv.SpillwayError) -> None:
        """Serves the rows of a group one by one whose step could not begin."""
        self._let_go(group, error)
        for row in group.rows:
            # A failed step on the GPU has cut the sequences.
            try:
                row.sequence = self._sequences.ready(row.plan)
            except Lost as loss:
                self._lose_row(row, loss)
            self._single.append((row, group.policy))

    def _part(
        self, group: Group, layer: int, error: spillway_kv.SpillwayError, *, on_stream: bool
    ) -> None:
        """For the rest of the step, serves the rows of a failed group one by one.

        on_stream: whether a decoder served them.
        """
        self._let_go(group, error)
        if on_stream and layer > 0:
            # It is not known what its earlier layers have done on the GPU.
            for row in group.rows:
                self._lose_row(row, Lost(error.message))
        self._single += [(row, group.policy) for row in group.rows]

    def _let_go(self, group: Group, error: spillway_kv.SpillwayError) -> None:
        _logger.warning("a step of %d requests: %s", len(group.rows), error)
        group.together = False
        group.end()
        self._decodings.let_go(group.rows)

    def _serve(self, row: Row, out: torch.Tensor, serve: Callable[[], torch.Tensor]) -> None:
        """Writes the output of a request, or zeros if the request is or gets lost."""
        if row.alive:
            try:
                out[row.begin : row.end] = self._sequences.patiently(serve)
                return
            except Lost as loss:
                self._lose_row(row, loss)
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
        """Attends for the tokens of one request. Its rows may have been appended already."""
        new = slice(row.begin, row.end)
        row.sequence.append(layer, row.plan.start, k[new].transpose(0, 1), v[new].transpose(0, 1))
        result = row.sequence.attend(layer, q[new], policy)
        self._statistics.add(result)
        return cast(torch.Tensor, result.out)

    def end(self) -> StepReport:
        """Ends the step, without a wait for the GPU.

        Returns:
            The report: what was lost in the step, as far as it is known before the GPU has run it.
        """
        for group in self._groups:
            if group.together:
                group.end()
        self._single, self._lost = [], []
        report, self._report = self._report, StepReport()
        report.gone, self._sequences.gone = self._sequences.gone, set()
        return report

    def failures(self) -> Callable[[], dict[int, Loss]] | None:
        """Returns a function for the requests that the step loses on the GPU, by key.

        It may be called in another thread, and waits until the GPU has run the step. None if all
        losses are in the report of `end`.
        """
        groups = [group for group in self._groups if group.together and group.on_stream]
        if not groups:
            return None

        def failed() -> dict[int, Loss]:
            reason = "K/V or queries that are not finite, or a failed GPU"
            return {
                row.plan.key: Loss(row.plan.epoch, "again", reason)
                for group in groups
                for row in group.failed_rows()
            }

        return failed

    def take_statistics(self, *, wait: bool = False) -> tuple[LayerStatistics, int]:
        """Returns the counts of attends since the last call, and of prompt tokens.

        Args:
            wait: Wait for the GPU, so that all steps are counted. Otherwise steps of decoders are
                counted some time after they have ended.
        """
        now = time.monotonic()
        if wait or not self._decodings.any_kept or now >= self._counted_at + _COUNT_SECONDS:
            self._counted_at = now
            for statistics in self._decodings.take_statistics(wait=wait):
                self._statistics.add_sums(statistics)
        sums, self._statistics = self._statistics, LayerStatistics()
        prompt_tokens, self._prompt_token_count = self._prompt_token_count, 0
        return sums, prompt_tokens

    def _lose_row(self, row: Row, loss: Lost) -> None:
        row.alive = False
        self._lose(row.plan, loss)

    def _lose(self, request: PlannedRequest, loss: Lost) -> None:
        """Drops a request's rows, and adds the loss to the report."""
        self._sequences.drop(request.key)
        self._report.losses[request.key] = Loss(request.epoch, loss.kind, str(loss))
