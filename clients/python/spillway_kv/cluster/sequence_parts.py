"""The parts of a cluster's sequences: created on daemons, found there, and deleted."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceABC
from typing import NamedTuple, TypeVar

import spillway_kv
from spillway_kv.cluster.connection import ClusterConnection, may_have
from spillway_kv.cluster.merging import merged_info
from spillway_kv.cluster.models import Models
from spillway_kv.cluster.part import MOVES_MAX, Part
from spillway_kv.cluster.placement import (
    CLAIM_SECONDS,
    Dealt,
    Stale,
    check_id,
    named,
    part_name,
    whole_of,
)
from spillway_kv.errors import NotFound, SpillwayError, Unavailable
from spillway_kv.results import SequenceInfo

T = TypeVar("T")


class Placed(NamedTuple):
    """A sequence that is on daemons.

    Attributes:
        name: Resource name of the sequence.
        dealt: Its model.
        parts: Its parts, in the order of the model's shares.
    """

    name: str
    dealt: Dealt
    parts: list[Part]


class SequenceParts:
    """Creates, finds and deletes the parts of sequences, and their names. Thread-safe.

    Attributes:
        connection: The daemons.
    """

    def __init__(self, connection: ClusterConnection, models: Models) -> None:
        self.connection = connection
        self._placement = connection.placement
        self._models = models

    def place(
        self,
        model: str,
        sequence_id: str,
        make: Callable[[Dealt, int, str], spillway_kv.Sequence],
    ) -> Placed:
        """Creates a sequence on the daemons with the most room.

        Args:
            model: Resource name of the model.
            sequence_id: Id of the sequence; empty: it has no name of its own.
            make: Creates the part with a number, of a sequence of the model, on a daemon.
        """
        check_id(sequence_id)
        known = self._models.knows(model)
        try:
            return self._place(self._models.described(model), sequence_id, make)
        except Stale:
            # Another client has deleted the model, and perhaps created a new one.
            if not known:
                raise
            return self._place(self._models.described(model, anew=True), sequence_id, make)

    def _place(
        self,
        dealt: Dealt,
        sequence_id: str,
        make: Callable[[Dealt, int, str], spillway_kv.Sequence],
    ) -> Placed:
        name = f"sequences/{sequence_id}" if sequence_id else ""

        def parts_on(daemons: SequenceABC[str]) -> list[Part]:
            def part(number: int) -> Part:
                daemon = daemons[number]
                made = make(dealt, number, daemon)
                return Part(self._placement, dealt.shares[number], daemon, made)

            return self.all_or_none(part, range(dealt.part_count))

        for _ in range(MOVES_MAX):
            daemons = self.claimed(
                name, lambda: self._placement.choose(dealt.part_count, name, dealt)
            )
            with named(self._placement, name):
                parts = parts_on(daemons)
                # A daemon that was chosen before it was drained may be ending now; see
                # `Node.drain`.
                losses = [self._placement.loss(daemon) for daemon in daemons]
                if not any(losses):
                    return Placed(name or parts[0].sequence.name, dealt, parts)
            self._undo(parts)
            if name:
                self._placement.drop(name)
        raise next(loss for loss in losses if loss is not None)

    def _undo(self, parts: Iterable[Part]) -> None:
        """Deletes the parts of an incomplete sequence, if their daemons answer."""
        for part in parts:
            with contextlib.suppress(SpillwayError):
                part.call(lambda s: s.delete())

    def claimed(self, name: str, claim: Callable[[], T]) -> T:
        """Takes a name, also that of a sequence that has expired or was lost with a daemon.

        Raises:
            AlreadyExists: There is a sequence with this name.
        """
        try:
            return claim()
        except spillway_kv.AlreadyExists:
            try:
                self.find(name)
            except NotFound:
                return claim()
            except Unavailable as error:
                if error.reason != "DAEMON_LOST":
                    raise
                self._delete_rest(name)
                return claim()
            raise

    def _delete_rest(self, name: str) -> None:
        """Deletes the name of a sequence that was lost with a daemon, and its other parts."""
        daemons = self._placement.find(name) or []
        places = []
        for number, daemon in enumerate(daemons):
            part = part_name(name, number, len(daemons))
            moved = self._placement.moved(part, daemon, gone=False)
            places.append((part, daemon if moved is None else moved.daemon))
        # Another client may have used the name again meanwhile.
        if any(self._placement.loss(daemon) is not None for _, daemon in places):
            self.connection.gone(self._delete_part, places)
            self.forget(name, places)

    def forget(self, name: str, places: SequenceABC[tuple[str, str]]) -> None:
        """Removes the name of a deleted sequence. Arguments as for `Placement.deleted`."""
        # A drain that was interrupted before it deleted a part has left a copy of the part.
        self.connection.gone(self._delete_part, self._placement.deleted(name, places))

    def _delete_part(self, place: tuple[str, str]) -> None:
        part, daemon = place
        with contextlib.suppress(NotFound):
            self._placement.client(daemon).get_sequence(part).delete()

    def all_or_none(self, make: Callable[[int], Part], numbers: Iterable[int]) -> list[Part]:
        """Makes the parts. If one of them fails, deletes the others."""
        made: dict[int, Part] = {}

        def one(number: int) -> None:
            made[number] = make(number)

        try:
            self.connection.each(one, numbers)
        except BaseException:
            self._undo(made.values())
            raise
        return [made[number] for number in sorted(made)]

    def find(self, name: str) -> Placed:
        """Finds a sequence, as `ClusterClient.get_sequence` says."""
        daemons = self._placement.find(name) or self._holders(name)
        handles: dict[int, tuple[str, spillway_kv.Sequence]] = {}

        def get(number: int) -> None:
            part, daemon = part_name(name, number, len(daemons)), daemons[number]
            for gone in (False, True):
                moved = self._placement.moved(part, daemon, gone=gone)
                if moved is not None:
                    daemon = moved.daemon
                try:
                    handles[number] = daemon, self._placement.client(daemon).get_sequence(part)
                    return
                except NotFound:
                    if gone:
                        raise

        try:
            self.connection.each(get, range(len(daemons)))
        except NotFound:
            # The sequence has expired, unless another client is just creating it.
            self._placement.drop(name, older_than=CLAIM_SECONDS)
            raise
        model = handles[0][1].model
        dealt = self._models.described(whole_of(model)[0], anew=True)
        parts = [
            Part(self._placement, share, *handles[number])
            for number, share in enumerate(dealt.shares)
        ]
        return Placed(name, dealt, parts)

    def _holders(self, name: str) -> list[str]:
        """Returns the daemon that has a whole sequence without a name."""

        def has(daemon: str) -> bool:
            try:
                self._placement.client(daemon).get_sequence(name)
            except NotFound:
                return False
            return True

        # Asked before daemons(): a daemon that starts to serve in between is then in `daemons`.
        restarting = self._placement.restarting()
        daemons = self.connection.serving()
        for daemon, found in zip(daemons, self.connection.each(has, daemons), strict=True):
            if found:
                return [daemon]
        if restarting:
            raise may_have(restarting, name)
        raise NotFound(f"there is no {name}")

    def infos(self, model: str) -> Iterator[SequenceInfo]:
        """Yields the sequences of a model, as `ClusterClient.list_sequences` says."""
        dealt = self._models.described(model, anew=True)
        count, shares = dealt.part_count, dealt.shares

        def infos(daemon: str) -> Iterator[tuple[int, SequenceInfo]]:
            for number in range(count):
                try:
                    part = part_name(model, number, count)
                    for info in self._placement.client(daemon).list_sequences(part):
                        yield number, info
                except NotFound:
                    continue

        found: dict[str, dict[int, SequenceInfo]] = {}
        daemons = self._placement.daemons()
        for each in self.connection.each(lambda daemon: list(infos(daemon)), daemons):
            for number, info in each:
                whole = whole_of(info.name)[0] if count > 1 else info.name
                found.setdefault(whole, {})[number] = info
        for whole in sorted(found):
            parts = [found[whole].get(number) for number in range(count)]
            there = [part for part in parts if part is not None]
            if whole and len(there) == count:
                info = merged_info(shares, there, dealt.model.layer_count)
                yield dataclasses.replace(info, name=whole, model=model)
