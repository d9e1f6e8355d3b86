"""Another process that copies to the GPU, so that rows have what is left of the link."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch


def copy_at_rate(rate: float, copied: Any, done: Any) -> None:
    """Copies from pinned memory to the GPU until `done` is set; adds the bytes to `copied`.

    rate: in bytes a second, at most the link's.
    """
    size = 2 << 20
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    marks = [torch.cuda.Event() for _ in range(4)]
    begin = time.perf_counter()
    for i in itertools.count():
        while time.perf_counter() - begin < i * size / rate:
            pass
        if done.is_set():
            return
        if i >= len(marks):
            marks[i % len(marks)].synchronize()
            copied.value += size
        target.copy_(source, non_blocking=True)
        marks[i % len(marks)].record()


class LinkLoad:
    """A process of its own that copies to the GPU, from begin() to end()."""

    def __init__(self, gb_per_s: float) -> None:
        spawned = multiprocessing.get_context("spawn")
        self.copied = spawned.Value("Q", 0)
        self.done = spawned.Event()
        self.process = spawned.Process(
            target=copy_at_rate, args=(1e9 * gb_per_s, self.copied, self.done)
        )
        self.rates: list[float] = []

    def begin(self) -> None:
        self.process.start()
        while self.copied.value == 0:
            if not self.process.is_alive():
                raise RuntimeError(f"the process of copies ended with {self.process.exitcode}")
            time.sleep(0.01)

    def end(self) -> None:
        self.done.set()
        self.process.join()

    def beside(self, steps: Callable[[], list[float]]) -> list[float]:
        """What `steps` returns; adds the rate of the copies meanwhile to `rates`, in GB/s."""
        begin, before = time.perf_counter(), self.copied.value
        result = steps()
        self.rates.append((self.copied.value - before) / (time.perf_counter() - begin) / 1e9)
        return result
