"""Exact attention for requests with several new tokens. Does not import vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from spillway_kv.prefill import Prefill
from spillway_kv.prefill_kernels import attention_with_lse, with_sinks
from spillway_kv.vllm.appends import Chunk
from spillway_kv.vllm.decoding import Row, on_device
from spillway_kv.vllm.sequences import Lost, Sequences

# Chunks of prompts up to this length are attended in one call with earlier tokens.
JOINED_TOKEN_COUNT = 8192


class Varlen(Protocol):
    """Causal attention of several prompts in one call. The last query of each sees all its keys."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ends: torch.Tensor,
        key_ends: torch.Tensor,
        longest: int,
        longest_keys: int,
        scale: float,
        out: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends.

        Args:
            q: Queries [N, H_q, d].
            k: Keys [L, H_kv, d], with any strides whose last one is 1.
            v: Values, with the same shape.
            ends: Where the queries of each prompt begin and the last ones end, int32 [P + 1], on
                the device.
            key_ends: The same of its keys.
            longest: Most queries of a prompt.
            longest_keys: Most keys of a prompt.
            scale: Factor on q.k.
            out: Written, [N, H_q, d].

        Returns:
            The output, and the log-sum-exp of each query [N, H_q], float32.
        """
        ...


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
        sinks: As for `set_sinks`.
    """

    def __init__(
        self,
        sequences: Sequences,
        scale: float,
        layer_count: int,
        sinks: Sequence[torch.Tensor | None] = (),
    ) -> None:
        self._sequences = sequences
        self._scale = scale
        self._layer_count = layer_count
        self._prefill = Prefill(joined_token_count=JOINED_TOKEN_COUNT)
        self._rows: list[Row] = []
        # The rows, by what is appended together.
        self._appended: list[_Appended] = []
        # Those that are not beginnings, and whose earlier K/V come from the engine.
        self._later: list[Row] = []
        self._runs: list[_Run] = []
        # Where K/V stay in GPU memory, by key, and those of these prompts that are not beginnings.
        self._kept: dict[int, torch.Tensor] = {}
        self._continued: list[_Continued] = []
        self._token_count = 0
        self._sinks: list[torch.Tensor | None] = []
        self.set_sinks(sinks)

    def set_sinks(self, sinks: Sequence[torch.Tensor | None]) -> None:
        """Sets the logits of learned sinks.

        Args:
            sinks: Of each layer, [H_q] float32 on the model's device, or None. Empty: no layer has
                any.
        """
        self._sinks = list(sinks) or [None] * self._layer_count

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
        self._kept = self._sequences.keep_prompts([row.plan for row in rows]) if _varlen else {}
        others = [row for row in rows if row.plan.key not in self._kept]
        self._appended = [_Appended(run) for run in _runs_of(others)]
        self._appended += [_Appended([row]) for row in others if row.plan.start > 0]
        self._appended += [
            _Appended([row], self._kept[row.plan.key][:, :, :, row.plan.start :])
            for row in rows
            if row.plan.key in self._kept
        ]
        later = [row for row in rows if row.plan.start > 0]
        self._continued = [
            _Continued(row, self._kept[row.plan.key], device)
            for row in later
            if row.plan.key in self._kept
        ]
        self._later = [row for row in later if row.plan.key not in self._kept]

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
        for each in self._appended:
            share = each.token_count / self._token_count
            each.append(self._sequences, layer, k, v, share, lose)
        sinks = self._sinks[layer]
        for run in self._runs:
            run.attend(q, k, v, out, self._scale, sinks)
        for chunk in self._continued:
            chunk.attend(layer, q, out, self._scale, sinks)
        for row in self._later:
            if row.alive:
                try:
                    self._attend_later(layer, row, q, k, v, out)
                except Lost as loss:
                    lose(row, loss)
        for row in self._rows:
            if not row.alive:
                out[row.begin : row.end].zero_()
        if layer + 1 == self._layer_count:
            self._sequences.release_prompts()

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
                sinks=self._sinks[layer],
            )
        )


class _Appended:
    """Chunks that follow each other in the batch, whose K/V are copied together for their appends.

    Attributes:
        token_count: Their tokens.

    Args:
        rows: The chunks.
        into: Where their K/V stay in GPU memory; None: nowhere.
    """

    def __init__(self, rows: list[Row], into: torch.Tensor | None = None) -> None:
        self._into = into
        self.token_count = rows[-1].end - rows[0].begin
        self._rows = {row.plan.key: row for row in rows}
        self._whole = slice(rows[0].begin, rows[-1].end)
        self._chunks: list[Chunk] = []

    def append(
        self,
        sequences: Sequences,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        share: float,
        lose: Callable[[Row, Lost], None],
    ) -> None:
        """Appends K and V of the batch [N, H_kv, d] to a layer. Arguments as for `Prompts`."""
        if not self._chunks:
            self._chunks = self._open(sequences, lose)
        for chunk in self._chunks:
            chunk.lost |= not self._rows[chunk.key].alive
        if all(chunk.lost for chunk in self._chunks):
            return
        keys, values = (x[self._whole].transpose(0, 1) for x in (k, v))
        losses = sequences.append(self._chunks, layer, keys, values, share=share, into=self._into)
        for key, loss in losses.items():
            lose(self._rows[key], loss)

    def _open(self, sequences: Sequences, lose: Callable[[Row, Lost], None]) -> list[Chunk]:
        chunks = []
        for row in self._rows.values():
            if not row.alive:
                continue
            try:
                chunks.append(sequences.chunk(row.plan, row.begin - self._whole.start))
            except Lost as loss:
                lose(row, loss)
        return chunks


class _Run:
    """Beginnings of prompts whose tokens follow each other in the batch."""

    def __init__(self, rows: list[Row], device: torch.device) -> None:
        self._whole = slice(rows[0].begin, rows[-1].end)
        self._places = [slice(row.begin, row.end) for row in rows]
        self._longest = max(row.plan.token_count for row in rows)
        self._ends: torch.Tensor | None = None
        if _varlen is not None:
            self._ends = on_device(
                [0, *(row.end - rows[0].begin for row in rows)], torch.int32, device
            )

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> None:
        """Attends causally, with sinks [H_q] or without."""
        if _varlen is not None and self._ends is not None:
            whole = self._whole
            ends, longest = self._ends, self._longest
            _, lse = _varlen(
                q[whole], k[whole], v[whole], ends, ends, longest, longest, scale, out[whole]
            )
            _add_sinks(out[whole], lse, sinks)
            return
        for place in self._places:
            keys, values = k[place].transpose(0, 1), v[place].transpose(0, 1)
            own, lse = attention_with_lse(q[place], keys, values, causal=True, scale=scale)
            out[place] = with_sinks(own, lse, sinks, out.dtype)


class _Continued:
    """A chunk of a prompt whose K/V are all in GPU memory.

    Args:
        row: The chunk.
        rows: K and V [2, layers, H_kv, tokens up to the chunk's end, d].
        device: Device of the model's tensors.
    """

    def __init__(self, row: Row, rows: torch.Tensor, device: torch.device) -> None:
        self._row = row
        # [2, layers, tokens, H_kv, d]
        self._rows = rows.transpose(2, 3)
        self._ends = on_device([0, row.plan.token_count, 0, rows.shape[3]], torch.int32, device)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> None:
        """Attends causally, with sinks [H_q] or without. The chunk's own K/V must be there."""
        assert _varlen is not None
        count, length = self._row.plan.token_count, self._rows.shape[2]
        new = slice(self._row.begin, self._row.end)
        k, v = self._rows[0, layer], self._rows[1, layer]
        _, lse = _varlen(
            q[new], k, v, self._ends[:2], self._ends[2:], count, length, scale, out[new]
        )
        _add_sinks(out[new], lse, sinks)


def _add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Adds sinks [H_q] to exact attention [N, H_q, d] in place, without memory for another."""
    if sinks is not None:
        out.mul_((lse - sinks).sigmoid()[..., None])


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
