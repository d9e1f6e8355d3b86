"""The daemon's side of a cache: a model and one sequence per batch row."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from spillway_kv._native import Sums
from spillway_kv.client import Client
from spillway_kv.decode import DecodeStream
from spillway_kv.errors import NotFound, SpillwayError
from spillway_kv.indices import HashWeights
from spillway_kv.kept_decoder import KeptDecoder
from spillway_kv.policy import Policy
from spillway_kv.prefill import Prefill
from spillway_kv.restart import BROKEN
from spillway_kv.results import AttendResult, Model
from spillway_kv.sequence import Sequence
from spillway_kv.shared_model import shared_model
from spillway_kv.step import DecodeStep
from spillway_kv.tensors import DTypeName, gpu_uuid
from spillway_kv.transformers.appends import Appends
from spillway_kv.transformers.identity import ModelMismatchError, config_digest
from spillway_kv.transformers.support import Shapes
from spillway_kv.transformers.transfer import to_host

_EXACT = Policy(selector="all")
# Names of models that `RowStore` creates: digests of the config and of all that determines them.
_OWN_MODEL = re.compile(r"models/hf-[0-9a-f]{5}-[0-9a-f]{20}")


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

    It does not refer to the cache, so that the cache can be garbage-collected while its finalizer
    holds the store. Not thread-safe.
    """

    def __init__(
        self,
        client: Client,
        shapes: Shapes,
        *,
        model: Model | None,
        policy: Policy | None,
        hash_weights: HashWeights | None,
        ttl: datetime.timedelta | float | None,
        prefill_block_token_count: int,
        config_fields: dict[str, Any],
    ) -> None:
        self.client = client
        # What the K/V depend on besides the shapes. Models of other configs are other models of
        # the daemon.
        self.config_fields = config_fields
        self.shapes = shapes
        self.model = model
        self.policy = policy
        # A given model is not looked up, because only the caller can create it again.
        self._model_is_given = model is not None
        self._checked: tuple[Model, torch.dtype, float] | None = None
        self.rows: list[Row] = []
        # Whether the sequences outlive the cache.
        self.keeps = False
        # Appends of the rows' prompts. They may continue between forward passes.
        self.appends = Appends()
        self.prefill = Prefill(block_token_count=prefill_block_token_count)
        # Overrides the policy of the rows. A fork has the policy of its source.
        self.request_policy: Policy | None = None
        self._hash_weights = hash_weights
        self._ttl = ttl
        self._stream: DecodeStream | None = None
        # The step whose layers are being attended, with an embedded engine or a doorbell.
        self._announced: DecodeStep | None = None
        # Decoder on the model's stream, if the engine uses the model's GPU. `_refused` has the
        # policies that decoders do not support.
        self._decoding: KeptDecoder | None = None
        # A restart ended a decoder in the middle of a step. The other layers of the step are then
        # attended one by one, each at its own position.
        self._broken_step = False
        self._refused: list[Policy | None] = []
        # Sums of closed decoders that take_sums() has not returned yet.
        self._served: list[tuple[int, Sums]] = []

    def open(self, batch_size: int, dtype: torch.dtype, scaling: float) -> None:
        """Creates the model in the daemon, and an empty sequence for each row."""
        if self.model is None or not (self.rows or self._model_is_given):
            # Looked up for new rows each time, because the daemon may have restarted in between.
            self.model = self._find_model(dtype, scaling)
        if self._checked != (self.model, dtype, scaling):
            self._check_model(self.model, dtype, scaling)
            self._checked = (self.model, dtype, scaling)
        if not self.rows:
            made: list[Row] = []
            with _deleted_on_error(made):
                made.extend(Row(self._create_sequence(self.model)) for _ in range(batch_size))
            self.rows = made
        if len(self.rows) != batch_size:
            raise ValueError(f"the cache holds {len(self.rows)} rows, the batch has {batch_size}")

    def _create_sequence(self, model: Model) -> Sequence:
        return self.client.create_sequence(model, policy=self.policy, ttl=self._ttl)

    def _find_model(self, dtype: torch.dtype, scaling: float) -> Model:
        """Creates the model, or returns the one that a cache with the same settings created."""
        name = cast(DTypeName, str(dtype).removeprefix("torch."))
        weights = None if self._hash_weights is None else asdict(self._hash_weights)
        kind = type(self._hash_weights).__name__
        spec = json.dumps([asdict(self.shapes), name, scaling, kind, weights])
        return shared_model(
            self.client,
            self._model_kind(),
            spec,
            **asdict(self.shapes),
            dtype=name,
            softmax_scale=scaling,
            hash_weights=self._hash_weights,
        )

    def _model_kind(self) -> str:
        return f"hf-{config_digest(self.config_fields)}"

    def check_config(self, model: Model) -> None:
        """Compares the config with that of the cache that created a model, which is in its name.

        Raises:
            ModelMismatchError: They differ.
        """
        if _OWN_MODEL.fullmatch(model.name) and self._model_kind() not in model.name:
            raise ModelMismatchError(
                f"{model.name} was created for a model with another config, or by another version "
                f"of transformers; this config is {self._model_kind()}. With check_model=False its "
                "sequences are used all the same"
            )

    def check_shapes(self, model: Model) -> None:
        """Raises ValueError if a model has other shapes than the config."""
        has = Shapes(model.layer_count, model.query_head_count, model.kv_head_count, model.head_dim)
        if has != self.shapes:
            raise ValueError(f"{model.name} has {has}, the config has {self.shapes}")

    def _check_model(self, model: Model, dtype: torch.dtype, scaling: float) -> None:
        self.check_shapes(model)
        if f"torch.{model.dtype}" != str(dtype):
            raise ValueError(f"{model.name} holds {model.dtype}, the keys are {dtype}")
        if abs(model.softmax_scale - scaling) > 1e-6 * abs(scaling):
            raise ValueError(
                f"{model.name} scales logits by {model.softmax_scale}, this layer by {scaling}"
            )

    def enqueue(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        counts: SequenceABC[int],
    ) -> torch.Tensor | None:
        """Appends and attends like `step`, but with the model's tensors on the engine's GPU.

        Returns:
            Output [B, T, H_q, d]. None if the engine is not on a GPU of this process, or decoders
            do not support the policy.
        """
        count = q.shape[2]
        decoding = self._decoding
        self._broken_step = self._broken_step and layer > 0
        if self._broken_step:
            return None
        begins = layer == 0 or decoding is None or decoding.between_steps
        if begins and not self._streams(q, counts):
            self.suspend()
            return None
        try:
            if begins or self._decoding is None:
                self._decoding = self._open_decoding(count)
                if self._decoding is None:
                    return None
                self._decoding.next()
            return self._decoding.attend(layer, q.transpose(1, 2), k, v)
        except BaseException as error:
            decoding, self._decoding = self._decoding, None
            if decoding is not None:
                decoding.decoder.close()
            if not isinstance(error, BROKEN):
                raise
            self.client._restarts.wait(error)
            self._broken_step = True
            return None

    def _streams(self, q: torch.Tensor, counts: SequenceABC[int]) -> bool:
        """Whether a decoder can serve tensors on this GPU, with equal token counts in all rows."""
        if q.device.type != "cuda":
            return False
        info = self.client.server_info
        if self.client.transport == "embedded":
            there = [device.name for device in info.devices] == [f"cuda:{q.device.index}"]
        else:
            # A daemon may number the GPUs differently.
            uuids = [device.uuid for device in info.devices]
            there = self.client.step_transport == "doorbell" and uuids == [gpu_uuid(q.device.index)]
        return (
            there
            and set(counts) == {q.shape[2]}
            and q.shape[2] <= info.limits.sparse_query_token_count_max
            and len(counts) <= info.limits.attend_item_count_max
            and self.request_policy not in self._refused
        )

    def _open_decoding(self, token_count: int) -> KeptDecoder | None:
        """Returns the decoder for the next step; None if decoders do not support the policy."""
        policy, decoding = self.request_policy, self._decoding
        if decoding is not None and decoding.serves(policy, token_count):
            return decoding
        self.suspend()
        try:
            return KeptDecoder(
                self.client, [row.sequence for row in self.rows], policy, token_count
            )
        except SpillwayError as error:
            if error.code != "UNIMPLEMENTED":
                raise
            self._refused.append(policy)
            return None

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
        decoding, self._decoding = self._decoding, None
        if decoding is None:
            return
        try:
            decoding.decoder.finish()
        finally:
            self._served += decoding.take()
            decoding.decoder.close()

    def take_sums(self) -> list[tuple[int, Sums]]:
        """Returns the sums of decoders for each layer since the last call."""
        taken, self._served = self._served, []
        # A step that is not complete is counted later.
        if self._decoding is not None and self._decoding.between_steps:
            self._decoding.decoder.finish()
            taken += self._decoding.take()
        return taken

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
        """Appends the newest tokens of each row, and attends with their queries.

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
        news = {
            row: (k[row, :, length - counts[row] :], v[row, :, length - counts[row] :])
            for row in active
        }
        policy = _EXACT if exact else self.request_policy
        # A Decode message with more queries than this cannot append.
        limit = self.client.server_info.limits.sparse_query_token_count_max
        if self._steps_together(counts, limit):
            results = self._step_together(layer, q, k, v, counts[0], policy)
        elif all(counts[row] <= limit for row in active):
            results = self._step_stream(layer, queries, news, starts, policy)
        else:
            for row in active:
                self.rows[row].sequence.append(layer, starts[row], *news[row])
            answers = self.client.attend(
                layer,
                {self.rows[row].sequence: query for row, query in queries.items()},
                policy,
            )
            results = {row: answers[self.rows[row].sequence] for row in active}
        return [(row, queries[row], results[row]) for row in active]

    def _steps_together(self, counts: SequenceABC[int], limit: int) -> bool:
        """Whether one step of the engine can serve all rows, without messages."""
        alike = len(set(counts)) == 1 and 1 <= counts[0] <= limit
        together = self.client.step_transport in ("embedded", "doorbell")
        return alike and together and not self._broken_step

    def _step_together(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        count: int,
        policy: Policy | None,
    ) -> dict[int, AttendResult]:
        """Attends for all rows at once, without messages. Begins the step at the first layer."""
        if self._announced is None or layer == 0:
            sequences = [row.sequence for row in self.rows]
            self._announced = self.client.begin_step(sequences, token_count=count, policy=policy)
        length = q.shape[2]
        new = slice(length - count, length)
        try:
            self._announced.attend(layer, q[:, :, new].transpose(1, 2), k[:, :, new], v[:, :, new])
            return dict(enumerate(self._announced.results()))
        except BaseException as error:
            self._announced = None
            if isinstance(error, BROKEN):
                self._check_restart()
            raise

    def _step_stream(
        self,
        layer: int,
        queries: dict[int, torch.Tensor],
        news: dict[int, tuple[torch.Tensor, torch.Tensor]],
        starts: SequenceABC[int],
        policy: Policy | None,
    ) -> dict[int, AttendResult]:
        """Sends the steps of all rows before it waits, so that they are served in parallel."""
        if self._stream is None or self._stream.closed:
            self._stream = self.client.decode()
        try:
            row_of = {}
            for row, query in queries.items():
                k, v = news[row]
                sent = self._stream.send(
                    self.rows[row].sequence,
                    layer,
                    query,
                    k,
                    v,
                    start=starts[row],
                    policy=policy,
                )
                row_of[sent] = row
            results = {}
            for _ in queries:
                correlation_id, result = self._stream.recv()
                results[row_of[correlation_id]] = result
            return results
        except BaseException as error:
            # Answers to abandoned steps must not be taken for answers to the next ones.
            self._stream.close()
            if isinstance(error, BROKEN):
                self._check_restart()
            raise

    def _check_restart(self) -> None:
        """Raises DaemonRestarted if that is why a stream broke; its own error does not say so."""
        try:
            self.rows[0].sequence.refresh()
        except NotFound:
            raise
        except SpillwayError:
            return

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
            self.shapes,
            model=self.model,
            policy=self.policy,
            hash_weights=self._hash_weights,
            ttl=self._ttl,
            prefill_block_token_count=self.prefill.block_token_count,
            config_fields=self.config_fields,
        )
        made.request_policy = self.request_policy
        made._model_is_given = self._model_is_given
        with _deleted_on_error(made.rows):
            made.rows.extend(Row(row.sequence.fork(), row.padding) for row in self.rows)
        return made

    def abandon(self) -> None:
        """Gives up work in progress. What it has appended stays until `cut` or `drop`."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._announced = None
        self.appends.abandon()
        self.prefill.close()
        # The client may be closed, and the engine gone with it.
        with suppress(SpillwayError, ValueError):
            self.end_decoding()

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
