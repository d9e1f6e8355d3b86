"""A worker's side: its sequences, and the attends of a step. Without vLLM.

One rank's worker has its own engine or its own sequences in a daemon, of the KV heads
that the rank has.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TypeVar, cast

import torch

import spillway
from spillway.attend_sums import LayerStatistics
from spillway.policy import Policy
from spillway.prefill import Prefill
from spillway.sequence import Sequence
from spillway.step import DecodeStep
from spillway.tensors import DTypeName
from spillway_vllm.settings import PREFIX, Settings
from spillway_vllm.step_plan import Loss, PlannedRequest, StepPlan, StepReport

_logger = logging.getLogger("vllm.spillway")

_EXACT = Policy(selector="all")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Shapes:
    """Shapes of the layers that this rank's engine serves.

    Attributes:
        layer_count: Layers with full attention.
        query_head_count: Query heads of this rank.
        kv_head_count: KV heads of this rank.
        head_dim: Elements of a key.
        dtype: Element type of K and V.
        scale: Factor on q.k.
    """

    layer_count: int
    query_head_count: int
    kv_head_count: int
    head_dim: int
    dtype: torch.dtype
    scale: float


class _Lost(Exception):
    """A request's rows cannot be had in this step."""

    def __init__(self, reason: str, *, for_memory: bool = False) -> None:
        super().__init__(reason)
        self.for_memory = for_memory


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
        self._settings = settings
        self._shapes = shapes
        self._policy = policy
        self._client = _connect(settings, device)
        self._model: spillway.Model | None = None
        self._prefill = Prefill()
        self._sequences: dict[int, Sequence] = {}
        # Sequences of finished requests, the next to go first.
        self._kept: OrderedDict[int, None] = OrderedDict()
        # What requests of the step begin with.
        self._sources: set[int] = set()
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
        for key in list(self._sequences):
            self._drop(key)
        self._prefill.close()
        self._client.close()

    def begin(self, plan: StepPlan, begins: dict[int, int]) -> None:
        """Makes the step's sequences ready.

        Args:
            plan: The step.
            begins: Position in the batch of each request's first token, by key.
        """
        self._report = StepReport()
        self._groups, self._prompts, self._single = [], [], []
        for key in plan.dropped:
            self._drop(key)
        for key in plan.kept:
            if key in self._sequences:
                self._kept[key] = None
        self._sources = {r.source.key for r in plan.requests if r.source is not None}
        rows = []
        for request in sorted(plan.requests, key=lambda request: begins[request.key]):
            try:
                sequence = self._patiently(lambda request=request: self._ready(request))
            except _Lost as loss:
                self._lose(request, loss)
                continue
            rows.append(_Row(request, begins[request.key], sequence))
        self._arrange(rows)

    def _arrange(self, rows: list[_Row]) -> None:
        """Puts the requests together that are served together."""
        limit = self._client.server_info.limits.attend_item_count_max
        singles = [row for row in rows if row.plan.token_count == 1 and row.plan.start > 0]
        self._prompts = [row for row in rows if row not in singles]
        for policy, decodes in ((self._policy, True), (_EXACT, False)):
            alike = [row for row in singles if row.plan.decodes is decodes]
            for first in range(0, len(alike), limit):
                self._groups.append(_Group(self._client, alike[first : first + limit], policy))

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
            self._serve(row, out, lambda r=row, p=policy: self._attend_one(r, p, layer, q, k, v))
        for row in self._prompts:
            self._serve(row, out, lambda r=row: self._attend_prompt(r, layer, q, k, v))

    def _serve(self, row: _Row, out: torch.Tensor, serve: Callable[[], torch.Tensor]) -> None:
        """Writes what it is served with; a request that cannot be served is lost."""
        if row.alive:
            try:
                out[row.begin : row.end] = self._patiently(serve)
                return
            except _Lost as loss:
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
            scale=self._shapes.scale,
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
        return report

    def _ready(self, request: PlannedRequest) -> Sequence:
        """The request's sequence, with as many tokens as the plan says."""
        if request.source is not None:
            self._drop(request.key)
            source = self._sequences.get(request.source.key)
            if source is None:
                raise _Lost(f"the sequence {request.source.key} to begin with is gone")
            if request.source.key in self._kept:
                self._kept.move_to_end(request.source.key)
            try:
                self._sequences[request.key] = source.fork()
            except spillway.NotFound:
                self._drop(request.source.key)
                self._report.gone.add(request.source.key)
                raise
        sequence = self._sequences.get(request.key)
        if request.start == 0 and sequence is None:
            sequence = self._client.create_sequence(self._open_model())
            self._sequences[request.key] = sequence
        if sequence is None:
            raise _Lost("its sequence is gone")
        if sequence.token_count < request.start:
            raise _Lost(f"{sequence.token_count} of {request.start} tokens' rows are there")
        if max(sequence.layer_token_counts) > request.start:
            sequence.truncate(request.start)
        return sequence

    def _open_model(self) -> spillway.Model:
        """The engine's model of these shapes, made when there is none."""
        if self._model is None:
            shapes = self._shapes
            dtype = cast(DTypeName, str(shapes.dtype).removeprefix("torch."))
            named = {**asdict(shapes), "dtype": dtype}
            text = json.dumps(named, sort_keys=True)
            model_id = f"vllm-{hashlib.sha256(text.encode()).hexdigest()[:20]}"
            try:
                self._model = self._client.create_model(
                    model_id,
                    layer_count=shapes.layer_count,
                    query_head_count=shapes.query_head_count,
                    kv_head_count=shapes.kv_head_count,
                    head_dim=shapes.head_dim,
                    dtype=dtype,
                    softmax_scale=shapes.scale,
                )
            except spillway.AlreadyExists:
                self._model = self._client.get_model(f"models/{model_id}")
        return self._model

    def _patiently(self, call: Callable[[], _T]) -> _T:
        """Calls; makes room where memory is lacking, waits for a daemon that is gone.

        Args:
            call: May be called again after a failure.

        Raises:
            _Lost: The request cannot be served in this step.
            spillway.Unavailable: The daemon has not come back in time.
        """
        while True:
            try:
                return call()
            except spillway.ResourceExhausted as error:
                if not self._make_room():
                    raise _Lost(error.message, for_memory=True) from None
            except spillway.NotFound as error:
                # Of a daemon that has restarted the model is gone too.
                self._model = None
                raise _Lost(error.message) from None
            except spillway.Unavailable as error:
                self._wait_for_daemon(error)
                self._model = None
                raise _Lost("the daemon was gone") from None
            except (spillway.DeadlineExceeded, spillway.Aborted, spillway.Cancelled) as error:
                raise _Lost(error.message) from None

    def _make_room(self) -> bool:
        """Gives up a finished request's sequence that no request of the step begins with."""
        for key in self._kept:
            if key not in self._sources:
                self._drop(key)
                self._report.gone.add(key)
                return True
        return False

    def _wait_for_daemon(self, error: spillway.Unavailable) -> None:
        """Waits until the daemon answers again.

        Raises:
            spillway.Unavailable: It has not in the time that the settings give.
        """
        seconds = self._settings.reconnect_seconds
        _logger.warning("%s; waiting %g s for it", error.message, seconds)
        until = time.monotonic() + seconds
        while True:
            try:
                self._client.get_server_info()
                return
            except spillway.SpillwayError:
                if time.monotonic() >= until:
                    raise spillway.Unavailable(
                        f"no daemon has answered at {self._client.target} for {seconds:g} s "
                        f"({error.message}); {PREFIX}RECONNECT_SECONDS says how long to wait"
                    ) from None
                time.sleep(0.2)

    def _lose(self, request: PlannedRequest, loss: _Lost) -> None:
        """Gives up a request's rows, and says so."""
        self._drop(request.key)
        self._report.losses[request.key] = Loss(request.epoch, loss.for_memory, str(loss))

    def _drop(self, key: int) -> None:
        """Deletes a sequence; what is gone already is no error."""
        self._kept.pop(key, None)
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            try:
                sequence.delete()
            except spillway.SpillwayError as error:
                _logger.debug("deleting %s: %s", sequence.name, error)


def _connect(settings: Settings, device: torch.device) -> spillway.Client:
    """The engine in this process, or the daemon."""
    if not settings.embedded:
        return spillway.connect(settings.target)
    name = settings.device or ("cpu" if device.type != "cuda" else f"cuda:{device.index or 0}")
    values: Iterable[tuple[str, str]] = (
        ("device.name", name),
        ("memory.limit", settings.memory),
        ("device.gpu_memory_limit", settings.gpu_memory),
    )
    return spillway.connect("embedded:", settings={name: value for name, value in values if value})

