"""The figures of bench/long_generation.py, from texts that are written out here."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from daemon_process import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import long_generation  # noqa: E402


def test_a_run_is_repeated_only_if_all_of_it_stands_earlier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_generation, "RUN", 3)
    assert long_generation.repeated([1, 2, 3, 1, 2, 4, 1, 2, 3, 1]) == [False] * 8 + [True] * 2
    assert long_generation.repeated([7, 7, 7, 7, 7]) == [False, False, False, True, True]
    assert long_generation.repeated([7, 7]) == [False, False]
    assert long_generation.repeated([]) == []


@pytest.mark.parametrize(
    ("a", "b", "tokens"),
    [([1, 2, 3], [1, 2, 4], 2), ([5], [6], 0), ([1, 2], [1, 2, 3], 2), ([], [1], 0)],
)
def test_tokens_before_the_first_difference(a: list[int], b: list[int], tokens: int) -> None:
    assert long_generation.divergence(a, b) == tokens
    assert long_generation.divergence(b, a) == tokens


def test_a_block_that_is_not_whole_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_generation, "BLOCK", 2)
    assert long_generation.blocks([1, 2, 3, 5, 9]) == [1.5, 4.0]
    assert long_generation.blocks([1]) == []


def test_ways_are_compared_over_what_all_have_written() -> None:
    def record(way: str, nll: list[list[float]], own: list[list[float]], share: float) -> Any:
        return {
            "way": way,
            "rows_touched_fraction": share,
            "nll": nll,
            "own_nll": own,
            "repeated": [[0.25] * len(row) for row in nll],
        }

    # The third block of dense attention has no counterpart.
    dense = record("dense", [[1.0, 2.0, 50.0], [3.0, 4.0, 50.0]], [[1.0, 2.0, 0], [3.0, 4.0, 0]], 1)
    fast = record("fast", [[1.5, 2.5], [3.5, 5.5]], [[1.25, 2.0], [3.25, 5.0]], 0.125)
    texts = {
        "dense": np.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 9]], np.int32),
        "fast": np.array([[1, 2, 3, 4, 6], [7, 7, 8, 9, 9]], np.int32),
    }
    *_, first, second = long_generation.summary([dense, fast], texts).splitlines()
    assert first == "| dense | 100.0% | 2 x 2,048 | 2.500 |  | 0.0000, 0.0000 | 25.0% |  |"
    # By prompt 2.0 and 4.5 for 1.5 and 3.5: 0.5 and 1 more. First differences at 4 and 0.
    assert second == (
        "| fast | 12.5% | 2 x 2,048 | 3.250 | +0.750 (0.250) | 0.2500, 0.5000 | 25.0% | 1, 2, 3 |"
    )
