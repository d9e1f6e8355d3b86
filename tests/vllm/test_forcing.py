"""The logits processor for vLLM's V2 model runner, which the CPU build has but does not run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from forcing import RowForcing
from vllm import SamplingParams

_VOCABULARY = 50


def _processor(prompt_lengths: list[int]) -> RowForcing:
    states: Any = SimpleNamespace(prompt_len=SimpleNamespace(np=np.array(prompt_lengths)))
    return RowForcing(None, states)


def _best(processor: RowForcing, rows: list[tuple[int, int]]) -> list[int]:
    """The most likely token of rows, each a slot and a position. Without it, it would be 7."""
    logits = torch.zeros(len(rows), _VOCABULARY)
    logits[:, 7] = 1.0
    layout: Any = SimpleNamespace(
        expanded_idx_mapping=torch.tensor([slot for slot, _ in rows]),
        pos=torch.tensor([position for _, position in rows]),
    )
    made = processor.apply(logits, layout)
    assert made is logits
    assert made.isfinite().any(dim=1).all()
    return made.argmax(dim=1).tolist()


def test_rows_get_their_requests_tokens() -> None:
    processor = _processor([5, 3, 9])
    assert processor.add_request(0, SamplingParams(extra_args={"forced": [11, 12, 13]}))
    assert processor.add_request(2, SamplingParams(extra_args={"forced": [21, 22]}))
    assert not processor.add_request(1, SamplingParams())
    # The last token of the prompt gives the first token.
    assert _best(processor, [(2, 8), (0, 4), (1, 2)]) == [21, 11, 7]
    assert _best(processor, [(0, 5), (2, 9)]) == [12, 22]
    # An earlier chunk of the prompt, and a step after the last token.
    assert _best(processor, [(0, 3), (2, 10)]) == [7, 7]


def test_a_slot_is_used_again() -> None:
    processor = _processor([2])
    assert processor.add_request(0, SamplingParams(extra_args={"forced": [11]}))
    assert _best(processor, [(0, 1)]) == [11]
    assert not processor.add_request(0, SamplingParams())
    assert _best(processor, [(0, 1)]) == [7]
