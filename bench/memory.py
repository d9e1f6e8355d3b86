"""Measures the memory that a daemon uses in addition to the rows."""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path
from typing import Any

import numpy as np
import spillway_kv
import torch
from spillway_kv.lab import serving

ROOT = Path(__file__).resolve().parent.parent

# The data's rows are appended to each layer, so that the rows are large compared with memory that
# does not grow with them.
LAYER_COUNT = 8


def server_pid(target: str) -> int:
    """The ID of the process that listens on a unix socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(target.removeprefix("unix:"))
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", credentials)[0]


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"process {pid} has no VmRSS")


def run(data: Path) -> dict[str, Any]:
    """Appends the data's rows to a new daemon, attends once, and reads its statistics."""
    meta = json.loads((data / "meta.json").read_text())
    heads, tokens, dim = meta["kv_head_count"], meta["token_count"], meta["head_dim"]
    k, v = (
        torch.from_numpy(np.fromfile(data / f"{name}.bf16", np.int16).reshape(heads, tokens, dim))
        for name in ("k", "v")
    )
    k, v = k.view(torch.bfloat16), v.view(torch.bfloat16)
    q = np.fromfile(data / "queries.f32", np.float32, meta["query_head_count"] * dim)
    log = ROOT / "build" / "bench" / "spillwayd.log"
    binary = serving.find_binary(ROOT)
    with serving.running_daemon(binary, log, "--device", "cpu", timeout=30) as target:
        pid = server_pid(target)
        with spillway_kv.connect(target) as client:
            model = client.create_model(
                layer_count=LAYER_COUNT,
                query_head_count=meta["query_head_count"],
                kv_head_count=heads,
                head_dim=dim,
                dtype="bfloat16",
            )
            sequence = client.create_sequence(model)
            empty, empty_rss = client.statistics().memory, resident_bytes(pid)
            for layer in range(LAYER_COUNT):
                sequence.append(layer, 0, k, v, timeout=600)
            sequence.attend(0, q.reshape(1, -1, dim))
            full, full_rss = client.statistics().memory, resident_bytes(pid)
    row_bytes = LAYER_COUNT * heads * tokens * 2 * dim * 2
    per_head_token = full.index_bytes / (LAYER_COUNT * heads * tokens)
    limit = model.hash_weights.bits_per_dim * dim / 8 + 4
    result = {
        "layer_count": LAYER_COUNT,
        "token_count": tokens,
        "row_bytes": row_bytes,
        "row_page_bytes": full.row_bytes,
        "index_bytes": full.index_bytes,
        "index_bytes_per_token_and_kv_head": per_head_token,
        "index_bytes_limit": limit,
        "used_bytes_before": empty.used_bytes,
        "used_bytes": full.used_bytes,
        "arena_committed_bytes": full.arena_committed_bytes,
        "arena_huge_page_bytes": full.arena_huge_page_bytes,
        "other_bytes": full.other_bytes,
        "resident_bytes_before": empty_rss,
        "resident_bytes": full_rss,
        # Memory in addition to rows and index, divided by the bytes of rows: as charged to the
        # daemon's limit, and as the system counts for the process.
        "overhead_of_budget": (full.used_bytes - row_bytes - full.index_bytes) / row_bytes,
        "overhead_of_resident": (full_rss - row_bytes - full.index_bytes) / row_bytes,
        "resident_growth_overhead": (full_rss - empty_rss - row_bytes - full.index_bytes)
        / row_bytes,
    }
    print(
        f"  index {per_head_token:.2f} B per token and KV head (limit {limit:.0f}), "
        f"beyond rows and index: {result['overhead_of_budget']:.2%} by budget, "
        f"{result['overhead_of_resident']:.2%} resident",
        flush=True,
    )
    return result
