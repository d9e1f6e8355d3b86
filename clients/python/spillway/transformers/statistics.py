"""What a cache counts of the attends that the daemon served for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from spillway._native import Sums
from spillway._proto import attention_service_pb2
from spillway.results import AttendResult
from spillway.sequence import Sequence


class AttendEvent(NamedTuple):
    """One attend, as told to `on_attend`.

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


@dataclass
class LayerStatistics:
    """Sums over one layer's attends.

    Attributes:
        attend_count: Attends, one per query token and batch row.
        touched_row_count: Rows read, over KV heads.
        visible_row_count: Rows that could have been read, over KV heads.
        exact_count: Certificates per promise, one per attend and query head.
        statistical_count: The same.
        none_count: The same.
        certified_error_sum: Sum of the finite certified errors.
        certified_error_count: How many there were.
        device_time_us: Device time, microseconds; of attends by a decoder, which are not
            timed, nothing.
    """

    attend_count: int = 0
    touched_row_count: int = 0
    visible_row_count: int = 0
    exact_count: int = 0
    statistical_count: int = 0
    none_count: int = 0
    certified_error_sum: float = 0.0
    certified_error_count: int = 0
    device_time_us: float = 0.0


class CacheStatistics:
    """Sums per layer since the cache was made, or since `reset`.

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
        """Rows read over rows visible, of all layers; 0 before the first attend."""
        visible = sum(layer.visible_row_count for layer in self.layers)
        return sum(layer.touched_row_count for layer in self.layers) / max(visible, 1)

    @property
    def certified_error_mean(self) -> float:
        """Mean of the finite certified errors; 0 before the first attend."""
        count = sum(layer.certified_error_count for layer in self.layers)
        return sum(layer.certified_error_sum for layer in self.layers) / max(count, 1)

    def add_sums(self, layer: int, sums: Sums) -> None:
        """Counts what a decoder has served; its attends are not timed."""
        ours = self.layers[layer]
        for name, _ in Sums._fields_:
            setattr(ours, name, getattr(ours, name) + getattr(sums, name))

    def add(self, layer: int, result: AttendResult) -> None:
        """Counts one result."""
        message = result.message
        certificate = message.certificate
        touched = message.statistics.touched_row_counts
        sums = self.layers[layer]
        query_count, head_count = message.out.shape[:2]
        sums.attend_count += query_count
        sums.touched_row_count += sum(touched)
        # A query head's n counts once per KV head.
        kv_head_count = len(touched) // query_count
        sums.visible_row_count += (
            sum(certificate.visible_token_counts) * kv_head_count // head_count
        )
        promises = list(certificate.promises)
        sums.exact_count += promises.count(attention_service_pb2.PROMISE_EXACT)
        sums.statistical_count += promises.count(attention_service_pb2.PROMISE_STATISTICAL)
        sums.none_count += promises.count(attention_service_pb2.PROMISE_NONE)
        errors = [error for error in certificate.relative_errors if math.isfinite(error)]
        sums.certified_error_sum += sum(errors)
        sums.certified_error_count += len(errors)
        sums.device_time_us += message.statistics.device_time_us
