"""Logits processors that make a request generate given tokens, for both of vLLM's model runners."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)


def _tokens(params: Any) -> list[int] | None:
    """The tokens that a request must generate: `forced` in its extra arguments."""
    tokens: list[int] | None = (params.extra_args or {}).get("forced")
    return tokens


def _allow_only(token: int, logits: torch.Tensor) -> None:
    """Masks all other logits [vocabulary]."""
    value = logits[token].clone()
    logits.fill_(float("-inf"))
    logits[token] = value


class Forced:
    """Allows only the next given token."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Masks all other logits [vocabulary]."""
        _allow_only(self._tokens[len(output_ids)], logits)
        return logits


class Forcing(AdapterLogitsProcessor):
    """For the V1 model runner, which calls it for each request."""

    def is_argmax_invariant(self) -> bool:
        """False, because it changes which token is the most likely."""
        return False

    def new_req_logits_processor(self, params: Any) -> RequestLogitsProcessor | None:
        """The processor of a request; None if its tokens are not forced."""
        tokens = _tokens(params)
        return None if tokens is None else Forced(tokens)


class RowForcing(LogitsProcessor):
    """For the V2 model runner, which calls it once for the rows of a step.

    A request has a slot. Each of a step's rows of logits belongs to a slot.
    """

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self._prompt_lengths = req_states.prompt_len.np
        # By slot: the length of the prompt, and the tokens.
        self._forced: dict[int, tuple[int, list[int]]] = {}

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Takes a request's tokens. Returns whether there are any."""
        # An earlier request may have had the slot.
        self._forced.pop(req_idx, None)
        tokens = _tokens(sampling_params)
        if tokens is None:
            return False
        self._forced[req_idx] = int(self._prompt_lengths[req_idx]), tokens
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Masks all other logits [rows, vocabulary]. Waits for the GPU."""
        slots, positions = ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist()
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            if slot not in self._forced:
                continue
            prompt_length, tokens = self._forced[slot]
            # The row's token comes after its position. In a prompt's earlier chunks it is not used.
            index = position + 1 - prompt_length
            if 0 <= index < len(tokens):
                _allow_only(tokens[index], logits[row])
        return logits
