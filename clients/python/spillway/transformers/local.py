"""Causal attention over K/V that this process holds, for prompts."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

# Queries per call where a mask is needed, which bounds the mask.
_BLOCK = 512


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attends causally over the last tokens.

    Args:
        q: Queries [B, H_q, T, d] of the last T of L tokens.
        k: Keys [B, H_kv, L, d].
        v: Values, the same shape.
        scaling: Factor on q.k.

    Returns:
        Output [B, T, H_q, d].
    """
    query_count, key_count = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    if query_count == key_count:
        out = scaled_dot_product_attention(
            q, k, v, is_causal=query_count > 1, scale=scaling, enable_gqa=group > 1
        )
        return out.transpose(1, 2).contiguous()
    # With a mask the fast kernels want a K/V head per query head.
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    out = torch.empty(
        q.shape[0], query_count, q.shape[1], q.shape[3], dtype=q.dtype, device=q.device
    )
    for start in range(0, query_count, _BLOCK):
        stop = min(start + _BLOCK, query_count)
        seen = key_count - query_count + stop
        mask = torch.ones(stop - start, seen, dtype=torch.bool, device=q.device).tril(
            seen - (stop - start)
        )
        block = scaled_dot_product_attention(
            q[:, :, start:stop], k[:, :, :seen], v[:, :, :seen], attn_mask=mask, scale=scaling
        )
        out[:, start:stop] = block.transpose(1, 2)
    return out
