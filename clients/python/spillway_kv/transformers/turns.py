"""The text of a cache: its tokens, and where its turns end."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from spillway_kv.transformers.texts import Texts

if TYPE_CHECKING:
    from spillway_kv.transformers.handed import HandedLayer
    from spillway_kv.transformers.layer import Shared


class Turns:
    """Knows the tokens and turns of a `SpillwayCache`, and cuts it."""

    _shared: Shared
    _texts: Texts
    layers: list[HandedLayer]

    def _settle(self) -> None:
        raise NotImplementedError

    def _finish_selection(self) -> None:
        raise NotImplementedError

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """As in `SpillwayCache`."""
        raise NotImplementedError

    def crop(self, tokens_to_remove: int) -> None:
        """As in `SpillwayCache`."""
        raise NotImplementedError

    def reset(self) -> None:
        """As in `SpillwayCache`."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """Number of positions of completed forward passes, including left padding.

        After Ctrl-C or an exception in a forward pass: those before it. That forward pass is
        undone when the cache is next used.
        """
        return self.layers[0].get_seq_length()

    @property
    def paddings(self) -> tuple[int, ...]:
        """Left padding of each row, positions."""
        return tuple(row.padding for row in self._shared.store.rows)

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each row, without padding, as far as they are known.

        A cache does not see tokens. `note_tokens` and `spillway_kv.transformers.generate` pass them
        to it.
        """
        self._finish_selection()
        paddings = self.paddings
        ids = self._texts.rows(len(paddings))
        if ids is None:
            return []
        rows = ids[:, : self.length].tolist()
        return [row[padding:] for row, padding in zip(rows, paddings, strict=True)]

    def note_tokens(self, ids: torch.Tensor) -> None:
        """Tells the cache the tokens whose K/V it holds or will hold.

        transformers multiplies the rows of a batch for beams and samples. The cache repeats tokens
        that were noted before, and moves them with the rows.

        Args:
            ids: [B, n], from the first position on, including left padding.

        Raises:
            ValueError: The ids do not have one row for each row of the cache.
        """
        if ids.ndim != 2:
            raise ValueError(f"ids have shape {list(ids.shape)}, not [B, n]")
        self._finish_selection()
        count = len(self.paddings)
        if count not in (0, len(ids)):
            raise ValueError(f"the cache holds {count} rows, the ids have {len(ids)}")
        self._texts.note(ids)

    def forget_tokens(self) -> None:
        """Forgets the tokens. The K/V stay."""
        self._finish_selection()
        self._texts.note(None)

    def check_tokens(self, ids: torch.Tensor) -> None:
        """Compares a text with the known tokens of the cache.

        Args:
            ids: [B, n], the whole text, as a model would get it.

        Raises:
            TokenMismatchError: The text differs from `position` on, or is shorter.
        """
        self._settle()
        self._texts.check(ids, self.length, self.paddings)

    def _follow(self, ids: torch.Tensor, prompt_count: int) -> None:
        """Makes the rows those of texts that beam search has found, as far as their K/V exist.

        Args:
            ids: [G, n], the same number of texts for each prompt.
            prompt_count: Number of prompts. The rows of each prompt are next to each other.
        """
        self._settle()
        if not self.paddings:
            return  # generate() was told not to use the cache.
        rows, length = self._texts.best_rows(ids, len(self.paddings), prompt_count, self.length)
        self.batch_select_indices(torch.tensor(rows, device="cpu"))
        try:
            self.truncate(length)
        except ValueError:
            # A layer with a sliding window has dropped rows that it would need.
            self.reset()

    # Turns.

    @property
    def turns(self) -> Mapping[str, int]:
        """Positions where turns end, by the names given to `mark`."""
        return MappingProxyType(self._texts.turns)

    def mark(self, name: str) -> int:
        """Names the present end of the text, for `truncate`. Returns the position.

        A turn is forgotten when the cache is cut before its end.
        """
        self._settle()
        self._texts.turns[name] = self.length
        return self.length

    def truncate(self, to: int | str) -> None:
        """Cuts the cache to a length or to the end of a turn.

        Later tokens are appended from there. Call `fork()` before to make a branch.

        Args:
            to: Number of positions to keep, including left padding, or the name of a turn.

        Raises:
            KeyError: There is no such turn.
            ValueError: More positions than the cache has.
        """
        self._settle()
        if isinstance(to, str):
            if to not in self._texts.turns:
                raise KeyError(f"there is no turn {to!r}; turns are {sorted(self._texts.turns)}")
            to = self._texts.turns[to]
        if not 0 <= to <= self.length:
            raise ValueError(f"{to} positions are not in [0, {self.length}], the cache's length")
        self.crop(to - self.length)
