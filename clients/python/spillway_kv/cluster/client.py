"""A client of several daemons. Each sequence is on one of them, or in parts on several."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import spillway_kv
from spillway_kv.cluster.groups import ask_by_daemon
from spillway_kv.cluster.merging import heads_of, merged_info, merged_results
from spillway_kv.cluster.models import ClusterModels
from spillway_kv.cluster.part import MOVES_MAX, Part
from spillway_kv.cluster.placement import (
    CLAIM_SECONDS,
    Dealt,
    Placement,
    Stale,
    check_id,
    named,
    part_name,
    whole_of,
)
from spillway_kv.cluster.sequence import ClusterSequence, local_policy, part_folder
from spillway_kv.cluster.step import ClusterStep
from spillway_kv.errors import Cancelled, NotFound, SpillwayError, Unavailable
from spillway_kv.policy import Policy
from spillway_kv.results import AttendResult, Model, SequenceInfo
from spillway_kv.server import ServerInfo
from spillway_kv.tensors import Array, OutDType

T = TypeVar("T")
C = TypeVar("C", bound="ClusterClient")


class ClusterClient(ClusterModels):
    """A client of several daemons, with the calls of `spillway_kv.Client`.

    A sequence is on one daemon as a whole, or it is split over several daemons by KV heads, and
    on request by layers too. It is never split by tokens. Calls that concern several daemons are
    sent to all of them at the same time. Outputs, heavy sets and certificates are bit-identical to
    those of one daemon with the whole model, unless the audit of a daemon has raised an
    inflation. Thread-safe.

    Attributes:
        placement: The daemons, and which sequences are on them.
        server_info: The info of one daemon, but with the devices of all daemons and their
            smallest limits, from the time when the client was created.
    """

    def __init__(self, placement: Placement, target: str) -> None:
        """Takes the placement over: closing the client closes it."""
        super().__init__(placement, target)
        self.server_info = self.get_server_info()

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.target!r})"

    def close(self) -> None:
        """Closes the connections, as `Client.close` does."""
        self.placement.close()
        self._threads.shutdown()

    @property
    def clients(self) -> tuple[spillway_kv.Client, ...]:
        """One client for each daemon that serves now."""
        return tuple(self.placement.client(daemon) for daemon in self.placement.daemons())

    @property
    def transport(self) -> str:
        """`cluster`: several daemons, each with its best transport."""
        return "cluster"

    @property
    def step_transport(self) -> str:
        """Like `transport`. The client of each daemon has its own."""
        return "cluster"

    # Sequences.

    def create_sequence(
        self,
        model: Model | str,
        sequence_id: str = "",
        *,
        policy: Policy | None = None,
        ttl: datetime.timedelta | float | None = None,
    ) -> ClusterSequence:
        """Creates an empty sequence, on the daemons with the most free memory.

        Raises:
            SpillwayError: As for `Client.create_sequence`. No daemon then keeps a part that this
                call has created.
        """

        def create(dealt: Dealt, number: int, daemon: str) -> spillway_kv.Sequence:
            return self.with_part(
                dealt,
                number,
                daemon,
                lambda part: self.placement.client(daemon).create_sequence(
                    part,
                    part_name(sequence_id, number, dealt.part_count),
                    policy=local_policy(policy, dealt.shares[number]),
                    ttl=ttl,
                ),
            )

        return self._placed(model, sequence_id, create)

    def _placed(
        self,
        model: Model | str,
        sequence_id: str,
        make: Callable[[Dealt, int, str], spillway_kv.Sequence],
    ) -> ClusterSequence:
        """Creates a sequence whose parts `make` creates on the daemons with the most room."""
        check_id(sequence_id)
        name = model if isinstance(model, str) else model.name
        known = name in self._models
        try:
            return self._placed_of(self.described(name), sequence_id, make)
        except Stale:
            # Another client has deleted the model, and perhaps created a new one.
            if not known:
                raise
            return self._placed_of(self.described(name, anew=True), sequence_id, make)

    def _placed_of(
        self,
        dealt: Dealt,
        sequence_id: str,
        make: Callable[[Dealt, int, str], spillway_kv.Sequence],
    ) -> ClusterSequence:
        name = f"sequences/{sequence_id}" if sequence_id else ""

        def parts_on(daemons: SequenceABC[str]) -> list[Part]:
            def part(number: int) -> Part:
                daemon = daemons[number]
                made = make(dealt, number, daemon)
                return Part(self.placement, dealt.shares[number], daemon, made)

            return self.all_or_none(part, range(dealt.part_count))

        for _ in range(MOVES_MAX):
            daemons = self.claimed(
                name, lambda: self.placement.choose(dealt.part_count, name, dealt)
            )
            with named(self.placement, name):
                parts = parts_on(daemons)
                # A daemon that was chosen before it was drained may be ending now; see
                # `Node.drain`.
                losses = [self.placement.loss(daemon) for daemon in daemons]
                if not any(losses):
                    return ClusterSequence(self, dealt, name or parts[0].sequence.name, parts)
            self._undo(parts)
            if name:
                self.placement.drop(name)
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
                self.get_sequence(name)
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
        daemons = self.placement.find(name) or []
        places = []
        for number, daemon in enumerate(daemons):
            part = part_name(name, number, len(daemons))
            moved = self.placement.moved(part, daemon, gone=False)
            places.append((part, daemon if moved is None else moved.daemon))
        # Another client may have used the name again meanwhile.
        if any(self.placement.loss(daemon) is not None for _, daemon in places):
            self.gone(self._delete_part, places)
            self.forget(name, places)

    def forget(self, name: str, places: SequenceABC[tuple[str, str]]) -> None:
        """Removes the name of a deleted sequence. Arguments as for `Placement.deleted`."""
        # A drain that was interrupted before it deleted a part has left a copy of the part.
        self.gone(self._delete_part, self.placement.deleted(name, places))

    def _delete_part(self, place: tuple[str, str]) -> None:
        part, daemon = place
        with contextlib.suppress(NotFound):
            self.placement.client(daemon).get_sequence(part).delete()

    def all_or_none(self, make: Callable[[int], Part], numbers: Iterable[int]) -> list[Part]:
        """Makes the parts. If one of them fails, deletes the others."""
        made: dict[int, Part] = {}

        def one(number: int) -> None:
            made[number] = make(number)

        try:
            self.each(one, numbers)
        except BaseException:
            self._undo(made.values())
            raise
        return [made[number] for number in sorted(made)]

    def get_sequence(self, name: str) -> ClusterSequence:
        """Returns a handle of an existing sequence. If it is in parts, it must have been named.

        Raises:
            NotFound: There is no such sequence, or a daemon does not have its part.
        """
        daemons = self.placement.find(name) or self._holders(name)
        handles: dict[int, tuple[str, spillway_kv.Sequence]] = {}

        def get(number: int) -> None:
            part, daemon = part_name(name, number, len(daemons)), daemons[number]
            for gone in (False, True):
                moved = self.placement.moved(part, daemon, gone=gone)
                if moved is not None:
                    daemon = moved.daemon
                try:
                    handles[number] = daemon, self.placement.client(daemon).get_sequence(part)
                    return
                except NotFound:
                    if gone:
                        raise

        try:
            self.each(get, range(len(daemons)))
        except NotFound:
            # The sequence has expired, unless another client is just creating it.
            self.placement.drop(name, older_than=CLAIM_SECONDS)
            raise
        model = handles[0][1].model
        dealt = self.described(whole_of(model)[0], anew=True)
        parts = [
            Part(self.placement, share, *handles[number])
            for number, share in enumerate(dealt.shares)
        ]
        return ClusterSequence(self, dealt, name, parts)

    def _holders(self, name: str) -> list[str]:
        """Returns the daemon that has a whole sequence without a name."""

        def has(daemon: str) -> bool:
            try:
                self.placement.client(daemon).get_sequence(name)
            except NotFound:
                return False
            return True

        # Asked before daemons(): a daemon that starts to serve in between is then in `daemons`.
        restarting = self.placement.restarting()
        daemons = self.serving()
        for daemon, found in zip(daemons, self.each(has, daemons), strict=True):
            if found:
                return [daemon]
        if restarting:
            raise self.may_have(restarting, name)
        raise NotFound(f"there is no {name}")

    def load_sequence(
        self,
        folder: str | Path,
        sequence_id: str = "",
        *,
        model: Model | str,
        policy: Policy | None = None,
        **options: Any,
    ) -> tuple[ClusterSequence, bytes]:
        """Creates a sequence with the parts that `ClusterSequence.save` has saved.

        Arguments and errors are those of `Client.load_sequence`, but the model must be named.
        Each daemon reads the folder on its own host.
        """
        data: dict[int, bytes] = {}

        def load(dealt: Dealt, number: int, daemon: str) -> spillway_kv.Sequence:
            loaded, data[number] = self.with_part(
                dealt,
                number,
                daemon,
                lambda part: self.placement.client(daemon).load_sequence(
                    part_folder(folder, number, dealt.part_count),
                    part_name(sequence_id, number, dealt.part_count),
                    model=part,
                    policy=local_policy(policy, dealt.shares[number]),
                    **options,
                ),
            )
            return loaded

        return self._placed(model, sequence_id, load), data[0]

    def list_sequences(self, model: Model | str = "") -> Iterator[SequenceInfo]:
        """Yields the sequences of a model, ordered by name, or those of all models in turn.

        Sequences in parts without a name are left out, because they have other names on each
        daemon.
        """
        if not model:
            for every in list(self.list_models()):
                yield from self.list_sequences(every)
            return
        name = model if isinstance(model, str) else model.name
        dealt = self.described(name, anew=True)
        count, shares = dealt.part_count, dealt.shares

        def infos(daemon: str) -> Iterator[tuple[int, SequenceInfo]]:
            for number in range(count):
                try:
                    part = part_name(name, number, count)
                    for info in self.placement.client(daemon).list_sequences(part):
                        yield number, info
                except NotFound:
                    continue

        found: dict[str, dict[int, SequenceInfo]] = {}
        for each in self.each(lambda daemon: list(infos(daemon)), self.placement.daemons()):
            for number, info in each:
                whole = whole_of(info.name)[0] if count > 1 else info.name
                found.setdefault(whole, {})[number] = info
        for whole in sorted(found):
            parts = [found[whole].get(number) for number in range(count)]
            there = [part for part in parts if part is not None]
            if whole and len(there) == count:
                info = merged_info(shares, there, dealt.model.layer_count)
                yield dataclasses.replace(info, name=whole, model=name)

    # Attention.

    def attend(
        self,
        layer: int,
        queries: Mapping[ClusterSequence, Array],
        policy: Policy | None = None,
        visible: Mapping[ClusterSequence, SequenceABC[int]] | None = None,
        *,
        out_dtype: OutDType | None = None,
        timeout: float | None = None,
        return_errors: bool = False,
    ) -> Any:
        """Attends at one layer for several sequences of one model, like `Client.attend`."""
        seen = visible or {}
        owners = [(s, part) for s in queries for part in s.parts_of(layer)]

        def ask(indices: SequenceABC[int]) -> list[AttendResult | SpillwayError]:
            """Attends for parts on one daemon with the same share."""
            share = owners[indices[0]][1].share
            handles = {i: owners[i][1].sequence for i in indices}
            heads = share.query_heads(owners[indices[0]][0].group)
            mine = {h: heads_of(queries[owners[i][0]], heads, 1) for i, h in handles.items()}
            answers = self.placement.client(owners[indices[0]][1].daemon).attend(
                share.local(layer),
                mine,
                local_policy(policy, share),
                {h: seen[owners[i][0]] for i, h in handles.items() if owners[i][0] in seen},
                out_dtype=out_dtype,
                timeout=timeout,
                return_errors=True,
            )
            return [answers[handle] for handle in handles.values()]

        answers = iter(ask_by_daemon(self, [part for _, part in owners], ask))
        results: dict[ClusterSequence, AttendResult | SpillwayError] = {}
        for sequence in queries:
            parts = [next(answers) for _ in sequence.parts_of(layer)]
            failed = next((part for part in parts if isinstance(part, SpillwayError)), None)
            if failed is not None:
                if not return_errors:
                    raise failed
                results[sequence] = failed
            else:
                good = [part for part in parts if isinstance(part, AttendResult)]
                results[sequence] = merged_results(good, sequence.head_counts(layer))
        return results

    def begin_step(
        self,
        sequences: SequenceABC[ClusterSequence],
        *,
        token_count: int = 1,
        policy: Policy | None = None,
        starts: SequenceABC[int] | None = None,
    ) -> ClusterStep:
        """Announces a decode step to all the daemons, like `Client.begin_step`."""
        return ClusterStep(self, sequences, token_count, policy, starts)

    def open_decoder(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported: a decoder works only with one daemon.

        Raises:
            SpillwayError: Always, with UNIMPLEMENTED.
        """
        raise SpillwayError(
            "a cluster has no decoders: begin_step makes the same steps, and "
            "spillway_kv.connect(TARGET) of one daemon opens decoders (spillway-cluster status "
            "shows the targets)",
            code="UNIMPLEMENTED",
        )

    # The daemons.

    def get_server_info(self) -> ServerInfo:
        """Asks the daemons for their descriptions, and combines them.

        Raises:
            Unavailable: A daemon does not answer, or none serves.
        """
        return _whole_info(
            self.each(
                lambda daemon: self.placement.client(daemon).get_server_info(), self.serving()
            )
        )

    def statistics(self, model: Model | str = "") -> list[spillway_kv.Statistics]:
        """Statistics about the memory and the work of each daemon, in their order."""
        return self.each(lambda client: client.statistics(model), self.clients)

    def health(self) -> bool:
        """Whether all daemons report that they are serving. False if there are none."""
        try:
            answers = self.each(lambda client: client.health(), self.clients)
            return bool(answers) and all(answers)
        except (Unavailable, Cancelled):
            return False


def _whole_info(infos: SequenceABC[ServerInfo]) -> ServerInfo:
    first = infos[0]
    stores = [info.store_id for info in infos]
    limits = {
        field.name: min(getattr(info.limits, field.name) for info in infos)
        for field in dataclasses.fields(first.limits)
    }
    return dataclasses.replace(
        first,
        boot_id=",".join(info.boot_id for info in infos),
        # If the rows of one part are gone, those of the others are of no use.
        store_id=",".join(stores) if all(stores) else "",
        devices=tuple(device for info in infos for device in info.devices),
        limits=dataclasses.replace(first.limits, **limits),
        region_socket="",
    )
