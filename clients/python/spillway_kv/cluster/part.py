"""A part of a sequence. It is on one daemon at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import spillway_kv
from spillway_kv.cluster.placement import Placement
from spillway_kv.cluster.shares import Share
from spillway_kv.errors import FailedPrecondition, NotFound, SpillwayError
from spillway_kv.restart import BROKEN

T = TypeVar("T")

# If a move takes longer than this after its seal, the call that waits for it fails.
_MOVE_SECONDS = 30.0
_WAIT_SECONDS_MIN, _WAIT_SECONDS_MAX = 0.002, 0.05
# Number of moves that one call survives.
MOVES_MAX = 8


class _Place(NamedTuple):
    daemon: str
    sequence: spillway_kv.Sequence


class Part:
    """What one daemon holds of a sequence. Follows the part when it is moved.

    As thread-safe as `spillway_kv.Sequence`.

    Attributes:
        share: The part's layers and KV heads of the model.
        daemon: Name of the daemon, as far as known.
        sequence: The handle on this daemon.
    """

    def __init__(
        self, placement: Placement, share: Share, daemon: str, sequence: spillway_kv.Sequence
    ) -> None:
        self._placement = placement
        self.share = share
        self._place = _Place(daemon, sequence)

    @property
    def daemon(self) -> str:
        return self._place.daemon

    @property
    def sequence(self) -> spillway_kv.Sequence:
        return self._place.sequence

    def __repr__(self) -> str:
        return f"Part({self.sequence.name!r}, {self.daemon!r})"

    def call(self, use: Callable[[spillway_kv.Sequence], T]) -> T:
        """Calls with the handle, and again if the part was moved meanwhile."""
        return self._call(lambda place: use(place.sequence))

    def fork(self, sequence_id: str) -> Part:
        """Copies the part, on the daemon where it is."""

        def copied(place: _Place) -> Part:
            there = place.sequence.fork(sequence_id)
            return Part(self._placement, self.share, place.daemon, there)

        return self._call(copied)

    def _call(self, use: Callable[[_Place], T]) -> T:
        for _ in range(MOVES_MAX):
            place = self._place
            try:
                return use(place)
            except SpillwayError as error:
                if not self.follow(error, place.sequence):
                    raise
        return use(self._place)

    def follow(self, error: SpillwayError, used: spillway_kv.Sequence) -> bool:
        """Finds out where the part is, after an error that a move may have caused.

        Args:
            error: The error of a call with the handle.
            used: The handle of that call.

        Returns:
            Whether the call may be repeated, with the present `sequence`.

        Raises:
            Unavailable: The daemon is gone for good, with the part.
            Aborted: Another client truncated the sequence before or after it was moved.
        """
        if self.sequence is not used:
            return True  # another call has followed it
        sealed = isinstance(error, FailedPrecondition) and error.reason == "SEQUENCE_SEALED"
        if sealed:
            return error.metadata.get("name", used.name) == used.name and self._wait(used)
        if isinstance(error, NotFound):
            mine = error.metadata.get("name", used.name) == used.name
            return mine and self._moved(used, gone=True)
        if isinstance(error, BROKEN):
            if self._moved(used):
                return True
            loss = self._placement.loss(self.daemon)
            if loss is not None:
                raise loss from None
        return False

    def _wait(self, used: spillway_kv.Sequence) -> bool:
        """Waits until a sealed part has moved or is unsealed."""
        end = time.monotonic() + _MOVE_SECONDS
        pause = _WAIT_SECONDS_MIN
        while time.monotonic() < end:
            if self._moved(used):
                return True
            try:
                if not used.refresh().sealed:
                    return True
            except NotFound:
                return self._moved(used, gone=True)
            time.sleep(pause)
            pause = min(2 * pause, _WAIT_SECONDS_MAX)
        return False

    def _moved(self, used: spillway_kv.Sequence, *, gone: bool = False) -> bool:
        """Replaces the handle if the part has moved. Returns whether it was replaced."""
        moved = self._placement.moved(used.name, self.daemon, gone=gone)
        if moved is None or self.sequence is not used:
            return self.sequence is not used
        for _ in range(MOVES_MAX):
            try:
                there = self._placement.client(moved.daemon).get_sequence(used.name)
                break
            except NotFound:
                # It may have moved on from there, and the directory does not know this yet.
                if self._placement.moved(used.name, moved.daemon, gone=True) is None:
                    raise
                moved = self._placement.moved(used.name, self.daemon, gone=True) or moved
        else:
            raise spillway_kv.Aborted(f"{used.name} has moved {MOVES_MAX} times")
        if used.generation != moved.generation or there.generation != moved.new_generation:
            raise spillway_kv.Aborted(
                f"{used.name} was truncated by somebody else before or after it moved to "
                f"{moved.daemon}; get_sequence opens it as it is"
            )
        self._place = _Place(moved.daemon, there)
        return True
