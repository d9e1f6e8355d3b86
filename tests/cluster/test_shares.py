"""Tests of how layers and KV heads are distributed."""

from __future__ import annotations

import pytest
from spillway_kv.cluster import Share, deal
from spillway_kv.cluster.shares import even_ranges


@pytest.mark.parametrize(
    ("count", "parts", "expected"),
    [
        (8, 2, [range(4), range(4, 8)]),
        (3, 2, [range(2), range(2, 3)]),
        (8, 3, [range(3), range(3, 6), range(6, 8)]),
        (1, 1, [range(1)]),
    ],
)
def test_ranges_are_as_even_as_they_go(count: int, parts: int, expected: list[range]) -> None:
    assert even_ranges(count, parts) == expected


def test_heads_are_dealt_within_each_group_of_layers() -> None:
    assert deal(5, 3, 4, layer_groups=2) == [
        Share(range(3), range(2)),
        Share(range(3), range(2, 3)),
        Share(range(3, 5), range(2)),
        Share(range(3, 5), range(2, 3)),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 2, 3, 1), "3 daemons cannot share 2 KV heads: each needs at least one"),
        ((4, 2, 3, 2), "3 daemons cannot be split evenly over 2 groups of layers"),
        ((4, 2, 0, 1), "0 daemons cannot be split evenly over 1 groups of layers"),
        ((2, 4, 3, 3), r"layer_groups 3 is not in \[1, 2\], the layers"),
    ],
)
def test_what_cannot_be_dealt_is_refused(
    arguments: tuple[int, int, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        deal(*arguments)
