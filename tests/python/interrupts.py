"""Ctrl-C at any line of the client."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import spillway_kv

_PACKAGE = str(Path(spillway_kv.__file__).parent)
_FILES = (
    f"{_PACKAGE}/transformers/",
    f"{_PACKAGE}/step",
    f"{_PACKAGE}/sequence",
    f"{_PACKAGE}/batch.py",
    f"{_PACKAGE}/_native_step.py",
)


class Interrupted:
    """Raises KeyboardInterrupt at the n-th line of some files that this thread runs.

    Args:
        line: n.
        files: What the paths of the files begin with.
    """

    def __init__(self, line: int, files: tuple[str, ...] = _FILES) -> None:
        self._left = line
        self._files = files
        self.fired = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        """The trace function for sys.settrace."""
        if not frame.f_code.co_filename.startswith(self._files):
            return None
        if event == "line" and not self.fired:
            self._left -= 1
            if self._left < 0:
                self.fired = True
                raise KeyboardInterrupt
        return self

    def run(self, call: Callable[[], Any]) -> bool:
        """Runs the call, and returns whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return self.fired
