"""The benchmark of requests that arrive at random, as far as it runs without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from daemon_process import ROOT

sys.path.append(str(ROOT / "bench/gpu"))

import arrivals
import arrivals_queue
from arrivals_queue import Request
from test_bench_capacity import TOKENS, data, run

__all__ = ["data"]


class Clock:
    """Steps of 1 s, and 0.5 s more for each request but the first."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.given_back: list[int] = []

    def step(self, active: list[Request]) -> float:
        self.seen.append([request.slot for request in active])
        return 1 + 0.5 * (len(active) - 1)

    def give_back(self, done: list[Request]) -> None:
        self.given_back += [request.slot for request in done]


def test_requests_join_leave_and_wait() -> None:
    """Two slots: the third request waits until the others have left."""
    clock = Clock()
    requests = [Request(2.0, 3), Request(2.5, 2), Request(2.6, 1), Request(20.0, 1)]
    counts = arrivals_queue.serve(requests, 2, clock.step, clock.give_back)
    assert clock.seen == [[0], [0, 1], [0, 1], [1], [1]]
    assert [request.times_s for request in requests] == [
        [3.0, 4.5, 6.0],
        [4.5, 6.0],
        [7.0],
        [21.0],
    ]
    assert clock.given_back == [0, 1, 1, 1]
    assert counts == [1, 2, 2, 1, 1]


def test_no_request_is_passed_by_another() -> None:
    clock = Clock()
    requests = [Request(0.0, 5), Request(0.1, 2), Request(0.2, 2), Request(0.3, 1)]
    arrivals_queue.serve(requests, 1, clock.step, clock.give_back)
    assert [request.times_s[0] for request in requests] == [1.0, 6.0, 8.0, 10.0]


def test_what_requests_have_seen() -> None:
    first = Request(0.0, 2, 0, [1.0, 9.0])
    second = Request(1.0, 3, 1, [3.0, 4.0, 6.0])
    third = Request(2.0, 1, 1, [8.0])
    assert arrivals_queue.summary([first, second, third], 1) == {
        "token_ms": {"p50": 1500.0, "p90": 1900.0, "p99": 1990.0},
        "wait_s": {"p50": 4.0, "p90": 5.6, "p99": 5.96},
        "requests": 2,
        "seconds": 9.0,
    }


def test_arrivals_have_the_rate_and_the_same_pattern() -> None:
    slow, fast = (arrivals_queue.poisson(rate, 4000, (64, 256), seed=3) for rate in (2.0, 8.0))
    # The time of 4,000 arrivals has a standard deviation of 2,000 s / 63.
    assert slow[-1].at_s == pytest.approx(2000, abs=130)
    assert [request.at_s / 4 for request in slow] == pytest.approx([r.at_s for r in fast])
    assert [request.tokens for request in slow] == [request.tokens for request in fast]
    assert min(request.tokens for request in slow) == 64
    assert max(request.tokens for request in slow) == 256
    gaps = np.diff([request.at_s for request in slow])
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.1)
    with pytest.raises(ValueError, match="rate 0.0 is not above 0"):
        arrivals_queue.poisson(0.0, 1, (1, 2), seed=0)


def test_the_capacity_is_that_of_full_steps() -> None:
    """Steps of three requests take 2 s; those with fewer at the end do not count."""
    clock = Clock()
    assert arrivals_queue.full_step_s(3, (2, 6), clock.step, clock.give_back) == 2.0
    assert any(len(slots) < 3 for slots in clock.seen)
    with pytest.raises(ValueError, match="0 slots, at least 1"):
        arrivals_queue.serve([], 0, clock.step, clock.give_back)


def test_a_table_of_step_times_serves() -> None:
    way = arrivals.Way("dense bf16", 2, [1.0, 1.5], (10, 10))
    # 2 requests of 10 tokens in 15 s.
    assert way.capacity == pytest.approx(2 / 15)
    fields = way.run([Request(0.0, 2), Request(0.0, 2), Request(0.0, 1)])
    assert fields["steps"] == 3
    assert fields["sequences_mean"] == 1.7
    assert fields["wait_s"] == {"p50": 1.5, "p90": 3.5, "p99": 3.95}


def test_requests_on_the_cpu_device(data: Path) -> None:
    flags = ("--tokens", str(TOKENS), "--new-tokens", "2", "4", "--requests", "6", "--slots", "2")
    more = ("--dense-slots", "1", "--memory-gib", "1", "--shares", "0.5", "2")
    records = run("arrivals.py", data, *flags, *more)
    assert [record["way"] for record in records] == [
        name for name in ("dense bf16", "dense fp8", "spillway bf16") for _ in range(2)
    ]
    fast, slow = records[4:]
    assert [fast["share"], slow["share"]] == [2.0, 0.5]
    assert fast["requests_per_s"] == pytest.approx(4 * slow["requests_per_s"], rel=0.01)
    assert fast["requests"] == 5
    assert fast["decoders_opened"] >= 3
    assert 0 < fast["error_median"] <= fast["error_max"] < 0.5
    assert fast["sequences_mean"] >= slow["sequences_mean"] >= 1
    assert fast["wait_s"]["p50"] >= fast["token_ms"]["p50"] / 2000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--new-tokens", "8", "4"], "--new-tokens 8 4: not 1 < 8 <= 4 < --tokens"),
        (["--slots", "0"], "--slots 0 is less than 1"),
        (["--shares", "-1"], "--shares: -1.0 is not above 0"),
        (["--of", "spillway int8"], "--of: 'spillway int8' is not one of"),
    ],
)
def test_wrong_arguments(flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        arrivals.parsed(["folder", *flags])
