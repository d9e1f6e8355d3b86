"""Lists of English words for tasks, from the packages of the extra `ruler`."""

from __future__ import annotations

import functools
from importlib import import_module, metadata, resources

from spillway_kv._extras import needs

_WHAT = "a RULER task"


@functools.cache
def _listed(name: str) -> tuple[str, ...]:
    """Returns a list of wonderwords, sorted, each word once."""
    with needs("ruler", _WHAT):
        text = (resources.files("wonderwords.assets") / f"{name}list.txt").read_text("utf-8")
    return tuple(sorted({word for line in text.splitlines() if (word := line.strip())}))


def adjectives() -> tuple[str, ...]:
    """Returns adjectives, sorted.

    Raises:
        ModuleNotFoundError: wonderwords is not installed. The message names the extra.
    """
    return _listed("adjective")


def nouns() -> tuple[str, ...]:
    """Returns nouns, sorted.

    Raises:
        ModuleNotFoundError: wonderwords is not installed. The message names the extra.
    """
    return _listed("noun")


@functools.cache
def usual() -> tuple[str, ...]:
    """Returns nouns, adjectives and verbs, sorted: about 8,500 different words.

    Raises:
        ModuleNotFoundError: wonderwords is not installed. The message names the extra.
    """
    return tuple(sorted({*nouns(), *adjectives(), *_listed("verb")}))


@functools.cache
def many() -> tuple[str, ...]:
    """Returns the words of Webster's second dictionary in lower case, sorted: about 230,000.

    Raises:
        ModuleNotFoundError: english-words is not installed. The message names the extra.
    """
    with needs("ruler", _WHAT):
        package = import_module("english_words")
    return tuple(sorted(package.get_english_words_set(["web2"], alpha=True, lower=True)))


def versions() -> dict[str, str]:
    """Returns the versions of the packages that are installed, by name."""
    found = {}
    for name in ("english-words", "wonderwords"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
