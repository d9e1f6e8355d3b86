"""Attends of steps on several daemons, with one call of libspillway."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Any

from spillway_kv._native import attend_at_once
from spillway_kv._native_step import (
    F32,
    NativeStep,
    Share,
    Tensors,
    address_of,
    back,
    empty_like,
    put_all,
)
from spillway_kv.step_state import StepState

_F32_BYTES = 4


@dataclass(frozen=True)
class Portion:
    """The part of the common arrays that belongs to one step.

    Attributes:
        step: A step of one daemon.
        first_layer: Layer of the whole model that is layer 0 of the step.
        sequences: Indices of its sequences in the arrays.
        heads: Its KV heads.
        query_heads: Its query heads.
    """

    step: StepState
    first_layer: int
    sequences: range
    heads: slice
    query_heads: slice

    def of(self, array: Any) -> Any:
        """Returns its part of the outputs or log-sum-exps of all, [B, T, H_q, ...]."""
        mine = self.sequences
        return array[mine.start : mine.stop : mine.step, :, self.query_heads]

    def lse_offset(self, lse: Any) -> int | None:
        """Offset in bytes at which its part of the log-sum-exps of all [B, T, H_q] begins.

        None if its part is not contiguous. libspillway has no strides for log-sum-exps, so such a
        part gets its own array.
        """
        _, tokens, heads = lse.shape
        has_all = self.query_heads == slice(0, heads)
        dense = (
            has_all or tokens == 1
            if len(self.sequences) == 1
            else has_all and self.sequences.step == 1
        )
        first = self.sequences.start * tokens * heads + self.query_heads.start
        return _F32_BYTES * first if dense else None


class AttendsAtOnce:
    """Steps on several daemons that serve a layer together. Not thread-safe.

    All daemons are asked before the first answer is waited for. They read and write the common
    arrays in place.

    Attributes:
        portions: The parts of the arrays that belong to the steps.
    """

    def __init__(self, portions: SequenceABC[Portion]) -> None:
        """Takes steps for which `possible` returns True."""
        self.portions = list(portions)
        self._natives: list[Any] = [portion.step.native for portion in portions]
        self._shares = (Share * len(portions))()
        for share, portion, native in zip(self._shares, portions, self._natives, strict=True):
            assert isinstance(native, NativeStep)
            # `attend` holds the steps' pointers while the library uses them.
            share.step, share.layer_first = native.handle.held().value, portion.first_layer
            share.sequence_first = portion.sequences.start
            share.sequence_every = portion.sequences.step
            share.query_head_first = portion.query_heads.start
            share.kv_head_first = portion.heads.start
        self._shares_at = ctypes.byref(self._shares)
        self._tensors = Tensors()
        self._tensors_at = ctypes.byref(self._tensors)
        self._lse_shape: Any = None
        self._lse_offsets: list[int | None] = []
        self._last: tuple[Any, Any] = (None, None)

    @staticmethod
    def possible(portions: SequenceABC[Portion]) -> bool:
        """Whether all steps have begun, and none must be begun again."""
        return all(isinstance(portion.step.native, NativeStep) for portion in portions)

    def begun(self) -> bool:
        """Whether the steps are still the same, that is, none was begun again."""
        return all(
            portion.step.native is native
            for portion, native in zip(self.portions, self._natives, strict=True)
        )

    def attend(
        self, layer: int, rows: tuple[Any, Any, Any], out_dtype: int
    ) -> tuple[Any, Any, list[int]]:
        """Attends on all daemons.

        Args:
            layer: Layer of the whole model.
            rows: q, k and v of all, as for `DecodeStep.attend`, already checked.
            out_dtype: Element type of the output.

        Returns:
            Output and log-sum-exp of all, and the indices of the portions that failed. The parts of
            these portions are not written. Their steps may be asked again.

        Raises:
            ValueError: A step is closed.
        """
        native: Any = None
        for native in self._natives:
            native.check_open()
        out, lse, kept = put_all(self._tensors, *rows, out_dtype)
        if lse.shape != self._lse_shape:
            self._lse_shape = lse.shape
            self._lse_offsets = [portion.lse_offset(lse) for portion in self.portions]
        apart: dict[int, Any] = {}
        begin = self._tensors.lse
        for index, (share, offset) in enumerate(zip(self._shares, self._lse_offsets, strict=True)):
            if offset is None:
                part = self.portions[index].of(lse)
                apart[index] = empty_like(rows[0], F32, tuple(part.shape))
                share.lse = address_of(apart[index])
            else:
                share.lse = begin + offset
        steps = [each.handle for each in self._natives]
        library = native.channel.library
        well = attend_at_once(library, steps, self._shares_at, layer, self._tensors_at)
        del kept
        for index, part in apart.items():
            self.portions[index].of(lse)[:] = part
        failed = [] if well else [i for i, share in enumerate(self._shares) if share.code]
        for index, portion in enumerate(self.portions):
            if index not in failed:
                portion.step.note_append(layer - portion.first_layer)
        self._last = back(out, rows[0]), back(lse, rows[0])
        return *self._last, failed

    def share_results(self) -> None:
        """Gives each step its part of the last attend, for `DecodeStep.results`."""
        for portion in self.portions:
            portion.step.outputs = portion.of(self._last[0]), portion.of(self._last[1])
