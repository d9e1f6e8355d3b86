"""One layer of a cache: where attention is done, and what it appends."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin

from spillway.transformers.local import causal_attention
from spillway.transformers.phase import Phase
from spillway.transformers.rows import RowStore
from spillway.transformers.statistics import AttendEvent, CacheStatistics, OnAttend
from spillway.transformers.transfer import to_device
from spillway.transformers.unfinished import Unfinished

_HANDLE = "_spillway_layer"


class Shared:
    """What the layers of one cache share."""

    def __init__(self, store: RowStore, on_attend: OnAttend | None) -> None:
        self.store = store
        self.statistics = CacheStatistics(store.shapes.layer_count)
        self.on_attend = on_attend
        self.phase = Phase()
        # Whether the forward that runs brings tokens of a prompt.
        self.prompt = True
        # The layer whose K/V were handed out and wait for its attention.
        self.pending: SpillwayLayer | None = None
        # What has begun and not ended; None between forwards.
        self.unfinished: Unfinished | None = None

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
        # None: what transformers looks for; they are in the daemon.
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
            self._shared.pending.refuse()
        self.lazy_initialization(key_states, value_states)
        # A tensor of its own: the mark must not stay on the caller's.
        key_states = key_states.view_as(key_states)
        setattr(key_states, _HANDLE, self)
        self._shared.pending = self
        return key_states, value_states

    def refuse(self) -> NoReturn:
        """Raises for K/V that were handed out and not attended to."""
        raise RuntimeError(
            f"the K/V of layer {self.index} never reached the attention implementation "
            "'spillway'; call model.set_attn_implementation('spillway')"
        )

    def get_seq_length(self) -> int:
        """Returns the positions seen by whole forwards, left padding included."""
        unfinished = self._shared.unfinished
        return self.length if unfinished is None else unfinished.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns how many positions the mask covers, and where it starts."""
        return self.get_seq_length() + query_length, 0

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
            if not shared.prompt:
                # Its buffers are of use again when a prompt comes in chunks.
                store.prefill.close()
        # A few queries read all rows once in the daemon too, or none over the link where it
        # has them on its GPU.
        few = max(counts) <= store.client.server_info.limits.sparse_query_token_count_max
        if self.length == 0 or (shared.prompt and not few):
            out = self._attend_here(q, k, v, starts, counts, scaling)
        else:
            out = self._attend_daemon(q, k, v, starts, counts)
        self.length = total
        if self.index == store.shapes.layer_count - 1:
            shared.unfinished = None
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

    def _attend_here(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: list[int],
        counts: list[int],
        scaling: float,
    ) -> torch.Tensor:
        """Attends for a prompt's tokens on the model's device, and begins to append them.

        Earlier tokens' K/V are fetched; they must be appended by then, at this layer.
        """
        store = self._shared.store
        store.end_decoding()
        active = [row for row, count in enumerate(counts) if count > 0]
        for row in active:
            if starts[row] > 0:
                store.appends.wait_for(store.rows[row].sequence, self.index)
        query_count = q.shape[2]
        news = {row: slice(query_count - counts[row], query_count) for row in active}
        for row, new in news.items():
            store.appends.start(
                store.rows[row].sequence,
                self.index,
                starts[row],
                k[row, :, new],
                v[row, :, new],
            )
        if not any(starts) and min(counts) == query_count:
            return causal_attention(q, k, v, scaling)
        out = torch.zeros(
            q.shape[0], query_count, q.shape[1], q.shape[3], dtype=q.dtype, device=q.device
        )
        for row, new in news.items():
            if starts[row] == 0:
                one = slice(row, row + 1)
                out[one, new] = causal_attention(
                    q[one, :, new], k[one, :, new], v[one, :, new], scaling
                )
                continue
            out[row, new] = store.prefill.attend(
                store.rows[row].sequence,
                self.index,
                q[row, :, new].transpose(0, 1),
                k[row, :, new],
                v[row, :, new],
                start=starts[row],
                scale=scaling,
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
