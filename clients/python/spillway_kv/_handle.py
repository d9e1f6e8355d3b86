"""Handles of libspillway: what they name is freed once, and never while a call is in it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from spillway_kv import forks

# How long a program that ends waits for other threads' calls.
_EXIT_SECONDS = 5.0
_POLL_SECONDS = 0.005


class Pointer:
    """A pointer of the library. What it points to is freed when this object is.

    The handle refers to it, and so does every call that runs.

    Attributes:
        value: The pointer.
    """

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: int) -> None:
        self.value = value


class Handle:
    """A channel, a step or a decoder of the library.

    Any thread may close it at any time, also while other threads are in calls of it. The last of
    these calls then frees it. Later calls raise ValueError.
    """

    def __init__(
        self, value: int, free: Callable[[int], None], what: str, handles: Handles
    ) -> None:
        """Takes a pointer.

        Args:
            value: The pointer.
            free: The function of the library that frees it.
            what: What it is, for the error after `close`.
            handles: The handles of its channel.
        """
        self._what = what
        self._pointer: Pointer | None = Pointer(value)
        forks.finalizer(self._pointer, handles.add(self, free), value).atexit = False

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._pointer is None

    def held(self) -> Pointer:
        """Returns the pointer for a call, which must drop it when it ends.

        Raises:
            ValueError: The handle is closed.
        """
        pointer = self._pointer
        if pointer is None:
            raise ValueError(f"the {self._what} is closed")
        return pointer

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function of the library with the pointer and further arguments.

        Raises:
            ValueError: The handle is closed.
        """
        pointer = self.held()
        try:
            return function(pointer.value, *arguments)
        finally:
            # An exception's traceback would keep it.
            del pointer

    def close(self) -> None:
        """Frees what the handle names, or leaves that to the last call that runs."""
        self._pointer = None


class Handles:
    """The handles of one channel. Thread-safe.

    Attributes:
        pid: Id of the process that has made them.
    """

    def __init__(self) -> None:
        # Re-entrant, because the garbage collector may run a finalizer while it is held.
        self._lock = threading.RLock()
        self._open: weakref.WeakSet[Handle] = weakref.WeakSet()
        # Handles that are not freed.
        self._count = 0
        self._left = False
        self.pid = os.getpid()
        with _lock:
            _all.add(self)

    def add(self, handle: Handle, free: Callable[[int], None]) -> Callable[[int], None]:
        """Adds a handle. Returns the function that frees it, and counts."""
        with self._lock:
            self._open.add(handle)
            self._count += 1

        def freed(value: int) -> None:
            if self._left:
                return
            free(value)
            with self._lock:
                self._count -= 1

        return freed

    def close(self) -> None:
        """Closes all handles."""
        with self._lock:
            handles = list(self._open)
        for handle in handles:
            handle.close()

    def await_freed(self, until: float) -> None:
        """Waits for calls of other threads. What a long call uses is left as it is.

        Args:
            until: When to stop waiting, as `time.monotonic` says it.
        """
        while self._count and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        self._left = True


_all: weakref.WeakSet[Handles] = weakref.WeakSet()
# What ends before the handles when the program ends.
_before: weakref.WeakSet[Any] = weakref.WeakSet()
# Re-entrant, because the garbage collector may run a finalizer while it is held.
_lock = threading.RLock()


def ends_first(held: Any) -> None:
    """Registers an object whose `end` is called before all handles are freed at the end."""
    _before.add(held)


def _end() -> None:
    """Frees all handles when the program ends, before the library's static objects end."""
    # What a forked process has is its parent's.
    with _lock:
        own = [handles for handles in _all if handles.pid == os.getpid()]
    for held in list(_before):
        held.end()
    for handles in own:
        handles.close()
    until = time.monotonic() + _EXIT_SECONDS
    for handles in own:
        handles.await_freed(until)


# Not by atexit alone: after weakref's own function there, no finalizer runs any more.
weakref.finalize(_all, _end)
