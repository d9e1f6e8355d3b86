"""Cuts appends and attends into messages of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spillway_kv._proto import attention_service_pb2, tensor_pb2
from spillway_kv.tensors import Array, fill, itemsize

# Bytes of a message for everything except the elements of its tensors.
OVERHEAD_BYTES = 64 * 1024
# Bytes of a certificate in a response, per query and head: five varints of at most ten bytes, two
# floats and the log-sum-exp, rounded up.
CERTIFICATE_BYTES = 64
# Bytes of an item in a message, besides its tensors: names, policy, framing.
ITEM_BYTES = 1024


def kv_pieces(
    layer_count: int, token_count: int, token_bytes: int, budget_bytes: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yields half-open (layer, layer_end, token, token_end) ranges that cover an append.

    Args:
        layer_count: Layers of the append.
        token_count: Tokens of the append.
        token_bytes: Bytes of K and V of one token in one layer.
        budget_bytes: Most bytes of K and V in a piece.
    """
    if layer_count * token_count * token_bytes <= budget_bytes:
        yield 0, layer_count, 0, token_count
        return
    if token_bytes > budget_bytes:
        raise ValueError(
            f"one token of {token_bytes} bytes does not fit into a message of {budget_bytes} bytes"
        )
    step = budget_bytes // token_bytes
    for layer in range(layer_count):
        for token in range(0, token_count, step):
            yield layer, layer + 1, token, min(token + step, token_count)


def whole_messages(byte_count: int, token_bytes: int, budget_bytes: int) -> int:
    """Rounds down to a multiple of the tokens that fit into a message.

    Rows that were appended in pieces of this size can be sent again in messages: none of these is
    then only partly there.

    Args:
        byte_count: Most bytes of a piece. If no message fits, it is returned unchanged.
        token_bytes: Bytes of K and V of one token in one layer.
        budget_bytes: Most bytes of K and V in a message.
    """
    message_bytes = budget_bytes // max(token_bytes, 1) * token_bytes
    if 0 < message_bytes <= byte_count:
        return byte_count - byte_count % message_bytes
    return byte_count


@dataclass(frozen=True)
class Part:
    """Queries [start, end) of one item of an attend."""

    item: int
    start: int
    end: int
    # The larger of its bytes in the request and in the response.
    byte_count: int


def query_parts(
    item: int, shape: Sequence[int], dtype: int, out_dtype: int, budget_bytes: int, count_max: int
) -> list[Part]:
    """Cuts the queries of one item into parts of equal size, each of which fits into a message."""
    query_count, head_count, head_dim = shape
    element_bytes = max(itemsize(dtype), itemsize(out_dtype))
    query_bytes = head_count * (head_dim * element_bytes + CERTIFICATE_BYTES)
    step = min(count_max, (budget_bytes - ITEM_BYTES) // max(query_bytes, 1))
    if step < 1:
        raise ValueError(
            f"one query of {query_bytes} bytes does not fit into a message of {budget_bytes} bytes"
        )
    # All parts have about the same size: a small last part would be served by the policy, while the
    # others are dense.
    part_count = max(1, -(-query_count // step))
    edges = [query_count * i // part_count for i in range(part_count + 1)]
    return [
        Part(item, start, end, ITEM_BYTES + (end - start) * query_bytes)
        for start, end in zip(edges[:-1], edges[1:], strict=True)
    ]


def pack(parts: Sequence[Part], budget_bytes: int, item_count_max: int) -> Iterator[list[Part]]:
    """Groups parts, in order, into requests that fit a message and name each item only once."""
    group: list[Part] = []
    for part in parts:
        full = sum(p.byte_count for p in group) + part.byte_count > budget_bytes
        if group and (full or len(group) >= item_count_max or group[-1].item == part.item):
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def merge_results(
    results: Sequence[attention_service_pb2.AttendResult],
) -> attention_service_pb2.AttendResult:
    """Joins the results of one item's parts along the queries."""
    if len(results) == 1:
        return results[0]
    merged = attention_service_pb2.AttendResult()
    for result in results:
        merged.certificate.MergeFrom(result.certificate)
        merged.statistics.touched_row_counts.extend(result.statistics.touched_row_counts)
        merged.statistics.device_time_us += result.statistics.device_time_us
        merged.statistics.moved_row_count += result.statistics.moved_row_count
    for name in ("out", "lse"):
        tensors = [getattr(result, name) for result in results]
        joined = getattr(merged, name)
        joined.dtype = tensors[0].dtype
        joined.shape.extend([sum(t.shape[0] for t in tensors), *tensors[0].shape[1:]])
        joined.data = b"".join(t.data for t in tensors)
    return merged


def fill_chunk(
    chunk: attention_service_pb2.KvChunk,
    sequence: str,
    generation: int,
    layer: int,
    start: int,
    k: Array,
    v: Array,
    places: tuple[tensor_pb2.RegionSlice, tensor_pb2.RegionSlice] | None = None,
) -> None:
    """Fills an empty message with K and V [layers, H_kv, T, d]. places: where they are in regions.

    Fills it in place, because putting a message into another one copies it, with all rows.
    """
    chunk.sequence = sequence
    chunk.generation = generation
    chunk.layer_start = layer
    chunk.token_start = start
    k_place, v_place = places or (None, None)
    fill(chunk.k, k, "k", k_place)
    fill(chunk.v, v, "v", v_place)


def check_shape(array: Any, dimensions: Sequence[str], what: str) -> tuple[int, ...]:
    """Returns the shape. Raises ValueError if it has another number of dimensions."""
    shape = tuple(array.shape)
    if len(shape) != len(dimensions):
        raise ValueError(f"{what} has shape {list(shape)}, not [{', '.join(dimensions)}]")
    return shape
