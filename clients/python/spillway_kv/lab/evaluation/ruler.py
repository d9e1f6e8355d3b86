"""RULER (arXiv 2404.06654): 11 of its 13 tasks, generated from a seed.

Haystacks, needles, counts and answers are as in its repository. The instructions say the same in
other words. Without its text files: essays are the words of the evaluated text, and the two tasks
of questions about paragraphs (qa_1 and qa_2) are missing.
"""

from __future__ import annotations

import math
import random
import re
import string
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from spillway_kv.lab.evaluation import words
from spillway_kv.lab.evaluation.tasks import Maker, Question, Task

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
# Depths at which needles in essays may be, as shares of its sentences.
DEPTHS = tuple(round(100 * i / 39) / 100 for i in range(40))
# Shorter contexts have lists with fewer repetitions of a word.
USUAL_TOKEN_COUNT = 4096
HOP_COUNT = 4
ZETA_OF_2 = math.pi**2 / 6
CODED_WORD_LENGTH = 6

Kind = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True)
class Needles:
    """A task of needles in a haystack.

    Attributes:
        haystack: `noise` (lines of NOISE), `essay` (words of a text) or `needles` (lines like the
            needle, with other keys).
        key: What keys are.
        value: What values are.
        key_count: Number of keys that are not in the haystack's own lines.
        value_count: Values of each key.
        asked_count: Keys that are asked for.
    """

    haystack: Literal["noise", "essay", "needles"]
    key: Kind = "words"
    value: Kind = "numbers"
    key_count: int = 1
    value_count: int = 1
    asked_count: int = 1


NEEDLES = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", value="uuids"),
    "niah_multikey_1": Needles("essay", key_count=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key="uuids", value="uuids"),
    "niah_multivalue": Needles("essay", value_count=4),
    "niah_multiquery": Needles("essay", key_count=4, asked_count=4),
}
NAMES = (*NEEDLES, "vt", "cwe", "fwe")
# Smallest sizes of tasks, 1 for the others: with fewer units they would not be themselves.
LEAST = {"cwe": 20, "fwe": 100}


def needs_words(name: str) -> bool:
    """Whether a task of NAMES has words of the extra `ruler`."""
    return name == "cwe" or (name in NEEDLES and NEEDLES[name].key == "words")


def maker(name: str, token_count: int) -> Maker:
    """Returns the maker of a task. Its pieces are the words of a text, its size is in units.

    A unit is a word of an essay, a line of another haystack, a different word of a list (cwe), or a
    word of a coded text (fwe).

    Args:
        name: One of NAMES.
        token_count: Tokens of the context. They set how often words of cwe occur, and how many
            different words fwe has.
    """
    if name == "vt":
        return variable_tracking
    if name == "cwe":
        return common_words(short=token_count < USUAL_TOKEN_COUNT)
    if name == "fwe":
        return frequent_words(token_count // 50)
    return needles(NEEDLES[name])


# Needles.


def _one(rng: random.Random, kind: Kind) -> str:
    """Returns a random key or value."""
    if kind == "numbers":
        return str(rng.randrange(1_000_000, 10_000_000))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(words.adjectives())}-{rng.choice(words.nouns())}"


def _different(rng: random.Random, kind: Kind, count: int, taken: set[str]) -> list[str]:
    """Returns random keys or values that are not taken yet, and adds them to `taken`."""
    made: list[str] = []
    while len(made) < count:
        one = _one(rng, kind)
        if one not in taken:
            taken.add(one)
            made.append(one)
    return made


def _line(kind: Kind, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


def needles(task: Needles) -> Maker:
    """Returns the maker of a task of needles."""

    def make(rng: random.Random, pieces: Sequence[str], size: int) -> Task:
        taken: set[str] = set()
        keys = _different(rng, task.key, task.key_count, taken)
        values = {key: _different(rng, task.value, task.value_count, taken) for key in keys}
        asked = rng.sample(keys, task.asked_count)
        lines = [_line(task.value, key, value) for key in keys for value in values[key]]
        rng.shuffle(lines)
        if task.haystack == "essay":
            hay = " ".join(_in_essay(rng, pieces, size, lines))
        else:
            if task.haystack == "noise":
                hidden = [NOISE] * size
            else:
                hidden = [
                    _line(task.value, key, _one(rng, task.value))
                    for key in _different(rng, task.key, size, taken)
                ]
            for line in lines:
                hidden.insert(rng.randrange(len(hidden) + 1), line)
            hay = "\n".join(hidden)
        wanted = tuple(value for key in asked for value in values[key])
        return _needle_task(task.value, hay, asked, wanted)

    return make


def _in_essay(
    rng: random.Random, pieces: Sequence[str], size: int, lines: Sequence[str]
) -> list[str]:
    """Returns the sentences of the first `size` words, with lines at random depths."""
    # As in RULER, a text that is too short is read again from its beginning.
    essay = [*pieces] * -(-size // len(pieces))
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(essay[:size]))
    depths = sorted(rng.sample(DEPTHS, len(lines)), reverse=True)
    for depth, line in zip(depths, lines, strict=True):
        sentences.insert(int(depth * len(sentences)), line)
    return sentences


def _needle_task(kind: Kind, hay: str, asked: Sequence[str], wanted: tuple[str, ...]) -> Task:
    several = len(wanted) > 1
    what = f"special magic {kind}" if several else f"special magic {kind[:-1]}"
    before = (
        f"{'Some' if several else 'A'} {what} {'are' if several else 'is'} hidden in the text "
        f"below. Memorize {'them' if several else 'it'}: you will be asked for "
        f"{'them' if several else 'it'} afterwards.\n"
    )
    queried = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    text = (
        f"\nWhat {'are all' if several else 'is'} the {what} for {queried} mentioned in the text "
        "above?"
    )
    start = f"The {what} for {queried} mentioned in the text {'are' if several else 'is'}"
    return Task(before + hay, (Question(text, start, wanted, 128),))


# Variable tracking.


def variable_tracking(rng: random.Random, _: Sequence[str], size: int) -> Task:
    """RULER's vt: one chain of four hops in `size` lines of noise, after a short example."""
    taken: set[str] = set()
    context, question, start, names = _tracked(rng, 3, 10, taken)
    example = f"{context}{question}\n{start} {' '.join(names)}\n\n"
    context, question, start, names = _tracked(rng, 5, size, taken)
    return Task(example + context, (Question(question, start, tuple(names), 30),))


def _tracked(
    rng: random.Random, letter_count: int, line_count: int, taken: set[str]
) -> tuple[str, str, str, list[str]]:
    """Returns a context, a question, the start of its answer, and the variables that it wants."""
    names: list[str] = []
    while len(names) <= HOP_COUNT:
        name = "".join(rng.choices(string.ascii_uppercase, k=letter_count))
        if name not in taken:
            taken.add(name)
            names.append(name)
    value = str(rng.randrange(10_000, 100_000))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {new} = VAR {old}" for old, new in zip(names, names[1:], strict=False)]
    lines = [NOISE] * line_count
    # In order: an assignment comes after that of the variable which it uses.
    places = sorted((rng.randrange(line_count + 1) for _ in chain), reverse=True)
    for place, line in zip(places, reversed(chain), strict=True):
        lines.insert(place, line)
    context = "Track the chain of variable assignments hidden in the text below.\n\n" + "\n".join(
        lines
    )
    question = f"\nQuestion: Which variables in the text above are assigned the value {value}?"
    start = (
        "Answer: By the chain of variable assignments in the text above, "
        f"{HOP_COUNT + 1} variables are assigned the value {value}, they are:"
    )
    return context, question, start, names


# Words by frequency.


def common_words(short: bool) -> Maker:
    """Returns the maker of RULER's cwe: ten words that occur often, in a list of `size` words.

    Args:
        short: With 6 and 1 repetitions in place of 30 and 3.
    """
    example_counts = (20, 3, 1) if short else (40, 10, 3)
    counts = (6, 1) if short else (30, 3)

    def listed(rng: random.Random, size: int, often: int, rarely: int) -> tuple[str, list[str]]:
        known = words.usual()
        drawn = rng.sample(known if size <= len(known) else words.many(), size)
        common = drawn[:10]
        repeated = common * often + drawn[10:] * rarely
        rng.shuffle(repeated)
        head = (
            "Below is a numbered list of words. Some of them appear more often than others. "
            "Memorize those that appear most often.\n"
        )
        return head + _numbered(repeated), common

    def make(rng: random.Random, _: Sequence[str], size: int) -> Task:
        question = "\nQuestion: Which 10 words are the most common in the list above?"
        start = "Answer: The 10 words that appear most often in the list are:"
        shown, common = listed(rng, *example_counts)
        example = f"{shown}{question}\n{start} {_numbered(common)}\n\n"
        context, common = listed(rng, size, *counts)
        return Task(example + context, (Question(question, start, tuple(common), 120),))

    return make


def _numbered(listed: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))


def frequent_words(vocabulary: int) -> Maker:
    """Returns the maker of RULER's fwe: the three most frequent of coded words.

    The frequencies of `size` words follow a zeta distribution with exponent 2. The most frequent
    word is "...", which does not count.

    Args:
        vocabulary: Number of different coded words.
    """

    def make(rng: random.Random, _: Sequence[str], size: int) -> Task:
        coded: dict[str, None] = {"...": None}
        while len(coded) < vocabulary:
            coded["".join(rng.choices(string.ascii_lowercase, k=CODED_WORD_LENGTH))] = None
        text = [
            word
            for rank, word in enumerate(coded, 1)
            for _ in range(int(size / (ZETA_OF_2 * rank**2)))
        ]
        rng.shuffle(text)
        wanted = tuple(coded)[1:4]
        context = (
            "Count how often each coded word appears in the coded text below, and find the three "
            f"that appear most often. {' '.join(text)}"
        )
        question = (
            "\nQuestion: Ignore the dots '...', and explain nothing. Which three words appear most "
            "often in the coded text above?"
        )
        start = "Answer: By the coded text above, the three words that appear most often are:"
        return Task(context, (Question(question, start, wanted, 50),))

    return make
