"""generate() with a cache that knows the tokens of its text."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from spillway_kv.transformers.arguments import cache_argument
from spillway_kv.transformers.cache import SpillwayCache
from spillway_kv.transformers.support import UnsupportedModelError


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


class _BeamRecorder(LogitsProcessor):
    """Notes the tokens of the beams whose K/V the cache holds. Changes no scores.

    Stopping criteria see candidates, of which only some become beams. This is called before the
    beams are chosen, which then moves the noted tokens with the rows.
    """

    def __init__(self, cache: SpillwayCache) -> None:
        self._cache = cache

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Notes the tokens."""
        if input_ids.shape[0] == self._cache.batch_size:
            self._cache.note_tokens(input_ids)
        return scores


def generate(model: Any, cache: SpillwayCache, ids: torch.Tensor, **kwargs: Any) -> Any:
    """Calls `model.generate(ids, ...)` with the cache, which may already hold a part of the text.

    The tokens are compared with those of the K/V that the cache already holds, and are noted as
    they come. So a text can continue after Ctrl-C, or after `cache.save` and
    `SpillwayCache.load`, and cannot be confused with another one.

    With `num_beams` or `num_return_sequences`, the rows of the cache are multiplied as transformers
    multiplies those of `ids`. Afterwards row i of the cache has the K/V of row i of the answer, so
    that the answer can be continued. After beam search these may be only the K/V of the first
    tokens, because those of beams that were given up are gone.

    Args:
        model: A transformers model.
        cache: Its cache, empty or with a text with which `ids` begins. It has one row for each row
            of `ids`, or as many as the answer will have while it is generated.
        ids: The whole text so far, [B, n].
        **kwargs: As for `generate`.

    Raises:
        TokenMismatchError: The cache holds another text. The error says from which position on.
        UnsupportedModelError: `assistant_early_exit` is set; or layers with a state allow no
            assisted decoding, no chunks or no later turn.
        ValueError: `use_cache` is False. transformers would pass the whole text again with each
            token, and append it to the cache.
    """
    if _given(model, kwargs, "use_cache") is False:
        raise ValueError(
            "use_cache is False, in the call or in a generation_config: a cache is given"
        )
    if _given(model, kwargs, "assistant_early_exit") is not None:
        raise UnsupportedModelError(
            "assistant_early_exit: the draft is the model itself, with fewer layers and a cache of "
            "its own, which the attention implementation 'spillway' cannot use; give another "
            "assistant_model, or prompt_lookup_num_tokens"
        )
    beam_count = _option(model, kwargs, "num_beams")
    repeats = max(beam_count, _option(model, kwargs, "num_return_sequences"))
    rows = ids if cache.batch_size == len(ids) else ids.repeat_interleave(repeats, dim=0)
    cache.check_tokens(rows)
    length = cache.get_seq_length()
    if 0 < length == ids.shape[1]:
        # generate() needs the output of the last token, so the K/V of this token are computed
        # again, or those of more tokens if a layer cannot go back by one.
        length = cache.contents.reachable(length - 1)
        cache.truncate(length)
    _check_parts(model, cache, ids.shape[1] - length, kwargs)
    cache.note_tokens(rows)
    recorder = _Recorder(rows)
    if beam_count > 1:
        processors = kwargs.pop("logits_processor", None) or []
        kwargs["logits_processor"] = LogitsProcessorList([*processors, _BeamRecorder(cache)])
    else:
        criteria = kwargs.pop("stopping_criteria", None) or []
        kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, recorder])
    cache.contents.expected_row_count = len(ids) * repeats
    try:
        made = model.generate(ids, **cache_argument(cache), **kwargs)
    finally:
        cache.contents.expected_row_count = 0
        if beam_count == 1 and len(recorder.ids) == cache.batch_size:
            cache.note_tokens(recorder.ids)
    if beam_count > 1:
        follow(cache, made if isinstance(made, torch.Tensor) else made.sequences, len(ids))
    return made


def _check_parts(model: Any, cache: SpillwayCache, count: int, kwargs: dict[str, Any]) -> None:
    """Refuses what would fail in the middle of `count` new tokens, before anything has changed.

    Raises:
        UnsupportedModelError: The model cannot take the tokens in these parts, or no candidates.
    """
    contents = cache.contents
    if any(
        _given(model, kwargs, name) is not None
        for name in ("assistant_model", "prompt_lookup_num_tokens")
    ):
        contents.check_candidates()
    chunk = _given(model, kwargs, "prefill_chunk_size")
    if contents.one_by_one and count > 1 and (contents.length or (chunk and chunk < count)):
        kind = contents.states[0].kind.name
        raise UnsupportedModelError(
            f"layers of the kind {kind} of this model forget their state when several tokens "
            "follow it, so its prompt is neither in chunks nor for a later turn: give the whole "
            "text to an empty cache, without prefill_chunk_size"
        )


def follow(cache: SpillwayCache, ids: torch.Tensor, prompt_count: int) -> None:
    """Makes the rows those of texts that beam search has found, as far as their K/V exist.

    Args:
        cache: The cache.
        ids: [G, n], the same number of texts for each prompt.
        prompt_count: Number of prompts. The rows of each prompt are next to each other.
    """
    contents = cache.contents
    contents.settle()
    if not contents.paddings:
        return  # generate() was told not to use the cache.
    row_count = len(contents.paddings)
    rows, length = contents.texts.best_rows(ids, row_count, prompt_count, contents.length)
    contents.select(rows)
    try:
        cache.truncate(length)
    except ValueError:
        # A layer with a sliding window or a state cannot go back so far.
        cache.reset()


def _option(model: Any, kwargs: dict[str, Any], name: str) -> int:
    """Returns the number that `generate` will use for an option."""
    value = _given(model, kwargs, name)
    return 1 if value is None else cast(int, value)


def _given(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """Returns the value that `generate` will use for an option. None: it is not set."""
    configs = (kwargs.get("generation_config"), getattr(model, "generation_config", None))
    values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
    return next((value for value in values if value is not None), None)
