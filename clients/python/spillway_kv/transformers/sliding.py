"""A layer with a sliding window, whose newest K/V stay in the model's process."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from spillway_kv.prefill_kernels import attention_with_sinks, window_attention
from spillway_kv.transformers.handed import Forward, HandedLayer

# Number of tokens that can still be removed after more tokens than the window have been seen.
# Assisted decoding removes wrong candidates.
SPARE_TOKEN_COUNT = 128


class Held(NamedTuple):
    """The contents of a layer. The tensors are never changed in place."""

    keys: torch.Tensor | None
    values: torch.Tensor | None
    padding: list[int] | None
    length: int


class SlidingLayer(HandedLayer):
    """Keeps the K/V of the window, and some more, on the model's device.

    The left padding of a row is kept with its tokens and never attended. The contents before the
    last forward pass are kept until the next one, because another layer may be interrupted.
    """

    is_sliding = True

    def __init__(
        self, forward: Forward, model_index: int, window: int, sinks: torch.Tensor | None = None
    ) -> None:
        super().__init__(forward, model_index, sinks)
        self.window = window
        self._window = window
        # Left padding of each row. None: 0 for all rows.
        self._padding: list[int] | None = None
        self._before: Held | None = None

    def fork_into(self, copy: HandedLayer) -> None:
        """As in `HandedLayer`."""
        super().fork_into(copy)
        assert isinstance(copy, SlidingLayer)
        copy.hold(Held(self.keys, self.values, self._padding, self.length))

    def reset(self) -> None:
        """Makes the layer empty."""
        super().reset()
        self._padding = None
        self._before = None

    def selected(self, indices: list[int]) -> Held:
        """Returns contents of which row i is what row indices[i] is now. Changes nothing."""
        keys, values, padding = self.keys, self.values, self._padding
        if keys is not None and values is not None:
            rows = torch.tensor(indices, device=keys.device)
            keys, values = keys.index_select(0, rows), values.index_select(0, rows)
        if padding is not None:
            padding = [padding[index] for index in indices]
        return Held(keys, values, padding, self.length)

    def hold(self, contents: Held) -> None:
        """Replaces the contents."""
        self.keys, self.values, self._padding, self.length = contents
        self._before = None

    def undo(self, length: int) -> None:
        """Makes the layer hold `length` positions, after a forward pass was interrupted.

        Raises:
            ValueError: As for `check_cut`, because an earlier forward pass was lost too.
        """
        if length == 0:
            self.reset()
            return
        if self._before is not None and self._before.length >= length:
            self.keys, self.values, self._padding, self.length = self._before
        self.check_cut(length)
        self.cut(length)

    def check_cut(self, length: int) -> None:
        """Checks that the layer can be cut to `length` positions.

        Raises:
            ValueError: Rows that the window would need are gone.
        """
        held = 0 if self.keys is None else self.keys.shape[2]
        gone = self.length - held
        # A query at position `length` needs the window - 1 rows before it, or all if there are
        # fewer.
        if gone > 0 and max(length - self._window + 1, 0) < gone:
            most = self.length - gone - self._window + 1
            raise ValueError(
                f"{self.length - length} tokens cannot be removed: layer {self.model_index} has "
                f"a sliding window of {self._window} tokens and has dropped those before it; "
                f"{most} can, or cache.reset()"
            )

    def cut(self, length: int) -> None:
        """Cuts the layer to `length` positions. `check_cut` must have passed."""
        self._before = None
        if self.keys is None or self.values is None or length >= self.length:
            return
        left = self.keys.shape[2] - (self.length - length)
        self.keys, self.values = self.keys[:, :, :left], self.values[:, :, :left]
        self.length = length
        if self._padding is not None:
            self._padding = [min(value, length) for value in self._padding]

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: list[int] | None,
        scaling: float,
    ) -> torch.Tensor:
        """Attends within the window."""
        batch_size, _, query_count, _ = q.shape
        if self.keys is not None and self.keys.shape[0] != batch_size:
            raise ValueError(
                f"the cache holds {self.keys.shape[0]} rows, the batch has {batch_size}"
            )
        paddings = self._noted(padding, batch_size)
        if self.keys is not None and self.values is not None:
            k = torch.cat([self.keys, k], dim=2)
            v = torch.cat([self.values, v], dim=2)
        total = self.length + query_count
        # Position of the first row in k and v.
        first = total - k.shape[2]
        seen = max(total - self._window, first)
        if query_count == 1 and max(paddings) <= seen:
            newest = slice(seen - first, None)
            out = self._attend_newest(q, k[:, :, newest], v[:, :, newest], scaling)
        else:
            out = self._attend_rows(q, k, v, paddings, first, scaling)
        self._before = Held(self.keys, self.values, self._padding, self.length)
        self._keep(k, v)
        self._padding = paddings
        return out.contiguous()

    def _attend_newest(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attends with one query of each row to all rows of k and v."""
        sinks = self.sinks.on(q.device)
        if sinks is None:
            out = scaled_dot_product_attention(
                q, k, v, scale=scaling, enable_gqa=q.shape[1] > k.shape[1]
            )
        else:
            grouped = q.unflatten(1, (k.shape[1], -1))
            out = attention_with_sinks(grouped, k[:, :, None], v[:, :, None], sinks, scale=scaling)
            out = out.flatten(1, 2)
        return out.transpose(1, 2)

    def _noted(self, padding: list[int] | None, batch_size: int) -> list[int]:
        """Returns the padding of each row: the known one, or for empty rows the given one."""
        known = self._padding if self._padding is not None else [0] * batch_size
        if padding is None:
            return known
        for row, (before, given) in enumerate(zip(known, padding, strict=True)):
            if given != before and self.length > before:
                raise ValueError(
                    f"row {row} has {before} padding positions in the cache, {given} in the "
                    "attention mask"
                )
        return padding

    def _attend_rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        paddings: list[int],
        first: int,
        scaling: float,
    ) -> torch.Tensor:
        out = torch.zeros(
            q.shape[0], q.shape[2], q.shape[1], q.shape[3], dtype=q.dtype, device=q.device
        )
        for row, padding in enumerate(paddings):
            query = max(padding - self.length, 0)
            if query == q.shape[2]:
                continue
            key = max(padding - first, 0)
            out[row, query:] = window_attention(
                q[row, :, query:].transpose(0, 1),
                k[row, :, key:],
                v[row, :, key:],
                window=self._window,
                scale=scaling,
                sinks=self.sinks.on(q.device),
            )
        return out

    def _keep(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keeps the newest rows. Copies them if they would keep much more memory alive."""
        most = self._window - 1 + SPARE_TOKEN_COUNT
        copies = k.shape[2] > most + SPARE_TOKEN_COUNT
        kept = (x[:, :, -most:] for x in (k, v))
        self.keys, self.values = (x.clone() if copies else x for x in kept)
