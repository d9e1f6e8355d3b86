"""Where arrays are in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from spillway_kv.tensors import Array, BFloat16, is_torch

if TYPE_CHECKING:
    import torch

# Alignment of rows in GPU memory, bytes.
GPU_ALIGNMENT = 16


class Place(NamedTuple):
    """The address of an array, and its strides in bytes."""

    address: int
    strides: tuple[int, ...]


def place_of(array: Array) -> Place | None:
    """Returns where an array is in this process.

    None if its rows are not contiguous, or its memory does not hold its numbers (see
    `engine_array`).
    """
    if isinstance(array, BFloat16):
        array = array.bits
    if is_torch(array):
        tensor: torch.Tensor = array  # type: ignore[assignment]
        if tensor.device.type != "cpu":
            return None
        if tensor.is_neg():
            return None
        size = tensor.itemsize
        place = place_of_tensor(tensor)
    elif isinstance(array, np.ndarray):
        if not array.dtype.isnative:
            return None
        size = array.itemsize
        place = Place(array.__array_interface__["data"][0], array.strides)
    else:
        return None
    aligned = place.address % size == 0 and min(place.strides, default=0) >= 0
    return place if aligned and place.strides[-1:] == (size,) else None


def place_of_tensor(tensor: torch.Tensor) -> Place:
    """Returns where a tensor's elements are, on any device."""
    return Place(tensor.data_ptr(), byte_strides(tensor))


def byte_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns a tensor's strides in bytes."""
    size = tensor.itemsize
    return tuple([size * stride for stride in tensor.stride()])


def has_gpu_strides(tensor: torch.Tensor) -> bool:
    """Whether rows are contiguous, with strides that an engine on a GPU can read."""
    strides = byte_strides(tensor)
    return strides[-1:] == (tensor.itemsize,) and not any(x % GPU_ALIGNMENT for x in strides[:-1])


def has_gpu_rows(tensor: torch.Tensor) -> bool:
    """Whether rows are contiguous, and aligned so that an engine on a GPU can read them."""
    return tensor.data_ptr() % GPU_ALIGNMENT == 0 and has_gpu_strides(tensor)
