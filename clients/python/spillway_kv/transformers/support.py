"""Checks which models are supported, and reads their shapes."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from spillway_kv.transformers.kinds import FULL, HYBRID, SERVED, SLIDING, LayerKind, layer_kinds

# Models whose softmax has learned sink logits. No field of their configs says so.
_SINK_MODELS = frozenset({"flint", "gpt_oss", "granite_swa", "granitemoe_swa"})
# What else no field says.
_OTHER_ATTENTION = {
    "diffllama": "its layers attend twice to the same keys",
    "doge": "it adds learned values to its logits",
    "dory": "it runs some of its layers several times for each token",
    "jetmoe": "it changes keys after they were cached",
    "mimo_v2_flash": "its values have fewer elements than its keys",
    "minimax": "its linear attention takes only a cache of its own kind (MiniMaxCache)",
    "recurrent_gemma": "its recurrent layers keep their state in the model, not in a cache",
}
# Models whose layers with a state forget it when several tokens follow it.
_ONE_BY_ONE = frozenset({"jamba", "zamba"})

# What the engine serves (host/base/limits.h and host/model/model_spec.cc).
_HEAD_DIM_STEP, _HEAD_DIM_MAX = 16, 256
# What attention modules of transformers call their attention function by.
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# What they make the masks of encoders with.
_BOTH_WAYS = "create_bidirectional_mask"


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
        UnsupportedModelError: The model has no layer with full attention, or layers of a kind that
            is not served; a soft cap on the logits, latent attention, ALiBi, shared K/V,
            cross-attention, a scale of its own in each layer, or an encoder; or shapes that the
            engine does not serve; or its attention is of another kind, or not behind transformers'
            interface.
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"the model's config is expected first, not a {type(config).__name__}")
    count = sum(kind.is_full for kind in layers_of(config))
    return _shapes(config.get_text_config(decoder=True), count)


def learns_sinks(config: Any) -> bool:
    """Whether a model of this config has learned attention sinks. config: of the text decoder."""
    return config.model_type in _SINK_MODELS


def _shapes(config: Any, layer_count: int) -> Shapes:
    """config: of the text decoder."""
    query_heads = config.num_attention_heads
    return Shapes(
        layer_count=layer_count,
        query_head_count=query_heads,
        kv_head_count=_kv_heads(config) or query_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // query_heads,
    )


def _kv_heads(config: Any) -> int | None:
    # GPTBigCode's config may also name another number, which its layers do not read.
    if config.model_type == "gpt_bigcode":
        return 1 if config.multi_query else None
    return getattr(config, "num_key_value_heads", None)


def layers_of(config: Any) -> list[LayerKind]:
    """Reads the kind of each layer. Raises as `shapes_of`."""
    config = config.get_text_config(decoder=True)
    for refusal in _refusals(config):
        raise UnsupportedModelError(f"a {config.model_type} model cannot be served: {refusal}")
    return layer_kinds(config)


def continues_one_by_one(config: Any) -> bool:
    """Whether after the first forward pass, the model's layers take one token at a time."""
    return config.get_text_config(decoder=True).model_type in _ONE_BY_ONE


def _refusals(config: Any) -> list[str]:
    """Returns why the config's attention is not plain causal softmax attention; empty if it is."""

    reasons = []

    def value(name: str) -> Any:
        try:
            return getattr(config, name, None)
        except Exception:
            # Configs whose layers differ refuse to tell one value for all.
            reasons.append(f"its layers have {name} each of their own")
            return None

    if value("is_encoder_decoder"):
        reasons.append("it is an encoder-decoder")
    if value("is_causal") is False:
        reasons.append("its attention is not causal")
    layer_types = value("layer_types")
    if layer_types is not None:
        others = sorted(set(layer_types) - SERVED)
        window = value("sliding_window")
        if others:
            reasons.append(f"it has layers of the types {others}, and {sorted(SERVED)} are served")
        elif not {FULL, HYBRID} & set(layer_types):
            found = sorted(set(layer_types))
            reasons.append(f"no layer has full attention: its layers are of the types {found}")
        elif SLIDING in layer_types and not (isinstance(window, int) and window > 0):
            reasons.append(f"it has {SLIDING} layers, and a sliding window of {window} tokens")
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
    if config.model_type in _OTHER_ATTENTION:
        reasons.append(_OTHER_ATTENTION[config.model_type])
    if value("cross_attention_layers"):
        reasons.append("some of its layers attend to an image (cross-attention)")
    if value("alibi") or getattr(value("attn_config"), "alibi", False):
        reasons.append("it adds position biases to its logits (ALiBi)")
    if value("scale_attn_by_inverse_layer_idx"):
        reasons.append(
            "its layers scale their logits each in a way of their own "
            "(scale_attn_by_inverse_layer_idx)"
        )
    if value("num_kv_shared_layers") or value("kv_sharing_modes"):
        reasons.append("some of its layers share K/V with others")
    missing = [
        name
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        if not isinstance(value(name), int)
    ]
    if missing:
        reasons.append(f"its config has no {' and no '.join(missing)}")
    for name in ("head_dim", "num_key_value_heads"):
        value(name)
    if not reasons:
        reasons += _refused_shapes(_shapes(config, 1))
    # Asked last, because it imports the model's module.
    if not reasons:
        reasons += _refused_module(config)
    return reasons


def _refused_shapes(shapes: Shapes) -> list[str]:
    """Returns why the engine does not serve the shapes; empty if it does."""
    reasons = []
    if shapes.query_head_count % shapes.kv_head_count:
        reasons.append(
            f"it has {shapes.query_head_count} query heads, which {shapes.kv_head_count} KV heads "
            "do not divide"
        )
    if shapes.head_dim % _HEAD_DIM_STEP or not 0 < shapes.head_dim <= _HEAD_DIM_MAX:
        reasons.append(
            f"it has a head_dim of {shapes.head_dim}, and multiples of {_HEAD_DIM_STEP} up to "
            f"{_HEAD_DIM_MAX} are served"
        )
    return reasons


def _refused_module(config: Any) -> list[str]:
    """Returns why the module with the model's attention cannot be served; empty if it can.

    Of models that are not part of transformers nothing is known.
    """
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    if not name.startswith("transformers.models.") or ".modeling_" not in name:
        return []
    try:
        module = importlib.import_module(name)
    except ImportError:
        return []
    if not hasattr(module, _INTERFACE):
        return [
            "its attention is not behind transformers' attention interface, so that no other "
            f"attention can take its place ({name})"
        ]
    # BERT and its kin: their configs decide whether a token attends to later ones too.
    if hasattr(module, _BOTH_WAYS) and getattr(config, "is_decoder", None) is False:
        return ["it is not a decoder: its config says is_decoder=False"]
    return []
