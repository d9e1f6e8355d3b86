"""Decode steps as a torch operator that `torch.compile` supports.

    step = client.begin_step(sequences)
    slot = spillway_kv.torch.Slot()

    def layer(x, slot_tensor):  # may be compiled
        q, k, v = ...
        out, lse = spillway_kv.torch.attend(slot_tensor, 0, q, k, v)

    slot.enter(step)  # for each token
    layer(x, slot.tensor)

A slot determines which step is used. A compiled function takes the slot's tensor as an argument,
and so serves one step after the other. A `StreamDecoder` is entered once. Attends are then
enqueued on torch's current stream, and a captured CUDA graph does not need the slot any more.
"""

from __future__ import annotations

import itertools
import weakref

import torch

from spillway_kv.step import DecodeStep
from spillway_kv.stream import StreamDecoder

_STEPS: weakref.WeakValueDictionary[int, DecodeStep | StreamDecoder] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class Slot:
    """Determines which step `attend` uses. Not thread-safe.

    Attributes:
        tensor: The number of the slot, int64 [1] on the CPU. `attend` takes it.
    """

    def __init__(self) -> None:
        self.tensor = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._step: DecodeStep | StreamDecoder | None = None

    def enter(self, step: DecodeStep | StreamDecoder) -> None:
        """Selects this step or decoder, and keeps it alive until the next one is selected."""
        number = next(_numbers)
        _STEPS[number] = step
        self._step = step
        self.tensor[0] = number


# Declared to change the slot, so that torch.compile does not merge, move or remove calls: they
# append.
@torch.library.custom_op("spillway::attend", mutates_args=("slot",))
def attend(
    slot: torch.Tensor, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Appends the new tokens' K and V to a layer of the slot's step, and attends.

    It works like `DecodeStep.attend` or `StreamDecoder.attend`, and raises the same errors.

    Args:
        slot: `Slot.tensor`, after `Slot.enter`.
        layer: Layer, [0, layer_count).
        q: Queries [B, T, H_q, d].
        k: Keys of the new tokens [B, H_kv, T, d].
        v: Values, with the same shape.

    Returns:
        Output [B, T, H_q, d] of q's type, and log-sum-exp [B, T, H_q], float32.

    Raises:
        RuntimeError: The slot has no step, or the step does not exist any more.
    """
    step = _STEPS.get(int(slot[0]))
    if step is None:
        raise RuntimeError(
            "the slot has no step, or its Slot was deleted: call Slot.enter, and keep the Slot"
        )
    out, lse = step.attend(layer, q, k, v)
    return out, lse


@attend.register_fake
def _attend_fake(
    slot: torch.Tensor, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        q.shape[:-1], dtype=torch.float32
    )


__all__ = ["Slot", "attend"]
