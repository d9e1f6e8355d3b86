"""Tiny random models of every causal architecture of the installed transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 512
_PARAMETERS_MAX = 60_000_000

# Fields of configs, where they exist. Heads have 128 dimensions, as most models have, unless a
# caller says otherwise. Weights are large, so that softmax weights are uneven.
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 128,
    "ffn_hidden_size": 128,
    "n_inner": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
    "sliding_window": 256,
    # Layers with a state.
    "mamba_n_heads": 8,
    "mamba_d_ssm": 256,
    "mamba_d_state": 16,
    "mamba_chunk_size": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "chunk_size": 64,
    "n_groups": 1,
    "adapter_rank": 16,
    "moe_shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
# What the configs of some architectures need besides.
_MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "beam": {"n_group": 1, "topk_group": 1},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "granitemoehybrid": {"layers_block_type": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
# Weights of norms of queries and keys. With larger ones, softmax weights are uneven.
_NORMS = re.compile(r"(q|k|query|key)_(norm|layernorm)\.weight$")
# Fields that do not fit together in some configs; without the first ones that help.
_DOUBTFUL: tuple[tuple[str, ...], ...] = (
    (),
    ("layer_types", "layers_block_type"),
    ("head_dim",),
    ("layer_types", "layers_block_type", "head_dim"),
)
# What makes another kind of attention of the same architecture.
_VARIANTS: tuple[dict[str, Any], ...] = ({}, {"sliding_window": None}, {"is_decoder": True})


class NotBuiltError(Exception):
    """No tiny model of an architecture could be made."""


def causal_types() -> list[str]:
    """Names of the architectures with a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def default_config(model_type: str) -> Any:
    """The config with no field given.

    Raises:
        NotBuiltError: transformers refuses that.
    """
    try:
        return CONFIG_MAPPING[model_type]()
    except Exception as error:
        raise NotBuiltError(_reason(error)) from error


def tiny_configs(model_type: str, **sizes: int) -> Iterator[tuple[dict[str, Any], Any]]:
    """Tiny configs of an architecture, each with what makes it differ from the first.

    Args:
        model_type: Name of the architecture.
        **sizes: Fields that differ from those of other tiny configs, if the architecture has them.

    Raises:
        NotBuiltError: There is none.
    """
    base = default_config(model_type)
    text = base.get_text_config(decoder=True)
    fields = _fields(text)
    for changes in _VARIANTS:
        if all(name in fields for name in changes):
            yield changes, _tiny(base, text, sizes, changes)


def tiny_model(config: Any, seed: int = 0) -> torch.nn.Module:
    """A random model of the config.

    Raises:
        NotBuiltError: It cannot be made, or has too many parameters.
    """
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if count > _PARAMETERS_MAX:
            raise NotBuiltError(f"the tiny config still has {count:,} parameters")
        torch.manual_seed(seed)
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if _NORMS.search(name):
                    weight.add_(1)
    except NotBuiltError:
        raise
    except Exception as error:
        raise NotBuiltError(_reason(error)) from error
    return model


def _fields(config: Any) -> set[str]:
    return set(config.to_dict()) | set(getattr(config, "attribute_map", {}))


def _tiny(base: Any, text: Any, sizes: dict[str, int], changes: dict[str, Any]) -> Any:
    """base: the whole config, of which `text` is the text decoder's."""
    fields = _fields(text)
    values = {name: value for name, value in {**_SMALL, **sizes}.items() if name in fields}
    if getattr(text, "sliding_window", None) is None:
        values.pop("sliding_window", None)
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or ()))
    if kinds:
        # Some configs derive other fields from it, and only by its older name.
        name = getattr(text, "attribute_map", {}).get("layer_types", "layer_types")
        values[name] = (kinds * 4)[:4]
    values |= _MORE.get(text.model_type, {}) | changes
    refusal: Exception | None = None
    for without in _DOUBTFUL:
        try:
            small = type(text)(**{n: v for n, v in values.items() if n not in without})
        except Exception as error:
            refusal = refusal or error
            continue
        if text is base:
            return small
        for name, value in vars(base).items():
            if value is text:
                return type(base)(**{name: small})
        raise NotBuiltError("the config of its text decoder cannot be replaced")
    assert refusal is not None
    raise NotBuiltError(_reason(refusal)) from refusal


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:160]}"
