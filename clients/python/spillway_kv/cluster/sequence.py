"""A sequence of a cluster: as a whole on one daemon, or in parts on several."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from typing import Any

import numpy as np

import spillway_kv
from spillway_kv.cluster.connection import ClusterConnection
from spillway_kv.cluster.groups import ask_by_daemon
from spillway_kv.cluster.merging import (
    heads_of,
    merged_counts,
    merged_info,
    merged_results,
    merged_selections,
    selection_of,
)
from spillway_kv.cluster.part import Part
from spillway_kv.cluster.placement import check_id, named, part_folder, part_name
from spillway_kv.cluster.sequence_parts import Placed, SequenceParts
from spillway_kv.cluster.shares import local_policy
from spillway_kv.errors import SpillwayError
from spillway_kv.policy import Policy
from spillway_kv.results import (
    AppendResult,
    AttendResult,
    SavedSequence,
    Selection,
    SequenceInfo,
)
from spillway_kv.tensors import Array, OutDType, empty_like, engine_array, wait_for_stream


class ClusterSequence:
    """A sequence on the daemons of a `ClusterClient`, with the calls of `spillway_kv.Sequence`.

    After an error, some of the parts may have the appended tokens, and others not. Their lengths
    in that layer then differ. The same call may be repeated: tokens that are already there are
    accepted. Not thread-safe, like `spillway_kv.Sequence`.

    Attributes:
        parts: One part for each daemon, ordered by layers and then by heads.
        name: Resource name. If the sequence was not named, each part has another name, and this
            is the name of the first part.
        model: `models/{id}` of the whole model.
        whole: The whole model.
    """

    def __init__(self, owner: SequenceParts, placed: Placed) -> None:
        self._owner = owner
        self._wire = owner.connection
        self._dealt = dealt = placed.dealt
        self.whole = dealt.model
        self.parts = tuple(placed.parts)
        self.name = placed.name
        self.model = dealt.model.name
        # Number of query heads per KV head.
        self.group = self.whole.query_head_count // self.whole.kv_head_count

    def __repr__(self) -> str:
        return f"ClusterSequence({self.name!r}, model={self.model!r})"

    def parts_of(self, layer: int) -> list[Part]:
        """The parts that hold a layer, in the order of their heads."""
        found = [part for part in self.parts if layer in part.share.layers]
        if not found:
            raise spillway_kv.InvalidArgument(
                f"layer: value {layer} is not in [0, {self.whole.layer_count - 1}]"
            )
        return found

    def head_counts(self, layer: int) -> list[int]:
        """Number of KV heads of each of these parts."""
        return [len(part.share.kv_heads) for part in self.parts_of(layer)]

    @property
    def first_layers(self) -> list[int]:
        """The first layer of each group of layers."""
        return sorted({part.share.layers.start for part in self.parts})

    @property
    def daemons(self) -> list[str]:
        """Names of the daemons that hold the parts, as last known."""
        return [part.daemon for part in self.parts]

    @property
    def generation(self) -> int:
        """Generation of the first part, from the last answer."""
        return self.parts[0].sequence.generation

    @property
    def layer_token_counts(self) -> tuple[int, ...]:
        """Number of tokens of each layer that all its parts have, from the last answers."""
        return self._token_counts({})

    def _token_counts(self, told: Mapping[Part, SequenceABC[int]]) -> tuple[int, ...]:
        """The same, with what answers have just told of some parts."""
        shares = [part.share for part in self.parts]
        counts = [
            told[part] if part in told else part.call(lambda s: s.layer_token_counts)
            for part in self.parts
        ]
        return merged_counts(shares, counts, self.whole.layer_count)

    @property
    def token_count(self) -> int:
        """Length of the shortest layer, from the last answers."""
        return min(part.call(lambda s: s.token_count) for part in self.parts)

    def refresh(self) -> SequenceInfo:
        """Asks the daemons for the present state of the sequence."""
        return self._info(
            self._wire.each(lambda part: part.call(lambda s: s.refresh()), self.parts)
        )

    def keep(self) -> SequenceInfo:
        """Like `spillway_kv.Sequence.keep`, for each part."""
        return self._info(self._wire.each(lambda part: part.call(lambda s: s.keep()), self.parts))

    def _info(self, infos: SequenceABC[SequenceInfo]) -> SequenceInfo:
        shares = [part.share for part in self.parts]
        info = merged_info(shares, infos, self.whole.layer_count)
        return dataclasses.replace(info, name=self.name, model=self.model)

    def append(
        self, layer: int, start: int | None, k: Array, v: Array, *, timeout: float | None = None
    ) -> AppendResult:
        """Appends rows, and sends each daemon its heads. Like `spillway_kv.Sequence.append`."""
        k, v = engine_array(k, "k"), engine_array(v, "v")
        if len(k.shape) == 3:
            k, v = k[None], v[None]
        if k.shape[1] != self.whole.kv_head_count or tuple(v.shape) != tuple(k.shape):
            raise spillway_kv.InvalidArgument(
                f"k and v have shapes {list(k.shape)} and {list(v.shape)}: not the model's "
                f"{self.whole.kv_head_count} KV heads"
            )
        layers = range(layer, layer + k.shape[0])
        for each in layers:
            self.parts_of(each)
        first = self.layer_token_counts[layer] if start is None else start
        # The calls are made in threads, which have other current streams.
        wait_for_stream(k)

        def put(part: Part) -> AppendResult:
            share = part.share
            begin = max(layers.start, share.layers.start)
            rows = slice(begin - layer, min(layers.stop, share.layers.stop) - layer)
            mine = heads_of(k[rows], share.heads, 1), heads_of(v[rows], share.heads, 1)
            return part.call(lambda s: s.append(share.local(begin), first, *mine, timeout=timeout))

        concerned = [
            part
            for part in self.parts
            if part.share.layers.start < layers.stop and layers.start < part.share.layers.stop
        ]
        results = self._wire.each(put, concerned)
        return AppendResult(
            sum(result.appended_chunk_count for result in results),
            sum(result.already_present_chunk_count for result in results),
            self._token_counts(
                {
                    part: result.layer_token_counts
                    for part, result in zip(concerned, results, strict=True)
                }
            ),
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
        """Attends at one layer, like `spillway_kv.Sequence.attend`."""
        seen = {} if visible is None else {self: visible}
        result = attend(self._wire, layer, {self: q}, policy, seen, out_dtype, timeout)[self]
        if isinstance(result, SpillwayError):
            raise result
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
        """Chooses the rows of an attend, like `spillway_kv.Sequence.select`."""

        def ask(part: Part) -> Selection:
            share = part.share
            mine = heads_of(q, share.query_heads(self.group), 1)
            local = share.local(layer), mine, local_policy(policy, share), visible
            return part.call(lambda s: s.select(*local, timeout=timeout))

        return merged_selections(self._wire.each(ask, self.parts_of(layer)), q.shape[1])

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
        """Copies rows out, like `spillway_kv.Sequence.fetch`. Parts may be of different moments."""
        model = self.whole
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

        def get(part: Part) -> None:
            heads = part.share.kv_heads
            if selection is None:
                place, chosen = part.share.heads, None
            else:
                each = (len(selection.offsets) - 1) // model.kv_head_count  # groups of a KV head
                groups = slice(heads.start * each, heads.stop * each)
                chosen, place = selection_of(selection, groups)
            local, mine = part.share.local(layer), (k[place], v[place])
            part.call(
                lambda s: s.fetch(local, start, end, selection=chosen, into=mine, timeout=timeout)
            )

        self._wire.each(get, self.parts_of(layer))
        return k, v

    def fork(self, sequence_id: str = "") -> ClusterSequence:
        """Copies the sequence on each daemon, like `spillway_kv.Sequence.fork`."""
        check_id(sequence_id)
        count = len(self.parts)
        name = f"sequences/{sequence_id}" if sequence_id else ""

        def fork(number: int) -> Part:
            return self.parts[number].fork(part_name(sequence_id, number, count))

        placement = self._wire.placement
        put = self.daemons
        if name:
            self._owner.claimed(name, lambda: placement.put(name, put))
        with named(placement, name):
            parts = self._owner.all_or_none(fork, range(count))
            daemons = [part.daemon for part in parts]
            if name and daemons != put:
                placement.drop(name)
                placement.put(name, daemons)
        return ClusterSequence(
            self._owner, Placed(name or parts[0].sequence.name, self._dealt, parts)
        )

    def truncate(self, token_count: int) -> SequenceInfo:
        """Removes the newest tokens, like `spillway_kv.Sequence.truncate`.

        Raises:
            OutOfRange: `token_count` is above the length of a part. No part is truncated then.
        """
        # Checked first, so that all parts are truncated or none.
        if token_count > self.refresh().token_count:
            raise spillway_kv.OutOfRange(
                f"token_count {token_count} is not in [0, {self.token_count}]"
            )
        return self._info(
            self._wire.each(lambda part: part.call(lambda s: s.truncate(token_count)), self.parts)
        )

    def delete(self) -> None:
        """Deletes the sequence on all daemons. What was lost with a daemon counts as deleted.

        Raises:
            NotFound: It was deleted or has expired on all of them.
        """
        self._wire.gone(lambda part: part.call(lambda s: s.delete()), self.parts)
        self._owner.forget(self.name, [(part.sequence.name, part.daemon) for part in self.parts])

    def save(
        self, folder: str | Path, *, client_data: bytes = b"", timeout: float | None = None
    ) -> SavedSequence:
        """Saves each part to its own folder below this one, on the host of its daemon.

        Parts are of the same moment only if nothing is appended meanwhile. Arguments and errors
        are those of `spillway_kv.Sequence.save`.
        """

        def put(number: int) -> SavedSequence:
            mine = part_folder(folder, number, len(self.parts))
            return self.parts[number].call(
                lambda s: s.save(mine, client_data=client_data, timeout=timeout)
            )

        parts = self._wire.each(put, range(len(self.parts)))
        return SavedSequence(
            min(part.token_count for part in parts),
            parts[0].generation,
            sum(part.byte_count for part in parts),
            sum(part.written_byte_count for part in parts),
        )


def attend(
    connection: ClusterConnection,
    layer: int,
    queries: Mapping[ClusterSequence, Array],
    policy: Policy | None,
    visible: Mapping[ClusterSequence, SequenceABC[int]],
    out_dtype: OutDType | None,
    timeout: float | None,
) -> dict[ClusterSequence, AttendResult | SpillwayError]:
    """Attends at one layer, as `ClusterClient.attend` says.

    Returns:
        The result of each sequence, or the error of its attend.
    """
    owners = [(s, part) for s in queries for part in s.parts_of(layer)]

    def ask(indices: SequenceABC[int]) -> list[AttendResult | SpillwayError]:
        """Attends for parts on one daemon with the same share."""
        share = owners[indices[0]][1].share
        handles = {i: owners[i][1].sequence for i in indices}
        heads = share.query_heads(owners[indices[0]][0].group)
        mine = {h: heads_of(queries[owners[i][0]], heads, 1) for i, h in handles.items()}
        answers = connection.placement.client(owners[indices[0]][1].daemon).attend(
            share.local(layer),
            mine,
            local_policy(policy, share),
            {h: visible[owners[i][0]] for i, h in handles.items() if owners[i][0] in visible},
            out_dtype=out_dtype,
            timeout=timeout,
            return_errors=True,
        )
        return [answers[handle] for handle in handles.values()]

    answers = iter(ask_by_daemon(connection, [part for _, part in owners], ask))
    results: dict[ClusterSequence, AttendResult | SpillwayError] = {}
    for sequence in queries:
        parts = [next(answers) for _ in sequence.parts_of(layer)]
        failed = next((part for part in parts if isinstance(part, SpillwayError)), None)
        if failed is not None:
            results[sequence] = failed
        else:
            good = [part for part in parts if isinstance(part, AttendResult)]
            results[sequence] = merged_results(good, sequence.head_counts(layer))
    return results
