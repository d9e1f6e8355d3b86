"""Which sequences begin with the tokens of a new request. For one thread, without vLLM."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Tokens are compared in blocks of so many.
BLOCK_TOKEN_COUNT = 64


def block_hashes(salt: str, tokens: Sequence[int], known: Sequence[bytes] = ()) -> list[bytes]:
    """Hashes of the prefixes of 64, 128, ... tokens.

    Args:
        salt: What else must be equal: an adapter, a cache salt.
        tokens: Token ids, each in [0, 2^63).
        known: Hashes of their first blocks, which are not made again.

    Returns:
        One hash for each whole block, [T // 64], of all that is before its end.
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
    """The sequence whose rows a request can begin with.

    Attributes:
        key: The sequence.
        token_count: How many tokens' rows are there, a multiple of 64.
        coming: How many there will be once the prompts that are being computed are.
    """

    key: int
    token_count: int
    coming: int


@dataclass
class _Entry:
    hashes: list[bytes]
    # Tokens whose rows are there; those of the hashes are that or will be.
    row_count: int = 0
    # Whether its request is being computed, so that rows are on their way.
    running: bool = False


class Prefixes:
    """Sequences by the tokens that they begin with; live ones and kept ones.

    Args:
        kept_count_max: Sequences that stay after their request, the newest in use.
    """

    def __init__(self, kept_count_max: int) -> None:
        self._kept_count_max = kept_count_max
        self._entries: dict[int, _Entry] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        # By the hash of the first block.
        self._by_first: dict[bytes, set[int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def kept(self) -> list[int]:
        """Sequences whose requests have finished, the oldest first."""
        return list(self._kept)

    def add(self, key: int, hashes: list[bytes]) -> None:
        """Notes a request with these prefixes, of which nothing is computed."""
        assert key not in self._entries
        self._entries[key] = _Entry(hashes)
        if hashes:
            self._by_first.setdefault(hashes[0], set()).add(key)

    def hashes(self, key: int) -> list[bytes]:
        """The prefixes of a sequence as noted."""
        return self._entries[key].hashes

    def set_rows(self, key: int, row_count: int, *, running: bool) -> None:
        """Notes how many tokens' rows a live sequence has, and whether more are coming."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.row_count, entry.running = row_count, running

    def row_count(self, key: int) -> int:
        """Tokens whose rows are there."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.row_count

    def match(self, key: int, token_count_max: int) -> Match | None:
        """The sequence that gives a request most, and what is on its way.

        Args:
            key: The request, as added.
            token_count_max: Most tokens that it may take.

        Returns:
            None where no other sequence begins alike for 64 tokens.
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
        """Notes that a sequence was forked, so that it is not the next to go."""
        if key in self._kept:
            self._kept.move_to_end(key)

    def keep(self, key: int, hashes: list[bytes], row_count: int) -> list[int]:
        """Notes that a request has finished and what its sequence holds.

        Args:
            key: The sequence.
            hashes: Prefixes of all its tokens.
            row_count: Tokens whose rows are there.

        Returns:
            Sequences that go for it: those that it makes superfluous and those beyond the
            limit; it may be among them.
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
        """Notes that a sequence is gone."""
        entry = self._entries.pop(key, None)
        self._kept.pop(key, None)
        if entry is None or not entry.hashes:
            return
        keys = self._by_first[entry.hashes[0]]
        keys.discard(key)
        if not keys:
            del self._by_first[entry.hashes[0]]


def _common(some: list[bytes], others: list[bytes]) -> int:
    """Blocks that both begin with: each hash covers all before it."""
    low, high = 0, min(len(some), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if some[middle - 1] == others[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
