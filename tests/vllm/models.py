"""Tiny random models of several kinds, saved where vLLM can load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY = 256
# The kinds of models that the plugin serves.
KINDS = ("llama", "qwen2", "gemma3")
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


def _made(kind: str) -> Any:
    torch.manual_seed(1)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **_SHAPES))
    if kind == "qwen2":
        # vLLM computes head_dim as the width divided by the heads.
        shapes = {**_SHAPES, "num_attention_heads": 4}
        return Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=3, **shapes))
    if kind == "gemma2":
        return Gemma2ForCausalLM(
            Gemma2Config(num_hidden_layers=2, query_pre_attn_scalar=32, **_SHAPES)
        )
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(num_hidden_layers=2, sliding_window=64, **_SHAPES))
    assert kind == "gemma3", f"no kind {kind}"
    # Two of the six layers have full attention.
    config = Gemma3TextConfig(
        num_hidden_layers=6,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=32,
        **_SHAPES,
    )
    return Gemma3ForCausalLM(config)


def save(kind: str, folder: Path) -> None:
    """Saves a model whose two best logits differ by 1 in the median, and a tokenizer of words."""
    model = _made(kind).float().eval()
    ids = torch.randint(1, VOCABULARY, (4, 128), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        best = model(ids).logits.float().topk(2).values
        gap = (best[..., 0] - best[..., 1]).median().item()
        model.lm_head.weight.mul_(max(1.0, 1.05 / gap))
    model.save_pretrained(folder)
    words: dict[str, Any] = {f"w{i}": i for i in range(VOCABULARY - 1)}
    tokenizer = Tokenizer(models.WordLevel({**words, "[UNK]": VOCABULARY - 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
