"""A transformers cache whose K/V live in the daemon."""

from __future__ import annotations

import datetime
import weakref
from types import TracebackType
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from spillway.client import Client
from spillway.indices import HashWeights, RotationHash
from spillway.policy import Policy
from spillway.results import Model
from spillway.sequence import Sequence
from spillway.transformers.appends import Appends
from spillway.transformers.local import causal_attention
from spillway.transformers.rows import RowStore
from spillway.transformers.statistics import AttendEvent, CacheStatistics, OnAttend
from spillway.transformers.support import shapes_of
from spillway.transformers.transfer import to_device

_HANDLE = "_spillway_layer"


class _Shared:
    """What the layers of one cache share."""

    def __init__(self, store: RowStore, retain_prompt: bool, on_attend: OnAttend | None) -> None:
        self.store = store
        self.statistics = CacheStatistics(store.shapes.layer_count)
        self.on_attend = on_attend
        self.appends = Appends()
        # True while later parts of a prompt may attend locally.
        self.retaining = retain_prompt
        # The layer whose K/V were handed out and wait for its attention.
        self.pending: SpillwayLayer | None = None


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

    def __init__(self, shared: _Shared, index: int) -> None:
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
        sparse_max = store.client.server_info.limits.sparse_query_token_count_max
        if self.length > 0 and query_count <= sparse_max:
            shared.retaining = False
        if not shared.retaining:
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
        if self._shared.retaining:
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
        answers = shared.store.step(self.index, q, k, v, starts, counts)
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


class SpillwayCache(Cache):
    """A cache whose K/V live in the daemon, one sequence per batch row.

    Use it with `model.set_attn_implementation("spillway")` and pass it as
    `past_key_values`. The first forward attends locally and appends its K/V;
    later ones append and attend in the daemon, sparsely up to 16 new tokens
    and densely beyond. Batches with left padding, beam search, assisted
    decoding and later turns on the same cache work. It is not thread-safe.

    The sequences are deleted by `close()`, by `reset()`, at the end of a
    `with` block, or when the cache is collected. The daemon's model, which
    caches of equal shape share, stays; `client.delete_model(cache.model)`
    deletes it.

    A forward raises `spillway.NotFound` where a sequence was deleted or has
    expired, and `spillway.DaemonRestarted`, which is one, where the daemon
    has restarted and lost it. After `reset()` the cache starts empty on the
    daemon that is there, with a model of the same kind.

    Attributes:
        statistics: Sums over the attends that the daemon served.
    """

    def __init__(
        self,
        config: Any,
        client: Client,
        *,
        policy: Policy | None = None,
        model: Model | None = None,
        hash_weights: HashWeights | None = RotationHash(),  # noqa: B008
        ttl: datetime.timedelta | float | None = None,
        retain_prompt: bool = False,
        on_attend: OnAttend | None = None,
    ) -> None:
        """Checks that the model can be served; nothing is sent yet.

        Args:
            config: The model's config.
            client: Connection to the daemon; must outlive the cache.
            policy: Policy of its sequences; None is the daemon's default.
            model: The daemon's model to use, which a restarted daemon must be
                given anew; None finds or creates one by the shapes, the keys'
                dtype and the layers' scale.
            hash_weights: How that model makes codes.
            ttl: Idle time after which a sequence is deleted, seconds; None is
                an hour, 0 is never.
            retain_prompt: Keeps the prompt's K/V in this process too until
                the first step of at most 16 tokens, so that a prompt fed in
                several forwards is attended locally. Without it the forwards
                after the first attend in the daemon.
            on_attend: Called after each attend in the daemon. It may attend
                to `event.sequence` itself.

        Raises:
            UnsupportedModelError: The model's attention is of a kind that the
                daemon does not compute.
        """
        shapes = shapes_of(config)
        store = RowStore(
            client, shapes, model=model, policy=policy, hash_weights=hash_weights, ttl=ttl
        )
        self._build(_Shared(store, retain_prompt, on_attend), retain_prompt)

    def _build(self, shared: _Shared, retain_prompt: bool) -> None:
        self._shared = shared
        self._retain_prompt = retain_prompt
        layer_count = shared.store.shapes.layer_count
        super().__init__(layers=[SpillwayLayer(shared, index) for index in range(layer_count)])
        # The store must not lead back to the cache, or it would never go.
        self._finalizer = weakref.finalize(self, shared.store.release)

    def __enter__(self) -> SpillwayCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> SpillwayCache:
        return self.fork()

    @property
    def model(self) -> Model | None:
        """The daemon's model; None before the first forward."""
        return self._shared.store.model

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The rows' sequences; empty before the first forward."""
        return tuple(row.sequence for row in self._shared.store.rows)

    @property
    def statistics(self) -> CacheStatistics:
        """Sums over the attends that the daemon served."""
        return self._shared.statistics

    @property
    def on_attend(self) -> OnAttend | None:
        """Called after each attend in the daemon."""
        return self._shared.on_attend

    @on_attend.setter
    def on_attend(self, callback: OnAttend | None) -> None:
        self._shared.on_attend = callback

    @property
    def request_policy(self) -> Policy | None:
        """Overrides the sequences' policy for the attends that follow; None does not."""
        return self._shared.store.request_policy

    @request_policy.setter
    def request_policy(self, policy: Policy | None) -> None:
        self._shared.store.request_policy = policy

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first forward."""
        return len(self._shared.store.rows) or -1

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hands a layer's new K/V to its attention function."""
        if layer_idx == 0:
            self._check_lengths()
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def _check_lengths(self) -> None:
        lengths = {layer.length for layer in self.layers}
        if len(lengths) > 1:
            raise RuntimeError(
                f"an earlier forward ended between layers (lengths {sorted(lengths)}); "
                "call cache.reset()"
            )

    def _end_prompt(self) -> None:
        """Drops the local copy of the prompt: the daemon's is about to change."""
        self._shared.retaining = False
        for layer in self.layers:
            layer.keys = layer.values = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes row i what row beam_idx[i] was, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows that indices [n] (numbers, or a mask [B]) name."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row, next to itself."""
        self._select([row for row in range(len(self.sequences)) for _ in range(repeats)])

    def _select(self, indices: list[int]) -> None:
        if self.sequences:
            self._check_lengths()
            self._end_prompt()
            self._shared.store.select(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest tokens.

        Args:
            tokens_to_remove: Minus the number of tokens to remove, as
                transformers passes it; 0 removes none.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass a negative number to remove that many tokens"
            )
        if tokens_to_remove == 0 or not self.sequences:
            return
        self._check_lengths()
        self._end_prompt()
        # Assisted decoding counts on the model's device.
        length = max(self.layers[0].length + int(tokens_to_remove), 0)
        self._shared.store.truncate(length)
        for layer in self.layers:
            layer.length = length

    def fork(self) -> SpillwayCache:
        """Copies the cache; its sequences share the daemon's pages.

        The copy has its own statistics and no `on_attend`, and does not keep
        the prompt locally. `copy.deepcopy(cache)` does the same.
        """
        self._check_lengths()
        made = SpillwayCache.__new__(SpillwayCache)
        made._build(_Shared(self._shared.store.fork(), False, None), False)
        for mine, copy in zip(self.layers, made.layers, strict=True):
            copy.length = mine.length
            copy.is_initialized = mine.is_initialized
        return made

    def reset(self) -> None:
        """Deletes the sequences and starts empty."""
        self._shared.appends.abandon()
        self._shared.store.release()
        self._shared.pending = None
        self._shared.retaining = self._retain_prompt
        for layer in self.layers:
            layer.keys = layer.values = None
            layer.length = 0
            layer.is_initialized = False

    def close(self) -> None:
        """Deletes the sequences; the cache is empty and may be used again."""
        self.reset()
