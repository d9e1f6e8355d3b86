"""Conversion of arrays to messages and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import encode
from spillway_kv.tensors import BFloat16, decode_numpy, decoder_like


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ">f4"])
def test_numpy_round_trip(rng: np.random.Generator, dtype: str) -> None:
    array = rng.standard_normal((2, 3, 4)).astype(dtype)
    back = decode_numpy(encode(array, "a"))
    np.testing.assert_array_equal(back, array)
    back[:] = 0  # the result is the caller's own copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_round_trip(dtype: torch.dtype) -> None:
    tensor = torch.randn(2, 3, 4).to(dtype).transpose(0, 2)
    back = decoder_like(tensor)(encode(tensor, "a"))
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_bfloat16_rounds_as_torch_does(rng: np.random.Generator) -> None:
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32)
    special = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000], np.uint32)
    array = np.concatenate([bits, special]).view(np.float32)
    mine = BFloat16.from_float32(array).to_float32()
    theirs = torch.from_numpy(array).bfloat16().float().numpy()
    np.testing.assert_array_equal(mine, theirs)


def test_bfloat16_without_torch_keeps_its_bits(rng: np.random.Generator) -> None:
    array = BFloat16(rng.integers(0, 2**16, (3, 5), dtype=np.uint16))
    back = decode_numpy(encode(array, "a"))
    assert isinstance(back, BFloat16)
    np.testing.assert_array_equal(back.bits, array.bits)


@pytest.mark.parametrize(
    "array", [np.zeros(3), np.zeros(3, np.uint16), torch.zeros(3, dtype=torch.float64), [1.0]]
)
def test_other_elements_are_refused(array: object) -> None:
    with pytest.raises(TypeError, match="q"):
        encode(array, "q")  # type: ignore[arg-type]
