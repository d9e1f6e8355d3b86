"""Finds sequences with the same prefix as a new request. For one thread. Does not import vLLM."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Prefixes are compared in blocks of this many tokens.
BLOCK_TOKEN_COUNT = 64


def block_hashes(salt: str, tokens: Sequence[int], known: Sequence[bytes] = ()) -> list[bytes]:
    """Returns hashes of the prefixes of 64, 128, ... tokens.

    Args:
        salt: Other things that must be equal, such as an adapter or a cache salt.
        tokens: Token ids, each in [0, 2^63).
        known: Hashes of the first blocks, which are not computed again.

    Returns:
        One hash for each complete block, [T // 64]. It covers all tokens up to the block's end.
    """
    hashes = list(known)
    before = hashes[-1] if hashes else salt.encode()
    for block in range(len(hashes), len(tokens) // BLOCK_TOKEN_COUNT):
        start = block * BLOCK_TOKEN_COUNT
        data = array("q", tokens[start : start + BLOCK_TOKEN_COUNT]).tobytes()
        hashed = hashlib.blake2b(before + data, digest_size=16, person=b"spillway-prefix")
        before = hashed.digest()
        hashes.append(before)
    return hashes


class Match(NamedTuple):
    """The sequence with whose rows a request can begin.

    Attributes:
        key: Key of the sequence.
        token_count: Number of tokens whose rows exist, a multiple of 64.
        coming: Number of tokens whose rows will exist when the running prompts are computed.
    """

    key: int
    token_count: int
    coming: int


@dataclass
class _Entry:
    hashes: list[bytes]
    # Number of tokens whose rows exist. Rows of the other hashed tokens will exist later.
    row_count: int = 0
    # Whether its request is being computed, so that more rows will follow.
    running: bool = False


class Prefixes:
    """Sequences by their prefixes: those of unfinished requests and kept ones.

    Args:
        kept_count_max: Most sequences that stay after their request. The least recently used goes
            first.
    """

    def __init__(self, kept_count_max: int) -> None:
        self._kept_count_max = kept_count_max
        self._entries: dict[int, _Entry] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        # Keys: hash of the first block.
        self._by_first: dict[bytes, set[int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def kept(self) -> list[int]:
        """Sequences whose requests have finished, the least recently used first."""
        return list(self._kept)

    def add(self, key: int, hashes: list[bytes]) -> None:
        """Adds a request with these prefixes. None of its rows exists yet."""
        assert key not in self._entries
        self._entries[key] = _Entry(hashes)
        if hashes:
            self._by_first.setdefault(hashes[0], set()).add(key)

    def hashes(self, key: int) -> list[bytes]:
        """Returns the stored prefixes of a sequence."""
        return self._entries[key].hashes

    def set_rows(self, key: int, row_count: int, *, running: bool) -> None:
        """Stores how many tokens' rows a sequence has, and whether more will follow."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.row_count, entry.running = row_count, running

    def row_count(self, key: int) -> int:
        """Returns the number of tokens whose rows exist."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.row_count

    def match(self, key: int, token_count_max: int) -> Match | None:
        """Returns the sequence with the longest common prefix that exists, and what will exist.

        Args:
            key: Key of the request, which must have been added.
            token_count_max: Most tokens that the request may take.

        Returns:
            None if no other sequence has the first 64 tokens in common.
        """
        hashes = self._entries[key].hashes[: token_count_max // BLOCK_TOKEN_COUNT]
        best, there, coming = -1, 0, 0
        for other in self._by_first.get(hashes[0], ()) if hashes else ():
            if other == key:
                continue
            entry = self._entries[other]
            common = _common(hashes, entry.hashes)
            rows = min(entry.row_count // BLOCK_TOKEN_COUNT, common)
            if rows > there:
                best, there = other, rows
            if entry.running:
                coming = max(coming, common)
        if there == 0 and coming == 0:
            return None
        return Match(best, there * BLOCK_TOKEN_COUNT, max(there, coming) * BLOCK_TOKEN_COUNT)

    def use(self, key: int) -> None:
        """Marks a sequence as used, because it was forked. Other sequences are dropped first."""
        if key in self._kept:
            self._kept.move_to_end(key)

    def keep(self, key: int, hashes: list[bytes], row_count: int) -> list[int]:
        """Keeps the sequence of a finished request, with its prefixes.

        Args:
            key: Key of the sequence.
            hashes: Hashes of the prefixes of all its tokens.
            row_count: Number of tokens whose rows exist.

        Returns:
            Sequences to drop: those that are a prefix of this one, and those beyond the limit. This
            one may be among them.
        """
        if key not in self._entries:
            return [key]
        self.forget(key)
        hashes = hashes[: row_count // BLOCK_TOKEN_COUNT]
        if not hashes or self._kept_count_max == 0:
            return [key]
        alike = [other for other in self._by_first.get(hashes[0], ()) if other in self._kept]
        common = {other: _common(hashes, self._entries[other].hashes) for other in alike}
        if len(hashes) in common.values():
            return [key]
        dropped = [other for other in alike if common[other] == len(self._entries[other].hashes)]
        for other in dropped:
            self.forget(other)
        self.add(key, hashes)
        self._entries[key].row_count = row_count
        self._kept[key] = None
        while len(self._kept) > self._kept_count_max:
            oldest = next(iter(self._kept))
            self.forget(oldest)
            dropped.append(oldest)
        return dropped

    def forget(self, key: int) -> None:
        """Removes a sequence."""
        entry = self._entries.pop(key, None)
        self._kept.pop(key, None)
        if entry is None or not entry.hashes:
            return
        keys = self._by_first[entry.hashes[0]]
        keys.discard(key)
        if not keys:
            del self._by_first[entry.hashes[0]]


def _common(some: list[bytes], others: list[bytes]) -> int:
    """Counts the common first blocks by bisection, since each hash covers all blocks before it."""
    low, high = 0, min(len(some), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if some[middle - 1] == others[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
