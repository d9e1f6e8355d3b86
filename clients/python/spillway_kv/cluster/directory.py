"""The directory: which daemons exist, and which sequences are on them.

Plain Python, without Ray: `actors.DirectoryActor` serves it.
"""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceABC

import spillway_kv
from spillway_kv.cluster.placement import Dealt, Moved, Stale, part_name, whole_of
from spillway_kv.cluster.records import DaemonRecord, MoveUnderWay, Named, State, Store

# Number of moves that are remembered. An older move is as if it had never happened.
_MOVES_MAX = 100_000


class Directory:
    """Answers clients and nodes. Not thread-safe.

    Every change is in the store before the call returns, so that a restarted directory continues
    where the last one was killed. Decode steps do not use the directory.
    """

    def __init__(self, store: Store, death: Callable[[str], str] = lambda node: "") -> None:
        """Reads the records from the store.

        Args:
            store: The store with the records.
            death: Returns why the node with this id is dead; empty if it lives.
        """
        self._store = store
        self._death = death
        self._daemons: dict[str, DaemonRecord] = {}
        self._models: dict[str, Dealt] = {}
        self._sequences: dict[str, Named] = {}
        # Keys: a part, and the daemon from which it moved.
        self._moves: dict[tuple[str, str], Moved] = {}
        self._under_way: dict[str, MoveUnderWay] = {}
        # The daemon with the first part of each named sequence, and the named sequences by this
        # daemon.
        self._first_place: dict[str, str] = {}
        self._first_on: dict[str, set[str]] = {}
        # Number of sequences placed on each daemon since its last report.
        self._placed: dict[str, int] = {}
        tables = {
            "daemon": self._daemons,
            "model": self._models,
            "sequence": self._sequences,
            "move": self._moves,
            "under-way": self._under_way,
        }
        for key, value in sorted(store.items()):
            table, _, _ = key.partition("/")
            name, record = pickle.loads(value)  # noqa: S301  (of this cluster's own)
            tables[table][name] = record  # type: ignore[index]
        for name, named in self._sequences.items():
            # Times of the last process, perhaps on another machine, say nothing here.
            self._sequences[name] = named._replace(noted=time.monotonic())
            first = part_name(name, 0, len(named.daemons))
            self._set_first(name, self._place(first, named.daemons[0]))

    def _put(self, table: str, name: object, record: object) -> None:
        self._store.put(_key(table, name), pickle.dumps((name, record)))

    def _delete(self, table: str, name: object) -> None:
        self._store.delete(_key(table, name))

    # Daemons, for their nodes.

    def register(self, record: DaemonRecord) -> str:
        """Registers a daemon that its node has started or restarted.

        Args:
            record: Record of the daemon. Its `name` is ignored.

        Returns:
            The daemon's name: the same as before if the daemon still has its rows.
        """
        before = [each for each in self._daemons.values() if each.slot == record.slot]
        for each in before:
            # Rows in a store can outlive even the Ray node. Other rows last as long as their
            # process.
            stays = bool(record.store_id) or each.boot_id == record.boot_id
            if stays and each.store_id == record.store_id and each.state not in ("lost", "drained"):
                state: State = "draining" if each.state == "draining" else "up"
                self._note(dataclasses.replace(record, name=each.name, state=state))
                return each.name
        name = f"daemon-{record.slot}" + (f".{len(before)}" if before else "")
        for each in before:
            if each.state not in ("lost", "drained"):
                self._lose(each, f"{name} has come in its place, without its rows")
        self._note(dataclasses.replace(record, name=name))
        return name

    def report(self, name: str, **told: int) -> None:
        """Stores how full a daemon is. told: fields of its record."""
        if name in self._daemons:
            # Not written to the store: a restarted directory soon gets the next report.
            self._daemons[name] = dataclasses.replace(self._daemons[name], **told)  # type: ignore[arg-type]
            self._placed[name] = 0

    def set_state(self, name: str, state: State, reason: str = "") -> None:
        """Sets the state of a daemon."""
        self._note(dataclasses.replace(self._daemon(name), state=state, reason=reason))

    def ended(self, name: str, boot_id: str) -> None:
        """Notes that a daemon's process has ended and restarts, unless it has restarted already.

        The state of a draining daemon stays: it continues to drain, or is drained once more.
        """
        record = self._daemon(name)
        if record.state == "up" and record.boot_id == boot_id:
            self.set_state(name, "down", "it has ended, and is restarted")

    def _note(self, record: DaemonRecord) -> None:
        self._put("daemon", record.name, record)
        self._daemons[record.name] = record

    def _daemon(self, name: str) -> DaemonRecord:
        if name not in self._daemons:
            raise spillway_kv.NotFound(f"there is no {name} in the cluster")
        return self._daemons[name]

    def _lose(self, record: DaemonRecord, reason: str) -> None:
        self._note(dataclasses.replace(record, state="lost", reason=reason))
        # The parts that were about to be deleted there are complete at their targets.
        for part, under_way in list(self._under_way.items()):
            if under_way.source == record.name:
                self.end_move(part, done=True)

    # Daemons, for clients.

    def daemons(self) -> list[DaemonRecord]:
        """Returns the records of all daemons since `up`, ordered by slot."""
        for record in list(self._daemons.values()):
            self.loss(record.name)
        return sorted(self._daemons.values(), key=lambda each: (each.slot, each.name))

    def daemon(self, name: str) -> DaemonRecord:
        """Returns the record of a daemon.

        Raises:
            NotFound: There is no daemon with this name.
        """
        return self._daemon(name)

    def loss(self, name: str) -> str:
        """Returns why a daemon will not return with its rows; empty if it may."""
        record = self._daemon(name)
        if record.state in ("up", "down", "draining"):
            death = self._death(record.node)
            if not death:
                return ""
            self._lose(record, f"its node {record.node} is gone: {death}")
            record = self._daemon(name)
        if record.state == "drained":
            return f"{name} was drained and has ended"
        return f"{name} is lost with all sequences that it had: {record.reason}"

    # Models.

    def add_model(self, dealt: Dealt) -> None:
        """See `Placement.add_model`. Adding the same model twice is not an error."""
        name = dealt.model.name
        if self._models.get(name, dealt) != dealt:
            raise spillway_kv.AlreadyExists(f"{name} exists")
        self._put("model", name, dealt)
        self._models[name] = dealt

    def note_weights(self, dealt: Dealt) -> None:
        """See `Placement.note_weights`."""
        name = dealt.model.name
        known = self._models.get(name)
        if known is None or known.made != dealt.made:
            raise spillway_kv.NotFound(f"there is no {name} as it was: it was deleted")
        self._put("model", name, dealt)
        self._models[name] = dealt

    def model(self, name: str) -> Dealt | None:
        """See `Placement.dealt`."""
        return self._models.get(name)

    def models(self) -> list[Dealt]:
        """Returns all models, ordered by name."""
        return [self._models[name] for name in sorted(self._models)]

    def drop_model(self, name: str) -> None:
        """See `Placement.drop_model`."""
        self._models.pop(name, None)
        self._delete("model", name)

    # Sequences.

    def choose(
        self, count: int, sequence: str, claim: str, model: tuple[str, str] = ("", "")
    ) -> list[str]:
        """Like `Placement.choose`: those with the most free memory, then with the fewest sequences.

        Args:
            count: Number of daemons.
            sequence: Name to take; empty: no name.
            claim: Random id of this call, so that the call may be repeated, after the id of the
                client's token and a dot.
            model: Name of the sequence's model, and its `Dealt.made`; empty: not checked.

        Raises:
            ValueError: `count` is below 1.
            Stale: The model does not exist, or is another one with this name.
            VersionMismatch: The chosen daemons have different versions.
        """
        if count < 1:
            raise ValueError(f"part_count {count} is not in [1, the number of daemons]")
        name, made = model
        known = self._models.get(name)
        if name and (known is None or known.made != made):
            raise Stale(f"{name} was deleted")
        if sequence and self._is_claimed(sequence, claim):
            return list(self._sequences[sequence].daemons)
        usable = [record for record in self.daemons() if record.state == "up"]
        if len(usable) < count:
            states = ", ".join(f"{each.name} is {each.state}" for each in self.daemons())
            raise spillway_kv.Unavailable(
                f"{count} daemons are needed, and {len(usable)} take sequences: "
                f"{states or 'there are none'}"
            )
        usable.sort(key=self._fullness)
        chosen = usable[:count]
        for record in chosen:
            if record.version != chosen[0].version:
                raise spillway_kv.VersionMismatch(
                    f"{record.name} has version {record.version}, {chosen[0].name} has "
                    f"{chosen[0].version}"
                )
        names = [record.name for record in chosen]
        for each in names:
            self._placed[each] = self._placed.get(each, 0) + 1
        if sequence:
            self.put(sequence, names, claim)
        return names

    def choose_target(self, source: str, part: str, byte_count: int) -> str:
        """Chooses the daemon to which a part moves.

        Prefers a daemon that has no other part of the sequence: two parts on one daemon share its
        memory and device, and are served no faster than one after the other.

        Args:
            source: Daemon from which the part moves.
            part: Name of the part on the daemons.
            byte_count: Bytes of its rows.

        Raises:
            Unavailable: No other daemon takes sequences.
            ResourceExhausted: No other daemon has this much free memory.
        """
        others = [each for each in self.daemons() if each.state == "up" and each.name != source]
        if not others:
            raise spillway_kv.Unavailable(f"no other daemon than {source} takes sequences")
        # Copies in progress are not included in the last reports of the daemons.
        free = {each.name: each.memory_limit_bytes - each.memory_used_bytes for each in others}
        roomy = [each for each in others if free[each.name] >= byte_count]
        if not roomy:
            most = max(free.values())
            raise spillway_kv.ResourceExhausted(
                f"{part} has {byte_count} bytes of rows, and the most that another daemon than "
                f"{source} has free is {most}"
            )
        beside = self._beside(part)
        chosen = min(roomy, key=lambda each: (each.name in beside, self._fullness(each))).name
        self._placed[chosen] = self._placed.get(chosen, 0) + 1
        return chosen

    def _beside(self, part: str) -> set[str]:
        """Returns the daemons with the other parts of a named sequence."""
        whole, number, count = whole_of(part)
        found = self._sequences.get(whole)
        if found is None or len(found.daemons) != count:
            return set()
        return {
            self._place(part_name(whole, other, count), daemon)
            for other, daemon in enumerate(found.daemons)
            if other != number
        }

    def _place(self, part: str, daemon: str) -> str:
        """Returns the daemon that has a part now, which was on `daemon` before."""
        moved = self.moved(part, daemon, gone=False)
        return daemon if moved is None else moved.daemon

    def _fullness(self, record: DaemonRecord) -> tuple[int, int, int]:
        """Sort key: tenths of the memory in use, then number of sequences."""
        tenths = 10 * record.memory_used_bytes // max(record.memory_limit_bytes, 1)
        return tenths, record.sequence_count + self._placed.get(record.name, 0), record.slot

    def put(self, sequence: str, daemons: SequenceABC[str], claim: str) -> None:
        """See `Placement.put`. claim: as for `choose`."""
        if self._is_claimed(sequence, claim):
            return
        record = Named(claim, tuple(daemons), time.monotonic())
        self._put("sequence", sequence, record)
        self._sequences[sequence] = record
        self._set_first(sequence, daemons[0])

    def _is_claimed(self, sequence: str, claim: str) -> bool:
        """Whether this call has taken the name. Raises AlreadyExists if another one has."""
        if sequence not in self._sequences:
            return False
        if self._sequences[sequence].claim != claim:
            raise spillway_kv.AlreadyExists(f"{sequence} exists")
        return True

    def find(self, sequence: str) -> list[str] | None:
        """See `Placement.find`."""
        found = self._sequences.get(sequence)
        return None if found is None else list(found.daemons)

    def drop(self, sequence: str, older_than: float = 0.0, owner: str | None = None) -> None:
        """See `Placement.drop`.

        Args:
            sequence: Name of the sequence.
            older_than: Only if it was named at least this many seconds ago.
            owner: Only if it was named by a client with this token: for others, the sequences of
                the token do not seem to exist. None: any.
        """
        found = self._sequences.get(sequence)
        if found is not None and (
            time.monotonic() - found.noted < older_than
            or (owner is not None and found.claim.rpartition(".")[0] != owner)
        ):
            return
        if self._sequences.pop(sequence, None) is not None:
            self._delete("sequence", sequence)
            self._set_first(sequence, None)

    def deleted(self, sequence: str, parts: SequenceABC[tuple[str, str]]) -> list[tuple[str, str]]:
        """See `Placement.deleted`."""
        copies = []
        for part, daemon in parts:
            under_way = self._under_way.get(part)
            if under_way is not None and under_way.source == daemon:
                copies.append((part, under_way.moved.daemon))
                self.end_move(part, done=False)
        found = self._sequences.get(sequence)
        if found is not None:
            names = [part for part, _ in parts]
            # Not if the name was given to another sequence since.
            if [*map(self._place, names, found.daemons)] == [daemon for _, daemon in parts]:
                self.drop(sequence)
        return copies

    def first_parts(self, daemon: str, older_than: float) -> dict[str, str]:
        """Returns the named sequences whose first part should be on a daemon, and its name.

        Args:
            daemon: Name of the daemon.
            older_than: Only sequences that were named at least this many seconds ago.
        """
        before = time.monotonic() - older_than
        found = {}
        for name in self._first_on.get(daemon, ()):
            named = self._sequences[name]
            part = part_name(name, 0, len(named.daemons))
            if named.noted < before and part not in self._under_way:
                found[name] = part
        return found

    def _set_first(self, sequence: str, daemon: str | None) -> None:
        """Stores which daemon has the first part of a named sequence; None: no daemon."""
        before = self._first_place.pop(sequence, None)
        if before is not None:
            self._first_on[before].discard(sequence)
        if daemon is not None:
            self._first_place[sequence] = daemon
            self._first_on.setdefault(daemon, set()).add(sequence)

    def expire(self, names: SequenceABC[str], daemon: str, older_than: float) -> None:
        """Drops names whose first part a daemon no longer has, unless the part was moved."""
        there = self.first_parts(daemon, older_than)
        for name in names:
            if name in there:
                self.drop(name)

    def sequences(self) -> Mapping[str, tuple[str, ...]]:
        """Returns the daemons on which named sequences were placed."""
        return {name: found.daemons for name, found in self._sequences.items()}

    # Moves.

    def begin_move(self, part: str, source: str, moved: Moved) -> None:
        """Notes that a part is about to move. It has moved as soon as `source` has deleted it."""
        under_way = MoveUnderWay(source, moved)
        self._put("under-way", part, under_way)
        self._under_way[part] = under_way

    def moves_from(self, source: str) -> dict[str, Moved]:
        """Returns the parts that are about to move from a daemon."""
        return {
            part: under_way.moved
            for part, under_way in self._under_way.items()
            if under_way.source == source
        }

    def end_move(self, part: str, *, done: bool) -> None:
        """Notes whether the part has moved or stays. A second call is not an error."""
        under_way = self._under_way.get(part)
        if under_way is None:
            return
        if done:
            key = part, under_way.source
            self._put("move", key, under_way.moved)
            self._moves[key] = under_way.moved
            whole, number, _ = whole_of(part)
            if number == 0 and whole in self._sequences:
                self._set_first(whole, under_way.moved.daemon)
            here = part, under_way.moved.daemon
            if self._moves.pop(here, None) is not None:
                self._delete("move", here)  # the part has returned to this daemon
            while len(self._moves) > _MOVES_MAX:
                oldest = next(iter(self._moves))
                del self._moves[oldest]
                self._delete("move", oldest)
        del self._under_way[part]
        self._delete("under-way", part)

    def moved(self, part: str, daemon: str, gone: bool) -> Moved | None:
        """See `Placement.moved`.

        Args:
            part: Name of the part on the daemons.
            daemon: The daemon that is known to have had it.
            gone: The part is no longer there, so a move in progress from there has succeeded.
        """
        under_way = self._under_way.get(part)
        if gone and under_way is not None and under_way.source == daemon:
            self.end_move(part, done=True)
        first = last = self._moves.get((part, daemon))
        if first is None or last is None:
            return None
        unbroken = True
        # This ends: `end_move` deletes moves from the daemon that has the part now.
        while (following := self._moves.get((part, last.daemon))) is not None:
            unbroken = unbroken and following.generation == last.new_generation
            last = following
        return Moved(last.daemon, first.generation if unbroken else -1, last.new_generation)


def _key(table: str, name: object) -> str:
    return f"{table}/{'/'.join(name) if isinstance(name, tuple) else name}"
