"""K/V of prompts in chunks, in GPU memory until the last chunk. Does not import vLLM.

A chunk attends to all tokens before it. Where their K/V are still in GPU memory, they need not come
back from the engine.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

_logger = logging.getLogger("vllm.spillway")


@dataclass
class _Held:
    """K/V of a prompt.

    Attributes:
        first: First element of the memory that they have.
        rows: K and V [2, layers, H_kv, tokens of the prompt, d].
        end: How many tokens are there.
    """

    first: int
    rows: torch.Tensor
    end: int = 0

    @property
    def stop(self) -> int:
        """Element after the last one."""
        return self.first + self.rows.numel()


class PromptRows:
    """K/V of the prompts that are being computed, by key of the sequence. For one thread.

    All work on the memory goes to the current stream, except for what `is_read` tells.

    Args:
        layer_count: Layers of the model.
        kv_head_count: KV heads.
        head_dim: Elements of a key.
        dtype: Element type of K and V.
        device: Where they are kept.
        byte_count: Memory for all prompts. It is allocated at first use.
        is_read: Whether another stream may still read the K/V of a key.
    """

    def __init__(
        self,
        layer_count: int,
        kv_head_count: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        byte_count: int,
        is_read: Callable[[int], bool],
    ) -> None:
        self._shape = layer_count, kv_head_count, head_dim
        self._dtype = dtype
        self._device = device
        self._count = byte_count // dtype.itemsize
        self._is_read = is_read
        self._memory: torch.Tensor | None = None
        self._held: dict[int, _Held] = {}
        # Those that may still be read: pairs of the key and what it had.
        self._closed: list[tuple[int, _Held]] = []

    def open(self, key: int, token_count: int, others: Collection[int]) -> None:
        """Gives a prompt memory for its K/V, if there is room.

        Args:
            key: Key of the sequence. It has no memory yet, or none that it needs.
            token_count: Tokens of the prompt.
            others: Prompts that keep theirs. All others may lose it.
        """
        self.close(key)
        layers, heads, dim = self._shape
        shape = (2, layers, heads, token_count, dim)
        count = math.prod(shape)
        if not self._allocate(count):
            return
        first = self._free(count)
        for other in [each for each in self._held if each not in others]:
            if first is not None:
                break
            self.close(other)
            first = self._free(count)
        if first is not None and self._memory is not None:
            self._held[key] = _Held(first, self._memory[first : first + count].view(shape))

    def _allocate(self, count: int) -> bool:
        """Allocates all memory, if a prompt of so many elements fits and it is not there yet."""
        if count > self._count:
            return False
        if self._memory is None:
            try:
                self._memory = torch.empty(self._count, dtype=self._dtype, device=self._device)
            except torch.OutOfMemoryError as error:
                _logger.warning("prompts fetch the K/V of earlier chunks: %s", error)
                self._count = 0
                return False
        return True

    def _free(self, count: int) -> int | None:
        """Returns the first element of so many that are free. None if there are not as many."""
        self._closed = [(key, held) for key, held in self._closed if self._is_read(key)]
        taken = [*self._held.values(), *(held for _, held in self._closed)]
        first = 0
        for held in sorted(taken, key=lambda held: held.first):
            if held.first - first >= count:
                return first
            first = held.stop
        return first if self._count - first >= count else None

    def extend(self, key: int, start: int, end: int) -> torch.Tensor | None:
        """Returns where the K/V of a chunk go, behind those of all tokens before it.

        Args:
            key: Key of the sequence.
            start: Position of the chunk's first token.
            end: Position after its last one.

        Returns:
            K and V [2, layers, H_kv, end, d], of which the caller writes those of [start, end).
            None if the tokens before are not there, or it is longer than was told.
        """
        held = self._held.get(key)
        if held is None:
            return None
        if held.end != start or end > held.rows.shape[3]:
            self.close(key)
            return None
        held.end = end
        return held.rows[:, :, :, :end]

    def close_complete(self) -> None:
        """Takes back the memory of prompts whose tokens are all there."""
        for key in [key for key, held in self._held.items() if held.end == held.rows.shape[3]]:
            self.close(key)

    def close(self, key: int) -> None:
        """Takes back a prompt's memory. It is not an error if it has none."""
        held = self._held.pop(key, None)
        if held is not None:
            self._closed.append((key, held))
