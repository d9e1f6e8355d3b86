"""What a cache holds. It changes completely or not at all."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from contextlib import suppress
from typing import Any

import torch

from spillway_kv import forks
from spillway_kv.sequence import Sequence
from spillway_kv.transformers.handed import HandedLayer
from spillway_kv.transformers.hybrid import HybridLayer
from spillway_kv.transformers.kinds import LayerKind
from spillway_kv.transformers.layer import Shared, SpillwayLayer
from spillway_kv.transformers.phase import Phase
from spillway_kv.transformers.rows import delete
from spillway_kv.transformers.selection import Selection
from spillway_kv.transformers.sliding import SlidingLayer
from spillway_kv.transformers.states import StateLayer, cacheless_layer
from spillway_kv.transformers.support import UnsupportedModelError
from spillway_kv.transformers.texts import Texts
from spillway_kv.transformers.unfinished import Unfinished


def made_layers(
    shared: Shared, kinds: SequenceABC[LayerKind], sinks: Mapping[int, torch.Tensor]
) -> list[Any]:
    """Returns an empty layer of each kind. sinks: of layers, by their numbers."""
    made: list[Any] = []
    full_count = 0
    for index, kind in enumerate(kinds):
        if kind.window is not None:
            made.append(SlidingLayer(shared, index, kind.window, sinks.get(index)))
        elif kind.is_full and kind.state_count:
            made.append(HybridLayer(shared, full_count, index, kind, sinks.get(index)))
        elif kind.is_full:
            made.append(SpillwayLayer(shared, full_count, index, sinks.get(index)))
        elif kind.state_count:
            made.append(StateLayer(kind, index))
        else:
            made.append(cacheless_layer())
        full_count += kind.is_full
    return made


class Contents:
    """The layers of a cache with the K/V of its rows, and what is known of its text.

    Any change may be interrupted or fail. The next use undoes a forward pass that was interrupted,
    and completes any other change: whoever reads or changes more than `length` calls `settle`
    first. The sequences are deleted when this is garbage-collected. Not thread-safe.

    Attributes:
        shared: What the layers share, with the rows in the daemon.
        kinds: Kind of each layer.
        sinks: Learned attention sinks [H_q], by number of the layer.
        one_by_one: Whether the layers with a state take one token at a time, after a prompt.
        layers: The layers. transformers calls them.
        attending: Those of them that attend.
        sliding: Those with a sliding window.
        states: Those with a state.
        texts: Tokens and turns.
        expected_row_count: How many rows transformers will pass, for beams or samples. 0: unknown.
    """

    def __init__(
        self,
        shared: Shared,
        kinds: SequenceABC[LayerKind],
        sinks: Mapping[int, torch.Tensor],
        *,
        one_by_one: bool = False,
    ) -> None:
        self.shared = shared
        self.kinds = tuple(kinds)
        self.sinks = sinks
        self.one_by_one = one_by_one
        self.texts = Texts()
        self.expected_row_count = 0
        self.layers = made_layers(shared, self.kinds, sinks)
        self.attending = [each for each in self.layers if isinstance(each, HandedLayer)]
        self.sliding = [each for each in self.layers if isinstance(each, SlidingLayer)]
        self.states = [each for each in self.layers if isinstance(each, StateLayer)]
        shared.last_index = self.attending[-1].model_index
        if self.states and self.states[-1].model_index >= shared.last_index:
            shared.last_state = self.states[-1]
        # The store must not refer to this, or it would never be garbage-collected.
        self._finalizer = forks.finalizer(self, shared.store.release)

    @property
    def length(self) -> int:
        """Number of positions of completed forward passes, including left padding."""
        return self.attending[0].get_seq_length()

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
        """Raises UnsupportedModelError if this process alone has the contents of some layers."""
        here = [index for index, kind in enumerate(self.kinds) if kind.window or kind.state_count]
        if here:
            kinds = " and ".join(sorted({self.kinds[index].name for index in here}))
            raise UnsupportedModelError(
                f"the layers {here} are of the kind {kinds}, and what they keep is in this process "
                "only: such a cache cannot be attached or detached; cache.save(folder) and "
                "SpillwayCache.load work"
            )

    def check_candidates(self) -> None:
        """Raises UnsupportedModelError if candidates of assisted decoding could not be removed."""
        for layer in self.states:
            if not layer.is_croppable:
                raise UnsupportedModelError(
                    f"layer {layer.model_index} is of the kind {layer.kind.name}: it keeps one "
                    "state, from which rejected candidates cannot be removed, so there is no "
                    "assisted decoding of this model"
                )

    # Forward passes.

    def announce(self, token_count: int) -> None:
        """Begins a forward pass of so many tokens of a model that has layers with a state.

        They change before the first layer attends. May be repeated before the forward pass.

        Raises:
            UnsupportedModelError: The model cannot take so many tokens now. Nothing has changed.
        """
        if self.one_by_one and token_count > 1 and self.length > 0:
            raise UnsupportedModelError(
                f"{token_count} tokens after {self.length} in the cache: layers of the kind "
                f"{self.states[0].kind.name} of this model forget their state when several tokens "
                "follow it; give the whole prompt to an empty cache at once, or one token at a time"
            )
        if self.shared.unfinished is not None and not self.shared.touched:
            # Another mask of the same forward pass, or one that a layer with a state has ended.
            for state in self.states:
                state.undo_state(self.length)
            return
        self.settle()
        self._multiply(self.expected_row_count)
        self._begin_forward()

    def begin_states(self) -> None:
        """The same for the first layer with a state, if nobody has asked for a mask."""
        if self.shared.unfinished is None:
            self._begin_forward()

    def begin_forward(self, batch_size: int) -> None:
        """Begins a forward pass of so many rows. The last layer ends it."""
        shared = self.shared
        if shared.pending is not None and len(self.attending) == 1:
            # With more layers, the second layer notices that the first one was not attended.
            pending, shared.pending = shared.pending, None
            pending.refuse()
        if self.states and shared.unfinished is not None and not shared.touched:
            # Begun already, by a layer with a state.
            shared.touched = True
            return
        lost = bool(self.states) and shared.unfinished is not None
        self.settle()
        if lost:
            raise RuntimeError(
                "the forward pass before was interrupted, and this one has no mask of the cache; "
                "both are undone, so call the model again"
            )
        if batch_size == self.expected_row_count:
            self._multiply(batch_size)
        self._begin_forward()
        shared.touched = True

    def _multiply(self, row_count: int) -> None:
        """Repeats the rows for beams or samples, so that there are at least so many."""
        held = len(self.shared.store.rows)
        if held and row_count > held:
            self.repeat(row_count // held)

    def _begin_forward(self) -> None:
        length = self.attending[0].length
        for layer in self.states:
            layer.remember_state(length)
        self._begin(length)
        self.shared.touched = False

    def _begin(self, length: int) -> None:
        """Notes that rows will change, and that an interruption cuts them to `length` positions."""
        shared = self.shared
        rows = shared.store.rows
        paddings = tuple(min(row.padding, length) for row in rows) if rows else None
        shared.touched = True
        shared.unfinished = Unfinished(length, paddings, copy.copy(shared.phase))

    def settle(self) -> None:
        """Undoes a forward pass that was interrupted, if there was one, and ends a selection."""
        self.finish_selection()
        shared = self.shared
        unfinished = shared.unfinished
        if unfinished is None:
            return
        # Before that, only layers with a state can have changed.
        length = unfinished.undo(shared.store) if shared.touched else unfinished.length
        for layer in self.sliding:
            layer.undo(length)
        for state in self.states:
            state.undo_state(length)
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
        held = [layer.selected(indices) for layer in self.sliding]
        # A forward pass has ended, so all states are of the same length.
        states = [layer.held_state(self.length).selected(indices) for layer in self.states]
        rows = store.selected(indices)
        kept = set(map(id, rows))
        dropped = [row for row in store.rows if id(row) not in kept]
        # From here on an interruption does not prevent the change: the next use completes it.
        self.shared.selection = Selection(rows, dropped, held, states, texts)
        self.finish_selection()

    def finish_selection(self) -> None:
        """Completes a change of the rows, if there is one."""
        selection = self.shared.selection
        if selection is None:
            return
        self.shared.phase.end_prompt()
        self.shared.store.rows = selection.rows
        for layer, contents in zip(self.sliding, selection.held, strict=True):
            layer.hold(contents)
        for state, chosen in zip(self.states, selection.states, strict=True):
            state.hold_state(chosen)
        self.texts = selection.texts
        self.shared.selection = None
        delete(selection.dropped)

    # Lengths.

    def remove(self, count: int) -> None:
        """Removes the newest tokens.

        Raises:
            ValueError: More tokens than a layer with a sliding window or a state can remove.
        """
        self.settle()
        self.shared.phase.note_crop()
        if count == 0 or not self.sequences():
            return
        now = self.length
        length = max(now - count, 0)
        self._check_cut(length, now)
        self.shared.phase.end_prompt()
        self._begin(length)
        self.shared.store.truncate(length)
        self.set_length(length)
        self.shared.unfinished = None

    def _check_cut(self, length: int, now: int) -> None:
        for layer in self.sliding:
            layer.check_cut(length)
        for state in self.states:
            state.check_state_cut(length, now)

    def reachable(self, most: int) -> int:
        """Returns the largest length up to `most` to which all layers can be cut."""
        self.settle()
        now = self.length
        for length in (most, *(layer.length_before for layer in self.states[:1])):
            if length <= most:
                with suppress(ValueError):
                    self._check_cut(length, now)
                    return length
        return 0

    def set_length(self, length: int) -> None:
        """Says how many positions the rows have, which are not more than before."""
        for sliding in self.sliding:
            sliding.cut(length)
        for state in self.states:
            state.cut_state(length)
        for layer in self.attending:
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
        for layer in self.attending:
            layer.length = length
            layer.is_initialized = True

    # The whole.

    def fork(self) -> Contents:
        """Returns a copy. Its sequences share the daemon's pages."""
        self.settle()
        made = Contents(
            Shared(self.shared.store.fork(), None),
            self.kinds,
            self.sinks,
            one_by_one=self.one_by_one,
        )
        made.shared.phase = self.shared.phase.fork()
        made.texts = self.texts.fork()
        for mine, other in zip(self.attending, made.attending, strict=True):
            mine.fork_into(other)
        for state, copied in zip(self.states, made.states, strict=True):
            copied.hold_state(state.held_state(self.length))
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
        for layer in self.attending:
            layer.reset()
        for state in self.states:
            state.reset()
