"""generate() with a cache that knows the tokens of its text."""

from __future__ import annotations

from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from spillway.transformers.arguments import cache_argument
from spillway.transformers.cache import SpillwayCache


class _Recorder(StoppingCriteria):
    """Remembers the tokens so far. Never stops the generation."""

    def __init__(self, ids: torch.Tensor) -> None:
        super().__init__()
        self.ids = ids

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any
    ) -> torch.Tensor:
        """Stores the tokens. transformers makes a new tensor at each step."""
        self.ids = input_ids
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def generate(model: Any, cache: SpillwayCache, ids: torch.Tensor, **kwargs: Any) -> Any:
    """Calls `model.generate(ids, ...)` with the cache, which may already hold a part of the text.

    The tokens are compared with those of the K/V that the cache already holds, and are noted as
    they come. So a text can continue after Ctrl-C, or after `cache.save` and
    `SpillwayCache.load`, and cannot be confused with another one. With `num_beams` or
    `num_return_sequences`, only the tokens of the prompt are noted.

    Args:
        model: A transformers model.
        cache: Its cache, empty or with a text with which `ids` begins.
        ids: The whole text so far, [B, n].
        **kwargs: As for `generate`.

    Raises:
        TokenMismatchError: The cache holds another text. The error says from which position on.
    """
    cache.check_tokens(ids)
    length = cache.get_seq_length()
    if 0 < length == ids.shape[1]:
        # generate() needs the output of the last token, so the K/V of this token are computed
        # again.
        cache.crop(-1)
    cache.note_tokens(ids)
    recorder = _Recorder(ids)
    criteria = StoppingCriteriaList([*(kwargs.pop("stopping_criteria", None) or []), recorder])
    try:
        return model.generate(ids, **cache_argument(cache), stopping_criteria=criteria, **kwargs)
    finally:
        if recorder.ids.shape[0] == ids.shape[0] == cache.batch_size:
            cache.note_tokens(recorder.ids)
