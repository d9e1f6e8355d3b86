"""Memory that a daemon shares, mapped into this process."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from spillway_kv import forks
from spillway_kv._library import Place, last_error


class RegionMapping:
    """A region, mapped until the last array in it is deleted.

    numpy makes an array of one in host memory, because it has `__array_interface__`.

    Attributes:
        name: `regions/{id}`.
        address: Where it begins: in host memory, or a CUDA address.
        byte_count: Its size.
        ordinal: CUDA's number of its GPU in this process; -1: host memory.
    """

    def __init__(self, loaded: ctypes.CDLL, handle: int, place: Place) -> None:
        """Takes a spillway_region and its place."""
        self._library, self._handle = loaded, handle
        self.name = place.name.decode()
        self.address = place.address or 0
        self.byte_count, self.ordinal = place.size, place.ordinal
        # A forked process gives its mapping of host memory back, but cannot call CUDA.
        finalizer = weakref.finalize if self.ordinal < 0 else forks.finalizer
        # At exit threads may still use the memory, and CUDA is being shut down.
        finalizer(self, loaded.spillway_region_free, handle).atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.byte_count,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def leave(self, used: int) -> None:
        """Replaces the shared memory by memory of this process; the first `used` bytes stay.

        Raises:
            SpillwayError: There is no memory. It stays shared.
        """
        if self._library.spillway_region_leave(self._handle, used):
            raise last_error(self._library)
