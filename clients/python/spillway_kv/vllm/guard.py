"""Checks for configurations that are not supported. Does not import vLLM."""

from __future__ import annotations

from typing import Any

# Limits of the engine on shapes.
_HEAD_DIM_MAX = 256
# A step takes 16 tokens of a sequence at most.
DRAFT_COUNT_MAX = 15
# Drafts that need nothing from the model's own layers.
_DRAFTERS = ("ngram", "draft_model")


def refusals(config: Any) -> list[str]:
    """Returns why Spillway does not support a `VllmConfig`.

    Args:
        config: The complete configuration of vLLM's engine.

    Returns:
        Reasons, each with the option or the property of the model. Empty if it is supported.
    """
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    reasons = []
    reasons += _of_speculation(config.speculative_config)
    if config.speculative_config is not None and config.scheduler_config.async_scheduling:
        reasons.append("speculative decoding with --async-scheduling")
    if config.speculative_config is not None and model.is_hybrid:
        reasons.append(
            "speculative decoding (--speculative-config) of a model with states: they must go back "
            "where drafts are rejected, which vLLM does not do everywhere"
        )
    if parallel.pipeline_parallel_size > 1:
        reasons.append(
            f"pipeline parallelism (--pipeline-parallel-size {parallel.pipeline_parallel_size}); "
            "tensor parallelism is served"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        count = getattr(parallel, name, 1)
        if count > 1:
            reasons.append(f"context parallelism (--{name.replace('_', '-')} {count})")
    if getattr(parallel, "use_ubatching", False):
        reasons.append("batches in two halves (--enable-dbo, --ubatch-size)")
    if cache.cache_dtype not in ("auto", *_own_names(model.dtype)):
        reasons.append(
            f"a KV cache of another type than the model's (--kv-cache-dtype {cache.cache_dtype}): "
            "Spillway keeps K/V in the model's type, or in 8 bits with VLLM_SPILLWAY_ROW_TYPE=int8"
        )
    if model.runner_type != "generate":
        reasons.append(f"a model that does not generate (--runner {model.runner_type})")
    return reasons + _of_model(model)


def has_draft_model(config: Any) -> bool:
    """Whether a `VllmConfig` has a draft model, whose layers vLLM serves itself."""
    speculative = config.speculative_config
    return speculative is not None and speculative.method == "draft_model"


def _of_speculation(speculative: Any) -> list[str]:
    """The same for speculative decoding."""
    if speculative is None:
        return []
    reasons = []
    if speculative.method not in _DRAFTERS:
        reasons.append(
            f"speculative decoding by {speculative.method} (--speculative-config); n-grams and "
            "draft models are served, the methods ngram and draft_model"
        )
    backend = speculative.attention_backend
    if backend is not None and backend.name == "CUSTOM":
        reasons.append(
            "the backend CUSTOM for a draft model (--speculative-config, attention_backend); vLLM "
            "serves the draft model itself, so leave it out"
        )
    if speculative.num_speculative_tokens > DRAFT_COUNT_MAX:
        reasons.append(
            f"{speculative.num_speculative_tokens} drafts at a time (--speculative-config), which "
            f"are more than {DRAFT_COUNT_MAX}"
        )
    return reasons


def _own_names(dtype: Any) -> tuple[str, ...]:
    return (str(dtype).removeprefix("torch."),)


def _of_model(model: Any) -> list[str]:
    """The same for the model alone."""
    reasons = []
    if model.use_mla:
        reasons.append("multi-head latent attention (MLA)")
    if model.is_encoder_decoder:
        reasons.append("cross-attention: the model is an encoder-decoder")
    if getattr(model, "is_mm_prefix_lm", False):
        reasons.append("prefixes of images that are attended from both sides")
    head_dim = model.get_head_size()
    if head_dim % 16 != 0 or head_dim > _HEAD_DIM_MAX:
        reasons.append(f"head_dim {head_dim}, which is not a multiple of 16 up to {_HEAD_DIM_MAX}")
    return reasons
