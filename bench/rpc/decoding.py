"""Code that benchmarks of decode steps share: a sequence that decodes, and checks of its outputs.

Every turn decodes the same tokens from the same length. So turns under different conditions
must give bit-identical outputs; otherwise the run fails.
"""

from __future__ import annotations

import os
import platform
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from spillway_kv import Client, Policy, Sequence

ROOT = Path(__file__).resolve().parents[2]
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CHUNK = 4096
# Largest relative error of an output in single precision, compared with double precision, for rows
# in half precision.
ERROR_MAX = 2e-3
_INPUTS = 64


def normal(seed: int, *shape: int) -> np.ndarray:
    """Standard normal numbers in half precision."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(np.float16)


def filled(client: Client, token_count: int) -> Sequence:
    """A sequence of a new model with one layer. It repeats the same CHUNK rows.

    So attention over the whole sequence equals attention over CHUNK rows.
    """
    if token_count % CHUNK:
        raise SystemExit(f"{token_count} tokens are no multiple of {CHUNK}")
    model = client.create_model(
        layer_count=1,
        query_head_count=HEADS,
        kv_head_count=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="float16",
    )
    sequence = client.create_sequence(model)
    rows = normal(1, KV_HEADS, CHUNK, HEAD_DIM)
    for _ in range(0, token_count, CHUNK):
        sequence.append(0, None, rows, rows)
    return sequence


def error_of(out: np.ndarray, q: np.ndarray, weight: int, k: Any = None, v: Any = None) -> float:
    """Relative error of an output [H_q, d], compared with attention in double precision.

    Attention is over `weight` times the CHUNK rows, and over one more row with k and v [H_kv, d].
    None: there is no such row. q is [H_q, d].
    """
    rows = normal(1, KV_HEADS, CHUNK, HEAD_DIM).astype(np.float64)
    group = HEADS // KV_HEADS
    wanted = np.empty((HEADS, HEAD_DIM))
    for head in range(HEADS):
        keys, values, weights = rows[head // group], rows[head // group], np.full(CHUNK, weight)
        if k is not None:
            keys = np.vstack([keys, k[head // group]])
            values = np.vstack([values, v[head // group]])
            weights = np.append(weights, 1)
        logits = keys @ q[head].astype(np.float64) / np.sqrt(HEAD_DIM)
        shares = weights * np.exp(logits - logits.max())
        wanted[head] = shares @ values / shares.sum()
    return float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))


class Decoder:
    """Decodes one token after another. Every turn decodes the same tokens.

    Attributes:
        checked: Steps whose answer was compared, bit for bit, with that of an earlier turn.
        error: Relative error of a step with policy `all`, against double precision.
    """

    def __init__(self, client: Client, sequence: Sequence) -> None:
        self._client, self._sequence = client, sequence
        self._start = sequence.token_count
        self._q = [normal(100 + i, 1, 1, HEADS, HEAD_DIM) for i in range(_INPUTS)]
        self._row = [normal(200 + i, 1, KV_HEADS, 1, HEAD_DIM) for i in range(_INPUTS)]
        self._seen: list[int] = []
        self.checked = 0
        self.error = self._error()

    def _error(self) -> float:
        q, row = self._q[0], self._row[0]
        with self._client.begin_step([self._sequence], policy=Policy(selector="all")) as step:
            out, _ = step.attend(0, q, row, row, out_dtype="float32")
        self._sequence.truncate(self._start)
        weight = self._start // CHUNK
        error = error_of(out[0, 0], q[0, 0], weight, row[0, :, 0], row[0, :, 0])
        if not error <= ERROR_MAX:
            raise SystemExit(f"a step's error is {error}, more than {ERROR_MAX}")
        return error

    def turn(self, count: int) -> np.ndarray:
        """Milliseconds [count, 2] of steps: the attend alone, and with announcing the step."""
        took = np.empty((count, 2))
        for i in range(count):
            q, row = self._q[i % _INPUTS], self._row[i % _INPUTS]
            begin = time.perf_counter()
            with self._client.begin_step([self._sequence]) as step:
                begun = time.perf_counter()
                out, _ = step.attend(0, q, row, row, out_dtype="float32")
                end = time.perf_counter()
            took[i] = 1000 * (end - begun), 1000 * (end - begin)
            self._compare(i, out)
        self._sequence.truncate(self._start)
        return took

    def _compare(self, i: int, out: np.ndarray) -> None:
        said = zlib.crc32(np.ascontiguousarray(out))
        if i == len(self._seen):
            self._seen.append(said)
        elif self._seen[i] == said:
            self.checked += 1
        else:
            raise SystemExit(f"step {i} of a turn answers otherwise than in the turn before")


def quantiles(took: np.ndarray) -> dict[str, float]:
    """p50 and p99, as fields of the output."""
    return {f"p{share}_ms": float(np.percentile(took, share)) for share in (50, 99)}


def surroundings(client: Client) -> dict[str, Any]:
    """Facts on which the results depend, in addition to the code."""
    devices = [device.description or device.name for device in client.server_info.devices]
    names = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "transport": client.step_transport,
        "devices": devices,
        "cores": len(os.sched_getaffinity(0)),
        "processor": names[0].split(": ")[1] if names else platform.processor(),
        "load": os.getloadavg()[0],
    }
