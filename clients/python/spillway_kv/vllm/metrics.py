"""Statistics of Spillway's attends in vLLM's log and at /metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from spillway_kv.vllm.worker import Worker

# Names and descriptions of the counters.
SUMS = {
    "attends": "Attends of decode steps, of one token at one layer",
    "rows_read": "K/V rows that decode steps read, over KV heads",
    "rows_visible": "K/V rows that decode steps could have read, over KV heads",
    "outputs_exact": "Outputs of a query head that are exact",
    "outputs_statistical": "Outputs of a query head whose error is bounded with a probability",
    "outputs_none": "Outputs of a query head of which nothing is promised",
    # A whole number: vLLM's LLM.get_metrics() cuts fractions of counters.
    "certified_error_millionths": "Sum of relative errors that certificates give, in millionths",
    "certified_errors": "Number of relative errors that certificates give",
    "prompt_tokens": "Prompt tokens that were attended exactly",
    "reused_tokens": "Prompt tokens whose K/V came from another sequence",
}


@dataclass
class SpillwayStats(KVConnectorStats):
    """Sums since they were last taken, over all ranks."""

    @staticmethod
    def taken_from(worker: Worker) -> SpillwayStats | None:
        """Takes a worker's sums and resets them. None if nothing was counted."""
        sums, prompt_tokens = worker.take_statistics()
        if not sums.attend_count and not prompt_tokens:
            return None
        return SpillwayStats(
            data={
                "attends": sums.attend_count,
                "rows_read": sums.touched_row_count,
                "rows_visible": sums.visible_row_count,
                "outputs_exact": sums.exact_count,
                "outputs_statistical": sums.statistical_count,
                "outputs_none": sums.none_count,
                "certified_error_millionths": round(1e6 * sums.certified_error_sum),
                "certified_errors": sums.certified_error_count,
                "prompt_tokens": prompt_tokens,
            }
        )

    @staticmethod
    def of_reuse(token_count: int) -> SpillwayStats:
        """Returns the scheduler's sums: tokens whose K/V were not computed."""
        return SpillwayStats(data={"reused_tokens": token_count})

    def reset(self) -> None:
        """Sets all sums to zero."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds the sums of another object."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the values for vLLM's log line."""
        data = {name: self.data.get(name, 0) for name in SUMS}
        return {
            "decode attends": data["attends"],
            "K/V rows read": data["rows_read"],
            "of those visible": f"{data['rows_read'] / max(data['rows_visible'], 1):.2%}",
            "mean certified error": round(
                data["certified_error_millionths"] / max(data["certified_errors"], 1) / 1e6, 5
            ),
            "outputs without a promise": data["outputs_none"],
            "prompt tokens": data["prompt_tokens"],
            "prompt tokens reused": data["reused_tokens"],
        }

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class SpillwayMetrics(KVConnectorPromMetrics):
    """The counters `vllm:spillway_*` of each engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:spillway_{name}", documentation=text, labelnames=labelnames
            )
            for name, text in SUMS.items()
        }
        # Creates all counters at the start, with value zero.
        for counter in self._counters.values():
            for labels in per_engine_labelvalues.values():
                counter.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds sums to an engine's counters."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            self._counters[name].labels(*labels).inc(value)
