"""Transfer of a step's tensors to the host and back."""

from __future__ import annotations

import pytest
import torch
from daemon_process import on_gpu
from spillway_kv.transformers.transfer import to_device, to_host

DEVICES = ["cpu", *(["cuda"] if on_gpu() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [1, 3, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back(device: str, length: int, dtype: torch.dtype) -> None:
    q = torch.randn(2, length, 8, 16, device=device).to(dtype).transpose(1, 2)
    k, v = torch.randn(2, 2, 2, length, 16, device=device).to(dtype)
    arrived = to_host((q, k, v))
    assert all(tensor.device.type == "cpu" for tensor in arrived)
    for tensor, sent in zip(arrived, (q, k, v), strict=True):
        assert torch.equal(tensor, sent.cpu())
        back = to_device(tensor, sent.device)
        assert back.device == sent.device
        assert torch.equal(back, sent)


@pytest.mark.parametrize("device", DEVICES)
def test_mixed_dtypes(device: str) -> None:
    q = torch.randn(1, 4, 1, 16, device=device)
    k = q.bfloat16()
    for tensor, sent in zip(to_host((q, k)), (q, k), strict=True):
        assert tensor.dtype == sent.dtype
        assert torch.equal(tensor, sent.cpu())
