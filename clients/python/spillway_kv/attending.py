"""Attends for several sequences in as many messages as needed, and selects rows."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from functools import partial

import numpy as np

from spillway_kv import _split
from spillway_kv._proto import attention_service_pb2
from spillway_kv.connection import Connection
from spillway_kv.errors import NotFound, SpillwayError, error_from_status
from spillway_kv.policy import Policy
from spillway_kv.results import AttendResult, Certificate, Selection
from spillway_kv.sequence_state import SequenceState, explained
from spillway_kv.tensors import (
    Array,
    OutDType,
    decoder_like,
    dtype_number,
    dtype_of,
    engine_array,
    fill,
    wait_for_stream,
)

_EXACT = Policy(selector="all")


def attend(
    connection: Connection,
    layer: int,
    queries: Mapping[SequenceState, Array],
    policy: Policy | None,
    visible: Mapping[SequenceState, SequenceABC[int]],
    out_dtype: OutDType | None,
    timeout: float | None,
) -> dict[SequenceState, AttendResult | SpillwayError]:
    """Attends at one layer, as `Client.attend` says.

    Returns:
        The result of each sequence, or the error of its attend.
    """
    queries = {sequence: engine_array(q, "q") for sequence, q in queries.items()}
    sequences = list(queries)
    parts: list[_split.Part] = []
    policies: list[Policy | None] = []
    sights: list[SequenceABC[int] | None] = []
    for index, (sequence, q) in enumerate(queries.items()):
        made = _parts(connection, index, q, out_dtype)
        sight = visible.get(sequence)
        if sight is None and len(made) > 1:
            end = sequence.refresh().layer_token_counts[layer] + 1
            sight = range(end - q.shape[0], end)
        # A part with so few queries would be served by the policy, although the whole request is
        # dense.
        sparse_max = connection.server_info.limits.sparse_query_token_count_max
        dense = len(made) > 1 and min(p.end - p.start for p in made) <= sparse_max
        policies.append(_EXACT if dense else policy)
        sights.append(sight)
        parts.extend(made)

    answers: list[list[attention_service_pb2.AttendResult]] = [[] for _ in sequences]
    item_count_max = connection.server_info.limits.attend_item_count_max
    for group in _split.pack(parts, connection.budget_bytes, item_count_max):
        request = attention_service_pb2.AttendRequest(layer=layer)
        if out_dtype is not None:
            request.out_dtype = dtype_number(out_dtype)  # type: ignore[assignment]
        for part in group:
            sequence, part_sight = sequences[part.item], sights[part.item]
            fill_item(
                request.items.add(),
                sequence,
                queries[sequence][part.start : part.end],
                policies[part.item],
                None if part_sight is None else part_sight[part.start : part.end],
            )
        call = partial(connection.call, connection.stubs.attention.Attend, request, timeout=timeout)
        try:
            response = connection.restarts.again(call)
        except NotFound as error:
            raise explained(error, sequences) from None
        for part, result in zip(group, response.results, strict=True):
            answers[part.item].append(result)
    return {
        sequence: _result(sequence, queries[sequence], answer)
        for sequence, answer in zip(sequences, answers, strict=True)
    }


def _parts(
    connection: Connection, index: int, q: Array, out_dtype: OutDType | None
) -> list[_split.Part]:
    """Cuts the queries of a sequence into parts that fit into a message."""
    shape = _split.check_shape(q, ("T", "H_q", "d"), "q")
    dtype = dtype_of(q, "q")
    return _split.query_parts(
        index,
        shape,
        dtype,
        dtype if out_dtype is None else dtype_number(out_dtype),
        connection.budget_bytes,
        connection.server_info.limits.query_token_count_max,
    )


def _result(
    sequence: SequenceState, q: Array, answer: SequenceABC[attention_service_pb2.AttendResult]
) -> AttendResult | SpillwayError:
    """Joins the answers for the parts of a sequence's queries."""
    failed = next((result for result in answer if result.status.code), None)
    if failed is not None:
        return sequence.explained(error_from_status(failed.status))
    return AttendResult(_split.merge_results(answer), decoder_like(q))


def select(
    sequence: SequenceState,
    layer: int,
    q: Array,
    policy: Policy | None,
    visible: int | None,
    timeout: float | None,
) -> Selection:
    """Chooses the rows of an attend, as `Sequence.select` says."""
    connection = sequence.connection
    request = attention_service_pb2.SelectRequest(layer=layer)
    fill_item(request.item, sequence, q, policy, None if visible is None else [visible])
    call = partial(sequence.call, connection.stubs.attention.Select, request, timeout=timeout)
    response = connection.restarts.again(call)
    chosen = response.selection
    decode = decoder_like(q)
    return Selection(
        offsets=np.array(chosen.offsets, np.int64),
        indices=decode(chosen.indices),
        log_weights=decode(chosen.log_weights),
        strata=decode(chosen.strata),
        certificate=Certificate(response.certificate, (q.shape[0], q.shape[1])),
    )


def fill_item(
    item: attention_service_pb2.AttendItem,
    sequence: SequenceState,
    q: Array,
    policy: Policy | None,
    visible: SequenceABC[int] | None,
) -> None:
    """Fills in the sequence, the queries, and the policy."""
    q = engine_array(q, "q")
    _split.check_shape(q, ("T", "H_q", "d"), "q")
    item.sequence = sequence.name
    # The daemon itself reads queries that are in a region of its GPU.
    place = sequence.connection.regions.slice_on_gpu_of(q)
    if place is not None:
        wait_for_stream(q)
    fill(item.q, q, "q", place)
    if visible is not None:
        item.visible_token_counts.extend(visible)
    if policy is not None:
        item.policy.CopyFrom(policy.to_proto())
