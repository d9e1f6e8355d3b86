"""Queries, keys and values of the real model on real prose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from spillway_kv.lab.training.traces import attention_seen


class Trace(NamedTuple):
    """Inputs of attention, per layer, after the positional encoding.

    Attributes:
        queries: [T, H_q, d] at the requested positions.
        keys: [H_kv, n, d].
        values: [H_kv, n, d].
        scaling: Factor on q.k.
    """

    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    scaling: float


def record(model: Any, tokens: torch.Tensor, positions: Sequence[int]) -> Trace:
    """Runs the model's own attention on tokens [n] and records its inputs."""
    queries: list[torch.Tensor] = []
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    scales: set[float] = set()

    def see(
        _layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> None:
        queries.append(query[0, :, list(positions)].transpose(0, 1).clone())
        keys.append(key[0])
        values.append(value[0])
        scales.add(scaling)

    with torch.inference_mode(), attention_seen(model, see):
        model(input_ids=tokens[None], use_cache=False, logits_to_keep=1)
    (scaling,) = scales
    return Trace(queries, keys, values, scaling)


def exact_attention(trace: Trace, layer: int, visible: Sequence[int]) -> torch.Tensor:
    """Attention in float64: output [T, H_q, d]. Query t sees the first visible[t] tokens."""
    q = trace.queries[layer].double()
    k, v = trace.keys[layer].double(), trace.values[layer].double()
    group = q.shape[1] // k.shape[0]
    out = torch.empty_like(q)
    for t, count in enumerate(visible):
        for head in range(q.shape[1]):
            logits = trace.scaling * (k[head // group, :count] @ q[t, head])
            out[t, head] = torch.softmax(logits, dim=0) @ v[head // group, :count]
    return out
