"""The engine's sample of rows that stay on the GPU, in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Tokens with hashes below this are in the resident sample: 1 % of 2^32, as of a model by default.
# The first tokens are always in GPU memory.
_RESIDENT_LIMIT = int(0.01 * 2**32)
_RESIDENT_SINK = 64


def resident_sample(layer: int, kv_head: int, token_count: int) -> npt.NDArray[np.bool_]:
    """Which of the first tokens a GPU keeps by default: host/core/keyed_hash.h in numpy."""
    a = _split_mix(_split_mix(layer << 32 | kv_head))
    multiplier, offset, mask = a & 0xFFFFFFFF | 1, a >> 32, _split_mix(a) & 0xFFFFFFFF
    with np.errstate(over="ignore"):
        h = np.arange(token_count, dtype=np.uint32) * np.uint32(multiplier) + np.uint32(offset)
        h ^= h >> np.uint32(16)
        h *= np.uint32(0x85EBCA6B)
        h ^= np.uint32(mask)
        h ^= h >> np.uint32(13)
        h *= np.uint32(0xC2B2AE35)
        h ^= h >> np.uint32(16)
    held: npt.NDArray[np.bool_] = h < _RESIDENT_LIMIT
    held[:_RESIDENT_SINK] = True
    return held


def _split_mix(x: int) -> int:
    limit = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & limit
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & limit
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & limit
    return x ^ (x >> 31)
