"""One layer of a cache: where attention is done, and what it appends."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from spillway.transformers.appends import Appends
from spillway.transformers.local import causal_attention
from spillway.transformers.phase import Phase
from spillway.transformers.rows import RowStore
from spillway.transformers.statistics import AttendEvent, CacheStatistics, OnAttend
from spillway.transformers.transfer import to_device

_HANDLE = "_spillway_layer"


class Shared:
    """What the layers of one cache share."""

    def __init__(self, store: RowStore, retain_prompt: bool, on_attend: OnAttend | None) -> None:
        self.store = store
        self.statistics = CacheStatistics(store.shapes.layer_count)
        self.on_attend = on_attend
        self.appends = Appends()
        self.phase = Phase(retain_prompt)
        # Whether the forward that runs brings tokens of a prompt.
        self.prompt = True
        # The layer whose K/V were handed out and wait for its attention.
        self.pending: SpillwayLayer | None = None

    def count(self) -> None:
        """Counts what was attended on the model's stream since."""
        for layer, sums in self.store.take_sums():
            self.statistics.add_sums(layer, sums)


class SpillwayLayer(CacheLayerMixin):
    """One layer of a `SpillwayCache`; transformers drives it.

    `update` hands the new K/V through, marked, and the attention function
    that receives them calls `attend`: only there are the mask, the scale and
    the queries known.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, shared: Shared, index: int) -> None:
        super().__init__()
        # The prompt's K/V while they are kept here.
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.index = index
        # Positions seen, left padding included.
        self.length = 0
        self._shared = shared

    @staticmethod
    def of(key: torch.Tensor) -> SpillwayLayer | None:
        """Returns the layer that handed these keys out, if one did."""
        return getattr(key, _HANDLE, None)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Notes that the layer is in use."""
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hands the new K/V [B, H_kv, T, d] to the attention function, marked."""
        if self._shared.pending is not None:
            raise RuntimeError(
                f"the K/V of layer {self._shared.pending.index} never reached the attention "
                "implementation 'spillway'; call model.set_attn_implementation('spillway'), "
                "or cache.reset() after a failure"
            )
        self.lazy_initialization(key_states, value_states)
        # A tensor of its own: the mark must not stay on the caller's.
        key_states = key_states.view_as(key_states)
        setattr(key_states, _HANDLE, self)
        self._shared.pending = self
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Returns the positions seen, left padding included."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns how many positions the mask covers, and where it starts."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """Returns -1: the daemon's memory is the limit."""
        return -1

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: list[int] | None,
        scaling: float,
    ) -> torch.Tensor:
        """Appends the new K/V and attends.

        Args:
            q: Queries [B, H_q, T, d].
            k: New keys [B, H_kv, T, d].
            v: New values, the same shape.
            padding: Left padding of each row; None is what it was.
            scaling: Factor on q.k.

        Returns:
            Output [B, T, H_q, d], zeros at padding.
        """
        shared = self._shared
        shared.pending = None
        store = shared.store
        batch_size, _, query_count, _ = q.shape
        store.open(batch_size, k.dtype, scaling)
        self._note_padding(padding)
        total = self.length + query_count
        # Each row's tokens before this call, and of this call.
        starts = [max(self.length - row.padding, 0) for row in store.rows]
        counts = [
            total - row.padding - start for row, start in zip(store.rows, starts, strict=True)
        ]
        if self.index == 0:
            shared.prompt = shared.phase.is_prompt(self.length, query_count)
            shared.phase.retaining &= shared.prompt
        if not shared.phase.retaining:
            self.keys = self.values = None
        if self.length == 0 or self.keys is not None:
            out = self._attend_local(q, k, v, starts, counts, scaling)
        else:
            out = self._attend_daemon(q, k, v, starts, counts)
        self.length = total
        return out

    def _note_padding(self, padding: list[int] | None) -> None:
        """Takes the padding of rows that are still empty, checks that of the others."""
        if padding is None:
            return
        for index, (row, value) in enumerate(zip(self._shared.store.rows, padding, strict=True)):
            if value == row.padding:
                continue
            if self.index > 0 or self.length > row.padding:
                raise ValueError(
                    f"row {index} has {row.padding} padding positions in the cache, "
                    f"{value} in the attention mask"
                )
            row.padding = value

    def _attend_local(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: list[int],
        counts: list[int],
        scaling: float,
    ) -> torch.Tensor:
        """Attends over the prompt's K/V in this process and appends the new ones.

        The last layer waits until all layers' are appended.
        """
        rows, appends = self._shared.store.rows, self._shared.appends
        query_count = q.shape[2]
        for index, row in enumerate(rows):
            if counts[index] > 0:
                new = slice(query_count - counts[index], query_count)
                appends.start(
                    row.sequence, self.index, starts[index], k[index, :, new], v[index, :, new]
                )
        out = self._attend_prompt(q, k, v, counts, scaling)
        if self.index == self._shared.store.shapes.layer_count - 1:
            appends.finish()
        return out

    def _attend_prompt(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        counts: list[int],
        scaling: float,
    ) -> torch.Tensor:
        """Attends over the prompt's K/V, those that were kept and the new ones."""
        rows = self._shared.store.rows
        query_count = q.shape[2]
        if self.keys is not None and self.values is not None:
            k = torch.cat([self.keys, k], dim=2)
            v = torch.cat([self.values, v], dim=2)
        if self._shared.phase.retaining:
            self.keys, self.values = k, v
        if not any(row.padding for row in rows):
            return causal_attention(q, k, v, scaling)
        out = torch.zeros(
            q.shape[0], query_count, q.shape[1], q.shape[3], dtype=q.dtype, device=q.device
        )
        for index, row in enumerate(rows):
            if counts[index] > 0:
                new = slice(query_count - counts[index], query_count)
                one = slice(index, index + 1)
                out[one, new] = causal_attention(
                    q[one, :, new], k[one, :, row.padding :], v[one, :, row.padding :], scaling
                )
        return out

    def _attend_daemon(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: list[int],
        counts: list[int],
    ) -> torch.Tensor:
        """Appends and attends in the daemon, which alone has the earlier K/V."""
        shared = self._shared
        if not shared.prompt and shared.on_attend is None:
            enqueued = shared.store.enqueue(self.index, q, k, v, counts)
            if enqueued is not None:
                return enqueued
        answers = shared.store.step(self.index, q, k, v, starts, counts, exact=shared.prompt)
        batch_size, head_count, query_count, head_dim = q.shape
        if batch_size == 1 and counts[0] == query_count:
            host = answers[0][2].out[None]
        else:
            host = torch.zeros(batch_size, query_count, head_count, head_dim, dtype=q.dtype)
            for row, _, result in answers:
                host[row, query_count - counts[row] :] = result.out
        # On its way before anything is counted.
        out = to_device(host, q.device)
        for row, query, result in answers:
            shared.statistics.add(self.index, result)
            if shared.on_attend is not None:
                sequence = shared.store.rows[row].sequence
                shared.on_attend(AttendEvent(self.index, row, sequence, query, result))
        return out
