"""Causal attention over K/V that this process holds, for prompts."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attends causally.

    Args:
        q: Queries [B, H_q, T, d].
        k: Keys of the same tokens [B, H_kv, T, d].
        v: Values, with the same shape.
        scaling: Factor on q.k.

    Returns:
        Output [B, T, H_q, d].
    """
    out = scaled_dot_product_attention(
        q, k, v, is_causal=q.shape[2] > 1, scale=scaling, enable_gqa=q.shape[1] > k.shape[1]
    )
    return out.transpose(1, 2).contiguous()
