"""Moves a part of a sequence from one daemon to another while it is in use."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import spillway
from spillway.errors import Cancelled, DeadlineExceeded, NotFound, SpillwayError, Unavailable

from spillway_cluster.merging import joined
from spillway_cluster.placement import Moved

# Rows that are copied at a time: steps of either daemon wait no longer than for so many.
_BYTES_AT_ONCE = 4 << 20
# So few tokens of each layer are copied while the sequence is sealed; a sequence that grows
# faster than it is copied is sealed after so many rounds.
_LAST_TOKENS = 32
_ROUNDS_MAX = 12
# Truncations of a sequence that one move starts anew after.
_STARTS_MAX = 4


class Ledger(Protocol):
    """Where moves are noted; see `Directory`."""

    def begin_move(self, part: str, source: str, moved: Moved) -> None: ...

    def end_move(self, part: str, *, done: bool) -> None: ...


@dataclass
class Copied:
    """What a move has come to.

    Attributes:
        token_count: Tokens of the longest layer.
        sealed_token_count: Of those, copied while the sequence was sealed.
        sealed_seconds: For how long it was.
        rounds: Times that rows were copied.
    """

    token_count: int = 0
    sealed_token_count: int = 0
    sealed_seconds: float = 0.0
    rounds: int = 0


class _Truncated(Exception):
    """The sequence was truncated, so what was copied may be other rows."""


def move(
    source: spillway.Client,
    target: spillway.Client,
    part: str,
    ledger: Ledger,
    *,
    source_name: str,
    target_name: str,
    ensure_model: Callable[[str], None],
) -> Copied | None:
    """Moves a part. Its clients' steps wait while it is sealed, for the last few tokens.

    Rows are copied in rounds while the sequence goes on, each round what has come since the one
    before. Then it is sealed, the rest is copied, the move is noted, and the part is deleted
    where it was: from then on it has gone. Where anything fails before, it stays, open, and the
    copy is deleted, if its daemon answers; where nobody knows whether it was deleted, the next
    move of the part finds out. A layer's length is copied as it is, also in the middle of a
    step. The copy counts as named: it stays until its ttl.

    Args:
        source: Of the daemon that has it.
        target: Of the daemon that shall have it.
        part: Its resource name, which it keeps.
        ledger: Where the move is noted.
        source_name: What the ledger calls the source.
        target_name: And the target.
        ensure_model: Sees to it that the target has a model of that name.

    Returns:
        What was copied; None where the part is gone: deleted, or expired.

    Raises:
        SpillwayError: The target is full, or one of the daemons does not answer.
    """
    try:
        old = source.get_sequence(part)
    except NotFound:
        # A move that broke off right after the delete.
        ledger.end_move(part, done=True)
        return None
    ledger.end_move(part, done=False)
    ensure_model(old.model)
    for _ in range(_STARTS_MAX):
        try:
            return _moved(source, target, old, ledger, source_name, target_name)
        except _Truncated:
            continue
        except NotFound as error:
            if error.metadata.get("name", part) == part and _is_gone(source, part):
                return None
            raise
    raise spillway.Aborted(f"{part} was truncated {_STARTS_MAX} times while it was copied")


def _is_gone(source: spillway.Client, part: str) -> bool:
    try:
        source.get_sequence(part)
    except NotFound:
        return True
    return False


def _moved(
    source: spillway.Client,
    target: spillway.Client,
    old: spillway.Sequence,
    ledger: Ledger,
    source_name: str,
    target_name: str,
) -> Copied:
    info = old.refresh()
    generation = info.generation
    new = _created(target, old, info)
    model = target.get_model(old.model)
    token_bytes = model.row_bytes_per_token // model.layer_count
    copied = Copied()
    sealed = 0.0
    deleting = False
    try:
        counts = [0] * len(info.layer_token_counts)
        while copied.rounds < _ROUNDS_MAX:
            behind = _copy(old, new, counts, token_bytes)
            copied.rounds += 1
            _check(old, generation)
            if behind <= _LAST_TOKENS:
                break
        sealed = time.perf_counter()
        old.seal()
        _check(old, generation)
        copied.sealed_token_count = _copy(old, new, counts, token_bytes)
        copied.token_count = max(counts)
        there = new.refresh()
        if list(there.layer_token_counts) != list(old.layer_token_counts):
            raise spillway.DataLoss(
                f"{old.name} has {list(old.layer_token_counts)} tokens and its copy "
                f"{list(there.layer_token_counts)}"
            )
        moved = Moved(target_name, generation, there.generation)
        ledger.begin_move(old.name, source_name, moved)
        # A daemon that has restarted has opened it again, and it may have grown.
        deleting = True
        try:
            old.delete(if_sealed=True)
        except (Unavailable, Cancelled, DeadlineExceeded):
            # It may have been, and then the copy is all there is.
            if not _is_gone(source, old.name):
                raise
    except BaseException as error:
        # Once it was to be deleted nobody knows what is there: who moves it next finds out.
        if not (deleting and isinstance(error, (Unavailable, Cancelled, DeadlineExceeded))):
            _take_back(old, new, ledger, sealed > 0)
        raise
    copied.sealed_seconds = time.perf_counter() - sealed
    ledger.end_move(old.name, done=True)
    return copied


def _created(
    target: spillway.Client, old: spillway.Sequence, info: spillway.SequenceInfo
) -> spillway.Sequence:
    """An empty sequence as the old one, in place of what a move that broke off has left."""
    ttl = info.ttl
    part_id = old.name.removeprefix("sequences/")
    try:
        target.get_sequence(old.name).delete()
    except NotFound:
        pass
    return target.create_sequence(old.model, part_id, policy=info.policy, ttl=ttl)


def _check(old: spillway.Sequence, generation: int) -> None:
    if old.refresh().generation != generation:
        raise _Truncated


def _copy(
    old: spillway.Sequence, new: spillway.Sequence, counts: list[int], token_bytes: int
) -> int:
    """Copies what has come since the last time.

    Args:
        old: From where.
        new: To where.
        counts: Tokens of each layer that are copied; kept up to date.
        token_bytes: Of a token's rows in one layer.

    Returns:
        The most tokens of a layer that were copied.
    """
    now = old.refresh().layer_token_counts
    most = max(end - start for start, end in zip(counts, now, strict=True))
    # Layers that are alike go together, those of a step's middle in two pieces.
    first = 0
    while first < len(now):
        last = first + 1
        while last < len(now) and (counts[last], now[last]) == (counts[first], now[first]):
            last += 1
        at_once = max(1, _BYTES_AT_ONCE // (token_bytes * (last - first)))
        for start in range(counts[first], now[first], at_once):
            stop = min(start + at_once, now[first])
            try:
                rows = [old.fetch(layer, start, stop) for layer in range(first, last)]
            except spillway.OutOfRange:
                raise _Truncated from None
            new.append(
                first,
                start,
                joined([k[None] for k, _ in rows], 0),
                joined([v[None] for _, v in rows], 0),
            )
        counts[first:last] = [now[first]] * (last - first)
        first = last
    return most


def _take_back(
    old: spillway.Sequence, new: spillway.Sequence, ledger: Ledger, sealed: bool
) -> None:
    """The part stays: opens it again and deletes its copy."""
    for undo in (
        lambda: old.unseal() if sealed else None,
        new.delete,
        lambda: ledger.end_move(old.name, done=False),
    ):
        try:
            undo()
        except SpillwayError:
            continue  # the first error is what is told
