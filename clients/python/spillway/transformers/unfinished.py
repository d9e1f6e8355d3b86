"""What is under way with a cache, so that an interruption can be undone."""

from __future__ import annotations

from dataclasses import dataclass

from spillway.transformers.phase import Phase
from spillway.transformers.rows import RowStore


@dataclass(frozen=True)
class Unfinished:
    """A forward, or a truncation, that began and has not ended yet.

    Attributes:
        length: Positions that the cache has when it is given up: those before a
            forward, those after a truncation.
        paddings: Each row's left padding then; None where there are no rows yet.
        phase: What the cache's phase is then.
    """

    length: int
    paddings: tuple[int, ...] | None
    phase: Phase

    def undo(self, store: RowStore) -> int:
        """Has the daemon hold what the cache has when this is given up.

        May be repeated where it fails or is interrupted itself.

        Returns:
            The positions that there are: fewer than `length` where appends of an earlier
            forward have failed.
        """
        store.abandon()
        if self.paddings is None:
            store.drop()
            return 0
        for row, padding in zip(store.rows, self.paddings, strict=True):
            row.padding = padding
        held = [row.padding + row.sequence.refresh().token_count for row in store.rows]
        length = min(self.length, *held)
        # Also where nothing is longer: a step that is on its way still is refused then.
        store.cut(length)
        return length
