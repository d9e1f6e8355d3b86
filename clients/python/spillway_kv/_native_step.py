"""Decode steps by libspillway, which chooses what carries their tensors."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from typing import Any

import numpy as np

from spillway_kv._library import Sums
from spillway_kv._native import Carrier, NativeChannel
from spillway_kv._proto import attention_service_pb2
from spillway_kv.places import Place, place_of
from spillway_kv.results import Model
from spillway_kv.tensors import (
    Array,
    BFloat16,
    dtype_number,
    dtype_of,
    is_torch,
    on_gpu,
    wait_for_stream,
)


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sequence_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


class Tensors(ctypes.Structure):
    _fields_ = (
        ("q_dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("q", _Tensor),
        ("k", _Tensor),
        ("v", _Tensor),
        ("out", _Tensor),
        ("lse", ctypes.c_void_p),
    )


def empty_like(q: Array, dtype: int, shape: tuple[int, ...]) -> Any:
    """Returns an empty array of q's type, on the CPU. It is pinned if q is on a GPU."""
    if is_torch(q):
        torch = sys.modules["torch"]
        kind = q.dtype if dtype == dtype_of(q, "q") else torch.float32  # type: ignore[union-attr]
        return torch.empty(shape, dtype=kind, device="cpu", pin_memory=on_gpu(q))
    if isinstance(q, BFloat16) and dtype == dtype_of(q, "q"):
        return BFloat16(np.empty(shape, np.uint16))
    numpy_dtype = q.dtype if isinstance(q, np.ndarray) else np.float32
    return np.empty(shape, numpy_dtype if dtype == dtype_of(q, "q") else np.float32)


class Share(ctypes.Structure):
    """A spillway_step_share."""

    _fields_ = (
        ("step", ctypes.c_void_p),
        ("code", ctypes.c_int32),
        ("layer_first", ctypes.c_int32),
        ("sequence_first", ctypes.c_int32),
        ("sequence_every", ctypes.c_int32),
        ("query_head_first", ctypes.c_int32),
        ("kv_head_first", ctypes.c_int32),
        ("lse", ctypes.c_void_p),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        ("query_head_count", ctypes.c_int32),
        ("kv_head_count", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("row_dtype", ctypes.c_int32),
    )


class NativeStep:
    """A step of an embedded engine or a daemon."""

    def __init__(
        self,
        channel: NativeChannel,
        message: attention_service_pb2.DecodeStep,
        model: Model,
        carrier: Carrier,
    ) -> None:
        """Begins the step.

        Args:
            channel: Channel to the engine.
            message: The step.
            model: Model of the sequences.
            carrier: What may carry the tensors.
        """
        self.channel = channel
        self._shape = (message.token_count, model.query_head_count, model.head_dim)
        heads = model.query_head_count, model.kv_head_count
        shape = _Shape(*heads, model.head_dim, dtype_number(model.dtype))
        self.handle = channel.begin_step(message.SerializeToString(), ctypes.byref(shape), carrier)
        self.end = self.handle.close
        self._tensors = Tensors()
        self._at = ctypes.byref(self._tensors)

    def ask(
        self, layer: int, q: Any, k: Any, v: Any, out_dtype: int, *, at_once: bool
    ) -> Callable[[], tuple[Any, Any]]:
        """Asks for an attend. The caller must call the result, which waits for the answer.

        Args:
            layer: As for `DecodeStep.attend`, like q, k and v.
            q: Queries.
            k: Keys.
            v: Values.
            out_dtype: Element type of the output.
            at_once: Return before the answer has arrived. Otherwise this call may wait for a part
                of the time.
        """
        self.check_open()
        out, lse, kept = put_all(self._tensors, q, k, v, out_dtype)
        answered = self.channel.ask_step(self.handle, layer, self._at, at_once=at_once)

        def answer() -> tuple[Any, Any]:
            if not answered:
                self.check_open()
                self.channel.await_step(self.handle, self._at)
            del kept[:]
            return back(out, q), back(lse, q)

        return answer

    def carrier(self) -> tuple[Carrier, str]:
        """Returns what carries the step, and why nothing better does."""
        return self.channel.step_carrier(self.handle)

    def check_open(self) -> None:
        """Raises ValueError if the step has ended or the client is closed."""
        self.channel.check_open()
        if self.handle.closed:
            raise ValueError("the step is closed")

    def results(self) -> SequenceABC[attention_service_pb2.AttendResult]:
        self.check_open()
        message = self.channel.step_results(self.handle)
        results = attention_service_pb2.AttendResponse.FromString(message).results
        for result in results:
            # The messages have no tensors; the statistics need the shape of the output.
            result.out.shape.extend(self._shape)
        return results

    def sums(self) -> Sums:
        """Returns the sums over the sequences of the last attend."""
        self.check_open()
        return self.channel.step_sums(self.handle)


F32 = dtype_number("float32")


def put_all(tensors: Tensors, q: Any, k: Any, v: Any, out_dtype: int) -> tuple[Any, Any, list[Any]]:
    """Fills in the addresses of a layer's arrays. Arguments as for `NativeStep.ask`.

    q, k and v are `engine_array`s.

    Returns:
        New arrays for the output and the log-sum-exp, on the CPU, and a list of objects that
        must live until these are written, such as copies of inputs.
    """
    shape = tuple(q.shape)
    out, lse = empty_like(q, out_dtype, shape), empty_like(q, F32, shape[:3])
    tensors.q_dtype, tensors.out_dtype = dtype_of(q, "q"), out_dtype
    # q and out are [B, T, H, d], k and v are [B, H, T, d].
    kept = [
        put(tensors.q, q, 1, 2),
        put(tensors.k, k, 2, 1),
        put(tensors.v, v, 2, 1),
        put(tensors.out, out, 1, 2),
    ]
    tensors.lse = address_of(lse)
    for array in {x.device: x for x in (q, k, v) if on_gpu(x)}.values():
        wait_for_stream(array)
    return out, lse, kept


def address_of(array: Any) -> int:
    """Returns the address of a contiguous array on the CPU."""
    place = place_of(array)
    assert place is not None
    return place.address


def put(tensor: _Tensor, array: Any, token: int, head: int) -> Any:
    """Fills in the address and strides of an array, or of a contiguous copy on the CPU.

    The copy of a CUDA tensor is complete when the tensor's current stream is.

    Args:
        tensor: The struct to fill in.
        array: [B, ...].
        token: The dimension of tokens.
        head: The dimension of heads.

    Returns:
        The array or the copy. It must live as long as the address is used.
    """
    place = place_of(array)
    if place is None:
        if on_gpu(array):
            pinned = sys.modules["torch"].empty(array.shape, dtype=array.dtype, pin_memory=True)
            array = pinned.copy_(array, non_blocking=True)
        elif is_torch(array):
            array = array.cpu().contiguous()
        # Not ascontiguousarray, which leaves a negative stride of a dimension of size 1.
        elif isinstance(array, BFloat16):
            array = BFloat16(array.bits.copy())
        else:
            array = array.copy()
        place = place_of(array)
        assert place is not None
    set_place(tensor, place, token, head)
    return array


def set_place(tensor: _Tensor, place: Place, token: int, head: int) -> None:
    """Fills in address and strides. `token` and `head` are the indices of these dimensions."""
    strides = place.strides
    tensor.data, tensor.sequence_stride = place.address, strides[0]
    tensor.token_stride, tensor.head_stride = strides[token], strides[head]


def back(array: Any, q: Any) -> Any:
    """Returns an output on q's device."""
    return array.to(q.device, non_blocking=True) if on_gpu(q) else array
