"""Compares attends of the CPU device with a plain read and with torch's SDPA.

One run gives three results: `all` compared with a plain read, the default policy
compared with `all` and SDPA, and how rows and time of the default policy grow with the
context. All of them use the same rows and queries. Caches are cold before every call,
and the methods take turns: each runs once per repetition.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from spillway_kv import RotationHash
from worker import Worker

# Epsilon and delta of the default policy. If a larger share of outputs than delta has an error
# above epsilon, the timings mean nothing.
EPSILON = 0.1
DELTA = 0.1
DENSE_TOLERANCE = 1e-4
# Relative errors allowed for SDPA. In f32, torch sums 131,072 tokens with an error of 2e-4.
PEER_TOLERANCES = {torch.bfloat16: 0.1, torch.float32: 1e-3}
PEER_LENGTHS = (8192, 32768, 131072)
PEERS = {
    "sdpa_gqa_bf16": (torch.bfloat16, False),
    "sdpa_gqa_f32": (torch.float32, False),
    "sdpa_grouped_bf16": (torch.bfloat16, True),
    "sdpa_grouped_f32": (torch.float32, True),
}


class Tensors:
    """K/V and queries of the data directory as torch tensors."""

    def __init__(self, directory: Path) -> None:
        self.meta = json.loads((directory / "meta.json").read_text())
        shape = (self.meta["kv_head_count"], self.meta["token_count"], self.meta["head_dim"])
        self.k, self.v = (
            torch.from_numpy(np.fromfile(directory / f"{name}.bf16", np.int16).reshape(shape)).view(
                torch.bfloat16
            )
            for name in ("k", "v")
        )
        self.queries = torch.from_numpy(np.fromfile(directory / "queries.f32", np.float32)).reshape(
            -1, self.meta["query_head_count"], self.meta["head_dim"]
        )

    def query_index(self, length: int, i: int) -> int:
        return self.meta["lengths"].index(length) * self.meta["queries_per_length"] + i

    def visible(self, length: int, i: int) -> int:
        return length - i * self.meta["query_stride"]


def reference(tensors: Tensors, query: int, n: int) -> np.ndarray:
    """Attention in float64, [H_q, d]."""
    q = tensors.queries[query].double()
    group = q.shape[0] // tensors.k.shape[0]
    out = []
    for head in range(tensors.k.shape[0]):
        k, v = (x[head, :n].double() for x in (tensors.k, tensors.v))
        logits = q[head * group : (head + 1) * group] @ k.T / math.sqrt(q.shape[1])
        out.append(logits.softmax(-1) @ v)
    return torch.cat(out).numpy()


def relative_errors(out: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Per query head: ||out - exact|| / ||exact||."""
    difference = out.reshape(exact.shape) - exact
    return np.linalg.norm(difference, axis=1) / np.linalg.norm(exact, axis=1)


class Sdpa:
    """torch's attention of one query over the first n rows, which are contiguous.

    With `grouped`, the query heads of a KV head are passed as several queries of one head. This is
    the same attention, but torch does not read K and V again for each query head.
    """

    def __init__(self, tensors: Tensors, n: int, dtype: torch.dtype, grouped: bool) -> None:
        self.dtype = dtype
        self.grouped = grouped
        self.k, self.v = (x[None, :, :n].to(dtype).contiguous() for x in (tensors.k, tensors.v))

    @torch.inference_mode()
    def __call__(self, q: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Returns microseconds and the output. The time does not include the conversion of q."""
        shape = (1, self.k.shape[1], -1, q.shape[1]) if self.grouped else (1, len(q), 1, q.shape[1])
        q = q.to(self.dtype).reshape(shape)
        start = time.perf_counter()
        out = torch.nn.functional.scaled_dot_product_attention(
            q, self.k, self.v, enable_gqa=not self.grouped
        )
        return 1e6 * (time.perf_counter() - start), out


def check(worker: Worker, tensors: Tensors, length: int, scratch: Path) -> dict[str, float]:
    """Errors of `all` and of the default policy. Raises RuntimeError if they are too large."""
    dense, sparse = [], []
    for i in range(tensors.meta["queries_per_length"]):
        query, n = tensors.query_index(length, i), tensors.visible(length, i)
        exact = reference(tensors, query, n)
        dense.append(relative_errors(worker.output("all", query, n, scratch), exact))
        sparse.append(relative_errors(worker.output("default", query, n, scratch), exact))
    found = {
        "all_error_max": float(np.max(dense)),
        "default_error_mean": float(np.mean(sparse)),
        "default_error_max": float(np.max(sparse)),
        "default_violation_fraction": float(np.mean(np.array(sparse) > EPSILON)),
    }
    if not found["all_error_max"] < DENSE_TOLERANCE:
        raise RuntimeError(f"`all` at {length} tokens is off by {found['all_error_max']:.2g}")
    # Delta plus three standard deviations, for this number of outputs.
    limit = DELTA + 3 * math.sqrt(DELTA * (1 - DELTA) / np.size(sparse))
    if not found["default_violation_fraction"] <= limit:
        raise RuntimeError(
            f"the default policy at {length} tokens misses epsilon in "
            f"{found['default_violation_fraction']:.2f} of the outputs"
        )
    return found


def check_peers(peers: dict[str, Sdpa], tensors: Tensors, length: int) -> None:
    query = tensors.query_index(length, 0)
    exact = reference(tensors, query, length)
    for name, peer in peers.items():
        error = relative_errors(peer(tensors.queries[query])[1].float().numpy(), exact).max()
        if not error < PEER_TOLERANCES[peer.dtype]:
            raise RuntimeError(f"{name} at {length} tokens is off by {error:.2g}")


def measure_length(
    worker: Worker, tensors: Tensors, length: int, repetitions: int
) -> dict[str, Any]:
    """Medians over repetitions and queries at one length."""
    with tempfile.TemporaryDirectory() as folder:
        row: dict[str, Any] = {
            "token_count": length,
            **check(worker, tensors, length, Path(folder) / "out"),
        }
    row_bytes = 2 * tensors.meta["head_dim"] * 2
    peers = {}
    if length in PEER_LENGTHS:
        peers = {name: Sdpa(tensors, length, *how) for name, how in PEERS.items()}
        check_peers(peers, tensors, length)
    times: dict[str, list[float]] = {}
    touched = []
    certified = []
    count = tensors.meta["queries_per_length"]
    for repetition in range(-1, repetitions):  # the first is a warm-up
        i = repetition % count
        query, n = tensors.query_index(length, i), tensors.visible(length, i)
        took = {"read_us": worker.read(n)}
        took["all_us"] = worker.attend("all", query, n)["us"]
        answer = worker.attend("default", query, n)
        took["default_us"] = answer["us"]
        for name, peer in peers.items():
            worker.call("flush")
            # SDPA attends to all `length` rows, a few more than the visible ones.
            took[f"{name}_us"] = peer(tensors.queries[query])[0]
        if repetition < 0:
            continue
        touched += answer["touched_row_counts"]
        certified += answer["certified_errors"]
        for name, us in took.items():
            times.setdefault(name, []).append(us)
    row |= {name: statistics.median(values) for name, values in times.items()}
    row["quartiles_us"] = {
        name: [float(x) for x in np.quantile(values, (0.25, 0.75))]
        for name, values in times.items()
    }
    row["touched_rows_mean"] = statistics.mean(touched)
    row["certified_error_mean"] = statistics.mean(certified)
    size = tensors.meta["kv_head_count"] * length * row_bytes
    row["read_gb_per_s"] = size / row["read_us"] / 1e3
    row["all_gb_per_s"] = size / row["all_us"] / 1e3
    row["all_share_of_read_rate"] = row["read_us"] / row["all_us"]
    row["all_over_default"] = row["all_us"] / row["default_us"]
    # The policy must read the codes of all keys (bits per dimension, and a factor of 2 bytes) and
    # the touched rows.
    code_bytes = tensors.meta["head_dim"] * RotationHash().bits_per_dim // 8 + 2
    needed = code_bytes * length + row_bytes * row["touched_rows_mean"]
    row["default_read_us"] = row["read_us"] * needed / (row_bytes * length)
    if peers:
        row |= against_fastest(row)
    return row


def against_fastest(row: dict[str, Any]) -> dict[str, Any]:
    """The fastest form of SDPA, and its time divided by that of the default policy."""
    fastest = min(PEERS, key=lambda name: row[f"{name}_us"])
    return {
        "fastest_sdpa": fastest,
        "fastest_sdpa_over_default": row[f"{fastest}_us"] / row["default_us"],
    }


def fit_log(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Least-squares fit of a + b log2(n) to the field `name`, where n is the token count."""
    x = np.log2([row["token_count"] for row in rows])
    y = np.array([row[name] for row in rows], dtype=float)
    b, a = np.polyfit(x, y, 1)
    rest = y - (a + b * x)
    spread = float(((y - y.mean()) ** 2).sum())
    return {"a": float(a), "b": float(b), "r_squared": 1 - float((rest**2).sum()) / spread}


def run(binaries: Path, data: Path, repetitions: int) -> dict[str, Any]:
    tensors = Tensors(data)
    lengths = tensors.meta["lengths"]
    with Worker(binaries / "bench" / "cpu" / "attend_worker", data) as worker:
        torch.set_num_threads(worker.info["thread_count"])
        rows = []
        for length in lengths:
            rows.append(measure_length(worker, tensors, length, repetitions))
            print(_line(rows[-1]), flush=True)
        memory = worker.call("memory")
    name = "touched_rows_mean"
    fits = {name: fit_log(rows, name)} if len(rows) > 2 else {}
    return {
        "shape": "8 KV heads, 4 query heads each, 128 dimensions, bf16, one query, cold caches",
        "device": worker.info["device"],
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "repetitions": repetitions,
        "plain_read": worker.info["plain_read"],
        "data": tensors.meta,
        "rows": rows,
        "fits": fits,
        "device_memory": memory,
    }


def _line(row: dict[str, Any]) -> str:
    fastest = row.get("fastest_sdpa")
    peer = f", {fastest} {row[f'{fastest}_us']:.0f} us" if fastest else ""
    return (
        f"  {row['token_count']:7d} tokens: "
        f"read {row['read_us']:.0f} us, all {row['all_us']:.0f} us, "
        f"default {row['default_us']:.0f} us over {row['touched_rows_mean']:.0f} rows{peer}"
    )
