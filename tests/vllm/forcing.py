"""A logits processor that makes a request's tokens the given ones, step by step."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor


class Forced:
    """Lets only the next given token be chosen."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Masks all other logits [vocabulary]."""
        token = self._tokens[len(output_ids)]
        value = logits[token].clone()
        logits.fill_(float("-inf"))
        logits[token] = value
        return logits


class Forcing(AdapterLogitsProcessor):
    """Takes `forced` from a request's extra arguments."""

    def is_argmax_invariant(self) -> bool:
        """It changes which token is the most likely."""
        return False

    def new_req_logits_processor(self, params: Any) -> RequestLogitsProcessor | None:
        """The request's own; None where its tokens are free."""
        tokens = (params.extra_args or {}).get("forced")
        return None if tokens is None else Forced(tokens)
