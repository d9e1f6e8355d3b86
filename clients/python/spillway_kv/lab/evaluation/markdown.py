"""Tables and numbers in Markdown, for the pages that `report.py` writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal

# Most rows of a table that is not folded.
ROWS_SHOWN = 6


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table. Columns of numbers, except the first, are right-aligned."""
    rows = list(rows)
    numbers = [all(row[i][:1] in "0123456789+-" for row in rows) for i in range(len(header))]
    return [
        "| " + " | ".join(header) + " |",
        "|---|" + "".join("---:|" if number else "---|" for number in numbers[1:]),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def folded(title: str, lines: Sequence[str]) -> list[str]:
    """Lines that a reader can unfold."""
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>"]


def number(value: float, digits: int) -> str:
    """Formats a number with `digits` significant digits, without an exponent."""
    return format(Decimal(f"{value:.{digits}g}"), "f")


def percent(share: float) -> str:
    """Formats a share in percent, with about two digits."""
    return f"{_hundredths(share)} %"


def span(interval: Sequence[float]) -> str:
    """Formats an interval of shares."""
    return f"{_hundredths(interval[0])}-{_hundredths(interval[1])} %"


def _hundredths(share: float) -> str:
    if share < 0.1:
        return number(100 * share, 2)
    return f"{100 * share:.1f}".replace("100.0", "100")


def between(interval: Sequence[float]) -> str:
    """Formats an interval of numbers."""
    dash = "-" if interval[0] >= 0 else " to "
    return f"{number(interval[0], 3)}{dash}{number(interval[1], 3)}"
