"""Calls for parts of several sequences at once, one for each daemon that has some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from spillway.errors import SpillwayError

from spillway_cluster.part import MOVES_MAX, Part

if TYPE_CHECKING:
    from spillway_cluster.client import ClusterClient

T = TypeVar("T")


def groups_of(parts: Sequence[Part], indices: Sequence[int]) -> list[list[int]]:
    """Which of the parts lie on one daemon and have one share, by their indices."""
    groups: dict[tuple[str, int, int], list[int]] = {}
    for index in indices:
        part = parts[index]
        key = part.daemon, part.share.layers.start, part.share.kv_heads.start
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def ask_by_daemon(
    client: ClusterClient,
    parts: Sequence[Part],
    ask: Callable[[Sequence[int]], Sequence[T | SpillwayError]],
) -> list[T | SpillwayError]:
    """Asks for every part, and again for those that were moved meanwhile.

    Args:
        client: Whose threads are used.
        parts: The parts.
        ask: Gets indices of parts of one daemon and share; returns an answer for each, in
            order. What it raises is the answer of all.

    Returns:
        An answer for each part.
    """
    answers: dict[int, T | SpillwayError] = {}

    def one(group: list[int]) -> list[int]:
        """Notes the group's answers; returns whom to ask again."""
        used = [parts[index].sequence for index in group]
        try:
            got = ask(group)
        except SpillwayError as error:
            got = [error] * len(group)
        again = []
        for index, handle, answer in zip(group, used, got, strict=True):
            answers[index] = answer
            if isinstance(answer, SpillwayError):
                try:
                    if parts[index].follow(answer, handle):
                        again.append(index)
                except SpillwayError as error:
                    answers[index] = error
        if again and len(again) < len(group) and all(a is got[0] for a in got):
            # One that moved has failed the call for all.
            again = group
        return again

    waiting = list(range(len(parts)))
    for _ in range(MOVES_MAX):
        if not waiting:
            break
        again = client.each(one, groups_of(parts, waiting))
        waiting = [index for group in again for index in group]
    return [answers[index] for index in range(len(parts))]
