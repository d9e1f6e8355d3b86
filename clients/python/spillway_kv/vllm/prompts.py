"""Exact attention for requests with several new tokens. Does not import vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from spillway_kv.prefill import Prefill
from spillway_kv.prefill_kernels import attention_with_lse
from spillway_kv.vllm.decoding import Row
from spillway_kv.vllm.sequences import Lost, Sequences

# Chunks of prompts up to this length are attended in one call with earlier tokens.
JOINED_TOKEN_COUNT = 8192

# Causal attention of several prompts in one call: q [N, H_q, d], k and v [N, H_kv, d], the
# beginnings of the prompts and the end of the last (int32 [P + 1], on the device), the largest
# number of tokens, scale, out [N, H_q, d], which is written.
Varlen = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float, torch.Tensor], None
]

_varlen: Varlen | None = None


def set_varlen(kernel: Varlen | None) -> None:
    """Sets a kernel for several prompts. With None, each prompt is attended on its own."""
    global _varlen  # noqa: PLW0603
    _varlen = kernel


class Prompts:
    """The prompts, or chunks of prompts, of a step. For one thread.

    Args:
        sequences: The sequences of the requests.
        scale: Factor on q.k.
        layer_count: Layers of the engine.
    """

    def __init__(self, sequences: Sequences, scale: float, layer_count: int) -> None:
        self._sequences = sequences
        self._scale = scale
        self._layer_count = layer_count
        self._prefill = Prefill(joined_token_count=JOINED_TOKEN_COUNT)
        self._rows: list[Row] = []
        # Those that are not beginnings.
        self._later: list[Row] = []
        self._runs: list[_Run] = []
        self._token_count = 0

    def close(self) -> None:
        """Frees the buffers for K/V of earlier tokens."""
        self._prefill.close()

    def begin(self, rows: list[Row], device: torch.device) -> None:
        """Prepares a step.

        Args:
            rows: Its requests with several new tokens, in the order of the batch.
            device: Device of the model's tensors.
        """
        self._rows = rows
        self._token_count = sum(row.plan.token_count for row in rows)
        self._runs = [_Run(each, device) for each in _runs_of(rows)]
        self._later = [row for row in rows if row.plan.start > 0]

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lose: Callable[[Row, Lost], None],
    ) -> None:
        """Appends the new K/V, and attends to all tokens before each one.

        Args:
            layer: Index among the engine's layers.
            q: Queries of the batch [N, H_q, d].
            k: Keys [N, H_kv, d].
            v: Values, with the same shape.
            out: Written, [N, H_q, d]. Zeros for requests that are or get lost.
            lose: Called for each request that gets lost.
        """
        for row in self._rows:
            if row.alive:
                try:
                    self._append(layer, row, k, v)
                except Lost as loss:
                    lose(row, loss)
        for run in self._runs:
            run.attend(q, k, v, out, self._scale)
        for row in self._later:
            if row.alive:
                try:
                    self._attend_later(layer, row, q, k, v, out)
                except Lost as loss:
                    lose(row, loss)
        for row in self._rows:
            if not row.alive:
                out[row.begin : row.end].zero_()

    def _append(self, layer: int, row: Row, k: torch.Tensor, v: torch.Tensor) -> None:
        new = slice(row.begin, row.end)
        # Chunks come one after the other at each layer.
        self._sequences.settle(row.plan.key, layer)
        share = row.plan.token_count / self._token_count
        keys, values = k[new].transpose(0, 1), v[new].transpose(0, 1)
        self._sequences.append(row.plan, layer, keys, values, share=share)

    def _attend_later(
        self,
        layer: int,
        row: Row,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attends to the tokens of earlier steps too."""
        new = slice(row.begin, row.end)
        next_layer = layer + 1 if len(self._later) == 1 and layer + 1 < self._layer_count else None
        if next_layer is not None:
            self._sequences.settle(row.plan.key, next_layer)
        out[new] = self._sequences.patiently(
            lambda: self._prefill.attend(
                row.sequence,
                layer,
                q[new],
                k[new].transpose(0, 1),
                v[new].transpose(0, 1),
                start=row.plan.start,
                scale=self._scale,
                next_layer=next_layer,
            )
        )


class _Run:
    """Beginnings of prompts whose tokens follow each other in the batch."""

    def __init__(self, rows: list[Row], device: torch.device) -> None:
        self._whole = slice(rows[0].begin, rows[-1].end)
        self._places = [slice(row.begin, row.end) for row in rows]
        self._longest = max(row.plan.token_count for row in rows)
        self._ends: torch.Tensor | None = None
        if _varlen is not None:
            ends = [0, *(row.end - rows[0].begin for row in rows)]
            # Pinned, so that the copy does not wait for the GPU.
            there = torch.tensor(ends, dtype=torch.int32, device="cpu")
            there = there.pin_memory() if device.type == "cuda" else there
            self._ends = there.to(device, non_blocking=True)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """Attends causally."""
        if _varlen is not None and self._ends is not None:
            whole = self._whole
            _varlen(q[whole], k[whole], v[whole], self._ends, self._longest, scale, out[whole])
            return
        for place in self._places:
            keys, values = k[place].transpose(0, 1), v[place].transpose(0, 1)
            out[place], _ = attention_with_lse(q[place], keys, values, causal=True, scale=scale)


def _runs_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Returns the beginnings of prompts, split where one does not follow the other in the batch."""
    runs: list[list[Row]] = []
    for row in rows:
        if row.plan.start > 0:
            continue
        if runs and runs[-1][-1].end == row.begin:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs
