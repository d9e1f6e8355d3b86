"""Makes the clients of a process unusable in processes that are forked from it.

Two processes cannot share a connection, its threads, or memory that a daemon shares. The child's
writes would mix with the parent's, and what the child closes at its exit would be closed for the
parent too. Nor can the child connect anew: gRPC's threads do not exist in it, its locks may be
held for ever, and calls would hang or end the process. This is so even after the parent has closed
its clients. gRPC ends in the background, or, after an embedded engine, not at all; and of children
that were forked when it had ended, one in 120 still got no answer (gRPC 1.51).
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class _Held(Protocol):
    def leave_to_parent(self, error: str) -> None:
        """Makes later uses raise a RuntimeError with this text. Changes nothing of the parent's.

        Runs in the child before any of its other code. The parent's other threads do not exist in
        the child, and their locks may still be held.
        """


# What to do instead of a fork after the first connect.
_ADVICE = (
    'start processes with "spawn" or "forkserver" (of multiprocessing, or as the '
    "multiprocessing_context of a DataLoader), or fork before the first connect"
)

_held: weakref.WeakSet[Any] = weakref.WeakSet()
_pid = os.getpid()
# Whether this process, or one that it was forked from, has connected.
_connected = False
# Why this process must not connect; empty if it may.
_refusal = ""


def leaves(held: _Held) -> None:
    """Registers an object whose `leave_to_parent` is called in the child after a fork."""
    _held.add(held)


def check_connect() -> None:
    """Raises RuntimeError if this process must not connect. Call it before each connect."""
    global _connected
    if _refusal:
        raise RuntimeError(_refusal)
    _connected = True


def finalizer(owner: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns a `weakref.finalize` that does nothing in a forked child, not even at its exit."""
    return weakref.finalize(owner, _in_process, os.getpid(), function, *arguments)


def _in_process(pid: int, function: Callable[..., Any], *arguments: Any) -> None:
    if os.getpid() == pid:
        function(*arguments)


def keep(given: Any) -> None:
    """Keeps an object alive until the process has ended, so that it is never finalized."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(given))


class Left:
    """Replaces an object that belongs to the parent. Every access raises."""

    def __init__(self, error: str) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(self._error)


def _forked() -> None:
    global _pid, _refusal
    parent, _pid = _pid, os.getpid()
    if _connected and not _refusal:
        _refusal = (
            f"this is process {_pid}, forked from process {parent}, which had connected before: "
            f"it cannot connect. Instead, {_ADVICE}"
        )
    error = (
        f"this client was made in process {parent}, and this is process {_pid}, forked from it: "
        f"{_ADVICE}"
    )
    for held in list(_held):
        held.leave_to_parent(error)
    _held.clear()


os.register_at_fork(after_in_child=_forked)
