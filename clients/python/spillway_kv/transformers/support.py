"""Checks which models are supported, and reads their shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Models whose softmax has learned sink logits. No field of their configs says so.
_SINK_MODELS = frozenset(
    {"deepseek_v4", "flint", "gpt_oss", "granite_swa", "granitemoe_swa", "openai_privacy_filter"}
)


_FULL, _SLIDING = "full_attention", "sliding_attention"


class UnsupportedModelError(ValueError):
    """The daemon does not support the model's kind of attention."""


@dataclass(frozen=True)
class Shapes:
    """Shapes of a model's attention.

    Attributes:
        layer_count: Layers with full attention.
        query_head_count: Query heads per layer.
        kv_head_count: K/V heads per layer.
        head_dim: Elements of a key.
    """

    layer_count: int
    query_head_count: int
    kv_head_count: int
    head_dim: int


def shapes_of(config: Any) -> Shapes:
    """Reads the shapes from a model's config. Refuses models that are not supported.

    Args:
        config: The model's `PreTrainedConfig`. For a composite model, that of the text decoder is
            used.

    Raises:
        UnsupportedModelError: The model has no layer with full attention, chunked windows, other
            layer types, a soft cap on the logits, latent attention, learned attention sinks, ALiBi,
            shared K/V, or an encoder.
    """
    windows = windows_of(config)
    config = config.get_text_config(decoder=True)
    query_heads = config.num_attention_heads
    return Shapes(
        layer_count=windows.count(None),
        query_head_count=query_heads,
        kv_head_count=getattr(config, "num_key_value_heads", None) or query_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // query_heads,
    )


def windows_of(config: Any) -> list[int | None]:
    """Reads the window of each layer, tokens; None: full attention. Raises as `shapes_of`."""
    config = config.get_text_config(decoder=True)
    for refusal in _refusals(config):
        raise UnsupportedModelError(f"a {config.model_type} model cannot be served: {refusal}")
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return [None] * config.num_hidden_layers
    return [config.sliding_window if kind == _SLIDING else None for kind in layer_types]


def _refusals(config: Any) -> list[str]:
    """Returns why the config's attention is not plain causal softmax attention; empty if it is."""

    def value(name: str) -> Any:
        return getattr(config, name, None)

    reasons = []
    if value("is_encoder_decoder"):
        reasons.append("it is an encoder-decoder")
    if value("is_causal") is False:
        reasons.append("its attention is not causal")
    layer_types = value("layer_types")
    if layer_types is not None:
        others = sorted(set(layer_types) - {_FULL, _SLIDING})
        window = value("sliding_window")
        if others:
            reasons.append(
                f"it has layers of the types {others}; only {_FULL} and {_SLIDING} are served"
            )
        elif _FULL not in layer_types:
            reasons.append("no layer has full attention")
        elif _SLIDING in layer_types and not (isinstance(window, int) and window > 0):
            reasons.append(f"it has {_SLIDING} layers, and a sliding window of {window} tokens")
    elif value("sliding_window") is not None and value("use_sliding_window") is not False:
        reasons.append(
            "no layer has full attention: it attends within a sliding window of "
            f"{value('sliding_window')} tokens"
        )
    elif value("attention_chunk_size") is not None:
        reasons.append(f"it attends within chunks of {value('attention_chunk_size')} tokens")
    if value("attn_logit_softcapping"):
        reasons.append(f"it caps its logits at {value('attn_logit_softcapping')}")
    if value("kv_lora_rank"):
        reasons.append("it uses multi-head latent attention")
    if config.model_type in _SINK_MODELS:
        reasons.append("it has learned attention sinks")
    if value("alibi") or value("attn_config") is not None and config.attn_config.alibi:
        reasons.append("it adds position biases to its logits (ALiBi)")
    if value("num_kv_shared_layers") or value("kv_sharing_modes"):
        reasons.append("some of its layers share K/V with others")
    return reasons
