"""What the tests' engines run on: vLLM's CPU build, or a GPU if SPILLWAY_TEST_DEVICE is "cuda"."""

from __future__ import annotations

import os
from typing import Any

ON_GPU = os.environ.get("SPILLWAY_TEST_DEVICE", "").startswith("cuda")

EXACT, ROUNDED = "float32", "bfloat16"
# Options of engines. Random models run in float32, in which tokens can be compared strictly.
# Several engines run at a time, so each gets a fixed part of the GPU.
ENGINE: dict[str, Any] = {"dtype": EXACT} | (
    {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30} if ON_GPU else {}
)
# Of the trained model, which runs on a GPU as users run it.
OF_TRAINED: dict[str, Any] = {"dtype": ROUNDED if ON_GPU else EXACT}
# Of an engine whose CUDA graphs are to be tested.
GRAPHS: dict[str, Any] = {"enforce_eager": False} if ON_GPU else {}
# Options of a daemon.
DAEMON = ["--device", "cuda:0", "--gpu-memory-limit", "2GiB"] if ON_GPU else ["--device", "cpu"]
# Triton multiplies float32 as TF32, which has 10 bits after the point, if it is not told otherwise.
# torch does not, but its attention kernels may.
ENVIRONMENT = {"TRITON_F32_DEFAULT": "ieee"} if ON_GPU else {}


def stock_backend(dtype: str) -> dict[str, str]:
    """The option for the attention backend of stock vLLM. The CPU build has only one.

    FlashAttention has no float32.
    """
    if not ON_GPU:
        return {}
    return {"attention_backend": "TRITON_ATTN" if dtype == EXACT else "FLASH_ATTN"}
