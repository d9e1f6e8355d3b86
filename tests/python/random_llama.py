"""A random Llama, and greedy decoding with it."""

from __future__ import annotations

from typing import Any

import torch
from daemon_process import on_gpu
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 257
# The device of the models and of transformers' own caches.
DEVICE = torch.device("cuda" if on_gpu() else "cpu")


def llama(
    layer_count: int = 3, dtype: torch.dtype = torch.float32, seed: int = 1, **config: Any
) -> Any:
    """A random Llama whose greedy tokens vary and depend on the context. config: changed fields."""
    torch.manual_seed(seed)
    shapes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": layer_count,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**{**shapes, **config})).to(DEVICE, dtype).eval()


def prompt(*shape: int) -> torch.Tensor:
    """Random token ids, the same in every call. The padding id 0 does not occur."""
    ids = torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(7))
    return ids.to(DEVICE)


def generate(model: Any, ids: torch.Tensor, cache: Any = None, **more: Any) -> torch.Tensor:
    """The prompt [B, n] and 64 greedily generated tokens."""
    options = {"max_new_tokens": 64, "do_sample": False, "attention_mask": (ids != 0).long()}
    with torch.no_grad():
        made: torch.Tensor = model.generate(ids, past_key_values=cache, **{**options, **more})
    return made
