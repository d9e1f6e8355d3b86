"""What a process that was forked finds of its parent's clients: that they are the parent's alone.

A connection, its threads and the memory that a daemon shares cannot be used from two
processes: what the child wrote there would come in between the parent's, and what it closed at
its exit would be closed for the parent.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class _Held(Protocol):
    def _leave_to_parent(self, error: str) -> None:
        """Has further uses raise a RuntimeError of that text, and touches nothing of the parent's.

        In a child, before anything else of it runs: no other thread is there, and locks may be
        held by those that were.
        """


_held: weakref.WeakSet[Any] = weakref.WeakSet()
_pid = os.getpid()


def leaves(held: _Held) -> None:
    """Says that an object is to be told where this process is forked, in the child."""
    _held.add(held)


def finalizer(owner: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """A `weakref.finalize` that does nothing in a child of this process, to its exit."""
    return weakref.finalize(owner, _in_process, os.getpid(), function, *arguments)


def _in_process(pid: int, function: Callable[..., Any], *arguments: Any) -> None:
    if os.getpid() == pid:
        function(*arguments)


def keep(given: Any) -> None:
    """Keeps an object to the end of this process and beyond: it is never finalized."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(given))


class Left:
    """Stands for what is the parent's: whatever is asked of it raises."""

    def __init__(self, error: str) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(self._error)


def _forked() -> None:
    global _pid
    parent, _pid = _pid, os.getpid()
    error = (
        f"this client was made in process {parent}, and this is process {_pid}, forked from it: "
        "connect anew in this one"
    )
    for held in list(_held):
        held._leave_to_parent(error)
    _held.clear()


os.register_at_fork(after_in_child=_forked)
