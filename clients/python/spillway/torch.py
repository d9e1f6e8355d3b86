"""Decode steps as a torch operator, which `torch.compile` takes.

    step = client.begin_step(sequences)
    slot = spillway.torch.Slot()

    def layer(x, slot_tensor):  # may be compiled
        q, k, v = ...
        out, lse = spillway.torch.attend(slot_tensor, 0, q, k, v)

    slot.enter(step)  # for each token
    layer(x, slot.tensor)

A slot says which step is meant: a compiled function takes its tensor as an
argument, and so serves one step after the other. A `StreamDecoder` is entered
once; then attends are enqueued on torch's current stream, and what was captured
into a CUDA graph needs the slot no more.
"""

from __future__ import annotations

import itertools
import weakref

import torch

from spillway.step import DecodeStep
from spillway.stream import StreamDecoder

_STEPS: weakref.WeakValueDictionary[int, DecodeStep | StreamDecoder] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class Slot:
    """Says which step `attend` means. Not thread-safe.

    Attributes:
        tensor: Its number, int64 [1] on the CPU; what `attend` takes.
    """

    def __init__(self) -> None:
        self.tensor = torch.zeros(1, dtype=torch.int64)
        self._step: DecodeStep | StreamDecoder | None = None

    def enter(self, step: DecodeStep | StreamDecoder) -> None:
        """Makes it mean this step, or a decoder's, and keeps that alive until the next."""
        number = next(_numbers)
        _STEPS[number] = step
        self._step = step
        self.tensor[0] = number


# The slot counts as changed, so that no two calls are taken for the same and
# none is moved or left out: they append.
@torch.library.custom_op("spillway::attend", mutates_args=("slot",))
def attend(
    slot: torch.Tensor, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Appends the new tokens' K and V at a layer of the slot's step and attends.

    As `DecodeStep.attend`, or `StreamDecoder.attend`, with its errors.

    Args:
        slot: `Slot.tensor`, after `Slot.enter`.
        layer: Layer, [0, layer_count).
        q: Queries [B, T, H_q, d].
        k: Keys of the new tokens [B, H_kv, T, d].
        v: Values, the same shape.

    Returns:
        Output [B, T, H_q, d] of q's type, and log-sum-exp [B, T, H_q], float32.

    Raises:
        RuntimeError: The slot means no step, or one that is gone.
    """
    step = _STEPS.get(int(slot[0]))
    if step is None:
        raise RuntimeError("the slot means no step: call Slot.enter with one that is kept")
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
