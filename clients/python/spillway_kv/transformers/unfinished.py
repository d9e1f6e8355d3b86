"""The change of a cache that is in progress, so that an interruption can be undone."""

from __future__ import annotations

from dataclasses import dataclass

from spillway_kv.transformers.phase import Phase
from spillway_kv.transformers.rows import RowStore


@dataclass(frozen=True)
class Unfinished:
    """A forward pass, or a truncation, that has begun and not ended.

    Attributes:
        length: Positions that the cache has if the change is given up: those before a forward pass,
            or those after a truncation.
        paddings: Left padding of each row in that case; None if there are no rows yet.
        phase: Phase of the cache in that case.
    """

    length: int
    paddings: tuple[int, ...] | None
    phase: Phase

    def undo(self, store: RowStore) -> int:
        """Makes the daemon hold what the cache has if the change is given up.

        May be repeated if it fails or is interrupted.

        Returns:
            The number of positions. These are fewer than `length` if appends of an earlier forward
            pass have failed.
        """
        store.abandon()
        if self.paddings is None:
            store.drop()
            return 0
        for row, padding in zip(store.rows, self.paddings, strict=True):
            row.padding = padding
        held = [row.padding + row.sequence.refresh().token_count for row in store.rows]
        length = min(self.length, *held)
        # Also done if nothing is longer, because it makes the daemon refuse a step that is still on
        # its way.
        store.cut(length)
        return length
