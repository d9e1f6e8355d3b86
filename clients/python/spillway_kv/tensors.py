"""Input and output tensors: numpy arrays, torch tensors and raw bfloat16 bits."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Union

import numpy as np
import numpy.typing as npt

from spillway_kv._proto import tensor_pb2

if TYPE_CHECKING:
    import torch

DTypeName = Literal["float32", "float16", "bfloat16"]
# Element types in which an output may be requested, besides that of the queries.
OutDType = Literal["float32"]

_DTYPES: dict[str, int] = {
    "float32": tensor_pb2.DTYPE_F32,
    "float16": tensor_pb2.DTYPE_F16,
    "bfloat16": tensor_pb2.DTYPE_BF16,
}
# numpy's and torch's dtypes that have been used, with their `DType`.
_BY_DTYPE: dict[Any, int] = {}
_NAMES = {number: name for name, number in _DTYPES.items()}
_STORAGE: dict[int, Any] = {
    tensor_pb2.DTYPE_F32: np.dtype("<f4"),
    tensor_pb2.DTYPE_F16: np.dtype("<f2"),
    tensor_pb2.DTYPE_BF16: np.dtype("<u2"),
    tensor_pb2.DTYPE_U32: np.dtype("<u4"),
    tensor_pb2.DTYPE_U8: np.dtype("u1"),
}


@dataclass(frozen=True, eq=False)
class BFloat16:
    """bfloat16 elements as bits, for use without torch.

    numpy has no bfloat16, and a plain uint16 array is ambiguous. This type says that the bits
    are the upper halves of float32 numbers.

    Attributes:
        bits: uint16 array of any shape.
    """

    bits: npt.NDArray[np.uint16]

    def __post_init__(self) -> None:
        if self.bits.dtype != np.uint16:
            raise TypeError(f"BFloat16 holds uint16 bits, not {self.bits.dtype}")

    @classmethod
    def from_float32(cls, array: npt.NDArray[np.float32]) -> BFloat16:
        """Rounds to nearest, ties to even. NaNs stay NaNs."""
        array = np.ascontiguousarray(array, np.float32)
        wide = array.view(np.uint32)
        rounded = ((wide + (((wide >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
        return cls(np.where(np.isnan(array), np.uint16(0x7FC0), rounded))

    def to_float32(self) -> npt.NDArray[np.float32]:
        """Returns the numbers, exactly."""
        return (self.bits.astype(np.uint32) << 16).view(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.bits.shape

    def __getitem__(self, index: Any) -> BFloat16:
        return BFloat16(self.bits[index])


Array = Union["npt.NDArray[Any]", BFloat16, "torch.Tensor"]
# Converts a tensor message to an array of one type.
Decoder = Callable[[tensor_pb2.Tensor], Any]


def is_torch(array: object) -> bool:
    """Whether the array is a torch tensor. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def engine_array(array: Array, what: str) -> Array:
    """Returns an array whose memory holds its numbers as an engine reads them.

    All arrays that a caller passes on to an engine go through this function. It copies an array
    only if it must: elements in the other byte order or not aligned, and torch's negative bit, by
    which a tensor stands for the negative of what is in its memory. Strides stay as they are,
    because most readers take any. Subclasses are reduced to numpy arrays, and tensors are detached.

    Args:
        array: A float32 or float16 numpy array, a `BFloat16`, or a torch tensor.
        what: Name of the array in the error.

    Raises:
        TypeError: The array is of another type, has other elements, or its numbers are not all in
            its memory: masked, meta, sparse, nested and traced ones.
    """
    dtype_of(array, what)
    if isinstance(array, BFloat16):
        bits = _native_array(array.bits, what)
        return array if bits is array.bits else BFloat16(bits)
    if isinstance(array, np.ndarray):
        return _native_array(array, what)
    layout = str(array.layout).removeprefix("torch.")
    if layout != "strided" or array.is_nested:
        raise TypeError(f"{what} is a {'nested' if array.is_nested else layout} tensor, not dense")
    if array.is_meta:
        raise TypeError(f"{what} is a meta tensor, which has no elements")
    if array.device.type in ("cpu", "cuda") and not _has_memory(array):
        raise TypeError(f"{what} is a {type(array).__name__} that has no memory of its own")
    plain = sys.modules["torch"].Tensor
    taken: torch.Tensor = array.detach()
    if type(taken) is not plain:
        taken = taken.as_subclass(plain)
    return taken.resolve_neg()


def _native_array(array: npt.NDArray[Any], what: str) -> npt.NDArray[Any]:
    if type(array) is not np.ndarray:
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{what} is a masked array: fill its masked elements first")
        array = np.asarray(array)
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    return array if array.flags.aligned else array.copy()


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor on the CPU or a GPU has elements in memory, or no elements."""
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:  # vmap and grad of torch.func
        return False


def on_gpu(array: Array) -> bool:
    """Whether the array is a torch tensor in a GPU's memory."""
    return is_torch(array) and array.device.type == "cuda"  # type: ignore[union-attr]


@functools.cache
def gpu_uuid(ordinal: int) -> str:
    """Returns the UUID of a GPU of this process, in the daemons' format; empty if unknown."""
    properties = sys.modules["torch"].cuda.get_device_properties(ordinal)
    uuid = str(getattr(properties, "uuid", ""))
    return f"GPU-{uuid}" if uuid and not uuid.startswith("GPU-") else uuid


def dtype_of(array: Array, what: str) -> int:
    """Returns the `DType` of float elements.

    Args:
        array: A float32 or float16 numpy array, a `BFloat16` or a torch tensor.
        what: Name of the array in the error.

    Raises:
        TypeError: Any other array or element type.
    """
    if isinstance(array, BFloat16):
        return tensor_pb2.DTYPE_BF16
    if (known := _BY_DTYPE.get(getattr(array, "dtype", None))) is not None:
        return known
    if not isinstance(array, np.ndarray) and not is_torch(array):
        raise TypeError(
            f"{what} is a {type(array).__name__}, not a numpy array, BFloat16 or torch tensor"
        )
    # numpy's name of a dtype has no byte order. torch's name has the prefix "torch.".
    name = array.dtype.name if isinstance(array, np.ndarray) else str(array.dtype)[len("torch.") :]
    if name not in _DTYPES:
        raise TypeError(f"{what} has elements of {array.dtype}, not float32, float16 or bfloat16")
    return _BY_DTYPE.setdefault(array.dtype, _DTYPES[name])


def dtype_number(name: DTypeName) -> int:
    """Returns the `DType` of a name."""
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {sorted(_DTYPES)}")
    return _DTYPES[name]


def dtype_name(number: int) -> DTypeName:
    """Returns the name of a float `DType`."""
    return _NAMES[number]  # type: ignore[return-value]


def itemsize(dtype: int) -> int:
    """Bytes of one element."""
    return int(_STORAGE[dtype].itemsize)


def _to_bytes(array: Array) -> bytes:
    """Returns the elements of an `engine_array` in C order, copied off the device."""
    if isinstance(array, BFloat16):
        return array.bits.tobytes()
    if isinstance(array, np.ndarray):
        return array.tobytes()
    # Read by address, because numpy has no bfloat16 and would need three views.
    host = array.cpu().contiguous()
    return ctypes.string_at(host.data_ptr(), host.nbytes) if host.nbytes else b""


def fill(
    tensor: tensor_pb2.Tensor,
    array: Array,
    what: str,
    place: tensor_pb2.RegionSlice | None = None,
) -> None:
    """Fills an empty message with a float array: its place if it has one, else a copy."""
    tensor.dtype = dtype_of(array, what)  # type: ignore[assignment]
    tensor.shape.extend(array.shape)
    if place is None:
        tensor.data = _to_bytes(engine_array(array, what))
    else:
        tensor.slice.CopyFrom(place)


def integers_on_host(array: Any, what: str) -> npt.NDArray[Any]:
    """Returns an array, a list or a tensor of integers, on any device, as a numpy array.

    Raises:
        TypeError: It has other elements.
    """
    host = np.asarray(array.detach().resolve_neg().cpu() if is_torch(array) else array)
    # An empty list has no type of its own.
    if host.size and host.dtype.kind not in "iu":
        raise TypeError(f"{what} has elements of {host.dtype}, not integers")
    return host


def encode_indices(indices: npt.NDArray[Any]) -> tensor_pb2.Tensor:
    """Returns the tensor message of indices of rows.

    Raises:
        ValueError: An index is below 0.
    """
    if indices.size and indices.min() < 0:
        raise ValueError(f"index {indices.min()} is below 0")
    held = indices.astype(_STORAGE[tensor_pb2.DTYPE_U32])
    return tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_U32, shape=indices.shape, data=held.tobytes())


def decode_numpy(tensor: tensor_pb2.Tensor) -> Any:
    """Returns a writable numpy array, or for bfloat16 a `BFloat16`."""
    array = np.frombuffer(tensor.data, _STORAGE[tensor.dtype]).reshape(tensor.shape).copy()
    return BFloat16(array) if tensor.dtype == tensor_pb2.DTYPE_BF16 else array


def decoder_like(array: Array | None) -> Decoder:
    """Returns the decoder whose results have the array's type and device."""
    if array is None or not is_torch(array):
        return decode_numpy
    torch = sys.modules["torch"]
    device = array.device  # type: ignore[union-attr]

    def decode_torch(tensor: tensor_pb2.Tensor) -> Any:
        copy = np.frombuffer(tensor.data, _STORAGE[tensor.dtype]).reshape(tensor.shape).copy()
        if tensor.dtype == tensor_pb2.DTYPE_U32:
            # torch's indices are int64.
            copy = copy.astype(np.int64)
        made = torch.from_numpy(copy)
        if tensor.dtype == tensor_pb2.DTYPE_BF16:
            made = made.view(torch.bfloat16)
        return made.to(device)

    return decode_torch


def empty_like(like: Array | None, shape: tuple[int, ...], dtype: DTypeName) -> Array:
    """Returns an uninitialised array of the type and device of `like`; None: numpy."""
    if like is not None and is_torch(like):
        torch = sys.modules["torch"]
        device = like.device  # type: ignore[union-attr]
        made: Array = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        return made
    array = np.empty(shape, _STORAGE[_DTYPES[dtype]])
    return BFloat16(array) if dtype == "bfloat16" else array


def check_target(array: Array, shape: tuple[int, ...], dtype: DTypeName, what: str) -> None:
    """Raises ValueError if rows of this shape and dtype cannot be written to the array."""
    if dtype_of(array, what) != _DTYPES[dtype]:
        found = _NAMES[dtype_of(array, what)]
        raise ValueError(f"{what} has elements of {found}, but the model's rows are {dtype}")
    if tuple(array.shape) != shape:
        raise ValueError(f"{what} has shape {list(array.shape)}, but the rows have {list(shape)}")
    engine_array(array, what)  # only to refuse what has no memory
    held: Any = array.bits if isinstance(array, BFloat16) else array
    if isinstance(held, np.ndarray) and not held.flags.writeable:
        raise ValueError(f"{what} is read-only")
    strides = held.strides if isinstance(held, np.ndarray) else held.stride()
    shared = any(count > 1 and not step for count, step in zip(shape, strides, strict=True))
    if shared and 0 not in shape:
        raise ValueError(f"{what} has elements that share memory, so it cannot be written to")


def write(array: Array, place: tuple[Any, ...], values: Array) -> None:
    """Assigns values to a part of an array of the same type."""
    target: Any = array.detach() if is_torch(array) else array  # type: ignore[union-attr]
    if isinstance(target, BFloat16):
        assert isinstance(values, BFloat16)
        target.bits[place] = values.bits
    else:
        target[place] = values


def wait_for_stream(array: Array) -> None:
    """Waits for the current stream of a CUDA tensor, because engines use their own streams."""
    if on_gpu(array):
        sys.modules["torch"].cuda.current_stream(array.device).synchronize()  # type: ignore[union-attr]


# How long an engine may continue with a call that was given up. It checks for this every few
# milliseconds, and in an append before each message.
_GIVEN_UP_S = 10.0


def keep_for_a_while(*arrays: Array) -> None:
    """Keeps arrays alive that an embedded engine may still read or write."""
    held = list(arrays)
    timer = threading.Timer(_GIVEN_UP_S, held.clear)
    timer.daemon = True
    timer.start()
