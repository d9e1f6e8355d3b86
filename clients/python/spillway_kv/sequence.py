"""Sequences: the K/V rows of one context."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceABC
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spillway_kv import _split
from spillway_kv._proto import attention_service_pb2, sequence_service_pb2
from spillway_kv.appending import Append
from spillway_kv.connection import wire
from spillway_kv.errors import (
    NotFound,
    SpillwayError,
    tell_restart,
)
from spillway_kv.fetching import fetch_into, range_request, selected_requests
from spillway_kv.policy import Policy
from spillway_kv.results import (
    AppendResult,
    AttendResult,
    Certificate,
    Model,
    SavedSequence,
    Selection,
    SequenceInfo,
)
from spillway_kv.tensors import (
    Array,
    OutDType,
    check_target,
    decoder_like,
    empty_like,
    engine_array,
    fill,
    on_gpu,
    wait_for_stream,
)

if TYPE_CHECKING:
    from spillway_kv.client import Client


def explained(error: NotFound, sequences: Iterable[Sequence]) -> SpillwayError:
    """Returns the error, or a `DaemonRestarted` if a restart lost the sequence that it names."""
    named = (s for s in sequences if s.name == error.metadata.get("name"))
    return next((s._explain(error) for s in named), error)


class Sequence:
    """A handle of one sequence. `Client.create_sequence` and `fork` create it.

    The handle stores the generation and the length of each layer from the last answer of the
    daemon, so that appends need not ask for them. It is not thread-safe: only one thread at a
    time may append, truncate or fork with one handle. Reads (attend, select, fetch)
    may overlap.

    Every call raises `NotFound` if the sequence was deleted or has expired, and its subclass
    `DaemonRestarted` if the daemon lost it in a restart.

    Attributes:
        name: Resource name, `sequences/{id}`.
        model: `models/{id}`.
    """

    def __init__(
        self, client: Client, message: sequence_service_pb2.Sequence, boot_id: str
    ) -> None:
        self._client = client
        self._wire = wire(client)
        # boot_id of the daemon that has the sequence.
        self._boot_id = boot_id
        self._store_id = client.server_info.store_id
        self.name = message.name
        self.model = message.model
        self._layer_token_counts: list[int] | None = None
        self._generation = 0
        self._described_model: Model | None = None
        self._learn(message)

    def __repr__(self) -> str:
        return f"Sequence({self.name!r}, model={self.model!r})"

    def _learn(self, message: sequence_service_pb2.Sequence) -> None:
        self._generation = message.generation
        self._layer_token_counts = list(message.layer_token_counts)

    def _explain(self, error: SpillwayError) -> SpillwayError:
        """Converts the error if a restart of the daemon lost the sequence."""
        return tell_restart(error, self._boot_id, self._store_id)

    def _call(self, method: Any, request: Any, *, timeout: float | None = None) -> Any:
        """Calls a method that names this sequence."""
        try:
            return self._wire.call(method, request, timeout=timeout)
        except NotFound as error:
            raise self._explain(error) from None

    def _stream(self, method: Any, request: Any, timeout: float | None) -> Iterator[Any]:
        """Calls a method that names this sequence and has a stream of responses."""
        try:
            yield from self._wire.stream(method, request, timeout=timeout)
        except NotFound as error:
            raise self._explain(error) from None

    def _described(self) -> Model:
        """Returns the model, which does not change while it has sequences."""
        if self._described_model is None:
            try:
                self._described_model = self._client.get_model(self.model)
            except NotFound:
                # A model with sequences cannot be deleted, so this sequence is gone too: refresh()
                # raises why.
                self.refresh()
                raise
        return self._described_model

    def _forget(self) -> None:
        """Makes the next use of a length ask the daemon for it."""
        self._layer_token_counts = None

    def _know(self, token_count: int, layer_count: int) -> None:
        """Notes the length of all layers, which a decoder has written."""
        self._layer_token_counts = [token_count] * layer_count

    def _expect(self, layer: int, token_count: int) -> None:
        """Notes the length that a layer will have after a step in flight."""
        counts = self._layer_token_counts
        # The daemon refuses a layer that does not exist.
        if counts is not None and 0 <= layer < len(counts):
            counts[layer] = max(counts[layer], token_count)

    @property
    def generation(self) -> int:
        """Generation, from the last answer of the daemon. Appends send it."""
        return self._generation

    @property
    def layer_token_counts(self) -> tuple[int, ...]:
        """Length of each layer, from the last answer or a decoder. If not known, this asks."""
        if self._layer_token_counts is None:
            self.refresh()
        assert self._layer_token_counts is not None
        return tuple(self._layer_token_counts)

    @property
    def token_count(self) -> int:
        """Length of the shortest layer, as `layer_token_counts` says."""
        return min(self.layer_token_counts)

    def refresh(self) -> SequenceInfo:
        """Asks the daemon for the present state of the sequence.

        Raises:
            NotFound: It was deleted or has expired.
        """
        request = sequence_service_pb2.GetSequenceRequest(name=self.name)
        get = self._wire.stubs.sequences.GetSequence
        message = self._wire.restarts.again(lambda: self._call(get, request)).sequence
        self._learn(message)
        return SequenceInfo.from_proto(message)

    def keep(self) -> SequenceInfo:
        """Keeps the sequence until its ttl ends, even if all of its clients are gone.

        Use it for a sequence that was created without a name and must be found by its name
        later, also if the daemon restarts in between. With an embedded engine, whose only client
        is its process, it changes nothing: the next process must open the sequence within the
        grace time.

        Raises:
            NotFound: It was deleted or has expired.
        """
        request = sequence_service_pb2.GetSequenceRequest(name=self.name)
        get = self._wire.stubs.sequences.GetSequence

        # The daemon keeps what a call without a client's id names until its ttl.
        message = self._call(partial(get, named=False), request).sequence
        return SequenceInfo.from_proto(message)

    def append(
        self, layer: int, start: int | None, k: Array, v: Array, *, timeout: float | None = None
    ) -> AppendResult:
        """Appends K/V rows of consecutive tokens.

        K and V are given after the positional encoding. Long appends are split into messages by
        layers and tokens. Each message is committed as a whole or not at all, in order. So after
        a failure `refresh()` tells what is there, and the same call may be repeated: rows that
        are already there with equal bytes are accepted.

        Args:
            layer: First layer, [0, layer_count).
            start: Position of the first token. None appends at the layer's length, from the last
                answer of the daemon.
            k: Keys [H_kv, T, d] for one layer, or [layers, H_kv, T, d] for consecutive layers,
                in the model's dtype. All elements must be finite.
            v: Values, with the same shape. Arrays that the engine can access are read in place:
                arrays in a region, and with an embedded engine all arrays, also CUDA tensors of
                its GPU. The call then waits for the current stream. If it is given up, by its
                timeout or by Ctrl-C, the engine may read them for some seconds more. With a
                daemon on this host that has one GPU, CUDA tensors on this GPU are copied there to
                the client's own region of 128 MiB, and read from it.
            timeout: Seconds. None means the client's timeout.

        Raises:
            OutOfRange: There is a gap, or the tokens are only partly there, or K/V are not
                finite. The message names the position.
            AlreadyExists: There are other rows at that position.
            Aborted: Another client has truncated the sequence.
            ResourceExhausted: The daemon's memory limit is reached.
        """
        k, v = engine_array(k, "k"), engine_array(v, "v")
        if len(k.shape) == 3:
            k, v = k[None], v[None]
        shape = _split.check_shape(k, ("layers", "H_kv", "T", "d"), "k")
        if tuple(v.shape) != shape:
            raise ValueError(f"v has shape {list(v.shape)}, k has {list(shape)}")
        first = self.layer_token_counts[layer] if start is None else start
        append = self._append_of(layer, first, k, v, timeout)
        try:
            result = self._wire.restarts.again(append.run)
        except BaseException:
            self._forget()
            raise
        self._layer_token_counts = list(result.layer_token_counts)
        return result

    def _append_of(
        self, layer: int, start: int, k: Array, v: Array, timeout: float | None = None
    ) -> Append:
        """Describes an append of K and V [layers, H_kv, T, d] at a position."""
        return Append(
            self._wire, self._call, self.name, self._generation, layer, start, k, v, timeout
        )

    def _takes_from_gpu(self, array: Array) -> bool:
        """Whether appends read the tensor's rows directly in GPU memory."""
        regions = self._wire.regions
        if not on_gpu(array):
            return False
        return regions.slice_of(array) is not None or regions.stages(array, array)

    def attend(
        self,
        layer: int,
        q: Array,
        policy: Policy | None = None,
        visible: SequenceABC[int] | None = None,
        *,
        out_dtype: OutDType | None = None,
        timeout: float | None = None,
    ) -> AttendResult:
        """Attends at one layer.

        Args:
            layer: Layer, [0, layer_count).
            q: Queries [T, H_q, d] after the positional encoding, float32, float16 or bfloat16.
                If T > 16, all rows are attended.
            policy: Overrides the sequence's policy for this call.
            visible: Visible tokens of each query, [T], each in [1, n]. None is causal over the
                last T tokens.
            out_dtype: Element type of the output. None means that of q.
            timeout: Seconds. None means the client's timeout.

        Returns:
            Output, log-sum-exp, certificate and counts.

        Raises:
            OutOfRange: `visible` is above the layer's length, or a logit is not finite.
            InvalidArgument: Shapes do not fit the model, or the model does not support the
                policy.
            DeadlineExceeded: The call took longer than its timeout.
        """
        results = self._client.attend(
            layer,
            {self: q},
            policy,
            {self: visible} if visible is not None else None,
            out_dtype=out_dtype,
            timeout=timeout,
        )
        return results[self]

    def select(
        self,
        layer: int,
        q: Array,
        policy: Policy | None = None,
        visible: int | None = None,
        *,
        timeout: float | None = None,
    ) -> Selection:
        """Chooses the rows of an attend without computing it.

        Args:
            layer: Layer, [0, layer_count).
            q: One query [1, H_q, d].
            policy: Overrides the sequence's policy for this call.
            visible: Visible tokens. None means all.
            timeout: Seconds. None means the client's timeout.

        Returns:
            Indices, log-weights and strata per KV head, as arrays of q's kind.
        """
        request = attention_service_pb2.SelectRequest(layer=layer)
        self._fill_item(request.item, q, policy, None if visible is None else [visible])
        select = self._wire.stubs.attention.Select
        response = self._wire.restarts.again(lambda: self._call(select, request, timeout=timeout))
        chosen = response.selection
        decode = decoder_like(q)
        return Selection(
            offsets=np.array(chosen.offsets, np.int64),
            indices=decode(chosen.indices),
            log_weights=decode(chosen.log_weights),
            strata=decode(chosen.strata),
            certificate=Certificate(response.certificate, (q.shape[0], q.shape[1])),
        )

    def fetch(
        self,
        layer: int,
        start: int = 0,
        end: int | None = None,
        *,
        selection: Selection | None = None,
        into: tuple[Array, Array] | None = None,
        like: Array | None = None,
        timeout: float | None = None,
    ) -> tuple[Any, Any]:
        """Copies K/V rows out: those of tokens [start, end), or those in `selection`.

        All rows are of the same moment, even if another client appends or truncates meanwhile. A
        selection of more than 524,288 rows is fetched in parts of that size, each of one
        moment.

        Args:
            layer: Layer, [0, layer_count).
            start: First token. Only without `selection`.
            end: One after the last token. None means the layer's length, from the last answer of
                the daemon.
            selection: Tokens of each KV head by its offsets and indices, ascending within a
                head.
            into: Arrays for keys and values in the model's dtype: [H_kv, end - start, d] each,
                or with `selection` [offsets[-1], d], one head after the other. The engine writes
                in place to arrays that it can access: arrays in a region, and with an embedded
                engine all arrays, also CUDA tensors of its GPU. The call then waits for the
                current stream. Other arrays are filled from messages. None creates arrays.
            like: An array whose kind and device the created arrays have. None means numpy.
            timeout: Seconds. None means the client's timeout.

        Returns:
            Keys and values: the arrays of `into`. After an error some rows may have been
            written.

        Raises:
            OutOfRange: A token is above the layer's length.
            ValueError: Arrays have another shape or dtype, or are read-only.
        """
        model = self._described()
        row_shape: tuple[int, ...]
        if selection is None:
            if end is None:
                end = self.layer_token_counts[layer]
            if not 0 <= start < end:
                raise ValueError(f"no tokens to fetch: start {start}, end {end}")
            row_shape = (model.kv_head_count, end - start)
            requests = iter([(slice(None), range_request(start, end))])
        else:
            if start != 0 or end is not None:
                raise ValueError("fetch takes start and end, or selection, not both")
            row_shape = (len(selection.indices),)
            requests = selected_requests(selection)
        shape = (*row_shape, model.head_dim)
        if into is None:
            into = empty_like(like, shape, model.dtype), empty_like(like, shape, model.dtype)
        k, v = into
        for array, what in ((k, "k"), (v, "v")):
            check_target(array, shape, model.dtype, what)
        for rows, request in requests:
            request.layer, request.sequence = layer, self.name
            parts = k[rows], v[rows]
            self._wire.restarts.again(
                partial(fetch_into, self._wire, self._stream, request, *parts, timeout)
            )
        return k, v

    def fork(self, sequence_id: str = "") -> Sequence:
        """Copies the sequence. The copy shares pages with it until one of them writes.

        Each layer is copied up to the length of the shortest layer.

        Args:
            sequence_id: The id of the copy. If empty, the daemon chooses one.

        Raises:
            AlreadyExists: The id is taken.
            ResourceExhausted: The daemon's memory limit is reached.
        """
        response = self._call(
            self._wire.stubs.sequences.ForkSequence,
            sequence_service_pb2.ForkSequenceRequest(name=self.name, sequence_id=sequence_id),
        )
        return Sequence(self._client, response.sequence, self._boot_id)

    def truncate(self, token_count: int) -> SequenceInfo:
        """Removes the newest tokens of every layer that is longer than `token_count`.

        Raises:
            OutOfRange: `token_count` is above the length of the sequence.
        """
        response = self._call(
            self._wire.stubs.sequences.TruncateSequence,
            sequence_service_pb2.TruncateSequenceRequest(name=self.name, token_count=token_count),
        )
        self._learn(response.sequence)
        return SequenceInfo.from_proto(response.sequence)

    def seal(self) -> SequenceInfo:
        """Ends appends to the sequence, so that it can be copied elsewhere.

        When it returns, no append is in progress and none begins. Each layer keeps its length.
        Appends, steps with new tokens, and truncations of all clients fail with
        `FailedPrecondition` (SEQUENCE_SEALED) and change nothing. Attends without new tokens,
        fetches and forks continue. A fork is not sealed. Sealing a sequence twice is not an
        error. A seal ends with `unseal`, or when the daemon's process ends, even if rows outlive
        the process.

        Raises:
            FailedPrecondition: A decoder holds the sequence (SEQUENCE_HELD).
        """
        return self._seal(True)

    def unseal(self) -> SequenceInfo:
        """Allows appends again. If they are already allowed, this is not an error.

        Raises:
            FailedPrecondition: A decoder holds the sequence (SEQUENCE_HELD).
        """
        return self._seal(False)

    def _seal(self, sealed: bool) -> SequenceInfo:
        response = self._call(
            self._wire.stubs.sequences.SealSequence,
            sequence_service_pb2.SealSequenceRequest(name=self.name, sealed=sealed),
        )
        self._learn(response.sequence)
        return SequenceInfo.from_proto(response.sequence)

    def delete(self, if_sealed: bool = False) -> None:
        """Deletes the sequence. Its memory is free when the call returns.

        Args:
            if_sealed: Delete it only if it is still sealed, that is, if neither another client
                nor a restart of the daemon has opened it.

        Raises:
            NotFound: It was deleted or has expired.
            FailedPrecondition: `if_sealed` is set and the sequence is not sealed
                (SEQUENCE_NOT_SEALED), or a decoder holds it (SEQUENCE_HELD).
        """
        self._call(
            self._wire.stubs.sequences.DeleteSequence,
            sequence_service_pb2.DeleteSequenceRequest(name=self.name, if_sealed=if_sealed),
        )

    def save(
        self, folder: str | Path, *, client_data: bytes = b"", timeout: float | None = None
    ) -> SavedSequence:
        """Saves the sequence to a folder, as earlier calls leave it.

        Later calls for the sequence continue meanwhile. If it is saved again to the same folder,
        only what is new is written. This is also true after an interrupted save. Until the call
        returns, the earlier save is the one that can be loaded.

        Args:
            folder: With a daemon: a name below its setting `snapshots.folder`, made of parts of
                [a-z0-9._-] with slashes in between. With an embedded engine: any path. A "~" at
                its beginning is the home folder.
            client_data: Up to 3 MiB of data that `Client.load_sequence` returns.
            timeout: Seconds. None means no limit.

        Raises:
            InvalidArgument: The folder's name is not valid, or there is too much client data.
            ValueError: With an embedded engine: the folder's name is empty.
            FailedPrecondition: The daemon has no folder for snapshots (NO_SNAPSHOT_FOLDER), or
                the folder has a manifest.json of another program.
            Aborted: Another call saves to the folder or loads from it (SNAPSHOT_BUSY).
            ResourceExhausted: There is not enough space on the disk or in the daemon's memory.
        """
        response = self._call(
            self._wire.stubs.sequences.SaveSequence,
            sequence_service_pb2.SaveSequenceRequest(
                name=self.name,
                folder=self._wire.snapshot_folder(folder),
                client_data=client_data,
            ),
            timeout=math.inf if timeout is None else timeout,
        )
        return SavedSequence(
            response.token_count,
            response.generation,
            response.byte_count,
            response.written_byte_count,
        )

    def _fill_item(
        self,
        item: attention_service_pb2.AttendItem,
        q: Array,
        policy: Policy | None,
        visible: SequenceABC[int] | None,
    ) -> None:
        """Fills in this sequence, the queries, and the policy."""
        q = engine_array(q, "q")
        _split.check_shape(q, ("T", "H_q", "d"), "q")
        item.sequence = self.name
        # The daemon itself reads queries that are in a region of its GPU.
        place = self._wire.regions.slice_on_gpu_of(q)
        if place is not None:
            wait_for_stream(q)
        fill(item.q, q, "q", place)
        if visible is not None:
            item.visible_token_counts.extend(visible)
        if policy is not None:
            item.policy.CopyFrom(policy.to_proto())
