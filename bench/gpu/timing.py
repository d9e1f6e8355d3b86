"""Times of work on the GPU, or on the CPU where there is none."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

# Cycles for which the GPU is kept busy, so that the host is ahead of it: about half a ms.
AHEAD_CYCLES = 1_000_000
# More than a GPU's cache holds.
COLD_BYTES = 256 << 20


@functools.cache
def _cold_memory(device: torch.device) -> torch.Tensor:
    return torch.empty(COLD_BYTES, dtype=torch.uint8, device=device)


def timed(
    run: Callable[[], object],
    device: torch.device | str = "cuda",
    *,
    ahead_cycles: int = 0,
    cold: bool = False,
) -> float:
    """Microseconds of the work that `run` enqueues on the GPU, or does on the CPU.

    Args:
        run: The work.
        device: Where it runs.
        ahead_cycles: For so long the GPU is kept busy before, so that launches are not a part of
            it, as in a whole model.
        cold: Empty the GPU's cache before, as a model's other weights do between two layers.
    """
    device = torch.device(device)
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if cold:
        _cold_memory(device).zero_()
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
