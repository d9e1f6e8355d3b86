"""Handles of libspillway: when what they name is freed."""

from __future__ import annotations

from typing import Any

import pytest
from spillway_kv import _handle
from spillway_kv._handle import Handle, Handles


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


def test_the_end_of_a_program_leaves_what_a_call_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    handles = Handles()
    used, idle = (Handle(number, freed.append, "step", handles) for number in (1, 2))
    pointer = used.held()
    monkeypatch.setattr(_handle, "_EXIT_SECONDS", 0.05)
    handles.end()
    assert freed == [2]
    assert used.closed
    assert idle.closed
    del pointer  # the call returns while the program's static objects are being destroyed
    assert freed == [2]
