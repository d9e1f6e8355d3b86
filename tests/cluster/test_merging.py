"""Answers of daemons with some heads each become those of one daemon with all."""

from __future__ import annotations

import numpy as np
from spillway_kv._proto import attention_service_pb2, tensor_pb2
from spillway_kv.cluster.merging import merged_results
from spillway_kv.results import AttendResult
from spillway_kv.tensors import decoder_like

QUERIES, DIM = 2, 4


def part(first: int, heads: int, microseconds: float, moved: int) -> AttendResult:
    """The result of the KV heads from `first`, with one query head each, numbered from there."""
    message = attention_service_pb2.AttendResult()
    numbers = np.arange(first, first + heads) + 100 * np.arange(QUERIES)[:, None]
    for tensor, shape in ((message.out, (QUERIES, heads, DIM)), (message.lse, (QUERIES, heads))):
        values = numbers.reshape(*numbers.shape, *[1] * (len(shape) - 2))
        tensor.dtype = tensor_pb2.DTYPE_F32
        tensor.shape.extend(shape)
        tensor.data = np.broadcast_to(values, shape).astype("f4").tobytes()
    message.certificate.visible_token_counts.extend(numbers.ravel().tolist())
    message.statistics.touched_row_counts.extend(numbers.ravel().tolist())
    message.statistics.device_time_us = microseconds
    message.statistics.moved_row_count = moved
    return AttendResult(message, decoder_like(None))


def test_results_are_joined_along_the_heads() -> None:
    """The daemons work at the same time, so their times do not add up. Moved rows do."""
    parts = [part(0, 2, 12.5, 5), part(2, 1, 40.0, 0), part(3, 2, 33.0, 8)]
    whole = merged_results(parts, [2, 1, 2])
    assert whole.device_time_us == 40.0
    assert whole.moved_row_count == 13
    numbers = np.arange(5) + 100 * np.arange(QUERIES)[:, None]
    np.testing.assert_array_equal(whole.touched_row_counts, numbers)
    assert list(whole.message.certificate.visible_token_counts) == numbers.ravel().tolist()
    np.testing.assert_array_equal(whole.lse, numbers)
    np.testing.assert_array_equal(whole.out, np.repeat(numbers[..., None], DIM, 2))
    assert merged_results(parts[:1], [2]) is parts[0]
