"""Summaries of the outcome of one way of attending."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from spillway_kv.lab.evaluation import intervals
from spillway_kv.lab.evaluation.attends import Outcome


def by_position(values: npt.NDArray[Any], positions: npt.NDArray[np.int64]) -> intervals.Doubles:
    """Means over layers, heads and draws, for each query position.

    Args:
        values: [L, Q] or [L, Q, heads].
        positions: Query position of each of the Q draws, [Q].
    """
    axes = (0,) if values.ndim == 2 else (0, 2)
    means = values.mean(axis=axes, dtype=np.float64)
    return np.array([means[positions == position].mean() for position in np.unique(positions)])


def positions_of(outcome: Outcome) -> npt.NDArray[np.int64]:
    """Returns positions that treat each query as its own, [Q]."""
    return np.arange(len(outcome.visible))


def errors(outcome: Outcome, seed: int) -> dict[str, Any]:
    """Errors and rows: overall, by layer, and the worst (layer, head)."""
    mean = by_position(outcome.errors, positions_of(outcome))
    by_head = outcome.errors.mean(axis=1, dtype=np.float64)
    layer, head = np.unravel_index(by_head.argmax(), by_head.shape)
    return {
        "error": {
            "mean": mean.mean(),
            "interval": intervals.of_mean(mean, seed),
            "median": np.median(outcome.errors),
            "p95": np.quantile(outcome.errors, 0.95),
            "layer_output_mean": outcome.layer_errors.mean(),
            "worst": {"layer": layer, "head": head, "mean": by_head[layer, head]},
            "by_layer": outcome.errors.mean(axis=(1, 2)).tolist(),
        },
        "rows": rows(outcome),
    }


def rows(outcome: Outcome) -> dict[str, Any]:
    """Rows read by a KV head."""
    share = outcome.rows / outcome.visible[:, None]
    return {
        "mean": outcome.rows.mean(),
        "share": share.mean(),
        "share_by_layer": share.mean(axis=(1, 2)).tolist(),
    }


def violations(
    outcome: Outcome, epsilon: float, positions: npt.NDArray[np.int64]
) -> dict[str, Any]:
    """The share of errors above epsilon, overall and of the worst (layer, head)."""
    beyond = outcome.errors > epsilon
    by_head = beyond.mean(axis=1)
    layer, head = np.unravel_index(by_head.argmax(), by_head.shape)
    count = len(np.unique(positions))
    worst = float(by_head[layer, head])
    return {
        "share": beyond.mean(),
        "interval": intervals.of_share(beyond, positions),
        "draw_count": beyond.size,
        "worst": {
            "layer": layer,
            "head": head,
            "share": worst,
            # Several draws of a position count as one.
            "interval": intervals.wilson(worst, count),
        },
        "by_layer": beyond.mean(axis=(1, 2)).tolist(),
    }
