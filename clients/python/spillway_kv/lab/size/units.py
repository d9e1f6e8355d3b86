"""Numbers of bytes and tokens, as people write and read them."""

from __future__ import annotations

import re

_BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_TOKENS = {"": 1, "K": 2**10, "M": 2**20}
BYTES_MAX = 2**50
# Most tokens of one sequence (host/base/limits.h).
TOKEN_COUNT_MAX = 2**32 - 1

_NUMBER = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)")


def bytes_of(text: str) -> int:
    """Reads a size such as 24GB (10^9 bytes each), 64GiB (2^30) or 1.5TB.

    Returns:
        Bytes, rounded down, in [1, 2^50].

    Raises:
        ValueError: It is no such size. The message has the text and the limits.
    """
    return _read(text, _BYTES, BYTES_MAX, "a size", "24GB (10^9 bytes each) or 64GiB (2^30 each)")


def tokens_of(text: str) -> int:
    """Reads a number of tokens such as 32768, 128K (1024 each) or 1M (1024^2).

    Returns:
        Tokens, rounded down, in [1, 2^32 - 1].

    Raises:
        ValueError: It is no such number. The message has the text and the limits.
    """
    words = "32768, 128K (1024 each) or 1M (1024^2)"
    return _read(text, _TOKENS, TOKEN_COUNT_MAX, "a number of tokens", words)


def _read(text: str, units: dict[str, int], most: int, what: str, such: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    by_case = {name.lower(): factor for name, factor in units.items()}
    factor = None if match is None else by_case.get(match[2].lower())
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not {what}, such as {such}")
    # Not by floats, which have no exact 0.1.
    whole, _, part = match[1].partition(".")
    value = int(whole + part) * factor // 10 ** len(part)
    if not 1 <= value <= most:
        raise ValueError(f"{text!r} is {value}, which is not in [1, {most}], as {what} must be")
    return value


def bytes_text(value: float) -> str:
    """Returns bytes with three digits and a unit: "512 B", "13.2 KiB", "16.0 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.{_places(value)}f} {unit}"
        value /= 1024
    return f"{value:.{_places(value)}f} TiB"


def tokens_text(value: int) -> str:
    """Returns a number of tokens as `tokens_of` reads it, with three digits, rounded down.

    Such as "12", "96.5K", "1M", "1.25M".
    """
    for unit, factor in (("M", 2**20), ("K", 2**10)):
        if value >= factor:
            power = 10 ** max(3 - len(str(value // factor)), 0)
            return f"{value * power // factor / power:g}{unit}"
    return str(value)


def _places(value: float) -> int:
    """Decimal places with which a number below 1000 has three digits."""
    return 2 if value < 9.995 else 1 if value < 99.95 else 0
