"""Code that the benchmarks of bulk rows share: their shape, timing and reports."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

LAYERS, KV_HEADS, HEAD_DIM = 8, 8, 128
REPETITIONS = 5


def report(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
