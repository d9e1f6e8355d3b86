"""Moves a part of a sequence from one daemon to another while it is in use."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import spillway_kv
from spillway_kv.cluster.merging import joined
from spillway_kv.cluster.placement import Moved
from spillway_kv.errors import Cancelled, DeadlineExceeded, NotFound, SpillwayError, Unavailable

# Bytes of rows that are copied at a time. Steps on either daemon wait no longer than for these.
_BYTES_AT_ONCE = 4 << 20
# The sequence is sealed when at most this many tokens of each layer are left to copy, or after
# _ROUNDS_MAX rounds, if it grows faster than it is copied.
_LAST_TOKENS = 32
_ROUNDS_MAX = 12
# Number of times that one move starts again because the sequence was truncated.
_STARTS_MAX = 4


class Ledger(Protocol):
    """Where moves are recorded; see `Directory`."""

    def begin_move(self, part: str, source: str, moved: Moved) -> None: ...

    def end_move(self, part: str, *, done: bool) -> None: ...


@dataclass
class Copied:
    """The result of a move.

    Attributes:
        token_count: Number of tokens of the longest layer.
        sealed_token_count: Number of these that were copied while the sequence was sealed.
        sealed_seconds: How long the sequence was sealed.
        rounds: Number of rounds of copying.
    """

    token_count: int = 0
    sealed_token_count: int = 0
    sealed_seconds: float = 0.0
    rounds: int = 0


class _Truncated(Exception):
    """The sequence was truncated, so the rows that were copied may be outdated."""


def move(
    source: spillway_kv.Client,
    target: spillway_kv.Client,
    part: str,
    ledger: Ledger,
    *,
    source_name: str,
    target_name: str,
    ensure_model: Callable[[str], None],
) -> Copied | None:
    """Moves a part. Steps of its clients wait while it is sealed, for its last few tokens.

    Rows are copied in rounds while the sequence is in use. Each round copies the rows that are new
    since the last round. Then the sequence is sealed, the rest is copied, the move is recorded, and
    the part is deleted at the source. From then on it has moved. If something fails before, the
    part stays and is unsealed, and the copy is deleted if its daemon answers. The same holds if the
    source ends before it deletes the part, and then starts again with its rows. If the source does
    not answer any more, the next move of the part finds out whether it was deleted. Each layer is
    copied with its own length, also in the middle of a step. The copy counts as named, so it stays
    until its ttl.

    Args:
        source: Client of the daemon that has the part.
        target: Client of the daemon to which it moves.
        part: Resource name of the part, which stays the same.
        ledger: Where the move is recorded.
        source_name: Name of the source in the ledger.
        target_name: Name of the target in the ledger.
        ensure_model: Makes sure that the target has the model with this name.

    Returns:
        What was copied. None if the part does not exist: it was deleted, or has expired.

    Raises:
        SpillwayError: The target is full, or one of the daemons does not answer.
    """
    try:
        old = source.get_sequence(part)
    except NotFound:
        # An earlier move was interrupted right after it deleted the part.
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
    raise spillway_kv.Aborted(f"{part} was truncated {_STARTS_MAX} times while it was copied")


def _is_gone(source: spillway_kv.Client, part: str) -> bool:
    try:
        source.get_sequence(part)
    except NotFound:
        return True
    return False


def _moved(
    source: spillway_kv.Client,
    target: spillway_kv.Client,
    old: spillway_kv.Sequence,
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
            raise spillway_kv.DataLoss(
                f"{old.name} has {list(old.layer_token_counts)} tokens and its copy "
                f"{list(there.layer_token_counts)}"
            )
        moved = Moved(target_name, generation, there.generation)
        ledger.begin_move(old.name, source_name, moved)
        # Only if it is still sealed: a restarted daemon has unsealed it, and it may have grown.
        deleting = True
        try:
            old.delete(if_sealed=True)
        except (Unavailable, Cancelled, DeadlineExceeded):
            # It may have been deleted. Then the copy is the only one. Otherwise it is unsealed, so
            # that a delete which is still on its way is refused, and the copy is taken back: it
            # will soon lack what clients append at the source.
            try:
                source.connection.restarts.again(old.unseal)
            except NotFound:
                pass
            else:
                deleting = False
                raise
    except BaseException as error:
        # If neither the delete nor the unseal was answered, the state is unknown, and the next move
        # finds out.
        if not (deleting and isinstance(error, (Unavailable, Cancelled, DeadlineExceeded))):
            _take_back(old, new, ledger, sealed > 0)
        raise
    copied.sealed_seconds = time.perf_counter() - sealed
    ledger.end_move(old.name, done=True)
    return copied


def _created(
    target: spillway_kv.Client, old: spillway_kv.Sequence, info: spillway_kv.SequenceInfo
) -> spillway_kv.Sequence:
    """Creates an empty sequence like the old one. Deletes what an interrupted move has left."""
    ttl = info.ttl
    part_id = old.name.removeprefix("sequences/")
    try:
        target.get_sequence(old.name).delete()
    except NotFound:
        pass
    return target.create_sequence(old.model, part_id, policy=info.policy, ttl=ttl)


def _check(old: spillway_kv.Sequence, generation: int) -> None:
    if old.refresh().generation != generation:
        raise _Truncated


def _copy(
    old: spillway_kv.Sequence, new: spillway_kv.Sequence, counts: list[int], token_bytes: int
) -> int:
    """Copies the rows that are new since the last call.

    Args:
        old: The source.
        new: The copy.
        counts: Number of copied tokens of each layer; updated.
        token_bytes: Bytes of a token's rows in one layer.

    Returns:
        Largest number of tokens that were copied in a layer.
    """
    now = old.refresh().layer_token_counts
    most = max(end - start for start, end in zip(counts, now, strict=True))
    # Layers with equal ranges are copied together. In the middle of a step there are two groups.
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
            except spillway_kv.OutOfRange:
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
    old: spillway_kv.Sequence, new: spillway_kv.Sequence, ledger: Ledger, sealed: bool
) -> None:
    """Keeps the part where it is: unseals it and deletes its copy."""
    for undo in (
        lambda: old.unseal() if sealed else None,
        new.delete,
        lambda: ledger.end_move(old.name, done=False),
    ):
        try:
            undo()
        except SpillwayError:
            continue  # the caller raises the first error
