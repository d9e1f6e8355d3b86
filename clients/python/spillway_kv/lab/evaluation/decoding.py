"""Runs a language model whose attention is computed by the daemon, over existing rows."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from spillway_kv.client import Client
from spillway_kv.policy import Policy
from spillway_kv.sequence import Sequence
from spillway_kv.step import DecodeStep

_NAME = "spillway_evaluation"


@dataclass(frozen=True)
class Row:
    """One of the rows that are decoded together.

    Attributes:
        sequence: Sequence with the rows of the preceding tokens, in every layer.
        policy: Policy of its attends.
    """

    sequence: Sequence
    policy: Policy


@dataclass
class Steps:
    """The results of some tokens for one row.

    Attributes:
        logits: Logits after each token, or after the last one only, float32 [T or 1, vocabulary].
        rows: Rows read by each KV head, [layers, T, H_kv].
        shares: These rows as a share of the visible ones, [layers, T, H_kv].
    """

    logits: torch.Tensor
    rows: npt.NDArray[np.int64]
    shares: npt.NDArray[np.float64]


class _Group(NamedTuple):
    """Rows of one model and with one policy, and the decode step that they take together."""

    rows: list[int]
    step: DecodeStep


@contextmanager
def _grouped(
    client: Client, rows: SequenceABC[Row], start: int, token_count: int
) -> Iterator[list[_Group]]:
    """Begins steps of all rows."""
    kinds: dict[tuple[str, Policy], list[int]] = {}
    for i, row in enumerate(rows):
        kinds.setdefault((row.sequence.model, row.policy), []).append(i)
    with ExitStack() as stack:
        groups = []
        for (_, policy), mine in kinds.items():
            step = client.begin_step(
                [rows[i].sequence for i in mine],
                token_count=token_count,
                policy=policy,
                starts=[start] * len(mine),
            )
            groups.append(_Group(mine, stack.enter_context(step)))
        yield groups


class _Forward:
    """The attends of one forward pass, and the counts of rows that they read."""

    def __init__(self, groups: SequenceABC[_Group], row_count: int) -> None:
        self._groups = groups
        # For each row, an array [T, H_kv] per layer.
        self.touched: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(row_count)]

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Appends K/V [B, H_kv, T, d] and attends with [B, H_q, T, d]. Returns [B, T, H_q, d]."""
        keys, values = (x.to("cpu", torch.bfloat16) for x in (key, value))
        queries = query.transpose(1, 2).to("cpu", torch.float32)
        out = torch.empty_like(queries)
        for group in self._groups:
            mine = group.rows
            out[mine], _ = group.step.attend(
                module.layer_idx, queries[mine], keys[mine], values[mine]
            )
            for row, result in zip(mine, group.step.results(), strict=True):
                self.touched[row].append(result.touched_row_counts)
        return out.to(query.device, query.dtype)


@contextmanager
def _attention_by(model: Any, forward: _Forward) -> Iterator[None]:
    def attend(
        module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        return forward.attend(module, query, key, value), None

    AttentionInterface.register(_NAME, attend)
    # No mask is needed: every query sees the preceding tokens and itself.
    AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def step(
    model: Any,
    client: Client,
    rows: SequenceABC[Row],
    tokens: torch.Tensor,
    start: int,
    last_logits: bool = False,
) -> list[Steps]:
    """Decodes given tokens [B, T] at positions from `start` on, each row with its own tokens.

    Processes as many tokens at a time as the daemon serves sparsely, usually 16. In every layer,
    their K/V are appended before they attend, and each token sees only the tokens up to itself. So
    the results are those of decoding one token after the other.

    Args:
        model: The language model.
        client: Connection to the daemon.
        rows: B rows, whose sequences have `start` tokens.
        tokens: Token ids.
        start: Position of the first token.
        last_logits: Return only the logits after the last token.

    Returns:
        The results of each row.
    """
    limit = client.server_info.limits.sparse_query_token_count_max
    logits: list[torch.Tensor] = []
    touched = []
    for first in range(0, tokens.shape[1], limit):
        some = tokens[:, first : first + limit].to(model.device)
        positions = start + first + torch.arange(some.shape[1], device=model.device)
        with _grouped(client, rows, start + first, some.shape[1]) as groups:
            forward = _Forward(groups, len(rows))
            with torch.inference_mode(), _attention_by(model, forward):
                answer = model(
                    input_ids=some,
                    position_ids=positions.expand_as(some),
                    use_cache=False,
                    logits_to_keep=int(last_logits),
                )
        if last_logits:
            logits.clear()
        logits.append(answer.logits.float().cpu())
        touched.append(np.array(forward.touched))
    whole = torch.cat(logits, dim=1)
    counts = np.concatenate(touched, axis=2)
    visible = np.arange(start + 1, start + tokens.shape[1] + 1)
    return [Steps(whole[i], counts[i], counts[i] / visible[:, None]) for i in range(len(rows))]
