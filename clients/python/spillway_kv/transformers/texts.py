"""The text of a cache, as far as it is known: tokens, and where turns end."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Any

import torch

_MAGIC = b"SPWCACHE1"
# Most bytes that the daemon stores for a client with a sequence.
_BYTES_MAX = 3 << 20
# Limit on the numbers in saved data: a sequence never has 2**32 tokens.
_TOKENS_MAX = 1 << 32
# What reading data of something else may raise.
_DAMAGES = (KeyError, TypeError, ValueError, RecursionError, struct.error, zlib.error)


class TokenMismatchError(ValueError):
    """A text differs from the one whose K/V a cache holds.

    Attributes:
        row: The batch row, or None if the lengths do not fit.
        position: The first position that differs, including left padding.
    """

    def __init__(self, message: str, row: int | None = None, position: int | None = None) -> None:
        super().__init__(message)
        self.row = row
        self.position = position


class Texts:
    """The known tokens of a cache's rows, and its turns.

    Positions include left padding.
    """

    def __init__(self) -> None:
        # Tokens [B, n] on any device, never changed in place. None if nothing is known.
        self._ids: torch.Tensor | None = None
        self.turns: dict[str, int] = {}

    def note(self, ids: torch.Tensor | None) -> None:
        """Stores the tokens of all rows, [B, n], from the first position on. None forgets them."""
        self._ids = None if ids is None else ids.detach().to(torch.int64, copy=True)

    def rows(self, row_count: int) -> torch.Tensor | None:
        """Returns the known tokens [row_count, n].

        If they were noted for fewer rows, transformers has multiplied each row since then, for
        beams or samples. So each is repeated, next to itself. Returns None if nothing is known.
        """
        ids = self._ids
        if ids is None or len(ids) == row_count:
            return ids
        if len(ids) == 0 or row_count % len(ids):
            return None
        return ids.repeat_interleave(row_count // len(ids), dim=0)

    def check(self, ids: torch.Tensor, length: int, paddings: SequenceABC[int]) -> None:
        """Compares tokens [B, n] with the known ones of the first `length` positions.

        Raises:
            TokenMismatchError: The tokens differ, or there are fewer.
        """
        if length == 0:
            return
        if ids.shape[1] < length:
            raise TokenMismatchError(
                f"the cache holds {length} positions and the ids have {ids.shape[1]}: truncate the "
                "cache to what they share"
            )
        if ids.shape[0] != len(paddings):
            raise TokenMismatchError(
                f"the cache holds {len(paddings)} rows, the ids have {ids.shape[0]}"
            )
        held = self.rows(len(paddings))
        if held is None:
            return
        held = held[:, :length].cpu()
        for row, (known, padding) in enumerate(zip(held, paddings, strict=True)):
            given = ids[row, : len(known)].detach().to("cpu", torch.int64)
            wrong = (given != known).nonzero().flatten()
            wrong = wrong[wrong >= padding]
            if len(wrong):
                at = int(wrong[0])
                raise TokenMismatchError(
                    f"row {row} has token {int(known[at])} at position {at}, the ids have "
                    f"{int(given[at])}: truncate the cache to {at} positions, or use another cache",
                    row,
                    at,
                )

    def cut(self, length: int) -> None:
        """Forgets everything after the first `length` positions."""
        if self._ids is not None:
            self._ids = self._ids[:, :length]
        self.turns = {name: end for name, end in self.turns.items() if end <= length}

    def selected(self, indices: SequenceABC[int], row_count: int) -> Texts:
        """Returns texts of which row i is what row indices[i] of `row_count` is now."""
        made = Texts()
        ids = self.rows(row_count)
        made._ids = None if ids is None else ids[list(indices)]
        made.turns = dict(self.turns)
        return made

    def best_rows(
        self, ids: torch.Tensor, row_count: int, prompt_count: int, length: int
    ) -> tuple[list[int], int]:
        """Finds, for each text, the row of its prompt with the longest common beginning.

        Args:
            ids: Texts [G, n], next to each other for each prompt.
            row_count: Number of rows, also next to each other for each prompt.
            prompt_count: Number of prompts.
            length: Number of positions of the rows.

        Returns:
            The rows, and the number of first positions in which all texts are as their rows.
        """
        known = self.rows(row_count)
        assert known is not None
        end = min(length, known.shape[1], ids.shape[1])
        rows_each, texts_each = row_count // prompt_count, len(ids) // prompt_count
        best, shared = [], end
        for text, given in enumerate(ids[:, :end].to(known.device)):
            first = text // texts_each * rows_each
            wrong = known[first : first + rows_each, :end] != given
            # argmax returns the first position that differs.
            common = torch.where(wrong.any(1), wrong.int().argmax(1), end)
            row = int(common.argmax())
            best.append(first + row)
            shared = min(shared, int(common[row]))
        return best, shared

    def fork(self) -> Texts:
        """Returns a copy."""
        made = Texts()
        made._ids = self._ids
        made.turns = dict(self.turns)
        return made


@dataclass(frozen=True)
class RowNote:
    """The data that is saved with a row's K/V.

    Attributes:
        save: Id of a call of `save`, the same for all rows.
        row: Index of the row.
        row_count: Number of rows.
        length: Positions of the cache, including left padding.
        padding: Left padding of the row.
        turns: Turns of the cache.
        ids: The known tokens of the row.
        config: `config_fields` of the model. None if they are not known.
        weights: Digest of the weights of each layer, or None.
    """

    save: str
    row: int
    row_count: int
    length: int
    padding: int
    turns: dict[str, int]
    ids: torch.Tensor
    config: dict[str, Any] | None = None
    weights: tuple[str | None, ...] = ()

    def to_bytes(self) -> bytes:
        """Returns the data as bytes.

        Raises:
            ValueError: The data are larger than the daemon stores.
        """
        header = {
            "save": self.save,
            "row": self.row,
            "row_count": self.row_count,
            "length": self.length,
            "padding": self.padding,
            "turns": self.turns,
            "token_count": len(self.ids),
            "config": self.config,
            "weights": self.weights,
        }
        text = json.dumps(header).encode()
        ids = zlib.compress(self.ids.numpy().astype("<i8").tobytes())
        packed = _MAGIC + struct.pack("<I", len(text)) + text + ids
        if len(packed) > _BYTES_MAX:
            raise ValueError(
                f"tokens and turns of row {self.row} take {len(packed)} bytes, and {_BYTES_MAX} "
                "are kept: call cache.forget_tokens() to save without them"
            )
        return packed

    @classmethod
    def from_bytes(cls, packed: bytes) -> RowNote:
        """Reads the data from bytes.

        Raises:
            ValueError: The bytes are something else.
        """
        try:
            return cls._parsed(packed)
        except _DAMAGES as error:
            raise ValueError(f"this was not saved by SpillwayCache.save ({error})") from None

    @classmethod
    def _parsed(cls, packed: bytes) -> RowNote:
        start = len(_MAGIC) + 4
        if packed[: len(_MAGIC)] != _MAGIC:
            raise ValueError("another beginning")
        (size,) = struct.unpack("<I", packed[len(_MAGIC) : start])
        header: dict[str, Any] = json.loads(packed[start : start + size])
        numbers = {
            name: _count(header[name])
            for name in ("row", "row_count", "length", "padding", "token_count")
        }
        count = numbers.pop("token_count")
        unpack = zlib.decompressobj()
        # Limited, because a few bytes could unpack to more than the memory.
        ids = unpack.decompress(packed[start + size :], max(8 * count, 1))
        if len(ids) != 8 * count or unpack.unconsumed_tail:
            raise ValueError("another number of tokens")
        turns = {str(name): _count(end) for name, end in header["turns"].items()}
        config, weights = header.get("config"), header.get("weights", [])
        if not isinstance(config, dict | None) or not isinstance(weights, list):
            raise ValueError("another description of a model")
        return cls(
            save=str(header["save"]),
            turns=turns,
            config=config,
            weights=tuple(weights),
            ids=torch.frombuffer(bytearray(ids), dtype=torch.int64) if count else _NO_IDS,
            **numbers,
        )


_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _TOKENS_MAX:
        raise ValueError(f"{value!r} is no count")
    return value
