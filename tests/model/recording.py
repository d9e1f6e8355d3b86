"""Queries, keys and values of the real model on real prose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


class Trace(NamedTuple):
    """What attention saw, per layer, after the positional encoding.

    Attributes:
        queries: [T, H_q, d] at the positions asked for.
        keys: [H_kv, n, d].
        values: The same shape.
        scaling: Factor on q.k.
    """

    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    scaling: float


def record(model: Any, tokens: torch.Tensor, positions: Sequence[int]) -> Trace:
    """Reads tokens [n] with the model's own attention and records it."""
    queries: list[torch.Tensor] = []
    scales: set[float] = set()

    def attend(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        queries.append(query[0, :, list(positions)].transpose(0, 1).clone())
        scales.add(kwargs["scaling"])
        return sdpa_attention_forward(module, query, *args, **kwargs)

    AttentionInterface.register("recording", attend)
    AttentionMaskInterface.register("recording", sdpa_mask)
    model.set_attn_implementation("recording")
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=tokens[None], past_key_values=cache, logits_to_keep=1)
    (scaling,) = scales
    keys = [layer.keys[0] for layer in cache.layers]
    values = [layer.values[0] for layer in cache.layers]
    return Trace(queries, keys, values, scaling)


def exact_attention(trace: Trace, layer: int, visible: Sequence[int]) -> torch.Tensor:
    """Attention in float64: output [T, H_q, d], query t over the first visible[t] tokens."""
    q = trace.queries[layer].double()
    k, v = trace.keys[layer].double(), trace.values[layer].double()
    group = q.shape[1] // k.shape[0]
    out = torch.empty_like(q)
    for t, count in enumerate(visible):
        for head in range(q.shape[1]):
            logits = trace.scaling * (k[head // group, :count] @ q[t, head])
            out[t, head] = torch.softmax(logits, dim=0) @ v[head // group, :count]
    return out
