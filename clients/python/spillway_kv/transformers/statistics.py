"""Statistics of a cache about its attends in the daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from spillway_kv.attend_sums import LayerStatistics
from spillway_kv.results import AttendResult
from spillway_kv.sequence import Sequence


class AttendEvent(NamedTuple):
    """One attend, as passed to `on_attend`.

    Attributes:
        layer: The layer.
        row: The batch row.
        sequence: The row's sequence.
        query: The queries [T, H_q, d], in host memory.
        result: Output, certificate and counts, in host memory.
    """

    layer: int
    row: int
    sequence: Sequence
    query: torch.Tensor
    result: AttendResult


OnAttend = Callable[[AttendEvent], None]


class CacheStatistics:
    """Sums per layer since the cache was created, or since `reset`.

    Attributes:
        layers: One entry per layer.
    """

    def __init__(self, layer_count: int) -> None:
        self.layers = [LayerStatistics() for _ in range(layer_count)]

    def reset(self) -> None:
        """Starts again from zero."""
        self.layers = [LayerStatistics() for _ in self.layers]

    @property
    def rows_touched_fraction(self) -> float:
        """Share of the visible rows that were read, over all layers. 0 before the first attend."""
        visible = sum(layer.visible_row_count for layer in self.layers)
        return sum(layer.touched_row_count for layer in self.layers) / max(visible, 1)

    @property
    def certified_error_mean(self) -> float:
        """Mean of the finite certified errors. 0 before the first attend."""
        count = sum(layer.certified_error_count for layer in self.layers)
        return sum(layer.certified_error_sum for layer in self.layers) / max(count, 1)

    def add_sums(self, layer: int, sums: LayerStatistics) -> None:
        """Adds the statistics of other attends."""
        self.layers[layer].add_sums(sums)

    def add(self, layer: int, result: AttendResult) -> None:
        """Adds one result."""
        self.layers[layer].add(result)
