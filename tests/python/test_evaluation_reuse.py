"""What `spillway-lab eval reuse` counts, on cases small enough to count by hand."""

from __future__ import annotations

import numpy as np
import pytest
from spillway_kv.lab.evaluation.reuse import (
    correlation,
    hit_share,
    kept_share,
    summed,
)
from spillway_kv.lab.evaluation.sampling import resident_sample


def test_a_cache_drops_what_was_used_longest_ago() -> None:
    steps = [{1, 2}, {2, 3}, {1, 3}, {1, 2, 3}]
    # A cache of 2 rows: {1, 2}; 2 hits, then it holds {2, 3}; 3 hits, then {1, 3}; 1 and 3 hit.
    assert hit_share(steps, 2, 0) == 4 / 9
    # A cache of 3 rows: everything hits except the first two rows and the first 3.
    assert hit_share(steps, 3, 0) == 6 / 9
    assert hit_share(steps, 3, 2) == 1
    assert hit_share(steps, 2, 3) == 2 / 3
    # With more rows than the cache holds, the last ones stay.
    assert hit_share([{1, 2, 3}, {1, 2, 3}], 2, 1) == 2 / 3
    assert hit_share([set(), set()], 2, 0) == 0


def test_what_neighbours_share() -> None:
    assert kept_share([{1, 2}, {2, 3}, {3, 4, 5}]) == 2 / 5
    assert kept_share([{1}]) == 0
    assert kept_share([{1}, set()]) == 0


def test_correlation_of_errors() -> None:
    same = np.array([[[3.0, 4.0]], [[6.0, 8.0]], [[-3.0, -4.0]]])
    assert correlation(same) == pytest.approx((1 - 1) / 2)
    assert correlation(same[:2]) == pytest.approx(1)
    apart = np.array([[[1.0, 0.0]], [[0.0, 2.0]]])
    assert correlation(apart) == 0
    assert correlation(np.zeros((2, 1, 2))) == 0


def test_the_resident_sample_is_the_daemons() -> None:
    # Printed by MakeSampleKey and TokenHash of host/core/keyed_hash.h.
    expected = [105, 134, 289, 461, 481, 512, 586, 617, 1125, 1161]
    held = resident_sample(3, 1, 1200)
    assert held[:64].all()
    assert np.flatnonzero(held[64:]).tolist() == [t - 64 for t in expected]


def test_shares_are_of_rows() -> None:
    layer = {
        "heavy": 10.0,
        "sampled": 30.0,
        "moved": 35.0,
        "heavy_share": 0.2,
        "hit_shares": [0.5, 0.6, 0.7, 0.8],
        "neighbours_share": 0.4,
        "sample_kept_share": 0.2,
        "sample_kept_share_held": 0.9,
        "error_correlation": 0.1,
        "error_correlation_held": 0.7,
        "guessed_shares": None,
    }
    other = layer | {
        "heavy": 30.0,
        "moved": 45.0,
        "heavy_share": 0.6,
        "hit_shares": [0.9, 1.0, 1.0, 1.0],
        "guessed_shares": [0.3, 0.5],
    }
    told = summed([layer, other])
    assert told["heavy"] == 20
    assert told["moved"] == 40
    assert told["heavy_share_of_moved"] == pytest.approx((7 + 27) / 80)
    assert told["hit_shares"] == pytest.approx([0.8, 0.9, 0.925, 0.95])
    assert told["guessed_shares"] == [0.3, 0.5]
    alone = summed([layer | {"heavy": 0.0}])
    assert alone["guessed_shares"] == [None, None]
    assert alone["neighbours_share"] is None
