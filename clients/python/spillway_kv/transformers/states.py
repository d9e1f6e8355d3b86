"""Layers with a state instead of K/V: convolutions, linear attention, state spaces."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import cache_utils
from transformers.cache_utils import LinearAttentionLayer

from spillway_kv.transformers.kinds import CONVOLUTION, LayerKind
from spillway_kv.transformers.sliding import SPARE_TOKEN_COUNT


class HeldState(NamedTuple):
    """The state of a layer. The tensors are never changed in place.

    Attributes:
        convolved: Newest inputs of a convolution [B, channels, columns], by the state's number.
        recurrent: Recurrent states [B, ...], by the state's number.
        kernel_sizes: Columns that a convolution sees, by the state's number.
        columns: Positions that convolutions have seen.
        length: Positions of the cache.
    """

    convolved: dict[int, torch.Tensor]
    recurrent: dict[int, torch.Tensor]
    kernel_sizes: dict[int, int]
    columns: int
    length: int

    def selected(self, indices: list[int]) -> HeldState:
        """Returns a state of which row i is row indices[i] of this one."""

        def chosen(tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
            rows = {
                each.device: torch.tensor(indices, device=each.device) for each in tensors.values()
            }
            return {i: each.index_select(0, rows[each.device]) for i, each in tensors.items()}

        return self._replace(convolved=chosen(self.convolved), recurrent=chosen(self.recurrent))


class StateLayer(LinearAttentionLayer):
    """A layer whose state is kept as transformers keeps it, on the model's device.

    Models change recurrent states in place, and tell nobody. So a copy is taken before each forward
    pass, and the state can go back to it, but to no other length. A convolution keeps its newest
    inputs, and some more. They are never changed in place, and it can go back by as many tokens.

    The methods have names of their own, because a hybrid layer also has K/V.
    """

    is_compileable = False

    def __init__(self, kind: LayerKind, model_index: int) -> None:
        self.kind = kind
        # Index of the layer in the model.
        self.model_index = model_index
        self.is_convolution = kind.name == CONVOLUTION
        LinearAttentionLayer.__init__(self, number_of_states=kind.state_count)
        self._columns = 0
        self._before: HeldState | None = None
        # Whether the last state of this forward pass was given.
        self._written = False

    @property
    def record_past(self) -> bool:
        """Whether models must call update_conv_state in decode steps too."""
        return self.is_convolution

    @record_past.setter
    def record_past(self, value: bool) -> None:
        pass

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be removed again, as assisted decoding does."""
        return self.is_convolution

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Takes the new inputs of a convolution [B, channels, T]. Returns them after older ones."""
        full: torch.Tensor = super().update_conv_state(
            conv_states, state_idx, conv_kernel_size=conv_kernel_size, **kwargs
        )
        if not self.is_convolution:
            return full
        kernel, count = self.conv_kernel_size[state_idx], conv_states.shape[-1]
        most = kernel + SPARE_TOKEN_COUNT
        kept = full[..., -most:]
        self.conv_states[state_idx] = kept.clone() if full.shape[-1] > 2 * most else kept
        if state_idx == self.number_of_states - 1:
            self._columns += count
            self._written = True
        return full[..., -(kernel + count) :]

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Takes a new recurrent state [B, ...], and returns it."""
        state: torch.Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        self._written = True
        return state

    def remember_state(self, length: int) -> None:
        """Begins a forward pass of a cache with `length` positions, which may be undone."""
        self._before = self.held_state(length)
        self._written = False

    def state_advanced(self) -> bool:
        """Whether the layer's part of the forward pass is done. Only for the last layer.

        If the model has changed a recurrent state in place, this compares it with its copy.
        """
        if self._written or self._before is None:
            return self._written
        before = self._before.recurrent
        return bool(before) and not all(
            torch.equal(self.recurrent_states[i], each) for i, each in before.items()
        )

    def held_state(self, length: int) -> HeldState:
        """Returns the state of a cache with `length` positions."""
        numbers = [i for i, has in self.has_previous_state.items() if has]
        convolved = [i for i in numbers if self.is_conv_states_initialized[i]]
        recurrent = [i for i in numbers if self.is_recurrent_states_initialized[i]]
        return HeldState(
            {i: self._own(self.conv_states[i]) for i in convolved},
            {i: self._own(self.recurrent_states[i]) for i in recurrent},
            {i: self.conv_kernel_size[i] for i in convolved},
            self._columns,
            length,
        )

    def hold_state(self, state: HeldState) -> None:
        """Replaces the state."""
        self.clear_state()
        for i, tensor in state.convolved.items():
            self.conv_states[i] = self._own(tensor)
            self.conv_kernel_size[i] = state.kernel_sizes[i]
            self.is_conv_states_initialized[i] = self.has_previous_state[i] = True
            self.dtype, self.device = tensor.dtype, tensor.device
        for i, tensor in state.recurrent.items():
            self.recurrent_states[i] = self._own(tensor)
            self.is_recurrent_states_initialized[i] = self.has_previous_state[i] = True
        self._columns = state.columns

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.is_convolution else tensor.clone()

    def clear_state(self) -> None:
        """Makes the layer empty, for a batch of any size."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)
        self._columns = 0
        self._before = None
        self._written = False

    def reset(self) -> None:
        """Makes the layer empty."""
        self.clear_state()

    @property
    def length_before(self) -> int:
        """Positions of the cache before the last forward pass; 0 if that state is gone."""
        return 0 if self._before is None else self._before.length

    def check_state_cut(self, length: int, now: int) -> None:
        """Checks that the state can go back from `now` to `length` positions.

        Raises:
            ValueError: It cannot.
        """
        before = self._before
        if length in (0, now) or (before is not None and before.length == length):
            return
        if self.is_convolution:
            most = self._spare()
            if self._columns - length <= most:
                return
            can = f"the layer keeps the inputs of so many that {most} can"
        elif before is not None and before.length < now:
            can = f"the layer keeps one state, and that before the {now - before.length} newest"
        else:
            can = "the layer keeps one state"
        raise ValueError(
            f"{now - length} tokens cannot be removed: layer {self.model_index} is of the kind "
            f"{self.kind.name}, and {can}; cache.fork() before keeps a text to which you want to "
            "return, and cache.reset() begins again"
        )

    def _spare(self) -> int:
        """Number of newest inputs that a convolution can do without."""
        spare = self._columns
        for i, tensor in self.conv_states.items():
            if tensor is not None and tensor.shape[-1] < self._columns:
                spare = min(spare, tensor.shape[-1] - self.conv_kernel_size[i])
        return spare

    def cut_state(self, length: int) -> None:
        """Goes back to `length` positions. `check_state_cut` must have passed. May be repeated."""
        before = self._before
        if length == 0:
            self.clear_state()
        elif before is not None and before.length == length:
            self.hold_state(before)
            self._before = before
        elif self.is_convolution and self._columns > length:
            for i, tensor in self.conv_states.items():
                self.conv_states[i] = tensor[..., : tensor.shape[-1] - (self._columns - length)]
            self._columns = length

    def undo_state(self, length: int) -> None:
        """Goes back to `length` positions, after a forward pass or a cut was interrupted.

        Raises:
            ValueError: The state was not kept, because an earlier forward pass was lost too.
        """
        before = self._before
        kept = before is not None and before.length == length
        if (
            not kept
            and length > 0
            and not (self.is_convolution and self._columns - length <= self._spare())
        ):
            raise ValueError(
                f"the state of layer {self.model_index} ({self.kind.name}) after {length} tokens "
                "is gone; cache.reset() begins again"
            )
        self.cut_state(length)


def cacheless_layer() -> Any:
    """Returns what transformers has in a cache for a layer without attention and state."""
    kinds = cache_utils.DYNAMIC_LAYER_TYPE_MAPPING
    # Before transformers 5.20 or so it is a layer with a state that stays empty.
    return kinds["dummy" if "dummy" in kinds else "mlp"]()
