"""A sequence whose layers and KV heads lie on several daemons."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import spillway
from spillway.policy import Policy
from spillway.results import (
    AppendResult,
    AttendResult,
    Model,
    Pages,
    SavedSequence,
    Selection,
    SequenceInfo,
)
from spillway.tensors import Array, OutDType, empty_like

from spillway_cluster.merging import (
    heads_of,
    merged_counts,
    merged_info,
    merged_selections,
    selection_of,
)
from spillway_cluster.shares import Share

if TYPE_CHECKING:
    from spillway_cluster.client import SplitClient


class Piece(NamedTuple):
    """A daemon's part of a sequence."""

    share: Share
    sequence: spillway.Sequence


def local_policy(policy: Policy | None, share: Share) -> Policy | None:
    """A policy as the daemon with a share numbers layers."""
    if policy is None or policy.dense_layers is None:
        return policy
    dense = [share.local(layer) for layer in policy.dense_layers if layer in share.layers]
    return dataclasses.replace(policy, dense_layers=dense)


def part_folder(folder: str | Path, number: int) -> str:
    """Where a daemon saves its part of a sequence."""
    return f"{folder}/part{number}"


class SplitSequence:
    """What `spillway.Sequence` is on one daemon, on the daemons of a `SplitClient`.

    After an error some of the parts may have what was appended. Their lengths then differ
    in that layer, and the same call may be repeated: what is there is accepted. Not thread-safe,
    as `spillway.Sequence`.

    Attributes:
        pieces: The daemons' parts, in the order of the client's daemons.
        name: Resource name. Without a name of its own each part has another one, and this is the
            first one's.
        model: `models/{id}`, the same on all.
    """

    def __init__(self, client: SplitClient, model: Model, pieces: SequenceABC[Piece]) -> None:
        self._client = client
        self._whole = model
        self.pieces = tuple(pieces)
        self.name = pieces[0].sequence.name
        self.model = pieces[0].sequence.model
        # Query heads of a KV head.
        self.group = model.query_head_count // model.kv_head_count

    def __repr__(self) -> str:
        return f"SplitSequence({self.name!r}, model={self.model!r})"

    def pieces_of(self, layer: int) -> list[int]:
        """The parts that hold a layer, in the heads' order."""
        found = [i for i, piece in enumerate(self.pieces) if layer in piece.share.layers]
        if not found:
            raise spillway.InvalidArgument(
                f"layer: value {layer} is not in [0, {self._whole.layer_count - 1}]"
            )
        return found

    def _forget(self) -> None:
        """Makes the next use of a length ask the daemons; for `spillway.transformers`."""
        for piece in self.pieces:
            piece.sequence._forget()

    def _takes_from_gpu(self, array: Array) -> bool:
        """Whether appends read the tensor's rows in its GPU's memory: all the daemons'."""
        return all(piece.sequence._takes_from_gpu(array) for piece in self.pieces)

    @property
    def generation(self) -> int:
        """Of the first part, as last heard."""
        return self.pieces[0].sequence.generation

    @property
    def layer_token_counts(self) -> tuple[int, ...]:
        """Tokens of each layer that all its parts have, as last heard."""
        shares = [piece.share for piece in self.pieces]
        counts = [piece.sequence.layer_token_counts for piece in self.pieces]
        return merged_counts(shares, counts, self._whole.layer_count)

    @property
    def token_count(self) -> int:
        """Tokens in every layer, as last heard."""
        return min(piece.sequence.token_count for piece in self.pieces)

    def refresh(self) -> SequenceInfo:
        """Asks the daemons what the sequence is now."""
        return self._info(self._client.each(lambda piece: piece.sequence.refresh(), self.pieces))

    def keep(self) -> SequenceInfo:
        """As `spillway.Sequence.keep`, for each part."""
        return self._info(self._client.each(lambda piece: piece.sequence.keep(), self.pieces))

    def _info(self, parts: SequenceABC[SequenceInfo]) -> SequenceInfo:
        shares = [piece.share for piece in self.pieces]
        return merged_info(shares, parts, self._whole.layer_count)

    def append(
        self, layer: int, start: int | None, k: Array, v: Array, *, timeout: float | None = None
    ) -> AppendResult:
        """Appends rows, each daemon's heads to it; as `spillway.Sequence.append`."""
        if len(k.shape) == 3:
            k, v = k[None], v[None]
        if k.shape[1] != self._whole.kv_head_count or tuple(v.shape) != tuple(k.shape):
            raise spillway.InvalidArgument(
                f"k and v have shapes {list(k.shape)} and {list(v.shape)}: not the model's "
                f"{self._whole.kv_head_count} KV heads"
            )
        layers = range(layer, layer + k.shape[0])
        for each in layers:
            self.pieces_of(each)
        first = self.layer_token_counts[layer] if start is None else start

        def put(piece: Piece) -> AppendResult:
            share = piece.share
            begin = max(layers.start, share.layers.start)
            rows = slice(begin - layer, min(layers.stop, share.layers.stop) - layer)
            return piece.sequence.append(
                share.local(begin),
                first,
                heads_of(k[rows], share.heads, 1),
                heads_of(v[rows], share.heads, 1),
                timeout=timeout,
            )

        concerned = [
            piece
            for piece in self.pieces
            if piece.share.layers.start < layers.stop and layers.start < piece.share.layers.stop
        ]
        parts = self._client.each(put, concerned)
        return AppendResult(
            sum(part.appended_chunk_count for part in parts),
            sum(part.already_present_chunk_count for part in parts),
            self.layer_token_counts,
        )

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
        """Attends at one layer; as `spillway.Sequence.attend`."""
        results = self._client.attend(
            layer,
            {self: q},
            policy,
            None if visible is None else {self: visible},
            out_dtype=out_dtype,
            timeout=timeout,
        )
        result: AttendResult = results[self]
        return result

    def select(
        self,
        layer: int,
        q: Array,
        policy: Policy | None = None,
        visible: int | None = None,
        *,
        timeout: float | None = None,
    ) -> Selection:
        """Chooses the rows of an attend; as `spillway.Sequence.select`."""

        def ask(piece: Piece) -> Selection:
            heads = piece.share.query_heads(self.group)
            return piece.sequence.select(
                piece.share.local(layer),
                heads_of(q, heads, 1),
                local_policy(policy, piece.share),
                visible,
                timeout=timeout,
            )

        concerned = [self.pieces[number] for number in self.pieces_of(layer)]
        parts = self._client.each(ask, concerned)
        return merged_selections(parts, q.shape[1])

    def fetch_pages(
        self,
        layer: int,
        q: Array | None = None,
        policy: Policy | None = None,
        visible: int | None = None,
        *,
        selection: Selection | None = None,
        like: Array | None = None,
        timeout: float | None = None,
    ) -> Iterator[Pages]:
        """Streams rows, one daemon's after the other's; as `spillway.Sequence.fetch_pages`."""
        for number in self.pieces_of(layer):
            share, part = self.pieces[number]
            pages = part.fetch_pages(
                share.local(layer),
                None if q is None else heads_of(q, share.query_heads(self.group), 1),
                local_policy(policy, share),
                visible,
                selection=None if selection is None else selection_of(selection, share.kv_heads),
                like=like,
                timeout=timeout,
            )
            for page in pages:
                yield dataclasses.replace(page, kv_head=page.kv_head + share.kv_heads.start)

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
        """Copies rows out; as `spillway.Sequence.fetch`, but that parts may be of two moments."""
        model = self._whole
        if selection is None and end is None:
            end = self.layer_token_counts[layer]
        if into is None:
            rows: tuple[int, ...]
            if selection is None:
                assert end is not None
                rows = (model.kv_head_count, max(end - start, 0))
            else:
                rows = (len(np.asarray(selection.indices)),)
            shape = (*rows, model.head_dim)
            into = empty_like(like, shape, model.dtype), empty_like(like, shape, model.dtype)
        k, v = into

        def get(piece: Piece) -> None:
            heads = piece.share.kv_heads
            if selection is None:
                place, chosen = piece.share.heads, None
            else:
                chosen = selection_of(selection, heads)
                begin = int(selection.offsets[heads.start])
                place = slice(begin, begin + int(chosen.offsets[-1]))
            piece.sequence.fetch(
                piece.share.local(layer),
                start,
                end,
                selection=chosen,
                into=(k[place], v[place]),
                timeout=timeout,
            )

        concerned = [self.pieces[number] for number in self.pieces_of(layer)]
        self._client.each(get, concerned)
        return k, v

    def fork(self, sequence_id: str = "") -> SplitSequence:
        """Copies the sequence on each daemon; as `spillway.Sequence.fork`."""
        return self._client.opened(lambda number: self.pieces[number].sequence.fork(sequence_id))

    def truncate(self, token_count: int) -> SequenceInfo:
        """Drops the newest tokens; as `spillway.Sequence.truncate`.

        Raises:
            OutOfRange: `token_count` is above a part's. None is truncated then.
        """
        # All parts, or none.
        if token_count > self.refresh().token_count:
            raise spillway.OutOfRange(
                f"token_count {token_count} is not in [0, {self.token_count}]"
            )
        return self._info(
            self._client.each(lambda piece: piece.sequence.truncate(token_count), self.pieces)
        )

    def delete(self) -> None:
        """Deletes the sequence on all daemons.

        Raises:
            NotFound: It was deleted or has expired on all of them.
        """
        self._client.gone(lambda piece: piece.sequence.delete(), self.pieces)

    def save(
        self, folder: str | Path, *, client_data: bytes = b"", timeout: float | None = None
    ) -> SavedSequence:
        """Saves each part to a folder of its own below this one, of its daemon.

        Parts are of one moment if nothing is appended meanwhile. Arguments and errors as of
        `spillway.Sequence.save`.
        """

        def put(number: int) -> SavedSequence:
            part = self.pieces[number].sequence
            return part.save(part_folder(folder, number), client_data=client_data, timeout=timeout)

        parts = self._client.each(put, range(len(self.pieces)))
        return SavedSequence(
            min(part.token_count for part in parts),
            parts[0].generation,
            sum(part.byte_count for part in parts),
            sum(part.written_byte_count for part in parts),
        )
