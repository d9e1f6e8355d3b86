"""Greedy decoding through the daemon with `all` gives the same tokens as transformers."""

from __future__ import annotations

from typing import Any

import spillway_kv
import torch
from spillway_kv.transformers import SpillwayCache
from transformers import DynamicCache

CONTEXT_TOKEN_COUNT = 2500
NEW_TOKEN_COUNT = 64


def generate(model: Any, tokens: torch.Tensor, cache: Any) -> list[int]:
    """Decodes greedily, also after an end of text."""
    prompt = tokens[None, :CONTEXT_TOKEN_COUNT]
    made = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        min_new_tokens=NEW_TOKEN_COUNT,
        max_new_tokens=NEW_TOKEN_COUNT,
        do_sample=False,
    )
    return made[0, CONTEXT_TOKEN_COUNT:].tolist()


def test_all_decodes_as_transformers_does(
    client: spillway_kv.Client, language_model: Any, tokens: torch.Tensor
) -> None:
    expected = generate(language_model, tokens, DynamicCache(config=language_model.config))
    language_model.set_attn_implementation("spillway")
    policy = spillway_kv.Policy(selector="all")
    with SpillwayCache(language_model.config, client, policy=policy) as cache:
        actual = generate(language_model, tokens, cache)
        layers = cache.statistics.layers
        # The first new token comes from the forward pass of the prompt.
        assert [layer.attend_count for layer in layers] == [NEW_TOKEN_COUNT - 1] * len(layers)
        assert cache.statistics.rows_touched_fraction == 1
    assert len(actual) == NEW_TOKEN_COUNT
    assert actual == expected
