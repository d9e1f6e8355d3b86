"""Times of work on the GPU, or on the CPU where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

# Cycles for which the GPU is kept busy, so that the host is ahead of it: about half a ms.
AHEAD_CYCLES = 1_000_000


def timed(
    run: Callable[[], object], device: torch.device | str = "cuda", *, ahead_cycles: int = 0
) -> float:
    """Microseconds of the work that `run` enqueues on the GPU, or does on the CPU.

    ahead_cycles: for so long the GPU is kept busy before, so that launches are not a part of it,
    as in a whole model.
    """
    if torch.device(device).type == "cpu":
        start = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if ahead_cycles:
        torch.cuda._sleep(ahead_cycles)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return 1000 * begin.elapsed_time(end)


def copy_bytes_per_s(device: torch.device | str, byte_count: int = 4 << 30) -> float:
    """Bytes that are read and written in a second of a copy within the device's memory."""
    source = torch.zeros(byte_count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    us = min(timed(lambda: target.copy_(source), device) for _ in range(5))
    return 2e6 * byte_count / us
