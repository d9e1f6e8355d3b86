"""Requests that arrive at random, wait for memory, and decode together: the clock and the queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass
class Request:
    """A request whose prompt is computed already.

    Attributes:
        at_s: When it arrives, seconds.
        tokens: How many tokens it decodes.
        slot: The memory that it has, from its first step on.
        times_s: When each of its tokens came.
    """

    at_s: float
    tokens: int
    slot: int = -1
    times_s: list[float] = field(default_factory=list)

    @property
    def made(self) -> int:
        """Tokens that it has decoded."""
        return len(self.times_s)


def poisson(rate: float, count: int, tokens: tuple[int, int], seed: int) -> list[Request]:
    """Requests of a Poisson process. The same seed gives the same pattern at every rate.

    rate: requests a second. tokens: least and most that a request decodes, uniform.
    """
    if not rate > 0:
        raise ValueError(f"rate {rate} is not above 0")
    draw = np.random.default_rng(seed)
    at = draw.exponential(1.0, count).cumsum() / rate
    lengths = draw.integers(tokens[0], tokens[1], count, endpoint=True)
    return [Request(float(a), int(n)) for a, n in zip(at, lengths, strict=True)]


def serve(
    requests: Sequence[Request],
    slots: int,
    step: Callable[[list[Request]], float],
    give_back: Callable[[list[Request]], None],
) -> list[int]:
    """Serves all requests, in the order of arrival. A request waits while no slot is free.

    Between steps, those that have arrived join and those that are done leave, as in continuous
    batching. The clock advances by what each step takes.

    Args:
        requests: In the order of arrival.
        slots: How many decode at once.
        step: Decodes a token of each request; returns seconds.
        give_back: Takes back the slots of requests that are done.

    Returns:
        How many requests each step had.
    """
    if slots < 1:
        raise ValueError(f"{slots} slots, at least 1")
    waiting = deque(requests)
    free = list(range(slots))[::-1]
    active: list[Request] = []
    counts: list[int] = []
    now = 0.0
    while waiting or active:
        if not active:
            now = max(now, waiting[0].at_s)
        while waiting and free and waiting[0].at_s <= now:
            joined = waiting.popleft()
            joined.slot = free.pop()
            active.append(joined)
        now += step(active)
        counts.append(len(active))
        for request in active:
            request.times_s.append(now)
        done = [request for request in active if request.made == request.tokens]
        if done:
            give_back(done)
            free += [request.slot for request in done]
            active = [request for request in active if request.made < request.tokens]
    return counts


def full_step_s(
    slots: int,
    tokens: tuple[int, int],
    step: Callable[[list[Request]], float],
    give_back: Callable[[list[Request]], None],
) -> float:
    """Mean seconds of a step with all slots taken, while requests that are done make room for more.

    Serves three times as many requests as there are slots, which all arrive at once.
    """
    full: list[float] = []

    def noted(active: list[Request]) -> float:
        seconds = step(active)
        if len(active) == slots:
            full.append(seconds)
        return seconds

    requests = [Request(0.0, each.tokens) for each in poisson(1.0, 3 * slots, tokens, seed=0)]
    serve(requests, slots, noted, give_back)
    return sum(full) / len(full)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Percentiles by name."""
    return {f"p{p}": round(float(np.percentile(values, p)), 4) for p in PERCENTILES}


def summary(requests: Sequence[Request], leave_out: int) -> dict[str, Any]:
    """What requests have seen, without the first ones, which found the GPU idle.

    `token_ms`: time from one token of a request to its next one. `wait_s`: from its arrival to its
    first token.
    """
    counted = requests[leave_out:]
    gaps = [
        1000 * (b - a)
        for request in counted
        for a, b in zip(request.times_s, request.times_s[1:], strict=False)
    ]
    return {
        "token_ms": percentiles(gaps),
        "wait_s": percentiles([request.times_s[0] - request.at_s for request in counted]),
        "requests": len(counted),
        "seconds": round(max(request.times_s[-1] for request in requests), 2),
    }
