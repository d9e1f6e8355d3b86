"""The daemons of a cluster, and calls to several of them at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from spillway_kv.cluster.placement import Placement
from spillway_kv.errors import NotFound, Unavailable

T = TypeVar("T")
X = TypeVar("X")

# Most calls to daemons that one client has in progress.
_THREADS_MAX = 64


def may_have(restarting: SequenceABC[str], name: str) -> Unavailable:
    """Returns the error if something may be on daemons that are being restarted."""
    return Unavailable(f"{', '.join(restarting)}, which may have {name}, is being restarted")


class ClusterConnection:
    """Connections to the daemons of a cluster. Thread-safe.

    Attributes:
        placement: The daemons, and which sequences are on them.
        target: Target to which the client was connected.
    """

    def __init__(self, placement: Placement, target: str) -> None:
        """Takes the placement over: `close` closes it."""
        self.placement = placement
        self.target = target
        self._threads = ThreadPoolExecutor(_THREADS_MAX, "spillway-cluster")

    def close(self) -> None:
        """Closes the connections."""
        self.placement.close()
        self._threads.shutdown()

    def each(self, call: Callable[[X], T], of: Iterable[X]) -> list[T]:
        """Makes a call for each element, all at the same time, and waits for all of them.

        Raises:
            SpillwayError: The first error, in the order of the elements, after all calls have
                ended.
        """
        all_of = list(of)
        if not all_of:
            return []
        first, *others = all_of
        waiting = [self._threads.submit(call, other) for other in others]
        failed: BaseException | None = None
        answers: list[T] = []
        try:
            answers.append(call(first))
        except BaseException as error:  # noqa: BLE001  (raised once the others have ended)
            failed = error
        for future in waiting:
            broken = future.exception()
            if broken is None:
                answers.append(future.result())
            else:
                failed = failed or broken
        if failed is not None:
            raise failed
        return answers

    def gone(self, delete: Callable[[X], None], of: Iterable[X]) -> None:
        """Deletes parts. Parts that do not exist are an error only if none exists.

        Parts on a daemon that is lost count as deleted.
        """

        def one(part: X) -> NotFound | None:
            try:
                delete(part)
            except NotFound as error:
                return error
            except Unavailable as error:
                if error.reason != "DAEMON_LOST":
                    raise
            return None

        missing = self.each(one, of)
        if missing and all(error is not None for error in missing):
            assert missing[0] is not None
            raise missing[0]

    def serving(self) -> list[str]:
        """Returns the names of the daemons that serve.

        Raises:
            Unavailable: There are none.
        """
        daemons = self.placement.daemons()
        if not daemons:
            raise Unavailable(f"no daemon of {self.target} serves")
        return daemons
