"""Finds how many units of a haystack fit a number of tokens."""

from __future__ import annotations

from collections.abc import Callable


def largest(
    count_tokens: Callable[[int], int], token_count: int, least: int = 1, guess: int | None = None
) -> int:
    """Finds a size that fits, of which the next larger one does not.

    Every count may take a second at long contexts, so the search begins at a guess and doubles its
    steps from there. Counts should grow nearly in proportion to the size. They need not be
    monotonic: tasks of other sizes have other random words.

    Args:
        count_tokens: Returns the tokens of a task of a size.
        token_count: Largest such number.
        least: Smallest size that is allowed.
        guess: A size that may be about right. None means to extrapolate from two small sizes.

    Raises:
        ValueError: Not even the smallest size fits.
    """

    def fits(size: int) -> bool:
        return count_tokens(size) <= token_count

    if guess is None:
        first, second = count_tokens(least), count_tokens(2 * least + 16)
        if first > token_count:
            raise ValueError(f"no task fits {token_count:,} tokens")
        each = max((second - first) / (least + 16), 1e-3)
        guess = least + int((token_count - first) / each)
    low = high = max(guess, least)
    step = max(1, low // 256)
    if fits(low):
        high = low + step
        while fits(high):
            step *= 2
            low, high = high, high + step
    else:
        low = max(high - step, least)
        while not fits(low):
            if low == least:
                raise ValueError(f"no task fits {token_count:,} tokens")
            step *= 2
            low, high = max(low - step, least), low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
