"""Hugging Face transformers with Spillway.

Importing this module registers the attention implementation `spillway`:

    from spillway_kv.transformers import SpillwayCache, generate

    model.set_attn_implementation("spillway")
    with spillway_kv.connect() as client, SpillwayCache(model.config, client) as cache:
        generate(model, cache, input_ids, max_new_tokens=100)

Prompts are attended on the model's device, and their K/V are appended to the daemon. Later
tokens are appended and attended in the daemon. Each batch row is a sequence with its true
length: left padding is never appended. docs/transformers.md says what is supported.
"""

from spillway_kv._extras import needs

with needs("transformers", "spillway_kv.transformers"):
    import torch  # noqa: F401
    from transformers import AttentionInterface, AttentionMaskInterface

from spillway_kv.transformers.arguments import cache_argument
from spillway_kv.transformers.attention import left_padding_mask, spillway_attention
from spillway_kv.transformers.cache import SpillwayCache
from spillway_kv.transformers.generation import generate
from spillway_kv.transformers.identity import ModelMismatchError
from spillway_kv.transformers.memory import PromptMemory, prompt_memory
from spillway_kv.transformers.statistics import AttendEvent, CacheStatistics
from spillway_kv.transformers.support import UnsupportedModelError
from spillway_kv.transformers.texts import TokenMismatchError

AttentionInterface.register("spillway", spillway_attention)
AttentionMaskInterface.register("spillway", left_padding_mask)

__all__ = [
    "AttendEvent",
    "CacheStatistics",
    "ModelMismatchError",
    "PromptMemory",
    "SpillwayCache",
    "TokenMismatchError",
    "UnsupportedModelError",
    "cache_argument",
    "generate",
    "prompt_memory",
]
