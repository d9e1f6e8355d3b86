"""The text of a cache: its tokens, and where its turns end."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from spillway_kv.transformers.contents import Contents


class Turns:
    """What is known of the text whose K/V a cache holds. `SpillwayCache` documents the calls.

    Args:
        contents: The contents of the cache.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    @property
    def tokens(self) -> list[list[int]]:
        """As `SpillwayCache.tokens`."""
        contents = self._contents
        contents.finish_selection()
        paddings = contents.paddings
        ids = contents.texts.rows(len(paddings))
        if ids is None:
            return []
        rows = ids[:, : contents.length].tolist()
        return [row[padding:] for row, padding in zip(rows, paddings, strict=True)]

    def note_tokens(self, ids: torch.Tensor | None) -> None:
        """As `SpillwayCache.note_tokens`. None forgets the tokens."""
        if ids is not None and ids.ndim != 2:
            raise ValueError(f"ids have shape {list(ids.shape)}, not [B, n]")
        self._contents.finish_selection()
        count = len(self._contents.paddings)
        if ids is not None and count not in (0, len(ids)):
            raise ValueError(f"the cache holds {count} rows, the ids have {len(ids)}")
        self._contents.texts.note(ids)

    def check_tokens(self, ids: torch.Tensor) -> None:
        """As `SpillwayCache.check_tokens`."""
        contents = self._contents
        contents.settle()
        contents.texts.check(ids, contents.length, contents.paddings)

    @property
    def ends(self) -> Mapping[str, int]:
        """As `SpillwayCache.turns`."""
        return MappingProxyType(self._contents.texts.turns)

    def mark(self, name: str) -> int:
        """As `SpillwayCache.mark`."""
        contents = self._contents
        contents.settle()
        contents.texts.turns[name] = contents.length
        return contents.length

    def truncate(self, to: int | str) -> None:
        """As `SpillwayCache.truncate`."""
        contents = self._contents
        contents.settle()
        if isinstance(to, str):
            turns = contents.texts.turns
            if to not in turns:
                raise KeyError(f"there is no turn {to!r}; turns are {sorted(turns)}")
            to = turns[to]
        if not 0 <= to <= contents.length:
            raise ValueError(
                f"{to} positions are not in [0, {contents.length}], the cache's length"
            )
        contents.remove(contents.length - to)
