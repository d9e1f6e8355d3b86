"""Going on after a restart of a daemon whose rows outlive it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from spillway.errors import Cancelled, SpillwayError, Unavailable

if TYPE_CHECKING:
    from spillway.client import Client
    from spillway.server import ServerInfo

T = TypeVar("T")

# How a call ends that a restart breaks. gRPC's server cancels those that come while it stops.
BROKEN = (Unavailable, Cancelled)

# Restarts that one call survives: what ends the daemon each time is perhaps the call.
_RESTARTS_MAX = 5
_WAIT_SECONDS_MIN, _WAIT_SECONDS_MAX = 0.02, 0.5
# A connection that found no daemon waits up to a second until it looks again, and fails meanwhile.
_RECONNECT_SECONDS = 0.5
# How often is asked whether a daemon is given up, and how long an answer of its own may take then.
_ASK_SECONDS = 1.0


class Restarts:
    """Waits for the daemon's next process, where it has what the one before had. Thread-safe.

    A daemon with an arena directory keeps its `store_id`; every sequence is there with
    what was acknowledged, and more of it at most whole. What says its position may so be
    said again: rows that are there with equal bytes are accepted.

    Attributes:
        seconds: How long a restart may take.
        given_up: For who knows more of the daemon than that it does not answer: asked, by any
            thread, about once a second while it is waited for, and before a call fails for want
            of it. The error that it returns is raised at once in place of the call's; None: the
            daemon may come back. It raises nothing itself.
    """

    def __init__(self, client: Client, seconds: float) -> None:
        """`seconds`: how long a restart may take."""
        self._client = client
        self.seconds = seconds
        self.given_up: Callable[[], SpillwayError | None] | None = None

    def again(self, call: Callable[[], T]) -> T:
        """Calls, and where a restart broke that calls again. For what may be done twice."""
        breaks = self.breaks()
        while True:
            try:
                return call()
            except BROKEN as error:
                breaks.wait(error)

    def breaks(self) -> Breaks:
        """For what calls again by itself: the breaks of one call, or of one stream."""
        return Breaks(self)

    def wait(self, error: Unavailable | Cancelled) -> bool:
        """Returns when the daemon answers, with the store that it had.

        Returns:
            Whether it is another process than before.

        Raises:
            SpillwayError: `error`, where it has no store, has another one now, or does not
                answer in time; and where it did not restart, if that says that the call was
                cancelled. What `given_up` returns, where it does.
        """
        before = self._client.server_info
        if not before.store_id or self.seconds <= 0:
            raise self.final(error)
        now = self._next_answer(error)
        if now.store_id != before.store_id:
            raise self.final(error)
        if now.boot_id == before.boot_id:
            if isinstance(error, Cancelled):
                raise error
            # Another connection than the one that asked is there already.
            time.sleep(_RECONNECT_SECONDS)
            return False
        self._client.server_info = now
        self._client._regions.forget()
        return True

    def final(self, error: SpillwayError) -> SpillwayError:
        """What a call fails with that failed with `error` and is not said again."""
        gone = None if self.given_up is None else self.given_up()
        return error if gone is None else gone

    def _next_answer(self, error: SpillwayError) -> ServerInfo:
        """Asks the daemon what it is until it says so."""
        end = time.monotonic() + self.seconds
        ask_at = 0.0
        pause = _WAIT_SECONDS_MIN
        while True:
            try:
                # A host that is gone says nothing at all, and may be known to be.
                return self._client.get_server_info(
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
    """How often restarts broke one call, and how long its connection has found no daemon.

    A connection may find none for some time after another one of the same client has. For one
    thread.
    """

    def __init__(self, restarts: Restarts) -> None:
        self._restarts = restarts
        self.clear()

    def clear(self) -> None:
        """The call was answered."""
        self._restart_count = 0
        self._end: float | None = None

    def wait(self, error: Unavailable | Cancelled) -> None:
        """Returns when it may be called again.

        Raises:
            SpillwayError: As `Restarts.wait`; also after too many restarts, and where the
                daemon answers others but not this call for as long as a restart may take.
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
