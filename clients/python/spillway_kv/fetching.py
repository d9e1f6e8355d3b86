"""Fetches K/V rows of a sequence: written in place by the engine, or in messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from spillway_kv._proto import attention_service_pb2
from spillway_kv.errors import InvalidArgument, NotFound, OutOfRange
from spillway_kv.results import Selection
from spillway_kv.sequence_state import SequenceState
from spillway_kv.tensors import (
    Array,
    check_target,
    decoder_like,
    empty_like,
    encode_indices,
    integers_on_host,
    keep_for_a_while,
    on_gpu,
    wait_for_stream,
    write,
)

# Most indices of one request that selects rows, so that it fits into a message.
_SELECTED_MAX = 1 << 19


def fetch(
    sequence: SequenceState,
    layer: int,
    start: int,
    end: int | None,
    selection: Selection | None,
    into: tuple[Array, Array] | None,
    like: Array | None,
    timeout: float | None,
) -> tuple[Any, Any]:
    """Fetches as `Sequence.fetch` says."""
    model = sequence.described()
    row_shape: tuple[int, ...]
    if selection is None:
        if end is None:
            end = sequence.token_counts()[layer]
        if not 0 <= start < end:
            raise ValueError(f"no tokens to fetch: start {start}, end {end}")
        row_shape = (model.kv_head_count, end - start)
        requests = iter([(slice(None), _range_request(start, end))])
    else:
        if start != 0 or end is not None:
            raise ValueError("fetch takes start and end, or selection, not both")
        row_shape = (len(selection.indices),)
        requests = _selected_requests(selection)
    shape = (*row_shape, model.head_dim)
    if into is None:
        into = empty_like(like, shape, model.dtype), empty_like(like, shape, model.dtype)
    k, v = into
    for array, what in ((k, "k"), (v, "v")):
        check_target(array, shape, model.dtype, what)
    for rows, request in requests:
        request.layer, request.sequence = layer, sequence.name
        sequence.connection.restarts.again(
            partial(_fetch_into, sequence, request, k[rows], v[rows], timeout)
        )
    return k, v


def _range_request(start: int, end: int) -> attention_service_pb2.FetchPagesRequest:
    """Makes a request for tokens [start, end) of every KV head."""
    tokens = attention_service_pb2.TokenRange(start=start, count=end - start)
    return attention_service_pb2.FetchPagesRequest(tokens=tokens)


def _selected_requests(
    selection: Selection,
) -> Iterator[tuple[slice, attention_service_pb2.FetchPagesRequest]]:
    """Yields slices of the selected rows, and a request for each slice."""
    offsets = integers_on_host(selection.offsets, "selection.offsets").astype(np.int64)
    indices = integers_on_host(selection.indices, "selection.indices")
    for begin in range(0, max(len(indices), 1), _SELECTED_MAX):
        end = min(begin + _SELECTED_MAX, len(indices))
        # A selection that fits into one request is sent unchanged, so that the daemon checks it.
        whole = end - begin == len(indices)
        chosen = attention_service_pb2.Selection(
            offsets=offsets if whole else np.clip(offsets, begin, end) - begin,
            indices=encode_indices(indices[begin:end]),
        )
        yield slice(begin, end), attention_service_pb2.FetchPagesRequest(selection=chosen)


def _fetch_into(
    sequence: SequenceState,
    request: attention_service_pb2.FetchPagesRequest,
    k: Array,
    v: Array,
    timeout: float | None,
) -> None:
    """Fetches the rows of a request, in place or in messages.

    Args:
        sequence: The sequence.
        request: The request. After a restart it is used again, without the regions of the last
            attempt.
        k: Where keys are written: [H_kv, T, d] for a range, [rows, d] for a selection.
        v: The same for values.
        timeout: Seconds. None means the client's timeout.
    """
    method, regions = sequence.connection.stubs.attention.FetchPages, sequence.connection.regions
    k_place, v_place = regions.slice_of(k), regions.slice_of(v)
    request.ClearField("k")
    request.ClearField("v")
    if k_place is not None and v_place is not None and on_gpu(k) == on_gpu(v):
        wait_for_stream(k)
        request.k.CopyFrom(k_place)
        request.v.CopyFrom(v_place)
        try:
            for _ in sequence.stream(method, request, timeout=timeout):
                pass
        except (InvalidArgument, NotFound, OutOfRange):
            raise
        except BaseException:
            # The call was given up, but an embedded engine may still write its last rows.
            keep_for_a_while(k, v)
            raise
        if regions.holds(k_place) and regions.holds(v_place):
            return
        request.ClearField("k")
        request.ClearField("v")
    responses = sequence.stream(method, request, timeout=timeout)
    _receive(responses, k, v, by_head=request.HasField("tokens"))


def _receive(responses: Iterable[Any], k: Array, v: Array, *, by_head: bool) -> None:
    """Writes rows that come in messages, of a range one KV head after the other."""
    decode_k, decode_v = decoder_like(k), decoder_like(v)
    head, at = 0, 0
    for response in responses:
        count = response.rows.shape[0]
        place: tuple[Any, ...]
        if by_head:
            at = at if response.kv_head == head else 0
            head = response.kv_head
            place = (head, slice(at, at + count))
        else:
            place = (slice(at, at + count),)
        write(k, place, decode_k(response.rows)[:, 0])
        write(v, place, decode_v(response.rows)[:, 1])
        at += count
