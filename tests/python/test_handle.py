"""Handles of libspillway: when what they name is freed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from daemon_process import binary
from helpers import process_of
from spillway_kv._handle import Handle, Handles
from spillway_kv.lab import serving


def test_the_last_call_frees_what_was_closed() -> None:
    freed: list[int] = []
    handle = Handle(7, freed.append, "step", Handles())

    def inside(pointer: int, more: str) -> str:
        handle.close()  # as another thread may
        assert freed == []
        return f"{pointer} {more}"

    assert handle.call(inside, "and more") == "7 and more"
    assert freed == [7]
    assert handle.closed
    for use in (handle.held, lambda: handle.call(inside, "")):
        with pytest.raises(ValueError, match="the step is closed"):
            use()
    handle.close()
    assert freed == [7]


def test_an_error_keeps_nothing() -> None:
    freed: list[int] = []
    handle = Handle(7, freed.append, "step", Handles())

    def refuse(pointer: int) -> Any:
        raise RuntimeError(f"refused {pointer}")

    with pytest.raises(RuntimeError, match="refused 7") as kept:
        handle.call(refuse)
    handle.close()
    assert freed == [7]
    del kept


def test_a_handle_that_is_dropped_is_freed() -> None:
    freed: list[int] = []
    Handle(7, freed.append, "step", Handles())
    assert freed == [7]


@pytest.mark.parametrize("embedded", [True, False], ids=["embedded", "daemon"])
def test_a_program_with_open_handles_ends_at_once(
    embedded: bool, request: pytest.FixtureRequest
) -> None:
    """Finalizers that run at its end free them, also if a daemon does not answer any more."""
    target = "embedded:" if embedded else request.getfixturevalue("target")
    program = """
import os, signal, sys
import spillway_kv
target, daemon = sys.argv[1], int(sys.argv[2])
settings = None if daemon else {"device.name": "cpu", "memory.limit": "64MiB"}
client = spillway_kv.connect(target, settings=settings)
model = client.create_model(layer_count=1, query_head_count=1, kv_head_count=1, head_dim=16)
step = client.begin_step([client.create_sequence(model)])
from spillway_kv import _handle
_handle._EXIT_SECONDS = 60
if daemon:
    os.kill(daemon, signal.SIGSTOP)
"""
    serving.prefer_library(binary())
    daemon = 0 if embedded else process_of(target)
    try:
        command = [sys.executable, "-c", program, target, str(daemon)]
        subprocess.run(command, check=True, timeout=30)
    finally:
        if daemon:
            os.kill(daemon, signal.SIGCONT)


def test_the_end_of_a_program_leaves_what_a_call_uses() -> None:
    freed: list[int] = []
    handles = Handles()
    used, idle = (Handle(number, freed.append, "step", handles) for number in (1, 2))
    pointer = used.held()
    handles.close()
    handles.await_freed(time.monotonic() + 0.05)
    assert freed == [2]
    assert used.closed
    assert idle.closed
    del pointer  # the call returns while the program's static objects are being destroyed
    assert freed == [2]
