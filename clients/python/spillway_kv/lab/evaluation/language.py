"""Loads the language model, with YaRN for longer contexts, and tokenises the text."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from spillway_kv.lab._console import from_pretrained
from spillway_kv.lab.training.traces import read_text


def load_tokenizer(model: str) -> Any:
    """Loads the tokenizer of a folder, a model name on the hub or a `.gguf` file."""
    return from_pretrained(AutoTokenizer, model)


@functools.cache
def load_config(model: str) -> Any:
    """Returns a model's configuration. Do not change it. Takes seconds for a `.gguf` file."""
    return from_pretrained(AutoConfig, model)


def yarn_factor(model: str, token_count: int) -> float:
    """Returns the factor by which YaRN stretches positions to reach a length; 1: not needed."""
    longest = load_config(model).max_position_embeddings
    return max(1.0, token_count / longest)


def load_model(model: str, device: str, factor: float) -> Any:
    """Loads the model, in float32 on a CPU and in bfloat16 on other devices.

    Args:
        model: Folder, name on the hub, or `.gguf` file.
        device: Device of the model.
        factor: Factor of YaRN. 1 means no change of positions.
    """
    logging.disable_progress_bar()
    config = copy.deepcopy(load_config(model))
    if factor > 1:
        longest = config.max_position_embeddings
        config.rope_parameters = {
            **config.rope_parameters,
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": longest,
        }
        config.max_position_embeddings = int(factor * longest)
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    loaded = from_pretrained(AutoModelForCausalLM, model, config=config, dtype=dtype)
    return loaded.to(device).eval()


def tokenize(tokenizer: Any, texts: tuple[Path, ...]) -> torch.Tensor:
    """Returns the token ids of the concatenated files, int64 [N]."""
    ids = tokenizer(read_text(texts), return_tensors="pt", verbose=False).input_ids[0]
    assert isinstance(ids, torch.Tensor)
    return ids
