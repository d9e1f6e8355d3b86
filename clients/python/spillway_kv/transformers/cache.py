"""A transformers cache whose K/V are in the daemon."""

from __future__ import annotations

import copy
import datetime
from types import TracebackType
from typing import Any

import torch
from transformers import Cache

from spillway_kv import forks
from spillway_kv.client import Client
from spillway_kv.indices import HashWeights, RotationHash
from spillway_kv.policy import Policy
from spillway_kv.prefill import BLOCK_TOKEN_COUNT
from spillway_kv.quality import chosen_policy
from spillway_kv.results import Model
from spillway_kv.sequence import Sequence
from spillway_kv.transformers.chats import Chats
from spillway_kv.transformers.handed import HandedLayer
from spillway_kv.transformers.identity import config_fields
from spillway_kv.transformers.layer import Shared, SpillwayLayer
from spillway_kv.transformers.phase import Phase
from spillway_kv.transformers.rows import RowStore, delete
from spillway_kv.transformers.selection import Selection, row_numbers
from spillway_kv.transformers.sliding import SlidingLayer
from spillway_kv.transformers.statistics import CacheStatistics, OnAttend
from spillway_kv.transformers.support import shapes_of, windows_of
from spillway_kv.transformers.texts import Texts
from spillway_kv.transformers.unfinished import Unfinished


class SpillwayCache(Chats, Cache):
    """A cache whose K/V are in the daemon, with one sequence per batch row.

    Use it with `model.set_attn_implementation("spillway")`, and pass it as `cache`, or as
    `past_key_values` before transformers 5.24 (`cache_argument`). Prompts are attended on the
    model's device, to all tokens, while their K/V are appended. If a prompt comes in chunks, the
    K/V of earlier tokens are fetched block by block (`spillway_kv.prefill`), so the device holds
    two blocks of one layer, whatever the length of the prompt. Later tokens are appended and
    attended in the daemon. Attention is sparse for decoding, including the candidates of
    assisted decoding (up to 16 at once). It is exact for the short ends of prompts, also up to
    16 tokens. Batches with left padding, beam search, assisted decoding and later turns on the
    same cache are supported. It is not thread-safe.

    Several tokens at once belong to a prompt, except for candidates of assisted decoding. One
    token is a decode step. Directly after two or more forward passes of a prompt it may be the
    last chunk of the prompt, and is attended exactly. These are still taken for decoding: the
    last token of a prompt with one token more than `prefill_chunk_size`, chunks of one token,
    and the first tokens of a direct call of the model after `generate()` has done assisted
    decoding on the cache.

    For layers with a sliding window (Gemma 2 and 3 without soft caps, Qwen2), the newest K/V
    stay on the model's device: those of the window and 128 tokens more, so that 128 tokens can
    be removed again. The daemon's model has only the other layers (`model_layers`). `save` and
    other methods that pass a cache on refuse such models.

    Ctrl-C or an exception in a forward pass leaves the cache as it was before. `length` tells
    how long that is, and the next use undoes the rest. `save` and `load` store a cache, `detach`
    and `attach` pass it to another process, and `mark` and `truncate` go back to a turn.

    The sequences are deleted by `close()`, by `reset()`, at the end of a `with` block, or when
    the cache is garbage-collected. The daemon's model, which caches of the same config share,
    stays. `client.delete_model(cache.model)` deletes it.

    A forward pass raises `spillway_kv.NotFound` if a sequence was deleted or has expired, and its
    subclass `spillway_kv.DaemonRestarted` if the daemon has restarted and lost it. After `reset()`
    the cache starts empty on the present daemon, with a model of the same kind.

    Attributes:
        statistics: Sums over the attends in the daemon.
    """

    def __init__(
        self,
        config: Any,
        client: Client,
        *,
        policy: Policy | None = None,
        quality: str | None = None,
        model: Model | None = None,
        hash_weights: HashWeights | None = RotationHash(),  # noqa: B008
        ttl: datetime.timedelta | float | None = None,
        on_attend: OnAttend | None = None,
        prefill_block_token_count: int = BLOCK_TOKEN_COUNT,
    ) -> None:
        """Checks that the model is supported. Nothing is sent yet.

        Args:
            config: The model's config.
            client: Connection to the daemon. It must outlive the cache.
            policy: Policy of the sequences. None means the daemon's default.
            quality: The policy in one word: `exact`, `high`, `default` or `fast`
                (`spillway_kv.quality`). Not together with `policy`.
            model: The daemon's model to use. If the daemon restarts, it must be created again.
                None finds or creates a model by the config, the dtype of the keys and the scale
                of the layers.
            hash_weights: How that model computes codes.
            ttl: Idle time after which a sequence is deleted, seconds. None means an hour, 0
                means never.
            on_attend: Called after each attend in the daemon. It may attend
                to `event.sequence` itself.
            prefill_block_token_count: Number of tokens of a block. Two blocks are on the device
                while a prompt is processed in chunks.

        Raises:
            UnsupportedModelError: The daemon does not support the model's kind of attention.
            ValueError: Both `policy` and `quality` are given, or `quality` is another word.
        """
        shapes = shapes_of(config)
        store = RowStore(
            client,
            shapes,
            model=model,
            policy=chosen_policy(policy, quality),
            hash_weights=hash_weights,
            ttl=ttl,
            prefill_block_token_count=prefill_block_token_count,
            config_fields=config_fields(config),
        )
        self._build(Shared(store, on_attend), windows_of(config))

    def _build(self, shared: Shared, windows: list[int | None]) -> None:
        self._shared = shared
        self._windows = windows
        self._texts = Texts()
        # How many rows transformers makes of each row of a prompt, for beams or samples.
        self._repeats = 1
        layers: list[HandedLayer] = []
        for model_index, window in enumerate(windows):
            if window is None:
                layers.append(SpillwayLayer(shared, windows[:model_index].count(None), model_index))
            else:
                layers.append(SlidingLayer(shared, model_index, window))
        shared.layer_count = len(layers)
        Cache.__init__(self, layers=layers)
        # The store must not refer to the cache, or the cache would never be garbage-collected.
        self._finalizer = forks.finalizer(self, shared.store.release)

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
        """The daemon's model. None before the first forward pass."""
        return self._shared.store.model

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The sequences of the rows, after all appends. Empty before the first forward pass.

        Raises:
            SpillwayError: An append has failed.
        """
        self._shared.store.suspend()
        return tuple(row.sequence for row in self._shared.store.rows)

    @property
    def statistics(self) -> CacheStatistics:
        """Sums over the attends that the daemon served."""
        self._shared.count()
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
        """Policy that overrides that of the sequences for the following attends, or None."""
        return self._shared.store.request_policy

    @request_policy.setter
    def request_policy(self, policy: Policy | None) -> None:
        self._shared.store.request_policy = policy

    @property
    def model_layers(self) -> tuple[int, ...]:
        """The layers of the model that are in the daemon: those with full attention."""
        return tuple(index for index, window in enumerate(self._windows) if window is None)

    @property
    def batch_size(self) -> int:
        """Number of rows. -1 before the first forward pass."""
        return len(self._shared.store.rows) or -1

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Passes the new K/V of a layer to its attention function."""
        if layer_idx == 0:
            self._begin_forward(key_states.shape[0])
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    @property
    def _is_user_defined(self) -> bool:
        """True. generate() of transformers 5.17 or later sets it on a cache that it was given."""
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        self._shared.phase.begin_generation()

    def activate_past_recording(self) -> None:
        """Notes that assisted decoding begins, whose candidates do not belong to a prompt."""
        self._shared.phase.begin_assisted_decoding()

    @property
    def _sliding(self) -> list[SlidingLayer]:
        return [layer for layer in self.layers if isinstance(layer, SlidingLayer)]

    def _begin_forward(self, batch_size: int) -> None:
        shared = self._shared
        if shared.pending is not None and len(self.layers) == 1:
            # With more layers, the second layer notices that the first one was not attended.
            pending, shared.pending = shared.pending, None
            pending.refuse()
        self._settle()
        if self._repeats > 1 and batch_size == self._repeats * len(shared.store.rows):
            self.batch_repeat_interleave(self._repeats)
        self._begin(self.layers[0].length)

    def _begin(self, length: int) -> None:
        """Notes that rows will change, and that an interruption cuts them to `length` positions."""
        shared = self._shared
        rows = shared.store.rows
        paddings = tuple(min(row.padding, length) for row in rows) if rows else None
        shared.unfinished = Unfinished(length, paddings, copy.copy(shared.phase))

    def _settle(self) -> None:
        """Undoes a forward pass that was interrupted, if there was one, and ends a selection."""
        self._finish_selection()
        shared = self._shared
        unfinished = shared.unfinished
        if unfinished is None:
            return
        length = unfinished.undo(shared.store)
        for layer in self._sliding:
            layer.undo(length)
        shared.pending = None
        shared.phase = copy.copy(unfinished.phase)
        self._set_length(length)
        shared.unfinished = None

    def _set_length(self, length: int) -> None:
        for sliding in self._sliding:
            sliding.cut(length)
        for layer in self.layers:
            layer.length = length
            layer.is_initialized = layer.is_initialized and bool(self._shared.store.rows)
        self._texts.cut(length)

    def _end_prompt(self) -> None:
        """Notes that the rows are about to change."""
        self._shared.phase.end_prompt()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replaces row i by a copy of row beam_idx[i], for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps only the rows in indices [n] (numbers, or a mask [B])."""
        self._settle()
        if self.sequences:
            self._select(row_numbers(indices, len(self.sequences)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row, next to itself."""
        self._settle()
        if self.sequences:
            if repeats < 1:
                raise ValueError(f"rows cannot be repeated {repeats} times")
            self._select([row for row in range(len(self.sequences)) for _ in range(repeats)])

    def _select(self, indices: list[int]) -> None:
        """Makes row i a copy of what row indices[i] was. If this fails, nothing has changed."""
        store = self._shared.store
        texts = self._texts.selected(indices, len(store.rows))
        held = [layer.selected(indices) for layer in self._sliding]
        rows = store.selected(indices)
        kept = set(map(id, rows))
        dropped = [row for row in store.rows if id(row) not in kept]
        # From here on an interruption does not prevent the change: the next use completes it.
        self._shared.selection = Selection(rows, dropped, held, texts)
        self._finish_selection()

    def _finish_selection(self) -> None:
        """Completes a change of the rows, if there is one."""
        selection = self._shared.selection
        if selection is None:
            return
        self._end_prompt()
        self._shared.store.rows = selection.rows
        for layer, contents in zip(self._sliding, selection.held, strict=True):
            layer.hold(contents)
        self._texts = selection.texts
        self._shared.selection = None
        delete(selection.dropped)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest tokens.

        Args:
            tokens_to_remove: Minus the number of tokens to remove, as transformers passes it. 0
                removes none.

        Raises:
            ValueError: More tokens than a layer with a sliding window can remove: it keeps 128
                tokens more than the window.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass a negative number to remove that many tokens"
            )
        self._settle()
        self._shared.phase.note_crop()
        if tokens_to_remove == 0 or not self.sequences:
            return
        # In assisted decoding the number is a tensor on the model's device.
        length = max(self.layers[0].length + int(tokens_to_remove), 0)
        for layer in self._sliding:
            layer.check_cut(length)
        self._end_prompt()
        self._begin(length)
        self._shared.store.truncate(length)
        self._set_length(length)
        self._shared.unfinished = None

    def fork(self) -> SpillwayCache:
        """Copies the cache. The sequences of the copy share the daemon's pages.

        The copy has its own statistics and no `on_attend`. `copy.deepcopy(cache)`
        does the same.
        """
        self._settle()
        made = SpillwayCache.__new__(SpillwayCache)
        made._build(Shared(self._shared.store.fork(), None), self._windows)
        made._shared.phase = self._shared.phase.fork()
        made._texts = self._texts.fork()
        for mine, other in zip(self.layers, made.layers, strict=True):
            mine.fork_into(other)
        return made

    def reset(self) -> None:
        """Deletes the sequences and starts empty."""
        self._finish_selection()
        self._shared.store.release()
        self._begin_empty()

    def _begin_empty(self) -> None:
        self._shared.store.keeps = False
        self._shared.pending = None
        self._shared.unfinished = None
        self._shared.phase = Phase()
        self._texts = Texts()
        for layer in self.layers:
            layer.reset()

    def close(self) -> None:
        """Deletes the sequences. The cache is then empty and may be used again."""
        self.reset()
