"""Dense attention in float64, written for clarity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def dense_attention(
    q: npt.NDArray[Any],
    k: npt.NDArray[Any],
    v: npt.NDArray[Any],
    visible: Sequence[int] | None = None,
    scale: float | None = None,
) -> tuple[F64, F64]:
    """Computes exact attention.

    Args:
        q: Queries [T, H_q, d].
        k: Keys [H_kv, n, d].
        v: Values [H_kv, n, d].
        visible: How many tokens each query sees; None is causal over the last T.
        scale: Factor on q.k; None is 1 / sqrt(d).

    Returns:
        Output [T, H_q, d] and natural log-sum-exp [T, H_q].
    """
    query_count, head_count, head_dim = q.shape
    n = k.shape[1]
    group = head_count // k.shape[0]
    if visible is None:
        visible = range(n - query_count + 1, n + 1)
    if scale is None:
        scale = head_dim**-0.5
    out = np.empty(q.shape, np.float64)
    lse = np.empty(q.shape[:2], np.float64)
    for t in range(query_count):
        for h in range(head_count):
            keys = k[h // group, : visible[t]].astype(np.float64)
            values = v[h // group, : visible[t]].astype(np.float64)
            logits = scale * keys @ q[t, h].astype(np.float64)
            top = logits.max()
            weights = np.exp(logits - top)
            out[t, h] = weights @ values / weights.sum()
            lse[t, h] = top + np.log(weights.sum())
    return out, lse
