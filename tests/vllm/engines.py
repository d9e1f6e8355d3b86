"""vLLM engines in separate processes, to which tests send schedules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hardware import ENGINE, ENVIRONMENT, stock_backend

_DRIVE = Path(__file__).with_name("drive.py")


class Engine:
    """A process with a vLLM engine. Use `running` to create one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, what: Any) -> Any:
        """Sends a schedule or "counts", and returns the answer.

        Raises:
            RuntimeError: The process has ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine has ended with {self.process.wait()}")
        return json.loads(line)


@contextmanager
def running(
    model: Path, log: Path, environment: dict[str, str] | None = None, **arguments: Any
) -> Iterator[Engine]:
    """Runs an engine of stock vLLM, or of the plugin with `attention_backend="CUSTOM"`.

    It computes in float32, unless `dtype` is given (`hardware.OF_TRAINED`).

    Args:
        model: The model's folder.
        log: The file for its messages.
        environment: Variables in addition to those of this process.
        **arguments: vLLM's `EngineArgs`.
    """
    given = {
        "model": str(model),
        **ENGINE,
        "enforce_eager": True,
        "disable_log_stats": False,
        **arguments,
    }
    given = {**stock_backend(given["dtype"]), **given}
    with log.open("w") as messages:
        process = subprocess.Popen(
            [sys.executable, str(_DRIVE), json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
        )
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"the engine did not start: {log.read_text()[-4000:]}")
            yield Engine(process)
        finally:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
