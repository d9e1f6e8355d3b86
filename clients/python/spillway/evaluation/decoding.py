"""A language model whose attention the daemon computes, over rows that are there already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from spillway.client import Client
from spillway.policy import Policy
from spillway.sequence import Sequence

_NAME = "spillway_evaluation"


@dataclass
class Steps:
    """What some tokens gave.

    Attributes:
        logits: After each token, float32 [T, vocabulary].
        rows: Rows touched by each KV head, [layers, T, H_kv].
        shares: The same of the visible, [layers, T, H_kv].
    """

    logits: torch.Tensor
    rows: npt.NDArray[np.int64]
    shares: npt.NDArray[np.float64]


@dataclass
class _Attending:
    """Where a forward attends, and what it touched."""

    sequence: Sequence
    policy: Policy
    start: int
    rows: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Appends [1, H_kv, T, d] and attends with [1, H_q, T, d]; output [1, T, H_q, d]."""
        layer, count = module.layer_idx, query.shape[2]
        keys, values = (x[0].to("cpu", torch.bfloat16) for x in (key, value))
        self.sequence.append(layer, self.start, keys, values)
        queries = query[0].transpose(0, 1).to("cpu", torch.float32)
        visible = range(self.start + 1, self.start + count + 1)
        result = self.sequence.attend(
            layer, queries, self.policy, list(visible), out_dtype="float32"
        )
        self.rows.append(result.touched_row_counts)
        return result.out[None].to(query.device, query.dtype)


@contextmanager
def _attention_by(model: Any, attending: _Attending) -> Iterator[None]:
    def attend(
        module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        return attending.attend(module, query, key, value), None

    AttentionInterface.register(_NAME, attend)
    # Every query names what it sees.
    AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def step(
    model: Any, client: Client, sequence: Sequence, policy: Policy, tokens: torch.Tensor, start: int
) -> Steps:
    """Decodes given tokens [T] at positions from `start` on.

    Sixteen at a time, or as many as the daemon serves sparsely at once: at
    every layer their rows are appended before they attend, each to what it
    sees, which is what one after the other would do.

    Args:
        model: The language model.
        client: Connection to the daemon.
        sequence: With the rows of `start` tokens in every layer.
        policy: How rows are chosen.
        tokens: Token ids [T].
        start: Position of the first.
    """
    limit = client.server_info.limits.sparse_query_token_count_max
    logits, rows = [], []
    for first in range(0, len(tokens), limit):
        some = tokens[first : first + limit].to(model.device)
        attending = _Attending(sequence, policy, start + first)
        positions = torch.arange(start + first, start + first + len(some), device=model.device)
        with torch.inference_mode(), _attention_by(model, attending):
            answer = model(input_ids=some[None], position_ids=positions[None], use_cache=False)
        logits.append(answer.logits[0].float().cpu())
        rows.append(np.stack(attending.rows))
    touched = np.concatenate(rows, axis=1)
    visible = np.arange(start + 1, start + len(tokens) + 1)
    return Steps(torch.cat(logits), touched, touched / visible[:, None])
