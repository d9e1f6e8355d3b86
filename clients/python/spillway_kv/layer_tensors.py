"""The CUDA tensors of a layer of a step, as libspillway takes them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from spillway_kv._native_step import F32, Tensors, set_place
from spillway_kv.places import GPU_ALIGNMENT, Place, byte_strides, has_gpu_rows, has_gpu_strides
from spillway_kv.tensors import OutDType, dtype_of, engine_array


class LayerTensors:
    """A spillway_step_tensors that is filled in for one layer after the other.

    A model's tensors usually have the same form in every layer and step. Tensors of the form of the
    last ones are not checked again.

    Attributes:
        at: The struct, by reference.

    Args:
        check: Checks q, k, v and the element type that is asked of the output; returns the number
            of the output's element type.
    """

    def __init__(self, check: Callable[[Any, Any, Any, OutDType | None], int]) -> None:
        self._check = check
        self._tensors = Tensors()
        self.at = ctypes.byref(self._tensors)
        # Dtypes, shapes and strides of the last tensors.
        self._form: Any = None
        self._out_dtype = torch.float32
        self._rows_fit = False

    def fill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        out_dtype: OutDType | None,
        *,
        wants_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """Fills in addresses and strides.

        Args:
            q: Queries [B, T, H_q, d].
            k: Keys [B, H_kv, T, d].
            v: Values, with the same shape.
            out: Where the output is written: a contiguous tensor of the output's dtype and of q's
                shape, aligned to 16 bytes. None: a new one.
            out_dtype: Element type of the output. None means that of q.
            wants_lse: Whether the log-sum-exp is computed.

        Returns:
            Output, log-sum-exp [B, T, H_q] in float32 or None, and an object that must live until
            the struct was read.

        Raises:
            ValueError: A shape or dtype does not fit.
        """
        form = (
            (out_dtype, q.dtype, k.dtype, v.dtype),
            (q.shape, k.shape, v.shape),
            (q.stride(), k.stride(), v.stride()),
            (q.is_neg(), k.is_neg(), v.is_neg()),
        )
        if form != self._form:
            self._form = None
            for tensor, what in ((q, "q"), (k, "k"), (v, "v")):
                engine_array(tensor, what)  # only to refuse what has no memory
            self._out_dtype = self._take_form(q, k, v, out_dtype)
            self._form = form
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if not self._rows_fit or (addresses[0] | addresses[1] | addresses[2]) % GPU_ALIGNMENT:
            self._form = None
            q, k, v = (_gpu_rows(x, what) for x, what in ((q, "q"), (k, "k"), (v, "v")))
            self._take_form(q, k, v, out_dtype)
            addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if out is None:
            out = torch.empty(q.shape, dtype=self._out_dtype, device=q.device)
        elif out.dtype != self._out_dtype or out.shape != q.shape or not out.is_contiguous():
            raise ValueError(
                f"out is {out.dtype} {list(out.shape)} with strides {list(out.stride())}, not a "
                f"contiguous {self._out_dtype} {list(q.shape)}"
            )
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if wants_lse else None
        tensors = self._tensors
        tensors.q.data, tensors.k.data, tensors.v.data = addresses
        tensors.out.data = out.data_ptr()
        tensors.lse = None if lse is None else lse.data_ptr()
        return out, lse, (q, k, v)

    def _take_form(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_dtype: OutDType | None
    ) -> torch.dtype:
        """Checks the tensors and stores their strides. Returns the output's dtype."""
        asked = self._check(q, k, v, out_dtype)
        dtype = torch.float32 if asked == F32 else q.dtype
        tensors = self._tensors
        tensors.q_dtype, tensors.out_dtype = dtype_of(q, "q"), asked
        # q and out are [B, T, H, d], k and v are [B, H, T, d].
        out = torch.empty(q.shape, dtype=dtype, device="meta")
        set_place(tensors.out, Place(0, byte_strides(out)), 1, 2)
        set_place(tensors.q, Place(0, byte_strides(q)), 1, 2)
        set_place(tensors.k, Place(0, byte_strides(k)), 2, 1)
        set_place(tensors.v, Place(0, byte_strides(v)), 2, 1)
        self._rows_fit = all(has_gpu_strides(x) and not x.is_neg() for x in (q, k, v))
        return dtype


def _gpu_rows(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Returns the tensor, or a copy that an engine on a GPU can read."""
    held: Any = engine_array(tensor, what)
    return held if has_gpu_rows(held) else held.contiguous()


def current_stream(device: torch.device | None) -> int:
    """Returns the handle of torch's current stream on a GPU. None: torch's current GPU."""
    if _raw_stream is not None and device is not None:
        return int(_raw_stream(device.index))
    return int(torch.cuda.current_stream(device).cuda_stream)


# The function that torch's compiled code uses. It creates no stream object.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
