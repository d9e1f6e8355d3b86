"""vLLM's own FlashAttention, where vLLM has it: for prompts, and beside Spillway's layers."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import torch
from vllm.platforms import current_platform

from spillway_kv import prefill_kernels
from spillway_kv.vllm.prompts import set_varlen

_logger = logging.getLogger("vllm.spillway")

NAME = "vllm_flash"
_BACKEND = "vllm.v1.attention.backends.flash_attn"
_MARK = "_spillway_noted"


def note_full_attention() -> None:
    """Tells vLLM's FlashAttention that the model has layers without a window, once in a process.

    It splits the work of its layers ahead of a step if they all have the same window. For draft
    models with a window vLLM turns that off, because the schedule is wrong. In a model with layers
    of full attention it is off too, but those that Spillway serves are not counted. That is a
    likely cause of wrong tokens of a random Gemma 3 on an H200.
    """
    module = importlib.import_module(_BACKEND)
    windows = getattr(module, "_get_sliding_window_configs", None)
    if windows is None:
        _logger.warning("layers with a window may be wrong: %s has changed", _BACKEND)
        return
    if getattr(windows, _MARK, False):
        return

    @functools.wraps(windows)
    def with_full_attention(*args: Any, **kwargs: Any) -> Any:
        found = windows(*args, **kwargs)
        return {*found, (-1, -1)} if found else found

    setattr(with_full_attention, _MARK, True)
    module._get_sliding_window_configs = with_full_attention  # type: ignore[attr-defined]


def use_for(dtype: torch.dtype, head_dim: int, group: int, device: torch.device) -> bool:
    """Makes prompts use it, on a GPU of Nvidia, if a trial shows that it serves such tensors.

    Args:
        dtype: Dtype of q, k and v.
        head_dim: Elements of a key.
        group: Number of query heads per KV head.
        device: Device of the tensors.

    Returns:
        Whether it serves them.
    """
    if current_platform.is_cuda():
        prefill_kernels.add_kernel("cuda", NAME, _attend)
    tried = prefill_kernels.trials(device, dtype, head_dim, group)
    serves = any(trial.kernel == NAME and not trial.refusal for trial in tried)
    set_varlen(functools.partial(_flash, causal=True) if serves else None)
    return serves


@functools.cache
def _version(head_dim: int) -> int | None:
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version  # noqa: PLC0415

    return get_flash_attn_version(head_size=head_dim)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends to k and v [H_kv, L, d] with q [T, H_q, d], see `prefill_kernels.Kernel`."""
    count, length = q.shape[0], k.shape[1]
    # Made on the GPU, without a wait for a copy.
    ends = torch.arange(0, 2 * count, count, dtype=torch.int32, device=q.device)
    key_ends = torch.arange(0, 2 * length, length, dtype=torch.int32, device=q.device)
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    return _flash(q, keys, values, ends, key_ends, count, length, scale, causal=causal)


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends: torch.Tensor,
    key_ends: torch.Tensor,
    longest: int,
    longest_keys: int,
    scale: float,
    out: torch.Tensor | None = None,
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    # As `prompts.Varlen`, or without a causal mask.
    try:
        from vllm.v1.attention.backends.fa_utils import (  # noqa: PLC0415
            flash_attn_varlen_func,
        )
    except ImportError as error:
        raise RuntimeError(f"vLLM has no FlashAttention: {error}") from None
    version = _version(q.shape[2])
    if version is None:
        raise RuntimeError("vLLM has no FlashAttention for this GPU")
    made, lse = flash_attn_varlen_func(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=ends,
        cu_seqlens_k=key_ends,
        max_seqlen_q=longest,
        max_seqlen_k=longest_keys,
        softmax_scale=scale,
        causal=causal,
        return_softmax_lse=True,
        out=out,
        fa_version=version,
    )
    return made, lse.transpose(0, 1)
