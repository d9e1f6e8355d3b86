"""What the tests' engines run on: vLLM's CPU build, or a GPU if SPILLWAY_TEST_DEVICE is "cuda"."""

from __future__ import annotations

import os
from typing import Any

ON_GPU = os.environ.get("SPILLWAY_TEST_DEVICE", "").startswith("cuda")

# Several engines run at a time, so each gets a fixed part of the GPU. FlashAttention, to which the
# plugin is compared, has no float32.
ENGINE: dict[str, Any] = (
    {"dtype": "bfloat16", "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}
    if ON_GPU
    else {"dtype": "float32"}
)
# Of an engine whose CUDA graphs are to be tested.
GRAPHS: dict[str, Any] = {"enforce_eager": False} if ON_GPU else {}
# Options of a daemon.
DAEMON = ["--device", "cuda:0", "--gpu-memory-limit", "2GiB"] if ON_GPU else ["--device", "cpu"]


def host_memory(kib: int) -> str:
    """Host memory for as many rows as `kib` KiB hold in float32."""
    return f"{kib // 2 if ON_GPU else kib}KiB"
