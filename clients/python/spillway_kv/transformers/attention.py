"""The attention implementation `spillway` and its mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import (
    causal_mask_function,
    sliding_window_causal_mask_function,
)

from spillway_kv.transformers.handed import HandedLayer, uncompiled
from spillway_kv.transformers.support import UnsupportedModelError

# Arguments with which some model kinds change the softmax.
_REFUSED = ("softcap", "position_bias")


@uncompiled
def spillway_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attends for one layer. transformers calls it with what the cache's update returned.

    Args:
        module: The attention module.
        query: Queries [B, H_q, T, d] after the positional encoding.
        key: New keys [B, H_kv, T, d], as `SpillwayCache.update` returned them.
        value: New values, with the same shape.
        attention_mask: Left padding of each row, [B], from `left_padding_mask`. None means no
            padding.
        dropout: Must be 0.
        scaling: Factor on q.k. None means 1 / sqrt(d).
        is_causal: Must not be False.
        **kwargs: Arguments of other models: `s_aux`, the learned sinks of the layer, must be those
            that the cache knows. Others that change the softmax must be None.

    Returns:
        Output [B, T, H_q, d], and None for the weights.
    """
    layer = HandedLayer.of(key)
    if layer is None and (is_causal is False or getattr(module, "is_causal", True) is False):
        raise UnsupportedModelError(
            f"{type(module).__name__} is not causal: of a model that also reads images or sound, "
            "set the attention of the text decoder alone, by "
            "model.set_attn_implementation({'text_config': 'spillway'})"
        )
    if layer is None:
        raise RuntimeError(
            "the attention implementation 'spillway' needs a SpillwayCache: give one to the "
            "model as cache=, or as past_key_values= before transformers 5.24. The drafts of "
            "assistant_early_exit are not supported, because this model makes them with another "
            "cache"
        )
    if dropout:
        raise ValueError(f"dropout {dropout}: spillway is for inference; call model.eval()")
    if query.requires_grad and torch.is_grad_enabled():
        raise ValueError("spillway has no gradients; call the model under torch.no_grad()")
    if is_causal is False:
        raise UnsupportedModelError("this layer's attention is not causal")
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"this layer attends with {name}, which is not supported")
    window = kwargs.get("sliding_window")
    if window is not None and window != layer.window:
        raise UnsupportedModelError(
            f"this layer attends within a sliding window of {window} tokens, by the config "
            f"{'with full attention' if layer.window is None else f'of {layer.window}'}"
        )
    if attention_mask is not None and attention_mask.ndim != 1:
        raise ValueError(
            f"the mask has {attention_mask.ndim} dimensions; spillway takes the 2-D mask of "
            "left padding, not one that was made for another attention implementation"
        )
    layer.sinks.check(kwargs.get("s_aux"))
    layer.meet(module)
    # Under torch.autocast, a model of float32 has rotated queries and keys in float32, and values
    # in the other type.
    dtype = torch.promote_types(key.dtype, value.dtype)
    key, value = key.to(dtype), value.to(dtype)
    out = layer.attend(
        query,
        key,
        value,
        None if attention_mask is None else attention_mask.tolist(),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
    )
    return out, None


# transformers makes a new function for each forward pass, so they are compared by their code.
_SLIDING = sliding_window_causal_mask_function(1)


def _is_causal(mask_function: Callable[..., Any]) -> bool:
    """Whether a mask function is only causal, or that of a sliding window."""
    if mask_function is causal_mask_function:
        return True
    parts, expected = _parts(mask_function), _parts(_SLIDING)
    return (
        len(parts) == len(expected) == 2
        and _code(mask_function) is _code(_SLIDING)
        and all(_code(mine) is _code(its) for mine, its in zip(parts, expected, strict=True))
    )


def _code(function: Any) -> Any:
    return getattr(function, "__code__", function)


def _parts(mask_function: Any) -> tuple[Any, ...]:
    """Returns the masks that a mask function intersects; empty if it is of another kind."""
    cells: tuple[Any, ...] = getattr(mask_function, "__closure__", None) or ()
    contents = cells[0].cell_contents if len(cells) == 1 else ()
    return contents if isinstance(contents, tuple) else ()


@uncompiled
def left_padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Returns the left padding of each row, [B] int64, instead of a mask.

    It never allocates a tensor of the size of queries times keys.

    Args:
        batch_size: Number of rows B.
        q_length: Number of new positions.
        kv_length: Number of all positions, including padding.
        q_offset: Unused.
        kv_offset: Must be 0.
        mask_function: Must be the causal one, or that of a sliding window. The layer itself knows
            the size of the window.
        attention_mask: 2-D mask [B, kv_length], False at padding.
        **kwargs: Unused.

    Raises:
        UnsupportedModelError: The mask function is another one.
        ValueError: There is padding that is not on the left, or the mask has another size.
    """
    if not _is_causal(mask_function) or kv_offset != 0:
        raise UnsupportedModelError("only plain causal masks and sliding windows are supported")
    if attention_mask is None:
        return None
    if tuple(attention_mask.shape) != (batch_size, kv_length):
        raise ValueError(
            f"the attention mask has shape {list(attention_mask.shape)}, not "
            f"{[batch_size, kv_length]}: it covers every position, earlier ones included"
        )
    kept = attention_mask.sum(dim=1)
    padding = kv_length - kept
    positions = torch.arange(kv_length, device=attention_mask.device)
    if not torch.equal(attention_mask, positions >= padding[:, None]):
        raise ValueError("the attention mask has padding that is not on the left")
    return padding.cpu()
