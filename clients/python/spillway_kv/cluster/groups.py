"""Calls for parts of several sequences at once: one for each daemon that has some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import spillway_kv
from spillway_kv.cluster.connection import ClusterConnection
from spillway_kv.cluster.part import MOVES_MAX, Part
from spillway_kv.errors import SpillwayError

T = TypeVar("T")


def groups_of(parts: Sequence[Part], indices: Sequence[int]) -> list[list[int]]:
    """Groups parts, given by their indices, that are on the same daemon and have the same share."""
    groups: dict[tuple[str, int, int], list[int]] = {}
    for index in indices:
        part = parts[index]
        key = part.daemon, part.share.layers.start, part.share.kv_heads.start
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def ask_by_daemon(
    connection: ClusterConnection,
    parts: Sequence[Part],
    ask: Callable[[Sequence[int]], Sequence[T | SpillwayError]],
) -> list[T | SpillwayError]:
    """Asks for every part, and again for parts that were moved meanwhile.

    Args:
        connection: Makes the calls, at the same time.
        parts: The parts.
        ask: Gets indices of parts with the same daemon and share. Returns an answer for each, in
            order. If it raises an error, this is the answer for all of them.

    Returns:
        An answer for each part.
    """
    answers: dict[int, T | SpillwayError] = {}

    def one(group: list[int]) -> list[int]:
        """Stores the group's answers. Returns the indices to ask again."""
        used = {index: parts[index].sequence for index in group}
        failed: SpillwayError | None = None
        try:
            answers.update(zip(group, ask(group), strict=True))
        except SpillwayError as error:
            failed = error
            # If the error names one part, only that part has failed. The others are asked again.
            name = error.metadata.get("name")
            named = [index for index in group if used[index].name == name]
            answers.update(dict.fromkeys(named or group, error))
        again = []
        for index in group:
            answer = answers.get(index)
            if failed is not None and answer is not failed:
                again.append(index)
            elif isinstance(answer, SpillwayError):
                try:
                    if parts[index].follow(answer, used[index]):
                        again.append(index)
                except SpillwayError as error:
                    answers[index] = error
        return again

    waiting = list(range(len(parts)))
    # Each part may move, and so make the calls for the others fail.
    for _ in range(MOVES_MAX + len(parts)):
        if not waiting:
            break
        again = connection.each(one, groups_of(parts, waiting))
        waiting = [index for group in again for index in group]
    too_often = spillway_kv.Aborted(f"a sequence has moved {MOVES_MAX} times")
    return [answers.get(index, too_often) for index in range(len(parts))]
