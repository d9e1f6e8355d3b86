"""Going on after a restart of a daemon whose rows outlive it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from spillway.errors import Cancelled, SpillwayError, Unavailable

if TYPE_CHECKING:
    from spillway.client import Client

T = TypeVar("T")

# How a call ends that a restart breaks. gRPC's server cancels those that come while it stops.
BROKEN = (Unavailable, Cancelled)

# Restarts that one call survives: what ends the daemon each time is perhaps the call.
_RESTARTS_MAX = 5
_WAIT_SECONDS_MIN, _WAIT_SECONDS_MAX = 0.02, 0.5
# A connection that found no daemon waits up to a second until it looks again, and fails meanwhile.
_RECONNECT_SECONDS = 0.5


class Restarts:
    """Waits for the daemon's next process, where it has what the one before had. Thread-safe.

    A daemon with an arena directory keeps its `store_id`; every sequence is there with
    what was acknowledged, and more of it at most whole. What says its position may so be
    said again: rows that are there with equal bytes are accepted.
    """

    def __init__(self, client: Client, seconds: float) -> None:
        """`seconds`: how long a restart may take."""
        self._client = client
        self.seconds = seconds

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
                cancelled.
        """
        before = self._client.server_info
        if not before.store_id or self.seconds <= 0:
            raise error
        end = time.monotonic() + self.seconds
        pause = _WAIT_SECONDS_MIN
        while True:
            try:
                now = self._client.get_server_info()
                break
            except SpillwayError:
                if time.monotonic() > end:
                    raise error from None
                time.sleep(pause)
                pause = min(2 * pause, _WAIT_SECONDS_MAX)
        if now.store_id != before.store_id:
            raise error
        if now.boot_id == before.boot_id:
            if isinstance(error, Cancelled):
                raise error
            # Another connection than the one that asked is there already.
            time.sleep(_RECONNECT_SECONDS)
            return False
        self._client.server_info = now
        self._client._regions.forget()
        return True


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
            SpillwayError: `error`, where `Restarts.wait` raises it, after too many restarts, and
                where the daemon answers others but not this call for as long as a restart may take.
        """
        now = time.monotonic()
        if self._end is not None and now > self._end:
            raise error
        if self._restart_count == _RESTARTS_MAX:
            raise error
        if self._restarts.wait(error):
            self._restart_count += 1
            self._end = None
        elif self._end is None:
            self._end = now + self._restarts.seconds
