"""The sequences of a worker, in its engine or in a daemon. Does not import vLLM."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar, cast

import torch

import spillway_kv
from spillway_kv.batch import HeadShapes
from spillway_kv.indices import RotationHash
from spillway_kv.sequence import Sequence
from spillway_kv.shared_model import shared_model
from spillway_kv.sinks import filled, sink_rows
from spillway_kv.tensors import DTypeName
from spillway_kv.vllm.appends import Appends, Chunk
from spillway_kv.vllm.prompt_rows import PromptRows
from spillway_kv.vllm.settings import PREFIX, Settings
from spillway_kv.vllm.step_plan import LossKind, PlannedRequest, StepPlan

_logger = logging.getLogger("vllm.spillway")

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

    @property
    def dtype_name(self) -> DTypeName:
        """The engine's name of the element type."""
        return cast(DTypeName, str(self.dtype).removeprefix("torch."))

    @property
    def heads(self) -> HeadShapes:
        """The shapes of a layer's heads."""
        return HeadShapes(self.query_head_count, self.kv_head_count, self.head_dim, self.dtype_name)


class Lost(Exception):
    """The rows of a request are not available in this step."""

    def __init__(self, reason: str, kind: LossKind = "again") -> None:
        super().__init__(reason)
        self.kind = kind


class Sequences:
    """The sequences of a rank's requests, by key. Kept ones are those of finished requests.

    For one thread.

    Args:
        settings: Where K/V are kept.
        shapes: Shapes of this rank's layers.
        device: Device of the model's tensors.
        sinks: As for `set_sinks`.
    """

    def __init__(
        self,
        settings: Settings,
        shapes: Shapes,
        device: torch.device,
        sinks: SequenceABC[torch.Tensor | None] = (),
    ) -> None:
        self._settings = settings
        self._shapes = shapes
        self._sinks = _rows_of(sinks, shapes)
        self.client = _connect(settings, device)
        # Appends of prompts that go on while the model computes. None: they do not.
        self._appends = (
            Appends(shapes.layer_count, self.patiently, bytes_max=settings.append_bytes)
            if device.type == "cuda"
            else None
        )
        self._prompt_rows = PromptRows(
            shapes.layer_count,
            shapes.kv_head_count,
            shapes.head_dim,
            shapes.dtype,
            device,
            settings.prompt_bytes,
            lambda key: self._appends is not None and self._appends.reads(key),
        )
        self._model: spillway_kv.Model | None = None
        self._sequences: dict[int, Sequence] = {}
        # Kept sequences, the first to be dropped first.
        self._kept: OrderedDict[int, None] = OrderedDict()
        # Tokens of each sequence, and of a prompt that is being computed all of them; without those
        # that it shares with the sequence with whose rows it began.
        self._lengths: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        # Sequences with which requests of this step begin.
        self._sources: set[int] = set()
        # Kept sequences that were dropped to free memory, and sequences to begin with that have
        # disappeared, since this was cleared.
        self.gone: set[int] = set()

    def __len__(self) -> int:
        return len(self._sequences)

    def close(self) -> None:
        """Deletes all sequences, and ends the engine or the connection."""
        if self._appends is not None:
            self._appends.close()
        for key in list(self._sequences):
            self.drop(key)
        self.client.close()

    def set_sinks(self, sinks: SequenceABC[torch.Tensor | None]) -> set[int]:
        """Sets the logits of learned sinks for the sequences that are created from now on.

        Args:
            sinks: Of each layer, [H_q] of any float dtype, or None. Empty: no layer has any.

        Returns:
            Keys of sequences that have other sinks. They must be dropped in the next step.
        """
        rows = _rows_of(sinks, self._shapes)
        if rows == self._sinks:
            return set()
        self._sinks, self._model = rows, None
        self.gone |= self._sequences.keys()
        return set(self._sequences)

    def begin(self, plan: StepPlan) -> None:
        """Drops and keeps the sequences as planned."""
        for key in plan.dropped:
            self.drop(key)
        self._sources = {r.source.key for r in plan.requests if r.source is not None}
        for key in plan.kept:
            if key not in self._sequences:
                continue
            try:
                self.settle(key)
                self._kept[key] = None
            except Lost:
                self.drop(key)
                self.gone.add(key)
        new = False
        for r in plan.requests:
            new |= r.key not in self._lengths
            if r.source is not None:
                self._shared[r.key] = r.source.token_count
            length = max(r.prompt_token_count, r.start + r.token_count)
            self._lengths[r.key] = length - self._shared.get(r.key, 0)
        if plan.kept or new:
            self._limit_kept()

    def _limit_kept(self) -> None:
        """Drops kept sequences whose codes take the room of copies of others' rows."""
        if self._settings.kept_room is None:
            return
        kept = self._kept_length()
        room = self._settings.kept_room.tokens(sum(self._lengths.values()) - kept)
        while kept > room and self.make_room():
            kept = self._kept_length()

    def _kept_length(self) -> int:
        return sum(self._lengths.get(key, 0) for key in self._kept)

    def ready(self, request: PlannedRequest) -> Sequence:
        """Returns the request's sequence, with as many tokens as planned.

        Of a prompt that goes on, the last tokens may still be on their way (`settle`).

        Raises:
            Lost: The sequence is not available.
        """
        if self._appends is not None:
            goes_on = request.source is None and request.token_count > 1 and not request.decodes
            if goes_on and self._appends.end_of(request.key) == request.start:
                self._appends.check(request.key)
                return self._sequences[request.key]
            self.settle(request.key)
            if request.source is not None:
                # What it lacks is found when it is forked.
                with contextlib.suppress(Lost):
                    self.settle(request.source.key)
        return self.patiently(lambda: self._ready(request))

    def keep_prompts(self, requests: list[PlannedRequest]) -> dict[int, torch.Tensor]:
        """Returns where K/V of prompts stay in GPU memory, as far as there is memory for that.

        Args:
            requests: All prompts of the step.

        Returns:
            By key, K and V [2, layers, H_kv, tokens up to the end of the step, d]. Those of earlier
            steps are there. Those of this step are to be appended `into` it.
        """
        if self._appends is None:
            return {}
        keys = {request.key for request in requests}
        kept = {}
        for request in requests:
            end = request.start + request.token_count
            if request.start == 0 and end < request.prompt_token_count:
                self._prompt_rows.open(request.key, request.prompt_token_count, keys)
            rows = self._prompt_rows.extend(request.key, request.start, end)
            if rows is not None:
                kept[request.key] = rows
        return kept

    def release_prompts(self) -> None:
        """Takes back the memory of prompts that are complete, see `keep_prompts`."""
        self._prompt_rows.close_complete()

    def chunk(self, request: PlannedRequest, begin: int) -> Chunk:
        """Returns the request's tokens as a chunk.

        Args:
            request: The request.
            begin: Position of its first token in the tensors that `append` gets.

        Raises:
            Lost: Another request of the step, which was to begin with its rows, has found out that
                its sequence is gone.
        """
        sequence = self._sequences.get(request.key)
        if sequence is None:
            raise Lost("its sequence is gone")
        end = begin + request.token_count
        return Chunk(request.key, sequence, request.start, begin, end)

    def append(
        self,
        chunks: list[Chunk],
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        share: float,
        into: torch.Tensor | None = None,
    ) -> dict[int, Lost]:
        """Appends the new rows K and V [H_kv, T, d] of chunks to a layer.

        From tensors on a GPU this copies them, and appends later (`settle`).

        Args:
            chunks: Chunks that follow each other in the tensors. Each layer gets the same ones.
            layer: The layer.
            k: Keys.
            v: Values.
            share: Part of the step's prompt tokens that are these.
            into: Where they stay in GPU memory [2, layers, H_kv, T, d], from `keep_prompts`.

        Returns:
            Chunks that cannot be appended, by key of the sequence. They are lost from now on.
        """
        losses = {}
        for chunk in chunks:
            if chunk.lost:
                continue
            try:
                if self._appends is None:
                    new = slice(chunk.begin, chunk.end)
                    append = partial(
                        chunk.sequence.append, layer, chunk.start, k[:, new], v[:, new]
                    )
                    self.patiently(append)
                elif into is None:
                    # Chunks of a prompt come one after the other at each layer.
                    self.settle(chunk.key, layer)
            except Lost as loss:
                chunk.lost = True
                losses[chunk.key] = loss
        if self._appends is not None and not all(chunk.lost for chunk in chunks):
            self._appends.add(chunks, layer, k, v, share=share, into=into)
        return losses

    def settle(self, key: int, layer: int | None = None) -> None:
        """Waits until what was appended to a layer, or to all layers, is there.

        Raises:
            Lost: It could not be appended.
        """
        if self._appends is not None:
            self._appends.settle(key, layer)

    def held(self, key: int) -> Sequence:
        """Returns a sequence that a decoder holds, without changing it."""
        return self._sequences[key]

    def _ready(self, request: PlannedRequest) -> Sequence:
        if request.source is not None:
            self._delete(request.key)
            source = self._sequences.get(request.source.key)
            if source is None:
                self.gone.add(request.source.key)
                raise Lost(f"the sequence {request.source.key} to begin with is gone")
            if request.source.key in self._kept:
                self._kept.move_to_end(request.source.key)
            try:
                self._sequences[request.key] = source.fork()
            except spillway_kv.NotFound:
                self.drop(request.source.key)
                self.gone.add(request.source.key)
                raise
        sequence = self._sequences.get(request.key)
        if request.start == 0 and sequence is None:
            sequence = self.client.create_sequence(self._open_model())
            self._sequences[request.key] = sequence
        if sequence is None:
            raise Lost("its sequence is gone")
        if sequence.token_count < request.start:
            raise Lost(f"{sequence.token_count} of {request.start} tokens' rows are there")
        if max(sequence.layer_token_counts) > request.start:
            sequence.truncate(request.start)
        return sequence

    def _open_model(self) -> spillway_kv.Model:
        """Returns the engine's model with these shapes. Creates it if necessary."""
        if self._model is None:
            shapes, value_bits = self._shapes, self._settings.value_bits
            row_type = self._settings.row_type
            named = {**asdict(shapes), "dtype": shapes.dtype_name}
            if value_bits > 0:
                named["value_bits"] = value_bits
            if row_type != "model":
                named["row_type"] = row_type
            if self._sinks:
                named["sink_logits"] = self._sinks
            self._model = shared_model(
                self.client,
                "vllm",
                json.dumps(named, sort_keys=True),
                layer_count=shapes.layer_count,
                query_head_count=shapes.query_head_count,
                kv_head_count=shapes.kv_head_count,
                head_dim=shapes.head_dim,
                dtype=shapes.dtype_name,
                softmax_scale=shapes.scale,
                hash_weights=RotationHash(value_bits=value_bits),
                row_type=row_type,
                sink_logits=self._sinks or None,
            )
        return self._model

    def patiently(self, call: Callable[[], _T]) -> _T:
        """Calls. Frees memory if it is lacking, and waits for a daemon that is gone.

        Args:
            call: A function that may be called again after a failure.

        Raises:
            Lost: The request cannot be served in this step.
            spillway_kv.Unavailable: The daemon has not come back in time.
        """
        while True:
            try:
                return call()
            except spillway_kv.ResourceExhausted as error:
                if not self.make_room():
                    raise Lost(error.message, "memory") from None
            except spillway_kv.NotFound as error:
                # If the daemon has restarted, the model is gone too.
                self._model = None
                raise Lost(error.message) from None
            except spillway_kv.Unavailable as error:
                self._wait_for_daemon(error)
                self._model = None
                raise Lost("the daemon was gone") from None
            except (
                spillway_kv.DeadlineExceeded,
                spillway_kv.Aborted,
                spillway_kv.Cancelled,
            ) as error:
                raise Lost(error.message) from None
            except spillway_kv.SpillwayError as error:
                # For example K/V that are not finite.
                raise Lost(error.message, "failed") from None

    def make_room(self) -> bool:
        """Drops the sequence of a finished request with which no request of the step begins.

        Returns:
            Whether there was one.
        """
        for key in self._kept:
            if key not in self._sources:
                self.drop(key)
                self.gone.add(key)
                return True
        return False

    def _wait_for_daemon(self, error: spillway_kv.Unavailable) -> None:
        """Waits until the daemon answers again.

        Raises:
            spillway_kv.Unavailable: The daemon did not answer within the time in the settings.
        """
        seconds = self._settings.reconnect_seconds
        _logger.warning("%s; waiting %g s for it", error.message, seconds)
        until = time.monotonic() + seconds
        while True:
            try:
                self.client.get_server_info()
                return
            except spillway_kv.SpillwayError:
                if time.monotonic() >= until:
                    raise spillway_kv.Unavailable(
                        f"no daemon has answered at {self.client.target} for {seconds:g} s "
                        f"({error.message}); {PREFIX}RECONNECT_SECONDS says how long to wait"
                    ) from None
                time.sleep(0.2)

    def drop(self, key: int) -> None:
        """Deletes a sequence. It is not an error if it does not exist."""
        self._kept.pop(key, None)
        self._lengths.pop(key, None)
        self._shared.pop(key, None)
        self._delete(key)

    def _delete(self, key: int) -> None:
        if self._appends is not None:
            self._appends.forget(key)
        self._prompt_rows.close(key)
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            try:
                sequence.delete()
            except spillway_kv.SpillwayError as error:
                _logger.debug("deleting %s: %s", sequence.name, error)


def _rows_of(
    sinks: SequenceABC[torch.Tensor | None], shapes: Shapes
) -> tuple[tuple[float, ...], ...]:
    return sink_rows(filled(sinks), shapes.layer_count, shapes.query_head_count)


def _connect(settings: Settings, device: torch.device) -> spillway_kv.Client:
    """Starts an engine in this process, or connects to the daemon."""
    if not settings.embedded:
        return spillway_kv.connect(settings.target)
    name = settings.device or ("cpu" if device.type != "cuda" else f"cuda:{device.index or 0}")
    values: Iterable[tuple[str, str | int]] = (
        ("device.name", name),
        ("memory.limit", settings.memory),
        ("memory.ready", str(settings.ready_bytes)),
        ("device.gpu_memory_limit", settings.gpu_memory),
        ("device.gpu_resident_limit", settings.gpu_resident),
        ("device.gpu_workspace", str(settings.workspace_bytes or "")),
        ("device.reproducible", "true" if settings.reproducible else ""),
        ("models.sampling_seed", settings.seed),
    )
    return spillway_kv.connect(
        "embedded:", settings={name: value for name, value in values if value != ""}
    )
