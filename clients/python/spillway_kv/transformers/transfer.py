"""Copies between the model's device and the host, with as few waits as possible."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

import torch

# Larger copies do not pay for the pinned memory that they would leave behind.
_PINNED_BYTES_MAX = 4 << 20


def to_host(tensors: SequenceABC[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors in host memory. Tensors that are already there are returned unchanged.

    Small tensors on a GPU are copied together, so that the host waits for the GPU once, and not
    once per tensor.

    Args:
        tensors: Tensors of any shapes and strides on one device.
    """
    first = tensors[0]
    if (
        first.device.type != "cuda"
        or any(tensor.dtype != first.dtype for tensor in tensors)
        or sum(tensor.nbytes for tensor in tensors) > _PINNED_BYTES_MAX
    ):
        return [tensor.cpu() for tensor in tensors]
    packed = torch.cat([tensor.reshape(-1) for tensor in tensors])
    host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
    host.copy_(packed, non_blocking=True)
    torch.cuda.current_stream(first.device).synchronize()
    parts = host.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a host tensor on the device. The host does not wait for small copies."""
    if device.type != "cuda" or tensor.nbytes > _PINNED_BYTES_MAX:
        return tensor.to(device)
    # torch does not reuse pinned memory before the copy is complete.
    return tensor.pin_memory().to(device, non_blocking=True)
