"""Regions: memory that a client and its daemon share."""

from __future__ import annotations

import math
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from spillway_kv.errors import SpillwayError
from spillway_kv.mapping import RegionMapping
from spillway_kv.tensors import Array, BFloat16, DTypeName, dtype_name, dtype_of, is_torch

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64


class Owner(Protocol):
    """What regions are given back to."""

    def detach(self, region: Region | GpuRegion) -> None:
        """Gives a region back to the daemon."""
        ...


class _Shared:
    """The common part of regions in host and GPU memory: allocation of pieces."""

    def __init__(self, owner: Owner, mapping: RegionMapping) -> None:
        self._owner = owner
        self._mapping: RegionMapping | None = mapping
        self._used = 0
        self.name = mapping.name
        self.byte_count = mapping.byte_count
        self.address = mapping.address

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, byte_count={self.byte_count})"

    def _place(self, byte_count: int) -> int:
        """Allocates a piece of the region. Returns its offset."""
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + byte_count > self.byte_count:
            raise ValueError(
                f"{byte_count} bytes do not fit: {self.name} has {self.byte_count}, "
                f"{self._used} of them in use"
            )
        self._used = start + byte_count
        return start

    def reset(self) -> None:
        """Frees all pieces. Arrays that are allocated afterwards overlap the earlier ones."""
        self._used = 0


class Region(_Shared):
    """Memory shared with a daemon. `Client.attach_region` creates it.

    Appends from arrays in the region, and fetches into them, are not copied into messages.
    `array` and `tensor` allocate its memory piece by piece. `reset` frees all pieces. Not
    thread-safe.

    Attributes:
        name: `regions/{id}`.
        byte_count: Size of the region.
    """

    def __init__(self, owner: Owner, mapping: RegionMapping) -> None:
        super().__init__(owner, mapping)
        self._used_max = 0

    def _take(self, byte_count: int) -> Any:
        if self._mapping is None:
            raise ValueError(f"{self.name} is detached")
        start = self._place(byte_count)
        self._used_max = max(self._used_max, self._used)
        return np.asarray(self._mapping)[start : start + byte_count]

    def array(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        """Returns a numpy array in the region. Its content is undefined.

        Raises:
            ValueError: The region has not enough free memory, or is detached.
        """
        dtype = np.dtype(dtype)
        return self._take(int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)

    def tensor(self, shape: tuple[int, ...], dtype: DTypeName = "bfloat16") -> torch.Tensor:
        """Returns a torch tensor in the region. Its content is undefined.

        Raises:
            ValueError: The region has not enough free memory, or is detached.
        """
        import torch

        kind: torch.dtype = getattr(torch, dtype)
        taken = torch.from_numpy(self._take(int(np.prod(shape)) * kind.itemsize))
        return taken.view(kind).view(shape)

    def detach(self) -> None:
        """Gives the region back. The daemon frees it when no call uses it.

        Arrays in it stay readable, but are no longer shared with the daemon: their content is
        copied to memory of this process.
        """
        self._owner.detach(self)
        self.unmap()

    def unmap(self) -> None:
        """Copies what arrays in it have, and unmaps it: the daemon counts it while it is mapped."""
        if self._mapping is None:
            return
        mapping = weakref.ref(self._mapping)
        self._mapping = None
        if (left := mapping()) is not None:  # there are arrays in it
            # If there is no memory for their content, it stays mapped.
            with suppress(SpillwayError):
                left.leave(self._used_max)


class _GpuBytes:
    """Bytes of a mapping. torch keeps this object, and so the mapping, as long as it uses them."""

    def __init__(self, mapping: RegionMapping, start: int, byte_count: int) -> None:
        self._mapping = mapping
        self.__cuda_array_interface__ = {
            "shape": (byte_count,),
            "typestr": "|u1",
            "data": (mapping.address + start, False),
            "version": 3,
            # torch does not wait for a stream: the caller must order the work that uses the memory.
            "stream": None,
        }


class GpuRegion(_Shared):
    """Memory of a daemon's GPU. `Client.attach_region` creates it if a device is named.

    CUDA tensors in the region are appended in place, and rows are fetched into them in place.
    The only link that they cross is the one between the GPU and the daemon's pages. `tensor`
    allocates its memory piece by piece. `reset` frees all pieces. Not thread-safe.

    Attributes:
        name: `regions/{id}`.
        byte_count: Size of the region, a multiple of 2 MiB.
        device: torch's name of the GPU in this process, for example `cuda:0`.
    """

    def __init__(self, owner: Owner, mapping: RegionMapping) -> None:
        super().__init__(owner, mapping)
        self.device = f"cuda:{mapping.ordinal}"

    def tensor(self, shape: tuple[int, ...], dtype: DTypeName = "bfloat16") -> torch.Tensor:
        """Returns a CUDA tensor in the region. Its content is undefined.

        Raises:
            ValueError: The region has not enough free memory, or is detached.
        """
        import torch

        if self._mapping is None:
            raise ValueError(f"{self.name} is detached")
        kind: torch.dtype = getattr(torch, dtype)
        count = math.prod(shape) * kind.itemsize
        if count == 0:
            return torch.empty(shape, dtype=kind, device=self.device)
        taken = torch.as_tensor(
            _GpuBytes(self._mapping, self._place(count), count), device=self.device
        )
        return taken.view(kind).view(shape)

    def detach(self) -> None:
        """Gives the region back. The daemon frees it when no call uses it.

        Tensors in it stay usable, but are no longer shared with the daemon. The memory on the
        GPU stays in use until the last tensor is deleted.
        """
        self._mapping = None
        self._owner.detach(self)


def copied_to(region: Region | GpuRegion, array: Array) -> Array:
    """Returns a copy of an array in a region, of the same type."""
    if is_torch(array):
        source: torch.Tensor = array  # type: ignore[assignment]
        tensor = region.tensor(tuple(source.shape), dtype_name(dtype_of(source, "k")))
        return tensor.copy_(source)
    assert isinstance(region, Region)
    if isinstance(array, BFloat16):
        bits = region.array(array.shape, np.uint16)
        bits[:] = array.bits
        return BFloat16(bits)
    host: Any = array
    made = region.array(host.shape, host.dtype)
    made[:] = host
    return made
