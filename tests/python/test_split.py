"""Messages of limited size cover everything exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spillway_kv import _split
from spillway_kv._proto import attention_service_pb2, tensor_pb2


@given(st.integers(1, 5), st.integers(1, 50), st.integers(1, 40), st.integers(40, 2000))
def test_kv_pieces_cover_and_fit(layers: int, tokens: int, token_bytes: int, budget: int) -> None:
    seen = np.zeros((layers, tokens), int)
    lengths = np.zeros(layers, int)
    for l0, l1, t0, t1 in _split.kv_pieces(layers, tokens, token_bytes, budget):
        assert (l1 - l0) * (t1 - t0) * token_bytes <= budget
        assert (lengths[l0:l1] == t0).all()  # each piece begins where its layers end
        lengths[l0:l1] = t1
        seen[l0:l1, t0:t1] += 1
    assert (seen == 1).all()


@given(st.integers(1, 3000), st.integers(1, 40), st.integers(0, 2000), st.integers(0, 20000))
def test_messages_fit_into_larger_pieces(
    tokens: int, token_bytes: int, more_budget: int, more_room: int
) -> None:
    budget = token_bytes + more_budget
    room = _split.whole_messages(budget + more_room, token_bytes, budget)
    assert more_room < room <= budget + more_room
    pieces = {end for *_, end in _split.kv_pieces(1, tokens, token_bytes, room)}
    messages = {end for *_, end in _split.kv_pieces(1, tokens, token_bytes, budget)}
    assert pieces <= messages


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(2000, 20000))
def test_query_parts_and_packing(counts: list[int], budget: int) -> None:
    parts = []
    for item, count in enumerate(counts):
        made = _split.query_parts(
            item, (count, 2, 16), tensor_pb2.DTYPE_F16, tensor_pb2.DTYPE_F32, budget, 100
        )
        sizes = [p.end - p.start for p in made]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= 100
        assert [p.start for p in made] == [0, *(p.end for p in made[:-1])]
        assert made[-1].end == count
        parts += made
    groups = list(_split.pack(parts, budget, 3))
    assert [p for group in groups for p in group] == parts
    for group in groups:
        assert len(group) <= 3
        assert sum(p.byte_count for p in group) <= budget
        assert len({p.item for p in group}) == len(group)


def test_what_cannot_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        list(_split.kv_pieces(1, 2, 101, 100))
    with pytest.raises(ValueError, match="does not fit"):
        _split.query_parts(0, (1, 9, 9), tensor_pb2.DTYPE_F32, tensor_pb2.DTYPE_F32, 100, 9)


def test_results_of_parts_are_joined_along_the_queries() -> None:
    """The parts are served one after the other, so times and rows that were moved add up."""
    parts = []
    for first, queries, microseconds, moved in ((0, 2, 30.0, 5), (2, 1, 11.5, 0), (3, 3, 7.0, 8)):
        part = attention_service_pb2.AttendResult()
        numbers = range(first, first + queries)
        part.out.dtype = part.lse.dtype = tensor_pb2.DTYPE_F32
        part.out.shape.extend((queries, 1, 2))
        part.lse.shape.extend((queries, 1))
        part.out.data = np.array([[n, -n] for n in numbers], "f4").tobytes()
        part.lse.data = np.array([10 * n for n in numbers], "f4").tobytes()
        part.certificate.visible_token_counts.extend(100 + n for n in numbers)
        part.statistics.touched_row_counts.extend(50 + n for n in numbers)
        part.statistics.device_time_us = microseconds
        part.statistics.moved_row_count = moved
        parts.append(part)
    joined = _split.merge_results(parts)
    assert joined.statistics.device_time_us == 48.5
    assert joined.statistics.moved_row_count == 13
    assert list(joined.statistics.touched_row_counts) == [50, 51, 52, 53, 54, 55]
    assert list(joined.certificate.visible_token_counts) == [100, 101, 102, 103, 104, 105]
    assert list(joined.out.shape) == [6, 1, 2]
    assert list(joined.lse.shape) == [6, 1]
    out = np.frombuffer(joined.out.data, "f4").reshape(6, 2)
    np.testing.assert_array_equal(out, [[n, -n] for n in range(6)])
    np.testing.assert_array_equal(np.frombuffer(joined.lse.data, "f4"), 10 * np.arange(6))
    assert _split.merge_results(parts[:1]) is parts[0]
