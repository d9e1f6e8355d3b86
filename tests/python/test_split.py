"""Messages of limited size cover everything exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spillway_kv import _split
from spillway_kv._proto import tensor_pb2


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
