"""Memory that a client and its daemon share, so that K/V are not sent in messages."""

from __future__ import annotations

import math
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from spillway_kv import forks
from spillway_kv._native import EMBEDDED, GpuMapping
from spillway_kv._proto import memory_service_pb2, tensor_pb2
from spillway_kv.errors import (
    Aborted,
    AlreadyExists,
    InvalidArgument,
    NotFound,
    OutOfRange,
    ResourceExhausted,
    SpillwayError,
    Unavailable,
)
from spillway_kv.mapping import Mapping
from spillway_kv.tensors import (
    Array,
    BFloat16,
    DTypeName,
    dtype_name,
    dtype_of,
    gpu_uuid,
    is_torch,
    itemsize,
    on_gpu,
)

if TYPE_CHECKING:
    import torch

    from spillway_kv.connection import Connection

# Key of the staging region in host memory. Other keys are numbers of GPUs.
_HOST = -1
_PROCESS, _GPU = "regions/process", "regions/gpu"
# Alignment of rows in GPU memory, bytes.
GPU_ALIGNMENT = 16
_ALIGNMENT = 64
_NAME_BYTES_MAX = 256
# Size of a client's own region on a GPU. The daemon takes about 3 ms for an append of 128 MiB.
_GPU_STAGING_BYTES = 128 << 20
# Size of a client's own region in host memory, which the daemon's memory limit includes.
_HOST_STAGING_BYTES = 16 << 20
# Smaller appends are sent in messages: staging them costs a copy and a call, which do not pay off.
_STAGED_BYTES_MIN = 1 << 20
# Errors with which a daemon answers an append after it has stopped reading the rows.
ANSWERED = (Aborted, AlreadyExists, InvalidArgument, OutOfRange, ResourceExhausted)
_UNIX = "unix:"


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


class _Shared:
    """The common part of regions in host and GPU memory: allocation of pieces."""

    def __init__(self, regions: Regions, name: str, byte_count: int, address: int) -> None:
        self._regions = regions
        self._used = 0
        self.name = name
        self.byte_count = byte_count
        self.address = address

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

    def __init__(self, regions: Regions, name: str, mapping: Mapping) -> None:
        super().__init__(regions, name, mapping.byte_count, mapping.address)
        self._mapping: Mapping | None = mapping
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
        self._regions.detach(self)
        self._leave()

    def _leave(self) -> None:
        """Unmaps the region: the daemon counts it as long as it is mapped."""
        if self._mapping is None:
            return
        mapping = weakref.ref(self._mapping)
        self._mapping = None
        if (left := mapping()) is not None:  # there are arrays in it
            left.leave(self._used_max)


class _GpuBytes:
    """Bytes of a mapping. torch keeps this object, and so the mapping, as long as it uses them."""

    def __init__(self, mapping: GpuMapping, start: int, byte_count: int) -> None:
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

    def __init__(self, regions: Regions, name: str, byte_count: int, mapping: GpuMapping) -> None:
        super().__init__(regions, name, byte_count, mapping.address)
        self._mapping: GpuMapping | None = mapping
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
        self._regions.detach(self)


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


class _Staging:
    """A region to which arrays are copied before they are appended: in GPU or host memory."""

    def __init__(self, device: str) -> None:
        self.device = device  # empty: host memory
        self.lock = threading.Lock()
        self.region: Region | GpuRegion | None = None


class Regions:
    """The regions of one client. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._wire = connection
        self._process = connection.target == EMBEDDED
        # Re-entrant, because the garbage collector may run a finalizer that calls while it is held.
        self._lock = threading.RLock()
        self._socket: socket.socket | None = None
        self._session = ""
        self._attached: dict[str, Region | GpuRegion] = {}
        # Keys: the GPU's number in this process, or _HOST. None: no region can be used.
        self._staging: dict[int, _Staging | None] = {}
        # Fewest bytes of an append that is staged in a region of this client.
        self.staged_bytes_min = _STAGED_BYTES_MIN
        # Why no GPU memory of the daemon can be used; empty as long as that is not known.
        self.no_gpu = ""

    def leave_to_parent(self, error: str) -> None:
        """Drops all regions in a forked process. They belong to the parent."""
        self._lock = threading.RLock()
        self._attached, self._staging = {}, {}
        if self._socket is not None:
            # The child's copy of the socket would keep the parent's session open.
            self._socket.close()
        self._socket = cast(Any, forks.Left(error))

    @property
    def available(self) -> bool:
        """Whether the daemon can share regions with this client."""
        return self._wire.target.startswith(_UNIX) and bool(self._wire.server_info.region_socket)

    @property
    def attached(self) -> bool:
        """Whether any region is attached, apart from the client's own staging regions."""
        own = [staging.region for staging in [*self._staging.values()] if staging is not None]
        return any(region not in own for region in list(self._attached.values()))

    def slice_of(self, array: Array) -> tensor_pb2.RegionSlice | None:
        """Returns the array's place in shared memory; None if the daemon cannot access it there."""
        if not self._process and not self._attached:
            return None
        if self._process and on_gpu(array):
            return self._slice_on_gpu(array)
        place: Place | None
        if on_gpu(array):
            tensor: torch.Tensor = array  # type: ignore[assignment]
            fits = has_gpu_rows(tensor) and not tensor.is_neg()
            place = place_of_tensor(tensor) if fits else None
        else:
            place = place_of(array)
        if place is None:
            return None
        reach = place.strides[-1] + sum(
            (size - 1) * step for size, step in zip(array.shape, place.strides, strict=True)
        )
        if self._process:
            name, start = _PROCESS, 0
        else:
            for region in list(self._attached.values()):
                if 0 <= place.address - region.address <= region.byte_count - reach:
                    name, start = region.name, region.address
                    break
            else:
                return None
        return tensor_pb2.RegionSlice(
            region=name, offset=place.address - start, strides=place.strides
        )

    def holds(self, place: tensor_pb2.RegionSlice) -> bool:
        """Whether the region of `slice_of` is still attached: arrays in it have what was written.

        Arrays of a region that another thread has detached meanwhile have a copy of it from before.
        """
        return self._process or place.region in self._attached

    @property
    def refused(self) -> bool:
        """Whether the daemon has no region of host memory, or no memory for one, for staging."""
        return _HOST in self._staging and self._staging[_HOST] is None

    def stages(self, k: Array, v: Array) -> bool:
        """Whether arrays are appended through a staging region of this client.

        This is so for CUDA tensors on the GPU of a daemon that shares its memory, and, unless they
        are small, for arrays in host memory if the daemon shares host memory.
        """
        return self._staging_for(k, v) is not None

    def _staging_for(self, k: Array, v: Array) -> _Staging | None:
        if self._process:
            return None
        if not on_gpu(k) and not on_gpu(v):
            return self._host_staging_for(k, v)
        if not on_gpu(k) or not on_gpu(v) or self.no_gpu:
            return None
        first: torch.Tensor = k  # type: ignore[assignment]
        second: torch.Tensor = v  # type: ignore[assignment]
        ordinal = first.device.index
        if second.device.index != ordinal or self._wire.native is None or not self.available:
            return None
        with self._lock:
            if ordinal not in self._staging:
                # With several GPUs, the client does not know on which one a sequence is.
                uuids = [device.uuid for device in self._wire.server_info.devices]
                there = len(uuids) == 1 and uuids[0] != "" and uuids[0] == gpu_uuid(ordinal)
                self._staging[ordinal] = _Staging(uuids[0]) if there else None
            return self._staging[ordinal]

    def _host_staging_for(self, k: Array, v: Array) -> _Staging | None:
        byte_count = 2 * math.prod(k.shape) * itemsize(dtype_of(k, "k"))
        if is_torch(k) != is_torch(v) or byte_count < self.staged_bytes_min or not self.available:
            return None
        with self._lock:
            if _HOST not in self._staging:
                self._staging[_HOST] = _Staging("")
            return self._staging[_HOST]

    @contextmanager
    def staged(self, k: Array, v: Array) -> Iterator[Region | GpuRegion | None]:
        """Yields the staging region for the arrays, to one thread at a time.

        None if there is no such region, or no memory for it. The region in host memory is also None
        while another thread uses it, because messages of several threads can be sent in parallel.
        """
        staging = self._staging_for(k, v)
        if staging is None or not staging.lock.acquire(blocking=bool(staging.device)):
            yield None
            return
        try:
            if staging.region is None:
                self._attach_staging(staging)
            region = staging.region
            try:
                yield region
            except BaseException as error:
                # If the call was given up, the daemon may still read the region. If the daemon has
                # restarted, it does not know the region.
                if region is not None and not isinstance(error, ANSWERED):
                    staging.region = None
                    with suppress(SpillwayError):
                        region.detach()
                raise
        finally:
            staging.lock.release()

    def give_up_host_memory(self) -> bool:
        """Gives this client's staging region in host memory back, and stages nothing there again.

        Returns:
            Whether there was such a region.
        """
        with self._lock:
            staging, self._staging[_HOST] = self._staging.get(_HOST), None
        if staging is None:
            return False
        with staging.lock:
            region, staging.region = staging.region, None
        if region is not None:
            region.detach()
        return region is not None

    def _attach_staging(self, staging: _Staging) -> None:
        if not staging.device:
            if self._staging.get(_HOST) is not staging:
                return  # given up meanwhile
            try:
                staging.region = self.attach(_HOST_STAGING_BYTES)
            except (SpillwayError, OSError):
                # Do not try again for every append. Transport reports the reason.
                self._staging[_HOST] = None
            return
        try:
            staging.region = self.attach_gpu(_GPU_STAGING_BYTES, staging.device)
        except ResourceExhausted:
            pass
        except SpillwayError as error:
            self.no_gpu = error.message

    def slice_on_gpu_of(self, array: Array) -> tensor_pb2.RegionSlice | None:
        """The same as `slice_of`, but only for CUDA tensors in a region of a daemon's GPU."""
        return self.slice_of(array) if on_gpu(array) and not self._process else None

    def _slice_on_gpu(self, array: Array) -> tensor_pb2.RegionSlice | None:
        """The same for a CUDA tensor that an embedded engine on its GPU accesses in place."""
        tensor: torch.Tensor = array  # type: ignore[assignment]
        names = [device.name for device in self._wire.server_info.devices]
        if tensor.is_neg() or not has_gpu_rows(tensor) or names != [f"cuda:{tensor.device.index}"]:
            return None
        place = place_of_tensor(tensor)
        return tensor_pb2.RegionSlice(region=_GPU, offset=place.address, strides=place.strides)

    def attach(self, byte_count: int) -> Region:
        """Lets the daemon allocate a region, and maps it."""
        with self._lock:
            made = self._made(byte_count, "").region
            connection = self._connected()
            try:
                connection.send(made.name.encode())
                told, descriptors, _, _ = socket.recv_fds(connection, _NAME_BYTES_MAX, 1)
            except BaseException:
                # The answer may still come. It would be taken for the answer to the next request.
                self._end_session()
                raise
            if not descriptors:
                raise Unavailable(f"{made.name} was not passed to this process: {told.decode()}")
            try:
                mapping = Mapping(descriptors[0], made.byte_count)
            finally:
                os.close(descriptors[0])
            region = Region(self, made.name, mapping)
            self._attached[made.name] = region
            return region

    def attach_gpu(self, byte_count: int, device: str) -> GpuRegion:
        """Lets the daemon allocate a region of GPU memory, and maps it."""
        native = self._wire.native
        if native is None:
            raise ValueError(
                "regions in GPU memory need libspillway, which was not found: SPILLWAY_LIBRARY can "
                "name it"
            )
        with self._lock:
            made = self._made(byte_count, device)
            try:
                mapping = native.map_gpu_region(made.region.device, made.ipc_handle)
            except BaseException:
                self._detach(made.region.name)
                raise
            region = GpuRegion(self, made.region.name, made.region.byte_count, mapping)
            self._attached[region.name] = region
            return region

    def _made(self, byte_count: int, device: str) -> memory_service_pb2.AttachRegionResponse:
        def attach() -> memory_service_pb2.AttachRegionResponse:
            self._connected()
            request = memory_service_pb2.AttachRegionRequest(
                session=self._session, byte_count=byte_count, device=device
            )
            response: memory_service_pb2.AttachRegionResponse = self._wire.call(
                self._wire.stubs.memory.AttachRegion, request
            )
            return response

        try:
            return attach()
        except NotFound as error:
            if error.reason != "SESSION_NOT_FOUND":
                raise
        # The daemon has restarted, and the regions that were attached before are gone.
        self._end_session()
        return attach()

    def _detach(self, name: str) -> None:
        request = memory_service_pb2.DetachRegionRequest(session=self._session, name=name)
        self._wire.call(self._wire.stubs.memory.DetachRegion, request)

    def detach(self, region: Region | GpuRegion) -> None:
        """Gives a region back."""
        with self._lock:
            if self._attached.pop(region.name, None) is not None:
                # Only now: what is still attached after a call has what the call wrote (`holds`).
                if isinstance(region, Region):
                    region._leave()
                self._detach(region.name)

    def close(self) -> None:
        """Ends the session. The daemon then frees its regions."""
        with self._lock:
            self._end_session()
            self._staging.clear()

    def forget(self) -> None:
        """Drops all regions after a restart of the daemon, which has none of them any more."""
        with self._lock:
            self._end_session()

    def _end_session(self) -> None:
        left = list(self._attached.values())
        self._attached.clear()
        for region in left:
            if isinstance(region, Region):
                region._leave()
        for staging in self._staging.values():
            if staging is not None:
                staging.region = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self) -> socket.socket:
        """Returns the socket of the session. Opens it for the first region."""
        if self._socket is not None:
            return self._socket
        if not self.available:
            raise ValueError(
                f"{self._wire.target} has no regions: they need a unix socket of a daemon"
            )
        # Uses the client's path of the folder: the daemon may know the folder by another path.
        folder = os.path.dirname(self._wire.target.removeprefix(_UNIX))
        path = os.path.join(folder, self._wire.server_info.region_socket)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(path)
            self._session = connection.recv(_NAME_BYTES_MAX).decode()
        except OSError as error:
            connection.close()
            raise Unavailable(f"no regions at {path}: {error}") from None
        if not self._session:
            connection.close()
            raise Unavailable(f"no regions at {path}: the daemon has too many sessions")
        self._socket = connection
        return connection
