"""Statistics of attends: rows read, rows that could have been read, certificates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from spillway_kv._library import Sums
from spillway_kv._proto import attention_service_pb2
from spillway_kv.results import AttendResult


@dataclass
class LayerStatistics:
    """Sums over the attends of one layer.

    Attributes:
        attend_count: Attends, one per query token and batch row.
        touched_row_count: Rows read, over groups of query heads.
        visible_row_count: Rows that could have been read, over KV heads.
        exact_count: `exact` certificates, one per attend and query head.
        statistical_count: `statistical` certificates.
        none_count: `none` certificates.
        certified_error_sum: Sum of the finite certified errors.
        certified_error_count: Number of finite certified errors.
        device_time_us: Device time, microseconds. Attends by a decoder are not timed and add
            nothing.
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

    def add_sums(self, sums: Sums | LayerStatistics) -> None:
        """Adds the sums of a step or a decoder, or other statistics."""
        for name, _ in Sums._fields_:
            setattr(self, name, getattr(self, name) + getattr(sums, name))

    @classmethod
    def of(cls, results: Iterable[AttendResult]) -> LayerStatistics:
        """Returns the statistics of some results."""
        made = cls()
        for result in results:
            made.add(result)
        return made

    def add(self, result: AttendResult) -> None:
        """Adds one result."""
        message = result.message
        certificate = message.certificate
        touched = message.statistics.touched_row_counts
        query_count, head_count = message.out.shape[:2]
        self.attend_count += query_count
        self.touched_row_count += sum(touched)
        # Every query head has a count of visible tokens; rows are counted once per group.
        group_count = len(touched) // query_count
        self.visible_row_count += sum(certificate.visible_token_counts) * group_count // head_count
        promises = list(certificate.promises)
        self.exact_count += promises.count(attention_service_pb2.PROMISE_EXACT)
        self.statistical_count += promises.count(attention_service_pb2.PROMISE_STATISTICAL)
        self.none_count += promises.count(attention_service_pb2.PROMISE_NONE)
        errors = [error for error in certificate.relative_errors if math.isfinite(error)]
        self.certified_error_sum += sum(errors)
        self.certified_error_count += len(errors)
        self.device_time_us += message.statistics.device_time_us
