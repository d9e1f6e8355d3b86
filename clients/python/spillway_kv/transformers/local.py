"""Causal attention over K/V that this process holds, for prompts."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from spillway_kv.prefill_kernels import attention_with_lse, with_sinks


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends causally.

    Args:
        q: Queries [B, H_q, T, d].
        k: Keys of the same tokens [B, H_kv, T, d].
        v: Values, with the same shape.
        scaling: Factor on q.k.
        sinks: Learned sink logits [H_q], float32. None: there are none.

    Returns:
        Output [B, T, H_q, d].
    """
    if sinks is not None:
        rows = [
            attention_with_lse(row.transpose(0, 1), keys, values, causal=True, scale=scaling)
            for row, keys, values in zip(q, k, v, strict=True)
        ]
        return torch.stack([with_sinks(*row, sinks, q.dtype) for row in rows])
    out = scaled_dot_product_attention(
        q, k, v, is_causal=q.shape[2] > 1, scale=scaling, enable_gqa=q.shape[1] > k.shape[1]
    )
    return out.transpose(1, 2).contiguous()
