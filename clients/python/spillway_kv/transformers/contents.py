"""What a cache holds. It changes completely or not at all."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC

import torch

from spillway_kv import forks
from spillway_kv.sequence import Sequence
from spillway_kv.transformers.handed import HandedLayer
from spillway_kv.transformers.layer import Shared, SpillwayLayer
from spillway_kv.transformers.phase import Phase
from spillway_kv.transformers.rows import delete
from spillway_kv.transformers.selection import Selection
from spillway_kv.transformers.sliding import SlidingLayer
from spillway_kv.transformers.support import UnsupportedModelError
from spillway_kv.transformers.texts import Texts
from spillway_kv.transformers.unfinished import Unfinished


class Contents:
    """The layers of a cache with the K/V of its rows, and what is known of its text.

    Any change may be interrupted or fail. The next use undoes a forward pass that was interrupted,
    and completes any other change: whoever reads or changes more than `length` calls `settle`
    first. The sequences are deleted when this is garbage-collected. Not thread-safe.

    Attributes:
        shared: What the layers share, with the rows in the daemon.
        windows: Size of each layer's sliding window. None: the layer has full attention.
        sinks: Learned attention sinks [H_q], by number of the layer.
        layers: The layers. transformers calls them.
        texts: Tokens and turns.
        repeats: How many rows transformers makes of each row of a prompt, for beams or samples.
    """

    def __init__(
        self,
        shared: Shared,
        windows: SequenceABC[int | None],
        sinks: Mapping[int, torch.Tensor],
    ) -> None:
        self.shared = shared
        self.windows = tuple(windows)
        self.sinks = sinks
        self.texts = Texts()
        self.repeats = 1
        self.layers: list[HandedLayer] = []
        for model_index, window in enumerate(self.windows):
            if window is None:
                index = self.windows[:model_index].count(None)
                self.layers.append(
                    SpillwayLayer(shared, index, model_index, sinks.get(model_index))
                )
            else:
                self.layers.append(
                    SlidingLayer(shared, model_index, window, sinks.get(model_index))
                )
        shared.layer_count = len(self.layers)
        # The store must not refer to this, or it would never be garbage-collected.
        self._finalizer = forks.finalizer(self, shared.store.release)

    @property
    def _sliding(self) -> list[SlidingLayer]:
        return [layer for layer in self.layers if isinstance(layer, SlidingLayer)]

    @property
    def length(self) -> int:
        """Number of positions of completed forward passes, including left padding."""
        return self.layers[0].get_seq_length()

    @property
    def paddings(self) -> tuple[int, ...]:
        """Left padding of each row, positions."""
        return tuple(row.padding for row in self.shared.store.rows)

    def sequences(self) -> tuple[Sequence, ...]:
        """Returns the sequences of the rows, after all appends.

        Raises:
            SpillwayError: An append has failed.
        """
        self.shared.store.suspend()
        return tuple(row.sequence for row in self.shared.store.rows)

    def check_all_in_daemon(self) -> None:
        """Raises UnsupportedModelError if this process alone has the K/V of some layers."""
        here = [layer.model_index for layer in self._sliding]
        if here:
            raise UnsupportedModelError(
                f"the layers {here} have a sliding window, and their K/V are in this process "
                "only: such a cache cannot be saved, loaded, attached or detached"
            )

    # Forward passes.

    def begin_forward(self, batch_size: int) -> None:
        """Begins a forward pass of so many rows. The last layer's attend ends it."""
        shared = self.shared
        if shared.pending is not None and len(self.layers) == 1:
            # With more layers, the second layer notices that the first one was not attended.
            pending, shared.pending = shared.pending, None
            pending.refuse()
        self.settle()
        if self.repeats > 1 and batch_size == self.repeats * len(shared.store.rows):
            self.repeat(self.repeats)
        self._begin(self.layers[0].length)

    def _begin(self, length: int) -> None:
        """Notes that rows will change, and that an interruption cuts them to `length` positions."""
        shared = self.shared
        rows = shared.store.rows
        paddings = tuple(min(row.padding, length) for row in rows) if rows else None
        shared.unfinished = Unfinished(length, paddings, copy.copy(shared.phase))

    def settle(self) -> None:
        """Undoes a forward pass that was interrupted, if there was one, and ends a selection."""
        self.finish_selection()
        shared = self.shared
        unfinished = shared.unfinished
        if unfinished is None:
            return
        length = unfinished.undo(shared.store)
        for layer in self._sliding:
            layer.undo(length)
        shared.pending = None
        shared.phase = copy.copy(unfinished.phase)
        self.set_length(length)
        shared.unfinished = None

    # Rows.

    def repeat(self, count: int) -> None:
        """Repeats every row, next to itself."""
        self.select([row for row in range(len(self.paddings)) for _ in range(count)])

    def select(self, indices: list[int]) -> None:
        """Makes row i a copy of what row indices[i] was. If this fails, nothing has changed."""
        store = self.shared.store
        texts = self.texts.selected(indices, len(store.rows))
        held = [layer.selected(indices) for layer in self._sliding]
        rows = store.selected(indices)
        kept = set(map(id, rows))
        dropped = [row for row in store.rows if id(row) not in kept]
        # From here on an interruption does not prevent the change: the next use completes it.
        self.shared.selection = Selection(rows, dropped, held, texts)
        self.finish_selection()

    def finish_selection(self) -> None:
        """Completes a change of the rows, if there is one."""
        selection = self.shared.selection
        if selection is None:
            return
        self.shared.phase.end_prompt()
        self.shared.store.rows = selection.rows
        for layer, contents in zip(self._sliding, selection.held, strict=True):
            layer.hold(contents)
        self.texts = selection.texts
        self.shared.selection = None
        delete(selection.dropped)

    # Lengths.

    def remove(self, count: int) -> None:
        """Removes the newest tokens.

        Raises:
            ValueError: More tokens than a layer with a sliding window can remove.
        """
        self.settle()
        self.shared.phase.note_crop()
        if count == 0 or not self.sequences():
            return
        length = max(self.layers[0].length - count, 0)
        for layer in self._sliding:
            layer.check_cut(length)
        self.shared.phase.end_prompt()
        self._begin(length)
        self.shared.store.truncate(length)
        self.set_length(length)
        self.shared.unfinished = None

    def set_length(self, length: int) -> None:
        """Says how many positions the rows have, which are not more than before."""
        for sliding in self._sliding:
            sliding.cut(length)
        for layer in self.layers:
            layer.length = length
            layer.is_initialized = layer.is_initialized and bool(self.shared.store.rows)
        self.texts.cut(length)

    def adopt(self, length: int, *, check_config: bool) -> None:
        """Takes over the store's rows, which have `length` positions, from another cache.

        Raises:
            ModelMismatchError: They are of a model with another config.
            ValueError: They are of several models, or of one with other shapes.
        """
        store = self.shared.store
        model = store.rows[0].sequence.model
        if any(row.sequence.model != model for row in store.rows):
            raise ValueError("the sequences of the rows are of several models")
        store.model.adopt(model, check_config=check_config)
        for layer in self.layers:
            layer.length = length
            layer.is_initialized = True

    # The whole.

    def fork(self) -> Contents:
        """Returns a copy. Its sequences share the daemon's pages."""
        self.settle()
        made = Contents(Shared(self.shared.store.fork(), None), self.windows, self.sinks)
        made.shared.phase = self.shared.phase.fork()
        made.texts = self.texts.fork()
        for mine, other in zip(self.layers, made.layers, strict=True):
            mine.fork_into(other)
        return made

    def reset(self) -> None:
        """Deletes the sequences and starts empty."""
        self.finish_selection()
        self.shared.store.release()
        self.begin_empty()

    def begin_empty(self) -> None:
        """Starts empty, after the rows are gone."""
        self.shared.store.keeps = False
        self.shared.pending = None
        self.shared.unfinished = None
        self.shared.phase = Phase()
        self.texts = Texts()
        for layer in self.layers:
            layer.reset()
