"""Runs and calls the process that holds rows on a CPU device (bench/cpu/attend_worker.cc)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np


class Worker:
    """One process of attend_worker. Use it as a context manager."""

    def __init__(self, binary: Path, data: Path) -> None:
        self._process = subprocess.Popen(
            [binary, data], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.info = self._read()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"attend_worker ended with {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def call(self, op: str, **fields: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def attend(self, selector: str, query: int, visible: int) -> dict[str, Any]:
        """One attend from cold caches. `us` in the result is device time."""
        self.call("flush")
        return self.call("attend", selector=selector, query=query, visible=visible)

    def output(self, selector: str, query: int, visible: int, file: Path) -> np.ndarray:
        """The output of one attend, [H_q * d] float32."""
        self.call("attend", selector=selector, query=query, visible=visible, out=str(file))
        return np.fromfile(file, np.float32)

    def read(self, token_count: int) -> float:
        """Microseconds of a plain parallel read of the rows, from cold caches."""
        return self.call("read", token_count=token_count)["us"]
