"""A logits processor that makes a request generate given tokens."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor


class Forced:
    """Allows only the next given token."""

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
    """Uses `forced` in a request's extra arguments."""

    def is_argmax_invariant(self) -> bool:
        """False, because it changes which token is the most likely."""
        return False

    def new_req_logits_processor(self, params: Any) -> RequestLogitsProcessor | None:
        """The processor of a request; None if its tokens are not forced."""
        tokens = (params.extra_args or {}).get("forced")
        return None if tokens is None else Forced(tokens)
