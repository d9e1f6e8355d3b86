"""Continues calls after a restart of a daemon whose rows outlive its process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from spillway_kv.errors import Cancelled, SpillwayError, Unavailable
from spillway_kv.server import ServerInfo

T = TypeVar("T")

# Errors of a call that a restart breaks. gRPC's server cancels calls that arrive while it stops.
BROKEN = (Unavailable, Cancelled)

# Restarts that one call survives. After that, the call itself may be what crashes the daemon.
_RESTARTS_MAX = 5
_WAIT_SECONDS_MIN, _WAIT_SECONDS_MAX = 0.02, 0.5
# A connection that found no daemon tries again after up to a second. Its calls fail until then.
_RECONNECT_SECONDS = 0.5
# Interval at which `given_up` is asked, and the timeout of each question to the daemon meanwhile.
_ASK_SECONDS = 1.0


class Daemon(Protocol):
    """What is asked of a connection. `server_info`: of the process that it knows."""

    server_info: ServerInfo

    def get_server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Asks the daemon for its description. timeout: seconds; None: the connection's."""
        ...

    def go_on_with(self, now: ServerInfo) -> None:
        """Takes over another process of the daemon, which has the rows and nothing else."""
        ...


class Restarts:
    """Waits for the next process of the daemon, if it keeps its store. Thread-safe.

    A daemon with an arena directory keeps its `store_id`. Every sequence has at least what was
    acknowledged, and unacknowledged appends are there completely or not at all. So calls that name
    their position may be repeated: rows that are already there with equal bytes are accepted.

    Attributes:
        seconds: How long a restart may take.
        given_up: For callers that may know more about a daemon that does not answer. It is called,
            in any thread, about once a second during the wait, and before a call fails because the
            daemon is unavailable. The error that it returns is raised at once instead of the call's
            error. None means that the daemon may come back. It must not raise.
    """

    def __init__(self, daemon: Daemon, seconds: float) -> None:
        """`seconds`: how long a restart may take."""
        self._daemon = daemon
        self.seconds = seconds
        self.given_up: Callable[[], SpillwayError | None] | None = None

    def again(self, call: Callable[[], T]) -> T:
        """Calls, and calls again if a restart broke the call. Only for calls that may run twice."""
        breaks = self.breaks()
        while True:
            try:
                return call()
            except BROKEN as error:
                breaks.wait(error)

    def breaks(self) -> Breaks:
        """Returns the state for one call, or one stream, whose caller repeats it by itself."""
        return Breaks(self)

    def wait(self, error: Unavailable | Cancelled) -> bool:
        """Returns when the daemon answers, with the same store as before.

        Returns:
            Whether it is another process than before.

        Raises:
            SpillwayError: `error`, if the daemon has no store, has another one now, or does not
                answer in time. Also if the daemon did not restart and `error` says that the call
                was cancelled. Instead of `error`, what `given_up` returns, if it returns an error.
        """
        before = self._daemon.server_info
        if not before.store_id or self.seconds <= 0:
            raise self.final(error)
        now = self._next_answer(error)
        if now.store_id != before.store_id:
            raise self.final(error)
        if now.boot_id == before.boot_id:
            if isinstance(error, Cancelled):
                raise error
            # A connection other than the one for this question may still wait before it reconnects.
            time.sleep(_RECONNECT_SECONDS)
            return False
        self._daemon.go_on_with(now)
        return True

    def final(self, error: SpillwayError) -> SpillwayError:
        """Returns the error to raise for a call that failed with `error` and is not repeated."""
        gone = None if self.given_up is None else self.given_up()
        return error if gone is None else gone

    def _next_answer(self, error: SpillwayError) -> ServerInfo:
        """Asks the daemon for its server info until it answers."""
        end = time.monotonic() + self.seconds
        ask_at = 0.0
        pause = _WAIT_SECONDS_MIN
        while True:
            try:
                # A host that is gone does not answer at all, and `given_up` may know that.
                return self._daemon.get_server_info(
                    timeout=None if self.given_up is None else _ASK_SECONDS
                )
            except SpillwayError:
                now = time.monotonic()
                if now >= min(ask_at, end):
                    final = self.final(error)
                    if final is not error or now > end:
                        raise final from None
                    ask_at = now + _ASK_SECONDS
            time.sleep(pause)
            pause = min(2 * pause, _WAIT_SECONDS_MAX)


class Breaks:
    """Counts the restarts that broke one call, and how long its connection found no daemon.

    A connection may find no daemon for some time after another one of the same client has found it.
    Use it in one thread only.
    """

    def __init__(self, restarts: Restarts) -> None:
        self._restarts = restarts
        self.clear()

    def clear(self) -> None:
        """Resets the counts after an answer."""
        self._restart_count = 0
        self._end: float | None = None

    def wait(self, error: Unavailable | Cancelled) -> None:
        """Returns when the call may be made again.

        Raises:
            SpillwayError: As for `Restarts.wait`. Also after too many restarts, or if the daemon
                answers other calls but not this one for as long as a restart may take.
        """
        now = time.monotonic()
        if self._end is not None and now > self._end:
            raise self._restarts.final(error)
        if self._restart_count == _RESTARTS_MAX:
            raise self._restarts.final(error)
        if self._restarts.wait(error):
            self._restart_count += 1
            self._end = None
        elif self._end is None:
            self._end = now + self._restarts.seconds
