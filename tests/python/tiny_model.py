"""A random model with a tokenizer of a hundred words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(100)]


def save_tiny_llama(folder: Path, **config: Any) -> None:
    """Saves a Llama of 4 query heads over 2 KV heads of 16 elements, and its tokenizer."""
    vocabulary: dict[str, Any] = {word: i for i, word in enumerate([*WORDS, "[UNK]"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(1)
    shapes = LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        **config,
    )
    LlamaForCausalLM(shapes).save_pretrained(folder)


def draw_words(count: int) -> list[int]:
    """The indices of the words of a random text."""
    draws: list[int] = torch.randint(
        len(WORDS), (count,), generator=torch.Generator().manual_seed(2)
    ).tolist()
    return draws
