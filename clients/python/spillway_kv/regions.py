"""The regions of a client, so that K/V are not sent in messages."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from spillway_kv._handle import ends_first
from spillway_kv._native import EMBEDDED, NativeChannel
from spillway_kv._proto import memory_service_pb2, tensor_pb2
from spillway_kv.errors import (
    Aborted,
    AlreadyExists,
    InvalidArgument,
    NotFound,
    OutOfRange,
    ResourceExhausted,
    SpillwayError,
)
from spillway_kv.mapping import RegionMapping
from spillway_kv.places import Place, has_gpu_rows, place_of, place_of_tensor
from spillway_kv.region import GpuRegion, Region
from spillway_kv.server import ServerInfo
from spillway_kv.services import Services
from spillway_kv.tensors import (
    Array,
    dtype_of,
    gpu_uuid,
    is_torch,
    itemsize,
    on_gpu,
)

if TYPE_CHECKING:
    import torch

# Key of the staging region in host memory. Other keys are numbers of GPUs.
_HOST = -1
_PROCESS, _GPU = "regions/process", "regions/gpu"
# Size of a client's own region on a GPU. The daemon takes about 3 ms for an append of 128 MiB.
_GPU_STAGING_BYTES = 128 << 20
# Size of a client's own region in host memory, which the daemon's memory limit includes.
_HOST_STAGING_BYTES = 16 << 20
# Smaller appends are sent in messages: staging them costs a copy and a call, which do not pay off.
_STAGED_BYTES_MIN = 1 << 20
# Errors with which a daemon answers an append after it has stopped reading the rows.
ANSWERED = (Aborted, AlreadyExists, InvalidArgument, OutOfRange, ResourceExhausted)
_UNIX = "unix:"
_END_SECONDS = 1.0


class _Staging:
    """A region to which arrays are copied before they are appended: in GPU or host memory."""

    def __init__(self, device: str) -> None:
        self.device = device  # empty: host memory
        self.lock = threading.Lock()
        self.region: Region | GpuRegion | None = None


class Wire(Protocol):
    """What regions need of a connection. See `Connection`."""

    target: str
    server_info: ServerInfo
    channel: NativeChannel
    stubs: Services

    def call(self, method: Any, request: Any) -> Any:
        """Calls a method with one response."""
        ...


class Regions:
    """The regions of one client. Thread-safe."""

    def __init__(self, connection: Wire) -> None:
        self._wire = connection
        self._process = connection.target == EMBEDDED
        # Re-entrant, because the garbage collector may run a finalizer that calls while it is held.
        self._lock = threading.RLock()
        # Name of the session that has the regions; empty as long as there were none.
        self.session = ""
        self._attached: dict[str, Region | GpuRegion] = {}
        # Keys: the GPU's number in this process, or _HOST. None: no region can be used.
        self._staging: dict[int, _Staging | None] = {}
        # Fewest bytes of an append that is staged in a region of this client.
        self.staged_bytes_min = _STAGED_BYTES_MIN
        # Why no GPU memory of the daemon can be used; empty as long as that is not known.
        self.no_gpu = ""
        # Otherwise arrays in regions would read as zeros while the program ends.
        ends_first(self)

    def leave_to_parent(self) -> None:
        """Drops all regions in a forked process. They belong to the parent."""
        self._lock = threading.RLock()
        self._attached, self._staging = {}, {}

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

    def reads_on_gpu(self, k: Array, v: Array) -> bool:
        """Whether CUDA tensors are appended from their GPU's memory, in place or staged there."""
        return self.slice_of(k) is not None or self.stages(k, v)

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
        if second.device.index != ordinal or not self.available:
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
            except SpillwayError:
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
            region = Region(self, self._mapped(byte_count, ""))
            self._attached[region.name] = region
            return region

    def attach_gpu(self, byte_count: int, device: str) -> GpuRegion:
        """Lets the daemon allocate a region of GPU memory, and maps it."""
        with self._lock:
            region = GpuRegion(self, self._mapped(byte_count, device))
            self._attached[region.name] = region
            return region

    def _mapped(self, byte_count: int, device: str) -> RegionMapping:
        try:
            made = self._made(byte_count, device)
        except NotFound as error:
            if error.reason != "SESSION_NOT_FOUND":
                raise
            # The daemon has just ended the session, because no call had named it.
            made = self._made(byte_count, device)
        try:
            return self._wire.channel.map_region(made.SerializeToString())
        except BaseException:
            with suppress(SpillwayError):
                self._detach(made.region.name)
            raise

    def _made(self, byte_count: int, device: str) -> memory_service_pb2.AttachRegionResponse:
        if not self.available:
            raise ValueError(
                f"{self._wire.target} has no regions: they need a unix socket of a daemon"
            )
        session = self._wire.channel.session()
        if session != self.session:
            # The daemon has restarted, or has ended the one before with its regions.
            self._leave_all()
            self.session = session
        request = memory_service_pb2.AttachRegionRequest(
            session=session, byte_count=byte_count, device=device
        )
        response: memory_service_pb2.AttachRegionResponse = self._wire.call(
            self._wire.stubs.memory.AttachRegion, request
        )
        return response

    def _detach(self, name: str) -> None:
        request = memory_service_pb2.DetachRegionRequest(session=self.session, name=name)
        self._wire.call(self._wire.stubs.memory.DetachRegion, request)

    def detach(self, region: Region | GpuRegion) -> None:
        """Gives a region back."""
        with self._lock:
            if self._attached.pop(region.name, None) is not None:
                # Only now: what is still attached after a call has what the call wrote (`holds`).
                if isinstance(region, Region):
                    region.unmap()
                try:
                    self._detach(region.name)
                except NotFound as error:
                    # With the session, if it has ended.
                    if error.reason != "SESSION_NOT_FOUND":
                        raise

    def forget(self) -> None:
        """Leaves all regions after a restart of the daemon, which has none of them any more."""
        with self._lock:
            self._leave_all()

    def close(self) -> None:
        """Leaves all regions, before the channel is closed: then the daemon clears them."""
        self.forget()
        self._staging.clear()

    def end(self) -> None:
        """The same when the program ends, unless another thread attaches a region."""
        if self._lock.acquire(timeout=_END_SECONDS):
            try:
                self._leave_all()
            finally:
                self._lock.release()

    def _leave_all(self) -> None:
        left = list(self._attached.values())
        self._attached.clear()
        for region in left:
            if isinstance(region, Region):
                region.unmap()
        for staging in self._staging.values():
            if staging is not None:
                staging.region = None
