"""One layer of a cache: decides where attention is computed, and appends K/V."""

from __future__ import annotations

import torch

from spillway_kv.results import AttendResult
from spillway_kv.transformers.handed import HandedLayer
from spillway_kv.transformers.local import causal_attention
from spillway_kv.transformers.phase import Phase
from spillway_kv.transformers.rows import RowStore
from spillway_kv.transformers.selection import Selection
from spillway_kv.transformers.states import StateLayer
from spillway_kv.transformers.statistics import AttendEvent, CacheStatistics, OnAttend
from spillway_kv.transformers.support import UnsupportedModelError
from spillway_kv.transformers.transfer import to_device
from spillway_kv.transformers.unfinished import Unfinished


class Shared:
    """The state that the layers of one cache share."""

    def __init__(self, store: RowStore, on_attend: OnAttend | None) -> None:
        self.store = store
        self.statistics = CacheStatistics(store.model.shapes.layer_count)
        self.on_attend = on_attend
        self.phase = Phase()
        # Whether the current forward pass has tokens of a prompt.
        self.prompt = True
        # The layer that has passed on its K/V and has not attended yet.
        self.pending: HandedLayer | None = None
        self._unfinished: Unfinished | None = None
        # Whether the change in progress has reached the first layer that attends.
        self.touched = False
        # The change of the rows in progress; None if there is none.
        self.selection: Selection | None = None
        # Index of the model's last layer that attends.
        self.last_index = store.model.shapes.layer_count - 1
        # A layer with a state, if it ends the forward pass, and whether the layers that attend are
        # done.
        self.last_state: StateLayer | None = None
        self.attended = False

    @property
    def unfinished(self) -> Unfinished | None:
        """The forward pass or truncation in progress; None if there is none."""
        if self.attended and (self.last_state is None or self.last_state.state_advanced()):
            self.unfinished = None
        return self._unfinished

    @unfinished.setter
    def unfinished(self, change: Unfinished | None) -> None:
        self._unfinished = change
        self.attended = False

    def count(self) -> None:
        """Adds the attends of decode steps since the last call to the statistics."""
        for layer, statistics in self.store.take_statistics().items():
            self.statistics.add_sums(layer, statistics)


class SpillwayLayer(HandedLayer):
    """A layer with full attention, whose K/V are in the daemon."""

    def __init__(
        self, shared: Shared, index: int, model_index: int, sinks: torch.Tensor | None = None
    ) -> None:
        super().__init__(shared, model_index, sinks)
        # Index of the layer in the daemon's model.
        self.index = index
        self._shared = shared

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: list[int] | None,
        scaling: float,
    ) -> torch.Tensor:
        """Appends the new K/V and attends."""
        shared = self._shared
        store = shared.store
        batch_size, _, query_count, _ = q.shape
        self._check_shapes(q, k)
        store.open(batch_size, k.dtype, scaling)
        self._note_padding(padding)
        total = self.length + query_count
        # For each row: tokens before this call, and tokens of this call.
        starts = [max(self.length - row.padding, 0) for row in store.rows]
        counts = [
            total - row.padding - start for row, start in zip(store.rows, starts, strict=True)
        ]
        if self.index == 0:
            shared.prompt = shared.phase.is_prompt(self.length, query_count)
            if not shared.prompt:
                # Frees the buffers. They are needed again only when a prompt comes in chunks.
                store.prefill.close()
        # For a few queries, the daemon too reads all rows only once, or none over the link if they
        # are on its GPU.
        few = max(counts) <= store.client.server_info.limits.sparse_query_token_count_max
        if self.length == 0 or (shared.prompt and not few):
            out = self._attend_here(q, k, v, starts, counts, scaling)
        else:
            out = self._attend_daemon(q, k, v, starts, counts)
        return out

    def _check_shapes(self, q: torch.Tensor, k: torch.Tensor) -> None:
        has = (q.shape[1], k.shape[1], q.shape[3])
        shapes = self._shared.store.model.shapes
        expected = (shapes.query_head_count, shapes.kv_head_count, shapes.head_dim)
        if has != expected or k.shape[3] != q.shape[3]:
            raise UnsupportedModelError(
                f"layer {self.model_index} has {has[0]} query heads, {has[1]} K/V heads and "
                f"keys of {k.shape[3]} elements, but by the config {expected}"
            )

    def _note_padding(self, padding: list[int] | None) -> None:
        """Stores the padding of rows that are still empty, and checks that of the others."""
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
        """Attends for a prompt's tokens on the model's device, and starts to append them.

        The K/V of earlier tokens are fetched, so this waits until they are appended at this layer.
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
        sinks = self.sinks.on(q.device)
        if not any(starts) and min(counts) == query_count:
            return causal_attention(q, k, v, scaling, sinks)
        out = torch.zeros(
            q.shape[0], query_count, q.shape[1], q.shape[3], dtype=q.dtype, device=q.device
        )
        for row, new in news.items():
            if starts[row] == 0:
                one = slice(row, row + 1)
                out[one, new] = causal_attention(
                    q[one, :, new], k[one, :, new], v[one, :, new], scaling, sinks
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
                sinks=sinks,
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
        shared, store = self._shared, self._shared.store
        batch_size, head_count, query_count, head_dim = q.shape
        limits = store.client.server_info.limits
        if (
            set(counts) == {query_count}
            and query_count <= limits.sparse_query_token_count_max
            and batch_size <= limits.attend_item_count_max
        ):
            watched = shared.on_attend is not None
            out = store.decode(
                self.index, q, k, v, starts, exact=shared.prompt, with_results=watched
            )
            if watched:
                queries = q.transpose(1, 2).cpu()
                for row, result in enumerate(store.results()):
                    self._tell(row, queries[row], result.cpu())
            return out
        answers = store.step(self.index, q, k, v, starts, counts, exact=shared.prompt)
        host = torch.zeros(
            batch_size, query_count, head_count, head_dim, dtype=q.dtype, device="cpu"
        )
        for row, _, result in answers:
            host[row, query_count - counts[row] :] = result.out
        # The copy starts before the statistics are updated.
        out = to_device(host, q.device)
        for row, query, result in answers:
            shared.statistics.add(self.index, result)
            self._tell(row, query, result)
        return out

    def _tell(self, row: int, query: torch.Tensor, result: AttendResult) -> None:
        """Tells an attend to the cache's observer."""
        shared = self._shared
        if shared.on_attend is not None:
            sequence = shared.store.rows[row].sequence
            shared.on_attend(AttendEvent(self.index, row, sequence, query, result))
