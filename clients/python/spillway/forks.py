"""Makes the clients of a process unusable in processes that are forked from it.

Two processes cannot share a connection, its threads, or memory that a daemon shares. The child's
writes would mix with the parent's, and what the child closes at its exit would be closed for the
parent too. Nor can the child connect anew: gRPC's threads do not exist in it, its locks may be
held for ever, and calls would hang or end the process. Only if gRPC ran at no time in the parent,
or has ended there, is the child free to connect.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class _Held(Protocol):
    def _leave_to_parent(self, error: str) -> None:
        """Makes later uses raise a RuntimeError with this text. Changes nothing of the parent's.

        Runs in the child before any of its other code. The parent's other threads do not exist in
        the child, and their locks may still be held.
        """


# What to do instead of a fork while clients are open.
_ADVICE = (
    'start processes with "spawn" or "forkserver" (of multiprocessing, or as the '
    "multiprocessing_context of a DataLoader), or fork before the first connect or after the last "
    "client is closed; after an embedded engine, do not fork, because its threads outlive close()"
)

_held: weakref.WeakSet[Any] = weakref.WeakSet()
_pid = os.getpid()
# Objects that are open as long as grpcio's threads run in this process.
_open: weakref.WeakSet[Any] = weakref.WeakSet()
# Each tells whether threads of libspillway run in this process.
_running: list[Callable[[], bool]] = []
# Whether any of these ran before the last fork.
_ran = False
# Why this process must not connect; empty if it may.
_refusal = ""


def leaves(held: _Held) -> None:
    """Registers an object whose `_leave_to_parent` is called in the child after a fork."""
    _held.add(held)


def opens(held: Any) -> None:
    """Notes an object that uses grpcio until it is passed to `closes`, or is gone."""
    _open.add(held)


def closes(held: Any) -> None:
    """Notes the end of what was passed to `opens`."""
    _open.discard(held)


def asks(running: Callable[[], bool]) -> None:
    """Registers a function that is called before each fork.

    It returns whether threads run in this process without which a child cannot connect.
    """
    _running.append(running)


def check_connect() -> None:
    """Raises RuntimeError if this process must not connect, because of how it was forked."""
    if _refusal:
        raise RuntimeError(_refusal)


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


def _before() -> None:
    global _ran
    # What the library may ask in a refused process could wait for ever.
    if not _refusal:
        _ran = bool(_open) or any(running() for running in _running)


def _forked() -> None:
    global _pid, _refusal
    parent, _pid = _pid, os.getpid()
    if _ran and not _refusal:
        _refusal = (
            f"this is process {_pid}, forked from process {parent} while a client was open there, "
            f"or after an embedded engine: it cannot connect. Instead, {_ADVICE}"
        )
    advice = _ADVICE if _refusal else "connect anew in this one"
    error = (
        f"this client was made in process {parent}, and this is process {_pid}, forked from it: "
        f"{advice}"
    )
    for held in list(_held):
        held._leave_to_parent(error)
    _held.clear()
    _open.clear()


os.register_at_fork(before=_before, after_in_child=_forked)
