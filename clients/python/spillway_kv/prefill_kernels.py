"""Attention with its log-sum-exp by torch's kernels, and merging of parts.

Trials find the kernels that serve a dtype and shape: each kernel of a device runs once on a few
random tokens, and is used if its result is close to plain arithmetic. Log-sum-exps are natural
logarithms, of logits after the scale.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention
from torch.nn.functional import scaled_dot_product_attention

_ATEN = torch.ops.aten
# q [T, H_q, d], k and v [H_kv, L, d], causal, scale -> out [T, H_q, d], lse [T, H_q].
Kernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]
]

# cuDNN makes a plan for every pair of lengths, which takes longer than a small attend. So it is
# only used for multiples of these numbers of queries and keys, which occur again and again.
_CUDNN_QUERIES = 512
_CUDNN_KEYS = 2048
# Number of queries of a trial. Without a causal mask it has twice as many keys.
_TRIED_TOKENS = 256
# Bytes of the float32 logits that plain arithmetic computes at once.
_PLAIN_BYTES = 64 << 20
# Number of queries that share a mask in `window_attention`.
_WINDOW_TILE = 512
# The same with learned sinks, in plain arithmetic.
_SINK_TILE = 128


def _grouped(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Returns queries as [H_kv, group, T, d], a view."""
    return q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def _ungrouped(
    out: torch.Tensor, lse: torch.Tensor, token_count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts [H_kv, group, T, d] and [H_kv, group, T or more] to [T, H_q, d] and [T, H_q]."""
    heads = out.shape[0] * out.shape[1]
    lse = lse[..., :token_count].reshape(heads, token_count)
    return out.permute(2, 0, 1, 3).flatten(1, 2), lse.transpose(0, 1)


def _shared(x: torch.Tensor, group: int) -> torch.Tensor:
    """Returns keys or values as [H_kv, group, L, d], without copies."""
    return x[:, None].expand(-1, group, -1, -1)


def _flash_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[0]
    out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        _grouped(q, k.shape[0]), _shared(k, group), _shared(v, group), 0.0, causal, scale=scale
    )
    return _ungrouped(out, lse, q.shape[0])


def _batched(
    out: torch.Tensor, lse: torch.Tensor, token_count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts [1, H_q, T, d] and [1, H_q, T or more, maybe 1] to [T, H_q, d] and [T, H_q]."""
    lse = lse.reshape(out.shape[1], -1)[:, :token_count]
    return out[0].transpose(0, 1), lse.transpose(0, 1)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention 2 of torch, which supports grouped query heads."""
    out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(
        q.transpose(0, 1)[None], k[None], v[None], 0.0, causal, scale=scale
    )
    return _batched(out, lse, q.shape[0])


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = _ATEN._scaled_dot_product_cudnn_attention(
        q.transpose(0, 1)[None], k[None], v[None], None, True, 0.0, causal, scale=scale
    )
    return _batched(out, lse, q.shape[0])


def _efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The memory-efficient kernel, which supports float32. Its log-sum-exps are padded."""
    group = q.shape[1] // k.shape[0]
    out, lse, *_ = _ATEN._scaled_dot_product_efficient_attention(
        _grouped(q, k.shape[0]),
        _shared(k, group),
        _shared(v, group),
        None,
        True,
        0.0,
        causal,
        scale=scale,
    )
    return _ungrouped(out, lse, q.shape[0])


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain arithmetic in float32, for a tile of queries at a time."""
    token_count, query_heads, _ = q.shape
    kv_heads, length, _ = k.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(token_count, query_heads, dtype=torch.float32, device=q.device)
    keys = k.float().transpose(1, 2)[:, None]
    values = v.float()[:, None]
    tile = max(_PLAIN_BYTES // (4 * query_heads * length), 1)
    positions = torch.arange(length, device=q.device)
    for start in range(0, token_count, tile):
        stop = min(start + tile, token_count)
        logits = torch.matmul(_grouped(q[start:stop], kv_heads).float() * scale, keys)
        if causal:
            last = torch.arange(start, stop, device=q.device) + (length - token_count)
            seen = positions <= last[:, None]
            logits.masked_fill_(~seen, -math.inf)
        sums = logits.logsumexp(dim=-1, keepdim=True)
        part = torch.matmul(logits.sub_(sums).exp_(), values)
        out[start:stop] = part.permute(2, 0, 1, 3).flatten(1, 2)
        lse[start:stop] = sums[..., 0].permute(2, 0, 1).flatten(1, 2)
    return out, lse


_KERNELS: dict[str, Kernel] = {
    "cudnn": _cudnn,
    "flash": _flash,
    "efficient": _efficient,
    "flash_cpu": _flash_cpu,
    "plain": _plain,
}
# The checks that torch makes before it calls one of these kernels.
_ALLOWED: dict[Kernel, Callable[[SDPAParams, bool], bool]] = {
    _cudnn: can_use_cudnn_attention,
    _flash: can_use_flash_attention,
}
# Those whose causal mask ends at the last key if there are more keys than queries.
_JOINING = {"plain"}
_TRIED: dict[str, tuple[str, ...]] = {
    "cuda": ("cudnn", "flash", "efficient"),
    "cpu": ("flash_cpu",),
}
# Largest errors of output and log-sum-exp in a trial, whose tokens have standard deviation 1.
# Float32 kernels may multiply in TF32.
_TOLERANCES = {torch.float32: 1e-2, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class Trial(NamedTuple):
    """The result of trying a kernel on a few tokens.

    Attributes:
        kernel: Name of the kernel.
        refusal: Why the kernel is not used; empty if it is.
    """

    kernel: str
    refusal: str


@functools.cache
def trials(
    device: torch.device, dtype: torch.dtype, head_dim: int, group: int
) -> tuple[Trial, ...]:
    """Tries the kernels of a device on a few tokens.

    Args:
        device: The device.
        dtype: Dtype of q, k and v.
        head_dim: Elements of a key.
        group: Number of query heads per KV head.
    """
    return tuple(
        Trial(name, _refusal(_KERNELS[name], device, dtype, head_dim, group))
        for name in _TRIED.get(device.type, ())
    )


def _refusal(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int, group: int
) -> str:
    generator = torch.Generator().manual_seed(1)

    def made(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return drawn.to(device, dtype)

    # More keys than queries, and a gap between KV heads, as in the buffers of `Prefill`.
    q = made(_TRIED_TOKENS, 2 * group, head_dim)
    k, v = (made(2, 2 * _TRIED_TOKENS + 8, head_dim) for _ in range(2))
    tolerance = _TOLERANCES[dtype]
    tried = [(False, 2 * _TRIED_TOKENS), (True, _TRIED_TOKENS)]
    if any(_KERNELS[name] is kernel for name in _JOINING):
        tried.append((True, 2 * _TRIED_TOKENS))
    for causal, length in tried:
        # A kernel that torch would not call for such tensors may crash the process.
        allowed = _ALLOWED.get(kernel)
        if allowed is not None:
            tensors = q.transpose(0, 1)[None], k[None, :, :length], v[None, :, :length]
            if not allowed(SDPAParams(*tensors, None, 0.0, causal, group > 1), False):
                return "torch does not take it for such tensors"
        try:
            got = kernel(q, k[:, :length], v[:, :length], causal, head_dim**-0.5)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        expected = _plain(q, k[:, :length], v[:, :length], causal, head_dim**-0.5)
        for what, mine, plain in zip(("output", "log-sum-exp"), got, expected, strict=True):
            if mine.shape != plain.shape:
                return f"the {what} has shape {list(mine.shape)}, not {list(plain.shape)}"
            # Written so that NaN is refused.
            if not (mine.float() - plain.float()).abs().max().item() <= tolerance:
                return f"the {what} differs from plain arithmetic"
    return ""


def add_kernel(device_type: str, name: str, kernel: Kernel) -> None:
    """Adds a kernel, to be tried before all others. Does nothing if there is one of this name.

    Args:
        device_type: "cuda" or "cpu".
        name: Its name in `Trial`.
        kernel: The kernel. It serves all lengths, or raises RuntimeError. With a causal mask and
            more keys than queries, the last query sees all keys.
    """
    if name not in _KERNELS:
        _KERNELS[name] = kernel
        _JOINING.add(name)
        _TRIED[device_type] = (name, *_TRIED[device_type])
        trials.cache_clear()


def joins(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether causal attention of such tensors may have more keys than queries."""
    return kernel_of(q, k, causal=True) in _JOINING


def kernel_of(q: torch.Tensor, k: torch.Tensor, *, causal: bool) -> str:
    """Returns the name of the kernel that `attention_with_lse` uses for such tensors.

    Raises:
        TypeError: The dtype is not float32, float16 or bfloat16.
    """
    recurs = (
        min(q.shape[0], k.shape[1]) > 0
        and q.shape[0] % _CUDNN_QUERIES == 0
        and (causal or k.shape[1] % _CUDNN_KEYS == 0)
    )
    return next(name for name in _taken(q, k) if recurs or name != "cudnn")


def _taken(q: torch.Tensor, k: torch.Tensor) -> list[str]:
    """The kernels that serve such tensors at some length, fastest first."""
    if q.dtype not in _TOLERANCES:
        raise TypeError(f"q has elements of {q.dtype}, not float32, float16 or bfloat16")
    group = q.shape[1] // k.shape[0]
    tried = trials(q.device, q.dtype, q.shape[2], group)
    return [*(trial.kernel for trial in tried if not trial.refusal), "plain"]


def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends, and returns the output with the log-sum-exp that merging needs.

    Args:
        q: Queries [T, H_q, d].
        k: Keys [H_kv, L, d]; H_q is a multiple of H_kv.
        v: Values, with the same shape.
        causal: Query i sees keys 0 to L - T + i. L must be T, unless the kernel `joins`. Otherwise
            each query sees all keys.
        scale: Factor on q.k.

    Returns:
        Output [T, H_q, d] of q's dtype, and the natural log-sum-exp of the scaled logits
        [T, H_q], float32. Both may be views. Over no keys they are 0 and minus infinity.
    """
    if causal and q.shape[0] != k.shape[1] and not (q.shape[0] < k.shape[1] and joins(q, k)):
        raise ValueError(f"causal attention of {q.shape[0]} queries over {k.shape[1]} keys")
    if q.shape[0] == 0 or k.shape[1] == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return _KERNELS[kernel_of(q, k, causal=causal)](q, k, v, causal, scale)


def attention_in_parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Attends for all queries to all keys, in parts, so that the fastest kernel does most of them.

    Args:
        q: Queries [T, H_q, d].
        k: Keys [H_kv, L, d], at least one.
        v: Values, with the same shape.
        scale: Factor on q.k.

    Yields:
        A slice of the queries, and `attention_with_lse` of these over some of the keys. Over all
        parts, each query sees each key once.
    """
    for queries, keys in _cuts(q, k):
        out, lse = attention_with_lse(q[queries], k[:, keys], v[:, keys], causal=False, scale=scale)
        yield queries, out, lse


def largest_part(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns queries and keys of the first part, which is the largest."""
    queries, keys = _cuts(q, k)[0]
    return q[queries], k[:, keys]


def _cuts(q: torch.Tensor, k: torch.Tensor) -> list[tuple[slice, slice]]:
    """Returns the queries and keys of each part."""
    cut = _taken(q, k)[0] == "cudnn"
    return [
        (queries, keys)
        for queries in _parts(q.shape[0], _CUDNN_QUERIES if cut else 0)
        for keys in _parts(k.shape[1], _CUDNN_KEYS if cut else 0)
    ]


def _parts(count: int, multiple: int) -> list[slice]:
    """Splits a count into its largest multiple of `multiple`, if any, and the rest."""
    whole = count - count % multiple if multiple else count
    return [slice(a, b) for a, b in ((0, whole), (whole, count)) if a < b]


def merge_into(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merges attention over more keys into an output, in place.

    Args:
        out: Output over some keys [T, H_q, d], float32.
        lse: Its log-sum-exp [T, H_q], float32.
        part: Output over other keys, of any float dtype.
        part_lse: Log-sum-exp of `part`.
    """
    # The part's weight in the merged softmax. If both are empty it is NaN, which becomes 0.
    share = (part_lse - lse).sigmoid_().nan_to_num_(nan=0.0)
    torch.logaddexp(lse, part_lse, out=lse)
    out.mul_((1 - share)[..., None])
    out.addcmul_(part, share[..., None])


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over two disjoint sets of keys.

    Args:
        out_a: Output over the first set [T, H_q, d]. Over no keys it is 0.
        lse_a: Its log-sum-exp [T, H_q]. Over no keys it is minus infinity.
        out_b: Output over the second set.
        lse_b: Its log-sum-exp.

    Returns:
        Output and log-sum-exp over both, float32.
    """
    out, lse = out_a.float(), lse_a.float()
    out = out.clone() if out is out_a else out
    lse = lse.clone() if lse is lse_a else lse
    merge_into(out, lse, out_b, lse_b.float())
    return out, lse


def copy_rows(to: torch.Tensor, rows: torch.Tensor) -> None:
    """Copies K or V [H_kv, T, d], with any strides.

    For tensors whose tokens are not next to each other, torch's kernel copies one element after the
    other. So 16 bytes are copied as one element where that is possible.

    Args:
        to: Written.
        rows: Rows of the same shape and dtype.
    """
    # Refused if a row or a stride is not a multiple of 16 bytes.
    with contextlib.suppress(RuntimeError):
        to, rows = to.view(torch.complex128), rows.view(torch.complex128)
    to.copy_(rows)


def with_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Adds learned sinks to the softmax of exact attention.

    Args:
        out: Output without them [T, H_q, d].
        lse: Its log-sum-exp [T, H_q], float32.
        sinks: Logits of the sinks [H_q], float32. None: there are none.
        dtype: Dtype of the result.

    Returns:
        Output with them [T, H_q, d], contiguous.
    """
    if sinks is not None:
        out = out * (lse - sinks).sigmoid()[..., None]
    return out.to(dtype).contiguous()


def attention_with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends with learned sinks, in plain arithmetic in float32.

    Args:
        q: Queries [..., H_kv, group, T, d].
        k: Keys [..., H_kv, 1, L, d].
        v: Values, with the same shape.
        sinks: Logits of the sinks [H_q].
        scale: Factor on q.k.
        mask: Which keys a query sees, bool [T, L]. None means all.

    Returns:
        Output [..., H_kv, group, T, d] of q's dtype.
    """
    logits = torch.matmul(q.float() * scale, k.float().transpose(-1, -2))
    if mask is not None:
        logits.masked_fill_(~mask, -math.inf)
    sums = logits.logsumexp(dim=-1, keepdim=True)
    sums = torch.logaddexp(sums, sinks.view(*q.shape[-4:-2], 1, 1))
    return torch.matmul(logits.sub_(sums).exp_(), v.float()).to(q.dtype)


def window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: int,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends causally for the last T of L tokens, each to at most `window` tokens up to its own.

    Args:
        q: Queries [T, H_q, d].
        k: Keys [H_kv, L, d].
        v: Values, with the same shape.
        window: Number of tokens that a query sees, including its own.
        scale: Factor on q.k.
        sinks: Logits of learned sinks [H_q], float32. None: there are none.

    Returns:
        Output [T, H_q, d], contiguous.
    """
    token_count, length = q.shape[0], k.shape[1]
    before = length - token_count
    group = q.shape[1] // k.shape[0]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    tile = _WINDOW_TILE if sinks is None else _SINK_TILE
    for start in range(0, token_count, tile):
        stop = min(start + tile, token_count)
        first, last = max(before + start + 1 - window, 0), before + stop
        at = torch.arange(before + start, before + stop, device=q.device)[:, None]
        key = torch.arange(first, last, device=q.device)
        mask = (key <= at) & (key > at - window)
        queries, keys, values = (
            _grouped(q[start:stop], k.shape[0]),
            k[:, first:last],
            v[:, first:last],
        )
        if sinks is None:
            part = scaled_dot_product_attention(
                queries, _shared(keys, group), _shared(values, group), attn_mask=mask, scale=scale
            )
        else:
            part = attention_with_sinks(
                queries, keys[:, None], values[:, None], sinks, scale=scale, mask=mask
            )
        out[start:stop] = part.permute(2, 0, 1, 3).flatten(1, 2)
    return out


__all__ = [
    "Kernel",
    "Trial",
    "add_kernel",
    "attention_in_parts",
    "attention_with_lse",
    "attention_with_sinks",
    "joins",
    "kernel_of",
    "largest_part",
    "merge",
    "merge_into",
    "trials",
    "window_attention",
    "with_sinks",
]
