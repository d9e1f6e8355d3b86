"""Tiny random models of several kinds, saved where vLLM can load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = 256
# Kinds of models that any schedule is compared with.
KINDS = ("llama", "qwen2", "gemma3", "gpt_oss", "granite4")
_SHAPES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4_000_000,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


# A state space of Mamba 2.
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16}
_MAMBA |= {"mamba_n_groups": 1, "mamba_expand": 2}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_experts": 4}
_CONVOLUTIONS = ["conv", "full_attention", "conv", "conv", "full_attention"]
_MIXED = ["sliding_attention", "full_attention"] * 2
# By kind: transformers' class of the model, and what its configuration has besides `_SHAPES`.
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    # vLLM computes head_dim as the width divided by the heads.
    "qwen2": ("Qwen2", {"num_attention_heads": 4}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", {"moe_intermediate_size": 64, **_EXPERTS}),
    "phi3": ("Phi3", {"num_attention_heads": 4}),
    "olmo2": ("Olmo2", {"num_attention_heads": 4}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 32}),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 6,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 32,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 64}),
    "gpt_oss": (
        "GptOss",
        {
            "num_hidden_layers": 4,
            "sliding_window": 64,
            "layer_types": _MIXED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    # Its sinks are not in transformers' class: `save` adds them.
    "granite_sinks": ("Granite", {"layer_types": ["full_attention"] * 3}),
    "granite4": (
        "GraniteMoeHybrid",
        {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 128,
            "num_attention_heads": 4,
            **_MAMBA,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 5,
            "layer_types": _CONVOLUTIONS,
            "num_attention_heads": 4,
            # What vLLM reads in published configurations.
            "conv_dim": 128,
            "block_dim": 128,
            "block_ff_dim": 256,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "num_hidden_layers": 5,
            "layer_types": _CONVOLUTIONS,
            "num_attention_heads": 4,
            "moe_intermediate_size": 64,
            "num_dense_layers": 1,
            **_EXPERTS,
        },
    ),
    "falcon_h1": ("FalconH1", {"mamba_d_ssm": 256, **_MAMBA}),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba", "mamba", "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "expand": 2,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            # All of them, so that rounding to bfloat16 chooses no others.
            "num_experts": 4,
            "num_experts_per_tok": 4,
        },
    ),
}


def _made(kind: str) -> Any:
    torch.manual_seed(1)
    name, more = _KINDS[kind]
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(
        transformers, f"{name}Config"
    )
    layers = {} if kind == "nemotron_h" else {"num_hidden_layers": 3}
    return getattr(transformers, f"{name}ForCausalLM")(config(**{**_SHAPES, **layers, **more}))


def _sinks(shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """Logits of learned sinks, from a small share of the weight to nearly all."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 3


def save(kind: str, folder: Path) -> None:
    """Saves a model whose two best logits differ by 1 in the median, and a tokenizer of words."""
    model = _made(kind).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.copy_(_sinks(parameter.shape))
    ids = torch.randint(1, VOCABULARY, (4, 128), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        best = model(ids).logits.float().topk(2).values
        gap = (best[..., 0] - best[..., 1]).median().item()
        model.lm_head.weight.mul_(max(1.0, 1.05 / gap))
    model.save_pretrained(folder)
    if kind == "granite_sinks":
        weights = load_file(folder / "model.safetensors")
        for layer in range(model.config.num_hidden_layers):
            shape = (model.config.num_attention_heads,)
            weights[f"model.layers.{layer}.self_attn.sinks"] = _sinks(shape)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    words: dict[str, Any] = {f"w{i}": i for i in range(VOCABULARY - 1)}
    tokenizer = Tokenizer(models.WordLevel({**words, "[UNK]": VOCABULARY - 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]"
    ).save_pretrained(folder)
