"""Runs a model over one text, with any cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache

from spillway_kv.client import Client
from spillway_kv.policy import Policy
from spillway_kv.transformers import AttendEvent, SpillwayCache, cache_argument

_EXACT = Policy(selector="all")


class Text(NamedTuple):
    """Token ids [n] on the model's device: a prompt, and the tokens that follow it."""

    ids: torch.Tensor
    prompt_count: int

    @property
    def new_count(self) -> int:
        return len(self.ids) - self.prompt_count


class Run(NamedTuple):
    """What was measured of one way to attend.

    Attributes:
        first_token_seconds: For the prompt, until the next token is known.
        tokens_per_second: Of the tokens that follow, without the first.
        next_tokens: The likeliest next token at each of them [n], on the host.
        kv_bytes: K/V on the model's device.
    """

    first_token_seconds: float
    tokens_per_second: float
    next_tokens: torch.Tensor
    kv_bytes: int


class Errors(NamedTuple):
    """Of the outputs of Spillway's attends.

    Attributes:
        rows_read: Share of the visible rows.
        certified: Mean of the certified errors that are finite.
        none: Share of the last token's outputs without an error bound.
        observed: Mean of ||out - exact|| / ||exact||, over the last token's layers and heads.
        observed_largest: The largest of them.
    """

    rows_read: float
    certified: float
    none: float
    observed: float
    observed_largest: float


@torch.inference_mode()
def run(model: Any, cache: Any, text: Text, chunk: int) -> Run:
    """Reads the prompt in chunks, then decodes the tokens that follow, which are given.

    All tokens but the last are in the cache afterwards.
    """
    begin = time.perf_counter()
    logits = torch.empty(0, device="cpu", dtype=torch.float32)
    for first in range(0, text.prompt_count, chunk):
        part = text.ids[None, first : min(first + chunk, text.prompt_count)]
        logits = model(input_ids=part, **cache_argument(cache), logits_to_keep=1).logits
    # To the host, because a GPU may still be computing.
    next_tokens = [logits[0, -1].argmax().cpu()]
    first_token = time.perf_counter() - begin
    for token in text.ids[text.prompt_count : -1]:
        logits = model(input_ids=token[None, None], **cache_argument(cache)).logits
        next_tokens.append(logits[0, -1].argmax().cpu())
        if len(next_tokens) == 2:  # the first of these steps is a warm-up
            begin = time.perf_counter()
    seconds = time.perf_counter() - begin
    return Run(
        first_token_seconds=first_token,
        tokens_per_second=(text.new_count - 2) / seconds,
        next_tokens=torch.stack(next_tokens),
        kv_bytes=_kv_bytes(cache),
    )


def run_dense(model: Any, text: Text, chunk: int) -> Run | None:
    """The same with transformers' own cache. None: K/V do not fit the GPU."""
    try:
        return run(model, DynamicCache(config=model.config), text, chunk)
    except torch.OutOfMemoryError:
        return None
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run_spillway(
    model: Any,
    client: Client,
    quality: str,
    text: Text,
    chunk: int,
    decoded: Callable[[Client], None],
) -> tuple[Run, Errors]:
    """The same with a `SpillwayCache`. Calls `decoded` when all but the last token are there.

    The errors are those of the last token, whose attends are repeated exactly.
    """
    with SpillwayCache(model, client, quality=quality) as cache:
        found = run(model, cache, text, chunk)
        decoded(client)
        read = cache.statistics.rows_touched_fraction
        certified = cache.statistics.certified_error_mean
        observer = _Observer()
        cache.contents.shared.on_attend = observer
        with torch.inference_mode():
            model(input_ids=text.ids[None, -1:], **cache_argument(cache))
        errors = np.concatenate(observer.errors)
        none = observer.none / errors.size
        return found, Errors(read, certified, none, float(errors.mean()), float(errors.max()))


class _Observer:
    """Repeats attends exactly. Called as `on_attend`."""

    def __init__(self) -> None:
        self.errors: list[np.ndarray[Any, Any]] = []
        self.none = 0

    def __call__(self, event: AttendEvent) -> None:
        out = event.result.out.double()
        exact = event.sequence.attend(event.layer, event.query, policy=_EXACT).out.double()
        self.errors.append(((out - exact).norm(dim=-1) / exact.norm(dim=-1)).numpy().ravel())
        self.none += int((event.result.certificate.promises == "none").sum())


def _kv_bytes(cache: Any) -> int:
    """K/V that the layers of a cache keep themselves."""
    tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))
