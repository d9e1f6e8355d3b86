"""Memory of another process, mapped into this one."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """Maps a file that several processes share, until the last array in it is deleted.

    Unlike the module mmap, it keeps no descriptor, and it can let go of the file while there are
    arrays. numpy makes an array of it, because it has `__array_interface__`.

    Attributes:
        address: Where it begins.
        byte_count: Its size.
    """

    def __init__(self, descriptor: int, byte_count: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        for function in (self._libc.mmap, self._libc.mremap):
            function.restype = ctypes.c_void_p
        self.byte_count = byte_count
        self.address = self._map(mmap.MAP_SHARED, descriptor)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._unmap(self.address)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.byte_count,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def leave(self, used: int) -> None:
        """Replaces the shared memory by memory of this process; the first `used` bytes stay."""
        try:
            own = self._map(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        except OSError:
            return  # then it stays mapped
        ctypes.memmove(own, self.address, used)
        size = ctypes.c_size_t(self.byte_count)
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
        there = ctypes.c_void_p(self.address)
        if self._libc.mremap(ctypes.c_void_p(own), size, size, flags, there) == _FAILED:
            self._unmap(own)

    def _map(self, flags: int, descriptor: int) -> int:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        size = ctypes.c_size_t(self.byte_count)
        address = self._libc.mmap(None, size, access, flags, descriptor, ctypes.c_long(0))
        if address is None or address == _FAILED:
            error = ctypes.get_errno()
            raise OSError(error, f"mapping {self.byte_count} bytes: {os.strerror(error)}")
        return int(address)

    def _unmap(self, address: int) -> None:
        self._libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(self.byte_count))
