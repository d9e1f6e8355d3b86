"""Appends of a prompt's K/V, which run while the model computes the next layers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch

from spillway_kv.sequence import Sequence

# Measured (docs/adr/0021): each of them adds.
_THREAD_COUNT = 4
# Most bytes of K/V, in the model's memory, whose appends may wait or run. Above this the model
# waits. A single append may be larger.
BYTES_MAX = 2 << 30


class _Running(NamedTuple):
    future: Future[None]
    sequence: Sequence
    layer: int
    byte_count: int


class _Call(NamedTuple):
    future: Future[None]
    function: Callable[[], None]


class _Threads:
    """Up to four threads, which exist only while there is something to call. Thread-safe.

    An interrupt (Ctrl-C) may arrive anywhere in `submit` and `wait`. They thus hold no lock, and
    what `wait` waits for is only changed in the threads, where no interrupt is raised.
    """

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque()
        # What a thread calls. A call is in here before it leaves `_calls`.
        self._running: set[_Call] = set()
        # Includes threads that were never started because of an interrupt.
        self._threads: set[threading.Thread] = set()
        # Re-entrant, because the garbage collector may finalize the cache while it is held.
        self._taking = threading.RLock()

    def submit(self, function: Callable[[], None]) -> Future[None]:
        """Calls in a thread, in the order of `submit`.

        Raises:
            RuntimeError: There is no thread for it. The next `submit` or `wait` tries again.
        """
        call = _Call(Future(), function)
        self._calls.append(call)
        self._start()
        return call.future

    def inside(self) -> bool:
        """Whether the caller is one of the threads."""
        return threading.current_thread() in self._threads

    def cancel(self) -> None:
        """Cancels the calls that have not begun. For use in one of the threads."""
        with self._taking:
            calls = list(self._calls)
            self._calls.clear()
        for call in calls:
            call.future.cancel()

    def wait(self) -> None:
        """Waits until all calls have returned. Not for use in one of the threads.

        Raises:
            RuntimeError: There is no thread for them.
        """
        while pending := [*self._calls.copy(), *self._running.copy()]:
            if self._calls:
                # An interrupt may have left a call without a thread.
                self._start()
            wait([call.future for call in pending])

    def _start(self) -> None:
        """Starts a thread, unless there are enough."""
        for thread in self._threads.copy():
            if not thread.is_alive():
                self._threads.discard(thread)
        if len(self._threads) < _THREAD_COUNT:
            # Not a daemon thread: the program waits for it when it ends.
            thread = threading.Thread(target=self._run, name="spillway-append")
            self._threads.add(thread)
            thread.start()

    def _run(self) -> None:
        thread = threading.current_thread()
        self._threads.add(thread)
        while call := self._take():
            error = None
            try:
                call.function()
            except BaseException as raised:
                error = raised
            self._running.discard(call)
            if error is None:
                call.future.set_result(None)
            else:
                call.future.set_exception(error)
            # What is kept here would keep the K/V.
            del call, error
        self._threads.discard(thread)
        # A call may have come for which no thread was started, because this one was there.
        if self._calls:
            self._start()

    def _take(self) -> _Call | None:
        with self._taking, suppress(IndexError):
            call = self._calls[0]
            self._running.add(call)
            try:
                self._calls.popleft()
            except IndexError:
                # Cancelled by a finalizer in this thread.
                self._running.discard(call)
                raise
            return call
        return None


class Appends:
    """The appends of one cache. Used by one thread.

    They continue after a forward pass has ended. After an append has failed, all methods raise its
    error, until `abandon` is called.
    """

    def __init__(self) -> None:
        self._threads = _Threads()
        self._running: deque[_Running] = deque()
        self._error: BaseException | None = None

    def start(
        self, sequence: Sequence, layer: int, start: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Begins to append K and V [H_kv, T, d], which must not change until the append is done.

        Waits if too many bytes are waiting. Different layers and sequences are appended in any
        order. No other append to the same layer of the sequence may be running (`wait_for`).

        Raises:
            SpillwayError: An earlier append has failed. None is running any more.
        """
        byte_count = k.nbytes + v.nbytes
        while self._running and (
            self._running[0].future.done() or self._waiting_bytes() + byte_count > BYTES_MAX
        ):
            self._wait()
        if self._error is not None:
            self.finish()
        made = None
        if k.device.type == "cuda":
            made = torch.cuda.Event()
            made.record(torch.cuda.current_stream(k.device))
        future = self._threads.submit(partial(_append, sequence, layer, start, k, v, made))
        self._running.append(_Running(future, sequence, layer, byte_count))

    def wait_for(self, sequence: Sequence, layer: int) -> None:
        """Waits until everything that was started for a layer of a sequence is appended.

        Raises:
            SpillwayError: An append of any layer has failed. None is running any more.
        """
        # The appends are waited for in order, so all older ones are waited for too.
        while any(r.sequence is sequence and r.layer == layer for r in self._running):
            self._wait()
        if self._error is not None:
            self.finish()

    def finish(self) -> None:
        """Waits until everything is appended.

        Raises:
            SpillwayError: The first error of an append.
        """
        while self._running:
            self._wait()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Waits until nothing runs. Errors are dropped.

        In a thread of an append, where the garbage collector may finalize the cache, this does not
        wait. Appends that have not begun are then cancelled.
        """
        if self._threads.inside():
            self._running.clear()
            self._threads.cancel()
        else:
            # Also waits for an append that is not in `_running` because of an interrupt.
            self._threads.wait()
        while self._running:
            self._wait()
        self._error = None

    def _waiting_bytes(self) -> int:
        return sum(running.byte_count for running in self._running)

    def _wait(self) -> None:
        """Waits for the oldest append."""
        oldest = self._running[0]
        error = oldest.future.exception()
        self._error = self._error or error
        self._running.popleft()


def _append(
    sequence: Sequence,
    layer: int,
    start: int,
    k: torch.Tensor,
    v: torch.Tensor,
    made: torch.cuda.Event | None,
) -> None:
    if made is None:
        sequence.append(layer, start, k, v)
        return
    # On its own stream, so that it does not wait for kernels that the model queued later.
    stream = torch.cuda.Stream(k.device)
    stream.wait_event(made)
    with torch.cuda.stream(stream):
        sequence.append(layer, start, k, v)
